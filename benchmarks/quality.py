"""Quality of every cache on a real model, against the exact one: rows of a result file, and a table.

python benchmarks/quality.py --model qwen.gguf --name qwen2.5-coder-1.5b --texts texts.json --rows 0:12 \
    --presets all --out benchmarks/results/quality_real_h200.json

--long measures at 4k, 16k and 32k tokens instead: texts one behind the other, ending in each whose name holds --ending.
A row of the same model, preset, setting and lengths that the file has already is replaced.
"""

import argparse
import json
import subprocess
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import transformers

from tq_cache.formats.presets import PRESETS
from tq_cache.tools import baselines
from tq_cache.tools.evaluate import EvalRow, EvalSettings, NotRun, evaluate
from tq_cache.tools.runs import load_model
from tq_cache.tools.texts import Text, long_windows, read_texts

# What a row is of: one with the same is replaced.
IDENTITY = ("model", "preset", "setting", "prefill", "decode", "dtype")
LENGTHS = (4096, 16384, 32768)
HEADINGS = (
    "cache      setting      bytes        KL     +-     99 %   99.9 %     top       ppl  log ppl     +-  greedy "
    "KL by quarter            recall"
)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="a model folder or a GGUF file")
    parser.add_argument("--name", required=True, help="of the model, in the rows")
    parser.add_argument("--texts", type=Path, required=True, help=".json list of {name, text}")
    parser.add_argument("--rows", default=":", help="a:b, of the texts")
    parser.add_argument("--presets", help="with commas, or all (with --long tq4,tq3,tq2)")
    parser.add_argument("--settings", help="default,all_packed (with --long default)")
    parser.add_argument("--no-peers", action="store_true", help="leave out the noise floor and the caches of others")
    parser.add_argument("--prefill", type=int, default=1024)
    parser.add_argument("--decode", type=int, help="256, with --long 512; as many greedy tokens")
    parser.add_argument("--cases", type=int, help="recall cases per kind and depth: 2, with --long 1")
    parser.add_argument("--group", type=int, help="texts or recall cases at once: 12, with --long 1")
    parser.add_argument("--prefill-chunk", type=int, help="tokens of a prompt a forward, where one takes too much")
    parser.add_argument("--dtype", default="float32", help="float32 shows what the cache does and not the rounding")
    parser.add_argument("--long", action="store_true")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, help="tokens prefilled, with --long")
    parser.add_argument("--ending", default="python", help="in the names of the texts that long prompts end in")
    parser.add_argument("--commit", help="that is measured; git says it where there is a repository")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    options.presets = options.presets or ("tq4,tq3,tq2" if options.long else "all")
    options.settings = options.settings or ("default" if options.long else "default,all_packed")
    options.decode = options.decode or (512 if options.long else 256)
    options.cases = (1 if options.long else 2) if options.cases is None else options.cases
    options.group = options.group or (1 if options.long else 12)
    return options


def chosen_texts(options: argparse.Namespace) -> list[Text]:
    texts = read_texts(options.texts)
    if isinstance(texts, str):
        raise ValueError(f"expected a .json list of {{name, text}}, got {str(options.texts)!r}")
    first, _, last = options.rows.partition(":")
    return texts[int(first or 0) : int(last) if last else None]


def commit(given: str | None) -> str:
    """What is measured: as given, else as git says, with a plus where files have changed since."""
    if given:
        return given
    folder = Path(__file__).parent
    try:
        head = subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], cwd=folder, text=True).strip()
        changed = subprocess.check_output(["git", "status", "--porcelain", "-uno"], cwd=folder, text=True).strip()
    except (OSError, subprocess.CalledProcessError):
        raise ValueError("expected a git repository or --commit, got neither; say which commit this is") from None
    return head + ("+" if changed else "")


def machine() -> dict[str, str]:
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return {"device": device, "torch": torch.__version__, "transformers": transformers.__version__}


def keep(path: Path | None, row: dict[str, Any]) -> None:
    """Put a row into the result file, in place of the one it renews."""
    if path is None:
        return
    rows = json.loads(path.read_text())["rows"] if path.exists() else []
    same = [index for index, other in enumerate(rows) if all(other[name] == row[name] for name in IDENTITY)]
    if same:
        rows[same[0]] = row
    else:
        rows.append(row)
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n  ".join(json.dumps(own) for own in rows)
    path.write_text(f'{{"rows": [\n  {lines}\n ]}}\n')


def line(row: EvalRow | NotRun) -> str:
    """A row as a line of the table under `HEADINGS`."""
    name = f"{row.preset:10} {row.setting:10}"
    if isinstance(row, NotRun):
        return f"{name} not run: {row.reason}"
    spread = f"{1e3 * row.kl:9.3f} {1e3 * (row.kl_se or 0):7.3f} {1e3 * row.kl_p99:8.1f} {1e3 * row.kl_p999:8.1f}"
    loss = f"{row.top1:7.2%} {row.ppl:9.3f} {1e3 * row.dlogppl:8.2f} {1e3 * (row.dlogppl_se or 0):6.2f}"
    recall = " ".join(f"{kind} {share:.0%}" for kind, share in row.recall_by_kind.items())
    quarters = "/".join(f"{1e3 * part:.3g}" for part in row.kl_by_quarter)
    return f"{name} {row.bytes_per_token:7.1f} {spread} {loss} {row.greedy_first:7.1f} {quarters:24} {recall}"


def keeper(options: argparse.Namespace, length: int, about: dict[str, str]) -> Callable[[EvalRow | NotRun], None]:
    """The function that keeps a row as soon as it is done, so that a run cut short has kept what it measured."""
    common = {"prefill": length, "decode": options.decode, "dtype": options.dtype, **about}

    def done(row: EvalRow | NotRun) -> None:
        own = asdict(row)
        if isinstance(row, NotRun):
            own["not_run"] = own.pop("reason")
        keep(options.out, {"model": options.name, **own, **common})
        print(line(row), flush=True)

    return done


def main() -> None:
    options = arguments()
    texts = chosen_texts(options)
    about = machine() | {"commit": commit(options.commit)}
    presets = list(PRESETS) if options.presets == "all" else options.presets.split(",")
    caches = baselines.grid(presets, options.settings.split(","))
    if not options.long and not options.no_peers:
        caches += baselines.peers()
    model, tokenizer = load_model(options.model, getattr(torch, options.dtype))
    for length in options.lengths if options.long else [options.prefill]:
        settings = EvalSettings(
            *(length, options.decode),
            cases=options.cases,
            greedy=options.decode,
            group=options.group,
            prefill_chunk=options.prefill_chunk,
        )
        rows: Any = texts
        if options.long:
            rows = long_windows(tokenizer, length + options.decode + 1, texts, options.ending)
        print(f"\n{options.name}: {length:,} tokens prefilled, {options.decode} decoded; KL and log ppl in thousandths")
        print(HEADINGS)
        evaluate(model, tokenizer, caches, settings, rows, keeper(options, length, about))


if __name__ == "__main__":
    main()
