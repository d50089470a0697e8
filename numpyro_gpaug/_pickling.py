# SPDX-License-Identifier: Apache-2.0
"""Objects that pickle cannot write, and that say what can."""

from __future__ import annotations

from typing import Any, ClassVar, NoReturn

from numpyro_gpaug._display import Displayed


class NotPickled(Displayed):
    """An object that holds compiled programs: left alone, ``pickle`` complains of one
    of JAX's functions.

    :param instead: what to do instead.
    """

    _instead: ClassVar[str]

    def __init_subclass__(cls, instead: str, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls._instead = instead

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"a {type(self).__name__} holds compiled programs, which are not pickled: "
            f"{self._instead}"
        )
