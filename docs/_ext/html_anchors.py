"""Links to `<a id="...">`, which is how these pages name a row of a table: MyST checks links to headings alone."""

from __future__ import annotations

import re
from typing import Any

from docutils import nodes
from myst_parser.mdit_to_docutils.transforms import ResolveAnchorIds
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform


class HtmlAnchors(SphinxTransform):
    """Adds the ids of raw HTML to the names of headings, before links are resolved."""

    default_priority = ResolveAnchorIds.default_priority - 1

    def apply(self, **kwargs: Any) -> None:
        slugs = self.env.metadata[self.env.docname].setdefault("myst_slugs", {})
        for raw in self.document.findall(nodes.raw):
            for name in re.findall(r'<a id="([^"]+)"', raw.astext()):
                slugs[name] = (raw.line or 0, name, "")
        self.document.myst_slugs = slugs


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_transform(HtmlAnchors)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
