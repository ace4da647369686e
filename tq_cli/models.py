"""Models of the command line."""

from typing import Any

from .console import progress

DTYPES = ("auto", "bfloat16", "float16", "float32")


def load(model: str | None, dtype: Any = "auto", device: str | None = None) -> tuple[Any, Any]:
    """Model and tokenizer; None: the embedded model.  `dtype`: one of DTYPES, or torch's.  Raises ValueError."""
    import torch

    from tq_cache.tools import runs

    if isinstance(dtype, str):
        if dtype not in DTYPES:
            raise ValueError(f"expected --dtype of {', '.join(DTYPES)}, got {dtype!r}")
        dtype = dtype if dtype == "auto" else getattr(torch, dtype)
    if model is None or model == str(runs.EMBEDDED_MODEL):
        torch.set_num_threads(1)  # its matrices are too small for more, which only wait for each other
    with progress("loading the model", None):
        return runs.load_model(model or runs.EMBEDDED_MODEL, dtype, device)
