"""What a cache can do with folders: the methods of `TurboQuantCache` that save and load."""

import os
from pathlib import Path
from typing import Self

import torch
import transformers
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache

from ..compat import outside_graph
from ..hf.layers import PackedLayer
from ..hf.room import newest_keys
from ..version import __version__
from .load import Place, load
from .own_layers import place_window
from .save import save


class Saveable(Cache):
    """See `save_pretrained` and `from_pretrained`."""

    _unplaced: frozenset[int] = frozenset()  # layers that were loaded, and have not seen where the next token is

    def save_pretrained(
        self,
        folder: str | os.PathLike[str],
        *,
        model: torch.nn.Module | None = None,
        input_ids: torch.Tensor | None = None,
        max_shard_bytes: int = 5 * 10**9,
        progress: bool = False,
    ) -> None:
        """Write what this cache holds to a folder: safetensors, and a header that says what they are.

        model:           its parameters, adapters among them, are then compared where the cache is loaded with a model,
                         as far as both have them in memory in one piece; without it those files of weights that the
                         config names are
        input_ids:       the tokens held, [B, T], so that `from_pretrained(..., input_ids=)` finds a common beginning
        max_shard_bytes: bytes of one file, and of CPU memory that this takes
        progress:        show a bar

        A folder that holds an older save keeps it until the new one is whole.  Where tensor parallelism shares KV heads
        among processes all of them call this, with a folder that all see, and each writes its own; where every process
        holds all (`report()`), let one call it.

        Raises ValueError on an empty cache, on layers with unequal numbers of tokens, on other input_ids,
        NotImplementedError on layers with a state that is not known, OSError where the folder cannot be written.
        """
        written_by = f"tq_cache {__version__}, transformers {transformers.__version__}, torch {torch.__version__}"
        save(self, Path(folder), model, input_ids, max_shard_bytes, progress, written_by)

    @classmethod
    def from_pretrained(
        cls,
        folder: str | os.PathLike[str],
        config: PreTrainedConfig | torch.nn.Module,
        *,
        input_ids: torch.Tensor | None = None,
        length: int | None = None,
        max_cache_len: int | None = None,
        device: Place = None,
        any_weights: bool = False,
        backend: str = "auto",
        offloading: bool | str | int = False,
        progress: bool = False,
    ) -> Self:
        """The cache in a folder, with the preset and the options it was saved with.

        config:        that of the model, or the model itself: then its parameters are compared too, and layers go to
                       where those of the model are
        input_ids:     a prompt, [B, T]: only the tokens with which both it and what was saved begin are loaded, at most
                       T - 1; then generate() with all of the prompt
        length:        load at most so many first tokens
        max_cache_len: preallocate, whether or not what was saved did
        device:        of all layers, or by layer; None: where the model's are; with a config alone keys and values move
                       to where their layer's next token is (states of linear attention and keys of a sparse attention's
                       indexer do not: give the model, or a device)
        any_weights:   take a cache that was saved with other weights of a model of this shape
        backend, offloading: as those of the class
        progress:      show a bar

        Every tensor is checked against its checksum, also where only a part of it is loaded.  With tensor parallelism
        each process takes its KV heads, however many wrote them.

        Raises CacheFileError, a ValueError, where there is no whole cache of this model; ValueError where it does not
        fit into max_cache_len, or that would hold fewer packed tokens; NotImplementedError where a layer's state cannot
        be cut to fewer tokens.
        """
        options = dict(max_cache_len=max_cache_len, backend=backend, offloading=offloading)
        return load(cls, Path(folder), config, input_ids, length, device, any_weights, progress, options)

    def _loaded(self) -> None:
        """Layers hold tokens of a folder: the next update moves each to where its new tokens are."""
        self._unplaced = frozenset(i for i, layer in enumerate(self.layers) if newest_keys(layer) is not None)

    def _place_loaded(self, layer_idx: int, key_states: torch.Tensor) -> None:
        """Before an update: move tokens that were loaded to where these are, of KV heads to this process's."""
        if layer_idx in self._unplaced:
            outside_graph(self._place, layer_idx, key_states)

    def _place(self, layer_idx: int, key_states: torch.Tensor) -> None:
        layer, heads = self.layers[layer_idx], key_states.shape[1]
        if isinstance(layer, PackedLayer):
            layer.place(key_states)
        else:
            place_window(layer, key_states.device, heads)
        self._unplaced -= {layer_idx}
