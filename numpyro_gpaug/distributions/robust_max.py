# SPDX-License-Identifier: Apache-2.0
"""Classes by the largest latent, with a fixed probability of a wrong label."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike
from numpyro.distributions import constraints

from numpyro_gpaug.distributions._classes import Classes, class_shape
from numpyro_gpaug.math.arrays import known_to


class RobustMax(Classes):
    r"""Classes ``0 .. J-1``. The class with the largest latent has probability ``1 -
    epsilon``, and each other class ``epsilon / (J-1)``.

    An observation costs at most ``log((J-1) / epsilon)`` nats, however far on the wrong
    side it is, so outliers do not move the boundary [1], [2]. ([2] prints ``epsilon``
    for every wrong class, with which the probabilities do not sum to one, but uses
    ``epsilon / (J-1)``.) The density is piecewise constant in the latents: its gradient
    is of no use to samplers, but its Gaussian expectation is smooth. It depends only on
    the order of the latents, hence not on a variance that all processes share: keep
    that variance fixed.

    :param f: latents, (..., J) with J >= 2; of equal latents the first counts as the
        largest.
    :param epsilon: probability of any wrong class, in (0, 1); broadcasts with the batch
        shape of ``f``. The default is the value of [2].
    :raises ValueError: if ``f`` has no class axis, or fewer than two classes, or for
        ``epsilon`` outside (0, 1).

    **References**

    [1] D. Hernandez-Lobato, J. M. Hernandez-Lobato and P. Dupont (2011), *Robust
    multi-class Gaussian process classification*.

    [2] V. D. Wild, R. Hu and D. Sejdinovic (2022), *Generalized variational inference
    in function spaces: Gaussian measures meet Bayesian deep learning*.

    **Example**

    >>> import jax.numpy as jnp
    >>> print(RobustMax(jnp.array([0.0, 2.0, -2.0]), epsilon=0.02).probs.round(3))
    [0.01 0.98 0.01]
    """

    arg_constraints = {
        "f": constraints.real_vector,
        "epsilon": constraints.open_interval(0.0, 1.0),
    }
    latent = "f"

    def __init__(
        self, f: Array, epsilon: ArrayLike = 0.01, *, validate_args: bool | None = None
    ) -> None:
        if not known_to(lambda e: (e > 0) & (e < 1), jnp.asarray(epsilon)):
            raise ValueError(f"epsilon is {epsilon}. It must be inside (0, 1)")
        self.f, self.epsilon = f, epsilon
        batch_shape = jnp.broadcast_shapes(class_shape("f", f), jnp.shape(epsilon))
        super().__init__(batch_shape=batch_shape, validate_args=validate_args)

    @property
    def log_right_wrong(self) -> tuple[Array, Array]:
        """Return the log-probability of the class with the largest latent, and of each
        other class, in the dtype of the latents and the shape of ``epsilon``."""
        epsilon = jnp.asarray(self.epsilon, jnp.result_type(self.f, 0.0))
        wrong = jnp.log(epsilon) - jnp.log(self._num_classes - 1)
        return jnp.log1p(-epsilon), wrong

    @property
    def log_probs(self) -> Array:
        right, wrong = (x[..., None] for x in self.log_right_wrong)
        largest = jnp.argmax(self.f, -1, keepdims=True)
        return jnp.where(jnp.arange(self._num_classes) == largest, right, wrong)
