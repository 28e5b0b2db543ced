"""A griffe extension for the site: shows the house template's ``Example:`` as code."""

from __future__ import annotations

import re
from typing import Any

import griffe


class Examples(griffe.Extension):
    """Renames the section ``Example:`` to ``Examples:``, the name under which griffe knows it."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Called for every object that griffe reads."""
        if obj.docstring:
            obj.docstring.value = re.sub(r"^(\s*)Example:$", r"\1Examples:", obj.docstring.value, flags=re.MULTILINE)
