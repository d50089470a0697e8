# SPDX-License-Identifier: Apache-2.0
"""Programs that NumPy runs, against the same ones that JAX compiles."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
from jax import lax
from jax.scipy import special
from jax.scipy.linalg import solve_triangular

from numpyro_gpaug.math import compiling
from numpyro_gpaug.math.hosting import Hosted
from numpyro_gpaug.math.linalg import inverse_cholesky

RNG = np.random.default_rng(0)
X = RNG.normal(size=(3, 4))
Y = np.abs(RNG.normal(size=(3, 4))) + 0.3
N = np.array([[3, -7, 2, 0], [5, 1, -1, 8], [2, 2, 6, -4]])
CODES = np.array([2, 0, 1, 2, 0])

UNARY = [
    jnp.abs, jnp.cbrt, jnp.ceil, jnp.cos, jnp.cosh, jnp.exp, jnp.exp2, jnp.expm1,
    jnp.floor, jnp.sign, jnp.sin, jnp.sinh, jnp.square, jnp.tan, jnp.tanh, jnp.round,
    jnp.trunc, lax.round, special.erf, special.erfc, special.ndtr, jax.nn.sigmoid,
    jax.nn.softplus, jax.nn.relu, jnp.isfinite, lambda x: x**3, lambda x: x**-2,
    lambda x: -x, lambda x: special.erfinv(jnp.tanh(x)),
]  # fmt: skip
POSITIVE = [
    jnp.sqrt, jnp.log, jnp.log1p, lax.rsqrt, special.gammaln, special.digamma,
    lambda y: special.xlogy(y, y),
]  # fmt: skip
BINARY = [
    jnp.add, jnp.subtract, jnp.multiply, jnp.divide, jnp.maximum, jnp.minimum,
    jnp.arctan2, lambda x, y: y**x, lax.rem, jnp.mod, jnp.less, jnp.less_equal,
    jnp.greater, jnp.greater_equal, jnp.equal, jnp.not_equal,
    lambda x, y: jnp.where(x > 0, x, y), lambda x, y: lax.clamp(-0.5, x, 0.5),
    lambda x, y: x.T @ y, lambda x, y: jnp.einsum("ij,ij->i", x, y),
    lambda x, y: jnp.einsum("ij,kj->ikj", x, y),
    lambda x, y: jnp.concatenate([x, y], 1), lambda x, y: jnp.stack([x, y], 1),
    lambda x, y: lax.select_n(jnp.int32(1) + (x > 0), y, x, y),
    lambda x, y: jax.vmap(jnp.dot)(x, y), lambda x, y: jnp.dot(x[:0], y.T),
]  # fmt: skip
SHAPES = [
    lambda x: x.sum(0), lambda x: x.max(1), lambda x: x.min(), lambda x: x.prod(0),
    lambda x: x[:0].max(0, initial=0.0), lambda x: (x > 0).any(0),
    lambda x: (x > 0).all(1), lambda x: x.argmax(1), lambda x: x.argmin(0),
    lambda x: jnp.cumsum(x, 1), lambda x: lax.cumsum(x, 1, reverse=True),
    lambda x: jnp.cumprod(x, 0), lambda x: x[::-1], lambda x: x[1:, ::2],
    lambda x: x[None, :, 1], lambda x: jnp.pad(x, ((1, 2), (0, 1)), constant_values=7),
    lambda x: lax.pad(x, 0.0, ((-1, 2, 1), (0, -2, 0))), lambda x: x.reshape(2, 6),
    lambda x: lax.dynamic_slice(x, (5, 1), (2, 2)), lambda x: jnp.split(x, 2, 1),
    lambda x: lax.dynamic_update_slice(x, x[:2, :2], (2, 1)),
    lambda x: jnp.arange(3.0)[:, None] + x, lambda x: x.astype(int) // 2,
    lambda x: lax.stop_gradient(x), lambda x: lax.optimization_barrier((x, x)),
    lambda x: lax.cond(x[0, 0] > 0, jnp.sin, jnp.cos, x),
    lambda x: lax.scan(lambda c, r: (c + r, c * r[0]), x[0], x),
    lambda x: lax.scan(lambda c, r: (c * r, c), x[0], x, reverse=True),
    lambda x: lax.map(jnp.sin, x), lambda x: jax.grad(lambda x: jnp.sin(x).sum())(x),
    lambda x: jax.checkpoint(jnp.sin)(x),
    lambda x: special.logsumexp(x, 0, b=jnp.ones(4)),
    lambda x: jnp.linalg.cholesky(x @ x.T + jnp.eye(3)),
    lambda x: jnp.linalg.cholesky(jnp.stack([x @ x.T + jnp.eye(3), -jnp.eye(3)])),
    lambda x: inverse_cholesky(x @ x.T + jnp.eye(3)),
    lambda x: solve_triangular(x[:, :3] + 3 * jnp.eye(3), x, trans=1),
    lambda x: lax.linalg.triangular_solve(x[:, :3] + 3 * jnp.eye(3), x.T, lower=True),
    lambda x: lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32),
]  # fmt: skip
GATHERS = [
    lambda x, i: x[i], lambda x, i: x[i, 1], lambda x, i: x[i, i + 1],
    lambda x, i: x[i - 4, :2], lambda x, i: jax.vmap(lambda r, j: r[j])(x, i[:3]),
    lambda x, i: x.at[i].add(1.5), lambda x, i: x.at[i, i].multiply(1.0),
    lambda x, i: x.at[:, i[:2]].set(0.0), lambda x, i: jnp.zeros(9).at[i + 7].add(1.0),
    lambda x, i: jax.vmap(lambda r, j: r.at[j].add(2.0))(x, i[:3]),
    lambda x, i: x.at[i + 2].get(mode="fill"),
    lambda x, i: x.at[i + 2].get(mode="clip"),
    lambda x, i: jnp.take_along_axis(x, i[None, :4], 0),
    lambda x, i: jax.ops.segment_sum(jnp.sin(i * 1.0), i, 3),
]  # fmt: skip
WHOLE = [
    lambda n: n // 3, lambda n: lax.div(n, 2), lambda n: lax.rem(n, 3), lambda n: n % 3,
    lambda n: n & 6, lambda n: n | 1, lambda n: n ^ 3, lambda n: ~n, lambda n: n**2,
    lambda n: lax.shift_right_logical(n, 1), lambda n: n.max(0), lambda n: n * 0.5,
]  # fmt: skip


def by_both(program, *args):
    """Results of NumPy's rules and of JAX, flat."""
    closed = jax.make_jaxpr(program)(*args)
    hosted = Hosted.of(closed)
    assert hosted is not None
    return hosted(*args), jax.tree.leaves(jax.jit(program)(*args))


def test_rules_are_those_of_jax(dtype):
    def program(x, y, n, i):
        found = [f(x) for f in (*UNARY, *SHAPES)] + [f(y) for f in POSITIVE]
        found += [f(x, y) for f in BINARY] + [f(n) for f in WHOLE]
        return found + [f(x, i) for f in GATHERS]

    args = X.astype(dtype), Y.astype(dtype), jnp.asarray(N), jnp.asarray(CODES)
    rtol = 200 * float(jnp.finfo(dtype).eps)
    own, theirs = by_both(program, *args)
    assert len(own) == len(theirs)
    for mine, other in zip(own, theirs, strict=True):
        assert (mine.shape, mine.dtype) == (other.shape, other.dtype)
        np.testing.assert_allclose(mine, other, rtol=rtol, atol=1e-5)


def test_random_numbers_have_their_laws():
    laws = {
        "normal": dist.Normal(1.0, 2.0),
        "uniform": dist.Uniform(-1.0, 3.0),
        "gamma": dist.Gamma(0.3, 2.0),
        "cauchy": dist.HalfCauchy(2.0),
        "beta": dist.Beta(2.0, 5.0),
    }

    def drawn(words):
        key = jax.random.wrap_key_data(words, impl="threefry2x32")
        key, other = jax.random.split(jax.random.fold_in(key, 3))
        keys = jax.random.split(other, len(laws))
        draws = [law.sample(k) for law, k in zip(laws.values(), keys, strict=True)]
        return [*draws, jax.random.normal(key)]

    words = RNG.integers(2**32, size=(4000, 2), dtype=np.uint32)
    hosted = Hosted.of(jax.make_jaxpr(jax.vmap(drawn))(words))
    assert hosted is not None
    *found, last = hosted(words)
    for law, draws in zip(laws.values(), found, strict=True):
        assert np.unique(draws).size > 3900
        ranks = np.asarray(law.cdf(jnp.asarray(draws)))
        edges = np.histogram(ranks, np.linspace(0, 1, 11))[0]
        # Chi squared of nine: one in 10 000 is above 33.
        assert np.square(edges - 400).sum() / 400 < 33
    # Other keys, other numbers; the same, the same.
    assert abs(np.corrcoef(found[0], last)[0, 1]) < 0.08
    np.testing.assert_array_equal(hosted(words)[0], found[0])
    assert np.isin(hosted(words[::-1])[0], found[0]).mean() < 0.01


def test_what_is_left_to_the_compiler():
    x = jnp.ones(3)

    def rounds(x):
        return lax.while_loop(lambda x: x.sum() < 9, lambda x: 2 * x, x)

    def called(x):
        return jax.pure_callback(np.sin, x, x)

    def many(x):
        return lax.map(lambda y: y + x, jnp.ones(5000))

    def large(x):
        return jnp.outer(jnp.arange(3e6), x).sum(0)

    def split(x):
        return jax.random.split(jax.random.key(0))

    for program in (rounds, called, many, large, split):
        assert Hosted.of(jax.make_jaxpr(program)(x)) is None
    # What nothing is made of does not count.
    assert Hosted.of(jax.make_jaxpr(lambda x: (rounds(x), x + 1)[1])(x)) is not None


def test_programs_that_run_once_are_not_compiled(caplog):
    def program(data, *, power):
        return {"sum": (data["x"] ** power).sum(), "codes": data["codes"]}

    once = compiling.once(program, static_argnames="power")
    data = {"x": jnp.arange(5.0), "codes": np.arange(3)}
    with jax.log_compiles(), caplog.at_level("WARNING"):
        found = once(data, power=2)
        assert float(once(data, power=3)["sum"]) == 100
    assert not [r for r in caplog.records if "XLA compilation" in r.message]
    assert found["sum"] == 30
    assert isinstance(found["sum"], jax.Array)
    # In other programs, and where it is differentiated, it is what was written.
    assert jax.jit(lambda x: once(data | {"x": x}, power=2)["sum"])(data["x"]) == 30
    moved = jax.grad(lambda x: once(data | {"x": x}, power=2)["sum"])(data["x"])
    np.testing.assert_allclose(moved, 2 * data["x"])
    assert once(data | {"x": np.arange(5)}, power=2)["sum"].dtype.kind == "i"


@pytest.mark.parametrize("value", [jnp.ones(2), np.ones(2)])
def test_ahead(value):
    program = compiling.ahead(lambda x: [x + 1, x.sum() > 1], value)
    more, truth = program(value)
    assert more.tolist() == [2, 2]
    assert bool(truth)
