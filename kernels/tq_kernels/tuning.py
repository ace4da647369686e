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


# By bits of a value.  A tile has one block of values or two.  Tiles of 4 query columns, of whose softmax a thread has
# half as much, and wider ones.
DECODE_NARROW = {
    8: Config(64, 4, 3, 3),
    4: Config(128, 4, 3, 4, 96),
    3: Config(128, 4, 3, 4, 96),
    2: Config(128, 4, 3, 4, 96),
}
DECODE = {
    8: Config(64, 4, 3, 3),
    4: Config(128, 4, 3, 4, 128),
    3: Config(128, 4, 3, 4, 128),
    2: Config(128, 4, 3, 5, 96),
}

# Without fp8 dots: decoded rows of 16 or 32 bits go through shared memory (64 KiB on sm_75); not measured.
DECODE_SOFTWARE = dict.fromkeys((8, 4, 3, 2), Config(64, 4, 1, 3))


def choose(value_bits: int, columns: int, fp8: bool = True) -> Config:
    """The launch parameters for values of `value_bits` and tiles of so many query columns, for fp8 dots or others."""
    table = DECODE_SOFTWARE if not fp8 else DECODE_NARROW if columns <= 4 else DECODE
    return table[value_bits]


MAX_SPLITS = 112  # with those of exact tokens and sinks fewer than 128: what the merge holds at once is a power of two


def choose_splits(config: Config, pairs: int, tokens: int, multiprocessors: int) -> int:
    """Splits per sequence and KV head that fill `multiprocessors`, each of at least two tiles."""
    wanted = max(1, config.per_multiprocessor * multiprocessors // pairs)
    return max(1, min(wanted, -(-tokens // (2 * config.tile)), MAX_SPLITS))
