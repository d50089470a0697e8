# SPDX-License-Identifier: Apache-2.0
"""The state that one step passes to the next, and states in files."""

from __future__ import annotations

from functools import cache
from os import PathLike
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_gpaug.errors import ArchiveError
from numpyro_gpaug.infer.vi.latent_gaussian import Natural
from numpyro_gpaug.math.files import read, refusing, write
from numpyro_gpaug.model.arguments import Values


class Hyper(NamedTuple):
    """Hyperparameters and their optimiser.

    :param values: unconstrained params of the model and of the other guide.
    :param update: the pending update, applied at the start of the next step.
    :param scale: fraction of it to apply; reduced when it made the bound fall.
    :param optim_state: the optax state, or a
        :class:`~numpyro_gpaug.infer.vi.quasi_newton.Search`.
    """

    values: Values
    update: Values
    scale: Array
    optim_state: Any


class ConjugateState(NamedTuple):
    """State of :class:`~numpyro_gpaug.ConjugateSVI`, a pytree of arrays.

    :param hyper: hyperparameters.
    :param natural: natural parameters of every Gaussian block, latent axis first.
    :param step_sizes: next step size to try, by block (full data).
    :param schedule: state of the step-size schedule (minibatches).
    :param epochs: by subsampled plate, a permutation and the position in it.
    :param bound: the bound at this state (full data), or of the last batch before it.
    :param data: fingerprint of the data of the bound.
    :param mark: the bound when it last rose by ``tol``.
    :param stalled: steps since then.
    :param unreached: by process, the share of function values that depend on at most
        one inducing value (``infer/vi/reach.py``).
    :param lost: error of the bound due to rounding, in nats
        (``infer/vi/resolution.py``); for the last state of a loop on full data.
    :param basis: a fingerprint of the basis of the latents, 0 for none.
    :param step: steps taken.
    :param rng_key: random key.
    """

    hyper: Hyper
    natural: Natural
    step_sizes: dict[str, Array]
    schedule: Any
    epochs: dict[str, tuple[Array, Array]]
    bound: Array
    data: Array
    mark: Array
    stalled: Array
    unreached: dict[str, Array]
    lost: Array
    basis: Array
    step: Array
    rng_key: Array


@cache
def unknown_bound(dtype: Any) -> Any:
    """Return the value that stands for an unknown bound, smaller than any bound. It is
    finite, because ``jax_debug_infs`` checks the outputs of compiled functions."""
    return jnp.finfo(dtype).min


def flagged(state: ConjugateState) -> ConjugateState:
    """Return a bound of NaN if the gradient is not finite. Otherwise every later step
    would be rejected, and the fit would seem to have converged."""
    finite = [jnp.isfinite(x).all() for x in jax.tree.leaves(state.hyper.update)]
    if not finite:
        return state
    good = jnp.stack(finite).all()
    return state._replace(bound=jnp.where(good, state.bound, jnp.nan))


def save_state(path: str | PathLike[str], state: ConjugateState) -> None:
    """Write a state to a file of plain arrays. The file is replaced atomically, so a
    complete file always exists.

    :param path: the file, ``.npz``.
    :param state: the state of a fit.
    :raises TypeError: for anything else.

    **Example** Write checkpoints during a run, and continue from the last one:

    >>> import os, tempfile, jax, jax.numpy as jnp, numpyro
    >>> import numpyro.distributions as dist, numpyro_gpaug as gpaug
    >>> from numpyro_gpaug.infer import load_state, save_state
    >>> def model(X, y=None, *, inducing):
    ...     gp = gpaug.GaussianProcess("f", gpaug.kernels.Matern52(1.0), inducing)
    ...     with numpyro.plate("data", X.shape[0]):
    ...         numpyro.sample("y", dist.Bernoulli(logits=gp(X)), obs=y)
    >>> X = jnp.linspace(-3, 3, 20)[:, None]
    >>> data = dict(X=X, y=(X[:, 0] > 0).astype(int), inducing=X[::2])
    >>> svi = gpaug.ConjugateSVI(model, gpaug.AutoSparseGP(model))
    >>> path = os.path.join(tempfile.mkdtemp(), "fit.npz")
    >>> def checkpoint(state, losses):
    ...     save_state(path, state)
    >>> key, options = jax.random.key(0), dict(progress_bar=False)
    >>> _ = svi.run(key, 4, **data, **options, callback=checkpoint)
    >>> state = load_state(path, like=svi.init(key, **data))
    >>> result = svi.run(key, 10 - int(state.step), **data, **options, init_state=state)
    >>> int(result.state.step), len(result.losses)
    (10, 6)
    """
    check_state(state, "state")
    leaves = jax.tree_util.tree_leaves_with_path(state)
    names = [jax.tree_util.keystr(path) for path, _ in leaves]
    arrays = {f"leaf{i}": _plain(x) for i, (_, x) in enumerate(leaves)}
    write(path, arrays, {"state": names})


def load_state(path: str | PathLike[str], like: ConjugateState) -> ConjugateState:
    """Read a state from a file. A run continues from it bit for bit, as if it had not
    been interrupted.

    :param path: from :func:`save_state`.
    :param like: a state of the same model, guide and data, from ``svi.init``.
    :raises ArchiveError: if the file is damaged, or does not contain such a state.
    """
    check_state(like, "like")
    with refusing(f"{path} is not the file of a state, or is damaged"):
        header, arrays = read(path)
    saved = header.get("state")
    leaves, treedef = jax.tree_util.tree_flatten_with_path(like)
    names = [jax.tree_util.keystr(name) for name, _ in leaves]
    if saved is None:
        raise ArchiveError(
            f"{path} contains a posterior, not a state. Read it with Posterior.load"
        )
    if saved != names:
        only = sorted({*saved} ^ {*names})
        raise ArchiveError(
            f"{path} contains the state of another fit, or of another version: {only} "
            "occur in only one of the two"
        )
    found = []
    for i, (name, (_, x)) in enumerate(zip(names, leaves, strict=True)):
        array, plain = arrays.get(f"leaf{i}"), _plain(x)
        if array is None or (array.shape, array.dtype) != (plain.shape, plain.dtype):
            raise ArchiveError(
                f"{path}: {name} has shape {getattr(array, 'shape', None)}, and this "
                f"model and data need {plain.shape}, {plain.dtype}. Pass the model, "
                "guide and data of the fit"
            )
        made = jnp.asarray(array)
        found.append(jax.random.wrap_key_data(made) if _is_key(x) else made)
    return jax.tree.unflatten(treedef, found)


def check_state(state: Any, name: str) -> None:
    """Raise for anything but a state, such as a result.

    :param name: the name of the argument.
    :raises TypeError: for anything but a state; it names the argument.
    """
    if not isinstance(state, ConjugateState):
        raise TypeError(
            f"{name} must be a state: from a callback, result.state, or svi.init. "
            f"Got a {type(state).__name__}"
        )


def _is_key(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _plain(x: Any) -> np.ndarray:
    return np.asarray(jax.random.key_data(x) if _is_key(x) else x)
