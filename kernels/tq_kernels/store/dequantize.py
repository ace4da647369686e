"""Dequantise: packed states back to vectors of any dtype, for whoever cannot attend to packed bits.

One program takes some blocks of 64 tokens of one sequence and KV head.  Codes become float16, exactly; rotated ones
are multiplied by the signs of the rotation on the tensor cores, whose float32 sums of such few bits are exact, too.
All else is float32.
"""

import torch
import triton
import triton.language as tl

from ..bits.layout import BLOCK_TOKENS, channels, key_channels, tile_order
from ..bits.to_float16 import decoders, load_keys, load_values
from ..device import Device, describe
from ..launch import Launch, Program
from ..states import PackedStrides, PairSteps, States
from ..tuning import DEQUANTIZE_WARPS, dequantize_blocks, dequantize_columns

MAX_HEAD_DIM = 256  # wider rotations do not fit shared memory
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@triton.jit
def _rotation_signs(rotation, source, valid, column, DIM: tl.constexpr):
    """Rows `source` and some columns of a rotation: its signs, float16, and the size of each column's elements."""
    used = valid[:, None] & (column < DIM)[None, :]
    matrix = tl.load(rotation + source[:, None] * DIM + column[None, :], mask=used, other=0)
    size = tl.max(tl.abs(matrix), 0)
    return (matrix / tl.maximum(size, 1e-30)[None, :]).to(tl.float16), size


@triton.jit
def _load_block(
    packed, start, DIM: tl.constexpr, CODE: tl.constexpr, MODE: tl.constexpr, VALUE: tl.constexpr
):  # fmt: skip
    """Codes of a block as float16 [64 tokens, channels]; the order of both: see `_dequantize_kernel`."""
    if VALUE:
        return load_values(packed, start, 0, BLOCK_TOKENS, DIM, CODE, MODE, False).T
    else:
        return load_keys(packed, start, tl.arange(0, BLOCK_TOKENS), 0, DIM, CODE, MODE, False)


@triton.jit(do_not_specialize=["length", "blocks"])
def _dequantize_kernel(
    packed, center, smooth, rotation, out, length, blocks, strides,
    DIM: tl.constexpr, CODE: tl.constexpr, MODE: tl.constexpr, VALUE: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One program = COLUMNS channels of `blocks` blocks of one sequence and KV head."""
    BITS: tl.constexpr = CODE[0]
    head, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    pair = batch * tl.num_programs(1) + head
    codes = packed.packed + (batch * strides.packed.batch + head * strides.packed.head)
    scale = packed.scale + batch * strides.scale.batch + head * strides.scale.head
    if VALUE:
        source, order = tl.arange(0, channels(DIM)), tile_order(BITS, BLOCK_TOKENS)
        valid = source < DIM
    else:
        source, valid = key_channels(DIM, BITS)
        order = tl.arange(0, BLOCK_TOKENS)
    column = source
    if rotation is not None:
        column = tl.program_id(0) % tl.cdiv(DIM, COLUMNS) * COLUMNS + tl.arange(0, COLUMNS)
        signs, size = _rotation_signs(rotation, source, valid, column, DIM)
    inside = column < DIM
    first = tl.program_id(0) // tl.cdiv(DIM, COLUMNS) * blocks
    for block in tl.range(first, tl.minimum(first + blocks, tl.cdiv(length, BLOCK_TOKENS))):
        token = block * BLOCK_TOKENS + order
        x = _load_block(codes, block * BLOCK_TOKENS, DIM, CODE, MODE, VALUE)
        if rotation is not None:
            x = tl.dot(x, signs) * size[None, :]
        if scale.dtype.element_ty == tl.float32:  # one for all tokens
            x = x.to(tl.float32) * tl.load(scale)
        else:
            x = x.to(tl.float32) * tl.load(scale + token).to(tl.float32)[:, None]
        if packed.zero is not None:
            zero = packed.zero + batch * strides.zero.batch + head * strides.zero.head
            x += tl.load(zero + token).to(tl.float32)[:, None]
        if smooth is not None:
            x *= tl.load(smooth + pair * DIM + column, mask=inside, other=0)[None, :]
        if center is not None:
            x += tl.load(center + pair * DIM + column, mask=inside, other=0)[None, :]
        place = (pair * length + token)[:, None] * DIM + column[None, :]
        tl.store(out + place, x.to(out.dtype.element_ty), mask=(token < length)[:, None] & inside[None, :])


def dequantize(states: States, length: int, dtype: torch.dtype, *, value: bool) -> torch.Tensor:
    """The first `length` tokens of packed keys, or of packed values, as vectors of the model.

    states: see `States`; head_dim at most 256
    dtype:  bfloat16, float16 or float32

    Returns [B, H_kv, length, D], contiguous.  Raises ValueError where an argument is none of these.
    """
    launch, out = dequantize_launch(states, length, dtype, value, describe(states.packed.device))
    if launch is not None:
        launch.run()
    return out


def dequantize_launch(
    states: States, length: int, dtype: torch.dtype, value: bool, device: Device
) -> tuple[Launch | None, torch.Tensor]:
    """The launch of `dequantize`, None if there is nothing to do, and its output."""
    states.check(length)
    dim = states.head_dim
    if dim > MAX_HEAD_DIM or dtype not in DTYPES:
        raise ValueError(
            f"expected a head_dim of at most {MAX_HEAD_DIM} and a dtype of {DTYPES}, got {dim} and {dtype}; "
            "use the reference, `tq_cache.backends.quantizers.dequantize`"
        )
    batch, heads = states.packed.shape[:2]
    out = torch.empty(batch, heads, length, dim, dtype=dtype, device=states.packed.device)
    if out.numel() == 0:
        return None, out
    rotated, count = states.coding.rotated, triton.cdiv(length, BLOCK_TOKENS.value)
    columns = dequantize_columns(channels(dim), rotated)
    blocks = dequantize_blocks(count * heads * batch, rotated)
    grid = (triton.cdiv(count, blocks) * triton.cdiv(dim, columns), heads, batch)
    constants = dict(DIM=dim, CODE=states.coding.code, MODE=decoders(device), VALUE=value, COLUMNS=columns)
    packed, scale, zero = states.read
    strides = PackedStrides(
        PairSteps(*packed.stride()[:2]),
        PairSteps(*scale.stride()[:2]),
        None if zero is None else PairSteps(*zero.stride()[:2]),
    )
    arguments = (states.read, states.center, states.smooth, states.rotation, out, length, blocks, strides)
    program = Program(_dequantize_kernel, device, constants, dict(num_warps=DEQUANTIZE_WARPS))
    return Launch(program, grid, arguments), out
