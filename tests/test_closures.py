# SPDX-License-Identifier: Apache-2.0
"""Values that a model reads besides its arguments may change between runs, and between
a fit and its predictions.
"""

import functools
import pickle
from dataclasses import dataclass
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro import handlers
from numpyro.infer import MCMC, SVI
from numpyro.infer.util import log_density
from scipy import sparse, stats

import numpyro_gpaug as gpaug
from numpyro_gpaug.errors import ModelChangedError
from numpyro_gpaug.model.closures import _facts, count_run, watched
from tests.conftest import enable_x64

KEY = jax.random.key(0)
QUIET = {"progress_bar": False}
GROUP = np.arange(12) % 3
Y = np.random.default_rng(0).normal(size=12).astype("float32") + GROUP
LEVELS = np.eye(3)[GROUP]

SD = 0.7
traced: list[int] = []


def model(group, y=None):
    traced.append(1)
    with numpyro.plate("groups", 3):
        u = numpyro.sample("u", dist.Normal(0, SD))
    with numpyro.plate("data", len(group)):
        numpyro.sample("y", dist.Normal(u[group], 0.5), obs=y)


def evidence():
    covariance = SD**2 * LEVELS @ LEVELS.T + 0.25 * np.eye(12)
    return stats.multivariate_normal(np.zeros(12), covariance).logpdf(Y)


def mean():
    covariance = SD**2 * LEVELS @ LEVELS.T + 0.25 * np.eye(12)
    return SD**2 * LEVELS.T @ np.linalg.solve(covariance, Y)


@pytest.fixture
def set_sd():
    """Sets the global that the model reads."""

    def set_to(value):
        global SD
        SD = value

    before = SD
    yield set_to
    set_to(before)


def test_matrices_of_a_list_are_read_whatever_is_known_of_their_order():
    terms = [sparse.csr_array(np.eye(3)[[1, 0, 2]])]

    def reading():
        return terms

    watch = watched(reading)
    before = watch.version()
    with watch.running():
        count_run()
        # The matrix records that it has been sorted.
        assert terms[0].has_sorted_indices
    assert watch.version().same(before)
    terms[0] = sparse.csr_array(np.eye(3)[[2, 1, 0]])
    assert not watch.version().same(before)


def test_runs_see_what_a_global_is_now(set_sd):
    svi = gpaug.ConjugateSVI(model, gpaug.AutoLatentGaussian(model))
    collapsed = gpaug.collapse(model)
    for sd in (0.7, 0.1):
        set_sd(sd)
        for again in (False, True):
            traced.clear()
            result = svi.run(KEY, 5, GROUP, Y, **QUIET)
            found = svi.posterior(result)["u"].mean
            # Made anew, they have the programs of the last ones.
            anew = gpaug.ConjugateSVI(model, gpaug.AutoLatentGaussian(model))
            nested = gpaug.NestedVI(model, num_points=128, **QUIET)
            nested.run(KEY, GROUP, Y)
            bounds = [
                -result.losses[-1],
                -anew.run(KEY, 5, GROUP, Y, **QUIET).losses[-1],
                -svi.evaluate(result.state, GROUP, Y),
                nested.get_extra_fields()["log_evidence"],
            ]
            # Unchanged values are not read again.
            assert bool(traced) != again
            bounds.append(log_density(collapsed, (GROUP, Y), {}, {})[0])
            np.testing.assert_allclose(bounds, evidence(), rtol=1e-4)
            np.testing.assert_allclose(found, mean(), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_chains_of_one_mcmc_see_what_a_global_is_now(set_sd):
    kernel = gpaug.EllipticalSlice(model)
    mcmc = MCMC(kernel, num_warmup=20, num_samples=400, **QUIET)
    for sd in (0.7, 0.05):
        set_sd(sd)
        mcmc.run(KEY, GROUP, Y)
        draws = mcmc.get_samples()["u"]
        scale = 1 / np.sqrt(1 / sd**2 + 4 / 0.25)
        np.testing.assert_allclose(draws.mean(0), mean(), atol=5 * scale / 20)
        np.testing.assert_allclose(draws.std(0), scale, rtol=0.2)


@pytest.mark.slow
def test_gradients_see_what_a_global_is_now(set_sd):
    guide = gpaug.AutoLatentGaussian(model, covariance="dense")
    svi = SVI(model, guide, numpyro.optim.Adam(0.1), gpaug.TraceAnalytic_ELBO())
    state, losses = jax.jit(lambda: svi.init(KEY, GROUP, Y))(), []
    for sd in (0.7, 0.1, 0.7):
        set_sd(sd)
        losses.append(svi.evaluate(state, GROUP, Y))
    # The whitened posterior stays the same.
    assert abs(losses[0] - losses[1]) > 0.1
    assert losses[0] == losses[2]


def test_predictions_are_of_the_fit_or_name_what_has_changed(set_sd):
    svi = gpaug.ConjugateSVI(model, gpaug.AutoLatentGaussian(model))
    result = svi.run(KEY, 5, GROUP, Y, **QUIET)
    posterior = svi.posterior(result)
    nested = gpaug.NestedVI(model, num_points=128, **QUIET)
    nested.run(KEY, GROUP, Y)
    expected = posterior.predict_y(GROUP).mean
    set_sd(3.0)
    asked = (
        lambda: posterior.predict_y(GROUP),
        lambda: posterior.predict_f(GROUP[:2]),
        lambda: posterior.log_prob(GROUP, Y),
        lambda: svi.posterior(result),
        nested.posterior,
    )
    for ask in asked:
        with pytest.raises(ModelChangedError, match="reads SD, which has changed"):
            ask()
    # Cached results need no run of the model.
    table = posterior.summary()
    set_sd(0.7)
    np.testing.assert_allclose(table["mean"], mean(), rtol=1e-4)
    np.testing.assert_array_equal(posterior.predict_y(GROUP).mean, expected)
    # In another process the version is unknown.
    assert pickle.loads(pickle.dumps(result.version)) is None


def test_a_collapsed_model_that_others_compiled_says_so(set_sd):
    collapsed = gpaug.collapse(model)
    density = jax.jit(lambda y: log_density(collapsed, (GROUP, y), {}, {})[0])
    np.testing.assert_allclose(density(Y), evidence(), rtol=1e-4)
    set_sd(0.1)
    with pytest.raises(ModelChangedError, match="SD"):
        log_density(collapsed, (GROUP, Y), {}, {})


# Which changes are noticed, without a fit.

array, wrapped = np.arange(3.0), jnp.arange(3.0)
settings = {"scales": [1.0, 2.0]}
space = SimpleNamespace(sd=1.0)
prior = dist.Normal(0, jnp.array(2.0))
kernel = gpaug.kernels.Matern52(0.5)


@dataclass
class Scales:
    sd: float = 1.0
    unread: float = 1.0


scales = Scales()


class Named:
    sd = 1.0


def helper(x):
    return x * inner(x)


def inner(x):
    return x


@jax.jit
def compiled(x):
    return x * jnp.float32(SD)


def reader(x, factor=1.0):
    def local(z):
        return z + array + wrapped

    scaled = jax.vmap(helper)(x), compiled(x), prior, kernel, space.sd, Named.sd
    return local(x), settings["scales"], scales.sd, factor, scaled, jnp.exp(x)


class Study:
    """A model and its fits in one object, as users often write them."""

    unit = 1.0

    def __init__(self):
        self.sd, self.result = 1.0, None

    def model(self, x):
        return self.sd * self.scaled(x)

    def scaled(self, x):
        return self.unit * x

    def fit(self):
        return self.result


class Items:
    """Entries of an array or a list, as pytest sets them."""

    def __init__(self, entries):
        self.entries = entries

    def get(self, i, default):
        return self.entries[i]

    def __setitem__(self, i, value):
        self.entries[i] = value


CHANGES = {
    "number": lambda m: m.setitem(globals(), "SD", 2.0),
    "array": lambda m: m.setitem(globals(), "array", array + 1),
    "array in place": lambda m: m.setitem(Items(array), 1, 7.0),
    "array of JAX": lambda m: m.setitem(globals(), "wrapped", wrapped + 1),
    "container": lambda m: m.setitem(Items(settings["scales"]), 0, 7.0),
    "namespace": lambda m: m.setattr(space, "sd", 2.0),
    "dataclass": lambda m: m.setattr(scales, "sd", 2.0),
    "class": lambda m: m.setattr(Named, "sd", 2.0),
    "distribution": lambda m: m.setitem(globals(), "prior", dist.Normal(0, 3.0)),
    "kernel": lambda m: m.setitem(
        globals(), "kernel", gpaug.kernels.Matern52(jnp.float32(0.6))
    ),
    "function": lambda m: m.setitem(globals(), "inner", lambda x: x + 1),
    "default": lambda m: m.setattr(reader, "__defaults__", (2.0,)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_another_version(change):
    watch = watched(reader)
    before = watch.version()
    with pytest.MonkeyPatch.context() as patch:
        CHANGES[change](patch)
        assert watch.version() != before
    assert watch.version() == before


def test_other_dtypes_are_another_version():
    before = watched(reader).version()
    with enable_x64(not jax.config.jax_enable_x64):
        assert watched(reader).version() != before


def test_what_is_the_same_is_no_other_version(monkeypatch):
    before = watched(reader).version()
    # A notebook cell that runs again, at other lines.
    exec("\n\n\ndef inner(x):\n    return x\n", globals())
    monkeypatch.setitem(globals(), "array", array.copy())
    monkeypatch.setitem(globals(), "wrapped", wrapped + 0)
    monkeypatch.setattr(scales, "unread", 7.0)
    assert watched(reader).version() == before


def test_methods_closures_and_wrappers_are_read_through():
    study = Study()

    def made(sd):
        def inside(x):
            return sd * x

        def change(value):
            nonlocal sd
            sd = value

        return inside, change

    inside, change = made(1.0)
    assert watched(inside) is watched(inside)
    scaled = handlers.scale(functools.partial(inside), 2.0)
    kept = [watched(x) for x in (study.model, inside, scaled)]
    before = [x.version() for x in kept]
    study.result = "a fit"  # the model does not read it
    assert [x.version() for x in kept] == before
    study.sd = 2.0
    change(2.0)
    assert all(x.version() != old for x, old in zip(kept, before, strict=True))
    study.sd = 1.0
    assert kept[0].version() == before[0]
    Study.unit, unit = 2.0, Study.unit
    assert kept[0].version() != before[0]
    Study.unit = unit


def test_what_a_model_changes_itself_makes_it_no_other():
    calls = []

    def counts(x):
        calls.append(x)
        return x

    watch = watched(counts)
    before = watch.version()
    with watch.running():
        count_run()
        counts(1)
        # Programs that are made meanwhile belong to the same version.
        assert watch.version() == before
    assert watch.version() == before
    calls.clear()
    assert watch.version() == before


def test_constants_may_be_slices() -> None:
    """As Python 3.14 compiles ``x[:, 0]``."""
    code = (lambda x: x).__code__
    one, same, other = (
        _facts.__wrapped__(code.replace(co_consts=((slice(None, n), 0),))).code
        for n in (1, 1, 2)
    )
    assert one == same != other
