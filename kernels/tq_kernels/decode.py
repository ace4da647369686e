"""Decode attention over a packed cache: one query token per sequence, split along the tokens.

Scores are computed transposed, tokens on M and the query heads of one KV head on N:

    S^T[tokens, group] = K[tokens, D] . Q^T[D, group]        O^T[D, group] += V^T[D, tokens] . P^T[tokens, group]

so each packed byte is read and decoded once for the whole group, and codes, turned into e4m3 bytes in registers, go to
the fp8 tensor cores in the order in which they lie.  A tile of tokens is processed in the parts in which value rows
are packed (`primitives.parts`): the score rows of a part are gathered in the order of its value columns.
"""

import torch
import triton
import triton.language as tl

from .primitives import (
    BLOCK_TOKENS,
    decode_part,
    exp2,
    gather_terms,
    keep_tables,
    load_keys,
    load_scales,
    load_values,
    parts,
    rough_log2,
    spread_terms,
    to_places,
    to_rows,
)
from .tuning import Config, choose, choose_splits

LOG2E = 1.4426950408889634
P_SHIFT = tl.constexpr(7.5)  # probabilities times 2**7.5, at most 2**7.6 with `rough_log2`, to use the range of e4m3
LIFT = tl.constexpr(32.0)  # of the remainder of p: half a step at 2**7.6 is 8, times 32 still in range


@triton.jit
def _load_query(
    query, GROUP: tl.constexpr, COLUMNS: tl.constexpr, HEAD_DIM: tl.constexpr, PARTS: tl.constexpr,
    WIDTH: tl.constexpr, TERMS: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    """The group's query in parts, operands [WIDTH, COLUMNS * TERMS] scaled to at most 448, and the scale."""
    # The second term is made by column, not by `spread_terms`: from this layout Triton 3.6 stores that one wrongly.
    channel = tl.arange(0, WIDTH)
    column = tl.arange(0, COLUMNS * TERMS)
    mask = (channel < HEAD_DIM // PARTS)[:, None] & (column % COLUMNS < GROUP)[None, :]
    pointer = query + (channel[:, None] + (column % COLUMNS * HEAD_DIM)[None, :])
    loaded = ()
    peak = 1e-30
    for part in tl.static_range(PARTS):
        x = tl.load(pointer + part * (HEAD_DIM // PARTS), mask=mask, other=0).to(tl.float32)
        peak = tl.maximum(peak, tl.max(tl.abs(x)))
        loaded = loaded + (x,)
    operands = ()
    for part in tl.static_range(PARTS):
        x = loaded[part] * (448.0 / peak)
        if FP8:
            first = x.to(tl.float8e4nv).to(tl.float32)
            x = tl.where((column < COLUMNS)[None, :], first, x - first).to(tl.float8e4nv)
        else:
            x = x.to(tl.float16)
        operands = operands + (x,)
    return operands, peak / 448.0


@triton.jit
def _decode_split_kernel(
    query, key_packed, key_scale, value_packed, value_scale, value_zero, partial, partial_lse,
    strides, tokens, blocks, softmax_scale,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, KEY_BITS: tl.constexpr, VALUE_BITS: tl.constexpr,
    KEY_TABLE: tl.constexpr, VALUE_TABLE: tl.constexpr, ZERO: tl.constexpr,
    TILE: tl.constexpr, COLUMNS: tl.constexpr, TERMS: tl.constexpr, FP8: tl.constexpr, MASKED: tl.constexpr,
    WARPS: tl.constexpr,
):  # fmt: skip
    """One program = one split of the tokens of one sequence and KV head, for all query heads of its group."""
    if FP8:
        keep_tables(tokens, KEY_TABLE, VALUE_TABLE)
    KEY_PARTS: tl.constexpr = parts(KEY_BITS)
    VALUE_PARTS: tl.constexpr = parts(VALUE_BITS)
    WIDTH: tl.constexpr = max(triton.next_power_of_2(HEAD_DIM // KEY_PARTS), 32)
    CHANNELS: tl.constexpr = max(triton.next_power_of_2(HEAD_DIM), 64)
    ROWS: tl.constexpr = TILE // VALUE_PARTS  # score rows of a part
    SPAN: tl.constexpr = BLOCK_TOKENS // VALUE_PARTS  # of them, those of one block
    REPEATS: tl.constexpr = max(ROWS // 16 // WARPS, 1)
    SLOTS: tl.constexpr = ROWS // (16 * REPEATS)
    UNIT: tl.constexpr = 1.0 if FP8 else 256.0  # see `decode_part`

    split, head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    pair = batch * tl.num_programs(1) + head
    q, factor = _load_query(query + pair * GROUP * HEAD_DIM, GROUP, COLUMNS, HEAD_DIM, KEY_PARTS, WIDTH, TERMS, FP8)
    key_packed += batch * strides[0] + head * strides[1]
    key_scale += batch * strides[2] + head * strides[3]
    value_packed += batch * strides[4] + head * strides[5]
    value_scale += batch * strides[6] + head * strides[7]
    value_zero += batch * strides[6] + head * strides[7]
    factor *= softmax_scale * UNIT
    if KEY_BITS == 8:
        factor *= tl.load(key_scale)

    place = tl.arange(0, ROWS)  # along a value row; `to_rows` gives the score row
    place = place // SPAN * BLOCK_TOKENS + place % SPAN
    peak = tl.full((COLUMNS,), -1e30, tl.float32)  # finite: exp2(-inf - peak) is 0 even where all is masked
    total = tl.zeros((ROWS, COLUMNS), tl.float32)  # summed over its rows at the end, like `zeros`
    zeros = tl.zeros((ROWS, COLUMNS), tl.float32)
    out = tl.zeros((CHANNELS, COLUMNS * TERMS), tl.float32)
    tiles = tl.cdiv(tokens, TILE)
    per_split = tl.cdiv(tiles, tl.num_programs(0))
    for tile in range(split * per_split, tl.minimum((split + 1) * per_split, tiles)):
        # The last tile is moved back so that no load passes the last block; what it repeats is masked out.
        first = tile * TILE
        start = first if MASKED else tl.minimum(first, blocks * BLOCK_TOKENS - TILE)
        values = load_values(value_packed, start, blocks, VALUE_BITS, HEAD_DIM, TILE, CHANNELS, MASKED)
        scores, scales, shifts = (), (), ()
        highest = tl.full((ROWS, COLUMNS), float("-inf"), tl.float32)
        for part in tl.static_range(VALUE_PARTS):
            offset = place + part * SPAN
            row = to_rows(offset, SLOTS, REPEATS)
            if ZERO:
                shifts = shifts + (load_scales(value_zero, start, offset, blocks, SLOTS, REPEATS, MASKED),)
            keys = load_keys(key_packed, start, row, blocks, KEY_BITS, HEAD_DIM, WIDTH, MASKED)
            s = tl.zeros((ROWS, COLUMNS * TERMS), tl.float32)
            for k in tl.static_range(KEY_PARTS):
                s = tl.dot(decode_part(keys, k, KEY_BITS, KEY_TABLE, FP8), q[k], s)
            scale = tl.full((ROWS,), 1.0, tl.float32)
            if KEY_BITS != 8:
                scale = load_scales(key_scale, start, offset, blocks, SLOTS, REPEATS, MASKED)
            new = (start - first + row).to(tl.uint32, bitcast=True) < (tokens - first).to(tl.uint32, bitcast=True)
            s = gather_terms(s, TERMS, 1) * (scale * factor)[:, None] + tl.where(new, 0.0, float("-inf"))[:, None]
            scores = scores + (s,)
            if VALUE_BITS != 8:
                # The reference is the largest p * scale, not the largest p, so that p * scale suits e4m3.
                scale = tl.maximum(load_scales(value_scale, start, offset, blocks, SLOTS, REPEATS, MASKED), 1e-7)
                scales = scales + (scale,)
                s += rough_log2(scale)[:, None]
            highest = tl.maximum(highest, s)
        previous = peak
        peak = tl.maximum(peak, tl.max(highest, 0))
        alpha = exp2(previous - peak, FP8)
        total *= alpha[None, :]
        zeros *= alpha[None, :]
        operands = ()
        for part in tl.static_range(VALUE_PARTS):
            p = exp2(scores[part] - (peak - P_SHIFT)[None, :], FP8)
            total += p
            if ZERO:
                zeros += p * shifts[part][:, None]
            if VALUE_BITS != 8:
                p = p * scales[part][:, None]
            operands = operands + (spread_terms(to_places(p, SLOTS, REPEATS), TERMS, LIFT, FP8),)
        tile_out = tl.zeros((CHANNELS, COLUMNS * TERMS), tl.float32)
        for part in tl.static_range(VALUE_PARTS):
            tile_out = tl.dot(decode_part(values, part, VALUE_BITS, VALUE_TABLE, FP8), operands[part], tile_out)
        if TERMS == 2:
            alpha = tl.join(alpha, alpha).permute(1, 0).reshape(COLUMNS * 2)
        out = out * alpha[None, :] + tile_out  # an ordinary add: the tensor core's own sum keeps 14 bits

    out = gather_terms(out, TERMS, LIFT) * UNIT
    if VALUE_BITS == 8:
        out = out * tl.load(value_scale)
    total = tl.sum(total, 0)
    out = (out + tl.sum(zeros, 0)[None, :]) / tl.maximum(total, 1e-30)[None, :]
    lse = tl.where(total > 0, peak - P_SHIFT + tl.log2(tl.maximum(total, 1e-30)), float("-inf"))
    column, channel = tl.arange(0, COLUMNS), tl.arange(0, CHANNELS)
    index = (pair * tl.num_programs(0) + split) * GROUP + column
    mask = (column < GROUP)[None, :] & (channel < HEAD_DIM)[:, None]
    tl.store(partial + (index * HEAD_DIM)[None, :] + channel[:, None], out, mask=mask)
    tl.store(partial_lse + index, lse, mask=column < GROUP)


@triton.jit
def _decode_merge_kernel(
    partial, partial_lse, rotation, out, lse, splits,
    HEAD_DIM: tl.constexpr, CHANNELS: tl.constexpr, GROUP: tl.constexpr, SPLITS: tl.constexpr, ROTATE: tl.constexpr,
):  # fmt: skip
    """One program = one query head of one sequence: joins its splits and, for rotated values, rotates back."""
    head = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, SPLITS)
    channel = tl.arange(0, CHANNELS)
    row = (head // GROUP * splits + split) * GROUP + head % GROUP
    part = tl.load(partial_lse + row, mask=split < splits, other=float("-inf"))
    peak = tl.maximum(tl.max(part), -1e30)
    weight = tl.exp2(part - peak)
    total = tl.sum(weight)
    mask = (split < splits)[:, None] & (channel < HEAD_DIM)[None, :]
    x = tl.load(partial + row[:, None] * HEAD_DIM + channel[None, :], mask=mask, other=0)
    x = tl.sum(x * weight[:, None], 0) / tl.maximum(total, 1e-30)
    if ROTATE:  # x @ rotation, which undoes x @ rotation.T
        mask = (channel < HEAD_DIM)[:, None] & (channel < HEAD_DIM)[None, :]
        matrix = tl.load(rotation + channel[:, None] * HEAD_DIM + channel[None, :], mask=mask, other=0).to(tl.float32)
        x = tl.sum(x[:, None] * matrix, 0)
    tl.store(out + head * HEAD_DIM + channel, x.to(out.dtype.element_ty), mask=channel < HEAD_DIM)
    natural = (peak + tl.log2(tl.maximum(total, 1e-30))) * 0.6931471805599453
    tl.store(lse + head, tl.where(total > 0, natural, float("-inf")))


def code_table(magnitudes: tuple[float, ...]) -> tuple[int, int]:
    """The eight table bytes of a symmetric codebook whose magnitudes are exact in e4m3, as two 32-bit words.

    Eight magnitudes (4 bits) keep their sign apart; four or two (3 or 2 bits) are followed by their negatives.
    """
    values = magnitudes if len(magnitudes) == 8 else (*magnitudes, *(-m for m in magnitudes))
    codes = torch.tensor(values, dtype=torch.float8_e4m3fn).view(torch.uint8).tolist()
    codes += [0] * (8 - len(codes))
    return int.from_bytes(codes[:4], "little"), int.from_bytes(codes[4:], "little")


def decode(
    query: torch.Tensor, key: tuple[torch.Tensor, ...], value: tuple[torch.Tensor, ...], *, tokens: int,
    key_bits: int, value_bits: int, key_table: tuple[int, int], value_table: tuple[int, int], softmax_scale: float,
    rotation: torch.Tensor | None = None, fp8: bool = True, config: Config | None = None, splits: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Attention of one query token per sequence over the first `tokens` of a packed cache.

    query [B, heads, D], contiguous, in the rotated space of the keys; key = (packed, scale) and value = (packed,
    scale[, zero]) as in kernels/README.md, finite also beyond `tokens`.  `rotation` [D, D] undoes that of the values:
    out @ rotation.  Returns out [B, heads, D] and the natural log-sum-exp of the scores, float32 [B, heads].
    """
    batch, heads, head_dim = query.shape
    kv_heads, blocks = key[0].shape[1:3]
    group = heads // kv_heads
    config = config or choose(value_bits)
    splits = splits or choose_splits(config, batch * kv_heads, tokens, _multiprocessors(query.device))
    partial = torch.empty(batch, kv_heads, splits, group, head_dim, device=query.device, dtype=torch.float32)
    partial_lse = torch.empty(batch, kv_heads, splits, group, device=query.device, dtype=torch.float32)
    out, lse = torch.empty_like(query), torch.empty(batch, heads, device=query.device, dtype=torch.float32)
    _decode_split_kernel[splits, kv_heads, batch](
        query, *key, *value[:2], value[-1], partial, partial_lse, _strides(*key, *value[:2]), tokens, blocks,
        softmax_scale * LOG2E, GROUP=group, HEAD_DIM=head_dim, KEY_BITS=key_bits, VALUE_BITS=value_bits,
        KEY_TABLE=key_table, VALUE_TABLE=value_table, ZERO=len(value) == 3, TILE=config.tile,
        COLUMNS=8 if group <= 8 and fp8 else 16, TERMS=2 if fp8 else 1, FP8=fp8, MASKED=blocks * 64 < config.tile,
        WARPS=config.warps, num_warps=config.warps, num_stages=config.stages, maxnreg=config.registers,
    )  # fmt: skip
    _decode_merge_kernel[(batch * heads,)](
        partial, partial_lse, partial if rotation is None else rotation, out, lse, splits, HEAD_DIM=head_dim,
        CHANNELS=triton.next_power_of_2(head_dim), GROUP=group, SPLITS=triton.next_power_of_2(splits),
        ROTATE=rotation is not None, num_warps=4,
    )  # fmt: skip
    return out, lse


def _strides(*tensors: torch.Tensor) -> tuple[int, ...]:
    """Strides over sequences and KV heads; all further dimensions are contiguous."""
    return tuple(stride for t in tensors for stride in t.stride()[:2])


def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
