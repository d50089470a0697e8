# SPDX-License-Identifier: Apache-2.0
"""Links into the documentation of other projects, without a network: intersphinx reads
inventories that are made from the lists in ``inventories/``.

A list begins with the project's name and address; every other line is a name as users
write it, what it is, and the page, whose anchor may be another name (NumPyro documents
``numpyro.param`` as ``numpyro.primitives.param``). Only pages that are known to be
there are listed: what is on none stays a literal.
"""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx
from sphinx.config import Config

HEADER = """\
# Sphinx inventory version 2
# Project: {}
# Version:
# The remainder of this file is compressed using zlib.
"""


def inventory(lines: list[str]) -> bytes:
    """Return an inventory for intersphinx.

    :param lines: of a list.
    """
    project, _ = lines[0].split()
    entries = [line.split() for line in lines[1:]]
    rows = [f"{name} py:{kind} 1 {page} -\n" for name, kind, page in entries]
    return HEADER.format(project).encode() + zlib.compress("".join(rows).encode())


def write_inventories(app: Sphinx, config: Config) -> None:
    """Write them beside the doctrees: where the configuration names another folder in
    every build, every build reads all pages anew.

    :param app: of Sphinx.
    :param config: gets ``intersphinx_mapping``.
    """
    folder = Path(app.doctreedir) / "inventories"
    folder.mkdir(parents=True, exist_ok=True)
    mapping = {}
    for path in sorted((Path(__file__).parent / "inventories").glob("*.txt")):
        lines = path.read_text().splitlines()
        made = folder / f"{path.stem}.inv"
        made.write_bytes(inventory(lines))
        mapping[path.stem] = (lines[0].split()[1], str(made))
    config.intersphinx_mapping = mapping


def setup(app: Sphinx) -> dict[str, Any]:
    """Write the inventories before intersphinx reads its mapping.

    :param app: of Sphinx.
    """
    app.setup_extension("sphinx.ext.intersphinx")
    app.connect("config-inited", write_inventories, priority=700)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
