# SPDX-License-Identifier: Apache-2.0
"""The kernel protocol, its algebra, and the kernels that need no distance."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import numbers
import operator
from abc import abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, Protocol, cast, dataclass_transform

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from numpyro_gpaug._display import brief, name_of

# Reading a larger array back to check it would stall asynchronous dispatch.
_CHECKED_SIZE = 4096

# Reduced-precision products (TF32 on GPU, bfloat16 on TPU) would swamp the difference
# of squared norms and inner products.
matmul = functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)


@dataclass_transform(frozen_default=True, eq_default=False)
def pytree(cls: type[Any]) -> Any:
    """Make ``cls`` a frozen dataclass whose fields are leaves, unless static."""
    # Not register_dataclass: its tree structures compare equal between classes with
    # the same fields (JAX 0.10 and 0.12), so that jit may run another class's code.
    cls = dataclasses.dataclass(frozen=True, eq=False, repr=False)(cls)
    static: list[str] = []
    dynamic: list[str] = []
    for field in dataclasses.fields(cls):
        (static if field.metadata.get("static") else dynamic).append(field.name)

    def flatten_with_keys(obj: Any) -> tuple:
        children = [(jax.tree_util.GetAttrKey(n), getattr(obj, n)) for n in dynamic]
        return children, tuple(getattr(obj, n) for n in static)

    def unflatten(metadata: tuple, children: Iterable) -> Any:
        fields = zip(static + dynamic, (*metadata, *children), strict=True)
        return cls(**dict(fields))

    jax.tree_util.register_pytree_with_keys(cls, flatten_with_keys, unflatten)
    return cls


class Kernel(Protocol):
    """The protocol of a covariance function; no base class is needed."""

    def __call__(self, X: Any, Z: Any = None, /) -> jax.Array:
        """Return the matrix ``k(X, Z)``, ``(N, M)``, or the diagonal of ``k(X, X)``,
        ``(N,)``."""
        ...


def as_kernel(obj: Any) -> Kernel:
    """Return ``obj`` as a :class:`Kernel`.

    :param obj: a kernel, returned unchanged, or a plain function
        ``k(X, Z) -> (N, M)``, lifted by :func:`from_function`.
    :raises TypeError: if ``obj`` is neither.

    .. doctest::

        >>> import jax.numpy as jnp
        >>> from numpyro_gpaug.kernels import as_kernel
        >>> k = as_kernel(lambda X, Z: X @ Z.T)
        >>> print(k(jnp.ones((3, 2))))
        [2. 2. 2.]
    """
    # jit and functools.wraps hide the function they wrap behind a callable object.
    if inspect.isroutine(inspect.unwrap(obj)) or isinstance(obj, functools.partial):
        return from_function(obj)
    if inspect.isclass(obj) or not callable(obj):
        raise TypeError(
            "expected a kernel instance, callable as k(X, Z) -> (N, M) and as "
            f"k(X) -> (N,), or a function k(X, Z) -> (N, M); got {obj!r}"
        )
    return obj


def from_function(
    fn: Callable[[Any, Any], jax.Array], diag: Callable[[Any], jax.Array] | None = None
) -> Kernel:
    """Lift a plain function to a :class:`Kernel`.

    The function receives the inputs unchanged.

    :param fn: ``fn(X, Z) -> (N, M)``.
    :param diag: ``diag(X) -> (N,)``; by default ``fn`` is evaluated row by row.

    .. doctest::

        >>> import jax.numpy as jnp
        >>> from numpyro_gpaug.kernels import from_function
        >>> k = from_function(lambda X, Z: jnp.exp(-jnp.abs(X[:, None] - Z)))
        >>> X = jnp.arange(3.0)
        >>> k(X, X).shape, k(X).shape
        ((3, 3), (3,))
    """
    return _Function(fn, diag)


class _Algebra:
    """Sums and products with kernels, functions and scalars."""

    # Makes NumPy arrays and scalars on the left defer to the methods below.
    __array_ufunc__ = None

    def __add__(self, other: Any) -> Sum:
        return _combine(Sum, self, other)

    def __radd__(self, other: Any) -> Any:
        # The builtin sum starts from 0, which is not a valid variance.
        if isinstance(other, numbers.Real) and other == 0:
            return self
        return _combine(Sum, other, self)

    def __mul__(self, other: Any) -> Product:
        return _combine(Product, self, other)

    def __rmul__(self, other: Any) -> Product:
        return _combine(Product, other, self)


@pytree
class _Function(_Algebra):
    fn: Callable = dataclasses.field(metadata={"static": True})
    diag: Callable | None = dataclasses.field(metadata={"static": True})

    def __call__(self, X: jax.Array, Z: jax.Array | None = None) -> jax.Array:
        inputs = (X,) if Z is None else (X, Z)
        fn = self.fn if Z is not None else self.diag or self._row_by_row
        if max(map(jnp.ndim, inputs)) > 2:
            signature = "(n,d)->(n)" if Z is None else "(n,d),(m,d)->(n,m)"
            return jnp.vectorize(fn, signature=signature)(*inputs)
        result = fn(*inputs)
        expected = tuple(np.shape(rows)[0] for rows in inputs)
        if jnp.shape(result) != expected:
            raise ValueError(
                f"kernel function {self.fn!r} returned shape {jnp.shape(result)}, "
                f"expected {expected}"
            )
        return result

    def __repr__(self) -> str:
        return f"as_kernel({name_of(self.fn)})"

    def _row_by_row(self, X: jax.Array) -> jax.Array:
        return jax.vmap(lambda x: self.fn(x[None], x[None])[0, 0])(jnp.asarray(X))


def constant_of(kernel: Any) -> Any:
    """Return the constant of a kernel, scalar or (C,), which is common to all
    covariances, or ``None``. Covariances are computed as differences from it."""
    return getattr(kernel, "constant", None) if isinstance(kernel, _Algebra) else None


def has_constants(kernel: Any) -> bool:
    """Whether a kernel has a constant, and so do all kernels that it consists of."""
    if isinstance(kernel, _Pair):
        return has_constants(kernel.left) and has_constants(kernel.right)
    return constant_of(kernel) is not None


def deviation_of(kernel: Any, *inputs: ArrayLike) -> jax.Array:
    """Return ``k(X, Z)`` or ``k(X)`` minus :func:`constant_of`, without
    cancellation."""
    return kernel(*inputs) if constant_of(kernel) is None else kernel.deviation(*inputs)


class Matrix(_Algebra):
    """Checks and shapes around ``_covariance`` and ``_diagonal`` of a subclass."""

    @abstractmethod
    def _covariance(self, X: jax.Array, Z: jax.Array, same: bool) -> jax.Array: ...

    def _diagonal(self, X: jax.Array) -> jax.Array:
        return self._value("variance", X.dtype)[..., None]

    @property
    def batch_shape(self) -> tuple[int, ...]:
        """``(C,)`` for hyperparameters of C latents, otherwise ``()``."""
        shapes = (
            np.shape(value)[:-1] if name == "lengthscale" else np.shape(value)
            for name, value in self._hyperparameters()
        )
        return jnp.broadcast_shapes(*shapes)

    def __call__(self, X: ArrayLike, Z: ArrayLike | None = None) -> jax.Array:
        return self._at(X, Z, self._covariance, self._diagonal)

    def _at(
        self,
        X: ArrayLike,
        Z: ArrayLike | None,
        of_pairs: Callable[..., jax.Array],
        of_rows: Callable[[jax.Array], jax.Array],
    ) -> jax.Array:
        for name, value in self._hyperparameters():
            _check(type(self).__name__, name, value)
        # Compared before the conversion, which makes new objects.
        same = X is Z
        if Z is None:
            (X,) = _inputs(X)
            self._check_columns(X)
            shape = jnp.broadcast_shapes((*self.batch_shape, 1), X.shape[:-1])
            return jnp.broadcast_to(of_rows(X), shape)
        X, Z = _inputs(X, Z)
        if X.shape[-1] != Z.shape[-1]:
            raise ValueError(
                "inputs differ in their number of columns: "
                f"X has shape {X.shape} and Z has shape {Z.shape}"
            )
        self._check_columns(X)
        rows, columns = (*X.shape[:-1], 1), (*Z.shape[:-2], 1, Z.shape[-2])
        shape = jnp.broadcast_shapes((*self.batch_shape, 1, 1), rows, columns)
        return jnp.broadcast_to(of_pairs(X, Z, same), shape)

    def _hyperparameters(self) -> list[tuple[str, Any]]:
        names = (f.name for f in dataclasses.fields(cast(Any, self)))
        return [(name, getattr(self, name)) for name in names]

    def __repr__(self) -> str:
        given = (f"{name}={brief(value)}" for name, value in self._hyperparameters())
        return f"{type(self).__name__}({', '.join(given)})"

    def _check_columns(self, X: jax.Array) -> None:
        """Raise if a hyperparameter does not fit the columns of ``X``."""

    def _value(self, name: str, dtype: Any) -> jax.Array:
        return jnp.asarray(getattr(self, name), dtype)

    def _over_pairs(self, name: str, dtype: Any) -> jax.Array:
        return self._value(name, dtype)[..., None, None]


@pytree
class Constant(Matrix):
    r"""Constant functions; a scalar that is added to or multiplied with a kernel
    becomes one.

    .. math:: k(x, z) = \sigma^2

    :param variance: :math:`\sigma^2`, scalar or ``(C,)``.

    .. doctest::

        >>> import jax.numpy as jnp
        >>> from numpyro_gpaug.kernels import Constant
        >>> print(Constant(2.0)(jnp.zeros((3, 1))))
        [2. 2. 2.]
    """

    variance: ArrayLike = 1.0

    @property
    def constant(self) -> ArrayLike:
        """The variance: :meth:`deviation` is 0."""
        return self.variance

    def deviation(self, *inputs: ArrayLike) -> jax.Array:
        """Return ``k(X, Z)`` or ``k(X)`` minus :attr:`constant`."""
        return jnp.zeros_like(self(*inputs))

    def _covariance(self, X: jax.Array, Z: jax.Array, same: bool) -> jax.Array:
        del Z, same
        return self._over_pairs("variance", X.dtype)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class _Pair(_Algebra):
    left: Kernel
    right: Kernel
    _join: ClassVar[Any]

    @property
    def batch_shape(self) -> tuple[int, ...]:
        """``(C,)`` if either part has hyperparameters of C latents, otherwise
        ``()``."""
        parts = self.left, self.right
        return jnp.broadcast_shapes(*(getattr(k, "batch_shape", ()) for k in parts))

    def __call__(self, X: ArrayLike, Z: ArrayLike | None = None) -> jax.Array:
        inputs = (X,) if Z is None else (X, Z)
        return self._join(self.left(*inputs), self.right(*inputs))

    def __repr__(self) -> str:
        parts = self.left, self.right
        if type(self) is Sum:
            return " + ".join(map(repr, parts))
        return " * ".join(f"({k!r})" if type(k) is Sum else repr(k) for k in parts)


@pytree
class Sum(_Pair):
    r"""The sum of two independent functions; also written ``left + right``.

    .. math:: k(x, z) = k_1(x, z) + k_2(x, z)

    :param left: a :class:`Kernel`.
    :param right: a :class:`Kernel`.

    .. doctest::

        >>> import jax.numpy as jnp
        >>> from numpyro_gpaug.kernels import Matern32, SquaredExponential
        >>> k = SquaredExponential(variance=2.0) + Matern32(variance=jnp.ones(4))
        >>> k.batch_shape, k(jnp.zeros((3, 1))).shape
        ((4,), (4, 3))
    """

    _join = staticmethod(operator.add)

    @property
    def constant(self) -> Any:
        """The sum of the constants of the parts, or the only constant."""
        known = [c for c in map(constant_of, (self.left, self.right)) if c is not None]
        return sum(map(jnp.asarray, known)) if known else None

    def deviation(self, *inputs: ArrayLike) -> jax.Array:
        """Return ``k(X, Z)`` or ``k(X)`` minus :attr:`constant`."""
        return deviation_of(self.left, *inputs) + deviation_of(self.right, *inputs)


@pytree
class Product(_Pair):
    r"""The product of two covariance functions; also written ``left * right``.

    .. math:: k(x, z) = k_1(x, z) \, k_2(x, z)

    :param left: a :class:`Kernel`.
    :param right: a :class:`Kernel`.

    .. doctest::

        >>> import jax.numpy as jnp
        >>> from numpyro_gpaug.kernels import Periodic, SquaredExponential
        >>> k = 2.0 * Periodic(period=7.0) * SquaredExponential(lengthscale=30.0)
        >>> print(k(jnp.zeros(3)))
        [2. 2. 2.]
    """

    _join = staticmethod(operator.mul)

    @property
    def constant(self) -> Any:
        """The product of the constants of the parts, if both have one."""
        left, right = map(constant_of, (self.left, self.right))
        known = left is not None and right is not None
        return jnp.asarray(left) * jnp.asarray(right) if known else None

    def deviation(self, *inputs: ArrayLike) -> jax.Array:
        """Return ``k(X, Z)`` or ``k(X)`` minus :attr:`constant`."""
        parts = self.left, self.right
        left, right = (deviation_of(k, *inputs) for k in parts)
        axes = (None,) * len(inputs)
        first, second = (
            jnp.asarray(constant_of(k), left.dtype)[(..., *axes)] for k in parts
        )
        return first * right + second * left + left * right


def _combine(kind: type, *parts: Any) -> Any:
    kernels: list[Kernel] = []
    for part in parts:
        if isinstance(part, numbers.Real | np.ndarray | jax.Array):
            kernels.append(Constant(cast(ArrayLike, part)))
        elif callable(part):
            kernels.append(as_kernel(part))
        else:
            return NotImplemented
    return kind(*kernels)


def _check(kernel: str, name: str, value: Any) -> None:
    largest = 2 if name == "lengthscale" else 1
    if np.ndim(value) > largest:
        raise ValueError(
            f"{kernel}: {name} has shape {np.shape(value)}; "
            f"at most {largest} axes are expected"
        )
    if isinstance(value, jax.core.Tracer) or np.size(value) > _CHECKED_SIZE:
        return
    if not np.all(np.isfinite(value) & (np.asarray(value) > 0)):
        raise ValueError(f"{kernel}: {name} must be positive and finite, got {value}")


def _inputs(*inputs: Any) -> list[jax.Array]:
    arrays = [jnp.asarray(X) for X in inputs]
    dtype = jnp.result_type(*arrays)
    if not jnp.issubdtype(dtype, jnp.floating):
        dtype = jnp.result_type(float)
    for X in arrays:
        if X.ndim == 0 or (X.ndim > 1 and X.shape[-1] == 0):
            raise ValueError(f"inputs must be (N, D) or (N,), got shape {X.shape}")
    return [(X[:, None] if X.ndim == 1 else X).astype(dtype) for X in arrays]


@pytree
class Linear(Matrix):
    r"""Linear functions through the origin.

    .. math:: k(x, z) = \sigma^2 \sum_d x_d z_d

    In float32, inputs far from 0 (years) leave no digits for what is not linear: centre
    them, or add weights to the process, ``f(X) + X @ w``, which have no such error.

    :param variance: :math:`\sigma^2`, scalar or ``(C,)``.

    .. doctest::

        >>> import jax.numpy as jnp
        >>> from numpyro_gpaug.kernels import Linear
        >>> print((Linear(2.0) + 1.0)(jnp.array([1.0, 2.0])))
        [3. 9.]
    """

    variance: ArrayLike = 1.0

    def _covariance(self, X: jax.Array, Z: jax.Array, same: bool) -> jax.Array:
        del same
        product = matmul(X, Z.mT)
        return self._over_pairs("variance", X.dtype) * product

    def _diagonal(self, X: jax.Array) -> jax.Array:
        squared = jnp.sum(jnp.square(X), -1)
        return self._value("variance", X.dtype)[..., None] * squared
