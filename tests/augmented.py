# SPDX-License-Identifier: Apache-2.0
"""The main identity of ``check_augmentation`` as one program: step by step, and with
the samplers of the auxiliaries, it compiles two hundred."""

from __future__ import annotations

import jax
import numpy as np
from numpyro.distributions import Distribution

from numpyro_gpaug.likelihoods.contract import lookup_augmentation


def left_over(d, y, logits, auxiliaries, log_density):
    """Return ``log p(y | f) + log p(aux | y, f) - (potential f - precision f^2 / 2)``
    of each datum. It must not depend on f, for any auxiliaries.

    :param logits: several values of the latents, (draws, rows, classes).
    :param auxiliaries: values of the auxiliaries by name, in the order of the draws.
    :param log_density: ``log p(y | f)`` by NumPy, as a function of f.
    :return: (draws, rows).
    """
    augmentation = lookup_augmentation(type(d))

    @jax.jit
    def of_auxiliaries(logits, aux):
        potential, precision = augmentation.natural(d, y, aux, {})["logits"]

        def at(f):
            total = -(potential * f - 0.5 * precision * f * f).sum(-1)
            for name, q in augmentation.conditional(d, y, {"logits": f}).items():
                q = q if isinstance(q, Distribution) else q(aux)
                density = q.log_prob(aux[name])
                total += density if density.ndim == total.ndim else density.sum(-1)
            return total

        return jax.vmap(at)(logits)

    return np.asarray(of_auxiliaries(logits, auxiliaries)) + log_density(logits)
