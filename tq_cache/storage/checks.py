"""What sizes, and new keys and values, must be before a storage takes them.  Nothing has changed when one raises."""

import operator
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch

from ..backends.calibration import local_scales
from ..formats.presets import Preset, Role
from ..formats.rotation import MAX_HEAD_DIM, MIN_HEAD_DIM, check_head_dim, is_packable

# Shape, dtype and device, all that is looked at of a tensor here.
_Described = tuple[torch.Size, torch.dtype, torch.device]


def checked_count(name: str, value: Any, least: int = 0) -> int:
    """An integer of any type (numpy's, too) as an int.  Raises TypeError on anything else, ValueError below `least`."""
    try:
        count = operator.index(value)
    except TypeError:
        count = None
    if count is None or isinstance(value, bool):
        raise TypeError(f"expected {name} as an integer of {least} or more, got {value!r}")
    if count < least:
        raise ValueError(f"expected {name} of {least} or more, got {count}")
    return count


def checked_sequences(indices: Any, batch_size: int) -> torch.Tensor:
    """Indices of sequences as int64 [n] from 0 on, on the CPU.  Waits for the device of a tensor.

    indices: integers (negative from the end) or one bool per sequence, as a tensor or a sequence

    Raises TypeError on anything else, IndexError on sequences that there are not.
    """
    try:
        given = (indices if isinstance(indices, torch.Tensor) else torch.tensor(list(indices))).cpu()
    except (TypeError, ValueError, RuntimeError):
        given = torch.tensor(0.0)
    given = given.long() if given.numel() == 0 and given.dtype != torch.bool else given  # no indices have no dtype
    if given.dim() != 1 or given.dtype not in (torch.bool, torch.int8, torch.int16, torch.int32, torch.int64):
        raise TypeError(f"expected indices of sequences, integers or bools [n], got {indices!r}")
    if given.dtype == torch.bool:
        if len(given) != batch_size:
            raise IndexError(f"expected one bool for each of {batch_size} sequences, got {len(given)}")
        return given.nonzero()[:, 0]
    if ((given < -batch_size) | (given >= batch_size)).any():
        raise IndexError(
            f"expected indices of the {batch_size} sequences held, {-batch_size} to {batch_size - 1}, got "
            f"{given.tolist()}"
        )
    return given.long() % batch_size


def check_states(keys: torch.Tensor, values: torch.Tensor, held: tuple[torch.Tensor, torch.Tensor] | None) -> None:
    """Raise ValueError unless keys and values [B, H_kv, T, D] fit each other and those `held`, if there are any."""
    olds = (None, None) if held is None else (_described(held[0]), _described(held[1]))
    _check_described(_described(keys), _described(values), *olds)


def alike(new: torch.Tensor, held: torch.Tensor, any_device: bool = False) -> bool:
    """Whether tokens [B, H_kv, T, D] differ in nothing but their number, so that they can be held together."""
    same = (new.shape[:2], new.shape[3:], new.dtype) == (held.shape[:2], held.shape[3:], held.dtype)
    return same and (any_device or new.device == held.device)


def _described(x: torch.Tensor) -> _Described:
    return x.shape, x.dtype, x.device


@lru_cache(maxsize=1024)  # every step of every layer asks the same
def _check_described(
    keys: _Described, values: _Described, held_keys: _Described | None, held_values: _Described | None
) -> None:
    if len(keys[0]) != 4 or len(values[0]) != 4 or keys[0][:3] != values[0][:3]:
        raise ValueError(
            "expected keys and values [batch, num_kv_heads, tokens, head_dim] that differ at most in head_dim, "
            f"got {list(keys[0])} and {list(values[0])}"
        )
    if keys[2] != values[2]:
        raise ValueError(
            f"expected keys and values on one device, got {keys[2]} and {values[2]}; keep each layer on one device"
        )
    for held, new, name in ((held_keys, keys, "keys"), (held_values, values, "values")):
        if held is None:
            continue
        (old_shape, old_dtype, old_device), (shape, dtype, device) = held, new
        if (old_shape[:2], old_shape[3]) != (shape[:2], shape[3]):
            raise ValueError(
                f"expected {name} of batch {old_shape[0]}, {old_shape[1]} KV heads and head_dim {old_shape[3]}, "
                f"as this cache holds, got {list(shape)}; use a new cache, reset() or batch_select_indices()"
            )
        if old_dtype != dtype:
            raise ValueError(
                f"expected {name} in {old_dtype}, as this cache holds, got {dtype}; "
                "run every step in one dtype (autocast on for all, or for none), or reset() the cache"
            )
        if old_device != device:
            raise ValueError(
                f"expected {name} on {old_device}, where this cache holds its tokens, got {device}; "
                "move the model back, reset() the cache, or use a new one"
            )


def check_packable(
    keys: torch.Tensor, values: torch.Tensor, preset: Preset, given_scales: Mapping[Role, torch.Tensor]
) -> None:
    """Raise ValueError unless keys and values [B, H_kv, T, D] have a head_dim and KV heads that can be packed."""
    check_dims(keys.shape[3], values.shape[3], preset)
    if preset.holds_latents and keys.shape[1] != 1:
        raise ValueError(f"expected latents [batch, 1, tokens, rank], got {list(keys.shape)}")
    local_scales(given_scales, keys.shape[1])


def unpackable_width(key_dim: int, value_dim: int, latent: bool) -> str:
    """Why keys and values, or latents, of such widths are in no format's reach; empty where they can be packed.

    Of latents the rotary keys beside them do not count: their own format says what width it takes.
    """
    wrong = next((dim for dim in ((key_dim,) if latent else (key_dim, value_dim)) if not is_packable(dim)), None)
    if wrong is None:
        return ""
    name = "latents of" if latent else "head_dim"
    return f"{name} {wrong}: only multiples of 16 from {MIN_HEAD_DIM} to {MAX_HEAD_DIM} are packed"


def check_dims(key_dim: int, value_dim: int, preset: Preset) -> None:
    """Raise ValueError unless keys and values of such widths can be packed."""
    check_head_dim(key_dim)
    if not preset.holds_latents:
        check_head_dim(value_dim)
    elif not preset.value.exact:
        check_head_dim(value_dim, f"width of rotary keys in {preset.value.name}", "use rotary='exact'")


def check_room(held: int, count: int, max_length: int) -> None:
    """Raise ValueError unless `count` more tokens fit beside those held."""
    if held + count > max_length:
        raise ValueError(
            f"expected at most max_cache_len = {max_length} tokens, got {held} held and {count} new; "
            "make the cache with a larger max_cache_len"
        )
