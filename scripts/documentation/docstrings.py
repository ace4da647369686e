"""Docstrings as Markdown: an extension of griffe, by which mkdocstrings reads this package (`mkdocs.yml`).

A docstring here describes arguments in aligned lines, `name:  text`, which Markdown would run together; they become a
definition list.  All else in it is Markdown as it stands.
"""

import re
from typing import Any

import griffe

ARGUMENT = re.compile(r"(\w+(?:, \w+)*):\s+(\S.*)")


def as_markdown(docstring: str) -> str:
    """The docstring, its blocks of arguments as definition lists."""
    return "\n\n".join(_definitions(block) if ARGUMENT.match(block) else block for block in docstring.split("\n\n"))


def _definitions(block: str) -> str:
    lines: list[str] = []
    for line in block.splitlines():
        if found := ARGUMENT.fullmatch(line):
            names = ", ".join(f"`{name}`" for name in found[1].split(", "))
            lines += ["", names, f":   {found[2]}"]
        else:
            lines.append(f"    {line.strip()}")
    return "\n".join(lines[1:])


class Docstrings(griffe.Extension):
    """Applied to every object that griffe has read."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring:
            obj.docstring.value = as_markdown(obj.docstring.value)
