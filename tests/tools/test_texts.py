"""Texts from files, and windows of them."""

import json

import pytest

from tq_cache.tools.runs import encode
from tq_cache.tools.texts import Text, long_windows, read_texts, windows


@pytest.fixture
def tokenizer(embedded):
    return embedded[1]


def test_a_list_of_texts(tmp_path, tokenizer):
    rows = [{"name": "a", "text": "Mira was the baker of Belmar. " * 9}, {"name": "b", "text": "It was cold. " * 30}]
    (tmp_path / "t.json").write_text(json.dumps(rows))
    texts = read_texts(tmp_path / "t.json")
    ids = windows(tokenizer, 40, texts, 1, 0)
    assert ids.shape == (2, 40) and ids[1].tolist() == encode(tokenizer, rows[1]["text"])[:40]
    with pytest.raises(ValueError, match="texts of 9999 tokens or more, got [0-9]+ in 'a'"):
        windows(tokenizer, 9999, texts, 1, 0)


def test_one_text_is_cut_into_windows(tmp_path, tokenizer):
    (tmp_path / "t.txt").write_text("Mira was the baker of Belmar. " * 40)
    text = read_texts(tmp_path / "t.txt")
    ids = windows(tokenizer, 20, text, 3, 0)
    assert ids.flatten().tolist() == encode(tokenizer, text)[:60]
    with pytest.raises(ValueError, match="expected a text of 3 x 9999 tokens or more, got"):
        windows(tokenizer, 9999, text, 3, 0)


@pytest.mark.parametrize("content", ["{", "[1]", '[{"name": "a"}]', "[]", "3"])
def test_files_that_are_no_lists_of_texts(tmp_path, content):
    (tmp_path / "t.json").write_text(content)
    with pytest.raises(ValueError, match="expected a list of {name, text} in"):
        read_texts(tmp_path / "t.json")


def test_stories_without_a_file(tokenizer):
    ids = windows(tokenizer, 50, None, 2, 0)
    assert ids.shape == (2, 50) and ids[0].tolist() != ids[1].tolist()


def test_long_windows_end_in_the_text_asked_for(tokenizer):
    texts = [Text("a", "It was cold. " * 20), Text("code", "Mira said no. " * 40), Text("b", "The sun rose. " * 20)]
    ids = long_windows(tokenizer, 300, texts, "code")
    code = encode(tokenizer, texts[1].text)[:150]
    assert ids.shape == (1, 300) and ids[0, -len(code) :].tolist() == code
    before = tokenizer.decode(ids[0, : 300 - len(code)])
    assert "It was cold" in before and "The sun rose" in before and "Mira" not in before
    with pytest.raises(ValueError, match="expected a text with 'poem' in its name, got 'a', 'code', 'b'"):
        long_windows(tokenizer, 300, texts, "poem")
