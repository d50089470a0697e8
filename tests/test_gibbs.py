# SPDX-License-Identifier: Apache-2.0
"""Exact samplers beside importance sampling and NUTS on the same posterior, and as
guests of NumPyro's MCMC."""

from contextlib import ExitStack
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro import handlers
from numpyro.infer import MCMC, NUTS
from scipy.stats import norm

import numpyro_gpaug as gpaug
from numpyro_gpaug.infer.mcmc.elliptical import minus_log_density
from tests.chains import assert_same_distribution, importance_draws, many_chains
from tests.conftest import slow

KEY = jax.random.key(0)
X = np.random.default_rng(0).normal(size=(20, 2)).astype(np.float32)
LABELS = (np.sin(2 * X[:, 0]) > 0).astype(int)


def classifier(X, y=None, *, inducing, mask=None, scale=None):
    gp = gpaug.GaussianProcess("f", gpaug.kernels.Matern52(1.0, 3.0), inducing, 0.5)
    with numpyro.plate("data", X.shape[0]), ExitStack() as stack:
        if mask is not None:
            stack.enter_context(handlers.mask(mask=mask))
        if scale is not None:
            stack.enter_context(handlers.scale(scale=scale))
        numpyro.sample("y", dist.Bernoulli(logits=1 - 2 * gp(X)), obs=y)


def additive(X, y=None, *, inducing):
    """Two processes and weights in one predictor, and hyperparameters."""
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0.0, 0.5))
    kernel = gpaug.kernels.SquaredExponential(lengthscale)
    f = gpaug.GaussianProcess("f", kernel, inducing)(X)
    g = gpaug.GaussianProcess("g", gpaug.kernels.Matern32(0.5, 2.0), inducing)(X)
    w = numpyro.sample("w", dist.Normal(jnp.ones(2), 2.0).to_event(1))
    scale = numpyro.sample("scale", dist.LogNormal(-1.0, 0.5))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.StudentT(4.0, f + g + X @ w, scale), obs=y)


def noise_that_varies(X, y=None, *, inducing):
    kernel = gpaug.kernels.SquaredExponential()
    f, g = (gpaug.GaussianProcess(name, kernel, inducing)(X) for name in "fg")
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", gpaug.HeteroscedasticNormal(f, g, 4.0), obs=y)


def classes(X, y=None, *, inducing, likelihood=gpaug.LogisticSoftmax):
    kernel = gpaug.kernels.SquaredExponential(1.0, 4.0)
    gp = gpaug.GaussianProcess("f", kernel, inducing, num_latents=3)
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", likelihood(gp(X)), obs=y)


def softmax(X, y=None, *, inducing):
    classes(X, y, inducing=inducing, likelihood=lambda f: dist.Categorical(logits=f))


def run(kernel, *args, num_warmup=100, num_samples=3000, extra_fields=(), **kwargs):
    options = {k: kwargs.pop(k) for k in ("num_chains", "chain_method", "thinning",
                                          "progress_bar") if k in kwargs}  # fmt: skip
    mcmc = MCMC(
        kernel, num_warmup=num_warmup, num_samples=num_samples,
        **{"progress_bar": False, **options},
    )  # fmt: skip
    mcmc.run(KEY, *args, extra_fields=extra_fields, **kwargs)
    return mcmc


# -- against importance sampling -------------------------------------------------------


def matern(a, b, order, variance):
    """Covariance of lengthscale 1 by NumPy."""
    r = np.sqrt(order * ((a[:, None] - b[None]) ** 2).sum(-1))
    polynomial = 1 + r + (r**2 / 3 if order == 5 else 0)
    return variance * polynomial * np.exp(-r)


def projection(rows, order=5, variance=3.0, inducing=6):
    """Return the projection of whitened inducing values to function values."""
    Z, at = X[:inducing].astype(float), X[rows].astype(float)
    factor = np.linalg.cholesky(matern(Z, Z, order, variance))
    return np.linalg.solve(factor, matern(Z, at, order, variance)).T


def log_sigmoids(logits, labels):
    return -np.logaddexp(0, np.where(labels, -logits, logits)).sum(-1)


def posterior_of_classifier(rows):
    A, labels = projection(rows), LABELS[rows]

    def log_density(v):
        return log_sigmoids(1 - 2 * (0.5 + v @ A.T), labels) - 0.5 * (v**2).sum(1)

    return {"f.v": importance_draws(log_density, 6)}


@pytest.mark.parametrize("rows", [20, 12], ids=["all", "some masked"])
def test_augmented_gaussian_draws_from_the_posterior(rows) -> None:
    """Masked data of any value are equal to data left out."""
    mask = np.arange(20) < rows
    y = np.where(mask, LABELS, 7)
    found = chains_of_classifier(mask, y)
    reference = posterior_of_classifier(slice(rows))
    assert_same_distribution(found, reference, "f.v")
    values = 0.5 + found["f.v"] @ projection(slice(20)).T
    np.testing.assert_allclose(found["f"], values, atol=1e-3)


@cache
def program_of_classifier():
    """Compiled once: chains by mask and labels."""
    kernel = gpaug.AugmentedGaussian(classifier)

    def run(key, mask, y):
        given = {"inducing": X[:6], "mask": mask}
        state = kernel.init(key, 0, None, (X, y), given)

        def step(state, _):
            state = kernel.sample(state, (X, y), given)
            return state, state.z

        return jax.lax.scan(step, state, None, length=60)[1]

    return jax.jit(jax.vmap(run, (0, None, None)))


def chains_of_classifier(mask, y):
    z = program_of_classifier()(jax.random.split(KEY, 300), mask, y)
    return {k: np.asarray(x)[:, 40:].reshape(-1, x.shape[-1]) for k, x in z.items()}


def test_elliptical_slices_draw_from_the_posterior() -> None:
    """Around any Gaussian: here a rough one."""
    q = {"potential": np.full(6, 0.3), "precision": np.eye(6) + 0.2}
    params = {f"f.v_auto_{k}": jnp.asarray(x, jnp.float32) for k, x in q.items()}
    guide = gpaug.AutoSparseGP(classifier).setup(X, LABELS, inducing=X[:6])
    kernel = gpaug.EllipticalSlice(classifier, guide, params)
    found = many_chains(kernel, (X, LABELS), {"inducing": X[:6]})
    assert_same_distribution(found, posterior_of_classifier(slice(20)), "f.v")


# -- against NUTS ----------------------------------------------------------------------


def parted(X, y=None):
    """Two data sets of a process, one of weights and a scalar, and a scalar that no
    datum depends on."""
    kernel = gpaug.kernels.SquaredExponential(1.0, 2.0)
    f = gpaug.GaussianProcess("f", kernel, X[:4])(X)
    w = numpyro.sample("w", dist.Normal(jnp.ones(2), 1.0).to_event(1))
    u, free = (numpyro.sample(name, dist.Normal(1.0, 2.0)) for name in ("u", "free"))
    with numpyro.plate("data", len(X)):
        numpyro.sample("a", dist.StudentT(4.0, f, 0.5), obs=y)
        numpyro.sample("b", dist.Bernoulli(logits=2 * f), obs=LABELS)
        numpyro.sample("c", dist.Laplace(X @ w + u, 0.5), obs=y)
    numpyro.deterministic("all", jnp.append(w, jnp.stack([u, free])))


def shared_noise(X, y=None):
    """Two parameters of a likelihood, one of which two blocks share."""
    kernel = gpaug.kernels.SquaredExponential(1.0, 2.0)
    f, g = (gpaug.GaussianProcess(name, kernel, X[:4])(X) for name in "fg")
    w = numpyro.sample("w", dist.Normal(jnp.ones(2), 1.0).to_event(1))
    numpyro.deterministic("all", jnp.concatenate([g, w]))
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", gpaug.HeteroscedasticNormal(f + X @ w, g, 4.0), obs=y)


def shared_classes(X, y=None):
    """Latents of a process and weights in one predictor, and a mean to learn."""
    level = numpyro.sample("level", dist.Normal(0.0, 1.0))
    kernel = gpaug.kernels.SquaredExponential(1.0, 2.0)
    gp = gpaug.GaussianProcess("f", kernel, X[:4], level, num_latents=4)
    b = numpyro.sample("b", dist.Normal(jnp.zeros(3), 1.0).to_event(1))
    numpyro.deterministic("all", jnp.append(b, level))
    with numpyro.plate("data", len(X)):
        logits = gp(X, latents=jnp.array([2, 0, 3])) + b
        numpyro.sample("y", gpaug.LogisticSoftmax(logits), obs=LABELS + (y > 0))


PARTS = {
    parted: [{"f.v"}, {"w", "u"}, {"free"}],
    shared_noise: [{"f.v", "w"}, {"g.v"}],
    shared_classes: [{"level", "f.v", "b"}],
}


@pytest.mark.parametrize("model", PARTS)
def test_latents_that_share_no_predictor_are_parts(model) -> None:
    kernel = gpaug.AugmentedGaussian(model)
    jax.eval_shape(lambda key: kernel.init(key, 0, None, (X, REALS), {}), KEY)
    found = [{s.name for s in part.structure.sites} for part in kernel._parts]
    assert sorted(map(sorted, found)) == sorted(map(sorted, PARTS[model]))
    alone = [part.process for part in kernel._parts if part.process]
    assert alone == {parted: ["f"], shared_noise: ["g"], shared_classes: []}[model]


@pytest.mark.slow
@pytest.mark.parametrize("sampler", [gpaug.EllipticalSlice, gpaug.AugmentedGaussian])
@pytest.mark.parametrize("model", PARTS)
def test_parts_are_drawn_from_the_posterior(model, sampler) -> None:
    reference = run(NUTS(model), X, REALS, num_warmup=500, num_samples=6000)
    found = run(sampler(model), X, REALS, num_samples=30000, thinning=3)
    assert_same_distribution(found.get_samples(), reference.get_samples(), "f", "all")


# -- the Gaussian part -----------------------------------------------------------------


# -- a guest of MCMC -------------------------------------------------------------------


def linear(X, y=None):
    """Weights and long-tailed noise: the cheapest model to compile."""
    w = numpyro.sample("w", dist.Normal(jnp.zeros(2), 1.0).to_event(1))
    f = numpyro.deterministic("mean", X @ w)
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.StudentT(4.0, f, 0.5), obs=y)


REALS = X[:, 0] - X[:, 1] ** 2


def test_chains_thinning_and_extra_fields() -> None:
    fields = ("aux.y.precision",)
    mcmc = run(
        gpaug.AugmentedGaussian(linear), X, REALS, num_warmup=5, num_samples=10,
        thinning=2, extra_fields=fields, num_chains=2, chain_method="vectorized",
    )  # fmt: skip
    samples = mcmc.get_samples(group_by_chain=True)
    shapes = {k: v.shape for k, v in samples.items()}
    assert shapes == {"mean": (2, 5, 20), "w": (2, 5, 2)}
    assert not np.allclose(*samples["w"])
    precision = np.asarray(mcmc.get_extra_fields(group_by_chain=True)[fields[0]])
    assert precision.shape == (2, 5, 20)
    assert np.all(precision > 0)


# -- refusals --------------------------------------------------------------------------


def refuse(kernel, match, *args, error=gpaug.NotConjugateError, **kwargs) -> None:
    with pytest.raises(error, match=match):
        kernel.init(KEY, 0, None, args, {"inducing": X[:6], **kwargs})


def test_refusals_name_the_way_out() -> None:
    refuse(gpaug.AugmentedGaussian(softmax), "register_augmentation", X, LABELS)
    refuse(gpaug.AugmentedGaussian(classifier), "scaled", X, LABELS, scale=0.5)
    refuse(gpaug.CollapsedGaussian(additive), "parameter.*'scale'", X, X[:, 0])
    refuse(gpaug.CollapsedGaussian(classifier), "no hyperparameters", X, LABELS)
    whole = gpaug.with_residual(classifier, "site")
    refuse(gpaug.EllipticalSlice(whole), "with_residual", X, LABELS)
    no_data = "'y' has no observed value"
    refuse(gpaug.AugmentedGaussian(classifier), no_data, X, None, error=ValueError)


def test_subsamples_are_refused() -> None:
    def model(X, y=None):
        gp = gpaug.GaussianProcess("f", gpaug.kernels.Matern52(), X[:4])
        with numpyro.plate("data", X.shape[0], subsample_size=5) as i:
            numpyro.sample("y", dist.Bernoulli(logits=gp(X[i])), obs=y[i])

    with pytest.raises(ValueError, match="subsample"):
        gpaug.AugmentedGaussian(model).init(KEY, 0, None, (X, jnp.asarray(LABELS)), {})


def test_slices_want_params_at_the_fit() -> None:
    def model(X, y=None):
        variance = numpyro.param("variance", 1.0)
        gp = gpaug.GaussianProcess("f", gpaug.kernels.Matern52(1.0, variance), X[:4])
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Bernoulli(logits=gp(X)), obs=y)

    params = {
        "f.v_auto_potential": jnp.zeros(4), "f.v_auto_precision": jnp.eye(4),
        "variance": jnp.array(2.0),
    }  # fmt: skip
    guide = gpaug.AutoSparseGP(model).setup(X, LABELS)
    kernel = gpaug.EllipticalSlice(model, guide, params)
    with pytest.raises(ValueError, match="handlers.substitute"):
        kernel.init(KEY, 0, None, (X, LABELS), {})
    fixed = handlers.substitute(model, data=params)
    kernel = gpaug.EllipticalSlice(fixed, guide, params)
    init = jax.jit(lambda key: kernel.init(key, 0, None, (X, LABELS), {}).log_ratio)
    assert np.isfinite(init(KEY))


def process_and_weights(X, y=None, *, inducing, likelihood):
    gp = gpaug.GaussianProcess("f", gpaug.kernels.Matern32(), inducing)
    w = numpyro.sample("w", dist.Normal(jnp.ones(2), 2.0).to_event(1))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", likelihood(gp(X) + X @ w), obs=y)


def test_slices_go_around_a_joint_gaussian_where_blocks_meet(x64) -> None:
    """With Gaussian noise the Gaussian is the posterior, and every move is accepted."""
    inputs, scale = X.astype(float), 0.5
    y = inputs[:, 0] + np.sin(3 * inputs[:, 1])
    data = {"inducing": inputs[:4], "likelihood": lambda f: dist.Normal(f, scale)}
    kernel = gpaug.EllipticalSlice(process_and_weights)

    @jax.jit
    def chain(key):
        state = kernel.init(key, 0, None, (inputs, y), data)

        def step(state, _):
            state = kernel.sample(state, (inputs, y), data)
            return state, (state.evaluations, state.log_ratio, state.scale)

        return state.ellipses.moments, jax.lax.scan(step, state, None, length=50)[1]

    (q,), (evaluations, log_ratio, scales) = jax.device_get(chain(KEY))
    across = projection(slice(20), order=3, variance=1.0, inducing=4).T
    design = np.concatenate([across, inputs.T])
    prior = np.diag([1.0] * 4 + [0.25] * 2)
    precision = prior + design @ design.T / scale**2
    potential = prior @ np.array([0.0] * 4 + [1.0] * 2) + design @ y / scale**2
    covariance = np.linalg.inv(precision)
    # Latents are affine in standard normal numbers.
    loc, scale = np.array([0.0] * 4 + [1.0] * 2), np.array([1.0] * 4 + [2.0] * 2)
    whitener = q.whitener[0] * scale
    np.testing.assert_allclose(whitener.T @ whitener, covariance, atol=1e-8)
    mean = loc + scale * q.mean[0]
    np.testing.assert_allclose(mean, covariance @ potential, atol=1e-7)
    np.testing.assert_array_equal(evaluations, 1)
    np.testing.assert_allclose(log_ratio, log_ratio[0], atol=1e-6)
    # Scales are not adapted without warm-up.
    np.testing.assert_array_equal(scales, 1)


@pytest.mark.parametrize(
    "model",
    [
        classifier,
        *(slow(m) for m in (noise_that_varies, softmax)),
    ],
)
def test_slices_find_the_gaussian_that_closed_form_updates_find(model, x64) -> None:
    inputs = X.astype(float)
    y = {
        classifier: LABELS,
        noise_that_varies: inputs[:, 0],
        softmax: LABELS + (X[:, 1] > 0),
    }[model]
    # Full processes: the fit of a sparse one has a residual, which slices do not have.
    data = {"inducing": inputs}
    kernel = gpaug.EllipticalSlice(model)
    found = jax.jit(
        lambda key: kernel.init(key, 0, None, (inputs, y), data).ellipses.moments
    )(KEY)
    svi = gpaug.ConjugateSVI(model, gpaug.AutoSparseGP(model), updates="exact")
    params = svi.run(KEY, 300, inputs, y, progress_bar=False, **data).params
    fits = jax.jit(svi.guide.moments)(svi.guide.split_params(params)[1])
    for q, fit in zip(found, fits.values(), strict=True):
        ours, theirs = (np.swapaxes(w, -1, -2) @ w for w in (q.whitener, fit.whitener))
        sd = np.sqrt(np.diagonal(theirs, axis1=-2, axis2=-1))
        np.testing.assert_allclose(q.mean / sd, fit.mean / sd, atol=0.1)
        scale = sd[..., :, None] * sd[..., None, :]
        np.testing.assert_allclose(ours / scale, theirs / scale, atol=0.05)


def counts(X, y=None):
    gp = gpaug.GaussianProcess("f", gpaug.kernels.Matern52(), X[:4])
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Poisson(jnp.exp(gp(X))), obs=y)


def test_slices_that_need_a_fit_say_so() -> None:
    def shares(X, y=None):
        gp = gpaug.GaussianProcess("f", gpaug.kernels.Matern52(), X[:4], num_latents=3)
        with numpyro.plate("data", X.shape[0]):
            likelihood = dist.Dirichlet(jnp.exp(gp(X)))
            numpyro.sample("y", likelihood, obs=y)

    y = jnp.full((len(X), 3), 1 / 3)
    with pytest.raises(gpaug.NotConjugateError, match="TraceAnalytic_ELBO"):
        gpaug.EllipticalSlice(shares).init(KEY, 0, None, (X, y), {})
    guide = gpaug.AutoSparseGP(counts, covariance="dense")
    with pytest.raises(ValueError, match="params is missing"):
        gpaug.EllipticalSlice(counts, guide)
    guide = gpaug.AutoSparseGP(counts, covariance="preconditioned")
    with pytest.raises(ValueError, match="finds a Gaussian itself"):
        gpaug.EllipticalSlice(counts, guide, {})


def test_slices_learn_how_wide_the_posterior_is_in_warm_up() -> None:
    """Few labels that weights separate: the posterior has longer tails than the fit."""

    def model(X, y=None):
        w = numpyro.sample("w", dist.Normal(jnp.zeros(2), 10.0).to_event(1))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Bernoulli(logits=X @ w), obs=y)

    inputs, y = X[:6], (X[:6, 0] > 0).astype(int)
    fields = {"extra_fields": ("scale",), "num_samples": 20}
    learnt = run(gpaug.EllipticalSlice(model), inputs, y, num_warmup=500, **fields)
    scale = np.asarray(learnt.get_extra_fields()["scale"])
    assert (scale == scale[0]).all()
    assert scale[0] > 1.05


def test_slices_go_around_gaussians_of_their_scale() -> None:
    """The reference has differences of the log-density, without constants, by SciPy."""
    rng, scale = np.random.default_rng(0), np.array([2.0, 0.5])
    here, there = ([rng.normal(size=s) for s in ((2, 3), (1, 4))] for _ in range(2))

    def density(white):
        parts = zip(white, scale, strict=True)
        return sum(norm(0, s).logpdf(u).sum() for u, s in parts)

    ours = [minus_log_density(tuple(map(jnp.asarray, w)), scale) for w in (here, there)]
    difference = density(there) - density(here)
    np.testing.assert_allclose(ours[0] - ours[1], difference, rtol=1e-5)
