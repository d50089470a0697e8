# SPDX-License-Identifier: Apache-2.0
"""The signatures of models."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

# Reading a signature takes longer than checking all arguments of a small fit.
_KNOWN: WeakKeyDictionary[Any, inspect.Signature] = WeakKeyDictionary()


def signature_of(model: Callable[..., Any]) -> inspect.Signature:
    """Return :func:`inspect.signature`, cached by model.

    :param model: the model.
    """
    try:
        return _KNOWN[model]
    except KeyError:
        found = _KNOWN[model] = inspect.signature(model)
        return found
    except TypeError:  # not hashable, or without weak references
        return inspect.signature(model)


def argument_names(model: Callable[..., Any], given: int) -> list[str]:
    """Return the names of a model's arguments, in order; ``*args`` are numbered.

    :param model: the model.
    :param given: the number of arguments given by position.
    """
    names: list[str] = []
    for parameter in signature_of(model).parameters.values():
        if parameter.kind is parameter.VAR_POSITIONAL:
            names += [f"{parameter.name}[{i}]" for i in range(given - len(names))]
        else:
            names.append(parameter.name)
    return names
