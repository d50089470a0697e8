# SPDX-License-Identifier: Apache-2.0
"""Everything that a fit fixes before its first step: options, shapes, transforms."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpyro.distributions import biject_to
from numpyro.distributions.transforms import IdentityTransform, IndependentTransform

from numpyro_gpaug._numpyro import weighted_plates
from numpyro_gpaug.guides import ConjugateGuide
from numpyro_gpaug.infer.vi.closed_params import ClosedParam
from numpyro_gpaug.infer.vi.differentiation import floats_of
from numpyro_gpaug.infer.vi.schedules import Schedule, as_schedule
from numpyro_gpaug.infer.vi.sweeps import starts_augmented
from numpyro_gpaug.model.arguments import Model, Values
from numpyro_gpaug.model.costs import densities, kernel_entries
from numpyro_gpaug.model.latents import Structure
from numpyro_gpaug.model.structure import Plate

if TYPE_CHECKING:
    import optax


UPDATES = ("auto", "augmented", "exact")
LBFGS = "lbfgs"
# The number of steps in one compiled loop.
CHUNK = 100
# The part of the dtype's range of logarithms that values may use: in float32, factors
# up to exp(66) in either direction.
FULL = 0.75


@dataclass(frozen=True)
class Settings:
    """Options of :class:`~numpyro_gpaug.ConjugateSVI`; see there."""

    optim: optax.GradientTransformation | str | None
    updates: str
    step_size: float | str | Schedule | None
    hyper_steps: int
    hyper_every: int | None
    m_step: tuple[str, ...]

    @property
    def every(self) -> int:
        """Closed-form steps between updates of hyperparameters."""
        return self.hyper_every or 1

    def __post_init__(self) -> None:
        if self.updates not in UPDATES:
            raise ValueError(f"updates must be one of {UPDATES}, got {self.updates!r}")
        searches = isinstance(self.optim, str) and self.optim == LBFGS
        if not (self.optim is None or searches or is_optax(self.optim)):
            got = self.optim if isinstance(self.optim, str) else type(self.optim)
            raise ValueError(
                f"optim must be {LBFGS!r}, an optax GradientTransformation (such as "
                f"optax.adam(1e-2)) or None, got {got!r}"
            )
        for name in ("hyper_steps", "hyper_every"):
            count = getattr(self, name)
            if count is None and name == "hyper_every":
                continue
            if count < 1 or count != int(count):
                raise ValueError(f"{name} must be a whole number >= 1, got {count}")
            if count > 1 and searches:
                raise ValueError(
                    f"{name} is for optax transformations. Leave it out with "
                    f"optim={LBFGS!r}, which optimises the Gaussian before every "
                    "gradient"
                )
        as_schedule(self.step_size, batches=1.0)


@dataclass(frozen=True, eq=False)
class Plan:
    """Everything that a fit fixes before its first step, at arguments of certain
    shapes.

    :param settings: options of the fit.
    :param model: the model.
    :param guide: its guide.
    :param structure: the structure of the model at these shapes.
    :param transforms: transforms from unconstrained to constrained params, by name.
    :param closed: params set in closed form.
    :param passed: plates whose batches are passed in.
    """

    settings: Settings
    model: Model
    guide: ConjugateGuide
    structure: Structure
    transforms: dict[str, Any]
    closed: tuple[ClosedParam, ...]
    passed: tuple[str, ...] = ()

    def of_batches(self, batch: Batch) -> Plan:
        """Return the plan of steps that use one batch each.

        :param batch: the numbers of rows.
        """
        model, structure, passed = seen_in_batches(self.model, self.structure, batch)
        return replace(self, model=model, structure=structure, passed=passed)

    @cached_property
    def dtype(self) -> Any:
        """The dtype of bounds."""
        return jnp.result_type(*(b.dtype for b in self.structure.blocks))

    @cached_property
    def work(self) -> int:
        """The operations of the costliest function of a step, in densities at nodes. An
        entry of a kernel matrix takes less than a fifth of the time of a density. With
        several latents, a step has Newton steps and sums over classes at nodes: per
        entry it takes about as long."""
        entries = kernel_entries(self.structure)
        if all(b.shape[0] == 1 for b in self.structure.processes):
            entries //= 8
        return max(entries, densities(self.structure))

    @property
    def optim(self) -> Any:
        """How hyperparameters are learnt; ``None`` if no optimiser learns any."""
        return self.settings.optim if self.transforms else None

    @property
    def searches(self) -> bool:
        """Whether L-BFGS learns hyperparameters."""
        return isinstance(self.optim, str)

    @property
    def learns(self) -> bool:
        """Whether hyperparameters change."""
        return self.optim is not None or bool(self.closed)

    @property
    def starts_augmented(self) -> bool:
        """Whether the first step uses factors of the augmented bound."""
        return self.settings.updates == "auto" and starts_augmented(self.structure)

    @property
    def noisy(self) -> bool:
        """Whether the bounds of two steps cannot be compared."""
        return bool(self.structure.subsampled) or self.guide.random_others

    def warn_of_range(self, values: Values) -> None:
        """Warn if learning has taken a number near the limits of its dtype.

        :param values: unconstrained params.
        """

        def leaves_range(name: str) -> bool:
            if is_identity(self.transforms[name]):
                return False
            leaves = [np.asarray(x) for x in jax.tree.leaves(values[name])]
            return any(
                np.abs(x).max(initial=0) > FULL * np.log(np.finfo(x.dtype).max)
                for x in leaves
            )

        if names := [name for name in values if leaves_range(name)]:
            warnings.warn(
                f"learning moved params {names} towards zero or infinity, and the "
                "bound keeps rising on the way. The data do not determine them: "
                "give them a prior, or fix them",
                stacklevel=5,
            )

    def known(self, bound: Array, values: Values) -> Array:
        """Return the bound, or NaN, which rejects a step, if a number has left the
        range of its dtype.

        :param bound: the bound at these values.
        :param values: unconstrained params.
        """
        leaves = jax.tree.leaves(constrained(self.guide, values))
        inside = jnp.stack([jnp.isfinite(x).all() for x in leaves]).all()
        return jnp.where(inside, bound, jnp.nan)


class Batch(NamedTuple):
    """The number of all rows, and the rows of a batch."""

    rows: int
    size: int


def seen_in_batches(
    model: Model, structure: Structure, batch: Batch
) -> tuple[Callable[..., Any], Structure, tuple[str, ...]]:
    """Turn a model at a batch into a model of all data, from which the batch is drawn.

    :param model: the model.
    :param structure: its structure at the batch.
    :param batch: the numbers of rows.
    :return: the model, with weighted observations; the structure; and the plates whose
        members are the rows of the batch.
    :raises ValueError: for a model without a plate for its rows.
    """
    rows, size = batch
    passed = tuple(k for k, p in structure.plates.items() if p == (size, size))
    if not passed:
        plates = {k: tuple(p) for k, p in structure.plates.items()}
        raise ValueError(
            f"no plate has the {size} rows of a batch, and a step uses all of them. "
            'Write plate("data", X.shape[0]), without subsample_size. Plates have '
            f"(size, subsample_size) {plates}"
        )
    drawn = {name: Plate(rows, size) for name in passed}
    weighted = weighted_plates(model, passed, rows / size)
    structure = replace(structure, plates=structure.plates | drawn)
    return weighted, structure, passed


def is_optax(optim: Any) -> bool:
    """Whether this is an optax transformation. The check uses its two functions,
    because importing optax takes time for every user."""
    return (
        callable(getattr(optim, "init", None))
        and callable(getattr(optim, "update", None))
        and not hasattr(optim, "get_params")
    )


def is_identity(transform: Any) -> bool:
    """Whether a transform leaves values as they are."""
    while isinstance(transform, IndependentTransform):
        transform = transform.base_transform
    return isinstance(transform, IdentityTransform)


def free_numbers(values: Values, transforms: dict[str, Any]) -> int:
    """Return the number of unconstrained numbers without a natural scale, such as the
    weights of a network: numbers in params without a constraint.

    :param values: unconstrained params.
    :param transforms: transforms to constrained params, by name.
    """
    free = {k: v for k, v in values.items() if is_identity(transforms[k])}
    return sum(x.size for x in jax.tree.leaves(floats_of(free)))


def transforms_of(guide: ConjugateGuide) -> dict[str, Any]:
    """Return transforms from unconstrained to constrained params, of the model and of
    the guide's other latents, by name."""
    return {name: biject_to(c) for name, c in guide.constraints.items()}


def constrained(guide: ConjugateGuide, values: Values) -> Values:
    """Return constrained params from unconstrained ones."""
    transforms = transforms_of(guide)
    return {k: jax.tree.map(transforms[k], v) for k, v in values.items()}
