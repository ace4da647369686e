"""Continuations scored under a cache, the documents of our tasks, and lm-evaluation-harness with both (slow)."""

import copy
import json
import re
from collections import Counter

import pytest
import torch
from typer.testing import CliRunner

import tq_cache
from tq_cache import TurboQuantCache
from tq_cache.tools import harness, synthetic
from tq_cache.tools.continuations import likelihoods
from tq_cache.tools.runs import EMBEDDED_MODEL, encode, make_cache
from tq_cli.app import app

WORDS = 120


def words_of(text: str) -> list[str]:
    return re.findall(r"[A-Za-z]+", text)


# ------------------------------------------------------------------------------------------------- under the cache


@pytest.fixture(scope="module")
def asked(embedded) -> tuple[list[int], list[list[int]]]:
    """A context of several blocks and continuations of it, the first of which is right; the last is long."""
    document = synthetic.passkey_choice(WORDS, 0)
    choices = [document["choices"][document["label"]], *document["choices"]]
    tokenizer = embedded[1]
    answers = [encode(tokenizer, f" {choice}") for choice in choices]
    return encode(tokenizer, document["context"]), [*answers, encode(tokenizer, synthetic.stories(50, 3)["text"])]


@torch.no_grad()
def in_one_forward(model, context, continuation) -> tuple[float, bool]:
    """As lm-evaluation-harness does, without a past."""
    ids = torch.tensor([[*context, *continuation]])
    logprobs = model(ids[:, :-1]).logits[:, len(context) - 1 :].double().log_softmax(dim=-1)
    targets = ids[:, len(context) :]
    chosen = logprobs.gather(-1, targets[..., None]).sum().item()
    return chosen, bool((logprobs.argmax(dim=-1) == targets).all())


@pytest.mark.parametrize("options", [None, dict(preset="tq4", residual_length=2048)])
def test_an_exact_cache_gives_what_one_forward_gives(embedded, asked, options):
    model, (context, continuations) = embedded[0], asked
    cache = make_cache(model, **options or dict(preset=None))
    scored = likelihoods(model, context, continuations, cache)
    expected = [in_one_forward(model, context, own) for own in continuations]
    assert [own.greedy for own in scored] == [greedy for _, greedy in expected]
    assert scored[0].greedy and not all(own.greedy for own in scored)
    found, wanted = (torch.tensor([own[0] for own in rows]) for rows in (scored, expected))
    assert (found - wanted).norm() < 1e-4 * wanted.norm()


def test_what_is_scored_reads_the_packed_cache(embedded, asked):
    """One token, too: it is other than in a forward without a past, and what dequantised attention gives."""
    model, (context, continuations) = embedded[0], asked
    one = [own[:1] for own in continuations]
    exact = [in_one_forward(model, context, own)[0] for own in one]
    cache = make_cache(model, "tq2", residual_length=0, smooth=0.0)  # without queries, as other attention shows none
    found = [own.logprob for own in likelihoods(model, context, one, copy.deepcopy(cache))]
    model.set_attn_implementation("sdpa")
    dequantised = TurboQuantCache(model.config, "tq2", residual_length=0, smooth=0.0)
    wanted = [own.logprob for own in likelihoods(model, context, one, dequantised)]
    off = torch.tensor(found) - torch.tensor(exact)
    assert off.norm() > 1e-2
    assert (torch.tensor(found) - torch.tensor(wanted)).norm() < 1e-2 * off.norm()


def test_a_continuation_is_scored_as_if_alone(embedded, asked):
    model, (context, continuations) = embedded[0], asked
    pair = [continuations[-1], continuations[0]]
    *_, second = likelihoods(model, context, pair, make_cache(model, "tq3", residual_length=0))
    assert likelihoods(model, context, pair[1:], make_cache(model, "tq3", residual_length=0)) == [second]


def test_a_text_without_a_context_reads_its_own_beginning(embedded, asked):
    model, text = embedded[0], asked[0]
    cache = make_cache(model, "tq2", residual_length=0)
    [found] = likelihoods(model, text[:1], [text[1:]], cache)
    exact, _ = in_one_forward(model, text[:1], text[1:])
    assert 1e-4 < abs(found.logprob - exact) / abs(exact) < 0.2
    with pytest.raises(ValueError, match="1 token or more"):
        likelihoods(model, [], [[3]], cache)
    with pytest.raises(ValueError, match="1 token or more"):
        likelihoods(model, [3], [[3], []], cache)


# -------------------------------------------------------------------------------------------------------- documents


@pytest.mark.parametrize("seed", range(5))
def test_variables_are_those_that_a_reader_finds(seed):
    document = synthetic.variables(WORDS * 2, seed)
    value = re.search(r"assigned the value (\d+)", document["context"]).group(1)
    given = {value}
    for name, source in re.findall(r"VAR (\w+) = (?:VAR )?(\w+)\.", document["context"]):
        given |= {name} if source in given else set()
    assert given == {value, *document["answers"]}
    assert len(re.findall(" = ", document["context"])) == 2 * len(document["answers"])


@pytest.mark.parametrize("seed", range(5))
def test_common_words_are_the_most_common(seed):
    document = synthetic.common_words(WORDS * 2, seed)
    listed = Counter(re.findall(r"\d+\. (\w+)", document["context"]))
    assert {word for word, _ in listed.most_common(len(document["answers"]))} == set(document["answers"])
    assert listed.most_common()[-1][1] * 6 == listed[document["answers"][0]]


@pytest.mark.parametrize("seed", range(5))
def test_arithmetic_is_right(seed):
    document = synthetic.arithmetic(WORDS * 4, seed)
    asked = document["context"].rpartition("Question: ")[2]
    boxes, each, given, cost = map(int, re.findall(r"\d+", asked))
    assert document["answers"] == [f"#### {(boxes * each - given) * cost}"]
    steps = re.findall(r"(\d+ [*-] \d+) = (\d+)", document["context"])
    assert len(steps) >= 3 * synthetic.EXAMPLES and all(eval(term) == int(result) for term, result in steps)
    assert synthetic.count_words(document["context"]) <= WORDS * 4


def test_questions_have_their_answers_in_the_text():
    for seed in range(5):
        choice = synthetic.passkey_choice(WORDS, seed)
        assert all(f"is {code}." in choice["context"] for code in choice["choices"])
        name = re.search(r"secret code of (\w+)\?", choice["context"]).group(1)
        assert f"code of {name} is {choice['choices'][choice['label']]}." in choice["context"]
        asked = synthetic.story_question("recall", WORDS, seed)
        assert f": {asked['answers'][0]}" in asked["context"]
    assert len({synthetic.passkey_choice(WORDS, seed)["label"] for seed in range(20)}) == synthetic.CHOICES
    same = [synthetic.documents(synthetic.passkey_choice, WORDS, 3) for _ in range(2)]
    assert same[0] == same[1] and len({document["context"] for document in same[0]}) == 3
    with pytest.raises(ValueError, match="50 words or more"):
        synthetic.documents(synthetic.stories, 20, 1)


def test_found():
    assert synthetic.found(["48213"], " 48213.\n") == 1
    assert synthetic.found(["#### 48"], "so\n#### 480") == 0
    assert synthetic.found(["ABC", "DEF"], "the variables are DEF and GHI") == 0.5


def test_without_the_harness_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr(harness, "find_spec", lambda name: None)
    result = CliRunner().invoke(app, ["lm-eval", "--tasks", "tq_passkey"])
    assert result.exit_code == 2 and "pip install lm-eval" in result.output


# ------------------------------------------------------------------------------------------------------ the harness


@pytest.mark.slow
def test_the_harness_under_the_cache(embedded, monkeypatch):
    """With the 16-bit cache its numbers are those of its own model; with others all that it asks reads them."""
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    model, tokenizer = embedded
    model.set_attn_implementation("sdpa")
    tasks = ["tq_passkey", "tq_passkey_choice", "tq_stories"]
    manager = TaskManager(include_path=str(harness.TASKS), include_defaults=False, metadata={"words": 120, "count": 3})
    own = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=2)
    said = simple_evaluate(own, tasks=list(tasks), task_manager=manager, bootstrap_iters=0)["results"]
    seen: list = []
    made = TurboQuantCache.__init__

    def spied(self, config, preset, max_cache_len=None, **options):
        made(self, config, preset, max_cache_len=max_cache_len, **options)
        if max_cache_len is None:  # `enable` asks of others whether they would be compiled
            seen.append(preset)

    monkeypatch.setattr(TurboQuantCache, "__init__", spied)
    found = harness.measure(model, tokenizer, ["tq4", "tq2"], tasks, 120, 3, 2, residual_length=0)
    # One of `enable`, one for each context: 3 of the choices, and the first token of stories, in batches of 2
    assert seen == ["tq4"] * (1 + 3 + 2) + ["tq2"] * (1 + 3 + 2)
    assert list(found) == ["16bit", "tq4", "tq2"] and tq_cache.generation.HOOK not in model.__dict__
    exact = found["16bit"]
    assert exact["tq_passkey"]["found"] == said["tq_passkey"]["found,none"] == 1
    assert exact["tq_passkey_choice"]["acc"] == said["tq_passkey_choice"]["acc,none"] == 1
    perplexity = said["tq_stories"]["word_perplexity,none"]
    assert exact["tq_stories"]["word_perplexity"] == pytest.approx(perplexity, rel=1e-4)
    assert found["tq4"]["tq_passkey"]["found"] == found["tq4"]["tq_passkey_choice"]["acc"] == 1
    under = {name: own["tq_stories"]["word_perplexity"] for name, own in found.items()}
    for name in ("tq4", "tq2"):  # which is the better one, so few words do not say
        assert 1e-5 < abs(under[name] / under["16bit"] - 1) < 0.1


@pytest.mark.slow
def test_the_registered_model_by_its_name():
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    import tq_cache.tools.harness_model  # noqa: F401  registers it

    manager = TaskManager(include_path=str(harness.TASKS), include_defaults=False, metadata={"words": 120, "count": 2})
    arguments = dict(pretrained=str(EMBEDDED_MODEL), preset="tq3", cache_options=dict(residual_length=0), device="cpu")
    said = simple_evaluate("tq-cache", arguments, tasks=["tq_passkey"], task_manager=manager, bootstrap_iters=0)
    assert said["results"]["tq_passkey"]["found,none"] == 1


@pytest.mark.slow
def test_the_command(tmp_path):
    options = ["--presets", "tq4", "--words", "60", "--limit", "1", "--out", str(tmp_path / "result.json")]
    result = CliRunner().invoke(app, ["lm-eval", "--tasks", ",".join(harness.OWN), *options])
    assert result.exit_code == 0, result.output
    lines = {line.split("│")[1].strip(): line for line in result.output.splitlines() if line.startswith("│")}
    assert set(lines) == set(harness.OWN) and "1" in lines["tq_passkey"]
    assert (tmp_path / "result.json").read_text().startswith("{")
    (tmp_path / "result.json").unlink()
    said = CliRunner().invoke(app, ["lm-eval", "--tasks", "tq_passkey", *options, "--json"]).stdout
    assert json.loads(said) == json.loads((tmp_path / "result.json").read_text())
    result = CliRunner().invoke(app, ["lm-eval", "--tasks", "tq_nothing", *options])
    assert result.exit_code == 2 and "tq_passkey_choice" in result.output
