# SPDX-License-Identifier: Apache-2.0
"""NUTS of NumPyro on models with processes, in float32."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer import MCMC, NUTS

import numpyro_gpaug as gpaug


def smooth_counts(x, y=None, *, inducing):
    scale = numpyro.sample("scale", dist.LogNormal(0, 0.5))
    level = numpyro.sample("level", dist.Normal(0, 2))
    kernel = gpaug.kernels.SquaredExponential(scale)
    gp = gpaug.GaussianProcess("f", kernel, inducing, jitter=1e-5)
    with numpyro.plate("data", len(x)):
        numpyro.sample("y", dist.Poisson(jnp.exp(level + gp(x))), obs=y)


@pytest.mark.slow
@pytest.mark.parametrize("num", [15, 25])
def test_nuts_moves_in_float32_with_the_jitter_of_the_checklist(num: int) -> None:
    """With the smallest jitter that factorises, its steps are 1e-6 and the chain does
    not move.
    """
    rng = np.random.default_rng(8)
    x = np.sort(rng.uniform(-3, 3, 400)).astype("float32")
    y = rng.poisson(np.exp(1 + np.sin(1.5 * x)))
    Z = np.linspace(-3, 3, num, dtype="float32")[:, None]
    nuts = NUTS(smooth_counts, max_tree_depth=6)
    kernel = MCMC(nuts, num_warmup=150, num_samples=100, progress_bar=False)
    fields = ("adapt_state.step_size",)
    kernel.run(jax.random.key(2), x[:, None], y, inducing=Z, extra_fields=fields)
    assert kernel.get_extra_fields()[fields[0]][-1] > 1e-3
    assert kernel.get_samples()["scale"].std() > 0.01
