# SPDX-License-Identifier: Apache-2.0
"""Simulation-based calibration: right fits pass, and wrong ones do not."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer.util import log_density

import numpyro_gpaug as gpaug
from numpyro_gpaug.diagnostics import Calibration, sbc
from numpyro_gpaug.diagnostics._sbc import uniformity

KEY = jax.random.key(0)
ROWS = 4


def model(y, *, noise=1.0):
    with numpyro.plate("groups", 2, dim=-1):
        z = numpyro.sample("z", dist.Normal(0.0, jnp.array([1.0, 2.0])))
        with numpyro.plate("data", ROWS, dim=-2):
            numpyro.sample("y", dist.Normal(z, noise), obs=y)


def closed_form(simulated):
    return gpaug.ConjugateSVI(simulated, gpaug.AutoLatentGaussian(simulated))


def overconfident(simulated):
    def wrong(data, y):
        return simulated(data, y, noise=0.5)

    return closed_form(wrong)


class Exact:
    """Draws from the posterior of the model by the textbook; it fails every tenth
    time."""

    def __init__(self, simulated):
        self.runs = 0

    def run(self, key, data, y):
        self.runs += 1
        if not self.runs % 10 and y is not None and not y.any():
            raise ValueError("it was the tenth")
        variance = 1 / (1 / np.array([1.0, 4.0]) + len(data["y"]))
        rng = np.random.default_rng(np.asarray(jax.random.key_data(key)))
        mean = variance * data["y"].sum(0)
        self.draws = rng.normal(mean, np.sqrt(variance), (50, 2))

    def get_samples(self):
        return {"z": self.draws}


def calibrated(num=300, fit=None, **options):
    fit = fit or closed_form
    return sbc(
        model, KEY, num, jnp.zeros((ROWS, 2)), fit=fit, progress_bar=False, **options
    )


def test_a_right_fit_is_calibrated() -> None:
    found = calibrated()
    assert found.positions["z"].shape == (300, 2)
    assert (found.table["p"] > 0.01).all()
    assert (np.abs(found.table["90%"] - 0.9) < 0.06).all()
    assert "300 data sets, worst of 2 quantities" in repr(found)


def test_an_overconfident_fit_is_not() -> None:
    found = calibrated(fit=overconfident)
    assert found.table["p"].max() < 0.01
    lower, upper = found.band()
    curves = found.curves()["z"]
    assert ((curves < lower) | (curves > upper)).any(1).all()


def test_draws_are_ranked() -> None:
    found = calibrated(60, Exact, num_draws=20)
    assert set(found.failures) == set(range(9, 60, 10))
    assert found.failures[9] == "it was the tenth"
    assert set(found.positions) == {"z", "log_likelihood"}
    z = found.positions["z"]
    assert np.isnan(z[9]).all()
    assert np.isfinite(np.delete(z, range(9, 60, 10), 0)).all()
    assert (found.table["p"] > 0.01).all()
    tree = found.tree["prior_sbc"]
    assert dict(tree.sizes) == {"chain": 1, "draw": 60, "z_dim_0": 2}


def test_latents_may_be_drawn_from_the_posterior() -> None:
    """Around observations that are far from the prior."""
    y, seen = jnp.full((ROWS, 2), 6.0), []

    def density(body, *args):
        return log_density(body, args, {}, {"z": jnp.ones(2)})[0]

    class Both(Exact):
        def __init__(self, simulated):
            super().__init__(simulated)
            self.model = simulated

        def run(self, key, data, y=None):
            assert self.progress_bar is False  # sbc shows one, or none
            if y is None:  # the posterior given the observations
                return super().run(key, {"y": data}, None)
            if not seen:  # both data sets, and the prior once
                prior = dist.Normal(0.0, jnp.array([1.0, 2.0])).log_prob(1.0).sum()
                each = density(model, y) + density(model, data["y"])
                found = density(self.model, data, y)
                np.testing.assert_allclose(found, each - prior, rtol=1e-5)
            seen.append(data["y"].mean())
            return super().run(key, {"y": np.concatenate([data["y"], y])}, y)

        def get_samples(self):
            return {"z": np.repeat(self.draws, 2, 0)}

    found = sbc(
        model, KEY, 90, y, fit=Both, given_data=True, num_draws=50, progress_bar=False
    )
    assert abs(np.mean(seen) - 5.2) < 0.3
    table = found.table.drop("log_likelihood")
    assert (table["p"] > 0.01).all()
    with pytest.raises(ValueError, match="fewer than 101 data sets"):
        sbc(model, KEY, 101, y, fit=Both, given_data=True, progress_bar=False)
    with pytest.raises(ValueError, match="ConjugateSVI has none"):
        sbc(model, KEY, 9, y, fit=closed_form, given_data=True, progress_bar=False)


def test_a_posterior_that_is_the_prior_shows_in_the_likelihood() -> None:
    class Prior(Exact):
        def run(self, key, data, y):
            rng = np.random.default_rng(np.asarray(jax.random.key_data(key)))
            self.draws = rng.normal(0, [1, 2], (50, 2))

    table = calibrated(100, Prior).table
    assert table.index[0] == "log_likelihood"
    assert table["p"].iloc[0] < 0.01
    assert (table["p"].iloc[1:] > 0.01).all()


def test_uniformity() -> None:
    rng = np.random.default_rng(1)
    small = [uniformity(rng.uniform(size=50)) < 0.1 for _ in range(200)]
    assert 0.04 < np.mean(small) < 0.18
    assert uniformity(rng.beta(2, 2, 200)) < 0.01
    assert uniformity(np.zeros(20)) < 0.01
    assert uniformity(np.ones(20)) < 0.01


def test_the_band_contains_uniform_curves() -> None:
    rng = np.random.default_rng(2)
    found = Calibration("", {"z": rng.uniform(size=(100, 300))}, {})
    lower, upper = found.band(0.9)
    curves = found.curves()["z"]
    inside = ((lower <= curves) & (curves <= upper)).all(1)
    assert 0.84 < inside.mean() < 0.96


def test_models_that_cannot_be_simulated_are_refused() -> None:
    def refused(match, body):
        def bad(y=None):
            with numpyro.plate("data", 3):
                body(y)

        with pytest.raises(ValueError, match=match):
            sbc(bad, KEY, 2, jnp.zeros(3))

    def normal(mean, y):
        numpyro.sample("y", dist.Normal(mean, 1.0), obs=y)

    refused("params .*'w'.* no prior", lambda y: normal(numpyro.param("w", 0.0), y))
    refused("is a numpyro.factor", lambda y: numpyro.factor("f", y))
    refused("no observations", lambda y: normal(0.0, None))

    def improper(y):
        flat = dist.ImproperUniform(dist.constraints.real, (), ())
        normal(numpyro.sample("w", flat), y)

    refused("prior of the model is improper", improper)


def test_all_fits_may_fail() -> None:
    class Failing(Exact):
        def run(self, *args, **kwargs):
            raise ValueError("no luck")

    with pytest.raises(ValueError, match="no data set could be fitted: no luck"):
        calibrated(2, Failing)


def herds(herd, total, y=None):
    tau = numpyro.sample("tau", dist.HalfNormal(1.0))
    level = numpyro.sample("level", dist.Normal(0.0, 1.0))
    with numpyro.plate("herds", 5):
        effect = numpyro.sample("effect", dist.Normal(0.0, tau))
    with numpyro.plate("data", len(herd)):
        numpyro.sample("y", dist.Binomial(total, logits=level + effect[herd]), obs=y)


@pytest.mark.slow
@pytest.mark.parametrize("given_data", [False, True])
def test_nested_runs_are_calibrated(given_data) -> None:
    herd, total = jnp.arange(15) % 5, jnp.full(15, 6)
    y = jnp.arange(15) % 6 if given_data else jnp.zeros(15, int)
    found = sbc(
        herds, KEY, 60, herd, total, y,
        fit=lambda model: gpaug.NestedVI(model, num_points=128, progress_bar=False),
        given_data=given_data, progress_bar=False,
    )  # fmt: skip
    assert not found.failures
    assert found.table["p"].min() > 0.01 / len(found.table)
