# SPDX-License-Identifier: Apache-2.0
"""The package's own errors; each says what was found and what to do instead."""

from __future__ import annotations


class NotConjugateError(ValueError):
    """A closed-form route was asked of a model that does not admit it."""


class UnknownLikelihoodError(NotConjugateError):
    """No augmentation or expectation is registered for a distribution class."""

    def __init__(self, cls: type) -> None:
        super().__init__(
            f"no closed-form expectation is registered for {cls.__name__}. "
            "Register one with numpyro_gpaug.register_expectation, or fit with "
            "numpyro.infer.SVI and TraceAnalytic_ELBO(), which falls to quadrature "
            "for elementwise likelihoods."
        )


class CholeskyError(FloatingPointError):
    """A Cholesky factorisation failed (NaN); the message names the likely cause."""


class ArchiveError(ValueError):
    """A file does not hold a posterior of the model given: it is foreign, truncated or
    damaged, or was saved from a fit of another model."""


class ModelChangedError(RuntimeError):
    """What a model reads besides its arguments (a global, a variable of the function
    that made it) has changed since the fit that is asked; the message names it."""
