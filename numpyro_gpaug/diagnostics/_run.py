# SPDX-License-Identifier: Apache-2.0
"""Models run at draws."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jax import Array
from numpyro import handlers

from numpyro_gpaug._numpyro import residual_policy
from numpyro_gpaug.model.structure import Arguments, Trace


def run(
    model: Callable[..., Any],
    arguments: Arguments,
    key: Array,
    values: dict[str, Any],
    policy: str = "mean",
) -> Trace:
    """The trace of a model at values of its latents.

    :param model: a NumPyro model.
    :param arguments: its arguments.
    :param key: seed for whatever is not in ``values``.
    :param values: by site.
    :param policy: of residuals, see :class:`residual_policy`.
    """
    args, kwargs = arguments.merge()
    filled = handlers.substitute(handlers.seed(model, key), data=values)
    return handlers.trace(residual_policy(filled, policy)).get_trace(*args, **kwargs)
