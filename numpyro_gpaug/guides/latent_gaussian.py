# SPDX-License-Identifier: Apache-2.0
"""The guide of latent Gaussian models: one Gaussian on all Gaussian latents."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import Array, random
from numpyro import handlers

from numpyro_gpaug.distributions.gaussian import BlockGaussian
from numpyro_gpaug.gaussians import STRUCTURES, natural_from
from numpyro_gpaug.gaussians.base import GaussianFactors, drawn_white, times
from numpyro_gpaug.gaussians.dense import Moments
from numpyro_gpaug.gaussians.pairs import PairedMap
from numpyro_gpaug.guides.base import ConjugateGuide, Own
from numpyro_gpaug.guides.function_posterior import InducingPosterior
from numpyro_gpaug.guides.sparse_gp import NATURAL, standard_naturals, with_latent_axis
from numpyro_gpaug.math.compiling import jit_for_few_runs
from numpyro_gpaug.math.linalg import precise
from numpyro_gpaug.math.recurrences import log_volume_along
from numpyro_gpaug.model.arguments import Arguments, Model, Values
from numpyro_gpaug.model.costs import FIT, WHITE
from numpyro_gpaug.model.forms import refuse_large
from numpyro_gpaug.model.gaussians import field
from numpyro_gpaug.model.joint import JointView
from numpyro_gpaug.model.latents import JOINT, Grouping, Structure
from numpyro_gpaug.model.reading import inspect_joint
from numpyro_gpaug.model.structure import Block, Trace, fixed_key
from numpyro_gpaug.model.whitened import whitened

_DENSE = f"{JOINT}_auto_loc", f"{JOINT}_auto_tril"
_PREFIX = f"{JOINT}_auto_"
_BASIS = f"{_PREFIX}basis"
# The largest number of latents in a rotated basis, because the basis is part of every
# program.
MOST_TURNED = 256
# The initial standard deviation for gradients, as in NumPyro's autoguides.
START = 0.1


class AutoLatentGaussian(ConjugateGuide):
    """One Gaussian on all Gaussian latents of a model jointly (random effects, weights,
    random walks, processes at inducing inputs), for any likelihood, and a NumPyro
    autoguide on all other latents, the hyperparameters.

    The model is an ordinary NumPyro model. The Gaussian includes every latent that is
    Gaussian given the hyperparameters, and on which the data depend through affine
    predictors. Latents may have any shape, in plates or not. The traced program decides
    which latents qualify. Gaussian latents that do not (because they are in the scale
    of another latent, or an observation depends on more than two predictors with them)
    go to the other guide, and the set-up reports them. ``print(guide)`` lists all
    latents.

    With few latents the precision is one dense matrix. If every observation depends on
    one member of a grouping (random effects, the larger of crossed groupings), and if
    it costs less, the precision is block diagonal with a border
    (``gaussians/groups.py``): work and memory are linear in rows and groups, and the
    border has at most 5000 latents. If crossed groupings are both larger, their members
    are the nodes of a sparse precision that is not factorised
    (``gaussians/iterative.py``): means follow from conjugate gradients, and the
    log-determinant and variances are estimated.

    If every observation depends on one step of random walks
    (:class:`~numpyro.distributions.GaussianRandomWalk`, of any length, several
    together, with noise of every step), the steps form chains (``gaussians/chain.py``),
    also with linear cost. Autoregressions and other states of a few numbers form
    chains, too: in NumPyro's :func:`~numpyro.contrib.control_flow.scan`, in
    ``GaussianStateSpace``, or written out, with hyperparameters as coefficients.

    The log-density of the likelihood must be a sum over data of functions of one or two
    affine predictors. Its expectation is in closed form if registered, or if the
    log-density is affine in a predictor and in exponentials of it (Poisson, gamma,
    exponential and Weibull distributions with rates ``exp(eta)``), and otherwise by
    Gauss-Hermite quadrature. A softmax, ``Categorical(logits=eta)``, may have any
    number of predictors, which may be correlated, by quasi-random nodes
    (``math/correlated_softmax.py``).

    :param model: a NumPyro model.
    :param covariance: ``"natural"``: potential and precision, which
        :class:`~numpyro_gpaug.ConjugateSVI` updates in closed form; ``"dense"``: mean
        and a triangular factor of the covariance of at most 5000 latents, for
        :class:`numpyro.infer.SVI` with :class:`~numpyro_gpaug.TraceAnalytic_ELBO` (no
        draws of these latents) or any loss of NumPyro. It starts at a tenth of the
        prior's standard deviations, so that rates ``exp(f)`` are moderate.
    :param other: class of the autoguide for all other latents, built as
        ``other(model)``; the default :class:`~numpyro.infer.autoguide.AutoDelta` gives
        their posterior mode.
    :raises ValueError: for an unknown ``covariance``.
    :raises NotConjugateError: at set-up, for discrete latents, a likelihood of another
        form, or too many latents.

    **Example**

    >>> import jax, numpyro, jax.numpy as jnp, numpyro.distributions as dist
    >>> import numpyro_gpaug as gpaug
    >>> def model(group, y=None):
    ...     intercept = numpyro.sample("intercept", dist.Normal(0, 5))
    ...     tau = numpyro.sample("tau", dist.HalfNormal(1))
    ...     with numpyro.plate("groups", 3):
    ...         effect = numpyro.sample("effect", dist.Normal(0, tau))
    ...     with numpyro.plate("data", len(group)):
    ...         rate = jnp.exp(intercept + effect[group])
    ...         numpyro.sample("y", dist.Poisson(rate), obs=y)
    >>> group, y = jnp.array([0, 0, 1, 1, 2, 2]), jnp.array([3, 5, 9, 6, 4, 4])
    >>> guide = gpaug.AutoLatentGaussian(model)
    >>> svi = gpaug.ConjugateSVI(model, guide)
    >>> fit = svi.run(jax.random.key(0), 50, group, y, progress_bar=False)
    >>> print(guide)
    AutoLatentGaussian, 4 Gaussian latents, dense
      intercept  ()    Gaussian
      effect     (3,)  Gaussian
      tau        ()    hyperparameter, a point (AutoDelta)
      y          (6,)  observed, in closed form

    References: Rue, Martino and Chopin (2009), Approximate Bayesian inference for
    latent Gaussian models; Khan and Lin (2017), Conjugate-computation variational
    inference; Opper and Archambeau (2009), The variational Gaussian approximation
    revisited.
    """

    _purpose = FIT
    view = JointView

    covariances: ClassVar[Any] = dict.fromkeys(("natural", "dense"), InducingPosterior)

    def read(self, model: Model, *args: Any, **kwargs: Any) -> Structure:
        purpose = self._purpose if self.conjugate else WHITE
        found = inspect_joint(model, purpose, *args, **kwargs)
        if not self.conjugate:
            found = found.unstructured
            refuse_large(found)
            if JOINT in found.others:
                raise ValueError(
                    f"the latent {JOINT!r} would share the param {_DENSE[0]!r} with "
                    "the joint Gaussian of this guide: rename the latent"
                )
        return found

    def start_at(self, given: Values, trace: Trace, view: Any) -> dict[str, Any]:
        """Return natural parameters at the start of a fit: the posterior after
        observing every predictor at its prior mean with variance one. Under a wide
        prior, the expectation of a likelihood may not be finite: ``exp(f)`` overflows
        at a standard deviation of 14. Gaussian data start at the prior, because one
        step from any start is enough for them. Given natural parameters are filled up
        with those of the prior.

        Pairs of predictors are observed a tenth of a standard deviation higher. If a
        likelihood depends on the product of two predictors with prior mean zero, all
        derivatives vanish at these means, which are not a maximum."""
        if not given.keys().isdisjoint(self.own_params()):
            leaves, treedef = jax.tree.flatten(standard_naturals(self.structure))
            named = zip(self.own_params(), leaves, strict=True)
            values = [given.get(k, x[0])[None].astype(x.dtype) for k, x in named]
            return jax.tree.unflatten(treedef, values)
        prior, structure = view.priors()[JOINT].natural, view.structure
        compared = not (structure.subsampled or self.random_others)
        if compared and view.expected("exact").quadratic:
            return {JOINT: prior}
        map_ = view.maps()[JOINT]
        single, at = map_, map_.offset
        if isinstance(map_, PairedMap):
            single = map_.single
            at = at.at[:, map_.left].add(0.1).at[:, map_.right].add(0.1)
        added = single.information(GaussianFactors(at, jnp.ones_like(at)))
        return {JOINT: times(view.priors()[JOINT], added)}

    def natural_params(self, natural: dict[str, Any]) -> dict[str, Any]:
        params = super().natural_params(natural)
        if self.structure.basis is not None:
            params[_BASIS] = self.structure.matrix
        return params

    def param_names(self, block: Block) -> tuple[str, ...]:
        return _names(self.structure.form) if self.conjugate else _DENSE

    def split_params(self, params: Values) -> tuple[Values, dict[str, Values]]:
        # In the fit, the precision may have had another form.
        natural = {_BASIS}.union(*map(_names, STRUCTURES.values()))
        names = natural if self.conjugate else _DENSE
        own = {k: x for k, x in params.items() if k in names}
        return {k: x for k, x in params.items() if k not in own}, {JOINT: own}

    def moments(self, own: Own) -> dict[str, Any]:
        given = own[JOINT]
        if not isinstance(given, dict):
            return {JOINT: given}
        if _DENSE[0] in given:
            return {JOINT: with_latent_axis(_factored(given).moments())}
        parts = {k.removeprefix(_PREFIX): x[None] for k, x in given.items()}
        basis = parts.pop("basis", None)
        q = natural_from(parts, self.structure.form).moments()
        if basis is not None:
            back = basis[0].T
            q = Moments(q.mean @ back, q.whitener @ back)
        return {JOINT: q}

    def turn(self, arguments: Arguments, values: Values) -> bool:
        """Change to the basis of the principal directions of the predictors, in which
        rounding preserves more of the precision. The params of a fit include it.

        :param arguments: the model's arguments.
        :param values: values of params and other latents.
        :return: whether latents are few and dense.
        """
        structure = self.structure_at(arguments)
        if not structure.form.any_rows or structure.size > MOST_TURNED:
            return False
        here = structure.unturned

        def projection(arguments: Arguments, values: Values) -> Array:
            view = self.view(here, self.model, arguments, values, fixed_key())
            return view.predictors.dense.projection[0]

        found = jit_for_few_runs(projection)(arguments, values)
        self._structure = self.structure.turned(np.asarray(found))
        self._sizes, self._checks, self.programs = {}, {}, []
        return True

    @precise
    def __call__(self, *args: Any, **kwargs: Any) -> Values:
        """Draw every latent.

        :return: values by site name.
        """
        self.begin(*args, **kwargs)
        arguments = Arguments.split(args, kwargs)
        structure: Any = self.structure_at(arguments)
        values = self.draw_others(*args, **kwargs)
        view = self.view(structure, self.model, arguments, values, random.key(0))
        q = self._moments()
        standard = dist.Normal(jnp.zeros(q.rank, structure.dtype), 1).to_event(1)
        infer = {"is_auxiliary": True}
        noise = numpyro.sample(f"_{JOINT}", standard, infer=infer)[None]
        flat = q.mean[0] + q.unwhiten(noise)[0]
        white = drawn_white(view.prior, q, noise)
        if structure.basis is not None:
            # Params from before the rotation have none.
            eye = jnp.eye(structure.size, dtype=structure.dtype)
            flat = numpyro.param(_BASIS, eye) @ flat
            structure = structure.unturned
        if white is None:
            white = structure.unlinked(structure.split(flat), view.links)
        else:
            white = structure.split(white[0])
        # From the noise to the standard normal variables of the prior.
        log_volume = q.log_det[0] / 2 + log_volume_along(view.links)
        model = whitened(self.model, white, structure.fields)
        filled = handlers.substitute(model, data=values)
        with handlers.block():
            trace = handlers.trace(handlers.seed(filled, 0)).get_trace(*args, **kwargs)
        for site in structure.sites:
            value, fn = trace[site.name]["value"], trace[site.name]["fn"]
            # The density of the values is the density of the underlying standard normal
            # variables, multiplied by the ratio of both prior densities.
            ratio = fn.log_prob(value).sum() - log_volume / len(structure.sites)
            if site.name in structure.fields:
                own = field(fn)
                assert own is not None
                ratio -= own.log_density(white[site.name])
            else:
                ratio -= dist.Normal().log_prob(white[site.name]).sum()
            shares = jnp.full(fn.batch_shape, ratio / math.prod(fn.batch_shape))
            delta = dist.Delta(value, shares, event_dim=fn.event_dim)
            values[site.name] = numpyro.sample(site.name, delta)
        return values

    def _moments(self) -> Any:
        """Return the moments of the latents, at their params."""
        names, structure = self.own_params(), self.structure
        if not self.conjugate:
            zeros = jnp.zeros(structure.size, structure.dtype)
            scale = START * jnp.eye(structure.size, dtype=structure.dtype)
            pairs = zip(names, (zeros, scale), strict=True)
            factored = _factored({name: numpyro.param(name, x) for name, x in pairs})
            return with_latent_axis(factored.moments())
        leaves, treedef = jax.tree.flatten(standard_naturals(self.structure))
        params = [
            numpyro.param(name, jnp.asarray(x[0]), constraint=NATURAL)
            for name, x in zip(names, leaves, strict=True)
        ]
        found = jax.tree.unflatten(treedef, [x[None] for x in params])
        return found[JOINT].moments()

    def _title(self) -> str:
        structure = self.structure
        size = sum(math.prod(s.shape) for s in structure.sites)
        groups = structure.groupings[0] if structure.groupings else Grouping(())
        cut = None if structure.form.all_groupings else 1
        sites = [site for g in structure.groupings[:cut] for site in g.sites]
        names = ", ".join(name for name, _ in sites)
        form = structure.form.describe(names, groups.size)
        return f"AutoLatentGaussian, {size} Gaussian latents, {form}"

    def _kind(self, other: str) -> str:
        kind = super()._kind(other)
        held = dict(self.structure.held)
        if other not in held:
            return kind
        return (
            f"{kind.replace('hyperparameter', 'not jointly Gaussian')}: {held[other]}"
        )


def _factored(params: Mapping[str, Array]) -> BlockGaussian:
    loc, factor = (params[name] for name in _DENSE)
    return BlockGaussian(loc, jnp.tril(factor))


def _names(kind: Any) -> tuple[str, ...]:
    return tuple(f"{_PREFIX}{part}" for part in kind.param_names())
