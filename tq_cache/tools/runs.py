"""Generation that is measured: the same prompt with the 16-bit cache and with each preset."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache
from transformers.generation.streamers import BaseStreamer

from ..cache import TurboQuantCache
from ..hf.caller import ATTENTION_NAME
from ..planning.geometry import load_config
from ..report import held_bytes
from .tasks import Case, build_case

# A small trained decoder that comes with the package.
EMBEDDED_MODEL = Path(__file__).parent / "embedded"
GGUF_EXTRA = "pip install gguf accelerate"


@dataclass(frozen=True)
class Generated:
    """One greedy run.

    tokens:           ids generated; `text` is what they say
    nbytes:           bytes of the cache at the end; `bytes_16bit` the keys and values held would take
    prefill_seconds:  until the first token
    tokens_per_second: of those after the first
    """

    name: str
    text: str
    tokens: tuple[int, ...]
    nbytes: int
    bytes_16bit: int
    prefill_seconds: float
    tokens_per_second: float

    @property
    def ratio(self) -> float:
        """How many times smaller than at 16 bits."""
        return self.bytes_16bit / self.nbytes

    @property
    def bits_per_element(self) -> float:
        return 16 * self.nbytes / self.bytes_16bit

    def agreement(self, other: "Generated") -> float:
        """Share of positions with the same token; what one run lacks at the end counts as different."""
        length = max(len(self.tokens), len(other.tokens))
        return sum(a == b for a, b in zip(self.tokens, other.tokens, strict=False)) / length if length else 1.0


def load_model(path: str | Path, dtype: torch.dtype | str = "auto") -> tuple[Any, Any]:
    """Model, in eval mode on the GPU if there is one, and tokenizer, from a local folder or a GGUF file.

    A GGUF file's weights are dequantised to `dtype`.  Raises ValueError unless the folder holds a config or the file is
    there and the packages that read it are; whatever else is missing, transformers says.
    """
    source, options = _source(Path(path))
    tokenizer = AutoTokenizer.from_pretrained(source, **options)
    model, loading = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, output_loading_info=True, **options)
    if "gguf_file" in options and loading["missing_keys"]:  # transformers draws them at random
        raise ValueError(f"expected all weights in {Path(path).name}, found none of {sorted(loading['missing_keys'])}")
    return model.to("cuda" if torch.cuda.is_available() else "cpu").eval(), tokenizer


def _source(path: Path) -> tuple[str, dict[str, Any]]:
    """The folder, and the options of `from_pretrained`, for a model folder or a GGUF file."""
    if path.suffix != ".gguf":
        load_config(path)
        return str(path), {"local_files_only": True}
    if not path.is_file():
        raise ValueError(f"expected a GGUF file, got {str(path)!r}, where there is none")
    for package in ("gguf", "accelerate"):  # transformers reads GGUF files with these
        if find_spec(package) is None:
            raise ValueError(f"expected the package {package} to read {path.name}, found none; {GGUF_EXTRA}")
    return str(path.parent), {"gguf_file": path.name, "local_files_only": True}


def make_cache(model: Any, preset: str | None, **cache_kwargs: Any) -> DynamicCache:
    """A new `TurboQuantCache`, or transformers' own if `preset` is None, with the attention that goes with it."""
    if preset is None:
        model.set_attn_implementation("sdpa")
        return DynamicCache(config=model.config)
    cache = TurboQuantCache(model.config, preset, **cache_kwargs)
    model.set_attn_implementation(ATTENTION_NAME)
    return cache


def demo_case(tokenizer: Any, prompt_tokens: int, seed: int = 0) -> Case:
    """A long story with memos in it, and at the end the question what one of them says, which stands at 30 % depth."""
    return build_case("copy", prompt_tokens, lambda text: len(encode(tokenizer, text)), seed, depth=0.3)


def encode(tokenizer: Any, text: str) -> list[int]:
    """Token ids of `text` without special tokens."""
    return tokenizer(text, add_special_tokens=False).input_ids


def generate(
    model: Any,
    tokenizer: Any,
    prompt: str,
    cache: DynamicCache,
    max_new_tokens: int,
    name: str = "",
    streamer: BaseStreamer | None = None,
) -> Generated:
    """Greedy `model.generate` on `cache`, timed.  Raises ValueError on an empty prompt or no tokens to make."""
    inputs = tokenizer(prompt, return_tensors="pt").to(model.device)
    length = inputs["input_ids"].shape[1]
    if not length or max_new_tokens < 1:
        raise ValueError(f"expected a prompt and max_new_tokens of 1 or more, got {length} tokens and {max_new_tokens}")
    clock = _Clock(streamer)
    out = model.generate(
        input_ids=inputs["input_ids"],
        attention_mask=inputs["attention_mask"],
        past_key_values=cache,
        max_new_tokens=max_new_tokens,
        do_sample=False,
        streamer=clock,
    )
    tokens = out[0, length:].tolist()
    nbytes, bytes_16bit = cache_bytes_held(cache)
    text = tokenizer.decode(tokens, skip_special_tokens=True)
    return Generated(name, text, tuple(tokens), nbytes, bytes_16bit, clock.first_seconds, clock.rate)


def cache_bytes_held(cache: DynamicCache) -> tuple[int, int]:
    """Bytes of a cache, and what its keys and values would take at 16 bits."""
    if isinstance(cache, TurboQuantCache):
        report = cache.report()
        return report.nbytes, report.bytes_16bit
    held = [x for layer in cache.layers for x in (getattr(layer, "keys", None), getattr(layer, "values", None))]
    return sum(map(held_bytes, cache.layers)), sum(2 * x.numel() for x in held if x is not None)


def run_demo(
    model: Any,
    tokenizer: Any,
    case: Case,
    presets: Sequence[str],
    advance: Callable[[], None] = lambda: None,
    **cache_kwargs: Any,
) -> list[Generated]:
    """The same prompt with the 16-bit cache (first) and with each preset, as many tokens as the answer and its full
    stop take; `advance` is called after each."""
    max_new_tokens = len(encode(tokenizer, case.target + "."))
    runs = []
    for preset in [None, *presets]:
        cache = make_cache(model, preset, **cache_kwargs)
        name = preset or "DynamicCache"
        runs.append(generate(model, tokenizer, case.prompt, cache, max_new_tokens, name))
        advance()
    return runs


class _Clock(BaseStreamer):
    """Notes when tokens come, and hands them on."""

    def __init__(self, streamer: BaseStreamer | None) -> None:
        self.streamer = streamer
        self.times: list[float] = []
        self.start = time.perf_counter()

    def put(self, value: torch.Tensor) -> None:
        if self.streamer is not None:
            self.streamer.put(value)
        if value.numel() == 1 and value.dim() == 1:
            self.times.append(time.perf_counter())

    def end(self) -> None:
        if self.streamer is not None:
            self.streamer.end()

    @property
    def first_seconds(self) -> float:
        return self.times[0] - self.start

    @property
    def rate(self) -> float:
        """Tokens per second after the first; 0 for one token."""
        return (len(self.times) - 1) / (self.times[-1] - self.times[0]) if len(self.times) > 1 else 0.0
