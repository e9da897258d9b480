"""Sphinx's settings for the manual: `python -m sphinx -W -b html docs build/docs` builds it, without a network."""

from hvdlite_launcher.version import VERSION

project = "hvdlite"
author = "the hvdlite authors"
release = version = VERSION

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx_copybutton"]
myst_enable_extensions = ["colon_fence", "deflist"]
# So that links such as errors.md#stalls work, here and where the pages are read as plain files.
myst_heading_anchors = 3
# `name` in docstrings is code; types in signatures are written as in the source.
default_role = "code"
autodoc_typehints = "none"
autodoc_member_order = "bysource"

html_theme = "furo"
html_title = "hvdlite"
exclude_patterns = ["_build"]
html_extra_path = ["llms.txt"]
copybutton_prompt_text = r"^\$ "
copybutton_prompt_is_regexp = True
