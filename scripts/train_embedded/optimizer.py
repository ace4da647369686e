"""The optimizers: Muon and AdamW."""

from __future__ import annotations

import collections

import torch


class Muon:
    """Momentum, orthogonalised per matrix (Newton-Schulz), batched over equal shapes."""

    def __init__(self, params: list[torch.nn.Parameter], momentum: float = 0.95):
        groups = collections.defaultdict(list)
        for p in params:
            groups[tuple(sorted(p.shape))].append(p)
        self.groups = list(groups.values())
        self.buffers = [torch.stack([_wide(p.detach()) for p in g]) * 0 for g in self.groups]
        self.momentum = momentum

    @torch.no_grad()
    def step(self, lr: float, decay: float) -> None:
        for params, buffer in zip(self.groups, self.buffers, strict=True):
            grad = torch.stack([_wide(p.grad) for p in params])
            buffer.lerp_(grad, 1 - self.momentum)
            update = _orthogonal(grad.lerp(buffer, self.momentum))
            for p, u in zip(params, update.unbind(), strict=True):
                tall = p.shape[0] > p.shape[1]
                scale = max(1.0, p.shape[0] / p.shape[1]) ** 0.5
                p.mul_(1 - lr * decay).add_(u.T if tall else u, alpha=-lr * scale)


def _wide(matrix: torch.Tensor) -> torch.Tensor:
    return matrix.T if matrix.shape[0] > matrix.shape[1] else matrix


def _orthogonal(g: torch.Tensor, steps: int = 5) -> torch.Tensor:
    """The nearest semi-orthogonal matrices, roughly; (count, rows, columns), rows <= columns."""
    x = g.bfloat16()
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        a = x @ x.mT
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x.to(g.dtype)


class Optimizer:
    """Muon for the weight matrices, AdamW for the embedding and the norms' gains."""

    def __init__(self, model, fused: bool):
        matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
        gains = [p for p in model.parameters() if p.ndim == 1]
        self.muon = Muon(matrices)
        self.adam = torch.optim.AdamW(
            [{"params": [model.model.embed_tokens.weight], "base": 3e-3}, {"params": gains, "base": 5e-3}],
            lr=0.0,
            betas=(0.9, 0.98),
            weight_decay=0.0,
            fused=fused,
        )

    def step(self, scale: float) -> None:
        """One step, every learning rate times ``scale``."""
        self.muon.step(0.02 * scale, decay=0.02)
        for group in self.adam.param_groups:
            group["lr"] = group["base"] * scale
        self.adam.step()
