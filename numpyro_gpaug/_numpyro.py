# SPDX-License-Identifier: Apache-2.0
"""Every private NumPyro name the package touches, in one place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from numpyro.handlers import mask, replay
from numpyro.primitives import _PYRO_STACK, Messenger, apply_stack


class residual_policy(Messenger):
    """Fixes the residual policy of every Gaussian process called inside.

    :param fn: the model.
    :param policy: ``"mean"`` (no residual), ``"noise"`` (``sqrt(r) eps`` with fresh
        noise) or ``"site"`` (``eps`` is a latent site ``"{name}.eps"``).
    """

    def __init__(self, fn: Callable | None = None, policy: str = "mean") -> None:
        self.policy = policy
        super().__init__(fn)


def current_residual_policy() -> str:
    """The policy in force here: the innermost :class:`residual_policy`, else
    ``"noise"`` in prediction (densities masked out) and under ``replay`` (stock
    evidence lower bounds), else ``"mean"``."""
    for handler in reversed(_PYRO_STACK):
        if isinstance(handler, residual_policy):
            return handler.policy
    for handler in _PYRO_STACK:
        # Not numpyro.get_mask(), which a mask inside the model hides it from.
        masked_out = isinstance(handler, mask) and handler.mask is False
        if masked_out or isinstance(handler, replay):
            return "noise"
    return "mean"


def deterministic_site(name: str, conditional: Callable[[], Any]) -> Any:
    """A deterministic message whose ``fn`` is ``conditional``: handlers may read its
    structure and fill in the value; otherwise the value is ``conditional()``."""
    if not _PYRO_STACK:
        return conditional()
    return apply_stack(
        {
            "type": "deterministic",
            "name": name,
            "fn": conditional,
            "args": (),
            "kwargs": {},
            "value": None,
            "cond_indep_stack": [],
        }
    )["value"]


class whole_plates(Messenger):
    """Runs every plate over all of its members, whatever its ``subsample_size``."""

    def process_message(self, msg: dict[str, Any]) -> None:
        if msg["type"] == "plate":
            size = msg["args"][0]
            msg["args"] = (size, None)
            msg["value"] = jax.numpy.arange(size)
