# SPDX-License-Identifier: Apache-2.0
"""Warnings about inputs that a fit does not explain, and about degenerate ends.

If ``k(x, Z)`` is almost zero, the inducing values explain none of the prior variance of
``f(x)``: data do not change them, the bound is at its optimum immediately, and
predictions equal the prior. Learning does not help, because all derivatives are almost
zero, too.

Learning also fails if the initial lengthscale is far too long, so that the function is
constant, or far too short with inducing inputs at the rows themselves, so that the
function is white noise. If the data contain no information, learning may also end there
after a better start; only a run that started there did not explore. A fixed lengthscale
is taken as intended.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_gpaug._numpyro import one_thread
from numpyro_gpaug.gaussians.dense import LEAST_EXPLAINED, AffineMap
from numpyro_gpaug.gp.conditional import Conditional
from numpyro_gpaug.gp.process import GaussianProcess
from numpyro_gpaug.gp.projection import lead, project, whitener
from numpyro_gpaug.infer.vi.state import ConjugateState
from numpyro_gpaug.math.compiling import jit_for_few_runs
from numpyro_gpaug.model.arguments import Arguments, Model
from numpyro_gpaug.model.latents import JOINT, Structure
from numpyro_gpaug.model.structure import flat_functions, run_model

# The largest share of rows that a fit may leave unexplained. Rows that are inducing
# inputs themselves are always explained.
MOST_UNREACHED = 0.5
# The number of rows that a diagnosis uses, and how much wider than the inducing inputs
# X may be.
ROWS, WIDER = 256, 10
# Differences between rows must have this part of the prior variance, at the start and
# at the end (where a prior may have changed the lengthscale). Otherwise the process is
# a constant as far as derivatives show. And differences of the posterior mean must have
# this part of their variance if the data are informative about them.
FIRST_DIFFERENCES, LAST_DIFFERENCES, LEAST_KNOWN = 0.01, 0.03, 0.01
ALIKE = "its function values are almost equal at all rows"
APART = "its function values are almost independent (white noise) at any two rows"


@one_thread
def warn_of_reach(
    state: ConjugateState,
    structure: Structure,
    model: Model,
    values: Callable[[ConjugateState], dict[str, Any]],
    start: Callable[[], ConjugateState] | None,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    """Warn about processes whose inducing inputs are uncorrelated with most rows, and
    about processes that stayed constant, or white noise, at the data throughout
    learning.

    :param state: the state of a fit.
    :param structure: the structure of the model.
    :param model: the model.
    :param values: returns its params and other latents at a state.
    :param start: returns the initial state of the fit; ``None`` if nothing was learnt,
        or if it continued from another fit.
    :param args: its arguments.
    :param kwargs: its keyword arguments.
    """
    suspects = [
        k for k, share in state.unreached.items() if float(share) > MOST_UNREACHED
    ]
    if not suspects:
        return
    arguments, key = Arguments.split(args, kwargs), jax.random.key(0)

    def processes(state: ConjugateState) -> dict[str, Conditional]:
        filled = {**structure.zeros, **values(state)}
        trace = run_model(flat_functions(model), arguments, key, filled)
        return {name: trace[name]["fn"] for name in suspects}

    means = _means(structure, state)
    begun: dict[str, Conditional] | None = None
    for name, f in processes(state).items():
        message = _diagnosis(f)
        extreme = None if message or not start else _extreme(f, LAST_DIFFERENCES)
        if extreme == ALIKE and _is_known(f, means.get(name)):
            continue
        if extreme and start:
            begun = begun or processes(start())
            if _extreme(begun[name], FIRST_DIFFERENCES) == extreme:
                message = _stuck(f, extreme)
        if message:
            warnings.warn(message, stacklevel=6)


def _diagnosis(conditional: Conditional) -> str | None:
    """Return the problem of a process; ``None`` if its prior is not the prior of the
    model (the posterior of a stream explains little because it is narrow)."""
    from scipy.spatial.distance import cdist

    gp, X = conditional.gp, _some_rows(conditional)
    explained, _ = _seen(gp.kernel, gp.inducing, gp.jitter, X)
    share = float((np.asarray(explained) < LEAST_EXPLAINED).mean())
    if share <= MOST_UNREACHED:
        return None
    rows = np.asarray(X, float).reshape(len(X), -1)
    Z = np.asarray(gp.inducing, float)
    inducing = Z[0] if Z.ndim == 3 else Z.reshape(len(Z), -1)
    nearest, *scaled = (
        np.median(cdist(rows / scale, inducing / scale).min(1))
        for scale in (1, *_lengthscales(gp.kernel))
    )
    lengthscales = f" ({min(scaled):.2g} lengthscales)" if scaled else ""
    return (
        f'GaussianProcess("{gp.name}"): for {share:.0%} of its function values the '
        f"inducing values explain less than {LEAST_EXPLAINED:g} of the prior variance, "
        "so the data there are ignored and predictions equal the prior. Half the "
        f"rows are {nearest:.2g} or more{lengthscales} from the nearest inducing "
        f"input. Likely cause: {_cause(gp, rows, inducing)}. Standardise the columns "
        "of X, take inducing inputs from them (numpyro_gpaug.inducing.kmeans), and "
        "start from a lengthscale of the size of their distances"
    )


@jit_for_few_runs
def _seen(kernel: Any, inducing: Array, jitter: Any, X: Array) -> tuple[Array, Array]:
    """Return the shares of the prior variance that inducing values explain, and the
    projection."""
    gp = SimpleNamespace(kernel=kernel, inducing=inducing, jitter=jitter)
    seen = project(gp, whitener(gp), X)
    return AffineMap(seen.residual, *seen).explained(), seen.projection


def _cause(gp: GaussianProcess, rows: np.ndarray, inducing: np.ndarray) -> str:
    spreads = [np.sqrt(x.var(0).sum()) for x in (rows, inducing)]
    apart = np.linalg.norm(rows.mean(0) - inducing.mean(0))
    low, high = sorted(spreads)
    if high > WIDER * low > 0 or apart > WIDER * high > 0:
        return (
            f"X and the inducing inputs, of shape {gp.inducing.shape}, are in "
            "different units or regions: standard deviations {:.2g} and {:.2g}, "
            "centres {:.2g} apart".format(*spreads, apart)
        )
    return (
        "the lengthscale is too short for these inputs, whose standard deviation is "
        f"{spreads[0]:.2g}"
    )


def _extreme(conditional: Conditional, least: float) -> str | None:
    """Whether the function values at the rows are all equal, or all uncorrelated.

    :param least: the smallest share of the prior variance in differences of function
        values that are not all equal.
    """
    gp, X = conditional.gp, _some_rows(conditional)
    distinct = len(np.unique(X, axis=0))
    if distinct == 1:
        return None
    # A constant added to a kernel does not make the process constant.
    parts = list(_stationary(gp.kernel)) or [gp.kernel]
    if all(_differences(kernel, X) < least for kernel in parts):
        return ALIKE
    if gp.inducing.ndim != X.ndim or 2 * distinct < len(X):
        return None
    return APART if all(_is_apart(k, X, gp.inducing) for k in parts) else None


def _differences(kernel: Any, X: Array) -> float:
    """Return the share of the prior variance that is not common to all rows; 1 if there
    is no variance."""
    total, _, common = (np.asarray(x, float) for x in _covariances(kernel, X, X))
    total, common = total.mean(-1), common.mean((-2, -1))
    return float(np.median(1 - common / np.where(total > 0, total, np.inf)))


@jit_for_few_runs
def _covariances(kernel: Any, X: Array, Z: Array) -> tuple[Array, Array, Array]:
    return kernel(X), kernel(Z), kernel(X, Z)


def _is_apart(kernel: Any, X: Array, Z: Array) -> bool:
    """Whether most function values are uncorrelated with the values at all other
    inputs."""
    of_X, of_Z, across = _covariances(kernel, X, Z)
    scale = np.sqrt(of_X)[..., :, None] * np.sqrt(of_Z)[..., None, :]
    squared = np.square(np.asarray(across) / np.where(scale > 0, scale, np.inf))
    itself = (np.asarray(X)[:, None] == np.asarray(Z)).reshape(len(X), len(Z), -1)
    others = np.where(itself.all(-1), 0, squared)
    return bool((others.max(-1) < LEAST_EXPLAINED).mean() > MOST_UNREACHED)


def _is_known(conditional: Conditional, mean: Array | None) -> bool:
    """Whether the data determine differences between rows, if there are any: with a
    long lengthscale and a large variance, a trend may be the right answer.

    :param mean: mean of the whitened inducing values; ``None`` if unknown.
    """
    if mean is None:
        return True
    gp, X = conditional.gp, _some_rows(conditional)
    total = _differences(gp.kernel, X) * float(np.mean(gp.kernel(X)))
    _, projection = _seen(gp.kernel, gp.inducing, gp.jitter, X)
    found = np.asarray(jnp.vecmat(lead(mean, 1), projection), float).var(-1).mean()
    return found > LEAST_KNOWN * total


def _stuck(conditional: Conditional, extreme: str) -> str:
    from scipy.spatial.distance import pdist

    X = np.asarray(_some_rows(conditional), float)
    rows, gp = X.reshape(len(X), -1), conditional.gp
    typical, *scaled = (
        np.median(pdist(rows / scale)) for scale in (1, *_lengthscales(gp.kernel))
    )
    lengthscales = f" ({min(scaled):.2g} lengthscales)" if scaled else ""
    return (
        f'GaussianProcess("{gp.name}"): {extreme}, both at the start and at the end of '
        f"the run. The median distance of two rows is {typical:.2g}{lengthscales}, and "
        "the gradient of such a lengthscale vanishes, so learning could not improve "
        "it. Likely cause: X is in other units than the initial lengthscale. "
        "Standardise the columns of X, or start from a lengthscale of the size of "
        "these distances"
    )


def _some_rows(conditional: Conditional) -> Array:
    X = conditional.X
    return X[:: max(1, len(X) // ROWS)]


def _means(structure: Any, state: ConjugateState) -> dict[str, Array]:
    """Return means of the whitened inducing values of processes."""
    means = {name: n.moments().mean for name, n in state.natural.items()}
    if structure.joint:
        own = structure.split(means[JOINT][0])
        return {name: own[f"{name}.v"] for name in structure.functions}
    return means


def _stationary(kernel: Any) -> Iterator[Any]:
    """Return the parts of a kernel that have a lengthscale."""
    for part in ("left", "right"):
        if hasattr(kernel, part):
            yield from _stationary(getattr(kernel, part))
    if getattr(kernel, "lengthscale", None) is not None:
        yield kernel


def _lengthscales(kernel: Any) -> Iterator[np.ndarray]:
    """Return the lengthscales of the parts of a kernel, the longest over all
    latents."""
    for part in _stationary(kernel):
        scale = np.asarray(part.lengthscale, float)
        yield scale.max(0) if scale.ndim == 2 else scale
