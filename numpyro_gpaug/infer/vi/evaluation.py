# SPDX-License-Identifier: Apache-2.0
"""The bound at natural parameters, and its accuracy."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from numpyro_gpaug.gaussians.base import Marginals


def relative_rounding(dtype: Any) -> float:
    """The relative tolerance when two bounds are compared: a smaller decrease may be
    rounding error."""
    return 32 * float(jnp.finfo(dtype).eps)


def share_of_walk(marginals: Any) -> float:
    """The part of :func:`relative_rounding` that is due to the number of terms: errors
    are a random walk. With a larger tolerance, updates would alternate around their
    fixed point: counts of thousands make bounds of 1e5 nats, and 32 units in the last
    place are nats."""
    terms = sum(x.size for x in jax.tree.leaves(marginals))
    return min(1.0, (4 + math.sqrt(terms)) / 128)


class Evaluation(NamedTuple):
    """The bound at natural parameters, and everything that the next update needs.

    :param bound: evidence lower bound.
    :param expected: the expected log-likelihood in it.
    :param slack: the largest decrease for which an update of a block is accepted.
    :param moments: moments by block.
    :param marginals: marginals by block.
    :param slopes: derivatives of the expected log-likelihood with respect to the
        marginals.
    :param direct: its derivatives with respect to the numbers in the likelihood; empty
        unless hyperparameters are learnt.
    :param divergences: KL by block, (latents,).
    :param rise: the increase of the bound in the last update; infinite if unknown.
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
    """A point of a line search in one block.

    :param mean: mean of its latents.
    :param rows: means of its predictors.
    :param slopes: derivatives of the expected log-likelihood with respect to these.
    """

    mean: Array
    rows: Array
    slopes: Array
