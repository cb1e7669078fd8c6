"""How Sphinx builds these pages: `make docs`, with every warning an error."""

from __future__ import annotations

import importlib.metadata
import shutil
from pathlib import Path
from typing import Any

project = "fxkit"
author = "fxkit contributors"
copyright = "2026, fxkit contributors"
release = version = importlib.metadata.version("fxkit")

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
source_suffix = {".md": "myst-nb", ".ipynb": "myst-nb"}
exclude_patterns = ["_build"]
nb_execution_mode = "off"  # tests hold that the outputs in the notebooks are current
html_theme = "furo"
html_title = f"fxkit {release}"
html_show_sourcelink = False

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

default_role = "code"  # docstrings write names between single backquotes
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_class_signature = "mixed"
autodoc_preserve_defaults = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_custom_sections = [("Rewrites", "notes_style"), ("Source", "notes_style")]

# Sphinx reads pages below this folder only; outputs are those that are stored in the notebooks.
_HERE = Path(__file__).parent
shutil.copytree(_HERE.parent / "examples" / "notebooks", _HERE / "notebooks", dirs_exist_ok=True)


def link_to_pages(_app: Any, _name: str, text: list[str]) -> None:
    """Let links to notebooks, which are files in the repository, lead to their pages."""
    text[0] = text[0].replace("](../examples/notebooks/", "](notebooks/")


def setup(app: Any) -> None:
    """Register what changes sources; Sphinx calls it."""
    app.connect("source-read", link_to_pages)
