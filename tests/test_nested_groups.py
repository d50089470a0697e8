# SPDX-License-Identifier: Apache-2.0
"""Groups weighed apart: found by asking the model, weighed without bias, and composed
to draws of the posterior."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from scipy import special, stats

import numpyro_gpaug as gpaug
from numpyro_gpaug.gaussians.base import Layout
from numpyro_gpaug.infer.nested.group_draws import (
    _candidates,
    _chosen,
    corners_of,
    draws_at,
    group_of_terms,
)
from numpyro_gpaug.infer.nested.refining import corner_mean
from numpyro_gpaug.infer.nested.setup import CollapsedBounds
from numpyro_gpaug.model import costs
from numpyro_gpaug.model.arguments import Arguments
from tests.conftest import slow

KEY = jax.random.key(0)
RNG = np.random.default_rng(0)
G = 60
LABELS = (RNG.random(2 * G) < special.expit(-1 + RNG.normal(0, 2, G).repeat(2))) * 1


def in_groups(code, y=None, *, centre):
    """Binary data, two of each group; with a common effect or without."""
    tau = numpyro.sample("tau", dist.HalfNormal(2.0))
    a = numpyro.sample("a", dist.Normal(0, 2)) if centre else -1.0
    with numpyro.plate("groups", G):
        u = numpyro.sample("u", dist.Normal(0, tau))
    with numpyro.plate("data", len(code)):
        numpyro.sample("y", dist.Bernoulli(logits=a + u[code]), obs=y)


def exactly(centre):
    """Log evidence, and moments of tau, a and of the first group's u, by sums."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(61)
    weights = weights / weights.sum()
    taus = np.linspace(1e-3, 9, 300)
    levels = np.linspace(-5, 3, 161) if centre else np.array([-1.0])
    ones = LABELS.reshape(G, 2).sum(1)
    logits = levels[:, None, None] + taus[None, :, None] * nodes
    each = [ones_ * logits - 2 * np.logaddexp(0, logits) for ones_ in range(3)]
    single = [special.logsumexp(x, axis=-1, b=weights) for x in each]
    total = sum((ones == k).sum() * x for k, x in enumerate(single))
    total = total - taus**2 / 8 + np.log(2 / np.sqrt(8 * np.pi) * np.diff(taus)[0])
    if centre:
        prior = -(levels**2) / 8 - np.log(np.sqrt(8 * np.pi) / np.diff(levels)[0])
        total = total + prior[:, None]
    evidence = special.logsumexp(total)
    mass = np.exp(total - evidence)
    first = each[ones[0]] - single[ones[0]][..., None]
    u = (weights * np.exp(first) * taus[None, :, None] * nodes).sum(-1)
    tau = (mass.sum(0) * taus).sum()
    spread = np.sqrt((mass.sum(0) * (taus - tau) ** 2).sum())
    return evidence, tau, spread, (mass * u).sum(), (mass.sum(1) * levels).sum()


@pytest.mark.parametrize("centre", [slow(True), False])
def test_evidence_and_moments_are_those_of_sums(centre, monkeypatch):
    monkeypatch.setattr(costs, "_OVERHEAD", -np.inf)
    code = RNG.permutation(2 * G)
    run = gpaug.NestedVI(in_groups, num_points=128, progress_bar=False)
    run.run(KEY, np.arange(2 * G)[code] // 2, LABELS[code], centre=centre)
    assert run._run.weighted.alike == 8
    fields, table = run.get_extra_fields(), run.summary()
    evidence, tau, spread, u, level = exactly(centre)
    assert fields["khat"] < 0.5
    error = fields["log_evidence_error"]
    assert error < 0.2
    np.testing.assert_allclose(fields["log_evidence"], evidence, atol=3 * error)
    np.testing.assert_allclose(table.loc["tau", "mean"], tau, atol=0.3 * spread)
    np.testing.assert_allclose(table.loc["tau", "sd"], spread, rtol=0.3)
    np.testing.assert_allclose(table.loc["u[0]", "mean"], u, atol=0.3)
    if centre:
        np.testing.assert_allclose(table.loc["a", "mean"], level, atol=0.2)


def terms_of(group, shared=None):
    """Terms that look at one group each, at the corner, and perhaps at a second."""

    def terms(z):
        own, corner = z[:, : G * 2].reshape(-1, G, 2).sum(-1), z[:, -1:]
        padded = np.concatenate([own, np.zeros((len(z), 1))], 1)
        values = np.sin(padded[:, group] + corner)
        if shared is not None:
            values[:, 0] += 0.1 * own[:, shared]
        return values.astype(np.float32)

    return terms


def test_groups_are_told_by_values():
    sizes = Layout(G, 2, 1)
    group = RNG.integers(0, G + 1, 500)
    group[0] = 3
    found = group_of_terms(terms_of(group), sizes, np.random.default_rng(1))
    np.testing.assert_array_equal(found, group)
    other = (group[0] + 7) % G
    assert group_of_terms(terms_of(group, other), sizes, RNG) is None


@pytest.mark.slow
def test_groups_are_told_where_the_posterior_is():
    """With censored times and a wide level, densities under the prior are zero or one
    for any effect of a group: there no datum seems to depend on a group.
    """
    groups, rng = 48, np.random.default_rng(3)
    time = np.exp(10 + 0.5 * rng.normal(size=groups)) * rng.exponential(size=groups)
    seen = np.arange(groups) % 2

    def model(time):
        level = numpyro.sample("level", dist.Normal(0, 300))
        with numpyro.plate("groups", groups):
            a = numpyro.sample("a", dist.Normal(0, 2.0))
            eta = jnp.log(time) - level - a
            numpyro.factor("time", seen * eta - jnp.exp(eta))

    nested = gpaug.NestedVI(model, progress_bar=False)
    nested.run(jax.random.key(3), time.astype(np.float32))
    level, a = np.linspace(4, 16, 201), np.linspace(-16, 16, 401)
    eta = np.log(time)[:, None, None] - level[:, None] - a
    terms = seen[:, None, None] * eta - np.exp(eta) + stats.norm(0, 2).logpdf(a)
    logs = (special.logsumexp(terms, -1) + np.log(a[1] - a[0])).sum(0)
    logs += stats.norm(0, 300).logpdf(level)
    evidence = special.logsumexp(logs) + np.log(level[1] - level[0])
    assert nested.certified
    found = nested.get_extra_fields()["log_evidence"]
    np.testing.assert_allclose(found, evidence, atol=0.2)


def test_groups_are_told_where_terms_have_steps():
    sizes, group = Layout(G, 1, 0), RNG.integers(0, G, 2000)
    rng = np.random.default_rng(2)
    found = group_of_terms(lambda z: 0.0 + (z[:, group] > 1), sizes, rng)
    np.testing.assert_array_equal(found, group)


@pytest.mark.parametrize(("each", "number"), [(1, 8), (2, 16), (3, 16), (6, 32)])
def test_candidates_have_the_density_that_is_said(each, number):
    shifts = jnp.asarray(RNG.random((20_000, each)), jnp.float32)
    own, over = _candidates(shifts, number)
    assert own.shape == over.shape == (number, 20_000, each)
    weights = np.exp(-np.asarray(over).sum(-1))
    np.testing.assert_allclose(weights.mean(), 1, rtol=0.01)
    products = np.einsum("jgr,jgs,jg->rs", own, own, weights) / weights.size
    np.testing.assert_allclose(products, np.eye(each), atol=0.04)
    # A lattice rule has this variance: for one number far below that of chance.
    assert np.log(weights.mean(0)).var() < (1e-4 if each == 1 else 0.05 * each)


@pytest.mark.parametrize(("each", "number", "times"), [(1, 8, 1000), (2, 16, 30)])
def test_means_over_candidates_vary_far_less_than_one_weight(each, number, times):
    """Binary data under the Gaussian that has the moments of their posterior."""
    rng = np.random.default_rng(1)
    X = rng.normal(size=(2 * each, each))
    X[:, 0] = 1

    def log_target(z):
        logits = 2.5 * z @ X.T
        labels = np.arange(2 * each) != 2
        data = labels * logits - np.logaddexp(0, logits)
        return data.sum(-1) - np.square(z).sum(-1) / 2

    z = rng.normal(size=(100_000, each))
    shares = special.softmax(log_target(z) + np.square(z).sum(-1) / 2)
    mean = shares @ z
    root = np.linalg.cholesky(((z - mean) * shares[:, None]).T @ (z - mean))
    single = log_target(mean + z @ root.T) + np.square(z).sum(-1) / 2
    shifts = jnp.asarray(rng.random((20_000, each)), jnp.float32)
    own, over = (np.asarray(x, float) for x in _candidates(shifts, number))
    weights = log_target(mean + own @ root.T) + np.square(own).sum(-1) / 2
    several = special.logsumexp(weights - over.sum(-1), axis=0)
    assert times * several.var() < single.var()


def test_draws_choose_candidates_by_their_shares():
    shares = np.array([0.1, 0.0, 0.6, 0.3])
    picks = jnp.asarray(RNG.random(40_000), jnp.float32)
    wide = jnp.broadcast_to(jnp.asarray(shares[:, None], jnp.float32), (4, 40_000))
    chosen = np.asarray(_chosen(wide, picks))
    assert chosen.shape == (4, 40_000)
    for draw in chosen:
        counts = np.bincount(draw, minlength=4) / 40_000
        np.testing.assert_allclose(counts, shares, atol=0.01)


def test_corners_share_draws_evenly():
    assert [corners_of(n, Layout(9, 1, 1)) for n in (1, 7, 16, 24, 20)] == [
        1, 1, 2, 3, 2,
    ]  # fmt: skip
    assert draws_at(Layout(9, 1, 1), 16) == draws_at(Layout(9, 3, 1), 8) == 16
    assert draws_at(Layout(9, 1, 1), 15) == 8


def test_corners_move_only_where_their_mean_is_sure():
    corner = RNG.normal(size=(200, 2, 2))
    log_weights = corner[..., 0] - 0.5  # for a normal with its mean moved by one
    found = corner_mean(corner, log_weights)
    np.testing.assert_allclose(found, [1, 0], atol=0.25)
    assert found[1] == 0


def test_the_model_is_read_again_if_further_data_cross_groups() -> None:
    """Groups of the first data stayed groups for data of the same shapes in which each
    observation depends on two of them."""

    def two_of_each(one, other, y=None):
        tau = numpyro.sample("tau", dist.HalfNormal(2.0))
        with numpyro.plate("groups", G):
            u = numpyro.sample("u", dist.Normal(0, tau))
        with numpyro.plate("data", len(one)):
            numpyro.sample("y", dist.Bernoulli(logits=u[one] - u[other] / 2), obs=y)

    bounds, code = CollapsedBounds(two_of_each, projected=True), np.repeat(range(G), 2)

    def at(*args):
        return bounds.at(Arguments.split(args, {}), args, {})

    first = at(code, code, LABELS)
    assert at(code, code, 1 - LABELS) is first
    crossed = at(code, code[::-1].copy(), LABELS).structure.form
    assert first.structure.form.independent.groups == G
    assert crossed.independent.groups == 0
    with pytest.raises(ValueError, match="outside the support"):
        at(code, code, 2 * LABELS)
