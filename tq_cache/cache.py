"""`TurboQuantCache`: what a user hands to `generate()`."""

import copy
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, Literal

import torch
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, DynamicCache

from .backends import backend_for, check_backend
from .checkpoint.scales import GivenScale, check_scales, resolve_scales
from .compat import (
    RESET_KEEPS_LENGTH,
    decoder_config,
    exporting,
    layer_kinds,
    length_after_crop,
    outside_graph,
    own_layers,
)
from .formats.presets import EXACT, Preset, resolve_preset
from .hf.caller import Caller
from .hf.layers import PackedLayer, PreallocatedLayer, packed_layer
from .hf.room import WithRoom, newest_pair
from .planning.geometry import kv_heads, latent_layers, unpackable_layers
from .planning.layers import PACKABLE, WITHOUT_KV, LayerPlan, plan_layers
from .planning.preallocation import checked_max_cache_len
from .report import CacheReport, held_bytes, make_report
from .saving.saveable import Saveable
from .storage.base import LayerStorage
from .storage.checks import checked_count, checked_sequences, unpackable_width
from .storage.growing import GrowingStorage
from .storage.offloaded import OffloadedStorage, Turns, parse_budget
from .storage.preallocated import PreallocatedStorage
from .storage.room import Room


class TurboQuantCache(WithRoom, Saveable, DynamicCache):
    """A transformers cache that keeps keys and values in 2, 3, 4 or 8 bits.

    With `attn_implementation="turboquant"` attention reads the packed bits; with any other the model gets dequantised
    tensors.  Layers that are not packed are transformers' own.  Those whose head_dim no format takes (below 32, above
    576, or no multiple of 16) stay in the model's dtype, which one warning and `report()` say.  A vector with NaN or
    inf reads back as NaN (float8: those elements do) and changes no other.

    Formats are calibrated on a sequence's first tokens and queries.  Nothing is packed before there are 128 tokens; a
    cache that is filled by hand, for a model with "turboquant", holds all of it exact until the first step shows
    queries (a preallocated one does not wait).

    config:          the model's config
    preset:          a name in `PRESETS`; key, value, center and smooth change it, and no other layer's
    key, value:      formats that replace the preset's (`presets.FORMATS`).  Layers that cache latents (MLA) store them
                     in that of keys, since a latent is read as key and as value
    rotary:          format of the rotary keys that such layers cache beside latents: "exact" (the model's dtype),
                     "int8" (one scale per token), "fp8_e4m3" or "fp8_e5m2"; other models take none
    absorb:          whether attention reads latents as they are ("turboquant"; other attention never does); False: they
                     are dequantised and the model expands them
    residual_length: the newest so many tokens stay in the model's dtype; tokens are packed in blocks of 64, so up to 63
                     more wait for theirs
    sink_tokens:     so many first tokens stay in the model's dtype
    skip_layers:     layers that the preset is not for: "boundary", "sliding_window", indices (negative from the end)
    boundary_layers: how many layers at each end "boundary" means, among those that hold keys and values
    skip_format:     preset that packs the layers which "boundary" or an index names (None: they stay in the model's
                     dtype); sliding-window layers are transformers' own, whatever it says
    layer_presets:   presets of single layers, {index: name} (negative from the end); they win over preset, skip_layers
    center:          subtract a fixed vector per KV head from keys ("both": from values too); None: as the preset
    smooth:          exponent of channel smoothing of keys, by their size over that of the queries, 0 (off) to 1; None:
                     as the preset
    k_scale:         scale of float8 keys, latents and rotary keys: a number, or a tensor with one element or one per KV
                     head of the model, of which each process takes those of its share; or a list of such, one per
                     layer.  Without it, that of the checkpoint if it ships one, else measured.  Layers of other formats
                     take none
    v_scale:         likewise, of float8 values; for layers that cache latents none, or k_scale
    max_cache_len:   preallocate room for so many tokens, so that generate() compiles its steps and captures them in
                     CUDA graphs; residual_length is then a multiple of 64 from 0 on.  More tokens are a ValueError.
                     Models whose masks or biases count the tokens held cannot read such memory: NotImplementedError
    backend:         "auto", "reference" (plain PyTorch) or "triton"
    offloading:      keep tokens in host memory between their layer's turns (needs a CUDA device).  "packed": all that
                     are packed; one layer's are copied to the device while another computes.  A budget of bytes, a
                     number or "8GB", "512MiB": those of layers that do not fit.  It counts, on each GPU, codes, scales
                     and zeros of layers that stay, and two slots, each of the size of one layer, once one has gone; two
                     slots are the least there is.  Sink tokens, newest tokens and layers that are not packed always
                     stay, and are not counted.  True: transformers' own way, whole layers there and back at each step

    Raises ValueError or TypeError on arguments that make no sense, NotImplementedError on what is not available,
    RuntimeError for offloading without a CUDA device.
    """

    _computes_on = ("cuda",)  # types of devices whose layers can be offloaded

    def __init__(
        self,
        config: PreTrainedConfig,
        preset: str = "tq4",
        *,
        key: str | None = None,
        value: str | None = None,
        rotary: str = "exact",
        absorb: bool = True,
        residual_length: int = 128,
        sink_tokens: int = 4,
        skip_layers: Sequence[str | int] | str | int = ("sliding_window",),
        boundary_layers: int = 2,
        skip_format: str | None = None,
        layer_presets: Mapping[int, str] | None = None,
        center: bool | Literal["both"] | None = None,
        smooth: float | None = None,
        k_scale: GivenScale | None = None,
        v_scale: GivenScale | None = None,
        max_cache_len: int | None = None,
        backend: str = "auto",
        offloading: bool | str | int = False,
    ) -> None:
        residual_length = checked_count("residual_length", residual_length)
        sink_tokens = checked_count("sink_tokens", sink_tokens)
        boundary_layers = checked_count("boundary_layers", boundary_layers)
        self._max_cache_len = checked_max_cache_len(config, max_cache_len, offloading)
        self._room = None if self._max_cache_len is None else Room(self._max_cache_len, self._max_cache_len)
        self._turns = self._make_turns(offloading)
        check_backend(backend)
        self.model_config, self.config = config, decoder_config(config)  # all of a composite model's, and its text's
        self.preset: Preset = resolve_preset(preset, key, value, center, smooth)
        self.plans: list[LayerPlan] = plan_layers(
            *(layer_kinds(self.config), self.preset, skip_layers, boundary_layers, skip_format, layer_presets),
            *(latent_layers(self.config), rotary, unpackable_layers(self.config)),
        )
        self.options: dict[str, Any] = dict(  # as JSON
            preset=preset, key=key, value=value, rotary=rotary, absorb=absorb, residual_length=residual_length,
            sink_tokens=sink_tokens, boundary_layers=boundary_layers, skip_format=skip_format, center=center,
            skip_layers=[skip_layers] if isinstance(skip_layers, (str, int)) else [*skip_layers], smooth=smooth,
            layer_presets=[*layer_presets.items()] if layer_presets else None,
        )  # fmt: skip
        self._check_value_format(value)
        self._warns = True  # of layers that are not packed: once
        self._warn_of_unpacked_layers()
        self._backend = backend
        layers = own_layers(self.config, self._max_cache_len)
        presets = {plan.index: plan.preset for plan in self.plans if plan.preset is not None}
        self.scales = resolve_scales(config, presets, len(layers), k_scale, v_scale)
        self.caller = Caller(self.config)
        for plan in self.plans:
            if plan.kind in PACKABLE:
                storage = self._make_storage(plan)
                layer = packed_layer(plan.kind, storage, self.caller, layers[plan.index])
                layer.absorbs = plan.latent and absorb
                layer.path = "expanded: absorb=False" if plan.latent and not absorb else ""
                layers[plan.index] = layer
        Cache.__init__(self, layers=layers, offloading=offloading is True, offload_only_non_sliding=False)

    def _make_turns(self, offloading: bool | str | int) -> Turns | None:
        """What layers that are offloaded share; None unless tokens are.  Raises RuntimeError where nothing can be."""
        turns = None if isinstance(offloading, bool) else Turns(parse_budget(offloading))
        if (offloading or turns) and "cpu" not in self._computes_on and not torch.cuda.is_available():
            raise RuntimeError(
                f"offloading={offloading!r} keeps tokens in host memory instead of a GPU's, and torch finds no CUDA "
                "device here; leave offloading out"
            )
        return turns

    @cached_property
    def _kv_heads(self) -> dict[int, int]:
        return kv_heads(self.config)

    def _make_storage(self, plan: LayerPlan) -> LayerStorage:
        """The storage of a layer."""
        given = {role: own.given[plan.index] for role, own in self.scales.items() if plan.index in own.given}
        check_scales(given, self._kv_heads[plan.index] if given else 0)
        length = None if self._room is None else self._room.tokens
        newest, sinks = self._newest(plan), self.options["sink_tokens"]
        preset, backend = plan.preset, self._backend
        if preset is None:
            preset = self.preset.for_latents(EXACT) if plan.latent else self.preset
            backend = backend if plan.packable else "reference"  # nor do kernels take such widths
            sinks = 0
        else:
            backend = backend_for(preset, backend)
        if length is not None:
            return PreallocatedStorage(preset, newest, sinks, length, backend, given)
        if self._turns is not None and plan.preset is not None:
            return OffloadedStorage(self._turns, preset, newest, sinks, backend, given)
        return GrowingStorage(preset, newest, sinks, backend, given)

    def _check_value_format(self, value: str | None) -> None:
        """Raise ValueError on a format of values where there are none."""
        packed = [plan for plan in self.plans if plan.packed]
        if value is not None and packed and all(plan.latent for plan in packed):
            raise ValueError(
                f"expected no format of values, since this model caches latents, which are stored in the format of "
                f"keys, got {value!r}; give it as key=, or that of rotary keys as rotary="
            )

    def _warn_of_unpacked_layers(self) -> None:
        """Say, once, that nothing is packed, or that layers are not because of their width."""
        narrow = [plan for plan in self.plans if not plan.packable]
        none = not any(plan.packed for plan in self.plans)
        if not self._warns or not (none or narrow):
            return
        self._warns = False
        reasons = ", ".join(sorted({plan.reason for plan in (self.plans if none else narrow)}))
        message = f"not every layer can be packed: some stay in the model's dtype ({reasons}); see cache.report()"
        if none:
            message = (
                f"no layer of this model will be packed ({reasons}), so the cache saves no memory; "
                "see skip_layers and boundary_layers, and cache.report()"
            )
        warnings.warn(message, stacklevel=3)

    def _meet_widths(self, layer_idx: int, key_dim: int, value_dim: int) -> None:
        """Of a layer's first keys and values: where no format takes their width, it stays in the model's dtype."""
        plan = self.plans[layer_idx]
        if plan.packed and (problem := unpackable_width(key_dim, value_dim, plan.latent)):
            if plan.reason == "layer_presets":
                raise ValueError(
                    f"expected a layer that can be packed, got layer {layer_idx} in layer_presets: {problem}"
                )
            plan = self.plans[layer_idx] = replace(plan, preset=None, reason=problem, packable=False)
            layer = self.layers[layer_idx]
            assert isinstance(layer, PackedLayer)
            layer.storage = self._make_storage(plan)
            self._warn_of_unpacked_layers()

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if exporting():  # the program would hold the tokens there are now, and add none
            raise NotImplementedError(
                "torch.export cannot take the memory of a TurboQuantCache into a program; use torch.compile, with "
                "max_cache_len, or export the model with a cache of transformers"
            )
        if (self.offloading or self._turns) and key_states.device.type not in self._computes_on:
            raise ValueError(
                f"expected keys on a CUDA device, since this cache is made with offloading, got them on "
                f"{key_states.device}; leave offloading out"
            )
        self._place_loaded(layer_idx, key_states)
        held = newest_pair(self.layers[layer_idx])
        if held is not None and not self._continues(held, (key_states, value_states)):
            outside_graph(self._renew, layer_idx, held, key_states, value_states)
            held = None
        self._make_room(layer_idx, key_states.shape[-2], announced=False)
        if held is None and len(key_states.shape) == len(value_states.shape) == 4:  # others the storage refuses
            self._meet_widths(layer_idx, key_states.shape[3], value_states.shape[3])
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def get_seq_length(self, layer_idx: int = 0) -> Any:
        """Tokens held by a layer; of one that pipeline parallelism gave to another process, those of one that is here.

        An int, or of preallocated layers an int64 tensor on the device.
        """
        return super().get_seq_length(self._one_that_is_here(layer_idx, of_its_kind=False))

    def _one_that_is_here(self, layer_idx: int, of_its_kind: bool) -> int:
        """This layer, or where it was never updated a later one that was.

        Models ask the first layer (of a kind), whatever stage of pipeline parallelism they are.  Earlier ones may have
        been updated in this forward.
        """
        if not 0 <= layer_idx < len(self.layers) or self._is_here(self.plans[layer_idx]):
            return layer_idx
        kind = self.plans[layer_idx].kind
        later = [plan for plan in self.plans[layer_idx + 1 :] if self._is_here(plan)]
        same = [plan for plan in later if plan.kind == kind]
        if same or (later and not of_its_kind):
            return (same or later)[0].index
        return layer_idx

    def _is_here(self, plan: LayerPlan) -> bool:
        """Whether a layer was given keys and values."""
        loaded = plan.index in self._unplaced
        return plan.kind not in WITHOUT_KV and (loaded or getattr(self.layers[plan.index], "is_initialized", False))

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """As transformers'.  The mask may be that of a step in a graph, before which every layer is calibrated."""
        layer_idx = self._one_that_is_here(layer_idx, of_its_kind=True)
        self._make_room(layer_idx, query_length, announced=True)
        if query_length == 1 and self._max_cache_len is not None:
            for layer in self.layers:
                if isinstance(layer, PreallocatedLayer):
                    layer.storage.before_step()
        return super().get_mask_sizes(query_length, layer_idx)

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the newest tokens, as transformers' `crop` does.  Raises ValueError, changing nothing, beyond them."""
        length_after_crop(tokens_to_remove, self.get_seq_length())
        super().crop(tokens_to_remove)

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        super().reorder_cache(self._checked_sequences(beam_idx))

    def batch_select_indices(self, indices: Any) -> None:
        """Keep these sequences: integers or bools, as a tensor, a list or a tuple.

        Raises IndexError or TypeError, changing nothing, unless there are such sequences; NotImplementedError where
        a layer of transformers' own cannot.
        """
        for layer in self.layers:
            if not hasattr(layer, "batch_select_indices"):
                raise NotImplementedError(f"a {type(layer).__name__} of transformers cannot select sequences")
        super().batch_select_indices(self._checked_sequences(indices))

    def _checked_sequences(self, indices: Any) -> Any:
        held = next((pair[0] for pair in map(newest_pair, self.layers) if pair is not None), None)
        return indices if held is None else checked_sequences(indices, held.shape[0])

    def reset(self) -> None:
        super().reset()
        if self._unplaced:  # written only then: torch.compile looks at it
            self._unplaced = frozenset()
        if RESET_KEEPS_LENGTH:
            fresh = own_layers(self.config, self._max_cache_len)
            for plan in self.plans:
                if not isinstance(self.layers[plan.index], PackedLayer):
                    self.layers[plan.index] = fresh[plan.index]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors held, room for coming tokens included, but those of `host_nbytes`.

        Slots of offloaded layers are among them.
        """
        return sum(held_bytes(layer) for layer in self.layers) + (self._turns.nbytes if self._turns else 0)

    @property
    def host_nbytes(self) -> int:
        """Bytes of packed tokens in host memory, by offloading="packed" or a budget; 0 by offloading=True."""
        return sum(layer.storage.host_nbytes for layer in self.layers if isinstance(layer, PackedLayer))

    def report(self) -> CacheReport:
        """What is stored, per layer and in all; `print` shows it as a table."""
        slots = self._turns.nbytes if self._turns else 0
        room = "" if self._room is None else str(self._room_now(self._room))
        return make_report(self.preset, self.plans, self.layers, self.scales, self._kv_heads, slots, room)

    def __deepcopy__(self, memo: dict[int, Any]) -> "TurboQuantCache":
        for config in (self.model_config, self.config):  # the model's own, whose attention function may change later
            memo[id(config)] = config
        twin = self.__class__.__new__(self.__class__)
        memo[id(self)] = twin
        with torch.inference_mode(False), torch.no_grad():  # so that the copy can be written wherever this one can
            twin.__dict__.update({name: copy.deepcopy(part, memo) for name, part in self.__dict__.items()})
        return twin
