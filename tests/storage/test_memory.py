"""Growing storage: padding, bytes and reallocations."""

import copy
from types import SimpleNamespace

import pytest
import torch
from storages import HEADS, codes_of, make_storage, tokens

from tq_cache.backends import reference
from tq_cache.formats import packing
from tq_cache.formats.packing import BLOCK_TOKENS
from tq_cache.formats.presets import PRESETS
from tq_cache.storage.growing import GrowingStorage

# ------------------------------------------------------------------------------------------------- left padding


@pytest.mark.parametrize("preset", ("fp8_e4m3", "k8v4", "4bit_nc", "tq4", "tq3"))
@pytest.mark.parametrize("padding", (2, 30, 64, 130))
def test_a_left_padded_row_is_calibrated_as_the_row_alone(preset, padding, generator):
    """Padding sees only padding and values carry no position: equal values; keys differ by their position."""
    row = [x + 1.0 for x in tokens(generator, 200, batch=1, dtype=torch.float32)]
    pad = torch.randn(1, HEADS, 1, 48, generator=generator).expand(-1, -1, padding, -1) * 5
    pad_keys = torch.randn(1, HEADS, padding, 32, generator=generator) * 20
    other = tokens(generator, padding + 200, batch=1, dtype=torch.float32)
    keys = torch.cat([other[0], torch.cat([pad_keys, row[0]], dim=2)])
    values = torch.cat([other[1], torch.cat([pad, row[1]], dim=2)])
    batch, alone = make_storage(preset), make_storage(preset)
    batch.append(keys, values)
    alone.append(*row)
    for states, expected in ((batch.key, alone.key), (batch.value, alone.value)):
        for part, of_row in vars(expected.calibration).items():
            if of_row is not None:
                torch.testing.assert_close(getattr(states.calibration, part)[1:], of_row, rtol=1e-5, atol=1e-6)
        packed = min(batch.packed_length - padding, alone.packed_length)
        codes = codes_of(states, padding + packed)[1:, :, padding:]
        same = (codes == codes_of(expected, packed)).double().mean()
        assert same > 0.999  # sums in another order move ties only


# --------------------------------------------------------------------------------------------------------- bytes

TABLE = {  # bytes per token and KV head at D = 128 (the design's table)
    "fp8_e4m3": 256, "fp8_e5m2": 256, "k8v4": 196, "4bit_nc": 134, "k3v4_nc": 118, "3bit_nc": 102,
    "tq4": 132, "tq3": 100, "tq2": 68, "tq_k4v2": 100, "tq_k3v2": 84, "tq_k4v3": 116,
}  # fmt: skip


def packed_bytes(storage: GrowingStorage) -> int:
    parts = [(states.packed, states.scale, states.zero) for states in (storage.key, storage.value)]
    return sum(tensor.nbytes for group in parts for tensor in group if tensor is not None)


@pytest.mark.parametrize("preset", TABLE)
def test_packed_bytes_are_those_of_the_table(preset, generator):
    storage = make_storage(preset)
    storage.append(*tokens(generator, 512, batch=3, key_dim=128, value_dim=128))
    assert storage.key.capacity == storage.value.capacity == 512
    assert packed_bytes(storage) == TABLE[preset] * 512 * 3 * HEADS
    assert PRESETS[preset].token_bytes(128, 128) == TABLE[preset]


def held_by(storage: GrowingStorage) -> int:
    """Bytes of all memory behind a storage, found without its help, each block of memory once."""
    found: dict[int, int] = {}

    def visit(value) -> None:
        if isinstance(value, torch.Tensor):
            found[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
        elif hasattr(value, "__dict__"):
            for part in vars(value).values():
                visit(part)

    visit(storage)
    return sum(found.values())


@pytest.mark.parametrize("preset", TABLE)
@pytest.mark.parametrize("residual", (0, 128))
def test_bytes_at_4096_tokens(preset, residual, generator):
    storage = make_storage(preset, residual)
    new = tokens(generator, 4096, batch=1, key_dim=128, value_dim=128)
    storage.append(*new)
    room = residual + BLOCK_TOKENS  # of the tail
    formula = HEADS * (TABLE[preset] * (4096 - residual) + 2 * 256 * room)
    assert storage.nbytes == held_by(storage)
    assert storage.nbytes == pytest.approx(formula, rel=0.01)
    assert storage.num_elements == sum(x.numel() for x in new)


@pytest.mark.parametrize("residual", (0, 128))
def test_bytes_and_reallocations_over_4096_single_tokens(residual, generator, monkeypatch):
    monkeypatch.setattr(reference, "store", lambda states, x, start: None)  # memory is the subject, and it is slow
    storage = make_storage("4bit_nc", residual)
    keys, values = tokens(generator, 4096, batch=1, key_dim=128, value_dim=128)
    packed_buffers, tail_buffers = set(), 0
    last_tail = None
    for t in range(4096):
        storage.append(keys[:, :, t : t + 1], values[:, :, t : t + 1])
        if storage.key is not None:
            packed_buffers.add(storage.key.capacity)
        tail_buffers += storage.tail_keys.data_ptr() != last_tail
        last_tail = storage.tail_keys.data_ptr()
    assert len(packed_buffers) <= 30
    assert tail_buffers <= 4096 / BLOCK_TOKENS + 70  # one for each block packed, and while the first ones wait
    capacity = storage.key.capacity
    assert capacity <= 9 / 8 * 4096 + BLOCK_TOKENS
    room = residual + BLOCK_TOKENS
    assert storage.nbytes == held_by(storage)
    assert storage.nbytes == pytest.approx(HEADS * (134 * capacity + 2 * 256 * room), rel=0.01)


def test_no_block_is_read_to_be_written(generator, monkeypatch):
    """Whole blocks are packed, so nothing packed is unpacked; but for the one that a crop went into."""
    unpacked = []
    plain_unpack = packing.unpack

    def watched(packed, bits, n):
        unpacked.append(packed.numel())
        return plain_unpack(packed, bits, n)

    monkeypatch.setattr(packing, "unpack", watched)
    storage = make_storage("4bit_nc")
    for count in (1000, 1, 90, 64):
        storage.append(*tokens(generator, count, batch=1))
    assert not unpacked
    storage.crop(1000)
    storage.append(*tokens(generator, 64, batch=1))
    assert 0 < max(unpacked) <= HEADS * BLOCK_TOKENS * 48 * 4 // 8


@pytest.mark.parametrize("use", [
    lambda x: x.view(), lambda x: x.append(*tokens(torch.Generator(), 1)), lambda x: x.crop(50), lambda x: x.repeat(2),
    lambda x: x.select(torch.tensor([0, 1])), lambda x: copy.deepcopy(x),
], ids=["view", "append", "crop", "repeat", "select", "copy"])  # fmt: skip
def test_the_host_waits_for_copies_of_what_it_uses(use, generator):
    """What transformers' offloading copies to the CPU may be under way when it is read there; once is enough."""
    storage, waits = make_storage("tq4", residual=16), []
    storage.append(*tokens(generator, 200))
    storage._moved = SimpleNamespace(synchronize=lambda: waits.append(1))
    use(storage)
    use(storage)
    assert waits == [1]
