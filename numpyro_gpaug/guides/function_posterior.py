# SPDX-License-Identifier: Apache-2.0
"""Function values under a fit: the interface between guides and predictions.

The ``function_posterior`` of a guide computes marginals of the predictors from a fit,
and a :class:`GaussianMeasure` at all other inputs. :class:`InducingPosterior` reads a
Gaussian on inducing values; a guide with another parametrisation brings its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from numpyro_gpaug.gaussians.base import Marginals, selected
from numpyro_gpaug.gaussians.dense import Moments, NaturalGaussian
from numpyro_gpaug.gp.conditional import Conditional
from numpyro_gpaug.gp.process import GaussianProcess
from numpyro_gpaug.gp.projection import (
    Projected,
    Whitener,
    lead,
    project,
    residual_variance,
)
from numpyro_gpaug.math.linalg import diagonal, inverse_cholesky
from numpyro_gpaug.model.arguments import Values
from numpyro_gpaug.model.structure import Block
from numpyro_gpaug.model.view import ModelView


class Fit(NamedTuple):
    """The parts of a fit that function values depend on.

    :param values: params and point values of other latents, by name.
    :param moments: moments of the Gaussian blocks, latent axis first, by block name.
    :param factors: quantities that do not depend on the inputs (inverse Cholesky
        factors of the inducing matrices), if computed before.
    """

    values: Values
    moments: dict[str, Moments]
    factors: dict[str, Any] | None = None


class GaussianMeasure(NamedTuple):
    """Independent Gaussian measures on functions, one per latent.

    :param mean: a function of inputs (N, D) that returns (latents, N).
    :param kernel: a kernel that returns covariances, (1 or latents, N, M), and
        variances, (1 or latents, N).
    """

    mean: Callable[[Array], Array]
    kernel: Callable[..., Array]

    def marginals(self, f: Conditional) -> Marginals:
        """Return marginals at the inputs at which a model calls a process."""
        mean = f.select(self.mean(f.X))
        variance = f.select(self.kernel(f.X))
        return Marginals(mean, jnp.broadcast_to(variance, mean.shape))


def prior_measure(gp: GaussianProcess) -> GaussianMeasure:
    """Return the prior of a process, without the approximation by inducing values."""

    def mean(X: Array) -> Array:
        return Conditional(gp, X, None).mean

    def kernel(X: Array, *Z: Array) -> Array:
        return lead(gp.kernel(X, *Z), 1 + len(Z))

    return GaussianMeasure(mean, kernel)


class SparseKernel:
    r"""Covariance of a sparse posterior, in whitened coordinates:
    :math:`k(x, x') - A(x)^\top A(x') + A(x)^\top S A(x')` with
    :math:`A(x) = L^{-1} k_Z(x)`.

    It is positive definite for every positive definite S: the first two terms are a
    Schur complement of the prior.

    :param gp: the process, for its kernel and inducing inputs.
    :param inducing: the whitener of the inducing values.
    :param whitener: W with ``S = W' W``, (1 or C, M, M).
    """

    def __init__(
        self, gp: GaussianProcess, inducing: Whitener, whitener: Array
    ) -> None:
        self._gp, self._inducing, self._whitener = gp, inducing, whitener

    def __call__(self, X: Array, Z: Array | None = None) -> Array:
        A = self.project(X)
        spread = self._whitener @ A.projection
        if Z is None:
            return A.residual + jnp.square(spread).sum(-2)
        B = A if Z is X else self.project(Z)
        prior = lead(self._gp.kernel(X, Z), 2)
        left = prior - A.projection.mT @ B.projection
        return left + spread.mT @ (self._whitener @ B.projection)

    def project(self, X: Array) -> Projected:
        """Return function values at inputs (N, D) given inducing values."""
        return project(self._gp, self._inducing, X)


class InducingPosterior:
    """Function values under a Gaussian on the inducing values.

    Predictions and losses need :meth:`factors`, which can be computed once for all
    inputs, :meth:`marginals` of the affine map of every block, and :meth:`measure`.
    """

    def factor(self, gp: GaussianProcess, block: Block, values: Values) -> Any:
        """Return the inverse Cholesky factor of an inducing matrix.

        :param gp: the process.
        :param block: its block.
        :param values: params of the fit.
        """
        return gp.whitener

    def factors(self, view: ModelView) -> dict[str, Any]:
        """Return the factor of every process, by block name."""
        return {
            b.name: self.factor(view.conditional(b).gp, b, view.values)
            for b in view.structure.processes
        }

    def marks(self, view: ModelView) -> dict[str, Array]:
        """Return checksums of the priors on which function values depend."""
        return view.marks()

    def known(self, gp: GaussianProcess, fit: Fit, block: Block) -> Any:
        """Return the factor of a process, computed if ``fit`` has none."""
        if fit.factors is not None:
            return fit.factors[block.name]
        return self.factor(gp, block, fit.values)

    def marginals(self, view: ModelView, fit: Fit) -> dict[str, Marginals]:
        """:class:`~numpyro_gpaug.gaussians.dense.Marginals` by block name."""
        return block_marginals(view, view.maps(fit.factors), fit.moments)

    def divergence(self, view: ModelView, fit: Fit, block: Block) -> Array:
        """Return the KL divergence of a block from its prior."""
        return view.priors()[block.name].divergence(fit.moments[block.name]).sum()

    def measure(
        self, conditional: Conditional, fit: Fit, block: Block
    ) -> GaussianMeasure:
        """Return the measure with mean ``m(x) + A(x)' E v`` and the covariance of
        :class:`SparseKernel`."""
        gp, q = conditional.gp, fit.moments[block.name]
        prior = prior_measure(gp)
        kernel = SparseKernel(gp, self.known(gp, fit, block), q.whitener)

        def mean(X: Array) -> Array:
            shift = jnp.einsum("...mn,...m->...n", kernel.project(X).projection, q.mean)
            return prior.mean(X) + shift

        return GaussianMeasure(mean, kernel)


def block_marginals(
    view: ModelView, maps: Mapping[str, Any], moments: dict[str, Moments]
) -> dict[str, Marginals]:
    """Return marginals of blocks under independent Gaussians on them.

    :param view: the view of the model.
    :param maps: affine maps, by block.
    :param moments: moments of all latents of every block, latent axis first.
    """
    chosen = view.selected()
    return {
        name: map_.marginals(selected(moments[name], chosen.get(name)))
        for name, map_ in maps.items()
    }


class Preconditioned(NamedTuple):
    """The parameters of a process, latent axis first.

    :param targets: nu, (1 or C, M).
    :param noise: the positive diagonal of Sigma, of the same shape.
    """

    targets: Array
    noise: Array

    @classmethod
    def of(cls, block: Block, values: Values) -> Preconditioned:
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

    def factor(self, gp: GaussianProcess, block: Block, values: Values) -> Array:
        """Return the inverse Cholesky factor of ``K + Sigma``."""
        gram = lead(gp.kernel(gp.inducing, gp.inducing), 2)
        noise = Preconditioned.of(block, values).noise
        eye = jnp.eye(noise.shape[-1], dtype=noise.dtype)
        return inverse_cholesky(gram + noise[..., None] * eye)

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
        inverse = self.known(gp, fit, block)
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
        inverse = self.known(gp, fit, block)
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
