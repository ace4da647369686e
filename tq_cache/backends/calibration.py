"""Calibration: what is measured once, on a layer's first tokens and queries, in plain PyTorch on any device.

B batch, H_kv key/value heads, T tokens, D head_dim (of keys or of values)
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch

from ..formats.presets import NOUNS, Format, Preset, Role
from ..formats.states import Calibration
from ..parallel import share_of_heads
from .quantizers import LARGEST, compute_dtype, divisor

# So many tokens say all of a channel's size that they will; the sizes of fewer are trusted in proportion.
TRUSTED_TOKENS = 64
# Queries, of the average size in every channel, that are counted beside those seen: a few say little alone.
PRIOR_QUERIES = 8
# A channel smaller than this share of the median one counts as so large: it may be dead in the first tokens alone, and
# where it stays dead its error matters to no score.
SMALLEST_SIZE = 0.1
# Without queries larger keys are taken for those that meet larger queries, in part: of exponents 0 to 1 for the size
# of keys alone 0.35 was best on two real models in prototypes (issue 13), which is so much of 0.5.
KEYS_ALONE = 0.7
# Room that float8 scales leave above the largest element of the first tokens.  A float format does not feel it: what
# is 64 * 448 times smaller than the largest still is a normal number of e4m3.
FLOAT8_HEADROOM = 64.0


class QueryEnergy(NamedTuple):
    """Of the queries of each KV head's group: sum of squares [B, H_kv, 1, D], and how many they are [B, 1, 1, 1]."""

    squares: torch.Tensor
    seen: torch.Tensor


def calibrate_pair(
    preset: Preset,
    keys: torch.Tensor,
    values: torch.Tensor,
    given_scales: Mapping[Role, torch.Tensor],
    counts: torch.Tensor | None = None,
    queries: QueryEnergy | None = None,
) -> tuple[Calibration, Calibration]:
    """Calibration of keys and of values on the first tokens, [B, H_kv, T, D] each.

    given_scales: as those of `local_scales`, which raises ValueError
    counts:       bool [B, 1, T, 1], which tokens count; None: all but padding, as far as it can be told
    """
    if counts is None and measures(preset, given_scales):
        counts = not_padding(keys if preset.holds_latents else values)
    scales = local_scales(given_scales, keys.shape[1])
    key_scale, value_scale = (scales.get(role) for role in preset.roles)
    key = calibrate(keys, preset.key, "key" in preset.center, preset.smooth, counts, key_scale, queries)
    return key, calibrate(values, preset.value, "value" in preset.center, 0.0, counts, value_scale)


def local_scales(given: Mapping[Role, torch.Tensor], num_kv_heads: int) -> dict[Role, torch.Tensor]:
    """Given scales, [1] or one per KV head of the model, as [1] or [num_kv_heads]: those of this process's heads.

    Raises ValueError where their number is neither 1 nor such that these heads can be a share of it.
    """
    local = {}
    for role, scale in given.items():
        one = scale.numel() == 1
        local[role] = scale if one else scale[share_of_heads(scale.numel(), num_kv_heads, f"scales of {NOUNS[role]}")]
    return local


def calibrate(
    x: torch.Tensor,
    fmt: Format,
    center: bool,
    smooth: float,
    counts: torch.Tensor | None,
    given_scale: torch.Tensor | None = None,
    queries: QueryEnergy | None = None,
) -> Calibration:
    """Measure what `Calibration` holds on the first tokens `x` [B, H_kv, T, D].

    `counts` bool [B, 1, T, 1] says which tokens count (not padding); tokens with NaN or inf never do.  It may be None
    where nothing is measured.  `given_scale` [1] or [H_kv] is taken in place of a measured scale.  Where no token
    counts, the calibration is neutral.
    """
    dtype = compute_dtype(x.dtype)
    mean = size = scale = None
    if given_scale is not None:
        scale = given_scale.to(x.device, dtype).view(1, -1, 1, 1).expand(*x.shape[:2], 1, 1).contiguous()
    if not _measured(fmt, center, smooth, given_scale):
        return Calibration(scale=scale)
    assert counts is not None
    # In as few passes as possible, and in x's own dtype while that is exact: the first tokens are a whole prompt.
    counts = counts & x.isfinite().all(dim=-1, keepdim=True)
    limit = min(LARGEST, torch.finfo(x.dtype).max)
    x = x.clamp(-limit, limit).masked_fill_(~counts, 0.0)
    counted = counts.sum(dim=2, keepdim=True)
    if center:
        mean = x.sum(dim=2, keepdim=True, dtype=dtype) / counted.clamp_min(1)
        x = x.sub(mean).mul_(counts)
    if smooth > 0:
        norm = torch.linalg.vector_norm(x, dim=2, keepdim=True, dtype=dtype)
        size = _channel_sizes(norm / counted.clamp_min(1).to(dtype).sqrt(), counted, smooth, queries)
        if fmt.scale == "per_head":
            x = x / size
    if scale is None and fmt.scale == "per_head":
        assert fmt.float8 is not None
        largest = torch.linalg.vector_norm(x, torch.inf, dim=(2, 3), keepdim=True, dtype=dtype)
        largest = largest * FLOAT8_HEADROOM / torch.finfo(fmt.float8).max
        scale = torch.where(largest > 0, torch.exp2(torch.ceil(torch.log2(largest))), 1.0)
    return Calibration(center=mean, smooth=size, scale=scale)


def _channel_sizes(
    rms: torch.Tensor, counted: torch.Tensor, smooth: float, queries: QueryEnergy | None
) -> torch.Tensor:
    """What each key channel is divided by, [B, H_kv, 1, D]: (its rms / that of the queries) ** smooth, on average 1.

    Errors e of keys cost a score q . (size * e), and size * |k / size| is what the error is in proportion to: the
    cost, summed over channels, is least where size ** 2 is the ratio of the rms of keys to that of queries.
    """
    logarithm = KEYS_ALONE * smooth * _log_size(rms)
    if queries is not None:
        squares, seen = queries.squares.to(rms), queries.seen.to(rms)
        # The prior makes up for channels that few queries happen not to use.
        squares = squares + PRIOR_QUERIES * squares.mean(dim=-1, keepdim=True) / seen.clamp_min(1)
        aware = smooth * (_log_size(rms) - _log_size((squares / (seen.clamp_min(1) + PRIOR_QUERIES)).sqrt()))
        logarithm = torch.where(seen > 0, aware, logarithm)
    trust = counted / (counted + TRUSTED_TOKENS)
    return torch.exp(trust * (logarithm - logarithm.mean(dim=-1, keepdim=True)))


def _log_size(rms: torch.Tensor) -> torch.Tensor:
    """Logarithm of sizes [..., D], none of them much less than the median; zeros where that is 0."""
    median = rms.median(dim=-1, keepdim=True).values
    return torch.where(median > 0, torch.log(divisor(torch.maximum(rms, SMALLEST_SIZE * median))), 0.0)


def measures(preset: Preset, given_scales: Mapping[Role, torch.Tensor]) -> bool:
    """Whether `calibrate_pair` looks at the tokens."""
    key_scale, value_scale = (given_scales.get(role) for role in preset.roles)
    return (
        bool(preset.center)
        or _measured(preset.key, False, preset.smooth, key_scale)
        or _measured(preset.value, False, 0.0, value_scale)
    )


def _measured(fmt: Format, center: bool, smooth: float, given_scale: torch.Tensor | None) -> bool:
    return center or smooth > 0 or (fmt.scale == "per_head" and given_scale is None)


def query_energy(query: torch.Tensor, num_kv_heads: int, counts: torch.Tensor | None) -> QueryEnergy:
    """Of queries [B, H_q, S, D], of which `counts` bool [B, S] (None: all) are of real tokens, in float32."""
    groups = query.detach().unflatten(1, (num_kv_heads, -1)).float()  # [B, H_kv, G, S, D]
    counted = groups.isfinite().all(dim=-1, keepdim=True).all(dim=1, keepdim=True)
    if counts is not None:
        counted = counted & counts[:, None, None, :, None]
    squares = torch.where(counted, groups, 0.0).square().sum(dim=(2, 3)).unsqueeze(2)
    return QueryEnergy(squares, counted.sum(dim=(2, 3)).unsqueeze(2))


def not_padding(values: torch.Tensor) -> torch.Tensor:
    """Which tokens calibration may count, bool [B, 1, T, 1]: all but a leading run of two or more equal ones.

    A cache is not always told where a batch is padded.  But padding on the left sees only padding and values carry no
    position, so padded tokens all have the same values; where latents are cached they are it that carry none.
    """
    first = values[:, :, :1]
    distance = torch.linalg.vector_norm(values - first, torch.inf, dim=(1, 3))
    tolerance = 0.02 * first.abs().amax(dim=(1, 3))
    run = (distance <= tolerance).cumprod(dim=1).bool()  # [B, T], true for the first token unless it is NaN
    padding = run & (run.sum(dim=1, keepdim=True) > 1)
    return ~padding[:, None, :, None]
