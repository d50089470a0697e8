# SPDX-License-Identifier: Apache-2.0
"""Fitted posteriors in files: models and trees of arrays as plain arrays and JSON."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import replace
from os import PathLike
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.dtypes import canonicalize_dtype
from numpyro import handlers

from numpyro_gpaug._numpyro import whole_plates
from numpyro_gpaug.errors import ArchiveError
from numpyro_gpaug.gaussians import STRUCTURES
from numpyro_gpaug.gp.conditional import Conditional
from numpyro_gpaug.guides import AutoLatentGaussian, AutoSparseGP
from numpyro_gpaug.guides.base import ProcessGuide
from numpyro_gpaug.guides.sparse_gp import standard_naturals
from numpyro_gpaug.likelihoods.expectations import base_distribution
from numpyro_gpaug.math.arrays import enable_x64, in_dtype_of
from numpyro_gpaug.math.compiling import once
from numpyro_gpaug.math.files import plain, read, refusing, typed, write
from numpyro_gpaug.math.linalg import precise
from numpyro_gpaug.model.arguments import Arguments, Model, Values
from numpyro_gpaug.model.gaussians import whitening
from numpyro_gpaug.model.latents import GaussianSite, Grouping, Structure
from numpyro_gpaug.model.structure import Block, Leaves, Observed, run_model
from numpyro_gpaug.predict.arguments import FitArguments, Range
from numpyro_gpaug.predict.mixture import Fitted, Members
from numpyro_gpaug.predict.predictor import Predictor, predictor_for
from numpyro_gpaug.predict.summary import KnownSites, SiteMoments

# -- models ---------------------------------------------------------------------------


class Description(NamedTuple):
    """The properties that a model must share with the model of a saved fit.

    :param lines: one line for every param, process and distribution.
    :param kernels: covariances of the first inducing input of every process with all
        inducing inputs.
    :param numbers: numbers by topic, see :func:`describe`.
    """

    lines: dict[str, str]
    kernels: dict[str, Array]
    numbers: dict[str, tuple[float, ...]]


def describe(
    model: Model, structure: Structure, arguments: FitArguments, values: Values
) -> Description:
    """Describe a model by one run at stand-in values: fixed numbers replace all data
    (of which a fit keeps only shapes), Gaussian latents and function values.

    The values of a Gaussian site at standard normal numbers, and the log-densities of
    all other sites, change if a prior, a predictor or a constant changes.

    :param model: the model.
    :param structure: the structure of the fit.
    :param arguments: arguments of the fit.
    :param values: params and other latents of the fit.
    """
    lines: dict[str, str] = {}
    args, observations = arguments.data
    kept = Arguments.split(args, {**arguments.kwargs, **observations})

    def function_values(message: dict[str, Any]) -> Array | None:
        fn: Any = message.get("fn")
        return _stand_in(fn.shape, fn.dtype) if _is_process(message) else None

    @precise
    def numbers(kept: Arguments, values: Values) -> Any:
        leaves, tree = jax.tree.flatten(kept.merge())
        # Different numbers in every argument, because predictors may depend on any of
        # them.
        args, kwargs = tree.unflatten(  # type: ignore[attr-defined]
            _data(x, i) if _is_shape(x) else x for i, x in enumerate(leaves)
        )
        latents = {k: _stand_in(x.shape, x.dtype) for k, x in structure.zeros.items()}
        stood_in = handlers.substitute(
            whole_plates(model), substitute_fn=function_values
        )
        with_data, key = Arguments.split(args, kwargs), jax.random.key(0)
        trace = run_model(stood_in, with_data, key, {**latents, **values})
        lines.update({k: _line(m) for k, m in trace.items() if m["type"] != "plate"})
        fs = {k: m["fn"] for k, m in trace.items() if _is_process(m)}
        kernels = {
            k: f.gp.kernel(_first(f.inducing), f.inducing) for k, f in fs.items()
        }
        told = (_numbers(m).items() for m in trace.values())
        return kernels, {what: _some(x) for each in told for what, x in each}

    kernels, found = once(numbers, kept, values)
    rounded = {k: tuple(float(f"{x:.6g}") for x in v) for k, v in found.items()}
    return Description(lines, kernels, rounded)


def _stand_in(shape: tuple[int, ...], dtype: Any, start: int = 0) -> Array:
    """Return numbers between -1 and 1 that are the same on every device; 0 and 1 for
    other dtypes than floats."""
    places = jnp.arange(math.prod(shape), dtype=np.int32).reshape(shape)
    places = (618 * (places % 997) + 89 * start) % 997
    dtype = canonicalize_dtype(dtype)
    if not jnp.issubdtype(dtype, jnp.floating):
        return (places % 2).astype(dtype)
    return (places / 498.0 - 1).astype(dtype)


def _data(like: Any, start: int) -> Array:
    """Return numbers that replace data. They are not negative, for logarithms and
    codes."""
    x = _stand_in(like.shape, like.dtype, start)
    return 1 + 0.8 * x if jnp.issubdtype(x.dtype, jnp.floating) else x


def _numbers(message: dict[str, Any]) -> dict[str, Array]:
    """Return numbers that describe a site, for comparison with others."""
    name, fn = message["name"], message.get("fn")
    if isinstance(fn, Conditional):
        found = {f"what {name!r} is called at": fn.X, f"the mean of {name!r}": fn.mean}
        return found | {f"inducing= of {name!r}": fn.inducing}
    if message["type"] != "sample" or fn is None:
        return {}
    what = f"the prior of {name!r}"
    if message["is_observed"]:
        what = f"the distribution of {name!r} given its latents"
    gaussian = whitening(fn)
    if gaussian is None:
        # The labels in the data are 0 and 1, which is not enough for more classes.
        values = message["value"], message["value"] + 2
        return {what: jnp.stack([fn.log_prob(x) for x in values])}
    return {what: gaussian.value(_stand_in(gaussian.shape, float))}


def _some(numbers: Array) -> Array:
    """Return up to 16 entries: the first, the last, and some between."""
    flat = jnp.ravel(numbers)
    return flat[np.linspace(0, flat.size - 1, min(flat.size, 16)).astype(int)]


def check_model(found: Description, saved: Description) -> None:
    """Raise unless a model equals the model of the fit, as far as :func:`describe` can
    show.

    :param found: the description of the given model.
    :param saved: the description of the model of the fit.
    :raises ValueError: if they differ; it names the site.
    """
    for name in sorted({**found.lines, **saved.lines}):
        here, there = (x.lines.get(name, "missing") for x in (found, saved))
        if here != there:
            raise ValueError(f"{name!r} is {here} in the model, and {there} in the fit")
    for name in {**found.kernels, **saved.kernels}:
        if not _agree(*(x.kernels.get(name) for x in (found, saved))):
            raise ValueError(
                f"the kernel of {name!r}, its hyperparameters or its inducing inputs "
                "differ from the fit"
            )
    # Files of earlier versions have fewer numbers.
    for what in saved.numbers:
        if not _agree(*(x.numbers.get(what) for x in (found, saved))):
            raise ValueError(f"{what} differs from the fit")


def _agree(found: Any, saved: Any) -> bool:
    """Whether numbers are equal up to rounding, on any device. A value that is
    finite for only one of them was computed from stand-ins outside its domain."""
    one, other = (np.asarray(x, float) for x in (found, saved))
    if one.shape != other.shape:
        return False
    both = np.isfinite(one) & np.isfinite(other)
    scale = np.abs(other[both]).max(initial=0)
    return np.allclose(one[both], other[both], rtol=1e-3, atol=1e-3 * scale)


def _is_shape(leaf: Any) -> bool:
    return isinstance(leaf, jax.ShapeDtypeStruct)


def _is_process(message: dict[str, Any]) -> bool:
    return isinstance(message.get("fn"), Conditional)


def _first(Z: Array) -> Array:
    return Z[:1] if Z.ndim == 1 else Z[..., :1, :]


def _line(message: dict[str, Any]) -> str:
    if _is_process(message):
        return f"process with kernel {type(message['fn'].gp.kernel).__name__}"
    if message["type"] != "sample":
        return message["type"]
    shape = tuple(message["fn"].shape())
    return f"{type(base_distribution(message['fn'])).__name__} of shape {shape}"


# -- trees ----------------------------------------------------------------------------


def pack(tree: Any, path: str, arrays: dict[str, np.ndarray]) -> Any:
    """Return a JSON description of ``tree``; its arrays are added to ``arrays``, by
    path."""
    if isinstance(tree, np.ndarray | jax.Array):
        # Numbered, because names with slashes may give the same path twice.
        name = f"{len(arrays)}/{path}"
        arrays[name] = np.asarray(tree)
        return {"array": name}
    if _is_shape(tree) and isinstance(tree.dtype, np.dtype):
        return {"shape": [tree.shape, str(tree.dtype)]}
    if isinstance(tree, dict) and all(isinstance(k, str) for k in tree):
        return {"dict": {k: pack(v, f"{path}/{k}", arrays) for k, v in tree.items()}}
    if isinstance(tree, Leaves):
        return {"leaves": pack(tree.leaves, path, arrays)}
    if type(tree) in (list, tuple):
        return {"list": [pack(v, f"{path}/{i}", arrays) for i, v in enumerate(tree)]}
    if tree is None or isinstance(tree, bool | int | float | str):
        return {"plain": tree}
    raise ValueError(
        f"{path} is a {type(tree).__name__}: only arrays, numbers, strings, and dicts, "
        "lists and tuples of them can be saved"
    )


def unpack(packed: dict[str, Any], arrays: dict[str, Array]) -> Any:
    """Return the tree that :func:`pack` described."""
    ((kind, content),) = packed.items()
    if kind == "array":
        return arrays[content]
    if kind == "shape":
        shape, dtype = content
        return jax.ShapeDtypeStruct(tuple(shape), jnp.dtype(dtype))
    if kind == "dict":
        return {k: unpack(v, arrays) for k, v in content.items()}
    if kind == "leaves":
        return Leaves(tuple(unpack(content, arrays)))
    if kind == "list":
        return [unpack(v, arrays) for v in content]
    return content


def _is_plain(tree: Any) -> bool:
    """Whether :func:`pack` keeps the structure of ``tree`` as it is."""
    if isinstance(tree, dict):
        return all(isinstance(k, str) and _is_plain(v) for k, v in tree.items())
    if type(tree) in (list, tuple):
        return all(map(_is_plain, tree))
    return jax.tree_util.all_leaves([tree])


class Parts(NamedTuple):
    """The saved form of a structure, without the parts that depend on arguments."""

    blocks: tuple[Block, ...]
    others: tuple[str, ...]
    observed: tuple[Observed, ...]
    sites: tuple[GaussianSite, ...] | None = None
    held: tuple[tuple[str, str], ...] = ()
    form: str = "dense"
    groupings: tuple[Grouping, ...] = ()
    recurrences: tuple[Grouping, ...] = ()
    process_names: tuple[str, ...] = ()
    record: tuple[str, ...] = ()
    fields: tuple[str, ...] = ()
    indexed: bool = True

    @classmethod
    def of(cls, structure: Structure) -> Parts:
        """Return the parts of a structure."""
        known = {k: x for k, x in vars(structure).items() if k in cls._fields}
        names = {kind: name for name, kind in STRUCTURES.items()}
        known |= {"form": names[type(structure.form)], "record": structure.form.record}
        return cls(**known if structure.joint else known | {"sites": None})

    @property
    def structure(self) -> Structure:
        """Return the structure made of these parts."""
        blocks = tuple(b._replace(dtype=jnp.dtype(b.dtype)) for b in self.blocks)
        processes = tuple(b.name for b in blocks if b.is_process)
        kept: dict[str, Any] = {
            k: getattr(self, k)
            for k in ("others", "observed", "held", "recurrences", "fields", "indexed")
        }
        found = Structure(
            blocks, plates={}, functions={}, constraints={},
            process_names=self.process_names or processes,
            joint=self.sites is not None, sites=self.sites or (), **kept,
        )  # fmt: skip
        if self.sites is None:
            return found
        found = replace(found, dtype=blocks[0].dtype)
        form = STRUCTURES[self.form].of_record(self.record)
        return found.in_form(form, self.groupings)


class SavedFit(NamedTuple):
    """The parts of a posterior.

    :param predictor: the model, and the posterior of function values by its guide.
    :param fitted: the fitted quantities.
    :param arguments: the description of the arguments of the fit.
    :param known: moments of the Gaussian sites, and numbers of the same fit.
    """

    predictor: Predictor
    fitted: Fitted
    arguments: FitArguments
    known: KnownSites

    def description(self) -> Description:
        """Return :func:`~numpyro_gpaug.predict.archive.describe` at the first
        member."""
        made, values = self.predictor, self.fitted.first.values
        return describe(made.model, made.structure, self.arguments, values)


class _Header(NamedTuple):
    """The header of a file, with checked types, which describes a fit."""

    values: Values
    arguments: dict[str, Any]
    observations: tuple[str, ...]
    shared: tuple[str, ...]
    fingerprints: dict[str, int]
    ranges: dict[str, tuple[Range, ...]]
    moments: dict[str, tuple[Array, ...]]
    members: Members | None
    sites: dict[str, tuple[Array, Array, Array | None]]
    marks: dict[str, Array]
    rule_errors: dict[str, float]
    structure: Parts
    function_posterior: str
    # Empty if arguments are code, which must be passed when the file is loaded.
    data: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})
    rows: int | None = None
    labels: dict[str, tuple[str, ...]] = {}
    axes: dict[str, tuple[str, ...]] = {}
    model: Description | None = None


def write_fit(path: str | PathLike[str], fit: SavedFit) -> None:
    """Write a fit; see :meth:`~numpyro_gpaug.Posterior.save`."""
    arrays: dict[str, np.ndarray] = {}
    values, _, members = fit.fitted
    kept = fit.arguments._asdict()
    parts = {
        # A param with its own tree (a network) is saved as its leaves. The code that
        # declares it restores the tree.
        "values": {
            k: x if _is_plain(x) else Leaves(tuple(jax.tree.leaves(x)))
            for k, x in values.items()
        },
        "arguments": kept.pop("kwargs"),
        **plain({k: x for k, x in kept.items() if k != "data"}),
        "moments": _listed(fit.predictor.moments(fit.fitted)),
        "members": members and members._asdict() | {"own": _listed(members.own)},
        "sites": {
            k: (*m[:2], m.covariance and m.covariance())
            for k, m in fit.known.moments.items()
        },
        "marks": fit.known.marks,
        "rule_errors": fit.known.rule_errors,
        "structure": plain(Parts.of(fit.predictor.structure)),
        "function_posterior": type(fit.predictor.function_posterior).__name__,
    }
    header = {name: pack(part, name, arrays) for name, part in parts.items()}
    with suppress(ValueError):
        header["data"] = pack(kept["data"], "data", arrays)
        header["model"] = pack(fit.description()._asdict(), "model", arrays)
    write(path, arrays, header)


def read_fit(
    path: str | PathLike[str], model: Model, guide: ProcessGuide | None
) -> SavedFit:
    """Read a fit; see :meth:`~numpyro_gpaug.Posterior.load`."""
    with refusing(f"{path} is not the file of a posterior, or is damaged"):
        header, plain_arrays = read(path)
        if "state" in header:
            raise ArchiveError(
                f"{path} contains a state of a fit. Read it with load_state"
            )
        with enable_x64(True):  # in their saved dtype
            arrays = {k: jnp.asarray(x) for k, x in plain_arrays.items()}
        parts = {k: unpack(x, arrays) for k, x in header.items()}
        found: _Header = typed(parts, _Header, "header")
        structure = found.structure.structure
        joint = structure.joint
        if guide is None:
            guide = (AutoLatentGaussian if joint else AutoSparseGP)(model)
        kind = type(guide.function_posterior).__name__
        if kind != found.function_posterior or joint != isinstance(
            guide, AutoLatentGaussian
        ):
            raise ArchiveError(
                f"{path} is of a fit by another guide than {type(guide).__name__} "
                f"({found.function_posterior}, not {kind}). Pass the guide of the fit, "
                "load(path, model, guide)"
            )
        with in_dtype_of((found.values, found.moments)):
            own, members = _moments(structure, found.moments), found.members
            if members is not None:
                members = members._replace(own=_moments(structure, members.own))
            predictor = predictor_for(guide, model, structure)
        kept = (getattr(found, k) for k in FitArguments._fields[1:])
        sites = {k: _site(*m) for k, m in found.sites.items()}
        known = KnownSites(sites, found.marks, found.rule_errors)
        arguments = FitArguments(found.arguments, *kept)
        fitted = Fitted(found.values, own, members)
        fit = SavedFit(predictor, fitted, arguments, known)
    if found.model is not None:
        with refusing(f"{path} is of another model"), in_dtype_of(fitted):
            check_model(fit.description(), found.model)
    return fit


def _listed(moments: dict[str, Any]) -> dict[str, list[Array]]:
    return {k: jax.tree.leaves(m) for k, m in moments.items()}


def _site(mean: Array, variance: Array, covariance: Array | None) -> SiteMoments:
    known = None if covariance is None else lambda: covariance
    return SiteMoments(mean, variance, known)


def _moments(structure: Structure, saved: dict[str, Any]) -> Values:
    """Return moments by block, from their leaves."""

    def made() -> dict[str, Any]:
        return {k: x.moments() for k, x in standard_naturals(structure).items()}

    like = jax.eval_shape(made)
    trees = {k: jax.tree.structure(like[k]) for k in saved}
    return {k: jax.tree.unflatten(trees[k], leaves) for k, leaves in saved.items()}
