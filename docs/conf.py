"""Builds the site from the repository's own files: pages are Markdown that also reads well on the forge, an example's page
is the example itself, the reference is made from the code. Run it by `./dev docs`.

Sphinx's source folder is the repository, so that links between pages, examples and README are ordinary relative links.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

project = "nvdd"
author = "the authors of nvdd"
html_title = "nvdd"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "html_anchors", "script_pages", "reference"]

root_doc = "docs/index"
source_suffix = {".md": "markdown", ".py": "script"}
include_patterns = [
    "docs/*.md",
    "docs/figures/*.py",
    "docs/*_*.py",
    "examples/**.md",
    "examples/**.py",
    "benchmarks/*.py",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
]
# what the walk through the folders need not look at
exclude_patterns = [
    ".git",
    ".venv*",
    "build",
    "core",
    "specs",
    "models",
    "nvdd_ase",
    "lammps_plugin",
    "tests",
    "requirements",
]

smartquotes = False  # two hyphens begin an option
# attributes of the same name in several classes: a type such as (n_owned, 3) is no link to one of them
suppress_warnings = ["ref.python"]

myst_heading_anchors = 4  # as the forge names them
myst_heading_anchors_html_ids = True
myst_enable_extensions = ["colon_fence"]

autodoc_typehints = "signature"
autodoc_member_order = "bysource"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True  # an attribute that is a property too has one entry
default_role = "code"  # docstrings write `name` as Markdown does

html_theme = "furo"
html_static_path = ["_static"]
html_extra_path = ["_root"]  # index.html, which leads to docs/index.html
html_css_files = ["site.css"]
html_show_sphinx = False
html_copy_source = False
