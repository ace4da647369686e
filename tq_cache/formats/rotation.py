"""The rotation that spreads a vector's energy over its channels: Hadamard with random signs (TurboQuant, section 3)."""

import random
from functools import lru_cache
from typing import Any

import torch

MIN_HEAD_DIM, MAX_HEAD_DIM = 32, 576
_HOST: dict[str, Any] = {"dtype": torch.float64, "device": "cpu"}


KEEP = "name the layer in skip_layers to keep it in the model's dtype"


def is_packable(head_dim: int) -> bool:
    """Whether vectors of this width can be packed."""
    return head_dim % 16 == 0 and MIN_HEAD_DIM <= head_dim <= MAX_HEAD_DIM


def check_head_dim(head_dim: int, what: str = "head_dim", instead: str = KEEP) -> None:
    """Raise ValueError unless vectors of this width, `what` it is of, can be packed; it says what to do `instead`."""
    if not is_packable(head_dim):
        raise ValueError(
            f"expected a {what} that is a multiple of 16 from {MIN_HEAD_DIM} to {MAX_HEAD_DIM}, got {head_dim}; "
            f"{instead}"
        )


def hadamard_blocks(head_dim: int) -> list[int]:
    """Powers of two that add up to `head_dim`, largest first: 96 -> [64, 32], 80 -> [64, 16]."""
    return [1 << bit for bit in reversed(range(head_dim.bit_length())) if head_dim >> bit & 1]


@lru_cache(maxsize=64)
def rotation_matrix(head_dim: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Orthonormal [head_dim, head_dim], the same for every cache of this width, so that a saved cache stays readable.

    `x @ R.T` rotates row vectors, `y @ R` rotates them back.  Widths that are no power of two get one Hadamard matrix
    per block of `hadamard_blocks`.
    """
    signs = random.Random(head_dim)  # specified by Python, unlike torch's generators
    with torch.inference_mode(False):
        blocks = [_hadamard(size) for size in hadamard_blocks(head_dim)]
        diagonal = torch.tensor([1.0 if signs.getrandbits(1) else -1.0 for _ in range(head_dim)], **_HOST)
        return (torch.block_diag(*blocks) * diagonal).to(device, dtype)


def rotate(x: torch.Tensor) -> torch.Tensor:
    """Rotate the last dimension, [..., D] -> [..., D], same dtype."""
    return x @ rotation_matrix(x.shape[-1], x.device, x.dtype).T


def unrotate(x: torch.Tensor) -> torch.Tensor:
    """Undo `rotate`, [..., D] -> [..., D], same dtype."""
    return x @ rotation_matrix(x.shape[-1], x.device, x.dtype)


def _hadamard(size: int) -> torch.Tensor:
    matrix = torch.ones(1, 1, **_HOST)
    while matrix.shape[0] < size:
        matrix = torch.cat([torch.cat([matrix, matrix], dim=1), torch.cat([matrix, -matrix], dim=1)])
    return matrix / size**0.5
