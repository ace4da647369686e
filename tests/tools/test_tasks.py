"""The text tasks: the same text from the same seed, facts at their depth, answers, lengths; the embedded folder."""

import hashlib
import random
from pathlib import Path

import pytest
from transformers import AutoConfig

import tq_cache
from tq_cache.tools.tasks import KINDS, Case, build_case, heldout_text, make_task, story, story_text

EMBEDDED = Path(tq_cache.__file__).parent / "tools/embedded"
# The embedded model was trained on these texts: a changed word or template shows here.
PINNED = {
    "passkey": "5f67869a5047d5b9",
    "recall": "df6197ffd84a8a3e",
    "copy": "d21b05bebeeecfcc",
    "ledger": "b10436cd29b5973a",
    "story": "a05f333f7818b162",
    "heldout": "7d163f5c7abc7725",
}


def words(text: str) -> int:
    """A tokenizer that counts words."""
    return len(text.split())


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def fact_marker(case: Case) -> str:
    """How the text of the fact that is asked begins."""
    asked = case.prompt.rsplit("Question: ", 1)[1]
    if case.kind == "passkey":
        return f"The secret code of {asked.split(' of ')[1].split('?')[0]} is {case.answer}."
    if case.kind == "copy":
        return f"Memo {asked.split('memo ')[1].split(' ')[0]}: {case.answer}."
    return {"recall": "List of prices.", "ledger": "Ledger of coins."}[case.kind]


@pytest.mark.parametrize("kind", KINDS)
def test_cases_are_pinned(kind: str):
    case = build_case(kind, 600, words, seed=3, depth=0.5)
    assert case == build_case(kind, 600, words, seed=3, depth=0.5)
    assert digest(case.prompt + case.target) == PINNED[kind]


def test_stories_are_pinned():
    assert digest(story(random.Random("story"))) == PINNED["story"]
    assert digest(heldout_text(500, words, seed=1)) == PINNED["heldout"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("depth", [0.0, 0.25, 0.5, 0.9, 1.0])
def test_the_fact_lies_at_its_depth(kind: str, depth: float):
    case = build_case(kind, 3000, words, seed=5, depth=depth)
    marker = fact_marker(case)
    assert case.prompt.count(marker) == 1
    before, after = case.prompt.split(marker)
    assert case.depth == depth
    # Blocks lie before their share of the filler, so they count on neither side.
    after = after.rsplit("\n\nQuestion: ", 1)[0]
    if kind in ("recall", "ledger"):
        after = after.partition("\n\n")[2]
    assert words(before) / words(before + after) == pytest.approx(depth, abs=0.03)


@pytest.mark.parametrize("kind", KINDS)
def test_the_prompt_holds_the_answer(kind: str):
    for seed in range(10):
        case = build_case(kind, 400, words, seed=seed)
        context, _, asked = case.prompt.rpartition("\n\nQuestion: ")
        assert case.answer in context and case.answer not in asked
        assert case.prompt.endswith("\nAnswer:")
        assert case.target == " " + case.answer


def test_recall_answers_are_of_the_key_asked():
    case = build_case("recall", 500, words, seed=2)
    key = case.prompt.rsplit("price of the ", 1)[1].split("?")[0]
    assert f"\n{key}: {case.answer}\n" in case.prompt


def test_ledger_answers_are_the_last_total():
    case = build_case("ledger", 500, words, seed=2)
    name = case.prompt.rsplit("coins does ", 1)[1].split(" have")[0]
    lines = case.prompt.partition("Ledger of coins.\n")[2].partition("\n\n")[0].splitlines()
    total = 0
    for line in (line for line in lines if line.startswith(name + " ")):
        verb, amount = line.removeprefix(name + " ").split()[:2]
        if verb == "starts":
            total = int(line.split()[-2])
        else:
            total += int(amount) if verb == "gets" else -int(amount)
            assert line.endswith(f"has {total} coins.")
    assert case.answer == str(total)


def test_matches_wants_exactly_the_answer():
    case = Case("prompt", "4821", "recall", 0.5, 1)
    assert case.matches("4821") and case.matches(" 4821.\n\nQuestion: more") and case.matches("4821 coins")
    assert not case.matches("48213") and not case.matches("482") and not case.matches("it is 4821")


@pytest.mark.parametrize("kind", KINDS)
def test_splits_and_seeds_differ(kind: str):
    prompts = [
        build_case(kind, 300, words, seed, split=split).prompt for split in ("eval", "train") for seed in range(20)
    ]
    assert len(set(prompts)) == len(prompts)


def test_held_out_stories_are_not_training_stories():
    def sentences(text: str) -> set[str]:
        return set(text.replace("\n\n", " ").split(". "))

    heldout = sentences(heldout_text(2000, words))
    for split in ("train", "eval"):
        # Short template sentences without a name may repeat; villages, pets and keepsakes do not.
        shared = heldout & sentences(story_text(2000, words, 0, split))
        assert len(shared) < 0.05 * len(heldout)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n_tokens", [200, 1000, 4000])
def test_prompts_have_about_the_length_asked(kind: str, n_tokens: int):
    for seed in range(3):
        case = build_case(kind, n_tokens, words, seed)
        assert case.length == words(case.prompt)
        assert n_tokens - 40 <= case.length <= n_tokens + 1


def test_story_text_is_at_least_as_long_as_asked():
    assert 1000 <= words(story_text(1000, words, 0, "eval")) <= 1040


def test_items_is_the_number_of_facts():
    prompts = {kind: build_case(kind, 2000, words, 0, items=12).prompt for kind in KINDS}
    assert prompts["passkey"].count("The secret code of") == 12
    assert prompts["copy"].count("\n\nMemo ") == 12
    assert len(prompts["recall"].partition("List of prices.\n")[2].partition("\n\n")[0].splitlines()) == 12
    assert len(prompts["ledger"].partition("Ledger of coins.\n")[2].partition("\n\n")[0].splitlines()) == 12


def test_an_unknown_kind_is_refused():
    with pytest.raises(ValueError, match="passkey, recall, copy, ledger"):
        make_task("riddle", random.Random(0))


def test_the_embedded_model_is_small_and_has_a_config():
    assert sum(f.stat().st_size for f in EMBEDDED.iterdir()) <= 8_000_000
    config = AutoConfig.from_pretrained(EMBEDDED)
    assert (config.model_type, config.num_hidden_layers, config.max_position_embeddings) == ("qwen3", 8, 4608)
