# SPDX-License-Identifier: Apache-2.0
"""The kernel of the classifiers here: what works on data that nobody tuned it for."""

from __future__ import annotations

import numpy as np
import numpyro
import numpyro.distributions as dist

from numpyro_gpaug import kernels

# With more columns than this, few rows cannot tell which of them matter.
MOST_LENGTHSCALES = 30


def kernel(columns: int) -> kernels.Kernel:
    """A smooth function plus a linear one, so that where the truth is linear nothing is
    lost to logistic regression. The values are point estimates under weak priors.

    Columns share a lengthscale, from which each departs as far as the data insist: free
    lengthscales overfit a few hundred rows.

    :param columns: number of them, standardised.
    """
    lengthscale = dist.LogNormal(0.5 * np.log(columns), 1)
    lengthscale = numpyro.sample("lengthscale", lengthscale)
    if columns <= MOST_LENGTHSCALES:
        relative = dist.LogNormal(0, 0.5).expand([columns]).to_event(1)
        lengthscale = lengthscale * numpyro.sample("relative", relative)
    variance = numpyro.sample("variance", dist.LogNormal(1, 1))
    slopes = numpyro.sample("slopes", dist.LogNormal(-np.log(columns), 1.5))
    smooth = kernels.Matern52(lengthscale, variance)
    return smooth + kernels.Linear(variance=slopes)
