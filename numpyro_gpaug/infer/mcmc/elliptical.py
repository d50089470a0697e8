# SPDX-License-Identifier: Apache-2.0
"""Elliptical slice sampling around a Gaussian approximation of the posterior."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax, random

from numpyro_gpaug.errors import NotConjugateError
from numpyro_gpaug.gaussians.base import log_density
from numpyro_gpaug.gaussians.dense import Moments
from numpyro_gpaug.guides import AutoLatentGaussian, AutoSparseGP
from numpyro_gpaug.infer.mcmc.gaussian_kernel import GaussianKernel
from numpyro_gpaug.infer.mcmc.parts import Geometry, Part, Values
from numpyro_gpaug.infer.nested.bound import CollapsedBound
from numpyro_gpaug.infer.vi.latent_gaussian import LatentGaussian
from numpyro_gpaug.infer.vi.settling import settled
from numpyro_gpaug.likelihoods.expectations import Route
from numpyro_gpaug.model.arguments import Arguments, Model
from numpyro_gpaug.model.closures import Version
from numpyro_gpaug.model.costs import SAMPLE
from numpyro_gpaug.model.inspect import inspect_model
from numpyro_gpaug.model.joint import JointView, function_values
from numpyro_gpaug.model.latents import GaussianSite, Structure
from numpyro_gpaug.model.reading import in_form, read_joint
from numpyro_gpaug.model.structure import Block, flat_functions, run_model
from numpyro_gpaug.model.view import ModelView

# The increase in nats below which closed-form updates stop.
LEAST_GAIN = 1e-3
# The scale of a Gaussian is learnt as if this many draws had confirmed a scale of 1.
PRIOR_DRAWS = 10
# Evaluations of one search for an angle, at most.
MAX_SHRINKS = 60

Parted = tuple[Array, ...]


class Point(NamedTuple):
    """A point on the ellipses. All of it is affine in the whitened coordinates.

    :param white: coordinates that are white under the Gaussians, by part.
    :param latents: the latents of each part.
    :param functions: function values by process.
    :param predictors: the predictors of the density, (n,).
    """

    white: Parted
    latents: Parted
    functions: Values
    predictors: Array


class Ellipses(NamedTuple):
    """The Gaussians around which slices move.

    :param moments: Gaussians on the latents of each part.
    :param geometry: priors of the parts, and maps to predictors. There is one map to
        all predictors of the density if there is one part; otherwise these are computed
        from function values and numbers.
    :param scales: NumPyro's scales of the priors.
    :param centre: the means.
    """

    moments: tuple[Any, ...]
    geometry: tuple[Geometry, ...]
    scales: Parted
    centre: Point


class EllipticalState(NamedTuple):
    """State of :class:`~numpyro_gpaug.EllipticalSlice`.

    :param z: latents and deterministic sites.
    :param point: the latents, whitened and not, and what the density depends on.
    :param scale: factors of the Gaussians' standard deviations, by part.
    :param step: steps so far.
    :param log_ratio: log-ratio of the posterior to the Gaussians, up to a constant.
    :param evaluations: evaluations of the likelihood in the last step.
    :param ellipses: the Gaussians, and quantities computed from them.
    :param rng_key: random key.
    :param version: the version of everything the model reads besides its arguments.
    """

    z: Values
    point: Point
    scale: Array
    step: Array
    log_ratio: Array
    evaluations: Array
    ellipses: Ellipses
    rng_key: Array
    version: Version | None = None


class EllipticalSlice(GaussianKernel):
    r"""Elliptical slice sampling with a Gaussian approximation of the posterior in
    place of the prior. It is exact, for any likelihood, and needs no gradients and no
    tuning.

    Elliptical slice sampling moves along ellipses through draws of a Gaussian, and
    corrects by the ratio of the target to it. If this Gaussian is the prior, the ratio
    is the likelihood, and moves are short for informative data. Here it is a
    variational fit :math:`q(v) = N(m, S)`, and the ratio :math:`p(v)\, p(y \mid v) /
    q(v)` is nearly flat: the better the fit, the less draws depend on each other.

    Warm-up scales the Gaussian as a whole, until draws are as far from its mean as its
    own draws. Some fifty steps suffice.

    Without ``guide`` and ``params``, ``init`` finds the Gaussian with the highest
    evidence lower bound itself, by closed-form updates. If the model has only processes
    and weight vectors, no two of which share a predictor, under likelihoods that
    :class:`~numpyro_gpaug.AutoSparseGP` accepts, each gets its own Gaussian. Otherwise
    (a process and weights added to it, outputs that share latents, random effects) it
    uses one Gaussian on all Gaussian latents, as
    :class:`~numpyro_gpaug.AutoLatentGaussian` does, for any likelihood that this guide
    accepts. If predictors are shared, it does so even if a fit is given, because the
    Gaussians of a fit are independent.

    The target is exactly the posterior. But if the Gaussian is much narrower, draws
    rarely reach the tails of the posterior and then stay there, which short chains do
    not show. Compute :func:`~numpyro_gpaug.diagnostics.psis_khat` of a fit first. If it
    is above 0.7 (in a model whose latents share no predictor), use another sampler,
    such as :class:`~numpyro.infer.NUTS` if the likelihood has no augmentation.

    Along an ellipse function values are linear in two vectors, so a draw costs O(M (M +
    N)) once, and O(N) for each evaluation of the likelihood (two to three). With a
    joint Gaussian M is the number of all latents.

    :class:`~numpyro.infer.NUTS` samples all other latents, the hyperparameters, as the
    other block of NumPyro's ``Gibbs`` (extra fields are ``block_states.0.step``, ...;
    vectorised chains need ``chain_method=jax.vmap``).
    ``Gibbs([(EllipticalSlice(model), ["f.v"]), (kernel, None)])`` uses another kernel.
    :class:`numpyro.handlers.condition` fixes them,
    ``condition(model, data={"tau": 0.5})``. Whenever hyperparameters have changed, the
    Gaussian is computed again, by about ten Cholesky factorisations. A given fit is not
    computed again, and suits the hyperparameters at which it was made. Inducing inputs,
    several chains, and continued runs work as for
    :class:`~numpyro_gpaug.AugmentedGaussian`. Chains start from draws of the Gaussian.

    :param model: a NumPyro model; with a fit, the model that was fitted, its
        :func:`numpyro.param` sites (if it has any) fixed at the fit by
        :class:`numpyro.handlers.substitute`, ``substitute(model, data=params)``. MCMC
        would keep them at their initial values.
    :param guide: a fitted :class:`~numpyro_gpaug.AutoSparseGP`, with any covariance
        except ``"preconditioned"``.
    :param params: params of the fit, as in ``result.params``.
    :raises NotConjugateError: at ``init``, for latents that are not Gaussian, or on
        which the data do not depend affinely, or, without a fit, for a likelihood for
        which no Gaussian can be found.
    :raises ValueError: for another guide, a guide or params alone, or at ``init`` for
        params or shapes of latents that differ from the fit.

    **Example**

    >>> import jax, numpyro, jax.numpy as jnp, numpyro.distributions as dist
    >>> import numpyro_gpaug as gpaug
    >>> from numpyro.infer import MCMC
    >>> def model(X, y=None):
    ...     gp = gpaug.GaussianProcess("f", gpaug.kernels.Matern52(), X, num_latents=3)
    ...     with numpyro.plate("data", X.shape[0]):
    ...         numpyro.sample("y", dist.Categorical(logits=gp(X)), obs=y)
    >>> X = jnp.linspace(0, 1, 12)[:, None]
    >>> y = jnp.arange(12) // 4
    >>> kernel = gpaug.EllipticalSlice(model)
    >>> mcmc = MCMC(kernel, num_warmup=50, num_samples=200, progress_bar=False)
    >>> mcmc.run(jax.random.key(0), X, y)
    >>> mcmc.get_samples()["f"].shape
    (200, 12, 3)

    Random effects, with their scale:

    >>> def groups(group, y=None):
    ...     level = numpyro.sample("level", dist.Normal(0, 3))
    ...     tau = numpyro.sample("tau", dist.HalfNormal(1.0))
    ...     with numpyro.plate("groups", 3):
    ...         effect = numpyro.sample("effect", dist.Normal(level, tau))
    ...     with numpyro.plate("data", len(group)):
    ...         numpyro.sample("y", dist.Poisson(jnp.exp(effect[group])), obs=y)
    >>> kernel = gpaug.EllipticalSlice(groups)
    >>> mcmc = MCMC(kernel, num_warmup=50, num_samples=200, progress_bar=False)
    >>> mcmc.run(jax.random.key(0), jnp.arange(12) // 4, jnp.arange(12))
    >>> {name: draws.shape for name, draws in sorted(mcmc.get_samples().items())}
    {'effect': (200, 3), 'level': (200,), 'tau': (200,)}

    References: Murray, Adams and MacKay (2010), Elliptical slice sampling; Nishihara,
    Murray and Adams (2014), Parallel MCMC with generalized elliptical slice sampling.
    """

    def __init__(
        self,
        model: Model,
        guide: AutoSparseGP | None = None,
        params: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(model)
        if (guide is None) != (params is None):
            missing = "guide" if guide is None else "params"
            raise ValueError(f"{missing} is missing. Pass guide and params of a fit")
        self._fit: dict[str, Moments] | None = None
        self._fitted: dict[str, Block] = {}
        self._params: dict[str, Any] = {}
        # Blocks with one Gaussian each; None if one Gaussian covers all latents.
        self._blocks: Structure | None = None
        if guide is not None and params is not None:
            if not hasattr(guide, "inducing_gaussians"):
                raise ValueError(
                    "EllipticalSlice needs a Gaussian on inducing values, which an "
                    f"AutoSparseGP fits. Got {type(guide).__name__}. For all other "
                    "Gaussian latents EllipticalSlice(model) finds the joint Gaussian "
                    "itself; handlers.condition(model, data=guide.other_median("
                    "params)) fixes the hyperparameters"
                )
            self._params, self._fit = guide.inducing_gaussians(params)
            self._fitted = {b.site: b for b in guide.structure.blocks}

    def _read(self, arguments: Arguments) -> Structure:
        args, kwargs = arguments.merge()
        blocks = inspect_model(self._model, *args, **kwargs)
        self._blocks = blocks if self._apart(blocks, arguments) else None
        if self._blocks is not None:
            return _with_sites(blocks)
        try:
            return read_joint(self._model, SAMPLE, arguments)
        except NotConjugateError:
            self._refuse_open(blocks)
            raise

    def _apart(self, blocks: Structure, arguments: Arguments) -> bool:
        """Whether each process and weight vector gets a Gaussian of its own: no two
        share a predictor."""
        closed = all(
            site.latents for site in blocks.observed if site.route is not Route.CONSTANT
        )
        if self._fit is None and not (closed and blocks.processes):
            return False
        if blocks.others and self._fit is None:
            return False
        sources = [x for site in blocks.observed for x in site.sources]
        if any(len(x) > 1 for x in sources) or not blocks.blocks:
            return False
        mixed: list[str] = []

        def abstract(arguments: Arguments) -> None:
            view = ModelView(blocks, self._model, arguments, {}, random.key(0))
            mixed.extend(view.coupled())
            if self._fit is None:
                mixed.extend(k for k, x in view.selected().items() if x is not None)

        jax.eval_shape(abstract, arguments)
        return not mixed

    def _refuse_open(self, blocks: Structure) -> None:
        """Raise for sites whose best Gaussian cannot be found here."""
        for site in blocks.observed if blocks.blocks else ():
            if site.route is not Route.CONSTANT and not site.latents:
                instead = (
                    "Pass a fit by SVI and TraceAnalytic_ELBO (guide, params), or use "
                    if self._fit is None
                    else "Processes that share a predictor need it. Use "
                )
                raise NotConjugateError(
                    f"site {site.name!r} has no expectation in closed form, so no "
                    f"Gaussian is found for it ({site.reason or 'by quadrature'}). "
                    f"{instead}MCMC(NUTS(model))"
                )

    def _divided(self, arguments: Arguments) -> Sequence[Part]:
        if self._fit is not None:
            self._refuse_moved(arguments)
        structure = self.structure
        if self._blocks is None:
            self._structure = in_form(structure, self._model, SAMPLE, arguments)
            return [Part(self.structure)]
        return [
            Part(
                structure.with_sites((site,)), block.name if block.is_process else None
            )
            for site, block in zip(structure.sites, self._blocks.blocks, strict=True)
        ]

    def _refuse_moved(self, arguments: Arguments) -> None:
        """Raise for shapes or params that differ from the fit."""
        for site in self.structure.sites:
            fitted = self._fitted.get(site.name)
            if fitted is None and self._blocks is None:
                continue  # the joint Gaussian has further sites
            if fitted is None or fitted.shape != site.value_shape:
                found = "had no such site" if fitted is None else f"had {fitted.shape}"
                raise ValueError(
                    f"site {site.name!r} has shape {site.value_shape} in the model, "
                    f"and the fit {found}. Fit this model at these arguments"
                )

        @jax.jit
        def params(arguments: Arguments) -> dict[str, Any]:
            flat, zeros = flat_functions(self._model), self.structure.zeros
            trace = run_model(flat, arguments, random.key(0), zeros)
            names = self._params.keys() & trace.keys()
            return {k: trace[k]["value"] for k in names if trace[k]["type"] == "param"}

        for name, value in params(arguments).items():
            pairs = zip(*map(jax.tree.leaves, (value, self._params[name])), strict=True)
            for now, fitted in pairs:
                if not isinstance(now, jax.core.Tracer) and not np.allclose(
                    now, fitted
                ):
                    raise ValueError(
                        f"param {name!r} is {now} in the model, and {fitted} in the "
                        "fit. Sample handlers.substitute(model, data=params) instead"
                    )

    def _gaussians(
        self, view: JointView
    ) -> tuple[tuple[Any, ...], tuple[Geometry, ...], Parted]:
        if self._blocks is not None:
            return self._independent(self._blocks, view)
        guide = AutoLatentGaussian(self._model)
        bound = CollapsedBound(guide, self.structure, projected=True)
        problem = LatentGaussian.seen(view, "exact", 0.0, learns=False)
        q = bound.settle(problem, None, LEAST_GAIN).moments
        map_ = None if view.by_functions else view.of_density.matrices
        known = Geometry(map_, view.prior, view.links, view.processes)
        return (q,), (known,), (jnp.ones((), q.mean.dtype),)

    def _independent(
        self, blocks: Structure, view: JointView
    ) -> tuple[tuple[Any, ...], tuple[Geometry, ...], Parted]:
        of_blocks = ModelView(blocks, self._model, view.arguments, {}, random.key(0))
        processes, geometry = view.processes, []
        for part in self._parts:
            own = {k: x for k, x in processes.items() if k == part.process}
            geometry.append(Geometry(None, part.standard, (), own))
        found = self._fit
        if found is None:
            problem = LatentGaussian.seen(of_blocks, "exact", 0.0, learns=False)
            certain = {name: map_ for name, (map_, _) in processes.items()}
            problem = replace(problem, maps={**problem.maps, **certain})
            start: Any = {k: prior.natural for k, prior in problem.priors.items()}
            whole = {name: jnp.ones((), problem.dtype) for name in start}
            _, evaluation, _ = settled(
                problem, start, whole, 1.0, lambda moves: None, LEAST_GAIN
            )
            found = evaluation.moments
        moments, scales = [], []
        for block in blocks.blocks:
            loc, scale = of_blocks.priors()[block.name]
            mean, whitener = (jnp.asarray(x, block.dtype) for x in found[block.name])
            # In units of the standard normal variables behind the values.
            whitener = whitener / scale[..., None, :]
            moments.append(Moments((mean - loc) / scale, whitener))
            scales.append(jnp.asarray(of_blocks.block_scale(block), block.dtype))
        return tuple(moments), tuple(geometry), tuple(scales)

    def _refuse_broken(self, state: Any, arguments: Arguments) -> None:
        super()._refuse_broken(state, arguments)
        ratio = state.log_ratio
        if not isinstance(ratio, jax.core.Tracer) and not np.isfinite(ratio).all():
            raise FloatingPointError(
                "the density at the first draw is not finite. Are there data that "
                "no value of the latents makes possible (counts at zero exposure), "
                "or is a prior far too wide?"
            )

    def _first(self, key: Array, values: Values, arguments: Arguments) -> Any:
        key, noise_key = random.split(key)
        view = self._view(arguments, {})
        ellipses = self._ellipses(view)
        scale, step = jnp.ones(len(self._parts)), jnp.int32(0)
        shifts = self._shifts(self._noise(noise_key, ellipses, scale), ellipses)
        drawn = jax.tree.map(jnp.add, ellipses.centre.latents, shifts)
        numbers = self._numbers_of(drawn, ellipses.geometry)
        numbers = self._moved(numbers, values, {}, arguments)
        return self._evaluated(key, numbers, scale, step, ellipses, view)

    def _renewed(self, state: EllipticalState, arguments: Arguments) -> EllipticalState:
        view = self._view(arguments, {})
        ellipses, numbers = self._ellipses(view), self._numbers(state.z, arguments)
        new = self._evaluated(
            state.rng_key, numbers, state.scale, state.step, ellipses, view
        )
        return new._replace(evaluations=state.evaluations)

    def _next(self, state: EllipticalState, arguments: Arguments) -> EllipticalState:
        key, noise_key, uniform_key = random.split(state.rng_key, 3)
        view, ellipses = self._view(arguments, {}), state.ellipses
        at_angle = self._on_ellipses(noise_key, state, view)

        def evaluate(angle: Array) -> Array:
            return self._ratio(at_angle(angle), state.scale, ellipses, view)

        found = angle_in_slice(uniform_key, state.log_ratio, evaluate)
        point = at_angle(found.angle)
        scale = self._adapted(state, point.white)
        gained = minus_log_density(point.white, scale)
        gained -= minus_log_density(point.white, state.scale)
        return EllipticalState(
            self._valued(point, ellipses, arguments), point, scale, state.step + 1,
            found.log_ratio + gained, found.evaluations, ellipses, key,
        )  # fmt: skip

    def _evaluated(
        self,
        key: Array,
        numbers: Values,
        scale: Array,
        step: Array,
        ellipses: Ellipses,
        view: JointView,
    ) -> EllipticalState:
        placed = zip(self._parts, ellipses.geometry, strict=True)
        latents = tuple(part.latents(numbers, known) for part, known in placed)
        pairs = zip(ellipses.moments, latents, strict=True)
        white = tuple(q.whiten(x - q.mean) for q, x in pairs)
        point = self._point(white, latents, ellipses.geometry, view)
        ratio = self._ratio(point, scale, ellipses, view)
        z = self._valued(point, ellipses, view.arguments)
        none = jnp.int32(0)
        return EllipticalState(z, point, scale, step, ratio, none, ellipses, key)

    def _valued(self, point: Point, ellipses: Ellipses, arguments: Arguments) -> Values:
        """Return values of Gaussian and deterministic sites."""
        return self._sites(
            point.latents, ellipses.geometry, {}, arguments, point.functions
        )

    def _adapted(self, state: EllipticalState, white: Parted) -> Array:
        """Return the scales after a step: in warm-up, root mean squares of the whitened
        coordinates."""
        squares = jnp.stack([jnp.square(u).mean() for u in white])
        mean = jnp.square(state.scale)
        mean += (squares.astype(mean.dtype) - mean) / (PRIOR_DRAWS + 1 + state.step)
        return jnp.where(state.step < self._num_warmup, jnp.sqrt(mean), state.scale)

    def get_diagnostics_str(self, state: Any) -> str:
        if self._composite is not None:
            return super().get_diagnostics_str(state)
        return f"{state.evaluations} evaluations"

    def _ellipses(self, view: JointView) -> Ellipses:
        moments, geometry, scales = self._gaussians(view)
        means = tuple(q.mean for q in moments)
        white = tuple(
            jnp.zeros((*q.mean.shape[:-1], q.rank), q.mean.dtype) for q in moments
        )
        centre = self._point(white, means, geometry, view)
        return Ellipses(moments, geometry, scales, centre)

    def _point(
        self,
        white: Parted,
        latents: Parted,
        geometry: Sequence[Geometry],
        view: JointView,
    ) -> Point:
        numbers = self._numbers_of(latents, geometry)
        functions: Values = {}
        for known in geometry:
            functions |= function_values(known.processes, numbers)
        whole = geometry[0].map
        if whole is not None:
            return Point(white, latents, functions, whole(latents[0])[0])
        at = view.of_density_at(functions, numbers)
        return Point(white, latents, functions, at)

    def _noise(self, key: Array, ellipses: Ellipses, scale: Array) -> Parted:
        """Draw white noise for every part, times its scale."""
        noise = []
        for i, q in enumerate(ellipses.moments):
            shape, dtype = (*q.mean.shape[:-1], q.rank), q.mean.dtype
            white = random.normal(random.fold_in(key, i), shape, dtype)
            noise.append(scale[i].astype(dtype) * white)
        return tuple(noise)

    def _shifts(self, white: Parted, ellipses: Ellipses) -> Parted:
        """Return the deviations of latents from the means."""
        pairs = zip(ellipses.moments, white, strict=True)
        return tuple(q.unwhiten(u) for q, u in pairs)

    def _on_ellipses(
        self, key: Array, state: EllipticalState, view: JointView
    ) -> Callable[[Array], Point]:
        """Return the ellipses through the state and a draw: a function of the angle."""
        ellipses, centre = state.ellipses, state.ellipses.centre
        white = self._noise(key, ellipses, state.scale)
        drawn = jax.tree.map(jnp.add, centre.latents, self._shifts(white, ellipses))
        other = self._point(white, drawn, ellipses.geometry, view)
        here, there = (
            jax.tree.map(jnp.subtract, point, centre) for point in (state.point, other)
        )

        def at_angle(angle: Array) -> Point:
            def turned(middle: Array, a: Array, b: Array) -> Array:
                cos, sin = jnp.cos(angle), jnp.sin(angle)
                return middle + cos.astype(a.dtype) * a + sin.astype(b.dtype) * b

            return jax.tree.map(turned, centre, here, there)

        return at_angle

    def _ratio(
        self, point: Point, scale: Array, ellipses: Ellipses, view: JointView
    ) -> Array:
        """Return the log-ratio of the posterior to the Gaussians, up to a constant."""
        total = minus_log_density(point.white, scale)
        total += view.log_density(point.predictors)
        for z, known, power in zip(
            point.latents, ellipses.geometry, ellipses.scales, strict=True
        ):
            total += power * log_density(known.prior, z)
        return total


def minus_log_density(white: Parted, scale: Array) -> Array:
    """Return minus the log-density of the Gaussians, up to a constant.

    :param white: coordinates that are white under the Gaussians, by part.
    :param scale: factors of their standard deviations, by part.
    """
    squares = jnp.stack([jnp.square(u).sum() for u in white])
    return 0.5 * (squares / jnp.square(scale.astype(squares.dtype))).sum()


class Bracket(NamedTuple):
    """A search for an angle.

    :param angle: the last angle; 0 if the sampler does not move.
    :param low: the lower end of the angles that remain.
    :param high: their upper end.
    :param log_ratio: the log-ratio at the last angle.
    :param evaluations: the number of evaluations.
    """

    angle: Array
    low: Array
    high: Array
    log_ratio: Array
    evaluations: Array


def angle_in_slice(
    key: Array, log_ratio: Array, evaluate: Callable[[Array], Array]
) -> Bracket:
    """Find an angle whose log-ratio is above a random height, by shrinking a bracket.

    :param key: random key.
    :param log_ratio: the log-ratio at angle 0, the current state.
    :param evaluate: returns the log-ratio at an angle.
    """
    # The bracket is the whole ellipse, cut at a random angle, so the first proposal is
    # uniform on it. All uniform numbers are drawn at once, because in the loop each
    # would take longer than an evaluation.
    uniform = random.uniform(key, (MAX_SHRINKS + 2,), log_ratio.dtype)
    height = log_ratio + jnp.log1p(-uniform[0])
    low = -2 * np.pi * uniform[1]
    zero, never = jnp.zeros_like(low), jnp.full_like(low, -jnp.inf)
    first = Bracket(zero, low, low + 2 * np.pi, never, jnp.int32(0))

    def outside(at: Bracket) -> Array:
        return ~(at.log_ratio >= height) & (at.evaluations < MAX_SHRINKS)

    def shrink(at: Bracket) -> Bracket:
        angle = at.low + (at.high - at.low) * uniform[at.evaluations + 2]
        low = jnp.where(angle < 0, angle, at.low)
        high = jnp.where(angle < 0, at.high, angle)
        return Bracket(angle, low, high, evaluate(angle), at.evaluations + 1)

    last = lax.while_loop(outside, shrink, first)
    # If even the smallest move leaves the slice, the cause is rounding, and the state
    # stays.
    accepted = last.log_ratio >= height
    return last._replace(
        angle=jnp.where(accepted, last.angle, 0),
        log_ratio=jnp.where(accepted, last.log_ratio, log_ratio),
    )


def _with_sites(blocks: Structure) -> Structure:
    """Return the structure of a model with its processes and weight vectors as the
    sites of a joint Gaussian."""
    sites = [GaussianSite(b.site, b.shape, b.shape, local=False) for b in blocks.blocks]
    dtype = jnp.result_type(*(b.dtype for b in blocks.blocks))
    return replace(blocks, joint=True, dtype=dtype).with_sites(tuple(sites))
