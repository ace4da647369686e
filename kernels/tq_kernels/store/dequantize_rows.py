"""Dequantise packed rows, each token on its own, up to 512 channels: latents and rotary keys (MLA) of a width that is a
power of two, rotated back in registers.

One program takes a few tokens of one sequence and KV head.  Codes become float16, exactly; all else is float32.
"""

import torch
import triton
import triton.language as tl

from ..bits.hadamard import hadamard, is_power_of_two, log2
from ..bits.layout import BLOCK_TOKENS
from ..bits.to_float16 import decoders, load_keys
from ..device import Device, describe
from ..launch import Launch, Program
from ..states import LARGEST, MIN_MAX, States
from ..tuning import LATENT_WARPS, latent_tokens

MIN_DIM, MAX_DIM = 32, 512
DTYPES = (torch.bfloat16, torch.float16, torch.float32)

_LARGEST = tl.constexpr(LARGEST)


@triton.jit(do_not_specialize=["length"])
def _dequantize_rows_kernel(
    states, out, length, strides,
    DIM: tl.constexpr, RULE: tl.constexpr, CODE: tl.constexpr, MODE: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """One program = TOKENS tokens, which divide a block."""
    head, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    pair = batch * tl.num_programs(1) + head
    packed = states.packed + (batch * strides.packed.batch + head * strides.packed.head)
    first, row, channel = tl.program_id(0) * TOKENS, tl.arange(0, TOKENS), tl.arange(0, DIM)
    token = first + row
    if RULE == _LARGEST:
        place = token.to(tl.int64)[:, None] * DIM + channel[None, :]
        x = tl.load(packed + place).to(tl.int8, bitcast=True).to(tl.float32)
    else:
        block = first // BLOCK_TOKENS * BLOCK_TOKENS
        x = load_keys(packed, block, first % BLOCK_TOKENS + row, 0, DIM, CODE, MODE, False).to(tl.float32)
    if states.scale is None:
        x *= tl.load(states.head_scale + pair)
    else:
        scale = states.scale + (batch * strides.scale.batch + head * strides.scale.head)
        x *= tl.load(scale + token).to(tl.float32)[:, None]
    if states.rotation is not None:
        x = hadamard(x, 0, log2(DIM)) * tl.load(states.rotation + channel)[None, :]  # its first row: the signs
    if states.smooth is not None:
        x *= tl.load(states.smooth + pair * DIM + channel)[None, :]
    if states.center is not None:
        x += tl.load(states.center + pair * DIM + channel)[None, :]
    place = (pair * length + token)[:, None] * DIM + channel[None, :]
    tl.store(out + place, x.to(out.dtype.element_ty), mask=(token < length)[:, None])


def dequantize_rows(states: States, length: int, dtype: torch.dtype) -> torch.Tensor:
    """The first `length` tokens of packed latents, of rotary keys or of any keys, as vectors of the model.

    states: see `States`; coded without a zero; head_dim a power of two from 32 to 512
    dtype:  bfloat16, float16 or float32

    Returns [B, H_kv, length, D], contiguous.  Raises ValueError where an argument is none of these.
    """
    launch, out = dequantize_rows_launch(states, length, dtype, describe(states.packed.device))
    if launch is not None:
        launch.run()
    return out


def dequantize_rows_launch(
    states: States, length: int, dtype: torch.dtype, device: Device
) -> tuple[Launch | None, torch.Tensor]:
    """The launch of `dequantize_rows`, None if there is nothing to do, and its output."""
    states.check(length)
    dim, coding = states.head_dim, states.coding
    fits = MIN_DIM <= dim <= MAX_DIM and is_power_of_two(dim) and not coding.exact and coding.rule != MIN_MAX
    if not fits or dtype not in DTYPES:
        raise ValueError(
            f"expected coded keys of a head_dim that is a power of two from {MIN_DIM} to {MAX_DIM} and a dtype of "
            f"{DTYPES}, got {dim}, rule {coding.rule} and {dtype}; "
            "use the reference, `tq_cache.backends.quantizers.dequantize`"
        )
    batch, heads = states.packed.shape[:2]
    out = torch.empty(batch, heads, length, dim, dtype=dtype, device=states.packed.device)
    if out.numel() == 0:
        return None, out
    tokens = latent_tokens(dim)
    constants = dict(DIM=dim, RULE=coding.rule, CODE=coding.code, MODE=decoders(device), TOKENS=tokens)
    arguments = (states.tensors, out, length, states.layout.stored_strides)
    program = Program(_dequantize_rows_kernel, device, constants, dict(num_warps=LATENT_WARPS))
    return Launch(program, (triton.cdiv(length, tokens), heads, batch), arguments), out
