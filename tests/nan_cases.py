"""NaN in a key or a value, seen or hidden, for any attention: who is to become NaN, and who stays."""

from dataclasses import dataclass

import torch
from error_budget import seeded
from latent_store_cases import preset_of as latent_preset
from poison import empty_is_nan, poison_room

from tq_cache.backends import reference
from tq_cache.formats.packing import BLOCK_TOKENS
from tq_cache.formats.presets import resolve_preset
from tq_cache.formats.states import KVView, PackedStates
from tq_cache.storage.growing import GrowingStorage

SINKS, PACKED, TAIL = 4, 150, 20
PLACES = {"sink": 1, "packed": SINKS + 70, "tail": SINKS + PACKED + 3}


@dataclass(frozen=True)
class Case:
    """What is spoiled: `role` "key" or "value" of the token at `place`; `hidden`: by a mask from half of the heads."""

    preset: str = "tq4"  # or "latent format/rotary format"
    place: str = "packed"
    role: str = "value"
    hidden: str = ""  # "bool" or "float"
    queries: int = 1

    @property
    def latent(self) -> bool:
        return "/" in self.preset

    @property
    def reaches_all(self) -> bool:
        """Whether NaN may reach whom it is hidden from: see `Backend.attend`."""
        eight = "fp8" in self.preset.split("/")[0]
        return (self.role == "value" or self.latent) and (self.place != "packed" or eight)


CASES = {
    f"{preset}, {place}, {role}, {hidden or 'seen'}, {queries}": Case(preset, place, role, hidden, queries)
    for preset, place, role, hidden, queries in (
        ("tq4", "packed", "value", "", 1), ("tq4", "packed", "key", "", 1), ("tq3", "packed", "value", "bool", 1),
        ("4bit_nc", "packed", "value", "float", 1), ("4bit_nc", "packed", "key", "bool", 2),
        ("fp8_e4m3", "packed", "value", "", 1), ("fp8_e5m2", "packed", "key", "float", 1),
        ("tq2", "sink", "value", "", 1), ("tq2", "tail", "key", "bool", 1), ("k8v4", "tail", "value", "", 2),
        ("tq4", "packed", "value", "", 20), ("3bit_nc", "packed", "value", "bool", 20),
        ("tq3", "packed", "key", "float", 20), ("fp8_e4m3", "packed", "value", "", 20), ("tq4", "tail", "key", "", 20),
        ("tq4/exact", "packed", "key", "", 1), ("tq3/int8", "packed", "key", "bool", 1),
        ("nc4/exact", "packed", "key", "float", 2), ("fp8_e4m3/exact", "packed", "key", "", 1),
        ("tq4/int8", "packed", "value", "bool", 1), ("tq2/exact", "tail", "value", "", 1),
    )
}  # fmt: skip


def spoil(view: KVView, case: Case) -> None:
    """NaN in a token of the first sequence."""
    number = PLACES[case.place]
    if case.place == "packed":
        _spoil_packed(view.key if case.role == "key" else view.value, number - SINKS)
        return
    exact = (view.sink_keys, view.sink_values) if case.place == "sink" else (view.tail_keys, view.tail_values)
    offset = 0 if case.place == "sink" else SINKS + PACKED
    exact[case.role == "value"][0, :, number - offset] = torch.nan


def _spoil_packed(states: PackedStates, token: int) -> None:
    block, row = divmod(token, BLOCK_TOKENS)
    if states.scale is not None:
        states.scale[0, :, token] = torch.nan
        if states.zero is not None:
            states.zero[0, :, token] = torch.nan
    elif states.format.exact:
        states.packed[0, :, block, row * states.head_dim : (row + 1) * states.head_dim] = torch.nan
    elif states.by_channel:
        states.packed[0, :, block].unflatten(-1, (states.head_dim, BLOCK_TOKENS))[..., row] = 0x7F
    else:
        states.packed[0, :, block, row * states.head_dim : (row + 1) * states.head_dim] = 0x7F


def compare(case: Case, device: str = "cpu", dtype: torch.dtype = torch.float32, reference_alone: bool = False):
    """Asserts that NaN comes out for every query that sees the token, and for no other; returns the largest relative
    error of the others, against the reference where the token is as it was."""
    from_latents, kv = case.latent, 1 if case.latent else 2
    dims = (128, 32) if from_latents else (64, 64)
    preset = latent_preset(*case.preset.split("/")) if from_latents else resolve_preset(case.preset)
    storage = GrowingStorage(preset, TAIL, SINKS, "reference")
    first, generator = SINKS + PACKED, seeded(3)
    keys, values = (torch.randn(2, kv, first + TAIL + 256, dim, generator=generator).to(device, dtype) for dim in dims)
    storage.append(keys, values)
    storage.crop(first)
    storage.append(keys[:, :, first : first + TAIL], values[:, :, first : first + TAIL])
    poison_room(storage)
    view = storage.view()
    query = [torch.randn(2, 4, case.queries, dim, generator=generator).to(device, dtype) for dim in dims]
    seen = torch.ones(2, 4, case.queries, view.length, dtype=torch.bool, device=device)
    seen = seen.tril(view.length - case.queries)
    if case.hidden:
        seen[:, ::2, :, PLACES[case.place]] = False
    mask = {"": None, "bool": seen, "float": torch.where(seen, 0.0, -torch.inf).to(dtype)}[case.hidden]

    def attend(backend):
        with empty_is_nan():
            if from_latents:
                return backend.attend_latents(*query, view, mask, 0.1)[0]
            return backend.attend(query[0], view, mask, 0.125)[0]

    expected = attend(reference)
    assert expected.isfinite().all()
    spoil(view, case)
    spoiled = seen[..., PLACES[case.place]].clone()
    spoiled[1] = False
    found = [attend(reference)]
    if not reference_alone:
        from tq_cache.backends import triton

        found.append(attend(triton))
    assert torch.equal(found[0].isnan().any(dim=-1), spoiled)
    bad = found[-1].isnan().any(dim=-1)
    assert bad[spoiled].all(), "NaN vanished"
    left = ~spoiled
    if case.reaches_all and not reference_alone:
        left[0] = False
    assert not bad[left].any(), "NaN reached who may not see it"
    return max(((x - expected)[left].norm() / expected[left].norm()).item() for x in found[-1:])
