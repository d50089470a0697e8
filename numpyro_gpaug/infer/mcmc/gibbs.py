# SPDX-License-Identifier: Apache-2.0
"""Gibbs sampling of Gaussian latents through augmented likelihoods; and of
hyperparameters, with the Gaussian latents integrated out, given auxiliaries."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from jax import Array, random
from numpyro import handlers
from numpyro.infer import NUTS
from numpyro.infer.mcmc import MCMCKernel
from numpyro.infer.util import unconstrain_fn
from numpyro.util import is_prng_key

from numpyro_gpaug.errors import NotConjugateError
from numpyro_gpaug.gaussians.base import GaussianFactors
from numpyro_gpaug.infer.mcmc.gaussian_kernel import GaussianKernel
from numpyro_gpaug.infer.mcmc.parts import Geometry, Part, Values, parts_of
from numpyro_gpaug.likelihoods.contract import (
    Augmentation,
    Parameters,
    draw_auxiliaries,
    lookup_augmentation,
)
from numpyro_gpaug.likelihoods.expectations import Route, base_distribution, feasible
from numpyro_gpaug.math.linalg import precise
from numpyro_gpaug.model.arguments import Arguments, Model
from numpyro_gpaug.model.closures import Version
from numpyro_gpaug.model.costs import SAMPLE
from numpyro_gpaug.model.jaxpr import dependence_tree
from numpyro_gpaug.model.joint import REGISTERED, JointView
from numpyro_gpaug.model.latents import Structure
from numpyro_gpaug.model.reading import in_form, read_joint
from numpyro_gpaug.model.structure import Observed, Trace, flat_functions, run_model

INSTEAD = "EllipticalSlice(model) and MCMC(NUTS(model)) sample it"


class AugmentedState(NamedTuple):
    """State of :class:`AugmentedGaussian`.

    :param z: latents and deterministic sites.
    :param aux: the auxiliaries on which the draw of the latents is conditioned, by site
        and name.
    :param latents: the latents of each part.
    :param geometry: their priors, and maps to predictors.
    :param rng_key: random key.
    :param version: the version of everything the model reads besides its arguments.
    """

    z: Values
    aux: Auxiliaries
    latents: tuple[Array, ...]
    geometry: tuple[Geometry, ...]
    rng_key: Array
    version: Version | None = None


class AugmentedGaussian(GaussianKernel):
    """Exact Gibbs sampling with augmented likelihoods. It draws every auxiliary
    variable from its conditional, and then, from their Gaussian conditional, all
    Gaussian latents that share a predictor jointly. It needs no tuning, rejection or
    gradients.

    The model is written without auxiliaries, as for every other route. The kernel
    samples all latents in the joint Gaussian of
    :class:`~numpyro_gpaug.AutoLatentGaussian`: inducing values of Gaussian processes
    (whitened: site ``"f.v"``), scalars, vectors, random effects in plates, and random
    walks, on which likelihoods depend affinely. :class:`~numpyro.infer.NUTS` samples
    all others, the hyperparameters: the kernel is then a block of NumPyro's composite
    kernel. To use another kernel instead, write::

        Gibbs([(AugmentedGaussian(model), ["f.v"]), (NUTS(model), None)])

    Auxiliaries are extra fields: ``mcmc.run(..., extra_fields=("aux",))``, inside
    ``Gibbs`` ``"block_states.0.aux"``. Chains may run in sequence, in parallel, or
    vectorised (``chain_method="vectorized"``; inside ``Gibbs``,
    ``chain_method=jax.vmap``); they start from prior draws unless ``init_params`` has
    the latents. ``mcmc.post_warmup_state = mcmc.last_state`` continues a run with the
    same inputs: the state contains matrices computed from them.

    *The target* is the log density of the model. With fewer inducing inputs than data
    this is the process projected onto them, without its residual. With
    ``inducing=X_train`` it is the full process, which comparisons should use.
    :func:`numpyro.param` sites stay at their initial values: give a parameter that is
    to be inferred a prior, or fix it with :class:`numpyro.handlers.substitute`,
    ``substitute(model, data=params)``.

    Latents that share no predictor with others are drawn by themselves. A sweep costs
    one Cholesky factorisation of min(M, N) rows for each latent of a process whose
    predictors depend on nothing else. For others it costs a factorisation of their
    joint precision matrix, which is dense, by groups, along chains or sparse, as in a
    fit. At fixed hyperparameters kernel matrices are factorised once.

    :param model: a NumPyro model.
    :raises NotConjugateError: at ``init``, for a likelihood without augmentation, or
        with parameters that are not affine in latents, for scaled sites, and for
        latents that are not Gaussian, unless another block owns them.
    :raises ValueError: at ``init``, for plates that draw subsamples.

    **Example**

    >>> import jax, numpyro, jax.numpy as jnp, numpyro.distributions as dist
    >>> import numpyro_gpaug as gpaug
    >>> from numpyro.infer import MCMC
    >>> def model(X, y=None):
    ...     w = numpyro.sample("w", dist.Normal(0, 1).expand([2]).to_event(1))
    ...     with numpyro.plate("data", X.shape[0]):
    ...         numpyro.sample("y", dist.Bernoulli(logits=X @ w), obs=y)
    >>> X = jax.random.normal(jax.random.key(1), (50, 2))
    >>> y = (X[:, 0] > 0).astype(int)
    >>> kernel = gpaug.AugmentedGaussian(model)
    >>> mcmc = MCMC(kernel, num_warmup=50, num_samples=200, progress_bar=False)
    >>> mcmc.run(jax.random.key(0), X, y, extra_fields=("aux",))
    >>> mcmc.get_samples()["w"].shape
    (200, 2)
    >>> mcmc.get_extra_fields()["aux"]["y"]["omega"].shape
    (200, 50)

    Random effects, with their scale:

    >>> def groups(group, y=None):
    ...     level = numpyro.sample("level", dist.Normal(0, 3))
    ...     tau = numpyro.sample("tau", dist.HalfNormal(1.0))
    ...     with numpyro.plate("groups", 3):
    ...         effect = numpyro.sample("effect", dist.Normal(level, tau))
    ...     with numpyro.plate("data", len(group)):
    ...         numpyro.sample("y", dist.Bernoulli(logits=effect[group]), obs=y)
    >>> kernel = gpaug.AugmentedGaussian(groups)
    >>> mcmc = MCMC(kernel, num_warmup=50, num_samples=200, progress_bar=False)
    >>> mcmc.run(jax.random.key(0), jnp.arange(12) // 4, jnp.arange(12) % 2)
    >>> {name: draws.shape for name, draws in sorted(mcmc.get_samples().items())}
    {'effect': (200, 3), 'level': (200,), 'tau': (200,)}

    References: Albert and Chib (1993), Bayesian analysis of binary and polychotomous
    response data; Polson, Scott and Windle (2013), Bayesian inference for logistic
    models using Polya-Gamma latent variables; Galy-Fajou, Wenzel and Opper (2020),
    Automated augmented conjugate inference for non-conjugate Gaussian process models.
    """

    def _read(self, arguments: Arguments) -> Structure:
        return read_joint(self._model, SAMPLE, arguments)

    def _divided(self, arguments: Arguments) -> Sequence[Part]:
        found: list[Part] = []

        def abstract(arguments: Arguments) -> None:
            view = self._view(arguments, {})
            self._refuse(view)
            parts = parts_of(self.structure, view.independent)
            # Parts without auxiliaries are drawn first. The auxiliaries in a sample are
            # then the ones given which its latents were drawn.
            found[:] = sorted(parts, key=lambda part: any(self._augments(part, view)))

        jax.eval_shape(abstract, arguments)
        return [
            part if part.process else part._replace(
                structure=in_form(part.structure, self._model, SAMPLE, arguments)
            )
            for part in found
        ]  # fmt: skip

    def _refuse(self, view: JointView) -> None:
        """Raise for models that this sampler does not accept."""
        for site in self.structure.observed:
            if site.route is Route.CONSTANT:
                continue
            message = view.message(site.name)
            cls = type(base_distribution(message["fn"])).__name__
            if site.route not in REGISTERED or not site.augmented:
                raise NotConjugateError(
                    f"site {site.name!r}: given auxiliaries, likelihoods with an "
                    "augmentation (numpyro_gpaug.register_augmentation) are Gaussian "
                    "in a parameter that is affine in the latents, such as "
                    f"Bernoulli(logits=eta); this one of {cls} is not. {INSTEAD}"
                )
            if message["scale"] is not None:
                raise NotConjugateError(
                    f"site {site.name!r} is scaled, and a power of {cls} has no "
                    f"augmentation. Drop the scale. {INSTEAD}"
                )

    def _augments(self, part: Part, view: JointView) -> Iterator[bool]:
        """Iterate over the predictors of a part: whether their factors depend on
        auxiliaries."""
        for site in part.structure.observed:
            for name in site.latents:
                yield needs_auxiliaries(view.message(site.name), name)

    def _first(self, key: Array, values: Values, arguments: Arguments) -> Any:
        key, prior_key = random.split(key)
        numbers = self._start(prior_key, values, {}, arguments)
        latents, geometry = self._placed(numbers, {}, arguments)
        z = self._sites(latents, geometry, {}, arguments)

        # Zeros, until a sweep draws auxiliaries.
        shapes, _ = jax.eval_shape(self._all_drawn, key, z, arguments)
        aux = jax.tree.map(jnp.zeros_like, shapes)
        return AugmentedState(z, aux, latents, geometry, key)

    def _renewed(self, state: Any, arguments: Arguments) -> Any:
        numbers = self._numbers(state.z, arguments)
        latents, geometry = self._placed(numbers, {}, arguments)
        z = self._sites(latents, geometry, {}, arguments)
        return state._replace(z=z, latents=latents, geometry=geometry)

    def _next(self, state: Any, arguments: Arguments) -> Any:
        key, *keys = random.split(state.rng_key, 1 + len(self._parts))
        z, aux, latents = state.z, dict(state.aux), list(state.latents)
        # Auxiliaries are drawn again for each part, so that each move of a sweep leaves
        # the posterior of the latents invariant.
        for i, (part, part_key) in enumerate(zip(self._parts, keys, strict=True)):
            aux_key, draw_key = random.split(part_key)
            drawn, factors = self._drawn(aux_key, part, z, arguments)
            aux |= drawn
            predictors, known = self._predictors(part, z, arguments), state.geometry[i]
            latents[i] = part.draw(draw_key, latents[i], factors, known, predictors)
            z = self._sites(latents, state.geometry, {}, arguments)
        return state._replace(z=z, aux=aux, latents=tuple(latents), rng_key=key)

    def _placed(
        self, numbers: Values, others: Values, arguments: Arguments
    ) -> tuple[tuple[Array, ...], tuple[Geometry, ...]]:
        """Return the latents and the geometry of each part.

        :param numbers: numbers by site.
        :param others: values of other latents.
        :param arguments: the model's arguments.
        """
        views = [part.view(self._model, arguments, others) for part in self._parts]
        pairs = zip(self._parts, views, strict=True)
        geometry = tuple(part.geometry(view) for part, view in pairs)
        placed = zip(self._parts, geometry, strict=True)
        return tuple(part.latents(numbers, known) for part, known in placed), geometry

    def _drawn(
        self, key: Array, part: Part, values: Values, arguments: Arguments
    ) -> tuple[Auxiliaries, GaussianFactors]:
        """Draw the auxiliaries of a part.

        :param key: random key.
        :param part: the part.
        :param values: values of sites and function values.
        :param arguments: the model's arguments.
        """
        trace = self._run(arguments, self._given(values))
        return draw_factors(key, trace, part.structure.observed)

    def _all_drawn(
        self, key: Array, values: Values, arguments: Arguments
    ) -> tuple[Auxiliaries, tuple[GaussianFactors, ...]]:
        """Draw all auxiliaries. Return them, and the factors of each part. Parts that
        share a site have the same key, and so the same auxiliaries."""
        drawn = [self._drawn(key, part, values, arguments) for part in self._parts]
        aux = {site: each for own, _ in drawn for site, each in own.items()}
        return aux, tuple(factors for _, factors in drawn)

    def _predictors(
        self, part: Part, values: Values, arguments: Arguments
    ) -> Callable[[Array], Array]:
        """Return the predictors of a process as a function of its function values.

        :param part: the part.
        :param values: values of sites and other function values.
        :param arguments: the model's arguments.
        """
        given = self._given(values)

        def found(functions: Array) -> Array:
            trace = self._run(arguments, given | {str(part.process): functions})
            return parameters(trace, part.structure.observed)

        return found


Auxiliaries = dict[str, dict[str, Array]]


def draw_factors(
    key: Array, trace: Trace, observed: Iterable[Observed]
) -> tuple[Auxiliaries, GaussianFactors]:
    """Draw the auxiliaries of observed sites. Return their values by site and name, and
    the Gaussian factors that they put on all predictors, (n,).

    :param key: random key.
    :param trace: the trace of the model.
    :param observed: the sites, with the parameters that are predictors.
    """
    drawn, factors = {}, []
    for i, site in enumerate(observed):
        if site.latents:
            aux_key, message = random.fold_in(key, i), trace[site.name]
            drawn[site.name], found = _augmented(aux_key, message, site.latents)
            factors += [jax.tree.map(jnp.ravel, factor) for factor in found]
    none = GaussianFactors(jnp.zeros(0), jnp.zeros(0))
    return drawn, jax.tree.map(lambda *x: jnp.concatenate(x), *factors or [none])


def parameters(trace: Trace, observed: Iterable[Observed]) -> Array:
    """Return all predictors, (n,), as in :func:`draw_factors`."""
    return jnp.concatenate([
        jnp.ravel(getattr(base_distribution(trace[site.name]["fn"]), name))
        for site in observed for name in site.latents
    ] or [jnp.zeros(0)])  # fmt: skip


def needs_auxiliaries(message: dict[str, Any], name: str) -> bool:
    """Whether the Gaussian factors of a parameter depend on auxiliaries.

    :param message: NumPyro's message of the site.
    :param name: the parameter.
    """
    d = base_distribution(message["fn"])
    blocks = augmentation_of(d).gibbs_blocks(d)
    own = next(i for i, block in enumerate(blocks) if name in block)
    return ("aux",) in blocks[:own]


def augmentation_of(d: dist.Distribution) -> Augmentation:
    """Return the augmentation of a distribution that has one."""
    found = lookup_augmentation(type(d))
    assert found is not None
    return found


def _augmented(
    key: Array, message: dict[str, Any], names: tuple[str, ...]
) -> tuple[dict[str, Array], list[GaussianFactors]]:
    """Draw the auxiliaries of a site. Return Gaussian factors for some of its
    parameters, of their shapes.

    :param message: NumPyro's message of the site.
    :param names: the parameters.
    """
    fn = message["fn"]
    d = base_distribution(fn)
    augmentation = augmentation_of(d)
    y = feasible(fn, message["value"])
    # Each datum has its own auxiliaries, even if several data share a latent.
    trailing = 0 if augmentation.latent_axis is None else 1
    given = {k: jnp.asarray(getattr(d, k)) for k in augmentation.latents}
    f: Parameters = {
        k: jnp.broadcast_to(x, fn.shape() + x.shape[x.ndim - trailing :])
        for k, x in given.items()
    }
    aux = draw_auxiliaries(key, augmentation.conditional(d, y, f))
    seen = _seen(fn)
    seen = seen.reshape(seen.shape + (1,) * trailing)

    def shared(part: Array, k: str) -> Array:
        part = jnp.broadcast_to(jnp.where(seen, part, 0), f[k].shape)
        return _summed(jnp.asarray(part, given[k].dtype), given[k].shape)

    natural = augmentation.natural(d, y, aux, f)
    return aux, [
        GaussianFactors(*(shared(part, k) for part in natural[k])) for k in names
    ]


def _seen(fn: dist.Distribution) -> Array:
    """Return the mask of the data, broadcast against one value per observation."""
    if isinstance(fn, dist.MaskedDistribution):
        mask = jnp.asarray(fn._mask)
        return mask.reshape(mask.shape + (1,) * fn.event_dim) & _seen(fn.base_dist)
    if isinstance(fn, dist.Independent | dist.ExpandedDistribution):
        return _seen(fn.base_dist)
    return jnp.array(True)


def _summed(value: Array, shape: tuple[int, ...]) -> Array:
    """Sum ``value`` over the axes along which an array of ``shape`` is repeated."""
    extra = value.ndim - len(shape)
    repeated = [
        i + extra
        for i, size in enumerate(shape)
        if size == 1 and value.shape[i + extra] > 1
    ]
    return value.sum((*range(extra), *repeated)).reshape(shape)


FACTORS_KWARG = "_gaussian_factors"


class CollapsedState(NamedTuple):
    """State of :class:`CollapsedGaussian`.

    :param z: latents, hyperparameters and deterministic sites.
    :param aux: the auxiliaries on which their draw is conditioned, by site and name.
    :param inner: state of the kernel of the hyperparameters; in the first state, until
        the kernel starts, the Gaussian factors of each part.
    :param rng_key: random key.
    :param version: the version of everything the model reads besides its arguments.
    """

    z: Values
    aux: Auxiliaries
    inner: Any
    rng_key: Array
    version: Version | None = None


class CollapsedGaussian(AugmentedGaussian):
    """A sampler like :class:`~numpyro_gpaug.AugmentedGaussian` that also samples the
    hyperparameters of its processes and priors, with the Gaussian latents integrated
    out.

    A sweep draws all auxiliaries, updates the hyperparameters given the auxiliaries
    alone (their density is in closed form, because the latents are then Gaussian), and
    draws the latents. In plain Gibbs sampling, a hyperparameter is updated given the
    latents, and the more informative the data, the shorter its moves. Here only the
    auxiliaries limit the moves. Each evaluation of the collapsed density costs the
    factorisations of a sweep, and its gradient a few times as much: better mixing costs
    time.

    The kernel samples every latent of the model, or the latents of its block of
    ``Gibbs``. Parameters of the likelihood itself (a noise scale) are not collapsed;
    they go to another block::

        Gibbs([(CollapsedGaussian(model), ["f.v", "lengthscale"]), (NUTS(model), None)])

    Several chains run in sequence, in parallel or by ``chain_method=jax.vmap``.

    :param model: a NumPyro model.
    :param kernel: class of the kernel that updates the hyperparameters,
        :class:`~numpyro.infer.NUTS` or any that can be a block of ``Gibbs``, called
        with a model.
    :raises NotConjugateError: at ``init``, as for ``AugmentedGaussian``; also if a
        parameter of a likelihood depends on hyperparameters, and for likelihoods with
        latents that are drawn without auxiliaries (``HeteroscedasticNormal``).

    **Example**

    >>> import jax, numpyro, jax.numpy as jnp, numpyro.distributions as dist
    >>> import numpyro_gpaug as gpaug
    >>> from numpyro.infer import MCMC
    >>> def model(X, y=None):
    ...     variance = numpyro.sample("variance", dist.LogNormal(0.0, 1.0))
    ...     gp = gpaug.GaussianProcess("f", gpaug.kernels.Matern52(0.5, variance), X)
    ...     with numpyro.plate("data", X.shape[0]):
    ...         numpyro.sample("y", dist.Bernoulli(logits=gp(X)), obs=y)
    >>> X = jnp.linspace(0, 1, 12)[:, None]
    >>> y = (X[:, 0] > 0.5).astype(int)
    >>> kernel = gpaug.CollapsedGaussian(model)
    >>> mcmc = MCMC(kernel, num_warmup=100, num_samples=100, progress_bar=False)
    >>> mcmc.run(jax.random.key(0), X, y)
    >>> sorted(mcmc.get_samples())
    ['f', 'f.v', 'variance']
    """

    _takes_others = True

    def __init__(
        self, model: Model, kernel: Callable[[Callable[..., Any]], MCMCKernel] = NUTS
    ) -> None:
        super().__init__(model)
        self._kernel_class = kernel
        self._inner = kernel(self._collapsed)

    def wrap_model(self, wrapper: Callable) -> Self:
        copied = super().wrap_model(wrapper)
        copied._inner = self._kernel_class(copied._collapsed)
        return copied

    def get_diagnostics_str(self, state: CollapsedState) -> str:
        return self._inner.get_diagnostics_str(state.inner)

    def _refuse(self, view: JointView) -> None:
        if not self.structure.others:
            raise NotConjugateError(
                "the model has no hyperparameters to sample. "
                "AugmentedGaussian(model) draws its latents"
            )
        super()._refuse(view)
        for site in self.structure.observed:
            for name in site.latents:
                if not needs_auxiliaries(view.message(site.name), name):
                    raise NotConjugateError(
                        f"'{site.name}/{name}' has no auxiliaries of its own, given "
                        "which CollapsedGaussian integrates latents out. Sample the "
                        "model by AugmentedGaussian(model) and NUTS(model) in Gibbs"
                    )
        start = self._run(view.arguments, {})
        self._refuse_likelihood_parameters(view, start)
        shown = {s.name for s in self.structure.observed if s.route is Route.CONSTANT}
        shown.update(self.structure.others)
        self._hidden = [k for k in start if k not in shown]

    def _refuse_likelihood_parameters(self, view: JointView, start: Trace) -> None:
        shapes = {
            k: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x))
            for k, x in ((k, start[k]["value"]) for k in self.structure.others)
        }
        sites = [s for s in self.structure.observed if s.latents]
        flat = self.structure.flat

        def parameters(values: Values) -> dict[str, list[Any]]:
            trace = self._run(view.arguments, {**values, **flat})
            found = {}
            for site in sites:
                d = base_distribution(trace[site.name]["fn"])
                own = d.arg_constraints.keys() & vars(d).keys() - set(site.latents)
                found[site.name] = [vars(d)[k] for k in sorted(own)]
            return found

        for name, leaves in dependence_tree(parameters, shapes).items():
            reached = {k for leaf in leaves for k in leaf.state}
            if reached:
                raise NotConjugateError(
                    f"a parameter of the likelihood of {name!r} depends on "
                    f"{sorted(reached)}, which CollapsedGaussian does not sample. Use "
                    "Gibbs([(CollapsedGaussian(model), [the other sites]), "
                    "(NUTS(model), None)])"
                )

    @precise
    def _begun(
        self, rng_key: Array, values: Values, arguments: Arguments
    ) -> CollapsedState:
        if not is_prng_key(rng_key):
            raise ValueError(
                "CollapsedGaussian takes a single random key. For several chains "
                'use chain_method="sequential", "parallel" or jax.vmap'
            )
        key, inner_key = random.split(rng_key)
        first = super()._begun(key, values, arguments)
        args, kwargs = arguments.merge()
        given = {**kwargs, FACTORS_KWARG: first.inner}
        others = {k: first.z[k] for k in self.structure.others}
        start = unconstrain_fn(self._collapsed, args, given, others)
        inner = self._inner.init(inner_key, self._num_warmup, start, args, given)
        return first._replace(inner=inner)

    def _first(self, key: Array, values: Values, arguments: Arguments) -> Any:
        key, other_key, prior_key, aux_key = random.split(key, 4)
        names = self.structure.others
        given = {k: values[k] for k in names if k in values}
        drawn = run_model(self._model, arguments, other_key, given)
        others = {k: jnp.asarray(drawn[k]["value"]) for k in names}
        numbers = self._start(prior_key, values, others, arguments)
        z = self._values(numbers, others, arguments)
        aux, factors = self._all_drawn(aux_key, z, arguments)
        return CollapsedState(z, aux, factors, key)

    def _renewed(self, state: CollapsedState, arguments: Arguments) -> CollapsedState:
        numbers = self._numbers(state.z, arguments)
        others = {k: state.z[k] for k in self.structure.others}
        return state._replace(z=self._values(numbers, others, arguments))

    def _next(self, state: CollapsedState, arguments: Arguments) -> CollapsedState:
        key, aux_key, draw_key = random.split(state.rng_key, 3)
        aux, factors = self._all_drawn(aux_key, state.z, arguments)
        args, kwargs = arguments.merge()
        kwargs = {**kwargs, FACTORS_KWARG: factors}
        inner = self._inner.refresh(state.inner, args, kwargs)
        inner = self._inner.sample(inner, args, kwargs)
        constrain = self._inner.get_constrain_fn(args, kwargs)
        moved = constrain(getattr(inner, self._inner.sample_field))
        others = {
            k: jnp.asarray(moved[k], state.z[k].dtype) for k in self.structure.others
        }
        numbers = self._numbers(state.z | others, arguments)
        latents, geometry = self._placed(numbers, others, arguments)
        new = []
        keys = random.split(draw_key, len(self._parts))
        for part, part_key, x, known, each in zip(
            self._parts, keys, latents, geometry, factors, strict=True
        ):
            predictors = self._predictors(part, state.z | others, arguments)
            new.append(part.draw(part_key, x, each, known, predictors))
        z = self._sites(new, geometry, others, arguments) | others
        return CollapsedState(z, aux, inner, key)

    def _values(self, numbers: Values, others: Values, arguments: Arguments) -> Values:
        """Return the values of all sites at numbers by site."""
        placed = self._placed(numbers, others, arguments)
        return self._sites(*placed, others, arguments) | others

    def _collapsed(self, *args: Any, **kwargs: Any) -> None:
        """Return the model of the hyperparameters given auxiliaries: their priors,
        everything else that depends on them, and the evidence of the latents' Gaussian
        factors."""
        factors: tuple[GaussianFactors, ...] = kwargs.pop(FACTORS_KWARG)
        structure = self.structure
        flat = handlers.substitute(flat_functions(self._model), data=structure.zeros)
        # Without expose=, because whoever substitutes the hyperparameters adds factors
        # inside (Jacobians of their transforms).
        with handlers.block(hide=self._hidden):
            seeded = handlers.seed(flat, random.key(0))
            trace = handlers.trace(seeded).get_trace(*args, **kwargs)
        others = {k: trace[k]["value"] for k in structure.others}
        arguments, given = Arguments.split(args, kwargs), structure.flat
        total = jnp.zeros(())
        for part, each in zip(self._parts, factors, strict=True):
            geometry = part.geometry(part.view(self._model, arguments, others))
            predictors = self._predictors(part, given | others, arguments)
            total += part.log_evidence(each, geometry, predictors)
        numpyro.factor("evidence", total)
