"""What the launchers ask about a device, as one value: a test may describe a GPU that is not there."""

from functools import lru_cache
from typing import NamedTuple

import torch
import triton


class Device(NamedTuple):
    """A device.

    backend:         "cuda" (NVIDIA), "hip" (AMD), or "interpreter": no GPU
    arch:            the architecture, as Triton calls it: 90, "gfx942"; 0 of what is no GPU
    multiprocessors: 1 of what is no GPU
    shared_memory:   bytes of a multiprocessor; more than enough of what is no GPU
    program_memory:  bytes of shared memory that one program may have
    ordinal:         which of the machine's GPUs: what is compiled belongs to one
    """

    backend: str = "interpreter"
    arch: int | str = 0
    multiprocessors: int = 1
    shared_memory: int = 1 << 30
    program_memory: int = 0
    ordinal: int | None = None

    @property
    def is_nvidia(self) -> bool:
        return self.backend == "cuda"

    @property
    def starts_dependents(self) -> bool:
        """Whether programs of a launch can start before the launch before it ends (programmatic dependent launch)."""
        return self.is_nvidia and self.capability >= (9, 0)

    @property
    def capability(self) -> tuple[int, int]:
        """Compute capability, as torch counts it on AMD GPUs too (gfx942 is 9.4); (0, 0) of what is no GPU."""
        if isinstance(self.arch, int):
            return divmod(self.arch, 10)
        return int(self.arch[3:-2]), int(self.arch[-2], 16)


NO_GPU = Device()


@lru_cache(maxsize=64)
def describe(device: torch.device) -> Device:
    """What a device is.  Under TRITON_INTERPRET=1 none is a GPU."""
    if device.type != "cuda" or triton.knobs.runtime.interpret:
        return NO_GPU
    found = torch.cuda.get_device_properties(device)
    backend: str = "cuda"
    arch: int | str = 10 * found.major + found.minor
    if torch.version.hip is not None:
        backend, arch = "hip", found.gcnArchName.split(":")[0]
    return Device(
        backend,
        arch,
        found.multi_processor_count,
        getattr(found, "shared_memory_per_multiprocessor", 1 << 16),
        getattr(found, "shared_memory_per_block_optin", 0),
        torch.cuda.current_device() if device.index is None else device.index,
    )
