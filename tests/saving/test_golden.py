"""Folders of every layout that was ever written: they are read as they were meant, or their layout has a new number.

`python tests/saving/test_golden.py` writes the one of this layout anew; commit it beside a new LAYOUT alone.
"""

import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig

from tq_cache import TurboQuantCache
from tq_cache.saving.save import LAYOUT

GOLDEN = Path(__file__).parent / "golden"
PRESETS = {0: "tq3", 1: "4bit_nc", 2: "fp8_e4m3", 3: "tq2"}


def config() -> LlamaConfig:
    return LlamaConfig(
        vocab_size=64, hidden_size=128, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32,
    )  # fmt: skip


def tokens(count: int) -> list[torch.Tensor]:
    """Keys and values [1, 2, count, 32] that no random numbers decide."""
    place = torch.arange(2 * count * 32, dtype=torch.float64).view(1, 2, count, 32)
    return [(torch.sin(place * 0.7 + number) + torch.sin(place * place * 1e-3)).bfloat16() for number in (0, 1)]


def make(folder: Path) -> None:
    cache = TurboQuantCache(config(), layer_presets=PRESETS, residual_length=0)
    for layer in range(4):
        cache.update(*tokens(200), layer)
    shutil.rmtree(folder, ignore_errors=True)
    cache.save_pretrained(folder, input_ids=torch.arange(200)[None])
    save_file(read(cache), folder / "expected.safetensors")


def read(cache: TurboQuantCache) -> dict[str, torch.Tensor]:
    """What attention would read, in the model's dtype."""
    return {f"{i}.{name}": getattr(layer, name) for i, layer in enumerate(cache.layers) for name in ("keys", "values")}


@pytest.mark.parametrize("layout", range(1, LAYOUT + 1))
@pytest.mark.parametrize("room", [None, 256])
def test_reads_what_was_meant(layout, room):
    folder = GOLDEN / f"layout_{layout}"
    cache = TurboQuantCache.from_pretrained(folder, config(), max_cache_len=room)
    expected = load_file(folder / "expected.safetensors")
    for name, x in read(cache).items():
        assert x.dtype == torch.bfloat16
        assert (x.double() - expected[name].double()).norm() <= 2**-8 * expected[name].double().norm(), name
    packed = [layer.storage.view().packed_length for layer in cache.layers]
    assert packed == [192] * 4 and cache.get_seq_length() == 200


def test_writes_what_it_read(tmp_path):
    """Not a bit of a tensor changes."""
    folder = GOLDEN / f"layout_{LAYOUT}"
    TurboQuantCache.from_pretrained(folder, config()).save_pretrained(tmp_path)
    before, after = (
        {name: x for file in path.glob("cache-*.safetensors") for name, x in load_file(file).items()}
        for path in (folder, tmp_path)
    )
    before.pop("input_ids")
    assert set(before) == set(after)
    assert all(torch.equal(x.view(-1).view(torch.uint8), after[name].view(-1).view(torch.uint8))
               for name, x in before.items())  # fmt: skip


if __name__ == "__main__":
    make(GOLDEN / f"layout_{LAYOUT}")
    sys.exit(0)
