# SPDX-License-Identifier: Apache-2.0
r"""A posterior of a process with 2 M numbers,
:math:`q(u) = N(K \mu, (K^{-1} + \Sigma^{-1})^{-1})` with :math:`\Sigma` diagonal.

Reference: Panos, Dellaportas and Titsias (2018), section 2.3. Means, variances and the
KL need one Cholesky factor, of :math:`K + \Sigma`, which is well conditioned without
jitter; K itself is not factorised.

The same Gaussian is the posterior given M observations :math:`\nu` of the inducing
values with noise :math:`\Sigma`, for :math:`\mu = (K + \Sigma)^{-1} \nu`, and
:math:`\nu` is the param. A gradient with respect to :math:`\mu` is the gradient with
respect to the mean, multiplied by K, whose eigenvalues may differ by any factor (if the
kernel is nearly constant, one is M times its variance). A gradient with respect to
:math:`\nu` is multiplied by :math:`(K + \Sigma)^{-1} K`, whose eigenvalues are below 1.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from numpyro_gpaug.gaussians.dense import NaturalGaussian
from numpyro_gpaug.gp.conditional import Conditional
from numpyro_gpaug.gp.process import GaussianProcess
from numpyro_gpaug.gp.projection import lead, residual_variance
from numpyro_gpaug.guides.function_posterior import (
    Fit,
    GaussianMeasure,
    InducingPosterior,
    block_marginals,
    prior_measure,
)
from numpyro_gpaug.math.linalg import diagonal, inverse_cholesky
from numpyro_gpaug.model.structure import Block
from numpyro_gpaug.model.view import ModelView


class Preconditioned(NamedTuple):
    """The parameters of a process, latent axis first.

    :param targets: nu, (1 or C, M).
    :param noise: the positive diagonal of Sigma, of the same shape.
    """

    targets: Array
    noise: Array

    @classmethod
    def of(cls, block: Block, values: dict[str, Any]) -> Preconditioned:
        """Return the parameters of a block, from the params of a guide."""
        return cls(*(lead(values[name], 1) for name in preconditioned_names(block)))

    def weights(self, inverse: Array) -> Array:
        """Return mu, (1 or C, M).

        :param inverse: inverse Cholesky factor of ``K + Sigma``, (1 or C, M, M).
        """
        white = jnp.einsum("...mn,...n->...m", inverse, self.targets)
        return jnp.einsum("...nm,...n->...m", inverse, white)

    def whitened(self, factor: Array) -> NaturalGaussian:
        """Return the Gaussian of v, with :math:`u = L v`; its precision is
        :math:`I + L^T Sigma^{-1} L`.

        :param factor: L, (1 or C, M, M).
        """
        root = jnp.sqrt(self.noise)
        scaled = factor / root[..., None]
        eye = jnp.eye(factor.shape[-1], dtype=factor.dtype)
        potential = jnp.einsum("...nm,...n->...m", scaled, self.targets / root)
        return NaturalGaussian(potential, eye + scaled.mT @ scaled)


def preconditioned_names(block: Block) -> tuple[str, str]:
    """Return the names of the two params of a block."""
    return f"{block.site}_auto_targets", f"{block.site}_auto_noise"


class PreconditionedPosterior(InducingPosterior):
    """Function values under :class:`Preconditioned`; weight vectors are Gaussian as in
    :class:`~numpyro_gpaug.guides.function_posterior.InducingPosterior`."""

    def factors(self, view: ModelView) -> dict[str, Array]:
        """Return inverse Cholesky factors of ``K + Sigma``, by block name."""
        return {
            b.name: _inverse_factor(view.conditional(b).gp, b, view.values)
            for b in view.structure.processes
        }

    def marginals(self, view: ModelView, fit: Fit) -> dict[str, Any]:
        found = block_marginals(view, view.weight_maps(), fit.moments)
        for block in view.structure.processes:
            f = view.conditional(block)
            found[block.name] = self.measure(f, fit, block).marginals(f)
        return found

    def divergence(self, view: ModelView, fit: Fit, block: Block) -> Array:
        r"""Return the KL divergence from the prior,
        :math:`\frac12(\mu^T K \mu - tr((K + \Sigma)^{-1} K) + \log|K + \Sigma| -
        \log|\Sigma|)`."""
        if not block.is_process:
            return super().divergence(view, fit, block)
        gp = view.conditional(block).gp
        params = Preconditioned.of(block, fit.values)
        gram = lead(gp.kernel(gp.inducing, gp.inducing), 2)
        inverse = self._inverse_factor(gp, fit, block)
        weights, noise = params.weights(inverse), params.noise
        energy = (weights * jnp.einsum("...mn,...n->...m", gram, weights)).sum(-1)
        # tr((K + Sigma)^-1 K) = M - tr((K + Sigma)^-1 Sigma)
        kept = 1 - jnp.square(inverse).sum(-2) * noise
        log_det = -2 * jnp.log(diagonal(inverse))
        return 0.5 * (energy + (log_det - jnp.log(noise) - kept).sum(-1)).sum()

    def measure(
        self, conditional: Conditional, fit: Fit, block: Block
    ) -> GaussianMeasure:
        """Return the measure with mean ``m(x) + k_Z(x) mu`` and covariance
        ``k(x, x') - k_Z(x) (K + Sigma)^-1 k_Z(x')``."""
        gp, prior = conditional.gp, prior_measure(conditional.gp)
        inverse = self._inverse_factor(gp, fit, block)
        weights = Preconditioned.of(block, fit.values).weights(inverse)

        def cross(X: Array) -> Array:
            return lead(gp.kernel(X, gp.inducing), 2)

        def mean(X: Array) -> Array:
            return prior.mean(X) + jnp.einsum("...nm,...m->...n", cross(X), weights)

        def kernel(X: Array, *Z: Array) -> Array:
            A = inverse @ cross(X).mT
            if not Z:
                return residual_variance(prior.kernel(X), A)
            B = A if Z[0] is X else inverse @ cross(*Z).mT
            return prior.kernel(X, *Z) - A.mT @ B

        return GaussianMeasure(mean, kernel)

    def _inverse_factor(self, gp: GaussianProcess, fit: Fit, block: Block) -> Array:
        if fit.factors is not None:
            return fit.factors[block.name]
        return _inverse_factor(gp, block, fit.values)


def _inverse_factor(gp: GaussianProcess, block: Block, values: dict[str, Any]) -> Array:
    gram = lead(gp.kernel(gp.inducing, gp.inducing), 2)
    noise = Preconditioned.of(block, values).noise
    eye = jnp.eye(noise.shape[-1], dtype=noise.dtype)
    return inverse_cholesky(gram + noise[..., None] * eye)
