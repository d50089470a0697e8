# SPDX-License-Identifier: Apache-2.0
r"""Log-densities that are affine in a predictor and in exponentials of it.

They are

.. math:: a + b \eta + \sum_k c_k \exp(d_k \eta + e_k),

as for Poisson, gamma, exponential and Weibull distributions with ``exp(eta)`` for a
rate or a mean. Under ``eta ~ N(m, v)`` their expectation is ``a + b m + sum_k c_k
exp(d_k m + e_k + d_k^2 v / 2)``.

The operations between predictor and density are evaluated on such sums.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from numpyro_gpaug.math.equations import applied, walked
from numpyro_gpaug.model.frontier import Frontier
from numpyro_gpaug.model.jaxpr import COPIES, MOVES, called_jaxpr, is_linear

_MOVES = MOVES | COPIES


class NoFormError(Exception):
    """The density is not a sum of this kind."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ExponentialSum:
    """A sum of this kind, and the Gaussian of its predictor, entry by entry.

    :param affine: a and b; ``None`` if both are zero.
    :param terms: c, d and e of each term.
    :param mean: m.
    :param variance: v.
    """

    affine: tuple[Array, Array] | None
    terms: tuple[tuple[Array, Array, Array], ...]
    mean: Array
    variance: Array

    # NumPy arrays defer arithmetic to this class.
    __array_ufunc__: ClassVar[None] = None

    @property
    def expectation(self) -> Array:
        """Return the expectation of the sum."""
        total = jnp.zeros_like(self.mean)
        if self.affine is not None:
            total += self.affine[0] + self.affine[1] * self.mean
        for c, d, e in self.terms:
            total += c * jnp.exp(d * self.mean + e + 0.5 * d * d * self.variance)
        return total

    def single(self) -> tuple[Array, Array, Array]:
        """Return its only term.

        :raises NoFormError: if it has more.
        """
        if self.affine is not None or len(self.terms) != 1:
            raise NoFormError
        return self.terms[0]

    def replaced(self, affine: Any, *terms: Any) -> ExponentialSum:
        """Return another sum of the same predictor, with its numbers broadcast to full
        shape."""

        def whole(x: Any) -> Array:
            return jnp.broadcast_to(jnp.asarray(x, self.mean.dtype), self.mean.shape)

        affine = None if affine is None else tuple(map(whole, affine))
        made: Any = tuple(tuple(map(whole, term)) for term in terms)
        return replace(self, affine=affine, terms=made)

    def __neg__(self) -> ExponentialSum:
        return self * -1

    def __add__(self, other: Any) -> ExponentialSum:
        if not isinstance(other, ExponentialSum):
            a, b = self.affine or (0, 0)
            return self.replaced((a + other, b), *self.terms)
        parts = [x.affine for x in (self, other) if x.affine is not None]
        affine = tuple(sum(each) for each in zip(*parts, strict=True)) or None
        return self.replaced(affine, *self.terms, *other.terms)

    def __sub__(self, other: Any) -> ExponentialSum:
        return self + (-other)

    def __mul__(self, other: Any) -> ExponentialSum:
        if isinstance(other, ExponentialSum):
            (c, d, e), (f, g, h) = self.single(), other.single()
            return self.replaced(None, (c * f, d + g, e + h))
        affine = self.affine and tuple(x * other for x in self.affine)
        return self.replaced(affine, *((c * other, d, e) for c, d, e in self.terms))

    def __truediv__(self, other: Any) -> ExponentialSum:
        one = 1 / other if isinstance(other, ExponentialSum) else 1 / jnp.asarray(other)
        return self * one

    def __rtruediv__(self, other: Any) -> ExponentialSum:
        c, d, e = self.single()
        return self.replaced(None, (other / c, -d, -e))

    __radd__, __rmul__ = __add__, __mul__

    def __rsub__(self, other: Any) -> ExponentialSum:
        return -self + other

    def exp(self) -> ExponentialSum:
        """Return its exponential, if the sum itself contains none."""
        if self.terms or self.affine is None:
            raise NoFormError
        a, b = self.affine
        return self.replaced(None, (1, b, a))

    def log(self) -> ExponentialSum:
        """Return its logarithm, if it is a single exponential."""
        c, d, e = self.single()
        return self.replaced((jnp.log(c) + e, d))

    def chosen(self, here: Array) -> ExponentialSum:
        """Return the sum where ``here`` is true, and zero elsewhere."""
        masked = jax.tree.map(lambda x: jnp.where(here, x, 0), self)
        return replace(masked, mean=self.mean, variance=self.variance)


_BINARY: dict[str, Callable[..., ExponentialSum]] = {
    "add": operator.add, "add_any": operator.add, "sub": operator.sub,
    "mul": operator.mul, "div": operator.truediv,
}  # fmt: skip
_UNARY: dict[str, Callable[[ExponentialSum], ExponentialSum]] = {
    "neg": operator.neg, "exp": ExponentialSum.exp, "log": ExponentialSum.log,
}  # fmt: skip


class Expected(NamedTuple):
    """An expectation, to which only linear functions may be applied."""

    value: Array


def expectation(found: Frontier, numbers: Any, mean: Array, variance: Array) -> Array:
    """Return the expectation of a frontier's densities.

    :param found: a frontier with one root.
    :param numbers: values of the variables that depend on no latent.
    :param mean: the mean of the root, in its shape.
    :param variance: the variance of the root.
    :raises NoFormError: if a density is not a sum of this kind.
    """
    zero, one = jnp.zeros_like(mean), jnp.ones_like(mean)
    root = ExponentialSum((zero, one), (), mean, variance)
    outputs = found.density(numbers, [root], _after)
    return sum((jnp.sum(_expected(x)) for x in outputs), jnp.zeros((), mean.dtype))


def _expected(x: Any) -> Any:
    if isinstance(x, ExponentialSum):
        return x.expectation
    return x.value if isinstance(x, Expected) else x


def has_form(found: Frontier, avals: list[Any]) -> bool:
    """Whether :func:`expectation` supports a frontier's densities.

    :param found: the frontier.
    :param avals: shapes of the program's variables.
    """
    if len(found.roots) != 1:
        return False
    shapes = [
        jax.ShapeDtypeStruct(avals[x].shape, avals[x].dtype)
        for x in (*found.fixed, found.roots[0])
    ]
    try:
        jax.eval_shape(
            lambda numbers, m: expectation(found, numbers, m, m),
            shapes[:-1],
            shapes[-1],
        )
    except NoFormError:
        return False
    return True


def _after(eqn: Any, operands: list[Any]) -> list[Any]:
    """Return the results of one equation, given sums, expectations and other arrays."""
    if not any(isinstance(x, ExponentialSum | Expected) for x in operands):
        return applied(eqn, operands)
    called = called_jaxpr(eqn)
    if called is not None:
        return walked(called.jaxpr, operands, lambda x: x.val, _after, called.consts)
    if any(isinstance(x, Expected) for x in operands):
        return _after_expectation(eqn, operands)
    return [_after_sums(eqn, operands)]


def _after_sums(eqn: Any, operands: list[Any]) -> Any:
    name = eqn.primitive.name
    if name == "ne" and operands[0] is operands[1]:
        # The comparison x != x (of xlogy) asks whether a value is NaN, and these sums
        # are not.
        return jnp.zeros(eqn.outvars[0].aval.shape, bool)
    (like, *_) = (x for x in operands if isinstance(x, ExponentialSum))
    summed = name == "reduce_sum" and eqn.outvars[0].aval.size < like.mean.size
    if summed:
        return Expected(eqn.primitive.bind(like.expectation, **eqn.params))
    if name in _MOVES or name == "reduce_sum":
        return jax.tree.map(lambda x: eqn.primitive.bind(x, **eqn.params), like)
    if name == "gather" and like is operands[0]:
        places = operands[1]
        return jax.tree.map(lambda x: eqn.primitive.bind(x, places, **eqn.params), like)
    if name in _UNARY:
        return _UNARY[name](like)
    if name not in _BINARY and name not in ("pow", "integer_pow", "select_n"):
        raise NoFormError(name)
    # An axis of size 1 is broadcast.
    shape = eqn.outvars[0].aval.shape
    operands = [_broadcast(x, shape) for x in operands]
    if name in _BINARY:
        return _BINARY[name](*operands)
    if name in ("pow", "integer_pow"):
        base, *exponent = operands
        return _powered(base, exponent[0] if exponent else eqn.params["y"])
    return _selected(*operands)


def _powered(base: Any, exponent: Any) -> ExponentialSum:
    if isinstance(exponent, ExponentialSum):
        raise NoFormError
    c, d, e = base.single()
    return base.replaced(None, (c**exponent, d * exponent, e * exponent))


def _selected(which: Any, *cases: Any) -> ExponentialSum:
    if isinstance(which, ExponentialSum):
        raise NoFormError
    (like, *_) = (x for x in cases if isinstance(x, ExponentialSum))
    parts = [
        x if isinstance(x, ExponentialSum) else like.replaced((x, 0)) for x in cases
    ]
    first, *others = (part.chosen(which == i) for i, part in enumerate(parts))
    return sum(others, first)


def _broadcast(x: Any, shape: tuple[int, ...]) -> Any:
    if not isinstance(x, ExponentialSum):
        return x
    return jax.tree.map(lambda part: jnp.broadcast_to(part, shape), x)


def _after_expectation(eqn: Any, operands: list[Any]) -> list[Expected]:
    kinds = Expected | ExponentialSum
    moving = {i for i, x in enumerate(operands) if isinstance(x, kinds)}
    if eqn.primitive.name in _MOVES or is_linear(eqn, moving):
        return [Expected(x) for x in applied(eqn, [_expected(x) for x in operands])]
    raise NoFormError
