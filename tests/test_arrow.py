# SPDX-License-Identifier: Apache-2.0
"""Joint Gaussians whose precision is an arrow, against the same as dense matrices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_gpaug.math import arrow_map
from numpyro_gpaug.math.affine import AffineMap, GaussianFactors, Prior
from numpyro_gpaug.math.arrow import ArrowPrior, ArrowSizes
from numpyro_gpaug.math.arrow_map import ArrowMap, Loadings
from numpyro_gpaug.math.ordering import Order
from numpyro_gpaug.math.pairs import PairedMap, PairFactors


def problem(each, width, singles, rows=23, groups=5, others=4):
    """Random predictors, as an arrow and as a dense matrix."""
    rng = np.random.default_rng(each + 10 * width + 100 * singles)
    sizes = ArrowSizes(groups, each, width + others * (singles > 0))
    rest = sizes.corner - width
    own, dense = rng.normal(size=(rows, each)), rng.normal(size=(rows, width))
    # A group without rows; places in the corner that a row looks at twice.
    group = rng.integers(0, groups - 1, rows)
    value = rng.normal(size=(rows, singles))
    index = rng.integers(0, max(rest, 1), (rows, singles))
    projection = np.zeros((rows, sizes.total))
    corner = groups * each
    for i in range(rows):
        projection[i, group[i] * each : (group[i] + 1) * each] = own[i]
        projection[i, corner : corner + width] = dense[i]
        np.add.at(projection[i], corner + width + index[i], value[i])
    offset, residual = rng.normal(size=(1, rows)), rng.uniform(size=(1, rows))
    loadings = Loadings(*map(jnp.asarray, (own, group, dense, value, index)))
    made = ArrowMap(jnp.asarray(offset), loadings, jnp.asarray(residual), sizes)
    return made, AffineMap(*map(jnp.asarray, (offset, projection.T[None], residual)))


def whole(natural):
    """Natural parameters as one dense matrix."""
    sizes, cut = natural.sizes, natural.sizes.groups * natural.sizes.each
    found = np.zeros((sizes.total, sizes.total))
    for g in range(sizes.groups):
        part = slice(g * sizes.each, (g + 1) * sizes.each)
        found[part, part] = natural.groups[0, g]
        found[part, cut:] = natural.border[0, g]
        found[cut:, part] = natural.border[0, g].T
    found[cut:, cut:] = natural.corner[0]
    return found


SHAPES = [(1, 0, 0), (2, 3, 0), (1, 2, 1), (2, 0, 2), (7, 2, 1)]


def cases(*quick):
    """Shapes, with rows at once and in blocks; what is not quick is slow."""
    every = [(shape, blocks) for blocks in (False, True) for shape in SHAPES]
    return pytest.mark.parametrize(
        ("shape", "in_blocks"),
        [x if x in quick else pytest.param(*x, marks=pytest.mark.slow) for x in every],
        indirect=["in_blocks"],
    )


@pytest.fixture
def in_blocks(request, monkeypatch):
    """Rows at once, or in blocks of five."""
    if request.param:
        monkeypatch.setattr(arrow_map, "rows_of_blocks", lambda *args, **kwargs: 5)
    return request.param


# No corner; groups of several and a corner, with and without singles.
@cases(((1, 0, 0), False), ((2, 3, 0), True), ((7, 2, 1), False))
def test_an_arrow_is_a_dense_gaussian(x64, shape, in_blocks):
    arrow, dense = problem(*shape)
    # In blocks, and of another order.
    arrow = arrow.in_order()
    assert (arrow.order is not None) is in_blocks
    rng = np.random.default_rng(0)
    rows = arrow.offset.shape[-1]
    factors = GaussianFactors(
        rng.normal(size=(1, rows)), rng.uniform(0.1, 2, (1, rows))
    )
    noise = rng.normal(size=(3, arrow.sizes.total))

    def gradient_in_means(prior, q):
        return jax.grad(lambda m: prior.divergence(q._replace(mean=m)).sum())(q.mean)

    @jax.jit
    def both(factors, noise):
        """Numbers of the arrow, and of the dense Gaussian."""
        prior = ArrowPrior(jnp.zeros((1, arrow.sizes.total)), arrow.sizes)
        plain = Prior(jnp.zeros_like(prior.loc), jnp.ones_like(prior.loc))
        wide = Prior(noise[:1], jnp.exp(noise[1:2]))
        natural = jax.tree.map(jnp.add, prior.natural, arrow.information(factors))
        other = jax.tree.map(jnp.add, plain.natural, dense.information(factors))
        q, p = natural.moments(), other.moments()
        left, right = rng.integers(0, rows, (2, 30))
        # An affine map that is not of this form, under the same Gaussian.
        shift, parts = q.carried(dense.projection)
        spread = jnp.concatenate(parts, 1)
        _, (rows_of_dense,) = p.carried(dense.projection)
        carried = dense.projection.mT @ p.whitener.mT @ rows_of_dense
        root = q.spread(jnp.eye(arrow.sizes.total))
        covariance = p.whitener[0].T @ p.whitener[0]
        marginals = dense.marginals(p)
        pairs = {
            "potential": (natural.potential, other.potential),
            "mean": (q.mean, p.mean),
            "determinant": (q.log_det, p.log_det),
            "divergence": (prior.divergence(q), plain.divergence(p)),
            "pull": (prior.pull(q.mean), gradient_in_means(plain, p)),
            "pull of another": (wide.pull(p.mean), gradient_in_means(wide, p)),
            "marginals": (arrow.marginals(q), marginals),
            "pairs": (
                arrow.covariances(q, left, right),
                dense.covariances(p, left, right),
            ),
            "shift": (dense.offset + shift, marginals.mean),
            "carried": (spread.mT @ spread, carried),
            "covariance": (root.T @ root, covariance),
            "noise": (q.white(q.spread(noise)), noise),
        }
        return pairs, natural, other.precision[0]

    pairs, natural, precision = both(factors, noise)
    np.testing.assert_allclose(whole(natural), precision, atol=1e-12)
    for name, (found, expected) in pairs.items():
        leaves = zip(*map(jax.tree.leaves, (found, expected)), strict=True)
        for x, y in leaves:
            np.testing.assert_allclose(x, y, rtol=1e-7, atol=1e-11, err_msg=name)


@pytest.mark.parametrize(("rows", "groups"), [(1, 1), (23, 5), (300, 2**31 - 1)])
def test_rows_in_the_order_of_groups(rows, groups):
    group = np.random.default_rng(0).integers(0, groups, rows)
    order = Order.by_group(jnp.asarray(group), groups, 16)
    assert len(order.rows) % 16 == 0
    np.testing.assert_array_equal(np.sort(order.rows[:rows]), np.arange(rows))
    ordered = np.asarray(order.taken(jnp.asarray(group)))
    # Of very many groups near ones share the number that is sorted.
    near = max(1, groups * rows // 2**31)
    assert np.all(np.diff(ordered[:rows]) > -2 * near)
    np.testing.assert_array_equal(order.back(jnp.asarray(ordered)), group)
    assert order.weights(jnp.ones(rows)).sum() == rows


@cases(((2, 3, 0), False), ((1, 2, 1), True))
def test_pairs_of_one_group(x64, shape, in_blocks):
    arrow, dense = problem(*shape)
    group = np.asarray(arrow.loadings.group)
    rng = np.random.default_rng(1)
    left = np.arange(0, 12)
    right = np.array([rng.choice(np.flatnonzero(group == g)) for g in group[left]])
    # One that looks at no group.
    own = arrow.loadings.own.at[right[0]].set(0).at[left[1]].set(0)
    each, groups = arrow.sizes.each, arrow.sizes.groups
    projection = dense.projection.at[0, : each * groups, [right[0], left[1]]].set(0)
    loadings = arrow.loadings._replace(own=own)
    arrow = ArrowMap(arrow.offset, loadings, arrow.residual, arrow.sizes).in_order()
    dense = dense._replace(projection=projection)
    pair = jnp.asarray(left), jnp.asarray(right)
    arrow, dense = PairedMap(arrow, *pair), PairedMap(dense, *pair)
    rows = arrow.single.offset.shape[-1]
    factors = PairFactors(
        rng.normal(size=(1, rows)),
        rng.uniform(2, 3, (1, rows)),
        rng.normal(size=(1, len(left))) * 0.2,
    )

    @jax.jit
    def both(factors):
        sizes = arrow.single.sizes
        found, expected = arrow.information(factors), dense.information(factors)
        prior = ArrowPrior(jnp.zeros((1, sizes.total)), sizes)
        natural = jax.tree.map(jnp.add, prior.natural, found)
        eye = jnp.eye(sizes.total)
        other = expected._replace(precision=expected.precision + eye)
        at, there = natural.moments(), other.moments()
        return found, expected, arrow.marginals(at), dense.marginals(there)

    found, expected, at, there = both(factors)
    np.testing.assert_allclose(found.potential, expected.potential, atol=1e-12)
    np.testing.assert_allclose(whole(found), expected.precision[0], atol=1e-12)
    for x, y in zip(at, there, strict=True):
        np.testing.assert_allclose(x, y, atol=1e-11)
