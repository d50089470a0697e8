# SPDX-License-Identifier: Apache-2.0
"""Outputs that share latents: f = Phi h + b."""

import json
from functools import cache
from pathlib import Path

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
from numpyro_gpaug.errors import NotConjugateError
from tests.conftest import slow
from tests.models import covariance as squared_exponential

GOLDEN = json.loads(
    (Path(__file__).parent / "golden" / "problem_panos_mlgpf.json").read_text()
)
KEY = jax.random.key(0)


def golden(*names, dtype="float64"):
    return [np.asarray(GOLDEN[name], dtype) for name in names]


def covariance_of(a, b):
    return squared_exponential(a, b, 0.9, 1.3)


def model(X, y=None, *, Z, Phi, b, labels=None, weights=None, residual=1.0):
    kernel = gpaug.kernels.SquaredExponential(0.9, 1.3)
    gp = gpaug.GaussianProcess("f", kernel, Z, loadings=Phi, bias=b, jitter=0.0)
    width = len(Phi) if labels is None else np.shape(labels)[-1]
    weights = jnp.ones((len(X), width)) if weights is None else weights
    with (
        numpyro.plate("data", X.shape[0], dim=-2),
        numpyro.plate("outputs", width, dim=-1),
        handlers.mask(mask=weights > 0),
        handlers.scale(scale=jnp.where(weights > 0, weights, 1)),
    ):
        f = gp(X, latents=labels)
        numpyro.sample("y", dist.Bernoulli(logits=f), obs=y)


def event(X, y=None, *, Z, Phi, b):
    """The same with the outputs as one event, and no weights."""
    kernel = gpaug.kernels.SquaredExponential(0.9, 1.3)
    gp = gpaug.GaussianProcess("f", kernel, Z, loadings=Phi, bias=b, jitter=0.0)
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=gp(X)).to_event(1), obs=y)


def problem(dtype="float64"):
    X, Z, Phi, b, Y = golden("X", "Z", "Phi", "b", "Y", dtype=dtype)
    return X, (Y > 0).astype(int), {"Z": Z, "Phi": Phi, "b": b}


@cache
def fitter():
    """Return a fitter in float64: for five rows and loadings (4, 2) nothing is compiled
    again.
    """
    return gpaug.ConjugateSVI(model, gpaug.AutoSparseGP(model))


def run(svi, X, y, known, num_steps=40):
    return svi.run(KEY, num_steps, X, y, progress_bar=False, **known)


@cache
def fitted():
    """The fit of the golden problem in float64."""
    return run(fitter(), *problem())


def test_golden(dtype) -> None:
    """Moments of the outputs and the bound, from the preconditioned posterior."""
    X, y, known = problem(dtype)
    guide = gpaug.AutoSparseGP(model, covariance="preconditioned").setup(X, y, **known)
    mu, noise = golden("mu", "Sigma_diag", dtype=dtype)
    Z = np.asarray(GOLDEN["Z"])
    targets = (mu @ covariance_of(Z, Z) + noise * mu).astype(dtype)
    params = {"f.v_auto_targets": targets, "f.v_auto_noise": noise}
    elbo = gpaug.TraceAnalytic_ELBO()
    loss = jax.jit(lambda p: elbo.loss(KEY, p, model, guide, X, y, **known))(params)
    rtol = 1e-5 if dtype == "float32" else 1e-12
    np.testing.assert_allclose(-loss, GOLDEN["elbo"], rtol=rtol)
    posterior = gpaug.Posterior.from_guide(model, guide, params, X, y, **known)
    f = posterior.predict_f(X)
    np.testing.assert_allclose(f.mean, GOLDEN["mF"], rtol=10 * rtol, atol=10 * rtol)
    np.testing.assert_allclose(f.variance, GOLDEN["vF"], rtol=10 * rtol)


def test_values_are_mixed_latents(x64) -> None:
    X, y, known = problem()
    v = np.random.default_rng(0).normal(size=(2, 3))
    labels = np.array([3, 1]), np.array([[0, 3], [1, 1], [2, 0], [3, 2], [0, 1]])

    @jax.jit
    def values(v):
        at = handlers.seed(handlers.substitute(model, {"f.v": v}), 0)

        def value(y, **more):
            trace = handlers.trace(at).get_trace(X, y, **known, **more)
            return trace["f"]["value"]

        return value(y), [value(None, labels=some) for some in labels]

    whole, parts = values(v)
    factor = np.linalg.cholesky(covariance_of(known["Z"], known["Z"]))
    h = covariance_of(X, known["Z"]) @ np.linalg.inv(factor).T @ v.T
    expected = h @ known["Phi"].T + known["b"]
    np.testing.assert_allclose(whole, expected, atol=1e-12)
    rows = np.arange(len(X))[:, None]
    for some, part in zip(labels, parts, strict=True):
        np.testing.assert_allclose(part, expected[rows, some], atol=1e-12)


@pytest.mark.parametrize("updates", [slow("augmented"), "auto"])
def test_latents_move_one_at_a_time(x64, updates) -> None:
    """The bound never falls, with whole steps, and ends where gradients end; the
    loadings are large, so that latents moved together would overshoot."""
    X, y, known = problem()
    known["Phi"] = 3 * known["Phi"]
    svi = fitter()
    if updates == "augmented":
        guide = gpaug.AutoSparseGP(model)
        svi = gpaug.ConjugateSVI(model, guide, updates=updates)
    result = run(svi, X, y, known, 80)
    assert (np.diff(result.losses[1:]) < 1e-9).all()
    guide = gpaug.AutoSparseGP(model, covariance="dense")
    bound = "augmented" if updates == "augmented" else "exact"
    guide.setup(X, y, **known)
    optim = optax.adam(optax.exponential_decay(0.1, 300, 0.5))
    svi = SVI(model, guide, optim, gpaug.TraceAnalytic_ELBO(bound))
    start = jax.jit(lambda: svi.init(KEY, X, y, **known))()
    found = svi.run(KEY, 2500, X, y, progress_bar=False, init_state=start, **known)
    np.testing.assert_allclose(result.losses[-1], found.losses[-1], atol=1e-5)


def test_loadings_are_learnt_beside(x64) -> None:
    """Params in the model, by gradients between closed-form steps."""
    X, y, known = problem()

    def learnt(X, y=None, *, Z, Phi, b):
        model(X, y, Z=Z, Phi=numpyro.param("Phi", Phi), b=numpyro.param("b", b))

    svi = gpaug.ConjugateSVI(learnt, gpaug.AutoSparseGP(learnt), optax.adam(0.05))
    result = run(svi, X, y, known, 60)
    assert (np.diff(result.losses) < 1e-9).all()
    assert result.losses[-1] < fitted().losses[-1] - 1
    assert result.params["Phi"].shape == (4, 2)


def test_labels_per_row_in_another_order_change_nothing(x64) -> None:
    X, y, known = problem()
    rng = np.random.default_rng(0)
    labels = np.stack([rng.permutation(4) for _ in X])
    chosen = np.take_along_axis(y, labels, 1)
    result = run(fitter(), X, chosen, {**known, "labels": labels}, 3)
    np.testing.assert_allclose(result.losses, fitted().losses[:3], rtol=1e-10)


def test_draws_share_their_latents(x64) -> None:
    X, _, known = problem()
    result, guide = fitted(), fitter().guide
    posterior = fitter().posterior(result)
    f = posterior.predict_f(X, full_covariance=True)
    assert f.variance.shape == (4, 5, 5)
    draws = np.asarray(posterior.sample(KEY, X, sample_shape=(100_000,)))
    flat = np.cov(draws.reshape(100_000, -1).T).reshape(5, 4, 5, 4)
    for k in range(4):
        np.testing.assert_allclose(flat[:, k, :, k], f.variance[k], atol=0.06)
    # The covariance between outputs is Phi diag(s) Phi', which is not diagonal.
    between = flat[np.arange(5), :, np.arange(5), :]
    cover = np.linalg.inv(np.asarray(result.params["f.v_auto_precision"]))
    factor = np.linalg.cholesky(covariance_of(known["Z"], known["Z"]))
    A = np.linalg.solve(factor, covariance_of(known["Z"], X))
    s = 1.3 - (A**2).sum(0) + np.einsum("mn,pmk,kn->pn", A, cover, A)
    expected = np.einsum("kp,pn,lp->nkl", known["Phi"], s, known["Phi"])
    np.testing.assert_allclose(between, expected, atol=0.15)
    np.testing.assert_allclose(
        f.variance[:, np.arange(5), np.arange(5)].T,
        np.diagonal(expected, axis1=1, axis2=2),
        rtol=1e-8,
    )
    predictive = Predictive(
        model, guide=guide, params=result.params, num_samples=20_000
    )
    stock = np.asarray(jax.jit(lambda key: predictive(key, X, **known)["f"])(KEY))
    np.testing.assert_allclose(stock.mean(0), f.mean, atol=0.1)
    np.testing.assert_allclose(
        stock.var(0), np.diagonal(f.variance, axis1=1, axis2=2).T, rtol=0.1, atol=0.05
    )


@pytest.mark.parametrize("covariance", [slow("natural"), "preconditioned"])
def test_saved_and_loaded(tmp_path, covariance) -> None:
    X, y, known = problem("float32")
    guide = gpaug.AutoSparseGP(model, covariance=covariance)
    guide.setup(X, y, **known)
    rng, eye = np.random.default_rng(0), np.eye(3)
    half = 0.2 * rng.normal(size=(2, 3, 3))
    params = {
        "f.v_auto_potential": rng.normal(size=(2, 3)),
        "f.v_auto_precision": eye + half @ np.swapaxes(half, 1, 2),
        "f.v_auto_targets": rng.normal(size=(2, 3)),
        "f.v_auto_noise": rng.uniform(0.5, 2.0, (2, 3)),
    }
    params = {k: params[k].astype("float32") for k in guide.own_params()}
    posterior = gpaug.Posterior.from_guide(model, guide, params, X, y, **known)
    posterior.save(tmp_path / "fit.npz")
    again = gpaug.Posterior.load(tmp_path / "fit.npz", model, guide)
    probs = np.asarray(again.predict_y(X).probs)
    np.testing.assert_array_equal(posterior.predict_y(X).probs, probs)
    assert np.ptp(probs) > 0.1
    few = posterior.predict_y(X[:3], labels=np.array([2, 0])).probs
    np.testing.assert_allclose(few, probs[:3, [2, 0]], rtol=1e-5)
    few = posterior.predict_y(X[:2], labels=np.array([2, 0])).probs
    np.testing.assert_allclose(few, probs[:2, [2, 0]], rtol=1e-5)


def test_likelihoods_of_several_outputs_are_refused() -> None:
    X, _, known = problem("float32")

    def joint(X, y=None, *, Z, Phi, b):
        kernel = gpaug.kernels.SquaredExponential()
        gp = gpaug.GaussianProcess("f", kernel, Z, loadings=Phi, bias=b)
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Categorical(logits=gp(X)), obs=y)

    with pytest.raises(NotConjugateError, match="share latents"):
        gpaug.AutoSparseGP(joint).setup(X, np.zeros(5, int), **known)


def test_an_event_of_outputs_is_no_joint_likelihood(x64) -> None:
    X, y, known = problem()
    svi = gpaug.ConjugateSVI(event, gpaug.AutoSparseGP(event))
    result = run(svi, X, y, known, 3)
    np.testing.assert_allclose(result.losses, fitted().losses[:3], rtol=1e-10)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"loadings": np.zeros(3)}, r"loadings has shape \(3,\)"),
        ({"loadings": np.zeros((3, 2)), "num_latents": 3}, "with num_latents=3"),
        ({"loadings": np.zeros((3, 2)), "bias": np.zeros(2)}, r"expected .*\(3,\)"),
        ({"bias": np.zeros(2)}, "bias= needs loadings"),
    ],
)
def test_invalid_arguments(arguments, message) -> None:
    with pytest.raises(ValueError, match=message), handlers.seed(rng_seed=0):
        gpaug.GaussianProcess("f", gpaug.kernels.Linear(), np.eye(2), **arguments)


def test_invalid_latents(x64) -> None:
    X, _, known = problem()
    with pytest.raises(ValueError, match=r"latents of shape \(2, 2\)"):
        handlers.seed(model, 0)(X, labels=np.zeros((2, 2), int), **known)
    posterior = fitter().posterior(fitted())
    with pytest.raises(ValueError, match="the same output"):
        posterior.predict_f(X, labels=np.zeros((5, 2), int), full_covariance=True)
