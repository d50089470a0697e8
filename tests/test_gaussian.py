# SPDX-License-Identifier: Apache-2.0
"""The block Gaussian that guides put on inducing values."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
from numpyro.distributions.kl import kl_divergence
from scipy.stats import multivariate_normal

from numpyro_gpaug.distributions.gaussian import BlockGaussian
from tests.conftest import assert_close

SHAPES = [(4,), (3, 4)]
PARAMETERS = ["covariance", "precision"]


@pytest.fixture(params=SHAPES, ids=["one block", "three blocks"])
def shape(request):
    return request.param


@pytest.fixture(params=PARAMETERS)
def parameter(request):
    return request.param


def draw_block(shape, parameter, dtype="float64"):
    """A block Gaussian, and its means and covariances as NumPy arrays (C, M, M)."""
    rng = np.random.default_rng(3)
    loc = rng.normal(size=shape)
    tril = np.tril(rng.normal(size=(*shape, shape[-1])))
    diagonal = np.linspace(0.6, 1.5, shape[-1]) * (-1) ** np.arange(shape[-1])
    index = np.arange(shape[-1])
    tril[..., index, index] = diagonal
    gram = tril @ np.swapaxes(tril, -1, -2)
    covariance = gram if parameter == "covariance" else np.linalg.inv(gram)
    q = BlockGaussian(loc.astype(dtype), tril.astype(dtype), parameter)
    return q, loc.reshape(-1, shape[-1]), covariance.reshape(-1, *2 * (shape[-1],))


@jax.jit
def log_prob(q, *values):
    return [q.log_prob(x) for x in values]


@jax.jit
def mean_and_variance(q):
    return q.mean, q.variance


@jax.jit
def divergence(q, loc, scale):
    """Return the divergence from independent normals of the same event."""
    shape = jnp.shape(q.loc)
    return kl_divergence(q, dist.Normal(loc, scale).expand(shape).to_event(len(shape)))


def test_log_prob_is_the_sum_of_multivariate_normals(shape, parameter, dtype):
    q, loc, covariance = draw_block(shape, parameter, dtype)
    values = np.random.default_rng(0).normal(size=(5, 2, *shape))
    rows = values.reshape(5, 2, *loc.shape)
    expected = sum(
        multivariate_normal(m, S).logpdf(rows[..., c, :])
        for c, (m, S) in enumerate(zip(loc, covariance, strict=True))
    )
    values = values.astype(dtype)
    actual, single = log_prob(q, values, values[1, 0])
    assert actual.shape == (5, 2)
    assert actual.dtype == dtype
    assert_close(actual, expected, 10)
    assert_close(single, expected[1, 0], 10)


def test_mean_and_variance(shape, parameter, dtype):
    q, loc, covariance = draw_block(shape, parameter, dtype)
    assert q.batch_shape == ()
    assert q.event_shape == shape
    mean, variance = mean_and_variance(q)
    assert mean.dtype == variance.dtype == dtype
    assert_close(mean, loc.reshape(shape))
    diagonal = np.diagonal(covariance, axis1=-2, axis2=-1)
    assert_close(variance, diagonal.reshape(shape), 10)


@pytest.mark.usefixtures("x64")
def test_moments_reproduce_the_covariance(shape, parameter):
    q, _, covariance = draw_block(shape, parameter)
    moments = jax.jit(lambda q: q.moments())(q)
    whitener = np.asarray(moments.whitener).reshape(covariance.shape)
    assert_close(np.swapaxes(whitener, -1, -2) @ whitener, covariance)
    log_det = np.asarray(moments.log_det).ravel()
    assert_close(log_det, np.linalg.slogdet(covariance)[1])


def test_samples_have_the_moments(shape, parameter):
    q, loc, covariance = draw_block(shape, parameter, "float32")
    count = 20_000
    draws = jax.jit(lambda q, key: q.sample(key, (count,)))(q, jax.random.key(0))
    assert draws.shape == (count, *shape)
    draws = np.asarray(draws, float).reshape(count, *loc.shape)
    centred = draws - loc
    variance = np.diagonal(covariance, axis1=-2, axis2=-1)
    errors = centred.mean(0) / np.sqrt(variance / count)
    assert np.abs(errors).max() < 5
    products = np.einsum("sci,scj->cij", centred, centred) / count
    # Var(x_i x_j) = S_ii S_jj + S_ij^2 for a normal.
    outer = variance[..., :, None] * variance[..., None, :]
    spread = np.sqrt((outer + covariance**2) / count)
    assert (np.abs(products - covariance) / spread).max() < 5
    if len(shape) > 1:
        across = np.einsum("si,sj->ij", centred[:, 0], centred[:, 1]) / count
        spread = np.sqrt(variance[0][:, None] * variance[1] / count)
        assert (np.abs(across) / spread).max() < 5


def test_kl_against_multivariate_normals(shape, parameter, dtype):
    q, loc, covariance = draw_block(shape, parameter, dtype)
    prior_loc, prior_scale = np.full(shape, 0.3), np.linspace(0.5, 2, shape[-1])
    spread = np.diagonal(covariance, axis1=-2, axis2=-1) + (loc - 0.3) ** 2
    expected = 0.5 * np.sum(spread / prior_scale**2 - 1 + 2 * np.log(prior_scale))
    expected -= 0.5 * np.linalg.slogdet(covariance)[1].sum()
    actual = divergence(q, prior_loc.astype(dtype), prior_scale.astype(dtype))
    assert actual.shape == ()
    assert actual.dtype == dtype
    assert_close(actual, expected, 10)


@pytest.mark.parametrize(
    "other",
    [
        dist.Normal(jnp.zeros(5), 1).to_event(1),
        dist.Laplace(jnp.zeros(4), 1).to_event(1),
    ],
    ids=["shape", "class"],
)
def test_kl_never_falls_back_silently(other):
    q, _, _ = draw_block((4,), "covariance", "float32")
    with pytest.raises(NotImplementedError, match=r"\(4,\)"):
        kl_divergence(q, other)


@pytest.mark.usefixtures("x64")
def test_pytree_and_jit(shape, parameter):
    q, _, _ = draw_block(shape, parameter)
    leaves, treedef = jax.tree.flatten(q)
    assert sorted(leaf.shape for leaf in leaves) == sorted([shape, (*shape, shape[-1])])
    again = jax.tree.unflatten(treedef, leaves)
    assert again.parameter == parameter
    assert again.event_shape == shape
    variance = mean_and_variance(q)[1]
    assert_close(mean_and_variance(again)[1], variance)
    value = np.ones(shape)
    (expected,) = log_prob(q, value)
    assert_close(q.log_prob(value), expected)
    moved = jax.tree.map(lambda x: 2 * x, q)
    factor = 4 if parameter == "covariance" else 1 / 4
    assert_close(mean_and_variance(moved)[1], factor * np.asarray(variance))
