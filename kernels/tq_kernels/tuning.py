"""Launch parameters, pinned: which were measured, and the rule for the rest."""

from dataclasses import dataclass, replace
from functools import lru_cache

import triton


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
def choose(value_bits: int, columns: int, value_dim: int, token_bytes: int, shared: int, fp8: bool) -> Config:
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


def choose_splits(config: Config, pairs: int, tokens: int, multiprocessors: int) -> int:
    """Splits per sequence and KV head that fill `multiprocessors`, each of at least two tiles.

    The programs of exact tokens, the last ones, take the places that are left, or are left by the first to end.
    """
    wanted = max(1, config.per_multiprocessor * multiprocessors // pairs)
    return max(1, min(wanted, -(-tokens // (2 * config.tile)), MAX_SPLITS))
