"""Calibration: what is measured once, on the first tokens of a layer that are packed, in plain PyTorch on any device.

B batch, H_kv key/value heads, T tokens, D head_dim (of keys or of values)
"""

from collections.abc import Mapping

import torch

from ..formats.presets import Format, Preset, Role
from ..formats.states import Calibration
from .quantizers import LARGEST, compute_dtype, divisor

# Fewer tokens say too little about a channel: their statistics are left neutral.
MIN_CALIBRATION_TOKENS = 16
# Room that float8 scales leave above the largest element of the first tokens; a float format does not feel it.
# Few tokens, a first one alone say, may be far smaller than those to come.
FLOAT8_HEADROOM, FLOAT8_HEADROOM_OF_FEW = 4.0, 64.0


def calibrate_pair(
    preset: Preset,
    keys: torch.Tensor,
    values: torch.Tensor,
    given_scales: Mapping[Role, torch.Tensor],
) -> tuple[Calibration, Calibration]:
    """Calibration of keys and of values on the first tokens, [B, H_kv, T, D] each."""
    formats: tuple[tuple[Role, torch.Tensor, Format, float], ...] = (
        ("key", keys, preset.key, preset.smooth),
        ("value", values, preset.value, 0.0),
    )
    measured = any(measures(fmt, preset.center, smooth, given_scales.get(role)) for role, _, fmt, smooth in formats)
    counts = not_padding(values) if measured else None
    key, value = (
        calibrate(x, fmt, preset.center, smooth, counts, given_scales.get(role)) for role, x, fmt, smooth in formats
    )
    return key, value


def calibrate(
    x: torch.Tensor,
    fmt: Format,
    center: bool,
    smooth: float,
    counts: torch.Tensor | None,
    given_scale: torch.Tensor | None = None,
) -> Calibration:
    """Measure what `Calibration` holds on the first tokens `x` [B, H_kv, T, D].

    `counts` bool [B, 1, T, 1] says which tokens count (not padding); tokens with NaN or inf never do.  It may be None
    where nothing is measured, see `measures`.  `given_scale` [1] or [H_kv] is taken in place of a measured scale.
    """
    dtype = compute_dtype(x.dtype)
    mean = size = scale = None
    if given_scale is not None:
        scale = given_scale.to(x.device, dtype).view(1, -1, 1, 1).expand(*x.shape[:2], 1, 1).contiguous()
    if not measures(fmt, center, smooth, given_scale):
        return Calibration(scale=scale)
    assert counts is not None
    # In as few passes as possible, and in x's own dtype while that is exact: the first tokens are a whole prompt.
    counts = counts & x.isfinite().all(dim=-1, keepdim=True)
    limit = min(LARGEST, torch.finfo(x.dtype).max)
    x = x.clamp(-limit, limit).masked_fill_(~counts, 0.0)
    counted = counts.sum(dim=2, keepdim=True)
    enough = counted >= MIN_CALIBRATION_TOKENS
    if center:
        mean = torch.where(enough, x.sum(dim=2, keepdim=True, dtype=dtype) / counted.clamp_min(1), 0.0)
        x = x.sub(mean).mul_(counts)
    if smooth > 0:
        norm = torch.linalg.vector_norm(x, dim=2, keepdim=True, dtype=dtype)
        rms = norm / counted.clamp_min(1).to(dtype).sqrt()
        average = rms.mean(dim=-1, keepdim=True)
        # A dead channel must not divide by zero: a thousandth of the average is as good as none.
        size = (rms / divisor(average)).clamp_min(1e-3) ** smooth
        size = torch.where(enough & (average > 0), size, 1.0)
        if fmt.scale == "per_head":
            x = x / size
    if scale is None and fmt.scale == "per_head":
        headroom = torch.where(enough, FLOAT8_HEADROOM, FLOAT8_HEADROOM_OF_FEW)
        assert fmt.float8 is not None
        largest = torch.linalg.vector_norm(x, torch.inf, dim=(2, 3), keepdim=True, dtype=dtype)
        largest = largest * headroom / torch.finfo(fmt.float8).max
        scale = torch.where(largest > 0, torch.exp2(torch.ceil(torch.log2(largest))), 1.0)
    return Calibration(center=mean, smooth=size, scale=scale)


def measures(fmt: Format, center: bool, smooth: float, given_scale: torch.Tensor | None = None) -> bool:
    """Whether `calibrate` looks at the tokens."""
    return center or smooth > 0 or (fmt.scale == "per_head" and given_scale is None)


def not_padding(values: torch.Tensor) -> torch.Tensor:
    """Which tokens calibration may count, bool [B, 1, T, 1]: all but a leading run of equal ones.

    A cache is not told where a batch is padded.  But padding on the left sees only padding and values carry no
    position, so padded tokens all have the same values; a run of two or more is left out, unless it is all there is.
    """
    first = values[:, :, :1]
    distance = torch.linalg.vector_norm(values - first, torch.inf, dim=(1, 3))
    tolerance = 0.02 * first.abs().amax(dim=(1, 3))
    run = (distance <= tolerance).cumprod(dim=1).bool()  # [B, T], true for the first token unless it is NaN
    padding = run & (run.sum(dim=1, keepdim=True) > 1) & ~run.all(dim=1, keepdim=True)
    return ~padding[:, None, :, None]
