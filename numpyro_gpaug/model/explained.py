# SPDX-License-Identifier: Apache-2.0
"""Explanations of errors that JAX raises when it traces a model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import jax

from numpyro_gpaug.model.arguments import Arguments


@contextmanager
def explained(arguments: Arguments) -> Iterator[None]:
    """Explain errors about values that are traced, and about plates that do not have
    the size of their data.

    :param arguments: the model's arguments.
    """
    try:
        yield
    except (jax.errors.JAXTypeError, jax.errors.JAXIndexError) as error:
        raise TypeError(
            "the model computes a size (such as of a plate), or a NumPy array, from "
            "its array arguments, which are traced. Bind such an argument to "
            "the model: functools.partial(model, mask=mask). Or pass sizes as plain "
            "numbers by keyword, compute positions such as np.nonzero(missing) "
            "outside of the model, and index arrays of jax.numpy. JAX says: "
            + str(error).split("\n", 1)[0]
        ) from error
    except TypeError as error:
        if "string indexing" not in str(error):
            raise
        raise TypeError(
            f"{error}: a data frame is one array for the model. Pass its columns as "
            "arguments, or a dict of them, {name: frame[name] for name in frame}"
        ) from error
    except IndexError as error:
        shapes = [x.shape for x in arguments.arrays]
        raise ValueError(
            f"{error}: arguments of the model have shapes {shapes}"
        ) from error
    except ValueError as error:
        if "Incompatible shapes for broadcasting" not in str(error):
            raise
        shapes = [x.shape for x in arguments.arrays]
        raise ValueError(
            f"{error}: does a plate have another size than its data, or does a mask "
            f"cover sites of other sizes? Arguments of the model have shapes {shapes}"
        ) from error
