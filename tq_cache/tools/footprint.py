"""What a cache truly takes: bytes per token of one KV head of a layer, everything it holds counted.

As for a 16-bit model, whatever dtype this one runs in: tokens in the model's dtype are 2 bytes an element.  Packed
bits, their scales, and calibration are counted as they are.  Room for coming tokens is left out, where it can be told.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache

from ..formats.states import tensors
from ..hf.layers import PackedLayer
from ..planning.geometry import model_geometry
from ..planning.memory import EXACT_BYTES
from ..storage.base import LayerStorage
from .baselines import KiviLayer


@dataclass(frozen=True)
class Footprint:
    """Bytes per token of one KV head, key and value together, on average over layers.

    all_layers:    all that hold keys and values
    packed_layers: those that hold packed tokens; None where none does
    """

    all_layers: float
    packed_layers: float | None


def footprint(cache: Cache, config: PreTrainedConfig, batch: int) -> Footprint:
    """Of a cache that holds tokens of `batch` sequences of a model with this config.

    Divided by all tokens that went through, also in layers with a window, which hold fewer.
    """
    tokens = cache.get_seq_length()
    every, packed = [], []
    for layer, geometry in zip(cache.layers, model_geometry(config).layers, strict=True):
        if geometry.num_kv_heads:
            own = layer_bytes(layer) / (batch * geometry.num_kv_heads * tokens)
            every.append(own)
            if is_packed(layer):
                packed.append(own)
    return Footprint(_mean(every), _mean(packed) if packed else None)


def is_packed(layer: Any) -> bool:
    """Whether a layer of any cache here holds tokens in fewer bits than the model's."""
    if isinstance(layer, PackedLayer):
        return layer.storage.view().packed_length > 0
    return isinstance(layer, KiviLayer) or hasattr(layer, "_quantized_keys")


def layer_bytes(layer: Any) -> float:
    """Bytes that one layer of any cache here would hold in a 16-bit model."""
    if isinstance(layer, PackedLayer):
        return _storage_bytes(layer.storage)
    if isinstance(layer, KiviLayer):
        return layer.true_bytes
    return _held_bytes(list(vars(layer).values()))


def _storage_bytes(storage: LayerStorage) -> float:
    """Of a growing storage: exact tokens, the packed tokens' part of packed memory, and whatever else there is."""
    view = storage.view()
    exact = [x for x in (view.sink_keys, view.sink_values, view.tail_keys, view.tail_values) if x is not None]
    total: float = sum(EXACT_BYTES * x.numel() for x in exact)
    counted = list(exact)
    for states in (view.key, view.value):
        if states is not None:
            calibration = sum(x.nbytes for x in tensors(states.calibration))
            memory = sum(x.nbytes for x in tensors(states)) - calibration
            total += memory * view.packed_length / states.capacity + calibration
            counted += tensors(states)
    known = {x.untyped_storage().data_ptr() for x in counted}
    return total + sum(x.nbytes for x in storage.tensors() if x.untyped_storage().data_ptr() not in known)


def _held_bytes(value: Any) -> int:
    """Of every tensor in a value of transformers' layers, which quanto wraps and HQQ puts beside a dict."""
    if isinstance(value, Mapping):
        return _held_bytes(list(value.values()))
    if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
        return sum(map(_held_bytes, value))
    if not isinstance(value, torch.Tensor):
        return 0
    if hasattr(value, "__tensor_flatten__"):  # a tensor made of others
        return _held_bytes([getattr(value, name) for name in value.__tensor_flatten__()[0]])
    size = min(value.element_size(), EXACT_BYTES) if value.is_floating_point() else value.element_size()
    return value.numel() * size


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
