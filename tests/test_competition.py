"""Steps of competing classes: the curvature of a softmax, and its linear systems."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_gpaug.math import blocks, log_sum
from numpyro_gpaug.math.competition import edge_roots, laplacian_product
from numpyro_gpaug.math.gumbel import expected_log_sum_exp
from numpyro_gpaug.math.linalg import conjugate_gradients


def drawn(classes: int, num: int = 20_000):
    """Means and variances, and the expected curvature by draws."""
    rng = np.random.default_rng(classes)
    m, v = 2 * rng.normal(size=classes), rng.gamma(2, 0.5, classes)
    p = np.asarray(jax.nn.softmax(m + np.sqrt(v) * rng.normal(size=(num, classes)), -1))
    return m, v, np.diag(p.mean(0)) - p.T @ p / num


def curvature(m, v, precision) -> np.ndarray:
    a = edge_roots(*(jnp.asarray(x, "float32") for x in (m, v, precision)))
    columns = [laplacian_product(a, e) for e in jnp.eye(len(m))]
    return np.asarray(columns, float)


def test_the_curvature_of_two_classes_is_exact() -> None:
    m, v, exact = drawn(2)
    np.testing.assert_allclose(curvature(m, v, np.diag(exact)), exact, rtol=1e-5)


@pytest.mark.parametrize("classes", [3, 12])
def test_the_curvature_of_many_classes(classes: int) -> None:
    m, v, exact = drawn(classes)
    found = curvature(m, v, np.diag(exact))
    scale = np.sqrt(np.diag(exact))
    error = (found - exact) / np.outer(scale, scale)
    assert np.abs(np.linalg.eigvalsh(error)).max() < 0.15
    # Common moves of all classes change nothing.
    np.testing.assert_allclose(found.sum(0), 0, atol=1e-6)


def test_data_without_information_have_no_curvature() -> None:
    """Such data are masked ones, and impossible classes."""
    m = jnp.array([[0.0, 1.0, 2.0], [0.0, -500.0, 0.0]])
    w = jnp.array([[0.0, 0.0, -1e-9], [0.25, 0.0, 0.25]])
    a = edge_roots(m, jnp.ones_like(m), w)
    np.testing.assert_allclose(a[0], 0, atol=1e-8)
    np.testing.assert_allclose(a[1], [0.5, 0, 0.5], atol=1e-6)


def test_conjugate_gradients() -> None:
    rng = np.random.default_rng(0)
    root = rng.normal(size=(6, 9)).astype("float32")
    matrix, right = root @ root.T, rng.normal(size=6).astype("float32")

    def apply(x):
        found = matrix @ jnp.concatenate([x["a"], x["b"]])
        return {"a": found[:2], "b": found[2:]}

    given = {"a": right[:2], "b": right[2:]}
    found, _ = jax.jit(lambda x: conjugate_gradients(apply, x))(given)
    flat = np.concatenate([found["a"], found["b"]])
    left = right - matrix @ flat
    assert np.linalg.norm(left) <= 0.03 * np.linalg.norm(right)


def test_rows_take_the_rule_that_they_need(monkeypatch) -> None:
    """Rows with wide latents share blocks, and keep their places. Where a wide latent
    is far below the others the lattice has it."""
    monkeypatch.setattr(blocks, "WHOLE", 2**10)
    monkeypatch.setattr(blocks, "BLOCK", 2**12)
    rng = np.random.default_rng(0)
    m = rng.normal(size=(12, 3)).astype("float32")
    v = np.ones_like(m)
    v[::3, 1] = 60.0
    m[6:, 1] = -70.0

    @jax.jit
    def found(m, v):
        def total(m, v):
            value = log_sum.expected_log_sum(log_sum.EXPONENTIAL, m, v)
            return value.sum(), value

        (_, value), slopes = jax.value_and_grad(total, (0, 1), has_aux=True)(m, v)
        return value, *slopes

    lattice = log_sum._centred(log_sum.EXPONENTIAL, m)[1]
    wide = np.flatnonzero(log_sum._outside(log_sum.EXPONENTIAL, lattice, v))
    np.testing.assert_array_equal(wide, [0, 3])
    expected = expected_log_sum_exp(m, v, slopes=True)
    for one, other in zip(found(m, v), expected, strict=True):
        np.testing.assert_allclose(one, other, atol=3e-5)
