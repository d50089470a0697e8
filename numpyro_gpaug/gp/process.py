# SPDX-License-Identifier: Apache-2.0
"""Gaussian processes as ordinary sites of a NumPyro model."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any, NoReturn

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import Array

from numpyro_gpaug._display import Displayed, Rows, brief, name_of
from numpyro_gpaug._numpyro import deterministic_site, handlers_around, residual_policy
from numpyro_gpaug.gp.conditional import Conditional, FunctionDraw
from numpyro_gpaug.gp.kernels import as_kernel
from numpyro_gpaug.gp.markov import conditional as markov_conditional
from numpyro_gpaug.gp.projection import Whitener, lead, whitener
from numpyro_gpaug.math.linalg import cholesky, precise, with_jitter

_POLICIES = ("mean", "noise", "site")


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
        training inputs themselves give the full process. Optional with ``markov``.
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
    :param markov: whether the process, of one input such as time, is a chain of states
        in place of inducing values. It is exact, in work linear in the number of times,
        which may be irregular, repeated, and in any order.
        :mod:`numpyro_gpaug.kernels` lists the kernels that have states. The call makes
        the sites, outside of any plates around it, and of masks and scales that are not
        around the constructor: standard normal numbers ``"{name}.v"``, (T, R), for the
        states at T times, and ``"{name}.waves"`` for constants and undamped cosines.
        Fits take
        :class:`~numpyro_gpaug.AutoLatentGaussian`. A posterior keeps the times of the
        fit (``"{name}.times"``) and predicts at any others. To predict from draws of
        another sampler, pass the times of the states as ``inducing``.
    :raises ValueError: inside a plate, for inducing inputs that are not two- or
        three-dimensional (one-dimensional for scalar inputs) or are empty, and for
        loadings or a bias of another shape; with ``markov`` for several inputs or
        latents, and at the call for a kernel without states.

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

    A series at irregular times:

    >>> def series(t, y=None):
    ...     kernel = gpaug.kernels.Matern32(2.0) + gpaug.kernels.Cosine(7.0, 0.5)
    ...     f = gpaug.GaussianProcess("f", kernel, markov=True)(t)
    ...     with numpyro.plate("data", len(t)):
    ...         numpyro.sample("y", dist.Normal(f, 0.1), obs=y)
    >>> t = jnp.array([0.0, 0.3, 5.2, 5.2, 9.0])
    >>> prior = Predictive(series, num_samples=3)(jax.random.key(0), t)
    >>> prior["f"].shape, prior["f.v"].shape, prior["f.waves"].shape
    ((3, 5), (3, 5, 2), (3, 2))
    """

    def __init__(
        self,
        name: str,
        kernel: Any,
        inducing: Array | None = None,
        mean: float | Array | Callable[[Array], Array] = 0.0,
        num_latents: int | None = None,
        loadings: Array | None = None,
        bias: Array | None = None,
        jitter: float | None = None,
        *,
        markov: bool = False,
    ) -> None:
        self.name = name
        self.kernel = as_kernel(kernel)
        self.mean, self.markov = mean, markov
        if markov:
            self._start_chain(inducing, num_latents, loadings, bias, jitter)
            return
        if inducing is None:
            raise ValueError(
                f'GaussianProcess("{name}") has inducing=None. Pass the inducing '
                "inputs, or the training inputs for the full process, or markov=True "
                "for a process of one input"
            )
        self.inducing: Any = as_inputs(inducing, "inducing")
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
        self.v: Any = numpyro.sample(
            f"{name}.v", standard.to_event(len(shape)), infer={"process": name}
        )
        if not isinstance(self.v, FunctionDraw) and self.v.shape != shape:
            raise ValueError(
                f'GaussianProcess("{name}"): its inducing values have shape '
                f"{self.v.shape}, but {num_inducing} inducing inputs call for {shape}. "
                "Either it is constructed inside a plate (construct it before the "
                "plate, call it inside), or the inducing inputs changed in number "
                "since the fit (pass them as an argument or a param, not as rows of "
                "the data)."
            )

    def _start_chain(self, inducing: Array | None, *others: Any) -> None:
        """Start a process that is a chain of states; its sites follow at the call."""
        if any(x is not None for x in others):
            raise ValueError(
                f'GaussianProcess("{self.name}", markov=True) has one latent, and no '
                "loadings, bias or jitter. Make a process for every latent"
            )
        self.inducing, self.around = inducing, handlers_around()
        if inducing is not None:
            self.inducing = as_inputs(inducing, "inducing")
            self._check_times(self.inducing, "inducing")
        self.num_latents = self.loadings = self.bias = self.jitter = None
        self.v = None

    def _check_times(self, X: Array, name: str) -> None:
        if X.ndim > 2 or columns(X) != 1:
            raise ValueError(
                f'GaussianProcess("{self.name}", markov=True) needs one input, a time, '
                f"and {name} has shape {X.shape}"
            )

    @cached_property
    @precise
    def factor(self) -> Array:
        """The factor L in ``u = L v`` of inducing values u, (1 or C, M, M): lower
        triangular if a jitter was given."""
        if self.markov:
            # A Markov process has no inducing inputs. Any array that depends on the
            # same arguments will do.
            times = jnp.zeros((1, 1)) if self.inducing is None else self.inducing[:1]
            return lead(self.kernel(times, times), 2)
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
        if latents is not None:
            self._check_latents(X, latents)
        if self.markov:
            self._check_times(X, "X")
            return self._declared(markov_conditional(self, X))
        if X.ndim > 2 or columns(X) != columns(self.inducing):
            raise ValueError(
                f'GaussianProcess("{self.name}") was called at X of shape {X.shape}; '
                f"its inducing inputs have shape {self.inducing.shape}: expected (N, "
                f"{columns(self.inducing)})"
            )
        return self._declared(Conditional(self, X, latents))

    def _declared(self, conditional: Conditional) -> Array:
        if callable(self.mean):
            # Evaluated here, under the handlers of the model, because a mean function
            # may have params.
            _ = conditional.mean
        return deterministic_site(self.name, conditional)

    def _display(self) -> tuple[str, Rows]:
        mean = name_of(self.mean) if callable(self.mean) else brief(self.mean)
        rows = [("kernel", repr(self.kernel)), ("mean", mean)]
        if self.markov:
            rows.append(("states", "a chain along the input"))
        else:
            rows.append(("inducing", f"inputs {self.inducing.shape}"))
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


def as_inputs(X: Array, name: str) -> Array:
    """Return inputs as floats.

    :param X: inputs.
    :param name: the name of the argument.
    :raises ValueError: for an empty array, or another number of axes.
    """
    X = jnp.asarray(X)
    if X.ndim not in (1, 2, 3) or 0 in X.shape:
        raise ValueError(
            f"{name} has shape {X.shape}; expected a non-empty array (rows, columns)"
        )
    return X if jnp.issubdtype(X.dtype, jnp.floating) else X.astype(float)


def as_loadings(
    loadings: Any, bias: Any, num_latents: int | None
) -> tuple[Array | None, Array | None]:
    """Return loadings and bias as arrays, if there are any.

    :param loadings: loadings of outputs on latents.
    :param bias: bias of outputs.
    :param num_latents: the number of latents, if given.
    :raises ValueError: for other shapes, and a bias without loadings.
    """
    if loadings is None:
        if bias is not None:
            raise ValueError("bias= needs loadings=. For a single output pass mean=")
        return None, None
    loadings = jnp.asarray(loadings)
    if loadings.ndim != 2 or num_latents not in (None, loadings.shape[1]):
        raise ValueError(
            f"loadings has shape {loadings.shape}; expected (outputs, latents)"
            + ("" if num_latents is None else f" with num_latents={num_latents}")
        )
    if bias is not None:
        bias = jnp.asarray(bias)
        if bias.shape != loadings.shape[:1]:
            raise ValueError(
                f"bias has shape {bias.shape}; expected one per output, "
                f"{loadings.shape[:1]}"
            )
    return loadings, bias


def columns(X: Array) -> int:
    """Return the number of columns of inputs; one for scalar inputs."""
    return 1 if X.ndim == 1 else X.shape[-1]
