# SPDX-License-Identifier: Apache-2.0
"""The content of the plots: axes, labels and data."""

import builtins

import jax.numpy as jnp
import matplotlib as mpl
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from matplotlib import pyplot as plt
from matplotlib.colors import to_hex
from scipy import stats
from xarray import Dataset, DataTree

import numpyro_gpaug as gpaug
from numpyro_gpaug import diagnostics, plots
from tests.conftest import slow


@pytest.fixture(autouse=True)
def _close_figures():
    mpl.use("Agg")
    yield
    plt.close("all")


def legend(ax) -> list[str]:
    return [text.get_text() for text in ax.get_legend().get_texts()]


def lines(ax) -> dict:
    return {line.get_label(): line for line in ax.lines}


def model(X, y=None, *, Z, kind, outputs=None):
    kernel = gpaug.kernels.Matern52(0.8, 2.0)
    gp = gpaug.GaussianProcess("f", kernel, inducing=Z, num_latents=outputs)
    likelihoods = {
        "real": lambda f: dist.Normal(f, 0.3),
        "label": lambda f: dist.Bernoulli(logits=f),
        "count": lambda f: gpaug.LogisticPoisson(f, 10.0),
        "class": lambda f: dist.Categorical(logits=f),
    }
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", likelihoods[kind](gp(X)), obs=y)


def of_function(function, X, y, Z, kind):
    """Return a posterior near ``function`` at the inducing inputs, within 0.1: q of the
    whitened values is computed by NumPy, not fitted. Each latent has a column.
    """
    r = np.sqrt(5 * ((Z[:, None] - Z[None]) ** 2).sum(-1)) / 0.8
    gram = 2 * (1 + r + r**2 / 3) * np.exp(-r) + 1e-5 * np.eye(len(Z))
    L = np.linalg.cholesky(gram)
    precision = L.T @ L / 0.1**2 + np.eye(len(Z))
    potential = np.moveaxis(L.T @ function(Z) / 0.1**2, 0, -1)
    outputs = potential.shape[:-1]
    params = {
        "f.v_auto_potential": potential,
        "f.v_auto_precision": np.broadcast_to(precision, (*outputs, *precision.shape)),
    }
    params = {k: jnp.asarray(x, jnp.float32) for k, x in params.items()}
    guide = gpaug.AutoSparseGP(model)
    given = {"Z": Z, "kind": kind, "outputs": outputs[0] if outputs else None}
    return gpaug.Posterior.from_guide(model, guide, params, X, y, **given)


def wave(X):
    return np.sin(2 * X[:, 0])


@pytest.fixture(scope="module")
def series():
    """Inputs in no order, a curve, inducing inputs."""
    X = np.random.default_rng(0).uniform(-2, 2, (30, 1)).astype("float32")
    return X, np.sin(2 * X[:, 0]), np.linspace(-2, 2, 6)[:, None].astype("float32")


# -- checks ---------------------------------------------------------------------------


def test_elbo_of_all_data():
    losses = 50 + 20 * np.exp(-np.arange(60) / 5)
    ax = plots.plot_elbo(losses, label="fit")
    x, y = lines(ax)["fit"].get_data()
    np.testing.assert_array_equal(x, np.arange(1, 61))
    np.testing.assert_array_equal(y, -losses)
    assert (ax.get_title(), ax.get_xscale()) == ("converged", "log")
    assert (ax.get_xlabel(), ax.get_ylabel()) == (
        "step", "evidence lower bound (nats)"
    )  # fmt: skip
    assert [text.get_text() for text in ax.texts] == ["-50.0"]
    assert legend(ax) == ["fit"]


def test_elbo_with_noise_has_a_running_mean():
    losses = 50 + np.random.default_rng(0).normal(size=200)
    ax = plots.plot_elbo(losses)
    assert legend(ax) == ["bound", "mean of 10 steps"]
    x, y = lines(ax)["mean of 10 steps"].get_data()
    assert (x[0], x[-1]) == (10, 200)
    assert y[0] == pytest.approx(-losses[:10].mean())
    assert lines(ax)["bound"].get_alpha() < 1


def test_elbo_marks_where_it_is_lost():
    ax = plots.plot_elbo([3.0, 2.0, np.nan, np.nan])
    assert ax.get_title() == "not finite"
    np.testing.assert_array_equal(lines(ax)["no longer finite"].get_xdata(), [3, 3])


def test_reliability_draws_the_curve():
    rng = np.random.default_rng(0)
    p = rng.uniform(size=300)
    y = rng.uniform(size=300) < p
    colors = {"fit": "#123456"}
    methods = {"fit": p, "rival": np.full(300, 0.5)}
    ax = plots.plot_reliability(methods, y, num_bins=4, colors=colors)
    assert legend(ax) == ["fit", "rival"]
    assert ax.get_xlabel() == "predicted probability"
    assert ax.get_ylabel() == "observed frequency"
    curve = diagnostics.reliability_curve(p, y, 4)
    dots = next(c for c in ax.collections if c.get_label() == "fit")
    np.testing.assert_allclose(
        dots.get_offsets(), np.stack([curve.predicted - 0.006, curve.observed], 1)
    )
    assert to_hex(dots.get_facecolor()[0]) == "#123456"
    segments = ax.collections[0].get_segments()
    for (_, hit, count), segment in zip(
        np.stack([curve.predicted, curve.observed * curve.counts, curve.counts], 1),
        segments, strict=True,
    ):  # fmt: skip
        ends = stats.beta.ppf([0.05, 0.95], hit + 0.5, count - hit + 0.5)
        np.testing.assert_allclose(segment[:, 1], ends)


def test_reliability_takes_one_array_and_empty_bins():
    ax = plots.plot_reliability([0.1, 0.2, 0.9], [0, 0, 1])
    assert legend(ax) == ["predictions"]
    assert np.isfinite(ax.get_ylim()).all()


def test_pit_draws_shares_and_the_band_of_right_predictions():
    u = np.array([0.1, 0.2, 0.2, 0.9])
    ax = plots.plot_pit({"fit": u})
    levels, share = lines(ax)["fit"].get_data()
    np.testing.assert_allclose(share, [(u <= level).mean() for level in levels])
    assert ax.get_ylabel() == "share of observations"
    assert legend(ax) == ["fit", "90% if right"]
    low, high = ax.collections[0].get_paths()[0].get_extents().get_points()[:, 1]
    assert (low, high) == (0, 1)


def test_vi_vs_mcmc_draws_every_marginal():
    values = np.array([[0.1, -0.3], [0.9, 0.5], [0.1, 0.4]])
    labels = {"statistic": ["mean_difference", "sd_ratio", "wasserstein"]}
    dims = ["statistic", "f_dim_0"]
    sites = {"f": (dims, values), "scale": ("statistic", [2.0, 0.0, 2.0])}
    tree = DataTree.from_dict({"posterior": Dataset(sites, labels)})
    ax = plots.plot_vi_vs_mcmc(tree)
    assert legend(ax) == ["f (2)", "scale"]
    np.testing.assert_allclose(ax.collections[0].get_offsets(), values[:2].T)
    assert ax.get_xlabel() == "mean, VI - MCMC (standard deviations of MCMC)"
    assert ax.get_ylabel() == "standard deviation, VI / MCMC"
    (left, right), (low, high) = ax.get_xlim(), ax.get_ylim()
    assert left == -right < -2
    assert low <= 0 < 1.2 < high


# -- functions ------------------------------------------------------------------------


def test_latent_draws_mean_intervals_data_and_inducing_inputs(series):
    X, y, Z = series
    posterior = of_function(wave, X, y, Z, "real")
    ax = plots.plot_latent(posterior, X, data=(X, y), inducing=Z, levels=(0.5, 0.9))
    assert legend(ax) == [
        "data", "90% interval", "50% interval", "posterior mean", "inducing inputs"
    ]  # fmt: skip
    x, mean = lines(ax)["posterior mean"].get_data()
    np.testing.assert_array_equal(x, np.sort(X[:, 0]))
    f = posterior.predict_f(x[:, None])
    np.testing.assert_allclose(mean, f.mean, rtol=1e-5)
    wide = ax.collections[0].get_paths()[0].vertices
    at = wide[np.isclose(wide[:, 0], x[7]), 1]
    expected = stats.norm.interval(0.9, f.mean[7], np.sqrt(f.variance[7]))
    np.testing.assert_allclose([at.min(), at.max()], expected, rtol=1e-4)
    np.testing.assert_array_equal(lines(ax)["data"].get_data(), (X[:, 0], y))
    np.testing.assert_array_equal(lines(ax)["inducing inputs"].get_xdata(), Z[:, 0])
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("x", "latent function")


def test_predictive_of_real_observations(series):
    X, y, Z = series
    real = of_function(wave, X, y, Z, "real")
    ax = plots.plot_predictive(real, X, data=(X, y))
    assert legend(ax) == ["data", "90% interval", "mean"]
    predicted = real.predict_y(np.sort(X, 0))
    edge = ax.collections[0].get_paths()[0].vertices[:, 1]
    assert edge.max() == pytest.approx(float(predicted.icdf(0.95).max()), rel=1e-5)


def test_predictive_of_labels(series):
    X, y, Z = series
    posterior = of_function(wave, X, (y > 0).astype(int), Z, "label")
    ax = plots.plot_predictive(posterior, X)
    assert not ax.collections
    probs = posterior.predict_y(np.sort(X, 0)).probs
    np.testing.assert_allclose(lines(ax)["mean"].get_ydata(), probs, rtol=1e-5)


@pytest.mark.parametrize("num_classes", [slow(2), 3])
def test_decision_draws_surface_classes_and_inducing_inputs(num_classes):
    X = np.random.default_rng(0).normal(size=(40, 2)).astype("float32")
    y = (X[:, 0] > 0).astype(int) + (num_classes > 2) * (X[:, 1] > 1)
    if num_classes == 2:
        posterior = of_function(lambda X: 3 * X[:, 0], X, y, X[:8], "label")
    else:
        classes = lambda X: 3 * np.stack([-X[:, 0], X[:, 0], X[:, 1]], 1)  # noqa: E731
        posterior = of_function(classes, X, y, X[:8], "class")
    ax = plots.plot_decision(posterior, X, y, inducing=X[:8], num=20)
    names = [f"class {c}" for c in range(num_classes)]
    assert legend(ax) == [*names, "inducing inputs"]
    dots = {c.get_label(): c.get_offsets() for c in ax.collections}
    np.testing.assert_array_equal(dots["class 1"], X[y == 1])
    np.testing.assert_array_equal(dots["inducing inputs"], X[:8])
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("input 1", "input 2")
    if num_classes == 2:
        bar = ax.figure.axes[1]
        assert bar.get_ylabel() == "predicted probability of class 1"
    else:
        image = ax.images[0].get_array()
        assert image.shape == (20, 20, 3)
        # The lower left is surely class 0, the first colour.
        assert image[3, 3].argmax() == 0
    with pytest.raises(ValueError, match=r"X has shape \(40, 1\)"):
        plots.plot_decision(posterior, X[:, :1], y)


def test_decision_of_real_observations_is_refused():
    X = np.random.default_rng(0).normal(size=(20, 2)).astype("float32")
    posterior = of_function(wave, X, X[:, 0], X[:5], "real")
    with pytest.raises(ValueError, match="are Normals, not probabilities of classes"):
        plots.plot_decision(posterior, X, np.zeros(20, int))


def test_link_draws_heights_over_cells_and_a_band():
    link = gpaug.PiecewiseLink(jnp.array([0.1, 0.5, 0.9]), edges=[-1.0, 1.0])
    ax = plots.plot_link(link, [0.1, 0.05, 0.2], label="learnt", color="r")
    steps = ax.patches[0].get_data()
    np.testing.assert_allclose(steps.values, [0.1, 0.5, 0.9])
    np.testing.assert_allclose(steps.edges, [-5, -1, 1, 5])
    band = ax.collections[0].get_paths()[0].vertices[:, 1]
    assert (band.min(), band.max()) == (pytest.approx(-0.1), pytest.approx(1.3))
    assert legend(ax) == ["learnt", "two standard deviations"]
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("function value f", "link(f)")
    assert legend(plots.plot_link(link)) == ["link"]
    with pytest.raises(ValueError, match=r"heights of shape \(3,\) and band.*\(2,\)"):
        plots.plot_link(link, [0.1, 0.1])


def test_inputs_with_two_columns_are_refused(series):
    X, y, Z = series
    posterior = of_function(wave, X, y, Z, "real")
    with pytest.raises(ValueError, match=r"X has shape \(30, 2\); expected one input"):
        plots.plot_latent(posterior, np.zeros((30, 2)))


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch):
    plain = builtins.__import__

    def missing(name, *args, **kwargs):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return plain(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(ImportError) as caught:
        plots.plot_elbo([2.0, 1.0])
    assert "numpyro_gpaug[plots]" in caught.value.__notes__[0]
