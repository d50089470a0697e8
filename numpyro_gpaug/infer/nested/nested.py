# SPDX-License-Identifier: Apache-2.0
"""Hyperparameters integrated by importance sampling, with the interface of ``MCMC``."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from tqdm.auto import tqdm

from numpyro_gpaug._display import NotPickled, Rows, of_posterior
from numpyro_gpaug.errors import CholeskyError
from numpyro_gpaug.infer.nested.bound import CollapsedBound
from numpyro_gpaug.infer.nested.collapse import mixture, of_points, refuse_params
from numpyro_gpaug.infer.nested.drawer import generator
from numpyro_gpaug.infer.nested.draws import FIRST, Run, integrated, sampled
from numpyro_gpaug.infer.nested.fallback import corrected
from numpyro_gpaug.infer.nested.group_draws import draws_at, may_part
from numpyro_gpaug.infer.nested.hyperparameters import Hyperparameters
from numpyro_gpaug.infer.nested.many import CERTIFIED, NestedRuns
from numpyro_gpaug.infer.nested.programs import Programs
from numpyro_gpaug.infer.nested.report import (
    Clock,
    certificate,
    columns_of,
    overview,
)
from numpyro_gpaug.infer.nested.setup import FEW, MOST, CollapsedBounds
from numpyro_gpaug.infer.vi.checks import check_gaussian, warn_of_units
from numpyro_gpaug.infer.vi.resolution import (
    LOST,
    check_precision,
    is_broken,
    warn_of_lost,
)
from numpyro_gpaug.math.threads import threads_for
from numpyro_gpaug.model.arguments import Arguments, Model, Values
from numpyro_gpaug.model.calls import check_count, check_key
from numpyro_gpaug.model.closures import RunsModel
from numpyro_gpaug.model.columns import Columns, Labels, labelled
from numpyro_gpaug.model.labels import refuse_unordered
from numpyro_gpaug.model.latents import Structure
from numpyro_gpaug.model.padding import Padding
from numpyro_gpaug.model.responses import Responses
from numpyro_gpaug.model.validation import check_arguments, check_trace
from numpyro_gpaug.predict import Posterior

# Draws of the latents at each point: by default, at most, and the largest number of
# values in all of them. If they would not fit into a gigabyte, there are fewer.
DRAWS, MOST_DRAWS, MOST_NUMBERS = 8, 32, 2**24
# From two draws, the widths of proposals cannot be compared, and in float32 rounding of
# long chains makes weights uneven.
FEWEST, GIGABYTE = 4, 2**28
# The factor by which there are more draws if groups are weighted apart, because these
# differ little in the border.
MORE_APART = 4


class NestedVI(
    RunsModel,
    NotPickled,
    instead="create it again from its model. posterior().save(path) saves a run for "
    "predictions, and numpyro_gpaug.diagnostics.to_datatree its draws",
):
    r"""Latent Gaussian models with their hyperparameters integrated: weighted draws
    from the exact posterior, with a certificate. The interface is that of
    :class:`numpyro.infer.MCMC`.

    Given hyperparameters :math:`\theta`, closed-form updates fit all Gaussian latents
    :math:`z` jointly (:class:`~numpyro_gpaug.AutoLatentGaussian`). This gives a
    Gaussian :math:`q(z \mid \theta)` and the collapsed bound
    :func:`~numpyro_gpaug.collapse`. A run

    1. finds the mode of that bound times the prior, and its curvature;
    2. draws quasi-random :math:`\theta` from a mixture :math:`r` of t distributions
       there (moved once to the weighted mean of the first draws) and of the prior, and
       at each of them draws :math:`z` from :math:`q`, slightly widened;
    3. weights every draw by :math:`p(y, z, \theta) / (q(z \mid \theta)\, r(\theta))`,
       the density of the model itself over the density of the draw.

    If each observation depends on one of many groups (random effects, 48 groups or
    more), the groups are weighted separately, each with several candidates (Kuntz,
    Crucinio and Johansen, 2022), so that weights stay even for any number of groups.

    The weighted draws are from the **exact** posterior, however crude the Gaussian is,
    if the weights are not too uneven. The certificate is k-hat, the shape parameter of
    the tail of the weights. If it is at most 0.7 (0.63 for 512 hyperparameters,
    ``1 - 1 / log10(num_points)`` for few), all estimates from the draws are right up to
    their Monte Carlo error. Otherwise the run warns. It also warns if more than a
    hundredth of the posterior's mass seems to be where the model could not be evaluated
    (a Cholesky factorisation that fails in float32). The mean weight estimates the
    evidence :math:`p(y)`.

    A run adds points, where its weights are largest, until k-hat is clearly below the
    limit, so that the verdict does not depend on the random key. If latents make the
    weights uneven, draws are also moved towards the posterior by Hamiltonian Monte
    Carlo, with weights that allow for it (annealed importance sampling: Neal, 2001).

    If a likelihood is not log-concave, the latents may have several modes. The run
    searches for them at the mode of the hyperparameters, and draws from a mixture of
    the Gaussians at all that it finds. The certificate states the number of searches.
    With more than eight modes nothing is certified.

    A model without Gaussian latents and with up to eight hyperparameters (such as a
    marginal likelihood ``MultivariateNormal(0, K(theta))``) is also sampled: its bound
    is its log-density. A Gaussian latent of up to eight numbers in a likelihood that is
    not a sum over data (weights in Cox's partial likelihood, which depends on all rows
    at risk) is integrated with the hyperparameters.

    NUTS runs on the collapsed model instead, and weights correct its draws, with more
    than 16 hyperparameters, and with more than eight if the weighted draws are not
    certified. Then there is no evidence. ``print_summary`` states the method and the
    times of its parts.

    With sparse processes (``GaussianProcess`` with fewer inducing inputs than data) the
    posterior is the posterior of the NumPyro model, in which the inducing values
    determine the function values. NUTS samples the same posterior. The bound is also
    for this model, while :func:`~numpyro_gpaug.collapse` and
    :class:`~numpyro_gpaug.ConjugateSVI` use the bound of the process itself (Titsias,
    2009). Hyperparameters may therefore differ.

    :param model: a NumPyro model as :class:`~numpyro_gpaug.AutoLatentGaussian` takes
        it: on full data, and every hyperparameter a sample site.
    :param num_samples: equally weighted draws that :meth:`get_samples` returns.
    :param num_points: number of hyperparameters to draw (512 give about 300 effective
        ones). If weights are uneven, up to eight times as many are drawn.
    :param num_draws: draws of the latents at each. The default is 8, fewer (at least 4)
        if those of all points would not fit into a gigabyte, 16 if groups are weighted
        separately, and up to 32 if a dense Gaussian has more than a hundred latents:
        then weights are more uneven, and draws are cheap compared with the Gaussian.
    :param correct: ``"mcmc"`` runs NUTS from the draws if k-hat is too large, with all
        latents and hyperparameters whitened by the Gaussian at the mode. ``None``
        only warns.
    :param progress_bar: whether to show one.
    :raises ValueError: for unknown options.

    **Example**

    >>> import jax, numpyro, jax.numpy as jnp, numpyro.distributions as dist
    >>> import numpyro_gpaug as gpaug
    >>> def model(group, y=None):
    ...     tau = numpyro.sample("tau", dist.HalfNormal(1))
    ...     with numpyro.plate("groups", 3):
    ...         effect = numpyro.sample("effect", dist.Normal(1, tau))
    ...     with numpyro.plate("data", len(group)):
    ...         numpyro.sample("y", dist.Poisson(jnp.exp(effect[group])), obs=y)
    >>> group, y = jnp.array([0, 0, 1, 1, 2, 2]), jnp.array([3, 5, 9, 6, 4, 4])
    >>> nested = gpaug.NestedVI(model, num_points=128, progress_bar=False)
    >>> nested.run(jax.random.key(0), group, y)
    >>> nested.get_samples()["effect"].shape
    (1000, 3)
    >>> nested.certified
    True

    References: Rue, Martino and Chopin (2009), Approximate Bayesian inference for
    latent Gaussian models; Vehtari, Simpson, Gelman, Yao and Gabry (2024), Pareto
    smoothed importance sampling; Owen and Zhou (2000), Safe and effective importance
    sampling; Raftery and Bao (2010), Estimating and projecting trends in HIV/AIDS
    generalized epidemics using incremental mixture importance sampling; Cornuet, Marin,
    Mira and Robert (2012), Adaptive multiple importance sampling; Kuntz, Crucinio and
    Johansen (2022), Product-form estimators.
    """

    __getattr__ = of_posterior("nested.posterior()")

    def __init__(
        self,
        model: Model,
        *,
        num_samples: int = 1000,
        num_points: int = 512,
        num_draws: int | None = None,
        correct: str | None = None,
        progress_bar: bool = True,
    ) -> None:
        for name, count in (
            ("num_samples", num_samples),
            ("num_points", num_points),
            ("num_draws", 1 if num_draws is None else num_draws),
        ):
            check_count(name, count)
        if num_points < 32:
            raise ValueError(
                f"num_points={num_points} is too few. At least 32 points are needed "
                "to estimate how uneven their weights are"
            )
        if correct not in (None, "mcmc"):
            raise ValueError(f"correct must be 'mcmc' or None, got {correct!r}")
        super().__init__(model)
        self.num_samples = num_samples
        self.num_points, self.num_draws = num_points, num_draws
        self.correct, self.progress_bar = correct, progress_bar
        self._run: Run | None = None
        self._samples: dict[str, Array] | None = None
        self._labels: Labels = {}

    def _begin(self) -> None:
        def made() -> tuple[CollapsedBounds, Padding]:
            return CollapsedBounds(self.model, projected=True), Padding(self.model)

        # A loop or a notebook cell that makes this object anew does not compile again.
        shared = self._watch.shared(self._version, NestedVI, made)
        self._bounds, self._padding = shared

    # -- the interface of MCMC --------------------------------------------------------

    def run(
        self,
        rng_key: Array,
        *args: Any,
        init_params: Values | None = None,
        **kwargs: Any,
    ) -> None:
        """Draw from the posterior.

        :param rng_key: random key.
        :param args: the model's arguments, observations included; arrays, or columns of
            tables, as for :meth:`ConjugateSVI.run <numpyro_gpaug.ConjugateSVI.run>`.
        :param init_params: constrained hyperparameters by name, all of them, at which
            the search for the mode starts; medians of their priors by default.
        :param kwargs: the model's keyword arguments.
        :raises NotConjugateError: for a model that is not of this form.
        :raises ValueError: for invalid data, plates that draw a subsample, and params
            without a prior.
        :raises CholeskyError: if the bound is not finite at the start of the search.
        """
        with self._running():
            while not self._run_now(rng_key, args, kwargs, init_params):
                pass

    def run_many(
        self, rng_key: Array, *args: Any, over: str | Sequence[str], **kwargs: Any
    ) -> NestedRuns:
        """Run for many responses that share no latents and no hyperparameters, one
        after the other, with the programs of the first. A run that fails has a verdict,
        and the others go on. Draws are not kept.

        :param rng_key: random key of every run.
        :param args: the model's arguments. Those in ``over`` have a leading axis over
            the responses, and all responses share the others.
        :param over: the name of an argument, or several names.
        :param kwargs: the model's keyword arguments.
        :return: the table, k-hat and evidence of each.
        :raises ValueError: for names that are not arguments, axes of different lengths,
            and if all runs fail.

        **Example**

        >>> import jax, numpyro, jax.numpy as jnp, numpyro.distributions as dist
        >>> import numpyro_gpaug as gpaug
        >>> def model(y):
        ...     tau = numpyro.sample("tau", dist.HalfNormal(1))
        ...     level = numpyro.sample("level", dist.Normal(0, tau))
        ...     with numpyro.plate("data", len(y)):
        ...         numpyro.sample("y", dist.Normal(level, 1), obs=y)
        >>> nested = gpaug.NestedVI(model, num_points=128, progress_bar=False)
        >>> y = jnp.array([[0.1, -0.3, 0.2], [2.9, 3.2, 3.1]])
        >>> runs = nested.run_many(jax.random.key(0), y, over="y")
        >>> runs.summary().loc[1].index.to_list(), runs.certified
        (['level', 'tau'], array([ True,  True]))
        """
        responses = Responses.split(self.model, args, kwargs, over)
        # With the same programs, and a result of its own.
        each = object.__new__(type(self))
        vars(each).update(vars(self), progress_bar=False)

        def one(i: int) -> tuple[Any, float, float, str]:
            args, kwargs = responses.one(i)
            try:
                with warnings.catch_warnings():
                    # The verdicts say so.
                    warnings.simplefilter("ignore")
                    each.run(rng_key, *args, **kwargs)
            except (ValueError, CholeskyError) as error:
                return None, np.nan, np.nan, str(error)
            run, fields = each._known(), each.get_extra_fields()
            verdict = CERTIFIED if run.certified else certificate(run)
            return run.table(), fields["khat"], fields["log_evidence"], verdict

        numbers = tqdm(range(responses.number), disable=not self.progress_bar)
        runs = NestedRuns([one(i) for i in numbers])
        if not np.isfinite(runs.khats).any():
            raise ValueError(f"no response could be fitted: {runs.verdicts[0]}")
        if wrong := int((~runs.certified).sum()):
            warnings.warn(
                f"{wrong} of {len(runs)} runs are not certified. See runs.verdicts",
                stacklevel=2,
            )
        return runs

    def _run_now(
        self, rng_key: Array, args: Any, kwargs: Any, init_params: Any
    ) -> bool:
        """Run with the current model; see :meth:`run`.

        :return: ``False`` if the latents are now in another basis, and another run is
            needed.
        """
        check_key(rng_key)
        found = Columns.read(self.model, args, kwargs)
        if found.labels != self._labels:
            refuse_unordered(self.model, args, kwargs, found)
        args, kwargs, labels = found
        clock = Clock()
        with clock.part("reading the model"):
            check_arguments(self._bounds.model, args, kwargs)
            arguments, bound = self._padded(args, kwargs)
            refuse_params(bound, "NestedVI integrates")
            draws = self._draws_at(bound.structure)
            programs = self._bounds.programs(bound, arguments, draws)
            programs.axes(arguments, labels)
        with clock.part("prior"):
            hyper, num = programs.hyper, FIRST + self.num_points
            prior = hyper.prior_draws(arguments, num, generator(rng_key, 0))
            start = _start(hyper, init_params, arguments, prior)
        if not 0 < hyper.size <= FEW:
            # NUTS on the collapsed model would be NUTS on the model itself.
            check_gaussian(programs.structure)
        with threads_for(programs.structure.largest):
            try:
                for way in [integrated] * (hyper.size <= MOST) + [sampled]:
                    run = way(
                        programs, rng_key, arguments, start, prior, clock,
                        num_points=self.num_points, progress_bar=self.progress_bar,
                    )  # fmt: skip
                    if run.certified or hyper.size <= FEW:
                        break
                    start = run.modes[0].point
            except CholeskyError:
                first = programs.first(start, arguments)
                if is_broken(first) and self._turned(programs, start, arguments):
                    return False
                check_precision(first, bound.structure)
                trace = programs.trace(start, arguments)
                check_trace(trace, programs.structure)
                raise
            if (nats := run.lost) > LOST:
                at_mode = run.modes[0].point
                if self._turned(programs, at_mode, arguments):
                    return False
                natural = programs.first(at_mode, arguments)
                warn_of_lost(jnp.asarray(nats), natural, bound.structure)
            if self.correct == "mcmc" and not run.certified:
                with clock.part("NUTS from the draws"):
                    show = self.progress_bar
                    run = corrected(run, rng_key, self.num_samples, progress_bar=show)
        if not run.certified and self.correct is None:
            warnings.warn(
                f"{certificate(run)}. (correct='mcmc' runs NUTS from them)",
                stacklevel=3,
            )
        if hyper.size:
            loss = -run.weighted.log_evidence
            warn_of_units(loss, self._bounds.model, programs.structure, args, kwargs)
        self._run, self._samples, self._labels = run, None, labels
        return True

    def _turned(self, programs: Programs, point: np.ndarray, data: Arguments) -> bool:
        """Whether the latents are now in another basis; see
        :meth:`.CollapsedBounds.turned`.

        :param point: unconstrained hyperparameters.
        """
        hyper = programs.hyper
        values, _ = hyper.values(jnp.asarray(point, hyper.dtype), data)
        return self._bounds.turned(data, values)

    def _padded(self, args: Any, kwargs: Any) -> tuple[Arguments, CollapsedBound]:
        """Return the arguments, with added rows or without, and the bound for them."""
        first = Arguments.split(args, kwargs)
        more = self._padding(first)
        if more is not first:
            try:
                return more, self._bounds.at(more, *more.counting_all().merge())
            except (TypeError, ValueError):
                # The error of the arguments without added rows has the right sizes.
                pass
        return first, self._bounds.at(first, args, kwargs)

    def get_samples(
        self, *, group_by_chain: bool = False, weighted: bool = False
    ) -> Values:
        """Return draws of all sites by name: hyperparameters, Gaussian latents and
        deterministic sites, in the shapes of the model, with the groups and steps of
        the fit. Predict new groups, and steps beyond, with ``posterior().predict_y``:
        NumPyro's ``Predictive`` would use the last ones in their place.

        :param group_by_chain: whether to give them a leading axis of chains (one, or
            the chains of ``correct="mcmc"``).
        :param weighted: all draws that were made, in the order of the weights in
            :meth:`get_extra_fields`, instead of ``num_samples`` equally weighted ones.
        :raises RuntimeError: before a run.
        """
        run = self._known()
        if weighted:
            samples = run.sites(deterministic=True)
        else:
            if self._samples is None:
                self._samples = run.samples(self.num_samples)
            samples = self._samples
        chains = run.num_chains if not weighted else 1
        if group_by_chain:
            return {k: x.reshape(chains, -1, *x.shape[1:]) for k, x in samples.items()}
        return dict(samples)

    def get_extra_fields(self) -> Values:
        """Return diagnostics of the run: weights, k-hat, evidence, times.

        * ``log_weights``: Pareto-smoothed and normalised, one per weighted draw;
          ``log_ratios``: the raw log-weights;
        * ``khat``; ``effective_size`` and ``effective_points``: the effective numbers
          of draws and of hyperparameters;
        * ``log_evidence`` and its standard error ``log_evidence_error``;
        * ``evaluations``: hyperparameters at which the Gaussian was fitted;
          ``failures``: points at which the model could not be evaluated, which have
          zero weight; ``loss``: the approximate share of the posterior's mass there;
        * ``width``: the factor by which draws of the latents are wider than the
          Gaussian;
        * ``seconds``: by part of the run.

        :raises RuntimeError: before a run.
        """
        run = self._known()
        weighted = run.weighted
        return {
            "log_weights": weighted.log_weights.ravel(),
            "log_ratios": weighted.log_ratios.ravel(),
            "khat": weighted.khat,
            "effective_size": weighted.effective_size * run.independence,
            "effective_points": weighted.effective_points * run.independence,
            "log_evidence": weighted.log_evidence,
            "log_evidence_error": weighted.log_evidence_error,
            "evaluations": run.evaluations,
            "failures": int(weighted.failed.sum()),
            "loss": weighted.loss,
            "width": run.width,
            "seconds": dict(run.clock.seconds),
        }

    def posterior(self, num_points: int | None = None) -> Posterior:
        r"""Return predictions that include the uncertainty of the hyperparameters:
        mixtures over several :math:`\theta`, with their posterior weights.

        If the run is certified, the weights of the :math:`\theta` are exact, up to
        Monte Carlo error. Given :math:`\theta` the latents have the Gaussian :math:`q(z
        \mid \theta)`, as after :class:`~numpyro_gpaug.ConjugateSVI`, which is exact
        only for Normal likelihoods; the weights of draws do not correct it. Predictions
        from the corrected draws, at groups of the fit, are :class:`Predictive(model,
        nested.get_samples()) <numpyro.infer.Predictive>`.

        New members of a plate are drawn from their prior at each :math:`\theta`. Each
        joint draw (:meth:`~numpyro_gpaug.Posterior.sample`) has one :math:`\theta`;
        ``predict_y(...).sample`` draws every observation independently.

        :param num_points: number of :math:`\theta` in the mixtures: a systematic sample
            of the weighted ones, or all of them with their weights if there are no
            more. Errors of means are at most the posterior standard deviation due to
            :math:`\theta`, divided by the root of this number. Memory and time of a
            prediction grow with it (the covariance of the latents is stored for each).
            By default 64, and up to 512 for few latents and data once observations are
            left out, which needs the tails; a saved posterior keeps the 64.
        :return: predictions, with the arguments and methods of
            :meth:`ConjugateSVI.posterior <numpyro_gpaug.ConjugateSVI.posterior>`'s.
        :raises RuntimeError: before a run.
        :raises ModelChangedError: if a global, or whatever else the model reads besides
            its arguments, has changed since the run.
        :raises ValueError: if hyperparameters are computed from a positional argument,
            which changes at prediction.
        """
        run, labels = self._known(), self._labels
        arguments = run.data

        def at(num: int) -> Posterior:
            with run.programs.version.running():
                log_weights, values, moments = run.gaussians(num)
                given = run.programs, arguments, values, moments, log_weights
                return mixture(*given, labels)

        size = run.programs.structure.size
        return of_points(at, num_points, size, arguments.num_rows)

    def print_summary(self, prob: float = 0.9) -> None:
        """Print a table of all latents except whitened inducing values
        (``nested.posterior().predict_f`` has the process), the certificate, the
        evidence, and the times of the parts of the run.

        ``n_eff`` is the effective number of draws for the mean of an entry.

        :param prob: the probability between the outer quantiles.
        :raises RuntimeError: before a run.
        """
        whole = {"n_eff": "{:.0f}".format}
        found = self.summary(prob).to_string(
            float_format="{:.2f}".format, formatters=whole, na_rep="-"
        )
        print(f"\n{found}\n\n{self!r}")

    def summary(self, prob: float = 0.9) -> Any:
        """Return the table of :meth:`print_summary`, a :class:`pandas.DataFrame`.

        :param prob: the probability between the outer quantiles.
        :raises RuntimeError: before a run.
        """
        import pandas

        found, axes = self._known().table(prob), self.labelled_axes
        rows = {labelled(k, axes, self.labels): x for k, x in found.items()}
        columns = columns_of(prob)
        return pandas.DataFrame.from_dict(rows, orient="index", columns=columns)

    @property
    def labels(self) -> Labels:
        """Labels of the arguments that were categories, by name."""
        return self._labels

    @property
    def labelled_axes(self) -> dict[str, tuple[str, ...]]:
        """By site, the argument with labels that indexes each axis; empty for an axis
        that none indexes.

        :raises RuntimeError: before a run.
        """
        run = self._known()
        return run.programs.axes(run.data, self._labels)

    @property
    def certified(self) -> bool:
        """Whether the weighted draws are certified to be from the exact posterior, up
        to Monte Carlo error. If not, use ``correct="mcmc"``.

        :raises RuntimeError: before a run.
        """
        return self._known().certified

    @property
    def arguments(self) -> Arguments:
        """The model's arguments in the last run.

        :raises RuntimeError: before a run.
        """
        return self._known().data.counted()

    @property
    def latents(self) -> tuple[str, ...]:
        """The names of the latent sites: hyperparameters, then Gaussian latents.

        :raises RuntimeError: before a run.
        """
        return (*self.structure.others, *(s.name for s in self.structure.sites))

    @property
    def structure(self) -> Structure:
        """What the model of the last run shows: latents, likelihoods and sparsity.

        :raises RuntimeError: before a run.
        """
        return self._known().programs.structure

    def _display(self) -> tuple[str, Rows]:
        if self._run is None:
            return "NestedVI, not run yet", []
        return "NestedVI", overview(self._run, self.num_samples)

    def _known(self) -> Run:
        if self._run is None:
            raise RuntimeError(
                "NestedVI has no draws yet. Call nested.run(key, *args) first"
            )
        return self._run

    def _draws_at(self, structure: Structure) -> int:
        """Return the number of draws of the latents at each point."""
        if self.num_draws is not None:
            return self.num_draws
        if not structure.size:
            return 1
        # As many as fit into memory.
        room = MOST_NUMBERS // max(self.num_points * structure.size, 1)
        if may_part(structure):
            return draws_at(structure.form.independent, MORE_APART * room)
        if structure.form.any_rows:
            return max(DRAWS, min(structure.size // 12, MOST_DRAWS, room))
        held = GIGABYTE // (self.num_points * structure.size)
        return min(DRAWS, max(FEWEST, held))


def _start(
    hyper: Hyperparameters,
    init_params: Values | None,
    data: Arguments,
    prior: np.ndarray,
) -> np.ndarray:
    """Return the start of the search for the mode, unconstrained.

    :param hyper: the hyperparameters.
    :param init_params: see :meth:`NestedVI.run`.
    :param data: the model's arguments.
    :param prior: draws of the prior, if any.
    """
    if init_params is None:
        if len(prior):
            return np.median(prior, axis=0)
        return np.asarray(hyper.medians(data, jax.random.key(0)), float)
    if set(init_params) != set(hyper.names):
        raise ValueError(
            f"init_params names {sorted(init_params)}, but the hyperparameters are "
            f"{sorted(hyper.names)}"
        )
    return np.asarray(hyper.flatten(init_params, data), float)
