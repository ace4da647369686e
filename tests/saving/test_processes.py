"""Saved by some processes and loaded by others, with tensor parallelism's shares of KV heads (gloo, no model).

`python tests/saving/test_processes.py FOLDER` is what each process runs.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from architectures import config_for
from kernel_harness import ROOT

from tq_cache import TurboQuantCache

HEADS, TOKENS, DIM = 4, 200, 32


def config():
    made = config_for("llama")
    made.num_key_value_heads = HEADS
    return made


def states(seed: int, count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(2, HEADS, count, DIM, generator=generator) for _ in range(2)]


def run(folder: Path, what: str) -> None:
    """Save a cache, or load one and add tokens; prints the sum of what is read of this process's heads."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if world > 1:
        torch.distributed.init_process_group("gloo")
    own = slice(rank * HEADS // world, (rank + 1) * HEADS // world)
    if what == "save":
        cache = TurboQuantCache(config(), "tq4", residual_length=0)
        for layer in range(len(cache.layers)):
            cache.update(*(x[:, own] for x in states(layer, TOKENS)), layer)
        cache.save_pretrained(folder, max_shard_bytes=20_000)
    else:
        cache = TurboQuantCache.from_pretrained(folder, config(), max_cache_len=None if what == "load" else 512)
    for layer in range(len(cache.layers)):
        cache.update(*(x[:, own] for x in states(100 + layer, 70)), layer)
    sums = [layer.keys.double().sum(dim=(0, 2, 3)).tolist() for layer in cache.layers]
    print(json.dumps([rank, sums]))
    if world > 1:
        torch.distributed.destroy_process_group()


def start(folder: Path, what: str, world: int, port: int) -> list[list[float]]:
    """Sums of all heads, a list for each layer."""
    processes = []
    for rank in range(world):
        environment = os.environ | dict(RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1",
                                        MASTER_PORT=str(port), OMP_NUM_THREADS="1")  # fmt: skip
        environment["PYTHONPATH"] = os.pathsep.join(map(str, (ROOT, ROOT / "kernels", ROOT / "tests")))
        command = [sys.executable, __file__, str(folder), what]
        processes.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE))
    found = {}
    for process in processes:
        out, error = process.communicate(timeout=240)
        assert process.returncode == 0, error.decode()[-3000:]
        rank, sums = json.loads(out.splitlines()[-1])
        found[rank] = sums
    return [[x for rank in range(world) for x in found[rank][layer]] for layer in range(len(found[0]))]


@pytest.mark.slow
def test_any_number_of_processes_reads_what_any_wrote(tmp_path, free_ports):
    for world in (1, 2, 4):
        start(tmp_path / str(world), "save", world, next(free_ports))
    expected = start(tmp_path / "1", "load", 1, next(free_ports))
    for wrote, what, world in ((1, "load", 4), (2, "load", 1), (4, "load", 2), (4, "load", 4), (2, "preallocated", 2)):
        assert start(tmp_path / str(wrote), what, world, next(free_ports)) == expected, (wrote, what, world)


@pytest.fixture
def free_ports():
    import socket

    def ports():
        while True:
            with socket.socket() as found:
                found.bind(("127.0.0.1", 0))
                port = found.getsockname()[1]
            yield port

    return ports()


if __name__ == "__main__":
    run(Path(sys.argv[1]), sys.argv[2])
