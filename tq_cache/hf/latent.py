"""What a layer of latents (MLA) hands to a model: records of the steps by which the model expands them.

A model that caches latents expands them to keys and values of every head before it calls attention: `expand_kv`, the
same code in every such model of transformers.  Its steps are recorded, and no tensor is made:

    kv_b_proj(latents)    F.linear    Projected   [B, 1, T, H * (n + v)]
    .view                             PerToken    [B, T, H, n + v]
    .transpose(1, 2)                  PerHead     [B, H, T, n + v]
    torch.split                       Part, Part  [B, H, T, n], [B, H, T, v]
    k_rot.expand                      Shared      [B, H, T, d]
    .new_empty                        Joined      [B, H, T, n + d], written in two Slots

Attention finds the latents, the rotary keys and the weight behind them (`absorbed.absorption`).  Whatever else is done
with a record is done with the tensor that it stands for, which is then made, and said (`Update.expand`).  It may be
written to: nothing is recorded of it any more, and attention does not look behind it.

Records are no tensors but plain objects: torch.compile traces them away, and an autograd function that hands on its
argument (tensor parallelism) hands on the record.
"""

import warnings
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Literal, Protocol

import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_map

from ..formats.states import KVView
from .caller import Caller
from .graph_ops import Flat
from .handles import materialize

LatentRole = Literal["key", "rotary"]
OTHER_STEPS = (
    "kv_b_proj is not a plain linear map here (an active adapter, float8 or bitsandbytes weights), or its output is "
    "used otherwise; merge adapters, tq_cache.densify_kv_b_proj(model) makes float8 weights dense"
)
OTHER_ATTENTION = "attention other than 'turboquant' takes keys and values, or the model changes them before"


class ReportsPath(Protocol):
    """A cache layer; `path` says how its tokens were read last, "absorbed" or "expanded: why", `caller` by whom."""

    path: str
    caller: Caller


class Update:
    """What one update of a layer gave: a view of all tokens, or, of a step in preallocated memory, the states.

    like: a latent and a rotary key, [B, 1, n, rank] and [B, 1, n, d]; length: tokens that the records are said to have
    """

    def __init__(
        self,
        layer: ReportsPath,
        like: tuple[torch.Tensor, torch.Tensor],
        length: int,
        view: KVView | None = None,
        flat: Flat | None = None,
    ) -> None:
        self.layer, self.like, self.length, self.view, self.flat = layer, like, length, view, flat
        self.said = False

    def records(self) -> "tuple[Latents, Latents]":
        """In place of latents and rotary keys."""
        return Latents(self, "key"), Latents(self, "rotary")

    def dequantize(self, role: LatentRole) -> torch.Tensor:
        """All latents, or rotary keys, in the model's dtype; in preallocated memory with zeros behind the last."""
        own: Literal["key", "value"] = "key" if role == "key" else "value"
        if self.view is None:
            assert self.flat is not None
            buffers, calibration, num_tokens, spec = self.flat
            return torch.ops.tq_cache.materialize(buffers, calibration, num_tokens, own, spec)
        with torch.autocast(self.like[0].device.type, enabled=False):  # else a rotation would be in 16 bits
            return materialize(self.view, own)

    def expand(self, why: str) -> None:
        """The model gets tensors, all of them at every step: say why, once."""
        if self.said:
            return
        self.said, self.layer.path = True, f"expanded: {why}"
        if self.view is not None and self.view.observe is not None:
            self.view.observe(None, None)  # whoever asks for tensors keeps the queries to itself
        if torch.compiler.is_compiling():
            return
        if why is OTHER_ATTENTION:
            self.layer.caller.seen = False
        if self.layer.caller.reads_bits:  # else nobody expects it
            _warn(why)


@lru_cache(maxsize=64)
def _warn(why: str) -> None:
    warnings.warn(f"latents are dequantised and expanded to every head at every step: {why}", stacklevel=2)


class Record:
    """Stands for a tensor of `shape` that is made only if something else than attention asks for it."""

    shape: torch.Size
    update: Update
    _made: torch.Tensor | None = None

    def make(self) -> torch.Tensor:
        raise NotImplementedError

    def tensor(self, why: str = OTHER_STEPS) -> torch.Tensor:
        """The tensor, made once."""
        if self._made is None:
            self.update.expand(why)
            self._made = self.make()
        return self._made

    @property
    def dtype(self) -> torch.dtype:
        return self.update.like[0].dtype

    @property
    def device(self) -> torch.device:
        return self.update.like[0].device

    @property
    def requires_grad(self) -> bool:
        return any(x.requires_grad for x in self.update.like)

    def dim(self) -> int:  # tensor parallelism asks what kv_b_proj gave
        return len(self.shape)

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Itself where that changes nothing: hooks of accelerate, and adapters, ask for what is there."""
        if len(args) == 1 and set(kwargs) <= {"non_blocking"}:
            target = args[0]
            if isinstance(target, torch.dtype):
                there = target == self.dtype
            else:
                there = isinstance(target, (str, int, torch.device)) and torch.device(target) == self.device
            if there:
                return self
        return self.tensor().to(*args, **kwargs)

    def linear(self, weight: Any, bias: Any = None) -> Any:
        return F.linear(self.tensor(), weight, bias)

    def split(self, sizes: Any, dim: int = 0) -> Any:
        return torch.split(self.tensor(), sizes, dim)

    def __getattr__(self, name: str) -> Any:
        """Everything else is the tensor's."""
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.tensor(), name)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if args and isinstance(args[0], Record):
            if function is F.linear:
                return args[0].linear(*args[1:], **kwargs)
            if function is torch.split:
                return args[0].split(*args[1:], **kwargs)
        args, kwargs = tree_map(plain_record, (args, kwargs))
        return function(*args, **kwargs)


def plain_record(x: Any) -> Any:
    """`x`, as a tensor if it is a record."""
    return x.tensor() if isinstance(x, Record) else x


def _operator(name: str) -> Callable[..., Any]:
    def apply(self: Record, *args: Any) -> Any:
        return getattr(self.tensor(), name)(*map(plain_record, args))

    return apply


# Python looks operators up on the class, not by `__getattr__`.
for _name in "add radd sub rsub mul rmul truediv rtruediv matmul rmatmul neg getitem setitem iadd imul len".split():
    setattr(Record, f"__{_name}__", _operator(f"__{_name}__"))


class Latents(Record):
    """All latents of a layer (role "key"), [B, 1, T, rank], or its rotary keys, [B, 1, T, d]."""

    def __init__(self, update: Update, role: LatentRole) -> None:
        self.update, self.role = update, role
        like = update.like[0 if role == "key" else 1]
        self.shape = torch.Size((like.shape[0], like.shape[1], update.length, like.shape[3]))

    def make(self) -> torch.Tensor:
        return self.update.dequantize(self.role)

    def linear(self, weight: Any, bias: Any = None) -> Any:
        why = self._why_not(weight, bias)
        return Projected(self, weight) if why is None else F.linear(self.tensor(why), weight, bias)

    def _why_not(self, weight: Any, bias: Any) -> str | None:
        """Why this linear map cannot be absorbed, and what to do; None if it can."""
        if self.role != "key" or self.shape[1] != 1 or self._made is not None:
            return OTHER_STEPS
        if bias is not None:
            return "kv_b_proj has a bias"
        if type(weight) not in (torch.Tensor, torch.nn.Parameter) or weight.dim() != 2:
            return f"the weight of kv_b_proj is a {type(weight).__name__}, no plain matrix; load it dense"
        if weight.dtype != self.dtype or weight.device != self.device:
            return (
                f"the weight of kv_b_proj is {weight.dtype} on {weight.device}, latents are {self.dtype} on "
                f"{self.device}; load the model in one dtype, without autocast"
            )
        if torch.is_autocast_enabled(self.device.type):
            return "autocast is on; load the model in 16 bits instead"
        return None if weight.shape[1] == self.shape[3] else OTHER_STEPS

    def expand(self, *sizes: Any) -> Any:
        wanted = tuple(sizes[0]) if len(sizes) == 1 else sizes
        batch, _, tokens, dim = self.shape
        if self.role == "rotary" and len(wanted) == 4 and wanted[1] > 0 and self._made is None:
            if all(size in (-1, own) for size, own in zip(wanted[::2] + wanted[3:], (batch, tokens, dim), strict=True)):
                return Shared(self, wanted[1])
        return self.tensor().expand(*sizes)


class Projected(Record):
    """Latents times the weight [H * (n + v), rank] of kv_b_proj: [B, 1, T, H * (n + v)]."""

    def __init__(self, latents: Latents, weight: torch.Tensor) -> None:
        self.update, self.latents, self.weight = latents.update, latents, weight
        self.shape = torch.Size((*latents.shape[:3], weight.shape[0]))

    def make(self) -> torch.Tensor:
        return F.linear(self.latents.tensor(), self.weight)

    def view(self, *sizes: Any) -> Any:
        wanted = tuple(sizes[0]) if len(sizes) == 1 and not isinstance(sizes[0], int) else sizes
        batch, _, tokens, rows = self.shape
        if len(wanted) == 4 and wanted[:2] == (batch, tokens) and wanted[3] > 0 and rows % wanted[3] == 0:
            if wanted[2] in (-1, rows // wanted[3]) and self._made is None:
                return PerToken(self, wanted[3])
        return self.tensor().view(*sizes)


class PerToken(Record):
    """[B, T, H, n + v]"""

    def __init__(self, projected: Projected, width: int) -> None:
        self.update, self.projected = projected.update, projected
        batch, _, tokens, rows = projected.shape
        self.shape = torch.Size((batch, tokens, rows // width, width))

    def make(self) -> torch.Tensor:
        return self.projected.tensor().view(self.shape)

    def transpose(self, first: int, second: int) -> Any:
        recorded = (first, second) == (1, 2) and self._made is None
        return PerHead(self) if recorded else self.tensor().transpose(first, second)


class PerHead(Record):
    """[B, H, T, n + v]"""

    def __init__(self, rows: PerToken) -> None:
        self.update, self.rows = rows.update, rows
        batch, tokens, heads, width = rows.shape
        self.shape = torch.Size((batch, heads, tokens, width))

    def make(self) -> torch.Tensor:
        return self.rows.tensor().transpose(1, 2)

    def split(self, sizes: Any, dim: int = 0) -> Any:
        in_two = isinstance(sizes, (list, tuple)) and len(sizes) == 2 and sum(sizes) == self.shape[3]
        if dim in (-1, 3) and in_two and self._made is None:
            return Part(self, 0, sizes[0]), Part(self, sizes[0], self.shape[3])
        return torch.split(self.tensor(), sizes, dim)

    def new_empty(self, *size: Any, **kwargs: Any) -> Any:
        wanted = tuple(size[0]) if len(size) == 1 and not isinstance(size[0], int) else size
        if not kwargs and wanted[:3] == tuple(self.shape[:3]) and len(wanted) == 4:
            return Joined(self, wanted[3])
        options: dict[str, Any] = {"dtype": self.dtype, "device": self.device} | kwargs
        return torch.empty(wanted, **options)


class Part(Record):
    """Channels start .. end of every head, [B, H, T, end - start]."""

    def __init__(self, whole: PerHead, start: int, end: int) -> None:
        self.update, self.whole, self.start, self.end = whole.update, whole, start, end
        self.shape = torch.Size((*whole.shape[:3], end - start))

    def make(self) -> torch.Tensor:
        return self.whole.tensor()[..., self.start : self.end]


class Shared(Record):
    """Rotary keys, the same for every head, [B, H, T, d]."""

    def __init__(self, rotary: Latents, heads: int) -> None:
        self.update, self.rotary = rotary.update, rotary
        self.shape = torch.Size((rotary.shape[0], heads, *rotary.shape[2:]))

    def make(self) -> torch.Tensor:
        return self.rotary.tensor().expand(self.shape)


class Joined(Record):
    """Keys [B, H, T, n + d], into which `slots` were copied."""

    def __init__(self, like: PerHead, width: int) -> None:
        self.update = like.update
        self.shape = torch.Size((*like.shape[:3], width))
        self.slots: list[tuple[int, int, Part | Shared]] = []

    def tensor(self, why: str = OTHER_STEPS) -> torch.Tensor:
        return Record.tensor(self, OTHER_ATTENTION if len(self.slots) == 2 else why)  # both: attention's turn

    def make(self) -> torch.Tensor:
        x = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        for start, end, part in self.slots:
            x[..., start:end] = part.tensor()
        return x

    def __getitem__(self, index: Any) -> Any:
        if self._made is None and isinstance(index, tuple) and len(index) == 2 and index[0] is Ellipsis:
            if isinstance(index[1], slice) and index[1].step is None:
                start, end = index[1].start, index[1].stop  # Dynamo of torch 2.11 does not know `slice.indices`
                start, end = 0 if start is None else start, self.shape[3] if end is None else end
                if 0 <= start <= end <= self.shape[3]:
                    return Slot(self, start, end)
        return self.tensor()[index]


class Slot(Record):
    """Channels start .. end of keys, to be copied into."""

    def __init__(self, joined: Joined, start: int, end: int) -> None:
        self.update, self.joined, self.start, self.end = joined.update, joined, start, end
        self.shape = torch.Size((*joined.shape[:3], end - start))

    def make(self) -> torch.Tensor:
        return self.joined.tensor()[..., self.start : self.end]

    def copy_(self, part: Any, non_blocking: bool = False) -> Any:
        if self.joined._made is None and isinstance(part, (Part, Shared)) and part.shape == self.shape:
            self.joined.slots.append((self.start, self.end, part))
            return self
        return self.tensor().copy_(plain_record(part), non_blocking)
