# SPDX-License-Identifier: Apache-2.0
"""Choosing inducing inputs.

Every function takes the training inputs ``X (N, D)``, where ``(N,)`` is read as
``(N, 1)``, and returns ``Z (num_inducing, D)``: distinct rows, in the dtype that JAX
gives ``X``. Pass ``Z`` to the Gaussian process directly, or as the initial value of a
:func:`numpyro.param` to learn it. The same seed gives the same ``Z``.

:func:`kmeans` is a good default. :func:`greedy` uses the kernel, and chooses the row
with the largest remaining variance. :func:`gmm` suits clusters of unequal width, and
:func:`random` costs nothing.

:class:`Subspace` is for inputs of many columns, dense or sparse: it restricts inducing
inputs to the span of a few directions, with few coordinates to learn.
"""

from ._choice import gmm, greedy, kmeans, random
from ._subspace import Subspace

__all__ = ["Subspace", "gmm", "greedy", "kmeans", "random"]
