# SPDX-License-Identifier: Apache-2.0
"""``jax.jit`` with options that shorten the compilation of programs on a CPU."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache, partial, update_wrapper, wraps
from importlib.metadata import version
from typing import Any
from weakref import WeakKeyDictionary, ref

import jax

from numpyro_gpaug.math.arrays import is_traced

# The older code generator of jaxlib for CPUs. Programs of linear algebra spend their
# time in library calls and in loops that both generators vectorise
# (examples/benchmarks/compiling.py). Later versions of jaxlib do not have it. Further
# levels of LLVM's optimisations than the first, which vectorises loops, take up to
# twice as long to compile, and programs are no faster.
_OPTIONS: dict[str, Any] = {
    "xla_cpu_use_fusion_emitters": False, "xla_backend_optimization_level": 1,
}  # fmt: skip
# In jaxlib 0.10.2, a library of XLA computes sums wrongly: in ``(a * v[i]).sum(1) + (b
# * w[j]).sum(1)`` for several v and w, all values except the first are wrong from
# 48,000 numbers on. Versions 0.10.1 and 0.11 are right. The package excludes 0.10.2,
# and this option protects those who install it anyway.
if version("jaxlib") == "0.10.2":
    _OPTIONS["xla_cpu_experimental_ynn_fusion_type"] = ""
# Options that compile faster. Loops are not optimised further; the graph is still
# optimised, and libraries do the linear algebra. The program stays in one piece: each
# of the 32 parts that are otherwise compiled in parallel would take a millisecond more
# than its code. A pass over loops is left out: it runs again after every other
# simplification, and improves nothing in these loops. The simplification of loops
# stays, because without it a step of a chain of hundreds takes four times as long.
_QUICK: dict[str, Any] = {
    **_OPTIONS,
    "xla_backend_optimization_level": 0, "xla_cpu_parallel_codegen_split_count": 1,
    "xla_disable_hlo_passes": "while-loop-invariant-code-motion",
}  # fmt: skip
# A program whose arguments have fewer numbers than this is compiled with these options:
# the first limit is for programs that run some thousand times; the second for searches,
# whose twenty to hundred evaluations must save less time than their compilation takes;
# the third for programs that run a few times, such as predictions; the fourth for
# predictions from chains, whose operations are numerous and use a small part of the
# numbers each; and the last for the start of a run.
SMALL, SMALL_OF_SEARCHES, SMALL_OF_FEW, SMALL_OF_CHAINS, SMALL_OF_STARTS = (
    8_000, 50_000, 100_000, 2_000_000, 1_000_000
)  # fmt: skip


def compiler_options(*, quick: bool) -> dict[str, Any]:
    """Return the XLA options of the package's programs: none on accelerators, and none
    that this jaxlib lacks or that ``XLA_FLAGS`` sets.

    :param quick: whether the time to compile matters more than the time to run.
    """
    if jax.default_backend() != "cpu":
        return {}
    flags, asked = os.environ.get("XLA_FLAGS", ""), _QUICK if quick else _OPTIONS
    return _known(tuple((k, x) for k, x in asked.items() if k not in flags))


@cache
def _known(options: tuple[tuple[str, Any], ...]) -> dict[str, Any]:
    """Return the options that this jaxlib supports."""
    try:
        jax.jit(_nothing, compiler_options=dict(options)).lower(0.0).compile()
    except jax.errors.JaxRuntimeError:
        singles = options if len(options) > 1 else ()
        return {k: x for one in singles for k, x in _known((one,)).items()}
    return dict(options)


def _nothing(x: Any) -> Any:
    return x


class _Held:
    """A static argument that caches of JAX do not keep alive: its caller does."""

    def __init__(self, value: Any) -> None:
        self._value = ref(value)

    @property
    def value(self) -> Any:
        """The argument."""
        return self._value()


def _reading(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return the function with an argument that may be a :class:`_Held`."""

    @wraps(function)
    def read(*args: Any, **kwargs: Any) -> Any:
        given = kwargs[name]
        value = given.value if isinstance(given, _Held) else given
        return function(*args, **{**kwargs, name: value})

    return read


class jit:
    """``jax.jit`` with :func:`compiler_options`, and with quick options if arguments
    are small. Inside another program, which has options of its own, it uses none.

    :param function: the function to compile.
    :param small: the largest total size of arguments that count as small.
    :param held: a static argument, equal to itself alone, that lives no longer because
        of the program. (For donated arguments JAX has a cache of 4096 calls.)
    :param work: given the held argument, the operations of the program in each of its
        steps; many count like large arguments.
    :param options: options of ``jax.jit``.
    :ivar plain: the result of ``jax.jit``.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        small: int = SMALL,
        held: str | None = None,
        work: Callable[[Any], int] | None = None,
        **options: Any,
    ) -> None:
        self._name, self._work = held, work
        self._held: WeakKeyDictionary[Any, _Held] = WeakKeyDictionary()
        if held is not None:
            function = _reading(function, held)
        self._function, self._small, self._options = function, small, options
        names = options.get("static_argnames", ())
        self._static = {names} if isinstance(names, str) else set(names)
        self.plain = jax.jit(function, **options)
        # Not created here, because a guide may be created before jax.distributed
        # starts.
        self._programs: dict[bool, Any] = {}
        update_wrapper(self, function, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        size = 0
        if self._name is not None:
            value = kwargs[self._name]
            size = self._work(value) if self._work is not None else 0
            kwargs[self._name] = self._held.setdefault(value, _Held(value))
        dynamic = {k: x for k, x in kwargs.items() if k not in self._static}
        leaves = jax.tree.leaves((args, dynamic))
        if is_traced(leaves):
            return self.plain(*args, **kwargs)
        size = max(size, sum(getattr(x, "size", 1) for x in leaves))
        try:
            return self._program(size < self._small)(*args, **kwargs)
        except ValueError as error:
            # A surrounding program may be traced while this call has no traced
            # argument.
            if "top-level" not in str(error):
                raise
        return self.plain(*args, **kwargs)

    def _program(self, quick: bool) -> Any:
        if quick not in self._programs:
            program, asked = self.plain, compiler_options(quick=quick)
            if asked:
                program = jax.jit(
                    self._function, compiler_options=asked, **self._options
                )
            self._programs[quick] = program
        return self._programs[quick]

    def clear_cache(self) -> None:
        """Drop all compiled programs."""
        for program in (self.plain, *self._programs.values()):
            program.clear_cache()


jit_for_few_runs = partial(jit, small=SMALL_OF_FEW)


def ahead(function: Callable[..., Any], *args: Any) -> Callable[..., Any]:
    """Return a function compiled for arguments of these shapes, with quick options.
    Called with numbers it returns numbers, even while another program is traced, unless
    the function closes over traced values.

    :param function: a function of arrays.
    :param args: arguments of the shapes that it will be called with.
    """
    program, leaves = jax.jit(function), jax.tree.leaves(args)
    if is_traced(leaves):
        return program
    traced = program.trace(*args)
    # Values that the function closes over are arguments, too.
    if len(traced.jaxpr.in_avals) > len(leaves):
        return program
    compiled = traced.lower().compile(compiler_options(quick=True))

    def called(*args: Any) -> Any:
        with jax.ensure_compile_time_eval():
            return compiled(*args)

    return called


def once(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function once, in a program of its own; see :func:`ahead`.

    :param function: a function of arrays.
    :param args: its arguments.
    """
    return ahead(function, *args)(*args)
