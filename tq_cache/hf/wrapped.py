"""The transformers model inside what a user holds: PEFT, torch.compile, DDP, a pipeline."""

import inspect
import warnings
from typing import Any

import torch
from transformers import PreTrainedModel

OWN_CACHE = ("PREFIX_TUNING", "CARTRIDGE")  # PEFT types whose prompts are keys and values
MOST_WRAPPERS = 16  # of one another; what gives a new one for ever (a mock) ends there


def unwrapped(model: Any) -> Any:
    """The transformers model inside of wrappers, or what is innermost where there is none.

    Wrappers are told by their attributes: none of these packages is imported.
    """
    return _from_outside(model)[-1]


def _from_outside(model: Any) -> list[Any]:
    found = [model]
    while not isinstance(found[-1], PreTrainedModel) and len(found) < MOST_WRAPPERS:
        inner = _inner(found[-1])
        if inner is None:
            break
        found.append(inner)
    return found


def _inner(model: Any) -> Any:
    if callable(get_base_model := getattr(model, "get_base_model", None)):  # PEFT
        return get_base_model()
    if not isinstance(model, torch.nn.Module):  # a pipeline
        return getattr(model, "model", None)
    found = (getattr(model, name, None) for name in ("_orig_mod", "module"))  # torch.compile; DDP
    return next((inner for inner in found if isinstance(inner, torch.nn.Module)), None)


def warn_of_own_cache(model: Any) -> None:
    """Warn where the active adapter of PEFT puts a cache of its own in place of any other."""
    for wrapper in _from_outside(model)[:-1]:
        kind = getattr(getattr(wrapper, "active_peft_config", None), "peft_type", None)
        if kind in OWN_CACHE:
            warnings.warn(
                f"PEFT's {getattr(kind, 'value', kind)} makes a DynamicCache of its own at every call and puts it in "
                "place of a TurboQuantCache, of one that the call is given, too: nothing is packed while this adapter "
                "is active. Adapters of weights (LoRA) and prompt tuning do not",
                stacklevel=3,
            )
            return


def check_generates(model: Any, hook: str) -> None:
    """Raise unless the model generates with caches of transformers."""
    if not isinstance(model, PreTrainedModel) or not model.can_generate():
        raise TypeError(
            f"expected a transformers model that generates (AutoModelForCausalLM, ...), got {type(model).__name__}; "
            "of a wrapper other than PEFT's, torch.compile's, DDP's or a pipeline give the model inside"
        )
    takes = inspect.signature(getattr(type(model), hook)).parameters
    if "model_kwargs" not in takes or not model._supports_default_dynamic_cache():
        raise NotImplementedError(
            f"{type(model).__name__} makes caches of its own in generate(), which cannot be replaced; see whether it "
            "takes past_key_values=TurboQuantCache(model.config)"
        )
