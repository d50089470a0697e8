# SPDX-License-Identifier: Apache-2.0
"""Checks of the calls of fits and predictions: keys, counts, initial values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from numpyro_gpaug.model.arguments import is_array
from numpyro_gpaug.model.columns import by_name
from numpyro_gpaug.model.latents import JOINT, Structure
from numpyro_gpaug.model.sources import sources


def check_key(key: Any) -> None:
    """Raise unless the argument is a random key.

    :param key: the first argument of a function that draws.
    :raises TypeError: with a description of the argument.
    """
    dtype = getattr(key, "dtype", None)
    ndim = key.ndim if isinstance(key, jax.Array) else np.ndim(key)
    typed = dtype is not None and jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key)
    if not (typed and ndim == 0) and not (dtype == np.uint32 and ndim == 1):
        what = f"shape {np.shape(key)} and dtype {dtype}" if dtype else repr(key)
        raise TypeError(
            f"expected a random key, such as jax.random.key(0), and got {what}"
        )


def check_count(name: str, value: Any) -> None:
    """Raise unless a value is a whole number, at least 1.

    :param name: the name of the argument.
    :param value: the value.
    :raises ValueError: naming the argument.
    """
    if np.ndim(value):
        raise ValueError(
            f"{name} must be a whole number >= 1, got an array of shape "
            f"{np.shape(value)}. Is {name} missing?"
        )
    try:
        whole = value >= 1 and value == int(value)
    except (TypeError, ValueError, OverflowError):
        whole = False
    if not whole:
        raise ValueError(f"{name} must be a whole number >= 1, got {value!r}")


def check_by_name(
    model: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Raise for inducing inputs that are passed by position, which predictions could
    not keep.

    :param model: the model.
    :param args: its arguments.
    :param kwargs: its keyword arguments.
    :raises ValueError: naming the argument.
    """
    if sum(is_array(x) for x in jax.tree.leaves(args)) < 3:
        return
    observed, inducing, inputs, _ = sources(model, args, kwargs)
    positional = by_name(model, args)
    for name in positional.keys() & set(inducing) - {*inputs, *observed}:
        shape = np.shape(positional[name])
        raise ValueError(
            f"{name} of shape {shape} contains inducing inputs or hyperparameters, "
            "but is passed by position, so that predictions could not keep it. "
            f"Pass {name}=..."
        )


def check_given(
    given: dict[str, Any], declared: dict[str, Any], structure: Structure
) -> None:
    """Raise for initial values that have another shape than their params, and for
    precisions that are not positive definite.

    :param given: values by name of a param.
    :param declared: shapes of the model's and guide's params.
    :param structure: the structure of the model.
    :raises ValueError: naming the param.
    """
    expected = {k: [x.shape for x in jax.tree.leaves(v)] for k, v in declared.items()}
    for block in structure.blocks:
        expected[f"{block.site}_auto_potential"] = [block.shape]
        expected[f"{block.site}_auto_precision"] = [block.shape + block.shape[-1:]]
    for name, value in given.items():
        shapes = [x.shape for x in jax.tree.leaves(value)]
        if name in expected and shapes != expected[name]:
            own = name.startswith(f"{JOINT}_auto_")
            raise ValueError(
                f"init_params[{name!r}] has shape {shapes}, expected {expected[name]}"
                + own
                * ". It belongs to latents of another graph, mesh or number of "
                "groups. Leave it out"
            )
    for block in structure.blocks:
        name = f"{block.site}_auto_precision"
        matrix = np.asarray(given.get(name, np.eye(1)), float)
        turned = np.swapaxes(matrix, -1, -2)
        error = np.abs(matrix - turned).max()
        symmetric = error <= 1e-4 * np.abs(matrix).max()  # false for NaN
        if not symmetric or np.linalg.eigvalsh(matrix).min() <= 0:
            raise ValueError(
                f"init_params[{name!r}] of shape {matrix.shape} is not symmetric "
                "and positive definite. It must be the inverse of a covariance"
            )


def check_processes(structure: Structure) -> None:
    """Raise for inputs of a wider dtype than the inducing inputs, which have the dtype
    of the fit's state.

    :param structure: the structure of the model at its arguments.
    :raises ValueError: naming the process and both dtypes.
    """
    for block in structure.processes:
        dtype = structure.functions[block.name].dtype
        if dtype != block.dtype:
            raise ValueError(
                f'GaussianProcess("{block.name}") has inputs of {dtype} and '
                f"inducing inputs of {block.dtype}. Pass both in one dtype, "
                "Z.astype(X.dtype)"
            )
