# SPDX-License-Identifier: Apache-2.0
"""Generalised variational inference with the Wasserstein distance between Gaussian
measures, as a loss for NumPyro's own ``SVI``."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax, random
from numpyro.infer.elbo import ELBO

from numpyro_gpaug.guides.base import ProcessGuide
from numpyro_gpaug.guides.function_posterior import Fit, GaussianMeasure, prior_measure
from numpyro_gpaug.infer.vi.elbo import (
    mean_over_particles,
    other_terms,
    trace_guide,
    view_at,
)
from numpyro_gpaug.math.linalg import default_jitter, one_by_one, precise
from numpyro_gpaug.model.arguments import Arguments, Model, Values
from numpyro_gpaug.model.inspect import structure_at
from numpyro_gpaug.model.view import ModelView

ESTIMATORS = ("symmetric", "spectral")


class TraceWasserstein_ELBO(ELBO):
    r"""Minus the expected log-likelihood plus the Wasserstein distance to the prior. It
    is a loss for :class:`numpyro.infer.SVI`.

    .. math::
        -\sum_n E_Q \log p(y_n \mid F(x_n)) + w \sum_j \widehat{W}_2^2(P_j, Q_j)

    with :math:`P_j` the prior and :math:`Q_j` the guide's measure of latent j. The loss
    is not an evidence bound: it cannot be compared with losses of
    :class:`~numpyro_gpaug.TraceAnalytic_ELBO`, nor between weights. Reference: Wild, Hu
    and Sejdinovic (2022), *Generalized variational inference in function spaces*.

    The squared 2-Wasserstein distance is the distance between Gaussian measures on
    :math:`L_2(\hat\rho)`, the functions under the empirical measure of the inputs: the
    distance between the distributions of function values at N inputs, *divided by N*.
    The data term is a sum over N data. With the published ``weight=1`` the distance
    therefore has the weight of one observation, and the fitted posterior is far too
    certain. ``weight=N`` restores the scale of the distance between distributions of
    function values, and shrinks a mean that is large relative to the prior.

    Fix the hyperparameters of the prior and of the noise, or fit them with
    :class:`~numpyro_gpaug.ConjugateSVI` first. The loss does not bound the evidence,
    and a prior learnt with it follows the guide (its variance goes to 0 with the
    variance of the guide).

    The expected log-likelihood is the one of :class:`~numpyro_gpaug.TraceAnalytic_ELBO`
    with ``bound="exact"``, and other latents are treated in the same way. Plates that
    draw a batch scale it by N/B, and the distance is estimated on the rows of the
    batch.

    :param weight: w, larger than 0.
    :param estimator: ``"symmetric"``: the exact distance between the distributions of
        function values at up to ``num_points`` inputs, drawn again for each step,
        divided by their number. It is not negative, 0 only for equal distributions, and
        has finite gradients everywhere. ``"spectral"``, the published estimator, uses
        all N inputs X for the mean and the traces, and
        :math:`2 (N N_S)^{-1/2} \sum_s \lambda_s^{1/2}` for the cross term, with the
        eigenvalues of :math:`r(X_S, X) k(X, X_S)` at the drawn inputs :math:`X_S`. That
        matrix is not symmetric, and not similar to a symmetric one: its eigenvalues may
        be slightly negative or complex (the code uses real parts, and 0 below rounding,
        where the gradient is 0, too). This estimator is biased upward (with a kernel
        that is rough on the scale of the spacing of :math:`X_S`, threefold for 10 of
        120 inputs), and not 0 for Q = P unless :math:`X_S = X`. It needs JAX's
        nonsymmetric eigendecomposition, which not every accelerator supports.
    :param num_points: the number of inputs drawn without replacement, N_S; all of them
        if there are no more. The cost of a step grows with its cube, per latent.
    :param num_particles: draws of the other latents, and of the inputs, per step.
    :raises ValueError: for an unknown estimator, or a weight or number of points that
        is not positive.

    **Example**

    See :class:`~numpyro_gpaug.AutoFunctionSpaceGP`. A guide on inducing values works,
    too:

    >>> import jax, numpyro, optax, jax.numpy as jnp, numpyro.distributions as dist
    >>> import numpyro_gpaug as gpaug
    >>> def model(X, y=None):
    ...     gp = gpaug.GaussianProcess("f", gpaug.kernels.Matern32(), inducing=X[:3])
    ...     with numpyro.plate("data", X.shape[0]):
    ...         numpyro.sample("y", dist.Bernoulli(logits=gp(X)), obs=y)
    >>> guide = gpaug.AutoSparseGP(model, covariance="dense")
    >>> loss = gpaug.TraceWasserstein_ELBO(weight=8.0)
    >>> svi = numpyro.infer.SVI(model, guide, optax.adam(0.1), loss)
    >>> X, y = jnp.arange(8.0)[:, None], jnp.array([0, 1] * 4)
    >>> result = svi.run(jax.random.key(0), 50, X, y, progress_bar=False)
    >>> bool(result.losses[-1] < result.losses[0])
    True
    """

    def __init__(
        self,
        weight: float = 1.0,
        estimator: str = "symmetric",
        num_points: int = 50,
        num_particles: int = 1,
    ) -> None:
        if estimator not in ESTIMATORS:
            raise ValueError(
                f"estimator must be one of {ESTIMATORS}, got {estimator!r}"
            )
        if not weight > 0 or num_points < 1:
            raise ValueError(
                "weight and num_points must be positive, got "
                f"weight={weight}, num_points={num_points}"
            )
        self.weight = weight
        self.estimator = estimator
        self.num_points = num_points
        super().__init__(num_particles=num_particles)

    @precise
    def loss_with_mutable_state(
        self,
        rng_key: Array,
        param_map: Values,
        model: Model,
        guide: Model,
        *args: Any,
        **kwargs: Any,
    ) -> Values:
        """Return the loss; mutable state is not supported."""
        if not isinstance(guide, ProcessGuide):
            raise TypeError(
                f"the guide is a {type(guide).__name__}. The distance needs the "
                "mean and covariance functions of an AutoFunctionSpaceGP or "
                "AutoSparseGP"
            )
        arguments = Arguments.split(args, kwargs)
        structure = guide.setup(*args, **kwargs).structure
        if weights := [b.name for b in structure.weights]:
            raise ValueError(
                f"the guide owns the weights {weights}, which are not a process. "
                "Use AutoFunctionSpaceGP, which gives them to its other autoguide"
            )
        structure = structure_at(model, structure, arguments)
        moments = guide.moments(guide.split_params(param_map)[1])

        def particle(key: Array) -> Array:
            guide_key, model_key, points_key = random.split(key, 3)
            trace = trace_guide(guide.draw_others, guide_key, param_map, args, kwargs)
            view = view_at(structure, model, arguments, param_map, trace, model_key)
            fit = Fit({**param_map, **view.values}, moments)
            at = guide.function_posterior.marginals(view, fit)
            bound = view.expected_log_likelihood(at, "exact")
            bound = bound + other_terms(view, trace)
            return self._distance(view, guide, fit, points_key) - bound

        value = mean_over_particles(self, particle, rng_key)
        return {"loss": value, "mutable_state": None}

    def _distance(
        self, view: ModelView, guide: ProcessGuide, fit: Fit, key: Array
    ) -> Array | float:
        """Return the weighted distances of all processes, summed over latents."""
        total: Array | float = 0.0
        for block in view.structure.blocks:
            f = view.conditional(block)
            fitted = guide.function_posterior.measure(f, fit, block)
            measures = prior_measure(f.gp), fitted
            rows = f.X.shape[0]
            if rows <= self.num_points:
                chosen = f.X
            else:
                chosen = f.X[random.permutation(key, rows)[: self.num_points]]
            if self.estimator == "symmetric":
                each = symmetric_distance(*measures, chosen)
            else:
                each = spectral_distance(*measures, f.X, chosen)
            scale = jnp.asarray(self.weight, each.dtype) * view.block_scale(block)
            total = total + scale * f.select(each).sum()
        return total


def symmetric_distance(P: GaussianMeasure, Q: GaussianMeasure, X: Array) -> Array:
    """Return the squared distance between the distributions of function values at X,
    divided by the number of inputs, per latent.

    :param P: the prior.
    :param Q: the fitted measure.
    :param X: inputs, (N, D).
    """
    shift = jnp.square(P.mean(X) - Q.mean(X)).mean(-1)
    K, R = P.kernel(X, X), Q.kernel(X, X)
    scale = jnp.maximum(_mean_variance(K), _mean_variance(R))
    floor = lax.stop_gradient(scale) * default_jitter(X.shape[0], K.dtype)
    return shift + _bures(K, R, floor) / X.shape[0]


def spectral_distance(
    P: GaussianMeasure, Q: GaussianMeasure, X: Array, chosen: Array
) -> Array:
    """Return the published estimator of the squared distance, per latent.

    :param P: the prior.
    :param Q: the fitted measure.
    :param X: inputs, (N, D).
    :param chosen: some of them, (N_S, D).
    """
    shift = jnp.square(P.mean(X) - Q.mean(X)).mean(-1)
    product = Q.kernel(chosen, X) @ P.kernel(X, chosen)
    values = jnp.linalg.eigvals(product).real
    # Rounding errors of a zero have an infinite gradient, and their roots are not
    # small.
    precision = jnp.finfo(values.dtype).eps * chosen.shape[0]
    positive = values > precision * values.max(-1, keepdims=True)
    roots = jnp.where(positive, jnp.sqrt(jnp.where(positive, values, 1)), 0).sum(-1)
    cross = roots * (2 / np.sqrt(X.shape[0] * chosen.shape[0])).astype(roots.dtype)
    return shift + P.kernel(X).mean(-1) + Q.kernel(X).mean(-1) - cross


def squared_wasserstein(
    mean: Array, covariance: Array, other_mean: Array, other_covariance: Array
) -> Array:
    r"""Return the squared 2-Wasserstein distance between Gaussians.

    .. math::
        |m - m'|^2 + \mathrm{tr}(K + K' - 2 (K^{1/2} K' K^{1/2})^{1/2})

    Divide it by N for the distance between Gaussian measures with respect to N inputs
    that :class:`TraceWasserstein_ELBO` estimates.

    :param mean: (..., N).
    :param covariance: (..., N, N), symmetric and positive semidefinite.
    :param other_mean: (..., N).
    :param other_covariance: (..., N, N).
    :return: (...).

    **Example**

    >>> import jax.numpy as jnp
    >>> one, four = jnp.eye(1), 4 * jnp.eye(1)
    >>> print(squared_wasserstein(jnp.zeros(1), four, jnp.ones(1), one))
    2.0
    """
    shift = jnp.square(mean - other_mean).sum(-1)
    return shift + _bures(covariance, other_covariance, jnp.zeros((), shift.dtype))


def _bures(K: Array, R: Array, floor: Array) -> Array:
    r"""Return the distance between centred Gaussians, with ``floor`` added to
    eigenvalues.

    With :math:`K = A A^\top` and :math:`R = B B^\top` it is the minimum of
    :math:`|A - B U|^2` over orthogonal U, attained at the orthogonal factor of
    :math:`B^\top A`. This is a sum of squares, so it is not negative, and free of
    cancellation. Its derivatives do not need an eigenvalue problem: the optimal
    transport maps :math:`B U A^{-1}` and :math:`A U^\top B^{-1}` give them without
    differences of eigenvalues, which may be equal.
    """
    A, inverse_A = _root(lax.stop_gradient(K), floor)
    B, inverse_B = _root(lax.stop_gradient(R), floor)
    left, _, right = one_by_one(jnp.linalg.svd)(B.mT @ A)
    turn = left @ right
    value = jnp.square(A - B @ turn).sum((-2, -1))
    # The derivative with respect to U vanishes at a minimum.
    for matrix, there in ((K, B @ turn @ inverse_A), (R, A @ turn.mT @ inverse_B)):
        slope = jnp.eye(K.shape[-1], dtype=K.dtype) - there
        value = value + (slope * (matrix - lax.stop_gradient(matrix))).sum((-2, -1))
    return value


def _root(covariance: Array, floor: Array) -> tuple[Array, Array]:
    """Return a factor and its (pseudo-)inverse; eigenvalues that are negative by
    rounding count as 0."""
    values, vectors = one_by_one(jnp.linalg.eigh)(covariance)
    roots = jnp.sqrt(jnp.maximum(values, 0) + floor[..., None])
    positive = roots > 0
    inverse = jnp.where(positive, 1 / jnp.where(positive, roots, 1), 0)
    return vectors * roots[..., None, :], inverse[..., None] * vectors.mT


def _mean_variance(covariance: Array) -> Array:
    return jnp.diagonal(covariance, axis1=-2, axis2=-1).mean(-1)
