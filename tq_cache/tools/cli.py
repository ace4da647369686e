"""The command line: parse, call, print."""

import math
from dataclasses import asdict, replace
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import torch
import typer
from rich.console import Group
from transformers import TextStreamer

from ..backends.hardware import detect
from ..formats.presets import FORMATS, resolve_preset
from ..planning.geometry import load_config
from ..planning.memory import PlanSettings, parse_memory, plan_memory
from ..storage.checks import checked_count
from . import baselines, harness, records, saved, tables
from . import evaluate as quality
from . import runs as demo_runs
from .arguments import (
    DEFAULT_SKIP,
    MAIN_PRESETS,
    AsJSON,
    Context,
    Folder,
    LayerPresets,
    Model,
    Presets,
    Residual,
    Skip,
    SkipFormat,
    given_on_command_line,
    parse_layer_presets,
    parse_names,
    parse_presets,
    parse_skip_layers,
    read_prompt,
)
from .console import progress, show, stdout, user_errors
from .files import check_outputs, write_json
from .texts import read_texts

app = typer.Typer(
    name="tq-cache",
    help="A quantised KV cache for Hugging Face transformers.  Exit codes: 0; 2 on bad input; 130 after Ctrl-C.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

cache_app = typer.Typer(help="Saved caches: what one holds, and whether it is whole.", no_args_is_help=True)
app.add_typer(cache_app, name="cache")


@app.command()
def demo(
    presets: Presets = MAIN_PRESETS,
    model: Model = demo_runs.EMBEDDED_MODEL,
    prompt_tokens: Annotated[int, typer.Option(help="Length of the story.")] = 1536,
    residual_length: Residual = 128,
    skip_layers: Skip = DEFAULT_SKIP,
    json_: AsJSON = False,
) -> None:
    """The same prompt, a long story with a fact in it, with the 16-bit cache and with each preset."""
    with user_errors():
        names, skip = parse_presets(presets), parse_skip_layers(skip_layers)
        checked_count("--prompt-tokens", prompt_tokens, least=1)
        language_model, tokenizer = load_model(model)
        case = demo_runs.demo_case(tokenizer, prompt_tokens)
        with progress("generating", len(names) + 1) as advance:
            runs = demo_runs.run_demo(
                *(language_model, tokenizer, case, names, advance),
                residual_length=residual_length,
                skip_layers=skip,
            )
        said = case, runs, language_model.device
        show(json_, lambda: records.demo_record(*said), lambda: tables.demo_table(*said))


@app.command()
def generate(
    context: typer.Context,
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
            help="A folder: tokens saved there with which the prompt begins are not computed again; where none are "
            "saved, those of this prompt are.",
            show_default=False,
        ),
    ] = None,
    json_: AsJSON = False,
) -> None:
    """Continue a prompt, greedily, and say what the cache took."""
    with user_errors():
        text = read_prompt(prompt, prompt_file)
        resolve_preset(preset)
        options: dict[str, Any] = {"residual_length": residual_length, "skip_layers": parse_skip_layers(skip_layers)}
        options |= {"skip_format": skip_format, "layer_presets": parse_layer_presets(layer_presets)}
        language_model, tokenizer = load_model(model)
        cache, said = demo_runs.make_cache(language_model, preset, **options), dict[str, Any]()
        if prompt_cache is not None:
            ids = tokenizer(text, return_tensors="pt")["input_ids"].to(language_model.device)
            asked, start = given_on_command_line(context, ["preset", *options]), perf_counter()
            cache, loaded = saved.prompt_cache(prompt_cache, language_model, ids, cache, asked)
            count, seconds, word = int(cache.get_seq_length()), perf_counter() - start, "loaded" if loaded else "saved"
            preset, said = cache.options["preset"], {f"{word}_tokens": count, f"{word}_seconds": seconds}
            if not json_:
                places = f"{word} {'from' if loaded else 'in'} {prompt_cache}, {seconds:.1f} s"
                stdout().print(f"{count:,} of {ids.shape[1]:,} prompt tokens {places}")
        streamer = None if json_ else TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
        run = demo_runs.generate(language_model, tokenizer, text, cache, max_new_tokens, preset, streamer=streamer)
        show(json_, lambda: records.generated_record(run) | said, lambda: tables.generated_line(run))


@app.command()
def info(
    model: Annotated[
        Path | None, typer.Option(help="A model folder or a config.json, to see its float8 scales.")
    ] = None,
    json_: AsJSON = False,
) -> None:
    """This machine, the formats and paths chosen for it, all presets, and what a checkpoint says about its KV cache."""
    with user_errors():
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        machine = records.machine_record(device, detect(device))
        config = None if model is None else load_config(model)
        printed = [lambda: tables.machine_table(machine), tables.preset_table, tables.hardware_table]
        printed += [] if config is None else [lambda: tables.checkpoint_table(config)]
        show(json_, lambda: records.info_record(machine, config), *printed)


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
    json_: AsJSON = False,
) -> None:
    """KV memory per preset, and the longest context that fits, from a config alone."""
    with user_errors():
        if not (math.isfinite(weights_gb) and weights_gb >= 0):
            raise ValueError(f"expected --weights-gb of 0 or more, got {weights_gb:g}")
        if weights_gb and memory is None:
            raise ValueError(f"expected --memory beside --weights-gb {weights_gb:g}, got none")
        left = None if memory is None else parse_memory(memory) - int(weights_gb * 1e9)
        settings = PlanSettings(
            *(context, batch, residual_length, sink_tokens, parse_skip_layers(skip_layers)),
            skip_format=skip_format,
            layer_presets=parse_layer_presets(layer_presets),
            rotary=rotary,
        )
        planned = plan_memory(load_config(model), parse_presets(presets), settings, left, prefill=True)
        printed = lambda: tables.geometry_table(planned), lambda: tables.plan_table(planned)
        show(json_, lambda: records.plan_record(planned), *printed)


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
    json_: AsJSON = False,
) -> None:
    """KL to the exact cache, perplexity, greedy agreement, recall at depth and true bytes, in float32."""
    with user_errors():
        caches = baselines.grid(parse_presets(presets), parse_names(settings))
        caches += baselines.peers() if peers else []
        check_outputs(out, plot)
        if plot is not None:
            quality.check_plot(plot)
        measure = quality.EvalSettings(context, decode, texts=num_texts, cases=cases, greedy=greedy, group=group)
        text = None if texts is None else read_texts(texts)
        # float32, so that KL shows what the cache does and not the rounding of the model
        language_model, tokenizer = load_model(model, torch.float32)
        with progress("measuring", len(caches) + 1) as advance:
            result = quality.evaluate(language_model, tokenizer, caches, measure, text, lambda row: advance())
        result = replace(result, model=str(model))  # a GGUF's config knows its folder alone
        show(json_, lambda: asdict(result), lambda: Group(*tables.eval_tables(result)))
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
    json_: AsJSON = False,
) -> None:
    """lm-evaluation-harness under the 16-bit cache and each preset; contexts of what it scores are in the cache."""
    with user_errors():
        names = parse_presets(presets)
        check_outputs(out)
        results = harness.measure(
            *(*load_model(model), names, parse_names(tasks), words, limit, batch), residual_length=residual_length
        )
        show(json_, lambda: results, lambda: tables.harness_table(results))
        if out is not None:
            write_json(out, results)


# ----------------------------------------------------------------------------------------------------- saved caches


@cache_app.command("info")
def cache_info(folder: Folder, json_: AsJSON = False) -> None:
    """What a saved cache holds; its tensors are not read."""
    with user_errors():
        said = saved.summary(folder)
        show(json_, lambda: said, lambda: saved.table(said, f"saved cache {folder}"))


@cache_app.command("verify")
def cache_verify(folder: Folder, json_: AsJSON = False) -> None:
    """Read all of a saved cache and compare checksums; exit code 2 where it is damaged."""
    with user_errors():
        count = saved.verify(folder, progress)
        said = saved.summary(folder) | {"tensors": count, "whole": True}
        line = f"{folder}: {count} tensors, {said['bytes']:,} bytes, all as they were saved"
        show(json_, lambda: said, lambda: line)


# ------------------------------------------------------------------------------------------------------------ loading


def load_model(path: Path, dtype: torch.dtype | str = "auto") -> tuple[Any, Any]:
    """Model and tokenizer."""
    if path == demo_runs.EMBEDDED_MODEL:
        torch.set_num_threads(1)  # its matrices are too small for more, which only wait for each other
    with progress("loading the model", None):
        return demo_runs.load_model(path, dtype)
