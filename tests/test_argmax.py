# SPDX-License-Identifier: Apache-2.0
"""The probability that one of several normals is the largest."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import log_ndtr, ndtr

from numpyro_gpaug.math import argmax
from numpyro_gpaug.math.argmax import argmax_probabilities, argmax_probability
from tests.conftest import slow, slow_in_double

shares_of = jax.jit(argmax_probabilities)


def reference(m, v, y, more=()):
    """Return the probabilities of all normals, and the derivatives of normal y's in
    means and variances, by Gauss-Legendre panels between points around every mean.

    :param more: further ends of panels; then only the first 20 means get their own.
    """
    s = np.sqrt(v)
    low, high = (m - 8 * s).max(), (m + 8.5 * s).max()
    around = (m + s * np.linspace(-8.5, 8.5, 35)[:, None])[
        :, : 20 if len(more) else None
    ]
    ends = np.unique(np.clip(np.concatenate([around.ravel(), more]), low, high))
    x, w = np.polynomial.legendre.leggauss(16)
    middle, half = (ends[1:] + ends[:-1]) / 2, np.diff(ends) / 2
    z = ((middle[:, None] + half[:, None] * x).reshape(-1, 1) - m) / s
    log_cdf = log_ndtr(z)
    hazard = np.exp(-0.5 * z * z - log_cdf) / np.sqrt(2 * np.pi) / s
    mass = (half[:, None] * w).reshape(-1, 1) * np.exp(log_cdf.sum(1))[:, None] * hazard
    own = np.arange(len(m)) == y
    others = own * hazard - hazard[:, [y]]
    by_mean = (mass * (own * z / s + others)).sum(0)
    by_variance = (mass * (own * (z * z - 1) / s + others * z)).sum(0) / (2 * s)
    return mass.sum(0), by_mean, by_variance


def problems(num_classes, num):
    """Means and variances from 1e-8 to 1e4, mixed within a datum, and a class."""
    rng = np.random.default_rng(num_classes)
    for i in range(num):
        v = 10.0 ** rng.uniform(-8, 4, num_classes)
        if i % 3 == 1:
            v = 10.0 ** rng.choice([-8.0, -6.0, 4.0], num_classes)
        if i % 3 == 2:
            v = 10.0 ** rng.uniform(-8, 4) * np.exp(rng.normal(size=num_classes))
        s = np.sqrt(v)
        m = 2 * s * rng.normal(size=num_classes)
        m += 2 * rng.normal() * s[rng.integers(num_classes)]
        if i % 4 == 0:  # all means on the lower flank of the widest
            wide = v.argmax()
            m = s * rng.normal(size=num_classes) - rng.uniform(0, 6) * s[wide]
            m[wide] = 0
        yield m + (i % 2) * 1000 * rng.normal(), v, rng.integers(num_classes)


@jax.jit
def everything(m, v, y):
    """Return the probabilities of all classes, the probability of y, and its
    derivatives.
    """

    def one(m, v):
        p = argmax_probability(m, v, y)
        return p.sum(), p

    (_, p), slopes = jax.value_and_grad(one, (0, 1), has_aux=True)(m, v)
    return argmax_probabilities(m, v), p, *slopes


def check_accuracy(cases, dtype, more=()):
    m, v, y = (np.array(x) for x in zip(*cases, strict=True))
    m, v = m.astype(dtype), v.astype(dtype)
    rows = zip(m.astype(float), v.astype(float), y, strict=True)
    exact = [reference(*row, more) for row in rows]
    shares, by_mean, by_variance = (np.array(x) for x in zip(*exact, strict=True))
    np.testing.assert_allclose(shares.sum(1), 1, atol=1e-9)
    found = everything(m, v, y)
    assert all(x.dtype == dtype for x in found)
    shares_, own, *slopes = (np.asarray(x, float) for x in found)
    tolerance = {"float64": 2e-9, "float32": 5e-6}[dtype]
    np.testing.assert_allclose(shares_.sum(1), 1, atol=tolerance)
    np.testing.assert_allclose(shares_, shares, rtol=0, atol=tolerance)
    chosen = shares[np.arange(len(y)), y]
    np.testing.assert_allclose(own, chosen, rtol=0, atol=tolerance)
    # In units of the mean's standard deviation, and of relative changes of the
    # variance.
    for ours, slope, unit in zip(
        slopes, (by_mean, by_variance), (np.sqrt(v), v), strict=True
    ):
        np.testing.assert_allclose(
            ours * unit, slope * unit, rtol=0, atol=30 * tolerance
        )


@pytest.mark.parametrize(
    ("dtype", "num_classes"),
    [
        ("float32", 10),
        ("float64", 3),
        slow("float32", 2),
        slow("float32", 3),
        slow("float64", 2),
        slow("float64", 10),
    ],
    indirect=["dtype"],
)  # fmt: skip
def test_accuracy_at_every_scale(dtype, num_classes) -> None:
    check_accuracy(list(problems(num_classes, 60)), dtype)


@slow_in_double
def test_accuracy_of_many_classes(dtype) -> None:
    """Twenty classes of any scale among 980 that are alike."""
    cases = []
    for m, v, y in problems(20, 2):
        rng = np.random.default_rng(int(y))
        m = np.concatenate([m - m.mean(), rng.normal(size=980)])
        cases.append((m, np.concatenate([v, rng.uniform(0.5, 2, 980)]), y))
    check_accuracy(cases, dtype, np.linspace(-12, 12, 100))


@slow_in_double
def test_two_classes_in_closed_form(dtype) -> None:
    rng = np.random.default_rng(1)
    m = np.asarray(3 * rng.normal(size=(200, 2)), dtype)
    v = np.asarray(10.0 ** rng.uniform(-8, 4, (200, 2)), dtype)
    gap = (m[:, 0].astype(float) - m[:, 1]) / np.sqrt(v.sum(1, dtype=float))
    tolerance = {"float64": 2e-9, "float32": 5e-6}[dtype]
    p = np.asarray(shares_of(m, v))[:, 0]
    np.testing.assert_allclose(p, ndtr(gap), rtol=0, atol=tolerance)


@slow_in_double
def test_no_variance(dtype) -> None:
    """A point mass: the largest mean, ties in equal parts, and finite derivatives."""
    m = np.asarray([[0.0, 3.0, -1.0], [2.0, 2.0, 0.0], [0.0, 0.0, 0.0]], dtype)
    zero = np.zeros_like(m)
    y = np.array([1, 0, 2])
    expected = [[0, 1, 0], [0.5, 0.5, 0], [1 / 3, 1 / 3, 1 / 3]]
    some = np.asarray([0.0, 4.0, 0.0], dtype)
    tiny = np.full_like(m, 1e-30)
    for v in (zero, zero + some, zero + some[::-1], tiny):
        found = everything(m, v, y)
        assert all(np.isfinite(x).all() for x in found)
        if v is zero:
            np.testing.assert_allclose(found[0], expected, atol=1e-5)
    by_hand = everything(m, zero + some, y)[0]
    exact = [ndtr(-1.5), ndtr(1.5), 0]
    np.testing.assert_allclose(by_hand[0], exact, atol=5e-6)


def test_chunks_change_nothing(monkeypatch) -> None:
    m, v, y = (np.array(x) for x in zip(*problems(10, 60), strict=True))
    m, v = m.astype("float32"), v.astype("float32")
    whole = everything(m, v, y)
    monkeypatch.setattr(argmax, "CHUNK", 700)
    parts = jax.jit(everything.__wrapped__)(m, v, y)
    for a, b in zip(whole, parts, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-6)


def test_memory_holds_no_array_over_nodes_and_classes() -> None:
    rows, classes = 2000, 100
    m = jax.ShapeDtypeStruct((rows, classes), jnp.float32)
    y = jax.ShapeDtypeStruct((rows,), jnp.int32)
    memory = everything.lower(m, m, y).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 0.3 * 96 * rows * classes * 4
