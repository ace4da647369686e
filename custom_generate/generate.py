"""A recipe for transformers: `model.generate(..., custom_generate=THIS_REPOSITORY, trust_remote_code=True)`."""

from typing import Any

import tq_cache


def generate(model: Any, preset: str = "tq4", cache_options: dict[str, Any] | None = None, **kwargs: Any) -> Any:
    """`model.generate(**kwargs)` with a TurboQuantCache; the model is then what it was.

    preset, cache_options: as `tq_cache.enable` takes them.  To generate more than once, `tq_cache.enable` itself is
    better: it keeps preallocated memory, and what was compiled for it, from call to call.
    """
    with tq_cache.enable(model, preset, **(cache_options or {})):
        return model.generate(**kwargs)
