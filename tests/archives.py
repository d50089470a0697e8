"""Posteriors of every kind that is saved, none of them fitted, and edits of headers."""

import copy
from collections.abc import Iterator
from functools import cache
from typing import Any

import jax
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


def nested() -> gpaug.Posterior:
    fit = gpaug.NestedVI(dense, num_points=32, progress_bar=False)
    fit.run(jax.random.key(0), X, Y)
    return fit.posterior(3)


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
    "nested": (nested, dense),
}  # fmt: skip

_MISSING = object()


def edits(header: Any) -> Iterator[tuple[str, Any]]:
    """Return pairs of headers before and after an edit: every field is left out, null,
    of another type, negative, huge, nested, or has a sibling.
    """
    for place, old in _fields(header):
        beside = [{**old, "extra": 1}] if isinstance(old, dict) else [[old, old]]
        if isinstance(old, list):
            beside += [old[1:], old + [None]]
        others = (
            _MISSING, None, "x", -1, 10**30, 1.5, True, [], {}, [old], {"dict": old},
            {"array": "none"}, {"plain": [1]}, *beside,
        )  # fmt: skip
        for new in others:
            if new != old:
                found = copy.deepcopy(header)
                inside = found
                for key in place[:-1]:
                    inside = inside[key]
                if new is _MISSING:
                    del inside[place[-1]]
                else:
                    inside[place[-1]] = new
                yield f"{'.'.join(map(str, place))}: {new}", found


def _fields(tree: Any, place: tuple[Any, ...] = ()) -> Iterator[Any]:
    items = tree.items() if isinstance(tree, dict) else enumerate(tree)
    for key, value in items:
        yield (*place, key), value
        if isinstance(value, dict | list):
            yield from _fields(value, (*place, key))
