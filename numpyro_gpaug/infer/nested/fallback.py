# SPDX-License-Identifier: Apache-2.0
"""MCMC chains that start from weighted draws whose weights are too uneven."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, random
from numpyro.diagnostics import effective_sample_size, split_gelman_rubin
from numpyro.infer import MCMC, NUTS

from numpyro_gpaug._display import entries
from numpyro_gpaug._numpyro import one_thread
from numpyro_gpaug.infer.nested.draws import Run
from numpyro_gpaug.math.importance import varying
from numpyro_gpaug.model.arguments import Values
from numpyro_gpaug.predict.summary import levels_of

CHAINS, WARMUP = 4, 500


@dataclass
class Corrected(Run):
    """Draws of chains, together with the weighted draws that they started from.

    :param chain_points: unconstrained hyperparameters, (chains * num, d).
    :param chain_z: whitened latents, (chains * num, size).
    """

    chain_points: Any = None
    chain_z: Any = None

    def samples(self, num: int) -> Values:
        return self.at(self.chain_points, self.chain_z)

    def points(self) -> tuple[np.ndarray, np.ndarray]:
        return self.chain_points, np.zeros(len(self.chain_points))

    def table(self, prob: float = 0.9) -> dict[str, list[float]]:
        sites = self.at(self.chain_points, self.chain_z)
        rows = {}
        for name, values in self.shown(sites).items():
            for label, place in entries(name, values.shape[1:]):
                x = values[(slice(None), *place)]
                (moves,) = varying(x[:, None])
                x = x.astype(float)
                worth = effective_sample_size(x.reshape(self.num_chains, -1))
                quantiles = np.quantile(x, (*levels_of(prob).values(),))
                known = (x.std(), worth) if moves else (0.0, np.nan)
                rows[label] = [x.mean(), known[0], *quantiles, float(known[1])]
        return rows


@one_thread
def corrected(
    run: Run, key: Array, num_samples: int, *, progress_bar: bool
) -> Corrected:
    """Run NUTS on the model itself, in coordinates in which the Gaussian at the mode is
    standard normal. They stand for whitened latents: numbers along chains follow the
    hyperparameters, without which a smooth process has next to no density.

    :param run: the weighted draws; chains start at its hyperparameters.
    :param key: random key.
    :param num_samples: the number of draws of all chains together.
    :param progress_bar: whether to show one.
    """
    programs, data, component = run.programs, run.data, run.modes[0].component
    dtype = programs.hyper.dtype
    centre, axes = (jnp.asarray(x, dtype) for x in component[:2])

    at_mode = programs.evaluate(
        component.mode[None], run.starts[0], data, gradient=True
    )
    q = jax.tree.map(lambda x: x[0], at_mode.moments)
    mode = jnp.asarray(component.mode, dtype)
    prior = jax.jit(programs.prior)(mode, data)

    def placed(draw: dict[str, Array]) -> tuple[Array, Array]:
        white = programs.white(prior, q, draw["noise"])
        return centre + axes @ draw["hyper"], white

    # NumPyro initialises chains operation by operation.
    @jax.jit
    def potential(draw: dict[str, Array]) -> Array:
        return -programs.log_joint(*placed(draw), data)

    rng = np.random.default_rng(run.seed)
    chosen = run.weighted.resampled(CHAINS, rng) // run.weighted.log_ratios.shape[1]
    white = component.along(run.weighted.points[chosen])
    noise_key, chain_key = random.split(random.fold_in(key, 5))
    shape = CHAINS, programs.structure.form.rank
    start = {
        "hyper": jnp.asarray(white, dtype),
        "noise": random.normal(noise_key, shape, programs.structure.dtype),
    }
    kernel = NUTS(potential_fn=potential, target_accept_prob=0.9)
    mcmc = MCMC(
        kernel, num_warmup=WARMUP, num_samples=-(-num_samples // CHAINS),
        num_chains=CHAINS, chain_method="vectorized", progress_bar=progress_bar,
    )  # fmt: skip
    mcmc.run(chain_key, init_params=start, extra_fields=("diverging",))

    points, z = jax.jit(jax.vmap(placed))(mcmc.get_samples())
    by_chain = mcmc.get_samples(group_by_chain=True)
    rhat = max(float(np.max(split_gelman_rubin(np.asarray(x)))) for x in
               by_chain.values() if x.size)  # fmt: skip
    diverging = int(np.sum(mcmc.get_extra_fields()["diverging"]))
    said = (
        f"The draws are from NUTS on the whitened model instead, {CHAINS} chains with "
        f"{WARMUP} steps of warm-up and {len(points) // CHAINS} draws, started at the "
        f"weighted draws; largest r-hat {rhat:.2f}, {diverging} divergences. The "
        "evidence is from the weighted draws, and is not reliable"
    )
    kept = vars(run) | {
        "num_chains": CHAINS, "correction": said,
        "chain_points": np.asarray(points, float), "chain_z": np.asarray(z),
    }  # fmt: skip
    return Corrected(**kept)
