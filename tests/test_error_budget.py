"""The error budgets let roundings pass and small faults not."""

from dataclasses import replace

import pytest
import torch
from error_budget import Expected, Roundings, attention, exact_parts, ratios, seeded

from tq_cache.backends import reference
from tq_cache.formats.presets import resolve_preset
from tq_cache.storage.growing import GrowingStorage

TOKENS = 300  # 256 of them packed


def case(dtype: torch.dtype):
    """A view and a query for it; keys and values have a centre."""
    generator, storage = seeded(0), GrowingStorage(resolve_preset("tq4", center="both"), 30, 0, "reference")
    storage.append(*((torch.randn(2, 2, TOKENS, 64, generator=generator) + 0.5).to(dtype) for _ in range(2)))
    return storage.view(), torch.randn(2, 4, 3, 64, generator=generator).to(dtype)


def with_calibration(view, role: str, **parts):
    states = getattr(view, role)
    return replace(view, **{role: replace(states, calibration=replace(states.calibration, **parts))})


def moved(x: torch.Tensor, factor: float, *place: int) -> torch.Tensor:
    x = x.clone()
    x[place] *= factor
    return x


def scaled(view, role: str, factor: float):
    states = getattr(view, role)
    return replace(view, **{role: replace(states, scale=states.scale * factor)})


MASK = torch.ones(1, 1, 1, TOKENS, dtype=torch.bool)
# What a kernel might get wrong: (view, mask) to those that attention is then given.
FAULTS = {
    "one token dropped": lambda view: (view, moved(MASK.int(), 0, 0, 0, 0, 100).bool()),
    "the newest token dropped": lambda view: (view, moved(MASK.int(), 0, 0, 0, 0, -1).bool()),
    "keys 1 % too large": lambda view: (scaled(view, "key", 1.01), MASK),
    "values 3 % too large": lambda view: (scaled(view, "value", 1.03), MASK),
    "no centre in a head": lambda view: (
        with_calibration(view, "value", center=moved(view.value.calibration.center, 0.0, 1, 1)), MASK),
    "one scale of a value forgotten": lambda view: (
        replace(view, value=replace(view.value, scale=moved(view.value.scale, 0.0, 0, 1, 77))), MASK),
}  # fmt: skip


def found(dtype: torch.dtype, of=Roundings.of_reference, fault=lambda view: (view, MASK), damage=lambda out: out):
    view, query = case(dtype)
    expected = attention(query, *exact_parts(view), None, 0.125, of(dtype))
    wrong, mask = fault(view)
    out, lse = reference.attend(query, wrong, mask, 0.125)
    return ratios(damage(out), lse, expected)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16), ids=str)
def test_right_attention_is_within(dtype):
    assert max(found(dtype)) < 0.7


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16), ids=str)
def test_a_small_fault_is_not(fault, dtype):
    share = max(found(dtype, fault=FAULTS[fault]))
    assert share > 1, share


@pytest.mark.parametrize("of", (Roundings.of_reference, Roundings.of_kernels))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16), ids=str)
def test_an_output_1_percent_too_large_is_not(dtype, of):
    assert found(dtype, of, damage=lambda out: 1.01 * out).norm > 1


@pytest.mark.parametrize(("dtype", "factor"), [(torch.float32, 1 + 1e-4), (torch.bfloat16, 1.5), (torch.float16, 1.1)])
def test_one_wrong_element_is_not(dtype, factor):
    def damage(out):
        return moved(out, factor, 1, 2, 1, int(out[1, 2, 1].abs().argmax()))

    assert found(dtype, damage=damage).row > 1


@pytest.mark.parametrize("place", ("out", "lse"))
def test_nothing_that_is_not_a_number_is(place):
    expected = Expected(torch.ones(1, 1, 1, 8), *torch.ones(4, 1, 1, 1))
    out = dict(out=expected.out.clone(), lse=expected.lse.clone())
    assert max(ratios(**out, expected=expected)) == 0
    out[place].fill_(torch.nan)
    assert not all(share <= 1 for share in ratios(**out, expected=expected))


def test_a_row_without_tokens_is_zeros():
    expected = Expected(torch.zeros(1, 1, 1, 8), torch.full((1, 1, 1), -torch.inf), *torch.zeros(3, 1, 1, 1))
    assert max(ratios(expected.out, expected.lse, expected)) == 0
    assert ratios(expected.out + 1e-20, expected.lse, expected).row > 1
    assert ratios(expected.out, torch.zeros(1, 1, 1), expected).lse > 1
