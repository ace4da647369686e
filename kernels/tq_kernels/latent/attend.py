"""The kernel of latent attention: a program is one split of one sequence, of packed tokens or of exact ones."""

import triton
import triton.language as tl

from ..attention.scores import lengths_now
from .exact import attend_exact_latents
from .packed import attend_packed_latents
from .packed_rows import attend_packed_rows


@triton.jit(do_not_specialize=["splits", "packed_length", "blocks", "tail_length"])
def latent_kernel(
    queries, packed, exact, mask, chosen, counts, work, splits, packed_length, blocks, tail_length, settings, strides,
    SHAPE: tl.constexpr, CODE: tl.constexpr, ROTARY: tl.constexpr, FLAGS: tl.constexpr, ARITHMETIC: tl.constexpr,
    MODE: tl.constexpr, LAUNCH: tl.constexpr,
):  # fmt: skip
    """One program = one split of the tokens of one sequence (of one query, where tokens are chosen), for a tile of
    columns.  The first `splits` attend to the packed tokens, in `blocks`, the others to tail and sinks.

    Writes to `work`, float32, the output of each split [B, splits, columns, rank] and behind those, likewise, the
    log-sum-exps in base 2.  Arguments: see `arguments`.
    """
    if LAUNCH.pdl:
        tl.extra.cuda.gdc_wait()  # for the queries
    sinks, tail, tokens = lengths_now(
        counts.num_tokens, settings.num_sinks, tail_length, packed_length, settings.residual_length
    )  # fmt: skip
    ROTATED: tl.constexpr = SHAPE.rotary > 0
    PRECISION: tl.constexpr = ARITHMETIC.precision
    if tl.program_id(2) < splits:
        attend_packed_latents(
            queries, packed, mask, chosen, work, splits, tokens, sinks + tokens + tail, blocks, sinks, settings.softcap,
            strides, SHAPE, CODE, ROTARY, FLAGS, ARITHMETIC, MODE, LAUNCH,
        )  # fmt: skip
    else:
        attend_exact_latents(
            exact, mask, chosen, counts.ring_slots, work, splits, sinks, tokens, tail, settings, strides, SHAPE, FLAGS,
            ROTATED, PRECISION, LAUNCH.exact_step, 1,
        )  # fmt: skip
    if LAUNCH.pdl:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit(do_not_specialize=["splits", "packed_length", "blocks", "tail_length"])
def latent_rows_kernel(
    rows, queries, packed, exact, mask, counts, work, splits, packed_length, blocks, tail_length, settings, strides,
    SHAPE: tl.constexpr, CODE: tl.constexpr, ROTARY: tl.constexpr, FLAGS: tl.constexpr, ARITHMETIC: tl.constexpr,
    MODE: tl.constexpr, LAUNCH: tl.constexpr,
):  # fmt: skip
    """As `latent_kernel`, by fp8 tensor cores; `rows`: descriptor of packed rows, [tokens of all sequences, bytes]."""
    if LAUNCH.pdl:
        tl.extra.cuda.gdc_wait()  # for the queries
    sinks, tail, tokens = lengths_now(
        counts.num_tokens, settings.num_sinks, tail_length, packed_length, settings.residual_length
    )  # fmt: skip
    ROTATED: tl.constexpr = SHAPE.rotary > 0
    PRECISION: tl.constexpr = ARITHMETIC.precision
    if tl.program_id(2) < splits:
        attend_packed_rows(
            rows, queries, packed, mask, work, splits, tokens, sinks + tokens + tail, blocks, sinks, settings.softcap,
            strides, SHAPE, CODE, ROTARY, FLAGS, ARITHMETIC, MODE, LAUNCH,
        )  # fmt: skip
    else:
        attend_exact_latents(
            exact, mask, None, counts.ring_slots, work, splits, sinks, tokens, tail, settings, strides, SHAPE, FLAGS,
            ROTATED, PRECISION, LAUNCH.exact_step, 1,
        )  # fmt: skip
    if LAUNCH.pdl:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit(do_not_specialize=["tail_length"])
def latent_exact_kernel(
    exact, mask, chosen, counts, work, tail_length, settings, strides,
    SHAPE: tl.constexpr, FLAGS: tl.constexpr, PRECISION: tl.constexpr, STEP: tl.constexpr, STAGES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """`latent_kernel` where nothing is packed."""
    sinks, tail, tokens = lengths_now(
        counts.num_tokens, settings.num_sinks, tail_length, tail_length * 0, settings.residual_length
    )  # fmt: skip
    ROTATED: tl.constexpr = SHAPE.rotary > 0
    attend_exact_latents(
        exact, mask, chosen, counts.ring_slots, work, 0, sinks, tokens, tail, settings, strides, SHAPE, FLAGS, ROTATED,
        PRECISION, STEP, STAGES,
    )  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
