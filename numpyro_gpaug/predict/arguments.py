# SPDX-License-Identifier: Apache-2.0
"""The arguments of a fit that its predictions go on using."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax import Array, random

from numpyro_gpaug.model.jaxpr import dependence_tree
from numpyro_gpaug.model.structure import (
    Arguments,
    Structure,
    conditional_of,
    flat_functions,
    is_array,
    run_model,
)
from numpyro_gpaug.model.validation import check_arguments


class FitArguments(NamedTuple):
    """What a posterior knows of the arguments of its fit.

    :param kwargs: keyword arguments of the fit, observations left out.
    :param observations: names of the arguments that hold observations.
    :param shared: names of those that have no row per datum.
    :param data: positional arguments, and keyword arguments that hold observations,
        every array by its shape.
    """

    kwargs: dict[str, Any]
    observations: tuple[str, ...]
    shared: tuple[str, ...]
    data: tuple[tuple[Any, ...], dict[str, Any]]

    @classmethod
    def of_fit(
        cls,
        model: Callable[..., Any],
        structure: Structure,
        values: dict[str, Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> FitArguments:
        """From the arguments of a fit.

        :raises ValueError: if inducing inputs or hyperparameters are computed from a
            positional argument, which changes at prediction.
        """
        observations, inducing = _sources(model, structure, values, args, kwargs)
        parameters = list(inspect.signature(model).parameters)
        if lost := [name for name in inducing if name in parameters[: len(args)]]:
            raise ValueError(
                f"inducing inputs or hyperparameters are computed from {lost}, which "
                "change at prediction: pass them by keyword (inducing=Z), or make them "
                "params"
            )
        kept = {k: v for k, v in kwargs.items() if k not in observations}
        rows = {n for p in structure.plates.values() for n in p}
        rows |= {f.shape[0] for f in structure.functions.values()}
        named = {**dict(zip(parameters, args, strict=False)), **kept}
        # What inducing matrices are computed from has no row per datum, whatever its
        # length.
        shared = tuple(
            k
            for k, v in named.items()
            if k in inducing or (rows and not _has_rows(v, rows))
        )
        data = args, {k: v for k, v in kwargs.items() if k not in kept}
        return cls(kept, observations, shared, jax.tree.map(_by_shape, data))

    def joined(
        self, model: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Arguments, tuple[bool, ...]]:
        """The model's arguments, and which of their arrays run over rows: those just
        passed in whose leading axis is that of the first."""
        check_arguments(model, args, kwargs)
        merged = {**self.kwargs, **kwargs}
        arguments = Arguments.split(args, merged)
        parameters = list(inspect.signature(model).parameters)
        by_row_named = [name not in self.shared for name in parameters[: len(args)]]
        by_row_named += [True] * (len(args) - len(by_row_named))
        is_new = (
            tuple(
                jax.tree.map(lambda _, flag=flag: flag, a)
                for flag, a in zip(by_row_named, args, strict=True)
            ),
            {
                k: jax.tree.map(lambda _, k=k: k in kwargs and k not in self.shared, v)
                for k, v in merged.items()
            },
        )
        flags = Arguments.select_arrays((args, merged), jax.tree.leaves(is_new))
        pairs = list(zip(flags, arguments.arrays, strict=True))
        rows = [a.shape[0] for flag, a in pairs if flag and a.ndim]
        if not rows or rows[0] == 0:
            raise ValueError(
                "pass the new inputs: arrays with one row per point, got shapes "
                f"{[a.shape for _, a in pairs]}"
            )
        by_row = tuple(
            flag and a.ndim > 0 and a.shape[0] == rows[0] for flag, a in pairs
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


def _by_shape(leaf: Any) -> Any:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if is_array(leaf) else leaf


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
        trace = run_model(flat_functions(model), given, random.key(0), filled)
        factors = [conditional_of(trace, b).gp.cholesky for b in structure.processes]
        return [trace[site.name]["value"] for site in structure.observed], factors

    found = dependence_tree(parts, inputs)
    positional = list(inspect.signature(model).parameters)
    paths = jax.tree_util.tree_flatten_with_path((args, kwargs))[0]
    names = Arguments.select_arrays(
        (args, kwargs),
        [
            positional[path[1].idx] if path[0].idx == 0 else path[1].key
            for path, _ in paths
        ],
    )
    sources = []
    for group in found:
        states = [leaf.state for leaf in jax.tree.leaves(group)]
        indices = sorted({int(key) for state in states for key in state})
        sources.append(tuple(dict.fromkeys(names[i] for i in indices)))
    return sources[0], sources[1]
