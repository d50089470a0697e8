# SPDX-License-Identifier: Apache-2.0
"""Priors far wider than what data say, and data far from their prior, in float32."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import numpyro_gpaug as gpaug
from numpyro_gpaug.errors import CholeskyError
from numpyro_gpaug.gaussians.base import Layout
from numpyro_gpaug.gaussians.chain import Chain
from numpyro_gpaug.gaussians.dense import NaturalGaussian
from numpyro_gpaug.gaussians.groups import Groups
from numpyro_gpaug.guides import latent_gaussian
from numpyro_gpaug.infer.vi.resolution import (
    LOST,
    inflated_and_displaced,
    warn_of_lost,
)
from tests.conftest import assert_close, slow, slow_in_double

LIKELIHOODS = {
    "normal": lambda f: dist.Normal(f, 0.5),
    "bernoulli": lambda f: dist.Bernoulli(logits=f),
    "poisson": lambda f: dist.Poisson(jnp.exp(f)),
}


def linear(x, y=None, *, width, likelihood):
    b = numpyro.sample("b", dist.Normal(0, width))
    w = numpyro.sample("w", dist.Normal(0, width).expand([2]).to_event(1))
    with numpyro.plate("data", len(x)):
        numpyro.sample("y", LIKELIHOODS[likelihood](b + x @ w), obs=y)


def data(kind, likelihood):
    z = np.random.default_rng(0).normal(size=30).astype("float32")
    x = {"plain": [z, z**2], "twice": [z, z], "levels": [z > 0, z <= 0]}[kind]
    y = {"normal": z, "bernoulli": z + z**2 > 0.3}.get(likelihood, z > 0)
    return np.stack(x, 1).astype("float32"), y.astype(z.dtype if y is z else int)


def fitter():
    return gpaug.ConjugateSVI(linear, gpaug.AutoLatentGaussian(linear))


def run(svi, kind, likelihood, width, **options):
    options |= {
        "width": np.asarray(width, "float32"),
        "likelihood": likelihood,
        "progress_bar": False,
    }
    return svi.run(jax.random.key(0), 50, *data(kind, likelihood), tol=1e-4, **options)


# Losses of fits in float64.
LOSSES = {
    ("plain", "normal", 1e4): 41.3386,
    ("levels", "normal", 10.0): 30.5450,
    ("levels", "bernoulli", 1e4): 36.8115,
    ("twice", "poisson", 1e3): 35.6095,
}


@pytest.mark.parametrize(
    ("kind", "likelihood", "width"),
    [slow(*case) if "poisson" in case else case for case in LOSSES],
)
def test_wide_priors_are_those_of_float64(kind, likelihood, width):
    result = run(fitter(), kind, likelihood, width)
    np.testing.assert_allclose(
        result.losses[-1], LOSSES[kind, likelihood, width], rtol=1e-4
    )
    assert float(result.state.lost) < 1e-3
    assert "converged" in repr(result)


def test_sites_under_wide_priors_are_those_of_exact_algebra(tmp_path):
    width, svi = 1e4, fitter()
    before = run(svi, "plain", "normal", width)
    kept = svi.posterior(before)["w"].mean
    result = run(svi, "twice", "normal", width)
    x, y = data("twice", "normal")
    design = np.concatenate([np.ones((len(x), 1)), x], 1).astype(float)
    precision = design.T @ design / 0.25 + np.eye(3) / width**2
    covariance = np.linalg.inv(precision)
    mean = covariance @ design.T @ y / 0.25
    posterior = svi.posterior(result)
    posterior.save(tmp_path / "fit.npz")
    for each in (posterior, gpaug.Posterior.load(tmp_path / "fit.npz", linear)):
        w, b = each["w"], each["b"]
        np.testing.assert_allclose(b.mean, mean[0], atol=1e-3)
        np.testing.assert_allclose(b.variance, covariance[0, 0], rtol=1e-2)
        np.testing.assert_allclose(w.mean.sum(), mean[1:].sum(), rtol=1e-3)
        np.testing.assert_allclose(w.variance, np.diag(covariance)[1:], rtol=1e-3)
    # The guide draws from the same Gaussian.
    given = {"width": np.asarray(width, "float32"), "likelihood": "normal"}
    draws = jax.jit(
        lambda params: svi.guide.sample_posterior(
            jax.random.key(1), params, x, y, sample_shape=(200,), **given
        )
    )(result.params)
    values = draws["b"][:, None] + draws["w"] @ x.T
    assert np.abs(np.asarray(values).mean(0) - design @ mean).max() < 0.1
    # An earlier fit, in another basis, is read correctly.
    np.testing.assert_allclose(svi.posterior(before)["w"].mean, kept, rtol=1e-4)
    with pytest.raises(ValueError, match="another basis of the latents than the guide"):
        run(svi, "plain", "normal", width, init_state=before.state)


@pytest.mark.parametrize("width", [2e3, 1e4])
def test_integrated_sites_under_wide_priors_are_those_of_exact_algebra(width):
    """Rounding of the first precision moves its means, or it does not factorise."""
    x, y = data("twice", "normal")
    nested = gpaug.NestedVI(linear, num_points=128, progress_bar=False)
    given = {"width": np.asarray(width, "float32"), "likelihood": "normal"}
    nested.run(jax.random.key(0), x, y, **given)
    assert nested.certified
    design = np.concatenate([np.ones((len(x), 1)), x], 1).astype(float)
    covariance = np.linalg.inv(design.T @ design / 0.25 + np.eye(3) / width**2)
    mean = covariance @ design.T @ y / 0.25
    draws = nested.get_samples(weighted=True)["w"].sum(-1)
    assert abs(draws.mean() - mean[1:].sum()) < 0.05
    w = nested.posterior()["w"]
    np.testing.assert_allclose(w.mean.sum(), mean[1:].sum(), atol=1e-3)
    np.testing.assert_allclose(w.variance, np.diag(covariance)[1:], rtol=1e-3)


@pytest.mark.parametrize(
    ("kind", "likelihood", "width"),
    [("twice", "normal", 1e3), ("levels", "bernoulli", 1e4), ("twice", "poisson", 1e3)],
)
def test_what_rounding_loses_is_told(kind, likelihood, width, monkeypatch):
    monkeypatch.setattr(latent_gaussian, "MOST_TURNED", 0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            said = repr(run(fitter(), kind, likelihood, width))
            assert "limited by rounding" in said
        except CholeskyError as error:
            said = str(error)
    said += "".join(str(each.message) for each in caught)
    assert "'w'] compensate for each other, under priors" in said


@slow_in_double
def test_inflation_is_that_of_the_dense_precision(dtype):
    rng = np.random.default_rng(0)
    groups, each, corner, steps = 6, 2, 3, 3
    layout = Layout(groups, each, corner, steps)
    links = rng.normal(size=(groups // steps, steps, each, each)).astype(dtype)
    links[:, 0] = 0
    forms = Groups(layout), Chain(layout)
    priors = [form.prior(dtype, jnp.asarray(links)) for form in forms]
    own = jnp.asarray(rng.normal(size=(1, groups, each, each)), dtype)
    border = 0.3 * rng.normal(size=(1, groups, each, corner)).astype(dtype)

    @jax.jit
    def both(prior):
        natural = prior.natural
        natural = natural._replace(
            groups=natural.groups + own @ own.mT, border=natural.border + border,
            corner=natural.corner + 3 * jnp.eye(corner, dtype=dtype),
        )  # fmt: skip
        q = natural.moments()
        inflated, _ = inflated_and_displaced(natural, q)
        return inflated, q.unwhiten(jnp.eye(q.rank, dtype=dtype))

    for prior in priors:
        found, rows = both(prior)
        covariance = np.asarray(rows, float).T @ np.asarray(rows, float)
        expected = np.diag(covariance) * np.diag(np.linalg.inv(covariance))
        assert_close(found, expected[None], factor=100)


def locations(x, g, y=None, *, noise):
    b = numpyro.sample("b", dist.Normal(0, 1))
    tau = numpyro.sample("tau", dist.LogNormal(0, 1.5))
    v = numpyro.sample("v", dist.Normal(0, 1).expand([2]).to_event(1))
    with numpyro.plate("groups", 20):
        a = numpyro.sample("a", dist.Normal(b, tau))
    with numpyro.plate("data", len(g)):
        numpyro.sample("y", dist.Normal(a[g], noise * jnp.exp(x @ v)), obs=y)


@pytest.fixture(scope="module")
def far():
    """Data a hundred deviations from their prior, and what a first evaluation of the
    collapsed bound leaves."""
    rng = np.random.default_rng(0)
    x, g = rng.normal(size=(60, 2)), rng.integers(0, 20, 60)
    y = rng.normal(0, 1, 20)[g] + 0.3 * np.exp(0.5 * x[:, 0]) * rng.normal(size=60)
    svi = gpaug.ConjugateSVI(locations, gpaug.AutoLatentGaussian(locations))

    def evaluated(log_tau, noise, centre):
        given = x.astype("float32"), g, (centre + y).astype("float32")
        options = {"noise": np.float32(noise)}
        start = {"tau_auto_loc": jnp.exp(jnp.float32(log_tau))}
        state = svi.init(jax.random.key(0), *given, init_params=start, **options)
        return *svi.update(state, *given, **options), svi.guide.structure

    return evaluated


def slope(state):
    return float(state.hyper.optim_state.gradient[0])


def test_gradients_are_right_where_data_are_far_from_their_prior(far):
    step = 0.05
    losses = [far(4 + sign * step, 0.1, 100)[1] for sign in (1, -1)]
    expected = float(losses[1] - losses[0]) / (2 * step)
    found = slope(far(4, 0.1, 100)[0])
    np.testing.assert_allclose(found, expected, rtol=0.02, atol=0.1)


# Expected slopes are from float64.
@pytest.mark.parametrize(
    ("log_tau", "noise", "centre", "expected"),
    [(3, 0.1, 100, 349.493), (4, 1, 1000, 5290.04)],
)
def test_gradients_are_right_where_groups_and_their_mean_compensate_each_other(
    far, log_tau, noise, centre, expected
):
    found = slope(far(log_tau, noise, centre)[0])
    np.testing.assert_allclose(found, expected, rtol=0.002)


def test_means_that_rounding_moves_are_told(far):
    state, _, structure = far(4, 0.03, 100)
    with pytest.warns(UserWarning, match=r"\['b', 'a'\] are up to .*Centre the resp"):
        warn_of_lost(state.lost, state.natural, structure)
    assert far(4, 0.1, 100)[0].lost < LOST


def test_what_rounded_potentials_lose_is_what_their_means_do():
    rng = np.random.default_rng(0)
    sums = 1e3 * np.ones((4, 4)) + np.eye(4)
    means = 1e3 * rng.normal(size=(200, 4))
    natural = NaturalGaussian(
        np.float32(means @ sums), np.broadcast_to(np.float32(sums), (200, 4, 4))
    )
    off = np.asarray(natural.potential, float) @ np.linalg.inv(sums) - means
    nats = 0.5 * np.einsum("ni,ij,nj->n", off, sums, off)
    # The error of a number is .3 to .6 of the largest error in its binade. Sums over
    # rows, of which potentials and precisions consist, lose about twelve times as much.
    both = jax.jit(lambda natural: inflated_and_displaced(natural, natural.moments()))
    _, displaced = both(natural)
    assert 12 < displaced.sum() / nats.sum() < 48


def test_a_step_that_has_to_be_very_short_does_not_end_the_moves(far):
    assert far(1.5, 0.01, 10)[1] < 1e5


def test_small_effects_beside_a_level_far_away_are_kept():
    def model(x, y=None):
        level = numpyro.sample("level", dist.Normal(0, 1e5))
        w = numpyro.sample("w", dist.Normal(0, 1).expand([4]).to_event(1))
        with numpyro.plate("data", len(x)):
            numpyro.sample("y", dist.Normal(level + x @ w, 0.1), obs=y)

    rng = np.random.default_rng(0)
    x = (0.1 + 0.1 * rng.normal(size=(30, 4))).astype("float32")
    y = (5e4 + x @ [1, -1, 2, 0] + 0.1 * rng.normal(size=30)).astype("float32")
    svi = gpaug.ConjugateSVI(model, gpaug.AutoLatentGaussian(model))
    fit = svi.run(jax.random.key(0), 20, x, y, progress_bar=False)
    assert svi.guide.structure.basis is not None
    found = svi.posterior(fit)["w"]
    centred = x.astype(float) - x.mean(0)
    covariance = np.linalg.inv(np.eye(4) + centred.T @ centred / 0.01)
    mean = covariance @ centred.T @ (y.astype(float) - y.mean()) / 0.01
    sd = np.sqrt(np.diag(covariance))
    np.testing.assert_allclose(found.mean, mean, atol=0.02 * sd.min())
    np.testing.assert_allclose(np.sqrt(found.variance), sd, rtol=0.01)


def test_samplers_of_a_collapsed_model_are_told_of_rounding():
    def model(x, y):
        w = numpyro.sample("w", dist.Normal(0, 1e3).expand([2]).to_event(1))
        sd = numpyro.sample("sd", dist.HalfNormal(1))
        with numpyro.plate("data", len(x)):
            numpyro.sample("y", dist.Normal(w[0] + w[1] * x, sd), obs=y)

    collapsed = gpaug.collapse(model)
    days, y = np.arange(20, dtype="float32"), np.zeros(20, "float32")
    density = numpyro.infer.util.log_density
    density(collapsed, (days, y), {}, {"sd": jnp.ones(())})
    with pytest.warns(UserWarning, match="rounding makes the collapsed bound"):
        density(collapsed, (days + 19000, y), {}, {"sd": jnp.ones(())})


def test_directions_that_float32_just_resolves():
    """Of a year and its square, as they are, the data know the curvature."""
    year, group = np.tile(np.arange(2000, 2010.0), 20), np.repeat(np.arange(20), 10)
    rng = np.random.default_rng(0)
    y = 0.1 * (year - 2005) + rng.normal(size=20)[group] + 0.3 * rng.normal(size=200)

    def model(columns, group, y=None):
        level = numpyro.sample("level", dist.Normal(0, 1e5))
        b = numpyro.sample("b", dist.Normal(0, np.array([100.0, 1.0])).to_event(1))
        with numpyro.plate("groups", 20):
            u = numpyro.sample("u", dist.Normal(0, 1))
        with numpyro.plate("data", len(group)):
            f = numpyro.deterministic("f", level + columns @ b + u[group])
            numpyro.sample("y", dist.Normal(f, 0.3), obs=y)

    data = np.stack([year, year**2], 1), group
    svi = gpaug.ConjugateSVI(model, gpaug.AutoLatentGaussian(model), None)
    fit = svi.run(jax.random.key(0), 20, *data, y, progress_bar=False)
    f = svi.posterior(fit).predict_f(*data, site="f")
    # With centred columns, priors as wide as these are flat.
    columns = np.vander(year - 2004.5, 3)
    design = np.concatenate([columns, np.eye(20)[group]], 1)
    precision = np.diag([0.0] * 3 + [1.0] * 20) + design.T @ design / 0.09
    covariance = design @ np.linalg.solve(precision, design.T)
    deviation = np.sqrt(np.diag(covariance))
    np.testing.assert_allclose(np.sqrt(f.variance), deviation, rtol=0.02)
    off = (f.mean - covariance @ y / 0.09) / deviation
    np.testing.assert_allclose(off, 0, atol=0.1)


@pytest.mark.parametrize("kernel", ["sum", "jitter", "weights"])
def test_covariances_that_are_rounded(kernel):
    """With a linear kernel, or a jitter, they have the rounding errors of the prior
    variance, which are as large as the variance of the noise."""
    x = np.linspace(1000, 1100, 40)
    smooth = gpaug.kernels.Matern52(8.0)
    given = {
        "sum": smooth + gpaug.kernels.Linear(10.0), "jitter": 1e6 * smooth,
        "weights": smooth,
    }[kernel]  # fmt: skip

    def model(x, y=None, *, inducing):
        slope = numpyro.sample("slope", dist.Normal(0, 10**0.5))
        jitter = 1e-3 if kernel == "jitter" else None
        gp = gpaug.GaussianProcess("f", given, inducing, jitter=jitter)
        with numpyro.plate("data", len(x)):
            numpyro.sample("y", dist.Normal(gp(x) + slope * x, 0.1), obs=y)

    svi = gpaug.ConjugateSVI(model, gpaug.AutoLatentGaussian(model), None)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        svi.run(jax.random.key(0), 3, x, 3 * x, progress_bar=False, inducing=x)
    named = ["covariances of 'f'" in str(w.message) for w in caught]
    assert any(named) == (kernel != "weights")
