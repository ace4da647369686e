"""What each layer is stored as: words, indices, skip_format, layer_presets, on all kinds of layers."""

import pytest

from tq_cache import PRESETS
from tq_cache.formats.presets import resolve_preset
from tq_cache.planning.layers import plan_layers

FULL, SLIDING, LINEAR, HYBRID, OTHER = "full_attention", "sliding_attention", "linear_attention", "hybrid", "csa"


def stored(kinds, preset="tq4", skip_layers=("sliding_window",), boundary_layers=1, **arguments) -> list[str]:
    """The name of every layer's preset ("-": none), and the reason if there is one."""
    plans = plan_layers(kinds, PRESETS.get(preset), skip_layers, boundary_layers, **arguments)
    assert [(plan.index, plan.kind) for plan in plans] == list(enumerate(kinds))
    assert all(plan.packed == (plan.preset is not None) for plan in plans)
    names = ["-" if plan.preset is None else plan.preset.name for plan in plans]
    return [f"{name} {plan.reason}".strip() for name, plan in zip(names, plans, strict=True)]


def test_every_layer_has_the_caches_preset():
    assert stored([FULL] * 3) == ["tq4"] * 3
    assert stored([FULL] * 3, "k8v4") == ["k8v4"] * 3
    assert stored([FULL] * 2, None) == ["-"] * 2


@pytest.mark.parametrize("skip_format, name", [(None, "-"), ("fp8_e4m3", "fp8_e4m3"), ("tq4", "tq4")])
def test_what_is_skipped_has_the_skip_format(skip_format, name):
    edge, index = f"{name} boundary", f"{name} index in skip_layers"
    skip = dict(skip_format=skip_format)
    assert stored([FULL] * 4, skip_layers="boundary", **skip) == [edge, "tq4", "tq4", edge]
    assert (
        stored([FULL] * 6, skip_layers=("boundary",), boundary_layers=2, **skip)
        == [edge] * 2 + ["tq4"] * 2 + [edge] * 2
    )
    assert stored([FULL] * 4, skip_layers=-3, **skip) == ["tq4", index, "tq4", "tq4"]
    assert stored([FULL] * 4, skip_layers=("boundary", 1, 0), **skip) == [index, index, "tq4", edge]
    assert stored([FULL] * 4, skip_layers=("boundary",), boundary_layers=0, **skip) == ["tq4"] * 4


def test_layer_presets_win():
    both = dict(skip_layers=("boundary", 2), layer_presets={0: "tq3", -1: "k8v4", 2: "tq2", 1: "fp8_e4m3"})
    expected = [f"{name} layer_presets" for name in ("tq3", "fp8_e4m3", "tq2", "k8v4")]
    assert stored([FULL] * 4, **both) == expected
    assert stored([FULL] * 4, skip_format="fp8_e5m2", **both) == expected
    assert stored([FULL] * 4, None, layer_presets={-1: "tq4"}) == ["-"] * 3 + ["tq4 layer_presets"]


def test_layers_that_are_not_packed_stay_as_they_are():
    """Windows, states and a model's own layers, whatever skip_format says; "boundary" counts those with tokens."""
    kinds = [LINEAR, HYBRID, SLIDING, FULL, OTHER, FULL, "moe"]
    fixed = {0: "- no keys and values", 2: "- sliding window", 4: "- layer type of the model's own"}
    fixed |= {6: fixed[0]}
    assert stored(kinds) == [fixed.get(n, "tq4") for n in range(7)]
    skipped = dict(skip_layers=("sliding_window", "boundary", 0, 2, 4), skip_format="fp8_e4m3")
    edge = fixed | {1: "fp8_e4m3 boundary", 5: "fp8_e4m3 boundary"}
    assert stored(kinds, **skipped) == [edge.get(n, "tq4") for n in range(7)]
    edge |= {1: "tq2 layer_presets"}
    assert stored(kinds, layer_presets={-6: "tq2"}, **skipped) == [edge.get(n, "tq4") for n in range(7)]
    assert stored([SLIDING, FULL, SLIDING], skip_layers=("boundary", "sliding_window"), skip_format="tq2") == [
        *("- sliding window", "tq4", "- sliding window")
    ]


def test_a_layers_preset_is_as_it_is_named():
    """What changes the cache's preset (formats, centring) changes no other."""
    own = resolve_preset("tq4", key="fp8_e4m3", value="tq2", center="both")
    plans = plan_layers([FULL] * 3, own, (0,), 2, "tq4", {2: "k8v4"})
    assert [plan.preset for plan in plans] == [PRESETS["tq4"], own, PRESETS["k8v4"]]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"skip_layers": ("edge",)}, ValueError, r"expected skip_layers of \['boundary', 'sliding_window'\]"),
        ({"skip_layers": (4,)}, ValueError, "expected a layer index from -4 to 3, got 4 in skip_layers"),
        ({"skip_layers": (0.0,)}, ValueError, "expected a layer index from -4 to 3, got 0.0 in skip_layers"),
        ({"boundary_layers": -1}, ValueError, "expected boundary_layers of 0 or more, got -1"),
        ({"skip_layers": (0,), "skip_format": "fp8"}, ValueError, "preset of .*tq4.* as skip_format, got 'fp8'"),
        ({"skip_format": "tq3"}, ValueError, "expected 'boundary' or layer indices in skip_layers beside skip_format="),
        ({"skip_layers": (), "skip_format": "tq3"}, ValueError, r"skip_format='tq3', got \(\); name the layers"),
        ({"layer_presets": {0: "tq5"}}, ValueError, "preset of .* for layer 0 in layer_presets, got 'tq5'"),
        ({"layer_presets": {-1: None}}, ValueError, "preset of .* for layer 3 in layer_presets, got None"),
        ({"layer_presets": {4: "tq4"}}, ValueError, "expected a layer index from -4 to 3, got 4 in layer_presets"),
        ({"layer_presets": {"0": "tq4"}}, ValueError, "layer index from -4 to 3, got '0' in layer_presets"),
        ({"layer_presets": {True: "tq4"}}, ValueError, "layer index from -4 to 3, got True in layer_presets"),
        ({"layer_presets": {1: "tq4", -3: "tq4"}}, ValueError, "one entry per layer .*, got two for layer 1: -3 too"),
        ({"layer_presets": ["tq4"]}, TypeError, r"expected layer_presets as \{layer index: preset name\}"),
    ],
)
def test_refusals(arguments, error, message):
    with pytest.raises(error, match=message):
        stored([FULL] * 4, **arguments)


@pytest.mark.parametrize(
    ("index", "kind", "why"),
    [(0, LINEAR, "no keys and values"), (1, SLIDING, "sliding window"), (3, OTHER, "layer type of the model's own")],
)
def test_layer_presets_of_layers_that_cannot_be_packed(index, kind, why):
    message = rf"expected layers that can be packed in layer_presets, got layer {index} \({kind}: {why}\); leave it out"
    with pytest.raises(ValueError, match=message):
        stored([LINEAR, SLIDING, FULL, OTHER], layer_presets={index - 4: "tq4"})


def test_windows_cannot_be_packed():
    for skip in ((), "boundary", (0, 1)):
        with pytest.raises(NotImplementedError, match="keep 'sliding_window' in skip_layers"):
            stored([SLIDING, FULL], skip_layers=skip)
