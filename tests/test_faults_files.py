# SPDX-License-Identifier: Apache-2.0
"""Files of posteriors that are foreign, truncated, damaged or of another model, and
saving that fails half-way."""

import io
import tracemalloc
import zipfile
from functools import partial

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import numpyro_gpaug as gpaug

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
    """Not fitted: nothing here depends on the numbers."""
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
    """Every byte that arrays are made of counts: those of other parts of the file may
    change nothing."""
    for length in (0, 1, 100, len(saved) // 2, len(saved) - 1):
        with pytest.raises(gpaug.ArchiveError, match="truncated or damaged"):
            load(saved[:length], tmp_path)
    rng = np.random.default_rng(0)
    for member in zipfile.ZipFile(io.BytesIO(saved)).infolist():
        start = member.header_offset + 30 + len(member.filename)
        for at in rng.integers(start + 24, start + member.file_size, 3):
            damaged = bytearray(saved)
            damaged[at] ^= 1 << rng.integers(8)
            with pytest.raises(gpaug.ArchiveError, match="truncated or damaged"):
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
        with pytest.raises(gpaug.ArchiveError, match="foreign"):
            load(content, tmp_path)
    with pytest.raises(FileNotFoundError):
        gpaug.Posterior.load(tmp_path / "nothing.npz", model)
    with pytest.raises(IsADirectoryError):
        gpaug.Posterior.load(tmp_path, model)


def test_moments_of_another_size(saved, tmp_path) -> None:
    with np.load(io.BytesIO(saved)) as archive:
        (name,) = (k for k in archive if k.endswith("moments/f/0"))
    with pytest.raises(
        gpaug.ArchiveError, match=r"'f'.*\(4,\), have shapes \[\(1, 3\)"
    ):
        load(archived(saved, **{name: np.zeros((1, 3))}), tmp_path)


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
