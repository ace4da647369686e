"""The measures: against numbers worked out otherwise, and on the embedded model."""

import json
import math

import pytest
import torch
from transformers import DynamicCache, Qwen3Config, Qwen3ForCausalLM

from tq_cache import TurboQuantCache
from tq_cache.tools.evaluate import EvalSettings, decode_logits, evaluate, recalls, steps, text_scores
from tq_cache.tools.runs import demo_case, encode, generate, load_model, make_cache, run_demo

SKIP = ("sliding_window",)


@pytest.fixture(scope="module")
def tiny():
    torch.manual_seed(0)
    sizes = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 64, "head_dim": 32}
    config = Qwen3Config(num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, **sizes)
    return Qwen3ForCausalLM(config).eval()


def test_text_scores_of_known_distributions():
    exact = torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.8, 0.1]]).log()
    other = torch.tensor([[0.25, 0.5, 0.25], [0.1, 0.8, 0.1]]).log()
    loss, kl, top1 = text_scores(other, exact, torch.tensor([1, 1]))
    assert loss == pytest.approx(-(math.log(0.5) + math.log(0.8)) / 2)
    assert kl == pytest.approx((0.5 * math.log(2) + 0.25 * math.log(0.5)) / 2)
    assert top1 == 0.5
    assert text_scores(exact, exact, torch.tensor([0, 1]))[1:] == (0.0, 1.0)


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_decode_logits_are_those_of_one_forward(tiny, chunk):
    ids = torch.randint(0, 97, (61,))
    logits = decode_logits(tiny, ids, 40, chunk, DynamicCache(config=tiny.config))
    with torch.no_grad():
        whole = tiny(ids[None]).logits[0]
    torch.testing.assert_close(logits, whole[40:60], atol=1e-4, rtol=1e-4)


def test_only_positions_that_read_packed_keys_differ(tiny):
    """With nothing packed before the decode a cache changes nothing; packed at once it does, from the first one on."""
    ids = torch.randint(0, 97, (80,))
    exact = decode_logits(tiny, ids, 64, 1, make_cache(tiny, None))
    kept = decode_logits(tiny, ids, 64, 1, make_cache(tiny, "tq2", residual_length=128, skip_layers=()))
    packed = decode_logits(tiny, ids, 64, 1, make_cache(tiny, "tq2", residual_length=0, skip_layers=()))
    torch.testing.assert_close(kept, exact, atol=1e-4, rtol=1e-4)
    assert (packed - exact).abs().amax(dim=-1).min() > 1e-4


def test_recall_forces_the_answer(tiny):
    """Right at every position, or not recalled; the model's own greedy continuation always is."""
    prompt = torch.randint(0, 97, (50,))
    with torch.no_grad():
        out = tiny.generate(prompt[None], max_new_tokens=6, min_new_tokens=6, do_sample=False, pad_token_id=0)[0]
    assert recalls(tiny, out, 6, make_cache(tiny, None))
    for wrong in (50, 53, 55):
        changed = out.clone()
        changed[wrong] = (changed[wrong] + 1) % 97
        assert not recalls(tiny, changed, 6, make_cache(tiny, None))


def test_make_cache_sets_the_attention_that_goes_with_it(tiny):
    assert isinstance(make_cache(tiny, "tq4", skip_layers=()), TurboQuantCache)
    assert tiny.config._attn_implementation == "turboquant"
    assert type(make_cache(tiny, None)) is DynamicCache
    assert tiny.config._attn_implementation == "sdpa"


def test_evaluate_embedded_model(embedded, tmp_path):
    model, tokenizer = embedded
    settings = EvalSettings(
        *(320, 32), texts=1, cases=1, depths=(0.2, 0.8), kinds=("passkey",), residual_length=0, skip_layers=SKIP
    )
    calls = []
    result = evaluate(model, tokenizer, ["fp8_e4m3", "tq2"], settings, advance=lambda: calls.append(None))
    assert len(calls) == steps(["fp8_e4m3", "tq2"], settings)
    exact, fine, coarse = result.rows
    assert (exact.name, exact.kl, exact.top1, exact.bits_per_element) == ("16-bit", 0.0, 1.0, 16.0)
    assert exact.recall == {"0.2": 1.0, "0.8": 1.0}
    assert fine.recall == exact.recall
    assert 0 < fine.kl < 0.01 and 2 * fine.kl < coarse.kl < 1
    assert fine.perplexity == pytest.approx(exact.perplexity, rel=0.02)
    assert 1 < exact.perplexity < 20
    assert 8 < fine.bits_per_element < 8.2 and 2 < coarse.bits_per_element < 2.6
    result.save_json(tmp_path / "result.json")
    saved = json.loads((tmp_path / "result.json").read_text())
    assert saved["rows"][2]["kl"] == coarse.kl and saved["settings"]["context"] == 320
    pytest.importorskip("matplotlib")
    result.save_plot(tmp_path / "result.png")
    assert (tmp_path / "result.png").stat().st_size > 10_000


def test_text_of_the_user(embedded):
    model, tokenizer = embedded
    settings = EvalSettings(64, 16, texts=2, cases=0, skip_layers=SKIP)
    text = "Mira was the baker of Belmar. " * 100
    result = evaluate(model, tokenizer, [], settings, text)
    assert result.rows[0].recall == {} and result.rows[0].perplexity < 3
    with pytest.raises(ValueError, match="expected a text of 2 x 81 tokens or more, got"):
        evaluate(model, tokenizer, [], settings, "too short")


def test_bad_settings():
    with pytest.raises(ValueError, match="1 or more"):
        EvalSettings(context=0)


def test_demo_runs(embedded):
    model, tokenizer = embedded
    case = demo_case(tokenizer, 512)
    assert case.answer in case.prompt
    runs = run_demo(model, tokenizer, case, ["tq4"], residual_length=64, skip_layers=SKIP)
    exact, packed = runs
    assert [run.name for run in runs] == ["DynamicCache", "tq4"]
    assert case.matches(exact.text) and case.matches(packed.text)
    assert packed.agreement(exact) == 1.0
    # float32: keys and values of 8 layers, 2 KV heads and 64 elements, for all tokens but the newest
    held = len(encode(tokenizer, case.prompt)) + len(exact.tokens) - 1
    assert exact.nbytes == 8 * 2 * held * 2 * 64 * 4 and exact.bits_per_element == 32
    assert packed.bytes_16bit == exact.bytes_16bit and packed.ratio > 1.5
    assert exact.tokens_per_second > 0 and exact.prefill_seconds > 0


def test_agreement_counts_missing_tokens(embedded):
    model, tokenizer = embedded
    runs = [generate(model, tokenizer, "Mira was", make_cache(model, None), n) for n in (4, 8)]
    assert runs[0].agreement(runs[1]) == 0.5 and runs[1].agreement(runs[0]) == 0.5


def test_generate_says_what_is_missing(embedded, tmp_path):
    model, tokenizer = embedded
    with pytest.raises(ValueError, match="expected a prompt"):
        generate(model, tokenizer, "Mira", make_cache(model, None), 0)
    with pytest.raises(ValueError, match="expected a model folder"):
        load_model(tmp_path)
