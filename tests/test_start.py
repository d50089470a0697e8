# SPDX-License-Identifier: Apache-2.0
"""How often the user's model runs, what a fit caches, and programs that another process
finds compiled.
"""

import gc
import json
import os
import subprocess
import sys
import weakref
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest

import numpyro_gpaug as gpaug
from tests.conftest import slow
from tests.problems import classifier, toy

KEY = jax.random.key(0)
QUIET = {"progress_bar": False}


class Counted:
    """The README's model, with a count of its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, X, y=None, *, inducing):
        self.calls += 1
        positive = dist.constraints.positive
        lengthscale = numpyro.param("lengthscale", 1.0, constraint=positive)
        variance = numpyro.sample("variance", dist.LogNormal(0.0, 1.0))
        kernel = gpaug.kernels.SquaredExponential(lengthscale, variance)
        gp = gpaug.GaussianProcess("f", kernel, inducing=inducing)
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Bernoulli(logits=gp(X)), obs=y)

    def since(self) -> int:
        calls, self.calls = self.calls, 0
        return calls


def test_the_model_runs_once_per_purpose() -> None:
    X, y = toy(30)
    model = Counted()
    svi = gpaug.ConjugateSVI(model, gpaug.AutoSparseGP(model), optax.adam(0.05))
    result = svi.run(KEY, 3, X, y, inducing=X[:5], **QUIET)
    assert model.since() <= 8
    svi.run(KEY, 3, X, y, inducing=X[:5], **QUIET)
    assert model.since() == 0
    posterior = svi.posterior(result)
    assert model.since() <= 2  # sources of predictors, priors
    for predict in (posterior.predict_y, posterior.predict_f):
        predict(X[:9])
        assert model.since() <= 8
        predict(X[9:18])
        assert model.since() == 0
    again = svi.posterior(result)
    model.since()
    again.predict_y(X[:9])
    assert model.since() == 0
    # A model and its programs are freed with its last fit.
    known = weakref.ref(model)
    del model, svi, result, posterior, predict, again
    gc.collect()
    assert known() is None


@pytest.fixture(scope="module")
def fitted():
    """Data, the fitter of a classifier, and a fit."""
    X, y = toy(60)
    svi = gpaug.ConjugateSVI(classifier, gpaug.AutoSparseGP(classifier))
    return X, y, svi, svi.run(KEY, 5, X, y, inducing=X[:12], **QUIET)


def test_a_posterior_is_that_of_its_own_run(fitted) -> None:
    """Later fits by the same svi do not change it."""
    X, y, svi, first = fitted
    before = svi.posterior(first).predict_y(X).probs
    svi.run(KEY, 5, X + 2, 1 - y, inducing=X[30:42], **QUIET)
    np.testing.assert_array_equal(svi.posterior(first).predict_y(X).probs, before)
    explicit = svi.posterior(first.params, X, y, inducing=X[:12])
    np.testing.assert_array_equal(explicit.predict_y(X).probs, before)
    params, state, losses = first  # like NumPyro's SVIRunResult
    assert params is first.params
    assert state is first.state
    assert losses is first.losses


def test_steps_continue_only_on_the_data_of_their_bound() -> None:
    """The bound of other data, though higher, is no floor for a step."""
    X, _ = toy(10)
    easy, hard = (X[:, 0] > 0).astype(int), jnp.arange(10) % 2
    model = Counted()
    svi = gpaug.ConjugateSVI(model, gpaug.AutoSparseGP(model), optax.adam(0.05))
    state = svi.run(KEY, 20, X, easy, inducing=X[:5], **QUIET).state
    same, _ = svi.update(state, X, easy, inducing=X[:5])
    assert same.data == state.data
    assert same.bound > state.bound - 1e-3
    other, loss = svi.update(state, X, hard, inducing=X[:5])
    assert other.data != state.data
    # The step was accepted: a rejected one repeats the old bound.
    assert -loss < state.bound
    assert other.hyper.scale >= state.hyper.scale


@pytest.mark.parametrize("rows", [12, *(slow(n) for n in (11, 13))])
def test_inducing_inputs_are_no_rows_of_new_inputs(fitted, rows: int) -> None:
    """``len(X_new) == len(Z)``, with Z passed again."""
    X, y, svi, result = fitted
    posterior = svi.posterior(result)
    expected = posterior.predict_y(X[:rows]).probs
    passed = posterior.predict_y(X[:rows], inducing=X[:12]).probs
    np.testing.assert_allclose(passed, expected, rtol=1e-6)
    full = svi.run(KEY, 5, X[:12], y[:12], inducing=X[:12], **QUIET)
    whole = svi.posterior(full)
    again = whole.predict_y(X[:rows], inducing=X[:12]).probs
    np.testing.assert_allclose(again, whole.predict_y(X[:rows]).probs, rtol=1e-6)


def test_predictions_can_be_differentiated_and_compiled(fitted) -> None:
    X, _, svi, result = fitted
    posterior = svi.posterior(result)

    def total(x):
        return jnp.exp(posterior.predict_f(x).mean).sum()

    slope = jax.grad(total)(X[:3])
    step = 1e-2 * jnp.ones((3, X.shape[1]))
    difference = total(X[:3] + step) - total(X[:3] - step)
    np.testing.assert_allclose(difference, 2 * (slope * step).sum(), rtol=2e-2)
    np.testing.assert_allclose(jax.jit(total)(X[:3]), total(X[:3]), rtol=1e-5)


def gated(X, y=None) -> None:
    """A model whose predictions are mixtures of several parameters."""
    b = numpyro.sample("b", dist.Normal(0, 1).expand([2]).to_event(1))
    counts = dist.Poisson(jnp.exp(b[0] * X[:, 0]))
    zeros = dist.ZeroInflatedDistribution(counts, gate_logits=b[1] * X[:, 1])
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", zeros, obs=y)


PROGRAM = """
import collections, json, sys
import jax
events = collections.Counter()
jax.monitoring.register_event_listener(lambda name, **_: events.update([name]))
jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
import optax
import numpyro_gpaug as gpaug
from tests.problems import toy
from tests.test_start import KEY, QUIET, Counted, gated
X, y = toy(30)
model = Counted()
svi = gpaug.ConjugateSVI(model, gpaug.AutoSparseGP(model), optax.adam(0.05))
result = svi.run(KEY, 3, X, y, inducing=X[:5], **QUIET)
probs = svi.posterior(result).predict_y(X).probs
svi = gpaug.ConjugateSVI(gated, gpaug.AutoLatentGaussian(gated))
mean = svi.posterior(svi.run(KEY, 1, X, y, **QUIET)).predict_y(X).mean
print(json.dumps([events, str(probs.sum() + mean.sum())]))
"""


@pytest.mark.slow
def test_another_process_finds_every_program_compiled(tmp_path: Path) -> None:
    """No id, address or order of a set gets into a program: JAX's persistent cache,
    switched on by the user, misses nothing the second time."""
    found = []
    for seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, str(tmp_path)],
            env={**os.environ, "PYTHONHASHSEED": seed, "XLA_FLAGS": ""},
            cwd=Path(__file__).parents[1], capture_output=True, text=True, check=True,
        )  # fmt: skip
        found.append(json.loads(done.stdout.splitlines()[-1]))
    (first, value), (second, again) = found
    assert first["/jax/compilation_cache/cache_misses"] > 5
    assert "/jax/compilation_cache/cache_misses" not in second
    assert second["/jax/compilation_cache/cache_hits"] > 5
    assert value == again
