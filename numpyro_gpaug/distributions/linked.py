# SPDX-License-Identifier: Apache-2.0
"""Any NumPyro family whose parameter is a piecewise-constant function of a latent."""

from __future__ import annotations

import operator
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import Array
from jax.typing import ArrayLike
from numpyro.distributions import Distribution, constraints

from numpyro_gpaug.distributions.links import PiecewiseLink
from numpyro_gpaug.math.arrays import known_to

Links = PiecewiseLink | tuple[PiecewiseLink, ...]


class Linked(Distribution):
    r"""The distribution ``family(link(f))`` of a latent f, such as Poisson counts with
    rate ``link(f)``.

    Its expectation under a Gaussian on f, and its predictive distribution, are sums
    over the K cells of the link [1], equations (13) and (14): exact for this
    likelihood. If the link approximates a smooth one, their accuracy for the smooth
    link depends on the size of the cells, and the bound is not a bound for it.

    With two links, f has a last axis of size two and the sums run over pairs of cells,
    :math:`K_1 K_2` of them (with C latents :math:`K^C`; the paper prints
    :math:`C^K`).

    The density does not change with f inside a cell, so gradients are zero and
    gradient-based samplers (NUTS) do not work.

    :param f: latents, any shape; with two links, (..., 2).
    :param link: a :class:`~numpyro_gpaug.PiecewiseLink`, or a pair of them.
    :param family: a function of the link's value (of both values), and of
        ``parameters`` by name, that returns a NumPyro distribution without event
        dimensions: :class:`dist.Poisson <numpyro.distributions.Poisson>`,
        ``lambda rate, shape: dist.Gamma(shape, rate)``. It is static: everything that
        may be traced has to be among ``parameters``.
    :param parameters: further arguments of ``family``; with f and the links' heights
        they broadcast to the batch shape.
    :raises ValueError: for more than two links (the message states the reason), an f
        without an axis for two of them, or heights that the family does not accept.

    **References**

    [1] S. Seitz (2022), *A piece-wise constant approximation for non-conjugate Gaussian
    process models*.

    **Example**

    >>> import jax.numpy as jnp, numpyro.distributions as dist
    >>> link = PiecewiseLink.from_function(jnp.exp, 60, -4.0, 4.0)
    >>> d = Linked(jnp.array([0.0, 1.5]), link, dist.Poisson)
    >>> print(f"{d.mean[1]:.1f}", d.log_prob(jnp.array([0, 3])).shape)
    4.3 (2,)
    """

    # The constraint on heights depends on the family: see valid_parameters().
    arg_constraints = {"f": constraints.real, "heights": constraints.dependent}
    pytree_data_fields: tuple[str, ...] = ("f", "heights", "family_parameters")
    pytree_aux_fields = ("edges", "family")

    def __init__(
        self,
        f: ArrayLike,
        link: Links,
        family: Callable[..., Distribution],
        *,
        validate_args: bool | None = None,
        **parameters: ArrayLike,
    ) -> None:
        links = (link,) if isinstance(link, PiecewiseLink) else link
        pieces = isinstance(links, tuple)
        if not pieces or not all(isinstance(x, PiecewiseLink) for x in links):
            raise TypeError(
                f"link is a {type(link).__name__}. Pass a PiecewiseLink (or a tuple "
                "of two); for a function use PiecewiseLink.from_function(function, "
                "...)"
            )
        if len(links) > 2:
            raise ValueError(
                f"link has {len(links)} links, but the sum over cells has K^C terms "
                "for C latents, so at most C = 2 are allowed. Use one link per "
                "likelihood, or another likelihood (RobustMax, Categorical) for "
                "several classes"
            )
        if len(links) == 2 and jnp.shape(f)[-1:] != (2,):
            raise ValueError(
                f"f has shape {jnp.shape(f)}. With two links its last axis must run "
                "over the two latents (num_latents=2, or jnp.stack([f, g], -1))"
            )
        self.f = f
        self.edges = tuple(x.edges for x in links)
        batch = jnp.broadcast_shapes(*(x.heights.shape[:-1] for x in links))
        heights = [jnp.broadcast_to(x.heights, (*batch, x.num_pieces)) for x in links]
        # A single array is not concatenated, so that constants stay constants inside a
        # trace.
        several = len(links) > 1
        self.heights = jnp.concatenate(heights, -1) if several else links[0].heights
        self.family, self.family_parameters = family, parameters
        shapes = [jnp.shape(p) for p in self.parameters.values()]
        batch_shape = jnp.broadcast_shapes(self._latents()[0].shape, batch, *shapes)
        self._refuse_heights()
        super().__init__(batch_shape, validate_args=validate_args)

    @property
    def parameters(self) -> dict[str, ArrayLike]:
        """The other arguments of the family."""
        return self.family_parameters

    def links(self) -> tuple[PiecewiseLink, ...]:
        """The link, or the two links."""
        sizes = [len(edges) + 1 for edges in self.edges]
        ends = np.cumsum([0, *sizes])
        return tuple(
            PiecewiseLink(self.heights[..., a:b], edges)
            for (a, b), edges in zip(pairwise(ends), self.edges, strict=True)
        )

    def _latents(self) -> tuple[Array, ...]:
        f = jnp.asarray(self.f)
        return (f,) if len(self.edges) == 1 else (f[..., 0], f[..., 1])

    def conditional(self) -> Distribution:
        """Return the family at the link's values: the distribution given f."""
        pairs = zip(self.links(), self._latents(), strict=True)
        return self.family(*(link(f) for link, f in pairs), **self.parameters)

    def expectation(self, values: Array, mean: Array, variance: Array) -> Array:
        """Return the Gaussian expectation of a function that is constant in each cell
        (or in each pair of cells).

        :param values: values in the cells, flat for pairs, (..., cells).
        :param mean: mean of f.
        :param variance: variance of f, of its shape.
        """
        links = self.links()
        if len(links) == 1:
            return links[0].expectation(values, mean, variance)
        first, second = links
        shape = first.num_pieces, second.num_pieces
        pairs = values.reshape(*values.shape[:-1], *shape)
        inner = second.expectation(pairs, mean[..., 1:], variance[..., 1:])
        return first.expectation(inner, mean[..., 0], variance[..., 0])

    def cell_probabilities(self, mean: Array, variance: Array) -> Array:
        """Return probabilities of the cells (or of the pairs of cells, flat) under
        Gaussians.

        :param mean: mean of f.
        :param variance: variance of f, of its shape.
        """
        each = PiecewiseLink.cell_probabilities
        return self._of_cells(each, operator.mul, mean, variance)

    def log_cell_probabilities(self, mean: Array, variance: Array) -> Array:
        """Return the logarithms of the cell probabilities, at least -2e30."""
        each = PiecewiseLink.log_cell_probabilities
        return self._of_cells(each, operator.add, mean, variance)

    def _of_cells(
        self, each: Callable[..., Array], joined: Any, mean: Array, variance: Array
    ) -> Array:
        links = self.links()
        if len(links) == 1:
            return each(links[0], mean, variance)
        first, second = (
            each(x, mean[..., i], variance[..., i]) for i, x in enumerate(links)
        )
        pairs = joined(first[..., :, None], second[..., None, :])
        return pairs.reshape(*pairs.shape[:-2], -1)

    def components(self, batch_shape: tuple[int, ...] | None = None) -> Distribution:
        """Return the family at every cell (or pair of cells, flat): batch + (cells,).

        :param batch_shape: the shape to which the batch is broadcast; by default the
            distribution's own.
        """
        shape = self.batch_shape if batch_shape is None else batch_shape
        heights = [x.heights for x in self.links()]
        if len(heights) == 2:
            first, second = heights
            pairs = jnp.repeat(first, second.shape[-1], -1)
            heights = [pairs, jnp.tile(second, first.shape[-1])]
        batches = [jnp.broadcast_shapes(shape, h.shape[:-1]) for h in heights]
        values = [
            jnp.broadcast_to(h, (*batch, h.shape[-1]))
            for h, batch in zip(heights, batches, strict=True)
        ]
        parameters = {k: jnp.asarray(p)[..., None] for k, p in self.parameters.items()}
        return self.family(*values, **parameters)

    def _refuse_heights(self) -> None:
        if known_to(lambda _: self.valid_parameters()["heights"], self.heights):
            return
        with numpyro.validation_enabled(is_validate=False):
            distribution = self.components(())
        raise ValueError(
            f"heights of shape {self.heights.shape} take values "
            f"{np.unique(np.asarray(self.heights))[:5]}, which "
            f"{type(distribution).__name__} {self._with()}does not accept: choose a "
            "link with values in its parameter's domain, "
            "learned_link(..., constraint=...) if it is learnt"
        )

    def _with(self) -> str:
        given = ", ".join(f"{k}={v}" for k, v in self.parameters.items())
        return f"with {given} " if given and len(given) < 80 else ""

    def valid_parameters(self) -> dict[str, Array]:
        """Return whether the family accepts the heights, by parameter name. It may run
        inside ``jit``."""
        with numpyro.validation_enabled(is_validate=False):
            distribution = self.components(())
        inside = [
            jnp.all(constraint(jnp.asarray(getattr(distribution, k))))
            for k, constraint in distribution.arg_constraints.items()
            if k in vars(distribution) and not constraints.is_dependent(constraint)
        ]
        return {"heights": jnp.all(jnp.asarray(inside))}

    def sample(self, key: Array, sample_shape: tuple[int, ...] = ()) -> Array:
        d = self.conditional()
        return d.expand(self.batch_shape).sample(key, sample_shape)

    def log_prob(self, value: ArrayLike, intermediates: Any = None) -> Array:
        log_prob = self.conditional().log_prob(value)
        shape = jnp.broadcast_shapes(jnp.shape(value), self.batch_shape)
        return jnp.broadcast_to(log_prob, shape)

    @property
    def mean(self) -> Array:
        return jnp.broadcast_to(self.conditional().mean, self.batch_shape)

    @property
    def variance(self) -> Array:
        return jnp.broadcast_to(self.conditional().variance, self.batch_shape)

    @constraints.dependent_property(event_dim=0)
    def support(self) -> Any:
        return self.conditional().support


class PiecewiseBernoulli(Linked):
    r"""Labels 0/1 with probability ``link(f)`` of 1.

    With ``PiecewiseLink.from_function(jax.nn.sigmoid, ...)`` it is a classifier whose
    expectations are finite sums; with a learnt link, the inverse link is estimated from
    the data.

    :param f: latents, any shape.
    :param link: its heights are probabilities.

    **Example**

    >>> import jax, jax.numpy as jnp
    >>> link = PiecewiseLink.from_function(jax.nn.sigmoid, 100, -5.0, 5.0)
    >>> d = PiecewiseBernoulli(jnp.array([-1.0, 0.0, 1.0]), link)
    >>> [f"{p:.2f}" for p in d.mean]
    ['0.28', '0.51', '0.72']
    """

    arg_constraints = {
        "f": constraints.real,
        "heights": constraints.independent(constraints.unit_interval, 1),
    }
    support = constraints.boolean

    def __init__(
        self, f: ArrayLike, link: PiecewiseLink, *, validate_args: bool | None = None
    ) -> None:
        super().__init__(f, link, dist.BernoulliProbs, validate_args=validate_args)


class PiecewiseNormal(Linked):
    r"""Real observations with mean ``link(f)``: regression with an inverse link that
    can be learnt from the data.

    The link transforms the mean function, so its marginal distribution is not normal.
    The noise around it is normal; for skewed noise, link the parameter of a skewed
    family (:class:`Linked`).

    The heights may be constants, a :func:`numpyro.param`, or a latent vector with a
    normal prior, ``numpyro.sample("heights", dist.Normal(mean, sd).to_event(1))``,
    whose Gaussian posterior has closed-form updates ([1], section 3.5). The expectation
    is exact. Equation (24), as printed in [1], also adds the variance of a height to
    the noise inside the logarithm, and is not a bound.

    :param f: latents, any shape.
    :param link: the inverse link.
    :param scale: standard deviation of the noise, > 0.

    **References**

    [1] S. Seitz (2022), *A piece-wise constant approximation for non-conjugate Gaussian
    process models*.

    **Example**

    >>> import jax.numpy as jnp
    >>> link = PiecewiseLink([-1.0, 0.0, 4.0], edges=[-1.0, 1.0])
    >>> print(PiecewiseNormal(jnp.array([-2.0, 0.5, 3.0]), link, 0.1).mean)
    [-1.  0.  4.]
    """

    arg_constraints = {
        "f": constraints.real,
        "heights": constraints.real_vector,
        "scale": constraints.positive,
    }
    support = constraints.real
    pytree_data_fields = ("scale",)

    def __init__(
        self,
        f: ArrayLike,
        link: PiecewiseLink,
        scale: ArrayLike,
        *,
        validate_args: bool | None = None,
    ) -> None:
        self.scale = scale
        super().__init__(f, link, dist.Normal, validate_args=validate_args)

    @property
    def parameters(self) -> dict[str, ArrayLike]:
        return {"scale": self.scale}


class PiecewiseHeteroscedasticNormal(Linked):
    r"""Real observations with mean ``loc`` and variance ``link(f)``: two latents.

    The expectation is exact, :math:`\sum_k P_k [\log N(y \mid m, g_k) - v / (2 g_k)]`
    for loc ~ N(m, v); equation (21) of [1] also adds v to the variance inside the
    logarithm, and has an undefined symbol. An exponential link needs no cells: use
    :class:`~numpyro_gpaug.LogVarianceNormal`.

    :param loc: mean, a latent.
    :param f: latent of the variance.
    :param link: its heights are variances, > 0.

    **References**

    [1] S. Seitz (2022), *A piece-wise constant approximation for non-conjugate Gaussian
    process models*.

    **Example**

    >>> import jax.numpy as jnp
    >>> link = PiecewiseLink.from_function(jnp.exp, 60, -4.0, 4.0)
    >>> d = PiecewiseHeteroscedasticNormal(jnp.zeros(2), jnp.array([-2.0, 2.0]), link)
    >>> print(d.variance.round(1))
    [0.1 7.4]
    """

    arg_constraints = {
        "loc": constraints.real,
        "f": constraints.real,
        "heights": constraints.independent(constraints.positive, 1),
    }
    support = constraints.real
    pytree_data_fields = ("loc",)

    def __init__(
        self,
        loc: ArrayLike,
        f: ArrayLike,
        link: PiecewiseLink,
        *,
        validate_args: bool | None = None,
    ) -> None:
        self.loc = loc
        super().__init__(f, link, _normal_of_variance, validate_args=validate_args)

    @property
    def parameters(self) -> dict[str, ArrayLike]:
        return {"loc": self.loc}


def _normal_of_variance(variance: Array, loc: ArrayLike) -> dist.Normal:
    return dist.Normal(loc, jnp.sqrt(variance))
