# SPDX-License-Identifier: Apache-2.0
"""The fitted posterior: prediction at new inputs, without the training data."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from os import PathLike
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, random
from numpyro import handlers
from numpyro.distributions import Distribution

from numpyro_gpaug._numpyro import whole_plates
from numpyro_gpaug.affine import dependences
from numpyro_gpaug.errors import CholeskyError, NotConjugateError
from numpyro_gpaug.expectations import (
    Route,
    base_distribution,
    predictive,
    through_wrappers,
)
from numpyro_gpaug.guides import AutoSparseGP
from numpyro_gpaug.infer.archive import (
    pack,
    pack_structure,
    unpack,
    unpack_structure,
)
from numpyro_gpaug.infer.bound import (
    BoundProblem,
    as_values,
    chosen,
    predictor,
)
from numpyro_gpaug.infer.checks import check_arguments
from numpyro_gpaug.infer.elbo import field_marginals, moments_of, with_latent_axis
from numpyro_gpaug.linalg import Moments, cholesky_jitter, default_jitter
from numpyro_gpaug.structure import (
    Arguments,
    Block,
    Observed,
    Structure,
    check_shape,
    conditional_of,
    is_array,
    run_model,
)

BATCH_SIZE = 1024


class FunctionValues(NamedTuple):
    """Posterior of function values.

    :param mean: (N,) or (N, C).
    :param variance: of the same shape; or the covariance, (N, N) or (C, N, N).
    """

    mean: Array
    variance: Array


class Fit(NamedTuple):
    """What a prediction needs of a fit.

    :param values: params and point values of other latents.
    :param moments: of the Gaussian blocks.
    :param factors: Cholesky factors of the inducing matrices.
    """

    values: dict[str, Any]
    moments: dict[str, Moments]
    factors: dict[str, Array]


class Posterior:
    """A fitted posterior; make it with ``svi.posterior(params)`` or :meth:`from_guide`.

    The model is called again at new inputs: pass the arguments that hold inputs, in the
    places they have in the model; leave out the observations (they become ``None``).
    Keyword arguments of the fit, such as ``inducing=Z``, are remembered. Factors of the
    inducing matrices are computed once; a prediction then costs O(M^2) per point.
    Latents owned by another autoguide stay at their posterior medians.

    :param model: the model.
    :param structure: what it is made of.
    :param values: params and point values of other latents, by name.
    :param moments: of the Gaussian blocks, latent axis first, by block name.
    :param remembered: keyword arguments of the fit.
    :param observations: names of the arguments that hold observations.
    :param shared: remembered arguments that have no row per datum.

    All methods stream over rows in blocks of ``batch_size`` padded to one shape, so any
    number of rows costs one compilation; predictions do not depend on it.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        structure: Structure,
        values: dict[str, Any],
        moments: dict[str, Moments],
        remembered: dict[str, Any],
        observations: tuple[str, ...],
        shared: tuple[str, ...],
    ) -> None:
        self._model = model
        self._structure = structure
        self._values = values
        self._moments = moments
        self._remembered = remembered
        self._observations = observations
        self._shared = shared
        self._fit: Fit | None = None
        self._raw = {"f": self._f, "y": self._y, "log_prob": self._log_prob}
        self._raw["joint"] = self._joint
        self._compiled = {
            name: jax.jit(fn, static_argnames=("static", "site"))
            for name, fn in self._raw.items()
        }
        self._compiled["factors"] = jax.jit(self._cholesky, static_argnames="static")

    @classmethod
    def from_guide(
        cls,
        model: Callable[..., Any],
        guide: AutoSparseGP,
        params: dict[str, Any],
        *args: Any,
        **kwargs: Any,
    ) -> Posterior:
        """From a guide, its params, and the arguments of the fit.

        :param model: the model.
        :param guide: its guide, of any covariance.
        :param params: params of model and guide.
        :param args: the model's arguments at the fit, observations included.
        :param kwargs: its keyword arguments.
        """
        structure = guide.setup(*args, **kwargs).structure
        gaussians = {b.name: guide.gaussian(b, params) for b in structure.blocks}
        moments = {k: with_latent_axis(moments_of(fn)) for k, fn in gaussians.items()}
        values = {**params, **guide.other_median(params)}
        for name in (n for b in structure.blocks for n in guide.param_names(b)):
            del values[name]
        observations, inducing = _sources(model, structure, values, args, kwargs)
        positional = list(inspect.signature(model).parameters)[: len(args)]
        if lost := [name for name in inducing if name in positional]:
            raise ValueError(
                f"inducing inputs or hyperparameters are computed from {lost}, which "
                "change at prediction: pass them by keyword (inducing=Z), or make them "
                "params"
            )
        remembered = {k: v for k, v in kwargs.items() if k not in observations}
        rows = {n for p in structure.plates.values() for n in p}
        shared = tuple(k for k, v in remembered.items() if not _has_rows(v, rows))
        return cls(model, structure, values, moments, remembered, observations, shared)

    # -- prediction -------------------------------------------------------------------

    def predict_f(
        self,
        *args: Any,
        site: str | None = None,
        full_covariance: bool = False,
        batch_size: int = BATCH_SIZE,
        **kwargs: Any,
    ) -> FunctionValues:
        """Posterior mean and variance of a Gaussian process.

        :param args: the model's arguments at new inputs, without observations.
        :param site: which process, if the model has several.
        :param full_covariance: the covariance between all rows (O(N^2) memory, no
            streaming) instead of the variance.
        :param batch_size: rows per block.
        :param kwargs: the model's keyword arguments, where they differ from the fit's.
        """
        block = self._block(site)
        called = self._call_arguments(args, kwargs, observed=False)
        if full_covariance:
            return self._call("joint", called[0], block.name)
        return self._stream("f", called, block.name, batch_size)

    def predict_y(
        self,
        *args: Any,
        site: str | None = None,
        batch_size: int = BATCH_SIZE,
        **kwargs: Any,
    ) -> Distribution:
        """Posterior predictive distribution of new observations, the latents integrated
        out: a NumPyro distribution (``.probs`` of a Bernoulli, ``.mean``,
        ``.variance``, ``.log_prob``, ``.sample``, and ``.icdf`` for intervals of real
        ones).

        :param args: the model's arguments at new inputs, without observations.
        :param site: which observed site, if the model has several.
        :param batch_size: rows per block.
        :param kwargs: the model's keyword arguments, where they differ from the fit's.
        """
        observed = self._observed(site)
        called = self._call_arguments(args, kwargs, observed=False)
        return self._stream("y", called, observed.name, batch_size)

    def log_prob(
        self,
        *args: Any,
        site: str | None = None,
        batch_size: int = BATCH_SIZE,
        **kwargs: Any,
    ) -> Array:
        """Log posterior predictive density of held-out observations, per datum.

        :param args: the model's arguments, observations included: ``log_prob(X, y)``.
        :param site: which observed site, if the model has several.
        :param batch_size: rows per block.
        :param kwargs: the model's keyword arguments, where they differ from the fit's.
        """
        observed = self._observed(site)
        called = self._call_arguments(args, kwargs, observed=True)
        return self._stream("log_prob", called, observed.name, batch_size)

    def sample(
        self,
        key: Array,
        *args: Any,
        site: str | None = None,
        sample_shape: tuple[int, ...] = (),
        **kwargs: Any,
    ) -> Array:
        """Joint draws of function values at new inputs, O(N^3) in the number of rows.

        :param key: random key.
        :param args: the model's arguments at new inputs, without observations.
        :param site: which process, if the model has several.
        :param sample_shape: leading shape of the draws.
        :param kwargs: the model's keyword arguments, where they differ from the fit's.
        :return: ``sample_shape + (N,)`` or ``sample_shape + (N, C)``.
        """
        mean, covariance = self.predict_f(
            *args, site=site, full_covariance=True, **kwargs
        )
        jitter = default_jitter(covariance.shape[-1], covariance.dtype)
        factor = cholesky_jitter(covariance, jitter)
        if not np.isfinite(np.asarray(factor)).all():
            raise CholeskyError(
                f"the posterior covariance of shape {covariance.shape} at the new "
                "inputs did not factorise: are there duplicate rows?"
            )
        noise = random.normal(key, sample_shape + mean.T.shape, mean.dtype)
        draws = jnp.einsum("...ij,...j->...i", factor, noise)
        return mean + (draws if mean.ndim == 1 else jnp.swapaxes(draws, -1, -2))

    # -- what is compiled ------------------------------------------------------------

    def _problem(
        self, arrays: tuple[Array, ...], static: Any, values: dict[str, Any]
    ) -> BoundProblem:
        names = {site.name for site in self._structure.observed}

        def unobserved(message: dict[str, Any]) -> Array | None:
            drawn = message["type"] == "sample" and not message["is_observed"]
            if drawn and message["name"] in names:
                return jnp.zeros(message["fn"].shape())
            return None

        whole = whole_plates(self._model)
        model = handlers.substitute(whole, substitute_fn=unobserved)
        arguments = Arguments(arrays, static)
        return BoundProblem(self._structure, model, arguments, values, random.key(0))

    def _cholesky(
        self, arrays: tuple[Array, ...], values: dict[str, Any], static: Any
    ) -> dict[str, Array]:
        problem = self._problem(arrays, static, values)
        processes = [b for b in self._structure.blocks if b.is_process]
        return {b.name: problem.conditional(b).gp.cholesky for b in processes}

    def _f(self, arrays: Any, fit: Fit, static: Any, site: str) -> FunctionValues:
        problem = self._problem(arrays, static, fit.values)
        fields = problem.fields(fit.factors)
        at, block = (
            field_marginals(problem, fields, fit.moments)[site],
            self._block(site),
        )
        return FunctionValues(*(as_values(x, block) for x in at))

    def _joint(self, arrays: Any, fit: Fit, static: Any, site: str) -> FunctionValues:
        problem = self._problem(arrays, static, fit.values)
        law = problem.conditional(self._block(site))
        q = chosen(fit.moments[site], law.latents)
        A = law.projection_through(fit.factors[site])
        spread = q.whitener @ A
        # The residual covariance is a Schur complement: positive semidefinite.
        residual = law.prior_covariance - jnp.swapaxes(A, -1, -2) @ A
        covariance = residual + jnp.swapaxes(spread, -1, -2) @ spread
        mean = self._f(arrays, fit, static, site).mean
        return FunctionValues(mean, covariance[0] if mean.ndim == 1 else covariance)

    def _y(self, arrays: Any, fit: Fit, static: Any, site: str) -> Distribution:
        return self._predictive(arrays, fit, static, site)[0]

    def _log_prob(self, arrays: Any, fit: Fit, static: Any, site: str) -> Array:
        fn, message = self._predictive(arrays, fit, static, site)
        if not message["is_observed"]:
            raise ValueError(
                f"log_prob needs the observations of site {site!r}: log_prob(X, y)"
            )
        check_shape(site, message)
        return through_wrappers(message["fn"], lambda _: fn.log_prob(message["value"]))

    def _predictive(
        self, arrays: Any, fit: Fit, static: Any, site: str
    ) -> tuple[Distribution, dict[str, Any]]:
        observed = self._observed(site)
        if observed.route is not Route.CLOSED_FORM:
            raise NotConjugateError(
                f"site {site!r} has no closed-form predictive distribution; draw from "
                "it with numpyro.infer.Predictive(model, guide=guide, params=params, "
                "num_samples=...)"
            )
        problem = self._problem(arrays, static, fit.values)
        at = field_marginals(problem, problem.fields(fit.factors), fit.moments)
        message = problem.message(site)
        moments = predictor(problem.predictors(at), observed)
        return predictive(base_distribution(message["fn"]), *moments), message

    # -- arguments and streaming ---------------------------------------------------

    def _call_arguments(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], observed: bool
    ) -> tuple[Arguments, tuple[bool, ...]]:
        """The model's arguments, and which of their arrays run over rows: those just
        passed in whose leading axis is that of the first."""
        check_arguments(self._model, args, kwargs)
        if not observed:
            kwargs = {**self._without_observations(len(args)), **kwargs}
        merged = {**self._remembered, **kwargs}
        arguments = Arguments.split(args, merged)
        passed = [*args, *(kwargs[k] for k in kwargs if k not in self._shared)]
        arrays = [a for a in map(jnp.shape, jax.tree.leaves(passed)) if a]
        if not arrays or arrays[0][0] == 0:
            raise ValueError(
                "pass the new inputs: arrays with one row per point, got shapes "
                f"{arrays}"
            )
        is_new = (
            jax.tree.map(lambda _: True, args),
            {k: jax.tree.map(lambda _, k=k: k in kwargs, v) for k, v in merged.items()},
        )
        flags = Arguments.select_arrays((args, merged), jax.tree.leaves(is_new))
        by_row = tuple(
            flag and a.ndim > 0 and a.shape[0] == arrays[0][0]
            for flag, a in zip(flags, arguments.arrays, strict=True)
        )
        return arguments, by_row

    def _without_observations(self, given: int) -> dict[str, None]:
        """``None`` for observation arguments not passed that have no default."""
        parameters = list(inspect.signature(self._model).parameters.values())[given:]
        return {
            p.name: None
            for p in parameters
            if p.name in self._observations and p.default is p.empty
        }

    def _call(self, what: str, arguments: Arguments, site: str) -> Any:
        if self._fit is None:
            factors = self._compiled["factors"](
                arguments.arrays, self._values, static=arguments.static
            )
            for name, factor in factors.items():
                if not np.isfinite(np.asarray(factor)).all():
                    raise CholeskyError(
                        f"the kernel matrix of {name!r} did not factorise"
                    )
            self._fit = Fit(self._values, self._moments, factors)
        return self._compiled[what](
            arguments.arrays, self._fit, static=arguments.static, site=site
        )

    def _stream(
        self,
        what: str,
        called: tuple[Arguments, tuple[bool, ...]],
        site: str,
        batch_size: int,
    ) -> Any:
        """Blocks of rows, the last one padded, put together again."""
        arguments, by_row = called
        # The answer's structure (a distribution knows its batch shape) at all rows; run
        # first, so that an error tells the shape that was passed in, not a padded one.
        whole = jax.eval_shape(
            lambda arrays, static=arguments.static: self._raw[what](
                arrays,
                Fit(
                    self._values,
                    self._moments,
                    self._cholesky(arrays, self._values, static),
                ),
                static,
                site,
            ),
            arguments.arrays,
        )
        rows = arguments.arrays[by_row.index(True)].shape[0]
        blocks = []
        for start in range(0, rows, batch_size):
            chosen = np.minimum(np.arange(start, start + batch_size), rows - 1)
            arrays = tuple(
                a[chosen] if flag else a
                for a, flag in zip(arguments.arrays, by_row, strict=True)
            )
            blocks.append(self._call(what, arguments._replace(arrays=arrays), site))
        leaves = [
            _joined(leaf.shape, parts)
            for leaf, *parts in zip(
                jax.tree.leaves(whole), *map(jax.tree.leaves, blocks), strict=True
            )
        ]
        return jax.tree.unflatten(jax.tree.structure(whole), leaves)

    def __repr__(self) -> str:
        blocks = {b.name: b.shape for b in self._structure.blocks}
        observed = [site.name for site in self._structure.observed]
        return f"Posterior(blocks={blocks}, observed={observed})"

    # -- sites ----------------------------------------------------------------------

    def _block(self, site: str | None) -> Block:
        processes = [b for b in self._structure.blocks if b.is_process]
        return _one_of(processes, site, "Gaussian process")

    def _observed(self, site: str | None) -> Observed:
        return _one_of(self._structure.observed, site, "observed site")

    # -- saving -----------------------------------------------------------------------

    def save(self, path: str | PathLike[str]) -> None:
        """Saves plain arrays (``.npz``): values of params and other latents, moments of
        the Gaussian blocks, remembered keyword arguments. No code, no pickle, and no
        training data unless they were passed by keyword.

        :param path: the file.
        :raises ValueError: for a value that is not made of arrays and plain numbers.
        """
        arrays: dict[str, np.ndarray] = {}
        meta = {
            "values": pack(self._values, "values", arrays),
            "remembered": pack(self._remembered, "remembered", arrays),
            "moments": pack(
                {k: list(m) for k, m in self._moments.items()}, "moments", arrays
            ),
            "observations": list(self._observations),
            "shared": list(self._shared),
            "structure": pack_structure(self._structure),
        }
        arrays["meta"] = np.array(json.dumps(meta))
        # Through a handle: given a name, NumPy may append a suffix to it.
        with open(path, "wb") as file:
            np.savez(file, allow_pickle=False, **arrays)

    @classmethod
    def load(cls, path: str | PathLike[str], model: Callable[..., Any]) -> Posterior:
        """Loads what :meth:`save` wrote; nothing is unpickled.

        :param path: the file.
        :param model: the model it was fitted with.
        """
        with np.load(path, allow_pickle=False) as archive:
            arrays = {k: jnp.asarray(v) for k, v in archive.items() if k != "meta"}
            meta = json.loads(str(archive["meta"]))
        return cls(
            model,
            unpack_structure(meta["structure"]),
            unpack(meta["values"], arrays),
            {k: Moments(*m) for k, m in unpack(meta["moments"], arrays).items()},
            unpack(meta["remembered"], arrays),
            tuple(meta["observations"]),
            tuple(meta["shared"]),
        )


def _has_rows(tree: Any, rows: set[int]) -> bool:
    arrays = (x for x in jax.tree.leaves(tree) if is_array(x))
    return any(x.ndim and x.shape[0] in rows for x in arrays)


def _one_of(candidates: Any, name: str | None, what: str) -> Any:
    names = [c.name for c in candidates]
    if name is None and len(names) == 1:
        return candidates[0]
    if name not in names:
        raise ValueError(f"site={name!r}: the model's choices of {what} are {names}")
    return candidates[names.index(name)]


def _joined(shape: tuple[int, ...], parts: list[Array]) -> Array:
    """Parts along the axis over rows: the one whose size is not that of a block."""
    sizes = zip(parts[0].shape, shape, strict=True)
    axes = [i for i, (block, whole) in enumerate(sizes) if block != whole]
    if not axes:
        return parts[0]
    whole = jnp.concatenate(parts, axes[0])
    return jax.lax.slice_in_dim(whole, 0, shape[axes[0]], axis=axes[0])


def _sources(
    model: Callable[..., Any],
    structure: Structure,
    values: dict[str, Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names of the arguments that observed values, and inducing matrices, are computed
    from."""
    arguments = Arguments.split(args, kwargs)
    inputs = {str(i): a for i, a in enumerate(arguments.arrays)}

    def parts(inputs: dict[str, Array]) -> tuple[list[Any], list[Any]]:
        given = arguments._replace(
            arrays=tuple(inputs[str(i)] for i in range(len(inputs)))
        )
        filled = {**structure.zeros, **values}
        trace = run_model(model, given, random.key(0), filled)
        processes = [b for b in structure.blocks if b.is_process]
        factors = [conditional_of(trace, b).gp.cholesky for b in processes]
        return [trace[site.name]["value"] for site in structure.observed], factors

    states = dependences(parts, inputs)
    positional = list(inspect.signature(model).parameters)
    paths = jax.tree_util.tree_flatten_with_path((args, kwargs))[0]
    names = Arguments.select_arrays(
        (args, kwargs),
        [
            positional[path[1].idx] if path[0].idx == 0 else path[1].key
            for path, _ in paths
        ],
    )
    split = len(structure.observed)
    found = []
    for group in (states[:split], states[split:]):
        indices = sorted({int(key) for state in group for key in state})
        found.append(tuple(dict.fromkeys(names[i] for i in indices)))
    return found[0], found[1]
