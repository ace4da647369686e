"""What tests of float8 scales share: checkpoints written to a folder, codes read back."""

import json
from pathlib import Path

import pytest
import torch
from checkpoints import CHECKPOINTS, Checkpoint
from safetensors.torch import save_file
from transformers import LlamaConfig, PreTrainedConfig

from tq_cache import TurboQuantCache
from tq_cache.formats import packing
from tq_cache.formats.packing import BLOCK_TOKENS
from tq_cache.formats.states import PackedStates
from tq_cache.planning.geometry import load_config

LAYERS, HEADS, DIM = 6, 2, 32
FLOAT8_TYPES = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
# Every block of every layer packed, as the checkpoint's format says: nothing is subtracted before.
ALL = {"residual_length": 0, "sink_tokens": 0, "center": False}
every_checkpoint = pytest.mark.parametrize("checkpoint", CHECKPOINTS, ids=lambda row: row.name)
every_float8 = pytest.mark.parametrize("preset", FLOAT8_TYPES)


def plain_config(**changes) -> LlamaConfig:
    sizes = dict(vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=LAYERS, num_attention_heads=4)
    return LlamaConfig(**sizes, num_key_value_heads=HEADS, head_dim=DIM, **changes)


def write_checkpoint(folder: Path, checkpoint: Checkpoint, shards: int = 1) -> Path:
    """A folder with the configs and the scale tensors of a row: in layer n, (n + 1) / 64, for values half of that."""
    folder.mkdir(exist_ok=True)
    changes = {} if checkpoint.quantization is None else {"quantization_config": checkpoint.quantization}
    plain_config().save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    if checkpoint.quant_file is not None:
        (folder / "hf_quant_config.json").write_text(json.dumps(checkpoint.quant_file))
    tensors = {
        f"model.layers.{layer}.{name}": torch.tensor([(layer + 1) / (128 if ".v_" in name else 64)])
        for layer in range(LAYERS)
        for name in checkpoint.scales
    }
    write_tensors(folder, tensors | {"model.embed_tokens.weight": torch.zeros(64, 64)}, shards)
    return folder


def write_tensors(folder: Path, tensors: dict[str, torch.Tensor], shards: int = 1) -> None:
    tensors = {name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = dict(list(tensors.items())[shard::shards])
        save_file(part, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def kv_checkpoint(folder: Path, tensors: dict[str, torch.Tensor], shards: int = 1) -> PreTrainedConfig:
    """The config of a compressed-tensors checkpoint that declares fp8 KV scales and ships these tensors."""
    row = next(row for row in CHECKPOINTS if row.name == "compressed-tensors fp8 + KV")
    write_checkpoint(folder, row)
    write_tensors(folder, tensors, shards)
    return load_config(folder)


def pairs(value: float = 0.5, layers: int = LAYERS) -> dict[str, torch.Tensor]:
    return {
        f"model.layers.{n}.self_attn.{letter}_scale": torch.tensor([value]) for n in range(layers) for letter in "kv"
    }


def codes(states: PackedStates, tokens: int) -> torch.Tensor:
    """Stored bytes, uint8 [B, H, tokens, D]."""
    by_channel = states.role == "value"
    bytes_ = packing.unpack(states.packed, 8, BLOCK_TOKENS if by_channel else states.head_dim)
    return (bytes_.transpose(-1, -2) if by_channel else bytes_).flatten(2, 3)[:, :, :tokens]


def cast(x: torch.Tensor, scale: torch.Tensor | float, dtype: torch.dtype) -> torch.Tensor:
    """What torch makes of x / scale in a float8 dtype, saturating."""
    limit = torch.finfo(dtype).max
    return (x.float() / scale).clamp(-limit, limit).to(dtype)


def filled(cache: TurboQuantCache, tokens: int = 128, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Keys and values [layers, 2, B, H, tokens, D] that were put into a cache."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(len(cache.layers), 2, 2, HEADS, tokens, DIM, generator=generator).to(dtype)
    for layer_idx, (keys, values) in enumerate(x):
        cache.update(keys, values, layer_idx)
    return x
