"""The ways in which a cache holds tokens, as machines of random operations, and how sequences of them are run."""

import copy
import gc
import os
import sys
import warnings
from typing import Any

import hypothesis
import torch
from hypothesis import HealthCheck, Phase
from hypothesis import strategies as st
from hypothesis.stateful import rule, run_state_machine_as_test
from offloads import HostCache
from random_operations import DIM, HEADS, MODULE, Held, known, seeds
from random_rules import GrowingMachine
from token_list import Tokens
from transformers import CompileConfig, LlamaForCausalLM
from transformers.generation import GenerationMode

import tq_cache
from tq_cache import TurboQuantCache
from tq_cache.hf.attention import turboquant_attention

LENT = "memory that enable lent"
ROOM = 330  # tokens: little, so that it is met


class PreallocatedMachine(GrowingMachine):
    """Memory of a fixed size."""

    options = dict(max_cache_len=ROOM)
    residuals = (0, 64, 128)


class OffloadedMachine(GrowingMachine):
    """Packed tokens in host memory; two layers take turns."""

    cache_class = HostCache
    options = dict(offloading="packed")
    num_layers = 2
    residuals = (0, 16, 64)


class EnabledMachine(PreallocatedMachine):
    """The caches that an enabled model's `generate()` makes, one call after the other, in memory that is used again."""

    options = {}
    residuals = (64, 128)

    def make_cache(self, preset, skip_layers, **options):
        self.model = LlamaForCausalLM(self.config)
        tq_cache.enable(self.model, preset, max_cache_len=ROOM, skip_layers=skip_layers, **options)
        self.model.generation_config.compile_config = CompileConfig(fullgraph=True, backend="eager", mode=None)
        self.model.generation_config.compile_config._compile_all_devices = True
        return self.cache_of_a_call(1)

    def cache_of_a_call(self, batch: int) -> TurboQuantCache:
        kwargs: dict[str, Any] = {}
        mode = GenerationMode.GREEDY_SEARCH
        self.model._prepare_cache_for_generation(self.model.generation_config, kwargs, mode, batch, ROOM)
        return kwargs["past_key_values"]

    @rule(
        batch=st.integers(1, 2), keeps=st.sampled_from(["nothing", "the cache", *known(LENT, LENT)]),
        common=st.sampled_from([0, 20]), seed=seeds,
    )  # fmt: skip
    def another_call(self, batch, keeps, common, seed):
        """It begins with an empty cache, and changes nothing that somebody kept of the one before."""
        before, self.now = self.now, None
        if keeps == LENT:
            before.cache = copy.copy(before.cache) if seed % 2 else None  # the layers alone
        if keeps != "nothing" and len(self.copies) < 2:
            self.copies.append(before.keep_bits())
        dtype = before.dtype
        del before
        cache = self.cache_of_a_call(batch)
        self.now = Held(cache, [*cache.layers], [Tokens(self.in_common(common)) for _ in cache.layers], dtype)


class CompiledMachine(PreallocatedMachine):
    """Steps are compiled in one graph; sequence after sequence, in the memory of the first, as `enable` has it."""

    residuals, dtypes, only_batch = (64,), (torch.float32,), 2
    compiles: dict[str, Any] = dict(fullgraph=True, backend="eager")
    pool: dict[str, tuple[Any, Any]] = {}  # caches and their steps: compiling each anew would take too long

    def make_cache(self, preset, skip_layers, **options):
        name = f"{type(self).__name__} {preset}"
        if name not in self.pool:
            self.config._attn_implementation = "turboquant"
            cache = super().make_cache(preset, skip_layers=(), **options)

            def step(keys, values, query, mask):
                return turboquant_attention(MODULE, query, *cache.update(keys, values, 0), mask)[0]

            self.pool[name] = cache, torch.compile(step, **self.compiles)
        cache, self.compiled = self.pool[name]
        cache.config._attn_implementation = "turboquant"
        cache.reset()
        before = torch.randn(3, 2, HEADS, 130, DIM, generator=self.random.manual_seed(1)).to(
            self.device, self.dtypes[0]
        )
        turboquant_attention(MODULE, before[0].repeat_interleave(2, dim=1), *cache.update(*before[1:], 0), None)
        cache.reset()  # whatever text came before, nothing is left of it
        self.pooled = cache
        return cache

    def step(self, index, keys, values, query, mask):
        own = self.cache is self.pooled and self.cache.config._attn_implementation == "turboquant"
        if not own or mask is None or mask.dtype != torch.bool:
            return super().step(index, keys, values, query, mask)
        torch.compiler.cudagraph_mark_step_begin()
        return self.compiled(keys, values, query, mask).clone()  # the next step writes where it is


def run(machine: Any, sequences: int, part: int = 0, steps: int = 12, shrinks: bool = True) -> None:
    """Run this number of sequences of random operations, the same ones for the same part and the same `--seed`.

    shrinks: whether a failure is made as short as it can be, which takes minutes
    """
    seed = 1000 * int(os.environ.get("TQ_TEST_SEED", "0")) + part
    print(f"{machine.__name__}: {sequences} sequences of seed {seed}", file=sys.stderr)
    settings = hypothesis.settings(
        max_examples=sequences,
        stateful_step_count=steps,
        database=None,
        deadline=None,
        print_blob=True,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, *([Phase.shrink] if shrinks else [])],
    )
    gc.freeze()  # `enable` collects what is left of a call: not all that was imported, each time
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that nothing will be packed
            run_state_machine_as_test(hypothesis.seed(seed)(machine), settings=settings)
    finally:
        gc.unfreeze()
