"""The cache as transformers and users see it: contract, bytes, what a step allocates, bad input."""

import copy
from dataclasses import replace

import pytest
import torch
from architectures import build, config_for, prompt
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig, MambaConfig, PreTrainedConfig

import tq_cache
from tq_cache import PRESETS, TurboQuantCache
from tq_cache.hf.handles import KVHandle
from tq_cache.hf.layers import PackedHybridLayer

# Bytes of a packed token of one KV head at D = 128 (the design's table; float8 without its per-head scale).
TOKEN_BYTES = {
    "fp8_e4m3": 256,
    "fp8_e5m2": 256,
    "k8v4": 196,
    "4bit_nc": 134,
    "k3v4_nc": 118,
    "3bit_nc": 102,
    "tq4": 132,
    "tq3": 100,
    "tq2": 68,
}


def llama_config(**changes) -> LlamaConfig:
    sizes = dict(vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=6, num_attention_heads=4)
    config = LlamaConfig(**sizes | dict(num_key_value_heads=2, head_dim=32) | changes)
    config._attn_implementation = "turboquant"
    return config


def filled(cache: TurboQuantCache, tokens: int, batch: int = 2, dim: int = 32, seed: int = 0) -> TurboQuantCache:
    """With random tokens, in the way of another attention: for the queries of ours packing would wait."""
    attention, cache.config._attn_implementation = cache.config._attn_implementation, "sdpa"
    generator = torch.Generator().manual_seed(seed)
    for layer_idx in range(len(cache.layers)):
        cache.update(*torch.randn(2, batch, 2, tokens, dim, generator=generator), layer_idx)
    cache.config._attn_implementation = attention
    return cache


# ------------------------------------------------------------------------------------------------------- contract


def test_layers_follow_the_plan():
    cache = TurboQuantCache(llama_config(num_hidden_layers=7), skip_layers=("boundary", "sliding_window", -4))
    assert [layer.storage.packs for layer in cache.layers] == [False, False, True, False, True, False, False]
    assert [plan.reason for plan in cache.plans][:4] == ["boundary", "boundary", "", "index in skip_layers"]


def test_defaults():
    """Four bits in every layer; the first 4 tokens stay exact, and the newest 128 with up to 63 that wait."""
    cache = filled(TurboQuantCache(llama_config()), 400)
    assert cache.preset == PRESETS["tq4"] and [plan.preset for plan in cache.plans] == [PRESETS["tq4"]] * 6
    for layer in cache.layers:
        assert layer.storage.sink_keys.shape[2] == 4
        assert layer.storage.packed_length == 256 and layer.storage.tail_length == 140


@pytest.mark.filterwarnings("ignore:no layer of this model will be packed")
def test_boundary_counts_only_layers_with_keys_and_values():
    cache = TurboQuantCache(config_for("qwen3_next"), skip_layers="boundary", boundary_layers=1)
    kinds = [plan.kind for plan in cache.plans]
    holding = [plan for plan in cache.plans if plan.kind == "full_attention"]
    assert "linear_attention" in kinds
    assert [plan.packed for plan in holding][0] is False and holding[-1].packed is False


def test_hybrid_layers_pack_their_attention():
    model = build("falcon_h1", "turboquant")
    cache = TurboQuantCache(model.config, residual_length=0)
    with torch.no_grad():
        model(**prompt(model, 200), past_key_values=cache)
    assert all(isinstance(layer, PackedHybridLayer) for layer in cache.layers)
    assert cache.layers[0].storage.packed_length == 192 and cache.has_previous_state(0)
    assert cache.is_linear == [False] * len(cache.layers)


def test_seq_length_and_mask_sizes():
    cache = filled(TurboQuantCache(llama_config(), residual_length=16), 200)
    assert [cache.get_seq_length(i) for i in range(6)] == [200] * 6
    assert cache.get_mask_sizes(3, 2) == (203, 0)
    assert cache.get_max_length() == -1 and not cache.is_compileable and cache.is_croppable


def test_update_gives_handles_only_for_turboquant():
    config = llama_config()
    cache = filled(TurboQuantCache(config, residual_length=0), 200)
    new = torch.randn(2, 2, 2, 1, 32)
    key, value = copy.deepcopy(cache).update(*new, 0)
    assert isinstance(key, KVHandle) and key.shape == (2, 2, 201, 32)
    config._attn_implementation = "sdpa"
    plain_key, plain_value = cache.update(*new, 0)
    assert type(plain_key) is torch.Tensor
    assert torch.equal(key + 0, plain_key) and torch.equal(value.flip(-1).flip(-1), plain_value)
    assert torch.equal(plain_key[:, :, -1:], new[0])  # the newest token is exact


def test_keys_and_values_of_a_layer_are_what_it_stands_for():
    cache = filled(TurboQuantCache(llama_config(), "fp8_e4m3", residual_length=8, center=False), 200)
    exact = filled(TurboQuantCache(llama_config(), residual_length=200), 200)  # packs nothing
    for layer, other in zip(cache.layers, exact.layers, strict=True):
        assert torch.allclose(layer.keys, other.keys, rtol=0.07, atol=1e-2)
        assert torch.allclose(layer.values, other.values, rtol=0.07, atol=1e-2)


def test_crop_select_repeat_reset():
    cache = filled(TurboQuantCache(llama_config(), residual_length=16), 200)
    before = [layer.keys.clone() for layer in cache.layers]
    cache.crop(-30)
    cache.batch_select_indices(torch.tensor([1]))
    cache.batch_repeat_interleave(3)
    for layer, keys in zip(cache.layers, before, strict=True):
        assert torch.equal(layer.keys, keys[[1, 1, 1], :, :170])
    cache.reorder_cache(torch.tensor([2, 0, 1]))
    cache.reset()
    assert cache.get_seq_length() == 0 and cache.get_seq_length(3) == 0
    filled(cache, 5, batch=1)  # other shapes are welcome after a reset
    assert cache.get_seq_length(3) == 5


def test_offload_and_prefetch_keep_everything():
    cache = filled(TurboQuantCache(llama_config(), "tq4", residual_length=16, sink_tokens=2), 200)
    layer = cache.layers[2]
    before = layer.keys.clone()
    layer.offload()
    layer.prefetch()
    assert torch.equal(layer.keys, before)


def test_deepcopy_is_independent_but_shares_the_config():
    cache = filled(TurboQuantCache(llama_config(), residual_length=16), 200)
    twin = copy.deepcopy(cache)
    assert twin.config is cache.config and twin.layers[2].caller.config is cache.config
    before = cache.layers[2].keys.clone()
    filled(twin, 40, seed=1)
    assert torch.equal(cache.layers[2].keys, before) and twin.get_seq_length() == 240


def test_attention_implementation_may_change_later():
    model = build("llama", "turboquant")
    cache = TurboQuantCache(model.config, residual_length=0)
    with torch.no_grad():
        ids = prompt(model, 200)["input_ids"]
        model(ids, past_key_values=cache)
        assert cache.layers[0].storage.packed_length == 192
        packed = model(ids[:, :1], past_key_values=copy.deepcopy(cache)).logits
        model.set_attn_implementation("sdpa")
        plain = model(ids[:, :1], past_key_values=cache).logits
    assert torch.allclose(packed, plain, atol=1e-4)


# ---------------------------------------------------------------------------------------------- bytes and reports


@pytest.mark.parametrize("preset", TOKEN_BYTES)
def test_packed_bytes_are_the_designs(preset):
    config = llama_config(num_hidden_layers=1, hidden_size=256, head_dim=128)
    cache = filled(TurboQuantCache(config, preset, residual_length=0, sink_tokens=0), 128, batch=1, dim=128)
    states = (cache.layers[0].storage.key, cache.layers[0].storage.value)
    packed = sum(x.nbytes for s in states for x in (s.packed, s.scale, s.zero) if x is not None)
    assert packed == TOKEN_BYTES[preset] * 128 * 2
    assert PRESETS[preset].token_bytes(128, 128) == TOKEN_BYTES[preset]


@pytest.mark.parametrize("residual", [0, 128])
@pytest.mark.parametrize("preset", TOKEN_BYTES)
def test_bytes_at_4096_tokens(preset, residual):
    config = llama_config(num_hidden_layers=1, hidden_size=256, head_dim=128)
    cache = TurboQuantCache(config, preset, residual_length=residual, sink_tokens=0)
    filled(cache, 4096, batch=1, dim=128)
    exact = residual + 64  # the tail has room for a block more
    formula = 2 * ((4096 - residual) * TOKEN_BYTES[preset] + exact * 2 * 128 * 4)
    assert cache.nbytes == pytest.approx(formula, rel=0.01)
    assert cache.report().nbytes == cache.nbytes


def test_report_says_per_layer_what_is_stored():
    skip = dict(skip_layers=("boundary", 2), boundary_layers=1)
    report = filled(TurboQuantCache(llama_config(), "tq4", **skip), 400).report()
    stored = [layer.stored for layer in report.layers]
    edge, packed = ["float32 (boundary)"], ["K tq4, V tq4"]
    assert stored == [*edge, *packed, "float32 (index in skip_layers)", *packed * 2, *edge]
    assert report.bytes_16bit == 6 * 2 * 2 * 400 * 2 * 32 * 2
    assert report.layers[0].bits_per_element == 32 * 448 / 400  # room for a whole block
    assert "K tq4, V tq4" in str(report) and f"{report.nbytes:,}" in str(report)


def test_report_says_what_the_process_held_where_there_is_a_gpu():
    report = filled(TurboQuantCache(llama_config(), "tq4"), 400).report()
    assert report.peak_nbytes == 0 and "the process held" not in str(report)
    report = replace(report, peaks={"cuda:0": 12_340_000_000, "cuda:1": 2_000_000_000})
    assert report.peak_nbytes == 14_340_000_000
    assert str(report).endswith("the process held at most 12.34 GB on cuda:0, 2.00 GB on cuda:1 so far")


def test_warns_when_nothing_is_packed():
    with pytest.warns(UserWarning, match=r"no layer of this model will be packed \(boundary\)"):
        TurboQuantCache(llama_config(num_hidden_layers=4), skip_layers="boundary")


class _Allocations(TorchDispatchMode):
    """Notes the largest tensor that any operation makes, and the bytes of all of them."""

    largest = total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        storages = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor) and not isinstance(x, KVHandle):
                if x.untyped_storage().data_ptr() not in storages:
                    self.largest = max(self.largest, x.nbytes)
                    self.total += x.nbytes
        return out


@pytest.mark.parametrize("preset", ["4bit_nc", "tq3", "fp8_e4m3"])
def test_a_decode_step_neither_dequantises_nor_copies_the_cache(preset):
    model = build("llama", "turboquant")

    def step_allocations(context: int) -> _Allocations:
        cache = TurboQuantCache(model.config, preset, residual_length=16)
        filled(cache, context, batch=1)
        with _Allocations() as seen, torch.no_grad():
            model(torch.tensor([[5]]), past_key_values=cache, position_ids=torch.tensor([[900]]))
        return seen

    short, long = step_allocations(4096 + 5), step_allocations(16384 + 5)
    # The largest tensor is bound by a tile of 1,024 tokens, whatever the context.
    assert long.largest == short.largest <= 1024 * 2 * 32 * 4
    # A dequantised copy of the keys of one layer would be larger than any.
    assert long.largest < 16384 * 2 * 32 * 2


# ------------------------------------------------------------------------------------------------------ bad input


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"preset": "5bit"}, ValueError, "expected a preset of .*4bit_nc.*, got '5bit'"),
        ({"key": "uniform4"}, ValueError, "expected a key format of .*, got 'uniform4'"),
        ({"value": "nc4"}, ValueError, "expected a value format of .*, got 'nc4'"),
        ({"skip_layers": ("edge",)}, ValueError, r"expected skip_layers of \['boundary', 'sliding_window'\]"),
        ({"skip_layers": (6,)}, ValueError, "expected a layer index from -6 to 5, got 6"),
        ({"skip_layers": (-7,)}, ValueError, "expected a layer index from -6 to 5, got -7"),
        ({"skip_layers": (True,)}, ValueError, "expected a layer index"),
        ({"boundary_layers": -1}, ValueError, "expected boundary_layers of 0 or more"),
        ({"residual_length": -1}, ValueError, "expected residual_length of 0 or more"),
        ({"smooth": 1.5}, ValueError, "expected smooth from 0"),
        ({"backend": "cuda"}, ValueError, "expected a backend of"),
        ({"max_cache_len": 64, "offloading": True}, NotImplementedError, "cannot be offloaded"),
        ({"max_cache_len": 64, "residual_length": 100}, ValueError, "expected a residual_length that is a multiple"),
    ],
)
def test_bad_arguments(arguments, error, message):
    with pytest.raises(error, match=message):
        TurboQuantCache(llama_config(), **arguments)


def test_sliding_layers_cannot_be_packed():
    with pytest.raises(NotImplementedError, match="keep 'sliding_window' in skip_layers"):
        TurboQuantCache(config_for("gemma3_text"), skip_layers=())


def test_model_without_attention():
    with pytest.raises(ValueError, match="expected a model with attention layers"):
        TurboQuantCache(MambaConfig(num_hidden_layers=2))


@pytest.mark.parametrize(("config", "error"), [({"model_type": "llama"}, TypeError), (PreTrainedConfig(), ValueError)])
def test_config_without_the_needed_fields(config, error):
    with pytest.raises(error, match="expected a .*config"):
        TurboQuantCache(config)


def unchanged_after(cache: TurboQuantCache, error: type[Exception], message: str, action) -> None:
    """`action` raises, and leaves every key and value and the length as they were."""
    before = [layer.keys.clone() for layer in cache.layers]
    with pytest.raises(error, match=message):
        action()
    for layer, keys in zip(cache.layers, before, strict=True):
        assert torch.equal(layer.keys, keys)


@pytest.mark.parametrize("layer_idx", [0, 2], ids=["kept", "packed"])
@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((3, 2, 1, 32), "expected keys of batch 2, as this cache holds, got batch 3"),
        ((1, 2, 1, 32), "expected keys of batch 2, as this cache holds, got batch 1"),
    ],
    ids=["larger", "smaller"],
)
def test_batch_size_may_not_change(layer_idx, shape, message):
    cache = filled(TurboQuantCache(llama_config(), residual_length=16, skip_layers=0), 200)
    unchanged_after(cache, ValueError, message, lambda: cache.update(torch.randn(shape), torch.randn(shape), layer_idx))


def test_heads_and_widths_may_not_change():
    cache = filled(TurboQuantCache(llama_config(), residual_length=16), 200)
    for shape in [(2, 4, 1, 32), (2, 2, 1, 64)]:
        action = lambda shape=shape: cache.update(torch.randn(shape), torch.randn(shape), 2)  # noqa: E731
        unchanged_after(cache, ValueError, "KV heads and head_dim 32, as this cache holds", action)


def test_crop_beyond_the_length():
    cache = filled(TurboQuantCache(llama_config(), residual_length=16), 200)
    unchanged_after(cache, ValueError, "expected to remove at most the 200 tokens", lambda: cache.crop(-201))


@pytest.mark.parametrize("preset", ["4bit_nc", "tq4", "fp8_e4m3", "k8v4"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_token_spoils_no_other(preset, bad, generator):
    config = llama_config(num_hidden_layers=1)
    clean = TurboQuantCache(config, preset, residual_length=0, sink_tokens=0, center=False, smooth=0.0)
    spoilt = copy.deepcopy(clean)
    x = torch.randn(2, 1, 2, 150, 32, generator=generator)  # of which 128 are packed
    x[:, :, :, 3, 0] = 5.0  # the largest element, which decides float8 scales, is not the bad token's
    clean.update(*x, 0)
    x[:, 0, 1, 40, 7] = bad
    spoilt.update(*x, 0)
    others = torch.arange(150) != 40
    for name in ("keys", "values"):
        kept, read = getattr(clean.layers[0], name), getattr(spoilt.layers[0], name)
        assert torch.equal(kept[:, :, others], read[:, :, others])
        assert not read[:, 1, 40].isfinite().all()


def test_public_names():
    assert set(tq_cache.__all__) >= {"TurboQuantCache", "PRESETS"}
    assert set(TOKEN_BYTES) <= set(PRESETS)
