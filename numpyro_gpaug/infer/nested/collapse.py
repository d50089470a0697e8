# SPDX-License-Identifier: Apache-2.0
"""A model of the hyperparameters alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import numpyro

from numpyro_gpaug.infer.nested.hyperparameters import declared, sizes
from numpyro_gpaug.infer.nested.setup import CollapsedBounds
from numpyro_gpaug.model.structure import Arguments
from numpyro_gpaug.model.validation import check_arguments

SITE = "collapsed_bound"


def collapse(model: Callable[..., Any]) -> Callable[..., None]:
    r"""A NumPyro model of the hyperparameters of ``model`` alone, its Gaussian latents
    integrated out by the best Gaussian there is for them.

    Its density is the prior of the hyperparameters :math:`\theta` times
    :math:`\exp l(\theta)`, with

    .. math:: l(\theta) = \max_q \; \mathbb{E}_q \log p(y \mid z, \theta)
              - \mathrm{KL}(q \,\|\, p(z)),

    over Gaussians :math:`q` on all Gaussian latents jointly, whitened
    (:class:`~numpyro_gpaug.AutoLatentGaussian`), found by closed-form moves. With
    Normal likelihoods that is :math:`\log p(y \mid \theta)` exactly, so that NUTS on
    the collapsed model samples the posterior of :math:`\theta`. With others it is a
    lower bound of it, and the posterior approximate:
    :class:`~numpyro_gpaug.NestedVI` corrects it. So it is for a process with fewer
    inducing inputs than data, whose values keep their variance given inducing values.

    The gradient is that of the bound with q held fixed, which the envelope theorem
    makes exact at the optimum; second derivatives
    (:class:`~numpyro.infer.autoguide.AutoLaplaceApproximation`) are differences of
    gradients, third ones there are none. Everything may be mapped by :func:`jax.vmap`.
    The collapsed model is called as ``model`` is, observations included; its sites are
    the hyperparameters, with the names, priors and plates that they have in ``model``,
    the params, and the factor ``"collapsed_bound"``. Deterministic sites are left out:
    they may depend on latents. ``Predictive(model, draws)`` of its draws has the
    latents from their prior: :class:`~numpyro_gpaug.NestedVI` predicts.

    :param model: a NumPyro model as :class:`~numpyro_gpaug.AutoLatentGaussian` takes
        it, on full data.
    :return: a NumPyro model, for :class:`~numpyro.infer.NUTS`,
        :class:`~numpyro.infer.SVI` or any other algorithm.
    :raises NotConjugateError: when called, for a model that is not of this form.
    :raises ValueError: when called, for arguments that cannot be right, and plates that
        draw a subsample.

    **Example**

    >>> import jax, numpyro, jax.numpy as jnp, numpyro.distributions as dist
    >>> import numpyro_gpaug as gpaug
    >>> from numpyro.infer import MCMC, NUTS
    >>> def model(X, y):
    ...     scale = numpyro.sample("scale", dist.HalfNormal(1))
    ...     K = gpaug.kernels.Matern52(0.5)(X, X) + 1e-4 * jnp.eye(len(X))
    ...     f = numpyro.sample("f", dist.MultivariateNormal(jnp.zeros(len(X)), K))
    ...     with numpyro.plate("data", len(X)):
    ...         numpyro.sample("y", dist.Normal(f, scale), obs=y)
    >>> X = jnp.linspace(0, 1, 12)[:, None]
    >>> kernel = NUTS(gpaug.collapse(model))
    >>> mcmc = MCMC(kernel, num_warmup=50, num_samples=50, progress_bar=False)
    >>> mcmc.run(jax.random.key(0), X, jnp.sin(6 * X[:, 0]))
    >>> sorted(mcmc.get_samples())
    ['scale']

    References: Khan and Lin (2017), Conjugate-computation variational inference;
    Lazaro-Gredilla and Titsias (2011), Variational heteroscedastic Gaussian process
    regression (the marginalised bound).
    """
    bounds = CollapsedBounds(model, projected=False)

    @wraps(model)
    def collapsed(*args: Any, **kwargs: Any) -> None:
        check_arguments(model, args, kwargs)
        arguments = Arguments.split(args, kwargs)
        bound = bounds.at(arguments, args, kwargs)
        args, kwargs = arguments.merge()  # arrays of JAX's
        trace = declared(model, bound.structure, args, kwargs)
        values = {name: site["value"] for name, site in trace.items()}
        numpyro.factor(SITE, bound(values, sizes(trace), arguments.arrays))

    return collapsed
