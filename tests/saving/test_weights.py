"""A saved cache knows its weights: wherever they are, and however many processes share them, and no others."""

from pathlib import Path

import pytest
import ranks
import torch
from accelerate import cpu_offload
from architectures import build, prompt
from saved import assert_same, continued, filled
from transformers import CLIPVisionConfig, LlamaForCausalLM, LlavaConfig, LlavaForConditionalGeneration

from tq_cache import CacheFileError, TurboQuantCache
from tq_cache.saving.weights import of_model


def changed(model, name: str):
    with torch.no_grad():
        model.get_parameter(name).mul_(1.5)
    return model


def test_other_weights_in_memory(tmp_path):
    model = build("llama", "turboquant")
    cache = filled(model)
    cache.save_pretrained(tmp_path, model=model)
    assert_same(continued(model, TurboQuantCache.from_pretrained(tmp_path, model)), continued(model, cache))
    changed(model, "model.layers.2.mlp.up_proj.weight")
    with pytest.raises(CacheFileError, match="parameter model.layers.2.mlp.up_proj.weight"):
        TurboQuantCache.from_pretrained(tmp_path, model)
    TurboQuantCache.from_pretrained(tmp_path, model, any_weights=True)
    TurboQuantCache.from_pretrained(tmp_path, model.config)  # which says nothing about weights


def test_a_parameter_more(tmp_path):
    model = build("llama", "turboquant")
    filled(model).save_pretrained(tmp_path, model=model)
    model.model.layers[0].mlp.register_parameter("lora", torch.nn.Parameter(torch.zeros(3)))
    with pytest.raises(CacheFileError, match=r"mlp\.lora is in one alone"):
        TurboQuantCache.from_pretrained(tmp_path, model)


def test_the_same_weights_elsewhere(tmp_path):
    """torch.compile puts a word before names; what accelerate keeps in host memory is not looked at, all else is."""
    model = build("llama", "turboquant")
    filled(model).save_pretrained(tmp_path, model=model)
    assert TurboQuantCache.from_pretrained(tmp_path, torch.compile(model)).get_seq_length() == 133
    offloaded = cpu_offload(build("llama", "turboquant"), torch.device("cpu"))
    assert all(parameter.is_meta for parameter in offloaded.parameters())
    assert TurboQuantCache.from_pretrained(tmp_path, offloaded).get_seq_length() == 133
    part = changed(build("llama", "turboquant"), "model.layers.1.mlp.up_proj.weight")
    cpu_offload(part.model.layers[0], torch.device("cpu"))
    with pytest.raises(CacheFileError, match=r"layers\.1\.mlp"):
        TurboQuantCache.from_pretrained(tmp_path, part)


def test_other_weights_in_files(tmp_path):
    """A model of the same shape that was trained on: its config says where its files are."""
    made, places = build("llama", "turboquant"), (tmp_path / "base", tmp_path / "tuned")
    made.save_pretrained(places[0])
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.01)
    made.save_pretrained(places[1])
    base, tuned = (LlamaForCausalLM.from_pretrained(x, attn_implementation="turboquant").eval() for x in places)
    for folder in (tmp_path / "cache", places[0], places[0]):  # also beside the weights, and again
        filled(base).save_pretrained(folder)
        TurboQuantCache.from_pretrained(folder, base.config)
        with pytest.raises(CacheFileError, match="the files of"):
            TurboQuantCache.from_pretrained(folder, tuned.config)
        TurboQuantCache.from_pretrained(folder, tuned.config, any_weights=True)


def test_files_of_a_composite_model(tmp_path):
    """Only the config of all of it says where they are."""
    text = build("llama").config.to_dict()
    sight = CLIPVisionConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=14
    )
    config = LlavaConfig(text_config=text, vision_config=sight)
    for name in ("one", "other"):
        LlavaForConditionalGeneration(config).save_pretrained(tmp_path / name)
    one, other = (LlavaForConditionalGeneration.from_pretrained(tmp_path / name) for name in ("one", "other"))
    filled(one).save_pretrained(tmp_path / "cache")
    assert TurboQuantCache.from_pretrained(tmp_path / "cache", one.config).get_seq_length() == 133
    with pytest.raises(CacheFileError, match="the files of"):
        TurboQuantCache.from_pretrained(tmp_path / "cache", other)


def read_prompt(path: Path, folder: Path, distributed: dict) -> list:
    """Save a cache with its model in `folder`, or load the one there; and logits that follow."""
    model = ranks.load(path, "turboquant", **distributed)
    parts = [name for name, digest in of_model(model)["samples"].items() if digest is None]
    assert bool(parts) == bool(distributed) and all(name.endswith("weight") for name in parts)
    if (folder / "cache.json").is_file():
        return continued(model, TurboQuantCache.from_pretrained(folder, model))
    cache = TurboQuantCache(model.config, residual_length=0)
    with torch.no_grad():
        model(**prompt(model, 133), past_key_values=cache)
    cache.save_pretrained(folder, model=model)
    return continued(model, cache)


def test_any_number_of_processes(tmp_path):
    """Parameters that tensor parallelism cuts are whole in no process, and not compared; all others are."""
    path, two = ranks.saved("llama", tmp_path), dict(tp_plan="auto")
    expected = read_prompt(path, tmp_path / "by_one", {})
    for found in ranks.run(read_prompt, tmp_path, path, tmp_path / "by_one", two):
        assert all((x - y).norm() <= 1e-5 * y.norm() for x, y in zip(found, expected, strict=True))
    ranks.run(read_prompt, tmp_path, path, tmp_path / "by_two", two)
    found = read_prompt(path, tmp_path / "by_two", {})
    assert all((x - y).norm() <= 1e-5 * y.norm() for x, y in zip(found, expected, strict=True))
    other = tmp_path / "other"
    changed(ranks.load(path, "turboquant"), "model.norm.weight").save_pretrained(other)
    with pytest.raises(AssertionError, match=r"the parameter model\.norm\.weight"):
        ranks.run(read_prompt, tmp_path, other, tmp_path / "by_one", two)
