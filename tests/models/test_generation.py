"""Every way to generate, on seven families, in two tests each.

lossless: with a residual that covers everything the tokens are DynamicCache's.
packed:   with nearly everything packed, attention from the packed bits ("turboquant") gives the tokens that the same
          cache gives when it dequantises for the model's own attention (which shows no queries: without smoothing).
"""

import copy

import pytest
import torch
from architectures import build, prompt
from transformers import DynamicCache, GenerationConfig, PreTrainedModel

from tq_cache import TurboQuantCache

FAMILIES = ["llama", "qwen3", "gemma3_text", "mistral", "gpt_oss", "deepseek_v3", "qwen3_next"]
NEW_TOKENS = 10
LENGTH = 140  # of prompts: enough to calibrate on
MODES = {
    "greedy": {},
    "sampling": {"do_sample": True, "top_k": 20},
    "beam": {"num_beams": 3},
    "beam_sample": {"num_beams": 2, "do_sample": True},
    "return_sequences": {"do_sample": True, "num_return_sequences": 3},
    "beam_return_sequences": {"num_beams": 4, "num_return_sequences": 2},
    "prompt_lookup": {"prompt_lookup_num_tokens": 3},
    "assisted": {"assistant": True},
    "chunked_prefill": {"prefill_chunk_size": 47},
    "left_padding": {"left_padding": 9},
    "one_token_prompt": {"length": 1, "max_new_tokens": 140},
}
# Recurrent states cannot be rolled back, so transformers itself refuses these.
UNSUPPORTED = {("qwen3_next", "assisted"), ("qwen3_next", "prompt_lookup")}
CASES = [(family, mode) for family in FAMILIES for mode in MODES if (family, mode) not in UNSUPPORTED]


@pytest.fixture(scope="module")
def models():
    """Models by (family, attention), built once."""
    built: dict[tuple[str, str], PreTrainedModel] = {}

    def get(family: str, attention: str) -> PreTrainedModel:
        own = "eager" if family == "gpt_oss" else "sdpa"
        key = (family, "turboquant" if attention == "turboquant" else own)
        if key not in built:
            built[key] = build(family, key[1])
        return built[key]

    return get


def packed_cache(model: PreTrainedModel, preset: str = "4bit_nc") -> TurboQuantCache:
    options = dict(residual_length=3, sink_tokens=1, skip_layers=("sliding_window",), smooth=0.0)
    return TurboQuantCache(model.config, preset, **options)


def run(model: PreTrainedModel, cache, mode: str) -> torch.Tensor:
    options = dict(MODES[mode])
    inputs = prompt(model, options.pop("length", LENGTH))
    padding = options.pop("left_padding", 0)
    if padding:
        inputs["input_ids"][1, :padding] = 0
        inputs["attention_mask"][1, :padding] = 0
    if options.pop("assistant", False):
        options["assistant_model"] = build("llama", seed=1)
    if "assistant_model" in options or "prompt_lookup_num_tokens" in options:
        inputs = {name: x[:1] for name, x in inputs.items()}
    torch.manual_seed(0)
    length = options.pop("max_new_tokens", NEW_TOKENS)
    config = GenerationConfig(max_new_tokens=length, pad_token_id=0, do_sample=options.pop("do_sample", False))
    return model.generate(**inputs, past_key_values=cache, generation_config=config, **options)


@pytest.mark.filterwarnings("ignore:no layer of this model will be packed")
@pytest.mark.parametrize(("family", "mode"), CASES)
def test_lossless(models, family, mode):
    expected = run(models(family, "own"), DynamicCache(config=models(family, "own").config), mode)
    model = models(family, "turboquant")
    cache = TurboQuantCache(model.config, residual_length=512, skip_layers=("sliding_window",))
    assert torch.equal(run(model, cache, mode), expected)


@pytest.mark.filterwarnings("ignore:no layer of this model will be packed")
@pytest.mark.parametrize(("family", "mode"), CASES)
def test_packed(models, family, mode):
    own, model = models(family, "own"), models(family, "turboquant")
    expected = run(own, packed_cache(own), mode)
    cache = packed_cache(model)
    assert torch.equal(run(model, cache, mode), expected)
    packed = [layer.storage.packed_length for layer in cache.layers if hasattr(layer, "storage")]
    assert all(length > 0 for length in packed)


@pytest.mark.parametrize(
    "preset", ["fp8_e4m3", "fp8_e5m2", "k8v4", "k3v4_nc", "3bit_nc", "tq4", "tq3", "tq2", "tq_k4v2"]
)
def test_every_preset_from_packed_bits(models, preset):
    own, model = models("llama", "own"), models("llama", "turboquant")
    expected = run(own, packed_cache(own, preset), "left_padding")
    assert torch.equal(run(model, packed_cache(model, preset), "left_padding"), expected)


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt_oss", "deepseek_v3"])
@pytest.mark.parametrize("preset", ["4bit_nc", "tq4", "fp8_e4m3"])
def test_the_same_cache_read_in_both_ways(models, family, preset):
    """Filled by attention that shows its queries; then a copy of it is dequantised for the model's own."""
    own, model = models(family, "own"), models(family, "turboquant")
    cache = TurboQuantCache(model.config, preset, residual_length=0)
    inputs = prompt(model, LENGTH)
    inputs["attention_mask"][1, :9] = 0
    with torch.no_grad():
        model(**inputs, past_key_values=cache)
        twin = copy.deepcopy(cache)
        for layer in twin.layers:
            layer.config = own.config  # a cache is made with the config of the model that runs it
        following = prompt(model, 5, seed=9)["input_ids"]
        mask = torch.cat([inputs["attention_mask"], torch.ones_like(following)], dim=1)
        logits = [m(following, attention_mask=mask, past_key_values=c).logits for m, c in ((model, cache), (own, twin))]
    packed = [layer.storage for layer in cache.layers if hasattr(layer, "storage")]
    assert packed and all(storage.packed_length >= 128 for storage in packed)
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt_oss", "deepseek_v3"])
@pytest.mark.parametrize("preset", ["4bit_nc", "tq4", "fp8_e4m3"])
def test_padded_row_gives_what_the_row_alone_gives(models, family, preset):
    model = models(family, "turboquant")
    short = prompt(model, 192, seed=3)["input_ids"][:1]
    long = prompt(model, 256, seed=4)["input_ids"][:1]
    padded = torch.cat([torch.zeros(1, 64, dtype=torch.long), short], dim=1)  # a block: the others stay the same
    inputs = {"input_ids": torch.cat([long, padded]), "attention_mask": torch.ones(2, 256, dtype=torch.long)}
    inputs["attention_mask"][1, :64] = 0
    config = GenerationConfig(max_new_tokens=NEW_TOKENS, pad_token_id=0)

    def cache():  # the first tokens of a batch are padding: without sinks the same tokens are packed
        return TurboQuantCache(model.config, preset, residual_length=0, sink_tokens=0)

    batch = model.generate(**inputs, past_key_values=cache(), generation_config=config)
    alone = model.generate(short, past_key_values=cache(), generation_config=config)
    assert torch.equal(batch[1, 256:], alone[0, 192:])


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "deepseek_v3", "qwen3_next"])
def test_second_turn_continues_the_cache(models, family):
    model = models(family, "turboquant")
    config = GenerationConfig(max_new_tokens=6, pad_token_id=0)
    cache = packed_cache(model)
    first = model.generate(prompt(model, LENGTH)["input_ids"], past_key_values=cache, generation_config=config)
    stored = [packed_bytes(layer) for layer in cache.layers]
    follow_up = torch.cat([first, prompt(model, 9, seed=5)["input_ids"]], dim=1)
    second = model.generate(follow_up, past_key_values=cache, generation_config=config)
    assert second.shape[1] == follow_up.shape[1] + 6
    for before, layer in zip(stored, cache.layers, strict=True):
        if before is not None:  # the first turn's whole blocks are the same bits
            assert torch.equal(before, packed_bytes(layer)[:, :, : before.shape[2]])
    own = models(family, "own")
    cache = packed_cache(own)
    own.generate(prompt(own, LENGTH)["input_ids"], past_key_values=cache, generation_config=config)
    assert torch.equal(second, own.generate(follow_up, past_key_values=cache, generation_config=config))


def packed_bytes(layer) -> torch.Tensor | None:
    """Copy of the whole blocks of a packed layer's keys."""
    if not hasattr(layer, "storage"):
        return None
    return layer.storage.key.packed[:, :, : layer.storage.packed_length // 64].clone()


def test_prefix_reuse_by_deepcopy(models):
    model = models("llama", "turboquant")
    config = GenerationConfig(max_new_tokens=6, pad_token_id=0)
    prefix = prompt(model, LENGTH)["input_ids"]
    cache = packed_cache(model)
    with torch.no_grad():
        model(prefix, past_key_values=cache)
    for seed in (1, 2):
        full = torch.cat([prefix, prompt(model, 8, seed=seed)["input_ids"]], dim=1)
        reused = model.generate(full, past_key_values=copy.deepcopy(cache), generation_config=config)
        again = model.generate(full, past_key_values=copy.deepcopy(cache), generation_config=config)
        assert torch.equal(reused, again)
    assert cache.get_seq_length() == LENGTH


def test_prefill_under_inference_mode_then_generate(models):
    model = models("llama", "turboquant")
    ids = prompt(model, LENGTH)["input_ids"]
    cache = packed_cache(model)
    with torch.inference_mode():
        model(ids, past_key_values=cache)
        twin = copy.deepcopy(cache)
    options = dict(max_new_tokens=80, do_sample=False, pad_token_id=0)
    with torch.inference_mode():
        within = model.generate(torch.cat([ids, ids[:, :3]], dim=1), past_key_values=copy.deepcopy(cache), **options)
    for held in (cache, twin):
        out = model.generate(torch.cat([ids, ids[:, :3]], dim=1), past_key_values=held, **options)
        assert out.shape[1] == LENGTH + 3 + 80 and torch.equal(out, within)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_models(dtype):
    expected, got = (
        model.generate(**prompt(model, LENGTH), past_key_values=packed_cache(model), max_new_tokens=4,
                       output_logits=True, return_dict_in_generate=True, do_sample=False, pad_token_id=0)
        for model in (build("llama", "eager").to(dtype), build("llama", "turboquant").to(dtype))
    )  # fmt: skip
    # The first token comes from the exact tensors, the second from packed ones: the same up to half precision.
    assert torch.allclose(got.logits[1].float(), expected.logits[1].float(), atol=0.25, rtol=0.05)


def test_encoder_decoder():
    from transformers import EncoderDecoderCache, T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    config = T5Config(vocab_size=64, d_model=64, d_kv=32, d_ff=64, num_layers=3, num_heads=2, decoder_start_token_id=1)
    model = T5ForConditionalGeneration(config).eval()
    ids = torch.randint(3, 64, (2, 12))

    def generate(cache, **options):
        pair = EncoderDecoderCache(cache, DynamicCache(config=config))
        return model.generate(
            ids, past_key_values=pair, max_new_tokens=12, do_sample=False, eos_token_id=None, **options
        )

    lossless = TurboQuantCache(config, residual_length=64, skip_layers=())
    assert torch.equal(generate(lossless), generate(DynamicCache(config=config)))
    assert generate(TurboQuantCache(config, residual_length=2, skip_layers=()), num_beams=2).shape == (2, 13)
