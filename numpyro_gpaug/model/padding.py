# SPDX-License-Identifier: Apache-2.0
"""Rows of weight zero, so that data of similar size share compiled programs.

Data that grow by a row (Bayesian optimisation), the folds of a cross-validation, and
requests for predictions would otherwise compile everything anew. Rows are repeated to
reach one of few sizes; the repeated ones have weight zero in the likelihood, and are
cut off predictions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Array
from jax.sharding import Mesh

from numpyro_gpaug._numpyro import one_thread
from numpyro_gpaug.gp.conditional import Conditional
from numpyro_gpaug.math.arrays import is_traced
from numpyro_gpaug.math.sharding import ROWS
from numpyro_gpaug.model.arguments import Added, Arguments, is_array
from numpyro_gpaug.model.jaxpr import by_place, jaxpr_and_tree
from numpyro_gpaug.model.rows import rows_independent
from numpyro_gpaug.model.structure import fixed_key, from_cache, run_model

# The smallest padded size, because programs with fewer rows are no faster. Above it, at
# most one row in this number is added.
_LEAST, _GRAIN = 64, 8
# With more rows, compilation is a small part of a fit, and copies of the data are
# large.
_MAX_ROWS = 2**17

Shape = tuple[int, ...]


class Padding:
    """Pads arguments with rows of weight zero, where this changes no result.

    The first data are not padded. Data with another number of rows are, if the model
    treats rows one by one. This is proved from traces of the model with two numbers of
    rows, and the model is taken to be the same program at all numbers in between.

    :param model: the model.
    :param data: names of observed sites, where they are not observed.
    """

    def __init__(self, model: Callable[..., Any], data: tuple[str, ...] = ()) -> None:
        self._model, self._data = model, data
        # By everything in arguments except their numbers of rows.
        # Numbers of rows so far, and which arrays have one row per datum.
        self._families: dict[Hashable, tuple[set[int], set[int]]] = {}
        self._traced: dict[Hashable, _Traced] = {}
        # By everything except the number of rows; then by that number.
        self._proved: dict[Hashable, dict[int, Added | None]] = {}

    @one_thread
    def __call__(
        self, arguments: Arguments, mesh: Mesh | None = None, *, doubling: bool = False
    ) -> Arguments:
        """Return the arguments, with added rows or unchanged.

        :param arguments: arguments of the model. Traced ones, and those with rows on
            several devices, are unchanged.
        :param mesh: the mesh that rows will be divided among. With a mesh the first
            data are padded, too, if their rows cannot be divided evenly.
        :param doubling: whether each size is twice the last, for work that is short
            beside its compilation.
        """
        num = arguments.num_rows
        if is_traced(arguments) or not num or arguments.mesh is not None:
            return arguments
        family, here = family_of(arguments), _with_rows(arguments)
        numbers, known = from_cache(self._families, family, lambda: (set(), here))
        numbers.add(num)
        parts = 1 if mesh is None else mesh.shape[ROWS]
        size = -(-num // parts) * parts
        if len(numbers) > 1:
            size = padded_size(num, parts, 1 if doubling else _GRAIN)
        # The number of inducing inputs may equal the number of rows of some data.
        rows = known & here
        if not rows or (size == num and len(numbers) == 1):
            return arguments
        added = Added(size, frozenset(rows))
        proofs = self._proofs(arguments, added)
        fewer = [x for n, x in proofs.items() if n < num and x is not None]
        # Programs for fewer rows serve just as many rows as they have, too.
        if size == num and not fewer:
            return arguments
        prove = partial(self._prove, arguments, added, num)
        proved = fewer[0] if fewer else from_cache(proofs, num, prove)
        if proved is None:  # the arguments may be wrong, so nothing follows for others
            return arguments
        known &= rows
        return arguments.with_rows(proved)

    @one_thread
    def proves(self, arguments: Arguments, block: Added) -> bool:
        """Whether the model treats rows one by one, in blocks of any number of rows. It
        is traced with the rows of one block and of two. A model whose plates draw
        subsamples is trusted, because its fit takes rows in any order.

        :param arguments: arguments of the model, not traced.
        :param block: the number of rows of a block.
        """
        two, num = block._replace(size=2 * block.size), block.size
        prove = partial(self._prove, arguments, two, num, blocks=True)
        proofs = self._proofs(arguments, two, blocks=True)
        return from_cache(proofs, num, prove) is not None

    def _proofs(
        self, arguments: Arguments, added: Added, *, blocks: bool = False
    ) -> dict[int, Added | None]:
        """Return what was proved, by the number of rows; parameters as for
        :meth:`_prove`."""
        shapes = tuple(
            (x.shape[1:] if i in added.which else x.shape, x.dtype)
            for i, x in enumerate(arguments.arrays)
        )
        key = shapes, arguments.static, added, blocks
        return from_cache(self._proved, key, dict)

    def clear(self) -> None:
        """Drop the proofs, for another model."""
        self._traced.clear()
        self._proved.clear()

    def _prove(
        self, arguments: Arguments, added: Added, num: int, *, blocks: bool = False
    ) -> Added | None:
        """Prove that rows are treated one by one, and have weights wherever data have
        them.

        :param arguments: arguments without added rows.
        :param added: the rows to add.
        :param num: the number of rows that it is compared with.
        :param blocks: see :func:`~numpyro_gpaug.model.rows.rows_independent`.
        :return: ``added``, with the axes of deterministic sites; ``None`` without a
            proof.
        """
        # Added rows have weights, in both programs. No rows are added to a block.
        few = arguments.with_rows(added._replace(size=num))
        more = arguments.with_rows(added)
        if blocks:
            few, more = few.counting_all(), more.counting_all()
        try:
            first = self._trace(few)
            other = from_cache(self._traced, more.shapes, lambda: self._trace(more))
            if first.latent != other.latent:
                return None
            if blocks and first.subsampled:
                return added
            if not rows_independent(first.jaxpr, other.jaxpr, blocks=blocks):
                return None
            if not all(_in_plates(x, other.sites[k]) for k, x in first.sites.items()):
                return None
            axes = [
                (name, len(shape) + axis)
                for name, shape in first.computed.items()
                for axis in _differing(shape, other.computed[name])
            ]
            return added._replace(axes=tuple(axes))
        # Errors of the model at another number of rows, and of shapes that do not fit.
        except (TypeError, ValueError, IndexError, KeyError):
            return None

    def _trace(self, arguments: Arguments) -> _Traced:
        """Return the trace of the model's likelihoods, and of the distributions of its
        latents."""
        sites: dict[str, _SiteShapes] = {}
        computed: dict[str, Shape] = {}
        latent: dict[str, list[Shape]] = {}
        subsampled: list[str] = []

        def parts(given: Arguments) -> list[Any]:
            trace = run_model(self._model, given, fixed_key(), {})
            for name, site in trace.items():
                drawn = site["type"] == "sample"
                if drawn and (site["is_observed"] or name in self._data):
                    shapes = site["fn"].batch_shape, site["fn"].event_shape
                    scale = getattr(site["scale"], "shape", ())
                    weighted = site["is_observed"] and given.static[-1] is not None
                    weights = scale if weighted else None
                    sites[name] = _SiteShapes(*shapes, weights)
                if site["type"] == "plate":
                    chosen = site.get("infer", {}).get("subsample_size")
                    if chosen not in (None, site["args"][0]):
                        subsampled.append(name)
                if site["type"] == "deterministic":
                    computed[name] = np.shape(site["value"])
                elif name not in sites and site["type"] in ("sample", "param"):
                    values = jax.tree.leaves(site["value"])
                    latent[name] = [np.shape(x) for x in values]
            return [part for site in trace.values() for part in _parts(site)]

        jaxpr = jaxpr_and_tree(*by_place(parts, arguments))[0]
        return _Traced(jaxpr, sites, latent, computed, bool(subsampled))


class _SiteShapes(NamedTuple):
    """Shapes of an observed site's distribution, and of its weights; ``None`` without
    weights."""

    batch: Shape
    event: Shape
    weights: Shape | None


class _Traced(NamedTuple):
    """The computation of a model: a closed jaxpr, and the shapes of its sites.

    :param sites: shapes of observed sites.
    :param latent: shapes of params and latents.
    :param computed: shapes of deterministic sites.
    :param subsampled: whether plates would draw some of their members.
    """

    jaxpr: Any
    sites: dict[str, _SiteShapes]
    latent: dict[str, list[Shape]]
    computed: dict[str, Shape]
    subsampled: bool


def padded_size(num: int, parts: int = 1, grain: int = _GRAIN) -> int:
    """Return the number of rows that programs are compiled for.

    :param num: the number of data.
    :param parts: the number of parts that rows are divided into.
    :param grain: the number of sizes between a power of two and the next.
    """
    step = 1
    if num <= _LEAST:
        step = _LEAST
    elif num <= _MAX_ROWS:
        step = 2 ** (num.bit_length() - 1) // grain
    step = math.lcm(step, parts)
    return -(-num // step) * step


def family_of(arguments: Arguments) -> Hashable:
    """Return the properties of arguments other than their number of rows.

    :param arguments: arguments without added rows.
    """
    shapes = tuple((x.ndim, x.shape[1:], x.dtype) for x in arguments.arrays)
    return shapes, arguments.static


def _with_rows(arguments: Arguments) -> set[int]:
    num = arguments.num_rows
    return {i for i, x in enumerate(arguments.arrays) if x.ndim and len(x) == num}


def _parts(site: dict[str, Any]) -> list[Any]:
    """Return the arrays of a site: its value, its distribution's, and its
    log-density."""
    parts, fn = [site["value"]], site.get("fn")
    if site["type"] == "sample" or isinstance(fn, Conditional):
        parts.append(fn)
    if site["type"] == "sample" and site["is_observed"]:
        parts.append(site["fn"].log_prob(site["value"]))
    leaves = jax.tree.leaves(parts)
    return [x for x in leaves if is_array(x) or isinstance(x, Array)]


def _in_plates(few: _SiteShapes, many: _SiteShapes) -> bool:
    """Whether a site has rows along its plates alone, where data have weights."""
    batch, event = _differing(few.batch, many.batch), _differing(few.event, many.event)
    if few.weights is None or many.weights is None:
        return not event
    return not event and batch == _differing(few.weights, many.weights)


def _differing(few: Shape, many: Shape) -> set[int]:
    """Return axes, counted from the last, whose sizes differ."""
    pairs = zip(reversed(few), reversed(many), strict=True)
    return {-1 - i for i, (a, b) in enumerate(pairs) if a != b}
