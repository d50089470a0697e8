# SPDX-License-Identifier: Apache-2.0
"""Runs of ``NestedVI``: proposals of hyperparameters, and weighted draws from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, random
from numpyro.diagnostics import effective_sample_size
from numpyro.infer import MCMC, NUTS
from scipy.special import logsumexp
from tqdm.auto import tqdm

from numpyro_gpaug._numpyro import one_thread
from numpyro_gpaug.errors import CholeskyError
from numpyro_gpaug.guides.latent_gaussian import MOST_TURNED
from numpyro_gpaug.infer.nested.bound import Start
from numpyro_gpaug.infer.nested.drawer import Drawer, Points, generator
from numpyro_gpaug.infer.nested.latent_modes import Searched, searched
from numpyro_gpaug.infer.nested.mirrors import Mirrors, mirrored
from numpyro_gpaug.infer.nested.programs import Programs
from numpyro_gpaug.infer.nested.proposal import (
    AT_MODE,
    FROM_PRIOR,
    Mode,
    Proposal,
    StudentT,
    another,
    climb,
    is_new,
    refined,
)
from numpyro_gpaug.infer.nested.refining import Pool, approached, extended
from numpyro_gpaug.infer.nested.report import Clock
from numpyro_gpaug.infer.nested.weighted import Weighted, stratified
from numpyro_gpaug.infer.vi.resolution import lost_by
from numpyro_gpaug.math.threads import threads_for
from numpyro_gpaug.model.arguments import Arguments, Values
from numpyro_gpaug.predict.summary import levels_of

# Numbers of points from which the proposal and the width are learnt: for each
# hyperparameter, and the upper limit, besides the number of points asked for; and the
# share of them that comes from the prior.
EACH, FIRST, FIRST_FROM_PRIOR = 32, 96, 1 / 3
# Factors by which draws of latents may be wider than the Gaussian are 1 + w /
# sqrt(number of latents): with many latents, the same factor makes weights more uneven.
WIDENINGS = (0.0, 0.25, 0.5, 1.0)
MOST_MODES = 3
WARMUP = 500
# The smallest effective number of draws per point of a chain that is certified. A chain
# that moves more slowly may not have reached all of the posterior.
SLOWEST = 0.1


@dataclass
class Run:
    """The draws of a run.

    :param programs: programs of the model at its arguments.
    :param data: the model's arguments.
    :param weighted: the draws of hyperparameters, and all weights.
    :param z: whitened latents, (n, draws, size).
    :param values: values of all sites at the draws, by name, (n, draws, ...); of
        deterministic sites, and of whitened inducing values, in a tuple, which is empty
        if they are large.
    :param clock: the times of the run.
    :param evaluations: the number of hyperparameters at which the Gaussian was fitted.
    :param width: the factor by which the proposal of latents is wider than the
        Gaussian.
    :param way: how the hyperparameters were drawn.
    :param seed: seed of resampling.
    :param modes: modes that were found, the highest first.
    :param starts: factors at the highest mode, for each mode of the latents.
    :param searched: the result of the search for modes of the latents.
    :param num_chains: the number of chains of the returned draws.
    :param correction: the correction of weights that are too uneven.
    :param independence: the effective number of draws per point: less than one in a
        chain.
    :param mirrors: signs that leave the posterior unchanged.
    """

    programs: Programs
    data: Arguments
    weighted: Weighted
    z: np.ndarray
    values: Values
    clock: Clock
    evaluations: int
    width: float
    way: str
    seed: int
    modes: list[Mode]
    starts: list[Start]
    searched: Searched
    num_chains: int = 1
    correction: str = ""
    independence: float = 1.0
    mirrors: Mirrors | None = None

    @property
    def certified(self) -> bool:
        """Whether the draws are from the posterior, up to Monte Carlo error."""
        even = self.weighted.certified and self.searched.all_drawn
        return even and not self.slow

    @property
    def slow(self) -> bool:
        """Whether the chain of the hyperparameters moves too slowly."""
        return self.independence < SLOWEST

    def sites(self, *, deterministic: bool) -> Values:
        """Return values of all weighted draws by site.

        :param deterministic: whether to include deterministic sites.
        """
        return self._chosen(np.arange(self.weighted.log_ratios.size), deterministic)

    @property
    def _hidden(self) -> set[str]:
        return {name for name, x in self.values.items() if isinstance(x, tuple)}

    def _chosen(self, indices: np.ndarray, deterministic: bool) -> Values:
        """Return values by site at some of the draws.

        :param indices: indices of the draws.
        :param deterministic: whether to include hidden sites; the model runs for them
            if they were not kept.
        """
        draws = self.weighted.log_ratios.shape[1]
        hidden = self._hidden
        if deterministic and not all(self.values[k] for k in hidden):
            flat = self.z.reshape(-1, self.z.shape[-1])
            return self.at(self.weighted.points[indices // draws], flat[indices])
        known = {k: x for k, x in self.values.items() if k not in hidden}
        if deterministic:
            known |= {k: self.values[k][0] for k in hidden}
        found = {
            k: jax.device_put(x.reshape(-1, *x.shape[2:])[indices])
            for k, x in known.items()
        }
        if not deterministic:
            return found
        return self.programs.without_added(found, self.data)

    def at(self, points: np.ndarray, z: np.ndarray) -> Values:
        """Return values of the model's sites at draws.

        :param points: unconstrained hyperparameters, (n, d).
        :param z: whitened latents, (n, size).
        """
        given = jnp.asarray(points, self.programs.hyper.dtype), z, self.data
        size = self.programs.structure.largest
        part = self.clock.part("values of sites")
        with part, threads_for(size), self.programs.version.running():
            return jax.block_until_ready(self.programs.sites(*given))

    def samples(self, num: int) -> Values:
        """Return equally weighted draws by site."""
        rng = np.random.default_rng(self.seed)
        return self._chosen(self.weighted.resampled(num, rng), True)

    def points(self) -> tuple[np.ndarray, np.ndarray]:
        """Hyperparameters, and the logarithms of their weights."""
        weighted = self.weighted
        return weighted.points, logsumexp(weighted.log_weights, 1)

    def gaussians(self, num: int) -> tuple[np.ndarray, dict[str, Array], Any]:
        """Return, at several hyperparameters, their log-weights, their values by name,
        and moments of the Gaussian given them, members first.

        :param num: the maximum number of points.
        """
        rng = np.random.default_rng(self.seed)
        points, log_weights = stratified(*self.points(), num, rng)
        programs = self.programs
        with threads_for(programs.structure.largest):
            found = [
                programs.gaussians(points, start, self.data) for start in self.starts
            ]
        if len(found) == 1:
            return log_weights, *found[0][1:]
        # Modes of the latents share a weight in proportion to exp(bound).
        bounds = np.stack([np.asarray(x[0], float) for x in found])
        shares = log_weights + bounds - np.logaddexp.reduce(bounds)
        values, moments = jax.tree.map(
            lambda *x: np.concatenate(x), *(x[1:] for x in found)
        )
        return shares.ravel(), values, moments

    @property
    def lost(self) -> float:
        """The error of the Gaussian at the mode, in nats, due to rounding; zero for
        groups, chains, fields and many latents."""
        structure = self.programs.structure
        if not (structure.form.any_rows and 0 < structure.size <= MOST_TURNED):
            return 0.0
        at_mode = self.programs.evaluate(
            self.modes[0].point[None], self.starts[0], self.data, gradient=False
        )
        return lost_by(at_mode.moments)

    def shown(self, sites: dict[str, Array]) -> dict[str, np.ndarray]:
        """The sites in a table: all but deterministic ones and whitened inducing
        values, in the order of the model, hyperparameters last."""
        structure = self.programs.structure
        names = [*(site.name for site in structure.sites), *structure.others]
        names = [k for k in names if k in sites.keys() - self._hidden]
        return {k: np.asarray(sites[k]) for k in names}

    def table(self, prob: float = 0.9) -> dict[str, list[float]]:
        """Return moments and quantiles of every entry of every sample site.

        :param prob: the probability between the outer quantiles.
        """
        sites = self.shown(self.sites(deterministic=False))
        rows = self.weighted.table(sites, (*levels_of(prob).values(),))
        return {k: [*x[:-1], x[-1] * self.independence] for k, x in rows.items()}


def _without_failures(x: np.ndarray) -> np.ndarray:
    return np.where(np.isfinite(x), x, -np.inf)


def integrated(
    programs: Programs,
    key: Array,
    data: Arguments,
    start: np.ndarray,
    prior: np.ndarray,
    clock: Clock,
    *,
    num_points: int,
    progress_bar: bool,
) -> Run:
    """Integrate the hyperparameters by importance sampling.

    :param programs: programs of the model.
    :param key: random key.
    :param data: the model's arguments.
    :param start: the point at which the search for the mode starts.
    :param prior: unconstrained draws of the prior, if any.
    :param clock: measures the seconds.
    :param num_points: number of points to draw.
    :param progress_bar: whether to show one.
    """
    rng = generator(key, 1)
    draws = programs.num_draws
    num = min(EACH * (1 + start.size), FIRST, num_points)
    precise = programs.hyper.dtype == np.float64
    with tqdm(total=num + num_points, disable=not progress_bar, desc="mode") as bar:
        drawer = Drawer(programs, data, rng, bar)
        with clock.part("mode and curvature"):
            modes = [climb(drawer.evaluate, start, precise)]
            known, found = drawer.known, searched(drawer, modes[0].point, rng)
            if drawer.known is not known:
                modes = [climb(drawer.evaluate, modes[0].point, precise)]
        with clock.part("reading the model"):
            drawer.part(modes[0].point)
        bar.set_description("first draws")
        with clock.part("first draws"):
            components = tuple(m.component for m in modes)
            for known in drawer.modes:
                known.component = components[0]
            share = FIRST_FROM_PRIOR if len(prior) else 0.0
            proposal = Proposal(components, (1.0,), share)
            points = rng.permutation(proposal.draws(num, prior, rng))
            # Draws that differ only in their groups have the same width.
            numbers = np.arange(num * draws) // drawer.alike % len(WIDENINGS)
            kinds, latents = numbers.reshape(num, draws), drawer.latents
            sizes = 1 + np.array(WIDENINGS) / np.sqrt(max(latents, 1))
            first = drawer.first(points, sizes[kinds])
            density = proposal.log_density(points, first.log_prior, num)
            target = _without_failures(first.bound + first.log_prior)
            ratios = _without_failures(first.log_joint_over_q - density[:, None])
            width = best_width(ratios, first.squares, sizes, kinds, latents)
            _refuse_none(target)
        with clock.part("mode and curvature"):
            modes = _further_modes(modes, drawer, points, target - density, precise)
            mirrors = mirrored(programs.hyper, modes[0], drawer.evaluate)
        bar.set_description("draws")
        with clock.part("draws"):
            components, weights = tuple(m.component for m in modes), target - density
            if drawer.apart is not None:
                widths = np.full((num, draws), width)
                components, points, weights = approached(
                    drawer, components, first, points, ratios, prior, widths, share, rng
                )
            proposal = _final(components, points, weights, bool(len(prior)))

            def drawn() -> tuple[Pool, Weighted]:
                # The first draws of the prior have been used before.
                widths = np.full(draws, width)
                pool = Pool(drawer, widths, prior[::-1], rng, mirrors.flips)
                weighted = pool.draw(proposal, num_points)
                _refuse_none(weighted.log_ratios)
                bar.set_description("further draws")
                return pool, extended(
                    pool, weighted, components[0], num_points, programs.chunk
                )

            pool, weighted = drawn()
        while not weighted.certified and drawer.anneal(weighted.log_ratios):
            bar.total = bar.n + num_points
            bar.set_description("annealed draws")
            with clock.part("annealed draws"):
                pool, weighted = drawn()
    return Run(
        programs, data, weighted, *pool.drawn, clock, drawer.evaluations, width,
        f"Importance sampling{drawer.weighed}", int(rng.integers(2**32)), modes,
        drawer.starts, found, mirrors=mirrors,
    )  # fmt: skip


@one_thread
def sampled(
    programs: Programs,
    key: Array,
    data: Arguments,
    start: np.ndarray,
    prior: np.ndarray,
    clock: Clock,
    *,
    num_points: int,
    progress_bar: bool,
) -> Run:
    """Run NUTS on the collapsed model, for more hyperparameters than importance
    sampling allows; parameters as for :func:`integrated`."""
    rng = generator(key, 1)
    with clock.part("NUTS on the collapsed model"):
        kernel = NUTS(potential_fn=lambda point: -programs.log_collapsed(point, data))
        mcmc = MCMC(
            kernel, num_warmup=WARMUP, num_samples=num_points,
            progress_bar=progress_bar,
        )  # fmt: skip
        mcmc.run(
            random.fold_in(key, 1),
            init_params=jnp.asarray(start, programs.hyper.dtype),
            extra_fields=("num_steps",),
        )
        points = np.asarray(mcmc.get_samples(), float)
        steps = int(np.sum(mcmc.get_extra_fields()["num_steps"]))
    with tqdm(total=num_points, disable=not progress_bar, desc="draws") as bar:
        drawer = Drawer(programs, data, rng, bar)
        with clock.part("draws"):
            mean = points.mean(0)
            value = float(drawer.evaluate(mean[None])[0][0])
            found = searched(drawer, mean, rng)
            drawer.part(mean)
            drawn, weighted = _weighted_draws(drawer, points)
        while not weighted.certified and drawer.anneal(weighted.log_ratios):
            with clock.part("annealed draws"):
                drawn, weighted = _weighted_draws(drawer, points)
    component = StudentT.symmetric(mean, np.cov(points.T) + 1e-9 * np.eye(len(mean)))
    mode = Mode(mean, value, component)
    worth = effective_sample_size(points[None]).min() / num_points
    way = (
        f"NUTS on the collapsed model (its {points.shape[1]} hyperparameters are too "
        f"many for importance sampling; {WARMUP} steps of warm-up), reweighted"
    )
    return Run(
        programs, data, weighted, drawn.z, drawn.sites, clock,
        drawer.evaluations + steps, 1.0, way, int(rng.integers(2**32)), [mode],
        drawer.starts, found, independence=min(1.0, float(worth)),
    )  # fmt: skip


def _weighted_draws(drawer: Drawer, points: np.ndarray) -> tuple[Points, Weighted]:
    """Return draws of latents at draws of the hyperparameters from the collapsed model,
    and their weights."""
    widths = np.ones((len(points), drawer.programs.num_draws))
    drawn = drawer.draw(points, widths, found=True)
    ratios = drawn.log_joint_over_q - (drawn.bound + drawn.log_prior)[:, None]
    _refuse_none(_without_failures(ratios))
    weighted = Weighted.of(points, ratios, normalised=False, alike=drawer.alike)
    return drawn, weighted


def best_width(
    ratios: np.ndarray,
    squares: np.ndarray,
    sizes: np.ndarray,
    kinds: np.ndarray,
    latents: int,
) -> float:
    """Return the largest proposal width whose weights, at the same point, vary by at
    most a fifth more than with the best width: a larger width also covers regions that
    no draw has reached. Draws of all widths, weighted as draws from their mixture,
    estimate the variation for each width: the widest reach tails that the narrowest
    miss.

    :param ratios: log-weights of draws, each with its own width, (n, draws).
    :param squares: squared lengths of the noise of each draw, (n, draws).
    :param sizes: the widths, (widths,).
    :param kinds: index of the width of each draw, (n, draws).
    :param latents: the number of entries of the noise.
    """
    lengths, widths = squares * sizes[kinds] ** 2, sizes[:, None, None]
    densities = -0.5 * lengths / widths**2 - latents * np.log(widths)
    own = np.take_along_axis(densities, kinds[None], 0)[0]
    mixture = np.logaddexp.reduce(densities) - np.log(len(sizes))
    target = ratios + own
    num = target.shape[1]
    levels = np.logaddexp.reduce(target - mixture, 1, keepdims=True) - np.log(num)
    shares = levels - np.logaddexp.reduce(levels)
    each = 2 * (target - np.maximum(levels, -1e300)) - mixture - densities
    variances = np.exp(np.logaddexp.reduce(each + shares, (1, 2))) / num - 1
    good = variances <= 1.2 * max(variances.min(), 0) + 1e-3
    return float(sizes[good].max())


def _further_modes(
    modes: list[Mode],
    drawer: Drawer,
    points: np.ndarray,
    log_weights: np.ndarray,
    precise: bool,
) -> list[Mode]:
    """Return modes that the first draws suggest."""
    weights = log_weights - np.logaddexp.reduce(log_weights)
    while len(modes) < MOST_MODES:
        begin = another(modes, points, weights)
        if begin is None:
            break
        found = climb(drawer.evaluate, begin, precise)
        if not is_new(found, modes):
            break
        modes = [*modes, found]
    return sorted(modes, key=lambda m: -m.value)


def _final(
    components: tuple[StudentT, ...],
    points: np.ndarray,
    log_weights: np.ndarray,
    proper: bool,
) -> Proposal:
    better, shares = refined(components, points, log_weights)
    total = sum(shares)
    own = tuple((1 - AT_MODE) * s / total for s in shares)
    # Twice as wide, because weights that are largest far away look like a heavy tail.
    wide = tuple(
        component._replace(sides=2 * component.sides) for component in components
    )
    first = tuple(AT_MODE / len(components) for _ in components)
    return Proposal((*better, *wide), (*own, *first), FROM_PRIOR if proper else 0.0)


def _refuse_none(log_weights: np.ndarray) -> None:
    if not np.isfinite(log_weights).any():
        raise CholeskyError(
            "the collapsed bound is not finite at any of the hyperparameters that "
            "were drawn. Likely causes: a kernel matrix without jitter, or inputs "
            "that are not standardised. float64 may help"
        )
