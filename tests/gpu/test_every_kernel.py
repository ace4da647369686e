"""Every kernel once, on small shapes: what `scripts/sanitize.sh` runs under compute-sanitizer.

Errors are budgeted elsewhere; here launches are to be few, of every kernel, and right.
"""

import re
from dataclasses import replace
from pathlib import Path

import decode_cases
import dequantize_cases
import latent_decode_cases
import latent_store_cases
import pytest
import torch
import update_cases
from error_budget import Roundings, assert_within, relative_error
from prefill_cases import CASES as PREFILL
from prefill_cases import expect as expect_prefill
from prefill_cases import run_kernel as run_prefill
from quantize_cases import CASES as QUANTIZED
from quantize_cases import append_case
from quantize_cases import check as check_quantized
from quantize_cases import compare as compare_quantized

from tq_cache.backends import quantizers

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
BF16 = torch.bfloat16
LAUNCHED: set[str] = set()


@pytest.fixture(autouse=True)
def noted(monkeypatch):
    """Notes the names of all kernels that are launched."""
    from tq_kernels.launch import Launch

    run = Launch.run

    def note(launch):
        LAUNCHED.add(launch.program.kernel.__name__)
        run(launch)

    monkeypatch.setattr(Launch, "run", note)


@pytest.mark.parametrize("name", ["padding", "4bit_nc", "two widths", "fp8", "queries"])
def test_decode(name):
    cases = decode_cases.FEATURES | {
        "4bit_nc": decode_cases.Case("4bit_nc", tokens=130, tail=20, sinks=4),
        "fp8": decode_cases.Case("fp8_e4m3", tokens=130, tail=20),  # inside a block
    }
    case = cases[name]
    view, query = case.view("cuda", BF16), case.query("cuda", BF16)
    mask, options = case.make_mask(view.length, "cuda"), case.make_options("cuda")
    out, lse = decode_cases.run_kernel(case, view, query, mask, options)
    roundings = Roundings.of_kernels(BF16, float8=True)
    assert_within(out, lse, decode_cases.expect(case, view, query, mask, options, roundings))


def test_decode_of_a_preallocated_layer():
    assert max(decode_cases.compare_static(*decode_cases.FAST_STATIC[0], "cuda", BF16)) <= 1


def test_decode_of_exact_tokens():
    assert max(decode_cases.compare_exact(70, 5, "cuda", BF16)) <= 1


@pytest.mark.parametrize("name", ["tail and sinks", "512, fp8", "many splits", "chosen", "nothing packed"])
@pytest.mark.parametrize("rows", [False, True])
def test_latents(name, rows):
    case = latent_decode_cases.CASES[name]
    if rows and not (latent_decode_cases.takes_rows(case) and torch.cuda.get_device_capability() == (9, 0)):
        return  # tokens as rows are for Hopper, and for some formats
    assert max(latent_decode_cases.compare(case, rows, "cuda", BF16)) <= 1


@pytest.mark.parametrize("rows", [False, True])
def test_latents_of_a_preallocated_layer(rows):
    if not rows or torch.cuda.get_device_capability() == (9, 0):
        case = latent_decode_cases.STATIC["a ring that has wrapped"]
        assert max(latent_decode_cases.compare_static(case, rows, "cuda", BF16, masks=("", "rows"))) <= 1


@pytest.mark.parametrize("name", ["everything", "padding", "nothing packed"])
def test_prefill(name):
    check_prefill(PREFILL[name])


def test_prefill_by_segments(monkeypatch):
    if torch.cuda.get_device_capability() >= (9, 0):  # whose cuDNN it needs
        monkeypatch.setattr("tq_kernels.prefill.tuning.SEGMENT_UNIT", 128)
        check_prefill(replace(PREFILL["segments"], dim=64))


def check_prefill(case):
    view, query = case.view("cuda", BF16), case.query("cuda", BF16)
    options = case.options(view.length, "cuda")
    assert_within(*run_prefill(case, query, view, **options), expect_prefill(query, view, **options))


def test_append():
    assert append_case("cuda")


@pytest.mark.parametrize("name", ["tq4", "special, 3bit_nc", "special, k8v4"])
def test_quantize(name):
    check_quantized(compare_quantized(QUANTIZED[name], "cuda", BF16), few=True)


@pytest.mark.parametrize("role, name", [("key", "tq3"), ("value", "uniform4"), ("value", "fp8_e5m2")])
def test_dequantize(role, name):
    case = dequantize_cases.Case(role, name, dim=64, calibrated=True)
    states = case.states("cuda")
    expected = quantizers.dequantize(states, case.length, torch.float64)
    assert relative_error(dequantize_cases.run_kernel(states, case.length, BF16), expected) < 1e-2


@pytest.mark.parametrize("name", ["tq4", "k8v4"])
def test_update(name):
    assert update_cases.differences(update_cases.CASES[name], "cuda", BF16)


@pytest.mark.parametrize("name", ["tq3, 512", "fp8_e4m3, 512"])
def test_store_and_read_latents(name):
    case = latent_store_cases.CASES[name]
    assert latent_store_cases.compare(case, "cuda", BF16)
    assert latent_store_cases.read_share(case, "cuda", BF16) <= 1


def test_update_latents():
    case = next(iter(latent_store_cases.STEPS.values()))
    assert update_cases.differences(case, "cuda", BF16)


def test_every_kernel_was_launched(request):
    """Of those in the kernels' folder; nothing is said where tests of this file were left out or run elsewhere."""
    root = Path(__file__).parents[2] / "kernels" / "tq_kernels"
    decorated = r"@triton\.jit[^\n]*\ndef (\w+_kernel)\("
    kernels = {name for file in root.rglob("*.py") for name in re.findall(decorated, file.read_text())}
    assert len(kernels) > 15
    hopper = {"latent_rows_kernel", "dequantize_segment_kernel"}
    missing = kernels - LAUNCHED - (set() if torch.cuda.get_device_capability() >= (9, 0) else hopper)
    whole = (
        not hasattr(request.config, "workerinput")
        and not request.config.getoption("keyword")
        and "::" not in " ".join(request.config.args)
    )
    assert not missing or not whole, missing
