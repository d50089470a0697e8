# SPDX-License-Identifier: Apache-2.0
"""Joint Gaussians along chains, against the same as dense matrices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_gpaug.math import chain_map
from numpyro_gpaug.math.affine import AffineMap, GaussianFactors, Prior
from numpyro_gpaug.math.arrow import ArrowSizes
from numpyro_gpaug.math.arrow_map import Loadings
from numpyro_gpaug.math.chain import ChainPrior
from numpyro_gpaug.math.chain_map import ChainMap
from numpyro_gpaug.math.recurrences import filtered

# Links between the numbers of a step and of the next: a walk and noise of every step,
# an autoregression of a negative coefficient, a trend with a slope, links that change.
WALK, TREND = np.diag([1.0, 0.0]), np.array([[1.0, 0.5], [0.0, -0.9]])


def links_of(link, chains, steps):
    """Links (chains, steps, R, R), of NumPy."""
    link = np.asarray(link)
    one = np.ones((chains, steps, 1, 1)) * link
    one[:, 0] = 0
    return one


def sums(links, corner):
    """What latents are of standard normal numbers."""
    chains, steps, each, _ = links.shape
    total = chains * steps * each
    along = np.zeros((chains, steps, each, chains, steps, each))
    for c in range(chains):
        for t in range(steps):
            along[c, t, :, c, t] = np.eye(each)
            if t:
                before = along[c, t - 1].reshape(each, -1)
                moved = (links[c, t] @ before).reshape(along[c, t].shape)
                along[c, t] += moved
    found = np.eye(total + corner)
    found[:total, :total] = along.reshape(total, total)
    return found


def problem(link, chains=2, steps=7, width=2, rows=30):
    """Random predictors, of numbers along chains and of standard normal ones."""
    links = links_of(link, chains, steps)
    each = links.shape[-1]
    rng = np.random.default_rng(each + 10 * steps + chains)
    # No two are the same, but at the starts.
    links = links * rng.uniform(0.8, 1.2, (chains, steps, 1, 1))
    others = 3 * (width > 1)
    sizes = ArrowSizes(chains * steps, each, width + others, steps)
    own, dense = rng.normal(size=(rows, each)), rng.normal(size=(rows, width))
    # Steps without rows, the last among them; a step with several.
    group = rng.choice(np.arange(0, sizes.groups - 1, 2), rows)
    value = rng.normal(size=(rows, int(others > 0)))
    index = rng.integers(0, max(others, 1), value.shape)
    projection, corner = np.zeros((rows, sizes.total)), sizes.groups * each
    for i in range(rows):
        projection[i, group[i] * each : (group[i] + 1) * each] = own[i]
        projection[i, corner : corner + width] = dense[i]
        np.add.at(projection[i], corner + width + index[i], value[i])
    offset, residual = rng.normal(size=(1, rows)), rng.uniform(size=(1, rows))
    loadings = Loadings(*map(jnp.asarray, (own, group, dense, value, index)))
    made = ChainMap(jnp.asarray(offset), loadings, jnp.asarray(residual), sizes)
    white = (projection @ sums(links, sizes.corner)).T[None]
    dense = AffineMap(*map(jnp.asarray, (offset, white, residual)))
    return made, dense, projection, links


@pytest.mark.parametrize(
    ("link", "chains", "steps", "width"),
    [
        (TREND, 2, 7, 2),
        pytest.param(WALK, 2, 7, 2, marks=pytest.mark.slow),
        pytest.param([[-0.99]], 1, 12, 1, marks=pytest.mark.slow),
        pytest.param(np.diag([1, 0.9, 0]), 1, 5, 0, marks=pytest.mark.slow),
    ],
)
def test_a_chain_is_a_dense_gaussian(x64, monkeypatch, link, chains, steps, width):
    chain, dense, projection, links = problem(link, chains, steps, width)
    rng = np.random.default_rng(0)
    rows, sizes = chain.offset.shape[-1], chain.sizes
    factors = GaussianFactors(
        rng.normal(size=(1, rows)), rng.uniform(0.1, 2, (1, rows))
    )
    noise = rng.normal(size=(3, sizes.total))
    made = sums(links, sizes.corner)
    monkeypatch.setattr(chain_map, "rows_of_blocks", lambda *args: 7)
    left, right = rng.integers(0, rows, (2, 30))
    # Others than of one step vary together too, which pairs of a datum do not need.
    same = chain.loadings.group[left] == chain.loadings.group[right]
    right = np.where(same, right, left)

    @jax.jit
    def both(factors, noise):
        """Numbers of the chain, and of the dense Gaussian."""
        prior = ChainPrior(jnp.zeros((1, sizes.total)), jnp.asarray(links), sizes)
        plain = Prior(jnp.zeros_like(prior.loc), jnp.ones_like(prior.loc))
        natural = jax.tree.map(jnp.add, prior.natural, chain.information(factors))
        other = jax.tree.map(jnp.add, plain.natural, dense.information(factors))
        q, p = natural.moments(), other.moments()
        whole = p.whitener[0].T @ p.whitener[0]
        rows = dense.marginals(p)
        shift, parts = q.carried(jnp.asarray(projection.T)[None])
        spread = jnp.concatenate(parts, 1)
        root = q.spread(jnp.eye(sizes.total))
        covariance = made @ whole @ made.T
        said = jnp.linalg.inv(covariance) - jnp.linalg.inv(made @ made.T)
        moved = (root[:2] @ said)[None]
        zero = chain.information(factors)
        zero = zero._replace(potential=jnp.zeros_like(zero.potential))
        return {
            "mean": (q.mean[0], made @ p.mean[0]),
            "determinant": (q.log_det, p.log_det),
            "divergence": (prior.divergence(q), plain.divergence(p)),
            "pull": (
                prior.pull(q.mean),
                jax.grad(lambda m: prior.divergence(q._replace(mean=m)).sum())(q.mean),
            ),
            "marginals": (chain.marginals(q), rows),
            "pairs": (
                chain.covariances(q, left, right),
                dense.covariances(p, left, right),
            ),
            "predictors": (chain.covariance(q), dense.covariance(p)),
            "shift": (dense.offset + shift, rows.mean),
            "carried": (spread.mT @ spread, dense.covariance(p)),
            "covariance": (root.T @ root, covariance),
            "noise": (q.white(q.spread(noise)), noise),
            "precision": (
                jnp.stack([zero.moved(z[None]).potential[0] for z in root[:2]]),
                moved[0],
            ),
        }

    for name, (found, expected) in both(factors, noise).items():
        leaves = zip(*map(jax.tree.leaves, (found, expected)), strict=True)
        for x, y in leaves:
            np.testing.assert_allclose(x, y, rtol=1e-8, atol=1e-10, err_msg=name)


@pytest.mark.parametrize(
    ("chains", "steps"),
    [(3, 12)] + [pytest.param(2, n, marks=pytest.mark.slow) for n in (4, 7, 12)],
)
def test_chains_that_end_elsewhere(x64, chains, steps):
    chain, dense, _, links = problem(TREND)
    rows, sizes = chain.offset.shape[-1], chain.sizes
    factors = GaussianFactors(*np.random.default_rng(0).uniform(size=(2, 1, rows)))
    new = ArrowSizes(chains * steps, 2, 6, steps)
    wanted = links_of(0.9 * TREND, chains, steps)
    wanted[:2, :7] = links[:, :steps]
    numbers = np.arange(sizes.groups * 2).reshape(2, 7, 2)
    places = np.full((chains, steps, 2), -1)
    places[:2, : min(steps, 7)] = numbers[:, : min(steps, 7)]
    # A latent of the corner is not known either.
    corner = [*range(numbers.size, sizes.total), -1]
    places = np.concatenate([places.ravel(), corner])

    @jax.jit
    def both(factors):
        prior = ChainPrior(jnp.zeros((1, sizes.total)), jnp.asarray(links), sizes)
        prior = prior.natural
        natural = jax.tree.map(jnp.add, prior, chain.information(factors))
        white = dense.information(factors)
        eye = jnp.eye(sizes.total)
        p = white._replace(precision=white.precision + eye).moments()
        q = natural.moments().extended(new, places, jnp.asarray(wanted))
        return q, q.spread(jnp.eye(q.rank)), p.extended(places)

    q, root, p = both(factors)
    made = sums(wanted, new.corner)
    covariance = made @ (p.whitener[0].T @ p.whitener[0]) @ made.T
    np.testing.assert_allclose(q.mean[0], made @ p.mean[0], atol=1e-10)
    np.testing.assert_allclose(root.T @ root, covariance, atol=1e-10)
    cut = new.groups * 2
    blocks = np.einsum("gij,gik->gjk", q.roots[0], q.roots[0])
    blocks += np.einsum("gre,gse->grs", q.shrunk[0], q.shrunk[0])
    whole = covariance[:cut, :cut].reshape(new.groups, 2, new.groups, 2)
    np.testing.assert_allclose(
        blocks, whole[np.arange(new.groups), :, np.arange(new.groups)], atol=1e-10
    )


def test_a_walk_that_is_hardly_seen_in_single_precision():
    """One step in 5000 is looked at: the precision of a step is near 1e-4, the
    difference of numbers that are 1 and 1.0001."""
    steps = 20_000
    own = np.zeros((1, steps, 1, 1))
    own[0, 2500::5000] += 1e-4
    links = links_of([[1.0]], 1, steps)
    exact, e = np.zeros(steps), np.inf
    for t in range(steps):
        e = own[0, t, 0, 0] + (e / (1 + e) if t else 1)
        exact[t] = e
    found = jax.jit(filtered)(*(jnp.asarray(x, jnp.float32) for x in (own, links)))
    assert exact.min() < 4e-4
    np.testing.assert_allclose(found[0, :, 0, 0], exact, rtol=2e-4)


def test_derivatives_of_a_chain_that_is_not_seen_at_its_end():
    """Of the last step's precision: each is known as well as by what is before it."""
    own, links = jnp.zeros((1, 11, 1, 1)), links_of([[1.0]], 1, 11)
    slopes = jax.jit(jax.grad(lambda own: filtered(own, links)[0, -1].sum()))(own)
    # 1 / E is the variance, 11 steps of one.
    np.testing.assert_allclose(slopes[0, 0, 0, 0], 1 / 121, rtol=1e-5)
    assert np.isfinite(slopes).all()


def test_a_precision_that_is_not_positive_definite_is_none():
    sizes = ArrowSizes(9, 1, 1, 9)
    links = jnp.asarray(links_of([[1.0]], 1, 9))
    natural = ChainPrior(jnp.zeros((1, 10)), links, sizes).natural
    bad = natural._replace(groups=natural.groups.at[0, 4].set(-3.0))
    log_det = jax.jit(lambda natural: natural.moments().log_det)
    assert np.isfinite(log_det(natural)).all()
    assert np.isnan(log_det(bad)).all()
