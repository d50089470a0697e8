# SPDX-License-Identifier: Apache-2.0
"""The base class of samplers of all Gaussian latents of a model, jointly."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, random

from numpyro_gpaug.errors import NotConjugateError
from numpyro_gpaug.infer.mcmc.gaussian_kernel import GaussianKernel
from numpyro_gpaug.infer.mcmc.groups import Values
from numpyro_gpaug.model.arguments import Arguments
from numpyro_gpaug.model.costs import WHITE
from numpyro_gpaug.model.inspect_joint import inspect_joint
from numpyro_gpaug.model.joint import JointView
from numpyro_gpaug.model.latents import JointStructure
from numpyro_gpaug.model.structure import run_model
from numpyro_gpaug.model.whitened import white_numbers, whitened


class JointKernel(GaussianKernel):
    """A kernel for the joint Gaussian of ``AutoLatentGaussian``.

    :param model: a NumPyro model.
    """

    _kinds, _otherwise = "Gaussian latents", "; MCMC(NUTS(model)) samples any model"

    @property
    def structure(self) -> JointStructure:
        found = super().structure
        assert isinstance(found, JointStructure)
        return found

    def _structure_of(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> JointStructure:
        found = inspect_joint(self._model, WHITE, *args, **kwargs)
        if found.held and not found.sites:
            raise NotConjugateError(
                f"{self._name} samples {self._kinds}, and none can be part of the "
                f"joint Gaussian: {_reasons(found)}{self._otherwise}"
            )
        return found

    def _seen(self, structure: Any, arguments: Arguments) -> JointView:
        return JointView(structure, self._model, arguments, {}, random.key(0))

    def _refuse_broken(
        self, state: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        for site in self.structure.sites:
            value = state.z[site.name]
            if not isinstance(value, jax.core.Tracer) and not np.isfinite(value).all():
                raise FloatingPointError(
                    f"the first draw of {site.name!r} is not finite. Is the prior "
                    "very wide, or are columns very large? Standardise them"
                )

    def _white_of(self, values: Values, view: JointView) -> Array:
        """Return the standard normal numbers (1, size) for these values of the
        sites."""
        structure = self.structure
        here = {s.name: values[s.name] for s in structure.sites}
        trace = run_model(self._model, view.arguments, random.key(0), here)
        z = structure.joined(white_numbers(trace, tuple(here)))
        return z.astype(structure.dtype)[None]

    def _started(self, white: Array, values: Values, view: JointView) -> Array:
        """Return the standard normal numbers (1, size) to start from.

        :param white: drawn numbers.
        :param values: values of sites that are not to be drawn, by site.
        """
        names = [s.name for s in self.structure.sites]
        given = {k: values[k] for k in names if k in values}
        if not given:
            return white
        return self._white_of({**self._sites(white, view), **given}, view)

    def _sites(self, white: Array, view: JointView) -> Values:
        """Return values of Gaussian and deterministic sites.

        :param white: the standard normal numbers, (1, size).
        """
        model = whitened(self._model, self.structure.split(white[0]))
        trace = run_model(model, view.arguments, random.key(0), {})
        names = {s.name for s in self.structure.sites}
        return {
            name: jnp.asarray(site["value"], jnp.result_type(site["value"]))
            for name, site in trace.items()
            if site["type"] == "deterministic" or name in names
        }


def _reasons(structure: JointStructure) -> str:
    """Return the reasons why Gaussian sites are not in the joint Gaussian."""
    return "; ".join(f"{k!r}: {why}" for k, why in structure.held)
