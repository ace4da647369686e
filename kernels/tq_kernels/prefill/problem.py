"""What one prefill is given, checked, and what its launches share."""

from typing import Any, NamedTuple

import torch

from ..attention.masks import MaskStrides, TiledMask, classify
from ..bits.layout import part_width, parts
from ..bits.to_float16 import decoders
from ..device import Device
from ..launch import Program
from ..states import States
from . import tuning
from .arguments import Dims, TileArithmetic


class Problem(NamedTuple):
    """What all launches of one prefill share; see `attend.prefill`."""

    device: Device
    query: torch.Tensor
    key: States | None
    value: States | None
    exact_keys: torch.Tensor  # sink tokens, then the tail
    exact_values: torch.Tensor
    packed_length: int
    num_sinks: int  # of the exact tokens
    rows: int  # queries, padded for cuDNN
    scaling: float
    softcap: float | None = None
    mask: torch.Tensor | None = None  # [B, H_q, S, T], bytes or float
    sink_logits: torch.Tensor | None = None
    causal: bool = True

    @property
    def group(self) -> int:
        return self.query.shape[1] // self.exact_keys.shape[1]

    @property
    def dims(self) -> Dims:
        return Dims(self.query.shape[3], self.exact_values.shape[3])

    @property
    def dtype(self) -> torch.dtype:
        """Of products."""
        return torch.float32 if self.query.dtype == torch.float32 else torch.float16

    @property
    def configs(self) -> tuning.LaunchConfigs:
        return tuning.launches_of(self.dtype == torch.float32, max(self.dims), self.device)

    @property
    def precision(self) -> str:
        """How float32 products are made."""
        return "tf32x3" if self.device.is_nvidia and self.device.capability >= (8, 0) else "ieee"

    @property
    def arithmetic(self) -> TileArithmetic:
        return TileArithmetic(*decoders(self.device), self.precision, self.softcap is not None)

    @property
    def formats(self) -> dict[str, Any]:
        """Constants of kernels that read packed states."""
        assert self.key is not None and self.value is not None
        return dict(DIMS=self.dims, KEY=self.key.coding.code, VALUE=self.value.coding.code)

    @property
    def is_float8(self) -> bool:
        """Of keys and values."""
        return self.key is not None and self.value is not None and self.key.coding.bits == self.value.coding.bits == 8

    @property
    def key_width(self) -> int:
        """Columns of a packed key, its parts padded."""
        assert self.key is not None
        return part_width(self.dims.key_dim, self.key.coding.bits) * parts(self.key.coding.bits)

    def tiled_mask(
        self, config: tuning.LaunchConfig, length: int, boundary: int, shift: int
    ) -> tuple[TiledMask | None, MaskStrides | tuple[()]]:
        """The mask and its strides, if there is one, for `length` tokens that stand where `classify` says."""
        if self.mask is None:
            return None, ()
        return classify(self.mask, length, boundary, shift, config.tile.queries, config.tile.tokens, self.device)

    def program(self, kernel: Any, config: tuning.LaunchConfig, **constants: Any) -> Program:
        return Program(kernel, self.device, constants, config.options)

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return self.query.new_empty(*shape, dtype=dtype or self.dtype)


def check_exact(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, causal: bool) -> None:
    """Raise ValueError unless queries and the tail fit each other."""
    batch, heads, count, dim = query.shape
    dtypes = {query.dtype, keys.dtype, values.dtype}
    if len(dtypes) != 1 or not dtypes <= {torch.bfloat16, torch.float16, torch.float32}:
        raise ValueError(
            "expected query, keys and values of one dtype, bfloat16, float16 or float32, "
            f"got {query.dtype}, {keys.dtype} and {values.dtype}"
        )
    if heads % keys.shape[1] or keys.shape[:3] != values.shape[:3] or keys.shape[::3] != (batch, dim):
        raise ValueError(
            "expected query [B, H_q, S, D], keys [B, H_kv, n, D] and values [B, H_kv, n, D_v], H_q a multiple of H_kv, "
            f"got {list(query.shape)}, {list(keys.shape)} and {list(values.shape)}"
        )
    if max(dim, values.shape[3]) > tuning.MAX_HEAD_DIM:
        raise ValueError(f"expected a head_dim of at most {tuning.MAX_HEAD_DIM}, got {dim} and {values.shape[3]}")
    if causal and keys.shape[2] < count:
        raise ValueError(
            f"expected the {count} tokens of the queries among the exact ones, got {keys.shape[2]} exact tokens; "
            "give a mask, or causal=False"
        )
    if any(x.stride(-1) != 1 for x in (query, keys, values)):
        raise ValueError("expected tensors whose last dimension is contiguous; call .contiguous()")


def check_packed(key: States | None, value: States | None, packed_length: int, dims: Dims, exact: torch.Tensor) -> None:
    """Raise ValueError unless there are so many packed tokens, as wide as the exact ones."""
    if key is None or value is None or (key.head_dim, value.head_dim) != dims or key.zero is not None:
        raise ValueError(
            f"expected packed keys (without a zero) and values of {packed_length} tokens, as wide as the exact ones, "
            f"{dims.key_dim} and {dims.value_dim}, got {[x and x.head_dim for x in (key, value)]}"
        )
    key.check(packed_length)
    value.check(packed_length)
    if any(tuple(x.packed.shape[:2]) != tuple(exact.shape[:2]) for x in (key, value)):
        raise ValueError(
            f"expected packed keys and values of {list(exact.shape[:2])} sequences and KV heads, as the exact ones, "
            f"got {[list(x.packed.shape[:2]) for x in (key, value)]}"
        )
