# SPDX-License-Identifier: Apache-2.0
"""The arithmetic of ``binary.py`` as one bare function of JAX, to measure against.

Closed-form updates of the exact bound with step 1, for this kernel and likelihood, and
nothing else: no control of steps, no checks, no hyperparameters to learn. What it
takes to compile is what JAX takes, and what a package takes beyond it is its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from common import Clock, Fit, Prediction, Problem, versions, worker_main


def bare(problem: Problem, clock: Clock) -> tuple[Fit, dict[str, Any]]:
    """Natural gradients of step 1 by fifteen-node Gauss-Hermite quadrature."""
    import jax
    import jax.numpy as jnp
    from jax import lax

    notes = {"imports": clock.now(), "max_steps": 30, "versions": versions("jax")}
    dtype = problem.X.dtype
    nodes, weights = np.polynomial.hermite_e.hermegauss(15)
    nodes, weights = (np.asarray(a, dtype)[:, None] for a in (nodes, weights))
    weights = weights / weights.sum()
    jitter = 2e-5 if dtype == np.float32 else 1e-10

    def gram(a: Any, b: Any) -> Any:
        squares = jnp.square(a).sum(1)[:, None] + jnp.square(b).sum(1) - 2 * a @ b.T
        scaled = jnp.maximum(squares, 0) / problem.lengthscale**2
        return problem.variance * jnp.exp(-0.5 * scaled)

    def solved(factor: Any, rhs: Any) -> Any:
        return lax.linalg.triangular_solve(factor, rhs, left_side=True, lower=True)

    @jax.jit
    def fit(steps: Any, X: Any, y: Any, X_test: Any, Z: Any) -> Any:
        eye = jnp.eye(len(Z), dtype=dtype)
        kernel = gram(Z, Z) + jitter * problem.variance * eye
        factor = jnp.linalg.cholesky(kernel)
        A, sign = solved(factor, gram(Z, X)), 2 * y - 1

        def expected(mean: Any, variance: Any) -> Any:
            f = sign * mean + jnp.sqrt(variance) * nodes
            return (weights * jax.nn.log_sigmoid(f)).sum()

        def marginals(A: Any, q: Any) -> Any:
            mean, W = q
            residual = jnp.maximum(problem.variance - jnp.square(A).sum(0), 0)
            return mean @ A, residual + jnp.square(W @ A).sum(0)

        def moments(potential: Any, precision: Any) -> Any:
            W = solved(jnp.linalg.cholesky(precision), eye)
            return W.T @ (W @ potential), W

        def step(_: Any, natural: Any) -> Any:
            at = marginals(A, moments(*natural))
            by_mean, by_variance = jax.grad(expected, (0, 1))(*at)
            weight = -2 * by_variance
            return A @ (by_mean + weight * at[0]), eye + (A * weight) @ A.T

        q = moments(*lax.fori_loop(0, steps, step, (jnp.zeros(len(Z), dtype), eye)))
        at = marginals(A, q)
        log_det = 2 * jnp.log(jnp.diagonal(q[1])).sum()
        size = jnp.square(q[1]).sum() + jnp.square(q[0]).sum()
        kl = 0.5 * (size - len(Z) - log_det)
        test = marginals(solved(factor, gram(Z, X_test)), q)
        return expected(*at) - kl, at, kl, test

    data = problem.X, problem.y.astype(dtype), problem.X_test, problem.Z

    class Bare:
        def run(self, steps: int) -> None:
            self.found = jax.block_until_ready(fit(steps, *data))

        def bounds(self, steps: int) -> Sequence[float]:
            return [float(fit(i + 1, *data)[0]) for i in range(steps)]

        def predict(self) -> Prediction:
            _, (mean, variance), kl, test = self.found
            m, v = (np.asarray(x, float)[:, None] for x in test)
            nodes, weights = np.polynomial.hermite_e.hermegauss(80)
            probs = 1 / (1 + np.exp(-(m + np.sqrt(v) * nodes))) @ weights
            probs = probs / weights.sum()
            return Prediction(probs, np.asarray(mean), np.asarray(variance), float(kl))

    return Bare(), notes


if __name__ == "__main__":
    worker_main({"bare": bare})
