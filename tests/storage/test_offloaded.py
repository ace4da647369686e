"""Storage whose packed tokens are in host memory, against storage that keeps them: the same bits, whatever is done."""

import copy
from functools import partial

import pytest
import torch
from latents import ROTARY, growing, latent_tokens
from offloads import like_growing
from storages import assert_same_state, everything, make_storage, tokens

from tq_cache import PRESETS
from tq_cache.backends import reference
from tq_cache.formats.states import PackedStates
from tq_cache.hf.handles import materialize
from tq_cache.storage.flat import HostStates, flat_bytes, parts
from tq_cache.storage.offloaded import parse_budget
from tq_cache.storage.slots import Slots


def layers_of(count: int, preset: str = "tq4", residual: int = 16, sinks: int = 4, budget: int = 0):
    """So many storages that keep their tokens, and as many that share two slots."""
    kept = [make_storage(preset, residual, sinks) for _ in range(count)]
    return kept, like_growing(kept, budget)


def assert_same_views(view, other) -> None:
    assert view.length == other.length and view.packed_length == other.packed_length
    for role in ("key", "value"):
        assert torch.equal(materialize(view, role), materialize(other, role))


def in_slot(view) -> bool:
    """Whether what attention reads is in a slot."""
    here = view.on_device()
    (slots,) = view.bring.func.__self__.slots.values()
    starts = [slot.buffer.untyped_storage().data_ptr() for slot in slots._slots if slot.buffer is not None]
    assert here.bring is None
    return all(x.untyped_storage().data_ptr() in starts for x in parts((here.key, here.value)))


# --------------------------------------------------------------------------------------------------- the same bits


@pytest.mark.parametrize(("preset", "layers"), [*((x, 3) for x in PRESETS), ("tq4", 1), ("tq3", 2), ("k8v4", 5)])
def test_every_preset_reads_the_same(preset, layers, generator):
    """Through packing and growth; layers in turn, each twice."""
    kept, gone = layers_of(layers, preset)
    for count in (150, 1, 70, 1, 1, 300, 64):
        for one, other in zip(kept, gone, strict=True):
            new = tokens(generator, count)
            view, expected = other.append(*new), one.append(*new)
            assert_same_views(view, expected)
            if view.packed_length:
                assert in_slot(view)
    for one, other in zip(kept, gone, strict=True):
        assert other.host is not None and one.packed_length == other.packed_length >= 448
        assert_same_state(everything(one), everything(other))


@pytest.mark.parametrize("latents", (False, True), ids=["keys and values", "latents"])
@pytest.mark.parametrize("seed", range(3))
def test_random_operations(seed, latents):
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    preset, residual, sinks = ("tq4", "k8v4", "3bit_nc")[seed], (0, 16, 130)[seed], (4, 0, 4)[seed]
    budget = (0, 30_000, 10**9)[seed]
    rotary = ROTARY[seed]
    kept = [growing(preset, rotary, residual, sinks) if latents else make_storage(preset, residual, sinks)] * 3
    kept = [copy.deepcopy(x) for x in kept]
    gone, batch, held = like_growing(kept, budget), 2, []
    make = partial(latent_tokens, dtype=torch.bfloat16) if latents else tokens
    for turn in range(30):
        operation = ("chunk", "chunk", "tokens", "crop", "select", "repeat", "clear", "copy")[draw(0, 7) if turn else 0]
        count, cut, rows = draw(1, 150), draw(0, 100), torch.randint(0, batch, (draw(1, 3),), generator=generator)
        count = count if kept[0].length else 300
        if operation == "clear" and draw(0, 3):
            continue
        if operation == "copy":
            gone = copy.deepcopy(gone)
        for one, other in zip(kept, gone, strict=True):
            if operation in ("chunk", "tokens"):
                for number in (count,) if operation == "chunk" else (1,) * 5:
                    new = make(generator, number, batch=batch)
                    view, expected = other.append(*new), one.append(*new)
                    assert_same_views(view, expected)
            elif one.length:
                for storage in (one, other):
                    if operation == "crop":
                        storage.crop(max(storage.length - cut, 1))
                    elif operation == "select":
                        storage.select(rows)
                    elif operation == "repeat" and batch < 3:
                        storage.repeat(2)
            if operation == "clear":
                one.clear(), other.clear()
        batch = 2 if operation == "clear" else kept[0].batch_size or 2
        for one, other in zip(kept, gone, strict=True):
            assert one.length == other.length
            if one.length:
                assert_same_views(other.view(), one.view())
        held.append(gone[0].turns.device_bytes(torch.device("cpu")))
    assert sum(size > 0 for size in held) > 15


@pytest.mark.parametrize("budget", (0, 40_000))
def test_views_stay_valid_while_more_tokens_come(budget, generator):
    """Across growth, packing, layers that go, and turns of other layers: what was handed out reads the same."""
    _, gone = layers_of(4, "tq4", 16, budget=budget)
    held = []
    for count in (1, 30, 1, 100, 1, 60, 300, 1):
        for storage in gone:
            view = storage.append(*tokens(generator, count, batch=1))
            held += [(view, role, materialize(view, role).clone()) for role in ("key", "value")]
    for storage in gone[:2]:
        storage.clear()
    for view, role, expected in held:
        assert torch.equal(materialize(view, role), expected)


def test_blocks_that_a_crop_cut_are_filled_further(generator):
    kept, gone = layers_of(3)
    for count, left in ((200, 130), (100, 90), (64, 150)):
        for one, other in zip(kept, gone, strict=True):
            new = tokens(generator, count)
            one.append(*new), other.append(*new)
            one.crop(left), other.crop(left)
            assert_same_views(other.view(), one.view())


def test_tokens_are_quantised_once_and_written_once(generator, monkeypatch):
    stored, written = 0, 0
    plain_store, plain_init = reference.store, HostStates.__init__

    def counting_store(states, x, start):
        nonlocal stored
        stored += x.shape[2]
        plain_store(states, x, start)

    def counting_init(self, *arguments):
        nonlocal written
        written += 1
        plain_init(self, *arguments)

    monkeypatch.setattr(reference, "store", counting_store)
    monkeypatch.setattr(HostStates, "__init__", counting_init)
    _, gone = layers_of(3, residual=0, sinks=0)
    for storage in gone:
        storage.append(*tokens(generator, 128))
    assert written == 3  # each layer goes once
    for _ in range(64):
        for storage in gone:
            storage.append(*tokens(generator, 1))
    assert stored == 2 * 3 * 192 and written == 6  # and its buffer grows once
    for _ in range(63):
        for storage in gone:
            storage.append(*tokens(generator, 1))
    assert stored == 2 * 3 * 192 and written == 6


def test_inference_mode_and_no_grad_in_turn(generator):
    kept, gone = layers_of(3)
    for i, count in enumerate((150, 1, 1, 100, 1, 1, 130)):
        for one, other in zip(kept, gone, strict=True):
            new = tokens(generator, count)
            with (torch.inference_mode, torch.no_grad)[i % 2]():
                expected, view = one.append(*new), other.append(*new)
                assert_same_views(view, expected)
    assert not any(x.is_inference() for storage in gone for x in storage.tensors())


# --------------------------------------------------------------------------------------------------- turns, copies


def test_the_next_layer_is_here_before_its_turn(generator):
    """One copy a layer and step, started a turn ahead; with two layers none, since there are two slots."""
    cpu = torch.device("cpu")
    for layers, copies in ((1, 0), (2, 0), (3, 3), (5, 5)):
        _, gone = layers_of(layers, residual=64)
        for storage in gone:
            storage.append(*tokens(generator, 300))
        started = []
        for step in range(4):
            for storage in gone:
                view = storage.append(*tokens(generator, 1))
                assert not step or storage.turns.slots[cpu]._holding(storage.host, view.packed_length) is not None
                view.on_device()
            started.append(gone[0].turns.slots[cpu].copies)
        assert [after - before for before, after in zip(started, started[1:], strict=False)] == [copies] * 3


def test_layers_without_packed_tokens_are_skipped(generator):
    _, gone = layers_of(4, residual=64)
    for storage in gone[::2]:
        storage.append(*tokens(generator, 300))
    gone[1].append(*tokens(generator, 10))  # exact as yet
    turns = gone[0].turns
    assert turns._after(gone[0], gone[0].host) is gone[2] and turns._after(gone[2], gone[2].host) is gone[0]


def test_slots_are_freed_with_the_last_layer(generator):
    _, gone = layers_of(3)
    for storage in gone:
        view = storage.append(*tokens(generator, 200))
    gone[0].view().on_device(), view.on_device()
    turns = gone[0].turns
    assert turns.nbytes == 2 * gone[0].host_nbytes > 0
    for storage in gone:
        assert turns.nbytes > 0
        storage.clear()
    assert turns.nbytes == 0 and [x.host_nbytes for x in gone] == [0] * 3


def test_a_copy_has_slots_of_its_own(generator):
    _, gone = layers_of(3)
    for storage in gone:
        storage.append(*tokens(generator, 200))
    expected = [materialize(storage.view(), "key") for storage in gone]
    twins = copy.deepcopy(gone)
    assert twins[0].turns is twins[2].turns is not gone[0].turns and twins[0].turns.layers == twins
    for twin in twins:
        twin.append(*tokens(generator, 100))
    for storage, keys in zip(gone, expected, strict=True):
        assert torch.equal(materialize(storage.view(), "key"), keys)
    buffers = {x.host.buffer.data_ptr() for x in [*gone, *twins]}
    assert len(buffers) == 6


def test_moving_is_refused(generator):
    _, (storage,) = layers_of(1)
    with pytest.raises(NotImplementedError, match="moves its packed tokens itself"):
        storage.to("cpu")


def test_slots_grow_for_a_larger_buffer(generator):
    """Layers of different widths take turns in the same slots."""
    kept, gone = layers_of(3)
    for step in range(3):
        for place, (one, other) in enumerate(zip(kept, gone, strict=True)):
            new = tokens(generator, 200, key_dim=32 * (place + 1))
            assert_same_views(other.append(*new), one.append(*new))
            assert step < 2 or in_slot(other.view())
    assert gone[0].turns.nbytes == 2 * gone[2].host_nbytes > 2 * gone[0].host_nbytes


# --------------------------------------------------------------------------------------------------------- budgets


def test_layers_stay_while_they_fit(generator):
    """As the cache grows they go, each once, evenly spread; the budget holds until two slots are more than it."""
    budget, cpu = 100_000, torch.device("cpu")
    kept, gone = layers_of(8, residual=0, sinks=0, budget=budget)
    turns, left = gone[0].turns, []
    for _ in range(15):
        for one, other in zip(kept, gone, strict=True):
            new = tokens(generator, 64, batch=1, value_dim=32)
            assert_same_views(other.append(*new), one.append(*new))
            now = [place for place, storage in enumerate(gone) if storage.host is not None]
            assert set(left) <= set(now)  # none comes back
            left += [place for place in now if place not in left]
            held = sum(flat_bytes((x.key, x.value)) for x in gone if x.key is not None and x.host is None)
            assert held + turns.nbytes <= turns.device_bytes(cpu)
            assert turns.device_bytes(cpu) <= budget or len(left) == 8
    assert sorted(left[:3]) == [0, 2, 4] and sorted(left[:4]) == [0, 2, 4, 6] and sorted(left) == list(range(8))
    assert turns.device_bytes(cpu) == 2 * gone[0].host_nbytes


def test_nothing_goes_that_fits(generator):
    kept, gone = layers_of(3, budget=10**6)
    for one, other in zip(kept, gone, strict=True):
        new = tokens(generator, 400)
        assert_same_views(other.append(*new), one.append(*new))
    assert all(storage.host is None and storage.view().bring is None for storage in gone)
    assert gone[0].turns.nbytes == 0 and [x.nbytes for x in gone] == [x.nbytes for x in kept]


def test_more_sequences_may_no_longer_fit(generator):
    kept, gone = layers_of(3, residual=0, budget=100_000)
    for one, other in zip(kept, gone, strict=True):
        new = tokens(generator, 200, batch=1)
        one.append(*new), other.append(*new)
    assert all(storage.host is None for storage in gone)
    for one, other in zip(kept, gone, strict=True):
        one.repeat(4), other.repeat(4)
    assert any(storage.host is not None for storage in gone)
    for one, other in zip(kept, gone, strict=True):
        assert_same_views(other.view(), one.view())


@pytest.mark.parametrize(("given", "expected"), [
    ("packed", 0), ("8GB", 8 * 10**9), ("512MiB", 512 * 2**20), ("1.5 GiB", 3 * 2**29), ("2TB", 2 * 10**12),
    ("64kB", 64_000), ("64KB", 64_000), ("100B", 100), (123, 123),
])  # fmt: skip
def test_budgets(given, expected):
    assert parse_budget(given) == expected


@pytest.mark.parametrize("given", ("", "all", "8", "8 gigabytes", "GB", "-1GB", "0GB", 0, -5, "1e9B", "8Gi"))
def test_what_is_no_budget(given):
    with pytest.raises(ValueError, match="expected"):
        parse_budget(given)


def test_a_budget_of_another_type():
    with pytest.raises(TypeError, match="expected offloading as a bool, a string or an int, got float"):
        parse_budget(8e9)


# ------------------------------------------------------------------------------------------------------ flat buffer


@pytest.mark.parametrize("preset", PRESETS)
def test_a_buffer_holds_every_part(preset, generator):
    storage = make_storage(preset)
    storage.append(*tokens(generator, 300))
    pair = storage.key, storage.value
    host = HostStates(pair, storage.key.capacity + 64, torch.device("cpu"))
    assert host.buffer.nbytes == flat_bytes(host.pair) > flat_bytes(pair)
    again = host.in_buffer(host.buffer.clone())
    for states, other in zip(pair, again, strict=True):
        assert isinstance(other, PackedStates) and other.calibration is states.calibration
        assert other.capacity == states.capacity + 64
        for own, copied in zip(parts((states, states)), parts((other, other)), strict=True):
            assert torch.equal(copied[:, :, : own.shape[2]], own) and not copied[:, :, own.shape[2] :].any()
            assert copied.data_ptr() % 64 == again[0].packed.data_ptr() % 64  # aligned as the buffer is


def test_slots_hand_out_the_same_states_at_every_turn(generator):
    """Kernels keep their plans by them."""
    hosts = []
    for _ in range(3):
        storage = make_storage("tq4")
        storage.append(*tokens(generator, 300))
        hosts.append(HostStates((storage.key, storage.value), storage.key.capacity, torch.device("cpu")))
    slots, seen = Slots(torch.device("cpu")), {}
    for _ in range(6):
        for host in hosts:
            pair = slots.bring(host, 256)
            seen.setdefault((id(host), pair[0].packed.data_ptr()), set()).add(id(pair[0]))
    assert all(len(ids) == 1 for ids in seen.values())
