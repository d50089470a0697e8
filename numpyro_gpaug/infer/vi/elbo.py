# SPDX-License-Identifier: Apache-2.0
"""Losses for NumPyro's own ``SVI``: the analytic evidence lower bound, and generalised
variational inference with the Wasserstein distance between Gaussian measures."""

from __future__ import annotations

from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
from jax import Array, lax, random
from numpyro import handlers
from numpyro.distributions.kl import kl_divergence
from numpyro.infer.elbo import ELBO

from numpyro_gpaug.errors import NotConjugateError
from numpyro_gpaug.gaussians.dense import Moments
from numpyro_gpaug.guides import AutoFunctionSpaceGP, AutoSparseGP, ConjugateGuide
from numpyro_gpaug.guides.base import ProcessGuide
from numpyro_gpaug.guides.function_posterior import (
    Fit,
    GaussianMeasure,
    InducingPosterior,
    prior_measure,
)
from numpyro_gpaug.guides.sparse_gp import moments_of, with_latent_axis
from numpyro_gpaug.math.linalg import default_jitter, diagonal, one_by_one, precise
from numpyro_gpaug.model.arguments import Arguments, Model, Values
from numpyro_gpaug.model.expectation import scaled_sum
from numpyro_gpaug.model.inspect import inspect_model, structure_at
from numpyro_gpaug.model.latents import Structure
from numpyro_gpaug.model.observations import check_observed
from numpyro_gpaug.model.structure import Block, Trace, flat_functions, run_model
from numpyro_gpaug.model.view import ModelView

BOUNDS = ("exact", "augmented")


class _ProcessELBO(ELBO):
    """A loss: a penalty on the posterior, minus the expected log-likelihood. Its
    particles are draws of the latents of the other autoguide.

    :cvar bound: ``"exact"`` or ``"augmented"``, of the expected log-likelihood.
    :cvar guides: the class of the guides whose parts are read, not drawn.
    """

    bound = "exact"
    guides: ClassVar[type[ProcessGuide]] = ProcessGuide

    def _read(self, model: Model, guide: Any, args: Any, kwargs: Any) -> Structure:
        """Return the structure of the model. Raise for guides of another kind."""
        raise NotImplementedError

    def _penalty(self, view: Any, fit: Fit, posterior: Any, key: Array) -> Any:
        """Return the penalty.

        :param view: the view of the model.
        :param fit: the params and moments of the guide.
        :param posterior: the function values under these.
        :param key: random key.
        """
        raise NotImplementedError

    @precise
    def loss_with_mutable_state(
        self,
        rng_key: Array,
        param_map: Values,
        model: Model,
        guide: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Values:
        """Return the loss; mutable state is not supported."""
        structure = self._read(model, guide, args, kwargs)
        arguments, ours = Arguments.split(args, kwargs), isinstance(guide, self.guides)
        posterior: Any = guide.function_posterior if ours else InducingPosterior()
        seen, drawing = (guide.view, guide.draw_others) if ours else (ModelView, guide)

        def particle(key: Array) -> Array:
            guide_key, model_key, penalty_key = random.split(key, 3)
            trace = drawn(drawing, guide_key, param_map, args, kwargs)
            if ours:
                moments = guide.moments(guide.split_params(param_map)[1])
            else:
                moments = {b.name: _block_moments(trace, b) for b in structure.blocks}
            names = *structure.others, *(k for k in structure.plates if k in trace)
            values = param_map | {k: trace[k]["value"] for k in names}
            if structure.subsampled:
                # Drawn once: all runs of the model then use the same batch.
                filled, flat = structure.zeros | values, flat_functions(model)
                run = run_model(flat, arguments, model_key, filled)
                values |= {name: run[name]["value"] for name in structure.subsampled}
            view = seen(structure, model, arguments, values, model_key)
            fit = Fit(view.values, moments, posterior.factors(view))
            at = posterior.marginals(view, fit)
            bound = view.expected_log_likelihood(at, self.bound)
            bound = bound + other_terms(view, trace)
            return self._penalty(view, fit, posterior, penalty_key) - bound

        if self.num_particles == 1:
            return {"loss": particle(rng_key), "mutable_state": None}
        keys = random.split(rng_key, self.num_particles)
        value = jnp.mean(self.vectorize_particles_fn(particle, keys))
        return {"loss": value, "mutable_state": None}


class TraceAnalytic_ELBO(_ProcessELBO):
    """Evidence lower bound with all Gaussian-process values integrated out, or with
    :class:`~numpyro_gpaug.AutoLatentGaussian` all Gaussian latents. It is a loss for
    :class:`numpyro.infer.SVI`.

    The expected log-likelihood is exact (closed form or one-dimensional integrals) for
    registered likelihoods, by Gauss-Hermite quadrature with 32 nodes if the likelihood
    depends elementwise on one latent, and by Monte Carlo otherwise; ``routes`` returns
    which. The KL divergence of the Gaussian blocks is exact. Other latents are drawn
    once per particle; their KL divergence is analytic if NumPyro registers it, and
    otherwise ``log p - log q`` at the draw.

    :param bound: ``"exact"``, or ``"augmented"`` for the looser bound whose maximum the
        augmented closed-form updates find.
    :param num_particles: draws of the other latents per step.
    :raises ValueError: for an unknown ``bound``.

    **Example**

    >>> import jax, numpyro, optax, jax.numpy as jnp, numpyro.distributions as dist
    >>> import numpyro_gpaug as gpaug
    >>> def model(X, y=None):
    ...     gp = gpaug.GaussianProcess("f", gpaug.kernels.Matern32(), inducing=X[:3])
    ...     with numpyro.plate("data", X.shape[0]):
    ...         numpyro.sample("y", dist.Bernoulli(logits=gp(X)), obs=y)
    >>> guide = gpaug.AutoSparseGP(model, covariance="dense")
    >>> svi = numpyro.infer.SVI(model, guide, optax.adam(0.1), TraceAnalytic_ELBO())
    >>> X, y = jnp.arange(8.0)[:, None], jnp.array([0, 1] * 4)
    >>> result = svi.run(jax.random.key(0), 50, X, y, progress_bar=False)
    >>> bool(result.losses[-1] < result.losses[0])
    True
    """

    guides = ConjugateGuide

    def __init__(self, bound: str = "exact", num_particles: int = 1) -> None:
        if bound not in BOUNDS:
            raise ValueError(f"bound must be one of {BOUNDS}, got {bound!r}")
        self.bound = bound
        super().__init__(num_particles=num_particles)

    def routes(self, model: Model, *args: Any, **kwargs: Any) -> dict:
        """Return the route of every observed site.

        :param model: the model; or the guide of its fit, because an
            :class:`~numpyro_gpaug.AutoLatentGaussian` integrates out more latents than
            the processes and weight vectors that are found without a guide.
        :param args: its arguments.
        :param kwargs: its keyword arguments.
        :return: :class:`~numpyro_gpaug.likelihoods.expectations.Route` by site name.
        """
        if isinstance(model, ProcessGuide):
            structure = model.setup(*args, **kwargs).structure
        else:
            structure = inspect_model(model, *args, **kwargs)
        return {site.name: site.route for site in structure.observed}

    def _read(self, model: Model, guide: Any, args: Any, kwargs: Any) -> Structure:
        arguments = Arguments.split(args, kwargs)
        if not isinstance(guide, ConjugateGuide):
            structure = inspect_model(model, *args, **kwargs)
        elif guide.setup(*args, **kwargs).model is model:
            structure = guide.structure_at(arguments).unturned
        else:
            structure = guide.read(model, *args, **kwargs)
        check_observed(model, structure, arguments)
        return structure

    def _penalty(self, view: Any, fit: Fit, posterior: Any, key: Array) -> Any:
        return sum(
            posterior.divergence(view, fit, block) * view.block_scale(block)
            for block in view.structure.blocks
        )


def _block_moments(guide_trace: Trace, block: Block) -> Moments:
    site = guide_trace.get(block.site, {})
    if site.get("type") != "sample":
        raise NotConjugateError(
            f"the guide puts no distribution on {block.site!r}, so that there is no KL "
            "to its prior: use AutoSparseGP, or TraceWasserstein_ELBO for the guide "
            "AutoFunctionSpaceGP"
        )
    return with_latent_axis(moments_of(site["fn"]))


def drawn(guide: Model, key: Array, params: Values, args: Any, kwargs: Any) -> Trace:
    """Draw once from a guide (or from a part of it) at its params."""
    with handlers.seed(rng_seed=key):
        substituted = handlers.substitute(guide, data=params)
        return handlers.trace(substituted).get_trace(*args, **kwargs)


def other_terms(view: Any, guide_trace: Trace) -> Array | float:
    """Return minus the KL divergence of the other latents: analytic if registered, else
    at the draw."""
    total: Array | float = 0.0
    for name, site in view.other_sites().items():
        guide_site = guide_trace[name]
        try:
            term = -kl_divergence(guide_site["fn"], site["fn"])
        except NotImplementedError:
            value = guide_site["value"]
            term = site["fn"].log_prob(value) - guide_site["fn"].log_prob(value)
        total = total + scaled_sum(term, site["scale"])
    return total


ESTIMATORS = ("symmetric", "spectral")


class TraceWasserstein_ELBO(_ProcessELBO):
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

    def _read(self, model: Model, guide: Any, args: Any, kwargs: Any) -> Structure:
        if not isinstance(guide, AutoFunctionSpaceGP | AutoSparseGP):
            raise TypeError(
                f"the guide is a {type(guide).__name__}. The distance needs the "
                "mean and covariance functions of an AutoFunctionSpaceGP or "
                "AutoSparseGP"
            )
        structure = guide.setup(*args, **kwargs).structure
        if weights := [b.name for b in structure.weights]:
            raise ValueError(
                f"the guide owns the weights {weights}, which are not a process. "
                "Use AutoFunctionSpaceGP, which gives them to its other autoguide"
            )
        return structure_at(model, structure, Arguments.split(args, kwargs))

    def _penalty(self, view: Any, fit: Fit, posterior: Any, key: Array) -> Any:
        total: Array | float = 0.0
        for block in view.structure.blocks:
            f = view.conditional(block)
            measures = prior_measure(f.gp), posterior.measure(f, fit, block)
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
    scale = jnp.maximum(diagonal(K).mean(-1), diagonal(R).mean(-1))
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
