"""ARCHITECTURES.md's first part: architectures by what happens to their layers, not one by one."""

from collections.abc import Iterable
from typing import NamedTuple

from tq_cache.planning.layers import WINDOWED

# Kinds of layers with a state in place of keys and values, or beside them.
STATES = frozenset({"linear_attention", "conv", "mamba", "hybrid", "hybrid_sliding"})


class Row(NamedTuple):
    """What one architecture's run showed.

    kinds:  of its cache's layers
    packed: number of those that held packed tokens, of `layers`
    reads:  what attention reads of them
    """

    model_type: str
    kinds: frozenset[str]
    packed: int
    layers: int
    reads: str


# In the order of the page: a heading, and what it means.
GROUPS = {
    "packed": ("Every layer packed", "Full attention everywhere: each layer is packed, and attention reads the bits."),
    "latents": ("Latents (MLA)", "Latents are packed in place of keys and values, and never expanded: sizes below."),
    "sliding": (
        "Sliding windows",
        "Layers with full attention are packed. Those with a sliding window stay unquantized: the window bounds them.",
    ),
    "hybrid": (
        "Hybrids",
        "Layers with attention are packed. Linear attention, state space models and convolutions keep their states.",
    ),
    "dequantised": (
        "Packed, and read dequantised",
        "Their attention is their own and cannot read bits: each step dequantises all of a layer's keys and values.",
    ),
    "nothing": (
        "Nothing packed",
        "They run, and stay unquantized: windows, states or compressed tokens. A Mistral without windows is packed.",
    ),
}


def group(row: Row) -> str:
    """The one of `GROUPS` that it belongs to."""
    if not row.packed:
        return "nothing"
    if "latents" in row.reads:
        return "latents"
    if row.reads == "dequantised":
        return "dequantised"
    if row.kinds & STATES:
        return "hybrid"
    return "sliding" if row.kinds & set(WINDOWED) else "packed"


REFUSED = "Refused, or not tested"


def grouped(rows: Iterable[Row], refused: int) -> str:
    """The groups, each with its architectures by the share of layers that is packed, in Markdown.

    refused: the number of those that the last part of the page lists
    """
    members: dict[str, dict[str, list[str]]] = {name: {} for name in GROUPS}
    for row in rows:
        members[group(row)].setdefault(f"{row.packed} of {row.layers}", []).append(f"`{row.model_type}`")
    parts = ["| group | architectures | |", "|---|---|---|"]
    held = {name: shares for name, shares in members.items() if shares}
    for name, shares in held.items():
        heading, words = GROUPS[name]
        parts.append(f"| [{heading}](#{anchor(heading)}) | {sum(map(len, shares.values()))} | {words} |")
    parts.append(
        f"| [{REFUSED}](#{anchor(REFUSED)}) | {refused} | They have no cache of keys and values, or one of their own. |"
    )
    for name, shares in held.items():
        parts.append(f"\n## {GROUPS[name][0]}")
        for share in sorted(shares, key=lambda share: -len(shares[share])):
            parts.append(f"\n**{share} layers**: {', '.join(shares[share])}.")
    return "\n".join(parts)


def anchor(heading: str) -> str:
    """Where a heading is on a page."""
    return "".join(x for x in heading.lower().replace(" ", "-") if x.isalnum() or x == "-")
