"""What the kernels of prefill take, by name.

Triton keeps the fields of a NamedTuple, nested ones too; none may be called `values` or `type`.  Triton 3.6 wants those
that are constants, in capitals in kernels, to be flat and without a field `value`, and a name of its own for each of
their strings and of the numbers that go into a tuple.  It takes no None in what a jit function returns, nor in what is
itself compared with None, and forgets a stride of 1 behind a None once what holds both has been handed on.
"""

from typing import Any, NamedTuple

from ..attention.masks import MaskStrides
from ..states import PackedStrides, TokenSteps


class Dims(NamedTuple):
    """Channels of a key and of a value."""

    key_dim: int
    value_dim: int


class TileArithmetic(NamedTuple):
    """How a program computes.

    ptx, native: see `bits.to_float16.Decoders`, in whose place this may stand
    precision:   how float32 products are made
    softcap:     whether scores have one
    """

    ptx: bool
    native: bool
    precision: str
    softcap: bool


class RotatedQuery(NamedTuple):
    """Queries in the space of the key codes.

    rows:   [B, H_q, rows, columns as in `key_channels`]
    offset: [B, H_q, rows], what the centre of the keys adds to scores (base 2), or None
    """

    rows: Any
    offset: Any


class Attended(NamedTuple):
    """Outputs [..., B, H_q, rows, D_v] and natural log-sum-exps [..., B, H_q, rows], of all tokens or of a span."""

    out: Any
    lse: Any


class TokenScales(NamedTuple):
    """Of keys and values: pointers of a KV head, or what is loaded of a tile."""

    key: Any
    value: Any


class TokenScalesAndZero(NamedTuple):
    """The same where values have a zero."""

    key: Any
    value: Any
    zero: Any


class PackedTokenStrides(NamedTuple):
    """Of the kernel over packed tokens."""

    key: PackedStrides
    value: PackedStrides
    mask: MaskStrides | tuple[()] = ()


class ExactTokenStrides(NamedTuple):
    """Of the kernel over exact tokens; `sink_logits` over sequences, heads and queries."""

    query: TokenSteps
    exact_keys: TokenSteps
    exact_values: TokenSteps
    mask: MaskStrides | tuple[()]
    sink_logits: TokenSteps
