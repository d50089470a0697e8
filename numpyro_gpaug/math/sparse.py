# SPDX-License-Identifier: Apache-2.0
"""Sparse matrices in the form that the package uses."""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy import sparse


def canonical(X: Any) -> Any:
    """Return a CSR matrix with sorted, unique indices; ``X`` itself if it is one."""
    if X.has_canonical_format:
        return X
    X = X.copy()
    X.sum_duplicates()
    return X


def label_matrix(Y: Any, name: str) -> Any:
    """Return a sparse matrix of 0/1 as canonical CSR without stored zeros.

    :param Y: any sparse matrix, (N, K).
    :param name: its name in error messages.
    :raises TypeError: unless it is sparse.
    :raises ValueError: if an entry is neither 0 nor 1.
    """
    if not sparse.issparse(Y) or Y.ndim != 2:
        raise TypeError(
            f"{name} must be a sparse matrix (N, K) of 0/1, got {type(Y).__name__}; "
            "scipy.sparse.csr_array(dense) makes one"
        )
    Y = canonical(Y.tocsr())
    if not Y.data.all():
        Y = Y.copy()
        Y.eliminate_zeros()
    if not np.all(Y.data == 1):
        raise ValueError(
            f"{name} of shape {Y.shape} must have entries 0 and 1 only, got "
            f"{Y.data[Y.data != 1][0]}; are some entries stored twice?"
        )
    return Y
