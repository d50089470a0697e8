# SPDX-License-Identifier: Apache-2.0
"""The contract of an augmented likelihood, and the registry.

Given auxiliary variables, an augmented likelihood is Gaussian in its latents:
``log p(y, aux | f) = const(y, aux) + potential . f - precision . f^2 / 2``. Variational
inference needs only one function, :meth:`Augmentation.bound`, because its derivatives
give the Gaussian factors: ``precision = -2 d/dv``, ``potential = d/dm + precision m``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import jax.numpy as jnp
from jax import Array, random
from numpyro.distributions import Distribution

Parameters = dict[str, Array]

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


_REGISTRY: dict[type[Distribution], Augmentation] = {}


def register_augmentation(cls: type[Distribution], augmentation: Augmentation) -> None:
    """Register an augmentation for a distribution class and its subclasses.

    Check it with :func:`numpyro_gpaug.testing.check_augmentation` first.

    :param cls: the NumPyro distribution class of the observation.
    :param augmentation: the augmentation.
    """
    _REGISTRY[cls] = augmentation


def lookup_augmentation(cls: type[Distribution]) -> Augmentation | None:
    """Return the registered augmentation of a class or its nearest base, or
    ``None``."""
    return next((_REGISTRY[base] for base in cls.__mro__ if base in _REGISTRY), None)
