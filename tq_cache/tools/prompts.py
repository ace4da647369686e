"""Prompts as a chat model expects them: by the tokenizer's template, where it has one."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jinja2 import TemplateError

from .runs import encode

Message = Mapping[str, str]


def has_template(tokenizer: Any) -> bool:
    """Whether a tokenizer has a chat template."""
    return bool(getattr(tokenizer, "chat_template", None))


def opening(tokenizer: Any, system: str | None) -> list[Message]:
    """The messages that a chat begins with.  Raises ValueError on a system message that no template takes."""
    if system is None:
        return []
    if not has_template(tokenizer):
        raise ValueError("expected a model with a chat template beside --system, got one without; put it in the prompt")
    return [{"role": "system", "content": system}]


def render(tokenizer: Any, messages: Sequence[Message]) -> str:
    """Messages as the model reads them, up to where its answer begins.  Raises ValueError where the template refuses
    them, as some do system messages."""
    try:
        return tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False)
    except TemplateError as error:
        raise ValueError(f"expected messages that the model's chat template takes, got its error: {error}") from None


def prompt_ids(tokenizer: Any, text: str, system: str | None = None, raw: bool = False) -> torch.Tensor:
    """Token ids [1, T] of a prompt: one message of a chat, or with `raw`, or without a template, the text itself."""
    if raw and system is not None:
        raise ValueError("expected one of --raw and --system, got both; put the system message in the prompt")
    messages = opening(tokenizer, system)
    if raw or not has_template(tokenizer):
        return tokenizer(text, return_tensors="pt").input_ids.long()
    if not text.strip():
        raise ValueError(f"expected a prompt, got {text!r}")
    return torch.tensor([encode(tokenizer, render(tokenizer, [*messages, {"role": "user", "content": text}]))])
