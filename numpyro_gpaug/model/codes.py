# SPDX-License-Identifier: Apache-2.0
"""Checks of the codes by which data index latents: members exist, and data depend on
groups as a joint Gaussian needs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_gpaug.math.arrays import STATIC
from numpyro_gpaug.model.affine import check_groups
from numpyro_gpaug.model.joint import JointView
from numpyro_gpaug.model.program import Gather


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Codes:
    """The dependence of data on latents by codes, computed once by a program.

    :param extremes: results of :meth:`~numpyro_gpaug.model.program.Gather.extremes` for
        all gathers, concatenated into one array, since each transfer takes a while.
    :param misfit: see :attr:`~numpyro_gpaug.model.joint.JointView.misfit`.
    :param gathers: the indexed latents.
    """

    extremes: Array
    misfit: Array
    gathers: tuple[Gather, ...] = field(metadata=STATIC)

    @classmethod
    def of(cls, view: JointView) -> Self:
        """Return the codes of a model at the arguments of its view.

        :raises ValueError: for observations that are missing.
        """
        if missing := view.unobserved:
            raise ValueError(
                f"{missing} are not observed by these arguments, but were when the "
                "guide was set up. Pass the observations to init or run"
            )
        found = view.gathers()
        gathers = tuple(g._replace(indices=None, raw=()) for g, _ in found)
        misfit = jnp.asarray(view.misfit)
        parts = [jnp.ravel(x).astype(int) for _, three in found for x in three]
        extremes = jnp.concatenate([jnp.zeros(0, int), *parts])
        return cls(extremes, misfit, gathers)

    def check(self) -> None:
        """Raise for codes without a member, and for data that depend on several groups.

        :raises ValueError: naming the indexed latent.
        :raises NotConjugateError: if data depend on several groups.
        """
        numbers = iter(np.asarray(self.extremes).tolist())
        for gather in self.gathers:
            lows, highs = ([next(numbers) for _ in gather.sizes] for _ in range(2))
            if wrong := gather.bad((lows, highs, next(numbers))):
                raise ValueError(wrong)
        check_groups(self.misfit, "data")
