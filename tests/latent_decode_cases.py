"""Cases of attention to latents (MLA) for its tests, and what comes of them: budgets that the kernels take."""

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from error_budget import Expected, Roundings, attention, exact_parts, ratios, seeded
from latent_store_cases import LATENT_FORMATS, ROTARY_FORMATS, preset_of
from poison import empty_is_nan, poison_room

from tq_cache.backends.masks import causal
from tq_cache.formats.presets import Preset
from tq_cache.formats.states import KVView, PreallocatedStates
from tq_cache.storage.growing import GrowingStorage
from tq_cache.storage.preallocated import PreallocatedStorage

SCALING = 0.06  # about that of DeepSeek-V3, 192 ** -0.5; latents are larger than keys, so attention is sharp enough


def make_tokens(count: int, rank: int, dim: int, batch: int, device="cpu", dtype=torch.float32) -> list[torch.Tensor]:
    """Latents and rotary keys: some channels of latents are larger, as in real ones, and their mean is not zero."""
    generator = seeded(count + rank + dim)
    latents = torch.randn(batch, 1, count, rank, generator=generator) + 0.5
    latents[..., ::16] *= 4
    return [x.to(device, dtype) for x in (latents, torch.randn(batch, 1, count, dim, generator=generator))]


def make_queries(case: Any, queries: int, device="cpu", dtype=torch.float32) -> list[torch.Tensor]:
    """Queries of latents and of rotary keys."""
    generator, shape = seeded(1), (case.batch, case.heads, queries)
    return [torch.randn(*shape, width, generator=generator).to(device, dtype) for width in (case.rank, case.dim)]


@dataclass(frozen=True)
class Case:
    """A cache of latents and queries for it."""

    latent: str = "tq4"
    rotary: str = "exact"
    rank: int = 128
    dim: int = 64
    packed: int = 100  # tokens; of whole blocks or not, as after a crop
    batch: int = 1
    heads: int = 5
    queries: int = 1
    tail: int = 0
    sinks: int = 0
    mask: str = ""  # see `make_mask`
    chosen: int = 0  # tokens that a query may see, in sparse attention; 0: all
    causal: bool = True
    options: dict = field(default_factory=dict)
    splits: int | None = 2
    calibrated: bool = True

    @property
    def length(self) -> int:
        return self.sinks + self.packed + self.tail

    def preset(self) -> Preset:
        return preset_of(self.latent, self.rotary, self.calibrated)

    def view(self, device="cpu", dtype=torch.float32) -> KVView:
        """What a storage holds: what it is calibrated on behind the packed tokens is cropped, the tail comes then."""
        storage = GrowingStorage(self.preset(), self.tail, self.sinks, "reference")
        first = self.sinks + self.packed
        tokens = make_tokens(self.length + 256, self.rank, self.dim, self.batch, device, dtype)
        storage.append(*tokens)
        storage.crop(first)
        storage.append(*(x[:, :, first : self.length] for x in tokens))
        poison_room(storage)
        view = storage.view()
        if not self.packed:
            view = replace(view, key=None, value=None)
        assert (view.sink_length, view.packed_length, view.length) == (self.sinks, self.packed, self.length)
        return view

    def make_mask(self, device="cpu", dtype=torch.float32) -> torch.Tensor | None:
        """ "rows": left padding, for all heads; "float": the same as numbers, as models make it; "heads": of each head,
        of which one sees nothing; "noise": numbers of each head, some of them -inf."""
        length, generator = self.length, seeded(2)
        shape = (1, self.heads, self.queries, length)
        if self.mask in ("rows", "float"):
            start = 7 + 30 * torch.arange(self.batch, device=device)[:, None, None, None]
            seen = (torch.arange(length, device=device) >= start).expand(-1, 1, self.queries, -1)
            return seen if self.mask == "rows" else (~seen).to(dtype) * torch.finfo(dtype).min
        if self.mask == "heads":
            seen = torch.randn(shape, generator=generator) > -0.5
            seen[:, 1, self.queries // 2] = False
            return seen.to(device)
        if self.mask == "noise":
            noise = torch.randn(shape, generator=generator)
            noise[..., ::5] = -torch.inf
            noise[:, 0, -1] = -torch.inf
            return noise.to(device, dtype)
        return None

    def make_indices(self, device="cpu") -> torch.Tensor | None:
        """Of sinks, packed tokens and tail, some of them -1; of the last sequence's last query all."""
        if not self.chosen:
            return None
        generator, rows = seeded(3), self.batch * self.queries
        indices = torch.stack([torch.randperm(self.length, generator=generator)[: self.chosen] for _ in range(rows)])
        indices[:, 1::7] = -1
        indices[-1] = -1
        return indices.view(self.batch, self.queries, self.chosen).to(device)

    def make_options(self, device="cpu") -> dict[str, Any]:
        options = dict(self.options)
        if options.pop("sink_logits", False):
            options["sink_logits"] = torch.linspace(-1, 3, self.heads, device=device)[None, :, None]
        return options


def roundings_of(dtype: torch.dtype, rows: bool, exact: bool, fp8: bool) -> Roundings:
    """Roundings of queries in `dtype`.

    Of packed tokens codes are exact, and queries and probabilities float16, or float32 of float32 queries; `fp8`: of a
    GPU, where those of `rows` are in two e4m3 terms.  `exact`: there are exact tokens, whose probabilities are rounded
    to `dtype`.
    """
    if dtype == torch.float32 or (rows and fp8):
        return Roundings.of_kernels(dtype, float8=rows)
    unit = torch.finfo(dtype if exact else torch.float16).eps / 2
    return replace(Roundings.of_kernels(dtype), operand=unit)


def expect(
    queries: list[torch.Tensor], view: KVView, mask: torch.Tensor | None, roundings: Roundings, **options
) -> Expected:
    """Attention in float64 and its error budgets: keys are latents beside rotary keys, values latents."""
    latents, rotary = exact_parts(view)
    keys = torch.cat([latents, rotary], dim=-1)
    return attention(torch.cat(queries, dim=-1), keys, latents, mask, SCALING, roundings, **options)


def seen_by(case: Case, mask: torch.Tensor | None, indices: torch.Tensor | None, device="cpu") -> torch.Tensor | None:
    """All that a mask, causality and indices leave."""
    if mask is None and case.causal and case.queries > 1:
        mask = causal(case.queries, case.length, torch.device(device))
    if indices is None:
        return mask
    places = torch.arange(case.length, device=device)
    chosen = (indices[..., None] == places).any(dim=2)[:, None]
    if mask is None:
        return chosen
    return mask & chosen if mask.dtype == torch.bool else mask.masked_fill(~chosen, -torch.inf)


def run_kernel(case: Case, queries: list[torch.Tensor], view: KVView, mask, indices, options, **choices):
    """`decode_latents` on a view, as `backends.triton` calls it, with other choices."""
    from tq_kernels.latent.plan import decode_latents

    from tq_cache.backends.triton import states_of

    packed = (None, None) if view.key is None else (states_of(view.key), states_of(view.value))
    with empty_is_nan():
        return decode_latents(
            *queries,
            *packed,
            view.tail_keys,
            view.tail_values,
            packed_length=view.packed_length,
            scaling=SCALING,
            sink_tokens=None if view.sink_keys is None else (view.sink_keys, view.sink_values),
            mask=mask,
            causal=case.causal,
            indices=indices,
            **options,
            **{"splits": case.splits} | choices,
        )


def compare(case: Case, rows: bool, device="cpu", dtype=torch.float32) -> list[float]:
    """Shares of the error budgets."""
    view, queries = case.view(device, dtype), make_queries(case, case.queries, device, dtype)
    mask, indices, options = case.make_mask(device, dtype), case.make_indices(device), case.make_options(device)
    roundings = roundings_of(dtype, rows, case.tail + case.sinks > 0, device != "cpu")
    expected = expect(queries, view, seen_by(case, mask, indices, device), roundings, **options)
    out, lse = run_kernel(case, queries, view, mask, indices, options, rows=rows)
    assert out.dtype == dtype and lse.dtype == torch.float32
    unseen = expected.lse == -torch.inf
    assert not out[unseen].any() and (lse[unseen] == -torch.inf).all()
    return list(ratios(out, lse, expected))


# --- Cases.

ALL = {"softcap": 30.0, "sink_logits": True}
FORMATS = {
    f"{latent}/{rotary}": Case(latent, rotary, rank, dim, heads=3, packed=192 if "fp8" in latent else 100)
    for latent, rotary, rank, dim in (
        ("fp8_e4m3", "exact", 128, 32), ("fp8_e5m2", "int8", 256, 64), ("nc4", "fp8_e4m3", 128, 64),
        ("nc3", "fp8_e5m2", 256, 32), ("tq4", "exact", 256, 64), ("tq3", "int8", 128, 64), ("tq2", "exact", 128, 0),
    )
}  # fmt: skip
assert {name.split("/")[0] for name in FORMATS} == set(LATENT_FORMATS)
assert {name.split("/")[1] for name in FORMATS} == set(ROTARY_FORMATS)
FEATURES = {
    "tail and sinks": Case("tq4", "int8", batch=2, tail=70, sinks=5),
    "whole blocks": Case("nc4", "int8", packed=128),
    "one token": Case("tq3", packed=1, splits=1),
    "splits": Case("tq4", "fp8_e4m3", packed=450, splits=5),
    "many splits": Case("tq4", "fp8_e4m3", packed=450, splits=20, tail=5, batch=2, mask="heads", options=ALL),
    "many splits, not rotated": Case("fp8_e4m3", packed=450, splits=20, tail=5, sinks=2),
    "many splits, no tail": Case("tq4", "int8", packed=300, splits=17, queries=2, heads=3),
    "padding": Case("tq4", "int8", tail=20, sinks=4, mask="rows", batch=2),
    "padding, floats": Case("fp8_e4m3", "exact", tail=20, mask="float", queries=2, heads=3, batch=2),
    "mask of heads": Case("tq4", tail=20, mask="heads", batch=2),
    "noise": Case("nc4", "fp8_e5m2", sinks=3, tail=20, mask="noise", queries=2, heads=3),
    "soft cap": Case("tq4", tail=20, options={"softcap": 2.0}),
    "sink logits": Case("fp8_e5m2", "fp8_e5m2", tail=20, options={"sink_logits": True}),
    "queries": Case("tq4", "int8", tail=30, queries=5, heads=3),
    "queries, no tail": Case("fp8_e4m3", "fp8_e4m3", queries=4, heads=4),
    "not causal": Case("tq2", tail=3, queries=3, heads=3, causal=False),
    "16 queries": Case("tq4", tail=7, queries=16, heads=3),
    "all": Case("tq4", "int8", 256, 32, tail=30, sinks=3, queries=3, heads=5, mask="heads", options=ALL),
    "uncalibrated": Case("fp8_e4m3", "int8", 256, tail=5, calibrated=False, batch=2),
    "nothing packed": Case(packed=0, tail=90, sinks=4, queries=2, options=ALL, batch=2),
    "nothing packed, one tail": Case(dim=0, packed=0, tail=1),
    "chosen": Case("tq4", "int8", tail=20, sinks=4, queries=2, chosen=60, batch=2),
    "chosen, masked": Case("fp8_e4m3", tail=20, sinks=4, queries=2, chosen=60, mask="rows", options=ALL, batch=2),
    "chosen, noise": Case("tq3", "fp8_e4m3", tail=20, sinks=4, chosen=40, mask="noise", splits=3),
    "chosen, nothing packed": Case(packed=0, tail=70, sinks=4, chosen=20, queries=2),
}
HEADS = {
    f"{heads} heads": Case(latent, rotary, 128, 64, heads=heads, tail=9, packed=192 if "fp8" in latent else 100)
    for heads, latent, rotary in (
        (3, "tq4", "int8"), (16, "tq2", "exact"), (20, "fp8_e4m3", "fp8_e4m3"), (40, "tq4", "int8"),
    )
}  # fmt: skip
RANKS = {
    "512": Case("tq4", "int8", 512, 64, tail=9, sinks=2),
    "512, 3 bits": Case("tq3", "exact", 512, 64, tail=9),
    "512, fp8": Case("fp8_e4m3", "fp8_e4m3", 512, 64, packed=192, queries=2, heads=3),
    "512, no rotary part": Case("nc4", "exact", 512, 0, tail=9),
}
CASES = FORMATS | FEATURES | HEADS | RANKS


# --- Preallocated layers.


@dataclass(frozen=True)
class Static:
    """A preallocated layer of `most` tokens, which came in `chunks`."""

    latent: str
    rotary: str
    residual_length: int
    sinks: int
    chunks: tuple[int, ...]
    rank: int = 128
    dim: int = 64
    batch: int = 2
    heads: int = 5
    most: int = 400

    def storage(self, device="cpu", dtype=torch.float32) -> PreallocatedStorage:
        preset = preset_of(self.latent, self.rotary)
        storage = PreallocatedStorage(preset, self.residual_length, self.sinks, self.most, "reference")
        tokens, start = make_tokens(sum(self.chunks), self.rank, self.dim, self.batch, device, dtype), 0
        for count in self.chunks:
            storage.append(*(x[:, :, start : start + count] for x in tokens))
            start += count
        poison_room(storage)
        return storage


FAST_STATIC = {
    "a ring that has wrapped": Static("tq4", "int8", 64, 4, (133, 61)),
    "nothing packed yet": Static("nc4", "exact", 128, 4, (60,), dim=32),
    "nothing ever packed": Static("tq4", "int8", 512, 0, (300,)),
}
STATIC = FAST_STATIC | {
    "no residual": Static("fp8_e4m3", "fp8_e4m3", 0, 4, (200,), rank=256),
    "fewer than sinks": Static("tq3", "exact", 64, 4, (3,)),
    "token after token": Static("tq4", "exact", 64, 1, (200, 1, 1, 90)),
    "sinks and packed alone": Static("fp8_e5m2", "fp8_e5m2", 0, 5, (5 + 128,)),
    "many sinks": Static("tq2", "exact", 128, 70, (70,), dim=0),
}


def attend_static(queries: list[torch.Tensor], states: PreallocatedStates, mask, rows: bool, **options) -> torch.Tensor:
    """`attend_latents_preallocated`, or as it calls the kernels, with `rows`."""
    from tq_kernels.latent.plan import decode_latents

    from tq_cache.backends.triton import attend_latents_preallocated, states_of

    if not rows:
        return attend_latents_preallocated(*queries, states, mask, SCALING, **options)
    return decode_latents(
        *queries,
        states_of(states.key),
        states_of(states.value),
        states.ring_keys,
        states.ring_values,
        packed_length=states.key.capacity,
        scaling=SCALING,
        sink_tokens=None if states.sink_keys is None else (states.sink_keys, states.sink_values),
        mask=mask,
        num_tokens=states.num_tokens,
        residual_length=states.residual_length,
        max_length=states.max_length,
        rows=True,
        **options,
    )[0]


def compare_static(case: Static, rows: bool, device="cpu", dtype=torch.float32, masks=("", "rows", "noise")):
    """Shares of the error budgets, without a mask, with padding, with noise, wider than there are tokens; the last
    with a soft cap and extra logits."""
    storage, queries = case.storage(device, dtype), make_queries(case, 1, device, dtype)
    view, found = storage.view(), list[float]()
    assert view.length == sum(case.chunks) and view.sink_length == min(case.sinks, view.length)
    padding = torch.arange(case.most, device=device) >= torch.tensor([[0], [min(37, view.length - 1)]], device=device)
    noise = torch.randn(2, case.heads, 1, case.most, generator=seeded(2)).to(device, dtype)
    roundings = roundings_of(dtype, rows, True, device != "cpu")
    for name in masks:
        mask = {"": None, "rows": padding[:, None, None], "noise": noise}[name]
        options = {}
        if name == "noise":
            logits = torch.linspace(-1, 3, case.heads, device=device)[None, :, None]
            options = {"softcap": 30.0, "sink_logits": logits}
        seen = None if mask is None else mask[..., : view.length]
        expected = expect(queries, view, seen, roundings, **options)
        with empty_is_nan():
            out = attend_static(queries, storage.states, mask, rows, **options)
        found += ratios(out, expected.lse, expected)
    return found


def takes_rows(case: Case | Static) -> bool:
    """Whether tokens may be rows of the dots: of codes of 8 and 4 bits, where some are packed and none chosen."""
    whole = isinstance(case, Static) or case.packed % 64 == 0
    if isinstance(case, Static):
        packs = case.most - case.sinks > case.residual_length
    else:
        packs = case.packed > 0 and not case.chosen
    return packs and case.latent not in ("tq3", "tq2", "nc3") and (whole or "fp8" not in case.latent)
