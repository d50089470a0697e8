# SPDX-License-Identifier: Apache-2.0
"""Calls of a run's compiled programs. Random numbers come from the host: JAX's
generators would take longer to compile than most of the programs."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Array, random
from scipy.special import softmax

from numpyro_gpaug.infer.nested.bound import Start
from numpyro_gpaug.infer.nested.group_draws import (
    GroupDraws,
    corners_of,
    group_of_terms,
    may_part,
)
from numpyro_gpaug.infer.nested.known import KNOWN, Known
from numpyro_gpaug.infer.nested.programs import (
    ENOUGH,
    Drawn,
    Evaluated,
    Programs,
    chosen,
)
from numpyro_gpaug.math.importance import log_mean_exp
from numpyro_gpaug.model.arguments import Arguments

# The quantile of the losses at points with known factors that is used as the loss at
# other points, and the smallest number of such losses.
SURE, LEAST = 0.8, 6
# The number of first points, for each hyperparameter and one more, at which searches
# make the first spline.
EACH = 8
# A weight that is so many nats below the best is zero. One that is so many nats above
# it is a rounding error.
FAR, ABSURD = 200.0, 1e4
# An interpolated bound may exceed the evidence of its draws by so many nats more than
# any bound that was found.
UNLIKE = 3.0
# Draws are made again if the interpolated Gaussian loses more nats than this.
LOST = 0.1
# The variance of log-weights at a point above which annealed draws help, the largest
# one for each of their moves, the factor by which there are more if they are too few,
# and the most numbers that are moved in all.
CALM, MANY, AGAIN, MOST_MOVED = 1.0, 4.0, 4, 2**28


def unevenness(ratios: np.ndarray) -> float:
    """Return the variance of the log-weights of draws at the same point, averaged over
    points according to their weights; 0 if it is not known.

    :param ratios: log-weights, (n, draws); of weights of zero, minus infinity.
    """
    known = np.isfinite(ratios).all(1)
    if not known.any() or ratios.shape[1] < 2:
        return 0.0
    own = ratios[known]
    return float(softmax(own.mean(1)) @ own.var(1, ddof=1))


def generator(key: Array, stream: int) -> np.random.Generator:
    """Return a generator of random numbers on the host.

    :param key: random key of JAX.
    :param stream: the number of the stream.
    """
    return np.random.default_rng([stream, *np.asarray(random.key_data(key)).ravel()])


class Points(NamedTuple):
    """Draws at points of the hyperparameters, in double precision; every array has a
    leading axis of points.

    :param z: whitened latents, (draws, size).
    :param bound: the collapsed bound; interpolated where the Gaussian is.
    :param log_prior: log-density of the unconstrained hyperparameters.
    :param log_joint_over_q: log-ratio of the density of data, latents and
        hyperparameters to the density of the draw of the latents, (draws,).
    :param squares: squared lengths of the noise of each draw, without groups that are
        weighted separately, (draws,).
    :param sites: values by name, (draws, ...); of some sites in a tuple, see
        :class:`~numpyro_gpaug.infer.nested.programs.Drawn`.
    :param corner: with separate weights of groups, the border in coordinates that are
        standard normal under the Gaussian, (corners, K).
    """

    z: np.ndarray
    bound: np.ndarray
    log_prior: np.ndarray
    log_joint_over_q: np.ndarray
    squares: np.ndarray
    sites: dict[str, Any]
    corner: np.ndarray


class _Gaussians:
    """The Gaussians of one mode at points.

    :param known: factors found so far.
    :param points: points, (n, d).
    :ivar rows: flat factors; searches start from them if they are not accurate enough.
    :ivar doubts: their error bounds.
    :ivar sure: whether they are accurate enough.
    :ivar bound: the bound; NaN before a search where they are not.
    """

    def __init__(self, known: Known, points: np.ndarray) -> None:
        self.known, self.points = known, points
        self.rows = known.room(len(points))
        self.doubts = np.full(len(points), np.inf)
        self.sure = np.zeros(len(points), bool)
        self.bound = np.full(len(points), np.nan)

    def interpolate(self, places: np.ndarray, most: float) -> np.ndarray:
        """Interpolate the Gaussians at some of the points; return the indices of those
        that are not accurate enough.

        :param places: the indices of the points.
        :param most: the largest error that is accepted.
        """
        here = self.known.at(self.points[places])
        self.rows[places], self.doubts[places], between = here
        sure = self.doubts[places] <= most
        self.sure[places], self.bound[places] = sure, np.where(sure, between, np.nan)
        return places[~sure]

    def part(self, places: Any) -> _Gaussians:
        """Return the Gaussians at some of the points; of a slice, arrays are views."""
        found = copy(self)
        for name in ("points", "rows", "doubts", "sure", "bound"):
            setattr(found, name, getattr(self, name)[places])
        return found


class Drawer:
    """The caller of a run's programs, which also counts evaluations. Weights are valid
    for draws from any Gaussian. The optimal Gaussian is therefore interpolated by a
    spline of known factors if that is accurate enough. Otherwise a search starts from
    the nearest known factors.

    :param programs: the programs.
    :param data: the model's arguments.
    :param rng: random numbers.
    :param bar: a progress bar.
    :ivar apart: the groups that are weighted separately; ``None`` without such groups.
    :ivar latents: the number of latents that share one weight.
    :ivar alike: the number of draws that differ only in the groups.
    :ivar moves: the number of moves of each draw towards the posterior.
    :ivar known: Gaussian factors found so far.
    :ivar modes: the same for each mode of the latents, the highest first, if there are
        several; draws are from the mixture of their Gaussians.
    :ivar starts: the factors of each mode, the highest first.
    :ivar shift: shift of the border from the mean of the Gaussian, in its standard
        deviations.
    """

    def __init__(
        self, programs: Programs, data: Arguments, rng: np.random.Generator, bar: Any
    ) -> None:
        self.apart: GroupDraws | None = None
        self.latents, self.alike = programs.structure.form.rank, 1
        self.moves, self.shift = 0, np.zeros(0)
        self.programs, self.data, self._bar = programs, data, bar
        self._rng = rng
        self._none = programs.no_start(data)
        self.starts = [self._none]
        self.best, self.evaluations = -np.inf, 0
        self.known = Known(self._none, programs.hyper.size)
        self.modes = [self.known]
        self._shares = np.ones(1)
        # For each search, the error bound of the factors it started from, and the bound
        # that these factors would have lost.
        self._doubts: list[float] = []
        self._losses: list[float] = []
        self._most = 0.0
        # The largest excess of a bound that was found over the evidence of its draws.
        self._excess = -np.inf

    def part(self, point: np.ndarray) -> None:
        """Find the groups that can be weighted separately; none if there are several
        modes.

        :param point: the last point at which the Gaussian was found, (d,).
        """
        programs, structure = self.programs, self.programs.structure
        if len(self.modes) > 1 or not may_part(structure):
            return
        # Latents are drawn from the Gaussian: far from the posterior, the density of
        # all of them may be zero.
        factors, sizes = self.found(point).factors, structure.form.independent

        def terms(noise: np.ndarray) -> np.ndarray:
            return programs.terms(point, factors, noise, self.data)[1]

        group = group_of_terms(terms, sizes, self._rng)
        if group is not None:
            corners = corners_of(programs.num_draws, sizes)
            self.apart = GroupDraws(sizes, group, corners)
            self.latents, self.alike = sizes.others, programs.num_draws // corners
            self.shift = np.zeros(self.latents)

    def anneal(self, ratios: np.ndarray) -> bool:
        """Move draws towards the posterior from now on, or more often than before;
        return whether that may make weights even.

        :param ratios: log-weights of draws at points, (n, draws).
        """
        if self.apart is not None or len(self.modes) > 1:
            return False
        variance = unevenness(ratios)
        affordable = MOST_MOVED // (ratios.size * max(self.latents, 1))
        moves = min(max(int(np.ceil(variance)), AGAIN * self.moves), affordable)
        if not CALM < variance < MANY * moves or moves <= self.moves:
            return False
        self.moves = moves
        return True

    def found(self, point: np.ndarray) -> Evaluated:
        """Return the Gaussian at a point, (d,), at which it was found before."""
        rows, _, _ = self.known.at(point[None])
        return self.search(point, self.known.factors(rows))

    def search(self, point: np.ndarray, factors: Any) -> Evaluated:
        """Return the Gaussian at a point at the end of a search from given factors; it
        is not stored.

        :param point: the point, (d,).
        :param factors: factors with a leading axis of 1.
        """
        start = Start(factors, KNOWN)
        self.evaluations += 1
        return self.programs.evaluate(point[None], start, self.data, gradient=False)

    def draw_from(self, point: np.ndarray, modes: list[tuple[Any, float]]) -> None:
        """Draw from the mixture of the Gaussians of several modes from now on.

        :param point: the point at which they were found, (d,).
        :param modes: factors, and the bound of each; the highest first.
        """
        bounds = np.array([bound for _, bound in modes])
        shares = np.exp(bounds - np.logaddexp.reduce(bounds))
        # Some draws come from each mode, because the shares change with the
        # hyperparameters.
        self._shares = 0.5 * shares + 0.5 / len(modes)
        self.modes = []
        for factors, bound in modes:
            known = Known(self._none, self.programs.hyper.size)
            known.add(point[None], factors, np.array([bound]))
            self.modes.append(known)
        self.known = self.modes[0]
        self.starts = [Start(factors, KNOWN) for factors, _ in modes]
        self.best = -np.inf

    @property
    def weighed(self) -> str:
        """The way in which latents are weighted, for a message."""
        if self.moves:
            return f", draws annealed in {self.moves} steps"
        if self.apart is None:
            return ""
        return f", {self.apart.sizes.groups} groups weighted separately"

    def evaluate(self, points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the collapsed log-density at points (n, d), (n,), and its gradients,
        (n, d)."""
        values, gradients, batch = [], [], self.programs.batch
        for i in range(0, len(points), batch):
            here = points[i : i + batch]
            rows, _, _ = self.known.at(here)
            found = self._evaluated(self.known, here, rows, gradient=True)
            bound, log_prior, ascent = (np.asarray(x, float) for x in found[:3])
            values.append(bound + log_prior)
            gradients.append(ascent)
            best = np.where(np.isfinite(values[-1]), values[-1], -np.inf).argmax()
            if values[-1][best] > self.best:
                self.best = float(values[-1][best])
                factors = jax.tree.map(
                    lambda x, best=best: x[best : best + 1], found.factors
                )
                self.starts[0] = Start(factors, KNOWN)
        return np.concatenate(values), np.concatenate(gradients)

    def first(self, points: np.ndarray, widths: np.ndarray) -> Points:
        """Weigh draws at the first points. Searches at some of them make a spline, and
        searches at others calibrate its error.

        :param points: points, (n, d).
        :param widths: widths, (n, draws).
        """
        all_ = [_Gaussians(known, points) for known in self.modes]
        for gaussian in all_:
            here, each = 0, EACH * (1 + points.shape[1])
            while here < len(points) and not (here and self._calibrated()):
                more = np.arange(here, min(here + each, len(points)))
                gaussian.interpolate(more, -np.inf)
                self._find(gaussian, more)
                gaussian.known.learn()
                here, each = here + each, max(each // 2, LEAST)
            rest = np.arange(here, len(points))
            self._find(gaussian, gaussian.interpolate(rest, self._most))

        def known(here: slice) -> list[_Gaussians]:
            return [gaussian.part(here) for gaussian in all_]

        return self._in_chunks(points, widths, known, kept=False)

    def _calibrated(self) -> bool:
        """Find the largest accepted value of the power function; return whether enough
        losses are known. Losses grow as the square of the error of the spline, which
        the power function bounds up to a factor."""
        doubts, losses = np.array(self._doubts), np.array(self._losses)
        seen = np.isfinite(doubts) & np.isfinite(losses) & (doubts > 0)
        if seen.sum() < LEAST:
            return False
        order = np.argsort(doubts[seen])
        doubts, losses = doubts[seen][order], losses[seen][order]
        factor = np.quantile(losses / doubts, SURE)
        # Rounded bounds of many data do not show smaller losses.
        eps = float(np.finfo(self.programs.structure.dtype).eps)
        rounding = 2 * eps * abs(self.best)
        enough = max(ENOUGH, rounding) if np.isfinite(rounding) else ENOUGH
        # The largest error up to which enough of the losses are small, in all windows.
        small = np.convolve(losses <= enough, np.full(LEAST, 1 / LEAST), "valid")
        known = doubts[LEAST - 1 :][np.logical_and.accumulate(small >= SURE)]
        self._most = max(enough / max(factor, 1e-300), known.max(initial=0.0))
        return True

    def draw(
        self, points: np.ndarray, widths: np.ndarray, *, found: bool, kept: bool = True
    ) -> Points:
        """Draw the latents at points.

        :param points: points, (n, d).
        :param widths: widths, (n, draws).
        :param found: whether to search for the Gaussian at all of them.
        :param kept: whether to keep latents and values of sites, and not only weights.
        """

        def fitted(here: slice) -> list[_Gaussians]:
            gaussians = [_Gaussians(known, points[here]) for known in self.modes]
            for gaussian in gaussians:
                all_ = np.arange(len(gaussian.points))
                most = -np.inf if found else self._most
                self._find(gaussian, gaussian.interpolate(all_, most))
                if not found and gaussian.known.grown:
                    gaussian.known.learn()
                    self._calibrated()
            return gaussians

        return self._in_chunks(points, widths, fitted, kept=kept)

    def _in_chunks(
        self,
        points: np.ndarray,
        widths: np.ndarray,
        gaussians: Callable[[slice], list[_Gaussians]],
        *,
        kept: bool,
    ) -> Points:
        """Draw from the Gaussians of each mode at the points of each chunk. Where draws
        contradict an interpolation, search, and draw again if it was not accurate;
        parameters as for :meth:`draw`."""
        chunk, whole = self.programs.chunk, None
        unlike = np.zeros(len(points), bool)

        def draw(here: Any, gaussians: list[_Gaussians]) -> None:
            nonlocal whole
            part, unlike[here] = self._chunk(points[here], widths[here], gaussians)
            if not kept:
                part = part._replace(z=part.z[..., :0], sites={})
            if whole is None:
                whole = jax.tree.map(
                    lambda x: np.empty((len(points), *x.shape[1:]), x.dtype), part
                )
            for into, new in zip(*map(jax.tree.leaves, (whole, part)), strict=True):
                into[here] = new

        for i in range(0, len(points), chunk):
            here = slice(i, i + chunk)
            known = gaussians(here)
            draw(here, known)
            self._bar.update(len(points[here]))
            assert whole is not None
            places = np.flatnonzero(unlike[here])
            if len(places):
                doubtful = [gaussian.part(places) for gaussian in known]
                lost = self._lost(doubtful)
                bounds = [gaussian.bound for gaussian in doubtful]
                whole.bound[i + places] = np.max(bounds, axis=0)
                # Others are bad by chance. Without them weights would be too large.
                if len(lost):
                    draw(i + places[lost], [part.part(lost) for part in doubtful])
        assert whole is not None
        return whole

    def _lost(self, gaussians: list[_Gaussians]) -> np.ndarray:
        """Search for the Gaussians at points; return the indices of inaccurate ones."""
        all_ = np.arange(len(gaussians[0].points))
        for gaussian in gaussians:
            self._find(gaussian, all_)
            gaussian.sure[:] = False
        losses = np.reshape(
            self._losses[-len(gaussians) * len(all_) :], (-1, len(all_))
        )
        return np.flatnonzero(~(losses <= LOST).all(0))

    def _chunk(
        self, points: np.ndarray, widths: np.ndarray, gaussians: list[_Gaussians]
    ) -> tuple[Points, np.ndarray]:
        """Return draws at the points of one chunk, and whether they contradict an
        interpolation."""
        programs, num = self.programs, len(points)
        size = programs.chunk, programs.num_draws // self.alike, self.latents
        noise = self._rng.standard_normal(size, programs.structure.dtype)
        apart = self.apart and self.apart.uniform(self._rng, size[0], noise.dtype)
        draw = partial(self._drawn, points, gaussians, noise, widths, apart)
        drawn = draw()
        unlike = self._unlike(drawn, gaussians)
        bounds = np.stack([gaussian.bound for gaussian in gaussians])
        # The factors found are those of one more update, which may go too far.
        broken = ~np.isfinite(drawn.log_det) & np.isfinite(bounds).all(0) & ~unlike
        if broken.any():
            for gaussian in gaussians:
                known = gaussian.known
                gaussian.rows[broken] = known.without_negative(gaussian.rows[broken])
            drawn = draw()
        failed = ~np.isfinite(bounds).all(0)
        total, lost, log_det, log_prior = (
            np.asarray(x, float)
            for x in (drawn.total, drawn.lost, drawn.log_det, drawn.log_prior)
        )
        ratios = total + lost + (log_prior + log_det / 2)[:, None]
        # If the interpolated precision is not positive definite, weights may be
        # thousands of nats above the best. These are rounding errors.
        ratios[failed[:, None] | (ratios > self.best + ABSURD)] = np.nan
        squares = np.square(noise[:num], dtype=float).sum(-1).repeat(self.alike, 1)
        corner = noise[:num, :, :0]
        if self.apart is not None:
            corner = widths[:, :: self.alike, None] * noise[:num] + self.shift
        bound = np.max(bounds, axis=0)
        found = Points(
            np.asarray(drawn.z), bound, log_prior, ratios, squares, drawn.sites, corner
        )
        return found, unlike

    def _unlike(self, drawn: Drawn, gaussians: list[_Gaussians]) -> np.ndarray:
        """Whether draws are far worse than the interpolated bound at their point says,
        compared with points at which the Gaussian was found, (n,). An interpolation may
        give a bound that is too high, a Gaussian far from the optimum, or a precision
        that is not positive definite.

        :param drawn: draws at n points.
        :param gaussians: the Gaussians there.
        """
        bound = np.max([gaussian.bound for gaussian in gaussians], axis=0)
        sure = np.any([gaussian.sure for gaussian in gaussians], axis=0)
        ratios = np.asarray(drawn.total + drawn.lost, float)
        evidence = log_mean_exp(ratios, 1) + np.asarray(drawn.log_det, float) / 2
        excess = bound - evidence
        found = excess[~sure & np.isfinite(excess)]
        self._excess = found.max(initial=self._excess)
        return sure & ~(excess <= self._excess + UNLIKE)

    def _drawn(
        self,
        points: np.ndarray,
        gaussians: list[_Gaussians],
        noise: np.ndarray,
        widths: np.ndarray,
        uniform: np.ndarray | None,
    ) -> Drawn:
        """Draw at the points of one chunk, padded to the shape of the others.

        :param noise: standard normal numbers; with groups that are weighted separately,
            of the border, like ``widths``.
        :param uniform: with such groups, the uniform numbers of their candidates.
        """
        programs, data, num = self.programs, self.data, len(points)
        filled = np.minimum(np.arange(programs.chunk), num - 1)
        each = [g.known.factors(g.rows[filled]) for g in gaussians]
        points = points[filled].astype(programs.hyper.dtype)
        numbers = noise, widths[filled, :: self.alike].astype(noise.dtype)
        if len(each) > 1:
            factors = jax.tree.map(lambda *x: np.stack(x, 1), *each)
            chosen = self._rng.choice(len(each), noise.shape[:2], p=self._shares)
            shares = np.log(self._shares).astype(noise.dtype)
            mixed = points, factors, chosen, *numbers
            drawn = programs.draw_mixed(mixed, num, data, shares)
        elif self.apart is not None:
            shift = self.shift.astype(noise.dtype)
            own = points, each[0], *numbers, uniform
            drawn = programs.draw_apart(own, num, data, shift, self.apart.group)
        elif self.moves:
            seeds = self._rng.integers(2**31, size=len(points)).astype(np.int32)
            own = points, each[0], *numbers, seeds
            drawn = programs.draw_annealed(own, num, data, self.moves)
        else:
            drawn = programs.draw((points, each[0], *numbers), num, data)
        return jax.tree.map(lambda x: np.asarray(x)[:num], drawn)

    def _find(self, gaussians: _Gaussians, places: np.ndarray) -> None:
        """Find the Gaussian at some of the points.

        :param gaussians: the Gaussians, which are updated in place.
        :param places: the indices of these points.
        """
        batch, known, points = self.programs.batch, gaussians.known, gaussians.points
        doubts, rows = gaussians.doubts, gaussians.rows
        for i in range(0, len(places), batch):
            here = places[i : i + batch]
            # A point that was just found may be a nearer start.
            near = ~np.isfinite(doubts[here])
            begin = rows[here]
            if near.any():
                begin[near] = known.at(points[here][near])[0]
            found = self._evaluated(known, points[here], begin, gradient=False)
            gaussians.bound[here] = np.asarray(found.bound, float)
            rows[here] = known.flat(found.factors)
            self._doubts += list(doubts[here])
            self._losses += list(np.asarray(found.loss, float))

    def _evaluated(
        self, known: Known, points: np.ndarray, rows: np.ndarray, *, gradient: bool
    ) -> Evaluated:
        """Return the Gaussian at points. If one is not finite, or has a negligible
        density, its search may have started from unsuitable factors, and is repeated
        from the prior."""
        programs, data = self.programs, self.data
        self.evaluations += len(points)
        start = known.start(rows)
        found = programs.evaluate(points, start, data, gradient=gradient)
        good = self._good(found)
        if not good.all() and start.known.any():
            none = jax.tree.map(lambda x: np.repeat(x, len(points), 0), self._none)
            anew = programs.evaluate(points, none, data, gradient=gradient)
            self.evaluations += len(points)
            old, new = (np.asarray(x.bound) for x in (found, anew))
            better = ~good & np.isfinite(new) & ~(new <= old)
            found = chosen(better, anew, found)
            good = self._good(found)
        if good.any():
            kept = jax.tree.map(lambda x: np.asarray(x)[good], found.factors)
            known.add(points[good], kept, np.asarray(found.bound, float)[good])
        return found

    def _good(self, found: Evaluated) -> np.ndarray:
        """Whether Gaussians are finite and may have some weight, (n,)."""
        value = np.asarray(found.bound, float) + np.asarray(found.log_prior, float)
        return np.isfinite(value) & (value > self.best - FAR)
