# SPDX-License-Identifier: Apache-2.0
"""What programs ask of XLA."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from numpyro_gpaug.math import compiling
from numpyro_gpaug.math.compiling import (
    Compiled,
    Work,
    compiler_options,
    quick_options,
)
from numpyro_gpaug.predict.summary import SiteMoments

LEVEL = "xla_backend_optimization_level"


@pytest.fixture
def no_flags(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As if nobody had set XLA_FLAGS, which those of the tests hide."""
    monkeypatch.delenv("XLA_FLAGS")
    compiling._compiles.cache_clear()
    yield
    compiling._compiles.cache_clear()


def test_flags_of_the_user_stand(no_flags: None, monkeypatch) -> None:
    split = "xla_cpu_parallel_codegen_split_count"
    flags = f"--xla_cpu_use_fusion_emitters=true --{LEVEL}=3 --{split}=2"
    monkeypatch.setenv("XLA_FLAGS", flags)
    assert compiler_options() == quick_options() == {}


@pytest.mark.usefixtures("no_flags")
def test_what_loops_have_in_common_stays_in_them_where_that_is_asked() -> None:
    def powers(x: jax.Array) -> jax.Array:
        return lax.fori_loop(0, 3, lambda _, y: y * (1 + jnp.sin(x)), x)

    x = jnp.linspace(0.0, 1.0, 5)
    plain, unhoisted = Compiled(powers), Compiled(powers, hoisted=False)
    np.testing.assert_allclose(unhoisted(x), plain(x), rtol=1e-6)
    programs = [p._whole.lower(x).compile().as_text() for p in (plain, unhoisted)]
    # The sine is in the loop's body, not before it.
    assert programs[0] != programs[1]


@pytest.mark.usefixtures("no_flags")
def test_options_that_this_jaxlib_lacks_are_not_asked_for(monkeypatch) -> None:
    monkeypatch.setattr(compiling, "_OPTIONS", {"xla_no_such_option": 1})
    assert compiler_options() == {}
    assert Compiled(jnp.sin)(0.0) == 0


@pytest.mark.usefixtures("no_flags")
def test_inside_other_programs(monkeypatch) -> None:
    # One that every jaxlib has.
    monkeypatch.setattr(compiling, "_OPTIONS", {LEVEL: 1})
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


@pytest.mark.usefixtures("no_flags")
def test_small_programs_are_left_as_they_are_written() -> None:
    calls = []

    def wave(x: jax.Array, times: int) -> jax.Array:
        calls.append(x.shape)
        for _ in range(times):
            x = jnp.sin(x)
        return x

    compiled = Compiled(wave, runs=1000, static_argnames="times")
    small, large = jnp.ones(100), jnp.ones(10_000)
    for x in (small, large, small):
        assert jnp.allclose(compiled(x, times=3), jnp.sin(jnp.sin(jnp.sin(x))))
    # The choice does not trace again.
    assert calls == [(100,), (10_000,)]
    chosen = list(compiled._chosen.values())
    assert chosen == [compiled._unoptimised, compiled._optimised]
    assert compiled._unoptimised is not compiled._optimised
    few = Compiled(wave, runs=2, static_argnames="times")
    few(large, times=3)
    assert list(few._chosen.values()) == [few._unoptimised]


def test_work() -> None:
    x = jnp.ones((5, 5))

    def work(function) -> Work:
        return Work.of(jax.make_jaxpr(function)(x).jaxpr)

    assert work(lambda x: jnp.sin(x) + 1) == (2, 50)
    # A library's; what it is given is not.
    assert work(lambda x: jnp.sin(x) @ x) == (2, 25)
    assert work(lambda x: lax.scan(lambda c, _: (c * 2, None), x, None, 7)) == (1, 175)
    assert (
        work(lambda x: lax.fori_loop(0, x[0, 0].astype(int), _twice, x)).elements < 60
    )
    branches = jnp.sin, lambda x: x * x * x
    cheapest = work(lambda x: lax.cond(x[0, 0] > 0, *branches, x))
    # To take an element, squeeze it, compare and convert it to an index; three.
    assert cheapest.operations >= 3
    assert 25 <= cheapest.elements < 35


def _twice(_: jax.Array, x: jax.Array) -> jax.Array:
    return x * 2


def _raises(x: jax.Array) -> jax.Array:
    raise ValueError("of its own")


def test_the_factor_of_a_site_is_one_program(caplog):
    """Operation by operation it took three times as long as the fit before it."""

    def law(size):
        eye = np.eye(size, dtype=np.float32)
        variance = np.full(size, 4, np.float32)
        return SiteMoments(eye[0], variance, lambda: 4 * eye).distribution

    assert law(5).scale_tril.shape == (5, 5)
    with jax.log_compiles(), caplog.at_level("WARNING"):
        found = law(7)
        factor = found.scale_tril
    compiled = [r.message for r in caplog.records if "XLA compilation" in r.message]
    assert len(compiled) == 1, compiled
    np.testing.assert_allclose(found.mean, np.eye(7)[0])
    np.testing.assert_allclose(found.variance, 4, rtol=1e-5)
    np.testing.assert_allclose(factor, 2 * np.eye(7), rtol=1e-5, atol=1e-5)
