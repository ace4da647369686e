"""One layer's storage: every operation exact, nothing quantised twice, bytes counted, errors that change nothing."""

import copy

import pytest
import torch

from tq_cache.backends import quantizers, reference
from tq_cache.formats import packing
from tq_cache.formats.packing import BLOCK_TOKENS
from tq_cache.formats.presets import PRESETS
from tq_cache.formats.states import PackedStates
from tq_cache.hf.handles import materialize
from tq_cache.storage.growing import GrowingStorage

HEADS = 2


def make_storage(preset: str = "tq4", residual: int = 0, sinks: int = 0) -> GrowingStorage:
    return GrowingStorage(PRESETS[preset], residual, sinks, "reference")


def tokens(generator, count: int, batch: int = 2, key_dim: int = 32, value_dim: int = 48, dtype=torch.bfloat16):
    """Keys and values of `count` new tokens, of different width."""
    return tuple(torch.randn(batch, HEADS, count, dim, generator=generator).to(dtype) for dim in (key_dim, value_dim))


def codes_of(states: PackedStates, count: int) -> torch.Tensor:
    """Everything stored for each of the first `count` tokens as integers: codes, scale and zero, [B, H, count, n]."""
    width = BLOCK_TOKENS if states.role == "value" else states.head_dim
    codes = packing.unpack(states.packed, states.format.bits, width)
    codes = (codes.transpose(-1, -2) if states.role == "value" else codes).flatten(2, 3)
    factors = [f.view(torch.int16)[..., None] for f in (states.scale, states.zero) if f is not None]
    return torch.cat([codes.to(torch.int16), *factors], dim=-1)[:, :, :count]


def everything(storage: GrowingStorage) -> dict[str, object]:
    """A copy of all of a storage's state."""
    state = {name: value for name, value in vars(storage).items() if isinstance(value, int)}
    return state | {str(i): tensor.clone() for i, tensor in enumerate(storage.tensors())}


def assert_same_state(before: dict[str, object], after: dict[str, object]) -> None:
    assert before.keys() == after.keys()
    for name, value in before.items():
        same = torch.equal(value, after[name]) if isinstance(value, torch.Tensor) else value == after[name]
        assert same, name


# --------------------------------------------------------------------------------- random operations, a slow model


class SlowModel:
    """Keeps every token as it was handed over, by concatenation, and the codes it got when first seen packed."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.whole: list[torch.Tensor] = []  # keys and values [B, H, T, D]
        self.codes: list[torch.Tensor] = []  # of keys and of values, [B, H, T, n]; -1 before they are seen
        self.packed: list[bool] = []

    def append(self, *new: torch.Tensor) -> None:
        self.whole = [torch.cat(pair, dim=2) for pair in zip(self.whole, new, strict=True)] if self.whole else [*new]
        self.packed += [False] * new[0].shape[2]

    def crop(self, length: int) -> None:
        if length == 0:
            return self.clear()
        self.whole, self.packed = [x[:, :, :length] for x in self.whole], self.packed[:length]

    def map_rows(self, function) -> None:
        self.whole, self.codes = [function(x) for x in self.whole], [function(x) for x in self.codes]

    def check(self, storage: GrowingStorage) -> int:
        """Compare everything; returns how many tokens are packed for the first time."""
        assert storage.length == len(self.packed)
        if not self.packed:
            return 0
        view = storage.view()
        assert view.length == len(self.packed)
        first, last = view.sink_length, view.sink_length + view.packed_length
        assert not any(self.packed[:first] + self.packed[last:]), "a packed token became exact again"
        self.check_exact(view, first, last)
        return self.check_packed(view, first, last) if view.packed_length else 0

    def check_exact(self, view, first: int, last: int) -> None:
        """Sinks and tail hold the very bits that were handed over."""
        for x, parts in zip(
            self.whole, ((view.sink_keys, view.tail_keys), (view.sink_values, view.tail_values)), strict=True
        ):
            held = torch.cat([part for part in parts if part is not None], dim=2)
            assert torch.equal(held, torch.cat([x[:, :, :first], x[:, :, last:]], dim=2))

    def check_packed(self, view, first: int, last: int) -> int:
        """Codes of tokens seen packed before are the same; the packed ones are a prefix of those packed now."""
        known = self.packed[first:last].count(True)
        assert all(self.packed[first : first + known])
        seen = [codes_of(states, view.packed_length) for states in (view.key, view.value)]
        for old, now in zip(self.codes, seen, strict=False):
            assert torch.equal(old[:, :, :known], now[:, :, :known]), "codes changed"
        self.codes, self.packed[first:last] = seen, [True] * view.packed_length
        return view.packed_length - known

    def check_values(self, storage: GrowingStorage) -> None:
        """Each token reads back as something close to what it was, which a permutation would not."""
        for role, x in zip(("key", "value"), self.whole, strict=bool(self.packed)):
            error = (materialize(storage.view(), role) - x).float()
            assert (error.square().sum(dim=-1) < 0.3 * x.float().square().sum(dim=-1)).all()


SETTINGS = [(residual, sinks) for residual in (0, 1, 16, 64, 128, 200) for sinks in (0, 4)]


@pytest.mark.parametrize(("residual", "sinks"), SETTINGS, ids=lambda n: str(n))
@pytest.mark.parametrize("seed", range(2))
def test_random_operations_are_exact(residual, sinks, seed, monkeypatch):
    generator = torch.Generator().manual_seed(1000 * seed + residual + sinks)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    stored_tokens = 0
    plain_store = reference.store

    def counting_store(states, x, start):
        nonlocal stored_tokens
        stored_tokens += x.shape[2]
        plain_store(states, x, start)

    monkeypatch.setattr(reference, "store", counting_store)
    preset = ("tq4", "k8v4", "3bit_nc", "tq_k3v2")[draw(0, 3)]
    storage, model, batch = make_storage(preset, residual, sinks), SlowModel(), 2
    newly_packed = 0
    for _ in range(30):
        operation = ("chunk", "chunk", "token", "tokens", "crop", "crop", "select", "repeat", "reset")[draw(0, 8)]
        if operation in ("chunk", "token", "tokens"):
            for _ in range(draw(1, 12) if operation == "tokens" else 1):
                new = tokens(generator, draw(1, 100) if operation == "chunk" else 1, batch)
                view = storage.append(*new)
                model.append(*new)
                assert torch.equal(view.tail_keys[:, :, -new[0].shape[2] :], new[0])  # new tokens are read exact
                assert view.length == len(model.packed)
                newly_packed += model.check(storage)
        elif operation == "crop":
            length = draw(max(0, storage.length - 200), storage.length)
            storage.crop(length)
            model.crop(length)
        elif operation == "select" and storage.length:
            rows = torch.randint(0, batch, (draw(1, 3),), generator=generator)
            storage.select(rows)
            model.map_rows(lambda x, rows=rows: x[rows])
            batch = len(rows)
        elif operation == "repeat" and storage.length and batch < 3:
            storage.repeat(2)
            model.map_rows(lambda x: x.repeat_interleave(2, dim=0))
            batch *= 2
        elif operation == "reset" and draw(0, 2) == 0:
            storage.clear()
            model.clear()
            batch = draw(1, 2)
        assert model.check(storage) == 0  # only an append packs
        model.check_values(storage)
    assert stored_tokens == 2 * newly_packed  # keys and values, once each


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
    kept = [codes_of(states, 70) for states in (storage.key, storage.value)]
    calibrations = storage.key.calibration, storage.value.calibration
    storage.crop(70)
    storage.append(*new)
    assert storage.length == storage.packed_length == 150
    for states, codes, x, calibration in zip((storage.key, storage.value), kept, new, calibrations, strict=True):
        assert torch.equal(codes_of(states, 70), codes)
        assert states.calibration is calibration
        expected, scale, zero = quantizers.quantize(x, states.format, calibration)
        assert torch.equal(codes_of(states, 150)[:, :, 70:, : x.shape[3]], expected.to(torch.int16))
        for held, factor in ((states.scale, scale), (states.zero, zero)):
            assert (held is None) == (factor is None)
            assert held is None or torch.equal(held[:, :, 70:150], factor)


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


@pytest.mark.parametrize("residual", (64, 100, 128, 200))
def test_blocks_stay_aligned_when_the_residual_covers_one(residual, generator):
    """Tokens one by one: packed a whole block at a time, and the newest ones are never packed at once."""
    storage = make_storage("tq4", residual)
    for _ in range(500):
        storage.append(*tokens(generator, 1, batch=1))
        assert storage.packed_length % BLOCK_TOKENS == 0
        assert storage.tail_length <= residual
        assert storage.length <= residual or storage.tail_length > residual - BLOCK_TOKENS


@pytest.mark.parametrize("residual", (1, 16, 32))
def test_a_short_residual_is_packed_into_open_blocks(residual, generator):
    """Never more exact tokens than asked for, and the update's own token is still exact in what attention reads."""
    storage = make_storage("tq4", residual)
    storage.append(*tokens(generator, 100, batch=1))
    for _ in range(100):
        keys, values = tokens(generator, 1, batch=1)
        view = storage.append(keys, values)
        assert torch.equal(view.tail_keys[:, :, -1:], keys) and torch.equal(view.tail_values[:, :, -1:], values)
        assert storage.tail_length <= residual


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
    storage.append(*tokens(generator, 90, batch=1))
    storage.repeat(3)
    shared = codes_of(storage.key, storage.packed_length)
    new = tokens(generator, 40, batch=3)
    storage.append(*new)
    count = shared.shape[2]
    assert torch.equal(codes_of(storage.key, count), shared)
    tail = storage.view().tail_keys
    assert torch.equal(tail, new[0][:, :, 40 - tail.shape[2] :]) and not torch.equal(tail[0], tail[1])


def test_copies_are_independent(generator):
    storage = make_storage("4bit_nc", residual=16, sinks=4)
    storage.append(*tokens(generator, 100))
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
    assert storage.length == 170 and twin.length == 30 and other.length == 100


def test_offload_and_back(generator):
    storage = make_storage("k8v4", residual=16, sinks=4)
    storage.append(*tokens(generator, 100))
    before = everything(storage)
    storage.to("cpu")
    assert_same_state(before, everything(storage))
    storage.to("meta")
    assert {tensor.device.type for tensor in storage.tensors()} == {"meta"}  # every tensor moves


def test_reset_forgets_shapes_dtype_and_calibration(generator):
    storage = make_storage("tq4", residual=16, sinks=4)
    storage.append(*(100 + x for x in tokens(generator, 100)))
    storage.clear()
    assert (storage.length, storage.nbytes, storage.batch_size, storage.num_elements) == (0, 0, None, 0)
    fresh = make_storage("tq4", residual=16, sinks=4)
    new = tokens(generator, 100, batch=3, key_dim=64, value_dim=32, dtype=torch.float32)
    storage.append(*new)
    fresh.append(*new)
    assert_same_state(everything(fresh), everything(storage))


def test_crop_to_nothing_is_a_reset(generator):
    storage = make_storage("tq4", residual=16, sinks=4)
    storage.append(*tokens(generator, 100))
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
    for start, end in ((0, 99), (99, 100), (100, 200)):
        storage.append(*(x[:, :, start:end] for x in new))
    for role, x in zip(("key", "value"), new, strict=True):
        whole = materialize(storage.view(), role)
        assert whole.dtype == dtype and whole.shape == x.shape
        assert torch.equal(whole[:, :, :4], x[:, :, :4]) and torch.equal(whole[:, :, 200 - 3 :], x[:, :, 200 - 3 :])
        error = (whole.double() - x.double()).square().sum() / x.double().square().sum()
        assert 0 < error < (0.002 if role == "key" else 0.025)


def test_non_contiguous_and_expanded_inputs(generator):
    keys = torch.randn(2, 100, HEADS, 64, generator=generator).transpose(1, 2)
    values = torch.randn(2, 1, 100, 64, generator=generator).expand(2, HEADS, 100, 64)
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


@pytest.mark.parametrize("preset", ("k8v4", "4bit_nc", "tq4"))
def test_a_first_chunk_of_one_token(preset, generator):
    """A small first token (attention sinks have small keys) must not fix a scale that the others do not fit."""
    storage = make_storage(preset)
    keys, values = tokens(generator, 300, dtype=torch.float32)
    keys[:, :, 0] *= 0.05
    values[:, :, 0] *= 0.05
    for start, end in ((0, 1), (1, 2), (2, 150), (150, 300)):
        storage.append(keys[:, :, start:end], values[:, :, start:end])
    for role, x in (("key", keys), ("value", values)):
        error = materialize(storage.view(), role) - x
        assert error.square().sum() < 0.02 * x.square().sum(), role


@pytest.mark.parametrize("order", ["inference_first", "no_grad_first"])
def test_inference_mode_and_no_grad_in_turn(order, generator):
    modes = [torch.inference_mode, torch.no_grad]
    modes = modes if order == "inference_first" else modes[::-1]
    storage, expected = make_storage("tq4", 16, 4), make_storage("tq4", 16, 4)
    for i, count in enumerate((50, 1, 1, 100, 1, 1, 30)):
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


# ------------------------------------------------------------------------------------------------- left padding


@pytest.mark.parametrize("preset", ("fp8_e4m3", "k8v4", "4bit_nc", "tq4", "tq3"))
@pytest.mark.parametrize("padding", (2, 30, 64, 130))
def test_a_left_padded_row_is_calibrated_as_the_row_alone(preset, padding, generator):
    """Padding sees only padding and values carry no position: equal values; keys differ by their position."""
    row = [x + 1.0 for x in tokens(generator, 100, batch=1, dtype=torch.float32)]
    pad = torch.randn(1, HEADS, 1, 48, generator=generator).expand(-1, -1, padding, -1) * 5
    pad_keys = torch.randn(1, HEADS, padding, 32, generator=generator) * 20
    other = tokens(generator, padding + 100, batch=1, dtype=torch.float32)
    keys = torch.cat([other[0], torch.cat([pad_keys, row[0]], dim=2)])
    values = torch.cat([other[1], torch.cat([pad, row[1]], dim=2)])
    batch, alone = make_storage(preset), make_storage(preset)
    batch.append(keys, values)
    alone.append(*row)
    for states, expected in ((batch.key, alone.key), (batch.value, alone.value)):
        for part, of_row in vars(expected.calibration).items():
            if of_row is not None:
                torch.testing.assert_close(getattr(states.calibration, part)[1:], of_row, rtol=1e-5, atol=1e-6)
        codes = codes_of(states, padding + 100)[1:, :, padding:]
        same = (codes == codes_of(expected, 100)).double().mean()
        assert same > 0.999  # sums in another order move ties only


def test_a_row_of_equal_values_is_not_all_padding(generator):
    storage = make_storage("tq4")
    keys, values = tokens(generator, 100, dtype=torch.float32)
    values[:] = values[:, :, :1]
    storage.append(keys, values)
    torch.testing.assert_close(storage.key.calibration.center, keys.mean(dim=2, keepdim=True), atol=1e-6, rtol=1e-5)


# --------------------------------------------------------------------------------------------------------- bytes

TABLE = {  # bytes per token and KV head at D = 128 (the design's table)
    "fp8_e4m3": 256, "fp8_e5m2": 256, "k8v4": 196, "4bit_nc": 134, "k3v4_nc": 118, "3bit_nc": 102,
    "tq4": 132, "tq3": 100, "tq2": 68, "tq_k4v2": 100, "tq_k2v4": 100, "tq_k4v3": 116,
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
    formula = HEADS * (TABLE[preset] * (4096 - residual) + 2 * 256 * residual)
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
    assert residual == 0 or tail_buffers <= 4096 / BLOCK_TOKENS + 5  # one for each block packed
    capacity = storage.key.capacity
    assert capacity <= 9 / 8 * 4096 + BLOCK_TOKENS
    room = max(residual, 1)
    assert storage.nbytes == held_by(storage)
    assert storage.nbytes == pytest.approx(HEADS * (134 * capacity + 2 * 256 * room), rel=0.01)


def test_no_more_than_a_block_is_rewritten_by_a_token(generator, monkeypatch):
    storage = make_storage("4bit_nc")
    storage.append(*tokens(generator, 1000, batch=1))
    unpacked = []
    plain_unpack = packing.unpack

    def watched(packed, bits, n):
        unpacked.append(packed.numel())
        return plain_unpack(packed, bits, n)

    monkeypatch.setattr(packing, "unpack", watched)
    storage.append(*tokens(generator, 1, batch=1))
    block_bytes = HEADS * BLOCK_TOKENS * 48 * 4 // 8
    assert unpacked and max(unpacked) <= block_bytes


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
    keys, values = tokens(generator, 100, batch=1, dtype=torch.float32)
    clean, dirty = make_storage(preset), make_storage(preset)
    clean.append(keys[:, :, 1:], values[:, :, 1:])
    keys[:, :, 0], values[:, :, 0] = bad, bad
    dirty.append(keys, values)
    for good, states in ((clean.key, dirty.key), (clean.value, dirty.value)):
        same = codes_of(states, 100)[:, :, 1:] == codes_of(good, 99)
        assert same.double().mean() > 0.999
    whole = materialize(dirty.view(), "key")
    assert whole[:, :, 0].isnan().all() and whole[:, :, 1:].isfinite().all()
