# SPDX-License-Identifier: Apache-2.0
"""Function values without the information of their own observations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_gpaug._numpyro import whole_plates
from numpyro_gpaug.errors import NotConjugateError
from numpyro_gpaug.gaussians.base import Marginals, gaussian_factors, selected
from numpyro_gpaug.guides.function_posterior import Fit, InducingPosterior
from numpyro_gpaug.model.arguments import Arguments
from numpyro_gpaug.model.latents import Structure
from numpyro_gpaug.model.marginals import with_latent_axis
from numpyro_gpaug.model.observations import check_observations
from numpyro_gpaug.model.view import ModelView


def left_out(posterior: object, view: ModelView, fit: Fit) -> dict[str, Marginals]:
    """Return marginals of every block's affine map, each value without its own factor.

    At the optimum of the bound the Gaussian of a block is its prior times Gaussian
    factors, one for each value, which follow from derivatives of the expected
    log-likelihood. The marginal of each value is divided by its factor, without the
    residual variance given the latents.

    :param posterior: the guide's posterior of function values.
    :param view: the model at rows of the fit, with their observations.
    :param fit: the fitted quantities.
    :raises NotConjugateError: for a posterior that is not a Gaussian on inducing
        values.
    """
    if not isinstance(posterior, InducingPosterior):
        raise NotConjugateError(
            "leave_one_out needs a fit of AutoSparseGP, whose function values have "
            "a Gaussian factor for each observation"
        )
    maps, chosen = view.maps(fit.factors), view.selected()
    at = posterior.marginals(view, fit)
    slopes = jax.grad(lambda at: view.expected_log_likelihood(at, "exact"))(at)
    found = {}
    for name, (mean, variance) in at.items():
        q = selected(with_latent_axis(fit.moments[name]), chosen.get(name))
        residual = maps[name].given(q.mean).variance
        precision = gaussian_factors(at[name], slopes[name]).precision
        explained = variance - residual
        kept = 1 - precision * explained
        # Not of this fit: its Gaussian holds less than the factor that is taken away.
        without = jnp.where(kept > 0, explained / kept, jnp.nan)
        moved = mean - slopes[name].mean * without
        found[name] = Marginals(moved, residual + without)
    return found


def check_left_out(
    found: object, model: Callable[..., Any], structure: Structure, arguments: Arguments
) -> None:
    """Raise if :func:`left_out` found no Gaussian.

    :param found: the predictive distribution.
    :param model: the model.
    :param structure: its structure.
    :param arguments: its arguments, observations included.
    """
    if any(np.isnan(leaf).any() for leaf in jax.tree.leaves(found)):
        check_observations(whole_plates(model), structure, arguments)
        raise ValueError(
            "the posterior contains less information than these observations. Pass "
            "the rows that it was fitted to, and fit until the bound no longer "
            "rises"
        )
