"""GGUF files: what is missing is said, and the weights that are read are those that were written."""

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tq_cache.tools import sources
from tq_cache.tools.evaluate import EvalSettings, evaluate
from tq_cache.tools.runs import load_model


@pytest.mark.parametrize("missing", ["gguf", "accelerate"])
def test_a_missing_package_is_named(missing, tmp_path, monkeypatch):
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    monkeypatch.setattr(sources, "find_spec", lambda package: None if package == missing else object())
    with pytest.raises(ValueError, match=rf"expected the package {missing} .*pip install gguf accelerate"):
        load_model(tmp_path / "m.gguf")


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ValueError, match="expected a GGUF file, got .*m.gguf', where there is none"):
        load_model(tmp_path / "m.gguf")


def write_gguf(path: Path, model: LlamaForCausalLM, without: str = "") -> None:
    """A llama in float32 with a vocabulary of single characters, as llama.cpp writes it; maybe without one tensor."""
    gguf = pytest.importorskip("gguf")
    config = model.config
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    single = [chr(256 + index) for index in range(config.vocab_size - 2)]
    merges = list(zip(single[:2], single[2:4], strict=True))  # transformers wants more than one
    writer.add_token_list([*single, *map("".join, merges)])
    writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, weight in model.state_dict().items():
        if name == without:
            continue
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
        for part, count in heads.items():  # llama.cpp keeps the halves of rotated channels interleaved
            if part in name:
                weight = weight.view(count, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), weight.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def written():
    pytest.importorskip("accelerate")
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = LlamaConfig(num_hidden_layers=2, vocab_size=300, tie_word_embeddings=False, **sizes)
    return LlamaForCausalLM(config).eval()


def test_a_gguf_file_is_the_model_that_was_written(tmp_path, written):
    write_gguf(tmp_path / "m.gguf", written)
    model, tokenizer = load_model(tmp_path / "m.gguf", torch.float32)
    ids = torch.randint(0, 300, (2, 257))
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, written(ids).logits, atol=1e-5, rtol=1e-4)
    settings = EvalSettings(240, 16, cases=0, residual_length=0, skip_layers=())
    assert evaluate(model, tokenizer, ["tq4"], settings, ids).rows[1].kl > 0


def test_a_gguf_file_without_a_weight_is_refused(tmp_path, written):
    """transformers would draw it at random and say so in a log."""
    write_gguf(tmp_path / "m.gguf", written, without="model.layers.1.mlp.up_proj.weight")
    with pytest.raises(ValueError, match="expected all weights in m.gguf, .*model.layers.1.mlp.up_proj.weight"):
        load_model(tmp_path / "m.gguf", torch.float32)
