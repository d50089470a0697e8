# SPDX-License-Identifier: Apache-2.0
"""``jax_enable_x64`` switched between a fit and its predictions."""

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import numpyro_gpaug as gpaug
from tests.conftest import enable_x64

KEY = jax.random.key(0)
QUIET = {"progress_bar": False}
rng = np.random.default_rng(0)
X = rng.normal(size=(12, 1))
GROUP = np.arange(12) % 3
Y = (X[:, 0] > 0).astype(int)


def process(X, y=None, *, inducing):
    scale = numpyro.sample("scale", dist.LogNormal(0, 1))
    f = gpaug.GaussianProcess("f", gpaug.kernels.Matern52(scale), inducing)
    with numpyro.plate("data", len(X)):
        numpyro.sample("y", dist.Bernoulli(logits=f(X)), obs=y)


def groups(group, x, y=None):
    tau = numpyro.sample("tau", dist.HalfNormal(1))
    with numpyro.plate("groups", 3):
        u = numpyro.sample("u", dist.Normal(0, tau))
    with numpyro.plate("data", len(group)):
        numpyro.sample("y", dist.Bernoulli(logits=u[group] + x), obs=y)


def answers(posterior, args):
    found = [
        posterior.predict_y(*args).probs,
        posterior.predict_f(*args, full_covariance=True),
        posterior.log_prob(*args, Y),
        posterior.sample(KEY, *(x[:2] for x in args)),
        posterior.summary()["mean"].to_numpy(),
    ]
    return jax.tree.map(np.asarray, found)


@pytest.mark.parametrize("double", [False, True])
def test_predictions_are_in_the_dtype_of_the_fit(double, tmp_path):
    dtype = np.float64 if double else np.float32
    x, path = X.astype(dtype), tmp_path / "fit.npz"
    with enable_x64(double):
        svi = gpaug.ConjugateSVI(process, gpaug.AutoSparseGP(process))
        result = svi.run(KEY, 3, x, Y, inducing=x[:3], **QUIET)
        joint = gpaug.ConjugateSVI(groups, gpaug.AutoLatentGaussian(groups))
        fit = joint.run(KEY, 3, GROUP, x[:, 0], Y, **QUIET)
        made = [(svi, result, (x,), process), (joint, fit, (GROUP, x[:, 0]), groups)]
        posteriors = [svi.posterior(result) for svi, result, *_ in made]
        pairs = zip(posteriors, made, strict=True)
        expected = [answers(p, args) for p, (_, _, args, _) in pairs]
        posteriors[0].save(path)
    with enable_x64(not double):
        # Inputs of the dtypes that JAX has now.
        given = [jax.device_put(args) for _, _, args, _ in made]
        again = [svi.posterior(result) for svi, result, *_ in made]
        loaded = gpaug.Posterior.load(path, process)
        found = [answers(*pair) for pair in zip(posteriors, given, strict=True)]
        found += [answers(*pair) for pair in zip(again, given, strict=True)]
        found.append(answers(loaded, given[0]))
        # Another fit is in today's dtype.
        today = X.astype(np.float32 if double else np.float64)
        new = svi.run(KEY, 3, today, Y, inducing=today[:3], **QUIET)
        assert (new.losses.dtype == np.float64) != double
    np.testing.assert_allclose(new.losses[-1], result.losses[-1], rtol=1e-4)
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if double else {"rtol": 1e-4, "atol": 1e-5}
    for one, other in zip(found, [*expected * 2, expected[0]], strict=True):
        leaves = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
        for new, old in leaves:
            assert new.dtype == old.dtype
            np.testing.assert_allclose(new, old, **tolerance)
