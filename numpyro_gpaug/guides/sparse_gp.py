# SPDX-License-Identifier: Apache-2.0
"""The guide of sparse Gaussian processes; NumPyro's autoguides take other latents."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, ClassVar, NoReturn

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from jax import Array
from numpyro import handlers
from numpyro.distributions import biject_to, constraints
from numpyro.infer.autoguide import AutoDelta

from numpyro_gpaug.distributions.gaussian import BlockGaussian
from numpyro_gpaug.errors import NotConjugateError
from numpyro_gpaug.gaussians.dense import Moments, NaturalGaussian, Prior
from numpyro_gpaug.guides.base import ConjugateGuide, Own
from numpyro_gpaug.guides.function_posterior import (
    InducingPosterior,
    Preconditioned,
    PreconditionedPosterior,
    preconditioned_names,
)
from numpyro_gpaug.math.linalg import precise
from numpyro_gpaug.model.arguments import Arguments, Model, Values
from numpyro_gpaug.model.latents import JOINT, Structure
from numpyro_gpaug.model.reading import warn_of_points
from numpyro_gpaug.model.structure import Block, Trace, flat_functions, run_model
from numpyro_gpaug.model.view import prior_of


class AutoSparseGP(ConjugateGuide):
    r"""An independent Gaussian on the inducing values of every Gaussian process in a
    model (and on every plain Gaussian weight vector on which likelihoods depend
    affinely), and a NumPyro autoguide on all other latents.

    The guide is a function of its params alone: the dict of arrays is the fit, and
    ``Predictive(model, guide=guide, params=params, num_samples=...)``
    (:class:`numpyro.infer.Predictive`) works at inputs of any size. ``guide.structure``
    lists the sites.

    :param model: a NumPyro model.
    :param covariance: ``"natural"``: potential and precision, which
        :class:`~numpyro_gpaug.ConjugateSVI` updates in closed form (not for gradient
        optimisers, whose steps can leave the positive definite cone); ``"dense"``: mean
        and a triangular factor, for gradient SVI; ``"diagonal"``: mean and standard
        deviations; ``"preconditioned"``: 2 M numbers, :math:`q(u) = N(K \mu, (K^{-1} +
        \Sigma^{-1})^{-1})` of the inducing values u with a diagonal :math:`\Sigma`.
        This has the correlations of the prior and needs no factor of K (Panos,
        Dellaportas and Titsias, 2018), for gradient SVI with many latents or
        ill-conditioned K. Its params are :math:`\Sigma` and :math:`\nu = (K + \Sigma)
        \mu`, observations with that noise, which keep gradients well scaled. Draws do
        factorise K, jitter included.
    :param other: class of the autoguide for all other latents (for example
        :class:`~numpyro.infer.autoguide.AutoNormal`), built as ``other(model)``. The
        default :class:`~numpyro.infer.autoguide.AutoDelta` gives their posterior mode,
        started at prior medians. With a random autoguide, predictions average over its
        draws.
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

    covariances: ClassVar[Any] = {
        "natural": InducingPosterior, "dense": InducingPosterior,
        "diagonal": InducingPosterior, "preconditioned": PreconditionedPosterior,
    }  # fmt: skip

    def read(self, model: Model, *args: Any, **kwargs: Any) -> Structure:
        structure = super().read(model, *args, **kwargs)
        if self._other_class is AutoDelta:
            warn_of_points(model, structure, args, kwargs)
        return structure

    def start_at(self, given: Values, trace: Trace, view: Any) -> dict[str, Any]:
        """Return natural parameters of every block: the given ones, and those of the
        prior for others."""

        def start(block: Block) -> NaturalGaussian:
            prior = self._first(block, lambda: trace).natural
            named = zip(natural_names(block), prior[:2], strict=True)
            values = (
                given.get(k, x).reshape(x.shape).astype(x.dtype) for k, x in named
            )
            return NaturalGaussian(*values)

        return {block.name: start(block) for block in self.structure.blocks}

    def _first(self, block: Block, trace: Callable[[], Trace]) -> Prior:
        """Return the Gaussian at which a block starts. At zero, the gradient of a
        symmetric likelihood may vanish.

        :param trace: returns a trace of the model.
        """
        return standard(block) if block.is_process else prior_of(block, trace())

    @precise
    def __call__(self, *args: Any, **kwargs: Any) -> Values:
        """Draw every latent.

        :return: values by site name.
        """
        self.begin(*args, **kwargs)
        values = self.draw_others(*args, **kwargs)
        factors = self._inducing_factors(values, args, kwargs)
        arguments, flat = Arguments.split(args, kwargs), flat_functions(self.model)
        filled = {**self.structure.zeros, **values}

        @cache
        def trace() -> Trace:
            return run_model(flat, arguments, jax.random.key(0), filled)

        for block in self.structure.blocks:
            if block.name in factors:
                natural = self._preconditioned(block).whitened(factors[block.name])
                shaped = NaturalGaussian(*(
                    x.reshape(block.shape + x.shape[2:]) for x in natural[:2]
                ))  # fmt: skip
                fn = BlockGaussian.from_natural(shaped)
            else:
                fn = self._gaussian(block, trace)
            values[block.site] = numpyro.sample(block.site, fn)
        return values

    def _inducing_factors(
        self, values: Values, args: Any, kwargs: Any
    ) -> dict[str, Array]:
        """Return Cholesky factors of the inducing matrices, if draws need them."""
        processes = [b for b in self.structure.processes if self._is_preconditioned(b)]
        if not processes:
            return {}
        trace = self.flat_trace(values, args, kwargs)
        return {b.name: trace[b.name]["fn"].gp.factor for b in processes}

    def _is_preconditioned(self, block: Block) -> bool:
        return self.covariance == "preconditioned" and block.is_process

    def median(self, params: Values) -> Values:
        """Return posterior medians of all latents.

        :param params: the guide's params.
        :return: values by site name.
        """
        values = self.other_median(params)
        for block in self.structure.blocks:
            values[block.site] = self.gaussian(block, params).mean
        return values

    def split_params(self, params: Values) -> tuple[Values, dict[str, Values]]:
        own = {
            block.name: {name: params[name] for name in self.param_names(block)}
            for block in self.structure.blocks
            if not self._is_preconditioned(block)
        }
        names = {name for each in own.values() for name in each}
        return {k: x for k, x in params.items() if k not in names}, own

    def moments(self, own: Own) -> dict[str, Moments]:
        return {
            name: given if isinstance(given, Moments) else self._moments(name, given)
            for name, given in own.items()
        }

    def _moments(self, name: str, params: Values) -> Moments:
        (block,) = (b for b in self.structure.blocks if b.name == name)
        if self.covariance == "natural":
            natural = NaturalGaussian(*(params[n] for n in natural_names(block)))
            return with_latent_axis(natural.moments())
        return with_latent_axis(moments_of(self.gaussian(block, params)))

    def inducing_gaussians(self, params: Values) -> tuple[Values, dict[str, Moments]]:
        """Return the other params of a fit, and moments of its Gaussians by block.

        :param params: params of the fit.
        :raises ValueError: with ``covariance="preconditioned"``, where the Gaussians
            depend on kernel matrices.
        """
        if self.covariance == "preconditioned":
            raise ValueError(
                'a fit with covariance="preconditioned" cannot be used here. '
                "EllipticalSlice(model) finds a Gaussian itself"
            )
        values, own = self.split_params(params)
        return values, self.moments(own)

    def param_names(self, block: Block) -> tuple[str, str]:
        if self.covariance == "natural":
            return natural_names(block)
        if self._is_preconditioned(block):
            return preconditioned_names(block)
        spread = "scale" if self.covariance == "diagonal" else "tril"
        return f"{block.site}_auto_loc", f"{block.site}_auto_{spread}"

    def gaussian(self, block: Block, params: Values) -> dist.Distribution:
        """Return the guide's distribution of a block.

        :param block: one of ``structure.blocks``.
        :param params: the guide's params.
        :raises ValueError: for a process with ``covariance="preconditioned"``, which
            depends on its kernel matrix too.
        """
        if self._is_preconditioned(block):
            raise ValueError(
                f"the preconditioned posterior of {block.site!r} depends on the "
                "kernel matrix. Use Posterior.from_guide(model, guide, params, X, "
                "y, ...)"
            )
        given = {name: params[name] for name in self.param_names(block)}
        with handlers.block(), handlers.substitute(data=given):
            return self._gaussian(block)

    def _preconditioned(self, block: Block) -> Preconditioned:
        targets, noise = self.param_names(block)
        zeros, positive = jnp.zeros(block.shape, block.dtype), constraints.positive
        values = {
            targets: numpyro.param(targets, zeros),
            noise: numpyro.param(noise, zeros + 1, constraint=positive),
        }
        return Preconditioned.of(block, values)

    def _gaussian(
        self, block: Block, trace: Callable[[], Trace] | None = None
    ) -> dist.Distribution:
        """Return the distribution of a block at its params.

        :param trace: returns a trace of the model, from which params start that have no
            value yet.
        """

        def param(place: int, start: Callable[[Prior], Array], constraint: Any) -> Any:
            def first(key: Array) -> Array:
                assert trace is not None
                value = start(self._first(block, trace))
                return value.reshape(block.shape + value.shape[2:])

            name = self.param_names(block)[place]
            return numpyro.param(name, first, constraint=constraint)

        real, positive = constraints.real, constraints.positive
        if self.covariance == "natural":
            potential = param(0, lambda prior: prior.natural.potential, NATURAL)
            precision = param(1, lambda prior: prior.natural.precision, NATURAL)
            return BlockGaussian.from_natural(NaturalGaussian(potential, precision))
        loc = param(0, lambda prior: prior.loc, real)
        if self.covariance != "diagonal":
            eye = jnp.eye(block.shape[-1], dtype=block.dtype)
            factor = param(1, lambda prior: prior.scale[..., None] * eye, real)
            return BlockGaussian(loc, jnp.tril(factor))
        scale = param(1, lambda prior: prior.scale, positive)
        return dist.Normal(loc, scale).to_event(len(block.shape))

    def _title(self) -> str:
        return f"AutoSparseGP, covariance {self.covariance!r}"


class _Natural(constraints.Constraint):
    """The constraint of natural parameters. Gradient steps do not keep them in the
    positive definite cone. The constraint therefore raises an error when unconstrained
    values are requested, which optimisers do first."""

    def __call__(self, x: Array) -> Array:
        return jnp.isfinite(x)

    def tree_flatten(self) -> Any:
        return (), ((), {})


NATURAL = _Natural()
"""Of params that closed-form updates move, and no gradient."""


@biject_to.register(_Natural)
def _refuse(constraint: Any) -> NoReturn:
    raise ValueError(
        "gradient optimisers cannot fit natural parameters. Fit AutoSparseGP or "
        'AutoLatentGaussian(model, covariance="dense") by numpyro.infer.SVI, or '
        "this guide by ConjugateSVI"
    )


def natural_names(block: Block) -> tuple[str, str]:
    """Return the names of the params that are a block's natural parameters."""
    return f"{block.site}_auto_potential", f"{block.site}_auto_precision"


def standard(block: Block) -> Prior:
    """Return standard normal priors of the latents of a block, latent axis first."""
    zeros = jnp.zeros(block.shape, block.dtype).reshape(-1, block.shape[-1])
    return Prior(zeros, jnp.ones_like(zeros))


def standard_naturals(structure: Structure) -> dict[str, Any]:
    """Return the natural parameters of standard normal latents, by block."""
    if structure.joint:
        return {JOINT: structure.form.standard(structure.dtype)}
    return {block.name: standard(block).natural for block in structure.blocks}


def with_latent_axis(q: Moments) -> Moments:
    """Return moments with a leading axis over latents, of size 1 for a single one."""
    if q.mean.ndim > 1:
        return q
    return Moments(*(x[None] for x in q))


def moments_of(fn: dist.Distribution) -> Moments:
    """Return moments of a guide's Gaussian.

    :param fn: :class:`~numpyro_gpaug.distributions.BlockGaussian`, independent normals,
        or a multivariate normal (possibly one per latent).
    :raises NotConjugateError: for any other distribution.
    """
    if isinstance(fn, BlockGaussian):
        return fn.moments()
    base = fn
    while isinstance(base, dist.Independent | dist.ExpandedDistribution):
        base = base.base_dist
    if isinstance(base, dist.Normal):
        loc = jnp.broadcast_to(base.loc, fn.event_shape)
        scale = jnp.broadcast_to(base.scale, fn.event_shape)
        whitener = jax.vmap(jnp.diag) if scale.ndim > 1 else jnp.diag
        return Moments(loc, whitener(scale))
    if isinstance(base, dist.MultivariateNormal):
        return BlockGaussian(base.loc, base.scale_tril).moments()
    raise NotConjugateError(
        f"the guide puts a {type(base).__name__} on the inducing values, but the "
        "analytic bound needs a Gaussian. Use AutoSparseGP"
    )
