# SPDX-License-Identifier: Apache-2.0
"""Rows shared out among devices: the same numbers, and only sums go between them."""

import math
import re
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from numpyro.infer import SVI

import numpyro_gpaug as gpaug
from numpyro_gpaug.infer import load_state, save_state
from numpyro_gpaug.math import blocks
from numpyro_gpaug.math.sharding import (
    of_this_process,
    row_processes,
    rows_mesh,
    shards,
)
from tests.conftest import slow, small_blocks

KEY = jax.random.key(0)
DEVICES = 4
pytestmark = pytest.mark.skipif(
    jax.device_count() < DEVICES, reason="XLA_FLAGS name fewer devices"
)
COLLECTIVES = "all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter"


def mesh_of(count=DEVICES, axis_type=AxisType.Auto, axis="rows of mine"):
    devices = jax.devices()[:count]
    return jax.make_mesh((count,), (axis,), axis_types=(axis_type,), devices=devices)


def shared_out(*arrays, mesh=None):
    mesh = mesh or mesh_of()
    sharding = NamedSharding(mesh, PartitionSpec(mesh.axis_names[0]))
    return tuple(jax.device_put(x, sharding) for x in arrays)


def process(X, y=None, *, Z, latents=None, likelihood="bernoulli"):
    scale = numpyro.sample("scale", dist.LogNormal(0.0, 1.0))
    kernel = gpaug.kernels.Matern52(scale, 1.5)
    gp = gpaug.GaussianProcess("f", kernel, Z, num_latents=latents)
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", LIKELIHOODS[likelihood](gp(X)), obs=y)


def grouped(X, group, y=None, *, groups):
    tau = numpyro.sample("tau", dist.HalfNormal(1.0))
    slope = numpyro.sample("slope", dist.Normal(0, 2).expand([2]).to_event(1))
    with numpyro.plate("groups", groups):
        effect = numpyro.sample("effect", dist.Normal(0, tau))
    with numpyro.plate("data", len(X)):
        rate = jnp.exp(X @ slope + effect[group])
        numpyro.sample("y", dist.Poisson(rate), obs=y)


LIKELIHOODS = {
    "bernoulli": lambda f: dist.Bernoulli(logits=f),
    "softmax": lambda f: dist.Categorical(logits=f),
    "student": lambda f: dist.StudentT(4.0, f, 0.5),
}


def data(rows, seed=0):
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(rows, 2)).astype("f")
    return X, (X[:, 0] * X[:, 1] > 0).astype(int), rng.integers(0, 10, rows)


def fit(model, guide, arrays, steps=6, optim=None, mesh=None, what="advance", **kwargs):
    """Losses, and what goes between devices in a chunk of steps, or in another
    program."""
    svi = gpaug.ConjugateSVI(model, guide(model), optim, mesh=mesh)
    # Its programs are changed here, and not shared.
    svi.guide.join = lambda *arguments: False
    programs, advance = [], getattr(svi._programs, what)

    def watched(*args, **static):
        if not programs:
            programs.append(advance.plain.lower(*args, **static).compile())
        traced = {k: v for k, v in static.items() if k not in ("plan", "static")}
        return programs[0](*args, **traced)

    setattr(svi._programs, what, watched)
    result = svi.run(KEY, steps, *arrays, progress_bar=False, **kwargs)
    text = programs[0].as_text()
    # Sums over latents would contain every row.
    if blocks.WHOLE < 2**20 and "latents" not in getattr(mesh, "axis_names", ()):
        assert in_blocks(text) == []
    return svi, result, collectives(text)


def in_blocks(text):
    """Return the messages between devices in loops over blocks of rows. The compiler
    knows the length of these loops, but not of those over steps and moves.
    """
    programs = {
        found[1]: found[2]
        for found in re.finditer(r"^%?([\w.-]+) [^\n]*\{\n(.*?)^\}", text, re.M | re.S)
    }
    bodies = re.findall(r" while\([^\n]*body=%?([\w.-]+)[^\n]*known_trip_count", text)
    assert bodies
    seen = set()
    while bodies:
        name = bodies.pop()
        if name not in seen:
            seen.add(name)
            called = re.findall(r"%?([\w.-]+)", programs[name])
            bodies += [other for other in called if other in programs]
    return [found for name in seen for found in collectives(programs[name])]


def collectives(text):
    """Kinds of what goes between devices, and its bytes."""
    found = []
    for line in text.splitlines():
        match = re.search(rf" = (.*?) ({COLLECTIVES})(-start)?\(", line)
        if match:
            shapes = re.findall(r"([a-z]+)(\d*)\[([\d,]*)\]", match[1])
            sizes = [
                math.prod(int(n) for n in shape.split(",") if n) * int(bits or 8) // 8
                for _, bits, shape in shapes
            ]
            found.append((match[2], sum(sizes)))
    return found


def test_batches_that_cannot_be_shared_out():
    X, y, _ = data(163)
    for read, message in (
        (gpaug.Batches((X, y), 50), "Batches of 50 rows cannot be divided evenly"),
        (gpaug.Blocks((X, y), 40), "Blocks of 40 rows, and a last one of 3, cannot"),
    ):
        with pytest.raises(ValueError, match=message):
            fit(process, gpaug.AutoSparseGP, (read,), Z=X[:8], mesh=mesh_of())


def test_processes_read_as_many_rows_each():
    def mesh_in(*processes):
        devices = [[SimpleNamespace(process_index=i)] for i in processes]
        return SimpleNamespace(devices=np.array(devices), shape={"rows": len(devices)})

    assert row_processes(rows_mesh(mesh_of(), ())) == 1
    assert row_processes(mesh_in(0, 1, 1, 0)) == 2
    with pytest.raises(ValueError, match="as many as the others"):
        row_processes(mesh_in(0, 0, 1))


def test_uneven_rows_are_filled_with_rows_of_no_weight(tmp_path):
    X, y, _ = data(163)
    explicit = mesh_of(axis_type=AxisType.Explicit)
    again, alone, _ = fit(process, gpaug.AutoSparseGP, (X, y), Z=X[:8])
    svi, result, found = fit(
        process, gpaug.AutoSparseGP, (X, y), Z=X[:8], mesh=explicit
    )
    np.testing.assert_allclose(result.losses, alone.losses, rtol=2e-5)
    assert {kind for kind, _ in found} == {"all-reduce"}
    # One device continues from a checkpoint of several.
    save_state(tmp_path / "fit.npz", result.state)
    how = {"Z": X[:8], "progress_bar": False}
    state = load_state(tmp_path / "fit.npz", like=again.init(KEY, X, y, Z=X[:8]))
    on = again.run(KEY, 2, X, y, init_state=state, **how)
    np.testing.assert_allclose(on.losses, alone.losses[-1], rtol=2e-5)
    # Rows on several devices are predicted where they are.
    expected = again.posterior(alone).predict_y(X[:160]).probs
    there = shared_out(X[:160], mesh=explicit)
    probs = svi.posterior(result).predict_y(*there).probs
    np.testing.assert_allclose(probs, expected, atol=1e-4)
    assert len(probs.sharding.device_set) == DEVICES
    assert not probs.sharding.is_fully_replicated


@pytest.mark.slow
@pytest.mark.parametrize("method", ["evaluate", "update"])
def test_stock_svi_with_the_analytic_bound(method):
    X, y, _ = data(160)
    arrays = shared_out(X, y)
    guide = gpaug.AutoSparseGP(process, covariance="dense")
    optim = numpyro.optim.Adam(0.01)
    svi = SVI(process, guide, optim, gpaug.TraceAnalytic_ELBO())
    Z, losses = X[:8], []
    state = jax.jit(lambda: svi.init(KEY, X, y, Z=Z))()
    for given in ((X, y), arrays):
        step = jax.jit(lambda state, X, y: getattr(svi, method)(state, X, y, Z=Z))
        compiled = step.lower(state, *given).compile()
        found = compiled(state, *given)
        losses.append(found if method == "evaluate" else found[1])
    found = collectives(compiled.as_text())
    assert {kind for kind, _ in found} == {"all-reduce"}
    np.testing.assert_allclose(*losses, rtol=1e-5)


def latents_mesh(rows, latents):
    devices = jax.devices()[: rows * latents]
    return jax.make_mesh((rows, latents), ("rows", "latents"), devices=devices)


def labels(X, y=None, *, Z, latents):
    gp = gpaug.GaussianProcess("f", gpaug.kernels.Matern52(1.0), Z, num_latents=latents)
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", dist.Bernoulli(logits=gp(X)).to_event(1), obs=y)


@pytest.mark.parametrize(
    ("likelihood", "rows", "size"),
    [
        ("labels", 2, 512),
        slow("softmax", 2, 512),
        slow("softmax", 1, blocks.WHOLE),
        slow("labels", 1, blocks.WHOLE),
    ],
)
def test_latents_shared_out_among_devices(likelihood, rows, size):
    latents = 8
    X, _, _ = data(256)
    rng = np.random.default_rng(1)
    if likelihood == "labels":
        model, kwargs = labels, {}
        y = rng.integers(0, 2, (256, latents))
    else:
        model, kwargs = process, {"likelihood": likelihood}
        y = rng.integers(0, latents, 256)
    kwargs |= {"Z": X[:8], "latents": latents}
    again, alone, _ = fit(model, gpaug.AutoSparseGP, (X, y), **kwargs)
    mesh = latents_mesh(rows, DEVICES // rows)
    with small_blocks(size):
        svi, result, found = fit(model, gpaug.AutoSparseGP, (X, y), mesh=mesh, **kwargs)
    np.testing.assert_allclose(result.losses, alone.losses, rtol=2e-5)
    # Sums over rows or classes: no latent goes to another device.
    assert {kind for kind, _ in found} == {"all-reduce"}
    for leaf in jax.tree.leaves(result.state.natural):
        here = leaf.addressable_shards[0].data
        assert here.shape == (latents * rows // DEVICES, *leaf.shape[1:])
    probs = svi.posterior(result).predict_y(X[:40]).probs
    expected = again.posterior(alone).predict_y(X[:40]).probs
    np.testing.assert_allclose(probs, expected, atol=1e-4)


def test_latents_that_cannot_be_shared_out():
    X, y, group = data(160)
    how = {"mesh": latents_mesh(1, DEVICES)}
    with pytest.raises(ValueError, match="'f' has 6"):
        fit(
            process,
            gpaug.AutoSparseGP,
            (X, y),
            Z=X[:8],
            latents=6,
            likelihood="softmax",
            **how,
        )
    with pytest.raises(ValueError, match="evenly: none is"):
        fit(process, gpaug.AutoSparseGP, (X, y), Z=X[:8], **how)
    with pytest.raises(ValueError, match="one Gaussian"):
        fit(grouped, gpaug.AutoLatentGaussian, (X, group, y), groups=10, **how)


def test_uneven_rows_of_joint_gaussians():
    X, y, group = data(163)
    guide, given = gpaug.AutoLatentGaussian, (X, group, y)
    kwargs = {"groups": 10, "optim": "lbfgs", "steps": 3}
    _, alone, _ = fit(grouped, guide, given, **kwargs)
    _, result, found = fit(grouped, guide, given, mesh=mesh_of(), **kwargs)
    np.testing.assert_allclose(result.losses, alone.losses, rtol=1e-4)
    assert {kind for kind, _ in found} == {"all-reduce"}

    def centred(X, group, y=None, *, groups):
        grouped(X - X.mean(0), group, y, groups=groups)

    with pytest.raises(ValueError, match="163 rows cannot be divided evenly among 4"):
        fit(centred, guide, given, groups=10, mesh=mesh_of())


def test_sharded_columns_are_refused():
    X, y, _ = data(160)
    sharding = NamedSharding(mesh_of(2), PartitionSpec(None, "rows of mine"))
    with pytest.raises(ValueError, match="Rows can be sharded"):
        fit(process, gpaug.AutoSparseGP, (jax.device_put(X, sharding), y), Z=X[:8])


def test_blocks_of_rows_keep_to_their_devices():
    mesh = rows_mesh(mesh_of(), ())
    rows = np.arange(4 * 7.0)

    @jax.jit
    def everything(rows):
        cut = blocks.cut_rows(rows, 8)
        back = blocks.over_blocks(lambda x: x, cut, len(rows))
        return cut, back, blocks.cut_rows(rows[:-1], 8)

    with jax.set_mesh(mesh):
        assert shards() == 4
        cut, back, odd = everything(rows)
    np.testing.assert_array_equal(cut[0], [[0, 1], [7, 8], [14, 15], [21, 22]])
    np.testing.assert_array_equal(back, rows)
    assert odd.shape == (4, 1, 8)
    assert odd[0, 0, -1] == 7
    assert shards() == 1


def test_derivatives_are_summed_on_each_device_over_all_blocks():
    mesh = rows_mesh(mesh_of(), ())
    rows = np.random.default_rng(0).normal(size=(4 * 7, 3)).astype("f")
    weights = jnp.ones((3, 3))

    def moments(weights, rows):
        cut = blocks.cut_rows(rows, 8, "constant")
        found = blocks.over_blocks(lambda x: jnp.tanh(x @ weights), cut, len(rows))

        def add(total, block):
            return total + block.T @ block @ weights

        total = blocks.summed_blocks(add, jnp.zeros((3, 3)), cut)
        return (found**2).sum() + (total**2).sum()

    slope = jax.jit(jax.value_and_grad(moments))
    alone = slope(weights, rows)
    with jax.set_mesh(mesh):
        program = slope.lower(weights, *shared_out(rows, mesh=mesh)).compile()
        found = program(weights, *shared_out(rows, mesh=mesh))
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5), found, alone)
    assert collectives(program.as_text())
    assert in_blocks(program.as_text()) == []


def test_parts_of_this_process():
    (rows,) = shared_out(np.arange(8))
    np.testing.assert_array_equal(of_this_process(rows), np.arange(8))
