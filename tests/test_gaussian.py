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
from numpyro_gpaug.math.linalg import NaturalGaussian
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
    q = BlockGaussian(jnp.asarray(loc, dtype), jnp.asarray(tril, dtype), parameter)
    return q, loc.reshape(-1, shape[-1]), covariance.reshape(-1, *2 * (shape[-1],))


def test_log_prob_is_the_sum_of_multivariate_normals(shape, parameter, dtype):
    q, loc, covariance = draw_block(shape, parameter, dtype)
    values = np.random.default_rng(0).normal(size=(5, 2, *shape))
    rows = values.reshape(5, 2, *loc.shape)
    expected = sum(
        multivariate_normal(m, S).logpdf(rows[..., c, :])
        for c, (m, S) in enumerate(zip(loc, covariance, strict=True))
    )
    actual = q.log_prob(jnp.asarray(values, dtype))
    assert actual.shape == (5, 2)
    assert actual.dtype == dtype
    assert_close(actual, expected, 10)
    assert_close(q.log_prob(jnp.asarray(values[1, 0], dtype)), expected[1, 0], 10)


def test_mean_and_variance(shape, parameter, dtype):
    q, loc, covariance = draw_block(shape, parameter, dtype)
    assert q.batch_shape == ()
    assert q.event_shape == shape
    assert q.mean.dtype == q.variance.dtype == dtype
    assert_close(q.mean, loc.reshape(shape))
    diagonal = np.diagonal(covariance, axis1=-2, axis2=-1)
    assert_close(q.variance, diagonal.reshape(shape), 10)


@pytest.mark.usefixtures("x64")
def test_moments_reproduce_the_covariance(shape, parameter):
    q, _, covariance = draw_block(shape, parameter)
    whitener = q.moments().whitener.reshape(covariance.shape)
    assert_close(np.swapaxes(whitener, -1, -2) @ whitener, covariance)
    assert_close(q.moments().log_det.ravel(), np.linalg.slogdet(covariance)[1])


def test_samples_have_the_moments(shape, parameter):
    q, loc, covariance = draw_block(shape, parameter, "float32")
    count = 20_000
    draws = q.sample(jax.random.key(0), (count,))
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


def test_from_natural(shape, dtype):
    _, loc, covariance = draw_block(shape, "covariance", "float32")
    precision = np.linalg.inv(covariance)
    potential = np.einsum("cij,cj->ci", precision, loc)
    natural = NaturalGaussian(
        jnp.asarray(potential.reshape(shape), dtype),
        jnp.asarray(precision.reshape(*shape, shape[-1]), dtype),
    )
    q = BlockGaussian.from_natural(natural)
    assert_close(q.mean, loc.reshape(shape), 30)
    diagonal = np.diagonal(covariance, axis1=-2, axis2=-1)
    assert_close(q.variance, diagonal.reshape(shape), 30)


def test_kl_against_multivariate_normals(shape, parameter, dtype):
    q, loc, covariance = draw_block(shape, parameter, dtype)
    prior_loc, prior_scale = np.full(shape, 0.3), np.linspace(0.5, 2, shape[-1])
    normal = dist.Normal(jnp.asarray(prior_loc, dtype), jnp.asarray(prior_scale, dtype))
    spread = np.diagonal(covariance, axis1=-2, axis2=-1) + (loc - 0.3) ** 2
    expected = 0.5 * np.sum(spread / prior_scale**2 - 1 + 2 * np.log(prior_scale))
    expected -= 0.5 * np.linalg.slogdet(covariance)[1].sum()
    actual = kl_divergence(q, normal.to_event(len(shape)))
    assert actual.shape == ()
    assert actual.dtype == dtype
    assert_close(actual, expected, 10)


@pytest.mark.usefixtures("x64")
def test_kl_is_the_mean_log_ratio(shape, parameter):
    q, _, _ = draw_block(shape, parameter)
    prior = dist.Normal(jnp.zeros(shape), 1.5).to_event(len(shape))
    draws = q.sample(jax.random.key(1), (20_000,))
    ratios = q.log_prob(draws) - prior.log_prob(draws)
    error = ratios.mean() - kl_divergence(q, prior)
    assert abs(error) < 5 * ratios.std() / np.sqrt(len(draws))


def test_kl_of_a_normal_from_itself_is_zero(shape, parameter, dtype):
    scale = jnp.linspace(0.5, 2, shape[-1], dtype=dtype)
    loc = jnp.arange(np.prod(shape), dtype=dtype).reshape(shape)
    factor = jnp.diag(scale if parameter == "covariance" else 1 / scale)
    q = BlockGaussian(loc, jnp.broadcast_to(factor, (*shape, shape[-1])), parameter)
    itself = dist.Normal(loc, scale).to_event(len(shape))
    assert_close(kl_divergence(q, itself), 0, 5)
    expanded = dist.Normal(jnp.ones((), dtype), 1).expand(shape).to_event(len(shape))
    terms = np.square(scale) + np.square(loc - 1) - 1 - 2 * np.log(scale)
    expected = 0.5 * terms.sum()
    assert_close(kl_divergence(q, expanded), expected, 5)


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
    assert_close(again.variance, q.variance)
    value = jnp.ones(shape)
    expected = q.log_prob(value)
    assert_close(jax.jit(lambda q, x: q.log_prob(x))(q, value), expected)
    moved = jax.jit(lambda q: jax.tree.map(lambda x: 2 * x, q))(q)
    factor = 4 if parameter == "covariance" else 1 / 4
    assert_close(moved.variance, factor * q.variance)


@pytest.mark.usefixtures("x64")
def test_vmap_over_blocks(parameter):
    q, _, _ = draw_block((3, 4), parameter)
    value = jnp.linspace(-1, 1, 12).reshape(3, 4)
    each = jax.vmap(lambda m, t, x: BlockGaussian(m, t, parameter).log_prob(x))
    assert_close(each(q.loc, q.tril, value).sum(), q.log_prob(value))


@pytest.mark.usefixtures("x64")
def test_signs_of_the_diagonal_do_not_matter(shape, parameter):
    q, _, _ = draw_block(shape, parameter)
    signs = jnp.asarray([1.0, -1, -1, 1])
    flipped = BlockGaussian(q.loc, q.tril * signs, parameter)
    value = jnp.linspace(-1, 1, int(np.prod(shape))).reshape(shape)
    assert_close(flipped.log_prob(value), q.log_prob(value))
    prior = dist.Normal(jnp.zeros(shape), 1).to_event(len(shape))
    assert_close(kl_divergence(flipped, prior), kl_divergence(q, prior))


@pytest.mark.usefixtures("x64")
def test_samples_are_reparametrised(shape, parameter):
    q, _, _ = draw_block(shape, parameter)
    moved = jnp.ones(shape), jnp.tril(jnp.ones(q.tril.shape))

    def draw(step):
        leaves = q.loc + step * moved[0], q.tril + step * moved[1]
        return BlockGaussian(*leaves, parameter).sample(jax.random.key(0))

    _, slope = jax.jvp(draw, (0.0,), (1.0,))
    ends = draw(1e-6), draw(-1e-6)
    np.testing.assert_allclose(slope, (ends[0] - ends[1]) / 2e-6, rtol=1e-6, atol=1e-8)
