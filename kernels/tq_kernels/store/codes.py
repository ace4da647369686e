"""Numbers to codes: nearest magnitude and the stored factor, equal steps, float8."""

import triton
import triton.language as tl

from ..states import NORM
from .rotate import matrix_unit

_NORM = tl.constexpr(NORM)
LARGEST = tl.constexpr(2.0**50)  # larger elements count as this large
_ROUND = tl.constexpr(1.5 * 2**23)  # a small number plus this is rounded to an integer, in the last bits of the sum


@triton.constexpr_function
def _through(points):
    """Coefficients, constant first, of the polynomial through (x, y) points: Newton's divided differences."""
    x, y = [p[0] for p in points], [p[1] for p in points]
    for level in range(1, len(x)):
        for k in range(len(x) - 1, level - 1, -1):
            y[k] = (y[k] - y[k - 1]) / (x[k] - x[k - level])
    out = [0.0] * len(x)
    for k in range(len(x) - 1, -1, -1):  # out * (t - x[k]) + y[k]
        out = [y[k] - x[k] * out[0]] + [out[j - 1] - x[k] * out[j] for j in range(1, len(x))]
    return tuple(out)


@triton.constexpr_function
def _middles(magnitudes):
    """Halfway between neighbouring magnitudes."""
    return [(magnitudes[k] + magnitudes[k + 1]) / 2 for k in range(len(magnitudes) - 1)]


@triton.constexpr_function
def _index_polynomial(magnitudes):
    """Rounded, it is the index of the magnitude nearest to a size: k + 1/2 halfway between magnitudes k and k + 1."""
    middles = _middles(magnitudes)
    return _through([(0.0, -0.25)] + [(middles[k], k + 0.5) for k in range(len(middles))])


@triton.constexpr_function
def _grid(magnitudes):
    """Least power of two that makes the magnitudes integers."""
    grid = 1
    while any(m * grid % 1 for m in magnitudes):
        grid *= 2
    return grid


@triton.constexpr_function
def _value_polynomial(magnitudes):
    """From an index to its magnitude times `_grid`."""
    return _through([(float(k), magnitudes[k] * _grid(magnitudes)) for k in range(len(magnitudes))])


@triton.constexpr_function
def _value_ptx(magnitudes):
    """PTX: the number whose last bits are an index to 2**23 plus the magnitude, an integer."""
    table = [int(m * _grid(magnitudes)) for m in magnitudes] + [0] * (8 - len(magnitudes))
    low, high = sum(table[k] << (8 * k) for k in range(4)), sum(table[k + 4] << (8 * k) for k in range(4))
    return f"{{ .reg .b32 t; prmt.b32 t, {low:#x}, {high:#x}, $1; lop3.b32 $0, t, 0xFF, 0x4B000000, 0xEA; }}"


@triton.constexpr_function
def _largest_size(magnitudes):
    """Where sizes are cut off, as the polynomial turns down later."""
    return 1.05 * _middles(magnitudes)[-1]


@triton.jit
def _polynomial(x, MAGNITUDES: tl.constexpr, INVERSE: tl.constexpr):
    """The polynomial from size to index, or from index to value."""
    COEFFICIENTS: tl.constexpr = _value_polynomial(MAGNITUDES) if INVERSE else _index_polynomial(MAGNITUDES)
    COUNT: tl.constexpr = len(MAGNITUDES)
    y = x * COEFFICIENTS[COUNT - 1] + COEFFICIENTS[COUNT - 2]
    for k in tl.static_range(3, COUNT + 1):
        y = y * x + COEFFICIENTS[COUNT - k]
    return y


@triton.jit
def _nearest(size, MAGNITUDES: tl.constexpr, PTX: tl.constexpr):
    """Index, int32, and value (times `_grid`) of the magnitude nearest to each size >= 0."""
    LIMIT: tl.constexpr = _largest_size(MAGNITUDES)
    rounded = _polynomial(tl.minimum(size, LIMIT), MAGNITUDES, False) + _ROUND
    index = rounded.to(tl.int32, bitcast=True)
    if PTX:
        asm: tl.constexpr = _value_ptx(MAGNITUDES)
        value = tl.inline_asm_elementwise(asm, "=f,r", [index], tl.float32, is_pure=True, pack=1) - 2.0**23
    else:
        value = _polynomial(rounded - _ROUND, MAGNITUDES, True)
    return index & 7, value


@triton.jit
def _half(x):
    """float16, the largest finite one beyond it, NaN where x is NaN or inf."""
    finite = tl.abs(x) < float("inf")
    return tl.where(finite, tl.clamp(x, -65504.0, 65504.0), float("nan")).to(tl.float16)


@triton.jit
def _divisor(x):
    return tl.where(x == 0, 1.0, x)


@triton.jit
def _sign(x):
    return (x.to(tl.uint32, bitcast=True) >> 31).to(tl.int32)


@triton.jit
def gaussian_codes(r, inside, VECTORS: tl.constexpr, ARITHMETIC: tl.constexpr):
    """Indices and signs of rotated r [64, WIDTH] (times `matrix_unit`), and their scale, float16 [64]."""
    RULE: tl.constexpr = VECTORS.rule
    MAGNITUDES: tl.constexpr = VECTORS.magnitudes
    UNIT: tl.constexpr = VECTORS.dim**0.5 / VECTORS.unit
    NORMALISE: tl.constexpr = _grid(MAGNITUDES) / matrix_unit(VECTORS.dim, ARITHMETIC.operand)
    square = tl.sum(r * r, 1)
    size = tl.abs(r) * (UNIT / _divisor(tl.sqrt(square)))[:, None]
    index, value = _nearest(size, MAGNITUDES, ARITHMETIC.ptx)
    if inside is not None:
        value = tl.where(inside, value, 0.0)
    if RULE == _NORM:
        scale = tl.sqrt(square) / tl.sqrt(tl.sum(value * value, 1))
    else:
        scale = square / _divisor(tl.sum(tl.abs(r) * value, 1))
    return index, _sign(r), _half(scale * NORMALISE)


@triton.jit
def _smaller(a, b):
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def uniform_codes(x, inside, VECTORS: tl.constexpr):
    """Indices and signs of x [64, WIDTH] by equal steps, and step and zero, float16 [64]."""
    MAGNITUDES: tl.constexpr = VECTORS.magnitudes
    LAST: tl.constexpr = len(MAGNITUDES) - 1
    low, high = x, x
    if inside is not None:
        low, high = tl.where(inside, x, float("inf")), tl.where(inside, x, float("-inf"))
    low, high = tl.reduce(low, 1, _smaller), tl.reduce(high, 1, _larger)
    spoiled = (low == float("-inf")) | (high == float("inf")) | (low != low)
    low, high = tl.clamp(low, -LARGEST, LARGEST), tl.clamp(high, -LARGEST, LARGEST)
    low = tl.where(spoiled, float("nan"), low)
    zero = _half((low + high) / 2)
    middle = zero.to(tl.float32)
    step = _half(_larger(high - middle, middle - low) / MAGNITUDES[LAST])
    x = (x - middle[:, None]) * (0.5 / _divisor(step.to(tl.float32)))[:, None]
    # Magnitudes are odd: halfway lie even numbers, halved integers; a little less, so that those round down.
    rounded = tl.minimum(tl.abs(x) * (1 - 2.0**-23) - 0.5, LAST + 0.25) + _ROUND
    return rounded.to(tl.int32, bitcast=True) & LAST, _sign(x), step, zero


@triton.jit
def int8_codes(r):
    """Codes of rotated r [N, WIDTH], int8 as bytes, and their scale, float16 [N]: the largest element is 127 steps."""
    scale = _half(tl.reduce(tl.abs(r), 1, _larger) / 127)
    steps = r * (1 / _divisor(scale.to(tl.float32)))[:, None]
    rounded = tl.clamp(tl.where(steps == steps, steps, 0.0), -127.0, 127.0) + _ROUND
    return (rounded.to(tl.int32, bitcast=True) & 255).to(tl.uint8), scale


@triton.jit
def _divide(x, scale, LIMIT: tl.constexpr):
    """x / scale, rounded as a division is (Markstein), beyond 2 * LIMIT somewhere beyond it; NaN for inf."""
    scale = tl.maximum(scale, 2.0**-126)
    inverse = tl.div_rn(1.0, scale)
    limit = tl.minimum(2 * LIMIT * scale, LARGEST)
    kept = tl.clamp(x, -limit, limit)
    quotient = kept * inverse
    quotient = tl.fma(tl.fma(-quotient, scale, kept), inverse, quotient)
    return tl.fma(x, 0.0, quotient)  # 0 for finite x, of its sign


@triton.constexpr_function
def largest_float8(exponent):
    return 448.0 if exponent == 4 else 57344.0


@triton.jit
def _float8_bits(x, EXPONENT: tl.constexpr):
    """`float8_codes` of quotients, by integers: int32."""
    LIMIT: tl.constexpr = largest_float8(EXPONENT)
    number = x == x
    bits = tl.where(number, tl.clamp(x, -LIMIT, LIMIT), 0.0).to(tl.int32, bitcast=True)
    sign, size = (bits >> 24) & 128, bits & 0x7FFFFFFF
    # Subnormals are rounded by adding a number whose last bit is their step, the others as integers.
    ANCHOR: tl.constexpr = (2 - (1 << (EXPONENT - 1)) + EXPONENT - 7 + 23 + 127) << 23
    anchor = tl.full((), ANCHOR, tl.int32).to(tl.float32, bitcast=True)
    small = (size.to(tl.float32, bitcast=True) + anchor).to(tl.int32, bitcast=True) - ANCHOR
    SHIFT: tl.constexpr = 16 + EXPONENT  # mantissa bits that go
    REBIAS: tl.constexpr = (128 - (1 << (EXPONENT - 1))) << 23
    large = (size - REBIAS + (1 << (SHIFT - 1)) - 1 + ((size >> SHIFT) & 1)) >> SHIFT
    return tl.where(number, tl.where(size < REBIAS + (1 << 23), small, large) | sign, 127)


@triton.jit
def float8_codes(x, scale, EXPONENT: tl.constexpr, NATIVE: tl.constexpr):
    """Byte, uint8, of the float8 nearest to x / scale: ties to even, saturating, NaN where x is NaN or inf."""
    x = _divide(x, scale, largest_float8(EXPONENT))
    if NATIVE:
        return x.to(tl.float8e4nv if EXPONENT == 4 else tl.float8e5).to(tl.uint8, bitcast=True)
    else:
        return _float8_bits(x, EXPONENT).to(tl.uint8)


@triton.constexpr_function
def _four_float8(exponent):
    """PTX: four float32 to a word, the first one lowest."""
    cvt = f"cvt.rn.satfinite.{'e4m3x2' if exponent == 4 else 'e5m2x2'}.f32"
    return f"{{ .reg .b16 a, b; {cvt} a, $2, $1; {cvt} b, $4, $3; mov.b32 $0, {{a, b}}; }}"


@triton.jit
def float8_words(x, scale, EXPONENT: tl.constexpr, NATIVE: tl.constexpr):
    """x [64, N], rows in the order of `float8_row`, to words of the `float8_codes` of four tokens: int32 [16, N]."""
    N: tl.constexpr = x.shape[1]
    x = _divide(x, scale, largest_float8(EXPONENT))
    even, odd = tl.split(x.reshape(2, 2, 2, 8, N).permute(0, 3, 4, 1, 2))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    if NATIVE:
        asm: tl.constexpr = _four_float8(EXPONENT)
        four = [first, second, third, fourth]
        words = tl.inline_asm_elementwise(asm, "=r,f,f,f,f", four, tl.int32, is_pure=True, pack=1)
    else:
        words = _float8_bits(first, EXPONENT) | (_float8_bits(second, EXPONENT) << 8)
        words |= (_float8_bits(third, EXPONENT) << 16) | (_float8_bits(fourth, EXPONENT) << 24)
    return words.permute(1, 0, 2).reshape(16, N)


@triton.jit
def float8_row(row):
    """Token of a row that is loaded, 0 to 63: those of one word meet in one thread, which loads every eighth row."""
    return row % 8 * 8 + row // 8
