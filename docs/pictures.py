# SPDX-License-Identifier: Apache-2.0
"""Draw the pictures of the examples page, small enough to be kept in the repository,
and the README's, which is the landing page's.

Runs every example, nearly all with their defaults, and reduces what it drew::

    python docs/pictures.py [NAME ...]
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from contextlib import chdir
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("agg")

import matplotlib.pyplot as plt
from PIL import Image

ROOT = Path(__file__).resolve().parents[1]
STATIC = ROOT / "docs" / "_static"
WIDTH, COLOURS = 900, 128
NO_PICTURE = ("distributed",)
OPTIONS = {"multilabel": ["--epochs", "12"]}


def main() -> None:
    """One picture per script in ``examples/``, and one of the landing page."""
    wanted = sys.argv[1:]
    if not wanted or "index" in wanted:
        landing_page()
    for script in sorted((ROOT / "examples").glob("*.py")):
        if script.stem in NO_PICTURE or (wanted and script.stem not in wanted):
            continue
        with tempfile.TemporaryDirectory() as folder:
            options = OPTIONS.get(script.stem, [])
            subprocess.run([sys.executable, script, *options], cwd=folder, check=True)
            reduce(Path(folder) / f"{script.stem}.png", STATIC / f"{script.stem}.png")


def landing_page() -> None:
    """The picture that the cells of ``docs/index.md`` draw."""
    plt.style.use(ROOT / "docs" / "matplotlibrc")
    page = (ROOT / "docs" / "index.md").read_text()
    cells = re.findall(r"```\{code-cell\}[^\n]*\n(?::[^\n]*\n)*(.*?)```", page, re.S)
    scope: dict[str, Any] = {}
    with chdir(ROOT / "docs"):  # where the page reads its data from
        exec("".join(cells), scope)
    with tempfile.NamedTemporaryFile(suffix=".png") as drawn:
        plt.gcf().set_size_inches(8, 2.1)
        plt.savefig(drawn.name, dpi=150)
        reduce(Path(drawn.name), STATIC / "index.png")


def reduce(source: Path, target: Path) -> None:
    """Reduce a picture to ``WIDTH`` columns and a palette of ``COLOURS``."""
    picture = Image.open(source).convert("RGB")
    height = round(picture.height * WIDTH / picture.width)
    picture = picture.resize((WIDTH, height), Image.Resampling.LANCZOS)
    # k-means keeps the colours of thin lines, which the first guess merges.
    picture.quantize(COLOURS, kmeans=3, dither=Image.Dither.NONE).save(
        target, optimize=True
    )


if __name__ == "__main__":
    main()
