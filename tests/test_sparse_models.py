# SPDX-License-Identifier: Apache-2.0
"""Models with fields, whose latents have a sparse precision, against dense matrices."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import export
from numpyro.contrib.control_flow import scan
from numpyro.infer.gibbs import GIBBS_SITES_KWARG, conditioned
from numpyro.infer.util import log_density
from scipy import sparse
from scipy.linalg import block_diag, null_space

import numpyro_gpaug as gpaug
from numpyro_gpaug.gaussians import Chain, Dense, Layout, Sparse
from numpyro_gpaug.gaussians.rows import Rows
from numpyro_gpaug.infer.nested import group_draws
from numpyro_gpaug.infer.vi.checks import check_basis
from numpyro_gpaug.math.compiling import jit
from numpyro_gpaug.math.sparse_cholesky import with_sums
from numpyro_gpaug.math.sparse_pattern import Pattern
from numpyro_gpaug.model import reading
from numpyro_gpaug.model.costs import WHITE
from numpyro_gpaug.model.gaussians import field
from numpyro_gpaug.testing import check_structure
from tests.conftest import enable_x64, slow
from tests.models import poisson_posterior

SIDE = 5
AREAS = SIDE**2
KEY = jax.random.key(0)


def lattice(side=SIDE, *, island=False):
    """Neighbours on a lattice, (n, n); the last area of it may be an island."""
    place = np.arange(side**2).reshape(side, side)
    i = np.append(place[1:], place[:, 1:])
    j = np.append(place[:-1], place[:, :-1])
    weights = np.zeros((side**2, side**2))
    weights[i, j] = weights[j, i] = 1
    if island:
        weights[-1] = weights[:, -1] = 0
    return weights


RNG = np.random.default_rng(0)
AREA = RNG.integers(0, AREAS, 60)
HOSPITAL = RNG.integers(0, 16, 60)
X = RNG.normal(size=60)
COUNTS = RNG.poisson(np.exp(0.5 + 0.3 * X + np.sin(AREA)))
PLACES = RNG.uniform(size=(60, 2))
MESH = gpaug.spatial.Mesh.around(PLACES, max_edge=0.35, offset=0.2)


@pytest.fixture
def always_sparse(monkeypatch):
    """However few the nodes are."""
    monkeypatch.setattr(reading, "FEWEST_NODES", 1)
    monkeypatch.setattr(Dense, "cost", lambda *args: np.inf)


def of_areas(field):
    """A model of counts in areas."""

    def model(area, x, hospital=None, y=None):
        numbers = numpyro.sample("numbers", dist.Normal(0, 2).expand([2]))
        effect = numpyro.sample("effect", field())
        eta = numbers[0] + numbers[1] * x + jnp.atleast_2d(effect)[:, area].sum(0)
        if hospital is not None:
            with numpyro.plate("hospitals", 16):
                own = numpyro.sample("own", dist.Normal(0, 0.5))
            eta = eta + own[hospital]
        with numpyro.plate("data", len(area)):
            numpyro.sample("y", dist.Poisson(jnp.exp(eta)), obs=y)

    return model


def of_places(X, y=None):
    """Counts at places, and a field in the logarithm of their spread."""
    level = numpyro.sample("level", dist.Normal(0, 2))
    field = gpaug.SPDE("field", MESH, range=0.5, scale=0.7)
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", dist.Poisson(jnp.exp(level + field(X))), obs=y)


def of_spread(X, y=None):
    """Two predictors of each datum depend on one field."""
    levels = numpyro.sample("levels", dist.Normal(0, 2).expand([2]))
    field = gpaug.SPDE("field", MESH, range=0.5, scale=0.7)(X)
    with numpyro.plate("data", len(X)):
        scale = jnp.exp(0.5 * (levels[1] + 0.3 * field))
        numpyro.sample("y", dist.Normal(levels[0] + field, scale), obs=y)


def of_steps(area, step, y=None):
    """Counts in areas at several times."""
    level = numpyro.sample("level", dist.Normal(0, 2))
    values = numpyro.sample("values", gpaug.SpaceTime(lattice(3), 3, 0.7, 0.9, 0.6))
    field = numpyro.deterministic("field", values[step, area])
    with numpyro.plate("data", len(area)):
        numpyro.sample("y", dist.Poisson(jnp.exp(level + field)), obs=y)


W = sparse.csr_array(lattice())
FIELDS = {
    "car": lambda: dist.CAR(jnp.full(AREAS, 0.2), 0.9, 2.0, W, is_sparse=True),
    "two cars": lambda: dist.CAR(0.0, 0.9, 2.0, lattice()).expand([2]),
    "icar": lambda: gpaug.ICAR(lattice(island=True), 0.6),
    "bym2": lambda: gpaug.BYM2(lattice(), 0.6, 0.7),
    "gmrf": lambda: gpaug.GMRF(0.1, 3 * sparse.eye_array(AREAS) - 0.5 * W),
}
MODELS = {
    name: (of_areas(field), (AREA, X, HOSPITAL)) for name, field in FIELDS.items()
}
MODELS |= {"places": (of_places, (PLACES,)), "spread": (of_spread, (PLACES,))}
MODELS["steps"] = of_steps, (AREA % 9, HOSPITAL % 3)


def fitted(model, args, white, steps=60):
    guide = gpaug.AutoLatentGaussian(model)
    if white:
        guide._purpose = WHITE
    svi = gpaug.ConjugateSVI(model, guide)
    fit = svi.run(KEY, steps, *args, y=COUNTS, progress_bar=False)
    assert isinstance(guide.structure.form, Sparse) is not white
    return svi, fit


@pytest.mark.slow  # quick below, with groups
@pytest.mark.parametrize("name", MODELS)
def test_a_field_is_a_dense_gaussian(name, dtype, always_sparse, tmp_path):
    model, args = MODELS[name]
    (svi, fit), (dense, other) = (fitted(model, args, white) for white in (False, True))
    close = {"float32": 2e-3, "float64": 1e-6}[str(jnp.result_type(float))]
    assert float(fit.losses[-1]) == pytest.approx(float(other.losses[-1]), abs=close)
    found, expected = svi.posterior(fit), dense.posterior(other)
    new = tuple(x[:9][::-1] for x in args)
    level = {"spread": "levels", "places": "level", "steps": "level"}
    for of in (
        lambda q: q[level.get(name, "numbers")],
        lambda q: q["effect"] if name in FIELDS else q.predict_f(*new, site="field"),
        lambda q: q.predict_y(*new),
    ):
        one, two = of(found), of(expected)
        np.testing.assert_allclose(one.mean, two.mean, atol=close, rtol=close)
        np.testing.assert_allclose(one.variance, two.variance, atol=close, rtol=close)
    found.save(tmp_path / "fit.npz")
    loaded = gpaug.Posterior.load(tmp_path / "fit.npz", model)
    np.testing.assert_allclose(
        loaded.predict_y(*new).mean, found.predict_y(*new).mean, rtol=1e-5
    )


@pytest.mark.parametrize(
    ("dtype", "fewest"),
    [
        ("float32", 1),
        *(slow("float64", n) for n in (1, np.inf)),
    ],
    ids=["nodes-float32", "nodes-float64", "border-float64"],
    indirect=["dtype"],
)
def test_groups_that_are_new_beside_a_field(
    dtype, always_sparse, monkeypatch, fewest, tmp_path
):
    """New groups are nodes of the precision, or part of its border."""
    if fewest > 1:
        monkeypatch.setattr("numpyro_gpaug.model.forms._FEWEST", fewest)

    def model(area, hospital, num, y=None):
        field = numpyro.sample("field", gpaug.ICAR(lattice(), 0.6))
        with numpyro.plate("hospitals", num):
            own = numpyro.sample("own", dist.Normal(0, 0.5))
        eta = numpyro.deterministic("eta", field[area] + own[hospital])
        with numpyro.plate("data", len(area)):
            numpyro.sample("y", dist.Poisson(jnp.exp(eta)), obs=y)

    svi, fit = fitted(model, (AREA, HOSPITAL, 16), white=False)
    svi.posterior(fit).save(tmp_path / "fit.npz")
    loaded = gpaug.Posterior.load(tmp_path / "fit.npz", model)
    new = AREA[:4], np.array([3, 17, 17, 18])
    found = loaded.predict_f(*new, 20, site="eta", full_covariance=True)
    known, there = (
        np.concatenate([np.eye(AREAS)[area], np.eye(20)[hospital]], 1)
        for area, hospital in ((AREA, HOSPITAL), new)
    )
    prior = block_diag(COVARIANCES["icar"], 0.25 * np.eye(20))
    mean, covariance = poisson_posterior(prior, known, COUNTS)
    close = 2e-3 if dtype == "float32" else 1e-7
    np.testing.assert_allclose(found.mean, there @ mean, atol=close, rtol=close)
    expected = there @ covariance @ there.T
    np.testing.assert_allclose(found.variance, expected, atol=close, rtol=close)


@pytest.mark.parametrize(
    "dtype",
    ["float64", slow("float32")],
    indirect=["dtype"],
)
def test_a_sparse_structure_is_a_dense_gaussian(dtype):
    # A lattice, a node with one neighbour in it, one with two, and an isolated one.
    i, j = np.nonzero(np.tril(lattice(3)))
    i, j = np.append(i, [9, 10, 10]), np.append(j, [0, 4, 5])
    pattern = Pattern.of(12, i, j)
    entries = np.where(pattern.rows == pattern.columns, 4.0, -0.7)
    # Three more nodes, and another latent that any datum may depend on.
    wider = Pattern.of(15, i, j)
    more = np.where(wider.rows == wider.columns, 4.0, -0.7)
    more[wider.diagonal[12:]] = 1
    places = np.array([*range(12), -1, -1, -1, 12, 13, -1])
    structure = Sparse(Layout(12, 1, 2), pattern)
    assert structure.independent == Layout(3, 1, 11)
    entries, more = map(np.asarray, jax.jit(
        lambda one, other: (with_sums(pattern, one), with_sums(wider, other))
    )(entries.astype(dtype), more.astype(dtype)))  # fmt: skip
    other = Sparse(Layout(15, 1, 3), wider), more, places
    check_structure(structure, entries, other=other, dtype=dtype)


def test_levels_of_two_fields_that_data_add_up():
    """Only the constraints determine the levels of the fields, which data move against
    each other. The reference is a dense precision of vectors that fulfil them."""
    size, path = AREAS + 3, np.diag(np.ones(2), 1) + np.diag(np.ones(2), -1)
    precision = block_diag(*(np.diag(w.sum(0)) - w for w in (lattice(), path)))
    labels = np.repeat(np.int32([0, 1]), [AREAS, 3])
    seen = np.eye(size)[AREA] + np.eye(size)[AREAS + HOSPITAL % 3]
    whole = precision + 5 * seen.T @ seen
    pattern = Pattern.of(size, *np.nonzero(np.tril(whole)))
    structure = Sparse(Layout(size, 1, 0), pattern, labels.tobytes())

    @jax.jit
    def log_det(entries, added):
        both = [with_sums(pattern, x) for x in (entries, added)]
        natural = structure.prior(entries.dtype, (both[0], jnp.zeros(()))).natural
        natural = natural._replace(entries=natural.entries + both[1])
        return natural.moments().log_det[0]

    places = pattern.rows, pattern.columns
    found = log_det(*(np.float32(x[places]) for x in (precision, whole - precision)))
    free = null_space(np.equal.outer([0, 1], labels))
    expected = -np.linalg.slogdet(free.T @ whole @ free)[1]
    np.testing.assert_allclose(found, expected, atol=0.005)


@pytest.mark.parametrize("dtype", ["float64"], indirect=True)
def test_constrained_nodes_are_the_limit_of_a_penalty(dtype):
    """A large precision of the sum of the nodes, in dense matrices."""
    i, j = np.nonzero(np.tril(lattice(3)))
    pattern = Pattern.of(9, i, j)
    laplacian = np.diag(lattice(3).sum(0)) - lattice(3)
    structure = Sparse(Layout(9, 1, 0), pattern, np.zeros(9, np.int32).tobytes())
    places = pattern.rows, pattern.columns
    log_det = np.log(np.linalg.eigvalsh(laplacian)[1:]).sum()
    seen = np.diag(np.arange(9.0))
    lean = np.arange(9.0)[None] - 3

    @jax.jit
    def everything(entries, added):
        entries, added = (with_sums(pattern, x) for x in (entries, added))
        prior = structure.prior(entries.dtype, (entries, jnp.asarray(log_det)))
        natural = prior.natural
        natural = natural._replace(entries=natural.entries + added, potential=lean)
        q = natural.moments()
        deviations = q.unwhiten(jax.random.normal(KEY, (4, q.rank)))
        own = q.mean[0], q.variances[0], q.log_det[0], q.unwhiten(jnp.eye(q.rank))
        squares = jnp.square(q.whiten(deviations)).sum(-1)
        return *own, prior.divergence(q), deviations, squares

    found = map(np.asarray, everything(laplacian[places], seen[places]))
    mean, variances, own_log_det, root, divergence, deviations, squares = found
    whole = np.linalg.inv(laplacian + seen + 1e9 * np.ones((9, 9)))
    np.testing.assert_allclose(root.T @ root, whole, atol=1e-6)
    np.testing.assert_allclose(mean, lean[0] @ whole, atol=1e-6)
    np.testing.assert_allclose(variances, np.diag(whole), atol=1e-6)
    plane = np.linalg.eigh(laplacian)[1][:, 1:]
    inner = plane.T @ (laplacian + seen) @ plane
    inner_log_det = np.linalg.slogdet(inner)[1]
    np.testing.assert_allclose(own_log_det, -inner_log_det, atol=1e-6)
    expected = np.trace(laplacian @ whole) - 8 + mean @ laplacian @ mean
    expected -= log_det - inner_log_det
    np.testing.assert_allclose(divergence, 0.5 * expected, atol=1e-6)
    moved = deviations @ plane
    np.testing.assert_allclose(squares, ((moved @ inner) * moved).sum(-1), atol=1e-6)


def test_fits_belong_to_a_mesh(always_sparse):
    def model(X, mesh, y=None):
        s = gpaug.SPDE("s", mesh, range=0.5, scale=0.7)
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", dist.Poisson(jnp.exp(s(X))), obs=y)

    svi = gpaug.ConjugateSVI(model, gpaug.AutoLatentGaussian(model))
    mesh, finer = (gpaug.spatial.Mesh.around(PLACES, x, 0.2) for x in (0.7, 0.6))
    state = svi.init(KEY, PLACES, mesh, COUNTS)
    params = svi.get_params(state)
    posterior = svi.posterior(params, PLACES, mesh, COUNTS)
    # A mesh with the same nodes in another order, and one with other places.
    turned = gpaug.spatial.Mesh(mesh.nodes[::-1], mesh.size - 1 - mesh.triangles)
    wider = gpaug.spatial.Mesh(1.5 * mesh.nodes, mesh.triangles)
    with pytest.raises(gpaug.NotConjugateError, match="points or steps of the fit"):
        posterior.predict_f(PLACES, wider, site="s")
    structure = gpaug.AutoLatentGaussian(model).setup(PLACES, turned, COUNTS).structure
    with pytest.raises(ValueError, match="the model has another graph, mesh"):
        check_basis(state, structure)
    again = partial(svi.run, KEY, 2, PLACES, finer, COUNTS, progress_bar=False)
    with pytest.raises(ValueError, match="another graph, mesh or number of groups"):
        again(init_params=params)
    with pytest.raises(ValueError, match="another graph, mesh or number of groups"):
        again(init_state=state)


def test_a_long_path_with_few_data_keeps_its_slow_variation():
    """In float32, variances were 6% too small: the precision contained a larger
    multiple of its diagonal."""
    size, seen = 400, np.arange(0, 400, 100)
    ones = np.ones(size - 1)
    path = sparse.diags_array([ones, ones], offsets=[-1, 1]).tocsr()

    def model(area, y=None):
        level = numpyro.sample("level", dist.Normal(0, 3))
        effect = numpyro.sample("effect", gpaug.ICAR(path, 1.0))
        with numpyro.plate("data", len(area)):
            numpyro.sample("y", dist.Normal(level + effect[area], 0.5), obs=y)

    svi = gpaug.ConjugateSVI(model, gpaug.AutoLatentGaussian(model))
    y = np.float32([0.1, -0.3, 0.2, 0.5])
    fit = svi.run(jax.random.key(0), 3, seen, y, progress_bar=False)
    prior = np.linalg.pinv(np.diag(path.sum(1)) - path.toarray(), hermitian=True)
    prior /= np.exp(np.log(np.diag(prior)).mean())
    across = prior[:, seen]
    known = 9 + across[seen] + 0.25 * np.eye(len(seen))
    left = np.diag(prior) - (across * np.linalg.solve(known, across.T).T).sum(1)
    found = svi.posterior(fit)["effect"].variance
    np.testing.assert_allclose(found, left, rtol=0.03)


def test_draws_add_up_to_zero_where_there_are_no_data():
    """In float32 the precision is nearly singular: the density of the site is zero at
    other sums.
    """
    distribution = gpaug.ICAR(lattice(18, island=True))
    prior = field(distribution)
    given = prior.prior.entries, prior.prior.log_det()

    @jax.jit
    def drawn(given):
        q = prior.structure.prior(given[0].dtype, given).natural.moments()
        draws = q.unwhiten(jax.random.normal(KEY, (100, q.rank)))
        return draws[:, :-1].sum(-1), distribution.support(draws)

    sums, supported = map(np.asarray, drawn(given))
    assert supported.all()
    assert abs(sums).max() < 3e-4


def test_latents_of_a_constrained_field_are_drawn_at_hyperparameters(always_sparse):
    """There are fewer standard normal numbers than latents."""

    def model(area, y=None):
        scale = numpyro.sample("scale", dist.HalfNormal(1))
        effect = numpyro.sample("effect", gpaug.ICAR(lattice(3), scale))
        with numpyro.plate("data", len(area)):
            numpyro.sample("y", dist.Poisson(jnp.exp(1 + effect[area])), obs=y)

    collapsed, area = gpaug.collapse(model), AREA % 9
    scales = {"scale": jnp.array([0.3, 1.5])}
    draws = collapsed.sample_latents(KEY, scales, area, COUNTS)["effect"]
    assert draws.shape == (2, 9)
    assert abs(np.asarray(draws).sum(-1)).max() < 1e-4
    assert jax.jit(lambda x: gpaug.ICAR(lattice(3)).support(x).all())(draws)


def test_steps_of_a_scan_may_be_cars():
    def model(y=None):
        phi = numpyro.sample("phi", dist.Uniform(0, 1))

        def step(x, _):
            areas = dist.CAR(phi * x, 0.9, 1.0, lattice(3))
            x = numpyro.sample("x", areas)
            return x, x

        _, values = scan(step, jnp.zeros(9), None, length=8)
        with numpyro.plate("steps", 8, dim=-2), numpyro.plate("areas", 9, dim=-1):
            numpyro.sample("y", dist.Normal(values, 0.5), obs=y)

    svi = gpaug.ConjugateSVI(model, gpaug.AutoLatentGaussian(model))
    y = RNG.normal(size=(8, 9))
    assert np.isfinite(svi.evaluate(svi.init(KEY, y), y))


@pytest.mark.slow
def test_gradients_of_collapsed_bounds_are_at_the_optimum(always_sparse):
    """Bounds in float32 do not resolve the last updates of the Gaussian."""

    def model(area, y=None):
        scale = numpyro.sample("scale", dist.HalfNormal(1))
        level = numpyro.sample("level", dist.Normal(0, 2))
        effect = numpyro.sample("effect", gpaug.ICAR(lattice(), scale))
        with numpyro.plate("data", len(area)):
            numpyro.sample("y", dist.Poisson(jnp.exp(level + effect[area])), obs=y)

    def gradient():
        collapsed = gpaug.collapse(model)

        def density(scale):
            return log_density(collapsed, (AREA, COUNTS), {}, {"scale": scale})[0]

        return jax.jit(jax.value_and_grad(density))

    slope = gradient()(0.7)[1]
    with enable_x64(True):
        function, step = gradient(), 1e-4
        ends = [function(0.7 + x)[0] for x in (step, -step)]
        expected = function(0.7)[1]
        np.testing.assert_allclose((ends[0] - ends[1]) / (2 * step), expected, 1e-6)
    np.testing.assert_allclose(slope, expected, rtol=1e-4)


@pytest.mark.slow
def test_integrated_hyperparameters_of_a_field(always_sparse, monkeypatch):
    def model(area, x, y=None):
        scale = numpyro.sample("scale", dist.HalfNormal(1))
        of_areas(lambda: gpaug.BYM2(lattice(), scale, 0.6))(area, x, y=y)

    # The unstructured effects are weighted separately.
    monkeypatch.setattr(group_draws, "FEWEST", 8)
    found = []
    for fewest in (1, np.inf):
        monkeypatch.setattr(reading, "FEWEST_NODES", fewest)
        nested = gpaug.NestedVI(model, num_points=128, progress_bar=False)
        nested.run(KEY, AREA, X, y=COUNTS)
        found.append(nested)
    one, two = (x.get_extra_fields()["log_evidence"] for x in found)
    assert found[0].certified
    assert found[0]._run.weighted.alike > 1
    assert one == pytest.approx(two, abs=0.15)


GRAPH_COVARIANCE = np.linalg.pinv(np.diag(lattice().sum(0)) - lattice(), hermitian=True)
COVARIANCES = {
    "car": np.linalg.inv(2 * (np.diag(lattice().sum(0)) - 0.9 * lattice())),
    "icar": 0.36 * GRAPH_COVARIANCE
    / np.exp(np.log(np.diag(GRAPH_COVARIANCE)).mean()),
}  # fmt: skip


def real(area, y=None, *, kind):
    """Real numbers in areas, and the scale of the field."""
    fields = {
        "car": lambda s: dist.CAR(0.0, 0.9, 2.0 / s**2, lattice()),
        "icar": lambda s: gpaug.ICAR(lattice(), 0.6 * s),
    }
    scale = numpyro.sample("scale", dist.LogNormal(0.0, 0.5))
    level = numpyro.sample("level", dist.Normal(0, 1))
    effect = numpyro.sample("effect", fields[kind](scale))
    eta = numpyro.deterministic("eta", level + effect[area])
    with numpyro.plate("data", len(area)):
        numpyro.sample("y", dist.Normal(eta, 0.5), obs=y)


@pytest.mark.parametrize(
    ("sampler", "kind"),
    [
        (gpaug.AugmentedGaussian, "icar"),
        slow(gpaug.EllipticalSlice, "car"),
        slow(gpaug.AugmentedGaussian, "car"),
        slow(gpaug.EllipticalSlice, "icar"),
    ],
)
def test_fields_are_sampled_exactly(sampler, kind, x64, always_sparse):
    """Fields are a block of Gibbs: with Gaussian noise a step of either sampler is a
    draw of the posterior, or a move that leaves it invariant.
    """
    y, count = RNG.normal(size=len(AREA)), 4000
    kernel = sampler(real).wrap_model(conditioned)
    here, data = (
        {"kind": kind, GIBBS_SITES_KWARG: {"scale": jnp.array(s)}} for s in (2.0, 1.0)
    )

    @jax.jit
    def chain():
        before = kernel.init(KEY, 0, None, (AREA, y), here)
        start = kernel.refresh(before, (AREA, y), data)

        def step(state, _):
            state = kernel.sample(state, (AREA, y), data)
            return state, (state.z["eta"], state.z["effect"].sum())

        return before.z, start.z, jax.lax.scan(step, start, None, length=count)[1]

    before, start, (found, sums) = jax.device_get(chain())
    assert isinstance(kernel.structure.form, Sparse)
    for name in ("effect", "level", "eta"):
        np.testing.assert_allclose(start[name], before[name], atol=1e-9)
    prior = 1 + COVARIANCES[kind][np.ix_(AREA, AREA)]
    gain = prior @ np.linalg.inv(prior + 0.25 * np.eye(len(y)))
    cover, sd = prior - gain @ prior, np.sqrt(np.diag(prior - gain @ prior))
    assert np.abs((found.mean(0) - gain @ y) / sd).max() < 0.1
    assert np.abs((np.cov(found.T) - cover) / np.outer(sd, sd)).max() < 0.12
    if kind == "icar":
        np.testing.assert_allclose(sums, 0, atol=1e-6)


@pytest.mark.parametrize(
    ("dtype", "least"), [("float32", 1e-5), slow("float64", 1e-9)], indirect=["dtype"]
)
def test_a_long_curve(dtype, least):
    """A curve is a chain, whose evidence is that of a dense matrix in float64. Its
    precision would lose digits."""
    rng = np.random.default_rng(0)
    between = rng.uniform(0.02, 0.06, 400)
    between[25::50] = least
    points = np.append(0, between.cumsum())
    group = rng.integers(0, 5, len(points))
    y = np.sin(points) + rng.normal(0, 0.5, len(points))

    def model(group, y=None):
        scale = numpyro.sample("scale", dist.HalfNormal(1))
        curve = numpyro.sample("curve", gpaug.RandomWalk2(points, scale, 3.0, 1.0))
        level = numpyro.sample("level", dist.Normal().expand([5]).to_event(1))
        with numpyro.plate("data", len(group)):
            numpyro.sample("y", dist.Normal(curve[:401] + level[group], 0.5), obs=y)

    def exact(scale):
        changes = scale * np.sqrt((between[1:] + between[:-1]) / 2)
        reach = np.maximum(points[:, None] - points[:-1], 0) * np.append(1, changes)
        covariance = reach @ reach.T + 9 + (group[:, None] == group)
        covariance = 2 * np.pi * (covariance + np.eye(401) / 4)
        found = 2 * np.pi * y @ np.linalg.solve(covariance, y)
        prior = float(dist.HalfNormal(1).log_prob(scale))
        return prior - (found + np.linalg.slogdet(covariance)[1]) / 2

    guide = gpaug.AutoLatentGaussian(model)
    guide.setup(group, y)
    assert isinstance(guide.structure.form, Chain)
    single = str(jnp.result_type(float)) == "float32"
    found, slope = jax.jit(
        jax.value_and_grad(
            lambda at: log_density(
                gpaug.collapse(model), (group, y), {}, {"scale": at}
            )[0]
        )
    )(jnp.array(0.7))
    assert float(found) == pytest.approx(exact(0.7), abs=0.01 if single else 1e-7)
    expected = (exact(0.701) - exact(0.699)) / 0.002
    assert float(slope) == pytest.approx(expected, abs=0.2 if single else 1e-3)


def test_sums_over_many_equal_rows():
    """The weight of a level is that of all rows, of which the nodes leave little."""
    i, j = np.nonzero(np.tril(lattice(3)))
    structure = Sparse(
        Layout(9, 1, 1), Pattern.of(9, i, j), np.zeros(9, np.int32).tobytes()
    )
    number, weight = 1_000_000, np.float32(1.5624)
    ones, place = jnp.ones((number, 1)), jnp.arange(number)[:, None] % 9
    rows = Rows(jnp.zeros((number, 0)), jnp.zeros(number, int), ones, ones, place)
    weights = jnp.full(number, weight)
    found = jax.jit(structure.information)(rows, weights, weights)
    expected = number * float(weight)
    np.testing.assert_allclose(found.corner[0, 0, 0], expected, rtol=1e-5)
    np.testing.assert_allclose(found.potential[0, -1], expected, rtol=1e-5)


def test_a_step_is_compiled_for_gpus_as_well(always_sparse, monkeypatch):
    """With what JAX has there: nothing calls the host."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    model, args = MODELS["bym2"]
    svi = gpaug.ConjugateSVI(model, gpaug.AutoLatentGaussian(model))
    state = svi.init(KEY, *args, y=COUNTS)
    assert isinstance(svi.guide.structure.form, Sparse)
    step = jax.jit(lambda state: svi.update(state, *args, y=COUNTS))
    text = export.export(step, platforms=["cuda"])(state).mlir_module()
    calls = set(re.findall(r"custom_call @([\w.]+)", text))
    assert calls == {"cusolver_potrf_ffi"}


@pytest.mark.slow  # one step above is quick
@pytest.mark.parametrize("name", ["bym2", "steps"])
def test_whole_fits_are_compiled_for_gpus_as_well(name, always_sparse, monkeypatch):
    """What is chosen on a GPU gives the same numbers, and nothing calls the host."""
    model, args = MODELS[name]

    def found():
        svi = gpaug.ConjugateSVI(model, gpaug.AutoLatentGaussian(model))
        fit = svi.run(KEY, 60, *args, y=COUNTS, progress_bar=False)
        nested = gpaug.NestedVI(model, num_points=64, progress_bar=False)
        nested.run(KEY, *args, y=COUNTS)
        posteriors = svi.posterior(fit), nested.posterior()
        means = [q.predict_y(*args).mean for q in posteriors]
        return [fit.losses[-1], nested.get_extra_fields()["log_evidence"], *means]

    expected, calls, seen, plain = found(), set(), set(), jit._program

    def exported(self, quick):
        program = plain(self, quick)

        def run(*args, **kwargs):
            shapes = str(jax.tree.map(jnp.shape, jax.tree.leaves(args)))
            if (key := (self, shapes)) not in seen:
                seen.add(key)
                made = export.export(program, platforms=["cuda"])(*args, **kwargs)
                calls.update(re.findall(r"custom_call @([\w.]+)", made.mlir_module()))
            return program(*args, **kwargs)

        return run

    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jit, "_program", exported)
    for one, two in zip(found(), expected, strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-3)
    assert len(seen) > 10
    assert calls == {"cusolver_potrf_ffi"}
