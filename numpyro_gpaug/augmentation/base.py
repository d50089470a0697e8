# SPDX-License-Identifier: Apache-2.0
"""The contract of an augmented likelihood, and the registry.

Given auxiliary variables, an augmented likelihood is Gaussian in its latents:
``log p(y, aux | f) = const(y, aux) + potential . f - precision . f^2 / 2``. For
variational inference only one function is needed, :meth:`Augmentation.bound`, since the
Gaussian sites are its derivatives: ``precision = -2 d/dv``,
``potential = d/dm + precision m``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

from jax import Array
from numpyro.distributions import Distribution

Parameters = dict[str, Array]


class Augmentation(ABC):
    """One augmented likelihood; subclass it and call :func:`register_augmentation`.

    Arrays of latents are dicts from the parameter names in ``latents`` to arrays shaped
    like those parameters.

    :cvar latents: names of the distribution's parameters that carry a latent.
    :cvar latent_axis: the event axis of those parameters that runs over latents of one
        datum (-1 for a vector of class logits), ``None`` when each element of the batch
        has one latent per parameter.
    """

    latents: ClassVar[tuple[str, ...]]
    latent_axis: ClassVar[int | None] = None

    @abstractmethod
    def bound(
        self, d: Any, y: Array, means: Parameters, variances: Parameters
    ) -> Array:
        """Lower bound of ``E log p(y | f)``, the auxiliaries at their optimum.

        :param d: the likelihood; only its other parameters are read, and the bound is
            differentiable in them.
        :param y: observations.
        :param means: means of the latents.
        :param variances: variances of the latents, >= 0.
        :return: array of the batch shape.
        """

    @abstractmethod
    def conditional(self, d: Any, y: Array, f: Parameters) -> dict[str, Distribution]:
        """Full conditionals of the auxiliaries given the latents, with exact samplers.

        :param d: the likelihood.
        :param y: observations.
        :param f: values of the latents.
        :return: distributions by auxiliary name; empty if there are none.
        """

    @abstractmethod
    def natural(
        self, d: Any, y: Array, aux: dict[str, Array]
    ) -> dict[str, tuple[Array, Array]]:
        """Potential and precision of each latent given sampled auxiliaries.

        :param d: the likelihood.
        :param y: observations.
        :param aux: auxiliaries by name.
        :return: ``(potential, precision)`` per name in ``latents``.
        """

    def gibbs_blocks(self, d: Any) -> tuple[tuple[str, ...], ...]:
        """The order of Gibbs draws; what a block does not name is integrated out in it.

        :param d: the likelihood.
        :return: blocks of names; the default draws all auxiliaries (``"aux"``), then
            all latents.
        """
        return (("aux",), tuple(self.latents))


_REGISTRY: dict[type[Distribution], Augmentation] = {}


def register_augmentation(cls: type[Distribution], augmentation: Augmentation) -> None:
    """Registers an augmentation for a distribution class and its subclasses.

    Check it with :func:`numpyro_gpaug.testing.check_augmentation` first.

    :param cls: the NumPyro distribution class of the observation.
    :param augmentation: the augmentation.
    """
    _REGISTRY[cls] = augmentation


def lookup_augmentation(cls: type[Distribution]) -> Augmentation | None:
    """The registered augmentation of a class or its nearest base, or ``None``."""
    return next((_REGISTRY[base] for base in cls.__mro__ if base in _REGISTRY), None)
