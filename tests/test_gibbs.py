# SPDX-License-Identifier: Apache-2.0
"""Exact samplers beside NUTS on the same posterior, and as guests of NumPyro's MCMC."""

from contextlib import ExitStack

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro import handlers
from numpyro.infer import MCMC, NUTS, Gibbs

import numpyro_gpaug as gpaug
from numpyro_gpaug.math.affine import AffineMap, GaussianFactors
from tests.conftest import assert_close

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


def assert_same_law(ours, theirs, *names, bound=5.0) -> None:
    """Means, variances and three quantiles of every element agree within ``bound``
    standard errors, from means of 30 batches of consecutive draws."""
    for name in names:
        a, b = (
            np.asarray(s[name], float).reshape(len(s[name]), -1) for s in (ours, theirs)
        )
        centre = np.concatenate([a, b])
        middle = centre.mean(0)
        statistics = [lambda x: x, lambda x, c=middle: (x - c) ** 2]
        levels = np.quantile(centre, (0.1, 0.5, 0.9), axis=0)
        statistics += [lambda x, q=q: x < q for q in levels]
        for statistic in statistics:
            (m, e), (n, f) = (
                _mean_and_error(statistic(a)),
                _mean_and_error(statistic(b)),
            )
            assert np.abs((m - n) / np.hypot(e, f)).max() < bound, name


def _mean_and_error(draws):
    batches = draws[: len(draws) // 30 * 30].reshape(30, -1, draws.shape[1]).mean(1)
    return batches.mean(0), batches.std(0, ddof=1) / np.sqrt(30) + 1e-9


# -- against NUTS ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "inducing", [pytest.param(X, marks=pytest.mark.slow), X[:6]], ids=["full", "sparse"]
)
def test_classifier(inducing) -> None:
    data = {"inducing": inducing}
    reference = run(NUTS(classifier), X, LABELS, num_warmup=300, **data).get_samples()
    gibbs = run(
        gpaug.AugmentedGaussian(classifier), X, LABELS, num_samples=4000, **data
    )
    assert_same_law(gibbs.get_samples(), reference, "f", "f.v")
    svi = gpaug.ConjugateSVI(classifier, gpaug.AutoSparseGP(classifier))
    params = svi.run(KEY, 5, X, LABELS, progress_bar=False, **data).params
    kernel = gpaug.EllipticalSlice(classifier, svi.guide, params)
    slices = run(kernel, X, LABELS, num_samples=8000, **data)
    assert_same_law(slices.get_samples(), reference, "f", "f.v")


# The quick test of hyperparameters is that of the joint distribution, in
# test_calibration_of_samplers.py.
@pytest.mark.slow
@pytest.mark.parametrize("sampler", ["augmented", "collapsed", "elliptical"])
def test_sums_with_hyperparameters(sampler) -> None:
    y = jnp.asarray(X[:, 0] + np.sin(3 * X[:, 1]))
    data = {"inducing": X[:8], "num_warmup": 400}
    reference = run(NUTS(additive), X, y, num_samples=2000, **data).get_samples()
    owned = ["f.v", "g.v", "w"]
    ours = gpaug.AugmentedGaussian(additive)
    if sampler == "collapsed":
        ours, owned = gpaug.CollapsedGaussian(additive), [*owned, "lengthscale"]
    elif sampler == "elliptical":
        svi = gpaug.ConjugateSVI(additive, gpaug.AutoSparseGP(additive))
        params = svi.run(KEY, 20, X, y, inducing=X[:8], progress_bar=False).params
        ours = gpaug.EllipticalSlice(additive, svi.guide, params)
    kernel = Gibbs([(ours, owned), (NUTS(additive), None)])
    found = run(kernel, X, y, num_samples=3000, **data).get_samples()
    assert_same_law(found, reference, "f", "g", "w", "lengthscale", "scale")


@pytest.mark.slow
@pytest.mark.parametrize("model", [noise_that_varies, classes])
def test_several_latents(model) -> None:
    y = LABELS + (X[:, 1] > 0) if model is classes else jnp.asarray(X[:, 0])
    data = {"inducing": X[:8]}
    reference = run(NUTS(model), X, y, num_warmup=500, num_samples=6000, **data)
    gibbs = run(gpaug.AugmentedGaussian(model), X, y, num_samples=20000, **data)
    assert_same_law(gibbs.get_samples(), reference.get_samples(), "f")


@pytest.mark.slow
def test_slices_with_hyperparameters_and_without_augmentation() -> None:
    def model(X, y=None, *, inducing):
        variance = numpyro.sample("variance", dist.LogNormal(0.0, 0.5))
        kernel = gpaug.kernels.SquaredExponential(1.0, variance)
        gp = gpaug.GaussianProcess("f", kernel, inducing, num_latents=3)
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Categorical(logits=gp(X)), obs=y)

    y, data = LABELS + (X[:, 1] > 0), {"inducing": X[:8]}
    reference = run(NUTS(model), X, y, num_warmup=500, num_samples=6000, **data)
    svi = gpaug.ConjugateSVI(model, gpaug.AutoSparseGP(model))
    params = svi.run(KEY, 20, X, y, progress_bar=False, **data).params
    kernel = gpaug.EllipticalSlice(model, svi.guide, params)
    kernel = Gibbs([(kernel, ["f.v"]), (NUTS(model), None)])
    slices = run(kernel, X, y, num_warmup=300, num_samples=20000, **data)
    assert_same_law(slices.get_samples(), reference.get_samples(), "f", "variance")


# -- the Gaussian part -----------------------------------------------------------------


def test_joint_draws_and_evidence(x64) -> None:
    keys = jax.random.split(KEY, 5)
    projection, offset, potential, precision = (
        jax.random.normal(k, s)
        for k, s in zip(keys, [(1, 3, 3), (2, 3), (2, 3), (2, 3)], strict=False)
    )
    precision = jnp.square(precision).at[0, 0].set(0.0)
    potential = potential.at[0, 0].set(0.0)
    map_ = AffineMap(offset, projection, jnp.zeros_like(offset))
    factors = GaussianFactors(potential, precision)
    A = np.asarray(projection[0])
    draw = jax.jit(jax.vmap(lambda m, k: m.draw(k, factors), (None, 0)))
    for latent in range(2):
        w, h, o = (np.asarray(a[latent]) for a in (precision, potential, offset))
        cover = np.linalg.inv(np.eye(3) + A @ np.diag(w) @ A.T)
        mean = cover @ A @ (h - w * o)
        for way in (map_, map_.with_gram()):
            z = np.asarray(draw(way, jax.random.split(keys[4], 8000)))[:, latent]
            error = np.sqrt(np.diag(cover) / len(z))
            assert np.all(np.abs(z.mean(0) - mean) < 4.5 * error)
            assert np.abs(np.cov(z.T) - cover).max() < 0.06
    one = AffineMap(offset[1:], projection, jnp.zeros_like(offset[1:]))
    expected = 0.5 * np.linalg.slogdet(cover)[1] + np.sum(h * o - 0.5 * w * o**2)
    expected += 0.5 * mean @ np.linalg.solve(cover, mean)
    assert_close(
        one.log_evidence(GaussianFactors(potential[1:], precision[1:])), expected
    )


def test_repeats_and_masks_count_as_they_should() -> None:
    """Masked data, whatever they hold, against the data left out."""
    mask = np.arange(20) < 12
    y = jnp.where(mask, LABELS, 7)
    kernel = gpaug.AugmentedGaussian(classifier)
    with_mask = run(
        kernel, X, y, inducing=X[:6], mask=jnp.asarray(mask), num_samples=3000
    )
    short = run(
        gpaug.AugmentedGaussian(classifier), X[:12], LABELS[:12], inducing=X[:6],
        num_samples=3000,
    )  # fmt: skip
    assert_same_law(with_mask.get_samples(), short.get_samples(), "f.v")


# -- a guest of MCMC -------------------------------------------------------------------


def test_chains_thinning_resuming_and_extra_fields() -> None:
    kernel = gpaug.AugmentedGaussian(classifier)
    data = {"inducing": X[:6], "num_warmup": 5, "num_samples": 10}
    fields = ("aux.y.omega",)
    mcmc = run(kernel, X, LABELS, extra_fields=fields, thinning=2, **data)
    samples = mcmc.get_samples()
    assert {k: v.shape for k, v in samples.items()} == {"f": (5, 20), "f.v": (5, 6)}
    omega = mcmc.get_extra_fields()["aux.y.omega"]
    assert omega.shape == (5, 20)
    assert np.all(np.asarray(omega) > 0)
    mcmc.post_warmup_state = mcmc.last_state
    mcmc.run(mcmc.last_state.rng_key, X, LABELS, inducing=X[:6])
    # The same chain as one run twice as long.
    whole = run(
        gpaug.AugmentedGaussian(classifier), X, LABELS, thinning=2,
        **{**data, "num_samples": 20},
    )  # fmt: skip
    np.testing.assert_allclose(
        mcmc.get_samples()["f"], whole.get_samples()["f"][5:], rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("method", ["sequential", "vectorized", jax.vmap])
def test_several_chains(method) -> None:
    kernel = gpaug.AugmentedGaussian(classifier)
    mcmc = run(
        kernel, X, LABELS, inducing=X[:6], num_warmup=2, num_samples=4, num_chains=2,
        chain_method=method, progress_bar=method == "sequential",
    )  # fmt: skip
    f = np.asarray(mcmc.get_samples(group_by_chain=True)["f"])
    assert f.shape == (2, 4, 20)
    assert np.isfinite(f).all()
    assert not np.allclose(f[0], f[1])


def test_samples_feed_predictive() -> None:
    mcmc = run(gpaug.AugmentedGaussian(classifier), X, LABELS, inducing=X[:6],
               num_warmup=2, num_samples=3)  # fmt: skip
    latents = {"f.v": mcmc.get_samples()["f.v"]}
    found = numpyro.infer.Predictive(classifier, latents)(KEY, X[:4], inducing=X[:6])
    assert found["y"].shape == (3, 4)


# -- refusals --------------------------------------------------------------------------


def refuse(kernel, match, *args, error=gpaug.NotConjugateError, **kwargs) -> None:
    with pytest.raises(error, match=match):
        kernel.init(KEY, 0, None, args, {"inducing": X[:6], **kwargs})


def test_refusals_name_the_way_out() -> None:
    refuse(gpaug.AugmentedGaussian(softmax), "register_augmentation", X, LABELS)
    refuse(gpaug.AugmentedGaussian(classifier), "scaled", X, LABELS, scale=0.5)
    refuse(gpaug.AugmentedGaussian(additive), "lengthscale.*Gibbs", X, X[:, 0])
    refuse(gpaug.CollapsedGaussian(additive), "parameter.*'scale'", X, X[:, 0])
    refuse(gpaug.CollapsedGaussian(classifier), "no hyperparameters", X, LABELS)
    whole = gpaug.with_residual(classifier, "site")
    refuse(gpaug.AugmentedGaussian(whole), "with_residual", X, LABELS)
    no_data = "no observed site|observations"
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

    svi = gpaug.ConjugateSVI(model, gpaug.AutoSparseGP(model))
    params = svi.get_params(svi.init(KEY, X, LABELS))
    params = {**params, "variance": jnp.array(2.0)}
    kernel = gpaug.EllipticalSlice(model, svi.guide, params)
    with pytest.raises(ValueError, match="handlers.substitute"):
        kernel.init(KEY, 0, None, (X, LABELS), {})
    fixed = handlers.substitute(model, data=params)
    kernel = gpaug.EllipticalSlice(fixed, svi.guide, params)
    state = kernel.init(KEY, 0, None, (X, LABELS), {})
    assert np.isfinite(state.log_ratio)


def process_and_weights(X, y=None, *, inducing, likelihood):
    gp = gpaug.GaussianProcess("f", gpaug.kernels.Matern32(), inducing)
    w = numpyro.sample("w", dist.Normal(jnp.ones(2), 2.0).to_event(1))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", likelihood(gp(X) + X @ w), obs=y)


def test_slices_go_around_a_joint_gaussian_where_blocks_meet(x64) -> None:
    """With Gaussian noise it is the posterior, and no move is ever refused."""
    inputs, scale = jnp.asarray(X, jnp.float64), 0.5
    y = inputs[:, 0] + jnp.sin(3 * inputs[:, 1])
    data = {"inducing": inputs[:4], "likelihood": lambda f: dist.Normal(f, scale)}
    kernel = gpaug.EllipticalSlice(process_and_weights)
    state = kernel.init(KEY, 0, None, (inputs, y), data)
    (part,) = state.ellipses.parts
    covariance_of = gpaug.kernels.Matern32()
    inner = covariance_of(inputs[:4], inputs[:4]) + 1e-10 * np.eye(4)
    across = np.linalg.solve(
        np.linalg.cholesky(inner), covariance_of(inputs[:4], inputs)
    )
    # Blocks in the order of their names: f, w.
    design = np.concatenate([across, inputs.T])
    prior = np.diag([1.0] * 4 + [0.25] * 2)
    precision = prior + design @ design.T / scale**2
    potential = prior @ np.array([0.0] * 4 + [1.0] * 2) + design @ y / scale**2
    covariance = np.linalg.inv(precision)
    whitener = part.moments.whitener[0]
    np.testing.assert_allclose(whitener.T @ whitener, covariance, atol=1e-8)
    np.testing.assert_allclose(part.moments.mean[0], covariance @ potential, atol=1e-7)
    extra_fields = ("evaluations", "log_ratio")
    chain = run(
        kernel,
        inputs,
        y,
        num_warmup=0,
        num_samples=50,
        extra_fields=extra_fields,
        **data,
    ).get_extra_fields()
    np.testing.assert_array_equal(chain["evaluations"], 1)
    np.testing.assert_allclose(chain["log_ratio"], chain["log_ratio"][0], atol=1e-6)


def test_slices_where_blocks_meet() -> None:
    data = {"inducing": X[:6], "likelihood": lambda f: dist.Bernoulli(logits=f)}
    gibbs = gpaug.AugmentedGaussian(process_and_weights)
    reference = run(gibbs, X, LABELS, num_samples=8000, **data).get_samples()
    kernel = gpaug.EllipticalSlice(process_and_weights)
    slices = run(kernel, X, LABELS, num_samples=8000, **data)
    assert_same_law(slices.get_samples(), reference, "f", "f.v", "w")


@pytest.mark.parametrize("model", [classifier, noise_that_varies, softmax])
def test_slices_find_the_gaussian_that_closed_form_updates_find(model, x64) -> None:
    inputs = jnp.asarray(X, jnp.float64)
    y = {
        classifier: jnp.asarray(LABELS),
        noise_that_varies: inputs[:, 0],
        softmax: jnp.asarray(LABELS + (X[:, 1] > 0)),
    }[model]
    data = {"inducing": inputs}
    state = gpaug.EllipticalSlice(model).init(KEY, 0, None, (inputs, y), data)
    svi = gpaug.ConjugateSVI(model, gpaug.AutoSparseGP(model), updates="exact")
    params = svi.run(KEY, 300, inputs, y, progress_bar=False, **data).params
    fits = svi.guide.moments(svi.guide.split_params(params)[1])
    for part, fit in zip(state.ellipses.parts, fits.values(), strict=True):
        q = part.moments
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
    y = jnp.asarray(LABELS)
    with pytest.raises(gpaug.NotConjugateError, match="TraceAnalytic_ELBO"):
        gpaug.EllipticalSlice(counts).init(KEY, 0, None, (X, y), {})
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

    inputs, y = jnp.asarray(X[:6]), jnp.asarray(X[:6, 0] > 0, int)
    fields = {"extra_fields": ("scale",), "num_samples": 500}
    learnt = run(gpaug.EllipticalSlice(model), inputs, y, num_warmup=500, **fields)
    scale = learnt.get_extra_fields()["scale"]
    assert (scale == scale[0]).all()
    assert scale[0] > 1.05
    fixed = run(gpaug.EllipticalSlice(model), inputs, y, num_warmup=0, **fields)
    assert (fixed.get_extra_fields()["scale"] == 1).all()
