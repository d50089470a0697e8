# SPDX-License-Identifier: Apache-2.0
"""The arguments of a model from which its observations and inputs are computed."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jax import random

from numpyro_gpaug.gp.conditional import Conditional
from numpyro_gpaug.likelihoods.expectations import base_distribution
from numpyro_gpaug.model.arguments import Arguments
from numpyro_gpaug.model.columns import argument_names
from numpyro_gpaug.model.jaxpr import (
    ALONG,
    axes_of,
    by_place,
    called_jaxpr,
    dependence_on_arrays,
    inputs_of,
)
from numpyro_gpaug.model.latents import Structure
from numpyro_gpaug.model.program import Program
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
        apart = [isinstance(x, dist.Unit) for x in fns]
        terms = [p for p, factor in zip(parameters, apart, strict=True) if factor]
        others = [p for p, factor in zip(parameters, apart, strict=True) if not factor]
        return (
            [m["value"] for m in observed],
            [f.gp.factor if f.gp.markov else f.marks for f in processes],
            terms,
            [[f.X for f in processes], others],
        )

    program = Program(*by_place(parts, arguments))
    observed, inducing, terms, seen = program.outputs
    names = names_of_arrays(model, args, kwargs)
    groups = (
        *map(inputs_of, (observed, inducing, (terms, seen))),
        _pooled(program, seen, arguments),
    )
    indices = (sorted(map(int, group)) for group in groups)
    return Sources(*(tuple(dict.fromkeys(names[i] for i in x)) for x in indices))


def factors_of_rows(
    model: Callable[..., Any],
    names: Collection[str],
    structure: Any,
    arguments: Arguments,
) -> dict[str, bool]:
    """Return the factors that depend on arguments with a row for each datum, which are
    likely to be terms of a likelihood, and whether each is one sum.

    :param model: the model.
    :param names: names of all factors.
    :param structure: the structure of the model.
    :param arguments: its arguments.
    """
    summed: dict[str, bool] = {}

    def terms(given: Arguments) -> dict[str, Any]:
        trace = run_model(flat_functions(model), given, random.key(0), structure.zeros)
        found = {k: base_distribution(trace[k]["fn"]).log_factor for k in names}
        summed.update({k: jnp.ndim(x) == 0 for k, x in found.items()})
        return found

    if not names:
        return summed
    shapes = enumerate(x.shape for x in arguments.arrays)
    rows = {str(i) for i, x in shapes if x[:1] == (arguments.num_rows,)}
    found = dependence_on_arrays(terms, arguments)
    return {k: x for k, x in summed.items() if rows & inputs_of(found[k])}


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


def _pooled(program: Program, seen: Any, arguments: Arguments) -> set[str]:
    """Return the inputs of a program whose rows are pooled on the way to outputs.

    :param program: the program.
    :param seen: the outputs.
    :param arguments: arrays in the order of the inputs.
    """
    rows, found = arguments.num_rows, set[str]()
    wanted = [leaf.variable for leaf in jax.tree.leaves(seen)]
    for eqn, operands, _ in program.between(wanted, ()):
        if rows > 1 and _pools(eqn, rows):
            found |= {k for x in operands for k in program.value(x).state}
    shapes = [x.shape for x in arguments.arrays]
    return {k for k in found if shapes[int(k)][:1] == (rows,)}


def _pools(eqn: Any, rows: int) -> bool:
    """Whether an operation, or one that it calls, combines rows."""
    if (inner := called_jaxpr(eqn)) is not None:
        return any(_pools(each, rows) for each in inner.jaxpr.eqns)
    shape = eqn.invars[0].aval.shape if eqn.primitive.name in _POOLING else ()
    return shape.count(rows) == 1 and shape.index(rows) in axes_of(eqn)
