# SPDX-License-Identifier: Apache-2.0
"""Elliptical slice sampling around a Gaussian approximation of the posterior."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numpyro_gpaug.guides.sparse_gp import AutoSparseGP
from numpyro_gpaug.infer.mcmc.block_slices import BlockSlices
from numpyro_gpaug.infer.mcmc.either import EitherKernel
from numpyro_gpaug.infer.mcmc.gaussian_kernel import GaussianKernel
from numpyro_gpaug.infer.mcmc.joint_slices import JointSlices
from numpyro_gpaug.model.structure import Structure


class EllipticalSlice(EitherKernel):
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
    and weight vectors, under likelihoods that :class:`~numpyro_gpaug.AutoSparseGP`
    accepts, each gets its own Gaussian. Those that share a predictor (a process and
    weights added to it, outputs that share latents) get a joint one. No such guide
    contains it, so it is found even if a fit is given. Otherwise it uses the Gaussian
    of :class:`~numpyro_gpaug.AutoLatentGaussian` on all Gaussian latents together,
    including random effects of many groups, for any likelihood that this guide accepts.

    The target is exactly the posterior. But if the Gaussian is much narrower, draws
    rarely reach the tails of the posterior and then stay there, which short chains do
    not show. Compute :func:`~numpyro_gpaug.diagnostics.psis_khat` of a fit first. If it
    is above 0.7 (in a model whose latents share no predictor), use another sampler,
    such as :class:`~numpyro.infer.NUTS` if the likelihood has no augmentation.

    Along an ellipse function values are linear in two vectors, so a draw costs O(M (M +
    N)) once, and O(N) for each evaluation of the likelihood (two to three). Blocks that
    share a predictor count as one block of all their latents. With a joint Gaussian a
    draw also runs the model once, for the values of its sites.

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
        if (guide is None) != (params is None):
            missing = "guide" if guide is None else "params"
            raise ValueError(f"a fit is a guide and its params: {missing} is missing")
        fit, fitted = None, {}
        if guide is not None and params is not None:
            _refuse_guide(guide)
            values, own = guide.split_params(params)
            fit = values, guide.moments(own)
            fitted = {b.site: b for b in guide.structure.blocks}
        super().__init__(BlockSlices(model, fit, fitted), JointSlices(model))
        self._given = fit is not None

    def _choose(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[GaussianKernel, Structure]:
        if self._given:
            return self._blocks, self._blocks.read(args, kwargs)
        return super()._choose(args, kwargs)


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
