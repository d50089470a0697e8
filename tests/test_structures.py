# SPDX-License-Identifier: Apache-2.0
"""Structures of Gaussians against dense matrices."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_gpaug.gaussians import Chain, Dense, Groups, Layout, chain, groups
from numpyro_gpaug.gaussians.base import GaussianFactors
from numpyro_gpaug.gaussians.rows import Order, Rows
from numpyro_gpaug.math.linalg import precise
from numpyro_gpaug.math.recurrences import filtered, split
from numpyro_gpaug.testing import check_structure

# Links between the latents of a step and the next: a walk with noise at every step, and
# a trend with a slope.
WALK, TREND = np.diag([1.0, 0.0]), np.array([[1.0, 0.5], [0.0, -0.9]])
# Links, whiteners of the noise, and units.
STATE = np.array([[0.7, -0.4, 1.5, 0.0, 2.0], [0.6, 0.9, -1.0, 2.0, 0.5]])


def links_of(link, chains, steps, varying=0.2):
    """Links (chains, steps, R, R) that differ from step to step."""
    scales = 1 + varying * np.cos(np.add.outer(np.arange(chains), 3 * np.arange(steps)))
    link, (size, width) = np.asarray(link), np.shape(link)
    found = link * scales[..., None, None]
    found[:, 0, :, :size] = 0
    if size < width:
        found[..., : 2 * size] = np.tril(found[..., : 2 * size], size)
    return found


def precision_of(structure, links):
    """The precision of numbers along chains, and of standard normal ones."""
    groups, each, _, steps = structure.layout
    noise = jnp.eye(structure.size)
    if links is not None:
        later = np.flatnonzero(np.arange(groups) % steps)[:, None, None]
        here, before = np.arange(each)[:, None], np.arange(each) - each
        links, whitener = split(links.reshape(groups, each, -1))
        along = links[later[:, 0, 0]]
        noise = noise.at[later * each + here, later * each + before].set(-along)
        if whitener is not None:
            own = np.arange(groups)[:, None, None] * each
            white = jnp.eye(structure.size)
            white = white.at[own + here, own + here.T].set(jnp.tril(whitener))
            noise = white @ noise
    return noise.T @ noise


def correlated(layout):
    """Chains whose noise has covariances of its own."""
    return Chain(layout, correlated=True)


def places_of(old, new):
    """Return the places of latents among those of another layout: steps of chains by
    their number, groups and others in turn.
    """
    shape = old.groups // old.steps, old.steps, old.each
    numbers = np.arange(old.groups * old.each).reshape(shape)
    found = np.full((new.groups // new.steps, new.steps, new.each), -1)
    part = tuple(slice(min(x)) for x in zip(numbers.shape, found.shape, strict=True))
    found[part] = numbers[part]
    rest = numbers.size + np.arange(new.others)
    return np.concatenate([found.ravel(), np.where(rest < old.size, rest, -1)])


def cases():
    for quick, kind, layout, other, link in CASES:
        for dtype in ("float32", "float64"):
            marks = () if quick and dtype == "float32" else pytest.mark.slow
            name = f"{kind.__name__}{layout}-{dtype}"
            yield pytest.param(dtype, kind, layout, other, link, marks=marks, id=name)


# Whether the case is quick, its structure, its layout, the layout of another one, and
# the link of a chain.
CASES = [
    (False, Dense, (0, 1, 5), (0, 1, 7), None),
    (False, Groups, (5, 1, 0), None, None),
    (True, Groups, (5, 2, 4), (7, 2, 6), None),
    (False, Groups, (4, 7, 3), (4, 7, 3), None),
    (False, Groups, (5, 2, 1), None, None),
    # Quick in test_chain_models.py, test_scanned_models.py and test_joint_gibbs.py.
    (False, Chain, (14, 2, 4, 7), (36, 2, 6, 12), TREND),
    (False, Chain, (14, 2, 3, 7), (8, 2, 4, 4), WALK),
    (False, Chain, (14, 2, 3, 7), (14, 2, 3, 7), TREND),
    (False, Chain, (12, 1, 1, 12), None, [[-0.99]]),
    (False, Chain, (5, 3, 0, 5), None, np.diag([1, 0.9, 0])),
    (True, correlated, (14, 2, 4, 7), (36, 2, 6, 12), STATE),
]


@pytest.mark.parametrize(
    ("dtype", "kind", "layout", "other", "link"), [*cases()], indirect=["dtype"]
)
def test_a_structure_is_a_dense_gaussian(dtype, monkeypatch, kind, layout, other, link):
    for module in (groups, chain):
        monkeypatch.setattr(module, "rows_of_blocks", lambda *args, **kwargs: 5)
    made = [None if x is None else Layout(*x) for x in (layout, other)]
    links = [
        None if link is None or x is None
        else links_of(link, x.groups // x.steps, x.steps)
        for x in made
    ]  # fmt: skip
    if other is not None:
        other = kind(made[1]), links[1], places_of(*made)
    check_structure(
        kind(made[0]), links[0], precision=precision_of, other=other, dtype=dtype
    )


def test_information_about_a_chain_is_kept_where_its_prior_changes():
    layout = Layout(6, 2, 1, 6)
    links = [jnp.asarray(k * links_of(STATE, 1, 6)) for k in (1.0, 2.0)]

    def given(prior):
        # The same function of the numbers, in any units.
        own = jnp.arange(1.0, 13).reshape(6, 2) * prior.links[0, ..., -1]
        rows = Rows(
            own, jnp.arange(6), jnp.ones((6, 1)), own[:, :0], jnp.zeros((6, 0), int)
        )
        one = jnp.ones(6)
        found = prior.structure.information(rows, one, one)
        return jax.tree.map(jnp.add, prior.natural, found)

    @jax.jit
    def rebased(*links):
        before, after = (correlated(layout).prior(float, x) for x in links)
        return after.rebased(given(before)), given(after)

    for x, y in zip(*rebased(*links), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-6)


@pytest.mark.parametrize(("rows", "groups"), [(1, 1), (23, 5), (300, 2**31 - 1)])
def test_rows_in_the_order_of_groups(rows, groups):
    group = np.random.default_rng(0).integers(0, groups, rows)

    @jax.jit
    def everything(group):
        order = Order.by_group(group, groups, 16)
        ordered = order.taken(group)
        total = order.weights(jnp.ones(rows)).sum()
        return order.rows, ordered, order.back(ordered), total

    places, ordered, back, total = map(np.asarray, everything(group))
    assert len(places) % 16 == 0
    np.testing.assert_array_equal(np.sort(places[:rows]), np.arange(rows))
    # With very many groups, near ones share a sorted number.
    near = max(1, groups * rows // 2**31)
    assert np.all(np.diff(ordered[:rows]) > -2 * near)
    np.testing.assert_array_equal(back, group)
    assert total == rows


def test_variances_of_many_rows_are_sums_of_covariances(x64, monkeypatch):
    """The exception is cancellation: an intercept, and members of all groups whose
    standard deviation is ``size`` times that of the noise.
    """
    monkeypatch.setattr(groups, "rows_of_blocks", lambda *args, **kwargs: 64)
    rng, structure = np.random.default_rng(0), Groups(Layout(20, 1, 62))
    group, place = rng.integers(0, 20, 200), rng.integers(0, 60, (200, 1))

    def map_of(rows):
        zeros = jnp.zeros_like(rows.own[:, 0])
        given = SimpleNamespace(offset=zeros, residual=zeros, rows=rows)
        return structure.map(given)

    @jax.jit
    def everything(rows):
        zeros, ones = jnp.zeros((1, 200)), jnp.ones((1, 200))
        added = map_of(rows).information(GaussianFactors(zeros, ones))
        natural = jax.tree.map(jnp.add, structure.standard(jnp.float64), added)
        q = natural.moments()
        terms = jnp.stack(groups._terms(q, rows))
        return q, map_of(rows).marginals(q).variance[0], terms

    single = jax.jit(precise(lambda rows, q: map_of(rows).marginals(q).variance[0]))
    for size in (1.0, 3e3):
        own, value = np.full((2, 200, 1), size)
        dense = np.full((200, 2), [3 * size, 1.0])
        rows = Rows(own, group, dense, value, place)
        q, found, terms = everything(rows)
        whole = np.zeros((200, structure.size))
        whole[np.arange(200), group] = whole[np.arange(200), 22 + place[:, 0]] = size
        whole[:, 20:22] = dense
        covariance = np.linalg.inv(np.eye(structure.size) + whole.T @ whole)
        wanted = np.einsum("ni,ij,nj->n", whole, covariance, whole)
        np.testing.assert_allclose(found, wanted, rtol=1e-7)
        found = single(*jax.tree.map(_float32, (rows, q)))
        np.testing.assert_allclose(found, wanted, rtol=1e-3)
        assert (np.abs(terms).sum(0).max() > 100 * wanted.min()) == (size > 1)


def _float32(x):
    x = np.asarray(x)
    return x.astype("float32") if x.dtype.kind == "f" else x


def test_a_walk_that_is_hardly_seen_in_single_precision():
    """One step in 5000 has data: the precision of a step is near 1e-4, the difference
    of numbers that are 1 and 1.0001.
    """
    steps = 20_000
    own = np.zeros((1, steps, 1, 1))
    own[0, 2500::5000] += 1e-4
    links = links_of([[1.0]], 1, steps, 0)
    exact, e = np.zeros(steps), np.inf
    for t in range(steps):
        e = own[0, t, 0, 0] + (e / (1 + e) if t else 1)
        exact[t] = e
    found = jax.jit(filtered)(*(jnp.asarray(x, jnp.float32) for x in (own, links)))
    assert exact.min() < 4e-4
    np.testing.assert_allclose(found[0, :, 0, 0], exact, rtol=2e-4)


def test_derivatives_of_a_chain_that_is_not_seen_at_its_end():
    """The derivative is that of the last step's precision: earlier steps determine each
    later one.
    """
    own, links = jnp.zeros((1, 11, 1, 1)), links_of([[1.0]], 1, 11, 0)
    slopes = jax.jit(jax.grad(lambda own: filtered(own, links)[0, -1].sum()))(own)
    # The variance is 1 / E, after 11 unit steps.
    np.testing.assert_allclose(slopes[0, 0, 0, 0], 1 / 121, rtol=1e-5)
    assert np.isfinite(slopes).all()


def test_a_precision_that_is_not_positive_definite_is_none():
    links = jnp.asarray(links_of([[1.0]], 1, 9))
    natural = Chain(Layout(9, 1, 1, 9)).prior(links.dtype, links).natural
    bad = natural._replace(groups=natural.groups.at[0, 4].set(-3.0))
    log_det = jax.jit(lambda natural: natural.moments().log_det)
    assert np.isfinite(log_det(natural)).all()
    assert np.isnan(log_det(bad)).all()
