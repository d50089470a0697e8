# SPDX-License-Identifier: Apache-2.0
"""Which of a model's arguments its observations and inputs are computed from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax import Array, random

from numpyro_gpaug.gp.process import Conditional
from numpyro_gpaug.likelihoods.expectations import base_distribution
from numpyro_gpaug.model.arguments import Arguments
from numpyro_gpaug.model.jaxpr import dependence_tree
from numpyro_gpaug.model.signatures import argument_names
from numpyro_gpaug.model.structure import Structure, flat_functions, run_model


class Sources(NamedTuple):
    """Names of arguments.

    :param observed: those that observed values are computed from.
    :param inducing: inducing matrices (inducing inputs and hyperparameters).
    :param inputs: inputs of processes, and parameters of likelihoods.
    """

    observed: tuple[str, ...]
    inducing: tuple[str, ...]
    inputs: tuple[str, ...]


def sources(
    model: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    structure: Structure | None = None,
    values: dict[str, Any] | None = None,
) -> Sources:
    """What is computed from which argument; the model is traced without arithmetic.

    :param model: the model.
    :param args: its arguments.
    :param kwargs: its keyword arguments.
    :param structure: of the model, if known; its blocks are then at zero.
    :param values: of params and other latents, where they are known.
    """
    arguments = Arguments.split(args, kwargs)
    inputs = {str(i): a for i, a in enumerate(arguments.arrays)}

    def parts(inputs: dict[str, Array]) -> tuple[list[Any], list[Any], list[Any]]:
        given = arguments._replace(
            arrays=tuple(inputs[str(i)] for i in range(len(inputs)))
        )
        zeros = {} if structure is None else structure.zeros
        filled = {**zeros, **(values or {})}
        trace = run_model(flat_functions(model), given, random.key(0), filled)
        messages = list(trace.values())
        observed = [m for m in messages if m["type"] == "sample" and m["is_observed"]]
        processes = [m["fn"] for m in messages if isinstance(m.get("fn"), Conditional)]
        parameters = [
            vars(base).get(k)
            for base in (base_distribution(m["fn"]) for m in observed)
            for k in base.arg_constraints
        ]
        return (
            [m["value"] for m in observed],
            [f.gp.factor for f in processes],
            [*(f.X for f in processes), *parameters],
        )

    found = dependence_tree(parts, inputs)
    positional = argument_names(model, len(args))
    paths = jax.tree_util.tree_flatten_with_path((args, kwargs))[0]
    names = Arguments.select_arrays(
        (args, kwargs),
        [
            positional[path[1].idx] if path[0].idx == 0 else path[1].key
            for path, _ in paths
        ],
    )
    groups = []
    for group in found:
        states = [leaf.state for leaf in jax.tree.leaves(group)]
        indices = sorted({int(key) for state in states for key in state})
        groups.append(tuple(dict.fromkeys(names[i] for i in indices)))
    return Sources(*groups)
