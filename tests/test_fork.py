# SPDX-License-Identifier: Apache-2.0
"""Processes that were forked after JAX had started raise where they would hang."""

import os
import signal
import time
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer import MCMC

import numpyro_gpaug as gpaug
from numpyro_gpaug import _fork

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="no forks")
LIMIT = 30  # seconds; a child that takes longer hangs


def model(y=None):
    w = numpyro.sample("w", dist.Normal(0, 1))
    with numpyro.plate("data", 4):
        numpyro.sample("y", dist.Normal(w, 1), obs=y)


def in_child(function):
    """Return the output of ``function`` in a forked process; none if it hangs."""
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        # JAX and Python warn about forks.
        warnings.simplefilter("ignore")
        child = os.fork()
    if child == 0:
        try:
            said = str(function())
        except RuntimeError as error:
            said = str(error)
        except BaseException as error:
            said = repr(error)
        os.write(writer, said.encode()[:4000])
        os._exit(0)
    os.close(writer)
    end = time.monotonic() + LIMIT
    while not os.waitpid(child, os.WNOHANG)[0]:
        if time.monotonic() > end:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            break
        time.sleep(0.01)
    with os.fdopen(reader) as file:
        return file.read()


def test_a_forked_process_raises_instead_of_hanging():
    key, y = jax.random.key(0), jnp.arange(4.0)
    guide = gpaug.AutoLatentGaussian(model)
    kernel = gpaug.EllipticalSlice(model)
    quiet = {"progress_bar": False}
    fits = {
        "ConjugateSVI": lambda: gpaug.ConjugateSVI(model, guide).run(
            key, 2, y, **quiet
        ),
        "NestedVI": lambda: gpaug.NestedVI(model, **quiet).run(key, y),
        # NumPyro's SVI would hang before it calls the guide.
        "SVI": lambda: gpaug.AutoLatentGaussian(model, covariance="dense"),
        "MCMC": lambda: MCMC(kernel, num_warmup=1, num_samples=1, **quiet).run(key, y),
    }
    for name, fit in fits.items():
        said = in_child(fit)
        assert "forked" in said, (name, said)
        assert "spawn" in said, (name, said)


def test_a_fork_before_jax_has_started_is_fine(monkeypatch):
    monkeypatch.setattr("jax._src.xla_bridge.backends_are_initialized", lambda: False)
    assert in_child(_fork.refuse_forked) == "None"
    monkeypatch.undo()
    assert "forked" in in_child(_fork.refuse_forked)
    # The parent process continues.
    _fork.refuse_forked()
    assert np.isfinite(jnp.ones(2)).all()
