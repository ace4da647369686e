"""What tests of attention share: views of caches, queries, and the error budget of the reference."""

from typing import Literal

import torch
from error_budget import Roundings, assert_within, attention, exact_parts

from tq_cache.backends import reference
from tq_cache.formats.presets import resolve_preset
from tq_cache.formats.states import KVView
from tq_cache.storage.growing import GrowingStorage

LENGTH = 200
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def make_view(
    generator: torch.Generator,
    length: int,
    *,
    preset: str = "tq4",
    batch: int = 2,
    heads: int = 2,
    key_dim: int = 64,
    value_dim: int | None = None,
    residual: int = 0,
    sinks: int = 0,
    dtype: torch.dtype = torch.float32,
    center: bool | Literal["both"] | None = None,
) -> KVView:
    """What a storage holds of `length` tokens: packed ones, a tail of `residual` and sinks as asked for.

    Any number of packed tokens, as there is after a crop.
    """
    storage = GrowingStorage(resolve_preset(preset, center=center), residual, sinks, "reference")
    kept = max(length - residual, 0)
    more = 256 if kept else 0  # to calibrate on, cropped again
    keys = torch.randn(batch, heads, length + more, key_dim, generator=generator) + 0.5
    values = torch.randn(batch, heads, length + more, value_dim or key_dim, generator=generator) - 0.5
    keys, values = keys.to(dtype), values.to(dtype)
    if kept:
        storage.append(*(x[:, :, : kept + residual + more] for x in (keys, values)))
        storage.crop(kept)
    if residual:
        storage.append(*(x[:, :, length + more - min(residual, length) :] for x in (keys, values)))
    return storage.view()


def make_query(generator: torch.Generator, view: KVView, num_queries: int, group: int) -> torch.Tensor:
    batch, heads, _, head_dim = view.tail_keys.shape
    return torch.randn(batch, heads * group, num_queries, head_dim, generator=generator).to(view.tail_keys.dtype)


def causal(num_queries: int, length: int) -> torch.Tensor:
    return torch.ones(num_queries, length, dtype=torch.bool).tril(length - num_queries)[None, None]


def assert_within_error_budget(query, view, mask, expected_mask, **options):
    """Output and log-sum-exp of attend are as near to those in float64 as its arithmetic is fine."""
    scaling = options.pop("scaling", query.shape[-1] ** -0.5)
    oracle_options = {name: options.get(name) for name in ("softcap", "sink_logits")}
    roundings = Roundings.of_reference(query.dtype)
    expected = attention(query, *exact_parts(view), expected_mask, scaling, roundings, **oracle_options)
    out, lse = reference.attend(query, view, mask, scaling, **options)
    assert out.dtype == query.dtype and out.shape == expected.out.shape
    assert lse.dtype == (torch.float64 if query.dtype == torch.float64 else torch.float32)
    assert_within(out, lse, expected)
    return out


def padding(length: int = LENGTH) -> torch.Tensor:
    """Row 0 whole, row 1 with 90 tokens of padding on the left, [2, 1, 1, T]."""
    mask = torch.ones(2, 1, 1, length, dtype=torch.bool)
    mask[1, ..., :90] = False
    return mask


def to_float(mask: torch.Tensor, lowest: float = -torch.inf, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.where(mask, 0.0, lowest).to(dtype)
