# SPDX-License-Identifier: Apache-2.0
"""Leave-one-out predictions in closed form, against fits without the row."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from scipy import stats

import numpyro_gpaug as gpaug
from tests.models import gram
from tests.problems import regression, toy, unfitted

KEY = jax.random.key(0)
pytestmark = pytest.mark.usefixtures("x64")
X, _ = toy(40, dtype=np.float64)
VALUES = np.sin(2 * X[:, 0]) + 0.5 * np.random.default_rng(1).normal(size=40)
# Fewer than rows: the residual of a function value is in no factor.
Z = X[:12]


@cache
def fitted():
    svi = gpaug.ConjugateSVI(regression, gpaug.AutoSparseGP(regression), None)
    return svi.posterior(svi.run(KEY, 50, X, VALUES, inducing=Z, progress_bar=False))


def test_it_is_exact_for_normal_likelihoods() -> None:
    posterior = fitted()
    left_out = posterior.leave_one_out(X, VALUES).log_prob(VALUES)
    kernel = gpaug.kernels.Matern52()
    cross = gram(kernel, Z, X)
    A = np.linalg.solve(np.linalg.cholesky(gram(kernel, Z, Z)), cross)
    for row in range(40):
        others = np.arange(40) != row
        covariance = np.linalg.inv(np.eye(12) + 4 * A[:, others] @ A[:, others].T)
        mean = A[:, row] @ covariance @ A[:, others] @ VALUES[others] * 4
        variance = 1.25 + A[:, row] @ (covariance - np.eye(12)) @ A[:, row]
        expected = stats.norm(mean, variance**0.5).logpdf(VALUES[row])
        np.testing.assert_allclose(left_out[row], expected, atol=1e-8)
    streamed = posterior.leave_one_out(X, VALUES, batch_size=16)
    np.testing.assert_allclose(streamed.log_prob(VALUES), left_out, atol=1e-10)


def test_rows_of_no_fit_are_refused(tmp_path) -> None:
    posterior = fitted()
    posterior.save(tmp_path / "fit.npz")
    for of_rows in (posterior, gpaug.Posterior.load(tmp_path / "fit.npz", regression)):
        of_rows.leave_one_out(X, y=jnp.float32(VALUES))
        with pytest.raises(ValueError, match="rows that it was fitted to"):
            of_rows.leave_one_out(X + 1e-3, VALUES)
    with pytest.raises(ValueError, match="needs the observations"):
        posterior.leave_one_out(X)


GROUP = np.arange(40) % 20
COUNTS = np.random.default_rng(2).poisson(np.exp(0.5 + 0.5 * X[:, 0]))


def test_a_joint_gaussian_is_near_refits() -> None:
    """Two predictors of each datum; for one see test_groups_left_out.py."""

    def model(group, x, keep, y=None):
        slopes = numpyro.sample("slopes", dist.Normal(0, 1).expand([2]))
        with numpyro.plate("groups", 20):
            effect = numpyro.sample("effect", dist.Normal(0, 0.7))
        f, g = (slope * x + effect[group] for slope in slopes)
        with numpyro.plate("data", len(x)), numpyro.handlers.mask(mask=keep):
            numpyro.sample("y", dist.Normal(f, jnp.exp(g / 4 - 0.5)), obs=y)

    svi = gpaug.ConjugateSVI(model, gpaug.AutoLatentGaussian(model), None)

    def fitted(keep):
        given = GROUP, X[:, 0], keep, VALUES
        return svi.posterior(svi.run(KEY, 100, *given, progress_bar=False))

    data = GROUP, X[:, 0], np.ones(40, bool), VALUES
    posterior = fitted(data[2])
    found = posterior.leave_one_out(*data)
    # Densities know that the nodes are those of so many predictors.
    assert found.dimensions == 2
    left_out = found.log_prob(VALUES)
    inside = posterior.log_prob(*data)
    # Whatever other rows are predicted, a datum has its own two predictors.
    alone = posterior.log_prob(*(np.full(40, x[17]) for x in data))
    np.testing.assert_allclose(alone, inside[17], atol=1e-9)
    for row in (3, 17, 30):
        expected = float(fitted(np.arange(40) != row).log_prob(*data)[row])
        assert float(left_out[row]) == pytest.approx(expected, abs=0.2)
        assert abs(inside[row] - expected) > 2 * abs(left_out[row] - expected)


def test_what_has_no_factor_for_each_observation_is_refused() -> None:
    def model(x, y=None):
        with numpyro.plate("data", len(x)):
            own = numpyro.sample("own", dist.Normal(0, 1))
            numpyro.sample("y", dist.Poisson(jnp.exp(own)), obs=y)

    svi = gpaug.ConjugateSVI(model, gpaug.AutoLatentGaussian(model), None)
    posterior = unfitted(svi, X[:, 0], COUNTS)
    with pytest.raises(gpaug.NotConjugateError, match=r"the latents \['own'\]"):
        posterior.leave_one_out(X[:, 0], COUNTS)


@pytest.mark.parametrize("shared", ["level", "groups", "rows"])
def test_data_that_share_a_predictor_are_not_left_out_one_by_one(shared) -> None:
    def model(y=None):
        level = numpyro.sample("level", dist.Normal(0, 1))
        effect = numpyro.sample("effect", dist.Normal(jnp.zeros(4), 1).to_event(1))
        if shared == "groups":
            rate = jnp.exp(level + effect)[np.arange(40) % 4]
            numpyro.sample("y", dist.Poisson(rate), obs=y)
        elif shared == "level":
            numpyro.sample(
                "y", dist.StudentT(4, level, jnp.ones(40)).to_event(1), obs=y
            )
        else:
            numpyro.sample(
                "y", dist.Normal((level + effect)[:, None], jnp.ones(10)), obs=y
            )

    y = COUNTS.reshape(4, 10) if shared == "rows" else COUNTS
    svi = gpaug.ConjugateSVI(model, gpaug.AutoLatentGaussian(model), None)
    posterior = unfitted(svi, y)
    with pytest.raises(gpaug.NotConjugateError, match=r"exp\(effect\[group\]\)"):
        posterior.leave_one_out(y)


def test_errors_of_quadrature_are_per_datum_where_data_share_a_predictor() -> None:
    def shared(y=None):
        level = numpyro.sample("level", dist.Normal(0, 3))
        numpyro.sample("y", dist.AsymmetricLaplace(level, jnp.full(400, 0.3)), obs=y)

    y = np.random.default_rng(0).normal(size=400)
    svi = gpaug.ConjugateSVI(shared, gpaug.AutoLatentGaussian(shared), None)
    posterior = svi.posterior(svi.run(KEY, 5, y, progress_bar=False))
    assert posterior.quadrature_errors["y"] < 1e-3
