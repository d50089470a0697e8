# SPDX-License-Identifier: Apache-2.0
"""Plants errors in a copy of the package, one at a time, and runs quick tests on each.

``python -m tests.planted [WORD ...]`` prints which test caught which error (of those
whose description has one of the words), and fails if one was not caught. Every error
names the test files that are run first; the whole quick suite follows where they pass,
unless ``--named`` is given.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

TOP = Path(__file__).parents[1]


class Planted(NamedTuple):
    """An error: ``right``, which stands once in ``module``, becomes ``wrong``."""

    what: str
    module: str
    right: str
    wrong: str
    tests: tuple[str, ...]


def planted() -> list[Planted]:
    """Signs, factors, transposes, scales, constants of float32 and off-by-ones."""
    return [
        Planted(
            "Bernoulli: sign of the variance in the bound",
            "likelihoods/bernoulli.py",
            "log2cosh_half(m * m + v)",
            "log2cosh_half(m * m - v)",
            ("test_conjugate",),
        ),
        Planted(
            "Binomial: factor 2 in the potential of a Gibbs draw",
            "likelihoods/_logistic.py",
            "(0.5 * (ups - downs), ",
            "(ups - downs, ",
            (
                "test_augmentations",
                "test_calibration_of_samplers",
                "test_gibbs",
            ),
        ),
        Planted(
            "Negative binomial: sign in the coefficient",
            "likelihoods/negative_binomial.py",
            "return -log_beta(downs, ups + 1) - jnp.log(ups + downs)",
            "return -log_beta(downs, ups + 1) + jnp.log(ups + downs)",
            (
                "test_augmented_expectations",
                "test_augmentations",
                "test_expectations",
                "test_likelihood_distributions",
            ),
        ),
        Planted(
            "Normal: scale in the place of its square",
            "likelihoods/normal.py",
            'variances["loc"] / jnp.square(d.scale)',
            'variances["loc"] / d.scale',
            ("test_expectations",),
        ),
        Planted(
            "Student-t: degrees of freedom off by one in Gibbs",
            "likelihoods/student_t.py",
            "dist.Gamma(0.5 * (df + 1), ",
            "dist.Gamma(0.5 * (df + 2), ",
            (
                "test_augmentations",
                "test_calibration_of_samplers",
            ),
        ),
        Planted(
            "Laplace: a missing log 2",
            "likelihoods/laplace.py",
            "return -jnp.log(2 * scale) - jnp.sqrt(",
            "return -jnp.log(scale) - jnp.sqrt(",
            (
                "test_augmentations",
                "test_expectations",
                "test_m_steps",
            ),
        ),
        Planted(
            "Logistic Poisson: sign of the logit",
            "likelihoods/poisson.py",
            "rate * jnp.expm1(log_tilt(-m, v))",
            "rate * jnp.expm1(log_tilt(m, v))",
            (
                "test_augmentations",
                "test_expectations",
                "test_augmented_expectations",
            ),
        ),
        Planted(
            "Heteroscedastic: factor 2 in the exact expectation",
            "likelihoods/heteroscedastic.py",
            "+ 0.5 * expected_log_sigmoid(mg, vg)",
            "+ expected_log_sigmoid(mg, vg)",
            (
                "test_augmented_expectations",
                "test_augmentations",
                "test_likelihood_distributions",
                "test_gibbs",
            ),
        ),
        Planted(
            "Bayesian SVM: margin off by one",
            "likelihoods/bayesian_svm.py",
            "label_sign(y, w) * (1 + w)",
            "label_sign(y, w) * (2 + w)",
            ("test_augmentations",),
        ),
        Planted(
            "Logistic-softmax: sign of the log-normaliser",
            "likelihoods/multiclass.py",
            "chosen_class(log_tilt(m, v), y) - jnp.log(total)",
            "chosen_class(log_tilt(m, v), y) + jnp.log(total)",
            ("test_multiclass",),
        ),
        Planted(
            "Robust-max: right and wrong exchanged",
            "likelihoods/robust_max.py",
            "    return wrong + (right - wrong) * largest\n",
            "    return right + (wrong - right) * largest\n",
            ("test_robust_max",),
        ),
        Planted(
            "Log-variance normal: factor 2 in the exponent",
            "likelihoods/log_variance.py",
            "jnp.exp(0.5 * vg - mg)",
            "jnp.exp(vg - mg)",
            (
                "test_linked",
                "test_likelihood_distributions",
            ),
        ),
        Planted(
            "Piecewise: a spread about the wrong mean",
            "likelihoods/piecewise.py",
            "jnp.square(component.mean - mean[..., None])",
            "jnp.square(component.mean)",
            ("test_linked",),
        ),
        Planted(
            "Polya-Gamma sampler: scale off by a twentieth",
            "distributions/_pg_sampler.py",
            "x = h / drift * jnp.where(lower",
            "x = 1.05 * h / drift * jnp.where(lower",
            ("test_pg_sampler",),
        ),
        Planted(
            "Affine map: sign of the offset",
            "gaussians/dense.py",
            "- factors.precision * about\n",
            "+ factors.precision * about\n",
            (
                "test_conjugate",
                "test_gibbs",
            ),
        ),
        Planted(
            "Affine map: transpose forgotten in a draw",
            "gaussians/dense.py",
            "            return _solve(factor, white, transpose=True)\n",
            "            return _solve(factor, white)\n",
            ("test_gibbs",),
        ),
        Planted(
            "Gaussian factors: factor 2 of the precision",
            "gaussians/base.py",
            "jnp.maximum(-2 * slopes.variance",
            "jnp.maximum(-1 * slopes.variance",
            ("test_conjugate",),
        ),
        Planted(
            "Predictors: slope forgotten in the variance",
            "model/predictors.py",
            "v + slope[k] * carried[k]",
            "v + carried[k]",
            (
                "test_handlers",
                "test_process",
                "test_routes",
            ),
        ),
        Planted(
            "KL: off by one per dimension",
            "gaussians/dense.py",
            "(terms - 1 - 2 * jnp.log(roots))",
            "(terms - 2 * jnp.log(roots))",
            ("test_gaussian",),
        ),
        Planted(
            "Inverse factor: derivative transposed",
            "math/linalg.py",
            "-lower_half(inverse, tangent) @ inverse",
            "-lower_half(inverse, tangent).mT @ inverse",
            (
                "test_conjugate",
                "test_linalg",
            ),
        ),
        Planted(
            "Added rows: one of them counts",
            "_numpyro.py",
            "counts, scale = members < self.count",
            "counts, scale = members <= self.count",
            ("test_padding",),
        ),
        Planted(
            "Triangular solves: sign of the factor's part in the derivative",
            "math/linalg.py",
            "rhs_dot - factor_dot @ solution",
            "rhs_dot + factor_dot @ solution",
            ("test_linalg",),
        ),
        Planted(
            "Cholesky factors: derivative transposed",
            "math/linalg.py",
            "factor @ lower_half(inverse_lower(factor), tangent)",
            "factor @ lower_half(inverse_lower(factor), tangent).mT",
            ("test_linalg",),
        ),
        Planted(
            "Epochs: a row drawn twice",
            "infer/vi/epochs.py",
            "position + plate.subsample_size\n",
            "position + plate.subsample_size - 1\n",
            ("test_conjugate",),
        ),
        Planted(
            "Elliptical slice: scale in the place of its square",
            "infer/mcmc/ellipses.py",
            "(squares / jnp.square(scale.astype(squares.dtype)))",
            "(squares / scale.astype(squares.dtype))",
            ("test_gibbs",),
        ),
        Planted(
            "Expectation of an exponential: the whole variance",
            "model/exponentials.py",
            "0.5 * d * d * self.variance",
            "d * d * self.variance",
            ("test_exponentials",),
        ),
        Planted(
            "Wasserstein: distance not divided by N",
            "infer/vi/wasserstein.py",
            "_bures(K, R, floor) / X.shape[0]",
            "_bures(K, R, floor)",
            ("test_wasserstein",),
        ),
        Planted(
            "float32: range of the nodes too short",
            "math/quadrature.py",
            "(64, 5.5)",
            "(64, 2.5)",
            ("test_likelihood_distributions",),
        ),
        Planted(
            "Preconditioned posterior: sign of the kept part",
            "guides/preconditioned.py",
            "1 - jnp.square(inverse).sum(-2) * noise",
            "1 + jnp.square(inverse).sum(-2) * noise",
            ("test_preconditioned",),
        ),
        Planted(
            "Residual variance of a sparse process doubled",
            "gp/projection.py",
            "prior_variance - jnp.square(projection).sum(-2)",
            "prior_variance + jnp.square(projection).sum(-2)",
            ("test_process",),
        ),
        Planted(
            "Hyperparameters: ascent taken for descent",
            "infer/vi/stepper.py",
            "jax.tree.map(jnp.negative, floats_of(ascent))",
            "floats_of(ascent)",
            ("test_conjugate",),
        ),
        Planted(
            "Several latents: targets mixed away from where residuals cancel",
            "infer/vi/settling.py",
            "weights = -jnp.linalg.solve(gram",
            "weights = jnp.linalg.solve(gram",
            ("test_learning",),
        ),
        Planted(
            "L-BFGS: on, twice as far, where the slope has changed sign",
            "infer/vi/quasi_newton.py",
            "rises = (last @ gradient) > CURVATURE * -(last @ memory.updates)",
            "rises = (last @ gradient) > CURVATURE * (last @ memory.updates)",
            ("test_learning",),
        ),
        Planted(
            "L-BFGS: sign of the parabola of a refused update",
            "infer/vi/quasi_newton.py",
            "    part = slope / (2 * (slope - rise))",
            "    part = slope / (-2 * (slope - rise))",
            ("test_learning",),
        ),
        Planted(
            "L-BFGS: begins where the first-order phase ended, not at its best",
            "infer/vi/quasi_newton.py",
            "jnp.where(begins(hyper), best, ahead)",
            "jnp.where(begins(hyper), ahead, ahead)",
            ("test_learning",),
        ),
        Planted(
            "Minibatches: the guard goes back to what is worst",
            "infer/vi/guard.py",
            "bound >= self._best.bound:",
            "bound <= self._best.bound:",
            ("test_learning",),
        ),
        Planted(
            "Whitening: sign of the jitter that is given back",
            "math/whitening.py",
            "- lost + _DAMPING * (lost @ lost)",
            "+ lost + _DAMPING * (lost @ lost)",
            ("test_whitening",),
        ),
        Planted(
            "Groups: the corner's part of the mean is left out of the groups'",
            "gaussians/groups.py",
            "white = white - jnp.matvec(flat, corner).reshape(white.shape)",
            "white = white + jnp.matvec(flat, corner).reshape(white.shape)",
            ("test_structures",),
        ),
        Planted(
            "Groups: covariance of predictors of other groups",
            "gaussians/rows.py",
            "found = jnp.where(same, (own[0] * own[1]).sum(-1), 0)",
            "found = (own[0] * own[1]).sum(-1)",
            ("test_structures",),
        ),
        Planted(
            "Groups: groups beyond the first thousand",
            "model/affine.py",
            "codes = [counted // _BASE**k % _BASE for k in range(digits)]",
            "codes = [counted // _BASE**k for k in range(digits)]",
            ("test_group_models",),
        ),
        Planted(
            "Chains: what a block says of the step before it is left out",
            "math/recurrences.py",
            "known = small.inverse(entering + seen)",
            "known = small.inverse(entering)",
            ("test_structures",),
        ),
        Planted(
            "Chains: a forecast is as sure as its first step",
            "gaussians/chain.py",
            "linear(congruent, links, noise.at[:, :1].set(start))",
            "linear(congruent, links, jnp.zeros_like(noise).at[:, :1].set(start))",
            ("test_structures",),
        ),
        Planted(
            "Chains: what follows is taken for the numbers that it is made of",
            "model/latents.py",
            "white = along - small.product(link, step_before(along))",
            "white = along",
            ("test_chain_models",),
        ),
        Planted(
            "Deviations: what was is not added again",
            "gaussians/groups.py",
            "rest = rest + jnp.matvec(self.corner, corner)",
            "rest = 0 * rest + jnp.matvec(self.corner, corner)",
            ("test_group_models",),
        ),
        Planted(
            "Nested: the determinant of a draw's Gaussian, whole",
            "infer/nested/drawer.py",
            "ratios = total + lost + (log_prior + log_det / 2)[:, None]",
            "ratios = total + lost + (log_prior + log_det)[:, None]",
            ("test_nested",),
        ),
        Planted(
            "Joint Gaussians: sign of a pair's factor",
            "gaussians/pairs.py",
            "cross = -slopes.covariance",
            "cross = slopes.covariance",
            ("test_latent_gaussian",),
        ),
        Planted(
            "Expectations of any likelihood: half a slope in the variance",
            "math/expectation.py",
            "return PredictorMoments(tuple(slopes), (0.5 * first,))",
            "return PredictorMoments(tuple(slopes), (first,))",
            ("test_expectation", "test_latent_gaussian"),
        ),
        Planted(
            "Joint Gaussians: a random walk without its first step",
            "model/gaussians.py",
            "jnp.cumsum(scale * z, -1)",
            "jnp.cumsum(scale * z, -1) - scale * z[..., :1]",
            ("test_frontier",),
        ),
        Planted(
            "Frontiers: sums over data may be squared",
            "model/entries.py",
            "return name in LINEAR or (name in LINEAR_IN",
            'return name in LINEAR | {"square"} or (name in LINEAR_IN',
            ("test_frontier",),
        ),
        Planted(
            "Joint predictions: new members at their value of the fit",
            "model/latents.py",
            "            if not site.local:",
            "            if True:",
            ("test_latent_gaussian",),
        ),
    ]


def caught_by(error: Planted, tests: tuple[str, ...]) -> str:
    """The first test that fails with the error in place; empty if none does."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for part in ("numpyro_gpaug", "tests", "examples", "docs"):
            shutil.copytree(TOP / part, copy / part)
        for part in ("pyproject.toml", "README.md"):
            shutil.copy(TOP / part, copy / part)
        module = copy / "numpyro_gpaug" / error.module
        text = module.read_text()
        if text.count(error.right) != 1:
            raise ValueError(f"{error.what}: {text.count(error.right)} places for it")
        module.write_text(text.replace(error.right, error.wrong))
        files = [f"tests/{name}.py" for name in tests]
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider",
             *files],
            cwd=copy, env={**os.environ, "PYTHONPATH": folder},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
    failed = [x for x in done.stdout.splitlines() if x.startswith(("FAILED", "ERROR"))]
    if done.returncode and not failed:
        raise RuntimeError(done.stdout + done.stderr)
    return failed[0].split(" - ")[0].removeprefix("FAILED ") if failed else ""


def main() -> int:
    """Plants them all."""
    missed = 0
    wanted = [word for word in sys.argv[1:] if word != "--named"]
    named = "--named" in sys.argv
    for error in planted():
        if wanted and not any(word in error.what for word in wanted):
            continue
        start = time.perf_counter()
        found = caught_by(error, error.tests)
        if not found and not named:
            found = caught_by(error, ())
        missed += not found
        seconds = time.perf_counter() - start
        print(f"{error.what}: {found or 'NOT CAUGHT'} ({seconds:.0f} s)", flush=True)
    return missed


if __name__ == "__main__":
    sys.exit(main())
