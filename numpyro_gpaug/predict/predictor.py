# SPDX-License-Identifier: Apache-2.0
"""Predictions of one model and guide as compiled functions of arrays alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import Array, random
from numpyro import handlers

from numpyro_gpaug._numpyro import Ordered, one_thread, whole_plates
from numpyro_gpaug.distributions.stacked import expanded
from numpyro_gpaug.errors import CholeskyError, NotConjugateError
from numpyro_gpaug.gaussians.dense import Moments
from numpyro_gpaug.gp.markov import numbers_of, times_of
from numpyro_gpaug.guides.base import ProcessGuide
from numpyro_gpaug.guides.function_posterior import Fit
from numpyro_gpaug.math.arrays import is_traced
from numpyro_gpaug.math.compiling import SMALL_OF_CHAINS, SMALL_OF_FEW, jit
from numpyro_gpaug.math.sharding import mesh_of_latents, on_mesh
from numpyro_gpaug.math.threads import threads_for
from numpyro_gpaug.model.affine import ROUNDING
from numpyro_gpaug.model.arguments import Added, Arguments, Model, Values
from numpyro_gpaug.model.closures import watched
from numpyro_gpaug.model.columns import Labels
from numpyro_gpaug.model.jaxpr import dependence_on_arrays
from numpyro_gpaug.model.labels import labelled_axes
from numpyro_gpaug.model.latents import JOINT, Structure
from numpyro_gpaug.model.padding import Padding
from numpyro_gpaug.model.sources import Sources, names_of_arrays, sources
from numpyro_gpaug.model.structure import (
    MAX_SHAPES,
    Observed,
    flat_functions,
    from_cache,
    run_model,
)
from numpyro_gpaug.predict.answers import Answers, JointAnswers, depending, one_of
from numpyro_gpaug.predict.mixture import MIXED, Fitted, averaged, over_members
from numpyro_gpaug.predict.summary import MAX_JOINT, NO_SITES, KnownSites, SiteMoments

# The numbers that the rows of a block may have.
_NUMBERS = 2**24


class Prepared(NamedTuple):
    """Quantities that predictions at all inputs share, computed by the first of them;
    for a mixture, for every member, members first.

    :param moments: moments of the Gaussian blocks, latent axis first.
    :param factors: see :class:`~numpyro_gpaug.guides.function_posterior.Fit`.
    """

    moments: dict[str, Moments]
    factors: dict[str, Any]


class Query(NamedTuple):
    """A kind of prediction.

    :param what: ``"f"``, ``"joint"``, ``"y"``, ``"log_prob"``, ``"left_out"``,
        ``"draws"`` (with ``key`` and ``num``), or ``"average"``.
    :param site: the process or the observed site.
    :param how: options of this kind of prediction.
    """

    what: str
    site: str
    how: dict[str, Any] = {}

    def given(self, **more: Any) -> Query:
        """Return the same with further options."""
        return self._replace(how=self.how | more)


class Predictor:
    """The part of predictions that does not depend on numbers. Posteriors of the same
    model and guide share it, and its compiled programs.

    :param model: the model.
    :param structure: the structure of the model.
    :param guide: its guide, which reads a fit.
    """

    def __init__(self, model: Model, structure: Structure, guide: ProcessGuide) -> None:
        self.model = model
        self.version = watched(model).version()
        self.structure = structure
        self.function_posterior = guide.function_posterior
        self._moments = guide.moments
        kind = JointAnswers if structure.joint else Answers
        self._answers = kind(structure, guide.function_posterior)
        self.named, self.observed = self._answers.named, self._answers.observed
        static = "what", "site", "num", "grouped", "unpadded", "of", "of_nodes"
        chains = structure.joint and structure.form.layout.steps > 1
        self._jit = partial(jit, small=SMALL_OF_CHAINS if chains else SMALL_OF_FEW)
        self._compiled = self._jit(self._answer, static_argnames=static)
        self._prepared = self._jit(self._prepare)
        # Programs and results of tracing, by kind and shapes of arguments.
        self._cache: dict[Any, Any] = {}
        names = tuple(site.name for site in structure.observed)
        model_at_fit = self._answers.with_times(self._without_data())
        self._padding = Padding(model_at_fit, names)

    def _cached(self, kind: str, key: Any, made: Callable[[], Any]) -> Any:
        """Return what is known about a key, which is made if necessary."""
        return from_cache(self._cache, (kind, key), made, 8 * MAX_SHAPES)

    def _run(
        self, function: Callable[..., Any], arguments: Arguments, *given: Any
    ) -> Any:
        """Call a function, compiled once for the shapes of the model's arguments.

        :param function: a function of these and of the rest, known by its name.
        """
        name, made = function.__name__, partial(self._jit, partial(function))
        program = self._cached(name, arguments.shapes, made)
        with threads_for(self.structure.largest):
            found = program(arguments, *given)
            # All results of a program become available together.
            jax.block_until_ready(jax.tree.leaves(found)[:1])
        return found

    @one_thread
    def sources(
        self, arguments: Arguments, structure: Structure, values: Values
    ) -> Sources:
        """Return the arguments from which the model computes its observations and
        inputs; the model is traced once per shape of the arguments.

        :param arguments: the model's arguments.
        :param structure: the structure of the model at these arguments.
        :param values: values of params and other latents.
        """
        given = self.model, *arguments.merge(), structure, values
        return self._cached("sources", arguments.shapes, partial(sources, *given))

    @one_thread
    def __call__(
        self,
        query: Query,
        arguments: Arguments,
        fitted: Fitted,
        prepared: Prepared | None,
    ) -> tuple[Any, Prepared]:
        """Make one prediction with one compiled program.

        :param query: the kind of prediction.
        :param arguments: the model's arguments.
        :param fitted: the fitted quantities.
        :param prepared: quantities from an earlier prediction; computed here if
            ``None``.
        :return: the prediction, and quantities that later predictions need.
        :raises CholeskyError: if a kernel matrix does not factorise.
        """
        known = prepared is not None
        on_devices = on_mesh(arguments.mesh or mesh_of_latents(fitted))
        with on_devices, threads_for(self.structure.largest):
            if prepared is None:
                prepared = self._prepared(arguments, fitted)
            asked = {"what": query.what, "site": query.site, **query.how}
            ordered = self._compiled(arguments, fitted, prepared, **asked)
            if not is_traced(arguments):
                # The limit on threads ends here, so the work must end here, too.
                jax.block_until_ready(ordered.tree)
        if not known and not is_traced(arguments):
            for name, factor in prepared.factors.items():
                if not all(np.isfinite(x).all() for x in jax.tree.leaves(factor)):
                    raise CholeskyError(
                        f"the kernel matrix of {name!r} did not factorise"
                    )
        if not is_traced(arguments) and arguments.static[-1] is None:
            self._cached(
                "fewer", _kind(query, arguments, fitted),
                lambda: (arguments.num_rows, _shapes(ordered.tree)),
            )  # fmt: skip
        return ordered.tree, prepared

    @one_thread
    def padded(self, what: str, arguments: Arguments) -> Arguments:
        """Return arguments with added rows, if predictions at several numbers of rows
        may share programs.

        :param what: the kind of prediction.
        :param arguments: the model's arguments.
        """
        # Joint covariances take the cube of the number of rows.
        return self._padding(arguments, doubling=what not in ("joint", "draws"))

    @one_thread
    def rows_independent(
        self, arguments: Arguments, which: frozenset[int], size: int
    ) -> bool:
        """Whether the model treats rows one by one, so that they may be predicted in
        blocks.

        :param arguments: the model's arguments.
        :param which: the arrays that have one row per observation.
        :param size: rows of a block.
        """
        return self._padding.proves(
            arguments, Added(max(size, arguments.num_rows + 1), which)
        )

    def rows_of_block(self, batch_size: int, rows: int) -> int:
        """Return the rows of a block: more than requested if the latents are so many
        that computing with all of them again takes most of the time of a block.

        :param batch_size: the requested number.
        :param rows: the number of all rows.
        """
        if not self.structure.joint:
            return batch_size
        others = self.structure.form.layout.others
        most = min(self.structure.size // 16, _NUMBERS // (1 + others))
        while batch_size < most and rows > 4 * batch_size:
            batch_size *= 2
        return batch_size

    @one_thread
    def fewer(
        self, query: Query, arguments: Arguments, padded: Arguments, fitted: Fitted
    ) -> tuple[int, Any]:
        """Return another number of rows than the one that is computed, and the shapes
        of a prediction for it. They are those of an earlier prediction, if there was
        one.

        :param padded: the arguments that are computed, with added rows or of a block;
            the others are those of :meth:`__call__`.
        """
        key = _kind(query, arguments, fitted)
        if self._cache.get(("fewer", key), (0,))[0] == padded.num_rows:
            self._cache.pop(("fewer", key))
        shapes_of = partial(self.shapes_of, query, arguments, fitted)
        return self._cached("fewer", key, lambda: (arguments.num_rows, shapes_of()))

    @one_thread
    def shapes_of(self, query: Query, arguments: Arguments, fitted: Fitted) -> Any:
        """Return the shapes of the results of :meth:`__call__`, found without
        arithmetic."""

        def run(arguments: Arguments, fitted: Fitted) -> Any:
            prepared = self._prepare(arguments, fitted)
            given = arguments, fitted, prepared, query.what, query.site
            return self._answer(*given, **query.how).tree

        return jax.eval_shape(run, arguments, fitted)

    @one_thread
    def moments(self, fitted: Fitted) -> dict[str, Moments]:
        """Return moments of the Gaussian blocks that are the same for all members,
        latent axis first."""
        return jax.jit(self._moments)(fitted.own) if fitted.own else {}

    def run(self, arguments: Arguments, fitted: Fitted) -> None:
        """Run the model outside of a program, where it knows its arguments and can
        raise for them.

        :param arguments: the model's arguments.
        :param fitted: the fitted quantities.
        """
        key, values = random.key(0), fitted.first.values
        run_model(flat_functions(self._without_data()), arguments, key, values)

    @one_thread
    def weighing(self, arguments: Arguments, fitted: Fitted) -> tuple[str, ...] | None:
        """Return the names of the arguments on which the weights of latents in
        predictors depend; ``None`` if the model does not run with the arguments.

        :param arguments: the model's arguments.
        :param fitted: the fitted quantities.
        """

        def slopes(arguments: Arguments) -> Array:
            return self._view(arguments, fitted.first).slopes()

        def found() -> tuple[str, ...] | None:
            try:
                used = dependence_on_arrays(slopes, arguments).state
            except TypeError:
                return None
            names = names_of_arrays(self.model, *arguments.merge())
            return tuple(names[int(i)] for i in used)

        return self._cached("weighing", arguments.shapes, found)

    def weights(self, fitted: Fitted) -> dict[str, dist.MultivariateNormal]:
        """Return posteriors of the plain Gaussian weight vectors, by site.

        :param fitted: the fitted quantities.
        """
        found = {}
        for block in self.structure.weights:
            mean, whitener = self.moments(fitted)[block.name]
            covariance = jnp.swapaxes(whitener, -1, -2) @ whitener
            found[block.site] = dist.MultivariateNormal(
                mean.reshape(block.shape), covariance.reshape(*block.shape, -1)
            )
        return found

    @one_thread
    def axes(
        self, arguments: Arguments, fitted: Fitted, labels: Labels
    ) -> dict[str, tuple[str, ...]]:
        """Return, by site, the argument with labels that indexes each axis; empty for
        an axis that none, or several, index.

        :param arguments: the model's arguments.
        :param fitted: the fitted quantities.
        :param labels: labels by argument.
        """

        def view(arguments: Arguments) -> Any:
            return self._view(arguments, fitted.first)

        names = names_of_arrays(self.model, *arguments.merge())
        return labelled_axes(view, arguments, names, labels)

    @one_thread
    def completed(self, arguments: Arguments, fitted: Fitted) -> Fitted:
        """Return the fitted quantities with the times of chains of states.

        :param arguments: the model's arguments at the fit.
        :param fitted: the fitted quantities.
        """
        names = {times_of(name) for name in self.structure.process_names}
        if not (names and self.structure.joint):
            return fitted

        def times(arguments: Arguments, values: Values) -> Values:
            flat = flat_functions(self._without_data())
            trace = run_model(flat, arguments, random.key(0), values)
            return {k: site["value"] for k, site in trace.items() if k in names}

        found = self._run(times, arguments, fitted.first.values)
        return fitted._replace(values={**fitted.values, **found})

    @one_thread
    def check(
        self, arguments: Arguments, fitted: Fitted, marks: dict[str, Array], site: str
    ) -> bool:
        """Raise for group codes that the model does not have (JAX would silently use
        the last group), for values of a latent that differ from the fit's, and for
        latents that are too many for one matrix and depend on several groups.

        :param arguments: the model's arguments.
        :param fitted: the fitted quantities; for a mixture the first member is checked.
        :param marks: the checksum of the factors of the fit, from :meth:`sites`.
        :param site: the site to predict.
        :return: whether to predict by groups: there are many rows, and each of them
            depends on one group.
        """
        codes, here, whole = self._checks(arguments, fitted.first, site)
        codes.check(
            f"values of {site!r}",
            ". A new group needs a plate with more members, and a step beyond the last "
            "one a longer series. Make the size a keyword argument of the model, and "
            "pass it here",
        )
        if (name := differing(here, marks)) is not None:
            if arguments.static[-1] is not None:
                # The error may depend on the rows.
                return self.check(arguments.counted(), fitted, marks, site)
            own = np.ndim(here[name]) > 1  # the prior of a site by itself
            raise NotConjugateError((_OTHER_PRIOR if own else _ELSEWHERE)(name))
        return float(whole) < ROUNDING

    def valid(
        self, arguments: Arguments, fitted: Fitted, marks: dict[str, Array], site: str
    ) -> Array:
        """Whether :meth:`check` accepts traced arguments.

        :param arguments: the model's arguments; the others are those of :meth:`check`.
        """
        given = jax.lax.stop_gradient((arguments, fitted.first))
        codes, here, _ = self._checks(*given, site)
        same = [_same(here[k], marks[k], jnp) for k in here.keys() & marks.keys()]
        return jnp.stack([*same, codes.valid]).all()

    def _checks(self, arguments: Arguments, fitted: Fitted, site: str) -> Any:
        def checks(arguments: Arguments, fitted: Fitted) -> Any:
            return self._answers.checks(self._view(arguments, fitted), site)

        key, made = (arguments.shapes, site), partial(self._jit, checks)
        return self._cached("checks", key, made)(arguments, fitted)

    def _known_at(self, arguments: Arguments, fitted: Fitted) -> Any:
        """Return moments of the sites that summaries show, a checksum of the factors of
        all, and quadrature errors; see :meth:`sites`."""
        view = self._view(arguments, fitted.first)
        q = self._moments(fitted.first.own)[JOINT]
        at = {k: SiteMoments(*view.moments(k, q)) for k in self.shown()}
        if fitted.members is not None:
            means = {k: x.mean for k, x in at.items()}

            def about(fitted: Fitted) -> dict[str, SiteMoments]:
                here = self.marginals(arguments, fitted)
                return {k: x.about(means[k]) for k, x in here.items()}

            total = averaged(about, fitted)
            at = {k: x.centred(means[k]) for k, x in total.items()}
        return at, view.marks(), view.rule_errors(q)

    @one_thread
    def sites(
        self, arguments: Arguments, fitted: Fitted, structure: Structure
    ) -> KnownSites:
        """Return posteriors of all Gaussian sites at the arguments of the fit, a
        checksum of their factors, and quadrature errors by observed site. For a mixture
        the last two belong to its first member.

        :param arguments: the model's arguments.
        :param fitted: the fitted quantities.
        :param structure: the structure of the model at these arguments.
        """
        if not self.structure.joint:

            def priors(arguments: Arguments, fitted: Fitted) -> dict[str, Array]:
                # In the model itself, where plates may draw some of the rows.
                given = structure, self.model, arguments, fitted.first.values
                return self._answers.marks(self._answers.view(*given, random.key(0)))

            return NO_SITES._replace(marks=self._run(priors, arguments, fitted))
        at, marks, errors = self._run(self._known_at, arguments, fitted)
        shown = {k: SiteMoments(*at[k]) for k in self.shown()}
        lost = {name: float(x) for name, x in errors.items()}
        means = {k: x.mean for k, x in shown.items()}
        flat = {k: x for k, x in means.items() if x.ndim == 1 and len(x) <= MAX_JOINT}
        known = cache(partial(self.covariances, arguments, fitted, flat))
        for k in flat:
            one = partial(lambda k: known()[k], k)
            shown[k] = shown[k]._replace(covariance=one)
        return KnownSites(shown, marks, lost)

    def shown(self) -> list[str]:
        """Return the names of the Gaussian sites that summaries show."""
        if not self.structure.joint:
            return [block.site for block in self.structure.weights]
        # Inducing values are whitened: predict_f has the process.
        hidden = {x for k in self.structure.functions for x in numbers_of(k)}
        return [s.name for s in self.structure.sites if s.name not in hidden]

    def marginals(self, arguments: Arguments, fitted: Fitted) -> dict[str, SiteMoments]:
        """Return moments of the sites that summaries show, for a fit that is not a
        mixture; pure.

        :param arguments: the model's arguments.
        :param fitted: the fitted quantities.
        """
        if not self.structure.joint:
            weights = self.weights(fitted).items()
            return {k: SiteMoments(x.mean, x.variance) for k, x in weights}
        view = self._view(arguments, fitted)
        q = self._moments(fitted.own)[JOINT]
        return {k: SiteMoments(*view.moments(k, q)) for k in self.shown()}

    @one_thread
    def covariances(
        self, arguments: Arguments, fitted: Fitted, means: dict[str, Array]
    ) -> Values:
        """Return the covariances of Gaussian sites.

        :param arguments: the model's arguments.
        :param fitted: the fitted quantities.
        :param means: means of the sites in the mixture.
        """

        def covariances(
            arguments: Arguments, fitted: Fitted, means: dict[str, Array]
        ) -> Any:
            def of_one(fitted: Fitted) -> Values:
                view = self._view(arguments, fitted)
                q, found = self._moments(fitted.own)[JOINT], {}
                for k, mean in means.items():
                    map_ = view.affine(k).matrices
                    shift = map_(q.mean)[0] - mean
                    found[k] = map_.covariance(q)[0] + jnp.outer(shift, shift)
                return found

            return averaged(of_one, fitted)

        with self.version.running():
            return self._run(covariances, arguments, fitted, means)

    def predicted(self, site: str | None) -> Observed:
        """Return the observed site whose new observations are predicted: like
        :meth:`observed`, but without factors.

        :raises ValueError: if there are only factors.
        """
        found = depending(self.structure)
        factors = [s.name for s in found if s.factor]
        drawn = [s for s in found if not s.factor]
        if site in factors or (site is None and factors and not drawn):
            raise ValueError(
                f"{site or factors[0]!r} is a numpyro.factor, which has no "
                "distribution of new observations. predict_f predicts the "
                "predictor, and log_prob returns the density of held-out data"
            )
        return one_of(drawn, site, "observed site")

    # -- what is compiled ------------------------------------------------------------

    def _answer(
        self,
        arguments: Arguments,
        fitted: Fitted,
        prepared: Prepared,
        what: str,
        site: str,
        *,
        grouped: bool = False,
        **how: Any,
    ) -> Ordered:
        shapes = []  # of data
        mixture = fitted.members is not None

        def one(fitted: Fitted, prepared: Prepared, number: Any) -> Ordered:
            view = self._view(arguments, fitted, grouped=grouped)
            fit = Fit(fitted.values, *prepared)
            answer, own = getattr(self._answers, what), how
            if what == "average":  # each member has its own draws
                own = {**how, "key": random.fold_in(how["key"], number)}
            if what == "left_out" and mixture:
                own = {**how, "weighed": True}
            found = answer(view, fit, site, **own)
            if what == "y":
                shapes.append(view.message(site)["fn"].shape())
            return Ordered(found)

        answer = over_members(one, fitted, prepared)
        if fitted.members is not None:
            log_weights = fitted.members.log_weights
            answer = Ordered(MIXED[what](answer.tree, log_weights, **how))
        if what == "y":
            # At the end, because mixtures use the original distributions.
            answer = Ordered(expanded(answer.tree, shapes[-1]))
        return answer

    def _prepare(self, arguments: Arguments, fitted: Fitted) -> Prepared:
        def one(fitted: Fitted, *_: Any) -> Prepared:
            factors = self.function_posterior.factors(self._view(arguments, fitted))
            return Prepared(self._moments(fitted.own), factors)

        return over_members(one, fitted, None)

    def _without_data(self) -> Callable[..., Any]:
        """Return the model with values for sites that are not observed here."""
        names = {site.name for site in self.structure.observed}

        def unobserved(message: dict[str, Any]) -> Array | None:
            drawn = message["type"] == "sample" and not message["is_observed"]
            if drawn and message["name"] in names:
                fn = message["fn"]
                return fn.support.feasible_like(jnp.zeros(fn.shape()))
            return None

        return handlers.substitute(whole_plates(self.model), substitute_fn=unobserved)

    def _view(
        self, arguments: Arguments, fitted: Fitted, *, grouped: bool = False
    ) -> Any:
        model = self._without_data()
        here = self._cached(
            "structure", arguments.shapes,
            lambda: self._answers.structure_at(model, arguments),
        )  # fmt: skip
        key = random.key(0)
        view = self._answers.view(here, model, arguments, fitted.values, key)
        return view.of_groups() if grouped else view


_ELSEWHERE = (
    "the covariance of {0!r} differs from the fit. Pass the graph, mesh, points or "
    "steps of the fit: places to predict must be among them, without data. To predict "
    'anywhere use a process, gpaug.GaussianProcess("{0}", kernel, inducing)(X)'
).format
_OTHER_PRIOR = (
    "the prior of {!r} differs from the fit. Pass the inducing inputs and "
    "hyperparameters of the fit, or leave out keyword arguments, which the posterior "
    "keeps"
).format


def differing(here: dict[str, Array], marks: dict[str, Array]) -> str | None:
    """Return the name of a site whose checksum differs, ``None`` if there is none.

    :param here: checksums by site.
    :param marks: those of the fit.
    """
    for name in here.keys() & marks.keys():
        if not _same(np.asarray(here[name]), np.asarray(marks[name]), np):
            return name
    return None


def _same(mark: Any, known: Any, xp: Any) -> Any:
    """Whether a checksum equals the fit's.

    :param mark: the checksum of a site, or one for each part of its prior.
    :param known: the checksum of the fit.
    :param xp: NumPy, or for traced checksums ``jax.numpy``.
    """
    if mark.ndim > 1:
        # Files of earlier versions have no means.
        mark = mark[: len(known)]
    same = xp.isclose(mark, known, rtol=1e-3, atol=1e-5).all(-1)
    if mark.ndim > 1:
        # The last number is the size, which a plate may change.
        same |= mark[:, -1] != known[:, -1]
    return same.all()


def _kind(query: Query, arguments: Arguments, fitted: Fitted) -> Any:
    """Return the properties of a prediction other than its number of rows."""
    (what, site, how), num = query, arguments.num_rows
    shapes = tuple(
        (x.ndim, x.shape[x.ndim > 0 and len(x) == num :], x.dtype)
        for x in arguments.arrays
    )
    return what, site, fitted.size, shapes, arguments.static, how.get("num")


def _shapes(tree: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def predictor_for(guide: ProcessGuide, model: Model, structure: Structure) -> Predictor:
    """Return the predictor of a model and its guide, which is made once and cached on
    the guide.

    :param structure: the structure of the model, at any arguments.
    """
    found, structure = guide.predictors.get(id(model)), structure.sizeless()
    known = watched(model).version(), structure
    if found is None or (found.version, found.structure) != known:
        # The predictor holds the model, so no other model gets its id.
        found = guide.predictors[id(model)] = Predictor(model, structure, guide)
    return found
