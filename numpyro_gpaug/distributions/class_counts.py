# SPDX-License-Identifier: Apache-2.0
"""Counts of classes, with totals that are traced like all other arrays."""

from __future__ import annotations

import copy
from typing import Any, Self

import numpyro.distributions as dist
from numpyro.distributions import Distribution

_WRAPPERS = dist.MaskedDistribution | dist.Independent | dist.ExpandedDistribution


class ClassCounts(dist.MultinomialLogits):
    """NumPyro's ``Multinomial``, with totals that are leaves of its tree."""

    pytree_data_fields = ("total_count",)

    def tree_flatten(self) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        data, aux = super().tree_flatten()
        named = zip(self.gather_pytree_aux_fields(), aux, strict=True)
        return data, tuple(None if k == "total_count" else x for k, x in named)

    @classmethod
    def tree_unflatten(cls, aux_data: tuple[Any, ...], params: tuple[Any, ...]) -> Self:
        made: Any = super().tree_unflatten(aux_data, params)
        names = cls.gather_pytree_data_fields()
        made.total_count = params[names.index("total_count")]
        return made


def traceable(fn: Distribution) -> Distribution:
    """Return an equal distribution that has all of its arrays among the leaves of its
    tree. JAX neither traces nor compares other arrays.

    :param fn: the distribution of an observed site.
    """
    if isinstance(fn, _WRAPPERS):
        inner = traceable(fn.base_dist)
        if inner is fn.base_dist:
            return fn
        found = copy.copy(fn)
        found.base_dist = inner
        return found
    if type(fn) is not dist.MultinomialLogits:
        return fn
    made: Any = ClassCounts.__new__(ClassCounts)
    vars(made).update(vars(fn))
    return made
