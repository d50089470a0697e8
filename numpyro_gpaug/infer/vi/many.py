# SPDX-License-Identifier: Apache-2.0
"""One model fitted to many responses: the fits of one program run side by side.

On a CPU each operation of a program has a cost of its own, which for the matrices of a
small model is larger than the arithmetic. A program of several fits shares it. Each fit
has its own search and stops by itself; the program ends with the slowest one, so that a
program of too many fits waits, and leaves the cache of the processor.
"""

from __future__ import annotations

import warnings
from collections import Counter
from operator import itemgetter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import Mesh, PartitionSpec

from numpyro_gpaug.infer.vi import quasi_newton
from numpyro_gpaug.infer.vi.loop import stepped
from numpyro_gpaug.infer.vi.plan import Plan
from numpyro_gpaug.infer.vi.resolution import LOST
from numpyro_gpaug.infer.vi.start import initial_state, opposite_start, read_params
from numpyro_gpaug.infer.vi.state import unknown_bound
from numpyro_gpaug.infer.vi.stepper import Stepper
from numpyro_gpaug.math.sharding import ROWS
from numpyro_gpaug.model.arguments import Arguments
from numpyro_gpaug.model.responses import in_lanes
from numpyro_gpaug.model.view import NUM_NODES, Codes
from numpyro_gpaug.predict.many import CONVERGED, Fits
from numpyro_gpaug.predict.mixture import Fitted
from numpyro_gpaug.predict.predictor import Predictor
from numpyro_gpaug.predict.summary import SiteMoments

# The largest number of fits in one program, and of values that they hold together,
# which fit into a processor's cache. An accelerator has room for more.
LANES, NUMBERS = 32, 2**19
MOST_LANES, MOST_NUMBERS = 1024, 2**27


class Fit(NamedTuple):
    """What one fit has found.

    :param fitted: the fitted quantities.
    :param sites: moments of the Gaussian sites.
    :param bound: the bound.
    :param steps: steps taken.
    :param lost: error of the bound due to rounding, in nats.
    :param valid: whether its data are in the support of the model, by site and
        parameter.
    :param codes: the dependence of its data on latents.
    """

    fitted: Fitted
    sites: dict[str, SiteMoments]
    bound: Array
    steps: Array
    lost: Array
    valid: dict[tuple[str, str], Array]
    codes: Codes


def fit_lanes(
    arrays: tuple[Array, ...],
    key: Array,
    num_steps: Array,
    tol: Array,
    *,
    plan: Plan,
    predictor: Predictor,
    static: Any,
    which: tuple[bool, ...],
    mesh: Mesh | None,
) -> Fit:
    """Fit a model to several responses at once; pure.

    :param arrays: array arguments of the model.
    :param key: random key of every fit.
    :param num_steps: the number of steps, at most.
    :param tol: see :meth:`~numpyro_gpaug.ConjugateSVI.run_many`.
    :param plan: the plan of the fits.
    :param predictor: reads them.
    :param static: the model's other arguments.
    :param which: the arrays that have a leading axis over the responses.
    :param mesh: devices that share the responses.
    """

    def start(arrays: Any, given: Any) -> Any:
        fixed = plan.settings, plan.model, plan.guide
        found = initial_state(*fixed, Arguments(arrays, static), key, given)
        return quasi_newton.within(found[0], num_steps), *found[1:]

    def one(arrays: Any) -> Fit:
        arguments = Arguments(arrays, static)
        stepper = Stepper(plan, arguments)
        state, _, codes, valid = start(arrays, {})
        data = jnp.uint32(1)
        if opposite := opposite_start(plan, state.hyper.values):
            begun = state, start(arrays, opposite)[0]
            losses = [stepped(stepper, x, 1, 0, data)[1][0] for x in begun]
            state = lax.cond(losses[1] < losses[0], lambda: begun[1], lambda: begun[0])
        state, _, steps, *_ = stepped(stepper, state, num_steps, tol, data)
        params = read_params(plan.guide, state.hyper.values, state.natural)
        fitted = Fitted.of_guide(plan.guide, params)
        fitted = predictor.completed(arguments, fitted)
        sites = predictor.marginals(arguments, fitted)
        return Fit(fitted, sites, state.bound, steps, state.lost, valid, codes)

    each = in_lanes(one, which)
    if mesh is None:
        return each(arrays)
    specs = tuple(PartitionSpec(ROWS) if x else PartitionSpec() for x in which)
    # Each device ends its loops when its own fits are done.
    spread: Any = jax.shard_map(
        each, mesh=mesh, in_specs=(specs,), out_specs=PartitionSpec(ROWS),
        check_vma=False,
    )  # fmt: skip
    return spread(arrays)


def lanes(plan: Plan, arguments: Arguments, number: int) -> int:
    """Return the number of fits of one program.

    :param plan: the plan of the fits.
    :param arguments: the model's arguments for one response.
    :param number: the number of responses.
    """
    most, room = LANES, NUMBERS
    if jax.default_backend() != "cpu":
        most, room = MOST_LANES, MOST_NUMBERS
    width, rows = plan.structure.largest, arguments.num_rows
    # For each row, the density at nodes, and the weights.
    numbers = width * width + rows * (NUM_NODES + width)
    return int(np.clip(room // max(numbers, 1), 1, min(most, number)))


def found(fit: Fit, num_steps: int, size: int) -> Fits:
    """Return what is found, with a verdict for each fit; warn of all that failed.

    :param fit: all fits.
    :param num_steps: the number of steps, at most.
    :param size: responses of one program.
    """
    verdicts = np.full(len(fit.bound), CONVERGED, object)
    verdicts[fit.steps >= num_steps] = f"not converged in {num_steps} steps"
    verdicts[fit.lost > LOST] = "limited by rounding (try float64)"
    known = fit.bound > unknown_bound(fit.bound.dtype)
    failed = ~(known & np.isfinite(fit.bound))
    verdicts[failed] = "the bound is not finite"
    for (site, parameter), inside in fit.valid.items():
        what = f"parameter {parameter!r} of {site!r}" if parameter else f"{site!r}"
        verdicts[~inside] = f"{what} is NaN or outside of its support"
        failed |= ~inside
    for i, reason in _misfits(fit.codes):
        verdicts[i], failed[i] = reason, True
    if (wrong := verdicts != CONVERGED).any():
        (reason, number), *_ = Counter(verdicts[wrong]).most_common(1)
        warnings.warn(
            f"{wrong.sum()} of {len(wrong)} fits did not converge ({number}: "
            f"{reason}). See fits.verdicts",
            stacklevel=5,
        )

    def cut(x: Any) -> np.ndarray:
        return np.where(failed.reshape(-1, *[1] * (x.ndim - 1)), np.nan, x)

    sites = jax.tree.map(cut, fit.sites)
    steps = np.asarray(fit.steps)
    return Fits(fit.fitted, sites, cut(fit.bound), steps, verdicts, size)


def _misfits(codes: Codes) -> Any:
    """Yield the responses whose codes do not fit the latents, and why."""
    known = jax.device_get(codes)
    for i in range(len(known.misfit)):
        try:
            jax.tree.map(itemgetter(i), known).check()
        except ValueError as error:
            yield i, str(error)
