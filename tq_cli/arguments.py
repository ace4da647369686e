"""Arguments that commands share, and what they are parsed to."""

import runpy
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

MODEL_FORMS = "a model folder, a GGUF file, or a model's id on the Hugging Face Hub"
CONFIG_FORMS = f"{MODEL_FORMS}; a config.json will do"
DEFAULT_SKIP = "sliding_window"

Folder = Annotated[Path, typer.Argument(help="A folder that `save_pretrained` of a cache wrote.")]
AsJSON = Annotated[bool, typer.Option("--json", help="One line of JSON in place of a table.")]
Model = Annotated[
    str | None, typer.Option(help=f"MODEL: {MODEL_FORMS}.", metavar="MODEL", show_default="the embedded model")
]
Dtype = Annotated[str, typer.Option(help="Of the weights: auto (as stored), bfloat16, float16 or float32.")]
Device = Annotated[str | None, typer.Option(help="Such as cpu or cuda:1.", show_default="a GPU if there is one")]
Preset = Annotated[str, typer.Option(help="A preset of `tq-cache info`.")]
Presets = Annotated[str, typer.Option(help="Preset names with commas between; main: those without mixed pairs; all.")]
Residual = Annotated[int, typer.Option(help="Newest tokens kept in the model's dtype; 0 packs every block of 64.")]
Skip = Annotated[
    str, typer.Option(help="Layers the preset is not for: boundary, sliding_window, indices, with commas; or none.")
]
SkipFormat = Annotated[str | None, typer.Option(help="Preset of the skipped layers.", show_default="the model's dtype")]
LayerPresets = Annotated[
    str | None, typer.Option(help="Presets of single layers, such as 0=fp8_e4m3,-1=tq3.", show_default=False)
]
System = Annotated[str | None, typer.Option(help="A system message before the first one.", show_default=False)]
Temperature = Annotated[float, typer.Option(help="Of sampling; 0: greedy.")]
TopP = Annotated[
    float | None, typer.Option(help="Sample among the likeliest tokens of this probability.", show_default=False)
]
TopK = Annotated[int | None, typer.Option(help="Sample among so many of the likeliest tokens.", show_default=False)]
Seed = Annotated[int | None, typer.Option(help="Of sampling.", show_default=False)]


def print_version(asked: bool) -> None:
    """The package's version, read without importing it, and the end."""
    if asked:
        spec = find_spec("tq_cache")
        assert spec is not None and spec.origin is not None
        print(f"tq-cache {runpy.run_path(str(Path(spec.origin).with_name('version.py')))['__version__']}")
        raise typer.Exit


def given_on_command_line(context: typer.Context, names: Iterable[str]) -> list[str]:
    """Those of a command's parameters that are no defaults."""
    sources = {name: context.get_parameter_source(name) for name in names}
    return [name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"]


def parse_presets(text: str) -> list[str]:
    """Preset names from "a,b", "main" or "all"; raises ValueError on unknown ones."""
    from tq_cache.formats.presets import PRESETS, resolve_preset

    named = {"all": list(PRESETS), "main": [name for name in PRESETS if not name.startswith("tq_")]}
    names = named.get(text.strip(), parse_names(text))
    if not names:
        raise ValueError(f"expected presets of {', '.join(PRESETS)}, main or all, got none")
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


def parse_sampling(temperature: float, top_p: float | None, top_k: int | None, seed: int | None) -> dict[str, Any]:
    """Arguments of `generate()`; seeds torch.  Raises ValueError on numbers out of range, or without a temperature."""
    if not 0 <= temperature < float("inf"):
        raise ValueError(f"expected --temperature of 0 or more, got {temperature:g}")
    given = {"--top-p": top_p, "--top-k": top_k, "--seed": seed}
    if not temperature:
        if wrong := [name for name, value in given.items() if value is not None]:
            raise ValueError(f"expected --temperature above 0 beside {wrong[0]}, got 0, which is greedy")
        return {"do_sample": False}
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"expected --top-p above 0 and up to 1, got {top_p:g}")
    if top_k is not None and top_k < 1:
        raise ValueError(f"expected --top-k of 1 or more, got {top_k}")
    if seed is not None:
        import torch

        torch.manual_seed(seed)
    # Without these two, those of the model's own generation config: none of top_p, 50 of top_k.
    return {"do_sample": True, "temperature": temperature, "top_p": top_p or 1.0, "top_k": top_k or 0}


def read_prompt(prompt: str | None, prompt_file: Path | None) -> str:
    """The prompt, from one of the two; raises ValueError unless exactly one is given."""
    if (prompt is None) == (prompt_file is None):
        raise ValueError(f"expected one of --prompt and --prompt-file, got {'neither' if prompt is None else 'both'}")
    if prompt_file is None:
        return str(prompt)
    from tq_cache.tools.texts import read_text

    return read_text(prompt_file)
