"""Greedy generation of every decoder architecture of transformers with this cache, on tiny random models.

`python tests/models/test_architectures.py > ARCHITECTURES.md` writes the table.
"""

import re
import sys
import warnings
from pathlib import Path

import pytest
import torch
import transformers
from architecture_table import REFUSED, Row, group, grouped
from architectures import ARCHITECTURES, OVERRIDES, UNBUILDABLE, build, config_for, prompt
from latent_models import EXPANDING_MODELS, latent_model
from multimodal import MODELS, TABLE, row
from preallocated_sweep import WAYS, attention_for
from transformers import DynamicCache

from tq_cache import TurboQuantCache
from tq_cache.planning.geometry import model_geometry
from tq_cache.planning.layers import PACKABLE
from tq_cache.planning.preallocation import why_not_preallocated

ROOT = Path(__file__).parents[2]
NEW_TOKENS = 12
PACKED_PROMPT = 140  # two blocks behind the sink tokens


def logits_and_tokens(model, cache, length: int = 24) -> tuple[torch.Tensor, torch.Tensor]:
    out = model.generate(
        **prompt(model, length),
        past_key_values=cache,
        max_new_tokens=NEW_TOKENS,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return torch.stack(out.logits), out.sequences


def reads(model_type: str, cache: TurboQuantCache) -> str:
    """What attention reads of packed layers, in words."""
    if attention_for(model_type) is None:
        return "dequantised"
    latents = {layer.path for layer in cache.layers if getattr(layer, "absorbs", False)}
    return ", ".join(sorted(f"{path} latents" for path in latents)) or "packed bits"


def run_one(model_type: str) -> Row:
    """Check one architecture; returns what its cache's layers are, and are packed as."""
    own, model = build(model_type), build(model_type, attention_for(model_type))

    def cache(of, **options):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "no layer of this model will be packed")
            return TurboQuantCache(of.config, skip_layers=("sliding_window",), **options)

    # Lossless: a residual that covers everything.
    _, expected = logits_and_tokens(own, DynamicCache(config=own.config))
    lossless = cache(model, residual_length=512)
    _, tokens = logits_and_tokens(model, lossless)
    assert torch.equal(tokens, expected), "a residual that covers everything gives other tokens than DynamicCache"
    # Packed: attention from the packed bits against the model's own attention on the same values, dequantised.
    dequantised, bits = (cache(m, preset="fp8_e4m3", residual_length=0) for m in (own, model))
    exact_logits, _ = logits_and_tokens(own, dequantised, PACKED_PROMPT)
    logits, _ = logits_and_tokens(model, bits, PACKED_PROMPT)
    # Up to the first step at which a near tie may split the two runs.
    same = (logits.argmax(-1) == exact_logits.argmax(-1)).all(dim=1)
    steps = NEW_TOKENS if same.all() else int(same.int().argmin()) + 1
    distance = (logits[:steps] - exact_logits[:steps]).abs().max() / exact_logits.std()
    assert distance < 2e-3, f"packed attention is {distance:.4f} standard deviations from dequantised attention"
    packed = [layer for layer in bits.layers if hasattr(layer, "storage") and layer.storage.length]
    assert all(layer.storage.packed_length == 128 for layer in packed)
    kinds = frozenset(plan.kind for plan in bits.plans)
    return Row(model_type, kinds, len(packed), len(bits.layers), reads(model_type, bits))


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_architecture(model_type):
    path = run_one(model_type).reads
    assert path == "absorbed latents" or "latents" not in path


DEFAULT = ("llama", "gemma3_text", "deepseek_v3", "gpt_neo")  # full, sliding, latents, one that is refused or grows


CASES = [(name, way) for name in ARCHITECTURES for way in WAYS]
QUICK = [case for case in CASES if case[0] in DEFAULT and (case[1] != "enable" or case[0] == "gpt_neo")]


@pytest.mark.parametrize(("model_type", "way"), [
    case if case in QUICK else pytest.param(*case, marks=pytest.mark.slow) for case in CASES
])  # fmt: skip
def test_architecture_on_preallocated_memory(model_type, way):
    """Right, or refused with a reason; left-padded and not, with packed tokens and without."""
    for packed in (False, True):
        for padded in (False, True):
            assert WAYS[way](model_type, packed, padded).startswith(("equal", "refused: "))


@pytest.mark.parametrize("alibi", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_falcon_with_alibi_grows_and_without_is_compiled(monkeypatch, alibi):
    monkeypatch.setitem(OVERRIDES, "falcon", {"alibi": alibi})
    for padded in (False, True):
        assert WAYS["enable"]("falcon", False, padded) == ("equal, grows" if alibi else "equal, compiled")
        outcome = WAYS["forward"]("falcon", False, padded)
        assert outcome.startswith("refused: falcon with alibi" if alibi else "equal")


def test_at_least_a_hundred():
    assert len(ARCHITECTURES) >= 100


def test_the_page_has_every_architecture_once():
    names = re.findall(r"`([^` ]+)`", (ROOT / "ARCHITECTURES.md").read_text().split("## Images, sound")[0])
    assert set(ARCHITECTURES) <= set(names) and len(names) == len(set(names))


@pytest.mark.parametrize(("kinds", "packed", "reads", "expected"), [
    ("full_attention", 4, "packed bits", "packed"),
    ("full_attention sliding_attention dummy", 1, "packed bits", "sliding"),
    ("full_attention sliding_attention conv", 1, "packed bits", "hybrid"),
    ("full_attention linear_attention", 2, "absorbed latents", "latents"),
    ("full_attention", 4, "dequantised", "dequantised"),
    ("sliding_attention", 0, "packed bits", "nothing"),
])  # fmt: skip
def test_groups(kinds, packed, reads, expected):
    assert group(Row("a", frozenset(kinds.split()), packed, 4, reads)) == expected


LATENTS = """## Latents: sizes and steps

Every model of transformers that caches latents, the last three without a causal LM mapping; sizes are those of the
default config of its class.  A long prompt's first forward reads exact keys and values, as the model expands them;
later ones of many queries expand a piece of the packed tokens at a time.  Nothing but
`attn_implementation="turboquant"` is needed; `docs/latents.md` says what is not absorbed, and why.

| model type | latent + rotary key | steps | with max_cache_len |
|---|---|---|---|"""


def latent_row(model_type: str) -> str:
    """A line of the table of models that cache latents: the sizes, and how steps of both kinds of caches read them."""
    model, paths = latent_model(model_type), []
    layers = model_geometry(type(model.config)()).layers
    sizes = {f"{x.key_dim} + {x.value_dim}": None for x in layers if x.latent and x.key_dim and x.kind in PACKABLE}
    for options in ({}, {"max_cache_len": 256}):
        try:
            cache = TurboQuantCache(model.config, residual_length=64, **options)
            inputs = prompt(model, PACKED_PROMPT)
            model.generate(**inputs, past_key_values=cache, max_new_tokens=4, disable_compile=True)
        except NotImplementedError as error:
            paths.append(f"refused: {str(error).split(';')[0]}")
            continue
        held = [x for x in cache.layers if getattr(x, "absorbs", False) and x.storage.length]
        paths.append(", ".join(sorted({layer.path for layer in held})))
    return f"| {model_type} | {', '.join(sizes)} | {' | '.join(paths)} |"


GROWING = """## Not in preallocated memory

After `enable` these grow, and they refuse a `max_cache_len`; `python tests/preallocated_sweep.py` tries all.

| model type | reason |
|---|---|"""


def growing_rows() -> list[str]:
    """A line for each architecture that cannot read preallocated memory; Falcon only with alibi."""
    reasons = {name: why_not_preallocated(config_for(name)) for name in ARCHITECTURES}
    return [f"| {name} | {reason} |" for name, reason in reasons.items() if reason]


def main() -> None:
    """Print the table, in Markdown."""
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    rows, failed = [], []
    for model_type in ARCHITECTURES:
        try:
            rows.append(run_one(model_type))
        except Exception as error:
            failed.append(f"| {model_type} | {type(error).__name__}: {' '.join(str(error).split())[:150]} |")
        print(model_type, file=sys.stderr)
    count = f"{len(rows)} of {len(rows) + len(failed)} decoder architectures of transformers {transformers.__version__}"
    print(
        f"# Architectures\n\n{count}, as tiny random models, generate the tokens of a DynamicCache while nothing is "
        "packed, and with everything packed the logits of attention over the dequantised cache.  Shares of layers are "
        "those of the tiny configs; `print(tq_cache.TurboQuantCache(model.config).report())` says those of a model.\n"
    )
    print(grouped(rows, len(UNBUILDABLE)))
    if failed:
        print("\n## Failed\n\n| model type | error |\n|---|---|")
        print("\n".join(failed))
    print(f"\n{TABLE}")
    print("\n".join(map(row, MODELS)))
    print(f"\n{LATENTS}")
    print("\n".join(map(latent_row, EXPANDING_MODELS)))
    print(f"\n{GROWING}")
    print("\n".join(growing_rows()))
    print(f"\n## {REFUSED}\n\n| model type | reason |\n|---|---|")
    print("\n".join(f"| {name} | {reason} |" for name, reason in UNBUILDABLE.items()))


if __name__ == "__main__":
    main()
