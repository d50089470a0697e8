# SPDX-License-Identifier: Apache-2.0
"""The Gaussian latents at draws of hyperparameters: predictions, and draws."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, random

from numpyro_gpaug.infer.nested.bound import CollapsedBound, Start
from numpyro_gpaug.infer.nested.hyperparameters import Hyperparameters, compiled
from numpyro_gpaug.infer.nested.programs import Evaluated, Programs
from numpyro_gpaug.math.threads import threads_for
from numpyro_gpaug.model.arguments import Arguments, Values
from numpyro_gpaug.model.columns import Labels
from numpyro_gpaug.model.latents import JOINT
from numpyro_gpaug.predict import Posterior
from numpyro_gpaug.predict.mixture import Fitted, Members
from numpyro_gpaug.predict.predictor import predictor_for


def mixture(
    programs: Programs,
    arguments: Arguments,
    values: Values,
    moments: Any,
    log_weights: np.ndarray | None = None,
    labels: Labels | None = None,
) -> Posterior:
    """Average predictions over hyperparameters.

    :param programs: programs of the model.
    :param arguments: arguments of the fit.
    :param values: hyperparameters by name, with a leading axis (n,).
    :param moments: moments of the Gaussian given them, likewise.
    :param log_weights: normalised log-weights of the hyperparameters, (n,); equal by
        default.
    :param labels: labels of the codes of arguments.
    """
    bound = programs.bound
    if log_weights is None:
        num = len(jax.tree.leaves(moments)[0])
        log_weights = np.full(num, -np.log(num))
    weights = jnp.asarray(log_weights, programs.hyper.dtype)
    members = Members(weights, values, {JOINT: moments})
    model = bound.guide.model
    predictor = predictor_for(bound.guide, model, bound.structure)
    args, kwargs = arguments.counted().merge()
    return Posterior.of_fit(
        predictor, Fitted({}, {}, members), bound.structure, args, kwargs,
        arguments.counting_all(), labels=labels,
    )  # fmt: skip


def refuse_params(bound: CollapsedBound, what: str) -> None:
    """Raise for params, which have no prior.

    :param what: what needs a prior, for the message.
    """
    if params := sorted(bound.structure.constraints):
        raise ValueError(
            f"params {params} have no prior: {what} sample sites. Write them as "
            "numpyro.sample(name, prior), or as plain numbers"
        )


class AtDraws:
    """The Gaussian at draws of the hyperparameters of a collapsed model.

    :param programs: programs of the model at its arguments.
    :param arrays: array arguments.
    :param samples: hyperparameters by name, (draws, ...); others are ignored.
    :raises ValueError: for draws that are missing or not of these shapes.
    """

    def __init__(self, programs: Programs, arrays: Any, samples: Values) -> None:
        self._programs, self._arrays = programs, arrays
        self._largest = programs.structure.largest
        self.points = _unconstrained(programs.hyper, arrays, samples)
        self._start = programs.no_start(arrays)
        with threads_for(self._largest):
            self._start = Start(self._at(self.points[:1]).factors, np.ones(1, bool))

    def gaussians(self, num: int) -> Any:
        """Return hyperparameters by name, and moments of the Gaussian, at some of the
        draws, evenly spaced.

        :param num: the maximum number of draws.
        """
        total = len(self.points)
        chosen = np.arange(min(num, total)) * total // min(num, total)
        with threads_for(self._largest):
            _, values, moments = self._programs.gaussians(
                self.points[chosen], self._start, self._arrays
            )
            return values, moments

    def sites(self, key: Array) -> Values:
        """Return values of all sites, with the Gaussian latents drawn once at each
        draw.

        :param key: random key.
        """
        programs, arrays = self._programs, self._arrays
        shape = len(self.points), programs.structure.form.rank
        noise = np.asarray(random.normal(key, shape, programs.structure.dtype))
        # One point after another, because the covariances of all points may not fit in
        # memory.
        with threads_for(self._largest):
            z = [
                programs.drawn(point, self._at(point[None]).factors, each, arrays)
                for point, each in zip(self.points, noise, strict=True)
            ]
            points = jnp.asarray(self.points, programs.hyper.dtype)
            found = programs.sites(points, np.stack(z), arrays)
            return jax.block_until_ready(found)

    def _at(self, points: np.ndarray) -> Evaluated:
        """Return the Gaussian at one point, (1, d)."""
        return self._programs.evaluate(points, self._start, self._arrays, gradient=True)


def _unconstrained(hyper: Hyperparameters, arrays: Any, samples: Values) -> np.ndarray:
    flat = jax.ShapeDtypeStruct((hyper.size,), hyper.dtype)
    wanted = jax.eval_shape(lambda flat: hyper.values(flat, arrays)[0], flat)
    if missing := sorted(set(wanted) - set(samples)):
        raise ValueError(
            f"samples lack draws of the hyperparameters {missing}. They contain "
            f"{sorted(samples)}"
        )
    draws = {k: jnp.asarray(samples[k], x.dtype) for k, x in wanted.items()}
    counts = {x.shape[:1] for x in draws.values()}
    for name, x in wanted.items():
        found = draws[name].shape
        if found[1:] != x.shape or len(counts) > 1 or found[:1] == (0,):
            raise ValueError(
                f"draws of {name!r} have shape {found}, not (draws, "
                f"{', '.join(map(str, x.shape))}) with as many draws as the others: "
                "get_samples() without group_by_chain has one axis of draws"
            )
    if not draws:
        return np.zeros((1, 0))
    free = compiled(jax.vmap(hyper.flatten, in_axes=(0, None)))
    return np.asarray(free(draws, arrays), float)
