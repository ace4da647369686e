"""Records of how a model expands latents: of transformers' own code, and what else is done with them."""

import ast
import warnings

import pytest
import torch
from latent_models import EXPANDING_MODELS, MODELS_FOLDER, latent_model
from torch import nn

from tq_cache import TurboQuantCache
from tq_cache.hf import latent
from tq_cache.hf.absorbed import absorption
from tq_cache.hf.latent import Joined, Part, Record, plain_record

# `expand_kv` without its docstring and comments: what the records were written for.
EXPAND_KV = """
batch_size, _, seq_length, _ = kv_nope.shape
key_shape = (batch_size, seq_length, -1, self.qk_nope_head_dim + self.v_head_dim)
kv_nope = self.kv_b_proj(kv_nope).view(key_shape).transpose(1, 2)
k_nope, value_states = torch.split(kv_nope, [self.qk_nope_head_dim, self.v_head_dim], dim=-1)
k_rot = k_rot.expand(-1, k_nope.shape[1], -1, -1)
key_states = kv_nope.new_empty(*kv_nope.shape[:-1], self.qk_nope_head_dim + self.qk_rope_head_dim)
key_states[..., :self.qk_nope_head_dim].copy_(k_nope)
key_states[..., self.qk_nope_head_dim:].copy_(k_rot)
return (key_states, value_states)
"""


@pytest.fixture(autouse=True)
def fresh_warnings():
    latent._warn.cache_clear()


def expansions() -> dict[str, str]:
    """The syntax tree of `expand_kv`, written out, by folder of transformers."""
    found = {}
    for path in sorted(MODELS_FOLDER.glob("*/modeling_*.py")):
        text = path.read_text()
        if "def expand_kv" not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef) and node.name == "expand_kv":
                assert [x.arg for x in node.args.args] == ["self", "kv_nope", "k_rot"]
                found[path.parent.name] = ast.unparse(ast.Module(node.body[1:], []))
    return found


def test_expand_kv_is_what_the_records_were_written_for():
    found = expansions()
    assert set(found) == set(EXPANDING_MODELS), "other models of transformers expand latents: add them to latent_models"
    for name, code in found.items():
        assert code.strip() == EXPAND_KV.strip(), name


# ---------------------------------------------------------------------------------------------------- one attention


def attention_of(model) -> nn.Module:
    return model.model.layers[0].self_attn


def update(model, tokens: int = 150, **options):
    """What a cache gives for random latents, and the tensors that it stands for: dequantised, where it packs."""
    cache = TurboQuantCache(model.config, "tq4", residual_length=64, **options)
    generator = torch.Generator().manual_seed(1)
    new = [torch.randn(2, 1, tokens, dim, generator=generator) for dim in (64, 32)]
    for first, last in ((0, 140), (140, tokens)):  # the second sees packed tokens
        pair = cache.update(*(x[:, :, first:last] for x in new), 0)
        if isinstance(pair[0], Record) and not first:
            pair[0].update.view.observe(None, None)
    return cache, pair, (cache.layers[0].keys, cache.layers[0].values)


@pytest.mark.parametrize("max_cache_len", [None, 192])
def test_records_end_at_attention(max_cache_len):
    model = latent_model("deepseek_v3")
    attention = attention_of(model)
    cache, pair, exact = update(model, 141, max_cache_len=max_cache_len)
    assert all(isinstance(x, Record) and not isinstance(x, torch.Tensor) for x in pair)
    key, value = attention.expand_kv(*pair)
    assert isinstance(key, Joined) and isinstance(value, Part)
    expected = attention.expand_kv(*exact)
    room = (141 if max_cache_len is None else 192) - 141
    query = torch.randn(2, 4, 1, 64)
    found = absorption(query, key, value)
    assert found is not None and found.update is pair[0].update and cache.layers[0].path == ""
    for record, tensor in zip((key, value), expected, strict=True):
        assert record.shape == (*tensor.shape[:2], 141 + room, tensor.shape[3])
        assert record.dtype == tensor.dtype and record.device == tensor.device
    with pytest.warns(UserWarning, match="latents are dequantised and expanded"):
        made = plain_record(key), plain_record(value)
    for tensor, other in zip(made, expected, strict=True):
        torch.testing.assert_close(tensor[:, :, :141], other)
    assert absorption(query, key, value) is None  # what was handed out may have been written to


OPERATIONS = {
    "sum of keys": lambda a, latents, rotary: a.expand_kv(latents, rotary)[0].sum(-1),
    "keys times two": lambda a, latents, rotary: a.expand_kv(latents, rotary)[0] * 2,
    "two plus values": lambda a, latents, rotary: 2 + a.expand_kv(latents, rotary)[1],
    "tensor times values": lambda a, latents, rotary: torch.full((), 3.0) * a.expand_kv(latents, rotary)[1],
    "part of values": lambda a, latents, rotary: a.expand_kv(latents, rotary)[1][:, 1, 3:, ::2],
    "keys written to": lambda a, latents, rotary: write(a.expand_kv(latents, rotary)[0]),
    "keys cast": lambda a, latents, rotary: a.expand_kv(latents, rotary)[0].to(torch.float64),
    "keys joined": lambda a, latents, rotary: torch.cat([a.expand_kv(latents, rotary)[0]] * 2, dim=2),
    "another view": lambda a, latents, rotary: a.kv_b_proj(latents).view(2, -1, 8, 32),
    "another transpose": lambda a, latents, rotary: a.kv_b_proj(latents).view(2, 150, 4, 64).transpose(1, 3),
    "another split": lambda a, latents, rotary: torch.split(heads(a, latents), [16, 16, 32], dim=-1)[1],
    "a split of equal parts": lambda a, latents, rotary: torch.split(heads(a, latents), 16, dim=-1)[1],
    "a method": lambda a, latents, rotary: heads(a, latents).split([32, 32], dim=-1)[0] + 1,
    "new memory": lambda a, latents, rotary: heads(a, latents).new_empty(3, 5).fill_(1),
    "memory of a type": lambda a, latents, rotary: heads(a, latents).new_empty(2, dtype=torch.int8).fill_(1),
    "latents normalised": lambda a, latents, rotary: torch.nn.functional.normalize(latents, dim=-1),
    "a linear map of rotary keys": lambda a, latents, rotary: torch.nn.functional.linear(rotary, torch.ones(3, 32)),
    "rotary keys of other shape": lambda a, latents, rotary: rotary.expand(2, 2, 1, 150, 32),
    "rotary keys joined": lambda a, latents, rotary: torch.cat([latents, rotary], dim=-1),
    "a matrix product": lambda a, latents, rotary: latents @ a.kv_b_proj.weight.mT,
    "flattened": lambda a, latents, rotary: a.kv_b_proj(latents).flatten(1).mean(),
}


def heads(attention, latents):
    return attention.kv_b_proj(latents).view(2, 150, -1, 64).transpose(1, 2)


def write(keys):
    keys[..., :3] = 1.0
    keys[..., 5:7].copy_(torch.zeros(1))
    keys[..., 7:].mul_(2)
    return keys.clone()


@pytest.mark.filterwarnings("ignore:latents are dequantised")
@pytest.mark.parametrize("operation", OPERATIONS)
@torch.no_grad()
def test_any_other_operation_is_done_with_tensors(operation):
    attention = attention_of(latent_model("deepseek_v3"))
    cache, pair, exact = update(latent_model("deepseek_v3"))
    expected = OPERATIONS[operation](attention, *exact)
    torch.testing.assert_close(OPERATIONS[operation](attention, *pair), expected)
    own = operation in ("new memory", "memory of a type")  # nothing is read
    why = "attention other than 'turboquant' takes" if "keys" in operation and "rotary" not in operation else ""
    assert cache.layers[0].path.startswith("" if own else f"expanded: {why or 'kv_b_proj is not a plain linear map'}")


# ------------------------------------------------------------------------------------------- what kv_b_proj may be


class Adapter(nn.Module):
    """As peft's LoRA on a linear layer."""

    def __init__(self, base: nn.Linear, rank: int = 4):
        super().__init__()
        self.base_layer, self.active = base, True
        self.down, self.up = (
            nn.Linear(base.in_features, rank, bias=False),
            nn.Linear(rank, base.out_features, bias=False),
        )
        nn.init.normal_(self.up.weight, std=0.1)

    def forward(self, x):
        result = self.base_layer(x)
        if not self.active:
            return result
        return result + self.up(self.down(x.to(self.down.weight.dtype))).to(result.dtype) * 0.5


class Identity(torch.autograd.Function):
    """As those of tensor parallelism, in front of a layer of which each rank has some rows."""

    @staticmethod
    def forward(context, x):
        return x

    @staticmethod
    def backward(context, gradient):
        return gradient


class Other(nn.Parameter):
    """A parameter that is no plain matrix, as those of bitsandbytes and torchao."""


def with_bias(linear):
    linear.bias = nn.Parameter(torch.randn(linear.out_features) * 0.1)


def with_type(linear):
    linear.weight = Other(linear.weight.data)


def with_hooks(linear):
    linear.register_forward_pre_hook(lambda _, args: (args[0].to("cpu", non_blocking=True).to(torch.float32),))
    linear.register_forward_pre_hook(lambda _, args: (Identity.apply(args[0]),))
    linear.register_forward_hook(lambda _, args, out: out.to("cpu"))


def adapted(linear, active: bool = True) -> Adapter:
    adapter = Adapter(linear)
    adapter.active = active
    return adapter


CHANGES = {
    "as it is": (lambda linear: None, "absorbed"),
    "hooks": (with_hooks, "absorbed"),
    "inactive adapter": (lambda linear: adapted(linear, False), "absorbed"),
    "adapter": (adapted, "expanded: kv_b_proj is not a plain linear map"),
    "bias": (with_bias, "expanded: kv_b_proj has a bias"),
    "type": (with_type, "expanded: the weight of kv_b_proj is a Other"),
}


def steps(model, **options):
    """Logits of a prompt, of two chunks and of single tokens; and the cache."""
    ids = torch.randint(3, 128, (2, 153), generator=torch.Generator().manual_seed(0))
    cache = TurboQuantCache(model.config, "tq4", residual_length=64, smooth=0.0, **options)
    sizes = [150, 1, 1, 1] if "max_cache_len" in options else [130, 20, 1, 1, 1]
    with torch.no_grad():
        return torch.cat([model(x, past_key_values=cache).logits for x in ids.split(sizes, 1)], dim=1), cache


@pytest.mark.parametrize("max_cache_len", [None, 160])
@pytest.mark.parametrize("change", CHANGES)
def test_what_cannot_be_absorbed_is_expanded_and_said_once(change, max_cache_len):
    latent_model.cache_clear()
    model = latent_model("deepseek_v3")
    apply, path = CHANGES[change]
    for layer in model.model.layers:
        layer.self_attn.kv_b_proj = apply(layer.self_attn.kv_b_proj) or layer.self_attn.kv_b_proj
    options = {} if max_cache_len is None else {"max_cache_len": max_cache_len}
    expected, _ = steps(model, absorb=False, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        logits, cache = steps(model, **options)
    assert ((logits - expected).norm() / expected.norm()) < 1e-5
    assert all(layer.path.startswith(path) for layer in cache.layers), [layer.path for layer in cache.layers]
    said = [str(x.message) for x in caught if "latents are dequantised" in str(x.message)]
    assert len(said) == (path != "absorbed")
    latent_model.cache_clear()


def test_autocast_is_expanded():
    model = latent_model("deepseek_v3")
    with torch.autocast("cpu", torch.bfloat16):
        expected, _ = steps(model, absorb=False)
        with pytest.warns(UserWarning, match="autocast is on; load the model in 16 bits"):
            logits, cache = steps(model)
    assert all("autocast" in layer.path for layer in cache.layers)
    assert ((logits - expected).norm() / expected.norm()) < 1e-2


def test_absorb_is_an_option():
    _, cache = steps(latent_model("deepseek_v3"), absorb=False)
    assert {layer.path for layer in cache.layers} == {"expanded: absorb=False"}
