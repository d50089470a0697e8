# SPDX-License-Identifier: Apache-2.0
"""Simulation-based calibration: fits to data sets that are drawn from the model."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import cache, cached_property, partial
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax import Array, lax, random
from numpyro import handlers
from scipy.special import ndtr
from tqdm.auto import tqdm

from numpyro_gpaug._display import Displayed, Rows, entries, name_of
from numpyro_gpaug.diagnostics import _run
from numpyro_gpaug.diagnostics._arviz import tree_of
from numpyro_gpaug.diagnostics._pit import ranks
from numpyro_gpaug.errors import CholeskyError
from numpyro_gpaug.infer import ConjugateSVI, NestedVI
from numpyro_gpaug.math.compiling import jit
from numpyro_gpaug.model.arguments import Arguments, Model, Values
from numpyro_gpaug.model.calls import check_count, check_key
from numpyro_gpaug.model.columns import Columns
from numpyro_gpaug.model.structure import run_model
from numpyro_gpaug.predict import Posteriors

if TYPE_CHECKING:
    import pandas
    from xarray import DataTree

# The name of the log-likelihood among the ranked quantities.
LIKELIHOOD = "log_likelihood"
# The number of intervals at whose edges distribution functions are compared, and of
# draws of the null distribution.
POINTS, NULL = 100, 1000
EDGES = np.arange(1, POINTS) / POINTS
# The number of quantities in the printed calibration.
SHOWN = 5


class Calibration(Displayed):
    """The positions of true values in their posteriors, for data sets drawn from the
    model: uniform between 0 and 1 if the posteriors are right.

    :param title: what was calibrated.
    :param positions: by site, (data sets, ...), between 0 and 1; NaN where a fit
        failed.
    :param failures: what was wrong, by the number of the data set.
    :param uncertified: numbers of data sets whose fit has a certificate, and says that
        it is not reliable. They are not left out.
    """

    def __init__(
        self,
        title: str,
        positions: dict[str, np.ndarray],
        failures: dict[int, str],
        uncertified: Sequence[int] = (),
    ) -> None:
        self._title, self.positions, self.failures = title, positions, failures
        self.uncertified = tuple(uncertified)

    @cached_property
    def table(self) -> pandas.DataFrame:
        """One row per quantity, the worst calibrated first: the mean position (a half,
        unless the posterior is too low or too high), the shares of true values in
        central 50 and 90% intervals, and the probability ``p`` that uniform positions
        are as far from uniform."""
        import pandas

        rows = {}
        for name, values in self.positions.items():
            good = _complete(values)
            for label, place in entries(name, good.shape[1:]):
                one = good[(slice(None), *place)]
                inside = [np.mean(np.abs(one - 0.5) < x / 2) for x in (0.5, 0.9)]
                rows[label] = [one.mean(), *inside, uniformity(one)]
        columns = ["mean", "50%", "90%", "p"]
        found = pandas.DataFrame.from_dict(rows, orient="index", columns=columns)
        return found.sort_values("p", kind="stable")

    @property
    def tree(self) -> DataTree:
        """The positions as a tree with the group ``prior_sbc``, with dimensions
        ``chain`` (of size 1) and ``draw``, one for each data set:
        ``arviz_plots.plot_ecdf_pit(calibration.tree, group="prior_sbc")``."""
        return tree_of({"prior_sbc": {k: x[None] for k, x in self.positions.items()}})

    def curves(self) -> dict[str, np.ndarray]:
        """Return empirical minus uniform distribution functions at the edges, by site,
        (entries, edges)."""
        found = {}
        for name, values in self.positions.items():
            flat = np.sort(_complete(values), 0)
            columns = flat.reshape(len(flat), -1).T
            shares = [np.searchsorted(x, EDGES, side="right") for x in columns]
            found[name] = np.stack(shares) / len(flat) - EDGES
        return found

    def band(self, level: float = 0.95) -> tuple[np.ndarray, np.ndarray]:
        """Return the ends of the band that contains a whole curve of :meth:`curves`
        with a given probability, if positions are uniform.

        :param level: the probability.
        """
        from scipy.stats import binom  # takes half a second to import

        number = min(len(_complete(x)) for x in self.positions.values())
        tail = np.quantile(_null(number), 1 - level)
        lower, upper = (binom.ppf(q, number, EDGES) for q in (tail, 1 - tail))
        return lower / number - EDGES, upper / number - EDGES

    def _display(self) -> tuple[str, Rows]:
        table = self.table
        rows = [
            (str(label), f"p = {row['p']:.3g}", f"{row['90%']:.0%} in 90% intervals")
            for label, row in table.head(SHOWN).iterrows()
        ]
        if self.failures:
            rows.append((f"{len(self.failures)} fits failed", "", ""))
        if self.uncertified:
            rows.append((f"{len(self.uncertified)} fits are not certified", "", ""))
        return f"{self._title}, worst of {len(table)} quantities", rows


def sbc(
    model: Model,
    key: Array,
    num: int,
    *args: Any,
    fit: Callable[[Callable[..., Any]], Any] = NestedVI,
    given_data: bool = False,
    num_draws: int = 99,
    num_steps: int = 500,
    progress_bar: bool = True,
    **kwargs: Any,
) -> Calibration:
    """Check a model and a way to fit it by simulation-based calibration: draw latents
    from the prior and data from the likelihood, fit every data set, and find the
    position of the true latents in their posteriors. If the fits are right, positions
    are uniform. A hump means that posteriors are too wide; high ends mean that they are
    too narrow.

    Every latent site is compared, and the log-likelihood, which depends on the data: a
    posterior that equals the prior would have uniform positions of latents, too.

    :param model: a NumPyro model, in which every latent has a proper prior.
    :param key: random key.
    :param num: the number of data sets.
    :param args: the model's arguments, observations included. Their values are replaced
        by simulated ones.
    :param fit: makes a fitter from a model: the default
        :class:`~numpyro_gpaug.NestedVI`; ``lambda model: MCMC(NUTS(model), ...,
        jit_model_args=True)``; or ``lambda model: ConjugateSVI(model,
        AutoLatentGaussian(model))``, all of whose fits run side by side, and whose
        hyperparameters have no posterior. Several chains count as one.
    :param given_data: draw the latents from the posterior given the observations that
        were passed, not from the prior, and fit every data set together with these
        observations. This checks the fit where the posterior is, for wide priors too.
    :param num_draws: draws from each posterior that a true value is compared with: the
        draws of a fit, thinned evenly.
    :param num_steps: steps of each fit by a :class:`~numpyro_gpaug.ConjugateSVI`.
    :param progress_bar: whether to show one.
    :param kwargs: the model's keyword arguments.
    :raises ValueError: for models without observations, with params, with improper
        priors, or with a :func:`numpyro.factor`, whose data cannot be drawn.

    **Example**

    >>> import jax, numpyro, jax.numpy as jnp, numpyro.distributions as dist
    >>> import numpyro_gpaug as gpaug
    >>> def model(y):
    ...     z = numpyro.sample("z", dist.Normal(0.0, 1.0))
    ...     with numpyro.plate("data", len(y)):
    ...         numpyro.sample("y", dist.Normal(z, 1.0), obs=y)
    >>> def fit(model):
    ...     return gpaug.ConjugateSVI(model, gpaug.AutoLatentGaussian(model))
    >>> found = sbc(
    ...     model, jax.random.key(0), 200, jnp.zeros(3), fit=fit, progress_bar=False
    ... )
    >>> found.positions["z"].shape, bool(found.table.loc["z", "p"] > 0.01)
    ((200,), True)

    References: Talts, Betancourt, Simpson, Vehtari and Gelman (2018), Validating
    Bayesian inference algorithms with simulation-based calibration; Modrak, Moon, Kim,
    Burkner, Huurre, Faltejskova, Gelman and Vehtari (2023), Simulation-based
    calibration checking for Bayesian computation; Sailynoja, Burkner and Vehtari
    (2022), Graphical test for discrete uniformity and its applications in
    goodness-of-fit evaluation and multiple sample comparison.
    """
    check_key(key)
    check_count("num", num)
    check_count("num_draws", num_draws)
    args, kwargs, _ = Columns.read(model, args, kwargs)
    arguments = Arguments.split(args, kwargs)
    truth_key, fit_key, tie_key = random.split(key, 3)
    values: Values = {}
    if given_data:
        given = fit(model)
        given.progress_bar = progress_bar
        values = _posterior_draws(given, truth_key, args, kwargs, num)
    try:
        truth, data = _drawn(model, arguments, random.split(truth_key, num), values)
    except NotImplementedError as error:
        raise ValueError(
            "a prior of the model is improper, so no data sets can be drawn from it. "
            "Make all priors proper, such as dist.Normal(0, 10)"
        ) from error
    simulated = (_with_more if given_data else _with)(model)
    fitter = fit(simulated)
    title = f"{name_of(model)} by {type(fitter).__name__}, {num} data sets"
    if isinstance(fitter, ConjugateSVI):
        fits = fitter.run_many(
            fit_key, num_steps, data, *args, over="data", progress_bar=progress_bar,
            **kwargs,
        )  # fmt: skip
        return Calibration(title, *_in_normals(fits, truth))
    likelihood = jit(partial(_likelihood, simulated))
    fitter.progress_bar = False  # one bar, for all data sets

    def one(i: int) -> dict[str, np.ndarray]:
        here, true = ({k: x[i] for k, x in y.items()} for y in (data, truth))
        with warnings.catch_warnings():
            # A verdict of each fit would be repeated for every data set.
            warnings.simplefilter("ignore")
            fitter.run(random.fold_in(fit_key, i), here, *args, **kwargs)
        draws = {k: _thinned(x, num_draws) for k, x in fitter.get_samples().items()}
        both = {k: np.concatenate([x[None], draws[k]]) for k, x in true.items()}
        density = likelihood(arguments, here, both)
        return {**both, LIKELIHOOD: np.asarray(density, float)}

    rng = np.random.default_rng(np.asarray(random.key_data(tie_key)).ravel())
    positions: dict[str, np.ndarray] = {}
    failures: dict[int, str] = {}
    uncertified = []
    for i in tqdm(range(num), disable=not progress_bar):
        try:
            values = one(i)
        except (ValueError, CholeskyError) as error:
            failures[i] = str(error)
            continue
        if not getattr(fitter, "certified", True):
            uncertified.append(i)
        for name, each in values.items():
            empty = np.full((num, *each.shape[1:]), np.nan)
            place = ranks(each[1:], each[0], rng.uniform(size=each.shape[1:]))
            positions.setdefault(name, empty)[i] = place
    if not positions:
        raise ValueError(f"no data set could be fitted: {failures[0]}")
    return Calibration(title, positions, failures, uncertified)


def _complete(values: np.ndarray) -> np.ndarray:
    """Return the rows without NaN."""
    return values[np.isfinite(values).reshape(len(values), -1).all(1)]


def uniformity(positions: np.ndarray) -> float:
    """Return the probability that the empirical distribution function of uniform
    positions is somewhere as far from the diagonal, in binomial tail probabilities.

    :param positions: numbers between 0 and 1, (n,).
    """
    counts = np.searchsorted(np.sort(positions), EDGES, side="right")
    null = _null(len(positions))
    return float((1 + (null <= _smallest(counts, len(positions))).sum()) / (1 + NULL))


@cache
def _null(number: int) -> np.ndarray:
    """Return draws of :func:`_smallest` for uniform positions.

    ``arviz_stats.ecdf_utils`` (0.8 to 1.3) draws the same, but without upper tails if
    no position is below the first edge, because ``bdtr(-1, ...)`` is NaN.
    """
    rng = np.random.default_rng(0)
    even = rng.multinomial(number, np.full(POINTS, 1 / POINTS), NULL)
    return _smallest(np.cumsum(even, 1)[:, :-1], number)


def _smallest(counts: np.ndarray, number: int) -> np.ndarray:
    """Return the smallest binomial tail probability of numbers of positions below
    the edges, (..., edges)."""
    from scipy.stats import binom  # takes half a second to import

    below = binom.cdf(counts, number, EDGES)
    above = binom.sf(counts - 1, number, EDGES)
    return np.minimum(below, above).min(-1)


def _with(model: Model) -> Callable[..., Any]:
    """Return the model with observations by site as its first argument."""

    def simulated(data: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        return handlers.condition(model, data=data)(*args, **kwargs)

    return simulated


def _with_more(model: Model) -> Callable[..., Any]:
    """Return the model with further observations, given the same latents, by site as
    its first argument."""

    def simulated(data: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        with handlers.trace() as first:
            model(*args, **kwargs)
        hidden = first.keys() - _run.observed_sites(first).keys()
        latents = {k: first[k]["value"] for k in hidden if first[k]["type"] == "sample"}
        again = handlers.substitute(handlers.condition(model, data=data), data=latents)
        seen = handlers.block(again, hide_fn=lambda s: not s.get("is_observed"))
        handlers.scope(seen, prefix="again")(*args, **kwargs)

    return simulated


def _posterior_draws(
    fitter: Any, key: Array, args: Any, kwargs: Any, num: int
) -> dict[str, np.ndarray]:
    """Return draws from the posterior given the observations.

    :raises ValueError: if there are fewer draws than data sets, or none.
    """
    if not hasattr(fitter, "get_samples"):
        raise ValueError(
            f"given_data needs draws from the posterior, and {type(fitter).__name__} "
            "has none. Use NestedVI or MCMC"
        )
    fitter.run(key, *args, **kwargs)
    draws = fitter.get_samples()
    found = len(next(iter(draws.values())))
    if found < num:
        raise ValueError(
            f"the fit has {found} draws from the posterior, fewer than {num} data "
            "sets. Raise its num_samples"
        )
    return {k: _thinned(x, num) for k, x in draws.items()}


def _drawn(
    model: Model, arguments: Arguments, keys: Array, values: Values
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Return latents and data, by site, for every key.

    :param values: latents by name, if they are not drawn from their priors.
    :raises ValueError: for a model whose data or latents cannot be drawn.
    """
    trace = run_model(model, arguments, random.key(0), {})
    params = [k for k, s in trace.items() if s["type"] == "param"]
    if params:
        raise ValueError(
            f"params {params} have no prior to draw from. Make them sample sites, or "
            "plain numbers"
        )
    observed = _run.observed_sites(trace)
    if factors := [k for k in observed if k not in _run.data_sites(trace)]:
        raise ValueError(
            f"{factors[0]!r} is a numpyro.factor, and no data can be drawn from it. "
            "Write it as an observed site, with a distribution of your own"
        )
    if not observed:
        raise ValueError(
            "the model has no observations. Pass them, as for a fit: their shapes are "
            "those of the data sets"
        )
    sites = [k for k, s in trace.items() if s["type"] == "sample"]
    latents = [k for k in sites if k not in observed]
    given = {k: values[k] for k in latents if k in values}

    @jit
    def every(arguments: Arguments, given: Values, keys: Array) -> Any:
        return lax.map(
            lambda each: _run.one_draw(model, arguments, *each), (given, keys)
        )

    found = every(arguments, given, keys)
    prior, data = jax.tree.map(np.asarray, found)
    return {k: prior[k] for k in latents}, data


def _in_normals(
    fits: Posteriors, truth: dict[str, np.ndarray]
) -> tuple[dict[str, np.ndarray], dict[int, str]]:
    """Return positions in normal marginals by site, and the reasons why fits failed by
    number."""
    positions = {}
    for name in (k for k in truth if k in fits.sites):
        normal = fits[name]
        apart = (truth[name] - normal.mean) / np.sqrt(normal.variance)
        positions[name] = ndtr(np.asarray(apart, float))
    wrong = np.flatnonzero(~fits.converged)
    return positions, {int(i): str(fits.verdicts[i]) for i in wrong}


def _likelihood(
    model: Model, arguments: Arguments, data: Any, latents: Values
) -> Array:
    """Return log-likelihoods of data at draws of the latents; draws first."""
    args, kwargs = arguments.merge()
    given = Arguments.split((data, *args), kwargs)

    def one(values: Values) -> Array:
        trace = run_model(model, given, random.key(0), values)
        return _run.log_density([*_run.observed_sites(trace).values()])

    return lax.map(one, latents)


def _thinned(draws: Any, num: int) -> np.ndarray:
    """Return some of the draws, evenly spaced."""
    places = np.linspace(0, len(draws) - 1, min(num, len(draws))).astype(int)
    return np.asarray(draws)[places]
