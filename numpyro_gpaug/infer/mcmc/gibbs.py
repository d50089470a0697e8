# SPDX-License-Identifier: Apache-2.0
"""Gibbs sampling of Gaussian latents through augmented likelihoods."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numpyro_gpaug.infer.mcmc.block_gibbs import BlockGibbs
from numpyro_gpaug.infer.mcmc.either import EitherKernel
from numpyro_gpaug.infer.mcmc.joint_gibbs import JointGibbs


class AugmentedGaussian(EitherKernel):
    """Exact Gibbs sampling with augmented likelihoods. It draws every auxiliary
    variable from its conditional, and then, from their Gaussian conditional, all
    Gaussian latents that share a predictor jointly. It needs no tuning, rejection or
    gradients.

    The model is written without auxiliaries, as for every other route. The kernel
    samples all latents in the joint Gaussian of
    :class:`~numpyro_gpaug.AutoLatentGaussian`: inducing values of Gaussian processes
    (whitened: site ``"f.v"``), scalars, vectors, random effects in plates, and random
    walks, on which likelihoods depend affinely. :class:`~numpyro.infer.NUTS` samples
    all others, the hyperparameters: the kernel is then a block of NumPyro's composite
    kernel. To use another kernel instead, write::

        Gibbs([(AugmentedGaussian(model), ["f.v"]), (NUTS(model), None)])

    Auxiliaries are extra fields: ``mcmc.run(..., extra_fields=("aux",))``, inside
    ``Gibbs`` ``"block_states.0.aux"``. Chains may run in sequence, in parallel, or
    vectorised (``chain_method="vectorized"``; inside ``Gibbs``,
    ``chain_method=jax.vmap``); they start from prior draws unless ``init_params`` has
    the latents. ``mcmc.post_warmup_state = mcmc.last_state`` continues a run with the
    same inputs: the state contains matrices computed from them.

    *The target* is the log density of the model. With fewer inducing inputs than data
    this is the process projected onto them, without its residual. With
    ``inducing=X_train`` it is the full process, which comparisons should use.
    :func:`numpyro.param` sites stay at their initial values: give a parameter that is
    to be inferred a prior, or fix it with :class:`numpyro.handlers.substitute`,
    ``substitute(model, data=params)``.

    A sweep over processes and weight vectors costs one Cholesky factorisation of min(M,
    N) rows per process (or of all their latents together, if several are summed). At
    fixed hyperparameters kernel matrices are factorised once. With other Gaussian
    latents a sweep factorises the precision matrix of a fit's joint Gaussian, which is
    dense, by groups or along chains, and runs the model once, for the values of its
    sites.

    :param model: a NumPyro model.
    :raises NotConjugateError: at ``init``, for a likelihood without augmentation, or
        with parameters that are not affine in latents, for scaled sites, and for
        latents that are not Gaussian, unless another block owns them.
    :raises ValueError: at ``init``, for plates that draw subsamples.

    **Example**

    >>> import jax, numpyro, jax.numpy as jnp, numpyro.distributions as dist
    >>> import numpyro_gpaug as gpaug
    >>> from numpyro.infer import MCMC
    >>> def model(X, y=None):
    ...     w = numpyro.sample("w", dist.Normal(0, 1).expand([2]).to_event(1))
    ...     with numpyro.plate("data", X.shape[0]):
    ...         numpyro.sample("y", dist.Bernoulli(logits=X @ w), obs=y)
    >>> X = jax.random.normal(jax.random.key(1), (50, 2))
    >>> y = (X[:, 0] > 0).astype(int)
    >>> kernel = gpaug.AugmentedGaussian(model)
    >>> mcmc = MCMC(kernel, num_warmup=50, num_samples=200, progress_bar=False)
    >>> mcmc.run(jax.random.key(0), X, y, extra_fields=("aux",))
    >>> mcmc.get_samples()["w"].shape
    (200, 2)
    >>> mcmc.get_extra_fields()["aux"]["y"]["omega"].shape
    (200, 50)

    Random effects, with their scale:

    >>> def groups(group, y=None):
    ...     level = numpyro.sample("level", dist.Normal(0, 3))
    ...     tau = numpyro.sample("tau", dist.HalfNormal(1.0))
    ...     with numpyro.plate("groups", 3):
    ...         effect = numpyro.sample("effect", dist.Normal(level, tau))
    ...     with numpyro.plate("data", len(group)):
    ...         numpyro.sample("y", dist.Bernoulli(logits=effect[group]), obs=y)
    >>> kernel = gpaug.AugmentedGaussian(groups)
    >>> mcmc = MCMC(kernel, num_warmup=50, num_samples=200, progress_bar=False)
    >>> mcmc.run(jax.random.key(0), jnp.arange(12) // 4, jnp.arange(12) % 2)
    >>> {name: draws.shape for name, draws in sorted(mcmc.get_samples().items())}
    {'effect': (200, 3), 'level': (200,), 'tau': (200,)}

    References: Albert and Chib (1993), Bayesian analysis of binary and polychotomous
    response data; Polson, Scott and Windle (2013), Bayesian inference for logistic
    models using Polya-Gamma latent variables; Galy-Fajou, Wenzel and Opper (2020),
    Automated augmented conjugate inference for non-conjugate Gaussian process models.
    """

    def __init__(self, model: Callable[..., Any]) -> None:
        super().__init__(BlockGibbs(model), JointGibbs(model))
