# SPDX-License-Identifier: Apache-2.0
"""Predictions of latent Gaussian models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, random
from numpyro import handlers
from numpyro.distributions import Distribution

from numpyro_gpaug._numpyro import whole_plates
from numpyro_gpaug.errors import NotConjugateError
from numpyro_gpaug.guides.base import ProcessGuide
from numpyro_gpaug.guides.function_posterior import Fit
from numpyro_gpaug.math.linalg import Moments
from numpyro_gpaug.model.inspect_joint import joint_structure_at
from numpyro_gpaug.model.joint import JointView
from numpyro_gpaug.model.latents import JOINT, JointStructure
from numpyro_gpaug.model.structure import Arguments, Block, Structure, remembered
from numpyro_gpaug.predict.predictor import (
    Fitted,
    FunctionValues,
    Predictor,
)


class JointPredictor(Predictor):
    """Predictions of a model whose Gaussian latents were fitted jointly: of any
    deterministic or Gaussian site that is affine in them, and of observations.

    :param model: the model.
    :param structure: what it is made of.
    :param guide: its guide.
    """

    structure: JointStructure

    def __init__(
        self, model: Any, structure: JointStructure, guide: ProcessGuide
    ) -> None:
        super().__init__(model, structure, guide)
        self._checks: dict[Any, Any] = {}
        self._sites: dict[Any, Any] = {}

    def check(
        self, arguments: Arguments, fitted: Fitted, marks: dict[str, Array]
    ) -> None:
        """Raises for groups that the model has not, of which JAX would take the last
        for each, and for values of a latent that are not those of the fit.

        :param arguments: of the model.
        :param fitted: what was fitted.
        :param marks: what tells the factors of the fit, from :meth:`sites`.
        """

        def checks(arrays: Any, fitted: Fitted) -> Any:
            view = self._view(arrays, arguments.static, fitted)
            gathers = view.gathers()
            indexed[:] = [gather for gather, _ in gathers]
            return [extremes for _, extremes in gathers], view.marks()

        indexed: list[Any] = []
        program = remembered(
            self._checks, arguments.shapes, lambda: (jax.jit(checks), indexed)
        )
        reached, here = program[0](arguments.arrays, fitted)
        for gather, extremes in zip(program[1], reached, strict=True):
            if wrong := gather.bad(extremes):
                raise ValueError(
                    f"{wrong}: a group that was not seen needs a plate of more "
                    "members, whose size is a keyword argument of the model, say"
                )
        for name, mark in here.items():
            if not np.allclose(mark, marks[name], rtol=1e-3, atol=1e-5):
                raise NotConjugateError(
                    f"the covariance of {name!r} is not that of the fit, which says "
                    "nothing of its values elsewhere: gpaug.GaussianProcess("
                    f'"{name}", kernel, inducing)(X) is predicted at any X'
                )

    def block(self, site: str | None) -> Block:
        """The site to predict by name: a process, a deterministic or a Gaussian one;
        for ``None`` the only observed site, in closed form, by its parameter."""
        return Block(site or self.observed(None).name, "", (), None)

    def sites(self, arguments: Arguments, fitted: Fitted) -> Any:
        """Means of all Gaussian sites and rows of their spread, at the arguments of
        the fit; and what tells their factors.

        :param arguments: of the model.
        :param fitted: what was fitted.
        """

        def found(arrays: Any, fitted: Fitted) -> Any:
            view = self._view(arrays, arguments.static, fitted)
            q = _flat(self._moments(fitted.own)[JOINT])
            sites = {s.name: view.spread(s.name, q)[:2] for s in view.structure.sites}
            return sites, view.marks()

        program = remembered(self._sites, arguments.shapes, lambda: jax.jit(found))
        return program(arguments.arrays, fitted)

    def _view(self, arrays: Any, static: Any, fitted: Fitted) -> Any:
        names = {site.name for site in self.structure.observed}

        def unobserved(message: dict[str, Any]) -> Array | None:
            drawn = message["type"] == "sample" and not message["is_observed"]
            if drawn and message["name"] in names:
                return message["fn"].support.feasible_like(
                    jnp.zeros(message["fn"].shape())
                )
            return None

        whole = whole_plates(self.model)
        model = handlers.substitute(whole, substitute_fn=unobserved)
        arguments = Arguments(arrays, static)
        here: Any = remembered(
            self._structures, arguments.shapes,
            lambda: joint_structure_at(model, self.structure, arguments),
        )  # fmt: skip
        return JointView(here, model, arguments, fitted.values, random.key(0))

    def _extended(self, view: JointView, fit: Fit) -> Moments:
        """Moments of the latents that the model has at these arguments: new members of
        a plate are at their prior."""
        mean, whitener = _flat(fit.moments[JOINT])
        places = self.structure.places(view.structure)
        known = places >= 0
        columns = jnp.where(known, whitener[:, places], 0)
        fresh = jnp.asarray((~known).nonzero()[0])
        own = jax.nn.one_hot(fresh, len(places), dtype=mean.dtype)
        return Moments(
            jnp.where(known, mean[places], 0), jnp.concatenate([columns, own])
        )

    def _f(self, view: Any, fit: Fit, site: str) -> FunctionValues:
        mean, rows, residual = view.spread(site, self._extended(view, fit))
        return FunctionValues(mean, jnp.square(rows).sum(0) + residual)

    def _joint(self, view: Any, fit: Fit, site: str) -> FunctionValues:
        mean, rows = self._without_residual(view, fit, site)
        flat = rows.reshape(len(rows), -1)
        return FunctionValues(mean, flat.T @ flat)

    def _draws(
        self, view: Any, fit: Fit, site: str, key: Array, num: int
    ) -> tuple[Array, Array]:
        mean, rows = self._without_residual(view, fit, site)
        noise = random.normal(key, (num, len(rows)), mean.dtype)
        return mean + jnp.tensordot(noise, rows, 1), jnp.array(True)

    def _without_residual(self, view: Any, fit: Fit, site: str) -> tuple[Array, Array]:
        if view.structure.functions:
            raise NotConjugateError(
                "joint draws and covariances of a model with sparse processes are not "
                "available from AutoLatentGaussian: use AutoSparseGP, or predict_f "
                "without full_covariance"
            )
        return view.spread(site, self._extended(view, fit))[:2]

    def _predictive(
        self, view: Any, fit: Fit, site: str
    ) -> tuple[Distribution, dict[str, Any]]:
        observed = self.observed(site)
        q = self._extended(view, fit)
        return view.predictive(observed, q), view.message(site)


def _flat(q: Moments) -> Moments:
    return Moments(q.mean[0], q.whitener[0])


def predictor_for(
    guide: ProcessGuide, model: Callable[..., Any], structure: Structure
) -> Predictor:
    """The predictor of a model and its guide, made once and kept on the guide.

    :param structure: of the model, at any arguments.
    """
    structure = structure.sizeless()
    found = guide.predictors.get(id(model))
    if found is None or found.structure != structure:
        # It holds the model, whose id is thus not given away.
        joint = isinstance(structure, JointStructure)
        kind: Any = JointPredictor if joint else Predictor
        found = guide.predictors[id(model)] = kind(model, structure, guide)
    return found
