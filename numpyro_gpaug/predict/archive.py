# SPDX-License-Identifier: Apache-2.0
"""Trees of arrays and model structures as plain arrays and JSON; nothing is pickled."""

from __future__ import annotations

import json
import math
import os
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from os import PathLike
from pathlib import Path
from typing import Any
from uuid import uuid4

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.dtypes import canonicalize_dtype

from numpyro_gpaug.errors import ArchiveError
from numpyro_gpaug.gp.process import Conditional
from numpyro_gpaug.likelihoods.expectations import Route, base_distribution
from numpyro_gpaug.math.compiling import once
from numpyro_gpaug.math.linalg import Moments
from numpyro_gpaug.model.arguments import Arguments
from numpyro_gpaug.model.latents import Arrow, GaussianSite, Grouping, JointStructure
from numpyro_gpaug.model.structure import (
    Block,
    Leaves,
    Observed,
    Structure,
    flat_functions,
    run_model,
)
from numpyro_gpaug.predict.arguments import FitArguments

# -- files ----------------------------------------------------------------------------


def write(
    path: str | PathLike[str], arrays: dict[str, np.ndarray], meta: dict[str, Any]
) -> None:
    """Writes arrays and JSON; whoever reads ``path`` meanwhile, or after a failure,
    finds what was there before.

    :param path: the file.
    :param arrays: plain arrays by name.
    :param meta: what :func:`pack` made.
    """
    # The file a link leads to is replaced, not the link.
    target = Path(path).resolve()
    if not target.parent.is_dir():
        raise FileNotFoundError(f"{path}: there is no folder {target.parent}")
    temporary = target.with_name(f".{uuid4().hex}.tmp")
    try:
        with open(temporary, "xb") as file:
            np.savez(
                file, allow_pickle=False, meta=np.array(json.dumps(meta)), **arrays
            )
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


def read(path: str | PathLike[str]) -> tuple[dict[str, Any], dict[str, Array]]:
    """The JSON and the arrays that :func:`write` wrote.

    :param path: the file.
    """
    with open(path, "rb") as file, zipfile.ZipFile(file) as archive:
        members = archive.infolist()
        # Ours are never compressed: no array takes more memory than its file.
        stored = all(m.compress_type == zipfile.ZIP_STORED for m in members)
        size = os.fstat(file.fileno()).st_size
        if not stored or sum(m.file_size for m in members) > size:
            raise ValueError("it is compressed, or claims more than it holds")
        arrays = {m.filename.removesuffix(".npy"): _array(archive, m) for m in members}
    meta = json.loads(str(arrays.pop("meta")))
    return meta, {k: jnp.asarray(v) for k, v in arrays.items()}


def _array(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> np.ndarray:
    with archive.open(member) as file:
        np.lib.format.read_magic(file)
        shape, by_column, dtype = np.lib.format.read_array_header_1_0(file)
        # NumPy's own reader would allocate what the header claims.
        flat = np.frombuffer(file.read(), dtype)
    return flat.reshape(shape, order="F" if by_column else "C")


@contextmanager
def refusing(what: str) -> Iterator[None]:
    """Whatever goes wrong inside is an :class:`~numpyro_gpaug.ArchiveError`.

    :param what: what it then says, before the cause.
    """
    try:
        yield
    except (ArchiveError, FileNotFoundError, IsADirectoryError, PermissionError):
        raise
    except Exception as error:
        raise ArchiveError(f"{what} ({type(error).__name__}: {error})") from error


# -- models ---------------------------------------------------------------------------

Description = tuple[dict[str, str], dict[str, Array]]


def describe(
    model: Callable[..., Any],
    structure: Structure,
    arguments: FitArguments,
    values: dict[str, Any],
) -> Description:
    """What a model must share with that of a saved fit: a line for every param, process
    and distribution, and the covariances of the first inducing input of every process
    with all of them, which tell kernels, hyperparameters and inducing inputs.

    :param model: the model.
    :param structure: of the fit.
    :param arguments: of the fit.
    :param values: params and other latents of the fit.
    """
    lines: dict[str, str] = {}
    args, observations = arguments.data
    kept = Arguments.split(args, {**arguments.kwargs, **observations})

    def covariances(arrays: tuple[Array, ...], values: dict[str, Any]) -> Any:
        given = kept._replace(arrays=arrays).merge()
        # Nothing here depends on data: the compiler drops what stands for them.
        args, kwargs = jax.tree.map(_zeros, given)
        filled = {**structure.zeros, **values}
        with_data, key = Arguments.split(args, kwargs), jax.random.key(0)
        trace = run_model(flat_functions(model), with_data, key, filled)
        lines.update({k: _line(m) for k, m in trace.items() if m["type"] != "plate"})
        found = {k: m["fn"].gp for k, m in trace.items() if _is_process(m)}
        return {
            k: gp.kernel(_first(gp.inducing), gp.inducing) for k, gp in found.items()
        }

    return lines, once(covariances)(kept.arrays, values)


def check_model(found: Description, saved: Description) -> None:
    """Raises unless a model is, as far as :func:`describe` tells, that of the fit.

    :param found: of the model given.
    :param saved: of that of the fit.
    :raises ArchiveError: naming the site that differs.
    """
    for name in sorted({**found[0], **saved[0]}):
        here, there = (lines.get(name, "missing") for lines in (found[0], saved[0]))
        if here != there:
            raise ArchiveError(f"{name!r} is {here} in the model, {there} in the fit")
    for name, gram in saved[1].items():
        scale = np.abs(gram).max()
        if not np.allclose(found[1][name], gram, rtol=1e-3, atol=1e-3 * scale):
            raise ArchiveError(
                f"the kernel of {name!r}, its hyperparameters or its inducing inputs "
                "are not those of the fit"
            )


def check_moments(
    structure: Structure, own: dict[str, Moments], leading: tuple[int, ...]
) -> None:
    """Raises for moments that are not of the size of their block.

    :param structure: of the fit.
    :param own: what was saved.
    :param leading: axes before theirs.
    :raises ArchiveError: naming the block and the shapes.
    """
    shapes = {b.name: b.shape for b in structure.blocks}
    for name, moments in own.items():
        latents, size = math.prod(shapes[name][:-1]), shapes[name][-1]
        given, expected = (
            [x.shape for x in moments],
            [(latents, size), (latents, size, size)],
        )
        if isinstance(structure, JointStructure):
            expected = [x.shape for x in moments_of(structure)]
        if given != [(*leading, *shape) for shape in expected]:
            raise ArchiveError(
                f"moments of {name!r}, of shape {shapes[name]}, have shapes {given}"
            )


def moments_of(structure: JointStructure) -> Any:
    """Moments of its Gaussian, as shapes."""
    return jax.eval_shape(lambda: structure.prior(structure.no_links).natural.moments())


def _zeros(leaf: Any) -> Any:
    if not _is_shape(leaf):
        return leaf
    return jnp.zeros(leaf.shape, canonicalize_dtype(leaf.dtype))


def _is_shape(leaf: Any) -> bool:
    return isinstance(leaf, jax.ShapeDtypeStruct)


def _is_process(message: dict[str, Any]) -> bool:
    return isinstance(message.get("fn"), Conditional)


def _first(Z: Array) -> Array:
    return Z[:1] if Z.ndim == 1 else Z[..., :1, :]


def _line(message: dict[str, Any]) -> str:
    if _is_process(message):
        return f"process with kernel {type(message['fn'].gp.kernel).__name__}"
    if message["type"] != "sample":
        return message["type"]
    shape = tuple(message["fn"].shape())
    return f"{type(base_distribution(message['fn'])).__name__} of shape {shape}"


# -- trees ----------------------------------------------------------------------------


def pack(tree: Any, path: str, arrays: dict[str, np.ndarray]) -> Any:
    """A JSON description of ``tree``; its arrays go into ``arrays``, by path."""
    if isinstance(tree, np.ndarray | jax.Array):
        # Numbered: names with slashes may make the same path twice.
        name = f"{len(arrays)}/{path}"
        arrays[name] = np.asarray(tree)
        return {"array": name}
    if _is_shape(tree) and isinstance(tree.dtype, np.dtype):
        return {"shape": [tree.shape, str(tree.dtype)]}
    if isinstance(tree, dict) and all(isinstance(k, str) for k in tree):
        return {"dict": {k: pack(v, f"{path}/{k}", arrays) for k, v in tree.items()}}
    if type(tree) in (list, tuple):
        return {"list": [pack(v, f"{path}/{i}", arrays) for i, v in enumerate(tree)]}
    if tree is None or isinstance(tree, bool | int | float | str):
        return {"plain": tree}
    raise ValueError(
        f"{path} is a {type(tree).__name__}: only arrays, numbers, strings, and dicts, "
        "lists and tuples of them can be saved"
    )


def pack_values(values: dict[str, Any], arrays: dict[str, np.ndarray]) -> Any:
    """As :func:`pack`, for params: of one with a structure of its own (a network) only
    the leaves are stored, and the code that declares it puts them together again."""

    def described(name: str, value: Any) -> Any:
        path = f"values/{name}"
        if _is_plain(value):
            return pack(value, path, arrays)
        leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(value)]
        return {"leaves": pack(leaves, path, arrays)}

    return {"dict": {name: described(name, x) for name, x in values.items()}}


def unpack(packed: dict[str, Any], arrays: dict[str, Array]) -> Any:
    """The tree :func:`pack` described."""
    ((kind, content),) = packed.items()
    if kind == "array":
        return arrays[content]
    if kind == "shape":
        return jax.ShapeDtypeStruct(content[0], jnp.dtype(content[1]))
    if kind == "dict":
        return {k: unpack(v, arrays) for k, v in content.items()}
    if kind == "leaves":
        return Leaves(tuple(unpack(content, arrays)))
    if kind == "list":
        return [unpack(v, arrays) for v in content]
    return content


def _is_plain(tree: Any) -> bool:
    """Whether :func:`pack` keeps the structure of ``tree`` as it is."""
    if isinstance(tree, dict):
        return all(isinstance(k, str) and _is_plain(v) for k, v in tree.items())
    if type(tree) in (list, tuple):
        return all(map(_is_plain, tree))
    return jax.tree_util.all_leaves([tree])


def pack_structure(structure: Structure) -> dict[str, Any]:
    """A structure as JSON, without what depends on arguments."""
    joint = {}
    if isinstance(structure, JointStructure):
        joint = {
            "sites": structure.sites,
            "held": structure.held,
            "arrow": structure.arrow and structure.arrow.all,
            "chains": structure.chains,
        }
    return joint | {
        "blocks": [[b.name, b.site, b.shape, str(b.dtype)] for b in structure.blocks],
        "others": structure.others,
        "observed": [[*o[:3], o.route.value, *o[4:]] for o in structure.observed],
    }


def unpack_structure(packed: dict[str, Any]) -> Structure:
    """The structure :func:`pack_structure` described."""
    structure = Structure(
        blocks=tuple(
            Block(name, site, tuple(shape), jnp.dtype(dtype))
            for name, site, shape, dtype in packed["blocks"]
        ),
        others=tuple(packed["others"]),
        observed=tuple(
            Observed(
                name,
                tuple(latents),
                tuple(map(tuple, sources)),
                Route(route),
                tuple(processes),
                *rest,
            )
            for name, latents, sources, route, processes, *rest in packed["observed"]
        ),
        plates={},
        functions={},
        constraints={},
    )
    if "sites" not in packed:
        return structure
    kept = {field.name: getattr(structure, field.name) for field in fields(structure)}
    return JointStructure(
        **kept,
        sites=tuple(
            GaussianSite(name, tuple(shape), tuple(value_shape), local)
            for name, shape, value_shape, local in packed["sites"]
        ),
        dtype=structure.blocks[0].dtype,
        held=tuple(map(tuple, packed["held"])),
        arrow=_unpack_arrow(packed.get("arrow")),
        chains=tuple(map(_unpack_grouping, packed.get("chains", []))),
    )


def _unpack_arrow(packed: Any) -> Arrow | None:
    if packed is None:
        return None
    groups, *others = map(_unpack_grouping, packed)
    return Arrow(groups, tuple(others))


def _unpack_grouping(packed: Any) -> Grouping:
    sites, size, before = packed
    named = tuple((name, tuple(axes)) for name, axes in sites)
    return Grouping(named, size, before)
