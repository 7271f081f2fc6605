"""A Python script as a page: its docstring, then its text. So examples are pages, and none is copied."""

from __future__ import annotations

import ast
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.parsers import Parser


class ScriptParser(Parser):
    """Takes the first line of the docstring as title, paragraphs of it as text, indented ones as commands."""

    supported = ("script",)

    def parse(self, inputstring: str, document: nodes.document) -> None:
        self.setup_parse(inputstring, document)
        env = document.settings.env
        path = Path(env.doc2path(env.docname, base=False))
        section = nodes.section(ids=[nodes.make_id(path.stem)], names=[path.stem])
        section += nodes.title("", path.as_posix())
        for paragraph in (ast.get_docstring(ast.parse(inputstring)) or "").split("\n\n"):
            if all(line.startswith("    ") for line in paragraph.splitlines()):
                lines = "\n".join(line[4:] for line in paragraph.splitlines())
                section += nodes.literal_block(lines, lines, language="sh")
            else:
                section += nodes.paragraph("", paragraph)
        section += nodes.literal_block(inputstring, inputstring, language="python")
        document += section
        document.settings.record_dependencies.add(str(path))
        if not path.as_posix().startswith("examples/"):  # a script that a page links to
            env.metadata[env.docname]["orphan"] = True
        self.finish_parse()


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_source_parser(ScriptParser)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
