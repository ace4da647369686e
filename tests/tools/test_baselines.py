"""The caches that ours are compared with: what they round, and that their bytes are true."""

import pytest
import torch
from transformers import DynamicCache, LlamaConfig

from tq_cache import TurboQuantCache
from tq_cache.tools.baselines import KiviCache, grid, min_max, peers, transformers_caches
from tq_cache.tools.footprint import footprint, layer_bytes

SIZES = {"hidden_size": 128, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2}
CONFIG = LlamaConfig(num_hidden_layers=2, vocab_size=32, **SIZES)  # head_dim 64


def filled(cache, tokens=320, chunk=64, generator=None):
    """The cache with random tokens of two sequences, and those tokens, keys and values [2, 2, tokens, 64]."""
    states = torch.randn(2, 2, 2, tokens, 64, generator=generator)
    for keys, values in zip(states[0].split(chunk, dim=2), states[1].split(chunk, dim=2), strict=True):
        for index in range(2):
            cache.update(keys, values, index)
    return cache, states


@pytest.mark.parametrize("dim", [-1, -2])
@pytest.mark.parametrize("bits", [2, 4])
def test_min_max_rounds_to_the_levels_of_each_group(dim, bits, generator):
    x = torch.randn(1, 1, 64, 64, generator=generator) + 5
    found = min_max(x, bits, dim).unflatten(dim, (2, 32))
    groups = x.unflatten(dim, (2, 32))
    step = (groups.amax(dim, keepdim=True) - groups.amin(dim, keepdim=True)) / (2**bits - 1)
    slack = 2**-11 * (groups.abs().amax(dim, keepdim=True) + step * 2**bits)  # float16 of lowest level and step
    assert ((found - groups).abs() <= step / 2 + slack).all()
    levels = found.movedim(dim, -1).flatten(0, -2)
    assert max(len(group.unique()) for group in levels) <= 2**bits
    assert torch.equal(min_max(torch.ones(1, 1, 32, 32), bits, dim), torch.ones(1, 1, 32, 32))


def test_kivi_keeps_the_newest_and_rounds_the_rest_once(generator):
    cache, states = filled(KiviCache(CONFIG, 4), generator=generator)
    layer = cache.layers[0]
    assert layer.packed_length == 192  # 320 - 128, whole groups of 32
    assert torch.equal(layer.keys[:, :, 192:], states[0][:, :, 192:])
    assert torch.equal(layer.keys[:, :, :192], min_max(states[0][:, :, :192], 4, -2))
    assert torch.equal(layer.values[:, :, :192], min_max(states[1][:, :, :192], 4, -1))
    error = ((layer.keys - states[0])[:, :, :192].norm() / states[0][:, :, :192].norm()).item()
    assert 0.05 < error < 0.11  # range of 32 normals, 4.1, in 15 steps: 4.1 / 15 / sqrt(12) = 0.08
    before = layer.keys[:, :, :192].clone()
    cache.update(states[0][:, :, :40], states[1][:, :, :40], 0)
    assert layer.packed_length == 224 and torch.equal(layer.keys[:, :, :192], before)


def test_a_forward_reads_its_own_tokens_exact(generator):
    states = torch.randn(1, 2, 64, 64, generator=generator)
    keys, values = KiviCache(CONFIG, 2, residual_length=0).update(states, -states, 0)
    assert torch.equal(keys, states) and torch.equal(values, -states)


@pytest.mark.parametrize("bits, token", [(4, 64 + 16), (2, 32 + 16)])  # 2 x 64 codes; 4 bytes for 32 of them
def test_true_bytes_of_kivi(bits, token):
    cache, _ = filled(KiviCache(CONFIG, bits))
    assert layer_bytes(cache.layers[0]) == 2 * 2 * (192 * token + 128 * 256)
    assert footprint(cache, CONFIG, 2).all_layers == (192 * token + 128 * 256) / 320


def test_kivi_refuses_heads_that_are_no_groups():
    with pytest.raises(ValueError, match="groups of 32 channels"):
        KiviCache(CONFIG, 4).update(torch.zeros(1, 2, 4, 48), torch.zeros(1, 2, 4, 48), 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_exact_tokens_are_two_bytes_in_every_dtype(dtype):
    cache = DynamicCache(config=CONFIG)
    for index in range(2):
        cache.update(torch.zeros(3, 2, 10, 64, dtype=dtype), torch.zeros(3, 2, 10, 64, dtype=dtype), index)
    found = footprint(cache, CONFIG, 3)
    assert (found.all_layers, found.packed_layers) == (256, None)


def test_true_bytes_of_packed_tokens():
    """Packed bytes of the format, two bytes for exact elements, calibration as it is; no room for coming tokens."""
    cache, _ = filled(TurboQuantCache(CONFIG, "tq4", skip_layers=(0,)), tokens=320, chunk=320)
    storage = cache.layers[1].storage
    packed = storage.view().packed_length
    assert 0 < packed < 320
    calibration = sum(
        x.nbytes for states in (storage.key, storage.value) for x in vars(states.calibration).values() if x is not None
    )
    wanted = 4 * (packed * cache.preset.token_bytes(64, 64) + (320 - packed) * 256) + calibration
    assert layer_bytes(cache.layers[1]) == pytest.approx(wanted)
    assert layer_bytes(cache.layers[0]) == 4 * 320 * 256
    found = footprint(cache, CONFIG, 2)
    assert found.packed_layers == pytest.approx(wanted / 4 / 320)
    assert found.all_layers == pytest.approx((found.packed_layers + 256) / 2)
    assert wanted < cache.report().layers[1].nbytes  # which is float32, and has room


def test_every_peer_is_a_row_of_its_own():
    names = [(row.preset, row.setting) for row in peers()]
    assert len(set(names)) == len(names)
    assert {"hf_fp8", "quanto4", "quanto2", "hqq4", "hqq2", "kivi4", "kivi2"} < {preset for preset, _ in names}
    assert all(row.foreign for row in transformers_caches())


def test_a_grid_of_rows():
    rows = grid(["tq4", "tq2"], ["default", "all_packed"])
    assert [(row.preset, row.setting) for row in rows[1:3]] == [("tq2", "default"), ("tq4", "all_packed")]
    with pytest.raises(ValueError, match="settings of default, all_packed; got 1 presets and other"):
        grid(["tq4"], ["other"])
    with pytest.raises(ValueError, match="expected a preset of"):
        grid(["tq5"], ["default"])
