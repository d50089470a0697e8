# SPDX-License-Identifier: Apache-2.0
"""Arguments of a fit: bad data, labels, plates, keys and starts raise early and by
name. Nothing ends in NaN or in a fit of something else.
"""

import pickle
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro import handlers
from scipy import sparse

import numpyro_gpaug as gpaug
from numpyro_gpaug.model.arguments import Arguments
from tests.conftest import compilations
from tests.problems import classifier, learnt, regression, toy

KEY = jax.random.key(0)
X, Y = toy(16)
Z = X[:4]
KERNEL = gpaug.kernels.Matern52
FORGOTTEN = r"site 'y' has no observed value: .*numpyro\.sample\(\.\.\., obs=y\)"


def bad(X, row=0):
    X = np.array(X, float)
    X[row] = np.nan
    return X


def init(model, *args, **kwargs):
    kwargs.setdefault("inducing", Z)
    return gpaug.ConjugateSVI(model, gpaug.AutoSparseGP(model)).init(
        KEY, *args, **kwargs
    )


@pytest.fixture(scope="module")
def fitted():
    """A fit of the classifier, once for all tests."""
    svi = gpaug.ConjugateSVI(classifier, gpaug.AutoSparseGP(classifier))
    return svi, svi.run(KEY, 2, X, Y, inducing=Z, progress_bar=False)


# -- single steps ---------------------------------------------------------------------


@pytest.mark.parametrize("step", ["update", "evaluate"])
def test_a_step_refuses_what_a_fit_refuses(fitted, step) -> None:
    svi, result = fitted
    call = getattr(svi, step)
    with pytest.raises(ValueError, match=r"X has shape \(16, 2\) and 2 NaN"):
        call(result.state, bad(X), Y, inducing=Z)
    with pytest.raises(ValueError, match=r"convert -1/\+1 labels with \(y \+ 1\) // 2"):
        call(result.state, X, 2 * Y - 1, inducing=Z)
    with pytest.raises(ValueError, match=FORGOTTEN):
        call(result.state, X, inducing=Z)


def init_joint(model, *args):
    svi = gpaug.ConjugateSVI(model, gpaug.AutoLatentGaussian(model))
    return svi.init(KEY, *args)


def effects(X, y=None, *, likelihood):
    b = numpyro.sample("b", dist.Normal(0, 1))
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", likelihood(b * X[:, 0]), obs=y)


def analytic(model):
    guide = gpaug.AutoLatentGaussian(model, covariance="dense")
    loss = gpaug.TraceAnalytic_ELBO()
    return numpyro.infer.SVI(model, guide, optax.adam(0.1), loss)


def logits(f):
    return dist.Bernoulli(logits=f)


@pytest.mark.parametrize(
    ("likelihood", "forgets"),
    [
        (logits, lambda m: init_joint(m, X)),
        (logits, lambda m: gpaug.NestedVI(m).run(KEY, X)),
        (logits, lambda m: gpaug.EllipticalSlice(m).init(KEY, 0, None, (X,), {})),
        (dist.Normal, lambda m: jax.eval_shape(lambda: analytic(m).run(KEY, 1, X))),
    ],
)
def test_observations_that_were_forgotten_are_named(likelihood, forgets) -> None:
    """Discrete ones, which no latent can be, and real ones, which could."""
    with pytest.raises(ValueError, match=FORGOTTEN):
        forgets(partial(effects, likelihood=likelihood))


def test_what_is_not_pickled_says_what_to_do(fitted) -> None:
    svi, result = fitted
    nested = gpaug.NestedVI(svi.model)
    cures = {svi: "create", nested: "create", svi.posterior(result): "save"}
    for unwritten, cure in cures.items():
        with pytest.raises(TypeError, match=rf"which cannot be pickled: {cure}"):
            pickle.dumps(unwritten)
    again = pickle.loads(pickle.dumps(result))
    np.testing.assert_array_equal(again.losses, result.losses)


def test_checks_of_steps_cost_one_compilation_and_none_under_jit(fitted) -> None:
    svi, result = fitted
    state, expected = svi.update(result.state, X, Y, inducing=Z)
    before = compilations("flags")
    for labels in (1 - Y, Y, 1 - Y):
        svi.update(state, X, labels, inducing=Z)
    assert compilations("flags") == before

    @jax.jit
    def steps(state, X, y):
        return jax.lax.scan(
            lambda s, _: svi.update(s, X, y, inducing=Z), state, length=2
        )

    losses = steps(result.state, X, Y)[1]
    np.testing.assert_allclose(losses[0], expected, rtol=1e-4)
    assert np.isnan(steps(result.state, bad(X), Y)[1]).all()


# -- plates ---------------------------------------------------------------------------


def plated(X, y=None, *, inducing, size, batch=None, take=False, doubled=False):
    gp = gpaug.GaussianProcess("f", KERNEL(), inducing)
    with numpyro.plate("data", size, subsample_size=batch) as i:
        rows = i // 2 if doubled else i
        inputs = jnp.take(X, rows, axis=0) if take else X[rows]
        obs = None if y is None else y[i]
        numpyro.sample("y", dist.Bernoulli(logits=gp(inputs)), obs=obs)


LARGER = r"'data' has size 400.*shape \(16, 2\)"
SMALLER = r"'data' has size {}, .* shape \(16, 2\), so that its other rows"
ONE_ROW = "plate 'data', which has .* 1 of 16 rows"
NUMBER = "size of plate 'data' must be "


@pytest.mark.parametrize(
    ("data", "how", "message"),
    [
        *(
            ((X, Y), {"size": 400, "batch": b, "take": t}, LARGER)
            for b in (None, 4, 16)
            for t in (False, True)
        ),
        *(
            ((inputs, Y), {"size": size, "batch": b}, SMALLER.format(size))
            for size, b in ((8, None), (8, 4), (1, None), (12, 12))
            for inputs in (X, X - X.mean(0))
        ),
        *(
            ((toy(rows)[0], toy(labels)[1]), {"size": size}, "plate 'data' has size")
            for rows, labels in ((16, 20), (20, 16), (1, 16), (16, 1))
            for size in (rows, labels)
        ),
        ((X, np.int32(1)), {"size": 16}, r"X: .*\[16, 2\], y: int32\[\], inducing"),
        ((X, Y), {"size": 16, "batch": -5}, f"sub.*{NUMBER}a whole .* >= 1, got -5"),
        ((X, Y), {"size": 16, "batch": 0}, f"subsample_{NUMBER}"),
        ((X, Y), {"size": 16, "batch": 2.5}, f"subsample_{NUMBER}"),
        ((X, Y), {"size": 16, "batch": 8.0}, f"subsample_{NUMBER}an int, got 8.0"),
        ((X, Y), {"size": 16, "batch": True}, f"subsample_{NUMBER}an int, got True"),
        ((X, Y), {"size": 2.5}, f"{NUMBER}a whole number"),
        ((X, Y), {"size": 16, "batch": 50}, "subsample_size 50, more than its size 16"),
    ],
)
def test_a_plate_that_does_not_fit_its_data(data, how, message) -> None:
    with pytest.raises((IndexError, ValueError), match=message):
        init(plated, *data, **how)


def rows_passed_in(X, y=None, *, inducing, size, batch=None):
    gp = gpaug.GaussianProcess("f", KERNEL(), inducing)
    with numpyro.plate("data", size, subsample_size=batch):
        numpyro.sample("y", dist.Bernoulli(logits=gp(X)), obs=y)


@pytest.mark.parametrize(
    ("size", "batch", "message"),
    [
        # All rows would be broadcast into it, and count ``size`` times.
        *((size, b, ONE_ROW) for size, b in ((1, None), (16, 1), (400, 1))),
        (25, None, r"X: .*\[16, 2\], y: .*\[16\].* a plate have another size"),
    ],
)
def test_a_plate_that_does_not_fit_rows_passed_in(size, batch, message) -> None:
    with pytest.raises(ValueError, match=message):
        init(rows_passed_in, X, Y, size=size, batch=batch)


def test_later_rows_that_a_plate_leaves_out(fitted) -> None:
    svi = gpaug.ConjugateSVI(plated, gpaug.AutoSparseGP(plated))
    result = svi.run(KEY, 2, X, Y, inducing=Z, size=16, progress_bar=False)
    more, labels = toy(20)
    posterior = svi.posterior(result)
    for call in (
        lambda: svi.update(result.state, more, labels, inducing=Z, size=16),
        lambda: svi.evaluate(result.state, more, labels, inducing=Z, size=16),
        lambda: posterior.predict_y(more),
    ):
        with pytest.raises(ValueError, match="'data' has size 16, .*other rows"):
            call()
    np.testing.assert_allclose(
        posterior.predict_y(more, size=20).probs[:16], posterior.predict_y(X).probs,
        rtol=1e-5,
    )  # fmt: skip


def lagged(X, y, *, inducing, ahead=1):
    """A plate of steps: its index and the next one take every observation."""
    gp = gpaug.GaussianProcess("f", KERNEL(), inducing)
    with numpyro.plate("steps", len(y) - 1) as i:
        change = gp(X[i]) + y[i]
        numpyro.sample("y", dist.Normal(change, 1.0), obs=y[i + ahead])


def test_plates_that_fit_their_data() -> None:
    guide = gpaug.AutoSparseGP(plated)
    guide.setup(X, Y, inducing=Z, size=16, batch=4)
    guide.setup(X[:8], Y, inducing=Z, size=16, doubled=True)
    # Users leave rows out before the call.
    guide.setup(X[:8], Y[:8], inducing=Z, size=8)
    gpaug.AutoSparseGP(lagged).setup(X[:15], X[:, 0], inducing=Z)
    with pytest.raises(ValueError, match="'steps' has size 15, .* array of shape"):
        gpaug.AutoSparseGP(lagged).setup(X[:15], X[:, 0], inducing=Z, ahead=2)

    def batched(X, y=None, *, inducing):
        """The model with rows passed in: the plate has only their number."""
        gp = gpaug.GaussianProcess("f", KERNEL(), inducing)
        with numpyro.plate("data", 400, subsample_size=X.shape[0]):
            numpyro.sample("y", dist.Bernoulli(logits=gp(X)), obs=y)

    found = gpaug.AutoSparseGP(batched).setup(X, Y, inducing=Z).structure
    assert found.subsampled["data"] == (400, 16)


def test_a_later_plate_larger_than_its_data(fitted) -> None:
    svi = gpaug.ConjugateSVI(plated, gpaug.AutoSparseGP(plated))
    state = svi.init(KEY, X, Y, inducing=Z, size=16, batch=4)
    with pytest.raises(ValueError, match="'data' has size 40,"):
        svi.update(state, X, Y, inducing=Z, size=40, batch=4)


# -- observations ---------------------------------------------------------------------


def test_labels_of_held_out_data(fitted) -> None:
    svi, result = fitted
    posterior = svi.posterior(result)
    with pytest.raises(ValueError, match=r"'y'.*convert -1/\+1 labels"):
        posterior.log_prob(X, 2 * Y - 1)
    with pytest.raises(ValueError, match="16 NaN, outside the support"):
        posterior.log_prob(X, np.full(16, np.nan))
    traced = jax.jit(posterior.log_prob)(X, 2 * Y - 1)
    np.testing.assert_array_equal(np.isnan(traced), Y == 0)


def masked(X, y=None, mask=None, *, inducing):
    gp = gpaug.GaussianProcess("f", KERNEL(), inducing)
    with numpyro.plate("data", X.shape[0]), handlers.mask(mask=mask):
        numpyro.sample("y", dist.Normal(gp(X), 0.5), obs=y)


def test_missing_observations_under_a_mask() -> None:
    values, known = X[:, 0], np.arange(16) > 2
    svi = gpaug.ConjugateSVI(masked, gpaug.AutoSparseGP(masked), optax.adam(0.1))
    losses, means = [], []
    for missing in (np.nan, 0.0):
        y = np.where(known, values, missing).astype(values.dtype)
        fit = svi.run(KEY, 2, X, y, known, inducing=Z, progress_bar=False)
        posterior = svi.posterior(fit)
        losses.append(svi.update(fit.state, X, y, known, inducing=Z)[1])
        means.append(posterior.log_prob(X, y, known))
    np.testing.assert_array_equal(losses[0], losses[1])
    np.testing.assert_array_equal(means[0], means[1])
    with pytest.raises(ValueError, match=r"13 NaN.*handlers\.mask"):
        svi.init(KEY, X, np.where(known, np.nan, values), known, inducing=Z)
    with pytest.raises(ValueError, match=r"X has shape .* 2 NaN.*under a mask"):
        svi.init(KEY, bad(X), values, known, inducing=Z)


def test_missing_observations_without_a_mask() -> None:
    with pytest.raises(ValueError, match=r"'y'.*1 NaN.*handlers\.mask"):
        init(regression, X, bad(X[:, 0]))


@pytest.mark.parametrize("guide", [gpaug.AutoSparseGP, gpaug.AutoLatentGaussian])
def test_known_parameters_that_break_their_constraints(guide) -> None:
    def model(X, spread, y, *, inducing):
        f = gpaug.GaussianProcess("f", KERNEL(1.0), inducing=inducing)(X)
        numpyro.sample("shift", dist.Normal(jnp.zeros(16), spread).to_event(1))
        with numpyro.plate("data", 16):
            numpyro.sample("y", dist.Bernoulli(logits=f), obs=y)

    given = Arguments.split((X, -jnp.ones(16), Y), {"inducing": Z})
    with pytest.raises(ValueError, match="'shift': parameter 'scale' of Normal, of sh"):
        guide(model).check_data(given)


def test_obs_mask_is_told_what_to_do() -> None:
    def model(X, y=None, mask=None, *, inducing):
        gp = gpaug.GaussianProcess("f", KERNEL(), inducing)
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(gp(X), 0.5), obs=y, obs_mask=mask)

    known = np.arange(16) > 2
    with pytest.raises(gpaug.NotConjugateError, match=r"handlers\.mask\(mask=obs_mask"):
        init(model, X, X[:, 0], known)


# -- arguments ------------------------------------------------------------------------


def positional(X, y=None, inducing=None):
    return classifier(X, y, inducing=inducing)


@pytest.mark.parametrize(
    ("error", "message", "args"),
    [
        (ValueError, r"inducing of shape \(4, 2\).*Pass inducing=", (X, Y, Z)),
        (ValueError, r"X has shape \(16, 2\) and no entry as large as 1.1e-19, so",
         (np.float32(1e-20) * X, Y)),
        (ValueError, r"shape \(16, 2\).*one whole number .*pass y.argmax\(-1\), of",
         (X, np.stack([Y, 1 - Y], -1))),
        (ValueError, r"shape \(16, 1\).*pass y\[\.\.\., 0\], of",
         (X, Y[:, None])),
        (TypeError, "y is a list of 16 strings. Encode", (X, ["a", "b"] * 8)),
        (TypeError, r"X is a SciPy sparse.*toarray", (sparse.csr_array(X), Y)),
        (ValueError, "X has shape .*complex.*expected real", (X + 1j, Y)),
        (ValueError, r"X has shape .*integers above 2\*\*24",
         (2**24 + np.arange(32).reshape(16, 2), Y)),
        (TypeError, r"y is a tuple of 16: pass an array", (X, tuple(Y))),
        (TypeError, r"X is a masked array of shape \(16, 2\)",
         (np.ma.masked_greater(X, 1), Y)),
        (TypeError, r"y is a masked array .*handlers\.mask",
         (X, np.ma.masked_equal(Y, 1))),
        (ValueError, r'X has .*dtype float16: pass X.astype\("float32"',
         (np.asarray(X, "float16"), Y)),
        (ValueError, r'X has .*dtype >f4: pass X.astype', (X.astype(">f4"), Y)),
        (ValueError, r'X has .*dtype [<>]f1[26]: pass X', (X.astype("longdouble"), Y)),
        (TypeError, "X contains dates. Pass numbers, such as days",
         (np.full((16, 2), np.datetime64("2020-01-01")), Y)),
        (ValueError, r"y has .*integers from .* to 5000000000, which JAX",
         (X, 5_000_000_000 * Y.astype("int64"))),
        (TypeError, r"too many .*takes \(X, .*\(16,\), \(4, 2\), \(\)", (X, Y, Z, 1)),
    ],
)  # fmt: skip
def test_arguments(error, message, args) -> None:
    kwargs = {} if len(args) > 2 else {"inducing": Z}
    svi = gpaug.ConjugateSVI(positional, gpaug.AutoSparseGP(positional))
    with pytest.raises(error, match=message):
        svi.run(KEY, 1, *args, **kwargs)


def test_large_counts_are_no_inputs() -> None:
    guide = gpaug.AutoSparseGP(classifier)
    svi = gpaug.ConjugateSVI(classifier, guide)
    with pytest.raises(ValueError, match="outside the support"):
        svi.init(KEY, X, Y + 2**25, inducing=Z)


def test_inputs_of_more_digits_than_the_inducing_inputs(x64) -> None:
    message = r'"f"\) has inputs of float64 and inducing inputs of float32'
    with pytest.raises(ValueError, match=message):
        init(classifier, np.asarray(X, float), Y, inducing=np.float32(Z))


@pytest.mark.parametrize("key", [X, 0, None])
def test_a_key_that_is_none(fitted, key) -> None:
    svi, result = fitted
    calls = (
        lambda: svi.init(key, X, Y, inducing=Z),
        lambda: svi.run(key, 3, X, Y, inducing=Z),
        lambda: svi.posterior(result).sample(key, X),
    )
    for call in calls:
        with pytest.raises(TypeError, match="expected a random key"):
            call()


def test_keys_of_either_kind(fitted) -> None:
    svi, result = fitted
    posterior = svi.posterior(result)
    for key in (KEY, jax.random.PRNGKey(0)):
        assert posterior.sample(key, X[:3]).shape == (3,)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_steps": 10.5}, "num_steps must be a whole number >= 1, got 10.5"),
        ({"num_steps": np.nan}, "num_steps must be a whole number"),
        ({"num_steps": "3"}, "num_steps must be a whole number >= 1, got '3'"),
        ({"tol": np.nan}, "tol must be a number >= 0 or None, got nan"),
        ({"tol": -1.0}, "tol must be a number"),
    ],
)
def test_numbers_of_steps(fitted, options, message) -> None:
    with pytest.raises(ValueError, match=message):
        fitted[0].run(KEY, options.pop("num_steps", 3), X, Y, inducing=Z, **options)


@pytest.mark.parametrize("batch_size", [-5, 0, 2.5, "all"])
def test_rows_per_block(fitted, batch_size) -> None:
    svi, result = fitted
    with pytest.raises(ValueError, match="batch_size must be a whole number >= 1"):
        svi.posterior(result).predict_y(X, batch_size=batch_size)


# -- processes and starts -------------------------------------------------------------


def test_a_process_that_is_never_called() -> None:
    def model(X, y=None, *, inducing, itself=False):
        gp = gpaug.GaussianProcess("f", KERNEL(), inducing)
        other = gpaug.GaussianProcess("g", KERNEL(), inducing)
        with numpyro.plate("data", X.shape[0]):
            logits = other if itself else gp(X)
            numpyro.sample("y", dist.Bernoulli(logits=logits), obs=y)

    with pytest.raises(ValueError, match=r'"g"\) is never called'):
        init(model, X, Y)
    with pytest.raises(TypeError, match=r'"g"\) is used as an array.*gp\(X\)'):
        init(model, X, Y, itself=True)


TURNED = np.eye(4) + np.triu(np.ones((4, 4)), 1)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("lengthscale", np.ones(3), r"has shape \[\(3,\)\], expected \[\(\)\]"),
        ("f.v_auto_potential", np.ones(3), r"\[\(3,\)\], expected \[\(4,\)\]"),
        ("f.v_auto_precision", np.ones(16), r"\[\(16,\)\], expected \[\(4, 4\)\]"),
        ("f.v_auto_precision", -np.eye(4), "not symmetric and positive definite"),
        ("f.v_auto_precision", TURNED, "not symmetric and positive definite"),
        ("f.v_auto_precision", np.nan * TURNED, "not symmetric and positive definite"),
    ],
)
def test_values_to_start_from(name, value, message) -> None:
    with pytest.raises(ValueError, match=rf"init_params\['{name}'\].*{message}"):
        init(learnt, X, Y, init_params={name: jnp.asarray(value)})


def test_natural_parameters_are_not_for_gradients() -> None:
    guide = gpaug.AutoSparseGP(classifier)
    svi = numpyro.infer.SVI(
        classifier, guide, optax.adam(0.1), gpaug.TraceAnalytic_ELBO()
    )
    message = 'AutoSparseGP.*covariance="dense".*or this guide by ConjugateSVI'
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(lambda: svi.init(KEY, X, Y, inducing=Z))


def test_distances_are_of_functions() -> None:
    guide = gpaug.AutoLatentGaussian(classifier, covariance="dense")
    with pytest.raises(TypeError, match="a AutoLatentGaussian.*AutoFunctionSpaceGP"):
        gpaug.TraceWasserstein_ELBO().loss(KEY, {}, classifier, guide, X, Y)


def test_inducing_inputs_by_position_are_told_their_name() -> None:
    def keyword(X, y=None, *, inducing):
        raise AssertionError("not run")

    X = np.zeros((5, 2), np.float32)
    svi = gpaug.ConjugateSVI(keyword, gpaug.AutoSparseGP(keyword))
    with pytest.raises(TypeError, match="pass inducing=... by name"):
        svi.init(jax.random.key(0), X, np.zeros(5, int), X)


def test_guides_of_other_models_are_refused() -> None:
    def counts(X, y=None, *, inducing):
        gp = gpaug.GaussianProcess("f", KERNEL(1.0), inducing)
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", dist.Poisson(jnp.exp(gp(X))), obs=y)

    def others(X, y=None, *, inducing):
        numpyro.sample("b", dist.Normal(0, 1))
        counts(X, y, inducing=inducing)

    def wrapped(X, y=None, *, inducing):
        counts(X, y, inducing=inducing)

    guide = gpaug.AutoLatentGaussian
    for model, of, message in (
        (counts, classifier, "'y' is BernoulliLogits and not Poisson. Pass AutoLatent"),
        (counts, others, "another model, where site 'b' is Normal and not missing"),
    ):
        with pytest.raises(ValueError, match=message):
            gpaug.ConjugateSVI(model, guide(of)).init(KEY, X, Y, inducing=Z)
    gpaug.ConjugateSVI(counts, guide(wrapped)).init(KEY, X, Y, inducing=Z)


def test_models_that_need_values_say_what_to_write() -> None:
    def branching(x, y=None):
        b = numpyro.sample("b", dist.Normal(0, 1))
        b = -b if b > 0 else b
        numpyro.sample("y", dist.Normal(b * x, 1).to_event(1), obs=y)

    def in_numpy(x, y=None):
        b = numpyro.sample("b", dist.Normal(0, 1))
        numpyro.sample("y", dist.Poisson(np.exp(b * x)).to_event(1), obs=y)

    for model, message in (
        (branching, r"branches .* on a latent.*jnp\.where"),
        (in_numpy, r"jax\.numpy \(jnp\.exp, not np\.exp\)"),
    ):
        svi = gpaug.ConjugateSVI(model, gpaug.AutoLatentGaussian(model))
        with pytest.raises(TypeError, match=message):
            svi.init(KEY, X[:, 0], Y)


def test_objects_that_do_not_predict_name_the_one_that_does() -> None:
    svi = gpaug.ConjugateSVI(classifier, gpaug.AutoSparseGP(classifier))
    for it in (svi, gpaug.NestedVI(classifier)):
        with pytest.raises(AttributeError, match=r"posterior\(.*\) predicts"):
            it.predict_y(X)
        assert not hasattr(it, "anything_else")
