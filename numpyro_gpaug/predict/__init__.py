# SPDX-License-Identifier: Apache-2.0
"""Fitted posteriors: predictions at new inputs, and files."""

from numpyro_gpaug.predict.averages import Averages, average
from numpyro_gpaug.predict.many import Posteriors
from numpyro_gpaug.predict.mixture import FunctionValues
from numpyro_gpaug.predict.posterior import Posterior

__all__ = ["Averages", "FunctionValues", "Posterior", "Posteriors", "average"]
