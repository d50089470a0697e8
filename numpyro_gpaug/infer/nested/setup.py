# SPDX-License-Identifier: Apache-2.0
"""The collapsed bounds of a model, found before its Gaussian latents are integrated."""

from __future__ import annotations

from typing import Any

from numpyro_gpaug._numpyro import one_thread
from numpyro_gpaug.errors import NotConjugateError
from numpyro_gpaug.guides import AutoLatentGaussian
from numpyro_gpaug.infer.nested.bound import CollapsedBound
from numpyro_gpaug.infer.nested.group_draws import FEWEST
from numpyro_gpaug.infer.nested.programs import Programs
from numpyro_gpaug.infer.vi.checks import check_fit
from numpyro_gpaug.math.arrays import is_traced
from numpyro_gpaug.model.arguments import Arguments, Model, Values
from numpyro_gpaug.model.costs import Purpose
from numpyro_gpaug.model.observations import check_observations
from numpyro_gpaug.model.structure import from_cache

# The largest number of hyperparameters for importance sampling; with more, NUTS is
# used, since k-hat detects errors less well. With more than the smaller number, NUTS
# also follows draws that are not certified, and models need Gaussian latents.
MOST, FEW = 16, 8


class _Left:
    """A substitute for an autoguide that leaves all other latents to the caller.

    :param model: the model of those latents.
    """

    def __init__(self, model: Model) -> None:
        self.model = model

    def __call__(self, *args: Any, **kwargs: Any) -> Values:
        return {}


class _OfManyPoints(AutoLatentGaussian):
    """The profile of fits at many hyperparameters: groups are represented as groups if
    there are enough of them for separate weights."""

    _purpose = Purpose(FEWEST, FEW)


class CollapsedBounds:
    """The collapsed bounds of a model, by shapes of its arguments.

    :param model: the model.
    :param projected: see :class:`~numpyro_gpaug.infer.nested.bound.CollapsedBound`.
    """

    def __init__(self, model: Model, *, projected: bool) -> None:
        self.model, self._projected = model, projected
        self._known: dict[Any, CollapsedBound] = {}
        self._programs: dict[Any, Programs] = {}
        self._checks: dict[Any, Any] = {}
        self._seen: Any = None

    @one_thread
    def at(
        self, arguments: Arguments, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> CollapsedBound:
        """Return the bound for arguments of these shapes. The model is read for them,
        and again only if other data do not have the structure that was found. The
        values of traced data are not checked.

        :param arguments: the model's arguments.
        :param args: the positional arguments as passed by the user.
        :param kwargs: the keyword arguments likewise.
        :raises NotConjugateError: for a model that is not of this form.
        :raises ValueError: for invalid arguments, which it names, and for plates that
            draw a subsample.
        """

        def made() -> CollapsedBound:
            guide = _OfManyPoints(self.model, other=_Left)
            check_fit(self.model, guide, "exact", args, kwargs)
            structure = guide.structure
            if structure.subsampled:
                raise ValueError(
                    f"plates {sorted(structure.subsampled)} draw a subsample, but "
                    "hyperparameters are integrated on full data only. "
                    "ConjugateSVI(model, AutoLatentGaussian(model), "
                    "optax.adam(0.01)) gives point estimates on minibatches"
                )
            if not structure.form.factorised:
                raise NotConjugateError(
                    f"hyperparameters are not integrated over a precision of "
                    f"{structure.size} latents that is not factorised. "
                    "ConjugateSVI(model, AutoLatentGaussian(model)) gives point "
                    "estimates, and Gaussians on the latents"
                )
            check_observations(self.model, structure, arguments, self._checks)
            return CollapsedBound(guide, structure, projected=self._projected)

        if is_traced(arguments):
            return from_cache(self._known, arguments.shapes, made)
        data = arguments.shapes, int(arguments.data)
        known = self._known.get(arguments.shapes)
        if known is not None and data == self._seen:
            return known
        if known is None or not self._fits(known, arguments, args, kwargs):
            self._known.pop(arguments.shapes, None)
            known = from_cache(self._known, arguments.shapes, made)
        self._seen = data
        return known

    @one_thread
    def programs(
        self, bound: CollapsedBound, arguments: Arguments, num_draws: int
    ) -> Programs:
        """Return the programs of a bound at arguments of these shapes.

        :param bound: from :meth:`at`.
        :param arguments: the model's arguments.
        :param num_draws: draws of the latents at each point.
        """
        key = bound, arguments.shapes, num_draws
        return from_cache(
            self._programs, key, lambda: Programs(bound, arguments, num_draws)
        )

    @one_thread
    def turned(self, arguments: Arguments, values: Values) -> bool:
        """Whether the bound for these arguments is now in a basis of the latents in
        which rounding preserves more; see
        :meth:`~numpyro_gpaug.AutoLatentGaussian.turn`.

        :param arguments: the model's arguments.
        :param values: hyperparameters by name.
        """
        guide = self._known[arguments.shapes].guide
        if guide.structure.basis is not None or not guide.turn(arguments, values):
            return False
        self._known[arguments.shapes] = CollapsedBound(
            guide, guide.structure, projected=self._projected
        )
        return True

    def _fits(
        self, known: CollapsedBound, arguments: Arguments, args: Any, kwargs: Any
    ) -> bool:
        """Whether valid data have the structure of a bound. If not, reading the model
        finds another one, or says what is wrong."""
        try:
            check_fit(self.model, known.guide, "exact", args, kwargs)
        except (NotConjugateError, ValueError):
            return False
        check_observations(self.model, known.structure, arguments, self._checks)
        return known.guide.structure is known.structure
