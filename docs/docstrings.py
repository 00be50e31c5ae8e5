"""For the API reference: docstrings are plain text for ``help()``; here they become Markdown."""

from __future__ import annotations

import re
from typing import Any

import griffe

import lance_ray_stream
from lance_ray_stream import errors

ROLE = re.compile(r":(?:class|func|meth|mod|attr):`~?([\w.]+)`")
EXAMPLE = re.compile(r"^>>> .*\n(?:.+\n?)*", re.MULTILINE)
TABLE = re.compile(r"^(=+ +=[= ]*)\n(?:.*\n)*?\1\n(?:.*\n)*?\1$", re.MULTILINE)


class PlainDocstrings(griffe.Extension):
    """References to public names become links; bare examples and tables become blocks of code."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Called by griffe for every object that it loads."""
        if obj.docstring is None:
            return
        text = TABLE.sub(lambda table: f"```text\n{ROLE.sub(_name, table[0])}\n```", obj.docstring.value)
        text = EXAMPLE.sub(lambda example: f"```python\n{example[0].rstrip()}\n```\n", text)
        obj.docstring.value = ROLE.sub(_link, text)


def _name(role: re.Match[str]) -> str:
    return role[1]


def _link(role: re.Match[str]) -> str:
    name = role[1]
    if name in lance_ray_stream.__all__:
        return f"[`{name}`][lance_ray_stream.{name}]"
    if hasattr(errors, name):
        return f"[`{name}`][lance_ray_stream.errors.{name}]"
    return f"`{name}`"
