# SPDX-License-Identifier: Apache-2.0
"""Ends of a search that single numbers, put back to their start, lead away from."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import numpyro_gpaug as gpaug
from numpyro_gpaug.infer import load_state, save_state
from numpyro_gpaug.infer.vi import putting_back
from numpyro_gpaug.infer.vi.putting_back import PuttingBack

KEY = jax.random.key(0)
NONE = -1


# -- which numbers, in which order -----------------------------------------------------


def at_end(back, best, scales=1, bound=-10.0, clear=0.5, *, ended=True):
    best, on = jnp.asarray(best), jnp.full(len(best), scales, bool)
    return back.at_end(
        best, on, jnp.asarray(bound), jnp.asarray(clear), jnp.asarray(ended)
    )


def test_numbers_on_a_scale_that_moved_far_are_put_back() -> None:
    start, end = jnp.ones(5), [4.0, 1.5, -6.0, 3.0, 10.0]
    scales = jnp.array([True, True, True, True, False])
    back = at_end(PuttingBack.start(start), end, scales)
    tried = []
    while back.tries:
        assert not back.leads
        put = back.values(jnp.asarray(end), jnp.full(5, 100.0))
        changed = np.flatnonzero(put != jnp.asarray(end))
        np.testing.assert_array_equal(changed, [back.trial])
        assert put[back.trial] == 1
        tried.append(int(back.trial))
        back = back.after(jnp.asarray(-9.6 if back.trial == 2 else jnp.nan))
    assert tried == [0, 2, 3]  # -9.6 is not clearly higher
    np.testing.assert_array_equal(back.values(start, start + 1), start + 1)
    # An end that is no higher is not looked at again.
    assert not at_end(back, end, scales, bound=-9.6).tries
    assert at_end(back, end, scales, bound=-9.4).tries
    assert not at_end(PuttingBack.start(start), end, ended=False).tries


def test_the_search_goes_on_from_the_best() -> None:
    back = at_end(PuttingBack.start(jnp.zeros(3)), [2.0, 3.0, -4.0])
    for bound in (-9.0, -8.0, -8.5):
        assert not back.leads
        back = back.after(jnp.asarray(bound))
    assert back.leads
    assert back.trial == 1
    back = back.led(jnp.ones(3), jnp.array(False))
    assert not back.leads | back.tries
    np.testing.assert_array_equal(back.times, [0, 1, 0])
    assert at_end(back, [2.0, 0.0, -4.0], bound=-8.0).tries


def test_of_many_numbers_those_that_moved_furthest_are_put_back(monkeypatch) -> None:
    monkeypatch.setattr(putting_back, "MOST", 3)
    back = at_end(PuttingBack.start(jnp.zeros(6)), [2.0, -5.0, 3.0, 0.1, 4.0, 1.5])
    np.testing.assert_array_equal(np.flatnonzero(back.left), [1, 2, 4])


# -- fits ------------------------------------------------------------------------------


def model(X, y=None, *, inducing):
    positive = dist.constraints.positive
    start = jnp.full(X.shape[1], X.shape[1] ** 0.5)
    lengthscale = numpyro.param("lengthscale", start, constraint=positive)
    variance = numpyro.param("variance", 1.0, constraint=positive)
    noise = numpyro.param("noise", 0.3, constraint=positive)
    mean = numpyro.param("mean", 0.0)
    kernel = gpaug.kernels.SquaredExponential(lengthscale, variance)
    gp = gpaug.GaussianProcess("f", kernel, inducing, mean=mean)
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Normal(gp(X), noise), obs=y)


def waves(seed=8, num=120, columns=5):
    """A sine, a product and a line. The sine has a trend, which is found first, and
    takes its column's lengthscale to where the sine is not seen any more."""
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(num, columns)).astype("float32")
    f = np.sin(2 * X[:, 0]) + X[:, 1] * X[:, 2] + 0.5 * X[:, 3]
    return X, (f + 0.3 * rng.normal(size=num)).astype("float32")


def run(svi, data, steps=200, **options):
    X, y = data
    return svi.run(
        KEY, steps, X, y, inducing=X[:30], progress_bar=False, **options
    )  # fmt: skip


@pytest.fixture(scope="module")
def fitted():
    svi, data = gpaug.ConjugateSVI(model, gpaug.AutoSparseGP(model)), waves()
    return svi, data, run(svi, data)


def leap(result):
    """The steps before the run went on from a number put back."""
    return int(np.flatnonzero(result.losses[25:-1] - result.losses[26:] > 3)[0]) + 26


def looks(svi, data, steps):
    """Whether a run looks at an end after so many steps."""
    return bool(run(svi, data, steps).state.hyper.optim_state.back.tries)


def test_an_end_is_left_where_the_bound_is_higher(fitted) -> None:
    svi, data, result = fitted
    before = leap(result)
    assert (np.diff(result.losses) < 1e-3).all()
    assert list(result.put_back) == ["lengthscale"]
    np.testing.assert_array_equal(result.put_back["lengthscale"], [1, 0, 0, 0, 0])
    assert "put back" in repr(result)
    assert int(result.state.step) == len(result.losses) < 150
    # One evaluation for each number that has moved, and one of the best.
    end, start = run(svi, data, before - 1).params, run(svi, data, 1).params
    logs = [np.log(end[k] / start[k]) for k in ("lengthscale", "variance", "noise")]
    moved = sum(int((np.abs(x) > 1).sum()) for x in logs)
    assert 2 < moved < 8
    steps = range(before - moved - 1, before + 1)
    found = [looks(svi, data, each) for each in steps]
    assert found == [False, *[True] * (moved + 1)]
    assert not looks(svi, data, before + 1)
    # There is where a start whose sine is seen leads, too.
    seen = run(svi, data, init_params={"lengthscale": jnp.full(5, 1.0)})
    assert seen.put_back == {}
    assert "put back" not in repr(seen)
    assert abs(result.losses[-1] - seen.losses[-1]) < 2


def test_an_end_that_is_none_the_higher_stays(fitted) -> None:
    svi, data, _ = fitted
    options = {"init_params": {"lengthscale": jnp.full(5, 1.0)}}
    result = run(svi, data, **options)
    last = int(np.argmax(result.losses == result.losses[-1])) + 1
    assert last < len(result.losses) < last + 20
    # With tol=0 nothing ends a search, and nothing is put back.
    longer = run(svi, data, last, tol=0.0, **options)
    np.testing.assert_array_equal(result.losses[:last], longer.losses)
    for name, value in result.params.items():
        jax.tree.map(np.testing.assert_array_equal, value, longer.params[name])


def test_runs_that_end_while_numbers_are_put_back_go_on_the_same(
    fitted, tmp_path
) -> None:
    svi, data, whole = fitted
    before = leap(whole)
    for steps in (10, before - 3, before, before + 1):
        first = run(svi, data, steps)
        save_state(tmp_path / "fit.npz", first.state)
        state = load_state(tmp_path / "fit.npz", like=first.state)
        rest = run(svi, data, 200 - steps, init_state=state)
        np.testing.assert_array_equal(rest.losses, whole.losses[steps:])
        for name, value in whole.params.items():
            jax.tree.map(np.testing.assert_array_equal, value, rest.params[name])
        np.testing.assert_array_equal(
            *(r.put_back["lengthscale"] for r in (rest, whole))
        )


def test_other_data_are_learnt_from_anew(fitted) -> None:
    svi, data, whole = fitted
    among = run(svi, data, leap(whole) - 3).state
    assert among.hyper.optim_state.back.tries
    X, y = data
    rest = run(svi, (X, 3 * y), init_state=among)
    assert len(rest.losses) > 20
    assert rest.losses[-1] < rest.losses[0] - 50


def test_steps_on_blocks_are_those_in_memory(fitted) -> None:
    _, (X, y), whole = fitted
    svi = gpaug.ConjugateSVI(model, gpaug.AutoSparseGP(model))
    result = svi.run(
        KEY, 200, gpaug.Blocks((X, y), 60), inducing=X[:30], progress_bar=False
    )
    np.testing.assert_array_equal(result.put_back["lengthscale"], [1, 0, 0, 0, 0])
    assert abs(result.losses[-1] - whole.losses[-1]) < 2
