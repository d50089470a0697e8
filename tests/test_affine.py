# SPDX-License-Identifier: Apache-2.0
"""Affinity proved from the jaxpr, the errors it raises, and the routes that remain."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random

import numpyro_gpaug as gpaug
from numpyro_gpaug.model.jaxpr import dependence_tree

N, C = 4, 3


def dependences(fn, inputs):
    """States of the outputs of ``fn``, in the order of its leaves."""
    leaves = jax.tree.leaves(dependence_tree(fn, inputs))
    return [leaf.state for leaf in leaves]


X = np.linspace(0.5, 2, N)
ORDER = np.array([2, 0, 3, 1])
CONDITION = np.array([True, False, True, True])
MATRIX = np.arange(1.0, 1 + N * N).reshape(N, N)


@jax.custom_jvp
def doubled(f):
    return 2 * f


@doubled.defjvp
def _doubled_jvp(primals, tangents):
    return doubled(*primals), 2 * tangents[0]


@jax.custom_jvp
def squared(f):
    return f * f


@squared.defjvp
def _squared_jvp(primals, tangents):
    return squared(*primals), 2 * primals[0] * tangents[0]


@jax.custom_jvp
def halved(f):
    return f / 2


@halved.defjvp
def _halved_jvp(primals, tangents):
    # As in a straight-through estimator.
    return halved(*primals), tangents[0]


@jax.custom_vjp
def tripled(f):
    return 3 * f


tripled.defvjp(lambda f: (tripled(f), None), lambda _, g: (3 * g,))


def classify(fn, shape=(N,)):
    """Return the result of :func:`dependence_tree` for the only output and input of
    ``fn``.
    """
    (state,) = dependences(
        lambda inputs: fn(inputs["f"]), {"f": jax.ShapeDtypeStruct(shape, "float32")}
    )
    return state.get("f")


AFFINE = {
    "identity": (lambda f: f, (N,)),
    "negation": (lambda f: -f, (N,)),
    "offset": (lambda f: 2 * f + 1, (N,)),
    "constant minus": (lambda f: X - f, (N,)),
    "product": (lambda f: f * X, (N,)),
    "product on the left": (lambda f: jnp.sin(X) * f, (N,)),
    "quotient": (lambda f: f / X, (N,)),
    "linear term": (lambda f: f + jnp.asarray(MATRIX) @ jnp.ones(N), (N,)),
    "sum with itself": (lambda f: f + 3 * f, (N,)),
    "first power": (lambda f: f**1, (N,)),
    "column": (lambda f: f[:, 0], (N, C)),
    "traced column": (lambda f: jnp.take(f, jnp.array([1, 2]), axis=1), (N, C)),
    "reshape": (lambda f: f.reshape(-1), (N, C)),
    "transpose": (lambda f: f.T, (N, C)),
    "new axis": (lambda f: f[:, None] * jnp.ones(C), (N,)),
    "where constant": (lambda f: jnp.where(CONDITION, f, 0.0), (N,)),
    "where of two": (lambda f: jnp.where(CONDITION, f, -f), (N,)),
    "concatenate": (lambda f: jnp.concatenate([f, jnp.zeros(2)]), (N,)),
    "stack": (lambda f: jnp.stack([f, jnp.zeros(N), -f], 1), (N,)),
    "permutation": (lambda f: f[ORDER], (N,)),
    "reversal": (lambda f: f[::-1], (N,)),
    "pad": (lambda f: jnp.pad(f, 1), (N,)),
    "split": (lambda f: jnp.split(f, 2)[1], (N,)),
    "flat and back": (lambda f: f.reshape(2, 2).reshape(-1), (N,)),
    "jit": (jax.jit(lambda f: 2 * f + X), (N,)),
    "nested jit": (jax.jit(lambda f: jax.jit(lambda g: -g)(f) + 1), (N,)),
    "custom jvp": (doubled, (N,)),
    "remat": (jax.checkpoint(lambda f: 2 * f + 1), (N,)),
    "vmap": (jax.vmap(lambda f: 2 * f - 1), (N, C)),
}

NONLINEAR = {
    "clip": (lambda f: jnp.clip(f, -9, 9), "clip"),
    "tanh": (jnp.tanh, "tanh"),
    "own square": (lambda f: f * f, "mul"),
    "square": (jnp.square, "square"),
    "cube": (lambda f: f**3, "integer_pow"),
    "reciprocal": (lambda f: 1 / f, "div"),
    "ratio": (lambda f: f / (1 + f), "div"),
    "where itself": (lambda f: jnp.where(f > 0, f, 0.0), "gt|where"),
    "branch": (lambda f: jnp.where(f > 0, 1.0, 2.0), "gt|where"),
    "abs": (jnp.abs, "abs"),
    "softplus": (jax.nn.softplus, "softplus"),
    "relu": (jax.nn.relu, "relu|max"),
    "sigmoid": (jax.nn.sigmoid, "sigmoid|logistic"),
    "exp": (jnp.exp, "exp"),
    "maximum": (lambda f: jnp.maximum(f, -99), "max"),
    "round": (jnp.round, "round"),
    "to integers": (lambda f: f.astype(int).astype(float), "convert_element_type"),
    "jitted": (jax.jit(lambda f: 1 + jnp.cos(f)), "cos"),
    "custom jvp": (squared, "squared|mul"),
    "custom vjp": (tripled, "tripled"),
    "another derivative": (halved, "halved"),
    "affine after": (lambda f: 2 * jnp.exp(f) + 1, "exp"),
    "first of two": (lambda f: jnp.clip(jnp.exp(f), 0, 1), "exp"),
}

MIXING = {
    "sum": lambda f: f.sum(),
    "centred": lambda f: f - f.mean(),
    "cumsum": jnp.cumsum,
    "product": lambda f: MATRIX @ f,
    "difference": lambda f: f[1:] - f[:-1],
    "roll": lambda f: f + jnp.roll(f, 1),
    "two orders": lambda f: f[ORDER] + f[ORDER[::-1]],
    # Taken as elementwise, the variance of a preference would be 0.
    "preference": lambda f: jnp.take(f, ORDER) - jnp.take(f, ORDER[::-1]),
    "outer sum": lambda f: f[:, None] + f[None, :],
    "plus one": lambda f: f + f[0],
    "transposed": lambda f: f.reshape(2, 2) + f.reshape(2, 2).T,
    "convolution": lambda f: jnp.convolve(f, jnp.array([1.0, 2]), mode="same"),
    "halves": lambda f: sum(jnp.split(f, 2)),
}


@pytest.mark.parametrize(("fn", "shape"), AFFINE.values(), ids=AFFINE)
def test_affine_and_elementwise(fn, shape):
    found = classify(fn, shape)
    assert found.affine, found
    assert found.elementwise, found


@pytest.mark.parametrize(("fn", "op"), NONLINEAR.values(), ids=NONLINEAR)
def test_nonlinear_is_named(fn, op):
    found = classify(fn)
    assert not found.affine
    assert found.elementwise
    assert re.fullmatch(op, found.nonlinear), found.nonlinear


@pytest.mark.parametrize("fn", MIXING.values(), ids=MIXING)
def test_linear_functions_that_mix_are_affine(fn):
    found = classify(fn)
    assert found.affine
    assert not found.elementwise


def test_a_jitted_gather_called_twice_mixes():
    take = jax.jit(lambda f, i: f[i])
    assert classify(lambda f: take(f, ORDER)).elementwise
    assert classify(lambda f: take(f, ORDER) + 2 * take(f, ORDER)).affine
    assert not classify(lambda f: take(f, ORDER) + take(f, ORDER[::-1])).elementwise


def test_unknown_operations_are_not_trusted():
    for fn in (
        jnp.sort,
        jnp.cumprod,
        lambda f: jax.lax.while_loop(lambda x: x[0] < 9, lambda x: 2 * x, f),
        lambda f: jnp.linalg.cholesky(jnp.diag(f)),
    ):
        found = classify(fn)
        assert not found.affine
        assert not found.elementwise


def two(fn):
    struct = jax.ShapeDtypeStruct((N,), "float32")
    inputs = {"f": struct, "g": struct}
    (state,) = dependences(lambda at: fn(at["f"], at["g"]), inputs)
    return state


def test_two_latents():
    added = two(lambda f, g: f - 2 * g + X)
    assert all(added[k].affine and added[k].elementwise for k in "fg")
    product = two(lambda f, g: f * g)
    assert not product["f"].affine
    assert not product["g"].affine
    quotient = two(lambda f, g: f / (1 + g))
    assert not quotient["g"].affine
    half = two(lambda f, g: f + jnp.exp(g))
    assert half["f"].affine or half["f"].nonlinear == "exp"
    assert half["g"].nonlinear == "exp"
    assert "g" not in two(lambda f, g: f)
    assert two(lambda f, g: jnp.ones(N)) == {}


# What a user sees.


def process_model(observe, latents=("f",)):
    def model(X, y=None):
        kernel = gpaug.kernels.SquaredExponential(0.8, 0.5)
        options = {"inducing": X[::2], "jitter": 0.0}
        gps = [gpaug.GaussianProcess(k, kernel, **options) for k in latents]
        with numpyro.plate("data", X.shape[0]):
            observe(*(gp(X) for gp in gps), y)

    return model


@pytest.fixture
def data():
    X = jnp.linspace(-2, 2, 8)[:, None]
    return X, jnp.array([0, 1, 0, 2, 1, 0, 3, 1])


def initialise(model, X, y):
    return gpaug.ConjugateSVI(model, gpaug.AutoSparseGP(model)).init(
        random.key(0), X, y
    )


ERRORS = {
    "clip": (
        lambda f, y: numpyro.sample(
            "y", dist.Bernoulli(logits=jnp.clip(f, -2, 2)), obs=y
        ),
        ["'y'", "'logits'", "'f'", "'clip'", "Gauss-Hermite"],
    ),
    "mixing": (
        lambda f, y: numpyro.sample("y", dist.Bernoulli(logits=jnp.cumsum(f)), obs=y),
        ["'y'", "'logits'", "'f'", "mixes", "Monte Carlo"],
    ),
    "unknown": (
        lambda f, y: numpyro.sample("y", dist.Poisson(jnp.exp(f)), obs=y),
        ["'y'", "Poisson", "no closed form", "Gauss-Hermite"],
    ),
    "scale": (
        lambda f, y: numpyro.sample("y", dist.Normal(0.0, jnp.exp(f)), obs=1.0 * y),
        ["'y'", "'f'", "Normal", "loc", "Gauss-Hermite"],
    ),
    "loc and scale": (
        lambda f, y: numpyro.sample("y", dist.Normal(f, jnp.exp(f)), obs=1.0 * y),
        ["'y'", "'f'", "Normal", "loc", "Gauss-Hermite"],
    ),
    "probs": (
        lambda f, y: numpyro.sample("y", dist.Bernoulli(jax.nn.sigmoid(f)), obs=y),
        ["'y'", "BernoulliProbs", "no closed form", "Gauss-Hermite"],
    ),
}


@pytest.mark.parametrize(("observe", "words"), ERRORS.values(), ids=ERRORS)
def test_errors_name_site_operation_and_the_route_that_works(observe, words, data):
    X, y = data
    model = process_model(observe)
    with pytest.raises(gpaug.NotConjugateError) as error:
        initialise(model, X, jnp.minimum(y, 1))
    for word in [*words, "TraceAnalytic_ELBO", "NUTS"]:
        assert word in str(error.value)
    route = gpaug.TraceAnalytic_ELBO().routes(model, X, jnp.minimum(y, 1))["y"]
    assert route.value in str(error.value)


def guide_at(model, *args, shift=0.7):
    """A dense guide away from the prior, its params, and moments of f at ``X``."""
    guide = gpaug.AutoSparseGP(model, covariance="dense").setup(*args)
    params = {}
    rng = np.random.default_rng(1)
    for block in guide.structure.blocks:
        size = block.shape[0]
        params[f"{block.site}_auto_loc"] = jnp.asarray(rng.normal(size=size)) * shift
        factor = np.tril(rng.normal(size=(size, size))) * 0.1 + np.eye(size) * 0.6
        params[f"{block.site}_auto_tril"] = jnp.asarray(factor)
    return guide, params


def brute_moments(X, params, name):
    """Mean and variance of f, and KL, by NumPy."""
    X = np.asarray(X)
    Z = X[::2]

    def kernel(a, b):
        return 0.5 * np.exp(-0.5 * (a - b.T) ** 2 / 0.8**2)

    A = np.linalg.solve(np.linalg.cholesky(kernel(Z, Z)), kernel(Z, X))
    loc, tril = (np.asarray(params[f"{name}.v_auto_{k}"]) for k in ("loc", "tril"))
    S = tril @ tril.T
    variance = 0.5 - (A**2).sum(0) + np.einsum("mn,mk,kn->n", A, S, A)
    kl = 0.5 * (np.trace(S) + loc @ loc - len(loc) - np.linalg.slogdet(S)[1])
    return A.T @ loc, variance, kl


def product_model():
    def observe(f, g, y):
        numpyro.sample("y", dist.Normal(f * g, 2.0), obs=1.0 * y)

    return process_model(observe, ("f", "g"))


@pytest.mark.usefixtures("x64")
def test_two_processes_that_mix_go_through_monte_carlo(data):
    X, y = data
    model = product_model()
    loss = gpaug.TraceAnalytic_ELBO()
    assert loss.routes(model, X, y) == {"y": gpaug.Route.MONTE_CARLO}
    with pytest.raises(gpaug.NotConjugateError, match="Monte Carlo"):
        initialise(model, X, y)
    guide, params = guide_at(model, X, y)
    mf, vf, kl_f = brute_moments(X, params, "f")
    mg, vg, kl_g = brute_moments(X, params, "g")
    square = y**2 - 2 * y * mf * mg + (mf**2 + vf) * (mg**2 + vg)
    expected = np.sum(-square / 8 - np.log(2) - 0.5 * np.log(2 * np.pi)) - kl_f - kl_g

    @jax.jit
    @jax.vmap
    def value(key):
        return -loss.loss(key, params, model, guide, X, y)

    keys = random.split(random.key(0), 400)
    values = np.asarray(value(keys))
    error = abs(values.mean() - expected)
    assert error < 5 * values.std() / np.sqrt(len(values))
    assert values.std() > 0
    np.testing.assert_array_equal(value(keys), values)
