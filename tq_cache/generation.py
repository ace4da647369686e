"""`generate()` with a TurboQuantCache and without another word: `enable`, `disable`, and who makes the cache of a call.

Nothing is patched but one attribute of the model at hand: `_prepare_cache_for_generation`, to which `generate()` hands
the length that it has worked out.  transformers' own runs first; where that makes the DynamicCache of a user who said
nothing of caches, ours takes its place.
"""

import copy
import functools
import gc
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache, EncoderDecoderCache

from .cache import TurboQuantCache
from .compat import decoder_config, warn_if_untested
from .hf.last_call import COMPILED, LastCall, why_eager, why_growing
from .hf.leasing import Lease, lease
from .hf.switch import AttentionBefore, set_attention, still_reads_packed
from .hf.wrapped import check_generates, unwrapped, warn_of_own_cache
from .planning.geometry import model_geometry
from .planning.memory import token_bytes_of
from .report import CacheReport
from .storage.checks import checked_count
from .storage.room import LEAST_ROOM, reserved_room

HOOK = "_prepare_cache_for_generation"


class Enabled:
    """What `enable` returns.  As a context manager it gives what was enabled, and leaving it undoes that one `enable`.

    Its `repr` says the preset, how many layers are packed, and of the last call the bytes, and whether its steps were
    compiled or why the cache grew.
    """

    def __init__(self, given: Any, model: PreTrainedModel, preset: str, options: dict[str, Any]) -> None:
        self.given, self.model = given, model
        self.last = LastCall()
        self.makers = [CacheMaker(self, module, preset, options) for module in _generating(model)]
        self.attention = AttentionBefore(model)
        try:
            self.reads_packed = set_attention(model)
            for maker in self.makers:
                maker.first()  # what is wrong with the options is said here
            self.plans = self.makers[0].first().plans
        except BaseException:
            self.attention.restore()
            raise
        for maker in self.makers:
            setattr(maker.module, HOOK, maker.prepare)

    def __getstate__(self) -> dict[str, Any]:
        """Without wrapper and calls, which a copy of the model has not."""
        return {name: part for name, part in self.__dict__.items() if name not in ("given", "last")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, given=state["model"], last=LastCall())

    def __enter__(self) -> Any:
        return self.given

    def __exit__(self, *exception: object) -> None:
        self.undo()

    def undo(self) -> None:
        """Put back what was there before; what was enabled later on this model goes first.  Undone, nothing."""
        stack = _stack(self.model)
        if self in stack:
            for enabled in stack[: stack.index(self) + 1]:
                cache = enabled.last.cache()
                for maker in enabled.makers:
                    maker.remove()
                enabled.attention.restore()
                if cache is not None:
                    enabled.last.keep(cache)

    def report(self) -> CacheReport:
        """What the cache of the last call holds, or held when it went; of one that may still be used, as it is now.

        Raises RuntimeError where there is none: no call yet, or one with a cache of its own or without any.
        """
        report = self.last.report()
        if report is None:
            raise RuntimeError(
                f"expected a cache that `enable` made for a call of generate(), got {self.last.kind}; call generate(), "
                "or ask the cache that you gave for its report"
            )
        return report

    def __repr__(self) -> str:
        plans, report = self.last.plans or self.plans, self.last.report()
        packed = sum(plan.packed for plan in plans)
        said = [self.last.kind, *([report.room] if report and report.room else [])]
        empty = report is not None and not any(layer.tokens for layer in report.layers)  # as with PEFT's prefix tuning
        held = "; it was given no tokens" if empty else f"; {report.held_line()}" if report else ""
        return (
            f"Enabled({type(self.model).__name__}, {self.makers[0].preset}: {packed} of {len(plans)} layers packed; "
            f"last call: {': '.join(said)}{held})"
        )


class Held(NamedTuple):
    """Preallocated memory: its cache, tokens that it may hold, what it was made for, and the lease of the last call."""

    cache: TurboQuantCache
    room: int
    made_for: tuple[Any, ...]
    lease: Lease


class CacheMaker:
    """Makes the caches of one module that generates."""

    def __init__(self, enabled: Enabled, module: PreTrainedModel, preset: str, options: dict[str, Any]) -> None:
        self.enabled, self.module, self.preset = enabled, module, preset
        self.options = dict(options)
        self.least_room = self.options.pop("max_cache_len", None)
        if self.least_room is not None:  # the first cache grows, and does not see it
            self.least_room = checked_count("max_cache_len", self.least_room, least=1)
        self.before = module.__dict__.get(HOOK)
        self.removed = False  # True: only a shallow copy of the module still asks
        self._reset()

    def _reset(self) -> None:
        self._first: TurboQuantCache | None = None  # empty, of which growing ones are copies
        self._held: list[Held] = []  # at most one; whoever takes it pops it, so that no two threads do

    def __getstate__(self) -> dict[str, Any]:
        """Without caches: a copy of the model has configs and memory of its own."""
        return {name: part for name, part in self.__dict__.items() if name not in ("_first", "_held")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset()

    def remove(self) -> None:
        """Give the module back what it had, and the memory free."""
        makers = _makers(self.module)
        if self in makers[1:]:  # a part of the model, enabled by itself since
            makers[makers.index(self) - 1].before = self.before
        elif self in makers and self.before is None:
            delattr(self.module, HOOK)
        elif self in makers:
            setattr(self.module, HOOK, self.before)
        self.removed = True
        self._reset()

    # ----------------------------------------------------------------------------------------------- one call

    def prepare(
        self,
        generation_config: Any,
        model_kwargs: dict[str, Any],
        generation_mode: str | None,
        batch_size: int,
        max_cache_length: int,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """As transformers', with a TurboQuantCache where that makes a DynamicCache because nothing else was asked for.

        max_cache_length: tokens that the call may cache, per sequence
        """
        given = model_kwargs.get("past_key_values")
        call = (generation_config, model_kwargs, generation_mode, batch_size, max_cache_length, *args)
        result = self._transformers_own()(*call, **kwargs)
        made = model_kwargs.get("past_key_values")
        pair = made if isinstance(made, EncoderDecoderCache) else None
        own = made if pair is None else pair.self_attention_cache
        asked = given is not None or generation_config.cache_implementation is not None
        if self.removed:
            return result
        if asked or type(own) is not DynamicCache:
            self.enabled.last = LastCall("one that was given its own" if asked else "one without")
            return result
        if self.enabled.reads_packed:
            self.enabled.reads_packed = still_reads_packed(self.enabled.model)
        cache, why = None, self._why_growing(generation_config, generation_mode)
        if pair is None and not why:
            sequences = batch_size * max(generation_config.num_beams or 1, generation_config.num_return_sequences or 1)
            most = max(max_cache_length, getattr(generation_config, "max_cache_len", None) or 0)
            cache = self._preallocated(sequences, most, generation_config)
        kind = COMPILED
        if cache is None:
            cache, kind = copy.deepcopy(self.first()), f"growing: {why or why_eager(self.module, generation_config)}"
        self.enabled.last = LastCall(kind, self._held[0].cache if kind == COMPILED else cache)
        if generation_config.is_assistant:
            cache.activate_past_recording()
        model_kwargs["past_key_values"] = cache if pair is None else type(pair)(cache, pair.cross_attention_cache)
        return result

    def _transformers_own(self) -> Any:
        if self.before is not None and _maker(self.before) is None:  # somebody else's attribute
            return self.before
        return functools.partial(getattr(type(self.module), HOOK), self.module)

    def first(self) -> TurboQuantCache:
        """An empty growing cache, made once; raises what `TurboQuantCache` raises."""
        if self._first is None:
            self._first = self._make(None)
        return self._first

    def _make(self, room: int | None) -> TurboQuantCache:
        return TurboQuantCache(self.module.config, self.preset, max_cache_len=room, **self.options)

    # ------------------------------------------------------------------------------------- preallocated memory

    def _why_growing(self, generation_config: Any, generation_mode: str | None) -> str:
        bounded = self.least_room is not None
        return why_growing(self.module, self.first().plans, self.options, bounded, generation_config, generation_mode)

    def _preallocated(self, sequences: int, most: int, generation_config: Any) -> TurboQuantCache | None:
        """A cache with room for so many tokens, in the memory of the last call where it fits; None: no compiled steps.

        What is lent is a twin of the cache held.  While anybody has the twin, as a user may who was given it, or a part
        of it, its memory is not used again.
        """
        example = [held.cache for held in self._held] or [self._make(LEAST_ROOM)]  # not taken: it may have to stay
        if not self.module._valid_auto_compile_criteria({"past_key_values": example[0]}, generation_config):
            return None
        try:
            held: Held | None = self._held.pop()
        except IndexError:
            held = None
        made_for = self._made_for(sequences)
        if held is not None and held.lease.is_held:
            gc.collect()  # a compilation leaves cycles that nobody needs, with the cache in them
        if held is not None and (held.made_for != made_for or held.lease.is_held):
            held = None
        most = max(most, self.least_room or 0)
        if held is None or held.room < most:
            room = self._room(most, 0 if held is None else held.room)
            cache = self._make(room)
            self._reserve(cache, sequences, room)
        else:
            room, cache = held.room, held.cache
            cache.reset()
        lent, given = lease(cache)
        self._held[:] = [Held(cache, room, made_for, given)]
        return lent

    def _reserve(self, cache: TurboQuantCache, sequences: int, limit: int) -> None:
        """Reserve no more of `limit` than the device and the model's positions suggest: the rest follows."""
        config, module = decoder_config(self.module.config), self.module
        token_bytes = sequences * token_bytes_of(model_geometry(config), cache.plans, module.dtype.itemsize)
        positions = getattr(config, "max_position_embeddings", None)
        cache.reserve(reserved_room(limit, self.least_room or 0, positions, token_bytes, module.device))

    def _made_for(self, sequences: int) -> tuple[Any, ...]:
        """What memory must have been made for to be used again; tensors made in inference mode cannot leave it."""
        device = self.module.device
        autocast = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None
        return sequences, device, self.module.dtype, autocast, torch.is_inference_mode_enabled()

    def _room(self, most: int, before: int) -> int:
        """Tokens of room for at least `most`: up to a multiple of 1,024, and of a thirty-second of it.

        Where `before` was too little, half as much again, so that a growing conversation compiles few times.
        """
        longest = getattr(decoder_config(self.module.config), "max_position_embeddings", None) or before * 2
        most = max(most, min(before * 3 // 2, longest))
        step = max(LEAST_ROOM, 1 << max(most.bit_length() - 6, 0))
        return -(-most // step) * step


def enable(model: Any, preset: str = "tq4", **options: Any) -> Enabled:
    """From now on `model.generate()` uses a `TurboQuantCache`, and so does whatever calls it (pipelines, chat loops).

    model:   a transformers model that generates; of one that contains others that generate, these, too.  Or what
             wraps one: a PEFT model, torch.compile(model), DDP, a pipeline
    preset, options: as those of `TurboQuantCache`.  `max_cache_len` is the least room that is preallocated: give it
             where the longest call is known, and nothing is ever compiled twice

    The model's attention becomes "turboquant".  A cache, `use_cache=False` or a `cache_implementation` that a call is
    given wins.  `with tq_cache.enable(model): ...` undoes it at the end, `tq_cache.disable(model)` at any time; enabled
    twice, the newest counts.  What is returned says what became of the last call: `report()`, and its `repr`.

    Greedy search and sampling on one GPU, by a model that transformers compiles in one graph, run compiled steps on
    preallocated memory, kept for the next call of the same batch size that fits, unless anybody still has the last
    call's cache or a part of it.  Where a call may ask for more tokens than the model has positions, or than fit into
    half of the free memory, room for these is reserved, and doubled when the sequence gets there (`cache.report()`
    says so); each doubling is one more compilation.  All else (beams, assisted decoding,
    chunked prefill, `disable_compile=True`, encoder-decoders, linear or sparse attention, ALiBi, several devices, a
    residual_length that is no multiple of 64, or a cache that is returned (`return_dict_in_generate`) where no
    max_cache_len is given) runs on a cache that grows.

    `generate_batch` (continuous batching) raises ValueError, since its paged memory is made inside transformers and no
    cache can take its place: `disable(model)` first.

    Raises TypeError unless the model is transformers' own and generates, NotImplementedError where its caches are of a
    kind of its own, and what `TurboQuantCache` raises; nothing has changed then.  Warns where the model has an
    attention of its own, which cannot read packed bits, where an adapter of PEFT has a cache of its own (prefix
    tuning), and, once, where transformers is newer than what was tested, or at a call whose attention was set since.
    """
    warn_if_untested()
    inner = unwrapped(model)
    check_generates(inner, HOOK)
    enabled = Enabled(model, inner, preset, options)
    warn_of_own_cache(model)
    return enabled


def disable(model: Any) -> None:
    """Undo every `enable` of this model, which may be in a wrapper: its caches and its attention are what they were.
    Else does nothing.

    A shallow copy (`copy.copy`) is enabled as long as its original is; models that share a config have their attention
    back once none of them is enabled.
    """
    if stack := _stack(unwrapped(model)):
        stack[-1].undo()


def _generating(model: PreTrainedModel) -> list[PreTrainedModel]:
    """The model, and models in it whose `generate()` it may call."""
    inside = [x for x in model.modules() if isinstance(x, PreTrainedModel) and x.can_generate()]
    return [model, *[module for module in inside if module is not model]]


def _maker(hook: Any) -> CacheMaker | None:
    maker = getattr(hook, "__self__", None)
    return maker if isinstance(maker, CacheMaker) else None


def _makers(module: Any) -> list[CacheMaker]:
    """Those of this module, the newest first; a shallow copy has hooks of its original, which are none of its own."""
    found: list[CacheMaker] = []
    hook = getattr(module, "__dict__", {}).get(HOOK)
    while (maker := _maker(hook)) is not None and maker.module is module:
        found.append(maker)
        hook = maker.before
    return found


def _stack(model: Any) -> list[Enabled]:
    """What enabled this model, the newest first."""
    return [maker.enabled for maker in _makers(model)]
