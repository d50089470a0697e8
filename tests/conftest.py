# SPDX-License-Identifier: Apache-2.0
"""Fixtures and helpers shared by all tests."""

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import _lru_cache_wrapper
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

try:
    from jax import enable_x64
except ImportError:
    from jax.experimental import enable_x64


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A file's tests in one process (``pytest -n 2``): they share fits. Other ways
    (``--dist``) are xdist's.
    """
    from xdist.scheduler import LoadFileScheduling

    if config.option.dist != "load":
        return None
    # Keep the order below: xdist's own puts files of few tests last, however long they
    # take.
    config.option.loadscopereorder = False
    return LoadFileScheduling(config, log)


# The longest files go first, so that the processes end together.
LONGEST = (
    "nested", "markov", "sparse_models", "latent_gaussian", "refusals",
    "groups_left_out", "likelihood_distributions", "latent_messages", "gibbs",
    "padded_predictions", "learning", "nested_predictions", "diagnostics", "linked",
    "group_models", "tables", "fields", "structures", "batches", "faults_numerics",
    "posterior", "predictor_mixture", "faults_runs", "crossed", "conjugate", "left_out",
    "many_responses", "function_space", "faults_inputs", "streams", "spatial",
    "joint_gibbs", "devices", "columns", "averages", "calibration_of_samplers",
    "joint_slices", "resolution", "scanned_models", "latent_predictions", "routes",
    "multiclass", "programs", "faults_files", "kernels", "augmentations", "start",
    "padding", "loadings", "m_steps", "checks", "polya_gamma", "priors", "chain_models",
    "whitening", "correlated_data", "process", "robustness", "blocks",
    "sparse_cholesky", "generalized_inverse_gaussian", "known_rows", "inducing",
    "other_data", "pg_sampler", "robust_max", "nested_groups", "vi_against_mcmc",
    "handlers", "frontier", "precision",
)  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Orders the files."""
    ranks = {f"test_{name}": i for i, name in enumerate(LONGEST)}
    items.sort(key=lambda item: ranks.get(item.path.stem, len(LONGEST)))


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Free memory after a file. Frozen objects (traced programs, and the little garbage
    among them) are not searched again, which took a second at a time, unless memory is
    short.
    """
    if nextitem is None or nextitem.path != item.path:
        for known in vars(item.module).values():
            own = getattr(known, "__module__", None) == item.module.__name__
            if own and isinstance(known, _lru_cache_wrapper):
                known.cache_clear()
        if _memory() > 6e9:
            gc.unfreeze()
            jax.clear_caches()
            gc.collect()
        gc.freeze()


def _memory() -> int:
    """The bytes that this process has; 0 on systems that state them elsewhere. Each of
    some thousand programs takes a megabyte, operations on their own among them."""
    if not Path("/proc/self/statm").exists():
        return 0
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


_COMPILED: list[str] = []


def _note_compilation(event: str, _: float, **about: str) -> None:
    if event.endswith("backend_compile_duration"):
        _COMPILED.append(about.get("fun_name", ""))


jax.monitoring.register_event_duration_secs_listener(_note_compilation)


def compilations(name: str) -> int:
    """Return the number of compilations of a function of this name so far. (JAX's own
    count of a jitted function is too small: the cache is shared.)
    """
    return _COMPILED.count(f"jit({name})")


@contextmanager
def small_blocks(size: int) -> Iterator[None]:
    """Compute in blocks, as with large data.

    :param size: of them, in bytes.
    """
    from numpyro_gpaug.math import blocks

    with pytest.MonkeyPatch.context() as patch:
        for name in ("WHOLE", "BLOCK", "BLOCK_OF_ACCELERATORS"):
            patch.setattr(blocks, name, size)
        yield


def slow(*values: Any, id: str | None = None) -> Any:
    """Values of a parametrised test that only the long tests have."""
    return pytest.param(*values, id=id, marks=pytest.mark.slow)


slow_in_double = pytest.mark.parametrize(
    "dtype", ["float32", slow("float64")], indirect=True
)
TOLERANCES = {"float32": 1e-5, "float64": 1e-11}


@pytest.fixture
def x64() -> Iterator[None]:
    """Run the test with 64-bit types enabled."""
    with enable_x64(True):
        yield


@pytest.fixture(params=["float32", "float64"])
def dtype(request: pytest.FixtureRequest) -> Iterator[str]:
    """Both float dtypes, float64 with 64-bit types enabled."""
    with enable_x64(request.param == "float64"):
        yield request.param


def assert_close(actual, expected, factor: float = 1.0) -> None:
    """Equal to the rounding of ``actual``'s dtype, relative to ``max(1, |expected|)``.

    :param factor: multiple of the dtype's usual tolerance.
    """
    tolerance = factor * TOLERANCES[str(np.asarray(actual).dtype)]
    np.testing.assert_allclose(actual, expected, rtol=tolerance, atol=tolerance)
