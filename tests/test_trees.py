# SPDX-License-Identifier: Apache-2.0
"""Params that are trees: modules with static fields, ``None``, numbers that no gradient
moves."""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest

import numpyro_gpaug as gpaug
from numpyro_gpaug.infer import load_state, save_state
from tests.conftest import slow

KEY = jax.random.key(0)


@partial(
    jax.tree_util.register_dataclass, data_fields=["weights", "bias"],
    meta_fields=["squared"],
)  # fmt: skip
@dataclass
class Layer:
    """A class like the array part of an equinox module: no bias, a static field."""

    weights: Any
    squared: bool
    bias: Any = None


class Extra(NamedTuple):
    count: Any
    mask: Any
    scale: Any


WEIGHTS = jnp.array([[0.5, -0.2], [0.1, 0.7], [-0.3, 0.4]])
NET = {
    "layers": [Layer(WEIGHTS, squared=True)],
    "extra": Extra(jnp.int32(2**30 + 1), np.array([True, False]), 1.0),
    "empty": {},
    "none": None,
}


def model(X, y=None):
    net = numpyro.param("net", NET)
    (layer,) = net["layers"]
    features = (X @ layer.weights) ** (1 + layer.squared)
    features *= net["extra"].scale * jnp.where(net["extra"].mask, 1, 0.5)
    features *= jnp.where(net["extra"].count == 2**30 + 1, 1.0, jnp.nan)
    noise = numpyro.sample("noise", dist.HalfNormal(1))
    slopes = numpyro.sample("slopes", dist.Normal(0, 1).expand([2]).to_event(1))
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", dist.Normal(features @ slopes, noise), obs=y)


@pytest.fixture(scope="module")
def data():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(12, 3)).astype("float32")
    return X, (X[:, 0] ** 2).astype("float32")


@pytest.mark.parametrize(
    "optim",
    ["lbfgs", slow(optax.adam(0.05))],
    ids=["lbfgs", "adam"],
)
def test_what_is_no_float_stays(optim, data, tmp_path) -> None:
    svi = gpaug.ConjugateSVI(model, gpaug.AutoLatentGaussian(model), optim)

    def checkpoint(state, losses):
        save_state(tmp_path / "state.npz", state)

    result = svi.run(KEY, 4, *data, progress_bar=False, tol=0, callback=checkpoint)
    assert result.losses[-1] < result.losses[0]
    net = result.params["net"]
    assert jax.tree.structure(net) == jax.tree.structure(NET)
    assert np.abs(net["layers"][0].weights - WEIGHTS).max() > 0.01
    assert net["extra"].scale != 1
    assert net["extra"].count == 2**30 + 1
    np.testing.assert_array_equal(net["extra"].mask, [True, False])
    state = load_state(tmp_path / "state.npz", like=svi.init(KEY, *data))
    for found, kept in zip(*map(jax.tree.leaves, (state, result.state)), strict=True):
        assert found.dtype == kept.dtype
    posterior = svi.posterior(result)
    posterior.save(tmp_path / "fit.npz")
    loaded = gpaug.Posterior.load(tmp_path / "fit.npz", model)
    means = [each.predict_y(data[0]).mean for each in (posterior, loaded)]
    np.testing.assert_allclose(*means, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "leaf", [jnp.tanh, "tanh", KEY], ids=["function", "str", "key"]
)
def test_leaves_that_are_no_numbers_are_named(leaf, data) -> None:
    def wrong(X, y=None):
        net = numpyro.param("net", {"weights": WEIGHTS, "other": leaf})
        slopes = numpyro.sample("slopes", dist.Normal(0, 1).expand([2]).to_event(1))
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", dist.Normal(X @ net["weights"] @ slopes, 1.0), obs=y)

    svi = gpaug.ConjugateSVI(wrong, gpaug.AutoLatentGaussian(wrong))
    with pytest.raises(TypeError, match=r"param 'net' has a leaf of .*partition"):
        svi.run(KEY, 2, *data, progress_bar=False)
