# SPDX-License-Identifier: Apache-2.0
"""Jitter, factors and natural parameters."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from numpyro_gpaug import kernels
from numpyro_gpaug.gaussians.dense import (
    AffineMap,
    Moments,
)
from numpyro_gpaug.math import small
from numpyro_gpaug.math.linalg import (
    cholesky,
    default_jitter,
    inverse_cholesky,
    inverse_lower,
    solve_lower,
    with_jitter,
)
from numpyro_gpaug.model.jaxpr import dependence_tree
from tests.conftest import assert_close


def _crowded(size: int, dim: int, dtype: type):
    return np.random.default_rng(size + dim).normal(size=(size, dim)).astype(dtype)


@partial(jax.jit, static_argnums=2)
def factors(some_kernels, inputs, jitter):
    """Cholesky factors of the kernels' matrices at the inputs."""
    grams = [kernel(inputs, inputs) for kernel in some_kernels]
    return [cholesky(with_jitter(gram, jitter)) for gram in grams]


@pytest.mark.parametrize("size", [20, 100, 500])
def test_default_jitter_factorises_crowded_inputs(size: int) -> None:
    jitter = default_jitter(size, jnp.float32)
    for dim in (1, 5):
        inputs = _crowded(size, dim, np.float32)
        for lengthscale in np.array([0.3, 3.0, 100.0], np.float32):
            some = [
                kernels.SquaredExponential(lengthscale), kernels.Matern52(lengthscale),
            ]  # fmt: skip
            for factor, kernel in zip(factors(some, inputs, jitter), some, strict=True):
                assert np.isfinite(factor).all(), (dim, type(kernel), lengthscale)


def test_default_jitter_float64(x64) -> None:
    inputs, kernel = _crowded(300, 1, np.float64), kernels.SquaredExponential(3.0)
    (without,) = factors([kernel], inputs, 0.0)
    assert np.isnan(without).any()
    (factor,) = factors([kernel], inputs, default_jitter(300, jnp.float64))
    assert np.isfinite(factor).all()


def test_jitter_is_relative_to_the_diagonal() -> None:
    factor = jax.jit(lambda m: cholesky(with_jitter(m, 1e-2)))(1e6 * np.eye(3))
    np.testing.assert_allclose(factor, np.sqrt(1.01e6) * np.eye(3), rtol=1e-6)


@pytest.mark.parametrize(
    "name", ["cholesky", "inverse_lower", "inverse_cholesky", "solve", "transposed"]
)
def test_derivatives_are_those_of_jax(name, x64) -> None:
    rng = np.random.default_rng(0)
    root, rhs = rng.normal(size=(2, 3, 4, 4)), rng.normal(size=(2, 3, 4, 2))
    matrices = jnp.asarray(root[0] @ root[0].mT + np.eye(4))
    lower = jnp.tril(jnp.asarray(root[1])) + 3 * jnp.eye(4)
    solve = lax.linalg.triangular_solve
    ours, theirs, at = {
        "cholesky": (cholesky, jnp.linalg.cholesky, (matrices,)),
        "inverse_lower": (inverse_lower, jnp.linalg.inv, (lower,)),
        "inverse_cholesky": (
            inverse_cholesky,
            lambda K: jnp.linalg.inv(jnp.linalg.cholesky(K)),
            (matrices,),
        ),
        "solve": (
            solve_lower,
            partial(solve, left_side=True, lower=True),
            (lower, jnp.asarray(rhs[0])),
        ),
        "transposed": (
            partial(solve_lower, transpose=True),
            partial(solve, left_side=True, lower=True, transpose_a=True),
            (lower, jnp.asarray(rhs[0])),
        ),
    }[name]

    def slopes(function, vectorised):
        of_each = jax.vmap(function) if vectorised else function

        def value(*at):
            found = of_each(*at)
            return (jnp.sin(found) * jnp.arange(found.size).reshape(found.shape)).sum()

        symmetric = "cholesky" in name
        gradient = jax.grad(value, tuple(range(len(at))))(*at)
        return [g + g.mT if symmetric else g for g in gradient]

    ways = (theirs, False), (ours, False), (ours, True)
    expected, *both = jax.jit(lambda: [slopes(*way) for way in ways])()
    for each in both:
        for found, right in zip(each, expected, strict=True):
            if found.shape[-1] == 4:
                found, right = jnp.tril(found), jnp.tril(right)
            np.testing.assert_allclose(found, right, rtol=1e-8, atol=1e-10)


def test_slopes_of_marginals_at_a_gaussian_that_rests():
    """They are written down; where the Gaussian moves too, or alone, they are JAX's."""
    rng = np.random.default_rng(3)
    A, offset, mean, slopes = (
        jnp.asarray(rng.normal(size=shape), jnp.float32)
        for shape in ((1, 3, 5), (2, 5), (2, 3), (2, 2, 5))
    )
    whitener = jnp.tril(jnp.asarray(rng.normal(size=(2, 3, 3)), jnp.float32))

    def written(A, mean, whitener):
        map_ = AffineMap(offset, A, offset**2)
        at = map_.marginals(Moments(mean, whitener))
        return (slopes[0] * at.mean + slopes[1] * at.variance).sum()

    def plain(A, mean, whitener):
        covariance = whitener.mT @ whitener
        shift = jnp.einsum("lm,bmn->ln", mean, A)
        spread = jnp.einsum("bmn,lmk,bkn->ln", A, covariance, A)
        at = offset + shift, offset**2 + spread
        return (slopes[0] * at[0] + slopes[1] * at[1]).sum()

    for moved in (0, (1, 2), (0, 1, 2)):
        found, expected = (
            jax.jit(jax.value_and_grad(f, moved))(A, mean, whitener)
            for f in (written, plain)
        )
        for one, other in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def test_products_of_small_matrices() -> None:
    """With their derivatives, along any mapped axes, and as programs are read."""
    rng = np.random.default_rng(0)
    left, right, one = (
        jnp.asarray(rng.normal(size=size)) for size in ((7, 4, 5), (7, 5, 3), (5, 3))
    )

    def of(multiply: Any) -> Any:
        def found(left: Any, right: Any) -> Any:
            return jnp.sin(multiply(left, right)).sum()

        mapped = jax.vmap(multiply, (0, None)), jax.vmap(multiply, (1, 2), 1)
        across = jnp.moveaxis(left, 0, 1), jnp.moveaxis(right, 0, 2)
        return (
            multiply(left, right), multiply(left, one), mapped[0](left, one),
            mapped[1](*across), jax.grad(found, (0, 1))(left, right),
            jax.grad(found, 1)(left, one), jax.hessian(found, 1)(left, one),
            jax.jvp(found, (left, right), (jnp.ones_like(left), right)),
        )  # fmt: skip

    compiled = jax.jit(of, static_argnums=0)
    pairs = (jax.tree.leaves(compiled(x)) for x in (small.product, jnp.matmul))
    for ours, expected in zip(*pairs, strict=True):
        assert_close(ours, expected)
    both = jnp.arange(10.0).reshape(2, 5), jnp.ones((5, 4))
    state = dependence_tree(lambda at: small.product(at["x"], both[1]), {"x": both[0]})
    assert state.state["x"].affine
