"""Generation that is measured: the same prompt with the 16-bit cache and with each preset."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache
from transformers.generation.streamers import BaseStreamer

from ..cache import TurboQuantCache
from ..hf.caller import ATTENTION_NAME
from ..report import held_bytes
from .sources import find_source
from .tasks import Case, build_case

# A small trained decoder that comes with the package.
EMBEDDED_MODEL = Path(__file__).parent / "embedded"


@dataclass(frozen=True)
class Generated:
    """One run.

    tokens:           ids generated; `text` is what they say
    nbytes:           bytes of the cache at the end, in the `dtype` that the model runs in
    bytes_16bit:      those that the keys and values held would take at 16 bits
    prefill_seconds:  until the first token
    tokens_per_second: of those after the first
    nbytes_16bit:     bytes of the same cache in a 16-bit model, where exact tokens take 2 bytes an element
    held:             in words, what the cache holds and what it saves (`CacheReport.held_line`); "" of the 16-bit cache
    """

    name: str
    text: str
    tokens: tuple[int, ...]
    nbytes: int
    bytes_16bit: int
    prefill_seconds: float
    tokens_per_second: float
    dtype: str
    nbytes_16bit: int
    held: str = ""

    @property
    def ratio(self) -> float:
        """How many times smaller a 16-bit model's cache is."""
        return self.bytes_16bit / self.nbytes_16bit

    @property
    def bits_per_element(self) -> float:
        """Of a 16-bit model's cache."""
        return 16 * self.nbytes_16bit / self.bytes_16bit

    def agreement(self, other: "Generated") -> float:
        """Share of positions with the same token; what one run lacks at the end counts as different."""
        length = max(len(self.tokens), len(other.tokens))
        return sum(a == b for a, b in zip(self.tokens, other.tokens, strict=False)) / length if length else 1.0


def load_model(
    path: str | Path, dtype: torch.dtype | str = "auto", device: torch.device | str | None = None
) -> tuple[Any, Any]:
    """Model, in eval mode, and tokenizer, of a folder, a GGUF file or an id on the Hub (`sources`).

    dtype:  of the weights; "auto": as stored.  A GGUF file's weights are dequantised, with "auto" to bfloat16 on a GPU
            and to float32 elsewhere
    device: by default the GPU if there is one

    Raises ValueError where there is no such model, dtype or device; whatever else is missing, transformers says.
    """
    device = _device(device)
    source = find_source(path)
    dtype = (torch.bfloat16 if device.type == "cuda" else torch.float32) if source.gguf and dtype == "auto" else dtype
    if source.options and not source.gguf:
        source.config()  # says more about a folder without a config, or with a broken one
    options = source.options | {"trust_remote_code": False}
    tokenizer = AutoTokenizer.from_pretrained(source.folder, **options)
    model, loading = AutoModelForCausalLM.from_pretrained(
        source.folder, dtype=dtype, output_loading_info=True, **options
    )
    if source.gguf and loading["missing_keys"]:  # transformers draws them at random
        raise ValueError(f"expected all weights in {Path(path).name}, found none of {sorted(loading['missing_keys'])}")
    return model.to(device).eval(), tokenizer


def _device(name: torch.device | str | None) -> torch.device:
    """The device of that name, which must be here."""
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"expected a device such as cpu or cuda:1, got {name!r}: {error}") from None
    return device


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
    prompt: str | torch.Tensor,
    cache: DynamicCache,
    max_new_tokens: int,
    name: str = "",
    streamer: BaseStreamer | None = None,
    **sampling: Any,
) -> Generated:
    """`model.generate` on `cache`, timed; greedy, unless `sampling` has other arguments of it.

    prompt: a text, or its token ids [1, T]

    Raises ValueError on an empty prompt or no tokens to make.
    """
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"] if isinstance(prompt, str) else prompt
    ids = ids.to(model.device)
    length = ids.shape[1]
    if not length or max_new_tokens < 1:
        raise ValueError(f"expected a prompt and max_new_tokens of 1 or more, got {length} tokens and {max_new_tokens}")
    clock = Clock(streamer)
    out = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        past_key_values=cache,
        max_new_tokens=max_new_tokens,
        streamer=clock,
        **({"do_sample": False} | sampling),
    )
    tokens = out[0, length:].tolist()
    text = tokenizer.decode(tokens, skip_special_tokens=True)
    dtype = f"{model.dtype}".removeprefix("torch.")
    nbytes, bytes_16bit, nbytes_16bit, held = _cache_held(cache)
    speed = clock.first_seconds, clock.rate
    return Generated(name, text, tuple(tokens), nbytes, bytes_16bit, *speed, dtype, nbytes_16bit, held)


def _cache_held(cache: DynamicCache) -> tuple[int, int, int, str]:
    """Bytes of a cache, of its keys and values at 16 bits, of the same cache in a 16-bit model; the same in words."""
    if isinstance(cache, TurboQuantCache):
        report = cache.report()
        return report.nbytes, report.bytes_16bit, report.nbytes_16bit, report.held_line()
    pairs = [x for layer in cache.layers for x in (getattr(layer, "keys", None), getattr(layer, "values", None))]
    exact = sum(2 * x.numel() for x in pairs if x is not None)
    return sum(map(held_bytes, cache.layers)), exact, exact, ""


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


class Clock(BaseStreamer):
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
