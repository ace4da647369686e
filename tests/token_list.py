"""What a cache is to whoever uses it: a plain list of the tokens that it was given.

`Tokens` is that list, of one layer, and the slow judge of what the layer shows.  It knows no storage, only a view of
one (`KVView`), which says what is exact and what is packed.
"""

from dataclasses import dataclass, field

import torch
from error_budget import Roundings, attention, dequantize_budget, ratios
from storages import codes_of
from vectors import read_back

from tq_cache.backends import reference
from tq_cache.formats.states import KVView

ROUNDING = 1e-4  # relative: of float32, many times over
TIES = 1.02  # an element between two codes may go either way: the error is the same, the scale that follows is not


@dataclass
class Tokens:
    """Keys and values of one layer.

    given:  [B, H_kv, T, D] each, in the model's dtype: what the model handed over
    read:   float64, likewise: what attention reads of them, which is what was given until it is packed
    codes:  [B, H_kv, n, ...] each: the bits of the packed tokens, from token `first` on
    starts: int64 [B], the first token of each sequence that is no padding
    common: [H_kv, D] of keys: what all of them have in common, a centre is to find
    """

    common: torch.Tensor
    given: list[torch.Tensor] = field(default_factory=list)
    read: list[torch.Tensor] = field(default_factory=list)
    codes: list[torch.Tensor] = field(default_factory=list)
    first: int = 0
    starts: torch.Tensor | None = None

    @property
    def length(self) -> int:
        return self.given[0].shape[2] if self.given else 0

    @property
    def packed(self) -> int:
        return self.codes[0].shape[2] if self.codes else 0

    # ------------------------------------------------------------------------------------------- what happens to it

    def append(self, pair: tuple[torch.Tensor, torch.Tensor], starts: torch.Tensor) -> None:
        if not self.given:
            self.given, self.starts = [x.detach().clone() for x in pair], starts
            self.read = [x.double() for x in self.given]
            return
        self.given = [torch.cat([old, new.detach()], dim=2) for old, new in zip(self.given, pair, strict=True)]
        self.read = [torch.cat([old, new.detach().double()], dim=2) for old, new in zip(self.read, pair, strict=True)]

    def crop(self, length: int) -> None:
        if not length:
            return self.clear()
        self.given, self.read = ([x[:, :, :length] for x in pair] for pair in (self.given, self.read))
        left = max(length - self.first, 0)
        self.codes = [x[:, :, :left] for x in self.codes] if left else []

    def rows(self, indices: torch.Tensor) -> None:
        self.given, self.read, self.codes = ([x[indices] for x in y] for y in (self.given, self.read, self.codes))
        self.starts = None if self.starts is None else self.starts[indices]

    def clear(self) -> None:
        self.given, self.read, self.codes, self.starts = [], [], [], None

    def copy(self) -> "Tokens":
        return Tokens(self.common, [*self.given], [*self.read], [*self.codes], self.first, self.starts)

    # ------------------------------------------------------------------------------------------ what it must look like

    def check(self, view: KVView, may_pack: bool, residual: int, center: str) -> None:
        """A view holds these tokens: sinks and newest exactly, packed ones as well as their format can.

        may_pack: tokens may be packed that were not before; then those before the `residual` newest
        center:   the roles whose format subtracts what tokens have in common
        """
        view = view.on_device()
        first, last = view.sink_length, view.sink_length + view.packed_length
        assert view.length == self.length
        for given, parts in zip(self.given, _exact_parts(view), strict=True):
            assert_same(parts, torch.cat([given[:, :, :first], given[:, :, last:]], dim=2), "an exact token changed")
        before = self.packed
        assert view.packed_length >= before, "a packed token became exact again"
        assert view.packed_length == before or (may_pack and last <= self.length - residual), "packed too early"
        if not view.packed_length:
            return
        assert not before or self.first == first
        self.first = first
        known = self.codes or (None, None)
        self.codes = [self._check_packed(role, view, known[role], "key" in center and role == 0) for role in (0, 1)]

    def _check_packed(self, role: int, view: KVView, known: torch.Tensor | None, centered: bool) -> torch.Tensor:
        """The bits of known tokens are the same, new ones are near what was given; returns all bits."""
        states, count, first = (view.key, view.value)[role], view.packed_length, view.sink_length
        codes, read = codes_of(states, count), reference.dequantize(states, count, torch.float64)
        before = 0 if known is None else known.shape[2]
        place = torch.arange(first, first + count, device=read.device)
        real = place >= self.starts[:, None].to(read.device)  # nobody reads padding
        if known is not None:
            assert torch.equal(codes[:, :, :before], known), "bits of a packed token changed"
            held = self.read[role][:, :, first : first + before]
            change = (read[:, :, :before] - held).masked_fill(~real[:, None, :before, None], 0).nan_to_num(0.0)
            assert change.abs().max() <= 1e-9 * (1 + self.common.abs().max()), "bits of a token mean another vector"
        if count > before:
            new = slice(first + before, first + count)
            given = self.given[role][:, :, new]
            alone = read_back(given, states.role, states.format, states.calibration)
            self._check_error(given.double(), read[:, :, before:], alone, real[:, before:], centered)
        self.read[role] = self.read[role].clone()
        self.read[role][:, :, first : first + count] = read
        return codes

    def _check_error(self, given, read, alone, real, centered: bool) -> None:
        """As near as its format puts one vector alone, and nearer than another token would be."""
        whole = real[:, None, :, None] & given.isfinite()
        assert torch.equal((read.isnan() & whole), (alone.isnan() & whole)), "a NaN went to another vector"
        whole = whole & ~alone.isnan()
        error, least = ((x - given).masked_fill(~whole, 0).norm(dim=-1) for x in (read, alone))
        size = given.masked_fill(~whole, 0).norm(dim=-1)
        over = ((error - ROUNDING * size) / least.clamp_min(1e-30)).max().item()
        assert over <= TIES, f"{over:.3f} times as far off as its format alone"
        never_padded = (self.starts == 0).to(read.device)[:, None, None]
        unlike = given - self.common[:, None].double() if centered else given
        unlike = unlike.masked_fill(~whole, 0).norm(dim=-1)
        assert ((error <= unlike + ROUNDING * size) | ~never_padded).all(), "no nearer than any other token"

    # ----------------------------------------------------------------------------------------------------- attention

    def mask(self, queries: int, width: int | None = None) -> torch.Tensor:
        """Who sees whom: bool [B, 1, S, T or width], causal, without padding."""
        length = self.length
        place = torch.arange(width or length, device=self.given[0].device)
        own = torch.arange(length - queries, length, device=place.device)[:, None]
        return ((place <= own) & (place >= self.starts.to(place.device)[:, None, None]))[:, None]


def check_attention(
    out: torch.Tensor, query: torch.Tensor, read: list[torch.Tensor], mask: torch.Tensor, roundings: Roundings
) -> None:
    """Attention [B, S, H_q, D] over a list of tokens: of a few queries, as near as its arithmetic is fine.

    Where the last query sees NaN it gives NaN; what earlier ones give then, and those of padding, nobody asks.
    """
    count, group = query.shape[2], query.shape[1] // read[0].shape[1]
    rows = sorted({0, count // 2, count - 1})
    out, query, mask = out.transpose(1, 2)[:, :, rows], query[:, :, rows], mask[:, :, rows]
    visible = mask[:, 0, -1][:, None, :, None]
    spoiled = torch.stack([(x.isnan() & visible).flatten(2).any(dim=-1) for x in read]).any(dim=0)
    spoiled = spoiled.repeat_interleave(group, dim=1)  # [B, H_q]
    assert out[:, :, -1][spoiled].isnan().any(dim=-1).all(), "a NaN that is visible vanished"
    expected = attention(query, *(x.nan_to_num(0.0) for x in read), mask, query.shape[-1] ** -0.5, roundings)
    unread = spoiled[:, :, None] | ~mask.any(dim=-1)
    found = ratios(torch.where(unread[..., None], expected.out, out.double()), expected.lse, expected)
    assert max(found.row, found.lse) <= 1, found  # a few rows: the norm of them all is one row's, at half its budget


def check_handed_out(x: torch.Tensor, expected: torch.Tensor) -> None:
    """A tensor [B, H_kv, T, D] in the model's dtype shows these tokens, float64."""
    assert x.shape == expected.shape and torch.equal(x.isnan(), expected.isnan())
    x, expected = x.nan_to_num(0.0), expected.nan_to_num(0.0)
    assert (x.double() - expected).norm() <= dequantize_budget(x.dtype) * expected.norm(), "another token is shown"


def check_gradients(parts: list[list[torch.Tensor]], read: list[torch.Tensor]) -> None:
    """Those of keys, values and queries of forwards one after the other, over a list of tokens before them.

    Of the sum of all outputs; within a share of their size, since it is what is missing that is looked for.
    """
    twins = [[x.detach().double().requires_grad_() for x in part] for part in parts]
    held, total = [[x] for x in read] or [[], []], torch.zeros((), dtype=torch.float64, device=parts[0][0].device)
    for *pair, query in twins:
        for all_of_role, new in zip(held, pair, strict=True):
            all_of_role.append(new)
        keys, values = (torch.cat(x, dim=2).repeat_interleave(query.shape[1] // x[0].shape[1], dim=1) for x in held)
        seen = torch.ones(query.shape[2], keys.shape[2], dtype=torch.bool, device=total.device)
        seen = seen.tril(keys.shape[2] - query.shape[2])
        total = total + torch.nn.functional.scaled_dot_product_attention(query, keys, values, seen).sum()
    total.backward()
    for x, twin in zip(sum(parts, []), sum(twins, []), strict=True):
        assert x.grad is not None, "a gradient is missing"
        assert (x.grad - twin.grad).norm() <= 0.05 * twin.grad.norm() + 0.01, "a gradient is partial"


def _exact_parts(view: KVView) -> list[torch.Tensor]:
    """Sinks and tail of keys and of values."""
    pairs = (view.sink_keys, view.tail_keys), (view.sink_values, view.tail_values)
    return [torch.cat([x for x in pair if x is not None], dim=2) for pair in pairs]


def assert_same(x: torch.Tensor, y: torch.Tensor, message: str) -> None:
    assert x.shape == y.shape and x.dtype == y.dtype, (x.shape, y.shape, x.dtype, y.dtype)
    assert ((x == y) | (x.isnan() & y.isnan())).all(), message
