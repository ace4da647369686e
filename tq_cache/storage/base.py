"""What every storage of one layer does, however it holds its tokens: the contract, and what is the same for all."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from ..backends import Backend, choose_backend
from ..formats.packing import BLOCK_TOKENS
from ..formats.presets import Preset, Role
from ..formats.states import Calibration, KVView, PackedStates, map_tensors
from ..parallel import share_of_heads
from .checks import check_packable, check_states
from .first_tokens import FirstTokens


def round_up(tokens: int) -> int:
    """To whole blocks."""
    return -(-tokens // BLOCK_TOKENS) * BLOCK_TOKENS


class LayerStorage(ABC):
    """Keys and values of one layer: packed tokens, and the newest ones in the model's dtype.

    preset:          formats, centring, smoothing
    residual_length: the newest so many tokens stay in the model's dtype, and those that do not fill a block yet
    sink_tokens:     so many first tokens, too
    backend:         who computes, see `backends`
    given_scales:    float8 scales that are not measured, by role, [1] or one per KV head of the model, of which
                     tensor parallelism leaves this layer a share

    Operations other than `append` move bits: no token is ever quantised twice.
    """

    def __init__(
        self,
        preset: Preset,
        residual_length: int,
        sink_tokens: int,
        backend: str,
        given_scales: Mapping[Role, torch.Tensor] | None,
    ) -> None:
        self.preset = preset
        self.residual_length = residual_length
        self.sink_tokens = sink_tokens
        self.backend = backend
        self.given_scales = dict(given_scales or {})
        self.first_tokens = FirstTokens(preset, self.given_scales)

    # ------------------------------------------------------------------------------------------------- reading

    @property
    @abstractmethod
    def length(self) -> int:
        """Tokens held."""

    @property
    @abstractmethod
    def newest(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The memory of the newest keys and values, [B, H_kv, slots, D] each; None before the first token."""

    @abstractmethod
    def view(self) -> KVView:
        """Everything held, as it is now; raises ValueError on an empty storage."""

    @abstractmethod
    def tensors(self) -> list[torch.Tensor]:
        """Every tensor held."""

    @property
    def batch_size(self) -> int | None:
        """Sequences held, None before the first token."""
        return None if self.newest is None else self.newest[0].shape[0]

    @property
    def dtype(self) -> torch.dtype | None:
        """Of the newest tokens, None before the first token."""
        return None if self.newest is None else self.newest[0].dtype

    @property
    def num_elements(self) -> int:
        """Elements of all keys and values held."""
        if self.newest is None:
            return 0
        keys, values = self.newest
        return keys.shape[0] * keys.shape[1] * self.length * (keys.shape[3] + values.shape[3])

    @property
    def nbytes(self) -> int:
        """Bytes of every tensor held, room for coming tokens included."""
        return sum(tensor.nbytes for tensor in self.tensors())

    @property
    def host_nbytes(self) -> int:
        """Bytes of packed tokens in host memory, which `nbytes` does not count."""
        return 0

    # ------------------------------------------------------------------------------------------------- writing

    def admit(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Raise ValueError, changing nothing, unless these tokens, [B, H_kv, T, D] each, can be appended."""
        if self.newest is None:
            self.check_new(keys, values)
        else:
            check_states(keys, values, self.newest)

    def check_new(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Raise ValueError unless these tokens, [B, H_kv, T, D] each, can be the first ones."""
        check_states(keys, values, None)
        if self.packs:
            check_packable(keys, values, self.preset, self.given_scales)
            self._backend(keys, values)  # raises where the one asked for cannot run

    @property
    def packs(self) -> bool:
        """Whether tokens are ever packed here."""
        return True

    def append(self, keys: torch.Tensor, values: torch.Tensor, queries_follow: bool = False) -> KVView:
        """Add tokens, [B, H_kv, T, D] each, and return what attention over them should read.

        queries_follow: attention will show the queries of these tokens to `KVView.observe`; see `FirstTokens`

        In that view the new tokens and the tail before them are still exact, also those that get packed here.
        Raises ValueError, before anything changes, when they do not fit each other, what is held, or the room there is.
        """
        self.admit(keys, values)
        if self.first_tokens.done or not self.packs:
            return self._append(keys, values)
        wanted = self.first_tokens.expect(keys.shape[2], queries_follow)
        view = self._append(keys, values)
        return replace(view, observe=partial(self.observe, view) if wanted else None)

    def observe(
        self,
        view: KVView,
        query: torch.Tensor | None,
        mask: torch.Tensor | None,
        into_keys: Callable[[torch.Tensor], torch.Tensor] | None = None,
        group: Any = None,
    ) -> None:
        """See `KVView.observe`; `view` is what the update gave."""
        newest = self.newest
        if self.first_tokens.done or newest is None:
            return
        with torch.inference_mode(False), torch.no_grad():
            self.first_tokens.observe(query, mask, newest[0].shape[1], view.length, into_keys, group)
            self._observed(view)

    @property
    @abstractmethod
    def waits(self) -> bool:
        """Whether tokens that are to be packed wait for their calibration."""

    @abstractmethod
    def _observed(self, view: KVView) -> None:
        """Queries of the update that gave this view came, or are known not to come."""

    @abstractmethod
    def _append(self, keys: torch.Tensor, values: torch.Tensor) -> KVView:
        """`append` of tokens that fit."""

    def _backend(self, keys: torch.Tensor, values: torch.Tensor) -> Backend:
        return choose_backend(self.backend, keys, values)

    def _unwritten(
        self, keys: torch.Tensor, values: torch.Tensor, capacity: int, calibration: tuple[Calibration, Calibration]
    ) -> tuple[PackedStates, PackedStates]:
        """Packed states with room for `capacity` tokens, whole blocks, beside such keys and values."""
        first, second = self.preset.roles
        return (
            PackedStates.empty(first, self.preset.key, keys, capacity, calibration[0]),
            PackedStates.empty(second, self.preset.value, values, capacity, calibration[1]),
        )

    # ------------------------------------------------------------------------------------- as it was elsewhere

    @property
    @abstractmethod
    def calibration(self) -> tuple[Calibration, Calibration] | None:
        """Of what is packed, or will be; None before there is one."""

    @abstractmethod
    def adopt(self, view: KVView, calibration: tuple[Calibration, Calibration] | None) -> None:
        """Hold the tokens of a view in place of all others; `first_tokens` are those that belong to it.

        Takes the tensors of the view, or copies them.  Raises ValueError, changing nothing, where they cannot be held
        as this storage would.
        """

    def place(self, device: torch.device, heads: int) -> None:
        """Move tokens that were adopted to where the next ones are, [B, heads, T, D]; of KV heads this process's.

        Raises ValueError where `heads` can be no share of those held.
        """
        if self.newest is None:
            return
        held = self.newest[0]
        share = share_of_heads(held.shape[1], heads, "a saved cache")
        if held.device == device and heads == held.shape[1]:
            return
        calibration, view = self.calibration, trimmed(self.view())

        def own(x: torch.Tensor) -> torch.Tensor:
            return x[:, share].to(device).contiguous()

        with torch.inference_mode(False), torch.no_grad():
            self.first_tokens.place(device, share)
            pair = None if calibration is None else (map_tensors(calibration[0], own), map_tensors(calibration[1], own))
            self.adopt(map_tensors(view, own), pair)

    # -------------------------------------------------------------------------------- whole tokens and sequences

    @abstractmethod
    def clear(self) -> None:
        """Forget every token."""

    @abstractmethod
    def crop(self, length: int) -> None:
        """Keep the first `length` tokens.  Raises ValueError unless there are so many."""

    @abstractmethod
    def select(self, indices: torch.Tensor) -> None:
        """Keep the sequences `indices` (int64, may repeat; or bool) in that order."""

    @abstractmethod
    def repeat(self, repeats: int) -> None:
        """Every sequence `repeats` times, one behind the other."""

    @abstractmethod
    def to(self, device: torch.device | str) -> None:
        """Move everything; does not wait for the copies."""


def trimmed(view: KVView) -> KVView:
    """The same tokens, without the room for more behind packed ones."""
    key, value = (None if x is None else x.tokens(0, view.packed_length) for x in (view.key, view.value))
    return replace(view, key=key, value=value)
