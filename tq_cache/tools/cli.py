"""The command line: parse, call, print."""

import json
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import transformers
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from transformers import TextStreamer

from ..backends.hardware import detect
from ..formats.presets import FORMATS, PRESETS, resolve_preset
from ..planning.geometry import load_config
from ..planning.memory import PlanSettings, parse_memory, plan_memory
from . import baselines, harness, saved, tables
from . import evaluate as quality
from . import runs as demo_runs
from .texts import read_text, read_texts

app = typer.Typer(
    name="tq-cache",
    help="A quantised KV cache for Hugging Face transformers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

cache_app = typer.Typer(help="Saved caches: what one holds, and whether it is whole.", no_args_is_help=True)
app.add_typer(cache_app, name="cache")

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


@app.command()
def demo(
    presets: Presets = MAIN_PRESETS,
    model: Model = demo_runs.EMBEDDED_MODEL,
    prompt_tokens: Annotated[int, typer.Option(help="Length of the story.")] = 1536,
    residual_length: Residual = 128,
    skip_layers: Skip = DEFAULT_SKIP,
) -> None:
    """The same prompt, a long story with a fact in it, with the 16-bit cache and with each preset."""
    with user_errors():
        names, skip = parse_presets(presets), parse_skip_layers(skip_layers)
        language_model, tokenizer = load_model(model)
        case = demo_runs.demo_case(tokenizer, prompt_tokens)
        with progress("generating", len(names) + 1) as advance:
            runs = demo_runs.run_demo(
                *(language_model, tokenizer, case, names, advance),
                residual_length=residual_length,
                skip_layers=skip,
            )
        stdout().print(tables.demo_table(case, runs, language_model.device))


@app.command()
def generate(
    prompt: Annotated[str | None, typer.Option(help="The prompt.")] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="A file with the prompt.")] = None,
    model: Model = demo_runs.EMBEDDED_MODEL,
    preset: Annotated[str, typer.Option(help="A preset of `tq-cache info`.")] = "tq4",
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to generate at most.")] = 64,
    residual_length: Residual = 128,
    skip_layers: Skip = DEFAULT_SKIP,
    skip_format: SkipFormat = None,
    layer_presets: LayerPresets = None,
    prompt_cache: Annotated[
        Path | None,
        typer.Option(
            help="A folder: tokens saved there with which the prompt begins are not computed again; else "
            "what this run computes is saved there.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Continue a prompt, greedily, and say what the cache took."""
    with user_errors():
        text = read_prompt(prompt, prompt_file)
        resolve_preset(preset)
        options: dict[str, Any] = {"residual_length": residual_length, "skip_layers": parse_skip_layers(skip_layers)}
        options |= {"skip_format": skip_format, "layer_presets": parse_layer_presets(layer_presets)}
        language_model, tokenizer = load_model(model)
        held, ids = None, torch.empty(0)  # looked at with a prompt_cache alone
        if prompt_cache is not None:
            ids = tokenizer(text, return_tensors="pt")["input_ids"].to(language_model.device)
            held = saved.load_beginning(prompt_cache, language_model, ids)
        cache = demo_runs.make_cache(language_model, preset, **options) if held is None else held
        if held is not None:
            preset = str(held.options["preset"])
            stdout().print(f"{held.get_seq_length():,} of {ids.shape[1]:,} prompt tokens are from {prompt_cache}")
        streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
        run = demo_runs.generate(language_model, tokenizer, text, cache, max_new_tokens, preset, streamer=streamer)
        stdout().print(tables.generated_line(run))
        if prompt_cache is not None and held is None:
            everything = torch.cat([ids, ids.new_tensor([run.tokens])], dim=1)
            saved.save_run(prompt_cache, cache, language_model, everything)
            stdout().print(f"saved {int(cache.get_seq_length()):,} tokens in {prompt_cache}")


@app.command()
def info(
    model: Annotated[
        Path | None, typer.Option(help="A model folder or a config.json, to see its float8 scales.")
    ] = None,
) -> None:
    """This machine, the formats and paths chosen for it, all presets, and what a checkpoint says about its KV cache."""
    with user_errors():
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        for table in (tables.machine_table(device, detect(device)), tables.preset_table(), tables.hardware_table()):
            stdout().print(table)
        if model is not None:
            stdout().print(tables.checkpoint_table(load_config(model)))


@app.command()
def plan(
    model: Annotated[Path, typer.Option(help="A model folder or a config.json; no weights needed.")],
    context: Context = 32768,
    batch: Annotated[int, typer.Option(help="Sequences.")] = 1,
    memory: Annotated[str | None, typer.Option(help="Memory there is, such as 24GB or 80GiB.")] = None,
    weights_gb: Annotated[float, typer.Option(help="GB of it (10^9 bytes) that weights and the rest take.")] = 0.0,
    presets: Presets = "all",
    residual_length: Residual = 128,
    sink_tokens: Annotated[int, typer.Option(help="First tokens kept in the model's dtype.")] = 4,
    skip_layers: Skip = DEFAULT_SKIP,
    skip_format: SkipFormat = None,
    layer_presets: LayerPresets = None,
    rotary: Annotated[
        str, typer.Option(help="Of rotary keys beside latents (MLA): " + ", ".join(FORMATS["rotary"]))
    ] = "exact",
) -> None:
    """KV memory per preset, and the longest context that fits, from a config alone."""
    with user_errors():
        if weights_gb and memory is None:
            raise ValueError(f"expected --memory beside --weights-gb {weights_gb:g}, got none")
        left = None if memory is None else parse_memory(memory) - int(weights_gb * 1e9)
        settings = PlanSettings(
            *(context, batch, residual_length, sink_tokens, parse_skip_layers(skip_layers)),
            skip_format=skip_format,
            layer_presets=parse_layer_presets(layer_presets),
            rotary=rotary,
        )
        planned = plan_memory(load_config(model), parse_presets(presets), settings, left)
        stdout().print(tables.geometry_table(planned))
        stdout().print(tables.plan_table(planned))


@app.command("eval")
def evaluate(
    presets: Presets = "fp8_e4m3,k8v4,4bit_nc,tq4,tq3",
    model: Annotated[
        Path, typer.Option(help="A model folder or a GGUF file; the embedded model if left out.", show_default=False)
    ] = demo_runs.EMBEDDED_MODEL,
    settings: Annotated[str, typer.Option(help="Of each preset: default, all_packed, with commas.")] = "default",
    peers: Annotated[bool, typer.Option(help="Also the noise floor, transformers' own caches and KIVI.")] = False,
    context: Annotated[int, typer.Option(help="Tokens prefilled, of texts and of recall prompts.")] = 1024,
    decode: Annotated[int, typer.Option(help="Tokens decoded per text.")] = 256,
    texts: Annotated[
        Path | None, typer.Option(help="Measure on these rather than on stories: a text, or .json of {name, text}.")
    ] = None,
    num_texts: Annotated[int, typer.Option(help="How many stories, or windows of one text.")] = 2,
    cases: Annotated[int, typer.Option(help="Recall cases per kind and depth; 0 for none.")] = 4,
    greedy: Annotated[int, typer.Option(help="Greedy tokens to agree with; 0 for none.")] = 256,
    group: Annotated[int, typer.Option(help="Texts or recall cases at once, as memory allows.")] = 12,
    out: Annotated[Path | None, typer.Option(help="Write the result here, as JSON.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Write a plot here.")] = None,
) -> None:
    """KL to the exact cache, perplexity, greedy agreement, recall at depth and true bytes, in float32."""
    with user_errors():
        caches = baselines.grid(parse_presets(presets), parse_names(settings))
        caches += baselines.peers() if peers else []
        for path in (out, plot):
            if path is not None and not path.parent.is_dir():
                raise ValueError(f"expected a folder for {str(path)!r}, there is none; make it first")
        if plot is not None:
            quality.plotting()  # missing matplotlib is better known before the measuring than after
        measure = quality.EvalSettings(context, decode, texts=num_texts, cases=cases, greedy=greedy, group=group)
        text = None if texts is None else read_texts(texts)
        # float32, so that KL shows what the cache does and not the rounding of the model
        language_model, tokenizer = load_model(model, torch.float32)
        with progress("measuring", len(caches) + 1) as advance:
            result = quality.evaluate(language_model, tokenizer, caches, measure, text, lambda row: advance())
        result = replace(result, model=str(model))  # a GGUF's config knows its folder alone
        for table in tables.eval_tables(result):
            stdout().print(table)
        if out is not None:
            result.save_json(out)
        if plot is not None:
            result.save_plot(plot)


@app.command("lm-eval")
def lm_eval(
    tasks: Annotated[str, typer.Option(help="Of lm-evaluation-harness; tq_... are made here and need no download.")],
    presets: Presets = "tq4,tq3",
    model: Model = demo_runs.EMBEDDED_MODEL,
    words: Annotated[int, typer.Option(help="Words of a context, of tq_... tasks.")] = 600,
    limit: Annotated[int, typer.Option(help="Documents of each task at most.")] = 100,
    batch: Annotated[int, typer.Option(help="Sequences that generate at once.")] = 1,
    residual_length: Residual = 128,
    out: Annotated[Path | None, typer.Option(help="Write the result here, as JSON.")] = None,
) -> None:
    """lm-evaluation-harness under the 16-bit cache and each preset; contexts of what it scores are in the cache."""
    with user_errors():
        names = parse_presets(presets)
        results = harness.measure(
            *(*load_model(model), names, parse_names(tasks), words, limit, batch), residual_length=residual_length
        )
        stdout().print(tables.harness_table(results))
        if out is not None:
            out.write_text(json.dumps(results, indent=1))


# ---------------------------------------------------------------------------------------------------------- parsing


def load_model(path: Path, dtype: torch.dtype | str = "auto") -> tuple[Any, Any]:
    """Model and tokenizer."""
    if path == demo_runs.EMBEDDED_MODEL:
        torch.set_num_threads(1)  # its matrices are too small for more, which only wait for each other
    return demo_runs.load_model(path, dtype)


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


# ----------------------------------------------------------------------------------------------------- saved caches


@cache_app.command("info")
def cache_info(folder: Folder, json_: AsJSON = False) -> None:
    """What a saved cache holds; its tensors are not read."""
    with user_errors():
        said = saved.summary(folder)
        if json_:
            print(json.dumps(said))
        else:
            stdout().print(saved.table(said, f"saved cache {folder}"))


@cache_app.command("verify")
def cache_verify(folder: Folder, json_: AsJSON = False) -> None:
    """Read all of a saved cache and compare checksums; exit code 2 where it is damaged."""
    with user_errors():
        count = saved.verify(folder, progress)
        said = saved.summary(folder)
        if json_:
            print(json.dumps(said | {"tensors": count, "whole": True}))
        else:
            stdout().print(f"{folder}: {count} tensors, {said['bytes']:,} bytes, all as they were saved")


# --------------------------------------------------------------------------------------------------------- printing


def stdout() -> Console:
    """Standard output, at least 120 wide where it is no terminal, so that tables in files and pipes are whole."""
    return Console(width=None if sys.stdout.isatty() else 120)


@contextmanager
def progress(description: str, total: int) -> Iterator[Callable[[], None]]:
    """A progress bar on standard error; gives the function that moves it by one step."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(description, total=total)
        yield lambda: bar.advance(task)


@contextmanager
def user_errors() -> Iterator[None]:
    """Errors of input as one line and exit code 2, warnings as one line each, nothing else on standard error."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    with warnings.catch_warnings(record=True) as caught:
        try:
            yield
        except (ValueError, TypeError, NotImplementedError, OSError) as error:
            message = " ".join(str(error).split())
            console.print(f"error: {message}", markup=False)
            raise typer.Exit(2) from None
        finally:
            for message in dict.fromkeys(str(warning.message) for warning in caught):
                console.print(f"warning: {' '.join(message.split())}", markup=False)
