"""Chat: the template is applied, a turn computes its new tokens alone, and Ctrl-C stops an answer, not the program."""

import json
import os
import shutil
import signal

import pytest
import torch
from transformers.generation.streamers import BaseStreamer
from typer.testing import CliRunner

from tq_cache import TurboQuantCache
from tq_cache.tools.conversation import Conversation
from tq_cache.tools.prompts import prompt_ids
from tq_cache.tools.runs import EMBEDDED_MODEL, encode, make_cache
from tq_cli.app import app

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "{{ m.role }}:{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)
STORY = "Mira was the baker of Belmar. The secret code of Mira is 48213. " * 12


@pytest.fixture
def chat_model(embedded):
    model, tokenizer = embedded
    tokenizer.chat_template = TEMPLATE
    yield model, tokenizer
    tokenizer.chat_template = None


def conversation(chat_model, **options):
    model, tokenizer = chat_model
    options = {"max_new_tokens": 12} | options
    return Conversation(model, tokenizer, lambda: make_cache(model, "tq4", residual_length=0), **options)


class Presses(BaseStreamer):
    """Ctrl-C while an answer comes: at its third token, `times` times."""

    def __init__(self, times=1):
        self.times, self.tokens = times, 0

    def put(self, value):
        self.tokens += value.numel() == 1
        if self.tokens == 3:
            for _ in range(self.times):
                os.kill(os.getpid(), signal.SIGINT)

    def end(self):
        pass


def test_a_prompt_is_a_message_where_there_is_a_template(chat_model):
    _, tokenizer = chat_model
    ids = prompt_ids(tokenizer, "Hello", "Be kind")
    assert tokenizer.decode(ids[0]) == "system:Be kind\nuser:Hello\nassistant:"
    assert prompt_ids(tokenizer, "Hello", raw=True).tolist() == [encode(tokenizer, "Hello")]
    tokenizer.chat_template = TEMPLATE.replace("'tool'", "'system'")
    with pytest.raises(ValueError, match="template takes, got its error: no tools here"):
        prompt_ids(tokenizer, "Hello", "Be kind")
    with pytest.raises(ValueError, match="no tools here"):
        conversation(chat_model, system="Be kind")


def test_a_turn_computes_its_new_tokens_alone(chat_model):
    model, tokenizer = chat_model
    talk, widths = conversation(chat_model), []
    hook = model.model.embed_tokens.register_forward_hook(lambda m, args, out: widths.append(args[0].shape[1]))
    first = talk.ask(STORY)
    assert first.reused == 0 and first.processed == widths[0]
    held = talk.held
    widths.clear()
    second = talk.ask("What is the secret code of Mira?")
    hook.remove()
    assert second.reused == held == first.processed + first.answered - 1
    assert widths[0] == second.processed < 30 and set(widths[1:]) == {1}
    # The same tokens in one call, the answers between them as they were: the cache of the first turn was right.
    transcript = talk._tokens[: second.reused + second.processed]
    with torch.no_grad():
        whole = make_cache(model, "tq4", residual_length=0)
        model(torch.tensor([transcript[: first.processed]]), past_key_values=whole)
        for token in transcript[first.processed : held]:
            model(torch.tensor([[token]]), past_key_values=whole)
        logits = model(torch.tensor([transcript[held:]]), past_key_values=whole).logits
    assert int(logits[0, -1].argmax()) == talk._tokens[len(transcript)]
    assert talk.cache.layers[0].storage.packed_length > 0


def test_a_template_that_rewrites_what_was_said_keeps_what_is_common(chat_model):
    """Some leave out what a model thought."""
    _, tokenizer = chat_model
    talk = conversation(chat_model)
    question = talk.ask(STORY).processed
    tokenizer.chat_template = TEMPLATE.replace("{{ m.content }}", "{{ '...' if m.role == 'assistant' else m.content }}")
    turn = talk.ask("Who?")
    assert question - 1 <= turn.reused <= question
    assert talk.held == len(talk._tokens) - 1


def test_ctrl_c_stops_an_answer_and_the_next_one_goes_on(chat_model):
    talk, before = conversation(chat_model), signal.getsignal(signal.SIGINT)
    turn = talk.ask(STORY, Presses())
    assert turn.stopped and turn.answered in (3, 4) and talk.held == turn.processed + turn.answered - 1
    assert signal.getsignal(signal.SIGINT) is before
    assert talk.ask("And then?").reused == turn.processed + turn.answered - 1


def test_a_second_ctrl_c_forgets_the_question(chat_model):
    talk = conversation(chat_model)
    talk.ask(STORY)
    said = list(talk.messages)
    with pytest.raises(KeyboardInterrupt):
        talk.ask("What?", Presses(2))
    assert talk.messages == said and talk.held == 0
    turn = talk.ask("What?")
    assert turn.reused == 0 and turn.processed > 100 and talk.messages[:2] == said


def test_more_than_the_positions_are_refused_and_nothing_changes(chat_model, monkeypatch):
    model, _ = chat_model
    talk = conversation(chat_model)
    talk.ask("Hello")
    monkeypatch.setattr(model.config, "max_position_embeddings", talk.held + 20)
    held = talk.held
    with pytest.raises(ValueError, match=f"fewer than the model's {held + 20} positions, got .* /reset begins"):
        talk.ask(STORY)
    assert talk.held == held and len(talk.messages) == 2
    assert 0 < talk.ask("So?").answered < 12 and talk.held + 1 == held + 20


def test_the_loop(tmp_path, chat_model):
    """As typed: questions, every command, an error that does not end it, and the end of the input."""
    folder = tmp_path / "model"
    shutil.copytree(EMBEDDED_MODEL, folder)
    chat_model[1].save_pretrained(folder)
    lines = [
        STORY,
        "Who?",
        "/report",
        f"/save {tmp_path / 'saved'}",
        "/save",
        "/what",
        "",
        "/reset",
        "/save x",
        "/help",
    ]
    typed = "\n".join([*lines, "Hello", "/exit", "never asked"])
    result = CliRunner().invoke(app, ["chat", str(folder), "--max-new-tokens", "4"], input=typed)
    assert result.exit_code == 0, result.output
    errors = result.stderr.splitlines()
    notes = [line for line in errors if " from the cache; cache: " in line]
    assert [line.split(" from the cache")[0].split()[-1] == "0" for line in notes] == [True, False, True]
    assert [line for line in errors if line.startswith("error: ")] == [
        "error: expected a folder after /save, got none",
        "error: expected /report, /save FOLDER, /reset, /exit or /help, got '/what'",
        "error: expected a conversation to save, got none yet; ask something first",
    ]
    assert "K tq4, V tq4" in result.stdout and "the conversation is forgotten" in result.stdout
    saved = TurboQuantCache.from_pretrained(tmp_path / "saved", chat_model[0])
    assert f"{saved.get_seq_length():,} tokens saved in" in result.stdout
    one = CliRunner().invoke(app, ["chat", str(folder), "--max-new-tokens", "2"], input="Hello\n")
    assert one.exit_code == 0 and len(one.stderr.splitlines()) == 1  # Ctrl-D


def test_sampling_is_repeated_by_its_seed(chat_model, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(EMBEDDED_MODEL, folder)
    options = ["--model", str(folder), "--prompt", "Mira was", "--max-new-tokens", "12", "--json"]
    sampled = ["--temperature", "1.5", "--top-p", "0.95", "--top-k", "100", "--seed"]
    said = [CliRunner().invoke(app, ["generate", *options, *sampled, seed]).stdout for seed in ("1", "1", "2")]
    tokens = [json.loads(line)["tokens"] for line in said]
    assert tokens[0] == tokens[1] != tokens[2]
