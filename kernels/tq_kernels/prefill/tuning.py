"""All launch choices of prefill, pinned: which were measured, and the rule for the rest."""

from typing import NamedTuple

from ..device import Device

MAX_HEAD_DIM = 256
SEGMENT = 8192  # tokens; with twice as many the 2,048 queries of benchmarks/prefill.py take 1 % less [H200]
SEGMENT_UNIT, QUERY_UNIT = 2048, 256  # sizes that cuDNN sees are multiples of these: each new one takes it 33 ms [H200]
SEGMENT_QUERIES, FLOAT8_SEGMENT_QUERIES = 256, 512  # with fewer queries, tiles; both in float8, which tiles like
MERGED = 4  # segments that are joined at a time
SEGMENT_WARPS = 4


class Tile(NamedTuple):
    """What a program, or a step of it, takes."""

    queries: int
    tokens: int  # of packed ones a multiple of BLOCK_TOKENS; for a rotation channels


class LaunchConfig(NamedTuple):
    """Launch parameters of one kernel."""

    tile: Tile
    warps: int
    stages: int = 1

    @property
    def options(self) -> dict[str, int]:
        return dict(num_warps=self.warps, num_stages=self.stages)


class LaunchConfigs(NamedTuple):
    """Launch parameters of one class of shapes."""

    rotate: LaunchConfig  # `prefill_query_kernel`, `prefill_merge_kernel`
    packed: LaunchConfig
    exact: LaunchConfig


def _launch(queries: int, tokens: int, warps: int, stages: int = 1) -> LaunchConfig:
    return LaunchConfig(Tile(queries, tokens), warps, stages)


# By (float32, or no tensor cores that Triton would use; more than 128 channels; 200 KiB of shared memory, so Hopper and
# data-centre Blackwell).  Measured, on an H200: the first row.
LAUNCHES = {
    (False, False, True): LaunchConfigs(_launch(128, 64, 8), _launch(128, 128, 8, 3), _launch(128, 64, 8, 3)),
    (False, False, False): LaunchConfigs(_launch(64, 32, 4), _launch(64, 64, 4), _launch(64, 32, 4)),
    (False, True, True): LaunchConfigs(_launch(64, 32, 8), _launch(64, 64, 4, 2), _launch(64, 32, 4, 2)),
    (False, True, False): LaunchConfigs(_launch(32, 32, 4), _launch(64, 64, 4), _launch(64, 32, 4)),
    (True, False, True): LaunchConfigs(_launch(32, 32, 4), _launch(64, 64, 4, 2), _launch(64, 32, 4, 2)),
    (True, False, False): LaunchConfigs(_launch(32, 32, 4), _launch(16, 64, 4), _launch(32, 32, 4)),
    (True, True, True): LaunchConfigs(_launch(32, 32, 4), _launch(32, 64, 4), _launch(32, 32, 4)),
    (True, True, False): LaunchConfigs(_launch(32, 16, 4), _launch(16, 64, 4), _launch(32, 32, 4)),
}
FLOAT8_PACKED = _launch(128, 64, 4, 3)  # keys and values in float8: less is live than with codes, in the first row
FEW_QUERIES_PACKED = _launch(64, 128, 4, 2)  # at most 64 queries, in the first row


def launches_of(float32: bool, head_dim: int, device: Device) -> LaunchConfigs:
    """For the wider of keys and values."""
    return LAUNCHES[float32 or device.capability < (8, 0), head_dim > 128, device.program_memory >= 200 << 10]


def choose_packed(configs: LaunchConfigs, queries: int, float8: bool) -> LaunchConfig:
    """For so many queries over packed tokens; `float8`: keys and values."""
    if configs is not LAUNCHES[False, False, True]:
        return configs.packed
    if queries <= FEW_QUERIES_PACKED.tile.queries:
        return FEW_QUERIES_PACKED
    return FLOAT8_PACKED if float8 else configs.packed


def prefill_splits(programs: int, tokens: int, device: Device) -> int:
    """1, 2, 4, 8 or 16 splits of at least 1,024 tokens, about enough that every multiprocessor has two programs."""
    wanted = max(1, min(2 * device.multiprocessors // programs, tokens // 1024, 16))
    return 1 << (wanted.bit_length() - 1)
