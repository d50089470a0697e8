# SPDX-License-Identifier: Apache-2.0
"""Checks of what users pass in; every error names the argument and its shape."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from numpyro.distributions import constraints

from numpyro_gpaug.errors import CholeskyError
from numpyro_gpaug.structure import (
    Arguments,
    Block,
    conditional_of,
    flat_functions,
    run_model,
)


def check_arguments(
    model: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Raises for arrays a fit could only turn into NaN.

    :param model: the model, for the names of its arguments.
    :param args: its arguments.
    :param kwargs: its keyword arguments.
    :raises ValueError: for arrays that are empty, not numeric, NaN or infinite.
    :raises TypeError: for lists of numbers and data frames.
    """
    for name, value in _named(model, args, kwargs).items():
        _check_kind(name, value)
        for leaf in jax.tree.leaves(value):
            if isinstance(leaf, np.ndarray | jax.Array):
                _check_array(name, leaf)


def _named(
    model: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    try:
        bound = inspect.signature(model).bind_partial(*args, **kwargs)
        return dict(bound.arguments)
    except ValueError:
        return {**{f"argument {i}": a for i, a in enumerate(args)}, **kwargs}


def _check_kind(name: str, value: Any) -> None:
    if hasattr(value, "to_numpy"):
        raise TypeError(
            f"{name} is a {type(value).__name__}: pass an array ({name}.to_numpy())"
        )
    leaves = jax.tree.leaves(value) if isinstance(value, list) else []
    if leaves and all(isinstance(x, int | float) for x in leaves):
        raise TypeError(
            f"{name} is a list of {len(value)}: pass an array (numpy.asarray({name}))"
        )


def _check_array(name: str, value: Any) -> None:
    shape = np.shape(value)
    if 0 in shape:
        raise ValueError(f"{name} has shape {shape}: it is empty")
    kind = np.dtype(value.dtype).kind if isinstance(value, np.ndarray) else "f"
    if kind in "OUS":
        raise ValueError(
            f"{name} has shape {shape} and dtype {value.dtype}; expected numbers. "
            "Encode labels as 0/1 or 0..C-1, for example with numpy.unique(y, "
            "return_inverse=True)[1]"
        )
    if jax.dtypes.issubdtype(value.dtype, np.floating):
        bad = int(np.size(value) - np.isfinite(np.asarray(value)).sum())
        if bad:
            raise ValueError(
                f"{name} has shape {shape} and {bad} NaN or infinite entries; remove "
                "or impute them first"
            )


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
                if not np.isfinite(np.asarray(gp.cholesky)).all():
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
    return (
        f'GaussianProcess("{gp.name}"): the Cholesky factorisation of the {gram.shape} '
        f"kernel matrix failed with relative jitter {gp.jitter:g} in {gram.dtype}. "
        f"Likely cause: {'; or '.join(causes)}. Use distinct inducing inputs "
        "(numpyro_gpaug.inducing.kmeans), a larger jitter=, or float64"
    )
