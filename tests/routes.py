# SPDX-License-Identifier: Apache-2.0
"""One classifier's fits by every route, each made once for all tests of a file."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import random
from numpyro.infer import SVI

import numpyro_gpaug as gpaug
from tests.conftest import slow
from tests.models import LENGTHSCALE, classifier, draw_data

KEY = 0
NEW = np.random.default_rng(9).uniform(-2, 2, (11, 2))  # another number of rows

latents = pytest.mark.parametrize("num_latents", [None, 3], ids=["C=1", "C=3"])
ONE = pytest.param(None, id="C=1")
SLOW_ONE = slow(None, id="C=1")
SLOW_THREE = slow(3, id="C=3")


def crossed(name, quick, others):
    """Both numbers of latents with every option; only the pairs in ``quick`` are not
    marked slow."""
    pairs = [
        pytest.param(c, o, marks=() if (c, o) in quick else pytest.mark.slow)
        for c in (None, 3)
        for o in others
    ]
    return pytest.mark.parametrize(("num_latents", name), pairs)


@cache
def data(num_latents):
    X, y, Z = draw_data()
    return X, jnp.asarray(np.asarray(y)[:, 0]) if num_latents is None else y, Z


def problem(num_latents, **options):
    """Arguments and keyword arguments of the classifier."""
    X, y, Z = data(num_latents)
    return (X, y), {"inducing": Z, "num_latents": num_latents, **options}


def conjugate(
    args, kwargs, steps=40, model=classifier, updates="auto", optim=None, **options
):
    svi = gpaug.ConjugateSVI(
        model, gpaug.AutoSparseGP(model), optim, updates, **options
    )
    return svi, rerun(svi, args, kwargs, steps)


def rerun(svi, args, kwargs, steps=40):
    """Fit with programs that are already compiled, if the shapes are those of an
    earlier fit.
    """
    return svi.run(random.key(KEY), steps, *args, progress_bar=False, **kwargs)


@cache
def fitted(num_latents, updates="auto"):
    """The closed-form fit on full data; call it with 64-bit types enabled. Its
    lengthscale is an array: fits at other values are the same program."""
    args, kwargs = problem(num_latents, lengthscale=np.asarray(LENGTHSCALE))
    return conjugate(args, kwargs, updates=updates)


@cache
def posterior_of(num_latents, updates="auto"):
    svi, result = fitted(num_latents, updates)
    return svi.posterior(result)


def stock(args, kwargs, loss, covariance, steps, rate=0.05, model=classifier):
    guide = gpaug.AutoSparseGP(model, covariance=covariance).setup(*args, **kwargs)
    schedule = optax.cosine_decay_schedule(rate, steps)
    svi = SVI(model, guide, optax.adam(schedule), loss)
    # One program: made step by step, the start would compile a hundred.
    state = jax.jit(lambda: svi.init(random.key(KEY), *args, **kwargs))()
    result = svi.run(
        random.key(KEY), steps, *args, progress_bar=False, init_state=state, **kwargs
    )
    return guide, result


def loss_at(loss, params, guide, args, kwargs, model=classifier):
    return jax.jit(
        lambda params: loss.loss(random.key(KEY), params, model, guide, *args, **kwargs)
    )(params)


def spread_params(num_latents, covariance):
    """A guide, and params away from the optimum, where the residual matters."""
    args, kwargs = problem(num_latents)
    guide = gpaug.AutoSparseGP(classifier, covariance=covariance)
    guide.setup(*args, **kwargs)
    (block,) = guide.structure.blocks
    rng = np.random.default_rng(4)
    loc = rng.normal(size=block.shape)
    if covariance == "diagonal":
        scale = rng.uniform(0.3, 1, block.shape)
        return guide, {"f.v_auto_loc": loc, "f.v_auto_scale": scale}
    factor = np.tril(rng.normal(size=(*block.shape, 6))) * 0.2 + 0.5 * np.eye(6)
    if covariance == "dense":
        return guide, {"f.v_auto_loc": loc, "f.v_auto_tril": factor}
    precision = factor @ np.swapaxes(factor, -1, -2) + np.eye(6)
    return guide, {"f.v_auto_potential": loc, "f.v_auto_precision": precision}
