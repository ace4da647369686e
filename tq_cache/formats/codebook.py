"""Codebooks: the symmetric sets of values that codes stand for.

All are exact in e4m3, so that a kernel can turn a code into the byte that an fp8 tensor core takes.  Restricting a
Lloyd-Max codebook so costs 0.7 % of its distortion at 16 levels, 0.1 % at 8, nothing at 4.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Codebook:
    """Values `+magnitudes, -magnitudes`, indexed by sign and magnitude codes (see `packing`).

    Multiplied by `unit` they suit data of variance 1; `distortion` is then the mean squared error for N(0, 1).
    """

    name: str
    magnitudes: tuple[float, ...]
    unit: float
    distortion: float

    @property
    def bits(self) -> int:
        return len(self.magnitudes).bit_length()

    def values(self, device: torch.device | str | None = None, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Value of every code, [2**bits]."""
        magnitudes = torch.tensor(self.magnitudes, device=device, dtype=dtype)
        return torch.cat([magnitudes, -magnitudes])

    def nearest(self, x: torch.Tensor) -> torch.Tensor:
        """Code uint8 of the value nearest to each element of `x` (any shape); a tie goes to the smaller magnitude."""
        boundaries = [(low + high) / 2 for low, high in zip(self.magnitudes, self.magnitudes[1:], strict=False)]
        magnitude = torch.bucketize(x.abs().contiguous(), torch.tensor(boundaries, device=x.device, dtype=x.dtype))
        return (magnitude + (x < 0) * len(self.magnitudes)).to(torch.uint8)


# Magnitudes restricted to e4m3 and the scale that goes with them, found by exhaustive search around the Lloyd-Max
# quantiser of N(0, 1) (Lloyd 1982, Max 1960); `tests/test_codebook.py` verifies the distortions by integration.
GAUSSIAN = {
    2: Codebook("gaussian2", (9 / 32, 15 / 16), 1.6110397677, 0.1174819),
    3: Codebook("gaussian3", (3 / 16, 9 / 16, 1.0, 13 / 8), 1.3290656837, 0.0345892),
    4: Codebook("gaussian4", (9 / 128, 13 / 64, 11 / 32, 1 / 2, 11 / 16, 7 / 8, 9 / 8, 3 / 2), 1.8321701535, 0.0095673),
}

# Equal steps: odd integers, so that the scale is half a step.  `unit` makes the distortion for N(0, 1) least.
UNIFORM = {
    3: Codebook("uniform3", (1.0, 3.0, 5.0, 7.0), 0.2930, 0.0374397),
    4: Codebook("uniform4", (1.0, 3.0, 5.0, 7.0, 9.0, 11.0, 13.0, 15.0), 0.1676, 0.0115429),
}
