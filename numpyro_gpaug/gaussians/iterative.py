# SPDX-License-Identifier: Apache-2.0
r"""Gaussians with a sparse precision that fills up when it is factorised: crossed
effects with very many levels on both sides.

The layout is that of :mod:`~numpyro_gpaug.gaussians.sparse`: N nodes with precision M,
here standard normal a priori, and a dense border. Nodes that have no neighbour before
them (the levels of the largest grouping) are independent given all others, and are
eliminated. With their diagonal D, the diagonal C of the others, and B between them, the
Schur complement ``C - B' D^{-1} B`` (with further entries if there are three groupings
or more) is never formed. With its diagonal P it is ``P^{1/2} (I - X) P^{1/2}``. The
eigenvalues of ``I - X`` are close to one if levels cross at random. A few steps of
conjugate gradients then suffice, whatever the number of levels.

*Means* follow from conjugate gradients. *The log-determinant* is that of D and P plus
``tr log(I - X)``, by Lanczos quadrature: exact along a few vectors close to the largest
eigenvectors of X, and by vectors s of random signs in their complement. The trace of X
is zero, so ``s' X s`` is subtracted, which is most of the noise. *Covariances* are

.. math:: \mathrm{var}(z_i) = c_i + E u_i^2, \quad
    \mathrm{cov}(z_i, z_j) = - c_i M_{ij} c_j + E u_i u_j,

where i is eliminated and j is not. Here c are variances of the eliminated nodes given
all others, and of these given one another, and u are the conditional means of a draw
``x = P^{-1/2} (I - X)^{-1/2} s``: ``- D^{-1} B x`` and ``P^{-1/2} X P^{1/2} x``. Means
over draws are the only approximation.

The signs are the same in each evaluation, so that the bound is a smooth function of
hyperparameters. To first order its error is that of the log-determinant alone: the same
covariances are in the expected log-likelihood and in the divergence, whose derivatives
with respect to them cancel at the optimum.

References: Kuendig and Sigrist (2025), Iterative methods for generalized linear mixed
models with crossed random effects; Pandolfi, Papaspiliopoulos and Zanella (2025),
Conjugate gradient methods for high-dimensional GLMMs; Siden, Lindgren, Bolin and
Villani (2018), Efficient covariance approximations for large sparse precision matrices;
Meyer, Musco, Musco and Woodruff (2021), Hutch++: optimal stochastic trace estimation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import combinations
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax, random
from jax.experimental.sparse import BCSR

from numpyro_gpaug.gaussians.base import Structure
from numpyro_gpaug.gaussians.rows import Rows
from numpyro_gpaug.gaussians.sparse import NodeMoments, Sparse, SparseNatural
from numpyro_gpaug.math import linalg
from numpyro_gpaug.math.linalg import by_column, conjugate_gradients

# The number of draws that estimate covariances, and the largest number of vectors along
# which the log-determinant is exact.
DRAWS, EXACT = 32, 8
# The largest numbers of steps of conjugate gradients and of Lanczos recurrences, which
# are stored.
_STEPS, _LANCZOS = 500, 48
# The number of columns in one product; a product with fewer than eight takes longer.
_COLUMNS, _FEWEST = 64, 8


class _IterativeMoments(NamedTuple):
    mean: Array
    entries: Array
    cross: Array
    whitener: Array
    draws: Array
    moved: Array
    near: Array
    of_nodes: Array
    noise: Array
    structure: Iterative


class IterativeMoments(_IterativeMoments, NodeMoments):
    """Moments of a Gaussian whose precision is not factorised.

    :param draws: draws of the nodes, zero for those that are eliminated, (1, N, draws).
    :param moved: their conditional means u, (1, N, draws).
    :param near: covariances of neighbours given the border, (1, nnz).
    :param of_nodes: the log-determinant of the precision of the nodes, (1,).
    :param noise: the standard error of half of it, in nats, (1,).
    """

    @property
    def log_det(self) -> Array:
        """The log-determinant of the covariance, (1,)."""
        corner = jnp.log(jnp.abs(linalg.diagonal(self.whitener))).sum(-1)
        return 2 * corner - self.of_nodes

    @property
    def neighbours(self) -> Array:
        return self.near[0]

    @property
    def given_border(self) -> _Reduced:
        return _Reduced.of(self.structure, self.entries[0])

    def spreads(self, rows: Rows) -> Array:
        """Return the variances of predictors, (n,)."""
        value, place = rows.value, rows.place
        own = self.near[0][self.structure.pattern.diagonal]
        found = (jnp.square(value) * own[place]).sum(-1)
        for s, t in combinations(range(value.shape[-1]), 2):
            both = self._covariances(place[:, s], place[:, t])
            found += 2 * value[:, s] * value[:, t] * both
        return jnp.maximum(found, 0) + jnp.square(self.of_border(rows)).sum(-1)

    def _covariances(self, one: Array, other: Array) -> Array:
        """Return the covariances of pairs of nodes, given the border, (n,)."""
        found = self.structure.pattern.places(one, other)
        near = self.near[0].at[found].get(mode="fill", fill_value=0)
        apart = found == len(self.near[0])

        def estimated() -> Array:
            shared = _shared(self.draws[0], self.moved[0], one, other)
            return jnp.where(apart, shared, near)

        return lax.cond(apart.any(), estimated, lambda: near)

    def solve(self, b: Array) -> Array:
        """Return the product of the covariance with vectors (..., N + K)."""
        own, corner = self.structure.columns(b.reshape(-1, self.structure.size).T)
        rest = self.whitener[0] @ corner - linalg.sum_of_products(self.cross[0], own)
        found = self.given_border.solve(own) - self.cross[0] @ rest
        return jnp.concatenate([found, self.whitener[0].T @ rest]).T.reshape(b.shape)


def _shared(draws: Array, moved: Array, one: Any, other: Any) -> Array:
    """Return the estimated parts of covariances of pairs of nodes, (n,)."""
    (x, u), (y, v) = ((draws[k], moved[k]) for k in (one, other))
    # Draws of eliminated nodes are zero.
    kept = (x != 0).any(-1) & (y != 0).any(-1)
    return jnp.where(kept, (u * y + x * v).sum(-1) / 2, (u * v).sum(-1))


class _Block(NamedTuple):
    """A block of the precision, by rows.

    :param places: places of its entries in the precision, (k,).
    :param columns: their columns.
    :param starts: the place of the first entry of each row, and k.
    :param shape: numbers of rows and columns.
    """

    places: np.ndarray
    columns: np.ndarray
    starts: np.ndarray
    shape: tuple[int, int]

    @classmethod
    def of(cls, places: Any, rows: Any, columns: Any, shape: tuple[int, int]) -> _Block:
        order = np.lexsort((columns, rows))
        starts = np.append(0, np.cumsum(np.bincount(rows, minlength=shape[0])))
        found = places[order], columns[order], starts
        places, columns, starts = (x.astype(np.int32) for x in found)
        return cls(places, columns, starts, shape)

    def __call__(self, entries: Array, x: Array) -> Array:
        """Return the product with columns (n, c), given all entries of the precision
        or a function of them."""

        def product(values: Array, x: Array) -> Array:
            wide = jnp.pad(x, [(0, 0), (0, max(0, _FEWEST - x.shape[1]))])
            rows: Any = values, self.columns, self.starts
            found: Array = BCSR(rows, shape=self.shape) @ wide
            return found[:, : x.shape[1]]

        return _by_columns(product)(entries[self.places], x)


class _Blocks(NamedTuple):
    """The blocks of the precision that are not diagonal.

    :param down: the entries of other nodes with eliminated ones, (R, I).
    :param up: its transpose.
    :param among: the entries of other nodes with one another; ``None`` if there are
        none.
    """

    down: _Block
    up: _Block
    among: _Block | None


def _by_columns(function: Callable[[Array, Array], Array]) -> Any:
    """Return a function of values and of columns (n, c). Under ``vmap`` it takes all
    columns together, and several sets of values one after the other: JAX has no fast
    product of several sparse matrices, and vectors of many draws at once would not fit
    into memory."""
    single = jax.custom_batching.custom_vmap(function)

    @single.def_vmap
    def _(size: int, batched: Any, values: Array, x: Array) -> Any:
        if batched[0]:
            x = x if batched[1] else jnp.broadcast_to(x, (size, *x.shape))
            return lax.map(lambda both: single(*both), (values, x)), True
        found = single(values, jnp.moveaxis(x, 0, 1).reshape(x.shape[1], -1))
        return jnp.moveaxis(found.reshape(len(found), size, -1), 1, 0), True

    return single


class _Reduced(NamedTuple):
    """The precision of nodes after an elimination.

    :param structure: the structure of the latents.
    :param entries: the precision of the nodes, (nnz,).
    :param own: the diagonal of the eliminated nodes, (I, 1).
    :param rest: the diagonal of the others, (R, 1).
    :param root: ``P^{-1/2}``, (R, 1).
    """

    structure: Iterative
    entries: Array
    own: Array
    rest: Array
    root: Array

    @classmethod
    def of(cls, structure: Iterative, entries: Array) -> _Reduced:
        own, rest = structure.parted(entries[structure.pattern.diagonal][:, None])
        left = rest - structure.blocks.down(jnp.square(entries), 1 / own)
        return cls(structure, entries, own, rest, 1 / jnp.sqrt(left))

    @property
    def tolerance(self) -> float:
        """The relative residual that ends recurrences."""
        return float(jnp.finfo(self.entries.dtype).eps) ** 0.85

    def __call__(self, y: Array) -> Array:
        """Return ``(I - X) y``, (R, c)."""
        x, (down, up, among) = self.root * y, self.structure.blocks
        found = self.rest * x - down(self.entries, up(self.entries, x) / self.own)
        if among is not None:
            found = found + among(self.entries, x)
        return self.root * found

    def _reduced(self, b: Array) -> tuple[Array, Array]:
        """Return columns (N, c) of eliminated nodes, and ``P^{-1/2}`` times the columns
        of the others minus the contribution of the eliminated."""
        own, rest = self.structure.parted(b)
        moved = self.structure.blocks.down(self.entries, own / self.own)
        return own, self.root * (rest - moved)

    def _completed(self, own: Array, y: Array) -> Array:
        """Return columns of all nodes (N, c) from ``P^{1/2}`` times the nodes that are
        not eliminated.

        :param own: the right-hand side of the eliminated nodes.
        """
        x = self.root * y
        own = (own - self.structure.blocks.up(self.entries, x)) / self.own
        return self.structure.nodal(own, x)

    def solve(self, b: Array) -> Array:
        """Return the solution (N, c)."""
        return self.solved(b)[0]

    def solved(self, b: Array) -> tuple[Array, Array]:
        """Return the solution (N, c) by conjugate gradients, and the squares of the
        residuals (c,), relative to ``I - X``."""
        own, b = self._reduced(b)
        y, left = conjugate_gradients(
            self.__call__, b, inner=by_column, tolerance=self.tolerance, most=_STEPS
        )
        return self._completed(own, y), left

    def power(self, exponent: float, y: Array) -> Array:
        """Return ``(I - X)^exponent y``, (R, c)."""

        def found(entries: Array, y: Array) -> Array:
            return _Reduced.of(self.structure, entries)._power(exponent, y)

        return _by_columns(found)(self.entries, y)

    def _power(self, exponent: float, y: Array) -> Array:
        """Return :meth:`power`, a few columns at a time."""
        count = -(-y.shape[1] // _COLUMNS)
        if count <= 1:
            return _Lanczos.of(self, y).applied(lambda x: x**exponent)
        wide = jnp.pad(y, [(0, 0), (0, count * _COLUMNS - y.shape[1])])
        cut = jnp.moveaxis(wide.reshape(len(y), count, _COLUMNS), 1, 0)
        found = lax.map(partial(self._power, exponent), cut)
        return jnp.moveaxis(found, 0, 1).reshape(len(y), -1)[:, : y.shape[1]]

    def half(self, b: Array) -> Array:
        """Return rows (N, c) whose squares sum to variances, of columns (N, c)."""
        own, rest = self._reduced(b)
        return self.structure.nodal(own / jnp.sqrt(self.own), self.power(-0.5, rest))

    def drawn(self, noise: Array) -> Array:
        """Return deviations (N, c) of standard normal noise."""
        own, rest = self.structure.parted(noise)
        return self._completed(own * jnp.sqrt(self.own), self.power(-0.5, rest))

    def noise_of(self, x: Array) -> Array:
        """Return the noise of deviations (N, c)."""
        own, rest = self.structure.parted(x)
        own = own + self.structure.blocks.up(self.entries, rest) / self.own
        y = self.power(0.5, rest / self.root)
        return self.structure.nodal(own * jnp.sqrt(self.own), y)

    def largest(self) -> Array:
        """Return orthonormal columns near the largest eigenvectors of X, (R, q): the
        direction in which all levels of a side move together is one."""
        size = len(self.root)
        found = random.normal(random.key(1), (size, min(EXACT, size)), self.root.dtype)
        found = _orthonormal(found.at[:, :1].set(1 / self.root))
        for _ in range(2):
            found = _orthonormal(found - self(found))
        return found


def _orthonormal(columns: Array) -> Array:
    """Return orthonormal columns of the same span, and zeros if they are dependent."""
    info = jnp.finfo(columns.dtype)
    for _ in range(2):
        gram = columns.T @ columns
        ridge = info.eps * jnp.trace(gram) + info.tiny
        whitener = linalg.inverse_cholesky(gram + ridge * jnp.eye(len(gram)))
        columns = columns @ whitener.T
    return columns


class _Lanczos(NamedTuple):
    """Krylov spaces of ``I - X``, one for each column.

    :param basis: orthonormal vectors, (steps, R, c).
    :param steps: the number of them that are set.
    :param values: eigenvalues of the tridiagonal matrices, (c, steps).
    :param vectors: eigenvectors, (c, steps, steps).
    :param norms: norms of the columns, (c,).
    :param residuals: relative residuals of the linear systems, (c,).
    """

    basis: Array
    steps: Array
    values: Array
    vectors: Array
    norms: Array
    residuals: Array

    @classmethod
    def of(cls, reduced: _Reduced, columns: Array) -> _Lanczos:
        """Return the Krylov spaces of columns (R, c)."""
        most, (size, number) = _LANCZOS, columns.shape
        norms = jnp.linalg.norm(columns, axis=0)
        first = columns / jnp.where(norms > 0, norms, 1)
        zeros = jnp.zeros((most, number), columns.dtype)

        def going(carry: Any) -> Array:
            step, residual = carry[0], carry[-1]
            return (step < most) & (residual > reduced.tolerance).any()

        def further(carry: Any) -> Any:
            step, basis, diagonal, beside, v, last, pivot, residual = carry
            before = beside[step - 1]
            w = reduced(v) - before * last
            # After a space is exhausted, the matrix continues as the identity.
            here = (v * w).sum(0) + (jnp.square(v).sum(0) == 0)
            w = w - here * v
            after = jnp.linalg.norm(w, axis=0)
            pivot = here - jnp.square(before) / pivot
            pivot = jnp.where(pivot > 0, pivot, jnp.nan)
            return (
                step + 1, basis.at[step].set(v), diagonal.at[step].set(here),
                beside.at[step].set(after), w / jnp.where(after > 0, after, 1), v,
                pivot, residual * after / pivot,
            )  # fmt: skip

        ones = jnp.ones_like(norms)
        basis = jnp.zeros((most, size, number), columns.dtype)
        start = jnp.int32(0), basis, zeros + 1, zeros, first, 0 * first, ones, ones
        steps, basis, diagonal, beside, _, _, pivot, residuals = lax.while_loop(
            going, further, start
        )
        beside = jnp.where(np.arange(most)[:, None] < steps - 1, beside, 0)[:-1]
        matrix = jax.vmap(lambda d, b: jnp.diag(d) + jnp.diag(b, 1) + jnp.diag(b, -1))
        whole = matrix(diagonal.T + 0 * pivot[:, None], beside.T)
        return cls(basis, steps, *linalg.eigh(whole), norms, residuals)

    def applied(self, function: Callable[[Array], Array]) -> Array:
        """Return a function of ``I - X`` times the columns, (R, c)."""
        weights = function(self.values) * self.vectors[:, 0]
        weights = (self.vectors * weights[:, None]).sum(-1) * self.norms[:, None]

        def added(step: Any, total: Array) -> Array:
            return total + self.basis[step] * weights[:, step]

        return lax.fori_loop(0, self.steps, added, jnp.zeros_like(self.basis[0]))

    def forms(self, function: Callable[[Array], Array]) -> Array:
        """Return the quadratic forms of columns in a function of ``I - X``, (c,)."""
        terms = function(self.values) * jnp.square(self.vectors[:, 0])
        return jnp.square(self.norms) * terms.sum(-1)


@dataclass(frozen=True)
class Iterative(Sparse):
    """Standard normal nodes whose posterior precision is too costly to factorise, and
    latents that any predictor may depend on."""

    any_pairs: ClassVar[bool] = True
    factorised: ClassVar[bool] = False
    solves: ClassVar[bool] = False
    # Nodes are standard normal a priori, so no rows almost cancel.
    sums: ClassVar[bool] = False
    independent = Structure.independent

    @cached_property
    def _eliminated(self) -> np.ndarray:
        """Whether each node has no neighbour before it, (N,)."""
        return np.diff(self.pattern.starts) == 1

    def parted(self, x: Array) -> tuple[Array, Array]:
        """Split numbers of nodes (N, c) into numbers of eliminated nodes and of
        others."""
        return x[np.flatnonzero(self._eliminated)], x[np.flatnonzero(~self._eliminated)]

    def nodal(self, own: Array, rest: Array) -> Array:
        """Join what :meth:`parted` returns."""
        order = np.argsort(~self._eliminated, kind="stable")
        return jnp.concatenate([own, rest])[np.argsort(order)]

    @cached_property
    def blocks(self) -> _Blocks:
        """The precision in blocks."""
        pattern, first = self.pattern, self._eliminated
        rank = np.where(first, np.cumsum(first), np.cumsum(~first)) - 1
        places = np.flatnonzero(pattern.rows != pattern.columns)
        row, column = pattern.rows[places], pattern.columns[places]
        # The later of two neighbours is never eliminated.
        down, shape = first[column], (int((~first).sum()), int(first.sum()))
        ends = places[down], rank[row[down]], rank[column[down]]
        up = ends[0], ends[2], ends[1]
        rows, columns = rank[row[~down]], rank[column[~down]]
        both = np.append(rows, columns), np.append(columns, rows)
        among = _Block.of(np.tile(places[~down], 2), *both, (shape[0], shape[0]))
        found = _Block.of(*ends, shape), _Block.of(*up, shape[::-1])
        return _Blocks(*found, among if len(rows) else None)

    def cost(self, rows: int, width: int) -> float:
        each = 40.0 * len(self.pattern.rows) + float(rows)
        return each * (DRAWS + EXACT + self.layout.others)

    def describe(self, names: str, block: int) -> str:
        return f"iterative: {super().describe(names, block)}"

    def values(self, entries: Array) -> Array:
        return entries

    def product(self, entries: Array, x: Array) -> Array:
        own, rest = self.parted(x)
        diagonal = self.parted(entries[self.pattern.diagonal][:, None])
        down, up, among = self.blocks
        moved = diagonal[1] * rest + down(entries, own)
        if among is not None:
            moved = moved + among(entries, rest)
        return self.nodal(diagonal[0] * own + up(entries, rest), moved)

    def product_of_prior(self, entries: Array, x: Array) -> Array:
        return x

    @linalg.precise
    def moments(self, natural: SparseNatural) -> IterativeMoments:
        entries, border = natural.entries[0], natural.border[0]
        reduced, pattern = _Reduced.of(self, entries), self.pattern
        own, corner = self.columns(natural.potential[0])
        columns = jnp.concatenate([own[:, None], border], -1)
        solved, left = reduced.solved(columns)
        first, gains = solved[:, 0], solved[:, 1:]
        # A level takes part in all levels of a side, and little of it remains.
        explained = linalg.sum_of_products(border, solved)
        whitener = linalg.inverse_cholesky(natural.corner - explained[None, :, 1:])
        rest = whitener[0] @ (corner - explained[:, 0]) @ whitener[0]
        mean = jnp.concatenate([first - gains @ rest, rest])

        largest, dtype = reduced.largest(), entries.dtype
        signs = random.rademacher(random.key(0), (len(reduced.root), DRAWS), dtype)
        signs = signs - largest @ (largest.T @ signs)
        spaces = _Lanczos.of(reduced, jnp.concatenate([largest, signs], 1))
        # The trace of X is zero.
        forms = spaces.forms(lambda x: jnp.log(x) + (1 - x))
        forms, each = jnp.split(forms, [largest.shape[1]])
        of_nodes = jnp.log(reduced.own).sum() - 2 * jnp.log(reduced.root).sum()
        of_nodes += forms.sum() + each.mean()
        noise = each.std(ddof=1) / (2 * DRAWS**0.5)
        # The error of the quadrature if it has not converged.
        noise += jnp.square(spaces.residuals).max() * len(reduced.root) / 2
        # The bound that is lost if the mean has not converged.
        noise += left[0] / (2 * spaces.values.min())

        # The exact vectors are not random: each has the weight of all draws together.
        weights = np.repeat([1, DRAWS**-0.5], [largest.shape[1], DRAWS])
        white = spaces.applied(lax.rsqrt) * weights.astype(dtype)
        x, moved = reduced.root * white, reduced.root * (white - reduced(white))
        moved = self.nodal(-self.blocks.up(entries, x) / reduced.own, moved)
        draws = self.nodal(jnp.zeros((len(reduced.own), len(weights)), dtype), x)
        given = self.nodal(1 / reduced.own, jnp.square(reduced.root))[:, 0]
        local = -entries * given[pattern.rows] * given[pattern.columns]
        local = jnp.where(self._eliminated[pattern.columns], local, 0)
        ends = pattern.rows, pattern.columns
        if self.blocks.among is None:
            shared = (moved[ends[0]] * moved[ends[1]]).sum(-1)
        else:
            shared = _shared(draws, moved, *ends)
        variances = given + jnp.square(moved).sum(-1)
        near = (local + shared).at[pattern.diagonal].set(variances)
        arrays = (
            mean, entries, gains @ whitener[0].T, whitener[0], draws, moved, near,
            of_nodes, noise,
        )  # fmt: skip
        leading: Any = (x[None] for x in arrays)
        return IterativeMoments._make((*leading, self))


# Natural parameters and moments contain their structure, which has no arrays.
jax.tree_util.register_static(Iterative)
