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
from numpyro_gpaug.gaussians.dense import Moments
from numpyro_gpaug.gp.conditional import Conditional
from numpyro_gpaug.gp.process import GaussianProcess
from numpyro_gpaug.gp.projection import Projected, Whitener, lead, project
from numpyro_gpaug.model.structure import Block
from numpyro_gpaug.model.view import ModelView


class Fit(NamedTuple):
    """The parts of a fit that function values depend on.

    :param values: params and point values of other latents, by name.
    :param moments: moments of the Gaussian blocks, latent axis first, by block name.
    :param factors: quantities that do not depend on the inputs (inverse Cholesky
        factors of the inducing matrices), if computed before.
    """

    values: dict[str, Any]
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

    def factors(self, view: ModelView) -> dict[str, Any]:
        """Return inverse Cholesky factors of the inducing matrices, by block name."""
        return inducing_factors(view)

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
        kernel = SparseKernel(gp, whitener_of(gp, fit, block), q.whitener)

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


def inducing_factors(view: ModelView) -> dict[str, Whitener]:
    """Return whiteners of the inducing values of every process, by block."""
    processes = view.structure.processes
    return {b.name: view.conditional(b).gp.whitener for b in processes}


def whitener_of(gp: GaussianProcess, fit: Fit, block: Block) -> Whitener:
    """Return the whitener of a process's inducing values, computed if ``fit`` has
    none."""
    return gp.whitener if fit.factors is None else fit.factors[block.name]
