# SPDX-License-Identifier: Apache-2.0
"""Comparison of a variational fit with MCMC draws of the same posterior."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax, random
from jax.typing import ArrayLike
from numpyro.distributions import constraints
from scipy.special import ndtri

from numpyro_gpaug._numpyro import whole_plates
from numpyro_gpaug.diagnostics._run import data_sites, observed_sites
from numpyro_gpaug.gp.conditional import Conditional
from numpyro_gpaug.likelihoods.expectations import base_distribution
from numpyro_gpaug.math.compiling import jit_for_few_runs
from numpyro_gpaug.model.arguments import Arguments, Model, Values
from numpyro_gpaug.model.structure import Trace, run_model
from numpyro_gpaug.predict.posterior import Posterior

if TYPE_CHECKING:
    from xarray import DataTree

# If predictions have infinitely many values, this many draws of each side are compared.
_NUM_VALUES = 100


def vi_against_mcmc(
    model: Model,
    vi: Posterior | DataTree | Mapping[str, ArrayLike],
    samples: Mapping[str, ArrayLike],
    *args: Any,
    **kwargs: Any,
) -> DataTree:
    r"""Compare a variational posterior with MCMC draws of the same posterior.

    Every element of every common site is compared by its marginal. With inducing
    inputs, compare with MCMC of ``with_residual(model, "site")``, or better, use
    ``inducing=X`` on both sides: NUTS on a sparse model leaves the residual out. With n
    effective draws, Monte Carlo error alone gives a ``mean_difference`` of about
    :math:`1 / \sqrt{n}`, and a ``wasserstein`` of the same size.

    :param model: the model of the MCMC run. If it has :func:`numpyro.param` sites, fix
        them at the fitted values, in the MCMC run and here:
        ``substitute(model, data=result.params)``
        (:class:`numpyro.handlers.substitute`).
    :param vi: a tree from :func:`to_datatree`; or draws by site, (num_draws, ...); or a
        :class:`~numpyro_gpaug.Posterior`, whose function values and weight vectors are
        compared without Monte Carlo error, and which has no other sites.
    :param samples: draws by site, as ``mcmc.get_samples()`` returns them.
    :param args: the model's arguments at the fit, observations included.
    :param kwargs: its keyword arguments.
    :return: a :class:`xarray.DataTree` with two groups.

        * ``posterior``: per site, a dimension ``statistic`` followed by the shape of
          the site. The statistics are ``"mean_difference"``, the variational mean minus
          the MCMC mean, and ``"wasserstein"``, the 1-Wasserstein distance of the
          marginals, both in standard deviations of MCMC; and ``"sd_ratio"``, the ratio
          of the variational to the MCMC standard deviation (0 for a latent that is
          fixed at a point estimate).
        * ``predictive``: per observed site, with its shape, the overlap
          :math:`\int \min(p, q)` of the two predictive distributions of each
          observation: 1 if they are equal, 0 if they exclude each other, and
          ``1 - |p - q|`` for the probabilities p and q of label 1. It is a sum for
          labels and bounded counts, and estimated from 200 draws otherwise. A
          pseudo-likelihood predicts by its normalised probabilities.
    :raises ValueError: if there is no common site, shapes differ, or draws lack a
        latent of the model.

    **Example**

    >>> import numpy as np, numpyro, numpyro.distributions as dist
    >>> def model(x, y=None):
    ...     w = numpyro.sample("w", dist.Normal(0, 1))
    ...     with numpyro.plate("data", len(x)):
    ...         numpyro.sample("y", dist.Bernoulli(logits=w * x), obs=y)
    >>> rng = np.random.default_rng(0)  # draws of a guide, and mcmc.get_samples()
    >>> vi, mcmc = {"w": rng.normal(1, 0.5, 4000)}, {"w": rng.normal(1, 1, 4000)}
    >>> x, y = np.array([0.0, 3.0]), np.array([1, 1])
    >>> found = vi_against_mcmc(model, vi, mcmc, x, y)
    >>> print(found["posterior"]["w"].sel(statistic="sd_ratio").values.round(1))
    0.5
    >>> print(found["predictive"]["y"].values.round(1))  # 1 - |p - q|
    [1.  0.9]
    """
    from xarray import DataTree

    mcmc = {name: np.asarray(x) for name, x in samples.items()}
    if isinstance(vi, Posterior):
        num = len(next(iter(mcmc.values())))
        draws = _marginal_quantiles(vi, num, mcmc, args)
    else:
        draws = _flat_draws(vi)
    marginals = _marginals(draws, mcmc)
    given = vi, Arguments.split(args, kwargs), draws, mcmc
    overlaps = _overlaps(whole_plates(model), *given)
    return DataTree.from_dict({"posterior": marginals, "predictive": overlaps})


# -- marginals -------------------------------------------------------------------------


def _flat_draws(vi: Any) -> dict[str, np.ndarray]:
    if hasattr(vi, "children"):
        draws = vi["posterior"].data_vars.items()
        return {k: np.asarray(x.values).reshape(-1, *x.shape[2:]) for k, x in draws}
    return {name: np.asarray(x) for name, x in vi.items()}


def _marginal_quantiles(
    posterior: Posterior, num: int, names: Any, args: Any
) -> dict[str, np.ndarray]:
    """Return quantiles of normal marginals at ``(i + 1/2) / num``."""
    processes = [name for name in posterior.processes if name in names]
    normals = {name: posterior.predict_f(*args, site=name) for name in processes}
    normals |= {k: d for k, d in posterior.weights.items() if k in names}
    z = ndtri((np.arange(num) + 0.5) / num)
    return {
        k: np.asarray(d.mean) + np.multiply.outer(z, np.sqrt(np.asarray(d.variance)))
        for k, d in normals.items()
    }


def _marginals(draws: Mapping[str, np.ndarray], mcmc: dict[str, np.ndarray]) -> Any:
    from xarray import Dataset

    common = [name for name in mcmc if name in draws]
    if not common:
        raise ValueError(
            f"nothing to compare: the variational side has {sorted(draws)}, MCMC has "
            f"{sorted(mcmc)}"
        )
    found = {}
    for name in common:
        sizes = draws[name].shape[1:], mcmc[name].shape[1:]
        if sizes[0] != sizes[1]:
            raise ValueError(
                f"a draw of site {name!r} has shape {sizes[0]} on the variational "
                f"side and {sizes[1]} from MCMC. Make both at the same inputs, "
                "without group_by_chain"
            )
        dims = ["statistic", *(f"{name}_dim_{i}" for i in range(len(sizes[0])))]
        found[name] = (dims, _compare(draws[name], mcmc[name]))
    labels = {"statistic": ["mean_difference", "sd_ratio", "wasserstein"]}
    return Dataset(found, labels)


def _compare(vi: np.ndarray, mcmc: np.ndarray) -> np.ndarray:
    """Return three statistics, (3, ...)."""
    from scipy.stats import wasserstein_distance  # takes half a second to import

    unit = mcmc.std(0)
    # for a site that MCMC does not move
    with np.errstate(divide="ignore", invalid="ignore"):
        difference, ratio = (vi.mean(0) - mcmc.mean(0)) / unit, vi.std(0) / unit
        columns = (x.reshape(len(x), -1).T for x in (vi, mcmc))
        distances = [wasserstein_distance(*c) for c in zip(*columns, strict=True)]
        distance = np.reshape(distances, unit.shape) / unit
    return np.stack([difference, ratio, distance])


# -- predictions -----------------------------------------------------------------------


def _overlaps(
    model: Model,
    vi: Any,
    arguments: Arguments,
    draws: Mapping[str, Any],
    mcmc: dict[str, np.ndarray],
) -> Any:
    """Return, by observed site, the overlap of both sides' predictive distributions."""
    from xarray import Dataset

    first = {name: x[0] for name, x in mcmc.items()}
    trace = run_model(model, arguments, random.key(0), first)
    chosen = _latents(mcmc, trace, "MCMC")
    found = {}
    for site, message in data_sites(trace).items():
        distribution = base_distribution(message["fn"])
        predicted = _Site(model, arguments, site)
        p, q = _Predictive(predicted, chosen), None
        if not isinstance(vi, Posterior):
            q = _Predictive(predicted, _latents(draws, trace, "variational"))
        elif site in vi.observed:  # otherwise a hyperparameter that a handler fixes
            q = vi.predict_y(*arguments.merge()[0], site=site)
        if q is not None:
            overlap = _overlap(p, q, _all_values(distribution))
            found[site] = ([f"{site}_dim_{i}" for i in range(overlap.ndim)], overlap)
    return Dataset(found)


class _Site:
    """An observed site as a function of a model's latents. Each side of a comparison
    has its own program, or both share one if they have equally many draws."""

    def __init__(self, model: Model, arguments: Arguments, site: str) -> None:
        self.model, self.arguments, self.site = model, arguments, site
        self.samples = jit_for_few_runs(jax.vmap(self._sample, (None, 0, 0)))
        self.log_probs = jit_for_few_runs(self._log_probs)

    def _distribution(self, given: Arguments, key: Array, draw: Any) -> Any:
        trace = run_model(self.model, given, key, draw)
        return base_distribution(trace[self.site]["fn"])

    def _sample(self, given: Arguments, key: Array, draw: Any) -> Array:
        model_key, key = random.split(key)
        return self._distribution(given, model_key, draw).sample(key)

    def _log_probs(
        self, given: Arguments, keys: Array, draws: Any, values: Array
    ) -> Array:
        """Return log-probabilities of values under the mixture over the draws."""

        def at(key: Array, draw: dict[str, Array]) -> Array:
            d = self._distribution(given, key, draw)
            return getattr(d, "normalized_log_prob", d.log_prob)(values)

        def step(total: Array, each: Any) -> tuple[Array, None]:
            return jnp.logaddexp(total, at(*each)), None

        first = at(keys[0], {name: x[0] for name, x in draws.items()})
        rest = keys[1:], {name: x[1:] for name, x in draws.items()}
        return lax.scan(step, first, rest)[0] - math.log(len(keys))


class _Predictive:
    """An observed site of a model with its latents drawn: a mixture over the draws."""

    def __init__(self, site: _Site, draws: Mapping[str, Any]) -> None:
        self.site = site
        self.draws = {name: np.asarray(x) for name, x in draws.items()}
        self.num = len(next(iter(draws.values())))

    def sample(self, key: Array, sample_shape: tuple[int]) -> Array:
        chosen = np.linspace(0, self.num - 1, *sample_shape).astype(int)
        some = {name: x[chosen] for name, x in self.draws.items()}
        keys = random.split(key, len(chosen))
        return self.site.samples(self.site.arguments, keys, some)

    def log_prob(self, values: Array) -> Array:
        # Residuals of a sparse process are drawn here if the draws do not contain them.
        keys = random.split(random.key(0), self.num)
        return self.site.log_probs(self.site.arguments, keys, self.draws, values)


def _overlap(p: Any, q: Any, values: Array | None) -> np.ndarray:
    """Compute the overlap ``int min(p, q)`` from all values, or from draws of both."""
    all_values = values is not None
    if values is None:
        sides = zip((p, q), random.split(random.key(0)), strict=True)
        values = jnp.concatenate([d.sample(key, (_NUM_VALUES,)) for d, key in sides])
    logs = [np.asarray(d.log_prob(values)) for d in (p, q)]
    least = np.minimum(*logs)
    if all_values:
        return np.exp(least).sum(0)
    return np.exp(least - np.logaddexp(*logs)).mean(0) * 2


def _all_values(distribution: Any) -> Array | None:
    """Return every possible value of an observation, (K, ...), if there are finitely
    many."""
    if distribution.support is constraints.boolean:
        values = jnp.arange(2).reshape(-1, *[1] * len(distribution.batch_shape))
    elif not distribution.has_enumerate_support:
        return None
    else:
        try:
            values = distribution.enumerate_support(expand=False)
        except NotImplementedError:  # a Binomial with several total counts
            return None
    return jnp.broadcast_to(values, (len(values), *distribution.batch_shape))


def _latents(draws: Mapping[str, Any], trace: Trace, where: str) -> Values:
    """Return the draws that the model needs, all of them."""
    residuals = {
        f"{name}.eps" for name, s in trace.items() if isinstance(s["fn"], Conditional)
    }
    samples = {name for name, s in trace.items() if s["type"] == "sample"}
    names = samples - observed_sites(trace).keys()
    if missing := names - set(draws) - residuals:
        raise ValueError(
            f"the {where} draws contain {sorted(draws)} but lack the model's "
            f"{sorted(missing)}. Pass every latent, with the shapes of get_samples()"
        )
    return {name: x for name, x in draws.items() if name in names}
