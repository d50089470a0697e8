# SPDX-License-Identifier: Apache-2.0
"""Guides: sparse Gaussian processes by us, other latents by NumPyro's autoguides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from jax import Array
from numpyro import handlers
from numpyro.infer.autoguide import AutoDelta, AutoGuide
from numpyro.infer.initialization import init_to_median

from numpyro_gpaug.analysis import analyse
from numpyro_gpaug.distributions.gaussian import BlockGaussian
from numpyro_gpaug.expectations import base_distribution
from numpyro_gpaug.fields import moments_of, with_latent_axis
from numpyro_gpaug.laws import InducingLaw, Law
from numpyro_gpaug.linalg import Moments, NaturalGaussian
from numpyro_gpaug.observations import check_observations
from numpyro_gpaug.structure import (
    Arguments,
    Block,
    Structure,
    flat_functions,
    run_model,
)

_COVARIANCES = ("natural", "dense", "diagonal")


class ProcessGuide:
    """What guides of Gaussian processes share: they take the model apart, give every
    latent they do not own to another NumPyro autoguide, and have a ``law`` that tells
    predictions what was fitted.

    :param model: a NumPyro model.
    :param other: class of the autoguide for all other latents.
    """

    law: Law

    def __init__(self, model: Callable[..., Any], other: Callable[..., Any]) -> None:
        self.model = model
        self._other_class = other
        self._other: AutoGuide | None = None
        self._structure: Structure | None = None
        self._checked = False
        # Compiled prediction, by model: the same for all params.
        self.predictors: dict[Any, Any] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> dict[str, Array]:
        """Draws every latent.

        :return: values by site name.
        """
        raise NotImplementedError

    def split_params(
        self, params: dict[str, Any]
    ) -> tuple[dict[str, Any], dict[str, Moments]]:
        """Params of a fit, parted into what predictions read by name and the moments of
        the Gaussian blocks, latent axis first, by block name.

        :param params: params of model and guide.
        """
        raise NotImplementedError

    @property
    def structure(self) -> Structure:
        """What the model is made of.

        :raises RuntimeError: before the guide was first called or set up.
        """
        if self._structure is None:
            raise RuntimeError(
                "the guide has not seen the model's arguments yet: call it, or "
                "guide.setup(*args, **kwargs), first"
            )
        return self._structure

    @property
    def random_others(self) -> bool:
        """Whether the other autoguide draws at random (``AutoDelta`` does not)."""
        return self._other is not None and not isinstance(self._other, AutoDelta)

    def setup(self, *args: Any, **kwargs: Any) -> Self:
        """Takes the model apart for these arguments; done once, by the first call that
        passes observations.

        :param args: the model's arguments.
        :param kwargs: its keyword arguments.
        :return: the guide.
        """
        if self._structure is None or not self._structure.observed:
            self._structure = self._take_apart(*args, **kwargs)
            if self._structure.others:
                self._other = self._build_other()
                with handlers.block():
                    handlers.seed(self._other, 0)(*args, **kwargs)
        return self

    def begin(self, *args: Any, **kwargs: Any) -> None:
        """What a call does first: :meth:`setup`, and a check of the first observations
        it is shown (ConjugateSVI, which does not call the guide, has its own).

        :param args: the model's arguments.
        :param kwargs: its keyword arguments.
        """
        structure = self.setup(*args, **kwargs).structure
        if structure.observed and not self._checked:
            self._checked = True
            arguments = Arguments.split(args, kwargs)
            check_observations(self.model, structure, arguments)

    def _take_apart(self, *args: Any, **kwargs: Any) -> Structure:
        return analyse(self.model, *args, **kwargs)

    def _build_other(self) -> AutoGuide:
        others = self.structure.others

        def filled(message: dict[str, Any]) -> Array | None:
            """Zeros for all that is hidden: an autoguide compiles the model it is
            given, and its gradient, and needs nothing of it but its own latents."""
            drawn = message["type"] == "sample" and message["name"] not in others
            if drawn and not message["is_observed"]:
                return jnp.zeros(message["fn"].shape())
            return None

        flat = flat_functions(self.model)
        fixed = handlers.block(
            handlers.substitute(flat, substitute_fn=filled),
            expose=[*others, *self.structure.plates],
        )
        if self._other_class is AutoDelta:
            return AutoDelta(fixed, init_loc_fn=init_to_median())
        return self._other_class(fixed)

    def draw_others(self, *args: Any, **kwargs: Any) -> dict[str, Array]:
        """Draws only what the other autoguide owns.

        :return: values by site name; empty if the Gaussian blocks are all there is.
        """
        return dict(self._other(*args, **kwargs)) if self._other else {}

    def other_median(self, params: dict[str, Any]) -> dict[str, Array]:
        """Posterior medians of the latents the other autoguide owns."""
        return dict(self._other.median(params)) if self._other else {}

    def sample_posterior(
        self,
        rng_key: Array,
        params: dict[str, Any],
        *args: Any,
        sample_shape: tuple[int, ...] = (),
        **kwargs: Any,
    ) -> dict[str, Array]:
        """Draws from the guide.

        :param rng_key: random key.
        :param params: the guide's params.
        :param args: the model's arguments.
        :param sample_shape: leading shape of the draws.
        :param kwargs: the model's keyword arguments.
        :return: values by site name.
        """
        self.setup(*args, **kwargs)

        def draw(key: Array) -> dict[str, Array]:
            seeded = handlers.seed(handlers.substitute(self, data=params), key)
            return handlers.block(seeded)(*args, **kwargs)

        if sample_shape == ():
            return draw(rng_key)
        keys = jax.random.split(rng_key, sample_shape)
        for _ in sample_shape:
            draw = jax.vmap(draw)
        return draw(keys)


class AutoSparseGP(ProcessGuide):
    """A Gaussian on the inducing values of every Gaussian process in a model (and on
    every plain Gaussian weight vector that reaches the likelihood affinely), and a
    NumPyro autoguide on all other latents.

    A function of its params alone: the dict of arrays is the fit, and
    ``Predictive(model, guide=guide, params=params, num_samples=...)`` works at inputs
    of any size. ``guide.structure`` says which site went where.

    :param model: a NumPyro model.
    :param covariance: ``"natural"``: potential and precision, what
        :class:`~numpyro_gpaug.ConjugateSVI` moves in closed form (not for gradient
        optimisers: their steps can leave the positive definite cone); ``"dense"``: mean
        and a triangular factor, for gradient SVI; ``"diagonal"``: mean and standard
        deviations.
    :param other: class of the autoguide for all other latents (for example
        ``AutoNormal``), built as ``other(model)``; the default ``AutoDelta`` gives
        their posterior mode, started at prior medians.
    :raises ValueError: for an unknown ``covariance``.

    **Example**

    >>> import jax, numpyro, jax.numpy as jnp, numpyro.distributions as dist
    >>> import numpyro_gpaug as gpaug
    >>> def model(X, y=None):
    ...     gp = gpaug.GaussianProcess("f", gpaug.kernels.Matern32(), inducing=X[:3])
    ...     with numpyro.plate("data", X.shape[0]):
    ...         numpyro.sample("y", dist.Bernoulli(logits=gp(X)), obs=y)
    >>> guide = gpaug.AutoSparseGP(model)
    >>> X, y = jnp.arange(8.0)[:, None], jnp.array([0, 1] * 4)
    >>> draw = numpyro.handlers.seed(guide, 0)(X, y)
    >>> {name: value.shape for name, value in draw.items()}
    {'f.v': (3,)}
    """

    def __init__(
        self,
        model: Callable[..., Any],
        covariance: str = "natural",
        other: Callable[..., Any] = AutoDelta,
    ) -> None:
        if covariance not in _COVARIANCES:
            raise ValueError(
                f"covariance must be one of {_COVARIANCES}, got {covariance!r}"
            )
        super().__init__(model, other)
        self.covariance = covariance
        self.law = InducingLaw()
        self._starts: dict[str, tuple[Array, Array]] = {}

    def _take_apart(self, *args: Any, **kwargs: Any) -> Structure:
        structure = super()._take_apart(*args, **kwargs)
        arguments = Arguments.split(args, kwargs)
        self._starts = _prior_scales(self.model, structure, arguments)
        return structure

    def start(self, block: Block) -> tuple[Array, Array]:
        """Mean and standard deviations a block starts from: its prior's.

        :param block: one of ``structure.blocks``.
        """
        zeros = jnp.zeros(block.shape, block.dtype)
        return self._starts.get(block.name, (zeros, zeros + 1))

    def start_natural(self, block: Block) -> NaturalGaussian:
        """The same in natural parameters.

        :param block: one of ``structure.blocks``.
        """
        loc, scale = self.start(block)
        precision = 1 / jnp.square(scale)
        eye = jnp.eye(block.shape[-1], dtype=block.dtype)
        return NaturalGaussian(loc * precision, precision[..., None] * eye)

    def __call__(self, *args: Any, **kwargs: Any) -> dict[str, Array]:
        """Draws every latent.

        :return: values by site name.
        """
        self.begin(*args, **kwargs)
        values = self.draw_others(*args, **kwargs)
        for block in self.structure.blocks:
            values[block.site] = numpyro.sample(block.site, self._gaussian(block))
        return values

    def median(self, params: dict[str, Any]) -> dict[str, Array]:
        """Posterior medians of all latents.

        :param params: the guide's params.
        :return: values by site name.
        """
        values = self.other_median(params)
        for block in self.structure.blocks:
            values[block.site] = self.gaussian(block, params).mean
        return values

    def split_params(
        self, params: dict[str, Any]
    ) -> tuple[dict[str, Any], dict[str, Moments]]:
        blocks = self.structure.blocks
        own = {name for b in blocks for name in self.param_names(b)}
        gaussians = {b.name: self.gaussian(b, params) for b in blocks}
        moments = {k: with_latent_axis(moments_of(fn)) for k, fn in gaussians.items()}
        return {k: x for k, x in params.items() if k not in own}, moments

    def param_names(self, block: Block) -> tuple[str, str]:
        """Names of the two params of a block."""
        if self.covariance == "natural":
            return natural_names(block)
        spread = "tril" if self.covariance == "dense" else "scale"
        return f"{block.site}_auto_loc", f"{block.site}_auto_{spread}"

    def gaussian(self, block: Block, params: dict[str, Any]) -> dist.Distribution:
        """The guide's distribution of a block.

        :param block: one of ``structure.blocks``.
        :param params: the guide's params.
        """
        with handlers.block(), handlers.substitute(data=params):
            return self._gaussian(block)

    def _gaussian(self, block: Block) -> dist.Distribution:
        if self.covariance == "natural":
            names = self.param_names(block)
            initial = self.start_natural(block)
            params = [numpyro.param(n, x) for n, x in zip(names, initial, strict=True)]
            return BlockGaussian.from_natural(NaturalGaussian(*params))
        loc_name, spread_name = self.param_names(block)
        start, spread = self.start(block)
        loc = numpyro.param(loc_name, start)
        if self.covariance == "dense":
            eye = jnp.eye(block.shape[-1], dtype=block.dtype)
            factor = numpyro.param(spread_name, spread[..., None] * eye)
            return BlockGaussian(loc, jnp.tril(factor))
        scale = numpyro.param(spread_name, spread, constraint=dist.constraints.positive)
        return dist.Normal(loc, scale).to_event(len(block.shape))


def natural_names(block: Block) -> tuple[str, str]:
    """Names of a block's natural parameters among the params."""
    return f"{block.site}_auto_potential", f"{block.site}_auto_precision"


def _prior_scales(
    model: Callable[..., Any], structure: Structure, arguments: Arguments
) -> dict[str, tuple[Array, Array]]:
    """Prior means and standard deviations of plain Gaussian weights, where their guide
    starts: from zero a symmetric likelihood might not move them."""
    weights = [b for b in structure.blocks if not b.is_process]
    if not weights:
        return {}
    key = jax.random.key(0)
    trace = run_model(flat_functions(model), arguments, key, structure.zeros)
    found = {}
    for block in weights:
        law = base_distribution(trace[block.site]["fn"])
        loc, scale = (
            jnp.broadcast_to(jnp.asarray(x, block.dtype), block.shape)
            for x in (law.loc, law.scale)
        )
        found[block.name] = loc, scale
    return found
