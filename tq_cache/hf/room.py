"""The memory of a cache's layers over its life: reserved in part and grown, or made anew for other tokens."""

from typing import Any

import torch

from ..compat import own_layers
from ..planning.layers import LayerPlan
from ..storage.base import round_up
from ..storage.checks import alike, check_states
from ..storage.growing import UNLIMITED
from ..storage.room import Room, more_room, resize, tokens_after
from .layers import PackedLayer, Pair, PreallocatedLayer


class WithRoom:
    """What `TurboQuantCache` has beside its layers: their memory, and the room of preallocated ones.

    By hand the room is max_cache_len, from the beginning.  `enable` reserves less where a call may ask for more than
    it will need (`reserve`); then memory grows between two forward passes, outside graphs, which are captured again.
    """

    _room: Room | None  # None: nothing is preallocated
    plans: list[LayerPlan]
    layers: list[Any]
    options: dict[str, Any]
    config: Any
    offloading: bool
    _max_cache_len: int | None

    @property
    def nbytes(self) -> int:
        """Of the cache."""
        raise NotImplementedError

    def reserve(self, room: Room) -> None:
        """Change the memory of preallocated layers to this room, which must hold their tokens; bits are copied."""
        self._room = room
        for plan in self.plans:
            layer = self.layers[plan.index]
            if isinstance(layer, PreallocatedLayer):
                resize(layer.storage, room.tokens, self._newest(plan))
                layer.flatten()

    def _room_now(self, room: Room) -> Room:
        """The room there is, which a twin of this cache, over the same layers, may have made larger."""
        layers = [layer for layer in self.layers if isinstance(layer, PreallocatedLayer)]
        tokens = layers[0].storage.max_length if layers else room.tokens
        return Room(tokens, room.limit, room.reason if tokens < room.limit else "")

    def _newest(self, plan: LayerPlan) -> int:
        """A layer's residual_length.  Where nothing is packed all tokens count as newest: no copy at each step."""
        if plan.preset is not None:
            return int(self.options["residual_length"])
        return UNLIMITED if self._room is None else round_up(self._room.tokens)

    def _make_room(self, layer_idx: int, count: int, announced: bool) -> None:
        """Before `count` tokens come, where not all the room that was asked for is reserved; does nothing in a graph.

        announced: by masks, which a step in a graph is preceded by; else by keys that come
        """
        room, layer = self._room, self.layers[layer_idx] if layer_idx < len(self.layers) else None
        if room is None or room.tokens >= room.limit or torch.compiler.is_compiling():
            return
        if not isinstance(layer, PreallocatedLayer):
            return
        storage = layer.storage
        room = self._room_now(room)
        needed = tokens_after(storage, storage._announced if announced else storage._admitted, count)
        if needed > room.tokens:
            newest = storage.newest
            device = None if newest is None else newest[0].device
            self.reserve(more_room(room, needed, max(self.nbytes // room.tokens, 1), device))

    def _continues(self, held: Pair, new: Pair) -> bool:
        """Whether tokens can go behind those held, which may be on another device where transformers offloads them."""
        return all(alike(x, old, any_device=self.offloading) for x, old in zip(new, held, strict=True))

    def _renew(self, layer_idx: int, held: Pair, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Make a layer's memory anew for other tokens, if it holds none, as after `reset`; else raise ValueError."""
        layer: Any = self.layers[layer_idx]
        if int(layer.get_seq_length()):  # before a layer of transformers' own takes them
            if held[0].shape[0] != keys.shape[0]:
                raise ValueError(
                    f"expected keys of batch {held[0].shape[0]}, as this cache holds, got batch {keys.shape[0]}; "
                    "use a new cache, reset(), batch_repeat_interleave() or batch_select_indices()"
                )
            check_states(keys, values, held)
        elif isinstance(layer, PreallocatedLayer):
            layer.renew(keys, values)
        else:
            self.layers[layer_idx] = own_layers(self.config, self._max_cache_len)[layer_idx]


def newest_pair(layer: Any) -> Pair | None:
    """The memory of a cache layer's newest keys and values, [B, H_kv, slots, D] each; None before any.

    Of a packed layer, or of one of transformers' own.
    """
    if isinstance(layer, PackedLayer):
        return layer.storage.newest
    keys = getattr(layer, "keys", None)
    return (keys, layer.values) if isinstance(keys, torch.Tensor) and keys.numel() else None


def newest_keys(layer: Any) -> torch.Tensor | None:
    """The keys of `newest_pair`."""
    pair = newest_pair(layer)
    return None if pair is None else pair[0]
