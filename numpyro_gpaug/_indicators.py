# SPDX-License-Identifier: Apache-2.0
"""Probabilities of many classes by a regression on their indicators, for which all
classes share one factorisation."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import Array
from numpyro import handlers
from numpyro.infer.initialization import init_to_mean
from numpyro.infer.util import potential_energy

from numpyro_gpaug._numpyro import one_thread
from numpyro_gpaug.math import linalg
from numpyro_gpaug.math.threads import threads_for

__all__ = ["Regression", "regress"]

# The largest number of rows by which hyperparameters are learnt, and of evaluations.
LEARN, STEPS = 1000, 50
# The largest number of inducing inputs, and of inducing inputs times rows; but at least
# FEWEST.
MOST, CELLS, FEWEST = 2000, 2e7, 100
# The least noise variance, relative to that of the process. With less, rounding of
# float32 would tell the label of a row that is left out.
LEAST = 1e-3

Build = Callable[[int], Any]


class Regression(NamedTuple):
    """Probabilities of classes; see :func:`regress`.

    :param build: returns the kernel, given the number of columns.
    :param values: the hyperparameters.
    :param Z: inducing inputs, (M, D).
    :param weights: of the kernel functions at these, (M, C).
    :param shares: of the classes among the labels, (C,).
    :param left_out: log probabilities of the classes of each row, given all other rows,
        (N, C).
    :param judges: the rows by which no hyperparameter was learnt: only their labels
        show how good ``left_out`` is.
    """

    build: Build
    values: dict[str, Any]
    Z: np.ndarray
    weights: Array
    shares: np.ndarray
    left_out: np.ndarray
    judges: np.ndarray

    @property
    def kernel_values(self) -> dict[str, Any]:
        """The hyperparameters of the kernel."""
        own = ("noise", "power", "bend")
        return {k: v for k, v in self.values.items() if k not in own}

    def log_probs(self, X: Any) -> np.ndarray:
        """Return log probabilities of the classes, (n, C), at inputs (n, D)."""
        return np.asarray(_predicted(*self[1:5], X, self.build), float)


def regress(build: Build, X: Any, codes: np.ndarray, seed: int) -> Regression:
    """Regress the indicators of classes, less their shares, on inputs, by a Gaussian
    process for each class with one kernel and noise for all.

    Unlike a softmax of processes, this has one covariance for all classes. Its mean
    becomes a probability by a link that is learnt. Hyperparameters maximise the
    probability of each label given all others, which needs no more than the inverse
    covariance (Rasmussen and Williams, 2006, section 5.4.2), plus their log-prior. The
    marginal likelihood assumes normal noise, which labels do not have. Where classes
    separate, this overfits many lengthscales: the labels that chose them look certain
    when they are left out. Only half of the rows, at most 1000, are therefore used for
    it, and the others judge. Up to 2000 rows the process is exact. More rows have as
    many inducing inputs, or, beyond 10,000 rows, fewer.

    :param build: returns the kernel, given the number of columns; its sites are
        positive.
    :param X: inputs, (N, D).
    :param codes: classes 0 .. C - 1, (N,), each of which there is.
    :param seed: of the choice of rows.
    """
    order = np.random.default_rng(seed).permutation(len(X))
    rows, judges = np.split(order, [min(LEARN, len(X) // 2)])
    size = int(np.clip(CELLS / len(X), FEWEST, MOST))
    shares, Z = (np.bincount(codes) / len(codes)).astype(X.dtype), X[order[:size]]
    with threads_for(1):
        values = _learnt(build, X[rows], X[rows], codes[rows], shares)
        weights, left_out = _fitted(values, Z, X, codes, shares, build)
    left_out = np.asarray(left_out, float)
    return Regression(build, values, Z, weights, shares, left_out, judges)


def model(Z: Array, X: Array, codes: Array, shares: Array, build: Build) -> None:
    """The regression; ``y`` are labels given all others."""
    own, noise = build(X.shape[1]), numpyro.sample("noise", dist.LogNormal(0, 2))
    noise = noise + LEAST * own(Z).mean()
    jitter = linalg.default_jitter(len(Z), Z.dtype)
    factor = linalg.cholesky(linalg.with_jitter(own(Z, Z), jitter))
    across = linalg.solve_lower(factor, own(Z, X))
    posterior = linalg.cholesky(across @ across.T + noise * jnp.eye(len(Z)))
    basis = linalg.solve_lower(posterior, across)
    observed = jax.nn.one_hot(codes, len(shares), dtype=X.dtype) - shares
    found = basis @ observed
    leverage = jnp.square(basis).sum(0)[:, None]
    without = observed - (observed - basis.T @ found) / (1 - leverage)
    logits = _log_probs(without, shares)
    numpyro.sample("y", dist.Categorical(logits=logits), obs=codes)
    numpyro.deterministic("left_out", logits)
    found = linalg.solve_lower(posterior, found, transpose=True)
    numpyro.deterministic("weights", linalg.solve_lower(factor, found, transpose=True))


def _log_probs(mean: Array, shares: Array) -> Array:
    """Return log probabilities at means of indicators less shares: a power of what
    these are above zero, smoothly. Noisy labels have probabilities near the mean; where
    classes separate they depend on its differences, as in a softmax."""
    power = numpyro.sample("power", dist.LogNormal(0, 1))
    bend = numpyro.sample("bend", dist.LogNormal(jnp.log(5.0), 1))
    above = jax.nn.softplus(jnp.maximum(bend * (mean + shares), -80))
    return jax.nn.log_softmax(power * jnp.log(above))


def _learnt(build: Build, *given: Any) -> dict[str, Any]:
    """Return the hyperparameters.

    :param given: further arguments of :func:`model`.
    """
    from scipy import optimize  # takes a fifth of a second to import

    leaves, tree = jax.tree.flatten(jax.device_get(_start(*given, build)))
    ends = np.cumsum([x.size for x in leaves])

    def split(point: np.ndarray) -> Any:
        parts = zip(np.split(point, ends[:-1]), leaves, strict=True)
        shaped = [p.reshape(x.shape).astype(x.dtype) for p, x in parts]
        return jax.tree.unflatten(tree, shaped)

    def joined(values: Any) -> np.ndarray:
        return np.concatenate([np.ravel(x) for x in jax.tree.leaves(values)], None)

    def evaluate(point: np.ndarray) -> tuple[float, np.ndarray]:
        value, slopes = _potential(split(point), *given, build)
        if not np.isfinite(value):  # a step that is too long for the precision
            return 1e10, np.zeros_like(point)
        return float(value), joined(slopes).astype(float)

    found = optimize.minimize(
        evaluate, joined(leaves).astype(float), jac=True, method="L-BFGS-B",
        options={"maxfun": STEPS, "ftol": 1e-6},
    )  # fmt: skip
    return jax.tree.map(np.exp, split(found.x))


@one_thread
@partial(jax.jit, static_argnames="build")
def _start(Z: Any, X: Any, codes: Any, shares: Any, build: Build) -> Any:
    """Return logarithms of hyperparameters at the means of their priors."""
    start = handlers.substitute(handlers.seed(model, 0), substitute_fn=init_to_mean)
    sites = handlers.trace(start).get_trace(Z, X, codes, shares, build)
    latent = (k for k, s in sites.items() if s["type"] == "sample" and k != "y")
    return {k: jnp.log(sites[k]["value"]) for k in latent}


@one_thread
@partial(jax.jit, static_argnames="build")
def _potential(
    point: Any, Z: Any, X: Any, codes: Any, shares: Any, build: Build
) -> Any:
    """Return the negative log-density at logarithms of hyperparameters, and its
    gradient."""
    given = Z, X, codes, shares, build
    return jax.value_and_grad(lambda at: potential_energy(model, given, {}, at))(point)


@one_thread
@partial(jax.jit, static_argnames="build")
def _fitted(
    values: Any, Z: Any, X: Any, codes: Any, shares: Any, build: Build
) -> tuple[Array, Array]:
    """Return weights, and log probabilities of labels that are left out."""
    fixed = handlers.substitute(model, data=values)
    sites = handlers.trace(fixed).get_trace(Z, X, codes, shares, build)
    return sites["weights"]["value"], sites["left_out"]["value"]


@one_thread
@partial(jax.jit, static_argnames="build")
def _predicted(
    values: Any, Z: Any, weights: Any, shares: Any, X: Any, build: Build
) -> Array:
    """Return log probabilities of classes at new inputs."""
    with handlers.substitute(data=values):
        return _log_probs(build(X.shape[1])(X, Z) @ weights, shares)
