# SPDX-License-Identifier: Apache-2.0
"""Reading multi-label data."""

from __future__ import annotations

import re
from array import array
from os import PathLike, fspath
from typing import Any, NamedTuple

import numpy as np
from scipy import sparse

from numpyro_gpaug.math.sparse import canonical, label_matrix

# Labels, or none; then features. A token starts after white space, so that "1:2:3" is
# not read as two features.
_ROW = re.compile(
    r"\s*(?:(\d+(?:,\d+)*)(?!\S))?\s*((?:(?<!\S)\d+:[^\s:_]+\s*)*)", re.ASCII
)
_SHOWN = 60
_PARTS = "data", "indices", "indptr", "shape"


class MultiLabelData(NamedTuple):
    """Inputs and labels of the same N rows.

    :param X: inputs, ``csr_array`` (N, D) of float32.
    :param Y: labels, ``csr_array`` (N, K) of 0/1 in int8. Rows without labels are kept.
    """

    X: sparse.csr_array
    Y: sparse.csr_array

    @property
    def num_unlabelled(self) -> int:
        """The number of rows without a label."""
        return int(np.count_nonzero(np.diff(self.Y.indptr) == 0))


def load_xmc(path: str | PathLike[str]) -> MultiLabelData:
    r"""Read the text format of the Extreme Classification repository.

    The first line has the numbers of rows, features and labels, ``N D K``. Each further
    line is a row, ``l1,l2 i:v i:v ...``, with labels and features counted from 0;
    either part may be missing. Repeated labels in a line count once, and values of a
    repeated feature are added.

    :param path: the file.
    :raises ValueError: for another header, a line in another form, an index out of
        range, a value that is not a finite number in float32, or another number of
        rows; the message names the file and the line.

    .. doctest::

        >>> import pathlib, tempfile
        >>> from numpyro_gpaug.multilabel import load_xmc
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = pathlib.Path(folder) / "train.txt"
        ...     _ = path.write_text("3 4 2\n0,1 0:0.5 3:1\n 2:2.0\n1 1:1\n")
        ...     data = load_xmc(path)
        >>> data.X.shape, data.Y.shape, data.num_unlabelled
        ((3, 4), (3, 2), 1)
    """
    name = fspath(path)
    with open(path, encoding="utf-8") as file:
        size, num_features, num_labels = _header(name, file.readline())
        labels, label_ends = array("q"), array("q", [0])
        features, feature_ends, values = array("q"), array("q", [0]), array("d")
        for number, line in enumerate(file, 2):
            row = _ROW.fullmatch(line)
            if row is None:
                raise _malformed(name, number, line)
            tokens = row[2].replace(":", " ").split()
            try:
                labels.extend(map(int, row[1].split(",") if row[1] else ()))
                features.extend(map(int, tokens[::2]))
                values.extend(map(float, tokens[1::2]))
            except (ValueError, OverflowError):
                raise _malformed(name, number, line) from None
            label_ends.append(len(labels))
            feature_ends.append(len(features))
    if len(label_ends) != size + 1:
        raise ValueError(
            f"{name}: the first line announces {size} rows, but {len(label_ends) - 1} "
            f"follow, to line {len(label_ends)}"
        )
    _check_lines(name, "label", labels, label_ends, num_labels)
    _check_lines(name, "feature", features, feature_ends, num_features)
    with np.errstate(over="ignore"):
        numbers = np.asarray(values).astype(np.float32)
    bad = np.flatnonzero(~np.isfinite(numbers))
    if bad.size:
        raise ValueError(
            f"{name}, line {_line(feature_ends, bad[0])}: value {values[bad[0]]} is "
            "not finite in float32"
        )
    X = _csr(numbers, features, feature_ends, (size, num_features))
    return MultiLabelData(canonical(X), _labels(labels, label_ends, (size, num_labels)))


def load_svmlight(
    path: str | PathLike[str],
    *,
    zero_based: bool,
    num_features: int | None = None,
    num_labels: int | None = None,
) -> MultiLabelData:
    r"""Read a multi-label file in svmlight format, with scikit-learn's parser.

    Lines without labels and features are skipped, as the format prescribes. Labels in
    the file are the columns of ``Y``, from 0.

    :param path: the file.
    :param zero_based: whether *features* are counted from 0; LIBSVM counts from 1.
    :param num_features: the number of features D; by default the largest that occurs,
        which may be too small for a test set.
    :param num_labels: the number of labels K; by default the largest that occurs.
    :raises ValueError: for files that scikit-learn does not read, values that are not
        finite, and labels that are not integers from 0 below ``num_labels``; the
        message names the file, and rows counted from 0.

    .. doctest::

        >>> import pathlib, tempfile
        >>> from numpyro_gpaug.multilabel import load_svmlight
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = pathlib.Path(folder) / "train.svm"
        ...     _ = path.write_text("0,1 1:0.5 4:1\n2 2:1\n")
        ...     data = load_svmlight(path, zero_based=False)
        >>> data.X.shape, data.Y.shape
        ((2, 4), (2, 3))
    """
    from sklearn.datasets import load_svmlight_file

    name = fspath(path)
    try:
        X, rows = load_svmlight_file(
            name, n_features=num_features, dtype=np.float32, multilabel=True,
            zero_based=zero_based,
        )  # fmt: skip
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    bad = np.flatnonzero(~np.isfinite(X.data))
    if bad.size:
        row = np.searchsorted(X.indptr, bad[0], "right") - 1
        raise ValueError(f"{name}: row {row} has a value that is not finite in float32")
    ends = np.cumsum([0, *map(len, rows)])
    labels = np.array([label for row in rows for label in row], float)
    limit = np.inf if num_labels is None else num_labels
    bad = np.flatnonzero((labels % 1 != 0) | (labels < 0) | (labels >= limit))
    if bad.size:
        raise ValueError(
            f"{name}: label {labels[bad[0]]:g} of row "
            f"{np.searchsorted(ends, bad[0], 'right') - 1} is not an integer from 0"
            + ("" if num_labels is None else f" below num_labels={num_labels}")
        )
    found = int(labels.max(initial=-1)) + 1
    Y = _labels(labels, ends, (len(rows), found if num_labels is None else num_labels))
    X = _csr(X.data, X.indices, X.indptr, X.shape)
    return MultiLabelData(canonical(X), Y)


def load_npz(path: str | PathLike[str], split: str) -> MultiLabelData:
    """Read the parts of CSR matrices from a NumPy archive; nothing is unpickled.

    :param path: the file, with arrays ``X_{split}_data``, ``_indices``, ``_indptr`` and
        ``_shape``, and the same of ``Y_{split}``.
    :param split: the name of the split, such as ``"train"`` or ``"test"``.
    :raises KeyError: if there is no such split.
    :raises ValueError: for different numbers of rows, indices out of range, and labels
        other than 0/1.

    .. doctest::

        >>> import pathlib, tempfile
        >>> import numpy as np, scipy.sparse
        >>> from numpyro_gpaug.multilabel import load_npz
        >>> parts = {}
        >>> for name in ("X_train", "Y_train"):
        ...     matrix = scipy.sparse.csr_array(np.eye(3))
        ...     for part in ("data", "indices", "indptr", "shape"):
        ...         parts[f"{name}_{part}"] = getattr(matrix, part)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = pathlib.Path(folder) / "data.npz"
        ...     np.savez(path, **parts)
        ...     data = load_npz(path, "train")
        >>> data.X.shape, data.Y.shape
        ((3, 3), (3, 3))
    """
    with np.load(path, allow_pickle=False) as archive:
        X, Y = (_read_csr(archive, f"{name}_{split}", path) for name in "XY")
    if X.shape[0] != Y.shape[0]:
        raise ValueError(
            f"{fspath(path)}: X_{split} has shape {X.shape} and Y_{split} {Y.shape}"
        )
    Y = label_matrix(Y, f"{fspath(path)}: Y_{split}")
    return MultiLabelData(X.astype(np.float32), Y.astype(np.int8))


def _header(name: str, line: str) -> list[int]:
    numbers = line.split()
    if len(numbers) != 3 or not all(n.isascii() and n.isdigit() for n in numbers):
        raise ValueError(
            f"{name}, line 1: expected the numbers of rows, features and labels, got "
            f"{_shown(line)}"
        )
    return [int(n) for n in numbers]


def _malformed(name: str, number: int, line: str) -> ValueError:
    return ValueError(
        f"{name}, line {number}: expected 'label,label index:value index:value ...', "
        f"got {_shown(line)}"
    )


def _shown(line: str) -> str:
    line = line.rstrip("\n")
    return repr(line if len(line) <= _SHOWN else line[:_SHOWN] + "...")


def _check_lines(name: str, what: str, indices: Any, ends: Any, limit: int) -> None:
    bad = np.flatnonzero(np.asarray(indices) >= limit)
    if bad.size:
        raise ValueError(
            f"{name}, line {_line(ends, bad[0])}: {what} {indices[bad[0]]} is out "
            f"of range: the first line announces {limit} {what}s, counted from 0"
        )


def _line(ends: Any, position: int) -> int:
    """Return the line of the row to which an entry belongs: the first row is on line
    2."""
    return int(np.searchsorted(np.asarray(ends), position, "right")) + 1


def _csr(data: Any, indices: Any, ends: Any, shape: Any) -> Any:
    # scikit-learn reads 32-bit indices only.
    small = max(len(data), *shape) <= np.iinfo(np.int32).max
    index = np.int32 if small else np.int64
    parts = data, np.asarray(indices).astype(index), np.asarray(ends).astype(index)
    return sparse.csr_array(parts, shape=shape)


def _labels(indices: Any, ends: Any, shape: Any) -> Any:
    Y = canonical(_csr(np.ones(len(indices), np.int8), indices, ends, shape))
    Y.data[:] = 1
    return Y


def _read_csr(archive: Any, name: str, path: str | PathLike[str]) -> Any:
    missing = [f"{name}_{part}" for part in _PARTS if f"{name}_{part}" not in archive]
    if missing:
        raise KeyError(f"{fspath(path)} has no {', '.join(missing)}")
    data, indices, ends, shape = (archive[f"{name}_{part}"] for part in _PARTS)
    try:
        matrix = _csr(data, indices, ends, tuple(shape.tolist()))
        matrix.check_format()
    except ValueError as error:
        raise ValueError(f"{fspath(path)}: {name}: {error}") from error
    return canonical(matrix)
