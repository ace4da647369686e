"""transformers' layer contract over a `LayerStorage`.  No maths here."""

from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from transformers.cache_utils import (
    DynamicIndexedLayer,
    DynamicLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionLayer,
)

from ..compat import length_after_crop, outside_graph
from ..formats.states import KVView
from ..planning.layers import INDEXED
from ..storage.base import LayerStorage
from ..storage.checks import checked_sequences
from ..storage.preallocated import PreallocatedStorage
from . import graph_ops
from .caller import Caller, counting_writes, lend
from .gradients import with_gradients, with_newest
from .handles import KVHandle, materialize, owned
from .latent import Update

Pair = tuple[torch.Tensor, torch.Tensor]
NOT_TO_BE_SET = (
    "expected no assignment to the keys or values of a packed layer, which are derived from its bits; change them "
    "before update(), remove tokens by crop() and sequences by batch_select_indices(), or use a DynamicCache"
)


class PackedLayer(DynamicLayer):
    """A full attention layer whose keys and values are packed.

    `update` returns lazy handles when the model runs attn_implementation="turboquant", dequantised tensors otherwise;
    how that is known is the affair of `caller`.
    """

    is_croppable = True
    absorbs = False  # whether it holds latents, which attention may read as they are
    path = ""  # how attention read latents last: "absorbed", or "expanded: why"; "" before, and of other layers

    def __init__(self, storage: LayerStorage, caller: Caller) -> None:
        self.storage = storage
        self.caller = caller
        self.is_initialized = False
        # The first token held that came with gradients, which no layer keeps.
        self.gradients_lost_from: int | None = None
        self._first: object | None = None  # a mark of the first update, while nothing else has happened since

    # keys and values are derived, never held
    @property
    def keys(self) -> torch.Tensor | None:
        """A copy of all keys, dequantised, [B, H_kv, T, D]; None before the first update."""
        return owned(self.storage.view(), "key") if self.get_seq_length() else None

    @keys.setter
    def keys(self, _: Any) -> None:
        raise AttributeError(NOT_TO_BE_SET)

    @property
    def values(self) -> torch.Tensor | None:
        """A copy of all values, dequantised, [B, H_kv, T, D]; None before the first update."""
        return owned(self.storage.view(), "value") if self.get_seq_length() else None

    @values.setter
    def values(self, _: Any) -> None:
        raise AttributeError(NOT_TO_BE_SET)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Any, Any]:
        if torch.compiler.is_compiling():
            return outside_graph(PackedLayer._append, self, key_states, value_states, True)
        return self._append(key_states, value_states)

    def _append(self, key_states: torch.Tensor, value_states: torch.Tensor, traced: bool = False) -> tuple[Any, Any]:
        """`update`; traced: torch.compile traces what comes then, which would guard on every length in a record."""
        reads_bits = self.caller.reads_bits
        hands_out_records = self.absorbs and not traced
        if hands_out_records:  # tensors could not show what becomes of them: with every prompt it is asked anew
            hands_out_records = reads_bits is not False or key_states.shape[2] > 1
        elif self.absorbs:
            reads_bits = False
            self.path = "expanded: torch.compile traces only steps of preallocated memory (max_cache_len)"
        view = self.storage.append(key_states, value_states, queries_follow=bool(reads_bits))
        self._first = None
        if not reads_bits and self.storage.packs and view.length == key_states.shape[2]:
            self._first = mark = object()  # not the view, whose exact tokens would stay in memory
            view = replace(view, observe=partial(self._begin_again, view, mark))
        if torch.is_grad_enabled():
            reads_bits = reads_bits and not self._takes_gradients(key_states, value_states)
            lost = self._lose_gradients(key_states, value_states, view.length - key_states.shape[2])
            view = with_gradients(view, key_states, value_states, lost)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if hands_out_records:
            return Update(self, (key_states, value_states), view.length, view=view).records()
        if reads_bits:
            return KVHandle(view, "key", self.caller), KVHandle(view, "value", self.caller)
        with counting_writes():
            keys, values = materialize(view, "key"), materialize(view, "value")
        return lend(KVHandle(view, "key"), keys, self.caller), lend(KVHandle(view, "value"), values, self.caller)

    def _takes_gradients(self, keys: torch.Tensor, values: torch.Tensor) -> bool:
        """Whether gradients of these new tokens, or of those held, may be asked for.

        Handles cannot carry them: tensors are lent in their place.
        """
        asked_for = keys.requires_grad or values.requires_grad or self.gradients_lost_from is not None
        return torch.is_grad_enabled() and asked_for

    def _lose_gradients(self, keys: torch.Tensor, values: torch.Tensor, start: int) -> bool:
        """Whether gradients of tokens held are lost; from now on those of the new ones, from `start` on, are."""
        lost = self.gradients_lost_from is not None
        if not lost and self._takes_gradients(keys, values):
            self.gradients_lost_from = start
        return lost

    def _begin_again(self, view: KVView, mark: object, query: torch.Tensor | None, *shown: Any) -> None:
        """The first tokens were packed by keys alone, and their queries come all the same: pack them by these."""
        if query is not None and self._first is mark:
            self.storage.clear()
            again = self.storage.append(view.tail_keys, view.tail_values, queries_follow=True)
            if again.observe is not None:
                again.observe(query, *shown)

    def place(self, key_states: torch.Tensor) -> None:
        """Move tokens that were loaded to where the next ones are, of KV heads to this process's."""
        self.storage.place(key_states.device, key_states.shape[1])

    def get_seq_length(self) -> int:
        return self.storage.length

    def crop(self, tokens_to_remove: int) -> None:
        if self.storage.length:  # a layer that shares another's keys holds an indexer's alone (Mistral Large 4)
            self.storage.crop(length_after_crop(tokens_to_remove, self.storage.length))
            self._first = None
            if self.gradients_lost_from is not None and self.storage.length <= self.gradients_lost_from:
                self.gradients_lost_from = None

    def reset(self) -> None:
        self.storage.clear()
        self.gradients_lost_from = self._first = None
        self.is_initialized = False

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._first = None
        self.storage.repeat(repeats)

    def batch_select_indices(self, indices: Any) -> None:
        """Keep these sequences: integers or bools, as a tensor, a list or a tuple."""
        self._first = None
        if self.storage.batch_size is not None:
            self.storage.select(checked_sequences(indices, self.storage.batch_size))

    def offload(self) -> None:
        if not self.storage.waits:  # for the queries, on whose device it then packs
            self.storage.to("cpu")

    def prefetch(self) -> None:
        if self.is_initialized:
            # On a stream of its own, while the model computes on any other.  The storage orders copies and uses by
            # events; of transformers' waits, which differ between 5.17 and 5.23, all are for the default stream.
            self.storage.to(self.device)


class PreallocatedLayer(PackedLayer):
    """A preallocated layer: one token at a time goes through operations that torch.compile and CUDA graphs take.

    Several tokens at once (prefill) wait for the device to say how many it holds, so they are never compiled.
    """

    is_compileable = True
    is_croppable = False
    storage: PreallocatedStorage
    flat: graph_ops.Flat | None = None  # the storage's states, from the first tokens on

    @property
    def max_cache_len(self) -> int:
        """Tokens there is room for."""
        return self.storage.max_length

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Any, Any]:
        self._flatten_loaded()
        if self.flat is None or key_states.shape[2] > 1:
            compiling = torch.compiler.is_compiling()
            return outside_graph(PreallocatedLayer._append, self, key_states, value_states, compiling)
        self.storage.admit(key_states, value_states)
        self.storage.before_step()
        buffers, calibration, num_tokens, spec = self.flat
        graph_ops.operation("update", spec)(key_states, value_states, buffers, calibration, num_tokens, spec)
        compiling = torch.compiler.is_compiling()
        reads_bits = self.caller.reads_bits
        takes_gradients = self._takes_gradients(key_states, value_states)
        if self.absorbs and takes_gradients:
            self.path = "expanded: gradients"
        elif self.absorbs and reads_bits is not False:
            return Update(self, (key_states, value_states), self.max_cache_len, flat=self.flat).records()
        elif reads_bits and not takes_gradients:
            return graph_ops.handle_pair(buffers, calibration, num_tokens, spec)
        with nullcontext() if compiling else counting_writes():
            keys, values = (
                torch.ops.tq_cache.materialize(buffers, calibration, num_tokens, "key", spec),
                torch.ops.tq_cache.materialize(buffers, calibration, num_tokens, "value", spec),
            )
        if takes_gradients:
            lost = self._lose_gradients(key_states, value_states, 0)  # or later: nothing is ever cropped here
            keys, values = with_newest((keys, values), (key_states, value_states), num_tokens, lost)
        if compiling or self.absorbs:
            return keys, values
        handles = graph_ops.handle_pair(buffers, calibration, num_tokens, spec)
        return lend(handles[0], keys, self.caller), lend(handles[1], values, self.caller)

    def _append(self, key_states: torch.Tensor, value_states: torch.Tensor, traced: bool = False) -> tuple[Any, Any]:
        pair = super()._append(key_states, value_states, traced)
        if self.flat is None:
            assert self.storage.states is not None
            self.flat = graph_ops.flatten(self.storage.states)
        return pair

    def renew(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Where nothing is held: memory for other tokens than those before, [B, H_kv, T, D] each, in place of theirs.

        Raises ValueError, changing nothing, where such tokens cannot be held.
        """
        self.storage.check_new(key_states, value_states)
        self.flat = None  # so that it is freed before there is more
        self.flat = graph_ops.flatten(self.storage.renew(key_states, value_states))
        self.lazy_initialization(key_states, value_states)

    def place(self, key_states: torch.Tensor) -> None:
        super().place(key_states)
        self.flatten()

    def _flatten_loaded(self) -> None:
        """Of a cache that was loaded: no update has taken its memory yet."""
        if self.flat is None and not torch.compiler.is_compiling():
            self.flatten()

    def flatten(self) -> None:
        """Take the storage's memory, which is another one since tokens were moved."""
        if self.storage.states is not None:
            self.flat = graph_ops.flatten(self.storage.states)

    def get_seq_length(self) -> Any:
        """Tokens held, an int64 tensor on the device from the first update on."""
        return self.storage.length if self.flat is None else self.flat.num_tokens

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the keys that attention sees: in a step all there is room for, else those there are.

        Raises ValueError unless there is room for the queries: the step that they are of may be in a graph.
        """
        self._flatten_loaded()
        self.storage.announce(query_length)
        is_step = query_length == 1 and self.flat is not None  # a prompt may have one token, too
        return (self.max_cache_len if is_step else self.storage.length + query_length), 0

    def get_max_length(self) -> int:
        return self.max_cache_len


class PackedIndexedLayer(DynamicIndexedLayer, PackedLayer):
    """A packed layer of a sparse attention model (DSA); the indexer's small keys stay as transformers keeps them."""

    def __init__(self, storage: LayerStorage, caller: Caller) -> None:
        PackedLayer.__init__(self, storage, caller)
        self.indexer_keys = None
        self.indexer_position_ids = None
        self.is_indexer_initialized = False


class PackedHybridLayer(LinearAttentionAndFullAttentionLayer, PackedLayer):  # type: ignore[misc, override]  # as its own
    """A layer with a linear-attention state, kept as transformers keeps it, beside packed keys and values."""

    def __init__(self, storage: LayerStorage, caller: Caller, number_of_states: int) -> None:
        PackedLayer.__init__(self, storage, caller)
        LinearAttentionLayer.__init__(self, number_of_states=number_of_states)

    def lazy_initialization(self, *args: torch.Tensor, **kwargs: Any) -> None:  # type: ignore[override]
        # transformers tells the two initialisations apart likewise: keys and values come as two positional arguments
        if args:
            PackedLayer.lazy_initialization(self, *args)
        else:
            LinearAttentionLayer.lazy_initialization(self, **kwargs)

    def offload(self) -> None:
        PackedLayer.offload(self)
        LinearAttentionLayer.offload(self)

    def prefetch(self) -> None:
        PackedLayer.prefetch(self)
        LinearAttentionLayer.prefetch(self)

    def reset(self) -> None:
        PackedLayer.reset(self)
        LinearAttentionLayer.reset(self)

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        PackedLayer.reorder_cache(self, beam_idx)
        LinearAttentionLayer.reorder_cache(self, beam_idx)

    def crop(self, tokens_to_remove: int) -> None:
        LinearAttentionLayer.crop(self, tokens_to_remove)
        PackedLayer.crop(self, tokens_to_remove)


class PreallocatedHybridLayer(PackedHybridLayer, PreallocatedLayer):  # type: ignore[misc]
    """A preallocated layer with a linear-attention state, kept as transformers keeps it."""

    is_compileable = True
    is_croppable = False


def packed_layer(kind: str, storage: LayerStorage, caller: Caller, replaced: Any) -> PackedLayer:
    """The layer of this kind over a storage, in place of transformers' own.

    Sparse attention is never in preallocated memory (`planning.preallocation`).
    """
    preallocated = isinstance(storage, PreallocatedStorage)
    if kind in INDEXED:
        return PackedIndexedLayer(storage, caller)
    if kind == "hybrid":
        make = PreallocatedHybridLayer if preallocated else PackedHybridLayer
        return make(storage, caller, replaced.number_of_states)
    return (PreallocatedLayer if preallocated else PackedLayer)(storage, caller)
