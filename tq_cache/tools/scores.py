"""One cache against exact logits: forwards under the cache, and what is kept of every token they predict."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class TokenScores:
    """One number per text and decoded token, float64 [N, T] on the CPU.

    kl:   KL(exact || this) in nats
    same: 1 where the most likely token is the exact cache's, else 0
    loss: -log of the probability of the text's own next token
    """

    kl: torch.Tensor
    same: torch.Tensor
    loss: torch.Tensor

    @classmethod
    def cat(cls, parts: "list[TokenScores]", dim: int) -> "TokenScores":
        """Parts one behind the other: texts (0) or tokens (1)."""
        columns = ([getattr(part, name) for part in parts] for name in ("kl", "same", "loss"))
        return cls(*[torch.cat(column, dim=dim) for column in columns])


def score(logits: torch.Tensor, exact: torch.Tensor, targets: torch.Tensor) -> TokenScores:
    """Logits [N, T, vocabulary] against exact ones, and on `targets` int64 [N, T].

    In float64: in float32 the sum over a vocabulary rounds to 1e-8, as much as a good cache is away.
    """
    log_probs, wanted = (x.double().log_softmax(dim=-1) for x in (logits, exact))
    kl = (wanted.exp() * (wanted - log_probs)).sum(dim=-1)
    same = logits.argmax(dim=-1) == exact.argmax(dim=-1)
    loss = -log_probs.gather(-1, targets[..., None])[..., 0]
    return TokenScores(kl.cpu(), same.double().cpu(), loss.cpu())


@torch.inference_mode()
def prefill(model: Any, ids: torch.Tensor, cache: Any, chunk: int | None = None) -> torch.Tensor:
    """Put `ids` int64 [N, P] through the model under `cache`; logits [N, vocabulary] behind the last.

    In one forward, in which attention sees exact keys and values and the cache the prompt's own queries; or, where
    that takes too much memory, `chunk` tokens at a time: from the second on they read what the cache made of the first.
    """
    for part in ids.split(chunk or ids.shape[1], dim=1):
        logits = model(part, past_key_values=cache, logits_to_keep=1).logits
    return logits[:, -1]


@torch.inference_mode()
def decode(model: Any, ids: torch.Tensor, start: int, chunk: int, cache: Any) -> Iterator[torch.Tensor]:
    """Logits, float32 [N, up to chunk, vocabulary], of tokens start + 1 .. T - 1 of `ids` int64 [N, T].

    `cache` holds the first `start` tokens; the others go through `chunk` at a time.
    """
    for part in ids[:, start:-1].split(chunk, dim=1):
        yield model(part, past_key_values=cache).logits.float()


def decode_scores(
    model: Any, ids: torch.Tensor, start: int, chunk: int, cache: Any, exact: torch.Tensor
) -> TokenScores:
    """`decode`, scored against `exact` [N, T - 1 - start, vocabulary] as it comes: no second copy of all logits."""
    parts, place = [], start
    for logits in decode(model, ids, start, chunk, cache):
        end = place + logits.shape[1]
        parts.append(score(logits, exact[:, place - start : end - start], ids[:, place + 1 : end + 1]))
        place = end
    return TokenScores.cat(parts, dim=1)
