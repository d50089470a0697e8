# SPDX-License-Identifier: Apache-2.0
"""One ``ConjugateSVI`` at several data sets gives what a new one gives for each."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import numpyro_gpaug as gpaug
from tests.conftest import slow

KEY = jax.random.key(0)
rng = np.random.default_rng(0)
X = rng.normal(size=(8, 2)).astype(np.float32)
Y = (X[:, 0] + 0.3 * rng.normal(size=8)).astype(np.float32)


def by_argument(X, y=None, *, unit):
    scale = numpyro.sample("scale", dist.LogNormal(np.float32(0) + unit, 1.0))
    w = numpyro.sample("w", dist.Normal(0, scale).expand([2]).to_event(1))
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", dist.Normal(X @ w, 0.5), obs=y)


def by_support(X, y=None, *, unit):
    scale = numpyro.sample("scale", dist.Uniform(0.0, unit))
    w = numpyro.sample("w", dist.Normal(0, scale).expand([2]).to_event(1))
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", dist.Normal(X @ w, 0.5), obs=y)


def by_weights(X, y=None, *, unit):
    w = numpyro.sample("w", dist.Normal(unit, 1.0).expand([2]).to_event(1))
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", dist.Laplace(X @ w, 0.5), obs=y)


def by_size(X, y=None, *, unit):
    """The unit is the number of weights, and of members of a plate."""
    w = numpyro.sample("w", dist.Normal(0, 1).expand([unit]).to_event(1))
    with numpyro.plate("groups", unit):
        scale = numpyro.sample("scale", dist.LogNormal(0, 1))
    with numpyro.plate("data", len(X)):
        fn = dist.Normal(X[:, :unit] @ w, scale[jnp.arange(len(X)) % unit])
        numpyro.sample("y", fn, obs=y)


@pytest.mark.parametrize(
    ("model", "units", "guide"),
    [
        # Arrays are traced, plain numbers are not.
        slow(by_argument, (np.float32(0), np.float32(3)), gpaug.AutoLatentGaussian),
        (by_argument, (0.0, 3.0), gpaug.AutoSparseGP),
        slow(by_support, (np.float32(2), np.float32(9)), gpaug.AutoLatentGaussian),
        slow(by_weights, (np.float32(0), np.float32(3)), gpaug.AutoSparseGP),
        (by_size, (1, 2), gpaug.AutoSparseGP),
        slow(by_size, (1, 2), gpaug.AutoLatentGaussian),
    ],  # fmt: skip
)
def test_other_data_start_where_a_new_fit_does(model, units, guide):
    def made():
        return gpaug.ConjugateSVI(model, guide(model))

    used, new = made(), {unit: made() for unit in units}
    for unit in (*units, units[0]):
        found, expected = (
            svi.get_params(svi.init(KEY, X, Y, unit=unit)) for svi in (used, new[unit])
        )
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            np.testing.assert_allclose(found[name], value, rtol=1e-5, err_msg=name)
    # And its steps are in the same coordinates.
    options = {"unit": units[1], "progress_bar": False}
    ends = [svi.run(KEY, 3, X, Y, **options).losses for svi in (used, new[units[1]])]
    np.testing.assert_allclose(ends[0], ends[1], rtol=1e-5)


def by_flag(X, y=None, *, counts):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([2]).to_event(1))
    with numpyro.plate("data", len(X)):
        eta = X @ w
        fn = dist.Poisson(jnp.exp(eta)) if counts else dist.Normal(eta, 0.5)
        numpyro.sample("y", fn, obs=y)


def test_a_flag_chooses_another_likelihood() -> None:
    def fit(svi, counts):
        y = np.abs(Y).astype(int) if counts else Y
        result = svi.run(KEY, 5, X, y, counts=counts, progress_bar=False)
        return svi.posterior(result), result.losses

    def made():
        return gpaug.ConjugateSVI(by_flag, gpaug.AutoLatentGaussian(by_flag))

    used = made()
    before, _ = fit(used, counts=False)
    expected = before.predict_y(X).mean
    _, losses = fit(used, counts=True)
    np.testing.assert_allclose(losses, fit(made(), counts=True)[1], rtol=1e-5)
    with pytest.raises(ValueError, match="has another likelihood with these arg"):
        before.predict_y(X, counts=True)
    np.testing.assert_array_equal(before.predict_y(X).mean, expected)
