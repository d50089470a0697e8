# SPDX-License-Identifier: Apache-2.0
"""The Gaussian of a guide on inducing values: one block per latent."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import Array, random
from numpyro.distributions import constraints
from numpyro.distributions.kl import kl_divergence

from numpyro_gpaug.gaussians.dense import Moments, NaturalGaussian, kl_to_diagonal
from numpyro_gpaug.math.linalg import cholesky, inverse_lower, precise, solve_lower


class BlockGaussian(dist.Distribution):
    """Independent multivariate normals, one per leading index, as one event.

    :param loc: means, (M,) or (C, M); the whole shape is the event shape.
    :param tril: lower triangular (..., M, M): a factor of the covariance, or of the
        precision. The signs of its diagonal do not matter.
    :param parameter: ``"covariance"`` or ``"precision"``: the matrix of which ``tril``
        is a factor.

    **Example**

    >>> import jax.numpy as jnp
    >>> q = BlockGaussian(jnp.zeros(2), 2 * jnp.eye(2), "precision")
    >>> print(q.variance)
    [0.25 0.25]
    """

    arg_constraints = {"loc": constraints.real_vector, "tril": constraints.real}
    reparametrized_params = ["loc", "tril"]
    pytree_aux_fields = ("parameter",)

    def __init__(
        self,
        loc: Array,
        tril: Array,
        parameter: str = "covariance",
        *,
        validate_args: bool | None = None,
    ) -> None:
        self.loc, self.tril, self.parameter = loc, tril, parameter
        super().__init__((), jnp.shape(loc), validate_args=validate_args)

    @classmethod
    def from_natural(cls, natural: NaturalGaussian) -> BlockGaussian:
        """Make it from potential and precision: mean ``precision^-1 potential``."""
        tril = cholesky(natural.precision)
        return cls(natural.moments().mean, tril, "precision")

    @property
    def support(self) -> constraints.Constraint:
        return constraints.independent(constraints.real, len(self.event_shape))

    def moments(self) -> Moments:
        """Return mean and covariance factor."""
        precision = self.parameter == "precision"
        return Moments(
            self.loc, inverse_lower(self.tril) if precision else self.tril.mT
        )

    @precise
    def sample(self, key: Array, sample_shape: tuple[int, ...] = ()) -> Array:
        eps = random.normal(key, sample_shape + self.event_shape, self.loc.dtype)
        whitener = self.moments().whitener
        return self.loc + jnp.vecmat(eps, whitener)

    @precise
    def log_prob(self, value: Array) -> Array:
        deviation = (value - self.loc)[..., None]
        if self.parameter == "precision":
            white = self.tril.mT @ deviation
        else:
            white = solve_lower(self.tril, deviation)
        axes = tuple(range(-len(self.event_shape), 0))
        quadratic = jnp.square(white[..., 0]).sum(axes)
        constant = np.prod(self.event_shape) * np.log(2 * np.pi)
        log_det = self.moments().log_det.sum()
        return -0.5 * (quadratic + log_det + jnp.asarray(constant, self.loc.dtype))

    @property
    def mean(self) -> Array:
        return self.loc

    @property
    def variance(self) -> Array:
        return jnp.square(self.moments().whitener).sum(-2)


@kl_divergence.register(BlockGaussian, dist.Independent)
def _kl_block_independent(p: BlockGaussian, q: dist.Independent) -> Array:
    base = q.base_dist
    while isinstance(base, dist.ExpandedDistribution):
        base = base.base_dist
    if not isinstance(base, dist.Normal) or q.event_shape != p.event_shape:
        raise NotImplementedError(
            "KL from a BlockGaussian is registered to independent normals of the same "
            f"event shape {p.event_shape}, not to {type(base).__name__} of "
            f"{q.event_shape}"
        )
    return kl_to_diagonal(p.moments(), base.loc, base.scale).sum()
