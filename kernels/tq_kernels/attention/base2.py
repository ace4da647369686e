"""Powers and logarithms of base 2, and an inverse: as few instructions as the use allows."""

import triton
import triton.language as tl


@triton.jit
def exp2(x, PTX: tl.constexpr):
    """2**x; the PTX form flushes denormal results to 0 and so needs one instruction."""
    if PTX:
        return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)
    else:
        return tl.exp2(x)


@triton.jit
def log2_sum(total):
    """log2 of a sum of probabilities: -inf where there are none, NaN of NaN."""
    return tl.where(total == 0, float("-inf"), tl.log2(divisor(total)))


@triton.jit
def divisor(total):
    """A sum of probabilities to divide by: 1 where there are none.  NaN stays, so that outputs become NaN with it."""
    return tl.where(total == 0, 1.0, total)


@triton.jit
def usable_scale(scale):
    """Scales as positive finite numbers, whatever memory holds: NaN goes to outputs with the score."""
    return tl.where((scale > 1e-7) & (scale < float("inf")), scale, 1e-7)


@triton.jit
def rough_log2(x):
    """log2 of positive float32, less at most 0.09: exponent and mantissa read as one number."""
    return x.to(tl.int32, bitcast=True).to(tl.float32) * (1.0 / 8388608) - 127.0


@triton.jit
def ptx_log2(x):
    """log2 of normal numbers."""
    return tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)


@triton.jit
def ptx_inverse(x):
    """1 / x of normal numbers."""
    return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)
