"""Every example does what it says, on the embedded model, and what it packs is read by attention."""

import contextlib
import io
import json
import re
import runpy
import shutil
import sys
import threading
import urllib.request
from http.server import ThreadingHTTPServer
from pathlib import Path

import pytest
import ranks
from transformers import AutoTokenizer

from tq_cache import TurboQuantCache
from tq_cache.tools.runs import EMBEDDED_MODEL

EXAMPLES = Path(__file__).parents[2] / "examples"
NAMES = sorted(path.stem for path in EXAMPLES.glob("*.py"))
STORY = (EXAMPLES / "story.txt").read_text()
CODES = dict(re.findall(r"The secret code of (\w+) is (\d+)", STORY))
MOST_LINES = 20  # of code, without imports


@pytest.fixture
def updates(monkeypatch):
    """Of each update of a TurboQuantCache's first layer: the cache, and the number of tokens."""
    seen, update = [], TurboQuantCache.update

    def spy(cache, key_states, value_states, layer_idx, *args, **kwargs):
        if layer_idx == 0:
            seen.append((cache, key_states.shape[-2]))
        return update(cache, key_states, value_states, layer_idx, *args, **kwargs)

    monkeypatch.setattr(TurboQuantCache, "update", spy)
    return seen


def run(name: str, monkeypatch, *arguments: object, run_name: str = "__main__") -> dict:
    """The example, started as its first lines say; on the model that it takes if none is named."""
    path = str(EXAMPLES / f"{name}.py")
    monkeypatch.setattr(sys, "argv", [path, *map(str, arguments)])
    return runpy.run_path(path, run_name=run_name)


def assert_packed(updates) -> None:
    caches = {id(cache): cache for cache, _ in updates}.values()
    assert caches and all(layer.storage.packed_length >= 128 for cache in caches for layer in cache.layers)
    assert {cache.preset.name for cache in caches} == {"tq4"}


@pytest.mark.parametrize("name, people", [
    ("padded_batch", ("Frank", "Lily", "Will")),
    ("own_loop", ("Frank",)),
    ("several_gpus", ("Frank",)),
])  # fmt: skip
def test_answers(name, people, updates, monkeypatch, capsys):
    run(name, monkeypatch)
    said = capsys.readouterr().out
    assert re.findall(r"\b\d{5}\b", said)[: len(people)] == [CODES[who] for who in people]
    assert_packed(updates)


def test_several_gpus_under_torchrun(tmp_path, monkeypatch):
    def printed():
        with contextlib.redirect_stdout(io.StringIO()) as said:
            run("several_gpus", monkeypatch)
        return said.getvalue()

    assert ranks.run(printed, tmp_path) == [f"{CODES['Frank']}.\n", ""]


@pytest.fixture
def chat_model(tmp_path) -> Path:
    """The embedded model as one for chats: with a template, and answers that end with their line."""
    folder = Path(shutil.copytree(EMBEDDED_MODEL, tmp_path / "chat"))
    template = (
        "{% for m in messages %}{{ 'Answer: ' if m.role == 'assistant' else '' }}{{ m.content | trim }}\n{% endfor %}"
    )
    (folder / "chat_template.jinja").write_text(template + "{% if add_generation_prompt %}Answer:{% endif %}")
    newline = AutoTokenizer.from_pretrained(folder)("\n").input_ids
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": newline, "pad_token_id": 0}))
    return folder


def test_chat_computes_what_is_new(chat_model, updates, monkeypatch, capsys):
    asked = [f"{' '.join(STORY.split())} Question: What is the secret code of Frank?"]
    asked += ["Question: What is the secret code of Lily?", ""]
    monkeypatch.setattr("builtins.input", lambda _: asked.pop(0))
    run("chat", monkeypatch, chat_model)
    assert capsys.readouterr().out.split() == [f"{CODES['Frank']}.", f"{CODES['Lily']}."]
    first, second = (count for _, count in updates if count > 1)
    assert first > 600 and second < 40
    assert_packed(updates)


def test_chat_starts_without_a_chat_model(updates, monkeypatch):
    asked = ["Once upon a time", "", "never asked for"]
    monkeypatch.setattr("builtins.input", lambda _: asked.pop(0))
    run("chat", monkeypatch)
    assert asked == ["never asked for"] and updates


def test_a_document_is_read_once(updates, monkeypatch, capsys):
    run("document_twice", monkeypatch)
    assert re.findall(r"^(\d{5})\.", capsys.readouterr().out, re.M) == [CODES["Frank"], CODES["Lily"]]
    first, second = (count for _, count in updates if count > 1)
    assert first > 600 and second < 10
    assert_packed(updates)


def test_streaming(updates, monkeypatch, capsys):
    namespace = run("streaming", monkeypatch)
    assert len(namespace["tokenizer"](capsys.readouterr().out).input_ids) >= 30
    assert_packed(updates)


def test_a_server_answers_several_at_once(updates, monkeypatch):
    namespace = run("threaded_server", monkeypatch, run_name="example")
    said: dict[str, str] = {}
    with ThreadingHTTPServer(("127.0.0.1", 0), namespace["Handler"]) as server:
        server.RequestHandlerClass.log_message = lambda *_: None
        threading.Thread(target=server.serve_forever, daemon=True).start()

        def ask(who):
            prompt = f"{STORY}\n\nQuestion: What is the secret code of {who}?\nAnswer:"
            with urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}", prompt.encode()) as reply:
                said[who] = reply.read().decode()

        people = [threading.Thread(target=ask, args=(who,)) for who in ("Frank", "Lily", "Will")]
        for thread in people:
            thread.start()
        for thread in people:
            thread.join()
        server.shutdown()
    assert {who: text.split(".")[0].strip() for who, text in said.items()} == {who: CODES[who] for who in said}
    assert len(said) == len({id(cache) for cache, _ in updates}) == 3
    assert_packed(updates)


def test_peft(updates, monkeypatch, capsys):
    pytest.importorskip("peft")
    run("with_peft", monkeypatch)
    assert capsys.readouterr().out.strip() == f"{CODES['Frank']}."
    assert_packed(updates)


def test_trl(updates, monkeypatch):
    pytest.importorskip("trl")
    trainer = run("with_trl", monkeypatch)["trainer"]
    assert trainer.state.global_step == 1
    assert_packed(updates)


@pytest.mark.parametrize("name", NAMES)
def test_short_and_listed(name):
    text = (EXAMPLES / f"{name}.py").read_text()
    code = [line for line in text.split('"""', 2)[2].splitlines() if line and not line.startswith(("import", "from"))]
    assert len(code) <= MOST_LINES
    assert f"({name}.py)" in (EXAMPLES / "README.md").read_text() and f"python examples/{name}.py MODEL" in text
