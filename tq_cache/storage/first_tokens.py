"""What a storage knows of its first tokens, and what it waits for, before it packs any of them.

A calibration holds for all tokens that are ever packed, so it must not rest on a padded chunk, on one token, or on keys
alone where queries are about to come.  Until then tokens stay exact, where they can:

    queries   that attention over the next update, at the latest, is to show (`observe`); else keys are taken alone
    tokens    until there are MIN_CALIBRATION_TOKENS that count of each sequence; at most MAX_WAITING_TOKENS wait

Which tokens are padding is what attention says (its mask, or that it has none).  Only while it has said nothing is it
guessed from values (`not_padding`).

A sequence whose packed tokens are all padding, as attention's mask says, stays open: nothing reads them, so it is
calibrated when it begins.  A guess keeps no sequence open: if it is wrong, a later calibration would change what the
packed codes mean.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..backends.calibration import QueryEnergy, calibrate_pair, measures, not_padding, query_energy
from ..formats.presets import Preset, Role
from ..formats.states import Calibration

MIN_CALIBRATION_TOKENS = 128
MAX_WAITING_TOKENS = 1024
# After so many queries, single ones are not asked for; of a prompt up to so many are taken, at even distances.
MIN_QUERIES, MAX_QUERIES = 64, 512
# Updates that may come without queries: a cache that was filled by hand sees some with the first step after that.
PATIENCE = 2

_Pair = tuple[Calibration, Calibration]


class FirstTokens:
    """See above.  `done` once every sequence is calibrated.

    preset, given_scales: as those of `LayerStorage`
    """

    def __init__(self, preset: Preset, given_scales: Mapping[Role, torch.Tensor]) -> None:
        self.preset, self.given_scales = preset, given_scales
        self.clear()

    def clear(self) -> None:
        """Begin anew."""
        self.done = False
        self._calibrated: torch.Tensor | None = None  # bool [B], before that nobody is
        self._energy: QueryEnergy | None = None
        self._queries = 0
        self._starts: torch.Tensor | None = None  # int64 [B], the first token that is no padding, as masks say
        self._observed = 0  # so many tokens those masks are about: later ones are taken for real
        self._unseen = 0  # updates whose queries did not come

    def expect(self, count: int, queries_follow: bool) -> bool:
        """An update of so many tokens came, whose queries follow unless attention never runs; whether to show them.

        A prompt's parts are to be shown for their masks, even where there are queries enough.
        """
        wanted = queries_follow and (count > 1 or self._queries < MIN_QUERIES)
        self._unseen = self._unseen + 1 if wanted else 0 if queries_follow else PATIENCE + 1
        return wanted

    def observe(
        self,
        query: torch.Tensor | None,
        mask: torch.Tensor | None,
        num_kv_heads: int,
        length: int,
        into_keys: Callable[[torch.Tensor], torch.Tensor] | None = None,
        group: Any = None,
    ) -> None:
        """The queries [B, H_q, S, D] of the last of `length` tokens, and what they see, [B or 1, H, S, length or more].

        None: there are none to be seen.  `into_keys` makes queries of the keys that are cached of those it is given:
        of the ones that are taken alone.  `group`: processes that have other heads' queries of the same keys, which all
        call this; None: there are none.
        """
        self._unseen = PATIENCE + 1 if query is None else 0
        if query is None:
            return
        count, counts = query.shape[2], None
        if mask is not None:
            starts = _first_seen(mask.detach()[..., :length], count).expand(query.shape[0]).to(query.device)
            if self._starts is not None:  # sequences that had begun stay so
                starts = torch.where(self._starts < self._observed, torch.minimum(self._starts, starts), starts)
            self._starts, self._observed = starts, length
            counts = torch.arange(length - count, length, device=starts.device) >= self._starts[:, None]
        if self._queries >= MAX_QUERIES:
            return
        step = -(-count // MAX_QUERIES)
        taken = query[:, :, ::step]
        taken = taken if into_keys is None else into_keys(taken)
        new = query_energy(taken, num_kv_heads, None if counts is None else counts[:, ::step])
        if group is not None:
            for part in new:
                torch.distributed.all_reduce(part, group=group)
        if self._energy is not None:
            new = QueryEnergy(self._energy.squares + new.squares, self._energy.seen + new.seen)
        self._energy, self._queries = new, self._queries + count

    @property
    def awaits(self) -> bool:
        """Whether queries of tokens that are here may still come, and the mask that says which are padding."""
        return 0 < self._unseen <= PATIENCE

    def calibrate(
        self, keys: torch.Tensor, values: torch.Tensor, first: int, packs: int, held: _Pair | None, must: bool = False
    ) -> _Pair | None:
        """A calibration to pack the first `packs` of these exact tokens with, or None: they are to wait.

        keys, values: [B, H_kv, T, D] each, with `first` tokens before them
        held:         the calibration that packed ones have, which is changed in place where a sequence begins
        must:         they cannot wait
        """
        if not measures(self.preset, self.given_scales):
            self.done = True
            return calibrate_pair(self.preset, keys, values, self.given_scales)
        if self.awaits and not must:
            return None
        counts = self._counts(keys, values, first)
        batch = counts.shape[0]
        begins = torch.ones(batch, dtype=torch.bool)
        if self._queries and self._starts is not None:
            begins = counts[:, 0, :packs, 0].any(dim=1).cpu()
        if self._calibrated is not None:
            begins = begins & ~self._calibrated
        # Asking the device waits for it; without a mask that pads, attention has said that all tokens are real.
        if not must and keys.shape[2] < MAX_WAITING_TOKENS:
            known = self._queries and self._starts is None
            real = [keys.shape[2]] * batch if known else counts.sum(dim=(1, 2, 3)).tolist()
            if any(
                begun and count < MIN_CALIBRATION_TOKENS for begun, count in zip(begins.tolist(), real, strict=True)
            ):
                return None
        new = self._measure(keys, values, counts)
        if held is not None:
            _replace_rows(held, new, begins)
        self._calibrated = begins if self._calibrated is None else self._calibrated | begins
        if bool(self._calibrated.all()):
            self.accept()
        return held or new

    def accept(self) -> None:
        """All sequences are calibrated, as they are."""
        self.done = True
        self._calibrated = self._energy = self._starts = None

    def provisional(self, keys: torch.Tensor, values: torch.Tensor, first: int) -> _Pair:
        """What these tokens say alone, as few as they may be; nothing is settled by it."""
        return self._measure(keys, values, self._counts(keys, values, first))

    def _measure(self, keys: torch.Tensor, values: torch.Tensor, counts: torch.Tensor) -> _Pair:
        """Calibrate on the tokens that count, bool [B, 1, T, 1].

        Of a sequence that is guessed to be padding and nothing else only the centre is measured, on all its tokens: a
        wrong guess needs it, a right one loses nothing by it.
        """
        new = calibrate_pair(self.preset, keys, values, self.given_scales, counts, self._energy)
        if not self._queries and self.preset.center:
            guessed = ~counts.any(dim=2, keepdim=True)
            if bool(guessed.any()):
                centers = calibrate_pair(self.preset, keys, values, self.given_scales, counts | guessed)
                _replace_rows(new, centers, guessed[:, 0, 0, 0], ("center",))
        return new

    def _counts(self, keys: torch.Tensor, values: torch.Tensor, first: int) -> torch.Tensor:
        """Which of the tokens from `first` on are real, bool [B, 1, T, 1].

        What attention said decides.  Values decide on tokens that it has not seen, of sequences that have not begun.
        """
        if self._queries and self._starts is None:  # no mask that pads
            return torch.ones(keys.shape[0], 1, keys.shape[2], 1, dtype=torch.bool, device=keys.device)
        guess = not_padding(keys if self.preset.holds_latents else values)
        if self._starts is None:
            return guess
        place = torch.arange(first, first + keys.shape[2], device=guess.device)
        starts = self._starts.to(guess.device)[:, None]
        told = (place < self._observed) | (starts < self._observed)
        return torch.where(told[:, None, :, None], (place >= starts)[:, None, :, None], guess)

    def state(self) -> tuple[dict[str, int], dict[str, torch.Tensor]]:
        """All that is known: numbers and tensors by name, of which `squares` alone have KV heads, [B, H_kv, 1, D]."""
        numbers = dict(
            done=int(self.done), queries=self._queries, observed=self._observed, unseen=self._unseen
        )  # fmt: skip
        squares, seen = (None, None) if self._energy is None else self._energy
        held = dict(calibrated=self._calibrated, starts=self._starts, squares=squares, seen=seen)
        return numbers, {name: tensor for name, tensor in held.items() if tensor is not None}

    def restore(self, numbers: Mapping[str, int], tensors: Mapping[str, torch.Tensor]) -> None:
        """What `state` gave."""
        self.done = bool(numbers["done"])
        self._queries, self._observed, self._unseen = (numbers[name] for name in ("queries", "observed", "unseen"))
        self._calibrated, self._starts = tensors.get("calibrated"), tensors.get("starts")
        self._energy = QueryEnergy(tensors["squares"], tensors["seen"]) if "squares" in tensors else None

    def place(self, device: torch.device, heads: slice) -> None:
        """Move what is known to a device, of those KV heads."""
        if self._starts is not None:
            self._starts = self._starts.to(device)
        if self._energy is not None:
            squares, seen = self._energy
            self._energy = QueryEnergy(squares[:, heads].to(device), seen.to(device))

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Apply a choice of sequences to all that is known of them."""
        if self._calibrated is not None:
            self._calibrated = function(self._calibrated)
        if self._starts is not None:
            self._starts = function(self._starts)
        if self._energy is not None:
            self._energy = QueryEnergy(*map(function, self._energy))


def _replace_rows(
    held: _Pair, new: _Pair, rows: torch.Tensor, names: tuple[str, ...] = ("center", "smooth", "scale")
) -> None:
    """Of sequences `rows`, bool [B], in place."""
    for old, fresh in zip(held, new, strict=True):
        for name in names:
            tensor, other = getattr(old, name), getattr(fresh, name)
            if tensor is not None:
                tensor[rows.to(tensor.device)] = other[rows.to(tensor.device)]


def _first_seen(mask: torch.Tensor, queries: int) -> torch.Tensor:
    """The first token that is no padding, int64 [B], of a mask [B, H, S, T] whose last tokens are those of the queries.

    T where there is none.  By what the last query sees, and by who sees itself: sparse attention hides others, but
    the first token of a sequence sees nothing else.
    """

    def shown(part: torch.Tensor) -> torch.Tensor:
        seen = part if part.dtype == torch.bool else part > torch.finfo(part.dtype).min / 2
        return seen.any(dim=1)

    seen, before = shown(mask[:, :, -1]), mask.shape[3] - queries
    if mask.shape[2] == queries:
        own = shown(mask.diagonal(offset=before, dim1=2, dim2=3))
        seen = torch.cat([seen[:, :before], seen[:, before:] | own], dim=1)
    return torch.where(seen.any(dim=1), seen.int().argmax(dim=1), mask.shape[3])
