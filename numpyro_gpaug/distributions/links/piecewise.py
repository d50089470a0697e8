# SPDX-License-Identifier: Apache-2.0
"""Piecewise-constant inverse links, for which every Gaussian expectation is a finite
sum.

Seitz (2022), A piece-wise constant approximation for non-conjugate Gaussian process
models. An inverse link takes function values to the parameter of a likelihood. If it
has K constant cells, every expectation under a Gaussian is exactly a sum over their
probabilities, and the K heights can be learnt.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.scipy.special import log_ndtr
from jax.typing import ArrayLike

from numpyro_gpaug.math import normal
from numpyro_gpaug.math.arrays import known_to

RULES = ("midpoint", "upper")


def knots(edges: Sequence[float], rule: str = "midpoint") -> np.ndarray:
    """Return the points at which a function is evaluated, one per cell.

    :param edges: the finite edges, (K - 1,).
    :param rule: ``"midpoint"``: midpoints of the finite cells, and finite edges of the
        outer ones; ``"upper"``: upper edges, and the lower edge of the last cell.
    :raises ValueError: for another rule.
    """
    if rule not in RULES:
        raise ValueError(f"rule must be one of {RULES}, got {rule!r}")
    ends = np.asarray(edges, np.float64)
    inner = 0.5 * (ends[1:] + ends[:-1]) if rule == "midpoint" else ends[1:]
    return np.concatenate([ends[:1], inner, ends[-1:]])


def equal_edges(num_pieces: int, lower: float, upper: float) -> tuple[float, ...]:
    """Return K - 1 edges, equally spaced from ``lower`` to ``upper`` inclusive; the two
    must be equal for K = 2."""
    if num_pieces < 2:
        raise ValueError(f"num_pieces must be at least 2, got {num_pieces}")
    if num_pieces > 2 and not lower < upper:
        raise ValueError(f"lower must be below upper, got {lower} and {upper}")
    if num_pieces == 2 and lower != upper:
        raise ValueError(
            "two pieces have one finite edge, so lower and upper must be equal. "
            f"Got {lower} and {upper}"
        )
    return tuple(np.linspace(lower, upper, num_pieces - 1).tolist())


def checked_edges(edges: Sequence[float] | Array) -> tuple[float, ...]:
    """Return edges as plain numbers, finite and increasing."""
    if isinstance(edges, jax.core.Tracer):
        raise ValueError("edges must be constants, not traced values")
    values = np.asarray(edges, np.float64)
    if values.ndim != 1 or values.size < 1:
        raise ValueError(
            f"edges has shape {values.shape}. Pass the finite edges, at least one "
            "(two pieces)"
        )
    if not (np.isfinite(values).all() and (np.diff(values) > 0).all()):
        raise ValueError(
            f"edges of shape {values.shape} must be finite and increasing, got "
            f"{values[:5]}"
        )
    return tuple(values.tolist())


@jax.tree_util.register_pytree_with_keys_class
class PiecewiseLink:
    r"""The inverse link :math:`g(f) = g_k` for :math:`e_{k-1} \le f < e_k`, with
    :math:`e_0 = -\infty` and :math:`e_K = \infty`.

    It is a pytree with the heights as its only leaf (edges are constants). A link can
    therefore be an argument of a model, or a param:
    :func:`~numpyro_gpaug.learned_link`, or directly
    ``numpyro.param("link", lambda key: link)`` (NumPyro calls callable initial values,
    and a link is callable).

    :param heights: :math:`g_1 .. g_K`, (K,); or (N, K), one link per observation, for
        heights computed from the inputs.
    :param edges: the K - 1 finite edges, increasing; constants, K >= 2.
    :raises ValueError: for edges that are not finite and increasing, fewer than two
        pieces, or another number of heights than of pieces.

    **Example**

    >>> import jax.numpy as jnp
    >>> link = PiecewiseLink(jnp.array([0.1, 0.5, 0.9]), edges=[-1.0, 1.0])
    >>> print(link(jnp.array([-2.0, 0.0, 1.0])))
    [0.1 0.5 0.9]
    >>> [f"{p:.3f}" for p in link.cell_probabilities(0.0, 1.0)]
    ['0.159', '0.683', '0.159']
    """

    def __init__(self, heights: ArrayLike, edges: Sequence[float] | Array) -> None:
        self.edges: tuple[float, ...] = checked_edges(edges)
        self.heights: Array = jnp.asarray(heights)
        if not jnp.issubdtype(self.heights.dtype, jnp.floating):
            self.heights = self.heights.astype(jnp.result_type(float))
        pieces, shape = len(self.edges) + 1, self.heights.shape
        if not shape or shape[-1] != pieces:
            raise ValueError(
                f"heights has shape {shape}, but {pieces - 1} finite edges make "
                f"{pieces} pieces: its last axis must have {pieces} entries"
            )

    @classmethod
    def from_function(
        cls,
        function: Callable[[Array], Array],
        num_pieces: int,
        lower: float,
        upper: float,
        rule: str = "midpoint",
    ) -> PiecewiseLink:
        """Make a link that approximates a function, on equally spaced edges.

        :param function: an elementwise function, e.g. :func:`jax.nn.sigmoid` or
            :func:`jax.numpy.exp`.
        :param num_pieces: K >= 2.
        :param lower: the first finite edge.
        :param upper: the last finite edge.
        :param rule: the points at which the function is evaluated: ``"midpoint"`` of
            inner pieces, or ``"upper"`` ends, the rule of the paper. Midpoints have 20
            to 500 times smaller errors on [-6, 6].
        :raises ValueError: if the range is empty, K < 2, the rule is unknown, or the
            function is not finite there.

        **Example**

        >>> import jax
        >>> link = PiecewiseLink.from_function(jax.nn.sigmoid, 4, -2.0, 2.0)
        >>> [f"{g:.2f}" for g in link.heights]
        ['0.12', '0.27', '0.73', '0.88']
        """
        edges = equal_edges(num_pieces, lower, upper)
        at = knots(edges, rule)
        # Models are traced, but constants must be known so that they can be checked.
        with jax.ensure_compile_time_eval():
            heights = jnp.asarray(function(jnp.asarray(at, jnp.result_type(float))))
        if heights.shape != at.shape:
            raise ValueError(
                f"function returned values of shape {heights.shape} at points of "
                f"shape {at.shape}. It must be elementwise"
            )
        if not known_to(jnp.isfinite, heights):
            raise ValueError(
                f"function is not finite everywhere between {lower} and {upper}"
            )
        return cls(heights, edges)

    @property
    def num_pieces(self) -> int:
        """The number K of pieces."""
        return len(self.edges) + 1

    def with_heights(self, heights: ArrayLike) -> PiecewiseLink:
        """Return the link on the same edges with other heights.

        :param heights: heights, (K,) or (N, K).
        """
        return PiecewiseLink(heights, self.edges)

    def __call__(self, f: ArrayLike) -> Array:
        """Return the link's values at f; the derivative with respect to f is zero.

        :param f: function values; for heights (N, K), of shape (..., N).
        """
        f = jnp.asarray(f)
        above = f[..., None] >= jnp.asarray(self.edges, jnp.result_type(f, 0.0))
        cell = above.sum(-1)
        if self.heights.ndim == 1:
            return self.heights[cell]
        shape = (*cell.shape, self.num_pieces)
        heights = jnp.broadcast_to(self.heights, shape)
        return jnp.take_along_axis(heights, cell[..., None], -1)[..., 0]

    def cell_probabilities(self, mean: ArrayLike, variance: ArrayLike) -> Array:
        """Return probabilities of the cells under Gaussians, to relative precision in
        both tails, differentiable in mean and variance.

        :param mean: means, any shape.
        :param variance: variances, of a shape that broadcasts with it, >= 0.
        :return: probabilities, of the broadcast shape + (K,).
        """
        z = self._standardised(mean, variance)
        tail = _smaller_tail(z)
        below = jnp.where(z < 0, tail, 1 - tail)
        above = jnp.where(z < 0, 1 - tail, tail)
        ones, zeros = jnp.ones_like(z[..., :1]), jnp.zeros_like(z[..., :1])
        left = _differences(zeros, below, ones)
        right = -_differences(ones, above, zeros)
        # Where a cell lies to the right of the mean, upper tails are subtracted: the
        # smaller of the two numbers keeps its relative precision.
        to_the_right = jnp.concatenate([jnp.zeros_like(ones, bool), z > 0], -1)
        return jnp.where(to_the_right, right, left)

    def log_cell_probabilities(self, mean: ArrayLike, variance: ArrayLike) -> Array:
        """Return logarithms of the cell probabilities, which are at least -1e30.

        The probabilities themselves may underflow.

        :param mean: means, any shape.
        :param variance: variances, of a shape that broadcasts with it, >= 0.
        """
        z = jnp.clip(self._standardised(mean, variance), -1e9, 1e9)
        ends = jnp.full_like(z[..., :1], 1e9)
        low = jnp.concatenate([-ends, z], -1)
        high = jnp.concatenate([z, ends], -1)
        flip = low > 0
        low, high = jnp.where(flip, -high, low), jnp.where(flip, -low, high)
        log_low, log_high = log_ndtr(low), log_ndtr(high)
        gap = jnp.minimum(log_low - log_high, -jnp.finfo(z.dtype).tiny)
        log_p = log_high + jnp.log(-jnp.expm1(gap))
        return jnp.maximum(log_p, -1e30)

    def expectation(self, values: Array, mean: ArrayLike, variance: ArrayLike) -> Array:
        """Return the Gaussian expectation of a function that is constant in each cell.

        It is the value at the mean plus, for every edge, the jump times the tail
        probability beyond the edge. There is one tail per edge, nothing cancels, and a
        cell far from the Gaussian adds nothing.

        :param values: values in the cells, (..., K).
        :param mean: mean of the Gaussian, (...).
        :param variance: its variance, of a shape that broadcasts with the mean, >= 0.
        """
        z = self._standardised(mean, variance)
        tail = _smaller_tail(z)
        reached = tail > 0
        jumps = jnp.where(reached, jnp.diff(values, axis=-1), 0)
        beyond = jnp.where(z < 0, -tail, tail)
        at_mean = (z < 0).sum(-1, keepdims=True)
        # Without indexing, because its gradient would be a scatter.
        here = jnp.arange(self.num_pieces) == at_mean
        centre = jnp.where(here, values, 0).sum(-1)
        return centre + (beyond * jumps).sum(-1)

    def expected_value(self, mean: ArrayLike, variance: ArrayLike) -> Array:
        """Return ``E g(f)`` under Gaussians.

        :param mean: means, any shape.
        :param variance: variances, of a shape that broadcasts with it, >= 0.
        """
        return (self.cell_probabilities(mean, variance) * self.heights).sum(-1)

    def mean_squared_error_bound(
        self,
        mean: ArrayLike,
        variance: ArrayLike,
        lipschitz: ArrayLike,
        rule: str = "midpoint",
    ) -> Array:
        r"""Return a bound on ``E (g(f) - link(f))^2`` for any Lipschitz function g
        whose values at the knots are the heights.

        It is :math:`\Lambda^2 \sum_k \int_k (f - x_k)^2 N(f \mid m, v) df`, Theorem 1
        of the paper, with the sign and the scale of its second term corrected (the
        paper prints :math:`+\sigma \Delta p` instead of
        :math:`-\sigma \Delta \varphi`). It goes to zero if the mesh size does *and* the
        outer edges go to infinity.

        :param mean: means, any shape.
        :param variance: variances, of a shape that broadcasts with it, > 0.
        :param lipschitz: the Lipschitz constant, e.g. 1 / 4 for the logistic function.
        :param rule: the points at which the heights were evaluated, as in
            :meth:`from_function`.

        **Example**

        >>> import jax, jax.numpy as jnp
        >>> link = PiecewiseLink.from_function(jax.nn.sigmoid, 50, -6.0, 6.0)
        >>> print(f"{link.mean_squared_error_bound(0.0, 1.0, 0.25):.1e}")
        3.3e-04
        """
        p = self.cell_probabilities(mean, variance)
        z = self._standardised(mean, variance)
        scale = _scale(jnp.asarray(variance, p.dtype))[..., None]
        density = normal.density(z)
        zero = jnp.zeros_like(z[..., :1])
        first = _differences(zero, density, zero)
        second = _differences(zero, z * density, zero)
        # With x_k as the origin of cell k, no value as large as the range cancels.
        at = jnp.asarray(knots(self.edges, rule), p.dtype)
        away = jnp.asarray(mean, p.dtype)[..., None] - at
        square = jnp.square(scale) * (p - second) - 2 * scale * away * first
        square += jnp.square(away) * p
        return jnp.square(jnp.asarray(lipschitz, p.dtype)) * square.sum(-1)

    def _standardised(self, mean: ArrayLike, variance: ArrayLike) -> Array:
        dtype = jnp.result_type(mean, variance, 0.0)
        m, v = jnp.broadcast_arrays(jnp.asarray(mean, dtype), variance)
        scale = _scale(jnp.asarray(v, dtype))[..., None]
        return (jnp.asarray(self.edges, dtype) - m[..., None]) / scale

    def tree_flatten_with_keys(self) -> tuple[Any, tuple[float, ...]]:
        """Return the heights; edges are static."""
        return ((jax.tree_util.GetAttrKey("heights"), self.heights),), self.edges

    @classmethod
    def tree_unflatten(
        cls, edges: tuple[float, ...], leaves: tuple[Any]
    ) -> PiecewiseLink:
        """Rebuild without checks: a leaf may be any object."""
        link = object.__new__(cls)
        link.edges, (link.heights,) = edges, leaves
        return link

    def __repr__(self) -> str:
        ends = f"{self.edges[0]:g} .. {self.edges[-1]:g}"
        return f"PiecewiseLink({self.num_pieces} pieces, edges {ends})"


def _smaller_tail(z: Array) -> Array:
    """Return the probability beyond z on its side of zero, differentiable as either
    tail."""
    # Not abs(z), whose derivative is zero at zero: a mean often sits on an edge.
    return normal.cdf(jnp.where(z < 0, z, -z))


def _scale(variance: Array) -> Array:
    """Return standard deviations. A variance is at least the square of the rounding
    unit, so that gradients at a point mass are finite."""
    return jnp.sqrt(jnp.maximum(variance, jnp.finfo(variance.dtype).eps ** 2))


def _differences(first: Array, inner: Array, last: Array) -> Array:
    return jnp.diff(jnp.concatenate([first, inner, last], -1), axis=-1)
