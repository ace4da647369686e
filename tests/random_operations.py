"""A cache and a list of tokens, told the same: a state machine whose rules are the contract of a cache.

Each rule does one thing to a cache and the same to the list (`token_list.Tokens`); after each of them the two must
agree.  Hypothesis draws the rules with their arguments, and shrinks a sequence that fails to a short one.  Here are the
start and the forward of a model; all that else happens to a cache is in `random_rules`, the ways to hold tokens, and
how sequences are run, in `random_ways`.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from error_budget import Roundings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from token_list import Tokens, assert_same, check_attention, check_handed_out
from transformers import LlamaConfig

from tq_cache import TurboQuantCache
from tq_cache.hf.attention import turboquant_attention
from tq_cache.storage.preallocated import PreallocatedStorage

# Names that rules give to what is known to fail: they leave it out.  To be empty.
KNOWN_FAULTS = {
    "one token repeated",  # sizes measured on one token suit no other: until calibration moves
    "keeps a handle",  # one that is first read after later operations packs what waited for its queries
}

HEADS, QUERY_HEADS, DIM = 2, 4, 32
MOST_TOKENS = 400  # more take too long
COUNTS = (1, 1, 2, 7, 63, 64, 65, 130, 200)
PRESETS = ("tq4", "tq3", "tq2", "k8v4", "3bit_nc", "fp8_e4m3")
# What a model does with what an update hands it.
ATTENDS, READS, FAILS, STEPS = "attends", "reads the tensors", "fails before attention", "attends, and steps on"
REPLACES, EDITS = "replaces values", "edits values in place"
KEEPS, KEEPS_HANDLES = "keeps a tensor", "keeps a handle"
REPEATS, NAN = "one token repeated", "with a NaN"
seeds = st.integers(0, 2**16)


def known(*names: str) -> list[str]:
    """Those of these names that are no known faults."""
    return [name for name in names if name not in KNOWN_FAULTS]


@dataclass
class Held:
    """Layers of a cache, and what each should hold; `cache` is None where somebody kept its layers alone."""

    cache: TurboQuantCache | None
    layers: list[Any]
    tokens: list[Tokens]
    dtype: torch.dtype

    def check(self, may_pack: bool = False) -> None:
        for layer, tokens in zip(self.layers, self.tokens, strict=True):
            storage = layer.storage
            assert int(layer.get_seq_length()) == storage.length == tokens.length
            if not tokens.length:
                assert layer.keys is None and layer.values is None
                continue
            tokens.check(storage.view(), may_pack, storage.residual_length, storage.preset.center)

    def keep_bits(self) -> "Held":
        """From now on not a bit is to change."""
        self.bits = [[x.clone() for x in layer.storage.tensors()] for layer in self.layers]
        return self

    def check_bits(self) -> None:
        for layer, bits in zip(self.layers, self.bits, strict=True):
            for x, kept in zip(layer.storage.tensors(), bits, strict=True):
                assert_same(x, kept, "what happened to a cache was seen in its copy")

    def twin(self, cache: TurboQuantCache) -> "Held":
        """A copy of the cache, which goes its own way."""
        return Held(cache, [*cache.layers], [tokens.copy() for tokens in self.tokens], self.dtype)


class Module(torch.nn.Module):
    """What attention asks of the module that calls it."""

    num_key_value_groups, is_causal = QUERY_HEADS // HEADS, True


MODULE = Module().eval()


class CacheMachine(RuleBasedStateMachine):
    """One cache, and how a model uses it.

    now:    the cache that is operated on
    copies: others, which are not to notice
    kept:   tensors that a cache handed out, with what they show
    """

    cache_class: Any = TurboQuantCache
    options: dict[str, Any] = {}
    num_layers, device, kernels = 1, "cpu", False
    only_batch: int | None = None  # sequences of all texts; None: any number
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16, torch.float16)
    residuals: tuple[int, ...] = (0, 1, 16, 64, 128)

    # --------------------------------------------------------------------------------------------------- the start

    @initialize(
        preset=st.sampled_from(PRESETS), residual=st.integers(0, 4), sinks=st.sampled_from([0, 4]),
        dtype=st.integers(0, 2), attention=st.sampled_from(["turboquant", "sdpa"]),
        common=st.sampled_from([0, 20]), packs=st.sampled_from([True, True, True, False]),
        prompt=st.sampled_from([0, 1, 64, 130, 200, 300]), batch=st.integers(1, 2),
        content=st.sampled_from(["random", "random", *known(REPEATS)]),
    )  # fmt: skip
    def make(self, preset, residual, sinks, dtype, attention, common, packs, prompt, batch, content):
        """A cache knows its model's config and its options; it learns all else from the first tokens.

        common: how large is what all keys have in common
        prompt: tokens that it begins with
        """
        self.config = LlamaConfig(
            hidden_size=QUERY_HEADS * DIM, intermediate_size=32, vocab_size=8, num_hidden_layers=self.num_layers,
            num_attention_heads=QUERY_HEADS, num_key_value_heads=HEADS,
        )  # fmt: skip
        self.config._attn_implementation = attention
        self.random = torch.Generator()
        residual = self.residuals[residual % len(self.residuals)]
        options = dict(residual_length=residual, sink_tokens=sinks, skip_layers=() if packs else (0,))
        cache = self.make_cache(preset, **options)
        self.now = Held(
            cache,
            [*cache.layers],
            [Tokens(self.in_common(common)) for _ in cache.layers],
            self.dtypes[dtype % len(self.dtypes)],
        )
        self.copies: list[Held] = []
        self.kept: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.may_pack = False
        if prompt:
            self.forward(prompt, batch, (0, 0), content, ATTENDS, 0)

    def make_cache(self, preset: str, **options: Any) -> TurboQuantCache:
        return self.cache_class(self.config, preset, **options, **self.options)

    # ------------------------------------------------------------------------------------------- what the rules ask

    @property
    def cache(self) -> TurboQuantCache:
        assert self.now.cache is not None
        return self.now.cache

    @property
    def length(self) -> int:
        return self.now.tokens[0].length

    @property
    def batch(self) -> int:
        return self.now.tokens[0].given[0].shape[0]

    @property
    def just_loaded(self) -> bool:
        return self.now.cache is not None and bool(self.now.cache._unplaced)

    @property
    def storage(self) -> Any:
        return self.now.layers[0].storage

    @property
    def room(self) -> int | None:
        """Tokens there is room for in memory of a fixed size; None: it grows."""
        return self.storage.max_length if isinstance(self.storage, PreallocatedStorage) else None

    def in_common(self, size: float) -> torch.Tensor:
        """What all keys of a text have in common, [H_kv, D]."""
        return size * torch.randn(HEADS, DIM, generator=self.random.manual_seed(0)).to(self.device)

    def draw(self, seed: int, batch: int, count: int, repeated: bool = False) -> list[torch.Tensor]:
        """New keys and values, [B, H_kv, T, D], and queries."""
        self.random.manual_seed(seed)
        parts = torch.randn(4, batch, HEADS, count, DIM, generator=self.random).to(self.device)
        if repeated:
            parts[:2] = parts[:2, :, :, :1].clone()
        query = torch.stack([parts[2], parts[3]], dim=2).flatten(1, 2)
        return [x.to(self.now.dtype) for x in (parts[0] + self.now.tokens[0].common[:, None], parts[1].clone(), query)]

    def attend(self, query: torch.Tensor, pair: Any, mask: torch.Tensor | None) -> torch.Tensor:
        return turboquant_attention(MODULE, query, *pair, mask)[0]

    def roundings(self, by_sdpa: bool) -> Roundings:
        """Of attention; sdpa rounds its operands, the reference does not.

        PyTorch's attention for CPUs takes exponentials to 20 units in the last place (`fexp_u20`), which counts as an
        operand that is so far off.
        """
        if not by_sdpa:
            return Roundings.of_reference(self.now.dtype)
        found = Roundings.of_kernels(self.now.dtype)
        return replace(found, operand=max(found.operand, 20 * torch.finfo(torch.float32).eps / 2))

    def refused(self, errors: Any, operation: Callable[[], Any]) -> None:
        """It raises; that nothing has changed the invariants show."""
        try:
            operation()
        except errors:
            return
        raise AssertionError(f"expected an error of {errors}")

    # -------------------------------------------------------------------------------------------------- the forward

    @rule(
        count=st.sampled_from(COUNTS), batch=st.integers(1, 2),
        padding=st.sampled_from([(0, 0)] * 3 + [(0, 90), (5, 200)]),
        content=st.sampled_from(["random"] * 3 + [NAN, *known(REPEATS)]),
        then=st.sampled_from([ATTENDS] * 3 + [READS, FAILS, *known(KEEPS, REPLACES, EDITS)]), seed=seeds,
    )  # fmt: skip
    def forward(self, count, batch, padding, content, then, seed):
        """What a model hands over is held, and read exactly; what was held before is read as it is held.

        padding: tokens of each sequence that are none, if it begins
        then:    what the model does with what the update hands it
        """
        starts = torch.tensor([min(start, count - 1) for start in padding])
        if self.length:
            batch, starts = self.batch, self.now.tokens[0].starts
        elif self.only_batch:
            batch = self.only_batch
        elif self.room and self.storage.states is not None and "another batch after reset" in KNOWN_FAULTS:
            batch = self.storage.batch_size
        if self.length + count > (self.room or MOST_TOKENS):
            count = 1
        spoiled = content == NAN and not (self.kernels and "NaN in the kernels" in KNOWN_FAULTS)
        spoiled = spoiled and not starts.any() and self.length + count > 1  # sdpa gives 0 for one alone
        for index in range(len(self.now.layers)):
            keys, values, query = self.draw(seed + index, batch, count, content == REPEATS)
            if spoiled:
                (keys, values)[seed % 2][0, 0, seed // 2 % count, 3] = torch.nan
            self.update(index, keys, values, query, starts[:batch], then, seed)
        self.may_pack = True

    @rule(count=st.integers(2, 40), seed=seeds)
    @precondition(lambda self: 0 < self.length <= MOST_TOKENS)
    def steps(self, count, seed):
        """Single tokens, one after the other."""
        count = min(count, self.room - self.length) if self.room else count
        for i in range(count):
            if i == count - 1:
                self.now.check(may_pack=True)
            self.forward(1, 1, (0, 0), "random", ATTENDS if i == count - 1 else STEPS, seed + i)

    def update(self, index, keys, values, query, starts, then, seed) -> None:
        """One layer's part of a forward: the sizes of its mask, the update, attention."""
        tokens, storage, count = self.now.tokens[index], self.now.layers[index].storage, keys.shape[2]
        if self.room is not None and tokens.length + count > self.room:
            return self.refused(ValueError, lambda: self.cache.update(keys, values, index))
        width, offset = self.cache.get_mask_sizes(count, index)
        assert offset == 0
        is_step = count == 1 and width == self.room  # one that may be in a graph: all there is room for is handed out
        by_sdpa = not (is_step or tokens.packed)
        tokens.append((keys, values), starts)
        mask = tokens.mask(count, width)
        given = (mask, torch.where(mask, 0.0, -torch.inf).to(keys.dtype), None)[seed % (2 if starts.any() else 3)]
        if is_step and then in (ATTENDS, STEPS):
            out = self.step(index, keys, values, query, given)
        else:
            pair = self.cache.update(keys, values, index)
            assert all(x.shape[2] == width and x.dtype == self.now.dtype for x in pair)
            out = self.attend(query, pair, given) if then in (ATTENDS, STEPS) else None
        if then == STEPS:
            return
        if is_step:  # attention comes when all is done, also the packing
            tokens.check(storage.view(), True, storage.residual_length, storage.preset.center)
        read, seen = [*tokens.read], mask[..., : tokens.length]
        if then == READS:
            for x, expected in zip(pair, read, strict=True):
                check_handed_out(x[:, :, : tokens.length] + 0, expected)
        elif then == KEEPS and not is_step and (type(pair[0]) is torch.Tensor or KEEPS_HANDLES not in KNOWN_FAULTS):
            self.kept += [*zip(pair, read, strict=True)]
        elif then == REPLACES:
            read, by_sdpa = [read[0], read[1] * 2], True  # which attends to what is no longer the cache's
            out = self.attend(query, (pair[0], pair[1] * 2), given)
        elif then == EDITS:
            read, by_sdpa = [read[0], read[1] * 2], True
            try:
                out = self.attend(query, (pair[0], pair[1].mul_(2)), given)
            except (RuntimeError, ValueError):
                return  # as it may be
        if out is not None:
            check_attention(out, query, read, seen, self.roundings(by_sdpa))

    def step(self, index, keys, values, query, mask) -> torch.Tensor:
        """Update and attention of a single token, in memory of a fixed size: what a graph would have."""
        return self.attend(query, self.cache.update(keys, values, index), mask)

    @invariant()
    def caches_hold_what_they_were_given(self):
        self.now.check(self.may_pack)
        self.may_pack = False
        for held in self.copies:
            held.check_bits()
