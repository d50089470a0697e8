# SPDX-License-Identifier: Apache-2.0
"""The options of XLA that programs are compiled with."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_gpaug.math import compiling
from numpyro_gpaug.math.compiling import (
    ahead,
    compiler_options,
    jit,
    jit_for_few_runs,
    once,
)
from numpyro_gpaug.predict.summary import SiteMoments

LEVEL = "xla_backend_optimization_level"


@pytest.fixture
def no_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the XLA_FLAGS of the tests."""
    monkeypatch.delenv("XLA_FLAGS")


def test_flags_of_the_user_stand(no_flags: None, monkeypatch) -> None:
    split = "xla_cpu_parallel_codegen_split_count"
    flags = f"--xla_cpu_use_fusion_emitters=true --{LEVEL}=3 --{split}=2"
    monkeypatch.setenv("XLA_FLAGS", flags)
    for quick in (False, True):
        assert not {k for k in compiler_options(quick=quick) if k in flags}


@pytest.mark.usefixtures("no_flags")
def test_options_that_this_jaxlib_lacks_are_not_asked_for(monkeypatch) -> None:
    monkeypatch.setattr(compiling, "_OPTIONS", {"xla_no_such_option": 1})
    assert compiler_options(quick=False) == {}
    assert jit(jnp.sin)(jnp.zeros(compiling.SMALL)).sum() == 0
    monkeypatch.setattr(compiling, "_QUICK", {"xla_no_such_option": 1, LEVEL: 0})
    assert compiler_options(quick=True) == {LEVEL: 0}
    assert jit(jnp.sin)(0.0) == 0


@pytest.mark.usefixtures("no_flags")
def test_inside_other_programs(monkeypatch) -> None:
    # An option that every jaxlib has.
    monkeypatch.setattr(compiling, "_QUICK", {LEVEL: 1})
    double = jit(lambda x, times: times * x, static_argnames="times")
    assert compiler_options(quick=True)
    assert double(3.0, times=2) == 6
    assert double.plain.eval_shape(3.0, times=2).shape == ()
    assert jax.jit(lambda x: double(x, times=2) + 1)(3.0) == 7
    # Only the outer function is traced here.
    assert jax.jit(lambda x: x + double(3.0, times=2))(1.0) == 7
    assert jax.grad(lambda x: double(x, times=2))(1.0) == 2
    assert jax.vmap(lambda x: double(x, times=2))(jnp.ones(3)).tolist() == [2, 2, 2]
    with pytest.raises(ValueError, match="of its own"):
        jit(_raises)(1.0)


@pytest.mark.usefixtures("no_flags")
def test_small_programs_are_left_as_they_are_written() -> None:
    calls = []

    def wave(x: jax.Array, times: int) -> jax.Array:
        calls.append(x.shape)
        for _ in range(times):
            x = jnp.sin(x)
        return x

    small, large = jnp.ones(100), jnp.ones(compiling.SMALL)
    for compiled, left in ((jit, [True, False]), (jit_for_few_runs, [True])):
        program = compiled(wave, static_argnames="times")
        for x in (small, large, small):
            assert jnp.allclose(program(x, times=3), jnp.sin(jnp.sin(jnp.sin(x))))
        assert list(program._programs) == left
    # JAX keeps the traces of both.
    assert calls == [small.shape, large.shape]


@pytest.mark.parametrize("value", [jnp.ones(2), np.ones(2)])
def test_numbers_give_numbers_in_whatever_program(value) -> None:
    runs = []

    def program(x: jax.Array) -> dict[str, jax.Array]:
        runs.append(jnp.arange(2.0))
        return {"more": x + runs[-1], "all": x.sum() > 1}

    known = ahead(program, value)

    def around(y: jax.Array) -> jax.Array:
        for found in (known(value), once(program, value)):
            assert found["more"].tolist() == [1, 2]
            assert bool(found["all"])
        # Traced arguments give traced results.
        inner = once(program, y)["more"] + once(lambda x: x * y, value)
        return inner + ahead(lambda x: y - x, value)(value)

    np.testing.assert_allclose(jax.jit(around)(jnp.ones(2)), [2, 3])
    np.testing.assert_allclose(jax.vmap(around)(jnp.ones((1, 2))), [[2, 3]])
    np.testing.assert_allclose(jax.jacfwd(around)(jnp.ones(2)), 3 * np.eye(2))
    # Traced, not run operation by operation.
    assert all(isinstance(x, jax.core.Tracer) for x in runs)


def _raises(x: jax.Array) -> jax.Array:
    raise ValueError("of its own")


def test_the_factor_of_a_site_is_one_program(caplog):
    """Operation by operation it took three times as long as the fit before it."""

    def distribution(size):
        eye = np.eye(size, dtype=np.float32)
        variance = np.full(size, 4, np.float32)
        return SiteMoments(eye[0], variance, lambda: 4 * eye).distribution

    assert distribution(5).scale_tril.shape == (5, 5)
    with jax.log_compiles(), caplog.at_level("WARNING"):
        found = distribution(7)
        factor = found.scale_tril
    compiled = [r.message for r in caplog.records if "XLA compilation" in r.message]
    assert len(compiled) == 1, compiled
    np.testing.assert_allclose(found.mean, np.eye(7)[0])
    np.testing.assert_allclose(found.variance, 4, rtol=1e-5)
    np.testing.assert_allclose(factor, 2 * np.eye(7), rtol=1e-5, atol=1e-5)


def test_sums_of_products_of_many_rows() -> None:
    """jaxlib 0.10.2 computes all but the first of the sums from other numbers."""
    rng = np.random.default_rng(0)
    left, right = rng.normal(size=(2, 30_000, 3)).astype("float32")
    values = rng.normal(size=(2, 2, 50, 3)).astype("float32")
    place = rng.integers(0, 50, (2, 30_000))
    at = jnp.asarray(place)

    def summed(v, w):
        return (left * v[at[0]]).sum(1) + (right * w[at[1]]).sum(1)

    first, second = values[0][:, place[0]], values[1][:, place[1]]
    expected = (left * first).sum(-1) + (right * second).sum(-1)
    for small in (0, 10**9):
        found = compiling.jit(jax.vmap(summed), small=small)(*values)
        np.testing.assert_allclose(found, expected, atol=1e-4)
