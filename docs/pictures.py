# SPDX-License-Identifier: Apache-2.0
"""Draws the pictures of the examples page, small enough to be kept in the repository.

Runs every example, nearly all with their defaults, and reduces what it drew::

    python docs/pictures.py
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).resolve().parents[1]
STATIC = ROOT / "docs" / "_static"
WIDTH, COLOURS = 900, 128
NO_PICTURE = ("distributed",)
OPTIONS = {"multilabel": ["--epochs", "12"]}


def main() -> None:
    """One picture per script in ``examples/``."""
    for script in sorted((ROOT / "examples").glob("*.py")):
        if script.stem in NO_PICTURE:
            continue
        with tempfile.TemporaryDirectory() as folder:
            options = OPTIONS.get(script.stem, [])
            subprocess.run([sys.executable, script, *options], cwd=folder, check=True)
            reduce(Path(folder) / f"{script.stem}.png", STATIC / f"{script.stem}.png")


def reduce(source: Path, target: Path) -> None:
    """To ``WIDTH`` columns and a palette of ``COLOURS``."""
    picture = Image.open(source).convert("RGB")
    height = round(picture.height * WIDTH / picture.width)
    picture = picture.resize((WIDTH, height), Image.Resampling.LANCZOS)
    # k-means keeps the colours of thin lines, which the first guess merges.
    picture.quantize(COLOURS, kmeans=3, dither=Image.Dither.NONE).save(
        target, optimize=True
    )


if __name__ == "__main__":
    main()
