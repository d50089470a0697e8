# SPDX-License-Identifier: Apache-2.0
"""The kernel of the classifiers here, and their number of inducing inputs: what works
on data that nobody tuned it for."""

from __future__ import annotations

import numpy as np
import numpyro
import numpyro.distributions as dist

from numpyro_gpaug import kernels

# With more columns than this, few rows cannot tell which of them matter, and a linear
# function takes more inducing inputs than there are.
FEW = 30


def kernel(columns: int) -> kernels.Kernel:
    """A smooth function; of few columns, plus a linear one, so that where the truth is
    linear little is lost to logistic regression. The values are point estimates under
    weak priors.

    Columns share a lengthscale, from which each departs as far as the data insist: free
    lengthscales overfit a few hundred rows. Weaker priors gain .004 nats where classes
    separate (wine, iris) and lose .013 where labels are noisy (breast cancer of the
    Raetsch sets). Where classes separate, test NLL falls with ever larger slopes, which
    the penalty of logistic regression allows and the bound does not; least of all that
    of a posterior of each class by itself. One of all of them jointly, at ten times the
    cost (AutoLatentGaussian), has .055 on wine for .064, and logistic regression .032.

    :param columns: number of them, standardised.
    """
    lengthscale = dist.LogNormal(0.5 * np.log(columns), 1)
    lengthscale = numpyro.sample("lengthscale", lengthscale)
    variance = numpyro.sample("variance", dist.LogNormal(1, 1))
    if columns > FEW:
        return kernels.Matern52(lengthscale, variance)
    relative = dist.LogNormal(0, 0.5).expand([columns]).to_event(1)
    lengthscale = lengthscale * numpyro.sample("relative", relative)
    slopes = numpyro.sample("slopes", dist.LogNormal(-np.log(columns), 1.5))
    smooth = kernels.Matern52(lengthscale, variance)
    return smooth + kernels.Linear(variance=slopes)


def num_inducing(X: np.ndarray, most: int | None = None) -> int:
    """How many inducing inputs; no more than there are different rows.

    :param X: the inputs, (N, D).
    :param most: 100 by default, twice as many for many columns: a function has more
        directions to vary in.
    """
    default = 100 if X.shape[1] <= FEW else 200
    return min(most or default, len(np.unique(X, axis=0)))
