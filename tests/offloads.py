"""What tests of offloading share: the mechanism on a CPU, where copies to a "device" are made at once."""

from tq_cache import TurboQuantCache
from tq_cache.storage.flat import parts
from tq_cache.storage.offloaded import OffloadedStorage, Turns


class HostCache(TurboQuantCache):
    """A cache that offloads what computes on a CPU, too."""

    _computes_on = ("cuda", "cpu")


def like_growing(storages: list, budget: int = 0) -> list[OffloadedStorage]:
    """Empty storages like these, as the layers of one cache with a budget."""
    turns = Turns(budget)
    return [OffloadedStorage(turns, x.preset, x.residual_length, x.sink_tokens, x.backend) for x in storages]


def offloaded(cache: TurboQuantCache) -> list[OffloadedStorage]:
    """Storages of the layers that are packed."""
    storages = [layer.storage for layer in cache.layers if hasattr(layer, "storage")]
    return [storage for storage in storages if isinstance(storage, OffloadedStorage)]


def device_bytes(cache: TurboQuantCache) -> int:
    """Bytes of every tensor that is on the device, counted one by one, with all slots."""
    turns = offloaded(cache)[0].turns
    buffers = [slot.buffer for slots in turns.slots.values() for slot in slots._slots]
    total = sum(buffer.nbytes for buffer in buffers if buffer is not None)
    for layer in cache.layers:
        hosted = {id(x) for x in parts(layer.storage.host.pair)} if getattr(layer.storage, "host", None) else set()
        total += sum(x.nbytes for x in layer.storage.tensors() if id(x) not in hosted)
    return total
