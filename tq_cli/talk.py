"""`tq-cache generate` and `tq-cache chat`."""

import sys
from contextlib import suppress
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import typer

from .arguments import (
    DEFAULT_SKIP,
    MODEL_FORMS,
    AsJSON,
    Device,
    Dtype,
    LayerPresets,
    Model,
    Preset,
    Residual,
    Seed,
    Skip,
    SkipFormat,
    System,
    Temperature,
    TopK,
    TopP,
    given_on_command_line,
    parse_layer_presets,
    parse_sampling,
    parse_skip_layers,
    read_prompt,
)
from .console import INPUT_ERRORS, print_error, show, stderr, stdout, user_errors, warnings_as_lines
from .models import load


def generate(
    context: typer.Context,
    prompt: Annotated[str | None, typer.Option(help="The prompt.", show_default=False)] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="A file with the prompt.", show_default=False)] = None,
    model: Model = None,
    system: System = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the prompt itself, without the chat template.")] = False,
    preset: Preset = "tq4",
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to generate at most.")] = 256,
    temperature: Temperature = 0.0,
    top_p: TopP = None,
    top_k: TopK = None,
    seed: Seed = None,
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
    dtype: Dtype = "auto",
    device: Device = None,
    json_: AsJSON = False,
) -> None:
    """Answer a prompt, or continue it where the model has no chat template, and say what the cache took."""
    with user_errors():
        from transformers import TextStreamer

        from tq_cache.formats.presets import resolve_preset
        from tq_cache.tools import prompts, records, runs, saved, tables

        text = read_prompt(prompt, prompt_file)
        resolve_preset(preset)
        options: dict[str, Any] = {"residual_length": residual_length, "skip_layers": parse_skip_layers(skip_layers)}
        options |= {"skip_format": skip_format, "layer_presets": parse_layer_presets(layer_presets)}
        sampling = parse_sampling(temperature, top_p, top_k, seed)
        language_model, tokenizer = load(model, dtype, device)
        ids = prompts.prompt_ids(tokenizer, text, system, raw).to(language_model.device)
        cache, said = runs.make_cache(language_model, preset, **options), dict[str, Any]()
        if prompt_cache is not None:
            asked, start = given_on_command_line(context, ["preset", *options]), perf_counter()
            cache, loaded = saved.prompt_cache(prompt_cache, language_model, ids, cache, asked)
            count, seconds, word = int(cache.get_seq_length()), perf_counter() - start, "loaded" if loaded else "saved"
            preset, said = cache.options["preset"], {f"{word}_tokens": count, f"{word}_seconds": seconds}
            if not json_:
                places = f"{word} {'from' if loaded else 'in'} {prompt_cache}, {seconds:.1f} s"
                stdout().print(f"{count:,} of {ids.shape[1]:,} prompt tokens {places}")
        streamer = None if json_ else TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
        run = runs.generate(language_model, tokenizer, ids, cache, max_new_tokens, preset, streamer, **sampling)
        show(json_, lambda: records.generated_record(run) | said, lambda: tables.generated_line(run))


def chat(
    model: Annotated[str, typer.Argument(help=f"A chat model: {MODEL_FORMS}.", metavar="MODEL")],
    system: System = None,
    preset: Preset = "tq4",
    max_new_tokens: Annotated[int, typer.Option(help="Tokens of an answer at most.")] = 512,
    temperature: Temperature = 0.0,
    top_p: TopP = None,
    top_k: TopK = None,
    seed: Seed = None,
    residual_length: Residual = 128,
    skip_layers: Skip = DEFAULT_SKIP,
    dtype: Dtype = "auto",
    device: Device = None,
) -> None:
    """Talk with a chat model: one cache for the whole conversation, so that a turn computes its new tokens alone."""
    with user_errors():
        from transformers import TextStreamer

        from tq_cache.formats.presets import resolve_preset
        from tq_cache.tools import conversation, runs

        resolve_preset(preset)
        options: dict[str, Any] = {"residual_length": residual_length, "skip_layers": parse_skip_layers(skip_layers)}
        sampling = parse_sampling(temperature, top_p, top_k, seed)
        language_model, tokenizer = load(model, dtype, device)
        talk = conversation.Conversation(
            language_model,
            tokenizer,
            lambda: runs.make_cache(language_model, preset, **options),
            *(system, max_new_tokens, sampling),
        )
        _loop(talk, TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True))


def _loop(talk: Any, streamer: Any) -> None:
    """Lines from standard input until they end; errors of input end a turn, not the loop."""
    from tq_cache.tools import chat as commands

    with suppress(ImportError):
        import readline  # noqa: F401  line editing and history in input()
    terminal = sys.stdin.isatty()
    if terminal:
        _note("/help lists the commands; Ctrl-C stops an answer, Ctrl-D ends")
    while True:
        try:
            line = input("> " if terminal else "")
        except EOFError:
            return
        except KeyboardInterrupt:
            _note("\nCtrl-D or /exit ends")
            continue
        try:
            with warnings_as_lines():
                if line.startswith("/"):
                    if not commands.obey(line, talk, print):
                        return
                elif line.strip():
                    commands.answer(line, talk, streamer, _note)
        except INPUT_ERRORS as error:
            print_error(error)
        except KeyboardInterrupt:
            _note("\nstopped; this question is forgotten, and the next one computes the conversation again")


def _note(text: str) -> None:
    """What is no answer, dim, on standard error."""
    stderr().print(text, style="dim", markup=False)
