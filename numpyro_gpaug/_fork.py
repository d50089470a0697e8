# SPDX-License-Identifier: Apache-2.0
"""Processes that were forked after JAX had started: its threads are not copied, and
compilation in such a process waits for them forever."""

from __future__ import annotations

import os
import sys
from typing import Any

# Whether JAX had started in a process when it was last forked, and whether this process
# comes from such a fork.
_had_started = _is_broken = False


def refuse_forked() -> None:
    """Raise if JAX would hang.

    :raises RuntimeError: in a process that was forked after JAX had started.
    """
    if _is_broken:
        raise RuntimeError(
            "this process was forked after JAX had started, and JAX hangs in such "
            "a process. Start workers by multiprocessing.get_context('spawn'), or "
            "by joblib, whose default (loky) is equivalent"
        )


def _before_fork() -> None:
    global _had_started
    # JAX has no public name for it, and asking for its backends starts them.
    bridge: Any = sys.modules.get("jax._src.xla_bridge")
    started = getattr(bridge, "backends_are_initialized", None)
    _had_started = started is not None and started()


def _after_fork() -> None:
    global _is_broken
    _is_broken = _is_broken or _had_started


if hasattr(os, "register_at_fork"):  # not on Windows, which has no forks
    os.register_at_fork(before=_before_fork, after_in_child=_after_fork)
