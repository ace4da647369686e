"""Launches on the host: what they are kept by, that nothing grows with the number of steps, that zeros are checked."""

import gc
import sys
import tracemalloc
from typing import Any

import pytest
import torch
from kernel_harness import TARGETS, device_of, empty_states

from tq_cache.formats.presets import PRESETS

triton = pytest.importorskip("triton")
STEPS, WARM = 1200, 500


class Compiled:
    """What Triton gives back for a kernel; launching it does nothing."""

    def __getitem__(self, grid: Any) -> Any:
        return lambda *arguments: None


@pytest.fixture
def looked_up(monkeypatch):
    """Instead of compiling and launching, Triton notes in this list what it was asked to look up."""
    from triton.runtime.jit import JITFunction

    asked: list[Any] = []

    def run(kernel, *arguments, grid, warmup, **constants):
        asked.append((kernel.__name__, grid, arguments, constants))
        return Compiled()

    monkeypatch.setattr(JITFunction, "run", run)
    forget()
    yield asked
    forget()


def forget() -> None:
    from tq_kernels import launch

    launch._COMPILED.clear()
    for cache in function_caches().values():
        cache.cache_clear()


def function_caches() -> dict[str, Any]:
    """Every `lru_cache` of the kernels' package."""
    found: dict[str, Any] = {}
    for name, module in list(sys.modules.items()):
        if name.startswith("tq_kernels"):
            found |= {f"{name}.{key}": x for key, x in vars(module).items() if hasattr(x, "cache_info")}
    return found


def entries() -> dict[str, int]:
    """How much every cache of the kernels' package holds: functions', dictionaries, lists and sets."""
    held = {name: cache.cache_info().currsize for name, cache in function_caches().items()}
    for name, module in list(sys.modules.items()):
        if name.startswith("tq_kernels"):
            held |= {f"{name}.{k}": len(x) for k, x in vars(module).items() if isinstance(x, dict | list | set)}
    return held


def check_steps(step, looked_up: list[Any], most: int, steps: int = STEPS) -> None:
    """After WARM steps no cache grows, no memory stays, and Triton is asked for nothing new."""
    tracemalloc.start()
    for i in range(WARM):
        step(i)
    held, asked = entries(), len(looked_up)
    assert asked <= most, [what[:2] for what in looked_up]
    gc.collect()
    before = tracemalloc.get_traced_memory()[0]
    for i in range(WARM, steps):
        step(i)
    gc.collect()
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert entries() == held
    assert len(looked_up) == asked
    assert grown < 1 << 16, grown  # what Python keeps of freed tuples; a key of each step would take megabytes


def packed(preset: str, tokens: int, device: str = "meta"):
    return [empty_states(role, getattr(PRESETS[preset], role), 64, tokens, device=device) for role in ("key", "value")]


def test_masked_steps_of_a_growing_cache_keep_nothing(looked_up):
    from tq_kernels.decode.plan import decode

    states, tail = packed("4bit_nc", 4096), torch.empty(2, 2, 192, 64, device="meta")
    query = torch.empty(2, 8, 1, 64, device="meta")

    def step(i):
        length = 128 + i % 64  # of the tail, until a block of it is packed
        keys = tail[:, :, :length]
        mask = torch.empty(2, 1, 1, 4096 + 192 + i, dtype=torch.bool, device="meta")
        for _ in range(2):  # layers
            decode(query, *states, keys, keys, packed_length=4096 - 64, scaling=0.1, mask=mask)

    # Attention by whether strides of the mask are multiples of 16, and the merge.
    check_steps(step, looked_up, most=3)


def test_prompts_of_every_length_keep_nothing(looked_up):
    from tq_kernels.store.append import append

    buffers = [torch.empty(2, 2, 4096, 64, device="meta") for _ in range(2)]
    memory = torch.empty(2, 2, 4096, 64, device="meta")

    def step(i):
        tokens = 1 + i
        cut, whole = memory[:, :, :tokens], torch.empty(2, 2, tokens, 64, device="meta")
        append(cut, cut, *buffers, 0)  # strides of the memory
        append(whole, whole, *buffers, 0)  # strides of the prompt: its length times 64, always multiples of 16

    # Tokens of a program are 1, 2, 4, .. 32.
    check_steps(step, looked_up, most=6)


def test_decode_launches_what_was_prepared_for_the_device(looked_up, monkeypatch):
    """The limit of registers, and the warps of exact tokens, are those of `tuning`."""
    from tq_kernels.decode import plan as decode

    monkeypatch.setattr(decode, "describe", lambda device: device_of("sm_90"))
    states, tail = packed("4bit_nc", 4096), torch.empty(2, 2, 64, 64, dtype=torch.bfloat16, device="meta")
    query = torch.empty(2, 8, 1, 64, dtype=torch.bfloat16, device="meta")
    decode.decode(query, *states, tail, tail, packed_length=4096, scaling=0.1)
    decode.decode(query, None, None, tail, tail, packed_length=0, scaling=0.1)
    options = {name: (given["num_warps"], given.get("maxnreg")) for name, _, _, given in looked_up}
    assert options == {"decode_kernel": (4, 112), "decode_exact_kernel": (4, None), "decode_merge_kernel": (1, None)}


def test_a_step_more_needs_no_other_kernel(looked_up):
    """While the tail fills, and with every layer, nothing compiles anew."""
    from tq_kernels.decode.plan import decode

    layers = [packed("tq4", tokens, "cpu") for tokens in (192, 192, 256)]
    tail = torch.randn(2, 2, 2, 128, 64, dtype=torch.bfloat16)
    query = torch.empty(2, 8, 1, 64, dtype=torch.bfloat16)
    for length in range(1, 65):
        for states in layers[:2]:
            decode(query, *states, *tail[:, :, :, :length], packed_length=192, scaling=1)
    assert len(looked_up) == 2
    decode(query, *layers[2], *tail[:, :, :, :64], packed_length=256, scaling=1)
    assert len(looked_up) == 2  # memory has grown: other strides, of the same kinds


VALUES = (
    0, 1, 2, 15, 16, 17, 48, -1, -16, 2**31 - 1, 2**31, 2**31 - 16, 2**32 + 16, -(2**31), -(2**31) - 1, 2**63,
    None, True, False, 0.0, 1.0, 2.5, (), (1,), (16, None), (3, (1, 2**40)), (32, None), (5, (1, 2**41)),
)  # fmt: skip


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
@pytest.mark.parametrize("specialised", [True, False])
def test_kinds_are_those_of_triton(target, specialised):
    """Two arguments are of one kind exactly where Triton compiles the same for both."""
    from tq_kernels.launch import kind
    from triton._C.libtriton import native_specialize_impl
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend

    backend = make_backend(GPUTarget(*TARGETS[target]))
    memory = torch.empty(64, dtype=torch.bfloat16)
    large = torch.empty(2**30 + 64, dtype=torch.bfloat16, device="meta")
    tensors = (memory, memory[1:], memory[8:], memory.half(), memory.view(torch.uint8), large, large.view(torch.uint8))
    values = (*VALUES, *tensors, (memory, large), (memory[1:], 3))
    found = [native_specialize_impl(backend, x, False, specialised, True) for x in values]
    kinds = [kind(x, specialised, sized=target == "gfx942") for x in values]
    for i in range(len(values)):
        for j in range(i):
            assert (kinds[i] == kinds[j]) == (found[i] == found[j]), (values[i], values[j])


def test_caches_keep_no_tensors(looked_up):
    from tq_kernels.decode.plan import decode

    before = {id(x) for x in gc.get_objects() if isinstance(x, torch.Tensor)}
    states, tail = packed("tq3", 256, "cpu"), torch.empty(2, 2, 64, 64)
    decode(torch.empty(2, 8, 1, 64), *states, tail, tail, packed_length=256, scaling=0.1)
    decode(torch.empty(2, 8, 1, 64), None, None, tail, tail, packed_length=0, scaling=0.1)
    looked_up.clear()
    del states, tail
    gc.collect()
    assert not [x.shape for x in gc.get_objects() if isinstance(x, torch.Tensor) and id(x) not in before]


@pytest.mark.parametrize("change", ["heads", "tokens"])
def test_a_zero_that_lies_otherwise_than_its_scale_is_refused(change):
    """Decode steps through both with the strides of the scale."""
    from tq_kernels.decode.plan import decode

    key, value = packed("4bit_nc", 256, "cpu")
    other = torch.empty(2, 2, 320, dtype=torch.float16)[:, :, :256]
    if change == "tokens":
        other = torch.empty(2, 256, 2, dtype=torch.float16).transpose(1, 2)
    value = value._replace(zero=other)
    tail = torch.empty(2, 2, 64, 64)
    with pytest.raises(ValueError, match="zero"):
        decode(torch.empty(2, 8, 1, 64), key, value, tail, tail, packed_length=256, scaling=0.1)


@pytest.mark.parametrize("wrong", [
    lambda x: x.bfloat16(), lambda x: x[:, :1], lambda x: x[..., :32], lambda x: x.mT.contiguous().mT,
], ids=["dtype", "KV heads", "head_dim", "strides"])  # fmt: skip
def test_sinks_that_do_not_fit_are_refused(looked_up, wrong):
    from tq_kernels.decode.plan import decode
    from tq_kernels.store.update import update

    states = [
        empty_states(role, fmt, 64) for role, fmt in (("key", PRESETS["tq4"].key), ("value", PRESETS["tq4"].value))
    ]
    tail, query, token = (torch.empty(2, heads, n, 64, device="meta") for heads, n in ((2, 64), (8, 1), (2, 1)))
    sinks = wrong(torch.empty(2, 2, 4, 64, device="meta"))
    with pytest.raises(ValueError, match="expected sinks like the tail"):
        decode(query, *states, tail, tail, packed_length=192, scaling=1, sink_tokens=(sinks, sinks))
    with pytest.raises(ValueError, match="with stride 1 in the last dimension"):
        count = torch.zeros((), dtype=torch.int64)
        update(token, token, *states, tail, tail, count, 0, 256, (sinks, sinks))
    assert not looked_up
