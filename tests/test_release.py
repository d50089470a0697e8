# SPDX-License-Identifier: Apache-2.0
"""The release: modules and the mark of types, one version, working links."""

import re
import tomllib
from pathlib import Path

import numpyro_gpaug

TOP = Path(__file__).parents[1]


def test_the_package_is_modules_and_no_data():
    package = Path(numpyro_gpaug.__file__).parent
    files = [p for p in package.rglob("*") if p.is_file() and p.suffix != ".pyc"]
    assert {p.name for p in files if p.suffix != ".py"} == {"py.typed"}
    assert len(files) > 100


def test_one_version_everywhere():
    version = numpyro_gpaug.__version__
    project = tomllib.loads((TOP / "pyproject.toml").read_text())["project"]
    assert project["version"] == version
    assert f"\nversion: {version}\n" in (TOP / "CITATION.cff").read_text()
    assert "\n## [Unreleased]\n" in (TOP / "docs" / "changelog.md").read_text()


def test_the_readme_is_short_and_leads_somewhere():
    text = (TOP / "README.md").read_text()
    assert len(text.splitlines()) <= 180
    links = re.findall(r"\]\((?!https?:)([^)#\s]+)[^)]*\)", text)
    assert len(links) > 15
    assert not [link for link in links if not (TOP / link).exists()]
