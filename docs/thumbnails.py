# SPDX-License-Identifier: Apache-2.0
"""The last picture of every page that a page's ``toctree`` names, with its title: for
the gallery, whose notebooks draw them when the site is built."""

from __future__ import annotations

from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective


class thumbnails(nodes.General, nodes.Element):
    """The place where the pictures are shown."""


class Thumbnails(SphinxDirective):
    """Pictures that lead to their pages."""

    def run(self) -> list[nodes.Node]:
        """A mark, replaced when all pages have been read."""
        return [thumbnails()]


def fill(app: Sphinx, document: nodes.document, docname: str) -> None:
    """Replace the marks by pictures.

    :param app: of Sphinx.
    :param document: the page.
    :param docname: its name.
    """
    for mark in list(document.findall(thumbnails)):
        pages = app.env.toctree_includes[docname]
        pictures = [_picture(app, docname, page) for page in pages]
        mark.replace_self(nodes.container("", *pictures, classes=["thumbnails"]))


def _picture(app: Sphinx, docname: str, page: str) -> nodes.Node:
    *_, drawn = [None, *app.env.get_doctree(page).findall(nodes.image)]
    if drawn is None:
        raise ValueError(f"{page} draws no picture for its thumbnail")
    image = drawn.deepcopy()
    image["alt"] = ""  # the title beside it says what there is to say
    address = app.builder.get_relative_uri(docname, page)
    title = nodes.inline("", app.env.titles[page].astext())
    link = nodes.reference("", "", image, title, refuri=address, internal=True)
    colours = ["as-drawn"] if _as_drawn(drawn) else []
    return nodes.container("", nodes.paragraph("", "", link), classes=colours)


def _as_drawn(node: nodes.Node | None) -> bool:
    """Whether a dark page leaves a picture's colours alone."""
    while node is not None:
        if "tag_as-drawn" in getattr(node, "attributes", {}).get("classes", ()):
            return True
        node = node.parent
    return False


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the directive.

    :param app: of Sphinx.
    """
    app.add_node(thumbnails)
    app.add_directive("thumbnails", Thumbnails)
    app.connect("doctree-resolved", fill)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
