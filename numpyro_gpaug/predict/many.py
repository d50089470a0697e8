# SPDX-License-Identifier: Apache-2.0
"""The posteriors of one model for many responses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np
import numpyro.distributions as dist
from jax import Array
from numpyro.distributions import Distribution

from numpyro_gpaug._display import NotPickled, Rows, name_of
from numpyro_gpaug._numpyro import Ordered, one_thread
from numpyro_gpaug.distributions.stacked import Stacked
from numpyro_gpaug.math.arrays import in_blocks
from numpyro_gpaug.math.compiling import jit
from numpyro_gpaug.model.arguments import Arguments, Values
from numpyro_gpaug.model.columns import Columns, Labels
from numpyro_gpaug.model.latents import Structure
from numpyro_gpaug.model.responses import Responses, in_lanes
from numpyro_gpaug.model.structure import from_cache
from numpyro_gpaug.predict.mixture import Fitted, FunctionValues
from numpyro_gpaug.predict.posterior import Posterior
from numpyro_gpaug.predict.predictor import Predictor
from numpyro_gpaug.predict.summary import SiteMoments, long_table

if TYPE_CHECKING:
    import pandas

# The verdict of a fit that has converged; all others say what is wrong.
CONVERGED = "converged"
# With fewer values in its data, a program is compiled quickly.
SMALL = 1000


class Fits(NamedTuple):
    """What many fits have found; all arrays have a leading axis over the responses.

    :param fitted: the fitted quantities.
    :param sites: moments of the Gaussian sites.
    :param bounds: the bounds, (responses,).
    :param steps: the steps taken, (responses,).
    :param verdicts: ``"converged"``, or what is wrong, (responses,).
    :param lanes: responses that programs take at once.
    """

    fitted: Fitted
    sites: dict[str, SiteMoments]
    bounds: np.ndarray
    steps: np.ndarray
    verdicts: np.ndarray
    lanes: int


class Posteriors(
    NotPickled,
    instead="save what you need: summary(), values and bounds are plain data",
):
    """The posteriors of one model for many responses, which
    :meth:`ConjugateSVI.run_many <numpyro_gpaug.ConjugateSVI.run_many>` returns. All
    arrays have a leading axis over the responses.

    :param predictor: the model, and function values under its guide.
    :param structure: the structure of the model.
    :param fits: what the fits have found.
    :param responses: the model's arguments.
    :ivar labels: labels of the codes of arguments that were categories.
    """

    labels: Labels = {}

    def __init__(
        self,
        predictor: Predictor,
        structure: Structure,
        fits: Fits,
        responses: Responses,
    ) -> None:
        self._predictor, self._structure = predictor, structure
        # A program returns dicts in the order of their names.
        sites = {k: fits.sites[k] for k in predictor.shown()}
        self._fits, self._responses = fits._replace(sites=sites), responses
        #: The bound of each fit, (responses,).
        self.bounds: np.ndarray = fits.bounds
        #: The number of steps of each fit, (responses,).
        self.steps: np.ndarray = fits.steps
        #: ``"converged"``, or what is wrong with a fit, (responses,).
        self.verdicts: np.ndarray = fits.verdicts
        #: Latents and params that are fixed at a value (hyperparameters), by name.
        self.values: Values = fits.fitted.points
        self._programs: dict[Any, Any] = {}

    def __len__(self) -> int:
        return self._responses.number

    @property
    def converged(self) -> np.ndarray:
        """Whether each fit has converged, (responses,)."""
        return self.verdicts == CONVERGED

    @property
    def sites(self) -> tuple[str, ...]:
        """Names of the Gaussian latents."""
        return tuple(self._fits.sites)

    def __getitem__(self, site: str) -> dist.Normal:
        """Return the marginal posteriors of a Gaussian latent, for all responses.

        :param site: name of the sample site.
        :raises KeyError: if the site is not Gaussian.
        """
        if site not in self._fits.sites:
            cure = "; values has it" if site in self.values else ""
            if isinstance(site, int):
                cure = f"; posterior({site}) is the posterior of one response"
            raise KeyError(
                f"{site!r} is not among the Gaussian latents {[*self._fits.sites]}"
                f"{cure}"
            )
        mean, variance, _ = self._fits.sites[site]
        # Moments of failed fits are NaN.
        return dist.Normal(mean, np.sqrt(variance), validate_args=False)

    def summary(self, prob: float = 0.9) -> pandas.DataFrame:
        """Return mean, standard deviation and three quantiles of every latent of every
        response, one below the other; see
        :meth:`Posterior.summary <numpyro_gpaug.Posterior.summary>`. Fits that are not
        finite have NaN.

        :return: a data frame with rows ``(response, site)``: ``summary.loc[3]`` is the
            table of response 3, and ``summary.xs("effect[2]", level="site")`` that of a
            latent.
        """
        return long_table(self._fits.sites, self.values, len(self), prob)

    def posterior(self, response: int) -> Posterior:
        """Return the posterior of one response, with all methods that the posterior of
        its own fit has.

        :param response: the number of the response.
        :raises ValueError: if its fit is not finite.
        """
        response = range(len(self))[response]
        if not np.isfinite(self.bounds[response]):
            raise ValueError(
                f"response {response} has no posterior: {self.verdicts[response]}"
            )
        args, kwargs = self._responses.one(response)
        fitted = jax.tree.map(lambda x: x[response], self._fits.fitted)
        with self._predictor.version.running():
            return Posterior.of_fit(
                self._predictor, fitted, self._structure, args, kwargs,
                labels=self.labels,
            )  # fmt: skip

    # -- predictions ------------------------------------------------------------------

    def predict_y(
        self,
        *args: Any,
        over: str | Sequence[str] = (),
        site: str | None = None,
        **kwargs: Any,
    ) -> Distribution:
        """Predict observations at new inputs, for all responses.

        :param args: the model's arguments at new inputs, without observations.
        :param over: names of the arguments with a leading axis over responses.
        :param site: the observed site, if the model has several.
        :param kwargs: the model's keyword arguments, where they differ from the fits'.
        :return: a NumPyro distribution, with the responses along the first axis.
        """
        predicted = partial(Posterior.predict_y, site=site)
        return Stacked(self._map(("y", site), predicted, args, kwargs, over))

    def predict_f(
        self,
        *args: Any,
        over: str | Sequence[str] = (),
        site: str | None = None,
        **kwargs: Any,
    ) -> FunctionValues:
        """Predict function values, or predictors, at new inputs, for all responses; see
        :meth:`predict_y`.

        :param site: the process or observed site, if the model has several.
        :return: means and variances, with the responses along the first axis.
        """
        predicted = partial(Posterior.predict_f, site=site)
        return self._map(("f", site), predicted, args, kwargs, over)

    def map(
        self,
        function: Callable[..., Any],
        *args: Any,
        over: str | Sequence[str] = (),
        **kwargs: Any,
    ) -> Any:
        """Return what a function computes from each posterior, stacked.

        :param function: a function of a :class:`~numpyro_gpaug.Posterior`, followed by
            the arguments, that JAX can trace, such as
            ``lambda posterior, X: posterior.predict_y(X).mean``.
        :param args: arguments of the model, which the function passes on.
        :param over: names of those with a leading axis over responses.
        :param kwargs: keyword arguments of the model.
        :return: a tree of arrays, with the responses along the first axis.
        """
        return self._map(function, function, args, kwargs, over)

    @one_thread
    def _map(
        self,
        key: Any,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        over: str | Sequence[str],
    ) -> Any:
        """See :meth:`map`.

        :param key: what the function computes.
        """
        good = np.flatnonzero(np.isfinite(self.bounds))
        if not len(good):
            raise ValueError(f"no fit is finite: {Counter(self.verdicts)}")
        model, number = self._predictor.model, len(self)
        args, kwargs, _ = Columns.read(model, args, kwargs, self.labels)
        given = Responses.split(model, args, kwargs, over, number)
        first = Arguments.split(*given.one(int(good[0])))
        which, static = given.which, first.static
        described = self.posterior(int(good[0])).arguments
        # Keyword arguments that posteriors keep from their fits, and that differ.
        own, flags = self._responses.kwargs, self._responses.over[1]
        kept = {k: own[k] for k in described.kwargs if any(jax.tree.leaves(flags[k]))}

        def one(arrays: tuple[Array, ...], each: tuple[Fitted, Any]) -> Ordered:
            fitted, own = each
            posterior = Posterior(self._predictor, fitted, described.holding(own))
            args, kwargs = Arguments(arrays, static).merge()
            return Ordered(function(posterior, *args, **kwargs))

        program = from_cache(
            self._programs, (key, first.shapes, which),
            lambda: jit(in_lanes(one, which), small=SMALL),
        )  # fmt: skip
        with self._predictor.version.running():
            return in_blocks(
                lambda places: program(
                    given.arrays(places),
                    jax.tree.map(lambda x: x[places], (self._fits.fitted, kept)),
                ).tree,
                number, self._fits.lanes,
            )  # fmt: skip

    def _display(self) -> tuple[str, Rows]:
        counts = Counter(self.verdicts)
        rows = [(str(number), verdict) for verdict, number in counts.most_common()]
        title = f"{len(self)} posteriors of {name_of(self._predictor.model)}"
        return title, rows
