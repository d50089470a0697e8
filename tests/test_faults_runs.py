# SPDX-License-Identifier: Apache-2.0
"""Runs that are interrupted, watched, saved, or several at once."""

import io
import os
import re
import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest

import numpyro_gpaug as gpaug
from numpyro_gpaug.errors import ArchiveError
from numpyro_gpaug.infer import load_state, save_state
from numpyro_gpaug.infer.vi.progress import Pace, Progress
from numpyro_gpaug.math.linalg import (
    cholesky,
    inverse_cholesky,
    one_by_one,
    solve_lower,
)
from tests.conftest import slow

KEY = jax.random.key(0)
rng = np.random.default_rng(0)
X = rng.normal(size=(64, 2)).astype(np.float32)
Y = (X[:, 0] * X[:, 1] > 0).astype(int)
Z = X[:7]


def model(X, y=None, *, inducing):
    lengthscale = numpyro.param("lengthscale", 1.0)
    kernel = gpaug.kernels.SquaredExponential(lengthscale)
    gp = gpaug.GaussianProcess("f", kernel, inducing)
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=gp(X)), obs=y)


def batched(X, y=None, *, inducing):
    kernel = gpaug.kernels.SquaredExponential(1.0)
    gp = gpaug.GaussianProcess("f", kernel, inducing)
    with numpyro.plate("data", X.shape[0], subsample_size=16) as i:
        numpyro.sample("y", dist.Bernoulli(logits=gp(X[i])), obs=y[i])


def make(model=model, optim=None):
    return gpaug.ConjugateSVI(model, gpaug.AutoSparseGP(model), optim)


def run(svi, num_steps, **options):
    options = {"progress_bar": False, **options}
    return svi.run(KEY, num_steps, X, Y, inducing=Z, **options)


def equal(a, b) -> None:
    # The counts for tol start again with every run.
    a, b = (x._replace(mark=0.0, stalled=0) for x in (a, b))
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        if jnp.issubdtype(jnp.result_type(x), jax.dtypes.prng_key):
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        np.testing.assert_array_equal(x, y)


# -- interruption and checkpoints ------------------------------------------------------


def test_a_loop_without_steps_ends_a_run() -> None:
    # A stopping rule may be met at the end of a compiled loop.
    with Progress(300, Pace(1), bar=True) as progress:
        progress.took(np.ones(progress.next()))
        progress.took(np.ones(0))
        assert progress.taken == 100
        assert not progress.over


@pytest.mark.parametrize(
    ("compiling", "common", "each", "lengths"),
    [
        (30.0, 0.0, 0.001, [1, 1, 98, 100]),
        (30.0, 0.0, 0.3, [1, 1, 8, 3, 3, 3]),
        (30.0, 0.0, 2.0, [1, 1, 5, 1, 1, 1]),
        (30.0, 1.0, 1.0, [1, 1, 5, 8, 8, 8]),
        (0.0, 1.0, 1.0, [1, 5, 8, 8, 8]),
        (30.0, 0.5, 0.2, [1, 1, 8, 38, 46, 6]),
        (30.0, 50.0, 50.0, [1, 1, 1, 1]),
    ],
)
def test_loops_are_longer_where_that_is_quicker(
    compiling, common, each, lengths, monkeypatch
) -> None:
    """Work done once for a loop, such as on a million rows, is a part of its time."""
    now, pace = 0.0, Pace(10**7)
    monkeypatch.setattr("time.perf_counter", lambda: now)
    taken = []
    with Progress(300, pace, bar=False) as progress:
        for _ in lengths:
            taken.append(progress.next())
            now += common + each * taken[-1] + (not progress.taken) * compiling
            progress.took(np.ones(taken[-1]))
    assert taken == lengths
    # The next run of the same program continues at this pace.
    with Progress(300, pace, bar=False) as progress:
        assert progress.next() == pace.length


def test_the_first_loop_of_costly_steps_is_short(monkeypatch) -> None:
    """Little data, but many operations: the bar of a fit of many classes once stood
    still for minutes."""
    svi, sizes = make(), []
    monkeypatch.setattr(
        "numpyro_gpaug.infer.vi.progress._SMALL", X.size + Y.size + Z.size
    )
    run(svi, 3, callback=lambda state, losses: sizes.append(len(losses)))
    assert sizes[0] == 1


@pytest.fixture
def interruptible(monkeypatch) -> Iterator[None]:
    """Ctrl-C as in a terminal: what runs in the background may be set to ignore it.
    No run of this script was interrupted before."""
    monkeypatch.setattr("numpyro_gpaug.infer.vi.progress._ended_in", None)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_one_interrupt_ends_a_run_with_what_was_fitted() -> None:
    svi = make()
    whole = run(svi, 300)

    def interrupt(state, losses):
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.warns(UserWarning, match="interrupted after 100 of 300"):
        part = run(svi, 300, callback=interrupt)
    np.testing.assert_array_equal(part.losses, whole.losses[:100])
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    rest = run(svi, 200, init_state=part.state)
    np.testing.assert_array_equal(rest.losses, whole.losses[100:])
    equal(rest.state, whole.state)


@pytest.mark.usefixtures("interruptible")
def test_two_interrupts_end_it_at_once() -> None:
    def interrupt(state, losses):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        run(make(), 300, callback=interrupt)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("how", [{}, {"tol": 1e3}])
def test_a_run_that_ends_by_itself_passes_an_interrupt_on(how) -> None:
    """A cross-validation, whose fits are a loop each, ends at Ctrl-C."""
    ended = []

    def interrupt(state, losses):
        ended.append(len(losses))
        os.kill(os.getpid(), signal.SIGINT)

    steps = 300 if how else 100
    with pytest.raises(KeyboardInterrupt):
        run(make(), steps, callback=interrupt, **how)
    assert len(ended) == 1
    assert ended[0] <= 100
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


CELL = """
for _ in range(3):
    with warnings.catch_warnings(action="ignore"):
        fits.append(run(svi, 200, callback=interrupt))
"""


@pytest.mark.usefixtures("interruptible")
def test_a_second_interrupt_ends_a_loop_of_long_fits() -> None:
    """The next cell of a notebook can run again."""
    fits: list[Any] = []

    def interrupt(state, losses):
        os.kill(os.getpid(), signal.SIGINT)

    names = dict(fits=fits, run=run, svi=make(), interrupt=interrupt, warnings=warnings)
    for cell in (1, 2):
        with pytest.raises(KeyboardInterrupt):
            exec(CELL, names)
        assert [len(fit.losses) for fit in fits] == [100] * cell


@pytest.mark.parametrize(
    ("model", "optim"),
    [
        slow(model, optax.adam(0.05)),
        (batched, None),
    ],
)
def test_a_run_goes_on_from_a_file_bit_for_bit(tmp_path, model, optim) -> None:
    path = tmp_path / "state.npz"
    states = []

    def checkpoint(state, losses):
        states.append(int(state.step))
        if len(states) == 2:
            save_state(path, state)

    whole = run(make(model, optim), 350, callback=checkpoint)
    assert states[-1] == 350
    fresh = make(model, optim)
    state = load_state(path, fresh.init(KEY, X, Y, inducing=Z))
    assert int(state.step) == states[1]
    rest = run(fresh, 350 - int(state.step), init_state=state)
    equal(rest.state, whole.state)
    np.testing.assert_array_equal(rest.losses, whole.losses[states[1] :])


def test_files_that_hold_another_state_are_refused(tmp_path) -> None:
    path, svi = tmp_path / "state.npz", make()
    state = svi.init(KEY, X, Y, inducing=Z)
    save_state(path, state)
    equal(load_state(path, state), state)
    with pytest.raises(ArchiveError, match="the state of another fit"):
        load_state(path, make(model, optax.adam(0.1)).init(KEY, X, Y, inducing=Z))
    with pytest.raises(ArchiveError, match=r"has shape \(1, 7, 7\)|has shape \(1, 7\)"):
        load_state(path, make().init(KEY, X, Y, inducing=X[:8]))
    svi.posterior(svi.get_params(state), X, Y, inducing=Z).save(path)
    with pytest.raises(ArchiveError, match=r"contains a posterior, not a state"):
        load_state(path, state)
    save_state(path, state)
    with pytest.raises(
        ArchiveError, match="contains a state of a fit. Read it with load_state"
    ):
        gpaug.Posterior.load(path, model)
    with pytest.raises(FileNotFoundError, match="there is no folder .*missing"):
        save_state(tmp_path / "missing" / "state.npz", state)
    path.write_bytes(b"nothing")
    with pytest.raises(ArchiveError):
        load_state(path, state)


def test_the_bar_says_that_it_compiles_first(monkeypatch) -> None:
    shown = io.StringIO()
    monkeypatch.setattr(sys, "stderr", shown)
    run(make(), 250, progress_bar=True)
    lines = [line.strip() for line in re.split("[\r\n]+", shown.getvalue()) if line]
    assert lines[0].startswith("compiling:   0%")
    assert "compiling" not in lines[-1]
    assert "250/250" in lines[-1]


# -- threads ---------------------------------------------------------------------------


def together(function, count=4):
    """The function in several threads that start at once."""
    barrier = threading.Barrier(count)

    def one(i):
        barrier.wait()
        return function(i)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(one, range(count)))


@pytest.mark.parametrize("shared", [True, False])
def test_first_fits_in_threads_are_those_of_one(shared) -> None:
    alone, svi = run(make(), 5).losses, make()
    for result in together(lambda i: run(svi if shared else make(), 5)):
        np.testing.assert_allclose(result.losses, alone, rtol=1e-6)


# -- stacks of matrices ----------------------------------------------------------------


def stacks_of_lapack(text: str) -> list[str]:
    """Results of LAPACK calls in a compiled program that are stacks of matrices."""
    calls = re.findall(r"= \(?\w+\[([\d,]*)\][^\n]*custom-call[^\n]*lapack", text)
    return [s for s in calls if s.count(",") > 1 and not s.startswith("1,")]


STACK = np.eye(4, dtype="float32") + np.ones((3, 4, 4), "float32")


@pytest.mark.parametrize(
    "function",
    [inverse_cholesky, lambda K: solve_lower(K, K, transpose=True),
     slow(cholesky),
     slow(lambda K: solve_lower(K, K)),
     slow(one_by_one(jnp.linalg.eigh))],
)  # fmt: skip
def test_matrices_go_to_lapack_one_by_one(function) -> None:
    expected = jax.device_get([jax.jit(function)(K) for K in STACK])
    for each in (function, jax.vmap(function)):
        program = jax.jit(each).lower(STACK).compile()
        assert "lapack" in program.as_text()
        assert not stacks_of_lapack(program.as_text())
        found = jax.device_get(program(STACK))
        for i, one in enumerate(expected):
            jax.tree.map(
                lambda x, y, i=i: np.testing.assert_allclose(x[i], y, rtol=1e-5),
                found, one,
            )  # fmt: skip
    # The check finds batched LAPACK calls where there are some.
    bare = jax.jit(jnp.linalg.cholesky).lower(STACK).compile().as_text()
    assert stacks_of_lapack(bare)


def three(X, y=None, *, inducing):
    scale = numpyro.sample("scale", dist.LogNormal(0.0, 1.0))
    kernel = gpaug.kernels.SquaredExponential(jnp.array([[0.5], [1.0], [2.0]]), scale)
    gp = gpaug.GaussianProcess("f", kernel, inducing, num_latents=3)
    with numpyro.plate("data", X.shape[0]):
        likelihood = gpaug.distributions.LogisticSoftmax(gp(X))
        numpyro.sample("y", likelihood, obs=y)


class Programs:
    """Runs functions compiled, and keeps the texts of their programs."""

    def __init__(self):
        self.texts = []

    def __call__(self, function, *args):
        program = jax.jit(function).lower(*args).compile()
        self.texts.append(program.as_text())
        return program(*args)


def conjugate(run, optim=None) -> None:
    svi = make(three, optim)
    state = svi.init(KEY, X, Y, inducing=Z)
    state = run(lambda s: svi.update(s, X, Y, inducing=Z)[0], state)
    posterior = svi.posterior(svi.get_params(state), X, Y, inducing=Z)
    run(lambda new: posterior.predict_y(new).probs, X[:5])


def sampled(run, kernel) -> None:
    given = (X, Y), {"inducing": Z}
    state = jax.jit(lambda: kernel.init(KEY, 0, None, *given))()
    run(lambda s: kernel.sample(s, *given), state)


def stock(run) -> None:
    guide = gpaug.AutoSparseGP(three, covariance="dense")
    loss = gpaug.TraceAnalytic_ELBO()
    svi = numpyro.infer.SVI(three, guide, numpyro.optim.Adam(0.1), loss)
    state = jax.jit(lambda: svi.init(KEY, X, Y, inducing=Z))()
    run(lambda s: svi.update(s, X, Y, inducing=Z)[1], state)


FIXED = numpyro.handlers.condition(three, {"scale": 1.0})
ENGINES = {
    "learning": partial(conjugate, optim=optax.adam(0.05)),
    "Gibbs": lambda run: sampled(run, gpaug.AugmentedGaussian(FIXED)),
    "fixed": conjugate,
    "stock": stock,
    "ellipses": lambda run: sampled(run, gpaug.EllipticalSlice(FIXED)),
    "collapsed": lambda run: sampled(run, gpaug.CollapsedGaussian(three)),
}
QUICK = ("learning",)


@pytest.mark.parametrize(
    "engine",
    [pytest.param(k, marks=() if k in QUICK else pytest.mark.slow) for k in ENGINES],
)
def test_no_engine_calls_lapack_for_stacks(engine) -> None:
    run = Programs()
    ENGINES[engine](run)
    # A step of elliptical slices multiplies by factors computed before it.
    assert engine == "ellipses" or all("lapack" in text for text in run.texts)
    assert not [stack for text in run.texts for stack in stacks_of_lapack(text)]


# -- learning that neither stalls nor stops early --------------------------------------


def regression(X, y=None, *, inducing):
    positive = dist.constraints.positive
    lengthscale = numpyro.param("lengthscale", jnp.ones(1), constraint=positive)
    kernel = gpaug.kernels.SquaredExponential(lengthscale)
    gp = gpaug.GaussianProcess("f", kernel, inducing)
    scale = numpyro.param("scale", 0.5, constraint=positive)
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(gp(X), scale), obs=y)


# The loss reached by small steps.
OPTIMUM = -179.36


@pytest.mark.slow
@pytest.mark.parametrize("rate", [0.3, 0.05])
def test_large_steps_neither_stall_nor_seem_to_have_converged(rate) -> None:
    # Once, updates were halved without end, 1.5 nats short of the optimum, and the
    # equal losses of rejected updates counted as convergence.
    rng = np.random.default_rng(0)
    X = rng.uniform(-3, 3, (150, 1)).astype(np.float32)
    y = np.sin(3 * X[:, 0]) + 0.05 * rng.normal(size=150).astype(np.float32)
    Z = X[rng.choice(150, 25, replace=False)]

    fitter = make(regression, optax.adam(rate))

    def fitted(**options):
        options = {"inducing": Z, "progress_bar": False, **options}
        return fitter.run(KEY, 1500, X, y, **options).losses

    whole = fitted()
    assert abs(whole[-1] - OPTIMUM) < 0.2
    if rate == 0.3:
        assert fitted(tol=1e-2)[-1] < whole[-1] + 0.1


def test_what_is_no_state_is_refused(tmp_path) -> None:
    svi = make()
    result = run(svi, 2)
    with pytest.raises(TypeError, match=r"state must be a state.*result\.state"):
        save_state(tmp_path / "state.npz", result)
    with pytest.raises(TypeError, match="init_state must be a state"):
        run(svi, 2, init_state=result)


def test_programs_for_many_shapes_are_not_kept_for_ever(monkeypatch) -> None:
    monkeypatch.setattr("numpyro_gpaug.infer.vi.programs.MAX_SHAPES", 1)
    svi = make()
    for num in (64, 60):
        svi.run(KEY, 2, X[:num], Y[:num], inducing=Z, progress_bar=False)
        assert svi._programs.advance.plain._cache_size() <= 1
