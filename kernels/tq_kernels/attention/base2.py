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
