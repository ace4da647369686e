"""The queries of latent attention: into the space of the codes, as operands of the dots with them."""

import triton
import triton.language as tl

from ..attention.scores import LOG2E
from ..bits.hadamard import hadamard, log2
from ..bits.two_terms import two_terms
from .arguments import CODED_ROTARY, NO_ROTARY

_NO_ROTARY, _CODED = tl.constexpr(NO_ROTARY), tl.constexpr(CODED_ROTARY)
QUERY_ROWS = 1  # columns of a program: more take longer to rotate [H200]


@triton.jit
def _into_codes(x, transform, vector, channel, WIDTH: tl.constexpr):
    """Vectors [rows, WIDTH] times smoothing, rotated."""
    if transform.smooth is not None:
        x *= tl.load(transform.smooth + vector + channel)[None, :]
    if transform.rotation is not None:
        x = hadamard(x * tl.load(transform.rotation + channel)[None, :], 0, log2(WIDTH))
    return x


@triton.jit
def latent_query_kernel(
    given, queries, latents, latent_scale, positions, position_scale, scaling, steps,
    SHAPE: tl.constexpr, ROTARY: tl.constexpr, FP8: tl.constexpr, PTX: tl.constexpr, ROWS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One program = ROWS query columns of one sequence; see `Queries`.

    latents, positions: `Transform`; the scales are those per sequence, or None; scaling: without log2 e
    """
    COUNT: tl.constexpr = SHAPE.heads * SHAPE.queries
    RANK: tl.constexpr = SHAPE.rank
    batch = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    used = column < COUNT
    head, query = column // SHAPE.queries, column % SHAPE.queries
    channel = tl.arange(0, RANK)
    content = given.content + batch * steps.content.batch + head * steps.content.head + query * steps.content.query
    x = tl.load(content[:, None] + channel[None, :], mask=used[:, None], other=0).to(tl.float32)
    offset = tl.zeros((ROWS,), tl.float32)
    if latents.center is not None:
        offset = tl.sum(x * tl.load(latents.center + batch * RANK + channel)[None, :], 1) * (scaling * LOG2E)
    x = _into_codes(x, latents, batch * RANK, channel, RANK)
    peak = tl.maximum(tl.max(tl.abs(x), 1), 1e-30)
    factor = peak * (scaling * LOG2E)
    if latent_scale is not None:
        factor *= tl.load(latent_scale + batch)
    row = batch * COUNT + column
    if FP8:
        factor *= 1.0 / 448.0
        first, second = two_terms(x * (448.0 / peak)[:, None], 1.0, PTX)
        TILES: tl.constexpr = (COUNT + SHAPE.columns - 1) // SHAPE.columns
        row_of_tile = (batch * TILES + column // SHAPE.columns) * (2 * SHAPE.columns) + column % SHAPE.columns
        place = queries.content + row_of_tile[:, None] * RANK + channel[None, :]
        inside = (column < TILES * SHAPE.columns)[:, None]  # also what fills up the last tile
        tl.store(place, first.to(tl.uint8, bitcast=True), mask=inside)
        tl.store(place + SHAPE.columns * RANK, second.to(tl.uint8, bitcast=True), mask=inside)
    else:
        x = (x / peak[:, None]).to(queries.content.dtype.element_ty)
        tl.store(queries.content + row[:, None] * RANK + channel[None, :], x, mask=used[:, None])
    rotary_factor = tl.zeros((ROWS,), tl.float32) + scaling * LOG2E
    if ROTARY.kind != _NO_ROTARY:
        dim = tl.arange(0, SHAPE.rotary_width)
        there = used[:, None] & (dim < SHAPE.rotary)[None, :]
        base = given.rotary + batch * steps.rotary.batch + head * steps.rotary.head + query * steps.rotary.query
        y = tl.load(base[:, None] + dim[None, :], mask=there, other=0)
        if ROTARY.kind == _CODED:
            y = _into_codes(y.to(tl.float32), positions, 0, dim, SHAPE.rotary_width)
            peak = tl.maximum(tl.max(tl.abs(y), 1), 1e-30)
            y, rotary_factor = y / peak[:, None], rotary_factor * peak
            if position_scale is not None:
                rotary_factor *= tl.load(position_scale + batch)
        y = y.to(queries.rotary.dtype.element_ty)
        tl.store(queries.rotary + row[:, None] * SHAPE.rotary + dim[None, :], y, mask=there)
    count = tl.num_programs(1).to(tl.int64) * COUNT
    tl.store(queries.numbers + row, factor, mask=used)
    tl.store(queries.numbers + count + row, rotary_factor, mask=used)
    tl.store(queries.numbers + 2 * count + row, offset, mask=used)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
