# SPDX-License-Identifier: Apache-2.0
r"""Sums of exponentials of a predictor.

Log-densities may be affine in a predictor and in exponentials of it,

.. math:: a + b \eta + \sum_k c_k \exp(d_k \eta + e_k),

as for Poisson, gamma, exponential and Weibull distributions with ``exp(eta)`` for a
rate or a mean. Under ``eta ~ N(m, v)`` their expectation is ``a + b m + sum_k c_k
exp(d_k m + e_k + d_k^2 v / 2)``. The operations between predictor and density are
evaluated on such sums.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial, reduce
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from numpyro_gpaug.distributions.densities import safe_log
from numpyro_gpaug.math.equations import applied, walked
from numpyro_gpaug.model.jaxpr import (
    COPIES,
    MOVES,
    called_jaxpr,
    called_name,
    is_linear,
)

_MOVES = MOVES | COPIES
# Operations that do the same to every number of a sum.
_PLACED = _MOVES | {"gather", "dynamic_slice"}
# Operations that return an exponential from an exponential and numbers.
KEEPING = _PLACED | {"mul", "div", "neg", "pow", "integer_pow"}


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

    @classmethod
    def of_exponent(cls, x: Array) -> ExponentialSum:
        """Return an array that depends on no predictor as a sum."""
        return cls((x, jnp.zeros_like(x)), (), x, x)

    def scaled(self, by: Callable[[Array], Array]) -> ExponentialSum:
        """Return the sum with a, b and every c multiplied by a number."""
        affine = self.affine and tuple(map(by, self.affine))
        return self.replaced(affine, *((by(c), d, e) for c, d, e in self.terms))


def _plus(x: Any, y: Any) -> ExponentialSum:
    if not isinstance(x, ExponentialSum):
        x, y = y, x
    other = y if isinstance(y, ExponentialSum) else x.replaced((y, 0))
    parts = [part.affine for part in (x, other) if part.affine is not None]
    affine = tuple(reduce(operator.add, each) for each in zip(*parts, strict=True))
    return x.replaced(affine or None, *x.terms, *other.terms)


def _times(x: Any, y: Any) -> Any:
    if isinstance(x, ExponentialSum) and isinstance(y, ExponentialSum):
        (c, d, e), (f, g, h) = x.single(), y.single()
        return x.replaced(None, (c * f, d + g, e + h))
    if not isinstance(x, ExponentialSum):
        x, y = y, x
    return x.scaled(lambda k: k * y) if isinstance(x, ExponentialSum) else x * y


def _power(base: Any, exponent: Any) -> Any:
    if isinstance(exponent, ExponentialSum):
        raise NoFormError
    if not isinstance(base, ExponentialSum):
        return jnp.power(base, exponent)
    c, d, e = base.single()
    return base.replaced(None, (c**exponent, d * exponent, e * exponent))


def _exp(x: ExponentialSum) -> ExponentialSum:
    if x.terms or x.affine is None:
        raise NoFormError
    a, b = x.affine
    return x.replaced(None, (1, b, a))


def _log(x: ExponentialSum) -> ExponentialSum:
    c, d, e = x.single()
    return x.replaced((jnp.log(c) + e, d))


def _selected(which: Any, *cases: Any) -> ExponentialSum:
    if isinstance(which, ExponentialSum):
        raise NoFormError
    (like, *_) = (x for x in cases if isinstance(x, ExponentialSum))

    def chosen(i: int, x: Any) -> ExponentialSum:
        case = x if isinstance(x, ExponentialSum) else like.replaced((x, 0))
        return case.scaled(lambda k: jnp.where(which == i, k, 0))

    return reduce(_plus, map(chosen, range(len(cases)), cases))


_RULES: dict[str, Callable[..., ExponentialSum]] = {
    "add": _plus, "add_any": _plus, "neg": partial(_times, -1), "mul": _times,
    "sub": lambda x, y: _plus(x, _times(-1, y)),
    "div": lambda x, y: _times(x, _power(y, -1)),
    "pow": _power, "integer_pow": _power, "exp": _exp, "log": _log,
    "select_n": _selected,
}  # fmt: skip


class Expected(NamedTuple):
    """An expectation, to which only linear functions may be applied."""

    value: Array


_Known = ExponentialSum | Expected


def expectation(found: Any, numbers: Any, mean: Array, variance: Array) -> Array:
    """Return the expectation of a frontier's densities.

    :param found: a :class:`~numpyro_gpaug.model.frontier.Frontier` with one root.
    :param numbers: values of the variables that depend on no latent.
    :param mean: the mean of the root, in its shape.
    :param variance: the variance of the root.
    :raises NoFormError: if a density is not a sum of this kind.
    """
    zero, one = jnp.zeros_like(mean), jnp.ones_like(mean)
    root = ExponentialSum((zero, one), (), mean, variance)
    outputs = found.density(numbers, [root], after)
    return sum((jnp.sum(_expected(x)) for x in outputs), jnp.zeros((), mean.dtype))


def _expected(x: Any) -> Any:
    if isinstance(x, ExponentialSum):
        return x.expectation
    return x.value if isinstance(x, Expected) else x


def has_form(found: Any, avals: list[Any]) -> bool:
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


def after(eqn: Any, operands: list[Any]) -> list[Any]:
    """Return the results of one equation, given sums, expectations and other arrays.

    :param eqn: an equation of a jaxpr.
    :param operands: values of its operands.
    :raises NoFormError: if the results are no such sums.
    """
    kinds = {i: type(x) for i, x in enumerate(operands) if isinstance(x, _Known)}
    if not kinds:
        return applied(eqn, operands)
    called = called_jaxpr(eqn)
    if called_name(eqn) == "near_rate":
        return [_near_rate(*operands)]
    if called is not None:
        return walked(called.jaxpr, operands, lambda x: x.val, after, called.consts)
    if Expected not in kinds.values():
        return [_after_sums(eqn, operands)]
    if eqn.primitive.name in _MOVES or is_linear(eqn, {*kinds}):
        return [Expected(x) for x in applied(eqn, [_expected(x) for x in operands])]
    raise NoFormError


def _near_rate(count: Any, rate: Any) -> Expected:
    """Return the expectation of the function of this name, at a known count."""
    if isinstance(count, ExponentialSum):
        raise NoFormError
    c, d, e = rate.single()
    spread = 0.5 * d * d * rate.variance
    known = jnp.maximum(count, 1)
    # The logarithm of the expected rate over the count.
    ratio = d * rate.mean + e + spread + safe_log(c / known)
    found = known * (jnp.where(count > 0, ratio, -1) - jnp.expm1(ratio))
    return Expected(found - count * spread)


def _after_sums(eqn: Any, operands: list[Any]) -> Any:
    name, shape = eqn.primitive.name, eqn.outvars[0].aval.shape
    if name == "ne" and operands[0] is operands[1]:
        # The comparison x != x (of xlogy) asks whether a value is NaN, and these sums
        # are not.
        return jnp.zeros(shape, bool)
    (like, *_) = (x for x in operands if isinstance(x, ExponentialSum))
    if name == "reduce_sum" and prod(shape) < like.mean.size:
        return Expected(applied(eqn, [like.expectation])[0])
    if name in _PLACED | {"reduce_sum"} and like is operands[0]:
        return jax.tree.map(lambda x: applied(eqn, [x, *operands[1:]])[0], like)
    if name not in _RULES:
        raise NoFormError(name)
    # An axis of size 1 is broadcast.
    given = [
        jax.tree.map(lambda part: jnp.broadcast_to(part, shape), x)
        if isinstance(x, ExponentialSum)
        else x
        for x in operands
    ]
    powers = [eqn.params["y"]] if name == "integer_pow" else []
    return _RULES[name](*given, *powers)
