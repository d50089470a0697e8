# SPDX-License-Identifier: Apache-2.0
r"""Penalised-complexity priors of scales and ranges.

They measure how far a component of a model is from a simpler model without it, and
decay exponentially in that distance, so that the simpler model is preferred unless the
data say otherwise. The user states one tail probability in the units of the parameter.

References: Simpson, Rue, Riebler, Martins and Sørbye (2017), Penalising model component
complexity: a principled, practical approach to constructing priors, section 3.3, of
scales; Fuglstad, Simpson, Lindgren and Rue (2019), Constructing priors that penalize
the complexity of Gaussian random fields, theorem 2.6, of ranges.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike
from numpyro import distributions as dist

from numpyro_gpaug.math.arrays import known_to


def PCScale(upper: ArrayLike, prob: ArrayLike = 0.05) -> dist.Exponential:
    r"""Return the prior of a standard deviation that exceeds ``upper`` with probability
    ``prob``.

    It is an exponential distribution with rate :math:`-\log(\mathrm{prob}) /
    \mathrm{upper}`: its density is highest at 0, the model without the component. Use
    it for standard deviations of effects, processes and fields. For a logit or a log
    rate, ``PCScale(1.0)`` is weakly informative: effects beyond a factor of seven are
    rare.

    :param upper: a large value of the standard deviation, in its units; positive.
    :param prob: the prior probability of larger values, between 0 and 1.
    :return: a NumPyro distribution; arguments broadcast to its batch shape.
    :raises ValueError: if ``upper`` or ``prob`` is out of range.

    Reference: Simpson et al. (2017), section 3.3.

    **Example**

    >>> from numpyro_gpaug.distributions import PCScale
    >>> prior = PCScale(2.0, 0.05)
    >>> print(f"{1 - prior.cdf(2.0):.3f}")
    0.050
    """
    return dist.Exponential(_rate(prob) / _positive(upper, "upper"))


def PCRange(
    lower: ArrayLike, prob: ArrayLike = 0.05, *, dim: int = 2
) -> dist.TransformedDistribution:
    r"""Return the prior of the range of a Matérn process or field, which is below
    ``lower`` with probability ``prob``.

    If :math:`\rho` is the range, :math:`\rho^{-d/2}` is exponentially distributed with
    rate :math:`-\log(\mathrm{prob})\, \mathrm{lower}^{d/2}`. The simplest model is a
    constant, an infinite range: the density has a heavy right tail, and falls rapidly
    below ``lower``, where data cannot tell a field from noise. With :class:`PCScale`
    for the standard deviation this is the joint prior of Fuglstad et al. (2019).

    The same prior may be used for a lengthscale, which is a fixed multiple of the
    range. ``lower`` is then a small lengthscale.

    :param lower: a small value of the range, in units of the inputs; positive.
    :param prob: the prior probability of smaller values, between 0 and 1.
    :param dim: the number d of dimensions of the inputs: 1, 2 or 3.
    :return: a NumPyro distribution; arguments broadcast to its batch shape.
    :raises ValueError: if an argument is out of range.

    Reference: Fuglstad et al. (2019), theorem 2.6.

    **Example**

    >>> import jax
    >>> from numpyro_gpaug.distributions import PCRange
    >>> prior = PCRange(10.0, 0.05)
    >>> draws = prior.sample(jax.random.key(0), (10_000,))
    >>> print(f"{(draws < 10.0).mean():.2f}")
    0.05
    """
    if dim not in (1, 2, 3):
        raise ValueError(f"dim must be 1, 2 or 3, got {dim!r}")
    # The reciprocal of the range; in this form no power of a range can overflow.
    fastest = _rate(prob) ** (-2 / dim) / _positive(lower, "lower")
    reciprocal = dist.Weibull(fastest, dim / 2)
    return dist.TransformedDistribution(
        reciprocal, dist.transforms.PowerTransform(-1.0)
    )


def _rate(prob: ArrayLike) -> Array:
    """Return the rate of an exponential distribution whose upper tail beyond 1 has the
    probability ``prob``."""
    if not known_to(lambda p: (p > 0) & (p < 1), prob):
        raise ValueError(f"prob must be between 0 and 1, got {prob}")
    return -jnp.log(jnp.asarray(prob))


def _positive(value: ArrayLike, name: str) -> Array:
    if not known_to(lambda x: x > 0, value):
        raise ValueError(f"{name} must be positive, got {value}")
    return jnp.asarray(value)
