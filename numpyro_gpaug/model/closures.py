# SPDX-License-Identifier: Apache-2.0
"""The values that a model reads besides its arguments: globals, closures, attributes,
and the functions it calls. Programs are compiled for these values. Once a value
changes, the programs belong to another model."""

from __future__ import annotations

import copyreg
import dis
import io
import pickle
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, lru_cache, partial
from hashlib import blake2b
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple, TypeVar
from weakref import WeakValueDictionary

import jax
import numpy as np
from scipy import sparse

from numpyro_gpaug.errors import ModelChangedError
from numpyro_gpaug.math.arrays import has_doubles, in_dtype_of
from numpyro_gpaug.math.fingerprints import fingerprint

# Objects of these libraries are identified by their names, wherever they are installed.
_LIBRARIES = {"jax", "jaxlib", "numpy", "numpyro", "numpyro_gpaug", "builtins"}
# Functions and names through which code reads attributes that it does not name.
_BY_NAME = {"getattr", "vars", "__dict__", "asdict", "astuple", "fields", "tree"}

T = TypeVar("T")


@jax.tree_util.register_static
class Version:
    """The values that a model read at some time.

    :param watch: the watched model, which lives as long as it has versions.
    :param content: the digest of the values.
    :param parts: digests by the names that the model itself reads.
    :ivar contents: all digests that identify the version.
    :ivar doubles: whether numbers had 64 bits.
    """

    def __init__(self, watch: Watched, content: bytes, parts: dict[str, bytes]) -> None:
        self._watch, self.parts = watch, parts
        self.contents = {content}
        self.doubles = has_doubles()

    def same(self, other: Version) -> bool:
        """Whether the versions may belong to two model functions that read the same
        values."""
        return self is other or not self.contents.isdisjoint(other.contents)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Allow the model to run inside this context, in the dtype of this version.

        :raises ModelChangedError: if the model has another version by now.
        """
        with in_dtype_of(self.doubles), self._watch.running(self):
            yield

    def __reduce__(self) -> tuple[Any, ...]:
        # Another process has another model, whose objects have other addresses.
        return type(None), ()


class Watched:
    """A model with a record of its versions; see :func:`watched`.

    :param model: the model.
    """

    def __init__(self, model: Callable[..., Any]) -> None:
        self.model = model
        self._names: set[str] = set()
        # From the last reading: JAX arrays with their digests, which do not change; and
        # objects that are identified by their address, kept alive so that no other
        # object takes it.
        self._held: dict[int, tuple[Any, int]] = {}
        # By the digest of everything that was read.
        self._versions: dict[bytes, Version] = {}
        self._last = b""
        self._counted = 0
        # The number of contexts in which the model runs, see :meth:`running`.
        self._inside = 0
        # Names of containers that the model itself changes when it runs.
        self.ignored: set[str] = set()
        # What is compiled for the last version, by kind; see :meth:`shared`.
        self._shared: tuple[Version | None, dict[Any, Any]] = None, {}

    def version(self) -> Version:
        """Return the version of the model, with the values that it reads now."""
        if self._inside:
            self.settle()
        content = self._read(self.model)
        if content not in self._versions:
            # Read from the beginning, so that an earlier version is recognised.
            self._names.clear()
            content = self._read(self.model)
        found = self._versions.pop(content, None)
        found = found or Version(self, content, self._parts())
        self._versions[content], self._last = found, content
        if len(self._versions) > _MOST:
            self._versions.pop(next(iter(self._versions)))
        return found

    def shared(self, version: Version, kind: Any, make: Callable[[], T]) -> T:
        """Return what all objects of one kind share while the model has one version.

        :param version: the version. What was shared at another one is dropped.
        :param kind: the kind.
        :param make: makes what is shared.
        """
        if self._shared[0] is not version:
            self._shared = version, {}
        held = self._shared[1]
        if kind not in held:
            held[kind] = make()
        return held[kind]

    def __reduce__(self) -> tuple[Any, ...]:
        # In another process the model has other versions.
        return watched, (self.model,)

    @contextmanager
    def running(
        self, version: Version | None = None, *, settles: bool = True
    ) -> Iterator[Version]:
        """Allow the model to run inside; see :meth:`settle`.

        :param version: the required version; any by default.
        :param settles: whether changes inside are made by the model itself.
        :raises ModelChangedError: if the model has another version.
        """
        found = self.version()
        self._counted = _RUNS[0]
        if version is not None and not found.same(version):
            self._refuse(version, found)
        self._inside += settles
        try:
            yield found
        finally:
            self._inside -= settles
            if settles:
                self.settle()

    def settle(self) -> None:
        """Ignore the changes that models made while they ran. A counter of its runs
        does not make a model another one, and is not read any more."""
        if self._counted == _RUNS[0]:
            return
        self._counted = _RUNS[0]
        if self._read(self.model) != self._last:
            version, named = self._versions[self._last], self._named()
            for name, part in self._parts().items():
                changed = part != version.parts.get(name)
                if changed and type(named[name]) in _CONTAINERS:
                    self.ignored.add(name)
            self._last = self._read(self.model)
            self._versions[self._last] = version
            version.parts = self._parts()
            version.contents.add(self._last)

    def _refuse(self, version: Version, found: Version) -> None:
        names = sorted(
            name
            for name in {*version.parts, *found.parts}
            if version.parts.get(name) != found.parts.get(name)
        )
        what = ", ".join(names) or "an object"
        raise ModelChangedError(
            f"the model reads {what}, which has changed since the fit. Restore it, or "
            "fit again. If values differ between fits, make them arguments of the model"
        )

    def _read(self, *objects: Any) -> bytes:
        while True:
            known, file = len(self._names), io.BytesIO()
            reader = _Reader(file, self)
            try:
                reader.dump((has_doubles(), *objects))
            except RecursionError:  # objects that are nested too deeply are not read
                pass
            if len(self._names) == known:
                break
        self._held = reader.held
        return blake2b(file.getbuffer(), digest_size=16).digest()

    def _parts(self) -> dict[str, bytes]:
        held = self._held
        found = {k: self._read(x) for k, x in self._named().items()}
        self._held = held
        return found

    def _named(self) -> dict[str, Any]:
        """Return the values that the model itself reads, by name."""
        fn: Any = self.model
        owner: Any = None
        while not isinstance(fn, FunctionType):
            if isinstance(fn, MethodType):
                fn, owner = fn.__func__, fn.__self__
            elif isinstance(fn, partial):
                fn = fn.func
            elif hasattr(fn, "__wrapped__") or hasattr(fn, "fn"):  # of handlers
                fn = getattr(fn, "__wrapped__", None) or fn.fn
            elif isinstance(vars(type(fn)).get("__call__"), FunctionType):
                fn, owner = vars(type(fn))["__call__"], fn
            else:
                return {}
        facts = _facts(fn.__code__)
        attributes = getattr(owner, "__dict__", {})
        own = facts.code, fn.__defaults__, fn.__kwdefaults__
        return {
            **_read_by(fn, self.ignored),
            **{f"self.{k}": x for k, x in attributes.items() if k in facts.names},
            "its own code": own,
        }


# The largest number of versions of a model that are recognised.
_MOST = 64
# The number of runs of models.
_RUNS = [0]


def count_run() -> None:
    """Record that a model runs."""
    _RUNS[0] += 1


_WATCHED: WeakValueDictionary[int, Watched] = WeakValueDictionary()
# The attribute of a function that keeps its record alive.
_HELD = "_numpyro_gpaug"


def watched(model: Callable[..., Any]) -> Watched:
    """Return the watched model, one for all that fit it or predict with it.

    The values are closure cells, the globals that code names, defaults, attributes of
    functions, and everything that these contain: numbers, strings, containers, arrays,
    distributions, pytrees, objects by their state, and functions and classes, which are
    read in the same way. If the class of an object has no base from a library, only the
    attributes that code names are read. Modules of libraries are not read, and their
    functions and classes are compared by name. NumPy arrays are compared by their
    contents, and each JAX array is read once. Objects that cannot be pickled (locks,
    open files, owners of compiled programs) are compared by identity.

    :param model: the model.
    """
    found = _WATCHED.get(id(model))
    if found is None or found.model is not model:
        found = _WATCHED[id(model)] = Watched(model)
        if isinstance(model, FunctionType):
            # It lives as long as the function, with what is compiled for it.
            setattr(model, _HELD, found)
    return found


class RunsModel:
    """A base class of objects with programs of a model, which they discard once the
    model reads other values.

    :param model: the model.
    """

    def __init__(self, model: Callable[..., Any]) -> None:
        self.model, self._watch = model, watched(model)
        self._version = self._watch.version()
        self._begin()

    def _begin(self) -> None:
        """Discard everything that was compiled."""
        raise NotImplementedError

    @contextmanager
    def _running(self, *, settles: bool = True) -> Iterator[None]:
        """Allow the model to run inside this context, as it is now; see
        :meth:`Watched.running`."""
        with self._watch.running(settles=settles) as version:
            if version != self._version:
                self._version = version
                self._begin()
            yield


class _Reader(pickle.Pickler):
    """A pickler that writes the contents of an object. The result is never loaded, but
    equal results come from equal objects. The pickler goes through containers, cycles
    and the state of objects, and this class handles everything that it would write by
    name.

    :param file: the file to write to.
    :param watch: the watched model, whose names and arrays are known.
    """

    def __init__(self, file: Any, watch: Watched) -> None:
        super().__init__(file, protocol=5)
        self.names, self._known = watch._names, watch._held
        self._ignored = watch.ignored
        self.held: dict[int, tuple[Any, int]] = {}
        self._home = _top(getattr(watch.model, "__module__", None))

    def reducer_override(self, obj: Any) -> Any:
        if obj is _nothing:
            return NotImplemented
        try:
            return self._reduced(obj)
        except Exception:
            return self._same(obj)

    def _reduced(self, obj: Any) -> Any:
        kind = type(obj)
        if kind is FunctionType:
            return self._function(obj)
        if isinstance(obj, type):
            return self._class(obj)
        if isinstance(obj, ModuleType):
            return _told(obj.__name__, self._named(vars(obj)) if self._own(obj) else 0)
        if kind is np.ndarray and not obj.dtype.hasobject:
            return _told(obj.dtype.str, (obj.shape, int(fingerprint([obj]))))
        if isinstance(obj, np.generic):
            return _told(obj.dtype.str, obj.tobytes())
        if sparse.issparse(obj):
            # SciPy records whether entries are sorted when they are first read.
            return _told(kind.__qualname__, _without_flags(vars(obj)))
        if isinstance(obj, jax.Array):
            return self._array(obj)
        if kind is MethodType:
            return _told("method", (obj.__func__, obj.__self__))
        if kind is property:
            return _told("property", obj.fget)
        if hasattr(obj, "__wrapped__"):  # of jit, lru_cache and staticmethod
            return _told(kind.__qualname__, obj.__wrapped__)
        return self._object(obj, kind)

    def _function(self, fn: FunctionType) -> tuple[Any, ...]:
        if not self._own(fn):
            module = fn.__globals__.get("__name__")
            return _told(f"{module}.{fn.__qualname__}", _contents(fn))
        facts = _facts(fn.__code__)
        self.names.update(facts.names)
        held = _read_by(fn, self._ignored)
        held |= {k: sys.modules[k] for k in facts.imports if k in sys.modules}
        attributes = {k: x for k, x in vars(fn).items() if k != _HELD}
        options = fn.__defaults__, fn.__kwdefaults__, attributes
        return _told(facts.code, (held, options))

    def _class(self, cls: type) -> tuple[Any, ...]:
        if not self._own(cls):
            return _told(cls.__module__, cls.__qualname__)
        everything = not self._is_plain(cls)
        held = {
            k: x
            for k, x in vars(cls).items()
            if isinstance(x, FunctionType)
            and (everything or k in self.names or _is_hook(k))
            or not k.startswith(("__", "_abc_"))
            and (everything or k in self.names)
        }
        return _told(cls.__qualname__, (cls.__bases__, held))

    def _array(self, array: jax.Array) -> tuple[Any, ...]:
        if isinstance(array, jax.core.Tracer) or array.is_deleted():
            return self._same(array)
        known = self._known.get(id(array)) or (array, int(fingerprint([array])))
        self.held[id(array)] = known
        return _told(str(array.dtype), (array.shape, known[1]))

    def _object(self, obj: Any, kind: type) -> Any:
        reduce = copyreg.dispatch_table.get(kind)
        found: Any = reduce(obj) if reduce else obj.__reduce_ex__(4)
        if isinstance(found, str):
            return _told(kind.__module__, found)
        if len(found) > 2 and isinstance(found[2], dict) and self._is_plain(kind):
            return (*found[:2], self._named(found[2]), *found[3:])
        return found

    def _same(self, obj: Any) -> tuple[Any, ...]:
        # Tracers are not kept, because they would outlive their trace.
        if not isinstance(obj, jax.core.Tracer):
            self.held[id(obj)] = obj, 0
        return _told(type(obj).__qualname__, id(obj))

    def _named(self, held: dict[str, Any]) -> dict[str, Any]:
        """Return the attributes of an object that code reads."""
        return {k: x for k, x in held.items() if k in self.names}

    def _is_plain(self, cls: type) -> bool:
        """Whether the attributes of a class's objects are read only by code that names
        them. Libraries also read the attributes of a pytree or a distribution."""
        mine = all(base is object or self._own(base) for base in cls.__mro__)
        return mine and self.names.isdisjoint(_BY_NAME)

    def _own(self, obj: Any) -> bool:
        """Whether a function, class or module belongs to the user."""
        if isinstance(obj, ModuleType):
            module = obj.__name__
        else:
            scope = getattr(obj, "__globals__", None)
            module = obj.__module__ if scope is None else scope.get("__name__")
        top = _top(module)
        return not _is_core(top) and (top == self._home or not _is_installed(top))


def _without_flags(state: dict[str, Any]) -> dict[str, Any]:
    return {k: x for k, x in state.items() if not isinstance(x, bool)}


def _told(kind: Any, state: Any) -> tuple[Any, ...]:
    """Return the form in which the pickler writes an object.

    :param kind: a name, or code.
    :param state: the contents of the object.
    """
    return _nothing, (), (kind, state)


def _is_hook(name: str) -> bool:
    """Whether Python calls a method implicitly, for an operation of the model on an
    object."""
    return name.startswith("__") and name not in _SHOWN


_SHOWN = {"__repr__", "__str__", "__eq__", "__hash__", "__getstate__", "__setstate__"}


def _nothing() -> None:
    """A placeholder for loading: the written object is never loaded."""


class _Facts(NamedTuple):
    """The names that code, and code nested in it, reads.

    :param code: the instructions, without their location, as text.
    :param globals: names of globals, except for globals that it assigns.
    :param assigned: names of outer variables that it assigns.
    :param names: all names, including attributes.
    :param imports: modules.
    """

    code: str
    globals: tuple[str, ...]
    assigned: frozenset[str]
    names: frozenset[str]
    imports: tuple[str, ...]


_READ = "LOAD_GLOBAL", "LOAD_NAME", "IMPORT_NAME", "STORE_GLOBAL", "STORE_DEREF"
_NAMING = {"LOAD_GLOBAL", "LOAD_NAME", "LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR"}


@lru_cache(maxsize=4096)
def _facts(code: CodeType) -> _Facts:
    found: dict[str, list[str]] = {name: [] for name in _READ}
    names: set[str] = set()
    for part in _codes(code):
        for instruction in dis.get_instructions(part):
            if instruction.opname in found:
                found[instruction.opname].append(instruction.argval)
            if instruction.opname in _NAMING:
                names.add(instruction.argval)
    assigned = {*found["STORE_GLOBAL"], *found["STORE_DEREF"]}
    known = dict.fromkeys(found["LOAD_GLOBAL"] + found["LOAD_NAME"])
    modules = tuple(dict.fromkeys(found["IMPORT_NAME"]))
    return _Facts(
        repr(_placeless(code)), tuple(x for x in known if x not in assigned),
        frozenset(assigned), frozenset(names), modules,
    )  # fmt: skip


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


# What code is made of, besides its constants and its location.
_PARTS = (
    "co_argcount", "co_posonlyargcount", "co_kwonlyargcount", "co_flags", "co_code",
    "co_names", "co_varnames", "co_freevars", "co_cellvars", "co_exceptiontable",
)  # fmt: skip


def _placeless(constant: Any) -> Any:
    """Return code, or another constant, without the location of code: a notebook cell
    that is run again is the same."""
    if not isinstance(constant, CodeType):
        return constant
    parts = [getattr(constant, part) for part in _PARTS]
    return *parts, *map(_placeless, constant.co_consts)


def _read_by(fn: FunctionType, ignored: set[str]) -> dict[str, Any]:
    """Return globals and variables of enclosing functions that a function reads, by
    name.

    :param fn: the function.
    :param ignored: names of containers that are left out.
    """
    facts, scope = _facts(fn.__code__), fn.__globals__
    held = {name: scope[name] for name in facts.globals if name in scope}
    cells = zip(fn.__code__.co_freevars, _contents(fn), strict=True)
    held |= {k: x for k, x in cells if k not in facts.assigned}
    for name in ignored & held.keys():
        if type(held[name]) in _CONTAINERS:
            del held[name]
    return held


_CONTAINERS = list, dict, set


def _contents(fn: FunctionType) -> tuple[Any, ...]:
    """Return the contents of the cells of a closure."""
    held = []
    for cell in fn.__closure__ or ():
        try:
            held.append(cell.cell_contents)
        except ValueError:  # an empty cell
            held.append(None)
    return tuple(held)


def _top(module: str | None) -> str:
    return (module or "__main__").partition(".")[0]


@cache
def _is_core(top: str) -> bool:
    return top in sys.stdlib_module_names or top in _LIBRARIES


@cache
def _is_installed(top: str) -> bool:
    """Whether a module is a library, that is, installed."""
    if top == "__main__":
        return False
    module = sys.modules.get(top)
    file = getattr(module, "__file__", None)
    where = [file] if file else list(getattr(module, "__path__", ()))
    return any(x in str(path) for path in where for x in _INSTALLED)


_INSTALLED = "site-packages", "dist-packages"
