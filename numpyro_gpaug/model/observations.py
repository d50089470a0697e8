# SPDX-License-Identifier: Apache-2.0
"""Checks that the observations of a model were passed in, have the right shapes, and
are in the supports of their likelihoods."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import Array
from numpyro.distributions import CategoricalLogits, CategoricalProbs, constraints

from numpyro_gpaug.distributions.linked import Linked
from numpyro_gpaug.likelihoods.expectations import base_distribution
from numpyro_gpaug.math.arrays import is_traced
from numpyro_gpaug.math.compiling import ahead
from numpyro_gpaug.math.equations import walked
from numpyro_gpaug.math.sharding import of_this_process, total
from numpyro_gpaug.model.arguments import Arguments
from numpyro_gpaug.model.gaussians import at_prior_means
from numpyro_gpaug.model.latents import Structure
from numpyro_gpaug.model.structure import (
    Trace,
    fixed_key,
    flat_functions,
    from_cache,
    run_model,
)


def unobserved_error(names: Iterable[str]) -> ValueError:
    """Return the error for data that were not passed in.

    :param names: names of the sites that have no observed value but need one.
    """
    quoted = " and ".join(map(repr, names))
    return ValueError(
        f"site {quoted} has no observed value: was an argument left out? Pass the "
        "model its values, and use them at the site, numpyro.sample(..., obs=y)"
    )


def skipped_error(name: str) -> ValueError:
    """Return the error for a site that a model does not reach without observations."""
    return ValueError(
        f"the model has no site {name!r} without observations (is it under an 'if y is "
        "not None'?). Sample it in any case, obs=y, or name its predictor, "
        "numpyro.deterministic('eta', ...), and predict that"
    )


def check_observed(
    model: Callable[..., Any],
    structure: Any,
    arguments: Arguments,
    given: Iterable[str] = (),
) -> None:
    """Raise for a model in which no site has an observed value.

    :param model: the model.
    :param structure: its structure.
    :param arguments: its arguments.
    :param given: sites whose values come from another sampler, and are not data.
    :raises ValueError: naming the last site, which most likely is the observed one.
    """
    if any(site.name not in given for site in structure.observed):
        return
    names: list[str] = []

    def visit(arguments: Arguments) -> None:
        trace = run_model(flat_functions(model), arguments, jax.random.key(0), {})
        names.extend(k for k, site in trace.items() if site["type"] == "sample")

    jax.eval_shape(visit, arguments)
    raise unobserved_error(names[-1:])


def check_shape(name: str, site: dict[str, Any]) -> None:
    """Raise if an observed value does not have the shape of its distribution.

    :param name: the site.
    :param site: its message.
    :raises ValueError: naming both shapes; broadcasting would pair every datum with
        every function value.
    """
    fn, shape = site["fn"], jnp.shape(site["value"])
    expected = tuple(fn.batch_shape) + tuple(fn.event_shape)
    base = base_distribution(fn)
    if shape != expected:
        # Logits of shape (N,) belong to a single datum with N classes.
        single = isinstance(base, CategoricalLogits) and base.logits.shape == shape
        hint = "; for C classes give the process num_latents=C" if single else ""
        if shape[:-1] == expected and not (single or base.event_shape):
            if shape[-1] == 1:
                hint = f"; pass y[..., 0], of shape {expected}"
            elif base.is_discrete:
                hint = (
                    "; labels are one whole number per datum, not columns of 0 and 1: "
                    f"pass y.argmax(-1), of shape {expected}"
                )
        if expected == 2 * shape[-1:] and shape == shape[-1:]:
            hint += (
                f"; a column ({shape[0]}, 1) with rows ({shape[0]},) broadcasts to a "
                "square: index or squeeze the column, X[:, 0]"
            )
        if len(shape) == len(expected) and shape[1:] == expected[1:]:
            hint += "; pass equally many rows of all arguments"
        extra = shape[: len(shape) - len(expected)]
        if extra and not hint and shape == extra + expected:
            hint = (
                "; for data that share it write numpyro.plate('data', "
                f"{extra[-1]}), or .expand({list(extra + fn.batch_shape)})"
            )
        raise ValueError(
            f"site {name!r}: observations have shape {shape}, but the model gives them "
            f"a distribution of shape {expected}{hint}"
        )
    for frame in site.get("cond_indep_stack", ()):
        rows = expected[frame.dim - len(fn.event_shape)]
        if rows != frame.size:  # of size 1; other sizes cannot be broadcast
            raise ValueError(
                f"site {name!r}: observations of shape {shape} are in plate "
                f"{frame.name!r}, which has (or draws) {frame.size} of {rows} rows"
            )
    dtype = jnp.result_type(site["value"])
    if isinstance(base, CategoricalLogits | CategoricalProbs) and not jnp.issubdtype(
        dtype, jnp.integer
    ):
        raise ValueError(
            f"site {name!r}: class labels have dtype {dtype}. Pass y.astype(int)"
        )


def check_distribution(name: str, fn: dist.Distribution) -> None:
    """Raise for a distribution of observations that lacks attributes NumPyro requires.

    :param name: the site.
    :param fn: its distribution.
    :raises TypeError: naming the attribute that its class lacks.
    """
    base = base_distribution(fn)
    cls = type(base)
    if base.support is None:
        raise TypeError(
            f"site {name!r}: {cls.__name__} has no support. Set "
            f"{cls.__name__}.support to a constraint, such as constraints.real or "
            "constraints.nonnegative_integer"
        )
    numbers = [k for k, x in vars(base).items() if isinstance(x, np.ndarray | Array)]
    if numbers and not cls.gather_pytree_data_fields():
        named = ", ".join(f"{k!r}: constraints.real" for k in numbers)
        raise TypeError(
            f"site {name!r}: {cls.__name__} has no arg_constraints, so that its "
            f"parameters are not passed on to JAX's programs. Set {cls.__name__}."
            f"arg_constraints = {{{named}}}, for example"
        )


def check_observations(
    model: Callable[..., Any],
    structure: Structure,
    arguments: Arguments,
    programs: dict[Any, Any] | None = None,
    *,
    needed: bool = True,
) -> None:
    """Raise for observations outside the support of their likelihood, or parameters
    that break their constraints, at initial params. Traced ones are not checked.

    :param model: the model.
    :param structure: its structure.
    :param arguments: its arguments.
    :param programs: compiled programs, by shapes of arguments.
    :param needed: whether observations are required.
    :raises ValueError: naming the site and what was expected.
    """
    if is_traced(arguments):
        return
    run = partial(at_prior, model, structure)

    def compiled_flags() -> tuple[list[tuple[str, str]], Any]:
        names: list[tuple[str, str]] = []

        def flags(arguments: Arguments) -> list[Array]:
            trace = run(arguments)
            data = [k for k in (s.name for s in structure.observed) if k in trace]
            missing = [k for k in data if not trace[k]["is_observed"]]
            if missing and needed:
                raise unobserved_error(missing)
            found = valid_observations(trace)
            names[:] = found
            return list(found.values())

        return names, ahead(flags, arguments)

    cached = {} if programs is None else programs
    names, compiled = from_cache(cached, arguments.shapes, compiled_flags)
    # A guide may be called in a trace that its arguments are not part of.
    check_valid(run, arguments, dict(zip(names, compiled(arguments), strict=True)))


def check_valid(
    run: Callable[[Arguments], Trace],
    arguments: Arguments,
    valid: Mapping[tuple[str, str], Array],
) -> None:
    """Raise if observations or parameters of their likelihoods are not valid.

    :param run: returns a trace of the model at arguments.
    :param arguments: its arguments.
    :param valid: from :func:`valid_observations`; traced ones are not checked.
    :raises ValueError: naming the site and what was expected.
    """
    for (name, parameter), inside in valid.items():
        # The model may close over traced values.
        if not isinstance(inside, jax.core.Tracer) and not inside:
            with numpyro.validation_enabled(is_validate=False):
                message = run(arguments)[name]
            raise invalid_error(name, parameter, message)
    _check_flags(run, arguments, valid)


# Operations that copy numbers or change their dtype.
_MOVES = {"copy", "convert_element_type", "reshape", "broadcast_in_dim", "gather"}


def _check_flags(
    run: Callable[[Arguments], Trace],
    arguments: Arguments,
    parameters: Iterable[tuple[str, str]],
) -> None:
    """Raise for indicators of censoring that are passed as other numbers than 0 and 1:
    NumPyro makes them booleans, so that both of R's codes 1 and 2 are true.

    :param run: returns a trace of the model at arguments.
    :param arguments: its arguments.
    :param parameters: sites and parameters of their likelihoods.
    :raises ValueError: for such numbers; it names the site.
    """
    names = [x for x in parameters if x[1].endswith("censored")]
    if not names or is_traced(arguments):
        return

    def flags(arguments: Arguments) -> list[Any]:
        trace = run(arguments)
        return [getattr(base_distribution(trace[k]["fn"]), x) for k, x in names]

    closed, given = jax.make_jaxpr(flags)(arguments), jax.tree.leaves(arguments)

    def after(eqn: Any, operands: list[Any]) -> list[Any]:
        kept = operands[0] if eqn.primitive.name in _MOVES else None
        return [kept] * len(eqn.outvars)

    found = walked(closed.jaxpr, given, lambda x: None, after, closed.consts)
    for (name, parameter), passed in zip(names, found, strict=True):
        if passed is not None and total(_is_code, passed):
            codes = np.unique(of_this_process(passed))[:5]
            raise ValueError(
                f"site {name!r}: {parameter!r} is computed from numbers {codes}, and "
                "all but 0 count as true. Pass booleans, such as status == 1 of R's "
                "codes, 1 for censored and 2 for an event"
            )


def _is_code(x: Any) -> Any:
    return (x != 0) & (x != 1)


def check_constants(trace: Trace) -> None:
    """Raise for parameters of distributions that are known numbers and break their
    constraints. NumPy checks them, which needs no compilation.

    :param trace: a trace of the model; traced parameters are not checked.
    :raises ValueError: naming the site and what was expected.
    """
    for name, site in trace.items():
        if site["type"] != "sample":
            continue
        base = base_distribution(site["fn"])
        for parameter, constraint in base.arg_constraints.items():
            value = vars(base).get(parameter)
            known = value is not None and not isinstance(value, jax.core.Tracer)
            if not known or constraints.is_dependent(constraint):
                continue
            if not np.all(constraint(np.asarray(value))):
                raise invalid_error(name, parameter, site)


def wrong_labels(trace: Trace, observed: Iterable[str]) -> Iterator[ValueError]:
    """Iterate over the errors for labels that no class has. They index the
    probabilities of the classes, as codes of groups index effects.

    :param trace: a trace of the model; traced or masked labels are not checked.
    :param observed: names of the observed sites.
    """
    for name in observed:
        fn, labels = trace[name]["fn"], trace[name]["value"]
        base = base_distribution(fn)
        classes = isinstance(base, CategoricalProbs | CategoricalLogits)
        if not classes or isinstance(fn, dist.MaskedDistribution):
            continue
        known = not isinstance(labels, jax.core.Tracer)
        if known and not np.all(base.support(of_this_process(labels))):
            yield invalid_error(name, "", trace[name])


def at_prior(
    model: Callable[..., Any],
    structure: Structure,
    arguments: Arguments,
    values: dict[str, Any] | None = None,
    key: Array | None = None,
) -> Trace:
    """Return the trace of a model with its Gaussian latents at their prior means.

    :param model: the model.
    :param structure: its structure.
    :param arguments: its arguments.
    :param values: values of other sites, and of latents to start from.
    :param key: the seed of all other sites.
    """
    flat = at_prior_means(flat_functions(model), tuple(structure.zeros))
    return run_model(flat, arguments, fixed_key() if key is None else key, values or {})


def all_valid(
    model: Callable[..., Any], structure: Structure, arguments: Arguments
) -> Array:
    """Whether :func:`check_observations` would pass; may run inside ``jit``.

    :param model: the model.
    :param structure: its structure.
    :param arguments: its arguments.
    """
    trace = at_prior(model, structure, arguments)
    found = [jnp.asarray(x) for x in valid_observations(trace).values()]
    return jnp.stack(found).all() if found else jnp.array(True)


def valid_observations(trace: Trace) -> dict[tuple[str, str], Array]:
    """Return whether each observed site's value is in its support, by ``(site, "")``,
    and whether each parameter of its likelihood satisfies its constraint, by ``(site,
    parameter)``. It may run inside ``jit``.

    :param trace: a trace of the model.
    :raises ValueError: for observations of the wrong shape, naming both shapes.
    """
    valid: dict[tuple[str, str], Array] = {}
    for name, site in trace.items():
        if site["type"] == "sample" and isinstance(
            areas := base_distribution(site["fn"]), dist.CAR
        ):
            one_way, alone = _graph_faults(areas)
            valid[name, GRAPH] = one_way.sum() + alone.sum() == 0
        if site["type"] != "sample" or not site["is_observed"]:
            continue
        check_shape(name, site)
        fn, value = site["fn"], jnp.asarray(site["value"])
        if isinstance(base_distribution(fn), dist.Unit):
            continue  # numpyro.factor
        check_distribution(name, fn)
        inside = fn.support(value)
        if isinstance(fn, dist.MaskedDistribution):
            inside = inside | ~jnp.asarray(fn._mask)
        valid[name, ""] = jnp.all(inside)
        base = base_distribution(fn)
        for k, constraint in base.arg_constraints.items():
            if constraint in (constraints.real, constraints.real_vector):
                # any value is valid, and computing logits may need a factorisation
                continue
            if k in vars(base) and not constraints.is_dependent(constraint):
                value = jnp.asarray(getattr(base, k))
                # Values that are not finite have another cause (such as a failed
                # Cholesky factorisation), which the first steps report.
                finite = jnp.all(jnp.isfinite(value))
                valid[name, k] = jnp.all(constraint(value)) | ~finite
        if isinstance(base, Linked):
            for k, inside in base.valid_parameters().items():
                valid[name, k] = inside
    return valid


GRAPH = "adj_matrix"


def _graph_faults(areas: dist.CAR) -> tuple[Any, Any]:
    """Return two arrays that should be false: whether only one of each pair of areas
    is a neighbour of the other, (n, n), which is sparse if the graph is, and whether an
    area has no neighbours, (n,)."""
    graph: Any = areas.adj_matrix
    if areas.is_sparse:
        return graph != graph.T, np.asarray((graph != 0).sum(-1)).ravel() == 0
    graph = jnp.asarray(graph)
    return graph != jnp.swapaxes(graph, -1, -2), (graph == 0).all(-1)


def invalid_error(name: str, parameter: str, site: dict[str, Any]) -> ValueError:
    """Return the error for a value that :func:`valid_observations` found invalid.

    :param name: the site.
    :param parameter: the parameter that breaks its constraint; empty if the
        observations are outside their support.
    :param site: the message of the site, executed.
    """
    base = base_distribution(site["fn"])
    cls = type(base).__name__
    if isinstance(base, dist.CAR) and parameter == GRAPH:
        one_way, alone = _graph_faults(base)
        one_way = one_way if base.is_sparse else np.asarray(one_way)
        said = f"areas {np.flatnonzero(alone)[:5]} have no neighbours: give these an "
        said += "effect of their own, dist.Normal, or leave them out"
        if one_way.sum():
            pair = tuple(int(places[0]) for places in one_way.nonzero())
            said = f"it is not symmetric, as at {pair}"
        return ValueError(
            f"site {name!r}: {GRAPH} of CAR, {one_way.shape}, is no graph of "
            f"neighbours: {said}"
        )
    if parameter:
        value = of_this_process(getattr(base, parameter))
        wanted: Any = base.arg_constraints[parameter]
        if constraints.is_dependent(wanted):
            wanted = f"the constraints of {type(base.components()).__name__}"
        return ValueError(
            f"site {name!r}: parameter {parameter!r} of {cls}, of shape {value.shape}, "
            f"takes values {np.unique(value)[:5]}, which do not satisfy {wanted}"
        )
    value = of_this_process(site["value"])
    inside = np.asarray(base.support(value))
    wrong = value[~inside] if inside.shape == value.shape else value
    hint, shown = "", str(np.unique(wrong)[:5])
    if np.isnan(value).any():
        shown = f"{np.isnan(value).sum()} NaN"
        hint = (
            ". Leave out what is missing by numpyro.handlers.mask(mask=...) around the "
            "site"
        )
    elif base.support is constraints.nonnegative_integer:
        hint = ". Counts are whole numbers, 0 or more"
    elif hasattr(base, "total_count"):
        hint = ". Counts are whole numbers from 0 to total_count"
    elif base.is_discrete and value.min() < 0:
        hint = ". Labels are 0/1 (or 0..C-1): convert -1/+1 labels with (y + 1) // 2"
    elif base.is_discrete:
        hint = _hint_of_labels(base, value)
    return ValueError(
        f"site {name!r}: observations of shape {value.shape} contain {shown}, outside "
        f"the support of {cls}{hint}"
    )


def _hint_of_labels(base: dist.Distribution, value: np.ndarray) -> str:
    bound = getattr(base.support, "upper_bound", None)
    known, found = 1 + int(1 if bound is None else bound), len(np.unique(value))
    if found <= known:
        return (
            f". Labels are 0..{known - 1}: numpy.unique(y, return_inverse=True)[1] "
            "numbers them"
        )
    observed = "" if bound is not None else " and observe dist.Categorical(logits=f)"
    return (
        f". The model knows {known} classes: for {found}, numbered 0..{found - 1}, "
        f"give the process num_latents={found}{observed}"
    )
