# SPDX-License-Identifier: Apache-2.0
"""Gaussian processes as ordinary sites of a NumPyro model."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import Array

from numpyro_gpaug._display import Displayed, Rows, brief, name_of
from numpyro_gpaug._numpyro import (
    current_residual_policy,
    deterministic_site,
    residual_policy,
)
from numpyro_gpaug.gaussians.blocks import AffineBlocks, affine_blocks
from numpyro_gpaug.gaussians.dense import AffineMap
from numpyro_gpaug.gp.checks import as_inputs, as_loadings, columns
from numpyro_gpaug.gp.kernels import as_kernel
from numpyro_gpaug.gp.outputs import Outputs
from numpyro_gpaug.gp.projection import (
    Projected,
    Whitener,
    latent_first,
    lead,
    project,
    whitener,
)
from numpyro_gpaug.math.blocks import rows_of_blocks
from numpyro_gpaug.math.linalg import cholesky, precise, safe_sqrt, with_jitter

_POLICIES = ("mean", "noise", "site")


class FunctionDraw(NamedTuple):
    """The value that a guide gives an inducing vector when it draws the function
    itself.

    :param values: function values at the inputs at which the model calls the process.
    """

    values: Array


class Conditional:
    """Function values at ``X`` given the inducing values; everything is computed
    lazily.

    It is the ``fn`` of the deterministic site that a call of a :class:`GaussianProcess`
    makes.

    :param gp: the process.
    :param X: inputs, (N, D).
    :param latents: indices of the latents (of the outputs, if the process has
        loadings), or ``None`` for all.
    """

    def __init__(self, gp: GaussianProcess, X: Array, latents: Array | None) -> None:
        self.gp = gp
        self.X = X
        self.latents = latents

    @cached_property
    def projection(self) -> Array:
        """``A = L^-1 K_ZX``, (1 or C, M, N)."""
        return self._projected.projection

    @cached_property
    def prior_variance(self) -> Array:
        """``k(x, x)``, (1 or C, N)."""
        return self.select(lead(self.gp.kernel(self.X), 1))

    @cached_property
    def residual(self) -> Array:
        """Variance of f given v, (1 or C, N)."""
        return self._projected.residual

    @property
    def residual_covariance(self) -> Array:
        """Covariance of f given v, (1 or C, N, N)."""
        prior = self.select(lead(self.gp.kernel(self.X, self.X), 2))
        return prior - jnp.swapaxes(self.projection, -1, -2) @ self.projection

    @cached_property
    def _projected(self) -> Projected:
        return self._project(self.gp.whitener, self.X)

    def _project(self, whitener: Whitener, X: Array) -> Projected:
        """Return the selected latents at some inputs."""
        return Projected(*map(self.select, project(self.gp, whitener, X)))

    @cached_property
    def outputs(self) -> Outputs:
        """The map from latents to function values."""
        gp, size = self.gp, self.X.shape[0]
        return Outputs(gp.loadings, gp.bias, self.latents, gp.num_latents, size)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the function values: (N,), (N, C) or (N, L)."""
        return self.outputs.shape

    @property
    def dtype(self) -> np.dtype:
        """Dtype of the function values."""
        return jnp.result_type(self.X.dtype, self.gp.inducing.dtype)

    @cached_property
    def mean(self) -> Array:
        """The mean function of the latents at ``X``, (latents, N)."""
        mean, outputs = self.gp.mean, self.outputs
        value = jnp.asarray(mean(self.X) if callable(mean) else mean, self.dtype)
        per_latent = value.ndim == 2 or (value.ndim == 1 and not callable(mean))
        if per_latent and outputs.selected is not None:
            value = value[..., jnp.asarray(outputs.selected)]
        if not per_latent and value.ndim and len(outputs.latent_shape) == 2:
            value = value[:, None]
        return latent_first(jnp.broadcast_to(value, outputs.latent_shape))

    @property
    def affine_map(self) -> AffineMap:
        """The affine map from the inducing vector to the latents' values at ``X``."""
        return self.affine_map_through(self.gp.whitener)

    def affine_map_through(self, whitener: Whitener) -> AffineMap:
        """Compute :attr:`affine_map` with a whitener that was computed before."""
        return AffineMap(self.mean, *self._project(whitener, self.X))

    def map_through(self, whitener: Whitener) -> AffineMap | AffineBlocks:
        """Compute :meth:`affine_map_through`, in blocks if there are very many rows."""
        mean, num = self.mean, whitener.inverse.shape[-1]
        # Matrices of the inducing inputs are whole, and these may be all of the data.
        size = rows_of_blocks(len(self.X), len(mean) * num, self.dtype, least=num)
        if size is None:
            return self.affine_map_through(whitener)

        def of_rows(rows: tuple[Array, ...]) -> AffineMap:
            X, mean = rows
            return AffineMap(mean.T, *self._project(whitener, X))

        return affine_blocks(of_rows, (self.X, mean.T), size)

    @precise
    def moved(self, v: Array) -> Array:
        """Return the change of the function values, of :attr:`shape`, for a change of
        the inducing values.

        :param v: the change, (C, M), with an axis over latents even for a single one.
        """
        shift = jnp.einsum("...mn,...m->...n", self.projection, self.select(v))
        return self.outputs.shifts(shift)

    @precise
    def values(self, v: Array, eps: Array | None = None) -> Array:
        """Compute function values from whitened inducing values and residual noise.

        :param v: whitened inducing values, (M,) or (C, M).
        :param eps: standard normal numbers, one per latent and row, or ``None`` for no
            residual.
        """
        # NumPyro draws standard normals in JAX's default dtype, whatever their loc's.
        v = jnp.asarray(v, self.dtype)
        v = self.select(v) if self.gp.num_latents is not None else v[None]
        values = self.mean + jnp.einsum("...mn,...m->...n", self.projection, v)
        if eps is not None:
            # The residual is 0 where X is Z.
            values = values + safe_sqrt(self.residual) * latent_first(eps)
        return self.outputs(values)

    def __call__(self) -> Array:
        if isinstance(self.gp.v, FunctionDraw):
            return self.gp.v.values
        policy = current_residual_policy()
        eps = None
        if policy == "noise":
            key = numpyro.prng_key()
            eps = jax.random.normal(key, self.outputs.latent_shape, self.dtype)
        elif policy == "site":
            shape = self.outputs.latent_shape
            standard = dist.Normal(jnp.zeros(shape, self.dtype), 1)
            standard, name = standard.to_event(len(shape) - 1), self.gp.name
            misplaced = ValueError(
                f'GaussianProcess("{name}"): its residual of with_residual(model, '
                f'"site") has shape {shape}, and the plates around the call are not '
                "those of the rows alone: call it before them, f = gp(X)"
            )
            try:
                eps = numpyro.sample(f"{name}.eps", standard)
            except ValueError as error:  # shapes that do not go together
                raise misplaced from error
            if eps.shape != shape:
                raise misplaced
        return self.values(self.gp.v, eps)

    def select(self, per_latent: Array) -> Array:
        """The selected latents of an array with a leading axis 1 or C."""
        return self.outputs.select(per_latent)


class GaussianProcess(Displayed):
    r"""A (sparse) Gaussian process with a whitened inducing vector.

    Construct it in a model, outside data plates, and call it at inputs, inside them.
    The constructor makes one stock sample site ``"{name}.v"``, a standard normal with
    event shape (M,) or (C, M). The inducing values are :math:`u = L v` with :math:`L
    L^\top = K_{ZZ}`, up to rounding, or :math:`K_{ZZ} + \text{jitter}`. A call makes a
    deterministic site ``name``, :math:`f = m(x) + A^\top v + \sqrt{r}\,\epsilon`, with
    :math:`A = L^{-1} K_{ZX}` and :math:`r_i = k(x_i, x_i) - |A_i|^2`.

    The residual noise is added only in predictions and in stock evidence lower bounds.
    Log densities (:class:`~numpyro.infer.NUTS`, :func:`~numpyro.infer.log_likelihood`)
    use its mean 0, so MCMC with fewer inducing inputs than data targets the projected
    process. See :func:`with_residual`.

    :param name: name of the site of function values.
    :param kernel: any :class:`numpyro_gpaug.kernels.Kernel`, tinygp kernel, or plain
        function ``k(X, Z) -> (N, M)``. Hyperparameters with a leading axis C make one
        kernel per latent.
    :param inducing: inducing inputs Z, (M, D), or (C, M, D) for a set per latent. The
        training inputs themselves give the full process.
    :param mean: a number, an array (C,), or a function of the inputs that returns (N,)
        or (N, C).
    :param num_latents: number C of independent latents; ``None`` for a single one
        without a latent axis.
    :param loadings: :math:`\Phi`, (K, P): a semiparametric latent-factor model, in
        which K outputs :math:`f = \Phi h + b` share P independent latents h. Kernel,
        ``inducing`` and ``mean`` refer to h. Loadings are usually a
        :func:`numpyro.param`, started at random or from data (not at zero, where all
        gradients vanish). They need likelihoods that depend on one output at a time.
        The outputs at one input are correlated; the bound does not depend on that, and
        densities of predictions (a sum over outputs) ignore it.
    :param bias: b, (K,), with ``loadings``; zero by default.
    :param jitter: added to the diagonal of ``K_ZZ``, relative to its mean; 0 is
        allowed. The default is the rounding error of the elements of ``K_ZZ``, or of
        their deviations from a constant if the kernel states these, doubled until the
        matrix factorises. L is corrected for nearly all of its effect
        (``docs/theory/rounding.md``). NUTS on the model needs 1e-5 in float32 with a
        smooth kernel: with the smallest jitter, rounding makes the density too rough
        far from the data.
    :raises ValueError: inside a plate, for inducing inputs that are not two- or
        three-dimensional (one-dimensional for scalar inputs) or are empty, and for
        loadings or a bias of another shape.

    **Example**

    >>> import jax, numpyro, jax.numpy as jnp, numpyro.distributions as dist
    >>> import numpyro_gpaug as gpaug
    >>> def model(X, y=None):
    ...     kernel = gpaug.kernels.SquaredExponential(lengthscale=0.5)
    ...     Z = jnp.linspace(0, 1, 5)[:, None]
    ...     gp = gpaug.GaussianProcess("f", kernel, inducing=Z)
    ...     with numpyro.plate("data", X.shape[0]):
    ...         numpyro.sample("y", dist.Bernoulli(logits=gp(X)), obs=y)
    >>> from numpyro.infer import Predictive
    >>> prior = Predictive(model, num_samples=3)(jax.random.key(0), jnp.zeros((7, 1)))
    >>> prior["f"].shape, prior["f.v"].shape
    ((3, 7), (3, 5))
    """

    def __init__(
        self,
        name: str,
        kernel: Any,
        inducing: Array,
        mean: float | Array | Callable[[Array], Array] = 0.0,
        num_latents: int | None = None,
        loadings: Array | None = None,
        bias: Array | None = None,
        jitter: float | None = None,
    ) -> None:
        self.name = name
        self.kernel = as_kernel(kernel)
        if inducing is None:
            raise ValueError(
                f'GaussianProcess("{name}") has inducing=None. Pass the inducing '
                "inputs, or the training inputs for the full process"
            )
        self.inducing = as_inputs(inducing, "inducing")
        self.mean = mean
        self.loadings, self.bias = as_loadings(loadings, bias, num_latents)
        if self.loadings is not None:
            num_latents = self.loadings.shape[1]
        self.num_latents = num_latents
        if self.inducing.ndim == 3 and self.inducing.shape[0] != num_latents:
            raise ValueError(
                f"inducing has shape {self.inducing.shape}, one set per latent, but "
                f"num_latents is {num_latents}"
            )
        num_inducing = self.inducing.shape[-2 if self.inducing.ndim > 1 else 0]
        self.jitter = jitter
        shape = (num_inducing,) if num_latents is None else (num_latents, num_inducing)
        standard = dist.Normal(jnp.zeros(shape, self.inducing.dtype), 1)
        self.v = numpyro.sample(
            f"{name}.v", standard.to_event(len(shape)), infer={"process": name}
        )
        if not isinstance(self.v, FunctionDraw) and self.v.shape != shape:
            raise ValueError(
                f'GaussianProcess("{name}"): its inducing values have shape '
                f"{self.v.shape}, but {num_inducing} inducing inputs call for {shape}. "
                "Either it is constructed inside a plate (construct it before the "
                "plate, call it inside), or the inducing inputs changed in number "
                "since the guide was set up or the fit made (pass them as an argument "
                "or a param, not as rows of the data; for another number make a new "
                "guide)."
            )

    @cached_property
    @precise
    def factor(self) -> Array:
        """The factor L in ``u = L v`` of inducing values u, (1 or C, M, M): lower
        triangular if a jitter was given."""
        if self.jitter is None:
            return self._gram @ self.inverse_factor.mT
        return cholesky(with_jitter(self._gram, self.jitter))

    @cached_property
    def inverse_factor(self) -> Array:
        """The matrix that whitens ``K_ZZ``, (1 or C, M, M): ``L^-1`` of its lower
        factor if a jitter was given."""
        return self.whitener.inverse

    @cached_property
    def whitener(self) -> Whitener:
        """The whitener with which function values are projected."""
        return whitener(self)

    @cached_property
    def _gram(self) -> Array:
        return lead(self.kernel(self.inducing, self.inducing), 2)

    def __jax_array__(self) -> NoReturn:
        raise TypeError(
            f'GaussianProcess("{self.name}") is used as an array. Its values at the '
            "inputs are gp(X)"
        )

    def __call__(self, X: Array, latents: Array | None = None) -> Array:
        """Return function values at ``X``.

        :param X: inputs, (N, D).
        :param latents: indices of a subset of the C latents; all by default. For a
            process with loadings, indices of outputs: (L,), or (N, L) if they differ
            between rows.
        :return: function values, (N,), (N, C) or (N, L).
        :raises ValueError: if the columns of ``X`` and of the inducing inputs differ,
            or for ``latents`` of another shape.
        """
        X = as_inputs(X, "X")
        if X.ndim > 2 or columns(X) != columns(self.inducing):
            raise ValueError(
                f'GaussianProcess("{self.name}") was called at X of shape {X.shape}; '
                f"its inducing inputs have shape {self.inducing.shape}: expected (N, "
                f"{columns(self.inducing)})"
            )
        if latents is not None:
            self._check_latents(X, latents)
        conditional = Conditional(self, X, latents)
        if callable(self.mean):
            # Here, under the handlers of the model: a mean function may have params.
            _ = conditional.mean
        return deterministic_site(self.name, conditional)

    def _display(self) -> tuple[str, Rows]:
        mean = name_of(self.mean) if callable(self.mean) else brief(self.mean)
        rows = [
            ("kernel", repr(self.kernel)),
            ("mean", mean),
            ("inducing", f"inputs {self.inducing.shape}"),
        ]
        if self.num_latents is not None:
            rows.append(("latents", str(self.num_latents)))
        if self.loadings is not None:
            rows.append(("outputs", f"{len(self.loadings)}, by loadings"))
        return f'GaussianProcess("{self.name}")', rows

    def _check_latents(self, X: Array, latents: Array) -> None:
        if self.num_latents is None:
            raise ValueError("latents= needs a GaussianProcess with num_latents=C")
        shape = np.shape(latents)
        by_row = len(shape) == 2 and shape[0] == X.shape[0]
        if len(shape) != 1 and not (by_row and self.loadings is not None):
            raise ValueError(
                f'GaussianProcess("{self.name}") was called with latents of shape '
                f"{shape} at X of shape {X.shape}. Pass (L,), or, with loadings, "
                f"({X.shape[0]}, L)"
            )


def with_residual(model: Callable, policy: str) -> Callable:
    """Return ``model`` with a fixed policy for the residual of its Gaussian processes.

    :param model: a NumPyro model.
    :param policy: ``"site"`` makes the residual noise a whitened latent site
        ``"{name}.eps"``, so that MCMC with inducing inputs samples the process with
        independent residuals; ``"noise"`` always adds new noise; ``"mean"`` never does.
    :return: a model with the same arguments.
    :raises ValueError: for any other policy.
    """
    if policy not in _POLICIES:
        raise ValueError(f"policy must be one of {_POLICIES}, got {policy!r}")
    return residual_policy(model, policy)
