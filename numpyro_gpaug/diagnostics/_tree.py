# SPDX-License-Identifier: Apache-2.0
"""Draws from a fitted guide, or from a run of :class:`~numpyro_gpaug.NestedVI`, as a
tree that ArviZ reads; and comparison of models by their evidence."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax import Array, random
from jax.typing import ArrayLike
from numpyro.infer import MCMC

from numpyro_gpaug.diagnostics import _run
from numpyro_gpaug.diagnostics._arviz import tree_of
from numpyro_gpaug.guides import AutoLatentGaussian
from numpyro_gpaug.guides.function_space import AutoFunctionSpaceGP
from numpyro_gpaug.infer import NestedVI
from numpyro_gpaug.likelihoods.expectations import stable_log_prob
from numpyro_gpaug.model.arguments import Arguments, Model, Values
from numpyro_gpaug.model.closures import watched
from numpyro_gpaug.model.columns import Columns
from numpyro_gpaug.model.sources import factors_of_rows
from numpyro_gpaug.model.structure import run_model
from numpyro_gpaug.predict import Posterior

if TYPE_CHECKING:
    import pandas
    from xarray import DataTree


def tree_of_nested(key: Array, nested: NestedVI) -> DataTree:
    """Return the equally weighted draws of a run, for
    :func:`~numpyro_gpaug.diagnostics.to_datatree`.

    :param key: random key for replicated observations.
    :param nested: a :class:`~numpyro_gpaug.NestedVI` after a run.
    """
    draws = nested.get_samples(group_by_chain=True)
    chains, num = next(iter(draws.values())).shape[:2]
    flat = {k: x.reshape(chains * num, *x.shape[2:]) for k, x in draws.items()}
    arguments = nested.arguments
    latent = {*nested.latents}
    tops = [n for n in _run.top_level(nested.model, arguments) if n in latent]

    def one(
        given: Arguments, each: tuple[Array, dict[str, Array]]
    ) -> tuple[Values, ...]:
        key, values = each
        trace = run_model(nested.model, given, key, values)
        sites = _run.observed_sites(trace).items()
        densities = {k: stable_log_prob(s["fn"], s["value"]) for k, s in sites}
        new = _run.replicated(_run.data_sites(trace), key)
        terms = _run.densities_of_data(trace, densities)
        return new, terms, _run.log_priors(trace, tops)

    @jax.jit
    def everywhere(given: Arguments, keys: Array, values: Values) -> Any:
        first = {k: x[0] for k, x in values.items()}
        trace = run_model(nested.model, given, keys[0], first)
        found = jax.lax.map(lambda each: one(given, each), (keys, values))
        return {k: _run.Seen.of(s) for k, s in _run.data_sites(trace).items()}, found

    key, prior_key = random.split(key)
    keys = random.split(key, chains * num)
    values = {k: x for k, x in flat.items() if k in latent}
    seen, found = everywhere(arguments, keys, values)

    def by_chain(found: Values) -> Values:
        return jax.tree.map(
            lambda x: np.asarray(x).reshape(chains, num, *x.shape[1:]), found
        )

    predicted, densities, priors = map(by_chain, found)
    groups = {
        "posterior": {k: np.asarray(x) for k, x in draws.items()},
        "posterior_predictive": predicted,
        "log_likelihood": densities,
        "log_prior": priors,
        **_run.prior_groups(
            _run.prior_sampler(nested.model), arguments, {}, prior_key, chains * num
        ),
    }
    summed = _summed(nested.model, nested.structure, arguments, seen)
    return tree_of(groups, None, nested.labelled_axes, nested.labels, seen, summed)


def _summed(model: Model, structure: Any, arguments: Arguments, seen: Any) -> list[str]:
    """Return the names of the factors, observed sites without observations, that are
    sums over data."""
    names = [s.name for s in structure.observed if s.name not in seen]
    found = factors_of_rows(model, names, structure, arguments)
    return [k for k, summed in found.items() if summed]


def compare_evidence(runs: Mapping[str, NestedVI]) -> pandas.DataFrame:
    """Rank models by their evidence ``p(y)``, the density of the data under the prior
    predictive distribution.

    The evidence depends on the **priors** of all hyperparameters and latents, however
    many data there are: a prior that is ten times too wide costs about 2.3 nats for
    each of its numbers. The evidence compares models including their priors, and does
    not exist for improper priors. All models must have observed the same data in the
    same units. :func:`compare` uses predictions, which depend less on priors.

    :param runs: by name, each :class:`~numpyro_gpaug.NestedVI` after its run; at least
        two.
    :return: a table with one row per model, the best first: ``log_evidence`` and its
        standard error ``error``, ``difference`` to the best (the logarithm of a Bayes
        factor) and its standard error ``difference_error``, and ``khat``.
    :raises ValueError: for fewer than two runs, and runs without evidence (NUTS on the
        collapsed model).
    :raises TypeError: for anything but runs.

    It warns about runs whose certificate fails: their evidence is not reliable.

    **Example**

    >>> import jax, numpyro, jax.numpy as jnp, numpyro.distributions as dist
    >>> import numpyro_gpaug as gpaug
    >>> def model(t, y=None, *, wide):
    ...     b = numpyro.sample("b", dist.Normal(0, wide))
    ...     with numpyro.plate("data", len(t)):
    ...         numpyro.sample("y", dist.Normal(b * t, 1.0), obs=y)
    >>> t, runs = jnp.arange(5.0), {}
    >>> for wide in (1.0, 100.0):
    ...     run = gpaug.NestedVI(model, num_points=64, progress_bar=False)
    ...     run.run(jax.random.key(0), t, 0.5 * t, wide=wide)
    ...     runs[f"sd {wide}"] = run
    >>> print(gpaug.diagnostics.compare_evidence(runs)["difference"].round(1))
    sd 1.0      0.0
    sd 100.0   -4.5
    Name: difference, dtype: float64
    """
    import pandas

    if not isinstance(runs, Mapping):
        raise TypeError(
            f"runs is a {type(runs).__name__}. Pass a dict of NestedVI by name"
        )
    if len(runs) < 2:
        raise ValueError(f"runs has {[*runs]}. Pass two runs or more to compare")
    rows = {}
    for name, nested in runs.items():
        if not isinstance(nested, NestedVI):
            raise TypeError(
                f"{name!r} is a {type(nested).__name__}. Pass a NestedVI after its run"
            )
        fields = nested.get_extra_fields()
        rows[name] = [fields[k] for k in ("log_evidence", "log_evidence_error", "khat")]
        if not np.isfinite(rows[name][0]):
            raise ValueError(
                f"{name!r} has no evidence: its many hyperparameters were drawn by "
                "NUTS, which does not estimate it. Use diagnostics.compare instead"
            )
        if not nested.certified:
            warnings.warn(
                f"{name!r} is not certified (k-hat {fields['khat']:.2f}; its "
                "summary gives the reason), so its evidence may be far off",
                stacklevel=2,
            )
    columns = ["log_evidence", "error", "khat"]
    table = pandas.DataFrame.from_dict(rows, orient="index", columns=columns)
    table = table.sort_values("log_evidence", ascending=False)
    best = table.iloc[0]
    table.insert(2, "difference", table["log_evidence"] - best["log_evidence"])
    errors = np.hypot(table["error"], best["error"])
    errors.iloc[0] = 0.0
    table.insert(3, "difference_error", errors)
    return table


def to_datatree(
    key: Array,
    model: Model | NestedVI | None = None,
    guide: Model | None = None,
    params: Values | None = None,
    *args: Any,
    num_samples: int = 1000,
    losses: ArrayLike | None = None,
    **kwargs: Any,
) -> DataTree:
    r"""Draw from a fitted guide, or take the draws of a nested run, and return a tree
    that ArviZ reads.

    Groups, with dimensions ``chain`` (of size 1) and ``draw`` in all but the last two:

    * ``posterior``: every latent and every deterministic site, including the function
      values of Gaussian processes;
    * ``posterior_predictive``: replicated observations;
    * ``log_likelihood``: per observation; ``pseudo_log_likelihood`` instead for sites
      whose likelihood is not normalised (``BayesianSVM``), so that no model comparison
      treats it as a density;
    * ``sample_stats``: ``log_p``, the log joint density of draw and observations, and
      ``log_q``, the log density of the guide;
    * ``log_prior``: the log density of each latent whose prior depends on no other, so
      that :func:`sensitivity` and :func:`arviz_stats.psense_summary` run;
    * ``prior`` and ``prior_predictive``: draws from the prior, ``num_samples`` or 1000
      of them, whichever is less. Models with an improper prior do not have these
      groups;
    * ``observed_data``, NaN where it is masked, so that :func:`loo` does not count it;
      weights of observations (``numpyro.handlers.scale``) are the coordinate
      ``"{site}.weight"`` of ``log_likelihood``, which does not contain them otherwise;
    * ``fit``: ``losses``, over a dimension ``step``, if they were given.

    Members of a plate that a categorical column indexes have its labels as coordinates,
    with which ArviZ labels tables and plots.

    Names are the names of the sites, with each ``/`` (from ``numpyro.handlers.scope``)
    replaced by ``.``, because ``/`` separates paths in a tree.

    With fewer inducing inputs than data, a draw of the inducing vector :math:`v` does
    not determine the function values. The likelihood of an observation is then
    conditional on :math:`v`, with the residual integrated out,
    :math:`\log \int p(y_n \mid f_n) \, p(f_n \mid v) \, df_n`: in closed form if a
    predictive distribution is registered, otherwise by 32 nodes or draws. ``log_p`` is
    the log prior plus the (scaled) sum of these terms. It is the density of
    ``with_residual(model, "site")`` with its residuals integrated out. With the
    training inputs as inducing inputs it is the density of the model itself.

    ``log_p`` and ``log_q`` are densities of the same latents, in the space in which the
    model declares them. A latent that the guide fixes at a point estimate
    (:class:`~numpyro.infer.autoguide.AutoDelta`) has no density: both are conditional
    on it, and importance ratios are for the other latents.

    For a :class:`~numpyro_gpaug.NestedVI` after its run, ``to_datatree(key, nested)``
    returns its equally weighted draws. They are draws from the posterior, so there is
    no ``log_q``, and :func:`loo` treats them like MCMC draws. ArviZ itself makes a tree
    of a run of NumPyro's ``MCMC``, with any kernel: ``arviz_base.from_numpyro(mcmc,
    log_likelihood=True)``.

    :param key: random key.
    :param model: the model; or a :class:`~numpyro_gpaug.NestedVI`, and nothing else.
    :param guide: its guide: an :class:`~numpyro_gpaug.AutoSparseGP` or any other.
    :param params: params of the fit.
    :param args: the model's arguments, observations included; all of the data, also
        after a fit on minibatches.
    :param num_samples: number of draws, at least 2.
    :param losses: losses of the fit.
    :param kwargs: the model's keyword arguments.
    :return: a :class:`xarray.DataTree`. ``tree.to_netcdf(path)`` writes it, with
        h5netcdf or netCDF4, and ``tree.to_zarr`` with zarr. ``arviz_base``
        and ``arviz_stats``, which are installed with the package, accept it on every
        Python version. ``import arviz``, with its plots, works from Python 3.12 on,
        because only arviz 1.0 reads such trees; on 3.11 use ``arviz_plots``.
    :raises ValueError: for fewer than two draws.
    :raises TypeError: for an :class:`~numpyro_gpaug.AutoFunctionSpaceGP`, a model
        without guide and params, a result in place of its params, a run of ``MCMC``,
        and a nested run with any of them.
    :raises ImportError: if ``arviz_base`` does not import; it states what to install.

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

    Files, with h5netcdf and zarr:

    >>> import tempfile, xarray
    >>> zarr = {"consolidated": False}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     netcdf_file, zarr_folder = f"{folder}/fit.nc", f"{folder}/fit.zarr"
    ...     tree.to_netcdf(netcdf_file)
    ...     _ = tree.to_zarr(zarr_folder, **zarr)
    ...     with xarray.open_datatree(netcdf_file) as found:
    ...         print(found.identical(tree))
    ...     with xarray.open_datatree(zarr_folder, engine="zarr", **zarr) as found:
    ...         print(found.identical(tree))
    True
    True
    """
    if isinstance(model, NestedVI):
        if guide is not None or params is not None or args or kwargs:
            raise TypeError(
                "a NestedVI has its own model and arguments. Call to_datatree(key, "
                "nested)"
            )
        return tree_of_nested(key, model)
    checked: tuple[Model, Any, Any] = _checked(model, guide, params, num_samples)
    model, guide, params = checked
    args, kwargs, labels = Columns.read(model, args, kwargs)
    arguments = Arguments.split(args, kwargs)
    # Changes that the model itself makes do not count.
    with watched(model).running():
        programs = _run.programs_for(model, guide, arguments)
        guide_key, model_key, prior_key = random.split(key, 3)
        latents, log_q = programs.draw(
            arguments, params, random.split(guide_key, num_samples)
        )
        latents, log_q = jax.tree.map(np.asarray, latents), np.asarray(log_q, float)
        fixed = {n for n in programs.delta if (latents[n] == latents[n][:1]).all()}
        draws, log_p, observed = _run.evaluated_at(
            programs, arguments, params, random.split(model_key, num_samples),
            {n: v[0] for n, v in latents.items() if n in fixed},
            {n: v for n, v in latents.items() if n not in fixed},
        )  # fmt: skip
        given = programs.prior, arguments, params
        prior = _run.prior_groups(*given, prior_key, num_samples)
        pseudo, densities = programs.pseudo, draws.likelihoods.items()
        groups: dict[str, dict[str, Any]] = {
            "posterior": {**latents, **draws.deterministic},
            "posterior_predictive": draws.replicated,
            "log_likelihood": {n: v for n, v in densities if n not in pseudo},
            "pseudo_log_likelihood": {n: v for n, v in densities if n in pseudo},
            "log_prior": draws.priors,
            "sample_stats": {"log_p": log_p, "log_q": log_q},
        }
        one_chain = {k: {n: v[None] for n, v in x.items()} for k, x in groups.items()}
        axes: dict[str, tuple[str, ...]] = {}
        if labels and isinstance(guide, AutoLatentGaussian):
            posterior = Posterior.of_guide(
                model, guide, dict(params), args, kwargs, labels=labels
            )
            axes = posterior.arguments.axes
        groups = {**one_chain, **prior}
        summed = _summed(programs.model, programs.structure, arguments, observed)
        tree = tree_of(groups, programs.dims, axes, labels, observed, summed)
        if losses is not None:
            from xarray import Dataset, DataTree

            tree["fit"] = DataTree(Dataset({"losses": ("step", np.asarray(losses))}))
        return tree


def _checked(model: Any, guide: Any, params: Any, num_samples: int) -> Any:
    """Return arguments of :func:`to_datatree`, or raise if it does not accept them."""
    if isinstance(model, MCMC) or isinstance(guide, MCMC):
        raise TypeError(
            "a run of MCMC has a tree already: arviz_base.from_numpyro(mcmc, "
            "log_likelihood=True)"
        )
    if model is None or guide is None or params is None:
        raise TypeError(
            "pass a guide and its params, to_datatree(key, model, guide, "
            "result.params, X, y), or a NestedVI after its run, to_datatree(key, "
            "nested)"
        )
    if not isinstance(params, Mapping):
        given = type(params).__name__
        raise TypeError(
            f"params is a {given}. Pass the params of the result, result.params"
        )
    if num_samples < 2:
        raise ValueError(f"num_samples must be at least 2, got {num_samples}")
    if isinstance(guide, AutoFunctionSpaceGP):
        raise TypeError(
            "an AutoFunctionSpaceGP has no density with respect to the prior, so "
            "there are no importance ratios. Evaluate it on held-out data, by "
            "Posterior.log_prob, brier_score and expected_calibration_error"
        )
    return model, guide, params
