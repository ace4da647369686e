"""Commands that measure and plan, and what this machine is."""

import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer

from .arguments import (
    CONFIG_FORMS,
    DEFAULT_SKIP,
    AsJSON,
    LayerPresets,
    Model,
    Presets,
    Residual,
    Skip,
    SkipFormat,
    parse_layer_presets,
    parse_names,
    parse_presets,
    parse_skip_layers,
)
from .console import progress, show, user_errors
from .models import load


def demo(
    presets: Presets = "main",
    model: Model = None,
    prompt_tokens: Annotated[int, typer.Option(help="Length of the story.")] = 1536,
    residual_length: Residual = 128,
    skip_layers: Skip = DEFAULT_SKIP,
    json_: AsJSON = False,
) -> None:
    """The same prompt, a long story with a fact in it, with the 16-bit cache and with each preset."""
    with user_errors():
        from tq_cache.storage.checks import checked_count
        from tq_cache.tools import records, runs, tables

        names, skip = parse_presets(presets), parse_skip_layers(skip_layers)
        checked_count("--prompt-tokens", prompt_tokens, least=1)
        language_model, tokenizer = load(model)
        case = runs.demo_case(tokenizer, prompt_tokens)
        with progress("generating", len(names) + 1) as advance:
            results = runs.run_demo(
                *(language_model, tokenizer, case, names, advance),
                residual_length=residual_length,
                skip_layers=skip,
            )
        said = case, results, language_model.device
        show(json_, lambda: records.demo_record(*said), lambda: tables.demo_table(*said))


def info(
    model: Annotated[
        str | None,
        typer.Option(help=f"{CONFIG_FORMS}.  To see its float8 scales.", metavar="MODEL", show_default=False),
    ] = None,
    json_: AsJSON = False,
) -> None:
    """This machine, the formats and paths chosen for it, all presets, and what a checkpoint says about its KV cache."""
    with user_errors():
        import torch

        from tq_cache.backends.hardware import detect
        from tq_cache.tools import records, sources, tables

        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        machine = records.machine_record(device, detect(device))
        config = None if model is None else sources.find_source(model).config()
        printed = [lambda: tables.machine_table(machine), tables.preset_table, tables.hardware_table]
        printed += [] if config is None else [lambda: tables.checkpoint_table(config)]
        show(json_, lambda: records.info_record(machine, config), *printed)


def plan(
    model: Annotated[str, typer.Option(help=f"{CONFIG_FORMS}.  Weights are not read.", metavar="MODEL")],
    context: Annotated[
        int | None,
        typer.Option(help="Tokens per sequence.", show_default="32768, or the model's positions if there are fewer"),
    ] = None,
    batch: Annotated[int, typer.Option(help="Sequences.")] = 1,
    memory: Annotated[
        str | None, typer.Option(help="Of the GPU, such as 24GB or 80GiB: how many tokens fit?", show_default=False)
    ] = None,
    weights_gb: Annotated[
        float | None,
        typer.Option(
            help="GB of it (10^9 bytes) that weights and the rest take; 0 leaves them out.",
            show_default="the model's weights",
        ),
    ] = None,
    presets: Presets = "all",
    residual_length: Residual = 128,
    sink_tokens: Annotated[int, typer.Option(help="First tokens kept in the model's dtype.")] = 4,
    skip_layers: Skip = DEFAULT_SKIP,
    skip_format: SkipFormat = None,
    layer_presets: LayerPresets = None,
    rotary: Annotated[
        str, typer.Option(help="Of rotary keys beside latents (MLA): exact, int8, fp8_e4m3 or fp8_e5m2.")
    ] = "exact",
    json_: AsJSON = False,
) -> None:
    """KV memory per preset, and the longest context that fits beside weights and prefill, from a config alone."""
    with user_errors():
        from tq_cache.planning import memory as planning
        from tq_cache.tools import records, sources, tables

        if weights_gb is not None and not (math.isfinite(weights_gb) and weights_gb >= 0):
            raise ValueError(f"expected --weights-gb of 0 or more, got {weights_gb:g}")
        if weights_gb and memory is None:
            raise ValueError(f"expected --memory beside --weights-gb {weights_gb:g}, got none")
        source = sources.find_source(model)
        config = source.config()
        settings = planning.PlanSettings(
            *(planning.default_context(config) if context is None else context, batch, residual_length, sink_tokens),
            skip_layers=parse_skip_layers(skip_layers),
            skip_format=skip_format,
            layer_presets=parse_layer_presets(layer_presets),
            rotary=rotary,
        )
        names = parse_presets(presets)
        given = None if memory is None else planning.parse_memory(memory)
        quantised = getattr(config, "quantization_config", None) is not None
        weights = source.stored_weights() if quantised else None  # None: from the config
        weights = weights if weights_gb is None else int(weights_gb * 1e9)
        planned = planning.plan_memory(config, names, settings, given, prefill=True, weights=weights)
        printed = lambda: tables.geometry_table(planned), lambda: tables.plan_table(planned)
        show(json_, lambda: records.plan_record(planned), *printed)


def evaluate(
    presets: Presets = "fp8_e4m3,k8v4,4bit_nc,tq4,tq3",
    model: Model = None,
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
        import torch
        from rich.console import Group

        from tq_cache.tools import baselines, runs, tables
        from tq_cache.tools import evaluate as quality
        from tq_cache.tools.files import check_outputs
        from tq_cache.tools.texts import read_texts

        caches = baselines.grid(parse_presets(presets), parse_names(settings))
        caches += baselines.peers() if peers else []
        check_outputs(out, plot)
        if plot is not None:
            quality.check_plot(plot)
        measure = quality.EvalSettings(context, decode, texts=num_texts, cases=cases, greedy=greedy, group=group)
        text = None if texts is None else read_texts(texts)
        # float32, so that KL shows what the cache does and not the rounding of the model
        language_model, tokenizer = load(model, torch.float32)
        with progress("measuring", len(caches) + 1) as advance:
            result = quality.evaluate(language_model, tokenizer, caches, measure, text, lambda row: advance())
        result = replace(result, model=str(model or runs.EMBEDDED_MODEL))  # a GGUF's config knows its folder alone
        show(json_, lambda: asdict(result), lambda: Group(*tables.eval_tables(result)))
        if out is not None:
            result.save_json(out)
        if plot is not None:
            result.save_plot(plot)


def lm_eval(
    tasks: Annotated[str, typer.Option(help="Of lm-evaluation-harness; tq_... are made here and need no download.")],
    presets: Presets = "tq4,tq3",
    model: Model = None,
    words: Annotated[int, typer.Option(help="Words of a context, of tq_... tasks.")] = 600,
    limit: Annotated[int, typer.Option(help="Documents of each task at most.")] = 100,
    batch: Annotated[int, typer.Option(help="Sequences that generate at once.")] = 1,
    residual_length: Residual = 128,
    out: Annotated[Path | None, typer.Option(help="Write the result here, as JSON.")] = None,
    json_: AsJSON = False,
) -> None:
    """lm-evaluation-harness under the 16-bit cache and each preset; contexts of what it scores are in the cache."""
    with user_errors():
        from tq_cache.tools import harness, tables
        from tq_cache.tools.files import check_outputs, write_json

        names = parse_presets(presets)
        check_outputs(out)
        results = harness.measure(
            *(*load(model), names, parse_names(tasks), words, limit, batch), residual_length=residual_length
        )
        show(json_, lambda: results, lambda: tables.harness_table(results))
        if out is not None:
            write_json(out, results)
