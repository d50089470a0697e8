# SPDX-License-Identifier: Apache-2.0
"""Figures of fits and of the results of :mod:`numpyro_gpaug.diagnostics`.

Each function draws into one ``matplotlib`` axes, new or given, and returns it.
Matplotlib comes with ``pip install "numpyro_gpaug[plots]"`` and is imported when first
needed.
"""

from numpyro_gpaug.plots._checks import (
    plot_elbo,
    plot_pit,
    plot_reliability,
    plot_sbc,
    plot_vi_vs_mcmc,
)
from numpyro_gpaug.plots._functions import (
    plot_decision,
    plot_latent,
    plot_link,
    plot_predictive,
)

__all__ = [
    "plot_decision",
    "plot_elbo",
    "plot_latent",
    "plot_link",
    "plot_pit",
    "plot_predictive",
    "plot_reliability",
    "plot_sbc",
    "plot_vi_vs_mcmc",
]
