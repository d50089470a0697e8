# SPDX-License-Identifier: Apache-2.0
"""The bound at natural parameters, and its accuracy."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from numpyro_gpaug.math.affine import Marginals


def relative_rounding(dtype: Any) -> float:
    """The relative tolerance when two bounds are compared: a smaller decrease may be
    rounding error."""
    return 32 * float(jnp.finfo(dtype).eps)


def share_of_walk(marginals: Any) -> float:
    """The part of :func:`relative_rounding` that is due to summing so many terms:
    errors are a random walk. With a larger tolerance moves would alternate around their
    fixed point: counts of thousands make bounds of 1e5 nats, and 32 units in the last
    place are nats."""
    terms = sum(x.size for x in jax.tree.leaves(marginals))
    return min(1.0, (4 + math.sqrt(terms)) / 128)


class Evaluation(NamedTuple):
    """The bound at natural parameters, and everything that the next update needs.

    :param bound: evidence lower bound.
    :param expected: the expected log-likelihood in it.
    :param slack: how far it may fall in a move of a block that is taken.
    :param moments: by block.
    :param marginals: by block.
    :param slopes: derivatives of the expected log-likelihood in the marginals.
    :param direct: its derivatives in the numbers that the likelihood is made of; empty
        unless something is learnt.
    :param divergences: KL by block, (latents,).
    :param rise: of the bound in the move that led here; infinite where it is not known.
    """

    bound: Array
    expected: Array
    slack: Array
    moments: dict[str, Any]
    marginals: dict[str, Marginals]
    slopes: dict[str, Marginals]
    direct: tuple[Array, ...]
    divergences: dict[str, Array]
    rise: Array

    @property
    def rounding(self) -> Array:
        """The largest decrease of the bound that rounding alone may cause."""
        return self.slack / share_of_walk(self.marginals)


class Place(NamedTuple):
    """The position of a block.

    :param mean: of its latents.
    :param rows: means of its predictors.
    :param slopes: derivatives of the expected log-likelihood in these.
    """

    mean: Array
    rows: Array
    slopes: Array
