# SPDX-License-Identifier: Apache-2.0
"""Kernels against scikit-learn, brute force, and the measurements that shaped them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.gaussian_process import kernels as sk

from numpyro_gpaug.gp.kernels._base import constant_of, deviation_of
from numpyro_gpaug.kernels import (
    Constant,
    Cosine,
    Linear,
    Matern12,
    Matern32,
    Matern52,
    Oscillator,
    Periodic,
    Product,
    RationalQuadratic,
    SquaredExponential,
    Sum,
    as_kernel,
    from_function,
)
from tests.conftest import enable_x64, slow

STATIONARY = [
    SquaredExponential,
    Matern12,
    Matern32,
    Matern52,
    RationalQuadratic,
    Periodic,
]
ALL = [*STATIONARY, Linear, Constant]
# A number of columns for each form of the distance.
COLUMNS = [3, 12]


def draw(seed, *shape, dtype=np.float32):
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def brute(kernel, X, Z):
    """The formula of the docstring, pair by pair, in float64."""
    X, Z = (np.asarray(inputs, np.float64) for inputs in (X, Z))
    X, Z = (inputs[:, None] if inputs.ndim == 1 else inputs for inputs in (X, Z))
    difference = X[:, None] - Z[None]
    variance = np.float64(kernel.variance)
    if isinstance(kernel, Linear):
        return variance * X @ Z.T
    if isinstance(kernel, Constant):
        return variance * np.ones((len(X), len(Z)))
    scale = np.asarray(kernel.lengthscale, np.float64)
    r2 = np.sum((difference / scale) ** 2, -1)
    r = np.sqrt(r2)
    correlation = {
        SquaredExponential: lambda: np.exp(-r2 / 2),
        Matern12: lambda: np.exp(-r),
        Matern32: lambda: (1 + 3**0.5 * r) * np.exp(-(3**0.5) * r),
        Matern52: lambda: (1 + 5**0.5 * r + 5 * r2 / 3) * np.exp(-(5**0.5) * r),
        RationalQuadratic: lambda: (1 + r2 / (2 * kernel.alpha)) ** -kernel.alpha,
        Periodic: lambda: np.exp(
            -2
            * np.sum((np.sin(np.pi * difference / kernel.period) / scale) ** 2, axis=-1)
        ),
    }
    return variance * correlation[type(kernel)]()


@jax.jit
def evaluate(kernel, *inputs):
    """One compilation where eager evaluation has one per operation."""
    return kernel(*inputs)


@jax.jit
def evaluate_all(kernels, X, Z):
    """Return, for every kernel, covariances with other inputs and with the same object,
    and variances. One compilation computes all.
    """
    return [(kernel(X, Z), kernel(X, X), kernel(X)) for kernel in kernels]


def jaxpr_of(kernel, X, Z):
    return jax.make_jaxpr(lambda k, X, Z: k(X, Z))(kernel, X, Z)


PARITY = [
    (SquaredExponential(1.3, 2.0), 2.0 * sk.RBF(1.3)),
    (Matern12(1.3, 2.0), 2.0 * sk.Matern(1.3, nu=0.5)),
    (Matern32(1.3, 2.0), 2.0 * sk.Matern(1.3, nu=1.5)),
    (Matern52(1.3, 2.0), 2.0 * sk.Matern(1.3, nu=2.5)),
    (RationalQuadratic(1.3, 2.0, 0.7), 2.0 * sk.RationalQuadratic(1.3, 0.7)),
    (Linear(2.0), 2.0 * sk.DotProduct(0.0)),
    (Constant(2.0), sk.ConstantKernel(2.0)),
    (
        2.0 * SquaredExponential(0.8) * Linear() + Matern32(2.0) + 0.5,
        2.0 * sk.RBF(0.8) * sk.DotProduct(0.0)
        + sk.Matern(2.0, nu=1.5)
        + sk.ConstantKernel(0.5),
    ),
]


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("columns", COLUMNS)
def test_agrees_with_scikit_learn(columns):
    X, Z = draw(0, 9, columns, dtype=np.float64), draw(1, 7, columns, dtype=np.float64)
    found = evaluate_all([ours for ours, _ in PARITY], X, Z)
    for each, (ours, theirs) in zip(found, PARITY, strict=True):
        expected = theirs(X, Z), theirs(X), theirs.diag(X)
        close = {"rtol": 1e-12, "atol": 1e-12, "err_msg": repr(ours)}
        for one, other in zip(each, expected, strict=True):
            np.testing.assert_allclose(one, other, **close)


@given(
    shape=st.sampled_from([(1, 3), (6, 1), (6, 3), (6, 12)]),
    shift=st.floats(-100, 100),
    log_scale=st.floats(-3, 3),
    ratio=st.floats(0.2, 10),
)
@settings(max_examples=15, deadline=None, derandomize=True)
def test_right_and_positive_semidefinite_at_any_scale(shape, shift, log_scale, ratio):
    """Every stationary kernel in each example: a program per shape."""
    rows, columns = shape
    scale = 10.0**log_scale
    X = (scale * (draw(rows, *shape) + shift)).astype(np.float32)
    lengthscale = ratio * columns**0.5
    given_kernels = [
        Periodic(lengthscale, 2.0, period=3.0 * scale)
        if Kernel is Periodic
        else Kernel(lengthscale * scale, 2.0)
        for Kernel in STATIONARY
    ]
    found = evaluate_all(given_kernels, X, X[:1])
    for kernel, (_, K, diagonal) in zip(given_kernels, found, strict=True):
        K = np.asarray(K, np.float64)
        # Matern12 has a cusp at 0, where a rounding error of the distance counts in
        # full.
        tolerance = 2e-3 if isinstance(kernel, Matern12) else 2e-4
        np.testing.assert_allclose(K, brute(kernel, X, X), atol=tolerance)
        assert np.linalg.eigvalsh((K + K.T) / 2).min() > -1e-4 * rows
        np.testing.assert_array_equal(np.diag(K), diagonal)


@pytest.mark.parametrize(
    ("columns", "mean", "lengthscale", "tolerance"),
    [
        (20, 0.0, 20**0.5, 1e-6),
        (20, 10.0, 20**0.5, 1e-6),
        (20, 100.0, 20**0.5, 1e-6),
        (20, 0.0, 0.1 * 20**0.5, 1e-4),
        (1, 0.0, 0.05, 1e-6),
        (1, 100.0, 0.05, 1e-6),
        (8, 100.0, 0.3, 1e-6),
        (784, 0.5, 784**0.5, 2e-6),
    ],
)
def test_no_cancellation_in_single_precision(columns, mean, lengthscale, tolerance):
    X = draw(0, 100, columns) + np.float32(mean)
    Z = draw(1, 80, columns) + np.float32(mean)
    Z[:10] = X[:10]
    kernel = SquaredExponential(np.float32(lengthscale))
    ((cross, same, _),) = evaluate_all([kernel], X, Z)
    assert np.abs(cross - brute(kernel, X, Z)).max() < tolerance
    K = np.asarray(same, np.float64)
    assert np.abs(K - brute(kernel, X, X)).max() < tolerance
    assert np.linalg.eigvalsh((K + K.T) / 2).min() > -10 * tolerance


@pytest.mark.parametrize("columns", COLUMNS)
def test_gradient_is_finite_at_coincident_points(columns):
    X = draw(0, 5, columns)
    X[1] = X[0]

    def total(Kernel, X, lengthscale, per_column):
        same, equal = Kernel(lengthscale)(X, X), Kernel(per_column)(X, X + 0.0)
        return jnp.sum(jnp.sin(same) + jnp.sin(equal))

    @jax.jit
    def gradients(*at):
        return [jax.grad(total, (1, 2, 3))(Kernel, *at) for Kernel in STATIONARY]

    found = gradients(X, np.float32(0.7), np.full(columns, 0.7, np.float32))
    for Kernel, leaves in zip(STATIONARY, found, strict=True):
        assert all(np.isfinite(leaf).all() for leaf in leaves), Kernel


@pytest.mark.parametrize("columns", [1, 12])
def test_curvature_at_coincident_points(columns):
    """Minus the covariance of derivatives, which kernels of these are made of."""
    known = {
        SquaredExponential: 1, Matern32: 3, Matern52: 5 / 3, RationalQuadratic: 1,
        Periodic: (2 * np.pi) ** 2,
    }  # fmt: skip
    if columns == 1:
        known |= {Cosine: (2 * np.pi) ** 2, Oscillator: (2 * np.pi) ** 2 + 1}
    x = draw(0, columns)

    @jax.jit
    def curvatures(x):
        def of(Kernel):
            return jax.hessian(lambda y: Kernel()(y[None], x[None])[0, 0])(x)

        return list(map(of, known))

    for found, size in zip(curvatures(x), known.values(), strict=True):
        np.testing.assert_allclose(found, -size * np.eye(columns), atol=1e-4 * size)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("some", "columns"), [(ALL, 3), ([SquaredExponential, Periodic], 12)]
)
def test_gradient_agrees_with_finite_differences(some, columns):
    X, Z = (draw(i, 3, columns, dtype=np.float64) for i in (0, 1))
    every = [Kernel(variance=np.asarray(1.3)) for Kernel in some]
    scales = np.linspace(1.0, 3.0, columns) * columns**0.5
    every = [type(k)(scales, k.variance) if type(k) in STATIONARY else k for k in every]
    weights = draw(2, 3, 3, dtype=np.float64)
    start = (every, X, Z)
    direction = jax.tree.map(lambda x: draw(3, *np.shape(x), dtype=np.float64), start)

    @jax.jit
    def along(step):
        def totals(step):
            every, X, Z = jax.tree.map(lambda x, v: x + step * v, start, direction)
            return jnp.stack([jnp.sum(weights * k(X, Z)) for k in every])

        return jax.jvp(totals, (step,), (1.0,))

    step = 1e-5
    difference = (along(step)[0] - along(-step)[0]) / (2 * step)
    np.testing.assert_allclose(along(0.0)[1], difference, rtol=1e-6)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize(
    ("shape", "batched_Z"), [((None,), False), ((4, 1), True), ((4, None), False)]
)
def test_batch_of_latents_equals_a_loop(shape, batched_Z, columns):
    rng = np.random.default_rng(2)
    X = draw(0, 5, columns, dtype=np.float64)
    Z = draw(1, *(4,) * batched_Z, 3, columns, dtype=np.float64)
    shape = tuple(columns if axis is None else axis for axis in shape)
    lengthscale = columns**0.5 * rng.uniform(0.5, 2.0, shape)
    variance, other = rng.uniform(0.5, 2.0, (2, 4))
    extra = {Matern32: {}, RationalQuadratic: {"alpha": other}}
    extra[Periodic] = {"period": other}
    every = [K(lengthscale, variance, **more) for K, more in extra.items()]
    every = [kernel + Constant(variance) for kernel in every]
    assert {kernel.batch_shape for kernel in every} == {(4,)}
    found = jax.jit(lambda ks, X, Z: [(k(X, Z), k(X)) for k in ks])(every, X, Z)
    for (Kernel, more), (K, diagonal) in zip(extra.items(), found, strict=True):
        assert K.shape == (4, 5, 3)
        assert diagonal.shape == (4, 5)
        for c in range(4):
            single = Kernel(
                lengthscale[c] if len(shape) == 2 else lengthscale,
                variance[c],
                **{name: float(value[c]) for name, value in more.items()},
            )
            Z_c = Z[c] if batched_Z else Z
            expected = brute(single, X, Z_c) + variance[c]
            np.testing.assert_allclose(K[c], expected, rtol=1e-11)
            np.testing.assert_allclose(diagonal[c], 2 * variance[c], rtol=1e-12)


DEVIATING = {
    **{k.__name__: k for k in STATIONARY},
    "sum": lambda scale: Matern52(scale) + Linear(0.1) + 2.0,
    "product": lambda scale: 3.0 * SquaredExponential(scale) * Matern32(2 * scale),
    "mixed": lambda scale: Linear(0.1) * SquaredExponential(scale) + Matern32(scale),
}
SELDOM = "Matern12", "Matern52", "RationalQuadratic", "sum"


@pytest.mark.parametrize(
    "name",
    [slow(k) if k in SELDOM else k for k in DEVIATING],
)
def test_deviations_from_the_constant_do_not_cancel(name):
    """In float32, at lengthscales that leave 1e-7 to 1 of the variance; the derivative
    is the kernel's.
    """
    X, Z = draw(0, 7, 3), draw(1, 5, 3)

    def deviation(scale, X, Z):
        return deviation_of(DEVIATING[name](scale), X, Z)

    def covariance(scale, X, Z):
        return DEVIATING[name](scale)(X, Z)

    scales = np.array([0.5, 3.0, 30.0, 2000.0], np.float32)
    singles = [jax.jit(deviation)(scale, X, Z) for scale in scales]

    @jax.jit
    def in_double(*wide):
        kernel = DEVIATING[name](wide[0])
        constant = constant_of(kernel)
        own = constant + deviation_of(kernel, wide[1]), kernel(wide[1])
        slopes = [jax.jacfwd(f)(*wide) for f in (deviation, covariance)]
        double = deviation(*wide)
        return double, (constant + double, kernel(*wide[1:])), own, slopes

    with enable_x64(True):
        for scale, single in zip(scales, singles, strict=True):
            wide = (np.asarray(x, np.float64) for x in (scale, X, Z))
            double, whole, own, slopes = in_double(*wide)
            np.testing.assert_allclose(*whole, atol=1e-11)
            np.testing.assert_allclose(*own, rtol=1e-12)
            np.testing.assert_allclose(*slopes, rtol=1e-6, atol=1e-12)
            np.testing.assert_allclose(single, double, rtol=5e-5, atol=1e-10)


def test_deviations_are_rounded_as_few_times_as_can_be():
    """The squares of distances fit in float32; XLA's ``expm1`` is wrong by 5 units."""
    X, Z = np.arange(1, 257, dtype="f")[:, None] / 64, np.zeros((1, 1), "f")
    found = np.asarray(jax.jit(SquaredExponential().deviation)(X, Z), float)
    exact = np.expm1(-0.5 * np.square(X.astype(float)))
    assert np.abs(found / exact - 1).max() < 2.5 * 2.0**-24


def test_kernels_without_a_constant():
    plain = from_function(lambda X, Z: X @ Z.T)
    for kernel in (Linear(), plain, plain * SquaredExponential(), Linear() * 2.0):
        assert constant_of(kernel) is None
        X = draw(0, 4, 2)
        np.testing.assert_array_equal(deviation_of(kernel, X, X), kernel(X, X))


@pytest.mark.parametrize("kernel", [SquaredExponential(np.ones(12)), Linear()])
def test_products_keep_full_precision_on_accelerators(kernel):
    text = str(jaxpr_of(kernel, draw(0, 6, 12), draw(1, 5, 12)))
    assert text.count("precision=(Precision.HIGHEST") == text.count("dot_general[")


@pytest.mark.parametrize("per_column", [False, True])
@pytest.mark.parametrize("Kernel", [SquaredExponential, Matern32, Periodic])
def test_memory_of_the_gradient_is_not_cubic(Kernel, per_column):
    rows, columns = 200, 2000
    X, Z = draw(0, rows, columns), draw(1, rows, columns)
    lengthscale = np.full(columns if per_column else (), columns**0.5, np.float32)

    @jax.jit
    def loss(Z, lengthscale, X):
        value = jax.value_and_grad(
            lambda Z, scale: jnp.sum(jnp.sin(Kernel(scale)(X, Z))), (0, 1)
        )
        return value(Z, lengthscale)

    memory = loss.lower(Z, lengthscale, X).compile().memory_analysis()
    inputs = X.nbytes + Z.nbytes
    assert memory.temp_size_in_bytes < 8 * inputs < rows * rows * columns * 4 / 10


def test_memory_with_few_columns_is_that_of_a_few_matrices():
    X, Z = draw(0, 500, 8), draw(1, 400, 8)
    loss = jax.jit(jax.grad(lambda Z, X: jnp.sum(jnp.sin(Matern52()(X, Z)))))
    memory = loss.lower(Z, X).compile().memory_analysis()
    # Two matrices; the compiler of jaxlib 0.8 keeps eight differences as well.
    assert memory.temp_size_in_bytes < 12 * 500 * 400 * 4


@pytest.mark.parametrize("Kernel", ALL)
def test_inputs_rule_the_dtype(x64, Kernel):
    """Without implicit promotion, whatever the dtype of the hyperparameters."""
    X = draw(0, 4, 2)
    for variance in (2, 2.0, np.float64(2), jnp.asarray(2.0)):
        kernel = Kernel(variance=variance)
        kernel = kernel * 2.0 + kernel + 1.0
        for inputs in ((X.astype(int),), (X, X.astype(np.float64)), (X.astype(int), X)):
            wide = all(x.dtype != np.float32 for x in inputs[1:] or inputs)
            expected = np.float64 if wide else np.float32
            assert jax.eval_shape(kernel, *inputs).dtype == expected
        with jax.numpy_dtype_promotion("strict"):
            for wide in (X, draw(0, 4, 12)):
                for inputs in ((wide,), (wide, wide), (wide, wide[:2])):
                    assert jax.eval_shape(kernel, *inputs).dtype == np.float32


def test_inputs_without_columns():
    x, z = draw(0, 5), draw(1, 3)
    every = [Kernel(variance=1.5) for Kernel in ALL]

    @jax.jit
    def each(every, x, z):
        return [(k(x, z), k(x), k(x[:, None]), k(x[:0], z)) for k in every]

    for kernel, found in zip(every, each(every, x, z), strict=True):
        cross, diagonal, of_column, none = found
        np.testing.assert_allclose(cross, brute(kernel, x, z), rtol=1e-4)
        np.testing.assert_allclose(diagonal, of_column, rtol=1e-6)
        np.testing.assert_allclose(diagonal, np.diag(brute(kernel, x, x)), rtol=1e-6)
        assert none.shape == (0, 3)


@pytest.mark.parametrize("Kernel", [Matern32, RationalQuadratic, Linear])
def test_is_a_pytree(Kernel):
    X = draw(0, 5, 2)
    kernel = Kernel(variance=np.float32(1.5)) * 2.0
    leaves, structure = jax.tree.flatten(kernel)
    assert structure == jax.tree.structure(jax.tree.map(lambda _: object(), kernel))
    expected = 2 * brute(Kernel(variance=1.5), X, X)
    np.testing.assert_allclose(evaluate(kernel, X, X), expected, rtol=1e-5, atol=1e-6)
    stacked = jax.tree.map(lambda leaf: np.stack([leaf, 2.0 * leaf]), kernel)

    @jax.jit
    def mapped_and_gradient(stacked, kernel, X):
        both = jax.vmap(lambda k: k(X, X))(stacked)
        return both, jax.grad(lambda k: jnp.sum(k(X)))(kernel)

    both, gradient = mapped_and_gradient(stacked, kernel, X)
    np.testing.assert_allclose(both[0], expected, rtol=1e-5, atol=1e-6)
    assert jax.tree.structure(gradient) == structure
    slope = gradient.left.variance
    np.testing.assert_allclose(slope, np.trace(expected) / 1.5, rtol=1e-5)
    # Gradients and optimizer states are not valid kernels, but share their structure.
    jax.tree.map(lambda leaf: -0.0 * leaf, kernel)


def test_tree_structure_tells_kernels_apart():
    # jit finds compiled code by structure: kernels with equal structures would share
    # it.
    instances = [Kernel() for Kernel in ALL]
    instances += [Linear() + Linear(), Linear() * Linear(), as_kernel(euclidean)]
    instances += [from_function(euclidean, diag=len)]
    structures = [jax.tree.structure(kernel) for kernel in instances]
    for i, structure in enumerate(structures):
        assert [structure == other for other in structures].count(True) == 1
        assert structure == jax.tree.structure(jax.tree.map(abs, instances[i]))


def test_algebra():
    X = draw(0, 4, 2)
    k, other = SquaredExponential(), Matern12()
    assert isinstance(k + other, Sum)
    assert isinstance(k * other, Product)
    assert isinstance((k + 2).right, Constant)
    assert isinstance((2 * k).left, Constant)
    assert sum([k, other]).left is k
    K = brute(k, X, X)
    for two in (2, 2.0, np.float32(2), np.asarray(2.0), jnp.asarray(2.0)):
        for scaled in (two * k, k * two):
            np.testing.assert_allclose(evaluate(scaled, X, X), 2 * K, rtol=1e-5)
        for shifted in (two + k, k + two):
            np.testing.assert_allclose(evaluate(shifted, X), np.full(4, 3), rtol=1e-6)
    per_latent = np.arange(1.0, 4.0) * k
    assert per_latent.batch_shape == (3,)
    assert evaluate(per_latent, X, X).shape == (3, 4, 4)
    with_function = k + (lambda X, Z: X @ Z.T)
    found = evaluate(with_function, X, X)
    np.testing.assert_allclose(found, K + X @ X.T, rtol=1e-5, atol=1e-6)
    for wrong in ("2", None, [1.0]):
        with pytest.raises(TypeError, match="unsupported operand"):
            k + wrong


@pytest.mark.parametrize("value", [0.0, -1.0, np.nan, np.inf, np.array([1.0, 0.0])])
@pytest.mark.parametrize("name", ["lengthscale", "variance", "alpha"])
def test_invalid_hyperparameter(name, value):
    X = draw(0, 4, 2)
    for concrete in (value, jnp.asarray(value)):
        kernel = RationalQuadratic(**{name: concrete})
        message = f"RationalQuadratic: {name} must be positive and finite, got"
        with pytest.raises(ValueError, match=message):
            kernel(X)
        with pytest.raises(ValueError, match=message):
            jax.jit(lambda X, kernel=kernel: kernel(X, X))(X)
    jax.jit(lambda v: RationalQuadratic(**{name: v})(X))(value)


@pytest.mark.parametrize(
    ("kernel", "inputs", "message"),
    [
        (Linear(), (np.ones((4, 2)), np.ones((3, 5))), r"\(4, 2\).*\(3, 5\)"),
        (Matern12(), (np.ones(4), np.ones((3, 2))), r"\(4, 1\).*\(3, 2\)"),
        (Matern12(np.ones(3)), (np.ones((4, 2)),), r"\(3,\).*\(4, 2\)"),
        (Matern12(np.ones((2, 3))), (np.ones((4, 2)),) * 2, r"\(2, 3\).*\(4, 2\)"),
        (Matern12(variance=np.ones((4, 1))), (np.ones(4),), r"variance.*\(4, 1\)"),
        (Matern12(np.ones((2, 1, 1))), (np.ones(4),), r"lengthscale.*\(2, 1, 1\)"),
        (Matern12(), (1.0,), r"\(N, D\).*got shape \(\)"),
        (Matern12(), (np.ones((3, 0)),), r"\(N, D\).*got shape \(3, 0\)"),
    ],
)
def test_mismatched_shapes(kernel, inputs, message):
    with pytest.raises(ValueError, match=message):
        kernel(*inputs)


def euclidean(X, Z):
    return jnp.exp(-jnp.sum((X[:, None] - Z) ** 2, -1) / 2)


@pytest.mark.parametrize(
    "function",
    [
        euclidean,
        jax.jit(euclidean),
        functools.partial(lambda X, Z, scale: euclidean(scale * X, Z), scale=1.0),
        functools.wraps(euclidean)(lambda *inputs: euclidean(*inputs)),
    ],
)
def test_functions_are_lifted(function):
    X, Z = draw(0, 5, 2), draw(1, 3, 2)
    kernel, batch = as_kernel(function), draw(2, 4, 3, 2)
    assert as_kernel(kernel) is kernel
    assert not jax.tree.leaves(kernel)

    @jax.jit
    def each(X, Z, batch):
        return kernel(X, Z), kernel(X, batch), kernel(X), kernel(batch)

    cross, with_batch, diagonal, of_batch = each(X, Z, batch)
    formula = functools.partial(brute, SquaredExponential())
    np.testing.assert_allclose(cross, formula(X, Z), rtol=1e-5)
    expected = np.stack([formula(X, Z_c) for Z_c in batch])
    np.testing.assert_allclose(with_batch, expected, rtol=1e-5)
    np.testing.assert_allclose(diagonal, np.ones(5), rtol=1e-5)
    np.testing.assert_allclose(of_batch, np.ones((4, 3)), rtol=1e-5)


def test_function_of_inputs_without_columns():
    x = draw(0, 5)
    kernel = as_kernel(lambda x, z: jnp.exp(-jnp.square(x[:, None] - z)))
    assert kernel(x, x[:2]).shape == (5, 2)
    np.testing.assert_array_equal(kernel(x), np.ones(5))


def test_function_with_its_own_diagonal():
    kernel = from_function(euclidean, diag=lambda X: 2 * jnp.ones(len(X)))
    np.testing.assert_array_equal(kernel(draw(0, 5, 2)), 2 * np.ones(5))


def test_function_of_the_wrong_shape():
    X = draw(0, 5, 2)
    with pytest.raises(ValueError, match=r"shape \(5, 3, 2\), expected \(5, 3\)"):
        as_kernel(lambda X, Z: X[:, None] - Z)(X, X[:3])
    with pytest.raises(ValueError, match=r"returned shape \(\), expected \(5,\)"):
        from_function(euclidean, diag=jnp.sum)(X)


@pytest.mark.parametrize("wrong", [None, 1.0, "rbf", SquaredExponential, np.ones(3)])
def test_not_a_kernel(wrong):
    with pytest.raises(TypeError, match="expected a kernel instance, callable as"):
        as_kernel(wrong)


def test_tinygp_kernels_are_kernels():
    tk = pytest.importorskip("tinygp").kernels
    X, Z = draw(0, 5, 1), draw(1, 3, 1)
    pairs = [
        (tk.Matern32(0.7), Matern32(0.7)),
        (
            2.0 * tk.ExpSquared() + tk.Matern32(),
            2.0 * SquaredExponential() + Matern32(),
        ),
    ]

    @jax.jit
    def everything(X, Z):
        mixed = Linear() + tk.ExpSquared(0.7)
        parts = Linear()(X, Z), tk.ExpSquared(0.7)(X, Z)
        found = [(k(X, Z), k(X)) for pair in pairs for k in pair]
        return found, (mixed(X, Z), *parts)

    found, (mixed, *parts) = everything(X, Z)
    for theirs, ours in zip(found[::2], found[1::2], strict=True):
        assert theirs[1].shape == (5,)
        np.testing.assert_allclose(theirs[0], ours[0], rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(theirs[1], ours[1], rtol=1e-5)
    np.testing.assert_allclose(mixed, sum(parts), rtol=1e-5, atol=1e-6)
    assert all(as_kernel(theirs) is theirs for theirs, _ in pairs)
    assert (Linear() + tk.ExpSquared(0.7)).batch_shape == ()
