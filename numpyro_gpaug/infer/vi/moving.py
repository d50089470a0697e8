# SPDX-License-Identifier: Apache-2.0
"""Moving the information about processes from some inducing inputs to others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_gpaug._numpyro import one_thread
from numpyro_gpaug.gaussians.dense import Moments
from numpyro_gpaug.gaussians.projecting import projected
from numpyro_gpaug.gp.conditional import Conditional
from numpyro_gpaug.gp.process import GaussianProcess
from numpyro_gpaug.gp.projection import lead, project
from numpyro_gpaug.math.compiling import few
from numpyro_gpaug.math.linalg import precise
from numpyro_gpaug.model.arguments import Arguments
from numpyro_gpaug.model.sources import sources
from numpyro_gpaug.model.structure import flat_functions, remembered, run_model

# The largest relative difference of elements of a kernel matrix that two calls of the
# same program compute.
_SAME = 1e-4


class InducingMoves:
    """Moves of the inducing inputs of a model, compiled once per pair of shapes.

    :param model: the model.
    """

    def __init__(self, model: Callable[..., Any]) -> None:
        self._model = model
        self._sources: dict[Any, tuple[str, ...]] = {}
        self._program: Any = one_thread(few(self._moved))

    def changed(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        before: dict[str, Any],
        values: dict[str, Any],
    ) -> dict[str, Any]:
        """Return the old values of arguments from which inducing inputs are computed,
        and which have changed.

        :param args: the model's arguments.
        :param kwargs: its keyword arguments.
        :param before: the cached arguments before.
        :param values: values of params and other latents.
        :raises ValueError: for an argument that is the start of a param, because params
            are fixed.
        """
        others = {
            k: v for k, v in before.items() if k in kwargs and not _same(v, kwargs[k])
        }
        if not others:
            return {}
        inducing = self._origins(args, kwargs, values)
        found = {k: v for k, v in others.items() if k in inducing}
        if len(found) < len(others):
            # The initial values of params may depend on the arguments.
            started = self._origins(args, kwargs, {})
            if idle := [k for k in others if k in started and k not in inducing]:
                raise ValueError(
                    f"params of the model start at {idle} and stay at their fitted "
                    "values. A stream moves inducing inputs that are arguments of "
                    "the model, not params"
                )
        return found

    def _origins(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], values: dict[str, Any]
    ) -> tuple[str, ...]:
        """Return the arguments from which inducing matrices are computed."""
        given = Arguments.split(args, kwargs)
        return remembered(
            self._sources, (given.shapes, bool(values)),
            lambda: sources(self._model, *given.merge(), None, values).inducing,
        )  # fmt: skip

    def __call__(
        self,
        before: Arguments,
        after: Arguments,
        values: dict[str, Any],
        moments: dict[str, Moments],
    ) -> tuple[dict[str, Moments], float]:
        """Return moments of all blocks at the new inducing inputs, and the divergence
        of the new processes from the old ones.

        :param before: the model's arguments with the old inducing inputs.
        :param after: the arguments with the new ones.
        :param values: values of params and other latents.
        :param moments: moments of the blocks.
        :raises ValueError: for inducing inputs with other columns or another dtype, and
            for hyperparameters that have changed with them.
        :raises NotImplementedError: for separate inducing inputs per latent.
        """
        moved, lost, shifts = self._program(before, after, values, moments)
        for name, shift in shifts.items():
            if not float(shift) < _SAME:
                raise ValueError(
                    f"the kernel of {name!r} differs at the new arguments. A stream "
                    "moves inducing inputs, and keeps hyperparameters fixed"
                )
        return moved, float(lost)

    @precise
    def _moved(
        self,
        before: Arguments,
        after: Arguments,
        values: Any,
        moments: dict[str, Moments],
    ) -> tuple[dict[str, Moments], Array, dict[str, Array]]:
        old, new = (self._processes(each, values) for each in (before, after))
        moved, lost, shifts = dict(moments), jnp.zeros(()), {}
        for name, gp in old.items():
            _check(name, gp, new[name])
            shifts[name] = _shift(gp, new[name])
            moved[name], each = projected(moments[name], _projection(gp, new[name]))
            lost += each.sum()
        return moved, lost, shifts

    def _processes(
        self, arguments: Arguments, values: Mapping[str, Any]
    ) -> dict[str, GaussianProcess]:
        flat = flat_functions(self._model)
        trace = run_model(flat, arguments, jax.random.key(0), dict(values))
        found = {name: site.get("fn") for name, site in trace.items()}
        return {n: fn.gp for n, fn in found.items() if isinstance(fn, Conditional)}


def _projection(old: GaussianProcess, new: GaussianProcess) -> Array:
    """Return covariances of the whitened values at new inducing inputs, in rows, with
    those at the old ones."""
    cross = project(new, new.whitener, old.inducing)
    return cross.projection @ old.inverse_factor.mT


def _shift(old: GaussianProcess, new: GaussianProcess) -> Array:
    """Return the change of the kernel, relative to its values."""
    grams = [lead(gp.kernel(old.inducing, old.inducing), 2) for gp in (old, new)]
    return jnp.abs(grams[0] - grams[1]).max() / jnp.abs(grams[0]).max()


def _check(name: str, old: GaussianProcess, new: GaussianProcess) -> None:
    shapes = old.inducing.shape, new.inducing.shape
    if any(len(shape) > 2 for shape in shapes):
        raise NotImplementedError(
            f"the inducing inputs of {name!r} have shape {shapes[1]} and had "
            f"{shapes[0]}. A stream moves one set that all latents share, (M, D)"
        )
    if shapes[0][1:] != shapes[1][1:]:
        raise ValueError(
            f"the inducing inputs of {name!r} have shape {shapes[1]} and had "
            f"{shapes[0]}. The number of columns must not change"
        )
    if old.inducing.dtype != new.inducing.dtype:
        raise ValueError(
            f"the inducing inputs of {name!r} have dtype {new.inducing.dtype}, and "
            f"those of the fit {old.inducing.dtype}"
        )


def _same(left: Any, right: Any) -> bool:
    leaves = [jax.tree.leaves(x) for x in (left, right)]
    if len(leaves[0]) != len(leaves[1]):
        return False
    pairs = zip(*leaves, strict=True)
    return all(x is y or np.array_equal(x, y) for x, y in pairs)
