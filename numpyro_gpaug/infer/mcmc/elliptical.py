# SPDX-License-Identifier: Apache-2.0
"""Elliptical slice sampling around a Gaussian approximation of the posterior."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, random

from numpyro_gpaug.errors import NotConjugateError
from numpyro_gpaug.gaussians.dense import Moments
from numpyro_gpaug.guides import AutoLatentGaussian
from numpyro_gpaug.guides.sparse_gp import AutoSparseGP
from numpyro_gpaug.infer.mcmc.parts import Geometry, Part
from numpyro_gpaug.infer.mcmc.slices import Parted, Slices
from numpyro_gpaug.infer.nested.bound import CollapsedBound
from numpyro_gpaug.infer.vi.latent_gaussian import LatentGaussian
from numpyro_gpaug.infer.vi.settling import settled
from numpyro_gpaug.likelihoods.expectations import Route
from numpyro_gpaug.model.arguments import Arguments
from numpyro_gpaug.model.costs import SAMPLE
from numpyro_gpaug.model.inspect import inspect_model
from numpyro_gpaug.model.inspect_joint import in_form, read_joint
from numpyro_gpaug.model.joint import JointView
from numpyro_gpaug.model.latents import GaussianSite, Structure
from numpyro_gpaug.model.structure import Block, flat_functions, run_model
from numpyro_gpaug.model.view import ModelView

# The increase in nats below which closed-form updates stop.
LEAST_GAIN = 1e-3


class EllipticalSlice(Slices):
    r"""Elliptical slice sampling with a Gaussian approximation of the posterior in
    place of the prior. It is exact, for any likelihood, and needs no gradients and no
    tuning.

    Elliptical slice sampling moves along ellipses through draws of a Gaussian, and
    corrects by the ratio of the target to it. If this Gaussian is the prior, the ratio
    is the likelihood, and moves are short for informative data. Here it is a
    variational fit :math:`q(v) = N(m, S)`, and the ratio :math:`p(v)\, p(y \mid v) /
    q(v)` is nearly flat: the better the fit, the less draws depend on each other.

    Warm-up scales the Gaussian as a whole, until draws are as far from its mean as its
    own draws. Some fifty steps suffice.

    Without ``guide`` and ``params``, ``init`` finds the Gaussian with the highest
    evidence lower bound itself, by closed-form updates. If the model has only processes
    and weight vectors, no two of which share a predictor, under likelihoods that
    :class:`~numpyro_gpaug.AutoSparseGP` accepts, each gets its own Gaussian. Otherwise
    (a process and weights added to it, outputs that share latents, random effects) it
    uses one Gaussian on all Gaussian latents, as
    :class:`~numpyro_gpaug.AutoLatentGaussian` does, for any likelihood that this guide
    accepts. If predictors are shared, that Gaussian is used even if a fit is given,
    whose Gaussians are independent.

    The target is exactly the posterior. But if the Gaussian is much narrower, draws
    rarely reach the tails of the posterior and then stay there, which short chains do
    not show. Compute :func:`~numpyro_gpaug.diagnostics.psis_khat` of a fit first. If it
    is above 0.7 (in a model whose latents share no predictor), use another sampler,
    such as :class:`~numpyro.infer.NUTS` if the likelihood has no augmentation.

    Along an ellipse function values are linear in two vectors, so a draw costs O(M (M +
    N)) once, and O(N) for each evaluation of the likelihood (two to three). With a
    joint Gaussian M is the number of all latents.

    :class:`~numpyro.infer.NUTS` samples all other latents, the hyperparameters, as the
    other block of NumPyro's ``Gibbs`` (extra fields are ``block_states.0.step``, ...;
    vectorised chains need ``chain_method=jax.vmap``).
    ``Gibbs([(EllipticalSlice(model), ["f.v"]), (kernel, None)])`` uses another kernel.
    :class:`numpyro.handlers.condition` fixes them,
    ``condition(model, data={"tau": 0.5})``. Whenever hyperparameters have changed, the
    Gaussian is computed again, by about ten Cholesky factorisations. A given fit is not
    computed again, and suits the hyperparameters at which it was made. Inducing inputs,
    several chains, and continued runs work as for
    :class:`~numpyro_gpaug.AugmentedGaussian`. Chains start from draws of the Gaussian.

    :param model: a NumPyro model; with a fit, the model that was fitted, its
        :func:`numpyro.param` sites (if it has any) fixed at the fit by
        :class:`numpyro.handlers.substitute`, ``substitute(model, data=params)``. MCMC
        would keep them at their initial values.
    :param guide: a fitted :class:`~numpyro_gpaug.AutoSparseGP`, with any covariance
        except ``"preconditioned"``.
    :param params: params of the fit, as in ``result.params``.
    :raises NotConjugateError: at ``init``, for latents that are not Gaussian, or on
        which the data do not depend affinely, or, without a fit, for a likelihood for
        which no Gaussian can be found.
    :raises ValueError: for another guide, a guide or params alone, or at ``init`` for
        params or shapes of latents that differ from the fit.

    **Example**

    >>> import jax, numpyro, jax.numpy as jnp, numpyro.distributions as dist
    >>> import numpyro_gpaug as gpaug
    >>> from numpyro.infer import MCMC
    >>> def model(X, y=None):
    ...     gp = gpaug.GaussianProcess("f", gpaug.kernels.Matern52(), X, num_latents=3)
    ...     with numpyro.plate("data", X.shape[0]):
    ...         numpyro.sample("y", dist.Categorical(logits=gp(X)), obs=y)
    >>> X = jnp.linspace(0, 1, 12)[:, None]
    >>> y = jnp.arange(12) // 4
    >>> kernel = gpaug.EllipticalSlice(model)
    >>> mcmc = MCMC(kernel, num_warmup=50, num_samples=200, progress_bar=False)
    >>> mcmc.run(jax.random.key(0), X, y)
    >>> mcmc.get_samples()["f"].shape
    (200, 12, 3)

    Random effects, with their scale:

    >>> def groups(group, y=None):
    ...     level = numpyro.sample("level", dist.Normal(0, 3))
    ...     tau = numpyro.sample("tau", dist.HalfNormal(1.0))
    ...     with numpyro.plate("groups", 3):
    ...         effect = numpyro.sample("effect", dist.Normal(level, tau))
    ...     with numpyro.plate("data", len(group)):
    ...         numpyro.sample("y", dist.Poisson(jnp.exp(effect[group])), obs=y)
    >>> kernel = gpaug.EllipticalSlice(groups)
    >>> mcmc = MCMC(kernel, num_warmup=50, num_samples=200, progress_bar=False)
    >>> mcmc.run(jax.random.key(0), jnp.arange(12) // 4, jnp.arange(12))
    >>> {name: draws.shape for name, draws in sorted(mcmc.get_samples().items())}
    {'effect': (200, 3), 'level': (200,), 'tau': (200,)}

    References: Murray, Adams and MacKay (2010), Elliptical slice sampling; Nishihara,
    Murray and Adams (2014), Parallel MCMC with generalized elliptical slice sampling.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        guide: AutoSparseGP | None = None,
        params: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(model)
        if (guide is None) != (params is None):
            missing = "guide" if guide is None else "params"
            raise ValueError(f"a fit is a guide and its params: {missing} is missing")
        self._fit: dict[str, Moments] | None = None
        self._fitted: dict[str, Block] = {}
        self._params: dict[str, Any] = {}
        # Blocks with one Gaussian each; None if one Gaussian covers all latents.
        self._blocks: Structure | None = None
        if guide is not None and params is not None:
            _refuse_guide(guide)
            self._params, own = guide.split_params(params)
            self._fit = guide.moments(own)
            self._fitted = {b.site: b for b in guide.structure.blocks}

    def _read(self, arguments: Arguments) -> Structure:
        args, kwargs = arguments.merge()
        blocks = inspect_model(self._model, *args, **kwargs)
        self._blocks = blocks if self._apart(blocks, arguments) else None
        if self._blocks is not None:
            return _with_sites(blocks)
        try:
            return read_joint(self._model, SAMPLE, arguments)
        except NotConjugateError:
            self._refuse_open(blocks)
            raise

    def _apart(self, blocks: Structure, arguments: Arguments) -> bool:
        """Whether each process and weight vector gets a Gaussian of its own: no two
        share a predictor."""
        closed = all(
            site.latents for site in blocks.observed if site.route is not Route.CONSTANT
        )
        if self._fit is None and not (closed and blocks.processes):
            return False
        if blocks.others and self._fit is None:
            return False
        sources = [x for site in blocks.observed for x in site.sources]
        if any(len(x) > 1 for x in sources) or not blocks.blocks:
            return False
        mixed: list[str] = []

        def abstract(arrays: tuple[Array, ...]) -> None:
            given = arguments._replace(arrays=arrays)
            view = ModelView(blocks, self._model, given, {}, random.key(0))
            mixed.extend(view.coupled())
            if self._fit is None:
                mixed.extend(k for k, x in view.selected().items() if x is not None)

        jax.eval_shape(abstract, arguments.arrays)
        return not mixed

    def _refuse_open(self, blocks: Structure) -> None:
        """Raise for sites whose best Gaussian cannot be found here."""
        for site in blocks.observed if blocks.blocks else ():
            if site.route is not Route.CONSTANT and not site.latents:
                instead = (
                    "pass a fit by SVI and TraceAnalytic_ELBO (guide, params), or "
                    if self._fit is None
                    else "blocks that share a predictor need one: "
                )
                raise NotConjugateError(
                    f"site {site.name!r} has no expectation in closed form, "
                    f"{site.reason or 'so that no Gaussian is found for it'}; "
                    f"{instead}MCMC(NUTS(model)) samples it"
                )

    def _divided(self, arguments: Arguments) -> Sequence[Part]:
        if self._fit is not None:
            self._refuse_moved(arguments)
        structure = self.structure
        if self._blocks is None:
            self._structure = in_form(structure, self._model, SAMPLE, arguments)
            return [Part(self.structure)]
        return [
            Part(
                structure.with_sites((site,)), block.name if block.is_process else None
            )
            for site, block in zip(structure.sites, self._blocks.blocks, strict=True)
        ]

    def _refuse_moved(self, arguments: Arguments) -> None:
        """Raise for shapes or params that differ from those of the fit."""
        for site in self.structure.sites:
            fitted = self._fitted.get(site.name)
            if fitted is None and self._blocks is None:
                continue  # the joint Gaussian has further sites
            if fitted is None or fitted.shape != site.value_shape:
                found = "is not part of it" if fitted is None else f"has {fitted.shape}"
                raise ValueError(
                    f"site {site.name!r} has shape {site.value_shape} in the model, "
                    f"but in the fit it {found}: fit this model at these arguments"
                )

        @jax.jit
        def params(arrays: tuple[Array, ...]) -> dict[str, Any]:
            given, key = arguments._replace(arrays=arrays), random.key(0)
            zeros = self.structure.zeros
            trace = run_model(flat_functions(self._model), given, key, zeros)
            names = self._params.keys() & trace.keys()
            return {k: trace[k]["value"] for k in names if trace[k]["type"] == "param"}

        for name, value in params(arguments.arrays).items():
            pairs = zip(*map(jax.tree.leaves, (value, self._params[name])), strict=True)
            for now, fitted in pairs:
                if not isinstance(now, jax.core.Tracer) and not np.allclose(
                    now, fitted
                ):
                    raise ValueError(
                        f"param {name!r} is {now} in the model, but {fitted} in the "
                        "fit. Sample handlers.substitute(model, data=params)"
                    )

    def _gaussians(
        self, view: JointView
    ) -> tuple[tuple[Any, ...], tuple[Geometry, ...], Parted]:
        if self._blocks is not None:
            return self._independent(self._blocks, view)
        guide, static = AutoLatentGaussian(self._model), view.arguments.static
        bound = CollapsedBound(guide, self.structure, static, projected=True)
        problem = LatentGaussian.seen(view, "exact", 0.0, learns=False)
        q = bound.settle(problem, None, LEAST_GAIN).moments
        map_ = None if view.by_functions else view.of_density.matrices
        known = Geometry(map_, view.prior, view.links, view.processes)
        return (q,), (known,), (jnp.ones((), q.mean.dtype),)

    def _independent(
        self, blocks: Structure, view: JointView
    ) -> tuple[tuple[Any, ...], tuple[Geometry, ...], Parted]:
        of_blocks = ModelView(blocks, self._model, view.arguments, {}, random.key(0))
        processes, geometry = view.processes, []
        for part in self._parts:
            own = {k: x for k, x in processes.items() if k == part.process}
            geometry.append(Geometry(None, part.standard, (), own))
        found = self._fit
        if found is None:
            problem = LatentGaussian.seen(of_blocks, "exact", 0.0, learns=False)
            certain = {name: map_ for name, (map_, _) in processes.items()}
            problem = replace(problem, maps={**problem.maps, **certain})
            start: Any = {k: prior.natural for k, prior in problem.priors.items()}
            whole = {name: jnp.ones((), problem.dtype) for name in start}
            _, evaluation, _ = settled(
                problem, start, whole, 1.0, lambda moves: None, LEAST_GAIN
            )
            found = evaluation.moments
        moments, scales = [], []
        for block in blocks.blocks:
            loc, scale = of_blocks.priors()[block.name]
            mean, whitener = (jnp.asarray(x, block.dtype) for x in found[block.name])
            # In units of the standard normal variables behind the values.
            whitener = whitener / scale[..., None, :]
            moments.append(Moments((mean - loc) / scale, whitener))
            scales.append(jnp.asarray(of_blocks.block_scale(block), block.dtype))
        return tuple(moments), tuple(geometry), tuple(scales)


def _with_sites(blocks: Structure) -> Structure:
    """Return the structure of a model with its processes and weight vectors as the
    sites of a joint Gaussian."""
    sites = [GaussianSite(b.site, b.shape, b.shape, local=False) for b in blocks.blocks]
    dtype = jnp.result_type(*(b.dtype for b in blocks.blocks))
    return replace(blocks, joint=True, dtype=dtype).with_sites(tuple(sites))


def _refuse_guide(guide: Any) -> None:
    """Raise for a guide without Gaussians for the slices."""
    if not isinstance(guide, AutoSparseGP):
        raise ValueError(
            "EllipticalSlice needs a Gaussian on inducing values, which an "
            f"AutoSparseGP fits. Got {type(guide).__name__}. For all other Gaussian "
            "latents EllipticalSlice(model) finds the joint Gaussian itself; "
            "handlers.condition(model, data=guide.other_median(params)) fixes the "
            "hyperparameters"
        )
    if guide.covariance == "preconditioned":
        raise ValueError(
            'a fit with covariance="preconditioned" cannot be used here. '
            "EllipticalSlice(model) finds a Gaussian itself"
        )
