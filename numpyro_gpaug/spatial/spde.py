# SPDX-License-Identifier: Apache-2.0
"""Matern fields as solutions of a stochastic partial differential equation."""

from __future__ import annotations

from functools import lru_cache, partial
from typing import NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
from jax import Array
from jax.typing import ArrayLike
from numpyro.distributions import constraints
from numpyro.distributions.util import validate_sample
from scipy import sparse

from numpyro_gpaug._display import Displayed, Rows, brief
from numpyro_gpaug.distributions.graph import entries
from numpyro_gpaug.distributions.sparse_prior import Field, SparsePrior
from numpyro_gpaug.math import sparse_cholesky
from numpyro_gpaug.math.arrays import numbers
from numpyro_gpaug.math.linalg import precise
from numpyro_gpaug.math.sparse_pattern import Pattern
from numpyro_gpaug.math.sparse_terms import by_columns
from numpyro_gpaug.spatial.mesh import Mesh


class _Matrices(NamedTuple):
    """Entries of the matrices of a mesh on two patterns.

    :param once: the pattern of G.
    :param mass: C, on it.
    :param stiffness: G, on it.
    :param twice: the pattern of ``G C^-1 G``.
    :param powers: C, ``2 G`` and ``G C^-1 G`` on it.
    """

    once: Pattern
    mass: np.ndarray
    stiffness: np.ndarray
    twice: Pattern
    powers: tuple[np.ndarray, np.ndarray, np.ndarray]


@lru_cache(maxsize=16)
def _matrices(mesh: Mesh) -> _Matrices:
    mass, stiffness = mesh.elements
    squared = stiffness @ sparse.diags_array(1 / mass) @ stiffness
    once, twice = (
        Pattern.of(mesh.size, *matrix.tocoo().coords) for matrix in (stiffness, squared)
    )
    diagonal = sparse.diags_array(mass)
    powers = (
        entries(twice, diagonal), 2 * entries(twice, stiffness), entries(twice, squared)
    )  # fmt: skip
    of_once = entries(once, diagonal), entries(once, stiffness)
    return _Matrices(once, *of_once, twice, powers)


class MaternWeights(Field):
    r"""The values at the nodes of a mesh of a Matern field with unit variance and
    smoothness 1.

    The precision is :math:`Q = K C^{-1} K / (4 \pi \kappa^2)` with :math:`K = \kappa^2
    C + G` and :math:`\kappa = \sqrt{8} / \text{range}` (Lindgren, Rue and Lindstrom,
    2011, equation 10, with the lumped C of their Appendix C.5). Densities and draws
    factorise K, whose condition number is the square root of the condition number of Q.

    :param mesh: the mesh.
    :param range: the distance at which the correlation is 0.14; positive.
    """

    arg_constraints = {"range": constraints.positive}
    reparametrized_params = ["range"]
    pytree_aux_fields = ("mesh",)

    def __init__(
        self, mesh: Mesh, range: ArrayLike, *, validate_args: bool | None = None
    ) -> None:
        self.mesh = mesh
        (self.range,) = numbers(range=range)
        super().__init__((), (mesh.size,), validate_args=validate_args)

    @precise
    def sample(self, key: Array, sample_shape: tuple[int, ...] = ()) -> Array:
        noise = self.white(key, sample_shape)
        load = noise * jnp.sqrt(4 * np.pi * self._mass) * self._kappa
        factor = sparse_cholesky.factor(*self._operator)
        return by_columns(factor.solve, load)

    @validate_sample
    @precise
    def log_prob(self, value: Array) -> Array:
        product = partial(sparse_cholesky.matvec, *self._operator)
        pulled = by_columns(product, jnp.asarray(value, self.range.dtype))
        white = jnp.square(pulled) / (4 * np.pi * self._mass)
        quadratic = white.sum(-1) / jnp.square(self._kappa)
        constant = jnp.asarray(self.mesh.size * np.log(2 * np.pi), self.range.dtype)
        return 0.5 * (self._log_det() - constant - quadratic)

    @property
    @precise
    def variance(self) -> Array:
        prior = self._sparse_precision()
        factor = sparse_cholesky.factor(prior.pattern, prior.values)
        return factor.selected_inverse()[prior.pattern.diagonal]

    @property
    def _kappa(self) -> Array:
        return np.sqrt(8) / self.range

    @property
    def _mass(self) -> Array:
        return jnp.asarray(self.mesh.elements.mass, self.range.dtype)

    @property
    def _operator(self) -> tuple[Pattern, Array]:
        """The pattern and the entries of K."""
        once, *parts, _, _ = _matrices(self.mesh)
        mass, stiffness = (x.astype(self.dtype) for x in parts)
        return once, jnp.square(self._kappa) * mass + stiffness

    def _log_det(self) -> Array:
        of_operator = sparse_cholesky.log_det(*self._operator)
        scales = jnp.log(4 * np.pi * self._mass) + 2 * jnp.log(self._kappa)
        return 2 * of_operator - scales.sum()

    def _sparse_precision(self) -> SparsePrior:
        dtype, matrices = self.range.dtype, _matrices(self.mesh)
        mass, middle, squared = (x.astype(dtype) for x in matrices.powers)
        square = jnp.square(self._kappa)
        values = (square * mass + middle + squared / square) / (4 * np.pi)
        one = jnp.ones((), dtype)
        return SparsePrior(
            matrices.twice, values, None, 0 * one, (one,), self._log_det,
            sums=square * self._mass / (4 * np.pi),
        )  # fmt: skip


class SPDE(Displayed):
    r"""A Matern field in the plane, with smoothness 1, on a mesh.

    The field solves :math:`(\kappa^2 - \Delta) f = W / \tau` with white noise W
    (Lindgren, Rue and Lindstrom, 2011). It is piecewise linear between the nodes of the
    mesh, and its precision at the nodes is sparse. Construct it in a model, outside
    data plates, and call it at points, inside them, like a
    :class:`~numpyro_gpaug.GaussianProcess`. The constructor makes a sample site
    ``"{name}.v"``, the values at the nodes in units of ``scale``, (n,). A call makes a
    deterministic site ``name``.

    :param name: name of the site of function values.
    :param mesh: the mesh. Its edges should be at most a fifth of the range where there
        are data, and its boundary a range away (:meth:`.Mesh.around` states the
        errors).
    :param range: the distance at which the correlation is 0.14, ``sqrt(8) / kappa``.
    :param scale: the standard deviation far from the boundary.
    :param smoothness: 1, the only one. At 0 the variance in the plane is infinite. At 2
        float32 does not resolve the precision where the range is twenty edges or more:
        the condition number grows with the sixth power of their ratio.
    :raises ValueError: inside a plate, for a range or scale that is not a number, and
        for another smoothness.

    **Example**

    >>> import jax, numpy as np, numpyro, numpyro.distributions as dist
    >>> import numpyro_gpaug as gpaug
    >>> X = np.random.default_rng(0).random((50, 2))
    >>> mesh = gpaug.spatial.Mesh.around(X, max_edge=(0.2, 0.4), offset=0.5)
    >>> def model(X, y=None):
    ...     reach = numpyro.sample("range", dist.LogNormal(-1.0, 0.5))
    ...     s = gpaug.SPDE("s", mesh, range=reach, scale=2.0)
    ...     with numpyro.plate("data", X.shape[0]):
    ...         numpyro.sample("y", dist.Poisson(jax.numpy.exp(s(X))), obs=y)
    >>> from numpyro.infer import Predictive
    >>> prior = Predictive(model, num_samples=3)(jax.random.key(0), X)
    >>> prior["s"].shape, prior["s.v"].shape == (3, mesh.size)
    ((3, 50), True)
    """

    def __init__(
        self,
        name: str,
        mesh: Mesh,
        range: ArrayLike,
        scale: ArrayLike,
        smoothness: int = 1,
    ) -> None:
        if np.ndim(scale):
            raise ValueError(f"scale has shape {np.shape(scale)}; expected a number")
        if isinstance(smoothness, jax.core.Tracer) or smoothness != 1:
            raise ValueError(
                f"smoothness is {smoothness}, and an SPDE has smoothness 1. For others "
                "use GaussianProcess with Matern32 (1.5) or Matern52 (2.5)"
            )
        self.name, self.mesh, self.range, self.scale = name, mesh, range, scale
        self.v = numpyro.sample(f"{name}.v", MaternWeights(mesh, range))
        if self.v.shape != (mesh.size,):
            raise ValueError(
                f'SPDE("{name}"): its values at the nodes have shape {self.v.shape}; '
                f"expected ({mesh.size},). Construct it before the plate, and call it "
                "inside"
            )

    def __jax_array__(self) -> NoReturn:
        raise TypeError(
            f'SPDE("{self.name}") is used as an array. Its values at points are s(X)'
        )

    def __call__(self, X: ArrayLike) -> Array:
        """Return the values of the field at points.

        :param X: points, (N, 2).
        :return: values, (N,); NaN at traced points outside of the mesh.
        :raises ValueError: for points outside of the mesh that are not traced, or of
            another shape.
        """
        nodes, weights = self.mesh.project(X)
        # Each value depends on three nodes. The guide recognises the sparse form from
        # this sum.
        values = sum(self.v[nodes[:, k]] * weights[:, k] for k in (0, 1, 2))
        return numpyro.deterministic(self.name, self.scale * values)

    def _display(self) -> tuple[str, Rows]:
        return f'SPDE("{self.name}")', [
            ("mesh", f"{self.mesh.size} nodes"),
            ("range", brief(self.range)),
            ("scale", brief(self.scale)),
        ]
