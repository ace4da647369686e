"""What the tests of prefill share: views of caches, queries for them, what is asked, and what is expected."""

from dataclasses import dataclass

import torch
from error_budget import Expected, Roundings, attention, exact_parts, seeded
from poison import empty_is_nan, poison_states

from tq_cache.backends import quantizers
from tq_cache.backends.calibration import calibrate
from tq_cache.formats.presets import resolve_preset
from tq_cache.formats.states import KVView, PackedStates

FORMATS = ("fp8_e4m3", "fp8_e5m2", "k8v4", "4bit_nc", "k3v4_nc", "3bit_nc", "tq4", "tq3", "tq2")


@dataclass(frozen=True)
class Case:
    """A view of a cache, queries for it, and what attention is asked to do."""

    preset: str = "tq4"
    packed: int = 100
    exact: int = 25
    num_sinks: int = 0
    queries: int = 18
    batch: int = 2
    heads: int = 4
    kv_heads: int = 2
    dim: int = 32
    value_dim: int | None = None
    mask: str = ""  # "bool" or "float", random; or "padding" or "float padding", causal
    softcap: float | None = None
    sink_logits: bool = False
    causal: bool = True
    segments: bool | None = None
    tokens: int | None = None  # of a tile of packed tokens
    splits: int | None = None

    def view(self, device: str = "cpu", dtype: torch.dtype = torch.float32) -> KVView:
        generator = seeded(self.packed, device)

        def random(tokens, width):
            x = torch.randn(self.batch, self.kv_heads, tokens, width, generator=generator, device=device)
            return (x * (1 + torch.arange(width, device=device) / width) + 0.5).to(dtype)

        chosen, widths, states = resolve_preset(self.preset), (self.dim, self.value_dim or self.dim), (None, None)
        if self.packed:
            states = [
                self._pack(role, chosen, random(self.packed, width).float())
                for role, width in zip(("key", "value"), widths, strict=True)
            ]
        ends = [random(tokens, width) for tokens in (self.exact, self.num_sinks) for width in widths]
        return KVView(*ends[:2], self.packed, *states, *(ends[2:] if self.num_sinks else (None, None)))

    def _pack(self, role, chosen, x):
        fmt, smooth = (chosen.key, chosen.smooth) if role == "key" else (chosen.value, 0.0)
        counts = torch.ones(self.batch, 1, self.packed, 1, dtype=torch.bool, device=x.device)
        calibration = calibrate(x, fmt, chosen.center, smooth, counts)
        states = PackedStates.empty(role, fmt, x, -(-self.packed // 64) * 64 + 128, calibration)
        quantizers.store(states, x, 0)
        poison_states(states, self.packed)
        return states

    def query(self, device: str = "cpu", dtype: torch.dtype = torch.float32) -> torch.Tensor:
        shape = (self.batch, self.heads, self.queries, self.dim)
        return torch.randn(shape, generator=seeded(1, device), device=device).to(dtype)

    def options(self, length: int, device: str = "cpu") -> dict:
        """Keywords of `reference.attend`; with a mask, some queries see no packed token, or no token at all."""
        generator, mask, sink_logits = seeded(2, device), None, None
        if self.mask == "bool":
            mask = torch.randn(self.batch, 1, self.queries, length, generator=generator, device=device) > -0.5
            mask[0, 0, 0], mask[0, 0, 1, : self.num_sinks + self.packed] = False, False
        elif self.mask == "float":
            mask = torch.randn(1, self.heads, self.queries, length, generator=generator, device=device)
        elif self.mask:
            token = torch.arange(length, device=device)
            starts = torch.linspace(0, length - self.queries // 2, self.batch, device=device)
            mask = (token <= token[-self.queries :, None]) & (token >= starts[:, None, None, None])
            mask = torch.where(mask, 0.0, -torch.inf) if self.mask == "float padding" else mask
        if self.sink_logits:
            sink_logits = torch.linspace(-1, 3, self.heads, device=device)[None, :, None]
        return dict(mask=mask, softcap=self.softcap, sink_logits=sink_logits, is_causal=self.causal)


CASES = {
    "everything": Case(dim=80, packed=70, num_sinks=4, mask="bool", softcap=5.0, sink_logits=True),
    "float8": Case("fp8_e4m3", packed=70),
    "splits": Case("k8v4", packed=200, splits=2),
    "segments": Case("4bit_nc", packed=200, segments=True),
    "many segments, centre": Case("tq3", packed=842, batch=1, segments=True, num_sinks=2, sink_logits=True),
    "e5m2": Case("fp8_e5m2", mask="float", softcap=2.0),
    "two blocks": Case("3bit_nc", packed=150, causal=False, tokens=128),
    "widths": Case("tq_k3v2", dim=96, value_dim=64, num_sinks=4, mask="float", tokens=128),
    "four blocks": Case("tq2", packed=300, sink_logits=True, tokens=256),
    "wide": Case("tq4", packed=64, dim=144, value_dim=256, batch=1, heads=2, kv_heads=1),
    "padding": Case(
        "4bit_nc", packed=200, exact=30, num_sinks=2, queries=20, batch=3, heads=2, kv_heads=1, mask="padding"
    ),
    "float padding": Case("tq4", packed=130, queries=25, batch=3, mask="float padding", splits=2, dim=48),
    "nothing packed": Case("tq4", packed=0, num_sinks=3),
    "one token": Case("k3v4_nc", packed=1, queries=1, exact=1, heads=7, kv_heads=1),
}
FAST = ("everything", "float8", "segments", "padding", "nothing packed")


def run_kernel(case: Case, query: torch.Tensor, view: KVView, *, mask, softcap, sink_logits, is_causal):
    """`prefill` on a view, as the sheet of operations calls it."""
    from tq_kernels.prefill.attend import prefill

    from tq_cache.backends.triton import states_of

    with empty_is_nan():
        return prefill(
            query,
            *(None if states is None else states_of(states) for states in (view.key, view.value)),
            view.tail_keys,
            view.tail_values,
            packed_length=view.packed_length,
            scaling=query.shape[-1] ** -0.5,
            sink_tokens=None if view.sink_keys is None else (view.sink_keys, view.sink_values),
            mask=mask,
            softcap=softcap,
            sink_logits=sink_logits,
            causal=is_causal,
            segments=case.segments,
        )


def expect(query: torch.Tensor, view: KVView, *, mask, softcap, sink_logits, is_causal) -> Expected:
    """Attention in float64 and its error budgets."""
    if mask is None and is_causal:
        mask = torch.ones(query.shape[2], view.length, dtype=torch.bool, device=query.device)
        mask = mask.tril(view.length - query.shape[2])[None, None]
    roundings = Roundings.of_kernels(query.dtype)
    return attention(query, *exact_parts(view), mask, query.shape[-1] ** -0.5, roundings, softcap, sink_logits)
