# SPDX-License-Identifier: Apache-2.0
"""Densities split where they stop being affine: the two halves are the whole, and what
is no sum over data is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest

from numpyro_gpaug.model.frontier import frontier, separation
from numpyro_gpaug.model.gaussians import whitening
from numpyro_gpaug.model.program import Program

N, G = 30, 6
RNG = np.random.default_rng(0)
X = jnp.asarray(RNG.normal(size=(N, 3)), "float32")
GROUP = jnp.asarray(RNG.integers(0, G, N))
PAIRS = [jnp.asarray(RNG.integers(0, N, 20)) for _ in range(2)]
COUNTS = jnp.asarray(RNG.poisson(2, N))
POSITIVE = jnp.asarray(RNG.gamma(2, 1, N), "float32")
SHARES = jnp.asarray(RNG.uniform(0.1, 0.9, N), "float32")
BINARY = jnp.asarray(RNG.integers(0, 2, N))
CUTS = jnp.array([-1.0, 0.0, 1.0])


def eta(z):
    return X @ z[:3] + 0.5 * z[3 : 3 + G][GROUP] + 0.3 * z[9]


def beta(z):
    mean = jax.nn.sigmoid(eta(z))
    return dist.Beta(8 * mean, 8 * (1 - mean)).log_prob(SHARES)


def mixture(z):
    parts = dist.Normal(eta(z)[:, None] + jnp.array([0.0, 2.0]), 1.0)
    weights = dist.Categorical(probs=jnp.array([0.3, 0.7]))
    return dist.MixtureSameFamily(weights, parts).log_prob(POSITIVE)


def censored(z):
    d = dist.Exponential(jnp.exp(eta(z)))
    return jnp.where(BINARY == 1, d.log_prob(POSITIVE), -POSITIVE * jnp.exp(eta(z)))


def preference(z):
    f = eta(z)
    return jax.nn.log_sigmoid(f[PAIRS[0]] - f[PAIRS[1]])


def matrix(z):
    rate = jnp.exp(eta(z)[:, None] + z[10:14])
    return dist.Poisson(rate).log_prob(jnp.ones((N, 4), int))


def exponentials(z):
    groups = (2 / jnp.exp(z[3 : 3 + G]) ** 2)[GROUP]
    risks = jnp.exp(z[0]) ** X[:, 0] / (jnp.exp(X[:, 1] * z[1]) / POSITIVE)
    return dist.Poisson(3 * risks * groups).log_prob(COUNTS)


def conditional(z):
    """A conditional one of whose results does not depend on latents."""
    both = lambda f: (jnp.exp(f), 1.0), lambda f: (jnp.cosh(f), 0.0)
    rate, more = jax.lax.cond(jnp.sum(POSITIVE) > 0, *both, eta(z))
    return dist.Poisson(rate + more).log_prob(COUNTS)


# Densities, and the sizes of the affine arrays they depend on.
SPLIT = {
    "poisson": (lambda z: dist.Poisson(jnp.exp(eta(z) + 0.1)).log_prob(COUNTS), [N]),
    "exponentials": (exponentials, [N]),
    "conditional": (conditional, [N]),
    "bernoulli": (lambda z: dist.Bernoulli(logits=eta(z)).log_prob(BINARY), [N]),
    "ordinal": (
        lambda z: dist.OrderedLogistic(eta(z), CUTS).log_prob(jnp.clip(COUNTS, 0, 3)),
        [N],
    ),
    "negative binomial": (
        lambda z: dist.NegativeBinomial2(jnp.exp(eta(z)), 3.0).log_prob(COUNTS),
        [N],
    ),
    "zero-inflated": (
        lambda z: dist.ZeroInflatedPoisson(0.2, jnp.exp(eta(z))).log_prob(COUNTS),
        [N],
    ),
    "beta": (beta, [N]),
    "truncated": (
        lambda z: dist.TruncatedNormal(eta(z), 1.0, low=0.0).log_prob(POSITIVE),
        [N],
    ),
    "mixture": (mixture, [N]),
    "censored": (censored, [N]),
    "preference": (preference, [20]),
    "matrix": (matrix, [4 * N]),
    "matrix as one datum": (
        lambda z: (
            dist.Poisson(jnp.exp(eta(z)[:, None] + z[10:14]))
            .to_event(2)
            .log_prob(jnp.ones((N, 4), int))
        ),
        [4 * N],
    ),
    "masked": (
        lambda z: dist.Poisson(jnp.exp(eta(z))).mask(BINARY == 1).log_prob(COUNTS),
        [N],
    ),
    "factor": (lambda z: -2 * jnp.sum(jnp.exp(eta(z)) * POSITIVE), [N]),
    "two predictors": (
        lambda z: dist.Normal(eta(z), jnp.exp(X @ z[10:13])).log_prob(POSITIVE),
        [N, N],
    ),
    "shared scale": (
        lambda z: dist.Normal(eta(z), jnp.exp(z[13])).log_prob(POSITIVE),
        [1, N],
    ),
    "product": (
        lambda z: dist.Normal(z[3:9][GROUP] * z[0], 1.0).log_prob(POSITIVE),
        [1, N],
    ),
}
REFUSED = {
    "softmax over classes": lambda z: dist.Categorical(
        logits=X @ z[:9].reshape(3, 3)
    ).log_prob(jnp.clip(COUNTS, 0, 2)),
    "softmax over data": lambda z: jax.nn.log_softmax(eta(z)),
    "mean over data": lambda z: dist.Normal(jnp.exp(eta(z)).mean(), 1.0).log_prob(1.0),
    "neighbours": lambda z: jnp.sin(eta(z))[1:] * jnp.sin(eta(z))[:-1],
    "sorted": lambda z: jnp.sort(jnp.exp(eta(z))) * POSITIVE,
    "reversed": lambda z: jnp.sin(eta(z)) * jnp.sin(eta(z))[::-1],
    "cumulated": lambda z: jnp.exp(jnp.cumsum(jnp.exp(eta(z)))),
    "square of a sum": lambda z: jnp.square(jnp.exp(eta(z)).sum()),
}


def split_at(density):
    z = np.random.default_rng(1).normal(size=14).astype("float32")
    program = Program(lambda at: density(at["z"]), {"z": z})
    return z, program, frontier(program, [program.outputs.variable])


@pytest.mark.parametrize("name", SPLIT)
def test_the_two_halves_are_the_density(name):
    """The second derivatives of the second half couple no two data: it is a sum over
    data.
    """
    density, sizes = SPLIT[name]
    z, program, found = split_at(density)
    assert separation(program, [program.outputs.variable]).reason is None

    @jax.jit
    def everything(z):
        roots = program.run(list(found.roots), {program.inputs["z"]: z})
        fixed = program.run(list(found.fixed), {})
        largest = max(range(len(roots)), key=lambda i: roots[i].size)

        def total(moved):
            given = [moved if i == largest else r for i, r in enumerate(roots)]
            return sum(x.sum() for x in found.density(fixed, given))

        (whole,) = found.density(fixed, roots)
        return roots, whole, density(z), jax.hessian(total)(roots[largest])

    roots, whole, expected, hessian = everything(z)
    assert sorted(r.size for r in roots) == sorted(sizes)
    np.testing.assert_allclose(whole, expected, rtol=1e-5, atol=1e-6)
    size = max(r.size for r in roots)
    hessian = np.asarray(hessian).reshape(size, size)
    np.testing.assert_allclose(hessian, np.diag(np.diag(hessian)), atol=1e-6)


@pytest.mark.parametrize("name", REFUSED)
def test_refuses_what_mixes_data(name):
    _, program, _ = split_at(REFUSED[name])
    assert separation(program, [program.outputs.variable]).reason is not None


def test_a_predictor_computed_twice_is_one_root():
    def density(z):
        mean = jnp.exp(X @ z[:3])
        return dist.Gamma(mean / 2, jnp.exp(-(X @ z[:3]))).log_prob(POSITIVE)

    assert len(split_at(density)[2].roots) == 1


COVARIANCE = np.array([[2.0, 0.5], [0.5, 1.0]])
ADJACENCY = np.array(
    [[0, 1, 1, 0], [1, 0, 1, 0], [1, 1, 0, 1], [0, 0, 1, 0]], "float32"
)
CAR = 2 * (np.diag(ADJACENCY.sum(0)) - 0.5 * ADJACENCY)
ROW = np.array([[1.0, 0.0], [0.7, 2.0]])
GAUSSIANS = {
    "normal": (lambda: dist.Normal(jnp.arange(3.0), 2.0), 4 * np.eye(3)),
    "expanded": (lambda: dist.Normal(0, 2).expand([3]).to_event(1), 4 * np.eye(3)),
    "scalar": (lambda: dist.Normal(1, 2), [[4.0]]),
    "multivariate": (
        lambda: dist.MultivariateNormal(jnp.arange(2.0), COVARIANCE).expand([2]),
        np.kron(np.eye(2), COVARIANCE),
    ),
    "low rank": (
        lambda: dist.LowRankMultivariateNormal(
            jnp.arange(2.0), jnp.ones((2, 1)), jnp.array([1.0, 2.0])
        ),
        [[2.0, 1.0], [1.0, 3.0]],
    ),
    "random walk": (
        lambda: dist.GaussianRandomWalk(2.0, 4),
        4 * np.minimum.outer(np.arange(1, 5), np.arange(1, 5)),
    ),
    "matrix": (
        lambda: dist.MatrixNormal(
            jnp.zeros((2, 2)), np.linalg.cholesky(COVARIANCE), ROW
        ),
        np.kron(COVARIANCE, ROW @ ROW.T),
    ),
    "graph": (lambda: dist.CAR(1.0, 0.5, 2.0, ADJACENCY), np.linalg.inv(CAR)),
    "zero sum": (lambda: dist.ZeroSumNormal(2.0, (4,)), 4 * (np.eye(4) - 0.25)),
    "affine": (
        lambda: dist.TransformedDistribution(
            dist.Normal(0, 1), dist.transforms.AffineTransform(1.0, 3.0)
        ).expand([2]),
        9 * np.eye(2),
    ),
}


@pytest.mark.parametrize("name", GAUSSIANS)
def test_whitened_gaussians_have_their_mean_and_covariance(name):
    make, covariance = GAUSSIANS[name]
    fn = make()
    found = whitening(fn)
    zeros = np.zeros(found.shape, "float32")
    both = jax.jit(lambda z: (found.value(z), jax.jacobian(found.value)(z)))
    mean, jacobian = (np.asarray(x) for x in both(zeros))
    jacobian = jacobian.reshape(-1, zeros.size)
    np.testing.assert_allclose(jacobian @ jacobian.T, covariance, rtol=1e-5, atol=1e-5)
    assert mean.shape == fn.shape()
    expected = {"random walk": 0, "affine": 1}.get(name)
    expected = fn.mean if expected is None else expected
    np.testing.assert_allclose(mean, np.broadcast_to(expected, fn.shape()), atol=1e-6)


@pytest.mark.parametrize(
    "fn", [dist.LogNormal(0, 1), dist.StudentT(3), dist.Normal(0, 1).mask(False)]
)
def test_what_is_not_gaussian_is_not_whitened(fn):
    assert whitening(fn) is None


@pytest.mark.parametrize(
    ("rate", "scaled"),
    [
        (lambda z: jnp.exp(eta(z) + X[:, 0]), False),
        (lambda z: POSITIVE * jnp.exp(-eta(z) / 3), False),
        (lambda z: jnp.exp(z[3 : 3 + G][GROUP] * X[:, 0]), True),
    ],
    ids=["offset", "exposure", "slope"],
)
def test_roots_that_data_scale_are_told_from_predictors(rate, scaled):
    _, _, found = split_at(lambda z: dist.Poisson(rate(z)).log_prob(COUNTS))
    assert found.scaled == (scaled,)


def test_the_derivative_of_a_largest_number_survives_compilation():
    """XLA computes numbers again, rounded differently: none equals the largest."""

    def signs(slope):
        likelihood = dist.Normal(slope * X[:, 0], jnp.float32(0.53))
        return jnp.stack([likelihood.log_prob(x) for x in (POSITIVE, -POSITIVE)])

    def chosen(slope):
        return signs(slope)[(slope * X[:, 0] < 0).astype(int), jnp.arange(N)]

    _, program, found = split_at(lambda z: signs(z[:1]).max(0))
    fixed = program.run(list(found.fixed), {})

    def derivative(function):
        return jax.vmap(jax.grad(lambda slope: function(slope).sum()))

    largest = derivative(lambda slope: found.density(fixed, [slope])[0])
    slopes = jnp.linspace(-7, 7, 32)[:, None]
    optimised = jax.jit(largest, compiler_options={"xla_backend_optimization_level": 2})
    expected = jax.jit(derivative(chosen))(slopes)
    np.testing.assert_allclose(optimised(slopes), expected, rtol=1e-4)
