# SPDX-License-Identifier: Apache-2.0
"""Files of posteriors that are foreign, truncated, damaged or of another model, and
saving that fails half-way."""

import io
import threading
import tracemalloc
import zipfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import numpyro_gpaug as gpaug
from numpyro_gpaug.math import files
from numpyro_gpaug.model.structure import Plate
from tests import archives
from tests.conftest import enable_x64, slow

X, Y = np.random.default_rng(0).normal(size=(12, 2)), np.arange(12) % 2
Z = X[:4]
PARAMS = {
    "f.v_auto_potential": jnp.ones(4), "f.v_auto_precision": 2 * jnp.eye(4),
    "lengthscale": jnp.asarray(0.7),
}  # fmt: skip


def model(
    X, y=None, *, inducing, kernel=gpaug.kernels.Matern52, name="f",
    param="lengthscale", variance=1.0, likelihood=lambda f: dist.Bernoulli(logits=f),
):  # fmt: skip
    positive = dist.constraints.positive
    lengthscale = numpyro.param(param, 1.0, constraint=positive)
    gp = gpaug.GaussianProcess(name, kernel(lengthscale, variance), inducing)
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", likelihood(gp(X)), obs=y)


@pytest.fixture(scope="module")
def posterior():
    """Return a posterior that is not fitted: nothing here depends on its numbers."""
    guide = gpaug.AutoSparseGP(model)
    return gpaug.Posterior.from_guide(model, guide, PARAMS, X, Y, inducing=Z)


@pytest.fixture(scope="module")
def saved(posterior, tmp_path_factory):
    """The bytes of its file."""
    path = tmp_path_factory.mktemp("saved") / "posterior.npz"
    posterior.save(path)
    return path.read_bytes()


def load(content: bytes, folder, model=model):
    path = folder / "posterior.npz"
    path.write_bytes(content)
    return gpaug.Posterior.load(path, model)


def test_saving_replaces_a_file_at_once(
    posterior, saved, tmp_path, monkeypatch
) -> None:
    path = tmp_path / "posterior.npz"
    path.write_bytes(b"before")

    def failing(file, **arrays):
        file.write(b"half of it")
        raise OSError("no space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(np, "savez", failing)
        with pytest.raises(OSError, match="no space left"):
            posterior.save(path)
    assert path.read_bytes() == b"before"
    link = tmp_path / "link.npz"
    link.symlink_to(path)
    posterior.save(link)
    assert sorted(tmp_path.iterdir()) == [link, path]
    assert link.is_symlink()
    found = gpaug.Posterior.load(path, model).predict_f(X)
    np.testing.assert_array_equal(found.mean, posterior.predict_f(X).mean)


def test_a_loaded_posterior_saves_again(saved, tmp_path) -> None:
    loaded = load(saved, tmp_path)
    loaded.save(tmp_path / "again.npz")
    again = gpaug.Posterior.load(tmp_path / "again.npz", model)
    found, expected = again.predict_y(X).probs, loaded.predict_y(X).probs
    np.testing.assert_array_equal(found, expected)


def test_truncated_and_damaged_files(saved, tmp_path) -> None:
    """Every byte of an array matters; bytes in other parts of the file may have no
    effect.
    """
    for length in (0, 1, 100, len(saved) // 2, len(saved) - 1):
        with pytest.raises(gpaug.ArchiveError, match="or is damaged"):
            load(saved[:length], tmp_path)
    rng = np.random.default_rng(0)
    for member in zipfile.ZipFile(io.BytesIO(saved)).infolist():
        start = member.header_offset + 30 + len(member.filename)
        for at in rng.integers(start + 24, start + member.file_size, 3):
            damaged = bytearray(saved)
            damaged[at] ^= 1 << rng.integers(8)
            with pytest.raises(gpaug.ArchiveError, match="or is damaged"):
                load(bytes(damaged), tmp_path)


def archived(saved, **changed) -> bytes:
    """The file with other members."""
    with np.load(io.BytesIO(saved)) as archive:
        arrays = {**archive, **changed}
    file = io.BytesIO()
    np.savez(file, **{k: v for k, v in arrays.items() if v is not None})
    return file.getvalue()


def test_foreign_files(saved, tmp_path) -> None:
    for content in (
        b"not an archive at all", archived(saved, meta=None),
        archived(saved, meta=np.array("{}")), archived(saved, meta=np.array("[1]")),
        archived(saved, x=np.array([object()])),
    ):  # fmt: skip
        with pytest.raises(gpaug.ArchiveError, match="not the file of a posterior"):
            load(content, tmp_path)
    with pytest.raises(FileNotFoundError):
        gpaug.Posterior.load(tmp_path / "nothing.npz", model)
    with pytest.raises(IsADirectoryError):
        gpaug.Posterior.load(tmp_path, model)


def claiming(rows: int, compression: int) -> bytes:
    """An archive of one array with many more entries than bytes."""
    head = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        head, {"shape": (rows,), "fortran_order": False, "descr": "<f4"}
    )
    zeros = bytes(4 * rows if compression else 400)
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", compression) as archive:
        archive.writestr("0/x.npy", head.getvalue() + zeros)
    return file.getvalue()


@pytest.mark.parametrize("compression", [zipfile.ZIP_DEFLATED, zipfile.ZIP_STORED])
def test_sizes_that_are_only_claimed_are_not_allocated(compression, tmp_path) -> None:
    content = claiming(10**7, compression)
    assert len(content) < 10**5
    tracemalloc.start()
    with pytest.raises(gpaug.ArchiveError, match="compressed|reshape"):
        load(content, tmp_path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 10**6


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"kernel": gpaug.kernels.Matern32}, "Matern32 in the model, .*Matern52"),
        ({"likelihood": gpaug.BayesianSVM}, "'y' is BayesianSVM of shape"),
        ({"name": "g"}, "'f' is missing in the model"),
        ({"param": "scale"}, "'lengthscale' is missing in the model"),
        ({"variance": 2.0}, "kernel of 'f', its hyperparameters or its"),
        ({"inducing": Z[::-1]}, "kernel of 'f'"),
        ({"inducing": Z[:3]}, r"3 inducing inputs call for \(3,\)"),
    ],
)
def test_another_model(saved, tmp_path, changed, message) -> None:
    def other(X, y=None, *, inducing):
        return model(X, y, **{"inducing": inducing, **changed})

    with pytest.raises(gpaug.ArchiveError, match=message):
        load(saved, tmp_path, other)


def test_the_same_model_by_another_name(saved, tmp_path) -> None:
    load(saved, tmp_path, partial(model, variance=1.0))


def test_names_that_make_the_same_path(tmp_path) -> None:
    def nested(X, y=None, *, inducing):
        scales = numpyro.param("w", {"a": jnp.ones(())})
        other = numpyro.param("w/a", jnp.ones(()))
        kernel = gpaug.kernels.Matern52(scales["a"], other)
        gp = gpaug.GaussianProcess("f", kernel, inducing)
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Normal(gp(X), 1.0), obs=y)

    params = {**PARAMS, "w": {"a": jnp.asarray(0.5)}, "w/a": jnp.asarray(3.0)}
    guide = gpaug.AutoSparseGP(nested)
    fit = gpaug.Posterior.from_guide(nested, guide, params, X, X[:, 0], inducing=Z)
    fit.save(tmp_path / "nested.npz")
    loaded = gpaug.Posterior.load(tmp_path / "nested.npz", nested)
    np.testing.assert_array_equal(loaded.predict_f(X).mean, fit.predict_f(X).mean)


@pytest.mark.parametrize("kind", [slow(k) for k in archives.KINDS])
def test_every_kind_is_read_again(kind, tmp_path) -> None:
    make, of = archives.KINDS[kind]
    posterior = make()
    posterior.save(tmp_path / "fit.npz")
    loaded = gpaug.Posterior.load(tmp_path / "fit.npz", of)
    assert loaded.summary().equals(posterior.summary())


# -- edited files ----------------------------------------------------------------------


def test_an_edited_header(saved, tmp_path) -> None:
    text = str(np.load(io.BytesIO(saved))["meta"])
    edited = text.replace("Matern52", "Matern32")
    assert edited != text
    with pytest.raises(gpaug.ArchiveError, match="edited"):
        load(archived(saved, meta=np.array(edited)), tmp_path)


def test_fields_of_another_version() -> None:
    with pytest.raises(ValueError, match="header has .'beyond'. where .'size', "):
        files.typed({"beyond": 1}, Plate, "header")


def test_edited_arrays(tmp_path) -> None:
    make, of = archives.KINDS["dense"]
    path = tmp_path / "fit.npz"
    make().save(path)
    content = path.read_bytes()
    for name, x in files.read(path)[1].items():
        for other in (None, np.array("x"), x * np.nan, x[None], 2 * x + 1):
            path.write_bytes(archived(content, **{name: other}))
            with pytest.raises(gpaug.ArchiveError):
                gpaug.Posterior.load(path, of)


# -- edited models ---------------------------------------------------------------------


def joint(
    X, group, y=None, *, sd=2.0, wide=1.0, column=0, slope=1.0, mean=0.0, gain=1.0,
    swapped=False, noise=0.5, product=False, start=0.0,
):  # fmt: skip
    """Return a posterior of a slope, effects and a process, with the parts that an edit
    may change.
    """
    b = numpyro.sample("b", dist.Normal(mean, sd))
    tau = numpyro.sample("tau", dist.HalfNormal(wide))
    with numpyro.plate("groups", 3):
        a = numpyro.sample("a", dist.Normal(0, tau))
    gp = gpaug.GaussianProcess(
        "f", gpaug.kernels.Matern52(), start + Z, mean=0.3 * mean
    )
    inputs = X[:, ::-1] if swapped else X
    trend = X @ jnp.array([b, 0.0]) if product else b * X[:, column]
    eta = slope * trend + a[group] + gain * gp(inputs)
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", dist.Normal(eta, noise), obs=y)


GROUP = np.arange(12) % 3


@pytest.fixture(scope="module")
def joint_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("joint") / "fit.npz"
    guide = gpaug.AutoLatentGaussian(joint)
    archives.at_start(guide, X, GROUP, X[:, 0]).save(path)
    return path


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"sd": 3.0}, "prior of 'b'"),
        ({"mean": 1.0}, "prior of 'b'|mean of 'f'"),
        ({"wide": 2.0}, "prior of 'tau'"),
        ({"column": 1}, "distribution of 'y' given its latents"),
        ({"slope": 1.1}, "distribution of 'y'"),
        ({"gain": 3.0}, "distribution of 'y'"),
        ({"swapped": True}, "what 'f' is called at"),
        ({"start": 1.0}, "inducing= of 'f'"),
        ({"noise": 0.6}, "distribution of 'y'"),
    ],
)
def test_an_edited_model(joint_file, changed, message) -> None:
    """The model has the same sites and shapes, but other predictors, priors or
    constants.
    """
    with pytest.raises(gpaug.ArchiveError, match=message):
        gpaug.Posterior.load(joint_file, partial(joint, **changed))


def written_otherwise(rows, code, y=None):
    """The model of ``joint``, its variables and operations by other names."""
    spread = numpyro.sample("tau", dist.HalfNormal(1))
    with numpyro.plate("units", 3):
        effects = numpyro.sample("a", dist.Normal(jnp.zeros(3), spread))
    weight = numpyro.sample("b", dist.Normal(0, 4.0**0.5))
    process = gpaug.GaussianProcess("f", gpaug.kernels.Matern52(), jnp.asarray(Z))
    chosen = jax.nn.one_hot(code, 3) @ effects
    values = process(rows) + chosen + (rows * jnp.array([1.0, 0.0])).sum(1) * weight
    with numpyro.plate("rows", rows.shape[0]):
        numpyro.sample("y", dist.Normal(values, jnp.sqrt(0.25)), obs=y)


def test_the_same_model_written_otherwise(joint_file) -> None:
    for of in (joint, written_otherwise, partial(joint, product=True)):
        gpaug.Posterior.load(joint_file, of)
    with enable_x64(True):
        gpaug.Posterior.load(joint_file, written_otherwise)


def test_a_file_tells_no_data(tmp_path) -> None:
    """The fingerprint of a model uses stand-ins for data: other data make the same
    file.
    """
    contents = []
    for seed in (1, 2):
        X = np.random.default_rng(seed).normal(size=(12, 2))
        of = gpaug.AutoLatentGaussian(archives.dense)
        archives.at_start(of, X, Y).save(tmp_path / "fit.npz")
        contents.append(files.read(tmp_path / "fit.npz")[0]["model"])
    assert contents[0] == contents[1]


# -- saves that are killed -------------------------------------------------------------


def test_files_of_saves_that_were_killed_are_removed(tmp_path, monkeypatch) -> None:
    """Files of a running save, and all others, stay."""
    left = tmp_path / f".numpyro_gpaug-{'0f' * 16}.tmp"
    others = [tmp_path / name for name in (".numpyro_gpaug-x.tmp", ".a.tmp", "b.npz")]
    for path in (left, *others):
        path.write_bytes(b"half of it")
    savez, inside, going = np.savez, threading.Event(), threading.Event()

    def slow(file, **arrays):
        inside.set()
        assert going.wait(60)
        savez(file, **arrays)

    monkeypatch.setattr(np, "savez", slow)
    with ThreadPoolExecutor() as pool:
        first = pool.submit(files.write, tmp_path / "first.npz", {}, {"a": 1})
        assert inside.wait(60)
        assert not left.exists()
        monkeypatch.setattr(np, "savez", savez)
        files.write(tmp_path / "second.npz", {}, {"a": 2})
        going.set()
        first.result()
    assert files.read(tmp_path / "first.npz")[0] == {"a": 1}
    assert files.read(tmp_path / "second.npz")[0] == {"a": 2}
    expected = [tmp_path / "first.npz", tmp_path / "second.npz", *others]
    assert sorted(tmp_path.iterdir()) == sorted(expected)


def test_a_save_whose_file_is_removed_writes_it_again(tmp_path, monkeypatch) -> None:
    """On a file system without locks, another save may consider it abandoned."""
    savez, removed = np.savez, []

    def removing(file, **arrays):
        savez(file, **arrays)
        if not removed:
            removed.append(file.name)
            Path(file.name).unlink()

    monkeypatch.setattr(np, "savez", removing)
    files.write(tmp_path / "fit.npz", {}, {"a": 1})
    assert removed
    assert files.read(tmp_path / "fit.npz")[0] == {"a": 1}
    assert list(tmp_path.iterdir()) == [tmp_path / "fit.npz"]
