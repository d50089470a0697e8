# SPDX-License-Identifier: Apache-2.0
"""Small models and data for the tests of the closed-form updates and the posterior."""

from __future__ import annotations

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist

import numpyro_gpaug as gpaug


def classifier(X, y=None, *, inducing, lengthscale=1.0, variance=1.0, jitter=None):
    """A binary classifier with fixed hyperparameters."""
    kernel = gpaug.kernels.SquaredExponential(lengthscale, variance)
    gp = gpaug.GaussianProcess("f", kernel, inducing=inducing, jitter=jitter)
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=gp(X)), obs=y)


def learnt(X, y=None, *, inducing, lengthscale=1.0, variance=1.0, batch_size=None):
    """The same with its hyperparameters as params, and minibatches."""
    positive = dist.constraints.positive
    lengthscale = numpyro.param("lengthscale", lengthscale, constraint=positive)
    variance = numpyro.param("variance", variance, constraint=positive)
    kernel = gpaug.kernels.SquaredExponential(lengthscale, variance)
    gp = gpaug.GaussianProcess("f", kernel, inducing=inducing)
    with numpyro.plate("data", X.shape[0], subsample_size=batch_size) as index:
        y = None if y is None else y[index]
        numpyro.sample("y", dist.Bernoulli(logits=gp(X[index])), obs=y)


def regression(X, y=None, *, inducing, scale=0.5):
    """Conjugate as it is: the exact posterior is known."""
    gp = gpaug.GaussianProcess("f", gpaug.kernels.Matern52(), inducing=inducing)
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(gp(X), scale), obs=y)


def unfitted(svi, *args, **kwargs):
    """The posterior before the first step, where any will do: the steps of a run are
    its largest program."""
    return moved(svi, 0, *args, **kwargs)


def moved(svi, by, *args, **kwargs):
    """The same with other potentials, so that means are not zero, nor all alike."""
    params = svi.get_params(svi.init(jax.random.key(0), *args, **kwargs))
    for name in [k for k in params if by and k.endswith("_auto_potential")]:
        old = np.asarray(params[name])
        waves = np.cos(np.arange(old.size)).reshape(old.shape)
        params[name] = old + (by * waves).astype(old.dtype)
    return svi.posterior(params, *args, **kwargs)


def toy(num: int = 40, dim: int = 2, seed: int = 0, dtype=None):
    """Inputs and noisy labels of a smooth function, as NumPy arrays: a slice of one is
    no program to compile."""
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(num, dim))
    y = (np.sin(2 * X[:, 0]) + 0.5 * rng.normal(size=num) > 0).astype(int)
    dtype = dtype or jax.dtypes.canonicalize_dtype(float)
    return X.astype(dtype), y.astype(jax.dtypes.canonicalize_dtype(int))
