# SPDX-License-Identifier: Apache-2.0
"""Random programs, each right or refused::

    python -m tests.programs --number 2000

A program takes a few Gaussian latents through random operations of JAX, a link, more
operations, and a likelihood. The bound that a fit reports has to be the one that brute
force gives for its Gaussian: the average of the program's own log-density at nodes of a
rule for all latents together, less the divergence from the prior. No other Gaussian
nearby may have a higher one. What the package refuses is counted; what is neither is
listed as wrong.
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

if __name__ == "__main__":
    os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import Array, lax

import numpyro_gpaug as gpaug
from numpyro_gpaug.predict.posterior import MOST_ERROR
from tests.conftest import enable_x64

# The largest error of a bound, in nats: for normal data, and for all others, where both
# sides are quadrature.
EXACT, CLOSE = 1e-6, 0.02
NODES = {1: 60, 2: 40, 3: 22, 4: 14}
Move = Callable[[Array], Array]


@jax.custom_jvp
def _doubled(x: Array) -> Array:
    return 2 * x


@_doubled.defjvp
def _(primals: Any, tangents: Any) -> Any:
    # The derivative of another function, as in straight-through estimators.
    return _doubled(primals[0]), tangents[0]


@jax.custom_vjp
def _halved(x: Array) -> Array:
    return x / 2


_halved.defvjp(lambda x: (x / 2, None), lambda _, slope: (jnp.clip(slope, -0.1, 0.1),))


@jax.custom_jvp
def _shares(x: Array) -> Array:
    return jnp.exp(x) / jnp.exp(x).sum()


@_shares.defjvp
def _(primals: Any, tangents: Any) -> Any:
    p = _shares(primals[0])
    return p, p * (tangents[0] - p @ tangents[0])


@jax.custom_jvp
def _softplus(x: Array) -> Array:
    return jnp.logaddexp(x, 0)


@_softplus.defjvp
def _(primals: Any, tangents: Any) -> Any:
    return _softplus(primals[0]), jax.nn.sigmoid(primals[0]) * tangents[0]


def _filtered(x: Array) -> Array:
    weights = jnp.linspace(1.0, 0.2, len(x) // 2 + 1)
    return jnp.fft.irfft(jnp.fft.rfft(x) * weights, n=len(x))


def affine_moves(rng: np.random.Generator, num: int) -> dict[str, Move]:
    """Affine functions from (num,) to (num,).

    :param rng: their numbers.
    :param num: length.
    """
    A = rng.normal(size=(num, num)) / np.sqrt(num)
    B, a = np.eye(num) + 0.3 * A, rng.normal(size=num)
    g, mask = rng.integers(0, num, num), rng.random(num) < 0.6
    lower, at = np.tril(B) + np.eye(num), rng.choice(num, 2, replace=False)
    sign = rng.normal()
    return {
        "matrix": lambda x: A @ x,
        "index": lambda x: x[g],
        "take": lambda x: jnp.take(x, g),
        "scale": lambda x: x * a,
        "shift": lambda x: x + a,
        "divide": lambda x: (x - a) / 1.7,
        "negate": lambda x: -x,
        "reverse": lambda x: x[::-1],
        "roll": lambda x: x - 0.5 * jnp.roll(x, 1),
        "pad": lambda x: jnp.pad(x[1:], (0, 1), constant_values=0.3),
        "lax pad": lambda x: x + 0.5 * lax.pad(x, 0.0, [(1, -1, 0)]),
        "sums": jnp.cumsum,
        "differences": lambda x: jnp.diff(x, prepend=0.2),
        "mean": lambda x: x - x.mean(),
        "where": lambda x: jnp.where(mask, x, 0.4),
        "set": lambda x: jnp.asarray(a).at[at].set(x[:2]),
        "add at": lambda x: jnp.zeros(num).at[g].add(x),
        "times at": lambda x: x.at[at].mul(1.5),
        "update": lambda x: lax.dynamic_update_slice(jnp.asarray(a), x[:3], (2,)),
        "slice": lambda x: jnp.tile(lax.dynamic_slice(x, (1,), (num // 2,)), 2),
        "convolve": lambda x: jnp.convolve(x, jnp.array([1.0, 0.5]), "same"),
        "filter": _filtered,
        "solve": lambda x: jnp.linalg.solve(jnp.asarray(B), x),
        "triangular": lambda x: jax.scipy.linalg.solve_triangular(
            jnp.asarray(lower), x, lower=True
        ),
        "einsum": lambda x: jnp.einsum("i,ji->j", x, B),
        "segments": lambda x: jax.ops.segment_sum(x, jnp.asarray(g), num),
        "condition": lambda x: lax.cond(sign > 0, lambda x: 2 * x, lambda x: x[g], x),
        "switch": lambda x: lax.switch(1, [lambda x: x, lambda x: 1 - x], x),
        "recursion": lambda x: lax.scan(
            lambda s, e: (0.5 * s + e, s + e), jnp.zeros(()), x
        )[1],
        "map": lambda x: lax.map(lambda i: 2 * x[i], jnp.asarray(g)),
        "loop": lambda x: lax.fori_loop(0, 2, lambda _, s: 0.5 * s + x, x),
        "remat": jax.checkpoint(lambda x: x[g] + 1),
        "jit": jax.jit(lambda x: 0.5 * x),
        "vmap": lambda x: jax.vmap(lambda row, e: row @ x + e)(A, x),
        "own jvp": _doubled,
        "own vjp": _halved,
        "stopped": lambda x: x + 0.5 * lax.stop_gradient(x),
        "barrier": lax.optimization_barrier,
        "table": lambda x: (x.reshape(2, -1).T + 1).ravel(),
        "repeat": lambda x: jnp.repeat(x[::2], 2),
        "stack": lambda x: jnp.stack([x, 2 * x], -1)[:, 1],
        "product": lambda x: jnp.kron(x[: num // 2], jnp.array([1.0, -0.5])),
        "associative": lambda x: lax.associative_scan(jnp.add, x),
    }  # fmt: skip


LINKS: dict[str, Move] = {
    "exp": lambda x: jnp.exp(0.5 * x),
    "logistic": jax.nn.sigmoid,
    "softplus": jax.nn.softplus,
    "own softplus": _softplus,
    "square": lambda x: 0.2 + jnp.square(x),
    "sum of exponentials": lambda x: (
        jnp.exp(x[:, None] * jnp.array([0.2, -0.4])).sum(-1) * jnp.exp(0.1 * x)
    ),
}


def late_moves(rng: np.random.Generator, num: int) -> dict[str, Move]:
    """Return functions that may follow a link, from (num,) to (num,), positive; some
    mix data.

    :param rng: their numbers.
    :param num: length.
    """
    g, a = rng.integers(0, num, num), rng.gamma(2, 0.5, num) + 0.2
    mask = rng.random(num) < 0.6
    return {
        "nothing": lambda r: r,
        "index": lambda r: r[g],
        "reverse": lambda r: r[::-1],
        "scale": lambda r: a * r,
        "where": lambda r: jnp.where(mask, r, 0.7),
        "set": lambda r: jnp.asarray(a).at[::2].set(r[: (num + 1) // 2]),
        "add at": lambda r: jnp.ones(num).at[:2].add(r[:2]),
        "add at twice": lambda r: jnp.ones(num).at[g].add(r),
        "table": lambda r: r.reshape(2, -1).T.ravel(),
        "pad": lambda r: jnp.pad(r[1:], (0, 1), constant_values=0.8),
        "neighbours": lambda r: r + 0.5 * lax.pad(r, 0.0, [(1, -1, 0)]),
        "roll": lambda r: r + jnp.roll(r, 1),
        "shares": lambda r: num * _shares(r),
        "mean": lambda r: r / r.mean(),
        "sums": jnp.cumsum,
        "sort": jnp.sort,
        "largest": lambda r: jnp.maximum(r, r[::-1]),
        "recursion": lambda r: lax.scan(
            lambda s, e: (0.5 * s + e, s + e), jnp.zeros(()), r
        )[1],
        "condition": lambda r: lax.cond(a[0] > 1, lambda r: r, lambda r: r[::-1], r),
        "remat": jax.checkpoint(lambda r: 2 * r),
        "spectrum": lambda r: jnp.abs(jnp.fft.fft(r)) + 0.1,
        "top": lambda r: lax.top_k(r, num)[0],
        "pool": lambda r: lax.reduce_window(
            r, -jnp.inf, lax.max, (2,), (1,), "SAME"
        ),
        "products": lambda r: jnp.cumprod(0.5 + r / 4),
        "ahead": lambda r: jnp.exp(jnp.log(r)[jnp.arange(num)]),
        "root": lambda r: jnp.sqrt(r * r + 0.1),
    }  # fmt: skip


class Example(NamedTuple):
    """A random program.

    :param model: of data (num,).
    :param sites: shapes, means and scales of the latents, by name.
    :param log_likelihood: of values by site.
    :param data: the observations.
    :param exact: whether its bound is the evidence of normal data.
    :param said: what it is made of.
    """

    model: Callable[..., Any]
    sites: dict[str, tuple[tuple[int, ...], float, float]]
    log_likelihood: Callable[[dict[str, Array], Array], Array]
    data: np.ndarray
    exact: bool
    said: str


def _predictor(
    rng: np.random.Generator, sites: dict[str, Any], num: int
) -> tuple[Callable[[dict[str, Array]], Array], list[str]]:
    """A random affine function (num,) of latents, and what it is made of."""
    parts, said = [], []
    for name, (shape, *_) in sites.items():
        moves = affine_moves(rng, num)
        # Every move is equally likely, though some take long to trace.
        chosen = [str(k) for k in rng.choice(list(moves), rng.integers(1, 4))]
        size = int(np.prod(shape))
        codes, slope = rng.integers(0, size, num), rng.normal(size=num)
        parts.append((name, codes, slope, [moves[k] for k in chosen]))
        said.append(f"{name}: {', '.join(chosen)}")

    def eta(values: dict[str, Array]) -> Array:
        total = jnp.zeros(num)
        for name, codes, slope, moves in parts:
            x = jnp.ravel(values[name])[codes] * slope
            for move in moves:
                x = move(x)
            total = total + x
        return total

    return eta, said


def random_program(rng: np.random.Generator) -> Example:
    """The next program of a generator."""
    num = int(rng.choice([6, 8]))
    shapes = [[(3,)], [(), (2,)], [(2,), (2,)], [(), (), (1,)], [(2, 2)], [(4,)]]
    chosen = shapes[rng.integers(len(shapes))]
    sites = {
        f"z{i}": (shape, float(rng.normal()) / 2, float(rng.uniform(0.2, 0.7)))
        for i, shape in enumerate(chosen)
    }
    eta, said = _predictor(rng, sites, num)
    late = late_moves(rng, num)
    link, after = str(rng.choice(list(LINKS))), str(rng.choice(list(late)))
    kind = str(rng.choice(list(LIKELIHOODS)))
    other, more = _predictor(rng, sites, num)
    made = LIKELIHOODS[kind]
    density = made(eta, lambda x: late[after](LINKS[link](x)), other)
    data = DATA[kind](rng, num)
    if kind in ("linked", "spread", "products", "shape"):
        said += [link, after]
    if kind in ("two", "mixture", "shape"):
        said += more
    site = rng.integers(3)

    def model(y: Array) -> None:
        values = {}
        for name, (shape, mean, scale) in sites.items():
            d = dist.Normal(mean, scale)
            if site == 0 and shape:
                values[name] = numpyro.sample(name, d, sample_shape=shape)
            else:
                d = d.expand(shape).to_event(len(shape))
                values[name] = numpyro.sample(name, d)
        found = density(values)
        if isinstance(found, dist.Distribution):
            with numpyro.plate("data", num):
                numpyro.sample("y", found, obs=y)
        else:
            numpyro.factor("y", found(y))

    def log_likelihood(values: dict[str, Array], y: Array) -> Array:
        found = density(values)
        if isinstance(found, dist.Distribution):
            return found.log_prob(y).sum()
        return jnp.sum(found(y))

    return Example(
        model, sites, log_likelihood, data, kind == "normal", "; ".join([kind, *said])
    )  # fmt: skip


LIKELIHOODS: dict[str, Callable[..., Callable[[dict[str, Array]], Any]]] = {
    "normal": lambda eta, r, f: lambda v: dist.Normal(eta(v), 0.5),
    "poisson": lambda eta, r, f: lambda v: dist.Poisson(jnp.exp(0.5 * eta(v))),
    "bernoulli": lambda eta, r, f: lambda v: dist.Bernoulli(logits=eta(v)),
    "linked": lambda eta, r, f: lambda v: dist.Poisson(r(eta(v)) + 0.1),
    "spread": lambda eta, r, f: lambda v: dist.Normal(0.3, 0.2 + r(eta(v))),
    "products": lambda eta, r, f: (
        lambda v: lambda y: y @ jnp.log(r(eta(v)) + 0.1) - r(eta(v)).sum()
    ),
    "two": lambda eta, r, f: lambda v: dist.Normal(eta(v), jnp.exp(0.3 * f(v))),
    "shape": lambda eta, r, f: (
        lambda v: dist.NegativeBinomial2(0.1 + r(eta(v)), jnp.exp(0.3 * f(v)))
    ),
    "mixture": lambda eta, r, f: (
        lambda v: dist.MixtureSameFamily(
            dist.Categorical(probs=jnp.array([0.4, 0.6])),
            dist.Normal(jnp.stack([eta(v), f(v)], -1), 0.7),
        )
    ),
}
COUNTS = ("poisson", "linked", "products", "shape")
DATA = {
    kind: (
        (lambda rng, num: rng.integers(0, 2, num))
        if kind == "bernoulli"
        else (lambda rng, num: rng.poisson(1.5, num))
        if kind in COUNTS
        else (lambda rng, num: rng.normal(size=num))
    )
    for kind in LIKELIHOODS
}


class Verdict(NamedTuple):
    """The verdict on a program: ``right``; ``refused``; ``warned``, if the posterior
    reports that quadrature does not resolve the density; ``wrong``; or ``error``.
    """

    kind: str
    said: str


def verdict(example: Example, *, fitted: bool = True) -> Verdict:
    """Fit a program and compare, in double precision.

    :param example: the program.
    :param fitted: whether it is fitted; otherwise bounds of any Gaussian are compared,
        which takes a third of the time.
    """
    y = jnp.asarray(example.data)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            guide = gpaug.AutoLatentGaussian(example.model)
            svi = gpaug.ConjugateSVI(example.model, guide)
            if fitted:
                result = svi.run(jax.random.key(0), 100, y, progress_bar=False)
                params, loss = result.params, result.losses[-1]
            else:
                size = sum(int(np.prod(s)) for s, *_ in example.sites.values())
                params = _any_gaussian(size)
                key, svi_init = jax.random.key(0), svi.init
                loss = svi.evaluate(svi_init(key, y, init_params=params), y)
        if guide.structure.others:
            return Verdict("refused", f"{guide.structure.others} are points")
    except gpaug.NotConjugateError as error:
        return Verdict("refused", str(error))
    except Exception as error:  # every other error is a fault, and is listed
        return Verdict("error", f"{type(error).__name__}: {str(error)[:300]}")
    bound, higher = _brute(example, y, *_gaussian(params), 8 if fitted else 0)
    reported = -float(loss)
    tolerance = EXACT if example.exact else CLOSE
    said = f"{reported:.6f}, by brute force {bound:.6f}, nearby higher by {higher:.4f}"
    off = abs(reported - bound) > tolerance * max(1, abs(bound) / 10)
    off |= fitted and higher > CLOSE
    if not off:
        return Verdict("right", said)
    if not fitted:
        return verdict(example)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        errors = svi.posterior(result).quadrature_errors
    warned = max(errors.values(), default=0) > MOST_ERROR
    return Verdict("warned" if warned else "wrong", said)


def _any_gaussian(size: int) -> dict[str, np.ndarray]:
    """Natural parameters of some Gaussian on all latents, by name of param."""
    rng = np.random.default_rng(size)
    half = rng.normal(size=(size, size))
    return {
        "latents_auto_potential": rng.normal(size=size),
        "latents_auto_precision": np.eye(size) + half @ half.T,
    }


def _gaussian(params: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Mean and covariance of the standard normal numbers of all latents."""
    names = {k.rsplit("_", 1)[-1]: np.asarray(x) for k, x in params.items()}
    covariance = np.linalg.inv(names["precision"])
    mean = names.get("centre", 0) + covariance @ names["potential"]
    return mean, covariance


def _brute(
    example: Example, y: Array, mean: np.ndarray, covariance: np.ndarray, near: int
) -> tuple[float, float]:
    """Return the bound of a Gaussian, and by how much the bound of one of several near
    ones is higher.
    """
    size = len(mean)
    x, weights = np.polynomial.hermite_e.hermegauss(NODES[size])
    nodes = np.stack([g.ravel() for g in np.meshgrid(*[x] * size)], -1)
    weights = np.prod([g.ravel() for g in np.meshgrid(*[weights] * size)], 0)
    weights = weights / weights.sum()

    def density(z: Array) -> Array:
        values, begin = {}, 0
        for name, (shape, loc, scale) in example.sites.items():
            end = begin + int(np.prod(shape))
            values[name] = loc + scale * z[begin:end].reshape(shape)
            begin = end
        return example.log_likelihood(values, y)

    many = jax.jit(jax.vmap(density))
    rng, found = np.random.default_rng(0), []
    factor = np.linalg.cholesky(covariance)
    for trial in range(1 + near):
        shift = 0 if not trial else 0.15 * factor @ rng.normal(size=size)
        scaled = factor * np.exp(0 if not trial else 0.1 * rng.normal())
        average = weights @ np.asarray(many(mean + shift + nodes @ scaled.T))
        m, S = mean + shift, scaled @ scaled.T
        kl = (np.trace(S) + m @ m - size) / 2 - np.log(np.diag(scaled)).sum()
        found.append(average - kl)
    return found[0], max(found) - found[0]


def run(first: int, number: int, *, fitted: bool = True) -> Counter[str]:
    """Count the verdicts on programs, and print the wrong ones.

    :param first: the first program.
    :param number: how many there are.
    :param fitted: see :func:`verdict`.
    """
    counts: Counter[str] = Counter()
    for case in range(first, first + number):
        with enable_x64(True):
            example = random_program(np.random.default_rng(case))
            found = verdict(example, fitted=fitted)
        counts[found.kind] += 1
        if found.kind in ("wrong", "error"):
            print(f"{case} {found.kind}: {example.said}\n    {found.said}", flush=True)
        if case % 100 == 99:
            jax.clear_caches()
    return counts


def main(argv: list[str] | None = None) -> int:
    """Print verdicts, and fail if a program is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--number", type=int, default=200)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--bounds", action="store_true", help="do not fit")
    options = parser.parse_args(argv)
    counts = run(options.first, options.number, fitted=not options.bounds)
    total = sum(counts.values())
    kinds = "right", "refused", "warned", "wrong", "error"
    print(", ".join(f"{counts[k]} {k}" for k in kinds))
    print(f"refused: {counts['refused'] / total:.1%} of {total}")
    return int(counts["wrong"] + counts["error"] > 0)


if __name__ == "__main__":
    sys.exit(main())
