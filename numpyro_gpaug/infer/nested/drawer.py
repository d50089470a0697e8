# SPDX-License-Identifier: Apache-2.0
"""Calls of a run's compiled programs. Random numbers are the host's: what JAX needs to
make them takes longer to compile than most of the programs."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Array, random

from numpyro_gpaug.infer.nested.bound import Start
from numpyro_gpaug.infer.nested.hyperparameters import Hyperparameters
from numpyro_gpaug.infer.nested.programs import Evaluated, Programs
from numpyro_gpaug.infer.nested.proposal import StudentT

# Numbers of factors that are kept to start from.
REMEMBERED = 2**24
KNOWN = np.ones(1, bool)


def generator(key: Array, stream: int) -> np.random.Generator:
    """Random numbers of the host.

    :param key: random key of JAX.
    :param stream: which numbers.
    """
    return np.random.default_rng([stream, *np.asarray(random.key_data(key)).ravel()])


def prior_draws(
    hyper: Hyperparameters, arrays: Any, num: int, rng: np.random.Generator
) -> np.ndarray:
    """Unconstrained draws of the prior, (n, size); none if it is improper, or mostly
    beyond what numbers can hold.

    :param hyper: the hyperparameters.
    :param arrays: array arguments of the model.
    :param num: how many, if they are finite.
    :param rng: random numbers.
    """
    try:
        found = hyper.prior_draws(arrays, num, rng)
    except NotImplementedError:
        return np.zeros((0, hyper.size))
    found = found[np.isfinite(found).all(-1)]
    return found if len(found) > 0.6 * num else found[:0]


class Points(NamedTuple):
    """Draws at hyperparameters, in double precision; every array has a leading axis of
    these.

    :param z: whitened latents, (draws, size).
    :param bound: the collapsed bound.
    :param log_prior: log-density of the unconstrained hyperparameters.
    :param log_joint_over_q: log of the density of data, latents and hyperparameters
        over that of the draw of the latents, (draws,).
    :param squares: squared lengths of the noise that draws are made of, (draws,).
    :param sites: values by name, (draws, ...); of deterministic sites the names alone.
    """

    z: np.ndarray
    bound: np.ndarray
    log_prior: np.ndarray
    log_joint_over_q: np.ndarray
    squares: np.ndarray
    sites: dict[str, Any]


class Drawer:
    """Calls the programs of a run, and counts. Every Gaussian starts from the factors
    of the nearest hyperparameters at which one has been found.

    :param programs: the programs.
    :param arrays: array arguments of the model.
    :param rng: random numbers.
    :param bar: a progress bar.
    :ivar law: of the hyperparameters, in whose units distances are; in unconstrained
        ones before it is known.
    """

    def __init__(
        self, programs: Programs, arrays: Any, rng: np.random.Generator, bar: Any
    ) -> None:
        self._programs, self._arrays, self._bar = programs, arrays, bar
        self._rng = rng
        self.start = self._none = programs.no_start(arrays)
        self.best, self.evaluations = -np.inf, 0
        self.law: StudentT | None = None
        numbers = sum(x.size for x in jax.tree.leaves(self._none.factors))
        self._room = REMEMBERED // max(numbers, 1)
        self._starts: list[Start] = []
        self._points = np.zeros((0, programs.hyper.size))

    def evaluate(self, point: np.ndarray) -> tuple[float, np.ndarray]:
        """The collapsed log-density and its gradient."""
        self.evaluations += 1
        found = self._evaluated(point[None], gradient=True)
        bound, log_prior, ascent = map(np.asarray, found[:3])
        value = float(bound[0]) + float(log_prior[0])
        if value > self.best:
            self.best = value
            self.start = Start(found.factors, KNOWN)
        return value, ascent[0].astype(float)

    def _evaluated(self, points: np.ndarray, *, gradient: bool) -> Evaluated:
        """The Gaussian at points. One that is not finite may have started from factors
        that are none there, and starts anew."""
        programs, arrays = self._programs, self._arrays
        starts = [self._nearest(point) for point in points]
        found = programs.evaluate(points, _joined(starts), arrays, gradient=gradient)
        finite = np.isfinite(np.asarray(found.bound))
        if not finite.all() and any(start.known.any() for start in starts):
            starts = [self._none] * len(points)
            anew = programs.evaluate(points, _joined(starts), arrays, gradient=gradient)
            if np.isfinite(np.asarray(anew.bound)).sum() > finite.sum():
                found, finite = anew, np.isfinite(np.asarray(anew.bound))
        places = np.flatnonzero(finite)[: max(self._room - len(self._starts), 0)]
        self._points = np.concatenate([self._points, points[places]])
        self._starts += [_start(found.factors, i) for i in places]
        return found

    def _nearest(self, point: np.ndarray) -> Start:
        if not self._starts:
            return self.start
        apart = self._points - point
        if self.law is not None:
            apart = np.linalg.solve(self.law.axes, apart.T).T
        return self._starts[int(np.argmin(np.square(apart).sum(1)))]

    def draw(self, points: np.ndarray, widths: np.ndarray) -> Points:
        """Draws of the latents at points.

        :param points: (n, d).
        :param widths: (n, draws).
        """
        chunk = self._programs.chunk
        starts = range(0, len(points), chunk)
        parts = [
            self._chunk(points[i : i + chunk], widths[i : i + chunk]) for i in starts
        ]
        self.evaluations += len(points)
        return jax.tree.map(lambda *x: np.concatenate(x), *parts)

    def _chunk(self, points: np.ndarray, widths: np.ndarray) -> Points:
        programs, num = self._programs, len(points)
        dtype = programs.structure.dtype
        # The last chunk has the shape of the others.
        filled, batch = np.minimum(np.arange(programs.chunk), num - 1), programs.batch
        at = [
            self._evaluated(points[filled[i : i + batch]], gradient=False)
            for i in range(0, num, batch)
        ]
        evaluations = at + (programs.chunk // batch - len(at)) * at[-1:]
        size = programs.chunk, programs.num_draws, programs.structure.size
        noise = self._rng.standard_normal(size, dtype)
        drawn = programs.draw(
            tuple((x.values, x.moments) for x in evaluations), noise,
            widths[filled].astype(dtype), self._arrays,
        )  # fmt: skip
        drawn = jax.tree.map(lambda x: np.asarray(x)[:num], drawn)
        bound, log_prior = (
            np.concatenate([np.asarray(x, float) for x in each])[:num]
            for each in zip(*[(x.bound, x.log_prior) for x in evaluations], strict=True)
        )
        total, lost, log_det = (
            np.asarray(x, float) for x in (drawn.total, drawn.lost, drawn.log_det)
        )
        ratios = total + lost + (log_prior + log_det / 2)[:, None]
        self._bar.update(num)
        squares = np.square(noise[:num], dtype=float).sum(-1)
        return Points(drawn.z, bound, log_prior, ratios, squares, drawn.sites)


def _start(factors: Any, i: int) -> Start:
    """One of those found."""
    if len(jax.tree.leaves(factors)[0]) > 1:
        factors = jax.tree.map(lambda x: x[i : i + 1], factors)
    return Start(factors, KNOWN)


def _joined(starts: list[Start]) -> Start:
    if len(starts) == 1:
        return starts[0]
    return jax.tree.map(lambda *x: np.concatenate(x), *starts)
