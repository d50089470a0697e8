# SPDX-License-Identifier: Apache-2.0
"""Predictions of a model at fixed params, given a Gaussian on all of its latents."""

from __future__ import annotations

import math
import warnings
from copy import copy
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import Array
from numpyro.distributions import Distribution

from numpyro_gpaug._numpyro import Ordered
from numpyro_gpaug.distributions.dense_matrix_normal import DenseMatrixNormal
from numpyro_gpaug.distributions.predictor_mixture import PredictorMixture
from numpyro_gpaug.errors import NotConjugateError
from numpyro_gpaug.likelihoods.expectations import (
    Route,
    base_distribution,
    lookup_correlated,
    predictive,
)
from numpyro_gpaug.math import linalg
from numpyro_gpaug.math.correlated_softmax import FINER, NODES, matrix_of_pairs
from numpyro_gpaug.math.expectation import (
    PredictorMoments,
    nodes,
    placed,
    rule_differences,
)
from numpyro_gpaug.math.fingerprints import checksum, checksums, fingerprint
from numpyro_gpaug.model.affine import Predictors
from numpyro_gpaug.model.arguments import Arguments
from numpyro_gpaug.model.correlated_data import covariance_of
from numpyro_gpaug.model.costs import MAX_DENSE
from numpyro_gpaug.model.expectation import (
    correlated,
    pair_places,
    places_within,
)
from numpyro_gpaug.model.frontier import frontier, index_of, separation
from numpyro_gpaug.model.jaxpr import dependence_on_arrays
from numpyro_gpaug.model.joint import REGISTERED, JointView
from numpyro_gpaug.model.latents import JOINT
from numpyro_gpaug.model.left_out import (
    LeftOut,
    Removed,
    conditioned,
    local_names,
    log_density,
    log_density_of_groups,
    of_each_datum,
    refuse_others,
    without_factors,
    without_groups,
)
from numpyro_gpaug.model.observations import skipped_error
from numpyro_gpaug.model.structure import Observed

_NO_FACTORS = (
    "leave_one_out needs one or two predictors of its own for each datum of {0!r} (for "
    "groups write jnp.exp(effect[group]), not jnp.exp(effect)[group]). If all data "
    "share a number, such as the logit of a gate, give it a prior that is not "
    "Gaussian, since a Gaussian one makes it a predictor. "
    "diagnostics.loo(diagnostics.to_datatree(...)) works for any fit"
)
_OF_EACH_ROW = (
    "data of {!r} cannot be left out, because their plate has the latents {}. Give "
    "these a plate of their own, which the data index: effect[row], with "
    "row=np.arange(N) as an argument"
)
_SEVERAL = (
    "leave_one_out needs one or two predictors for each datum of {!r}, and its data "
    "are vectors or classes that depend on more. "
    "diagnostics.loo(diagnostics.to_datatree(...)) works for any fit"
)
_ANOTHER = (
    "all data of {0!r} are correlated with one another. The prediction is another set "
    "of them, independent of the fitted set given the latents. For other values of the "
    "same set make the correlated part a latent (a GaussianProcess f), and observe "
    "dist.Normal(f(X), noise)"
)
_TOO_MANY = (
    "the {0} entries of {1!r} are all correlated, and a prediction takes their "
    "covariance as one matrix, of at most {2} rows. Predict at fewer rows"
)


class JointPredictiveView(JointView):
    """A model at fixed params and other latents, with predictions of its sites from
    Gaussians on its latents."""

    _without: Removed | None = None

    _between = True

    def marks(self) -> dict[str, Array]:
        """Return checksums, by site, of the factors by which sites mix their values,
        and of the arguments that determine the factors; checksums of sparse precisions;
        and of the scales and locations of other sites, and the covariances of inducing
        values. They show whether numbers of the fit have the same meaning."""
        found = self._at_zero(self._program.outputs.factors)
        plain = self._marks_of_fields() | self._marks_of_priors()
        if not found:
            return plain
        arrays = self.arguments.arrays

        def factors(arguments: Arguments) -> Any:
            here = self.structure, self._model, arguments, self.values, self._key
            view = JointPredictiveView(*here)
            return view._at_zero(view._program.outputs.factors)

        shapes = jax.tree.map(jax.typeof, self.arguments)
        sources = dependence_on_arrays(factors, shapes)

        def mark(name: str) -> Array:
            used = {k for leaf in jax.tree.leaves(sources[name]) for k in leaf.state}
            own = (arrays[int(k)] for k in sorted(used))
            leaves = [*jax.tree.leaves(found[name]), *own]
            return checksum(
                jnp.concatenate([jnp.ravel(x).astype(float) for x in leaves])
            )

        return plain | {name: mark(name) for name in found}

    def _marks_of_priors(self) -> dict[str, Array]:
        """Return checksums, by site, of the scales and locations of independent latents
        that new rows share with the fit, and of the covariances of inducing values,
        each with its size."""
        outputs = self._program.outputs
        own = {s.name for s in self.structure.sites if not s.local}
        names = own - outputs.factors.keys() - outputs.precisions.keys()
        given = {k: (outputs.spreads[k], outputs.values[k]) for k in names}
        found = self._at_zero(given | outputs.kernels)
        return {k: checksums(parts) for k, parts in found.items()}

    def _marks_of_fields(self) -> dict[str, Array]:
        """Return checksums, by site, of the sparse precisions, and of their places."""
        given = self._program.outputs.precisions
        found = self._at_zero({name: values for name, (values, _) in given.items()})
        patterns = {name: self._fields[name].prior.pattern for name in found}
        places = {k: fingerprint([x.rows, x.columns]) for k, x in patterns.items()}
        return {
            # A number that float32 represents exactly.
            name: jnp.append(checksum(values), int(places[name]) % 2**16)
            for name, values in found.items()
        }

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of the values of a Gaussian or deterministic site.

        :param name: the name of the site.
        """
        return tuple(self._program.avals[self._variable(name)].shape)

    def affine(self, name: str) -> Predictors:
        """Return the values of a Gaussian or deterministic site as predictors.

        :param name: the name of the site.
        :raises NotConjugateError: if it is not affine in the latents.
        """
        variable = self._variable(name)
        state = self._program.value(variable).state
        for source, dependence in state.items():
            if dependence.nonlinear:
                raise NotConjugateError(
                    f"{name!r} is not affine in {source!r} "
                    f"({dependence.nonlinear}), so that its posterior is not "
                    "Gaussian. Name its predictor, numpyro.deterministic('eta', ...), "
                    "draw it, sample(key, ..., site='eta', sample_shape=(1000,)), and "
                    "transform the draws; average(..., of=function) averages "
                    "functions of the likelihood"
                )
        return self._affine([variable])

    def moments(self, name: str, q: Any) -> tuple[Array, Array]:
        """Return means and variances of a site's values, in its shape.

        :param name: the name of the site.
        :param q: moments of the latents.
        """
        mean, variance = self.affine(name).matrices.marginals(q)
        return mean.reshape(self.shape(name)), variance.reshape(self.shape(name))

    def residual_covariance(self, name: str) -> Array:
        """Return the covariance of a site's values given the latents, (n, n). It comes
        from the processes in these values: the variation that the inducing values do
        not explain.

        :param name: the name of the site.
        """
        variable = self._variable(name)
        size = math.prod(self._program.avals[variable].shape)
        total = jnp.zeros((size, size), self.structure.dtype)
        for slopes, carried in self._mixed_residuals(variable):
            total += jnp.einsum("cin,cim->nm", slopes, carried)
        return total

    def given_rows(self, q: Any, predicted: str) -> Any:
        """Return the Gaussian on the latents given other observations at the new rows,
        if these depend on the same new latents as the predicted site.

        :param q: a Gaussian in which the latents of new rows have their prior.
        :param predicted: the name of the predicted site.
        """
        program, structure = self._program, self.structure
        values, densities = program.outputs.values, program.outputs.densities
        there = values if predicted in values else densities
        own = local_names(structure)
        if predicted in there:
            own &= there[predicted].state.keys()
        known = [
            site
            for site in structure.observed
            if site.name in self._shown - {predicted}
            and own & densities[site.name].state.keys()
        ]
        if not known:
            return q
        likelihoods = self._at_zero(
            [program.outputs.likelihoods[s.name] for s in known]
        )
        for site, likelihood in zip(known, likelihoods, strict=True):
            refuse_others(site, likelihood.fn, structure)
        self._grouped = False
        found = [self._affine(self._of_site(s)) for s in known]
        if any(each.many for each in found):
            raise ValueError(
                f"{len(found[0].offset)} rows at which {known[0].name!r} is "
                "observed are too many for one matrix. Predict a few thousand rows "
                "at a time"
            )
        return conditioned(q, structure, found, likelihoods)

    def of_groups(self) -> JointPredictiveView:
        """Return this view, with the assumption that every predictor depends on one
        group. :meth:`misfits_of` must have confirmed it."""
        self._grouped = True
        return self

    def misfits_of(self, name: str) -> tuple[Array, Array]:
        dense = super().misfits_of(name)
        if self.structure.form.any_rows:
            return dense
        known = {s.name: s for s in self.structure.observed}
        if name in known:
            found = [self._affine([root]) for root in self._of_site(known[name])]
        else:
            found = [self.affine(name)]
        if not any(each.large for each in found):
            return dense
        any_pairs = getattr(self.structure.form, "any_pairs", False)
        worst = jnp.stack([each.misfit(any_pairs=any_pairs) for each in found]).max()
        return worst if any(each.many for each in found) else dense[0], worst

    def _variable(self, name: str) -> Any:
        """Return the variable of a site's values. For an observed site it is the
        predictor: the parameter of a likelihood in closed form, otherwise the one root
        of the density."""
        values = self._program.outputs.values
        if name in values:
            return values[name].variable
        known = {s.name: self._of_site(s) for s in self.structure.observed}
        if name not in known:
            raise ValueError(
                f"site={name!r} is none of the values that can be predicted, "
                f"{sorted([*known, *values])}. To predict a predictor, name it by "
                "numpyro.deterministic"
            )
        self._demand(name)
        if len(known[name]) != 1 or not self._has_root_of_its_own(name):
            raise ValueError(
                f"site={name!r}: its likelihood does not depend on one predictor "
                "for each datum. Name the predictor, numpyro.deterministic('eta', "
                "...), and predict it, predict_f(..., site='eta'); predictors with "
                f"names are {sorted(values)}"
            )
        return known[name][0]

    def _demand(self, name: str) -> None:
        """Raise for an observed site that the model does not reach with these
        arguments."""
        if name not in self._program.outputs.densities:
            raise skipped_error(name)

    def _has_root_of_its_own(self, name: str) -> bool:
        """Whether the one root of a site's density has an entry for each datum, and the
        data do not scale it first."""
        found, program = self.frontiers[name], self._program
        density = program.avals[program.outputs.densities[name].variable]
        closed = name in {
            s.name for s in self.structure.observed if s.route in REGISTERED
        }
        whole = program.avals[found.roots[0]].size >= density.size
        return closed or (whole and not found.scaled[0])

    def left_out(
        self, site: Observed, q: Any, together: LeftOut | None
    ) -> JointPredictiveView:
        """Return this view, in which predictors of a site have the moments that they
        have without the Gaussian factors of their own observations, or of their group.

        :param site: an observed site.
        :param q: moments of the latents, of the fit to these observations.
        :param together: the groups; ``None`` to leave out each datum by itself.
        :raises NotConjugateError: for a site without one or two predictors of its own
            for each datum.
        """
        roots, avals = self._of_site(site), self._program.avals
        size = self._number_of_data(site)
        several = any(avals[v].size > size for v in roots)
        # A predictor that several data share has one factor for all of them.
        shared = any(avals[v].size != size for v in roots)
        if site.route is Route.CORRELATED or site.correlated or several:
            raise NotConjugateError(_SEVERAL.format(site.name))
        if shared:
            raise NotConjugateError(_NO_FACTORS.format(site.name))
        if local := local_names(self.structure):
            raise NotConjugateError(_OF_EACH_ROW.format(site.name, sorted(local)))
        if site.indexed:
            raise NotConjugateError(_NO_FACTORS.format(site.name))
        if together is not None and len(together.place) != size:
            raise ValueError(
                f"groups has {len(together.place)} labels, and {site.name!r} has "
                f"{size} observations: expected one label for each"
            )
        first, begin = 0, 0
        for other in self.structure.observed:
            if other.name == site.name:
                break
            shapes = [avals[v].shape for v in self._of_site(other)]
            begin += sum(map(math.prod, shapes))
            first += len(pair_places(other, shapes, self._indices.get(other.name))[0])
        map_ = self.maps()[JOINT]
        at, expected = map_.marginals(q), self.expected("exact")
        slopes = jax.grad(lambda at: expected({JOINT: at}))(at)
        places = begin + np.arange(len(roots) * size).reshape(len(roots), size)
        precision = jax.vmap(jnp.diag)(-2 * slopes.variance[0][places].T)
        if len(roots) == 2:
            cross = -slopes.covariance[0, first : first + size, None, None]
            precision += cross * (1 - jnp.eye(2, dtype=cross.dtype))
        view = copy(self)
        view._without = Removed(roots, slopes.mean[0][places].T, precision, together)
        return view

    def log_density_left_out(self, q: Any, alone: Array, counts: Array) -> Array:
        """Return, for each datum of a view of :meth:`left_out`, the log density of its
        group given all other groups, flat.

        Gaussian factors stand for the likelihood. The size of a factor is such that its
        datum has the right density given all other data. A datum that counts w times
        has w equal factors. It is exact for Normal likelihoods.

        :param q: moments of the latents, of the fit to these observations.
        :param alone: the log density of each datum given all other data.
        :param counts: how often each datum counts (:func:`numpyro.handlers.scale`); 0
            if it is masked.

        Reference: Rasmussen and Williams (2006), Gaussian processes for machine
        learning, section 3.6.
        """
        assert self._without is not None
        known, slopes, precision, together = self._without
        if alone.size != len(slopes):
            raise NotConjugateError(_NO_FACTORS.format("the site"))
        map_, count = self._affine(known).matrices, len(known)
        variance = map_.marginals(q).variance[0] - map_.residual[0]
        own = of_each_datum(map_, q, variance.reshape(count, -1))
        counts, there = counts.ravel(), counts.ravel() > 0
        but_once = 1 - 1 / jnp.where(there, counts, 1)
        fewer = slopes * but_once[:, None], precision * but_once[:, None, None]
        factors = log_density(own, slopes, precision)
        sizes = alone.ravel() - factors + log_density(own, *fewer)
        sizes = jnp.where(there, counts * sizes, 0)
        if together is None:
            return (sizes + factors).reshape(alone.shape)
        whole = map_.covariance(q)[0].reshape(count, len(slopes), count, len(slopes))
        found = log_density_of_groups(whole, slopes, precision, together)
        there, at = together.members >= 0, jnp.maximum(together.members, 0)
        found += jnp.where(there, sizes[at], 0).sum(1)
        return found[together.place // together.members.shape[1]].reshape(alone.shape)

    def _marginals_without(self, variables: list[Any], q: Any) -> PredictorMoments:
        """Return :meth:`_marginals` without the factors of each datum, or of its
        group."""
        assert self._without is not None
        known, slopes, precision, together = self._without
        both, size = [*known, *variables], len(slopes)
        if any(self._program.avals[v].size != size for v in variables):
            raise NotConjugateError(_NO_FACTORS.format("the site"))
        map_ = self._affine(both).matrices
        mean, variance = (x[0].reshape(-1, size) for x in map_.marginals(q))
        residual = map_.residual[0].reshape(-1, size)
        count, cut = len(both), len(known)
        if together is None:
            own = of_each_datum(map_, q, variance - residual)
            shift, spread = without_factors(own, slopes, precision)
        else:
            whole = map_.covariance(q)[0].reshape(count, size, count, size)
            shift, spread = without_groups(whole, slopes, precision, together)
        moved = mean[cut:].T - shift
        variances = linalg.diagonal(spread).T + residual[cut:]
        covariance = spread[:, 0, 1] if len(variables) == 2 else None
        return PredictorMoments((*moved.T,), (*variances,), covariance)

    def _marginals(
        self, variables: list[Any], q: Any, index: Array | None = None
    ) -> PredictorMoments:
        """Return the moments of one or two predictors of each datum, flat.

        :param index: the entry of the first predictor that is paired with each entry of
            the second, if the data contain indices.
        """
        if self._without is not None:
            return self._marginals_without(variables, q)
        sizes = [self._program.avals[v].size for v in variables]
        ends = np.cumsum(sizes)
        map_ = self._affine(variables).matrices
        mean, variance = map_.marginals(q)
        means, variances = (jnp.split(x[0], ends[:-1]) for x in (mean, variance))
        covariance = None
        if len(sizes) == 2:
            first = jnp.arange(sizes[0]) if index is None else index
            places = first, sizes[0] + jnp.arange(sizes[1])
            covariance = map_.covariances(q, *jnp.broadcast_arrays(*places))[0]
        return PredictorMoments(tuple(means), tuple(variances), covariance, index)

    def predictive(self, site: Observed, q: Any) -> Distribution:
        """Return the distribution of new observations, with the latents integrated out.

        :param site: the observed site.
        :param q: moments of the latents.
        """
        self._demand(site.name)
        parts, program = self._program.outputs, self._program
        if site.correlated:
            return self._of_correlated_data(site, q)
        if site.route is Route.CLOSED_FORM:
            ((latent, leaf),) = parts.parameters[site.name].items()
            parameter = leaf.variable
            (mean,), (variance,), *_ = self._marginals([parameter], q)
            (likelihood,) = self._at_zero([parts.likelihoods[site.name]])
            shape = self._program.avals[parameter].shape
            return predictive(
                likelihood.fn,
                {latent: mean.reshape(shape)},
                {latent: variance.reshape(shape)},
            )
        fn = base_distribution(parts.likelihoods[site.name].fn)
        if site.route is Route.CORRELATED:
            mean, variance, pairs = self._correlated(site, q)
            entry = lookup_correlated(type(fn))
            assert entry is not None
            pairs = pairs.reshape(*mean.shape[:-1], -1)
            (likelihood,) = self._at_zero([parts.likelihoods[site.name]])
            likelihood = base_distribution(likelihood.fn)
            return entry.predictive(likelihood, mean, variance, pairs)
        leaves, treedef = jax.tree.flatten(Ordered(fn))
        variables = [leaf.variable for leaf in leaves]
        varies = tuple(program.depends(v) for v in variables)
        moving = [v for v, moves in zip(variables, varies, strict=True) if moves]
        if not moving:
            raise NotConjugateError(
                f"the distribution of {site.name!r} depends on no latents, only its "
                "observations do (as in obs=y - f), so y is not predicted. Write the "
                "latents into the distribution: dist.Normal(f, sd), obs=y"
            )
        batch = len(fn.batch_shape)
        apart = separation(program, moving, traced=True, batch=batch)
        if apart.reason is not None:
            hint = (
                ". A latent level belongs to the predictor, and not to the cut points"
                if isinstance(fn, dist.OrderedLogistic)
                else ""
            )
            raise NotConjugateError(
                f"the parameters of {site.name!r} do not depend on one or two "
                f"predictors for each datum: {apart.reason}. Draw predictions by "
                "numpyro.infer.Predictive, with guide=guide or nested.get_samples()"
                f"{hint}"
            )
        columns = site.columns if apart.columns is None else apart.columns
        found = frontier(program, moving, columns)
        roots = list(found.roots)
        index = index_of(program, found, batch) if apart.indexed else None
        at = self._marginals(roots, q, index)
        numbers = program.run(list(found.fixed), {})
        x, weights = nodes(len(roots), at.means[0].dtype)
        place = partial(found.density_at, numbers)
        moved = iter(jax.vmap(lambda node: place(placed(at, node)))(x))
        still = iter(self._at_zero([
            leaf for leaf, moves in zip(leaves, varies, strict=True) if not moves
        ]))  # fmt: skip
        given = tuple(next(moved) if moves else next(still) for moves in varies)
        mixture = PredictorMixture(
            given, weights, treedef, varies, fn.batch_shape, fn.event_shape, len(roots)
        )
        return mixture.of_labels()

    def _of_correlated_data(self, site: Observed, q: Any) -> Distribution:
        """Return the distribution of correlated observations; see :meth:`predictive`.
        For observations that are given it is the distribution of the independent data
        that they were rewritten as, which have the same density."""
        variable = self._program.outputs.parameters[site.name]["loc"].variable
        (likelihood,) = self._at_zero([self._program.outputs.likelihoods[site.name]])
        whole_shape = self._program.avals[variable].shape
        batch = whole_shape[: len(whole_shape) - site.correlated]
        # The entries of a matrix are counted row by row.
        shape = *batch, math.prod(whole_shape[len(batch) :])
        noise = covariance_of(likelihood.fn, site.correlated)
        map_ = self._affine([variable]).matrices
        mean, variance = (x[0].reshape(shape) for x in map_.marginals(q))
        if batch:
            places = map(jnp.asarray, places_within(shape))
            pairs = map_.covariances(q, *places)[0]
            whole = matrix_of_pairs(variance, pairs.reshape(*batch, -1))
        else:
            if shape[0] > MAX_DENSE:
                raise ValueError(_TOO_MANY.format(shape[0], site.name, MAX_DENSE))
            warnings.warn(_ANOTHER.format(site.name), stacklevel=2)
            whole = map_.covariance(q)[0]
        factor = linalg.cholesky(whole + noise)
        if site.correlated == 2:
            return DenseMatrixNormal(mean.reshape(whole_shape), factor)
        return dist.MultivariateNormal(mean, scale_tril=factor)

    def rule_errors(self, q: Any) -> dict[str, Array]:
        """Return the estimated error of quadrature by site, from a finer rule: the mean
        absolute difference in nats per datum. Sites that would need too large a matrix
        are left out.

        :param q: moments of the latents.
        """
        found: dict[str, Array] = {}
        for site in self.structure.observed:
            if site.route not in (Route.GAUSS_HERMITE, Route.CORRELATED):
                continue
            roots = self._of_site(site)
            if self._affine(roots).many and self.structure.form.any_rows:
                continue
            if site.route is Route.CORRELATED:
                found[site.name] = self._node_error(site, q)
                continue
            own = self.frontiers[site.name]
            numbers = self._program.run(list(own.fixed), {})
            at = self._marginals(roots, q, self._indices.get(site.name))
            density = partial(own.density_at, numbers)
            differences = rule_differences(density, at)
            total = jnp.stack([jnp.abs(x).sum() for x in differences]).sum()
            found[site.name] = total / self._number_of_data(site)
        return found

    def _number_of_data(self, site: Observed) -> int:
        """Return the number of observations of a site, which may share predictors; the
        number of predictors of a factor."""
        if site.factor:
            return max(self._program.avals[v].size for v in self._of_site(site))
        message = self.message(site.name)
        fn, value = message["fn"], message["value"]
        shape = jnp.broadcast_shapes(fn.shape(), jnp.shape(value))
        return math.prod(shape) // math.prod(base_distribution(fn).event_shape)

    def _node_error(self, site: Observed, q: Any) -> Array:
        """Return the error of an average over quasi-random nodes; see
        :meth:`rule_errors`."""
        (likelihood,) = self._at_zero([self._program.outputs.likelihoods[site.name]])
        at = self._correlated(site, q)
        rough, fine = (
            correlated(likelihood.fn, likelihood.value, *at, n) for n in (NODES, FINER)
        )
        return jnp.abs(rough - fine).mean()

    def _correlated(self, site: Observed, q: Any) -> tuple[Array, Array, Array]:
        """Return the moments of the correlated predictors of each datum of a site."""
        (root,) = self._of_site(site)
        shape = self._program.avals[root].shape
        map_ = self._affine([root]).matrices
        mean, variance = (x[0].reshape(shape) for x in map_.marginals(q))
        pairs = (jnp.asarray(x) for x in pair_places(site, [shape]))
        return mean, variance, map_.covariances(q, *pairs)[0]
