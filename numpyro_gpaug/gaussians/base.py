# SPDX-License-Identifier: Apache-2.0
r"""The contract of a structure of Gaussians, and the factors that all of them take.

The likelihood depends on latents ``z`` through predictors that are affine in them. One
Gaussian factor on each predictor stands for the likelihood,

.. math:: \exp(h\, p - w\, p^2 / 2),

and the closed-form update is: natural parameters = those of the prior + the information
of the factors. Each structure of the precision matrix is one file, with these parts.
Arrays have a leading axis over independent sets of latents; its length is 1, but for
dense Gaussians.

A :class:`Structure` is static: the layout of latents, costs, and how the rest is made.

*Natural parameters* are a named tuple of arrays: ``potential`` (latents, M), and the
precision, as the structure lays it out. They are added. They have

- ``moments()``, which is NaN where the precision is not positive definite;
- a ``centre``, (latents, M), from which latents deviate as the potential says: means
  are then not rounded like sums over rows. ``centred(centre)`` moves it to the means.
  If it is ``None``, there is ``moved(z)``: natural parameters of latents, given those
  of deviations from ``z``;
- ``changed(change)``, if the structure ``changes``: information about latents, given
  it about their :class:`Change`;
- ``diagonal``, of the precision, (latents, M);
- perhaps ``inflation(variances)``, the errors of variances relative to rounding, if
  these are smaller than the variances times the diagonal.

If natural parameters contain their structure, as a field ``structure`` without arrays,
so do moments.

*Moments* are a named tuple of ``mean`` (latents, M) and factors of the covariance ``W'
W``. They have

- ``log_det`` of the covariance, (latents,), and ``variances``, (latents, M);
- ``unwhiten(noise)``: deviations ``W' noise`` from the mean, for standard normal
  ``noise`` (..., latents, rank), and ``rank``, which is M, more if extended, or less if
  latents fulfil constraints;
- ``whiten(deviation)``, its inverse;
- ``solve(b)``, the covariance times (..., latents, M), unless ``unwhiten`` is linear;
- ``push_forward(projection)``: for A (latents, M, n), ``A' mean``, and rows in several
  parts (latents, r, n), whose squares sum to the variances of ``A' z``;
- ``extended(prior, places)``: moments of the latents of another prior, which are
  ``places`` among the known ones, or new (-1), and then distributed as in the prior
  given the known ones.

A *prior* is a :class:`StructurePrior`. A *map* takes latents to predictors, see
:class:`~numpyro_gpaug.gaussians.dense.AffineMap` and
:class:`~numpyro_gpaug.gaussians.rows.RowMap`.
:func:`numpyro_gpaug.testing.check_structure` compares all of it with dense matrices.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, NamedTuple, Protocol, Self

import jax
import jax.numpy as jnp
from jax import Array

from numpyro_gpaug.math import linalg


class Marginals(NamedTuple):
    """Means and variances of predictors, (latents, n)."""

    mean: Array
    variance: Array


class GaussianFactors(NamedTuple):
    """Gaussian factors ``exp(h p - w p^2 / 2)`` on predictors, one per datum.

    :param potential: h, (latents, n).
    :param precision: w, (latents, n).
    """

    potential: Array
    precision: Array


def gaussian_factors(
    at: Marginals, slopes: Marginals, least_precision: float = -jnp.inf
) -> GaussianFactors:
    """Return the factors that make the conjugate update a natural-gradient step. With E
    the expected log-likelihood of a datum they are ``w = -2 dE/dv`` and ``h = dE/dm + w
    m``.

    :param at: marginals of the predictors.
    :param slopes: derivatives of the expected log-likelihood in mean and variance.
    :param least_precision: the lower bound of the precisions. Factors of log-concave
        likelihoods have positive precisions; factors of others may not. Raising these
        to zero keeps every step positive definite, but moves the fixed point away from
        the maximum of the bound. A caller that rejects steps that lower the bound needs
        no floor.
    """
    precision = jnp.maximum(-2 * slopes.variance, least_precision)
    return GaussianFactors(slopes.mean + precision * at.mean, precision)


class Layout(NamedTuple):
    """The arrangement of latents: groups of them first, all others after these.

    :param groups: number of groups, G. If they are the steps of chains, it counts the
        steps of all chains, which follow one another.
    :param each: latents of each group, R.
    :param others: all other latents, K.
    :param steps: number of steps of each chain.
    """

    groups: int
    each: int
    others: int
    steps: int = 1

    @property
    def size(self) -> int:
        """Number of latents."""
        return self.groups * self.each + self.others

    def split(self, flat: Any) -> tuple[Any, Any]:
        """Split numbers (..., size) into numbers of groups, (..., G, R), and all
        others."""
        cut = self.groups * self.each
        shape = *flat.shape[:-1], self.groups, self.each
        return flat[..., :cut].reshape(shape), flat[..., cut:]

    def joined(self, groups: Array, others: Array) -> Array:
        """Join the two parts that :meth:`split` returns."""
        flat = groups.reshape(*groups.shape[:-2], self.groups * self.each)
        return jnp.concatenate([flat, others], -1)


@dataclass(frozen=True)
class Structure(ABC):
    """The structure of a precision matrix: static and hashable.

    :param layout: the layout of the latents.
    """

    layout: Layout

    #: Class of the natural parameters.
    natural: ClassVar[Any]
    #: Whether a predictor may depend on any latents: the map is then one matrix.
    any_rows: ClassVar[bool] = False
    #: Whether the first latents are those of all groupings, or those of the first
    #: alone.
    all_groupings: ClassVar[bool] = False
    #: Whether moments contain exact factors of the covariance.
    factorised: ClassVar[bool] = True
    #: Whether a solve with a known factor takes much less time than the factor.
    solves: ClassVar[bool] = False
    #: Whether natural parameters can be those of other latents.
    changes: ClassVar[bool] = True

    @property
    def size(self) -> int:
        """Number of latents."""
        return self.layout.size

    @property
    def record(self) -> tuple[str, ...]:
        """The strings that a file stores about the structure, besides its name."""
        return ()

    @classmethod
    def of_record(cls, record: tuple[str, ...]) -> Self:
        """Return the structure of a file, for any numbers of latents."""
        return cls(Layout(0, 0, 0))

    @property
    def rank(self) -> int:
        """Number of standard normal numbers that the latents are made of."""
        return self.size

    @classmethod
    def param_names(cls) -> tuple[str, ...]:
        """Return the names of the arrays of natural parameters, in their order as
        leaves."""
        return tuple(name for name in cls.natural._fields if name != "structure")

    def resized(self, layout: Layout) -> Self:
        """Return this structure for other numbers of latents."""
        return replace(self, layout=layout)

    @property
    def largest_matrix(self) -> int:
        """Rows of the largest dense matrix that is factorised."""
        return self.layout.others

    def variances(self, q: Any, rows: Any, over_rows: Callable[..., Array]) -> Array:
        """Return the variances of predictors, (n,), for maps of rows.

        :param q: the moments.
        :param rows: all rows.
        :param over_rows: applies a function to the rows, in blocks if they are many.
        """
        return over_rows(partial(self.spreads, q), rows)

    def spreads(self, q: Any, rows: Any) -> Array:
        """Return the variances of the predictors of a block of rows."""
        raise NotImplementedError

    @property
    def independent(self) -> Layout:
        """The layout of the noise of moments: groups of latents that are independent
        given all others, then the rest. The noise of a group changes no other latents.
        There are no groups if the structure has none."""
        return Layout(0, 0, self.rank)

    def split_groups(self, z: Any) -> tuple[Any, Any]:
        """Split latents (..., M) into latents of independent groups, (..., G, R), and
        all others."""
        return self.independent.split(z)

    def join_groups(self, groups: Array, others: Array) -> Array:
        """Join the two parts that :meth:`split_groups` returns."""
        return self.independent.joined(groups, others)

    def join_noise(self, groups: Array, others: Array) -> Array:
        """Join the noise of independent groups, (..., G, R), and the rest of it."""
        return self.independent.joined(groups, others)

    @abstractmethod
    def cost(self, rows: int, width: int) -> float:
        """Return the number of operations of one update.

        :param rows: number of predictors.
        :param width: number of latents, outside groups, that each may depend on.
        """

    @abstractmethod
    def describe(self, names: str, block: int) -> str:
        """Return a line about the structure, for ``print``.

        :param names: names of the sites in its groups.
        :param block: number of steps of a chain in one group.
        """

    @abstractmethod
    def standard(self, dtype: Any) -> Any:
        """Return natural parameters of independent standard normal latents."""

    @abstractmethod
    def prior(self, dtype: Any, links: Array | None = None) -> StructurePrior:
        """Return the prior: standard normal latents.

        :param links: transition matrices between latents, if the structure can express
            them; ``None`` if the latents are independent.
        """

    @abstractmethod
    def map(self, predictors: Any) -> Any:
        """Return the map to predictors.

        :param predictors: with ``offset`` and ``residual`` (n,), and the forms of map
            to choose from: ``dense``, an
            :class:`~numpyro_gpaug.gaussians.dense.AffineMap`, and ``rows``,
            :class:`~numpyro_gpaug.gaussians.rows.Rows`.
        """


class GaussianPrior(Protocol):
    """A prior of Gaussian latents."""

    @property
    def loc(self) -> Array:
        """Means, (latents, M)."""

    @property
    def natural(self) -> Any:
        """The potential and precision."""

    def divergence(self, q: Any) -> Array:
        """Return KL(q || prior), (latents,)."""

    def pull(self, mean: Array) -> Array:
        """Return the gradient of :meth:`divergence` in the means, (latents, M)."""


class StructurePrior(GaussianPrior, Protocol):
    """The prior of a :class:`Structure`."""

    @property
    def log_det(self) -> Any:
        """The log-determinant of the precision."""

    def terms(self, z: Array) -> Array:
        """Return numbers whose sum is the log-density at latents (M,), without half of
        :attr:`log_det` and the constant of a normal distribution."""


def log_density(prior: StructurePrior, z: Array) -> Array:
    """Return the log-density at latents (latents, M), without the constant of a normal
    distribution."""
    return jax.vmap(prior.terms)(z).sum() + 0.5 * prior.log_det


def no_moments(natural: Any) -> Any:
    """Return zeros in the shapes of the moments of natural parameters."""
    shapes = jax.eval_shape(lambda natural: natural.moments(), natural)
    return jax.tree.map(jnp.zeros_like, shapes)


def drawn_white(prior: StructurePrior, q: Any, noise: Array) -> Array | None:
    """Return the standard normal numbers behind latents ``q.mean + q.unwhiten(noise)``,
    (n, size); ``None`` if the latents have enough digits to find them. Otherwise the
    prior has a method of this name.

    :param prior: a prior.
    :param q: moments.
    :param noise: standard normal, (n, rank).
    """
    own = getattr(prior, "drawn_white", None)
    return None if own is None else own(q, noise)


class Change(NamedTuple):
    """A linear map between latents: the latents there, given the latents here.

    :param groups: factors of the first latents, (latents, G R).
    :param others: triangular matrices of all others, (latents, K, K).
    """

    groups: Array
    others: Array

    def undone(self, there: Array) -> Array:
        """Return the latents here, (latents, G R + K)."""
        cut = self.groups.shape[-1]
        others = linalg.solve_lower(self.others, there[..., cut:, None])[..., 0]
        return jnp.concatenate([there[..., :cut] / self.groups, others], -1)


def rebased(prior: GaussianPrior, natural: Any, change: Change | None = None) -> Any:
    """Return natural parameters found under another prior of the same structure, with
    the part that is the prior's from this one. A prior with transitions has a method of
    this name.

    :param prior: a prior.
    :param natural: the natural parameters.
    :param change: the latents under that prior; ``None`` if they are the same. Natural
        parameters then have a method ``changed``.
    """
    own = getattr(prior, "rebased", None)
    natural = natural if own is None else own(natural)
    if change is None:
        return natural
    centre = natural.centre
    known = prior.natural if centre is None else natural_at(prior, centre)
    information = jax.tree.map(jnp.subtract, natural, known).changed(change)
    return times(prior, information, None if centre is None else change.undone(centre))


def centre_of(prior: GaussianPrior, q: Any) -> Array:
    """Return the means of moments, as a centre of natural parameters. If the means do
    not have enough digits, the prior has a method ``centre``, and a centre is given by
    other numbers."""
    own = getattr(prior, "centre", None)
    return q.mean if own is None else own(q)


def times(prior: GaussianPrior, information: Any, centre: Array | None = None) -> Any:
    """Return the natural parameters of a prior times information.

    :param prior: the prior; of mean zero if its natural parameters have a centre.
    :param information: natural parameters of deviations from the centre.
    :param centre: see :func:`centre_of`, (latents, M); ``None`` for zero.
    """
    information = with_centre(prior, information)
    if centre is None:
        return jax.tree.map(jnp.add, prior.natural, information)
    if information.centre is None:
        return jax.tree.map(jnp.add, prior.natural, information.moved(centre))
    return jax.tree.map(jnp.add, natural_at(prior, centre), information)


def natural_at(prior: GaussianPrior, centre: Array) -> Any:
    """Return the natural parameters of a prior with a centre. A prior whose pull is
    not accurate has a method of this name.

    :param prior: a prior of mean zero.
    :param centre: see :func:`centre_of`, (1, M).
    """
    if (own := getattr(prior, "natural_at", None)) is not None:
        return own(centre)
    return prior.natural._replace(potential=-prior.pull(centre), centre=centre)


def with_centre(prior: GaussianPrior, information: Any) -> Any:
    """Return information with a centre of zero if natural parameters of the prior have
    one."""
    centre = prior.natural.centre
    if information.centre is not None or centre is None:
        return information
    return information._replace(centre=centre)


def centred(natural: Any, target: Any) -> Any:
    """Return the same natural parameters with the centre of others.

    :param natural: natural parameters of prior and data.
    :param target: those of a step from there: their centre is at the means.
    """
    return natural if target.centre is None else natural.centred(target.centre)


class GroupsPrior(StructurePrior, Protocol):
    """The prior of a :class:`Structure` with independent groups."""

    def terms_by_group(self, groups: Array, others: Array) -> tuple[Array, Array]:
        """Return the numbers of :meth:`terms` in two parts: for independent groups (J,
        G, R) given all other latents (K,), and for the other latents."""


def selected(tree: Any, latents: Array | None) -> Any:
    """Return some latents of arrays with a leading axis over latents (or of size 1, for
    an array that all latents share); everything for ``None``."""
    if latents is None:
        return tree
    indices = jnp.asarray(latents)
    return jax.tree.map(lambda x: x if x.shape[0] == 1 else x[indices], tree)


def scatter(tree: Any, latents: Array | None, part: Any) -> Any:
    """Return ``tree`` with these latents replaced by ``part``."""
    if latents is None:
        return part
    indices = jnp.asarray(latents)
    return jax.tree.map(lambda x, new: x.at[indices].set(new), tree, part)
