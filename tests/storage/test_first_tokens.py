"""What storages calibrate on: enough real tokens, the queries where they come, each row for itself."""

import pytest
import torch
from storages import HEADS, everything, make_storage, tokens

from tq_cache.formats.presets import PRESETS, resolve_preset
from tq_cache.hf.handles import materialize
from tq_cache.storage.first_tokens import MAX_WAITING_TOKENS, MIN_CALIBRATION_TOKENS
from tq_cache.storage.growing import GrowingStorage
from tq_cache.storage.preallocated import PreallocatedStorage

DIM = 64
# What 4-bit codes with an unbiased or norm-corrected scale leave of Gaussian vectors: 0.098 and, of 3, 2 bits, more.
NORMAL_ERROR = {"fp8_e4m3": 0.03, "k8v4": 0.12, "4bit_nc": 0.12, "tq4": 0.11, "tq3": 0.21, "tq2": 0.39}


def vectors(generator, count: int, batch: int = 2) -> list[torch.Tensor]:
    return [torch.randn(batch, HEADS, count, DIM, generator=generator) for _ in range(2)]


def fill(storage, pair, *ends: int) -> None:
    start = 0
    for end in (*ends, pair[0].shape[2]):
        storage.append(*(x[:, :, start:end] for x in pair))
        start = end


def relative_errors(storage, pair, start: int) -> list[float]:
    """Of packed keys and values from token `start` on: norm of the error over that of the vectors."""
    last = storage.view().sink_length + storage.packed_length
    assert last > start + 64
    errors = []
    for role, x in zip(("key", "value"), pair, strict=True):
        x = x[:, :, start:last]
        errors.append(float((materialize(storage.view(), role)[:, :, start:last] - x).norm() / x.norm()))
    return errors


def first_of_equal_tokens(pair) -> None:
    for x in pair:
        x[:, :, :64] = x[:, :, :1]


def first_token_small(pair) -> None:
    for x in pair:
        x[:, :, :1] /= 300


def first_chunk_small(pair) -> None:
    for x in pair:
        x[:, :, :64] /= 10


def channel_dead_at_first(pair) -> None:
    for x in pair:
        x[..., :64, 7] = 0


def channel_dead_in_two_hundred(pair) -> None:
    for x in pair:
        x[..., :200, 7] = 0


@pytest.mark.parametrize("sinks", (0, 4))
@pytest.mark.parametrize("preset", NORMAL_ERROR)
@pytest.mark.parametrize(("spoil", "ends"), [
    (first_of_equal_tokens, (64,)),
    (first_token_small, (1,)),
    (first_token_small, tuple(range(1, 70))),
    (first_chunk_small, (64,)),
    (first_chunk_small, (200,)),
    (channel_dead_at_first, (64,)),
    (channel_dead_in_two_hundred, (200,)),
])  # fmt: skip
def test_first_tokens_unlike_the_rest(preset, spoil, ends, sinks, generator):
    """The error of later tokens is what it is without; before, it was up to 3.4 of their norm."""
    pair = vectors(generator, 700)
    spoil(pair)
    storage = make_storage(preset, sinks=sinks)
    fill(storage, pair, *ends)
    assert max(relative_errors(storage, pair, 200)) < NORMAL_ERROR[preset]


@pytest.mark.parametrize("preset", NORMAL_ERROR)
def test_keys_with_a_bias_and_outliers(preset, generator):
    """Channels like those of Qwen2.5: a constant 300 times larger than what varies, others 16 times larger."""
    pair = vectors(generator, 700)
    pair[0][..., :6] *= 16
    pair[0][..., 20] += 300
    storage = make_storage(preset, sinks=4)
    fill(storage, pair, 300)
    keys = pair[0][:, :, 4 : 4 + storage.packed_length]
    read = materialize(storage.view(), "key")[:, :, 4 : 4 + storage.packed_length]
    varying = keys - keys.mean(dim=2, keepdim=True)
    assert (read - keys).norm() / varying.norm() < 1.3 * NORMAL_ERROR[preset]


def masks(padding: list[int], length: int, queries: int) -> torch.Tensor:
    """Causal, bool [B, 1, S, T], of rows with padding on the left."""
    token = torch.arange(length)
    causal = token[None] <= torch.arange(length - queries, length)[:, None]
    return torch.stack([causal & (token >= pad) for pad in padding])[:, None]


def attend(storage, pair, query, padding, *ends: int) -> None:
    """As a model does: updates, and the queries of each to whoever wants them."""
    start = 0
    for end in (*ends, pair[0].shape[2]):
        view = storage.append(*(x[:, :, start:end] for x in pair), queries_follow=True)
        if view.observe is not None:
            view.observe(query[:, :, start:end], masks(padding, end, end - start))
        start = end


@pytest.mark.parametrize("sinks", (0, 4))
@pytest.mark.parametrize("preset", ("fp8_e4m3", "tq4", "tq3"))
@pytest.mark.parametrize(("chunk", "pads"), [(64, 300), (150, 300), (700, 300), (64, 900)])
def test_a_padded_row_in_chunks_is_as_the_row_alone(preset, chunk, pads, sinks, generator):
    """Pads and then 400 tokens, beside a row without: the first chunks of the padded row are padding only."""
    count = pads + 400
    pair, query = vectors(generator, count), torch.randn(2, 2 * HEADS, count, DIM, generator=generator)
    pair[0][..., 20] += 300
    pair[0][1, :, :pads] = 7 * torch.randn(HEADS, pads, DIM, generator=generator)
    pair[1][1, :, :pads] = torch.randn(HEADS, pads, DIM, generator=generator)  # unlike each other, as in deeper layers
    storage = make_storage(preset, sinks=sinks)
    attend(storage, pair, query, [0, pads], *range(chunk, count, chunk))
    alone = make_storage(preset)
    attend(alone, [x[1:, :, pads:] for x in pair], query[1:, :, pads:], [0])
    last = pads + alone.packed_length
    for role, x in zip(("key", "value"), pair, strict=True):
        size = (x - x[:, :, pads:].mean(dim=2, keepdim=True))[1, :, pads:last].norm()
        batch = (materialize(storage.view(), role) - x)[1, :, pads:last].norm() / size
        single = (materialize(alone.view(), role) - x[1:, :, pads:])[0, :, : last - pads].norm() / size
        assert batch < 1.1 * single + 0.01, role


def test_tokens_wait_until_there_are_enough(generator):
    storage = make_storage("tq4")
    for count in range(1, MIN_CALIBRATION_TOKENS):
        storage.append(*tokens(generator, 1))
        assert storage.packed_length == 0 and storage.length == count
    storage.append(*tokens(generator, 1))
    assert storage.packed_length == MIN_CALIBRATION_TOKENS and not storage.waits


def test_padding_alone_does_not_wait_and_the_row_is_calibrated_once_it_begins(generator):
    storage = make_storage("tq4")
    query = torch.randn(2, HEADS, 2000, DIM, generator=generator)
    pads = [x[:, :, :1].expand(-1, -1, 300, -1) for x in vectors(generator, 1)]
    pair = vectors(generator, 500)
    pair[0][..., 20] += 300
    whole = [torch.cat([pad, x], dim=2) for pad, x in zip(pads, pair, strict=True)]
    attend(storage, [x[:, :, :300] for x in whole], query, [300, 300])
    assert storage.packed_length == 256 and not storage.first_tokens.done
    view = storage.append(*pair, queries_follow=True)
    assert not storage.first_tokens.done  # before the mask says that the row has begun
    view.observe(query[:, :, 300:800], masks([300, 300], 800, 500))
    assert storage.first_tokens.done
    last = storage.packed_length
    error = (materialize(storage.view(), "key")[:, :, 300:last] - pair[0][:, :, : last - 300]).norm()
    assert error < 0.11 * (pair[0] - pair[0].mean(dim=2, keepdim=True)).norm()


def test_what_waits_is_bounded(generator):
    """Equal tokens and nothing else, of which nobody says whether they are padding."""
    storage = make_storage("tq4")
    for _ in range(MAX_WAITING_TOKENS // 100 + 1):
        storage.append(*(x.expand(-1, -1, 100, -1) for x in vectors(torch.Generator().manual_seed(0), 1)))
    assert storage.packed_length > 0 and storage.first_tokens.done


def test_queries_are_waited_for_in_vain_at_most_once(generator):
    """Filled by hand: the first step after that may show some; who never shows any gets keys alone."""
    storage = make_storage("tq4")
    for waiting in (True, True, False):
        storage.append(*tokens(generator, 300), queries_follow=True)
        assert storage.waits == waiting
    assert storage.first_tokens.done
    given_up = make_storage("tq4")
    view = given_up.append(*tokens(generator, 300), queries_follow=True)
    view.observe(None, None)
    assert given_up.packed_length == 256


def test_sizes_make_the_errors_of_scores_least(generator):
    """Smoothing by keys and queries against neither, and against keys alone: 8 times larger queries in some channels
    that keys do not favour."""
    keys, values = vectors(generator, 1024)
    keys = keys * torch.logspace(-1, 1, DIM)[torch.randperm(DIM, generator=generator)]
    query = torch.randn(2, 2 * HEADS, 1024, DIM, generator=generator)
    query[..., ::4] *= 8
    errors = {}
    for name in ("none", "keys", "both"):
        smooth = 0.0 if name == "none" else None
        storage = GrowingStorage(resolve_preset("tq4", smooth=smooth), 0, 0, "reference")
        view = storage.append(keys, values, queries_follow=True)
        view.observe(query if name == "both" else None, None)
        error = (materialize(storage.view(), "key") - keys).unflatten(1, (HEADS, 1))
        scores = query.unflatten(1, (HEADS, 2))[:, :, :, :64] @ error.mT
        errors[name] = float(scores.square().mean())
    assert errors["both"] < 0.75 * min(errors["none"], errors["keys"])
    assert errors["keys"] < errors["none"]


def test_what_is_known_follows_the_rows(generator):
    """Beams are reordered and repeated while tokens wait."""
    pair, query = vectors(generator, 150), torch.randn(2, HEADS, 150, DIM, generator=generator)
    query[1] *= torch.logspace(-1, 1, DIM)
    one, two = make_storage("tq4", residual=128), make_storage("tq4", residual=128)
    order = torch.tensor([1, 0, 1])
    for storage in (one, two):
        view = storage.append(*pair, queries_follow=True)
        view.observe(query, None)
    one.select(torch.tensor([1, 0]))
    one.repeat(2)
    one.select(torch.tensor([0, 2, 1]))
    two.select(order)
    later = [x[order] for x in vectors(generator, 100)]
    for storage in (one, two):
        storage.append(*later)
        assert storage.packed_length > 0
    for name, x in everything(one).items():
        assert not isinstance(x, torch.Tensor) or torch.equal(x, everything(two)[name])


def test_sparse_attention_hides_no_beginning(generator):
    """A mask that shows each query few tokens, as a model's own sparse attention makes it: only padding is padding."""
    pair, query = vectors(generator, 300), torch.randn(2, HEADS, 300, DIM, generator=generator)
    mask = masks([0, 50], 300, 300)
    chosen = torch.rand(2, 1, 300, 300, generator=generator) < 0.1
    token = torch.arange(300)
    alone = (token[:, None] == token) & (token == torch.tensor([0, 50])[:, None, None, None])  # sees nothing else
    storage = make_storage("tq4")
    view = storage.append(*pair, queries_follow=True)
    view.observe(query, mask & (chosen | alone))
    assert storage.first_tokens.done and storage.packed_length == 256
    mean = torch.stack([pair[0][0].mean(dim=1), pair[0][1, :, 50:].mean(dim=1)])
    torch.testing.assert_close(storage.key.calibration.center[:, :, 0], mean, atol=1e-5, rtol=1e-5)


def repeated_then_text(generator, repeated: int) -> list[torch.Tensor]:
    """Keys with a large constant; the first tokens are one, with equal values and keys that turn with their place."""
    pair = vectors(generator, repeated + 600)
    pair[0][..., 20] += 300
    pair[1][:, :, :repeated] = pair[1][:, :, :1]
    return pair


def error_of_keys(storage, keys, start: int = 0) -> float:
    """Norm of what packed keys from token `start` on are off by, over that of what varies in them."""
    held = storage.view()
    end = held.sink_length + held.packed_length
    assert end > start + 400
    varying = keys[:, :, start:end] - keys[:, :, start:end].mean(dim=2, keepdim=True)
    return float((materialize(held, "key")[:, :, start:end] - keys[:, :, start:end]).norm() / varying.norm())


@pytest.mark.parametrize("make", [make_storage, lambda: PreallocatedStorage(PRESETS["tq4"], 0, 0, 2000, "reference")],
                         ids=["growing", "preallocated"])  # fmt: skip
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("repeated", [150, 300, 1100])
def test_a_mask_that_shows_repeated_tokens_wins_over_their_values(make, repeated, masked, generator):
    """They are real, so their chunk calibrates; before, it had the centre 0 for good."""
    pair, query = repeated_then_text(generator, repeated), torch.randn(2, HEADS, repeated, DIM, generator=generator)
    storage = make()
    view = storage.append(*(x[:, :, :repeated] for x in pair), queries_follow=True)
    view.observe(query, masks([0, 0], repeated, repeated) if masked else None)
    assert storage.first_tokens.done
    mean = pair[0][:, :, :repeated].mean(dim=2, keepdim=True)
    torch.testing.assert_close(storage.calibration[0].center, mean)
    storage.append(*(x[:, :, repeated:] for x in pair))
    assert error_of_keys(storage, pair[0]) < 0.12


@pytest.mark.parametrize("make", [make_storage, lambda: PreallocatedStorage(PRESETS["tq4"], 0, 0, 2000, "reference")],
                         ids=["growing", "preallocated"])  # fmt: skip
def test_repeated_tokens_of_which_nobody_spoke_are_right_and_so_is_what_follows(make, generator):
    """More of them than wait: guessed to be padding, they give the centre; codes packed by it keep their meaning."""
    repeated = MAX_WAITING_TOKENS + 100
    pair, storage = repeated_then_text(generator, repeated), make()
    fill(storage, pair, repeated)
    assert storage.first_tokens.done
    assert error_of_keys(storage, pair[0]) < 0.12 and error_of_keys(storage, pair[0], repeated) < 0.12


def test_padding_that_no_mask_has_shown_yet_is_told_by_values(generator):
    """The mask of the first chunk says that it is padding; the next chunk, which nobody shows, begins with padding."""
    pair, query = vectors(generator, 900), torch.randn(2, HEADS, 300, DIM, generator=generator)
    pair[0][..., 20] += 300
    for x in pair:
        x[1, :, :500] = 7 * x[1, :, :1]
    storage = make_storage("tq4")
    view = storage.append(*(x[:, :, :300] for x in pair), queries_follow=True)
    view.observe(query, masks([0, 300], 300, 300))
    assert not storage.first_tokens.done
    storage.append(*(x[:, :, 300:] for x in pair))
    assert storage.first_tokens.done
    torch.testing.assert_close(storage.calibration[0].center[1], pair[0][1, :, 500:].mean(dim=1, keepdim=True))
