"""How far attention may be off: what the roundings of its arithmetic come to, never a rounding error that happened.

One plain attention's largest error is luck: it is small where the signs of a few roundings cancel.  Here every rounding
counts with the most that it can be, u times what it rounds (u = eps / 2), and independent ones add as the root of their
squares, written + below; a sum of n terms is off by sqrt(n) u times its size, or by u times the length of both vectors
where signs vary (Higham and Mary, "A new approach to probabilistic rounding error analysis", 2019).

    score   s = scaling q k   d = slope of the soft cap * scaling * (u_operand sqrt(2) |q * k| + u_dot |q| |k|)
                                  + u_dot (|s| + 1), of cap, mask and exponential
    output  o = sum of p v    A = root of the sum over tokens of (p d |v - o|)**2, a score's error times the spread of
                                  values, and of (u_operand sqrt(2) p |v|)**2, probabilities and values as operands,
                                  + (u_dot + u_sum sqrt(T)) |o|, the sum over tokens
                              R = u_out |o|, the rounding of the output, more than which it cannot be
    lse                       L = sum over tokens of p d (roundings of the query act together), u_sum (sqrt(T) + |lse|)

with |.| the length of a vector over channels, u_operand of the type that goes to a dot, u_dot of the dot's own sum,
u_sum of float32.  Allowed are NORM A + R for all rows of the output together, ROW A + R for each, ROW L for each lse.
"""

import os
from dataclasses import dataclass
from typing import NamedTuple

import torch

from tq_cache.backends import reference
from tq_cache.formats.states import KVView

# A and L are about two standard deviations of an error: roundings are 0.4 u in the mean square.  One or two scores may
# decide a row, and one row the norm of all; of the thousands of rows of all tests, the worst is to be within.
NORM, ROW = 2.0, 4.0


@dataclass(frozen=True)
class Roundings:
    """Largest relative error of one rounding, of each kind."""

    operand: float
    dot: float
    sum: float
    out: float

    @classmethod
    def of_reference(cls, dtype: torch.dtype) -> "Roundings":
        """It computes in float32; in float64 as the expectation does, so both are off."""
        if dtype == torch.float64:
            return cls(*(torch.finfo(dtype).eps,) * 4)
        unit = torch.finfo(torch.float32).eps / 2
        return cls(unit, unit, unit, torch.finfo(dtype).eps / 2)

    @classmethod
    def of_kernels(cls, dtype: torch.dtype, *, float8: bool = False) -> "Roundings":
        """Of float32, or of 16-bit queries: operands of their type, or, with float8, in two e4m3 terms.

        Of a number from 1 to 2, the first term leaves at most 2**-4, and the second of that at most 2**-9.  Float8
        tensor cores sum in 14 bits, 32 channels or tokens a step: 4 steps (of 128) are at most 4 * 2**-14.
        """
        if dtype == torch.float32:
            return cls.of_reference(dtype)
        unit, fine = torch.finfo(dtype).eps / 2, torch.finfo(torch.float32).eps / 2
        return cls(max(unit, 2.0**-9), 2.0**-12, fine, unit) if float8 else cls(unit, fine, fine, unit)


class Expected(NamedTuple):
    """Attention in float64, [B, H_q, S, D_v] and [B, H_q, S], and for each query A, R and L, [B, H_q, S]."""

    out: torch.Tensor
    lse: torch.Tensor
    out_error: torch.Tensor
    rounding: torch.Tensor
    lse_error: torch.Tensor


class Ratios(NamedTuple):
    """Errors over budgets, at most 1: of the length of all rows together, the worst row, the worst lse."""

    norm: float
    row: float
    lse: float


def dequantize_budget(dtype: torch.dtype) -> float:
    """Relative error, as a norm, of vectors unpacked: of a float32 factor, zero, rotation (matrix and sum), smoothing
    and centre, each u of a length about that of the vector, and of the result."""
    return 6 * torch.finfo(torch.float32).eps / 2 + torch.finfo(dtype).eps / 2


def relative_error(x: torch.Tensor, expected: torch.Tensor) -> float:
    """||x - expected|| / ||expected|| in float64; NaN where `x` has any."""
    return ((x.double() - expected.double()).norm() / expected.double().norm()).item()


def exact_parts(view: KVView) -> tuple[torch.Tensor, torch.Tensor]:
    """All keys and values, dequantised in float64 (no rounding to the model's dtype)."""

    def whole(sinks, packed, newest):
        parts = [] if sinks is None else [sinks.double()]
        if packed is not None:
            parts.append(reference.dequantize(packed, view.packed_length, torch.float64))
        return torch.cat([*parts, newest.double()], dim=2)

    return whole(view.sink_keys, view.key, view.tail_keys), whole(view.sink_values, view.value, view.tail_values)


def attention(query, keys, values, mask, scaling, roundings, softcap=None, sink_logits=None) -> Expected:
    """Plain attention in float64; `mask` bool or float, None for full attention.  Rows without a token give zeros."""
    query, keys, values = query.double(), keys.double(), values.double()
    scores = _times(query, keys.mT) * scaling
    operands = 2 * (roundings.operand * scaling) ** 2 * _times(query.square(), keys.mT.square())
    lengths = _times(query.square().sum(-1, keepdim=True), keys.square().sum(-1)[..., None, :])
    variance = operands + (roundings.dot * scaling) ** 2 * lengths
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
        variance = variance * (1 - (scores / softcap).square()).square()
    variance = variance + roundings.dot**2 * (scores.square() + 1)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    if sink_logits is not None:  # tokens that give nothing
        extra = sink_logits.double()[..., None].expand(*scores.shape[:3], 1)
        scores, values = torch.cat([scores, extra], dim=-1), torch.nn.functional.pad(values, (0, 0, 0, 1))
        variance = torch.cat([variance, roundings.dot**2 * (extra.square() + 1)], dim=-1)
    weights = torch.softmax(scores, dim=-1).nan_to_num(0.0)
    out, lse = _times(weights, values), torch.logsumexp(scores, dim=-1)
    sizes, length = _times(torch.ones_like(query[..., :1]), values.square().sum(-1)[..., None, :]), out.square().sum(-1)
    spread = (sizes - 2 * _times(out, values.mT) + length[..., None]).clamp_min(0)
    steps = roundings.sum * keys.shape[2] ** 0.5
    per_token = weights.square() * (variance * spread + 2 * roundings.operand**2 * sizes)
    out_error = (per_token.sum(-1) + (roundings.dot + steps) ** 2 * length).sqrt()
    lse_error = (weights * variance.sqrt()).sum(-1) + steps + roundings.sum * lse.abs().nan_to_num(posinf=0.0)
    return Expected(out, lse, out_error, roundings.out * length.sqrt(), lse_error)


def _times(rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """[B, H_q, S, N] @ [B, H, N, M], heads in groups: nothing is repeated for each of them."""
    batch, kv_heads = columns.shape[:2]
    grouped = rows.reshape(batch, kv_heads, -1, rows.shape[-1]) @ columns
    return grouped.view(*rows.shape[:3], columns.shape[-1])


def ratios(out: torch.Tensor, lse: torch.Tensor, expected: Expected) -> Ratios:
    """How much of their budgets the errors of an output and a log-sum-exp take; inf or NaN if there is none to take."""
    error = (out.double() - expected.out).norm(dim=-1)
    unseen = expected.lse == -torch.inf
    lse_error = torch.where(unseen & (lse == -torch.inf), 0.0, (lse.double() - expected.lse).abs())
    return Ratios(
        _share(error.norm(), NORM * expected.out_error.norm() + expected.rounding.norm()),
        _share(error, ROW * expected.out_error + expected.rounding),
        _share(lse_error, ROW * expected.lse_error),
    )


def assert_within(out: torch.Tensor, lse: torch.Tensor, expected: Expected) -> None:
    found = ratios(out, lse, expected)
    assert all(ratio <= 1 for ratio in found), found


def _share(error: torch.Tensor, budget: torch.Tensor) -> float:
    """The largest error over its budget; nothing of nothing is 0."""
    return torch.where((error == 0) & (budget == 0), 0.0, error / budget).max().item()


def seeded(number: int, device: str = "cpu") -> torch.Generator:
    """Random numbers of a test; `pytest --seed N` gives others to all of them."""
    return torch.Generator(device).manual_seed(number + 1000 * int(os.environ.get("TQ_TEST_SEED", "0")))
