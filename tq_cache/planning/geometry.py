"""What every layer of a model caches, from its config alone: no model classes, no weights."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PreTrainedConfig
from transformers.cache_utils import DynamicIndexedLayer, DynamicLayer, LinearAttentionLayer

from ..compat import decoder_config, layer_kinds, own_layers
from ..storage.checks import unpackable_width
from .layers import BLOCK_SPARSE, PACKABLE, WINDOWED, WITHOUT_KV

# Until 5.17 these expanded their latent before caching it; later versions call them indexed and cache the latent.
EXPANDED_LATENT = ("deepseek_sparse_attention",)


@dataclass(frozen=True)
class LayerGeometry:
    """What one layer caches of a token: `num_kv_heads` keys of `key_dim` and values of `value_dim` elements.

    latent:      multi-head latent attention (MLA): one latent in place of keys, one rotary key, which may have no
                 elements, in place of values
    window:      tokens attended to by a sliding or chunked layer, which holds one fewer; None: it holds all
    indexer_dim: further elements per token that always stay in the model's dtype (the indexer of sparse attention)

    A layer without keys and values has zeros.
    """

    index: int
    kind: str
    num_kv_heads: int = 0
    key_dim: int = 0
    value_dim: int = 0
    latent: bool = False
    window: int | None = None
    indexer_dim: int = 0


@dataclass(frozen=True)
class ModelGeometry:
    """The cache layers of a model; `notes` say in words what it holds beside them, which is not counted."""

    model_type: str
    layers: tuple[LayerGeometry, ...]
    notes: tuple[str, ...] = ()


def load_config(path: str | Path) -> PreTrainedConfig:
    """The config in a folder, or a config.json.  Raises ValueError unless there is one that transformers can read."""
    file = Path(path)
    file = file / "config.json" if file.is_dir() else file
    if not file.is_file():
        raise ValueError(f"expected a model folder or a config.json, got {str(path)!r}, where there is none")
    try:
        content = json.loads(file.read_text())
    except ValueError:
        raise ValueError(f"expected the config.json of a model, got {str(file)!r}, which is not JSON") from None
    if not isinstance(content, dict) or "model_type" not in content:
        raise ValueError(f"expected a config.json with a model_type, got {str(file)!r} without")
    try:
        return AutoConfig.from_pretrained(str(file))
    except Exception as error:  # of any class: huggingface_hub checks fields, or transformers, or nobody does
        raise ValueError(
            f"expected a config.json that transformers can read, got {str(file)!r}: {type(error).__name__}: {error}"
        ) from error


def model_geometry(config: PreTrainedConfig) -> ModelGeometry:
    """What each cache layer of this model holds.

    Raises TypeError or ValueError unless the config describes a decoder with the fields needed, NotImplementedError on
    layers whose memory is their model's own affair.
    """
    decoder = decoder_config(config)
    kinds, layers = layer_kinds(decoder), own_layers(decoder)
    configs = _config_per_layer(decoder, len(kinds))
    geometry = tuple(
        _layer_geometry(configs[index], index, kind, layer)
        for index, (kind, layer) in enumerate(zip(kinds, layers, strict=True))
    )
    notes = []
    states = [kind for kind, layer in zip(kinds, layers, strict=True) if isinstance(layer, LinearAttentionLayer)]
    if fixed := sum(kind not in ("moe", "mlp") for kind in states):  # 5.17 keeps empty ones for these two
        notes.append(f"{fixed} layers keep a recurrent state of fixed size, not counted here")
    if getattr(config, "is_encoder_decoder", False):
        notes.append("keys and values of the encoder (cross attention) are not counted here")
    return ModelGeometry(decoder.model_type, geometry, tuple(notes))


def kv_heads(decoder: PreTrainedConfig) -> dict[int, int]:
    """KV heads of the whole model in each layer that caches keys and values, by index; latents count as one.

    Raises ValueError unless the config has the fields needed.
    """
    kinds = layer_kinds(decoder)
    configs = _config_per_layer(decoder, len(kinds))
    return {
        index: _dims(configs[index], kind)[0] if not _caches_latents(configs[index], kind) else 1
        for index, kind in enumerate(kinds)
        if kind in (*PACKABLE, *WINDOWED)
    }


def latent_layers(decoder: PreTrainedConfig) -> dict[int, int]:
    """The layers that may be packed and cache latents, by index, with the width of their rotary keys, maybe 0."""
    kinds = layer_kinds(decoder)
    configs = _config_per_layer(decoder, len(kinds))
    return {
        index: _rotary_dim(configs[index], index)
        for index, kind in enumerate(kinds)
        if kind in PACKABLE and _caches_latents(configs[index], kind)
    }


def unpackable_layers(decoder: PreTrainedConfig) -> dict[int, str]:
    """The layers of kinds that may be packed whose width no format takes, by index, with what is wrong with it.

    Where the config does not say how wide they are, the first keys and values do (`TurboQuantCache.update`).
    """
    kinds = layer_kinds(decoder)
    found = {}
    for index, (kind, config) in enumerate(zip(kinds, _config_per_layer(decoder, len(kinds)), strict=False)):
        if kind not in PACKABLE:
            continue
        try:
            latent = _caches_latents(config, kind)
            dims = (_field(config, "kv_lora_rank"), 0) if latent else _dims(config, kind)[1:]
        except (ValueError, TypeError):  # heads by layer, in a list (OpenELM)
            continue
        if all(isinstance(dim, int) for dim in dims) and (problem := unpackable_width(*dims, latent)):
            found[index] = problem
    return found


def _config_per_layer(decoder: Any, num_layers: int) -> list[Any]:
    """The config as each cache layer sees it: where layers differ, transformers keeps one for each."""
    per_layer = list(getattr(decoder, "per_layer_config", None) or ())
    return per_layer if len(per_layer) >= num_layers else [decoder] * num_layers


def _layer_geometry(config: Any, index: int, kind: str, layer: Any) -> LayerGeometry:
    if kind in WITHOUT_KV:
        return LayerGeometry(index, kind)
    if not isinstance(layer, DynamicLayer) or "compressed" in kind or kind in BLOCK_SPARSE:
        raise NotImplementedError(
            f"expected layers that cache as transformers' own do, got {kind!r}; its memory is not planned"
        )
    indexer_dim = _indexer_dim(config, index) if isinstance(layer, DynamicIndexedLayer) else 0
    window = getattr(layer, "sliding_window", None)
    if not _caches_latents(config, kind):
        return LayerGeometry(index, kind, *_dims(config, kind), False, window, indexer_dim)
    if _reads_latents_of_another(config, index):
        return LayerGeometry(index, kind, latent=True, indexer_dim=indexer_dim)
    dims = 1, _field(config, "kv_lora_rank"), _rotary_dim(config, index)
    return LayerGeometry(index, kind, *dims, True, window, indexer_dim)


def _indexer_dim(config: Any, index: int) -> int:
    """Elements per token of the indexer of sparse attention: a key, of GLM-5.3-Flash a gate and a mark beside it.

    A layer that takes another's choice has none.
    """
    modes = getattr(config, "indexer_types", None)
    if modes and modes[index] == "shared":
        return 0
    key_dim = _field(config, "index_head_dim", "indexer_head_dim")
    return 2 * key_dim + 1 if hasattr(config, "index_kpool") else key_dim


def _caches_latents(config: Any, kind: str) -> bool:
    return bool(_field(config, "kv_lora_rank")) and kind not in EXPANDED_LATENT


def _reads_latents_of_another(config: Any, index: int) -> bool:
    """Mistral Large 4: such a layer has an indexer's keys alone."""
    sources = getattr(config, "kv_source_layers", None)
    return sources is not None and sources[index] != index


def _rotary_dim(config: Any, index: int) -> int:
    """Elements of the rotary keys that a layer caches beside latents; Mistral Large 4 has layers without any."""
    rotary = getattr(config, "no_rope_layers", None)  # by layer, 0: it has none
    without = _reads_latents_of_another(config, index) or (rotary is not None and not rotary[index])
    return 0 if without else _field(config, "qk_rope_head_dim")


def _dims(config: Any, kind: str) -> tuple[int, int, int]:
    """KV heads, key_dim and value_dim of a layer that caches no latents."""
    if _field(config, "kv_lora_rank"):
        key_dim = _field(config, "qk_nope_head_dim") + _field(config, "qk_rope_head_dim")
        return _num_heads(config), key_dim, _field(config, "v_head_dim") or key_dim
    key_dim = _head_dim(config, kind)
    return _num_kv_heads(config, kind), key_dim, _field(config, "v_head_dim") or key_dim


def _num_heads(config: Any) -> int:
    names = ["decoder_attention_heads", "num_decoder_attention_heads", "num_attention_heads", "num_heads"]
    if getattr(config, "is_encoder_decoder", False):  # its decoder's part, where transformers renamed these
        names = names[2:] + names[:2]
    heads = _field(config, *names)
    if not heads:
        raise ValueError(f"expected a config with num_attention_heads, got {type(config).__name__} without")
    return heads


def _num_kv_heads(config: Any, kind: str) -> int:
    if getattr(config, "multi_query", False) and not getattr(config, "new_decoder_architecture", False):
        return 1
    nested = getattr(config, "attn_config", None)  # DBRX
    heads = _field(config, "num_key_value_heads", "num_kv_heads") or _field(nested, "kv_n_heads") or _num_heads(config)
    # Written into the model's code, not its config.
    return 2 * heads if config.model_type == "mimo_v2_flash" and kind == "sliding_attention" else heads


def _head_dim(config: Any, kind: str) -> int:
    if kind == "full_attention" and (wide := _field(config, "global_head_dim")):
        return wide
    head_dim = _field(config, "attention_head_dim", "head_dim", "kv_channels", "d_kv")
    hidden_size = _field(config, "hidden_size", "d_model")
    if not head_dim and not hidden_size:
        raise ValueError(f"expected a config with head_dim or hidden_size, got {type(config).__name__} without")
    return head_dim or hidden_size // _num_heads(config)


def _field(config: Any, *names: str) -> int:
    """The first of these fields that is set, else 0."""
    return next((value for name in names if (value := getattr(config, name, None))), 0)
