# SPDX-License-Identifier: Apache-2.0
"""Every private NumPyro name the package touches, in one place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpyro
from numpyro.distributions.util import periodic_repeat
from numpyro.handlers import block, mask, replay, seed, substitute
from numpyro.handlers import trace as handlers_trace
from numpyro.infer.autoguide import AutoDelta
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


class PointGuide(AutoDelta):
    """``AutoDelta`` that starts quickly: its prototype takes one run of the model, in
    one compiled program, where NumPyro's takes three and an operation at a time."""

    def _setup_prototype(self, *args: Any, **kwargs: Any) -> None:
        trace: dict[str, Any] = {}
        key = numpyro.prng_key()

        @jax.jit
        def first(key: jax.Array) -> dict[str, Any]:
            seeded = seed(self.model, key)
            started = substitute(seeded, substitute_fn=self.init_loc_fn)
            with block():
                found = handlers_trace(started).get_trace(*args, **kwargs)
            trace.update(found)
            return {
                name: (site["value"], site["fn"])
                for name, site in found.items()
                if site["type"] == "sample"
            }

        for name, (value, fn) in first(key).items():
            trace[name] |= {"value": value, "fn": fn}
        self.prototype_trace = trace
        self._init_locs, self._event_dims = {}, {}
        self._prototype_frame_full_sizes = {
            name: site["args"][0]
            for name, site in trace.items()
            if site["type"] == "plate"
        }
        for name, site in trace.items():
            if site["type"] != "sample":
                continue
            value, event_dim = site["value"], site["fn"].event_dim
            for frame in site["cond_indep_stack"]:
                self._prototype_frames[frame.name] = frame
                full_size = self._prototype_frame_full_sizes[frame.name]
                if full_size != frame.size:
                    axis = frame.dim - event_dim
                    value = periodic_repeat(value, full_size, axis)
            self._init_locs[name], self._event_dims[name] = value, event_dim


class whole_plates(Messenger):
    """Runs every plate over all of its members, whatever its ``subsample_size``."""

    def process_message(self, msg: dict[str, Any]) -> None:
        if msg["type"] == "plate":
            size = msg["args"][0]
            msg["args"] = (size, None)
            msg["value"] = jax.numpy.arange(size)
