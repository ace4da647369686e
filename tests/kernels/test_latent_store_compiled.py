"""The kernels that write and read latents and rotary keys, compiled for every target.

`python tests/kernels/test_latent_store_compiled.py compile TARGET NAME ...` prints a line per case.
"""

import sys

import pytest
import torch
from kernel_harness import DTYPES, TARGETS, compile_launch, device_of, empty_states, print_line, run_script
from latent_store_cases import preset_of

# latents, rotary keys, rank, width of rotary keys, dtype
COMPILED = {
    "tq4": ("tq4", "int8", 512, 64, "bf16"),
    "fp8": ("fp8_e4m3", "fp8_e5m2", 512, 64, "bf16"),
    "no rotary part": ("nc3", "exact", 512, 0, "fp16"),
    "float32": ("tq2", "exact", 256, 32, "fp32"),
}
FAST = ("tq4",)


def compile_case(target: str, name: str) -> None:
    from tq_kernels.store.dequantize_rows import dequantize_rows_launch
    from tq_kernels.store.latents import store_latents_launch
    from tq_kernels.store.update_latents import update_latents_launch

    latent_name, rotary_name, rank, dim, dtype = COMPILED[name]
    preset, device, dtype = preset_of(latent_name, rotary_name), device_of(target), DTYPES[dtype]

    def empty(tokens):
        return [torch.empty(2, 1, tokens, width, dtype=dtype, device="meta") for width in (rank, dim)]

    latent = empty_states("key", preset.key, rank, heads=1)
    rotary = empty_states("rotary", preset.value, dim, calibrated=False, heads=1, dtype=dtype)
    count = torch.empty((), dtype=torch.int64, device="meta")
    exact = *empty(1), latent, rotary, *empty(192)
    launches = [
        store_latents_launch(latent, rotary, *empty(256), 0, device),
        update_latents_launch(*exact, count, 128, 384, tuple(empty(4)), device),
        dequantize_rows_launch(latent, 200, dtype, device)[0],
    ]
    if not preset.value.exact:
        launches.append(dequantize_rows_launch(rotary, 200, dtype, device)[0])
    for launch in launches:
        print_line(name, compile_launch(launch, target).metadata.shared)


def compiled(target, *names):
    shared = run_script(__file__, "compile", target, *names)
    assert {name for name, _ in shared} == set(names)
    assert max(size for _, size in shared) <= 48 << 10  # so that three programs fit beside each other


@pytest.mark.parametrize("target", ["sm_90"])
def test_compiles(target):
    compiled(target, *FAST)


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_compiles_for_every_target(target):
    compiled(target, *COMPILED)


if __name__ == "__main__":
    for chosen in sys.argv[3:]:
        compile_case(sys.argv[2], chosen)
