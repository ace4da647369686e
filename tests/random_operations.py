"""Random operations on a cache, in random order, against a plain list of tokens: the contract of a cache, as rules.

Each rule does one thing to a cache and the same to the list (`token_list.Tokens`); after each of them the two must
agree, and so must every copy with its own.  Hypothesis draws the rules with their arguments, and shrinks a sequence
that fails to a short one.  A subclass is one way to hold tokens (`random_ways`).
"""

import copy
import pickle
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from error_budget import Roundings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from token_list import Tokens, check_attention, check_handed_out
from transformers import LlamaConfig

from tq_cache import TurboQuantCache
from tq_cache.compat import CROP_TAKES_LENGTH
from tq_cache.hf.attention import turboquant_attention
from tq_cache.storage.growing import UNLIMITED
from tq_cache.storage.offloaded import OffloadedStorage
from tq_cache.storage.preallocated import PreallocatedStorage

# Names that rules give to what is known to fail: they leave it out.  To be empty.
KNOWN_FAULTS = {
    "replaced after update",
    "edited in place",
    "gradients",
    "one token repeated",
    "keeps what it is handed",
    "memory that enable lent",
    "selected by a list",
    "another batch after reset",
    "reset after a load",
}

HEADS, QUERY_HEADS, DIM = 2, 4, 32
MOST_TOKENS = 400  # more take too long
COUNTS = (1, 1, 2, 7, 63, 64, 65, 130, 200)
PRESETS = ("tq4", "tq3", "tq2", "k8v4", "3bit_nc", "fp8_e4m3")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
REFUSALS = (RuntimeError, ValueError)  # NotImplementedError is a RuntimeError
ATTENDS, READS, KEEPS, FAILS, STEPS = "attends", "reads", "keeps what it is handed", "fails before attention", "steps"
seeds = st.integers(0, 2**16)


def known(*names: str) -> list[str]:
    """Those of these names that are no known faults."""
    return [name for name in names if name not in KNOWN_FAULTS]


def replaced(pair: Any, read: list[torch.Tensor]) -> tuple[Any, list[torch.Tensor]]:
    """Values that the model scales after the update."""
    return (pair[0], pair[1] * 2), [read[0], read[1] * 2]


def edited(pair: Any, read: list[torch.Tensor]) -> tuple[Any, list[torch.Tensor]]:
    """Values that a wrapper writes into."""
    pair[1].mul_(2)
    return pair, [read[0], read[1] * 2]


CHANGES = {"replaced after update": replaced, "edited in place": edited}


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
            residual = storage.residual_length if storage.packs else UNLIMITED
            tokens.check(storage.view(), may_pack, residual, storage.preset.center)

    def twin(self, cache: TurboQuantCache) -> "Held":
        """A copy of the cache, which goes its own way."""
        return Held(cache, [*cache.layers], [tokens.copy() for tokens in self.tokens], self.dtype)


class GrowingMachine(RuleBasedStateMachine):
    """A cache that grows.

    now:    the cache that is operated on
    copies: others, which are not to notice
    kept:   tensors that a cache handed out, with what they show
    """

    cache_class: Any = TurboQuantCache
    options: dict[str, Any] = {}
    num_layers, device = 1, "cpu"
    sequences: int | None = None  # that a cache is made for; None: it sees
    residuals: tuple[int, ...] = (0, 1, 16, 64, 128)

    # --------------------------------------------------------------------------------------------------- the start

    @initialize(
        preset=st.sampled_from(PRESETS), residual=st.integers(0, 4), sinks=st.sampled_from([0, 4]),
        dtype=st.sampled_from(DTYPES), attention=st.sampled_from(["turboquant", "sdpa"]),
        common=st.sampled_from([0, 20]), packs=st.sampled_from([True, True, True, False]),
        prompt=st.sampled_from([0, 1, 64, 130, 200, 300]), batch=st.integers(1, 2),
    )  # fmt: skip
    def make(self, preset, residual, sinks, dtype, attention, common, packs, prompt, batch):
        """A cache knows its model's config and its options; it learns all else from the first tokens.

        common: how large is what all keys have in common
        prompt: tokens that it begins with
        """
        self.config = LlamaConfig(
            hidden_size=QUERY_HEADS * DIM, intermediate_size=32, vocab_size=8, num_hidden_layers=self.num_layers,
            num_attention_heads=QUERY_HEADS, num_key_value_heads=HEADS,
        )  # fmt: skip
        self.config._attn_implementation = attention
        self.module, self.random = torch.nn.Module().eval(), torch.Generator()
        self.module.num_key_value_groups, self.module.is_causal = QUERY_HEADS // HEADS, True
        self.common = common * torch.randn(HEADS, DIM, generator=self.random.manual_seed(0)).to(self.device)
        residual = self.residuals[residual % len(self.residuals)]
        options = dict(residual_length=residual, sink_tokens=sinks, skip_layers=() if packs else (0,))
        cache = self.make_cache(preset, **options)
        self.now = Held(cache, [*cache.layers], [Tokens(self.common) for _ in cache.layers], dtype)
        self.copies: list[Held] = []
        self.kept: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.may_pack = False
        if prompt:
            self.forward(prompt, batch, (0, 0), "random", ATTENDS, 0)

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

    def draw(self, seed: int, batch: int, count: int, repeated: bool = False) -> list[torch.Tensor]:
        """New keys and values, [B, H_kv, T, D], and queries."""
        self.random.manual_seed(seed)
        parts = torch.randn(4, batch, HEADS, count, DIM, generator=self.random).to(self.device)
        if repeated:
            parts[:2] = parts[:2, :, :, :1].clone()
        query = torch.stack([parts[2], parts[3]], dim=2).flatten(1, 2)
        return [x.to(self.now.dtype) for x in (parts[0] + self.common[:, None], parts[1].clone(), query)]

    def attend(self, query: torch.Tensor, pair: Any, mask: torch.Tensor | None) -> torch.Tensor:
        return turboquant_attention(self.module, query, *pair, mask)[0]

    def roundings(self, by_sdpa: bool) -> Roundings:
        """Of attention; sdpa rounds its operands, the reference does not."""
        return (Roundings.of_kernels if by_sdpa else Roundings.of_reference)(self.now.dtype)

    def refused(self, errors: Any, operation: Callable[[], Any]) -> None:
        """It raises; that nothing has changed the invariants show."""
        try:
            operation()
        except errors:
            return
        raise AssertionError(f"expected an error of {errors}")

    # ------------------------------------------------------------------------------------------------------- tokens

    @rule(
        count=st.sampled_from(COUNTS), batch=st.integers(1, 2),
        padding=st.sampled_from([(0, 0)] * 3 + [(0, 90), (5, 200)]),
        content=st.sampled_from(["random", "random", "random", *known("one token repeated"), "with a NaN"]),
        then=st.sampled_from([ATTENDS, ATTENDS, ATTENDS, READS, FAILS, *known(KEEPS, *CHANGES)]), seed=seeds,
    )  # fmt: skip
    def forward(self, count, batch, padding, content, then, seed):
        """A model's forward: what it hands over is held, and read exactly; what was held is read as it is held."""
        starts = torch.tensor([min(start, count - 1) for start in padding])
        if self.length:
            batch, starts = self.batch, self.now.tokens[0].starts
        elif self.room and self.storage.states is not None and "another batch after reset" in KNOWN_FAULTS:
            batch = self.storage.batch_size
        elif self.sequences is not None:
            batch = self.sequences
        if self.length + count > (self.room or MOST_TOKENS):
            count = 1
        spoiled = content == "with a NaN" and not starts.any() and self.length + count > 1  # sdpa gives 0 for one alone
        for index in range(len(self.now.layers)):
            keys, values, query = self.draw(seed + index, batch, count, content == "one token repeated")
            if spoiled:
                (keys, values)[seed % 2][0, 0, seed // 2 % count, 3] = torch.nan
            self.update(index, keys, values, query, starts[:batch], then, seed)
        self.may_pack = True

    def update(self, index, keys, values, query, starts, then, seed) -> None:
        """One layer's part of a forward."""
        tokens, storage, count = self.now.tokens[index], self.now.layers[index].storage, keys.shape[2]
        if self.room is not None and self.length + count > self.room:
            return self.refused(ValueError, lambda: self.cache.update(keys, values, index))
        width, offset = self.cache.get_mask_sizes(count, index)
        is_step = count == 1 and width == self.room  # one that may be in a graph: all there is room for is handed out
        by_sdpa = not (is_step or tokens.packed)
        pair = self.cache.update(keys, values, index)
        tokens.append((keys, values), starts)
        assert offset == 0 and all(x.shape[2] == width for x in pair) and pair[0].dtype == self.now.dtype
        if is_step and then != STEPS:  # attention comes when all is done, also the packing
            tokens.check(storage.view(), True, storage.residual_length, storage.preset.center)
        read = [*tokens.read]
        if then in (ATTENDS, STEPS, *CHANGES):
            mask = tokens.mask(count, width)
            given = (mask, torch.where(mask, 0.0, -torch.inf).to(keys.dtype), None)[seed % (2 if starts.any() else 3)]
            if then in CHANGES:
                pair, read = CHANGES[then](pair, read)
            out = self.attend(query, pair, given)
            if then != STEPS:
                check_attention(out, query, read, mask[..., : tokens.length], self.roundings(by_sdpa))
        elif then == READS:
            for x, expected in zip(pair, read, strict=True):
                check_handed_out(x[:, :, : tokens.length] + 0, expected)
        elif then == KEEPS and not is_step:
            self.kept += [*zip(pair, read, strict=True)]

    @rule(count=st.integers(2, 70), seed=seeds)
    @precondition(lambda self: 0 < self.length <= MOST_TOKENS)
    def steps(self, count, seed):
        """Single tokens, one after the other."""
        count = min(count, self.room - self.length) if self.room else count
        for i in range(count):
            if i == count - 1:
                self.now.check(may_pack=True)
            self.forward(1, 1, (0, 0), "random", ATTENDS if i == count - 1 else STEPS, seed + i)

    @rule(counts=st.lists(st.sampled_from([1, 3, 70]), min_size=1, max_size=2), seed=seeds)
    @precondition(lambda self: "gradients" not in KNOWN_FAULTS and self.length < MOST_TOKENS)
    def train(self, counts, seed):
        """Gradients are those of attention over the tensors, or refused."""
        held, pairs, out = self.now.twin(copy.deepcopy(self.cache)), [], 0.0
        batch = self.batch if self.length else 1
        read = held.tokens[0].read
        try:
            for i, count in enumerate(counts):
                keys, values, query = (x.requires_grad_() for x in self.draw(seed + i, batch, count))
                mask = torch.ones(1, 1, count, held.tokens[0].length + count, dtype=torch.bool).tril(
                    held.tokens[0].length
                )
                held.tokens[0].append((keys, values), torch.zeros(batch, dtype=torch.int64))
                pairs.append((keys, values, query, mask))
                out = out + self.attend(query, held.cache.update(keys, values, 0), None).sum()
            out.backward()
        except REFUSALS:
            return
        twins = [[x.detach().double().requires_grad_() for x in pair[:3]] for pair in pairs]
        total = 0.0
        for i, (_, _, query, mask) in enumerate(pairs):
            given = [
                torch.cat([*read[role : role + 1], *(twin[role] for twin in twins[: i + 1])], dim=2) for role in (0, 1)
            ]
            given = [x.repeat_interleave(QUERY_HEADS // HEADS, dim=1) for x in given]
            total = total + torch.nn.functional.scaled_dot_product_attention(twins[i][2], *given, mask).sum()
        total.backward()
        for pair, twin in zip(pairs, twins, strict=True):
            for x, y in zip(pair, twin, strict=False):
                assert x.grad is not None and (x.grad - y.grad).norm() <= 0.05 * y.grad.norm() + 1e-3

    # ------------------------------------------------------------------------------------- whole tokens and sequences

    @rule(count=st.integers(0, 70), all_of_them=st.integers(0, 9))
    def crop(self, count, all_of_them):
        """The newest tokens go, and packed ones stay packed."""
        count = self.length if not all_of_them else min(count, self.length)
        if self.room and count not in (0, self.length):
            return self.refused(NotImplementedError, lambda: self.cache.crop(-count))
        self.cache.crop(-count)
        for tokens in self.now.tokens:
            tokens.crop(tokens.length - count)

    @rule(how=st.sampled_from(["reorder", "int", "bool", *known("selected by a list")]), seed=seeds)
    @precondition(lambda self: self.length)
    def select(self, how, seed):
        """Sequences in another order, some of them, some more than once."""
        self.random.manual_seed(seed)
        rows = torch.randint(0, self.batch, (1 + seed % 3,), generator=self.random)
        if how == "reorder" or self.room:
            rows = torch.randint(0, self.batch, (self.batch,), generator=self.random)
        chosen: Any = rows
        if how == "bool":
            chosen = torch.zeros(self.batch, dtype=torch.bool).index_fill_(0, rows, True)
            rows = chosen.nonzero()[:, 0]
        if self.room and len(rows) != self.batch:
            return self.refused(NotImplementedError, lambda: self.cache.batch_select_indices(chosen))
        if how == "selected by a list":
            chosen = [rows.tolist(), tuple(rows.tolist()), rows.numpy()][seed % 3]
        (self.cache.reorder_cache if how == "reorder" else self.cache.batch_select_indices)(chosen)
        for tokens in self.now.tokens:
            tokens.rows(rows)

    @rule(repeats=st.integers(1, 2))
    @precondition(lambda self: self.length and self.batch < 3)
    def repeat(self, repeats):
        """Each sequence more than once: its copies go their own ways from here."""
        if self.room:
            return self.refused(NotImplementedError, lambda: self.cache.batch_repeat_interleave(repeats))
        self.cache.batch_repeat_interleave(repeats)
        rows = torch.arange(self.batch).repeat_interleave(repeats)
        for tokens in self.now.tokens:
            tokens.rows(rows)

    @rule(dtype=st.sampled_from(DTYPES))
    @precondition(lambda self: not (self.just_loaded and "reset after a load" in KNOWN_FAULTS))
    def reset(self, dtype):
        """A cache as it was in the beginning; what comes next may be of any batch size and dtype."""
        self.cache.reset()
        for tokens in self.now.tokens:
            tokens.clear()
        if not self.room or "another batch after reset" not in KNOWN_FAULTS:
            self.now.dtype = dtype

    # ------------------------------------------------------------------------------------------- elsewhere, and back

    @rule(how=st.sampled_from(["deepcopy", "pickle", "shallow"]), go_on_with=st.sampled_from(["copy", "original"]))
    @precondition(lambda self: len(self.copies) < 2)
    def copy(self, how, go_on_with):
        """A copy shows the same, and neither notices what becomes of the other; a shallow one is the same."""
        if how == "shallow":
            self.copies.append(Held(copy.copy(self.cache), self.now.layers, self.now.tokens, self.now.dtype))
            return
        cache = copy.deepcopy(self.cache) if how == "deepcopy" else pickle.loads(pickle.dumps(self.cache))
        twin = self.now.twin(cache)
        self.copies.append(self.now if go_on_with == "copy" else twin)
        self.now = twin if go_on_with == "copy" else self.now

    @rule()
    @precondition(lambda self: self.copies)
    def forget_a_copy(self):
        self.copies.pop(0)

    @rule(length=st.integers(1, 400), whole=st.booleans())
    @precondition(lambda self: self.length)
    def save_and_load(self, length, whole):
        """A folder gives back the same bits, of all tokens or of the first ones."""
        length = None if whole or self.room else min(length, self.length)  # fewer may be fewer than are packed
        options = {name: x for name, x in self.options.items() if name in ("max_cache_len", "offloading", "backend")}
        with tempfile.TemporaryDirectory() as folder:
            self.cache.save_pretrained(folder)
            loaded = self.cache_class.from_pretrained(folder, self.config, length=length, **options)
        self.now = self.now.twin(loaded)
        for tokens in self.now.tokens:
            tokens.crop(length or tokens.length)

    @rule()
    def offload_and_prefetch(self):
        """Whole layers to the host and back, as transformers offloads them; those that cannot be say so."""
        for layer in self.now.layers:
            if layer.storage.waits:  # for queries, where it is
                continue
            if self.room or isinstance(layer.storage, OffloadedStorage):
                return self.refused(NotImplementedError, layer.offload)
            layer.offload()
            layer.prefetch()

    @rule()
    def another_attention_function(self):
        """A model may change it at any time."""
        other = {"sdpa": "turboquant", "turboquant": "sdpa"}
        self.cache.config._attn_implementation = other[self.cache.config._attn_implementation]

    # ----------------------------------------------------------------------------------------------- what is refused

    @rule(
        what=st.sampled_from(["batch", "dtype", "heads", "head_dim", "tokens", "dimensions"]),
        count=st.sampled_from([1, 70]),
    )
    @precondition(lambda self: self.length)
    def update_of_other_tensors(self, what, count):
        """They fit what is held and each other, or nothing happens."""
        shape, value_tokens, dtype = [self.batch, HEADS, count, DIM], count, self.now.dtype
        shape[{"batch": 0, "heads": 1, "head_dim": 3}.get(what, 2)] += what in ("batch", "heads") or 32 * (
            what == "head_dim"
        )
        dtype = torch.float64 if what == "dtype" else dtype
        keys = torch.zeros(shape, dtype=dtype, device=self.device)
        values = keys[0] if what == "dimensions" else keys[:, :, :0] if what == "tokens" else keys
        self.refused(ValueError, lambda: self.cache.update(keys, values, 0))

    @rule()
    @precondition(lambda self: self.length)
    def crop_and_select_of_what_is_not_there(self):
        self.refused(ValueError, lambda: self.cache.crop(-self.length - 1))
        if not CROP_TAKES_LENGTH:
            self.refused(ValueError, lambda: self.cache.crop(1))
        rows = torch.full((self.batch,), self.batch)
        self.refused(IndexError, lambda: self.cache.batch_select_indices(rows))

    # -------------------------------------------------------------------------------------------------- what is kept

    @rule()
    @precondition(lambda self: self.length and KEEPS not in KNOWN_FAULTS)
    def keep_the_keys_and_values_of_a_layer(self):
        layer, tokens = self.now.layers[-1], self.now.tokens[-1]
        self.kept += [*zip((layer.keys, layer.values), tokens.read, strict=True)]

    @rule()
    @precondition(lambda self: self.kept)
    def look_at_what_was_kept(self):
        """A tensor that a cache handed out shows what it showed, whatever became of the cache."""
        for x, expected in self.kept:
            check_handed_out(x[:, :, : expected.shape[2]] + 0, expected)
        self.kept.clear()

    @invariant()
    def caches_hold_what_they_were_given(self):
        self.now.check(self.may_pack)
        self.may_pack = False
        for held in self.copies:
            held.check()
