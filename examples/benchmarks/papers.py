# SPDX-License-Identifier: Apache-2.0
"""Results that papers report, again, beside the figures of their authors.

``multiclass``: the conjugate multi-class classifier of Galy-Fajou et al. (2020).
``svm``: the Bayesian support vector machine of Wenzel et al. (2017). ``links``:
piecewise-constant inverse links of Seitz (2022). Data and authors' logs are read from
the folder ``GPAUG_DATA``::

    GPAUG_DATA=/path/to/data python examples/benchmarks/papers.py --table multiclass
"""

from __future__ import annotations

import argparse
import importlib
import json
from pathlib import Path

from common import data_folder, machine

TABLES = {
    "svm": "papers_svm",
    "multiclass": "papers_multiclass",
    "links": "papers_links",
}


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--table", choices=TABLES, required=True)
    parser.add_argument(
        "--datasets", type=lambda text: text.split(","), help="by commas; all of them"
    )
    parser.add_argument("--folds", type=int, default=10, help="run the first so many")
    parser.add_argument("--steps", type=int, help="of every fit; the table's own")
    parser.add_argument("--num-inducing", type=int, default=100)
    parser.add_argument("--json", type=Path, help="write every figure here")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    """Run one table; each has a module with ``run(options) -> dict``."""
    options = parse(argv)
    if not 1 <= options.folds <= 10:
        raise SystemExit(f"--folds must be between 1 and 10, got {options.folds}")
    if data_folder() is None:
        raise SystemExit("no data: set GPAUG_DATA to the folder that holds them")
    about = machine()
    print(about)
    table = importlib.import_module(TABLES[options.table]).run(options)
    if options.json:
        output = {"machine": about, "table": options.table, "results": table}
        options.json.write_text(json.dumps(output, indent=1))


if __name__ == "__main__":
    main()
