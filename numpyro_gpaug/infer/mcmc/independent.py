# SPDX-License-Identifier: Apache-2.0
"""Independent Gaussians on processes and weight vectors that share no predictor."""

from __future__ import annotations

import jax.numpy as jnp

from numpyro_gpaug.gaussians.dense import AffineMap, Moments
from numpyro_gpaug.infer.vi.latent_gaussian import LatentGaussian, Natural
from numpyro_gpaug.infer.vi.settling import settled
from numpyro_gpaug.model.latents import GaussianSite, JointStructure
from numpyro_gpaug.model.structure import Structure
from numpyro_gpaug.model.view import ModelView

# The gain in nats below which closed-form updates stop.
LEAST_GAIN = 1e-3


def structure_of(blocks: Structure) -> JointStructure:
    """Return the structure of a model with its processes and weight vectors as the
    sites of a joint Gaussian."""
    sites = [GaussianSite(b.site, b.shape, b.shape, local=False) for b in blocks.blocks]
    return JointStructure(
        blocks=(),
        others=blocks.others,
        observed=blocks.observed,
        plates=blocks.plates,
        functions=blocks.functions,
        constraints=blocks.constraints,
        dtype=jnp.result_type(*(b.dtype for b in blocks.blocks)),
        process_names=blocks.process_names,
    ).with_sites(tuple(sites))


def best_gaussians(maps: dict[str, AffineMap], view: ModelView) -> dict[str, Moments]:
    """Return the Gaussians that maximise the evidence lower bound, by block. They are
    found by closed-form updates from the prior.

    :param maps: maps from inducing vectors to function values, by process.
    :param view: the model.
    """
    problem = LatentGaussian(
        maps=maps | view.weight_maps(),
        priors=view.priors(),
        scales={b.name: view.block_scale(b) for b in view.structure.blocks},
        latents={},
        coupled=(),
        likelihood=view.expected("exact"),
        constant=0.0,
        unreached={},
    )
    start: Natural = {k: prior.natural for k, prior in problem.priors.items()}
    steps = {name: jnp.ones((), problem.dtype) for name in start}
    _, evaluation, _ = settled(
        problem, start, steps, 1.0, lambda moves: None, LEAST_GAIN
    )
    return evaluation.moments
