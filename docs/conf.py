"""How Sphinx builds these pages: `make docs`, with every warning an error."""

from __future__ import annotations

import importlib.metadata

project = "fxkit"
author = "fxkit contributors"
copyright = "2026, fxkit contributors"
release = version = importlib.metadata.version("fxkit")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build"]
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
