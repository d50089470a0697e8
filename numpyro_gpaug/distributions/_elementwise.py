# SPDX-License-Identifier: Apache-2.0
"""Distributions of scalars whose parameters are declared like the fields of a class."""

from __future__ import annotations

from dataclasses import Field, InitVar, dataclass, field, fields
from typing import Any, dataclass_transform

import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike
from numpyro.distributions import Distribution, constraints
from numpyro.distributions.util import promote_shapes

from numpyro_gpaug.math.arrays import floating


def parameter(constraint: constraints.Constraint) -> Any:
    """Declare a parameter of an :class:`Elementwise` distribution, positional and
    required.

    :param constraint: constraint on its values.
    """
    return field(metadata={"constraint": constraint})


@dataclass_transform(eq_default=False, field_specifiers=(field, parameter))
@dataclass(eq=False, repr=False)
class Elementwise(Distribution):
    """A distribution whose parameters are broadcast to the batch shape, in the order of
    their declaration.

    A class ``Wald`` with ``loc: ArrayLike = parameter(constraints.positive)`` in its
    body, and ``concentration`` likewise, is constructed as
    ``Wald(loc, concentration, *, validate_args=None)``.
    """

    validate_args: InitVar[bool | None] = field(default=None, kw_only=True)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        if any(isinstance(x, Field) for x in vars(cls).values()):
            dataclass(eq=False, repr=False)(cls)
            # NumPyro takes the leaves of the pytree from here, too.
            known = {x.name: x.metadata["constraint"] for x in fields(cls)}
            cls.arg_constraints = known
            for name in known:
                # NumPyro's ``mean`` and ``variance`` refuse to be set.
                setattr(cls, name, None)
        super().__init_subclass__(**kwargs)

    def __post_init__(self, validate_args: bool | None) -> None:
        values = [getattr(self, name) for name in self.arg_constraints]
        pairs = zip(self.arg_constraints, promote_shapes(*values), strict=True)
        for name, value in pairs:
            setattr(self, name, value)
        shape = jnp.broadcast_shapes(*map(jnp.shape, values))
        super().__init__(shape, validate_args=validate_args)

    def _arrays(self, *others: ArrayLike) -> tuple[Array, ...]:
        """Return parameters and ``others`` as floating arrays of one shape and
        dtype."""
        return floating(*(getattr(self, k) for k in self.arg_constraints), *others)


# A method of NumPyro's class has this name, too.
del Elementwise.validate_args


class Located(Elementwise):
    """An :class:`Elementwise` distribution whose first parameter is its mean."""

    @property
    def mean(self) -> Array:
        return self._arrays()[0]
