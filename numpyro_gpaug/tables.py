# SPDX-License-Identifier: Apache-2.0
"""Classification of tables, with defaults for the kernel, its priors, the inducing
inputs, and the temperature of the predictions."""

from __future__ import annotations

import threading
import warnings
from functools import lru_cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro import handlers
from scipy.special import logsumexp, softmax
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data

from numpyro_gpaug import inducing, kernels
from numpyro_gpaug._indicators import Regression, regress
from numpyro_gpaug._temperature import log_posterior, log_probs, mixed, tempered
from numpyro_gpaug.gp import GaussianProcess
from numpyro_gpaug.guides import AutoSparseGP
from numpyro_gpaug.infer import ConjugateSVI
from numpyro_gpaug.math import linalg
from numpyro_gpaug.predict import Posterior

__all__ = ["TableClassifier", "kernel", "model", "num_inducing", "tempered"]

# With more columns than this, few rows cannot show which of them matter, and a linear
# function would take more inducing inputs than there are.
FEW = 30
# With many columns: the number of rows per column from which on each gets a lengthscale
# of its own for a trial, and the nats per column that this must gain. Half of a
# lengthscale must gain as much, and so must a regression.
ROWS, GAIN = 10, 1.0
# The standard deviation of the logarithm of a lengthscale that is fixed.
FIXED = 0.01
# The mean share of the prior variance that inducing inputs may leave unexplained, and
# the factor by which there are more of them otherwise.
UNEXPLAINED, MORE = 0.05, 3
# By default, rows times classes times the square of the number of inducing inputs may
# be this large. With few inducing inputs the bound prefers functions that are too
# smooth. These leave little unexplained, so that UNEXPLAINED does not show the lack.
WORK = 2e8
# With more than this, only the functions are learned again, with MORE inducing inputs.
DEAR = 1e9
# With so many classes, a regression on their indicators is tried first: the indicators
# say much about one kernel, and the cost of a softmax grows with the classes.
MANY = 8
# The prior variance of the mean of a process.
MEAN = 4.0
# The number of parts of the cross-validation of boosting, and the number of standard
# errors by which boosting must be better.
FOLDS, BETTER = 5, 2.0


class TableClassifier(ClassifierMixin, BaseEstimator):
    """Probabilities of classes, from a table, by Gaussian processes.

    It is a classifier of scikit-learn, for pipelines and cross-validation, and can be
    pickled. Columns are numbers: encode categories and dates first, and impute missing
    values. Fits of similar tables share compiled programs.

    *Model.* Columns are standardised, or, if they are many, may share one scale, as
    pixels do. Each class has a process with an unknown mean. All have one kernel
    (:func:`kernel`): a smooth function, with a lengthscale for each column, and a
    linear function if columns are few. With many columns these lengthscales are used if
    they raise the bound by more than a nat each. Inducing inputs are centres of
    k-means. With few rows they are about as many as rows. If they explain too little of
    the prior, they are three times as many.

    *Choices by leave-one-out.* Predictions of each training label from all others
    determine the temperature of the probabilities (:func:`tempered`). At that
    temperature they also choose the scale of the columns, and how often the lengthscale
    of the largest bound is halved before all else is learnt again: where classes
    separate, the bound is largest at functions that are too smooth.

    *Many classes.* With eight classes or more, a regression on indicators of the
    classes is tried first. All classes share one covariance, so it has an inducing
    input for each of up to 2000 rows. It learns the kernel from leave-one-out
    predictions of half of the rows, at most 1000. It is kept if its leave-one-out
    predictions of the other rows are better than those of a softmax with its kernel.

    *Another tool.* Gradient boosting is better for functions with steps, and for many
    rows: :meth:`beside_boosting` compares both.

    :param num_inducing: the number of inducing inputs at the start; see
        :func:`num_inducing`.
    :param steps: the largest number of evaluations of the bound.
    :param seed: the seed of k-means and of the random key.
    :param verbose: whether to show a progress bar for each of the posteriors that are
        compared. The time of a fit grows with the number of rows, times the number of
        classes, times the square of the number of inducing inputs.
    :ivar classes_: the labels, sorted.
    :ivar regression_: the regression that predicts instead of the posterior, or None.
    :ivar posterior_: the :class:`~numpyro_gpaug.Posterior` at scaled inputs.
    :ivar result_: the :class:`~numpyro_gpaug.infer.ConjugateResult`.

    **Example**

    >>> import numpy as np
    >>> from numpyro_gpaug.tables import TableClassifier
    >>> rng = np.random.default_rng(0)
    >>> X = rng.normal(size=(80, 2))
    >>> y = np.where(X[:, 0] * X[:, 1] > 0, "same", "other")
    >>> classifier = TableClassifier(num_inducing=20).fit(X, y)
    >>> print(classifier.predict([[1.0, 1.0], [1.0, -1.0]]))
    ['same' 'other']
    """

    def __init__(
        self,
        *,
        num_inducing: int | None = None,
        steps: int = 200,
        seed: int = 0,
        verbose: bool = False,
    ) -> None:
        self.num_inducing, self.steps, self.seed = num_inducing, steps, seed
        self.verbose = verbose

    def fit(self, X: Any, y: Any) -> TableClassifier:
        """Fit, and return the classifier.

        :param X: numbers, (N, D), all finite.
        :param y: labels, (N,), of two classes or more.
        :raises ValueError: for other arrays.
        """
        X, y = self._checked(X, y)
        check_classification_targets(y)
        self.classes_, self._codes = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError(f"y has one class, {self.classes_}; expected two or more")
        self._centre, scale = X.mean(0), X.std(0)
        scales = [np.where(scale > 0, scale, 1)]
        if X.shape[1] > FEW:
            scales.append(np.full_like(scale, np.sqrt(np.square(scale).mean()) or 1))
        fit, self.regression_ = self._chosen(X, scales)
        self._X, self._scale, self.result_ = fit.X, fit.scale, fit.result
        self.posterior_ = fit.posterior
        own = self.regression_
        self._judges = np.arange(len(X)) if own is None else own.judges
        self._left_out = (own or fit).left_out[self._judges]
        codes = self._codes[self._judges]
        self._weights = softmax(log_posterior(self._left_out, codes))
        return self

    def _chosen(
        self, X: np.ndarray, scales: list[Any]
    ) -> tuple[_Fit, Regression | None]:
        """Return a fit; of many classes with a regression and its kernel, if labels
        that did not choose its hyperparameters are predicted better, each left out."""
        if len(self.classes_) < MANY:
            return self._searched(X, scales), None
        # Of many columns, with and without lengthscales of their own.
        builds = (_kernel,) if X.shape[1] <= FEW else (_kernel, kernel)
        tried = [
            (scale, regress(build, self._scaled(X, scale), self._codes, self.seed))
            for scale in scales
            for build in builds
        ]
        judges = tried[0][1].judges
        scale, found = max(tried, key=lambda each: self._score(each[1], judges))
        start = found.kernel_values
        fit = self._fit(X, scale, apart="relative" in start, start=start, steps=1)
        if self._score(found, judges) > self._score(fit, judges) + GAIN:
            return fit, found
        return self._searched(X, scales), None

    def _searched(self, X: np.ndarray, scales: list[Any]) -> _Fit:
        """Return a fit whose kernel maximises the bound, or has lengthscales half as
        long, as often as labels that are left out gain."""
        few = X.shape[1] <= FEW
        fit = max((self._fit(X, s, apart=few) for s in scales), key=self._score)
        if not few and len(X) >= ROWS * X.shape[1]:
            several = self._fit(X, fit.scale, apart=True)
            gained = float(fit.result.losses[-1] - several.result.losses[-1])
            fit = several if gained > GAIN * X.shape[1] else fit
        learned, trial = fit, self._fit(X, fit.scale, **fit.halved(), steps=1)
        while self._score(trial) > self._score(fit) + GAIN:
            fit, trial = trial, self._fit(X, fit.scale, **trial.halved(), steps=1)
        return self._finished(X, fit, halved=fit is not learned)

    def _finished(self, X: np.ndarray, fit: _Fit, *, halved: bool) -> _Fit:
        """Return a fit with all learned again if its lengthscale was halved, and with
        more inducing inputs if these explain too little."""
        Z, apart = fit.given["Z"], fit.given["apart"]
        more = _unexplained(fit.medians, Z, fit.X, apart=apart) > UNEXPLAINED
        size = num_inducing(fit.X, self.num_inducing, MORE, len(Z))
        dear = len(X) * len(self.classes_) * size**2 > DEAR
        if halved and (dear or not more):
            fit = self._fit(X, fit.scale, **fit.again())
        if more:
            steps = 1 if dear else None
            fit = self._fit(X, fit.scale, **fit.again(), more=MORE, steps=steps)
        return fit

    def __getstate__(self) -> dict[str, Any]:
        state = dict(super().__getstate__())
        if "posterior_" in state:
            with TemporaryDirectory() as folder:
                path = Path(folder, "posterior.npz")
                self.posterior_.save(path)
                state["posterior_"] = path.read_bytes()
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "posterior_" in state:
            with TemporaryDirectory() as folder:
                path = Path(folder, "posterior.npz")
                path.write_bytes(state["posterior_"])
                self.posterior_ = Posterior.load(path, model)

    def predict_proba(self, X: Any) -> np.ndarray:
        """Return the probabilities of the classes, (n, C).

        :param X: numbers, (n, D).
        """
        check_is_fitted(self)
        X = self._scaled(self._checked(X, reset=False), self._scale)
        if self.regression_ is None:
            found = log_probs(self.posterior_.predict_y(X).probs)
        else:
            found = self.regression_.log_probs(X)
        return mixed(found, self._weights)

    def predict(self, X: Any) -> np.ndarray:
        """Return the most probable labels, (n,).

        :param X: numbers, (n, D).
        """
        probs = self.predict_proba(X)
        return self.classes_[probs.argmax(1)]

    def beside_boosting(self) -> dict[str, float]:
        """Return the mean negative log-likelihoods of the labels of the fit (after a
        regression, of labels that it did not learn from): ``own``, each left out;
        ``boosting``, of scikit-learn's gradient boosting, by cross-validation; and
        ``se``, the standard error of their difference.

        Warns if boosting is better by more than two standard errors.
        """
        from sklearn.ensemble import HistGradientBoostingClassifier
        from sklearn.model_selection import StratifiedKFold, cross_val_predict

        y = self._codes
        folds = StratifiedKFold(FOLDS, shuffle=True, random_state=self.seed)
        with warnings.catch_warnings():
            # A class may have fewer rows than there are parts.
            warnings.simplefilter("ignore")
            boosted = cross_val_predict(
                HistGradientBoostingClassifier(random_state=self.seed),
                self._X, y, cv=folds, method="predict_proba",
            )  # fmt: skip
        judged = y[self._judges]
        rows = np.arange(len(judged))
        own = -self._left_out[rows, judged]
        theirs = -log_probs(boosted)[self._judges][rows, judged]
        se = float((own - theirs).std() / np.sqrt(len(judged)))
        found = {"own": float(own.mean()), "boosting": float(theirs.mean()), "se": se}
        if found["own"] - found["boosting"] > BETTER * se:
            warnings.warn(
                "gradient boosting predicts labels that are left out better: mean "
                f"negative log-likelihood {found['boosting']:.3f} instead of "
                f"{found['own']:.3f}. Use scikit-learn's "
                "HistGradientBoostingClassifier for these data",
                stacklevel=2,
            )
        return found

    def _checked(self, *arrays: Any, **kwargs: Any) -> Any:
        """Return arrays of numbers, or name the columns of a data frame that are not
        numbers."""
        try:
            return validate_data(self, *arrays, dtype=float, **kwargs)
        except (TypeError, ValueError) as error:
            chosen = getattr(arrays[0], "select_dtypes", None)
            names = list(chosen(exclude=["number", "bool"])) if chosen else []
            if not names:
                raise
            raise ValueError(
                f"columns {names} are not numbers; encode them first, for example with "
                "make_column_transformer in a pipeline, categories by "
                "OneHotEncoder(sparse_output=False)"
            ) from error

    def _scaled(self, X: np.ndarray, scale: np.ndarray) -> np.ndarray:
        return ((X - self._centre) / scale).astype(jnp.result_type(float))

    def _fit(
        self, X: np.ndarray, scale: np.ndarray, *, apart: bool = False,
        start: dict[str, Any] | None = None, prior: Any = None, more: int = 1,
        steps: int | None = None,
    ) -> _Fit:  # fmt: skip
        """Return a fit.

        :param scale: what columns are divided by.
        :param apart: whether each column has a lengthscale of its own.
        :param start: values of the sites of the kernel at the start.
        :param prior: see :func:`kernel`.
        :param more: how many times as many inducing inputs.
        :param steps: the largest number of evaluations of the bound; one learns the
            function alone.
        """
        X = self._scaled(X, scale)
        cheap = int(np.sqrt(WORK / (len(X) * len(self.classes_))))
        size = num_inducing(X, self.num_inducing, more, cheap)
        prior = (0.5 * np.log(X.shape[1]), 1) if prior is None else prior
        given: dict[str, Any] = {
            "Z": inducing.kmeans(X, size, seed=self.seed), "apart": apart,
            "classes": len(self.classes_), "prior": np.array(prior, X.dtype),
        }  # fmt: skip
        alike = apart, size, X.shape[1], len(self.classes_), X.dtype
        svi = _programs(threading.get_ident(), *alike)
        result = svi.run(
            jax.random.key(self.seed), steps or self.steps, X, self._codes,
            init_params={f"{k}_auto_loc": v for k, v in (start or {}).items()},
            progress_bar=bool(self.verbose), tol=0.1 * GAIN, **given,
        )  # fmt: skip
        medians = dict(svi.guide.other_median(result.params))
        posterior = svi.posterior(result)
        left_out = log_probs(posterior.leave_one_out(X, self._codes).probs)
        return _Fit(scale, X, given, result, posterior, medians, left_out)

    def _score(self, fit: _Fit | Regression, rows: Any = slice(None)) -> float:
        """Return the log probability of the labels of some rows, each left out."""
        found = log_posterior(fit.left_out[rows], self._codes[rows])
        return float(logsumexp(found))


@lru_cache(maxsize=8)
def _programs(*alike: Any) -> ConjugateSVI:
    """Return the ConjugateSVI of fits that can share compiled programs, such as the
    folds of a cross-validation.

    :param alike: the thread, and all that determines the shapes of the latents.
    """
    return ConjugateSVI(model, AutoSparseGP(model))


class _Fit(NamedTuple):
    """A fit at scaled inputs."""

    scale: np.ndarray
    X: np.ndarray
    given: dict[str, Any]
    result: Any
    posterior: Posterior
    medians: dict[str, Any]
    left_out: np.ndarray

    def again(self) -> dict[str, Any]:
        """Return the arguments of a fit from where this one ended."""
        kept = {k: self.given[k] for k in ("apart", "prior")}
        return {"start": self.medians, **kept}

    def halved(self) -> dict[str, Any]:
        """Return the arguments of a fit with half the lengthscale, fixed."""
        half = 0.5 * self.medians["lengthscale"]
        start = self.medians | {"lengthscale": half}
        return self.again() | {"start": start, "prior": (np.log(half), FIXED)}


def model(
    X: Any, y: Any = None, *, Z: Any, classes: int, apart: bool, prior: Any = None
) -> None:
    """The model of a :class:`TableClassifier`.

    :param X: scaled inputs, (N, D).
    :param y: labels 0 .. C - 1.
    :param Z: inducing inputs.
    :param classes: the number of classes, C.
    :param apart: whether each column has a lengthscale of its own.
    :param prior: see :func:`kernel`.
    """
    several: Any = {"num_latents": classes} if classes > 2 else {}
    # The unknown mean is a part of the process, which is integrated out.
    own: Any = kernel(X.shape[1], apart=apart, prior=prior)
    gp = GaussianProcess("f", own + MEAN, Z, **several)
    with numpyro.plate("data", X.shape[0]):
        f = gp(X)
        label = dist.Categorical(logits=f) if several else dist.Bernoulli(logits=f)
        numpyro.sample("y", label, obs=y)


def kernel(
    columns: int, *, apart: bool | None = None, prior: Any = None
) -> kernels.Kernel:
    """Return a kernel whose hyperparameters are sample sites under weak priors.

    It is the sum of a smooth function and, if columns are few, a linear one, so that
    little is lost to logistic regression if the truth is linear.

    Columns share a lengthscale, and the lengthscale of each is shrunk towards it: free
    lengthscales overfit a few hundred rows. Weaker priors gain .004 nats where classes
    separate (wine, iris) and lose .013 where labels are noisy (breast cancer of the
    Raetsch sets). Where classes separate, test NLL falls with ever larger slopes, which
    the penalty of logistic regression allows and the bound does not: see
    :func:`tempered`.

    :param columns: the number of columns, which are standardised.
    :param apart: whether columns have lengthscales of their own: by default, if they
        are few.
    :param prior: the mean and standard deviation of the logarithm of the shared
        lengthscale: (log(columns) / 2, 1) by default.
    """
    location, sd = (0.5 * np.log(columns), 1) if prior is None else prior
    lengthscale = numpyro.sample("lengthscale", dist.LogNormal(location, sd))
    variance = numpyro.sample("variance", dist.LogNormal(1, 1))
    if columns <= FEW if apart is None else apart:
        relative = dist.LogNormal(0, 0.5).expand([columns]).to_event(1)
        lengthscale = lengthscale * numpyro.sample("relative", relative)
    smooth = kernels.Matern52(lengthscale, variance)
    if columns > FEW:
        return smooth
    slopes = numpyro.sample("slopes", dist.LogNormal(-np.log(columns), 1.5))
    return smooth + kernels.Linear(variance=slopes)


def _kernel(columns: int) -> kernels.Kernel:
    return kernel(columns, apart=True)


def num_inducing(
    X: np.ndarray, most: int | None = None, more: int = 1, cheap: int = 0
) -> int:
    """Return the number of inducing inputs: no more than there are different rows.

    :param X: the inputs, (N, D).
    :param most: 100 by default, twice as many for many columns: a function has more
        directions to vary in.
    :param more: how many times as many.
    :param cheap: a number below which the default does not fall.
    """
    default = max(more * (100 if X.shape[1] <= FEW else 200), cheap)
    return min(default if most is None else more * most, len(np.unique(X, axis=0)))


@partial(jax.jit, static_argnames="apart")
def _unexplained(medians: dict[str, Any], Z: Any, X: Any, *, apart: bool) -> Any:
    """Return the mean share of the prior variance of rows that inducing inputs do not
    explain."""
    with handlers.substitute(data=medians):
        own = kernel(X.shape[1], apart=apart)
    factor = linalg.cholesky(own(Z, Z) + 1e-4 * jnp.eye(len(Z)))
    across = linalg.solve_lower(factor, own(Z, X))
    return jnp.mean(1 - jnp.square(across).sum(0) / own(X))
