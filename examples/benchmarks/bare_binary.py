# SPDX-License-Identifier: Apache-2.0
"""The arithmetic of ``binary.py`` as one bare function of JAX, to measure against.

Closed-form updates of the exact bound with step 1, for this kernel and likelihood, and
nothing else: no control of steps, no checks. What it takes to compile is what JAX
takes, and what a package takes beyond it is its own. Learnt hyperparameters move by one
gradient step of Adam after each update.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from common import Clock, Fit, Prediction, Problem, versions, worker_main

LEARNING_RATE = 0.05


def bare(problem: Problem, clock: Clock) -> tuple[Fit, dict[str, Any]]:
    """Natural gradients of step 1 by fifteen-node Gauss-Hermite quadrature."""
    import jax
    import jax.numpy as jnp
    import optax
    from jax import lax

    notes = {"imports": clock.now(), "max_steps": 30, "versions": versions("jax")}
    dtype = problem.X.dtype
    nodes, weights = np.polynomial.hermite_e.hermegauss(15)
    nodes, weights = (np.asarray(a, dtype)[:, None] for a in (nodes, weights))
    weights = weights / weights.sum()
    jitter = 2e-5 if dtype == np.float32 else 1e-10
    start = problem.lengthscale, problem.variance
    optim = optax.adam(LEARNING_RATE)

    def gram(a: Any, b: Any, lengthscale: Any, variance: Any) -> Any:
        squares = jnp.square(a).sum(1)[:, None] + jnp.square(b).sum(1) - 2 * a @ b.T
        return variance * jnp.exp(-0.5 * jnp.maximum(squares, 0) / lengthscale**2)

    def solved(factor: Any, rhs: Any) -> Any:
        return lax.linalg.triangular_solve(factor, rhs, left_side=True, lower=True)

    def projected(Z: Any, X: Any, hyper: Any) -> Any:
        kernel = gram(Z, Z, *hyper) + jitter * hyper[1] * jnp.eye(len(Z), dtype=dtype)
        return solved(jnp.linalg.cholesky(kernel), gram(Z, X, *hyper))

    def expected(mean: Any, variance: Any, sign: Any) -> Any:
        f = sign * mean + jnp.sqrt(variance) * nodes
        return (weights * jax.nn.log_sigmoid(f)).sum()

    def marginals(A: Any, q: Any, variance: Any) -> Any:
        mean, W = q
        residual = jnp.maximum(variance - jnp.square(A).sum(0), 0)
        return mean @ A, residual + jnp.square(W @ A).sum(0)

    def moments(potential: Any, precision: Any) -> Any:
        eye = jnp.eye(len(potential), dtype=dtype)
        W = solved(jnp.linalg.cholesky(precision), eye)
        return W.T @ (W @ potential), W

    def stepped(A: Any, sign: Any, natural: Any, variance: Any) -> Any:
        at = marginals(A, moments(*natural), variance)
        by_mean, by_variance = jax.grad(expected, (0, 1))(*at, sign)
        weight = -2 * by_variance
        eye = jnp.eye(len(A), dtype=dtype)
        return A @ (by_mean + weight * at[0]), eye + (A * weight) @ A.T

    @jax.jit
    def fit(steps: Any, X: Any, y: Any, Z: Any) -> Any:
        sign = 2 * y - 1
        prior = jnp.zeros(len(Z), dtype), jnp.eye(len(Z), dtype=dtype)

        def learn(_: Any, state: Any) -> Any:
            logs, moments_of_adam, natural = state

            def loss(logs: Any) -> Any:
                # The divergence from the whitened prior does not depend on these; the
                # variance has a log-normal prior.
                hyper = jnp.exp(logs)
                at = marginals(projected(Z, X, hyper), q, hyper[1])
                return 0.5 * logs[1] ** 2 + logs[1] - expected(*at, sign)

            hyper = jnp.exp(logs)
            natural = stepped(projected(Z, X, hyper), sign, natural, hyper[1])
            q = moments(*natural)
            updates, moments_of_adam = optim.update(
                jax.grad(loss)(logs), moments_of_adam
            )
            return logs + updates, moments_of_adam, natural

        if problem.learn:
            logs = jnp.log(jnp.asarray(start, dtype))
            state = lax.fori_loop(0, steps, learn, (logs, optim.init(logs), prior))
            hyper, natural = jnp.exp(state[0]), state[2]
            A = projected(Z, X, hyper)
        else:
            hyper, A = start, projected(Z, X, start)
            natural = lax.fori_loop(
                0, steps, lambda _, n: stepped(A, sign, n, hyper[1]), prior
            )
        q = moments(*natural)
        at = marginals(A, q, hyper[1])
        log_det = 2 * jnp.log(jnp.diagonal(q[1])).sum()
        size = jnp.square(q[1]).sum() + jnp.square(q[0]).sum()
        kl = 0.5 * (size - len(Z) - log_det)
        return expected(*at, sign) - kl, at, kl, q, hyper

    @jax.jit
    def predict(X: Any, Z: Any, q: Any, hyper: Any) -> Any:
        mean, variance = marginals(projected(Z, X, hyper), q, hyper[1])
        f = mean + jnp.sqrt(variance) * nodes
        return (weights * jax.nn.sigmoid(f)).sum(0)

    data = problem.X, problem.y.astype(dtype), problem.Z

    class Bare:
        def run(self, steps: int) -> None:
            self.found = jax.block_until_ready(fit(steps, *data))

        def bounds(self, steps: int) -> Sequence[float]:
            return [float(fit(i + 1, *data)[0]) for i in range(steps)]

        def probs(self, X: np.ndarray) -> np.ndarray:
            return np.asarray(predict(X, problem.Z, *self.found[3:]))

        def predict(self) -> Prediction:
            _, (mean, variance), kl, *_ = self.found
            probs = self.probs(problem.X_test)
            return Prediction(probs, np.asarray(mean), np.asarray(variance), float(kl))

    return Bare(), notes


if __name__ == "__main__":
    worker_main({"bare": bare})
