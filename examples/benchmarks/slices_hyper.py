# SPDX-License-Identifier: Apache-2.0
r"""Slice moves of hyperparameters at fixed white noise, beside NUTS: why
``NestedVI(correct="mcmc")`` runs NUTS.

The sampler, which is not part of the package: latents are ``z = m(theta) + W(theta)'
u``, with the Gaussian that is fitted at each theta, so that the posterior of theta and
the noise u is nearly a product. A draw is ``--ellipses`` elliptical slice moves of u at
fixed theta, and one univariate slice move (steps out, then shrinkage; Neal, 2003) of
each hyperparameter at fixed u, along the axes of the curvature at the mode; the
determinant of W counts. ``following`` fits the Gaussian anew at every theta; ``fixed``
has that of the mode everywhere, as the NUTS of ``correct="mcmc"`` has. NUTS runs on the
whitened model, as in ``nested.py``. Four chains at once, all from the draws of a
``NestedVI`` run. ``worth`` is the smallest number of effective draws over all latents
and hyperparameters, ``per second`` that over the seconds of compiled drawing, ``ratio``
NUTS's ``per second`` over it: the slices are good enough where it is at most 2::

    GPAUG_DATA=/path/to/data python examples/benchmarks/slices_hyper.py
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from agreement import of_chains
from common import print_table, write_report
from jax import Array, lax, random
from nested import CHAINS, for_nuts, problem
from numpyro.infer import MCMC, NUTS

import numpyro_gpaug as gpaug
from numpyro_gpaug.infer.nested.programs import ENOUGH

COLUMNS = {"data": "", "method": "", "latents": "d", "hyper": "d", "draws": "d"}
COLUMNS |= {"evaluations": ".1f", "worth": ".0f", "per second": ".1f", "ratio": ".1f"}
# Of a slice in units of the curvature's standard deviations, and steps out of it.
WIDTH, STEPS_OUT = 2.0, 4


def slice_move(key: Array, x: Array, log_density: Any) -> tuple[Array, Array]:
    """A univariate slice move from zero, by how much and in how many evaluations."""
    keys = random.split(key, 4)
    level = log_density(x * 0.0) + jnp.log(random.uniform(keys[0]))
    left = -WIDTH * random.uniform(keys[1])
    outwards = random.randint(keys[2], (), 0, STEPS_OUT)

    def out(sign: int, begin: Array, most: Array) -> tuple[Array, Array]:
        def wider(at: tuple[Array, Array]) -> Array:
            return (at[1] < most) & (log_density(at[0]) > level)

        return lax.while_loop(
            wider, lambda at: (at[0] + sign * WIDTH, at[1] + 1), (begin, jnp.int32(0))
        )

    low, lower = out(-1, left, outwards)
    high, higher = out(1, left + WIDTH, STEPS_OUT - 1 - outwards)

    def outside(at: Any) -> Array:
        return ~at[3]

    def shrink(at: Any) -> Any:
        low, high, _, _, num = at
        draw = random.uniform(random.fold_in(keys[3], num), (), x.dtype, low, high)
        inside = log_density(draw) > level
        low, high = jnp.where(draw < 0, draw, low), jnp.where(draw < 0, high, draw)
        return low, high, draw, inside | (num > 50), num + 1

    start = low, high, jnp.zeros_like(low), jnp.array(False), jnp.int32(0)
    *_, found, _, num = lax.while_loop(outside, shrink, start)
    return jnp.where(num > 50, 0.0, found), lower + higher + num + 3


def ellipse_move(key: Array, noise: Array, log_ratio: Any) -> tuple[Array, Array]:
    """An elliptical slice move (Murray, Adams and MacKay, 2010)."""
    keys = random.split(key, 4)
    other = random.normal(keys[0], noise.shape, noise.dtype)
    level = log_ratio(noise) + jnp.log(random.uniform(keys[1]))
    angle = random.uniform(keys[2], (), noise.dtype, 0.0, 2 * jnp.pi)

    def at(angle: Array) -> Array:
        return jnp.cos(angle) * noise + jnp.sin(angle) * other

    def shrink(state: Any) -> Any:
        low, high, angle, num = state
        low, high = jnp.where(angle < 0, angle, low), jnp.where(angle < 0, high, angle)
        drawn = random.uniform(random.fold_in(keys[3], num), (), noise.dtype, low, high)
        return low, high, drawn, num + 1

    *_, angle, num = lax.while_loop(
        lambda s: (log_ratio(at(s[2])) <= level) & (s[3] < 50), shrink,
        (angle - 2 * jnp.pi, angle, angle, jnp.int32(1)),
    )  # fmt: skip
    return at(angle), num


def sampler(run: Any, ellipses: int, following: bool) -> Any:
    """A compiled run of slices: from a key, coordinates and noise by chain."""
    programs, law = run.programs, run.modes[0].component
    dtype = programs.hyper.dtype
    centre, axes = (jnp.asarray(x, dtype) for x in law[:2])
    start = jax.tree.map(lambda x: x[0], run.start)

    def sample(key: Array, place: Array, noise: Array, arrays: Any, num: int) -> Any:
        def gaussian(place: Array) -> Any:
            point = centre + axes @ (place if following else 0 * place)
            values, _ = programs.hyper.values(point, arrays)
            found = programs.bound.problem(values, arrays, learns=False)
            return programs.bound.settle(found, start, ENOUGH).moments

        kept = None if following else gaussian(jnp.zeros(len(centre), dtype))

        def target(q: Any, place: Array, noise: Array) -> tuple[Array, Array]:
            z = q.mean[0] + q.spread(noise[None])[0]
            density = programs.log_joint(centre + axes @ place, z, arrays)
            density = jnp.where(jnp.isfinite(density), density, -jnp.inf)
            return density + 0.5 * q.log_det[0], z

        def draw(state: tuple[Array, Array], key: Array) -> Any:
            place, noise = state
            count = jnp.int32(0)
            q = gaussian(place) if following else kept
            for k in range(ellipses):
                noise, num = ellipse_move(
                    random.fold_in(key, k), noise,
                    lambda u: target(q, place, u)[0] + 0.5 * jnp.square(u).sum(),
                )  # fmt: skip
                count += num
            for k in range(len(centre)):

                def along(step: Array, k: int = k, place: Array = place) -> Array:
                    there = place.at[k].add(step)
                    own = gaussian(there) if following else kept
                    return target(own, there, noise)[0]

                moved, num = slice_move(
                    random.fold_in(key, ellipses + k), place[k], along
                )
                place, count = place.at[k].add(moved), count + num
            q = gaussian(place) if following else kept
            z = target(q, place, noise)[1]
            return (place, noise), (centre + axes @ place, z, count)

        return lax.scan(draw, (place, noise), random.split(key, num))

    return jax.jit(jax.vmap(sample, (0, 0, 0, None, None)), static_argnums=4)


def by_slices(run: Any, names: Any, args: Any, following: bool) -> dict[str, Any]:
    """Effective draws, seconds and evaluations of slices."""
    sample = sampler(run, args.ellipses, following)
    rng, draws = np.random.default_rng(0), run.weighted.log_ratios.shape[1]
    chosen = run.weighted.resampled(CHAINS, rng) // draws
    law = run.modes[0].component
    place = jnp.asarray(
        law.along(run.weighted.points[chosen]), run.programs.hyper.dtype
    )
    noise = random.normal(random.key(1), (CHAINS, run.programs.structure.size))
    keys = random.split(random.key(2), (2, CHAINS))
    # Compiles, and warms up.
    state, _ = sample(keys[0], place, noise, run.arrays, args.draws)
    jax.block_until_ready(state)
    start = time.perf_counter()
    _, (points, z, count) = sample(keys[1], *state, run.arrays, args.draws)
    jax.block_until_ready(points)
    seconds = time.perf_counter() - start
    flat = (np.asarray(x).reshape(-1, x.shape[-1]) for x in (points, z))
    sites = run.at(*flat)
    shape = CHAINS, args.draws
    found = {k: np.asarray(x).reshape(*shape, *x.shape[1:]) for k, x in sites.items()}
    _, worth = of_chains(found, names)
    return {
        "draws": CHAINS * args.draws, "evaluations": float(count.mean()),
        "worth": worth, "per second": worth / seconds,
    }  # fmt: skip


def nuts_speed(model: Any, data: Any, names: Any, draws: int) -> tuple[float, float]:
    """Effective draws, and how many in a second of compiled drawing."""
    kernel = NUTS(model)
    mcmc = MCMC(
        kernel, num_warmup=draws, num_samples=1, num_chains=CHAINS,
        chain_method="vectorized", progress_bar=False,
    )  # fmt: skip
    mcmc.warmup(random.key(0), **data)

    @jax.jit
    def drawn(state: Any) -> Any:
        def draw(state: Any, _: None) -> Any:
            state = kernel.sample(state, (), data)
            return state, state.z

        return lax.scan(draw, state, None, length=draws)

    # MCMC.run compiles anew each time. The first of these compiles.
    state, _ = jax.block_until_ready(drawn(mcmc.post_warmup_state))
    start = time.perf_counter()
    _, free = jax.block_until_ready(drawn(state))
    seconds = time.perf_counter() - start
    values = jax.jit(jax.vmap(jax.vmap(kernel.postprocess_fn((), data))))(free)
    found = {k: np.swapaxes(np.asarray(x), 0, 1) for k, x in values.items()}
    _, worth = of_chains(found, names)
    return worth, worth / seconds


def rows_of(name: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    model, data = problem(name)
    nested = gpaug.NestedVI(model, num_points=128, progress_bar=False)
    nested.run(random.key(0), **data)
    run, names = nested._run, set(nested.latents)
    size = {"data": name, "latents": run.programs.structure.size}
    size["hyper"] = run.programs.hyper.size
    worth, speed = nuts_speed(for_nuts(model), data, names, args.draws)
    rows = [
        size
        | {"method": "NUTS", "draws": CHAINS * args.draws}
        | {"worth": worth, "per second": speed}
    ]
    for following in (True, False):
        found = by_slices(run, names, args, following)
        method = "slices, " + ("following" if following else "fixed")
        ratio = {"ratio": speed / found["per second"]}
        rows.append(size | {"method": method} | found | ratio)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    known = ["seeds", "eight_schools", "cbpp", "sleepstudy", "gp_logistic100"]
    parser.add_argument("--data", nargs="+", default=known)
    parser.add_argument("--draws", type=int, default=500)
    parser.add_argument("--ellipses", type=int, default=2)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    rows = []
    for name in args.data:
        rows += rows_of(name, args)
        print_table([r for r in rows if r["data"] == name], COLUMNS)
        write_report(args.json, rows)


if __name__ == "__main__":
    main()
