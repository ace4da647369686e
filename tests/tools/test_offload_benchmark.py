"""`benchmarks/offload.py` on a tiny model and a CPU: every way runs, and its rows say what they should."""

import sys
from pathlib import Path

import pytest
from architectures import build
from offloads import HostCache

BENCHMARKS = str(Path(__file__).parents[2] / "benchmarks")


@pytest.mark.slow
def test_rows(monkeypatch, capsys):
    pytest.importorskip("triton")
    monkeypatch.syspath_prepend(BENCHMARKS)
    for name in ("generate", "measure", "offload"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    import offload

    model, rows = build("llama", "sdpa"), []
    pinned = offload.pinned_gb_s(1 << 20, model.device)
    assert pinned > 0
    ways = [way for way, offloading in offload.WAYS.items() if offloading is not True]
    for way in ways:
        monkeypatch.setitem(offload.WAYS, "half", "270kB")
        rows.append(offload.measure(model, way, "4bit_nc", 1, 1000, 70, HostCache))
        offload.compare(rows[-1], rows[:-1], pinned)
    stays, packed, half = rows
    assert stays["host_bytes"] == stays["slot_bytes"] == 0 and "share" not in stays
    assert packed["host_bytes"] > half["host_bytes"] > 0 and packed["share"] > 0
    assert packed["device_bytes"] < half["device_bytes"] < stays["device_bytes"]
    dynamic = rows[0] | dict(cache="DynamicCache", ms_per_step=2 * rows[1]["ms_per_step"])
    offload.compare({x: dynamic[x] for x in dynamic if x != "slot_bytes"}, rows, pinned)
    assert rows[1]["of_dynamic"] == pytest.approx(0.5, abs=1e-3) and "GB/s" in capsys.readouterr().out
