"""Launch parameters of latent attention, pinned: which were measured, and the rule for the rest."""

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..device import Device
from ..tuning import EXACT_TOKENS, Arithmetic

MOST_ROWS_COLUMNS = 48  # beyond so many columns heads on M are faster [H200]: a tile of 16 decodes all by itself
MAX_SPLITS = 256
PER_MULTIPROCESSOR = 2  # programs of 4 warps, of 255 registers a thread


class LatentConfig(NamedTuple):
    """columns: of a tile; tile, exact_step: tokens of a step; rows: by `packed_rows`."""

    columns: int
    tile: int
    warps: int
    stages: int
    exact_step: int
    rows: bool


# Of `packed_rows`, by bits of a latent.
ROWS = {8: LatentConfig(16, 128, 8, 3, 32, True), 4: LatentConfig(16, 128, 8, 3, 32, True)}
SHORT_ROWS = LatentConfig(16, 64, 4, 3, 32, True)  # where there is room for a single block


def latent_arithmetic(dtype: torch.dtype, device: Device) -> Arithmetic:
    """For queries of `dtype`, heads on M: float16 operands, in which every code is exact, float32 for float32 ones."""
    nvidia = device.is_nvidia
    if dtype == torch.float32:  # in tf32 a tile of rank 512 takes 140 KiB of shared memory
        tf32 = nvidia and device.capability >= (8, 0) and device.program_memory >= 160 << 10
        return Arithmetic(tl.float32, False, "tf32x3" if tf32 else "ieee")
    return Arithmetic(tl.float16, nvidia)


def rows_arithmetic(device: Device) -> Arithmetic:
    """Of `packed_rows`: e4m3 in two terms; of what has no fp8 dots, float16, for tests."""
    return Arithmetic(tl.float8e4nv if device.is_nvidia else tl.float16, device.is_nvidia)


def takes_rows(bits: int, rank: int, columns: int, dtype: torch.dtype, device: Device) -> bool:
    """Whether `packed_rows` is compiled as it is meant, and faster: on sm_90, whose tensor cores take 64 rows."""
    words = rank * bits // 32
    enough = bits in (4, 8) and words * (1 if bits == 8 else 2) >= 64
    return enough and columns <= MOST_ROWS_COLUMNS and dtype != torch.float32 and device.capability == (9, 0)


@lru_cache(maxsize=256)
def latent_config(
    bits: int, rank: int, rotary: int, columns: int, dtype: torch.dtype, device: Device, rows: bool | None
) -> LatentConfig:
    """bits: of latents, 16 where none is packed; columns: query columns of a sequence; rows: for tests."""
    if rows is None:
        rows = device.is_nvidia and takes_rows(bits, rank, columns, dtype, device)
    if rows:
        return ROWS[bits]
    itemsize = 4 if dtype == torch.float32 else 2
    width = 16 if itemsize == 4 else min(max(triton.next_power_of_2(columns), 16), 64)
    # Tensor cores without wgmma read a tile in both orders, in tf32 beside the one decoded; other dots are in float32.
    wgmma = not device.is_nvidia or (9, 0) <= device.capability < (12, 0)
    wide, few = width == 64, width == 16 and bits < 16 and wgmma
    tile, warps, stages = (64 if wide or few else 32), (8 if wide else 4), (3 if wide or bits == 16 else 2)
    if itemsize == 4:
        tile, warps, stages = 16, 8, 1
    exactly = itemsize == 4 and latent_arithmetic(dtype, device).precision == "ieee"
    cores = not device.is_nvidia or (device.capability >= (8, 0) and not exactly)
    size, copies, least = (itemsize, 1 if wgmma else itemsize - itemsize // 4, 16) if cores else (4, 1, 8)

    def needed() -> int:
        """About so many bytes of shared memory: queries, a tile as operand, and tiles on their way."""
        queries, operand = width * (rank + rotary) * size, tile * (rank + rotary) * size
        tiles = stages if bits == 16 and width == 64 else stages - 1  # wgmma reads those on their way where they lie
        way = tile * (rank * bits // 8 + rotary * itemsize) * tiles
        one = operand if bits != 16 or stages == 1 or not wgmma else 0
        return max(queries + way + one + 4096, queries + copies * operand)

    limit = device.program_memory or 1 << 30
    while needed() > limit and (stages > 1 or tile > 16 or width > least):
        if stages > 1:
            stages -= 1
        elif tile > 16:
            tile //= 2
        else:
            width //= 2
    return LatentConfig(width, tile, warps, stages, min(tile, 32), False)


def latent_splits(config: LatentConfig, programs: int, tokens: int, multiprocessors: int) -> int:
    """Splits of packed tokens that fill `multiprocessors`, of two tiles at least, of one where it is of rows; programs:
    of one split."""
    wanted = max(1, _resident(config) * multiprocessors // programs)
    return max(1, min(wanted, -(-tokens // (config.tile * (1 if config.rows else 2))), MAX_SPLITS))


def latent_exact_splits(config: LatentConfig, programs: int, tokens: int, multiprocessors: int, beside: bool) -> int:
    """Splits of the tail, which stands `beside` packed tokens or alone."""
    most = 4 if beside else max(8, min(_resident(config) * multiprocessors // programs, MAX_SPLITS))
    return min(-(-tokens // EXACT_TOKENS), most)


def _resident(config: LatentConfig) -> int:
    """Programs that a multiprocessor has room for."""
    return PER_MULTIPROCESSOR if config.warps == 4 and not config.rows else 1
