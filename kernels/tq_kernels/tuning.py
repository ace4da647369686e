"""Launch parameters, pinned: which were measured, and the rule for the rest.  Those of prefill are in its room."""

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from .device import Device
from .states import BLOCK_TOKENS, Layout


class Arithmetic(NamedTuple):
    """How a device computes.

    operand:   the type that goes to the dots
    ptx:       whether codes are made, or decoded, by inline assembly
    precision: how float32 is multiplied
    native:    whether it converts to float8 itself, where that matters
    """

    operand: tl.dtype
    ptx: bool = False
    precision: str = "ieee"
    native: bool = False


# --- Decode.


@lru_cache
def decode_arithmetic(dtype: torch.dtype, device: Device) -> Arithmetic:
    """For queries of `dtype`.

    fp8 tensor cores where e4m3 is native, float16 else, float32 for float32 queries.  The inline assembly decodes four
    neighbouring bytes, which only the operands of fp8 dots keep together.
    """
    capability = device.capability if device.is_nvidia else (0, 0)
    precision = "tf32x3" if capability >= (8, 0) else "ieee"
    if dtype == torch.float32:
        return Arithmetic(tl.float32, False, precision)
    native = capability >= (8, 9)
    return Arithmetic(tl.float8e4nv if native else tl.float16, native, precision)


@dataclass(frozen=True)
class Config:
    """Launch parameters of `decode_kernel`."""

    tile: int
    warps: int
    stages: int
    per_multiprocessor: int  # programs wanted per multiprocessor
    registers: int | None = None  # limit per thread


# By bits of a value.  A tile has one block of values or two.  Tiles of 4 query columns, of whose softmax a thread has
# half as much, and wider ones.  With 112 registers no fifth program fits: a multiprocessor that gets five, of packed
# tokens, takes longer than the others.
DECODE_NARROW = {
    8: Config(64, 4, 3, 4, 128),
    4: Config(128, 4, 3, 4, 112),
    3: Config(128, 4, 3, 4, 112),
    2: Config(128, 4, 3, 4, 112),
}
DECODE = {
    8: Config(64, 4, 3, 4, 128),
    4: Config(128, 4, 3, 4, 128),
    3: Config(128, 4, 3, 4, 128),
    2: Config(128, 4, 3, 5, 96),
}

# Heads wider than 128 channels, whose output takes registers.
DECODE_WIDE = {8: Config(64, 4, 3, 3)} | dict.fromkeys((4, 3, 2), Config(128, 4, 3, 3, 168))

# Without fp8 dots: decoded rows of 16 or 32 bits go through shared memory (64 KiB on sm_75); not measured.
DECODE_SOFTWARE = dict.fromkeys((8, 4, 3, 2), Config(64, 4, 1, 3))


REGISTERS = 65536  # of a multiprocessor


@lru_cache
def decode_config(value_bits: int, columns: int, value_dim: int, token_bytes: int, shared: int, fp8: bool) -> Config:
    """The launch parameters for values of `value_bits` and tiles of so many query columns, for fp8 dots or others.

    token_bytes: of keys and values, codes alone; shared: bytes of shared memory of a multiprocessor.  Where that does
    not hold as many programs as the table asks for, there are fewer, with the registers that this leaves; where it does
    not hold two, a stage less.
    """
    if not fp8:
        return DECODE_SOFTWARE[value_bits]
    table = DECODE_WIDE if value_dim > 128 else DECODE_NARROW if columns <= 4 else DECODE
    config = table[value_bits]
    programs = _programs_held(config, token_bytes, shared)
    if programs < 2:
        config = replace(config, stages=config.stages - 1)
        programs = _programs_held(config, token_bytes, shared)
    if programs >= config.per_multiprocessor:
        return config
    registers = config.registers and min(REGISTERS // (programs * 32 * config.warps) // 8 * 8, 248)
    return replace(config, per_multiprocessor=programs, registers=registers)


def _programs_held(config: Config, token_bytes: int, shared: int) -> int:
    tiles_on_their_way, rest = config.stages - 1, 8192
    return max(1, shared // (tiles_on_their_way * config.tile * token_bytes + rest))


def tile_columns(columns: int, arithmetic: Arithmetic) -> int:
    """Query columns of a tile: 4, 8 or 16 with two terms each, else 16."""
    return max(4, min(triton.next_power_of_2(columns), 16)) if arithmetic.operand == tl.float8e4nv else 16


EXACT_TOKENS = 64  # exact tokens of a split at least
SINK_STEP = 16  # sinks of a step: mostly there are 4, and a dot takes no fewer than 16
EXACT_BESIDE = 32  # exact tokens of a step, at most, in a launch with packed ones: they share its shared memory


def exact_steps(dims: tuple[int, int], itemsize: int, shared: int) -> tuple[int, int]:
    """Exact tokens of a step, and stages where there are many: 64 and 3, or what `shared` bytes of memory hold."""
    token = itemsize * sum(triton.next_power_of_2(dim) for dim in dims)
    rest, tile = 16384, 64
    while tile > 16 and tile * token + rest > shared:
        tile //= 2
    return tile, max(1, min(3, (shared - rest) // (tile * token)))


def exact_warps(dims: tuple[int, int], itemsize: int) -> int:
    """Warps where all tokens are exact: more would wait for each other, fewer not hold what is wide."""
    return 4 if itemsize == 2 and max(dims) <= 128 else 8


MAX_SPLITS = 112  # with those of exact tokens and sinks fewer than 128: what the merge holds at once is a power of two
MAX_EXACT_SPLITS = 8  # beside packed tokens


def packed_splits(config: Config, programs: int, tokens: int, multiprocessors: int) -> int:
    """Splits of packed tokens that fill `multiprocessors`, each of two tiles at least.

    programs: of a split, column tiles of all sequences and KV heads.  Those of exact tokens, the last ones, take the
    places that are left, or are left by the first to end.
    """
    wanted = max(1, config.per_multiprocessor * multiprocessors // programs)
    return max(1, min(wanted, -(-tokens // (2 * config.tile)), MAX_SPLITS))


def exact_splits(programs: int, tokens: int, multiprocessors: int, beside: bool) -> int:
    """Splits of the tail, which stands `beside` packed tokens or alone."""
    most = MAX_EXACT_SPLITS if beside else max(MAX_EXACT_SPLITS, min(8 * multiprocessors // programs, 128))
    return min(-(-tokens // EXACT_TOKENS), most)


def merge_warps(splits: int, value_dim: int) -> int:
    """Warps of a program: while registers hold all partial outputs, a single one needs no shared memory to add them."""
    if value_dim & (value_dim - 1) == 0 and splits * value_dim <= 2048:
        return 1
    return 4 if splits * value_dim <= 16384 else 16


# --- Quantise and update.

KERNEL_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
QUANTIZE_LOOP, MANY_BLOCKS = 4, 512  # blocks of a program, where there are so many of all sequences and heads


class Vectors(NamedTuple):
    """Keys, or values, as the kernels that write take them: the fields of their `Coding`, head_dim and `terms`.

    terms: how many 16-bit numbers add up to an element of the matrix that rotates: +-1 is one, others need two
    """

    bits: int
    rule: int
    magnitudes: tuple[float, ...]
    unit: float
    exponent: int
    dim: int
    terms: int


def quantize_arithmetic(dtype: torch.dtype, device: Device) -> Arithmetic:
    """For vectors of `dtype`: 16-bit ones are multiplied as they are, where there are tensor cores."""
    nvidia = device.is_nvidia
    tensor_cores = nvidia and device.capability >= (8, 0) or device.backend == "hip"
    exact = dtype != torch.float32 and tensor_cores
    precision = "tf32x3" if nvidia and tensor_cores and not exact else "ieee"
    native = nvidia and device.capability >= (9, 0)
    return Arithmetic(KERNEL_DTYPES[dtype] if exact else tl.float32, nvidia, precision, native)


def quantize_choices(
    key: Layout | None, value: Layout | None, dtype: torch.dtype, device: Device
) -> tuple[dict[str, Any], dict[str, int]]:
    """Constants that quantise and update share, and launch options."""
    arithmetic = quantize_arithmetic(dtype, device)
    exact = arithmetic.operand != tl.float32
    constants = dict(KEY=_vectors(key, exact), VALUE=_vectors(value, exact), ARITHMETIC=arithmetic)
    width = max(layout.head_dim for layout in (key, value) if layout is not None)
    options = {"num_warps": 4 if width <= 128 else 8 if width <= 256 else 16}
    if device.is_nvidia and exact and width <= 128:
        options["maxnreg"] = 168  # three programs a multiprocessor
    return constants, options


def quantize_stages(constants: dict[str, Any]) -> int:
    """Stages of the loop over blocks; constants: of `quantize_choices`."""
    if constants["ARITHMETIC"].operand == tl.float32:
        return 1
    return 2 if any(x is not None and x.terms == 2 for x in (constants["KEY"], constants["VALUE"])) else 3


def _vectors(layout: Layout | None, exact: bool) -> Vectors | None:
    if layout is None:
        return None
    signs = not layout.smoothed and layout.head_dim & (layout.head_dim - 1) == 0
    return Vectors(*layout.coding, layout.head_dim, 2 if exact and layout.coding.rotated and not signs else 1)


# --- Latents and rotary keys.

LATENT_WARPS = 4
LATENT_ELEMENTS = 8192  # of a tile: 64 a thread, as many as registers hold


def latent_tokens(width: int) -> int:
    """Tokens of a program, at most a block."""
    return min(LATENT_ELEMENTS // width, BLOCK_TOKENS)


def latent_options(dtype: torch.dtype, device: Device) -> dict[str, int]:
    """Launch options of the kernels that write latents and rotary keys: three programs a multiprocessor."""
    options = {"num_warps": LATENT_WARPS}
    if device.is_nvidia and dtype != torch.float32:
        options["maxnreg"] = 168
    return options


def latent_choices(latent: Layout, rotary: Layout, dtype: torch.dtype, device: Device) -> dict[str, Any]:
    """Constants of the kernels that write latents and rotary keys, which rotate in float32."""
    return dict(
        LATENT=_vectors(latent, False),
        ROTARY=_vectors(rotary, False) if rotary.head_dim else None,
        ARITHMETIC=quantize_arithmetic(dtype, device)._replace(operand=tl.float32),
        TOKENS=latent_tokens(latent.head_dim),
    )


# --- Append and dequantise.

APPEND_ELEMENTS = 2048  # of a tile
DEQUANTIZE_PROGRAMS, DEQUANTIZE_BLOCKS = 480, 16  # each program reads the rotation, so fewer do more [H200]
DEQUANTIZE_WARPS = 4


def append_tile(tokens: int, width: int) -> int:
    """Tokens of a tile of vectors, padded to `width`."""
    return min(triton.next_power_of_2(max(tokens, 1)), max(1, APPEND_ELEMENTS // width))


def dequantize_columns(channels: int, rotated: bool) -> int:
    """Channels of a program, of so many."""
    return 64 if rotated and channels > 128 else channels


def dequantize_blocks(blocks: int, rotated: bool) -> int:
    """Blocks of a program, of so many of all sequences and heads."""
    return max(1, min(blocks // DEQUANTIZE_PROGRAMS, DEQUANTIZE_BLOCKS)) if rotated else 1
