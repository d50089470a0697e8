# SPDX-License-Identifier: Apache-2.0
"""One model for many responses: each fit is its own, and none ends the others."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import numpyro_gpaug as gpaug
from numpyro_gpaug.distributions.stacked import Stacked
from numpyro_gpaug.infer.nested.report import certificate
from numpyro_gpaug.model.responses import Responses

KEY = jax.random.key(0)
pytestmark = pytest.mark.usefixtures("x64")
GENES, CELLS, SUBJECTS = 6, 30, 5
OPTIONS = {"over": ("subject", "exposure", "y", "offset"), "progress_bar": False}
OFFSET = np.linspace(-1.0, 1.0, GENES)


def model(x, subject, exposure, y=None, *, offset):
    size = numpyro.sample("size", dist.Gamma(2.0, 0.5))
    tau = numpyro.sample("tau", dist.Gamma(2.0, 2.0))
    slope = numpyro.sample("slope", dist.Normal(0.0, 2.0).expand([2]).to_event(1))
    with numpyro.plate("subjects", SUBJECTS):
        effect = numpyro.sample("effect", dist.Normal(0.0, tau))
    with numpyro.plate("cells", len(x)):
        eta = slope[0] + slope[1] * x + effect[subject]
        rate = exposure * jnp.exp(offset + eta)
        numpyro.sample("y", dist.NegativeBinomial2(rate, size), obs=y)


def genes(number=GENES):
    r = np.random.default_rng(0)
    x, subject = r.normal(size=CELLS), np.arange(CELLS) % SUBJECTS
    exposure = r.uniform(0.5, 2, (number, CELLS))
    base, slope = r.normal(1, 0.5, (number, 1)), r.normal(0, 0.5, (number, 1))
    effect = r.normal(0, 0.7, (number, SUBJECTS))[:, subject]
    mean = exposure * np.exp(base + slope * x + effect)
    return x, subject, exposure, r.negative_binomial(3, 3 / (3 + mean)).astype(float)


def fitter(model=model, **options):
    guide = gpaug.AutoLatentGaussian(model)
    return gpaug.ConjugateSVI(model, guide, **options)


@pytest.fixture(scope="module")
def fitted():
    """Return genes, three of which cannot be fitted, and their fits."""
    with jax.enable_x64(True):
        svi, (x, subject, exposure, y) = fitter(), genes()
        subjects = np.stack([subject] * GENES)
        # A count of one half has a density, but is outside the support.
        exposure[1, 3], subjects[2, 0], y[4, 5] = np.nan, SUBJECTS, 0.5
        with pytest.warns(UserWarning, match="3 of 6 fits did not converge"):
            fits = svi.run_many(
                KEY, 60, x, subjects, exposure, y=y, offset=OFFSET, **OPTIONS
            )
    return svi, (x, subjects, exposure, y), fits


def test_each_fit_is_its_own(fitted) -> None:
    svi, (x, subject, exposure, y), fits = fitted
    for i in (0, 5):
        result = svi.run(
            KEY, 60, x, subject[i], exposure[i], y=y[i], offset=OFFSET[i],
            progress_bar=False,
        )  # fmt: skip
        single = svi.posterior(result)
        assert fits.steps[i] == len(result.losses)
        np.testing.assert_allclose(fits.bounds[i], -result.losses[-1], rtol=1e-9)
        expected, found = single.summary(), fits.summary().loc[i]
        assert list(found.index) == list(expected.index)
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)
        alike = fits.posterior(i).summary()
        np.testing.assert_allclose(alike, expected, rtol=1e-6, atol=1e-6)


def test_failures_have_verdicts(fitted) -> None:
    *_, fits = fitted
    good = np.array([True, False, False, True, False, True])
    np.testing.assert_array_equal(fits.converged, good)
    np.testing.assert_array_equal(np.isfinite(fits.bounds), good)
    assert fits.verdicts[1] == "the bound is not finite"
    assert f"'effect' has {SUBJECTS} members" in fits.verdicts[2]
    assert fits.verdicts[4] == "'y' is NaN or outside of its support"
    table = fits.summary()
    assert table.xs("slope[1]", level="site")["sd"].notna().tolist() == good.tolist()
    with pytest.raises(ValueError, match="response 4 has no posterior: 'y' is NaN or"):
        fits.posterior(4)
    assert "6 posteriors of model" in repr(fits)
    assert "3  converged" in repr(fits)


def test_sites(fitted) -> None:
    *_, fits = fitted
    assert fits["effect"].mean.shape == (GENES, SUBJECTS)
    assert fits.values["size"].shape == (GENES,)
    with pytest.raises(KeyError, match="values has it"):
        fits["size"]
    with pytest.raises(KeyError, match=r"posterior\(1\) is"):
        fits[1]


def test_predictions_are_those_of_each(fitted) -> None:
    _, (x, subject, exposure, _), fits = fitted
    new = x[:7], subject[0, :7]
    ones = np.ones(7)
    shared = fits.predict_y(*new, ones)
    own = fits.predict_y(*new, exposure[:, :7], over="exposure")
    values = fits.map(lambda p, *args: p.predict_f(*args), *new, ones)
    assert shared.batch_shape == own.batch_shape == (GENES, 7)
    draws = jax.jit(lambda d: d.sample(KEY, (3,)))(own)
    assert draws.shape == (3, GENES, 7)
    numbers = jax.jit(lambda d: (d.mean, d.variance, d.log_prob(np.arange(7))))
    of_shared, of_own = numbers(shared), numbers(own)
    for i in (0, 3):
        single = fits.posterior(i)
        for found, given in ((of_shared, ones), (of_own, exposure[i, :7])):
            expected = numbers(single.predict_y(*new, given))
            for x, y in zip(found, expected, strict=True):
                np.testing.assert_allclose(x[i], y, rtol=1e-10)
        expected = single.predict_f(*new, ones)
        np.testing.assert_allclose(values.variance[i], expected.variance, rtol=1e-10)


def test_too_few_steps_are_not_convergence(fitted) -> None:
    svi, (x, subject, exposure, y), _ = fitted
    with pytest.warns(UserWarning, match="6 of 6 fits did not converge"):
        fits = svi.run_many(KEY, 2, x, subject, exposure, y=y, offset=OFFSET, **OPTIONS)
    assert fits.verdicts[0] == "not converged in 2 steps"
    assert np.isfinite(fits.bounds).tolist() == [True, False, False, True, False, True]


def slopes(x, y=None):
    slope = numpyro.sample("slope", dist.Normal(0.0, 1.0))
    with numpyro.plate("data", len(x)):
        numpyro.sample("y", dist.Poisson(jnp.exp(slope * x)), obs=y)


@pytest.mark.skipif(jax.device_count() < 2, reason="XLA_FLAGS name fewer devices")
def test_devices_share_the_responses() -> None:
    mesh = jax.make_mesh((2,), ("rows",), devices=jax.devices()[:2])
    x, y = np.linspace(-1, 1, 8), np.arange(24).reshape(3, 8)
    one, two = (
        fitter(slopes, optim=None, mesh=mesh).run_many(
            KEY, 30, x, y, over="y", progress_bar=False
        )
        for mesh in (None, mesh)
    )
    assert two.converged.all()
    np.testing.assert_allclose(two.bounds, one.bounds, rtol=1e-9)
    np.testing.assert_allclose(two["slope"].mean, one["slope"].mean, rtol=1e-9)


def test_other_arguments_are_refused() -> None:
    x, subject, exposure, y = genes(3)

    def refused(error, match, *args, over):
        with pytest.raises(error, match=match):
            fitter().run_many(KEY, 10, *args, over=over, progress_bar=False)

    given = x, subject, exposure, y
    refused(ValueError, "over names \\['genes'\\]", *given, over="genes")
    refused(ValueError, "lengths {'x': 30, 'y': 3}", *given, over=("x", "y"))
    refused(ValueError, "over is empty", *given, over=())
    refused(TypeError, "got a float", x, subject, 1.0, y, over="exposure")


def levels(y):
    tau = numpyro.sample("tau", dist.HalfNormal(1.0))
    level = numpyro.sample("level", dist.Normal(0.0, tau))
    with numpyro.plate("data", len(y)):
        numpyro.sample("y", dist.Poisson(jnp.exp(level)), obs=y)


def test_nested_runs_are_those_of_each() -> None:
    y = np.arange(12).reshape(3, 4)
    y[1, 2] = -1
    nested = gpaug.NestedVI(levels, num_points=64, progress_bar=False)
    with pytest.warns(UserWarning, match="1 of 3 runs are not certified"):
        runs = nested.run_many(KEY, y, over="y")
    assert runs.certified.tolist() == [True, False, True]
    assert "outside" in runs.verdicts[1]
    assert "2  certified" in repr(runs)
    table = runs.summary()
    assert table.loc[1].isna().all(axis=None)
    nested.run(KEY, y[2])
    np.testing.assert_array_equal(table.loc[2], nested.summary())
    fields = nested.get_extra_fields()
    assert runs.khats[2] == fields["khat"]
    assert runs.log_evidences[2] == fields["log_evidence"]
    with pytest.raises(ValueError, match="no response could be fitted"):
        nested.run_many(KEY, -y[:2] - 1, over="y")


def test_minibatches_are_refused() -> None:
    def drawn(x, y=None):
        w = numpyro.sample("w", dist.Normal(0.0, 1.0))
        with numpyro.plate("data", len(x), subsample_size=2) as i:
            numpyro.sample("y", dist.Poisson(jnp.exp(w * x[i])), obs=y[i])

    x, y = np.ones(4), np.ones((2, 4), int)
    with pytest.raises(ValueError, match="Call run for each response"):
        fitter(drawn, optim=None).run_many(KEY, 5, x, y, over="y", progress_bar=False)


def test_a_plate_of_separate_models_names_run_many() -> None:
    def outer(y):
        with numpyro.plate("genes", y.shape[1], dim=-1):
            tau = numpyro.sample("tau", dist.Gamma(2.0, 2.0))
            level = numpyro.sample("level", dist.Normal(0.0, tau))
            with numpyro.plate("cells", len(y), dim=-2):
                numpyro.sample("y", dist.Poisson(jnp.exp(level)), obs=y)

    def shared(y):
        with numpyro.plate("genes", y.shape[1], dim=-1):
            level = numpyro.sample("level", dist.Normal(0.0, 1.0))
            with numpyro.plate("cells", len(y), dim=-2):
                numpyro.sample("y", dist.Poisson(jnp.exp(level)), obs=y)

    y = np.ones((2, 32), int)
    with pytest.warns(UserWarning, match="32 members of the plate 'genes'.*run_many"):
        gpaug.AutoLatentGaussian(outer).setup(y)
    gpaug.AutoLatentGaussian(outer).setup(y[:, :31])
    gpaug.AutoLatentGaussian(shared).setup(y)


def test_stacked_distributions_are_each_of_them() -> None:
    loc, scale = jnp.arange(6.0).reshape(2, 3), jnp.ones((2, 3))
    stacked = Stacked(jax.vmap(dist.Normal)(loc, scale))
    plain = dist.Normal(loc, scale)
    assert stacked.batch_shape == (2, 3)
    values = jnp.full(3, 0.3), jnp.full((4, 2, 3), 0.3)
    everything = jax.jit(
        lambda d: (*map(d.log_prob, values), d.icdf(0.3), d.cdf(0.3), d.loc)
    )
    for x, y in zip(everything(stacked), everything(plain), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-6)
    events = Stacked(jax.vmap(lambda x: dist.Normal(x, 1.0).to_event(1))(loc))
    assert (events.batch_shape, events.event_shape) == ((2,), (3,))
    both = jax.eval_shape(lambda d: (d.log_prob(loc), d.sample(KEY, (5,))), events)
    assert [x.shape for x in both] == [(2,), (5, 2, 3)]


def test_finite_responses_come_first() -> None:
    values = np.array([[np.nan, 1.0], [2.0, 3.0]])
    given = Responses.split(lambda y: None, (values,), {}, "y")
    assert given.finite().tolist() == [1]
    (one,), _ = given.one(1)
    np.testing.assert_array_equal(one, values[1])


def factors(y=None):
    scale = numpyro.sample("scale", dist.Gamma(2.0, 2.0))
    with numpyro.plate("steps", y.shape[0]):
        z = numpyro.sample("z", dist.Normal(0.0, 1.0))
        numpyro.sample("y", dist.Normal(z * scale, 0.3), obs=y)


def walks(y=None):
    scale = numpyro.sample("scale", dist.Gamma(2.0, 2.0))
    walk = numpyro.sample("walk", dist.GaussianRandomWalk(scale, len(y)))
    with numpyro.plate("data", len(y)):
        numpyro.sample("y", dist.Poisson(jnp.exp(walk)), obs=y)


def processes(y=None):
    x = jnp.linspace(0, 1, len(y))[:, None]
    length = numpyro.param("length", 0.3, constraint=dist.constraints.positive)
    gp = gpaug.GaussianProcess("f", gpaug.kernels.Matern32(1.0, length), x[::3])
    with numpyro.plate("data", len(y)):
        numpyro.sample("y", dist.Bernoulli(logits=gp(x)), obs=y)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "guide"),
    [
        (factors, gpaug.AutoLatentGaussian),
        (walks, gpaug.AutoLatentGaussian),
        (processes, gpaug.AutoLatentGaussian),
        (processes, gpaug.AutoSparseGP),
    ],
)
def test_other_models(model, guide) -> None:
    r = np.random.default_rng(0)
    y = r.integers(0, 2, (3, 40))
    y = y + 0.1 * r.normal(size=y.shape) if model is factors else y
    svi = gpaug.ConjugateSVI(model, guide(model))
    fits = svi.run_many(KEY, 60, y, over="y", progress_bar=False)
    assert fits.converged.all()
    for i in range(3):
        result = svi.run(KEY, 60, y[i], progress_bar=False)
        np.testing.assert_allclose(fits.bounds[i], -result.losses[-1], rtol=1e-8)
        expected = svi.posterior(result).summary()
        np.testing.assert_allclose(fits.summary().loc[i], expected, atol=1e-4)


def test_a_verdict_says_why_a_run_is_not_certified() -> None:
    """A small k-hat is not blamed where the model could not be evaluated."""
    searched = SimpleNamespace(said="", all_drawn=True)
    structure = SimpleNamespace(functions={})
    run = SimpleNamespace(
        certified=False, correction=None, searched=searched, mirrors=None,
        slow=False,
        programs=SimpleNamespace(structure=structure),
        weighted=SimpleNamespace(khat=0.1, limit=0.63, loss=0.2, log_evidence=-1.0),
    )  # fmt: skip
    verdict = certificate(run)
    assert "could not be evaluated in about 20%" in verdict
    assert "above" not in verdict
    run.weighted = SimpleNamespace(khat=0.6334, limit=0.6309, loss=0.0)
    assert "k-hat 0.633, above 0.631: the weights" in certificate(run)
