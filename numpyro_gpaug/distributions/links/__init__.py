# SPDX-License-Identifier: Apache-2.0
"""Piecewise-constant inverse links, fixed or learnt."""

from numpyro_gpaug.distributions.links.learned import learned_link, link_penalty
from numpyro_gpaug.distributions.links.piecewise import PiecewiseLink

__all__ = ["PiecewiseLink", "learned_link", "link_penalty"]
