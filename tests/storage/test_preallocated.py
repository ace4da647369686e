"""Preallocated storage: every token where it belongs, as in the growing one, and none past the end."""

import pytest
import torch
import torch._dynamo.utils
from architectures import build
from preallocated import CHUNKS, add, random_pair

from tq_cache import TurboQuantCache
from tq_cache.backends import reference
from tq_cache.formats.presets import PRESETS
from tq_cache.formats.states import KVView, PackedStates, packed_length_of, tensors
from tq_cache.hf.attention import turboquant_attention
from tq_cache.hf.graph_ops import flatten, unflatten
from tq_cache.storage.growing import UNLIMITED, GrowingStorage
from tq_cache.storage.preallocated import PreallocatedStorage


@pytest.mark.parametrize("residual_length", [64, 128])
@pytest.mark.parametrize("preset", ["fp8_e5m2", "k8v4", "3bit_nc", "tq4", "tq2"])
def test_holds_what_a_growing_storage_holds(generator, preset, residual_length):
    fixed = PreallocatedStorage(PRESETS[preset], residual_length, 0, 600, "auto")
    growing = GrowingStorage(PRESETS[preset], residual_length, 0, "auto")
    first = random_pair(generator, 300, (64, 48))
    for chunk in (first, *(random_pair(generator, tokens, (64, 48)) for tokens in CHUNKS[1:])):
        if growing.length + chunk[0].shape[2] > 600:
            break
        growing.append(*chunk)
        add(fixed, *chunk)
    ours, theirs = fixed.view(), growing.view()
    assert ours.packed_length == theirs.packed_length > 300
    assert torch.equal(ours.tail_keys, theirs.tail_keys) and torch.equal(ours.tail_values, theirs.tail_values)
    blocks = ours.packed_length // 64
    for mine, other in ((ours.key, theirs.key), (ours.value, theirs.value)):
        assert torch.equal(mine.packed[:, :, :blocks], other.packed[:, :, :blocks])
        for x, y in ((mine.scale, other.scale), (mine.zero, other.zero)):
            assert (x is None) == (y is None)
            assert x is None or torch.equal(x[:, :, : ours.packed_length], y[:, :, : ours.packed_length])


@pytest.mark.parametrize(("tokens", "residual_length", "sink_tokens", "packed"), [
    (0, 0, 4, 0), (67, 0, 4, 0), (68, 0, 4, 64), (131, 0, 4, 64), (132, 0, 4, 128), (64, 0, 0, 64),
    (195, 128, 4, 0), (196, 128, 4, 64), (191, 128, 0, 0), (192, 128, 0, 64), (1000, 128, 4, 832),
])  # fmt: skip
def test_whole_blocks_of_what_is_no_sink_and_not_among_the_newest_are_packed(
    tokens, residual_length, sink_tokens, packed
):
    assert packed_length_of(tokens, residual_length, sink_tokens) == packed


def check_places(view: KVView, keys: torch.Tensor, values: torch.Tensor, residual_length: int, sinks: int) -> None:
    """A view holds these tokens: the first and the newest themselves, the others as the reference packs them."""
    length = keys.shape[2]
    packed = max(length - sinks - residual_length, 0) // 64 * 64
    end = sinks + packed
    assert (view.length, view.packed_length, view.sink_length) == (length, packed, min(length, sinks))
    sides = (view.sink_keys, view.key, view.tail_keys, keys), (view.sink_values, view.value, view.tail_values, values)
    for held_sinks, states, tail, x in sides:
        assert torch.equal(tail, x[:, :, end:])
        assert held_sinks is None or torch.equal(held_sinks, x[:, :, :sinks])
        assert (states is None) == (packed == 0)
        if states is not None:
            again = PackedStates.empty(states.role, states.format, x, packed, states.calibration)
            reference.store(again, x[:, :, sinks:end], 0)
            assert torch.equal(states.packed[:, :, : packed // 64], again.packed)
            for mine, other in ((states.scale, again.scale), (states.zero, again.zero)):
                assert mine is None or torch.equal(mine[:, :, :packed], other)


@pytest.mark.parametrize("first", [1, 4, 100, 300])
@pytest.mark.parametrize("sinks", [0, 1, 4, 70])
@pytest.mark.parametrize("residual_length", [0, 64, 128])
def test_every_token_is_where_it_belongs(generator, residual_length, sinks, first):
    """Chunks and single tokens, through several packings, into a ring that wraps; then again in the same memory."""
    storage = PreallocatedStorage(PRESETS["tq4"], residual_length, sinks, 700, "reference")
    for _ in range(2):
        keys, values = random_pair(generator, 700, (32, 48))
        end = 0
        for tokens in (first, 1, 1, 2, 70, *[1] * 70, 129, 63, 1, 1):
            start, end = end, end + tokens
            new = keys[:, :, start:end], values[:, :, start:end]
            if storage.length and tokens == 1:
                add(storage, *new)
            else:
                view = storage.append(*new)
                assert view.length == end
                assert torch.equal(view.tail_keys[:, :, -tokens:], new[0])
            if tokens > 1 or end % 16 == 0:
                check_places(storage.view(), keys[:, :, :end], values[:, :, :end], residual_length, sinks)
        storage.clear()
        assert storage.length == 0


@pytest.mark.parametrize("tokens", [1, 3, 10, 200])
def test_a_chunk_is_read_exact_with_what_was_exact_before(generator, tokens):
    storage = PreallocatedStorage(PRESETS["tq4"], 64, 4, 700, "reference")
    keys, values = random_pair(generator, 2 + tokens + 150, (32, 48))
    storage.append(keys[:, :, :2], values[:, :, :2])
    end = 2 + tokens
    view = storage.append(keys[:, :, 2:end], values[:, :, 2:end])
    for sinks, tail, x in ((view.sink_keys, view.tail_keys, keys), (view.sink_values, view.tail_values, values)):
        assert torch.equal(torch.cat([sinks, tail], dim=2), x[:, :, :end])
    before = storage.view()
    view = storage.append(keys[:, :, end:], values[:, :, end:])
    assert (view.sink_length, view.packed_length) == (before.sink_length, before.packed_length)
    assert torch.equal(view.tail_keys, keys[:, :, view.sink_length + view.packed_length :])


def test_no_more_is_held_than_there_can_be():
    """No ring beyond whole blocks of what is no sink; all in the sinks where there are as many as max_length."""
    keys = torch.randn(1, 1, 3, 32)
    for sinks, most, slots in ((0, 100, 128), (4, 68, 64), (4, 69, 128), (4, 400, 192), (60, 50, 64)):
        storage = PreallocatedStorage(PRESETS["tq4"], 128, sinks, most, "reference")
        storage.append(keys, keys)
        assert storage.states.ring_slots == slots
        assert (storage.states.sink_keys is None) == (sinks == 0)
        for _ in range(most):
            add(storage, *[keys[:, :, :1]] * 2)
        assert storage.length == most
    with pytest.raises(ValueError, match="a multiple of 64, or 0, with max_cache_len, got 10"):
        PreallocatedStorage(PRESETS["tq4"], 10, 4, 100, "reference")


@pytest.mark.parametrize("make", [
    lambda: PreallocatedStorage(PRESETS["tq4"], 640, 0, 600, "auto"),
    lambda: GrowingStorage(PRESETS["tq4"], UNLIMITED, 0, "auto"),
])  # fmt: skip
def test_tokens_that_stay_exact_are_read_where_they_are_held(make, generator):
    storage = make()
    chunks = [random_pair(generator, tokens, (64, 48)) for tokens in (300, 1, 90, 130, 3)]
    for chunk in chunks:
        view = storage.append(*chunk)
    assert torch.equal(view.tail_keys, torch.cat([keys for keys, _ in chunks], dim=2))
    assert torch.equal(view.tail_values, torch.cat([values for _, values in chunks], dim=2))
    assert [view.tail_keys.data_ptr(), view.tail_values.data_ptr()] == [x.data_ptr() for x in storage.newest]


def test_addresses_stay(generator):
    storage = PreallocatedStorage(PRESETS["tq4"], 64, 4, 600, "auto")
    add(storage, *random_pair(generator, 100))
    addresses = [tensor.data_ptr() for tensor in storage.tensors()]
    for tokens in CHUNKS[1:]:
        add(storage, *random_pair(generator, tokens))
    storage.clear()
    add(storage, *random_pair(generator, 90))
    assert storage.length == 90
    assert [tensor.data_ptr() for tensor in storage.tensors()] == addresses


def everything(storage: PreallocatedStorage) -> list[torch.Tensor]:
    return [tensor.clone() for tensor in storage.tensors()]


def test_nothing_is_written_past_the_end(generator):
    storage = PreallocatedStorage(PRESETS["tq4"], 64, 4, 150, "auto")
    add(storage, *random_pair(generator, 149))
    before = everything(storage)
    with pytest.raises(ValueError, match="expected at most max_cache_len = 150 tokens, got 149 held and 2 new"):
        storage.append(*random_pair(generator, 2))
    assert all(torch.equal(x, y) for x, y in zip(before, everything(storage), strict=True))
    add(storage, *random_pair(generator, 1))
    before = everything(storage)
    for _ in range(3):  # steps of a captured graph cannot raise, but they write and count nothing
        add(storage, *random_pair(generator, 1))
    assert storage.length == 150
    assert all(torch.equal(x, y) for x, y in zip(before, everything(storage), strict=True))


@pytest.mark.parametrize("tokens", [1, 2])
def test_no_more_tokens_go_in_than_there_is_room_for(generator, tokens):
    """One by one or several at once, without generate() and so without anybody who makes a mask."""
    model = build("llama", "turboquant")
    cache = TurboQuantCache(model.config, "tq4", max_cache_len=150, residual_length=64, skip_layers=())
    cache.update(*random_pair(generator, 146), 0)
    for _ in range(4 // tokens):
        cache.update(*random_pair(generator, tokens), 0)
    before = everything(cache.layers[0].storage)
    for _ in range(2):
        with pytest.raises(ValueError, match=f"max_cache_len = 150 tokens, got 150 held and {tokens} new; make"):
            cache.update(*random_pair(generator, tokens), 0)
    assert all(torch.equal(x, y) for x, y in zip(before, everything(cache.layers[0].storage), strict=True))
    cache.reset()
    cache.update(*random_pair(generator, 150), 0)
    assert int(cache.get_seq_length()) == 150


def test_a_graph_that_is_full_writes_nothing_and_the_next_call_outside_raises(generator):
    model = build("llama", "turboquant")
    cache = TurboQuantCache(model.config, "tq4", max_cache_len=150, residual_length=64, skip_layers=())
    cache.update(*random_pair(generator, 148), 0)
    query = torch.randn(2, 4, 1, 64, generator=generator)
    torch._dynamo.reset()

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(query, keys, values):
        keys, values = cache.update(keys, values, 0)
        return turboquant_attention(torch.nn.Module(), query, keys, values, None)[0]

    for _ in range(2):
        step(query, *random_pair(generator, 1))
    before = everything(cache.layers[0].storage)
    full = step(query, *random_pair(generator, 1))
    assert int(cache.get_seq_length()) == 150 and full.isfinite().all()
    assert all(torch.equal(x, y) for x, y in zip(before, everything(cache.layers[0].storage), strict=True))
    with pytest.raises(ValueError, match="max_cache_len = 150 tokens, got 150 held and 1 new"):
        cache.update(*random_pair(generator, 1), 0)


def test_a_step_is_announced_where_it_may_come_in_a_graph(generator, monkeypatch):
    """Masks are made outside graphs: there is room, or it raises; the device is asked only where there might not be."""
    storage = PreallocatedStorage(PRESETS["tq4"], 64, 0, 150, "auto")
    asked, length = [], type(storage).length
    monkeypatch.setattr(type(storage), "length", property(lambda self: asked.append(1) or length.fget(self)))
    add(storage, *random_pair(generator, 140))
    for _ in range(5):  # steps of a graph, of which Python hears no more than this
        storage.announce(1)
        torch.ops.tq_cache.update(*random_pair(generator, 1), *flatten(storage.states))
    assert not asked
    storage.announce(5)
    storage.announce(5)  # which never came
    assert asked
    add(storage, *random_pair(generator, 5))
    with pytest.raises(ValueError, match="max_cache_len = 150 tokens, got 150 held and 1 new"):
        storage.announce(1)


@pytest.mark.parametrize("wrong", [
    lambda x: x.float(), lambda x: x[:, :1], lambda x: x[:1], lambda x: x[..., :32], lambda x: x[..., 0, :],
], ids=["dtype", "KV heads", "batch", "head_dim", "rank"])  # fmt: skip
@pytest.mark.parametrize("length", [None, 200], ids=["growing", "preallocated"])
def test_tokens_that_do_not_fit_change_nothing(generator, length, wrong):
    model = build("llama", "turboquant")
    cache = TurboQuantCache(model.config, "tq4", max_cache_len=length, residual_length=64, skip_layers=())
    cache.update(*(x.bfloat16() for x in random_pair(generator, 100)), 0)
    before = cache.layers[0].storage.view()
    for _ in range(2):
        with pytest.raises(ValueError, match="expected keys"):
            cache.update(*(wrong(x.bfloat16()) for x in random_pair(generator, 1)), 0)
    after = cache.layers[0].storage.view()
    assert before.length == after.length == 100
    assert all(torch.equal(x, y) for x, y in zip(tensors(before), tensors(after), strict=True))


def test_selects_sequences_in_place(generator):
    storage = PreallocatedStorage(PRESETS["tq4"], 64, 4, 300, "auto")
    add(storage, *random_pair(generator, 200))
    before = storage.view()
    storage.select(torch.tensor([1, 1]))
    assert torch.equal(storage.view().tail_keys[0], before.tail_keys[1])
    assert torch.equal(storage.view().sink_values[0], before.sink_values[1])
    assert torch.equal(storage.states.key.packed[0], storage.states.key.packed[1])
    with pytest.raises(NotImplementedError, match="as many sequences"):
        storage.select(torch.tensor([0]))
    with pytest.raises(NotImplementedError, match="cannot be cropped"):
        storage.crop(10)


@pytest.mark.parametrize("sinks", [0, 4])
@pytest.mark.parametrize("preset", PRESETS)
def test_flat_states_are_the_states(generator, preset, sinks):
    storage = PreallocatedStorage(PRESETS[preset], 64, sinks, 300, "auto")
    storage.append(*random_pair(generator, 200, (64, 48)))
    again = unflatten(flatten(storage.states))
    assert [x.data_ptr() for x in tensors(again)] == [x.data_ptr() for x in storage.tensors()]
    assert again.sink_tokens == sinks
    sides = [(states.key.format, states.value.format, states.max_length) for states in (again, storage.states)]
    assert sides[0] == sides[1] and flatten(again).spec == flatten(storage.states).spec


@pytest.mark.parametrize("op", ["update", "update_outside", "attend", "attend_outside", "materialize"])
def test_operations_keep_their_contract(generator, op):
    storage = PreallocatedStorage(PRESETS["tq4"], 64, 4, 300, "auto")
    add(storage, *random_pair(generator, 200))
    buffers, calibration, num_tokens, spec = flatten(storage.states)
    query = torch.randn(2, 4, 1, 64, generator=generator)
    arguments = {
        "update": (*random_pair(generator, 1), buffers, calibration, num_tokens, spec),
        "attend": (query, buffers, calibration, num_tokens, torch.ones(2, 1, 1, 300) > 0, None, 0.125, None, spec),
        "materialize": (buffers, calibration, num_tokens, "key", spec),
    }[op.removesuffix("_outside")]
    torch.library.opcheck(getattr(torch.ops.tq_cache, op).default, arguments)


def test_a_row_that_begins_late_is_calibrated_before_a_step_packs_it(generator):
    """Two rows, one with 130 pads before 20 tokens: its calibration may change until its own tokens are packed."""
    storage = PreallocatedStorage(PRESETS["tq4"], 64, 4, 700, "reference")
    keys, values = random_pair(generator, 400, (64, 64))
    keys[..., 7] += 300
    keys[1, :, :130] = 5 * torch.randn(2, 130, 64, generator=generator)
    mask = torch.ones(2, 1, 150, 150, dtype=torch.bool).tril()
    mask[1, ..., :130] = False
    view = storage.append(keys[:, :, :150], values[:, :, :150], queries_follow=True)
    view.observe(torch.randn(2, 4, 150, 64, generator=generator), mask)
    assert storage.view().packed_length == 64 and not storage.first_tokens.done
    for t in range(150, 400):
        add(storage, keys[:, :, t : t + 1], values[:, :, t : t + 1])
    held = storage.view()
    assert storage.first_tokens.done and held.packed_length == 320
    error = reference.dequantize(held.key, 320, torch.float32)[1, :, 126:] - keys[1, :, 130:324]
    assert error.norm() < 0.11 * (keys[1, :, 130:] - keys[1, :, 130:].mean(dim=1, keepdim=True))[:, :194].norm()


def test_steps_that_nobody_announced_keep_the_calibration_they_met(generator):
    """A graph that is replayed packs unseen: what comes later must not change what its codes mean."""
    storage = PreallocatedStorage(PRESETS["tq4"], 64, 4, 700, "reference")
    keys, values = random_pair(generator, 400, (64, 64))
    view = storage.append(keys[:, :, :20], values[:, :, :20], queries_follow=True)
    view.observe(torch.randn(2, 4, 20, 64, generator=generator), None)
    for t in range(20, 300):
        step = keys[:, :, t : t + 1], values[:, :, t : t + 1]
        torch.ops.tq_cache.update(*step, *flatten(storage.states))
    before = reference.dequantize(storage.view().key, 192, torch.float32)
    storage.append(keys[:, :, 300:], values[:, :, 300:])
    assert storage.first_tokens.done
    assert torch.equal(reference.dequantize(storage.view().key, 192, torch.float32), before)
    assert (before - keys[:, :, 4:196]).norm() < 0.15 * keys[:, :, 4:196].norm()


@pytest.mark.parametrize("first", [1, 10, 64])
def test_a_step_that_is_announced_twice_makes_no_later_one_unseen(first, generator):
    """A model asks for masks more than once: more steps are counted than come, and the ring is looked at too early."""
    storage = PreallocatedStorage(PRESETS["tq4"], 64, 0, 330, "reference")
    keys, values = random_pair(generator, 128)
    keys = keys + 100
    storage.append(keys[:, :, :first], values[:, :, :first])
    storage.before_step()
    for i in range(first, 128):
        storage.before_step()
        torch.ops.tq_cache.update(keys[:, :, i : i + 1], values[:, :, i : i + 1], *flatten(storage.states))
    assert storage.view().packed_length == 64
    center = storage.calibration[0].center
    assert (center - keys[:, :, :127].mean(dim=2, keepdim=True)).abs().max() < 1
