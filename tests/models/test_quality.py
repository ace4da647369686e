"""Quality on the embedded model, every layer packed and no residual: recall at depth, and KL in its order."""

import pytest

from tq_cache.tools.evaluate import EvalSettings, evaluate

EVERYTHING_PACKED = dict(residual_length=0, skip_layers=(), boundary_layers=0)


def recall(embedded, preset: str, **settings) -> float:
    model, tokenizer = embedded
    result = evaluate(model, tokenizer, [preset], EvalSettings(texts=1, decode=16, **EVERYTHING_PACKED, **settings))
    exact, packed = (sum(row.recall.values()) / len(row.recall) for row in result.rows)
    assert exact >= 0.98, "the model itself, with the 16-bit cache"
    return packed


@pytest.mark.parametrize("preset", ["4bit_nc", "tq4", "tq3"])
def test_recall(embedded, preset):
    """At 768 tokens, 2 kinds x 3 depths x 3 cases."""
    assert recall(embedded, preset, context=768, cases=3) >= 0.98


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["4bit_nc", "tq4", "tq3"])
def test_recall_at_4096_tokens(embedded, preset):
    """2 kinds x 5 depths x 2 cases."""
    assert recall(embedded, preset, context=4096, cases=2, depths=(0.0, 0.25, 0.5, 0.75, 1.0)) >= 0.98


def test_more_bits_are_better(embedded):
    model, tokenizer = embedded
    settings = EvalSettings(context=256, decode=128, texts=2, cases=0, **EVERYTHING_PACKED)
    presets = ["fp8_e4m3", "tq4", "tq3", "tq2"]
    kl = [row.kl for row in evaluate(model, tokenizer, presets, settings).rows]
    assert kl[0] == 0 and kl == sorted(kl)
