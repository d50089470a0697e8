# SPDX-License-Identifier: Apache-2.0
"""Settings of JAX for tests and doctests, in place before anything imports it."""

import gc
import os
import tempfile
from importlib.metadata import version

# For SciPy, and below for NumPy, which a pytest plugin may have loaded before. In small
# problems threads mostly wait for one another: one thread is ten times as fast, more so
# where tests run side by side.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# Set before jax starts. Compiling hundreds of small programs is nearly all of the
# tests' time, so they are compiled without LLVM's optimisations (the graph is still
# optimised). One thread: jaxlib runs the matrices of a batch as tasks of its thread
# pool, and two batches on a pool of two threads wait for each other for ever.
flags = ["--xla_backend_optimization_level=0", "--xla_cpu_multi_thread_eigen=false"]
if version("jaxlib").startswith("0.10."):
    # The first flag nearly halves compilation; later versions do not have it, and XLA
    # stops on unknown flags. The second keeps the compiler on one thread: the other
    # process of the tests has the other one.
    flags.append("--xla_cpu_use_fusion_emitters=false")
    flags.append("--xla_cpu_parallel_codegen_split_count=1")
# Tests of several devices need four; all others use the first.
flags.append("--xla_force_host_platform_device_count=4")
os.environ.setdefault("XLA_FLAGS", " ".join(flags))

# Source locations in programs take time to write, and no test reads them.
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")

# A program that another test has compiled, in this process or another, is read from
# this folder: a long one, because writing those that nobody reads takes time, too. The
# processes of "pytest -n" find it in their environment.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    _PROGRAMS = tempfile.TemporaryDirectory(prefix="programs-")
    os.environ["JAX_COMPILATION_CACHE_DIR"] = _PROGRAMS.name
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.2"

import numpy  # noqa: E402, F401
from threadpoolctl import threadpool_limits  # noqa: E402

threadpool_limits(1, user_api="blas")
# Tracing makes many objects and few cycles: a collection after every 700 objects took a
# twelfth of the tests' time, and one after every 20,000 a fiftieth.
gc.set_threshold(100_000, 20, 100)
