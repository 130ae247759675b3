"""An extension for mkdocstrings: docstrings of this project as Markdown."""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object

#: An example of a docstring: a line that begins with >>>, and those up to the next empty line.
EXAMPLE = re.compile(r"^>>> .*(?:\n.+)*", re.MULTILINE)


class Doctests(Extension):
    """Shows the examples of docstrings as code."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = EXAMPLE.sub(r"```pycon\n\g<0>\n```", obj.docstring.value)
