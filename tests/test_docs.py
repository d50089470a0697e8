# SPDX-License-Identifier: Apache-2.0
"""Every public name has a docstring and a place in the API reference; the pages name no
folder of a machine; other projects have what is linked to. (Links to our own names are
checked by the build, ``sphinx -W``.)"""

import importlib
import inspect
import re
from pathlib import Path

import pytest

import numpyro_gpaug

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(p for p in DOCS.rglob("*.md") if "_build" not in p.parts)
INVENTORIES = sorted((DOCS / "inventories").glob("*.txt"))
MODULES = [
    name
    for name in numpyro_gpaug.__all__
    if inspect.ismodule(getattr(numpyro_gpaug, name))
]


def public_names() -> list[str]:
    """Return dotted names: of the package, then of its public modules."""
    names = [f"numpyro_gpaug.{name}" for name in numpyro_gpaug.__all__]
    for module in MODULES:
        found = getattr(numpyro_gpaug, module)
        names += [f"{found.__name__}.{name}" for name in found.__all__]
    return names


def resolve(name: str) -> object:
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


def test_public_names_have_docstrings() -> None:
    for name in public_names():
        found = resolve(name)
        # The docstring of the class itself; a dataclass without one has its signature.
        own = vars(found).get("__doc__") if isinstance(found, type) else found.__doc__
        summary = (own or "").strip()
        assert summary, f"{name} has no docstring"
        assert not summary.startswith(f"{name.rpartition('.')[2]}("), summary


def test_public_names_are_in_the_reference() -> None:
    text = "\n".join(p.read_text() for p in (DOCS / "api").glob("*.md"))
    # A page lists a module with all its members, or single objects.
    modules = set(re.findall(r"automodule:: (\S+)\n +:members:", text))
    objects = [resolve(x) for x in re.findall(r"auto(?!module)\w+:: (\S+)", text)]
    missing = [
        name
        for name in public_names()
        if not inspect.ismodule(resolve(name))  # its names are listed, too
        and name.rpartition(".")[0] not in modules
        and not any(resolve(name) is x for x in objects)
    ]
    assert not missing


def test_no_page_names_a_folder_of_a_machine() -> None:
    for page in (*PAGES, DOCS / "conf.py"):
        found = re.findall(
            r"(?<![\w.:/])/(?:home|root|tmp|work|Users)/\S+", page.read_text()
        )
        assert not found, f"{page.name}: {found}"


def test_every_page_is_in_a_table_of_contents() -> None:
    trees = {}
    for page in PAGES:
        for block in re.findall(r"```\{toctree\}\n(.*?)```", page.read_text(), re.S):
            for line in block.split("\n"):
                if line and not line.startswith(":"):
                    trees[(page.parent / f"{line}.md").resolve()] = page
    assert set(trees) | {DOCS / "index.md"} == set(PAGES)


def test_notebooks_go_from_a_prior_to_a_decision() -> None:
    pages = [p for p in PAGES if p.parent.name == "gallery" and p.stem != "index"]
    index = (DOCS / "gallery" / "index.md").read_text()
    assert len(pages) >= 12
    for page in pages:
        text = page.read_text()
        for part in (
            "before any data", "reproduce the data", "{nb-download}", "{download}",
            "plt.",
        ):  # fmt: skip
            assert part in text, f"{page.name}: {part}"
        # Later data judge a forecast.
        assert "diagnostics.compare(" in text or "## Forecast" in text, page.name
        assert re.search("^## .*[Dd]ecide", text, re.M), page.name
        assert f"]({page.name})" in index, page.name


def test_pictures_are_small_and_shown() -> None:
    shown = (DOCS / "examples.md").read_text() + (ROOT / "README.md").read_text()
    drawn = {p.stem for p in (ROOT / "examples").glob("*.py")}
    drawn = drawn - {"distributed"} | {"index"}
    pictures = sorted((DOCS / "_static").glob("*.png"))
    assert drawn == {p.stem for p in pictures}
    for picture in pictures:
        assert picture.stat().st_size < 100_000, picture.name
        assert f"_static/{picture.name}" in shown


@pytest.mark.parametrize("path", INVENTORIES, ids=lambda path: path.stem)
def test_other_projects_have_the_names_that_are_linked_to(path: Path) -> None:
    (_, address), *entries = map(str.split, path.read_text().splitlines())
    assert re.fullmatch(r"https://\S+/", address)
    names = [name for name, _, _ in entries]
    assert names == sorted(set(names))
    for name, kind, page in entries:
        found = resolve(name)  # of the installed version
        assert kind == "data" or isinstance(found, type) is (kind == "class"), name
        assert callable(found), name
        assert re.fullmatch(r"[\w/.]+\.html(#[\w.]+)?", page), page


def test_names_of_other_projects_that_are_linked_to_are_listed() -> None:
    lines = [path.read_text().splitlines()[1:] for path in INVENTORIES]
    listed = {line.split()[0] for line in sum(lines, [])}
    projects = {name.partition(".")[0] for name in listed}
    sources = (DOCS.parent / "numpyro_gpaug").rglob("*.py")
    linked = set()
    for path in (*PAGES, *sources):
        role = r"[:}]`(?:[^`<]*<)?~?([\w.]+)>?`"
        linked |= set(re.findall(role, path.read_text()))
    linked = {name for name in linked if name.partition(".")[0] in projects}
    assert len(linked) > 30
    assert linked <= listed
