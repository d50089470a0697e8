# SPDX-License-Identifier: Apache-2.0
"""Distributions of scalars whose parameters are declared like the fields of a class."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, dataclass_transform

import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike
from numpyro.distributions import Distribution, constraints
from numpyro.distributions.util import promote_shapes

from numpyro_gpaug.math.concrete import floating


@dataclass(frozen=True)
class _Declared:
    constraint: constraints.Constraint


def parameter(
    constraint: constraints.Constraint, *, default: Any = None, kw_only: bool = False
) -> Any:
    """Declare a parameter of an :class:`Elementwise` distribution, positional and
    required.

    :param constraint: constraint on its values.
    :param default: for type checkers.
    :param kw_only: for type checkers.
    """
    return _Declared(constraint)


@dataclass_transform(eq_default=False, field_specifiers=(parameter,))
class _WithParameters(Distribution):
    def __init_subclass__(cls, **kwargs: Any) -> None:
        declared = {k: v for k, v in vars(cls).items() if isinstance(v, _Declared)}
        if declared:
            for name in declared:
                # Not deleted: NumPyro's ``mean`` and ``variance`` refuse to be set.
                setattr(cls, name, None)
            # NumPyro takes the leaves of the pytree from here, too.
            cls.arg_constraints = {k: v.constraint for k, v in declared.items()}
            cls.__init__ = _constructor(*declared)  # type: ignore[method-assign]
        super().__init_subclass__(**kwargs)


class Elementwise(_WithParameters):
    """A distribution whose parameters are broadcast to the batch shape, in the order of
    their declaration.

    A class ``Wald`` with ``loc: ArrayLike = parameter(constraints.positive)`` in its
    body, and ``concentration`` likewise, is constructed as
    ``Wald(loc, concentration, *, validate_args=None)``.
    """

    if TYPE_CHECKING:
        validate_args: Any = parameter(constraints.boolean, default=None, kw_only=True)

    def _arrays(self, *others: ArrayLike) -> tuple[Array, ...]:
        """Return parameters and ``others`` as floating arrays of one shape and
        dtype."""
        return floating(*(getattr(self, k) for k in self.arg_constraints), *others)


def _constructor(*names: str) -> Any:
    kinds = inspect.Parameter
    signature = inspect.Signature(
        [
            kinds("self", kinds.POSITIONAL_ONLY),
            *(
                kinds(k, kinds.POSITIONAL_OR_KEYWORD, annotation="ArrayLike")
                for k in names
            ),
            kinds(
                "validate_args", kinds.KEYWORD_ONLY, default=None,
                annotation="bool | None",
            ),
        ],
        return_annotation=None,
    )  # fmt: skip

    def __init__(*args: Any, **kwargs: Any) -> None:
        bound = signature.bind(*args, **kwargs)
        self, *values = bound.args
        for name, value in zip(names, promote_shapes(*values), strict=True):
            setattr(self, name, value)
        shape = jnp.broadcast_shapes(*map(jnp.shape, values))
        Distribution.__init__(self, shape, **bound.kwargs)

    __init__.__signature__ = signature  # type: ignore[attr-defined]
    return __init__
