"""What the kernels of latent attention are given, by name; see `decode.arguments`, of which some are taken."""

from typing import Any, NamedTuple

import torch

from ..attention.masks import MaskSteps
from ..decode.arguments import QuerySteps
from ..states import PairSteps, TokenSteps


class Queries(NamedTuple):
    """Queries as operands, made by `latent_query_kernel`; columns are head after head, all queries of each.

    content: [B, columns, rank], in the space of the codes, each column divided by its largest element; for fp8 dots in
             two e4m3 terms, bytes [B, tiles, 2 * columns of a tile, rank]
    rotary:  [B, columns, d], likewise, in the model's dtype and not divided where rotary keys are exact
    numbers: float32 [3, B, columns]: factors of products with codes and with rotary keys, what is added to scores
    """

    content: torch.Tensor
    rotary: torch.Tensor
    numbers: torch.Tensor


class Given(NamedTuple):
    """Queries as they came, in the model's dtype: content [B, H, S, rank], rotary [B, H, S, d]."""

    content: torch.Tensor
    rotary: torch.Tensor


class PackedLatents(NamedTuple):
    """What is packed of latents and rotary keys: bytes, or exact elements, and their scales, float16 per token, float32
    per sequence, or None."""

    latents: Any
    scale: torch.Tensor
    positions: torch.Tensor | None
    position_scale: torch.Tensor | None


class ExactLatents(NamedTuple):
    """In the model's dtype: queries as they came, see `Given`; latents and rotary keys of the tail, [B, 1, n, rank] and
    [B, 1, n, d], or a ring; and of the first tokens of all, likewise, or None."""

    content: torch.Tensor
    rotary: torch.Tensor
    tail_latents: torch.Tensor
    tail_rotary: torch.Tensor
    sink_latents: torch.Tensor | None
    sink_rotary: torch.Tensor | None


class Settings(NamedTuple):
    """num_sinks, residual_length: see `decode.arguments.Sizes`; scaling: times log2 e; softcap: 0: none."""

    num_sinks: int
    residual_length: int
    scaling: float
    softcap: float


class Chosen(NamedTuple):
    """Sparse attention: int32 [B, S, top_k] contiguous, the tokens that each query may see; -1 is none."""

    indices: torch.Tensor
    top_k: int


class LatentSteps(NamedTuple):
    """Strides.  Of what is packed, to the next sequence; of sinks where there are none, those of the tail."""

    content: QuerySteps
    rotary: QuerySteps
    latents: PairSteps  # bytes, scales
    positions: PairSteps
    tail_latents: TokenSteps
    tail_rotary: TokenSteps
    sink_latents: TokenSteps
    sink_rotary: TokenSteps
    mask: MaskSteps


# --- Constants.

NO_ROTARY, EXACT_ROTARY, CODED_ROTARY = 0, 1, 2


class LatentShape(NamedTuple):
    """rank of latents, width of rotary keys and that of their tiles, query heads, queries, query columns of a tile."""

    rank: int
    rotary: int
    rotary_width: int
    heads: int
    queries: int
    columns: int


class RotaryCode(NamedTuple):
    """kind: NO_ROTARY, EXACT_ROTARY or CODED_ROTARY; the table of 8-bit codes, see `states.Code`; scaled: per token."""

    kind: int
    table: tuple[int, int]
    scaled: bool


class LatentFlags(NamedTuple):
    """softcap: scores are capped; causal: some query sees not all tokens; mask: kind; chosen: tokens are; stale: tiles
    may have codes of 8 bits, maybe NaN, of tokens that do not count."""

    softcap: bool
    causal: bool
    mask: int
    chosen: bool
    stale: bool


class LatentLaunch(NamedTuple):
    """tile, exact_step: tokens of a step, at most a block where heads are rows; pdl: see `Device`."""

    tile: int
    stages: int
    exact_step: int
    pdl: bool
