# SPDX-License-Identifier: Apache-2.0
"""Conformance checks for likelihoods that users register."""

from __future__ import annotations

import inspect
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, random
from jax.typing import ArrayLike
from numpyro.distributions import Distribution

from numpyro_gpaug.errors import UnknownLikelihoodError
from numpyro_gpaug.likelihoods.contract import (
    Augmentation,
    auxiliary_means,
    draw_auxiliaries,
    lookup_augmentation,
)
from numpyro_gpaug.likelihoods.expectations import Parameters, lookup_expectation
from numpyro_gpaug.math.quadrature import gauss_hermite


def check_augmentation(
    d: Distribution,
    y: Array,
    *,
    key: Array | None = None,
    tolerance: float | None = None,
) -> None:
    r"""Check the augmentation registered for ``type(d)`` against its own likelihood.

    Four identities are checked; a wrong constant anywhere breaks one of them.

    1. ``log p(y | f) + log p(aux | y, f) - (potential f - precision f^2 / 2)`` does not
       depend on f, for auxiliaries drawn from their conditional at any f: the augmented
       model is Gaussian in f with exactly these natural parameters. This is checked for
       each of the ``gibbs_blocks`` in turn (without the second term for a block drawn
       before the auxiliaries).
    2. ``bound <= E log p(y | f)``.
    3. The bound is tight: ``bound -> log p(y | m)`` as ``v -> 0``.
    4. The factors derived from the bound have positive precisions and, as ``v -> 0``,
       equal ``natural`` at the auxiliaries' conditional means (natural parameters are
       linear in the auxiliaries).

    :param d: a likelihood; its parameters that depend on latents only define shape and
        dtype, and the others may have any value.
    :param y: observations of its shape.
    :param key: random key for latents and auxiliaries.
    :param tolerance: relative to ``1 + |value|``; default 1e-3 in float32 and 1e-8 in
        float64.
    :raises AssertionError: if an identity fails; it names the identity and the error.
    :raises UnknownLikelihoodError: if nothing is registered for ``type(d)``.

    **Example**

    >>> import jax.numpy as jnp
    >>> import numpyro.distributions as dist
    >>> check_augmentation(dist.Bernoulli(logits=jnp.zeros(4)), jnp.array([0, 1, 1, 0]))
    """
    augmentation = lookup_augmentation(type(d))
    if augmentation is None:
        raise UnknownLikelihoodError(type(d))
    y = jnp.asarray(y)
    shapes = {name: getattr(d, name) for name in augmentation.latents}
    dtype = jnp.result_type(*shapes.values())
    if tolerance is None:
        tolerance = 1e-8 if dtype == jnp.float64 else 1e-3
    latent_key, aux_key = random.split(random.key(0) if key is None else key)
    draws = [
        {
            name: 2 * random.normal(random.fold_in(k, i), jnp.shape(x), dtype)
            for i, (name, x) in enumerate(shapes.items())
        }
        for k in random.split(latent_key, 3)
    ]
    check = _Check(augmentation, d, y, tolerance)
    check.gaussian_given_auxiliaries(draws, aux_key)
    check.below_expectation(draws)
    check.tight(draws)


class _Check(NamedTuple):
    """The checks of one likelihood; each raises if it fails."""

    augmentation: Augmentation
    d: Any
    y: Array
    tolerance: float

    def gaussian_given_auxiliaries(self, draws: list[Parameters], key: Array) -> None:
        """Check that, given auxiliaries, the joint density is a Gaussian in each
        latent."""
        augmentation, d, y, _ = self
        blocks = augmentation.gibbs_blocks(d)
        after = blocks.index(("aux",)) if ("aux",) in blocks else len(blocks)

        @partial(jax.jit, static_argnums=3)
        def left(f: Parameters, aux: Parameters, natural: Any, block: Any) -> Array:
            return self._left(f, aux, natural, block)

        for origin in draws:
            drawn = draw_auxiliaries(key, augmentation.conditional(d, y, origin))
            natural = augmentation.natural(d, y, drawn, origin)
            for i, block in enumerate(blocks):
                if block == ("aux",):
                    continue
                aux = drawn if i > after else {}
                moved = [{**origin, **{k: f[k] for k in block}} for f in draws]
                first, *others = (left(f, aux, natural, block) for f in moved)
                for other in others:
                    self._close(
                        other, first,
                        "log p(y|f) + log p(aux|y,f) - Gaussian in f depends on f",
                    )  # fmt: skip

    def _left(self, f: Parameters, aux: Parameters, natural: Any, block: Any) -> Array:
        """Return the joint log-density minus its Gaussian in a block of latents."""
        augmentation, d, y, _ = self
        left = _at(d, f).log_prob(y)
        if aux:
            for name, q in augmentation.conditional(d, y, f).items():
                distribution = q if isinstance(q, Distribution) else q(aux)
                left = left + _to_batch(distribution.log_prob(aux[name]), y)
        for k in block:
            gaussian = natural[k][0] * f[k] - 0.5 * natural[k][1] * f[k] ** 2
            axis = augmentation.latent_axis
            left = left - (gaussian if axis is None else gaussian.sum(axis))
        return left

    def below_expectation(self, draws: list[Parameters]) -> None:
        """Check that the bound is a lower bound, and that its Gaussian factors are
        proper."""

        @jax.jit
        def found(means: Parameters, variance: float) -> tuple[Array, Array, Any]:
            variances = {k: jnp.full_like(m, variance) for k, m in means.items()}
            bound = self.augmentation.bound(self.d, self.y, means, variances)
            slopes = jax.grad(self._total, 1)(means, variances)
            return bound, self._expectation(means, variances), slopes

        for means, variance in product(draws, (0.1, 4.0)):
            bound, exact, slopes = jax.device_get(found(means, variance))
            worst = np.max(bound - exact - self.tolerance * (1 + np.abs(exact)))
            require(worst <= 0, f"the bound exceeds E log p(y | f), by {worst:.3g}")
            for name, slope in slopes.items():
                least = np.min(-2 * slope)
                require(
                    least >= -self.tolerance,
                    f"the site precision of {name!r} is {least:.3g} < 0",
                )

    def tight(self, draws: list[Parameters]) -> None:
        """Check that the bound at zero variance equals the density, with the
        derivatives of ``natural``."""
        augmentation, d, y, _ = self

        @jax.jit
        def found(means: Parameters) -> tuple[Any, ...]:
            zeros = {k: jnp.zeros_like(m) for k, m in means.items()}
            bound = augmentation.bound(d, y, means, zeros)
            slopes = jax.grad(self._total, (0, 1))(means, zeros)
            average = auxiliary_means(augmentation.conditional(d, y, means))
            natural = augmentation.natural(d, y, average, means)
            return bound, _at(d, means).log_prob(y), slopes, natural

        for means in draws:
            bound, density, (by_mean, by_variance), natural = found(means)
            self._close(bound, density, "the bound is not tight as v -> 0")
            for name, (potential, precision) in natural.items():
                site = -2 * np.asarray(by_variance[name])
                moved = by_mean[name] + site * np.asarray(means[name])
                where = f"of {name!r} against natural"
                self._close(site, precision, f"site precision {where}")
                self._close(moved, potential, f"site potential {where}")

    def _total(self, means: Parameters, variances: Parameters) -> Array:
        return jnp.sum(self.augmentation.bound(self.d, self.y, means, variances))

    def _expectation(self, means: Parameters, variances: Parameters) -> Array:
        """Return the expectation: exact if registered, otherwise by quadrature over one
        latent."""
        d, y = self.d, self.y
        entry = lookup_expectation(type(d))
        if entry is not None:
            return entry.expected_log_prob(d, y, means, variances)
        nodes, weights = gauss_hermite(64, jnp.result_type(*means.values()))
        if len(means) > 1 or self.augmentation.latent_axis is not None:
            raise ValueError(
                f"{type(d).__name__} has several latents per datum: register its exact "
                "expectation (numpyro_gpaug.register_expectation) to check its bound"
            )
        ((name, m),) = means.items()
        values = m + jnp.sqrt(variances[name]) * nodes.reshape((-1,) + (1,) * m.ndim)
        densities = jax.vmap(lambda f: _at(d, {name: f}).log_prob(y))(values)
        return jnp.tensordot(weights, densities, 1)

    def _close(self, value: ArrayLike, expected: ArrayLike, what: str) -> None:
        found, right = np.asarray(value), np.asarray(expected)
        error = np.abs(found - right) / (1 + np.abs(right))
        worst, most = np.max(error), self.tolerance
        require(worst <= most, f"{what}: relative error {worst:.3g} > {most:.3g}")


def _at(d: Distribution, f: Parameters) -> Distribution:
    """Return ``d`` with replaced values of the parameters that depend on latents."""
    parameters = inspect.signature(type(d)).parameters
    given = {k: getattr(d, k) for k in parameters if k in vars(d)}
    return type(d)(**{**given, **f})


def _to_batch(density: Array, y: Array) -> Array:
    """Reduce auxiliaries to the shape of the data; their additional axes come first."""
    extra = jnp.ndim(density) - jnp.ndim(y)
    return density.sum(tuple(range(-extra, 0))) if extra > 0 else density


def require(holds: bool, message: str) -> None:
    """Raise an ``AssertionError`` unless a condition holds."""
    # Not an assert statement: it would vanish under python -O.
    if not holds:
        raise AssertionError(message)
