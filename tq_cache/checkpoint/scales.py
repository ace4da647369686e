"""Where the scales of float8 keys and values come from: the user, the checkpoint, or the first tokens.

A float8 code is the element divided by the scale; what is read is the code times the scale.  Checkpoints mean the same
by `k_scale` and `v_scale`, for OCP e4m3.  The cache stores OCP bytes on every GPU, so the factor of 2 that FNUZ bytes
would need never applies.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
from safetensors import safe_open
from transformers import PreTrainedConfig

from ..formats.presets import NOUNS, Format, Preset, Role
from .declaration import Declaration, ScaleTensor, find_folder, read_declaration, scale_tensors

Source = Literal["checkpoint", "computed", "user"]
# One for all layers (a number, or a tensor with an element or one per KV head), or such a one per layer.
GivenScale = float | torch.Tensor | list[float | torch.Tensor | None] | tuple[float | torch.Tensor | None, ...]
ARGUMENTS: dict[Role, str] = {"key": "k_scale", "value": "v_scale", "rotary": "k_scale"}


@dataclass(frozen=True)
class RoleScales:
    """Scales of float8 keys, or values, or rotary keys beside latents, in the layers that have such.

    format:         name of the format; of several, with commas
    source, reason: where they come from, and why
    given:          by layer, float32 [1] or [H_kv]; empty if they are computed
    """

    role: Role
    format: str
    source: Source
    reason: str
    given: Mapping[int, torch.Tensor] = field(default_factory=dict, repr=False)

    def __str__(self) -> str:
        return f"scales of {self.format} {NOUNS[self.role]}: {self.source} ({self.reason})"


def resolve_scales(
    config: PreTrainedConfig,
    presets: Mapping[int, Preset],
    num_layers: int,
    k_scale: GivenScale | None = None,
    v_scale: GivenScale | None = None,
) -> dict[Role, RoleScales]:
    """Scales for the layers that are packed, of `num_layers`, for each role that is float8 in any of them.

    presets: what each packed layer is stored as, by its index; layers whose keys (values) are not float8 get no scale

    Where latents are cached the scale of keys is theirs, and that of a float8 rotary key; a scale of values can say
    nothing else, since a latent is both.

    What the user gives wins over what the checkpoint ships, and that over what the first tokens say.  Raises
    ValueError on a format that the checkpoint's scales do not fit, on scales that are declared and not found, on any
    that is missing, not positive or not finite, on a given one that no layer takes, and on one of values that is not
    that of the latents.
    """
    formats: dict[Role, dict[int, Format]] = {"key": {}, "value": {}, "rotary": {}}
    for layer, preset in presets.items():
        for role, fmt in zip(preset.roles, (preset.key, preset.value), strict=True):
            formats[role][layer] = fmt
    given: dict[Role, GivenScale | None] = {"key": k_scale, "value": v_scale, "rotary": k_scale}
    if k_scale is not None:
        _check_takes("k_scale", [("key", formats["key"]), ("rotary", formats["rotary"])])
    if v_scale is not None and formats["value"]:
        _check_takes("v_scale", [("value", formats["value"])])
    latents = [layer for layer, preset in presets.items() if preset.holds_latents]
    if v_scale is not None and latents:
        keys, values = (_by_layer(*one, num_layers) for one in (("k_scale", k_scale), ("v_scale", v_scale)))
        _check_same(keys, values, latents)
    float8 = {role: {n: fmt for n, fmt in all_.items() if fmt.float8 is not None} for role, all_ in formats.items()}
    if not any(float8.values()):
        return {}
    folder = find_folder(config)
    declaration = read_declaration(config, folder)
    _check_formats(presets.values(), declaration)
    if folder is not None and declaration.has_fp8_scales and k_scale is None:
        _check_shipped(folder, [layer for layer in latents if layer in float8["key"] or layer in float8["rotary"]])
    return {
        role: _role_scales(role, by_layer, given[role], declaration, folder, num_layers)
        for role, by_layer in float8.items()
        if by_layer
    }


def _check_takes(argument: str, formats: Sequence[tuple[Role, Mapping[int, Format]]]) -> None:
    """Raise ValueError unless some layer's format takes a given scale; where nothing is packed none is asked for."""
    if any(by_layer for _, by_layer in formats) and not any(_per_head(by_layer) for _, by_layer in formats):
        held = " and ".join(f"{NOUNS[role]} in {_names(by_layer)}" for role, by_layer in formats if by_layer)
        raise ValueError(
            f"expected no {argument} for {held}, got one; only float8 formats with a scale per KV head take it"
        )


def _check_same(
    keys: Sequence[float | torch.Tensor | None], values: Sequence[float | torch.Tensor | None], layers: Sequence[int]
) -> None:
    """Raise ValueError unless the scales of values, where there are any, are those of keys in these layers."""
    for layer in layers:
        key, value = keys[layer], values[layer]
        if value is not None and (key is None or not _equal(key, value)):
            raise ValueError(
                f"expected a v_scale that is k_scale, or none, for layer {layer}, whose latents are keys and values at "
                f"once, got k_scale {key} and v_scale {value}; leave v_scale out"
            )


def _equal(scale: float | torch.Tensor, other: float | torch.Tensor) -> bool:
    return torch.equal(*(torch.as_tensor(x).detach().to("cpu", torch.float32).flatten() for x in (scale, other)))


def _check_shipped(folder: Path, latents: Sequence[int]) -> None:
    """As `_check_same`, of what a checkpoint ships.  One that has a single tensor for both needs no look at it."""
    tensors = scale_tensors(folder) if latents else {}
    keys, values = ({n: tensors[role, n] for n in latents if (role, n) in tensors} for role in ("key", "value"))
    differ = [layer for layer, tensor in values.items() if keys.get(layer, tensor) != tensor]
    held, others = (load_scales({layer: tensors_[layer] for layer in differ}) for tensors_ in (keys, values))
    for layer in differ:
        if not _equal(held[layer], others[layer]):
            raise ValueError(
                f"expected {values[layer].name} to be {keys[layer].name}, since latents are keys and values at once, "
                f"got {others[layer].tolist()} and {held[layer].tolist()} in {folder}; pass k_scale="
            )


def _role_scales(
    role: Role,
    formats: Mapping[int, Format],
    given: GivenScale | None,
    declaration: Declaration,
    folder: Path | None,
    num_layers: int,
) -> RoleScales:
    """Scales of the layers with these float8 formats.  Those with one per token beside others need no words."""
    per_head = _per_head(formats)
    if not per_head:
        return RoleScales(role, _names(formats), "computed", "the format takes one per token and KV head")
    names, layers = _names(per_head), list(per_head)
    if given is not None:
        scales = _from_user(ARGUMENTS[role], given, layers, num_layers)
        return RoleScales(role, names, "user", f"{ARGUMENTS[role]}=", scales)
    if declaration.has_fp8_scales:
        reason, scales = _from_checkpoint(role, declaration, folder, layers)
        return RoleScales(role, names, "checkpoint", reason, scales)
    reason = f"{declaration.reason}; one per sequence and KV head, from the first tokens"
    return RoleScales(role, names, "computed", reason)


def _per_head(formats: Mapping[int, Format]) -> dict[int, Format]:
    return {layer: fmt for layer, fmt in formats.items() if fmt.scale == "per_head"}


def _names(formats: Mapping[int, Format]) -> str:
    return ", ".join(dict.fromkeys(fmt.name for fmt in formats.values()))


def _check_formats(presets: Iterable[Preset], declaration: Declaration) -> None:
    for preset in presets:
        if declaration.has_fp8_scales and torch.float8_e5m2 in (preset.key.float8, preset.value.float8):
            raise ValueError(
                "expected e4m3 for float8 keys and values, since this checkpoint ships fp8 KV scales "
                f"({declaration.reason}), got {preset.name!r}; use 'fp8_e4m3'"
            )


def _from_checkpoint(
    role: Role, declaration: Declaration, folder: Path | None, layers: Sequence[int]
) -> tuple[str, dict[int, torch.Tensor]]:
    """Which tensors they are, in words, and their values by layer."""
    argument = ARGUMENTS[role]
    if folder is None:
        raise ValueError(
            f"expected the KV scales that this checkpoint declares ({declaration.reason}), got no files to read them "
            f"from; set config.name_or_path to its folder, or pass {argument}= (1.0: unscaled)"
        )
    tensors = scale_tensors(folder)
    shipped: Role = "value" if role == "value" else "key"
    found = {layer: tensors[shipped, layer] for layer in layers if (shipped, layer) in tensors}
    if missing := [layer for layer in layers if layer not in found]:
        raise ValueError(
            f"expected a {argument} for every packed layer ({declaration.reason}), got none for layers {missing} "
            f"in {folder}; pass {argument}= (1.0: unscaled)"
        )
    scales = load_scales(found)
    names = ", ".join([*(found[layer].name for layer in layers[:1]), "..."])
    each = "one per KV head" if any(scale.numel() > 1 for scale in scales.values()) else "one per layer"
    return f"{names}, {each}; {declaration.reason}", scales


def load_scales(tensors: Mapping[int, ScaleTensor]) -> dict[int, torch.Tensor]:
    """These tensors, and no others, from their files: float32 [1] or [H_kv] by layer, all positive and finite."""
    scales = {}
    for file in sorted({tensor.file for tensor in tensors.values()}):
        if not file.is_file():
            raise ValueError(f"expected the KV scales of this checkpoint in {str(file)!r}, got no such file")
        with safe_open(file, framework="pt") as opened:
            for layer, tensor in tensors.items():
                if tensor.file == file:
                    scales[layer] = _checked(opened.get_tensor(tensor.name), f"{tensor.name} in {file}")
    return scales


def _from_user(argument: str, given: GivenScale, layers: Sequence[int], num_layers: int) -> dict[int, torch.Tensor]:
    if not isinstance(given, (list, tuple)):
        return dict.fromkeys(layers, _checked(given, argument))
    by_layer = _by_layer(argument, given, num_layers)
    return {layer: _checked(by_layer[layer], f"{argument}[{layer}]") for layer in layers}


def _by_layer(argument: str, given: GivenScale | None, num_layers: int) -> list[float | torch.Tensor | None]:
    """What was given for each layer."""
    if not isinstance(given, (list, tuple)):
        return [given] * num_layers
    if len(given) != num_layers:
        raise ValueError(f"expected {argument} for {num_layers} layers, got {len(given)}")
    return list(given)


def _checked(scale: float | torch.Tensor | None, name: str) -> torch.Tensor:
    """float32 [n]; raises ValueError unless all are positive and finite."""
    if scale is None:
        raise ValueError(f"expected a scale for every packed layer, got none as {name}")
    values = torch.as_tensor(scale).detach().to("cpu", torch.float32).flatten()
    if not values.numel() or not all(math.isfinite(value) and value > 0 for value in values.tolist()):
        raise ValueError(f"expected scales that are positive and finite, got {values.tolist()} as {name}")
    return values


def check_scales(given: Mapping[Role, torch.Tensor], num_kv_heads: int) -> None:
    """Raise ValueError where a layer is given more scales than the model has KV heads in it, so many by role.

    Fewer may be those of one process's share of the heads, which only its tokens tell.
    """
    for role, scale in given.items():
        if scale.numel() > num_kv_heads:
            raise ValueError(
                f"expected 1 or {num_kv_heads} scales of {NOUNS[role]} (KV heads of the model), got {scale.numel()}"
            )
