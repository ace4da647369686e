"""Growing storage, one operation at a time; dtypes, widths and layouts."""

import copy

import pytest
import torch
from storages import HEADS, assert_same_state, codes_of, everything, make_storage, tokens

from tq_cache.backends import quantizers
from tq_cache.formats.packing import BLOCK_TOKENS
from tq_cache.formats.presets import PRESETS
from tq_cache.hf.handles import materialize

# ---------------------------------------------------------------------------------- single operations, bit for bit


def test_bytes_of_whole_blocks_never_change(generator):
    storage = make_storage("k3v4_nc")
    storage.append(*tokens(generator, 200))
    before = storage.key.packed[:, :, :3].clone(), storage.value.packed[:, :, :3].clone()
    for _ in range(100):
        storage.append(*tokens(generator, 1))
    storage.crop(195)
    storage.append(*tokens(generator, 90))
    assert torch.equal(storage.key.packed[:, :, :3], before[0])
    assert torch.equal(storage.value.packed[:, :, :3], before[1])


@pytest.mark.parametrize("preset", PRESETS)
def test_crop_into_a_block_then_new_tokens(preset, generator):
    """Kept tokens keep their codes, new ones get those that they would have got anyway."""
    first, new = tokens(generator, 150), tokens(generator, 80)
    storage = make_storage(preset)
    storage.append(*first)
    assert storage.packed_length == 128
    kept = [codes_of(states, 70) for states in (storage.key, storage.value)]
    calibrations = storage.key.calibration, storage.value.calibration
    storage.crop(70)
    storage.append(*new)
    assert storage.length == 150 and storage.packed_length == 128
    for states, codes, x, calibration in zip((storage.key, storage.value), kept, new, calibrations, strict=True):
        assert torch.equal(codes_of(states, 70), codes)
        assert states.calibration is calibration
        expected, scale, zero = quantizers.quantize(x[:, :, :58], states.format, calibration)
        assert torch.equal(codes_of(states, 128)[:, :, 70:, : x.shape[3]], expected.to(torch.int16))
        for held, factor in ((states.scale, scale), (states.zero, zero)):
            assert (held is None) == (factor is None)
            assert held is None or torch.equal(held[:, :, 70:128], factor)


@pytest.mark.parametrize("residual", (0, 16, 64, 100, 128))
def test_token_by_token_equals_one_chunk_after_the_first(residual, generator):
    """How tokens arrive changes which are packed, not what they are packed as."""
    first, later = tokens(generator, 300, dtype=torch.float64), tokens(generator, 150, dtype=torch.float64)
    one, many = make_storage("4bit_nc", residual), make_storage("4bit_nc", residual)
    one.append(*first)
    many.append(*first)
    one.append(*later)
    for t in range(150):
        many.append(*(x[:, :, t : t + 1] for x in later))
    assert one.length == many.length == 450
    common = min(one.packed_length, many.packed_length)
    assert common > 250
    assert torch.equal(codes_of(one.key, common), codes_of(many.key, common))
    assert torch.equal(codes_of(one.value, common), codes_of(many.value, common))


@pytest.mark.parametrize("residual", (0, 1, 64, 100, 128, 200))
def test_whole_blocks_are_packed_as_soon_as_the_residual_leaves_one(residual, generator):
    """Tokens one by one; those of an update are still exact in what attention reads."""
    storage = make_storage("tq4", residual, sinks=4)
    for count in range(1, 500):
        keys, values = tokens(generator, 1, batch=1)
        view = storage.append(keys, values)
        assert torch.equal(view.tail_keys[:, :, -1:], keys) and torch.equal(view.tail_values[:, :, -1:], values)
        wanted = max(count - 4 - residual, 0) // BLOCK_TOKENS * BLOCK_TOKENS
        assert storage.packed_length == (wanted if count - 4 >= 128 else 0)  # calibration waits for so many
        assert storage.length == count


@pytest.mark.parametrize("count", (1, 4, 5, 100))
def test_sinks_are_the_first_tokens_exactly(count, generator):
    keys, values = tokens(generator, 300)
    storage = make_storage("tq2", residual=16, sinks=4)
    for start in range(0, 300, count):
        storage.append(keys[:, :, start : start + count], values[:, :, start : start + count])
    view = storage.view()
    assert torch.equal(view.sink_keys, keys[:, :, :4]) and torch.equal(view.sink_values, values[:, :, :4])
    storage.crop(3)
    assert torch.equal(materialize(storage.view(), "key"), keys[:, :, :3])
    storage.append(keys[:, :, 100:300], values[:, :, 100:300])
    assert storage.length == 203 and torch.equal(materialize(storage.view(), "value")[:, :, :3], values[:, :, :3])


def test_select_reorders_rows_bit_for_bit(generator):
    storage = make_storage("tq3", residual=16, sinks=4)
    storage.append(*tokens(generator, 200, batch=3))
    before = storage.tensors()
    storage.select(torch.tensor([2, 0, 0, 1]))
    assert all(torch.equal(new, old[[2, 0, 0, 1]]) for new, old in zip(storage.tensors(), before, strict=True))
    storage.select(torch.tensor([True, False, False, True]))
    assert all(torch.equal(new, old[[2, 1]]) for new, old in zip(storage.tensors(), before, strict=True))
    assert storage.batch_size == 2


def test_rows_that_share_a_past_are_independent_afterwards(generator):
    storage = make_storage("tq4", residual=16)
    storage.append(*tokens(generator, 160, batch=1))
    storage.repeat(3)
    shared = codes_of(storage.key, storage.packed_length)
    new = tokens(generator, 40, batch=3)
    storage.append(*new)
    count = shared.shape[2]
    assert count == 128 and torch.equal(codes_of(storage.key, count), shared)
    tail = storage.view().tail_keys
    assert torch.equal(tail[:, :, -40:], new[0]) and not torch.equal(tail[0], tail[1])


def test_copies_are_independent(generator):
    storage = make_storage("4bit_nc", residual=16, sinks=4)
    storage.append(*tokens(generator, 200))
    before = everything(storage)
    twin = copy.deepcopy(storage)
    assert_same_state(before, everything(twin))
    new = tokens(generator, 70)
    twin.append(*new)
    twin.crop(30)
    assert_same_state(before, everything(storage))
    storage.append(*new)
    other = copy.deepcopy(twin)
    other.append(*new)
    assert storage.length == 270 and twin.length == 30 and other.length == 100


def test_offload_and_back(generator):
    storage = make_storage("k8v4", residual=16, sinks=4)
    storage.append(*tokens(generator, 200))
    before = everything(storage)
    storage.to("cpu")
    assert_same_state(before, everything(storage))
    storage.to("meta")
    assert {tensor.device.type for tensor in storage.tensors()} == {"meta"}  # every tensor moves


def test_reset_forgets_shapes_dtype_and_calibration(generator):
    storage = make_storage("tq4", residual=16, sinks=4)
    storage.append(*(100 + x for x in tokens(generator, 200)))
    storage.clear()
    assert (storage.length, storage.nbytes, storage.batch_size, storage.num_elements) == (0, 0, None, 0)
    fresh = make_storage("tq4", residual=16, sinks=4)
    new = tokens(generator, 200, batch=3, key_dim=64, value_dim=32, dtype=torch.float32)
    storage.append(*new)
    fresh.append(*new)
    assert_same_state(everything(fresh), everything(storage))


def test_crop_to_nothing_is_a_reset(generator):
    storage = make_storage("tq4", residual=16, sinks=4)
    storage.append(*tokens(generator, 200))
    storage.crop(0)
    assert storage.length == 0 and storage.nbytes == 0


@pytest.mark.parametrize("residual", (0, 16, 128))
def test_views_stay_valid_while_more_tokens_come(residual, generator):
    """Across growth, packing and blocks that are filled further: what was handed out reads the same."""
    storage, held = make_storage("tq4", residual, sinks=4), []
    for count in (1, 30, 1, 100, 1, 1, 60, 300, 1):
        view = storage.append(*tokens(generator, count))
        held += [(view, role, materialize(view, role).clone()) for role in ("key", "value")]
        view = storage.view()
        held += [(view, role, materialize(view, role).clone()) for role in ("key", "value")]
    for view, role, expected in held:
        assert torch.equal(materialize(view, role), expected)


def test_inputs_are_copied(generator):
    """A model may reuse its own buffers after an update."""
    keys, values = tokens(generator, 100)
    storage = make_storage("tq4", residual=128, sinks=4)
    storage.append(keys, values)
    before = everything(storage)
    keys.zero_(), values.zero_()
    assert_same_state(before, everything(storage))


# ------------------------------------------------------------------------------------------- inputs of every kind


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(("key_dim", "value_dim"), [(32, 576), (576, 512), (80, 48), (112, 112)])
def test_dtypes_and_widths(dtype, key_dim, value_dim, generator):
    storage = make_storage("k8v4", residual=16, sinks=4)
    new = tokens(generator, 200, batch=1, key_dim=key_dim, value_dim=value_dim, dtype=dtype)
    for start, end in ((0, 99), (99, 100), (100, 200)):  # calibrated on the last
        storage.append(*(x[:, :, start:end] for x in new))
    for role, x in zip(("key", "value"), new, strict=True):
        whole = materialize(storage.view(), role)
        assert whole.dtype == dtype and whole.shape == x.shape
        assert torch.equal(whole[:, :, :4], x[:, :, :4]) and torch.equal(whole[:, :, 200 - 3 :], x[:, :, 200 - 3 :])
        error = (whole.double() - x.double()).square().sum() / x.double().square().sum()
        assert 0 < error < (0.002 if role == "key" else 0.025)


def test_non_contiguous_and_expanded_inputs(generator):
    keys = torch.randn(2, 200, HEADS, 64, generator=generator).transpose(1, 2)
    values = torch.randn(2, 1, 200, 64, generator=generator).expand(2, HEADS, 200, 64)
    strided, plain = make_storage("tq4", 16, 4), make_storage("tq4", 16, 4)
    strided.append(keys, values)
    plain.append(keys.contiguous(), values.contiguous())
    assert_same_state(everything(plain), everything(strided))


@pytest.mark.parametrize("residual", (0, 16))
def test_an_update_without_tokens_changes_nothing(residual, generator):
    storage = make_storage("tq4", residual, sinks=4)
    storage.append(*tokens(generator, 0))
    assert storage.length == 0
    storage.append(*tokens(generator, 100))
    before = everything(storage)
    view = storage.append(*tokens(generator, 0))
    assert view.length == 100
    assert_same_state(before, everything(storage))


@pytest.mark.parametrize("order", ["inference_first", "no_grad_first"])
def test_inference_mode_and_no_grad_in_turn(order, generator):
    modes = [torch.inference_mode, torch.no_grad]
    modes = modes if order == "inference_first" else modes[::-1]
    storage, expected = make_storage("tq4", 16, 4), make_storage("tq4", 16, 4)
    for i, count in enumerate((50, 1, 1, 100, 1, 1, 130)):
        new = tokens(generator, count)
        expected.append(*new)
        with modes[i % 2]():
            storage.append(*(x.clone() for x in new))
            if i == 3:
                storage.select(torch.tensor([0, 1]))
                storage.crop(storage.length)
    assert_same_state(everything(expected), everything(storage))
    assert not any(tensor.is_inference() for tensor in storage.tensors())
    storage.repeat(2)
    storage.append(*tokens(generator, 1, batch=4))


def test_gradients_do_not_enter(generator):
    storage = make_storage("tq4", 16, 4)
    keys, values = (x.requires_grad_() for x in tokens(generator, 100))
    storage.append(keys, values)
    storage.append(keys, values)
    assert not any(tensor.requires_grad for tensor in storage.tensors())
    assert copy.deepcopy(storage).length == 200


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("residual", (16, 128))
def test_another_dtype_is_refused_or_cast_everywhere_alike(dtype, residual, generator):
    """Never a tail of one dtype on one path (a copy into the buffer) and of another on the next (a concatenation)."""
    storage = make_storage("tq4", residual)
    storage.append(*tokens(generator, 10))
    dtypes = set()
    for count in (1, 1, 100, 1):
        try:
            dtypes.add(storage.append(*tokens(generator, count, dtype=dtype)).keys.dtype)
        except (ValueError, TypeError):
            dtypes.add("refused")
    assert len(dtypes) == 1
