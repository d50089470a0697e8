# SPDX-License-Identifier: Apache-2.0
"""Elliptical slices around the joint Gaussian of all Gaussian latents of a model."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro import handlers
from numpyro.diagnostics import effective_sample_size
from numpyro.infer import MCMC
from numpyro.infer.gibbs import GIBBS_SITES_KWARG, conditioned

import numpyro_gpaug as gpaug
from numpyro_gpaug.model import costs
from numpyro_gpaug.model.gaussians import whitening
from tests.chains import assert_same_distribution, importance_draws, many_chains
from tests.conftest import slow

KEY = jax.random.key(0)
RNG = np.random.default_rng(0)
N, GROUPS, TAU = 24, 4, 0.7
GROUP, X = np.arange(N) % GROUPS, RNG.normal(size=N)
CUTS = np.array([-0.5, 0.8])
ORDERED = RNG.integers(0, 3, N)


def mixed(x, group, y=None, *, groups=GROUPS, likelihood):
    """A slope and effects around a level, with a scale that has a prior."""
    beta = numpyro.sample("beta", dist.Normal(0, 1))
    level = numpyro.sample("level", dist.Normal(0, 2))
    tau = numpyro.sample("tau", dist.LogNormal(-0.4, 0.4))
    with numpyro.plate("groups", groups):
        effect = numpyro.sample("effect", dist.Normal(level, tau))
    eta = numpyro.deterministic("eta", beta * x + effect[group])
    with numpyro.plate("data", len(x)):
        numpyro.sample("y", likelihood(eta), obs=y)


def ordinal(eta):
    return dist.OrderedLogistic(eta, jnp.asarray(CUTS, eta.dtype))


given = handlers.condition(mixed, data={"tau": TAU})


def log_density(z):
    """Return the log-density of slope, level and effects, at rows, by NumPy alone."""
    beta, level, effect = z[:, :1], z[:, 1:2], z[:, 2:]
    eta = beta * X + effect[:, GROUP]
    below = [1 / (1 + np.exp(eta - c)) for c in CUTS]
    cells = np.stack([below[0], below[1] - below[0], 1 - below[1]])
    data = np.log(cells[ORDERED, :, np.arange(N)]).sum(0)
    prior = beta[:, 0] ** 2 + level[:, 0] ** 2 / 4
    return data - 0.5 * (prior + (((effect - level) / TAU) ** 2).sum(1))


def test_any_likelihood_of_random_effects_is_sampled_exactly() -> None:
    z = importance_draws(log_density, 2 + GROUPS)
    found = many_chains(
        gpaug.EllipticalSlice(given), (X, GROUP, ORDERED), {"likelihood": ordinal}
    )
    truth = {"beta": z[:, 0], "level": z[:, 1], "effect": z[:, 2:]}
    assert_same_distribution(found, truth, *truth)


def moves(kernel, args, data, site, init=None):
    """The values of sites at the start, and of 20 steps the evaluations, the ratios,
    and the values of a site."""

    @jax.jit
    def chain():
        start = kernel.init(KEY, 0, init, args, data)

        def step(state, _):
            state = kernel.sample(state, args, data)
            return state, (state.evaluations, state.log_ratio, state.z[site])

        return start.z, *jax.lax.scan(step, start, None, length=20)[1]

    return jax.device_get(chain())


@pytest.mark.parametrize("groups", [GROUPS, slow(900)])
def test_with_gaussian_noise_no_move_is_refused(x64, groups) -> None:
    """Dense, and eliminated group by group: the Gaussian is the posterior."""
    group, x = np.arange(2 * groups) % groups, RNG.normal(size=2 * groups)
    args, data = (
        (x, group, x + 1),
        {"groups": groups, "likelihood": lambda e: dist.Normal(e)},
    )
    kernel = gpaug.EllipticalSlice(given)
    _, evaluations, log_ratio, effect = moves(kernel, args, data, "effect")
    assert bool(kernel.structure.form.independent.groups) == (groups > GROUPS)
    np.testing.assert_array_equal(evaluations, 1)
    np.testing.assert_allclose(log_ratio, log_ratio[0], atol=1e-5)
    assert (np.std(effect, 0) > 0.05).all()


def test_no_move_along_a_chain_is_refused(x64, monkeypatch) -> None:
    monkeypatch.setattr(costs, "_OVERHEAD", -np.inf)

    def model(t, y=None):
        level = numpyro.sample("level", dist.Normal(0, 1))
        walk = numpyro.sample("walk", dist.GaussianRandomWalk(0.3, num_steps=40))
        numpyro.sample("y", dist.Normal(level + walk[t], 0.5), obs=y)

    kernel, t = gpaug.EllipticalSlice(model), np.arange(0, 40, 2)
    start = {"level": jnp.zeros(()), "walk": jnp.cumsum(0.3 * RNG.normal(size=40))}
    args = t, RNG.normal(size=len(t))
    first, evaluations, log_ratio, walk = moves(kernel, args, {}, "walk", start)
    assert not kernel.structure.form.any_rows
    np.testing.assert_allclose(first["walk"], start["walk"], atol=1e-9)
    np.testing.assert_array_equal(evaluations, 1)
    np.testing.assert_allclose(log_ratio, log_ratio[0], atol=1e-5)
    assert (np.std(walk, 0) > 0.05).all()


def test_other_blocks_leave_values_as_they_are_when_they_move(x64) -> None:
    """A whitened latent would move with its scale. The ratio is that of the model's own
    density.
    """
    model = partial(mixed, likelihood=ordinal)
    # New arrays: JAX 0.10.1 may keep a 32-bit copy of those that were traced before.
    args = X.copy(), GROUP.copy(), ORDERED.copy()
    kernel = gpaug.EllipticalSlice(model).wrap_model(conditioned)
    names = "beta", "level", "effect"

    def density(z, tau):
        sites = {k: z[k] for k in names} | {"tau": tau}
        return numpyro.infer.util.log_density(model, args, {}, sites)[0]

    @jax.jit
    @jax.vmap
    def before_and_after(key):
        found = []
        here, there = ({GIBBS_SITES_KWARG: {"tau": jnp.array(t)}} for t in (0.7, 1.4))
        state = kernel.init(key, 0, None, args, here)
        for tau, each in ((0.7, state), (1.4, kernel.refresh(state, args, there))):
            ratio = each.log_ratio - 0.5 * jnp.square(each.point.white[0]).sum()
            found.append((each.z, density(each.z, tau) - ratio))
        return found

    (z, constant), (after, another) = before_and_after(jax.random.split(KEY, 3))
    for name in (*names, "eta"):
        np.testing.assert_allclose(after[name], z[name], atol=1e-9)
    np.testing.assert_allclose(constant, constant[0], atol=1e-8)
    np.testing.assert_allclose(another, another[0], atol=1e-8)


SPD = np.array([[2.0, 0.5, 0.0], [0.5, 1.0, 0.2], [0.0, 0.2, 1.5]])
FACTOR = np.linalg.cholesky(SPD)
NEIGHBOURS = np.array([[0, 1, 0], [1, 0, 1], [0, 1, 0]])
DISTRIBUTIONS = {
    "normal": lambda: dist.Normal(1.0, 2.0).expand([2, 3]),
    "multivariate": lambda: dist.MultivariateNormal(np.arange(3.0), SPD).expand([2]),
    "walk": lambda: dist.GaussianRandomWalk(0.5, num_steps=4),
    "matrix": lambda: dist.MatrixNormal(np.ones((3, 2)), FACTOR, 2 * np.eye(2)),
    "areas": lambda: dist.CAR(1.0, 0.8, 2.0, NEIGHBOURS),
    "zero-sum": lambda: dist.ZeroSumNormal(1.5, (4,)),
    "affine": lambda: dist.TransformedDistribution(
        dist.Normal(jnp.zeros(3), 1).to_event(1),
        dist.transforms.LowerCholeskyAffine(jnp.ones(3), jnp.asarray(FACTOR)),
    ),
}


def test_numbers_of_values(x64) -> None:
    shapes = {}

    def shapes_of():
        shapes.update({k: whitening(d()).shape for k, d in DISTRIBUTIONS.items()})

    jax.eval_shape(shapes_of)
    numbers = {name: RNG.normal(size=shape) for name, shape in shapes.items()}

    @jax.jit
    def there_and_back(z):
        found = {name: whitening(d()) for name, d in DISTRIBUTIONS.items()}
        return {name: f.numbers(f.value(z[name])) for name, f in found.items()}

    for name, found in there_and_back(numbers).items():
        np.testing.assert_allclose(found, numbers[name], atol=1e-10, err_msg=name)


def test_what_slices_cannot_take_is_named() -> None:
    with pytest.raises(ValueError, match="other_median"):
        gpaug.EllipticalSlice(mixed, gpaug.AutoLatentGaussian(mixed), {})


def test_weights_of_a_softmax_are_moved_as_one():
    """Moved in turn, draws are worth half as much, and a fortieth in worse cases."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(60, 4, 2)) + 2 * np.arange(4)[:, None]
    y = (x @ [-1.5, 0.5] + 2.0 * np.arange(4) + rng.gumbel(size=(60, 4))).argmax(1)

    def model(x, y):
        w = numpyro.sample("w", dist.Normal(0, 2).expand([2]).to_event(1))
        level = numpyro.sample("level", dist.Normal(0, 2).expand([3]).to_event(1))
        logits = x @ w + jnp.concatenate([jnp.zeros(1), level])
        with numpyro.plate("data", len(x)):
            numpyro.sample("y", dist.Categorical(logits=logits), obs=y)

    kernel = gpaug.EllipticalSlice(model)
    mcmc = MCMC(kernel, num_warmup=50, num_samples=1000, progress_bar=False)
    mcmc.run(jax.random.key(0), x, y)
    level = np.asarray(mcmc.get_samples()["level"])[None]
    assert kernel.structure.joint
    assert effective_sample_size(level).min() > 200


def test_a_further_run_traces_nothing_anew() -> None:
    """Other data of the same shapes get the programs of the first run, and a changed
    global gets others."""
    traced, scale = [], [1.0]

    class Counted(gpaug.EllipticalSlice):
        def _ellipses(self, view):
            traced.append(view)
            return super()._ellipses(view)

    def model(group, y=None):
        with numpyro.plate("groups", GROUPS):
            effect = numpyro.sample("effect", dist.Normal(0, scale[0]))
        with numpyro.plate("data", len(group)):
            numpyro.sample("y", dist.Poisson(jnp.exp(effect[group])), obs=y)

    kernel = Counted(model)
    for data in (GROUP, GROUP), (GROUP[::-1], ORDERED):
        kernel.init(KEY, 0, None, data, {})
        traced.append(None)
    assert traced[1:] == [None] * (len(traced) - 1)
    scale[0] = 2.0
    jax.eval_shape(lambda: kernel.init(KEY, 0, None, (GROUP, GROUP), {}))
    assert traced[-1] is not None
