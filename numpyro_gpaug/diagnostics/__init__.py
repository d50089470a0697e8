# SPDX-License-Identifier: Apache-2.0
"""Checks of a fit: convergence, ArviZ trees, importance sampling, MCMC, calibration.

ArviZ is imported when it is first needed, so that ``import numpyro_gpaug`` stays fast.
Only ``arviz_base`` and ``arviz_stats`` are used, which have the same names on Python
3.11 (0.8) and later (1.x).
"""

from numpyro_gpaug.diagnostics._importance import Psis, psis_estimates, psis_khat
from numpyro_gpaug.diagnostics._loo import compare, loo
from numpyro_gpaug.diagnostics._mcmc import vi_against_mcmc
from numpyro_gpaug.diagnostics._pit import pit
from numpyro_gpaug.diagnostics._sbc import Calibration, sbc
from numpyro_gpaug.diagnostics._scores import (
    ReliabilityCurve,
    brier_score,
    expected_calibration_error,
    reliability_curve,
)
from numpyro_gpaug.diagnostics._sensitivity import sensitivity
from numpyro_gpaug.diagnostics._tree import compare_evidence, to_datatree
from numpyro_gpaug.math.convergence import Convergence, convergence

__all__ = [
    "Calibration",
    "Convergence",
    "Psis",
    "ReliabilityCurve",
    "brier_score",
    "compare",
    "compare_evidence",
    "convergence",
    "expected_calibration_error",
    "loo",
    "pit",
    "psis_estimates",
    "psis_khat",
    "reliability_curve",
    "sbc",
    "sensitivity",
    "to_datatree",
    "vi_against_mcmc",
]
