"""Arguments that commands share, and what they are parsed to."""

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from ..formats.presets import PRESETS, resolve_preset
from .texts import read_text

Folder = Annotated[Path, typer.Argument(help="A folder that `save_pretrained` of a cache wrote.")]
AsJSON = Annotated[bool, typer.Option("--json", help="One line of JSON in place of a table.")]
DEFAULT_SKIP = "sliding_window"
MAIN_PRESETS = ",".join(name for name in PRESETS if not name.startswith("tq_"))  # without the mixed pairs
Model = Annotated[Path, typer.Option(help="A model folder; the embedded model if left out.", show_default=False)]
Presets = Annotated[str, typer.Option(help="Preset names with commas between, or all.")]
Residual = Annotated[int, typer.Option(help="Newest tokens kept in the model's dtype; 0 packs every block of 64.")]
Skip = Annotated[
    str, typer.Option(help="Layers the preset is not for: boundary, sliding_window, indices, with commas; or none.")
]
SkipFormat = Annotated[
    str | None, typer.Option(help="Preset of the skipped layers; the model's dtype if left out.", show_default=False)
]
LayerPresets = Annotated[
    str | None, typer.Option(help="Presets of single layers, such as 0=fp8_e4m3,-1=tq3.", show_default=False)
]
Context = Annotated[int, typer.Option(help="Tokens per sequence.")]


def given_on_command_line(context: typer.Context, names: Iterable[str]) -> list[str]:
    """Those of a command's parameters that are no defaults."""
    sources = {name: context.get_parameter_source(name) for name in names}
    return [name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"]


def parse_presets(text: str) -> list[str]:
    """Preset names from "a,b" or "all"; raises ValueError on unknown ones."""
    names = list(PRESETS) if text.strip() == "all" else parse_names(text)
    if not names:
        raise ValueError(f"expected presets of {', '.join(PRESETS)}, or all, got none")
    return [resolve_preset(name).name for name in names]


def parse_names(text: str) -> list[str]:
    """What stands between commas."""
    return [name.strip() for name in text.split(",") if name.strip()]


def parse_skip_layers(text: str) -> tuple[str | int, ...]:
    """`skip_layers` from "boundary,sliding_window,0,-1" or "none"; the cache checks the words."""
    entries = [] if text.strip() == "none" else [entry.strip() for entry in text.split(",") if entry.strip()]
    return tuple(int(entry) if entry.lstrip("-").isdigit() else entry for entry in entries)


def parse_layer_presets(text: str | None) -> dict[int, str] | None:
    """`layer_presets` from "0=fp8_e4m3,-1=tq3"; raises ValueError on what does not look so.  The cache checks names."""
    if text is None:
        return None
    presets: dict[int, str] = {}
    for entry in text.split(","):
        index, _, name = (part.strip() for part in entry.partition("="))
        if not index.removeprefix("-").isdigit() or not name:
            raise ValueError(f"expected layer presets such as 0=fp8_e4m3,-1=tq3, got {text!r}")
        if int(index) in presets:
            raise ValueError(f"expected one preset per layer, got two for layer {index} in {text!r}")
        presets[int(index)] = name
    return presets


def read_prompt(prompt: str | None, prompt_file: Path | None) -> str:
    """The prompt, from one of the two; raises ValueError unless exactly one is given."""
    if (prompt is None) == (prompt_file is None):
        raise ValueError(f"expected one of --prompt and --prompt-file, got {'neither' if prompt is None else 'both'}")
    return prompt if prompt_file is None else read_text(prompt_file)  # type: ignore[return-value]
