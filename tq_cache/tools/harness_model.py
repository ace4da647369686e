"""The model "tq-cache" of lm-evaluation-harness (lm_eval), registered by the import: its "hf" under a TurboQuantCache.

Tasks that generate go through `tq_cache.enable`.  Those that score given text put its context into the cache first
(`continuations`): the one forward that "hf" makes has no past.  Needs lm-eval.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from tqdm import tqdm
from transformers import DynamicCache

from ..cache import TurboQuantCache
from ..generation import disable, enable
from .continuations import EXACT, Likelihood, likelihoods


@register_model("tq-cache")
class CachedLM(HFLM):
    """lm-evaluation-harness's "hf" under a cache.

    preset:        of `TurboQuantCache`; "16bit" is transformers' DynamicCache, measured in the same way
    cache_options: as those of `enable`
    others:        as those of "hf"; `batch_size` counts for generation, contexts that are scored go through one by one

    Raises NotImplementedError for encoder-decoders, whose contexts are not in the cache, and what `enable` raises.
    """

    def __init__(
        self, *args: Any, preset: str = "tq4", cache_options: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        if self.backend != "causal":
            raise NotImplementedError(
                "expected a decoder, got an encoder-decoder, whose context is not in its cache; give the model "
                'to "hf" after tq_cache.enable(model)'
            )
        self.preset = preset
        self.cache_options = dict(cache_options or {})
        disable(self.model)
        if preset != EXACT:
            enable(self.model, preset, **self.cache_options)

    def make_cache(self) -> DynamicCache:
        """An empty cache that grows, for one context."""
        if self.preset == EXACT:
            return DynamicCache(config=self.model.config)
        options = {name: option for name, option in self.cache_options.items() if name != "max_cache_len"}
        return TurboQuantCache(self.model.config, self.preset, **options)

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """Of requests (texts, context tokens, continuation tokens): those of one context at once."""
        groups: dict[tuple[int, ...], list[int]] = {}
        for index, (_, context, continuation) in enumerate(requests):
            room = self.max_length + 1 - len(continuation)
            if room < 1:
                raise ValueError(
                    f"expected continuations of at most {self.max_length} tokens (max_length), got {len(continuation)}"
                )
            groups.setdefault(tuple(context[-room:]), []).append(index)
        found: dict[int, Likelihood] = {}
        for context, indices in tqdm(groups.items(), desc="Scoring under the cache", disable=disable_tqdm):
            scored = likelihoods(self.model, context, [requests[i][2] for i in indices], self.make_cache())
            for index, likelihood in zip(indices, scored, strict=True):
                found[index] = likelihood
                if (texts := requests[index][0]) is not None:
                    self.cache_hook.add_partial("loglikelihood", texts, tuple(likelihood))
        return [(found[index].logprob, found[index].greedy) for index in range(len(requests))]
