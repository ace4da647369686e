"""Quantise on update: rotate, scale, code, pack and store keys and values, in one launch, in place."""

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..device import NO_GPU, Device, describe
from ..launch import Launch, Program, Signature, signature
from ..states import BLOCK_TOKENS, MIN_MAX, PER_HEAD, Layout, States
from .codes import float8_codes, float8_row, float8_words, gaussian_codes, uniform_codes
from .pack import column_channel, parts, row_place, store_key_plane, store_value_plane, store_value_words
from .rotate import load_rows, matrix_terms, rotate_halves, rotate_whole, rotated_center

LOOP = 4  # blocks of a program, where there are enough of them
DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}

_BLOCK = tl.constexpr(BLOCK_TOKENS)
_PER_HEAD, _MIN_MAX = tl.constexpr(PER_HEAD), tl.constexpr(MIN_MAX)


@triton.jit
def _plain(x, center, smooth, channel, DIM: tl.constexpr):
    """x [64, WIDTH], not rotated: float32, centred and smoothed."""
    x = x.to(tl.float32)
    if center is not None:
        x -= tl.load(center + channel, mask=channel < DIM, other=0.0)[None, :]
    if smooth is not None:
        x /= tl.load(smooth + channel, mask=channel < DIM, other=1.0)[None, :]
    return x


@triton.jit
def _float8_blocks(
    side, strides, start, end, CODING: tl.constexpr, DIM: tl.constexpr, VALUE: tl.constexpr, NATIVE: tl.constexpr,
    LOOP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """As `quantize_blocks`, for codes of 8 bits: a byte each, nothing to put together."""
    x, packed, _, _, center, smooth, head_scale, _ = side
    head, batch = tl.program_id(1), tl.program_id(2).to(tl.int64) // 2
    pair = batch * tl.num_programs(1) + head
    x += batch * strides[0] + head * strides[1]
    packed += batch * strides[3] + head * strides[4]
    if center is not None:
        center += pair * DIM
    if smooth is not None:
        smooth += pair * DIM
    factor = tl.load(head_scale + pair)
    row, channel = tl.arange(0, 64), tl.arange(0, triton.next_power_of_2(DIM))
    if VALUE:
        row = float8_row(row)
    for step in tl.range(0, LOOP, num_stages=STAGES):
        number = start // _BLOCK + tl.program_id(0) * LOOP + step
        token = number * _BLOCK + row
        valid = (token >= start) & (token < end)
        rows = _plain(load_rows(x, strides[2], token - start, valid, channel, DIM), center, smooth, channel, DIM)
        block = packed + number.to(tl.int64) * (_BLOCK * DIM)
        if VALUE:
            words = float8_words(rows, factor, CODING[4], NATIVE)
            store_value_words(block, words, number, start, end, DIM)
        else:
            codes = float8_codes(rows, factor, CODING[4], NATIVE)
            # 8 bytes at a time, as many as elements are loaded: 16 would change the layout of values beside these keys.
            column = tl.max_contiguous(channel, 8)
            tl.store(block + row[:, None] * DIM + column[None, :], codes, mask=valid[:, None] & (column < DIM)[None, :])


@triton.jit
def quantize_blocks(
    side, strides, start, end, CODING: tl.constexpr, DIM: tl.constexpr, VALUE: tl.constexpr,
    DTYPE: tl.constexpr, TERMS: tl.constexpr, PRECISION: tl.constexpr, PTX: tl.constexpr, NATIVE: tl.constexpr,
    LOOP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Blocks program_id(0) * LOOP .. of keys or of values, counted from that of token `start`."""
    if CODING[0] == 8:
        _float8_blocks(side, strides, start, end, CODING, DIM, VALUE, NATIVE, LOOP, STAGES)
    else:
        _coded_blocks(
            side, strides, start, end, CODING, DIM, VALUE, DTYPE, TERMS, PRECISION, PTX, LOOP, STAGES
        )  # fmt: skip


@triton.jit
def _coded_blocks(
    side, strides, start, end, CODING: tl.constexpr, DIM: tl.constexpr, VALUE: tl.constexpr,
    DTYPE: tl.constexpr, TERMS: tl.constexpr, PRECISION: tl.constexpr, PTX: tl.constexpr, LOOP: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """As `quantize_blocks`, for codes of 4, 3 or 2 bits with a scale per token."""
    x, packed, scale, zero, center, smooth, _, rotation = side
    BITS: tl.constexpr = CODING[0]
    WIDTH: tl.constexpr = max(64, triton.next_power_of_2(DIM))
    PARTS: tl.constexpr = parts(BITS)
    ROTATED: tl.constexpr = CODING[1] != _MIN_MAX
    HALVES: tl.constexpr = ROTATED and (DIM == 64 or DIM == 128)
    head, batch = tl.program_id(1), tl.program_id(2).to(tl.int64) // 2
    pair = batch * tl.num_programs(1) + head
    x += batch * strides[0] + head * strides[1]
    packed += batch * strides[3] + head * strides[4]
    if center is not None:
        center += pair * DIM
    if smooth is not None:
        smooth += pair * DIM
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
        half, half_column = tl.arange(0, DIM // 2), tl.arange(0, DIM // 2)
        if not VALUE:
            half_column = column_channel(half, DIM, WIDTH, PARTS)
        low = matrix_terms(rotation, smooth, half, half_column, DIM, DTYPE, TERMS)
        high = matrix_terms(rotation, smooth, half + DIM // 2, half_column, DIM, DTYPE, TERMS)
        centers = rotated_center(center, low, half, DIM), rotated_center(center, high, half + DIM // 2, DIM)
    for step in tl.range(0, LOOP, num_stages=STAGES):
        number = start // _BLOCK + tl.program_id(0) * LOOP + step
        token = number * _BLOCK + row
        valid = (token >= start) & (token < end)
        block = packed + number.to(tl.int64) * (8 * DIM * BITS)
        if HALVES:
            r = rotate_halves(x, strides[2], token - start, valid, (low, high), centers, DIM, PRECISION)
        elif ROTATED:
            held = (center, smooth, rotation)
            r = rotate_whole(x, strides[2], token - start, valid, held, column, DIM, DTYPE, TERMS, PRECISION)
        else:
            r = _plain(load_rows(x, strides[2], token - start, valid, column, DIM), center, smooth, column, DIM)
        if ROTATED:
            index, sign, factor = gaussian_codes(r, inside, CODING, DIM, DTYPE, PTX)
        else:
            index, sign, factor, middle = uniform_codes(r, inside, CODING)
            tl.store(zero + batch * strides[7] + head * strides[8] + token, middle, mask=valid)
        tl.store(scale + batch * strides[5] + head * strides[6] + token, factor, mask=valid)
        for plane in tl.static_range(2 if BITS == 3 else 1):
            if VALUE:
                store_value_plane(block, index, sign, number, token, start, end, BITS, DIM, ROTATED, plane)
            else:
                store_key_plane(block, index, sign, token, valid, BITS, DIM, plane)


@triton.jit(do_not_specialize=["start", "end"])
def _quantize_kernel(
    key, value, key_strides, value_strides, start, end,
    KEY: tl.constexpr, VALUE: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    DTYPE: tl.constexpr, KEY_TERMS: tl.constexpr, VALUE_TERMS: tl.constexpr, PRECISION: tl.constexpr,
    PTX: tl.constexpr, NATIVE: tl.constexpr, LOOP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Keys or values by the last axis of the grid; `start` and `end` are tokens of the packed states."""
    if tl.program_id(2) % 2 == 0:
        if KEY is not None:
            quantize_blocks(
                key, key_strides, start, end, KEY, KEY_DIM, False, DTYPE, KEY_TERMS, PRECISION, PTX, NATIVE,
                LOOP, STAGES,
            )  # fmt: skip
    else:
        if VALUE is not None:
            quantize_blocks(
                value, value_strides, start, end, VALUE, VALUE_DIM, True, DTYPE, VALUE_TERMS, PRECISION, PTX, NATIVE,
                LOOP, STAGES,
            )  # fmt: skip


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
    return Launch(
        plan.program, plan.grid, (*map(_tensors, *zip(*pairs, strict=True)), *plan.strides, start, start + tokens)
    )


class _Plan(NamedTuple):
    """What is worked out once for layouts and signatures."""

    program: Program
    grid: tuple[int, int, int]
    strides: tuple[tuple[int, ...], tuple[int, ...]]


@lru_cache(maxsize=256)
def _plan(device, key, value, keys, values, blocks) -> _Plan:
    """For tokens of so many `blocks`; raises ValueError unless keys and values fit each other and the packed states."""
    pairs = [(layout, x) for layout, x in ((key, keys), (value, values)) if layout is not None or x is not None]
    for layout, x in pairs:
        _check(layout, x, pairs[0][1])
    if not pairs:
        return _Plan(Program(_quantize_kernel, device, {}, {}), (0, 0, 0), ((), ()))
    batch, heads, _, _ = pairs[0][1].shape
    loop = LOOP if blocks * heads * batch >= 512 else 1
    constants, options = choose(key, value, pairs[0][1].dtype, device)
    strides = tuple(
        () if x is None else (*x.strides[:3], *layout.steps) for layout, x in ((key, keys), (value, values))
    )
    program = Program(_quantize_kernel, device, constants | dict(LOOP=loop), options)
    return _Plan(program, (-(-blocks // loop), heads, 2 * batch), strides)


def choose(key: Layout | None, value: Layout | None, dtype: torch.dtype, device: Device) -> tuple[dict, dict]:
    """Constants but LOOP, and launch options, of the kernel."""
    cuda = device.is_nvidia
    tensor_cores = cuda and device.capability >= (8, 0) or device.backend == "hip"
    exact = dtype != torch.float32 and tensor_cores  # 16-bit x is multiplied as it is
    terms = [_terms(layout) if exact else 1 for layout in (key, value)]
    width = max(layout.head_dim for layout in (key, value) if layout is not None)
    constants = dict(
        KEY=None if key is None else tuple(key.coding), VALUE=None if value is None else tuple(value.coding),
        KEY_DIM=0 if key is None else key.head_dim, VALUE_DIM=0 if value is None else value.head_dim,
        DTYPE=DTYPES[dtype] if exact else tl.float32, KEY_TERMS=terms[0], VALUE_TERMS=terms[1],
        PRECISION="tf32x3" if cuda and tensor_cores and not exact else "ieee", PTX=cuda,
        NATIVE=cuda and device.capability >= (9, 0), STAGES=1 if not exact else 2 if 2 in terms else 3,
    )  # fmt: skip
    options: dict[str, int] = {"num_warps": 4 if width <= 128 else 8 if width <= 256 else 16}
    if cuda and exact and width <= 128:
        options["maxnreg"] = 168  # three programs a multiprocessor
    return constants, options


def _terms(layout: Layout | None) -> int:
    """How many 16-bit numbers add up to an element of M: +-1 is one, others need two."""
    if layout is None or not layout.coding.rotated:
        return 1
    return 1 if not layout.smoothed and layout.head_dim & (layout.head_dim - 1) == 0 else 2


def _tensors(states: States | None, x: torch.Tensor | None) -> tuple:
    return () if states is None else (x, *states[:7])


def _strides(layout: Layout | None, x: Signature | None) -> tuple[int, ...]:
    return () if layout is None or x is None else (*x.strides[:3], *layout.steps)


def _check(layout: Layout | None, x: Signature | None, first: Signature | None) -> None:
    """Raise ValueError unless x goes with the `first` one and with the packed states."""
    if layout is None or x is None or first is None or len(first.shape) != 4:
        raise ValueError("expected keys [B, H_kv, T, D] with key, and values with value, got one without the other")
    wanted = (*layout.shape[:2], first.shape[2], layout.head_dim)
    if tuple(x.shape) != wanted or x.strides[3] != 1 or x.dtype != first.dtype or x.dtype not in DTYPES:
        raise ValueError(
            f"expected {list(wanted)} in {first.dtype}, one of {list(map(str, DTYPES))}, with stride 1 in the last "
            f"dimension, got {x.dtype} {list(x.shape)} with strides {x.strides}"
        )
    layout.check(0)
