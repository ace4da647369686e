"""The model, and the training forward pass over its parameters."""

from __future__ import annotations

import math
import time

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import Qwen3Config, Qwen3ForCausalLM

from .settings import (
    BATCH_TOKENS,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    KV_HEADS,
    LAYERS,
    MLP,
    POSITIONS,
    ROPE_THETA,
    VOCAB,
    W_ANSWER,
    W_STORY,
)


def make_model(smoke: bool):
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=MLP,
        num_hidden_layers=2 if smoke else LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=POSITIONS,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
    )
    model = Qwen3ForCausalLM(config)
    for layer in model.model.layers:
        # Residual branches start at zero; sharper attention from the start suits recall.
        torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
        torch.nn.init.zeros_(layer.mlp.down_proj.weight)
        torch.nn.init.constant_(layer.self_attn.q_norm.weight, 1.4)
        torch.nn.init.constant_(layer.self_attn.k_norm.weight, 1.4)
    return model


def rms(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    x32 = x.float()
    return (x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + 1e-6) * weight).to(x.dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of (tokens, heads, 64) by (tokens, 1, 64)."""
    low, high = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-high, low), dim=-1) * sin).to(x.dtype)


def attention_in(x, norm, wq, wk, wv, q_norm, k_norm, cos, sin):
    """(tokens, hidden) -> q, k, v of (tokens, heads, 64)."""
    h = rms(x, norm)
    q, k, v = (F.linear(h, w.to(h.dtype)).unflatten(-1, (-1, HEAD_DIM)) for w in (wq, wk, wv))
    return rotate(rms(q, q_norm), cos, sin), rotate(rms(k, k_norm), cos, sin), v


def attention_out(x, attended, wo, norm, gate, up, down):
    """Output projection and MLP, each with its residual; (tokens, hidden) again."""
    x = x + F.linear(attended, wo.to(x.dtype))
    h = rms(x, norm)
    h = F.silu(F.linear(h, gate.to(x.dtype))) * F.linear(h, up.to(x.dtype))
    return x + F.linear(h, down.to(x.dtype))


def head(x, norm, embedding, targets, weights):
    """Weighted loss; sums and counts of story loss and answer hits for the log."""
    logits = F.linear(rms(x, norm), embedding.to(x.dtype)).float()
    losses = F.cross_entropy(logits, targets, reduction="none")
    loss = (losses * weights).sum() / weights.sum()
    story, answer = weights == W_STORY, weights == W_ANSWER
    hits = logits.argmax(-1) == targets
    stats = torch.stack(((losses * story).sum(), story.sum(), (hits & answer).sum(), answer.sum()))
    return loss, stats.detach()


class Forward:
    """The training forward pass over the parameters of a Qwen3ForCausalLM.

    The same function as the Hugging Face model (``check_forward``), but flat over tokens, so that
    one compiled shape serves all sequence lengths.
    """

    def __init__(self, model, dtype: torch.dtype, compiled: bool):
        self.model, self.dtype = model, dtype
        wrap = torch.compile(dynamic=False) if compiled else (lambda f: f)
        self.attention_in, self.attention_out = wrap(attention_in), wrap(attention_out)
        self.head = wrap(head)
        self.backends: list[SDPBackend] = []

    def angles(self, length: int, rows: int, device) -> tuple[torch.Tensor, torch.Tensor]:
        """cos, sin: (rows * length, 1, 64)."""
        inverse = ROPE_THETA ** (-torch.arange(0, HEAD_DIM, 2, device=device) / HEAD_DIM)
        angle = torch.outer(torch.arange(length, device=device).float(), inverse)
        angle = torch.cat((angle, angle), dim=-1).repeat(rows, 1).unsqueeze(1)
        return angle.cos(), angle.sin()

    def attend(self, q, k, v, rows: int) -> torch.Tensor:
        q, k, v = (t.unflatten(0, (rows, -1)).transpose(1, 2) for t in (q, k, v))
        if self.backends:
            with sdpa_kernel(self.backends):
                out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        else:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2).reshape(-1, HEADS * HEAD_DIM)

    def __call__(self, ids: torch.Tensor, weights: torch.Tensor):
        """ids, weights: (rows, length + 1), the weights those of predicting each token."""
        rows, length = ids.shape[0], ids.shape[1] - 1
        inner = self.model.model
        cos, sin = self.angles(length, rows, ids.device)
        x = F.embedding(ids[:, :-1].reshape(-1), inner.embed_tokens.weight).to(self.dtype)
        for layer in inner.layers:
            a, m = layer.self_attn, layer.mlp
            q, k, v = self.attention_in(
                x,
                layer.input_layernorm.weight,
                a.q_proj.weight,
                a.k_proj.weight,
                a.v_proj.weight,
                a.q_norm.weight,
                a.k_norm.weight,
                cos,
                sin,
            )
            x = self.attention_out(
                x,
                self.attend(q, k, v, rows),
                a.o_proj.weight,
                layer.post_attention_layernorm.weight,
                m.gate_proj.weight,
                m.up_proj.weight,
                m.down_proj.weight,
            )
        targets = ids[:, 1:].reshape(-1).long()
        return self.head(
            x,
            inner.norm.weight,
            inner.embed_tokens.weight,
            targets,
            weights[:, 1:].reshape(-1).float(),
        )

    def pick_attention(self, device) -> str:
        """Use the faster of the two fused attention kernels at the longest length."""
        rows = BATCH_TOKENS // POSITIONS
        shape = {"q": HEADS, "k": KV_HEADS, "v": KV_HEADS}
        qkv = [torch.randn(BATCH_TOKENS, h, HEAD_DIM, device=device, dtype=self.dtype) for h in shape.values()]
        best = math.inf
        chosen: list[SDPBackend] = []
        for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
            self.backends = [backend]
            leaves = [t.clone().requires_grad_() for t in qkv]
            try:
                for step in range(6):
                    if step == 2:
                        torch.cuda.synchronize()
                        start = time.perf_counter()
                    self.attend(*leaves, rows).sum().backward()
                torch.cuda.synchronize()
            except RuntimeError as error:
                print(f"attention {backend.name}: {str(error).splitlines()[0]}", flush=True)
                continue
            took = (time.perf_counter() - start) / 4
            print(f"attention {backend.name}: {took * 1e3:.1f} ms a layer", flush=True)
            if took < best:
                best, chosen = took, [backend]
        self.backends = chosen
        return chosen[0].name if chosen else "default"


def check_forward(model) -> float:
    """Largest relative error of the training loss against the Hugging Face model, in float32."""
    ids = torch.randint(VOCAB, (2, 65), generator=torch.Generator().manual_seed(0))
    weights = torch.full(ids.shape, float(W_STORY))
    with torch.no_grad():
        ours, _ = Forward(model, torch.float32, compiled=False)(ids, weights)
        logits = model(ids[:, :-1]).logits.flatten(0, 1)
        theirs = F.cross_entropy(logits, ids[:, 1:].flatten())
    return abs(ours.item() / theirs.item() - 1)
