"""Rotation of a tile of vectors on the tensor cores: x @ M - c.

M is the rotation with smoothing divided out, c the rotated centre, so that 16-bit x is multiplied as it lies in memory.
"""

import triton
import triton.language as tl


@triton.constexpr_function
def matrix_unit(dim, dtype):
    """Factor of M: makes it +-1 where D is a power of two; lowered so that squares of large numbers stay finite."""
    return dim**0.5 if dtype == tl.float16 else dim**0.5 * 2.0**-40


@triton.jit
def matrix_terms(rotation, smooth, row, column, DIM: tl.constexpr, DTYPE: tl.constexpr, TERMS: tl.constexpr):
    """Rows and columns (channels) of M as a sum of TERMS tensors of DTYPE; zeros beyond DIM."""
    inside = (row < DIM)[:, None] & (column < DIM)[None, :]
    matrix = tl.load(rotation + column[None, :] * DIM + row[:, None], mask=inside, other=0.0)
    UNIT: tl.constexpr = matrix_unit(DIM, DTYPE)
    matrix *= UNIT
    if smooth is not None:
        matrix /= tl.load(smooth + row, mask=row < DIM, other=1.0)[:, None]
    first = matrix.to(DTYPE)
    if TERMS == 1:
        return (first,)
    else:
        return first, (matrix - first.to(tl.float32)).to(DTYPE)


@triton.jit
def rotated_center(center, matrix, row, DIM: tl.constexpr):
    """What rows `row` of M add to the rotated centre, [columns]."""
    if center is None:
        return tl.zeros((matrix[0].shape[1],), tl.float32)
    else:
        total = matrix[0].to(tl.float32)
        if len(matrix) == 2:
            total += matrix[1].to(tl.float32)
        return tl.sum(total * tl.load(center + row, mask=row < DIM, other=0.0)[:, None], 0)


@triton.jit
def _product(x, matrix, out, PRECISION: tl.constexpr):
    """out + x @ M."""
    x = x.to(matrix[0].dtype)
    out = tl.dot(x, matrix[0], out, input_precision=PRECISION)
    if len(matrix) == 2:
        out = tl.dot(x, matrix[1], out, input_precision=PRECISION)
    return out


@triton.jit
def load_rows(x, stride, row, valid, channel, DIM: tl.constexpr):
    """x [64, channels] in its own dtype, zeros where there is none."""
    pointer = x + row.to(tl.int64)[:, None] * stride + channel[None, :]
    return tl.load(pointer, mask=valid[:, None] & (channel < DIM)[None, :], other=0.0)


@triton.jit
def rotate_halves(x, stride, row, valid, matrices, centers, DIM: tl.constexpr, PRECISION: tl.constexpr):
    """Rotated rows, DIM a power of two: a Hadamard matrix is [[H, H], [H, -H]] of half its size."""
    channel = tl.arange(0, DIM // 2)
    zeros = tl.zeros((64, DIM // 2), tl.float32)
    low = _product(load_rows(x, stride, row, valid, channel, DIM), matrices[0], zeros, PRECISION)
    high = _product(load_rows(x, stride, row, valid, channel + DIM // 2, DIM), matrices[1], zeros, PRECISION)
    low -= centers[0][None, :]
    high -= centers[1][None, :]
    return tl.join(low + high, low - high).permute(0, 2, 1).reshape(64, DIM)


@triton.jit
def rotate_whole(
    x, stride, row, valid, transform, column,
    DIM: tl.constexpr, DTYPE: tl.constexpr, TERMS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Rotated rows, any DIM: M is made anew for each tile, 32 of its rows at a time."""
    out = tl.zeros((64, column.shape[0]), tl.float32)
    shift = tl.zeros((column.shape[0],), tl.float32)
    for start in tl.range(0, column.shape[0], 32):
        channel = start + tl.arange(0, 32)
        matrix = matrix_terms(transform.rotation, transform.smooth, channel, column, DIM, DTYPE, TERMS)
        out = _product(load_rows(x, stride, row, valid, channel, DIM), matrix, out, PRECISION)
        shift += rotated_center(transform.center, matrix, channel, DIM)
    return out - shift[None, :]
