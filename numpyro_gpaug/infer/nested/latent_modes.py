# SPDX-License-Identifier: Apache-2.0
"""Modes of the latents given hyperparameters. There is one mode if all data are
log-concave in the latents. Otherwise a search looks for others."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import numpy as np

from numpyro_gpaug.infer.nested.drawer import Drawer
from numpyro_gpaug.infer.nested.programs import Evaluated
from numpyro_gpaug.math.compiling import jit_for_few_runs

# The largest number of lines through the mean of the Gaussian, and the places on them,
# in its standard deviations.
LINES, REACH = 16, np.concatenate([np.arange(0.5, 6, 0.5), 6 * 1.15 ** np.arange(20)])
# The largest number of terms that are evaluated along the lines.
ROOM = 2**22
# Numbers of searches that start at draws from the prior, and at maxima along the lines.
FROM_PRIOR, FROM_LINES = 8, 16
# The largest number of modes to draw from, and how many nats below the best a mode is
# negligible.
MOST, NEGLIGIBLE = 8, 9.0
# The smallest distance between the means of two modes, in standard deviations.
APART = 1.0


class Searched(NamedTuple):
    """The result of the search for modes of the latents.

    :param concave: whether data were log-concave in the latents at all points that were
        tried.
    :param searches: the number of searches.
    :param modes: the number of relevant modes that were found.
    """

    concave: bool
    searches: int = 0
    modes: int = 1

    @property
    def all_drawn(self) -> bool:
        """Whether draws come from all modes that were found."""
        return self.modes <= MOST

    @property
    def said(self) -> str:
        """The result in words, for a certificate; empty if there can be only one
        mode."""
        if self.concave:
            return ""
        found = "no second mode" if self.modes == 1 else f"{self.modes} modes"
        return f"{found} of the latents found by {self.searches} searches"


def searched(drawer: Drawer, point: np.ndarray, rng: np.random.Generator) -> Searched:
    """Search for modes of the latents at a point, and make the drawer draw from all
    that are found, the highest first.

    :param drawer: the drawer, which knows the Gaussian at the point.
    :param point: unconstrained hyperparameters, (d,).
    :param rng: random numbers.
    """
    programs, data = drawer.programs, drawer.data
    structure = programs.structure
    if not structure.size or all(s.log_concave for s in structure.observed):
        return Searched(concave=True)
    own = drawer.found(point)
    concave, along = _along_lines(drawer, point, own.factors, rng)
    if concave:
        return Searched(concave=True)
    white = rng.normal(size=(FROM_PRIOR, structure.form.rank))
    prior = white if structure.standard else programs.from_white(point, white, data)
    starts = programs.factors_at(
        point, own.factors, np.concatenate([along, prior]), data
    )
    found = [own]
    number = len(along) + FROM_PRIOR
    for i in range(number):
        start = jax.tree.map(lambda x, i=i: np.asarray(x)[i : i + 1], starts)
        mode = drawer.search(point, start)
        if np.isfinite(mode.bound[0]) and all(_apart(mode, m, rng) for m in found):
            found.append(mode)
    modes = [(m.factors, float(m.bound[0])) for m in found]
    best = max(bound for _, bound in modes)
    kept = [(factors, bound) for factors, bound in modes if bound > best - NEGLIGIBLE]
    kept.sort(key=lambda mode: -mode[1])
    if len(kept) > 1 or kept[0][0] is not own.factors:
        drawer.draw_from(point, kept[:MOST])
    return Searched(False, number, len(kept))


def _apart(one: Evaluated, other: Evaluated, rng: np.random.Generator) -> bool:
    """Whether the distance of the means of two Gaussians exceeds their widths."""
    both = [jax.tree.map(lambda x: np.asarray(x)[0], m.moments) for m in (one, other)]
    noise = rng.normal(size=(64, both[1].rank)).astype(both[1].mean.dtype)
    widths = [np.asarray(_deviations(q, noise)) for q in both]
    apart = np.abs(np.asarray(both[0].mean - both[1].mean))[0]
    return bool((apart > APART * np.maximum(*widths)).any())


# Outside of a program the recurrences of chains would be compiled at every call.
@jit_for_few_runs
def _deviations(moments: Any, noise: np.ndarray) -> jax.Array:
    """Return the standard deviations of latents, from standard normal draws."""
    return moments.unwhiten(noise).std(0)


def _along_lines(
    drawer: Drawer, point: np.ndarray, factors: Any, rng: np.random.Generator
) -> tuple[bool, np.ndarray]:
    """Return whether the log-density of every observation is concave along lines
    through the mean of the Gaussian, and the latents at other maxima of the joint
    log-density.

    :param drawer: the drawer.
    :param point: unconstrained hyperparameters, (d,).
    :param factors: factors of the Gaussian, with a leading axis of 1.
    :param rng: random numbers.
    """
    programs, data = drawer.programs, drawer.data
    size, dtype = programs.structure.form.rank, programs.structure.dtype
    steps = np.concatenate([-REACH[::-1], [0.0], REACH])
    _, terms, _ = programs.terms(point, factors, np.zeros((1, size)), data)
    room = ROOM // (len(steps) * (terms.shape[1] + size))
    number = int(np.clip(room, 2, LINES))
    # Along single latents, and along all latents at once.
    chosen = rng.permutation(size)[: number - number // 4]
    own = np.zeros((len(chosen), size))
    own[np.arange(len(chosen)), chosen] = 1
    mixed = rng.normal(size=(number // 4 if size > 1 else 0, size))
    mixed /= np.linalg.norm(mixed, axis=1, keepdims=True)
    directions = np.concatenate([own, mixed])
    noise = (directions[:, None] * steps[:, None]).astype(dtype)
    along = programs.terms(point, factors, noise.reshape(-1, size), data)
    concave, found = True, []
    for z, terms, squares in zip(
        *(x.reshape(len(directions), len(steps), *x.shape[1:]) for x in along),
        strict=True,
    ):
        concave &= _is_concave(terms, steps)
        total = terms.sum(1) - 0.5 * squares
        total = np.where(np.isfinite(total), total, -np.inf)
        inner = total[1:-1]
        peaks = 1 + np.flatnonzero((inner > total[:-2]) & (inner >= total[2:]))
        peaks = peaks[np.abs(steps[peaks]) > 1]
        found += [(total[i], z[i]) for i in peaks]
    found = sorted(found, key=lambda pair: -pair[0])[:FROM_LINES]
    return concave, np.array([z for _, z in found]).reshape(-1, programs.structure.size)


def _is_concave(terms: np.ndarray, steps: np.ndarray) -> bool:
    """Whether the derivatives of all terms decrease along a line, up to rounding.

    :param terms: terms, (steps, n).
    :param steps: positions on the line, (steps,).
    """
    rounding = 100 * np.finfo(terms.dtype).eps
    terms = terms.astype(float)
    with np.errstate(invalid="ignore"):
        gaps = np.diff(steps)[:, None]
        slopes = np.diff(terms, axis=0) / gaps
        sizes = rounding * (1 + np.abs(terms[1:]) + np.abs(terms[:-1])) / gaps
        rises = np.diff(slopes, axis=0) > sizes[1:] + sizes[:-1]
    # A density that is zero on both sides may be concave.
    return not rises.any()
