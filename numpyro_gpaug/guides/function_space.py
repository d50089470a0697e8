# SPDX-License-Identifier: Apache-2.0
"""A guide that is a Gaussian measure on functions: any mean and any covariance."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpyro
from jax import Array, random
from numpyro import handlers
from numpyro.infer.autoguide import AutoDelta

from numpyro_gpaug.gp.conditional import Conditional, FunctionDraw
from numpyro_gpaug.gp.kernels import as_kernel
from numpyro_gpaug.gp.process import GaussianProcess
from numpyro_gpaug.gp.projection import latent_first, lead, residual_variance
from numpyro_gpaug.guides.base import ProcessGuide
from numpyro_gpaug.guides.function_posterior import (
    Fit,
    GaussianMeasure,
    InducingPosterior,
    SparseKernel,
)
from numpyro_gpaug.math.linalg import precise, safe_sqrt, solve_lower
from numpyro_gpaug.math.whitening import cholesky_of_sums
from numpyro_gpaug.model.arguments import Model, Values
from numpyro_gpaug.model.latents import Structure
from numpyro_gpaug.model.structure import Block, fill
from numpyro_gpaug.model.view import ModelView


class AutoFunctionSpaceGP(ProcessGuide):
    r"""A Gaussian measure :math:`Q = N(m_Q, r)` on the function values of a model's
    Gaussian process, and a NumPyro autoguide on all other latents.

    The mean may be any function, such as a neural network. Such a Q need not have a
    density with respect to the prior, so there is no evidence lower bound. Fit it with
    :class:`~numpyro_gpaug.TraceWasserstein_ELBO` and :class:`numpyro.infer.SVI`, and
    predict with ``Posterior.from_guide(model, guide, params, X, y)``. Reference: Wild,
    Hu and Sejdinovic (2022), *Generalized variational inference in function spaces*.

    The guide is a function of its params alone: the params of ``mean`` and ``kernel``
    and, with the default kernel, ``"{name}.v_auto_tril"``. A draw has the function
    values as the site ``name``. Given the values at the inducing inputs, other function
    values are drawn independently, with the right marginals.

    :param model: a NumPyro model with one ``GaussianProcess``.
    :param mean: :math:`m_Q`, a function of the inputs X (N, D) that returns (N,), or
        (N, C) for a process with ``num_latents=C``. It may call :func:`numpyro.param`
        and NumPyro's module functions (``numpyro.contrib.module.eqx_module``,
        ``nnx_module``, ``flax_module``), without mutable state. It receives only X, and
        the mean of the prior is not added.
    :param kernel: :math:`r`: a kernel (``k(X, Z)`` and ``k(X)``, with a leading axis
        for one per latent); or a function without arguments that returns one, and may
        call ``numpyro.param``; or, by default, the covariance of a sparse posterior
        :math:`k(x, x') - k_Z(x)^\top K_{ZZ}^{-1} k_Z(x')`
        :math:`+\, k_Z(x)^\top \Sigma k_Z(x')` of the prior's kernel k and inducing
        inputs Z, one :math:`\Sigma = L^{-\top} S L^{-1}` per latent with
        :math:`K_{ZZ} = L L^\top` and :math:`S = T T^\top` for the lower triangular
        param T, which starts at the identity, where r is k.
    :param other: class of the autoguide for all other latents; see
        :class:`~numpyro_gpaug.AutoSparseGP`.
    :raises ValueError: when called, for a model with no or several Gaussian processes,
        and for a mean or a kernel of the wrong shape.
    :raises TypeError: for a ``mean`` that cannot be called.

    **Example**

    >>> import jax, numpyro, optax, jax.numpy as jnp, numpyro.distributions as dist
    >>> import numpyro_gpaug as gpaug
    >>> def model(X, y=None):
    ...     gp = gpaug.GaussianProcess("f", gpaug.kernels.Matern32(), jnp.eye(3)[:, :1])
    ...     with numpyro.plate("data", X.shape[0]):
    ...         numpyro.sample("y", dist.Normal(gp(X), 0.1), obs=y)
    >>> def mean(X):
    ...     return X @ numpyro.param("slope", jnp.zeros(X.shape[1]))
    >>> guide = gpaug.AutoFunctionSpaceGP(model, mean)
    >>> X = jnp.linspace(-1, 1, 9)[:, None]
    >>> loss = gpaug.TraceWasserstein_ELBO()
    >>> svi = numpyro.infer.SVI(model, guide, optax.adam(0.1), loss)
    >>> result = svi.run(jax.random.key(0), 100, X, 2 * X[:, 0], progress_bar=False)
    >>> print(result.params["slope"].round(1))
    [2.]
    """

    def __init__(
        self,
        model: Model,
        mean: Callable[[Array], Array],
        kernel: Any = None,
        other: Callable[..., Any] = AutoDelta,
    ) -> None:
        if not callable(mean):
            raise TypeError(
                f"mean is a {type(mean).__name__}. Pass a function of the inputs"
            )
        super().__init__(model, other)
        self.function_posterior: FunctionSpacePosterior = FunctionSpacePosterior(
            mean, kernel
        )

    def read(self, model: Model, *args: Any, **kwargs: Any) -> Structure:
        structure = super().read(model, *args, **kwargs)
        processes = structure.processes
        if len(processes) != 1:
            raise ValueError(
                "AutoFunctionSpaceGP is for a model with one GaussianProcess (several "
                f"outputs: num_latents=C); this one has {[b.name for b in processes]}"
            )
        weights = tuple(b.site for b in structure.weights)
        return replace(structure, blocks=processes, others=structure.others + weights)

    @precise
    def __call__(self, *args: Any, **kwargs: Any) -> Values:
        """Draw every latent.

        :return: values by site name, including function values.
        """
        self.begin(*args, **kwargs)
        values = self.draw_others(*args, **kwargs)
        (block,) = self.structure.blocks
        conditional = self._conditional(block, values, args, kwargs)
        params = self.function_posterior.declare(conditional, block)
        measure = self.function_posterior.measure(conditional, Fit(params, {}), block)
        f = _draw(conditional, measure)
        if numpyro.get_mask() is False:
            # Predictive substitutes only sample sites of the model, such as the
            # inducing vector. No inducing vector gives these function values.
            numpyro.deterministic(block.site, FunctionDraw(f))
        values[block.name] = numpyro.deterministic(block.name, f)
        return values

    def _conditional(
        self, block: Block, values: Values, args: Any, kwargs: Any
    ) -> Conditional:
        """Return the process at the inputs of this run of the model."""
        trace = self.flat_trace(values, args, kwargs)
        plates = [s for s in trace.values() if s["type"] == "plate"]
        drawn = [s["name"] for s in plates if s["value"].shape[0] < s["args"][0]]
        if drawn and numpyro.get_mask() is False:
            raise ValueError(
                f"plates {drawn} draw a batch, and Predictive would draw different "
                "ones for guide and model. Predict with Posterior.from_guide"
            )
        return trace[block.name]["fn"]

    def median(self, params: Values) -> Values:
        """Return posterior medians of the latents of the other autoguide. Medians of
        function values depend on the inputs: use ``Posterior.predict_f``.

        :param params: the guide's params.
        :return: values by site name.
        """
        return self.other_median(params)


class FunctionSpacePosterior:
    """Function values under a mean and a covariance function with params.

    :param mean: see :class:`AutoFunctionSpaceGP`.
    :param kernel: likewise.
    """

    def __init__(self, mean: Callable[[Array], Array], kernel: Any) -> None:
        self._mean = mean
        is_builder = callable(kernel) and not inspect.signature(kernel).parameters
        if kernel is not None and not is_builder:
            kernel = as_kernel(kernel)
        self._kernel = kernel if is_builder or kernel is None else lambda: kernel

    def factors(self, view: ModelView) -> dict[str, Any]:
        """Return whiteners of the inducing values, if the kernel uses them."""
        return InducingPosterior().factors(view) if self._kernel is None else {}

    def marks(self, view: ModelView) -> dict[str, Array]:
        """Return checksums of the prior, if the kernel uses it."""
        return view.marks() if self._kernel is None else {}

    def marginals(self, view: ModelView, fit: Fit) -> dict[str, Any]:
        """:class:`~numpyro_gpaug.gaussians.dense.Marginals` by block name."""
        (block,) = view.structure.blocks
        f = view.conditional(block)
        return {block.name: self.measure(f, fit, block).marginals(f)}

    def measure(
        self, conditional: Conditional, fit: Fit, block: Block
    ) -> GaussianMeasure:
        """Return mean and covariance functions at the params of ``fit``."""
        gp, values, dtype = conditional.gp, fit.values, conditional.dtype

        def mean(X: Array) -> Array:
            value = _pinned(self._mean, values, "mean")(X)
            return latent_first(_checked_mean(value, X, gp, dtype))

        if self._kernel is None:
            tril = jnp.tril(values[_tril_name(block)])
            known = InducingPosterior().known(gp, fit, block)
            return GaussianMeasure(mean, SparseKernel(gp, known, lead(tril.mT, 2)))
        kernel = as_kernel(_pinned(self._kernel, values, "kernel")())

        def covariance(X: Array, *Z: Array) -> Array:
            return _checked_covariance(kernel(X, *Z), gp, X, *Z)

        return GaussianMeasure(mean, covariance)

    def declare(self, conditional: Conditional, block: Block) -> Values:
        """Declare the params of mean and kernel, inside a guide.

        :return: their values by name.
        """
        with handlers.trace() as trace:
            self._mean(conditional.X)
            if not trace:
                warnings.warn(
                    "the mean of AutoFunctionSpaceGP has no params, so nothing of "
                    "it is learnt. Call a network through numpyro.contrib.module "
                    "(eqx_module, nnx_module, flax_module), or numpyro.param, in it",
                    stacklevel=2,
                )
            if self._kernel is None:
                eye = jnp.eye(block.shape[-1], dtype=block.dtype)
                shape = block.shape + block.shape[-1:]
                numpyro.param(_tril_name(block), jnp.broadcast_to(eye, shape))
            else:
                self._kernel()
        return {k: site["value"] for k, site in trace.items()}


def _tril_name(block: Block) -> str:
    return f"{block.site}_auto_tril"


def _pinned(fn: Callable[..., Any], values: Values, name: str) -> Callable[..., Any]:
    """Return ``fn`` at the given params, independent of the handlers around its
    calls."""

    def call(*args: Any) -> Any:
        with handlers.block(), handlers.trace() as trace:
            result = fill(handlers.seed(fn, 0), values)(*args)
        for site in trace.values():
            if site["type"] != "param":
                raise ValueError(
                    f"{name} makes the {site['type']} site {site['name']!r}. It may "
                    "have params, but neither random nor mutable state"
                )
            if site["name"] not in values:
                raise ValueError(
                    f"{name} needs the param {site['name']!r}, which is not among "
                    f"the params of the fit: {sorted(values)}"
                )
        return result

    return call


def _checked_mean(value: Any, X: Array, gp: GaussianProcess, dtype: Any) -> Array:
    width = () if gp.num_latents is None else (gp.num_latents,)
    expected = (X.shape[0], *width)
    if jnp.shape(value) != expected:
        hint = "one value per input" if not width else f"a network of width {width[0]}"
        raise ValueError(
            f'mean returned shape {jnp.shape(value)} for GaussianProcess("{gp.name}") '
            f"with num_latents={gp.num_latents} at X of shape {X.shape}; expected "
            f"{expected}: {hint}"
        )
    return jnp.asarray(value, dtype)


def _checked_covariance(value: Array, gp: GaussianProcess, *inputs: Array) -> Array:
    rows = tuple(X.shape[0] for X in inputs)
    latents = 1 if gp.num_latents is None else gp.num_latents
    value = lead(value, len(rows))
    if value.shape not in ((1, *rows), (latents, *rows)):
        raise ValueError(
            f'kernel returned shape {value.shape} for GaussianProcess("{gp.name}") '
            f"with num_latents={gp.num_latents}; expected {rows} or, for a kernel per "
            f"latent, {(latents, *rows)}"
        )
    return value


def _draw(conditional: Conditional, measure: GaussianMeasure) -> Array:
    """Draw function values in the shape that the model expects: jointly at the inducing
    inputs, and then independently given these, as the process itself does."""
    Z = conditional.gp.inducing
    if Z.ndim == 3:
        Z = Z.reshape(-1, Z.shape[-1])
    scale = lead(conditional.gp.kernel(Z), 1).mean(-1)
    factor = cholesky_of_sums(measure.kernel(Z, Z), scale)
    projection = solve_lower(factor, measure.kernel(Z, conditional.X))
    residual = residual_variance(measure.kernel(conditional.X), projection)
    mean = measure.mean(conditional.X)
    joint, alone = random.split(numpyro.prng_key())
    shared = random.normal(joint, (mean.shape[0], Z.shape[0]), conditional.dtype)
    noise = random.normal(alone, mean.shape, conditional.dtype)
    values = mean + jnp.einsum("...mn,...m->...n", projection, shared)
    return conditional.outputs(conditional.select(values + safe_sqrt(residual) * noise))
