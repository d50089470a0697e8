# SPDX-License-Identifier: Apache-2.0
r"""What each source of rounding takes of the bound of a regression in float32, in nats.

Hyperparameters are learnt in float64 (a squared exponential with a lengthscale for each
column, Normal noise). There the collapsed bound is computed again by
:mod:`numpyro_gpaug.math.whitening`, with one stage after the other in float32::

    python examples/benchmarks/rounding.py --sets friedman hl_yacht hl_energy

``inputs``: rounded inputs, observations and hyperparameters, of which all else is
computed; ``whitening``: elements of ``K_ZZ`` stored, and their inverse root, with the
jitter of float32; ``K_ZX``: its elements stored; ``product``: of the two;
``sum`` is all of them, ``package`` what a fit in float32 has less than, or
above, one in float64. Negative numbers are nats lost. ``ratio`` is that of the prior
variance to the variance of the noise. Other sets than friedman are read from
``GPAUG_DATA``.
"""

from __future__ import annotations

import argparse
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from common import data_folder, print_table
from learning import load, model_of
from scipy.linalg import solve_triangular

import numpyro_gpaug as gpaug
from numpyro_gpaug.math.whitening import differenced

SETS = ("friedman", "hl_yacht", "hl_energy", "seitz_boston")
STAGES = ("whitening", "K_ZX", "product")
SINGLE, DOUBLE = np.float32, np.float64
STEPS = 150
# The squares of longer lengthscales overflow in float32.
LONGEST = 1e15


class Regression(NamedTuple):
    """Data and hyperparameters; the mean of ``y`` is subtracted."""

    X: Any
    y: Any
    Z: Any
    lengthscale: Any
    variance: Any
    noise: Any

    def cast(self, dtype: Any) -> Regression:
        """The same in another dtype."""
        return Regression(*(np.asarray(x, dtype) for x in self))


def learnt(name: str, rows: int, inducing: int) -> Regression:
    """Data of a set with hyperparameters learnt in float64."""
    with jax.enable_x64(True):
        task = load(name, rows, inducing)
        model = model_of(task, priors=False)
        svi = gpaug.ConjugateSVI(model, gpaug.AutoSparseGP(model))
        found = svi.run(
            jax.random.key(0), STEPS, task.X, task.y, inducing=task.Z,
            progress_bar=False,
        ).params  # fmt: skip
        scale = np.minimum(found["lengthscale"], LONGEST)
        y = task.y - np.asarray(found["mean"])
        return Regression(task.X, y, task.Z, scale, found["variance"], found["noise"])


def deviation(X: Any, Z: Any, r: Regression) -> Any:
    """Covariances less the prior variance."""
    half = -0.5 * np.square((X[:, None] - Z) / r.lengthscale).sum(-1)
    return r.variance * np.expm1(half)


def bound(r: Regression, single: tuple[str, ...] = ()) -> float:
    """The collapsed bound with some stages in float32, all else in float64."""

    def stored(x: Any, stage: str) -> Any:
        dtype = SINGLE if stage in single else DOUBLE
        return jax.tree.map(lambda x: x.astype(dtype) if x.dtype.kind == "f" else x, x)

    gram, own = deviation(r.Z, r.Z, r), np.zeros(len(r.Z))
    cross = stored(deviation(r.X, r.Z, r), "K_ZX")
    with jax.enable_x64(True):
        given = stored((gram, own, r.variance.reshape(1, 1)), "whitening")
        values = stored(differenced(*map(jnp.asarray, given)), "product")
        across = stored((cross, np.zeros(len(r.X))), "product")
        A, left = map(np.asarray, values.project(*map(jnp.asarray, across)))
    A, residual = A.astype(DOUBLE), np.maximum(left, 0).astype(DOUBLE)
    precision = r.noise**-2
    root = np.linalg.cholesky(np.eye(len(A)) + precision * A @ A.T)
    gain = solve_triangular(root, precision * A @ r.y, lower=True)
    lost = precision * (r.y @ r.y + residual.sum()) - gain @ gain
    entropy = len(r.y) * np.log(2 * np.pi / precision)
    return float(-0.5 * (lost + entropy) - np.log(root.diagonal()).sum())


def regression(X: Any, y: Any = None, *, Z: Any, kernel: Any, noise: Any) -> None:
    """The model at given hyperparameters."""
    gp = gpaug.GaussianProcess("f", kernel, Z)
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", dist.Normal(gp(X), noise), obs=y)


def packages(r: Regression, dtype: Any) -> float:
    """The bound of a fit."""
    with jax.enable_x64(dtype == DOUBLE):
        X, y, Z, scale, variance, noise = r.cast(dtype)
        kernel = gpaug.kernels.SquaredExponential(scale, variance)
        svi = gpaug.ConjugateSVI(regression, gpaug.AutoSparseGP(regression))
        fit = svi.run(
            jax.random.key(0), 2, X, y, Z=Z, kernel=kernel, noise=noise,
            progress_bar=False,
        )  # fmt: skip
        return -float(fit.losses[-1])


def row(name: str, rows: int, inducing: int) -> dict[str, Any]:
    """Return the row of the table for one data set."""
    exact = learnt(name, rows, inducing).cast(DOUBLE)
    r = exact.cast(SINGLE).cast(DOUBLE)
    out: dict[str, Any] = {"set": name, "rows": len(r.X), "inducing": len(r.Z)}
    out |= {"ratio": float(r.variance / r.noise**2), "inputs": bound(r) - bound(exact)}
    for i, stage in enumerate(STAGES):
        out[stage] = bound(r, STAGES[: i + 1]) - bound(r, STAGES[:i])
    out["sum"] = bound(r, STAGES) - bound(r)
    return out | {"package": packages(r, SINGLE) - packages(r, DOUBLE)}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--sets", nargs="+", default=SETS if data_folder() else SETS[:1]
    )
    parser.add_argument("--rows", type=int, default=700)
    parser.add_argument("--inducing", type=int, nargs="+", default=(60, 200))
    args = parser.parse_args()
    found = [row(name, args.rows, n) for name in args.sets for n in args.inducing]
    columns = dict.fromkeys(("set", "rows", "inducing"), "") | {"ratio": ".0f"}
    columns |= dict.fromkeys(("inputs", *STAGES, "sum", "package"), ".2f")
    print_table(found, columns)


if __name__ == "__main__":
    main()
