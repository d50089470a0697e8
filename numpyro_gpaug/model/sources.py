# SPDX-License-Identifier: Apache-2.0
"""The arguments of a model from which its observations and inputs are computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpyro.distributions as dist
from jax import random

from numpyro_gpaug.gp.conditional import Conditional
from numpyro_gpaug.likelihoods.expectations import base_distribution
from numpyro_gpaug.math.equations import walked
from numpyro_gpaug.model.arguments import Arguments
from numpyro_gpaug.model.columns import argument_names
from numpyro_gpaug.model.jaxpr import (
    ALONG,
    Dependence,
    Leaf,
    axes_of,
    by_place,
    called_jaxpr,
    dependences,
    jaxpr_and_tree,
)
from numpyro_gpaug.model.latents import Structure
from numpyro_gpaug.model.structure import flat_functions, run_model

# Operations that reduce many numbers to one or sort them.
_POOLING = {k for k in ALONG if k[:3] != "cum"} - {"reduce_and", "reduce_or"}


class Sources(NamedTuple):
    """Names of arguments, by their use.

    :param observed: arguments that observed values are computed from.
    :param inducing: inducing matrices (inducing inputs and hyperparameters).
    :param inputs: inputs of processes, and parameters of likelihoods.
    :param pooled: arguments whose rows are combined by a sum, an extreme or an order on
        the way to inputs. The inputs then depend on which rows are passed together.
    """

    observed: tuple[str, ...]
    inducing: tuple[str, ...]
    inputs: tuple[str, ...]
    pooled: tuple[str, ...] = ()


def sources(
    model: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    structure: Structure | None = None,
    values: dict[str, Any] | None = None,
) -> Sources:
    """Return the use of each argument; the model is traced without arithmetic.

    :param model: the model.
    :param args: its arguments.
    :param kwargs: its keyword arguments.
    :param structure: the structure of the model, if known; its blocks are then at zero.
    :param values: values of params and other latents, where they are known.
    """
    arguments = Arguments.split(args, kwargs)

    def parts(given: Arguments) -> tuple[list[Any], ...]:
        zeros = {} if structure is None else structure.zeros
        filled = {**zeros, **(values or {})}
        trace = run_model(flat_functions(model), given, random.key(0), filled)
        messages = list(trace.values())
        observed = [m for m in messages if m["type"] == "sample" and m["is_observed"]]
        processes = [m["fn"] for m in messages if isinstance(m.get("fn"), Conditional)]
        fns = [base_distribution(m["fn"]) for m in observed]
        parameters = [[vars(x).get(k) for k in x.arg_constraints] for x in fns]
        # Factors are terms of the density, and may be sums over rows.
        terms = [p for x, p in zip(fns, parameters, strict=True) if _is_factor(x)]
        others = [p for x, p in zip(fns, parameters, strict=True) if not _is_factor(x)]
        return (
            [m["value"] for m in observed],
            [f.gp.factor if f.gp.markov else f.marks for f in processes],
            terms,
            [[f.X for f in processes], others],
        )

    named, inputs = by_place(parts, arguments)
    closed, treedef = jaxpr_and_tree(named, inputs)
    observed, inducing, terms, seen = dependences(closed, treedef, inputs)
    *_, pooled = jax.tree.unflatten(
        treedef, [Leaf(x) for x in pooled_inputs(closed, list(inputs), arguments)]
    )
    names = names_of_arrays(model, args, kwargs)
    groups = []
    for group in (observed, inducing, (terms, seen), pooled):
        states = [leaf.state for leaf in jax.tree.leaves(group)]
        indices = sorted({int(key) for state in states for key in state})
        groups.append(tuple(dict.fromkeys(names[i] for i in indices)))
    return Sources(*groups)


def names_of_arrays(
    model: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[str]:
    """Return, for every array of ``Arguments.split(args, kwargs)``, the name of the
    argument that contains it.

    :param model: the model.
    :param args: its arguments.
    :param kwargs: its keyword arguments.
    """
    positional = argument_names(model, len(args))
    paths = jax.tree_util.tree_flatten_with_path((args, kwargs))[0]
    of_leaves = [
        positional[path[1].idx] if path[0].idx == 0 else path[1].key
        for path, _ in paths
    ]
    return Arguments.select_arrays((args, kwargs), of_leaves)


def _is_factor(fn: dist.Distribution) -> bool:
    return isinstance(fn, dist.Unit)


def pooled_inputs(
    closed: Any, names: list[str], arguments: Arguments
) -> list[dict[str, Dependence]]:
    """Return, for every result of a program, the inputs whose rows it pools.

    :param closed: the program.
    :param names: names of its inputs.
    :param arguments: arrays in the order of the inputs.
    """
    rows = arguments.num_rows
    starts = [
        ({name} if x.ndim and len(x) == rows else set(), set[str]())
        for name, x in zip(names, arguments.arrays, strict=True)
    ]
    found = _pooled(closed.jaxpr, starts, rows)
    return [dict.fromkeys(pooled, Dependence(None, None)) for _, pooled in found]


_Reached = tuple[set[str], set[str]]


def _pooled(jaxpr: Any, starts: list[_Reached], rows: int) -> list[_Reached]:
    """Return the inputs that reach each result, and those pooled on the way."""

    def after(eqn: Any, operands: list[_Reached]) -> list[_Reached]:
        inner = called_jaxpr(eqn)
        if inner is not None and len(inner.jaxpr.invars) == len(operands):
            return _pooled(inner.jaxpr, operands, rows)
        reach: set[str] = set().union(*(x for x, _ in operands))
        pooled: set[str] = set().union(*(x for _, x in operands))
        if eqn.primitive.name in _POOLING and rows > 1:
            shape = eqn.invars[0].aval.shape
            if shape.count(rows) == 1 and shape.index(rows) in axes_of(eqn):
                pooled |= reach
        return [(reach, pooled)] * len(eqn.outvars)

    nothing: _Reached = set(), set()
    constants = [nothing] * len(jaxpr.constvars)
    return walked(jaxpr, starts, lambda x: nothing, after, constants)
