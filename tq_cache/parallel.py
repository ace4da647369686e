"""Which of a model's KV heads this process holds.

Tensor parallelism gives attention a share of the heads and tells a cache nothing.  What transformers does (5.17 to
5.23, `distributed/`): projections of keys and values are cut evenly, in the order of ranks, and where there are further
dimensions (pipeline, FSDP) tensor parallelism is the innermost of the mesh, over the ranks of the default group:

    rank               0  1  2  3  4  5  6  7       a mesh (pp 2, tp 4), 8 KV heads
    first KV head      0  2  4  6  0  2  4  6       = rank % (total // held) * held

So the number of heads that an update brings says all that is needed; no mesh is asked for.
"""

from typing import Any

import torch


def rank_and_world() -> tuple[int, int]:
    """The rank of this process among all, and how many there are; 0 and 1 without torch.distributed."""
    dist = torch.distributed
    return (dist.get_rank(), dist.get_world_size()) if dist.is_available() and dist.is_initialized() else (0, 1)


def share_of_heads(total: int, held: int, what: str) -> slice:
    """Which of `total` KV heads are the `held` ones of this process: all of them, or its share by tensor parallelism.

    what: what there is one of per KV head, in the plural, for the error: "scales of keys"

    Raises ValueError where `held` heads cannot be a share of `total` among the processes there are.
    """
    rank, world = rank_and_world()
    if held == total:
        return slice(0, total)
    if held < 1 or total < 1 or total % held or world % (total // held):
        processes = "one process" if world == 1 else f"{world} processes"
        raise ValueError(
            f"expected {what} for the {held} KV heads of this process, or for all of the model, got {total}, of which "
            f"{held} cannot be a share with {processes}"
        )
    first = rank % (total // held) * held
    return slice(first, first + held)


def group_of_rows(weight: Any, rows: int) -> Any:
    """The process group among which the rows of a parameter are cut, of which this process multiplies by `rows`.

    transformers keeps what it has cut as a DTensor, which knows its mesh; None: the rows are all here.
    """
    mesh, placements = getattr(weight, "device_mesh", None), getattr(weight, "placements", ())
    if mesh is None or weight.shape[0] == rows:
        return None
    sizes = {dim: mesh.size(dim) for dim, placement in enumerate(placements) if placement.is_shard(0)}
    cut = [dim for dim, size in sizes.items() if size * rows == weight.shape[0]]
    return mesh.get_group(cut[-1]) if cut else None
