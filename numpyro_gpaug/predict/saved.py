# SPDX-License-Identifier: Apache-2.0
"""Fitted posteriors in files."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from os import PathLike
from typing import Any, NamedTuple

import numpy as np
from jax import Array

from numpyro_gpaug.errors import ArchiveError
from numpyro_gpaug.guides import AutoLatentGaussian, AutoSparseGP
from numpyro_gpaug.guides.base import ProcessGuide
from numpyro_gpaug.math.linalg import Moments
from numpyro_gpaug.model.latents import JointStructure
from numpyro_gpaug.model.structure import Structure
from numpyro_gpaug.predict.archive import (
    Description,
    check_model,
    check_moments,
    describe,
    moments_of,
    pack,
    pack_structure,
    pack_values,
    read,
    refusing,
    unpack,
    unpack_structure,
    write,
)
from numpyro_gpaug.predict.arguments import FitArguments
from numpyro_gpaug.predict.joint import predictor_for
from numpyro_gpaug.predict.mixture import Fitted, Members
from numpyro_gpaug.predict.predictor import Predictor
from numpyro_gpaug.predict.summary import SiteMoments


class SavedFit(NamedTuple):
    """What a posterior is made of.

    :param predictor: the model and what its guide says of function values.
    :param fitted: what was fitted.
    :param arguments: what is known of the arguments of the fit.
    :param sites: posteriors of jointly Gaussian latents, by name.
    :param marks: what tells the factors of these.
    :param rule_errors: what quadrature lost, by site.
    """

    predictor: Predictor
    fitted: Fitted
    arguments: FitArguments
    sites: dict[str, SiteMoments]
    marks: dict[str, Array]
    rule_errors: dict[str, float]

    def description(self) -> Description:
        """See :func:`~numpyro_gpaug.predict.archive.describe`; at the first member."""
        made, values = self.predictor, self.fitted.first.values
        return describe(made.model, made.structure, self.arguments, values)


def write_fit(path: str | PathLike[str], fit: SavedFit) -> None:
    """See :meth:`~numpyro_gpaug.Posterior.save`."""
    arrays: dict[str, np.ndarray] = {}
    kwargs, observations, shared, data, fingerprints = fit.arguments
    values, _, members = fit.fitted
    meta = {
        "values": pack_values(values, arrays),
        "arguments": pack(kwargs, "arguments", arrays),
        "moments": _packed(fit.predictor.moments(fit.fitted), "moments", arrays),
        "sites": _packed(
            {k: _arrays(m) for k, m in fit.sites.items()}, "sites", arrays
        ),
        "marks": pack(fit.marks, "marks", arrays),
        "rule_errors": pack(fit.rule_errors, "rule_errors", arrays),
        "observations": list(observations),
        "shared": list(shared),
        "fingerprints": fingerprints,
        "structure": pack_structure(fit.predictor.structure),
        "function_posterior": type(fit.predictor.function_posterior).__name__,
    }
    if members is not None:
        parts = [members.log_weights, members.values]
        meta["members"] = pack(parts, "members", arrays)
        meta["member_moments"] = _packed(members.own, "member_moments", arrays)
    # What cannot be saved is code, which whoever loads this has to bring.
    with suppress(ValueError):
        meta["data"] = pack(data, "data", arrays)
        meta["model"] = pack(fit.description(), "model", arrays)
    write(path, arrays, meta)


def read_fit(
    path: str | PathLike[str], model: Callable[..., Any], guide: ProcessGuide | None
) -> SavedFit:
    """See :meth:`~numpyro_gpaug.Posterior.load`."""
    with refusing(f"{path} is foreign, truncated or damaged"):
        meta, arrays = read(path)
        if "state" in meta:
            raise ArchiveError(f"{path} holds a state of a fit, which load_state reads")
        structure = unpack_structure(meta["structure"])
        joint = isinstance(structure, JointStructure)
        if guide is None:
            guide = (AutoLatentGaussian if joint else AutoSparseGP)(model)

        def part(name: str) -> Any:
            return unpack(meta.get(name, {"plain": None}), arrays)

        sites = {k: _site(*m) for k, m in (part("sites") or {}).items()}
        kept = tuple(meta["observations"]), tuple(meta["shared"])
        arguments = FitArguments(
            part("arguments"), *kept, part("data"), meta.get("fingerprints", {})
        )
        fitted = Fitted(
            part("values"), _moments(structure, part("moments")),
            _members(structure, part("members"), part("member_moments")),
        )  # fmt: skip
        marks, saved = part("marks") or {}, part("model")
        kind = type(guide.function_posterior).__name__
        if kind != meta["function_posterior"] or joint != isinstance(
            guide, AutoLatentGaussian
        ):
            raise ArchiveError(
                f"{path} holds a fit read by {meta['function_posterior']}, but a "
                f"{type(guide).__name__} brings {kind}: pass the guide of the fit, "
                "load(path, model, guide)"
            )
    predictor = predictor_for(guide, model, structure)
    found = SavedFit(
        predictor, fitted, arguments, sites, marks, part("rule_errors") or {}
    )
    if saved is not None:
        with refusing(f"{path} does not fit the model given"):
            check_model(found.description(), saved)
    return found


def _packed(
    moments: dict[str, Any], path: str, arrays: dict[str, np.ndarray]
) -> dict[str, Any]:
    return pack({k: list(m) for k, m in moments.items()}, path, arrays)


def _arrays(site: SiteMoments) -> tuple[Array, Array, Array | None]:
    mean, variance, covariance = site
    return mean, variance, None if covariance is None else covariance()


def _site(mean: Array, variance: Array, covariance: Array | None) -> SiteMoments:
    known = None if covariance is None else lambda: covariance
    return SiteMoments(mean, variance, known)


def _members(structure: Structure, parts: Any, moments: Any) -> Members | None:
    if parts is None:
        return None
    log_weights, values = parts
    count = len(log_weights)
    if any(len(x) != count for x in values.values()):
        raise ArchiveError(f"of {count} members there are other numbers of values")
    return Members(log_weights, values, _moments(structure, moments, (count,)))


def _moments(
    structure: Structure, packed: dict[str, Any], leading: tuple[int, ...] = ()
) -> dict[str, Any]:
    """Moments of blocks, of the sizes that these have.

    :param leading: axes before theirs.
    """
    of: Any = Moments
    if isinstance(structure, JointStructure):
        of = type(moments_of(structure))
    own = {k: of(*m) for k, m in packed.items()}
    check_moments(structure, own, leading)
    return own
