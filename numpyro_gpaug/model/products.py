# SPDX-License-Identifier: Apache-2.0
"""Products of exponentials of latents, such as ``exp(level) * exp(effect)[group]``,
written as the exponential of one affine function: a datum then has one predictor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp

from numpyro_gpaug.math.equations import applied
from numpyro_gpaug.model.jaxpr import COPIES, MOVES

# Operations on an exponential and on numbers that return an exponential.
_KEPT = MOVES | COPIES | {
    "gather", "dynamic_slice", "mul", "div", "pow", "integer_pow",
}  # fmt: skip


class _Exponential(NamedTuple):
    """The variables in ``exp(exponent)`` times scales, which depend on no latents."""

    exponent: Any
    scales: tuple[Any, ...] = ()


def as_one(listing: Any, eqn: Any, operands: list[Any]) -> Any:
    """Return the variable of a product or quotient of exponentials of latents, written
    as one exponential; ``None`` for another equation.

    :param listing: the program before the equation, a
        :class:`~numpyro_gpaug.model.listing.Listing`. It is extended.
    :param eqn: the equation.
    :param operands: numbers of variables, or literals.
    """
    name = eqn.primitive.name
    if name not in ("mul", "div") or not all(map(listing.depends, operands)):
        return None
    left, right = (_exponential(listing, x) for x in operands)
    if left is None or right is None:
        return None
    if name == "div":
        right = _each(listing, right, jnp.negative, jnp.reciprocal)

    def product(a: Any, b: Any, *scales: Any) -> Any:
        found = jnp.exp(a + b)
        for scale in scales:
            found = scale * found
        return found

    scales = *left.scales, *right.scales
    return listing.appended(product, left.exponent, right.exponent, *scales)


def _exponential(listing: Any, variable: Any) -> _Exponential | None:
    """Return the form of a variable that is an exponential of an affine variable, with
    operations that keep this form; ``None`` if it is not."""
    if variable not in listing.makers:
        return None
    eqn, operands, _ = listing.makers[variable]
    name = eqn.primitive.name
    if name == "exp":
        return _Exponential(operands[0]) if listing.affine(operands[0]) else None
    moving = [x for x in operands if listing.depends(x)]
    if len(moving) != 1 or name not in _KEPT:
        return None
    others = [x for x in operands if x != moving[0]]
    found = _exponential(listing, moving[0])
    first = operands[0] == moving[0]
    if found is None or (name == "pow" and not first):
        return None
    if name == "div" and first:
        others = [listing.appended(jnp.reciprocal, *others)]
    elif name == "div":
        found = _each(listing, found, jnp.negative, jnp.reciprocal)
    if name in ("mul", "div"):
        return found._replace(scales=(*found.scales, *others))
    if name == "pow":
        return _each(listing, found, jnp.multiply, jnp.power, *others)
    if name == "integer_pow":
        power = eqn.params["y"]
        return _each(listing, found, lambda a: a * power, lambda x: x**power)
    shape = listing.avals[moving[0]].shape

    def moved(x: Any, *others: Any) -> Any:
        return applied(eqn, [jnp.broadcast_to(x, shape), *others])[0]

    return _each(listing, found, moved, moved, *others)


def _each(
    listing: Any,
    given: _Exponential,
    exponent: Callable[..., Any],
    scale: Callable[..., Any],
    *others: Any,
) -> _Exponential:
    """Return other exponents and scales.

    :param exponent: function of the exponent and the other variables.
    :param scale: the same of each scale.
    """
    scales = (listing.appended(scale, x, *others) for x in given.scales)
    return _Exponential(
        listing.appended(exponent, given.exponent, *others), tuple(scales)
    )
