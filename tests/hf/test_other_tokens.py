"""Tokens of another batch size, dtype or device than those held: refused, and taken after `reset`."""

import pytest
import torch
from architectures import build
from storages import assert_same_state, everything

from tq_cache import TurboQuantCache
from tq_cache.formats.states import tensors
from tq_cache.storage.growing import GrowingStorage

OTHERS = {"batch": lambda x: x[:1], "dtype": lambda x: x.bfloat16(), "heads": lambda x: x[:, :1]}


def pair(count: int, seed: int = 0) -> list[torch.Tensor]:
    return [torch.randn(2, 2, count, 64, generator=torch.Generator().manual_seed(seed + i)) for i in range(2)]


def read(cache, new, backend):
    """Keys and values of layer 0 after an update, as far as there are tokens."""

    def update(keys, values):
        keys, values = cache.update(keys, values, 0)
        return keys + 0, values + 0

    step = update if backend is None else torch.compile(update, backend=backend)
    found = step(*new)
    return [x[:, :, : int(cache.get_seq_length())] for x in found]


@pytest.mark.parametrize(("prompt", "name", "backend"), [
    *[(prompt, name, None) for prompt in (1, 70) for name in OTHERS],
    (1, "batch", "eager"), (70, "batch", "aot_eager"), (1, "dtype", "aot_eager"),
])  # fmt: skip
def test_after_reset_preallocated_memory_takes_other_tokens(prompt, name, backend):
    torch._dynamo.reset()
    other = OTHERS[name]
    model = build("llama", "sdpa")
    cache = TurboQuantCache(model.config, max_cache_len=200, residual_length=64, skip_layers=())
    read(cache, pair(100), backend)
    cache.reset()
    for change in (other, lambda x: x):  # and back
        fresh = TurboQuantCache(model.config, max_cache_len=200, residual_length=64, skip_layers=())
        if change is other:
            fresh.reset()
        for count, seed in ((prompt, 2), (1, 4), (1, 6)):
            new = [change(x) for x in pair(count, seed)]
            for own, expected in zip(read(cache, new, backend), read(fresh, new, None), strict=True):
                torch.testing.assert_close(own, expected, atol=0, rtol=0)
        cache.reset()


@pytest.mark.parametrize("arch", ["llama", "gemma3_text"])
def test_after_reset_a_model_takes_another_batch_and_like_tokens_keep_their_place(arch):
    """Also where some layers are transformers' own."""
    model = build(arch, "turboquant")
    cache = TurboQuantCache(model.config, max_cache_len=128, residual_length=64)
    ids = torch.randint(0, 64, (2, 90), generator=torch.Generator().manual_seed(0))
    places = []
    for batch in (ids, ids.flip(1), ids[:1], ids):
        with torch.no_grad():
            found = model(batch, past_key_values=cache).logits
            fresh = TurboQuantCache(model.config, max_cache_len=128, residual_length=64)
            assert torch.equal(found, model(batch, past_key_values=fresh).logits)
        states = [layer.storage.states for layer in cache.layers if hasattr(layer, "storage")]
        places.append([x.data_ptr() for x in tensors(states[0])])
        cache.reset()
    assert places[0] == places[1] and states[0].ring_keys.shape[0] == 2


@pytest.mark.parametrize("length", [None, 200], ids=["growing", "preallocated"])
def test_tokens_on_another_device_are_refused(length):
    model = build("llama", "turboquant")
    cache = TurboQuantCache(model.config, max_cache_len=length, residual_length=64, skip_layers=())
    cache.update(*pair(100), 0)
    storage = cache.layers[0].storage
    before = [x.clone() for x in storage.tensors()]
    keys, values = pair(1)
    there = [x.to("meta") for x in (keys, values)]
    message = "on cpu, where this cache holds its tokens, got meta; move the model back, reset"
    with pytest.raises(ValueError, match=f"expected keys {message}"):
        cache.update(*there, 0)
    for mixed in ((keys, there[1]), (there[0], values)):
        with pytest.raises(ValueError, match="expected keys and values on one device, got"):
            cache.update(*mixed, 0)
        with pytest.raises(ValueError, match="expected keys and values on one device, got"):
            TurboQuantCache(model.config, max_cache_len=length, residual_length=64).update(*mixed, 0)
    with pytest.raises(ValueError, match="expected values in torch.float32, as this cache holds, got torch.bfloat16"):
        cache.update(keys, values.bfloat16(), 0)
    assert all(torch.equal(x, y) for x, y in zip(before, storage.tensors(), strict=True)) and storage.length == 100


def test_a_storage_refuses_another_device_and_changes_nothing(generator):
    storage = GrowingStorage(TurboQuantCache(build("llama", "sdpa").config).preset, 0, 4, "reference")
    storage.append(*pair(300))
    before = everything(storage)
    with pytest.raises(ValueError, match="expected keys on cpu, where"):
        storage.append(*(x.to("meta") for x in pair(3)))
    assert_same_state(before, everything(storage))


def test_a_layer_of_transformers_refuses_another_device():
    model = build("gemma3_text", "turboquant")
    cache = TurboQuantCache(model.config)
    index = next(i for i, plan in enumerate(cache.plans) if not plan.packed)
    cache.update(*pair(10), index)
    with pytest.raises(ValueError, match="expected keys on cpu, where"):
        cache.update(*(x.to("meta") for x in pair(1)), index)
    assert cache.layers[index].get_seq_length() == 10
