# SPDX-License-Identifier: Apache-2.0
"""Gaussian processes as sites of a model, their kernels and inducing inputs."""

from numpyro_gpaug.gp.process import GaussianProcess, with_residual

__all__ = ["GaussianProcess", "with_residual"]
