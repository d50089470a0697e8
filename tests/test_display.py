# SPDX-License-Identifier: Apache-2.0
"""How objects print; the reports of a fit are tested beside the fits."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro import handlers

import numpyro_gpaug as gpaug
from numpyro_gpaug import kernels
from numpyro_gpaug._display import as_html, as_text, brief
from numpyro_gpaug.infer.vi import quasi_newton
from numpyro_gpaug.infer.vi.result import ConjugateResult
from numpyro_gpaug.infer.vi.state import ConjugateState, Hyper

X, Y = np.linspace(0, 1, 8, dtype="float32")[:, None], np.arange(8) % 2


def model(X, y=None, *, inducing):
    variance = numpyro.sample("variance", dist.LogNormal(0, 1))
    level = numpyro.param("level", 0.0)
    kernel = kernels.Matern32(0.5, variance)
    gp = gpaug.GaussianProcess("f", kernel, inducing, mean=level)
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", dist.Bernoulli(logits=gp(X)), obs=y)


def test_columns_are_aligned_and_escaped():
    rows = [("a", "1"), ("long", "<f>")]
    assert as_text("T", rows) == "T\n  a     1\n  long  <f>"
    assert "&lt;f&gt;" in as_html("T", rows)
    assert as_html("T", rows).count("<td") == 4
    assert as_text("alone", []) == "alone"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (2, "2"),
        (jnp.float32(0.125), "0.125"),
        (np.array([1.0, 0.5]), "[1, 0.5]"),
        (np.zeros(7), "array (7,)"),
        (np.zeros((2, 2)), "array (2, 2)"),
        (jax.random.key(0), "array ()"),
        ({"a": np.ones(2), "b": np.ones(3)}, "2 arrays, 5 numbers"),
        (None, "None"),
    ],
)
def test_values_are_brief(value, text):
    assert brief(value) == text


def test_kernels_are_written_as_they_are_made():
    kernel = (kernels.Matern52(jnp.ones(2), 3.0) + 1.0) * kernels.Periodic(period=7.0)
    assert repr(kernel) == (
        "(Matern52(lengthscale=[1, 1], variance=3) + Constant(variance=1)) * "
        "Periodic(lengthscale=1, variance=1, period=7)"
    )
    seen = []
    jax.jit(lambda v: seen.append(repr(kernels.Linear(v))))(jnp.ones(3))
    assert seen == ["Linear(variance=traced (3,))"]
    assert "model" in repr(kernels.as_kernel(model))


def test_processes_and_guides_tell_their_parts():
    with handlers.seed(rng_seed=0), handlers.block():
        gp = gpaug.GaussianProcess("h", kernels.Linear(), X[:3], num_latents=2)
    assert repr(gp) == (
        'GaussianProcess("h")\n  kernel    Linear(variance=1)\n  mean      0\n'
        "  inducing  inputs (3, 1)\n  latents   2"
    )
    guide = gpaug.AutoSparseGP(model)
    svi = gpaug.ConjugateSVI(model, guide)
    assert "not set up" in repr(svi)
    guide.setup(X, Y, inducing=X[:3])
    assert repr(guide).split("\n") == [
        "AutoSparseGP, covariance 'natural'",
        "  f         (8,)  process, 3 inducing inputs",
        "  variance  ()    hyperparameter, a point (AutoDelta)",
        "  level           param, no prior",
        "  y         (8,)  observed, in closed form",
    ]
    assert "by L-BFGS" in repr(svi)
    assert "kept" in repr(gpaug.ConjugateSVI(model, guide, None))
    assert svi._repr_html_().startswith("<table>")


def test_a_result_tells_its_bound_and_params():
    losses = np.array([5.0, 3.0, 2.5])
    result = ConjugateResult({"b": np.zeros((3, 3))}, None, losses)
    assert repr(result).split("\n") == [
        "ConjugateResult",
        "  steps    3",
        "  bound    -2.5",
        "  verdict  too short: run at least 5 steps, not 3",
        "  b        array (3, 3)",
    ]
    params, _, _ = result  # still a tuple, as in NumPyro
    assert params is result.params


@pytest.mark.parametrize(
    ("losses", "stopped", "verdict"),
    [
        (3.0 - np.arange(20) / 10, False, "still improving: run more steps"),
        (3.0 + np.arange(20) / 10, False, "getting worse: lower the step size"),
        (np.full(20, 3.0), False, "converged: 0 nats over the last 2 steps"),
        (np.array([3.0, 2.0]), True, "converged: the bound stopped rising"),
        (300 + np.arange(20) % 2, False, "converged: 0 nats over the last 2 steps (+"),
        (3 + np.arange(20) % 2, False, "no rise beyond noise: 0 nats"),
    ],
)
def test_a_result_says_whether_it_has_converged(losses, stopped, verdict):
    result = ConjugateResult({}, None, losses, stopped=stopped)
    assert verdict in repr(result)
    assert verdict in result._repr_html_()


@pytest.mark.parametrize(
    ("noise", "verdict"), [(0.1, "converged"), (3.0, "up to 3 nats, and the best is")]
)
def test_a_result_says_how_well_its_bound_is_known(noise, verdict):
    search = quasi_newton.start({"a": np.zeros(1)})._replace(noise=noise)
    hyper = Hyper({}, {}, np.ones(()), search)
    state = ConjugateState(hyper, *[None] * (len(ConjugateState._fields) - 1))._replace(
        lost=np.zeros(())
    )
    result = ConjugateResult({}, state, np.array([3.0, 2.0]), stopped=True)
    assert verdict in repr(result)


def test_effects_of_each_datum_are_said_to_be() -> None:
    def counts(y=None):
        level = numpyro.sample("level", dist.Normal(0, 1))
        with numpyro.plate("data", 8):
            own = numpyro.sample("own", dist.Normal(0, 1))
            numpyro.sample("y", dist.Poisson(jnp.exp(level + own)), obs=y)

    shown = repr(gpaug.AutoLatentGaussian(counts).setup(Y)).split("\n")
    kinds = {row.split()[0]: row for row in shown}
    assert kinds["level"].endswith("Gaussian")
    assert kinds["own"].endswith("of each datum: predictions draw it anew")
