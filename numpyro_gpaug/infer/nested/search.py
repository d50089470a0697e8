# SPDX-License-Identifier: Apache-2.0
"""The mode of the collapsed density and its curvature."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from numpyro_gpaug.errors import CholeskyError
from numpyro_gpaug.infer.nested.proposal import StudentT

# The step of finite differences of gradients.
STEP = 0.05
# The largest standard deviation of a direction in unconstrained space. Where the
# density is flat or convex, the prior determines the width.
WIDEST = 3.0

Evaluate = Callable[[np.ndarray], tuple[float, np.ndarray]]


class Mode(NamedTuple):
    """A mode of the collapsed density.

    :param point: the mode, (d,).
    :param value: the log-density there.
    :param component: a t distribution around it.
    """

    point: np.ndarray
    value: float
    component: StudentT


def climb(evaluate: Evaluate, start: np.ndarray, precise: bool) -> Mode:
    """Find a mode by L-BFGS.

    :param evaluate: returns the log-density and its gradient.
    :param start: the start, (d,).
    :param precise: whether these are in double precision.
    :raises CholeskyError: if the density is not finite at the start.
    """
    from scipy import optimize  # takes a fifth of a second to import

    first, _ = evaluate(start)
    if not np.isfinite(first):
        raise CholeskyError(
            "the collapsed bound is not finite at the start of the search for its "
            f"mode, at unconstrained hyperparameters {np.round(start, 3).tolist()} "
            "(the medians of their priors, unless init_params is given). Likely "
            "causes: a kernel matrix without jitter, inputs that are not "
            "standardised, priors far from the data, or data that no value makes "
            "possible (counts at zero exposure). float64 or init_params may help"
        )
    if not start.size:  # SciPy 1.13 rejects an empty vector
        return Mode(start, first, _component(evaluate, start))

    def descend(point: np.ndarray) -> tuple[float, np.ndarray]:
        value, gradient = evaluate(point)
        if not (np.isfinite(value) and np.isfinite(gradient).all()):
            return 1e10 + abs(first), np.zeros_like(point)
        return -value, -gradient

    # The noise of the bound in float32 is about 1e-6 times the bound.
    least = 1e-10 if precise else 1e-7
    options = {"maxiter": 100, "ftol": least, "gtol": 1e-3}

    found = optimize.minimize(
        descend, start, jac=True, method="L-BFGS-B", options=options
    )
    return Mode(found.x, -float(found.fun), _component(evaluate, found.x))


def _component(evaluate: Evaluate, mode: np.ndarray) -> StudentT:
    d = len(mode)
    hessian = np.zeros((d, d))
    for i, direction in enumerate(np.eye(d)):
        ends = [evaluate(mode + s * STEP * direction)[1] for s in (1, -1)]
        hessian[i] = (ends[1] - ends[0]) / (2 * STEP)
    hessian = np.where(np.isfinite(hessian), hessian, 0)
    values, vectors = np.linalg.eigh((hessian + hessian.T) / 2)
    values = np.maximum(values, WIDEST**-2)
    covariance = (vectors / values) @ vectors.T
    return StudentT.symmetric(mode, covariance)


def another(
    modes: list[Mode], points: np.ndarray, log_weights: np.ndarray
) -> Any | None:
    """Return a point near a possible further mode: far from known modes, and with much
    of the weight.

    :param modes: known modes.
    :param points: points, (n, d).
    :param log_weights: normalised log-weights, (n,).
    """
    d = points.shape[1]
    far = np.min([m.component.distances(points) for m in modes], axis=0) > 9 + 4 * d
    weights = np.where(far, np.exp(log_weights), 0)
    return points[np.argmax(weights)] if weights.sum() > 0.02 else None


def is_new(mode: Mode, modes: list[Mode]) -> bool:
    """Whether a search ended at a new mode."""
    return all(m.component.distances(mode.point[None])[0] > 1 for m in modes)
