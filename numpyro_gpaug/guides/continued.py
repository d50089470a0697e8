# SPDX-License-Identifier: Apache-2.0
"""Sparse processes whose prior is an earlier posterior. Their hyperparameters are fixed
or learnt."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpyro
from jax import Array, lax
from numpyro import handlers
from numpyro.distributions import constraints

from numpyro_gpaug._numpyro import one_thread
from numpyro_gpaug.gaussians.base import selected
from numpyro_gpaug.gaussians.dense import AffineBlocks, AffineMap, Moments, Prior
from numpyro_gpaug.gaussians.pseudo_data import SeenPrior
from numpyro_gpaug.gp.conditional import Conditional
from numpyro_gpaug.gp.process import GaussianProcess
from numpyro_gpaug.gp.projection import latent_first
from numpyro_gpaug.guides.base import Own
from numpyro_gpaug.guides.sparse_gp import AutoSparseGP, standard
from numpyro_gpaug.math.compiling import jit_for_few_runs
from numpyro_gpaug.math.linalg import inverse_lower, one_by_one, precise
from numpyro_gpaug.model.arguments import Arguments, Model, Values
from numpyro_gpaug.model.structure import Block, Trace
from numpyro_gpaug.model.view import ModelView


class _ContinuedView(ModelView):
    """A model whose Gaussian blocks have information from earlier data."""

    def maps(
        self, factors: dict[str, Any] | None = None
    ) -> dict[str, AffineMap | AffineBlocks]:
        found: dict[str, AffineMap] = {}
        for block in self.structure.processes:
            # Batches of a stream are small, so they are not divided into blocks of
            # rows.
            found[block.name] = self.conditional(block).affine_map
        found |= self.weight_maps()
        chosen, blocks = self.selected(), self.structure.blocks
        earlier = {b.name: Moments(*earlier_of(b, self.values)[:2]) for b in blocks}
        return {
            name: map_.about(selected(earlier[name], chosen.get(name)))
            for name, map_ in found.items()
        }

    def priors(self) -> dict[str, Any]:
        return {block.name: standard(block) for block in self.structure.blocks}


class ContinuedGP(AutoSparseGP):
    """An :class:`~numpyro_gpaug.AutoSparseGP` for data that follow earlier data.

    The earlier posterior of an inducing vector is ``v = mean + W' z`` with ``z``
    standard normal, and the natural parameters here are those of ``z``: updates then
    use a standard normal prior, and affine maps of ``z``. Means and whiteners are
    params, so one program serves all batches.

    :param model: a NumPyro model; params and other latents stay fixed.
    """

    view: ClassVar[Any] = _ContinuedView
    # Of the params with the earlier posterior.
    fields: ClassVar[tuple[str, ...]] = ("mean", "whitener")

    def going_on(
        self, arguments: Arguments, values: Values, moments: dict[str, Moments]
    ) -> tuple[Values, Array | float]:
        """Return params of a fit that continues from a posterior, and the constant of
        its loss, in nats.

        :param arguments: the model's arguments.
        :param values: params, and point values of other latents.
        :param moments: moments of the posterior, by block.
        """
        found: Values = {}
        for block in self.structure.blocks:
            found |= self._named(block, moments[block.name])
        return found, 0.0

    def _first(self, block: Block, trace: Callable[[], Trace]) -> Prior:
        return standard(block)

    @property
    def constraints(self) -> dict[str, Any]:
        names = [name for b in self.structure.blocks for name in self._names(b)]
        return {**super().constraints, **dict.fromkeys(names, constraints.real)}

    def draw_others(self, *args: Any, **kwargs: Any) -> Values:
        for block in self.structure.blocks:
            loc, scale = standard(block)
            eye = scale[..., None] * jnp.eye(block.shape[-1], dtype=block.dtype)
            nothing = [loc if k.endswith("mean") else eye for k in self.fields]
            for name, value in self._named(block, nothing).items():
                numpyro.param(name, value)
        return super().draw_others(*args, **kwargs)

    def _names(self, block: Block) -> list[str]:
        return [earlier_name(block, field) for field in self.fields]

    def _named(self, block: Block, arrays: Iterable[Array]) -> Values:
        """Return the params with the earlier posterior of a block.

        :param block: a block of the model.
        :param arrays: one per field, for each latent or for all, latent axis first.
        """
        found = {}
        for name, x in zip(self._names(block), arrays, strict=True):
            every = jnp.broadcast_to(x, (math.prod(block.shape[:-1]), *x.shape[1:]))
            found[name] = every.reshape(block.shape[:-1] + x.shape[1:])
        return found

    def split_params(self, params: Values) -> tuple[Values, dict[str, Values]]:
        values, own = super().split_params(params)
        for block in self.structure.blocks:
            own[block.name] |= {name: values.pop(name) for name in self._names(block)}
        return values, own

    @precise
    def moments(self, own: Own) -> dict[str, Moments]:
        found = super().moments(own)
        for block in self.structure.blocks:
            params, z = own[block.name], found[block.name]
            if not isinstance(params, Moments):
                earlier = Moments(*earlier_of(block, params)[:2])
                mean = earlier.mean + earlier.unwhiten(z.mean)
                found[block.name] = Moments(mean, z.whitener @ earlier.whitener)
        return found


def earlier_name(block: Block, field: str) -> str:
    """Return the name of a param with earlier information about a block."""
    return f"{block.site}_earlier_{field}"


def earlier_of(block: Block, values: Mapping[str, Any]) -> list[Array]:
    """Return the earlier information about a block, latent axis first, from its params.
    The params have no derivatives, so that learning does not change them."""
    names = (earlier_name(block, field) for field in TrackedGP.fields)
    lead = len(block.shape) - 1
    found = (lax.stop_gradient(jnp.asarray(values[k])) for k in names if k in values)
    return [x.reshape(-1, *x.shape[lead:]) for x in found]


class _TrackedView(_ContinuedView):
    """A model with information from earlier data under earlier hyperparameters."""

    def conditional(self, block: Block) -> Conditional:
        return self._with_fixed_inputs[block.name]

    @cached_property
    def _with_fixed_inputs(self) -> dict[str, Conditional]:
        """Processes whose inducing inputs have no derivatives."""
        found = {}
        for block in self.structure.processes:
            f = super().conditional(block)
            gp = copy.copy(f.gp)
            gp.inducing = lax.stop_gradient(gp.inducing)
            found[block.name] = Conditional(gp, f.X, f.latents)
            # They may depend on params, which only a run of the model substitutes.
            found[block.name].mean = f.mean
        return found

    def priors(self) -> dict[str, Any]:
        own = ModelView.priors(self)
        return {b.name: self._seen(b, own[b.name]) for b in self.structure.blocks}

    @precise
    def _seen(self, block: Block, prior: Prior) -> SeenPrior:
        mean, whitener, prior_mean, whiten = earlier_of(block, self.values)
        eye, here = jnp.eye(mean.shape[-1], dtype=mean.dtype), Moments(mean, whitener)
        if not block.is_process:
            white = jnp.matvec(whiten, mean - prior_mean), whitener @ whiten.mT
            same = jnp.broadcast_to(eye, whitener.shape)
            return SeenPrior.of(prior, here, Moments(*white), 0 * mean, same)
        gp = self.conditional(block).gp
        # Zero where hyperparameters are as before, to all digits.
        change = (whiten - gp.inverse_factor) @ inverse_lower(gp.inverse_factor)
        shift = means_at_inducing(gp, block, self.values) - prior_mean
        moved = jnp.matvec(change, mean) + jnp.matvec(whiten, shift)
        squares = jnp.square(whitener).sum(-1)
        start = jnp.matvec(whitener, moved) / squares
        turn = eye + whitener @ change @ whitener.mT / squares[..., None]
        return SeenPrior.of(prior, here, here, start, turn)


# Rounding errors, relative to the smallest variance that a whitened value explains. A
# change of a lengthscale by a tenth moves predictions by this part of their standard
# deviations, and more.
MOST_UNRESOLVED = 0.03


class TrackedGP(ContinuedGP):
    """A :class:`~numpyro_gpaug.guides.continued.ContinuedGP` whose hyperparameters may
    change.

    Old data have information about *function values* at the inducing inputs (and about
    weights), which does not depend on hyperparameters: what they added to the prior
    under the hyperparameters of their time. The prior here is that of the present ones
    with this information.

    :param model: a NumPyro model. Its inducing inputs stay fixed, because the
        information is about function values there.
    """

    view = _TrackedView
    fields = *ContinuedGP.fields, "prior_mean", "prior_whitener"

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        self._program: Any = one_thread(jit_for_few_runs(self._known))

    def going_on(
        self, arguments: Arguments, values: Values, moments: dict[str, Moments]
    ) -> tuple[Values, Array | float]:
        params, lost, unresolved = self._program(arguments, values, moments)
        if float(unresolved) > MOST_UNRESOLVED:
            warnings.warn(
                "a kernel matrix of inducing inputs is close to singular in "
                f"{unresolved.dtype}: information from earlier batches is inaccurate "
                "where hyperparameters change. Pass jitter=1e-5 to the process, use "
                "fewer inducing inputs, or use float64",
                UserWarning, stacklevel=3,
            )  # fmt: skip
        return params, lost

    @precise
    def _known(
        self, arguments: Arguments, values: Values, moments: dict[str, Moments]
    ) -> tuple[Values, Array, Array]:
        structure = self.structure_at(arguments)
        key = jax.random.key(0)
        view = ModelView(structure, self.model, arguments, values, key)
        priors, lost, unresolved = view.priors(), jnp.zeros(()), jnp.zeros(())
        params: Values = {}
        for block in structure.blocks:
            q, (loc, scale) = moments[block.name], priors[block.name]
            # The principal axes where the prior is standard normal.
            rows = q.whitener / scale[..., None, :]
            _, sizes, axes = one_by_one(jnp.linalg.svd)(rows)
            rows = sizes[..., None] * axes * scale[..., None, :]
            if block.is_process:
                gp = view.conditional(block).gp
                whiten = gp.inverse_factor
                before = means_at_inducing(gp, block, values), whiten
                largest = jnp.square(whiten).max() * jnp.square(gp.factor).sum(-1).max()
                eps = jnp.finfo(largest.dtype).eps
                unresolved = jnp.maximum(unresolved, eps * largest)
            else:
                eye = jnp.eye(block.shape[-1], dtype=block.dtype)
                before = loc, eye / scale[..., None]
            params |= self._named(block, (q.mean, rows, *before))
            white = (q.mean - loc) / scale
            lost -= 0.5 * jnp.square(white).sum() + jnp.log(scale).sum()
        return params, lost, unresolved


def means_at_inducing(
    gp: GaussianProcess, block: Block, values: Mapping[str, Any]
) -> Array:
    """Return the mean function at inducing inputs, (latents, M).

    :param gp: the process.
    :param block: its block.
    :param values: values of params.
    :raises NotImplementedError: for a mean function of inputs that differ between
        latents.
    """
    shape = math.prod(block.shape[:-1]), block.shape[-1]
    if not callable(gp.mean):
        mean = jnp.asarray(gp.mean, block.dtype).reshape(-1, 1)
    elif gp.inducing.ndim == 3:
        raise NotImplementedError(
            f"{block.name!r} has a mean function and a set of inducing inputs per "
            "latent, so a stream cannot track its hyperparameters. Fix them, optim=None"
        )
    else:
        with handlers.block(), handlers.substitute(data=dict(values)):
            mean = latent_first(jnp.asarray(gp.mean(gp.inducing), block.dtype))
    return jnp.broadcast_to(mean, shape)
