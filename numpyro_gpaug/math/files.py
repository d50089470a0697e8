# SPDX-License-Identifier: Apache-2.0
"""Files of plain arrays and one JSON text, the header; nothing is pickled."""

from __future__ import annotations

import json
import os
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from enum import Enum
from os import PathLike
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints
from uuid import uuid4

import numpy as np

from numpyro_gpaug.errors import ArchiveError

try:
    import fcntl
except ImportError:  # Windows, where open files cannot be removed
    fcntl = None  # type: ignore[assignment]

_TEMPORARY = ".numpyro_gpaug-{}.tmp"


def write(
    path: str | PathLike[str], arrays: dict[str, np.ndarray], header: dict[str, Any]
) -> None:
    """Write arrays and a header. A reader of ``path`` finds the previous file until the
    write is complete, and also if it fails.

    :param path: the file.
    :param arrays: plain arrays by name, other than ``meta`` and ``checksum``.
    :param header: an object that JSON can write.
    """
    # If the path is a link, its target is replaced, not the link.
    target = Path(path).resolve()
    if not target.parent.is_dir():
        raise FileNotFoundError(f"{path}: there is no folder {target.parent}")
    if target.is_dir():
        raise IsADirectoryError(f"{path} is a folder: pass the path of a file")
    _remove_abandoned(target.parent)
    text = json.dumps(header)
    checksum = _checksum(text, arrays)
    members: dict[str, Any] = {"meta": text, "checksum": checksum, **arrays}
    while True:
        temporary = target.with_name(_TEMPORARY.format(uuid4().hex))
        try:
            with open(temporary, "xb") as file:
                with suppress(OSError):
                    _lock(file)
                np.savez(file, allow_pickle=False, **members)
                file.flush()
                os.fsync(file.fileno())
            with suppress(FileNotFoundError):  # another save considered it abandoned
                temporary.replace(target)
                return
        finally:
            temporary.unlink(missing_ok=True)


def _remove_abandoned(folder: Path) -> None:
    """Remove the files of saves that were killed. A save that is running has a lock on
    its file, which ends with its process, however that ends."""
    for path in folder.glob(_TEMPORARY.format("[0-9a-f]" * 32)):
        with suppress(OSError), open(path, "rb") as file:
            _lock(file)
            path.unlink()


def _lock(file: Any) -> None:
    """Lock an open file. An ``OSError`` means that it is locked, or cannot be."""
    if fcntl is not None:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def read(path: str | PathLike[str]) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Return the header and the arrays that :func:`write` wrote.

    :param path: the file.
    :raises ValueError: for a file in another form, and for one that was edited.
    """
    with open(path, "rb") as file, zipfile.ZipFile(file) as archive:
        members = archive.infolist()
        # Archives of this package are not compressed, so no array takes more memory
        # than its file.
        stored = all(m.compress_type == zipfile.ZIP_STORED for m in members)
        size = os.fstat(file.fileno()).st_size
        if not stored or sum(m.file_size for m in members) > size:
            raise ValueError("it is compressed, or claims more than it holds")
        arrays = {m.filename.removesuffix(".npy"): _array(archive, m) for m in members}
    text, checksum = str(arrays.pop("meta")), arrays.pop("checksum")
    if checksum != _checksum(text, arrays):
        raise ValueError("it was edited")
    return json.loads(text), arrays


def _checksum(text: str, arrays: dict[str, np.ndarray]) -> np.uint32:
    total = zlib.crc32(text.encode())
    for name in sorted(arrays):
        x = arrays[name]
        total = zlib.crc32(f"{name} {x.shape} {x.dtype}".encode(), total)
        total = zlib.crc32(x.tobytes(), total)
    return np.uint32(total)


def _array(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> np.ndarray:
    with archive.open(member) as file:
        np.lib.format.read_magic(file)
        shape, by_column, dtype = np.lib.format.read_array_header_1_0(file)
        # NumPy's own reader would allocate the size that the header claims.
        flat = np.frombuffer(file.read(), dtype)
    return flat.reshape(shape, order="F" if by_column else "C")


@contextmanager
def refusing(what: str) -> Iterator[None]:
    """Turn any error inside into an :class:`~numpyro_gpaug.ArchiveError`.

    :param what: its message, before the cause.
    """
    try:
        yield
    except (ArchiveError, FileNotFoundError, IsADirectoryError, PermissionError):
        raise
    except Exception as error:
        kind = "" if type(error) is ValueError else f"{type(error).__name__}: "
        raise ArchiveError(f"{what} ({kind}{error})") from error


# -- headers --------------------------------------------------------------------------


def plain(value: Any) -> Any:
    """Return a value in the form that :func:`typed` reads: named tuples as dicts,
    members of enumerations by value, dtypes by name.

    :param value: made of these, and of objects that JSON can write.
    """
    value = value._asdict() if hasattr(value, "_asdict") else value
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    if isinstance(value, Enum):
        return value.value
    return str(value) if isinstance(value, np.dtype) else value


def typed(value: Any, hint: Any, where: str) -> Any:
    """Return a value from a header in the type of a hint.

    :param value: made of dicts, lists, texts, numbers and arrays.
    :param hint: a dict, a tuple, an optional hint; a named tuple of such; an
        enumeration; ``float``. Values of other types are returned unchanged.
    :param where: the place of the value, for the message.
    :raises ValueError: for the fields of another named tuple, as from another version,
        naming the place.
    """
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        (hint,) = set(args) - {NoneType}
        return value if value is None else typed(value, hint, where)
    if origin is dict:
        return {k: typed(v, args[1], f"{where}.{k}") for k, v in value.items()}
    if origin is tuple:
        hints = [args[0]] * len(value) if args[-1] is Ellipsis else args
        given = enumerate(zip(value, hints, strict=True))
        return tuple(typed(v, h, f"{where}[{i}]") for i, (v, h) in given)
    if hasattr(hint, "_fields"):
        fields = get_type_hints(hint)
        needed = fields.keys() - hint._field_defaults.keys()
        if not needed <= value.keys() <= fields.keys():
            raise ValueError(f"{where} has {[*value]} where {[*fields]} are expected")
        made = {k: typed(v, fields[k], f"{where}.{k}") for k, v in value.items()}
        return hint(**made)
    converts = isinstance(hint, type) and issubclass(hint, Enum | float)
    return hint(value) if converts else value
