# SPDX-License-Identifier: Apache-2.0
"""Comparison of custom derivatives (``jax.custom_jvp``, ``custom_vjp``) with the
derivatives of the functions' values.

The expectation of a density is differentiated through custom derivatives. A derivative
that intentionally differs, as in straight-through estimators or clipped gradients,
would lead a fit away from the maximum of its bound.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_gpaug.math.equations import applied

# Points at which derivatives are compared, the step of finite differences, and how far
# both may differ, relative to their size.
_POINTS, _STEP, _FAR = 3, 0.01, 0.05


def differs(eqn: Any) -> bool:
    """Whether a call's own derivative differs from the derivative of its values, at
    each of some random points.

    :param eqn: an equation of a jaxpr.
    """
    rng = np.random.default_rng(0)
    return all(_differs(eqn, rng) for _ in range(_POINTS))


def _differs(eqn: Any, rng: np.random.Generator) -> bool:
    """Whether the two differ at a random point, in a random direction."""
    avals = [v.aval for v in eqn.invars]
    real = [jnp.issubdtype(a.dtype, jnp.floating) for a in avals]
    at = [
        jnp.asarray(rng.uniform(0.2, 0.8, a.shape), a.dtype) if r
        else jnp.ones(a.shape, a.dtype)
        for a, r in zip(avals, real, strict=True)
    ]  # fmt: skip
    way = [jnp.asarray(rng.normal(size=a.shape), a.dtype) for a in avals]

    def value(moved: list[Any]) -> list[Any]:
        rest = iter(moved)
        given = [next(rest) if r else x for x, r in zip(at, real, strict=True)]
        found = applied(eqn, given)
        return [x for x in found if jnp.issubdtype(x.dtype, jnp.floating)]

    start = [x for x, r in zip(at, real, strict=True) if r]
    along = [x for x, r in zip(way, real, strict=True) if r]
    results, pull = jax.vjp(value, start)
    weights = [jnp.asarray(3 * rng.normal(size=x.shape), x.dtype) for x in results]
    own = _inner(pull(weights)[0], along)
    ahead, behind = (
        value([x + sign * _STEP * v for x, v in zip(start, along, strict=True)])
        for sign in (1, -1)
    )
    rises = [(x - y) / (2 * _STEP) for x, y in zip(ahead, behind, strict=True)]
    finite = _inner(weights, rises)
    return abs(own - finite) > _FAR * max(abs(own), abs(finite), _FAR)


def _inner(left: list[Any], right: list[Any]) -> float:
    return sum(float(jnp.vdot(x, y)) for x, y in zip(left, right, strict=True))
