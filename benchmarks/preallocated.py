"""Decode attention as a compiled step runs it, lengths on the device and a mask of bytes, and of a growing cache.

    python benchmarks/preallocated.py

Microseconds in a CUDA graph, 32 query and 8 KV heads of 128 channels: growing, preallocated, preallocated with a mask.
`exact`: a layer that is not packed.
"""

import torch
from decode import make_states
from measure import microseconds
from tq_kernels.decode.plan import decode

from tq_cache.backends.triton import states_of
from tq_cache.formats.presets import PRESETS

SHAPES = ((1, 1024), (1, 32768), (8, 32768), (1, 131072), (32, 4096))
FORMATS = ("exact", "4bit_nc", "tq3", "fp8_e4m3")
RESIDUAL, UNWRITTEN = 128, 20  # newest tokens that stay exact; room behind the last token


def measure(name: str, batch: int, tokens: int) -> list[float]:
    is_packed = name != "exact"
    query = torch.randn(batch, 32, 1, 128, device="cuda", dtype=torch.bfloat16)
    slots = RESIDUAL + 64 if is_packed else tokens
    keys, values = (torch.randn(batch, 8, slots, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    key = value = None
    if is_packed:
        key, value = (states_of(make_states(role, PRESETS[name], batch, 8, tokens, 128)) for role in ("key", "value"))
    total = torch.tensor(tokens - UNWRITTEN, device="cuda")
    mask = (torch.arange(tokens, device="cuda") < total).expand(batch, 1, 1, -1).contiguous()

    def growing() -> None:
        newest = 64 if is_packed else tokens
        tail = keys[:, :, :newest], values[:, :, :newest]
        decode(query, key, value, *tail, packed_length=tokens - newest, scaling=0.09)

    def preallocated(mask: torch.Tensor | None = None) -> None:
        options = dict(residual_length=RESIDUAL if is_packed else tokens, mask=mask, max_length=tokens)
        room = tokens if is_packed else 0
        decode(query, key, value, keys, values, packed_length=room, num_tokens=total, scaling=0.09, **options)

    return [microseconds(run) for run in (growing, preallocated, lambda: preallocated(mask))]


def main() -> None:
    for batch, tokens in SHAPES:
        for name in FORMATS:
            times = measure(name, batch, tokens)
            print(f"{batch:3} x {tokens:7,}  {name:9}" + "".join(f"{us:9.1f} us" for us in times), flush=True)


if __name__ == "__main__":
    main()
