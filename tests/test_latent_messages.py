# SPDX-License-Identifier: Apache-2.0
"""Latent Gaussian models: messages about models and data that do not fit, and the rows
that tables omit.
"""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import numpyro_gpaug as gpaug
from numpyro_gpaug.model.arguments import Arguments
from tests.conftest import slow
from tests.problems import unfitted

N = 12
RNG = np.random.default_rng(0)
T = np.linspace(-1, 1, N, dtype="float32")
REAL = RNG.normal(size=N).astype("float32")
GROUP = RNG.integers(0, 4, N)
KEY = jax.random.key(0)


def noisy(t, group, y=None):
    """Groups have noise of their own."""
    b = numpyro.sample("b", dist.Normal(0, 1))
    with numpyro.plate("groups", 4):
        sigma = numpyro.sample("sigma", dist.HalfNormal(1.0))
    with numpyro.plate("data", len(t)):
        numpyro.sample("y", dist.Normal(b * t, sigma[group]), obs=y)


@pytest.mark.parametrize(
    ("shift", "message"),
    [(1, "'sigma' has 4 members.*1 to 4"), (-1, "'sigma' is indexed .* from -1 on")],
)
def test_codes_that_index_hyperparameters_are_checked(shift, message):
    guide = gpaug.AutoLatentGaussian(noisy)
    guide.setup(T, GROUP, REAL)
    with pytest.raises(ValueError, match=message):
        gpaug.AutoLatentGaussian(noisy).setup(T, GROUP + shift, REAL)
    guide.check_data(Arguments.split((T, GROUP[::-1], REAL), {}))
    with pytest.raises(ValueError, match=message):
        guide.check_data(Arguments.split((T, GROUP + shift, REAL), {}))


def test_independent_gaussians_have_the_same_checks():
    def model(t, place, group, y=None, z=None, *, inducing):
        gp = gpaug.GaussianProcess("f", gpaug.kernels.Matern32(), inducing)
        f = gp(t[:, None])
        w = numpyro.sample("w", dist.Normal(jnp.zeros(4), 1.0).to_event(1))
        with numpyro.plate("data", len(group)):
            numpyro.sample("y", dist.Normal(f[place], 1.0), obs=y)
            numpyro.sample("z", dist.Normal(w[group], 1.0), obs=z)

    svi = gpaug.ConjugateSVI(model, gpaug.AutoSparseGP(model))
    run = partial(svi.run, KEY, 1, inducing=T[:3, None], progress_bar=False)
    place = np.arange(N)
    with pytest.raises(ValueError, match="'f' has 12 members.*1 to 12"):
        run(T, place + 1, GROUP, REAL, REAL)
    posterior = unfitted(svi, T, place, GROUP, REAL, REAL, inducing=T[:3, None])
    with pytest.raises(ValueError, match="'w' has 4 members.*1 to 4"):
        run(T, place, GROUP + 1, REAL, REAL)
    with pytest.raises(ValueError, match="'w' has 4 members.*new group"):
        posterior.predict_y(T, place, GROUP + 1, site="z")
    with pytest.raises(ValueError, match="'z' has no observed value"):
        run(T, place, GROUP, REAL)


@pytest.mark.parametrize("kind", [gpaug.AutoLatentGaussian, gpaug.AutoSparseGP])
def test_a_site_is_needed_without_observations(kind):
    def model(X, y=None):
        w = numpyro.sample("w", dist.Normal(0, 1).expand([2]).to_event(1))
        if y is not None:
            numpyro.sample("y", dist.Normal(X @ w, 1.0), obs=y)

    X = np.column_stack([GROUP, T])
    posterior = unfitted(gpaug.ConjugateSVI(model, kind(model)), X, REAL)
    with pytest.raises(ValueError, match="the model has no site 'y' without"):
        posterior.predict_y(X)


def test_codes_in_a_column_are_checked():
    def model(X, y=None):
        w = numpyro.sample("w", dist.Normal(jnp.zeros(4), 1.0).to_event(1))
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", dist.Normal(w[X[:, 0].astype(int)], 1.0), obs=y)

    X = np.column_stack([GROUP, T])
    svi = gpaug.ConjugateSVI(model, gpaug.AutoSparseGP(model))
    posterior = unfitted(svi, X, REAL)
    with pytest.raises(ValueError, match="'w' has 4 members.*new group"):
        posterior.predict_y(X + 1)


def no_latent(t, y=None):
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    with numpyro.plate("data", len(t)):
        numpyro.sample("y", dist.Normal(0.0, scale), obs=y)


def constant(t, y=None):
    b = numpyro.sample("b", dist.Normal(0, 1))
    a = numpyro.sample("a", dist.Delta(1.5))
    with numpyro.plate("data", len(t)):
        numpyro.sample("y", dist.Poisson(jnp.exp(a * b * t)), obs=y)


def flat(t, y=None):
    prior = dist.Normal(0, 1).expand([2]).mask(jnp.array([False, True])).to_event(1)
    b = numpyro.sample("b", prior)
    with numpyro.plate("data", len(t)):
        numpyro.sample("y", dist.Poisson(jnp.exp(b[0] + b[1] * t)), obs=y)


def held_apart(t, y=None):
    with numpyro.handlers.scale(scale=2.0):
        b = numpyro.sample("b", dist.Normal(0, 1))
    with numpyro.plate("data", len(t)):
        numpyro.sample("y", dist.Poisson(jnp.exp(b * t)), obs=y)


def log_normal(t, y=None):
    level = numpyro.sample("level", dist.Normal(0, 1))
    with numpyro.plate("data", len(t)):
        rate = numpyro.sample("rate", dist.LogNormal(level, 1))
        numpyro.sample("y", dist.Poisson(rate), obs=y)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (log_normal, "the prior of 'rate' .* function of a Normal .*TransformReparam"),
        (constant, "'a' is a constant, dist.Delta. Use numpyro.deterministic"),
        (flat, "no Gaussian latent .*'b' is not: its prior is masked"),
        (no_latent, "no Gaussian latent for AutoLatentGaussian: .*dist.Normal"),
        (held_apart, "no Gaussian latent .*'b' is not: its density is scaled"),
    ],
)
def test_models_without_gaussian_latents_are_told_what_these_are(model, message):
    svi = gpaug.ConjugateSVI(model, gpaug.AutoLatentGaussian(model))
    with pytest.raises(ValueError, match=message):
        svi.init(KEY, T, np.ones(N, int))


def of_a_process(X, y=None, *, inducing):
    mean = numpyro.sample("mean", dist.Normal(0, 1))
    gp = gpaug.GaussianProcess("f", gpaug.kernels.Matern52(), inducing)
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", dist.Normal(mean + gp(X), 0.5), obs=y)


@pytest.fixture(scope="module")
def svi():
    guide = gpaug.AutoLatentGaussian(of_a_process)
    return gpaug.ConjugateSVI(of_a_process, guide, None)


@pytest.fixture(scope="module")
def posterior(svi):
    return unfitted(svi, T[:, None], REAL, inducing=T[::4, None])


def test_tables_leave_out_whitened_inducing_values(posterior, tmp_path):
    assert [*posterior.summary().index] == ["mean"]
    with pytest.raises(KeyError, match="'f.v' is not among .*'mean'"):
        posterior["f.v"]
    posterior.save(tmp_path / "fit.npz")
    loaded = gpaug.Posterior.load(tmp_path / "fit.npz", of_a_process)
    assert loaded.summary().equals(posterior.summary())
    assert loaded.processes == posterior.processes == ("f",)


@pytest.mark.parametrize(
    "function",
    [
        gpaug.diagnostics.psis_khat,
        gpaug.diagnostics.psis_estimates,
        gpaug.diagnostics.loo,
        lambda p: gpaug.diagnostics.compare({"a": p, "b": p}),
    ],
)
def test_a_posterior_is_no_tree(posterior, function):
    with pytest.raises(TypeError, match="got a Posterior. .*to_datatree"):
        function(posterior)


def counted(group, y=None):
    with numpyro.plate("groups", 4):
        a = numpyro.sample("a", dist.Normal(0, 1))
    with numpyro.plate("data", len(group)):
        numpyro.sample("y", dist.Poisson(jnp.exp(a[group])), obs=y)


def test_data_of_a_later_run_are_checked_too():
    svi = gpaug.ConjugateSVI(counted, gpaug.AutoLatentGaussian(counted))
    group, y = np.array([0, 1, 2, 3, 3]), np.array([1, 2, 0, 5, 4])
    run = partial(svi.run, KEY, 2, progress_bar=False)
    run(group, y)
    for code, what in ((4, "codes 0 to 3"), (-1, "negative ones count from the end")):
        with pytest.raises(ValueError, match=what):
            run(np.where(group == 2, code, group), y)
    with pytest.raises(ValueError, match="'y' has no observed value"):
        run(group)


def test_several_predictors_need_a_name_and_kinks_are_warned_of(tmp_path):
    def model(t, y=None):
        a = numpyro.sample("a", dist.Normal(0, 1).expand([2]).to_event(1))
        with numpyro.plate("data", len(t)):
            scale = jnp.exp(a[1] - 1)
            numpyro.sample("y", dist.AsymmetricLaplace(a[0] * t, scale, 1.0), obs=y)

    svi = gpaug.ConjugateSVI(model, gpaug.AutoLatentGaussian(model))
    with pytest.warns(UserWarning, match="'y' are off by about .* has a kink"):
        posterior = unfitted(svi, T, REAL)
    assert 1e-3 < posterior.quadrature_errors["y"] < 0.1
    posterior.save(tmp_path / "fit.npz")
    loaded = gpaug.Posterior.load(tmp_path / "fit.npz", model)
    assert loaded.quadrature_errors == posterior.quadrature_errors
    assert "by quadrature, off by " in repr(posterior)
    with pytest.raises(ValueError, match="numpyro.deterministic"):
        posterior.predict_f(T)


def test_a_density_that_is_not_finite_is_named():
    """A censored density as it is often written: where all have died, log(0)."""

    def model(time, event):
        b = numpyro.sample("b", dist.Normal(0, 2))
        d = dist.Exponential(jnp.exp(b) * jnp.ones(len(time)))
        survival = jnp.log1p(-d.cdf(time))
        numpyro.factor("lik", jnp.where(event == 1, d.log_prob(time), survival))

    svi = gpaug.ConjugateSVI(model, gpaug.AutoLatentGaussian(model))
    time, event = jnp.array([1.0, 90.0, 1e6]), jnp.array([1, 0, 0])
    said = "log-density of 'lik' is -inf in . of 3 entries.* as in log1p"
    with pytest.raises(gpaug.CholeskyError, match=said):
        svi.run(jax.random.key(0), 5, time, event, progress_bar=False)


@pytest.mark.parametrize(
    ("f", "said"),
    [
        (
            lambda k, X: gpaug.GaussianProcess("f", k, 0 * X[:3], jitter=0.0)(X),
            r'GaussianProcess\("f"\): the Cholesky .*2 inducing inputs are dup',
        ),
        (
            lambda k, X: numpyro.sample(
                "f", dist.MultivariateNormal(0 * X[:, 0], k(X, X) - jnp.eye(len(X)))
            ),
            f"prior of 'f', Multi.*scale_tril of shape .{N}, {N}.*indefinite",
        ),
    ],
    ids=["inducing values", "values"],
)
def test_kernel_matrices_without_a_factor_are_named(f, said):
    def model(X, y=None):
        values = f(gpaug.kernels.SquaredExponential(), X)
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", dist.Normal(values, 0.5), obs=y)

    svi = gpaug.ConjugateSVI(model, gpaug.AutoLatentGaussian(model), None)
    with pytest.raises(gpaug.CholeskyError, match=said):
        svi.run(KEY, 1, T[:, None], REAL, progress_bar=False)


def test_graphs_that_are_none_and_counts_without_exposure_are_named():
    def model(exposure, graph, y=None):
        d = dist.CAR(jnp.zeros(len(exposure)), 0.5, 1.0, graph)
        area = numpyro.sample("area", d)
        with numpyro.plate("data", len(exposure)):
            numpyro.sample("y", dist.Poisson(exposure * jnp.exp(area)), obs=y)

    svi = gpaug.ConjugateSVI(model, gpaug.AutoLatentGaussian(model), None)

    def fit(exposure, graph):
        y = np.array([2, 1, 0, 3])
        return svi.run(KEY, 10, exposure, graph, y, progress_bar=False)

    ring = np.roll(np.eye(4, dtype=int), 1, 0) + np.roll(np.eye(4, dtype=int), -1, 0)
    one_way, island = ring.copy(), ring.copy()
    one_way[0, 1] = 0
    island[2] = island[:, 2] = 0
    with pytest.raises(ValueError, match=r"'area'.* not symmetric, as at .0, 1."):
        fit(np.ones(4), one_way)
    with pytest.raises(ValueError, match=r"'area'.*areas .2. have no neighbours"):
        fit(np.ones(4), island)
    fit(np.array([1.0, 1.0, 0.0, 1.0]), ring)
    with pytest.raises(gpaug.CholeskyError, match="'y' is -inf in 1 of 4.*exposure"):
        fit(np.array([0.0, 1.0, 1.0, 1.0]), ring)
    arguments = np.array([0.0, 1.0, 1.0, 1.0]), ring, np.array([2, 1, 0, 3])
    with pytest.raises(FloatingPointError, match="exposure"):
        gpaug.EllipticalSlice(model).init(KEY, 0, None, arguments, {})


def test_likelihoods_that_hold_arrays_outside_of_their_leaves_are_refused_twice():
    """NumPyro's multinomial has its totals there, which JAX cannot compare."""

    def model(t, total, y=None):
        b = numpyro.sample("b", dist.Normal(0, 1).expand([3]).to_event(1))
        with numpyro.plate("data", N):
            shares = jax.nn.softmax(b * t[:, None])
            likelihood = dist.Multinomial(total, shares, total_count_max=5)
            numpyro.sample("y", likelihood, obs=y)

    total, counts = np.full(N, 5), np.tile([2, 2, 1], (N, 1))
    for _ in range(2):
        with pytest.raises(gpaug.NotConjugateError, match=r"Multinomial.total, logits"):
            gpaug.AutoLatentGaussian(model).setup(T, total, counts)


def test_processes_mixed_by_a_matrix_are_told_how_to_write_it():
    def model(X, y=None, *, inducing, written):
        kernel = gpaug.kernels.Matern52()
        f, g = (gpaug.GaussianProcess(k, kernel, inducing)(X) for k in "fg")
        A = numpyro.sample("A", dist.Normal(0, 1).expand([3, 2]).to_event(2))
        with numpyro.plate("data", len(X), dim=-2):
            numpyro.sample("y", dist.Normal(written(f, g, A), 0.5), obs=y)

    given = {"inducing": T[:, None]}
    y = np.tile(REAL[:, None], 3)
    gpaug.AutoLatentGaussian(model).setup(
        T[:, None], y, written=lambda f, g, A: jnp.stack([f, g], -1) @ A.T, **given
    )

    def several(X, y=None, *, inducing):
        kernel = gpaug.kernels.Matern52()
        f = gpaug.GaussianProcess("f", kernel, inducing, num_latents=2)(X)
        with numpyro.plate("data", len(X), dim=-2):
            numpyro.sample("y", dist.Normal(f @ np.ones((2, 3)), 0.5), obs=y)

    svi = gpaug.ConjugateSVI(several, gpaug.AutoSparseGP(several))
    with pytest.raises(gpaug.NotConjugateError, match=r"loadings=W\.T"):
        svi.run(KEY, 2, T[:, None], y, progress_bar=False, **given)
    guide = gpaug.AutoLatentGaussian(model)
    guide.setup(
        T[:, None], y, **given,
        written=lambda f, g, A: f[:, None] * A[:, 0] + g[:, None] * A[:, 1],
    )  # fmt: skip


def test_a_class_is_no_guide():
    with pytest.raises(TypeError, match=r"Pass a guide, gpaug.AutoLatentGaussian\(mod"):
        gpaug.ConjugateSVI(noisy, gpaug.AutoLatentGaussian)


def random_effects(x, g, y=None, *, groups=4):
    t = numpyro.sample("t", dist.HalfNormal(1))
    with numpyro.plate("groups", groups):
        u = numpyro.sample("u", dist.Normal(0, t))
    with numpyro.plate("data", len(x)):
        numpyro.sample("y", dist.Poisson(jnp.exp(x + u[g])), obs=y)


X, CODES, COUNTS = np.zeros(6), np.zeros(6, int), np.ones(6, int)


@pytest.mark.parametrize(
    ("args", "kwargs", "message", "note"),
    [
        ((5, X, CODES), {"Y": COUNTS}, "for 'Y', did you mean 'y'", ""),
        ((5, X[:, None], CODES, COUNTS), {}, "index or squeeze the column", ""),
        ((X, CODES, COUNTS), {}, r"shape \(6,\). Is num_steps missing", ""),
        ((5, X, CODES[:4], COUNTS), {}, "incompatible", r"g: int.* are \[4, 6\]"),
        ((5, X, 1.0 * CODES, COUNTS), {}, "Indexer", r"pass codes\.astype\(int\)"),
        (
            (5, X, CODES == 1, COUNTS),
            {},
            "boolean",
            r"two groups, .* codes\.astype\(int",
        ),
    ],
)
def test_slips_of_the_pen_are_named(args, kwargs, message, note):
    svi = gpaug.ConjugateSVI(random_effects, gpaug.AutoLatentGaussian(random_effects))
    errors = TypeError, ValueError, IndexError
    with pytest.raises(errors, match=message) as raised:
        svi.run(KEY, *args, progress_bar=False, **kwargs)
    assert re.search(note, "".join(getattr(raised.value, "__notes__", [])))


@pytest.mark.parametrize("kind", [gpaug.AutoLatentGaussian, gpaug.AutoSparseGP])
def test_columns_are_those_of_the_fit(kind):
    def model(X, y=None):
        w = numpyro.sample("w", dist.Normal(0, 1).expand([2]).to_event(1))
        eta = X @ w if X.shape[1] == 3 else (X * w).sum(-1)
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", dist.Normal(eta, 1.0), obs=y)

    svi = gpaug.ConjugateSVI(model, kind(model))
    posterior = unfitted(svi, np.stack([T, T**2], 1), REAL)
    for columns in (1, 3):
        with pytest.raises(ValueError, match=f"X has {columns} columns, and had 2"):
            posterior.predict_y(np.ones((5, columns)))


@pytest.mark.parametrize("route", ["svi", slow("nested")])
def test_choices_that_are_none_need_finite_logits(route):
    available = T[:, None] < np.array([2.0, 0.5, 2.0])

    def model(available, y=None):
        b = numpyro.sample("b", dist.Normal(0, 1).expand([3]).to_event(1))
        with numpyro.plate("data", len(available)):
            logits = jnp.where(available, b, -jnp.inf)
            numpyro.sample("y", dist.Categorical(logits=logits), obs=y)

    def run(*args):
        if route == "nested":
            return gpaug.NestedVI(model, progress_bar=False).run(KEY, *args)
        svi = gpaug.ConjugateSVI(model, gpaug.AutoLatentGaussian(model))
        return svi.run(KEY, 3, *args, progress_bar=False)

    with pytest.raises(gpaug.CholeskyError, match="logits of 'y' are -inf in 3 of 36"):
        run(available, np.zeros(N, int))


def test_distributions_of_ones_own_are_told_what_they_lack():
    class Own(dist.Distribution):
        def __init__(self, rate):
            self.rate = rate
            super().__init__(jnp.shape(rate))

        def log_prob(self, value):
            return dist.Poisson(self.rate).log_prob(value)

    def model(x, y=None):
        a = numpyro.sample("a", dist.Normal(0, 1))
        with numpyro.plate("data", len(x)):
            numpyro.sample("y", Own(jnp.exp(a + x)), obs=y)

    svi = gpaug.ConjugateSVI(model, gpaug.AutoLatentGaussian(model))
    x, y = jnp.zeros(3), jnp.ones(3, int)
    with pytest.raises(TypeError, match=r"Own has no support. Set Own\.support"):
        svi.run(KEY, 3, x, y, progress_bar=False)
    Own.support = dist.constraints.nonnegative_integer
    with pytest.raises(TypeError, match=r"Set Own\.arg_constraints = \{'rate': "):
        svi.run(KEY, 3, x, y, progress_bar=False)
    Own.arg_constraints = {"rate": dist.constraints.positive}
    posterior = unfitted(svi, x, y)
    with pytest.raises(NotImplementedError, match="define mean, or sample"):
        _ = posterior.predict_y(x).mean


def test_traced_data_and_missing_derivatives_are_named():
    def series(t, y=None):
        f = gpaug.GaussianProcess("f", gpaug.kernels.Matern12(1.0), markov=True)(t)
        with numpyro.plate("data", len(t)):
            numpyro.sample("y", dist.Normal(f, 0.1), obs=y)

    times = jnp.arange(6000.0)
    with pytest.raises(gpaug.NotConjugateError, match="values .* which are traced"):
        jax.eval_shape(gpaug.collapse(series), times, times)

    def truncated(t, y=None):
        b = numpyro.sample("b", dist.Normal(0, 1))
        df = numpyro.param("df", 3.0, constraint=dist.constraints.positive)
        with numpyro.plate("data", len(t)):
            student = dist.StudentT(df, b * t)
            numpyro.sample("y", dist.LeftTruncatedDistribution(student, 0.0), obs=y)

    svi = gpaug.ConjugateSVI(truncated, gpaug.AutoLatentGaussian(truncated))
    with pytest.raises(gpaug.NotConjugateError, match="cannot differentiate .* 'y'"):
        svi.run(KEY, 2, T, np.abs(REAL), progress_bar=False)
