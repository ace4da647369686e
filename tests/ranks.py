"""Several processes on one machine: on the CPU joined by gloo and forked, so that nothing is imported again, else
spawned with a GPU each."""

import os
import socket
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing
from architectures import build
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.distributed import DistributedConfig

TIMEOUT = 240


def run(function: Callable[..., Any], folder: Path, *args: Any, world: int = 2) -> list[Any]:
    """What `function(*args)` gives in each of `world` processes, by rank; raises what one of them raised."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context: Any = torch.multiprocessing.get_context("spawn" if torch.cuda.is_available() else "fork")
    processes = [
        context.Process(target=_one, args=(rank, world, port, folder / f"rank{rank}.pt", function, args), daemon=True)
        for rank in range(world)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(TIMEOUT)
        if process.is_alive():
            process.kill()
    results = [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(world)]
    for result in results:
        if isinstance(result, str):
            raise AssertionError(result)
    return [result[0] for result in results]


def _one(rank: int, world: int, port: int, file: Path, function: Callable[..., Any], args: Any) -> None:
    torch.set_num_threads(1)
    names = dict(RANK=rank, WORLD_SIZE=world, LOCAL_RANK=rank, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    os.environ.update({name: str(value) for name, value in names.items()})
    torch.save(f"rank {rank} did not end", file)
    try:
        if not torch.cuda.is_available():  # else by transformers, with a device of its own
            torch.distributed.init_process_group("gloo")
        torch.save((function(*args),), file)
    except BaseException:
        torch.save(traceback.format_exc(), file)
    os._exit(0)  # the peer may be gone: nothing is waited for


def saved(model_type: str, folder: Path) -> Path:
    """A tiny random model as a checkpoint."""
    path = folder / model_type
    if not path.exists():
        build(model_type).save_pretrained(path)
    return path


def load(path: Path, attention: str, **config: Any) -> PreTrainedModel:
    """The checkpoint, whole, or distributed as a `DistributedConfig` of these fields says."""
    distributed = {"distributed_config": DistributedConfig(**config)} if config else {}
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation=attention, **distributed)
    model.generation_config.eos_token_id = None
    return model.eval()
