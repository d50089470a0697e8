# SPDX-License-Identifier: Apache-2.0
"""ArviZ trees, importance ratios, LOO and calibration."""

import subprocess
import sys
import warnings
from functools import cache

import arviz_stats
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
import xarray
from jax import random
from numpyro.infer.svi import SVIRunResult
from scipy import stats
from sklearn.calibration import calibration_curve
from sklearn.metrics import brier_score_loss

import numpyro_gpaug as gpaug
from numpyro_gpaug import diagnostics
from numpyro_gpaug.diagnostics._arviz import part_of_arviz, tree_of
from tests.models import gram

NOISE = 0.7


def data(size=20, seed=0):
    rng = np.random.default_rng(seed)
    X = np.linspace(-3, 3, size)[:, None] + rng.uniform(0, 0.1, (size, 1))
    f = np.sin(2 * X[:, 0])
    return X, f + NOISE * rng.normal(size=size), (rng.uniform(size=size) < 0.5 + f / 2)


def kernel(lengthscale=1.5):
    return gpaug.kernels.Matern52(lengthscale=lengthscale)


def regression(X, y=None, Z=None):
    gp = gpaug.GaussianProcess("f", kernel(), inducing=X if Z is None else Z)
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(gp(X), NOISE), obs=y)


def classification(X, y=None, Z=None):
    gp = gpaug.GaussianProcess("f", kernel(), inducing=X if Z is None else Z)
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=gp(X)), obs=y)


def learnt(X, y=None):
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 0.5))
    gp = gpaug.GaussianProcess("f", kernel(lengthscale), inducing=X[::2])
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=gp(X)), obs=y)


def projection(X, Z):
    """A and the residual variances."""
    K = gram(kernel(), Z, Z) + 1e-10 * np.eye(len(Z))
    A = np.linalg.solve(np.linalg.cholesky(K), gram(kernel(), Z, X))
    return A, np.maximum(1 - np.square(A).sum(0), 0)


def gaussian(X, y, Z):
    """The posterior of regression as the guide's params, and as a distribution."""
    A, _ = projection(X, Z)
    precision, potential = np.eye(len(Z)) + A @ A.T / NOISE**2, A @ y / NOISE**2
    covariance = np.linalg.inv(precision)
    q = stats.multivariate_normal(covariance @ potential, covariance)
    return {"f.v_auto_potential": potential, "f.v_auto_precision": precision}, q


@cache
def guide_of(model, num_samples):
    """Trees of one guide share a program."""
    return gpaug.AutoSparseGP(model)


def draws(model, params, *args, num_samples=5, guide=None, **kwargs):
    guide = guide_of(model, num_samples) if guide is None else guide
    return diagnostics.to_datatree(
        random.key(1), model, guide, params, *args, num_samples=num_samples, **kwargs
    )


@pytest.fixture(scope="module")
def exact():
    """Data, and a tree from the exact posterior of a full process."""
    with jax.enable_x64(True):
        X, y, _ = data()
        params, _ = gaussian(X, y, X)
        losses = np.array([2.0, 1.0])
        tree = draws(regression, params, X, y, num_samples=4000, losses=losses)
    return X, y, tree


@cache
def sparse_tree(model):
    """Five draws of the same Gaussian for any model, of five inducing inputs."""
    X, y, labels = data()
    params, _ = gaussian(X, y, X[::4])
    with pytest.MonkeyPatch.context() as patch:
        if model is regression:  # in chunks of 2, 2 and 1
            patch.setattr(diagnostics._run, "_BUDGET", 2 * 20 * 32)
            return draws(model, params, X, y, Z=X[::4])
        return draws(model, params, X, labels, Z=X[::4])


@cache
def wide_tree():
    """Draws of a guide that is too wide, by 10% in every direction."""
    X, y, _ = data()
    params, _ = gaussian(X, y, X)
    wide = {name: value / 1.21 for name, value in params.items()}
    return draws(regression, wide, X, y, num_samples=4000)


def flat(tree, name):
    return tree["sample_stats"][name].values[0]


# -- the tree -------------------------------------------------------------------------


def test_tree_has_the_groups_dims_and_values_of_arviz(exact):
    X, y, tree = exact
    sizes = {"chain": 1, "draw": 4000, "data": 20}
    for group in ("posterior_predictive", "log_likelihood"):
        assert dict(tree[group].sizes) == sizes
        assert set(tree[group].data_vars) == {"y"}
    assert dict(tree["posterior"].sizes) == {**sizes, "f.v_dim_0": 20}
    assert set(tree["posterior"].data_vars) == {"f", "f.v"}
    assert tree["posterior"]["f"].dims == ("chain", "draw", "data")
    assert set(tree["sample_stats"].data_vars) == {"log_p", "log_q"}
    assert tree["sample_stats"]["log_p"].dims == ("chain", "draw")
    np.testing.assert_array_equal(tree["observed_data"]["y"].values, y)
    assert tree["fit"]["losses"].dims == ("step",)
    K = gram(kernel(), X, X)
    mean = K @ np.linalg.solve(K + NOISE**2 * np.eye(20), y)
    summary = arviz_stats.summary(tree, var_names=["f"], round_to="none")
    np.testing.assert_allclose(summary["mean"], mean, atol=0.03)
    replicated = tree["posterior_predictive"]["y"].values
    np.testing.assert_allclose(replicated.mean((0, 1)), mean, atol=0.05)


@pytest.mark.parametrize("suffix", ["nc", "zarr"])
def test_trees_are_written_and_read(suffix, tmp_path) -> None:
    pytest.importorskip({"nc": "h5netcdf", "zarr": "zarr"}[suffix])
    draws = np.random.default_rng(0).normal(size=(1, 100, 6))
    groups = {
        "posterior": {"in/side": draws, "tau": draws[..., 0].astype("float32")},
        "log_likelihood": {"y": -draws},
        "observed_data": {"y": np.arange(6)},
    }
    tree, path = tree_of(groups, {"y": ["data"]}), tmp_path / f"tree.{suffix}"
    if suffix == "nc":
        tree.to_netcdf(path)
    else:
        tree.to_zarr(path, consolidated=False)
    how = {} if suffix == "nc" else {"engine": "zarr", "consolidated": False}
    with xarray.open_datatree(path, **how) as found:
        assert found.identical(tree)
        assert diagnostics.loo(found).elpd == diagnostics.loo(tree).elpd


@pytest.mark.parametrize("model", [regression, classification])
def test_log_likelihood_and_log_p_integrate_the_residual(x64, model):
    X, y, labels = data()
    Z = X[::4]
    _, q = gaussian(X, y, Z)
    tree = sparse_tree(model)
    v = tree["posterior"]["f.v"].values[0]
    A, r = projection(X, Z)
    m = v @ A
    if model is regression:
        expected = stats.norm.logpdf(y, m, np.sqrt(NOISE**2 + r))
    else:
        z, w = np.polynomial.hermite_e.hermegauss(60)
        f = m[..., None] + np.sqrt(r)[:, None] * z
        p = (1 / (1 + np.exp(-f))) @ (w / w.sum())
        expected = np.log(np.where(labels, p, 1 - p))
    found = tree["log_likelihood"]["y"].values[0]
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    prior = stats.norm.logpdf(v).sum(1)
    np.testing.assert_allclose(flat(tree, "log_p"), prior + expected.sum(1))
    np.testing.assert_allclose(flat(tree, "log_q"), q.logpdf(v))


def test_a_handwritten_guide(x64):
    X, y, _ = data(8)

    def guide(X, y=None):
        numpyro.sample("f.v", dist.Normal(0.1, 0.5).expand([4]).to_event(1))
        numpyro.sample("lengthscale", dist.LogNormal(0.2, 0.5))

    tree = draws(learnt, {}, X, y > 0, guide=guide)
    assert set(tree["posterior"].data_vars) == {"lengthscale", "f", "f.v"}
    log_q = stats.norm.logpdf(tree["posterior"]["f.v"].values[0], 0.1, 0.5).sum(1)
    drawn = tree["posterior"]["lengthscale"].values[0]
    log_q = log_q + stats.lognorm.logpdf(drawn, 0.5, scale=np.exp(0.2))
    np.testing.assert_allclose(flat(tree, "log_q"), log_q)


def rich(X, y=None, counts=None):
    """Three latents, weights, a subsampled plate, a mask, a scale and a factor."""
    gp = gpaug.GaussianProcess("f", kernel(), inducing=X[::4], num_latents=3)
    w = numpyro.sample("w", dist.Normal(0, 1).expand([1]).to_event(1))
    numpyro.factor("penalty", -jnp.square(X).sum())
    with numpyro.plate("data", X.shape[0], subsample_size=5) as idx:
        f = gp(X[idx]) + (X[idx] @ w)[:, None]
        picked = None if y is None else y[idx]
        likelihood = dist.Normal(f, NOISE).to_event(1)
        with numpyro.handlers.mask(mask=idx > 0), numpyro.handlers.scale(scale=0.5):
            numpyro.sample("y", likelihood, obs=picked)


def test_latents_weights_plates_masks_scales_and_factors(x64):
    X, y, _ = data()
    Y = np.stack([y, -y, y + 1], 1)
    Y[0] = np.nan  # masked
    guide = gpaug.AutoSparseGP(rich).setup(X, np.nan_to_num(Y))
    tree = draws(rich, {}, X, Y, guide=guide, num_samples=4)
    assert set(tree["log_likelihood"].data_vars) == {"y"}
    assert tree["log_likelihood"]["y"].sizes == {"chain": 1, "draw": 4, "data": 20}
    assert tree["posterior"]["f"].shape == (1, 4, 20, 3)
    assert tree["posterior_predictive"]["y"].shape == (1, 4, 20, 3)
    v, w = (tree["posterior"][k].values[0] for k in ("f.v", "w"))
    likelihood = tree["log_likelihood"]["y"].values[0]
    np.testing.assert_array_equal(likelihood[:, 0], 0)
    A, r = projection(X, X[::4])
    sd = np.sqrt(NOISE**2 + r)[:, None]
    mean = np.swapaxes(v @ A, 1, 2) + (w @ X.T)[..., None]
    expected = stats.norm.logpdf(Y, mean, sd).sum(-1)
    np.testing.assert_allclose(likelihood[:, 1:], expected[:, 1:], rtol=1e-6)
    prior = stats.norm.logpdf(v).sum((1, 2)) + stats.norm.logpdf(w).sum(1)
    total = prior + 0.5 * expected[:, 1:].sum(1) - np.square(X).sum()
    np.testing.assert_allclose(flat(tree, "log_p"), total, rtol=1e-6)
    np.testing.assert_allclose(flat(tree, "log_q"), prior, rtol=1e-6)


def test_sites_in_a_scope_and_totals_that_are_floats():
    def scoped(total, y=None):
        draw = numpyro.sample("draw", dist.Normal(0, 0.1))
        with numpyro.handlers.scope(prefix="herds"):
            level = numpyro.sample("level", dist.Normal(0, 2))
            with numpyro.plate("data", len(total)):
                numpyro.sample("y", dist.Binomial(total, logits=level + draw), obs=y)

    guide, args = gpaug.AutoLatentGaussian(scoped), (np.full(5, 10.0), np.arange(5))
    fit = gpaug.ConjugateSVI(scoped, guide).run(
        random.key(0), 9, *args, progress_bar=False
    )
    tree = diagnostics.to_datatree(
        random.key(0), scoped, guide, fit.params, *args, num_samples=50
    )
    assert set(tree["posterior"].data_vars) == {"herds.level", "draw_"}
    drawn = tree["posterior_predictive"]["herds.y"]
    assert drawn.dims == ("chain", "draw", "herds.data")
    assert 0 <= drawn.min() < drawn.max() <= 10
    assert 0.05 < drawn.mean() / 10 < 0.4


def test_importing_the_package_does_not_import_what_few_calls_need():
    heavy = (
        "pandas",
        "pyarrow",
        "sklearn",
        "arviz_base",
        "arviz_stats",
        "xarray",
        "matplotlib",
        "scipy.optimize",
        "scipy.spatial",
        "scipy.stats",
    )
    code = f"import sys, numpyro_gpaug; print([m for m in {heavy} if m in sys.modules])"
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == "[]"


@pytest.mark.parametrize("part", ["arviz_base", "arviz_stats"])
def test_a_part_of_arviz_that_is_missing_or_broken(part, monkeypatch, tmp_path):
    with monkeypatch.context() as missing:
        missing.setitem(sys.modules, part, None)
        with pytest.raises(ImportError, match=f"{part} does not.*install -U .arviz-b"):
            part_of_arviz(part)
    (tmp_path / f"{part}.py").write_text("raise AttributeError('of matplotlib')")
    monkeypatch.delitem(sys.modules, part, raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ImportError, match="of matplotlib"):
        part_of_arviz(part)


def test_a_result_is_not_its_params():
    result, guide = SVIRunResult({}, None, np.zeros(1)), gpaug.AutoSparseGP(regression)
    with pytest.raises(TypeError, match="a SVIRunResult. Pass .*result.params"):
        diagnostics.to_datatree(random.key(0), regression, guide, result)


# -- importance sampling --------------------------------------------------------------


def test_ratios_of_an_exact_posterior_are_the_evidence(exact):
    X, y, tree = exact
    ratios = flat(tree, "log_p") - flat(tree, "log_q")
    K = gram(kernel(), X, X) + NOISE**2 * np.eye(len(X))
    evidence = stats.multivariate_normal(np.zeros(len(X)), K).logpdf(y)
    np.testing.assert_allclose(ratios, evidence, atol=1e-6)
    psis = diagnostics.psis_khat(tree)
    assert psis.khat < 0.2
    assert repr(psis).endswith("good, 4000 draws worth 4000)")
    np.testing.assert_allclose(psis.log_weights, -np.log(4000), atol=1e-6)


def test_khat_tells_good_guides_from_narrow_ones(x64):
    X, y, _ = data()
    assert diagnostics.psis_khat(wide_tree()).khat < 0.7
    params, _ = gaussian(X, y, X)
    narrow = {name: 9 * value for name, value in params.items()}
    psis = diagnostics.psis_khat(draws(regression, narrow, X, y, num_samples=4000))
    assert psis.khat > 1
    np.testing.assert_allclose(np.exp(psis.log_weights).sum(), 1, rtol=1e-5)


def test_equal_ratios_have_no_tail():
    assert diagnostics.psis_khat(np.arange(50.0), np.arange(50.0)).khat == -np.inf


def test_loo_of_what_all_draws_are_certain_of():
    from arviz_base import from_dict

    rng = np.random.default_rng(0)
    log_prob = (-1 + 0.1 * rng.normal(size=(1, 500, 4))).astype(np.float32)
    log_prob[..., 1], log_prob[..., 2] = 0, -1.2e-7 * rng.integers(1, 3, 500)
    given = {"posterior": {"f": rng.normal(size=(1, 500))}}
    given |= {"log_likelihood": {"y": log_prob}, "observed_data": {"y": np.zeros(4)}}
    found = diagnostics.loo(from_dict(given))
    np.testing.assert_allclose(found.elpd_i.values[1:3], 0, atol=1e-6)
    assert found.pareto_k.values.max() < 0.7


@pytest.mark.parametrize("shape", [(6,), (2, 3)])
def test_missing_observations_are_no_data(shape):
    from arviz_base import from_dict

    rng = np.random.default_rng(0)
    log_prob = -1 + 0.1 * rng.normal(size=(1, 500, *shape))
    y = np.zeros(shape)
    y.flat[[1, 4]] = np.nan
    log_prob[..., np.isnan(y)] = 0
    given = {"posterior": {"f": rng.normal(size=(1, 500))}}

    def tree(log_prob, y):
        seen = {"log_likelihood": {"y": log_prob}, "observed_data": {"y": y}}
        return from_dict(given | seen)

    found = diagnostics.loo(tree(log_prob, y))
    rest = ~np.isnan(y)
    expected = diagnostics.loo(tree(log_prob[..., rest], y[rest]))
    assert found.n_data_points == 4
    np.testing.assert_allclose([found.elpd, found.se], [expected.elpd, expected.se])
    terms = np.where(rest, found.elpd, np.nan)
    table = diagnostics.compare({"a": terms, "b": terms - 1})
    np.testing.assert_allclose(abs(table.loc["b", "elpd_diff"]), 4)


def test_loo_matches_leaving_one_out(exact):
    X, y, tree = exact
    K = gram(kernel(), X, X)
    expected = []
    for i in range(len(y)):
        rest = np.arange(len(y)) != i
        others = K[np.ix_(rest, rest)] + NOISE**2 * np.eye(len(y) - 1)
        solved = np.linalg.solve(others, K[rest, i])
        mean, variance = solved @ y[rest], 1 + NOISE**2 - solved @ K[rest, i]
        expected.append(stats.norm.logpdf(y[i], mean, np.sqrt(variance)))
    for correct in (True, False):
        found = diagnostics.loo(tree, correct=correct)
        np.testing.assert_allclose(found.elpd_i.values, expected, atol=0.05)
        np.testing.assert_allclose(found.elpd, np.sum(expected), atol=0.1)
        assert found.pareto_k.values.max() < 0.7


def test_loo_is_corrected_for_the_guide(x64, exact):
    found = wide_tree()
    truth = diagnostics.loo(exact[-1]).elpd
    assert abs(diagnostics.loo(found).elpd - truth) < 0.15
    assert abs(diagnostics.loo(found, correct=False).elpd - truth) > 0.25


def test_an_observation_is_left_out_with_its_weight():
    def model(X, weight, y=None):
        b = numpyro.sample("b", dist.Normal(0, 3).expand([2]).to_event(1))
        with numpyro.plate("data", len(X)), numpyro.handlers.scale(scale=weight):
            numpyro.sample("y", dist.Normal(b[0] + b[1] * X[:, 0], 1.5), obs=y)

    X, y, _ = data()
    svi = gpaug.ConjugateSVI(model, gpaug.AutoLatentGaussian(model))
    for weight in (1.0, 5.0, 0.2):
        args = X, jnp.full(len(y), weight), y
        fit = svi.run(random.key(0), 5, *args, progress_bar=False)
        expected = svi.posterior(fit).leave_one_out(*args).log_prob(y)
        given = model, svi.guide, fit.params, *args
        tree = diagnostics.to_datatree(random.key(1), *given, num_samples=4000)
        for correct in (True, False):
            found = diagnostics.loo(tree, correct=correct).elpd_i
            np.testing.assert_allclose(found, expected, atol=0.05)
        table = diagnostics.sensitivity(tree)
        log_likelihood = tree["log_likelihood"].to_dataset()
        tree["log_likelihood"] = weight * log_likelihood.drop_vars(
            "y.weight", errors="ignore"
        )
        np.testing.assert_array_equal(diagnostics.sensitivity(tree), table)


@pytest.mark.parametrize("kind", ["summed", "each", "prior"])
def test_factors_of_data_that_are_not_left_out_get_a_warning(kind):
    """Late entries, in a sum or each, and a constraint, which is no term of data."""

    def model(x, entry, time=None):
        b = numpyro.sample("b", dist.Normal(0, 1).expand([2]).to_event(1))
        rate = jnp.exp(b[0] + b[1] * x)
        if kind == "prior":
            numpyro.factor("term", -jnp.square(b.sum()))
        if kind == "summed":
            numpyro.factor("term", (rate * entry).sum())
        with numpyro.plate("data", len(x)):
            if kind == "each":
                numpyro.factor("term", rate * entry)
            numpyro.sample("time", dist.Exponential(rate), obs=time)

    x, entry = jnp.linspace(-1, 1, 9), jnp.full(9, 0.1)
    svi = gpaug.ConjugateSVI(model, gpaug.AutoLatentGaussian(model))
    given = x, entry, entry + 1
    params = svi.get_params(svi.init(random.key(0), *given))
    tree = diagnostics.to_datatree(random.key(1), model, svi.guide, params, *given)
    with warnings.catch_warnings(record=True) as of_loo:
        warnings.simplefilter("always")
        diagnostics.loo(tree)
    with warnings.catch_warnings(record=True) as of_fit:
        warnings.simplefilter("always")
        svi.posterior(params, *given).leave_one_out(*given)
    told = [
        [str(w.message) for w in ws if "factor" in str(w.message)]
        for ws in (of_loo, of_fit)
    ]
    assert [len(x) for x in told] == [kind == "summed", kind != "prior"]
    assert all("'term'" in x for x in sum(told, []))


# -- calibration ----------------------------------------------------------------------


def test_brier_score():
    p, y = np.array([0.9, 0.2, 0.5]), np.array([1, 0, 0])
    by_hand = (0.1**2 + 0.2**2 + 0.5**2) / 3
    assert diagnostics.brier_score(p, y) == pytest.approx(by_hand)
    assert diagnostics.brier_score(p, y) == pytest.approx(brier_score_loss(y, p))
    both = np.stack([1 - p, p], 1)
    assert diagnostics.brier_score(jnp.asarray(both), y) == pytest.approx(2 * by_hand)
    three = diagnostics.brier_score([[0.5, 0.3, 0.2]], [2])
    assert three == pytest.approx(0.25 + 0.09 + 0.64)


def test_reliability_and_calibration_error_by_hand():
    p, y = [0.0, 0.5, 0.6, 0.7, 1.0], [0, 1, 1, 0, 1]
    curve = diagnostics.reliability_curve(p, y, num_bins=4)
    np.testing.assert_allclose(curve.edges, [0, 0.25, 0.5, 0.75, 1])
    np.testing.assert_array_equal(curve.counts, [1, 1, 2, 1])
    np.testing.assert_allclose(curve.predicted, [0, 0.5, 0.65, 1])
    np.testing.assert_allclose(curve.observed, [0, 1, 0.5, 1])
    error = diagnostics.expected_calibration_error(p, y, num_bins=4)
    assert error == pytest.approx((0.5 + 2 * 0.15) / 5)
    # Most probable class 0.6 (right) and 0.9 (wrong).
    p, y = [[0.6, 0.4, 0.0], [0.05, 0.05, 0.9]], [0, 1]
    error = diagnostics.expected_calibration_error(p, y)
    assert error == pytest.approx((0.4 + 0.9) / 2)


def test_reliability_is_that_of_scikit_learn_and_keeps_empty_bins():
    rng = np.random.default_rng(0)
    p = rng.beta(0.5, 0.5, 500)
    p = p[(p < 0.3) | (p > 0.5)]
    y = rng.uniform(size=len(p)) < p
    curve = diagnostics.reliability_curve(p, y, num_bins=10)
    observed, predicted = calibration_curve(y, p, n_bins=10)
    full = curve.counts > 0
    assert not full[3]
    assert np.isnan(curve.observed[3])
    np.testing.assert_allclose(curve.observed[full], observed)
    np.testing.assert_allclose(curve.predicted[full], predicted)
    assert curve.counts.sum() == len(p)


@pytest.mark.parametrize(
    ("probs", "y", "message"),
    [
        ([0.5, 1.5], [0, 1], r"probs of shape \(2,\) must lie in \[0, 1\].*1.5"),
        ([0.5, np.nan], [0, 1], "must lie in"),
        ([0.5, 0.5], [0], r"probs has shape \(2,\) and y \(1,\)"),
        ([], [], "not empty"),
        (0.5, 1, r"probs has shape \(\)"),
        ([0.5, 0.5], [-1, 1], r"y of shape \(2,\) must contain labels 0 to 1"),
        ([0.5, 0.5], ["a", "b"], "labels 0 to 1"),
        ([[0.5, 0.2]], [0], "rows must sum to 1"),
        ([[0.5, 0.5]], [2], "labels 0 to 1; it contains"),
        (dist.Bernoulli(0.5), [1], "pass its probabilities"),
    ],
)
def test_bad_probabilities_and_labels(probs, y, message):
    for score in (
        diagnostics.brier_score,
        diagnostics.reliability_curve,
        diagnostics.expected_calibration_error,
    ):
        with pytest.raises(ValueError, match=message):
            score(probs, y)


def test_other_bad_input():
    with pytest.raises(ValueError, match="num_bins must be at least 1, got 0"):
        diagnostics.reliability_curve([0.5], [1], num_bins=0)
    with pytest.raises(ValueError, match=r"log_p has shape \(30,\) and log_q \(29,\)"):
        diagnostics.psis_khat(np.zeros(30), np.zeros(29))
    with pytest.raises(ValueError, match="Here 29 of 30 are finite"):
        diagnostics.psis_khat(np.r_[np.nan, np.zeros(29)], np.zeros(30))
    with pytest.raises(ValueError, match="at least 25 draws"):
        diagnostics.psis_khat(np.zeros(9), np.zeros(9))
    X, y, _ = data(4)
    with pytest.raises(ValueError, match="num_samples must be at least 2, got 1"):
        draws(regression, {}, X, y, num_samples=1)
