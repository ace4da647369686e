"""What a storage waits for before it packs: queries to calibrate with, and enough real tokens of every sequence.

A calibration holds for all tokens that are ever packed, so it must not rest on a padded chunk, on one token, or on keys
alone where queries are about to come.  Until then tokens stay exact:

    queries   that attention over the next update, at the latest, is to show (`observe`); else keys are taken alone
    tokens    until each sequence has none that counts, or MIN_CALIBRATION_TOKENS; at most MAX_WAITING_TOKENS wait

A sequence of which no token counts (padding on the left) stays open: nobody reads its packed tokens, so it is
calibrated when it begins.
"""

from collections.abc import Callable, Mapping

import torch

from ..backends.calibration import QueryEnergy, calibrate_pair, measures, not_padding, query_energy
from ..formats.presets import Preset, Role
from ..formats.states import Calibration

MIN_CALIBRATION_TOKENS = 128
MAX_WAITING_TOKENS = 1024
# So many queries say enough; more of one prompt are taken at even distances.
ENOUGH_QUERIES = 512
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
        self._visible: torch.Tensor | None = None  # bool [B, tokens], what the last query that came saw
        self._unseen = 0  # updates whose queries did not come

    @property
    def wants_queries(self) -> bool:
        """Whether queries are still to be shown."""
        return not self.done and self._queries < ENOUGH_QUERIES

    def expect(self, queries_follow: bool) -> None:
        """An update came; `queries_follow` says that attention will show its queries, unless it never runs."""
        self._unseen = self._unseen + 1 if queries_follow else PATIENCE + 1

    def observe(self, query: torch.Tensor | None, mask: torch.Tensor | None, num_kv_heads: int, length: int) -> None:
        """The queries [B, H_q, S, D] of the last of `length` tokens, and what they see, [B or 1, H, S, length or more].

        None: there are none to be seen.
        """
        self._unseen = PATIENCE + 1 if query is None else 0
        if query is None:
            return
        batch, _, count, _ = query.shape
        counts = None
        if mask is not None:
            seen = mask[..., -1, :length].detach()
            seen = seen if seen.dtype == torch.bool else seen > torch.finfo(seen.dtype).min / 2
            self._visible = seen.any(dim=1).expand(batch, -1)
            counts = self._visible[:, length - count :]
        step = -(-count // ENOUGH_QUERIES)
        new = query_energy(query[:, :, ::step], num_kv_heads, None if counts is None else counts[:, ::step])
        if self._energy is not None:
            new = QueryEnergy(self._energy.squares + new.squares, self._energy.seen + new.seen)
        self._energy, self._queries = new, self._queries + count

    @property
    def awaits(self) -> bool:
        """Whether queries of tokens that are here may still come."""
        return 0 < self._unseen <= PATIENCE and not self._queries

    def calibrate(self, keys: torch.Tensor, values: torch.Tensor, first: int, held: _Pair | None) -> _Pair | None:
        """A calibration to pack these exact tokens with, [B, H_kv, T, D] each, or None: they are to wait.

        first: how many tokens are before them; held: the calibration that packed ones have, which is changed in place
        where a sequence begins
        """
        if not measures(self.preset, self.given_scales):
            self.done = True
            return calibrate_pair(self.preset, keys, values, self.given_scales)
        if self.awaits:
            return None
        counts = not_padding(values)
        if self._visible is not None:
            visible = self._visible[:, first : first + keys.shape[2]].to(counts.device)
            counts[:, 0, : visible.shape[1], 0] &= visible
        tokens = counts.sum(dim=(1, 2, 3))
        # Asking the device waits for it; without a mask that pads, attention has said that all tokens are real.
        real = tokens.tolist() if self._visible is not None or not self._queries else [keys.shape[2]] * len(tokens)
        closed = [False] * len(real) if self._calibrated is None else self._calibrated.tolist()
        begun = [count for count, done in zip(real, closed, strict=True) if not done]
        few = any(0 < count < MIN_CALIBRATION_TOKENS for count in begun) or (held is None and not any(real))
        if few and keys.shape[2] < MAX_WAITING_TOKENS:
            return None
        new = calibrate_pair(self.preset, keys, values, self.given_scales, counts, self._energy)
        begins = torch.tensor([count > 0 and not done for count, done in zip(real, closed, strict=True)])
        self._calibrated = begins if self._calibrated is None else self._calibrated | begins
        self.done = bool(self._calibrated.all())
        if self.done:
            self._calibrated = self._energy = self._visible = None
        if held is None:
            return new
        for old, fresh in zip(held, new, strict=True):
            for name in ("center", "smooth", "scale"):
                tensor, other = getattr(old, name), getattr(fresh, name)
                if tensor is not None:
                    tensor[begins.to(tensor.device)] = other[begins.to(tensor.device)]
        return held

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Apply a choice of sequences to all that is known of them."""
        if self._calibrated is not None:
            self._calibrated = function(self._calibrated)
        if self._visible is not None:
            self._visible = function(self._visible)
        if self._energy is not None:
            self._energy = QueryEnergy(*map(function, self._energy))
