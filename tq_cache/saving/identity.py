"""What a saved cache belongs to: a model's shape, its weights (`weights`), and the numbers that codes stand for."""

import hashlib
import json
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig

from ..compat import decoder_config, layer_kinds
from ..formats.packing import pack
from ..formats.presets import Format, Preset
from ..formats.rotation import rotation_matrix
from ..planning.geometry import model_geometry
from ..planning.layers import INDEXED
from .folder import CacheFileError
from .weights import difference

# What of a config keys and values depend on; its layers' kinds come beside.
FIELDS = (
    "model_type", "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "sliding_window",
    "attention_chunk_size", "rope_parameters", "rope_theta", "rope_scaling", "partial_rotary_factor", "rms_norm_eps",
    "layer_norm_eps", "attention_bias", "tie_word_embeddings", "index_topk", "index_head_dim",
)  # fmt: skip


def model_fields(config: PreTrainedConfig) -> dict[str, Any]:
    """What must be the same where a saved cache is loaded, as JSON."""
    decoder = decoder_config(config)
    said = decoder.to_dict()
    found = {name: said[name] for name in FIELDS if said.get(name) is not None}
    rope = json.dumps(found.get("rope_parameters"), default=str)  # of all layers, or of each kind
    for name in ("rope_theta", "partial_rotary_factor"):  # where it has these, transformers 5.17 says them twice
        if f'"{name}"' in rope:
            found.pop(name, None)
    found["layer_kinds"] = ["indexed" if kind in INDEXED else kind for kind in layer_kinds(decoder)]  # since 5.17
    try:  # where layers differ, no field says so
        layers = model_geometry(config).layers
        found["layers"] = [[x.num_kv_heads, x.key_dim, x.value_dim, x.window] for x in layers]
    except NotImplementedError:  # layers of a model's own
        pass
    return json.loads(json.dumps(found, default=str))


@lru_cache(maxsize=64)  # layers are many, formats and widths few
def code_fingerprint(fmt: Format, head_dim: int) -> str:
    """Changes when the bytes of this format and width come to stand for other numbers."""
    digest = hashlib.sha256(fmt.values(dtype=torch.float64).nan_to_num(nan=1e9).numpy().tobytes())
    digest.update(f"{fmt.bits} {fmt.scale} {fmt.codebook and fmt.codebook.unit}".encode())
    if not fmt.exact:  # every code once in every place, as it lies in the bytes
        codes = (torch.arange(head_dim)[None] * 7 + torch.arange(16)[:, None] * 3) % 2**fmt.bits
        digest.update(pack(codes.to(torch.uint8), fmt.bits).numpy().tobytes())
    if fmt.rotated:
        digest.update(rotation_matrix(head_dim, torch.device("cpu"), torch.float32).numpy().tobytes())
    return digest.hexdigest()[:32]


def preset_fields(preset: Preset) -> dict[str, Any]:
    """What a layer is stored as, as JSON."""
    return dict(
        key=preset.key.name, value=preset.value.name, center=list(preset.center), smooth=preset.smooth,
        roles=list(preset.roles),
    )  # fmt: skip


def check_model(
    header: Mapping[str, Any], config: PreTrainedConfig, model: torch.nn.Module | None, any_weights: bool
) -> None:
    """Raise CacheFileError unless a cache was saved with this model."""
    saved, here = header["model"], model_fields(config)
    names = [name for name in sorted(set(saved) | set(here)) if saved.get(name) != here.get(name)]
    if names:
        said = "; ".join(f"{name} {saved.get(name)!r:.60}, here {here.get(name)!r:.60}" for name in names)
        raise CacheFileError(f"expected the model that this cache was saved with, got another: {said}")
    problem = None if any_weights else difference(header["weights"], config, model)
    if problem is not None:
        raise CacheFileError(
            f"expected the weights that this cache was saved with ({Path(header['weights']['name']).name!r}), got "
            f"others ({problem}); any_weights=True loads it all the same"
        )


def check_codes(header: Mapping[str, Any], presets: Mapping[int, Preset | None]) -> None:
    """Raise CacheFileError unless layers are stored as they would be here, and codes stand for the same numbers."""
    for index, preset in presets.items():
        saved, here = header["layers"][index]["preset"], preset and preset_fields(preset)
        if saved != here:
            raise CacheFileError(
                f"expected layer {index} stored as this version of tq_cache would, {here}, got {saved}; "
                f"load it with the version that wrote it ({header['written_by']})"
            )
        for role, dim in header["layers"][index].get("widths", {}).items():
            assert preset is not None
            fmt = preset.key if role == "key" else preset.value
            if header["codes"].get(f"{fmt.name} {dim}") != code_fingerprint(fmt, dim):
                raise CacheFileError(
                    f"expected codes of {fmt.name}, width {dim}, that stand for the numbers they do in this version of "
                    f"tq_cache, got others; load it with the version that wrote it ({header['written_by']})"
                )
