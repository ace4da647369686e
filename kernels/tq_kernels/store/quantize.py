"""Quantise on update: rotate, scale, code, pack and store keys and values, in one launch, in place."""

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..device import NO_GPU, Device, describe
from ..launch import Launch, Program, Signature, check_devices, signature
from ..states import BLOCK_TOKENS, MIN_MAX, Layout, PackedStrides, States, TokenSteps, Transform
from ..tuning import KERNEL_DTYPES, MANY_BLOCKS, QUANTIZE_LOOP, quantize_choices, quantize_stages
from .codes import float8_codes, float8_row, float8_words, gaussian_codes, uniform_codes
from .pack import column_channel, parts, row_place, store_key_plane, store_value_plane, store_value_words
from .rotate import load_rows, matrix_terms, rotate_halves, rotate_whole, rotated_center

_BLOCK = tl.constexpr(BLOCK_TOKENS)
_MIN_MAX = tl.constexpr(MIN_MAX)


@triton.jit
def _plain(x, center, smooth, channel, DIM: tl.constexpr):
    """x [64, WIDTH], not rotated: float32, centred and smoothed."""
    x = x.to(tl.float32)
    if center is not None:
        x -= tl.load(center + channel, mask=channel < DIM, other=0.0)[None, :]
    if smooth is not None:
        x /= tl.load(smooth + channel, mask=channel < DIM, other=1.0)[None, :]
    return x


class StoreStrides(NamedTuple):
    """Of vectors, and of the packed states they go to."""

    x: TokenSteps
    states: PackedStrides


@triton.jit
def _float8_blocks(
    x, states, strides, start, end, VALUE: tl.constexpr, VECTORS: tl.constexpr, ARITHMETIC: tl.constexpr,
    LOOP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """As `quantize_blocks`, for codes of 8 bits: a byte each, nothing to put together."""
    DIM: tl.constexpr = VECTORS.dim
    head, batch = tl.program_id(1), tl.program_id(2).to(tl.int64) // 2
    pair = batch * tl.num_programs(1) + head
    x += batch * strides.x.batch + head * strides.x.head
    packed = states.packed + (batch * strides.states.packed.batch + head * strides.states.packed.head)
    center, smooth = states.center, states.smooth
    if center is not None:
        center += pair * DIM
    if smooth is not None:
        smooth += pair * DIM
    factor = tl.load(states.head_scale + pair)
    row, channel = tl.arange(0, 64), tl.arange(0, triton.next_power_of_2(DIM))
    if VALUE:
        row = float8_row(row)
    for step in tl.range(0, LOOP, num_stages=STAGES):
        number = start // _BLOCK + tl.program_id(0) * LOOP + step
        token = number * _BLOCK + row
        valid = (token >= start) & (token < end)
        rows = load_rows(x, strides.x.token, token - start, valid, channel, DIM)
        rows = _plain(rows, center, smooth, channel, DIM)
        block = packed + number.to(tl.int64) * (_BLOCK * DIM)
        if VALUE:
            words = float8_words(rows, factor, VECTORS.exponent, ARITHMETIC.native)
            store_value_words(block, words, number, start, end, DIM)
        else:
            codes = float8_codes(rows, factor, VECTORS.exponent, ARITHMETIC.native)
            # 8 bytes at a time, as many as elements are loaded: 16 would change the layout of values beside these keys.
            column = tl.max_contiguous(channel, 8)
            tl.store(block + row[:, None] * DIM + column[None, :], codes, mask=valid[:, None] & (column < DIM)[None, :])


@triton.jit
def quantize_blocks(
    x, states, strides, start, end, VALUE: tl.constexpr, VECTORS: tl.constexpr, ARITHMETIC: tl.constexpr,
    LOOP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Blocks program_id(0) * LOOP .. of keys or of values (VALUE), counted from that of token `start`."""
    if VECTORS.bits == 8:
        _float8_blocks(x, states, strides, start, end, VALUE, VECTORS, ARITHMETIC, LOOP, STAGES)
    else:
        _coded_blocks(x, states, strides, start, end, VALUE, VECTORS, ARITHMETIC, LOOP, STAGES)


@triton.jit
def _halves(transform, VALUE: tl.constexpr, VECTORS: tl.constexpr, ARITHMETIC: tl.constexpr, WIDTH: tl.constexpr):
    """Both halves of the matrix of `rotate_halves`, and of the rotated centre."""
    DIM: tl.constexpr = VECTORS.dim
    half, column = tl.arange(0, DIM // 2), tl.arange(0, DIM // 2)
    if not VALUE:
        column = column_channel(half, DIM, WIDTH, parts(VECTORS.bits))
    rotation, smooth = transform.rotation, transform.smooth
    low = matrix_terms(rotation, smooth, half, column, DIM, ARITHMETIC.operand, VECTORS.terms)
    high = matrix_terms(rotation, smooth, half + DIM // 2, column, DIM, ARITHMETIC.operand, VECTORS.terms)
    centers = (
        rotated_center(transform.center, low, half, DIM),
        rotated_center(transform.center, high, half + DIM // 2, DIM),
    )
    return (low, high), centers


@triton.jit
def _coded_blocks(
    x, states, strides, start, end, VALUE: tl.constexpr, VECTORS: tl.constexpr, ARITHMETIC: tl.constexpr,
    LOOP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """As `quantize_blocks`, for codes of 4, 3 or 2 bits with a scale per token."""
    BITS: tl.constexpr = VECTORS.bits
    DIM: tl.constexpr = VECTORS.dim
    WIDTH: tl.constexpr = max(64, triton.next_power_of_2(DIM))
    PARTS: tl.constexpr = parts(BITS)
    PRECISION: tl.constexpr = ARITHMETIC.precision
    ROTATED: tl.constexpr = VECTORS.rule != _MIN_MAX
    HALVES: tl.constexpr = ROTATED and (DIM == 64 or DIM == 128)
    head, batch = tl.program_id(1), tl.program_id(2).to(tl.int64) // 2
    pair = batch * tl.num_programs(1) + head
    x += batch * strides.x.batch + head * strides.x.head
    packed = states.packed + (batch * strides.states.packed.batch + head * strides.states.packed.head)
    center, smooth = states.center, states.smooth
    if center is not None:
        center += pair * DIM
    if smooth is not None:
        smooth += pair * DIM
    transform = Transform(states.rotation, smooth, center)
    row, column = tl.arange(0, 64), tl.arange(0, WIDTH)
    if VALUE:
        part, word, i = row_place(row, BITS, ROTATED)
        row = part * (_BLOCK // PARTS) + 4 * word + i
    elif ROTATED:
        column = column_channel(column, DIM, WIDTH, PARTS)
    inside = None
    if WIDTH != DIM:
        inside = (column < DIM)[None, :]
    if HALVES:
        matrices, centers = _halves(transform, VALUE, VECTORS, ARITHMETIC, WIDTH)
    for step in tl.range(0, LOOP, num_stages=STAGES):
        number = start // _BLOCK + tl.program_id(0) * LOOP + step
        token = number * _BLOCK + row
        valid = (token >= start) & (token < end)
        block = packed + number.to(tl.int64) * (8 * DIM * BITS)
        if HALVES:
            r = rotate_halves(x, strides.x.token, token - start, valid, matrices, centers, DIM, PRECISION)
        elif ROTATED:
            r = rotate_whole(
                x, strides.x.token, token - start, valid, transform, column, DIM, ARITHMETIC.operand, VECTORS.terms,
                PRECISION,
            )  # fmt: skip
        else:
            r = load_rows(x, strides.x.token, token - start, valid, column, DIM)
            r = _plain(r, center, smooth, column, DIM)
        if ROTATED:
            index, sign, factor = gaussian_codes(r, inside, VECTORS, ARITHMETIC)
        else:
            index, sign, factor, middle = uniform_codes(r, inside, VECTORS)
            zero = states.zero + batch * strides.states.zero.batch + head * strides.states.zero.head
            tl.store(zero + token, middle, mask=valid)
        scale = states.scale + batch * strides.states.scale.batch + head * strides.states.scale.head
        tl.store(scale + token, factor, mask=valid)
        for plane in tl.static_range(2 if BITS == 3 else 1):
            if VALUE:
                store_value_plane(block, index, sign, number, token, start, end, BITS, DIM, ROTATED, plane)
            else:
                store_key_plane(block, index, sign, token, valid, BITS, DIM, plane)


@triton.jit(do_not_specialize=["start", "end"])
def _quantize_kernel(
    keys, key, values, value, key_strides, value_strides, start, end,
    KEY: tl.constexpr, VALUE: tl.constexpr, ARITHMETIC: tl.constexpr, LOOP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Keys or values by the last axis of the grid, into the `Tensors` of key or value.

    `start` and `end` are tokens of the packed states, KEY and VALUE each `Vectors`, or None.
    """
    if tl.program_id(2) % 2 == 0:
        if KEY is not None:
            quantize_blocks(keys, key, key_strides, start, end, False, KEY, ARITHMETIC, LOOP, STAGES)
    else:
        if VALUE is not None:
            quantize_blocks(values, value, value_strides, start, end, True, VALUE, ARITHMETIC, LOOP, STAGES)


def quantize(
    key: States | None, value: States | None, keys: torch.Tensor | None, values: torch.Tensor | None, start: int
) -> None:
    """Quantise `keys` [B, H_kv, T, D] and `values` [B, H_kv, T, D_v] into tokens start .. start + T; one launch.

    keys, values: bfloat16, float16 or float32, any strides but 1 in the last dimension; either pair may be None
    key, value:   written in place.  Packed bits, scales and zeros of tokens before `start` stay; bits beyond start + T
                  in the last block are undefined.

    A vector with NaN or inf gets a NaN scale (float8: such elements become NaN) and spoils no other.  Where vectors are
    rotated, elements beyond 2**50 are not cut off as the reference does, and those beyond 2**96 count as inf.  Raises
    ValueError, before anything is written, if shapes, dtypes or strides do not fit.
    """
    devices = [describe(x.device) for x in (keys, values) if x is not None]
    launch = quantize_launch(key, value, keys, values, start, *devices[:1])
    if launch is not None:
        launch.run()


def quantize_launch(
    key: States | None, value: States | None, keys: torch.Tensor | None, values: torch.Tensor | None, start: int,
    device: Device = NO_GPU,
) -> Launch | None:  # fmt: skip
    """The launch of `quantize`, None if there is nothing to store."""
    given = keys if keys is not None else values
    tokens = 0 if given is None else given.shape[2]
    blocks = -(-(start + tokens) // BLOCK_TOKENS) - start // BLOCK_TOKENS
    pairs = (key, keys), (value, values)
    layouts, signatures = [s and s.layout for s, _ in pairs], [None if x is None else signature(x) for _, x in pairs]
    plan = _plan(device, *layouts, *signatures, blocks)
    if start < 0:
        raise ValueError(f"expected start >= 0, got {start}")
    for layout in layouts:
        if layout is not None and start + tokens > layout.blocks * BLOCK_TOKENS:
            layout.check(start + tokens)
    if not tokens:
        return None
    tensors = key and key.tensors, value and value.tensors
    arguments = (keys, tensors[0], values, tensors[1], *plan.strides, start, start + tokens)
    return Launch(plan.program, plan.grid, arguments)


class _Plan(NamedTuple):
    """What is worked out once for layouts and signatures."""

    program: Program
    grid: tuple[int, int, int]
    strides: tuple[StoreStrides | None, StoreStrides | None]


@lru_cache(maxsize=256)
def _plan(
    device: Device, key: Layout | None, value: Layout | None, keys: Signature | None, values: Signature | None,
    blocks: int,
) -> _Plan:  # fmt: skip
    """For tokens of so many `blocks`; raises ValueError unless keys and values fit each other and the packed states."""
    pairs = [(layout, x) for layout, x in ((key, keys), (value, values)) if layout is not None or x is not None]
    for layout, x in pairs:
        check_vectors(layout, x, pairs[0][1])
    first = pairs[0][1] if pairs else None
    if first is None:
        return _Plan(Program(_quantize_kernel, device, {}, {}), (0, 0, 0), (None, None))
    batch, heads, _, _ = first.shape
    loop = QUANTIZE_LOOP if blocks * heads * batch >= MANY_BLOCKS else 1
    constants, options = quantize_choices(key, value, first.dtype, device)
    program = Program(
        _quantize_kernel, device, constants | dict(LOOP=loop, STAGES=quantize_stages(constants)), options
    )  # fmt: skip
    strides = _strides(key, keys), _strides(value, values)
    return _Plan(program, (-(-blocks // loop), heads, 2 * batch), strides)


def _strides(layout: Layout | None, x: Signature | None) -> StoreStrides | None:
    return None if layout is None or x is None else StoreStrides(TokenSteps(*x.strides[:3]), layout.stored_strides)


def check_vectors(layout: Layout | None, x: Signature | None, first: Signature | None) -> None:
    """Raise ValueError unless x goes with the `first` one and with the packed states."""
    if layout is None or x is None or first is None or len(first.shape) != 4:
        raise ValueError("expected keys [B, H_kv, T, D] with key, and values with value, got one without the other")
    wanted = (*layout.shape[:2], first.shape[2], layout.head_dim)
    if tuple(x.shape) != wanted or x.strides[3] != 1 or x.dtype != first.dtype or x.dtype not in KERNEL_DTYPES:
        raise ValueError(
            f"expected {list(wanted)} in {first.dtype}, one of {list(map(str, KERNEL_DTYPES))}, with stride 1 in the "
            f"last dimension, got {x.dtype} {list(x.shape)} with strides {x.strides}"
        )
    layout.check(0)
    check_devices(layout, x, first)
