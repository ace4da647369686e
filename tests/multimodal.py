"""Tiny random models that read images or sound, or have an encoder, and inputs of such kinds for them."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import transformers
from architectures import HIDDEN, VOCAB, _spread_weights, tiny_config
from transformers import (
    CONFIG_MAPPING,
    Cache,
    DynamicCache,
    EncoderDecoderCache,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
)

from tq_cache import TurboQuantCache

IMAGE = VOCAB - 1  # the token that an image's features take the place of
START, END = VOCAB - 2, VOCAB - 3  # around images, where a model wants such
WORDS = VOCAB - 5  # words are 3 up to here
IMAGE_AT = 12  # where it begins in a prompt: behind the sink tokens, in the first block
NEW_TOKENS = 8
SHORT, PACKED = 60, 140  # tokens of prompts; two blocks behind the sink tokens
PADDING = 9  # tokens at the left of the second row, where a prompt is padded


class Multimodal(NamedTuple):
    """A model class, changes of its tiny config, and what it gets beside `input_ids`: make(config, rows, generator).

    images: tokens of an image in the prompt; 0: the prompt is the decoder's, and the rest the encoder's
    kinds:  name of the argument that says which tokens are an image's, where the model takes one
    """

    model: str
    overrides: dict[str, Any]
    make: Callable[[PreTrainedConfig, int, torch.Generator], dict[str, torch.Tensor]]
    images: int = 0
    kinds: str = ""


def _pixels(config: PreTrainedConfig, rows: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """One image a row."""
    size = config.vision_config.image_size
    return {"pixel_values": torch.randn(rows, 3, size, size, generator=generator)}


def _patches(config: PreTrainedConfig, rows: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """One image of 4 x 6 patches a row, as Qwen's processors cut them: 2 x 3 tokens."""
    vision = config.vision_config
    width = 3 * vision.temporal_patch_size * vision.patch_size**2
    patches = torch.randn(rows * 24, width, generator=generator)
    return {"pixel_values": patches, "image_grid_thw": torch.tensor([[1, 4, 6]]).expand(rows, 3).clone()}


def _sound(config: PreTrainedConfig, rows: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """A mel spectrogram a row."""
    frames = 2 * config.max_source_positions
    return {"input_features": torch.randn(rows, config.num_mel_bins, frames, generator=generator)}


def _text(config: PreTrainedConfig, rows: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    return {"input_ids": torch.randint(3, WORDS, (rows, 20), generator=generator)}


QWEN = dict(image_token_id=IMAGE, video_token_id=VOCAB - 4, vision_start_token_id=START, vision_end_token_id=END)
ROPE = dict(rope_type="default", rope_theta=10000.0, mrope_section=[6, 5, 5])
VISION = dict(out_hidden_size=HIDDEN, patch_size=4, depth=2)
MODELS = {
    "qwen2_5_vl": Multimodal(
        "Qwen2_5_VLForConditionalGeneration",
        QWEN | dict(text_config=dict(rope_parameters=ROPE),
                    vision_config=VISION | dict(fullatt_block_indexes=[1], window_size=16)),
        _patches, 6, "mm_token_type_ids",
    ),
    "qwen3_vl": Multimodal(
        "Qwen3VLForConditionalGeneration",
        QWEN | dict(text_config=dict(rope_parameters=ROPE | dict(mrope_interleaved=True)),
                    vision_config=VISION | dict(deepstack_visual_indexes=[0], num_position_embeddings=64)),
        _patches, 6, "mm_token_type_ids",
    ),
    "gemma3": Multimodal(
        "Gemma3ForConditionalGeneration",
        dict(image_token_index=IMAGE, boi_token_index=START, eoi_token_index=END, mm_tokens_per_image=4,
             vision_config=dict(image_size=16, patch_size=4, num_hidden_layers=2)),
        _pixels, 4, "token_type_ids",
    ),
    "llava": Multimodal(
        "LlavaForConditionalGeneration",
        dict(image_token_index=IMAGE, image_seq_length=16,
             vision_config=dict(image_size=16, patch_size=4, num_hidden_layers=2)),
        _pixels, 16,
    ),
    "whisper": Multimodal(
        "WhisperForConditionalGeneration", dict(max_source_positions=30, num_mel_bins=16, is_decoder=False,
                                                is_encoder_decoder=True), _sound
    ),
    "t5": Multimodal(
        "T5ForConditionalGeneration", dict(d_ff=64, d_kv=32, is_decoder=False, is_encoder_decoder=True), _text
    ),
}  # fmt: skip


def build_multimodal(name: str, attn_implementation: str | None = None, seed: int = 0) -> PreTrainedModel:
    """A tiny random float32 model in eval mode, whose greedy runs never stop early."""
    case = MODELS[name]
    config = tiny_config(CONFIG_MAPPING[name](), case.overrides)
    choice = {} if attn_implementation is None else {"attn_implementation": attn_implementation}
    torch.manual_seed(seed)
    model = getattr(transformers, case.model)._from_config(config, dtype=torch.float32, **choice)
    _spread_weights(model, seed)
    for key, parameter in model.named_parameters():
        if name == "t5" and key.endswith("Attention.q.weight"):
            parameter.data /= config.d_kv**0.5  # T5 does not scale scores, but its queries when it is made
    start = None if case.images else 1
    special = dict(pad_token_id=0, bos_token_id=1, decoder_start_token_id=start)
    model.generation_config = GenerationConfig(do_sample=False, **special)
    return model.eval()


def multimodal_prompt(model: PreTrainedModel, name: str, length: int, padded: bool = False) -> dict[str, torch.Tensor]:
    """What the processor of the model makes of two rows of `length` tokens, images among them, or of sound or text.

    padded: the second row begins with `PADDING` tokens that nothing attends to
    """
    case, generator = MODELS[name], torch.Generator().manual_seed(0)
    ids = torch.randint(3, WORDS, (2, length), generator=generator)
    given = case.make(model.config, 2, generator)
    if not case.images:
        return given | {"decoder_input_ids": ids}
    image = torch.tensor([START, *[IMAGE] * case.images, END])
    ids[:, IMAGE_AT : IMAGE_AT + len(image)] = image
    mask = torch.ones_like(ids)
    if padded:
        ids[1, :PADDING] = mask[1, :PADDING] = 0
    if case.kinds:
        given[case.kinds] = (ids == IMAGE).long()
    return given | {"input_ids": ids, "attention_mask": mask}


def turboquant(model: PreTrainedModel, **options: Any) -> TurboQuantCache:
    return TurboQuantCache(model.config, skip_layers=("sliding_window",), **options)


def generate(model: PreTrainedModel, inputs: dict[str, torch.Tensor], cache: Any = None, **options: Any) -> Any:
    """Tokens, logits and cache of `NEW_TOKENS` steps.  An encoder-decoder's `cache` is that of its own tokens."""
    given = dict(max_new_tokens=NEW_TOKENS, return_dict_in_generate=True, output_logits=True)
    if isinstance(cache, Cache) and not isinstance(cache, EncoderDecoderCache) and model.config.is_encoder_decoder:
        cache = EncoderDecoderCache(cache, DynamicCache(config=model.config))
    return model.generate(**inputs, **given | options, **{} if cache is None else {"past_key_values": cache})


def distance(out: Any, expected: Any) -> float:
    """Of logits, as a share of those expected, up to the first step at which a near tie may split the two runs."""
    found, wanted = torch.stack(out.logits), torch.stack(expected.logits)
    same = (found.argmax(-1) == wanted.argmax(-1)).all(dim=1)
    steps = len(same) if same.all() else int(same.int().argmin()) + 1
    return ((found - wanted)[:steps].norm() / wanted[:steps].norm()).item()


def check(name: str) -> tuple[int, int, str]:
    """Check one model with the cache in hand; returns layers that are packed, all layers, and what attention reads."""
    own, model = build_multimodal(name), build_multimodal(name, "turboquant")
    inputs = multimodal_prompt(own, name, SHORT)
    expected = generate(own, inputs, DynamicCache(config=own.config))
    out = generate(model, inputs, turboquant(model, residual_length=512))
    assert torch.equal(out.sequences, expected.sequences), "nothing packed gives other tokens than DynamicCache"
    assert distance(out, expected) < 1e-4
    inputs = multimodal_prompt(own, name, PACKED)
    dequantised, bits = (turboquant(m, preset="fp8_e4m3", residual_length=0) for m in (own, model))
    expected, out = generate(own, inputs, dequantised), generate(model, inputs, bits)
    assert distance(out, expected) < 1e-4, "packed attention is not that over the dequantised cache"
    packed = [layer for layer in bits.layers if hasattr(layer, "storage")]
    assert packed and all(layer.storage.packed_length == 128 for layer in packed)
    return len(packed), len(bits.layers), "packed bits" if reads_bits(model) else "dequantised"


def reads_bits(model: PreTrainedModel) -> bool:
    """Whether every part of the model that is a model has "turboquant"."""
    parts = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    return all(part.config._attn_implementation == "turboquant" for part in parts)


TABLE = """## Images, sound, encoders

The same of tiny models that read random images or sound, or have an encoder (whose cross-attention stays in the model's
dtype, in the other half of an `EncoderDecoderCache`).  With `return_dict_in_generate` Whisper makes a cache of plain
tensors out of the one that it used.

| model type | class | result | layers packed | attention reads |
|---|---|---|---|---|"""


def row(name: str) -> str:
    """A line of `TABLE`."""
    packed, layers, path = check(name)
    return f"| {name} | {MODELS[name].model} | ok | {packed} of {layers} | {path} |"
