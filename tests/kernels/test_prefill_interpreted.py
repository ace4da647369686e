"""The prefill kernels in Triton's interpreter, against attention in float64; and what `prefill` refuses.

`python test_prefill_interpreted.py NAME ...` prints a line per case of `prefill_cases.CASES`.
"""

import math
import sys
from dataclasses import replace

import pytest
import torch
from error_budget import ratios
from kernel_harness import print_line, run_script
from prefill_cases import CASES, FAST, Case, expect, run_kernel


def interpret(*names: str) -> None:
    """Prints the shares of the error budgets that the kernels take, in float32."""
    from tq_kernels.prefill import segments, tuning

    torch.set_num_threads(1)
    tuning.SEGMENT, tuning.SEGMENT_UNIT, tuning.QUERY_UNIT = 128, 64, 16
    segments._cudnn_attention = _plain_attention
    prefill_splits = tuning.prefill_splits
    for name in names:
        case = CASES[name]
        config = tuning.LaunchConfig(tuning.Tile(16, case.tokens or 64), 4)
        tuning.choose_packed = lambda *_, config=config: config
        tuning.prefill_splits = (lambda *_, splits=case.splits: splits) if case.splits else prefill_splits
        query, view = case.query(), case.view()
        options = case.options(view.length)
        print_line(name, *ratios(*run_kernel(case, query, view, **options), expect(query, view, **options)))


def _plain_attention(query, keys, values):
    """What `segments._cudnn_attention` computes."""
    from tq_kernels.prefill.arguments import Attended

    scores = query.unflatten(1, (keys.shape[1], -1)) @ keys[:, :, None].mT * math.log(2)
    return Attended((scores.softmax(-1) @ values[:, :, None]).flatten(1, 2), scores.logsumexp(-1).flatten(1, 2))


def check_interpreted(names) -> None:
    lines = run_script(__file__, *names, interpret=True)
    assert {line[0] for line in lines} == set(names)
    for name, *shares in lines:
        assert all(share <= 1 for share in shares), (name, *shares)


def test_interpreted_equals_reference():
    check_interpreted(FAST)


@pytest.mark.slow
def test_interpreted_equals_reference_in_all_cases():
    check_interpreted([name for name in CASES if name not in FAST])


# --- Refused ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(exact=10), "expected the 18 tokens of the queries among the exact ones, got 10"),
        (dict(dim=272), "expected a head_dim of at most 256, got 272"),
        (dict(heads=3), "H_q a multiple of H_kv"),
    ],
)
def test_refuses_shapes(changes, message):
    pytest.importorskip("triton")
    case = replace(Case(), **changes)
    view = case.view()
    with pytest.raises(ValueError, match=message):
        run_kernel(case, case.query(), view, **case.options(view.length))


def test_refuses_what_does_not_fit():
    pytest.importorskip("triton")
    case = Case(packed=64)
    view = case.view()
    options = case.options(view.length)
    with pytest.raises(ValueError, match="expected room for 193 tokens"):
        run_kernel(case, case.query(), replace(view, packed_length=193), **options)
    with pytest.raises(ValueError, match="expected a mask .* 18, 89 or more"):
        mask = torch.ones(1, 1, 18, 88, dtype=torch.bool)
        run_kernel(case, case.query(), view, **options | dict(mask=mask))
    with pytest.raises(ValueError, match="no softcap with segments=True"):
        run_kernel(replace(case, segments=True), case.query(), view, **options | dict(softcap=1.0))
    with pytest.raises(ValueError, match="of one dtype"):
        run_kernel(case, case.query().half(), view, **options)
    with pytest.raises(ValueError, match="expected packed keys"):
        run_kernel(case, case.query(), replace(view, key=None), **options)


if __name__ == "__main__":
    interpret(*sys.argv[1:])
