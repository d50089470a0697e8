# SPDX-License-Identifier: Apache-2.0
"""Posteriors that go on learning from batches."""

from functools import partial
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from scipy import stats

import numpyro_gpaug as gpaug
from numpyro_gpaug.gaussians.dense import Moments
from numpyro_gpaug.gaussians.pseudo_data import projected
from numpyro_gpaug.infer.vi.streams import InducingMoves
from numpyro_gpaug.model.arguments import Arguments
from tests.conftest import enable_x64

KEY = jax.random.key(0)
PRIOR = stats.lognorm(1.0)


def model(X, y=None, *, Z):
    scale = numpyro.sample("scale", dist.LogNormal(0.0, 1.0))
    variance = numpyro.param("variance", 2.0, constraint=dist.constraints.positive)
    kernel = gpaug.kernels.Matern52(scale, variance)
    gp = gpaug.GaussianProcess("f", kernel, Z, mean=slope)
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", dist.Normal(gp(X), 0.3), obs=y)


def slope(X):
    """Return the slope in the params, and 0 if they are fixed."""
    return numpyro.param("slope", 0.0) * X[:, 0]


def data(rows=400):
    rng = np.random.default_rng(0)
    X, Z = rng.uniform(-3, 3, size=(rows, 1)).astype("f"), np.linspace(-3, 3, 8)
    X[:4, 0] = Z[::2]
    y = 2 * np.sin(X[:, 0]) + 0.3 * rng.normal(size=rows)
    return X, y, Z.astype("f")[:, None]


# Fits with equal shapes share a program.
SVI = gpaug.ConjugateSVI(model, gpaug.AutoSparseGP(model), None)


def run(X, y, Z, **values):
    values = {"scale": 1.0, "variance": 2.0, "slope": 0.0, **values}
    values["scale_auto_loc"] = values.pop("scale")
    how = {"Z": Z, "init_params": jax.tree.map(jnp.float32, values)}
    return SVI.run(KEY, 50, X, y, progress_bar=False, **how)


def fitted(X, y, Z, **values):
    return SVI.posterior(run(X, y, Z, **values))


def streamed(first, X, y, size, forgetting=1.0, optim=None):
    stream = gpaug.Stream(first, forgetting, optim)
    for start in range(0, len(X), size):
        stream.update(X[start : start + size], y[start : start + size])
    return stream


@pytest.fixture(scope="module")
def first():
    """Fitted to four rows of the normal data, at inducing inputs."""
    X, y, Z = data()
    return fitted(X[:4], y[:4], Z)


def test_a_normal_stream_is_the_posterior_of_all_data(first, tmp_path):
    X, y, Z = data()
    result = run(X, y, Z)
    whole = SVI.posterior(result)
    # A stream starts equally from a file and from the posterior.
    first.save(tmp_path / "first.npz")
    loaded = gpaug.Posterior.load(tmp_path / "first.npz", model)
    stream = streamed(loaded, X[4:], y[4:], 36)
    for name in ("mean", "variance"):
        found, expected = (
            getattr(p.predict_f(X[:50]), name) for p in (stream.posterior, whole)
        )
        np.testing.assert_allclose(found, expected, atol=1e-5 * np.abs(expected).max())
    # Bounds add up; every batch's contains the prior of the hyperparameter.
    assert len(stream.losses) == 11
    prior = PRIOR.logpdf(result.params["scale_auto_loc"])
    losses = [run(X[:4], y[:4], Z).losses[-1], *stream.losses]
    np.testing.assert_allclose(sum(losses) + 11 * prior, result.losses[-1], rtol=2e-5)


def test_what_drifts_is_followed_by_forgetting(first):
    X, _, Z = data()
    phase = np.repeat(np.linspace(0, np.pi, 20), 20)
    noise = 0.3 * np.random.default_rng(1).normal(size=400)
    y = 2 * np.sin(X[:, 0] + phase) + noise
    now = 2 * np.sin(X[:, 0] + np.pi)
    # Without forgetting, a stream has the posterior of all data.
    stream = streamed(first, X[4:], y[4:], 36, forgetting=0.6)
    errors = [
        np.sqrt(np.mean((np.asarray(p.predict_f(X).mean) - now) ** 2))
        for p in (fitted(X, y, Z), stream.posterior)
    ]
    assert errors[1] < 0.5 * errors[0]


def test_hyperparameters_that_are_tracked():
    """The scale starts twenty times too short. If the first batch is all known at
    inducing inputs, the hyperparameters after the second one are those of both.
    """
    X, y, Z = data()
    begun = fitted(X[:4], y[:4], Z, scale=0.1)
    stream = gpaug.Stream(begun, optim="lbfgs")
    stream.update(X[4:40], y[4:40])
    values = stream.posterior.values
    learnt = {name: float(values[name]) for name in ("scale", "variance", "slope")}
    both = run(X[:40], y[:40], Z, **learnt)
    of_both = SVI.posterior(both)
    for name in ("mean", "variance"):
        found, expected = (
            np.asarray(getattr(p.predict_f(X[:50]), name))
            for p in (stream.posterior, of_both)
        )
        np.testing.assert_allclose(found, expected, atol=5e-4 * abs(expected).max())
    # A batch's bound is the difference, and the highest near by.
    before = run(X[:4], y[:4], Z, scale=0.1).losses[-1] + PRIOR.logpdf(0.1)
    np.testing.assert_allclose(before + stream.losses[-1], both.losses[-1], atol=0.02)
    for name, value in learnt.items():
        for other in (0.8 * value - 0.1, 1.25 * value + 0.1):
            moved = run(X[:40], y[:40], Z, **{**learnt, name: other})
            assert moved.losses[-1] > both.losses[-1] + 0.01


def test_tracking_loses_no_information_to_rounding():
    """Directions in which the data say a thousand times as much as in others, in a
    kernel matrix that float32 does not resolve."""

    def smooth(X, y=None, *, Z):
        scale = numpyro.param("scale", 1.0, constraint=dist.constraints.positive)
        gp = gpaug.GaussianProcess("f", gpaug.kernels.SquaredExponential(scale), Z)
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", dist.Normal(gp(X), 0.03), obs=y)

    X, y, _ = data(440)
    y = (np.sin(X[:, 0]) + 0.1 * (y - 2 * np.sin(X[:, 0]))).astype("f")
    svi = gpaug.ConjugateSVI(smooth, gpaug.AutoSparseGP(smooth), None)
    how = {"Z": np.linspace(-3, 3, 20, dtype="f")[:, None], "progress_bar": False}
    first, whole = (
        svi.posterior(svi.run(KEY, 50, X[:n], y[:n], **how)) for n in (40, 440)
    )
    with pytest.warns(UserWarning, match="close to singular in float32.*jitter"):
        stream = streamed(first, X[40:], y[40:], 40, optim=optax.sgd(0.0))
    found, expected = (p.predict_f(X[:50]) for p in (stream.posterior, whole))
    np.testing.assert_allclose(found.variance, expected.variance, rtol=0.01)
    error = np.abs(found.mean - expected.mean) / np.sqrt(expected.variance)
    assert error.max() < 0.02


def matern(X, Z, scale):
    """The model's kernel."""
    r = np.sqrt(5.0) / scale * np.abs(X.astype(float) - Z.T)
    return 2 * (1 + r + r * r / 3) * np.exp(-r)


def conditional(X, y, noise, new, scale):
    """Mean and covariance at new inputs of the full process, in float64."""
    cross, gram = matern(new, X, scale), matern(X, X, scale) + np.diag(noise)
    weights = np.linalg.solve(gram, cross.T).T
    return weights @ y, matern(new, new, scale) - weights @ cross.T


def test_inducing_inputs_may_be_added_and_come_in_another_order(first):
    """All data so far are at inducing inputs, which later batches keep. A normal stream
    is then exact regression, with the noise of old data increased by forgetting.
    """
    X, y, Z = data()
    scale, share = float(first.values["scale"]), 0.8
    added = np.append(Z, np.linspace(-2.5, 4, 4, dtype="f")[:, None], 0)[::-1]
    X = np.concatenate([X[:4], added[:6], added[3:9]])
    y = np.append(y[:4], np.sin(np.arange(12))).astype("f")
    stream = gpaug.Stream(first, share)
    noise = np.full(4, 0.09)
    # The stream keeps the added inducing inputs.
    for end, how in ((10, {"Z": added}), (16, {})):
        start = len(noise)
        old, new = slice(start), slice(start, end)
        stream.update(X[new], y[new], **how)
        noise = noise / share
        mean, covariance = conditional(X[old], y[old], noise, X[new], scale)
        density = stats.multivariate_normal(mean, covariance + 0.09 * np.eye(6))
        # Every batch's bound contains the prior of the hyperparameter.
        expected = density.logpdf(y[new]) + PRIOR.logpdf(scale)
        np.testing.assert_allclose(stream.losses[-1], -expected, atol=1e-3)
        noise = np.append(noise, np.full(6, 0.09))
    new = np.linspace(-3, 5, 7, dtype="f")[:, None]
    mean, covariance = conditional(X, y, noise, new, scale)
    assert str(stream).startswith("Stream of ")
    with pytest.raises(ValueError, match="'Z' .* differs from the fit"):
        stream.posterior.predict_f(new, Z=added[::-1])
    found = stream.posterior.predict_f(new, Z=added)
    np.testing.assert_allclose(found.mean, mean, atol=5e-5)
    np.testing.assert_allclose(found.variance, np.diag(covariance), atol=5e-5)


def gaussian_kl(mean, covariance, other_mean, other):
    inverse, shift = np.linalg.inv(other), mean - other_mean
    log_dets = np.linalg.slogdet(other)[1] - np.linalg.slogdet(covariance)[1]
    trace = np.trace(inverse @ covariance) - len(mean)
    return 0.5 * (trace + shift @ inverse @ shift + log_dets)


def test_what_is_carried_is_nearest():
    """Against the joint Gaussians of a and b; with more variance than the prior's in
    one direction, as likelihoods that are not log-concave leave, too."""
    rng = np.random.default_rng(3)
    size, other = 3, 4
    # The covariance of b (rows) with a: all singular values are below 1.
    left, _, right = np.linalg.svd(rng.normal(size=(other, size)), full_matrices=False)
    A = left @ np.diag([0.98, 0.7, 0.2]) @ right
    root = np.linalg.qr(rng.normal(size=(2, size, size)))[0]
    S = np.einsum("cij,cj,ckj->cik", root, [[1.5, 0.3, 1e-2], [0.9, 0.5, 0.1]], root)
    m = rng.normal(size=(2, size))
    # A whitener that is not triangular.
    whitener = root @ np.linalg.cholesky(S).swapaxes(1, 2)
    q = Moments(*(jnp.asarray(x, jnp.float32) for x in (m, whitener)))
    found, lost = jax.jit(projected)(q, jnp.asarray(A, jnp.float32)[None])
    for c in range(2):
        # The paper's D, where it exists: its inverse is the precision that old data
        # add. The residual of a given b is not added to D.
        added = np.linalg.inv(S[c]) - np.eye(size)
        covariance = np.linalg.inv(np.eye(other) + A @ added @ A.T)
        mean = covariance @ A @ np.linalg.solve(S[c], m[c])
        W = np.asarray(found.whitener[c])
        np.testing.assert_allclose(W.T @ W, covariance, atol=1e-5)
        np.testing.assert_allclose(found.mean[c], mean, atol=1e-5)
        # (a, b) under p(a | b) q(b), and under q_old(a) p(b | a).
        eye = np.eye(size)
        new = np.block([
            [A.T @ covariance @ A + eye - A.T @ A, A.T @ covariance],
            [covariance @ A, covariance],
        ])  # fmt: skip
        old = np.block([
            [S[c], S[c] @ A.T], [A @ S[c], A @ S[c] @ A.T + np.eye(other) - A @ A.T]
        ])  # fmt: skip
        means = [np.append(A.T @ mean, mean), np.append(m[c], A @ m[c])]
        expected = gaussian_kl(means[0], new, means[1], old)
        np.testing.assert_allclose(lost[c], expected, rtol=1e-4)


@pytest.mark.slow
def test_several_latents_and_weights():
    def both(X, y=None, *, Z):
        w = numpyro.sample("w", dist.Normal(jnp.ones(1), 2.0).to_event(1))
        kernel = gpaug.kernels.Matern52(1.0)
        gp = gpaug.GaussianProcess("f", kernel, Z, num_latents=2)
        with numpyro.plate("data", len(X)):
            likelihood = dist.Normal(gp(X) + (X @ w)[:, None], 0.3).to_event(1)
            numpyro.sample("y", likelihood, obs=y)

    X, y, Z = data(60)
    Y = np.stack([y, -y], 1)
    svi = gpaug.ConjugateSVI(both, gpaug.AutoSparseGP(both), None)
    how = {"Z": Z, "progress_bar": False}
    few, whole = (
        svi.posterior(svi.run(KEY, 200, X[:n], Y[:n], **how)) for n in (30, 60)
    )
    both_parts = gpaug.Stream(few).update(X[30:], Y[30:])
    # A learning rate of zero changes nothing.
    again = gpaug.Stream(few, optim=optax.sgd(0.0)).update(X[30:], Y[30:])
    for name in ("mean", "variance"):
        found, expected = (getattr(p.predict_f(X), name) for p in (again, both_parts))
        # Updates end where the bound rises by less than a thousandth.
        np.testing.assert_allclose(found, expected, atol=2e-4)
    found, expected, before = (p.predict_y(X).mean for p in (both_parts, whole, few))
    # They differ: weights and processes are independent in every posterior.
    assert abs(found - expected).max() < 0.03 < 0.2 * abs(before - expected).max()
    assert both_parts.weights["w"].variance < few.weights["w"].variance


def test_refusals(first):
    X, y, _ = data(20)
    for forgetting in (0.0, 1.5):
        with pytest.raises(ValueError, match=r"forgetting must be in \(0, 1\]"):
            gpaug.Stream(first, forgetting)
    stream = gpaug.Stream(first)
    with pytest.raises(ValueError, match="y has shape|NaN"):
        stream.update(X, np.full(20, np.nan))
    assert stream.posterior is first
    for args in ((X,), (X, None), ()):
        with pytest.raises(ValueError, match=r"\['y'\] are missing"):
            gpaug.Stream(first).update(*args)
    with pytest.raises(TypeError, match=r"svi.posterior\(result\). Got a dict"):
        gpaug.Stream({})

    def joint(X, y=None):
        a = numpyro.sample("a", dist.Normal(0, 1))
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", dist.Normal(a + X[:, 0] * 0, 1.0), obs=y)

    structure = gpaug.AutoLatentGaussian(joint).setup(X, y).structure
    with pytest.raises(NotImplementedError, match="AutoSparseGP"):
        gpaug.Stream(Mock(gpaug.Posterior, structure=structure))


def test_moves_that_are_refused(first):
    X, y, Z = data(20)
    stream = gpaug.Stream(first)
    with pytest.raises(ValueError, match=r"inducing inputs have shape \(8, 2\)"):
        stream.update(X, y, Z=np.repeat(Z, 2, 1))
    with pytest.raises(ValueError, match=r'pass Z.astype\("float32"\)'):
        stream.update(X, y, Z=Z.astype(np.float16))

    def moved(model, before, after, values=None):
        moves, kwargs = InducingMoves(model), {"Z": after}
        moves.changed((X, y), kwargs, {"Z": before}, values or {})
        pair = (Arguments.split((X, y), {"Z": z}) for z in (before, after))
        return moves(*pair, values or {}, {"f": Moments(jnp.zeros((1, 8)), EYE)})

    EYE = jnp.eye(8)[None]

    def process(X, y, Z, **how):
        gp = gpaug.GaussianProcess("f", gpaug.kernels.Matern52(1.0), Z, **how)
        return gp(X)

    def of_a_param(X, y, Z):
        return process(X, y, numpyro.param("inputs", Z))

    def of_another_scale(X, y, Z):
        kernel = gpaug.kernels.Matern52(jnp.max(Z))
        return gpaug.GaussianProcess("f", kernel, Z)(X)

    with enable_x64(True), pytest.raises(ValueError, match="have dtype float64, and"):
        moved(process, Z, Z.astype(float))
    with pytest.raises(ValueError, match=r"start at \['Z'\] and stay"):
        moved(of_a_param, Z, Z + 1, {"inputs": Z})
    with pytest.raises(ValueError, match="the kernel of 'f' differs"):
        moved(of_another_scale, Z, Z + 1)
    each = np.stack([Z, Z])
    with pytest.raises(NotImplementedError, match="one set that all latents share"):
        moved(partial(process, num_latents=2), each, each + 1)
