# SPDX-License-Identifier: Apache-2.0
"""Rival methods for ``binary.py``, each as its documentation recommends.

Each function imports its library, sets the method up and returns it; ``binary.py`` runs
this file in a process per method, in the interpreter that holds its library.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from common import Clock, Fit, Prediction, Problem, versions, worker_main

LEARNING_RATE = 0.05


def _notes(clock: Clock, max_steps: int, *packages: str) -> dict[str, Any]:
    return {
        "imports": clock.now(),
        "max_steps": max_steps,
        "versions": versions(*packages),
    }


def _polya_gamma_bound(
    problem: Problem, mean: np.ndarray, variance: np.ndarray, kl: float
) -> float:
    """The augmented bound at the optimal auxiliary variables."""
    c = np.sqrt(mean**2 + variance).astype(float)
    terms = (problem.y - 0.5) * mean - np.logaddexp(c / 2, -c / 2)
    return float(terms.sum() - kl)


def gpflow(problem: Problem, clock: Clock) -> tuple[Fit, dict[str, Any]]:
    """Natural gradients with step 1 on the exact bound, logit link, whitened."""
    import gpflow as gpf
    import tensorflow as tf
    from gpflow.keras import tf_keras

    notes = _notes(clock, 15, "gpflow", "tensorflow")
    gpf.config.set_default_float(problem.X.dtype.type)
    model = gpf.models.SVGP(
        gpf.kernels.SquaredExponential(problem.variance, problem.lengthscale),
        # The default link is probit, which is another model.
        gpf.likelihoods.Bernoulli(invlink=tf.sigmoid),
        problem.Z,
    )
    gpf.set_trainable(model.inducing_variable, False)
    gpf.set_trainable(model.kernel, problem.learn)
    data = tf.constant(problem.X), tf.constant(problem.y[:, None])
    gaussian = [(model.q_mu, model.q_sqrt)]
    for parameter in gaussian[0]:
        gpf.set_trainable(parameter, False)
    natural = gpf.optimizers.NaturalGradient(gamma=1.0)
    adam = tf_keras.optimizers.Adam(LEARNING_RATE)
    loss = model.training_loss_closure(data, compile=False)
    if problem.learn:
        adam.build(model.trainable_variables)
    changing = [*model.variables, *adam.variables]
    initial = [tf.identity(v) for v in changing]

    @tf.function
    def step() -> None:
        natural.minimize(loss, gaussian)
        if problem.learn:
            adam.minimize(loss, model.trainable_variables)

    @tf.function
    def bound() -> tf.Tensor:
        return model.elbo(data)

    class GPflow:
        def start(self) -> None:
            for variable, value in zip(changing, initial, strict=True):
                variable.assign(value)

        def run(self, steps: int) -> None:
            self.start()
            for _ in range(steps):
                step()
            model.q_mu.numpy()

        def bounds(self, steps: int) -> Sequence[float]:
            self.start()
            found = []
            for _ in range(steps):
                step()
                found.append(float(bound()))
            return found

        def probs(self, X: np.ndarray) -> np.ndarray:
            return model.predict_y(X)[0].numpy().ravel()

        def predict(self) -> Prediction:
            probs = self.probs(problem.X_test)
            mean, variance = (x.numpy().ravel() for x in model.predict_f(problem.X))
            return Prediction(probs, mean, variance, float(model.prior_kl()))

    return GPflow(), notes


def gpytorch(problem: Problem, clock: Clock) -> tuple[Fit, dict[str, Any]]:
    """Natural gradients with step 1 on the Polya-Gamma bound, after its tutorial."""
    import gpytorch as gpt
    import torch
    from gpytorch.variational import NaturalVariationalDistribution, VariationalStrategy

    notes = _notes(clock, 400, "gpytorch", "torch")
    torch.manual_seed(0)
    torch.set_default_dtype(getattr(torch, problem.X.dtype.name))
    X, y, Z = (torch.as_tensor(a) for a in (problem.X, problem.y, problem.Z))

    class PolyaGamma(gpt.likelihoods._OneDimensionalLikelihood):
        def expected_log_prob(self, target: Any, at: Any, *_: Any, **__: Any) -> Any:
            second = at.variance + at.mean.square()
            c = second.detach().sqrt()
            half_omega = 0.25 * torch.tanh(0.5 * c) / c
            return (target - 0.5) * at.mean - half_omega * second

        def forward(self, f: Any, *_: Any, **__: Any) -> Any:
            return torch.distributions.Bernoulli(logits=f)

        def marginal(self, at: Any, *_: Any, **__: Any) -> Any:
            return torch.distributions.Bernoulli(self.quadrature(torch.sigmoid, at))

    class Model(gpt.models.ApproximateGP):
        def __init__(self) -> None:
            q = NaturalVariationalDistribution(len(Z))
            super().__init__(VariationalStrategy(self, Z, q, False))
            self.mean = gpt.means.ZeroMean()
            self.kernel = gpt.kernels.ScaleKernel(gpt.kernels.RBFKernel())

        def forward(self, x: Any) -> Any:
            return gpt.distributions.MultivariateNormal(self.mean(x), self.kernel(x))

    model, likelihood = Model(), PolyaGamma()
    model.kernel.base_kernel.lengthscale = problem.lengthscale
    model.kernel.outputscale = problem.variance
    objective = gpt.mlls.VariationalELBO(likelihood, model, len(y))
    model(X)  # the first call sets q to the prior
    initial = {k: v.clone() for k, v in model.state_dict().items()}

    class GPyTorch:
        def start(self) -> None:
            model.load_state_dict(initial)
            model.train()
            self.natural = gpt.optim.NGD(
                model.variational_parameters(), num_data=len(y), lr=1.0
            )
            self.others = list(model.hyperparameters()) if problem.learn else []
            for parameter in model.hyperparameters():
                parameter.requires_grad_(problem.learn)
            self.adam = (
                torch.optim.Adam(self.others, LEARNING_RATE) if self.others else None
            )

        def step(self) -> None:
            self.natural.zero_grad()
            if self.adam:
                self.adam.zero_grad()
            loss = -objective(model(X), y)
            loss.backward()
            self.natural.step()
            if self.adam:
                self.adam.step()

        def run(self, steps: int) -> None:
            self.start()
            for _ in range(steps):
                self.step()

        def bounds(self, steps: int) -> Sequence[float]:
            self.start()
            found = []
            for _ in range(steps):
                self.step()
                found.append(_polya_gamma_bound(problem, *self.latent()))
            return found

        def latent(self) -> tuple[np.ndarray, np.ndarray, float]:
            with torch.no_grad():
                model.train()
                q = model(X)
                kl = float(model.variational_strategy.kl_divergence())
                return q.mean.numpy(), q.variance.numpy(), kl

        def predict(self) -> Prediction:
            latent = self.latent()
            model.eval()
            with torch.no_grad():
                probs = likelihood(model(torch.as_tensor(problem.X_test))).mean.numpy()
            return Prediction(probs, *latent)

    return GPyTorch(), notes


def gpjax(problem: Problem, clock: Clock) -> tuple[Fit, dict[str, Any]]:
    """The dual (t-SVGP) step of size 1, logit link, compiled once."""
    import equinox as eqx
    import gpjax as gpx
    import jax
    import jax.numpy as jnp
    import numpyro.distributions as dist
    from gpjax.natural_gradients import natural_gradient_step, partition_variational

    notes = _notes(clock, 15, "gpjax", "jax", "numpyro")

    class Logistic(gpx.likelihoods.Bernoulli):
        def link_function(self, f: Any) -> Any:
            return dist.Bernoulli(logits=f)

    kernel = gpx.kernels.RBF(lengthscale=problem.lengthscale, variance=problem.variance)
    prior = gpx.gps.Prior(mean_function=gpx.mean_functions.Zero(), kernel=kernel)
    family = gpx.variational_families.DualVariationalGaussian(
        model=prior * Logistic(), inducing_inputs=jnp.asarray(problem.Z)
    )
    data = gpx.Dataset(X=jnp.asarray(problem.X), y=jnp.asarray(problem.y[:, None]))
    initial, hyper = partition_variational(family)

    def loss(q: Any, data: Any) -> Any:
        return -gpx.objectives.elbo(q, data)

    @eqx.filter_jit
    def step(q: Any, hyper: Any, data: Any) -> Any:
        return natural_gradient_step(q, hyper, data, loss, jnp.asarray(1.0))[0]

    @eqx.filter_jit
    def judge(q: Any, hyper: Any, data: Any) -> Any:
        family = eqx.combine(q, hyper)
        return -loss(family, data), family.marginals(data.X), family.prior_kl()

    class GPJax:
        def run(self, steps: int) -> None:
            self.q = initial
            for _ in range(steps):
                self.q = step(self.q, hyper, data)
            jax.block_until_ready(self.q)

        def bounds(self, steps: int) -> Sequence[float]:
            self.q = initial
            found = []
            for _ in range(steps):
                self.q = step(self.q, hyper, data)
                found.append(float(judge(self.q, hyper, data)[0]))
            return found

        def predict(self) -> Prediction:
            _, (mean, variance), kl = judge(self.q, hyper, data)
            family = eqx.combine(self.q, hyper)
            m, v = (np.asarray(x)[:, None] for x in family.marginals(problem.X_test))
            # Its Bernoulli predicts through the probit: average the logit link instead.
            nodes, weights = np.polynomial.hermite_e.hermegauss(80)
            probs = (
                1 / (1 + np.exp(-(m + np.sqrt(v) * nodes))) @ weights / weights.sum()
            )
            return Prediction(probs, np.asarray(mean), np.asarray(variance), float(kl))

    return GPJax(), notes


def numpy(problem: Problem, clock: Clock) -> tuple[Fit, dict[str, Any]]:
    """Polya-Gamma coordinate ascent in plain NumPy and SciPy."""
    from scipy.linalg import cholesky, solve_triangular
    from scipy.spatial.distance import cdist

    notes = _notes(clock, 400, "numpy", "scipy")
    if problem.learn:
        raise NotImplementedError("the plain baseline has fixed hyperparameters")
    dtype = problem.X.dtype
    jitter = 1e-5 if dtype == np.float32 else 1e-10

    def gram(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        squares = cdist(a, b, "sqeuclidean") / problem.lengthscale**2
        return (problem.variance * np.exp(-0.5 * squares)).astype(dtype)

    class CAVI:
        def project(self, X: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            """``A = L^-1 K_ZX`` and the residual variance."""
            K = gram(problem.Z, problem.Z)
            K += problem.variance * jitter * np.eye(len(K), dtype=dtype)
            A = solve_triangular(
                cholesky(K, lower=True), gram(problem.Z, X), lower=True
            )
            return A, np.maximum(problem.variance - np.square(A).sum(0), 0)

        def start(self) -> None:
            self.A, self.residual = self.project(problem.X)
            self.loc = np.zeros(len(self.A), dtype)
            self.factor = np.eye(len(self.A), dtype=dtype)

        def marginals(
            self, A: np.ndarray, residual: np.ndarray
        ) -> tuple[np.ndarray, np.ndarray]:
            whitened = solve_triangular(self.factor, A, lower=True)
            return self.loc @ A, residual + np.square(whitened).sum(0)

        def step(self) -> None:
            mean, variance = self.marginals(self.A, self.residual)
            c = np.sqrt(mean**2 + variance)
            omega = np.tanh(c / 2) / (2 * c)
            precision = np.eye(len(self.A), dtype=dtype) + (self.A * omega) @ self.A.T
            self.factor = cholesky(precision, lower=True)
            half = solve_triangular(self.factor, self.A @ (problem.y - 0.5), lower=True)
            self.loc = solve_triangular(self.factor, half, lower=True, trans=1)

        def run(self, steps: int) -> None:
            self.start()
            for _ in range(steps):
                self.step()

        def latent(self) -> tuple[np.ndarray, np.ndarray, float]:
            inverse = solve_triangular(self.factor, np.eye(len(self.A)), lower=True)
            squares = np.square(inverse).sum() + np.square(self.loc).sum()
            log_det = -2 * np.log(np.diag(self.factor)).sum()
            kl = 0.5 * (squares - len(self.A) - log_det)
            return *self.marginals(self.A, self.residual), float(kl)

        def bounds(self, steps: int) -> Sequence[float]:
            self.start()
            found = []
            for _ in range(steps):
                self.step()
                found.append(_polya_gamma_bound(problem, *self.latent()))
            return found

        def predict(self) -> Prediction:
            mean, variance = self.marginals(*self.project(problem.X_test))
            nodes, weights = np.polynomial.hermite_e.hermegauss(80)
            f = mean[:, None] + np.sqrt(variance)[:, None] * nodes
            probs = 1 / (1 + np.exp(-f)) @ weights / weights.sum()
            return Prediction(probs, *self.latent())

    return CAVI(), notes


class _Sklearn:
    def __init__(self, estimator: Any, problem: Problem) -> None:
        self._estimator, self._problem = estimator, problem

    def run(self, steps: int) -> None:
        self._estimator.fit(self._problem.X, self._problem.y)

    def bounds(self, steps: int) -> Sequence[float]:
        return [0.0]

    def predict(self) -> Prediction:
        return Prediction(self._estimator.predict_proba(self._problem.X_test)[:, 1])


def gpc(problem: Problem, clock: Clock) -> tuple[Fit, dict[str, Any]]:
    """scikit-learn's full Gaussian process classifier (Laplace)."""
    from sklearn.gaussian_process import GaussianProcessClassifier
    from sklearn.gaussian_process.kernels import RBF, ConstantKernel

    notes = _notes(clock, 1, "scikit-learn")
    kernel = ConstantKernel(problem.variance) * RBF(problem.lengthscale)
    optimizer = "fmin_l_bfgs_b" if problem.learn else None
    return _Sklearn(
        GaussianProcessClassifier(kernel, optimizer=optimizer), problem
    ), notes


def svc(problem: Problem, clock: Clock) -> tuple[Fit, dict[str, Any]]:
    """scikit-learn's support vector classifier with Platt scaling."""
    from sklearn.calibration import CalibratedClassifierCV
    from sklearn.svm import SVC

    notes = _notes(clock, 1, "scikit-learn")
    gamma = "scale" if problem.learn else 0.5 / problem.lengthscale**2
    machine = CalibratedClassifierCV(SVC(gamma=gamma), ensemble=False)
    return _Sklearn(machine, problem), notes


METHODS = {f.__name__: f for f in (gpflow, gpytorch, gpjax, numpy, gpc, svc)}

if __name__ == "__main__":
    worker_main(METHODS)
