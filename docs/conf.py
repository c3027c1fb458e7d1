"""How Sphinx builds the documentation; `make docs` runs it."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path

import saltflat

sys.path.insert(0, str(Path(__file__).parent))  # for extension.py
os.environ["COLUMNS"] = "90"  # how wide a table that is printed may be

project = "saltflat"
author = "the saltflat authors"
copyright = author
version = release = saltflat.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_gallery.gen_gallery",
    "extension",
]
exclude_patterns = ["_build", "gallery"]
suppress_warnings = ["config.cache"]

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

# Docstrings are plain text with names and code between single backticks.
default_role = "code"
autodoc_inherit_docstrings = False
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
napoleon_google_docstring = False
napoleon_use_ivar = True
napoleon_use_rtype = False
python_maximum_signature_line_length = 90
python_use_unqualified_type_names = True

copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

sphinx_gallery_conf = {
    "examples_dirs": "gallery",
    "gallery_dirs": "examples",
    "filename_pattern": "/plot_",
    "within_subsection_order": "FileNameSortKey",
    "abort_on_example_error": True,
    "download_all_examples": False,
    "show_memory": False,
    "write_computation_times": False,
    "show_signature": False,
    "min_reported_time": 1,
    "remove_config_comments": True,
    "matplotlib_animations": False,
    "reset_modules": ("matplotlib",),
}

html_theme = "furo"
html_title = f"saltflat {release}"
html_show_sphinx = False
html_static_path = ["_static"]
html_css_files = ["saltflat.css"]
html_theme_options = {"navigation_with_keys": True}

# Warnings that an example raises are shown with it, without the place where a file lay.
warnings.formatwarning = lambda message, category, *_, **__: f"{category.__name__}: {message}\n"
