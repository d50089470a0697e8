# SPDX-License-Identifier: Apache-2.0
"""Gaussian Markov random fields against dense matrices."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax.experimental.sparse import BCOO
from numpyro.distributions import biject_to
from numpyro.infer.util import initialize_model
from scipy import sparse

import numpyro_gpaug as gpaug
from numpyro_gpaug.distributions import BYM2, GMRF, ICAR, RandomWalk2, SpaceTime
from numpyro_gpaug.distributions.sparse_prior import sparse_prior
from numpyro_gpaug.math.sparse_terms import indefinite_node, sum_of_terms
from numpyro_gpaug.model.gaussians import whitening


def planar(num, seed=0):
    """A connected graph of near neighbours, with weights."""
    rng = np.random.default_rng(seed)
    points = rng.random((num, 2))
    distances = np.linalg.norm(points[:, None] - points, axis=-1)
    nearest = np.argsort(distances, 1)[:, 1:4]
    matrix = np.zeros((num, num))
    matrix[np.arange(num)[:, None], nearest] = 1
    order = np.argsort(points[:, 0])
    matrix[order[1:], order[:-1]] = 1
    matrix = np.maximum(matrix, matrix.T)
    weights = rng.uniform(0.5, 2, matrix.shape)
    return matrix * (weights + weights.T)


def in_pieces():
    """Two components and two islands, mixed up."""
    parts = [planar(9, 1), np.zeros((1, 1)), planar(14, 2), np.zeros((1, 1))]
    matrix = sparse.block_diag([sparse.coo_array(x) for x in parts]).toarray()
    order = np.random.default_rng(3).permutation(len(matrix))
    return matrix[np.ix_(order, order)]


def reference(adjacency):
    """Covariance of the scaled field, (n, n), and its components, in dense algebra."""
    laplacian = np.diag(adjacency.sum(0)) - adjacency
    count, labels = sparse.csgraph.connected_components(adjacency)
    covariance = np.linalg.pinv(laplacian, hermitian=True)
    for c in range(count):
        own = np.flatnonzero(labels == c)
        block = np.ix_(own, own)
        if len(own) == 1:
            covariance[block] = 1
        covariance[block] /= np.exp(np.log(covariance.diagonal()[own]).mean())
    return covariance, labels


def log_density(covariance, x):
    """Return the log-density of a multivariate normal with mean zero, in double
    precision.
    """
    quadratic = x @ np.linalg.solve(covariance, x)
    return -0.5 * (quadratic + np.linalg.slogdet(2 * np.pi * covariance)[1])


def slopes(function, at, step=1e-5):
    """Derivatives by central differences, in double precision."""
    at = np.asarray(at, float)
    sides = [(at + step * e, at - step * e) for e in np.eye(len(at))]
    return [(function(high) - function(low)) / (2 * step) for high, low in sides]


GRAPHS = {"connected": planar(60), "pieces": in_pieces()}
TOLERANCE = 2e-4


@pytest.mark.parametrize("graph", GRAPHS)
def test_icar_is_the_scaled_zero_sum_normal(graph):
    covariance, labels = reference(GRAPHS[graph])

    @jax.jit
    def found(u):
        field = ICAR(sparse.csr_array(GRAPHS[graph]), scale=1.7)
        return field.variance, field.support(u), field.log_prob(u)

    values, vectors = np.linalg.eigh(covariance)
    kept = values > 1e-9
    isolated = np.bincount(labels)[labels] == 1
    assert kept.sum() == len(labels) - len(set(labels[~isolated]))
    z = np.random.default_rng(0).normal(size=(3, kept.sum()))
    u = 1.7 * z @ (vectors[:, kept] * np.sqrt(values[kept])).T
    expected = -0.5 * (z**2).sum(1) - 0.5 * np.log(2 * np.pi * values[kept]).sum()
    expected -= kept.sum() * np.log(1.7)
    variance, supported, density = found(u)
    np.testing.assert_allclose(variance, 1.7**2 * covariance.diagonal(), 1e-5)
    assert supported.all()
    np.testing.assert_allclose(density, expected, TOLERANCE)


@pytest.mark.parametrize("graph", GRAPHS)
def test_the_transform_is_an_isometry_onto_the_support(graph):
    field = ICAR(GRAPHS[graph], scale=1.0)
    transform = biject_to(field.support)
    assert transform.inverse_shape((2, field.graph.size)) == (2, field.graph.rank)
    x = np.random.default_rng(0).normal(size=(2, field.graph.rank)).astype(np.float32)

    @jax.jit
    def everything(x):
        y = transform(x)
        return y, transform.inv(y), field.support(y), field.support(y + 1)

    y, back, supported, beside = map(np.asarray, everything(x))
    assert y.shape == transform.forward_shape(x.shape)
    assert supported.all()
    assert not beside.any()
    np.testing.assert_allclose(back, x, atol=1e-5)
    inner = x @ x.T
    np.testing.assert_allclose(y @ y.T, inner, rtol=1e-4, atol=1e-4)
    assert transform == biject_to(ICAR(GRAPHS[graph]).support)
    jax.tree.map(jnp.shape, (transform, field.support))


def test_one_component_transforms_as_in_numpyro():
    x = np.random.default_rng(0).normal(size=59).astype(np.float32)
    ours = biject_to(ICAR(GRAPHS["connected"]).support)
    both = jax.jit(lambda x: (ours(x), dist.transforms.ZeroSumTransform()(x)))(x)
    np.testing.assert_allclose(*both, atol=1e-6)


@pytest.mark.parametrize("graph", GRAPHS)
def test_bym2_is_the_sum_of_both_effects(graph):
    structured, labels = reference(GRAPHS[graph])
    z = np.random.default_rng(1).normal(size=len(labels))

    @jax.jit
    def found(mixing, u):
        field = BYM2(GRAPHS[graph], 1.7, mixing)
        return field.variance, field.log_prob(u)

    for mixing in (0.0, 1e-6, 0.3, 0.99):
        eye = np.eye(len(labels))
        covariance = 1.7**2 * (mixing * structured + (1 - mixing) * eye)
        u = np.linalg.cholesky(covariance) @ z
        variance, density = found(mixing, u)
        np.testing.assert_allclose(variance, covariance.diagonal(), 1e-5)
        np.testing.assert_allclose(density, log_density(covariance, u), TOLERANCE)


def steps(num):
    return sparse.diags_array([-1.0, 2.0, -1.0], offsets=[-1, 0, 1], shape=(num, num))


def gmrf(theta, loc=0.5, num=12):
    return GMRF(loc, [(theta, steps(num)), (0.3, sparse.eye_array(num))])


def gmrf_covariance(theta, num=12):
    return np.linalg.inv(theta * steps(num).toarray() + 0.3 * np.eye(num))


def test_gmrf_is_the_multivariate_normal():
    x = np.random.default_rng(0).normal(size=(2, 12))

    def density(theta, x):
        d = gmrf(theta)
        return d.log_prob(x), d.variance

    of_both = jax.jit(jax.value_and_grad(density, argnums=(0, 1), has_aux=True))
    (value, variance), (slope, force) = of_both(2.0, x[0])
    np.testing.assert_allclose(variance, gmrf_covariance(2.0).diagonal(), 1e-4)

    def twin(theta):
        return log_density(gmrf_covariance(*theta), x[0] - 0.5)

    np.testing.assert_allclose(value, twin([2.0]), 1e-4)
    np.testing.assert_allclose([slope], slopes(twin, [2.0]), 1e-3)
    expected = -np.linalg.solve(gmrf_covariance(2.0), x[0] - 0.5)
    np.testing.assert_allclose(force, expected, 1e-3, 1e-3)

    def of_several(x):
        several = gmrf(2.0, jnp.zeros((3, 12)))
        assert several.batch_shape == (3,)
        return several.log_prob(x)

    assert jax.eval_shape(of_several, x[:, None]).shape == (2, 3)


@pytest.mark.parametrize("sd", [0.3, 0.77])
def test_a_small_multiple_of_the_identity_is_not_lost_in_rounding(sd):
    # Two grids, whose levels have a precision of 1e-6 per node.
    path = sparse.diags_array([1.0, 1.0], offsets=[-1, 1], shape=(12, 12))
    grid = sparse.block_diag([sparse.kronsum(path, path)] * 2)
    alike, eye = sparse.diags_array(grid.sum(1)) - grid, sparse.eye_array(288)
    sd, small = np.float32(sd), np.float32(1e-6)
    field = GMRF(np.float32(0), [(1 / sd**2, alike.tocsr()), (small, eye)])
    x = (30 + np.random.default_rng(0).normal(size=288)).astype(np.float32)

    @jax.jit
    def found(x):
        return field.log_prob(x), field.variance, whitening(field).value(jnp.eye(288))

    density, variance, half = found(x)
    precision = float(1 / sd**2) * alike.toarray() + float(small) * np.eye(288)
    covariance = np.linalg.inv(precision)
    np.testing.assert_allclose(density, log_density(covariance, x), atol=1e-2)
    np.testing.assert_allclose(variance, covariance.diagonal(), 1e-3)
    np.testing.assert_allclose(half.T @ half, covariance, 1e-3, 1e-1)


def test_gmrf_takes_sparse_matrices_of_jax():
    matrix = BCOO.from_scipy_sparse(steps(12) + 0.1 * sparse.eye_array(12))

    @jax.jit
    def density(theta):
        scaled = BCOO((theta * matrix.data, matrix.indices), shape=matrix.shape)
        return GMRF(0.0, scaled).log_prob(jnp.ones(12))

    covariance = np.linalg.inv(3 * np.asarray(matrix.todense(), float))
    np.testing.assert_allclose(density(3.0), log_density(covariance, np.ones(12)), 1e-4)


def field_of(name):
    """A field and its covariance."""
    pieces = GRAPHS["pieces"]
    covariance, labels = reference(pieces)
    if name == "icar":
        return ICAR(pieces, 2.0), 4 * covariance
    if name == "bym2":
        return BYM2(pieces, 2.0, 0.4), 1.6 * covariance + 2.4 * np.eye(len(labels))
    if name == "walk":
        return RandomWalk2(TIMES, 1.4, 3.0, 0.5), walk_covariance(1.4, 3.0, 0.5)
    return gmrf(2.0, 0.0), gmrf_covariance(2.0)


TIMES = np.array([0.0, 1.0, 1.5, 4.0, 4.2, 5.0])


def walk_covariance(scale, level, slope):
    lines = np.maximum(TIMES[:, None] - TIMES[:-1], 0)
    changes = np.append(slope, scale * np.sqrt((TIMES[2:] - TIMES[:-2]) / 2))
    return level**2 + (lines * changes**2) @ lines.T


def test_random_walks_of_order_two():
    covariance = walk_covariance(1.4, 3.0, 0.5)
    x = np.random.default_rng(0).normal(size=6)

    @jax.jit
    def everything(p):
        def density(p):
            walk = RandomWalk2(TIMES, *p)
            return walk.log_prob(x), walk.variance

        # An integrated Wiener process, with finer and finer steps.
        fine = RandomWalk2(np.linspace(0, 2, 101), 1.4, 1e-3, 1e-3)
        return jax.value_and_grad(density, has_aux=True)(p), fine.variance

    ((found, variance), gradient), fine = everything(jnp.array([1.4, 3.0, 0.5]))
    np.testing.assert_allclose(variance, covariance.diagonal(), 1e-5)
    np.testing.assert_allclose(found, log_density(covariance, x), TOLERANCE)
    expected = slopes(lambda p: log_density(walk_covariance(*p), x), [1.4, 3.0, 0.5])
    np.testing.assert_allclose(gradient, expected, 1e-3)
    np.testing.assert_allclose(fine[-1], 1.4**2 * 2**3 / 3, 0.03)
    with pytest.raises(ValueError, match=r"points\[1\] is 2.0 and points\[2\] is 2.0"):
        RandomWalk2([1.0, 2.0, 2.0], 1.0, 1.0, 1.0)
    with pytest.raises(ValueError, match=r"shape \(1,\); expected \(n,\), n > 1"):
        RandomWalk2([1.0], 1.0, 1.0, 1.0)
    with pytest.raises(ValueError, match=r"slope has shape \(2,\); expected a number"):
        RandomWalk2([1.0, 2.0], 1.0, 1.0, jnp.ones(2))
    with pytest.raises(TypeError, match="points are traced"):
        jax.jit(lambda x: RandomWalk2(x, 1.0, 1.0, 1.0).mean)(jnp.arange(3.0))


@pytest.mark.parametrize("number", [2, 5, 6])
def test_a_smooth_curve_is_made_of_independent_numbers(number):
    covariance = walk_covariance(1.4, 3.0, 0.5)[:number, :number]
    size = number + number % 2
    units = np.eye(size, dtype=np.float32).reshape(size, -1, 2)

    @jax.jit
    def everything(units):
        walk = RandomWalk2(TIMES[:number], 1.4, 3.0, 0.5)
        chain, root = walk.chain(), walk.walked(jnp.eye(number))
        # After a step of 1e-6 the value is known far better than the slope.
        assert RandomWalk2([0, 1, 2, 3, 3 + 1e-6, 4], 1.0, 1.0, 1.0).chain() is None
        other = jax.vmap(lambda z: chain.value(chain.states(z)))(units)
        return root, walk.noise(root), other, jax.vmap(chain.numbers)(other)

    root, noise, other, numbers = map(np.asarray, everything(units))
    for each in (root, other):
        np.testing.assert_allclose(each.T @ each, covariance, rtol=1e-4)
    np.testing.assert_allclose(noise, np.eye(number), atol=1e-4)
    np.testing.assert_allclose(numbers[:number], units[:number], atol=1e-4)


@pytest.mark.parametrize("name", ["icar", "bym2", "gmrf", "walk"])
def test_draws_have_the_covariance(name):
    field, covariance = field_of(name)

    @jax.jit
    def drawn(key):
        draws = field.sample(key, (4000,))
        return draws, field.support(draws)

    draws, supported = map(np.asarray, drawn(jax.random.key(0)))
    found = np.cov(draws.T)
    deviation = np.sqrt(np.outer(*[covariance.diagonal()] * 2) / 4000)
    assert (abs(found - covariance) < 6 * deviation + 1e-3).all()
    assert supported.all()


@pytest.mark.parametrize("dtype", ["float64"], indirect=True)
@pytest.mark.parametrize("name", ["icar", "bym2", "gmrf", "walk"])
def test_the_sparse_form_is_the_field(name, dtype):
    covariance, kept = field_of(name)[1], []

    @jax.jit
    def parts():
        prior = sparse_prior(field_of(name)[0])
        kept.append(prior)
        eye = jnp.eye(prior.pattern.size)
        return prior.values, prior.value(eye) - prior.value(0 * eye), prior.log_det()

    values, affine, found_log_det = map(np.asarray, parts())
    pattern, constraints = kept[0].pattern, kept[0].constraints
    precision = np.zeros((pattern.size,) * 2)
    precision[pattern.rows, pattern.columns] = values
    precision += np.tril(precision, -1).T
    free = np.eye(pattern.size)
    if constraints is not None:
        free = np.linalg.svd(constraints)[2][len(constraints) :].T
    inner = free.T @ precision @ free
    half = affine.T @ free
    found = half @ np.linalg.solve(inner, half.T)
    np.testing.assert_allclose(found, covariance, rtol=1e-3, atol=1e-3)
    log_det = np.linalg.slogdet(inner)[1]
    np.testing.assert_allclose(found_log_det, log_det, 1e-3, 1e-3)


@pytest.mark.parametrize("is_sparse", [False, True])
def test_the_sparse_form_of_car(is_sparse):
    graph = GRAPHS["connected"]
    graph = sparse.csr_matrix(graph) if is_sparse else graph
    x = np.random.default_rng(0).normal(size=60).astype(np.float32)

    @jax.jit
    def both(x):
        d = dist.CAR(1.0, 0.7, 2.0, graph, is_sparse=is_sparse)
        prior, found = sparse_prior(d), GMRF(0.0, sparse.eye_array(60))
        found.pattern, found.values = prior.pattern, prior.values
        found.sums = prior.sums
        scale = jnp.log(prior.scales[0][0])
        return found.log_prob(x), d.log_prob(prior.value(x)) + 60 * scale

    np.testing.assert_allclose(*both(x), 1e-4)
    assert sparse_prior(dist.Normal(0, 1)) is None


def test_gradients_of_densities():
    pieces = GRAPHS["pieces"]
    covariance, labels = reference(pieces)
    u = jax.jit(lambda key: ICAR(pieces).sample(key))(jax.random.key(1))

    @jax.jit
    @jax.grad
    def gradient(parameters):
        scale, mixing = parameters
        structured = ICAR(pieces, scale).log_prob(u)
        return structured + BYM2(pieces, scale, mixing).log_prob(u)

    x = np.asarray(u, float)
    quadratic = x @ np.linalg.pinv(covariance, hermitian=True) @ x

    def twin(parameters):
        scale, mixing = parameters
        whole = mixing * covariance + (1 - mixing) * np.eye(len(labels))
        structured = -(len(labels) - 2) * np.log(scale) - 0.5 * quadratic / scale**2
        return structured + log_density(scale**2 * whole, x)

    found = gradient(jnp.array([1.5, 0.6]))
    np.testing.assert_allclose(found, slopes(twin, [1.5, 0.6]), 1e-3)


def model(y=None):
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    field = numpyro.sample("field", ICAR(GRAPHS["pieces"], scale))
    numpyro.sample("y", dist.Poisson(jnp.exp(field)).to_event(1), obs=y)


def test_fields_are_sites_of_numpyro():
    @jax.jit
    def started(key):
        info = initialize_model(key, model, model_args=(jnp.ones(25),))
        start = info.param_info.z
        return start, jax.value_and_grad(info.potential_fn)(start)

    start, found = started(jax.random.key(1))
    assert start["field"].shape == (23,)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(found))
    leaves, tree = jax.tree.flatten(ICAR(GRAPHS["pieces"], 2.0))
    again = jax.tree.unflatten(tree, leaves)
    assert again.graph is ICAR(GRAPHS["pieces"]).graph


def bcoo(matrix):
    return BCOO.from_scipy_sparse(sparse.coo_array(matrix))


def spoilt(entries, shape=(4, 4)):
    matrix = np.zeros(shape)
    for place, value in entries.items():
        matrix[place] = value
    return matrix


@pytest.mark.parametrize(
    ("adjacency", "message"),
    [
        (np.zeros((2, 3)), r"shape \(2, 3\); expected \(n, n\)"),
        (spoilt({(1, 2): 1.0}), r"adjacency\[1, 2\] is 1.0, but adjacency\[2, 1\] is"),
        (spoilt({(1, 1): 2.0}), r"adjacency\[1, 1\] is 2.0: a node is no neighbour"),
        (spoilt({(1, 2): -1.0, (2, 1): -1.0}), r"adjacency\[1, 2\] is -1.0: weights"),
        (spoilt({(1, 2): np.nan, (2, 1): 1.0}), r"adjacency\[1, 2\] is nan"),
    ],
)
def test_graphs_that_are_none(adjacency, message):
    for of in (np.asarray, sparse.csr_array, bcoo):
        given = of(adjacency)
        with pytest.raises(ValueError, match=message):
            ICAR(given)


ROAD = np.diag(np.full(3, 1.0), 1) + np.diag(np.full(3, 1.0), -1)
LEVELLED = np.diag(ROAD.sum(0)) - ROAD


def test_precisions_that_are_none():
    with pytest.raises(ValueError, match=r"\[0, 1\] and \[1, 0\] differ"):
        GMRF(0.0, sparse.csr_array(np.array([[2.0, 1.0], [0.0, 2.0]])))
    with pytest.raises(ValueError, match=r"shape \(2, 3\); expected"):
        GMRF(0.0, sparse.csr_array(np.ones((2, 3))))
    with pytest.raises(ValueError, match=r"differ: \[2, 3\]"):
        GMRF(0.0, [(1.0, sparse.eye_array(2)), (1.0, sparse.eye_array(3))])
    with pytest.raises(TypeError, match=r"not a pair.*\[\(2.0, A\)\]"):
        GMRF(0.0, (2.0, sparse.eye_array(2)))
    with pytest.raises(ValueError, match=r"precision\[1, 1\] is nan"):
        GMRF(0.0, sparse.diags_array([1.0, np.nan]))
    with pytest.raises(ValueError, match=r"loc has shape \(3,\)"):
        GMRF(jnp.zeros(3), sparse.eye_array(2))
    # Rounding would decide whether a factorisation fails.
    parts = map(sparse.csr_array, (LEVELLED, np.eye(2)))
    levelled = sparse.block_diag([*parts]) / 3
    with pytest.raises(ValueError, match="connected with row 0 add up to zero"):
        GMRF(0.0, [(0.7, levelled), (1.0, levelled.astype("float32"))])
    with pytest.raises(TypeError, match=r"dense matrix use dist.MultivariateNormal"):
        GMRF(0.0, np.eye(2))
    with pytest.raises(TypeError, match="indices are traced"):
        jax.jit(lambda x: GMRF(0.0, BCOO.fromdense(x, nse=2)).loc)(jnp.eye(2))
    with pytest.raises(TypeError, match="adjacency is traced"):
        jax.jit(lambda x: ICAR(x).mean)(jnp.zeros((2, 2)))


def test_fits_name_a_node_without_precision():
    def model(y=None):
        sd = numpyro.sample("sd", dist.HalfNormal(1))
        matrix = sparse.csr_array(LEVELLED - 0.01 * np.eye(4))
        x = numpyro.sample("x", GMRF(0.0, [(1 / sd**2, matrix)]))
        with numpyro.plate("data", 4):
            numpyro.sample("y", dist.Poisson(jnp.exp(x)), obs=y)

    svi = gpaug.ConjugateSVI(model, gpaug.AutoLatentGaussian(model))
    message = r"'x', GMRF, is not .* node \d is left with .*: use gpaug.ICAR"
    with pytest.raises(gpaug.CholeskyError, match=message):
        svi.run(jax.random.key(0), 2, np.arange(4), progress_bar=False)


@pytest.mark.parametrize(
    ("field", "parameter"),
    [
        (lambda: ICAR(ROAD, -1.0), "scale"),
        (lambda: BYM2(ROAD, 1.0, 1.5), "mixing"),
        (lambda: RandomWalk2(np.arange(4), 1.0, 1.0, -1.0), "slope"),
        (lambda: SpaceTime(ROAD, 2, 1.0, 1.2, 0.5), "correlation"),
    ],
)
def test_fits_refuse_known_numbers_outside_of_their_range(field, parameter):
    def model(y=None):
        x = numpyro.sample("x", field()).reshape(-1)[:4]
        with numpyro.plate("data", 4):
            numpyro.sample("y", dist.Poisson(jnp.exp(x)), obs=y)

    svi = gpaug.ConjugateSVI(model, gpaug.AutoLatentGaussian(model))
    with pytest.raises(ValueError, match=f"'x': parameter '{parameter}' .*not satisfy"):
        svi.run(jax.random.key(0), 2, np.arange(4), progress_bar=False)


@pytest.mark.parametrize(
    ("matrix", "node"),
    [
        (np.diag([1.0, 1.0, -0.5, 1.0]), {2}),
        (np.diag([1.0, 0.0, 1.0, 1.0]), {1}),
        (np.eye(4) - 0.9 * ROAD, {0, 1, 2, 3}),
        (LEVELLED + 0.01 * np.eye(4), {None}),
    ],
)
def test_nodes_without_precision(matrix, node):
    pattern, values = sum_of_terms([(1.0, sparse.csr_array(matrix))], "precision")
    found = indefinite_node(pattern, np.asarray(values, float))
    assert (found and found[0]) in node


def test_a_given_matrix_stays_as_it_is():
    ends = np.array([0, 1, 1, 0, 2]), np.array([1, 0, 0, 1, 3])
    matrix = sparse.coo_array(([1.0, 1, 1, 1, 0], ends), shape=(4, 4)).tocsr()
    kept = matrix.copy()
    ICAR(matrix)
    for name in ("indptr", "indices", "data"):
        np.testing.assert_array_equal(getattr(matrix, name), getattr(kept, name))


def test_a_map_of_islands_is_independent():
    field = ICAR(sparse.csr_array((4, 4)), 2.0)
    x = jnp.arange(4.0)
    variance, *densities = jax.jit(
        lambda: (field.variance, field.log_prob(x), dist.Normal(0, 2).log_prob(x).sum())
    )()
    np.testing.assert_allclose(variance, 4)
    np.testing.assert_allclose(*densities)


@pytest.mark.parametrize("dtype", ["float64"], indirect=True)
def test_space_time_is_a_kronecker_product(dtype):
    adjacency = planar(6)
    steps, correlation, persistence, scale = 4, 0.8, -0.6, 0.7
    of_areas = np.linalg.inv(np.diag(adjacency.sum(0)) - correlation * adjacency)
    lags = np.abs(np.subtract.outer(np.arange(steps), np.arange(steps)))
    covariance = scale**2 * np.kron(persistence**lags, of_areas)
    x = np.random.default_rng(0).normal(size=(steps, 6))
    expected = log_density(covariance, x.ravel())
    kept = []

    @jax.jit
    def everything(key):
        field = SpaceTime(adjacency, steps, scale, correlation, persistence)
        prior = sparse_prior(field)
        kept.append(prior.pattern)
        own = field.log_prob(x), field.variance, field.sample(key, (20_000,))
        return *own, prior.values, prior.log_det()

    log_prob, variance, drawn, values, found_log_det = everything(jax.random.key(0))
    np.testing.assert_allclose(log_prob, expected, rtol=1e-10)
    np.testing.assert_allclose(variance.ravel(), np.diag(covariance), rtol=1e-10)
    rows, columns = kept[0].rows, kept[0].columns
    precision = np.zeros((24, 24))
    precision[rows, columns] = precision[columns, rows] = values
    np.testing.assert_allclose(precision @ covariance, scale**2 * np.eye(24), atol=1e-9)
    log_det = np.linalg.slogdet(precision)[1]
    np.testing.assert_allclose(found_log_det, log_det, rtol=1e-10)
    drawn = np.asarray(drawn).reshape(-1, 24)
    np.testing.assert_allclose(np.cov(drawn.T), covariance, atol=0.05)


def test_space_time_needs_neighbours():
    apart = np.zeros((4, 4))
    apart[[0, 1, 1, 2], [1, 0, 2, 1]] = 1
    with pytest.raises(ValueError, match=r"areas \[3\] have no neighbours"):
        SpaceTime(apart, 3, 1.0, 0.5, 0.5)
    with pytest.raises(ValueError, match="num_steps must be at least 2, got 1"):
        SpaceTime(planar(6), 1, 1.0, 0.5, 0.5)
