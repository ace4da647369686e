"""Writing a cache to a folder, by one process or by those that share its KV heads."""

from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from ..hf.room import newest_keys
from ..parallel import rank_and_world, share_of_heads
from ..planning.geometry import kv_heads
from .folder import Writer, new_save, write_header
from .identity import code_fingerprint, model_fields, preset_fields
from .layers import describe, has_heads
from .weights import weights_record

FORMAT = "tq_cache"
# Grows when what is in a folder comes to mean something else: names of tensors, the order of tokens, bits of a block.
LAYOUT = 1


def save(
    cache: Any,
    folder: Path,
    model: torch.nn.Module | None,
    input_ids: torch.Tensor | None,
    max_shard_bytes: int,
    progress: bool,
    written_by: str,
) -> None:
    """See `TurboQuantCache.save_pretrained`."""
    length = int(cache.get_seq_length())
    if not length:
        raise ValueError("expected a cache with tokens, got an empty one")
    batch = _check_tokens(cache)
    ids = None if input_ids is None else _checked_ids(input_ids, batch, length)
    heads = _heads(cache)
    shared = {index: own for index, own in heads.items() if own[2] > own[1] - own[0]}
    rank, gather = (rank_and_world()[0], _gather) if shared else (0, _alone)
    with new_save(folder) if rank == 0 else nullcontext() as name, Writer(folder, rank, max_shard_bytes) as writer:
        writer.save = name = gather(name)[0]
        layers = []
        for index, layer in tracked(enumerate(cache.layers), len(cache.layers), "saving", progress and rank == 0):
            plan = cache.plans[index]
            said, tensors = describe(layer, plan.kind, f"layer {index}")
            if "tokens" in said:
                said["tokens"]["heads"] = heads[index][2]
            layers.append(dict(kind=plan.kind, preset=plan.preset and preset_fields(plan.preset)) | said)
            for part, tensor in tensors.items():
                writer.add(f"layers.{index}.{part}", tensor)
        for role, scales in cache.scales.items():
            for index, scale in scales.given.items():
                writer.add(f"scales.{role}.{index}", scale)
        if ids is not None:
            writer.add("input_ids", ids)
        writer.flush()
        own = {index: (start, stop) for index, (start, stop, _) in shared.items()}
        tensors = _merged(gather((writer.entries, own)))
        if rank == 0:
            header = dict(
                format=FORMAT, layout=LAYOUT, written_by=written_by, length=length, options=cache.options,
                model=model_fields(cache.config), weights=weights_record(cache.model_config, model),
                codes=_codes(cache, layers), layers=layers, tensors=tensors, reads_bits=cache.caller.reads_bits,
            )  # fmt: skip
            write_header(folder, header, name)
        gather(None)  # until the header is there, and all see it


def _check_tokens(cache: Any) -> int:
    """How many sequences there are; raises ValueError unless layers hold equally many tokens."""
    held = {index: layer for index, layer in enumerate(cache.layers) if newest_keys(layer) is not None}
    lengths = {index: int(layer.get_seq_length()) for index, layer in held.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(
            f"expected as many tokens in every layer, got {sorted(set(lengths.values()))} (of layers "
            f"{[*lengths]}: {[*lengths.values()]}), as a forward that failed leaves them; use a new cache"
        )
    return next((newest_keys(layer).shape[0] for layer in held.values()), 1)  # type: ignore[union-attr]


def _checked_ids(input_ids: torch.Tensor, batch: int, length: int) -> torch.Tensor:
    ids = torch.as_tensor(input_ids)
    ids = ids[None] if ids.dim() == 1 else ids
    if tuple(ids.shape) != (batch, length) or ids.dtype.is_floating_point:
        raise ValueError(
            f"expected input_ids [{batch}, {length}], the tokens that the cache holds (the last one that generate() "
            f"returns is not among them), got {list(ids.shape)} in {ids.dtype}"
        )
    return ids.to(torch.int64)


def _heads(cache: Any) -> dict[int, tuple[int, int, int]]:
    """Of layers with keys and values: this process's first KV head, the one behind its last, how many there are."""
    totals = kv_heads(cache.config)
    found = {}
    for index, layer in enumerate(cache.layers):
        keys = newest_keys(layer)
        if keys is None:
            continue
        held = total = keys.shape[1]
        if rank_and_world()[1] > 1 and totals.get(index, 0) > held:
            total = totals[index]
        share = share_of_heads(total, held, "a cache")
        found[index] = (share.start, share.stop, total)
    return found


def _codes(cache: Any, layers: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Fingerprints of the codes that are used, by format and width."""
    found = {}
    for plan, said in zip(cache.plans, layers, strict=True):
        if plan.preset is not None and "widths" in said:
            for fmt, dim in zip((plan.preset.key, plan.preset.value), said["widths"].values(), strict=True):
                found[f"{fmt.name} {dim}"] = code_fingerprint(fmt, dim)
    return found


def _merged(all_entries: list[tuple[dict[str, dict[str, Any]], dict[int, tuple[int, int]]]]) -> dict[str, Any]:
    """What the header says of tensors, by what each process wrote, and the KV heads that it holds by layer."""
    merged: dict[str, dict[str, Any]] = {}
    for entries, shares in all_entries:
        for name, entry in entries.items():
            part = dict(file=entry["file"], heads=None, sha256=entry["sha256"])
            shape, share = list(entry["shape"]), None
            if name.startswith("layers."):
                _, index, rest = name.split(".", 2)
                share = shares.get(int(index)) if has_heads(rest) else None
            held = merged.setdefault(name, dict(dtype=entry["dtype"], shape=shape, parts=[]))
            if share is None:
                if held["parts"] and held["parts"][0]["sha256"] != part["sha256"]:
                    raise NotImplementedError(
                        f"expected {name} the same in every process, got different ones; a state that tensor "
                        "parallelism cuts cannot be saved"
                    )
                held["parts"] = held["parts"] or [part]
            elif share[0] not in [x["heads"][0] for x in held["parts"]]:  # the first of those that have these heads
                held["parts"].append(part | dict(heads=list(share)))
    for entry in merged.values():
        entry["parts"].sort(key=lambda x: x["heads"] or [0, 0])
        if entry["parts"][0]["heads"] is not None:
            entry["shape"][1] = entry["parts"][-1]["heads"][1]
    return merged


def _alone(item: Any) -> list[Any]:
    return [item]


def _gather(item: Any) -> list[Any]:
    """That of every process, which all call this."""
    items: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(items, item)
    return items


def tracked(items: Iterable[Any], total: int, title: str, shown: bool) -> Iterable[Any]:
    if not shown:
        return items
    from tqdm.auto import tqdm  # which transformers needs

    return tqdm(items, total=total, desc=title, unit="layer")
