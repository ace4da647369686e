"""What a MODEL can be: each form is read, and what is none of them is refused with what to do."""

import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError
from test_gguf import write_gguf, written  # noqa: F401  a fixture
from transformers import AutoConfig, LlamaConfig
from typer.testing import CliRunner

from tq_cache.tools import sources
from tq_cache.tools.runs import EMBEDDED_MODEL, load_model
from tq_cache.tools.sources import find_source
from tq_cli.app import app


def test_a_folder_and_the_config_in_it_name_the_same_model():
    for path in (EMBEDDED_MODEL, EMBEDDED_MODEL / "config.json"):
        source = find_source(path)
        assert source.folder == str(EMBEDDED_MODEL) and source.config().num_hidden_layers == 8
        assert source.stored_weights() == (EMBEDDED_MODEL / "model.safetensors").stat().st_size
    assert load_model(EMBEDDED_MODEL / "config.json", device="cpu")[0].config.num_hidden_layers == 8


def test_plan_and_info_take_a_gguf_file(tmp_path, written):  # noqa: F811
    write_gguf(tmp_path / "m.gguf", written)
    path = str(tmp_path / "m.gguf")
    result = CliRunner().invoke(app, ["plan", "--model", path, "--memory", "1GB", "--presets", "tq4", "--json"])
    said = json.loads(result.stdout)
    assert said["model_type"] == "llama" and said["positions"] == written.config.max_position_embeddings
    assert said["weights_bytes"] == 2 * sum(x.numel() for x in written.parameters())  # as dequantised to 16 bits
    assert find_source(path).stored_weights() is None
    assert CliRunner().invoke(app, ["info", "--model", path]).exit_code == 0
    assert load_model(path)[0].dtype == (torch.bfloat16 if torch.cuda.is_available() else torch.float32)


def test_an_id_of_the_hub_is_read_as_from_pretrained_does(monkeypatch):
    """Its config alone."""
    asked = []

    def from_pretrained(name, **options):
        asked.append(name)
        return LlamaConfig(max_position_embeddings=777)

    monkeypatch.setattr(sources, "try_to_load_from_cache", lambda name, file: "/cache/config.json")
    monkeypatch.setattr(AutoConfig, "from_pretrained", from_pretrained)
    result = CliRunner().invoke(app, ["plan", "--model", "some/model", "--presets", "tq4", "--json"])
    assert json.loads(result.stdout)["positions"] == 777 and asked == ["some/model"]


def refused(status):
    """Of the Hub's answers, as its client raises them."""
    error = HfHubHTTPError.__new__(HfHubHTTPError)
    error.response = SimpleNamespace(status_code=status)
    return error


@pytest.mark.parametrize(
    "error, message",
    [
        (ConnectionError("no route"), r"the Hub cannot be reached \(ConnectionError\); .*hf download some/model"),
        (refused(401), "the Hub answers 401; check the name; .*hf auth login"),
        (EntryNotFoundError("404"), "on the Hub without a config.json; .*GGUF"),
    ],
)
def test_where_the_hub_has_none_the_error_says_what_to_do(monkeypatch, error, message):
    def fails(url):
        raise error

    monkeypatch.setattr(sources, "try_to_load_from_cache", lambda name, file: None)
    monkeypatch.setattr(sources, "get_hf_file_metadata", fails)
    with pytest.raises(ValueError, match=f"expected a model folder, .*got 'some/model', which .*{message}"):
        find_source("some/model")
    assert CliRunner().invoke(app, ["plan", "--model", "some/model"]).exit_code == 2


@pytest.mark.parametrize("name", ["./nothing", "a/b/c", "/nowhere", "~/model"])
def test_what_can_be_no_id_is_a_path_where_there_is_nothing(name):
    with pytest.raises(ValueError, match="where there is none"):
        find_source(name)


def test_weights_of_a_quantised_checkpoint_are_those_of_its_files(tmp_path):
    """Its config would give them 16 bits."""
    for name in ("config.json", "model.safetensors"):
        shutil.copy(EMBEDDED_MODEL / name, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    options = ["--model", str(tmp_path), "--memory", "1GB", "--presets", "tq4", "--json"]
    size = (tmp_path / "model.safetensors").stat().st_size
    assert json.loads(CliRunner().invoke(app, ["plan", *options]).stdout)["weights_bytes"] == size
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors.index.json").write_text('{"metadata": {"total_size": 12345}}')
    assert json.loads(CliRunner().invoke(app, ["plan", *options]).stdout)["weights_bytes"] == 12345
    (tmp_path / "model.safetensors.index.json").unlink()
    result = CliRunner().invoke(app, ["plan", *options])
    assert result.exit_code == 2 and "weights are quantised" in result.stderr and "--weights-gb" in result.stderr
