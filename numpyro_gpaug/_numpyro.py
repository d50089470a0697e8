# SPDX-License-Identifier: Apache-2.0
"""Every private NumPyro name the package touches, in one place."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, Self, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
from numpyro.distributions import Distribution
from numpyro.distributions.util import periodic_repeat
from numpyro.handlers import block, mask, replay, scale, seed, substitute
from numpyro.handlers import trace as handlers_trace
from numpyro.infer.autoguide import AutoDelta
from numpyro.primitives import _PYRO_STACK, Messenger, apply_stack

from numpyro_gpaug._fork import refuse_forked

P = ParamSpec("P")
T = TypeVar("T")

_RUNS = threading.RLock()


def one_thread(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate ``function`` so that only one thread at a time runs any decorated
    function, with matrix products in full precision.

    All threads share NumPyro's stack of handlers: two threads that trace models would
    find each other's handlers on it. Compiled programs need no lock, and JAX does not
    wait for their results, so a locked call takes long only if it compiles.
    """

    @wraps(function)
    def locked(*args: P.args, **kwargs: P.kwargs) -> T:
        # Before the lock, which a thread of the parent process may hold.
        refuse_forked()
        # The same precision as in numpyro_gpaug.math.linalg.
        with _RUNS, jax.default_matmul_precision("highest"):
            return function(*args, **kwargs)

    return locked


class residual_policy(Messenger):
    """Fix the residual policy of every Gaussian process called inside.

    :param fn: the model.
    :param policy: ``"mean"`` (no residual), ``"noise"`` (``sqrt(r) eps`` with new
        noise) or ``"site"`` (``eps`` is a latent site ``"{name}.eps"``).
    """

    def __init__(self, fn: Callable | None = None, policy: str = "mean") -> None:
        self.policy = policy
        super().__init__(fn)


class traceable_sites(Messenger):
    """Rewrite ``sample(name, fn, sample_shape=...)`` as a sample of the expanded
    distribution, so that the site's distribution has the shape of its values. Values
    that are NumPy arrays (``handlers.condition`` inside) become JAX arrays, because
    traced codes cannot index NumPy arrays.

    :param fn: the model.
    """

    def process_message(self, msg: dict[str, Any]) -> None:
        if msg["type"] == "sample" and isinstance(msg["value"], np.ndarray):
            msg["value"] = jnp.asarray(msg["value"])
        if msg["type"] == "sample" and (shape := msg["kwargs"].get("sample_shape")):
            msg["fn"] = msg["fn"].expand_by(shape)
            msg["kwargs"]["sample_shape"] = ()


def current_residual_policy() -> str:
    """Return the current policy: the innermost :class:`residual_policy`; without one,
    ``"noise"`` in prediction (densities masked out) and under ``replay`` (stock
    evidence lower bounds), and ``"mean"`` otherwise."""
    for handler in reversed(_PYRO_STACK):
        if isinstance(handler, residual_policy):
            return handler.policy
    for handler in _PYRO_STACK:
        # Not numpyro.get_mask(), which cannot see this handler if the model has a mask
        # inside.
        masked_out = isinstance(handler, mask) and handler.mask is False
        if masked_out or isinstance(handler, replay):
            return "noise"
    return "mean"


def scan_index(message: dict[str, Any]) -> Any:
    """Return the step of NumPyro's running ``scan`` to which a site's message belongs;
    ``None`` outside of a ``scan``."""
    return message["infer"].get("_scan_current_index")


def is_scanned(message: dict[str, Any]) -> bool:
    """Whether a site's message belongs to a ``scan``, for one step or for all steps."""
    return "_scan_current_index" in message["infer"]


def deterministic_site(name: str, conditional: Callable[[], Any]) -> Any:
    """Declare a deterministic site whose ``fn`` is ``conditional``. Handlers may read
    its structure and set the value; otherwise the value is ``conditional()``."""
    if not _PYRO_STACK:
        return conditional()
    return apply_stack(
        {
            "type": "deterministic",
            "name": name,
            "fn": conditional,
            "args": (),
            "kwargs": {},
            "value": None,
            "cond_indep_stack": [],
        }
    )["value"]


@jax.tree_util.register_pytree_node_class
class Ordered:
    """A tree that may contain distributions, with leaves in the same order in every
    process. NumPyro orders leaves like a set of strings, which differs between
    processes, and JAX's persistent cache would not find the programs again.

    :param tree: the tree.
    """

    def __init__(self, tree: Any) -> None:
        self.tree = tree

    def tree_flatten(self) -> tuple[tuple[Any, ...], Any]:
        """Return the leaves, by name."""
        leaves, treedef = jax.tree.flatten(self.tree)
        names = _names(self.tree)
        order = sorted(range(len(leaves)), key=names.__getitem__)
        return tuple(leaves[i] for i in order), (treedef, tuple(order))

    @classmethod
    def tree_unflatten(cls, aux: Any, leaves: Any) -> Self:
        """Restore the tree."""
        treedef, order = aux
        found = dict(zip(order, leaves, strict=True))
        return cls(jax.tree.unflatten(treedef, [found[i] for i in range(len(order))]))


def _names(tree: Any) -> list[str]:
    """Return a name for every leaf, in the order of ``jax.tree.leaves``."""
    names = []
    flat = jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_distribution)[0]
    for path, leaf in flat:
        prefix = jax.tree_util.keystr(path)
        inner = {"": leaf}
        if _is_distribution(leaf):
            fields = type(leaf).gather_pytree_data_fields()
            inner = {f".{k}": vars(leaf).get(k) for k in fields}
        for field, value in inner.items():
            deeper = _names(value) if _is_distribution(leaf) else [""]
            names += [prefix + field + name for name in deeper]
    return names


def _is_distribution(leaf: Any) -> bool:
    return isinstance(leaf, Distribution)


class PointGuide(AutoDelta):
    """A fast ``AutoDelta``: its set-up runs the model once, in one compiled program,
    while NumPyro's runs it three times without compilation.

    :param model: the model.
    :param key: random key of the first values.
    :param start: a function of a random key that returns the ``substitute_fn`` of a run
        of the model, which gives latents their first values.
    :param call: a function that compiles a function of arrays and calls it.
    """

    _init_locs: dict[str, Any]

    def __init__(
        self,
        model: Callable[..., Any],
        *,
        key: jax.Array,
        start: Callable[[jax.Array], Callable[..., Any]],
        call: Callable[..., Any],
    ) -> None:
        self._key, self._start, self._call = key, start, call
        # Whether initial values depend on the arguments.
        self.moves = False
        super().__init__(model)

    def __call__(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        if not self.moves:
            return super().__call__(*args, **kwargs)
        fixed = self._init_locs
        found: list[dict[str, Any]] = []

        def start(name: str) -> Callable[[jax.Array], Any]:
            def value(key: jax.Array) -> Any:
                if not found:
                    found.append(self.starts(args, kwargs))
                return found[0][name][0]

            return value

        self._init_locs = {name: start(name) for name in fixed}
        try:
            return super().__call__(*args, **kwargs)
        finally:
            self._init_locs = fixed

    def set_up(self, args: Any, kwargs: Any) -> dict[str, Any]:
        """Set the guide up, and return the constraints of its params. A first call
        would also split keys, each split a program to compile.

        :param args: the model's arguments.
        :param kwargs: its keyword arguments.
        """
        with block():
            self._setup_prototype(*args, **kwargs)
        known = self.known()
        return {f"{k}_{self.prefix}_loc": known[k][1] for k in known}

    def known(self) -> dict[str, tuple[Any, Any]]:
        """Starts and supports of the set-up, by site."""
        supports = {k: self.prototype_trace[k]["fn"].support for k in self._init_locs}
        return {k: (x, supports[k]) for k, x in self._init_locs.items()}

    def starts(self, args: Any, kwargs: Any) -> dict[str, tuple[Any, Any]]:
        """Return starts and supports at other arguments; a pure function.

        :param args: the model's arguments.
        :param kwargs: its keyword arguments.
        """
        trace = self._first(self._key, args, kwargs)
        return {k: (_whole(trace, k), trace[k]["fn"].support) for k in self._init_locs}

    def _first(self, key: jax.Array, args: Any, kwargs: Any) -> dict[str, Any]:
        """Return the model with latents at their first values."""
        seeded = seed(self.model, key)
        started = substitute(seeded, substitute_fn=self._start(key))
        # Checks of known parameters would compile a program for each operation.
        with block(), numpyro.validation_enabled(is_validate=False):
            return handlers_trace(started).get_trace(*args, **kwargs)

    def _setup_prototype(self, *args: Any, **kwargs: Any) -> None:
        trace: dict[str, Any] = {}

        def first(key: jax.Array) -> Ordered:
            found = self._first(key, args, kwargs)
            trace.update(found)
            drawn = {k: site for k, site in found.items() if site["type"] == "sample"}
            return Ordered({k: (s["value"], s["fn"]) for k, s in drawn.items()})

        for name, (value, fn) in self._call(first, self._key).tree.items():
            trace[name] |= {"value": value, "fn": fn}
        self.prototype_trace = trace
        self._init_locs, self._event_dims = {}, {}
        self._prototype_frame_full_sizes = {
            name: site["args"][0]
            for name, site in trace.items()
            if site["type"] == "plate"
        }
        for name, site in trace.items():
            if site["type"] != "sample":
                continue
            self._prototype_frames |= {x.name: x for x in site["cond_indep_stack"]}
            self._init_locs[name] = _whole(trace, name)
            self._event_dims[name] = site["fn"].event_dim


def _whole(trace: dict[str, Any], name: str) -> Any:
    """Return the value of a site, repeated for members that a subsample leaves out."""
    site = trace[name]
    value, event_dim = site["value"], site["fn"].event_dim
    for frame in site["cond_indep_stack"]:
        full_size = trace[frame.name]["args"][0]
        if full_size != frame.size:
            value = periodic_repeat(value, full_size, frame.dim - event_dim)
    return value


def handlers_around() -> list[Messenger]:
    """Return the handlers and plates around the caller, from the outermost."""
    return list(_PYRO_STACK)


class outside_plates:
    """A context in which sites are in no plates, and without most masks and scales.

    :param kept: the masks and scales that remain, among other handlers.
    :ivar subsampled: names of the plates around it that contain some of their members.
    """

    def __init__(self, kept: list[Messenger]) -> None:
        self._kept = kept

    def __enter__(self) -> Self:
        self._stack = handlers_around()
        plates = [x for x in self._stack if isinstance(x, numpyro.plate)]
        self.subsampled = [x.name for x in plates if x.size != x.subsample_size]
        left = [x for x in self._stack if isinstance(x, mask | scale)]
        left = plates + [x for x in left if x not in self._kept]
        _PYRO_STACK[:] = [x for x in self._stack if x not in left]
        return self

    def __exit__(self, *error: object) -> None:
        _PYRO_STACK[:] = self._stack


class whole_plates(Messenger):
    """Run every plate over all of its members, for any ``subsample_size``, which a
    trace has in the plate's ``"infer"``."""

    def process_message(self, msg: dict[str, Any]) -> None:
        if msg["type"] == "plate":
            size, subsample_size = msg["args"]
            msg["args"], msg["infer"] = (size, None), {"subsample_size": subsample_size}
            msg["value"] = jax.numpy.arange(size)


class unscaled(Messenger):
    """Remove the scales of all sites: NumPyro's ``get_dependencies`` compares those of
    one call and the next, which fails for arrays."""

    def process_message(self, msg: dict[str, Any]) -> None:
        msg["scale"] = None
        msg.pop("plate_to_scale", None)


class weighted_plates(Messenger):
    """Give observations in plates a weight, so that a batch represents all data.

    :param fn: the model.
    :param names: names of the plates; an observation is in at most one of them.
    :param weight: the weight.
    """

    def __init__(self, fn: Callable, names: tuple[str, ...], weight: float) -> None:
        self.names, self.weight = names, weight
        super().__init__(fn)

    def process_message(self, msg: dict[str, Any]) -> None:
        if msg["type"] != "sample":
            return
        within = [f.name for f in msg["cond_indep_stack"] if f.name in self.names]
        if within and not msg["is_observed"]:
            raise ValueError(
                f"site {msg['name']!r} has latents in plate {within[0]!r}, which has "
                "as many members as a batch has rows. Use batches of another size"
            )
        if len(within) > 1:
            raise ValueError(
                f"site {msg['name']!r} is in plates {within}, which all have as "
                "many members as a batch has rows. Use batches of another size"
            )
        if within:
            scale = msg["scale"]
            msg["scale"] = self.weight if scale is None else self.weight * scale


class first_rows(Messenger):
    """Give weight only to observations in the first members of a plate.

    :param fn: the model.
    :param count: the number of members that count.
    :param size: the size of the plate.
    """

    def __init__(self, fn: Callable, count: jax.Array, size: int) -> None:
        self.count, self.size = count, size
        super().__init__(fn)

    def process_message(self, msg: dict[str, Any]) -> None:
        if msg["type"] != "sample" or not msg["is_observed"]:
            return
        for frame in msg["cond_indep_stack"]:
            if frame.size == self.size:
                members = jax.numpy.arange(self.size).reshape(
                    -1, *[1] * (-1 - frame.dim)
                )
                counts, scale = members < self.count, msg["scale"]
                msg["scale"] = counts if scale is None else counts * scale
