# SPDX-License-Identifier: Apache-2.0
"""Latent Gaussian models: predictions of models without inputs, of those that have
factors, and of labels by quadrature."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from arviz_base import from_dict
from jax.scipy.special import ndtr
from scipy import stats

import numpyro_gpaug as gpaug
from tests.conftest import slow
from tests.problems import moved

KEY = jax.random.key(0)
RNG = np.random.default_rng(1)
N = 20
T = np.linspace(-1, 1, N, dtype="float32")
TIMES = RNG.exponential(np.exp(0.5 * T)).astype("float32")
DIED = TIMES < 1.5


def fitted(model, *args):
    svi = gpaug.ConjugateSVI(model, gpaug.AutoLatentGaussian(model), None)
    return svi.posterior(svi.run(KEY, 40, *args, progress_bar=False))


def walk(y=None, *, steps=N):
    """A series whose only argument is itself."""
    level = numpyro.sample("level", dist.GaussianRandomWalk(0.3, steps))
    with numpyro.plate("time", steps):
        numpyro.sample("y", dist.Normal(level, 0.5), obs=y)


def test_models_without_inputs_are_predicted():
    posterior, at = fitted(walk, TIMES), np.arange(1, N + 4)
    prior = 0.3**2 * np.minimum(at[:, None], at)
    gain = np.linalg.solve(prior[:N, :N] + 0.25 * np.eye(N), prior[:N]).T
    mean, variance = gain @ TIMES, np.diag(prior - gain @ prior[:N]) + 0.25
    ahead = posterior.predict_y(steps=N + 3)
    np.testing.assert_allclose(ahead.mean, mean, rtol=1e-3)
    np.testing.assert_allclose(ahead.variance, variance, rtol=1e-3)
    assert posterior.predict_f(site="level").mean.shape == (N,)
    density = stats.norm(mean, np.sqrt(variance)).logpdf([*TIMES, 0, 0, 0])[:N]
    np.testing.assert_allclose(posterior.log_prob(TIMES), density, rtol=1e-3)


def alike(t, y=None, z=None, *, likelihood):
    """The model: columns with a common distribution, and data with one for all."""
    a = numpyro.sample("a", dist.Normal(0, 1))
    b = numpyro.sample("b", dist.Normal(0, 1))
    with numpyro.plate("columns", 2), numpyro.plate("rows", len(t), dim=-2):
        numpyro.sample("y", likelihood((a + b * t)[:, None]), obs=y)
    with numpyro.plate("others", 3):
        numpyro.sample("z", likelihood(a), obs=z)


@jax.jit
def known(d, key):
    """Draws, the mean, and probabilities, or the median and its level."""
    drawn = d.sample(key, (4000,)), d.mean
    if d.is_discrete:
        return *drawn, d.probs
    return *drawn, d.icdf(0.5), d.cdf(d.icdf(0.5))


@pytest.mark.parametrize(
    "likelihood",
    [
        lambda eta: dist.Normal(eta, 0.5),
        slow(lambda eta: dist.Bernoulli(probs=ndtr(eta))),
    ],
)
def test_predictions_have_the_shape_of_data(likelihood):
    def model(*args):
        alike(*args, likelihood=likelihood)

    y = (T[:, None] > np.array([0.0, 0.2])).astype("float32")
    svi = gpaug.ConjugateSVI(model, gpaug.AutoLatentGaussian(model))
    posterior = moved(svi, 1, T, y, y[:3, 0])
    with pytest.raises(ValueError, match="pass the new inputs"):
        posterior.predict_y(site="y")
    for site, shape in (("y", (130, 2)), ("z", (3,))):
        new = np.linspace(-1, 1, 130, dtype="float32")
        found = posterior.predict_y(new, site=site)
        draws, mean, *rest = known(found, KEY)
        draws = np.asarray(draws)
        assert found.batch_shape == mean.shape == shape
        np.testing.assert_allclose(draws.mean(0), mean, atol=0.06)
        # Draws of different rows differ.
        middle = draws[0].size // 2
        first, *others = draws.reshape(len(draws), -1).T[middle - 1 : middle + 2]
        apart = [np.corrcoef(first, other)[0, 1] for other in others]
        np.testing.assert_allclose(apart, 0, atol=0.06)
        if found.is_discrete:
            np.testing.assert_allclose(rest[0] + np.zeros(shape), mean)
        else:
            np.testing.assert_allclose(rest[0], mean, atol=1e-6)
            np.testing.assert_allclose(rest[1], np.full(shape, 0.5), atol=1e-6)


def survival(t, time=None, died=None):
    """The model: durations, some of them censored."""
    b = numpyro.sample("b", dist.Normal(0, 1).expand([2]).to_event(1))
    eta = numpyro.deterministic("eta", b[0] + b[1] * t)
    if time is not None:
        density = jnp.where(died, -eta, 0.0) - time * jnp.exp(-eta)
        numpyro.factor("left", density)
    with numpyro.plate("data", len(t)):
        numpyro.sample("late", dist.Bernoulli(logits=eta), obs=died)


def test_factors_have_a_density_and_are_not_predicted():
    posterior = fitted(survival, T, TIMES, DIED)
    assert posterior.observed == ("late",)
    assert "left  (20,)  a factor" in str(fitted_guide(survival, T, TIMES, DIED))
    # Without durations the model does not reach the factor.
    without, given = posterior.predict_f(T, site="eta"), (T, TIMES, DIED)
    np.testing.assert_allclose(
        without.mean, posterior.predict_f(*given, site="left").mean, rtol=1e-4
    )
    assert posterior.predict_y(T).probs.shape == (N,)
    with pytest.raises(ValueError, match="'left' is a numpyro.factor"):
        posterior.predict_y(T, site="left")
    with pytest.raises(ValueError, match="no site 'left' without observations"):
        posterior.predict_f(T, site="left")

    b = np.asarray(posterior["b"].sample(KEY, (20_000,)), float)
    eta = b[:, :1] + b[:, 1:] * T
    each = np.exp(np.where(DIED, -eta, 0) - TIMES * np.exp(-eta)).mean(0)
    found = posterior.log_prob(*given, site="left")
    np.testing.assert_allclose(found, np.log(each), atol=0.02)


def fitted_guide(model, *args):
    guide = gpaug.AutoLatentGaussian(model)
    guide.setup(*args)
    return guide


def test_one_of_several_sites_is_left_out():
    density = np.zeros((1, 4, N))
    tree = from_dict({"log_likelihood": {"y": density, "event": density}})
    for site in (None, "other"):
        with pytest.raises(ValueError, match=r"are \['event', 'y'\]; pass site"):
            gpaug.diagnostics.loo(tree, site)


def test_a_model_of_factors_alone_has_nothing_to_leave_out():
    def alone(t, time):
        b = numpyro.sample("b", dist.Normal(0, 1))
        numpyro.factor("all", -b * t - time * jnp.exp(-b * t))

    guide = gpaug.AutoLatentGaussian(alone)
    svi = gpaug.ConjugateSVI(alone, guide, None)
    params = svi.get_params(svi.init(KEY, T, TIMES))
    with pytest.raises(ValueError, match="'all' is a numpyro.factor"):
        svi.posterior(params, T, TIMES).predict_y(T, TIMES)
    options = {"num_samples": 4}
    tree = gpaug.diagnostics.to_datatree(KEY, alone, guide, params, T, TIMES, **options)
    with pytest.raises(ValueError, match="the model has none. numpyro.factor"):
        gpaug.diagnostics.loo(tree)


def test_members_that_other_data_look_at_by_codes_are_known_in_predictions():
    """Subjects have visits, and an outcome each in their own plate."""

    def model(subject, y=None, event=None, *, subjects=4):
        with numpyro.plate("subjects", subjects):
            b = numpyro.sample("b", dist.Normal(0, 2))
            numpyro.sample("event", dist.Bernoulli(logits=b), obs=event)
        with numpyro.plate("data", len(subject)):
            noise = numpyro.sample("noise", dist.Normal(0, 0.1))
            numpyro.sample("y", dist.Normal(b[subject] + noise, 0.2), obs=y)

    subject, event = np.arange(N) % 4, np.array([0, 0, 1, 1])
    posterior = fitted(model, subject, 2.0 * subject - 3, event)
    b = posterior["b"]
    assert (b.variance < 0.1).all()
    found = posterior.predict_y(np.array([3, 0, 4]), site="y", subjects=5)
    np.testing.assert_allclose(found.mean, [b.mean[3], b.mean[0], 0], atol=1e-4)
    own = 0.1**2 + 0.2**2  # the noise of a row is new
    expected = np.array([b.variance[3], b.variance[0], 4]) + own
    np.testing.assert_allclose(found.variance, expected, rtol=1e-3)
    events = posterior.predict_y(np.array([0]), site="event").probs
    assert events[0] < 0.1 < 0.9 < events[3]


def table(x, y=None, *, subjects=3):
    """Items in rows, subjects in columns."""
    columns = numpyro.plate("subjects", subjects, dim=-1)
    with columns:
        a = numpyro.sample("a", dist.Normal(0, 1))
    with numpyro.plate("items", len(x), dim=-2):
        noise = numpyro.sample("noise", dist.Normal(0, 0.5))
        with columns:
            numpyro.sample("y", dist.Normal(a * x + noise, 0.5), obs=y)


def test_members_of_a_table_are_known_by_their_places():
    x = RNG.normal(size=(6, 3))
    svi = gpaug.ConjugateSVI(table, gpaug.AutoLatentGaussian(table))
    posterior = moved(svi, 1, x, x)
    a = np.asarray(posterior["a"].mean)
    assert np.ptp(a) > 0.1
    new = np.ones((4, 3))
    np.testing.assert_allclose(posterior.predict_y(new).mean, np.tile(a, (4, 1)))
    found = posterior.predict_y(np.ones((4, 4)), subjects=4).mean
    np.testing.assert_allclose(found[0], [*a, 0])
