# SPDX-License-Identifier: Apache-2.0
"""The compiled parts of a run: the Gaussian at hyperparameters, with the collapsed
density and its gradient; weighted draws of the latents from it; and the values of a
model's sites at draws.

Compilation takes most of a short run. One program therefore finds the Gaussian for
every purpose: the search, draws, predictions."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax, random

from numpyro_gpaug._numpyro import one_thread
from numpyro_gpaug.gaussians.base import GroupsPrior, drawn_white
from numpyro_gpaug.gaussians.dense import Moments
from numpyro_gpaug.infer.nested.annealing import State, hamiltonian
from numpyro_gpaug.infer.nested.bound import (
    TOLERANCE,
    CollapsedBound,
    Start,
    log_factors,
    moments_given,
    moved_to,
)
from numpyro_gpaug.infer.nested.group_draws import GroupDraws, weigh_groups
from numpyro_gpaug.infer.nested.hyperparameters import Hyperparameters, compiled
from numpyro_gpaug.likelihoods.expectations import stable_log_prob
from numpyro_gpaug.math.arrays import in_blocks
from numpyro_gpaug.math.compiling import SMALL, jit, jit_for_few_runs
from numpyro_gpaug.math.importance import compensated_sum
from numpyro_gpaug.model.arguments import Arguments, Values
from numpyro_gpaug.model.closures import watched
from numpyro_gpaug.model.columns import Labels
from numpyro_gpaug.model.costs import densities
from numpyro_gpaug.model.joint import JointView
from numpyro_gpaug.model.labels import labelled_axes
from numpyro_gpaug.model.latents import JOINT
from numpyro_gpaug.model.sources import names_of_arrays
from numpyro_gpaug.model.structure import Trace, run_model
from numpyro_gpaug.model.whitened import whitened

# The largest number of values that are held at once while draws are made.
BUDGET = 2**21
LARGEST_CHUNK = 64
# The largest numbers of data, and of entries of covariances, of one evaluation of the
# Gaussian at several points on a CPU. They are small because arguments are copied for
# each point.
MOST_ROWS, MOST_ENTRIES = 2**11, 2**15
# The largest number of values that draws at one point keep of deterministic sites. With
# more, the model runs again for the draws that are returned.
KEPT = 2**14
# The factor by which a run evaluates more expected log-likelihoods than a single fit.
EVALUATIONS = 8
# The increase in nats below which updates stop before draws. Draws are weighted
# whatever Gaussian they come from: an error of this size reduces the effective sample
# size by 2%.
ENOUGH = 1e-2


class PriorAt(NamedTuple):
    """The prior of the latents at hyperparameters.

    :param prior: the prior.
    :param links: transition matrices by chain.
    """

    prior: Any
    links: Any


class Evaluated(NamedTuple):
    """The Gaussian at hyperparameters; every array has a leading axis of these.

    :param bound: the collapsed bound.
    :param log_prior: log-density of the unconstrained hyperparameters.
    :param ascent: the gradient of the sum of both, (d,); zero unless requested.
    :param loss: the increase of the bound during the search.
    :param values: constrained hyperparameters by name.
    :param factors: the Gaussian factors that replace the likelihood.
    :param moments: moments of the Gaussian.
    """

    bound: Array
    log_prior: Array
    ascent: Array
    loss: Array
    values: Values
    factors: Any
    moments: Any


class Drawn(NamedTuple):
    """Draws of the latents at hyperparameters; every array has a leading axis of these.

    :param log_prior: log-density of the unconstrained hyperparameters.
    :param z: whitened latents, (draws, size).
    :param log_det: logarithm of the determinant of the Gaussian's covariance.
    :param total: log-density of data and latents minus the log-density of the draw,
        without the determinant; (draws,).
    :param lost: the rounding error of ``total``; of annealed draws also the mean rise
        of the log-weight in their moves.
    :param sites: values by name, (draws, ...); of deterministic sites, and of whitened
        inducing values, in a tuple, which is empty if they are large.
    """

    log_prior: Array
    z: Array
    log_det: Array
    total: Array
    lost: Array
    sites: dict[str, Any]


class Programs:
    """The compiled programs of a model at arguments of certain shapes.

    :param bound: the collapsed bound of the model.
    :param arguments: its arguments.
    :param num_draws: draws of the latents at each point.
    """

    def __init__(
        self, bound: CollapsedBound, arguments: Arguments, num_draws: int
    ) -> None:
        self.bound = bound
        self._model, self.structure = bound.guide.model, bound.structure
        self.version = watched(self._model).version()
        self.hyper = Hyperparameters(self._model, self.structure, arguments)
        self.num_draws = num_draws
        self._no_start: Start | None = None
        self._axes: dict[Any, dict[str, tuple[str, ...]]] = {}
        size, rows = self.structure.size, sum(x.size for x in arguments.arrays)
        # If points are taken one after another, only one of them has matrices in
        # memory.
        one_by_one = jax.default_backend() == "cpu"
        matrices = 0 if one_by_one else 4 * size**2 + 2 * size * rows
        held = matrices + num_draws * (size + rows)
        self.chunk = max(1, min(LARGEST_CHUNK, BUDGET // held))
        self.batch = self.chunk
        if one_by_one:
            # A call takes a millisecond, as long as ten evaluations of small models.
            few = min(MOST_ROWS // max(rows, 1), MOST_ENTRIES // max(size, 1) ** 2)
            self.batch = max(1, min(self.chunk, few))
        # Numerous evaluations pay for the time to compile.
        quick = densities(self.structure) * EVALUATIONS < SMALL
        settling = partial(jit, small=SMALL if quick else 0)
        self._settle = self._mapped(self._evaluate, settling)
        ways = self._draw, self._draw_annealed, self._draw_apart, self._draw_mixed
        self.draw, self.draw_annealed, self.draw_apart, self.draw_mixed = (
            self._mapped(way, jit) for way in ways
        )
        self._terms = compiled(self._terms_at)
        self.from_white = compiled(self._from_white)
        self.factors_at = compiled(self._factors_at)
        self.drawn = compiled(self._drawn)
        self._at_draws = self._mapped(self._sites, jit_for_few_runs)

    @one_thread
    def axes(self, data: Arguments, labels: Labels) -> dict[str, tuple[str, ...]]:
        """Return, by site, the argument with labels that indexes each axis; see
        :func:`~numpyro_gpaug.model.labels.labelled_axes`.

        :param data: the model's arguments.
        :param labels: labels by argument.
        """

        def view(data: Arguments) -> JointView:
            zeros = jnp.zeros(self.hyper.size, self.hyper.dtype)
            return self.bound.view(self.hyper.values(zeros, data)[0], data)

        key = tuple(sorted(labels.items()))
        if key not in self._axes:
            with self.version.running():
                names = names_of_arrays(self._model, *data.merge())
                self._axes[key] = labelled_axes(view, data, names, labels)
        return self._axes[key]

    @one_thread
    def no_start(self, data: Arguments) -> Start:
        """Return a start for the first evaluation."""
        if self._no_start is None:
            shapes = self.bound.shapes(self.hyper.shapes, data)
            zeros = jax.tree.map(lambda s: np.zeros((1, *s.shape), s.dtype), shapes)
            self._no_start = Start(zeros, np.zeros(1, bool))
        return self._no_start

    def evaluate(
        self,
        points: np.ndarray,
        start: Start,
        data: Arguments,
        *,
        gradient: bool,
        tolerance: float | None = None,
    ) -> Evaluated:
        """Return the Gaussian at unconstrained hyperparameters.

        :param points: points, (n, d), at most :attr:`batch`.
        :param start: the start at each point.
        :param data: the model's arguments.
        :param gradient: whether to compute the gradient, with a Gaussian that is
            accurate enough for it. Otherwise the Gaussian is accurate enough to draw
            from.
        :param tolerance: the accuracy in nats, if it is another one.
        """
        if tolerance is None:
            tolerance = TOLERANCE if gradient else ENOUGH
        points, num = np.asarray(points, self.hyper.dtype), len(points)
        if num == self.batch or (num == 1 and jax.default_backend() != "cpu"):
            return self._settle((points, start), num, data, tolerance, gradient)
        # The last point fills the batch.
        places = np.minimum(np.arange(self.batch), num - 1)
        filled = jax.tree.map(lambda x: x[places], (points, start))
        found = self._settle(filled, num, data, tolerance, gradient)
        return jax.tree.map(lambda x: np.asarray(x)[:num], found)

    def _evaluate(
        self, point: Array, start: Start, data: Arguments, tolerance: Any, asked: Any
    ) -> Evaluated:
        """Find the Gaussian at a point, see :meth:`evaluate`.

        :param asked: whether the gradient is computed.
        """
        both = jax.vjp(lambda u: self.hyper.values(u, data), point)
        (values, log_prior), pull = both
        bound, ascend, found = self.bound.with_pullback(values, data, start, tolerance)

        def ascent() -> Array:
            gradient = ascend()
            moved = {k: jnp.asarray(gradient[k], x.dtype) for k, x in values.items()}
            return pull((moved, jnp.ones_like(log_prior)))[0]

        ascended = lax.cond(asked, ascent, lambda: jnp.zeros_like(point))
        return Evaluated(
            bound, log_prior, ascended, found.evaluation.rise, values, found.factors,
            found.moments,
        )  # fmt: skip

    def terms(
        self, point: np.ndarray, factors: Any, noise: np.ndarray, data: Arguments
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return latents, (k, size), as the Gaussian at a point makes them from noise;
        log-densities of all data there, (k, n); and squared lengths of the whitened
        latents, (k,).

        :param point: unconstrained hyperparameters, (d,).
        :param factors: factors of the Gaussian, with a leading axis of 1.
        :param noise: noise, (k, rank), first that of independent groups.
        :param data: the model's arguments.
        """
        # As many as are drawn at once.
        z, terms, squares = in_blocks(
            lambda some: self._terms(point, factors, noise[some], data),
            len(noise), self.chunk * self.num_draws,
        )  # fmt: skip
        return z, terms, squares.astype(float)

    def _terms_at(
        self, point: Array, factors: Any, noise: Array, data: Arguments
    ) -> tuple[Array, Array, Array]:
        _, view, log_terms = self._at(point, data)
        form, noise = self.structure.form, noise.astype(self.structure.dtype)
        q = moments_given(jax.tree.map(lambda x: x[0], factors), view)
        apart = form.join_noise(*form.independent.split(noise))
        z, white, prior = self._drawn_latents(view, q, apart)
        return z, jax.vmap(lambda x: log_terms(x)[0])(white), -2 * prior.sum(-1)

    def _from_white(self, point: Array, white: Array, data: Arguments) -> Array:
        """Return latents, (k, size), from standard normal numbers, (k, rank)."""
        view, white = self._at(point, data)[1], white.astype(self.structure.dtype)
        if self.structure.fields:
            moments = view.prior.natural.moments()
            return moments.unwhiten(white[:, : moments.rank])
        return jax.vmap(lambda z: self.structure.linked(z, view.links))(white)

    def _factors_at(self, point: Array, factors: Any, z: Array, data: Arguments) -> Any:
        """Return factors with the widths of given ones, centred on latents (k, size),
        with a leading axis of length k. See
        :func:`~numpyro_gpaug.infer.nested.bound.moved_to`.

        :param factors: factors with a leading axis of 1.
        """
        map_ = self._at(point, data)[1].maps()[JOINT]
        factors = jax.tree.map(lambda x: x[0], factors)
        z = z.astype(self.structure.dtype)
        return jax.vmap(lambda z: moved_to(map_, factors, z[None]))(z)

    def gaussians(self, points: np.ndarray, start: Start, data: Arguments) -> Any:
        """Return the bound, hyperparameters by name, and the moments of the Gaussian
        given them, as accurate as after a fit; points first.

        :param points: unconstrained hyperparameters, (n, d).
        :param start: the start of the Gaussian, for one point.
        :param data: the model's arguments.
        """

        def at(here: np.ndarray, start: Start) -> Evaluated:
            many = jax.tree.map(lambda x: np.repeat(x, len(here), 0), start)
            return self.evaluate(here, many, data, gradient=False, tolerance=TOLERANCE)

        found = []
        for i in range(0, len(points), self.batch):
            here = points[i : i + self.batch]
            some = at(here, start)
            failed = ~np.isfinite(some.bound)
            if failed.any():
                some = chosen(failed, at(here, self.no_start(data)), some)
            found.append((some.bound, some.values, some.moments))
        bounds, values, moments = jax.tree.map(lambda *x: np.concatenate(x), *found)
        if self.structure.basis is not None:
            back = np.asarray(self.structure.matrix).T
            moments = Moments(moments.mean @ back, moments.whitener @ back)
        return bounds, values, moments

    def _log_terms(
        self, values: Values, white: Array, data: Arguments
    ) -> tuple[Array, Trace]:
        """Return log-densities of all data given hyperparameters and whitened latents,
        flat, and the trace of the model."""
        numbers = self.structure.split(white)
        model = whitened(self._model, numbers, self.structure.fields)
        trace = run_model(model, data, random.key(0), values)
        terms = []
        for site in self.structure.observed:
            message = trace[site.name]
            density = stable_log_prob(message["fn"], message["value"])
            scale = message["scale"]
            density = density if scale is None else density * scale
            terms.append(jnp.ravel(density).astype(self.structure.dtype))
        return jnp.concatenate(terms), trace

    def first(self, point: np.ndarray, data: Arguments) -> Any:
        """Return the natural parameters from which updates of the Gaussian start, by
        block.

        :param point: unconstrained hyperparameters, (d,).
        :param data: the model's arguments.
        """

        # Of a program, because distributions with concrete parameters refuse NaN.
        @jit
        def first(point: Array, data: Arguments) -> Any:
            values, _ = self.hyper.values(point, data)
            return self.bound.first(self.bound.problem(values, data, learns=False))

        return first(jnp.asarray(point, self.hyper.dtype), data)

    def trace(self, point: np.ndarray, data: Arguments) -> Trace:
        """Run the model at unconstrained hyperparameters, with its other latents drawn
        from their prior."""
        values, _ = self.hyper.values(jnp.asarray(point, self.hyper.dtype), data)
        return run_model(self._model, data, random.key(0), values)

    def _at(self, point: Array, data: Arguments) -> tuple[Array, JointView, Any]:
        """Return the log-density of unconstrained hyperparameters (d,), the view of the
        model there, and the log-densities of all data as a function of the whitened
        latents (size,), see :meth:`_log_terms`."""
        values, log_prior = self.hyper.values(point.astype(self.hyper.dtype), data)
        view = self.bound.view(values, data)

        def log_terms(white: Array) -> tuple[Array, Trace]:
            return self._log_terms(values, white, data)

        return log_prior, view, log_terms

    def _drawn_latents(
        self, view: JointView | PriorAt, q: Any, noise: Array
    ) -> tuple[Array, Array, Array]:
        """Return latents as a Gaussian makes them from noise (k, rank), whitened
        latents, and the terms of their prior, each (k, size)."""
        prior, z = view.prior, q.mean + q.unwhiten(noise)
        white = drawn_white(prior, q, noise)
        if white is None:
            white = jax.vmap(lambda z: self.structure.white(z, view.links))(z)
            return z, white, jax.vmap(prior.terms)(z)
        return z, white, -0.5 * jnp.square(white)

    def _draw(
        self, point: Array, factors: Any, noise: Array, widths: Array, data: Arguments
    ) -> Drawn:
        """Draw the latents at a point.

        :param point: unconstrained hyperparameters, (d,).
        :param factors: factors of the Gaussian.
        :param noise: standard normal numbers, (draws, size).
        :param widths: factors by which draws are wider than the Gaussian, (draws,).
        :param data: the model's arguments.
        """
        log_prior, view, log_terms = self._at(point, data)
        q = moments_given(factors, view)
        _, white, prior = self._drawn_latents(view, q, widths[:, None] * noise)

        def weighed(*draw: Array) -> tuple[Any, ...]:
            *sums, trace = _weighed(log_terms, *draw)
            return *sums, self._kept(trace)

        found = jax.vmap(weighed)(white, prior, noise, widths)
        return Drawn(log_prior, white, q.log_det[0] + view.prior.log_det, *found)

    def _draw_annealed(
        self,
        point: Array,
        factors: Any,
        noise: Array,
        widths: Array,
        seed: Array,
        data: Arguments,
        moves: Array,
    ) -> Drawn:
        """Draw like :meth:`_draw`, and move the draws towards the posterior: annealed
        importance sampling (Neal, 2001).

        With the log-weight w of a draw, move t of T leaves the density of the draw
        times ``exp(w t / (T + 1))`` unchanged (:func:`.annealing.hamiltonian`). The
        log-weight of the result is the mean of those of all T + 1 states.

        :param seed: the seed of the moves.
        :param moves: T.
        """
        log_prior, view, log_terms = self._at(point, data)
        q = moments_given(factors, view)

        def log_weight(noise: Array, width: Array) -> tuple[Array, Any]:
            _, white, prior = self._drawn_latents(view, q, (width * noise)[None])
            draw = white[0], prior[0], noise, width
            total, lost, _ = _weighed(log_terms, *draw)
            return total, (lost, white[0])

        def weigh(noise: Array, width: Array) -> State:
            both = jax.value_and_grad(log_weight, has_aux=True)(noise, width)
            (total, (lost, white)), slope = both
            return State(noise, total, lost, slope, white)

        def moved(key: Array, power: Array, at: State, width: Array) -> State:
            return hamiltonian(key, power, at, lambda noise: weigh(noise, width))

        def move(t: Array, carry: Any) -> Any:
            at, rises = carry
            key = random.fold_in(random.key(seed), t)
            power = jnp.asarray((t + 1) / (moves + 1), noise.dtype)
            keys = random.split(key, len(noise))
            at = jax.vmap(moved, (0, None, 0, 0))(keys, power, at, widths)
            # A weight of zero stays zero.
            rise = jnp.where(jnp.isfinite(first.total), at.rise_from(first), 0)
            return at, rises + rise

        first = jax.vmap(weigh)(noise, widths)
        none = jnp.zeros_like(first.total)
        last, rises = lax.fori_loop(0, moves, move, (first, none))
        sites = jax.vmap(lambda white: self._kept(log_terms(white)[1]))(last.white)
        lost = first.lost + rises / (moves + 1)
        log_det = q.log_det[0] + view.prior.log_det
        return Drawn(log_prior, last.white, log_det, first.total, lost, sites)

    def _draw_apart(
        self,
        point: Array,
        factors: Any,
        noise: Array,
        widths: Array,
        uniform: Array,
        data: Arguments,
        shift: Array,
        group: Any,
    ) -> Drawn:
        """Draw like :meth:`_draw`, with
        :func:`~numpyro_gpaug.infer.nested.group_draws.weigh_groups`.

        :param noise: standard normal numbers, (corners, K).
        :param widths: widths, (corners,).
        :param uniform: uniform numbers, (corners, G, R + 1).
        :param shift: shift of the border, (K,).
        :param group: the groups of the terms.
        """
        log_prior, view, log_terms = self._at(point, data)
        form, corners = self.structure.form, len(uniform)
        how = GroupDraws(form.independent, group, corners)
        q, prior = moments_given(factors, view), cast(GroupsPrior, view.prior)
        # Latents of structures with groups are whitened.
        z, *sums = weigh_groups(
            how, self.num_draws // corners, form, q, prior, lambda z: log_terms(z)[0],
            lambda z: self._kept(log_terms(z)[1]), shift, noise, widths, uniform,
        )  # fmt: skip
        return Drawn(log_prior, z, q.log_det[0] + prior.log_det, *sums)

    def _draw_mixed(
        self,
        point: Array,
        factors: Any,
        chosen: Array,
        noise: Array,
        widths: Array,
        data: Arguments,
        log_shares: Array,
    ) -> Drawn:
        """Draw like :meth:`_draw` from a mixture of Gaussians. The density of a
        Gaussian at draws of another follows from its factors: it is the density of the
        prior times theirs, up to a constant.

        :param factors: factors of all Gaussians, (modes, ...).
        :param chosen: the Gaussian of each draw, (draws,).
        :param log_shares: logarithms of the shares of the draws, (modes,).
        """
        modes, size = len(log_shares), self.structure.form.rank
        log_prior, view, log_terms = self._at(point, data)
        map_, prior = view.maps()[JOINT], view.prior
        parts = [jax.tree.map(lambda x, k=k: x[k], factors) for k in range(modes)]
        qs = [moments_given(part, view) for part in parts]
        # The first draw of each Gaussian is its mean.
        moved = jnp.pad(widths[:, None] * noise, [(1, 0), (0, 0)])
        drawn = [self._drawn_latents(view, q, moved) for q in qs]
        means = [[x[0] for x in each] for each in drawn]
        z, white, own = (
            jnp.stack(x)[chosen, 1 + jnp.arange(len(chosen))]
            for x in zip(*drawn, strict=True)
        )

        def log_density(part: Any, z: Array, own: Array) -> Array:
            return log_factors(map_, part, z[None]) + own.sum()

        def terms(z: Array, white: Array, own: Array, width: Array) -> tuple[Any, ...]:
            logs = []
            for part, q, (mean, _, at_mean) in zip(parts, qs, means, strict=True):
                fall = log_density(part, z, own) - log_density(part, mean, at_mean)
                volume = 0.5 * q.log_det[0] + size * jnp.log(width)
                logs.append(fall / jnp.square(width) - volume)
            mixed = jax.nn.logsumexp(log_shares + jnp.stack(logs))
            densities, trace = log_terms(white)
            rest = jnp.append(own, -mixed)
            sums = compensated_sum(jnp.concatenate([densities, rest]))
            return *sums, self._kept(trace)

        weighed = jax.vmap(terms)(z, white, own, widths)
        # The weights contain the volumes. This value shows only whether the Gaussians
        # exist.
        finite = jnp.stack([0 * q.log_det[0] for q in qs]).sum()
        return Drawn(log_prior, white, finite + prior.log_det, *weighed)

    def _mapped(
        self, one: Callable[..., Any], how: Callable[..., Any]
    ) -> Callable[..., Any]:
        """Compile a function of one point for several points.

        :param one: a function of the arrays of a point, and of what all points share.
        :param how: see :func:`~numpyro_gpaug.infer.nested.hyperparameters.compiled`.
        :return: ``many(arrays, num, *shared)``. The arrays have a leading axis over
            points, of which only the first ``num`` are needed (``None``: all).
        """

        def many(each: tuple[Any, ...], num: Any, *shared: Any) -> Any:
            return self._each(lambda here: one(*here, *shared), each, num)

        many.__name__ = one.__name__
        return compiled(many, how)

    def _each(self, function: Callable[[Any], Any], draws: Any, num: Any) -> Any:
        """Map a function over draws, on any device.

        A CPU takes one after the other, which compiles in half the time and runs as
        fast. Other devices take batches, which JAX's own ``batch_size`` cannot cut from
        arrays without elements (the border of a chain, no hyperparameters).

        :param function: a function of one draw.
        :param draws: arrays with a leading axis over draws.
        :param num: the number of draws at the beginning that are needed; ``None`` for
            all. Other results are zero on a CPU.
        """
        total = len(jax.tree.leaves(draws)[0])
        if jax.default_backend() == "cpu":
            if num is None or total == 1:
                return lax.map(function, draws)
            return _over_first(function, draws, num)
        size = min(self.chunk, total)
        # The last batch repeats its last draw.
        places = jnp.minimum(jnp.arange(-(-total // size) * size), total - 1)

        def of_batch(of: Array) -> Any:
            return jax.vmap(function)(jax.tree.map(lambda x: x[of], draws))

        found = lax.map(of_batch, places.reshape(-1, size))
        return jax.tree.map(
            lambda x: x.reshape(len(places), *x.shape[2:])[:total], found
        )

    def _latents(self, trace: Trace) -> Values:
        """Return values of all sites that are not observed."""
        observed = {site.name for site in self.structure.observed}
        return {
            k: site["value"]
            for k, site in trace.items()
            if site["type"] in ("sample", "deterministic") and k not in observed
        }

    def _kept(self, trace: Trace) -> Values:
        """Return :attr:`Drawn.sites` for one draw.

        Whitened inducing values are hidden, because whitened latents contain them."""
        found = self._latents(trace)
        hidden = {f"{name}.v" for name in self.structure.functions}
        hidden |= {k for k in found if trace[k]["type"] == "deterministic"}
        leaves = jax.tree.leaves([found[k] for k in hidden if k in found])
        few = self.num_draws * sum(map(jnp.size, leaves)) <= KEPT
        return {
            k: ((x,) if few else ()) if k in hidden else x for k, x in found.items()
        }

    def log_joint(self, point: Array, white: Array, data: Arguments) -> Array:
        """Return the log-density of data, whitened latents and unconstrained
        hyperparameters, up to a constant."""
        log_prior, view, log_terms = self._at(point, data)
        if self.structure.recurrences:
            own = -0.5 * jnp.square(white).sum()
        else:
            z, prior = self.structure.linked(white, view.links), view.prior
            own = prior.terms(z).sum() + 0.5 * prior.log_det
        return log_terms(white)[0].sum() + log_prior + own

    def _drawn(
        self, point: Array, factors: Any, noise: Array, data: Arguments
    ) -> Array:
        """Return whitened latents, (size,), as the Gaussian at a point makes them.

        :param point: unconstrained hyperparameters, (d,).
        :param factors: factors of the Gaussian, with a leading axis of 1.
        :param noise: standard normal, (rank,).
        :param data: the model's arguments.
        """
        view = self._at(point, data)[1]
        q = moments_given(jax.tree.map(lambda x: x[0], factors), view)
        return self._drawn_latents(view, q, noise[None])[1][0]

    def white(self, at: PriorAt, q: Any, noise: Array) -> Array:
        """Return the whitened latents, (size,), that a Gaussian makes of noise (rank,).

        :param at: the prior of the latents where the Gaussian was found.
        :param q: its moments.
        :param noise: standard normal numbers.
        """
        return self._drawn_latents(at, q, noise[None])[1][0]

    def prior(self, point: Array, data: Arguments) -> PriorAt:
        """Return the prior of the latents at unconstrained hyperparameters, (d,)."""
        view = self._at(point, data)[1]
        return PriorAt(view.prior, view.links)

    def sites(self, points: Any, z: Any, data: Arguments) -> Values:
        """Return the values of all sites at draws, without added rows.

        :param points: points, (n, d).
        :param z: whitened latents, (n, size).
        :param data: the model's arguments.
        """
        return self.without_added(self._at_draws((points, z), None, data), data)

    def without_added(self, sites: Values, data: Arguments) -> Values:
        """Return values of sites, (draws, ...), without added rows."""
        if (added := data.static[-1]) is None:
            return sites
        found = dict(sites)
        for name, axis in added.axes:
            # In NumPy, because JAX would compile a program for each number of rows.
            cut = (slice(None),) * (axis + 1) + (slice(int(data.arrays[-1])),)
            found[name] = jnp.asarray(np.asarray(found[name])[cut])
        return found

    def _sites(self, point: Array, white: Array, data: Arguments) -> Values:
        """Return values of all sites at one draw."""
        values, _ = self.hyper.values(point, data)
        return self._latents(self._log_terms(values, white, data)[1])

    def log_collapsed(self, point: Array, data: Arguments) -> Array:
        """Return the collapsed log-density of unconstrained hyperparameters, for
        NUTS."""
        values, log_prior = self.hyper.values(point, data)
        return self.bound(values, self.hyper.steps(values, data), data) + log_prior


def _weighed(
    log_terms: Callable[[Array], tuple[Array, Trace]],
    white: Array,
    prior: Array,
    noise: Array,
    width: Array,
) -> tuple[Array, Array, Trace]:
    """Return the log-weight of a draw, without determinants; its rounding error; and
    the trace of the model there.

    :param log_terms: from :meth:`Programs._at`.
    :param white: whitened latents, (size,).
    :param prior: the terms of their prior.
    :param noise: the standard normal numbers that made the draw, (rank,).
    :param width: the factor by which they were scaled.
    """
    densities, trace = log_terms(white)
    own = 0.5 * jnp.square(noise) + jnp.log(width)
    # Added up at once, because their sum is small.
    return *compensated_sum(jnp.concatenate([densities, own, prior])), trace


def chosen(which: np.ndarray, new: Any, old: Any) -> Any:
    """Return a tree whose arrays have rows of one of two trees.

    :param which: which rows are those of ``new``, (n,).
    """

    def rows(a: Any, b: Any) -> np.ndarray:
        return np.where(which.reshape(-1, *[1] * (np.ndim(b) - 1)), a, b)

    return jax.tree.map(rows, new, old)


def _over_first(function: Callable[[Any], Any], draws: Any, num: Any) -> Any:
    """Map a function over the first ``num`` draws; other results are zero."""
    # Traced once, although it is called for the shapes as well.
    traced = jax.jit(function)

    def at(i: Any) -> Any:
        return traced(jax.tree.map(lambda x: x[i], draws))

    def step(i: Array, found: Any) -> Any:
        return jax.tree.map(lambda all_, x: all_.at[i].set(x), found, at(i))

    total = len(jax.tree.leaves(draws)[0])
    none = jax.tree.map(
        lambda x: jnp.zeros((total, *x.shape), x.dtype), jax.eval_shape(at, 0)
    )
    return lax.fori_loop(0, num, step, none)
