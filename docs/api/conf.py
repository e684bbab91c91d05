"""Sphinx: the API reference out of the docstrings, without network (``make api``)."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

project = "rlk"
extensions = ["sphinx.ext.autodoc", "sphinx.ext.napoleon"]
#: Engines and accelerators are no part of a reference's build: their modules import where they are absent.
autodoc_mock_imports = ["torch", "vllm", "megatron", "triton", "ray"]
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
#: A name that Sphinx cannot place is a mistake in a docstring; docstrings write code as `code`, not as links.
default_role = "code"
#: Operators have groups of one name (`Rounding`): a link to one of them would be a guess.
suppress_warnings = ["ref.python"]
html_theme = "alabaster"
html_theme_options = {"fixed_sidebar": True, "page_width": "1100px"}
html_copy_source = False
