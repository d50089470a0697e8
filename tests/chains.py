# SPDX-License-Identifier: Apache-2.0
"""Many short chains of a kernel in one program, reference draws of a density by NumPy
alone, and their comparison."""

import jax
import numpy as np
from scipy import optimize

CHAINS, BURN_IN, DRAWS = 300, 40, 20


def many_chains(kernel, args, kwargs=None, num_chains=CHAINS, num_warmup=0):
    """Draws of ``num_chains`` chains from starts of the kernel's own, one chain after
    the other, by site."""

    @jax.jit
    @jax.vmap
    def run(key):
        state = kernel.init(key, num_warmup, None, args, kwargs or {})

        def step(state, _):
            state = kernel.sample(state, args, kwargs or {})
            return state, state.z

        _, z = jax.lax.scan(step, state, None, length=BURN_IN + DRAWS)
        return jax.tree.map(lambda x: x[BURN_IN:], z)

    z = jax.device_get(run(jax.random.split(jax.random.key(0), num_chains)))
    return {k: x.reshape(-1, *x.shape[2:]) for k, x in z.items()}


def importance_draws(log_density, dim, num=12_000, proposals=60_000):
    """Independent draws of a log-concave density over ``dim`` numbers: resampled, by
    their ratios, from a Student t around its mode.

    :param log_density: of rows of an (N, dim) array.
    """
    mode = optimize.minimize(lambda z: -log_density(z[None])[0], np.zeros(dim)).x
    step = 1e-3 * np.eye(dim)

    def at(z):
        return log_density((mode + z)[None])[0]

    hessian = np.array(
        [[at(a + b) - at(a - b) - at(b - a) + at(-a - b) for b in step] for a in step]
    )
    factor = np.linalg.cholesky(np.linalg.inv(-hessian / (4 * 1e-6)))
    rng, df = np.random.default_rng(0), 8
    noise = rng.standard_normal((proposals, dim))
    noise /= np.sqrt(rng.chisquare(df, (proposals, 1)) / df)
    z = mode + noise @ factor.T
    log_q = -0.5 * (df + dim) * np.log1p((noise**2).sum(1) / df)
    ratio = log_density(z) - log_q
    weights = np.exp(ratio - ratio.max())
    weights /= weights.sum()
    assert 1 / (weights**2).sum() > 2 * num
    return z[rng.choice(proposals, num, p=weights)]


def assert_same_distribution(ours, theirs, *names, bound=5.0) -> None:
    """Means, variances and three quantiles of every element agree within ``bound``
    standard errors, from means of 30 batches of consecutive draws."""
    for name in names:
        a, b = (
            np.asarray(s[name], float).reshape(len(s[name]), -1) for s in (ours, theirs)
        )
        centre = np.concatenate([a, b])
        middle = centre.mean(0)
        statistics = [lambda x: x, lambda x, c=middle: (x - c) ** 2]
        levels = np.quantile(centre, (0.1, 0.5, 0.9), axis=0)
        statistics += [lambda x, q=q: x < q for q in levels]
        for statistic in statistics:
            (m, e), (n, f) = (
                _mean_and_error(statistic(a)),
                _mean_and_error(statistic(b)),
            )
            assert np.abs((m - n) / np.hypot(e, f)).max() < bound, name


def _mean_and_error(draws):
    batches = draws[: len(draws) // 30 * 30].reshape(30, -1, draws.shape[1]).mean(1)
    return batches.mean(0), batches.std(0, ddof=1) / np.sqrt(30) + 1e-9
