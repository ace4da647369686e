"""What the launchers ask about a device, each once."""

from functools import lru_cache

import torch


def is_nvidia(device: torch.device) -> bool:
    return device.type == "cuda" and torch.version.hip is None


@lru_cache
def capability(device: torch.device) -> tuple[int, int]:
    """Compute capability, as torch counts it on AMD GPUs too; (0, 0) of what is no GPU."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


@lru_cache
def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a GPU, 1 of anything else."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@lru_cache
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory of a multiprocessor of a GPU, more than enough of anything else."""
    if device.type != "cuda":
        return 1 << 30
    return getattr(torch.cuda.get_device_properties(device), "shared_memory_per_multiprocessor", 1 << 16)
