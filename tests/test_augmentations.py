# SPDX-License-Identifier: Apache-2.0
"""Augmented likelihoods: the contract, golden problems, exact expectations."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import numpyro_gpaug as gpaug
from numpyro_gpaug.likelihoods import (
    heteroscedastic,
    lookup_augmentation,
    register_augmentation,
)
from numpyro_gpaug.likelihoods._logistic import PolyaGammaOrZero
from numpyro_gpaug.testing import check_augmentation
from tests.conftest import slow

FOLDER = Path(__file__).parent / "golden"
TABLE = json.loads((FOLDER / "expected_loglik.json").read_text())["table"]
GOLDEN = json.loads((FOLDER / "problem_augmented_likelihoods.json").read_text())
SVM = json.loads((FOLDER / "problem_bayesian_svm.json").read_text())

COUNTS = [0.0, 1.0, 0.0, 7.0, 9.0]
VALUES = [0.3, -1.2, 2.5, 0.1, 1.0]


def likelihood(name, zeros):
    """A likelihood with varied parameters, and its observations, five of each."""
    a = lambda *x: jnp.asarray(x, zeros.dtype)  # noqa: E731
    counts, values = a(*COUNTS), a(*VALUES)
    return {
        "bernoulli": lambda: (
            dist.Bernoulli(logits=zeros), jnp.array([0, 1, 1, 0, 1])
        ),
        "normal": lambda: (dist.Normal(zeros, a(0.5, 1, 2, 0.7, 1)), values),
        "binomial": lambda: (
            dist.Binomial(jnp.array([0, 1, 3, 7, 20]), logits=zeros), counts,
        ),
        "negative_binomial": lambda: (
            dist.NegativeBinomialLogits(a(0.3, 1, 2.5, 4, 20), zeros), counts,
        ),
        "svm": lambda: (gpaug.BayesianSVM(zeros), jnp.array([0, 1, 1, 0, 1])),
        "student_t": lambda: (
            dist.StudentT(a(1, 2, 4, 0.5, 30), zeros, a(0.6, 1, 2, 1, 1)), values,
        ),
        "laplace": lambda: (dist.Laplace(zeros, a(0.7, 1, 0.2, 2, 3)), values),
        "poisson": lambda: (
            gpaug.LogisticPoisson(zeros, a(0.5, 1, 4, 2, 10)), counts,
        ),
        "heteroscedastic": lambda: (
            gpaug.HeteroscedasticNormal(zeros, zeros, a(0.5, 1, 3, 2, 10)), values,
        ),
    }[name]()  # fmt: skip


NAMES = (
    "bernoulli", "normal", "binomial", "negative_binomial", "svm", "student_t",
    "laplace", "poisson", "heteroscedastic",
)  # fmt: skip


def moments(names, m, v):
    return dict.fromkeys(names, m), dict.fromkeys(names, v)


def latents_of(d):
    return lookup_augmentation(type(d)).latents


def at(d, f):
    given = {k: getattr(d, k) for k in d.arg_constraints if k in vars(d)}
    return type(d)(**{**given, **f})


# The contract.


def marked(names, quick):
    return [n if n in quick else slow(n) for n in names]


# Others compile the Polya-Gamma density of any shape and the gamma sampler.
QUICK_CONFORMANCE = ("svm", "heteroscedastic")


@pytest.mark.parametrize("name", marked(NAMES, QUICK_CONFORMANCE))
def test_conformance(x64, name) -> None:
    check_augmentation(*likelihood(name, jnp.zeros(5)))


@pytest.mark.parametrize("name", ["binomial", "negative_binomial"])
def test_potentials_of_counts(name) -> None:
    """Half of what is for sigmoid(f) less what is against it."""
    d, y = likelihood(name, jnp.zeros(5))
    omega = np.linspace(0.1, 2, 5).astype("float32")
    augmentation = lookup_augmentation(type(d))
    ((potential, precision),) = augmentation.natural(
        d, y, {"omega": omega}, {}
    ).values()
    y = np.asarray(y)
    trials, failures = np.array([0, 1, 3, 7, 20]), np.array([0.3, 1, 2.5, 4, 20])
    against = {"binomial": trials - y, "negative_binomial": failures}[name]
    np.testing.assert_allclose(potential, 0.5 * (y - against), rtol=1e-6)
    np.testing.assert_array_equal(precision, omega)


@pytest.mark.parametrize("name", marked(NAMES, {}))
def test_conformance_in_single_precision(name) -> None:
    check_augmentation(*likelihood(name, jnp.zeros(5, "float32")))


@pytest.mark.parametrize("name", NAMES)
def test_dtypes_are_preserved(dtype, name) -> None:
    d, y = likelihood(name, jnp.zeros(5, dtype))
    augmentation, f = lookup_augmentation(type(d)), jnp.linspace(-2, 2, 5, dtype=dtype)
    means, variances = moments(latents_of(d), f, jnp.ones(5, dtype))

    def everything(means, variances):
        aux = {}
        for key, q in augmentation.conditional(d, y, means).items():
            aux[key] = (q if isinstance(q, dist.Distribution) else q(aux)).mean
        return (
            augmentation.bound(d, y, means, variances),
            gpaug.expected_log_prob(d, y, means, variances),
            augmentation.natural(d, y, aux, means),
        )

    for leaf in jax.tree.leaves(jax.eval_shape(everything, means, variances)):
        assert leaf.dtype == dtype
        assert leaf.shape == (5,)


def test_order_of_gibbs_draws() -> None:
    d, _ = likelihood("heteroscedastic", jnp.zeros(5))
    blocks = lookup_augmentation(type(d)).gibbs_blocks(d)
    assert blocks == (("loc",), ("aux",), ("precision_logits",))


class AllLatentsAfterAuxiliaries(heteroscedastic.HeteroscedasticNormal):
    def gibbs_blocks(self, d):
        return (("aux",), self.latents)


def test_latents_drawn_together_that_depend_on_each_other_are_named(x64) -> None:
    d, y = likelihood("heteroscedastic", jnp.zeros(5))
    planted = type("Planted", (type(d),), {})
    register_augmentation(planted, AllLatentsAfterAuxiliaries())
    given = {k: getattr(d, k) for k in d.arg_constraints}
    with pytest.raises(AssertionError, match="depends on f"):
        check_augmentation(planted(**given), y)


def test_a_datum_without_trials_has_no_auxiliary(x64) -> None:
    @jax.jit
    def densities(b, omega):
        known = gpaug.PolyaGamma(jnp.full(2, 2.0), jnp.ones(2))
        d = PolyaGammaOrZero(b, jnp.ones(2))
        return d.log_prob(omega), known.log_prob(jnp.full(2, 0.3))

    omega = np.array([[0.0, 0.3], [0.3, 0.3]])
    density, expected = (np.asarray(x) for x in densities(np.array([0.0, 2.0]), omega))
    assert density[0, 0] == 0
    assert density[1, 0] == -np.inf
    np.testing.assert_allclose(density[:, 1], expected, rtol=1e-12)


@pytest.mark.slow
def test_draws_without_trials_are_zero() -> None:
    d = PolyaGammaOrZero(jnp.array([0.0, 2.0]), jnp.array([1.0, 1.0]))
    draw = d.sample(jax.random.key(0))
    assert draw[0] == 0 < draw[1]


# Golden values.

ROWS = {
    "negative_binomial": (
        "logits", lambda t, z: dist.NegativeBinomialLogits(t["r"], z),
    ),
    "student_t": ("loc", lambda t, z: dist.StudentT(t["nu"], z, t["sigma"])),
    "laplace": ("loc", lambda t, z: dist.Laplace(z, t["beta"])),
    "poisson_scaled_logistic": (
        "logits", lambda t, z: gpaug.LogisticPoisson(z, t["lam"]),
    ),
    "bernoulli_logistic": ("logits", lambda t, z: dist.Binomial(1, logits=z)),
    "hinge_svm": ("f", lambda t, z: gpaug.BayesianSVM(z)),
}  # fmt: skip
TWO = "hetero_scaled_logistic_precision"


def label(name, y):
    return (y + 1) / 2 if name in ("hinge_svm", "bernoulli_logistic") else y


@pytest.mark.parametrize("name", [*ROWS, TWO])
def test_golden_expectations(x64, name) -> None:
    rows = [row for row in TABLE if row["lik"] == name]
    t = {k: np.asarray([row[k] for row in rows], float) for k in rows[0] if k != "lik"}
    if name == TWO:
        zeros = np.zeros(len(rows))
        d = gpaug.HeteroscedasticNormal(zeros, zeros, t["lam"])
        means = {"loc": t["mf"], "precision_logits": t["mg"]}
        variances = {"loc": t["vf"], "precision_logits": t["vg"]}
    else:
        latent, make = ROWS[name]
        d = make(t, np.zeros(len(rows)))
        means, variances = {latent: t["m"]}, {latent: t["v"]}
    y, augmentation = label(name, t["y"]), lookup_augmentation(type(d))

    @jax.jit
    def exact_and_bound(means, variances):
        exact = gpaug.expected_log_prob(d, y, means, variances)
        return exact, augmentation.bound(d, y, means, variances)

    exact, bound = exact_and_bound(means, variances)
    np.testing.assert_allclose(exact, t["exact"], rtol=1e-10, atol=1e-11)
    np.testing.assert_allclose(bound, t["bound"], rtol=1e-10, atol=1e-11)


PROBLEMS = list(GOLDEN["problems"])


def process(name, hyper, inducing, X):
    variance, lengthscale = hyper
    kernel = gpaug.kernels.SquaredExponential(lengthscale, variance)
    return gpaug.GaussianProcess(name, kernel, inducing=inducing, jitter=0)(X)


def golden_model(X, y=None, *, name, inducing):
    problem = GOLDEN["problems"][name]
    if name == TWO:
        f = process("f", problem["hyp_f"], inducing, X)
        g = process("g", problem["hyp_g"], inducing, X)
        d = gpaug.HeteroscedasticNormal(f, g, problem["lam"])
    else:
        d = ROWS[name][1](problem, process("f", (1.3, 0.9), inducing, X))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", d, obs=y)


def fitted(name, which, updates):
    X = jnp.asarray(GOLDEN["X"])
    Z = X if which == "full" else jnp.asarray(GOLDEN["Z"])
    y = jnp.asarray(label(name, np.array(GOLDEN["problems"][name]["y"])))
    guide = gpaug.AutoSparseGP(golden_model)
    svi = gpaug.ConjugateSVI(golden_model, guide, updates=updates)
    return svi, svi.run(
        jax.random.key(0), 100, X, y, name=name, inducing=Z, progress_bar=False
    )


QUICK = [("hinge_svm", "sparse")]


@pytest.mark.parametrize(
    ("name", "which"),
    [p if p in QUICK else slow(*p)
     for p in [(n, w) for n in PROBLEMS for w in ("full", "sparse")]],
)  # fmt: skip
def test_golden_problems_by_conjugate_updates(x64, name, which) -> None:
    problem = GOLDEN["problems"][name]
    svi, result = fitted(name, which, "augmented")
    np.testing.assert_allclose(-result.losses[-1], problem[which]["elbo"], rtol=1e-9)
    assert np.diff(result.losses).max() < 1e-10
    X = jnp.asarray(GOLDEN["X"])
    posterior = svi.posterior(result)
    for suffix in "fg" if name == TWO else [""]:
        q = posterior.predict_f(X, site=suffix or None)
        golden = problem[which][f"m{suffix}"], problem[which][f"v{suffix}"]
        np.testing.assert_allclose(q.mean, golden[0], rtol=1e-6, atol=1e-7)
        np.testing.assert_allclose(q.variance, golden[1], rtol=1e-6, atol=1e-7)
    if (name, which) == QUICK[0]:
        trace = SVM["sparse"]["elbo_trace_from_prior"][1:]
        np.testing.assert_allclose(-result.losses[: len(trace)], trace, rtol=1e-8)


# Bad input.


@pytest.mark.parametrize(
    ("make", "y", "message"),
    [
        (gpaug.BayesianSVM, -1.0, r"\(y \+ 1\) // 2"),
        (lambda f: gpaug.LogisticPoisson(f, 2.0), 0.5, "outside the support"),
        (lambda f: gpaug.LogisticPoisson(f, 2.0), -1.0, "outside the support"),
        (lambda f: dist.Binomial(3, logits=f), 4.0, "outside the support"),
        (lambda f: dist.NegativeBinomialLogits(2.0, f), 0.5, "outside the support"),
        (lambda f: dist.StudentT(-1.0, f, 1.0), 0.5, "parameter 'df' of StudentT"),
    ],
)
def test_bad_input_to_a_fit(make, y, message) -> None:
    def model(X, y=None):
        gp = gpaug.GaussianProcess("f", gpaug.kernels.Matern52(), inducing=X[:2])
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", make(gp(X)), obs=y)

    X = jnp.arange(4.0)[:, None]
    svi = gpaug.ConjugateSVI(model, gpaug.AutoSparseGP(model))
    with pytest.raises(ValueError, match=message):
        svi.init(jax.random.key(0), X, jnp.full(4, y))
