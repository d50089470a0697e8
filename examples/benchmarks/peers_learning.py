# SPDX-License-Identifier: Apache-2.0
"""GPflow's learning for ``learning.py``, which runs this file in the interpreter that
holds it: ``SVGP`` on the same inducing inputs, all params (those of the Gaussian too)
by SciPy's L-BFGS, as its documentation does."""

from __future__ import annotations

import json
import sys
import time

import gpflow
import numpy as np
import tensorflow as tf


def main(path: str) -> None:
    """Fit the task in a file, and print JSON."""
    with np.load(path) as file:
        task = {k: file[k] for k in file.files}
    kind, y = str(task["kind"]), task["y"].astype(float)
    kernel = gpflow.kernels.SquaredExponential(task["variance"], task["lengthscale"])
    mean, latents = gpflow.functions.Constant(0.0), 1
    if kind == "regression":
        likelihood = gpflow.likelihoods.Gaussian(task["noise"] ** 2)
    elif kind == "binary":
        likelihood = gpflow.likelihoods.Bernoulli(invlink=tf.sigmoid)
    else:
        latents, mean = int(y.max()) + 1, None
        likelihood = gpflow.likelihoods.Softmax(latents)

    def fit() -> tuple[float, int, float]:
        model = gpflow.models.SVGP(
            gpflow.utilities.deepcopy(kernel), gpflow.utilities.deepcopy(likelihood),
            task["Z"].copy(), num_latent_gps=latents,
            mean_function=gpflow.utilities.deepcopy(mean) if mean else None,
        )  # fmt: skip
        gpflow.set_trainable(model.inducing_variable, False)
        loss = model.training_loss_closure((task["X"], y[:, None]))
        began = time.perf_counter()
        done = gpflow.optimizers.Scipy().minimize(
            loss, model.trainable_variables, options={"maxiter": 1000}
        )
        return float(loss()), int(done.nfev), time.perf_counter() - began

    fit()  # traces
    value, evaluations, seconds = fit()
    print(json.dumps({"loss": value, "steps": evaluations, "s": seconds}))


main(sys.argv[1])
