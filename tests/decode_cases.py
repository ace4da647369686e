"""Cases of decode for its tests, and what comes of them: budgets that the kernels take, on any device."""

from dataclasses import dataclass, field

import torch
from error_budget import Roundings, attention, exact_parts, ratios, relative_error, seeded
from poison import empty_is_nan, poison_room

from tq_cache.formats.presets import FORMATS, PRESETS, Preset
from tq_cache.formats.states import KVView
from tq_cache.storage.growing import GrowingStorage
from tq_cache.storage.preallocated import PreallocatedStorage


@dataclass(frozen=True)
class Case:
    """A cache and a query for it."""

    preset: str  # or "key format/value format"
    tokens: int = 192  # packed ones; of whole blocks or not, as after a crop
    group: int = 4
    dim: int = 64
    value_dim: int | None = None
    batch: int = 2
    heads: int = 1
    queries: int = 1
    tail: int = 0
    sinks: int = 0
    mask: str = ""  # "rows" (left padding), "full" or "float"
    options: dict = field(default_factory=dict)
    splits: int | None = 2

    def view(self, device="cpu", dtype=torch.float32):
        """What a storage holds: what it is calibrated on behind the packed tokens is cropped, the tail comes then."""
        generator = seeded(self.tokens + self.dim)
        storage = GrowingStorage(preset_of(self.preset), self.tail, self.sinks, "reference")
        first = self.sinks + self.tokens
        shape = (self.batch, self.heads, first + self.tail + 256)
        keys = (torch.randn(*shape, self.dim, generator=generator) + 0.5).to(device, dtype)
        values = (torch.randn(*shape, self.value_dim or self.dim, generator=generator) - 0.5).to(device, dtype)
        storage.append(keys, values)
        storage.crop(first)
        storage.append(keys[:, :, first : first + self.tail], values[:, :, first : first + self.tail])
        poison_room(storage)
        return storage.view()

    def query(self, device="cpu", dtype=torch.float32):
        generator = seeded(1)
        shape = (self.batch, self.heads * self.group, self.queries, self.dim)
        return torch.randn(shape, generator=generator).to(device, dtype)

    def make_mask(self, length, device="cpu"):
        if not self.mask:
            return None
        if self.mask == "rows":
            start = 7 + 30 * torch.arange(self.batch, device=device)
            mask = torch.arange(length, device=device) >= start[:, None]
            return mask[:, None, None].expand(-1, 1, self.queries, -1)
        generator = seeded(2)
        shape = (1, self.heads * self.group, self.queries, length)
        noise = torch.randn(shape, generator=generator).to(device)
        return noise > -0.5 if self.mask == "full" else noise

    def make_options(self, device="cpu"):
        options = dict(self.options)
        if options.pop("sink_logits", False):
            options["sink_logits"] = torch.linspace(-1, 3, self.heads * self.group, device=device)[None, :, None]
        return options


def preset_of(name):
    if name in PRESETS:
        return PRESETS[name]
    key, value = name.split("/")
    return Preset(name, FORMATS["key"][key], FORMATS["value"][value])


FEATURES = {
    "tail": Case("tq4", tail=40),
    "sink tokens": Case("tq3", tail=70, sinks=5),
    "padding": Case("tq4", tail=20, sinks=4, mask="rows"),
    "full mask": Case("4bit_nc", tail=20, mask="full"),
    "float mask": Case("tq3", tail=20, mask="float", queries=2),
    "soft cap": Case("tq4", tail=20, options={"softcap": 2.0}),
    "sink logits": Case("k8v4", tail=20, options={"sink_logits": True}),
    "queries": Case("tq4", tail=30, queries=5),
    "queries, no tail": Case("tq2", tokens=128, queries=4),
    "16 queries": Case("4bit_nc", tail=7, queries=16, group=3),
    "all": Case("tq3/tq4", tail=30, sinks=3, queries=2, mask="full", options={"sink_logits": True, "softcap": 3.0}),
    "two widths": Case("tq4", dim=96, value_dim=64, tail=10),
    "one token": Case("3bit_nc", tokens=1, splits=1),
    "many splits": Case("3bit_nc", tokens=700, splits=5, batch=1),
}
KEYS, VALUES = ("fp8_e4m3", "nc4", "tq3", "tq2"), ("fp8_e4m3", "uniform4", "uniform3", "tq4", "tq3", "tq2")
CASES = (
    {f"{key}/{value}": Case(f"{key}/{value}", tokens=130, batch=1) for key in KEYS for value in VALUES}
    | {"e5m2": Case("fp8_e5m2", tokens=130)}
    | {f"group {group}": Case("tq4", group=group, batch=1) for group in (1, 7, 16)}
    | {f"dim {dim} {preset}": Case(preset, dim=dim, tokens=130, batch=1)
       for dim in (80, 96, 128, 256) for preset in ("tq4", "3bit_nc", "k8v4")}
    | FEATURES
)  # fmt: skip


def run_kernel(case, view, query, mask, options, **choices):
    """`decode` on a view, as `backends.triton` calls it, with other choices."""
    from tq_kernels.decode.plan import decode

    from tq_cache.backends.triton import states_of

    with empty_is_nan():
        return decode(
            query,
            states_of(view.key),
            states_of(view.value),
            view.tail_keys,
            view.tail_values,
            packed_length=view.packed_length,
            scaling=query.shape[-1] ** -0.5,
            sink_tokens=None if view.sink_keys is None else (view.sink_keys, view.sink_values),
            mask=mask,
            softcap=options.get("softcap"),
            sink_logits=options.get("sink_logits"),
            **{"splits": case.splits} | choices,
        )


def expect(case, view, query, mask, options, roundings):
    """Attention in float64 and its error budgets."""
    if mask is None and case.queries > 1:
        mask = torch.ones(case.queries, view.length, dtype=torch.bool, device=query.device)
        mask = mask.tril(view.length - case.queries)[None, None]
    return attention(query, *exact_parts(view), mask, query.shape[-1] ** -0.5, roundings, **options)


# Preset, residual length, sink tokens, lengths of the chunks.
FAST_STATIC = (
    ("tq3", 64, 4, (133, 61)),  # packed, and a ring that has wrapped
    ("k8v4", 0, 4, (200,)),
    ("3bit_nc", 128, 4, (60,)),  # nothing packed yet
    ("4bit_nc", 64, 4, (3,)),  # fewer tokens than sinks
    ("4bit_nc", 512, 0, (300,)),  # nothing ever packed
)
STATIC = (
    *FAST_STATIC,
    ("tq4", 64, 0, (130,)),
    ("k8v4", 64, 1, (200, 1, 1, 90)),
    ("fp8_e4m3", 0, 5, (5 + 128,)),  # sinks and packed tokens alone
    ("tq2", 128, 70, (70,)),  # as many as sinks, and those more than a step
    ("4bit_nc", 448, 4, (300,)),
)


def static_storage(preset, residual_length, sink_tokens, chunks, device="cpu", dtype=torch.float32, dim=64):
    generator = seeded(0)
    storage = PreallocatedStorage(PRESETS[preset], residual_length, sink_tokens, 400, "reference")
    for tokens in chunks:
        keys, values = (torch.randn(2, 2, tokens, dim, generator=generator).to(device, dtype) for _ in range(2))
        storage.append(keys + 0.3, values - 0.3)
    poison_room(storage)
    return storage


LIMITS = {torch.float32: 1e-5, torch.bfloat16: 5e-3}  # of the relative error, whatever the budget


def compare_static(preset, residual_length, sink_tokens, chunks, device="cpu", dtype=torch.float32):
    """Shares of the error budget of attention over a preallocated layer, without a mask, with padding, with noise."""
    from tq_cache.backends.triton import attend_preallocated

    storage = static_storage(preset, residual_length, sink_tokens, chunks, device, dtype)
    query = torch.randn(2, 8, 1, 64, generator=seeded(1)).to(device, dtype)
    view, found = storage.view(), []
    assert view.length == sum(chunks) and view.sink_length == min(sink_tokens, view.length)
    padding = torch.arange(400, device=device) >= torch.tensor([[0], [min(37, view.length - 1)]], device=device)
    noise = torch.randn(2, 8, 1, 400, generator=seeded(2)).to(device, dtype)
    for mask in (None, padding[:, None, None], noise):
        seen = None if mask is None else mask[..., : view.length]
        expected = attention(query, *exact_parts(view), seen, 0.125, Roundings.of_kernels(dtype, float8=True))
        with empty_is_nan():
            out = attend_preallocated(query, storage.states, mask, 0.125)
        found += (*ratios(out, expected.lse, expected), relative_error(out, expected.out) / LIMITS[dtype])
    return found


def compare_exact(tokens, queries, device="cpu", dtype=torch.float32):
    """Shares of the error budgets of attention where nothing is packed; causal, then with a mask."""
    from tq_cache.backends.triton import attend

    generator = seeded(0)
    shapes = ((2, 8, queries, 64), (2, 2, tokens, 64), (2, 2, tokens, 48))
    query, keys, values = (torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes)
    causal = torch.ones(queries, tokens, dtype=torch.bool, device=device).tril(tokens - queries)
    mask = causal & (torch.arange(tokens, device=device) >= torch.tensor([0, 3], device=device)[:, None, None, None])
    found = []
    for given, seen in ((None, causal), (mask, mask)):
        expected = attention(query, keys, values, seen, 0.125, Roundings.of_kernels(dtype))
        with empty_is_nan():
            out, lse = attend(query, KVView(keys, values), given, 0.125)
        found += (*ratios(out, lse, expected), relative_error(out, expected.out) / LIMITS[dtype])
    return found


EXACT = ((1, 1), (70, 1), (70, 5))
