# SPDX-License-Identifier: Apache-2.0
"""Parts of a model (Gaussian blocks, observed sites, plates), and runs of the model
with some of its sites given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
from jax import Array
from numpyro import handlers
from numpyro.distributions import CAR, ImproperUniform, Normal
from numpyro.infer import init_to_feasible

from numpyro_gpaug._numpyro import first_rows, residual_policy, traceable_sites
from numpyro_gpaug.distributions.sparse_prior import sparse_prior
from numpyro_gpaug.gp.conditional import Conditional
from numpyro_gpaug.likelihoods.expectations import Route, base_distribution
from numpyro_gpaug.math import sparse_cholesky
from numpyro_gpaug.math.arrays import is_traced
from numpyro_gpaug.math.sparse_terms import by_columns
from numpyro_gpaug.model.arguments import Arguments, is_array
from numpyro_gpaug.model.closures import count_run
from numpyro_gpaug.model.columns import by_name

Trace = dict[str, dict[str, Any]]


class Block(NamedTuple):
    """A Gaussian latent with closed-form updates.

    :param name: the function-value site ``"f"`` of a Gaussian process, or the sample
        site of a plain weight vector.
    :param site: the sample site: ``"f.v"``, or again the weight vector's.
    :param shape: event shape, (M,) or (C, M).
    :param dtype: its dtype.
    """

    name: str
    site: str
    shape: tuple[int, ...]
    dtype: Any

    @property
    def is_process(self) -> bool:
        """Whether the block is a Gaussian process's inducing vector."""
        return self.name != self.site


class Observed(NamedTuple):
    """An observed site and how its expected log-density is computed.

    :param name: the site.
    :param latents: parameters of a registered likelihood that are affine in a latent;
        empty for other sites. Each is a predictor, ``"site/parameter"``.
    :param sources: names of the blocks that each of them depends on.
    :param route: how the exact expectation is computed.
    :param processes: Gaussian processes the site depends on.
    :param augmented: whether its likelihood has an augmentation.
    :param log_concave: whether it is known to be log-concave in its latents.
    :param reason: why the site has no closed-form update, ``None`` if it has.
    :param factor: whether it is a :func:`numpyro.factor`, a term of the density that
        observes nothing.
    :param correlated: for a Gaussian with a covariance the number of axes of its event,
        1 for vectors and 2 for matrices; see
        :mod:`~numpyro_gpaug.model.correlated_data`. 0 for other likelihoods.
    :param columns: the axis along which one array contains both predictors of a datum.
    :param indexed: whether indices in the data pair the entries of two predictors.
    :param vector: whether a parameter of each datum has several latents, as classes.
    """

    name: str
    latents: tuple[str, ...] = ()
    sources: tuple[tuple[str, ...], ...] = ()
    route: Route = Route.CONSTANT
    processes: tuple[str, ...] = ()
    augmented: bool = False
    log_concave: bool = False
    reason: str | None = None
    factor: bool = False
    correlated: int = 0
    columns: int | None = None
    indexed: bool = False
    vector: bool = False

    @property
    def predictors(self) -> tuple[str, ...]:
        """Names of the predictors of the site."""
        return tuple(f"{self.name}/{latent}" for latent in self.latents)


class Plate(NamedTuple):
    """A plate: its size and the size of its subsample."""

    size: int
    subsample_size: int


# The largest number of shapes of arguments for which results about a model are kept.
MAX_SHAPES = 64


def from_cache(
    cache: dict[Any, Any], key: Any, made: Callable[[], Any], most: int = MAX_SHAPES
) -> Any:
    """Return the cached value of a key, which is made if necessary. A cache of more
    than ``most`` values drops the oldest."""
    if key not in cache:
        if len(cache) >= most:
            cache.pop(next(iter(cache)))
        cache[key] = made()
    return cache[key]


class Leaves(NamedTuple):
    """The leaves of a param loaded from an archive. Its code defines their tree."""

    leaves: tuple[Array, ...]


def fill(fn: Callable[..., Any], values: dict[str, Any]) -> Callable[..., Any]:
    """Return ``fn`` with sites and params filled in by name, and :class:`Leaves` put
    together. Values become JAX arrays, like those that NumPyro draws: NumPy arrays
    cannot be indexed by traced codes."""

    def filled(message: dict[str, Any]) -> Any:
        value = values.get(message["name"])
        if not isinstance(value, Leaves):
            return jax.tree.map(lambda x: jnp.asarray(x) if is_array(x) else x, value)
        initial = message["fn"](*message["args"], **message["kwargs"])
        if initial is None:  # the first call asks whether the param has a value
            return None
        declared = len(jax.tree.leaves(initial))
        if declared != len(value.leaves):
            raise ValueError(
                f"param {message['name']!r} was saved with {len(value.leaves)} arrays, "
                f"but the code declares {declared}. Load it with the model "
                "and the guide of the fit"
            )
        return jax.tree.unflatten(jax.tree.structure(initial), value.leaves)

    return handlers.substitute(fn, substitute_fn=filled)


def fixed_key(*numbers: int) -> Array:
    """A random key that is fixed, from its two numbers (zeros, for callers whose result
    does not depend on it): ``jax.random.key`` would compile a program."""
    data: Any = np.array(numbers or (0, 0), np.uint32)
    return jax.random.wrap_key_data(data, impl="threefry2x32")


def run_model(
    model: Callable[..., Any],
    arguments: Arguments,
    key: Array,
    values: dict[str, Any],
    expose_types: list[str] | None = None,
) -> Trace:
    """Return the trace of ``model`` with sites, params and function values filled in.

    :param model: a NumPyro model.
    :param arguments: its arguments.
    :param key: the seed of all sites that are not in ``values``.
    :param values: values by site name; a Gaussian process with given function values
        computes nothing else.
    :param expose_types: types of sites that outer handlers may see. The default is
        none, because a caller may be inside handlers of its own (a guide being traced).
    """
    count_run()
    args, kwargs = arguments.merge()
    added = arguments.static[-1]
    if added is not None:
        model = first_rows(model, arguments.arrays[-1], added.size)
    filled = fill(handlers.seed(traceable_sites(model), key), values)
    filled = handlers.substitute(filled, substitute_fn=_somewhere)
    # NumPyro checks known parameters with a program for each operation, and traces the
    # checks of all others. check_constants replaces this.
    unchecked = numpyro.validation_enabled(is_validate=False)
    with handlers.block(expose_types=expose_types), unchecked:
        policy = residual_policy(filled, "mean")
        try:
            trace: Trace = handlers.trace(policy).get_trace(*args, **kwargs)
        except (AssertionError, IndexError, TypeError, ValueError) as error:
            if not any(x.startswith(_GIVEN) for x in getattr(error, "__notes__", ())):
                error.add_note(_given(model, args, kwargs, error))
            raise
    for site in trace.values():
        scale: Any = site.get("scale")
        if not is_traced(scale) and np.ndim(scale) == 0 and scale == 1:
            site["scale"] = None
    return trace


_GIVEN = "The model was given the arrays "


def _given(
    model: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    error: Exception,
) -> str:
    """Describe the arguments of a model, for the message of an error inside it."""
    named = by_name(model, args) | kwargs
    arrays = {k: x for k, x in named.items() if is_array(x)}
    shapes = [f"{k}: {x.dtype}{list(x.shape)}" for k, x in arrays.items()]
    said = f"{_GIVEN}{', '.join(shapes)}"
    rows = {len(x) for x in arrays.values() if x.ndim}
    if len(rows) > 1:
        said += f"; their lengths are {sorted(rows)}"
    if "incompatible shapes for broadcasting" in str(error):
        said += ". Index latents of groups by the codes of rows, effect[group]"
    if "Incompatible shapes for broadcasting" in str(error):
        said += ". Does a plate have another size than its data, or a mask than sites?"
    if "ndexer must have integer" in str(error):
        said += "; codes that index are whole numbers: pass codes.astype(int)"
    if "must have unique names" in str(error):
        said += ". Call a process once, f = gp(X) at all inputs, and index f[a], f[b]"
    if "string indexing" in str(error):
        said += (
            ". A data frame is one array for the model. Pass its columns as arguments, "
            "or a dict of them, {name: frame[name] for name in frame}"
        )
    if isinstance(error, jax.errors.TracerBoolConversionError):
        said += (
            ". The model branches (if, while, and, or) on a latent or an array "
            "argument, which are traced. Write jnp.where(condition, a, b), or pass a "
            "flag as a plain bool by keyword"
        )
    elif isinstance(error, jax.errors.NonConcreteBooleanIndexError):
        said += (
            ". An index of booleans selects rows. If these are codes of two groups, "
            "pass codes.astype(int). To select rows, pass the positions that "
            "np.nonzero finds outside of the model"
        )
    elif isinstance(error, jax.errors.JAXTypeError | jax.errors.JAXIndexError):
        said += (
            ". The model computes a size (such as of a plate), or a NumPy array, from "
            "latents or array arguments, which are traced. Call functions of jax.numpy "
            "(jnp.exp, not np.exp). Bind an argument that is a size to the model: "
            "functools.partial(model, mask=mask). Or pass sizes as plain numbers by "
            "keyword, compute positions such as np.nonzero(missing) outside of the "
            "model, and index arrays of jax.numpy"
        )
    return said


def is_improper(site: dict[str, Any]) -> bool:
    """Whether a site has a flat prior, which cannot be drawn from.

    :param site: its message.
    """
    sampled = site["type"] == "sample" and not site["is_observed"]
    return sampled and isinstance(base_distribution(site["fn"]), ImproperUniform)


def _somewhere(site: dict[str, Any]) -> Array | None:
    """Return a value for a site that has none and cannot be drawn: its prior is flat,
    or NumPyro draws it by a dense matrix of all areas."""
    if site["type"] != "sample" or site["value"] is not None:
        return None
    if is_improper(site):
        return init_to_feasible(site)
    base = base_distribution(site["fn"])
    if isinstance(base, CAR) and base.is_sparse and (field := sparse_prior(base)):
        noise = Normal().expand(site["fn"].shape())
        white = noise.sample(site["kwargs"]["rng_key"])
        factor = sparse_cholesky.factor(field.pattern, field.values)
        return field.value(by_columns(factor.half_solve_transposed, white))
    return None


def flat_functions(model: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``model`` with every Gaussian process at function values of zero."""

    def zeros(message: dict[str, Any]) -> Array | None:
        fn: Any = message.get("fn")
        if isinstance(fn, Conditional):
            return jnp.zeros(fn.shape, fn.dtype)
        return None

    return handlers.substitute(traceable_sites(model), substitute_fn=zeros)


def without_gaussians(model: Callable[..., Any], structure: Any) -> Callable[..., Any]:
    """Return ``model`` with function values of zero, and zeros for all Gaussian
    latents. Its traces show the hyperparameters alone.

    :param model: the model.
    :param structure: the structure of the model.
    """

    def filled(message: dict[str, Any]) -> Array | None:
        drawn = message["type"] == "sample" and message["name"] not in structure.others
        if drawn and not message["is_observed"]:
            return jnp.zeros(message["fn"].shape())
        return None

    return handlers.substitute(flat_functions(model), substitute_fn=filled)
