# SPDX-License-Identifier: Apache-2.0
"""Predictions of one model and guide as compiled functions of arrays alone."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import Array, lax, random
from numpyro import handlers
from numpyro.distributions import Distribution

from numpyro_gpaug._numpyro import Ordered, one_thread, whole_plates
from numpyro_gpaug.distributions.expanded import expanded
from numpyro_gpaug.errors import CholeskyError, NotConjugateError
from numpyro_gpaug.gaussians.base import Marginals
from numpyro_gpaug.gaussians.dense import Moments
from numpyro_gpaug.gp.conditional import Conditional
from numpyro_gpaug.guides.base import ProcessGuide
from numpyro_gpaug.guides.function_posterior import Fit
from numpyro_gpaug.likelihoods.expectations import (
    Route,
    base_distribution,
    predictive,
    through_wrappers,
)
from numpyro_gpaug.math.arrays import in_dtype_of
from numpyro_gpaug.math.compiling import few
from numpyro_gpaug.math.sharding import mesh_of_latents, on_mesh
from numpyro_gpaug.math.threads import threads_for
from numpyro_gpaug.model.arguments import Arguments
from numpyro_gpaug.model.closures import Version, watched
from numpyro_gpaug.model.inspect import structure_at
from numpyro_gpaug.model.observations import check_shape
from numpyro_gpaug.model.padding import Padding, family_of
from numpyro_gpaug.model.predictors import of_site
from numpyro_gpaug.model.sources import Sources, sources
from numpyro_gpaug.model.structure import (
    Block,
    Observed,
    Structure,
    flat_functions,
    remembered,
    run_model,
)
from numpyro_gpaug.model.view import ModelView
from numpyro_gpaug.predict.added_rows import joint_draws
from numpyro_gpaug.predict.left_out import left_out
from numpyro_gpaug.predict.mixture import (
    Fitted,
    FunctionValues,
    mixed,
    over_members,
)
from numpyro_gpaug.predict.summary import SiteMoments


class Prepared(NamedTuple):
    """Quantities that predictions at all inputs share, computed by the first of them;
    for a mixture, for every member, members first.

    :param moments: moments of the Gaussian blocks, latent axis first.
    :param factors: see :class:`~numpyro_gpaug.guides.function_posterior.Fit`.
    """

    moments: dict[str, Moments]
    factors: dict[str, Any]


class Predictor:
    """The part of predictions that does not depend on numbers. Posteriors of the same
    model and guide share it, and its compiled programs.

    :param model: the model.
    :param structure: the structure of the model.
    :param guide: its guide, which reads a fit.
    """

    def __init__(
        self, model: Callable[..., Any], structure: Structure, guide: ProcessGuide
    ) -> None:
        self.model = model
        self._watch = watched(model)
        self._version = self._watch.version()
        self.structure = structure
        # With the sizes of the last fit, to be known again by.
        self.known: Structure | None = None
        self.function_posterior = guide.function_posterior
        self._moments = guide.moments
        self._kinds: dict[str, Callable[..., Any]] = {
            "f": self._f, "joint": self._joint, "y": self._y,
            "log_prob": self._log_prob, "draws": self._draws,
            "left_out": self._left_out,
        }  # fmt: skip
        static = "what", "static", "site", "num", "grouped", "unpadded"
        self._compiled = few(self._answer, static_argnames=static)
        # By the shapes of the arguments.
        self._shapes: dict[Any, Any] = {}
        self._structures: dict[Any, Structure] = {}
        self._sources: dict[Any, Sources] = {}
        # By what they have in common but for the number of rows: for one number.
        self._fewer: dict[Any, tuple[int, Any]] = {}
        names = tuple(site.name for site in structure.observed)
        self._padding = Padding(self._without_data(), names)

    def in_its_dtype(self) -> AbstractContextManager[None]:
        """Give JAX the dtypes of the fit inside this context."""
        return in_dtype_of(self._version.doubles)

    def running(self) -> AbstractContextManager[Version]:
        """Allow the model to run inside this context, if it is unchanged.

        :raises ModelChangedError: if it has changed.
        """
        return self._watch.running(self._version)

    def is_current(self) -> bool:
        """Whether the model is unchanged."""
        return self._watch.version() == self._version

    def of_other_sites(self) -> str:
        """Explain, for a message, how to predict a site that is not a weight vector."""
        processes = [*self.structure.process_names]
        return (
            f"predict_f(..., site=...) predicts the processes {processes}, "
            "numpyro.infer.Predictive(model, guide=guide, params=result.params, "
            "num_samples=...) draws every site"
        )

    def sources(
        self, arguments: Arguments, structure: Structure, values: dict[str, Any]
    ) -> Sources:
        """Return the arguments from which the model computes its observations and
        inputs; the model is traced once per shape of the arguments.

        :param arguments: the model's arguments.
        :param structure: the structure of the model at these arguments.
        :param values: values of params and other latents.
        """

        def found() -> Sources:
            return sources(self.model, *arguments.merge(), structure, values)

        return remembered(self._sources, arguments.shapes, found)

    @one_thread
    def __call__(
        self,
        what: str,
        arguments: Arguments,
        fitted: Fitted,
        prepared: Prepared | None,
        site: str,
        like: Any = None,
        **how: Any,
    ) -> tuple[Any, Prepared]:
        """Make one prediction with one compiled program: ``"f"``, ``"joint"``, ``"y"``,
        ``"log_prob"``, ``"left_out"``, or ``"draws"`` (with ``key`` and ``num``).

        :param what: the kind of prediction.
        :param arguments: the model's arguments.
        :param fitted: the fitted quantities.
        :param prepared: quantities from an earlier prediction; computed here if
            ``None``.
        :param site: the process or the observed site.
        :param like: shapes of the prepared quantities, if known.
        :return: the prediction, and quantities that later predictions need.
        :raises CholeskyError: if a kernel matrix does not factorise.
        """
        known = prepared is not None
        if prepared is None:
            shapes = like or self._prepared_shapes(arguments, fitted)
            # NumPy's: a zero of JAX's would be a program of its own for each shape.
            prepared = jax.tree.map(lambda s: np.zeros(s.shape, s.dtype), shapes)
        on_devices = on_mesh(arguments.mesh or mesh_of_latents(fitted))
        with on_devices, threads_for(self.structure.largest):
            ordered, prepared = self._compiled(
                arguments.arrays, fitted, prepared, known, what=what,
                static=arguments.static, site=site, **how,
            )  # fmt: skip
            if not is_traced(arguments):
                # The limit on threads ends here, and so must the work.
                jax.block_until_ready(ordered.tree)
        if not known and not is_traced(arguments):
            for name, factor in prepared.factors.items():
                if not all(np.isfinite(x).all() for x in jax.tree.leaves(factor)):
                    raise CholeskyError(
                        f"the kernel matrix of {name!r} did not factorise"
                    )
        if not is_traced(arguments) and arguments.static[-1] is None:
            remembered(
                self._fewer, _kind(what, arguments, fitted, site, how),
                lambda: (arguments.num_rows, _shapes(ordered.tree)),
            )  # fmt: skip
        return ordered.tree, prepared

    @one_thread
    def padded(self, arguments: Arguments) -> Arguments:
        """Return arguments with added rows, if predictions at several numbers of rows
        may share programs.

        :param arguments: the model's arguments.
        """
        return self._padding(arguments)

    @one_thread
    def fewer(
        self,
        what: str,
        arguments: Arguments,
        padded: Arguments,
        fitted: Fitted,
        site: str,
        **how: Any,
    ) -> Any:
        """Return the shapes of a prediction for another number of rows than that with
        added rows. They are those of an earlier prediction, if there was one.

        :param padded: the arguments with added rows; the others are those of
            :meth:`__call__`.
        """
        key = _kind(what, arguments, fitted, site, how)
        if self._fewer.get(key, (0,))[0] == padded.num_rows:
            self._fewer.pop(key)

        def found() -> tuple[int, Any]:
            shapes, _ = self._shapes_of(what, arguments, fitted, site, **how)
            return arguments.num_rows, shapes

        return remembered(self._fewer, key, found)[1]

    @one_thread
    def shapes(
        self, what: str, arguments: Arguments, fitted: Fitted, site: str, **how: Any
    ) -> Any:
        """Return the shapes of the result of :meth:`__call__`, found without
        arithmetic; the model is traced once for the shapes of its arguments."""
        return remembered(
            self._shapes, (what, site, fitted.size, arguments.shapes),
            lambda: self._shapes_of(what, arguments, fitted, site, **how),
        )  # fmt: skip

    def _shapes_of(
        self, what: str, arguments: Arguments, fitted: Fitted, site: str, **how: Any
    ) -> Any:
        def run(arrays: tuple[Array, ...], fitted: Fitted) -> tuple[Any, Prepared]:
            answer, ready = self._answer(
                arrays, fitted, None, None, what, arguments.static, site, **how
            )
            return answer.tree, ready

        return jax.eval_shape(run, arguments.arrays, fitted)

    def _prepared_shapes(self, arguments: Arguments, fitted: Fitted) -> Prepared:
        """Return the shapes of the quantities that predictions prepare; the prediction
        itself is not traced for them."""
        static = arguments.static

        def run(arrays: tuple[Array, ...], fitted: Fitted) -> Prepared:
            def one(fitted: Fitted, _: None) -> tuple[Ordered, Prepared]:
                view = self._view(arrays, static, fitted)
                return Ordered(()), self._prepare(view, fitted)

            return over_members(one, fitted, None)[1]

        return remembered(
            self._shapes, (fitted.size, arguments.shapes),
            lambda: jax.eval_shape(run, arguments.arrays, fitted),
        )  # fmt: skip

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

    def weighing(self, arguments: Arguments, fitted: Fitted) -> tuple[str, ...] | None:
        """Return the names of the arguments on which the weights of latents in
        predictors depend; ``None`` if they are not known.

        :param arguments: the model's arguments.
        :param fitted: the fitted quantities.
        """
        return None

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

    def completed(self, arguments: Arguments, fitted: Fitted) -> Fitted:
        """Return the fitted quantities with what predictions need of the inputs of the
        fit; here this is nothing.

        :param arguments: the model's arguments at the fit.
        :param fitted: the fitted quantities.
        """
        return fitted

    def sites(
        self, arguments: Arguments, fitted: Fitted
    ) -> tuple[dict[str, SiteMoments], dict[str, Array], dict[str, float]]:
        """Return information about jointly Gaussian latents; here there are none.

        :param arguments: the model's arguments at the fit.
        :param fitted: the fitted quantities.
        """
        return {}, {}, {}

    def block(self, site: str | None) -> Block:
        """Return the Gaussian process with this name, or the only one for ``None``."""
        return _one_of(self.structure.processes, site, "Gaussian process")

    def observed(self, site: str | None) -> Observed:
        """Return the observed site with this name, or for ``None`` the only one that
        depends on latents (``handlers.condition`` turns latent sites into observed
        ones)."""
        found = [s for s in self.structure.observed if s.route is not Route.CONSTANT]
        return _one_of(found, site, "observed site")

    def predicted(self, site: str | None) -> Observed:
        """Return the observed site whose new observations are predicted: like
        :meth:`observed`, but without factors.

        :raises ValueError: if there are only factors.
        """
        found = [s for s in self.structure.observed if s.route is not Route.CONSTANT]
        factors = [s.name for s in found if s.factor]
        drawn = [s for s in found if not s.factor]
        if site in factors or (site is None and factors and not drawn):
            raise ValueError(
                f"{site or factors[0]!r} is a numpyro.factor, which has no "
                "distribution of new observations. predict_f predicts the "
                "predictor, and log_prob returns the density of held-out data"
            )
        return _one_of(drawn, site, "observed site")

    # -- what is compiled ------------------------------------------------------------

    def _answer(
        self,
        arrays: tuple[Array, ...],
        fitted: Fitted,
        prepared: Prepared | None,
        known: Array | None,
        what: str,
        static: Any,
        site: str,
        *,
        grouped: bool = False,
        **how: Any,
    ) -> tuple[Ordered, Prepared]:
        shapes = []  # of data

        def one(fitted: Fitted, prepared: Prepared | None) -> tuple[Ordered, Prepared]:
            view = self._view(arrays, static, fitted, grouped=grouped)
            if what == "y":
                shapes.append(view.message(site)["fn"].shape())

            def prepare() -> Prepared:
                # From a view of its own: what a view keeps must not stem from a branch.
                return self._prepare(self._view(arrays, static, fitted), fitted)

            if prepared is None:
                ready = prepare()
            else:
                ready = lax.cond(known, lambda: prepared, prepare)
            fit = Fit(fitted.values, *ready)
            return Ordered(self._kinds[what](view, fit, site, **how)), ready

        answer, ready = over_members(one, fitted, prepared)
        if fitted.members is not None:
            log_weights = fitted.members.log_weights
            answer = Ordered(mixed(what, answer.tree, log_weights, **how))
        if what == "y":
            # Last: mixtures take laws apart.
            answer = Ordered(expanded(answer.tree, shapes[-1]))
        return answer, ready

    def _prepare(self, view: ModelView, fitted: Fitted) -> Prepared:
        factors = self.function_posterior.factors(view)
        return Prepared(self._moments(fitted.own), factors)

    # How the guide sees the model, and its structure at other arguments.
    _seen: ClassVar[Any] = ModelView
    _structure_at: ClassVar[Any] = staticmethod(structure_at)

    def _stand_in(self, message: dict[str, Any]) -> Array:
        """Return a value for a site that is not observed here."""
        return jnp.zeros(message["fn"].shape())

    def _without_data(self) -> Callable[..., Any]:
        """Return the model with values for sites that are not observed here."""
        names = {site.name for site in self.structure.observed}

        def unobserved(message: dict[str, Any]) -> Array | None:
            drawn = message["type"] == "sample" and not message["is_observed"]
            if drawn and message["name"] in names:
                return self._stand_in(message)
            return None

        whole: Any = whole_plates(self.model)
        return handlers.substitute(whole, substitute_fn=unobserved)

    def _view(
        self, arrays: Any, static: Any, fitted: Fitted, *, grouped: bool = False
    ) -> Any:
        # Of groups only latents that are held jointly are.
        model = self._without_data()
        arguments = Arguments(arrays, static)
        here = remembered(
            self._structures, arguments.shapes,
            lambda: self._structure_at(model, self.structure, arguments),
        )  # fmt: skip
        return self._seen(here, model, arguments, fitted.values, random.key(0))

    def _f(self, view: ModelView, fit: Fit, site: str) -> FunctionValues:
        outputs = view.conditional(self.block(site)).outputs
        mean, variance = self.function_posterior.marginals(view, fit)[site]
        return FunctionValues(outputs(mean), outputs.variances(variance))

    def _joint(self, view: ModelView, fit: Fit, site: str) -> FunctionValues:
        f, (mean, covariance) = self._latents(view, fit, site)
        return FunctionValues(f.outputs(mean), f.outputs.covariances(covariance))

    def _draws(
        self,
        view: ModelView,
        fit: Fit,
        site: str,
        key: Array,
        num: int,
        unpadded: tuple[int, ...] | None = None,
    ) -> tuple[Array, Array]:
        """Return joint draws, and whether the covariance factorised.

        :param view: the model at new inputs.
        :param fit: the fitted quantities.
        :param site: the site to draw.
        :param key: random key.
        :param num: number of draws.
        :param unpadded: if rows were added, the shape of a draw for another number of
            rows.
        """
        f, (mean, covariance) = self._latents(view, fit, site)
        rows = () if unpadded is None else (mean.ndim - 1,)
        count = view.arguments.arrays[-1] if rows else None
        scale = f.prior_variance.mean(-1)
        draws, factorised = joint_draws(key, num, mean, covariance, scale, rows, count)
        return jax.vmap(f.outputs)(draws), factorised

    def _latents(
        self, view: ModelView, fit: Fit, site: str
    ) -> tuple[Conditional, FunctionValues]:
        block = self.block(site)
        f = view.conditional(block)
        measure = self.function_posterior.measure(f, fit, block)
        mean = f.select(measure.mean(f.X))
        return f, FunctionValues(mean, f.select(measure.kernel(f.X, f.X)))

    def _y(self, view: ModelView, fit: Fit, site: str) -> Distribution:
        return self._predictive(view, fit, site)[0]

    def _left_out(self, view: ModelView, fit: Fit, site: str) -> Distribution:
        check_observed(site, view.message(site), "leave_one_out")
        at = left_out(self.function_posterior, view, fit)
        return self._predictive_at(at, view, site)[0]

    def _log_prob(self, view: ModelView, fit: Fit, site: str) -> Array:
        fn, message = self._predictive(view, fit, site)
        observed = self.observed(site)
        check_observed(site, message, "log_prob")
        value = message["value"]
        if observed.correlated:
            # One density for each datum, of several entries.
            mask = getattr(message["fn"], "_mask", True)
            return jnp.where(mask, fn.log_prob(value), 0)
        if observed.factor:
            return fn.log_prob(value)
        # Wrong labels would have a density of zero, or that of others.
        inside = base_distribution(message["fn"]).support(value)
        density = jnp.where(inside, fn.log_prob(value), jnp.nan)
        return through_wrappers(message["fn"], lambda _: density)

    def _predictive(
        self, view: ModelView, fit: Fit, site: str
    ) -> tuple[Distribution, dict[str, Any]]:
        at = self.function_posterior.marginals(view, fit)
        return self._predictive_at(at, view, site)

    def _predictive_at(
        self, at: dict[str, Marginals], view: ModelView, site: str
    ) -> tuple[Distribution, dict[str, Any]]:
        observed = self.observed(site)
        if observed.route is not Route.CLOSED_FORM:
            raise NotConjugateError(
                f"site {site!r} has no closed-form predictive distribution. Draw "
                "from it with numpyro.infer.Predictive(model, guide=guide, "
                "params=params, num_samples=...)"
            )
        message = view.message(site)
        moments = of_site(view.predictors.marginals(at), observed)
        return predictive(base_distribution(message["fn"]), *moments), message


def check_observed(site: str, message: dict[str, Any], method: str) -> None:
    """Raise if a method needs observations and there are none, or they have another
    shape.

    :param site: the observed site.
    :param message: NumPyro's message of the site.
    :param method: the name of the method.
    """
    if not message["is_observed"]:
        raise ValueError(
            f"{method} needs the observations of site {site!r}: {method}(X, y)"
        )
    check_shape(site, message)


def is_traced(arguments: Arguments) -> bool:
    """Whether a caller differentiates, vectorises or compiles the prediction."""
    return any(isinstance(a, jax.core.Tracer) for a in arguments.arrays)


def _kind(
    what: str, arguments: Arguments, fitted: Fitted, site: str, how: dict[str, Any]
) -> Any:
    """Return the properties of a prediction other than its number of rows."""
    return what, site, fitted.size, family_of(arguments), how.get("num")


def _shapes(tree: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def _one_of(candidates: Any, name: str | None, what: str) -> Any:
    names = [c.name for c in candidates]
    if not names:
        raise ValueError(
            f"no {what} depends on Gaussian latents. Use draws of the other "
            "latents, such as NestedVI(model).get_samples(), with "
            "numpyro.infer.Predictive(model, samples)"
        )
    if name is None and len(names) == 1:
        return candidates[0]
    if name not in names:
        raise ValueError(
            f"site={name!r}: the model's choices of {what} are {names}; pass site=..."
        )
    return candidates[names.index(name)]
