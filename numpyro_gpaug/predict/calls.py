# SPDX-License-Identifier: Apache-2.0
"""Calls of compiled predictions on any number of rows, in blocks of one shape."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax import Array

from numpyro_gpaug.errors import CholeskyError
from numpyro_gpaug.math.arrays import is_traced, nan_unless
from numpyro_gpaug.model.arguments import Arguments
from numpyro_gpaug.model.calls import check_count
from numpyro_gpaug.model.costs import MAX_DENSE
from numpyro_gpaug.predict.added_rows import PartsDifferError, without_added
from numpyro_gpaug.predict.arguments import FitArguments, joined_rows
from numpyro_gpaug.predict.mixture import Fitted
from numpyro_gpaug.predict.predictor import Predictor, Prepared, Query

SMALL_BATCH = 128


@dataclass(eq=False)
class Calls:
    """Calls of a predictor for one fit; the factors that the first call prepares are
    passed to later ones.

    :param predictor: the model, and the posterior of function values by its guide.
    :param fitted: the fitted quantities.
    :param arguments: the description of the arguments of the fit.
    :param marks: a checksum of the factors of jointly Gaussian latents of the fit.
    """

    _predictor: Predictor
    _fitted: Fitted
    _arguments: FitArguments
    _marks: dict[str, Array]
    _prepared: Prepared | None = None

    def unobserved(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Arguments, frozenset[int]]:
        """Return the model's arguments at new inputs, without observations, and the
        arrays among them that have one row per observation.

        :param args: positional arguments as passed.
        :param kwargs: keyword arguments as passed.
        """
        model = self._predictor.model
        absent = self._arguments.without_observations(model, len(args))
        return self.joined(args, {**absent, **kwargs})

    def joined(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Arguments, frozenset[int]]:
        """Return the model's arguments, observations included, as
        :meth:`.FitArguments.joined`.

        :raises NotConjugateError: if they change the prior of inducing values.
        """

        def weighing(arguments: Arguments) -> tuple[str, ...] | None:
            return self._predictor.weighing(arguments, self._fitted)

        predictor, structure = self._predictor, self._predictor.structure
        called = self._arguments.joined(predictor.model, args, kwargs, weighing)
        arguments, _ = called
        # One array has the rows, and the posterior keeps everything else.
        several = len(jax.tree.leaves((args, kwargs))) > 1
        needed = not structure.joint and (several or structure.indexed)
        if needed and not is_traced(arguments):
            with self._naming(arguments):
                predictor.check(arguments, self._fitted, self._marks, "")
        return called

    def __call__(self, query: Query, arguments: Arguments) -> Any:
        """Predict all rows at once, with added rows if numbers of rows may share
        programs.

        :param query: the kind of prediction.
        :param arguments: the model's arguments.
        """
        padded = self._predictor.padded(query.what, arguments)
        if padded is not arguments:
            try:
                _, few = self._predictor.fewer(query, arguments, padded, self._fitted)
                more = {"unpadded": few[0].shape[1:]} if query.what == "draws" else {}
                found = self._at_once(query.given(**more), padded)
                found = without_added(found, few, arguments.num_rows)
            except PartsDifferError:
                pass
            except (TypeError, ValueError):
                # The error of the arguments without added rows has the right sizes.
                self._at_once(query, arguments)
                raise
            else:
                return self._explained(found, arguments)
        return self.exactly(query, arguments)

    def exactly(self, query: Query, arguments: Arguments) -> Any:
        """Predict all rows at once, without added rows, which would belong to no group,
        or be part of an average; parameters as for a call."""
        return self._explained(self._at_once(query, arguments), arguments)

    def _explained(self, answer: Any, arguments: Arguments) -> Any:
        """Return an answer. If it has NaN, run the model with known arguments, which
        raises for points outside of a mesh."""
        if not is_traced(arguments) and _has_nan(answer):
            self._predictor.run(arguments, self._fitted)
        return answer

    def _at_once(self, query: Query, arguments: Arguments) -> Any:
        """Predict these rows."""
        given = arguments, self._fitted, self._marks, query.site
        with self._naming(arguments):
            if self._predictor.structure.joint and not is_traced(arguments):
                query = query.given(grouped=self._predictor.check(*given))
            answer, prepared = self._predictor(
                query, arguments, self._fitted, self._prepared
            )
        # Inside a transformation of the caller, the result is not kept. If several
        # threads are the first, they compute the same values, and one is kept.
        if not is_traced(arguments):
            self._prepared = prepared
            return answer
        return nan_unless(self._predictor.valid(*given), answer)

    def averages(
        self, arguments: Arguments, site: str, key: Array, num: int, of: Any, rows: Any
    ) -> Array:
        """Average over rows within joint draws; the first axis runs over draws, those
        of a member of a mixture together.

        :param arguments: the model's arguments.
        :param site: the observed site.
        :param key: random key.
        :param num: number of draws; with a mixture at least so many.
        :param of: a function of the likelihood; ``None`` for its mean.
        :param rows: groups and weights of the rows.
        """
        # Each member has complete pairs with opposite noise.
        each = 2 * -(-num // (2 * (self._fitted.size or 1)))
        how = {"key": key, "num": each, "of": of, "rows": rows}
        return self.exactly(Query("average", site, how), arguments)

    def draws(self, arguments: Arguments, site: str, key: Array, num: int) -> Array:
        """Draw function values jointly; the first axis runs over draws.

        :param arguments: the model's arguments.
        :param site: the process.
        :param key: random key.
        :param num: number of draws.
        :raises CholeskyError: if the covariance does not factorise.
        """
        query = Query("draws", site, {"key": key, "num": num})
        draws, factorised = self(query, arguments)
        if not factorised:
            raise CholeskyError(
                f"the posterior covariance of {draws.shape[1]} new inputs did not "
                "factorise. Are there duplicate rows?"
            )
        return draws

    def stream(
        self, query: Query, called: tuple[Arguments, frozenset[int]], batch_size: int
    ) -> Any:
        """Predict blocks of rows, the last one padded, and join them.

        :param query: the kind of prediction.
        :param called: arguments, and the arrays that have one row per observation.
        :param batch_size: rows of a block.
        """
        check_count("batch_size", batch_size)
        arguments, which = called
        rows = next((len(arguments.arrays[i]) for i in which), 0)
        size = min(batch_size, SMALL_BATCH)
        if rows > SMALL_BATCH:
            size = self._predictor.rows_of_block(batch_size, rows)
        joint = self._predictor.structure.joint
        # Rows may be members of a latent, which must not be repeated. Rows on several
        # devices stay there. If the number of rows is an argument, it may be the size
        # of a plate.
        at_once = (
            is_traced(arguments)
            or rows in (0, size)
            or rows in [x for _, x in arguments.static[1]]
            or (joint and rows <= MAX_DENSE)
            or (arguments.mesh is not None)
        )
        proved = at_once or self._predictor.rows_independent(*called, size)
        # Rows that depend on one another are no block of others.
        if at_once or (rows <= MAX_DENSE and not proved):
            predicted = self if joint else self.exactly
            return predicted(query, arguments)
        found = self._in_blocks(query, called, rows, size)
        if not proved:
            # In another number, on which the model may depend, too.
            chosen = np.linspace(0, rows - 1, size // 2 + 1).astype(int)
            mixed = self._at_once(query, arguments.taken(which, chosen))
            _check_mixed(found, mixed, chosen, size)
        return self._explained(found, arguments)

    def _in_blocks(
        self,
        query: Query,
        called: tuple[Arguments, frozenset[int]],
        rows: int,
        size: int,
    ) -> Any:
        """Predict blocks of rows, the last one filled up with the last row, and join
        them.

        :param rows: the number of rows.
        :param size: rows of a block; the others are those of :meth:`stream`.
        """
        arguments, which = called
        starts = np.arange(0, rows, size)
        chosen = np.minimum(starts[:, None] + np.arange(size), rows - 1)
        blocks = [arguments.taken(which, here) for here in chosen]
        # The structure of the answer (a distribution contains its batch shape) is
        # traced for the first number of rows, and derived from it for others.
        with self._naming(arguments):
            given = query, arguments, blocks[0], self._fitted
            known, like = self._predictor.fewer(*given)
        found: list[Any] = []
        try:
            found += [self._at_once(query, x) for x in blocks]
            if known != rows:
                like = without_added(like, found[0], rows)
            return _joined(like, found)
        except (TypeError, ValueError):
            # An error has the shapes that the user passed.
            with self._naming(arguments):
                whole = self._predictor.shapes_of(query, arguments, self._fitted)
            if not found:
                raise
            return _joined(whole, found)

    @contextmanager
    def _naming(self, arguments: Arguments) -> Iterator[None]:
        """Add a note to an error of the model about arguments that may be missing. This
        is not checked before, because a model may not need them."""
        try:
            yield
        except (TypeError, ValueError) as error:
            missed = self._arguments.not_passed(self._predictor.model, arguments)
            if missed:
                error.add_note(
                    f"The model ran at new inputs without {', '.join(missed)}, which "
                    "had a row per datum at the fit. Pass it for the new rows too, as "
                    f"in predict_y(X_new, {missed[0]}=...)"
                )
            raise


def _check_mixed(
    whole: Any, mixed: Any, chosen: np.ndarray[Any, Any], size: int
) -> None:
    """Raise if rows have another prediction beside rows from everywhere than in blocks
    of neighbours.

    :param whole: the prediction of all rows.
    :param mixed: the prediction of some rows.
    :param chosen: their indices.
    :param size: the rows of a block.
    """
    for all_rows, few in zip(*map(jax.tree.leaves, (whole, mixed)), strict=True):
        sizes = zip(all_rows.shape, few.shape, strict=True)
        axis = next((i for i, (n, m) in enumerate(sizes) if n != m), None)
        if axis is None:
            continue
        same = np.take(np.asarray(all_rows), chosen, axis)
        rounding = 1e-3 * np.nanmax(np.abs(same), initial=0)
        if not np.allclose(same, few, rtol=0, atol=rounding, equal_nan=True):
            raise ValueError(
                "the model computes with all its rows (a mean, an order, their "
                f"number), so its predictions in blocks of {size} rows are wrong. Pass "
                f"batch_size={all_rows.shape[axis]} to predict all rows at once, or "
                "pass such quantities to the model as arguments"
            )


def _joined(whole: Any, blocks: list[Any]) -> Any:
    """Join predictions of blocks.

    :param whole: the shapes of the prediction at all rows.
    :param blocks: predictions of blocks of rows.
    """
    leaves, treedef = jax.tree.flatten(whole)
    parts = zip(*map(jax.tree.leaves, blocks), strict=True)
    pairs = zip(leaves, parts, strict=True)
    return jax.tree.unflatten(treedef, [joined_rows(x.shape, [*y]) for x, y in pairs])


def _has_nan(tree: Any) -> bool:
    """Whether arrays that this process can read contain NaN."""
    return any(
        jax.dtypes.issubdtype(x.dtype, np.floating) and bool(np.isnan(x).any())
        for x in jax.tree.leaves(tree)
        if getattr(x, "is_fully_addressable", True)
    )
