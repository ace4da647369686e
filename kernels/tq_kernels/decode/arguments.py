"""What the kernels of decode are given, by name.

Triton keeps the fields of NamedTuples, nested ones too; none may be called `values` or `type`.  Of those that are
constants, in capitals in kernels, Triton 3.6 wants more: they are flat, none has a field `value`, none is returned or
given another name, but a field needs a name of its own where it is a tuple or text, or goes into a tuple.
"""

from typing import NamedTuple

import torch

from ..attention.masks import MaskSteps
from ..states import PackedStrides, TokenSteps


class ExactTokens(NamedTuple):
    """In the query's dtype: the tail, [B, H_kv, n, D or D_v], or a ring; the first tokens of all, likewise, or None."""

    tail_keys: torch.Tensor
    tail_values: torch.Tensor
    sink_keys: torch.Tensor | None
    sink_values: torch.Tensor | None


class Counts(NamedTuple):
    """What the device knows about lengths, or None.

    lengths:    int32 [B], packed tokens of each sequence that count
    num_tokens: int64 [], tokens in all; the tail is then a ring of `ring_slots`
    """

    lengths: torch.Tensor | None = None
    num_tokens: torch.Tensor | None = None
    ring_slots: int | None = None


class Sizes(NamedTuple):
    num_sinks: int  # tokens that there is room for, or that there are, where no `num_tokens` says how many
    residual_length: int  # newest tokens that are never packed, where `num_tokens` says how many there are


class QuerySteps(NamedTuple):
    """Strides of queries, or of what there is one of for each, [B, H_q, S, ...]."""

    batch: int
    head: int
    query: int


class Strides(NamedTuple):
    """Of packed states where there are none, None; of sinks where there are none, those of the tail."""

    query: QuerySteps
    key: PackedStrides | None
    value: PackedStrides | None
    tail_keys: TokenSteps
    tail_values: TokenSteps
    sink_keys: TokenSteps
    sink_values: TokenSteps
    mask: MaskSteps


# --- Constants.


class Shape(NamedTuple):
    """Channels of keys and of values, query heads of a KV head, queries, query columns of a tile."""

    dim: int
    value_dim: int
    group: int
    queries: int
    columns: int


class Codes(NamedTuple):
    """The `Code` of keys and of values."""

    key_bits: int
    key_table: tuple[int, int]
    value_bits: int
    value_table: tuple[int, int]


class Flags(NamedTuple):
    """softcap: scores are capped; causal, causal_packed: some query sees not all exact (packed) tokens; mask: kind;
    stale: the last tile may have values of 8 bits, maybe NaN, of tokens that do not count."""

    softcap: bool
    causal: bool
    causal_packed: bool
    mask: int
    stale: bool


class PackedLaunch(NamedTuple):
    """tile: tokens; masked: loads of the last tile need a mask; exact_step: exact tokens of a step; pdl: see `Device`.

    What follows from tile and warps: score rows come in `repeats` of `slots` times 16, see `bits`.  Operands in two
    e4m3 `terms` stand side by side, each column with so many `twins`.
    """

    tile: int
    stages: int
    masked: bool
    exact_step: int
    pdl: bool
    slots: int
    repeats: int
    terms: int
    twins: int


class ExactLaunch(NamedTuple):
    """step: tokens; pdl: see `Device`."""

    step: int
    stages: int
    pdl: bool
