# SPDX-License-Identifier: Apache-2.0
"""Errors of the package. Each states what was found and what to do instead."""

from __future__ import annotations


class NotConjugateError(ValueError):
    """The model does not admit the closed-form route that was requested."""


class UnknownLikelihoodError(NotConjugateError):
    """No augmentation or expectation is registered for a distribution class."""

    def __init__(self, cls: type) -> None:
        super().__init__(
            f"no closed-form expectation is registered for {cls.__name__}. "
            "Register one with numpyro_gpaug.register_expectation, or fit with "
            "numpyro.infer.SVI and TraceAnalytic_ELBO(), which uses quadrature "
            "for elementwise likelihoods."
        )


class CholeskyError(FloatingPointError):
    """A Cholesky factorisation failed (NaN); the message names the likely cause."""


class ArchiveError(ValueError):
    """The file does not contain a posterior of the given model: it has another format,
    is truncated or damaged, or was saved from a fit of another model."""


class ModelChangedError(RuntimeError):
    """Something that the model reads besides its arguments (a global, a variable of the
    function that made it) has changed since the fit; the message names it."""
