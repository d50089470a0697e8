# SPDX-License-Identifier: Apache-2.0
"""Variational inference: closed-form updates, and losses for NumPyro's ``SVI``."""

from numpyro_gpaug.infer.vi.batches import ArrowRows, Batches, Blocks
from numpyro_gpaug.infer.vi.conjugate import ConjugateSVI
from numpyro_gpaug.infer.vi.elbo import (
    TraceAnalytic_ELBO,
    TraceWasserstein_ELBO,
    squared_wasserstein,
)
from numpyro_gpaug.infer.vi.result import ConjugateResult
from numpyro_gpaug.infer.vi.schedules import Adaptive, Constant, RobbinsMonro
from numpyro_gpaug.infer.vi.state import ConjugateState, load_state, save_state
from numpyro_gpaug.infer.vi.streams import Stream
from numpyro_gpaug.math.processes import all_or_none

__all__ = [
    "Adaptive",
    "ArrowRows",
    "Batches",
    "Blocks",
    "ConjugateResult",
    "ConjugateSVI",
    "ConjugateState",
    "Constant",
    "RobbinsMonro",
    "Stream",
    "TraceAnalytic_ELBO",
    "TraceWasserstein_ELBO",
    "all_or_none",
    "load_state",
    "save_state",
    "squared_wasserstein",
]
