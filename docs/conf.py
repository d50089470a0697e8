# SPDX-License-Identifier: Apache-2.0
"""Sphinx configuration: ``python -m sphinx -W -b html docs docs/_build/html``."""

import fcntl
import os
import sys
import tempfile
from importlib import metadata
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any

from nbclient import NotebookClient
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util.parallel import make_chunks

import numpyro_gpaug

sys.path.insert(0, str(Path(__file__).parent))  # extensions of our own

project = "numpyro_gpaug"
author = "the numpyro_gpaug authors"
version = release = numpyro_gpaug.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.doctest",
    "sphinx.ext.mathjax",
    "sphinx.ext.viewcode",
    "inventories",
    "reference",
    "thumbnails",
]
exclude_patterns = ["_build"]

html_theme = "furo"
html_css_files = ["wide.css"]
html_title = f"numpyro_gpaug {version}"
# MathJax comes from a package, so that no page needs a network.
mathjax = find_spec("sphinx-mathjax-offline")
html_static_path = ["_static", str(Path(mathjax.origin).parent / "static")]
mathjax_path = "mathjax/tex-chtml.js"
html_show_copyright = False
html_show_sourcelink = False

myst_enable_extensions = ["colon_fence", "deflist", "dollarmath", "amsmath"]
myst_heading_anchors = 3

# Every page is run anew: a cache knows the text of a page, not the package under it.
nb_execution_mode = "force"
nb_execution_raise_on_error = True
nb_execution_timeout = 600
nb_merge_streams = True
nb_execution_show_tb = True
nb_output_stderr = "remove-warn"  # a page that warns is a page to mend

# Kernels choose free ports before they listen to them: those that start together may
# choose the same. One starts after the other.
starting = tempfile.NamedTemporaryFile(prefix="starting-")
start_kernel = NotebookClient.async_start_new_kernel


async def start_alone(client: NotebookClient, **options: Any) -> None:
    """Start a kernel while no other process does."""
    with open(starting.name) as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        await start_kernel(client, **options)
        await client.async_start_new_kernel_client()


NotebookClient.async_start_new_kernel = start_alone

# In fast builds a kernel runs all pages of a process: to start it and to import takes
# as long as the cells of a short page. Names and programs of a page end with it.
# Collections at Python's own threshold take a twelfth of the time.
kernels: dict[int, Any] = {}
new_manager = NotebookClient.create_kernel_manager
new_client = NotebookClient.async_start_new_kernel_client
BETWEEN = "import gc, jax, matplotlib.pyplot; matplotlib.pyplot.close('all')\n"
BETWEEN += "gc.set_threshold(100_000, 20, 100); jax.clear_caches()\n"
BETWEEN += "%reset -f\n%cd -q {folder}"


def shared_manager(client: NotebookClient) -> Any:
    """Return the manager of this process's kernel."""
    if os.getpid() not in kernels:
        kernels[os.getpid()] = new_manager(client)
    client.km = kernels[os.getpid()]
    return client.km


async def client_in_folder(client: NotebookClient) -> None:
    """Connect to the kernel, which may have run another page."""
    await new_client(client)
    between = BETWEEN.format(folder=client.resources["metadata"]["path"])
    await client.kc.execute_interactive(between, silent=True, timeout=60)


async def keep_kernel(client: NotebookClient) -> None:
    """Disconnect from the kernel."""
    client.kc.stop_channels()
    client.kc = client.km = None


if os.environ.get("GPAUG_DOCS_FAST"):
    NotebookClient.create_kernel_manager = shared_manager
    NotebookClient.async_start_new_kernel_client = client_in_folder
    NotebookClient._async_cleanup_kernel = keep_kernel
os.environ["PYTHONWARNINGS"] = "ignore:IProgress not found"  # tqdm asks for ipywidgets
os.environ["MATPLOTLIBRC"] = str(Path(__file__).parent / "matplotlibrc")
# Pages run beside each other; see "My fit hangs" in the checklist. Threads of BLAS that
# wait for one another by spinning took half of all processor time.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
xla_flags = [os.environ.get("XLA_FLAGS", ""), "--xla_cpu_multi_thread_eigen=false"]
if os.environ.get("GPAUG_DOCS_FAST"):
    # Pages read the variable to take fewer draws; the rest of their time is
    # compilation, which fusion emitters double. XLA stops on flags it does not know,
    # and later ones do not have this one.
    xla_flags.append("--xla_backend_optimization_level=0")
    if metadata.version("jaxlib").startswith("0.10."):
        xla_flags.append("--xla_cpu_use_fusion_emitters=false")
        xla_flags.append("--xla_cpu_parallel_codegen_split_count=1")
        # 0.10.1 writes lines about harmless options of each program that it reads.
        os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    # What one page compiled another reads; programs do not say where they come from.
    os.environ["JAX_TRACEBACK_IN_LOCATIONS_LIMIT"] = "0"
    programs = tempfile.TemporaryDirectory(prefix="programs-")
    os.environ["JAX_COMPILATION_CACHE_DIR"] = programs.name
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["XLA_FLAGS"] = " ".join(xla_flags)

autodoc_member_order = "bysource"
autodoc_typehints = "none"
autoclass_content = "class"
autodoc_preserve_defaults = True
autodoc_default_options = {
    "members": True, "special-members": "__call__",
    # The classes of a guide's views, and of a loss's guides, are for this package.
    "exclude-members": "guides,view",
}  # fmt: skip
# A link that leads nowhere is an error. Docstrings that are inherited from NumPyro have
# some to what no list in inventories/ has; a test holds our own to those lists.
nitpicky = True
nitpick_ignore_regex = [
    ("py:(class|data|meth)", r"(jax|numpyro)\..*"),
    ("py:.*", "Array|ArrayLike|sample_with_intermediates"),
]


def spread(app: Sphinx, env: BuildEnvironment, docnames: list[str]) -> None:
    """Deal the notebooks out to the processes in turn.

    Each process reads one block of neighbours in this list, and by name all notebooks
    are neighbours: few processes would run them all, one after another.
    """
    texts = {name: Path(env.doc2path(name)).read_text() for name in docnames}
    docnames.sort(key=lambda name: -texts[name].count("{code-cell}"))
    size = max(map(len, make_chunks(docnames, app.parallel)), default=1)
    count = len(docnames) // size
    # Pages that are left over wait for a process: those without cells.
    whole, rest = docnames[: size * count], docnames[size * count :]
    docnames[:] = [*chain(*(whole[i::count] for i in range(count))), *rest]


def setup(app: Sphinx) -> None:
    """Connect the functions of this file."""
    app.connect("env-before-read-docs", spread)
