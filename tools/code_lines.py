# SPDX-License-Identifier: Apache-2.0
"""Count lines of code: those that are neither blank, nor comment, nor docstring.

Prints a line for each folder of a package, with its files, lines and lines of code::

    python tools/code_lines.py numpyro_gpaug
"""

from __future__ import annotations

import ast
import sys
import tokenize
from collections import Counter
from pathlib import Path

_LAYOUT = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
    tokenize.ENCODING, tokenize.ENDMARKER,
}  # fmt: skip
_DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def code_lines(path: Path) -> int:
    """Return the number of lines of code in a file.

    :param path: of Python source.
    """
    with path.open("rb") as file:
        tokens = [t for t in tokenize.tokenize(file.readline) if t.type not in _LAYOUT]
    lines = {i for t in tokens for i in range(t.start[0], t.end[0] + 1)}
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, _DOCUMENTED) and ast.get_docstring(node) is not None:
            text = node.body[0]
            lines -= set(range(text.lineno, (text.end_lineno or text.lineno) + 1))
    return len(lines)


def main() -> None:
    """Print the counts."""
    for root in map(Path, sys.argv[1:] or ["numpyro_gpaug"]):
        files, lines, code = Counter[str](), Counter[str](), Counter[str]()
        for path in sorted(root.rglob("*.py")):
            for folder in ("/".join(path.parent.parts), f"all of {root}"):
                files[folder] += 1
                lines[folder] += len(path.read_bytes().splitlines())
                code[folder] += code_lines(path)
        for name in files:
            print(f"{name:32}{files[name]:6}{lines[name]:8}{code[name]:8}")


if __name__ == "__main__":
    main()
