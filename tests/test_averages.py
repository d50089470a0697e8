# SPDX-License-Identifier: Apache-2.0
"""Predictions averaged over rows within joint draws, against closed forms."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pandas as pd
import pytest

import numpyro_gpaug as gpaug
from numpyro_gpaug.predict.averages import AveragesWanted, over_rows
from tests.conftest import slow
from tests.problems import moved

KEY = jax.random.key(0)
RNG = np.random.default_rng(5)
N = 40
DOSE = RNG.normal(size=N).astype("float32")
WARD = np.arange(N) % 4
TOTAL = RNG.integers(1, 9, N)
Y = (DOSE + 0.5 * WARD + RNG.normal(size=N)).astype("float32")


def wards(dose, ward, y=None, *, likelihood, num_wards=4):
    b = numpyro.sample("b", dist.Normal(0, 1).expand([2]).to_event(1))
    with numpyro.plate("wards", num_wards):
        effect = numpyro.sample("effect", dist.Normal(0, 0.7))
    eta = numpyro.deterministic("eta", b[0] + b[1] * dose + effect[ward])
    with numpyro.plate("data", len(dose)):
        numpyro.sample("y", likelihood(eta), obs=y)


def normal(eta):
    return dist.Normal(eta, 1.0)


def classes(eta):
    return dist.OrderedLogistic(eta, jnp.array([-1.0, 0.0, 1.0]))


@cache
def fitted(likelihood, y):
    svi = gpaug.ConjugateSVI(wards, gpaug.AutoLatentGaussian(wards))
    y = {"values": Y, "classes": np.digitize(Y, [-0.5, 0.5, 1.5])}[y]
    return moved(svi, 1, DOSE, WARD, y, likelihood=likelihood)


def close(found, mean, sd):
    """Compare to the error of a thousand draws; the mean of a linear function has no
    error.
    """
    np.testing.assert_allclose(found.mean, mean, atol=1e-4)
    np.testing.assert_allclose(found.sd, sd, rtol=0.12)


def test_averages_of_a_linear_model_have_its_moments() -> None:
    posterior = fitted(normal, "values")
    f = posterior.predict_f(DOSE, WARD, site="eta", full_covariance=True)
    weights = np.eye(4)[WARD].T * TOTAL
    weights = weights / weights.sum(1, keepdims=True)
    names = np.array([f"ward {i}" for i in WARD])
    found = posterior.average(DOSE, WARD, by=names, weights=TOTAL)
    close(found, weights @ f.mean, np.sqrt(np.diag(weights @ f.variance @ weights.T)))
    assert list(found.summary().index) == [f"ward {i}" for i in range(4)]
    named = posterior.average(DOSE, WARD, by="ward", weights=TOTAL)
    np.testing.assert_array_equal(named.draws, found.draws)
    # A new ward, beside one of the fit.
    new = {"num_wards": 5, "at": {"ward": [0, 4]}}
    apart = posterior.average(DOSE, WARD, **new).draws[..., 1]
    assert np.std(apart) > 0.6


def test_contrasts_are_of_the_same_draws() -> None:
    posterior = fitted(normal, "values")
    slope = posterior["b"]
    step = {"dose": [DOSE, DOSE + 0.5, DOSE + 2]}
    found = posterior.average(DOSE, WARD, at=step, contrast="difference")
    close(found, slope.mean[1] * np.array([0.5, 2]),
          np.sqrt(slope.variance[1]) * np.array([0.5, 2]))  # fmt: skip
    assert list(found.summary().index) == ["1 - 0", "2 - 0"]
    both = posterior.average(DOSE, WARD, at={"dose": [0.0, 1.0], "ward": [1, 2]})
    assert list(both.summary().index) == ["0.0, 1", "1.0, 2"]
    ratio = posterior.average(
        DOSE, WARD, at={"dose": [0, 1]}, contrast=lambda new, old: new / old - 1
    )
    plain = posterior.average(DOSE, WARD, at={"dose": [0, 1]}).draws
    expected = plain[:, 1] / plain[:, 0] - 1
    np.testing.assert_allclose(ratio.draws[:, 0], expected, rtol=1e-5)


def test_scenarios_are_read_like_arguments() -> None:
    table = pd.DataFrame({"a": [1.0, 2.0], "b": [3.0, 4.0]})
    year = pd.Series(pd.Categorical([2020, 2019]))
    at = {"x": [table[["b", "a"]]], "year": [year]}
    labels = {"x.columns": ("a", "b"), "year": ("2018", "2019", "2020")}
    wanted = AveragesWanted.of(
        lambda x, year: None, (table, year), {}, {}, at=at, by=None, contrast=None,
        weights=None, labels=labels,
    )  # fmt: skip
    ((found, codes), _), *_ = wanted.scenarios
    np.testing.assert_array_equal(found, table)
    np.testing.assert_array_equal(codes, [2, 1])


def test_classes_and_functions_of_a_likelihood() -> None:
    posterior = fitted(classes, "classes")
    rows, every = (DOSE[:5], WARD[:5]), np.arange(5)
    found = posterior.average(*rows, by=every)
    assert found.draws.shape == (1000, 5, 4)
    expected = posterior.predict_y(*rows).probs
    np.testing.assert_allclose(found.mean, expected, atol=0.01)
    last = posterior.average(*rows, of=lambda d: d.probs[:, -1])
    np.testing.assert_allclose(last.mean, found.mean[:, -1].mean(), rtol=1e-4)
    assert 0 < last.probability(above=last.quantile(0.8)) < 0.21
    with pytest.raises(ValueError, match=r"of returned shape \(5, 4\), which must end"):
        posterior.average(*rows, of=lambda d: d.probs)


def test_bands_contain_all_averages_together() -> None:
    draws = np.cumsum(RNG.normal(size=(4000, 30)), 1)
    found = gpaug.Averages(draws, np.full(4000, 1 / 4000), {"time": range(30)})
    for joint, (least, most) in {False: (0.3, 0.7), True: (0.89, 0.91)}.items():
        low, high = found.interval(0.9, joint=joint)
        inside = ((draws >= low) & (draws <= high)).all(1).mean()
        assert least < inside < most
    assert "Averages, 4000 draws" in repr(found)


def walk(y=None, *, steps=N):
    level = numpyro.sample("level", dist.GaussianRandomWalk(0.3, steps))
    with numpyro.plate("time", steps):
        numpyro.sample("y", dist.Poisson(jnp.exp(level)), obs=y)


def process(t, y=None, *, markov, inducing=None):
    kernel = gpaug.kernels.Matern32(1.0, 0.5)
    f = gpaug.GaussianProcess("f", kernel, inducing, markov=markov)
    with numpyro.plate("data", len(t)):
        numpyro.sample("y", dist.Bernoulli(logits=f(t)), obs=y)


@pytest.mark.parametrize(
    ("guide", "markov"),
    [
        slow(gpaug.AutoLatentGaussian, False),
        slow(gpaug.AutoLatentGaussian, True),
        (gpaug.AutoSparseGP, False),
    ],
)
def test_averages_of_processes(guide, markov) -> None:
    svi = gpaug.ConjugateSVI(process, guide(process))
    t = DOSE if markov else DOSE[:, None]
    how = {"markov": markov} | ({} if markov else {"inducing": t[::8]})
    posterior = moved(svi, 1, t, (Y > 0).astype(int), **how)
    new = t[::2] + np.float32(0.3)
    f = posterior.predict_f(new)
    logits = posterior.average(new, of=lambda d: d.logits, by=np.arange(20))
    np.testing.assert_allclose(logits.mean, f.mean, atol=0.06)
    np.testing.assert_allclose(logits.sd**2, f.variance, rtol=0.25)


def test_forecasts_are_averaged() -> None:
    svi = gpaug.ConjugateSVI(walk, gpaug.AutoLatentGaussian(walk))
    posterior = moved(svi, 1, RNG.poisson(np.ones(N)))
    found = posterior.average(steps=N + 5, by=np.arange(N + 5))
    level = posterior.predict_f(steps=N + 5, site="level")
    ahead = np.exp(level.mean + level.variance / 2)
    np.testing.assert_allclose(found.mean, ahead, rtol=0.15)


def counts(dose, ward, y=None):
    tau = numpyro.sample("tau", dist.HalfNormal(1))
    b = numpyro.sample("b", dist.Normal(0, 1))
    with numpyro.plate("wards", 4):
        effect = numpyro.sample("effect", dist.Normal(0, tau))
    with numpyro.plate("data", len(dose)):
        rate = jnp.exp(b * dose + effect[ward])
        numpyro.sample("y", dist.Poisson(rate), obs=y)


def test_hyperparameters_are_averaged_over() -> None:
    nested = gpaug.NestedVI(counts, num_points=128, progress_bar=False)
    y = RNG.poisson(np.exp(0.5 * DOSE + 0.3 * WARD))
    nested.run(KEY, DOSE, WARD, y)
    how = {"at": {"dose": [0, 1]}, "contrast": "ratio"}
    draws = nested.get_samples()
    exact = gpaug.average(counts, draws, DOSE, WARD, **how)
    np.testing.assert_allclose(exact.mean[0], np.exp(draws["b"]).mean(), rtol=1e-4)
    found = nested.posterior().average(DOSE, WARD, **how)
    np.testing.assert_allclose(found.mean, exact.mean, rtol=0.03)
    np.testing.assert_allclose(found.sd, exact.sd, rtol=0.12)
    levels = [[x.quantile(q)[0] for q in (0.05, 0.95)] for x in (found, exact)]
    np.testing.assert_allclose(*levels, rtol=0.08)
    few = {k: x for k, x in draws.items() if k != "effect"}
    with pytest.raises(ValueError, match=r"without draws are \['effect', 'y'\]"):
        gpaug.average(counts, few, DOSE, WARD)


def test_a_table_is_averaged_over_both_plates() -> None:
    @jax.jit
    def averages(rows):
        d = dist.Normal(jnp.arange(6.0).reshape(2, 3), 1.0)
        both = dist.MultivariateNormal(jnp.arange(6.0).reshape(3, 2), jnp.eye(2))
        given = (d, {}), (d, rows), (both, {})
        return [over_rows(d, None, rows) for d, rows in given]

    found = averages({"group": np.array([[0, 1, 1]] * 2), "total": np.zeros(2)})
    assert [x.tolist() for x in found] == [[2.5], [1.5, 3.0], [[2.0, 3.0]]]


def test_questions_that_do_not_fit() -> None:
    posterior = fitted(normal, "values")
    for how, message in (
        ({"weights": -TOTAL}, "weights must be finite and at least zero"),
        ({"at": {"x": [0]}}, r"at has 'x', which is none of .* \['dose', 'ward'\]"),
        ({"at": {"dose": [0], "ward": [0, 1]}}, r"lists of lengths \{'dose': 1,"),
        ({"at": {"dose": [DOSE[:3]]}}, r"has a value of shape \(3,\), and dose has"),
        ({"contrast": "ratio"}, "a contrast compares scenarios"),
        ({"contrast": "odds"}, "none of 'difference' and 'ratio'"),
        ({"by": "x"}, r"by='x' is none of .* \['dose', 'ward'\]"),
        ({"by": np.arange(3)}, r"by has shape \(3,\), and the observations have"),
        ({"at": {"ward": [4]}}, "A new group needs a plate with more members"),
    ):
        with pytest.raises(ValueError, match=message):
            posterior.average(DOSE, WARD, **how)
    with pytest.raises(TypeError, match=r"at\['dose'\] is a int. Pass a list"):
        posterior.average(DOSE, WARD, at={"dose": 1})


def test_averages_of_very_many_equal_rows() -> None:
    fn = dist.Delta(jnp.full(2_000_000, 1.5624))
    (found,) = jax.jit(over_rows)(fn, None, {})
    assert float(found) == pytest.approx(1.5624, rel=1e-5)


def test_averages_of_censored_data_are_of_whole_durations() -> None:
    fn = dist.RightCensoredDistribution(dist.Exponential(0.5), jnp.arange(4) % 2)
    (found,) = over_rows(fn, None, {})
    assert float(found) == pytest.approx(2)
    (survival,) = over_rows(fn, lambda d: 1 - d.cdf(1.0), {})
    assert float(survival) == pytest.approx(np.exp(-0.5))
