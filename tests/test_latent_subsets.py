# SPDX-License-Identifier: Apache-2.0
"""Plates that draw latents (labels, classes): only those drawn are worked on."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import numpyro_gpaug as gpaug

KEY = jax.random.key(0)
LABELS = 6


def model(X, Y=None, *, inducing, num_drawn=None, shift=None):
    """One process per label; the plate of the labels draws some of them."""
    kernel = gpaug.kernels.Matern52(variance=2.0)
    gp = gpaug.GaussianProcess("f", kernel, inducing, num_latents=LABELS)
    with (
        numpyro.plate("labels", LABELS, subsample_size=num_drawn, dim=-1) as label,
        numpyro.plate("data", X.shape[0], dim=-2),
    ):
        f = gp(X, latents=label if shift is None else shift(label))
        Y = None if Y is None else Y[:, label]
        numpyro.sample("y", dist.Bernoulli(logits=f), obs=Y)


@pytest.fixture(scope="module")
def data():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(50, 2))
    slope = rng.normal(size=(2, LABELS))
    Y = X @ slope + 0.5 * rng.normal(size=(50, LABELS)) > 0
    return jnp.asarray(X, jnp.float32), jnp.asarray(Y, int)


@cache
def fitter(optim=None, step_size=None):
    """Return one fitter, so that nothing is compiled again."""
    guide = gpaug.AutoSparseGP(model)
    return gpaug.ConjugateSVI(model, guide, optim, step_size=step_size)


def fit(data, num_steps, optim=None, step_size=None, **kwargs):
    X, Y = data
    svi = fitter(optim, step_size)
    arguments = {"inducing": np.asarray(X)[:8], **kwargs}
    return svi, svi.run(KEY, num_steps, X, Y, progress_bar=False, **arguments)


def test_a_step_moves_the_labels_drawn_and_no_other(data) -> None:
    svi, first = fit(data, 1, step_size=1.0, num_drawn=2)
    precision = np.asarray(first.params["f.v_auto_precision"])
    moved = np.any(precision != np.eye(8), axis=(1, 2))
    assert moved.sum() == 2
    X, Y = data
    more = svi.run(
        KEY, 1, X, Y, inducing=np.asarray(X)[:8], num_drawn=2, progress_bar=False,
        init_state=first.state,
    )  # fmt: skip
    before, after = (np.asarray(r.params["f.v_auto_precision"]) for r in (first, more))
    changed = np.any(before != after, axis=(1, 2))
    # An epoch of the labels is drawn without replacement.
    assert changed.sum() == 2
    assert not (changed & moved).any()


def test_whole_steps_on_some_labels_reach_the_fit_of_all(data) -> None:
    """Each label has its own optimum: the C / K of the bound must not enter a step."""
    svi, some = fit(data, 60, step_size=1.0, num_drawn=2)
    whole = fit(data, 20)[1]
    np.testing.assert_allclose(
        some.params["f.v_auto_precision"], whole.params["f.v_auto_precision"],
        rtol=1e-4, atol=1e-4,
    )  # fmt: skip
    # The bound of the labels drawn, scaled by C / K with its KL, is unbiased.
    X, Y = data
    arguments = {"inducing": np.asarray(X)[:8], "num_drawn": 2}
    losses = [
        svi.evaluate(some.state._replace(rng_key=key), X, Y, **arguments)
        for key in jax.random.split(KEY, 150)
    ]
    error = np.std(losses) / np.sqrt(len(losses))
    assert error > 0
    assert abs(np.mean(losses) - whole.losses[-1]) < 3.5 * error


@pytest.mark.parametrize(
    ("shift", "message"),
    [
        (lambda label: (label + 1) % LABELS, "Pass them unchanged"),
        (lambda label: label + 1, "go up to 6 along an axis of length 6"),
    ],
)
def test_indices_that_are_not_the_plates(data, shift, message) -> None:
    # A new guide: an old one has read the model with other indices, and checks less.
    svi = gpaug.ConjugateSVI(model, gpaug.AutoSparseGP(model))
    X, Y = data
    with pytest.raises(ValueError, match=message):
        svi.run(
            KEY, 1, X, Y, inducing=np.asarray(X)[:8], num_drawn=2, shift=shift,
            progress_bar=False,
        )  # fmt: skip


def test_the_adaptive_step_is_refused(data) -> None:
    with pytest.raises(ValueError, match="adaptive"):
        fit(data, 1, num_drawn=2, step_size="adaptive")
