"""The specification, in plain PyTorch: calibrate, quantise, store, dequantise, attend over packed tokens, merge.

Runs on any device and is the path for CPUs.  Arithmetic is float32, and float64 where the input is.  Kernels are
tested against it on the same codes.

    B batch, H_kv key/value heads, H_q query heads, T tokens, S queries, D head_dim (of keys or of values)
"""

import math

import torch

from . import packing
from .packing import BLOCK_TOKENS
from .parts import Calibration, KVView, PackedStates
from .presets import Format
from .rotation import rotate, unrotate

# Fewer tokens say too little about a channel: their statistics are left neutral.
MIN_CALIBRATION_TOKENS = 16
# Room that float8 scales leave above the largest element of the first tokens; a float format does not feel it.
FLOAT8_HEADROOM = 4.0
# Larger elements count as this large: their scale is beyond float16 anyway.
LARGEST = 2.0**50
# Packed tokens that attention holds unpacked at a time: what bounds its memory.
TILE_TOKENS = 16 * BLOCK_TOKENS


# ---------------------------------------------------------------------------------------------------- quantisers


def calibrate(x: torch.Tensor, fmt: Format, center: bool, smooth: float, counts: torch.Tensor) -> Calibration:
    """Measure what `Calibration` holds on the first tokens `x` [B, H_kv, T, D].

    `counts` bool [B, 1, T, 1] says which tokens count (not padding); tokens with NaN or inf never do.
    """
    x = _finite_or_nan(x)
    counts = counts & x.isfinite().all(dim=-1, keepdim=True)
    total = counts.sum(dim=2, keepdim=True)
    enough = total >= MIN_CALIBRATION_TOKENS
    mean = size = scale = None
    x = torch.where(counts, x, 0.0)
    if center:
        mean = torch.where(enough, x.sum(dim=2, keepdim=True) / total.clamp_min(1), 0.0)
        x = torch.where(counts, x - mean, 0.0)
    if smooth > 0:
        rms = (x.square().sum(dim=2, keepdim=True) / total.clamp_min(1)).sqrt()
        average = rms.mean(dim=-1, keepdim=True)
        # A dead channel must not divide by zero: a thousandth of the average is as good as none.
        size = (rms / _divisor(average)).clamp_min(1e-3) ** smooth
        size = torch.where(enough & (average > 0), size, 1.0)
        x = x / size
    if fmt.float8 is not None:
        largest = x.abs().amax(dim=(2, 3), keepdim=True) * FLOAT8_HEADROOM / torch.finfo(fmt.float8).max
        scale = torch.where(largest > 0, torch.exp2(torch.ceil(torch.log2(largest))), 1.0)
    return Calibration(center=mean, smooth=size, scale=scale)


def quantize(
    x: torch.Tensor, fmt: Format, calibration: Calibration
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Vectors `x` [B, H_kv, T, D] to codes uint8 [B, H_kv, T, D], scale and zero float16 [B, H_kv, T] or None.

    A vector with NaN or inf gets a NaN scale (float8: NaN codes), so it reads back as NaN and spoils no other.
    """
    x = _finite_or_nan(x)
    if calibration.center is not None:
        x = x - calibration.center
    if calibration.smooth is not None:
        x = x / calibration.smooth
    if fmt.float8 is not None:
        assert calibration.scale is not None
        limit = torch.finfo(fmt.float8).max
        scaled = (x / calibration.scale).clamp(-limit, limit)
        return scaled.float().to(fmt.float8).view(torch.uint8), None, None
    assert fmt.codebook is not None
    if fmt.has_zero:
        low, high = x.amin(dim=-1), x.amax(dim=-1)
        zero = _half((low + high) / 2)
        # The range around the zero as it is stored: where float16 is coarse, a narrower one would clip.
        reach = torch.maximum(high - zero.to(x.dtype), zero.to(x.dtype) - low)
        step = _half(reach / fmt.codebook.magnitudes[-1])
        codes = fmt.codebook.nearest((x - zero[..., None].to(x.dtype)) / _divisor(step[..., None].to(x.dtype)))
        return codes, step, zero
    r = rotate(x)
    norm = r.norm(dim=-1, keepdim=True)
    codes = fmt.codebook.nearest(r * (math.sqrt(r.shape[-1]) / fmt.codebook.unit) / _divisor(norm))
    c = fmt.codebook.values(x.device, x.dtype)[codes.int()]
    return codes, _half(_scale(r, c, norm[..., 0], fmt)), None


def _scale(r: torch.Tensor, c: torch.Tensor, norm: torch.Tensor, fmt: Format) -> torch.Tensor:
    """The factor of `Format.scale`, [B, H_kv, T], from rotated vectors and their code values [B, H_kv, T, D]."""
    if fmt.scale == "norm":
        return norm / c.norm(dim=-1)
    inner = (r * c).sum(dim=-1)
    if fmt.scale == "unbiased":
        return norm.square() / _divisor(inner)
    return inner / c.square().sum(dim=-1)


def decode(states: PackedStates, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Code values of all tokens there is room for, [B, H_kv, T, D], before scale, zero and calibration."""
    if states.role == "value":
        codes = packing.unpack(states.packed, states.format.bits, BLOCK_TOKENS).transpose(-1, -2)
    else:
        codes = packing.unpack(states.packed, states.format.bits, states.head_dim)
    values = states.format.values(codes.device, dtype)
    return values.index_select(0, codes.flatten().int()).view(codes.shape).flatten(2, 3)


def dequantize(states: PackedStates, length: int, dtype: torch.dtype) -> torch.Tensor:
    """The first `length` tokens as vectors of the model, [B, H_kv, length, D] in `dtype`."""
    compute = _compute_dtype(dtype)
    states = states.tokens(0, length)
    calibration = states.calibration
    x = _scaled(states, length, compute)
    if states.format.rotated:
        x = unrotate(x)
    if calibration.smooth is not None:
        x = x * calibration.smooth.to(compute)
    if calibration.center is not None:
        x = x + calibration.center.to(compute)
    return x.to(dtype)


def store(states: PackedStates, x: torch.Tensor, start: int) -> None:
    """Quantise `x` [B, H_kv, T, D] and write it, in place, as tokens start .. start + T of `states`.

    A block that is already filled up to `start` keeps the bits of its tokens.
    """
    codes, scale, zero = quantize(x, states.format, states.calibration)
    end = start + x.shape[2]
    for factors, new in ((states.scale, scale), (states.zero, zero)):
        if factors is not None and new is not None:
            factors[:, :, start:end] = new
    first, offset = divmod(start, BLOCK_TOKENS)
    bits, by_channel = states.format.bits, states.role == "value"
    if offset:
        block = packing.unpack(states.packed[:, :, first], bits, BLOCK_TOKENS if by_channel else states.head_dim)
        block = block.transpose(-1, -2) if by_channel else block
        codes = torch.cat([block[:, :, :offset], codes], dim=2)
    codes = torch.nn.functional.pad(codes, (0, 0, 0, -codes.shape[2] % BLOCK_TOKENS)).unflatten(2, (-1, BLOCK_TOKENS))
    codes = codes.transpose(-1, -2) if by_channel else codes
    states.packed[:, :, first : first + codes.shape[2]] = packing.pack(codes, bits)


# ----------------------------------------------------------------------------------------------------- attention


def attend(
    query: torch.Tensor,
    view: KVView,
    mask: torch.Tensor | None,
    scaling: float,
    *,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    is_causal: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of `query` [B, H_q, S, D] over everything in `view`, never unpacking more than a tile of it.

    mask:    [B or 1, H_q or 1, S, view.length]: bool (True takes part) or float (added to the scores), or None: causal
             if `is_causal`, the last query seeing every token, else full
    scaling: factor of the scores; softcap: scores become softcap * tanh(scores / softcap), before the mask
    sinks:   [1 or B, H_q, 1 or S], one more logit per query that takes weight and gives nothing (GPT-OSS `s_aux`)

    Returns the output [B, H_q, S, D_v] in the query's dtype and the log of the softmax' sum, [B, H_q, S] in float32
    (float64).  A query that may see no token gets zeros.
    """
    batch, num_heads, num_queries, _ = query.shape
    num_kv_heads = view.keys.shape[1]
    scores = _Scores(query, num_kv_heads, view.length, mask, scaling, softcap, is_causal)
    partials = []
    if view.sink_keys is not None and view.sink_values is not None:
        partials.append(_attend_exact(scores, view.sink_keys, view.sink_values, start=0))
    if view.packed_length:
        partials.append(_attend_packed(scores, view))
    if view.keys.shape[2]:
        partials.append(_attend_exact(scores, view.keys, view.values, start=view.length - view.keys.shape[2]))
    out, lse = merge([out for out, _ in partials], [lse for _, lse in partials])
    out, lse = out.flatten(1, 2), lse.flatten(1, 2)
    if sinks is not None:
        sinks = sinks.to(lse.dtype)
        out, lse = out * torch.sigmoid(lse - sinks)[..., None], torch.logaddexp(lse, sinks)
    return out.to(query.dtype), lse


def merge(outs: list[torch.Tensor], lses: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over a whole from attention over its parts: outputs [..., S, D] and log-sum-exps [..., S]."""
    lse = torch.stack(lses)
    weights = _softmax(lse, dim=0)
    return (torch.stack(outs) * weights[..., None]).sum(dim=0), torch.logsumexp(lse, dim=0)


class _Scores:
    """Turns products of queries and keys into masked scores, for any span of the tokens."""

    def __init__(
        self,
        query: torch.Tensor,
        num_kv_heads: int,
        length: int,
        mask: torch.Tensor | None,
        scaling: float,
        softcap: float | None,
        is_causal: bool,
    ) -> None:
        self.group, self.num_queries = query.shape[1] // num_kv_heads, query.shape[2]
        # [B, H_kv, G * S, D]: the query heads of a KV head as more queries, so that keys are never repeated
        self.query = (_compute(query) * scaling).unflatten(1, (num_kv_heads, -1)).flatten(2, 3)
        self.softcap = softcap
        self.first_limit = length - self.num_queries if mask is None and is_causal and self.num_queries > 1 else None
        self.mask = mask
        if mask is not None:
            if mask.dim() != 4 or mask.shape[-1] < length:
                raise ValueError(f"expected an attention mask [B, H, S, {length} or more], got {list(mask.shape)}")
            split = (num_kv_heads, -1) if mask.shape[1] > 1 else (1, 1)
            self.mask = mask.unflatten(1, split)  # [B, H_kv or 1, G or 1, S, T]

    def masked(self, products: torch.Tensor, start: int) -> torch.Tensor:
        """Scores [B, H_kv, G, S, T] of tokens start .. start + T from products [B, H_kv, G * S, T]."""
        scores = products.unflatten(2, (self.group, self.num_queries))
        end = start + scores.shape[-1]
        if self.softcap is not None:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        if self.mask is not None:
            part = self.mask[..., start:end]
            return scores.masked_fill(~part, -torch.inf) if part.dtype == torch.bool else scores + part
        if self.first_limit is not None and end > self.first_limit + 1:
            row = torch.arange(self.num_queries, device=scores.device)[:, None]
            column = torch.arange(start, end, device=scores.device)
            return scores.masked_fill(column > row + self.first_limit, -torch.inf)
        return scores


def _softmax(scores: torch.Tensor, dim: int) -> torch.Tensor:
    """Softmax that gives zeros where every score is -inf."""
    none = (scores == -torch.inf).all(dim=dim, keepdim=True)
    return torch.softmax(scores.masked_fill(none, 0.0), dim=dim).masked_fill(none, 0.0)


def _attend_exact(
    scores: _Scores, keys: torch.Tensor, values: torch.Tensor, start: int
) -> tuple[torch.Tensor, torch.Tensor]:
    keys, values = keys.to(scores.query.dtype), values.to(scores.query.dtype)
    masked = scores.masked(scores.query @ keys.mT, start)
    out = _softmax(masked, dim=-1).flatten(2, 3) @ values
    return out.unflatten(2, masked.shape[2:4]), torch.logsumexp(masked, dim=-1)


def _attend_packed(scores: _Scores, view: KVView) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over the packed tokens, a tile at a time; rotation and centre are undone once, on the merged output."""
    key, value = view.key, view.value
    assert key is not None and value is not None
    query = scores.query
    offset = None if key.calibration.center is None else query @ key.calibration.center.to(query.dtype).mT
    if key.calibration.smooth is not None:
        query = query * key.calibration.smooth.to(query.dtype)
    if key.format.rotated:
        query = rotate(query)
    outs, lses = [], []
    for start in range(0, view.packed_length, TILE_TOKENS):
        end = min(start + TILE_TOKENS, view.packed_length)
        products = query @ _scaled(key.tokens(start, end), end - start, query.dtype).mT
        products = products if offset is None else products + offset
        masked = scores.masked(products, view.sink_length + start)
        out = _softmax(masked, dim=-1).flatten(2, 3) @ _scaled(value.tokens(start, end), end - start, query.dtype)
        outs.append(out.unflatten(2, masked.shape[2:4]))
        lses.append(torch.logsumexp(masked, dim=-1))
    out, lse = merge(outs, lses)
    if value.format.rotated:
        out = unrotate(out)
    if value.calibration.center is not None:
        seen = (lse != -torch.inf)[..., None]
        out = out + value.calibration.center.to(out.dtype)[:, :, None] * seen
    return out, lse


def _scaled(states: PackedStates, length: int, dtype: torch.dtype) -> torch.Tensor:
    """Code values with scale and zero, in the rotated, smoothed, centred space: [B, H_kv, length, D]."""
    x = decode(states, dtype)[:, :, :length]
    if states.scale is not None:
        x = x * states.scale[:, :, :length, None].to(dtype)
    if states.calibration.scale is not None:
        x = x * states.calibration.scale.to(dtype)
    return x if states.zero is None else x + states.zero[:, :, :length, None].to(dtype)


# ------------------------------------------------------------------------------------------------------- helpers


def _compute_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _compute(x: torch.Tensor) -> torch.Tensor:
    return x.to(_compute_dtype(x.dtype))


def _finite_or_nan(x: torch.Tensor) -> torch.Tensor:
    """`x` in the dtype of the arithmetic, inf as NaN, and no element so large that its square would overflow."""
    x = _compute(x)
    return torch.where(x.isfinite(), x.clamp(-LARGEST, LARGEST), torch.nan)


def _divisor(x: torch.Tensor) -> torch.Tensor:
    """`x` with zeros made ones: what is divided is zero there, too."""
    return torch.where(x == 0, torch.ones_like(x), x)


def _half(x: torch.Tensor) -> torch.Tensor:
    """float16, the largest finite one where `x` is beyond it, NaN where `x` is NaN or inf."""
    limit = torch.finfo(torch.float16).max
    return torch.where(x.isfinite(), x.clamp(-limit, limit), torch.nan).to(torch.float16)
