# SPDX-License-Identifier: Apache-2.0
"""What programs ask of XLA."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import pytest

from numpyro_gpaug.math import compiling
from numpyro_gpaug.math.compiling import Compiled, compiler_options


@pytest.fixture
def no_flags(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As if nobody had set XLA_FLAGS, which those of the tests hide."""
    monkeypatch.delenv("XLA_FLAGS")
    compiler_options.cache_clear()
    yield
    compiler_options.cache_clear()


def test_flags_of_the_user_stand(no_flags: None, monkeypatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_use_fusion_emitters=true")
    assert compiler_options() == {}


@pytest.mark.usefixtures("no_flags")
def test_options_that_this_jaxlib_lacks_are_not_asked_for(monkeypatch) -> None:
    monkeypatch.setattr(compiling, "_OPTIONS", {"xla_no_such_option": 1})
    assert compiler_options() == {}
    assert Compiled(jnp.sin)(0.0) == 0


@pytest.mark.usefixtures("no_flags")
def test_inside_other_programs(monkeypatch) -> None:
    # One that every jaxlib has.
    monkeypatch.setattr(compiling, "_OPTIONS", {"xla_backend_optimization_level": 1})
    double = Compiled(lambda x, times: times * x, static_argnames="times")
    assert compiler_options()
    assert double(3.0, times=2) == 6
    assert double.lower(3.0, times=2).compile()(3.0) == 6
    assert jax.jit(lambda x: double(x, times=2) + 1)(3.0) == 7
    # Nothing here is traced but what is around it.
    assert jax.jit(lambda x: x + double(3.0, times=2))(1.0) == 7
    assert jax.grad(lambda x: double(x, times=2))(1.0) == 2
    assert jax.vmap(lambda x: double(x, times=2))(jnp.ones(3)).tolist() == [2, 2, 2]
    with pytest.raises(ValueError, match="of its own"):
        Compiled(_raises)(1.0)


def _raises(x: jax.Array) -> jax.Array:
    raise ValueError("of its own")
