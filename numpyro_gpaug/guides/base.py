# SPDX-License-Identifier: Apache-2.0
"""The base class of the guides."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar, Self

import jax
import numpy as np
import numpyro
from jax import Array
from numpyro import handlers
from numpyro.distributions import constraints
from numpyro.infer.autoguide import AutoDelta, AutoGuide

from numpyro_gpaug._display import Displayed, Rows
from numpyro_gpaug._fork import refuse_forked
from numpyro_gpaug._numpyro import PointGuide, one_thread
from numpyro_gpaug.gaussians.dense import Moments
from numpyro_gpaug.math.arrays import is_traced
from numpyro_gpaug.math.compiling import ahead, jit_for_few_runs, once
from numpyro_gpaug.model.arguments import Arguments, Model, Values, choices_among
from numpyro_gpaug.model.closures import Version, watched
from numpyro_gpaug.model.display import latent_rows, observed_rows
from numpyro_gpaug.model.inspect import inspect_model, structure_at
from numpyro_gpaug.model.jaxpr import dependence_on_arrays
from numpyro_gpaug.model.latents import Structure
from numpyro_gpaug.model.observations import check_observations
from numpyro_gpaug.model.pitfalls import warn_of_modes
from numpyro_gpaug.model.starts import MedianStart
from numpyro_gpaug.model.structure import (
    Block,
    Trace,
    fixed_key,
    flat_functions,
    from_cache,
    run_model,
    without_gaussians,
)
from numpyro_gpaug.model.view import Codes, ModelView

# Params of the Gaussian blocks by block name, or the moments of the blocks.
Own = Mapping[str, Values | Moments]
# Arguments by which guides of one model are told apart.
_PLAIN = bool, str
# The random key of first values: the second half of a split of the zero key.
STARTS = 928981903, 3453687069


class ProcessGuide(Displayed):
    """The base class of the guides. A guide finds the structure of the model, passes
    every latent that it does not represent itself to another NumPyro autoguide, and has
    a ``function_posterior``, with which predictions read the fit.

    :param model: a NumPyro model.
    :param other: class of the autoguide for all other latents.
    """

    #: Function values under a fit; see
    #: :class:`~numpyro_gpaug.guides.function_posterior.InducingPosterior`.
    function_posterior: Any
    #: The class of this guide's views of the model. A view has the Gaussian latents,
    #: their affine maps to predictors, and the likelihoods.
    view: ClassVar[Any] = ModelView

    def __init__(self, model: Model, other: Callable[..., Any]) -> None:
        refuse_forked()
        self.model = model
        self._other_class = other
        self._watch = watched(model)
        # The number of times the guide was set up anew because arguments chose another
        # model.
        self.generation = 0
        self._forget(None)

    def _forget(self, version: Version | None) -> None:
        """Discard everything about the model except the function itself.

        :param version: the version of the model.
        """
        self._version = version
        self._other: Any = None  # an AutoGuide, if there are other latents
        self._structure: Structure | None = None
        self._choices: Any = None
        self._other_constraints: dict[str, Any] = {}
        self._sizes: dict[Any, Structure] = {}
        self._checked = False
        self._checks: dict[Any, Any] = {}
        # Shapes of arguments for which the initial values of other latents are known,
        # and whether their supports depend on the values of arguments.
        self._alike: set[Any] = set()
        # Programs that compute initial values and supports, by shapes of arguments.
        self._others: dict[Any, Callable[..., Any]] = {}
        self._supports_move = False
        # Compiled predictions by model, which serve all params; and the compiled
        # functions of fits, each with what they were compiled for.
        self.predictors: dict[Any, Any] = {}
        self.programs: list[tuple[Any, Any]] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Values:
        """Draw every latent.

        :return: values by site name.
        """
        raise NotImplementedError

    def split_params(self, params: Values) -> tuple[Values, dict[str, Values]]:
        """Split the params of a fit into params that predictions read by name, and
        params of the Gaussian blocks, by block name.

        :param params: params of model and guide.
        """
        return dict(params), {}

    def moments(self, own: Own) -> dict[str, Moments]:
        """Return moments of the Gaussian blocks, latent axis first, by block name;
        pure.

        :param own: their params, from :meth:`split_params`, or their moments.
        """
        return {}

    def own_params(self) -> tuple[str, ...]:
        """Return the names of the params of the Gaussian blocks."""
        return ()

    @property
    def structure(self) -> Structure:
        """The structure of the model.

        :raises RuntimeError: before the guide was first called or set up.
        """
        if self._structure is None:
            raise RuntimeError(
                "the guide has not been set up for the model's arguments. Call it, "
                "or guide.setup(*args, **kwargs), first"
            )
        return self._structure

    @property
    def random_others(self) -> bool:
        """Whether the other autoguide draws at random (``AutoDelta`` does not)."""
        return self._other is not None and not isinstance(self._other, AutoDelta)

    @property
    def constraints(self) -> dict[str, Any]:
        """Constraints of the params of model and other autoguide, by name."""
        return {**self._other_constraints, **self.structure.constraints}

    def structure_at(self, arguments: Arguments) -> Structure:
        """Return the structure of the model with the plates and shapes for these
        arguments; the model is traced once per shape.

        :param arguments: the model's arguments.
        """
        whole, here = self.structure, arguments.counting_all()
        return from_cache(
            self._sizes, here.shapes, lambda: structure_at(self.model, whole, here)
        )

    def check_params(self, params: Values) -> None:
        """Raise if params of the model or of the guide are missing.

        :param params: params of a fit.
        :raises ValueError: if some are missing; it names them.
        """
        needed = (*self.constraints, *self.own_params())
        if missing := [name for name in needed if name not in params]:
            raise ValueError(
                f"params {missing} are missing, and {sorted(params)} were passed. Pass "
                "the params of the fit, result.params"
            )

    def setup(self, *args: Any, **kwargs: Any) -> Self:
        """Find the structure of the model at these arguments. The first call that
        passes observations does this once.

        :param args: the model's arguments.
        :param kwargs: its keyword arguments.
        :return: the guide.
        """
        if not self.is_set_up():
            self._structure = self.read(self.model, *args, **kwargs)
            arguments = Arguments.split(args, kwargs)
            self._choices = arguments.choices
            self._sizes = {arguments.shapes: self._structure}
            if self._structure.others:
                args, kwargs = arguments.merge()  # NumPy arrays become JAX arrays
                self._other = self._build_other()
                self._other_constraints = self._constraints_of_other(args, kwargs)
                self._note_others(arguments)
        return self

    def _constraints_of_other(self, args: Any, kwargs: Any) -> dict[str, Any]:
        """Set the other autoguide up, and return the constraints of its params."""
        if isinstance(self._other, PointGuide):
            return self._other.set_up(args, kwargs)
        with handlers.block():
            seeded = handlers.trace(handlers.seed(self._other, fixed_key()))
            trace = seeded.get_trace(*args, **kwargs)
        return {
            name: site["kwargs"].get("constraint", constraints.real)
            for name, site in trace.items()
            if site["type"] == "param"
        }

    def _note_others(self, arguments: Arguments) -> None:
        """Record which starts and supports of the other latents depend on the values of
        arguments."""
        if not isinstance(self._other, PointGuide):
            return
        found = dependence_on_arrays(self._others_at, arguments)
        starts, supports = zip(*found.values(), strict=True)
        self._other.moves = any(x.state for x in jax.tree.leaves(starts))
        self._supports_move = any(x.state for x in jax.tree.leaves(supports))
        self._alike.add(arguments.shapes)
        # A model without Gaussian latents is refused later, with its own advice.
        if any(math.prod(block.shape) for block in self.structure.blocks):
            others = {name: start for name, (start, _) in self._other.known().items()}
            warn_of_modes(self.model, arguments, others, self.structure.held)

    def _others_at(self, arguments: Arguments) -> Values:
        """Return starts and supports of the other latents."""
        return self._other.starts(*arguments.merge())

    def _others_agree(self, arguments: Arguments) -> bool:
        """Whether the other latents have the priors of the set-up: equal supports, and
        equal starts unless these depend on the values of arguments."""
        other = self._other
        if not isinstance(other, PointGuide) or is_traced(arguments):
            return True
        if arguments.shapes in self._alike and not self._supports_move:
            return True
        # Equal methods would share a program.
        here = partial(self._others_at)
        program = from_cache(
            self._others, arguments.shapes, lambda: ahead(here, arguments)
        )
        known, found = other.known(), program(arguments)
        if other.moves:
            known, found = ({k: x[1] for k, x in y.items()} for y in (known, found))
        tree: Any = jax.tree.structure(known)
        agree: bool = tree == jax.tree.structure(found) and all(
            np.shape(a) == np.shape(b) and np.allclose(a, b)
            for a, b in zip(*map(jax.tree.leaves, (known, found)), strict=True)
        )
        if agree:
            self._alike.add(arguments.shapes)
        return agree

    def is_set_up(self) -> bool:
        """Whether the guide has the structure of the current model with
        observations."""
        version = self._watch.version()
        if version != self._version:
            # A fitter may have left its programs here before the guide is set up.
            if self._version is not None:
                self._forget(version)
            self._version = version
        return self._structure is not None and bool(self._structure.observed)

    def chose(self, arguments: Arguments) -> bool:
        """Whether the arguments that may choose another model equal the set-up's.

        :param arguments: the model's arguments.
        """
        return bool(self._choices == arguments.choices)

    def prepare(self, arguments: Arguments) -> bool:
        """Set the guide up for a fit to these arguments, again if the model has other
        latents there.

        :param arguments: the model's arguments.
        :return: whether it was set up before, and has not read these arguments.
        """
        known = self.is_set_up()
        chosen = known and self.chose(arguments)
        if chosen and self.structure_at(arguments).blocks != self.structure.blocks:
            self._structure, known = None, False
        elif known and not (chosen and self._others_agree(arguments)):
            self._forget(self._version)
            self.generation, known = self.generation + 1, False
        if not known:
            args, kwargs = arguments.merge()
            self.setup(*args, **kwargs)
        return known

    def check_data(self, arguments: Arguments) -> None:
        """Set the guide up for a fit to these arguments, or raise if a set-up with them
        would fail.

        :param arguments: the model's arguments; :meth:`valid` checks the values of
            traced arguments.
        :raises ValueError: for missing observations, and for codes outside of a plate.
        :raises NotConjugateError: if observations depend on several groups.
        """
        if not self.prepare(arguments) or is_traced(arguments):
            return
        program = from_cache(
            self._checks, arguments.shapes, lambda: jit_for_few_runs(self._codes)
        )
        program(arguments).check()

    def valid(self, arguments: Arguments) -> Array:
        """Whether :meth:`check_data` accepts these arguments; may be traced.

        :param arguments: the model's arguments.
        """
        return self._codes(arguments).valid

    def _codes(self, arguments: Arguments) -> Codes:
        # Without padding, because a batch that is passed in is shorter than its plate.
        structure = self.structure_at(arguments)
        view = self.view(structure, self.model, arguments, {}, fixed_key())
        return Codes.of_fit(view)

    def begin(self, *args: Any, **kwargs: Any) -> None:
        """Prepare a call: ``setup``, and a check of the first observations.
        ConjugateSVI, which does not call the guide, has its own check.

        :param args: the model's arguments.
        :param kwargs: its keyword arguments.
        """
        structure = self.setup(*args, **kwargs).structure
        if structure.observed and not self._checked:
            self._checked = True
            arguments = Arguments.split(args, kwargs)
            # NumPyro's Predictive passes no observations.
            check_observations(self.model, structure, arguments, needed=False)

    def read(self, model: Model, *args: Any, **kwargs: Any) -> Structure:
        """Return the structure of a model for this guide.

        :param model: the model.
        :param args: its arguments.
        :param kwargs: its keyword arguments.
        """
        return inspect_model(model, *args, **kwargs)

    def _build_other(self) -> AutoGuide:
        # An autoguide compiles its model and the gradient, and needs only its own
        # latents.
        structure = self.structure
        fixed = handlers.block(
            without_gaussians(self.model, structure),
            expose=[*structure.others, *structure.plates],
        )
        if self._other_class is AutoDelta:
            key = fixed_key(*STARTS)
            return PointGuide(fixed, key=key, start=MedianStart, call=once)
        return self._other_class(fixed)

    def draw_others(self, *args: Any, **kwargs: Any) -> Values:
        """Draw only the latents of the other autoguide.

        :return: values by site name; empty if there are only Gaussian blocks.
        """
        return dict(self._other(*args, **kwargs)) if self._other else {}

    def flat_trace(self, values: Values, args: Any, kwargs: Any) -> Trace:
        """Run the model, inside the guide, at function values of zero. This also
        declares the params of the model in the guide, which needs their values.

        :param values: draws of the other autoguide.
        :param args: the model's arguments.
        :param kwargs: its keyword arguments.
        """
        return run_model(
            flat_functions(self.model),
            Arguments.split(args, kwargs),
            numpyro.prng_key(),
            {**self.structure.zeros, **values},
            expose_types=["param"],
        )

    def other_median(self, params: Values) -> Values:
        """Return posterior medians of the latents of the other autoguide."""
        return dict(self._other.median(params)) if self._other else {}

    def other_draws(self, key: Array, params: Values, num: int) -> Values:
        """Return posterior draws of the latents of the other autoguide, with a leading
        axis.

        :param key: random key.
        :param params: the guide's params.
        :param num: number of draws.
        """
        keys = jax.random.split(key, num)
        return jax.vmap(lambda key: self._other.sample_posterior(key, params))(keys)

    def sample_posterior(
        self,
        rng_key: Array,
        params: Values,
        *args: Any,
        sample_shape: tuple[int, ...] = (),
        **kwargs: Any,
    ) -> Values:
        """Draw from the guide.

        :param rng_key: random key.
        :param params: the guide's params.
        :param args: the model's arguments.
        :param sample_shape: leading shape of the draws.
        :param kwargs: the model's keyword arguments.
        :return: values by site name.
        """
        self.setup(*args, **kwargs)

        def draw(key: Array) -> Values:
            seeded = handlers.seed(handlers.substitute(self, data=params), key)
            return handlers.block(seeded)(*args, **kwargs)

        if sample_shape == ():
            return draw(rng_key)
        keys = jax.random.split(rng_key, sample_shape)
        for _ in sample_shape:
            draw = jax.vmap(draw)
        return draw(keys)

    def turn(self, arguments: Arguments, values: Values) -> bool:
        """Change to a basis in which rounding preserves more of the precision, if the
        guide has one.

        :param arguments: the model's arguments.
        :param values: values of params and other latents.
        """
        return False

    def _display(self) -> tuple[str, Rows]:
        if self._structure is None:
            name = type(self).__name__
            return f"{name}, not set up: it has seen no arguments yet", []
        structure = self.structure
        shapes = dict(structure.shapes)
        rows = latent_rows(structure)
        for name in structure.others:
            rows.append((name, str(shapes.get(name, "")), self._kind(name)))
        for name in structure.constraints:
            rows.append((name, "", "param, no prior"))
        return self._title(), rows + observed_rows(structure)

    def _title(self) -> str:
        return type(self).__name__

    def _kind(self, other: str) -> str:
        """Describe how the other autoguide represents a latent."""
        kind = self._other_class.__name__
        point = "a point " if kind == "AutoDelta" else ""
        return f"hyperparameter, {point}({kind})"


class ConjugateGuide(ProcessGuide):
    """The base class of the guides whose Gaussians closed-form updates can change.

    :param model: a NumPyro model.
    :param covariance: the family of Gaussians.
    :param other: class of the autoguide for all other latents.
    """

    #: The forms of covariances, with the posterior of function values for each.
    covariances: ClassVar[dict[str, Callable[[], Any]]]

    def __init__(
        self,
        model: Model,
        covariance: str = "natural",
        other: Callable[..., Any] = AutoDelta,
    ) -> None:
        if covariance not in self.covariances:
            raise ValueError(
                f"covariance must be one of {(*self.covariances,)}, got {covariance!r}"
            )
        super().__init__(model, other)
        self.covariance = covariance
        self.function_posterior = self.covariances[covariance]()

    @property
    def conjugate(self) -> bool:
        """Whether closed-form updates can change its params."""
        return self.covariance == "natural"

    @one_thread
    def join(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Share the state of an earlier guide, equal to this one, before this one is
        set up: a loop or a notebook cell that makes a guide anew does not compile
        again.

        :param args: the model's arguments in a fit that begins. They need not be valid.
            Guides for other choices of the model are not shared, since each would set
            the other up again.
        :param kwargs: its keyword arguments.
        :return: whether the guides now share their state.
        """
        options = self.covariance, self._other_class
        own = type(self).__init__ is not ConjugateGuide.__init__
        choices = choices_among(jax.tree.leaves((args, kwargs)))
        plain = all(isinstance(x, _PLAIN) for x in choices)
        plain = plain and isinstance(self._other_class, type)
        if own or not plain or self.is_set_up():
            return False
        guides: dict[Any, ConjugateGuide]
        guides = self._watch.shared(self._watch.version(), ConjugateGuide, dict)
        kind = type(self), options, choices
        first = guides.setdefault(kind, self)
        # A change of the basis belongs to the data that needed it.
        if not first.is_set_up() or first.structure.basis_mark:
            guides[kind] = self
            return False
        self.__dict__ = vars(first)
        return True

    def param_names(self, block: Block) -> tuple[str, ...]:
        """Return the names of the params of a block.

        :param block: one of ``structure.blocks``.
        """
        raise NotImplementedError

    def own_params(self) -> tuple[str, ...]:
        return tuple(n for b in self.structure.blocks for n in self.param_names(b))

    def start_at(self, given: Values, trace: Trace, view: Any) -> dict[str, Any]:
        """Return natural parameters of every block at the start of a fit, latent axis
        first.

        :param given: values to start from instead, by param name.
        :param trace: the model at initial params and function values of zero.
        :param view: the model at initial params.
        """
        raise NotImplementedError

    def natural_params(self, natural: dict[str, Any]) -> dict[str, Array]:
        """Return natural parameters as params by name.

        :param natural: natural parameters by block, latent axis first.
        """
        params: Values = {}
        for block in self.structure.blocks:
            leaves, latents = jax.tree.leaves(natural[block.name]), block.shape[:-1]
            named = zip(self.param_names(block), leaves, strict=True)
            params |= {k: x.reshape(*latents, *x.shape[1:]) for k, x in named}
        return params
