# SPDX-License-Identifier: Apache-2.0
"""Checks of the arguments of ConjugateSVI, before a fit and before a step on new
data."""

from __future__ import annotations

import math
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from numpyro_gpaug.guides import ConjugateGuide
from numpyro_gpaug.guides.sparse_gp import standard_naturals
from numpyro_gpaug.infer.vi.batches import Blocks
from numpyro_gpaug.infer.vi.feeds import RunArguments
from numpyro_gpaug.math.arrays import is_traced
from numpyro_gpaug.math.compiling import once
from numpyro_gpaug.math.fingerprints import fingerprint
from numpyro_gpaug.math.processes import spans_processes, text_of_every_process
from numpyro_gpaug.math.sharding import LATENTS
from numpyro_gpaug.model.arguments import Arguments, Model
from numpyro_gpaug.model.calls import (
    check_by_name,
    check_count,
    check_key,
    check_processes,
)
from numpyro_gpaug.model.inspect import require_conjugate
from numpyro_gpaug.model.latents import Structure
from numpyro_gpaug.model.observations import check_observations, check_observed
from numpyro_gpaug.model.structure import fixed_key, flat_functions, run_model
from numpyro_gpaug.model.validation import check_arguments


def check_fit(
    model: Model,
    guide: ConjugateGuide,
    updates: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    begins: bool = False,
    arguments: Arguments | None = None,
) -> Arguments:
    """Set up a guide, and raise for a model or arguments that cannot be fitted.

    :param model: the model.
    :param guide: its guide.
    :param updates: see :class:`~numpyro_gpaug.ConjugateSVI`.
    :param args: the model's arguments.
    :param kwargs: its keyword arguments.
    :param begins: whether :func:`~numpyro_gpaug.infer.vi.start.initial_state` will
        check them as ``guide.check_data`` does.
    :param arguments: the arguments split, if they have been checked one by one.
    :return: the arguments, transferred to the device once.
    :raises ValueError: for such a model or argument; it names the argument or the site.
    """
    if arguments is None:
        check_arguments(model, args, kwargs)
        arguments = Arguments.split(args, kwargs)
    if begins:
        guide.prepare(arguments)
    else:
        guide.check_data(arguments)
    structure = guide.structure
    check_observed(model, structure, arguments)
    require_conjugate(structure, updates)
    check_processes(structure)
    check_by_name(model, args, kwargs)
    return arguments


def check_batches(
    model: Model, structure: Structure, given: RunArguments, arguments: Arguments
) -> None:
    """Raise for a model whose latents belong to rows, given batches or blocks of rows:
    all of these would share the latents of the first.

    :param model: the model.
    :param structure: its structure.
    :param given: the arguments of a run.
    :param arguments: the model's arguments, perhaps with a batch.
    :raises ValueError: for such a model; it names the site.
    """
    num = arguments.num_rows
    drawn = any(p.size != p.subsample_size == num for p in structure.plates.values())
    if given.batches is None and not drawn:
        return

    def half(x: Any) -> Any:
        return x[: -(-len(x) // 2)]

    if given.batches is not None:
        args, kwargs = given.at(jax.tree.map(half, given.batches.first))
    else:  # inducing inputs, which are passed by name, may be as many as the rows
        rows = (half(x) if np.shape(x)[:1] == (num,) else x for x in given.args)
        args, kwargs = tuple(rows), given.kwargs
    fewer = Arguments.split(args, kwargs)

    def shapes(arguments: Arguments) -> dict[str, list[tuple[int, ...]]]:
        found: dict[str, list[tuple[int, ...]]] = {}

        def visit(arguments: Arguments) -> None:
            trace = run_model(flat_functions(model), arguments, fixed_key(), {})
            for name, site in trace.items():
                drawn = site["type"] == "sample" and not site["is_observed"]
                if drawn or site["type"] == "param":
                    found[name] = list(map(jnp.shape, jax.tree.leaves(site["value"])))

        jax.eval_shape(visit, arguments)
        return found

    whole = shapes(arguments)
    try:
        others = shapes(fewer)
    except (TypeError, ValueError, IndexError):
        return  # the model is for batches of this size
    for name, here in whole.items():
        if (there := others.get(name, here)) != here:
            raise ValueError(
                f"site {name!r} has shapes {here}, and {there} for half of the rows of "
                "a batch: its latents belong to rows, and a batch contains only some "
                "of these. Pass all data as arrays, or the inducing inputs of a "
                "process by name"
            )


def check_run(rng_key: Any, num_steps: int, tol: float | None) -> None:
    """Raise for invalid arguments of a run.

    :raises ValueError: for such an argument; it names it.
    """
    check_key(rng_key)
    check_count("num_steps", num_steps)
    if tol is not None and not 0 <= tol < np.inf:
        raise ValueError(f"tol must be a number >= 0 or None, got {tol}")


def check_alike(
    mesh: Mesh | None, rng_key: Any, num_steps: int, tol: float | None, state: Any
) -> None:
    """Raise, in all processes that share rows, if they are about to do different runs.
    Otherwise they would wait for each other forever, or compute different numbers.

    :param mesh: the mesh of the rows.
    :param rng_key: the key of the run; likewise the number of steps and the tolerance.
    :param state: the state to continue from, if any.
    :raises ValueError: if they differ; it lists the run of each process.
    """
    if not spans_processes(mesh):
        return
    begins = (
        f"from step {getattr(state, 'step', '?')}" if state is not None else "a new fit"
    )
    found = text_of_every_process(
        f"{begins}, num_steps={num_steps}, tol={tol}, rng_key {fingerprint([rng_key])}"
    )
    if len(set(found)) > 1:
        raise ValueError(
            f"the processes disagree about the run, by process: {found}. Pass every "
            "process the same key, number of steps and init_state, from a file "
            "that all can read"
        )


def check_latents(structure: Structure, mesh: Mesh | None) -> None:
    """Raise if a mesh has an axis for latents along which they cannot be sharded.

    :param structure: the structure of the model.
    :param mesh: from :func:`~numpyro_gpaug.math.sharding.rows_mesh`.
    :raises ValueError: if they cannot; it names the processes.
    """
    parts = 1 if mesh is None else mesh.shape[LATENTS]
    if parts == 1:
        return
    joint = structure.joint
    counts = {b.name: b.shape[0] for b in structure.blocks if len(b.shape) > 1}
    if joint or not counts or any(count % parts for count in counts.values()):
        found = ", ".join(f"{name!r} has {n}" for name, n in counts.items())
        raise ValueError(
            f"the mesh has an axis 'latents' of {parts} devices, which must divide "
            "the latents of processes with num_latents evenly: "
            + ("AutoLatentGaussian has one Gaussian" if joint else found or "none is")
        )


def check_gaussian(structure: Structure) -> None:
    """Raise if there is no Gaussian to fit.

    :param structure: the structure of the model.
    :raises ValueError: if there is none; it states what can be one.
    """
    if any(block.shape[-1] for block in structure.blocks):
        return
    if not structure.joint:
        raise ValueError(
            "the model has no Gaussian process and no Gaussian weight vector on which "
            "data depend affinely. For random effects in plates, scalars and other "
            "Gaussian latents use AutoLatentGaussian(model)"
        )
    held = "; ".join(f"{name!r} is not: {reason}" for name, reason in structure.held)
    raise ValueError(
        "the model has no Gaussian latent for AutoLatentGaussian: a sample site of "
        "dist.Normal, MultivariateNormal, GaussianRandomWalk, CAR or the like on which "
        "the observations depend affinely, or a GaussianProcess"
        + (f" ({held})" if held else "")
        + "; numpyro.infer.MCMC(NUTS(model)) samples any model"
    )


def check_basis(state: Any, structure: Structure) -> None:
    """Raise for a state whose numbers are coordinates in another basis, or of latents
    with another structure.

    :param state: the state of a fit.
    :param structure: the structure of the model in its guide.
    :raises ValueError: for such a state; it states the reason.
    """
    if int(state.basis) != structure.basis_mark:
        raise ValueError(
            "the state uses another basis of the latents than the guide, because "
            "the guide changed its basis in a fit whose precision rounding did not "
            "resolve. Start a new run"
        )
    here = jax.eval_shape(lambda: standard_naturals(structure))
    trees: list[Any] = [jax.tree.structure(x) for x in (here, state.natural)]
    sizes = [[x.shape for x in jax.tree.leaves(y)] for y in (here, state.natural)]
    if trees[0] != trees[1] or sizes[0] != sizes[1]:
        raise ValueError(
            "the state belongs to latents of another structure: the model has another "
            "graph, mesh or number of groups, times or inducing inputs than in the run "
            "that made the state. Start a new run"
        )


def check_plates(structure: Structure, passed: tuple[str, ...], state: Any) -> None:
    """Raise for a state with other plates that draw a batch.

    :param structure: the structure of the model.
    :param passed: plates whose batches are passed in.
    :param state: the state of a fit.
    :raises ValueError: for such a state; it names the plates.
    """
    subsampled = set(structure.subsampled) - set(passed)
    if subsampled != set(state.epochs):
        raise ValueError(
            f"the state was made for subsampled plates {sorted(state.epochs)}, but "
            f"the arguments subsample {sorted(subsampled)}: start a new run"
        )


# In nats: the loss per datum above which data are examined; by how much a normal
# distribution with their own mean and deviation must explain them better; and the
# largest part of the bound that the prior of a latent may take.
_LARGE_LOSS, _WORSE, _PRIOR = 10.0, 5.0, 15.0


def warn_of_size(loss: np.floating, rows: int) -> bool:
    """Warn if rounding of the bound hides a nat for every row: then no step is seen to
    improve the fit, and it seems to have converged where it started.

    :param loss: minus the bound, in the dtype of the fit.
    :param rows: the number of rows.
    :return: whether it hides one.
    """
    hidden = float(loss) * float(np.finfo(loss.dtype).eps)
    if hides := hidden > max(rows, 1):
        warnings.warn(
            f"the bound is {-float(loss):.3g} nats for {rows} rows, and rounds to "
            f"{hidden:.2g} nats: the fit may have stopped anywhere. Likely causes: a "
            "rate that overflows where the fit starts, such as exp of a product of "
            "latents (add an intercept, or narrow their priors), or data in units far "
            "from the model's",
            stacklevel=5,
        )
    return hides


def warn_of_units(
    loss: float,
    model: Model,
    structure: Structure,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    """Warn about measurements that a converged fit explains badly, such as values in
    the millions under priors of unit scale.

    :param loss: minus the bound, or minus the log-evidence.
    :param model: the model.
    :param structure: the structure of the model.
    :param args: its arguments.
    :param kwargs: its keyword arguments.
    """
    arguments = Arguments.split(args, kwargs)
    if not loss > _LARGE_LOSS * max(arguments.num_rows, 1):
        return
    names: list[str] = []

    def measured(arguments: Arguments) -> list[Any] | None:
        trace = run_model(
            flat_functions(model), arguments, fixed_key(), structure.zeros
        )
        sites = [m for m in trace.values() if m.get("is_observed")]
        # Factors, weights and counts have large losses for other reasons.
        if any(m["scale"] is not None or m["fn"].is_discrete for m in sites):
            return None
        names[:] = [m["name"] for m in sites]
        masks = [getattr(m["fn"], "_mask", True) for m in sites]
        pairs = zip(sites, masks, strict=True)
        return [jnp.where(mask, m["value"], jnp.nan) for m, mask in pairs]

    values = once(measured, arguments)
    data = [x[np.isfinite(x)] for x in map(np.asarray, values or ())]
    if not data or any(x.size < 2 or not x.std() for x in data):
        return
    explained = -sum(x.size * (np.log(float(x.std())) + 1.42) for x in data)
    latents = sum(math.prod(b.shape) for b in structure.blocks)
    allowed = _WORSE * sum(x.size for x in data) + _PRIOR * latents
    if explained + loss < allowed:
        return
    worst = int(np.argmax([np.abs(x).max() for x in data]))
    mean, spread = float(data[worst].mean()), float(data[worst].std())
    warnings.warn(
        f"{names[worst]!r}, with mean {mean:.3g} and standard deviation {spread:.3g}, "
        "is explained far worse than by a normal distribution with these moments. "
        "Likely causes: units that the priors do not cover, or a scale that is "
        f"fixed and too small. Standardise it, ({names[worst]} - mean) / deviation, "
        "or widen the priors",
        stacklevel=3,
    )


class CheckedData:
    """Arguments of single steps. They are checked unless they equal the arguments of
    the last step.

    :param model: the model.
    :param guide: its guide.
    :param mesh: the mesh over which rows are sharded.
    """

    def __init__(self, model: Model, guide: ConjugateGuide, mesh: Mesh | None) -> None:
        self._model, self._guide, self._mesh = model, guide, mesh
        self._programs: dict[Any, Any] = {}
        self._seen: Any = None

    def __call__(
        self, state: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Arguments, np.uint32, Any]:
        """Return the arguments, the fingerprint of their arrays, and whether they are
        valid, which only the values of traced arguments can leave open.

        :param state: the state of the fit.
        :param args: the model's arguments.
        :param kwargs: its keyword arguments.
        :raises TypeError: for :class:`Batches` and :class:`Blocks`.
        :raises ValueError: for data that would make a fit NaN, and for observations
            outside the support of their likelihood.
        """
        if any(isinstance(x, Blocks) for x in (*args, *kwargs.values())):
            raise TypeError(
                "update and evaluate take arrays. Batches and Blocks are for init "
                "and run"
            )
        arguments = Arguments.split(args, kwargs).on(self._mesh)
        data = arguments.data
        if is_traced((state, arguments)):
            check_arguments(self._model, args, kwargs)
            return arguments, data, self._guide.valid(arguments)
        seen = arguments.shapes, int(data)
        if seen != self._seen:
            check_arguments(self._model, args, kwargs)
            self._guide.check_data(arguments)
            structure = self._guide.structure
            check_observations(self._model, structure, arguments, self._programs)
        # A state of the same data may have another basis.
        known = self._seen is not None and seen[0] == self._seen[0]
        if not known or self._guide.structure.basis_mark:
            check_basis(state, self._guide.structure)
        self._seen = seen
        return arguments, data, True
