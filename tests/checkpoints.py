"""Checkpoints as their formats' public documentation describes them: what stands in their configs, and what it means.

Every row says where its shape is documented.  Weights, groups and ignore lists are cut down to what tells formats
apart.
"""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Checkpoint:
    """One kind.

    quantization: `quantization_config` of config.json, or None
    quant_file:   hf_quant_config.json, or None
    scales:       names of the KV scale tensors of a layer, after "model.layers.N."; empty: it ships none
    field:        what declares fp8 KV scales, or says that these are none; "" if nothing speaks of the KV cache
    """

    name: str
    quantization: dict[str, Any] | None = None
    quant_file: dict[str, Any] | None = None
    scales: tuple[str, ...] = ()
    field: str = ""
    method: str = "none"
    has_fp8_scales: bool = False


def _compressed(name: str, form: str, weights: dict[str, Any], **more: Any) -> Checkpoint:
    extra = {key: more.pop(key) for key in ("kv_cache_scheme",) if key in more}
    quantization = {"quant_method": "compressed-tensors", "format": form, "quantization_status": "compressed"}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}}
    quantization |= {"config_groups": groups, "ignore": ["lm_head"]} | extra
    return Checkpoint(name, quantization, method="compressed-tensors", **more)


def _modelopt(algorithm: str, kv: str | None) -> dict[str, Any]:
    quantization = {"quant_algo": algorithm, "kv_cache_quant_algo": kv, "exclude_modules": ["lm_head"]}
    return {"producer": {"name": "modelopt", "version": "0.29.0"}, "quantization": quantization}


def _quark(layer_quant_config: dict[str, Any], kv_cache_group: list[str], **more: Any) -> dict[str, Any]:
    tensor = {
        "dtype": "fp8_e4m3",
        "is_dynamic": False,
        "qscheme": "per_tensor",
        "observer_cls": "PerTensorMinMaxObserver",
    }
    return {
        "quant_method": "quark",
        "global_quant_config": {"weight": tensor, "input_tensors": tensor, "output_tensors": None, "bias": None},
        "layer_quant_config": layer_quant_config,
        "export": {"kv_cache_group": kv_cache_group, "min_kv_scale": 0.0, "pack_method": "reorder"},
        **more,
    }


INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}
INT8 = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
FLOAT8 = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
QUARK_KV = {"output_tensors": {"dtype": "fp8_e4m3", "is_dynamic": False, "qscheme": "per_tensor"}}
SEPARATE = ("self_attn.k_scale", "self_attn.v_scale")
OF_PROJECTIONS = ("self_attn.k_proj.k_scale", "self_attn.v_proj.v_scale")
OUTPUT_SCALES = ("self_attn.k_proj.output_scale", "self_attn.v_proj.output_scale")

# What declares fp8 KV scales: these name fp8_e5m2's refusal.
_SCHEME = {"field": "quantization_config.kv_cache_scheme", "has_fp8_scales": True}

CHECKPOINTS = [
    Checkpoint("not quantised"),
    # The example in github.com/vllm-project/vllm/issues/39137 (cyankiwi/gemma-4-31B-it-AWQ-4bit): the field is absent.
    _compressed("compressed-tensors W4A16", "pack-quantized", INT4),
    # docs.vllm.ai/projects/llm-compressor, quantization_w4a16; published configs hold a null (Kimi-K2.5, GLM W4A16).
    _compressed("compressed-tensors W4A16, null", "pack-quantized", INT4, kv_cache_scheme=None),
    # github.com/vllm-project/compressed-tensors, preset scheme W8A16: as above, 8 bits per channel.
    _compressed("compressed-tensors W8A16, null", "pack-quantized", INT8, kv_cache_scheme=None),
    # docs.vllm.ai/projects/llm-compressor, examples/quantization_w8a8_fp8 (fp8 weights, no KV scales).
    _compressed("compressed-tensors fp8, null", "float-quantized", FLOAT8, kv_cache_scheme=None),
    # docs.vllm.ai/projects/llm-compressor, examples/quantization_w4a4_fp4.
    _compressed(
        "compressed-tensors NVFP4",
        "nvfp4-pack-quantized",
        {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16},
        kv_cache_scheme=None,
    ),
    # docs.vllm.ai/projects/llm-compressor, examples/quantization_kv_cache, and its issue 111.
    _compressed(
        "compressed-tensors fp8 + KV", "float-quantized", FLOAT8, kv_cache_scheme=FLOAT8, scales=SEPARATE, **_SCHEME
    ),
    # The same scheme beside int4 weights: KV scales do not depend on how weights are quantised.
    _compressed(
        "compressed-tensors W4A16 + KV", "pack-quantized", INT4, kv_cache_scheme=FLOAT8, scales=SEPARATE, **_SCHEME
    ),
    # docs.vllm.ai, features/quantization/quantized_kvcache: strategy attn_head, a scale per KV head.
    _compressed(
        "compressed-tensors fp8 + KV per head",
        "float-quantized",
        FLOAT8,
        kv_cache_scheme=FLOAT8 | {"strategy": "attn_head"},
        scales=SEPARATE,
        **_SCHEME,
    ),
    # compressed_tensors.quantization.QuantizationArgs: dynamic scales are computed at run time, none are saved.
    _compressed(
        "compressed-tensors fp8 + dynamic KV",
        "float-quantized",
        FLOAT8,
        kv_cache_scheme=FLOAT8 | {"dynamic": True},
        field="quantization_config.kv_cache_scheme",
    ),
    # github.com/vllm-project/compressed-tensors/pull/86: int8 KV scales, which are not float8's.
    _compressed(
        "compressed-tensors int8 KV",
        "int-quantized",
        INT8,
        kv_cache_scheme={"num_bits": 8, "type": "int", "symmetric": True, "strategy": "tensor"},
        scales=SEPARATE,
        field="quantization_config.kv_cache_scheme",
    ),
    # rocm.docs.amd.com (vLLM optimization, FP8 KV cache): "kv_cache_scheme": "static".
    Checkpoint(
        "AutoFP8 static",
        {
            "quant_method": "fp8",
            "activation_scheme": "static",
            "ignored_layers": ["lm_head"],
            "kv_cache_scheme": "static",
        },
        scales=SEPARATE,
        method="fp8",
        **_SCHEME,
    ),
    # github.com/neuralmagic/AutoFP8/pull/17: one kv_scale per attention module, no word of it in the config.
    Checkpoint(
        "AutoFP8 kv_scale",
        {"quant_method": "fp8", "activation_scheme": "static"},
        scales=("self_attn.kv_scale",),
        field="model.layers.0.self_attn.kv_scale",
        method="fp8",
        has_fp8_scales=True,
    ),
    # github.com/neuralmagic/AutoFP8/pull/25: k_scale and v_scale.
    Checkpoint(
        "AutoFP8 k_scale",
        {"quant_method": "fp8", "activation_scheme": "static"},
        scales=SEPARATE,
        field="model.layers.0.self_attn.k_scale",
        method="fp8",
        has_fp8_scales=True,
    ),
    # huggingface.co/docs/transformers, quantization/finegrained_fp8; huggingface.co/deepseek-ai/DeepSeek-V3.
    Checkpoint(
        "fp8 blocks",
        {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]},
        method="fp8",
    ),
    # nvidia.github.io/TensorRT-Model-Optimizer, deployment/3_unified_hf: hf_quant_config.json beside config.json.
    Checkpoint(
        "ModelOpt fp8 + KV",
        quant_file=_modelopt("FP8", "FP8"),
        scales=OF_PROJECTIONS,
        field="quantization.kv_cache_quant_algo",
        method="modelopt",
        has_fp8_scales=True,
    ),
    Checkpoint("ModelOpt fp8", quant_file=_modelopt("FP8", None), method="modelopt"),
    # github.com/NVIDIA/Model-Optimizer/pull/557: the KV cache in NVFP4, whose scales are not float8's.
    Checkpoint(
        "ModelOpt NVFP4 + NVFP4 KV",
        quant_file=_modelopt("NVFP4", "NVFP4"),
        scales=OF_PROJECTIONS,
        field="quantization.kv_cache_quant_algo",
        method="modelopt",
    ),
    # github.com/alvarobartt/hf-mem/pull/46 (lukealonso/MiniMax-M2.5-NVFP4): the same in config.json.
    Checkpoint(
        "ModelOpt NVFP4 + KV in config.json",
        {
            "quant_method": "modelopt",
            "quant_algo": "NVFP4",
            "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
            "ignore": ["lm_head"],
        },
        scales=OF_PROJECTIONS,
        method="modelopt",
        **_SCHEME,
    ),
    Checkpoint(
        "ModelOpt NVFP4 in config.json",
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]},
        method="modelopt",
    ),
    # vllm.model_executor.layers.quantization.modelopt: both nestings, any case.
    Checkpoint(
        "ModelOpt nested, lower case",
        {"quant_method": "modelopt", "quantization": {"quant_algo": "nvfp4", "kv_cache_quant_algo": "fp8"}},
        scales=OF_PROJECTIONS,
        field="quantization_config.quantization.kv_cache_quant_algo",
        method="modelopt",
        has_fp8_scales=True,
    ),
    # quark.torch.quantization.config, Config.to_dict: kv_cache_quant_config; scales as output_scale of the projections.
    Checkpoint(
        "Quark fp8 + KV",
        _quark({}, ["*k_proj", "*v_proj"], kv_cache_quant_config={"*k_proj": QUARK_KV, "*v_proj": QUARK_KV}),
        scales=OUTPUT_SCALES,
        field="quantization_config.kv_cache_quant_config",
        method="quark",
        has_fp8_scales=True,
    ),
    # vllm.model_executor.layers.quantization.quark: kv_cache_group, with the configs of those layers.
    Checkpoint(
        "Quark fp8 + KV, older",
        _quark({"*k_proj": QUARK_KV, "*v_proj": QUARK_KV}, ["*k_proj", "*v_proj"]),
        scales=OUTPUT_SCALES,
        field="quantization_config.export.kv_cache_group",
        method="quark",
        has_fp8_scales=True,
    ),
    Checkpoint("Quark fp8", _quark({}, [], kv_cache_quant_config={}), method="quark"),
    # huggingface.co/docs/transformers, quantization/awq.
    Checkpoint(
        "AWQ",
        {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"},
        method="awq",
    ),
    # huggingface.co/docs/transformers, quantization/gptq.
    Checkpoint(
        "GPTQ",
        {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True},
        method="gptq",
    ),
    # huggingface.co/docs/transformers, quantization/bitsandbytes.
    Checkpoint(
        "bitsandbytes",
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
        method="bitsandbytes",
    ),
    # The same before configs named their method (transformers 4.30).
    Checkpoint("bitsandbytes, older", {"load_in_8bit": True, "llm_int8_threshold": 6.0}, method="bitsandbytes"),
    # huggingface/text-generation-inference, examples/fp8_kvcache: kv_scale beside unquantised weights.
    Checkpoint(
        "not quantised, kv_scale",
        scales=("self_attn.kv_scale",),
        field="model.layers.0.self_attn.kv_scale",
        has_fp8_scales=True,
    ),
]
