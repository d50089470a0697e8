# SPDX-License-Identifier: Apache-2.0
"""AutoFunctionSpaceGP: fits by the Wasserstein loss, predictions, refusals."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro import handlers
from numpyro.infer import SVI, Predictive

import numpyro_gpaug as gpaug
from tests.function_space import (
    LENGTHSCALES,
    VARIANCES,
    linear,
    somewhere,
    sparse_covariance,
    three,
    three_classes,
)
from tests.problems import regression, toy

# Many of these means have no params, on purpose.
pytestmark = pytest.mark.filterwarnings(
    "ignore:the mean of AutoFunctionSpaceGP has no params"
)

KEY = jax.random.key(0)
POSITIVE = dist.constraints.positive


def inputs(num=60):
    return np.asarray(toy(num)[0])


def started(model, guide, args, kwargs):
    """Params before the first step."""
    guide.setup(*args, **kwargs)
    svi = SVI(model, guide, optax.sgd(0.0), gpaug.TraceWasserstein_ELBO(num_points=10))
    # One program: made step by step, the start would compile a hundred.
    return jax.jit(lambda: svi.get_params(svi.init(KEY, *args, **kwargs)))()


def fit(model, guide, loss, *args, steps=400, rate=0.05, **kwargs):
    guide.setup(*args, **kwargs)
    svi = SVI(model, guide, optax.adam(rate), loss)
    state = jax.jit(lambda: svi.init(KEY, *args, **kwargs))()
    result = svi.run(KEY, steps, *args, progress_bar=False, init_state=state, **kwargs)
    posterior = gpaug.Posterior.from_guide(model, guide, result.params, *args, **kwargs)
    return posterior, result


def matern(A, B):
    """Matern-5/2 covariance by NumPy."""
    r = np.sqrt(5 * np.square(A[:, None] - B[None]).sum(-1))
    return (1 + r + r * r / 3) * np.exp(-r)


# -- fits ---------------------------------------------------------------------------


def hidden_layer(X):
    """A small network, by NumPyro's own params."""
    inner = numpyro.param("inner", lambda key: 2 * jax.random.normal(key, (2, 20)))
    outer = numpyro.param("outer", jnp.zeros(20))
    return jnp.tanh(X @ inner + numpyro.param("shift", jnp.zeros(20))) @ outer


def test_a_kernel_of_its_own_with_params() -> None:
    X = inputs()
    y = np.sin(2 * X[:, 0])

    def kernel():
        variance = numpyro.param("v", 0.5, constraint=POSITIVE)
        return gpaug.kernels.Matern52(variance=variance)

    guide = gpaug.AutoFunctionSpaceGP(regression, hidden_layer, kernel)
    posterior, result = fit(
        regression, guide, gpaug.TraceWasserstein_ELBO(60.0, num_points=10), X, y,
        steps=200, inducing=X[:15],
    )  # fmt: skip
    # The minimum of 60 v / (2 0.5^2) + 60 (1 - sqrt v)^2 is at v = 1/9.
    assert float(result.params["v"]) == pytest.approx(1 / 9, rel=0.03)
    assert "f.v_auto_tril" not in result.params
    f = posterior.predict_f(X[:7], full_covariance=True)
    expected = float(result.params["v"]) * matern(X[:7], X[:7])
    np.testing.assert_allclose(f.variance, expected, rtol=2e-5)


def sites_of(guide, **kwargs):
    def values():
        trace = handlers.trace(handlers.seed(guide, 0))
        trace = trace.get_trace(inputs(), inputs()[:, 0], **kwargs)
        return {name: site["value"] for name, site in trace.items()}

    return set(jax.eval_shape(values))


def test_sites_of_a_guide_with_a_fixed_kernel() -> None:
    X = inputs()
    fixed = gpaug.AutoFunctionSpaceGP(
        regression, hidden_layer, gpaug.kernels.Matern52()
    )
    assert sites_of(fixed, inducing=X[:15]) == {"inner", "outer", "shift", "f"}


def with_slopes(X, y=None, *, Z):
    noise = numpyro.sample("noise", dist.LogNormal(-1, 1))
    beta = numpyro.sample("beta", dist.Normal(0, 2).expand([2]).to_event(1))
    gp = gpaug.GaussianProcess("f", gpaug.kernels.Matern52(), Z)
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(gp(X) + X @ beta, noise), obs=y)


def guide_with_slopes():
    other = numpyro.infer.autoguide.AutoNormal
    return gpaug.AutoFunctionSpaceGP(
        with_slopes, lambda X: jnp.zeros(X.shape[0]), other=other
    )


def test_other_latents_have_params_of_another_guide() -> None:
    guide = guide_with_slopes()
    found = sites_of(guide, Z=inputs()[:10])
    assert guide.structure.others == ("noise", "beta")
    params = {f"{k}_auto_{p}" for k in ("noise", "beta") for p in ("loc", "scale")}
    assert found == {"f", "f.v_auto_tril", "noise", "beta"} | params


# -- prediction ---------------------------------------------------------------------


@cache
def classes():
    """A fit of three classes in batches."""
    X, y = three_classes()
    guide = gpaug.AutoFunctionSpaceGP(three, linear)
    given = {"Z": X[:5], "batch_size": 20}
    posterior, result = fit(
        three, guide, gpaug.TraceWasserstein_ELBO(num_points=10), X, y,
        steps=300, **given,
    )  # fmt: skip
    return posterior, guide, result, (X, y), given


@cache
def elsewhere():
    """Return new inputs, and the joint prediction of the first four of them."""
    new = np.asarray(toy(33, seed=3)[0])
    return new, classes()[0].predict_f(new[:4], full_covariance=True)


@pytest.mark.slow
def test_learns_in_batches() -> None:
    posterior, _, result, (X, y), _ = classes()
    assert result.losses[-20:].mean() < 0.6 * result.losses[0]
    probs = np.asarray(posterior.predict_y(X).probs)
    assert np.mean(probs.argmax(1) == y) > 0.75
    expected = np.log(probs[np.arange(40), y])
    np.testing.assert_allclose(posterior.log_prob(X, y), expected, rtol=1e-4, atol=1e-6)


def test_posterior_is_the_closed_form() -> None:
    _, guide, _, (X, y), given = classes()
    params = {k: v.astype("float32") for k, v in somewhere().items()}
    posterior = gpaug.Posterior.from_guide(three, guide, params, X, y, **given)
    new, _ = elsewhere()
    f, mean = posterior.predict_f(new), new @ params["W"]
    joint = posterior.predict_f(new[:4], full_covariance=True)
    np.testing.assert_allclose(f.mean, mean, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(joint.mean, mean[:4], rtol=1e-5, atol=1e-6)
    hyper = zip(LENGTHSCALES, VARIANCES, strict=True)
    for c, (scale, variance) in enumerate(hyper):
        tril = params["f.v_auto_tril"][c]
        _, R = sparse_covariance(new, X[:5], scale, variance, tril)
        np.testing.assert_allclose(joint.variance[c], R[:4, :4], rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(f.variance[:, c], np.diag(R), rtol=1e-4, atol=1e-4)


def test_draws_have_the_moments_of_the_posterior() -> None:
    posterior, guide, result, _, given = classes()
    new, joint = elsewhere()
    draws = np.asarray(posterior.sample(KEY, new[:4], sample_shape=(20000,)))
    np.testing.assert_allclose(draws.mean(0), joint.mean, atol=0.06)
    spread = np.cov(draws[..., 2].T)
    np.testing.assert_allclose(spread, joint.variance[2], atol=0.1)
    # NumPyro's own prediction, function values included.
    predictive = Predictive(three, guide=guide, params=result.params, num_samples=5000)
    drawn = jax.jit(lambda key: predictive(key, new[:4], Z=given["Z"]))(KEY)
    assert set(drawn) == {"f", "y"}
    f, y = np.asarray(drawn["f"]), np.asarray(drawn["y"])
    variance = np.diagonal(joint.variance, axis1=-2, axis2=-1).T
    np.testing.assert_allclose(f.mean(0), joint.mean, atol=0.1)
    np.testing.assert_allclose(f.var(0), variance, rtol=0.1)
    shares = np.stack([(y == k).mean(0) for k in range(3)], 1)
    np.testing.assert_allclose(shares, posterior.predict_y(new).probs[:4], atol=0.03)
    with pytest.raises(ValueError, match="draw a batch.*Posterior"):
        predictive(KEY, new, Z=given["Z"], batch_size=20)
    drawn = jax.eval_shape(
        lambda key: guide.sample_posterior(
            key, result.params, new[:4], Z=given["Z"], sample_shape=(6,)
        ),
        KEY,
    )
    assert drawn["f"].shape == (6, 4, 3)


def test_a_mean_without_params_is_told() -> None:
    guide = gpaug.AutoFunctionSpaceGP(regression, lambda X: 0 * X[:, 0])
    X = inputs(8)
    with pytest.warns(UserWarning, match="has no params"):
        jax.eval_shape(lambda: handlers.seed(guide, 0)(X, X[:, 0], inducing=X[:3]))


def network(depth: int):
    """A mean function from a network, by NumPyro's own means."""
    from numpyro.contrib import module

    eqx = pytest.importorskip("equinox")
    net = eqx.nn.MLP(2, "scalar", 8, depth, key=KEY)
    return lambda X: jax.vmap(module.eqx_module("net", net))(X)


def test_save_and_load_a_network(tmp_path) -> None:
    mean = network(1)
    X = inputs(40)
    guide = gpaug.AutoFunctionSpaceGP(regression, mean)
    given = (X, np.sin(X[:, 0])), {"inducing": X[:10]}
    params = started(regression, guide, *given)
    posterior = gpaug.Posterior.from_guide(
        regression, guide, params, *given[0], **given[1]
    )
    path = tmp_path / "posterior.npz"
    posterior.save(path)
    fresh = gpaug.AutoFunctionSpaceGP(regression, mean)
    loaded = gpaug.Posterior.load(path, regression, fresh)
    before, after = posterior.predict_f(X), loaded.predict_f(X)
    np.testing.assert_array_equal(before.mean, after.mean)
    np.testing.assert_array_equal(before.variance, after.variance)
    assert np.abs(before.mean).max() > 0
    with pytest.raises(ValueError, match="Pass the guide of the fit"):
        gpaug.Posterior.load(path, regression)
    wrong = gpaug.AutoFunctionSpaceGP(regression, network(2))
    with pytest.raises(ValueError, match="saved with 4 arrays.*declares 6"):
        gpaug.Posterior.load(path, regression, wrong).predict_f(X)


# -- what is refused ----------------------------------------------------------------


def test_wrong_means_and_kernels_are_named() -> None:
    X, y = three_classes()

    def run(mean, kernel=None, model=three, **given):
        guide = gpaug.AutoFunctionSpaceGP(model, mean, kernel)
        svi = SVI(model, guide, optax.adam(0.1), gpaug.TraceWasserstein_ELBO())
        jax.eval_shape(lambda: svi.init(KEY, X, y, **(given or {"Z": X[:5]})))

    with pytest.raises(ValueError, match=r"\(40, 2\).*num_latents=3.*\(40, 3\)"):
        run(lambda X: X)
    with pytest.raises(ValueError, match=r"\(40,\).*expected \(40, 3\).*width 3"):
        run(lambda X: X[:, 0])
    with pytest.raises(ValueError, match=r"\(40, 1\).*expected \(40,\)"):
        run(lambda X: X[:, :1], model=regression, inducing=X[:5])
    four = gpaug.kernels.Matern32(variance=jnp.ones(4))
    with pytest.raises(ValueError, match=r"kernel.*num_latents=3.*\(3, 5, 5\)"):
        run(linear, four)
    with pytest.raises(TypeError, match="mean is a float"):
        run(0.0)
    with pytest.raises(TypeError, match="expected a kernel"):
        run(linear, gpaug.kernels.Matern32)
    with pytest.raises(ValueError, match="mean makes the sample site 'w'"):
        run(lambda X: X @ numpyro.sample("w", dist.Normal(0, 1).expand([2, 3])))


def test_wrong_models_guides_and_settings_are_named() -> None:
    X, y = inputs(20), np.zeros(20)

    def two(X, y=None):
        f, g = (
            gpaug.GaussianProcess(name, gpaug.kernels.Matern32(), X[:3])
            for name in "fg"
        )
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Bernoulli(logits=f(X) + g(X)), obs=y)

    guide = gpaug.AutoFunctionSpaceGP(two, lambda X: X[:, 0])
    with pytest.raises(ValueError, match=r"one GaussianProcess.*\['f', 'g'\]"):
        guide.setup(X, y)
    loss = gpaug.TraceWasserstein_ELBO()
    autoguide = numpyro.infer.autoguide.AutoNormal(two)
    with pytest.raises(TypeError, match="AutoNormal"):
        loss.loss(KEY, {}, two, autoguide, X, y)
    guide = gpaug.AutoFunctionSpaceGP(regression, lambda X: X[:, 0])
    params = {"f.v_auto_tril": np.eye(3, dtype="float32")}
    bound = gpaug.TraceAnalytic_ELBO().loss
    given = KEY, params, regression, guide, X, X[:, 0]
    with pytest.raises(gpaug.NotConjugateError, match="TraceWasserstein_ELBO"):
        jax.eval_shape(lambda: bound(*given, inducing=X[:3]))
    with pytest.raises(TypeError, match="no density with respect to the prior"):
        gpaug.diagnostics.to_datatree(
            KEY, regression, guide, params, X, X[:, 0], inducing=X[:3]
        )
    with pytest.raises(ValueError, match="estimator must be one of"):
        gpaug.TraceWasserstein_ELBO(estimator="exact")
    with pytest.raises(ValueError, match="weight=0"):
        gpaug.TraceWasserstein_ELBO(weight=0)

    def wave(X):
        return numpyro.param("height", 0.0) * X[:, 0]

    posterior = gpaug.Posterior.from_guide(
        regression, gpaug.AutoFunctionSpaceGP(regression, wave), params,
        X, X[:, 0], inducing=X[:3],
    )  # fmt: skip
    with pytest.raises(ValueError, match="mean needs the param 'height'"):
        posterior.predict_f(X)
