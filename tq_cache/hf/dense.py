"""float8 weights that attention over latents cannot absorb, made dense."""

from typing import Any

import torch
from torch import nn


def densify_kv_b_proj(model: nn.Module, dtype: torch.dtype | None = None) -> int:
    """Replace every float8 `kv_b_proj` of a model by a dense `nn.Linear`, in place, and return how many there were.

    Attention over latents needs the weight that expands them as a plain matrix; DeepSeek-V3's own checkpoint has it in
    float8 with a scale per block (transformers' FP8Linear).  In 16 bits that is 2 GB of a model of 671 billion weights.

    dtype: of the new weights; None: the model's (`model.dtype`), which is to be one of 16 bits or more

    Raises ValueError where the model has no such layer, where the dtype is none of 16 bits or more, and on weights that
    are not loaded (on meta) or packed two in a byte; nothing has changed then.
    """
    dtype = dtype or getattr(model, "dtype", None)
    if dtype is None or not dtype.is_floating_point or dtype.itemsize < 2:
        raise ValueError(f"expected a floating dtype of 16 bits or more for the dense weights, got {dtype}; pass dtype")
    named: dict[str, Any] = {
        name: module for name, module in model.named_modules() if name.rpartition(".")[2] == "kv_b_proj"
    }
    found = {name: x for name, x in named.items() if hasattr(x, "weight_scale_inv") and x.weight.itemsize == 1}
    if not found:
        raise ValueError("expected a model with a float8 kv_b_proj (FP8Linear), got none; nothing is to be made dense")
    for name, module in found.items():
        if module.weight.is_meta or not module.weight.is_floating_point():
            raise ValueError(
                f"expected {name}.weight in float8, loaded, got {module.weight.dtype} on {module.weight.device}; "
                "load the model without offloading, or with dequantize=True"
            )
    for name, module in found.items():
        parent = model.get_submodule(name.rpartition(".")[0])
        parent.kv_b_proj = _dense(module, dtype)
    return len(found)


@torch.no_grad()
def _dense(module: Any, dtype: torch.dtype) -> nn.Linear:
    """The same linear map with a weight [out, in] in `dtype`."""
    weight, scale = module.weight.float(), module.weight_scale_inv.float()
    if scale.dim() == 2:  # one per block; the last block of a row or column may be smaller
        rows, columns = module.block_size
        scale = scale.repeat_interleave(rows, 0).repeat_interleave(columns, 1)[: weight.shape[0], : weight.shape[1]]
    dense = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device=weight.device, dtype=dtype)
    dense.weight = nn.Parameter((weight * scale).to(dtype), requires_grad=False)
    if module.bias is not None:
        dense.bias = nn.Parameter(module.bias.detach().to(dtype), requires_grad=False)
    return dense.train(module.training)
