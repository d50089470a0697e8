# SPDX-License-Identifier: Apache-2.0
"""Closed-form fits beside long NUTS runs of the same model, full processes.

``pytest -m slow -s tests/test_against_nuts.py`` prints the whole table.
"""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer import MCMC, NUTS

import numpyro_gpaug as gpaug
from tests.chains import sampled
from tests.problems import classifier, toy


def nuts_moments(X, y, variance: float, num_samples: int):
    """Mean and standard deviation of f at the data, and the worst Monte Carlo error of
    a mean in posterior standard deviations."""
    kernel = MCMC(
        NUTS(classifier), num_warmup=500, num_samples=num_samples, progress_bar=False
    )
    draws = sampled(kernel, jax.random.key(1), X, y, inducing=X, variance=variance)
    draws = np.asarray(draws["f"], np.float64)
    # Batch means: consecutive draws are correlated.
    batches = draws.reshape(50, -1, draws.shape[1]).mean(1)
    error = batches.std(0, ddof=1) / np.sqrt(50) / draws.std(0)
    return draws.mean(0), draws.std(0), error.max()


def fitted_moments(X, y, variance: float, sites: str):
    svi = gpaug.ConjugateSVI(classifier, gpaug.AutoSparseGP(classifier), None, sites)
    arguments = {"inducing": X, "variance": variance}
    result = svi.run(jax.random.key(0), 300, X, y, progress_bar=False, **arguments)
    f = svi.posterior(result).predict_f(X)
    return np.asarray(f.mean), np.sqrt(np.asarray(f.variance))


def compare(
    num: int, variance: float, num_samples: int, kinds=("exact", "augmented")
) -> dict[str, tuple]:
    """Worst error of a mean (in standard deviations) and of a standard deviation
    (relative), by kind of site; and the Monte Carlo error of the reference."""
    X, y = toy(num, dtype=jnp.float64)
    mean, deviation, noise = nuts_moments(X, y, variance, num_samples)
    rows: dict[str, tuple] = {"monte carlo": (noise,)}
    for sites in kinds:
        m, s = fitted_moments(X, y, variance, sites)
        rows[sites] = (
            np.abs((m - mean) / deviation).max(), np.abs(s / deviation - 1).max()
        )  # fmt: skip
    print(f"\nN={num} variance={variance:g}: " + str(rows))
    return rows


@pytest.mark.slow
@pytest.mark.parametrize("num", [100, 200])
@pytest.mark.parametrize("variance", [1.0, 4.0, 9.0])
def test_exact_sites_match_long_nuts(x64, num: int, variance: float) -> None:
    rows = compare(num, variance, 20000)
    assert rows["exact"][0] < 0.05 + 3 * rows["monte carlo"][0]
    assert rows["exact"][1] < 0.10


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
