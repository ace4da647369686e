"""A conversation with a chat model over one cache, in which each turn processes the new tokens alone."""

import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from ..cache import TurboQuantCache
from ..compat import decoder_config
from .prompts import Message, has_template, opening, render
from .runs import Clock, encode


@dataclass(frozen=True)
class Turn:
    """One question and its answer.

    reused, processed: tokens of the prompt that the cache held, and that were computed
    answered:          tokens of the answer
    stopped:           whether Ctrl-C ended it
    """

    text: str
    reused: int
    processed: int
    answered: int
    tokens_per_second: float
    stopped: bool


class Conversation:
    """Messages, and the cache that holds what was said.

    make:     makes an empty cache
    sampling: arguments of `generate()`

    Raises ValueError where the tokenizer has no chat template, or none for a system message.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        make: Callable[[], TurboQuantCache],
        system: str | None = None,
        max_new_tokens: int = 512,
        sampling: Mapping[str, Any] | None = None,
    ) -> None:
        if not has_template(tokenizer):
            raise ValueError(
                "expected a model with a chat template, got one without; `tq-cache generate` continues a text"
            )
        if max_new_tokens < 1:
            raise ValueError(f"expected max_new_tokens of 1 or more, got {max_new_tokens}")
        self.model, self.tokenizer, self._make = model, tokenizer, make
        self.max_new_tokens, self.sampling = max_new_tokens, dict(sampling or {"do_sample": False})
        self._opening = opening(tokenizer, system)
        self.reset()
        render(tokenizer, [*self._opening, {"role": "user", "content": "?"}])  # raises where it takes no system message

    def reset(self) -> None:
        """Forget everything said."""
        self.messages: list[Message] = list(self._opening)
        self.cache = self._make()
        self._text, self._tokens = "", list[int]()  # of all messages, answers as they were generated

    @property
    def held(self) -> int:
        """Tokens in the cache."""
        return int(self.cache.get_seq_length())

    def ask(self, question: str, streamer: BaseStreamer | None = None) -> Turn:
        """The answer to one more message; Ctrl-C ends it after the token under way.

        Raises ValueError, changing nothing, where the model has too few positions.  After any other exception, a second
        Ctrl-C among them, the question is forgotten and the next one fills a new cache.
        """
        messages = [*self.messages, {"role": "user", "content": question}]
        text = render(self.tokenizer, messages)
        ids = self._ids(text)
        positions = getattr(decoder_config(self.model.config), "max_position_embeddings", None)
        if positions is not None and len(ids) >= positions:
            raise ValueError(
                f"expected a conversation of fewer than the model's {positions:,} positions, got {len(ids):,} tokens; "
                "/reset begins a new one"
            )
        most = self.max_new_tokens if positions is None else min(self.max_new_tokens, positions - len(ids))
        clock = Clock(streamer)
        try:
            reused = self._keep_common(ids)
            with stoppable() as stop:
                out = self._generate(ids, most, clock, stop)
        except BaseException:
            self.cache = self._make()  # its layers may differ in length
            raise
        answer = out[len(ids) :]
        said = self.tokenizer.decode(answer, skip_special_tokens=True)
        self.messages = [*messages, {"role": "assistant", "content": said}]
        self._text, self._tokens = text + self._decode(answer), out
        return Turn(said, reused, len(ids) - reused, len(answer), clock.rate, bool(stop.asked))

    def save(self, folder: Path) -> int:
        """Write the cache to a folder; how many tokens it holds.  Raises ValueError where it is empty."""
        if not self.held:
            raise ValueError("expected a conversation to save, got none yet; ask something first")
        held = torch.tensor([self._tokens[: self.held]])
        self.cache.save_pretrained(folder, model=self.model, input_ids=held)
        return self.held

    def _generate(self, ids: Sequence[int], most: int, clock: Clock, stop: "Stop") -> list[int]:
        input_ids = torch.tensor([ids], device=self.model.device)
        out = self.model.generate(
            input_ids=input_ids,
            attention_mask=torch.ones_like(input_ids),
            past_key_values=self.cache,
            max_new_tokens=most,
            streamer=clock,
            stopping_criteria=StoppingCriteriaList([stop]),
            **self.sampling,
        )
        return out[0].tolist()

    def _ids(self, text: str) -> list[int]:
        """Of all messages.  What was said before keeps its tokens: an answer may be other ones when encoded again."""
        if self._text and text.startswith(self._text):
            return [*self._tokens, *encode(self.tokenizer, text[len(self._text) :])]
        return encode(self.tokenizer, text)

    def _decode(self, ids: Sequence[int]) -> str:
        """With special tokens."""
        return self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def _keep_common(self, ids: Sequence[int]) -> int:
        """Leave the tokens in the cache with which `ids` begin, but at least one to compute; how many.

        Templates may rewrite what was said: some leave out what a model thought.
        """
        held, pairs = self.held, zip(self._tokens, ids, strict=False)
        same = next((place for place, (ours, new) in enumerate(pairs) if ours != new), len(self._tokens))
        keep = min(held, same, len(ids) - 1)
        if keep < held:
            try:
                self.cache.crop(keep - held)
            except (ValueError, NotImplementedError, RuntimeError):  # windows and states cannot go back
                self.cache, keep = self._make(), 0
        return keep


class Stop(StoppingCriteria):
    """Ends a generation once asked to."""

    def __init__(self) -> None:
        self.asked = False

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return torch.full((input_ids.shape[0],), self.asked, device=input_ids.device)


@contextmanager
def stoppable() -> Iterator[Stop]:
    """Ctrl-C asks to stop, in place of an exception halfway through the layers of a cache; the second one raises.

    In other threads than the main one, which gets no signals, nothing is changed.
    """
    stop = Stop()

    def asked(number: int, frame: Any) -> None:
        if stop.asked:
            raise KeyboardInterrupt
        stop.asked = True

    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = signal.signal(signal.SIGINT, asked)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)
