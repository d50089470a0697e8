# SPDX-License-Identifier: Apache-2.0
"""Processes of time as chains of states, against kernel matrices and other solvers."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
import scipy.stats
import tinygp
from numpyro import handlers
from numpyro.infer.util import log_density
from tinygp.kernels import quasisep

import numpyro_gpaug as gpaug
from numpyro_gpaug import kernels
from numpyro_gpaug.gaussians import Chain as Structure
from numpyro_gpaug.gaussians import Layout
from numpyro_gpaug.gaussians.rows import Rows
from numpyro_gpaug.gp.chain import Chain
from numpyro_gpaug.gp.kernels._state_space import terms_of
from numpyro_gpaug.infer.nested.fallback import corrected
from numpyro_gpaug.math.linalg import precise
from numpyro_gpaug.model.forms import refuse_large
from numpyro_gpaug.model.latents import GaussianSite, Grouping
from numpyro_gpaug.model.latents import Structure as ModelStructure
from tests.conftest import enable_x64
from tests.models import gram

# Unsorted times, some of them equal; steps from 1e-12 to over 10 lengthscales.
TIMES = np.array(
    [2e-12, 0.3, 0.0, 1e-12, 1e-4, 2e-4, 1e-4, 0.011, 0.01, 3.0, 13.0, 3.0, 40.0, 0.3]
)
# New times: at given ones, between them, before the first and after the last.
NEW = np.array([1e-4, 13.0, -2.0, 1.5e-12, 1.7e-4, 0.5, 0.7, 2.9999, 12.0, 41.0, 90.0])

KERNELS = {
    "Matern": lambda: (
        kernels.Matern12(0.7, 1.5) + kernels.Matern32(1.2) + kernels.Matern52(0.7, 0.5)
    ),
    "Oscillator": lambda: kernels.Oscillator(3.0, 2.0) + kernels.Constant(0.3),
    "products": lambda: (
        kernels.Matern32(2.0) * kernels.Cosine(5.0) + kernels.Cosine(7.0, 0.5)
    ),
    "product of smooth ones": lambda: kernels.Oscillator(3.0, 2.0) * kernels.Matern32(),
    "quasi-periodic": lambda: (
        kernels.Matern12(4.0) * kernels.cosines(kernels.Periodic(1.5, period=2.0), 2)
    ),
}


@precise
def covariances(kernel, t, new):
    """Prior covariances that the chain implies: of function values at its own times,
    and of these and new ones."""
    chain = Chain(kernel, t)
    noise = jnp.eye(chain.width * len(t)).reshape(-1, len(t), chain.width)
    states = jax.vmap(chain.states)(noise)
    own, at = (jax.vmap(f)(states) for f in (chain.own(), chain.at(new)))
    own, at = (
        jnp.concatenate([x.T, chain.waves(times)], -1)
        for x, times in ((own, t), (at, new))
    )
    return own @ own.T, at @ own.T, at @ at.T + chain.residual_covariance(new)


QUICK = (("float32", "Matern"), ("float32", "quasi-periodic"))


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow)
        for case in itertools.product(("float32", "float64"), KERNELS)
    ],
    indirect=["dtype"],
)
def test_a_chain_has_the_covariances_of_its_kernel(dtype, name):
    t, new = np.asarray(TIMES, dtype), np.asarray(NEW, dtype)
    with enable_x64(True):
        both = np.concatenate([t, new]).astype(float)
        expected = np.asarray(jax.jit(lambda x: KERNELS[name]()(x, x))(both))
    found = jax.jit(lambda *times: covariances(KERNELS[name](), *times))(t, new)
    cut = len(t)
    blocks = expected[:cut, :cut], expected[cut:, :cut], expected[cut:, cut:]
    for x, dense in zip(found, blocks, strict=True):
        tolerance = {"float32": 1e-5, "float64": 1e-11}[dtype] * expected[0, 0]
        np.testing.assert_allclose(x, dense, atol=tolerance, rtol=0)


N, GROUPS = 120, 4
rng = np.random.default_rng(0)
# Irregular, unsorted, with repeated times and a gap.
T = np.concatenate([rng.uniform(0, 4, 60), rng.uniform(6, 10, 40), np.arange(20) % 4])
COLUMN, GROUP = rng.normal(size=N), rng.integers(0, GROUPS, N)
LEVEL = np.sin(T) + 0.5 * COLUMN + 0.3 * GROUP - 0.5
REAL, COUNTS = LEVEL + 0.3 * rng.normal(size=N), rng.poisson(np.exp(LEVEL))
T_NEW = np.concatenate([T[:2], rng.uniform(-1, 12, 9)])


def curve(t, y=None):
    scale = numpyro.sample("scale", dist.LogNormal(0, 1).expand([2]))
    noise = numpyro.sample("noise", dist.HalfNormal(1))
    kernel = kernels.Matern32(scale[0], scale[1])
    with numpyro.plate("data", len(t)):
        f = gpaug.GaussianProcess("f", kernel, mean=0.2, markov=True)(t)
        numpyro.sample("y", dist.Normal(f, noise), obs=y)


def evidence_by_tinygp(point, t, y):
    scale, noise = point["scale"], point["noise"]
    kernel = scale[1] * quasisep.Matern32(scale[0])
    gp = tinygp.GaussianProcess(kernel, t, diag=noise**2, mean=0.2)
    return gp.log_probability(y)


@pytest.mark.parametrize(
    "dtype", [pytest.param("float32", marks=pytest.mark.slow), "float64"], indirect=True
)
def test_the_bound_is_the_evidence_that_a_quasiseparable_solver_finds(dtype):
    t, y = (np.asarray(x, dtype) for x in (T, REAL))
    point = {"scale": np.array([0.8, 1.3], dtype), "noise": np.asarray(0.3, dtype)}
    with enable_x64(True):
        order = np.argsort(t)
        exact = jax.tree.map(lambda x: np.asarray(x, float), point)
        given = (jnp.asarray(x[order], float) for x in (t, y))
        both = jax.jit(jax.value_and_grad(evidence_by_tinygp))
        expected, slopes = both(exact, *given)
    collapsed = gpaug.collapse(curve)

    def bound(point):
        density, trace = log_density(collapsed, (t, y), {}, point)
        site = trace["collapsed_bound"]
        return site["fn"].log_factor

    found, gradient = jax.jit(jax.value_and_grad(bound))(point)
    tolerance = {"float32": 2e-5, "float64": 1e-9}[dtype]
    np.testing.assert_allclose(found, expected, rtol=tolerance)
    for name, slope in slopes.items():
        largest = np.abs(slope).max()
        np.testing.assert_allclose(
            gradient[name], slope, atol=10 * tolerance * largest, rtol=0
        )


@pytest.fixture(scope="module")
def of_short_steps():
    """A fit, and its data."""

    def model(t, y=None):
        f = gpaug.GaussianProcess("f", kernels.Matern52(8.0), markov=True)(t)
        with numpyro.plate("data", len(t)):
            numpyro.sample("y", dist.Normal(f, 0.3), obs=y)

    t = np.arange(150, dtype=np.float32) / 50
    y = np.sin(t) + 0.3 * np.random.default_rng(0).normal(size=150).astype("float32")
    svi = gpaug.ConjugateSVI(model, gpaug.AutoLatentGaussian(model))
    return svi, svi.run(jax.random.key(0), 3, t, y, progress_bar=False), (t, y)


def test_densities_of_a_fit_at_very_short_steps(of_short_steps):
    """Guide and model differ by the evidence at every draw."""
    svi, result, data = of_short_steps
    tree = gpaug.diagnostics.to_datatree(
        jax.random.key(1), svi.model, svi.guide, result.params, *data, num_samples=100
    )
    stats = tree["sample_stats"]
    difference = stats["log_p"].values - stats["log_q"].values
    np.testing.assert_allclose(difference, -result.losses[-1], atol=0.2)


def test_draws_between_the_times_of_data_have_the_posterior_moments(of_short_steps):
    svi, result, (t, y) = of_short_steps
    posterior, new = svi.posterior(result), np.float32(T_NEW[1:] / 4)
    draws = posterior.sample(jax.random.key(1), new, site="f", sample_shape=(20000,))
    both = np.append(t, new).astype(float)[:, None]
    whole = gram(kernels.Matern52(8.0), both, both)
    gain = np.linalg.solve(whole[:150, :150] + 0.09 * np.eye(150), whole[:150, 150:]).T
    joint = whole[150:, 150:] - gain @ whole[:150, 150:]
    np.testing.assert_allclose(np.mean(draws, 0), gain @ y, atol=0.04)
    np.testing.assert_allclose(np.cov(draws.T), joint, atol=0.05)


def test_gradients_of_predictions_at_the_times_of_data(of_short_steps):
    """The state contains the derivative of the process."""
    svi, result, (t, _) = of_short_steps
    posterior = svi.posterior(result)

    @jax.jit
    @jax.grad
    def slope(new):
        f = posterior.predict_f(new[None])
        return (f.mean + f.variance)[0]

    between = t[70] + 1e-4 * np.array([-1, 1], np.float32)
    beside = np.mean([slope(x) for x in between])
    np.testing.assert_allclose(slope(jnp.asarray(t[70])), beside, rtol=1e-2)


def sensors(t, u, y=None, z=None):
    """Two sensors, each with its own times, and a common level."""
    level = numpyro.sample("level", dist.Normal(0, 1))
    f = gpaug.GaussianProcess("f", kernels.Matern32(2.0, 1.5), markov=True)(t)
    g = gpaug.GaussianProcess("g", kernels.Matern12(3.0), markov=True)(u)
    with numpyro.plate("of_f", len(t)):
        numpyro.sample("y", dist.Normal(level + f, 0.3), obs=y)
    with numpyro.plate("of_g", len(u)):
        numpyro.sample("z", dist.Normal(level + g, 0.5), obs=z)


def test_the_order_of_processes_in_turn():
    """The second process has fewer states: the missing ones are standard normal."""
    sites = [("f.v", (3, 2)), ("g.v", (2, 1))]
    turns = tuple((name, (0,)) for name, _ in sites)
    steps = tuple(Grouping((turn,), correlated=True) for turn in turns)
    whole = Grouping(turns, correlated=True, in_turn=True)
    structure = (
        ModelStructure((), (), (), {}, {}, {}, joint=True, dtype=np.float32)
        .with_sites(tuple(GaussianSite(k, x, x, local=False) for k, x in sites))
        .in_steps(steps)
        .in_form(Structure(Layout(0, 0, 0), correlated=True), (whole,))
    )
    assert structure.form.layout == Layout(5, 2, 0, 5)
    rng = np.random.default_rng(0)
    numbers = {k: rng.normal(size=x).astype(np.float32) for k, x in sites}
    flat, again = jax.jit(lambda x: (y := structure.joined(x), structure.split(y)))(
        numbers
    )
    flat = np.asarray(flat)
    np.testing.assert_array_equal(flat[6:].reshape(2, 2)[:, :1], numbers["g.v"])
    for name, x in again.items():
        np.testing.assert_array_equal(x, numbers[name])
    links = [rng.normal(size=(1, 3, 2, 5)), rng.normal(size=(1, 2, 1, 3))]
    links[0][:, :, 0, 3] = 0  # whiteners are lower triangles
    whole_links = jax.jit(structure.whole_links)
    found = np.asarray(whole_links(tuple(map(np.float32, links))))
    np.testing.assert_allclose(found[:, :3], links[0], rtol=1e-6)
    np.testing.assert_allclose(found[:, 3:, :1, [0, 2, 4]], links[1], rtol=1e-6)
    np.testing.assert_array_equal(found[0, 3:, 1], [[0, 0, 0, 1, 1]] * 2)


@pytest.mark.slow
def test_processes_at_different_times_are_one_chain(dtype, tmp_path):
    """The steps of one process follow those of the other, which has larger states."""
    t, u = T, 3 + 0.7 * T[:50]
    y, z, new = REAL, np.cos(u), np.asarray(T_NEW, dtype)
    data = tuple(np.asarray(x, dtype) for x in (t, u, y, z))
    guide = gpaug.AutoLatentGaussian(sensors)
    svi = gpaug.ConjugateSVI(sensors, guide)
    result = svi.run(jax.random.key(0), 3, *data, progress_bar=False)
    assert "a chain of 170 steps of 2 (f.v, g.v), 1 others dense" in str(guide)
    svi.posterior(result).save(tmp_path / "fit")
    posterior = gpaug.Posterior.load(tmp_path / "fit", sensors)
    with enable_x64(True):
        given = [np.asarray(x, float) for x in data]
        of_f, of_g = (
            np.asarray(kernel(x, x)) for kernel, x in (
                (kernels.Matern32(2.0, 1.5), np.concatenate([given[0], new])),
                (kernels.Matern12(3.0), np.concatenate([given[1], new])),
            )
        )  # fmt: skip
    cuts, noise = (len(t), len(u)), np.repeat([0.09, 0.25], [len(t), len(u)])
    whole = np.ones((170, 170)) + np.diag(noise)
    whole[: cuts[0], : cuts[0]] += of_f[: cuts[0], : cuts[0]]
    whole[cuts[0] :, cuts[0] :] += of_g[: cuts[1], : cuts[1]]
    seen = np.concatenate(given[2:])
    d = scipy.stats.multivariate_normal(np.zeros(170), whole)
    tolerance = {"float32": 1e-4, "float64": 1e-9}[dtype]
    np.testing.assert_allclose(-result.losses[-1], d.logpdf(seen), rtol=tolerance)
    rows = slice(cuts[0]), slice(cuts[0], None)
    for site, covariance, cut, own in zip("fg", (of_f, of_g), cuts, rows, strict=True):
        cross = np.zeros((170, len(new)))
        cross[own] = covariance[:cut, cut:]
        gain = np.linalg.solve(whole, cross).T
        found = posterior.predict_f(new, new, site=site)
        spread = np.diag(covariance)[cut:] - (gain * cross.T).sum(-1)
        np.testing.assert_allclose(found.mean, gain @ seen, atol=2 * tolerance)
        np.testing.assert_allclose(found.variance, spread, atol=2 * tolerance)


def crossed(t, u, y=None, *, times=None):
    """A process of time and one of something else."""
    f = gpaug.GaussianProcess("f", kernels.Matern12(2.0), markov=True)(t)
    g = gpaug.GaussianProcess("g", kernels.Matern32(3.0), times, markov=True)(u)
    with numpyro.plate("data", len(t)):
        numpyro.sample("y", dist.Normal(f + g, 0.3), obs=y)


def test_two_processes_of_each_datum_at_unrelated_times():
    """One is a chain, the other a dense matrix, which must not be too large."""
    sites = tuple(GaussianSite(k, (3000, 2), (3000, 2), local=False) for k in "fg")
    structure = ModelStructure((), (), (), {}, {}, {}, joint=True, dtype=np.float32)
    chains = tuple(Grouping(((k, (0,)),), correlated=True) for k in "fg")
    with pytest.raises(gpaug.NotConjugateError, match=r"\['f', 'g'\].* inducing="):
        refuse_large(structure.with_sites(sites), lambda: chains)


@pytest.mark.slow
def test_one_of_two_processes_at_times_of_its_own(dtype):
    t, u, y = (np.asarray(x, dtype) for x in (T, COLUMN, REAL))
    with enable_x64(True):
        of_t, of_u = (
            np.asarray(kernel(x, x)) for kernel, x in (
                (kernels.Matern12(2.0), jnp.asarray(t, float)),
                (kernels.Matern32(3.0), jnp.asarray(u, float)),
            )
        )  # fmt: skip
    whole = of_t + of_u + 0.09 * np.eye(N)
    evidence = scipy.stats.multivariate_normal(np.zeros(N), whole).logpdf(y)
    svi = gpaug.ConjugateSVI(crossed, gpaug.AutoLatentGaussian(crossed))

    def bound(times):
        given = {"times": times, "progress_bar": False}
        return -svi.run(jax.random.key(0), 3, t, u, y, **given).losses[-1]

    tolerance = {"float32": 1e-4, "float64": 1e-9}[dtype]
    np.testing.assert_allclose(bound(None), evidence, rtol=tolerance)
    # Given few states the bound is a bit lower.
    assert 0 < evidence - bound(np.linspace(u.min(), u.max(), 40, dtype=dtype)) < 0.2


@pytest.mark.slow
def test_integrated_hyperparameters(dtype, monkeypatch):
    """Steps are far shorter than the lengthscale: float32 does not resolve the noise of
    draws of states.
    """
    rng = np.random.default_rng(0)
    t = np.sort(rng.uniform(0, 100, 150))
    y = rng.poisson(np.exp(1 + np.sin(t / 5)))
    t = jnp.asarray(t, dtype)

    def model(t, y=None, *, inducing=None):
        lengthscale = numpyro.sample("lengthscale", dist.LogNormal(1, 1))
        kernel = kernels.Matern52(lengthscale, 0.5)
        f = gpaug.GaussianProcess(
            "f", kernel, markov=inducing is None, inducing=inducing
        )(t)
        with numpyro.plate("data", len(t)):
            numpyro.sample("y", dist.Poisson(jnp.exp(1 + f)), obs=y)

    def integrated(t, **given):
        nested = gpaug.NestedVI(model, num_points=64, progress_bar=False)
        nested.run(jax.random.key(0), t, y, **given)
        assert nested.certified
        evidence = nested.get_extra_fields()["log_evidence"]
        return evidence, np.asarray(nested.get_samples()["f"].mean(0)), nested

    with enable_x64(True):
        exact = jnp.asarray(t, float)
        expected = integrated(exact, inducing=exact)
    evidence, f, nested = integrated(t)
    np.testing.assert_allclose(evidence, expected[0], atol=0.1)
    np.testing.assert_allclose(f, expected[1], atol=0.1)
    # NUTS, to which runs go that are not certified, finds the same.
    monkeypatch.setattr("numpyro_gpaug.infer.nested.fallback.WARMUP", 100)
    (programs,) = nested._bounds._programs.values()
    key = jax.random.key(1)
    chains = corrected(nested._run, programs, key, 400, progress_bar=False)
    assert ", 0 divergences" in chains.correction
    found = np.asarray(chains.samples(400)["f"]).mean(0)
    np.testing.assert_allclose(found, expected[1], atol=0.1)


def test_noise_behind_means_of_very_short_steps():
    """States are then far larger than their noise, and their differences in float32 are
    nothing but rounding errors."""
    t = np.cumsum(np.tile([1e-5, 0.02], 20))
    y, structure = np.sin(5 * t), Structure(Layout(40, 3, 0, 40), correlated=True)

    def white(t, y):
        states = Chain(kernels.Matern52(1.0, 2.0), t)
        prior = structure.prior(t.dtype, states.links[None])
        (place, own), none = states.own()[:2], jnp.zeros((40, 0), t.dtype)
        rows = Rows(own, place, none, none, none.astype(int))
        data = structure.information(rows, 10 * y, jnp.full(40, 10.0, t.dtype))
        q = jax.tree.map(jnp.add, prior.natural, data).moments()
        return prior.centre(q)[0, 1], prior._noise(q.mean)[0].ravel()

    given = (jnp.asarray(x, jnp.float32) for x in (t, y))
    found, differences = map(np.asarray, jax.jit(white)(*given))
    with enable_x64(True):
        exact = (jnp.asarray(np.asarray(x, np.float32), float) for x in (t, y))
        expected = np.asarray(jax.jit(white)(*exact)[0])
    largest = np.abs(expected).max()
    np.testing.assert_allclose(found, expected, atol=1e-3 * largest)
    assert np.abs(differences - expected).max() > largest


def test_angles_of_waves_have_errors_of_both_signs():
    """An error of one sign adds up in the derivative by the period."""
    t = np.float32(np.random.default_rng(0).uniform(0, 500, 10_000))
    (term,) = terms_of(kernels.Cosine(7.0), jnp.float32)
    cosine, sine = np.asarray(term.waves(jnp.asarray(t)), float).T
    angle = 2 * np.pi * np.float64(t) / 7
    errors = sine * np.cos(angle) - cosine * np.sin(angle)
    assert abs(errors.mean()) < 1e-8 < errors.std()


def test_an_evaluation_takes_transitions_from_the_model(of_short_steps):
    """Programs round them differently, and noise of short steps is far smaller."""
    svi, result, given = of_short_steps
    state, q = result.state, result.state.natural
    natural = {k: q[k]._replace(links=q[k].links * 1.000001) for k in q}
    other = svi.evaluate(state._replace(natural=natural), *given)
    np.testing.assert_allclose(other, svi.evaluate(state, *given), rtol=1e-4)


@pytest.fixture(scope="module")
def beside_a_level():
    """A level beside a process at 1000 times, with known noise."""

    def model(t, noise, y=None, *, scale):
        level = numpyro.sample("level", dist.Normal(0, 100))
        kernel = kernels.Matern52(scale, 7.0)
        f = gpaug.GaussianProcess("f", kernel, markov=True)(t)
        with numpyro.plate("data", len(t)):
            numpyro.sample("y", dist.Normal(level + f, noise), obs=y)

    t, rng = np.arange(1000.0), np.random.default_rng(1)
    noise = np.float32(10 ** np.random.default_rng(0).uniform(-2, 0, 1000))
    y = np.sin(t / 9) + noise * rng.normal(size=1000)

    def covariance(scale):
        d = np.sqrt(5) * abs(t[:, None] - t) / scale
        smooth = 7 * (1 + d + d**2 / 3) * np.exp(-d)
        return smooth + np.diag(np.float64(noise) ** 2)

    svi = gpaug.ConjugateSVI(model, gpaug.AutoLatentGaussian(model))
    return svi, (t, noise), y, covariance


def test_steps_continue_from_the_means_of_states(beside_a_level):
    """Not from states that are run along the chain again, which drift."""
    svi, given, y, covariance = beside_a_level
    y, whole, scale = np.float32(300 + y), covariance(100) + 1e4, np.float32(100)
    state = svi.init(jax.random.key(0), *given, y, scale=scale)
    for _ in range(8):
        state, loss = svi.update(state, *given, y, scale=scale)
    log_det = np.linalg.slogdet(2 * np.pi * whole)[1]
    evidence = -0.5 * (y @ np.linalg.solve(whole, y) + log_det)
    assert abs(evidence + loss) < 0.5


def test_a_level_beside_a_process(beside_a_level):
    """Its precision and its potential are small differences of sums of large terms."""
    svi, given, y, covariance = beside_a_level
    y, scale = np.float32(y), np.float32(20)
    how = {"scale": scale, "progress_bar": False}
    fit = svi.run(jax.random.key(0), 2, *given, y, **how)
    weights = np.linalg.solve(covariance(20), np.ones(1000))
    precision = weights.sum() + 1e-4
    found = svi.posterior(fit)["level"]
    np.testing.assert_allclose(found.variance * precision, 1, atol=0.15)
    off = (found.mean - weights @ y / precision) * precision**0.5
    assert abs(off) < 0.01


def test_plain_numpyro_has_the_density_of_independent_numbers():
    t, y = (jnp.asarray(x[:10], jnp.float32) for x in (T, REAL))

    @jax.jit
    def run(key):
        trace = handlers.trace(handlers.seed(curve, key)).get_trace(t)
        drawn = {k: trace[k]["value"] for k in ("scale", "noise", "f.v")}

        def density(drawn):
            return log_density(curve, (t, y), {}, drawn)[0]

        expected = sum(trace[k]["fn"].log_prob(x).sum() for k, x in drawn.items())
        expected += dist.Normal(trace["f"]["value"], drawn["noise"]).log_prob(y).sum()
        return expected, *jax.value_and_grad(density)(drawn)

    expected, found, slopes = run(jax.random.key(0))
    np.testing.assert_allclose(found, expected, rtol=1e-4)
    assert slopes["f.v"].shape == (10, 2)
    assert all(np.isfinite(x).all() and x.any() for x in slopes.values())


@pytest.mark.parametrize(
    ("kernel", "given", "message"),
    [
        (kernels.SquaredExponential(), {}, "SquaredExponential has no state-space"),
        (kernels.Periodic(), {}, "kernels.cosines"),
        (lambda x, z: x @ z.T, {}, "no state-space form"),
        (kernels.Matern12(jnp.ones((2, 1))), {}, "has one latent and one input"),
        (kernels.Matern12(-1.0), {}, "must be positive"),
        (kernels.Matern12(), {"X": T.reshape(-1, 2)}, "needs one input, a time"),
        (kernels.Matern12(), {"num_latents": 2}, "has one latent"),
        (kernels.Matern12(), {"inducing": np.ones((3, 2))}, "needs one input, a time"),
    ],
)
def test_refusals(kernel, given, message):
    X = given.pop("X", T)
    with handlers.seed(rng_seed=0), pytest.raises(ValueError, match=message):
        gpaug.GaussianProcess("f", kernel, markov=True, **given)(jnp.asarray(X))


def test_a_part_of_a_plate_has_no_chain_of_its_own():
    def model(t, inducing=None):
        gp = gpaug.GaussianProcess("f", kernels.Matern12(), inducing, markov=True)
        with numpyro.plate("data", len(t), subsample_size=5) as rows:
            return gp(t[rows])

    with handlers.seed(rng_seed=0):
        with pytest.raises(ValueError, match="Pass all times as inducing="):
            model(jnp.asarray(T))
        found = jax.eval_shape(lambda t: model(t, t), T)
    assert found.shape == (5,)


def test_a_mask_of_the_data_around_the_call_leaves_the_states_alone():
    def model(t):
        gp = gpaug.GaussianProcess("f", kernels.Matern12(), markov=True)
        weights = handlers.mask(mask=t > 0), handlers.scale(scale=1.0 + t**2)
        with numpyro.plate("data", len(t)), weights[0], weights[1]:
            return gp(t)

    with handlers.seed(rng_seed=0), handlers.trace() as trace, handlers.scale(scale=3):
        jax.eval_shape(model, T)
    states = trace["f.v"]
    assert jnp.shape(states["value"]) == (len(T), 1)
    assert (states["fn"].batch_shape, states["scale"]) == ((), 3)


def test_states_have_the_precision_of_other_latents():
    """In float32, links of states would not be exact enough for latents in float64."""

    def states(t):
        with handlers.trace() as trace, handlers.seed(rng_seed=0):
            curve(t)
        return trace["f.v"]["value"]

    with enable_x64(True):
        assert jax.eval_shape(states, np.float32(T)).dtype == np.float64


def test_guides_of_inducing_values_are_refused():
    guide = gpaug.AutoSparseGP(curve)
    with pytest.raises(gpaug.NotConjugateError, match="needs AutoLatentGaussian"):
        gpaug.ConjugateSVI(curve, guide).run(jax.random.key(0), 1, T, REAL)


def test_a_state_is_not_updated_with_another_number_of_times(of_short_steps):
    svi, result, _ = of_short_steps
    for step in (svi.update, svi.evaluate):
        with pytest.raises(ValueError, match="another graph, mesh or number of"):
            step(result.state, T[:6], REAL[:6])
