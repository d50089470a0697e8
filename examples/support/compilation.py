# SPDX-License-Identifier: Apache-2.0
"""What the examples share: compiled programs kept between runs."""

from __future__ import annotations

import os
from pathlib import Path

import jax


def keep_compiled_programs() -> Path | None:
    """Switch on JAX's persistent compilation cache, so that a second run of a script
    need not compile again. A package must not do this; a script owns its process.

    They go to ``numpyro_gpaug`` in the user's cache folder, or where
    ``JAX_COMPILATION_CACHE_DIR`` says.

    :return: the folder; ``None``, and nothing is kept, if it cannot be written to.
    """
    chosen = jax.config.jax_compilation_cache_dir
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folder = Path(chosen) if chosen else Path(caches) / "numpyro_gpaug"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return None
    if not os.access(folder, os.W_OK):
        return None
    jax.config.update("jax_compilation_cache_dir", str(folder))
    # By default programs that compile within a second, which most of these do, are not
    # kept.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    return folder
