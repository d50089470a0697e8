# SPDX-License-Identifier: Apache-2.0
"""Rows added, of no weight: the same fits, from programs that similar data share."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from jax import lax
from scipy import stats

import numpyro_gpaug as gpaug
from numpyro_gpaug.model.arguments import Arguments
from numpyro_gpaug.model.padding import Padding
from numpyro_gpaug.model.rows import rows_independent
from tests.conftest import slow

KEY = jax.random.key(0)
GROUPS = np.arange(5.0)
CALLS = []


def binary(X, y=None, *, inducing):
    """Hyperparameters of both kinds."""
    CALLS.append(1)
    between = dist.constraints.interval(0.1, 10.0)
    lengthscale = numpyro.param("lengthscale", jnp.ones(2), constraint=between)
    variance = numpyro.sample("variance", dist.LogNormal(0.0, 1.0))
    kernel = gpaug.kernels.Matern52(lengthscale, variance)
    gp = gpaug.GaussianProcess("f", kernel, inducing)
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=gp(X)), obs=y)


def of_gp(X, y=None, *, inducing):
    """The model at fixed hyperparameters, for the variants below."""
    gp = gpaug.GaussianProcess("f", gpaug.kernels.SquaredExponential(1.0), inducing)
    return gp(X)


def classes(X, y=None, *, inducing):
    kernel = gpaug.kernels.SquaredExponential(1.0)
    gp = gpaug.GaussianProcess("f", kernel, inducing, num_latents=3)
    with numpyro.plate("data", X.shape[0]):
        likelihood = gpaug.distributions.LogisticSoftmax(gp(X))
        numpyro.sample("y", likelihood, obs=None if y is None else 2 * y)


def weights(X, y=None, *, inducing):
    beta = numpyro.sample("beta", dist.Normal(0.0, jnp.ones(2)).to_event(1))
    f = of_gp(X, inducing=inducing)
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=f + X @ beta), obs=y)


def centred_outside(X, y=None, *, inducing):
    # Repeated rows have the same maximum, and data may be looked up by row.
    X = X / jnp.abs(X).max(0)
    offset = jnp.asarray(GROUPS)[jnp.clip(jnp.int32(X[:, 0] * 5), 0, 4)]
    f = of_gp(X, inducing=inducing) + offset
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=f), obs=y)


def mean_of_rows(X, y=None, *, inducing):
    f = of_gp(X - X.mean(0), inducing=inducing)
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=f), obs=y)


def number_of_rows(X, y=None, *, inducing):
    f = of_gp(X, inducing=inducing) + 1 / len(X)
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=f), obs=y)


def param_from_rows(X, y=None, *, inducing):
    shift = numpyro.param("shift", X.sum())
    f = of_gp(X, inducing=inducing) + shift
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=f), obs=y)


def param_by_row(X, y=None, *, inducing):
    shift = numpyro.param("shift", lambda key: jnp.zeros(len(X)))
    f = of_gp(X, inducing=inducing) + shift
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=f), obs=y)


def no_plate(X, y=None, *, inducing):
    numpyro.sample("y", dist.Bernoulli(logits=of_gp(X, inducing=inducing)), obs=y)


def rows_in_an_event(X, y=None, *, inducing):
    f = of_gp(X, inducing=inducing)
    numpyro.sample("y", dist.Bernoulli(logits=f).to_event(1), obs=y)


def inducing_at_rows(X, y=None, *, inducing):
    f = of_gp(X, inducing=X)
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=f), obs=y)


def effect_by_row(X, y=None, *, inducing):
    with numpyro.plate("data", X.shape[0]):
        effect = numpyro.sample("effect", dist.Normal(0, 1))
        numpyro.sample("y", dist.Bernoulli(logits=effect), obs=y)


def plate_as_large(X, y=None, *, inducing):
    """The model has another plate around data, which here has as many members as there
    are rows.
    """
    f = of_gp(X, inducing=inducing)
    with numpyro.plate("items", 64, dim=-2), numpyro.plate("data", X.shape[0]):
        y = None if y is None else jnp.broadcast_to(y, (64, len(X)))
        numpyro.sample("y", dist.Bernoulli(logits=f), obs=y)


INDUCING = np.random.default_rng(0).normal(size=(7, 2)).astype(np.float32)


def data(num):
    rng = np.random.default_rng(num)
    X = rng.normal(size=(num, 2)).astype(np.float32)
    return X, (X[:, 0] * X[:, 1] > 0).astype(np.int32)


def fitted(svi, num, **options):
    X, y = data(num)
    options = {"inducing": INDUCING, "progress_bar": False, **options}
    return svi.run(KEY, 6, X, y, **options)


def alone(svi, num):
    """The same fit without added rows: by steps one at a time, which add none."""
    X, y = data(num)
    state, losses = svi.init(KEY, X, y, inducing=INDUCING), []
    for _ in range(6):
        state, loss = svi.update(state, X, y, inducing=INDUCING)
        losses.append(loss)
    return svi.get_params(state), np.array(losses)


@cache
def used(model, guide, optim):
    """A fitter that adds rows from now on."""
    svi = gpaug.ConjugateSVI(model, guide(model), optim)
    fitted(svi, 7)
    fitted(svi, 9)
    return svi


@pytest.mark.parametrize(
    ("model", "guide", "optim"),
    [slow(binary, gpaug.AutoSparseGP, optax.adam(0.05)),
     (weights, gpaug.AutoLatentGaussian, None),
     slow(classes, gpaug.AutoSparseGP, None),
     slow(centred_outside, gpaug.AutoSparseGP, None)],
)  # fmt: skip
def test_data_of_similar_size_share_programs_and_give_what_each_gives_alone(
    model, guide, optim
) -> None:
    svi = used(model, guide, optim)
    before, calls = compilations(svi), len(CALLS)
    found = fitted(svi, 13)
    assert compilations(svi) == before
    assert len(CALLS) <= calls + 1  # at most one further trace of the model
    params, losses = alone(svi, 13)
    np.testing.assert_allclose(found.losses[-1], losses[-1], rtol=2e-5)
    for name, value in params.items():
        np.testing.assert_allclose(found.params[name], value, rtol=2e-3, atol=2e-3)


def test_fits_of_a_guide_share_programs() -> None:
    model = partial(centred_outside)
    guide = gpaug.AutoSparseGP(model)
    first = used(model, lambda _: guide, "lbfgs")
    before, found = compilations(first), fitted(gpaug.ConjugateSVI(model, guide), 13)
    assert compilations(first) == before
    # The last digit depends on where in memory NumPy has put the rows.
    np.testing.assert_allclose(found.losses, fitted(first, 13).losses, rtol=1e-6)
    for other in (
        gpaug.ConjugateSVI(model, guide, updates="exact"),
        gpaug.ConjugateSVI(model, gpaug.AutoSparseGP(model)),
        gpaug.ConjugateSVI(partial(centred_outside), guide),
    ):
        assert other._programs is not first._programs


def compilations(svi):
    functions = svi._programs.advance, svi._programs.begin
    return [sum(x._cache_size() for x in fn._programs.values()) for fn in functions]


@pytest.mark.parametrize(
    "model",
    [mean_of_rows, number_of_rows, param_from_rows, param_by_row, no_plate,
     rows_in_an_event, inducing_at_rows, effect_by_row, plate_as_large],
)  # fmt: skip
def test_no_rows_are_added_where_they_could_change_a_fit(model) -> None:
    padding = Padding(model)
    kwargs = {"inducing": INDUCING}
    for num in (7, 9):
        arguments = Arguments.split(data(num), kwargs)
        assert padding(arguments) is arguments
    (proofs,) = padding._proved.values()
    assert list(proofs.values()) == [None]


LIKELIHOODS = {
    "Bernoulli": lambda f: dist.Bernoulli(logits=f[:, 0]),
    "Binomial": lambda f: dist.Binomial(3, logits=f[:, 0]),
    "Categorical": lambda f: dist.Categorical(logits=f),
    "logistic softmax": gpaug.LogisticSoftmax,
    "robust max": gpaug.RobustMax,
    "Bayesian SVM": lambda f: gpaug.BayesianSVM(f[:, 0]),
    "Normal": lambda f: dist.Normal(f[:, 0], jnp.exp(f[:, 1])),
    "Student-t": lambda f: dist.StudentT(4.0, f[:, 0], 0.5),
    "Laplace": lambda f: dist.Laplace(f[:, 0], 0.5),
    "Poisson": lambda f: dist.Poisson(jnp.exp(f[:, 0])),
    "negative binomial": lambda f: dist.NegativeBinomial2(jnp.exp(f[:, 0]), 2.0),
    "zero-inflated": lambda f: dist.ZeroInflatedPoisson(0.2, jnp.exp(f[:, 0])),
    "Gamma": lambda f: dist.Gamma(2.0, jnp.exp(f[:, 0])),
    "Beta": lambda f: dist.Beta(jnp.exp(f[:, 0]), 2.0),
    "ordinal": lambda f: dist.OrderedLogistic(f[:, 0], jnp.array([-1.0, 1.0])),
    "Weibull": lambda f: dist.Weibull(jnp.exp(f[:, 0]), 2.0),
}


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_rows_are_added_whatever_the_likelihood(name) -> None:
    traced = []

    def model(X, y=None, *, inducing):
        traced.append(len(X))
        kernel = gpaug.kernels.SquaredExponential(1.0)
        f = gpaug.GaussianProcess("f", kernel, inducing, num_latents=3)(X)
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", LIKELIHOODS[name](f), obs=y)

    padding, kwargs = Padding(model), {"inducing": INDUCING}
    for num in (7, 9, 10):
        found = padding(Arguments.split(data(num), kwargs))
    assert found.num_rows == 64
    assert traced == [9, 64]  # one proof serves more rows


def test_arrays_that_once_have_as_many_entries_as_there_are_rows() -> None:
    """There are as many inducing inputs as rows in one data set, but not in another."""
    padding, kwargs = Padding(binary), {"inducing": INDUCING}
    for num in (7, 9, 7):
        found = padding(Arguments.split(data(num), kwargs))
    shapes = [x.shape for x in found.arrays]
    assert shapes == [(64, 2), (64,), INDUCING.shape, ()]
    again = found.counted()
    for x, y in zip(again.arrays, (*data(7), INDUCING), strict=True):
        np.testing.assert_array_equal(x, y)


def effects(X, y=None, *, inducing):
    """Hyperparameters integrated, and a deterministic site with a row per datum."""
    tau = numpyro.sample("tau", dist.HalfNormal(1.0))
    with numpyro.plate("groups", 4):
        effect = numpyro.sample("effect", dist.Normal(0, tau))
    code = jnp.int32(jnp.abs(X[:, 1]) * 10) % 4
    eta = numpyro.deterministic("eta", effect[code])
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", dist.Normal(eta, 0.5), obs=y)


@pytest.mark.slow
def test_integrated_hyperparameters_with_added_rows() -> None:
    nested = gpaug.NestedVI(effects, num_points=128, progress_bar=False)
    for num in (12, 15):
        X, y = data(num)
        nested.run(KEY, X, y, inducing=INDUCING)
    assert nested._run.data.num_rows == 64
    same = np.subtract.outer(*2 * [np.int32(np.abs(X[:, 1]) * 10) % 4]) == 0
    taus = np.linspace(0.005, 5, 1000)
    logs = [
        stats.multivariate_normal(np.zeros(15), t**2 * same + 0.25 * np.eye(15)).logpdf(
            y
        )
        for t in taus
    ]
    exact = np.exp(logs) @ stats.halfnorm.pdf(taus) * (taus[1] - taus[0])
    found = nested.get_extra_fields()["log_evidence"]
    np.testing.assert_allclose(found, np.log(exact), atol=0.02)
    assert nested.get_samples()["eta"].shape == (1000, 15)
    assert [x.shape for x in nested.arguments.arrays] == [(15, 2), (15,), (7, 2)]
    assert nested.posterior().predict_y(X[:5]).mean.shape == (5,)


def test_messages_have_the_numbers_of_the_data() -> None:
    svi = used(weights, gpaug.AutoLatentGaussian, None)
    X, y = data(11)
    with pytest.raises(ValueError, match=r"'y': observations of shape \(11,\)"):
        svi.run(
            KEY, 3, X, y + 5 * (np.arange(11) == 3), inducing=INDUCING,
            progress_bar=False,
        )  # fmt: skip


ROWWISE = {
    "elementwise": lambda x: jnp.exp(x) * x[:, :1] + 1,
    "sum of columns": lambda x: x.sum(1),
    "product": lambda x: x @ jnp.ones((2, 3)),
    "largest row": lambda x: x - x.max(0),
    "turned": lambda x: x.T[None].reshape(1, 1, 2, -1),
    "looked up": lambda x: jnp.arange(4.0)[jnp.int32(x[:, 0])],
    "columns": lambda x: x[:, jnp.array([1, 0, 1])],
    "each row by its own": lambda x: jnp.take_along_axis(
        x, jnp.int32(x[:, :1] > 0), axis=1
    ),
    "stacked": lambda x: jnp.stack([x, 2 * x], 1),
    "columns of a stack": lambda x: jax.vmap(lambda i: x[:, i])(jnp.eye(2, dtype=int)),
    "columns of zeros": lambda x: jnp.zeros_like(x).at[:, 1].set(x[:, 0]),
    "place in order": lambda x: jnp.searchsorted(jnp.arange(4.0), x[:, 0]),
    "constant": lambda x: jnp.zeros(len(x)) + jnp.arange(2.0)[:, None],
    "inner function": lambda x: jax.jit(jax.nn.softplus)(x)[:, 1],
    "branch": lambda x: lax.cond(True, lambda: x, lambda: 2 * x),
    "loop": lambda x: lax.fori_loop(0, 3, lambda i, y: y + x, x),
}
MIXED = {
    "mean": lambda x: x - x.mean(0),
    "running sum": lambda x: jnp.cumsum(x, 0),
    "order": lambda x: jnp.sort(x, 0),
    "mirrored": lambda x: x[::-1],
    "rows": lambda x: x[jnp.array([1, 0, 1])],
    "rows and columns": lambda x: x[jnp.arange(len(x)) // 2, 0],
    "rows of zeros": lambda x: jnp.zeros_like(x).at[jnp.array([1, 0])].set(1),
    "sums of rows": lambda x: jnp.zeros_like(x).at[jnp.int32(x[:, 0])].add(x),
    "rows by their values": lambda x: x[jnp.int32(x[:, 0])],
    "shifted": lambda x: jnp.roll(x, 1, 0),
    "without the first": lambda x: x[1:],
    "first": lambda x: x[0],
    "raveled": lambda x: x.ravel(),
    "products of rows": lambda x: x @ x.T,
    "over rows": lambda x: x.T @ x,
    "side by side": lambda x: jnp.concatenate([x, x]),
    "number": lambda x: x / len(x),
    "constant of rows": lambda x: x[:, 0] + np.linspace(0, 1, len(x)),
    "draws": lambda x: x[:, 0] + jax.random.normal(KEY, (len(x),)),
    "branches by number": lambda x: x if len(x) > 6 else 2 * x,
    "in a loop": lambda x: lax.fori_loop(0, 3, lambda i, y: y - y.mean(0), x),
    "scan": lambda x: lax.scan(lambda c, row: (c + row, c), jnp.zeros(2), x)[1],
    "turned by name": lambda x: x.reshape(2, -1),
}  # fmt: skip


@pytest.mark.parametrize("name", [*ROWWISE, *MIXED])
def test_the_proof(name) -> None:
    function = (ROWWISE | MIXED)[name]
    few, many = (jax.make_jaxpr(function)(jnp.zeros((num, 2))) for num in (6, 9))
    assert rows_independent(few, many) is (name in ROWWISE)
