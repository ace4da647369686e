"""Every architecture on preallocated memory: forward passes, generate(), and `enable` with compiled steps.

`python tests/preallocated_sweep.py [model_type ...]` prints what became of each, and the counts.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import transformers
from architectures import ARCHITECTURES, POSITIONS, VOCAB, build, prompt
from transformers import CompileConfig, DynamicCache, PreTrainedModel

import tq_cache
from tq_cache import TurboQuantCache
from tq_cache.hf.layers import PreallocatedLayer

# These look their attention up in a dict of their own, which knows no registered name: the cache dequantises for them.
OWN_ATTENTION_ONLY = {"falcon", "git", "gpt_neo", "gptj"}
# Their own sparse attention, whose arguments "turboquant" refuses, is part of the sdpa path.
SPARSE_BY_BLOCKS = {"minimax_m3_vl_text"}
STEPS = 5
EXACT = dict(residual_length=POSITIONS)  # nothing is packed: transformers' own cache is the reference
PACKED = dict(preset="tq4", residual_length=0)
LENGTHS = {"exact": 24, "packed": 140}  # 128 packed; no step packs more, which a growing cache still reads exact
PADDING = 9  # tokens on the left of the second sequence
TOLERANCE = 1e-3  # standard deviations of the logits: float32, sums in another order


def attention_for(model_type: str) -> str | None:
    """The attention to load a model with: "turboquant", or its default (None) where that is not possible."""
    return None if model_type in OWN_ATTENTION_ONLY | SPARSE_BY_BLOCKS else "turboquant"


def inputs_for(model: PreTrainedModel, length: int, padded: bool) -> dict[str, torch.Tensor]:
    """A prompt of two sequences, the second with padding on its left if asked for."""
    inputs = prompt(model, length)
    if padded:
        inputs["input_ids"][1, :PADDING] = inputs["attention_mask"][1, :PADDING] = 0
    return inputs


def make_cache(model: PreTrainedModel, **options: Any) -> TurboQuantCache:
    """A TurboQuantCache of this model, where need be one that packs nothing."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "no.* layer .*can be packed|no layer of this model will be packed")
        return TurboQuantCache(model.config, **options)


def forwards(model: PreTrainedModel, cache: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """Logits of the prompt's last token and of STEPS fixed tokens, one at a time, [B, 1 + STEPS, vocabulary]."""
    tokens, mask, logits = inputs["input_ids"], inputs["attention_mask"], []
    coming = torch.randint(3, VOCAB, (STEPS, len(tokens), 1), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        for token in [*coming, None]:
            logits.append(model(tokens, attention_mask=mask, past_key_values=cache, use_cache=True).logits[:, -1])
            tokens, mask = token, torch.cat([mask, mask.new_ones(len(mask), 1)], dim=1)
    return torch.stack(logits, dim=1)


def generated(model: PreTrainedModel, cache: Any, inputs: dict[str, torch.Tensor], **options: Any) -> torch.Tensor:
    """Logits of the same steps in generate(), [B, 1 + STEPS, vocabulary]."""
    out = model.generate(
        **inputs,
        **{} if cache is None else dict(past_key_values=cache),
        max_new_tokens=1 + STEPS,
        output_logits=True,
        return_dict_in_generate=True,
        **options,
    )
    assert cache is None or out.past_key_values is cache
    generated.cache = out.past_key_values  # type: ignore[attr-defined]
    return torch.stack(out.logits, dim=1)


def compile_config() -> CompileConfig:
    """Steps are compiled on the CPU, too, as far as Dynamo: the graph runs as it was traced."""
    config = CompileConfig(backend="eager", fullgraph=False, mode=None)
    config._compile_all_devices = True
    return config


def distance(logits: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference in standard deviations, up to the first step at which a near tie may split two greedy runs."""
    same = (logits.argmax(-1) == expected.argmax(-1)).all(dim=0)
    steps = len(same) if same.all() else int(same.int().argmin()) + 1
    return float((logits[:, :steps] - expected[:, :steps]).abs().max() / expected.std())


def by_hand(model_type: str, packed: bool, padded: bool, run: Callable[..., torch.Tensor]) -> str:
    """One architecture with a max_cache_len given by hand."""
    model = build(model_type, attention_for(model_type))
    options = PACKED if packed else EXACT
    try:
        cache = make_cache(model, max_cache_len=POSITIONS // 2, **options)
    except NotImplementedError as error:
        return f"refused: {str(error).split(', got ', 1)[1].split(';')[0]}"
    inputs = inputs_for(model, LENGTHS["packed" if packed else "exact"], padded)
    reference = make_cache(model, **options) if packed else DynamicCache(config=model.config)
    apart = distance(run(model, cache, inputs), run(model, reference, inputs))
    assert apart < TOLERANCE, f"logits are {apart:.4f} standard deviations from the reference's"
    preallocated = any(isinstance(layer, PreallocatedLayer) for layer in cache.layers)
    return "equal" if preallocated else "equal, sliding windows only"


def enabled(model_type: str, packed: bool, padded: bool) -> str:
    """One architecture behind `enable`, whose steps are compiled where the model and its layers allow."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model, options = build(model_type), PACKED if packed else EXACT
    inputs = inputs_for(model, LENGTHS["packed" if packed else "exact"], padded)
    reference = None
    if packed:
        if attention_for(model_type) is not None:
            model.set_attn_implementation("turboquant")
        reference = make_cache(model, **options)
    expected = generated(model, reference, inputs)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*has an attention of its own|no.* layer")
        tq_cache.enable(model, max_cache_len=POSITIONS // 2, **options)
        apart = distance(generated(model, None, inputs, compile_config=compile_config()), expected)
    cache = generated.cache  # type: ignore[attr-defined]
    cache = getattr(cache, "self_attention_cache", cache)
    assert isinstance(cache, TurboQuantCache)
    preallocated = cache._max_cache_len is not None  # also where every layer slides
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert preallocated or not graphs, f"{graphs} graphs over memory that grows"
    assert apart < TOLERANCE, f"logits are {apart:.4f} standard deviations from the reference's"
    if not preallocated:
        return "equal, grows"
    return "equal, compiled" if graphs else "equal, preallocated, not compiled"  # Llama 4, by transformers


WAYS: dict[str, Callable[[str, bool, bool], str]] = {
    "forward": lambda name, packed, padded: by_hand(name, packed, padded, forwards),
    "generate": lambda name, packed, padded: by_hand(name, packed, padded, generated),
    "enable": enabled,
}


def main(model_types: list[str]) -> None:
    """Print what became of each architecture, and the counts."""
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    ways = [name for name in WAYS if name in model_types] or list(WAYS)
    counts: Counter[tuple[str, str]] = Counter()
    start = time.perf_counter()
    for model_type in [name for name in model_types if name not in WAYS] or ARCHITECTURES:
        for way in ways:
            for packed in (False, True):
                for padded in (False, True):
                    try:
                        outcome = WAYS[way](model_type, packed, padded)
                    except Exception as error:
                        outcome = f"FAIL {type(error).__name__}: {' '.join(str(error).split())[:160]}"
                    counts[way, outcome] += 1
                    if outcome != "equal":
                        print(
                            f"{model_type:24} {way:8} {'packed' if packed else 'exact':6} {padded=!s:5} {outcome}",
                            flush=True,
                        )
    for (way, outcome), count in sorted(counts.items()):
        print(f"{way:8} {count:4} {outcome}")
    print(f"{time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main(sys.argv[1:])
