"""Launch parameters, pinned: which were measured, and the rule for the rest."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Config:
    """Launch parameters of `_decode_split_kernel`."""

    tile: int
    warps: int
    stages: int
    per_multiprocessor: int  # programs wanted per multiprocessor
    registers: int | None = None  # limit per thread


# By bits of a value: its rows are decoded in 1, 2 or 4 parts, of which each needs 64 tokens (wgmma's least M).
DECODE = {
    8: Config(64, 4, 3, 3),
    4: Config(128, 4, 3, 4, 128),
    3: Config(256, 4, 3, 3, 168),
    2: Config(256, 4, 3, 4, 128),
}


# Without fp8 dots: what fits the shared memory of sm_75 (64 KiB); not measured.
DECODE_SOFTWARE = {8: Config(64, 4, 1, 3), 4: Config(128, 4, 1, 3), 3: Config(256, 4, 1, 2), 2: Config(256, 4, 1, 2)}


def choose(value_bits: int, fp8: bool = True) -> Config:
    """The launch parameters for values of `value_bits`, for fp8 dots or others."""
    return (DECODE if fp8 else DECODE_SOFTWARE)[value_bits]


def choose_splits(config: Config, pairs: int, tokens: int, multiprocessors: int) -> int:
    """Splits per sequence and KV head that fill `multiprocessors`, each of at least two tiles."""
    wanted = max(1, config.per_multiprocessor * multiprocessors // pairs)
    return max(1, min(wanted, -(-tokens // (2 * config.tile)), 128))
