"""One cache layer as numbers and tensors, and back: packed tokens, and what transformers keeps beside them or instead.

    part      of                                              numbers              tensors
    tokens    a packed layer (growing and preallocated alike) counts, first tokens tail, sinks, packed, calibration
    window    transformers' own layers of keys and values     seen                 keys and values that are still needed
    states    linear attention                                previous             conv, recurrent
    indexer   sparse attention (DSA)                          -                    indexer keys, their positions

A layer may have several of these; one without tokens has none.
"""

from typing import Any

import torch
from transformers.cache_utils import DynamicLayer, LinearAttentionCacheLayerMixin, StaticLayer

from ..hf.layers import PackedLayer
from .folder import Reader, expect
from .own_layers import restore_indexer, restore_states, restore_window, window
from .tokens import Numbers, Tensors, describe_tokens, restore_tokens

# Tensors without KV heads: of these every process of several has all.
WITHOUT_HEADS = ("first.calibrated", "first.starts", "first.seen", "indexer.keys", "indexer.positions")

STATELESS = ("moe", "mlp", "dummy")  # kinds whose layers have nothing to hold
TRANSFORMERS = DynamicLayer.__module__  # what models derive from its layers keeps more


def has_heads(name: str) -> bool:
    """Whether dimension 1 of a layer's tensor of this name is KV heads."""
    return name not in WITHOUT_HEADS and not name.startswith("states.")


def describe(layer: Any, kind: str, where: str) -> tuple[Numbers, Tensors]:
    """What a layer of a cache with tokens holds; raises NotImplementedError where this does not know all of it."""
    said: Numbers = {}
    tensors: Tensors = {}
    if isinstance(layer, PackedLayer):
        if layer.storage.length:
            numbers, named = describe_tokens(layer.storage)
            said |= numbers
            tensors |= named
    elif isinstance(layer, (DynamicLayer, StaticLayer)):
        if layer.is_initialized and int(layer.get_seq_length()):
            keys, values, seen = window(layer)
            said["window"] = dict(seen=seen)
            tensors |= {"window.keys": keys, "window.values": values}
    if not isinstance(layer, PackedLayer) and type(layer).__module__ != TRANSFORMERS:
        raise NotImplementedError(f"{where}, a {type(layer).__name__}, keeps tokens in a way that is not known here")
    if isinstance(layer, LinearAttentionCacheLayerMixin):
        said["states"] = dict(previous=[bool(layer.has_previous_state[i]) for i in range(layer.number_of_states)])
        for name, held in (("conv", layer.conv_states), ("recurrent", layer.recurrent_states)):
            for i, x in held.items():
                if x is not None:
                    kernel = layer.conv_kernel_size[i] if name == "conv" else None
                    tensors[f"states.{name}.{i}"] = x if kernel is None else x[..., -kernel:]
        if not tensors and kind not in STATELESS:
            raise NotImplementedError(f"{where} ({kind}) keeps its state in the model, not in the cache")
    if getattr(layer, "is_indexer_initialized", False):
        tensors["indexer.keys"] = layer.indexer_keys
        if getattr(layer, "indexer_position_ids", None) is not None:
            tensors["indexer.positions"] = layer.indexer_position_ids
    return said, tensors


def restore(
    layer: Any, said: Numbers, reader: Reader, prefix: str, length: int, device: torch.device, where: str
) -> None:
    """Give a fresh layer the first `length` tokens of what `describe` gave.

    Raises CacheFileError where that is not what a layer of this kind holds, NotImplementedError where it cannot be cut.
    """
    names = reader.names(prefix)
    saved = reader.header["length"]
    parts = {name.partition(".")[0] for name in names}
    expect(not {"tokens", "window"} <= set(said), "tokens or a window", sorted(said), where)
    if "tokens" in said:
        expect(isinstance(layer, PackedLayer), "no packed tokens", said["tokens"], where)
        restore_tokens(layer.storage, said, reader, prefix, length, device, where)
    elif "window" in said:
        own = isinstance(layer, (DynamicLayer, StaticLayer)) and not isinstance(layer, PackedLayer)
        expect(own, "no window of tokens", said["window"], where)
        restore_window(layer, said["window"], reader, prefix, length, device, where)
    if "states" in said:
        expect(isinstance(layer, LinearAttentionCacheLayerMixin), "no states", said["states"], where)
        if length < saved:
            raise NotImplementedError(
                f"expected all {saved} tokens, since {where} keeps a state that cannot be cut, got length={length}"
            )
        restore_states(layer, said["states"], reader, prefix, device, where)
    if "indexer" in parts:
        expect(hasattr(layer, "indexer_keys"), "no indexer", sorted(names), where)
        restore_indexer(layer, reader, prefix, length, device, where)
    known = {"tail", "sinks", "key", "value", "first"} if "tokens" in said else set()
    known |= {"window"} & set(said) | {"states"} & set(said) | {"indexer"} & parts
    expect(parts <= known, f"tensors of {sorted(known)}", sorted(parts - known), where)
