# SPDX-License-Identifier: Apache-2.0
"""Fitted posteriors: predictions at new inputs, and files."""

from numpyro_gpaug.predict.posterior import Posterior
from numpyro_gpaug.predict.predictor import FunctionValues

__all__ = ["FunctionValues", "Posterior"]
