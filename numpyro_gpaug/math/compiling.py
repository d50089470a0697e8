# SPDX-License-Identifier: Apache-2.0
"""Programs that compile in less time on a CPU."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache, update_wrapper
from typing import Any

import jax

# jaxlib's older code generator for CPUs: programs of linear algebra spend their time in
# library calls and in loops that either vectorises (examples/benchmarks/compiling.py).
# Later versions do not have it.
_OPTIONS = {"xla_cpu_use_fusion_emitters": False}


@cache
def compiler_options() -> dict[str, Any]:
    """What programs of this package ask of XLA: nothing on accelerators, by a jaxlib
    without these options, or where ``XLA_FLAGS`` says otherwise."""
    flags = os.environ.get("XLA_FLAGS", "")
    if jax.default_backend() != "cpu" or any(name in flags for name in _OPTIONS):
        return {}
    try:
        jax.jit(_nothing, compiler_options=_OPTIONS).lower(0.0).compile()
    except jax.errors.JaxRuntimeError:
        return {}
    return _OPTIONS


def _nothing(x: Any) -> Any:
    return x


class Compiled:
    """``jax.jit`` with :func:`compiler_options`; inside another program, which has
    options of its own, without.

    :param function: what is compiled.
    :param options: of ``jax.jit``.
    """

    def __init__(self, function: Callable[..., Any], **options: Any) -> None:
        self._function, self._options = function, options
        self._inner = jax.jit(function, **options)
        self._outer: Any = None
        update_wrapper(self, function, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves = jax.tree.leaves((args, kwargs))
        if any(isinstance(x, jax.core.Tracer) for x in leaves):
            return self._inner(*args, **kwargs)
        try:
            return self._whole(*args, **kwargs)
        except ValueError as error:
            # A program around it may trace what is given no traced argument.
            if "top-level" not in str(error):
                raise
        return self._inner(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """``lower``, ``trace``, ``eval_shape``, ... of what ``jax.jit`` returns."""
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._whole, name)

    @property
    def _whole(self) -> Any:
        # Not before the first call: a guide may be made before jax.distributed starts.
        if self._outer is None:
            options = compiler_options()
            self._outer = (
                jax.jit(self._function, compiler_options=options, **self._options)
                if options
                else self._inner
            )
        return self._outer
