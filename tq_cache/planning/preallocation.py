"""Models that cannot read preallocated memory, from a config alone.

A step over preallocated memory sees keys for all the room there is, and a mask that hides those not written yet.  A
model that builds masks or biases of its own for the tokens held so far does not fit them: it raises, or attends to
memory that was never written.  transformers' own `StaticCache` fails in the same models.  Nothing in a config or a
model class says so (`_can_compile_fullgraph` also rejects models that are right), so they are listed here.
`tests/preallocated_sweep.py` runs every architecture of transformers and finds the next one.
"""

from typing import Any

from ..compat import CHUNKED_MASKS_FAIL, decoder_config, layer_kinds
from ..storage.checks import checked_count
from .layers import BLOCK_SPARSE, INDEXED

_BIAS = "whose position biases are made for the tokens held, not for the room"
_MASK = "whose attention makes a causal mask of its own, which shows memory not written yet"
_PREFIX = "which makes masks of its own for prompt and prefix"

MODELS = {
    "bloom": _BIAS,  # ALiBi, as Falcon's with `alibi`
    "cpmant": _PREFIX,  # it also runs the whole text again at every step
    "git": _PREFIX,
    "gpt_neo": _MASK,
    "inkling_text": _BIAS,
    "inkling2_text": _BIAS,
    "moshi": "whose mask takes its sliding windows for full attention",
    "prophetnet": "whose n-gram attention counts the keys it is given",
}


def why_not_preallocated(config: Any) -> str:
    """What is in the way of `max_cache_len` with the model of this config, in words; empty where nothing is known."""
    decoder = decoder_config(config)
    for part in (config, decoder):
        if reason := MODELS.get(part.model_type, ""):
            return f"{part.model_type}, {reason}"
        if part.model_type == "falcon" and getattr(part, "alibi", False):
            return f"falcon with alibi, {_BIAS}"
    kinds = layer_kinds(decoder)
    if sparse := [kind for kind in kinds if kind in (*INDEXED, *BLOCK_SPARSE) or "compressed" in kind]:
        return f"layers of kind {sparse[0]}, whose sparse attention counts the tokens held"
    if CHUNKED_MASKS_FAIL and "chunked_attention" in kinds:
        return "chunked attention, whose masks transformers before 5.18 cannot make for it"
    return ""


def checked_max_cache_len(config: Any, max_cache_len: int | None, offloading: bool | str | int) -> int | None:
    """`max_cache_len` as an int, or None.

    Raises TypeError or ValueError unless it is an integer of 1 or more, NotImplementedError unless such memory can be
    preallocated for the model of this config.
    """
    if max_cache_len is None:
        return None
    max_cache_len = checked_count("max_cache_len", max_cache_len, least=1)
    if offloading:
        raise NotImplementedError("a preallocated cache (max_cache_len) cannot be offloaded; leave one out")
    if reason := why_not_preallocated(config):
        raise NotImplementedError(
            f"expected a model that can read preallocated memory, got {reason}; leave max_cache_len out"
        )
    return max_cache_len
