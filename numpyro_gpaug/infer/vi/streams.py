# SPDX-License-Identifier: Apache-2.0
"""Data that arrive in batches and are not kept: the last posterior is the prior."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_gpaug._numpyro import one_thread
from numpyro_gpaug.guides.continued import ContinuedGP, earlier_params
from numpyro_gpaug.infer.vi.conjugate import ConjugateSVI
from numpyro_gpaug.math.affine import Prior
from numpyro_gpaug.math.linalg import Moments, NaturalGaussian, inverse_cholesky
from numpyro_gpaug.model.latents import JointStructure
from numpyro_gpaug.predict.posterior import Posterior

# Steps of one update; it stops earlier, once the bound rises no more.
STEPS = 50
SETTLED = 1e-3


class Stream:
    r"""A posterior that goes on learning from batches of data, which need not be kept.

    The posterior so far, :math:`q_{t-1}(v)` of the inducing values, is the prior of the
    next batch: :math:`q_t(v) \propto q_{t-1}(v) \prod_i t_i(v)` with the Gaussian
    factors :math:`t_i` of its data, found by the same closed-form updates. Inducing
    inputs and hyperparameters stay as they are. With a Normal likelihood the result
    does not depend on how data come in batches, and is the posterior of all of them to
    rounding; with others, factors of old data are not improved any more.

    A forgetting factor :math:`\gamma < 1` takes the posterior back towards the prior
    before each batch, :math:`q_{t-1}^\gamma p^{1 - \gamma}`: data of :math:`k` batches
    ago count :math:`\gamma^k`, for what drifts.

    :param posterior: where to start: fitted to first data with
        :class:`~numpyro_gpaug.AutoSparseGP` of natural parameters, or loaded.
    :param forgetting: :math:`\gamma`, in (0, 1]; 1 forgets nothing.
    :raises NotImplementedError: for a joint posterior
        (:class:`~numpyro_gpaug.AutoLatentGaussian`), and for one that averages over
        hyperparameters.
    :raises ValueError: for a forgetting factor outside of (0, 1].

    **Example**

    >>> import jax, numpyro, jax.numpy as jnp, numpyro.distributions as dist
    >>> import numpyro_gpaug as gpaug
    >>> def model(X, y=None, *, inducing):
    ...     gp = gpaug.GaussianProcess("f", gpaug.kernels.Matern52(1.0), inducing)
    ...     with numpyro.plate("data", X.shape[0]):
    ...         numpyro.sample("y", dist.Bernoulli(logits=gp(X)), obs=y)
    >>> X = jnp.linspace(-3, 3, 20)[:, None]
    >>> y, even = (X[:, 0] > 0).astype(int), slice(None, None, 2)
    >>> svi = gpaug.ConjugateSVI(model, gpaug.AutoSparseGP(model), None)
    >>> key, how = jax.random.key(0), dict(inducing=X[::4], progress_bar=False)
    >>> first = svi.posterior(svi.run(key, 20, X[even], y[even], **how))
    >>> stream = gpaug.Stream(first)
    >>> print(stream.update(X[1::2], y[1::2]).predict_y(X[:1]).probs.round(1))
    [0.3]

    Reference: Bui, Nguyen and Turner (2017), Streaming sparse Gaussian process
    approximations, with inducing inputs and hyperparameters at rest.
    """

    def __init__(self, posterior: Posterior, forgetting: float = 1.0) -> None:
        if not 0 < forgetting <= 1:
            raise ValueError(f"forgetting must be in (0, 1], got {forgetting}")
        if isinstance(posterior.structure, JointStructure):
            raise NotImplementedError(
                "a stream goes on from the posterior of an AutoSparseGP; of an "
                "AutoLatentGaussian fit all data again"
            )
        if posterior.is_mixture:
            raise NotImplementedError(
                "a stream goes on from one value of the hyperparameters, and this "
                "posterior averages over several (other=AutoNormal, NestedVI)"
            )
        self.posterior, self.forgetting = posterior, forgetting
        self.losses: list[float] = []
        self._guide = ContinuedGP(posterior.model)
        self._svi = ConjugateSVI(posterior.model, self._guide, None)
        self._blended: Any = one_thread(jax.jit(_blended))
        self._moments: Any = one_thread(jax.jit(self._guide.moments))

    def update(self, *args: Any, **kwargs: Any) -> Posterior:
        """Learns from a batch.

        :param args: the model's arguments at it, observations included. Batches of the
            same shape share a program.
        :param kwargs: its keyword arguments, where they differ from the fit's.
        :return: the posterior of all data so far, also ``stream.posterior``. Minus its
            bound on the log density of the batch given those before (and of the prior
            of hyperparameters that rest) is the last of ``stream.losses``.
        :raises ValueError: for what a fit refuses.
        """
        args, kwargs = self.posterior.arguments_at(*args, **kwargs)
        guide = self._guide
        guide.setup(*args, **kwargs)
        values, moments = self.posterior.values, self.posterior.moments
        blocks = guide.structure.blocks
        if self.forgetting < 1:
            moments = self._blended(moments, guide.priors, self.forgetting)
        params = {k: v for k, v in values.items() if k in guide.constraints}
        for name in guide.structure.others:
            params[f"{name}_auto_loc"] = values[name]
        for block in blocks:
            params |= earlier_params(block, moments[block.name])
        result = self._svi.run(
            jax.random.key(0), STEPS, *args, tol=SETTLED, progress_bar=False,
            init_params=params, **kwargs,
        )  # fmt: skip
        _, own = guide.split_params(result.params)
        self.losses.append(float(np.asarray(result.losses[-1])))
        self.posterior = self.posterior.moved(self._moments(own))
        return self.posterior


def _blended(
    moments: dict[str, Moments], priors: dict[str, Prior], share: Any
) -> dict[str, Moments]:
    """``q^share p^(1 - share)`` of every block."""

    def of_block(q: Moments, prior: Prior) -> Moments:
        white = inverse_cholesky(q.whitener.mT @ q.whitener)
        precision = white.mT @ white
        potential = jnp.einsum("...ij,...j->...i", precision, q.mean)
        pairs = zip((potential, precision), prior.natural, strict=True)
        blended = (share * x + (1 - share) * p for x, p in pairs)
        return NaturalGaussian(*blended).moments()

    return {name: of_block(q, priors[name]) for name, q in moments.items()}
