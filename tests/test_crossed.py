# SPDX-License-Identifier: Apache-2.0
"""Crossed effects with very many levels on both sides: moments without a factor of the
precision, against dense matrices and the exact form."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import numpyro_gpaug as gpaug
from numpyro_gpaug.errors import NotConjugateError
from numpyro_gpaug.gaussians import Iterative, Layout
from numpyro_gpaug.gaussians.base import GaussianFactors
from numpyro_gpaug.gaussians.rows import Rows
from numpyro_gpaug.math.linalg import precise
from numpyro_gpaug.math.sparse_pattern import Pattern
from numpyro_gpaug.model.costs import FIT, Purpose
from numpyro_gpaug.model.reading import inspect_joint
from tests.conftest import enable_x64

KEY = jax.random.key(0)


def problem(sides, number, dtype):
    """Factors on random predictors of one node of each side and two others."""
    rng = np.random.default_rng(0)
    begins = np.cumsum([0, *sides])
    place = np.stack(
        [b + rng.integers(0, m, number) for b, m in zip(begins, sides, strict=False)], 1
    )
    ends = [(s, t) for s in range(len(sides)) for t in range(s)]
    rows, columns = (np.concatenate([place[:, e[k]] for e in ends]) for k in (0, 1))
    structure = Iterative(
        Layout(begins[-1], 1, 2), Pattern.of(begins[-1], rows, columns)
    )
    value = rng.normal(1, 0.2, place.shape)
    dense = np.stack([np.ones(number), rng.normal(size=number)], 1)
    precision, potential = rng.uniform(0.5, 1.5, number), rng.normal(size=number)
    projection = np.zeros((structure.size, number))
    for s in range(len(sides)):
        projection[place[:, s], np.arange(number)] = value[:, s]
    projection[begins[-1] :] = dense.T
    known = jax.tree.map(
        lambda x: jnp.asarray(x, dtype), (dense, value, precision, potential)
    )
    empty = jnp.zeros((number, 0), dtype), jnp.zeros(number, int)
    read = Rows(*empty, *known[:2], jnp.asarray(place))
    return structure, read, known[2:], (projection, precision, potential)


def moments_at(structure, rows, factors, scale=1.0):
    zeros = jnp.zeros(len(rows.dense), rows.dense.dtype)
    given = SimpleNamespace(offset=zeros, residual=zeros, rows=rows)
    map_, prior = structure.map(given), structure.prior(zeros.dtype)
    precision, potential = factors
    added = map_.information(GaussianFactors(potential[None], scale * precision[None]))
    natural = jax.tree.map(jnp.add, prior.natural, added)
    return natural.moments(), natural, map_, prior


@pytest.mark.parametrize(
    ("sides", "dtype"),
    [
        ((30, 7), "float32"),
        pytest.param((30, 4, 3), "float32", marks=pytest.mark.slow),
        pytest.param((30, 4, 3), "float64", marks=pytest.mark.slow),
    ],
)
def test_few_levels_on_one_side_are_exact(sides, dtype):
    with enable_x64(dtype == "float64"):
        check_moments(sides, dtype)


def check_moments(sides, dtype):
    structure, rows, factors, dense = problem(sides, 200, dtype)
    projection, precision, potential = dense
    whole = np.eye(structure.size) + (projection * precision) @ projection.T
    covariance = np.linalg.inv(whole)
    mean = covariance @ projection @ potential
    some = np.arange(6)
    eye = np.eye(structure.size, dtype=dtype)
    # Pairs of nodes without a common predictor.
    apart = rows._replace(place=rows.place[:, ::1].at[:, 0].set(structure.nodes - 1))

    @jax.jit
    @precise
    def found(rows, factors):
        q, natural, map_, prior = moments_at(structure, rows, factors)
        root = q.unwhiten(eye)
        _, parts = q.push_forward(jnp.asarray(projection, dtype)[None, :, some])
        parts = jnp.concatenate(parts, 1)[0]
        return {
            "mean": q.mean[0],
            "variances": q.variances[0],
            "log-determinant": q.log_det[0],
            "divergence": prior.divergence(q)[0],
            "predictors": map_.marginals(q).variance[0],
            "others": q.spreads(apart),
            "pairs": map_.covariances(q, some, some[::-1])[0],
            "push": parts.T @ parts,
            "rows": map_.covariance(q)[0][:6, :6],
            "solved": q.solve(eye),
            "draws": root.T @ root,
            "noise": q.whiten(root),
            "moved": natural.moved(q.mean).potential[0] - natural.potential[0],
        }

    log_det = -np.linalg.slogdet(whole)[1]
    predicted = projection.T @ covariance @ projection
    other = np.zeros_like(projection)
    for s in range(len(sides)):
        np.add.at(
            other, (np.asarray(apart.place)[:, s], np.arange(200)),
            np.asarray(apart.value)[:, s],
        )  # fmt: skip
    other[structure.nodes :] = projection[structure.nodes :]
    squares = mean @ mean + np.trace(covariance) - structure.size
    expected = {
        "mean": mean,
        "variances": np.diag(covariance),
        "log-determinant": log_det,
        "divergence": 0.5 * (squares - log_det),
        "predictors": np.diag(predicted),
        "others": np.diag(other.T @ covariance @ other),
        "pairs": predicted[some, some[::-1]],
        "push": predicted[:6, :6],
        "rows": predicted[:6, :6],
        "solved": covariance,
        "draws": covariance,
        "noise": eye,
        "moved": whole @ mean,
    }
    tolerance = 2e-4 if dtype == "float32" else 1e-8
    for name, value in found(rows, factors).items():
        right = np.asarray(expected[name])
        scale = max(np.abs(right).max(), 1e-3)
        assert np.abs(value - right).max() < tolerance * scale, name


def test_noise_of_many_levels_is_small_and_stated():
    structure, rows, factors, dense = problem((80, 60), 1500, "float32")
    projection, precision, _ = dense
    whole = np.eye(structure.size) + (projection * precision) @ projection.T

    @jax.jit
    def found(rows, factors):
        q, *_ = moments_at(structure, rows, factors)
        return q.log_det[0], q.noise[0], q.variances[0]

    log_det, noise, variances = found(rows, factors)
    covariance = np.linalg.inv(whole)
    error = 0.5 * (log_det + np.linalg.slogdet(whole)[1])
    assert abs(error) < 4 * noise < 0.05
    assert np.abs(variances / np.diag(covariance) - 1).max() < 0.03


def test_an_indefinite_precision_is_nan():
    structure, rows, factors, _ = problem((30, 7), 200, "float32")
    found = jax.jit(lambda *x: moments_at(structure, *x, -1.0)[0].log_det)
    assert np.isnan(found(rows, factors)).all()


def ratings(one, two, y=None):
    sd = numpyro.sample("sd", dist.HalfNormal(1).expand([2]).to_event(1))
    level = numpyro.sample("level", dist.Normal(0, 5))
    with numpyro.plate("ones", 90):
        u = numpyro.sample("u", dist.Normal(0, sd[0]))
    with numpyro.plate("twos", 70):
        v = numpyro.sample("v", dist.Normal(0, sd[1]))
    eta = numpyro.deterministic("eta", level + u[one] + v[two])
    sigma = numpyro.sample("sigma", dist.HalfNormal(1))
    with numpyro.plate("data", len(one)):
        numpyro.sample("y", dist.Normal(eta, sigma), obs=y)


def data_of(number=900):
    rng = np.random.default_rng(1)
    one, two = rng.integers(0, 90, number), rng.integers(0, 70, number)
    eta = 0.5 + rng.normal(size=90)[one] + 0.7 * rng.normal(size=70)[two]
    return one, two, (eta + 0.5 * rng.normal(size=number)).astype(np.float32)


def known(one, two, y=None):
    """Ratings with known hyperparameters."""
    values = {"sd": jnp.array([1, 0.7]), "sigma": jnp.array(0.5)}
    with numpyro.handlers.block(hide=[*values]):
        numpyro.handlers.substitute(ratings, data=values)(one, two, y)


def test_posterior_and_evidence_of_normal_data(monkeypatch):
    one, two, y = args = data_of()
    monkeypatch.setattr(gpaug.AutoLatentGaussian, "_purpose", Purpose(largest=40))
    guide = gpaug.AutoLatentGaussian(known)
    svi = gpaug.ConjugateSVI(known, guide)
    result = svi.run(KEY, 30, *args, progress_bar=False)
    assert "iterative: a sparse precision of 160 nodes (u, v)" in str(guide)
    design = np.zeros((len(y), 161))
    design[np.arange(len(y)), one] = 1
    design[np.arange(len(y)), 90 + two] = 0.7
    design[:, 160] = 5
    covariance = np.linalg.inv(np.eye(161) + 4 * design.T @ design)
    mean = 4 * covariance @ design.T @ y
    whole = 0.25 * np.eye(len(y)) + design @ design.T
    half = np.linalg.slogdet(2 * np.pi * whole)[1] / 2
    evidence = -0.5 * y @ np.linalg.solve(whole, y) - half
    assert abs(-result.losses[-1] - evidence) < 0.05
    # New pairs: most have no data.
    each = np.meshgrid(np.arange(90), np.arange(70), indexing="ij")
    every = [x.ravel()[::25] for x in each]
    new = np.zeros((len(every[0]), 161))
    new[np.arange(len(new)), every[0]] = 1
    new[np.arange(len(new)), 90 + every[1]] = 0.7
    new[:, 160] = 5
    ahead = svi.posterior(result).predict_f(*every, site="eta")
    variance = ((new @ covariance) * new).sum(-1)
    np.testing.assert_allclose(ahead.mean, new @ mean, atol=2e-3)
    np.testing.assert_allclose(ahead.variance, variance, rtol=0.03)
    # The guide was set up with other pairs.
    with pytest.raises(NotConjugateError, match="Make a new guide"):
        svi.run(KEY, 1, one[::-1], two, y, progress_bar=False)


def test_the_form_is_chosen_by_cost_and_is_not_integrated(monkeypatch):
    args = data_of()
    structure = inspect_joint(ratings, FIT, *args)
    assert structure.form.factorised
    assert Purpose(operations=10).too_costly(structure, 900)
    assert not Purpose().too_costly(structure, 900)
    monkeypatch.setattr(
        "numpyro_gpaug.infer.nested.setup._OfManyPoints._purpose", Purpose(largest=40)
    )
    nested = gpaug.NestedVI(ratings, progress_bar=False)
    with pytest.raises(NotConjugateError, match="not factorised"):
        nested.run(KEY, *args)
