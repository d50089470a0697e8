# SPDX-License-Identifier: Apache-2.0
"""Programs that compile in less time on a CPU."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from functools import cache, partial, update_wrapper
from typing import Any, NamedTuple

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr

from numpyro_gpaug.math.arrays import as_arrays
from numpyro_gpaug.math.hosting import Hosted

# jaxlib's older code generator for CPUs: programs of linear algebra spend their time in
# library calls and in loops that either vectorises (examples/benchmarks/compiling.py).
# Later versions do not have it.
_OPTIONS = {"xla_cpu_use_fusion_emitters": False}
# Loops are left as they are written: the graph is still optimised, and linear algebra
# is done by libraries. In one piece: each of the 32 that a program is cut into to be
# compiled at once would take a millisecond more than the code in it.
_UNOPTIMISED: dict[str, Any] = {
    "xla_backend_optimization_level": 0, "xla_cpu_parallel_codegen_split_count": 1,
}  # fmt: skip
# Of programs that are run some hundred times: the least of LLVM's optimisations, which
# compiles them in a tenth less, and they run as fast.
_BRIEF: dict[str, Any] = {"xla_backend_optimization_level": 1}
# Of loops in which nothing is the same in all rounds: not to look for it, which takes a
# tenth to a quarter of the time.
_UNHOISTED: dict[str, Any] = {
    "xla_disable_hlo_passes": "while-loop-invariant-code-motion"
}
# Seconds that level 0 saves for each operation of a program, and seconds by which the
# program runs longer for each element its operations make: roughly so in fits of 200 to
# 1000 rows with jaxlib 0.10. What follows is shown by examples/benchmarks/compiling.py.
SAVED, LOST = 1.7e-3, 4e-9
# A fit of a few hundred steps should not take longer by it.
RUNS = 500
# Shapes of arguments whose choice is remembered.
MAX_SHAPES = 256


def compiler_options() -> dict[str, Any]:
    """What programs of this package ask of XLA: nothing on accelerators, and no option
    that this jaxlib lacks or that ``XLA_FLAGS`` sets."""
    return _known(_OPTIONS)


def quick_options() -> dict[str, Any]:
    """:func:`compiler_options` where the time to compile matters more than the time to
    run."""
    return _known({**_OPTIONS, **_UNOPTIMISED})


def _known(options: dict[str, Any]) -> dict[str, Any]:
    """Those of the options that may be asked for."""
    flags = os.environ.get("XLA_FLAGS", "")
    if jax.default_backend() != "cpu":
        return {}
    left = {name: value for name, value in options.items() if name not in flags}
    # All of them at once, as a rule: every attempt is a program.
    every = tuple({**_OPTIONS, **_UNOPTIMISED, **_UNHOISTED}.items())
    if _compiles(tuple(x for x in every if x[0] not in flags)):
        return left
    return {name: x for name, x in left.items() if _compiles(((name, x),))}


@cache
def _compiles(options: tuple[tuple[str, Any], ...]) -> bool:
    if not options:
        return True
    try:
        jax.jit(_nothing, compiler_options=dict(options)).lower(0.0).compile()
    except jax.errors.JaxRuntimeError:
        return False
    return True


def _nothing(x: Any) -> Any:
    return x


class Compiled:
    """``jax.jit`` with :func:`compiler_options`; inside another program, which has
    options of its own, without.

    A program of many operations on small arrays takes seconds to compile and less than
    a millisecond to run: it is compiled without LLVM's optimisations if it then saves
    more time than it loses in ``runs``. One that runs once is not compiled at all where
    NumPy knows its operations (:mod:`~numpyro_gpaug.math.hosting`).

    :param function: what is compiled.
    :param runs: how often a program is expected to run before the process ends, the
        iterations of loops of unknown length among them.
    :param hoisted: whether XLA moves out of loops what is the same in all rounds.
    :param options: of ``jax.jit``.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        runs: int = RUNS,
        hoisted: bool = True,
        **options: Any,
    ) -> None:
        self._hoisted = hoisted
        self._function, self._runs, self._options = function, runs, options
        self._inner = jax.jit(function, **options)
        self._optimised: Any = None
        self._unoptimised: Any = None
        # By the shapes of the arguments.
        self._chosen: dict[Any, Any] = {}
        names = options.get("static_argnames", ())
        self._static = {names} if isinstance(names, str) else set(names)
        update_wrapper(self, function, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._called(self._program(args, kwargs), args, kwargs)

    def _called(self, program: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        try:
            return program(*args, **kwargs)
        except ValueError as error:
            # A program around it may trace what is given no traced argument.
            if "top-level" not in str(error):
                raise
        return self._inner(*args, **kwargs)

    def clear_cache(self) -> None:
        """Forgets what was compiled."""
        self._chosen.clear()
        programs: list[Any] = [self._inner, self._optimised]
        for program in (*programs, self._unoptimised):
            if program is not None:
                program.clear_cache()

    def __getattr__(self, name: str) -> Any:
        """``lower``, ``trace``, ``eval_shape``, ... of what ``jax.jit`` returns."""
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._whole, name)

    @property
    def _whole(self) -> Any:
        # Not before the first call: a guide may be made before jax.distributed starts.
        if self._optimised is None:
            options, quick = compiler_options(), quick_options()
            if self._runs < RUNS:
                options = options | _known(_BRIEF)
            self._optimised = self._unoptimised = self._with(options)
            if quick != options:
                self._unoptimised = self._with(quick)
        return self._optimised

    def _with(self, options: dict[str, Any]) -> Any:
        if not self._hoisted:
            options = options | _known(_UNHOISTED)
        if not options:
            return self._inner
        return jax.jit(self._function, compiler_options=options, **self._options)

    def _program(self, args: Any, kwargs: dict[str, Any]) -> Any:
        dynamic = {k: v for k, v in kwargs.items() if k not in self._static}
        leaves, tree = jax.tree.flatten((args, dynamic))
        if are_traced(leaves):
            return self._inner
        if self._runs > 1 and self._whole is self._unoptimised:
            return self._whole
        static = tuple((k, v) for k, v in kwargs.items() if k in self._static)
        kinds = tuple((getattr(x, "shape", ()), getattr(x, "dtype", 0)) for x in leaves)
        key = tree, static, kinds
        chosen = self._chosen.get(key)
        if chosen is None:
            if len(self._chosen) >= MAX_SHAPES:
                self._chosen.clear()
            chosen = self._chosen[key] = self._choice(args, kwargs, leaves)
        return chosen

    def _choice(self, args: Any, kwargs: dict[str, Any], leaves: list[Any]) -> Any:
        # JAX remembers the trace: the call that follows does not repeat it.
        traced = self._inner.trace(*args, **kwargs)
        hosted = _by_numpy(traced, leaves) if self._runs == 1 else None
        if hosted is not None:
            return partial(self._hosted, hosted)
        whole, work = self._whole, Work.of(traced.jaxpr.jaxpr)
        lost, saved = LOST * work.elements, SAVED * work.operations
        return self._unoptimised if self._runs * lost <= saved else whole

    def _hosted(self, program: Any, *args: Any, **kwargs: Any) -> Any:
        dynamic = {k: v for k, v in kwargs.items() if k not in self._static}
        return program(*jax.tree.leaves((args, dynamic)))


def ahead(function: Callable[..., Any], *args: Any) -> Callable[..., Any]:
    """A function that is called once, traced for such arguments.

    :param function: of arrays.
    :param args: of the shapes that it will be given.
    """
    traced = jax.jit(function).trace(*args)
    hosted = _by_numpy(traced, jax.tree.leaves(args))
    if hosted is not None:
        return lambda *args: hosted(*jax.tree.leaves(args))
    return traced.lower().compile(quick_options())


def _by_numpy(traced: Any, leaves: list[Any]) -> Callable[..., Any] | None:
    """A program that NumPy runs in less time than it takes to compile, from the leaves
    of its arguments; ``None`` for others.

    :param traced: what JAX has traced.
    :param leaves: of the arguments, on one device.
    """
    spread = any(
        isinstance(x, jax.Array) and len(x.sharding.device_set) > 1 for x in leaves
    )
    if spread or jax.default_backend() != "cpu":
        return None
    program = Hosted.of(traced.jaxpr)
    if program is None:
        return None
    tree = jax.tree.structure(traced.out_info)

    def run(*leaves: Any) -> Any:
        # Results may be the arguments themselves, which others may change.
        found = as_arrays(program(*leaves))
        return jax.tree.unflatten(tree, found)

    return run


# Of functions that are called once at each shape of their arguments, and of those that
# are called some times: a notebook looks at a posterior again and again.
once = partial(Compiled, runs=1)
few = partial(Compiled, runs=50)


# Types of leaves that are none of tracers.
_CONCRETE: set[type] = set()


def are_traced(leaves: list[Any]) -> bool:
    """Whether any leaf is a tracer: asked of types, which are few, and one by one only
    of those not seen before."""
    types = set(map(type, leaves))
    if types <= _CONCRETE:
        return False
    if any(issubclass(x, jax.core.Tracer) for x in types):
        return True
    _CONCRETE.update(types)
    return False


class Work(NamedTuple):
    """What a program has to do beside calls of libraries.

    :param operations: number of them, as written.
    :param elements: of the arrays they make: times the length of a ``scan``, once for a
        loop of unknown length, and of branches the cheapest, as the others are taken
        the first time or rarely.
    """

    operations: int
    elements: int

    @classmethod
    def of(cls, jaxpr: Jaxpr) -> Work:
        """The work of a program.

        :param jaxpr: the program.
        """
        return _work(jaxpr, {})


_LIBRARIES = {"dot_general", "cholesky", "triangular_solve", "eigh", "svd", "qr"}


def _work(jaxpr: Jaxpr, known: dict[int, Work]) -> Work:
    operations = elements = 0
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        parts = []
        for part in _parts(eqn.params):
            if id(part) not in known:
                known[id(part)] = _work(part, known)
            parts.append(known[id(part)])
        if parts:
            operations += sum(part.operations for part in parts)
            made = (part.elements for part in parts)
            times = eqn.params["length"] if name == "scan" else 1
            elements += times * (min(made) if name == "cond" else sum(made))
        else:
            operations += 1
            if name not in _LIBRARIES:
                shapes = (getattr(x.aval, "shape", ()) for x in eqn.outvars)
                elements += sum(math.prod(shape) for shape in shapes)
    return Work(operations, elements)


def _parts(params: dict[str, Any]) -> Iterator[Jaxpr]:
    for value in params.values():
        for part in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(part, ClosedJaxpr):
                yield part.jaxpr
            elif isinstance(part, Jaxpr):
                yield part
