# SPDX-License-Identifier: Apache-2.0
"""Equations of traced programs, one after the other.

A scan is divided into two parts. The first, a scan, computes the carry and the outputs
that are affine in Gaussian latents. The second computes, for all steps at once, outputs
that are not affine and are not carried further. So the rate ``exp(level)`` that a step
returns, or a likelihood inside of the scan, is read like one after the scan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.extend.core import Literal

from numpyro_gpaug.math.equations import applied, carried_by, walked
from numpyro_gpaug.model.exponentials import KEEPING, ExponentialSum, NoFormError, after
from numpyro_gpaug.model.jaxpr import OWN_DERIVATIVE, Reader, State, Value, called_jaxpr


class Operation(NamedTuple):
    """An equation between numbered variables.

    :param eqn: an equation of the jaxpr.
    :param operands: numbers of variables, or literals.
    :param results: numbers of variables.
    """

    eqn: Any
    operands: tuple[int | Literal, ...]
    results: tuple[int, ...]


# A function of an equation and the values of its operands.
Rule = Callable[[Any, list[Any]], list[Any]]


class Listing:
    """Numbered variables and the equations between them.

    :param reader: computes how variables depend on the latents of a model.
    """

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self.operations: list[Operation] = []
        # The operation that computes each variable.
        self.makers: dict[int, Operation] = {}
        self.avals: list[Any] = []
        self.values: list[Value] = []
        self.constants: dict[int, Any] = {}
        self.inputs: dict[str, int] = {}

    def new(self, aval: Any, value: Value) -> int:
        """Return the number of a new variable.

        :param aval: its shape and dtype.
        :param value: the known facts about it.
        """
        self.avals.append(aval)
        self.values.append(value)
        return len(self.avals) - 1

    def held(self, closed: Any) -> list[int]:
        """Return variables for the constants of a closed jaxpr."""
        numbers = []
        pairs = zip(closed.jaxpr.constvars, closed.consts, strict=True)
        for var, value in pairs:
            number = self.new(var.aval, self._reader.constant(var))
            self.constants[number] = value
            numbers.append(number)
        return numbers

    def write(
        self, jaxpr: Any, constants: list[int], starts: list[Any]
    ) -> list[int | Literal]:
        """Append a jaxpr's equations, with calls replaced by their equations.

        :param constants: variables of its constants.
        :param starts: variables of its inputs.
        :return: variables of its outputs.
        """
        return walked(jaxpr, starts, lambda x: x, self._written, constants)

    def appended(self, fn: Callable[..., Array], *variables: int | Literal) -> Any:
        """Append a function of variables, and return the variable of its result.

        :param fn: the function of their values.
        :param variables: numbers of variables, or literals.
        """
        avals = map(self.aval, variables)
        shapes = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals]
        (result,) = self.write(jax.make_jaxpr(fn)(*shapes).jaxpr, [], [*variables])
        return result

    def _written(self, eqn: Any, operands: list[Any]) -> list[Any]:
        """Append an equation, and return the variables of its results."""
        called = called_jaxpr(eqn)
        if self._is_identity(eqn, operands):
            return operands
        if called is not None and not self._keeps_derivative(eqn, operands):
            return self.write(called.jaxpr, self.held(called), operands)
        product = self._as_one(eqn, operands)
        return self._equation(eqn, tuple(operands)) if product is None else [product]

    def _as_one(self, eqn: Any, operands: list[Any]) -> Any:
        """Return the variable of a product or quotient of exponentials of latents, such
        as ``exp(level) * exp(effect)[group]``, written as the exponential of one affine
        function: a datum then has one predictor. Return ``None`` for another
        equation."""
        if eqn.primitive.name not in ("mul", "div"):
            return None
        paths = [self._path(x) for x in operands]
        if not all(paths):
            return None
        steps = [step for path in paths for step in path]
        exponents: set[Any] = {path[0].operands[0] for path in paths}
        made = {x for step in steps for x in step.results}
        read = {
            x for step in steps for x in step.operands if not isinstance(x, Literal)
        }
        given = sorted(read - made)

        def product(*values: Any) -> Array:
            known: dict[Any, Any] = dict(zip(given, values, strict=True))
            known |= {k: ExponentialSum.of_exponent(known[k]) for k in exponents}
            factors = execute(steps, operands, known, after)
            scale, _, exponent = after(eqn, factors)[0].single()
            return scale * jnp.exp(exponent)

        try:
            return self.appended(product, *given)
        except NoFormError:
            return None

    def _path(self, variable: int | Literal) -> list[Operation]:
        """Return the operations from an affine exponent to a variable; none if the
        variable is no function of one exponential."""
        found: list[Operation] = []
        while self.depends(variable) and variable in self.makers:
            found.append(self.makers[variable])
            eqn, operands, _ = found[-1]
            if eqn.primitive.name == "exp":
                return found[::-1] if self.affine(operands[0]) else []
            moving = [x for x in operands if self.depends(x)]
            if len(moving) != 1 or eqn.primitive.name not in KEEPING:
                break
            (variable,) = moving
        return []

    def _is_identity(self, eqn: Any, operands: list[Any]) -> bool:
        """Whether an equation returns its operands, which depend on latents, unchanged.
        It may change their derivatives or their compilation, which do not matter
        here."""
        name = eqn.primitive.name
        same = name in ("stop_gradient", "optimization_barrier")
        return same and any(map(self.depends, operands))

    def _keeps_derivative(self, eqn: Any, operands: list[Any]) -> bool:
        """Whether a call is kept as a whole for its own derivative. This is not needed
        if it is affine in latents, where its derivative is known to be that of the
        values."""
        if eqn.primitive.name not in OWN_DERIVATIVE:
            return False
        found = self._reader.equation(eqn, [self.value(x) for x in operands])
        moving = [value.state for value in found if value.state]
        return not moving or not all(map(_affine, moving))

    def _equation(self, eqn: Any, operands: tuple[int | Literal, ...]) -> list[Any]:
        known = [self.value(x) for x in operands]
        if eqn.primitive.name == "scan":
            parted = _parted(self._reader, eqn, *self._reader.step(eqn, known))
            if parted is not None:
                return self.write(parted.jaxpr, self.held(parted), list(operands))
        found = self._reader.equation(eqn, known)
        results = [
            self.new(v.aval, value) for v, value in zip(eqn.outvars, found, strict=True)
        ]
        self.operations.append(Operation(eqn, operands, tuple(results)))
        self.makers |= dict.fromkeys(results, self.operations[-1])
        return results

    def aval(self, variable: int | Literal) -> Any:
        """Return the shape and dtype of a variable."""
        found: Any = variable
        return found.aval if isinstance(variable, Literal) else self.avals[variable]

    def value(self, variable: int | Literal) -> Value:
        """Return the known dependence of a variable on the inputs."""
        if isinstance(variable, Literal):
            return self._reader.literal(variable)
        return self.values[variable]

    def depends(self, variable: int | Literal) -> bool:
        """Whether a variable depends on any input."""
        return bool(self.value(variable).state)

    def affine(self, variable: int | Literal) -> bool:
        """Whether a variable depends on inputs, and is jointly affine in them."""
        state = self.value(variable).state
        return bool(state) and _affine(state)

    def between(self, wanted: Iterable[Any], known: Iterable[int]) -> list[Operation]:
        """Return the operations that compute some variables from others, in order.

        :param wanted: numbers of variables, or literals.
        :param known: numbers of variables that need no computing.
        """
        needed = {x for x in wanted if not isinstance(x, Literal)}
        stop = {*known, *self.constants, *self.inputs.values()}
        chosen: list[Operation] = []
        for operation in reversed(self.operations):
            if not needed.intersection(operation.results) <= stop:
                chosen.append(operation)
                needed |= {x for x in operation.operands if not isinstance(x, Literal)}
        return chosen[::-1]

    def read_for(self, wanted: list[Any], known: Iterable[int]) -> set[int]:
        """Return the variables that are read to compute some variables from others, and
        these variables themselves."""
        operations = self.between(wanted, known)
        read = [*wanted, *(x for each in operations for x in each.operands)]
        return {x for x in read if not isinstance(x, Literal)}

    def run(self, wanted: list[Any], known: dict[int, Any]) -> list[Any]:
        """Return values of variables, given the values of some others.

        :param wanted: numbers of variables, or literals.
        :param known: values by number; constants are always known.
        """
        return execute(self.between(wanted, known), wanted, {**self.constants, **known})

    def still(self, wanted: list[Any], known: dict[int, Any]) -> dict[int, Any]:
        """Return the values that some variables are computed from and that do not
        depend on the inputs, by variable. Several runs share them, if they are computed
        first: in each run they would be traced, differentiated and compiled again.

        :param wanted: numbers of variables, or literals.
        :param known: values by number, which are among those returned.
        """
        env = {**self.constants, **known}
        for operation in self.between(wanted, known):
            if all(isinstance(x, Literal) or x in env for x in operation.operands):
                env |= _results(operation, env)
        return env


def _parted(reader: Reader, eqn: Any, begun: list[Value], left: list[State]) -> Any:
    """Return a scan without its nonlinear outputs, followed by these for all steps at
    once, as a closed jaxpr with the same operands and results. Return ``None`` if it
    has no such outputs, or also carries them.

    :param reader: the reader of the program.
    :param eqn: the equation of the scan.
    :param begun: the known facts about the values at the start of a step.
    :param left: how its carry and outputs depend on the program's inputs.
    """
    body = eqn.params["jaxpr"]
    begin, count = carried_by(eqn, body.jaxpr)
    late = [k for k, state in enumerate(left) if not _affine(state)]
    # Under vmap such a call is a scan over itself, and dividing it would never end.
    calls = all(e.primitive.name == "custom_vmap_call" for e in body.jaxpr.eqns)
    if not late or late[0] < count or (calls and not count):
        return None

    def parts(operands: list[Any]) -> tuple[list[Any], list[Any], list[Any]]:
        """Return the operands that are constant over steps, the operands that are
        carried, and the inputs of each step."""
        end = begin + count
        return operands[:begin], operands[begin:end], operands[end:]

    step = Listing(reader)
    pairs = zip(body.jaxpr.invars, begun, strict=True)
    starts = [step.new(v.aval, value) for v, value in pairs]
    step.inputs = {str(k): start for k, start in enumerate(starts)}
    results = step.write(body.jaxpr, step.held(body), list(starts))
    same, before, own = parts(starts)
    wanted = [results[k] for k in late]
    passed = _passed(step, wanted, {*same, *own})
    rest = [k for k in range(count, len(results)) if k not in late]
    plain = [results[k] for k in rest]
    # A value that is returned and also used is returned once.
    alone = [x for x in plain if isinstance(x, Literal) or x not in passed]

    def run(*operands: Any) -> list[Any]:
        shared, start, each = parts(list(operands))
        known = dict(zip(same, shared, strict=True))

        def follow(carried: list[Any], each: list[Any]) -> Any:
            at = dict(zip([*before, *own], [*carried, *each], strict=True))
            found = step.run([*results[:count], *passed, *alone], known | at)
            return found[:count], found[count:]

        def leave(numbers: list[Any], each: list[Any]) -> Any:
            at = dict(zip([*passed, *own], [*numbers, *each], strict=True))
            return step.run(wanted, known | at)

        params = {k: eqn.params[k] for k in ("length", "reverse", "unroll")}
        carried, found = lax.scan(follow, start, each, **params)
        numbers, others = found[: len(passed)], iter(found[len(passed) :])
        made = dict(zip(late, jax.vmap(leave)(numbers, each), strict=True))
        for k, x in zip(rest, plain, strict=True):
            again = not isinstance(x, Literal) and x in passed
            made[k] = numbers[passed.index(x)] if again else next(others)
        return [*carried, *(made[k] for k in sorted(made))]

    avals = [v.aval for v in eqn.invars]
    return jax.make_jaxpr(run)(*(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in avals))


def _passed(step: Listing, wanted: list[Any], given: set[int]) -> list[Any]:
    """Return variables of a scan's step from which its nonlinear outputs are computed.

    :param step: the program of the step.
    :param wanted: the variables of these outputs.
    :param given: variables that are known for all steps without a scan.
    """
    moving = [x for x in range(len(step.values)) if step.affine(x)]
    after = step.between(wanted, moving)
    made = {x for operation in after for x in operation.results}
    made |= given | step.constants.keys()
    read = [*wanted, *(x for operation in after for x in operation.operands)]
    variables = (x for x in read if not isinstance(x, Literal) and x not in made)
    return list(dict.fromkeys(variables))


def _affine(state: State) -> bool:
    return all(d.affine for d in state.values())


def execute(
    operations: list[Operation] | tuple[Operation, ...],
    wanted: list[Any],
    known: dict[int, Any],
    rule: Rule = applied,
) -> list[Any]:
    """Run operations in order.

    :param operations: see :meth:`Program.between`.
    :param wanted: numbers of variables, or literals.
    :param known: values of all variables that the operations do not compute.
    :param rule: applies an equation to values of its operands.
    """
    env = dict(known)
    for operation in operations:
        env |= _results(operation, env, rule)
    return [_read(x, env) for x in wanted]


def _results(
    operation: Operation, env: dict[int, Any], rule: Rule = applied
) -> dict[int, Any]:
    """Return the values of the results of an operation.

    :param env: values of its operands.
    """
    operands = [_read(x, env) for x in operation.operands]
    return dict(zip(operation.results, rule(operation.eqn, operands), strict=True))


def _read(variable: Any, env: dict[int, Any]) -> Any:
    if not isinstance(variable, Literal):
        return env[variable]
    # In the dtype of the variable.
    aval: Any = variable.aval
    return jnp.asarray(variable.val, aval.dtype)
