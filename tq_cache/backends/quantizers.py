"""The quantisers' specification, in plain PyTorch: quantise, store, decode, dequantise.

Runs on any device and is the path for CPUs.  Arithmetic is float32, and float64 where the input is.

    B batch, H_kv key/value heads, T tokens, D head_dim (of keys or of values)
"""

import math

import torch

from ..formats import packing
from ..formats.packing import BLOCK_TOKENS
from ..formats.presets import Format
from ..formats.rotation import rotate, unrotate
from ..formats.states import Calibration, PackedStates

# Larger elements count as this large: their scale is beyond float16 anyway.
LARGEST = 2.0**50


def quantize(
    x: torch.Tensor, fmt: Format, calibration: Calibration
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Vectors `x` [B, H_kv, T, D] to codes uint8 [B, H_kv, T, D], scale and zero float16 [B, H_kv, T] or None.

    A vector with NaN or inf gets a NaN scale and reads back as NaN (float8 with a scale per head: those elements do);
    it spoils no other.
    """
    x = _finite_or_nan(x)
    if calibration.center is not None:
        x = x - calibration.center
    if calibration.smooth is not None:
        x = x / calibration.smooth
    if fmt.float8 is not None:
        limit = torch.finfo(fmt.float8).max
        per_token = _token_scale(x, limit) if fmt.scale == "per_token" else None
        scale = calibration.scale if per_token is None else per_token[..., None].to(x.dtype)
        assert scale is not None
        scaled = (x / scale).clamp(-limit, limit)
        return scaled.float().to(fmt.float8).view(torch.uint8), per_token, None
    if fmt.scale == "largest":
        r = rotate(x)
        step = _half(r.abs().amax(dim=-1) / 127)
        codes = (r / divisor(step[..., None].to(r.dtype))).nan_to_num(0.0).round().clamp(-127, 127)
        return codes.to(torch.int8).view(torch.uint8), step, None
    assert fmt.codebook is not None
    if fmt.has_zero:
        low, high = x.amin(dim=-1), x.amax(dim=-1)
        zero = _half((low + high) / 2)
        # The range around the zero as it is stored: where float16 is coarse, a narrower one would clip.
        reach = torch.maximum(high - zero.to(x.dtype), zero.to(x.dtype) - low)
        step = _half(reach / fmt.codebook.magnitudes[-1])
        codes = fmt.codebook.nearest((x - zero[..., None].to(x.dtype)) / divisor(step[..., None].to(x.dtype)))
        return codes, step, zero
    r = rotate(x)
    norm = r.norm(dim=-1, keepdim=True)
    codes = fmt.codebook.nearest(r * (math.sqrt(r.shape[-1]) / fmt.codebook.unit) / divisor(norm))
    c = fmt.codebook.values(x.device, x.dtype)[codes.int()]
    return codes, _half(_scale(r, c, norm[..., 0], fmt)), None


def _token_scale(x: torch.Tensor, limit: float) -> torch.Tensor:
    """The least power of two of float16, [B, H_kv, T], with which vectors [B, H_kv, T, D] stay below `limit`."""
    largest = x.abs().amax(dim=-1) / limit
    return torch.exp2(torch.ceil(torch.log2(largest)).clamp(-24.0, 15.0)).to(torch.float16)


def _scale(r: torch.Tensor, c: torch.Tensor, norm: torch.Tensor, fmt: Format) -> torch.Tensor:
    """The factor of `Format.scale`, [B, H_kv, T], from rotated vectors and their code values [B, H_kv, T, D]."""
    if fmt.scale == "norm":
        return norm / c.norm(dim=-1)
    return norm.square() / divisor((r * c).sum(dim=-1))


def decode(states: PackedStates, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Code values of all tokens there is room for, [B, H_kv, T, D], before scale, zero and calibration."""
    if states.format.exact:
        return states.packed.unflatten(-1, (BLOCK_TOKENS, states.head_dim)).flatten(2, 3).to(dtype)
    if states.by_channel:
        codes = packing.unpack(states.packed, states.format.bits, BLOCK_TOKENS).transpose(-1, -2)
    else:
        codes = packing.unpack(states.packed, states.format.bits, states.head_dim)
    values = states.format.values(codes.device, dtype)
    return values.index_select(0, codes.flatten().int()).view(codes.shape).flatten(2, 3)


def dequantize(states: PackedStates, length: int, dtype: torch.dtype) -> torch.Tensor:
    """The first `length` tokens as vectors of the model, [B, H_kv, length, D] in `dtype`."""
    arithmetic = compute_dtype(dtype)
    states = states.tokens(0, length)
    calibration = states.calibration
    x = scaled(states, length, arithmetic)
    if states.format.rotated:
        x = unrotate(x)
    if calibration.smooth is not None:
        x = x * calibration.smooth.to(arithmetic)
    if calibration.center is not None:
        x = x + calibration.center.to(arithmetic)
    return x.to(dtype)


def store(states: PackedStates, x: torch.Tensor, start: int) -> None:
    """Quantise `x` [B, H_kv, T, D] and write it, in place, as tokens start .. start + T of `states`.

    A block that is already filled up to `start` keeps the bits of its tokens.
    """
    end = start + x.shape[2]
    if states.format.exact:
        token = torch.arange(start, end, device=x.device)
        rows = states.packed.unflatten(-1, (BLOCK_TOKENS, states.head_dim))
        rows[:, :, token // BLOCK_TOKENS, token % BLOCK_TOKENS] = x.detach()
        return
    codes, scale, zero = quantize(x, states.format, states.calibration)
    for factors, new in ((states.scale, scale), (states.zero, zero)):
        if factors is not None and new is not None:
            factors[:, :, start:end] = new
    first, offset = divmod(start, BLOCK_TOKENS)
    bits, by_channel = states.format.bits, states.by_channel
    if offset:
        block = packing.unpack(states.packed[:, :, first], bits, BLOCK_TOKENS if by_channel else states.head_dim)
        block = block.transpose(-1, -2) if by_channel else block
        codes = torch.cat([block[:, :, :offset], codes], dim=2)
    codes = torch.nn.functional.pad(codes, (0, 0, 0, -codes.shape[2] % BLOCK_TOKENS)).unflatten(2, (-1, BLOCK_TOKENS))
    codes = codes.transpose(-1, -2) if by_channel else codes
    states.packed[:, :, first : first + codes.shape[2]] = packing.pack(codes, bits)


def scaled(states: PackedStates, length: int, dtype: torch.dtype) -> torch.Tensor:
    """Code values with scale and zero, in the rotated, smoothed, centred space: [B, H_kv, length, D]."""
    x = decode(states, dtype)[:, :, :length]
    if states.scale is not None:
        x = x * states.scale[:, :, :length, None].to(dtype)
    if states.calibration.scale is not None:
        x = x * states.calibration.scale.to(dtype)
    return x if states.zero is None else x + states.zero[:, :, :length, None].to(dtype)


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def compute(x: torch.Tensor) -> torch.Tensor:
    return x.to(compute_dtype(x.dtype))


def _finite_or_nan(x: torch.Tensor) -> torch.Tensor:
    """`x` in the dtype of the arithmetic, inf as NaN, and no element so large that its square would overflow."""
    x = compute(x)
    return torch.where(x.isfinite(), x.clamp(-LARGEST, LARGEST), torch.nan)


def divisor(x: torch.Tensor) -> torch.Tensor:
    """`x` with zeros made ones: what is divided is zero there, too."""
    return torch.where(x == 0, torch.ones_like(x), x)


def _half(x: torch.Tensor) -> torch.Tensor:
    """float16, the largest finite one where `x` is beyond it, NaN where `x` is NaN or inf."""
    limit = torch.finfo(torch.float16).max
    return torch.where(x.isfinite(), x.clamp(-limit, limit), torch.nan).to(torch.float16)
