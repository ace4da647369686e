"""Latents and rotary keys, stored, read back and updated in Triton's interpreter; and what is refused.

`python tests/kernels/test_latent_store_interpreted.py interpret KIND NAME ...` prints a line per case.
"""

import re
import sys

import pytest
import torch
from kernel_harness import print_line, run_script
from latent_store_cases import CASES, FAST_STEPS, STEPS, Case, compare, read_share
from quantize_cases import check
from update_cases import differences

from tq_cache.backends import _not_for_kernels


def interpret(kind: str, *names: str) -> None:
    torch.set_num_threads(1)
    for name in names:
        if kind == "store":
            print_line(name, compare(CASES[name]))
            print_line(name, *(read_share(CASES[name], "cpu", dtype) for dtype in (torch.float32, torch.float16)))
        else:
            print_line(name, *differences(STEPS[name]))


def test_interpreter_stores_and_reads_what_the_reference_does():
    """In one process, since to start one takes longer than all cases."""
    lines = run_script(__file__, "interpret", "store", *CASES, interpret=True)
    assert [line[0] for line in lines] == [name for name in CASES for _ in range(2)]
    for (_, stored), (name, *shares) in zip(lines[::2], lines[1::2], strict=True):
        check(stored, few=True)
        assert max(shares) <= 1, (name, shares)


def check_steps(*names):
    lines = run_script(__file__, "interpret", "update", *names, interpret=True)
    assert [line[0] for line in lines] == list(names)
    for name, exact, packed in lines:
        assert exact == 0, name  # sinks and ring are copied
        assert packed < 2e-3, (name, packed)  # codes of elements between two, at most


def test_interpreter_updates_as_the_reference_does():
    check_steps(*FAST_STEPS)


@pytest.mark.slow
def test_interpreter_updates_as_the_reference_does_in_all_cases():
    check_steps(*[name for name in STEPS if name not in FAST_STEPS])


# --- Refused ----------------------------------------------------------------------------------------------------------


def small(rank=128, dim=64, rotary="exact", dtype=torch.float32):
    (latent, latents), (rotary_states, rotary_keys) = Case("tq4", rotary, rank, dim, ends=(64,)).make("cpu", dtype)
    return {"key": latent, "value": rotary_states, "keys": latents, "values": rotary_keys, "start": 0}


@pytest.mark.parametrize(
    ("arguments", "changes", "words"),
    [
        ({"rank": 192}, {}, r"latents of one KV head, of rank \(128, 256, 512\).* got 1 KV heads, 192 and 64"),
        ({"dim": 48}, {}, "got 1 KV heads, 128 and 48"),
        ({}, {"values": torch.zeros(1, 1, 64, 64).half()}, r"expected \[1, 1, 64, 64\] in torch.float32"),
        (
            {"dtype": torch.float16},
            {"keys": torch.zeros(1, 1, 64, 128), "values": torch.zeros(1, 1, 64, 64)},
            "as they",
        ),
        ({}, {"keys": torch.zeros(1, 1, 3, 128)}, r"got torch.float32 \[1, 1, 64, 64\]"),
        ({}, {"start": 65}, "room for 129 tokens"),
        ({}, {"start": -1}, "start >= 0, got -1"),
    ],
)
def test_store_says_what_does_not_fit(arguments, changes, words):
    store_pair = pytest.importorskip("tq_cache.backends.triton").store_pair
    given = small(**arguments) | changes
    with pytest.raises(ValueError, match=words):
        store_pair(**given)
    assert (given["key"].packed == 255).all() and (given["value"].packed == -1).all()


def test_nothing_is_stored_or_read():
    triton = pytest.importorskip("tq_cache.backends.triton")
    given = small()
    triton.store_pair(**given | {"keys": given["keys"][:, :, :0], "values": given["values"][:, :, :0]})
    for states in (given["key"], given["value"]):
        assert triton.dequantize(states, 0, torch.float16).shape == (1, 1, 0, states.head_dim)


def test_decode_refuses_what_is_as_wide_as_latents():
    decode = pytest.importorskip("tq_kernels.decode.plan").decode
    with pytest.raises(ValueError, match="at most 256, got 512 and 64"):
        x = torch.zeros(1, 1, 4, 512)
        decode(x, None, None, x, x[..., :64], packed_length=0, scaling=1.0)


@pytest.mark.parametrize(
    ("kv_heads", "dims", "reason"),
    [
        *[(1, (rank, dim), None) for rank in (128, 256, 512) for dim in (0, 32, 64)],
        (8, (256, 256), None),
        (1, (128, 128), None),
        (1, (64, 64), None),
        (8, (192, 64), None),
        (1, (512, 512), "head_dim up to 256, got 512"),
        (2, (512, 64), "head_dim up to 256, got 512"),
        (1, (32, 16), "rotary keys of .*, got 32 and 16"),
        (1, (384, 64), "latents of .*, got 384 and 64"),
        (1, (512, 48), "got 512 and 48"),
    ],
)
def test_which_widths_go_to_the_kernels(kv_heads, dims, reason):
    found = _not_for_kernels(torch.bfloat16, kv_heads, *dims)
    assert (found is None) == (reason is None)
    assert reason is None or re.search(reason, found)


if __name__ == "__main__":
    interpret(*sys.argv[2:])
