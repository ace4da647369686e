"""Who computes: what a backend must do, and the one place that chooses between them.

`reference` is the specification, in plain PyTorch, for any device; `triton` does the same by kernels, on a GPU.
"""

from functools import lru_cache
from importlib.util import find_spec
from typing import Protocol

import torch

from ..formats.presets import Preset
from ..formats.states import KVView, PackedStates, PreallocatedStates
from . import hardware, reference

BACKENDS = ("auto", "reference", "triton")
KERNEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MAX_KERNEL_HEAD_DIM = 256
LATENT_RANKS, ROTARY_DIMS = (128, 256, 512), (0, 32, 64)


class Backend(Protocol):
    """The operations of a cache.  Shapes: B batch, H_kv KV heads, H_q query heads, T tokens, S queries, D head_dim."""

    def store_pair(
        self, key: PackedStates, value: PackedStates, keys: torch.Tensor, values: torch.Tensor, start: int
    ) -> None:
        """Quantise keys and values [B, H_kv, T, D] and write them, in place, as tokens start .. start + T.

        A block that is already filled up to `start` keeps the bits of its tokens.
        """

    def append(
        self, keys: torch.Tensor, values: torch.Tensor, tail_keys: torch.Tensor, tail_values: torch.Tensor, start: int
    ) -> None:
        """Copy new tokens, [B, H_kv, T, D] each, to places start .. start + T of two buffers."""

    def dequantize(self, states: PackedStates, length: int, dtype: torch.dtype) -> torch.Tensor:
        """The first `length` tokens as vectors of the model, [B, H_kv, length, D] in `dtype`."""

    def attend(
        self,
        query: torch.Tensor,
        view: KVView,
        mask: torch.Tensor | None,
        scaling: float,
        *,
        softcap: float | None = None,
        sink_logits: torch.Tensor | None = None,
        is_causal: bool = True,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention of `query` [B, H_q, S, D] over everything in `view`, from the packed bits.

        mask:        [B or 1, H_q or 1, S, view.length or more]: bool (True takes part) or float (added to the scores),
                     or None: causal if `is_causal`, the last query seeing every token, else full
        scaling:     factor of the scores; softcap: they become softcap * tanh(scores / softcap), before the mask
        sink_logits: [1 or B, H_q, 1 or S], one more logit per query that takes weight and gives nothing (GPT-OSS)

        Returns the output [B, H_q, S, D_v] in the query's dtype and the log of the softmax' sum, [B, H_q, S] in float32
        (float64).  A query that may see no token gets zeros and -inf.

        A key or value with NaN makes NaN of the output of every query that may see its token, and of no other: tokens
        that the mask hides (by False or -inf) may hold anything.  One exception: with the kernels, NaN or inf in an
        unquantized value, or in one of 8 bits, reaches also queries of the same sequence that may not see it, as with
        sdpa, since a probability of 0 times NaN is NaN.  Memory behind the last token is never looked at.
        """

    def attend_latents(
        self,
        content: torch.Tensor,
        rotary: torch.Tensor,
        view: KVView,
        mask: torch.Tensor | None,
        scaling: float,
        *,
        softcap: float | None = None,
        sink_logits: torch.Tensor | None = None,
        is_causal: bool = True,
        indices: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention over latents, which are keys and values at once, and rotary keys, whose scores are added (MLA).

        The keys of `view` are latents [B, 1, T, rank], its values rotary keys [B, 1, T, d], d may be 0.

        content: queries of the latents, [B, H_q, S, rank]; rotary: those of the rotary keys, [B, H_q, S, d]
        indices: int [B, S, top_k], the tokens that each query may see beside what the mask says (sparse attention)

        Other arguments as those of `attend`.  Returns the means of latents, [B, H_q, S, rank] in the dtype of
        `content`, and the log of the softmax' sum, [B, H_q, S]; without a token, zeros and -inf.
        """

    def attend_latents_preallocated(
        self,
        content: torch.Tensor,
        rotary: torch.Tensor,
        states: PreallocatedStates,
        mask: torch.Tensor | None,
        scaling: float,
        *,
        softcap: float | None = None,
        sink_logits: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The output of `attend_latents` for queries [B, H_q, 1, ...] over all tokens of a preallocated layer."""

    def takes_exact(self, query: torch.Tensor, view: KVView) -> bool:
        """Whether `attend` is to be taken, rather than sdpa, where all tokens are exact."""

    def update_preallocated(self, states: PreallocatedStates, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write one token, [B, H_kv, 1, D] each, at its place, and count it; pack the oldest block if the ring is full.

        Writes nothing, and counts nothing, where there is no room.
        """

    def attend_preallocated(
        self,
        query: torch.Tensor,
        states: PreallocatedStates,
        mask: torch.Tensor | None,
        scaling: float,
        *,
        softcap: float | None = None,
        sink_logits: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The output of `attend` for queries [B, H_q, 1, D] over all tokens of a preallocated layer."""


def check_backend(name: str) -> None:
    """Raise ValueError unless there is such a backend."""
    if name not in BACKENDS:
        raise ValueError(f"expected a backend of {list(BACKENDS)}, got {name!r}")


def backend_for(preset: Preset, name: str) -> str:
    """The name of the backend for a preset: the kernels have no float8 scales per token, for which `triton` raises."""
    if "per_token" not in (preset.key.scale, preset.value.scale):
        return name
    if name == "triton":
        raise NotImplementedError("the kernels have no float8 scales per token; use backend='auto'")
    return "reference"


def choose_backend(name: str, keys: torch.Tensor, values: torch.Tensor) -> Backend:
    """Who computes for such keys and values, [B, H_kv, T, D].

    `auto` takes the kernels wherever they run, else the reference; `triton` raises RuntimeError where they do not.
    While torch.compile traces it is the reference, which it can follow: kernels are in its graphs as the operations of
    `hf.graph_ops`, and what is left are layers of transformers' own that sdpa cannot compute.
    """
    if torch.compiler.is_compiling():
        return reference
    return _choose(name, keys.device, keys.dtype, keys.shape[1], keys.shape[-1], values.shape[-1])


@lru_cache(maxsize=256)
def _choose(
    name: str, device: torch.device, dtype: torch.dtype, kv_heads: int, key_dim: int, value_dim: int
) -> Backend:
    if name == "reference":
        return reference
    problem = _no_kernels(device) or _not_for_kernels(dtype, kv_heads, key_dim, value_dim)
    if problem is None:
        return _kernels()
    if name == "triton":
        raise RuntimeError(f"backend='triton' cannot run here: {problem}; use backend='auto' or 'reference'")
    return reference


def describe(device: torch.device | str) -> str:
    """Who computes on `device` with backend='auto', in words."""
    device = torch.device(device)
    problem = _no_kernels(device)
    return f"{hardware.REFERENCE} ({problem})" if problem else f"Triton kernels, {hardware.detect(device).decode_path}"


def _not_for_kernels(dtype: torch.dtype, kv_heads: int, key_dim: int, value_dim: int) -> str | None:
    """Why the kernels do not take keys and values, or latents and rotary keys, of these widths; None if they do."""
    if _are_latents(kv_heads, key_dim, value_dim):
        if key_dim not in LATENT_RANKS or value_dim not in ROTARY_DIMS:
            return (
                f"the kernels take latents of {LATENT_RANKS} channels beside rotary keys of {ROTARY_DIMS}, got "
                f"{key_dim} and {value_dim}"
            )
    elif max(key_dim, value_dim) > MAX_KERNEL_HEAD_DIM:
        return f"the kernels take a head_dim up to {MAX_KERNEL_HEAD_DIM}, got {max(key_dim, value_dim)}"
    if dtype not in KERNEL_DTYPES:
        return f"the kernels take bfloat16, float16 or float32, got {dtype}"
    return None


def _are_latents(kv_heads: int, key_dim: int, value_dim: int) -> bool:
    """Whether keys are latents and values rotary keys: one KV head, and so few channels, fewer than keys.

    Should a model have such values, the reference computes, unless the widths are those of latents.
    """
    return kv_heads == 1 and value_dim <= max(ROTARY_DIMS) and value_dim < key_dim


@lru_cache(maxsize=64)
def _no_kernels(device: torch.device) -> str | None:
    """Why there are no kernels for a device, or None if there are."""
    row = hardware.detect(device)
    if row.decode_path == hardware.REFERENCE:
        return row.reason
    return None if find_spec("triton") else "Triton is not installed (pip install triton)"


def _kernels() -> Backend:
    """Imported when first used: importing the package needs neither Triton nor a GPU."""
    from . import triton

    return triton
