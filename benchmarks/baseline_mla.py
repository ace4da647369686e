"""What `latent.py` compares with: decode attention over latents in bf16, or in float8, as others compute it.

`GroupedMLA` is a Triton kernel built as vLLM's grouped decode for MLA is (`TRITON_MLA`): one program per sequence, 16
heads and split of the tokens; tiles of 32 tokens, through a table of pages, as [channels, tokens] for the scores, and
transposed, or loaded once more, for the sums (vLLM has had both); 4 warps, 2 stages; partial sums and log-sum-exp in
float32, joined by a second kernel.  A float8 tile is multiplied by a scale and becomes bf16 before the dots.

`ABSORBED` is plain PyTorch on bf16, and `transformers_layer` a whole attention layer as transformers runs it today.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import triton
import triton.language as tl
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from transformers import DeepseekV3Config, DynamicCache
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

RANK, WIDTH = 512, 64
SCALING = (128 + WIDTH) ** -0.5  # DeepSeek's: of the heads that are not expanded
PAGE, BLOCK_H, BLOCK_N = 16, 16, 32


@dataclass(frozen=True)
class Problem:
    """Queries and tokens of one layer in a 16-bit type, the same tokens in two forms.

    content, rotary: [B, H, 1, RANK] and [B, H, 1, WIDTH]
    latents, keys:   [B, 1, T, RANK] and [B, 1, T, WIDTH]
    joint:           [B, T, RANK + WIDTH], both
    """

    content: torch.Tensor
    rotary: torch.Tensor
    latents: torch.Tensor
    keys: torch.Tensor
    joint: torch.Tensor

    @classmethod
    def random(cls, batch: int, heads: int, tokens: int, device: str, dtype: torch.dtype = torch.bfloat16) -> "Problem":
        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, device=device, dtype=dtype)

        joint = normal(batch, tokens, RANK + WIDTH)
        latents, keys = (x.contiguous() for x in joint[:, None].split([RANK, WIDTH], dim=-1))
        return cls(normal(batch, heads, 1, RANK), normal(batch, heads, 1, WIDTH), latents, keys, joint)

    @property
    def query(self) -> torch.Tensor:
        """[B, H, 1, RANK + WIDTH]"""
        return torch.cat([self.content, self.rotary], dim=-1)


# ------------------------------------------------------------------------------------------------------ plain PyTorch


def matmuls(query: torch.Tensor, joint: torch.Tensor) -> torch.Tensor:
    """Two batched products and a softmax."""
    scores = torch.bmm(query[:, :, 0] * SCALING, joint.mT)
    return torch.bmm(torch.softmax(scores, dim=-1), joint[..., :RANK])[:, :, None]


def sdpa(backend: SDPBackend, heads_as_rows: bool, query: torch.Tensor, joint: torch.Tensor) -> torch.Tensor:
    """All heads as queries of one head, or every head with keys that are repeated without a copy."""
    keys = joint[:, None]
    query = query.transpose(1, 2) if heads_as_rows else query
    keys = keys if heads_as_rows else keys.expand(-1, query.shape[1], -1, -1)
    with sdpa_kernel(backend):
        out = scaled_dot_product_attention(query, keys, keys[..., :RANK], scale=SCALING)
    return out.transpose(1, 2) if heads_as_rows else out


# Absorbed attention in PyTorch, of queries [B, H, 1, RANK + WIDTH] and tokens [B, T, RANK + WIDTH].
ABSORBED: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "matmul": matmuls,
    "sdpa_flash": partial(sdpa, SDPBackend.FLASH_ATTENTION, True),
    "sdpa_cudnn": partial(sdpa, SDPBackend.CUDNN_ATTENTION, True),
    "sdpa_efficient": partial(sdpa, SDPBackend.EFFICIENT_ATTENTION, True),
    "sdpa_efficient_heads": partial(sdpa, SDPBackend.EFFICIENT_ATTENTION, False),
}


def layer_config(heads: int) -> DeepseekV3Config:
    """DeepSeek-V2-Lite's attention with 16 heads, DeepSeek-V3's with 128."""
    hidden, q_rank = (7168, 1536) if heads >= 128 else (2048, None)
    shape = dict(hidden_size=hidden, q_lora_rank=q_rank, num_attention_heads=heads, num_key_value_heads=heads)
    config = DeepseekV3Config(**shape, num_hidden_layers=1)
    config._attn_implementation = "sdpa"
    return config


def transformers_layer(problem: Problem) -> Callable[[], torch.Tensor]:
    """One step of a whole attention layer with random weights over a DynamicCache of all tokens but one."""
    batch, heads, device = *problem.content.shape[:2], problem.joint.device
    config = layer_config(heads)
    with torch.device(device):
        torch.set_default_dtype(torch.bfloat16)
        layer = DeepseekV3Attention(config, 0).eval()
    torch.set_default_dtype(torch.float32)
    cache = DynamicCache(config=config)
    held = problem.latents[:, :, :-1], problem.keys[:, :, :-1]
    cache.update(*held, 0)
    hidden = torch.randn(batch, 1, config.hidden_size, device=device, dtype=torch.bfloat16)
    angles = torch.rand(batch, 1, WIDTH, device=device)
    positions = angles.cos().bfloat16(), angles.sin().bfloat16()

    @torch.no_grad()
    def step() -> torch.Tensor:
        cache.layers[0].keys, cache.layers[0].values = held  # the step before is forgotten
        return layer(hidden, positions, None, past_key_values=cache)[0]

    return step


# ---------------------------------------------------------------------------------------------------- as vLLM's kernel


@triton.jit
def _split_kernel(
    query, cache, table, lengths, parts, cache_scale, scaling, heads, splits, pages,
    RANK: tl.constexpr, WIDTH: tl.constexpr, PAGE: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr,
    FLOAT8: tl.constexpr, TWICE: tl.constexpr,
):  # fmt: skip
    """Attention of 16 heads over one split of a sequence: partial sums, and their log-sum-exp behind them."""
    row, split = tl.program_id(0), tl.program_id(2)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    valid = head < heads
    channel, turned = tl.arange(0, RANK), RANK + tl.arange(0, WIDTH)
    query += (row * heads + head[:, None]) * (RANK + WIDTH)
    content = tl.load(query + channel[None, :], mask=valid[:, None], other=0.0)
    rotary = tl.load(query + turned[None, :], mask=valid[:, None], other=0.0)
    scale = tl.load(cache_scale)
    length = tl.load(lengths + row)
    span = tl.cdiv(length, splits)
    start = split * span
    end = tl.minimum(start + span, length)
    largest = tl.full([BLOCK_H], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    sums = tl.zeros([BLOCK_H, RANK], tl.float32)
    if end > start:
        for first in tl.range(start, end, BLOCK_N):
            token = first + tl.arange(0, BLOCK_N)
            there = token < end
            page = tl.load(table + row * pages + token // PAGE, mask=there, other=0)
            place = (page * PAGE + token % PAGE) * (RANK + WIDTH)
            keys = tl.load(cache + place[None, :] + channel[:, None], mask=there[None, :], other=0.0)
            rotary_keys = tl.load(cache + place[None, :] + turned[:, None], mask=there[None, :], other=0.0)
            values = tl.trans(keys)
            if TWICE:
                values = tl.load(cache + place[:, None] + channel[None, :], mask=there[:, None], other=0.0)
            if FLOAT8:
                keys = (keys.to(tl.float32) * scale).to(content.dtype)
                rotary_keys = (rotary_keys.to(tl.float32) * scale).to(content.dtype)
                values = (values.to(tl.float32) * scale).to(content.dtype) if TWICE else tl.trans(keys)
            scores = (tl.dot(content, keys) + tl.dot(rotary, rotary_keys)) * scaling
            scores = tl.where(valid[:, None] & there[None, :], scores, float("-inf"))
            highest = tl.maximum(tl.max(scores, 1), largest)
            kept = tl.exp(largest - highest)
            weights = tl.exp(scores - highest[:, None])
            sums = sums * kept[:, None] + tl.dot(weights.to(values.dtype), values)
            total = total * kept + tl.sum(weights, 1)
            largest = highest
        part = parts + ((row * heads + head) * splits + split) * (RANK + 1)
        tl.store(part[:, None] + channel[None, :], sums / total[:, None], mask=valid[:, None])
        tl.store(part + RANK, largest + tl.log(total), mask=valid)


@triton.jit
def _join_kernel(parts, lengths, out, heads, splits, RANK: tl.constexpr):
    """The splits of one head, joined."""
    row, head = tl.program_id(0), tl.program_id(1)
    channel = tl.arange(0, RANK)
    length = tl.load(lengths + row)
    span = tl.cdiv(length, splits)
    parts += (row * heads + head) * splits * (RANK + 1)
    largest = -float("inf")
    total = 0.0
    sums = tl.zeros([RANK], tl.float32)
    for split in tl.range(0, splits):
        if split * span < length:
            part = tl.load(parts + split * (RANK + 1) + channel)
            lse = tl.load(parts + split * (RANK + 1) + RANK)
            highest = tl.maximum(lse, largest)
            kept, weight = tl.exp(largest - highest), tl.exp(lse - highest)
            sums = sums * kept + part * weight
            total = total * kept + weight
            largest = highest
    tl.store(out + (row * heads + head) * RANK + channel, (sums / total).to(out.dtype.element_ty))


class GroupedMLA:
    """Attention of queries [B, H, 1, RANK + WIDTH] over tokens [B, T, RANK + WIDTH], of their type or float8.

    Buffers, and the table of pages, are made once; calling launches both kernels and returns [B, H, 1, RANK].
    Raises ValueError unless T is a multiple of PAGE.
    """

    def __init__(
        self, query: torch.Tensor, joint: torch.Tensor, splits: int, scale: float = 1.0, twice: bool = False
    ) -> None:
        (batch, heads), tokens, device = query.shape[:2], joint.shape[1], query.device
        if tokens % PAGE:
            raise ValueError(f"expected a multiple of {PAGE} tokens, got {tokens}")
        self.query, self.joint, self.splits, self.heads = query.contiguous(), joint.contiguous(), splits, heads
        self.table = torch.arange(batch * tokens // PAGE, dtype=torch.int32, device=device).view(batch, -1)
        self.lengths = torch.full((batch,), tokens, dtype=torch.int32, device=device)
        self.twice = twice
        self.parts = torch.empty(batch, heads, splits, RANK + 1, device=device)
        self.scale = torch.full((1,), scale, device=device)

    def __call__(self) -> torch.Tensor:
        batch, heads, splits = self.query.shape[0], self.heads, self.splits
        out = torch.empty(batch, heads, 1, RANK, dtype=self.query.dtype, device=self.query.device)
        _split_kernel[batch, triton.cdiv(heads, BLOCK_H), splits](
            *(self.query, self.joint, self.table, self.lengths, self.parts, self.scale, SCALING),
            *(heads, splits, self.table.shape[1]),
            RANK=RANK, WIDTH=WIDTH, PAGE=PAGE, BLOCK_H=BLOCK_H, BLOCK_N=BLOCK_N,
            FLOAT8=self.joint.dtype != self.query.dtype, TWICE=self.twice, num_warps=4, num_stages=2,
        )  # fmt: skip
        _join_kernel[batch, heads](self.parts, self.lengths, out, heads, splits, RANK=RANK, num_warps=4, num_stages=2)
        return out


def split_counts(batch: int, heads: int, tokens: int, multiprocessors: int) -> list[int]:
    """vLLM's 4, and as many as give about one, two and four programs a multiprocessor: the best of them is taken."""
    programs = batch * -(-heads // BLOCK_H)
    counts = {4} | {max(1, round(waves * multiprocessors / programs)) for waves in (1, 2, 4)}
    return sorted({min(count, tokens // BLOCK_N) for count in counts})
