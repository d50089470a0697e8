# SPDX-License-Identifier: Apache-2.0
"""Where :class:`~numpyro_gpaug.ConjugateSVI` starts: initial params and state."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpyro
from jax import Array, random
from numpyro import handlers
from numpyro.distributions import biject_to, constraints

from numpyro_gpaug.guides.sparse_gp import AutoSparseGP, natural_names
from numpyro_gpaug.infer.vi.closed_params import ClosedParam, closed_params
from numpyro_gpaug.infer.vi.epochs import epoch_length, first_epochs
from numpyro_gpaug.infer.vi.schedules import Schedule, as_schedule
from numpyro_gpaug.infer.vi.stepper import ConjugateState, Hyper
from numpyro_gpaug.math.linalg import NaturalGaussian
from numpyro_gpaug.model.inspect import structure_for
from numpyro_gpaug.model.structure import Arguments, Block, run_model
from numpyro_gpaug.model.validation import (
    check_param,
    invalid_error,
    valid_observations,
)

if TYPE_CHECKING:
    import optax


class Start:
    """Initial states of one model and guide; compiled once.

    :param model: the model.
    :param guide: its guide.
    :param optim: optax transformation, or ``None``.
    :param step_size: see :func:`~numpyro_gpaug.infer.vi.schedules.as_schedule`.
    :param m_step: names of params to set in closed form.

    After a first :meth:`state`, ``transforms`` are those from unconstrained to
    constrained params, by name, and ``closed`` the params set in closed form.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        guide: AutoSparseGP,
        optim: optax.GradientTransformation | None,
        step_size: float | str | Schedule | None,
        m_step: tuple[str, ...],
    ) -> None:
        self._model, self._guide, self._optim = model, guide, optim
        self._step_size, self._m_step = step_size, m_step
        self._constraints: dict[str, Any] = {}
        self.transforms: dict[str, Any] = {}
        self.closed: tuple[ClosedParam, ...] = ()
        # Eager arithmetic would compile op by op.
        self._first_params = jax.jit(self._collect, static_argnames="static")
        self._first_state = jax.jit(self._begin, static_argnames="static")

    def state(
        self, arguments: Arguments, rng_key: Array, given: dict[str, Any]
    ) -> ConjugateState:
        """The initial state.

        :param arguments: the model's arguments.
        :param rng_key: random key.
        :param given: constrained values to start from, by param name.
        :raises ValueError: for params or observations that are not valid.
        """
        structure = self._guide.structure
        params, valid = self._first_params(
            arguments.arrays, rng_key, given, static=arguments.static
        )
        for name, value in params.items():
            check_param(name, value, self._constraints[name])
            self.transforms[name] = biject_to(self._constraints[name])
        for (name, parameter), inside in valid.items():
            if not inside:
                values = {**structure.zeros, **params, **given}
                with numpyro.validation_enabled(False):
                    trace = run_model(self._model, arguments, rng_key, values)
                raise invalid_error(name, parameter, trace[name])
        blocks = [n for b in structure.blocks for n in natural_names(b)]
        if unknown := set(given) - set(params) - set(blocks):
            raise ValueError(
                f"init_params names {sorted(unknown)}, but the params are "
                f"{sorted([*params, *blocks])}"
            )
        if self._m_step:
            self.closed = self._proved(params, arguments, rng_key)
        return self._first_state(
            params, arguments.arrays, rng_key, given, static=arguments.static
        )

    def _collect(
        self,
        arrays: tuple[Array, ...],
        key: Array,
        init_params: dict[str, Any],
        static: Any,
    ) -> tuple[dict[str, Any], dict[tuple[str, str], Array]]:
        """Constrained initial params, and whether what is observed is valid; notes the
        constraint of every param."""
        structure, arguments = self._guide.structure, Arguments(arrays, static)
        args, kwargs = arguments.merge()
        guide_key, model_key = random.split(key)
        others = handlers.seed(self._guide.draw_others, guide_key)
        guide_trace = handlers.trace(others).get_trace(*args, **kwargs)
        drawn = {n: guide_trace[n]["value"] for n in structure.others}
        values = {**structure.zeros, **drawn, **init_params}
        trace = run_model(self._model, arguments, model_key, values)
        params = {}
        for site in (*guide_trace.values(), *trace.values()):
            if site["type"] == "param":
                name = site["name"]
                self._constraints[name] = site["kwargs"].get(
                    "constraint", constraints.real
                )
                value = init_params.get(name, site["value"])
                params[name] = jax.tree.map(_strong, value)
        return params, valid_observations(trace)

    def _begin(
        self,
        params: dict[str, Any],
        arrays: tuple[Array, ...],
        key: Array,
        init_params: dict[str, Any],
        static: Any,
    ) -> ConjugateState:
        arguments = Arguments(arrays, static)
        structure = structure_for(self._model, self._guide.structure, arguments)
        inverted = {k: t.inv for k, t in self.transforms.items()}
        values = {k: jax.tree.map(inverted[k], v) for k, v in params.items()}
        natural = {b.name: self._start_block(b, init_params) for b in structure.blocks}
        noisy = bool(structure.subsampled) or self._guide.random_others
        batches = epoch_length(structure) if noisy else None
        schedule = as_schedule(self._step_size, batches)
        dtype = jnp.result_type(*(b.dtype for b in structure.blocks))
        step_size = jnp.asarray(getattr(schedule, "value", 1.0), dtype)
        return ConjugateState(
            hyper=Hyper(
                values,
                jax.tree.map(jnp.zeros_like, values),
                jnp.ones((), dtype),
                self._optim.init(values) if self._optim else (),
            ),
            natural=natural,
            step_sizes={name: step_size for name in natural},
            schedule={k: schedule.init(n) for k, n in natural.items()},
            epochs=first_epochs(structure),
            bound=jnp.asarray(-jnp.inf, dtype),
            stalled=jnp.int32(0),
            step=jnp.int32(0),
            rng_key=random.fold_in(key, 1),
        )

    def _start_block(
        self, block: Block, init_params: dict[str, Any]
    ) -> NaturalGaussian:
        names, prior = natural_names(block), self._guide.start_natural(block)
        potential, precision = (
            jnp.asarray(init_params.get(n, x), block.dtype)
            for n, x in zip(names, prior, strict=True)
        )
        rows = block.shape[-1]
        return NaturalGaussian(
            potential.reshape(-1, rows), precision.reshape(-1, rows, rows)
        )

    def _proved(
        self, params: dict[str, Any], arguments: Arguments, key: Array
    ) -> tuple[ClosedParam, ...]:
        structure = structure_for(self._model, self._guide.structure, arguments)
        if structure.subsampled or self._guide.random_others:
            raise ValueError(
                "m_step is for full data and point values of other latents: of a batch "
                "the maximiser is noise; leave the params to optim"
            )
        values = {**params, **self._guide.other_median(params)}
        return closed_params(
            self._m_step,
            self._model,
            structure,
            arguments,
            values,
            self.transforms,
            key,
        )


def _strong(value: Any) -> jax.Array:
    """Strongly typed: a Python number would change dtype on its first update."""
    return jnp.asarray(
        value, jnp.result_type(float) if isinstance(value, float) else None
    )
