# SPDX-License-Identifier: Apache-2.0
"""Tables of the API reference, made from what there is when the pages are built: all
likelihoods with their routes, from the registries, and the names of a page."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from docutils import nodes
from docutils.statemachine import StringList
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

import numpyro_gpaug as gpaug
from numpyro_gpaug.likelihoods import contract, expectations

# How each is written in a model: evaluated, and held against the registries.
WRITTEN = (
    "dist.Normal(f, scale)",
    "dist.StudentT(df, f, scale)",
    "dist.Laplace(f, scale)",
    "gpaug.LogVarianceNormal(f, g)",
    "gpaug.HeteroscedasticNormal(f, g, max_rate)",
    "gpaug.PiecewiseNormal(f, link, scale)",
    "gpaug.PiecewiseHeteroscedasticNormal(f, g, link)",
    "gpaug.Linked(f, link, dist.Poisson)",
    "dist.Bernoulli(logits=f)",
    "gpaug.BayesianSVM(f)",
    "gpaug.PiecewiseBernoulli(f, squashed)",
    "dist.Categorical(logits=F)",
    "gpaug.LogisticSoftmax(F)",
    "gpaug.LogisticSoftmaxMeanField(F)",
    "gpaug.RobustMax(F, epsilon)",
    "gpaug.SampledLogisticSoftmax(F, 10)",
    "gpaug.LogisticNormalizer(F, 10, zeta)",
    "dist.Binomial(n, logits=f)",
    "dist.Multinomial(n, logits=F)",
    "dist.NegativeBinomialLogits(r, f)",
    "gpaug.LogisticPoisson(f, max_rate)",
)
MODULES = {"dist": dist.__name__, "gpaug": gpaug.__name__}
HEADER = (
    "likelihood",
    "carries latents",
    "exact expectation",
    "augmentation",
    "`predict_y`",
    "closed-form maximiser",
)


def _names() -> dict[str, Any]:
    """Return the namespace of the written types. It is made on demand: Sphinx forks
    processes, and JAX must not start before that.
    """
    link = gpaug.PiecewiseLink.from_function
    arrays = {"f": jnp.zeros(()), "g": jnp.zeros(()), "F": jnp.zeros(3)}
    numbers = {"r": 2.0, "n": 5, "scale": 1.0, "df": 4.0, "max_rate": 3.0}
    more = {"epsilon": 0.01, "zeta": jnp.ones(()), "dist": dist, "gpaug": gpaug}
    more |= {"link": link(jnp.exp, 4, -1.0, 1.0)}
    more |= {"squashed": link(jax.nn.sigmoid, 4, -1.0, 1.0)}
    return {**arrays, **numbers, **more}


def likelihoods() -> list[tuple[str, ...]]:
    """A row for every registered likelihood.

    :raises ValueError: for one that is registered, but not written here.
    """
    names = _names()
    made = {text: eval(text, names) for text in WRITTEN}
    known = {type(d) for d in made.values()}
    registered = {*expectations._REGISTRY, *contract._AUGMENTATIONS}
    if registered != known:
        names = sorted(c.__name__ for c in registered ^ known)
        raise ValueError(f"{names}: write them in WRITTEN of docs/reference.py")
    return [_row(text, d) for text, d in made.items()]


def _row(text: str, d: Any) -> tuple[str, ...]:
    entry = expectations._REGISTRY[type(d)]
    latents = {name: jnp.asarray(getattr(d, name)) for name in entry.latents}
    ones = {name: jnp.ones_like(x) for name, x in latents.items()}
    try:
        predicted = type(entry.predictive(d, latents, ones)).__name__
        predicted = "yes" if predicted.startswith("_") else f"`{predicted}`"
    except NotImplementedError:
        predicted = "no"
    steps = [name for cls, name in contract._M_STEPS if cls is type(d)]
    module, name = text.partition("(")[0].split(".")
    return (
        f"{{py:obj}}`{text} <{MODULES[module]}.{name}>`",
        ", ".join(f"`{name}`" for name in entry.latents),
        "yes, log-concave" if entry.log_concave else "yes",
        "yes" if type(d) in contract._AUGMENTATIONS else "no",
        predicted,
        ", ".join(f"`{name}`" for name in steps),
    )


class LikelihoodTable(SphinxDirective):
    """All registered likelihoods."""

    def run(self) -> list[nodes.Node]:
        """The table."""
        lines = ["| " + " | ".join(row) + " |" for row in [HEADER, *likelihoods()]]
        lines.insert(1, "|" + "---|" * len(HEADER))
        node = nodes.container()
        source = StringList(lines, self.env.docname)
        self.state.nested_parse(source, self.content_offset, node)
        for table in node.findall(nodes.table):
            table["classes"].append("likelihoods")
        return node.children


class page_names(nodes.General, nodes.Element):
    """The place on a page where its names are listed."""


class PageNames(SphinxDirective):
    """The names that a page documents, each with its first sentence."""

    def run(self) -> list[nodes.Node]:
        """A mark, replaced when the page has been read."""
        return [page_names()]


# Of a sentence, or of what a colon introduces; "0 .. J-1" has none.
END = re.compile(r"(?<![.\s])[.:](?=\s|$)")


def _first_sentence(paragraph: nodes.Node) -> list[nodes.Node]:
    """Return the nodes of the first sentence, with its formulas and links."""
    kept: list[nodes.Node] = []
    for node in paragraph.children:
        if isinstance(node, nodes.Text) and (end := END.search(node)):
            return [*kept, nodes.Text(node[: end.start()])]
        kept.append(node.deepcopy())
    return kept


def _described(
    document: nodes.document,
) -> Iterable[tuple[str, str, list[nodes.Node]]]:
    """Anchor, name and first sentence of all that is no member of a class."""
    for desc in document.findall(addnodes.desc):
        signature, content = desc[0], desc[-1]
        if desc["objtype"] not in ("class", "function", "exception", "data"):
            continue
        first = next(content.findall(nodes.paragraph), None)
        sentence = [] if first is None else _first_sentence(first)
        yield signature["ids"][0], signature["fullname"], sentence


def fill_page_names(app: Sphinx, document: nodes.document) -> None:
    """Replace the marks by tables.

    :param app: of Sphinx.
    :param document: the page.
    """
    del app
    for mark in list(document.findall(page_names)):
        body = nodes.tbody()
        for anchor, name, sentence in _described(document):
            link = nodes.reference("", "", nodes.literal("", name), refid=anchor)
            cells = nodes.paragraph("", "", link), nodes.paragraph("", "", *sentence)
            body += nodes.row("", *(nodes.entry("", cell) for cell in cells))
        group = nodes.tgroup("", cols=2)
        group += [nodes.colspec(colwidth=n) for n in (30, 70)]
        group += body
        mark.replace_self(nodes.table("", group, classes=["page-names"]))


def setup(app: Sphinx) -> dict[str, Any]:
    """Register both directives.

    :param app: of Sphinx.
    """
    app.add_node(page_names)
    app.add_directive("likelihood-table", LikelihoodTable)
    app.add_directive("page-names", PageNames)
    app.connect("doctree-read", fill_page_names)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
