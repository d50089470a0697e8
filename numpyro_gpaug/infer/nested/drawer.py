# SPDX-License-Identifier: Apache-2.0
"""Calls of a run's compiled programs. Random numbers are the host's: what JAX needs to
make them takes longer to compile than most of the programs."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Array, random

from numpyro_gpaug.infer.nested.apart import Apart
from numpyro_gpaug.infer.nested.bound import Start
from numpyro_gpaug.infer.nested.hyperparameters import Hyperparameters
from numpyro_gpaug.infer.nested.known import KNOWN, Known
from numpyro_gpaug.infer.nested.programs import ENOUGH, Drawn, Evaluated, Programs

# Of the losses at points where the factors were known nearly, which of them is taken to
# be that of others, and how many there have to be.
SURE, LEAST = 0.8, 20


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
    :param bound: the collapsed bound; not a number where the Gaussian was not sought.
    :param log_prior: log-density of the unconstrained hyperparameters.
    :param log_joint_over_q: log of the density of data, latents and hyperparameters
        over that of the draw of the latents, (draws,).
    :param squares: squared lengths of the noise that draws are made of, but for groups
        that are weighed apart, (draws,).
    :param sites: values by name, (draws, ...); of deterministic sites the names alone.
    :param corner: where groups are weighed apart, the numbers that corners are made of,
        standard normal under the Gaussian, (corners, K).
    """

    z: np.ndarray
    bound: np.ndarray
    log_prior: np.ndarray
    log_joint_over_q: np.ndarray
    squares: np.ndarray
    sites: dict[str, Any]
    corner: np.ndarray


class Drawer:
    """Calls the programs of a run, and counts. Draws are weighed whatever Gaussian they
    are from: where those known say by a spline what it is it need not be found, and
    elsewhere the search starts from the nearest.

    :param programs: the programs.
    :param arrays: array arguments of the model.
    :param rng: random numbers.
    :param bar: a progress bar.
    :param apart: how groups are weighed apart; ``None`` if they are not.
    :ivar shift: of the corner from the Gaussian's mean, in its standard deviations.
    """

    def __init__(
        self,
        programs: Programs,
        arrays: Any,
        rng: np.random.Generator,
        bar: Any,
        apart: Apart | None = None,
    ) -> None:
        self.apart = apart
        self.shift = np.zeros(0 if self.apart is None else self.latents)
        self._programs, self._arrays, self._bar = programs, arrays, bar
        self._rng = rng
        self._none = programs.no_start(arrays)
        self.start = self._none
        self.best, self.evaluations = -np.inf, 0
        self.known = Known(self._none, programs.hyper.size)
        # How far each search was from what is known, and what it has lost by that.
        self._doubts: list[float] = []
        self._losses: list[float] = []
        self._most = -np.inf

    @property
    def latents(self) -> int:
        """How many of them are weighed at once."""
        if self.apart is None:
            return self._programs.structure.size
        return self.apart.sizes.corner

    @property
    def weighed(self) -> str:
        """How, for a message."""
        if self.apart is None:
            return ""
        return f", {self.apart.sizes.groups} groups weighed apart"

    @property
    def alike(self) -> int:
        """Of how many draws all but the groups are the same."""
        if self.apart is None:
            return 1
        return self._programs.num_draws // self.apart.corners

    def evaluate(self, point: np.ndarray) -> tuple[float, np.ndarray]:
        """The collapsed log-density and its gradient."""
        rows, _ = self.known.at(point[None])
        found = self._evaluated(point[None], rows, gradient=True)
        bound, log_prior, ascent = map(np.asarray, found[:3])
        value = float(bound[0]) + float(log_prior[0])
        if value > self.best:
            self.best = value
            self.start = Start(found.factors, KNOWN)
        return value, ascent[0].astype(float)

    def first(self, points: np.ndarray, widths: np.ndarray) -> Points:
        """Draws from Gaussians that were all found, from which it is learnt where they
        need not be: half of them tell how good those are that the others give.

        :param points: (n, d).
        :param widths: (n, draws).
        """
        half = len(points) // 2
        parts = []
        for places in (slice(half), slice(half, None)):
            parts.append(self.draw(points[places], widths[places], found=True))
            self.known.learn()
        self._calibrate()
        return jax.tree.map(lambda *x: np.concatenate(x), *parts)

    def _calibrate(self) -> None:
        """How far a point may be from those known: losses grow as squares of the error,
        which the square of the power function bounds up to a factor."""
        doubts, losses = np.array(self._doubts), np.array(self._losses)
        seen = np.isfinite(doubts) & np.isfinite(losses) & (doubts > 0)
        if seen.sum() < LEAST:
            return
        factor = np.quantile(losses[seen] / doubts[seen], SURE)
        self._most = ENOUGH / max(factor, 1e-300)

    def draw(self, points: np.ndarray, widths: np.ndarray, *, found: bool) -> Points:
        """Draws of the latents at points.

        :param points: (n, d).
        :param widths: (n, draws).
        :param found: whether the Gaussian is to be found at all of them.
        """
        chunk = self._programs.chunk
        starts = range(0, len(points), chunk)
        parts = [
            self._chunk(points[i : i + chunk], widths[i : i + chunk], found)
            for i in starts
        ]
        return jax.tree.map(lambda *x: np.concatenate(x), *parts)

    def _chunk(self, points: np.ndarray, widths: np.ndarray, found: bool) -> Points:
        programs, num = self._programs, len(points)
        rows, doubts = self.known.at(points)
        sure = doubts <= (-np.inf if found else self._most)
        bound = np.full(num, np.nan)
        self._find(points, rows, doubts, bound, np.flatnonzero(~sure))
        size = programs.chunk, programs.num_draws // self.alike, self.latents
        noise = self._rng.standard_normal(size, programs.structure.dtype)
        apart = None
        if self.apart is not None:
            uniform = self.apart.uniform(self._rng, size[0], noise.dtype)
            apart = self.apart, uniform, self.shift.astype(noise.dtype)
        drawn = self._drawn(points, rows, noise, widths, apart)
        # Factors between those known may be none of a Gaussian.
        broken = sure & ~np.isfinite(drawn.log_det)
        if broken.any():
            self._find(points, rows, doubts, bound, np.flatnonzero(broken))
            drawn = self._drawn(points, rows, noise, widths, apart)
        failed = ~(sure & ~broken) & ~np.isfinite(bound)
        total, lost, log_det, log_prior = (
            np.asarray(x, float)
            for x in (drawn.total, drawn.lost, drawn.log_det, drawn.log_prior)
        )
        ratios = total + lost + (log_prior + log_det / 2)[:, None]
        ratios[failed] = np.nan
        self._bar.update(num)
        squares = np.square(noise[:num], dtype=float).sum(-1).repeat(self.alike, 1)
        corner = noise[:num, :, :0]
        if apart is not None:
            corner = widths[:, :: self.alike, None] * noise[:num] + self.shift
        return Points(
            np.asarray(drawn.z), bound, log_prior, ratios, squares, drawn.sites, corner
        )

    def _drawn(
        self,
        points: np.ndarray,
        rows: np.ndarray,
        noise: np.ndarray,
        widths: Any,
        apart: Any,
    ) -> Drawn:
        """Draws at some points; the last chunk has the shape of the others."""
        programs, num = self._programs, len(points)
        filled = np.minimum(np.arange(programs.chunk), num - 1)
        factors = self.known.factors(rows[filled])
        drawn = programs.draw(
            points[filled], factors, noise, widths[filled, :: self.alike],
            self._arrays, apart,
        )  # fmt: skip
        return jax.tree.map(lambda x: np.asarray(x)[:num], drawn)

    def _find(
        self,
        points: np.ndarray,
        rows: np.ndarray,
        doubts: np.ndarray,
        bound: np.ndarray,
        places: np.ndarray,
    ) -> None:
        """Finds the Gaussian at some of the points.

        :param points: (n, d).
        :param rows: flat factors from which searches start, and into which those go
            that are found, (n, numbers).
        :param doubts: how far these are from those known, (n,).
        :param bound: into which the bound goes, (n,).
        :param places: which.
        """
        batch = self._programs.batch
        for i in range(0, len(places), batch):
            here = places[i : i + batch]
            filled = here[np.minimum(np.arange(batch), len(here) - 1)]
            # Those that were just found may be nearer.
            near = ~np.isfinite(doubts[filled])
            begin = rows[filled]
            if near.any():
                begin[near] = self.known.at(points[filled][near])[0]
            found = self._evaluated(points[filled], begin, gradient=False)
            num = len(here)
            bound[here] = np.asarray(found.bound, float)[:num]
            rows[here] = self.known.flat(found.factors)[:num]
            self._doubts += list(doubts[here])
            self._losses += list(np.asarray(found.loss, float)[:num])

    def _evaluated(
        self, points: np.ndarray, rows: np.ndarray, *, gradient: bool
    ) -> Evaluated:
        """The Gaussian at points. One that is not finite may have started from factors
        that are none there, and starts anew."""
        programs, arrays = self._programs, self._arrays
        self.evaluations += len(points)
        start = self.known.start(rows)
        found = programs.evaluate(points, start, arrays, gradient=gradient)
        finite = np.isfinite(np.asarray(found.bound))
        if not finite.all() and start.known.any():
            none = jax.tree.map(lambda x: np.repeat(x, len(points), 0), self._none)
            anew = programs.evaluate(points, none, arrays, gradient=gradient)
            if np.isfinite(np.asarray(anew.bound)).sum() > finite.sum():
                found, finite = anew, np.isfinite(np.asarray(anew.bound))
        if finite.any():
            kept = jax.tree.map(lambda x: np.asarray(x)[finite], found.factors)
            self.known.add(points[finite], kept)
        return found
