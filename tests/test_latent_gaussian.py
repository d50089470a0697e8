# SPDX-License-Identifier: Apache-2.0
"""Latent Gaussian models, written as users write them: fits against brute force,
against exact evidence, and what guides say of models."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import enable_x64
from numpyro import handlers
from scipy import stats
from scipy.special import softmax

import numpyro_gpaug as gpaug
from numpyro_gpaug.model.gaussians import at_prior_means
from numpyro_gpaug.model.inspect import inspect_model
from tests.conftest import slow
from tests.models import gram
from tests.problems import moved, unfitted

N = 25
RNG = np.random.default_rng(3)
T = np.linspace(-1, 1, N)
ETA = 0.4 + 0.9 * T
COUNTS = RNG.poisson(np.exp(ETA))
POSITIVE = RNG.gamma(2, np.exp(ETA) / 2)
SHARES = RNG.beta(8 / (1 + np.exp(-ETA)), 8 / (1 + np.exp(ETA)))
BINARY = RNG.binomial(1, 1 / (1 + np.exp(-ETA)))
TOTALS = RNG.integers(1, 6, N)
SUCCESSES = RNG.binomial(TOTALS, 1 / (1 + np.exp(-ETA)))
CLASSES = RNG.integers(0, 4, N)
REAL = ETA + 0.5 * RNG.standard_t(4, N)
CUTS = jnp.array([-1.0, 0.0, 1.0])


def beta(eta):
    mean = jax.nn.sigmoid(eta)
    return dist.Beta(8 * mean, 8 * (1 - mean))


def zero_inflated(eta):
    return dist.ZeroInflatedPoisson(0.2, jnp.exp(eta))


def tobit(eta, y):
    """Observations above 1.5 are known to be so, no more."""
    known = dist.Normal(eta, 0.5).log_prob(jnp.minimum(y, 1.5))
    above = jax.scipy.special.log_ndtr((eta - 1.5) / 0.5)
    numpyro.factor("y", jnp.where(y < 1.5, known, above).sum())


LIKELIHOODS = {
    "poisson": (lambda e: dist.Poisson(jnp.exp(e)), COUNTS),
    "negative binomial": (lambda e: dist.NegativeBinomial2(jnp.exp(e), 3.0), COUNTS),
    "zero-inflated": (zero_inflated, COUNTS),
    "gamma": (lambda e: dist.Gamma(2.0, 2 * jnp.exp(-e)), POSITIVE),
    "exponential": (lambda e: dist.Exponential(jnp.exp(-e)), POSITIVE),
    "log-normal": (lambda e: dist.LogNormal(e, 0.5), POSITIVE),
    "beta": (beta, SHARES),
    "ordinal": (lambda e: dist.OrderedLogistic(e, CUTS), CLASSES),
    "binomial": (lambda e: dist.Binomial(TOTALS, logits=e), SUCCESSES),
    "probit": (lambda e: dist.Bernoulli(jax.scipy.stats.norm.cdf(e)), BINARY),
    "student": (lambda e: dist.StudentT(4.0, e, 0.5), REAL),
    "two predictors": (lambda e: dist.Normal(e, jnp.exp(-1 + e / 4)), REAL),
}


def regression(t, y=None, *, likelihood):
    """Two scalar Gaussians, so that their posterior can be summed over a grid."""
    a = numpyro.sample("a", dist.Normal(0, 1.5))
    b = numpyro.sample("b", dist.Normal(0, 1.5))
    eta = numpyro.deterministic("eta", a + b * t)
    with numpyro.plate("data", len(t)):
        numpyro.sample("y", likelihood(eta), obs=y)


POINTS = np.stack(np.meshgrid(*[np.linspace(-6, 6, 121)] * 2, indexing="ij"), -1)
POINTS = POINTS.reshape(-1, 2)


def grid_moments(density):
    """Means and standard deviations of two numbers, by a sum over a grid."""
    prior = stats.norm(0, 1.5).logpdf(POINTS).sum(-1)
    logs = jax.jit(lambda x: jax.lax.map(density, x, batch_size=5000))(POINTS)
    weights = softmax(prior + np.asarray(logs))
    mean = weights @ POINTS
    return mean, np.sqrt(weights @ np.square(POINTS - mean))


def fitted(model, *args, optim=None, steps=60, guide=None, **kwargs):
    guide = gpaug.AutoLatentGaussian(model) if guide is None else guide
    svi = gpaug.ConjugateSVI(model, guide, optim)
    run = partial(svi.run, jax.random.key(0), steps, progress_bar=False, tol=1e-7)
    result = run(*args, **kwargs)
    return svi.posterior(result), result, guide


# One in closed form, and one by quadrature, with tails that are not log-concave.
QUICK = "poisson", "student"


@pytest.mark.parametrize("name", [n if n in QUICK else slow(n) for n in LIKELIHOODS])
def test_any_likelihood_against_a_grid(x64, name):
    likelihood, y = LIKELIHOODS[name]
    model = partial(regression, likelihood=likelihood)
    posterior, _, _ = fitted(model, T, y)
    # The Gaussian nearest in KL is slightly too narrow where the posterior is skewed.
    compare_with_grid(posterior, model, y, means=0.07, deviations=0.06)


def compare_with_grid(posterior, model, y, *, means, deviations):
    """Compare the moments of the two numbers of a model.

    :param means: tolerance, in units of the larger standard deviation.
    :param deviations: relative tolerance.
    """

    def density(p):
        at = {"a": p[0], "b": p[1]}
        total = numpyro.infer.util.log_density(model, (T, y), {}, at)[0]
        return total - dist.Normal(0, 1.5).log_prob(p).sum()

    mean, deviation = grid_moments(density)
    found = [posterior["a"], posterior["b"]]
    atol = means * float(deviation.max())
    np.testing.assert_allclose([q.mean for q in found], mean, atol=atol)
    ratio = np.sqrt([q.variance for q in found]) / deviation
    np.testing.assert_allclose(ratio, 1, atol=deviations)


def test_factors_against_a_grid(x64):
    def model(t, y=None):
        a = numpyro.sample("a", dist.Normal(0, 1.5))
        b = numpyro.sample("b", dist.Normal(0, 1.5))
        tobit(a + b * t, y)

    posterior, _, _ = fitted(model, T, REAL)
    compare_with_grid(posterior, model, REAL, means=0.07, deviations=0.06)


def heteroscedastic(t, y=None):
    """Location and scale share a latent: their covariance counts."""
    a = numpyro.sample("a", dist.Normal(0, 1.5))
    b = numpyro.sample("b", dist.Normal(0, 1.5))
    with numpyro.plate("data", len(t)):
        numpyro.sample("y", dist.Normal(a + b * t, jnp.exp(b * t - 0.5)), obs=y)


def loaded(t, y=None):
    """The model has a product of two Gaussians with mean zero."""
    w = numpyro.sample("w", dist.Normal(0, 1))
    f = numpyro.sample("f", dist.Normal(jnp.zeros(5), 1).to_event(1))
    rate = jnp.exp(2 + w * f[jnp.arange(len(t)) % 5])
    with numpyro.plate("data", len(t)):
        numpyro.sample("y", dist.Poisson(rate), obs=y)


def test_products_with_prior_mean_zero_start_beside_their_saddle():
    """At the means, all derivatives vanish and w has no effect."""
    f = np.array([-1.0, 0.7, 0.2, 1.1, -0.4])[np.arange(N) % 5]
    posterior, result, _ = fitted(loaded, T, np.round(np.exp(2 + f)))
    assert abs(posterior["w"].mean) > 5 * np.sqrt(posterior["w"].variance)
    # Without the product, at w = 0.
    at_zero = stats.poisson(np.exp(2)).logpmf(np.round(np.exp(2 + f))).sum()
    assert -result.losses[-1] > at_zero + 10


def test_two_predictors_against_a_grid(x64):
    posterior, result, guide = fitted(heteroscedastic, T, REAL)
    assert guide.structure.observed[0].latents == ("predictor 0", "predictor 1")
    compare_with_grid(posterior, heteroscedastic, REAL, means=0.15, deviations=0.12)
    # No other Gaussian has a higher bound than the fit.
    losses = [result.losses[-1]]
    svi = gpaug.ConjugateSVI(heteroscedastic, guide, None)
    name = "latents_auto_precision"
    for turn in ([[1.05, 0], [0, 1]], [[1, 0], [0, 0.95]], [[1, 0.05], [0, 1]]):
        turn = jnp.asarray(turn)
        start = {name: turn.T @ result.params[name] @ turn}
        start["latents_auto_potential"] = start[name] @ jnp.linalg.solve(
            result.params[name], result.params["latents_auto_potential"]
        )
        start["latents_auto_centre"] = result.params["latents_auto_centre"]
        state = svi.init(jax.random.key(0), T, REAL, init_params=start)
        losses.append(svi.evaluate(state, T, REAL))
    assert min(losses) == losses[0]


# -- exact where everything is normal ----------------------------------------------

GROUP = RNG.integers(0, 4, N)


def varying(t, group, y=None):
    """Intercepts and slopes that vary about means, in a plate."""
    a0 = numpyro.sample("a0", dist.Normal(1, 2))
    b0 = numpyro.sample("b0", dist.Normal(0, 1))
    noise = numpyro.param("noise", 0.5, constraint=dist.constraints.positive)
    with numpyro.plate("groups", 4):
        a = numpyro.sample("a", dist.Normal(a0, 0.7))
        b = numpyro.sample("b", dist.Normal(b0, 0.3))
    with numpyro.plate("data", len(t)):
        numpyro.sample("y", dist.Normal(a[group] + b[group] * t, noise), obs=y)


def covariance():
    Z = np.eye(4)[GROUP]
    same = Z @ Z.T
    mean = 4 + np.outer(T, T)
    return mean + same * (0.49 + 0.09 * np.outer(T, T)) + 0.25 * np.eye(N)


@pytest.fixture(scope="module")
def of_normal():
    with enable_x64(True):
        return fitted(varying, T, GROUP, REAL)


def test_normal_models_have_the_exact_evidence(x64, of_normal):
    _, result, guide = of_normal
    exact = stats.multivariate_normal(np.ones(N), covariance()).logpdf(REAL)
    np.testing.assert_allclose(-result.losses[-1], exact, rtol=1e-9)
    assert guide.structure.size == 10
    # One step reaches the optimum.
    assert len(result.losses) == 1


def test_normal_models_have_the_exact_posterior(x64, of_normal):
    posterior, _, _ = of_normal
    of_y = posterior.predict_f(T, GROUP)
    of_a = posterior.predict_f(np.zeros(4), np.arange(4))
    np.testing.assert_allclose(of_a.mean, posterior["a"].mean, rtol=1e-8)
    assert of_y.mean.shape == (N,)
    Z = np.eye(4)[GROUP]
    cross = 4 * np.ones((4, N)) + 0.49 * Z.T
    gain = np.linalg.solve(covariance(), cross.T).T
    mean = 1 + gain @ (REAL - 1)
    spread = 4 * np.ones((4, 4)) + 0.49 * np.eye(4) - gain @ cross.T
    np.testing.assert_allclose(posterior["a"].mean, mean, rtol=1e-8)
    np.testing.assert_allclose(
        posterior["a"].covariance_matrix, spread, rtol=1e-6, atol=1e-8
    )


def test_minibatches_reach_the_full_data_fit():
    def model(t, group, y=None, *, size=None):
        a0 = numpyro.sample("a0", dist.Normal(1, 2))
        with numpyro.plate("groups", 4):
            a = numpyro.sample("a", dist.Normal(a0, 0.7))
        with numpyro.plate("data", N, subsample_size=size) as i:
            likelihood = dist.Poisson(jnp.exp(a[group[i]] + 0.5 * t[i]))
            numpyro.sample("y", likelihood, obs=y[i])

    svi = gpaug.ConjugateSVI(model, gpaug.AutoLatentGaussian(model), None)
    data = T, GROUP, COUNTS
    batch = svi.run(jax.random.key(0), 1000, *data, size=5, progress_bar=False)
    whole = fitted(model, *data)[1]
    name = "latents_auto_precision"
    inverse = [np.linalg.inv(r.params[name]) for r in (batch, whole)]
    np.testing.assert_allclose(*inverse, atol=0.03 * np.abs(inverse[1]).max())


# -- predictions ---------------------------------------------------------------------


def centred(x, y=None):
    # With few inducing values, much of the process is residual.
    gp = gpaug.GaussianProcess("f", gpaug.kernels.Matern32(0.7, 1.0), COARSE)
    f = gp(x)
    numpyro.deterministic("centred", f - f.mean())
    with numpyro.plate("data", len(x)):
        numpyro.sample("y", dist.Normal(f, 0.3), obs=y)


COARSE = np.linspace(-1, 1, 4)


def test_what_inducing_values_leave_over_is_in_covariances_and_contrasts():
    posterior, *_ = fitted(centred, T, REAL)
    at = np.linspace(-1, 1, 7)
    kernel = gpaug.kernels.Matern32(0.7, 1.0)
    K, Kx, Kz = (
        gram(kernel, a[:, None], b[:, None])
        for a, b in ((at, at), (COARSE, at), (COARSE, COARSE))
    )
    cross = gram(kernel, COARSE[:, None], T[:, None])
    A = np.linalg.solve(Kz, Kx)
    inner = Kz + cross @ cross.T / 0.09
    exact = K - A.T @ Kx + Kx.T @ np.linalg.solve(inner, Kx)

    # The first calls run in threads: each runs the model.
    with ThreadPoolExecutor(3) as pool:
        whole = pool.submit(posterior.predict_f, at, site="f", full_covariance=True)
        single = pool.submit(posterior.predict_f, at, site="centred")
        draws = pool.submit(
            posterior.sample, jax.random.key(0), at, site="centred",
            sample_shape=(4000,),
        )  # fmt: skip
    np.testing.assert_allclose(whole.result().variance, exact, atol=1e-4)
    C = np.eye(7) - 1 / 7
    mean, variance = single.result()
    np.testing.assert_allclose(mean, C @ whole.result().mean, atol=1e-4)
    np.testing.assert_allclose(variance, np.diag(C @ exact @ C), atol=1e-4)
    error = 5 * np.sqrt(2 / 4000) * variance.max()
    np.testing.assert_allclose(np.cov(draws.result().T), C @ exact @ C, atol=error)


def plain_groups(t, group, y=None, *, members=4):
    a0 = numpyro.sample("a0", dist.Normal(1, 2))
    tau = numpyro.sample("tau", dist.HalfNormal(1.0))
    with numpyro.plate("groups", members):
        a = numpyro.sample("a", dist.Normal(a0, tau))
    mu = numpyro.deterministic("mu", a[group] + 0.5 * t)
    numpyro.deterministic("rate", jnp.exp(mu))
    with numpyro.plate("data", len(t)):
        numpyro.sample("y", dist.Poisson(jnp.exp(mu)), obs=y)


@pytest.fixture(scope="module")
def counts():
    return fitted(plain_groups, T, GROUP, COUNTS, optim="lbfgs")


def test_predictions_are_those_of_draws(counts):
    posterior, _, _ = counts
    mu = posterior.predict_f(T[:5], GROUP[:5], site="mu")
    predicted = posterior.predict_y(T[:5], GROUP[:5])
    z, weights = np.polynomial.hermite_e.hermegauss(40)
    rate = np.exp(np.asarray(mu.mean) + np.sqrt(mu.variance) * z[:, None])
    weights, y, num = weights / weights.sum(), np.arange(5), 10_000

    @jax.jit
    def known(d, key):
        return d.mean, d.variance, d.log_prob(y), d.sample(key, (num,))

    found = known(predicted, jax.random.key(0))
    mean, variance, log_prob, draws = (np.asarray(x, float) for x in found)
    exact = weights @ rate
    np.testing.assert_allclose(mean, exact, rtol=0.01)
    spread = weights @ (rate - exact) ** 2
    np.testing.assert_allclose(variance, exact + spread, rtol=0.03)
    density = weights @ stats.poisson(rate).pmf(y)
    np.testing.assert_allclose(log_prob, np.log(density), atol=0.01)
    np.testing.assert_allclose(
        posterior.log_prob(T[:5], GROUP[:5], y), np.log(density), atol=0.01
    )
    # Quantiles are the smallest counts of at least a probability.
    q = np.broadcast_to(np.array([[0.0], [0.1], [0.5], [0.95]]), (4, 5))
    found = np.asarray(predicted.icdf(q))
    here, below = (np.asarray(predicted.cdf(x)) for x in (found, found - 1))
    np.testing.assert_array_equal(predicted.icdf(here), found)
    assert (found[0] == 0).all()
    assert (below[0] == 0).all()
    assert (here >= q).all()
    assert (below[1:] < q[1:]).all()
    assert draws.shape == (num, 5)
    centred = draws - draws.mean(0)
    second, fourth = (np.mean(centred**k, 0) for k in (2, 4))
    assert (np.abs(draws.mean(0) - mean) < 4 * np.sqrt(second / num)).all()
    error = np.sqrt((fourth - second**2) / num)
    assert (np.abs(second - variance) < 4 * error).all()


def test_new_groups_are_draws_from_their_prior(counts):
    posterior, result, _ = counts
    known = posterior.predict_f(T[:1], np.array([2]), site="mu", members=5)
    same = posterior.predict_f(T[:1], np.array([2]), site="mu")
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5), known, same)
    new = posterior.predict_f(np.zeros(1), np.array([4]), site="mu", members=5)
    tau = float(result.params["tau_auto_loc"])
    a0 = posterior["a0"]
    np.testing.assert_allclose(new.mean[0], a0.mean, rtol=1e-5)
    np.testing.assert_allclose(new.variance[0], a0.variance + tau**2, rtol=1e-4)


def test_sites_that_cannot_be_predicted_are_named(counts):
    with pytest.raises(gpaug.NotConjugateError, match="'rate' is not affine in 'a0'"):
        counts[0].predict_f(T[:5], GROUP[:5], site="rate")
    with pytest.raises(ValueError, match="site=.*'a', 'a0', 'mu'"):
        counts[0].predict_f(T[:5], GROUP[:5], site="nu")


def test_the_predictor_of_any_likelihood_needs_no_name(counts):
    """The predictor is returned without its offset."""
    found, named = (counts[0].predict_f(T[:1], GROUP[:1], site=s) for s in (None, "mu"))
    np.testing.assert_allclose(found.mean + 0.5 * T[:1], named.mean, rtol=1e-5)
    np.testing.assert_allclose(found.variance, named.variance, rtol=1e-5)


def test_the_table_has_a_row_for_every_entry(counts):
    table = counts[0].summary()
    assert list(table.columns) == ["mean", "sd", "5%", "50%", "95%"]
    assert [*table.index] == ["a0", *(f"a[{i}]" for i in range(4)), "tau"]
    a = counts[0]["a"]
    np.testing.assert_allclose(table["mean"][1:5], a.mean, rtol=1e-5)
    np.testing.assert_allclose(table["sd"][1:5], jnp.sqrt(a.variance), rtol=1e-4)
    np.testing.assert_allclose(
        table["95%"][1:5], a.mean + 1.645 * jnp.sqrt(a.variance), rtol=1e-3
    )
    assert table.loc["tau"].isna().tolist() == [False, True, True, True, True]
    wider = counts[0].summary(prob=0.95)["97.5%"]
    np.testing.assert_allclose(
        wider["a0"], table["mean"]["a0"] + 1.96 * table["sd"]["a0"], rtol=1e-3
    )
    with pytest.raises(KeyError, match="fixed at a value.*NestedVI"):
        counts[0]["tau"]
    with pytest.raises(KeyError, match="not among the Gaussian latents"):
        counts[0]["mu"]
    # Expectations of exponentials are exact.
    assert counts[0].quadrature_errors == {}


def test_overdispersed_data_are_predicted_by_new_members():
    """A latent in the plate of the data belongs to them: other data have others."""

    def model(t, y=None):
        a = numpyro.sample("a", dist.Normal(0, 2))
        with numpyro.plate("data", len(t)):
            e = numpyro.sample("e", dist.Normal(0, 0.8))
            eta = numpyro.deterministic("eta", a + e)
            numpyro.sample("y", dist.Poisson(jnp.exp(eta)), obs=y)

    svi = gpaug.ConjugateSVI(model, gpaug.AutoLatentGaussian(model))
    posterior = moved(svi, 30, T, COUNTS)
    found = posterior.predict_f(T, site="eta")
    a = posterior["a"]
    assert abs(a.mean) > 0.1
    np.testing.assert_allclose(found.mean, np.full(N, a.mean), rtol=1e-5)
    np.testing.assert_allclose(found.variance, np.full(N, a.variance + 0.64), rtol=1e-4)


# -- what is Gaussian, and what is said of the rest ----------------------------------


def structure_of(model, *args):
    return gpaug.AutoLatentGaussian(model).setup(*args)


def test_guides_introduce_themselves(counts):
    assert str(counts[2]) == (
        "AutoLatentGaussian, 5 Gaussian latents, dense\n"
        "  a0   ()     Gaussian\n"
        "  a    (4,)   Gaussian\n"
        "  tau  ()     hyperparameter, a point (AutoDelta)\n"
        "  y    (25,)  observed, in closed form"
    )


def in_a_scale():
    s = numpyro.sample("other", dist.Normal(0, 1))
    return numpyro.sample("b", dist.Normal(0, jnp.exp(s)).expand([3]))[GROUP % 3]


def with_a_flat_prior():
    flat = dist.ImproperUniform(dist.constraints.real, (), ())
    level = numpyro.sample("other", flat)
    return level + numpyro.sample("b", dist.Normal(0, 1).expand([3]))[GROUP % 3]


def in_a_kernel():
    log_ls = numpyro.sample("other", dist.Normal(0, 1))
    K = gpaug.kernels.Matern52(jnp.exp(log_ls))(T[:, None], T[:, None])
    d = dist.MultivariateNormal(jnp.zeros(N), K + 1e-4 * jnp.eye(N))
    return numpyro.sample("f", d)


@pytest.mark.parametrize(
    ("predictor", "said"),
    [
        (in_a_scale, "not jointly Gaussian, a point (AutoDelta): it is in the scale"),
        pytest.param(
            with_a_flat_prior,
            "a point (AutoDelta): its prior is flat",
            marks=pytest.mark.filterwarnings("ignore:'other' gets a point estimate"),
        ),
        (in_a_kernel, "not jointly Gaussian, a point (AutoDelta): it is in the"),
    ],
)
def test_what_is_a_hyperparameter_has_its_reason(predictor, said):
    def model(y=None):
        eta = predictor()
        with numpyro.plate("data", N):
            numpyro.sample("y", dist.Poisson(jnp.exp(eta)), obs=y)

    guide = structure_of(model, COUNTS)
    assert guide.structure.others == ("other",)
    assert said in str(guide)


def test_a_power_of_the_data_against_a_grid() -> None:
    """The transformation of Box and Cox is 0/0 at a power of zero, and a scale of zero
    is none: observations are checked at prior means."""

    def model(y):
        power = numpyro.sample("power", dist.Normal(0.5, 0.2))
        spread = numpyro.sample("spread", dist.Normal(0.3, 0.05))
        with numpyro.plate("data", len(y)):
            normal = dist.Normal(2.0, spread)
            numpyro.sample("y", normal, obs=(y**power - 1) / power)
            numpyro.factor("jacobian", (power - 1) * jnp.log(y))

    y = (1 + 0.5 * np.random.default_rng(0).normal(2, 0.3, 30)) ** 2
    svi = gpaug.ConjugateSVI(model, gpaug.AutoLatentGaussian(model))
    result = svi.run(jax.random.key(0), 20, y, progress_bar=False)
    found = svi.posterior(result).summary()
    power, spread = np.mgrid[0.2:0.8:200j, 0.1:0.6:200j]
    each, z = power[..., None], (y ** power[..., None] - 1) / power[..., None]
    log_p = (each - 1) * np.log(y) + stats.norm(2, spread[..., None]).logpdf(z)
    prior = stats.norm(0.5, 0.2).logpdf(power) + stats.norm(0.3, 0.05).logpdf(spread)
    p = np.exp(log_p.sum(-1) + prior)
    for name, x in {"power": power, "spread": spread}.items():
        mean = np.average(x, weights=p)
        sd = np.sqrt(np.average(np.square(x - mean), weights=p))
        assert abs(found["mean"][name] - mean) < 0.1 * sd
        np.testing.assert_allclose(found["sd"][name], sd, rtol=0.1)


def test_residuals_with_an_integer_prior_mean_have_one_predictor():
    """NumPyro's check of a value that depends on latents would make it a second one."""

    def model(t, y):
        level = numpyro.sample("level", dist.Normal(0, 1))
        rest = y - level
        numpyro.sample("y", dist.Normal(0.7 * rest[:-1], 1), obs=rest[1:])

    (site,) = structure_of(model, T, COUNTS).structure.observed
    assert len(site.latents) == 1
    at_means = handlers.seed(at_prior_means(model, ("level",)), 0)
    level = handlers.trace(at_means).get_trace(T, COUNTS)["level"]
    assert jnp.issubdtype(level["value"].dtype, jnp.floating)


def test_a_scale_of_one_is_none():
    def model(t, y=None):
        b = numpyro.sample("b", dist.Normal(0, 1))
        with numpyro.plate("data", N):
            numpyro.sample("y", dist.Poisson(jnp.exp(b * t)), obs=y)

    scaled = numpyro.handlers.scale(model, scale=1.0)
    assert not structure_of(scaled, T, COUNTS).structure.others


def test_discrete_and_drawn_latents_and_softmax_are_refused():
    def discrete(y=None):
        z = numpyro.sample("z", dist.Bernoulli(0.5))
        b = numpyro.sample("b", dist.Normal(0, 1))
        numpyro.sample("y", dist.Normal(b + z, 1), obs=y)

    with pytest.raises(gpaug.NotConjugateError, match="'z' is discrete"):
        structure_of(discrete, 1.0)

    def drawn(y=None):
        with numpyro.plate("data", 4, subsample_size=2):
            b = numpyro.sample("b", dist.Normal(0, 1))
            numpyro.sample("y", dist.Normal(b, 1), obs=y)

    for read in (structure_of, inspect_model):
        with pytest.raises(gpaug.NotConjugateError, match="'b' is in the plate 'data'"):
            read(drawn, jnp.ones(2))

    def softmax(X, y=None):
        w = numpyro.sample("w", dist.Normal(0, 1).expand([2, 3]).to_event(2))
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", dist.Categorical(jax.nn.softmax(X @ w)), obs=y)

    X = np.column_stack([np.ones(N), T])
    with pytest.raises(gpaug.NotConjugateError, match="site 'y'.*reduce_max.* mixes"):
        structure_of(softmax, X, CLASSES % 3)


# -- bad input ------------------------------------------------------------------------


def test_codes_are_checked_however_they_index():
    def slopes(t, group, y=None):
        d = dist.MultivariateNormal(jnp.zeros(2), jnp.eye(2))
        with numpyro.plate("groups", 4):
            b = numpyro.sample("b", d)
        with numpyro.plate("data", len(t)):
            eta = b[group, 0] + b[group, 1] * t
            numpyro.sample("y", dist.Poisson(jnp.exp(eta)), obs=y)

    def nested(school, group, y=None):
        with numpyro.plate("schools", 2), numpyro.plate("classes", 4):
            b = numpyro.sample("b", dist.Normal(0, 1))
        with numpyro.plate("data", N):
            numpyro.sample("y", dist.Poisson(jnp.exp(b[group, school])), obs=y)

    def treated(t, group, y=None):
        with numpyro.plate("groups", 3):
            b = numpyro.sample("b", dist.Normal(0, 1))
        effect = jnp.where(group == 0, 0.0, b[group - 1] * t)
        with numpyro.plate("data", N):
            numpyro.sample("y", dist.Poisson(jnp.exp(effect)), obs=y)

    structure_of(slopes, T, GROUP, COUNTS)
    structure_of(nested, GROUP % 2, GROUP, COUNTS)
    structure_of(treated, T, GROUP, COUNTS)
    for model, args in (
        (slopes, (T, GROUP + 1)),
        (treated, (T, GROUP + 1)),
        (nested, (GROUP % 2, GROUP + 1)),
        (nested, (GROUP % 2 + 1, GROUP)),
    ):
        with pytest.raises(ValueError, match="'b' has . members along an axis"):
            structure_of(model, *args, COUNTS)
    for model, args in ((slopes, (T, GROUP - 1)), (nested, (GROUP % 2, GROUP - 1))):
        with pytest.raises(ValueError, match="'b' is indexed by numbers from -1 on"):
            structure_of(model, *args, COUNTS)
    svi = gpaug.ConjugateSVI(slopes, gpaug.AutoLatentGaussian(slopes))
    posterior = unfitted(svi, T, GROUP, COUNTS)
    for bad in (4, -1):
        with pytest.raises(ValueError, match="'b'.*A new group"):
            posterior.predict_y(T[:1], np.array([bad]))


def test_cut_points_beside_one_weight_are_a_point_and_labels_are_checked():
    def ordinal(t, y=None):
        gaps = numpyro.sample("gaps", dist.Normal(0, 1).expand([3]).to_event(1))
        slope = numpyro.sample("slope", dist.Normal(0, 1))
        cuts = jnp.cumsum(jnp.exp(gaps))
        with numpyro.plate("data", N):
            numpyro.sample("y", dist.OrderedLogistic(slope * t, cuts), obs=y)

    assert structure_of(ordinal, T, CLASSES).structure.others == ("gaps",)
    with pytest.raises(ValueError, match=r"'y'.* contain \[4\].*Labels are 0..3"):
        structure_of(ordinal, T, CLASSES + 1)


def test_sizes_from_arguments_and_masks_are_explained():
    def sized(group, y=None):
        with numpyro.plate("groups", int(group.max()) + 1):
            b = numpyro.sample("b", dist.Normal(0, 1))
        with numpyro.plate("data", N):
            numpyro.sample("y", dist.Poisson(jnp.exp(b[group])), obs=y)

    with pytest.raises(TypeError, match="pass sizes as plain numbers"):
        structure_of(sized, GROUP, COUNTS)

    def masked(t, y=None):
        b = numpyro.sample("b", dist.Normal(0, 1))
        with numpyro.plate("data", N):
            numpyro.sample("y", dist.Normal(b, 1), obs=y, obs_mask=y < 1)

    with pytest.raises(gpaug.NotConjugateError, match="obs_mask makes 'y_unobs"):
        structure_of(masked, T, REAL)


def test_factors_under_masks_count_what_is_not_masked():
    def factor(t, y):
        b = numpyro.sample("b", dist.Normal(0, 1))
        with numpyro.plate("data", N), numpyro.handlers.mask(mask=y > 0):
            numpyro.factor("y", y * b * t - jnp.exp(b * t))

    def sample(t, y):
        b = numpyro.sample("b", dist.Normal(0, 1))
        with numpyro.plate("data", N), numpyro.handlers.mask(mask=y > 0):
            numpyro.sample("y", dist.Poisson(jnp.exp(b * t)), obs=y)

    distributions = [fitted(m, T, COUNTS)[0]["b"] for m in (factor, sample)]
    np.testing.assert_allclose(*(q.mean for q in distributions), rtol=1e-3)
    np.testing.assert_allclose(*(q.variance for q in distributions), rtol=1e-3)


def test_values_elsewhere_of_a_multivariate_normal_are_refused():
    def model(x, others, y=None):
        K = gpaug.kernels.Matern52(1.0)(x, x) + 1e-4 * jnp.eye(len(x))
        f = numpyro.sample("f", dist.MultivariateNormal(jnp.zeros(len(x)), K))
        with numpyro.plate("data", len(x)):
            rate = jnp.exp(f + sum(others.values()))
            numpyro.sample("y", dist.Poisson(rate), obs=y)

    # With more than ten arrays, the numerical order of their names is not alphabetical.
    x, others = T[:, None], {f"z{i:02}": np.zeros(N) for i in range(10)}
    svi = gpaug.ConjugateSVI(model, gpaug.AutoLatentGaussian(model))
    posterior = moved(svi, 1, x, others, COUNTS)
    here = posterior.predict_f(x, others, site="f")
    assert np.ptp(here.mean) > 0.1
    np.testing.assert_allclose(here.mean, posterior["f"].mean, rtol=1e-4, atol=1e-5)
    for elsewhere in (x + 0.3, x[:10]):
        cut = {k: z[: len(elsewhere)] for k, z in others.items()}
        with pytest.raises(
            gpaug.NotConjugateError, match="covariance of 'f'.*inducing"
        ):
            posterior.predict_y(elsewhere, cut)


def test_too_many_latents_are_refused_with_their_size():
    def model(t, y=None):
        f = numpyro.sample("f", dist.Normal(0, 1).expand([6000]).to_event(1))
        with numpyro.plate("data", len(t)):
            mean = (f + jnp.roll(f, 1))[: len(t)]
            numpyro.sample("y", dist.Normal(mean, 1.0), obs=y)

    with pytest.raises(gpaug.NotConjugateError, match="6000 latents.*'f' of shape"):
        structure_of(model, T, REAL)
