"""The reference of the public API, docs/API.md, from the docstrings.

    python scripts/api_reference.py

Every name in `tq_cache.__all__`, and of a class what this package defines: signatures and docstrings as they stand.
"""

import inspect
from pathlib import Path
from types import FunctionType
from typing import Any

import tq_cache

FILE = Path(__file__).parent.parent / "docs/API.md"


def reference() -> str:
    """The whole page."""
    pages = [f"# tq_cache\n\n{_block(inspect.getdoc(tq_cache) or '')}\n\nMade by `scripts/api_reference.py`.\n"]
    for name in sorted(tq_cache.__all__, key=str.lower):
        found = getattr(tq_cache, name)
        if isinstance(found, FunctionType):
            pages.append(f"## {name}\n\n{_documented(f'{name}{_signature(found)}', found)}\n")
        else:
            pages.append(_class(name, found) if inspect.isclass(found) else _value(name, found))
    return "\n".join(pages)


def _class(name: str, cls: type) -> str:
    signature = "" if issubclass(cls, Exception) else _signature(cls)
    lines = [f"## {name}\n", _documented(f"class {name}{signature}", cls)]
    bases = [base for base in reversed(cls.__mro__) if base.__module__.startswith("tq_cache")]
    for member, found in {name: x for base in bases for name, x in vars(base).items()}.items():
        if isinstance(found, classmethod):
            found = getattr(cls, member).__func__
        if member.startswith("_") or not isinstance(found, (FunctionType, property)):
            continue
        heading = member if isinstance(found, property) else f"{member}{_signature(found)}"
        lines.append(f"\n### {name}.{member}\n\n{_documented(heading, found)}")
    return "\n".join(lines) + "\n"


def _value(name: str, value: Any) -> str:
    text = repr(value) if isinstance(value, str) else "\n".join(f"{key}: {_names(x)}" for key, x in value.items())
    return f"## {name}\n\n{_block(text)}\n"


def _names(value: Any) -> str:
    """Formats by name; a preset by what it stores."""
    if isinstance(value, dict):
        return ", ".join(value)
    return f"keys {value.key.name}, values {value.value.name}"


def _signature(function: Any) -> str:
    return str(inspect.signature(function)).replace("'", "")


def _documented(heading: str, found: Any) -> str:
    return _block(f"{heading}\n\n{inspect.getdoc(found) or ''}")


def _block(text: str) -> str:
    return f"```text\n{text.strip()}\n```"


if __name__ == "__main__":
    FILE.parent.mkdir(exist_ok=True)
    FILE.write_text(reference())
