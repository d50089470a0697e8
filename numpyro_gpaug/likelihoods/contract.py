# SPDX-License-Identifier: Apache-2.0
r"""The contract of a likelihood's module, and its registration in one call.

Given auxiliary variables, an augmented likelihood is Gaussian in its latents:
``log p(y, aux | f) = const(y, aux) + potential . f - precision . f^2 / 2``. Variational
inference needs only one function, :meth:`Augmentation.bound`, because its derivatives
give the Gaussian factors: ``precision = -2 d/dv``, ``potential = d/dm + precision m``.

If the bound depends on a parameter as :math:`-n \log \theta - S \theta^{-p}` (noise
scales, rates), n is known and S follows from the derivative, so the maximiser is
:math:`\theta (1 + \theta g / n)^{1/p}` with g the derivative of the bound, exact or
augmented. In the heights of a piecewise link the bound is quadratic, or a sum of
``a log g + b log(1 - g)`` with known ``a + b``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple

import jax.numpy as jnp
from jax import Array, random
from numpyro.distributions import Distribution

from .expectations import Parameters, register_expectation

# In the order of the draws: a function receives the auxiliaries that were drawn before.
Conditionals = dict[str, Distribution | Callable[[dict[str, Array]], Distribution]]


class Augmentation(ABC):
    """One augmented likelihood; subclass it and call :func:`register_augmentation`.

    Arrays of latents are dicts from the parameter names in ``latents`` to arrays shaped
    like those parameters.

    :cvar latents: names of the distribution's parameters that depend on latents.
    :cvar latent_axis: the event axis of those parameters that runs over the latents of
        one observation (-1 for a vector of class logits), or ``None`` if each element
        of the batch has one latent per parameter.
    """

    latents: ClassVar[tuple[str, ...]]
    latent_axis: ClassVar[int | None] = None

    @abstractmethod
    def bound(
        self, d: Any, y: Array, means: Parameters, variances: Parameters
    ) -> Array:
        """Return a lower bound of ``E log p(y | f)``, with the auxiliaries at their
        optimum.

        :param d: the likelihood; only its other parameters are read, and the bound is
            differentiable in them.
        :param y: observations.
        :param means: means of the latents.
        :param variances: variances of the latents, >= 0.
        :return: array of the batch shape.
        """

    @abstractmethod
    def conditional(self, d: Any, y: Array, f: Parameters) -> Conditionals:
        """Return full conditionals of the auxiliaries given the latents, with exact
        samplers.

        Auxiliaries are parametrised so that they enter the natural parameters linearly
        (a precision, for example, not a variance).

        :param d: the likelihood.
        :param y: observations.
        :param f: values of the latents.
        :return: distributions by auxiliary name, in the order of the draws. If one
            depends on earlier auxiliaries, it is a function of the dict of earlier
            draws. Empty if there are no auxiliaries.
        """

    @abstractmethod
    def natural(
        self, d: Any, y: Array, aux: dict[str, Array], f: Parameters
    ) -> dict[str, tuple[Array, Array]]:
        """Return potential and precision of each latent given sampled auxiliaries.

        :param d: the likelihood.
        :param y: observations.
        :param aux: auxiliaries by name; not used for a latent that :meth:`gibbs_blocks`
            draws before them.
        :param f: values of the latents; the result for a latent does not depend on its
            own value.
        :return: ``(potential, precision)`` per name in ``latents``.
        """

    def gibbs_blocks(self, d: Any) -> tuple[tuple[str, ...], ...]:
        """Return the order of Gibbs draws.

        :param d: the likelihood.
        :return: blocks of names, ``"aux"`` for all auxiliaries. A latent before
            ``"aux"`` is drawn with the auxiliaries integrated out, and a latent after
            it given the auxiliaries. The default draws all auxiliaries, then all
            latents.
        """
        return (("aux",), tuple(self.latents))


class ScaleMixture(Augmentation):
    """A normal likelihood given its precision, the auxiliary."""

    latents = ("loc",)

    def natural(self, d, y, aux, f: Parameters) -> dict[str, tuple[Array, Array]]:
        return {"loc": (y * aux["precision"], aux["precision"])}


def label_sign(y: Array, like: Array) -> Array:
    """Return labels 0/1 as -1/+1, in the dtype of ``like``."""
    return 2 * jnp.asarray(y, like.dtype) - 1


def draw_auxiliaries(key: Array, conditionals: Conditionals) -> dict[str, Array]:
    """Draw the auxiliaries one after the other.

    :param key: random key.
    :param conditionals: from :meth:`Augmentation.conditional`.
    """
    aux: dict[str, Array] = {}
    for i, (name, q) in enumerate(conditionals.items()):
        distribution = q if isinstance(q, Distribution) else q(aux)
        aux[name] = distribution.sample(random.fold_in(key, i))
    return aux


def auxiliary_means(conditionals: Conditionals) -> dict[str, Array]:
    """Return means of the auxiliaries, each given the means of earlier ones. The
    natural parameters are linear in the auxiliaries, so their averages are the values
    at these means.

    :param conditionals: from :meth:`Augmentation.conditional`.
    """
    means: dict[str, Array] = {}
    for name, q in conditionals.items():
        means[name] = (q if isinstance(q, Distribution) else q(means)).mean
    return means


_AUGMENTATIONS: dict[type[Distribution], Augmentation] = {}


def register_augmentation(cls: type[Distribution], augmentation: Augmentation) -> None:
    """Register an augmentation for a distribution class and its subclasses.

    Check it with :func:`numpyro_gpaug.testing.check_augmentation` first.

    :param cls: the NumPyro distribution class of the observation.
    :param augmentation: the augmentation.
    """
    _AUGMENTATIONS[cls] = augmentation


def lookup_augmentation(cls: type[Distribution]) -> Augmentation | None:
    """Return the registered augmentation of a class or its nearest base, or
    ``None``."""
    known = (_AUGMENTATIONS[b] for b in cls.__mro__ if b in _AUGMENTATIONS)
    return next(known, None)


class MStep(NamedTuple):
    """A closed-form maximiser in one parameter of a likelihood.

    :param statistic: a function of ``(d, y, means, variances)`` that returns the part
        of the sufficient statistics that needs no derivative, per observation, with a
        trailing axis for a vector of parameters; it is summed over the data.
    :param maximiser: a function of ``(value, slope, statistic)`` that returns the new
        value; ``slope`` is the derivative of the bound with respect to the parameter.
    """

    statistic: Callable[[Any, Array, Parameters, Parameters], Array]
    maximiser: Callable[[Array, Array, Array], Array]


_M_STEPS: dict[tuple[type[Distribution], str], MStep] = {}


def lookup_m_step(cls: type[Distribution], parameter: str) -> MStep | None:
    """Return the maximiser registered for a class or its nearest base, or ``None``."""
    keys = ((base, parameter) for base in cls.__mro__)
    return next((_M_STEPS[key] for key in keys if key in _M_STEPS), None)


def count_data(d: Any, y: Array, means: Parameters, variances: Parameters) -> Array:
    """Return the statistic n: one per observation.

    :param d: the likelihood.
    :param y: observations.
    :param means: means of the latents.
    :param variances: their variances.
    """
    like = next(iter(means.values()))
    return jnp.ones(jnp.broadcast_shapes(jnp.shape(y), d.batch_shape), like.dtype)


def moments(
    latents: tuple[str, ...], means: Parameters, variances: Parameters
) -> tuple[Array, ...]:
    """Return mean and variance of the first latent, then of the next one."""
    return tuple(x[name] for name in latents for x in (means, variances))


def register(
    cls: type[Distribution],
    latents: tuple[str, ...],
    expected_log_prob: Callable[..., Array],
    predictive: Callable[..., Distribution],
    augmentation: Augmentation | None = None,
    *,
    m_steps: Mapping[str, MStep] = {},
    **known: Any,
) -> None:
    """Register a likelihood: see :func:`register_expectation`.

    :param cls: the distribution of the observation.
    :param latents: its parameters that depend on latents.
    :param expected_log_prob: the expected log-density, a function of ``d``, ``y``, and
        the mean and the variance of each latent.
    :param predictive: the predictive distribution, a function of the same without
        ``y``.
    :param augmentation: an augmentation for :func:`register_augmentation`, if any.
    :param m_steps: closed-form maximisers, by parameter.
    :param known: ``log_concave`` and ``competing`` of :func:`register_expectation`.
    """

    def of_moments(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *given: function(*given[:-2], *moments(latents, *given[-2:]))

    both = of_moments(expected_log_prob), of_moments(predictive)
    register_expectation(cls, latents, *both, **known)
    if augmentation is not None:
        register_augmentation(cls, augmentation)
    _M_STEPS.update({(cls, parameter): step for parameter, step in m_steps.items()})


def power(p: int, statistic: Callable[..., Array] = count_data) -> MStep:
    """Describe a parameter whose bound is ``-n log(value) - S value^-p``.

    :param p: the power.
    :param statistic: n, by default the number of data.
    """
    return MStep(
        statistic, lambda value, slope, n: value * (1 + value * slope / n) ** (1 / p)
    )
