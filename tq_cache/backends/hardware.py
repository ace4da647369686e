"""GPU architecture -> which fp8 formats its instructions know, and the decode path that fits.  One table.

Rows come from compiling for each target (Triton 3.6 and 3.9), not from data sheets.  Every format runs on every row:
what a GPU cannot convert or multiply by an instruction goes through integer arithmetic and 16-bit products.
"""

from dataclasses import dataclass, replace

import torch

OCP = ("e4m3", "e5m2")
FNUZ = ("e4m3fnuz", "e5m2fnuz")

FP8_DOT = "fp8 tensor cores"
FP16_DOT = "fp16 tensor cores"
FP16_FMA = "fp16 without tensor cores"
REFERENCE = "PyTorch reference"


@dataclass(frozen=True)
class Architecture:
    """One row.

    fp8_convert:  fp8 formats that one instruction converts; others go through integer arithmetic
    fp8_multiply: fp8 formats that tensor cores multiply as they are; OCP are those that the cache stores
    decode_path:  how the kernels read packed keys and values for 16-bit queries, and `reason`, why so
    """

    name: str
    gpus: str
    fp8_convert: tuple[str, ...]
    fp8_multiply: tuple[str, ...]
    decode_path: str
    reason: str


_SOFTWARE = "no fp8 instruction: codes become fp16 by integer arithmetic, then fp16 dots"
_NATIVE = "codes become e4m3 bytes in registers and are multiplied as they are"

ARCHITECTURES: dict[str, Architecture] = {
    row.name: row
    for row in [
        Architecture("cpu", "-", (), (), REFERENCE, "kernels need a GPU"),
        Architecture("sm_70", "V100", (), (), FP16_FMA, "Triton compiles dots to multiply-add, no fp8 store"),
        Architecture("sm_75", "T4, RTX 20", (), (), FP16_FMA, "Triton compiles dots to multiply-add, no fp8 store"),
        Architecture("sm_80", "A100, A30", (), (), FP16_DOT, _SOFTWARE),
        Architecture("sm_86", "A10, A40, RTX 30", (), (), FP16_DOT, _SOFTWARE),
        Architecture("sm_87", "Jetson Orin", (), (), FP16_DOT, f"{_SOFTWARE} (taken to be as sm_86)"),
        Architecture("sm_89", "L4, L40S, RTX 40", OCP, OCP, FP8_DOT, _NATIVE),
        Architecture("sm_90", "H100, H200", OCP, OCP, FP8_DOT, f"{_NATIVE}; each tile's sum is added in float32"),
        Architecture("sm_100", "B200, GB200", OCP, OCP, FP8_DOT, _NATIVE),
        Architecture("sm_120", "RTX 50, RTX PRO", OCP, OCP, FP8_DOT, _NATIVE),
        Architecture("gfx90a", "MI210, MI250", (), (), FP16_DOT, _SOFTWARE),
        Architecture("gfx942", "MI300X, MI325X", FNUZ, FNUZ, FP16_DOT, "its fp8 is FNUZ, the cache stores OCP"),
        Architecture("gfx950", "MI350X, MI355X", OCP, OCP, FP16_DOT, "as other AMD GPUs; fp8 dots not tried"),
    ]
}


def detect(device: torch.device | str) -> Architecture:
    """The row of a device.

    An NVIDIA GPU that is not listed takes the row of the nearest older one, and says so; any other device that is not
    listed takes the reference.  Raises RuntimeError, torch's own, if there is no such CUDA device.
    """
    device = torch.device(device)
    if device.type != "cuda":
        row = ARCHITECTURES["cpu"]
        return row if device.type == "cpu" else replace(row, name=device.type, reason="no kernels for this device")
    if torch.version.hip is not None:
        return _amd(torch.cuda.get_device_properties(device).gcnArchName)
    return nvidia(*torch.cuda.get_device_capability(device))


def nvidia(major: int, minor: int) -> Architecture:
    """The row of compute capability major.minor: its own, else that of the nearest older listed."""
    name = f"sm_{10 * major + minor}"
    if name in ARCHITECTURES:
        return ARCHITECTURES[name]
    listed = [int(key.removeprefix("sm_")) for key in ARCHITECTURES if key.startswith("sm_")]
    older = [number for number in listed if number < 10 * major + minor]
    if not older:
        return replace(ARCHITECTURES["cpu"], name=name, reason="older than anything that Triton compiles for")
    row = ARCHITECTURES[f"sm_{max(older)}"]
    return replace(row, name=name, gpus="not listed", reason=f"treated as {row.name}: {row.reason}")


def _amd(gcn_arch_name: str) -> Architecture:
    name = gcn_arch_name.split(":")[0]  # gfx942:sramecc+:xnack-
    if name in ARCHITECTURES:
        return ARCHITECTURES[name]
    return replace(ARCHITECTURES["cpu"], name=name, gpus="not listed", reason="not tried on this GPU")
