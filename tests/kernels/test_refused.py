"""What launchers refuse before a kernel reads beyond its tensors, or on another device: nothing runs here."""

from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from kernel_harness import empty_states  # noqa: E402
from latent_store_cases import preset_of  # noqa: E402
from tq_kernels.decode.plan import prepare  # noqa: E402
from tq_kernels.decode.problem import Problem  # noqa: E402
from tq_kernels.device import NO_GPU  # noqa: E402
from tq_kernels.latent.plan import prepare_latents  # noqa: E402
from tq_kernels.latent.problem import LatentProblem  # noqa: E402
from tq_kernels.prefill.attend import prefill  # noqa: E402
from tq_kernels.store.append import append_launch  # noqa: E402
from tq_kernels.store.dequantize import dequantize_launch  # noqa: E402
from tq_kernels.store.latents import store_latents_launch  # noqa: E402
from tq_kernels.store.quantize import quantize_launch  # noqa: E402
from tq_kernels.store.update import update_launch  # noqa: E402
from tq_kernels.store.update_latents import update_latents_launch  # noqa: E402

from tq_cache.formats.presets import PRESETS  # noqa: E402

B, H, PACKED, RING, SINKS, MOST = 2, 2, 256, 192, 4, 420  # of a preallocated layer: 128 tokens are never packed


def empty(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=device)


def both(tokens: int, heads: int = H, widths: tuple[int, int] = (64, 64)) -> tuple[torch.Tensor, torch.Tensor]:
    return tuple(empty(B, heads, tokens, width) for width in widths)  # type: ignore[return-value]


def states(preset: str = "4bit_nc") -> list[Any]:
    return [empty_states(role, getattr(PRESETS[preset], role), 64, PACKED, device="cpu") for role in ("key", "value")]


def latent_states(latent: str = "tq4") -> list[Any]:
    preset, options = preset_of(latent, "int8"), dict(heads=1, dtype=torch.float32, device="cpu")
    key = empty_states("key", preset.key, 128, PACKED, **options)
    return [key, empty_states("rotary", preset.value, 32, PACKED, calibrated=False, **options)]


def problem(counted: bool = False, **changes: Any) -> Problem:
    """Of a growing cache, or of a preallocated one."""
    tail = both(RING if counted else 20)
    given = Problem(NO_GPU, empty(B, 8, 1, 64), *states(), *tail, PACKED, 0.1, both(SINKS))
    if counted:
        count = empty(dtype=torch.int64)
        given = given._replace(num_tokens=count, residual_length=128, max_length=MOST)
    return given._replace(**changes)


def latent_problem(counted: bool = False, **changes: Any) -> LatentProblem:
    widths = (128, 32)
    queries, tail = both(1, 8, widths), both(RING if counted else 20, 1, widths)
    given = LatentProblem(NO_GPU, *queries, *latent_states(), *tail, PACKED, 0.1, both(SINKS, 1, widths))
    if counted:
        given = given._replace(num_tokens=empty(dtype=torch.int64), residual_length=128, max_length=MOST)
    return given._replace(**changes)


ATTENTION = {"decode": (problem, prepare), "latents": (latent_problem, prepare_latents)}


@pytest.fixture(params=ATTENTION)
def attention(request):
    return ATTENTION[request.param]


def mask(*shape: int, dtype: torch.dtype = torch.bool) -> dict[str, torch.Tensor]:
    return {"mask": empty(*shape, dtype=dtype)}


@pytest.mark.parametrize("counted", [False, True])
def test_masks_for_fewer_tokens_than_may_be_held(attention, counted):
    """Of a count on the device nobody knows but the most that it may be; the sinks belong to all others, too."""
    make, prepare_it = attention
    most = MOST if counted else SINKS + PACKED + 20
    prepare_it(make(counted, **mask(B, 1, 1, most)))
    for length in (10, most - 1):
        with pytest.raises(ValueError, match=f"expected a mask .* {most} or more"):
            prepare_it(make(counted, **mask(B, 1, 1, length)))


WRONG = {
    "mask of a sequence more": (mask(B + 1, 1, 1, MOST), "expected a mask"),
    "mask of some heads": (mask(B, 3, 1, MOST), "expected a mask"),
    "mask of two queries": (mask(B, 1, 2, MOST), "expected a mask"),
    "mask of integers": (mask(B, 1, 1, MOST, dtype=torch.int64), "bool, or float"),
    "logits of a head less": ({"sink_logits": empty(1, 7, 1)}, "expected sink_logits"),
    "logits without queries": ({"sink_logits": empty(1, 8)}, "expected sink_logits"),
}


@pytest.mark.parametrize("name", WRONG)
def test_arguments_that_fit_no_query(attention, name):
    (make, prepare_it), (changes, match) = attention, WRONG[name]
    with pytest.raises(ValueError, match=match):
        prepare_it(make(**changes))


@pytest.mark.parametrize(("changes", "match"), [
    ({"num_tokens": empty(1, dtype=torch.int64)}, "expected num_tokens"),
    ({"num_tokens": empty(dtype=torch.int32)}, "expected num_tokens"),
    ({"max_length": MOST + 100}, "expected room for"),
    ({"residual_length": 192}, "ring of whole blocks"),
])  # fmt: skip
def test_counts_beyond_the_room(attention, changes, match):
    make, prepare_it = attention
    prepare_it(make(True))
    with pytest.raises(ValueError, match=match):
        prepare_it(make(True, **changes))


def test_lengths_and_sinks_that_do_not_fit():
    for wrong in (empty(B, dtype=torch.int64), empty(1, dtype=torch.int32)):
        with pytest.raises(ValueError, match="expected lengths"):
            prepare(problem(lengths=wrong))
    with pytest.raises(ValueError, match="as many keys as values"):
        prepare(problem(sink_tokens=(both(SINKS)[0], both(SINKS - 1)[1])))


@pytest.mark.parametrize("wrong", [
    empty(B, 1, dtype=torch.int64), empty(1, 1, 9, dtype=torch.int64), empty(B, 2, 9, dtype=torch.int32),
    empty(B, 1, 9),
], ids=lambda x: str(tuple(x.shape)))  # fmt: skip
def test_indices_that_are_none_of_these_queries(wrong):
    with pytest.raises(ValueError, match="expected indices"):
        prepare_latents(latent_problem(indices=wrong))


def test_latents_that_are_not_there():
    with pytest.raises(ValueError, match="expected packed latents"):
        prepare_latents(latent_problem(latents=None))


@pytest.mark.parametrize(("name", "wrong"), [
    ("scale", empty(B, H, PACKED - 64, dtype=torch.float16)), ("zero", empty(1, H, PACKED, dtype=torch.float16)),
    ("center", empty(B, 1, 1, 64)), ("center", empty(B, H, 64, 1).mT[:, :, :, ::2]), ("scale", empty(B, H, PACKED)),
])  # fmt: skip
def test_factors_that_are_not_those_of_the_codes(name, wrong):
    key, value = states()
    value = value._replace(**{name: wrong})
    with pytest.raises(ValueError, match=f"expected {name}"):
        prepare(problem(value=value))
    with pytest.raises(ValueError, match=f"expected {name}"):
        dequantize_launch(value, PACKED, torch.float32, True, NO_GPU)
    with pytest.raises(ValueError, match=f"expected {name}"):
        quantize_launch(key, value, *both(10), 0)


# --- Devices: one tensor on another, in turn.

ELSEWHERE = "expected all tensors on one device"


def moved(given: Any, name: str) -> Any:
    """`given`, a NamedTuple, with the tensor or tensors of one field on the "meta" device."""
    x = getattr(given, name)
    return given._replace(**{name: tuple(y.to("meta") for y in x) if isinstance(x, tuple) else x.to("meta")})


@pytest.mark.parametrize("name", [
    "query", "tail_keys", "tail_values", "sink_tokens", "mask", "sink_logits", "lengths", "num_tokens",
])  # fmt: skip
def test_decode_on_two_devices(name):
    extra = dict(sink_logits=empty(1, 8, 1), lengths=empty(B, dtype=torch.int32), **mask(B, 1, 1, MOST))
    given = problem(True, **extra)
    prepare(given)
    with pytest.raises(ValueError, match=ELSEWHERE):
        prepare(moved(given, name))


@pytest.mark.parametrize("name", [
    "content", "rotary", "tail_latents", "tail_rotary", "sink_tokens", "mask", "sink_logits", "num_tokens",
])  # fmt: skip
def test_latents_on_two_devices(name):
    given = latent_problem(True, sink_logits=empty(1, 8, 1), **mask(B, 1, 1, MOST))
    prepare_latents(given)
    with pytest.raises(ValueError, match=ELSEWHERE):
        prepare_latents(moved(given, name))
    with pytest.raises(ValueError, match=ELSEWHERE):
        prepare_latents(latent_problem(indices=empty(B, 1, 9, dtype=torch.int32, device="meta")))


@pytest.mark.parametrize("name", ["packed", "scale", "zero", "center"])
def test_packed_states_on_two_devices(name):
    key, value = states()
    value = moved(value, name)
    calls = (
        lambda: prepare(problem(value=value)),
        lambda: dequantize_launch(value, PACKED, torch.float32, True, NO_GPU),
        lambda: quantize_launch(key, value, *both(10), 0),
        lambda: prefill(empty(B, 8, 20, 64), key, value, *both(20), packed_length=PACKED, scaling=0.1),
    )
    for call in calls[: 1 if name == "packed" else 4]:
        with pytest.raises(ValueError, match=ELSEWHERE):
            call()


def test_steps_and_stores_on_two_devices():
    key, value = states()
    token, ring, count = both(1), both(RING), empty(dtype=torch.int64)
    given = [*token, key, value, *ring, count]
    update_launch(*given, 128, MOST, both(SINKS), NO_GPU)
    for number in (0, 1, 4, 5, 6):
        wrong = [x.to("meta") if i == number else x for i, x in enumerate(given)]
        with pytest.raises(ValueError, match=ELSEWHERE):
            update_launch(*wrong, 128, MOST, both(SINKS), NO_GPU)
    with pytest.raises(ValueError, match="expected room for"):
        update_launch(*given, 128, MOST + 100, both(SINKS), NO_GPU)
    with pytest.raises(ValueError, match="as many keys as values"):
        update_launch(*given, 128, MOST, (both(SINKS)[0], both(SINKS - 1)[1]), NO_GPU)
    for number in range(4):
        tensors = [x.to("meta") if i == number else x for i, x in enumerate((*both(5), *both(50)))]
        with pytest.raises(ValueError, match=ELSEWHERE):
            append_launch(*tensors, 0, NO_GPU)
    with pytest.raises(ValueError, match=ELSEWHERE):
        quantize_launch(key, value, *(x.to("meta") for x in both(10)), 0)


def test_steps_and_stores_of_latents_on_two_devices():
    latent, rotary = latent_states()
    widths = (128, 32)
    token, ring, count = both(1, 1, widths), both(RING, 1, widths), empty(dtype=torch.int64)
    update_latents_launch(*token, latent, rotary, *ring, count, 128, MOST, both(SINKS, 1, widths), NO_GPU)
    with pytest.raises(ValueError, match=ELSEWHERE):
        update_latents_launch(*token, latent, rotary, *ring, count.to("meta"), 128, MOST, None, NO_GPU)
    vectors = both(10, 1, widths)
    with pytest.raises(ValueError, match=ELSEWHERE):
        store_latents_launch(latent, rotary, vectors[0], vectors[1].to("meta"), 0, NO_GPU)


@pytest.mark.parametrize("changes", [
    {"mask": empty(B, 1, 20, MOST, device="meta")}, {"sink_logits": empty(1, 8, 1, device="meta")},
    {"sink_tokens": tuple(x.to("meta") for x in both(SINKS))},
], ids=lambda changes: next(iter(changes)))  # fmt: skip
def test_prefill_on_two_devices(changes):
    with pytest.raises(ValueError, match=ELSEWHERE):
        prefill(empty(B, 8, 20, 64), *states(), *both(20), packed_length=PACKED, scaling=0.1, **changes)


def test_prefill_of_states_that_are_not_of_these_sequences():
    key, value = (x._replace(packed=x.packed[:1], scale=x.scale[:1], center=x.center[:1]) for x in states("tq4"))
    key = key._replace(smooth=key.smooth[:1])
    query = empty(B, 8, 20, 64)
    with pytest.raises(ValueError, match="sequences and KV heads"):
        prefill(query, key, value, *both(20), packed_length=PACKED, scaling=0.1)
    with pytest.raises(ValueError, match="expected query"):  # a value less among the sinks
        sinks = both(SINKS)[0], both(SINKS - 1)[1]
        prefill(query, *states(), *both(20), packed_length=PACKED, scaling=0.1, sink_tokens=sinks)


def test_caches_on_another_device_are_refused_by_the_backend():
    """`model.to("cuda:1")` with a cache that was filled before, here with the devices that a CPU has."""
    from tq_cache.backends import triton
    from tq_cache.formats.states import KVView

    view = KVView(*both(20))
    with pytest.raises(ValueError, match=ELSEWHERE):
        triton.attend(empty(B, 8, 1, 64, device="meta"), replace(view), None, 0.1)
