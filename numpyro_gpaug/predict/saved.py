# SPDX-License-Identifier: Apache-2.0
"""Fitted posteriors in files."""

from __future__ import annotations

from contextlib import suppress
from os import PathLike
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_gpaug.errors import ArchiveError
from numpyro_gpaug.gaussians.dense import Moments
from numpyro_gpaug.guides import AutoLatentGaussian, AutoSparseGP
from numpyro_gpaug.guides.base import ProcessGuide
from numpyro_gpaug.guides.function_posterior import InducingPosterior
from numpyro_gpaug.math.arrays import enable_x64, in_dtype_of
from numpyro_gpaug.math.files import plain, read, refusing, typed, write
from numpyro_gpaug.model.arguments import Model, Values
from numpyro_gpaug.model.latents import Structure
from numpyro_gpaug.predict.archive import (
    Description,
    Parts,
    check_model,
    check_moments,
    check_whole,
    describe,
    leaves_apart,
    moments_of,
    pack,
    unpack,
)
from numpyro_gpaug.predict.arguments import FitArguments, Range
from numpyro_gpaug.predict.mixture import Fitted, Members
from numpyro_gpaug.predict.predictor import Predictor, predictor_for
from numpyro_gpaug.predict.summary import SiteMoments


class SavedFit(NamedTuple):
    """The parts of a posterior.

    :param predictor: the model, and the posterior of function values by its guide.
    :param fitted: the fitted quantities.
    :param arguments: the description of the arguments of the fit.
    :param sites: posteriors of jointly Gaussian latents, by name.
    :param marks: a checksum of their factors.
    :param rule_errors: errors of quadrature, by site.
    """

    predictor: Predictor
    fitted: Fitted
    arguments: FitArguments
    sites: dict[str, SiteMoments]
    marks: dict[str, Array]
    rule_errors: dict[str, float]

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
    labels: dict[str, tuple[str, ...]] = {}
    axes: dict[str, tuple[str, ...]] = {}
    model: Description | None = None


def write_fit(path: str | PathLike[str], fit: SavedFit) -> None:
    """Write a fit; see :meth:`~numpyro_gpaug.Posterior.save`."""
    arrays: dict[str, np.ndarray] = {}
    values, _, members = fit.fitted
    kept = fit.arguments._asdict()
    parts = {
        "values": leaves_apart(values),
        "arguments": kept.pop("kwargs"),
        **plain({k: x for k, x in kept.items() if k != "data"}),
        "moments": _listed(fit.predictor.moments(fit.fitted)),
        "members": members and members._asdict() | {"own": _listed(members.own)},
        "sites": {k: _arrays(m) for k, m in fit.sites.items()},
        "marks": fit.marks,
        "rule_errors": fit.rule_errors,
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
    with refusing(f"{path} is foreign, truncated or damaged"):
        contents = read(path)
        if "state" in contents.header:
            raise ArchiveError(
                f"{path} contains a state of a fit. Read it with load_state"
            )
        with enable_x64(True):  # in their saved dtype
            arrays = {k: jnp.asarray(x) for k, x in contents.arrays.items()}
        parts = {k: unpack(x, arrays) for k, x in contents.header.items()}
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
                f"{path} holds a fit read by {found.function_posterior}, but a "
                f"{type(guide).__name__} brings {kind}: pass the guide of the fit, "
                "load(path, model, guide)"
            )
        with in_dtype_of((found.values, found.moments)):
            fitted = Fitted(
                found.values, _moments(structure, found.moments),
                _members(structure, found.members),
            )  # fmt: skip
            predictor = predictor_for(guide, model, structure)
        fit = SavedFit(
            predictor,
            fitted,
            FitArguments(
                found.arguments, *(getattr(found, k) for k in FitArguments._fields[1:])
            ),
            {k: _site(*m) for k, m in found.sites.items()},
            found.marks,
            found.rule_errors,
        )  # fmt: skip
        with in_dtype_of(fitted):
            by_params = type(guide.function_posterior) is not InducingPosterior
            check_whole(structure, fitted, fit.sites, by_params=by_params)
        contents.check()
    if found.model is not None:
        with refusing(f"{path} does not fit the model given"), in_dtype_of(fitted):
            check_model(fit.description(), found.model)
    return fit


def _listed(moments: dict[str, Any]) -> dict[str, list[Array]]:
    return {k: jax.tree.leaves(m) for k, m in moments.items()}


def _arrays(site: SiteMoments) -> tuple[Array, Array, Array | None]:
    mean, variance, covariance = site
    return mean, variance, None if covariance is None else covariance()


def _site(mean: Array, variance: Array, covariance: Array | None) -> SiteMoments:
    known = None if covariance is None else lambda: covariance
    return SiteMoments(mean, variance, known)


def _members(structure: Structure, saved: Members | None) -> Members | None:
    if saved is None:
        return None
    count = len(saved.log_weights)
    if any(len(x) != count for x in saved.values.values()):
        raise ValueError(f"there are {count} members, but another number of values")
    return saved._replace(own=_moments(structure, saved.own, (count,)))


def _moments(
    structure: Structure, saved: dict[str, Any], leading: tuple[int, ...] = ()
) -> Values:
    """Return moments with the sizes of the blocks.

    :param leading: the number of leading axes.
    """
    like: Any = Moments(0, 0)  # type: ignore[arg-type]
    if structure.joint:
        like = moments_of(structure)
    made = jax.tree.structure(like)
    own = {k: jax.tree.unflatten(made, m) for k, m in saved.items()}
    check_moments(structure, own, leading)
    return own
