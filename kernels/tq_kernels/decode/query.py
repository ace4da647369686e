"""The query of decode: into the space of the key codes, as operand of the dot with them."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..attention.scores import load_mask
from ..bits.hadamard import hadamard, is_power_of_two, log2
from ..bits.layout import parts
from ..bits.to_e4m3 import operand_width
from ..bits.two_terms import spread_terms


class Place(NamedTuple):
    """Where a program of `decode_kernel` is: sequence, KV head, their pair, first query column of its tile."""

    batch: Any
    kv_head: Any
    pair: Any
    first_column: Any


@triton.constexpr_function
def by_matrix(rotated, dim):
    """Whether the rotation has no butterflies: `rotate_query_kernel` then comes first."""
    return rotated and not is_power_of_two(dim)


@triton.jit
def program_place(SHAPE: tl.constexpr):
    TILES: tl.constexpr = (SHAPE.group * SHAPE.queries + SHAPE.columns - 1) // SHAPE.columns
    batch, kv_head = tl.program_id(1).to(tl.int64), (tl.program_id(0) // TILES).to(tl.int64)
    pair = batch * (tl.num_programs(0) // TILES) + kv_head
    return Place(batch, kv_head, pair, tl.program_id(0) % TILES * SHAPE.columns)


@triton.jit
def split_places(work, pair, column, SHAPE: tl.constexpr):
    """Where this program's output and log-sum-exp of `column` go in the `work` of `decode_kernel`."""
    OF_HEAD: tl.constexpr = SHAPE.group * SHAPE.queries
    splits = tl.num_programs(2)
    pairs = tl.num_programs(0) // tl.cdiv(OF_HEAD, SHAPE.columns) * tl.num_programs(1)
    row = (pair * splits + tl.program_id(2)) * OF_HEAD + column
    return work + row * SHAPE.value_dim, work + pairs.to(tl.int64) * splits * (OF_HEAD * SHAPE.value_dim) + row


@triton.jit
def column_places(base, steps, column, batch, kv_head, GROUP: tl.constexpr, QUERIES: tl.constexpr):
    """Where query columns of a KV head, heads of its group times QUERIES, lie in [B, H_q, S, ...] from `base` on."""
    head = kv_head * GROUP + column // QUERIES
    return base + batch * steps.batch + head * steps.head + column % QUERIES * steps.query


class MaskPlace(NamedTuple):
    """A mask, where that of a sequence begins in it, and that of each query column, and the stride of tokens."""

    mask: Any
    base: Any
    columns: Any
    step: Any


@triton.jit
def mask_of_tokens(mask, token, inside, AXIS: tl.constexpr, MASK: tl.constexpr):
    """See `load_mask`."""
    return load_mask(mask.mask, mask.base, mask.columns, mask.step, token, inside, AXIS, MASK)


@triton.jit
def make_operand(
    query, rotated_query, transform, key_scale, vector, scaling, used,
    DIM: tl.constexpr, BITS: tl.constexpr, UNIT: tl.constexpr, TERMS: tl.constexpr, TWINS: tl.constexpr,
    ARITHMETIC: tl.constexpr,
):  # fmt: skip
    """Queries `query` [columns] as operand [parts * width, terms * columns * twins], see `spread_terms`, at most 448.

    Returns it with the factor of its scores, and of each column the product with the centre of the keys.  `transform`
    is that of the keys, whose vectors of this KV head begin at `vector`; `rotated_query` [columns]: where `by_matrix`.
    """
    PARTS: tl.constexpr = parts(BITS)
    WIDTH: tl.constexpr = operand_width(DIM, BITS)
    column = tl.arange(0, PARTS * WIDTH)
    channel = column // WIDTH * (DIM // PARTS) + column % WIDTH
    inside = column % WIDTH < DIM // PARTS
    mask = used[:, None] & inside[None, :]
    x = tl.load(query[:, None] + channel[None, :], mask=mask, other=0).to(tl.float32)
    shift = tl.zeros((used.shape[0],), tl.float32)
    if transform.center is not None:
        shift = tl.sum(x * tl.load(transform.center + vector + channel, mask=inside, other=0)[None, :], 1) * scaling
    if by_matrix(transform.rotation is not None, DIM):
        x = tl.load(rotated_query[:, None] + channel[None, :], mask=mask, other=0)
    else:
        if transform.smooth is not None:
            x *= tl.load(transform.smooth + vector + channel, mask=inside, other=0)[None, :]
        if transform.rotation is not None:
            x *= tl.load(transform.rotation + channel, mask=inside, other=0)[None, :]
            # Bits of the column within its part, then those of the part; bits of the padding are between.
            x = hadamard(hadamard(x, 0, log2(DIM // PARTS)), log2(WIDTH), log2(WIDTH * PARTS))
    peak = tl.maximum(tl.max(tl.abs(x)), 1e-30)
    factor = scaling * UNIT * peak / 448.0
    if BITS == 8:
        factor *= tl.load(key_scale)
    operand = spread_terms((x * (448.0 / peak)).T, TERMS, TWINS, 1.0, ARITHMETIC.operand, ARITHMETIC.ptx)
    return operand, factor, shift


# --- Rotation by a matrix.


@triton.jit
def fine_dot(x, y, PRECISION: tl.constexpr):
    """float32 x @ y; if y is a 16-bit type, x in two terms of it."""
    if y.dtype == tl.float32:
        return tl.dot(x, y, input_precision=PRECISION)
    else:
        first = x.to(y.dtype)
        second = (x - first.to(tl.float32)).to(y.dtype)
        return tl.dot(second, y, tl.dot(first, y))


@triton.jit
def _rotate_part(q, matrix, EXACT: tl.constexpr, PRECISION: tl.constexpr):
    """q [16, channels] @ matrix.  16-bit queries: in three products of float16, for the tensor cores."""
    if EXACT:
        return fine_dot(q, matrix, PRECISION)
    else:
        size = tl.maximum(tl.max(tl.abs(q)), 1e-30) / 256
        first = matrix.to(tl.float16)
        second = (matrix - first.to(tl.float32)).to(tl.float16)
        x = q / size
        return (fine_dot(x, first, PRECISION) + tl.dot(x.to(tl.float16), second)) * size


@triton.jit
def rotate_query_kernel(
    query, transform, out, steps, DIM: tl.constexpr, GROUP: tl.constexpr, QUERIES: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Queries times smoothing, rotated: float32 [B, H_q, S, D].  One program = 16 columns of a KV head, 64 channels."""
    COLUMNS: tl.constexpr = GROUP * QUERIES
    kv_head, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    pair = batch * tl.num_programs(1) + kv_head
    column = tl.program_id(0) // tl.cdiv(DIM, 64) * 16 + tl.arange(0, 16)
    used = column < COLUMNS
    query = column_places(query, steps, tl.where(used, column, 0), batch, kv_head, GROUP, QUERIES)
    channel, rotated = tl.arange(0, triton.next_power_of_2(DIM)), tl.program_id(0) % tl.cdiv(DIM, 64) * 64
    rotated += tl.arange(0, 64)
    inside, wanted = channel < DIM, rotated < DIM
    q = tl.load(query[:, None] + channel[None, :], mask=used[:, None] & inside[None, :], other=0).to(tl.float32)
    if transform.smooth is not None:
        q *= tl.load(transform.smooth + pair * DIM + channel, mask=inside, other=0)[None, :]
    matrix = transform.rotation + rotated[None, :] * DIM + channel[:, None]
    matrix = tl.load(matrix, mask=wanted[None, :] & inside[:, None], other=0)
    x = _rotate_part(q, matrix, query.dtype.element_ty == tl.float32, PRECISION)
    place = out + ((pair * COLUMNS + column) * DIM)[:, None] + rotated[None, :]
    tl.store(place, x, mask=used[:, None] & wanted[None, :])
