# SPDX-License-Identifier: Apache-2.0
"""The report of a run: its certificate, its table, and the times of its parts."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from textwrap import wrap
from typing import Any

from numpyro_gpaug.infer.nested.weighted import LARGEST_LOSS
from numpyro_gpaug.predict.summary import levels_of


def columns_of(prob: float = 0.9) -> list[str]:
    """Return the columns of a table.

    :param prob: the probability between the outer quantiles.
    """
    return ["mean", "sd", *levels_of(prob), "n_eff"]


class Clock:
    """Seconds by part of a run.

    :ivar seconds: seconds by name of the part.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Add the time spent inside to a part."""
        since = time.perf_counter()
        try:
            yield
        finally:
            spent = time.perf_counter() - since
            self.seconds[name] = self.seconds.get(name, 0.0) + spent


def certificate(run: Any) -> str:
    """State in words what k-hat implies for the draws.

    :param run: a :class:`~numpyro_gpaug.infer.nested.draws.Run`.
    """
    weighted = run.weighted
    khat, loss = weighted.khat, weighted.loss
    # As many digits as tell them apart.
    digits = 2
    while f"{khat:.{digits}f}" == f"{weighted.limit:.{digits}f}" and digits < 5:
        digits += 1
    what, limit = f"k-hat {khat:.{digits}f}", f"{weighted.limit:.{digits}g}"
    modes = f"; {run.searched.said}" if run.searched.said else ""
    modes += run.mirrors.said if run.mirrors else ""
    if run.certified:
        return (
            f"{what}, at most {limit}: the weighted draws are from the exact "
            f"posterior, up to their Monte Carlo error{modes}"
        )
    if khat > weighted.limit:
        what += f", above {limit}: the weights are too uneven"
    if loss > LARGEST_LOSS:
        what += (
            f"; the model could not be evaluated in about {loss:.0%} of the posterior"
        )
        what += " (in float32 covariance matrices may need more jitter, or use float64)"
    if run.slow:
        what += (
            f"; only {run.independence:.0%} of the draws by NUTS are independent (are "
            "there factors with loadings, or labels that may be switched?)"
        )
    if not run.searched.all_drawn:
        what += f"{modes}, more than the draws cover"
    if run.correction:
        return f"{what}. {run.correction}"
    return f"{what}. Draws and evidence are NOT those of the exact posterior"


def _sparse(structure: Any) -> str:
    """Describe the processes with fewer inducing values than function values."""
    shapes = {site.name: site.value_shape for site in structure.sites if site.shape}
    functions = {
        name: structure.functions[name].shape
        for name in structure.process_names
        if f"{name}.v" in shapes and name in structure.functions
    }
    # Inducing values are (M,) for functions (N,), and (C, M) for functions (N, C).
    # States of a chain are (M, R) for functions (N,).
    found = {
        name: (shapes[f"{name}.v"][len(shape) - 1], shape[0])
        for name, shape in functions.items()
    }
    return ", ".join(
        f"{m} inducing values determine {n} values of {name}"
        for name, (m, n) in found.items()
        if m < n
    )


def overview(run: Any, num_samples: int) -> list[tuple[str, str]]:
    """Return the run as rows of a table.

    :param run: a :class:`~numpyro_gpaug.infer.nested.draws.Run`.
    :param num_samples: the requested number of equally weighted draws.
    """
    weighted, structure = run.weighted, run.programs.structure
    num, draws = weighted.log_ratios.shape
    hyper = ", ".join(structure.others) or "none"
    latents = ", ".join(f"{s.name} {s.value_shape}" for s in structure.sites)
    samples = -(-num_samples // run.num_chains) * run.num_chains
    rows = [
        ("method", run.way),
        ("hyperparameters", hyper),
        ("latents", latents),
        (
            "draws",
            f"{num} hyperparameters of dimension {weighted.points.shape[1]}, {draws} "
            f"draws of {run.z.shape[-1]} latents at each; effective sample sizes "
            f"{run.independence * weighted.effective_points:.0f} (hyperparameters) and "
            f"{run.independence * weighted.effective_size:.0f} (draws); "
            f"get_samples() returns {samples}",
        ),
    ]
    if sparse := _sparse(structure):
        rows.append(("sparse", f"{sparse}; the residual is neglected"))
    rows.append(("certificate", certificate(run)))
    evidence = "not available from draws by NUTS"
    if weighted.normalised:
        error = f"standard error {weighted.log_evidence_error:.3f}"
        evidence = f"{weighted.log_evidence:.3f}, {error}"
    rows.append(("log evidence", evidence))
    if failures := int(weighted.failed.sum()):
        where = f"at {failures} of {num} hyperparameters"
        lost = f"about {weighted.loss:.1%} of the posterior is there"
        rows.append(("failures", f"no finite density {where}; {lost}"))
    seconds = run.clock.seconds
    parts = ", ".join(f"{name} {spent:.2f}" for name, spent in seconds.items())
    work = f"{run.evaluations} evaluations of the collapsed bound in "
    rows.append(("work", f"{work}{sum(seconds.values()):.2f} s: {parts}"))
    return [
        ("" if i else name, line)
        for name, text in rows
        for i, line in enumerate(wrap(text, 72) or [""])
    ]
