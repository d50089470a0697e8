# SPDX-License-Identifier: Apache-2.0
"""The pseudo-likelihood of the Bayesian support vector machine."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import Array
from jax.scipy.special import ndtr
from jax.typing import ArrayLike
from numpyro.distributions import constraints
from numpyro.distributions.util import validate_sample

from numpyro_gpaug.math.arrays import floating
from numpyro_gpaug.math.normal import density

PREDICTIVE = ("probit", "normalized")


class BayesianSVM(dist.Distribution):
    r"""Labels 0/1 under the hinge loss, as a *pseudo*-likelihood [1], [2].

    **log_prob is not normalised over labels.** With ``s = 2 y - 1``, it is
    ``-2 max(1 - s f, 0)``: the likelihoods of 0 and 1 sum to 0.27 at ``f = 0`` and to
    1.02 at ``f = 1``. A fit bounds a pseudo-evidence, which cannot be compared with the
    evidence of another likelihood.

    The methods ``probs``, ``normalized_log_prob``, ``mean``, ``variance`` and
    ``sample`` *are* normalised: they use the ratio ``L(1) / (L(0) + L(1))`` of the
    pseudo-likelihoods.

    Predictions with ``f ~ N(m, v)`` integrated out are a Bernoulli distribution by one
    of two rules. Neither is calibrated, because training ignores the normaliser: rare
    classes are predicted far too often. A temperature improves them:
    :func:`numpyro_gpaug.tables.tempered`.

    * ``"probit"``: ``Phi(m / sqrt(1 + v))``, as in [2], a probit link;
    * ``"normalized"``: the mean of ``probs``.

    :param f: decision function, of the batch shape, real.
    :param predictive: ``"probit"`` (default) or ``"normalized"``.
    :raises ValueError: for any other rule; under ``validate_args``, for labels other
        than 0 and 1. Convert labels -1/+1 with ``(y + 1) // 2``.

    **References**

    [1] N. G. Polson and S. L. Scott (2011), *Data augmentation for support vector
    machines*, Bayesian Analysis 6(1).

    [2] F. Wenzel, T. Galy-Fajou, M. Deutsch and M. Kloft (2017), *Bayesian nonlinear
    support vector machines for big data*.

    **Example**

    >>> import jax.numpy as jnp
    >>> d = BayesianSVM(jnp.array([-1.0, 0.0, 0.5]))
    >>> print(d.log_prob(jnp.ones(3)))
    [-4. -2. -1.]
    >>> [f"{p:.3f}" for p in d.probs]
    ['0.018', '0.500', '0.881']
    """

    arg_constraints = {"f": constraints.real}
    support = constraints.boolean
    pytree_aux_fields = ("predictive",)

    def __init__(
        self,
        f: ArrayLike,
        predictive: str = "probit",
        *,
        validate_args: bool | None = None,
    ) -> None:
        if predictive not in PREDICTIVE:
            raise ValueError(
                f"predictive must be one of {PREDICTIVE}, got {predictive!r}"
            )
        self.f = f
        self.predictive = predictive
        super().__init__(jnp.shape(f), validate_args=validate_args)

    def sample(self, key: Array, sample_shape: tuple[int, ...] = ()) -> Array:
        """Draw labels with the normalised probabilities.

        :param key: random key.
        :param sample_shape: shape of independent draws.
        """
        labels = dist.BernoulliProbs(self.probs, validate_args=False)
        return labels.sample(key, tuple(sample_shape))

    @validate_sample
    def log_prob(self, value: ArrayLike) -> Array:
        """Return the pseudo-log-likelihood ``-2 max(1 - s f, 0)``, not normalised over
        labels.

        :param value: labels 0/1.
        """
        (f,) = floating(self.f)
        sign = 2 * jnp.asarray(value, f.dtype) - 1
        return -2 * jnp.maximum(1 - sign * f, 0)

    def normalized_log_prob(self, value: ArrayLike) -> Array:
        """Return the logarithm of ``L(y) / (L(0) + L(1))``.

        :param value: labels 0/1.
        """
        log_odds = _log_odds(self.f)
        sign = 2 * jnp.asarray(value, log_odds.dtype) - 1
        return jax.nn.log_sigmoid(sign * log_odds)

    @property
    def probs(self) -> Array:
        """The normalised probability of label 1."""
        return jax.nn.sigmoid(_log_odds(self.f))

    mean = probs

    @property
    def variance(self) -> Array:
        return self.probs * jax.nn.sigmoid(-_log_odds(self.f))


def _log_odds(f: ArrayLike) -> Array:
    """Return ``4 f`` between the margins, and ``2 (f + sign f)`` beyond."""
    (f,) = floating(f)
    return 2 * (f + jnp.clip(f, -1, 1))


def probit(mean: Array, variance: Array) -> Array:
    """Return ``E Phi(f)`` for ``f ~ N(mean, variance)``.

    :param mean: means, any shape.
    :param variance: variances, of that shape, >= 0.

    **Example**

    >>> import jax.numpy as jnp
    >>> print(f"{probit(jnp.array(1.0), jnp.array(1.0)):.3f}")
    0.760
    """
    return ndtr(mean / jnp.sqrt(1 + variance))


def expected_ratio(mean: Array, variance: Array) -> Array:
    r"""Return ``E probs`` for ``f ~ N(mean, variance)``, to 1e-9 (float64) at every
    variance.

    It uses piecewise Gauss-Legendre quadrature: the log-odds have a kink at each
    margin, and beyond ``|f| = 19`` the probability is 0 or 1 up to rounding.

    :param mean: means, any shape.
    :param variance: variances, of that shape, >= 0.

    **Example**

    >>> import jax.numpy as jnp
    >>> [f"{p:.3f}" for p in expected_ratio(jnp.ones(2), jnp.array([0.0, 1.0]))]
    ['0.982', '0.818']
    """
    mean, variance = floating(mean, variance)
    dtype = mean.dtype
    num, far = (40, 19.0) if dtype == jnp.float64 else (32, 9.0)
    scale = jnp.sqrt(jnp.maximum(variance, jnp.finfo(dtype).tiny))
    rule = np.polynomial.legendre.leggauss(num)
    shape = (num,) + (1,) * mean.ndim
    nodes, weights = (jnp.asarray(x, dtype).reshape(shape) for x in rule)
    total = ndtr((mean - far) / scale)
    for low, high in ((-far, -1.0), (-1.0, 1.0), (1.0, far)):
        a, b = (jnp.clip((x - mean) / scale, -9, 9) for x in (low, high))
        half = 0.5 * (b - a)
        z = a + half * (1 + nodes)
        # A rounded z must stay in its piece.
        f = jnp.clip(mean + scale * z, low, high)
        values = density(z) * jax.nn.sigmoid(_log_odds(f))
        total = total + half * (weights * values).sum(0)
    return total
