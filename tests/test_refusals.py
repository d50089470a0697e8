# SPDX-License-Identifier: Apache-2.0
"""Models that look conjugate and are not, and calls that would be silently wrong."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pandas
import pytest
from numpyro.infer.autoguide import AutoNormal

import numpyro_gpaug as gpaug
from tests.problems import classifier, regression, toy, unfitted

KEY = jax.random.key(0)
KERNEL = gpaug.kernels.Matern52


def run(model, *args, svi=None, optim=None, **kwargs):
    svi = svi or gpaug.ConjugateSVI(model, gpaug.AutoSparseGP(model), optim)
    kwargs.setdefault("num_steps", 5)
    return svi, svi.run(
        KEY, kwargs.pop("num_steps"), *args, progress_bar=False, **kwargs
    )


@cache
def classified():
    """A fit of the classifier to 20 data, once for all tests."""
    X, y = toy(20)
    return run(classifier, X, y, inducing=X[:5])


def test_processes_that_feed_something_else() -> None:
    def deep(X, y=None):
        inner = gpaug.GaussianProcess("f", KERNEL(), X[:5])
        outer = gpaug.GaussianProcess("g", KERNEL(), X[:5, :1])
        with numpyro.plate("data", X.shape[0]):
            logits = outer(inner(X)[:, None])
            numpyro.sample("y", dist.Bernoulli(logits=logits), obs=y)

    def latent(X, y=None):
        gp = gpaug.GaussianProcess("f", KERNEL(), X[:5])
        with numpyro.plate("data", X.shape[0]):
            z = numpyro.sample("z", dist.Normal(gp(X), 0.3))
            numpyro.sample("y", dist.Normal(z, 0.1), obs=jnp.asarray(y, z.dtype))

    def vector(X, y=None):
        gp = gpaug.GaussianProcess("f", KERNEL(), X[:5])
        with numpyro.plate("data", X.shape[0]):
            logits = gp(X) + gp.v[0]
            numpyro.sample("y", dist.Bernoulli(logits=logits), obs=y)

    X, y = toy(20)
    for model, named in ((deep, "'g'.*'f'"), (latent, "'z'.*'f'"), (vector, "'f.v'")):
        with pytest.raises(gpaug.NotConjugateError, match=named):
            run(model, X, y)


def test_labels_of_the_stock_route() -> None:
    """A guide checks the first observations it is shown, as ConjugateSVI does."""
    X, y = toy(12)
    guide = gpaug.AutoSparseGP(classifier, covariance="dense")
    svi = numpyro.infer.SVI(
        classifier, guide, optax.adam(0.1), gpaug.TraceAnalytic_ELBO()
    )
    with pytest.raises(ValueError, match=r"convert -1/\+1 labels with \(y \+ 1\) // 2"):
        svi.init(KEY, X, 2 * y - 1, inducing=X[:5])


def test_codes_of_censoring() -> None:
    def model(status, time, events=None):
        level = numpyro.sample("level", dist.Normal(0, 1))
        flag = status if events is None else status == events
        with numpyro.plate("data", len(time)):
            duration = dist.Weibull(jnp.exp(level), 1.0)
            fn = dist.RightCensoredDistribution(duration, flag)
            numpyro.sample("time", fn, obs=time)

    svi = gpaug.ConjugateSVI(model, gpaug.AutoLatentGaussian(model))
    status = np.array([1, 2, 2, 1])
    with pytest.raises(ValueError, match=r"'censored' .* \[1 2\], and all but 0"):
        svi.init(KEY, status, jnp.ones(4))
    svi.init(KEY, status, jnp.ones(4), 1)


def test_one_distribution_of_many_data() -> None:
    def model(y):
        numpyro.sample(
            "y", dist.Normal(numpyro.sample("f", dist.Normal(0, 1)), 1), obs=y
        )

    with pytest.raises(ValueError, match=r"plate\('data', 7\), or .expand\(\[7\]\)"):
        gpaug.AutoLatentGaussian(model).setup(jnp.ones(7))


def test_latents_no_guide_can_take() -> None:
    X, y = toy(12)

    def mixed(X, y=None):
        gp = gpaug.GaussianProcess("f", KERNEL(), X[:5])
        sign = numpyro.sample("sign", dist.Bernoulli(0.5))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Bernoulli(logits=(2 * sign - 1) * gp(X)), obs=y)

    with pytest.raises(gpaug.NotConjugateError, match="'sign' is discrete"):
        run(mixed, X, y)
    # A label that was not passed is not an unsupported latent.
    guide = gpaug.AutoSparseGP(classifier)
    assert guide.setup(X, inducing=X[:5]).structure.others == ()
    residual = gpaug.with_residual(classifier, "site")
    with pytest.raises(gpaug.NotConjugateError, match="residual of 'f' a latent site"):
        run(residual, X, y, inducing=X[:5])


def test_one_process_in_two_parameters() -> None:
    def model(X, y=None):
        f = gpaug.GaussianProcess("f", KERNEL(), X[:5])
        with numpyro.plate("data", X.shape[0]):
            value = f(X)
            d = gpaug.HeteroscedasticNormal(value, value, 10.0)
            numpyro.sample("y", d, obs=y)

    X, y = toy(20)
    with pytest.raises(gpaug.NotConjugateError, match="'loc' and 'precision"):
        run(model, X, jnp.asarray(y, X.dtype))


def test_counts_that_are_not() -> None:
    def model(X, y=None):
        f = gpaug.GaussianProcess("f", KERNEL(), X[:5])
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", gpaug.LogisticPoisson(f(X), 3.0), obs=y)

    X, _ = toy(20)
    for wrong in (-1.0, 0.5):
        with pytest.raises(ValueError, match="Counts are whole numbers"):
            run(model, X, jnp.full(20, wrong))


@pytest.mark.parametrize(
    "likelihood",
    [lambda f: dist.Categorical(logits=f), gpaug.LogisticSoftmax, gpaug.RobustMax],
)
def test_forgotten_num_latents(likelihood) -> None:
    def model(X, y=None):
        f = gpaug.GaussianProcess("f", KERNEL(), X[:5])
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", likelihood(f(X)), obs=y)

    X, y = toy(20)
    with pytest.raises(ValueError, match="num_latents=C"):
        run(model, X, y)


def test_float_classes() -> None:
    def model(X, y=None):
        f = gpaug.GaussianProcess("f", KERNEL(), X[:5], num_latents=2)
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Categorical(logits=f(X)), obs=y)

    X, y = toy(20)
    for dtype in (float, bool):
        with pytest.raises(ValueError, match=f"dtype {dtype.__name__}.*astype"):
            run(model, X, jnp.asarray(y, dtype))


def test_lists_and_frames() -> None:
    X, y = toy(20)
    arguments = {"inducing": X[:5]}
    with pytest.raises(TypeError, match="y is a list of 20: pass an array"):
        run(classifier, X, y.tolist(), **arguments)
    frame = pandas.DataFrame(X, columns=["a", "b"])

    def of_columns(frame, y=None, *, inducing):
        classifier(frame["a"][:, None], y, inducing=inducing)

    with pytest.raises(TypeError, match=r"'a'\n.*Pass its columns"):
        run(of_columns, frame, y, inducing=X[:5, :1])
    # Kernels of NumPyro's MCMC accept only arrays.
    kernel, coded = gpaug.AugmentedGaussian(classifier), pandas.Series(y)
    sampler = numpyro.infer.MCMC(
        kernel, num_warmup=1, num_samples=1, progress_bar=False
    )
    with pytest.raises(TypeError, match=r"y is a Series: .*\(y.cat.codes.to_numpy"):
        sampler.run(KEY, X, coded.astype("category"), **arguments)
    with pytest.raises(TypeError, match=r"X is a DataFrame: .*\(X.to_numpy"):
        sampler.run(KEY, pandas.DataFrame(X), y, **arguments)


def test_new_inputs_that_are_not_finite() -> None:
    X, _ = toy(20)
    svi, result = classified()
    X[0, 0] = np.nan
    with pytest.raises(ValueError, match="X has shape .* 1 NaN"):
        svi.posterior(result).predict_y(X)


def test_a_guide_set_up_without_observations() -> None:
    X, y = toy(20)
    guide = gpaug.AutoSparseGP(classifier).setup(X, inducing=X[:5])
    svi = gpaug.ConjugateSVI(classifier, guide)
    assert np.isfinite(run(classifier, X, y, svi=svi, inducing=X[:5])[1].losses).all()


def test_effects_that_are_points_beside_their_scale_are_named() -> None:
    def model(group, y=None, *, unknown=True):
        level = numpyro.sample("level", dist.Normal(0, 1))
        scale = numpyro.sample("scale", dist.HalfNormal(1)) if unknown else 1.0
        with numpyro.plate("groups", 3):
            effect = numpyro.sample("effect", dist.Laplace(0, scale))
        with numpyro.plate("data", len(group)):
            rate = jnp.exp(level + effect[group])
            numpyro.sample("y", dist.Poisson(rate), obs=y)

    data = np.arange(9) % 3, np.arange(9)
    with pytest.warns(UserWarning, match=r"'effect' and \['scale'\], on which"):
        gpaug.AutoLatentGaussian(model).setup(*data)
    gpaug.AutoLatentGaussian(model).setup(*data, unknown=False)
    gpaug.AutoLatentGaussian(model, other=AutoNormal).setup(*data)


@pytest.mark.parametrize("latent", ["shift", "effect"])
def test_data_that_leave_the_support_are_refused(latent) -> None:
    """The density of a shifted log-normal is not finite there."""

    def model(y, kind):
        level = numpyro.sample("level", dist.Normal(0, 1))
        shift = numpyro.sample("shift", dist.HalfNormal(1))
        effect = numpyro.sample("effect", dist.Normal(0, 1))
        moved = y - (shift if latent == "shift" else effect)
        with numpyro.plate("data", len(y)):
            numpyro.sample("y", kind(level), obs=moved)

    y = np.arange(2.0, 11.0)
    with pytest.raises(gpaug.NotConjugateError, match=rf"Exponential .*\['{latent}'\]"):
        gpaug.NestedVI(model).run(KEY, y, lambda x: dist.Exponential(jnp.exp(x)))
    if latent == "shift":
        gpaug.AutoLatentGaussian(model).setup(y, lambda x: dist.LogNormal(x, 0.5))


def test_latents_in_the_observations_alone_do_not_predict() -> None:
    def model(y=None):
        level = numpyro.sample("level", dist.Normal(0, 1))
        with numpyro.plate("data", 9):
            residual = None if y is None else y - level
            numpyro.sample("y", dist.Normal(0, 1), obs=residual)

    svi = gpaug.ConjugateSVI(model, gpaug.AutoLatentGaussian(model))
    posterior = unfitted(svi, np.arange(9.0))
    with pytest.raises(gpaug.NotConjugateError, match="'y' depends on no latents"):
        posterior.predict_y()


def test_areas_with_a_flat_prior_are_points_and_a_warning_says_so() -> None:
    def model(y):
        scale = numpyro.sample("scale", dist.HalfNormal(1))
        level = numpyro.sample("level", dist.Normal(0, 1))
        flat = dist.ImproperUniform(dist.constraints.real, (), (9,))
        areas = numpyro.sample("areas", flat)
        numpyro.factor("differences", dist.Normal(0, scale).log_prob(jnp.diff(areas)))
        with numpyro.plate("data", 9):
            numpyro.sample("y", dist.Normal(level + areas, 1), obs=y)

    with pytest.warns(UserWarning, match="'areas' gets a point .* wide .* too small"):
        gpaug.AutoLatentGaussian(model).setup(np.arange(9.0))


def test_names_that_share_a_prefix_survive() -> None:
    def model(X, y=None):
        w = numpyro.sample("w", dist.Normal(0, 1).expand([2]).to_event(1))
        w_0 = numpyro.sample("w_0", dist.Normal(5.0, 0.1))
        w_scale = numpyro.param("w_scale", 2.0)
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(X @ w + w_0, 0.1 * w_scale), obs=y)

    X, _ = toy(40)
    with pytest.warns(UserWarning, match="'w_0'.* point estimates"):
        svi, result = run(model, X, X @ np.array([1.0, -1.0], np.float32) + 5)
    predicted = svi.posterior(result).predict_y(X[:3]).mean
    np.testing.assert_allclose(predicted, X[:3, 0] - X[:3, 1] + 5.0, atol=0.1)


def test_a_gradient_that_is_not_finite_is_an_error() -> None:
    def model(X, y=None, *, inducing):
        a = numpyro.param("a", 0.0)
        return classifier(X, y, inducing=inducing, variance=1.0 + jnp.sqrt(a * a))

    X, y = toy(20)
    with pytest.raises(gpaug.CholeskyError, match="not finite"):
        run(model, X, y, inducing=X[:5], optim=optax.adam(0.1))


@pytest.mark.filterwarnings("ignore:subsample_size does not match")
def test_steps_and_names_that_would_be_ignored() -> None:
    X, y = toy(20)
    for step_size in ("adaptive", gpaug.infer.RobbinsMonro()):
        guide = gpaug.AutoSparseGP(classifier)
        svi = gpaug.ConjugateSVI(classifier, guide, step_size=step_size)
        with pytest.raises(ValueError, match="is for minibatches"):
            run(classifier, X, y, svi=svi, inducing=X[:5])
    with pytest.raises(ValueError, match="init_params names"):
        run(classifier, X, y, inducing=X[:5], init_params={"lengthscales": 1.0})
    svi, result = classified()
    with pytest.raises(TypeError, match="params alone"):
        svi.posterior(result.params)
    with pytest.raises(TypeError, match="ConjugateState"):
        svi.posterior(result.state)
    for params in ({}, {k: x for k, x in result.params.items() if "precision" in k}):
        with pytest.raises(ValueError, match="f.v_auto_potential.* missing"):
            svi.posterior(params, X, y, inducing=X[:5])
    with pytest.raises(ValueError, match="needs the observations"):
        svi.posterior(result).log_prob(X[:3])
    with pytest.raises(ValueError, match=r"\(1024, 1\)|\(3, 1\)"):
        svi.posterior(result).log_prob(X[:3], y[:3, None])


def test_a_small_constant_step_stays_small() -> None:
    X, y = toy(20)
    guide = gpaug.AutoSparseGP(classifier)
    svi = gpaug.ConjugateSVI(classifier, guide, step_size=0.1)
    slow = run(classifier, X, y, svi=svi, inducing=X[:5])[1]
    fast = classified()[1]
    assert slow.losses[-1] > fast.losses[-1] + 0.1


def test_inducing_inputs_computed_from_the_rows_of_the_data() -> None:
    def model(X, y=None):
        return regression(X, y, inducing=X[:5])

    X, _ = toy(20)
    svi = gpaug.ConjugateSVI(model, gpaug.AutoSparseGP(model))
    with pytest.raises(ValueError, match=r"\['X'\].*inducing=Z by keyword"):
        unfitted(svi, X, X[:, 0])


def test_median_is_that_of_the_guide() -> None:
    X, y = toy(30)
    for covariance in ("natural", "dense", "diagonal"):
        guide = gpaug.AutoSparseGP(classifier, covariance=covariance)
        (block,) = guide.setup(X, y, inducing=X[:5]).structure.blocks
        first, second = guide.param_names(block)
        params = {first: jnp.arange(5.0), second: 2 * jnp.eye(5)}
        if covariance == "diagonal":
            params[second] = jnp.ones(5)
        expected = np.arange(5.0) / (2 if covariance == "natural" else 1)
        np.testing.assert_allclose(guide.median(params)["f.v"], expected, rtol=1e-6)


def test_rows_along_another_axis() -> None:
    def model(X, y=None, *, inducing):
        gp = gpaug.GaussianProcess("f", KERNEL(), inducing, num_latents=3)
        with numpyro.plate("out", 3, dim=-2), numpyro.plate("data", X.shape[0], dim=-1):
            numpyro.sample("y", dist.Bernoulli(logits=gp(X).T), obs=y)

    X, y = toy(20)
    means = np.array([[1.0], [-1.0], [2.0]], np.float32) * np.ones(5, np.float32)
    params = {
        "f.v_auto_potential": jnp.asarray(means),
        "f.v_auto_precision": jnp.asarray(
            np.tile(np.eye(5, dtype="float32"), (3, 1, 1))
        ),
    }
    labels = np.stack([y, 1 - y, y])
    posterior = gpaug.Posterior.from_guide(
        model, gpaug.AutoSparseGP(model), params, X, labels, inducing=X[:5]
    )
    whole = posterior.predict_y(X[:9]).probs
    parts = posterior.predict_y(X[:9], batch_size=4).probs
    assert whole.shape == (3, 9)
    np.testing.assert_allclose(parts, whole, rtol=1e-5)
    # Opposite latents, and one with the sign of the first.
    np.testing.assert_allclose(whole[0], 1 - whole[1], rtol=1e-4)
    assert ((whole[0] > 0.5) == (whole[2] > 0.5)).all()


def test_a_guide_of_another_model() -> None:
    def real(X, y=None):
        gp = gpaug.GaussianProcess("f", gpaug.kernels.Matern32(), X[:3])
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(gp(X), 0.1), obs=y)

    def labels(X, y=None, *, site="y", inducing=3):
        gp = gpaug.GaussianProcess("f", gpaug.kernels.Matern32(), X[:inducing])
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample(site, dist.Bernoulli(logits=gp(X)), obs=y)

    X = jnp.linspace(0, 1, 8)[:, None]
    y = jnp.array([0, 1] * 4)
    guide = gpaug.AutoSparseGP(labels).setup(X, y)
    quiet = {"progress_bar": False}
    with pytest.raises(ValueError, match="made for another model, where .* not Normal"):
        gpaug.ConjugateSVI(real, guide).run(KEY, 2, X, X[:, 0], **quiet)
    with pytest.raises(ValueError, match="where site 'z' is missing"):
        gpaug.ConjugateSVI(partial(labels, site="z"), guide).run(KEY, 2, X, y, **quiet)
    svi = gpaug.ConjugateSVI(labels, guide)
    state = svi.run(KEY, 2, X, y, **quiet).state
    with pytest.raises(ValueError, match="the state belongs to latents of another"):
        svi.run(KEY, 2, X, y, inducing=4, init_state=state, **quiet)


def test_cut_points_that_move_with_a_level() -> None:
    def ordinal(x, y=None):
        level, slope = (numpyro.sample(k, dist.Normal(0, 1)) for k in ("c", "b"))
        cuts = level + jnp.array([0.0, 1.0])
        with numpyro.plate("data", len(x)):
            numpyro.sample("y", dist.OrderedLogistic(slope * x, cuts), obs=y)

    svi = gpaug.ConjugateSVI(ordinal, gpaug.AutoLatentGaussian(ordinal))
    x = np.linspace(-1, 1, 6)
    posterior = unfitted(svi, x, np.arange(6) % 3)
    with pytest.raises(gpaug.NotConjugateError, match="belongs to the predictor"):
        posterior.predict_y(x)
