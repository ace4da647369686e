"""Decode attention over a packed cache: up to 16 query tokens per sequence, split along the cached tokens.

Two launches.  The first attends: a program takes one split of the packed tokens (`decode_packed`) or of those still in
the model's dtype (`decode_exact`) of one sequence and KV head.  The second (`decode_merge`) undoes rotation and centre
of the values in the sum of the packed splits, and joins it with the exact ones.  Where the rotation of keys is no
Hadamard matrix, one more launch rotates the query before.

Query columns of a KV head are head after head, `QUERIES` of each, in tiles of `COLUMNS`.  Scores are in base 2.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..attention.scores import FULL_MASK, LOG2E, NO_MASK, ROW_MASK
from ..bits.layout import BLOCK_TOKENS
from ..device import Device, describe
from ..launch import Launch, Program, aligned, signature
from ..states import States, no_layout
from ..tuning import EXACT_BESIDE, choose, choose_splits, exact_steps, exact_warps
from .exact import EXACT_TILE, attend_exact, decode_exact_kernel
from .merge import merge_launch, merge_program
from .packed import attend_packed
from .query import by_matrix, rotate_query_kernel

MAX_QUERIES = 16
_LOG2E = LOG2E.value
MAX_EXACT_SPLITS = 8
QUERY_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
DTYPES = {torch.float8_e4m3fn: tl.float8e4nv, torch.float16: tl.float16, torch.float32: tl.float32}


@triton.jit(do_not_specialize=["splits", "tokens", "blocks", "length"])
def decode_kernel(
    query, turned, space, key, value, tail, sinks, mask, lengths, total, slots, work, splits, tokens, blocks, length,
    sizes, scales, strides,
    DIMS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, GROUP: tl.constexpr, QUERIES: tl.constexpr,
    FLAGS: tl.constexpr, COLUMNS: tl.constexpr, COMPUTE: tl.constexpr, PATH: tl.constexpr, LAUNCH: tl.constexpr,
):  # fmt: skip
    """One program = one split of the tokens of one sequence and KV head, for a tile of its query columns.

    The first `splits` programs of a column tile attend to the `tokens` packed ones in `blocks`, the others to the tail
    of so much `length`, or the sinks.  turned: the query already rotated, see `by_matrix`, or None; space = (rotation,
    smooth, center) of the keys, key = (packed, scale), value = (packed, scale[, zero]), tail = (keys, values), sinks
    likewise or None, sizes = (sinks, residual length), scales = (scaling, soft cap), strides = (query, key and its
    scale, value and its scale, keys, values, sink keys, sink values, mask), KEY and VALUE = (bits, table), FLAGS =
    (SOFTCAP, CAUSAL, MASK, CAUSAL for packed tokens too), PATH = (PTX, PRECISION, PDL), LAUNCH = (tokens of a tile,
    warps, loads need a mask, stages, exact tokens of a step).  With `total`, int64 on the device, it says how many
    tokens there are; the tail is then a ring of `slots`.

    Writes to `work`, float32, the output of each split [B * H_kv, splits, columns, D_v], and behind those, likewise,
    the log-sum-exps.
    """
    PRECISION: tl.constexpr = PATH[1]
    if tl.program_id(2) < splits:
        attend_packed(
            query, turned, space, key, value, mask, lengths, total, work, splits, tokens, blocks, length, sizes, scales,
            strides, DIMS, KEY, VALUE, GROUP, QUERIES, FLAGS, COLUMNS, COMPUTE, PATH[0], PRECISION, LAUNCH,
        )  # fmt: skip
    else:
        attend_exact(
            query, tail, sinks, mask, total, slots, work, splits, length, tokens, sizes, scales, strides, DIMS, GROUP,
            QUERIES, FLAGS, COLUMNS, PRECISION, LAUNCH[4], 1,
        )  # fmt: skip
    if PATH[2]:  # not before: programs of the next launch would take the places of some of this one
        tl.extra.cuda.gdc_launch_dependents()


class Path(NamedTuple):
    """How a device computes: the type that goes to the dots, inline assembly or not, and how float32 is multiplied.

    pdl: programmatic dependent launch.  The programs of the merge start before the launch before it has ended, and
         wait for its end (`gdc_wait`) where they first read what it has written.
    """

    compute: torch.dtype
    ptx: bool = False
    precision: str = "ieee"
    pdl: bool = False


@lru_cache
def choose_path(dtype: torch.dtype, capability: tuple[int, int] | None) -> Path:
    """The path for queries of `dtype` on an NVIDIA GPU of that compute capability (None: any other device).

    fp8 tensor cores where e4m3 is native, float16 else, float32 for float32 queries.  The inline assembly decodes four
    neighbouring bytes, which only the operands of fp8 dots keep together.
    """
    capability = capability or (0, 0)
    precision, pdl = "tf32x3" if capability >= (8, 0) else "ieee", capability >= (9, 0)
    if dtype == torch.float32:
        return Path(torch.float32, False, precision, pdl)
    native = capability >= (8, 9)
    return Path(torch.float8_e4m3fn if native else torch.float16, native, precision, pdl)


class Problem(NamedTuple):
    """What one call of `decode` is given (see there), and on which device."""

    device: Device
    query: torch.Tensor
    key: States | None
    value: States | None
    keys: torch.Tensor
    values: torch.Tensor
    packed_length: int
    scaling: float
    sinks: tuple[torch.Tensor, torch.Tensor] | None = None
    mask: torch.Tensor | None = None
    softcap: float | None = None
    s_aux: torch.Tensor | None = None
    causal: bool = True
    lengths: torch.Tensor | None = None
    total: torch.Tensor | None = None
    residual_length: int = 0
    path: Path | None = None
    splits: int | None = None


class _Plan(NamedTuple):
    """What is worked out once for shapes, strides, formats and flags."""

    rotate: Program | None  # of the query, where that takes a launch of its own
    attend: Program
    merge: Program
    rotate_grid: tuple[int, int, int]
    grid: tuple[int, int, int]
    shape: tuple[int, int, int, int]  # of the output
    blocks: int
    tail: int  # tokens
    splits: int  # of packed tokens
    all_splits: int
    work: int  # elements
    sizes: tuple[int, int]  # of sinks, residual length
    strides: tuple[tuple[int, ...], ...]


def decode(
    query: torch.Tensor,
    key: States | None,
    value: States | None,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    packed_length: int,
    scaling: float,
    sinks: tuple[torch.Tensor, torch.Tensor] | None = None,
    mask: torch.Tensor | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    causal: bool = True,
    lengths: torch.Tensor | None = None,
    total: torch.Tensor | None = None,
    residual_length: int = 0,
    path: Path | None = None,
    splits: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of up to 16 query tokens per sequence to sinks, packed tokens and a tail, in this order.

    query:         [B, H_q, S, D], bfloat16, float16 or float32
    key, value:    packed states, of which the first `packed_length` tokens count, or None; every number in their
                   blocks, also behind the last token, must be finite (`torch.zeros` is)
    keys, values:  the tail, [B, H_kv, n, D] and [B, H_kv, n, D_v], n >= 0, in the query's dtype; `sinks` likewise
    mask:          [1 or B, 1 or H_q, S, all tokens or more], bool (True takes part) or float (added), or None: causal,
                   the last query seeing every token, or everything if not `causal`
    softcap:       scores become softcap * tanh(scores / softcap), before the mask
    s_aux:         [1 or B, H_q, 1 or S], one more logit per query that takes weight and gives nothing
    lengths:       int32 [B], packed tokens of each sequence that count, if fewer than `packed_length`
    total:         int64 [] on the device, tokens in all: of them all but at most `residual_length` are packed, in whole
                   blocks, and keys and values are a ring (`tq_cache/static_parts.py`).  Takes one query, no sinks;
                   `packed_length` is then the most that can be packed
    path, splits:  for tests: another way to compute than the device's, a number of splits

    Returns the output [B, H_q, S, D_v] in the query's dtype, and the natural log-sum-exp of the scores, float32
    [B, H_q, S]; a query that may see no token gets zeros and -inf.  Raises ValueError on what does not fit together.
    """
    problem = Problem(
        describe(query.device), query, key, value, keys, values, packed_length, scaling, sinks, mask, softcap, s_aux,
        causal, lengths, total, residual_length, path, splits,
    )  # fmt: skip
    launches, out, lse = prepare(problem)
    for launch in launches:
        launch.run()
    return out, lse


def prepare(problem: Problem) -> tuple[list[Launch], torch.Tensor, torch.Tensor]:
    """The launches of `decode`, and what it returns once they have run; raises as it does."""
    device, query, key, value, keys, values, packed_length, scaling, sinks, mask, softcap, s_aux = problem[:12]
    sinks = sinks if sinks is not None and sinks[0].shape[2] else None
    mask, mask_kind = _describe(mask, query)
    s_aux = None if s_aux is None else s_aux.expand(*query.shape[:3])
    lengths, total = problem.lengths, problem.total
    present = (None, None) if lengths is None and total is None else aligned(lengths, total)
    plan = _plan(
        device, problem.path, signature(query), signature(keys), signature(values),
        None if sinks is None else tuple(map(signature, sinks)), None if mask is None else signature(mask), mask_kind,
        None if s_aux is None else signature(s_aux), key and key.layout, value and value.layout, packed_length,
        problem.residual_length, softcap is not None, problem.causal, present, problem.splits,
    )  # fmt: skip
    work = query.new_empty(plan.work, dtype=torch.float32)
    slots, tail = None if total is None else plan.tail, (keys, values)
    scales = scaling * _LOG2E, float(softcap or 0)
    launches, arguments = [], None
    if plan.splits:
        assert key is not None and value is not None  # checked by the plan
        turned, space = None, (key.rotation, key.smooth, key.center)
        if plan.rotate is not None:
            turned = torch.empty(query.shape, dtype=torch.float32, device=query.device)
            launches.append(Launch(plan.rotate, plan.rotate_grid, (query, space, turned, query.stride()[:3])))
        arguments = (
            query, turned, space, (key.packed, *key.factors), (value.packed, *value.factors), tail, sinks, mask,
            lengths, total, slots, work, plan.splits, packed_length, plan.blocks, plan.tail, plan.sizes,
            scales, plan.strides,
        )  # fmt: skip
    else:
        arguments = (query, tail, sinks, mask, total, slots, work, plan.tail, plan.sizes, scales, plan.strides)
    launches.append(Launch(plan.attend, plan.grid, arguments))
    merge, out, lse = merge_launch(plan.merge, work, query, plan.shape, value, plan.splits, plan.all_splits, s_aux)
    launches.append(merge)
    return launches, out, lse


def _describe(mask, query):
    """The mask as kernels take it, [B, H_q, S, all tokens or more], and what kind it is."""
    if mask is None:
        return None, NO_MASK.value
    if mask.dim() != 4:
        raise ValueError(f"expected a mask [B, H, {query.shape[2]}, all tokens or more], got {list(mask.shape)}")
    kind = ROW_MASK if mask.shape[1] == 1 and query.shape[2] == 1 else FULL_MASK
    mask = mask.view(torch.uint8) if mask.dtype == torch.bool else mask
    return mask.expand(*query.shape[:2], -1, -1), kind.value


@lru_cache(maxsize=256)
def _plan(
    device, path, query, keys, values, sinks, mask, mask_kind, s_aux, key, value, packed_length, residual_length,
    soft, causal, present, splits,
):  # fmt: skip
    """The plan for tensors of these signatures, packed states of these layouts, and flags; raises as `decode` does.

    soft: scores are capped; present: whether `lengths` and `total` are aligned, None where there is none.  With every
    step a length is another, and the plan made anew, once for all layers that are alike; what is compiled stays.
    """
    key = key or no_layout(*keys.shape[:2], keys.shape[3])
    value = value or no_layout(*values.shape[:2], values.shape[3])
    static = present[1] is not None
    _check(query, keys, values, key, value, packed_length, mask, static)
    batch, heads, queries, dim = query.shape
    kv_heads, tail = keys.shape[1:3]
    value_dim = values.shape[3]
    path = path or choose_path(query.dtype, device.capability if device.is_nvidia else None)
    columns = heads // kv_heads * queries
    tile = _columns(columns, path)
    config = choose(
        value.coding.bits, tile, value_dim, (key.shape[3] + value.shape[3]) // BLOCK_TOKENS.value,
        device.shared_memory, path.compute == torch.float8_e4m3fn,
    )  # fmt: skip
    splits, tail_splits = _count_splits(device, path, config, batch * kv_heads, columns, packed_length, tail, splits)
    all_splits = splits + tail_splits + (sinks is not None)
    flags = soft, causal and mask is None and queries > 1, mask_kind
    shared = dict(GROUP=heads // kv_heads, QUERIES=queries)
    attend = dict(DIMS=(dim, value_dim), COLUMNS=tile, FLAGS=flags) | shared
    rotate = None
    if splits:
        if by_matrix(key.coding.rotated, dim):
            rotate = Program(rotate_query_kernel, device, dict(DIM=dim, PRECISION=path.precision) | shared, {})
        program = _packed_program(device, query.dtype, attend, key, value, path, config, tail < queries - 1)
    else:
        program = _exact_program(device, query.dtype, attend, path, tail > MAX_EXACT_SPLITS * EXACT_TILE.value)
    exact = (*(x.strides[:3] for x in (keys, values)), *(x.strides[:3] for x in sinks or (keys, values)))
    places = (key.places, value.places) if splits else ((), ())
    return _Plan(
        rotate, program, merge_program(device, value_dim, heads // kv_heads, queries, all_splits, path.pdl),
        (triton.cdiv(columns, 16) * triton.cdiv(dim, 64), kv_heads, batch),
        (kv_heads * triton.cdiv(columns, tile), batch, all_splits),  # exact tokens last: see `choose_splits`
        (batch, heads, queries, value_dim), key.blocks, tail, splits, all_splits,
        batch * kv_heads * all_splits * columns * (value_dim + 1),
        (0 if sinks is None else sinks[0].shape[2], residual_length),
        (query.strides[:3], *places, *exact, (0, 0, 0, 0) if mask is None else mask.strides),
    )  # fmt: skip


def _packed_program(device, dtype, attend, key, value, path, config, causal_packed):
    """`decode_kernel` with the constants `attend`; causal_packed: not every query may see all packed tokens."""
    flags, small = attend["FLAGS"], key.blocks * BLOCK_TOKENS.value < config.tile
    step, _ = exact_steps(attend["DIMS"], dtype.itemsize, device.shared_memory)
    constants = attend | dict(
        KEY=key.coding.code, VALUE=value.coding.code, FLAGS=(*flags, flags[1] and causal_packed),
        COMPUTE=DTYPES[path.compute], PATH=(path.ptx, path.precision, path.pdl),
        LAUNCH=(config.tile, config.warps, small, config.stages, min(step, EXACT_BESIDE)),
    )  # fmt: skip
    options = dict(num_warps=config.warps, num_stages=config.stages)
    if config.registers and path.ptx:
        options["maxnreg"] = config.registers
    return Program(decode_kernel, device, constants, options)


def _exact_program(device, dtype, attend, path, long):
    """`decode_exact_kernel` with the constants `attend`; long: a tail of many tiles."""
    step, stages = exact_steps(attend["DIMS"], dtype.itemsize, device.shared_memory)
    stages = stages if long and dtype != torch.float32 else 1
    constants = attend | dict(PRECISION=path.precision, PDL=path.pdl, LAUNCH=(step, stages))
    options = dict(num_warps=exact_warps(attend["DIMS"], dtype.itemsize), num_stages=stages)
    return Program(decode_exact_kernel, device, constants, options)


def _count_splits(device, path, config, pairs, columns, packed, tail, splits):
    """Splits of the packed tokens and of the tail."""
    programs, available = pairs * -(-columns // _columns(columns, path)), device.multiprocessors
    if not packed:
        splits = 0
    elif splits is None:
        splits = choose_splits(config, programs, packed, available)
    most = MAX_EXACT_SPLITS if packed else max(MAX_EXACT_SPLITS, min(8 * available // programs, 128))
    return splits, min(-(-tail // EXACT_TILE.value), most)


def _columns(columns, path):
    """Query columns of a tile: 4, 8 or 16 with two terms each, else 16."""
    return max(4, min(triton.next_power_of_2(columns), 16)) if path.compute == torch.float8_e4m3fn else 16


def _check(query, keys, values, key, value, packed_length, mask, static):
    """Raise ValueError, with what was given, on what the kernels would read wrongly."""
    key.check(packed_length)
    value.check(packed_length)
    batch, heads, queries, dim = query.shape
    kv_heads, tail = keys.shape[1:3]
    if not 0 < queries <= MAX_QUERIES:
        raise ValueError(f"expected 1 to {MAX_QUERIES} queries, got {queries}; prefill takes more")
    if heads % kv_heads or keys.shape != (batch, kv_heads, tail, dim) or keys.shape[:3] != values.shape[:3]:
        raise ValueError(
            f"expected keys [{batch}, a divisor of {heads}, n, {dim}] and values that differ at most in head_dim, "
            f"got {list(keys.shape)} and {list(values.shape)}"
        )
    held = (*key.shape[:2], key.head_dim, *value.shape[:2], value.head_dim)
    if held != (batch, kv_heads, dim, batch, kv_heads, values.shape[3]):
        raise ValueError(
            f"expected packed states of {batch} sequences, {kv_heads} KV heads, head_dim {dim} and {values.shape[3]}, "
            f"got {list(held[:3])} and {list(held[3:])}"
        )
    dtypes = query.dtype, keys.dtype, values.dtype
    if len(set(dtypes)) > 1 or query.dtype not in QUERY_DTYPES:
        raise ValueError(f"expected one of {QUERY_DTYPES} throughout, got {', '.join(map(str, dtypes))}")
    if (query.strides[3], keys.strides[3], values.strides[3]) != (1, 1, 1):
        raise ValueError("expected query, keys and values whose last dimension is contiguous")
    if static and (queries > 1 or tail % BLOCK_TOKENS.value):
        raise ValueError(f"expected one query and a ring of whole blocks with total, got {queries} and {tail} slots")
    total = 1 if static else packed_length + tail
    if mask is not None and (mask.shape[2] != queries or mask.shape[3] < total):
        raise ValueError(f"expected a mask [B, H, {queries}, {total} or more], got {list(mask.shape)}")
