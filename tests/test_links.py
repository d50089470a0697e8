# SPDX-License-Identifier: Apache-2.0
"""Piecewise-constant links: cells, errors, heights that are learnt."""

import json
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import pytest
import scipy.stats as st
from numpyro.distributions import constraints
from scipy.integrate import quad
from scipy.special import expit

import numpyro_gpaug as gpaug
from numpyro_gpaug import PiecewiseLink
from numpyro_gpaug.distributions.links.piecewise import knots
from tests.conftest import assert_close

GOLDEN = json.loads(
    (Path(__file__).parent / "golden" / "problem_piecewise.json").read_text()
)
EDGES = GOLDEN["inner_edges"]
VALUES = np.sin(np.arange(14.0))


@partial(jax.jit, static_argnums=0)
def call(method, link: PiecewiseLink, *args):
    """A method in one program; op by op, each operation compiles one."""
    return method(link, *args)


def empty_link(dtype: str = "float64") -> PiecewiseLink:
    """Cells alone: the heights do not matter."""
    return PiecewiseLink(np.zeros(14, dtype), EDGES)


def upper_link(function) -> PiecewiseLink:
    link = PiecewiseLink.from_function(function, 14, -3.0, 3.0, rule="upper")
    assert link.edges == tuple(EDGES)
    return link


def test_knots_and_heights(x64) -> None:
    link = upper_link(expit)
    np.testing.assert_array_equal(knots(EDGES, "upper"), GOLDEN["x_k"])
    np.testing.assert_allclose(link.heights, GOLDEN["bernoulli"]["g_k"], rtol=1e-15)
    middle = PiecewiseLink.from_function(lambda f: f, 4, -1.0, 1.0)
    np.testing.assert_allclose(middle.heights, [-1.0, -0.5, 0.5, 1.0])


def test_values_between_edges() -> None:
    link = PiecewiseLink([1.0, 2.0, 3.0], [-1.0, 0.5])
    values = partial(call, PiecewiseLink.__call__)
    f = np.array([[-9.0, -1.0], [0.5, 9.0]])
    np.testing.assert_array_equal(values(link, f), [[1, 2], [3, 3]])
    rows = link.with_heights(np.array([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]))
    np.testing.assert_array_equal(values(rows, np.array([0.0, 0.6])), [2, 6])
    np.testing.assert_array_equal(values(rows, f), [[1, 5], [3, 6]])


def test_golden_cells(dtype: str) -> None:
    golden = GOLDEN["bernoulli"]
    m, v = (np.asarray(golden[k], dtype) for k in "mv")
    cells = call(PiecewiseLink.cell_probabilities, empty_link(dtype), m, v)
    assert_close(cells, golden["P"])


CASES = [(m, v) for m in (-40.0, -7.0, 0.0, 0.3, 12.0) for v in (1e-8, 0.1, 4.0, 1e4)]


def exact_cells(mean: float, variance: float) -> np.ndarray:
    """Return cell probabilities by survival functions or distribution functions,
    whichever is smaller, in double precision.
    """
    z = (np.array([-np.inf, *EDGES, np.inf]) - mean) / np.sqrt(variance)
    low, high = z[:-1], z[1:]
    right = st.norm.sf(low) - st.norm.sf(high)
    return np.where(low > 0, right, st.norm.cdf(high) - st.norm.cdf(low))


def test_cells_keep_their_relative_precision(dtype: str) -> None:
    m, v = (np.array(x) for x in zip(*CASES, strict=True))
    exact = np.stack([exact_cells(*case) for case in CASES])
    ours, logs = (
        np.asarray(call(method, empty_link(dtype), m.astype(dtype), v.astype(dtype)))
        for method in (
            PiecewiseLink.cell_probabilities, PiecewiseLink.log_cell_probabilities,
        )
    )  # fmt: skip
    # The argument of a tail is rounded before it is squared.
    tolerance = {"float64": 1e-12, "float32": 3e-4}[dtype]
    seen = exact > {"float64": 1e-290, "float32": 1e-30}[dtype]
    wide = np.sqrt(v)[:, None] > {"float64": 0, "float32": 1e-3}[dtype]
    np.testing.assert_allclose(ours[seen & wide], exact[seen & wide], rtol=tolerance)
    np.testing.assert_allclose(
        logs[seen & wide], np.log(exact[seen & wide]), rtol=1e-6, atol=tolerance
    )
    np.testing.assert_allclose(ours.sum(-1), 1, rtol=1e-6)
    assert np.isfinite(logs).all()


def test_expectations_of_steps(dtype: str) -> None:
    """One tail per edge is the sum over cells, with infinite values out of reach."""
    values = np.random.default_rng(0).normal(size=14).astype(dtype)
    m = np.asarray([-9.0, -3.0, 0.1, 2.0, 9.0], dtype)
    v = np.asarray([1.0, 0.0, 4.0, 1e-3, 1e4], dtype)
    infinite = values.copy()
    infinite[0] = -np.inf

    @jax.jit
    def compute(values, infinite, m, v):
        link = empty_link(dtype)
        expectation = link.expectation(values, m, v)
        return (
            link.cell_probabilities(m, v), expectation,
            link.expectation(infinite, m, v),
        )  # fmt: skip

    cells, ours, with_infinite = compute(values, infinite, m, v)
    exact = np.asarray(cells, float) @ values.astype(float)
    assert_close(ours, exact, factor=2)
    assert_close(with_infinite[3], exact[3], factor=2)


def test_gradients_of_cells(x64) -> None:
    """The mean may be at an edge."""
    m, v = np.array([-5.0, EDGES[6], 2.0]), np.array([3.0, 0.5, 40.0])

    @jax.jit
    def slopes(m, v):
        by = jax.jacfwd(empty_link().cell_probabilities, (0, 1))(m, v)
        steps = jax.jacfwd(partial(empty_link().expectation, VALUES), (0, 1))(m, v)
        rows = jnp.arange(3)
        return [x[rows, :, rows] for x in by], [jnp.diag(x) for x in steps]

    step = 1e-5
    by, of_steps = slopes(m, v)
    cells = partial(call, PiecewiseLink.cell_probabilities, empty_link())
    for k, (dm, dv) in enumerate([(step, 0.0), (0.0, step)]):
        up, down = np.asarray(cells(m + dm, v + dv)), cells(m - dm, v - dv)
        np.testing.assert_allclose(by[k], (up - down) / (2 * step), atol=1e-9)
        np.testing.assert_allclose(of_steps[k], by[k] @ VALUES, atol=1e-12)


def test_gradients_at_a_point_mass(dtype: str) -> None:
    m, v = np.array([-1.0, 0.0, 1e4], dtype), np.zeros(3, dtype)

    @jax.jit
    def everything(m, v):
        link = PiecewiseLink(np.zeros(3, dtype), [-1.0, 1.0])
        functions = link.cell_probabilities, link.log_cell_probabilities
        return [(f(m, v), jax.jacrev(f, (0, 1))(m, v)) for f in functions]

    assert all(np.isfinite(x).all() for x in jax.tree.leaves(everything(m, v)))


@pytest.mark.parametrize("case", range(4))
def test_golden_errors(x64, case: int) -> None:
    first = GOLDEN["theorem1"][case]
    m, v = first["mu"], first["sigma"] ** 2
    link = upper_link(np.exp)
    bound = call(upper_bound, link, m, v, 1.0)
    np.testing.assert_allclose(bound, first["bound_unit_lipschitz"], rtol=1e-9)


def upper_bound(link: PiecewiseLink, m, v, lipschitz):
    return link.mean_squared_error_bound(m, v, lipschitz, rule="upper")


def squared_errors(function, link: PiecewiseLink, m, v) -> np.ndarray:
    """``E (g(f) - link(f))^2`` under Gaussians, by a fine trapezoid rule."""
    z = np.linspace(-9, 9, 40001)
    w = np.exp(-0.5 * z * z)
    f = m[:, None] + np.sqrt(v)[:, None] * z
    values = np.asarray(call(PiecewiseLink.__call__, link, f), float)
    return np.square(function(f) - values) @ w / w.sum()


def test_the_bound_is_one() -> None:
    m, v = np.array([0.0, 2.0, -6.0]), np.array([1.0, 4.0, 0.3])
    bound = partial(call, PiecewiseLink.mean_squared_error_bound)
    link = PiecewiseLink.from_function(expit, 20, -4.0, 4.0)
    assert (squared_errors(expit, link, m, v) < bound(link, m, v, 0.25)).all()
    line = PiecewiseLink.from_function(lambda f: f, 20, -4.0, 4.0)
    tight = squared_errors(lambda f: f, line, m, v)
    np.testing.assert_allclose(bound(line, m, v, 1.0), tight, rtol=1e-3)


def test_no_cancellation_in_float32() -> None:
    """The bound of a fine mesh is a small difference of large moments as printed."""
    link = PiecewiseLink(np.zeros(400, "float32"), np.linspace(-20, 20, 399))
    ours = call(PiecewiseLink.mean_squared_error_bound, link, 15.0, 0.25, 1.0)
    z = np.array([-np.inf, *link.edges, np.inf])
    total = sum(
        quad(lambda f, x=x: (f - x) ** 2 * st.norm.pdf(f, 15, 0.5), a, b)[0]
        for a, b, x in zip(z[:-1], z[1:], knots(link.edges), strict=True)
        if b > 10
    )
    np.testing.assert_allclose(ours, total, rtol=2e-3)


def test_a_link_is_a_pytree_of_its_heights() -> None:
    link = PiecewiseLink.from_function(np.exp, 5, -1.0, 1.0)
    assert len(jax.tree.leaves(link)) == 1
    doubled = jax.jit(lambda x: jax.tree.map(lambda h: 2 * h, x))(link)
    np.testing.assert_allclose(doubled.heights, 2 * np.asarray(link.heights))
    assert doubled.edges == link.edges
    stacked = jax.tree.map(lambda h: np.stack([h, 3 * h]), link)
    values = jax.jit(jax.vmap(lambda x: x(0.0)))(stacked)
    np.testing.assert_allclose(values[1], 3 * values[0], rtol=1e-6)


@pytest.mark.parametrize("order", ["free", "increasing"])
@pytest.mark.parametrize(
    "constraint", [constraints.unit_interval, constraints.positive, constraints.real]
)
def test_learnt_heights_stay_where_they_belong(constraint, order: str) -> None:
    start = PiecewiseLink.from_function(jax.nn.sigmoid, 8, -2.0, 2.0)
    model = lambda: gpaug.learned_link("g", start, constraint, order)  # noqa: E731
    seeded = numpyro.handlers.trace(numpyro.handlers.seed(model, 0))
    site = seeded.get_trace()["g"]
    transform = numpyro.distributions.biject_to(site["kwargs"]["constraint"])
    np.testing.assert_allclose(seeded().heights, start.heights, rtol=1e-4)
    raw = transform.inv(site["value"]) + jax.random.normal(jax.random.key(1), (8,))
    moved = numpyro.handlers.substitute(seeded, data={"g": transform(raw)})()
    assert constraint(moved.heights).all()
    assert order == "free" or (jnp.diff(moved.heights) > 0).all()
    assert not np.allclose(moved.heights, start.heights)


def test_a_link_as_a_param() -> None:
    start = PiecewiseLink.from_function(jnp.exp, 4, -1.0, 1.0)
    model = lambda: numpyro.param("link", lambda _: start)  # noqa: E731
    assert numpyro.handlers.seed(model, 0)().edges == start.edges


def test_penalty() -> None:
    start = PiecewiseLink([0.0, 1.0, 2.0], [0.0, 1.0])

    def model():
        gpaug.link_penalty("near", start, jnp.array([0.0, 0.0, 4.0]), 3.0)
        gpaug.link_penalty("small", start, 1.0, 2.0)

    value = numpyro.infer.util.log_density(model, (), {}, {})[0]
    np.testing.assert_allclose(value, -3 * 5 - 2 * 2)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: PiecewiseLink([0.1, 0.2], [0.0, 1.0]), "2 finite edges make 3 pieces"),
        (lambda: PiecewiseLink([0.1] * 3, [1.0, 0.0]), "finite and increasing"),
        (lambda: PiecewiseLink([0.1] * 3, [0.0, 0.0]), "finite and increasing"),
        (lambda: PiecewiseLink([0.1] * 3, [0.0, np.inf]), "finite and increasing"),
        (lambda: PiecewiseLink([0.1], []), "at least one"),
        (lambda: PiecewiseLink.from_function(jnp.exp, 1, 0.0, 1.0), "at least 2"),
        (lambda: PiecewiseLink.from_function(jnp.exp, 4, 1.0, 1.0), "below upper"),
        (lambda: PiecewiseLink.from_function(jnp.exp, 4, 0.0, 1.0, "left"), "rule"),
        (lambda: PiecewiseLink.from_function(jnp.log, 4, -1.0, 1.0), "not finite"),
        (lambda: PiecewiseLink.from_function(jnp.sum, 4, -1.0, 1.0), "elementwise"),
        (lambda: gpaug.learned_link(
            "g", PiecewiseLink([-1.0, 2.0], [0.0]), constraints.unit_interval
        ), "do not satisfy"),
        (lambda: gpaug.learned_link(
            "g", PiecewiseLink([1.0, 0.0], [0.0]), order="increasing"
        ), "do not increase"),
    ],
)  # fmt: skip
def test_refusals(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
