# SPDX-License-Identifier: Apache-2.0
"""First values of hyperparameters: next to the medians of their priors."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro import handlers
from numpyro.contrib.control_flow import scan
from numpyro.distributions.transforms import AffineTransform
from numpyro.infer.initialization import init_to_median
from scipy.special import ndtri

from numpyro_gpaug.model.starts import MedianStart

PRIORS = {
    "normal": lambda: dist.Normal(2.0, 3.0),
    "vector": lambda: dist.LogNormal(jnp.array([-1.0, 2.0]), 0.5).to_event(1),
    "plate": lambda: dist.Normal(1.0, 2.0).expand([2, 3]).to_event(1),
    "half_normal": lambda: dist.HalfNormal(2.0),
    "half_cauchy": lambda: dist.HalfCauchy(1.0).expand([2]),
    "exponential": lambda: dist.Exponential(3.0),
    "falling": lambda: dist.TransformedDistribution(
        dist.LogNormal(0.0, 1.0), AffineTransform(1.0, -2.0)
    ),
    "interval": lambda: dist.Uniform(-1.0, 2.0).mask(False),
}
WITHOUT = {
    "joint": lambda: dist.MultivariateNormal(jnp.ones(3), jnp.eye(3)),
    "improper": lambda: dist.ImproperUniform(dist.constraints.positive, (), ()),
}


def starts(priors, function):
    """``function(key)`` gives a ``substitute_fn``; values from one key."""

    def model():
        for name, prior in priors.items():
            numpyro.sample(name, prior())

    def one(key):
        seeded = handlers.seed(model, jax.random.fold_in(key, 1))
        started = handlers.substitute(seeded, substitute_fn=function(key))
        trace = handlers.trace(started).get_trace()
        return {name: trace[name]["value"] for name in priors}

    return one


def test_starts_are_near_the_medians():
    """Starts are near the medians of prior draws, for any distribution, each with its
    own random number.
    """
    keys = jax.random.split(jax.random.key(0), 500)
    found = jax.jit(jax.vmap(starts(PRIORS, MedianStart)))(keys)
    for name, values in found.items():
        draws = PRIORS[name]().sample(jax.random.key(1), (20_000,))
        # The share of draws below a start is that of its normal: ndtr(.1 eps).
        below = np.mean(np.asarray(draws)[:, None] < np.asarray(values)[None], 0)
        eps = ndtri(np.clip(below, 1e-3, 1 - 1e-3)) / 0.1
        np.testing.assert_allclose(eps.mean(0), 0, atol=0.4, err_msg=name)
        np.testing.assert_allclose(eps.std(0), 1, atol=0.15, err_msg=name)
    plate = np.reshape(found["plate"], (500, -1))
    assert np.abs(np.corrcoef(plate.T) - np.eye(6)).max() < 0.2


def test_priors_without_quantiles_start_as_numpyro_says():
    key = jax.random.key(0)
    ours = starts(WITHOUT, MedianStart)(key)
    theirs = starts(WITHOUT, lambda _: init_to_median())(key)
    for name, found in ours.items():
        np.testing.assert_array_equal(found, theirs[name])


def test_starts_in_loops_and_beyond_the_pool():
    def model():
        numpyro.sample("many", dist.Normal(0.0, 1.0).expand([100]))

        def step(carry, _):
            drift = numpyro.sample("drift", dist.LogNormal(0.0, 1.0).expand([70]))
            return carry + drift.sum(), None

        scan(step, 0.0, jnp.arange(3))
        numpyro.sample("last", dist.Normal(0.0, 1.0))

    @jax.jit
    def started(key):
        run = handlers.substitute(
            handlers.seed(model, key), substitute_fn=MedianStart(key)
        )
        trace = handlers.trace(run).get_trace()
        return {k: trace[k]["value"] for k in ("many", "drift", "last")}

    values = started(jax.random.key(0))
    assert values["drift"].shape == (3, 70)
    assert len(np.unique(values["many"])) == 100
    assert np.isfinite(values["last"])


def test_medians_that_underflow_start_at_one():
    priors = {"precision": dist.Gamma, "variance": dist.InverseGamma}
    vague = {k: lambda prior=p: prior(1e-3, 1e-3) for k, p in priors.items()}
    found = starts(vague, MedianStart)(jax.random.key(0))
    assert found == {"precision": 1.0, "variance": 1.0}
