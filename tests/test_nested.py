# SPDX-License-Identifier: Apache-2.0
"""Hyperparameters integrated: collapsed models against exact marginal likelihoods, and
weighted draws against sums over grids."""

import warnings
from dataclasses import replace
from functools import cache, partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro import handlers
from numpyro.infer import MCMC, NUTS, SVI, Predictive, Trace_ELBO
from numpyro.infer.autoguide import AutoLaplaceApproximation
from numpyro.infer.util import log_density, potential_energy
from scipy import special, stats
from threadpoolctl import threadpool_info, threadpool_limits

import numpyro_gpaug as gpaug
from numpyro_gpaug.gaussians.base import GaussianFactors
from numpyro_gpaug.infer.nested.bound import Start, moments_given
from numpyro_gpaug.infer.nested.drawer import Drawer, Points
from numpyro_gpaug.infer.nested.draws import best_width
from numpyro_gpaug.infer.nested.known import Known
from numpyro_gpaug.infer.nested.latent_modes import _is_concave
from numpyro_gpaug.infer.nested.mirrors import mirrored
from numpyro_gpaug.infer.nested.programs import Drawn, Evaluated
from numpyro_gpaug.infer.nested.proposal import (
    Mode,
    Proposal,
    StudentT,
    climb,
    tempered,
)
from numpyro_gpaug.infer.nested.refining import Pool, extended
from numpyro_gpaug.infer.nested.report import overview
from numpyro_gpaug.infer.nested.setup import MOST, CollapsedBounds
from numpyro_gpaug.infer.nested.weighted import Weighted
from numpyro_gpaug.math.halton import halton
from numpyro_gpaug.math.importance import compensated_sum, smoothed
from numpyro_gpaug.math.threads import threads_for
from numpyro_gpaug.model.arguments import Arguments
from numpyro_gpaug.predict import summary
from numpyro_gpaug.predict.mixture import Members
from tests.conftest import compilations, enable_x64, slow
from tests.models import gram

SLOW = pytest.mark.slow
G, N = 4, 24
RNG = np.random.default_rng(5)
GROUP = np.arange(N) % G
EFFECT = np.array([-0.6, 0.2, 0.5, 1.1])
COUNTS = RNG.poisson(np.exp(EFFECT[GROUP]))
REAL = EFFECT[GROUP] + 0.5 * RNG.normal(size=N)
BINARY = RNG.binomial(1, 1 / (1 + np.exp(-2 * EFFECT[GROUP])))


def varying(group, y=None, *, likelihood, members=G):
    """Intercepts that vary about a mean; the scale is integrated."""
    level = numpyro.sample("level", dist.Normal(0, 2))
    tau = numpyro.sample("tau", dist.HalfNormal(1))
    with numpyro.plate("groups", members):
        a = numpyro.sample("a", dist.Normal(level, tau))
    eta = numpyro.deterministic("eta", a[group])
    with numpyro.plate("data", len(group)):
        numpyro.sample("y", likelihood(eta), obs=y)


def noisy(group, y=None, members=G):
    """The same with normal noise, whose scale is integrated too."""
    sigma = numpyro.sample("sigma", dist.HalfNormal(1))
    varying(group, y, likelihood=lambda eta: dist.Normal(eta, sigma), members=members)


poisson = partial(varying, likelihood=lambda eta: dist.Poisson(jnp.exp(eta)))
bernoulli = partial(varying, likelihood=lambda eta: dist.Bernoulli(logits=eta))


def exact(values):
    """Log marginal density of the normal model and its hyperparameters."""
    tau, sigma = values["tau"], values["sigma"]
    Z = jnp.eye(G)[GROUP]
    covariance = 4 * jnp.ones((N, N)) + tau**2 * Z @ Z.T + sigma**2 * jnp.eye(N)
    zero = jnp.zeros(N)
    marginal = jax.scipy.stats.multivariate_normal.logpdf(REAL, zero, covariance)
    priors = dist.HalfNormal(1).log_prob(tau) + dist.HalfNormal(1).log_prob(sigma)
    return marginal + priors


def energy(model, y):
    collapsed = gpaug.collapse(model)
    return lambda values: potential_energy(collapsed, (GROUP, y), {}, values)


# -- the collapsed model -------------------------------------------------------------


def of_vector(density):
    """Return a function of the vector of unconstrained hyperparameters of the normal
    model.
    """
    return lambda x: density({"tau": x[0], "sigma": x[1]})


def exact_energy(values):
    """Minus the exact log density, with the change of variables."""
    log_tau, log_sigma = values["tau"], values["sigma"]
    positive = {"tau": jnp.exp(log_tau), "sigma": jnp.exp(log_sigma)}
    return -exact(positive) - log_tau - log_sigma


def test_normal_models_collapse_to_the_exact_marginal_likelihood(x64):
    """The gradient and the Hessian times a vector are exact, too."""
    at, along = jnp.array([-0.3, -0.9]), jnp.array([0.6, -0.8])

    def both(density):
        slopes = jax.value_and_grad(of_vector(density))
        return jax.jit(lambda at: jax.jvp(slopes, (at,), (along,)))(at)

    ours, theirs = both(energy(noisy, REAL)), both(exact_energy)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-9), ours[0], theirs[0])
    close = partial(np.testing.assert_allclose, rtol=2e-3, atol=2e-3)
    jax.tree.map(close, ours[1], theirs[1])


PAIRS = np.eye(12)[[0, 1, 4, 4]] - np.eye(12)[[3, 7, 1, 11]]


@pytest.mark.parametrize(
    ("projected", "mix"), [(True, np.eye(12)), slow(False, np.eye(12)), (False, PAIRS)]
)
def test_sparse_processes_are_collapsed_as_draws_are_weighed(x64, projected, mix):
    X, Z = np.linspace(0, 1, 12)[:, None], np.linspace(0, 1, 3)[:, None]
    y = mix @ np.sin(6 * X[:, 0])

    def model(X, y, Z):
        length = numpyro.sample("length", dist.LogNormal(-1, 1))
        kernel = gpaug.kernels.Matern52(length)
        gp = gpaug.GaussianProcess("f", kernel, Z, jitter=1e-10)
        f = mix @ gp(X) if len(mix) < 12 else gp(X)
        with numpyro.plate("data", len(f)):
            numpyro.sample("y", dist.Normal(f, 0.3), obs=y)

    given, kwargs = (X, y), {"Z": Z}
    arguments = Arguments.split(given, kwargs)
    bound = CollapsedBounds(model, projected=projected).at(arguments, given, kwargs)
    at = {"length": jnp.array(0.3)}
    found = jax.jit(bound)(at, {"length": jnp.array(1.0)}, arguments)
    cross = gram(gpaug.kernels.Matern52(0.3), Z, X)
    K = gram(gpaug.kernels.Matern52(0.3), Z, Z)
    Q = mix @ cross.T @ np.linalg.solve(K, cross) @ mix.T
    noisy = Q + 0.09 * np.eye(len(y))
    expected = stats.multivariate_normal(np.zeros(len(y)), noisy).logpdf(y)
    if not projected:  # Titsias's bound
        whole = mix @ gram(gpaug.kernels.Matern52(0.3), X, X) @ mix.T
        expected -= 0.5 * np.trace(whole - Q) / 0.09
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize(
    ("model", "y"),
    [(poisson, COUNTS), slow(bernoulli, BINARY)],
    ids=["counts", "binary"],
)
def test_the_envelope_gradient_is_the_gradient(x64, model, y):
    """For several hyperparameters at once, it is the gradient in each."""
    density = jax.value_and_grad(lambda u: energy(model, y)({"tau": u}))
    step = 1e-3
    at = jnp.array([-1.0, 0.8, -0.3, -0.3 + step, -0.3 - step])
    values, slopes = jax.jit(jax.vmap(density))(at)
    slope = (values[3] - values[4]) / (2 * step)
    np.testing.assert_allclose(slopes[2], slope, rtol=1e-4)
    if model is poisson:
        single = jax.jit(density)
        each = np.array([single(u) for u in at[:3]]).T
        np.testing.assert_allclose((values[:3], slopes[:3]), each, rtol=1e-9)


def test_derivatives_in_the_data_are_refused():
    collapsed = gpaug.collapse(noisy)
    at = {"tau": jnp.array(0.7), "sigma": jnp.array(0.4)}

    def density(y):
        return log_density(collapsed, (GROUP, y), {}, at)[0]

    with pytest.raises(
        NotImplementedError, match="only with respect to the hyperparameters"
    ):
        jax.grad(density)(jnp.asarray(REAL))


def with_a_param(group, y=None):
    sigma = numpyro.param("sigma", 1.0, constraint=dist.constraints.positive)
    varying(group, y, likelihood=lambda eta: dist.Normal(eta, sigma))


def test_params_have_no_prior():
    with pytest.raises(ValueError, match=r"params \['sigma'\] have no prior"):
        gpaug.NestedVI(with_a_param, progress_bar=False).run(
            jax.random.key(0), GROUP, REAL
        )


@pytest.mark.slow
def test_guides_take_the_collapsed_model_and_params_are_learnt():
    import optax

    collapsed = gpaug.collapse(with_a_param)
    guide = AutoLaplaceApproximation(collapsed)
    svi = SVI(collapsed, guide, optax.adam(0.1), Trace_ELBO())
    fit = svi.run(jax.random.key(1), 150, GROUP, REAL, progress_bar=False)
    assert abs(fit.params["sigma"] - 0.5) < 0.2
    assert 0.2 < guide.median(fit.params)["tau"] < 1.5


# -- weighted draws -------------------------------------------------------------------


@cache
def grid():
    """Unnormalised log posterior of the normal model's hyperparameters over a grid."""
    tau, sigma = np.linspace(0.01, 4, 200), np.linspace(0.15, 1.5, 150)
    with enable_x64(True):
        values = {
            k: jnp.asarray(x.ravel())
            for k, x in zip(
                ("tau", "sigma"), np.meshgrid(tau, sigma, indexing="ij"), strict=True
            )
        }
        logs = np.asarray(jax.lax.map(exact, values, batch_size=500))
    area = (tau[1] - tau[0]) * (sigma[1] - sigma[0])
    return {k: np.asarray(x) for k, x in values.items()}, logs, area


def grid_moments():
    values, logs, _ = grid()
    weights = special.softmax(logs)
    means = {k: weights @ x for k, x in values.items()}
    return {
        k: (means[k], np.sqrt(weights @ (x - means[k]) ** 2)) for k, x in values.items()
    }


def nested(model, *args, key=0, data=None, **options):
    found = gpaug.NestedVI(model, progress_bar=False, **options)
    found.run(jax.random.key(key), *args, **(data or {}))
    return found


def test_proposals_fill_every_axis_evenly():
    """The first base^k points of a Halton sequence are in as many intervals, and with
    random digits each point is uniform."""
    for column, (base, power) in enumerate([(2, 9), (3, 5), (5, 3), (7, 3)]):
        num = base**power
        found = halton(num, 4, np.random.default_rng(0))[:, column]
        assert sorted(np.floor(found * num).astype(int)) == list(range(num))
    firsts = [halton(1, 4, np.random.default_rng(i))[0] for i in range(1000)]
    np.testing.assert_allclose(np.mean(firsts, 0), 0.5, atol=0.05)
    np.testing.assert_allclose(np.var(firsts, 0), 1 / 12, atol=0.01)


def test_durations_that_begin_with_a_later_entry():
    """The factor of the entries is convex: alone it has no optimum."""
    entry, time = np.array([0.2, 1.0, 0.7]), np.array([0.9, 1.2, 3.0])

    def durations(entry, time):
        level = numpyro.sample("level", dist.Normal(0, 2))
        rate = jnp.exp(level) * jnp.ones(3)
        with numpyro.plate("data", 3):
            numpyro.factor("entry", rate * entry)
            numpyro.sample("time", dist.Exponential(rate), obs=time)

    run = nested(durations, entry, time)
    fields, data = run.get_extra_fields(), (entry, time)
    guide, key = gpaug.AutoLatentGaussian(durations), jax.random.key(0)
    svi = gpaug.ConjugateSVI(durations, guide)
    given = durations, guide, svi.get_params(svi.init(key, *data)), *data
    for tree in (
        gpaug.diagnostics.to_datatree(key, run),
        gpaug.diagnostics.to_datatree(key, *given),
    ):
        level = tree["posterior"]["level"].values[..., None]
        expected = level - np.exp(level) * (time - entry)
        found = tree["log_likelihood"]["time"]
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
    level = np.linspace(-9, 9, 1801)
    logs = 3 * level - np.exp(level) * (time - entry).sum()
    expected = special.logsumexp(logs + stats.norm(0, 2).logpdf(level)) + np.log(0.01)
    np.testing.assert_allclose(fields["log_evidence"], expected, atol=0.02)


@pytest.fixture(scope="module")
def of_normal():
    return nested(noisy, GROUP, REAL)


def test_hyperparameters_of_a_normal_model_against_a_grid(of_normal):
    table = of_normal.summary()
    for name, (mean, deviation) in grid_moments().items():
        np.testing.assert_allclose(table["mean"][name], mean, atol=0.1 * deviation)
        np.testing.assert_allclose(table["sd"][name], deviation, rtol=0.1)


def test_the_evidence_of_a_normal_model_against_a_grid(of_normal):
    _, logs, area = grid()
    found = of_normal.get_extra_fields()
    expected = special.logsumexp(logs) + np.log(area)
    error = found["log_evidence_error"]
    assert error < 0.03
    assert abs(found["log_evidence"] - expected) < 4 * error
    assert found["khat"] < 0.5
    # Given hyperparameters the only error is the interpolation between points with
    # known Gaussians: all draws at one point weigh nearly the same.
    run = of_normal._run.weighted
    spread = np.ptp(run.log_ratios, axis=1)
    assert np.exp(run.log_weights).sum(1) @ spread < 0.02
    assert np.median(spread) < 1e-3
    assert found["evaluations"] < 400


def marginal(group, y=None):
    """The same model with its latents integrated by hand, and a latent without data."""
    tau = numpyro.sample("tau", dist.HalfNormal(1))
    sigma = numpyro.sample("sigma", dist.HalfNormal(1))
    numpyro.sample("spare", dist.Normal(1, 2))
    effects = jnp.where(group[:, None] == group, tau**2, 0)
    covariance = 4 + effects + sigma**2 * jnp.eye(len(group))
    likelihood = dist.MultivariateNormal(jnp.zeros(len(group)), covariance)
    numpyro.sample("y", likelihood, obs=y)


def test_models_of_hyperparameters_alone_against_a_grid():
    of_marginal = nested(marginal, GROUP, REAL)
    test_hyperparameters_of_a_normal_model_against_a_grid(of_marginal)
    test_the_evidence_of_a_normal_model_against_a_grid(of_marginal)
    samples = of_marginal.get_samples()
    assert set(samples) == {"tau", "sigma", "spare"}
    spread = np.mean(samples["spare"]), np.std(samples["spare"])
    np.testing.assert_allclose(spread, (1, 2), atol=0.2)
    assert of_marginal.get_extra_fields()["log_weights"].ndim == 1
    with pytest.raises(ValueError, match="Predictive"):
        of_marginal.posterior().predict_y(GROUP)


def survival(x, order, died):
    """Cox's partial likelihood: no sum over data of functions of their own latents."""
    b = numpyro.sample("b", dist.Normal(0, 1).expand([2]).to_event(1))
    eta = (x @ b)[order]
    at_risk = jax.lax.cumlogsumexp(eta)
    numpyro.factor("partial", jnp.where(died[order], eta - at_risk, 0).sum())


def test_what_no_gaussian_takes_is_integrated_with_the_hyperparameters():
    rng = np.random.default_rng(1)
    x, died = rng.normal(size=(N, 2)), rng.uniform(size=N) < 0.7
    order = np.argsort(-rng.exponential(np.exp(-x[:, 0])))
    found = nested(survival, x, order, died)
    axis = np.linspace(-2, 3, 101)
    points = np.stack(np.meshgrid(axis, axis), -1).reshape(-1, 2)
    eta = (points @ x.T)[:, order]
    terms = np.where(died[order], eta - np.logaddexp.accumulate(eta, 1), 0)
    logs = terms.sum(1) - 0.5 * (points**2).sum(1) - np.log(2 * np.pi)
    weights = special.softmax(logs)
    mean = weights @ points
    deviation = np.sqrt(weights @ (points - mean) ** 2)
    b = found.get_samples()["b"]
    np.testing.assert_allclose((b.mean(0) - mean) / deviation, 0, atol=0.1)
    np.testing.assert_allclose(b.std(0) / deviation, 1, atol=0.1)
    fields = found.get_extra_fields()
    evidence = special.logsumexp(logs) + 2 * np.log(axis[1] - axis[0])
    assert abs(fields["log_evidence"] - evidence) < 4 * fields["log_evidence_error"]
    with pytest.raises(gpaug.NotConjugateError, match="cumlogsumexp .* mixes data"):
        gpaug.AutoLatentGaussian(survival).setup(x, order, died)


def flat(group, y=None, *, width=None):
    """A level with a flat prior, or with one that is as good as flat."""
    real = dist.constraints.real
    d = dist.ImproperUniform(real, (), ()) if width is None else dist.Normal(0, width)
    level = numpyro.sample("level", d)
    with numpyro.plate("groups", G):
        effect = numpyro.sample("effect", dist.Normal(0, 1))
    with numpyro.plate("data", len(group)):
        numpyro.sample("y", dist.Normal(level + effect[group], 0.5), obs=y)


@pytest.mark.parametrize(
    ("handler", "power"),
    [(handlers.mask(mask=False), 0.0), slow(handlers.scale(scale=0.1), 0.1)],
)
def test_priors_that_a_mask_or_a_scale_changes(handler, power):
    """Their distributions draw from another density, which proposes no draws."""
    seen = np.array([2.0, -1.0, 3.0])

    def model(seen):
        level = numpyro.sample("level", dist.Normal(0, 1))
        numpyro.sample("y", dist.Normal(level, 1), obs=0.0)
        with numpyro.plate("data", len(seen)):
            with handler:
                x = numpyro.sample("x", dist.Normal(0, 1))
            numpyro.sample("seen", dist.StudentT(3, x, 1), obs=seen)

    nested = gpaug.NestedVI(model, num_points=256, progress_bar=False)
    nested.run(jax.random.key(0), seen)
    assert nested.structure.others == ("x",)
    x = np.linspace(-300, 300, 10**5)[:, None]
    terms = stats.norm.pdf(x) ** power * stats.t.pdf(x - seen, 3)
    evidence = np.log(terms.sum(0) * 600 / 10**5).sum() + stats.norm.logpdf(
        0, 0, 2**0.5
    )
    assert abs(nested.get_extra_fields()["log_evidence"] - evidence) < 0.15


def test_units_of_responses_do_not_matter():
    """A start as if predictors were known to a unit would be far too narrow."""

    def model(group, unit, y=None):
        level = numpyro.sample("level", dist.Normal(0, unit))
        tau = numpyro.sample("tau", dist.HalfNormal(unit))
        with numpyro.plate("groups", G):
            a = numpyro.sample("a", dist.Normal(0, tau))
        with numpyro.plate("data", len(group)):
            numpyro.sample("y", dist.Normal(level + a[group], unit / 2), obs=y)

    found = {
        unit: nested(model, GROUP, unit, np.float32(unit * REAL), num_points=64)
        for unit in (1.0, 1e5)
    }
    evidence = {k: x.get_extra_fields()["log_evidence"] for k, x in found.items()}
    np.testing.assert_allclose(evidence[1e5] + N * np.log(1e5), evidence[1.0], atol=0.1)


@pytest.mark.slow
def test_a_flat_prior_is_the_limit_of_wide_ones():
    improper = nested(flat, GROUP, REAL)
    proper = nested(partial(flat, width=100.0), GROUP, REAL)
    tables = [x.summary()[["mean", "sd"]].loc["level"] for x in (improper, proper)]
    np.testing.assert_allclose(*tables, atol=0.1 * tables[1]["sd"])
    fields = [x.get_extra_fields() for x in (improper, proper)]
    error = sum(f["log_evidence_error"] for f in fields)
    missing = np.log(100 * np.sqrt(2 * np.pi))
    difference = fields[0]["log_evidence"] - fields[1]["log_evidence"]
    assert abs(difference - missing) < 4 * error + 0.01


def counts_on_a_grid(y, group):
    """Return values of tau, and the log density of these and of levels in the Poisson
    model, with the effects summed out: given the two, these are independent."""
    tau = np.exp(np.linspace(-6, 1.6, 60))
    level = np.linspace(-4, 4, 81)
    a = np.linspace(-7, 5, 601)
    width = a[1] - a[0]
    log_lik = np.array(
        [stats.poisson(np.exp(a)[:, None]).logpmf(y[group == g]).sum(1)
         for g in range(G)]
    )  # fmt: skip
    total, top = np.zeros((60, 81)), log_lik.max(1, keepdims=True)
    for i, t in enumerate(tau):
        if t < 3 * width:  # the grid does not resolve it
            nearest = np.abs(a - level[:, None]).argmin(1)
            total[i] = log_lik[:, nearest].sum(0)
        else:
            prior = width * stats.norm(level[:, None], t).pdf(a)
            total[i] = (np.log(prior @ np.exp(log_lik - top).T) + top.T).sum(1)
    total += stats.norm(0, 2).logpdf(level)
    return tau, total + (stats.halfnorm.logpdf(tau) + np.log(tau))[:, None]


def poisson_truth():
    """Evidence, and moments of tau, in the Poisson model."""
    tau, total = counts_on_a_grid(COUNTS, GROUP)
    area = 8 / 80 * 7.6 / 59
    weights = special.softmax(total).sum(1)
    mean = weights @ tau
    evidence = special.logsumexp(total) + np.log(area)
    return evidence, mean, np.sqrt(weights @ (tau - mean) ** 2)


@pytest.fixture(scope="module")
def of_counts():
    return nested(poisson, GROUP, COUNTS, key=2)


def test_counts_against_sums_over_everything(of_counts):
    evidence, mean, deviation = poisson_truth()
    found, table = of_counts.get_extra_fields(), of_counts.summary()
    assert [*table.index] == [*of_counts.posterior().summary().index]
    half = of_counts.summary(prob=0.5)
    assert [*half.columns] == ["mean", "sd", "25%", "50%", "75%", "n_eff"]
    assert (half["25%"] > table["5%"]).all()
    assert (half["75%"] < table["95%"]).all()
    assert found["khat"] < 0.7
    error = found["log_evidence_error"]
    assert abs(found["log_evidence"] - evidence) < 4 * error < 0.15
    np.testing.assert_allclose(table["mean"]["tau"], mean, atol=0.15 * deviation)
    np.testing.assert_allclose(table["sd"]["tau"], deviation, rtol=0.1)


def test_draws_have_all_sites_in_their_shapes(of_counts):
    draws = of_counts.get_samples()
    shapes = {k: x.shape for k, x in draws.items()}
    expected = {"a": (1000, G), "eta": (1000, N), "level": (1000,), "tau": (1000,)}
    assert shapes == expected
    np.testing.assert_allclose(draws["eta"], draws["a"][:, GROUP])
    by_chain = of_counts.get_samples(group_by_chain=True)
    assert by_chain["a"].shape == (1, 1000, G)
    weighted = of_counts.get_samples(weighted=True)
    weights = np.exp(of_counts.get_extra_fields()["log_weights"])
    np.testing.assert_allclose(weights.sum(), 1, rtol=1e-9)
    assert weighted["a"].shape == (*weights.shape, G)
    # Equally weighted draws are resampled from these.
    np.testing.assert_allclose(
        draws["a"].mean(0), weights @ np.asarray(weighted["a"]), atol=0.1
    )
    predicted = Predictive(poisson, draws)(jax.random.key(1), GROUP)
    assert predicted["y"].shape == (1000, N)


def test_the_summary_says_what_was_done(of_counts, capsys):
    of_counts.print_summary()
    printed = " ".join(capsys.readouterr().out.split())
    expected = "n_eff", "tau", "a[3]", "from the exact posterior", "log evidence"
    for part in (*expected, "evaluations of the collapsed", "mode and curvature"):
        assert part in printed
    fields = of_counts.get_extra_fields()
    assert f"k-hat {fields['khat']:.2f}" in printed
    # Most of the 512 points have interpolated factors.
    assert 16 <= fields["evaluations"] < 96
    assert "exact posterior" in " ".join(repr(of_counts).split())


@pytest.mark.parametrize(("size", "expected"), [(1000, 8), (87_000, 6), (10**7, 4)])
def test_fewer_draws_are_made_if_they_would_not_fit_into_memory(size, expected):
    form = SimpleNamespace(any_rows=False, independent=SimpleNamespace(groups=0))
    structure = SimpleNamespace(size=size, form=form)
    assert gpaug.NestedVI(lambda: None)._draws_at(structure) == expected


def test_a_sparse_process_is_named(of_counts):
    """Draws of a process with few inducing inputs neglect its residual, and the report
    says so. A chain of states at all times was once called sparse."""

    def model(x, y=None, *, inducing=None):
        kernel = gpaug.kernels.Matern52(numpyro.sample("s", dist.LogNormal(0, 0.5)), 1)
        f = gpaug.GaussianProcess("f", kernel, inducing, markov=inducing is None)(x)
        with numpyro.plate("data", len(x)):
            numpyro.sample("y", dist.Poisson(jnp.exp(f)), obs=y)

    def report(**how):
        guide = gpaug.AutoLatentGaussian(model).setup(x, np.arange(9) % 3, **how)
        programs = SimpleNamespace(structure=guide.structure)
        return dict(overview(replace(of_counts._run, programs=programs), 1000))

    x = np.linspace(0, 3, 9)
    said = "3 inducing values determine 9 values of f; the residual is neglected"
    assert report(inducing=x[::3])["sparse"] == said
    assert "sparse" not in report()
    assert "inducing" not in repr(of_counts)
    assert "get_samples() returns 1000" in " ".join(repr(of_counts).split())


def test_draws_go_to_arviz(of_counts):
    tree = gpaug.diagnostics.to_datatree(jax.random.key(0), of_counts)
    assert tree["posterior"]["a"].shape == (1, 1000, G)
    assert tree["log_likelihood"]["y"].shape == (1, 1000, N)
    assert tree["posterior_predictive"]["y"].shape == (1, 1000, N)
    rate = np.exp(np.asarray(of_counts.get_samples()["eta"]))
    np.testing.assert_allclose(
        tree["log_likelihood"]["y"][0], stats.poisson(rate).logpmf(COUNTS), atol=1e-4
    )
    with pytest.raises(TypeError, match="has its own model and arguments"):
        gpaug.diagnostics.to_datatree(jax.random.key(0), of_counts, None, None, GROUP)
    with pytest.raises(TypeError, match="pass a guide and its params, to_datatree"):
        gpaug.diagnostics.to_datatree(jax.random.key(0), poisson)
    with pytest.raises(TypeError, match=r"to_datatree\(key, nested\)"):
        gpaug.diagnostics.to_datatree(of_counts)
    mcmc = MCMC(NUTS(poisson), num_warmup=1, num_samples=1)
    with pytest.raises(TypeError, match="from_numpyro"):
        gpaug.diagnostics.to_datatree(jax.random.key(0), mcmc)
    elpd = gpaug.diagnostics.loo(tree).elpd
    exact = stats.poisson(rate).pmf(COUNTS).mean(0)
    assert elpd < np.log(exact).sum() < elpd + 10


def test_models_are_compared_by_their_evidence(of_counts):
    flat = nested(poisson, np.zeros(N, int), COUNTS, num_points=64)
    compare = gpaug.diagnostics.compare_evidence
    table = compare({"one group": flat, "four groups": of_counts})
    assert [*table.index] == ["four groups", "one group"]
    fields = [x.get_extra_fields()["log_evidence"] for x in (flat, of_counts)]
    np.testing.assert_allclose(table["difference"], [0, fields[0] - fields[1]])
    with pytest.raises(ValueError, match="two runs or more"):
        compare({"one": flat})
    with pytest.raises(TypeError, match="Pass a NestedVI"):
        compare({"one": flat, "two": 3})
    with pytest.raises(TypeError, match="Pass a dict of NestedVI by name"):
        compare([flat, of_counts])
    with pytest.raises(ValueError, match="numpy.unique"):
        nested(poisson, GROUP.astype(str), COUNTS)


def test_the_same_key_gives_the_same_draws_and_compiles_nothing(of_counts):
    again = nested(poisson, GROUP, COUNTS, key=2)
    first = again.get_samples()
    np.testing.assert_array_equal(first["a"], of_counts.get_samples()["a"])
    before = compilations("_draw"), compilations("_evaluate")
    again.run(jax.random.key(2), GROUP, COUNTS + 1)
    assert before == (compilations("_draw"), compilations("_evaluate"))
    assert not np.array_equal(first["a"], again.get_samples()["a"])


def test_points_evaluated_together_are_those_evaluated_alone(of_counts):
    programs, data = of_counts._run.programs, of_counts._run.data
    points = of_counts._run.weighted.points[:3]
    start = jax.tree.map(lambda x: np.repeat(x, 3, 0), programs.no_start(data))
    assert programs.batch > 3
    together = programs.evaluate(points, start, data, gradient=True)
    for i in range(3):
        one = jax.tree.map(lambda x, i=i: x[i : i + 1], start)
        alone = programs.evaluate(points[i : i + 1], one, data, gradient=True)
        for a, b in zip(*map(jax.tree.leaves, (together, alone)), strict=True):
            np.testing.assert_allclose(a[i : i + 1], b, rtol=1e-6)


def test_without_hyperparameters_latents_are_reweighted():
    def model(t, y=None):
        b = numpyro.sample("b", dist.Normal(0, 2))
        with numpyro.plate("data", len(t)):
            numpyro.sample("y", dist.Bernoulli(logits=b * t), obs=y)

    t, y = np.linspace(-1, 2, 8), np.array([0, 1, 0, 1, 1, 1, 1, 1])
    found = nested(model, t, y)
    b = np.linspace(-15, 25, 8001)
    logs = stats.norm(0, 2).logpdf(b)
    logs += stats.bernoulli.logpmf(y, special.expit(b[:, None] * t)).sum(1)
    weights = special.softmax(logs)
    evidence = special.logsumexp(logs) + np.log(b[1] - b[0])
    fields, row = found.get_extra_fields(), found.summary().loc["b"]
    np.testing.assert_allclose(
        fields["log_evidence"], evidence, atol=4 * fields["log_evidence_error"] + 1e-4
    )
    mean = weights @ b
    deviation = np.sqrt(weights @ (b - mean) ** 2)
    np.testing.assert_allclose(row["mean"], mean, atol=0.1 * deviation)
    np.testing.assert_allclose(row["sd"], deviation, rtol=0.1)


def test_two_modes_of_a_hyperparameter_are_both_found():
    def model(y=None):
        mu = numpyro.sample("mu", dist.Uniform(-5, 5))
        with numpyro.plate("groups", 3):
            a = numpyro.sample("a", dist.Normal(0, 0.3))
        with numpyro.plate("data", 3):
            numpyro.sample("y", dist.Normal(a + jnp.abs(mu), 0.3), obs=y)

    found = nested(model, np.array([2.5, 3.0, 3.2]))
    weights = np.exp(found.get_extra_fields()["log_weights"])
    mu = np.asarray(found.get_samples(weighted=True)["mu"])
    np.testing.assert_allclose(weights[mu > 0].sum(), 0.5, atol=0.08)
    assert found.get_extra_fields()["khat"] < 0.7


SIGNED = 0.9 * np.array([1.3, 0.7, 1.1, -1.2, 0.4, -0.8, 1.6, 0.9])


def signed(y, *, members):
    """A mixture written by hand: each datum is about u or about -u."""
    with numpyro.plate("members", members):
        u = numpyro.sample("u", dist.Normal(0, 2))
    one, other = (dist.Normal(s * u, 0.5).log_prob(y[:, None]) for s in (1, -1))
    numpyro.factor("y", jnp.logaddexp(jnp.log(0.58) + one, jnp.log(0.42) + other))


def exactly_signed():
    """Log evidence, mean and standard deviation of u, by a sum."""
    u = np.linspace(-10, 10, 8001)
    one, other = (stats.norm(s * u[:, None], 0.5).logpdf(SIGNED) for s in (1, -1))
    logs = np.logaddexp(np.log(0.58) + one, np.log(0.42) + other).sum(1)
    logs += stats.norm(0, 2).logpdf(u)
    weights = special.softmax(logs)
    mean = weights @ u
    deviation = np.sqrt(weights @ (u - mean) ** 2)
    return special.logsumexp(logs) + np.log(u[1] - u[0]), mean, deviation


def test_two_modes_of_a_latent_are_both_found():
    found = nested(partial(signed, members=1), SIGNED)
    evidence, mean, deviation = exactly_signed()
    fields, row = found.get_extra_fields(), found.summary().loc["u[0]"]
    np.testing.assert_allclose(fields["log_evidence"], evidence, atol=0.05)
    np.testing.assert_allclose(row["mean"], mean, atol=0.1 * deviation)
    np.testing.assert_allclose(row["sd"], deviation, rtol=0.1)
    assert found.certified
    assert "2 modes of the latents found by" in " ".join(repr(found).split())
    # Predictions are mixtures of both modes, each a Gaussian.
    u = found.posterior()["u"]
    np.testing.assert_allclose(u.mean, [mean], atol=0.1 * deviation)
    np.testing.assert_allclose(np.sqrt(u.variance), [deviation], rtol=0.1)


@SLOW
def test_more_modes_than_are_drawn_from_void_the_certificate():
    with pytest.warns(UserWarning, match="modes of the latents .* more than the draws"):
        found = nested(partial(signed, members=4), SIGNED)
    assert not found.certified


def test_terms_are_concave_or_not():
    x = np.concatenate([-(1.5 ** np.arange(12)[::-1]), 1.5 ** np.arange(12)])
    with np.errstate(divide="ignore"):
        log = np.log(np.maximum(x, 0))
    concave = np.stack([-np.logaddexp(0, x), -(x**2), 0 * x, x - np.exp(x), log], 1)
    assert _is_concave(concave.astype(np.float32), x)
    for other in (stats.t(4).logpdf(x), np.logaddexp(-((x - 3) ** 2), -((x + 3) ** 2))):
        terms = np.stack([-(x**2), other], 1)
        assert not _is_concave(terms.astype(np.float32), x)


def wide(y=None):
    """A narrow view of very skewed posteriors: too many for weights."""
    tau = numpyro.sample("tau", dist.HalfNormal(1))
    with numpyro.plate("data", len(y)):
        a = numpyro.sample("a", dist.Normal(0, 10 + tau))
        numpyro.sample("y", dist.Bernoulli(logits=a), obs=y)


@pytest.mark.parametrize(("warmup", "num"), [(40, 50), slow(150, 250)])
def test_uneven_weights_are_reported_and_corrected(monkeypatch, capsys, warmup, num):
    monkeypatch.setattr("numpyro_gpaug.infer.nested.fallback.WARMUP", warmup)
    # As with very many latents.
    monkeypatch.setattr("numpyro_gpaug.infer.nested.drawer.MOST_MOVED", 0)
    options = {"num_points": 64, "num_draws": 2, "num_samples": 4 * num, "key": 2}
    y = np.arange(20) % 2
    with pytest.warns(UserWarning, match=r"k-hat .* NOT those of the exact posterior"):
        chains = nested(wide, y, **options)
    assert not chains.certified
    chains.correct = "mcmc"
    chains.run(jax.random.key(2), y)
    draws = chains.get_samples(group_by_chain=True)
    assert draws["a"].shape == (4, num, 20)
    chains.print_summary()
    printed = " ".join(capsys.readouterr().out.split())
    assert "The draws are from NUTS on the whitened model" in printed
    assert "divergences" in printed
    assert "NUTS from the draws" in chains.get_extra_fields()["seconds"]
    # Chains move: draws at one point would be worth a single draw.
    assert chains.summary()["n_eff"].min() > 5
    assert not chains.certified
    # With one datum the posterior is a skewed normal, averaged over tau.
    scale = 10 + np.asarray(draws["tau"]).mean()
    a = np.linspace(-90, 90, 4001)
    weights = special.softmax(stats.norm(0, scale).logpdf(a) - np.logaddexp(0, -a))
    mean = (np.asarray(draws["a"]) * np.where(y, 1, -1)).mean()
    np.testing.assert_allclose(mean, weights @ a, rtol=0.1)


def test_uneven_weights_are_annealed():
    """Skewed posteriors, with the evidence by quadrature."""
    y = np.array([1, 0, 4, 1, 12, 30] + 40 * [0])

    def counts(y):
        tau = numpyro.sample("tau", dist.HalfNormal(4))
        with numpyro.plate("data", len(y)):
            a = numpyro.sample("a", dist.Normal(0, 1))
            numpyro.sample("y", dist.Poisson(jnp.exp(tau * a)), obs=y)

    tau, a = np.linspace(0.02, 16, 200), np.linspace(-7, 7, 1001)
    log_rates = tau[:, None] * a
    value, number = np.unique(y, return_counts=True)
    likelihood = stats.poisson.logpmf(value[:, None, None], np.exp(log_rates))
    each = special.logsumexp(likelihood + stats.norm.logpdf(a), -1) + np.log(0.014)
    joint = number @ each + stats.halfnorm.logpdf(tau, scale=4)
    evidence = special.logsumexp(joint) + np.log(tau[1] - tau[0])
    found = nested(counts, y, num_points=64, key=1)
    assert "annealed" in str(found)
    assert found.certified
    fields = found.get_extra_fields()
    error = 4 * fields["log_evidence_error"]
    np.testing.assert_allclose(fields["log_evidence"], evidence, atol=error)
    mean = special.softmax(joint) @ tau
    np.testing.assert_allclose(found.get_samples()["tau"].mean(), mean, atol=0.4)


def test_what_cannot_be_evaluated_voids_the_certificate():
    """Beyond a scale of one the model breaks, and half of the posterior is there."""

    def model(y=None):
        tau = numpyro.sample("tau", dist.HalfNormal(1))
        broken = jnp.where(tau > 1, jnp.nan, tau)
        with numpyro.plate("data", len(y)):
            a = numpyro.sample("a", dist.Normal(0, broken))
            numpyro.sample("y", dist.Normal(a, 0.3), obs=y)

    with pytest.warns(UserWarning, match="could not be evaluated in about"):
        found = nested(model, np.linspace(-1.6, 1.6, 12))
    fields = found.get_extra_fields()
    assert fields["failures"] > 0
    assert 0.1 < fields["loss"] < 0.9
    # Draws that are NaN have no weight.
    table = found.summary()
    assert np.isfinite(table.to_numpy()).all()
    tau = np.asarray(found.get_samples()["tau"])
    np.testing.assert_allclose(table.loc["tau", "mean"], tau.mean(), atol=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("number", [12, 17])
def test_many_hyperparameters_go_to_nuts(capsys, number):
    def model(X, y=None):
        prior = dist.HalfNormal(1).expand([number])
        scale = numpyro.sample("scale", prior.to_event(1))
        b = numpyro.sample("b", dist.Normal(0, scale).to_event(1))
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", dist.Normal(X @ b, 0.5), obs=y)

    X, many = RNG.normal(size=(30, number)), number > MOST
    found = nested(model, X, X[:, 0], num_points=64 if many else 512)
    found.print_summary()
    printed = " ".join(capsys.readouterr().out.split())
    assert ("NUTS on the collapsed model" in printed) == many
    assert ("log evidence not available" in printed) == many
    assert np.isnan(found.get_extra_fields()["log_evidence"]) == many
    assert found.certified
    assert found.get_samples()["b"].shape == (1000, number)


def test_a_slow_chain_is_not_certified(monkeypatch):
    def rotatable(y=None):
        a = numpyro.sample("a", dist.Normal(0, 1).expand([5, 2]).to_event(2))
        b = numpyro.sample("b", dist.Normal(0, 1).expand([6, 2]).to_event(2))
        numpyro.sample("y", dist.Normal(a @ b.T, 0.3).to_event(2), obs=y)

    monkeypatch.setattr("numpyro_gpaug.infer.nested.nested.MOST", 8)
    monkeypatch.setattr("numpyro_gpaug.infer.nested.draws.WARMUP", 100)
    monkeypatch.setattr("numpyro_gpaug.infer.nested.draws.SLOWEST", 0.3)
    rng = np.random.default_rng(0)
    y = rng.normal(size=(5, 2)) @ rng.normal(size=(2, 6))
    with pytest.warns(UserWarning, match="only .*% of the draws by NUTS"):
        assert not nested(rotatable, y, num_points=128).certified


# -- numbers --------------------------------------------------------------------------


def test_compensated_sums():
    x = (3 * RNG.normal(size=(2, 50_001)) - 1).astype(np.float32)
    total, lost = jax.jit(compensated_sum)(jnp.asarray(x))
    found = np.asarray(total, float) + np.asarray(lost, float)
    np.testing.assert_allclose(found, x.astype(float).sum(-1), rtol=1e-9)


def varying_noise(x, y=None):
    """Two predictors of each datum."""
    tau = numpyro.sample("tau", dist.HalfNormal(1))
    w = numpyro.sample("w", dist.Normal(0, tau).expand([2]).to_event(1))
    v = numpyro.sample("v", dist.Normal(0, tau).expand([2]).to_event(1))
    with numpyro.plate("data", len(x)):
        likelihood = dist.Normal(w[0] + w[1] * x, jnp.exp(v[0] + v[1] * x))
        numpyro.sample("y", likelihood, obs=y)


def classes(x, y=None):
    """Three predictors of each datum."""
    tau = numpyro.sample("tau", dist.HalfNormal(1))
    w = numpyro.sample("w", dist.Normal(0, tau).expand([3, 2]).to_event(2))
    with numpyro.plate("data", len(x)):
        eta = w[:, 0] + w[:, 1] * x[:, None]
        numpyro.sample("y", dist.Categorical(logits=eta), obs=y)


def outlying(x, y=None):
    """Data far out, whose factors have negative precisions."""
    tau = numpyro.sample("tau", dist.HalfNormal(1))
    w = numpyro.sample("w", dist.Normal(0, tau).expand([2]).to_event(1))
    with numpyro.plate("data", len(x)):
        numpyro.sample("y", dist.StudentT(2.0, w[0] + w[1] * x, 0.3), obs=y)


@pytest.mark.parametrize("model", [slow(varying_noise), classes, outlying])
def test_draws_are_from_the_gaussian_that_was_found(x64, model):
    """The factors have a term for pairs of predictors; without it k-hat of small models
    was above 1. Where negative precisions were raised to zero, no search ended at its
    own factors.
    """
    x = jnp.asarray(np.random.default_rng(0).normal(size=N))
    y = COUNTS.clip(max=2) if model is classes else jnp.asarray(REAL + x)
    arguments = Arguments.split((x, y), {})
    bounds = CollapsedBounds(model, projected=True)
    bound = bounds.at(arguments, (x, y), {})
    values = {"tau": jnp.asarray(0.8)}

    @jax.jit
    def gaussians(arguments):
        view = bound.view(values, arguments)
        found = bound.settle(bound.problem(values, arguments, learns=False))
        return found.moments, moments_given(found.factors, view), found.factors

    settled, drawn, factors = gaussians(arguments)
    assert (factors.precision < -0.1).any() == (model is outlying)
    np.testing.assert_allclose(drawn.mean, settled.mean, atol=5e-4)
    covariances = (q.unwhiten(jnp.eye(q.mean.shape[-1])) for q in (settled, drawn))
    expected, found = (s.mT @ s for s in covariances)
    np.testing.assert_allclose(found, expected, atol=5e-4)


@pytest.mark.parametrize("lost", [np.nan, -1e20])
def test_a_gaussian_starts_from_the_nearest_one_or_anew(lost):
    tried = []

    class Recorder:
        hyper, batch = SimpleNamespace(size=1), 1
        structure = SimpleNamespace(form=SimpleNamespace(rank=0))

        def no_start(self, arrays):
            return Start(np.full((1, 2), np.nan), np.zeros(1, bool))

        def evaluate(self, points, start, arrays, *, gradient):
            tried.append(float(start.factors[0, 0]))
            # Far out, factors of other points are wrong.
            wrong = points[0, 0] > 9 and start.known.any()
            bound = np.array([lost if wrong else 1.0])
            zero, factors = np.zeros(1), np.repeat(points, 2, 1)
            return Evaluated(bound, zero, np.zeros((1, 1)), zero, {}, factors, None)

    drawer = Drawer(Recorder(), (), np.random.default_rng(0), None)
    values = [
        float(drawer.evaluate(np.array([[x]]))[0][0]) for x in (0.0, 1.0, 0.4, 10.0)
    ]
    np.testing.assert_array_equal(tried, [0.0, 0.0, 0.0, 1.0, np.nan])
    assert values == [1.0] * 4
    # A failed point is not a start for others.
    np.testing.assert_array_equal(drawer.known.at(np.array([[9.9]]))[0], [[10.0] * 2])


def test_factors_between_those_known_and_far_from_them():
    rng = np.random.default_rng(0)
    none = Start(GaussianFactors(*np.zeros((2, 1, 1))), np.zeros(1, bool))
    known, points = Known(none, 2), rng.normal(size=(60, 2))

    def factors(x):
        return np.stack([np.sin(x[:, 0]) * x[:, 1], np.exp(x[:, 0])], 1)

    def bounds(x):
        return np.cos(x[:, 0]) - x[:, 1]

    known.add(points, factors(points), bounds(points))
    # Two nearly equal points would make the equations singular.
    known.add(points[:1] + 1e-9, factors(points[:1]) + 1, np.full(1, 9.0))
    known.learn()
    inside, outside = 0.8 * rng.uniform(-1, 1, (40, 2)), np.array([[300.0, 0.0]])
    found, doubts, bound = known.at(inside)
    np.testing.assert_allclose(bound, bounds(inside), atol=0.15)
    np.testing.assert_allclose(found, factors(inside), atol=0.15)
    assert (found[:, 1] > 0).all()
    there, doubt, _ = known.at(points[:5])
    np.testing.assert_allclose(there, factors(points[:5]), atol=1e-6)
    assert doubt.max() < 1e-6 < doubts.max()
    found, doubts, bound = known.at(outside)
    nearest = np.square(points - outside).sum(1).argmin()
    np.testing.assert_array_equal(found, factors(points[nearest : nearest + 1]))
    assert np.isinf(doubts)
    assert np.isnan(bound)


def test_a_vanishing_precision_does_not_spoil_what_is_between_others():
    """At the last point the observation of the first factor is a million."""
    rng = np.random.default_rng(0)
    none = Start(GaussianFactors(*np.zeros((2, 1, 2))), np.zeros(1, bool))
    known, points = Known(none, 1), np.append(np.linspace(-2, 2, 30), 5.0)[:, None]

    def factors(x):
        precision = np.exp(-np.array([3.0, 0.1]) * np.clip(x, 0, None) ** 2)
        return np.concatenate(
            [np.stack([np.cos(x[:, 0]), 2 * x[:, 0]], 1), precision], 1
        )

    known.add(points, factors(points), np.zeros(31))
    known.learn()
    inside = rng.uniform(-1.5, 1.5, (20, 1))
    np.testing.assert_allclose(known.at(inside)[0], factors(inside), atol=0.05)


def test_losses_of_searches_decide_where_factors_are_interpolated():
    drawer = Drawer.__new__(Drawer)
    structure = SimpleNamespace(dtype=np.float32)
    drawer.programs, drawer.best = SimpleNamespace(structure=structure), -np.inf
    doubts = np.geomspace(1e-6, 1e4, 31)

    def most(losses):
        drawer._doubts, drawer._losses = list(doubts), list(losses)
        assert drawer._calibrated()
        return drawer._most

    # Losses that grow with the doubts are small up to there.
    assert 1e-3 < most(0.01 * doubts / 1e-2) < 0.1
    # Losses everywhere leave no interpolation, and none anywhere allow all of it.
    assert most(0.5 + 0 * doubts) < 1e-3
    assert most(0.001 + 0 * doubts) >= doubts[-1]
    # Nor do losses that are rounding errors of a large bound.
    drawer.best = -2e5
    assert most(0.03 + 0 * doubts) >= doubts[-1]
    assert most(0.5 + 0 * doubts) < 1e-3
    drawer._doubts, drawer._losses = [np.inf] * 31, [0.0] * 31
    assert not drawer._calibrated()


def test_factors_of_normal_data_are_known_between_others():
    """Their precisions are exponentials of the logarithm of the noise, and they observe
    the data; a precision that changes its sign has no logarithm."""
    rng = np.random.default_rng(1)
    none = Start(GaussianFactors(*np.zeros((2, 1, 3))), np.zeros(1, bool))
    known, points = Known(none, 2), rng.normal(size=(60, 2))

    def factors(x):
        precision = np.stack([np.exp(-3 * x[:, 0]), np.exp(x[:, 1]), x[:, 0]], 1)
        return np.concatenate([precision * [1.5, -0.2, 1.0], precision], 1)

    known.add(points, factors(points), np.zeros(60))
    known.learn()
    inside = 0.8 * rng.uniform(-1, 1, (40, 2))
    found = known.at(inside)[0]
    np.testing.assert_allclose(found, factors(inside), rtol=1e-7)
    # Without negative precisions, any prior makes a Gaussian of them.
    positive, negative = known.without_negative(found), found[:, 5] < 0
    assert negative.any()
    np.testing.assert_array_equal(positive[negative][:, [2, 5]], 0)
    np.testing.assert_array_equal(positive[~negative], found[~negative])


def test_interpolations_that_draws_contradict_are_noticed():
    """The third bound was found, and is .3 nats above the evidence of its draws. The
    second was interpolated and is 7 nats above, and the last precision is negative."""
    drawer = Drawer.__new__(Drawer)
    drawer._excess = -np.inf
    bound = np.array([5.2, 9.0, 1.3, 4.0, 7.0])
    evidence = np.array([5.0, 2.0, 1.0, 4.5, 6.0])
    # Their mean is the evidence, without half of the determinant.
    ratios = evidence[:, None] - 0.7 + np.log([0.5, 1.5])
    log_det = np.array([1.4] * 4 + [np.nan])
    drawn = Drawn(None, None, log_det, ratios, np.zeros((5, 2)), {})
    sure = np.array([True, True, False, True, True])
    found = drawer._unlike(drawn, [SimpleNamespace(bound=bound, sure=sure)])
    np.testing.assert_array_equal(found, [False, True, False, False, True])
    np.testing.assert_allclose(drawer._excess, 0.3, rtol=1e-9)


def test_draws_that_are_bad_by_chance_stay():
    """Draws at the points 1, 2 and 4 contradict interpolations; a search shows that the
    one at 2 was accurate."""
    drawer, drawn = Drawer.__new__(Drawer), []
    drawer.programs = SimpleNamespace(chunk=3)
    drawer._bar = SimpleNamespace(update=lambda rows: None)

    class Gaussian:
        def __init__(self, x):
            self.points = self.bound = x

        def part(self, places):
            return Gaussian(self.points[places])

    def chunk(points, widths, gaussians):
        drawn.append(points[:, 0].tolist())
        n = points[:, 0]
        again = np.full(len(n), len(drawn[-1]) < 2)
        found = Points(n[:, None, None], 10 + n, n, again[:, None], n, {}, n)
        return found, np.isin(n, [1, 2, 4]) & ~again

    def lost(gaussians):
        return np.flatnonzero(gaussians[0].points != 2)

    drawer._chunk, drawer._lost = chunk, lost
    points = np.arange(5.0)[:, None]
    known = [Gaussian(points[:, 0])]
    found = drawer._in_chunks(
        points, np.ones((5, 1)), lambda here: [known[0].part(here)], kept=True
    )
    assert drawn == [[0, 1, 2], [1], [3, 4], [4]]
    np.testing.assert_array_equal(found.log_joint_over_q[:, 0], [0, 1, 0, 0, 1])
    np.testing.assert_array_equal(found.bound[[0, 2, 3]], [10, 2, 13])


def test_bounds_far_from_the_mode_do_not_spoil_the_proposal():
    """Without a check by draws, two interpolated bounds are 15 nats too high."""
    rng, side = np.random.default_rng(1), np.linspace(0, 1, 4)
    grid = np.stack(np.meshgrid(side, side), -1).reshape(-1, 2)
    X = rng.uniform(size=(20, 2))
    y = np.sin(6 * X[:, 0]) * np.cos(4 * X[:, 1]) + 0.05 * rng.normal(size=20)

    def model(X, y):
        lengthscale = numpyro.sample("lengthscale", dist.LogNormal(-1.0, 0.7))
        variance = numpyro.sample("variance", dist.LogNormal(0.0, 0.7))
        noise = numpyro.sample("noise", dist.LogNormal(-2.0, 0.7))
        kernel = gpaug.kernels.Matern52(lengthscale, variance)
        f = gpaug.GaussianProcess("f", kernel, grid)(X)
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", dist.Normal(f, noise), obs=y)

    run = nested(model, X, y)._run.weighted
    assert len(run.points) == 512
    assert run.effective_points > 300


@pytest.mark.parametrize("excess", [1.0, 1.4])
def test_the_width_of_draws_is_that_of_the_target(excess):
    """The normal target has one of the candidate widths, or the width of the Gaussian
    itself.
    """
    rng, latents = np.random.default_rng(0), 5
    sizes = np.array([1.0, 1.2, 1.4, 2.0])
    kinds = np.arange(8000).reshape(1000, 8) % 4
    noise = rng.normal(size=(1000, 8, latents))
    squares = np.square(noise).sum(-1)
    z = noise * sizes[kinds][..., None]
    target = stats.norm(0, excess).logpdf(z).sum(-1)
    ratios = target - stats.norm(0, sizes[kinds][..., None]).logpdf(z).sum(-1)
    assert best_width(ratios, squares, sizes, kinds, latents) == excess


@pytest.mark.parametrize("sides", [[1.0, 1.0], [0.5, 2.0]])
def test_split_t_distributions_draw_what_their_density_says(sides):
    axes = np.array([[0.5, 0.1], [0.0, 0.8]])
    d = StudentT(np.array([1.0, -1.0]), axes, np.array([sides, sides[::-1]]).T)
    points = d.draws(20_000, np.random.default_rng(0))
    x, y = np.meshgrid(np.linspace(-24, 26, 500), np.linspace(-30, 28, 500))
    places = np.stack([x.ravel(), y.ravel()], -1)
    density = np.exp(d.log_density(places))
    area = (x[0, 1] - x[0, 0]) * (y[1, 0] - y[0, 0])
    np.testing.assert_allclose(density.sum() * area, 1, atol=0.01)
    np.testing.assert_allclose(points.mean(0), density @ places * area, atol=0.03)


def test_a_long_tail_on_one_side_widens_that_side():
    """A normal, and the logarithm of a half-normal scale."""

    def evaluate(points):
        x, y = points.T
        values = y - np.exp(2 * y) / 2 - 2 * (x - 1) ** 2
        return values, np.stack([-4 * (x - 1), 1 - np.exp(2 * y)], 1)

    mode = climb(evaluate, np.array([0.5, 0.5]), precise=True)
    np.testing.assert_allclose(mode.point, [1.0, 0.0], atol=1e-3)
    component, far = mode.component, mode.point - [0, 6 / np.sqrt(2)]
    np.testing.assert_allclose(
        np.abs(component.axes), np.diag([0.5, 0.5**0.5]), rtol=1e-2
    )
    np.testing.assert_array_equal(component.sides[:, 0], 1)
    (widened,) = component.sides[:, 1][component.sides[:, 1] > 1]
    assert widened > 1.5
    # It falls as far as the density at this place.
    fall = np.diff(component.log_density(np.stack([mode.point, far])))
    (there,), _ = evaluate(far[None])
    np.testing.assert_allclose(fall, there - mode.value, atol=0.02)


def test_mixtures_weigh_their_parts_by_their_counts():
    d = StudentT.symmetric(np.zeros(1), np.eye(1))
    proposal = Proposal((d, d._replace(mode=np.ones(1))), (0.6, 0.3), 0.1)
    prior, counts = proposal.counts(100)
    assert prior == 10
    assert prior + sum(n for _, n in counts) == 100
    points = proposal.draws(100, np.zeros((10, 1)), np.random.default_rng(0))
    assert points.shape == (100, 1)
    log_prior = np.zeros(100)
    mixed = prior + sum(n * np.exp(part.log_density(points)) for part, n in counts)
    found = proposal.log_density(points, log_prior, 100)
    np.testing.assert_allclose(found, np.log(mixed / 100), rtol=1e-9)


def weighted(ratios, **options):
    n, draws = ratios.shape
    points = np.arange(n, dtype=float)[:, None]
    return Weighted.of(points, ratios, normalised=True)


def rounds(density, d, key, num=512, most=64, draws=1):
    """Weighted points of the first proposal, a standard t distribution, and of the
    rounds after it: hyperparameters of a known density, without latents.

    :param density: logarithms of target weights, (n,) or (n, draws), of points (n, d).
    """

    class Target:
        alike = 1

        def draw(self, points, widths, *, found):
            n, log = np.zeros(len(points)), density(points)
            ratios = np.broadcast_to(log.reshape(len(n), -1), (len(n), draws))
            return Points(n[:, None, None], n, n, ratios, n, {}, n)

    start, rng = StudentT.symmetric(np.zeros(d), np.eye(d)), np.random.default_rng(key)
    pool = Pool(Target(), np.ones(draws), np.zeros((0, d)), rng, np.ones((1, d)))
    first = pool.draw(Proposal((start,), (1.0,), 0.0), num)
    return first, extended(pool, first, start, num, most)


@pytest.mark.parametrize("d", [1, 2])
def test_rounds_make_weights_even(d):
    """The first proposal is a t distribution that is too narrow for exponential tails.
    k-hat falls below its limit with every key, and the evidence is right.
    """

    def density(points):
        tails = np.where(points < 0, np.exp(points / 3), np.exp(-points))
        return np.log(tails / 4).sum(1)

    both = [rounds(density, d, key, draws=2) for key in range(5)]
    for _, found in both:
        assert found.certified
        assert len(found.points) <= 8 * 512
        error = found.log_evidence_error
        np.testing.assert_allclose(found.log_evidence, 0, atol=4 * error)
        mean = np.exp(found.log_weights).sum(1) @ found.points
        # A quarter of a standard deviation.
        np.testing.assert_allclose(mean, -2.0, atol=0.25 * np.sqrt(10))
    assert not all(first.certified for first, _ in both)


@pytest.mark.parametrize(
    ("share", "place", "width", "keys"),
    [(0.05, [-3, 1, 0], 1.0, range(8)), (0.1, [-5, 1.5, 0], 1.5, [10, 16, 23])],
)
def test_rounds_draw_where_few_points_have_large_weights(share, place, width, keys):
    """A part of the posterior is off the axes, as it is where a variance may be zero
    and another one makes up for it. First, two thirds of the points are effective, but
    more points of the same proposal do not lower k-hat. Second, new draws from the
    proposals that were found show that rounds have to go on."""

    def density(points):
        main = stats.norm.logpdf(points).sum(1) + np.log(1 - share)
        tail = stats.norm(place, width).logpdf(points).sum(1) + np.log(share)
        return np.logaddexp(main, tail)

    for key in keys:
        _, found = rounds(density, 3, key)
        assert found.certified
        assert len(found.points) <= 2 * 512


def test_rounds_do_not_make_the_evidence_too_small():
    """Eight skewed hyperparameters. A proposal around the point with the largest weight
    makes that weight small: the evidence was .13 nats too small, three
    standard errors.
    """

    def density(points):
        return stats.gumbel_r.logpdf(points).sum(1)

    found = [rounds(density, 8, key)[1].log_evidence for key in range(10)]
    assert abs(np.mean(found)) < 0.06


def test_rounds_end_where_they_are_of_no_use():
    """The weights of latents that are drawn badly stay what they are."""
    rng = np.random.default_rng(0)

    def density(points):
        uneven = -1.5 * np.log(rng.uniform(size=(len(points), 2)))
        return uneven + stats.norm.logpdf(points)

    _, found = rounds(density, 1, 0, 128, 1, draws=2)
    assert not found.certified
    assert 128 < len(found.points) < 4 * 128


def test_a_scale_with_a_heavy_tail_is_certified_with_every_key():
    """Six studies of known variances: by a sum over the scale."""
    y = np.array([0.12, 0.35, -0.05, 0.6, 0.2, 0.41])
    v = np.array([0.02, 0.05, 0.01, 0.2, 0.03, 0.08])

    def model(v, y=None):
        mu = numpyro.sample("mu", dist.Normal(0, 2))
        tau = numpyro.sample("tau", dist.HalfCauchy(0.5))
        with numpyro.plate("studies", len(v)):
            theta = numpyro.sample("theta", dist.Normal(mu, tau))
            numpyro.sample("y", dist.Normal(theta, jnp.sqrt(v)), obs=y)

    tau = (np.arange(20_000) + 0.5) / 20_000 * 8
    precision = 1 / (v + tau[:, None] ** 2)
    total = precision.sum(1) + 1 / 4
    mean = precision @ y / total
    logs = 0.5 * np.log(precision).sum(1) - 0.5 * np.log(4 * total)
    logs -= 0.5 * (precision @ y**2 - total * mean**2)
    logs += stats.halfcauchy(0, 0.5).logpdf(tau) - 3 * np.log(2 * np.pi)
    weights = special.softmax(logs)
    evidence = special.logsumexp(logs) + np.log(tau[1] - tau[0])
    found = gpaug.NestedVI(model, progress_bar=False)
    for key in (0, 11, 15):
        found.run(jax.random.key(key), v, y)
        assert found.certified
        table = found.summary().loc[["mu", "tau"]]
        exact = np.array([weights @ mean, weights @ tau])
        off = (table["mean"] - exact) / table["sd"]
        assert np.abs(off).max() < 0.2
        fields = found.get_extra_fields()
        np.testing.assert_allclose(fields["log_evidence"], evidence, atol=0.1)


def test_flattened_weights_leave_out_what_has_none():
    """One weight had all of the mass, and others were zero: flattened by a power of
    zero they were NaN, and so was the width of the next proposal."""
    weights = tempered(np.array([900.0, 0.0, 1.0, -np.inf]), 3.0)
    np.testing.assert_allclose(weights, [1 / 3, 1 / 3, 1 / 3, 0])


@pytest.mark.parametrize(("num", "limit"), [(32, 0.336), (512, 0.631), (4000, 0.7)])
def test_few_weights_are_certified_where_their_tail_is_lighter(num, limit):
    found = weighted(np.zeros((num, 1)))
    np.testing.assert_allclose(found.limit, limit, atol=1e-3)
    object.__setattr__(found, "khat", limit - 0.01)
    assert found.certified
    object.__setattr__(found, "khat", limit + 0.01)
    assert not found.certified


def test_smoothed_weights_are_those_of_arviz():
    from arviz_stats.base import array_stats

    for num, scale in ((30, 1.0), (512, 0.3), (512, 3.0), (700, 30.0)):
        ratios = scale * np.random.default_rng(num).normal(size=num)
        log_weights, khat = array_stats.psislw(-ratios)
        found = smoothed(ratios)
        np.testing.assert_allclose(found.khat, khat, rtol=1e-9)
        np.testing.assert_allclose(found.log_weights, log_weights, atol=1e-9)


def test_effective_draws_of_means_count_points_not_draws():
    rng = np.random.default_rng(0)
    found = weighted(np.zeros((400, 8)))
    of_points = np.repeat(rng.normal(size=400), 8)
    of_draws = rng.normal(size=3200)
    table = found.table({"point": of_points, "draw": of_draws}, (0.05, 0.5, 0.95))
    np.testing.assert_allclose(table["point"][-1], 400, rtol=0.01)
    np.testing.assert_allclose(table["draw"][-1], 3200, rtol=0.2)
    np.testing.assert_allclose(found.log_evidence, 0, atol=1e-12)


def test_what_is_the_same_in_all_draws_has_no_spread():
    """The diagonal of correlations, but for rounding, and the zeros of a factor."""
    rng = np.random.default_rng(0)
    correlation = rng.uniform(-1, 1, 40).astype(np.float32)
    one = 1 + np.float32(1e-7) * rng.integers(0, 2, 40).astype(np.float32)
    L = np.stack([one, 0 * one, correlation, one], -1).reshape(40, 2, 2)
    table = weighted(np.zeros((40, 1))).table({"L": L}, (0.05, 0.5, 0.95))
    for entry, value in (("L[0, 0]", 1), ("L[0, 1]", 0)):
        mean, sd, *_, worth = table[entry]
        np.testing.assert_allclose(mean, value, atol=1e-6)
        assert sd == 0
        assert np.isnan(worth)
    np.testing.assert_allclose(table["L[1, 0]"][-1], 40)
    rows = summary.table({}, {}, Members(np.full(40, -np.log(40)), {"L": L}, {}))
    assert rows.loc["L[0, 0]", "sd"] == 0
    np.testing.assert_allclose(rows.loc["L[1, 0]", "sd"], correlation.std(), rtol=1e-5)


def test_weights_that_tie_are_left_alone():
    rng = np.random.default_rng(0)
    for ratios in (
        np.zeros((400, 2)),
        1e-7 * rng.normal(size=(400, 2)),
        0.1 * rng.integers(0, 3, (400, 2)),
    ):
        found = weighted(ratios)
        expected = ratios - special.logsumexp(ratios)
        np.testing.assert_allclose(found.log_weights, expected, atol=0.02)
        assert np.isfinite(found.khat)
    # Equal large weights have no tail to smooth, and stay about the same.
    ratios = np.where(np.arange(400) % 8 == 0, 2.5, 0.0)[:, None] * np.ones((1, 2))
    found = np.exp(weighted(ratios).log_weights)
    expected = np.exp(ratios - special.logsumexp(ratios))
    assert np.abs(found - expected).sum() < 0.1


def test_small_matrices_take_one_thread():
    def threads():
        return {x["num_threads"] for x in threadpool_info() if x["user_api"] == "blas"}

    with threadpool_limits(2, user_api="blas"):
        for size, expected in ((10, {1}), (10_000, {2})):
            with threads_for(size):
                assert threads() == expected
        assert threads() == {2}
        # The limits of two threads overlap: the last to leave lifts the limit.
        first, second = threads_for(10), threads_for(10)
        first.__enter__()
        second.__enter__()
        first.__exit__(None, None, None)
        assert threads() == {1}
        second.__exit__(None, None, None)
        assert threads() == {2}


# -- what is refused ------------------------------------------------------------------


def test_options_are_checked():
    for options, said in (
        ({"num_points": 10}, "At least 32 points"),
        ({"num_draws": 0}, "num_draws must be a whole number"),
        ({"correct": "magic"}, "correct must be 'mcmc' or None"),
    ):
        with pytest.raises(ValueError, match=said):
            gpaug.NestedVI(poisson, **options)
    with pytest.raises(RuntimeError, match="has no draws yet"):
        gpaug.NestedVI(poisson).get_samples()


def test_arguments_are_checked():
    kernel = gpaug.NestedVI(poisson, progress_bar=False)
    key = jax.random.key(0)
    with pytest.raises(TypeError, match="random key"):
        kernel.run(GROUP, COUNTS)
    with pytest.raises(ValueError, match="no observed value: was an argument left out"):
        kernel.run(key, GROUP)
    with pytest.raises(ValueError, match="'y'.*outside the support"):
        kernel.run(key, GROUP, COUNTS - 5)
    with pytest.raises(ValueError, match="'a' has 4 members"):
        kernel.run(key, GROUP + 1, COUNTS)
    # Data of known shapes are checked, too.
    kernel.run(key, GROUP, COUNTS)
    with pytest.raises(ValueError, match="'y'.*outside the support"):
        kernel.run(key, GROUP, COUNTS - 5)
    with pytest.raises(ValueError, match="'a' has 4 members"):
        kernel.run(key, GROUP + 1, COUNTS)
    with pytest.raises(ValueError, match=r"init_params names \['tu'\]"):
        kernel.run(key, GROUP, COUNTS, init_params={"tu": 1.0})

    def batches(group, y):
        tau = numpyro.sample("tau", dist.HalfNormal(1))
        a = numpyro.sample("a", dist.Normal(0, tau))
        with numpyro.plate("data", N, subsample_size=5) as i:
            numpyro.sample("y", dist.Poisson(jnp.exp(a)), obs=y[i])

    for call in (
        partial(gpaug.NestedVI(batches).run, key),
        numpyro.handlers.seed(gpaug.collapse(batches), 0),
    ):
        with pytest.raises(ValueError, match="draw a subsample"):
            call(GROUP, COUNTS)


def test_a_bound_that_is_not_finite_is_explained():
    def model(y=None):
        tau = numpyro.sample("tau", dist.HalfNormal(1))
        with numpyro.plate("data", len(y)):
            a = numpyro.sample("a", dist.Normal(0, tau * jnp.nan))
            numpyro.sample("y", dist.Normal(a, 0.3), obs=y)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        said = "prior of 'a', Normal, is not finite in scale of"
        with pytest.raises(gpaug.CholeskyError, match=said):
            nested(model, REAL)


def test_other_devices_take_draws_in_batches(monkeypatch):
    """Arrays without elements (a chain without a border) are cut, too. The evidence is
    that of a sum over a grid.
    """

    def model(y=None):
        z = numpyro.sample("z", dist.GaussianRandomWalk(0.3, num_steps=5))
        with numpyro.plate("data", 5):
            numpyro.sample("y", dist.Poisson(jnp.exp(z)), obs=y)

    counts, z = [1, 0, 2, 3, 2], np.linspace(-4, 4, 801)
    mass, step = (z == 0).astype(float), 0.01 * stats.norm(z[:, None], 0.3).pdf(z)
    for count in counts:
        mass = mass @ step * stats.poisson(np.exp(z)).pmf(count)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    walk = nested(model, np.array(counts))
    assert walk.get_samples()["z"].shape[1:] == (5,)
    found = walk.get_extra_fields()
    # Draws that pad a batch are not counted.
    assert found["evaluations"] < 100
    np.testing.assert_allclose(found["log_evidence"], np.log(mass.sum()), atol=0.03)


def test_evidence_counts_mirrored_modes():
    """The signs of loadings and factors may change together: the posterior has two
    modes, and no draw reaches the other."""
    rng = np.random.default_rng(0)
    loadings = np.array([1.0, -0.8, 0.6])
    y = rng.normal(size=(25, 1)) * loadings + 0.3 * rng.normal(size=(25, 3))

    def model(y):
        w = numpyro.sample("w", dist.Normal(0, 1).expand([3]).to_event(1))
        with numpyro.plate("rows", 25, dim=-2):
            f = numpyro.sample("f", dist.Normal(0, 1))
            with numpyro.plate("columns", 3, dim=-1):
                numpyro.sample("y", dist.Normal(f * w, 0.3), obs=y)

    nested = gpaug.NestedVI(model, num_points=128, progress_bar=False)
    nested.run(jax.random.key(0), y.astype("float32"))
    assert nested.certified
    assert "the evidence counts 2 mirrored modes" in " ".join(str(nested).split())
    # Draws around one mode, weighted by the density without the factors.
    around = stats.multivariate_t(loadings, 0.1 * np.eye(3), 5)
    w = around.rvs(20_000, random_state=1)
    w = w[w @ loadings > 0]
    spread = w[:, :, None] * w[:, None, :] + 0.3**2 * np.eye(3)
    _, log_det = np.linalg.slogdet(spread)
    squares = np.einsum("ni,wij,nj->w", y, np.linalg.inv(spread), y)
    density = -0.5 * (squares + 25 * log_det + 75 * np.log(2 * np.pi))
    terms = density + stats.norm.logpdf(w).sum(1) - around.logpdf(w)
    expected = np.logaddexp.reduce(terms) - np.log(20_000) + np.log(2)
    found = nested.get_extra_fields()
    error = 4 * found["log_evidence_error"] + 0.02
    assert abs(found["log_evidence"] - expected) < error


def test_only_symmetries_are_mirrored():
    """Here of two signs together, and not of one entry, or around another mean."""
    hyper = SimpleNamespace(real={"w"}, zeros={"s": np.zeros(()), "w": np.zeros(2)})
    at = np.array([0.5, 2.0, -1.0])
    mode = Mode(at, 0.0, StudentT.symmetric(at, 0.01 * np.eye(3)))
    for mean, number in ((0.0, 2), (0.1, 1)):

        def evaluate(x, mean=mean):
            product = (x[:, 1] - mean) * (x[:, 2] - mean)
            return -50 * ((product + 2) ** 2 + (x[:, 0] - 0.5) ** 2), None

        found = mirrored(hyper, mode, evaluate)
        assert len(found.flips) == number
    both = mirrored(hyper, mode, lambda x: (-np.abs(x - 1)[:, 0], None))
    assert {tuple(x) for x in both.flips} == {
        (1, a, b) for a in (1, -1) for b in (1, -1)
    }
