# SPDX-License-Identifier: Apache-2.0
"""References for bounds and expectations of augmented likelihoods."""

from __future__ import annotations

import jax
import numpy as np

from numpyro_gpaug.likelihoods.contract import lookup_augmentation


def sites_without_variance(likelihood, y, f):
    """Return the bound of each datum at latents f without variance, and the potential
    and precision of its factors.

    :param likelihood: a function from logits to an augmented distribution.
    """
    augmentation = lookup_augmentation(type(likelihood(f)))

    @jax.jit
    def bound_and_slopes(m, v):
        def total(m, v):
            bound = augmentation.bound(likelihood(m), y, {"logits": m}, {"logits": v})
            return bound.sum(), bound

        return jax.value_and_grad(total, (0, 1), has_aux=True)(m, v)

    (_, bound), (by_mean, by_variance) = bound_and_slopes(f, np.zeros_like(f))
    return bound, by_mean - 2 * by_variance * f, -2 * by_variance


def normal_rule(means, deviations, turns):
    """Return standard normal nodes and weights, (n, nodes): Gauss-Legendre between
    points that cluster where values turn."""
    m, s = means[:, None], deviations[:, None]
    near = np.concatenate([[0], 10.0 ** np.linspace(-2.5, 8, 90)])
    breaks = [np.broadcast_to(np.linspace(-12, 12, 90), (len(m), 90))]
    breaks += [(c + sign * near - m) / s for c in turns for sign in (1, -1)]
    z = np.sort(np.clip(np.concatenate(breaks, 1), -12, 12), 1)
    x, w = np.polynomial.legendre.leggauss(16)
    middle, half = (z[:, 1:] + z[:, :-1]) / 2, np.diff(z) / 2
    z = (middle[..., None] + half[..., None] * x).reshape(len(m), -1)
    weights = (half[..., None] * w).reshape(len(m), -1)
    return z, weights * np.exp(-0.5 * z * z) / np.sqrt(2 * np.pi)
