# SPDX-License-Identifier: Apache-2.0
"""Elliptical slice sampling around a Gaussian approximation of the posterior."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, random

from numpyro_gpaug.errors import NotConjugateError
from numpyro_gpaug.guides.sparse_gp import AutoSparseGP
from numpyro_gpaug.infer.mcmc.ellipses import (
    Ellipse,
    Ellipses,
    Part,
    White,
    best_gaussians,
    minus_log_density,
    share_predictors,
)
from numpyro_gpaug.infer.mcmc.gaussian_kernel import GaussianKernel
from numpyro_gpaug.infer.mcmc.groups import Values, groups_of
from numpyro_gpaug.infer.mcmc.slice_search import angle_in_slice
from numpyro_gpaug.likelihoods.expectations import Route
from numpyro_gpaug.math.affine import AffineMap
from numpyro_gpaug.math.linalg import Moments
from numpyro_gpaug.model.predictors import scaled_sum
from numpyro_gpaug.model.structure import Arguments, Block, flat_functions, run_model
from numpyro_gpaug.model.view import ModelView

# The scale of a Gaussian is learnt as if this many draws had confirmed that it is 1.
PRIOR_DRAWS = 10


class EllipticalState(NamedTuple):
    """State of :class:`EllipticalSlice`.

    :param z: latents and deterministic sites.
    :param white: the latents, whitened by the Gaussian of their part.
    :param scale: factors of the Gaussians' standard deviations, by part.
    :param step: steps so far.
    :param log_ratio: log of the posterior over the Gaussians, up to a constant.
    :param evaluations: of the likelihood, in the last step.
    :param ellipses: the Gaussians, and what follows from them.
    :param rng_key: random key.
    """

    z: Values
    white: White
    scale: Array
    step: Array
    log_ratio: Array
    evaluations: Array
    ellipses: Ellipses
    rng_key: Array


class EllipticalSlice(GaussianKernel):
    r"""Elliptical slice sampling with a Gaussian approximation of the posterior in the
    place of the prior: exact, for any likelihood, no gradients and nothing to tune.

    Elliptical slice sampling moves along ellipses through draws of a Gaussian, and
    corrects by the ratio of the target to it. With the prior for that Gaussian the
    ratio is the likelihood, and moves are short when data say much. Here it is a
    variational fit :math:`q(v) = N(m, S)`, and the ratio
    :math:`p(v)\, p(y \mid v) / q(v)` is nearly flat: the better the fit, the less
    draws depend on each other.

    In warm-up the Gaussian is made wider or narrower, as a whole, until draws are as
    far from its mean as its own would be; some fifty steps do.

    Without ``guide`` and ``params``, ``init`` finds the Gaussian of highest evidence
    lower bound itself, by closed-form updates: for likelihoods that
    :class:`~numpyro_gpaug.ConjugateSVI` takes. Latents that share a predictor (a
    process and weights added to it, outputs that share latents) have a joint one, which
    no guide holds; there it is found although a fit is given.

    The target is exactly the posterior, but a Gaussian much narrower than it makes
    draws that reach its tails rare and then dwell there, which short chains do not
    show. Look at :func:`~numpyro_gpaug.diagnostics.psis_khat` of a fit first: above 0.7
    (in a model whose latents share no predictor), use another sampler, NUTS if the
    likelihood has no augmentation.

    Along an ellipse function values are linear in two vectors, so a draw costs O(M (M +
    N)) once, and O(N) for each likelihood it takes to leave the slice (two to three).
    Blocks that share a predictor count as one, of all their latents.

    Latents are inducing values of processes and plain Gaussian weights. Others go to
    another block (``Gibbs([(EllipticalSlice(model), ["f.v"]), (NUTS(model), None)])``).
    The Gaussian then is computed again, by some ten Cholesky factorisations, whenever
    they have moved; a given fit stays as it is, as good as it was for the values it
    was made at. What posterior is sampled with inducing inputs, several chains, and
    continued runs are as for :class:`~numpyro_gpaug.AugmentedGaussian`; chains start
    from draws of the Gaussian.

    :param model: a NumPyro model; with a fit, the model that was fitted, its
        ``numpyro.param`` sites (if it has any) fixed at the fit:
        ``handlers.substitute(model, data=params)``. MCMC would keep them at their
        initial values.
    :param guide: an :class:`~numpyro_gpaug.AutoSparseGP` that was fitted, of any
        covariance but the preconditioned.
    :param params: params of the fit, as in ``result.params``.
    :raises NotConjugateError: at ``init``, for latents that no block owns, or without a
        fit for a likelihood without closed-form expectation.
    :raises ValueError: for another guide, a guide or params alone, or at ``init`` for
        params that are not at the fit, or latents whose shapes are not those of the
        fit.

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

    References: Murray, Adams and MacKay (2010), Elliptical slice sampling; Nishihara,
    Murray and Adams (2014), Parallel MCMC with generalized elliptical slice sampling.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        guide: AutoSparseGP | None = None,
        params: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(model)
        if (guide is None) != (params is None):
            missing = "guide" if guide is None else "params"
            raise ValueError(f"a fit is a guide and its params: {missing} is missing")
        self._values: dict[str, Any] = {}
        self._fit: dict[str, Moments] | None = None
        self._fitted: dict[str, Block] = {}
        self._parts: tuple[Part, ...] = ()
        self._as_fitted, self._num_warmup = False, 0
        if guide is not None and params is not None:
            if not isinstance(guide, AutoSparseGP):
                raise ValueError(
                    "EllipticalSlice needs a Gaussian on inducing values, which an "
                    f"AutoSparseGP fits; got {type(guide).__name__}"
                )
            if guide.covariance == "preconditioned":
                raise ValueError(
                    'a fit with covariance="preconditioned" is of no use here: '
                    "EllipticalSlice(model) finds a Gaussian itself"
                )
            self._values, own = guide.split_params(params)
            self._fit = guide.moments(own)
            self._fitted = {b.site: b for b in guide.structure.blocks}

    def _check(self, view: ModelView) -> None:
        self._refuse_others(
            "as a block, Gibbs([(EllipticalSlice(model), "
            f"{[b.site for b in self.structure.blocks]}), (NUTS(model), None)]) has "
            "NUTS sample them"
        )
        for block in self.structure.blocks if self._fit is not None else ():
            fitted = self._fitted.get(block.site)
            if fitted is None or fitted.shape != block.shape:
                found = "is not part of it" if fitted is None else f"has {fitted.shape}"
                raise ValueError(
                    f"site {block.site!r} has shape {block.shape} in the model, but in "
                    f"the fit it {found}: fit this model at these arguments"
                )
        groups = groups_of(view)
        self._as_fitted = self._fit is not None and not share_predictors(groups, view)
        if not self._as_fitted:
            self._refuse_open()
        self._parts = tuple(
            Part(group, not self._as_fitted and not group.batched) for group in groups
        )

    def _refuse_open(self) -> None:
        """Raises for sites whose best Gaussian cannot be found here."""
        for site in self.structure.observed:
            if site.route is not Route.CONSTANT and not site.latents:
                instead = (
                    "pass a fit by SVI and TraceAnalytic_ELBO (guide, params), or "
                    if self._fit is None
                    else "blocks that share a predictor need one: "
                )
                raise NotConjugateError(
                    f"site {site.name!r} has no expectation in closed form, "
                    f"{site.reason or 'so that no Gaussian is found for it'}; "
                    f"{instead}MCMC(NUTS(model)) samples it"
                )

    def _inspect(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super()._inspect(args, kwargs)
        if self._values:
            self._refuse_moved(Arguments.split(args, kwargs))

    def _refuse_moved(self, arguments: Arguments) -> None:
        """Raises for params that are not at the fit."""

        @jax.jit
        def params(arrays: tuple[Array, ...]) -> dict[str, Any]:
            given, key = arguments._replace(arrays=arrays), random.key(0)
            zeros = self.structure.zeros
            trace = run_model(flat_functions(self._model), given, key, zeros)
            names = self._values.keys() & trace.keys()
            return {k: trace[k]["value"] for k in names if trace[k]["type"] == "param"}

        for name, value in params(arguments.arrays).items():
            pairs = zip(*map(jax.tree.leaves, (value, self._values[name])), strict=True)
            for now, fitted in pairs:
                if not isinstance(now, jax.core.Tracer) and not np.allclose(
                    now, fitted
                ):
                    raise ValueError(
                        f"param {name!r} is {now} in the model, but {fitted} in the "
                        "fit: sample handlers.substitute(model, data=params)"
                    )

    def _first(self, key: Array, values: Values, view: ModelView) -> EllipticalState:
        key, noise_key = random.split(key)
        maps = self._maps(view)
        ellipses = self._ellipses(view, maps)
        x = {}
        scale, step = jnp.ones(len(self._parts)), jnp.int32(0)
        for part, ellipse, noise in self._noise(noise_key, ellipses, scale):
            shift, means = part.shift(ellipse, noise), part.means(ellipse)
            for b in part.blocks:
                drawn = means[b.name] + shift[b.name]
                x[b.site] = jnp.asarray(values.get(b.site, drawn), b.dtype)
        return self._evaluated(key, x, scale, step, ellipses, maps, view)

    def _warm_up(self, num_warmup: int) -> None:
        self._num_warmup = num_warmup

    def _renewed(self, state: EllipticalState, view: ModelView) -> EllipticalState:
        maps = self._maps(view)
        ellipses = self._ellipses(view, maps)
        x = {b.site: state.z[b.site] for b in self.structure.blocks}
        new = self._evaluated(
            state.rng_key, x, state.scale, state.step, ellipses, maps, view
        )
        return new._replace(evaluations=state.evaluations)

    def _evaluated(
        self,
        key: Array,
        x: Values,
        scale: Array,
        step: Array,
        ellipses: Ellipses,
        maps: dict[str, AffineMap],
        view: ModelView,
    ) -> EllipticalState:
        pairs = zip(self._parts, ellipses.parts, strict=True)
        white = tuple(part.whitened(ellipse, x) for part, ellipse in pairs)
        at = self._at(x, maps, view)
        ratio = self._log_ratio(view, x, at, white, scale)
        z = self._sampled(x, at, view)
        none = jnp.int32(0)
        return EllipticalState(z, white, scale, step, ratio, none, ellipses, key)

    def _ellipses(self, view: ModelView, maps: dict[str, AffineMap]) -> Ellipses:
        if self._as_fitted and self._fit is not None:
            owners = [part.blocks[0] for part in self._parts]
            qs = tuple(
                Moments(*(jnp.asarray(m, b.dtype) for m in self._fit[b.name]))
                for b in owners
            )
        else:
            qs = best_gaussians(self._parts, maps, view)
        parts = tuple(
            part.ellipse(q, maps, view) for part, q in zip(self._parts, qs, strict=True)
        )
        means: Values = {}
        for part, ellipse in zip(self._parts, parts, strict=True):
            means.update(part.means(ellipse))
        x = {b.site: means[b.name] for b in self.structure.blocks}
        return Ellipses(parts, self._at(x, maps, view))

    def _noise(
        self, key: Array, ellipses: Ellipses, scale: Array
    ) -> Iterator[tuple[Part, Ellipse, Array]]:
        """Noise for every part: white, times its scale."""
        pairs = zip(self._parts, ellipses.parts, strict=True)
        for i, (part, ellipse) in enumerate(pairs):
            mean = ellipse.moments.mean
            noise = random.normal(random.fold_in(key, i), mean.shape, mean.dtype)
            yield part, ellipse, scale[i].astype(mean.dtype) * noise

    def _next(self, state: EllipticalState, view: ModelView) -> EllipticalState:
        key, noise_key, uniform_key = random.split(state.rng_key, 3)
        at_angle = self._on_ellipses(noise_key, state, view)

        def evaluate(angle: Array) -> Array:
            white, x, at = at_angle(angle)
            return self._log_ratio(view, x, at, white, state.scale)

        found = angle_in_slice(uniform_key, state.log_ratio, evaluate)
        white, x, at = at_angle(found.angle)
        scale = self._adapted(state, white)
        gained = minus_log_density(white, scale) - minus_log_density(white, state.scale)
        return EllipticalState(
            self._sampled(x, at, view), white, scale, state.step + 1,
            found.log_ratio + gained, found.evaluations, state.ellipses, key,
        )  # fmt: skip

    def _on_ellipses(
        self, key: Array, state: EllipticalState, view: ModelView
    ) -> Callable[[Array], tuple[White, Values, Values]]:
        """The ellipses through the state and a draw: by angle, what the Gaussians would
        have white, the latents, and what the model is run at."""
        ellipses, blocks = state.ellipses, self.structure.blocks
        means, shifts, moved, other = {}, {}, {}, []
        for part, ellipse, noise in self._noise(key, ellipses, state.scale):
            shift = part.shift(ellipse, noise)
            other.append(noise)
            shifts.update(shift)
            moved.update(part.moved(ellipse, noise, shift, view))
            means.update(part.means(ellipse))
        here = _Point(
            state.white,
            {b.name: state.z[b.site] - means[b.name] for b in blocks},
            {b.name: state.z[b.name] - ellipses.centres[b.name] for b in blocks},
        )
        there = _Point(tuple(other), shifts, moved)

        def at_angle(angle: Array) -> tuple[White, Values, Values]:
            point = jax.tree.map(
                lambda a, b: jnp.cos(angle) * a + jnp.sin(angle) * b, here, there
            )
            centres = ellipses.centres
            x = {b.site: means[b.name] + point.latents[b.name] for b in blocks}
            at = {b.name: centres[b.name] + point.values[b.name] for b in blocks}
            return point.white, x, at

        return at_angle

    def _adapted(self, state: EllipticalState, white: White) -> Array:
        """The scales after a step: in warm-up, root mean squares of what the Gaussians
        would have white."""
        squares = jnp.stack([jnp.square(u).mean() for u in white])
        mean = jnp.square(state.scale)
        mean += (squares.astype(mean.dtype) - mean) / (PRIOR_DRAWS + 1 + state.step)
        return jnp.where(state.step < self._num_warmup, jnp.sqrt(mean), state.scale)

    def _log_ratio(
        self, view: ModelView, x: Values, at: Values, white: White, scale: Array
    ) -> Array:
        """Log of the posterior over the Gaussians, up to a constant."""
        trace, priors = view.trace(at), view.priors()
        total = minus_log_density(white, scale)
        for block in self.structure.blocks:
            loc, scale = (z.reshape(block.shape) for z in priors[block.name])
            quadratic = -0.5 * jnp.square((x[block.site] - loc) / scale)
            total += scaled_sum(quadratic, trace[block.site]["scale"])
        for site in self.structure.observed:
            if site.route is not Route.CONSTANT:
                message = trace[site.name]
                density = message["fn"].log_prob(message["value"])
                total += scaled_sum(density, message["scale"])
        return jnp.asarray(total)

    def get_diagnostics_str(self, state: EllipticalState) -> str:
        return f"{state.evaluations} evaluations"


class _Point(NamedTuple):
    """A point on the ellipses: whitened, and by block the latents and what the model is
    run at, relative to those at the mean."""

    white: White
    latents: Values
    values: Values
