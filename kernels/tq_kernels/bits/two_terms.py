"""Numbers in two e4m3 terms, for fp8 dots.

A number in e4m3 keeps 4 bits; its e4m3 value and the e4m3 value of the remainder keep 8.
"""

import triton
import triton.language as tl

from .layout import side_by_side


@triton.constexpr_function
def _ptx_two_terms(lift):
    # $2 .. $5: four neighbours on K.
    asm = "{ .reg .b16 a, b, l, h; .reg .b32 x; .reg .f32 u, v; cvt.rn.satfinite.e4m3x2.f32 a, $3, $2; "
    asm += "cvt.rn.satfinite.e4m3x2.f32 b, $5, $4; mov.b32 $0, {a, b}; "
    for low, high, pair in (("$2", "$3", "a"), ("$4", "$5", "b")):
        asm += f"cvt.rn.f16x2.e4m3x2 x, {pair}; mov.b32 {{l, h}}, x; cvt.f32.f16 u, l; cvt.f32.f16 v, h; "
        asm += f"sub.f32 u, {low}, u; sub.f32 v, {high}, v; mul.f32 u, u, {lift:.1f}; mul.f32 v, v, {lift:.1f}; "
        asm += f"cvt.rn.satfinite.e4m3x2.f32 {pair}, v, u; "
    return asm + "mov.b32 $1, {a, b}; }"


@triton.jit
def two_terms(x, LIFT: tl.constexpr, PTX: tl.constexpr):
    """The e4m3 value of x, and that of LIFT times the remainder."""
    if PTX:
        asm: tl.constexpr = _ptx_two_terms(LIFT)
        return tl.inline_asm_elementwise(
            asm, "=r,=r,f,f,f,f", [x], (tl.float8e4nv, tl.float8e4nv), is_pure=True, pack=4
        )
    else:
        first = x.to(tl.float8e4nv)
        return first, ((x - first.to(tl.float32)) * LIFT).to(tl.float8e4nv)


@triton.jit
def _terms_side_by_side(first, second):
    """Two [K, C, 2] to [K, 4 * C]."""
    N: tl.constexpr = first.shape[1] * 2
    return side_by_side(first.reshape(first.shape[0], N), second.reshape(first.shape[0], N))


@triton.jit
def spread_terms(
    x, TERMS: tl.constexpr, TWINS: tl.constexpr, LIFT: tl.constexpr, COMPUTE: tl.constexpr, PTX: tl.constexpr
):
    """float32 [K, C] in the range of e4m3 to an operand [K, TERMS * C * TWINS]: e4m3 values, then LIFT times the rest.

    Both terms stand side by side on N, so that one dot takes them at once.  Other types than float8 need one term.
    wgmma takes no fewer than 16 columns and gives a thread two neighbours; of four columns, each therefore has a twin
    beside it, with which nothing is computed but the dot.
    """
    if TERMS == 1:
        return x.to(COMPUTE)
    elif TWINS == 2:
        first, second = two_terms(x, LIFT, PTX)
        first, second = tl.join(first, first), tl.join(second, second)
        return _terms_side_by_side(first, second)
    else:
        # Even and odd columns apart: a thread's neighbours on K then become bytes of one word.
        even, odd = tl.split(x.reshape(x.shape[0], x.shape[1] // 2, 2))
        even_first, even_second = two_terms(even, LIFT, PTX)
        odd_first, odd_second = two_terms(odd, LIFT, PTX)
        return _terms_side_by_side(tl.join(even_first, odd_first), tl.join(even_second, odd_second))


@triton.jit
def gather_terms(x, TERMS: tl.constexpr, TWINS: tl.constexpr, LIFT: tl.constexpr):
    """What `spread_terms` made into [M, TERMS * C * TWINS], after the dot: float32 [M, C]."""
    if TERMS == 2:
        x = x.reshape(x.shape[0], 2, x.shape[1] // 2)
        if LIFT != 1:
            x *= tl.where(tl.arange(0, 2) == 0, 1.0, 1.0 / LIFT)[None, :, None]
        x = tl.sum(x, 1)
    if TWINS == 2:
        x, _ = tl.split(x.reshape(x.shape[0], x.shape[1] // 2, 2))
    return x
