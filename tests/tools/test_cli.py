"""The commands, run in this process."""

import json
from importlib.util import find_spec

import pytest
from transformers import DeepseekV3Config, LlamaConfig
from typer.testing import CliRunner

import tq_cache
from tq_cache import PRESETS
from tq_cache.planning.prefill import prefill_bytes
from tq_cache.tools.files import check_outputs
from tq_cache.tools.runs import EMBEDDED_MODEL
from tq_cli.app import app
from tq_cli.arguments import parse_layer_presets, parse_presets, parse_skip_layers


def run(*arguments: object, code: int = 0):
    """The result of `tq-cache ...`, which must exit with `code`."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == code, result.output
    return result


def test_info_says_what_computes():
    output = run("info").output
    assert "PyTorch reference (kernels need a GPU)" in output
    assert tq_cache.__version__ in output
    for name in PRESETS:
        assert f" {name} " in output
    row = next(line for line in output.splitlines() if " 4bit_nc " in line)
    assert " 134 " in row and "3.82x" in row
    assert "sm_90" in output and "gfx942" in output


def test_demo_on_the_embedded_model():
    output = run("demo", "--presets", "fp8_e4m3,tq4", "--prompt-tokens", "400").output
    rows = [line for line in output.splitlines() if "100%" in line]
    assert [row.split()[1] for row in rows] == ["DynamicCache", "fp8_e4m3", "tq4"]
    assert "16.00" in rows[0] and "1.00x" in rows[0]


def test_generate_streams_and_counts():
    prompt = "The secret code of Mira is 48213. It was cold.\n\nQuestion: What is the secret code of Mira?\nAnswer:"
    options = ["--preset", "tq4", "--max-new-tokens", 6, "--residual-length", 0]
    output = run("generate", "--prompt", prompt, *options).output
    assert output.strip().startswith("48213")
    assert "6 tokens" in output and "tq4 cache:" in output and "bits per element" not in output


def test_generate_from_a_file(tmp_path):
    (tmp_path / "prompt.txt").write_text("Mira was the baker of")
    output = run("generate", "--prompt-file", tmp_path / "prompt.txt", "--max-new-tokens", 3).output
    assert "3 tokens" in output
    assert "tokens are packed: savings begin at about 225 tokens" in output and "smaller" not in output


def test_plan_from_a_config(tmp_path):
    sizes = dict(hidden_size=4096, num_attention_heads=32, num_key_value_heads=8, num_hidden_layers=32)
    config = LlamaConfig(**sizes, max_position_embeddings=131072)
    config.save_pretrained(tmp_path)
    arguments = ["--context", 32768, "--memory", "24GB", "--weights-gb", 16, "--skip-layers", "none"]
    arguments += ["--presets", "4bit_nc"]
    output = run("plan", "--model", tmp_path, *arguments).output
    rows = {line.split()[1]: line for line in output.splitlines() if line.startswith("│")}
    assert set(rows) >= {"16-bit", "4bit_nc"}
    longest = int(rows["16-bit"].split("│")[-2].replace(",", ""))
    needed = [131072 * tokens + prefill_bytes(config, tokens) for tokens in (longest, longest + 1)]
    assert "4,294,967,296" in rows["16-bit"] and needed[0] <= 8 * 10**9 < needed[1]
    assert "beside 16.00 GB of weights and the peak of its prefill" in " ".join(output.split())
    assert "a prefill of 32,768 tokens takes, beside weights and cache," in output
    assert float(rows["4bit_nc"].split("│")[4]) == pytest.approx(16 * 134 / 512, rel=0.02)


def test_plan_of_latents(tmp_path):
    DeepseekV3Config().save_pretrained(tmp_path)
    for rotary, size in {"exact": 128, "int8": 66}.items():
        output = run("plan", "--model", tmp_path, "--context", 32768, "--presets", "tq4", "--rotary", rotary).output
        rows = [[cell.strip() for cell in line.split("│")] for line in output.splitlines() if line.startswith("│")]
        assert rows[0][1:6] == ["61", "full_attention, latents", "1", "512", "64"]
        assert float(rows[-1][4]) == pytest.approx(16 * (258 + size) / 1152, rel=0.02)


def test_plan_of_layers_with_presets_of_their_own(tmp_path):
    sizes = dict(hidden_size=4096, num_attention_heads=32, num_key_value_heads=8, num_hidden_layers=32)
    LlamaConfig(**sizes).save_pretrained(tmp_path)
    arguments = ["--presets", "tq4", "--skip-layers", "boundary", "--skip-format", "fp8_e4m3", "--sink-tokens", 0]
    arguments += ["--context", 32768]
    output = run("plan", "--model", tmp_path, *arguments, "--layer-presets", "1=k8v4,-1=tq3").output
    rows = [[cell.strip() for cell in line.split("│")] for line in output.splitlines() if line.startswith("│")]
    assert [(row[1], *row[-3:-1]) for row in rows[:4]] == [
        ("2", "fp8_e4m3", "boundary"),
        ("1", "k8v4", "layer_presets"),
        ("28", "packed", ""),
        ("1", "tq3", "layer_presets"),
    ]
    assert "residual_length 128, sink_tokens 0" in " ".join(output.split())
    per_token = (2 * 256 + 196 + 28 * 132 + 100) / 32
    assert float(rows[-1][4]) == pytest.approx(16 * per_token / 512, rel=0.02)


def test_eval_writes_json_and_plot(tmp_path):
    pytest.importorskip("matplotlib")
    small = ["--context", 200, "--decode", 24, "--num-texts", 1, "--cases", 1, "--greedy", 4]
    files = ["--out", tmp_path / "r.json", "--plot", tmp_path / "r.png"]
    output = run("eval", "--presets", "k8v4", "--settings", "default,all_packed", *small, *files).output
    assert "16-bit" in output and "k8v4" in output and "recall 50%" in output and "of 4 tokens" in output
    result = json.loads((tmp_path / "r.json").read_text())
    names = [(row["preset"], row["setting"]) for row in result["rows"]]
    assert names == [("16-bit", "default"), ("k8v4", "default"), ("k8v4", "all_packed")]
    assert result["model"] == str(EMBEDDED_MODEL)
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")


def test_eval_says_what_was_not_run(tmp_path):
    (tmp_path / "t.json").write_text(json.dumps([{"name": "a", "text": "Mira was the baker of Belmar. " * 30}]))
    small = ["--context", 100, "--decode", 8, "--cases", 0, "--greedy", 0, "--texts", tmp_path / "t.json"]
    output = run("eval", "--presets", "tq4", "--peers", *small).output
    assert "kivi2" in output and "eager" in output and "quanto4" in output
    if find_spec("optimum") is None:
        assert "not run: quanto4, default: ImportError: You need to install optimum-quanto" in output


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["demo", "--presets", "4bit"], "expected a preset of"),
        (["demo", "--presets", ","], "expected presets of"),
        (["demo", "--model", "/nowhere"], "expected a model folder"),
        (["demo", "--skip-layers", "edges"], "expected skip_layers of"),
        (["generate", "--prompt", "x", "--preset", "foo"], "expected a preset of"),
        (["generate"], "expected one of --prompt and --prompt-file, got neither"),
        (["generate", "--prompt", "x", "--prompt-file", "y"], "got both"),
        (["generate", "--prompt-file", "/nowhere"], "expected a text file in UTF-8"),
        (["generate", "--prompt", ""], "expected a prompt"),
        (["generate", "--prompt", "x", "--dtype", "int4"], "expected --dtype of auto, bfloat16"),
        (["generate", "--prompt", "x", "--device", "toaster"], "expected a device such as cpu"),
        (["generate", "--prompt", "x", "--top-p", "0.9"], "expected --temperature above 0 beside --top-p"),
        (["generate", "--prompt", "x", "--temperature", "-1"], "expected --temperature of 0 or more"),
        (["generate", "--prompt", "x", "--temperature", "1", "--top-p", "2"], "expected --top-p above 0 and up to 1"),
        (["generate", "--prompt", "x", "--temperature", "1", "--top-k", "0"], "expected --top-k of 1 or more"),
        (["generate", "--prompt", "x", "--system", "y"], "expected a model with a chat template beside --system"),
        (["generate", "--prompt", "x", "--raw", "--system", "y"], "expected one of --raw and --system"),
        (["chat", EMBEDDED_MODEL], "expected a model with a chat template"),
        (["generate", "--prompt", "x", "--residual-length", "-1"], "expected residual_length"),
        (["plan", "--model", "/nowhere"], "expected a model folder, a config.json, a GGUF file or an id"),
        (["plan", "--model", EMBEDDED_MODEL, "--memory", "much"], "expected a memory size such as 24GB"),
        (["plan", "--model", EMBEDDED_MODEL, "--weights-gb", "2"], "expected --memory"),
        (["plan", "--model", EMBEDDED_MODEL, "--memory", "2GB", "--weights-gb", "3"], "expected memory left"),
        (["plan", "--model", EMBEDDED_MODEL, "--context", "0"], "expected context and batch"),
        (["plan", "--model", EMBEDDED_MODEL, "--layer-presets", "tq4"], "expected layer presets such as 0=fp8_e4m3"),
        (["plan", "--model", EMBEDDED_MODEL, "--layer-presets", "0=tq4,0=tq3"], "got two for layer 0"),
        (["plan", "--model", EMBEDDED_MODEL, "--layer-presets", "8=tq4"], "expected a layer index from -8 to 7"),
        (["plan", "--model", EMBEDDED_MODEL, "--rotary", "int8"], "expected no format of rotary keys"),
        (["plan", "--model", EMBEDDED_MODEL, "--skip-format", "tq4"], "expected 'boundary' or layer indices"),
        (["generate", "--prompt", "x", "--layer-presets", "0=foo"], "for layer 0 in layer_presets, got 'foo'"),
        (["plan", "--model", EMBEDDED_MODEL, "--memory", "2GB", "--weights-gb", "inf"], "0 or more, got inf"),
        (["plan", "--model", EMBEDDED_MODEL, "--memory", "2GB", "--weights-gb", "nan"], "0 or more, got nan"),
        (["plan", "--model", EMBEDDED_MODEL, "--memory", "2GB", "--weights-gb", "-3"], "0 or more, got -3"),
        (["demo", "--prompt-tokens", "0"], "expected --prompt-tokens of 1 or more, got 0"),
        (["demo", "--prompt-tokens", "-4"], "expected --prompt-tokens of 1 or more, got -4"),
        (["eval", "--out", "/nowhere/r.json"], "expected a folder"),
        (["eval", "--out", "."], "expected a file to write, got '.'"),
        (["eval", "--plot", EMBEDDED_MODEL], "which is none; name a file in a folder"),
        (["lm-eval", "--tasks", "tq_passkey", "--out", "/dev/null"], "expected a file to write, got '/dev/null'"),
        (["eval", "--decode", "0"], "expected context, decode"),
        (["eval", "--settings", "best"], "settings of default, all_packed; got 5 presets and best"),
        (["eval", "--texts", "/nowhere"], "expected a text file in UTF-8"),
        (["eval", "--model", "/nowhere/m.gguf"], "expected a GGUF file, got '/nowhere/m.gguf'"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments, message):
    result = run(*arguments, code=2)
    errors = result.stderr.strip().splitlines()
    assert len(errors) == 1 and errors[0].startswith("error: ")
    assert message in errors[0]
    assert "Traceback" not in result.output


@pytest.mark.parametrize("command", ["plan", "info"])
def test_a_config_that_transformers_does_not_read_is_bad_input(tmp_path, command):
    file = tmp_path / "config.json"
    file.write_text('{"model_type": "llama", "num_hidden_layers": "x"}')
    error = run(command, "--model", file, code=2).stderr
    assert "expected a config.json that transformers can read" in error and "num_hidden_layers" in error
    assert str(file) in error and len(error.splitlines()) == 1


@pytest.mark.parametrize("name", ["r.xyz", "r"])
def test_a_plot_of_no_known_kind_is_refused_before_the_work(tmp_path, name):
    pytest.importorskip("matplotlib")
    assert "expected a plot with a suffix of" in run("eval", "--plot", tmp_path / name, code=2).stderr


def test_a_folder_that_may_not_be_written_is_refused(tmp_path, monkeypatch):
    check_outputs(tmp_path / "r.json", None)
    monkeypatch.setattr("tq_cache.tools.files.os.access", lambda path, mode: False)  # root may write anywhere
    with pytest.raises(ValueError, match="that you may write to"):
        check_outputs(tmp_path / "r.json")


def test_lists_of_names():
    assert parse_presets("all") == list(PRESETS)
    assert parse_presets(" tq4, 4bit_nc,") == ["tq4", "4bit_nc"]
    assert parse_skip_layers("none") == ()
    assert parse_skip_layers("boundary, 0,-1") == ("boundary", 0, -1)
    assert parse_layer_presets(None) is None
    assert parse_layer_presets("0=fp8_e4m3, -1 = tq3") == {0: "fp8_e4m3", -1: "tq3"}


def test_warnings_are_one_line():
    result = run("generate", "--prompt", "Mira was", "--max-new-tokens", 2, "--skip-layers", "0,1,2,3,4,5,6,7")
    assert result.stderr.startswith("warning: no layer of this model will be packed")
    assert len(result.stderr.strip().splitlines()) == 1


SMALL = ["--context", 200, "--decode", 8, "--num-texts", 1, "--cases", 0, "--greedy", 0]


@pytest.mark.parametrize(
    ("arguments", "look"),
    [
        (["info"], lambda said: {row["name"]: row["bytes"] for row in said["presets"]}["tq4"] == 132),
        (["info", "--model", EMBEDDED_MODEL], lambda said: said["checkpoint"]["has_fp8_scales"] is False),
        (["plan", "--model", EMBEDDED_MODEL, "--presets", "tq3"],
         lambda said: [row["name"] for row in said["rows"]] == ["16-bit", "tq3"] and said["prefill_bytes"] > 1e6),
        (["demo", "--presets", "tq4", "--prompt-tokens", "300"],
         lambda said: said["answer"] in said["runs"][1]["text"] and said["runs"][1]["agreement"] == 1.0),
        (["generate", "--prompt", "Mira was", "--max-new-tokens", "2"],
         lambda said: len(said["tokens"]) == 2 and said["nbytes"] > 0),
        (["eval", "--presets", "tq4", "--settings", "all_packed", *SMALL], lambda said: said["rows"][1]["kl"] > 0),
    ],
    ids=["info", "checkpoint", "plan", "demo", "generate", "eval"],
)  # fmt: skip
def test_json_is_one_line_and_nothing_else(arguments, look):
    lines = run(*arguments, "--json").stdout.splitlines()
    assert len(lines) == 1 and look(json.loads(lines[0]))


@pytest.mark.parametrize("moment", ["measuring", "writing"])
def test_ctrl_c_leaves_the_result_before_and_nothing_else(tmp_path, monkeypatch, moment):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    def half(record, file, **kwargs):
        file.write("{")
        raise KeyboardInterrupt

    (tmp_path / "r.json").write_text("before")
    if moment == "measuring":
        monkeypatch.setattr("tq_cache.tools.evaluate.evaluate", interrupted)
    else:
        monkeypatch.setattr("tq_cache.tools.files.json.dump", half)
    result = run("eval", "--presets", "tq4", *SMALL, "--out", tmp_path / "r.json", code=130)
    assert result.stderr.strip().splitlines()[-1] == "interrupted" and "Traceback" not in result.output
    assert (tmp_path / "r.json").read_text() == "before" and len(list(tmp_path.iterdir())) == 1


def test_saved_caches(tmp_path):
    story = "The secret code of Mira is 48213. It was cold. " * 8
    prompt = f"{story}\n\nQuestion: What is the secret code of Mira?\nAnswer:"
    options = ["--prompt", prompt, "--max-new-tokens", 6, "--residual-length", 0, "--prompt-cache", tmp_path / "saved"]
    first, second = run("generate", *options).output, run("generate", *options).output
    assert first.splitlines()[1].strip() == second.splitlines()[1].strip() == "48213"
    assert "prompt tokens saved in" in first and "prompt tokens loaded from" in second
    assert "'tq4'" in run("generate", *options, "--preset", "tq2", code=2).output  # what is saved has another
    assert "another folder" in run("generate", "--prompt", "Quite another", *options[2:], code=2).output
    said = json.loads(run("cache", "info", tmp_path / "saved", "--json").output)
    assert said["preset"] == "tq4" and said["tokens"] > 100 and said["input_ids"] and not said["unneeded_files"]
    assert json.loads(run("cache", "verify", tmp_path / "saved", "--json").output)["whole"]
    assert f"{said['tokens']:,}" in run("cache", "info", tmp_path / "saved").output
    file = next((tmp_path / "saved").glob("*.safetensors"))
    content = bytearray(file.read_bytes())
    content[-9] ^= 4
    file.write_bytes(content)
    assert "checksum" in run("cache", "verify", tmp_path / "saved", code=2).output
    assert "no cache.json" in run("cache", "info", tmp_path, code=2).output
