"""What happens to a cache beside the forwards of a model (`random_operations`), as rules."""

import copy
import pickle
import tempfile
from typing import Any

import torch
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule
from random_operations import DIM, HEADS, KEEPS, KNOWN_FAULTS, MOST_TOKENS, CacheMachine, known, seeds
from token_list import check_gradients, check_handed_out

from tq_cache.compat import CROP_TAKES_LENGTH
from tq_cache.storage.offloaded import OffloadedStorage


class GrowingMachine(CacheMachine):
    """A cache that grows, and all that one may do with it; of what other ways cannot they say so."""

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

    @rule(dtype=st.integers(0, 2), common=st.sampled_from([0, 20]))
    @precondition(lambda self: not (self.just_loaded and "reset after a load" in KNOWN_FAULTS))
    def reset(self, dtype, common):
        """A cache as it was in the beginning: what comes next is another text, of any batch size and dtype."""
        self.cache.reset()
        for tokens in self.now.tokens:
            tokens.clear()
            tokens.common = self.in_common(common)
        if not self.room or "another batch after reset" not in KNOWN_FAULTS:
            self.now.dtype = self.dtypes[dtype % len(self.dtypes)]

    # ------------------------------------------------------------------------------------------- elsewhere, and back

    @rule(how=st.sampled_from(["deepcopy", "pickle", "shallow"]), go_on_with=st.sampled_from(["copy", "original"]))
    @precondition(lambda self: len(self.copies) < 2)
    def copy(self, how, go_on_with):
        """A copy shows the same, and neither notices what becomes of the other; a shallow one is the same."""
        if how == "shallow":
            shallow = copy.copy(self.cache)
            assert shallow.layers is self.cache.layers
            self.now.cache = shallow
            return
        self.now.check()
        cache = copy.deepcopy(self.cache) if how == "deepcopy" else pickle.loads(pickle.dumps(self.cache))
        twin = self.now.twin(cache)
        twin.check()
        stays, self.now = (self.now, twin) if go_on_with == "copy" else (twin, self.now)
        self.copies.append(stays.keep_bits())

    @rule()
    @precondition(lambda self: self.copies and self.copies[0].cache is not None)
    def go_on_with_a_copy(self):
        self.copies.append(self.now.keep_bits())
        self.now = self.copies.pop(0)

    @rule(length=st.integers(1, 400), whole=st.booleans())
    @precondition(lambda self: self.length)
    def save_and_load(self, length, whole):
        """A folder gives back the same bits, of all tokens or of the first ones."""
        length = None if whole or self.room else min(length, self.length)  # fewer may be fewer than are packed
        options = {name: x for name, x in self.options.items() if name in ("max_cache_len", "offloading", "backend")}
        with tempfile.TemporaryDirectory() as folder:
            self.cache.save_pretrained(folder)
            loaded = self.cache_class.from_pretrained(folder, self.config, length=length, device=self.device, **options)
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
        what=st.sampled_from(["batch", "dtype", "heads", "head_dim", "tokens", "dimensions"]), count=st.integers(1, 70)
    )
    @precondition(lambda self: self.length)
    def update_of_other_tensors(self, what, count):
        """They fit what is held and each other, or nothing happens."""
        sizes = dict(batch=self.batch, heads=HEADS, tokens=count, head_dim=DIM)
        shape = [size * 2 if name == what else size for name, size in sizes.items()]
        keys = torch.zeros(shape, dtype=torch.float64 if what == "dtype" else self.now.dtype, device=self.device)
        values = keys[0] if what == "dimensions" else keys[:, :, :count] if what == "tokens" else keys
        self.refused(ValueError, lambda: self.cache.update(keys, values, 0))

    @rule()
    @precondition(lambda self: self.length)
    def crop_and_select_of_what_is_not_there(self):
        self.refused(ValueError, lambda: self.cache.crop(-self.length - 1))
        if not CROP_TAKES_LENGTH:
            self.refused(ValueError, lambda: self.cache.crop(1))
        if self.device == "cpu":  # an index that is out of range ends a process on a GPU
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
        self.may_pack = True  # tokens that waited for queries: whoever asked for the tensor keeps these to itself

    @rule(counts=st.lists(st.sampled_from([1, 3, 70]), min_size=1, max_size=2), seed=seeds)
    @precondition(lambda self: "gradients" not in KNOWN_FAULTS and self.length < MOST_TOKENS)
    @precondition(lambda self: self.now.dtype == torch.float32)
    def train(self, counts, seed):
        """Gradients are those of attention over tensors, or refused; in float32, where rounding hides none."""
        cache, batch, parts, outs = copy.deepcopy(self.cache), self.batch if self.length else 1, [], []
        held = self.now.tokens[0]
        if self.length and (held.starts.any() or any(x.isnan().any() for x in held.read)):
            return
        try:
            for i, count in enumerate(counts):
                parts.append([x.requires_grad_() for x in self.draw(seed + i, batch, count)])
                outs.append(self.attend(parts[-1][2], cache.update(*parts[-1][:2], 0), None))
            sum(out.sum() for out in outs).backward()
        except (RuntimeError, ValueError):
            return
        check_gradients(parts, held.read)
