# SPDX-License-Identifier: Apache-2.0
"""Data that are read while a fit goes on: minibatches, all of them in blocks, and
sources that fail."""

from threading import Event
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pandas as pd
import pytest

import numpyro_gpaug as gpaug
from numpyro_gpaug.infer import load_state, save_state
from numpyro_gpaug.infer.vi import batches as module
from numpyro_gpaug.infer.vi.feeds import Reader, RunArguments
from tests.conftest import slow

KEY = jax.random.key(0)
ROWS, SIZE = 53, 10
QUIET = {"progress_bar": False}


def model(X, y=None, *, Z, total=None):
    scale = numpyro.param("scale", 1.0, constraint=dist.constraints.positive)
    gp = gpaug.GaussianProcess("f", gpaug.kernels.Matern52(scale), Z)
    with numpyro.plate("data", total or len(X), subsample_size=len(X)):
        numpyro.sample("y", dist.Bernoulli(logits=gp(X)), obs=y)


def effects(X, y=None, *, Z):
    a = numpyro.sample("a", dist.Normal(0.0, 1.0))
    tau = numpyro.sample("tau", dist.HalfNormal(1.0))
    w = numpyro.sample("w", dist.Normal(jnp.zeros(2), tau).to_event(1))
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", dist.Poisson(jnp.exp(a + X @ w)), obs=y)


@pytest.fixture(scope="module")
def data():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(ROWS, 2)).astype("float32")
    labels = (X[:, 0] * X[:, 1] > 0).astype("int32")
    heavy = (X[:, 0] + 0.3 * rng.standard_t(3, ROWS)).astype("float32")
    counts = rng.poisson(2.0, ROWS).astype("int32")
    waves = np.sin(2 * X[:, 0]) + X @ [0.8, -0.5] + 0.1 * rng.normal(size=ROWS)
    parts = {"y": labels, "heavy": heavy, "counts": counts}
    return SimpleNamespace(X=X, Z=X[:5], waves=waves.astype("float32"), **parts)


@pytest.fixture(scope="module")
def svi():
    return gpaug.ConjugateSVI(model, gpaug.AutoSparseGP(model), optax.adam(0.05))


@pytest.fixture
def small(monkeypatch):
    """Compute in several blocks, and several groups of them, as with large data."""
    monkeypatch.setattr("numpyro_gpaug.infer.vi.batches.BLOCK", 8)
    monkeypatch.setattr(module, "SHUFFLED", 20)
    monkeypatch.setattr(module, "PIECE", 10)


# -- what is read ---------------------------------------------------------------------


def test_epochs_are_shuffled_and_can_begin_anywhere(small, tmp_path):
    numbers = np.memmap(tmp_path / "x", dtype="int32", mode="w+", shape=(ROWS,))
    numbers[:] = np.arange(ROWS)
    batches = gpaug.Batches((numbers,), SIZE, seed=1)
    assert (batches.rows, batches.size, len(batches)) == (53, 10, 5)
    epochs = [[x for (x,) in batches.epoch(n)] for n in range(2)]
    for epoch in epochs:
        assert [len(x) for x in epoch] == [SIZE] * 5
        assert len(np.unique(epoch)) == 50
        # A batch mixes rows of several blocks, in another order.
        assert len(np.unique(epoch[0] // 8)) > 1
        assert (np.diff(epoch[0]) < 0).any()
    assert not np.array_equal(*epochs)
    for start in range(5):
        again = gpaug.Batches((numbers,), SIZE, seed=1).epoch(1, start)
        np.testing.assert_array_equal([x for (x,) in again], epochs[1][start:])
    other = next(gpaug.Batches((numbers,), SIZE, seed=2).epoch(0))[0]
    assert not np.array_equal(other, epochs[0][0])
    whole = [x for (x,) in batches.blocks()]
    assert [len(x) for x in whole] == [10] * 5 + [3]
    np.testing.assert_array_equal(np.concatenate(whole), np.arange(ROWS))


def test_the_next_part_is_read_while_the_last_is_used(data):
    """Each part has 20 batches: reading does not wait for its last one."""

    class Parts:
        sizes = [20, 20]

        def __init__(self):
            self.seen = [Event(), Event()]

        def read(self, block):
            self.seen[block].set()
            return data.X[:20], data.y[:20]

    parts = Parts()
    given = RunArguments.split(None, (gpaug.Blocks(parts, 1),), {"Z": data.Z})
    reader = Reader(given, model, None, None).blocks()
    next(reader)
    assert parts.seen[1].wait(10)
    reader.close()


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ((np.zeros((7, 2), "f"), np.zeros(7, "i4")), "block 1 .* 7 rows, .* with 8"),
        ((np.zeros((8, 2), "f"), np.zeros(8, "f")), "dtype float32, but in the first"),
    ],
)
def test_blocks_that_are_not_what_was_said_of_them(part, message):
    class Source:
        sizes = [8, 8]

        def read(self, block):
            return part if block else (np.zeros((8, 2), "f"), np.zeros(8, "i4"))

    with pytest.raises(ValueError, match=message):
        list(gpaug.Batches(Source(), 4).epoch(0))


def test_parquet(data, tmp_path):
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    columns = {"a": data.X[:, 0], "b": data.X[:, 1], "label": data.y}
    for i, part in enumerate((slice(0, 30), slice(30, None))):
        table = arrow.table({name: x[part] for name, x in columns.items()})
        parquet.write_table(table, tmp_path / f"{i}.parquet", row_group_size=16)
    rows = gpaug.ArrowRows(tmp_path, X=["b", "a"], y="label")
    assert rows.sizes == [16, 14, 16, 7]
    blocks = list(gpaug.Blocks(rows, SIZE).blocks())
    X, y = (np.concatenate([block[k] for block in blocks]) for k in ("X", "y"))
    np.testing.assert_array_equal(X, data.X[:, ::-1])
    np.testing.assert_array_equal(y, data.y)
    assert (X.dtype, y.dtype) == ("float32", "int32")
    with pytest.raises(ValueError, match=r"no columns \['c'\]. They have \['a', 'b'"):
        gpaug.ArrowRows(tmp_path, X="c")
    missing = arrow.table({"label": [1, None, 0]})
    parquet.write_table(missing, tmp_path / "missing.parquet")
    rows = gpaug.ArrowRows(str(tmp_path / "missing.parquet"), y="label")
    with pytest.raises(ValueError, match="'label', int64, has 1 missing values"):
        rows.read(0)


# -- fits -----------------------------------------------------------------------------


def softmax(X, y=None, *, Z):
    scale = numpyro.sample("scale", dist.LogNormal(0.0, 1.0))
    kernel = gpaug.kernels.Matern52(scale, 2.0)
    gp = gpaug.GaussianProcess("f", kernel, Z, num_latents=3)
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", gpaug.LogisticSoftmax(gp(X)), obs=y)


def regression(X, y=None, *, Z):
    """A hyperparameter with a prior, one without, one of the likelihood; two blocks."""
    scale = numpyro.sample("scale", dist.LogNormal(0.0, 1.0))
    noise = numpyro.param("noise", 1.0, constraint=dist.constraints.positive)
    spread = numpyro.param("spread", 1.0, constraint=dist.constraints.positive)
    w = numpyro.sample("w", dist.Normal(jnp.zeros(2), spread).to_event(1))
    gp = gpaug.GaussianProcess("f", gpaug.kernels.Matern52(scale), Z)
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", dist.Normal(gp(X) + X @ w, noise), obs=y)


@pytest.mark.parametrize(
    ("fn", "guide", "y"),
    [
        (regression, gpaug.AutoSparseGP, "waves"),
        slow(effects, gpaug.AutoLatentGaussian, "counts"),
        slow(softmax, gpaug.AutoSparseGP, "counts"),
    ],
)
def test_hyperparameters_are_learnt_in_blocks_as_in_memory(data, fn, guide, y):
    arrays = data.X[:50], np.minimum(getattr(data, y)[:50], 2)
    svi = gpaug.ConjugateSVI(fn, guide(fn))
    how = {"Z": data.Z, **QUIET, "init_state": svi.init(KEY, *arrays, Z=data.Z)}
    whole = svi.run(KEY, 60, *arrays, **how)
    read = svi.run(KEY, 60, gpaug.Blocks(arrays, 25), **how)
    assert read.stopped
    same = min(8, len(read.losses))
    np.testing.assert_allclose(read.losses[:same], whole.losses[:same], rtol=1e-4)
    np.testing.assert_allclose(read.losses[-1], whole.losses[-1], atol=2e-3)
    for name, value in whole.params.items():
        scale = max(np.abs(value).max(), 0.1)
        # The bound is flat: ends with equal bounds differ by rounding.
        np.testing.assert_allclose(read.params[name], value, atol=0.05 * scale)
    if fn is not regression:
        return
    # Continued on other data, it starts anew.
    other = arrays[0][::-1], arrays[1]
    on = svi.run(
        KEY, 1, gpaug.Blocks(other, 25), Z=data.Z, init_state=read.state, **QUIET
    )
    assert on.losses[0] > read.losses[-1] + 1


def test_minibatches_are_those_of_a_plate_that_draws(data, svi):
    """The same steps, with batches passed in one by one and the weight that NumPyro
    gives them."""
    batches = gpaug.Batches({"X": data.X, "y": data.y}, SIZE)
    found = svi.run(KEY, 12, batches, Z=data.Z, **QUIET)
    state, losses, known = None, [], {"Z": data.Z, "total": ROWS}
    for number in range(3):
        for batch in batches.epoch(number):
            state = svi.init(KEY, **batch, **known) if state is None else state
            state, loss = svi.update(state, **batch, **known)
            losses.append(loss)
    np.testing.assert_allclose(found.losses, losses[:12], rtol=1e-5)
    # Nothing of the size of the data is kept.
    assert found.state.epochs == {}
    assert svi.posterior(found).predict_y(data.X).probs.shape == (ROWS,)


def test_a_run_goes_on_within_an_epoch(data, svi, small, tmp_path):
    batches = gpaug.Batches((data.X, data.y), SIZE)
    whole = svi.run(KEY, 13, batches, Z=data.Z, **QUIET)
    first = svi.run(KEY, 7, batches, Z=data.Z, **QUIET)
    save_state(tmp_path / "fit.npz", first.state)
    state = load_state(tmp_path / "fit.npz", like=svi.init(KEY, batches, Z=data.Z))
    again = gpaug.Batches((data.X, data.y), SIZE)
    rest = svi.run(KEY, 6, again, Z=data.Z, init_state=state, **QUIET)
    losses = np.concatenate([first.losses, rest.losses])
    np.testing.assert_array_equal(losses, whole.losses)
    for name, value in whole.params.items():
        np.testing.assert_array_equal(rest.params[name], value)


def test_a_longer_run_is_guarded(data, svi):
    batches = gpaug.Batches((data.X, data.y), SIZE)
    result = svi.run(KEY, 220, batches, Z=data.Z, **QUIET)
    assert result.losses[-40:].mean() < result.losses[:5].mean()
    assert result.restored == ()


class Loader:
    """Batches, as torch's ``DataLoader`` yields them: lists of what becomes arrays."""

    def __init__(self, X, y, size=SIZE):
        self.parts = [
            [X[i : i + size], y[i : i + size]] for i in range(0, len(X), size)
        ]

    def __iter__(self):
        for part in self.parts:
            if isinstance(part, Exception):
                raise part
            yield part


def test_a_loader_may_fill_the_same_arrays_again(data):
    class Loader:
        def __iter__(self):
            kept = np.empty((SIZE, 2), "float32")
            for i in range(0, 50, SIZE):
                kept[:] = data.X[i : i + SIZE]
                yield (kept,)

    # A whole epoch is read ahead before the first batch is used.
    for source in (gpaug.Batches, gpaug.Blocks):
        found = [x for (x,) in [*source(Loader(), rows=50).blocks()]]
        np.testing.assert_array_equal(np.concatenate(found), data.X[:50])


def test_any_loader(data, svi):
    loader = Loader(data.X.astype(float), data.y.tolist())
    batches = gpaug.Batches(loader, rows=ROWS)
    found = svi.run(KEY, 9, batches, Z=data.Z, **QUIET)
    first = svi.run(KEY, 7, batches, Z=data.Z, **QUIET)
    rest = svi.run(KEY, 2, batches, Z=data.Z, init_state=first.state, **QUIET)
    np.testing.assert_array_equal(rest.losses, found.losses[7:])
    # The last five of 53 rows are in no batch, but they are in blocks.
    assert sum(len(x) for x, _ in batches.epoch(0)) == 50
    assert sum(len(x) for x, _ in gpaug.Blocks(loader, rows=ROWS).blocks()) == ROWS


def test_latents_of_rows_are_refused() -> None:
    def steps(t, y=None, *, inducing=None, total=None):
        kernel = gpaug.kernels.Matern32(1.0)
        f = gpaug.GaussianProcess("f", kernel, inducing, markov=True)(t)
        with numpyro.plate("data", total or len(t), subsample_size=len(t)):
            numpyro.sample("y", dist.Normal(f, 1.0), obs=y)

    t = np.linspace(0, 1, 20, dtype="float32")
    svi = gpaug.ConjugateSVI(steps, gpaug.AutoLatentGaussian(steps), None)
    for source in (gpaug.Batches, gpaug.Blocks):
        with pytest.raises(ValueError, match="'f.v' has shapes .* belong to rows"):
            svi.run(KEY, 1, source((t, t), 10), **QUIET)
    with pytest.raises(ValueError, match="belong to rows"):
        svi.init(KEY, t[:10], t[:10], total=20)
    svi.run(KEY, 1, gpaug.Blocks((t, t), 10), inducing=t[::2], **QUIET)


# -- sources that fail ----------------------------------------------------------------


def broken(data, number, part):
    loader = Loader(data.X, data.y)
    loader.parts[number:] = part if isinstance(part, list) else [part]
    return loader


NAN = np.full((SIZE, 2), np.nan, "float32")
FAULTS = {
    "ends early": ([], ValueError, "ended early, after 30 of 53 rows"),
    "raises": (OSError("the disk is gone"), OSError, "the disk is gone"),
    "NaN": ([[NAN, np.zeros(SIZE, int)]], ValueError, "X has shape .* 20 NaN"),
    "another shape": (
        [[np.zeros((SIZE, 3), "f"), np.zeros(SIZE, "int32")]], ValueError,
        r"\[0\] has shape \(10, 3\) .*first one \(10, 2\)",
    ),
    "another dtype": (
        [[np.zeros((SIZE, 2), "f"), np.zeros(SIZE, "f")]], ValueError,
        r"\[1\] .* dtype float32, but in the first one \(10,\) and int32",
    ),
    "another number": ([[np.zeros((SIZE, 2), "f")]], ValueError, "first one contained"),
    "unequal rows": (
        [[np.zeros((SIZE, 2), "f"), np.zeros(SIZE - 1, "int32")]], ValueError,
        r"\[0\] has shape|\[1\] has shape",
    ),
    # Noticed after the steps on this batch and on the next one.
    "labels": (
        [[np.zeros((n, 2), "f"), np.full(n, label, "int32")]
         for n, label in ((SIZE, 7), (SIZE, 0), (3, 0))],
        ValueError, "outside the support",
    ),
    "no arrays": ([3], TypeError, "a batch must be a tuple of arrays"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named_and_placed(data, svi, fault):
    part, error, message = FAULTS[fault]
    batches = gpaug.Batches(broken(data, 3, part), rows=ROWS)
    with pytest.raises(error, match=message) as raised:
        svi.run(KEY, 9, batches, Z=data.Z, **QUIET)
    assert raised.value.__notes__ == ["batch 3 of epoch 0"]


def test_a_loader_that_hangs_ends_a_fit_in_time(data, svi):
    class Hanging(Loader):
        number = 0

        def __iter__(self):
            yield from self.parts[: self.number]
            Event().wait()

    loader = Hanging(data.X, data.y)
    with pytest.raises(TimeoutError, match="nothing came within 0.1 seconds"):
        gpaug.Batches(loader, rows=ROWS, timeout=0.1)
    loader.number = 3
    batches = gpaug.Batches(loader, rows=ROWS, timeout=0.5)
    with pytest.raises(TimeoutError, match="hangs, or needs more time") as raised:
        svi.run(KEY, 9, batches, Z=data.Z, **QUIET)
    assert raised.value.__notes__ == ["batch 3 of epoch 0"]


def test_a_short_batch_within_an_epoch_and_too_many_rows(data, svi):
    loader = Loader(data.X, data.y)
    loader.parts[1] = [x[:4] for x in loader.parts[1]]
    with pytest.raises(
        ValueError, match="batch 1 of an epoch has 4 rows, but the first"
    ):
        list(gpaug.Batches(loader, rows=ROWS).epoch(0))
    with pytest.raises(ValueError, match="more than 40 rows"):
        list(gpaug.Batches(Loader(data.X, data.y), rows=40).epoch(0))


def test_refusals(data, svi):
    arrays, Z = (data.X, data.y), {"Z": data.Z}
    for source, how, message in (
        (arrays, {}, "size"), (arrays, {"size": 60}, "larger than all 53"),
        ((data.X, data.y[:4]), {"size": 5}, "equally many rows"),
        ((pd.Series([1, 0, 1], dtype="category"),), {"size": 2}, "Pass codes instead"),
        (Loader(*arrays), {"size": 5}, "rows=..., and no size"),
        (list(arrays), {"size": 5}, "got list of ndarray, ndarray"),
        ((data.X, None), {"size": 5}, "got tuple of ndarray, NoneType"),
        ({"X": data.X, "y": [1, 2]}, {"size": 5}, "got dict of ndarray, list"),
        (data.X, {"size": 5}, r"\(X, y\), or a dict of them .* got ndarray"),
        (iter([arrays]), {"rows": ROWS}, "read only once"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            gpaug.Batches(source, **how)
    batches, blocks = gpaug.Batches(arrays, SIZE), gpaug.Blocks(arrays, SIZE)
    state = svi.init(KEY, batches, **Z)
    with pytest.raises(TypeError, match="are for init and run"):
        svi.update(state, batches, **Z)
    with pytest.raises(TypeError, match="all positional arguments"):
        svi.run(KEY, 2, batches, data.y, **Z, **QUIET)
    with pytest.raises(
        NotImplementedError,
        match=r"\['scale'\]\) by optim='lbfgs' only. Otherwise learn",
    ):
        svi.run(KEY, 2, blocks, **Z, **QUIET)
    guide = gpaug.AutoSparseGP(model)
    with pytest.raises(ValueError, match="pass an optax transformation"):
        gpaug.ConjugateSVI(model, guide).run(KEY, 2, batches, **Z, **QUIET)
    with pytest.raises(ValueError, match=r"no plate has the 10 rows of a batch"):
        svi.run(KEY, 2, batches, **Z, total=ROWS, **QUIET)


def test_scales_are_not_learnt_from_fits_to_the_batch() -> None:
    """The standard deviation of full data is .369. Gradients after each step lead to
    .49."""

    def model(t, y=None):
        sd = numpyro.sample("sd", dist.HalfNormal(1))
        walk = numpyro.sample("walk", dist.GaussianRandomWalk(sd, 30))
        level = numpyro.sample("level", dist.Normal(0, 2))
        with numpyro.plate("data", len(t)):
            numpyro.sample("y", dist.Normal(level + walk[t], 1.0), obs=y)

    rng = np.random.default_rng(0)
    t = rng.integers(0, 30, 2000)
    walk = np.cumsum(0.35 * rng.normal(size=30))
    y = (walk[t] + rng.normal(size=2000)).astype(np.float32)
    guide = gpaug.AutoLatentGaussian(model)
    svi = gpaug.ConjugateSVI(model, guide, optax.adam(0.02), step_size=0.1)
    result = svi.run(KEY, 600, gpaug.Batches((t, y), 50), **QUIET)
    found = guide.other_median(result.params)["sd"]
    assert abs(found / 0.369 - 1) < 0.25, found


@pytest.mark.parametrize("guide", [gpaug.AutoSparseGP, slow(gpaug.AutoLatentGaussian)])
def test_lengthscales_are_learnt_beside_functions_that_are_known(guide) -> None:
    """The lengthscale of full data is 2.28. If what is known from earlier batches were
    about whitened latents, it would be 1.2: these latents follow each change slowly."""

    def model(X, y=None, *, inducing):
        lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0, 1))
        kernel = gpaug.kernels.Matern52(lengthscale, 2.0)
        f = gpaug.GaussianProcess("f", kernel, inducing)(X)
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", dist.Normal(f, 0.2), obs=y)

    rng = np.random.default_rng(1)
    X = rng.uniform(-3, 3, (2000, 1)).astype(np.float32)
    y = (np.sin(2 * X[:, 0]) + 0.2 * rng.normal(size=2000)).astype(np.float32)
    made = guide(model)
    svi = gpaug.ConjugateSVI(model, made, optax.adam(0.02))
    result = svi.run(KEY, 200, gpaug.Batches((X, y), 50), inducing=X[:16], **QUIET)
    found = made.other_median(result.params)["lengthscale"]
    assert abs(found / 2.28 - 1) < 0.1, found


@pytest.mark.filterwarnings("ignore:.*updates of hyperparameters were undone")
def test_precisions_stay_positive_definite_and_symmetric_beside_singular_kernels():
    """Without symmetry, the precision was refused where another fit continued."""

    def model(X, y=None, *, inducing):
        lengthscale = numpyro.sample("lengthscale", dist.LogNormal(0, 1))
        kernel = gpaug.kernels.SquaredExponential(lengthscale)
        f = gpaug.GaussianProcess("f", kernel, inducing)(X)
        with numpyro.plate("data", len(X)):
            numpyro.sample("y", dist.Normal(f, 0.02), obs=y)

    X = np.linspace(0, 10, 20_000, dtype=np.float32)[:, None]
    batches = gpaug.Batches((X, np.sin(X[:, 0])), 100)
    given = {"inducing": X[::333], "progress_bar": False}
    svi = gpaug.ConjugateSVI(model, gpaug.AutoSparseGP(model), optax.adam(0.2))
    precision = svi.run(KEY, 100, batches, **given).params["f.v_auto_precision"]
    assert np.linalg.eigvalsh(precision).min() > 0
    assert np.abs(precision - precision.T).max() < 1e-6 * np.abs(precision).max()


def test_hyperparameters_on_batches_turn_back_where_the_model_cannot_be_evaluated():
    def model(X, y=None):
        scale = numpyro.sample("scale", dist.LogNormal(0, 1))
        slope = numpyro.sample("slope", dist.Normal(0, 1))
        with numpyro.plate("data", len(X)):
            broken = jnp.where(scale < 0.5, jnp.nan, scale)
            numpyro.sample("y", dist.Normal(slope * X[:, 0], broken), obs=y)

    rng = np.random.default_rng(0)
    X = np.linspace(-1, 1, 400, dtype=np.float32)[:, None]
    y = np.float32(2 * X[:, 0] + 0.52 * rng.normal(size=400))
    svi = gpaug.ConjugateSVI(model, gpaug.AutoLatentGaussian(model), optax.adam(0.3))
    with pytest.warns(UserWarning, match="updates of hyperparameters were undone"):
        found = svi.run(KEY, 100, gpaug.Batches((X, y), 100), progress_bar=False)
    assert 0.5 <= found.params["scale_auto_loc"] < 0.6
    np.testing.assert_allclose(svi.posterior(found)["slope"].mean, 2, rtol=0.1)
