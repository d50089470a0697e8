# SPDX-License-Identifier: Apache-2.0
"""The hyperparameters of a model, without its Gaussian latents and observations."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
from jax import Array
from jax.flatten_util import ravel_pytree
from numpyro import handlers
from numpyro.distributions import biject_to, constraints

from numpyro_gpaug._numpyro import one_thread, residual_policy
from numpyro_gpaug.infer.vi.plan import is_identity
from numpyro_gpaug.likelihoods.expectations import is_masked
from numpyro_gpaug.math.arrays import is_traced
from numpyro_gpaug.math.compiling import jit_for_few_runs
from numpyro_gpaug.model.arguments import Arguments, Model, Values
from numpyro_gpaug.model.closures import count_run
from numpyro_gpaug.model.expectation import scaled_sum
from numpyro_gpaug.model.latents import Structure
from numpyro_gpaug.model.starts import MedianStart
from numpyro_gpaug.model.structure import Trace, fixed_key, without_gaussians


def compiled(
    function: Callable[..., Any], how: Callable[..., Any] = jit_for_few_runs
) -> Callable[..., Any]:
    """Compile a function that runs the model. One thread at a time traces it, without
    NumPyro's checks of parameters. These checks ran when the model was read; for traced
    values they check nothing, and each of their operations would be compiled.

    :param function: the function to compile.
    :param how: ``jit`` or ``jit_for_few_runs`` of :mod:`~numpyro_gpaug.math.compiling`.
    """
    program = how(function)

    @one_thread
    def called(*args: Any, **kwargs: Any) -> Any:
        with numpyro.validation_enabled(False):
            return program(*args, **kwargs)

    return called


def declared(model: Model, structure: Structure, args: Any, kwargs: Any) -> Trace:
    """Return the sites of hyperparameters and params in the form that outer handlers
    expect.

    :param model: the model.
    :param structure: the structure of the model.
    :param args: its arguments.
    :param kwargs: its keyword arguments.
    """
    names = {*structure.others, *structure.constraints}
    known = {name for name, _ in structure.shapes}

    def hidden(message: dict[str, Any]) -> bool:
        # By name, because handlers outside add sites of their own (Jacobian terms).
        if message["type"] == "sample":
            return message["name"] in known - names
        return message["type"] == "deterministic"

    count_run()
    alone = without_gaussians(residual_policy(model, "mean"), structure)
    traced = handlers.trace(handlers.block(alone, hidden))
    with numpyro.validation_enabled(is_validate=False):
        trace = traced.get_trace(*args, **kwargs)
    return {k: site for k, site in trace.items() if k in names}


def transform_of(site: dict[str, Any]) -> Any:
    """Return the transform from unconstrained values to the values of a site."""
    if site["type"] == "param":
        return biject_to(site["kwargs"].get("constraint", constraints.real))
    return biject_to(site["fn"].support)


def sizes(trace: Trace) -> Values:
    """Return the change of the values for a unit change of the unconstrained ones, in
    trees of the same form as the values.

    :param trace: from :func:`declared`.
    """

    def size(transform: Any, value: Any) -> Array:
        free = transform.inv(jnp.asarray(value))
        _, moved = jax.jvp(transform, (free,), (jnp.ones_like(free),))
        return jnp.where(moved == 0, 1, jnp.abs(moved))

    return {
        name: jax.tree.map(partial(size, transform_of(site)), site["value"])
        for name, site in trace.items()
    }


class Hyperparameters:
    """All hyperparameters of a model as one unconstrained vector.

    :param model: the model.
    :param structure: the structure of the model at arguments of these shapes.
    :param arguments: such arguments.
    :ivar shapes: shapes and dtypes of constrained values by name.
    :ivar real: the names of sites that may have any real values.
    :ivar zeros: unconstrained values by name, all zero.
    """

    def __init__(
        self, model: Model, structure: Structure, arguments: Arguments
    ) -> None:
        self._model, self._structure = model, structure
        self.names = structure.others
        known = dict(structure.shapes)
        zeros = {k: np.zeros(known[k]) for k in self.names}
        self.shapes, free = jax.eval_shape(self._both, zeros, arguments)
        flat = jax.eval_shape(lambda free: ravel_pytree(free)[0], free)
        self.size, self.dtype = flat.size, flat.dtype
        self.zeros = {k: np.zeros(s.shape, s.dtype) for k, s in free.items()}
        self.medians = compiled(self._medians)
        self._draws = compiled(self._drawn)

    def _trace(self, given: Arguments, key: Array, **filled: Any) -> Trace:
        """Return the sites at values that NumPyro's ``substitute`` fills in; others are
        drawn."""
        args, kwargs = given.merge()

        def model(*args: Any, **kwargs: Any) -> Trace:
            return declared(self._model, self._structure, args, kwargs)

        with handlers.block():
            seeded = handlers.seed(model, key)
            return handlers.substitute(seeded, **filled)(*args, **kwargs)

    def values(self, flat: Array, data: Arguments) -> tuple[Values, Array]:
        """Return constrained values by name, and the log-density of the unconstrained
        ones under the prior.

        :param flat: unconstrained values, (size,).
        :param data: the model's arguments.
        """
        jacobians: list[Array] = []
        _, unravel = ravel_pytree(self.zeros)
        free = unravel(flat)

        def filled(message: dict[str, Any]) -> Array | None:
            name = message["name"]
            if message["type"] != "sample" or name not in free:
                return None
            transform = transform_of(message)
            value = transform(free[name])
            volume = transform.log_abs_det_jacobian(free[name], value)
            jacobians.append(jnp.sum(volume))
            return value

        trace = self._trace(data, jax.random.key(0), substitute_fn=filled)
        total = jnp.zeros((), self.dtype) + sum(jacobians)
        for site in trace.values():
            total += scaled_sum(site["fn"].log_prob(site["value"]), site["scale"])
        return {k: trace[k]["value"] for k in self.names}, total

    def steps(self, values: Values, data: Arguments) -> Values:
        """See :func:`sizes`."""
        return sizes(self._trace(data, jax.random.key(0), data=values))

    def _both(self, values: Values, data: Arguments) -> tuple[Any, Any]:
        """Return constrained values in the form of the model, and unconstrained
        ones."""
        trace = self._trace(data, fixed_key(), data=values)
        self._weighted = any(map(_is_weighted, trace.values()))
        self.real = {k for k, site in trace.items() if is_identity(transform_of(site))}
        return {k: jnp.asarray(trace[k]["value"]) for k in self.names}, _free(trace)

    @one_thread
    def flatten(self, values: Values, data: Arguments) -> Array:
        """Return constrained values as an unconstrained vector."""
        return ravel_pytree(self._both(values, data)[1])[0]

    def prior_draws(
        self, data: Arguments, num: int, rng: np.random.Generator
    ) -> np.ndarray:
        """Draw unconstrained values from the prior, (n, size). There are no draws if
        the prior is improper, if a mask or a scale changes its density, or if most
        draws overflow.

        :param data: the model's arguments.
        :param num: the number of draws. Draws that are not finite are left out.
        :param rng: random numbers.
        """
        if self._weighted:
            return np.zeros((0, self.size))
        numbers = rng.integers(2**32, size=(num, 2), dtype=np.uint32)
        try:
            found = np.asarray(self._draws(data, numbers), float)
        except NotImplementedError:
            return np.zeros((0, self.size))
        found = found[np.isfinite(found).all(-1)]
        return found if len(found) > 0.6 * num else found[:0]

    def _medians(self, data: Arguments, key: Array) -> Array:
        median = MedianStart(key)

        def start(site: dict[str, Any]) -> Any:
            # Latents in a scan already have a value, which is zero.
            return None if site["value"] is not None else median(site)

        return ravel_pytree(_free(self._trace(data, key, substitute_fn=start)))[0]

    def _drawn(self, data: Arguments, numbers: Array) -> Array:
        def one(number: Array) -> Array:
            key = jax.random.wrap_key_data(number, impl="threefry2x32")
            return ravel_pytree(_free(self._trace(data, key, data={})))[0]

        return jax.vmap(one)(numbers)


def _is_weighted(site: dict[str, Any]) -> bool:
    """Whether a mask or a scale changes the density of a site."""
    scale = 1 if site["scale"] is None else site["scale"]
    return is_masked(site["fn"]) or is_traced(scale) or bool(np.any(scale != 1))


def _free(trace: Trace) -> Values:
    return {k: transform_of(s).inv(jnp.asarray(s["value"])) for k, s in trace.items()}
