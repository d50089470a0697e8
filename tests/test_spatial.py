# SPDX-License-Identifier: Apache-2.0
"""Meshes, their finite elements, Matern fields and point processes."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro import handlers
from numpyro.infer import Predictive
from scipy import sparse
from scipy.sparse.linalg import splu
from scipy.special import k1

import numpyro_gpaug as gpaug
from numpyro_gpaug.distributions.sparse_prior import sparse_prior
from numpyro_gpaug.math.sparse_cholesky import product
from numpyro_gpaug.spatial import Mesh, polygons
from numpyro_gpaug.spatial.spde import MaternWeights
from numpyro_gpaug.spatial.triangulation import smallest_angle
from tests.conftest import enable_x64

RNG = np.random.default_rng(0)
CLOUD = RNG.random((200, 2))
ARM = np.concatenate([RNG.random((60, 2)) * [3, 0.2], RNG.random((60, 2)) * [0.2, 3]])
POINTS = {
    "cloud": CLOUD,
    "clusters": 1000 * RNG.normal(size=(300, 2)) * [0.3, 0.1],
    "arms": ARM,
    "line": np.stack([np.linspace(0, 1, 9)] * 2, -1),
    "one point, four times": np.full((4, 2), 3.0),
}
SQUARE = np.array([[0.0, 0.0], [1.0, 0.0], [1.0, 1.0], [0.0, 1.0]])


def edges(mesh):
    corners = mesh.nodes[mesh.triangles]
    return np.linalg.norm(corners - np.roll(corners, 1, 1), axis=-1)


@pytest.mark.parametrize(
    ("points", "edge"),
    [
        *((points, (0.05, 0.2, 0.6)) for points in POINTS),
        ("cloud", (0.1, 0.1, 0.3)), ("arms", (0.1, 1.0, 3.0)),
    ],
)  # fmt: skip
def test_triangles_around_points_are_well_shaped(points, edge):
    points = POINTS[points]
    inner, outer, offset = 1000 * np.array(edge) if points.max() > 10 else edge
    mesh = Mesh.around(points, (inner, outer), offset)
    assert smallest_angle(mesh.nodes, mesh.triangles) > 25
    assert edges(mesh).max() <= outer
    # The mesh is connected, has no holes, and every node belongs to a triangle.
    assert len(np.unique(mesh.triangles)) == mesh.size
    sides = np.sort(mesh.triangles[:, [[0, 1], [1, 2], [2, 0]]].reshape(-1, 2), 1)
    assert mesh.size - len(np.unique(sides, axis=0)) + len(mesh.triangles) == 1
    inside = polygons.around(points[:1], inner / 2) if len(points) < 5 else points
    nodes, weights = map(np.asarray, jax.jit(mesh.project)(inside))
    assert edges(mesh)[np.isin(mesh.triangles, nodes).all(1)].max() <= 1.5 * inner
    found = (mesh.nodes[nodes] * weights[..., None]).sum(1)
    np.testing.assert_allclose(found, inside, atol=1e-6 * np.abs(inside).max())


def test_a_mesh_moves_with_its_points():
    here, far = (Mesh.around(CLOUD + at, (0.2, 0.4), 0.5) for at in (0, 5e6))
    np.testing.assert_array_equal(far.triangles, here.triangles)
    np.testing.assert_allclose(far.nodes - 5e6, here.nodes, atol=1e-6)


def test_a_boundary_keeps_correlation_on_land():
    """Two arms of a bay, and a lake with an island."""
    bay = np.array([[0, 0], [3, 0], [3, 3], [2, 3], [2, 1], [1, 1], [1, 3], [0, 3.0]])
    points = np.array([[0.9, 2.5], [2.1, 2.5], [1.5, 0.5], [1.04, 2.0]])
    around, open_ = (
        Mesh.around(points, 0.25, 1.5, boundary=boundary) for boundary in (bay, None)
    )
    assert around.size < open_.size
    centres = around.nodes[around.triangles].mean(1)
    outside = ~polygons.contains(bay, centres)
    # One triangle in the water contains a point.
    assert outside.sum() == 1

    def correlation(mesh):
        nodes, weights = map(np.asarray, mesh.project(points[:2]))
        operator = 8 / 2.0**2 * np.diag(mesh.elements.mass)
        operator += mesh.elements.stiffness.toarray()
        at_points = np.zeros((mesh.size, 2))
        np.add.at(at_points, (nodes, np.arange(2)[:, None]), weights)
        half = np.sqrt(mesh.elements.mass)[:, None] * np.linalg.solve(
            operator, at_points
        )
        covariance = half.T @ half
        return covariance[0, 1] / np.sqrt(covariance[0, 0] * covariance[1, 1])

    assert correlation(open_) > 0.3 > 0.1 > correlation(around)
    lake, island = SQUARE * 1.5 + 0.75, SQUARE * 0.6 + 1.2
    rings = Mesh.around(points, 0.25, 1.5, boundary=[SQUARE * 3, lake, island])
    own = rings.nodes[rings.triangles].mean(1)
    assert (polygons.contains(island, own)).any()
    water = polygons.contains(lake, own) & ~polygons.contains(island, own)
    # Only triangles in the water that contain a point stay.
    assert water.sum() <= len(points)


def test_elements_of_a_square():
    mesh = Mesh(SQUARE, [[0, 1, 2], [0, 3, 2]])
    mass, stiffness = mesh.elements
    np.testing.assert_allclose(mass, [1 / 3, 1 / 6, 1 / 3, 1 / 6])
    expected = np.array(
        [[2, -1, 0, -1], [-1, 2, -1, 0], [0, -1, 2, -1], [-1, 0, -1, 2]]
    )
    np.testing.assert_allclose(stiffness.toarray(), expected / 2, atol=1e-12)


def test_elements_integrate_linear_functions():
    mesh = Mesh.around(CLOUD, (0.2, 0.4), 0.5)
    mass, stiffness = mesh.elements
    corners = mesh.nodes[mesh.triangles]
    area = sum(polygons.moments(corner)[0] for corner in corners)
    np.testing.assert_allclose(mass.sum(), area)
    slope = np.array([0.3, -2.0])
    linear = 1 + mesh.nodes @ slope
    np.testing.assert_allclose(linear @ stiffness @ linear, area * slope @ slope)


def test_points_are_located_where_they_are_traced():
    mesh = Mesh.around(CLOUD, (0.1, 0.3), 0.5)
    assert mesh == Mesh(mesh.nodes, mesh.triangles)
    assert hash(mesh) == hash(Mesh(mesh.nodes, mesh.triangles))
    values = np.sin(mesh.nodes @ [2.0, 3.0])

    @jax.jit
    def interpolated(X):
        nodes, weights = mesh.project(X)
        return (jnp.asarray(values)[nodes] * weights).sum(1)

    X = np.concatenate([CLOUD, [[9.0, 9.0], [np.nan, 0.5]]])
    found = interpolated(X)
    assert np.isnan(found[-2:]).all()
    np.testing.assert_allclose(found[:-2], np.sin(CLOUD @ [2.0, 3.0]), atol=0.03)
    np.testing.assert_allclose(interpolated(mesh.nodes), values, atol=1e-5)
    slope = jax.grad(lambda X: interpolated(X).sum())(CLOUD)
    expected = np.cos(CLOUD @ [2.0, 3.0])[:, None] * [2.0, 3.0]
    np.testing.assert_allclose(slope, expected, atol=0.4)
    message = r"2 of 202 points .* in row 201, is \[9.*is 10\.\d from .* larger by 11"
    with pytest.raises(ValueError, match=message):
        mesh.project(np.concatenate([CLOUD, [[2.0, 2.0], [9.0, 9.0]]]))
    with pytest.raises(ValueError, match=r"the point in row 1 is \[nan, 0.5\]"):
        mesh.project([[0.5, 0.5], [np.nan, 0.5]])
    with pytest.raises(ValueError, match=r"shape \(3,\); expected \(N, 2\)"):
        mesh.project(np.zeros(3))


def lower_to_whole(pattern, values):
    entries = np.asarray(values, float), (pattern.rows, pattern.columns)
    lower = sparse.coo_array(entries, shape=(pattern.size,) * 2)
    return (lower + sparse.tril(lower, -1).T).tocsc()


def matern(distances, reach):
    scaled = np.maximum(np.sqrt(8) / reach * distances, 1e-9)
    return scaled * k1(scaled)


def test_the_field_is_matern():
    reach, points = 0.5, CLOUD[:60]
    mesh = Mesh.around(points, (reach / 12, reach / 3), 2 * reach)
    prior = sparse_prior(MaternWeights(mesh, reach))
    nodes, weights = mesh.project(points)
    rows = np.repeat(np.arange(60), 3)
    entries = np.asarray(weights).ravel(), (rows, np.asarray(nodes).ravel())
    map_ = sparse.coo_array(entries, shape=(60, mesh.size)).toarray()
    precision = lower_to_whole(prior.pattern, prior.values)
    covariance = map_ @ splu(precision).solve(map_.T)
    distances = np.linalg.norm(points[:, None] - points, axis=-1)
    np.testing.assert_allclose(covariance, matern(distances, reach), atol=0.02)


@pytest.mark.parametrize("double", [False, True])
def test_densities_of_weights(double):
    mesh = Mesh.around(SQUARE, 0.4, 0.5)
    patterns = []

    def everything():
        d = MaternWeights(mesh, 0.6)
        prior, x = d._sparse_precision(), d.sample(jax.random.key(0), (100,))
        patterns.append(prior.pattern)
        own = x, d.log_prob(x), d.variance if double else 0
        return prior.values, prior.log_det(), *own

    with enable_x64(double):
        values, found_log_det, x, density, variance = jax.jit(everything)()
        precision = lower_to_whole(patterns[0], values).toarray()
        quadratic = np.einsum("ki,ij,kj->k", x, precision, x)
        log_det = np.linalg.slogdet(precision)[1]
        expected = 0.5 * (log_det - quadratic - mesh.size * np.log(2 * np.pi))
        tolerance = 1e-9 if double else 2e-5
        np.testing.assert_allclose(density, expected, tolerance)
        np.testing.assert_allclose(found_log_det, log_det, tolerance)
        if double:
            variances = np.linalg.inv(precision).diagonal()
            np.testing.assert_allclose(variance, variances, tolerance)
        # The quadratic form of draws is chi squared.
        assert abs(quadratic.mean() - mesh.size) < 5 * np.sqrt(2 * mesh.size / 100)


def test_float32_resolves_ranges_of_many_edges():
    """The entries of a row of the precision almost cancel each other, and their
    rounding is the same at all nodes of a regular mesh."""
    mesh = Mesh.around(CLOUD, (0.1, 0.4), 0.5)
    prior = sparse_prior(MaternWeights(mesh, 30.0))
    assert prior.values.dtype == np.float32
    smooth = np.stack([np.ones(mesh.size), 1 + mesh.nodes[:, 0]], -1)
    x = smooth.astype(np.float32)
    moved = product(prior.pattern, prior.entries, jnp.asarray(x))
    found = (x * np.asarray(moved)).sum(0)
    (mass, stiffness), square = mesh.elements, 8 / 30.0**2
    half = square * mass[:, None] * smooth + stiffness @ smooth
    expected = (half**2 / mass[:, None]).sum(0) / (4 * np.pi * square)
    np.testing.assert_allclose(found, expected, rtol=1e-3)


def test_a_field_in_a_model():
    mesh = Mesh.around(CLOUD, (0.2, 0.4), 0.5)

    def model(X):
        s = gpaug.SPDE("s", mesh, range=0.5, scale=3.0)
        assert repr(s).startswith('SPDE("s")')
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", dist.Normal(s(X), 1.0))

    prior = Predictive(model, num_samples=200)
    draws = jax.device_get(jax.jit(lambda key: prior(key, CLOUD))(jax.random.key(0)))
    assert draws["s"].shape == (200, 200)
    assert draws["s.v"].shape == (200, mesh.size)
    assert 0.8 < draws["s"].std() / 3 < 1.2

    def within_plate():
        with numpyro.plate("data", 3):
            gpaug.SPDE("s", mesh, 0.5, 1.0)

    with pytest.raises(ValueError, match="Construct it before the plate"):
        handlers.seed(within_plate, 0)()


def test_a_point_process_integrates_over_its_window():
    mesh = Mesh.around(SQUARE, (0.15, 0.3), 0.4)
    # A square minus a triangle at its right side.
    window = np.array([[0, 0], [1, 0], [0.4, 0.5], [1, 1], [0, 1]], float)
    assert polygons.contains(window, np.array([[0.2, 0.5], [0.0, 0.3]])).all()
    assert not polygons.contains(window, np.array([[0.9, 0.5], [-0.1, 0.3]])).any()
    points = CLOUD[polygons.contains(window, CLOUD)]
    for given in (window, window[::-1]):
        data = gpaug.spatial.point_process(points, mesh, given)
        np.testing.assert_allclose(data.exposure.sum(), 0.7)
        # Moments of the window: the square's, minus the triangle's.
        first = np.array([0.5 - 0.3 * 0.8, 0.5 - 0.3 * 0.5])
        np.testing.assert_allclose(data.exposure @ data.X, first)
        np.testing.assert_allclose(data.counts @ data.X, points.sum(0), 1e-5)
        assert (data.exposure > 0).all()
    with pytest.raises(
        ValueError, match=r"points are outside of the window, the first"
    ):
        gpaug.spatial.point_process(CLOUD, mesh, window)
    with pytest.raises(ValueError, match=r"covers an area of .* the window's 9"):
        gpaug.spatial.point_process(points, mesh, 3 * SQUARE)


def test_predictions_outside_of_a_mesh_and_at_other_exposures():
    mesh = Mesh.around(CLOUD, 1.5, 0.4)

    def model(X, z, exposure, counts=None):
        numbers = numpyro.sample("numbers", dist.Normal(0, 1).expand([2]))
        s = gpaug.SPDE("s", mesh, range=0.7, scale=1.0)
        eta = numpyro.deterministic("eta", numbers[0] + numbers[1] * z + s(X))
        terms = (counts if counts is not None else 0) * eta - exposure * jnp.exp(eta)
        numpyro.factor("points", terms.sum())

    z, exposure = np.sin(np.arange(200)), np.full(200, 0.01) + 1e-3 * CLOUD[:, 0]
    svi = gpaug.ConjugateSVI(model, gpaug.AutoLatentGaussian(model))
    given = CLOUD, z, exposure, np.ones(200)
    params = svi.get_params(svi.init(jax.random.key(0), *given))
    posterior = svi.posterior(params, *given)
    # An exposure of one is not an extrapolation, and another covariate is.
    posterior.predict_f(CLOUD[:2], z[:2], np.ones(2), site="eta")
    with pytest.warns(UserWarning, match="z is about 50.4 here"):
        posterior.predict_f(CLOUD[:2], z[:2] + 50, np.ones(2), site="eta")
    far = np.array([[0.5, 0.5], [0.5, -3.0], [0.4, 0.5]])
    with pytest.raises(ValueError, match=r"1 of 3 points .* in row 1, is \[0.5, -3"):
        posterior.predict_f(far, z[:3], np.ones(3), site="eta")
    found = jax.jit(lambda X: posterior.predict_f(X, z[:3], z[:3], site="eta"))(far)
    assert np.isfinite(found.mean).tolist() == [True, False, True]


@pytest.mark.parametrize(
    ("nodes", "triangles", "message"),
    [
        (SQUARE[:, 0], [[0, 1, 2]], r"nodes has shape \(4,\)"),
        (SQUARE, [[0, 1]], r"triangles has shape \(1, 2\)"),
        (SQUARE, [[0, 1, 4]], "nodes 0 to 4, and there are nodes 0 to 3"),
        (SQUARE[[0, 1, 2, 0]], [[0, 1, 2], [3, 1, 2]], "nodes 0 and 3 are both at"),
        (SQUARE, [[0, 1, 2]], "node 3 is in no triangle"),
        (np.arange(4)[:, None] * [1, 2], [[0, 1, 2], [1, 2, 3]], "triangle 0 has no"),
        (SQUARE * np.nan, [[0, 1, 2]], "node 0 is not finite"),
    ],
)  # fmt: skip
def test_meshes_that_are_none(nodes, triangles, message):
    with pytest.raises(ValueError, match=message):
        Mesh(nodes, triangles)


def test_arguments_of_meshes_and_fields():
    with pytest.raises(ValueError, match=r"shape \(2,\); expected \(n, 2\)"):
        Mesh.around(np.zeros(2), 0.1)
    with pytest.raises(ValueError, match=r"points\[1\] is not finite"):
        Mesh.around([[0.0, 0.0], [np.inf, 0.0]], 0.1)
    with pytest.raises(ValueError, match=r"max_edge is \(0.2, 0.1\) and offset 1"):
        Mesh.around(SQUARE, (0.2, 0.1), 1.0)
    with pytest.raises(ValueError, match=r"a polygon of shape \(2, 2\)"):
        Mesh.around(SQUARE, 0.5, 1.0, boundary=SQUARE[:2])
    with pytest.raises(ValueError, match="contains no triangle of the mesh"):
        Mesh.around(SQUARE, 0.5, 1.0, boundary=SQUARE + 9)
    mesh = Mesh(SQUARE, [[0, 1, 2], [0, 2, 3]])
    with pytest.raises(ValueError, match=r"range has shape \(2,\)"):
        MaternWeights(mesh, jnp.ones(2))
    with pytest.raises(ValueError, match=r"scale has shape \(2,\)"):
        gpaug.SPDE("s", mesh, 1.0, jnp.ones(2))
    with pytest.raises(ValueError, match=r"smoothness is 2, .* has smoothness 1"):
        gpaug.SPDE("s", mesh, 1.0, 1.0, smoothness=2)
    with pytest.raises(TypeError, match=r"used as an array.*s\(X\)"):
        with numpyro.handlers.seed(rng_seed=0):
            jnp.asarray(gpaug.SPDE("s", mesh, 1.0, 1.0))
