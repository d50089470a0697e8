# SPDX-License-Identifier: Apache-2.0
"""The compiled parts of a run: the collapsed density and its gradient, weighted draws
of the latents, and the values of a model's sites at draws."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax, random

from numpyro_gpaug._numpyro import one_thread
from numpyro_gpaug.infer.nested.bound import CollapsedBound, Start
from numpyro_gpaug.infer.nested.hyperparameters import Hyperparameters
from numpyro_gpaug.math.compiling import Compiled
from numpyro_gpaug.math.importance import compensated_sum
from numpyro_gpaug.model.latents import whitened
from numpyro_gpaug.model.structure import Arguments, Trace, run_model

# Numbers held at once while draws are made.
BUDGET = 2**21
LARGEST_CHUNK = 64
# The rise in nats that ends the moves before draws, which are weighed whatever they are
# from.
ENOUGH = 1e-3


class Drawn(NamedTuple):
    """Draws of the latents at hyperparameters; every array has a leading axis of these.

    :param z: whitened latents, (draws, size).
    :param log_prior: log-density of the unconstrained hyperparameters.
    :param bound: the collapsed bound, without it.
    :param log_det: logarithm of the determinant of the Gaussian's covariance.
    :param total: of each draw the log-density of data and latents less that of the
        draw, but for the determinant; (draws,).
    :param lost: what the rounding of ``total`` lost.
    """

    z: Array
    log_prior: Array
    bound: Array
    log_det: Array
    total: Array
    lost: Array


class Programs:
    """What is compiled for a model at arguments of certain shapes.

    :param bound: the collapsed bound of the model.
    :param arguments: its arguments.
    :param num_draws: of the latents at each point.
    """

    def __init__(
        self, bound: CollapsedBound, arguments: Arguments, num_draws: int
    ) -> None:
        self.bound, self.static = bound, arguments.static
        self._model, self.structure = bound.guide.model, bound.structure
        self.hyper = Hyperparameters(self._model, self.structure, arguments)
        self.num_draws = num_draws
        size, rows = self.structure.size, sum(x.size for x in arguments.arrays)
        held = 4 * size**2 + 2 * size * rows + num_draws * (size + rows)
        self.chunk = max(1, min(LARGEST_CHUNK, BUDGET // held))
        # One thread at a time traces the model.
        self.evaluate: Any = one_thread(Compiled(self._evaluate))
        self.draw: Any = one_thread(Compiled(self._draw))
        self.gaussians: Any = one_thread(Compiled(self._gaussians))
        self.sites: Any = one_thread(
            Compiled(self._sites, static_argnames="deterministic")
        )

    @one_thread
    def no_start(self, arrays: Any) -> Start:
        """A start for the first evaluation."""
        return self.bound.no_start(*self._shapes(arrays))

    def _shapes(self, arrays: Any) -> Any:
        point = jax.ShapeDtypeStruct((self.hyper.size,), self.hyper.dtype)
        values = jax.eval_shape(lambda u: self.hyper.values(u, arrays)[0], point)
        return values, arrays

    def _evaluate(
        self, point: Array, start: Start, arrays: Any
    ) -> tuple[Array, Array, Start]:
        """The log-density of unconstrained hyperparameters, its gradient, and where the
        Gaussian ended.

        :param point: (d,).
        :param start: where it starts.
        :param arrays: array arguments of the model.
        """
        both = jax.vjp(lambda u: self.hyper.values(u, arrays), point)
        (values, log_prior), pull = both
        bound, gradient, found = self.bound.with_gradient(values, arrays, start)
        moved = {k: jnp.asarray(gradient[k], x.dtype) for k, x in values.items()}
        (ascent,) = pull((moved, jnp.ones_like(log_prior)))
        return bound + log_prior, ascent, Start(found.factors, jnp.array(True))

    def log_terms(
        self, values: dict[str, Array], z: Array, arrays: Any
    ) -> tuple[Array, Trace]:
        """Log-densities of all data given hyperparameters and latents, flat, and the
        trace that they are from."""
        model = whitened(self._model, self.structure.split(z), self.structure.steps)
        arguments = Arguments(arrays, self.static)
        trace = run_model(model, arguments, random.key(0), values)
        terms = []
        for site in self.structure.observed:
            message = trace[site.name]
            density = message["fn"].log_prob(message["value"])
            scale = message["scale"]
            density = density if scale is None else density * scale
            terms.append(jnp.ravel(density).astype(self.structure.dtype))
        return jnp.concatenate(terms), trace

    def weigh(
        self,
        point: Array,
        noise: Array,
        widths: Array,
        start: Start,
        arrays: Any,
    ) -> Drawn:
        """Draws of the latents at one point.

        :param point: unconstrained hyperparameters, (d,).
        :param noise: standard normal, (draws, size).
        :param widths: by how much wider than the Gaussian each is drawn, (draws,).
        :param start: where the Gaussian starts.
        :param arrays: array arguments of the model.
        """
        values, log_prior = self.hyper.values(point, arrays)
        found = self.bound.settle(
            self.bound.problem(values, arrays, learns=False), start, ENOUGH
        )
        q = found.moments
        z = q.mean + q.spread(widths[:, None] * noise)

        def terms(z: Array, noise: Array, width: Array) -> tuple[Array, Array]:
            # Both Gaussian log-densities at once: their difference is small.
            white = self.structure.white(z)
            latents = 0.5 * (noise - white) * (noise + white) + jnp.log(width)
            data, _ = self.log_terms(values, z, arrays)
            return compensated_sum(jnp.concatenate([data, latents]))

        total, lost = jax.vmap(terms)(z, noise, widths)
        bound = found.evaluation.bound
        return Drawn(z, log_prior, bound, q.log_det[0], total, lost)

    def _draw(
        self, points: Array, keys: Array, widths: Array, start: Start, arrays: Any
    ) -> Drawn:
        shape = self.num_draws, self.structure.size

        def one(each: tuple[Array, Array, Array]) -> Drawn:
            point, key, widths = each
            noise = random.normal(key, shape, self.structure.dtype)
            return self.weigh(point, noise, widths, start, arrays)

        return self._each(one, (points, keys, widths))

    def _gaussians(self, points: Array, start: Start, arrays: Any) -> Any:
        """Hyperparameters by name, and the moments of the Gaussian given them.

        :param points: unconstrained, (n, d).
        :param start: where the Gaussian starts.
        :param arrays: array arguments of the model.
        """

        def one(point: Array) -> Any:
            values, _ = self.hyper.values(point, arrays)
            problem = self.bound.problem(values, arrays, learns=False)
            return values, self.bound.settle(problem, start).moments

        return self._each(one, points)

    def _each(self, function: Callable[[Any], Any], draws: Any) -> Any:
        """One after the other on a CPU, which compiles in half the time and takes as
        long; in batches elsewhere."""
        batch = None if jax.default_backend() == "cpu" else self.chunk
        return lax.map(function, draws, batch_size=batch)

    def log_joint(self, point: Array, z: Array, arrays: Any) -> Array:
        """Log-density of data, whitened latents and unconstrained hyperparameters, up
        to a constant."""
        values, log_prior = self.hyper.values(point, arrays)
        data, _ = self.log_terms(values, z, arrays)
        white = self.structure.white(z)
        return data.sum() + log_prior - 0.5 * jnp.square(white).sum()

    def _sites(
        self, points: Array, z: Array, arrays: Any, *, deterministic: bool
    ) -> dict[str, Array]:
        """Values of all sites at draws.

        :param points: (n, d).
        :param z: (n, size).
        :param arrays: array arguments of the model.
        :param deterministic: whether also those of deterministic sites.
        """
        observed = {site.name for site in self.structure.observed}
        kinds = {"sample", "deterministic"} if deterministic else {"sample"}

        def one(draw: tuple[Array, Array]) -> dict[str, Array]:
            values, _ = self.hyper.values(draw[0], arrays)
            _, trace = self.log_terms(values, draw[1], arrays)
            return {
                k: site["value"]
                for k, site in trace.items()
                if site["type"] in kinds and k not in observed
            }

        return self._each(one, (points, z))

    @cached_property
    def collapsed(self) -> Callable[..., Any]:
        """The log-density of unconstrained hyperparameters, for NUTS."""

        def density(point: Array, arrays: Any) -> Array:
            values, log_prior = self.hyper.values(point, arrays)
            steps = self.hyper.steps(values, arrays)
            return self.bound(values, steps, arrays) + log_prior

        return density
