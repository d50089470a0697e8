# SPDX-License-Identifier: Apache-2.0
"""Measure how far two samples of one posterior are apart: means, standard deviations
and quantiles, each with its Monte Carlo error. The standard deviation of a heavy tail
is mostly noise; its quantiles are not.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from arviz_stats.base import array_stats
from numpyro.diagnostics import effective_sample_size

from numpyro_gpaug.math.importance import weighted_quantiles

LEVELS = {"5%": 0.05, "50%": 0.5, "95%": 0.95}


class Statistics(NamedTuple):
    """The statistics of one entry of a site.

    :param mean: and standard deviation ``sd``.
    :param quantiles: at ``LEVELS``.
    :param errors: Monte Carlo errors of these.
    """

    mean: float
    sd: float
    quantiles: np.ndarray
    errors: np.ndarray


Table = dict[str, Statistics]


def entries(draws: dict[str, Any], names: set[str], axes: int) -> Iterator[Any]:
    """Iterate over all entries of the named sites, with their labels.

    :param draws: values by name.
    :param names: of the sites.
    :param axes: how many axes the draws have, which come first.
    """
    for name in sorted(names & set(draws)):
        values = np.asarray(draws[name], float)
        for place in np.ndindex(values.shape[axes:]):
            label = f"{name}[{','.join(map(str, place))}]" if place else name
            yield label, values[(..., *place)]


def of_chains(draws: dict[str, Any], names: set[str]) -> tuple[Table, float]:
    """Statistics of every entry, and the smallest number of effective draws.

    :param draws: by chain.
    :param names: of the sites.
    """
    table, worth = {}, np.inf
    for label, x in entries(draws, names, 2):
        errors = [
            array_stats.mcse(x, method="quantile", prob=p) for p in LEVELS.values()
        ]
        quantiles = np.quantile(x, [*LEVELS.values()])
        table[label] = Statistics(x.mean(), x.std(), quantiles, np.array(errors))
        worth = min(worth, float(effective_sample_size(x)))
    return table, worth


def of_weighted(draws: dict[str, Any], log_weights: Any, num: int) -> Table:
    """Statistics of every entry of weighted draws.

    :param draws: several at every point, in order.
    :param log_weights: of the draws, normalised.
    :param num: how many points; errors are theirs, taken to be independent.
    """
    weights, table = np.exp(np.asarray(log_weights, float)), {}
    for label, x in entries(draws, {*draws}, 1):
        mean = weights @ x
        quantiles = weighted_quantiles(x[:, None], weights, (*LEVELS.values(),))[:, 0]
        errors = []
        for level, quantile in zip(LEVELS.values(), quantiles, strict=True):
            own = (weights * ((x <= quantile) - level)).reshape(num, -1).sum(1)
            off = np.sqrt(np.square(own).sum())
            ends = np.clip([level - off, level + off], 0, 1)
            low, high = weighted_quantiles(x[:, None], weights, tuple(ends))[:, 0]
            errors.append((high - low) / 2)
        sd = np.sqrt(weights @ np.square(x - mean))
        table[label] = Statistics(mean, sd, quantiles, np.array(errors))
    return table


def differences(found: Table, truth: Table) -> dict[str, float]:
    """Return the largest differences over all entries that both have: of means and
    quantiles in standard deviations of the truth, and of standard deviations relative
    to it. In brackets is the truth's Monte Carlo error of that quantile; ``apart`` is
    the difference over the error of both.

    :param found: what is judged.
    :param truth: what it is judged by.
    """
    shared = [k for k in found if k in truth and truth[k].sd > 0]
    ours, theirs = [found[k] for k in shared], [truth[k] for k in shared]
    scale = np.array([x.sd for x in theirs])
    means = np.array([a.mean - b.mean for a, b in zip(ours, theirs, strict=True)])
    report = {
        "mean": float(np.abs(means / scale).max()),
        "sd": float(np.abs([a.sd for a in ours] / scale - 1).max()),
    }
    off, known = (np.array([x.quantiles for x in each]) for each in (ours, theirs))
    off = np.abs(off - known)
    own, errors = (np.array([x.errors for x in each]) for each in (ours, theirs))
    for i, level in enumerate(LEVELS):
        worst = int(np.argmax(off[:, i] / scale))
        report[level] = float(off[worst, i] / scale[worst])
        report[f"({level})"] = float(errors[worst, i] / scale[worst])
        report[f"{level} of"] = shared[worst]
    report["apart"] = float((off / np.hypot(own, errors)).max())
    return report
