"""The plots of the documentation from result files.

python benchmarks/plot.py decode benchmarks/results/decode_h200.json benchmarks/results/decode_h200.png
python benchmarks/plot.py generate benchmarks/results/generate_h200.json benchmarks/results/generate_h200.png
python benchmarks/plot.py quality benchmarks/results/quality_real_h200.json benchmarks/results/quality_real_h200.png
"""

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

# Caches in the plot of steps, and what they are called there.
SHOWN = {"DynamicCache": "DynamicCache", "tq4": "TurboQuantCache tq4", "StaticCache": "StaticCache"}

EXACT = "16-bit"  # the exact cache, among rows of quality


def shape_name(row: dict) -> str:
    tokens = row["tokens"]
    return f"{row['batch']} x {tokens // 1024}k" if tokens % 1024 == 0 else f"{row['batch']} x {tokens}"


def grouped_bars(axis: plt.Axes, rows: list[dict], series: str, value: str) -> None:
    """A group of bars for each shape, a bar in it for each of the series."""
    shapes = list(dict.fromkeys(map(shape_name, rows)))
    names = list(dict.fromkeys(row[series] for row in rows))
    width = 0.8 / len(names)
    for index, name in enumerate(names):
        heights = {shape_name(row): row[value] for row in rows if row[series] == name}
        places = [place + index * width for place, shape in enumerate(shapes) if shape in heights]
        axis.bar(places, [heights[shape] for shape in shapes if shape in heights], width, label=name)
    axis.set_xticks([place + 0.4 - width / 2 for place in range(len(shapes))], shapes)
    axis.legend(fontsize=8, ncols=2)


def plot_decode(rows: list[dict], axis: plt.Axes) -> None:
    rows = [row for row in rows if (row["q_heads"], row["kv_heads"], row["head_dim"]) == (32, 8, 128)]
    grouped_bars(axis, [row for row in rows if row["tokens"] >= 4096], "format", "ratio")
    axis.axhline(1, color="grey", linewidth=0.8)
    axis.set_ylabel("times as fast as bf16 SDPA")
    axis.set_title("Decode attention of one layer, 32 query and 8 KV heads, D 128")


def plot_generate(rows: list[dict], axis: plt.Axes) -> None:
    rows = [row for row in rows if row["model"] == "llama-8b" and row["cache"] in SHOWN]  # of several runs, the last
    rows.sort(key=lambda row: (row["batch"], row["tokens"], row["mode"] == "compiled"))
    grouped_bars(axis, [row | {"name": f"{SHOWN[row['cache']]}, {row['mode']}"} for row in rows], "name", "ms_per_step")
    for bars in axis.containers:
        axis.bar_label(bars, fmt="%.1f", fontsize=7)
    axis.set_ylim(top=1.25 * axis.get_ylim()[1])  # room for the legend
    axis.set_ylabel("ms per step")
    axis.set_title(f"One decode step, {rows[0]['model']}")


def plot_quality(rows: list[dict], figure: plt.Figure) -> None:
    """A panel per model: KL to the exact cache over true bytes, a point per cache, joined by setting."""
    rows = [row for row in rows if "not_run" not in row and row["kl"] > 0]
    models = list(dict.fromkeys(row["model"] for row in rows))
    figure.set_size_inches(7 * len(models), 6)
    for axis, model in zip(figure.subplots(1, len(models), squeeze=False)[0], models, strict=True):
        own = [row for row in rows if row["model"] == model and row["preset"] != EXACT]
        for setting in dict.fromkeys(row["setting"] for row in own):
            points = [row for row in own if row["setting"] == setting]
            places = [row["bytes_per_token"] for row in points], [row["kl"] for row in points]
            axis.errorbar(*places, yerr=[row["kl_se"] or 0 for row in points], fmt="o", capsize=2, label=setting)
        for row in own:
            place = (row["bytes_per_token"], row["kl"])
            axis.annotate(row["preset"], place, (4, 3), textcoords="offset points", fontsize=7)
        if floor := [row["kl"] for row in rows if row["model"] == model and row["preset"] == EXACT]:
            # In words: a line so far below would take the room of the points.
            axis.plot([], [], " ", label=f"noise floor {max(floor):.0e}: the exact cache in another order")
        axis.set(xlabel="bytes per token of one KV head and layer, all counted", yscale="log", title=model)
        axis.set_ylabel("KL to the exact cache (nats)")
        axis.legend(fontsize=8)
    figure.axes[0].text(0, -0.14, rows[0]["device"], transform=figure.axes[0].transAxes, fontsize=8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=("decode", "generate", "quality"))
    parser.add_argument("results", type=Path)
    parser.add_argument("plot", type=Path)
    options = parser.parse_args()
    results = json.loads(options.results.read_text())
    if options.kind == "quality":
        figure = plt.figure()
        plot_quality(results["rows"], figure)
    else:
        figure, axis = plt.subplots(figsize=(9, 4.5))
        {"decode": plot_decode, "generate": plot_generate}[options.kind](results["rows"], axis)
        axis.text(1, 1.01, results["machine"]["device"], transform=axis.transAxes, ha="right", fontsize=8)
    figure.tight_layout()
    figure.savefig(options.plot, dpi=150)


if __name__ == "__main__":
    main()
