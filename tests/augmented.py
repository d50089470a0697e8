# SPDX-License-Identifier: Apache-2.0
"""The main identity of ``check_augmentation`` as one program: step by step it compiles
two hundred."""

from __future__ import annotations

import jax
import numpy as np
from numpyro.distributions import Distribution

from numpyro_gpaug.likelihoods.augmentation import draw_auxiliaries, lookup_augmentation


def auxiliary_parts(d, y, logits, key, by_numpy):
    """``log p(aux | y, f) - (potential f - precision f^2 / 2)`` of each datum at all
    ``logits``, for auxiliaries drawn at the first, and a function of them.

    With ``log p(y | f)`` it must not depend on f.

    :param logits: latents, (draws, rows, classes).
    :param by_numpy: ``log p(y | f)`` by NumPy, as a function of f.
    :return: the sum for every draw of latents, (draws, rows).
    """
    augmentation = lookup_augmentation(type(d))

    @jax.jit
    def parts(logits, key):
        drawn = draw_auxiliaries(
            key, augmentation.conditional(d, y, {"logits": logits[0]})
        )
        potential, precision = augmentation.natural(d, y, drawn, {})["logits"]

        def at(f):
            total = -(potential * f - 0.5 * precision * f * f).sum(-1)
            for name, q in augmentation.conditional(d, y, {"logits": f}).items():
                q = q if isinstance(q, Distribution) else q(drawn)
                density = q.log_prob(drawn[name])
                total += density if density.ndim == total.ndim else density.sum(-1)
            return total

        return jax.vmap(at)(logits)

    return np.asarray(parts(logits, key)) + by_numpy(logits)
