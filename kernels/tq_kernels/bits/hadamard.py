"""The rotation of a head_dim that is a power of two, without its matrix.

R is then a Hadamard matrix H, of 1 and -1, times a diagonal of signs and D**-0.5.  H is symmetric and its first row is
all ones, so that R[0] is that diagonal:

    x @ R = (x @ H) * R[0]        x @ R.T = (x * R[0]) @ H
"""

import triton
import triton.language as tl


@triton.constexpr_function
def is_power_of_two(number):
    """Of a head_dim: whether its rotation is one Hadamard matrix."""
    return number & (number - 1) == 0


@triton.constexpr_function
def log2(number):
    """Of a power of two."""
    return number.bit_length() - 1


@triton.jit
def hadamard(x, FIRST: tl.constexpr, LAST: tl.constexpr):
    """float32 x [..., columns] @ H, of which H takes bits FIRST .. LAST - 1 of the column: all of them for a whole row.

    In butterflies, which registers and shuffles can do: sum and difference of every two columns that differ in one bit.
    """
    for bit in tl.static_range(FIRST, LAST):
        pair = x.reshape(x.numel >> (bit + 1), 2, 1 << bit)
        own = tl.where(tl.arange(0, 2) == 0, 0.0, -2.0)  # a + b to a - b
        x = (tl.sum(pair, 1, keep_dims=True) + pair * own[None, :, None]).reshape(x.shape)
    return x


@triton.jit
def hadamard_in_registers(x, FIRST: tl.constexpr, LAST: tl.constexpr):
    """As `hadamard`, for bits of columns that one thread holds: a step less, elsewhere a move through shared memory."""
    for bit in tl.static_range(FIRST, LAST):
        pair = x.reshape(x.numel >> (bit + 1), 2, 1 << bit)
        a, b = tl.split(pair.permute(0, 2, 1))
        x = tl.join(a + b, a - b).permute(0, 2, 1).reshape(x.shape)
    return x
