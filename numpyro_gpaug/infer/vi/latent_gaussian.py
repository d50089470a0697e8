# SPDX-License-Identifier: Apache-2.0
r"""The closed-form problem: Gaussian blocks, their affine maps, and a likelihood.

The conjugate update replaces the likelihood by Gaussian factors on the predictors. They
follow from the derivatives of its expectation ``E(m, v)`` (or of its augmented bound):
:func:`~numpyro_gpaug.gaussians.base.gaussian_factors`. The posterior precision
``P + A diag(w) A'`` with the prior precision ``P`` is positive definite by construction
for log-concave likelihoods, and a step is a convex combination of natural parameters.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, NamedTuple, Self

import jax
import jax.numpy as jnp
from jax import Array, lax

from numpyro_gpaug.gaussians.base import (
    Change,
    GaussianPrior,
    Marginals,
    centre_of,
    no_moments,
    rebased,
    scatter,
    selected,
    times,
    with_centre,
)
from numpyro_gpaug.gaussians.dense import AffineBlocks, afresh, kept
from numpyro_gpaug.gaussians.pairs import factors_of, slope_changes
from numpyro_gpaug.infer.vi.differentiation import split_floats
from numpyro_gpaug.math import linalg
from numpyro_gpaug.math.arrays import STATIC
from numpyro_gpaug.math.competition import edge_roots, laplacian_product

# Newton steps of means are refined at most so often, and while the last one promised
# more than twice so many nats.
REFINEMENTS, UNSEEN = 8, 1e-6

# Natural parameters, by block.
Natural = dict[str, Any]


def relative_rounding(dtype: Any) -> float:
    """The relative tolerance when two bounds are compared: a smaller decrease may be
    rounding error."""
    return 32 * float(jnp.finfo(dtype).eps)


def rounding_of_sums(marginals: Any) -> float:
    """The part of :func:`relative_rounding` that is due to the number of terms: errors
    are a random walk. With a larger tolerance, updates would alternate around their
    fixed point: counts of thousands make bounds of 1e5 nats, and 32 units in the last
    place are nats."""
    terms = sum(x.size for x in jax.tree.leaves(marginals))
    return min(1.0, (4 + math.sqrt(terms)) / 128)


class Evaluation(NamedTuple):
    """The bound at natural parameters, and everything that the next update needs.

    :param bound: evidence lower bound.
    :param expected: the expected log-likelihood in it.
    :param slack: the largest decrease for which an update of a block is accepted.
    :param moments: moments by block.
    :param marginals: marginals by block.
    :param slopes: derivatives of the expected log-likelihood with respect to the
        marginals.
    :param bends: its derivatives with respect to the variances of predictors, by
        predictor; empty unless classes compete.
    :param direct: its derivatives with respect to the numbers in the likelihood; empty
        unless hyperparameters are learnt.
    :param divergences: KL by block, (latents,).
    :param rise: the increase of the bound in the last update; infinite if unknown.
    """

    bound: Array
    expected: Array
    slack: Array
    moments: dict[str, Any]
    marginals: dict[str, Marginals]
    slopes: dict[str, Marginals]
    bends: dict[str, Array]
    direct: tuple[Array, ...]
    divergences: dict[str, Array]
    rise: Array

    @property
    def rounding(self) -> Array:
        """The largest decrease of the bound that rounding alone may cause."""
        return self.slack / rounding_of_sums(self.marginals)


class Place(NamedTuple):
    """A point of a line search in one block.

    :param mean: mean of its latents; for chains whose noise has covariances of its own,
        of the standard normal numbers behind them, since products of the means and
        their gradients are differences of far larger numbers.
    :param rows: means of its predictors.
    :param slopes: derivatives of the expected log-likelihood with respect to these.
    """

    mean: Array
    rows: Array
    slopes: Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LatentGaussian:
    """The problem that closed-form updates solve: a model at fixed hyperparameters.

    :param maps: the affine map of every block to its predictors.
    :param priors: priors by block.
    :param scales: NumPyro's scale of each block's site (1 if none).
    :param latents: indices of the latents a process was called for, by block.
    :param coupled: blocks whose latents share outputs (loadings). They are updated one
        at a time, because joint updates overshoot.
    :param likelihood: the expected log-likelihood, a function (and pytree) of the
        marginals and of the kind of bound.
    :param constant: the part of the bound that does not depend on the blocks.
    :param unreached: by process, the function values that depend on at most one
        inducing value.
    :param units: from :meth:`.View.units`; empty for problems whose natural parameters
        are optimised before hyperparameters move.
    :param learns: whether evaluations keep the quantities that :meth:`gradient` needs.
    :param least_precision: the smallest precision of the factors, see
        :func:`~numpyro_gpaug.gaussians.base.gaussian_factors`.
    """

    maps: Mapping[str, Any]
    priors: Mapping[str, GaussianPrior]
    scales: dict[str, Any]
    latents: dict[str, Array | None]
    coupled: tuple[str, ...] = field(metadata=STATIC)
    likelihood: Any
    constant: Array | float
    unreached: dict[str, Array]
    units: dict[str, Change] = field(default_factory=dict)
    learns: bool = field(default=False, metadata=STATIC)
    least_precision: float = field(default=-math.inf, metadata=STATIC)
    # Updates are loops of the compiled program. If every evaluation reads data, they
    # are Python loops (passes.py).
    loops: ClassVar[Any] = lax

    @classmethod
    def seen(
        cls,
        view: Any,
        bound: str,
        constant: Array | float,
        *,
        learns: bool,
        moves: bool = False,
    ) -> Self:
        """Return the problem of a model at fixed hyperparameters.

        :param view: the view of the model by its guide.
        :param bound: ``"exact"`` or ``"augmented"``.
        :param constant: see the class.
        :param learns: see the class.
        :param moves: whether the problem has :attr:`units`.
        """
        maps = {name: kept(map_) for name, map_ in view.maps().items()}
        priors = view.priors()
        return cls(
            maps=maps,
            priors=priors,
            scales={b.name: view.block_scale(b) for b in view.structure.blocks},
            latents=view.selected(),
            coupled=view.coupled(),
            likelihood=view.expected(bound),
            constant=constant,
            unreached=view.unreached(jax.tree.map(lax.stop_gradient, maps)),
            units=view.units() if moves else {},
            learns=learns,
        )

    @property
    def shares_unreached(self) -> dict[str, Array]:
        """The shares of :attr:`unreached`."""

        def share(unreached: Array) -> Array:
            each = jnp.asarray(1 / unreached.size, self.dtype)
            return jnp.where(unreached, each, 0).sum()

        return jax.tree.map(share, self.unreached)

    @property
    def dtype(self) -> Any:
        """The dtype of the bound; other latents may have JAX's default dtype."""
        return jnp.result_type(*(prior.loc for prior in self.priors.values()))

    @property
    def quadratic(self) -> bool:
        """Whether a whole step of one latent alone leads to the optimum from any
        start."""
        single = sum(len(prior.loc) for prior in self.priors.values()) == 1
        return single and self.likelihood.quadratic

    @property
    def correlated(self) -> bool:
        """Whether there are chains whose noise has covariances of its own."""
        return any(map(_is_correlated, self.priors.values()))

    @property
    def competes(self) -> bool:
        """Whether classes compete for data, so that their means move together."""
        return bool(self.likelihood.competing)

    @property
    def solves(self) -> bool:
        """Whether there is one block, and a solve with a known factor of its precision
        takes much less time than the factor."""
        structures = [getattr(p, "structure", None) for p in self.priors.values()]
        return len(structures) == 1 and getattr(structures[0], "solves", False)

    def select(self, natural: Natural) -> Any:
        """Return the natural parameters of the latents for which the processes were
        called."""
        return {k: selected(n, self.latents.get(k)) for k, n in natural.items()}

    def scatter(self, natural: Natural, part: Natural) -> Any:
        """Return ``natural`` with the latents of :meth:`select` replaced."""
        return {k: scatter(n, self.latents.get(k), part[k]) for k, n in natural.items()}

    def restrict(self) -> LatentGaussian:
        """Return the same problem for the natural parameters of :meth:`select`. It
        ignores all other latents, so the cost of a step depends on the selected latents
        only."""
        priors, units = (
            {k: selected(x, self.latents.get(k)) for k, x in all_latents.items()}
            for all_latents in (self.priors, self.units)
        )
        return replace(self, priors=priors, units=units, latents={})

    def of_latent(self, name: str, index: Array | None) -> LatentGaussian:
        """Return the same problem with a single latent of one block.

        :param name: the block.
        :param index: index of the latent, (1,); ``None`` for all.
        """
        if index is None:
            return self
        maps = {**self.maps, name: self.maps[name].select(index)}
        priors = {**self.priors, name: selected(self.priors[name], index)}
        return replace(self, maps=maps, priors=priors)

    def rebased(
        self, natural: Natural, units: Mapping[str, Change] | None = None
    ) -> Natural:
        """Return natural parameters found at other hyperparameters, with the part that
        is the prior's from the priors here. Most latents are whitened, and their priors
        do not change.

        :param natural: natural parameters of all blocks.
        :param units: the :attr:`units` there. The information of the data is then the
            same about the values of the model's sites, otherwise about the latents.
        """
        changes = {k: _change(x, self.units[k]) for k, x in (units or {}).items()}
        return {
            k: rebased(self.priors[k], n, changes.get(k)) for k, n in natural.items()
        }

    def evaluate(self, natural: Natural) -> Evaluation:
        """Return the bound and its derivatives at ``natural``."""
        q = {name: n.moments() for name, n in natural.items()}
        at = {name: self._marginals(name, q[name]) for name in natural}
        kl = {name: self._kl(name, q[name]) for name in natural}
        return self._evaluation(q, at, kl)

    def unevaluated(self, natural: Natural) -> Evaluation:
        """Return the components of an evaluation at ``natural`` without the first
        block, with a bound of minus infinity. Evaluating a latent of the first block
        completes it."""
        first, *others = natural
        if first in self.coupled:
            others = [first, *others]
        q = {k: no_moments(n) for k, n in natural.items()}
        q |= {k: natural[k].moments() for k in others}

        def parts(names: Iterable[str]) -> tuple[dict[str, Any], dict[str, Array]]:
            at = {k: self._marginals(k, q[k]) for k in names}
            return at, {k: self._kl(k, q[k]) for k in names}

        shapes = jax.eval_shape(lambda: parts(natural))
        at, kl = jax.tree.map(jnp.zeros_like, shapes)
        # The likelihood is not traced, because derivatives have the shapes of their
        # arguments.
        direct = split_floats(self.likelihood)[0] if self.learns else ()
        zero = jnp.zeros((), self.dtype)
        known_at, known_kl = parts(others)
        return Evaluation(
            zero - jnp.inf, zero, zero, q, at | known_at, at,
            self.likelihood.not_widened(), jax.tree.map(jnp.zeros_like, direct),
            kl | known_kl, zero,
        )  # fmt: skip

    def reevaluate(
        self,
        old: Evaluation,
        name: str,
        candidate: Any,
        index: Array | None = None,
    ) -> Evaluation:
        """Return the bound after a change of one block only, or of one of its
        latents."""
        q = candidate.moments()
        part = self.of_latent(name, index)
        before = old.moments[name], old.marginals[name], old.divergences[name]
        new = q, part._marginals(name, q), part._kl(name, q)
        moved, at, kl = scatter(before, index, new)
        return self._evaluation(
            {**old.moments, name: moved},
            {**old.marginals, name: at},
            {**old.divergences, name: kl},
        )

    def slopes_at(
        self, name: str, evaluation: Evaluation, augmented: Array | None
    ) -> Marginals:
        """Return the derivatives of the expected log-likelihood that define the factors
        of a block.

        :param name: the block.
        :param evaluation: the evaluation at the point.
        :param augmented: whether they are of the augmented bound; ``None`` if they
            never are.
        """
        exact = evaluation.slopes[name]
        if augmented is None:
            return exact

        def of_augmented() -> Marginals:
            at = evaluation.marginals
            return jax.grad(lambda at: self.likelihood(at, bound="augmented"))(at)[name]

        return lax.cond(augmented, of_augmented, lambda: exact)

    def target(
        self,
        name: str,
        evaluation: Evaluation,
        augmented: Array | None,
        index: Array | None = None,
    ) -> Any:
        """Return the result of a whole step of a block: the prior times the Gaussian
        factors.

        :param name: the block.
        :param evaluation: the evaluation at the point.
        :param augmented: see :meth:`slopes_at`.
        :param index: the one latent to update, (1,); ``None`` for all.
        """
        slopes = self.slopes_at(name, evaluation, augmented)
        at = evaluation.moments[name], evaluation.marginals[name], slopes
        q, at, slopes = selected(at, index)
        problem = self.of_latent(name, index)
        centre = centre_of(self.priors[name], q)
        return problem.aim(name, centre, at, slopes)

    def targets(self, evaluation: Evaluation, augmented: Array | None) -> Natural:
        """Return the result of a whole step of all blocks.

        Where classes compete, the means take a Newton step together: the factors of one
        class alone move it too far against others, and all of them too little.

        :param evaluation: the evaluation at the point.
        :param augmented: see :meth:`slopes_at`.
        """
        found = {k: self.target(k, evaluation, augmented) for k in self.maps}
        if not self.competes:
            return found
        steps = self._competing_steps(evaluation)

        def moved(name: str) -> Any:
            mean = evaluation.moments[name].mean + steps[name]
            # Natural parameters of several latents have no centre.
            at_zero = jnp.zeros_like(found[name].potential)
            return found[name]._replace(potential=at_zero).moved(mean)

        return {name: moved(name) for name in found}

    def _competing_steps(self, evaluation: Evaluation) -> dict[str, Array]:
        """Return a Newton step of all means with the curvature of competing classes, by
        conjugate gradients that are preconditioned with the covariances."""
        likelihood = self.likelihood
        at = likelihood.carried(evaluation.marginals)
        precisions = {k: jnp.maximum(-2 * x, 0) for k, x in evaluation.bends.items()}
        roots = {
            k: edge_roots(at[k].mean, at[k].variance, precisions[k])
            for k in likelihood.competing
        }

        def predictors(means: dict[str, Array]) -> dict[str, Array]:
            moved = {k: self.given(k, z) for k, z in means.items()}
            return {k: x.mean for k, x in likelihood.carried(moved).items()}

        start = {k: q.mean for k, q in evaluation.moments.items()}
        _, push = jax.linearize(predictors, start)
        pull = jax.linear_transpose(push, start)
        still = {k: self.pull(k, jnp.zeros_like(x)) for k, x in start.items()}

        def curved(step: dict[str, Array]) -> dict[str, Array]:
            rows = push(step)
            bent = {
                k: laplacian_product(roots[k], x) if k in roots else precisions[k] * x
                for k, x in rows.items()
            }
            (back,) = pull(bent)
            return {k: back[k] + self.pull(k, x) - still[k] for k, x in step.items()}

        step, _ = linalg.conjugate_gradients(
            curved, self.ascents(evaluation), partial(self.newton, evaluation)
        )
        return step

    def _marginals(self, name: str, q: Any) -> Any:
        return self.maps[name].marginals(selected(q, self.latents.get(name)))

    def given(self, name: str, mean: Array) -> Any:
        """Return the marginals of predictors at given latents, the means of a block."""
        return self.maps[name].given(selected(mean, self.latents.get(name)))

    def _kl(self, name: str, q: Any) -> Array:
        return self.priors[name].divergence(q) * self.scales[name]

    def _evaluation(
        self,
        q: dict[str, Any],
        at: dict[str, Marginals],
        kl: dict[str, Array],
    ) -> Evaluation:
        floats, rebuild = split_floats(self.likelihood if self.learns else ())

        wider = self.likelihood.not_widened()

        def expected(
            at: dict[str, Marginals], floats: tuple[Array, ...], wider: dict[str, Array]
        ) -> Array:
            likelihood = rebuild(floats) if self.learns else self.likelihood
            return likelihood(at, wider=wider)

        differentiate = jax.value_and_grad(expected, (0, 1, 2))
        value, (slopes, direct, bends) = differentiate(at, floats, wider)
        value = jnp.asarray(value, self.dtype)
        bound, rounding = self.bound(value, kl)
        rise = jnp.full_like(bound, jnp.inf)
        slack = rounding * rounding_of_sums(at)
        return Evaluation(bound, value, slack, q, at, slopes, bends, direct, kl, rise)

    def bound(self, value: Array, kl: dict[str, Array]) -> tuple[Array, Array]:
        """Return the bound, and the largest decrease that rounding alone may cause.

        :param value: the expected log-likelihood.
        :param kl: KL divergences by block.
        """
        total = sum(each.sum() for each in kl.values())
        bound = jnp.asarray(value + self.constant - total, self.dtype)
        # The constant is not larger than the other terms together.
        terms = jnp.asarray(jnp.abs(value) + total + 1, self.dtype) + jnp.abs(bound)
        return bound, relative_rounding(self.dtype) * terms

    def place(self, name: str, evaluation: Evaluation) -> Place:
        """Return the point of a block, for :meth:`slopes_between`."""
        at, slopes = evaluation.marginals[name], evaluation.slopes[name]
        q = evaluation.moments[name]
        white = getattr(self.priors[name], "white", None)
        mean = q.mean if white is None else white(q)
        return Place(mean, at.mean, slopes.mean)

    def slopes_between(
        self, name: str, one: Place, other: Place
    ) -> tuple[Array, Array]:
        """Return the directional derivatives of the bound from one point of a block to
        another, at both points.

        :param name: the block.
        :param one: the start.
        :param other: the end.
        """
        latents, rows = other.mean - one.mean, other.rows - one.rows

        def along(at: Place) -> Array:
            if _is_correlated(self.priors[name]):
                pull = at.mean * self.scales[name]
            else:
                pull = self.pull(name, at.mean)
            return (at.slopes * rows).sum() - (pull * latents).sum()

        return along(one), along(other)

    def pull(self, name: str, mean: Array) -> Array:
        """Return the gradient of the divergence with respect to the means of a block.

        :param name: the block.
        :param mean: the means.
        """
        return self.priors[name].pull(mean) * self.scales[name]

    def push(self, name: str, evaluation: Evaluation) -> Array:
        """Return the gradient of the expected log-likelihood with respect to the means
        of a block, a sum over rows.

        :param name: the block.
        :param evaluation: the evaluation at these means.
        """
        _, back = jax.vjp(partial(self.rows, name), evaluation.moments[name].mean)
        return back(evaluation.slopes[name].mean)[0]

    def rows(self, name: str, mean: Array) -> Array:
        """Return the means of predictors, given the means of a block."""
        return self.given(name, mean).mean

    def unresolved(self, evaluation: Evaluation, processes: tuple[str, ...]) -> Array:
        """Return the error, due to rounding of kernel matrices, of bounds at different
        hyperparameters. A residual variance is the difference of two variances of the
        size of the prior variance. Its error is ``eps sqrt(M)`` times the prior
        variance, which is about the norm of the rounding errors of a matrix. The
        derivatives of the bound propagate this error.

        :param evaluation: an evaluation of the problem.
        :param processes: names of their blocks.
        """
        total = jnp.zeros((), self.dtype)
        for name in processes:
            slopes = jnp.abs(evaluation.slopes[name].variance)
            size = evaluation.moments[name].mean.shape[-1]
            known = float(jnp.finfo(self.dtype).eps) * math.sqrt(size)
            total += known * (slopes * self.maps[name].prior_variance()).sum()
        return total

    def corrections(self, evaluation: Evaluation) -> dict[str, Array]:
        """Return Newton steps of the means, by block, refined while that helps.

        If latents compensate for each other, rounding errors of the wide directions of
        the covariance appear in its narrow directions, and a gradient that follows such
        a step can be wrong by its own size. The remaining gradient after the step shows
        the error.

        There are none for chains whose noise has covariances of its own. Where steps
        are short, gradients in such means are nothing but rounding errors, and the
        means are computed without these.

        :param evaluation: the evaluation at the means.
        """
        if self.correlated:
            return {}
        ascents = self.ascents(evaluation)
        # With so many rows, there are only blocks of processes, whose latents do not
        # compensate each other.
        if any(isinstance(map_, AffineBlocks) for map_ in self.maps.values()):
            return self.newton(evaluation, ascents)

        def refined(carry: Any) -> Any:
            number, steps, left, before, _ = carry
            more = self.newton(evaluation, left)
            promise = sum((left[k] * more[k]).sum() for k in more)
            # Far from the optimum, the covariance may belong to other factors.
            smaller = promise < before
            steps = {k: jnp.where(smaller, x + more[k], x) for k, x in steps.items()}
            left = {
                k: x + self._turn(k, evaluation, steps[k]) for k, x in ascents.items()
            }
            return number + 1, steps, left, promise, smaller & (promise > UNSEEN)

        def going(carry: Any) -> Array:
            return carry[-1] & (carry[0] < REFINEMENTS)

        infinite = jnp.full_like(evaluation.bound, jnp.inf)
        zeros = jax.tree.map(jnp.zeros_like, ascents)
        start = jnp.int32(0), zeros, ascents, infinite, jnp.array(True)
        found: dict[str, Array] = lax.while_loop(going, refined, start)[1]
        return found

    def newton(
        self, evaluation: Evaluation, ascents: dict[str, Array]
    ) -> dict[str, Array]:
        """Return Newton steps of the means, by block.

        :param evaluation: the evaluation at the means.
        :param ascents: gradients of the bound with respect to the means, by block.
        """

        def step(q: Any, ascent: Array) -> Any:
            if hasattr(q, "solve"):
                return q.solve(ascent)
            noise = jax.ShapeDtypeStruct((*ascent.shape[:-1], q.rank), ascent.dtype)
            whiten = jax.linear_transpose(q.unwhiten, noise)
            return q.unwhiten(whiten(ascent)[0])

        found = {k: step(q, ascents[k]) for k, q in evaluation.moments.items()}
        return {k: x / self.scales[k] for k, x in found.items()}

    def _turn(self, name: str, evaluation: Evaluation, step: Array) -> Array:
        """Return the change of a block's gradient along a step of its means, with fixed
        factors."""
        rows, mean = partial(self.rows, name), evaluation.moments[name].mean
        _, moved = jax.jvp(rows, (mean,), (step,))
        pushed = slope_changes(self.maps[name], evaluation.slopes[name], moved)
        pulled = self.pull(name, step) - self.pull(name, jnp.zeros_like(step))
        return jax.vjp(rows, mean)[1](pushed)[0] - pulled

    def ascents(self, evaluation: Evaluation) -> dict[str, Array]:
        """Return gradients of the bound with respect to the means, by block."""
        return {
            name: self.push(name, evaluation) - self.pull(name, q.mean)
            for name, q in evaluation.moments.items()
        }

    def collapsed_gradient(self, evaluation: Evaluation) -> tuple[Array, ...]:
        """Return :meth:`gradient` at an optimum, which the means follow."""
        return self.gradient(evaluation, corrections=self.corrections(evaluation))

    def gradient(
        self,
        evaluation: Evaluation,
        *,
        restricted: bool = False,
        share: Array | float = 1.0,
        corrections: dict[str, Array] | None = None,
        natural: Natural | None = None,
    ) -> tuple[Array, ...]:
        """Return derivatives of the bound with respect to all numbers in this problem
        (:func:`~numpyro_gpaug.infer.vi.differentiation.split_floats`).

        The chain rule uses the derivatives of the likelihood in the evaluation, which
        is not differentiated again. The blocks are fixed in whitened coordinates. With
        ``corrections``, the means follow their optimum instead, which Gaussian factors
        predict. At the optimum both gradients are equal. Near it, the error of the
        first is the distance times the change of the optimum; with rounding, and data
        many deviations from their prior, that can be tens of nats. The error of the
        second is the square of the distance.

        :param evaluation: an evaluation of a problem that ``learns``.
        :param restricted: whether it is an evaluation of :meth:`restrict`.
        :param share: the share of the terms of the bound other than the expected
            log-likelihood; in a sum over blocks of rows, one block has all of them.
        :param corrections: from :meth:`corrections`.
        :param natural: the natural parameters of the evaluation; needed if the problem
            has :attr:`units`. Blocks then change as in :meth:`rebased`.
        """
        moments = evaluation.moments
        still = (self.restrict() if restricted else self).units
        floats, rebuild = split_floats(self)

        def followed(problem: LatentGaussian) -> Any:
            """Return the gradients with respect to the means along their corrections,
            with fixed factors."""
            total = 0.0
            for name, step in (corrections or {}).items():
                map_: Any = problem.maps[name]
                mean: Array = moments[name].mean
                slopes: Any = evaluation.slopes[name]
                at, moved = jax.jvp(map_.given, (mean,), (step,))
                off = at.mean - evaluation.marginals[name].mean
                pushed = slopes.mean + slope_changes(map_, slopes, off)
                pulled = problem.pull(name, mean) * step
                total += (pushed * moved.mean).sum() - share * pulled.sum()
            return total

        def linearised(floats: tuple[Array, ...]) -> Array:
            whole = rebuild(floats)
            problem = whole.restrict() if restricted else whole
            maps = {name: afresh(map_) for name, map_ in problem.maps.items()}
            problem = replace(problem, maps=maps)
            q = dict(moments)
            if still:
                assert natural is not None
                moved = problem.rebased(natural, still)
                q |= {name: moved[name].moments() for name in still}
            at = {name: problem._marginals(name, q[name]) for name in q}
            numbers, _ = split_floats(problem.likelihood)
            products = jax.tree.map(
                lambda slope, x: (slope * x).sum(),
                (evaluation.slopes, evaluation.direct), (at, numbers),
            )  # fmt: skip
            divergence = sum(problem._kl(name, q[name]).sum() for name in q)
            others = problem.constant - divergence
            total = sum(jax.tree.leaves(products)) + share * others
            return total + followed(problem)

        return jax.grad(linearised)(floats)

    def aim(self, name: str, centre: Array, at: Any, slopes: Any) -> Any:
        """Return the prior of a block times its Gaussian factors; parameters as for
        :meth:`information`.

        :param centre: the means of the block, see
            :func:`~numpyro_gpaug.gaussians.base.centre_of`.
        """
        information = self.information(name, at, slopes)
        prior, here = self.priors[name], self.latents.get(name)
        if here is None:
            return times(prior, information, centre)
        indices, natural = jnp.asarray(here), prior.natural
        information = information.moved(selected(centre, here))
        return jax.tree.map(lambda x, new: x.at[indices].add(new), natural, information)

    def information(self, name: str, at: Any, slopes: Any) -> Any:
        """Return the information of the data about deviations of a block from its
        means, a sum over rows.

        :param name: the block.
        :param at: its marginals.
        :param slopes: derivatives of the expected log-likelihood there.
        """
        factors = factors_of(self.maps[name], at, slopes, self.least_precision)
        # A scale on the whole model multiplies likelihood and prior equally.
        scaled = jax.tree.map(lambda x: x / self.scales[name], factors)
        information = self.maps[name].information(scaled, at.mean)
        return with_centre(self.priors[name], information)


@linalg.precise
def _change(there: Change, here: Change) -> Change:
    """Return the latents there, given those here, from :meth:`.View.units`."""
    # Not the product with the inverse here: if nothing changes, nothing is rounded.
    moved = linalg.inverse_lower(here.others) - linalg.inverse_lower(there.others)
    eye = jnp.eye(moved.shape[-1], dtype=moved.dtype)
    return Change(there.groups / here.groups, eye + there.others @ moved)


def _is_correlated(prior: Any) -> bool:
    return getattr(getattr(prior, "structure", None), "correlated", False)
