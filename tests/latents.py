"""What tests of latents (MLA) share: tokens, storages and views of them, and attention's error budget."""

import torch
from error_budget import Roundings, assert_within, attention, exact_parts

from tq_cache.backends import reference
from tq_cache.formats.presets import FORMATS, Preset, resolve_preset
from tq_cache.formats.states import KVView
from tq_cache.storage.growing import GrowingStorage
from tq_cache.storage.preallocated import PreallocatedStorage

ROTARY = list(FORMATS["rotary"])
LATENTS = ("fp8_e4m3", "fp8_e5m2", "tq4", "tq3", "tq2", "4bit_nc", "3bit_nc")
# Rank of the latents, width of the rotary keys, and their format: all ranks and widths that models have.
SHAPES = [(rank, width, name) for rank, width in ((128, 32), (256, 32), (512, 64)) for name in ROTARY]
SHAPES += [(rank, 0, "exact") for rank in (128, 512)]


def latent_preset(preset: str = "tq4", rotary: str = "exact", **changes) -> Preset:
    return resolve_preset(preset, **changes).for_latents(FORMATS["rotary"][rotary])


def latent_tokens(generator, count: int, rank: int = 128, width: int = 32, batch: int = 2, dtype=torch.float32):
    """Latents and rotary keys of `count` new tokens; some channels of latents are larger, as in real ones."""
    latents = torch.randn(batch, 1, count, rank, generator=generator) + 0.5
    latents[..., ::16] *= 4
    return [x.to(dtype) for x in (latents, torch.randn(batch, 1, count, width, generator=generator))]


def growing(preset: str = "tq4", rotary: str = "exact", residual: int = 0, sinks: int = 0, **changes) -> GrowingStorage:
    return GrowingStorage(latent_preset(preset, rotary, **changes), residual, sinks, "reference")


def preallocated(
    preset: str = "tq4", rotary: str = "exact", residual: int = 64, sinks: int = 0, max_length: int = 600
) -> PreallocatedStorage:
    return PreallocatedStorage(latent_preset(preset, rotary), residual, sinks, max_length, "reference")


def latent_view(
    generator: torch.Generator,
    length: int,
    *,
    preset: str = "tq4",
    rotary: str = "exact",
    rank: int = 128,
    width: int = 32,
    residual: int = 0,
    sinks: int = 0,
    dtype: torch.dtype = torch.float32,
    **changes,
) -> KVView:
    """What a storage holds of `length` tokens: any number of packed ones, a tail of `residual`, and sinks."""
    storage = growing(preset, rotary, residual, sinks, **changes)
    latents, rotary_keys = latent_tokens(generator, length + 256, rank, width, dtype=dtype)
    kept = max(length - residual, 0)
    if kept:
        storage.append(latents[:, :, : kept + residual + 256], rotary_keys[:, :, : kept + residual + 256])
        storage.crop(kept)
    if residual:
        storage.append(*(x[:, :, length + 256 - min(residual, length) :] for x in (latents, rotary_keys)))
    return storage.view()


def latent_queries(generator: torch.Generator, view: KVView, num_queries: int, heads: int = 6) -> list[torch.Tensor]:
    """Queries of the latents and of the rotary keys, absorbed ones being larger than others."""
    batch, dtype = view.tail_keys.shape[0], view.tail_keys.dtype
    widths = view.tail_keys.shape[3], view.tail_values.shape[3]
    return [torch.randn(batch, heads, num_queries, width, generator=generator).to(dtype) for width in widths]


def assert_latents_within_budget(content, rotary, view, mask, expected_mask, **options):
    """`reference.attend_latents` is as near to attention in float64 over what is stored as its arithmetic is fine."""
    scaling = options.pop("scaling", (content.shape[-1] + rotary.shape[-1]) ** -0.5)
    roundings = Roundings.of_reference(content.dtype)
    latents, rotary_keys = exact_parts(view)
    query, keys = torch.cat([content, rotary], dim=-1), torch.cat([latents, rotary_keys], dim=-1)
    shared = {name: options.get(name) for name in ("softcap", "sink_logits")}
    expected = attention(query, keys, latents, expected_mask, scaling, roundings, **shared)
    out, lse = reference.attend_latents(content, rotary, view, mask, scaling, **options)
    assert out.dtype == content.dtype and out.shape == content.shape
    assert lse.dtype == (torch.float64 if content.dtype == torch.float64 else torch.float32)
    assert_within(out, lse, expected)
    return out
