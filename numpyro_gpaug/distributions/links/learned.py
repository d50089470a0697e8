# SPDX-License-Identifier: Apache-2.0
"""Piecewise-constant links with learnt heights."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpyro
from jax.typing import ArrayLike
from numpyro.distributions import biject_to, constraints

from numpyro_gpaug.distributions.links.piecewise import PiecewiseLink
from numpyro_gpaug.math.arrays import known_to

ORDERS = ("free", "increasing")


def learned_link(
    name: str,
    initial: PiecewiseLink,
    constraint: constraints.Constraint = constraints.real,
    order: str = "free",
) -> PiecewiseLink:
    """Return a link whose heights are a :func:`numpyro.param`.

    :param name: name of the param.
    :param initial: the link to start from, heights (K,) inside the constraint.
    :param constraint: the set of each height, ``unit_interval``, ``positive`` or
        ``real``.
    :param order: ``"free"``, or ``"increasing"`` for heights that increase with the
        function value; the param is then ``biject_to(constraint).inv(heights)`` (logits
        for probabilities), in increasing order. The heights of a fit are
        ``substitute(fn, data=result.params)().heights``
        (:class:`numpyro.handlers.substitute`), with ``fn`` the function that calls this
        one.
    :raises ValueError: for initial heights that violate the constraint, or the order.

    **Example**

    >>> import jax, numpyro
    >>> from numpyro.distributions import constraints
    >>> start = PiecewiseLink.from_function(jax.nn.sigmoid, 20, -3.0, 3.0)
    >>> def model():
    ...     return learned_link("link", start, constraints.unit_interval)
    >>> print(numpyro.handlers.seed(model, 0)())
    PiecewiseLink(20 pieces, edges -3 .. 3)
    """
    if order not in ORDERS:
        raise ValueError(f"order must be one of {ORDERS}, got {order!r}")
    heights = initial.heights
    outside = f"learned_link({name!r}): the initial heights, of shape {heights.shape},"
    if not known_to(constraint, heights):
        raise ValueError(f"{outside} do not satisfy {constraint}")
    if order == "free":
        return initial.with_heights(numpyro.param(name, heights, constraint=constraint))
    transform = biject_to(constraint)
    with jax.ensure_compile_time_eval():
        start = transform.inv(heights)
    if not known_to(lambda x: jnp.diff(x, axis=-1) > 0, start):
        raise ValueError(f"{outside} do not increase")
    ordered = numpyro.param(name, start, constraint=constraints.ordered_vector)
    return initial.with_heights(transform(ordered))


def link_penalty(
    name: str, link: PiecewiseLink, towards: ArrayLike, weight: ArrayLike
) -> None:
    r"""Subtract :math:`\lambda \sum_k (g_k - t_k)^2` from the log-density of a model:
    the regularisers (22) and (23) of the paper. Call it outside data plates.

    The objective is then penalised: up to a constant it is the bound at the posterior
    mode of heights with independent normal priors of variance
    :math:`1 / (2 \lambda)`. Heights that are a normal sample site instead have a
    posterior distribution (:class:`~numpyro_gpaug.PiecewiseNormal`).

    :param name: name of the factor.
    :param link: the link, its heights learnt.
    :param towards: t: one number, or the heights (K,) of a function to stay near.
    :param weight: :math:`\lambda`, >= 0.

    **Example**

    >>> import jax, numpyro
    >>> from numpyro.distributions import constraints
    >>> start = PiecewiseLink.from_function(jax.nn.sigmoid, 20, -3.0, 3.0)
    >>> def model():
    ...     link = learned_link("link", start, constraints.unit_interval)
    ...     link_penalty("near the sigmoid", link, start.heights, weight=10.0)
    >>> print(numpyro.infer.util.log_density(model, (), {}, {})[0])
    0.0
    """
    distance = jnp.square(link.heights - jnp.asarray(towards, link.heights.dtype))
    numpyro.factor(name, -(jnp.asarray(weight) * distance.sum()))
