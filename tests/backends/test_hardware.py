"""The architecture table, and how a device finds its row."""

from types import SimpleNamespace

import pytest
import torch

from tq_cache.backends.hardware import ARCHITECTURES, FP8_DOT, FP16_DOT, OCP, REFERENCE, detect, nvidia


def test_cpu_runs_the_reference():
    row = detect("cpu")
    assert row is ARCHITECTURES["cpu"]
    assert row.decode_path == REFERENCE


def test_fp8_dots_only_where_the_stored_formats_are_multiplied():
    for row in ARCHITECTURES.values():
        assert row.decode_path != FP8_DOT or row.fp8_multiply == OCP, row.name
        assert set(row.fp8_multiply) <= set(row.fp8_convert), row.name
        assert row.reason


@pytest.mark.parametrize("capability, path", [((8, 0), FP16_DOT), ((8, 9), FP8_DOT), ((9, 0), FP8_DOT)])
def test_nvidia_capabilities(monkeypatch, capability, path):
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    row = detect("cuda:1")
    assert row.name == f"sm_{capability[0]}{capability[1]}"
    assert row.decode_path == path


def test_unlisted_nvidia_takes_the_nearest_older_row():
    row = nvidia(10, 3)
    assert row.name == "sm_103" and row.decode_path == FP8_DOT
    assert row.reason.startswith("treated as sm_100")
    assert nvidia(8, 8).reason.startswith("treated as sm_87")
    assert nvidia(6, 1).decode_path == REFERENCE


@pytest.mark.parametrize(
    "name, path", [("gfx942:sramecc+:xnack-", FP16_DOT), ("gfx950", FP16_DOT), ("gfx1", REFERENCE)]
)
def test_amd(monkeypatch, name, path):
    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(gcnArchName=name))
    row = detect("cuda")
    assert row.decode_path == path
    assert row.name == name.split(":")[0]


def test_other_devices_say_that_there_are_no_kernels():
    row = detect("meta")
    assert row.name == "meta" and row.decode_path == REFERENCE
    assert "no kernels" in row.reason
