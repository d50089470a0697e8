# SPDX-License-Identifier: Apache-2.0
"""Inputs that are far from all inducing inputs: a fit to them says nothing, and ends.

With ``k(x, Z)`` next to zero the inducing values explain none of the prior variance of
``f(x)``: no datum moves them, the bound is at its optimum at once, and predictions are
the prior's. Learning does not help, as all derivatives are next to zero too."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from numpyro_gpaug._numpyro import one_thread
from numpyro_gpaug.gp.process import Conditional, GaussianProcess
from numpyro_gpaug.gp.projection import lead, project, residual_variance
from numpyro_gpaug.infer.vi.state import ConjugateState
from numpyro_gpaug.math.affine import LEAST_EXPLAINED, AffineMap, unexplained
from numpyro_gpaug.model.structure import (
    Arguments,
    Structure,
    flat_functions,
    run_model,
)

# Of the rows, of which a fit may know as little: those that are inducing inputs
# themselves are explained wherever the others are.
MOST_UNREACHED = 0.5
# Rows that a diagnosis looks at, and how much wider X may be than inducing inputs.
ROWS, WIDER = 256, 10


@one_thread
def warn_of_reach(
    state: ConjugateState,
    structure: Structure,
    model: Callable[..., Any],
    values: Callable[[], dict[str, Any]],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    """Warns of processes whose inducing inputs are out of reach of most rows.

    :param state: of a fit.
    :param structure: of the model.
    :param model: the model.
    :param values: gives its params and other latents.
    :param args: its arguments.
    :param kwargs: its keyword arguments.
    """
    suspects = [k for k, share in state.unreached.items() if share > MOST_UNREACHED]
    if not suspects:
        return
    arguments, key = Arguments.split(args, kwargs), jax.random.key(0)
    filled = {**structure.zeros, **values()}
    trace = run_model(flat_functions(model), arguments, key, filled)
    for name in suspects:
        message = _diagnosis(trace[name]["fn"])
        if message:
            warnings.warn(message, stacklevel=4)


def _diagnosis(conditional: Conditional) -> str | None:
    """What is wrong with a process; ``None`` if the prior is not the model's (a
    stream's posterior explains little because it is narrow)."""
    gp, X = conditional.gp, conditional.X
    X = X[:: max(1, len(X) // ROWS)]
    projection = project(gp.kernel, gp.inducing, gp.inverse_factor, X)
    residual = residual_variance(lead(gp.kernel(X), 1), projection)
    explained = AffineMap(residual, projection, residual).explained()
    share = float(unexplained(explained).mean())
    if share <= MOST_UNREACHED:
        return None
    rows = np.asarray(X, float).reshape(len(X), -1)
    Z = np.asarray(gp.inducing, float)
    inducing = Z[0] if Z.ndim == 3 else Z.reshape(len(Z), -1)
    nearest = np.median(_nearest(rows, inducing))
    scaled = [
        np.median(_nearest(rows / scale, inducing / scale))
        for scale in _lengthscales(gp.kernel)
    ]
    lengthscales = f" ({min(scaled):.2g} lengthscales)" if scaled else ""
    return (
        f'GaussianProcess("{gp.name}"): of {share:.0%} of its function values the '
        f"inducing values explain less than {LEAST_EXPLAINED:g} of the prior variance, "
        "so that the data there say nothing and predictions are the prior's. Half the "
        f"rows are {nearest:.2g} or more{lengthscales} from the nearest inducing "
        f"input. Likely cause: {_cause(gp, rows, inducing)}. Standardise the columns "
        "of X, take inducing inputs from them (numpyro_gpaug.inducing.kmeans), and "
        "start from a lengthscale of the size of their distances"
    )


def _cause(gp: GaussianProcess, rows: np.ndarray, inducing: np.ndarray) -> str:
    spreads = [np.sqrt(x.var(0).sum()) for x in (rows, inducing)]
    apart = np.linalg.norm(rows.mean(0) - inducing.mean(0))
    low, high = sorted(spreads)
    if high > WIDER * low > 0 or apart > WIDER * high > 0:
        return (
            f"X and the inducing inputs, of shape {gp.inducing.shape}, are in "
            "different units or places: standard deviations {:.2g} and {:.2g}, centres "
            "{:.2g} apart".format(*spreads, apart)
        )
    return (
        "the lengthscale is too short for these inputs, whose standard deviation is "
        f"{spreads[0]:.2g}"
    )


def _nearest(rows: np.ndarray, inducing: np.ndarray) -> np.ndarray:
    """Distances to the nearest inducing input."""
    centre = inducing.mean(0)
    rows, inducing = rows - centre, inducing - centre
    squared = np.square(rows).sum(1)[:, None] + np.square(inducing).sum(1)
    return np.sqrt(np.maximum(squared - 2 * rows @ inducing.T, 0).min(1))


def _lengthscales(kernel: Any) -> Iterator[np.ndarray]:
    """Those of the parts of a kernel, the longest of all latents."""
    for part in ("left", "right"):
        if hasattr(kernel, part):
            yield from _lengthscales(getattr(kernel, part))
    scale = getattr(kernel, "lengthscale", None)
    if scale is not None:
        scale = np.asarray(scale, float)
        yield scale.max(0) if scale.ndim == 2 else scale
