# SPDX-License-Identifier: Apache-2.0
"""Inference: closed-form updates, analytic bounds, and exact samplers."""

from numpyro_gpaug.infer import mcmc, nested, vi
from numpyro_gpaug.infer.mcmc import *  # noqa: F403
from numpyro_gpaug.infer.nested import *  # noqa: F403
from numpyro_gpaug.infer.vi import *  # noqa: F403

__all__ = mcmc.__all__ + nested.__all__ + vi.__all__
