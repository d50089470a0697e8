# SPDX-License-Identifier: Apache-2.0
"""Checks of what users pass in; every error names the argument and its shape."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache, partial
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import Array
from numpyro.distributions import constraints

from numpyro_gpaug.distributions.linked import Linked
from numpyro_gpaug.errors import CholeskyError
from numpyro_gpaug.likelihoods.expectations import base_distribution
from numpyro_gpaug.math.sharding import of_this_process, total
from numpyro_gpaug.model.observations import check_shape, unobserved_error
from numpyro_gpaug.model.sources import Sources, sources
from numpyro_gpaug.model.structure import (
    Arguments,
    Block,
    Structure,
    Trace,
    conditional_of,
    flat_functions,
    is_array,
    remembered,
    run_model,
)


def check_arguments(
    model: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    uses: Callable[[], Sources] | None = None,
) -> None:
    """Raises for arrays a fit could only turn into NaN.

    :param model: the model, for the names of its arguments.
    :param args: its arguments.
    :param kwargs: its keyword arguments.
    :param uses: what the model computes from which argument, found only if need be.
    :raises ValueError: for arrays that are empty, not numeric, NaN or infinite, and for
        numbers that would be rounded to other ones. Observations may be NaN: those that
        are not masked are outside of the support, which is checked elsewhere.
    :raises TypeError: for lists of numbers or strings, data frames, sparse matrices,
        and arguments that the model does not take.
    """
    named = _named(model, args, kwargs)
    uses = cache(uses or partial(sources, model, args, kwargs))
    rows = next((len(x) for x in named.values() if is_array(x) and x.ndim), 0)
    for name, value in named.items():
        _check_kind(name, value, rows)
        for leaf in jax.tree.leaves(value):
            traced = isinstance(leaf, jax.core.Tracer)
            if isinstance(leaf, np.ndarray | jax.Array) and not traced:
                _check_array(name, leaf, uses)


def _named(
    model: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    try:
        signature = inspect.signature(model)
    except ValueError:
        return {**{f"argument {i}": a for i, a in enumerate(args)}, **kwargs}
    try:
        return dict(signature.bind_partial(*args, **kwargs).arguments)
    except TypeError as error:
        shapes = [np.shape(x) for x in args]
        names = f" and {sorted(kwargs)} by name" if kwargs else ""
        lacking = [
            f"{p.name}=..."
            for p in signature.parameters.values()
            if p.kind is p.KEYWORD_ONLY and p.name not in kwargs
        ]
        cure = f": pass {', '.join(lacking)} by name" if lacking else ""
        raise TypeError(
            f"{error}: the model takes {signature}, and was given arguments of shapes "
            f"{shapes}{names}{cure}"
        ) from None


def _check_kind(name: str, value: Any, rows: int) -> None:
    if hasattr(value, "to_numpy"):
        raise TypeError(
            f"{name} is a {type(value).__name__}: pass an array ({name}.to_numpy())"
        )
    if hasattr(value, "tocsr"):
        raise TypeError(
            f"{name} is a SciPy sparse matrix of shape {value.shape}: pass an array "
            f"({name}.toarray(), or few columns by numpyro_gpaug.inducing.Subspace)"
        )
    if isinstance(value, np.ma.MaskedArray):
        raise TypeError(
            f"{name} is a masked array of shape {value.shape}: pass {name}.filled(0), "
            "and of observations the mask, for numpyro.handlers.mask(mask=...) around "
            "their site"
        )
    kind = type(value).__name__
    leaves = jax.tree.leaves(value) if kind in ("list", "tuple") else []
    # Short tuples may be shapes of something.
    numbers = all(isinstance(x, int | float | np.number) for x in leaves)
    if leaves and numbers and (kind == "list" or len(leaves) == rows):
        raise TypeError(
            f"{name} is a {kind} of {len(value)}: pass an array (numpy.asarray({name}))"
        )
    # Shorter ones may be names of something.
    if len(leaves) == rows and leaves and all(isinstance(x, str) for x in leaves):
        raise TypeError(f"{name} is a {kind} of {len(value)} strings. {_ENCODE}")


_ENCODE = (
    "Encode labels as 0/1 or 0..C-1, for example with numpy.unique(y, "
    "return_inverse=True)[1]"
)
_COLUMNS = "Encode categories as columns of 0 and 1, one of each"


def _check_array(name: str, value: Any, uses: Callable[[], Sources]) -> None:
    shape = np.shape(value)
    if 0 in shape:
        raise ValueError(f"{name} has shape {shape}: it is empty")
    kind = np.dtype(value.dtype).kind if isinstance(value, np.ndarray) else "f"
    if kind in "OUSMmV":
        raise ValueError(
            f"{name} has shape {shape} and dtype {value.dtype}; expected numbers. "
            f"{_ENCODE if len(shape) == 1 else _COLUMNS}"
        )
    if np.iscomplexobj(value):
        raise ValueError(
            f"{name} has shape {shape} and dtype {value.dtype}; expected real numbers: "
            f"pass {name}.real, or real and imaginary parts as columns"
        )
    _check_precision(name, value, uses)
    if jax.dtypes.issubdtype(value.dtype, np.floating):
        finite = total(lambda x: abs(x) < np.inf, value)
        bad = int(np.size(value) - finite)
        if bad and name not in set(uses().observed) - set(uses().inputs):
            raise ValueError(
                f"{name} has shape {shape} and {bad} NaN or infinite entries; remove "
                "or impute them first. (Missing observations may be NaN under a mask.)"
            )
    elif kind not in "b" and _is_rounded(value) and name in uses().inputs:
        raise ValueError(
            f"{name} has shape {shape} and integers above 2**24, which float32 rounds: "
            "number them from 0 (numpy.unique), or enable 64-bit floats"
        )


def _check_precision(name: str, value: Any, uses: Callable[[], Sources]) -> None:
    """Raises for numbers of which JAX has no kind, or no factorisation."""
    shape, dtype = np.shape(value), np.dtype(value.dtype)
    foreign = not dtype.isnative or (dtype.kind == "f" and dtype.itemsize > 8)
    half = jax.dtypes.issubdtype(dtype, np.floating) and dtype.itemsize < 4
    if foreign or (half and name not in set(uses().observed) - set(uses().inputs)):
        raise ValueError(
            f"{name} has shape {shape} and dtype {dtype.str if foreign else dtype}: "
            f'pass {name}.astype("float32"), or "float64" where 64-bit is enabled'
        )
    if isinstance(value, np.ndarray) and dtype.kind in "iu":
        kept = np.iinfo(jax.dtypes.canonicalize_dtype(dtype))
        if value.min() < kept.min or value.max() > kept.max:
            raise ValueError(
                f"{name} has shape {shape} and integers up to {value.max()}, of which "
                f"JAX would make others ({kept.dtype}): pass counts as floats, or "
                "enable 64-bit numbers"
            )


def _is_rounded(value: Any) -> bool:
    """Whether integers do not fit the default float."""
    if not jax.dtypes.issubdtype(value.dtype, np.integer):
        return False
    limit = 2 / jnp.finfo(jnp.result_type(float)).eps
    return bool(total(lambda x: (x > limit) | (x < -limit), value))


def check_param(name: str, value: Any, constraint: constraints.Constraint) -> None:
    """Raises for an initial param value that is not finite or breaks its constraint.

    :param name: the param.
    :param value: its initial value, possibly a tree.
    :param constraint: its constraint.
    :raises ValueError: naming it and its value.
    """
    for leaf in jax.tree.leaves(value):
        array = np.asarray(leaf)
        if not np.isfinite(array).all() or not np.all(constraint(array)):
            raise ValueError(
                f"param {name!r} of shape {array.shape} starts at {array}, which is "
                f"not finite or does not satisfy {constraint}"
            )


def explain_failure(
    model: Callable[..., Any],
    values: dict[str, Any],
    blocks: tuple[Block, ...],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> NoReturn:
    """Raises for a bound that is not finite, naming the likely cause.

    :param model: the model.
    :param values: params and other latents at the failure.
    :param blocks: its Gaussian blocks.
    :param args: its arguments.
    :param kwargs: its keyword arguments.
    :raises CholeskyError: always.
    """
    broken = [
        name
        for name, value in values.items()
        if not all(np.isfinite(np.asarray(x)).all() for x in jax.tree.leaves(value))
    ]
    if not broken:
        zeros = {b.site: jnp.zeros(b.shape, b.dtype) for b in blocks}
        arguments, key = Arguments.split(args, kwargs), jax.random.key(0)
        trace = run_model(flat_functions(model), arguments, key, {**zeros, **values})
        for block in blocks:
            if block.is_process:
                gp = conditional_of(trace, block).gp
                if not np.isfinite(np.asarray(gp.factor)).all():
                    raise CholeskyError(cholesky_message(gp))
    raise CholeskyError(
        "the evidence lower bound is not finite"
        + (f"; params {broken} are not finite" if broken else "")
        + ". Likely causes: a learning rate that is too large, inputs that are not "
        "standardised, or a kernel that is not finite at these inputs"
    )


def cholesky_message(gp: Any) -> str:
    """Why the inducing matrix of a process may not have factorised."""
    Z = np.asarray(gp.inducing)
    gram = np.asarray(gp.kernel(gp.inducing, gp.inducing))
    rows = np.unique(Z.reshape(-1, Z.shape[-1]), axis=0) if Z.ndim > 1 else np.unique(Z)
    causes = []
    if not np.isfinite(gram).all():
        causes.append("the kernel matrix itself is not finite (hyperparameters?)")
    if Z.ndim == 2 and len(rows) < len(Z):
        causes.append(f"{len(Z) - len(rows)} inducing inputs are duplicates")
    causes.append("the lengthscale is long against the spacing of the inducing inputs")
    jitter = "every jitter" if gp.jitter is None else f"relative jitter {gp.jitter:g}"
    return (
        f'GaussianProcess("{gp.name}"): the Cholesky factorisation of the {gram.shape} '
        f"kernel matrix failed with {jitter} in {gram.dtype}. "
        f"Likely cause: {'; or '.join(causes)}. Use distinct inducing inputs "
        "(numpyro_gpaug.inducing.kmeans), a larger jitter=, or float64"
    )


def check_observations(
    model: Callable[..., Any],
    structure: Structure,
    arguments: Arguments,
    programs: dict[Any, Any] | None = None,
) -> None:
    """Raises for observations outside the support of their likelihood, or parameters
    of it that break their constraints, at initial params; traced ones are not looked
    at.

    :param model: the model.
    :param structure: what it is made of.
    :param arguments: its arguments.
    :param programs: those compiled before, by shapes of arguments.
    :raises ValueError: naming the site and what was expected.
    """
    if any(isinstance(x, jax.core.Tracer) for x in arguments.arrays):
        return
    flat = flat_functions(model)

    def run(arrays: tuple[Array, ...]) -> Trace:
        given = arguments._replace(arrays=arrays)
        return run_model(flat, given, jax.random.key(0), structure.zeros)

    def compiled_flags() -> tuple[list[tuple[str, str]], Any]:
        names: list[tuple[str, str]] = []

        def flags(arrays: tuple[Array, ...]) -> list[Array]:
            trace = run(arrays)
            data = [k for k in (s.name for s in structure.observed) if k in trace]
            if missing := [k for k in data if not trace[k]["is_observed"]]:
                raise unobserved_error(missing)
            found = valid_observations(trace)
            names[:] = found
            return list(found.values())

        return names, jax.jit(flags).lower(arguments.arrays).compile()

    # A guide may be called in a trace that does not concern its arguments. Compiled
    # outside of that context: within it JAX runs constants operation by operation.
    cached = {} if programs is None else programs
    names, compiled = remembered(cached, arguments.shapes, compiled_flags)
    with jax.ensure_compile_time_eval():
        inside_all = compiled(arguments.arrays)
    for (name, parameter), inside in zip(names, inside_all, strict=True):
        # The model may close over values that are traced.
        if not isinstance(inside, jax.core.Tracer) and not inside:
            with numpyro.validation_enabled(is_validate=False):
                message = run(arguments.arrays)[name]
            raise invalid_error(name, parameter, message)


def all_valid(
    model: Callable[..., Any], structure: Structure, arguments: Arguments
) -> Array:
    """Whether :func:`check_observations` has nothing to say; may run inside ``jit``.

    :param model: the model.
    :param structure: what it is made of.
    :param arguments: its arguments.
    """
    flat = flat_functions(model)
    trace = run_model(flat, arguments, jax.random.key(0), structure.zeros)
    found = [jnp.asarray(x) for x in valid_observations(trace).values()]
    return jnp.stack(found).all() if found else jnp.array(True)


def valid_observations(trace: Trace) -> dict[tuple[str, str], Array]:
    """Whether each observed site's value lies in its support, by ``(site, "")``, and
    each parameter of its likelihood satisfies its constraint, by ``(site, parameter)``;
    may run inside ``jit``.

    :param trace: a trace of the model.
    :raises ValueError: for observations of the wrong shape, naming both shapes.
    """
    valid: dict[tuple[str, str], Array] = {}
    for name, site in trace.items():
        if site["type"] != "sample" or not site["is_observed"]:
            continue
        check_shape(name, site)
        fn, value = site["fn"], jnp.asarray(site["value"])
        if isinstance(base_distribution(fn), dist.Unit):
            continue  # numpyro.factor
        inside = fn.support(value)
        if isinstance(fn, dist.MaskedDistribution):
            inside = inside | ~jnp.asarray(fn._mask)
        valid[name, ""] = jnp.all(inside)
        base = base_distribution(fn)
        for k, constraint in base.arg_constraints.items():
            if constraint in (constraints.real, constraints.real_vector):
                continue  # nothing to break, and logits cost a factorisation
            if k in vars(base) and not constraints.is_dependent(constraint):
                value = jnp.asarray(getattr(base, k))
                # What is not finite has a cause of its own (a failed Cholesky, say),
                # which the first steps find.
                finite = jnp.all(jnp.isfinite(value))
                valid[name, k] = jnp.all(constraint(value)) | ~finite
        if isinstance(base, Linked):
            for k, inside in base.valid_parameters().items():
                valid[name, k] = inside
    return valid


def invalid_error(name: str, parameter: str, site: dict[str, Any]) -> ValueError:
    """The error for what :func:`valid_observations` found invalid.

    :param name: the site.
    :param parameter: the parameter that breaks its constraint; empty if it is the
        observations that leave their support.
    :param site: the message of the site, executed.
    """
    base = base_distribution(site["fn"])
    cls = type(base).__name__
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
    hint, shown = "", str(np.unique(value)[:5])
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
        f"site {name!r}: observations of shape {value.shape} take values "
        f"{shown}, outside the support of {cls}{hint}"
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
