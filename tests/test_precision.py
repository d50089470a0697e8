# SPDX-License-Identifier: Apache-2.0
"""Products of matrices ask for full precision, on any machine: on an accelerator
float32 is TF32 otherwise. Read in lowered programs, before any is compiled."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro.infer import SVI
from numpyro.infer.util import log_density

import numpyro_gpaug as gpaug
from tests.conftest import slow
from tests.problems import unfitted

KEY = jax.random.key(0)
rng = np.random.default_rng(0)
X = rng.normal(size=(12, 2)).astype("f")
Y, Z = (X[:, 0] > 0).astype(int), X[:4]
GROUP = np.arange(12) % 3


def process(X, y=None, *, Z):
    scale = numpyro.sample("scale", dist.LogNormal(0.0, 1.0))
    gp = gpaug.GaussianProcess("f", gpaug.kernels.Matern52(scale), Z)
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", dist.Bernoulli(logits=gp(X)), obs=y)


def whole(X, y=None):
    gp = gpaug.GaussianProcess("f", gpaug.kernels.Matern52(1.3), X)
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", dist.Bernoulli(logits=gp(X)), obs=y)


def grouped(group, y=None):
    tau = numpyro.sample("tau", dist.HalfNormal(1.0))
    with numpyro.plate("groups", 3):
        effect = numpyro.sample("effect", dist.Normal(0, tau))
    with numpyro.plate("data", len(group)):
        numpyro.sample("y", dist.Poisson(jnp.exp(effect[group])), obs=y)


def assert_precise(lowered):
    """Check that all matrix products in a lowered program state their precision."""
    products = re.findall(r"stablehlo\.dot_general.*", lowered.as_text())
    assert products
    rough = [p for p in products if "precision = [HIGHEST, HIGHEST]" not in p]
    assert not rough, rough[:3]


class Precise(Exception):
    """Raised instead of compiling a program."""


class Lowering:
    """A program that is lowered and checked where it is called."""

    def __init__(self, program):
        self.program = program

    def __call__(self, *args, **static):
        assert_precise(self.program.plain.lower(*args, **static))
        raise Precise


@pytest.mark.parametrize(
    ("guide", "model", "args", "kwargs", "optim"),
    [
        slow(gpaug.AutoSparseGP, process, (X, Y), {"Z": Z}, "lbfgs"),
        slow(gpaug.AutoSparseGP, process, (X, Y), {"Z": Z}, optax.adam(0.1)),
        (gpaug.AutoSparseGP, process, (X, Y), {"Z": Z}, None),
        (gpaug.AutoLatentGaussian, grouped, (GROUP, Y), {}, "lbfgs"),
        slow(gpaug.AutoLatentGaussian, grouped, (GROUP, Y), {}, None),
    ],  # fmt: skip
)
def test_steps_and_predictions(guide, model, args, kwargs, optim):
    svi = gpaug.ConjugateSVI(model, guide(model), optim)
    svi._programs.advance = Lowering(svi._programs.advance)
    with pytest.raises(Precise):
        svi.run(KEY, 1, *args, progress_bar=False, **kwargs)
    posterior = unfitted(svi, *args, **kwargs)
    posterior._predictor._compiled = Lowering(posterior._predictor._compiled)
    with pytest.raises(Precise):
        posterior.predict_y(args[0])


def density(params, X, y):
    return log_density(process, (X, y), {"Z": Z}, params)[0]


def test_densities_of_models_and_their_gradients():
    params = {"scale": jnp.float32(1.0), "f.v": jnp.ones(4)}
    assert_precise(jax.jit(jax.value_and_grad(density)).lower(params, X, Y))


def bound_of(covariance, elbo):
    guide = gpaug.AutoSparseGP(process, covariance=covariance)
    svi = SVI(process, guide, numpyro.optim.Adam(0.1), elbo)
    state = jax.eval_shape(lambda: svi.init(KEY, X, Y, Z=Z))
    return jax.jit(lambda state: svi.update(state, X, Y, Z=Z)).lower(state)


@pytest.mark.parametrize("covariance", ["preconditioned", slow("dense")])
def test_the_analytic_bound(covariance):
    assert_precise(bound_of(covariance, gpaug.TraceAnalytic_ELBO()))


def test_a_guide_under_a_stock_bound():
    assert_precise(bound_of("dense", numpyro.infer.Trace_ELBO()))


def test_function_space():
    def mean(X):
        return numpyro.param("slope", 1.0) * X[:, 0]

    guide = gpaug.AutoFunctionSpaceGP(process, mean)
    elbo = gpaug.TraceWasserstein_ELBO()
    svi = SVI(process, guide, numpyro.optim.Adam(0.1), elbo)
    state = jax.eval_shape(lambda: svi.init(KEY, X, Y, Z=Z))
    assert_precise(jax.jit(lambda state: svi.update(state, X, Y, Z=Z)).lower(state))


@pytest.mark.parametrize("kernel", [gpaug.EllipticalSlice, gpaug.AugmentedGaussian])
def test_samplers(kernel):
    sampler = kernel(whole)
    state = jax.eval_shape(lambda: sampler.init(KEY, 1, None, (X, Y), {}))
    step = jax.jit(lambda state: sampler.sample(state, (X, Y), {}))
    assert_precise(step.lower(state))
