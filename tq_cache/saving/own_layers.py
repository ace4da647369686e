"""What transformers' own cache layers keep, as numbers and tensors, and back.

window.keys, window.values       [B, H_kv, n, D], tokens that coming ones may see, oldest first; `seen` counts all
states.conv.N, states.recurrent.N  of linear attention; `previous` says which states there are
indexer.keys, indexer.positions  of sparse attention (DSA), [B, T, D] and [..., T]
"""

from typing import Any

import torch
from transformers.cache_utils import StaticLayer

from ..parallel import share_of_heads
from .folder import Reader, expect, is_count, own_copy

Numbers = dict[str, Any]


def window(layer: Any) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Keys and values that are held, oldest first, and how many tokens there were."""
    seen = int(layer.get_seq_length())
    return layer.keys[:, :, :seen], layer.values[:, :, :seen], seen


def restore_window(
    layer: Any, said: Numbers, reader: Reader, prefix: str, length: int, device: torch.device, where: str
) -> None:
    seen = said.get("seen") if isinstance(said, dict) else None
    expect(is_count(seen) and seen == reader.header["length"], f"{reader.header['length']} tokens seen", said, where)
    assert seen is not None
    keys, values = (reader.read(prefix + name) for name in ("window.keys", "window.values"))
    expect(keys.dim() == 4 and keys.shape[:3] == values.shape[:3], "keys like values", list(keys.shape), where)
    static, sliding = isinstance(layer, StaticLayer), bool(getattr(layer, "is_sliding", False))
    most = layer.max_cache_len if static else getattr(layer, "sliding_window", seen + 1)
    needed = min(seen, most - 1) if sliding and seen >= most else seen
    if static and not sliding and seen > most:
        raise ValueError(f"expected at most max_cache_len = {most} tokens, got {seen} saved; load with a larger one")
    if static and sliding and needed < min(seen, keys.shape[2]) - 1:
        raise ValueError(f"expected a max_cache_len of {keys.shape[2]} or more, tokens of a window, got {most}")
    expect(needed <= keys.shape[2] <= seen, f"{needed} tokens of a window", keys.shape[2], where)
    if length < seen:
        if keys.shape[2] < seen:
            raise NotImplementedError(
                f"expected all {seen} tokens, since those before the window of {where} are gone, got length={length}"
            )
        keys, values, seen, needed = keys[:, :, :length], values[:, :, :length], length, length
    keys, values = (own_copy(x[:, :, x.shape[2] - needed :], device) for x in (keys, values))
    _fill(layer, keys, values, seen)


def _fill(layer: Any, keys: torch.Tensor, values: torch.Tensor, seen: int) -> None:
    """A fresh memory of the layer with what `window` gave."""
    if isinstance(layer, StaticLayer):
        layer.cumulative_length = torch.tensor(0, dtype=torch.int64)
    layer.lazy_initialization(keys, values)
    if isinstance(layer, StaticLayer):
        # A full window ends with the newest token; its first one is not looked at again, and may be missing.
        start = layer.max_cache_len - keys.shape[2] if seen >= layer.max_cache_len else 0
        for memory, x in ((layer.keys, keys), (layer.values, values)):
            memory[:, :, start : start + x.shape[2]] = x  # type: ignore[index]  # lazy_initialization made them
        layer.cumulative_length.fill_(seen)
        if hasattr(layer, "cumulative_length_int"):
            layer.cumulative_length_int = seen
        return
    layer.keys, layer.values = keys, values
    if hasattr(layer, "cumulative_length"):
        layer.cumulative_length = seen


def restore_states(layer: Any, said: Numbers, reader: Reader, prefix: str, device: torch.device, where: str) -> None:
    previous = said.get("previous") if isinstance(said, dict) else None
    right = isinstance(previous, list) and len(previous) == layer.number_of_states
    expect(right and all(isinstance(x, bool) for x in previous or ()), "which states there are", said, where)
    assert previous is not None
    for name in sorted(x for x in reader.names(prefix) if x.startswith("states.")):
        _, kind, number = name.split(".") if name.count(".") == 2 else ("", "", "")
        right = kind in ("conv", "recurrent") and number.isdigit() and int(number) < layer.number_of_states
        expect(right, "states.conv.N or states.recurrent.N", name, where)
        x, i = own_copy(reader.read(prefix + name), device), int(number)
        layer.lazy_initialization(**{f"{kind}_states": x}, state_idx=i)
        getattr(layer, f"{kind}_states")[i].copy_(x)
    for i, value in enumerate(previous):
        layer.has_previous_state[i] = value


def restore_indexer(layer: Any, reader: Reader, prefix: str, length: int, device: torch.device, where: str) -> None:
    keys = reader.read(prefix + "indexer.keys")
    saved = reader.header["length"]
    expect(keys.dim() == 3 and keys.shape[1] == saved, f"indexer keys of {saved} tokens", list(keys.shape), where)
    layer.lazy_initialization_indexer(keys[:, :0].to(device))
    layer.indexer_keys = own_copy(keys[:, :length], device)
    if "indexer.positions" in reader.names(prefix):
        positions = reader.read(prefix + "indexer.positions")
        expect(positions.shape[-1:] == (saved,), f"positions of {saved} tokens", list(positions.shape), where)
        layer.indexer_position_ids = own_copy(positions[..., :length], device)


def place_window(layer: Any, device: torch.device, heads: int) -> None:
    """Move a layer that was loaded to where its next tokens are; of KV heads this process's."""
    share = share_of_heads(layer.keys.shape[1], heads, "a saved cache")
    if layer.keys.device == device and layer.keys.shape[1] == heads:
        return
    keys, values, seen = window(layer)
    keys, values = (x[:, share].to(device).contiguous() for x in (keys, values))
    _fill(layer, keys, values, seen)
