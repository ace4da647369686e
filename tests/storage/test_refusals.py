"""Growing storage: what is refused changes nothing."""

import pytest
import torch
from storages import HEADS, assert_same_state, codes_of, everything, make_storage, tokens

from tq_cache.hf.handles import materialize
from tq_cache.storage.growing import GrowingStorage

# -------------------------------------------------------------------------------------------------------- errors


def assert_refused(storage: GrowingStorage, error: type[Exception], message: str, function) -> None:
    before = everything(storage)
    with pytest.raises(error, match=message):
        function()
    assert_same_state(before, everything(storage))


@pytest.fixture
def filled(generator) -> GrowingStorage:
    storage = make_storage("tq4", residual=16, sinks=4)
    storage.append(*tokens(generator, 100))
    return storage


@pytest.mark.parametrize("length", (-1, 101, 10**9))
def test_crop_beyond_the_tokens_held(filled, length):
    message = f"expected to keep 0 to 100 tokens, got {length}"
    assert_refused(filled, ValueError, message, lambda: filled.crop(length))


@pytest.mark.parametrize("count", (1, 200))
def test_another_batch_size(filled, generator, count):
    new = tokens(generator, count, batch=3)
    message = r"expected keys of batch 2, 2 KV heads and head_dim 32, as this cache holds, got \[3, 2"
    assert_refused(filled, ValueError, message, lambda: filled.append(*new))


def test_other_heads_or_widths(filled, generator):
    keys, values = tokens(generator, 5)
    one_head = keys[:, :1], values[:, :1]
    assert_refused(filled, ValueError, "expected keys of batch 2, 2 KV heads", lambda: filled.append(*one_head))
    wide = torch.zeros(2, HEADS, 5, 64)
    assert_refused(filled, ValueError, "expected keys of .* head_dim 32", lambda: filled.append(wide, values))
    assert_refused(filled, ValueError, "expected values of .* head_dim 48", lambda: filled.append(keys, wide))


def test_keys_and_values_that_do_not_fit_each_other(filled, generator):
    keys, values = tokens(generator, 5)
    message = r"expected keys and values \[batch, num_kv_heads, tokens, head_dim\] that differ at most in head_dim, got"
    for bad in ((keys, values[:, :, :4]), (keys[0], values[0]), (keys, values[:1])):
        assert_refused(filled, ValueError, message, lambda bad=bad: filled.append(*bad))


@pytest.mark.parametrize("head_dim", (24, 100, 1024))
def test_unsupported_head_dim(head_dim):
    storage = make_storage()
    x = torch.zeros(1, 1, 4, head_dim)
    message = f"expected a head_dim that is a multiple of 16 from 32 to 576, got {head_dim}"
    assert_refused(storage, ValueError, message, lambda: storage.append(x, x))
    assert storage.length == 0


def test_rows_that_are_not_there(filled):
    assert_refused(filled, IndexError, "out of (bounds|range)", lambda: filled.select(torch.tensor([0, 2])))


def test_view_of_nothing():
    with pytest.raises(ValueError, match="expected a storage with tokens, got an empty one; append first"):
        make_storage().view()


@pytest.mark.parametrize("bad", (torch.nan, torch.inf), ids=str)
@pytest.mark.parametrize("preset", ("fp8_e4m3", "4bit_nc", "tq4"))
def test_bad_tokens_do_not_spread(preset, bad, generator):
    """Documented: kept, read back as NaN; every other token has the codes that it has without them."""
    keys, values = tokens(generator, 200, batch=1, dtype=torch.float32)
    clean, dirty = make_storage(preset), make_storage(preset)
    clean.append(keys[:, :, 1:], values[:, :, 1:])
    keys[:, :, 0], values[:, :, 0] = bad, bad
    dirty.append(keys, values)
    for good, states in ((clean.key, dirty.key), (clean.value, dirty.value)):
        same = codes_of(states, 192)[:, :, 1:] == codes_of(good, 191)
        assert same.double().mean() > 0.999
    whole = materialize(dirty.view(), "key")
    assert whole[:, :, 0].isnan().all() and whole[:, :, 1:].isfinite().all()
