"""What a prefill takes at its peak beside weights and cache, from a config alone: its operations, run without memory.

The model is built on the meta device, where tensors have shapes and no content, and run once.  Every tensor that an
operation makes is counted until it is freed: what Python still refers to is held here as it is on a GPU.  Not counted
is what a kernel takes for itself while it runs (a workspace of cuBLAS), nor the steps that dequantise weights; where a
package brings kernels of its own (linear attention, experts), what they save is not known here.
"""

import copy
import weakref
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    DynamicCache,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.masking_utils import sdpa_mask

from ..compat import decoder_config

FUSED_ATTENTION = "tq_fused_shapes"
MODELS = (
    (MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM),
    (MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, AutoModelForImageTextToText),
)


def prefill_bytes(config: PreTrainedConfig, tokens: int, batch: int = 1) -> int:
    """Most bytes of activations at any one time of a forward of `batch` prompts of `tokens` tokens each.

    Beside weights, input ids and whatever the cache holds; logits of the last token only, as `generate()` asks for;
    attention forms no matrix of scores, unless the model knows no other than its own (Bloom, CodeGen, ...), but a mask
    where the model makes one (a sliding window shorter than the prompt: tokens x tokens bytes).  In the dtype of the
    config, bfloat16 where it names none.  Of a prompt in chunks (`generate(prefill_chunk_size=...)`), `tokens` is the
    size of one.

    Raises ValueError unless tokens and batch are positive, and NotImplementedError, with the reason, where it cannot be
    known from shapes alone: no causal language model of this config, an encoder-decoder, or operations whose shapes
    depend on the content of tensors.
    """
    return Prefill(config, batch).measure(tokens)


class Prefill:
    """Prefills of one model and batch size, as of `prefill_bytes`, for many lengths: the model is built once."""

    def __init__(self, config: PreTrainedConfig, batch: int = 1) -> None:
        self.config, self.batch = config, batch
        self._model: PreTrainedModel | None = None
        self._measured: dict[int, int] = {}  # bytes by tokens

    def weight_bytes(self) -> int:
        """Bytes of the model's parameters, in the dtype of the config.  Raises NotImplementedError where no class of
        the config is known."""
        return sum(parameter.nbytes for parameter in self._built().parameters())

    def measure(self, tokens: int) -> int:
        """Bytes at the peak of this length; raises what `prefill_bytes` does."""
        if tokens < 1 or self.batch < 1:
            raise ValueError(f"expected tokens and batch of 1 or more, got {tokens} and {self.batch}")
        if tokens in self._measured:
            return self._measured[tokens]
        if getattr(self.config, "is_encoder_decoder", False):
            raise NotImplementedError(_unknown(self.config) + "its prompt goes through an encoder")
        model = self._built()
        try:
            with torch.device("meta"):
                self._measured[tokens] = forward_peak(model, torch.empty(self.batch, tokens, dtype=torch.long))
        except Exception as error:  # whatever the code of a model raises where it looks into tensors
            raise _not_on_shapes(self.config, "forward cannot be run", error) from error
        return self._measured[tokens]

    def bracket(self, tokens: int) -> None:
        """Measure what `estimate` needs up to this length."""
        self.measure(1)
        if max(self._measured) < tokens:
            self.measure(tokens)

    def estimate(self, tokens: int) -> int:
        """On the straight line between the nearest lengths measured; see `bracket`.

        Peaks are sums of terms in tokens and tokens², so the line lies above them: rather too much than too little.
        """
        low = max(x for x in self._measured if x <= tokens)
        high = min(x for x in self._measured if x >= tokens)
        at_low, at_high = self._measured[low], self._measured[high]
        return at_low if low == high else at_low + -(-(at_high - at_low) * (tokens - low) // (high - low))

    def slope(self, tokens: int) -> float:
        """Bytes per token between a length measured and the next shorter one; 0 without."""
        low = max((x for x in self._measured if x < tokens), default=tokens)
        return (self._measured[tokens] - self._measured[low]) / max(tokens - low, 1)

    def _built(self) -> PreTrainedModel:
        if self._model is None:
            decoder = decoder_config(self.config)
            known = ((x, auto) for x in (self.config, decoder) for mapping, auto in MODELS if type(x) in mapping)
            found, auto = next(known, (None, None))
            if found is None or auto is None:
                raise NotImplementedError(_unknown(self.config) + "transformers has no causal language model of it")
            try:
                with torch.device("meta"):
                    self._model = build_model(found, auto, model_dtype(self.config))
            except Exception as error:  # of any class: it is the model's own code
                raise _not_on_shapes(self.config, "model cannot be built", error) from error
        return self._model


def model_dtype(config: PreTrainedConfig) -> torch.dtype:
    """The dtype of a config, bfloat16 where it names none."""
    return getattr(config, "dtype", None) or getattr(decoder_config(config), "dtype", None) or torch.bfloat16


def build_model(config: PreTrainedConfig, auto: Any, dtype: torch.dtype) -> PreTrainedModel:
    """The model that the auto class has for this config, whose attention forms no scores where it knows another way."""
    model_class = auto._model_mapping[type(config)]
    attention = "sdpa" if model_class._supports_sdpa else None  # None: its own
    if model_class._supports_attention_backend:
        attention = FUSED_ATTENTION
    config = copy.deepcopy(config)  # the auto class writes dtype and attention function into it
    return auto.from_config(config, dtype=dtype, attn_implementation=attention).eval()


def forward_peak(model: PreTrainedModel, input_ids: torch.Tensor) -> int:
    """Most bytes that operations of one forward of `input_ids` [B, S] hold at any one time, on any device.

    As of `prefill_bytes`; the attention function is to be `FUSED_ATTENTION`, or scaled_dot_product_attention called by
    the model itself, and gives no meaningful output.
    """
    options = {"logits_to_keep": 1} if model._supports_logits_to_keep() else {}
    cache = _HoldsNothing(config=model.config)
    with torch.no_grad(), _FusedAttention(), _LiveBytes() as counted:
        model(input_ids=input_ids, past_key_values=cache, use_cache=True, **options)
    return counted.peak


def _unknown(config: PreTrainedConfig) -> str:
    return f"the memory of a prefill of {type(config).__name__} is not known: "


def _not_on_shapes(config: PreTrainedConfig, what: str, error: Exception) -> NotImplementedError:
    reason = " ".join(str(error).split())[:200]
    return NotImplementedError(
        f"{_unknown(config)}its {what} on shapes alone ({type(error).__name__}: {reason}); "
        "measure it, with torch.cuda.max_memory_allocated()"
    )


class _LiveBytes(TorchDispatchMode):
    """Counts bytes of the storages that operations make, as long as they live; `peak` is the most there were.

    Views and results in place add nothing, nor do tensors that there were before.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for storage in _storages((args, kwargs)):
            self._known[storage] = True
        out = func(*args, **(kwargs or {}))
        for storage in _storages(out):
            if storage not in self._known:
                self._known[storage] = True
                self.now += storage.nbytes()
                weakref.finalize(storage, self._free, storage.nbytes())
        self.peak = max(self.peak, self.now)
        return out

    def _free(self, nbytes: int) -> None:
        self.now -= nbytes


def _storages(tree: Any) -> list[torch.UntypedStorage]:
    return [x.untyped_storage() for x in tree_leaves(tree) if isinstance(x, torch.Tensor)]


class _FusedAttention(TorchFunctionMode):
    """Answers scaled_dot_product_attention by its output's shape: what the meta device runs would form the scores.

    And `pad_token_id in input_ids`, with which models look for padding: there is none.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.__contains__:
            return False
        if func is not torch.nn.functional.scaled_dot_product_attention:
            return func(*args, **kwargs)
        given = dict(zip(("query", "key", "value"), args, strict=False)) | kwargs
        return given["query"].new_empty(*given["query"].shape[:-1], given["value"].shape[-1])


class _HoldsNothing(DynamicCache):
    """An empty cache that hands back keys and values, and keeps none of them: its memory is planned elsewhere."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return key_states, value_states


def _fused_shapes(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any
) -> tuple[torch.Tensor, None]:
    """An attention function that makes its output [B, S, H_q, D_v], without content, and nothing else."""
    batch, heads, length, _ = query.shape
    return query.new_empty(batch, length, heads, value.shape[-1]), None


def _mask_without_padding(*args: Any, attention_mask: torch.Tensor | None = None, **kwargs: Any) -> torch.Tensor | None:
    """sdpa's mask.  Some models make a padding mask of ones themselves, into which it would look."""
    return sdpa_mask(*args, **kwargs)


AttentionInterface.register(FUSED_ATTENTION, _fused_shapes)
AttentionMaskInterface.register(FUSED_ATTENTION, _mask_without_padding)
