"""`report()` as people read it: equal layers in one row, and no saving claimed before there is one."""

import pytest
import torch
from transformers import LlamaConfig

from tq_cache import TurboQuantCache
from tq_cache.report import held_bytes


def filled(tokens, dtype=torch.bfloat16, layers=4, **options):
    config = LlamaConfig(hidden_size=256, num_attention_heads=2, num_key_value_heads=2, num_hidden_layers=layers)
    cache, generator = TurboQuantCache(config, **options), torch.Generator().manual_seed(0)
    for index in range(layers):
        cache.update(*torch.randn(2, 1, 2, tokens, 128, generator=generator).to(dtype).unbind(), index)
    return cache


def rows(report):
    lines = [[cell.strip() for cell in line.split("│")[1:-1]] for line in str(report).splitlines() if "│" in line]
    return [line for line in lines if line[0]]  # without second lines of long cells


def test_equal_layers_are_one_row():
    cache = filled(700, skip_layers=("boundary", 4), boundary_layers=1, layers=8)
    report = cache.report()
    assert [row[0] for row in rows(report)] == ["0, 7", "1-3, 5-6", "4", "all"]
    first, packed, _, whole = rows(report)
    assert first[3:5] == ["0", "700"] and packed[3:5] == ["512", "188"]
    own = 2 * 2 * 700 * 128 * 2
    assert packed[5:7] == [f"{5 * held_bytes(cache.layers[1]):,}", f"{5 * own:,}"]
    assert whole[5:7] == [f"{cache.nbytes:,}", f"{8 * own:,}"]
    assert "bytes in bfloat16" in str(report) and "x smaller than at 16 bits" in str(report)


@pytest.mark.parametrize("options", [
    {}, {"preset": "fp8_e4m3"}, {"preset": "tq2", "residual_length": 256}, {"max_cache_len": 1024},
    {"residual_length": 0},
])  # fmt: skip
def test_savings_begin_where_the_report_says(options):
    """To a fifth: blocks are packed whole."""
    begin = filled(40, layers=1, **options).report().savings_begin
    before, after = (filled(int(begin * share), layers=1, **options).report() for share in (0.8, 1.2))
    assert before.ratio <= 1 < after.ratio and before.savings_begin == after.savings_begin == begin
    packed = before.layers[0].packed_tokens
    line = f"{packed} of {int(begin * 0.8)} tokens are packed: savings begin at about {begin:,} tokens"
    assert str(before).splitlines()[-1] == line and before.held_line() == f"{before.nbytes:,} bytes; {line}"
    assert "smaller" not in str(before) and "savings begin" not in str(after)


def test_a_float32_model_is_compared_as_the_16_bit_model_it_is_elsewhere():
    """Exact tokens take twice the bytes, which would hide or flatter what packing saves."""
    wide, half = filled(700, torch.float32).report(), filled(700).report()
    assert wide.nbytes > half.nbytes and wide.own_bytes == 2 * half.own_bytes
    assert wide.nbytes_16bit == half.nbytes_16bit == half.nbytes
    assert wide.ratio == half.ratio > 1
    line = (
        f"the model runs in float32: in 16 bits the cache would take {half.nbytes:,} bytes, {half.ratio:.2f}x smaller"
    )
    assert line in " ".join(str(wide).split())


def test_a_cache_that_packs_nothing_says_so():
    with pytest.warns(UserWarning, match="no layer of this model will be packed"):
        report = filled(300, skip_layers=(0, 1, 2, 3)).report()
    assert str(report).endswith("no layer is packed") and report.savings_begin == 0


def test_an_empty_cache_claims_nothing():
    report = TurboQuantCache(LlamaConfig(hidden_size=256, num_attention_heads=2, num_hidden_layers=2)).report()
    assert report.ratio == 0 and "smaller" not in str(report) and "packed:" not in str(report)
    assert [row[0] for row in rows(report)] == ["0-1", "all"]
