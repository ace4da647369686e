"""`benchmarks/quality.py` and its plot, on the embedded model."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from tq_cache.tools.runs import EMBEDDED_MODEL
from tq_cache.tools.tasks import heldout_text

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
PROMISED = (
    "model preset setting kl kl_se kl_p99 kl_p999 top1 ppl dlogppl dlogppl_se bytes_per_token greedy_agreement texts "
    "prefill decode dtype device torch transformers commit"
).split()


def benchmark(name: str):
    spec = importlib.util.spec_from_file_location(f"benchmark_{name}", BENCHMARKS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs quality.py with options, on three stories, and gives the rows of its file."""
    texts = [
        {"name": f"{kind} {i}", "text": heldout_text(400, len, i)} for i, kind in enumerate(["tale", "tale", "python"])
    ]
    (tmp_path / "t.json").write_text(json.dumps([x | {"text": x["text"] * 4} for x in texts]))
    fixed = ["--model", EMBEDDED_MODEL, "--texts", tmp_path / "t.json", "--out", tmp_path / "q.json", "--cases", 1]

    def call(*options):
        monkeypatch.setattr(sys, "argv", ["quality.py", *map(str, [*fixed, *options])])
        benchmark("quality").main()
        return json.loads((tmp_path / "q.json").read_text())["rows"]

    return call


def test_rows_have_what_is_promised_and_replace_each_other(run, tmp_path, capsys):
    small = ["--prefill", 96, "--decode", 8, "--rows", "0:2", "--cases", 0, "--commit", "abc"]
    rows = run("--name", "a", "--presets", "tq4,tq2", "--no-peers", *small)
    names = [
        ("16-bit", "default"),
        ("tq4", "default"),
        ("tq2", "default"),
        ("tq4", "all_packed"),
        ("tq2", "all_packed"),
    ]
    assert [(row["preset"], row["setting"]) for row in rows] == names
    for row in rows:
        assert set(PROMISED) <= set(row) and None not in [row[name] for name in PROMISED]
        assert (row["texts"], row["prefill"], row["decode"], row["commit"]) == (2, 96, 8, "abc")
    again = run("--name", "a", "--presets", "tq4", "--settings", "default", "--no-peers", *small[:-1], "def")
    assert [row["commit"] for row in again] == ["def", "def", "abc", "abc", "abc"]
    both = run("--name", "b", "--presets", "tq4", "--settings", "default", *small)
    assert len(both) > 5 + 9 and all("kl" in row or row["not_run"] for row in both)
    assert "not run: ImportError" in capsys.readouterr().out or importlib.util.find_spec("optimum")
    pytest.importorskip("matplotlib")
    sys.argv[1:] = ["quality", str(tmp_path / "q.json"), str(tmp_path / "q.png")]
    benchmark("plot").main()
    assert (tmp_path / "q.png").stat().st_size > 10_000


def test_long_prompts_by_length(run):
    rows = run("--name", "a", "--long", "--lengths", 96, 200, "--decode", 16, "--presets", "tq4", "--commit", "abc")
    assert [(row["preset"], row["prefill"]) for row in rows] == [(p, n) for n in (96, 200) for p in ("16-bit", "tq4")]
    assert all(len(row["kl_by_quarter"]) == 4 and set(row["recall_by_kind"]) == {"passkey", "recall"} for row in rows)
    assert all(row["texts"] == 1 for row in rows)  # one has python in its name


def test_what_is_measured_has_a_commit(monkeypatch):
    quality = benchmark("quality")
    assert quality.commit("x") == "x"
    monkeypatch.setattr(quality.subprocess, "check_output", lambda *args, **options: (_ for _ in ()).throw(OSError()))
    with pytest.raises(ValueError, match="expected a git repository or --commit"):
        quality.commit(None)
