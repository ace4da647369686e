"""The measures: against numbers worked out otherwise, and on the embedded model."""

import json
import math

import pytest
import torch
from transformers import DynamicCache, Qwen3Config, Qwen3ForCausalLM

from tq_cache import TurboQuantCache
from tq_cache.tools.baselines import Candidate, noise_floor, turboquant
from tq_cache.tools.evaluate import EvalSettings, evaluate
from tq_cache.tools.greedy import agreement, compare, greedy_tokens
from tq_cache.tools.recall import RecallCase, recall_cases, recalled, shares
from tq_cache.tools.runs import demo_case, encode, generate, load_model, make_cache, run_demo
from tq_cache.tools.scores import decode, decode_scores, prefill, score
from tq_cache.tools.tables import demo_table

SKIP = ("sliding_window",)


@pytest.fixture(scope="module")
def tiny():
    torch.manual_seed(0)
    sizes = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 64, "head_dim": 32}
    config = Qwen3Config(num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, **sizes)
    return Qwen3ForCausalLM(config).eval()


def decoded(model, ids, start, chunk, cache, prefill_chunk=None):
    """Logits of tokens start + 1 .. T - 1."""
    prefill(model, ids[:, :start], cache, prefill_chunk)
    return torch.cat(list(decode(model, ids, start, chunk, cache)), dim=1)


def test_scores_of_known_distributions():
    exact = torch.tensor([[[0.5, 0.25, 0.25], [0.1, 0.8, 0.1]]]).log()
    other = torch.tensor([[[0.25, 0.5, 0.25], [0.1, 0.8, 0.1]]]).log()
    found = score(other + 3, exact - 2, torch.tensor([[1, 1]]))  # logits: a constant is nothing
    assert found.loss.tolist() == [pytest.approx([-math.log(0.5), -math.log(0.8)])]
    assert found.kl.tolist() == [pytest.approx([0.5 * math.log(2) + 0.25 * math.log(0.5), 0], abs=1e-7)]
    assert found.same.tolist() == [[0, 1]]
    assert score(exact, exact, torch.tensor([[0, 1]])).kl.tolist() == [[0, 0]]


@pytest.mark.parametrize("chunk", [1, 7, 64])
@pytest.mark.parametrize("prefill_chunk", [None, 16])
def test_decoded_logits_are_those_of_one_forward(tiny, chunk, prefill_chunk):
    ids = torch.randint(0, 97, (2, 61))
    logits = decoded(tiny, ids, 40, chunk, DynamicCache(config=tiny.config), prefill_chunk)
    with torch.no_grad():
        whole = tiny(ids).logits
    torch.testing.assert_close(logits, whole[:, 40:60], atol=1e-4, rtol=1e-4)


def test_scores_in_chunks_are_those_of_all_logits(tiny):
    """Also where the exact logits came in other chunks."""
    ids = torch.randint(0, 97, (2, 61))
    everything = {"residual_length": 0, "skip_layers": ()}
    exact = decoded(tiny, ids, 40, 16, make_cache(tiny, None))
    packed = decoded(tiny, ids, 40, 7, make_cache(tiny, "tq2", **everything))
    whole = score(packed, exact, ids[:, 41:])
    cache = make_cache(tiny, "tq2", **everything)
    prefill(tiny, ids[:, :40], cache)
    parts = decode_scores(tiny, ids, 40, 7, cache, exact)
    for name in ("kl", "same", "loss"):
        torch.testing.assert_close(getattr(parts, name), getattr(whole, name))


def test_only_positions_that_read_packed_keys_differ(tiny):
    """With nothing packed before the decode a cache changes nothing; packed at once it does, from the first one on."""
    ids = torch.randint(0, 97, (1, 148))
    packed_at_once = {"residual_length": 0, "skip_layers": ()}
    exact = decoded(tiny, ids, 132, 1, make_cache(tiny, None))
    kept = decoded(tiny, ids, 132, 1, make_cache(tiny, "tq2", residual_length=256, skip_layers=()))
    packed = decoded(tiny, ids, 132, 1, make_cache(tiny, "tq2", **packed_at_once))
    torch.testing.assert_close(kept, exact, atol=1e-4, rtol=1e-4)
    assert (packed - exact).abs().amax(dim=-1).min() > 1e-4


def test_recall_forces_the_answer(tiny):
    """Right at every position, or not recalled; the model's own greedy continuation always is.  As a batch."""
    prompts = torch.randint(1, 97, (2, 50))  # 0 is padding to generate
    with torch.no_grad():
        out = tiny.generate(prompts, max_new_tokens=6, min_new_tokens=6, do_sample=False, pad_token_id=0).tolist()
    answers = [out[0][50:], out[1][50:54]]  # of other lengths
    cases = [RecallCase("copy", 0.5, row[:50], answer) for row, answer in zip(out, answers, strict=True)]
    assert recalled(tiny, cases, make_cache(tiny, None)) == [True, True]
    for wrong in (0, 3):
        for index, case in enumerate(cases):
            changed = list(case.answer)
            changed[wrong] = (changed[wrong] + 1) % 97
            other = [RecallCase("copy", 0.5, case.prompt, changed) if x is case else x for x in cases]
            assert recalled(tiny, other, make_cache(tiny, None)) == [index != 0, index != 1]


def test_recall_prompts_are_equally_long_and_hold_the_fact(embedded):
    tokenizer = embedded[1]
    cases = recall_cases(tokenizer, 200, ("passkey", "recall"), (0.0, 0.9), 2, 0)
    assert [(x.kind, x.depth) for x in cases[::2]] == [
        *[("passkey", 0.0), ("recall", 0.0), ("passkey", 0.9), ("recall", 0.9)]
    ]
    assert len({len(x.prompt) for x in cases}) == 1 and 150 < len(cases[0].prompt) <= 202
    assert all(tokenizer.decode(x.answer).strip() in tokenizer.decode(x.prompt) for x in cases)
    assert recall_cases(tokenizer, 200, ("passkey",), (0.5,), 0, 0) == []
    assert shares(["a", "b", "a"], [True, False, False]) == {"a": 0.5, "b": 0.0}


def test_agreement_stops_at_the_first_difference():
    same = torch.tensor([[1, 1, 0, 1], [1, 1, 1, 1], [1, 0, 0, 0]], dtype=torch.bool)
    found = compare(same)
    assert found.first.tolist() == [2, 4, 1] and found.same.tolist() == [0.75, 1, 0.25]


def test_the_first_difference_is_that_of_two_greedy_runs(tiny):
    """Where a run of its own, a token a forward, parts from the exact one."""
    prompts = torch.randint(1, 97, (4, 132))  # 0 is padding to generate
    cache = make_cache(tiny, None)
    ids = greedy_tokens(tiny, prompts, prefill(tiny, prompts, cache), cache, 24)
    with torch.no_grad():
        own = tiny.generate(prompts, max_new_tokens=24, min_new_tokens=24, do_sample=False, pad_token_id=0)
        assert torch.equal(ids, own)
        cache = make_cache(tiny, "tq2", residual_length=0, skip_layers=())
        free = tiny.generate(
            prompts, past_key_values=cache, max_new_tokens=24, min_new_tokens=24, do_sample=False, pad_token_id=0
        )
    cache = make_cache(tiny, "tq2", residual_length=0, skip_layers=())
    prefill(tiny, prompts, cache)
    assert agreement(tiny, ids, 132, 1, cache).first.tolist() == compare((free == ids)[:, 132:]).first.tolist()
    exact = make_cache(tiny, None)
    prefill(tiny, prompts, exact)
    assert agreement(tiny, ids, 132, 7, exact).first.tolist() == [24] * 4


def test_make_cache_sets_the_attention_that_goes_with_it(tiny):
    assert isinstance(make_cache(tiny, "tq4", skip_layers=()), TurboQuantCache)
    assert tiny.config._attn_implementation == "turboquant"
    assert type(make_cache(tiny, None)) is DynamicCache
    assert tiny.config._attn_implementation == "sdpa"


def test_evaluate_embedded_model(embedded, tmp_path):
    model, tokenizer = embedded
    settings = EvalSettings(
        *(320, 32), texts=2, cases=1, depths=(0.2, 0.8), kinds=("passkey",), residual_length=0, greedy=8, group=1
    )
    calls = []
    result = evaluate(model, tokenizer, ["fp8_e4m3", "tq2"], settings, advance=calls.append)
    assert calls == list(result.rows)
    exact, fine, coarse = result.rows
    assert (exact.name, exact.kl, exact.kl_se, exact.top1, exact.dlogppl) == ("16-bit", 0, 0, 1, 0)
    assert exact.recall == {"0.2": 1.0, "0.8": 1.0} and exact.recall_by_kind == {"passkey": 1.0}
    assert fine.recall == exact.recall and fine.setting == "given"
    assert 0 < fine.kl < 0.01 and 2 * fine.kl < coarse.kl < 1
    assert fine.kl < fine.kl_p99 <= fine.kl_p999 and sum(fine.kl_by_quarter) / 4 == pytest.approx(fine.kl)
    assert fine.ppl == pytest.approx(exact.ppl, rel=0.02) and 1 < exact.perplexity < 20
    assert fine.dlogppl == pytest.approx(math.log(fine.ppl / exact.ppl))
    assert exact.greedy_agreement == 1 and fine.greedy_first >= coarse.greedy_first and fine.texts == 2
    assert exact.bytes_per_token == 256 and coarse.bytes_per_token < fine.bytes_per_token < 256
    result.save_json(tmp_path / "result.json")
    saved = json.loads((tmp_path / "result.json").read_text())
    assert saved["rows"][2]["kl"] == coarse.kl and saved["settings"]["context"] == 320
    pytest.importorskip("matplotlib")
    result.save_plot(tmp_path / "result.png")
    assert (tmp_path / "result.png").stat().st_size > 10_000


def test_texts_in_groups_are_those_at_once(embedded):
    model, tokenizer = embedded
    at_once, one = (
        evaluate(model, tokenizer, ["tq4"], EvalSettings(128, 16, texts=3, cases=0, residual_length=0, group=group))
        for group in (3, 2)
    )
    assert one.rows[1].kl == pytest.approx(at_once.rows[1].kl, rel=1e-2)
    assert one.rows[1].bytes_per_token == pytest.approx(at_once.rows[1].bytes_per_token)


def test_the_noise_floor_is_rounding(embedded):
    model, tokenizer = embedded
    result = evaluate(model, tokenizer, noise_floor(), EvalSettings(128, 32, texts=1, cases=0, greedy=8))
    for row in result.rows[1:]:
        assert 0 < row.kl < 1e-8 and row.top1 == 1 and row.greedy_agreement == 1
        assert row.kl_se is None and abs(row.dlogppl) < 1e-5


def test_what_cannot_run_is_listed_with_its_reason(embedded):
    model, tokenizer = embedded

    def broken(model):
        raise ImportError("no such\npackage")

    settings = EvalSettings(64, 16, texts=1, cases=0)
    rows = []
    result = evaluate(model, tokenizer, [Candidate("a", "b", broken, foreign=True)], settings, advance=rows.append)
    assert len(result.rows) == 1 and rows[1] is result.not_run[0]
    assert (result.not_run[0].preset, result.not_run[0].reason) == ("a", "ImportError: no such package")
    with pytest.raises(ImportError):  # one of ours is no row but an error
        evaluate(model, tokenizer, [Candidate("a", "b", broken)], settings)


@pytest.mark.filterwarnings("ignore:no layer of this model will be packed")
def test_a_setting_leaves_the_rest_to_the_constructor(tiny):
    own, packed = (turboquant("tq4", setting).make(tiny) for setting in ("default", "all_packed"))
    assert [plan.packed for plan in own.plans] == [plan.packed for plan in TurboQuantCache(tiny.config, "tq4").plans]
    assert all(plan.packed for plan in packed.plans) and packed.layers[0].storage.residual_length == 0
    assert EvalSettings().cache_kwargs == {} and EvalSettings(skip_layers=()).cache_kwargs == {"skip_layers": ()}


def test_bad_settings():
    with pytest.raises(ValueError, match="1 or more"):
        EvalSettings(context=0)


def test_demo_runs(embedded):
    model, tokenizer = embedded
    case = demo_case(tokenizer, 512)
    assert case.answer in case.prompt
    runs = run_demo(model, tokenizer, case, ["tq4"], residual_length=0, skip_layers=SKIP)
    exact, packed = runs
    assert [run.name for run in runs] == ["DynamicCache", "tq4"]
    assert case.matches(exact.text) and case.matches(packed.text)
    assert packed.agreement(exact) == 1.0
    # float32: keys and values of 8 layers, 2 KV heads and 64 elements, for all tokens but the newest
    held = len(encode(tokenizer, case.prompt)) + len(exact.tokens) - 1
    assert exact.nbytes == 8 * 2 * held * 2 * 64 * 4 == 2 * exact.nbytes_16bit
    assert exact.bits_per_element == 16 and exact.ratio == 1  # compared as a 16-bit model, which it is elsewhere
    assert packed.bytes_16bit == exact.bytes_16bit and packed.ratio > 1.5
    caption = str(demo_table(case, runs, model.device).caption)
    assert "the model runs in float32 on cpu; KV bytes are those of the same caches in a 16-bit model" in caption
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
