# SPDX-License-Identifier: Apache-2.0
"""Predictive distributions that take columns of tables as values, and say what to use
in place of a distribution function that they lack."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

from numpyro.distributions import Distribution

from numpyro_gpaug.model.columns import numbers


class _TakesColumns(Distribution):
    """The methods that take values. A copy, or a pickle, is of the stock class."""

    stock: type

    def log_prob(self, value: Any, *args: Any, **kwargs: Any) -> Any:
        return super().log_prob(numbers("value", value), *args, **kwargs)

    def cdf(self, value: Any) -> Any:
        return self._named(super().cdf, numbers("value", value))

    def icdf(self, q: Any) -> Any:
        return self._named(super().icdf, q)

    def _named(self, method: Callable[[Any], Any], given: Any) -> Any:
        try:
            return method(given)
        except NotImplementedError as error:
            if str(error):
                raise
            raise NotImplementedError(
                f"{self.stock.__name__} has no {method.__name__}: use probs, which are "
                "the probabilities of labels and classes, or draws, "
                "predicted.sample(key, (1000,))"
            ) from None

    def __reduce_ex__(self, protocol: Any) -> Any:
        _, _, *state = super().__reduce_ex__(2)
        return object.__new__, (self.stock,), *state


@lru_cache
def _taking(stock: Any) -> Any:
    known = {"stock": stock, "__module__": stock.__module__}
    return type(stock)(stock.__name__, (_TakesColumns, stock), known)


def taking_columns(prediction: Distribution) -> Distribution:
    """Return a prediction whose ``log_prob`` and ``cdf`` take columns of pandas, polars
    and Arrow tables, too. Stock distributions take arrays alone.

    :param prediction: a distribution, which becomes an instance of a subclass.
    """
    if not isinstance(prediction, _TakesColumns):
        stock: Any = type(prediction)
        prediction.__class__ = _taking(stock)
    return prediction
