# SPDX-License-Identifier: Apache-2.0
"""Signs of hyperparameters that leave the posterior unchanged, such as signs of
loadings: flipping them, with the latents that they multiply, changes no predictor."""

from __future__ import annotations

from itertools import product
from typing import Any, NamedTuple

import jax
import numpy as np

from numpyro_gpaug.infer.nested.hyperparameters import Hyperparameters
from numpyro_gpaug.infer.nested.proposal import Evaluate, Mode

# The difference of log-densities that is rounding, as a share and in nats.
ROUNDING, SAME = 1e-5, 0.02
# Numbers of points, besides the mode, at which a symmetry is checked, and the squared
# distance from which a flipped mode is another one.
CHECKED, FAR = 2, 9.0


class Mirrors(NamedTuple):
    """The signs that leave the posterior unchanged.

    :param flips: factors of one and minus one, the first all one, (n, d).
    :param names: the sites whose signs may change.
    """

    flips: np.ndarray
    names: tuple[str, ...] = ()

    @property
    def said(self) -> str:
        """The symmetry in words, for a certificate; empty without one."""
        if not self.names:
            return ""
        return (
            f"; signs of {', '.join(self.names)} leave the density unchanged: the "
            f"evidence counts {len(self.flips)} mirrored modes, and draws may be of one"
        )


def mirrored(hyper: Hyperparameters, mode: Mode, evaluate: Evaluate) -> Mirrors:
    """Look for signs that leave the posterior unchanged: of a site, or of the entries
    at one place along an axis, such as a column of loadings.

    :param hyper: the hyperparameters.
    :param mode: a mode.
    :param evaluate: returns the log-density and its gradients at points.
    """
    point, component = mode.point, mode.component
    noise = np.random.default_rng(0).normal(size=(CHECKED, len(point)))
    checked = [point, *(point + noise @ component.axes.T)]
    values: list[float] = []

    def is_symmetry(flip: np.ndarray) -> bool:
        if component.distances(point[None] * flip)[0] < FAR:
            return False
        for i, x in enumerate(checked):
            if i == len(values):
                values.append(float(evaluate(x[None])[0][0]))
            difference = abs(float(evaluate((x * flip)[None])[0][0]) - values[i])
            if not difference < SAME + ROUNDING * abs(values[i]):
                return False
        return True

    group, names = [np.ones(len(point))], []
    for name, flip in _signs(hyper):
        known = any((flip == x).all() for x in group)
        if not known and is_symmetry(flip):
            group = [a * b for a, b in product(group, (group[0], flip))]
            names.append(name)
    return Mirrors(np.array(group), tuple(dict.fromkeys(names)))


def _signs(hyper: Hyperparameters) -> list[tuple[str, np.ndarray]]:
    """Return sites that may have either sign, with factors that flip some entries of
    each: one place along an axis, and then all."""
    found = []
    for name, zeros in sorted(hyper.zeros.items()):
        if name not in hyper.real:
            continue
        parts: list[Any] = [
            (*[slice(None)] * axis, i)
            for axis, size in enumerate(zeros.shape)
            for i in range(size if size > 1 else 0)
        ]
        for part in (*parts, ...):
            signs = jax.tree.map(np.ones_like, hyper.zeros)
            signs[name][part] = -1
            flat = [x.ravel() for x in jax.tree.leaves(signs)]
            found.append((name, np.concatenate(flat)))
    return found
