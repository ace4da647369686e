"""A problem of decode: what a call is given, all that its plan depends on, and what is refused."""

from typing import NamedTuple

import torch

from ..device import Device
from ..launch import Signature, check_devices
from ..states import Layout, States, check_count, check_ring
from ..tuning import Arithmetic

MAX_QUERIES = 16
MAX_HEAD_DIM = 256
QUERY_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class Problem(NamedTuple):
    """What one call of `decode` is given (see there), and on which device."""

    device: Device
    query: torch.Tensor
    key: States | None
    value: States | None
    tail_keys: torch.Tensor
    tail_values: torch.Tensor
    packed_length: int
    scaling: float
    sink_tokens: tuple[torch.Tensor, torch.Tensor] | None = None
    mask: torch.Tensor | None = None
    softcap: float | None = None
    sink_logits: torch.Tensor | None = None
    causal: bool = True
    lengths: torch.Tensor | None = None
    num_tokens: torch.Tensor | None = None
    residual_length: int = 0
    max_length: int | None = None
    arithmetic: Arithmetic | None = None
    splits: int | None = None


class Key(NamedTuple):
    """All that the plan for a problem depends on: signatures, layouts and flags.

    counts: of `lengths` and `num_tokens`, None where there is none
    """

    device: Device
    query: Signature
    key: Layout | None
    value: Layout | None
    tail_keys: Signature
    tail_values: Signature
    packed_length: int
    sink_keys: Signature | None
    sink_values: Signature | None
    mask: Signature | None
    mask_kind: int
    capped: bool
    sink_logits: Signature | None
    causal: bool
    counts: tuple[Signature | None, ...]
    residual_length: int
    max_length: int | None
    arithmetic: Arithmetic | None
    splits: int | None


def check(given: Key, key: Layout, value: Layout) -> None:
    """Raise ValueError, with what was given, on what the kernels would read wrongly."""
    key.check(given.packed_length)
    value.check(given.packed_length)
    query, keys, values = given.query, given.tail_keys, given.tail_values
    batch, heads, queries, dim = query.shape
    kv_heads, tail = keys.shape[1:3]
    if not 0 < queries <= MAX_QUERIES:
        raise ValueError(f"expected 1 to {MAX_QUERIES} queries, got {queries}; prefill takes more")
    if heads % kv_heads or keys.shape != (batch, kv_heads, tail, dim) or keys.shape[:3] != values.shape[:3]:
        raise ValueError(
            f"expected keys [{batch}, a divisor of {heads}, n, {dim}] and values that differ at most in head_dim, "
            f"got {list(keys.shape)} and {list(values.shape)}"
        )
    if max(dim, values.shape[3]) > MAX_HEAD_DIM:
        raise ValueError(f"expected a head_dim of at most {MAX_HEAD_DIM}, got {dim} and {values.shape[3]}")
    found = (*key.shape[:2], key.head_dim, *value.shape[:2], value.head_dim)
    if found != (batch, kv_heads, dim, batch, kv_heads, values.shape[3]):
        raise ValueError(
            f"expected packed states of {batch} sequences, {kv_heads} KV heads, head_dim {dim} and {values.shape[3]}, "
            f"got {list(found[:3])} and {list(found[3:])}"
        )
    dtypes = query.dtype, keys.dtype, values.dtype
    if len(set(dtypes)) > 1 or query.dtype not in QUERY_DTYPES:
        raise ValueError(f"expected one of {QUERY_DTYPES} throughout, got {', '.join(map(str, dtypes))}")
    if (query.strides[3], keys.strides[3], values.strides[3]) != (1, 1, 1):
        raise ValueError("expected query, keys and values whose last dimension is contiguous")
    _check_sinks(given.sink_keys, keys)
    _check_sinks(given.sink_values, values)
    sinks = 0 if given.sink_keys is None else given.sink_keys.shape[2]
    if given.sink_values is not None and given.sink_values.shape[2] != sinks:
        raise ValueError(f"expected as many keys as values of sinks, got {sinks} and {given.sink_values.shape[2]}")
    lengths, num_tokens = given.counts
    if lengths is not None and (lengths.shape, lengths.strides, lengths.dtype) != ((batch,), (1,), torch.int32):
        raise ValueError(
            f"expected lengths [{batch}] in torch.int32, contiguous, got {list(lengths.shape)} in {lengths.dtype}"
        )
    counted = num_tokens, given.max_length, given.residual_length
    check_counts_and_mask(counted, queries, sinks, given.packed_length, tail, given.mask)
    tensors = query, keys, values, given.sink_keys, given.sink_values, given.mask, given.sink_logits, *given.counts
    check_devices(*tensors, key, value)


def check_counts_and_mask(
    counted: tuple[Signature | None, int | None, int], queries: int, sinks: int, packed_length: int, tail_length: int,
    mask: Signature | None,
) -> None:  # fmt: skip
    """Raise ValueError unless a tail that is a ring, where tokens are counted on the device, and the mask fit.

    counted: `num_tokens`, how many it says at most, and how many of them are never packed
    """
    num_tokens, max_length, residual_length = counted
    tokens = sinks + packed_length + tail_length
    if num_tokens is not None:
        if queries > 1:
            raise ValueError(f"expected one query with num_tokens, got {queries}")
        check_count(num_tokens)
        check_ring(max_length, residual_length, sinks, packed_length, tail_length)
        # The device alone knows how many there are: the mask must do for all.
        tokens = tokens if max_length is None else max_length
    if mask is not None and mask.shape[3] < tokens:
        raise ValueError(f"expected a mask [B, H, {queries}, {tokens} or more], got {list(mask.shape)}")


def _check_sinks(sinks: Signature | None, tail: Signature) -> None:
    if sinks is None:
        return
    found, wanted = ((*x.shape[:2], x.shape[3], x.dtype, x.strides[3]) for x in (sinks, tail))
    if found != wanted:
        raise ValueError(
            f"expected sinks like the tail, {list(tail.shape)} in {tail.dtype} whose last dimension is contiguous, "
            f"got {list(sinks.shape)} in {sinks.dtype} with strides {sinks.strides}"
        )
