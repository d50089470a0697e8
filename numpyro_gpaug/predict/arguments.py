# SPDX-License-Identifier: Apache-2.0
"""The arguments of a fit that its predictions go on using."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, random

from numpyro_gpaug.model.jaxpr import dependences
from numpyro_gpaug.model.structure import (
    Arguments,
    Structure,
    conditional_of,
    is_array,
    run_model,
)
from numpyro_gpaug.model.validation import check_arguments


class Remembered(NamedTuple):
    """What a posterior knows of the arguments of its fit.

    :param kwargs: keyword arguments of the fit, observations left out.
    :param observations: names of the arguments that hold observations.
    :param shared: names of those in ``kwargs`` that have no row per datum.
    """

    kwargs: dict[str, Any]
    observations: tuple[str, ...]
    shared: tuple[str, ...]

    @classmethod
    def of_fit(
        cls,
        model: Callable[..., Any],
        structure: Structure,
        values: dict[str, Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Remembered:
        """From the arguments of a fit.

        :raises ValueError: if inducing inputs or hyperparameters are computed from a
            positional argument, which changes at prediction.
        """
        observations, inducing = _sources(model, structure, values, args, kwargs)
        positional = list(inspect.signature(model).parameters)[: len(args)]
        if lost := [name for name in inducing if name in positional]:
            raise ValueError(
                f"inducing inputs or hyperparameters are computed from {lost}, which "
                "change at prediction: pass them by keyword (inducing=Z), or make them "
                "params"
            )
        kept = {k: v for k, v in kwargs.items() if k not in observations}
        rows = {n for p in structure.plates.values() for n in p}
        shared = tuple(k for k, v in kept.items() if not _has_rows(v, rows))
        return cls(kept, observations, shared)

    def joined(
        self, model: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Arguments, tuple[bool, ...]]:
        """The model's arguments, and which of their arrays run over rows: those just
        passed in whose leading axis is that of the first."""
        check_arguments(model, args, kwargs)
        merged = {**self.kwargs, **kwargs}
        arguments = Arguments.split(args, merged)
        passed = [*args, *(kwargs[k] for k in kwargs if k not in self.shared)]
        arrays = [a for a in map(jnp.shape, jax.tree.leaves(passed)) if a]
        if not arrays or arrays[0][0] == 0:
            raise ValueError(
                "pass the new inputs: arrays with one row per point, got shapes "
                f"{arrays}"
            )
        is_new = (
            jax.tree.map(lambda _: True, args),
            {k: jax.tree.map(lambda _, k=k: k in kwargs, v) for k, v in merged.items()},
        )
        flags = Arguments.select_arrays((args, merged), jax.tree.leaves(is_new))
        by_row = tuple(
            flag and a.ndim > 0 and a.shape[0] == arrays[0][0]
            for flag, a in zip(flags, arguments.arrays, strict=True)
        )
        return arguments, by_row

    def without_observations(
        self, model: Callable[..., Any], given: int
    ) -> dict[str, None]:
        """``None`` for observation arguments not passed that have no default.

        :param model: the model.
        :param given: how many positional arguments were passed.
        """
        parameters = list(inspect.signature(model).parameters.values())[given:]
        return {
            p.name: None
            for p in parameters
            if p.name in self.observations and p.default is p.empty
        }


def _has_rows(tree: Any, rows: set[int]) -> bool:
    arrays = (x for x in jax.tree.leaves(tree) if is_array(x))
    return any(x.ndim and x.shape[0] in rows for x in arrays)


def _sources(
    model: Callable[..., Any],
    structure: Structure,
    values: dict[str, Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names of the arguments that observed values, and inducing matrices, are computed
    from."""
    arguments = Arguments.split(args, kwargs)
    inputs = {str(i): a for i, a in enumerate(arguments.arrays)}

    def parts(inputs: dict[str, Array]) -> tuple[list[Any], list[Any]]:
        given = arguments._replace(
            arrays=tuple(inputs[str(i)] for i in range(len(inputs)))
        )
        filled = {**structure.zeros, **values}
        trace = run_model(model, given, random.key(0), filled)
        processes = [b for b in structure.blocks if b.is_process]
        factors = [conditional_of(trace, b).gp.cholesky for b in processes]
        return [trace[site.name]["value"] for site in structure.observed], factors

    states = dependences(parts, inputs)
    positional = list(inspect.signature(model).parameters)
    paths = jax.tree_util.tree_flatten_with_path((args, kwargs))[0]
    names = Arguments.select_arrays(
        (args, kwargs),
        [
            positional[path[1].idx] if path[0].idx == 0 else path[1].key
            for path, _ in paths
        ],
    )
    split = len(structure.observed)
    found = []
    for group in (states[:split], states[split:]):
        indices = sorted({int(key) for state in group for key in state})
        found.append(tuple(dict.fromkeys(names[i] for i in indices)))
    return found[0], found[1]
