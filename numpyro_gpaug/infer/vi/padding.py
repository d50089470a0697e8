# SPDX-License-Identifier: Apache-2.0
"""Rows added, of no weight, so that data of similar size share compiled programs: the
folds of a cross-validation have 2691 rows, or 2692."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jax import Array
from jax.sharding import Mesh

from numpyro_gpaug.guides import ConjugateGuide
from numpyro_gpaug.infer.vi.latent_gaussian import LatentGaussian
from numpyro_gpaug.infer.vi.plan import Settings
from numpyro_gpaug.infer.vi.programs import Programs
from numpyro_gpaug.infer.vi.stepper import Stepper
from numpyro_gpaug.math.sharding import ROWS
from numpyro_gpaug.model.arguments import Arguments
from numpyro_gpaug.model.latents import JointStructure
from numpyro_gpaug.model.rows import rows_apart
from numpyro_gpaug.model.structure import remembered

# At most one row in as many is added.
_GRAIN = 32
# With more, compiling is a small part of a fit, and copies of the data are large.
_MAX_ROWS = 2**17

Shapes = dict[str, tuple[tuple[int, ...], ...]]


class SharedRows:
    """Arguments with rows that do not count, where a fit to them is proved to be the
    same: programs are then shared by data of similar size.

    :param guide: the guide.
    :param settings: options of the fit.
    :param programs: of the fit.
    :param mesh: where rows are to be shared out.
    """

    def __init__(
        self,
        guide: ConjugateGuide,
        settings: Settings,
        programs: Programs,
        mesh: Mesh | None,
    ) -> None:
        self._guide, self._settings, self._mesh = guide, settings, mesh
        self._programs = programs
        # By the shapes of the arguments: whether a fit is the same.
        self.same: dict[Any, bool] = {}

    def __call__(self, arguments: Arguments, key: Array) -> Arguments:
        """The arguments, with added rows or without.

        :param arguments: of the model.
        :param key: random key of the fit.
        """
        return self._shared(arguments, key).on(self._mesh)

    def _shared(self, arguments: Arguments, key: Array) -> Arguments:
        size = padded_size(
            arguments, 1 if self._mesh is None else self._mesh.shape[ROWS]
        )
        joint = isinstance(self._guide.structure, JointStructure)
        if size is None or joint or self._settings.m_step:
            return arguments

        def begin(at: Arguments) -> Any:
            # Not made in a trace: transforms have constants of their own.
            self._programs.plan(at, dict)
            natural = self._guide.initial_natural({})
            return self._programs.begin.plain.trace(
                at.arrays, key, {}, natural, static=at.static, batch=None
            )

        def problem(at: Arguments, values: Any) -> LatentGaussian:
            stepper = Stepper(self._programs.plan(at, dict), self._settings, at)
            return stepper.problem(values, key, {})

        def same() -> bool:
            structure = self._guide.structure_at(arguments)
            check = partial(same_with_rows, begin, problem, arguments, size)
            noisy = structure.subsampled or self._guide.random_others
            if not noisy and self._guide.same_with_rows(arguments, more, check):
                return True
            self._programs.plans.pop(more.shapes, None)
            return False

        more = arguments.with_rows(size)
        proved = remembered(self.same, arguments.shapes, same)
        return more if proved else arguments


def padded_size(arguments: Arguments, parts: int = 1) -> int | None:
    """Return the number of rows that programs are compiled for; ``None`` if the rows of
    the first array stay as they are.

    :param arguments: of a model; rows that are on several devices are left there.
    :param parts: that they are to come in.
    """
    num = arguments.num_rows
    traced = any(isinstance(x, jax.core.Tracer) for x in arguments.arrays)
    if traced or not num or arguments.mesh is not None:
        return None
    step = 1 if num > _MAX_ROWS else max(1, 2 ** (num.bit_length() - 1) // _GRAIN)
    step = math.lcm(step, parts)
    size = -(-num // step) * step
    return None if size == num else size


def same_with_rows(
    begin: Callable[[Arguments], Any],
    problem: Callable[[Arguments, Any], LatentGaussian],
    arguments: Arguments,
    size: int,
) -> bool:
    """Whether added rows change nothing: every number that is not of a row stays as it
    is, and the likelihood gives no weight to what is added.

    :param begin: traces the start of a fit, from arguments.
    :param problem: the problem, from arguments and hyperparameters.
    :param arguments: those without added rows.
    :param size: the number of rows with.
    """
    num = arguments.num_rows
    shapes: list[Shapes] = []

    def traced(at: Arguments, values: Any) -> Any:
        def fn(arrays: Any, values: Any) -> LatentGaussian:
            found = problem(at._replace(arrays=arrays), values)
            shapes.append(_site_shapes(found))
            return found

        return jax.make_jaxpr(fn)(at.arrays, values)

    few, many = (arguments.with_rows(n) for n in (num, size))
    try:
        starts = begin(few), begin(many)
        values, others = (start.out_info[0].hyper.values for start in starts)
        if values != others:
            return False
        problems = [traced(at, values) for at in (few, many)]
    except (TypeError, ValueError):  # of shapes that do not fit
        return False
    return (
        rows_apart(*(start.jaxpr for start in starts))
        and rows_apart(*problems)
        and all(_in_plates(shapes[0][site], shapes[1][site]) for site in shapes[0])
    )


def _site_shapes(problem: LatentGaussian) -> Shapes:
    """Return batch and event shapes of every observed site, and the shape of its
    weights."""
    expected: Any = problem.likelihood
    return {
        name: (fn.batch_shape, fn.event_shape, getattr(scale, "shape", ()))
        for name, (fn, _, scale) in expected.likelihoods.items()
    }


def _in_plates(few: tuple[Any, ...], many: tuple[Any, ...]) -> bool:
    """Whether a site has rows along its plates alone, where they have weights."""
    batch, event, weights = (_differing(*pair) for pair in zip(few, many, strict=True))
    return not event and batch == weights


def _differing(few: tuple[int, ...], many: tuple[int, ...]) -> set[int]:
    """Return axes, counted from the last, along which sizes differ."""
    pairs = zip(reversed(few), reversed(many), strict=True)
    return {-1 - i for i, (a, b) in enumerate(pairs) if a != b}
