# SPDX-License-Identifier: Apache-2.0
"""Covariance functions that work on whole matrices of inputs.

Any object with ``k(X, Z) -> (N, M)`` and ``k(X) -> (N,)``, the diagonal, is a
:class:`Kernel`: the classes here, every kernel of ``tinygp``, or a plain function
lifted by :func:`as_kernel`. Hyperparameters are constrained values, whatever
:func:`numpyro.sample` or :func:`numpyro.param` returns.

Shapes are the same for every class below:

- inputs ``X (N, D)`` and ``Z (M, D)``; ``(N,)`` is read as ``(N, 1)``. Leading axes
  broadcast: ``X (N, D)`` with ``Z (C, M, D)`` gives ``(C, N, M)``;
- ``lengthscale`` is a scalar or ``(D,)`` (one per column), ``variance`` a scalar;
- for C latents at once, ``lengthscale`` is ``(C, 1)`` or ``(C, D)`` and any other
  hyperparameter ``(C,)``. Then ``k(X, Z)`` is ``(C, N, M)`` and ``k(X)`` is ``(C, N)``.

The result has the dtype of the inputs. A hyperparameter that is known when the kernel
is called (not traced) must be positive and finite.

Distances are Euclidean. This differs from ``tinygp``, whose Matern kernels default to
the L1 distance when there are several columns. Write ``k(X, X)`` with the same object
twice for an exact diagonal: above 8 columns distances come from a matrix product, which
needs only O(NM) memory but has rounding errors between equal points.

A process of one input is exact in linear time, ``GaussianProcess(..., markov=True)``,
if its kernel has a state of finite size:

============================================= ==========================================
kernel                                        numbers of a state
============================================= ==========================================
Matern12, Matern32, Matern52                  1, 2, 3
Oscillator                                    2
Constant, Cosine                              none: waves with constant weights
sums, positive factors                        the sum
products                                      the product, times 2 for each Cosine
Periodic                                      no state: :func:`cosines` approximates it
SquaredExponential, RationalQuadratic,        no state, an error
Linear, plain functions, kernels of tinygp
============================================= ==========================================

A quasi-periodic kernel is a product, ``Matern32(30.0) *
cosines(Periodic(period=7.0), 4)``: exact for the sum of cosines, which approximates the
periodic part.
"""

from ._base import Constant, Kernel, Linear, Product, Sum, as_kernel, from_function
from ._oscillating import Cosine, Oscillator, cosines
from ._stationary import (
    Matern12,
    Matern32,
    Matern52,
    Periodic,
    RationalQuadratic,
    SquaredExponential,
)

__all__ = [
    "Constant",
    "Cosine",
    "Kernel",
    "Linear",
    "Matern12",
    "Matern32",
    "Matern52",
    "Oscillator",
    "Periodic",
    "Product",
    "RationalQuadratic",
    "SquaredExponential",
    "Sum",
    "as_kernel",
    "cosines",
    "from_function",
]
