"""Attention over latents: which way is taken, in how much memory, with which gradients; and what calibration sees."""

import pytest
import torch
from error_budget import exact_parts, relative_error
from latent_models import INDEXED, LATENT_MODELS, latent_model
from torch.nn import functional as F
from transformers import DynamicCache
from transformers.integrations import finegrained_fp8
from transformers.integrations.finegrained_fp8 import FP8Linear

import tq_cache
from tq_cache import TurboQuantCache
from tq_cache.backends import latents, reference
from tq_cache.backends.latents import KVProjection, attend_expanded
from tq_cache.backends.masks import causal, with_indices
from tq_cache.formats.presets import FORMATS, resolve_preset
from tq_cache.hf import latent
from tq_cache.storage import first_tokens
from tq_cache.storage.growing import GrowingStorage

HEADS, NOPE, VALUE, RANK, ROTARY = 3, 16, 24, 64, 32


def make_view(generator, length: int, sinks: int = 4, residual: int = 70, rotary_dim: int = ROTARY):
    preset = resolve_preset("tq4", smooth=0.0).for_latents(FORMATS["rotary"]["exact"])
    storage = GrowingStorage(preset, residual, sinks, "reference")
    new = (torch.randn(2, 1, length, dim, generator=generator, dtype=torch.float64) for dim in (RANK, rotary_dim))
    storage.append(*new)
    return storage.view()


def make_projection(generator) -> KVProjection:
    return KVProjection(torch.randn(HEADS, NOPE + VALUE, RANK, generator=generator, dtype=torch.float64) / 8, NOPE)


def dense_attention(query, view, projection, mask, scaling, softcap=None, sink_logits=None):
    """Everything expanded at once, in float64."""
    keys, values = projection.expand(*exact_parts(view))
    scores = query @ keys.mT * scaling
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    if sink_logits is not None:
        scores = torch.cat([scores, sink_logits[..., None].expand(*scores.shape[:3], 1)], dim=-1)
        values = F.pad(values, (0, 0, 0, 1))
    return torch.softmax(scores, dim=-1) @ values


def options_of(case: str, num_queries: int, length: int, generator):
    mask = causal(num_queries, length, torch.device("cpu")).repeat(2, 1, 1, 1)
    if case == "padding":
        mask[1, ..., :90] = False
        mask[1, :, : max(num_queries - length + 91, 0), 90] = True  # every query sees a token
        return mask, dict(mask=mask)
    if case == "float":
        bias = torch.randn(2, HEADS, num_queries, length, generator=generator, dtype=torch.float64)
        bias = bias.masked_fill(~mask, -torch.inf)
        return bias, dict(mask=bias)
    if case == "softcap, sinks":
        logits = torch.randn(1, HEADS, 1, generator=generator, dtype=torch.float64)
        return mask, dict(mask=None, softcap=2.0, sink_logits=logits)
    if case == "full":
        return torch.ones_like(mask), dict(mask=None, is_causal=False)
    return mask, dict(mask=None)


@pytest.mark.parametrize("pieces", [1, 5], ids=["whole", "pieces"])
@pytest.mark.parametrize("num_queries", [1, 50, 100, 333])  # more and fewer than the tail has, and all
@pytest.mark.parametrize("case", ["causal", "full", "padding", "float", "softcap, sinks"])
def test_expanding_a_piece_at_a_time_is_attention(case, num_queries, pieces, generator, monkeypatch):
    """And absorbed attention is the same: both are compared to everything expanded at once, in float64."""
    view, projection = make_view(generator, 333), make_projection(generator)
    assert view.sink_length == 4 and view.packed_length == 256 and view.length == 333
    query = torch.randn(2, HEADS, num_queries, NOPE + ROTARY, generator=generator, dtype=torch.float64)
    mask, options = options_of(case, num_queries, view.length, generator)
    own = {name: options[name] for name in ("softcap", "sink_logits") if name in options}
    expected = dense_attention(query, view, projection, mask, 0.2, **own)
    per_token = 2 * HEADS * (NOPE + ROTARY + VALUE)
    if pieces > 1:
        monkeypatch.setattr(latents, "PIECE_ELEMENTS", 64 * per_token)
    sizes, expand = [], KVProjection.expand

    def spy(*args):
        keys, values = expand(*args)
        sizes.append(keys.numel() + values.numel())
        return keys, values

    monkeypatch.setattr(KVProjection, "expand", spy)
    mask = options.pop("mask")
    out, lse = attend_expanded(query, view, projection, mask, 0.2, **options)
    assert relative_error(out, expected) < 1e-12
    assert max(sizes) <= latents.PIECE_ELEMENTS
    assert sum(sizes) == view.length * per_token  # each token once
    content, rotary = projection.absorb(query)
    means, absorbed_lse = reference.attend_latents(content, rotary, view, mask, 0.2, **options)
    assert relative_error(projection.values_of(means), expected) < 1e-12
    assert relative_error(lse, absorbed_lse) < 1e-12


def test_a_token_is_the_smallest_piece_that_is_whole(generator, monkeypatch):
    """Blocks are not cut, whatever the bound."""
    view, projection = make_view(generator, 333), make_projection(generator)
    monkeypatch.setattr(latents, "PIECE_ELEMENTS", 1)
    lengths = [end - start for start, end, *_ in latents._pieces(view, 64)]
    assert lengths == [4, 64, 64, 64, 64, 64, 9]
    query = torch.randn(2, HEADS, 5, NOPE + ROTARY, generator=generator, dtype=torch.float64)
    mask = causal(5, 333, torch.device("cpu"))
    out, _ = attend_expanded(query, view, projection, None, 0.2)
    assert relative_error(out, dense_attention(query, view, projection, mask, 0.2)) < 1e-12


@pytest.mark.parametrize(("shape", "rotary", "queries"), [
    ((128, 256, 512), 64, 170),  # DeepSeek-V2 and V3: n = v = 128
    ((20, 448, 512), 64, 398),  # GLM-4.7-Flash: n = 192, v = 256
    ((40, 128, 256), 32, 85),  # MiniCPM3: n = v = 64
])  # fmt: skip
def test_absorbs_where_it_multiplies_less(shape, rotary, queries):
    projection = KVProjection(torch.empty(shape, device="meta"), 1)
    assert projection.absorbs(queries, rotary) and not projection.absorbs(queries + 1, rotary)


# ------------------------------------------------------------------------------------------------------ whole models


@pytest.mark.parametrize("length", [20, 140])
def test_gradients_of_a_first_prefill(length):
    """Of weights and embeddings, as with transformers' own cache; a short prompt would otherwise be absorbed."""
    model = latent_model("deepseek_v3")
    ids = torch.randint(3, 128, (2, length), generator=torch.Generator().manual_seed(0))

    def gradients(cache) -> dict[str, torch.Tensor]:
        model.zero_grad()
        model(ids, past_key_values=cache).logits.square().mean().backward()
        found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        model.zero_grad()
        return found

    expected = gradients(DynamicCache(config=model.config))
    cache = TurboQuantCache(model.config, "tq4", residual_length=64)
    got = gradients(cache)
    assert {layer.path for layer in cache.layers} == {"expanded: gradients"}
    assert got.keys() == expected.keys() and any("kv_a_proj" in name for name in got)
    assert all(relative_error(got[name], x) < 1e-5 for name, x in expected.items() if x.norm() > 0)


def test_gradients_over_a_packed_past():
    """Those of the queries and of the weight, by attention over latents that do not change."""
    model = latent_model("deepseek_v3")
    ids = torch.randint(3, 128, (2, 150), generator=torch.Generator().manual_seed(0))
    found = []
    for absorb in (True, False):
        cache = TurboQuantCache(model.config, "tq4", residual_length=0, smooth=0.0, absorb=absorb)
        with torch.no_grad():
            model(ids[:, :140], past_key_values=cache)
        attention = model.model.layers[1].self_attn
        model.zero_grad()
        model(ids[:, 140:], past_key_values=cache).logits.square().mean().backward()
        found.append([attention.q_b_proj.weight.grad.clone(), attention.kv_b_proj.weight.grad])
        model.zero_grad()
    absorbed, expanded = found
    assert cache.layers[1].path == "expanded: absorb=False" and absorbed[1] is not None
    assert relative_error(absorbed[0], expanded[0]) < 1e-4


def test_calibration_sees_queries_of_latents(monkeypatch):
    """Those that it takes, no more; smoothing then is by their sizes, and padding is told."""
    model = latent_model("deepseek_v3")
    taken, content = [], KVProjection.content
    ids = torch.randint(3, 128, (2, 300), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, :30] = 0
    monkeypatch.setattr(first_tokens, "MAX_QUERIES", 100)
    monkeypatch.setattr(KVProjection, "content", lambda self, q: taken.append(q.shape[2]) or content(self, q))
    seen = {}
    energy = first_tokens.query_energy

    def spy(query, num_kv_heads, counts):
        seen["query"], seen["counts"] = query, counts
        return energy(query, num_kv_heads, counts)

    monkeypatch.setattr(first_tokens, "query_energy", spy)
    with torch.no_grad():
        model(ids, attention_mask=mask, past_key_values=TurboQuantCache(model.config, "tq4", residual_length=64))
    assert taken == [100] * 4  # of 300 queries, which were expanded, every third
    assert seen["query"].shape == (2, 4, 100, 64)
    assert seen["counts"].sum(dim=1).tolist() == [100, 90]


@pytest.mark.parametrize("name", [name for name in ("deepseek_v3", "deepseek_v32") if name in LATENT_MODELS])
def test_sparse_attention_reads_what_was_chosen(name, monkeypatch):
    """`indices`, of models that choose, go to the backend, which is to read few tokens; the reference masks others."""
    model = latent_model(name)
    calls, attend = [], reference.attend_latents

    def spy(*args, **options):
        calls.append(options["indices"])
        return attend(*args, **options)

    monkeypatch.setattr(reference, "attend_latents", spy)
    ids = torch.randint(3, 128, (2, 150), generator=torch.Generator().manual_seed(0))
    cache = TurboQuantCache(model.config, "tq4", residual_length=64)
    with torch.no_grad():
        for chunk in ids.split([145, 4, 1], 1):
            model(chunk, past_key_values=cache)
    chosen = [(2, 4, 16)] * 4 + [(2, 1, 16)] * 4
    assert [x if x is None else tuple(x.shape) for x in calls] == (chosen if name in INDEXED else [None] * 8)


def test_indices_narrow_masks(generator):
    view, projection = make_view(generator, 333), make_projection(generator)
    query = torch.randn(2, HEADS, 3, NOPE + ROTARY, generator=generator, dtype=torch.float64)
    indices = torch.stack([torch.randperm(330, generator=generator)[:16] for _ in range(6)]).view(2, 3, 16)
    means, _ = reference.attend_latents(*projection.absorb(query), view, None, 0.2, indices=indices)
    mask = with_indices(None, indices, 333)
    assert relative_error(projection.values_of(means), dense_attention(query, view, projection, mask, 0.2)) < 1e-12


# ------------------------------------------------------------------------------------------------- float8 kv_b_proj


def quantised(linear: torch.nn.Linear, block: tuple[int, int] | None) -> FP8Linear:
    rows, columns = linear.weight.shape
    layer = FP8Linear(columns, rows, block_size=block)
    size = block or (rows, columns)
    blocks = F.pad(linear.weight.data, (0, -columns % size[1], 0, -rows % size[0]))
    blocks = blocks.unflatten(0, (-1, size[0])).unflatten(2, (-1, size[1]))  # [rows / r, r, columns / c, c]
    scale = blocks.abs().amax(dim=(1, 3)) / 448
    codes = (blocks / scale[:, None, :, None]).flatten(2, 3).flatten(0, 1)[:rows, :columns]
    layer.weight.data = codes.to(torch.float8_e4m3fn)
    layer.weight_scale_inv.data = scale if block else scale.flatten()[0]
    return layer.eval()


@pytest.mark.parametrize("block", [(128, 128), (48, 40), None])
@pytest.mark.filterwarnings("error:latents are dequantised")
def test_a_float8_weight_is_made_dense(block):
    latent_model.cache_clear()
    model = latent_model("deepseek_v3")
    exact = [layer.self_attn.kv_b_proj.weight.data for layer in model.model.layers]
    for layer in model.model.layers:
        layer.self_attn.kv_b_proj = quantised(layer.self_attn.kv_b_proj, block)
    assert tq_cache.densify_kv_b_proj(model) == len(exact)
    for layer, weight in zip(model.model.layers, exact, strict=True):
        dense = layer.self_attn.kv_b_proj
        assert type(dense) is torch.nn.Linear and dense.weight.dtype == torch.float32 and not dense.training
        assert (dense.weight - weight).abs().max() <= weight.abs().max() / 16  # three bits behind the first
        assert 0 < relative_error(dense.weight, weight) < 2**-4
    cache = TurboQuantCache(model.config, "tq4", residual_length=64)
    with torch.no_grad():
        model(torch.randint(3, 128, (2, 140)), past_key_values=cache)
        model(torch.randint(3, 128, (2, 1)), past_key_values=cache)
    assert {layer.path for layer in cache.layers} == {"absorbed"}
    with pytest.raises(ValueError, match="expected a model with a float8 kv_b_proj .* got none"):
        tq_cache.densify_kv_b_proj(model)
    latent_model.cache_clear()


def test_a_float8_weight_is_expanded_until_then(monkeypatch):
    """Its kernel needs a GPU; what it gets here is what it would get there."""

    def linear(x, weight, scale, block_size, *_, **__):
        rows, columns = block_size
        scale = scale.repeat_interleave(rows, 0).repeat_interleave(columns, 1)[: weight.shape[0], : weight.shape[1]]
        return F.linear(x.contiguous().view(-1, x.shape[-1]), weight.float() * scale).view(*x.shape[:-1], -1)

    monkeypatch.setattr(finegrained_fp8, "fp8_linear", linear)
    latent_model.cache_clear()
    model = latent_model("deepseek_v3")
    for layer in model.model.layers:
        layer.self_attn.kv_b_proj = quantised(layer.self_attn.kv_b_proj, (48, 40))
    ids = torch.randint(3, 128, (2, 141), generator=torch.Generator().manual_seed(0))

    def logits(**options):
        cache = TurboQuantCache(model.config, "tq4", residual_length=64, smooth=0.0, **options)
        with torch.no_grad():
            return torch.cat([model(x, past_key_values=cache).logits for x in ids.split([140, 1], 1)], dim=1), cache

    latent._warn.cache_clear()
    with pytest.warns(UserWarning, match="densify_kv_b_proj"):
        expanded, cache = logits()
    assert all(layer.path.startswith("expanded: kv_b_proj is not a plain linear map") for layer in cache.layers)
    assert torch.equal(expanded, logits(absorb=False)[0])
    tq_cache.densify_kv_b_proj(model)
    dense, cache = logits()
    assert {layer.path for layer in cache.layers} == {"absorbed"} and relative_error(dense, expanded) < 1e-5
    latent_model.cache_clear()


def test_a_float8_weight_that_is_not_there_is_refused():
    latent_model.cache_clear()
    model = latent_model("deepseek_v3")
    attention = model.model.layers[-1].self_attn
    attention.kv_b_proj = quantised(attention.kv_b_proj, (128, 128)).to("meta")
    with pytest.raises(ValueError, match=r"layers\.3\.self_attn\.kv_b_proj\.weight in float8, loaded, got .* on meta"):
        tq_cache.densify_kv_b_proj(model)
    with pytest.raises(ValueError, match="expected a floating dtype of 16 bits or more .* got torch.float8_e5m2"):
        tq_cache.densify_kv_b_proj(model, torch.float8_e5m2)
    latent_model.cache_clear()
