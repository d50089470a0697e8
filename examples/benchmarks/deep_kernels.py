# SPDX-License-Identifier: Apache-2.0
"""How strong the prior of a deep kernel's weights must be: held-out negative log
densities per row, beside plain kernels.

Weights of a layer with n inputs have the prior variance ``1 / (decay n)``; 0 means no
prior. Five data sets of 100 to 250 rows: diabetes of scikit-learn, Friedman's first and
second, a step function in the plane, and a line in eight columns::

    python examples/benchmarks/deep_kernels.py --seeds 2 --hidden 16
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from sklearn import datasets

import numpyro_gpaug as gpaug


def data_sets(seed: int) -> Iterator[tuple[str, np.ndarray, np.ndarray, int]]:
    """Return names, inputs, observations, and numbers of training rows."""
    rng = np.random.default_rng(seed)
    yield "diabetes", *datasets.load_diabetes(return_X_y=True), 250
    sizes = {"n_samples": 600, "random_state": seed}
    yield "friedman1", *datasets.make_friedman1(noise=1.0, **sizes), 200
    yield "friedman2", *datasets.make_friedman2(noise=100.0, **sizes), 200
    X = rng.uniform(-2, 2, (600, 2))
    steps = np.sign(np.sin(2 * X[:, 0] + X[:, 1] ** 2))
    yield "steps", X, steps + 0.3 * rng.normal(size=600), 200
    X = rng.normal(size=(600, 8))
    yield "line", X, X[:, 0] + 0.5 * X[:, 1] + rng.normal(size=600), 100


def model(X, y=None, *, inducing, decay, hidden):
    """Regression with a plain kernel (``decay`` a name), or on learnt features."""
    d = X.shape[1]
    noise = numpyro.sample("noise", dist.LogNormal(-1, 1))
    wide = dist.LogNormal(0.5 * np.log(d), 1)
    if decay == "one":
        lengthscale = numpyro.sample("lengthscale", wide)
    elif decay == "each":
        lengthscale = numpyro.sample("lengthscale", wide.expand([d]).to_event(1))
    else:

        def start(key):
            a, b = jax.random.split(key)
            return (
                jax.random.normal(a, (d, hidden)) / d**0.5,
                jax.random.normal(b, (hidden, 2)) / hidden**0.5,
            )

        a, b = net = numpyro.param("net", start)
        size = sum(len(w) * (w**2).sum() for w in net)
        numpyro.factor("prior", -0.5 * decay * size)
        X, inducing = (jnp.tanh(x @ a) @ b for x in (X, inducing))
        lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0, 1))
    kernel = gpaug.kernels.Matern52(lengthscale)
    f = gpaug.GaussianProcess("f", kernel, inducing)(X)
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", dist.Normal(f, noise), obs=y)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=16)
    parser.add_argument("--decays", type=float, nargs="+", default=[0, 1, 4, 16, 64])
    parser.add_argument("--steps", type=int, default=300)
    given = parser.parse_args()
    kinds = ["one", "each", *given.decays]
    print(f"{'':12}" + "".join(f"{kind:>9}" for kind in kinds))
    for seed in range(given.seeds):
        for name, X, y, num in data_sets(seed):
            order = np.random.default_rng(seed).permutation(len(X))
            X, y = (
                ((x - x[:num].mean(0)) / x[:num].std(0)).astype("float32")
                for x in (X[order], y[order])
            )
            Z = gpaug.inducing.kmeans(X[:num], min(60, num // 2))
            scores = []
            for kind in kinds:
                svi = gpaug.ConjugateSVI(model, gpaug.AutoSparseGP(model))
                fit = svi.run(
                    jax.random.key(seed), given.steps, X[:num], y[:num], inducing=Z,
                    decay=kind, hidden=given.hidden, progress_bar=False,
                )  # fmt: skip
                density = svi.posterior(fit).log_prob(X[num:], y[num:])
                scores.append(-float(density.mean()))
            print(f"{seed} {name:10}" + "".join(f"{x:9.3f}" for x in scores))


if __name__ == "__main__":
    main()
