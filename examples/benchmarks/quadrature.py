# SPDX-License-Identifier: Apache-2.0
"""Evidence of two models of ``nested.py`` by deterministic sums, in double precision.

Over the scale of the groups, tau, by the trapezoidal rule in its logarithm; given tau
eight schools have a normal density, and Seeds a sum over 7 nodes along each direction
of the four coefficients (Gauss-Hermite, where the integrand is and as wide) of products
over plates of sums over 161 values of the plate's effect.
"""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from scipy import special, stats


def eight_schools(y: Any, sigma: Any) -> float:
    log_tau = np.linspace(-9, 9, 1201)

    def given(tau: float) -> float:
        covariance = np.diag(tau**2 + np.square(sigma)) + 25.0
        return stats.multivariate_normal(np.zeros(8), covariance).logpdf(y)

    logs = np.array([given(tau) for tau in np.exp(log_tau)])
    return over_scale(logs, log_tau, stats.halfcauchy(0, 5))


def seeds(y: Any, total: Any, x1: Any, x2: Any) -> float:
    columns = [np.ones(len(y)), x1, x2, x1 * x2]
    y, total, X = (jnp.asarray(x, float) for x in (y, total, np.stack(columns, 1)))
    white = jnp.linspace(-7, 7, 161)
    log_rule = jax.scipy.stats.norm.logpdf(white) + jnp.log(white[1] - white[0])
    choices = np.log(special.binom(total, y)).sum()

    def integrand(b: Any, tau: Any) -> Any:
        eta = (X @ b)[:, None] + tau * white
        terms = y[:, None] * eta - total[:, None] * jnp.logaddexp(0, eta)
        prior = jax.scipy.stats.norm.logpdf(b, 0, 5).sum()
        return jax.nn.logsumexp(terms + log_rule, axis=1).sum() + prior

    nodes, weights = np.polynomial.hermite_e.hermegauss(7)
    at = jnp.array([*product(nodes, repeat=4)])
    # The nodes' own density is divided out.
    log_weights = np.log([*product(weights, repeat=4)]).sum(1)
    log_weights = jnp.asarray(log_weights + 0.5 * np.square(at).sum(1))

    @jax.jit
    def given(b: Any, tau: Any) -> tuple[Any, Any]:
        gradient, hessian = (d(integrand)(b, tau) for d in (jax.grad, jax.hessian))
        for _ in range(8):
            b = b - jnp.linalg.solve(hessian, gradient)
            gradient, hessian = (d(integrand)(b, tau) for d in (jax.grad, jax.hessian))
        axes = jnp.linalg.inv(jnp.linalg.cholesky(-hessian))
        logs = jax.lax.map(partial(integrand, tau=tau), b + at @ axes, batch_size=100)
        volume = jnp.linalg.slogdet(axes)[1]
        return jax.nn.logsumexp(logs + log_weights) + volume, b

    log_tau, b, logs = np.linspace(-7, 1.5, 60), jnp.zeros(4), []
    for tau in np.exp(log_tau):
        log, b = given(b, tau)
        logs.append(float(log))
    return over_scale(np.array(logs), log_tau, stats.halfnorm) + choices


def over_scale(logs: np.ndarray, log_tau: np.ndarray, prior: Any) -> float:
    """The evidence, from its logarithms given tau."""
    total = logs + prior.logpdf(np.exp(log_tau)) + log_tau
    return float(special.logsumexp(total) + np.log(log_tau[1] - log_tau[0]))


EVIDENCE = {"eight_schools": eight_schools, "seeds": seeds}
