"""Posteriors of every kind that is saved, none of them fitted."""

from functools import cache
from typing import Any

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer.autoguide import AutoNormal

import numpyro_gpaug as gpaug
from tests.problems import unfitted

rng = np.random.default_rng(0)
X, Y = rng.normal(size=(12, 2)).astype(np.float32), np.arange(12) % 2
STEPS, COUNTS = np.arange(100), rng.poisson(2, 100)


def sparse(X, y=None, *, inducing):
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0, 1))
    gp = gpaug.GaussianProcess("f", gpaug.kernels.Matern52(lengthscale), inducing)
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=gp(X)), obs=y)


def dense(X, y=None):
    b = numpyro.sample("b", dist.Normal(0, 2))
    tau = numpyro.sample("tau", dist.HalfNormal(1))
    with numpyro.plate("groups", 3):
        a = numpyro.sample("a", dist.Normal(0, tau))
    group = (X[:, 1] > 0).astype(int)
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=b * X[:, 0] + a[group]), obs=y)


def groups(group, y=None, *, num=50):
    mean = numpyro.sample("mean", dist.Normal(0, 1))
    with numpyro.plate("groups", num):
        a = numpyro.sample("a", dist.Normal(mean, 1))
    with numpyro.plate("data", len(group)):
        numpyro.sample("y", dist.Poisson(jnp.exp(a[group])), obs=y)


def walk(step, y=None, *, num=100):
    scale = numpyro.sample("scale", dist.HalfNormal(1))
    w = numpyro.sample("w", dist.GaussianRandomWalk(scale, num_steps=num))
    with numpyro.plate("data", len(step)):
        numpyro.sample("y", dist.Poisson(jnp.exp(w[step])), obs=y)


def at_start(guide, *args: Any, **kwargs: Any) -> gpaug.Posterior:
    """The posterior of a guide's initial params."""
    return unfitted(gpaug.ConjugateSVI(guide.model, guide, None), *args, **kwargs)


# By name: a function that makes a posterior, and the model that loads it.
KINDS = {
    "sparse": (
        lambda: at_start(gpaug.AutoSparseGP(sparse), X, Y, inducing=X[:4]), sparse
    ),
    "mixture": (
        lambda: at_start(
            gpaug.AutoSparseGP(sparse, other=AutoNormal), X, Y, inducing=X[:4]
        ), sparse
    ),
    "dense": (cache(lambda: at_start(gpaug.AutoLatentGaussian(dense), X, Y)), dense),
    "groups": (
        lambda: at_start(gpaug.AutoLatentGaussian(groups), STEPS % 50, COUNTS), groups
    ),
    "chain": (lambda: at_start(gpaug.AutoLatentGaussian(walk), STEPS, COUNTS), walk),
}  # fmt: skip
