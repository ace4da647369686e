"""The operations of `backends` on a GPU: what storage holds, handed to the Triton kernels of `tq_kernels`."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import torch
from tq_kernels.decode.plan import decode
from tq_kernels.decode.problem import MAX_QUERIES
from tq_kernels.latent.plan import decode_latents
from tq_kernels.prefill.attend import prefill
from tq_kernels.states import EXACT, LARGEST, MIN_MAX, NORM, PER_HEAD, UNBIASED, Coding, States
from tq_kernels.store.append import append as append_tokens
from tq_kernels.store.dequantize import MAX_HEAD_DIM
from tq_kernels.store.dequantize import dequantize as dequantize_states
from tq_kernels.store.dequantize_rows import dequantize_rows
from tq_kernels.store.latents import store_latents
from tq_kernels.store.quantize import quantize
from tq_kernels.store.update import update
from tq_kernels.store.update_latents import update_latents

from ..formats.packing import BLOCK_TOKENS
from ..formats.presets import Format
from ..formats.rotation import rotation_matrix
from ..formats.states import KVView, PackedStates, PreallocatedStates
from .masks import causal

__all__ = [
    "append",
    "attend",
    "attend_latents",
    "attend_latents_preallocated",
    "attend_preallocated",
    "dequantize",
    "store_pair",
    "takes_exact",
    "update_preallocated",
]

_RULES = {
    "per_head": PER_HEAD,
    "norm": NORM,
    "unbiased": UNBIASED,
    "min_max": MIN_MAX,
    "largest": LARGEST,
    "exact": EXACT,
}


_STATES: WeakKeyDictionary[PackedStates, States] = WeakKeyDictionary()


def states_of(states: PackedStates) -> States:
    """Packed states as the kernels take them; the tensors are shared.  Made once."""
    made = _STATES.get(states)
    if made is None:
        fmt, measured, device = states.format, states.calibration, states.packed.device
        rotation = rotation_matrix(states.head_dim, device, torch.float32) if fmt.rotated else None
        factors = (states.scale, states.zero, measured.center, measured.smooth, measured.scale)
        made = _STATES[states] = States(states.packed, *factors, rotation, coding_of(fmt))
    return made


def coding_of(fmt: Format) -> Coding:
    rule = _RULES[fmt.scale]
    if fmt.codebook is None:
        return Coding(fmt.bits, rule, exponent=5 if fmt.float8 == torch.float8_e5m2 else 4)
    return Coding(fmt.bits, rule, fmt.codebook.magnitudes, fmt.codebook.unit)


def store_pair(key: PackedStates, value: PackedStates, keys: torch.Tensor, values: torch.Tensor, start: int) -> None:
    """See `Backend.store_pair`: one launch."""
    write = store_latents if value.role == "rotary" else quantize
    with _on(keys.device):
        write(states_of(key), states_of(value), keys, values, start)


def append(
    keys: torch.Tensor, values: torch.Tensor, tail_keys: torch.Tensor, tail_values: torch.Tensor, start: int
) -> None:
    """See `Backend.append`: one launch."""
    with _on(keys.device):
        append_tokens(keys, values, tail_keys, tail_values, start)


def dequantize(states: PackedStates, length: int, dtype: torch.dtype) -> torch.Tensor:
    """See `Backend.dequantize`."""
    if states.format.exact:
        rows = states.packed.unflatten(3, (BLOCK_TOKENS, states.head_dim)).flatten(2, 3)
        return rows[:, :, :length].to(dtype, copy=True)
    with _on(states.packed.device):
        if states.role == "rotary" or states.head_dim > MAX_HEAD_DIM:
            return dequantize_rows(states_of(states), length, dtype)
        return dequantize_states(states_of(states), length, dtype, value=states.role == "value")


def takes_exact(query: torch.Tensor, view: KVView) -> bool:
    """See `Backend.takes_exact`: after the first prefill.

    cuDNN behind sdpa makes a plan for every new length, which takes 50 ms a step, and of a chunk over a past sdpa wants
    a mask and repeats the KV heads.
    """
    return _fits_decode(query, view) or query.shape[2] < view.length


def _fits_decode(query: torch.Tensor, view: KVView) -> bool:
    _, _, queries, dim = query.shape
    return queries <= MAX_QUERIES and dim % 16 == 0 and view.tail_values.shape[3] % 16 == 0


def attend(
    query: torch.Tensor,
    view: KVView,
    mask: torch.Tensor | None,
    scaling: float,
    *,
    softcap: float | None = None,
    sink_logits: torch.Tensor | None = None,
    is_causal: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `Backend.attend`: the decode kernels for a few queries, the prefill kernels for more.

    There is no backward pass: a gradient that reaches the output raises RuntimeError.
    """
    run = decode if _fits_decode(query, view) else prefill
    arguments: dict[str, Any] = {
        "packed_length": view.packed_length,
        "scaling": scaling,
        "sink_tokens": _sinks(view),
        "mask": mask,
        "softcap": softcap,
        "sink_logits": sink_logits,
        "causal": is_causal,
    }
    key, value = (None if states is None else states_of(states) for states in (view.key, view.value))
    query_, tail_keys, tail_values = query, view.tail_keys, view.tail_values
    if torch.is_grad_enabled():
        query_, tail_keys, tail_values = query.detach(), tail_keys.detach(), tail_values.detach()
    with _on(query.device):
        out, lse = run(query_, key, value, tail_keys, tail_values, **arguments)
    if torch.is_grad_enabled() and query.requires_grad:
        out = _NoBackward.apply(query, out)
    return out, lse


def attend_latents(
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
    """See `Backend.attend_latents`: a launch for every 16 queries.  There is no backward pass, as in `attend`."""
    count = content.shape[2]
    if count > MAX_QUERIES and mask is None and is_causal:
        mask = causal(count, view.length, content.device)
    parts = []
    for start in range(0, count, MAX_QUERIES):
        some = slice(start, start + MAX_QUERIES)
        with _on(content.device):
            part = decode_latents(
                content[:, :, some].detach(),
                rotary[:, :, some].detach(),
                None if view.key is None else states_of(view.key),
                None if view.value is None else states_of(view.value),
                view.tail_keys.detach(),
                view.tail_values.detach(),
                packed_length=view.packed_length,
                scaling=scaling,
                sink_tokens=_sinks(view),
                mask=None if mask is None else mask[:, :, some],
                softcap=softcap,
                sink_logits=_some_logits(sink_logits, some),
                causal=is_causal,
                indices=None if indices is None else indices[:, some],
            )
        parts.append(part)
    out, lse = parts[0] if len(parts) == 1 else (torch.cat(x, dim=2) for x in zip(*parts, strict=True))
    if torch.is_grad_enabled() and content.requires_grad:
        out = _NoBackward.apply(content, out)
    return out, lse


def _some_logits(sink_logits: torch.Tensor | None, some: slice) -> torch.Tensor | None:
    """Those of some queries, where each has its own."""
    return sink_logits if sink_logits is None or sink_logits.shape[2] == 1 else sink_logits[:, :, some]


def attend_latents_preallocated(
    content: torch.Tensor,
    rotary: torch.Tensor,
    states: PreallocatedStates,
    mask: torch.Tensor | None,
    scaling: float,
    *,
    softcap: float | None = None,
    sink_logits: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `Backend.attend_latents_preallocated`; the device is not waited for."""
    with _on(content.device):
        out, _ = decode_latents(
            content.detach(),
            rotary.detach(),
            states_of(states.key),
            states_of(states.value),
            states.ring_keys,
            states.ring_values,
            packed_length=states.key.capacity,
            scaling=scaling,
            sink_tokens=_sinks(states),
            mask=mask,
            softcap=softcap,
            sink_logits=sink_logits,
            num_tokens=states.num_tokens,
            residual_length=states.residual_length,
            max_length=states.max_length,
        )
    return out


def attend_preallocated(
    query: torch.Tensor,
    states: PreallocatedStates,
    mask: torch.Tensor | None,
    scaling: float,
    *,
    softcap: float | None = None,
    sink_logits: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `Backend.attend_preallocated`; the device is not waited for."""
    with _on(query.device):
        out, _ = decode(
            query.detach(),
            states_of(states.key),
            states_of(states.value),
            states.ring_keys,
            states.ring_values,
            packed_length=states.key.capacity,
            scaling=scaling,
            sink_tokens=_sinks(states),
            mask=mask,
            softcap=softcap,
            sink_logits=sink_logits,
            num_tokens=states.num_tokens,
            residual_length=states.residual_length,
            max_length=states.max_length,
        )
    return out


def update_preallocated(states: PreallocatedStates, keys: torch.Tensor, values: torch.Tensor) -> None:
    """See `Backend.update_preallocated`: one launch; the device is not waited for."""
    write = update_latents if states.value.role == "rotary" else update
    with _on(keys.device):
        write(
            keys.detach(),
            values.detach(),
            states_of(states.key),
            states_of(states.value),
            states.ring_keys,
            states.ring_values,
            states.num_tokens,
            states.residual_length,
            states.max_length,
            _sinks(states),
        )


def _sinks(held: KVView | PreallocatedStates) -> tuple[torch.Tensor, torch.Tensor] | None:
    return None if held.sink_keys is None or held.sink_values is None else (held.sink_keys, held.sink_values)


def _on(device: torch.device) -> AbstractContextManager[Any]:
    """Triton launches on the current device, which need not be that of the tensors (`device_map="auto"`)."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)


class _NoBackward(torch.autograd.Function):
    """Ties the output to the query so that a backward pass stops here instead of going on without it."""

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        raise RuntimeError(
            "attention over a packed cache has no backward pass on this device; run the model under torch.no_grad(), "
            "or give the cache backend='reference'"
        )
