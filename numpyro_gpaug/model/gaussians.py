# SPDX-License-Identifier: Apache-2.0
"""Gaussian sample sites, as affine functions of numbers with a known prior.

A site that is filled in as ``loc + factor z``, with ``z ~ N(0, I)``, has its own
distribution given the inputs of ``loc`` and ``factor``. Locations may depend on other
Gaussian sites: every value is then affine in the flat ``z`` of all sites, whose prior
is ``N(0, I)``. Where the precision of all numbers is to remain sparse, a field is an
affine function of coordinates whose own prior has a sparse precision.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import singledispatch
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import Array
from numpyro import handlers
from numpyro.distributions import transforms

from numpyro_gpaug._numpyro import traceable_sites
from numpyro_gpaug.distributions.random_walk import Chained, RandomWalk2
from numpyro_gpaug.distributions.sparse_prior import SparsePrior, sparse_prior
from numpyro_gpaug.gaussians import Layout, Sparse
from numpyro_gpaug.likelihoods.expectations import base_distribution, is_masked
from numpyro_gpaug.math import linalg, small
from numpyro_gpaug.math.sparse_cholesky import half_solve_with_sums, product

_AFFINE = (
    transforms.AffineTransform,
    transforms.IdentityTransform,
    transforms.LowerCholeskyAffine,
    transforms.PermuteTransform,
    transforms.ReshapeTransform,
    transforms.ZeroSumTransform,
)


class Whitening(NamedTuple):
    """A Gaussian as an affine function of standard normal numbers.

    :param shape: the shape of these numbers.
    :param value: returns a value of the site from the numbers.
    :param spread: scales and factors, which must not depend on other Gaussian latents.
    :param numbers: returns the numbers of a value; ``None`` if there are more numbers
        than entries.
    :param mixes: whether a factor combines several numbers in an entry of the value.
        The same numbers then give another value with another factor.
    :param chain: the chain that the value is a function of.
    """

    shape: tuple[int, ...]
    value: Callable[[Array], Array]
    spread: Any
    numbers: Callable[[Array], Array] | None
    mixes: bool = False
    chain: Chained | None = None


def whitening(fn: dist.Distribution) -> Whitening | None:
    """Return the whitening of a site's distribution; ``None`` if it is not Gaussian.

    :param fn: the distribution in the message of the site, which may be wrapped in
        plates.
    """
    if is_masked(fn):
        return None
    return _whitening(base_distribution(fn), tuple(fn.shape()))


class Field(NamedTuple):
    """A Gaussian as an affine function of coordinates with a sparse precision.

    :param shape: the shape of the coordinates, (..., N).
    :param prior: the distribution of the coordinates, and the function.
    """

    shape: tuple[int, ...]
    prior: SparsePrior

    @property
    def labels(self) -> np.ndarray:
        """The component of each node in which coordinates add up to zero, (N,); -1 for
        none."""
        constraints = self.prior.constraints
        if constraints is None:
            return np.full(self.shape[-1], -1)
        return np.where(constraints.any(0), constraints.argmax(0), -1)

    @property
    def structure(self) -> Sparse:
        """The structure of one set of coordinates."""
        labels, size = self.labels.astype(np.int32), self.shape[-1]
        known = labels.tobytes() if labels.max() >= 0 else None
        return Sparse(Layout(size, 1, 0), self.prior.pattern, known)

    def root(self) -> Array:
        """The coordinates that independent standard normal numbers make, (N, rank)."""
        prior = self.prior
        if prior.constraints is None:
            return half_solve_with_sums(
                prior.pattern, prior.values, prior.sums,
                jnp.eye(prior.pattern.size, dtype=prior.values.dtype),
            )  # fmt: skip
        given = prior.entries, prior.log_det()
        moments = self.structure.prior(given[0].dtype, given).natural.moments()
        return moments.unwhiten(jnp.eye(moments.rank, dtype=given[0].dtype)).T

    @property
    def numbers(self) -> Callable[[Array], Array] | None:
        """A function that returns the coordinates of a value; ``None`` if there are
        more coordinates than entries."""
        prior = self.prior

        def numbers(x: Array) -> Array:
            flat = x.reshape(*x.shape[: len(self.shape) - 1], -1)
            return (flat - prior.loc) / prior.scales[0]

        return numbers if len(prior.scales) == 1 else None

    def log_density(self, x: Array) -> Array:
        """Return the log-density of coordinates (..., N), summed."""
        prior, columns = self.prior, x.reshape(-1, x.shape[-1]).T
        squares = (columns * product(prior.pattern, prior.entries, columns)).sum()
        constant = self.structure.rank * float(np.log(2 * np.pi))
        each = prior.log_det() - constant
        return 0.5 * (columns.shape[1] * each - squares)

    def whitening(self) -> Whitening:
        """Return the same Gaussian from standard normal numbers."""
        prior, coordinates = self.prior, self.numbers

        def value(z: Array) -> Array:
            return prior.value((self.root() @ z[..., None])[..., 0])

        def numbers(x: Array) -> Array:
            assert coordinates is not None
            inner = coordinates(x)
            columns = inner.reshape(-1, inner.shape[-1]).T
            found = self.root().T @ product(prior.pattern, prior.entries, columns)
            return found.T.reshape(*inner.shape[:-1], -1)

        return Whitening(
            (*self.shape[:-1], self.structure.rank), value,
            (prior.values, prior.scales), coordinates and numbers,
            mixes=True,
        )  # fmt: skip


def at_prior_means(
    model: Callable[..., Any], names: tuple[str, ...]
) -> Callable[..., Any]:
    """Return ``model`` with Gaussian sites at the means of their distributions.

    :param model: a NumPyro model.
    :param names: the sites.
    """

    def mean(message: dict[str, Any]) -> Array | None:
        if message["type"] != "sample" or message["name"] not in names:
            return None
        fn: Any = message["fn"]
        try:
            # Normal(0, 1) has an integer as its mean.
            return jnp.broadcast_to(1.0 * fn.mean, fn.shape())
        except NotImplementedError:  # of a transformed normal
            found: Any = whitening(fn)
            return found.value(jnp.zeros(found.shape))

    return handlers.substitute(traceable_sites(model), substitute_fn=mean)


def field(fn: dist.Distribution) -> Field | None:
    """Return a site's distribution as a field; ``None`` if it has no sparse precision.

    :param fn: the distribution in the message of the site, which may be wrapped in
        plates.
    """
    if is_masked(fn):
        return None
    return _field(base_distribution(fn), tuple(fn.shape()))


def _field(base: Any, shape: tuple[int, ...]) -> Field | None:
    prior = sparse_prior(base)
    if prior is None:
        return None
    batch = shape[: len(shape) - base.event_dim]
    return Field((*batch, prior.pattern.size), prior)


@singledispatch
def _whitening(base: Any, shape: tuple[int, ...]) -> Whitening | None:
    found = _field(base, shape)
    return None if found is None else found.whitening()


@_whitening.register
def _(base: dist.Normal, shape: tuple[int, ...]) -> Whitening:
    loc, scale = base.loc, base.scale
    return Whitening(
        shape, lambda z: loc + scale * z, scale, lambda x: (x - loc) / scale
    )


@_whitening.register
def _(base: dist.MultivariateNormal, shape: tuple[int, ...]) -> Whitening:
    factor = base.scale_tril
    return Whitening(
        shape, lambda z: base.loc + (factor @ z[..., None])[..., 0], factor,
        lambda x: linalg.solve_lower(factor, (x - base.loc)[..., None])[..., 0],
        mixes=True,
    )  # fmt: skip


@_whitening.register
def _(base: dist.LowRankMultivariateNormal, shape: tuple[int, ...]) -> Whitening:
    factor, diagonal = base.cov_factor, base.cov_diag
    rank = factor.shape[-1]

    def value(z: Array) -> Array:
        shared = (factor @ z[..., :rank, None])[..., 0]
        return base.loc + shared + jnp.sqrt(diagonal) * z[..., rank:]

    whole = (*shape[:-1], rank + shape[-1])
    return Whitening(whole, value, (factor, diagonal), None, mixes=True)


@_whitening.register
def _(base: dist.GaussianRandomWalk, shape: tuple[int, ...]) -> Whitening:
    scale = jnp.asarray(base.scale)[..., None]
    return Whitening(
        shape, lambda z: jnp.cumsum(scale * z, -1), scale,
        lambda x: jnp.diff(x, axis=-1, prepend=0) / scale,
    )  # fmt: skip


@_whitening.register
def _(base: RandomWalk2, shape: tuple[int, ...]) -> Whitening:
    spread = base.level, base.slope, base.scale
    chain = base.chain() if len(shape) == 1 else None
    if chain is None:
        return Whitening(shape, base.walked, spread, base.noise, mixes=True)
    return Whitening(
        chain.links.shape[:2], lambda z: chain.value(chain.states(z)), spread,
        chain.numbers, mixes=True, chain=chain,
    )  # fmt: skip


@_whitening.register
def _(base: dist.GaussianStateSpace, shape: tuple[int, ...]) -> Whitening:
    factor, (along,) = base.scale_tril, base.transforms

    def value(z: Array) -> Array:
        return along((factor @ z[..., None])[..., 0])

    def numbers(x: Array) -> Array:
        noise = along.inv(x)[..., None]
        whole = jnp.broadcast_to(factor, (*noise.shape[:-2], *factor.shape[-2:]))
        return linalg.solve_lower(whole, noise)[..., 0]

    return Whitening(
        shape, value, (factor, base.transition_matrix), numbers, mixes=True
    )


@_whitening.register
def _(base: dist.MatrixNormal, shape: tuple[int, ...]) -> Whitening:
    rows, columns = base.scale_tril_row, base.scale_tril_column

    def numbers(x: Array) -> Array:
        half = linalg.solve_lower(rows, x - base.loc)
        return linalg.solve_lower(columns, half.mT).mT

    return Whitening(
        shape, lambda z: base.loc + rows @ z @ jnp.swapaxes(columns, -1, -2),
        (rows, columns), numbers, mixes=True,
    )  # fmt: skip


def car_precision(base: dist.CAR) -> Array:
    """Return the inverse of its covariance, (..., n, n).

    :param base: a distribution of areas.
    """
    adjacency = base.adj_matrix
    adjacency = adjacency.toarray() if base.is_sparse else adjacency
    correlation = jnp.asarray(base.correlation)[..., None, None]
    precision = jnp.asarray(base.conditional_precision)[..., None, None]
    neighbours = jnp.asarray(adjacency, jnp.result_type(correlation, precision))
    eye = jnp.eye(neighbours.shape[-1], dtype=neighbours.dtype)
    return precision * (eye * neighbours.sum(-1)[..., None] - correlation * neighbours)


@_whitening.register
def _(base: dist.CAR, shape: tuple[int, ...]) -> Whitening:
    # Dense, so it is computed only if there is no sparse form.
    def inverse() -> Array:
        # LAPACK's triangular solves do not compile inside a scan.
        whole = car_precision(base)
        found = small.cholesky_and_inverse(whole.reshape(-1, *whole.shape[-2:]))[1]
        return found.reshape(whole.shape)

    def value(z: Array) -> Array:
        return base.loc + (jnp.swapaxes(inverse(), -1, -2) @ z[..., None])[..., 0]

    def numbers(x: Array) -> Array:
        deviation = (x - base.loc)[..., None]
        return linalg.solve_lower(inverse(), deviation, transpose=True)[..., 0]

    spread = base.correlation, base.conditional_precision
    return Whitening(shape, value, spread, numbers, mixes=True)


@_whitening.register
def _(base: dist.TransformedDistribution, shape: tuple[int, ...]) -> Whitening | None:
    if not all(isinstance(t, _AFFINE) for t in base.transforms):
        return None
    batch = shape[: len(shape) - base.event_dim]
    inner = base.base_dist
    # Expanded over a plate, because each member has its own values.
    found = whitening(inner if inner.batch_shape == batch else inner.expand(batch))
    if found is None:
        return None

    both = transforms.ComposeTransform(base.transforms)
    value, numbers = found.value, found.numbers
    made = [vars(t) for t in base.transforms]
    factors = [v.get("scale", v.get("scale_tril")) for v in made]
    return found._replace(
        value=lambda z: both(value(z)),
        spread=(found.spread, factors),
        numbers=numbers and (lambda x: numbers(both.inv(x))),
        mixes=found.mixes or any("scale_tril" in v for v in made),
        chain=None,
    )
