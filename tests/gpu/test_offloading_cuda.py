"""Packed tokens in host memory, on CUDA devices: streams, events, pinned memory, what the device holds."""

import gc

import pytest
import torch
from offloads import like_growing, offloaded
from transformers import AutoModelForCausalLM, GenerationConfig

from tq_cache import PRESETS, TurboQuantCache
from tq_cache.hf.handles import materialize
from tq_cache.storage.growing import GrowingStorage
from tq_cache.tools.runs import EMBEDDED_MODEL, load_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
OPTIONS = dict(residual_length=16, skip_layers=())
MILLISECOND = 1_500_000  # clock cycles, about


@pytest.fixture(scope="module")
def model():
    own, _ = load_model(EMBEDDED_MODEL, dtype=torch.bfloat16)
    own.set_attn_implementation("turboquant")
    return own


def tokens(count: int, batch: int = 2):
    return torch.randn(2, batch, 4, count, 128, device="cuda", dtype=torch.bfloat16)


@pytest.mark.parametrize("late", ["compute", "copy", "both"])
@pytest.mark.parametrize("layers", (1, 2, 3, 5))
def test_copies_and_kernels_wait_for_each_other(layers, late):
    """However late one of the streams is: no slot is read before it is filled, or filled while it is read."""
    torch.manual_seed(0)
    kept = [GrowingStorage(PRESETS["tq4"], 16, 4, "auto") for _ in range(layers)]
    gone = like_growing(kept)
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for count in (4000, *[1] * 90, 200, *[1] * 10):
        for one, other in zip(kept, gone, strict=True):
            new = tokens(count)
            expected, view = one.append(*new), other.append(*new)
            slots = other.turns.slots.get(torch.device("cuda", torch.cuda.current_device()))
            if late != "compute" and slots is not None:
                with torch.cuda.stream(slots.stream):
                    torch.cuda._sleep(MILLISECOND)
            here = view.on_device()
            if late != "copy":
                torch.cuda._sleep(MILLISECOND)
            for role in ("key", "value"):
                wrong += (materialize(here, role) != materialize(expected, role)).sum()
    assert wrong.item() == 0
    assert all(storage.host is not None and storage.host.buffer.is_pinned() for storage in gone)


def run(model, cache, **options):
    ids = torch.randint(3, 200, (2, 700), generator=torch.Generator().manual_seed(0)).to(model.device)
    config = GenerationConfig(
        max_new_tokens=80, min_new_tokens=80, pad_token_id=0, output_logits=True, return_dict_in_generate=True
    )
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), past_key_values=cache, generation_config=config, **options
    )
    return out.sequences, torch.stack(out.logits)


@pytest.mark.parametrize(
    "options", [{}, {"num_beams": 3}, {"prefill_chunk_size": 150}], ids=["greedy", "beam", "chunks"]
)
@pytest.mark.parametrize("preset", ["tq4", "k8v4", "3bit_nc"])
def test_the_same_logits(model, preset, options):
    expected = run(model, TurboQuantCache(model.config, preset, **OPTIONS), **options)
    for offloading in ("packed", "700kB", "1GB"):
        own = run(model, TurboQuantCache(model.config, preset, offloading=offloading, **OPTIONS), **options)
        assert torch.equal(own[0], expected[0]) and torch.equal(own[1], expected[1]), offloading


def test_bytes_are_those_the_device_holds(model):
    run(model, TurboQuantCache(model.config, **OPTIONS))  # whatever is allocated once
    gc.collect()
    before = torch.cuda.memory_allocated()
    cache = TurboQuantCache(model.config, offloading="packed", **OPTIONS)
    run(model, cache)
    gc.collect()
    assert torch.cuda.memory_allocated() - before == pytest.approx(cache.nbytes, rel=0.05)
    assert cache.host_nbytes > cache.report().slot_nbytes > 0
    cache.reset()
    assert cache.nbytes == cache.host_nbytes == 0


def test_a_cache_may_be_dropped_while_a_copy_is_under_way():
    """Its slot is not given to others before the copy is done."""
    (kept,) = [GrowingStorage(PRESETS["tq4"], 16, 4, "auto")]
    gone = like_growing([kept] * 3)
    for storage in gone:
        storage.append(*tokens(20_000))
    view = gone[0].append(*tokens(1))
    view.on_device()
    slots = next(iter(gone[0].turns.slots.values()))
    with torch.cuda.stream(slots.stream):
        torch.cuda._sleep(100 * MILLISECOND)
    gone[1].append(*tokens(1)).on_device()  # sends for the third, behind the sleep
    size = slots.size
    del view, slots, gone, storage
    gc.collect()
    others = [torch.zeros(size, dtype=torch.uint8, device="cuda") for _ in range(4)]
    torch.cuda.synchronize()
    assert not any(x.any() for x in others)


def test_keys_on_the_cpu_are_refused(model):
    cache = TurboQuantCache(model.config, offloading="packed")
    keys = torch.zeros(1, 2, 3, 32)
    with pytest.raises(ValueError, match="expected keys on a CUDA device"):
        cache.update(keys, keys, 0)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_every_device_has_slots_of_its_own():
    devices = {"model.embed_tokens": 0, "model.rotary_emb": 0, "model.norm": 1, "lm_head": 0}
    devices |= {f"model.layers.{index}": index // 4 for index in range(8)}
    model = AutoModelForCausalLM.from_pretrained(
        EMBEDDED_MODEL, dtype=torch.bfloat16, device_map=devices, attn_implementation="turboquant"
    )
    expected = run(model, TurboQuantCache(model.config, **OPTIONS))
    for offloading in ("packed", "300kB"):
        cache = TurboQuantCache(model.config, offloading=offloading, **OPTIONS)
        own = run(model, cache)
        assert torch.equal(own[0], expected[0]) and torch.equal(own[1], expected[1])
        assert {device.index for device in cache._turns.slots} == {0, 1}
        assert [storage.device.index for storage in offloaded(cache)] == [0] * 4 + [1] * 4


@pytest.mark.parametrize("late", ["compute", "copy"])
def test_whole_layers_move_in_the_order_of_any_streams(late):
    """As `offloading=True` moves them, by a model that computes on a stream of the user's: the default one is idle."""
    torch.manual_seed(0)
    kept, moved = (GrowingStorage(PRESETS["tq4"], 16, 4, "auto") for _ in range(2))
    compute, copies = torch.cuda.Stream(), torch.cuda.Stream()
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    compute.wait_stream(torch.cuda.current_stream())
    for count in (4000, *[1] * 40, 200, *[1] * 10):
        with torch.cuda.stream(compute):
            new = tokens(count)
            if late == "compute":
                torch.cuda._sleep(MILLISECOND)
            expected, view = kept.append(*new), moved.append(*new)
            moved.to("cpu")
            for role in ("key", "value"):
                wrong += (materialize(view, role) != materialize(expected, role)).sum()
            del view, expected
        with torch.cuda.stream(copies):
            if late == "copy":
                torch.cuda._sleep(MILLISECOND)
            moved.to("cuda")
            torch.full((4, 4, 4096, 128), 7.0, device="cuda")  # takes memory that has come free
    compute.synchronize()
    assert wrong.item() == 0
    moved.to("cpu")
    assert torch.equal(moved.view().tail_keys, kept.view().tail_keys.cpu())  # the host waits for what it reads


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}], ids=["greedy", "beam"])
def test_the_same_logits_on_a_stream_of_the_users(model, options):
    expected = run(model, TurboQuantCache(model.config, **OPTIONS), **options)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        own = run(model, TurboQuantCache(model.config, offloading=True, **OPTIONS), **options)
    stream.synchronize()
    assert torch.equal(own[0], expected[0]) and torch.equal(own[1], expected[1])
