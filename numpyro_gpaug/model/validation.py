# SPDX-License-Identifier: Apache-2.0
"""Checks of the arguments and params that users pass in, and the likely causes of a
bound that is not finite. Every error names the argument and its shape."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from functools import cache, partial
from inspect import signature
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from numpyro.distributions import constraints

from numpyro_gpaug.distributions.sparse_prior import sparse_prior
from numpyro_gpaug.errors import CholeskyError
from numpyro_gpaug.likelihoods.expectations import base_distribution
from numpyro_gpaug.math.sharding import total
from numpyro_gpaug.math.sparse_terms import indefinite_node
from numpyro_gpaug.model.arguments import Arguments, is_array
from numpyro_gpaug.model.columns import check_dates, is_column
from numpyro_gpaug.model.latents import Structure
from numpyro_gpaug.model.sources import Sources, sources
from numpyro_gpaug.model.structure import Trace, flat_functions, run_model

# All integers below this are float32 numbers.
_LARGE = 2**24


def check_arguments(
    model: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    uses: Callable[[], Sources] | None = None,
) -> None:
    """Raise for arrays that could only turn a fit into NaN.

    :param model: the model, for the names of its arguments.
    :param args: its arguments.
    :param kwargs: its keyword arguments.
    :param uses: returns the use of each argument in the model; called only if
        necessary.
    :raises ValueError: for arrays that are empty, not numeric, NaN or infinite, and for
        numbers that rounding would change. Observations may be NaN: unless masked,
        these are outside of the support, which is checked elsewhere.
    :raises TypeError: for lists of numbers or strings, data frames, sparse matrices,
        and arguments that the model does not have.
    """
    named = _named(model, args, kwargs)
    used = cache(uses or partial(sources, model, args, kwargs))
    rows = next((len(x) for x in named.values() if is_array(x) and x.ndim), 0)
    for name, value in named.items():
        _check_kind(name, value, rows)
        for leaf in jax.tree.leaves(value):
            traced = isinstance(leaf, jax.core.Tracer)
            arrays = isinstance(leaf, np.ndarray | jax.Array)
            if arrays and not traced:
                _check_array(name, leaf, used)


# The number of rows in which the check for values that a dtype does not distinguish
# begins; the number of steps of the dtype within a column below which it goes on; and
# the number of rows that it then compares.
_SEEN, _COARSE, _COMPARED = 256, 2**12, 10**4
# The relative differences that may be rounding of the values themselves (a constant
# column has only these), and the size from which on single-precision values are
# checked.
_OWN, _LARGE_SINGLE = 1e-11, 1e4


def _coarse_columns(array: np.ndarray) -> np.ndarray:
    """Return the columns in which JAX's dtype may make different numbers equal."""
    dtype = jax.dtypes.canonicalize_dtype(array.dtype)
    rows = array[:: max(1, len(array) // _SEEN)]
    columns = rows.reshape(len(rows), -1)
    low, high = columns.min(0), columns.max(0)
    size, spread = np.maximum(abs(low), abs(high)), high - low
    coarse = (spread > 0) & (spread < _COARSE * np.finfo(dtype).eps * size)
    if array.dtype == dtype:
        coarse &= (size > _LARGE_SINGLE) & (dtype.itemsize == 4)
    return np.flatnonzero(coarse & (spread > _OWN * size))


def _warn_of_rounding(name: str, value: np.ndarray) -> None:
    """Warn about columns in which different numbers become equal, as seconds since 1970
    do in float32.

    :param name: the name of the argument.
    :param value: its floats.
    """
    dtype = jax.dtypes.canonicalize_dtype(value.dtype)
    columns = value.reshape(len(value), -1)
    for i in _coarse_columns(value):
        numbers = columns[:_COMPARED, i]
        before, after = (
            len(np.unique(numbers.astype(x))) for x in (value.dtype, dtype)
        )
        steps = np.ptp(numbers) / (np.finfo(dtype).eps * np.abs(numbers).max())
        if after < 0.9 * before or steps < after:
            which = f"column {i} of {name}" if columns.shape[1] > 1 else name
            warnings.warn(
                f"{which} has numbers about {numbers.mean():.6g} that differ by up "
                f"to {np.ptp(numbers):.3g}, and {dtype} distinguishes only {after} "
                f"of them. Subtract a constant before passing them ({name} - "
                f"{name}.min(0)), or enable 64-bit floats",
                stacklevel=6,
            )


def are_moderate(arrays: Iterable[np.ndarray]) -> bool:
    """Whether arrays pass without :func:`check_arguments`, which takes longer than a
    step on a small batch: their numbers are finite, and no dtype rounds or squares them
    to infinity.

    :param arrays: arrays whose shapes and dtypes were checked.
    """
    return all(x.size and -_LARGE < x.min() and x.max() < _LARGE for x in arrays)


def _named(
    model: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    try:
        taken = signature(model)
    except ValueError:
        return {**{f"argument {i}": a for i, a in enumerate(args)}, **kwargs}
    try:
        return dict(taken.bind_partial(*args, **kwargs).arguments)
    except TypeError as error:
        shapes = [np.shape(x) for x in args]
        names = f" and {sorted(kwargs)} by name" if kwargs else ""
        needed = (p for p in taken.parameters.values() if p.default is p.empty)
        lacking = [
            f"{p.name}=..."
            for p in needed
            if p.kind is p.KEYWORD_ONLY and p.name not in kwargs
        ]
        cure = f": pass {', '.join(lacking)} by name" if lacking else ""
        known = {name.lower(): name for name in taken.parameters}
        for name in sorted(set(kwargs) - set(taken.parameters)):
            if like := get_close_matches(name.lower(), known, 1):
                cure += f"; for {name!r}, did you mean {known[like[0]]!r}?"
        raise TypeError(
            f"{error}: the model takes {taken}, and was given arguments of shapes "
            f"{shapes}{names}{cure}"
        ) from None


def _check_kind(name: str, value: Any, rows: int) -> None:
    if is_column(value):
        # Columns of polars have the accessor, whatever they contain.
        coded = hasattr(getattr(value, "cat", None), "codes")
        codes = f"{name}.cat.codes" if coded else name
        if str(getattr(value, "dtype", "")).startswith(("Categorical", "Enum")):
            codes = f"{name}.to_physical()"
        raise TypeError(
            f"{name} is a {type(value).__name__}: pass an array ({codes}.to_numpy())"
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
    # Short tuples may be shapes.
    numbers = all(isinstance(x, int | float | np.number) for x in leaves)
    if leaves and numbers and (kind == "list" or len(leaves) == rows):
        raise TypeError(
            f"{name} is a {kind} of {len(value)}: pass an array (numpy.asarray({name}))"
        )
    # Shorter ones may be names.
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
        raise ValueError(f"{name} has shape {shape} and is empty")
    kind = np.dtype(value.dtype).kind if isinstance(value, np.ndarray) else "f"
    if isinstance(value, np.ndarray):
        check_dates(name, value)
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
        _check_size(name, value, uses)
        if isinstance(value, np.ndarray) and value.ndim:
            _warn_of_rounding(name, value)
    elif kind not in "b" and _is_rounded(value) and name in uses().inputs:
        raise ValueError(
            f"{name} has shape {shape} and integers above 2**24, which float32 "
            "rounds. Subtract the smallest, number them from 0 (numpy.unique), or "
            "enable 64-bit floats"
        )


def _check_size(name: str, value: Any, uses: Callable[[], Sources]) -> None:
    """Raise for entries that are not finite, or whose squares are not (data sets use
    1e20 or 1e36 for missing values), and for inputs whose squares are all zero."""
    dtype = jax.dtypes.canonicalize_dtype(value.dtype)
    # A single number may be the scale of a flat prior.
    largest = math.sqrt(jnp.finfo(dtype).max) if np.ndim(value) else math.inf
    beyond = np.size(value) - total(_is_within, value, largest)
    if not beyond:
        return _check_smallest(name, value, uses)
    if name in set(uses().observed) - set(uses().inputs):
        return None
    bad = np.size(value) - total(_is_within, value, np.inf)
    found = f"{bad} NaN or infinite entries"
    if not bad:
        found = (
            f"{beyond} entries of {largest:.2g} or more, whose squares are not finite "
            f"in {dtype}"
        )
    raise ValueError(
        f"{name} has shape {np.shape(value)} and {found}; remove or impute them first. "
        "(Missing observations may be NaN under a mask.)"
    )


def _check_smallest(name: str, value: Any, uses: Callable[[], Sources]) -> None:
    dtype = jax.dtypes.canonicalize_dtype(value.dtype)
    smallest = math.sqrt(jnp.finfo(dtype).tiny)
    if total(_is_beyond, value, smallest) or not total(_is_beyond, value, 0):
        return
    if name in uses().inputs:
        raise ValueError(
            f"{name} has shape {np.shape(value)} and no entry as large as "
            f"{smallest:.2g}, so that squared distances are zero in {dtype}: choose "
            "other units, or standardise its columns"
        )


def _check_precision(name: str, value: Any, uses: Callable[[], Sources]) -> None:
    """Raise for numbers of a dtype that JAX does not have, or cannot factorise."""
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
                f"{name} has shape {shape} and integers from {value.min()} to "
                f"{value.max()}, which JAX would change ({kept.dtype}). Pass counts as "
                "floats, or enable 64-bit numbers"
            )


def _is_within(x: Any, limit: Any) -> Any:
    return abs(x) < limit


def _is_beyond(x: Any, limit: Any) -> Any:
    return (x > limit) | (x < -limit)


def _is_rounded(value: Any) -> bool:
    """Whether integers do not fit the default float."""
    if not jax.dtypes.issubdtype(value.dtype, np.integer):
        return False
    limit = 2 / jnp.finfo(jnp.result_type(float)).eps
    return bool(total(_is_beyond, value, limit))


def check_param(name: str, value: Any, constraint: constraints.Constraint) -> None:
    """Raise for an initial param value that is not finite or breaks its constraint.

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
    structure: Structure,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> NoReturn:
    """Raise for a bound that is not finite, naming the likely cause.

    :param model: the model.
    :param values: params and other latents at the failure.
    :param structure: the structure of the model.
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
        # Joint latents are drawn from their prior; see check_trace.
        joint = structure.joint
        zeros = {} if joint else structure.zeros
        arguments, key = Arguments.split(args, kwargs), jax.random.key(0)
        trace = run_model(flat_functions(model), arguments, key, {**zeros, **values})
        check_trace(trace, structure)
    tiny = np.finfo(np.float32).tiny
    at_zero = [
        name
        for name in structure.others
        if name in values and np.any(np.abs(np.asarray(values[name])) < tiny)
    ]
    if at_zero and not broken:
        raise CholeskyError(
            f"the point estimate of {at_zero} is zero, where the evidence lower bound "
            "is not finite. Use NestedVI, which integrates it, or a prior whose "
            "density vanishes at zero"
        )
    raise CholeskyError(
        "the evidence lower bound is not finite"
        + (f"; params {broken} are not finite" if broken else "")
        + ". Likely causes: a density or a derivative that is not finite at values "
        "that its latents may take, inputs that are not standardised, a kernel that is "
        "not finite at these inputs, or a learning rate of optax that is too large"
    )


def check_trace(trace: Trace, structure: Structure) -> None:
    """Raise for a kernel matrix without a Cholesky factor, and for priors of Gaussian
    latents and log-densities that are not finite.

    :param trace: the trace of a run. Joint latents are drawn from their prior, over
        which expectations are taken too.
    :param structure: the structure of the model.
    :raises CholeskyError: naming the first site at fault.
    """
    for name in structure.process_names:
        gp = trace[name]["fn"].gp
        if not np.isfinite(np.asarray(gp.factor)).all():
            raise CholeskyError(cholesky_message(gp))
    for name in structure.zeros:
        _check_prior(name, trace[name]["fn"])
    _check_densities(trace)


def _check_prior(name: str, fn: Any) -> None:
    """Raise for a Gaussian latent whose prior is not finite.

    :param name: its site.
    :param fn: its prior.
    """
    base = base_distribution(fn)
    given = {k: x for k, x in vars(base).items() if k in base.arg_constraints}
    broken = [k for k, x in given.items() if is_array(x) and not np.isfinite(x).all()]
    if not broken:
        return _check_precision_of(name, base)
    cause = "a hyperparameter that is too large or too small"
    if "scale_tril" in broken:
        cause = (
            "rounding makes the covariance matrix indefinite. Add to its diagonal, "
            "K + 1e-5 * jnp.eye(n), or use float64"
        )
    raise CholeskyError(
        f"the prior of {name!r}, {type(base).__name__}, is not finite in "
        f"{' and '.join(broken)} of shape {np.shape(given[broken[0]])}. Likely cause: "
        f"{cause}"
    )


def _check_precision_of(name: str, fn: Any) -> None:
    """Raise for a field whose precision is not positive definite.

    :param name: its site.
    :param fn: its prior.
    """
    prior = sparse_prior(fn)
    if prior is None or prior.constraints is not None:
        return
    pattern, values = prior.pattern, np.asarray(prior.values, float)
    shown = f"the precision of {name!r}, {type(fn).__name__}, "
    if not np.isfinite(values).all():
        first = np.argmin(np.isfinite(values))
        place = f"[{pattern.rows[first]}, {pattern.columns[first]}]"
        raise CholeskyError(f"{shown}is {values[first]} at {place}")
    if (found := indefinite_node(pattern, values)) is not None:
        node, left = found
        given = values[pattern.diagonal[node]]
        raise CholeskyError(
            f"{shown}is not positive definite: of {given:.3g} on the diagonal, node "
            f"{node} is left with {left:.2g} when other nodes are eliminated. If rows "
            "add up to zero, the level is free: use gpaug.ICAR, or add a multiple of "
            "the identity, [(a, A), (b, scipy.sparse.eye_array(n))]"
        )


def _check_densities(trace: Trace) -> None:
    """Raise for observed sites whose log-density, or logits, are not finite.

    :param trace: the trace of a run.
    """
    for name, site in trace.items():
        if site["type"] != "sample" or not site["is_observed"]:
            continue
        density = np.asarray(site["fn"].log_prob(site["value"]))
        if (bad := ~np.isfinite(density)).any():
            raise CholeskyError(
                f"the log-density of {name!r} is {density[bad].flat[0]} in {bad.sum()} "
                f"of {bad.size} entries, at plausible values of its latents, and "
                "expectations need it finite. Likely causes: a logarithm of a number "
                "that rounds to zero, as in log1p(-cdf) if cdf rounds to 1 (write the "
                "logarithm of the survival function itself), a parameter outside its "
                "domain (a rate without exp), counts at zero rate or exposure, or far "
                "too wide priors"
            )
        logits = vars(base_distribution(site["fn"])).get("logits")
        if logits is not None and (bad := ~np.isfinite(np.asarray(logits))).any():
            raise CholeskyError(
                f"the logits of {name!r} are {np.asarray(logits)[bad].flat[0]} in "
                f"{bad.sum()} of {bad.size} entries. To exclude a choice use a finite "
                "number, jnp.where(available, logits, -1e9)"
            )


def cholesky_message(gp: Any) -> str:
    """Explain why the inducing matrix of a process may not have a Cholesky factor."""
    if gp.markov:
        return f'GaussianProcess("{gp.name}"): its kernel is not finite'
    Z = np.asarray(gp.inducing)
    gram = np.asarray(gp.kernel(gp.inducing, gp.inducing))
    rows = np.unique(Z.reshape(-1, Z.shape[-1]), axis=0) if Z.ndim > 1 else np.unique(Z)
    causes = []
    if not np.isfinite(gram).all():
        causes.append("the kernel matrix itself is not finite (hyperparameters?)")
    if Z.ndim == 2 and len(rows) < len(Z):
        causes.append(f"{len(Z) - len(rows)} inducing inputs are duplicates")
    variances = np.diagonal(gram, axis1=-2, axis2=-1)
    if (variances < 0).any():
        causes = [f"the kernel gives negative variances, such as {variances.min():.3g}"]
    else:
        causes.append(
            "the lengthscale is long compared with the spacing of inducing inputs"
        )
    jitter = "every jitter" if gp.jitter is None else f"relative jitter {gp.jitter:g}"
    return (
        f'GaussianProcess("{gp.name}"): the Cholesky factorisation of the {gram.shape} '
        f"kernel matrix failed with {jitter} in {gram.dtype}. "
        f"Likely cause: {'; or '.join(causes)}. Use distinct inducing inputs "
        "(numpyro_gpaug.inducing.kmeans), a larger jitter=, or float64"
    )
