# SPDX-License-Identifier: Apache-2.0
"""Very many rows in blocks: the same results, and little memory."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import numpyro_gpaug as gpaug
from numpyro_gpaug.gaussians.dense import AffineBlocks
from numpyro_gpaug.infer.vi.differentiation import vjp
from numpyro_gpaug.infer.vi.stepper import Stepper
from numpyro_gpaug.likelihoods.expectations import predictive
from numpyro_gpaug.likelihoods.student_t import jensen_gap
from numpyro_gpaug.math import blocks
from numpyro_gpaug.math.logistic import expected_log_sigmoid
from numpyro_gpaug.model.arguments import Arguments
from tests.conftest import assert_close, slow, small_blocks
from tests.problems import toy

KEY = jax.random.key(0)
ROWS, INDUCING = 203, 6


def model(X, y=None, *, Z, latents=None, likelihood="bernoulli"):
    positive = dist.constraints.positive
    lengthscale = numpyro.param(
        "lengthscale", jnp.ones(2, X.dtype), constraint=positive
    )
    kernel = gpaug.kernels.Matern52(lengthscale)
    if latents:
        start = jnp.linspace(0.5, 1.5, latents, dtype=X.dtype)
        kernel = numpyro.param("variance", start, constraint=positive) * kernel
    gp = gpaug.GaussianProcess(
        "f", kernel, numpyro.param("Z", Z), lambda X: X[:, 0], latents
    )
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", LIKELIHOODS[likelihood](gp(X)), obs=y)


def factors(X, y=None, *, Z):
    """Two outputs of two latents, which are moved one at a time."""
    loadings = numpyro.param("loadings", jnp.array([[1.0, 0.3], [-0.5, 1.0]], X.dtype))
    gp = gpaug.GaussianProcess(
        "f", gpaug.kernels.SquaredExponential(1.3), Z, loadings=loadings
    )
    with numpyro.plate("data", len(X)):
        y = None if y is None else jnp.stack([y, 1 - y], 1)
        likelihood = dist.Bernoulli(logits=gp(X)).to_event(1)
        numpyro.sample("y", likelihood, obs=y)


LIKELIHOODS = {
    "student": lambda f: dist.StudentT(4.0, f, 0.5),
    "bernoulli": lambda f: dist.Bernoulli(logits=f),
    "softmax": lambda f: dist.Categorical(logits=f),
}
CASES = [
    (model, {"likelihood": "bernoulli"}),
    (model, {"likelihood": "softmax", "latents": 3}),
    (factors, {}),
]


def problem_of(fn, dtype, given):
    """A fit's problem as a function of unconstrained params, these, and its start."""
    X, y = toy(ROWS, dtype=dtype)
    given = given | {"Z": X[:INDUCING]}
    svi = gpaug.ConjugateSVI(fn, gpaug.AutoSparseGP(fn))
    state = svi.init(KEY, X, y, **given)
    arguments = Arguments.split((X, y), given)
    stepper = Stepper(svi._programs.plan_at(arguments, state), arguments)

    def problem(values):
        return stepper.problem(values, KEY, {})

    return problem, state.hyper.values, state.natural


def everything(problem, values, natural):
    """Bound, its gradient in the params, where a whole step takes a block and one of
    its latents, and marginals given all of them."""
    at, pull = vjp(problem, values)
    # Not the prior: there the variances of values and residuals add up to a constant.
    natural = jax.tree.map(lambda x: 1.3 * x + 0.1 * (x > 0), natural)
    evaluation = at.evaluate(natural)
    slopes = pull(at.gradient(evaluation))
    target = at.target("f", evaluation, None)
    one = at.target("f", evaluation, None, jnp.array([0]))
    given = at.maps["f"].given(natural["f"].potential)
    return evaluation.bound, slopes, target, one, given


@pytest.mark.parametrize(
    ("fn", "given"),
    [CASES[0], *(slow(*case) for case in CASES[1:])],
)
def test_blocks_give_the_same_numbers_in_float64(fn, given, x64) -> None:
    check_blocks(fn, given, "float64")


def check_blocks(fn, given, dtype):
    problem, values, natural = problem_of(fn, dtype, given)
    whole = jax.jit(lambda values: everything(problem, values, natural))(values)
    with small_blocks(2**11):
        map_ = jax.eval_shape(lambda values: problem(values).maps["f"], values)
        assert isinstance(map_, AffineBlocks)
        count, _, size = map_.rows[0].shape[:3]
        assert count > 2
        assert count * size > ROWS
        found = jax.jit(lambda values: everything(problem, values, natural))(values)
    for a, b in zip(*map(jax.tree.leaves, (found, whole)), strict=True):
        assert a.dtype == b.dtype
        assert_close(a, b, 20 * max(1, np.abs(b).max()))


@pytest.mark.parametrize(
    ("likelihood", "optim"),
    [("bernoulli", "lbfgs"), slow("student", None)],
)
def test_nothing_but_the_projection_is_whole(likelihood, optim) -> None:
    X, y = toy(4000)
    given = {"Z": X[:100], "likelihood": likelihood}
    svi = gpaug.ConjugateSVI(model, gpaug.AutoSparseGP(model), optim)
    state = svi.init(KEY, X, y, **given)
    arguments = Arguments.split((X, y), given)
    plan = svi._programs.plan_at(arguments, state)
    with small_blocks(2**16):
        program = svi._programs.advance.plain.lower(
            state, np.int32(1), np.float32(0), np.uint32(0), arguments,
            plan=plan,
        )  # fmt: skip
        temporary = program.compile().memory_analysis().temp_size_in_bytes
    projection = 4 * X.shape[0] * 100
    # A gradient stores some numbers per row beside it, and no second projection.
    assert projection < temporary < 2.2 * projection


@pytest.mark.parametrize("function", [expected_log_sigmoid, jensen_gap])
def test_elements_in_blocks(function, dtype) -> None:
    mean = np.linspace(0, 9, 3 * 67, dtype=dtype).reshape(3, 67)
    variance = np.linspace(0.1, 4, 67, dtype=dtype)

    def run(mean, variance):
        value, pull = jax.vjp(function, mean, variance)
        return value, *pull(jnp.cos(value))

    # Another function: the program of the first is cached.
    whole = jax.jit(lambda *args: run(*args))(mean, variance)
    with small_blocks(2**11):
        assert "scan" in str(jax.make_jaxpr(run)(mean, variance))
        for a, b in zip(jax.jit(run)(mean, variance), whole, strict=True):
            assert a.dtype == b.dtype
            assert_close(a, b, 10)


@pytest.mark.parametrize("shape", [(), (5,), (1, 5), (3, 5), (2, 3, 5)])
def test_elementwise_functions_see_one_axis(shape) -> None:
    """With other axes, even one of a single latent, sums over nodes are slow."""
    seen = []

    def function(x, y):
        seen.append(x.shape)
        return x - 2 * y, x

    x = jnp.arange(1.0, 1 + np.prod(shape)).reshape(shape)
    y = x[..., :1] if shape else x
    difference, same = blocks.by_elements(function, x, y, each=1, dtype=x.dtype)
    assert seen == [(x.size,)]
    np.testing.assert_array_equal(difference, x - 2 * y)
    np.testing.assert_array_equal(same, x)


PREDICTED = {
    "student": (lambda m: dist.StudentT(4.0, m, 0.5), ("loc",)),
    "heteroscedastic": (
        lambda m: gpaug.HeteroscedasticNormal(m, m, 2.0), ("loc", "precision_logits")
    ),
    "log-variance": (
        lambda m: gpaug.LogVarianceNormal(m, m), ("loc", "log_variance")
    ),
    "laplace": (lambda m: dist.Laplace(m, 0.5), ("loc",)),
    "poisson": (lambda m: gpaug.LogisticPoisson(m, 5.0), ("logits",)),
    "binomial": (lambda m: dist.Binomial(9, logits=m), ("logits",)),
}  # fmt: skip


@pytest.mark.parametrize("name", PREDICTED)
def test_predictions_hold_a_few_numbers_per_row(name) -> None:
    make, latents = PREDICTED[name]

    def distribution(m, v):
        return predictive(make(m), dict.fromkeys(latents, m), dict.fromkeys(latents, v))

    shapes = jax.eval_shape(distribution, jnp.zeros(7), jnp.ones(7))
    leaves = jax.tree.leaves(shapes)
    assert leaves
    assert all(np.prod(x.shape, initial=1) <= 7 for x in leaves)


@pytest.mark.parametrize("name", ["student", slow("heteroscedastic")])
def test_predictions_in_blocks_of_rows(name) -> None:
    m, v = np.linspace(-3, 3, 60, dtype="float32"), np.float32(0.5)
    q = np.linspace(0.01, 0.99, 60, dtype="float32")

    def run(m):
        make, latents = PREDICTED[name]
        means, spread = (dict.fromkeys(latents, x) for x in (m, v + 0 * m))
        d = predictive(make(m), means, spread)
        y = d.icdf(q)
        return y, d.cdf(y) - q, d.log_prob(y + 1)

    whole = jax.jit(lambda m: run(m))(m)
    assert np.abs(whole[1]).max() < 1e-5
    with small_blocks(2**13):
        assert "scan" in str(jax.make_jaxpr(run)(m))
        for a, b in zip(jax.jit(run)(m), whole, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_the_full_process_is_whole() -> None:
    # Its inducing matrix has that size anyway, and kernels recognise that X is Z.
    with small_blocks(100):
        assert blocks.rows_of_blocks(500, 500, "float32", least=500) is None
        assert blocks.rows_of_blocks(501, 500, "float32", least=500) == 500
