# SPDX-License-Identifier: Apache-2.0
"""Draws from a fitted guide, as a tree that ArviZ reads."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import Array, random
from jax.typing import ArrayLike
from numpyro import handlers

from numpyro_gpaug._numpyro import whole_plates
from numpyro_gpaug.diagnostics._arviz import part_of_arviz
from numpyro_gpaug.diagnostics._nested import tree_of_nested
from numpyro_gpaug.diagnostics._run import run
from numpyro_gpaug.gp.process import Conditional
from numpyro_gpaug.guides.function_space import AutoFunctionSpaceGP
from numpyro_gpaug.guides.sparse_gp import AutoSparseGP
from numpyro_gpaug.infer import NestedVI
from numpyro_gpaug.likelihoods.expectations import (
    Route,
    base_distribution,
    is_pseudo,
    lookup_expectation,
    predictive,
    through_wrappers,
)
from numpyro_gpaug.math.affine import selected as _selected
from numpyro_gpaug.math.compiling import Compiled
from numpyro_gpaug.model.inspect import inspect_model, structure_at
from numpyro_gpaug.model.predictors import of_site
from numpyro_gpaug.model.structure import Arguments, Observed, Structure, remembered
from numpyro_gpaug.model.view import NUM_NODES, ModelView, nodes_of

if TYPE_CHECKING:
    from xarray import DataTree

# Numbers held at once while draws are evaluated: 64 MiB in float32.
_BUDGET = 2**24


def to_datatree(
    key: Array,
    model: Callable[..., Any] | NestedVI,
    guide: Callable[..., Any] | None = None,
    params: dict[str, Any] | None = None,
    *args: Any,
    num_samples: int = 1000,
    losses: ArrayLike | None = None,
    **kwargs: Any,
) -> DataTree:
    r"""Draws from a fitted guide, or of a nested run, as a tree that ArviZ reads.

    Groups, with dimensions ``chain`` (of size 1) and ``draw`` in the first four:

    * ``posterior``: every latent, and every deterministic site, among them the function
      values of Gaussian processes;
    * ``posterior_predictive``: replicated observations;
    * ``log_likelihood``: per observation; ``pseudo_log_likelihood`` for those whose
      likelihood is not normalised (``BayesianSVM``), so that no model comparison takes
      it for a density;
    * ``sample_stats``: ``log_p``, the log joint density of draw and observations, and
      ``log_q``, the log density of the guide;
    * ``observed_data``;
    * ``fit``: ``losses``, over a dimension ``step``, if they were given.

    With fewer inducing inputs than data, function values are not determined by a draw
    of the inducing vector :math:`v`. The likelihood of an observation is the one given
    :math:`v`, with what is left over integrated out,
    :math:`\log \int p(y_n \mid f_n) \, p(f_n \mid v) \, df_n`: in closed form where a
    predictive distribution is registered, else by 32 nodes or draws. ``log_p`` is the
    log prior plus the (scaled) sum of these. It is the density that
    ``with_residual(model, "site")`` has once its residuals are integrated out; with the
    training inputs as inducing inputs that is the model itself.

    ``log_p`` and ``log_q`` are densities of the same latents, in the space the model
    declares them in. A latent that the guide holds at a point (``AutoDelta``) has no
    density: both take it as given, and importance ratios speak about the rest.

    Of a :class:`~numpyro_gpaug.NestedVI` after its run, ``to_datatree(key, nested)``:
    its equally weighted draws, which are of the posterior already, so that there is no
    ``log_q``, and :func:`loo` takes them as those of MCMC.

    :param key: random key.
    :param model: the model; or a :class:`~numpyro_gpaug.NestedVI`, and nothing else.
    :param guide: its guide: an :class:`~numpyro_gpaug.AutoSparseGP` or any other.
    :param params: params of the fit.
    :param args: the model's arguments, observations included; all of the data, also
        after a fit on minibatches.
    :param num_samples: number of draws, at least 2.
    :param losses: losses of the fit.
    :param kwargs: the model's keyword arguments.
    :return: a :class:`xarray.DataTree`. ``arviz_base`` and ``arviz_stats``, which are
        installed with the package, read it on every Python; ``import arviz``, with its
        plots, works from Python 3.12 on, as only arviz 1.0 reads such trees; on 3.11
        there is ``arviz_plots``.
    :raises ValueError: for fewer than two draws.
    :raises TypeError: for an :class:`~numpyro_gpaug.AutoFunctionSpaceGP`, a model
        without guide and params, a result in place of its params, and a nested run
        with any of them.
    :raises ImportError: where ``arviz_base`` does not import, with what to install.

    **Example**

    >>> import jax, numpyro, jax.numpy as jnp, numpyro.distributions as dist
    >>> import numpyro_gpaug as gpaug
    >>> def model(X, y=None):
    ...     gp = gpaug.GaussianProcess("f", gpaug.kernels.Matern32(), inducing=X[::2])
    ...     with numpyro.plate("data", X.shape[0]):
    ...         numpyro.sample("y", dist.Bernoulli(logits=gp(X)), obs=y)
    >>> guide = gpaug.AutoSparseGP(model)
    >>> X, y = jnp.arange(8.0)[:, None], jnp.array([0, 1] * 4)
    >>> svi = gpaug.ConjugateSVI(model, guide)
    >>> params = svi.run(jax.random.key(0), 5, X, y, progress_bar=False).params
    >>> key = jax.random.key(1)
    >>> tree = gpaug.diagnostics.to_datatree(key, model, guide, params, X, y)
    >>> dict(tree["log_likelihood"].sizes)
    {'chain': 1, 'draw': 1000, 'data': 8}
    >>> gpaug.diagnostics.psis_khat(tree).khat < 0.7
    True
    """
    if isinstance(model, NestedVI):
        if guide is not None or params is not None or args or kwargs:
            raise TypeError(
                "a NestedVI knows its model and its arguments: to_datatree(key, nested)"
            )
        return tree_of_nested(key, model)
    if guide is None or params is None:
        raise TypeError("pass a guide and its params, or a NestedVI after its run")
    if not isinstance(params, Mapping):
        given = type(params).__name__
        raise TypeError(f"params is a {given}: pass the result's, result.params")
    if num_samples < 2:
        raise ValueError(f"num_samples must be at least 2, got {num_samples}")
    if isinstance(guide, AutoFunctionSpaceGP):
        raise TypeError(
            "an AutoFunctionSpaceGP has no density with respect to the prior, so that "
            "there are no importance ratios: judge it on held-out data, by "
            "Posterior.log_prob, brier_score and expected_calibration_error"
        )
    arguments = Arguments.split(args, kwargs)
    programs = _programs(model, guide, arguments, args, kwargs)
    guide_key, model_key = random.split(key)
    latents, log_q = programs.draw(
        arguments.arrays, params, random.split(guide_key, num_samples)
    )
    latents, log_q = jax.tree.map(np.asarray, latents), np.asarray(log_q, float)
    fixed = {n for n in programs.delta if (latents[n] == latents[n][:1]).all()}
    evaluated = _evaluate(
        programs,
        arguments.arrays,
        params,
        random.split(model_key, num_samples),
        {n: v[0] for n, v in latents.items() if n in fixed},
        {n: v for n, v in latents.items() if n not in fixed},
    )
    tree = _as_tree(latents, log_q, evaluated)
    if losses is not None:
        from xarray import Dataset, DataTree

        tree["fit"] = DataTree(Dataset({"losses": ("step", np.asarray(losses))}))
    return tree


class _Draws(NamedTuple):
    """What the model gives at draws, by site; the first axis runs over draws."""

    deterministic: dict[str, Any]
    replicated: dict[str, Any]
    likelihoods: dict[str, Any]
    scaled: dict[str, Any]
    prior: Any


class _Evaluated(NamedTuple):
    draws: _Draws
    log_p: np.ndarray
    observed: dict[str, np.ndarray]
    model: _Programs


class _Programs:
    """A guide's draws, and its model at them, compiled once for arguments of one shape;
    kinds of sites are noted while both are traced."""

    def __init__(
        self,
        model: Callable[..., Any],
        guide: Callable[..., Any],
        structure: Structure,
        static: Any,
    ) -> None:
        self.model, self.guide = model, guide
        self.structure, self.static = structure, static
        # Given a draw, weight vectors are known, and the processes' residuals are all
        # that is left to integrate.
        self.given_weights = dataclasses.replace(structure, blocks=structure.processes)
        self.delta: set[str] = set()
        self.dims: dict[str, list[str]] = {}
        self.factors: set[str] = set()
        self.pseudo: set[str] = set()
        self.draw: Any = Compiled(jax.vmap(self._draw, (None, None, 0)))
        self.at: Any = Compiled(jax.vmap(self._at, (None, None, 0, None, 0), (0, None)))

    def _draw(
        self, arrays: Any, params: Any, key: Array
    ) -> tuple[dict[str, Array], Array]:
        """Latents and their log density. Which of them the guide declares by a
        ``Delta`` is noted, but that alone does not make a latent fixed: guides such as
        ``AutoLowRank...`` draw an auxiliary vector and declare latents as ``Delta``s
        whose ``log_density`` is the Jacobian, so the sum over all the guide's sites is
        the density of the latents."""
        args, kwargs = Arguments(arrays, self.static).merge()
        seeded = handlers.seed(handlers.substitute(self.guide, data=params), key)
        trace = handlers.trace(seeded).get_trace(*args, **kwargs)
        names = (*(b.site for b in self.structure.blocks), *self.structure.others)
        fns = {n: base_distribution(trace[n]["fn"]) for n in names}
        self.delta.update(n for n, fn in fns.items() if isinstance(fn, dist.Delta))
        drawn = [site for site in trace.values() if site["type"] == "sample"]
        return {n: trace[n]["value"] for n in names}, _log_density(drawn)

    def _at(
        self, arrays: Any, params: Any, key: Array, fixed: Any, drawn: Any
    ) -> tuple[_Draws, dict[str, Array]]:
        """What the model gives at one draw, and the observations."""
        given = Arguments(arrays, self.static)
        values = {**params, **fixed, **drawn}
        noise_key, bound_key, new_key = random.split(key, 3)
        trace = run(self.model, given, noise_key, values, "noise")
        self.dims = {k: names for k, s in trace.items() if (names := _plate_names(s))}
        view = ModelView(self.given_weights, self.model, given, values, bound_key)
        likelihoods = _log_likelihoods(view, {**fixed, **drawn})
        deterministic = {
            n: s["value"] for n, s in trace.items() if s["type"] == "deterministic"
        }
        observed, replicated, scaled = {}, {}, {}
        new_keys = random.split(new_key, len(likelihoods) + 1)
        for name, new_key in zip(likelihoods, new_keys, strict=False):
            message = trace[name]
            scaled[name] = _scaled(likelihoods[name], message["scale"])
            if isinstance(base_distribution(message["fn"]), dist.Unit):
                self.factors.add(name)  # numpyro.factor: a density of no observation
                continue
            if is_pseudo(message["fn"]):
                self.pseudo.add(name)
            observed[name] = message["value"]
            replicated[name] = message["fn"].sample(new_key)
        prior = _log_density([trace[n] for n in drawn])
        return _Draws(deterministic, replicated, likelihoods, scaled, prior), observed

    def numbers_held(self, shapes: _Draws, fixed: dict[str, Any]) -> int:
        """How many numbers the likelihoods of one draw take while they are computed."""
        size = sum(math.prod(s.shape[1:]) for s in jax.tree.leaves(shapes.likelihoods))
        width = NUM_NODES
        if not fixed.keys() >= set(self.structure.others):
            # K_ZX is another one for every draw.
            width += sum(math.prod(b.shape) for b in self.given_weights.blocks)
        return max(1, size * width)


# By model, guide and the shapes of arguments; few, for each keeps these alive.
_CACHE: dict[Any, _Programs] = {}
_MAX_PROGRAMS = 8


def _programs(
    model: Callable[..., Any],
    guide: Callable[..., Any],
    arguments: Arguments,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> _Programs:
    """Compiled programs, those of the last few models and guides remembered."""

    def made() -> _Programs:
        whole: Any = whole_plates(model)
        if isinstance(guide, AutoSparseGP):
            structure = guide.setup(*args, **kwargs).structure
        else:
            structure = inspect_model(whole, *args, **kwargs)
        structure = structure_at(whole, structure, arguments)
        return _Programs(whole, guide, structure, arguments.static)

    key = model, guide, arguments.shapes
    return remembered(_CACHE, key, made, _MAX_PROGRAMS)


def _evaluate(
    model: _Programs,
    arrays: tuple[Array, ...],
    params: dict[str, Any],
    keys: Array,
    fixed: dict[str, np.ndarray],
    drawn: dict[str, np.ndarray],
) -> _Evaluated:
    """The model at every draw, in chunks that bound the memory."""
    total = len(keys)
    shapes, _ = model.at.eval_shape(arrays, params, keys, fixed, drawn)
    chunk = min(total, max(1, _BUDGET // model.numbers_held(shapes, fixed)))
    parts = []
    for start in range(0, total, chunk):
        chosen = np.minimum(np.arange(start, start + chunk), total - 1)
        block = {n: v[chosen] for n, v in drawn.items()}
        part, observed = model.at(arrays, params, keys[chosen], fixed, block)
        kept = min(chunk, total - start)
        parts.append(jax.tree.map(lambda x, kept=kept: np.asarray(x[:kept]), part))
    draws = jax.tree.map(lambda *blocks: np.concatenate(blocks), *parts)
    # In double precision, as the ratios are small differences of large sums.
    log_p = draws.prior.astype(float) + sum(
        v.astype(float).reshape(total, -1).sum(-1) for v in draws.scaled.values()
    )
    return _Evaluated(draws, log_p, jax.tree.map(np.asarray, observed), model)


def _as_tree(
    latents: dict[str, np.ndarray], log_q: np.ndarray, evaluated: _Evaluated
) -> DataTree:
    from_dict = part_of_arviz("arviz_base").from_dict
    draws, model = evaluated.draws, evaluated.model
    densities = draws.likelihoods.items()
    no_likelihood = model.factors | model.pseudo
    groups: dict[str, dict[str, Any]] = {
        "posterior": {**latents, **draws.deterministic},
        "posterior_predictive": draws.replicated,
        "log_likelihood": {n: v for n, v in densities if n not in no_likelihood},
        "pseudo_log_likelihood": {n: v for n, v in densities if n in model.pseudo},
        "sample_stats": {"log_p": evaluated.log_p, "log_q": log_q},
    }
    one_chain = {
        group: {name: v[None] for name, v in found.items()}
        for group, found in groups.items()
        if found
    }
    return from_dict(
        {**one_chain, "observed_data": evaluated.observed},
        sample_dims=["chain", "draw"],
        dims=model.dims,
        attrs={"/": {"inference_library": "numpyro_gpaug"}},
    )


def _log_likelihoods(view: ModelView, latents: Any) -> dict[str, Array]:
    """Per observed site, the log density of each observation given the draw."""
    at, maps, selected = {}, view.maps(), view.selected()
    for block in view.structure.blocks:
        v = latents[block.site]
        v = _selected(v if v.ndim > 1 else v[None], selected[block.name])
        at[block.name] = maps[block.name].given(v)
    means, spreads = view.predictors.moments(at)
    carried = view.predictors.marginals(at)

    def one(site: Observed) -> Array:
        message = view.message(site.name)
        fn, y = message["fn"], message["value"]
        if site.route is Route.CONSTANT or not site.processes:
            return fn.log_prob(y)
        registered = lookup_expectation(type(base_distribution(fn))) is not None
        if site.route is Route.CLOSED_FORM and registered and not is_pseudo(fn):
            value = predictive(fn, *of_site(carried, site)).log_prob(y)
            return through_wrappers(fn, lambda _: value)
        return _mixture(view, site, means, spreads)

    return {site.name: one(site) for site in view.structure.observed}


def _mixture(
    view: ModelView, site: Observed, means: dict[str, Array], spreads: dict[str, Array]
) -> Array:
    """The same without a closed form: by nodes if each datum depends on one latent,
    else by draws. Without residuals, as on a full process, both are exact."""
    pseudo = len(site.processes) == 1 and is_pseudo(view.message(site.name)["fn"])
    nodal = site._replace(route=Route.GAUSS_HERMITE) if pseudo else site
    z, weights = nodes_of(nodal, means, random.key(0))

    def density(z: dict[str, Array]) -> Array:
        moved = {k: means[k] + jnp.sqrt(spreads[k]) * z[k] for k in z}
        message = view.trace({**means, **moved})[site.name]
        return message["fn"].log_prob(message["value"])

    values = jax.vmap(density)(z)
    log_weights = jnp.log(weights).reshape((-1,) + (1,) * (values.ndim - 1))
    return jax.nn.logsumexp(values + log_weights, 0)


def _log_density(sites: list[dict[str, Any]]) -> Array:
    terms = [_scaled(s["fn"].log_prob(s["value"]), s["scale"]).sum() for s in sites]
    return sum(terms[1:], terms[0]) if terms else jnp.zeros(())


def _scaled(value: Array, scale: Any) -> Array:
    return value if scale is None else value * scale


def _plate_names(site: dict[str, Any]) -> list[str]:
    """Plates as names of dimensions; ArviZ names the axes that are left."""
    frames = {frame.dim: frame.name for frame in site.get("cond_indep_stack", ())}
    if isinstance(site.get("fn"), Conditional):
        # Rows come first in function values, whatever the dim of their plate.
        return [frames[-1]] if frames.keys() == {-1} else []
    if site["type"] != "sample" or not frames:
        return []
    batch = site["fn"].batch_shape
    axes = range(-len(batch), 0)
    return [frames.get(d, f"{site['name']}_dim_{i}") for i, d in enumerate(axes)]
