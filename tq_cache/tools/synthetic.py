"""Documents of the tasks for lm-evaluation-harness, made here: RULER's kinds of long-context tasks, and arithmetic.

RULER (Hsieh et al., 2024, arXiv:2404.06654) hides needles, variables and common words in filler; here the filler is
stories, and all of it comes from seeds.  Lengths are in words, so that every model is asked the same.
"""

import random
from collections.abc import Callable

from .tasks import Task as Hidden
from .tasks import build_case, heldout_text, hide, invented_name, rng_for
from .words import PLAIN, THINGS

Document = dict[str, object]
CHOICES = 4


def count_words(text: str) -> int:
    return len(text.split())


def story_question(kind: str, words: int, seed: int) -> Document:
    """A question of `tasks.KINDS`: "context" and "answers"."""
    case = build_case(kind, words, count_words, seed, split="harness")
    return {"context": case.prompt, "answers": [case.answer]}


def passkey_choice(words: int, seed: int) -> Document:
    """Whose code it is: "context", "choices" (codes that all stand in the story) and the "label" of the right one."""
    rng = rng_for("harness/choice", seed)
    names = rng.sample(sorted({invented_name(rng) for _ in range(20)}), CHOICES)
    codes = [str(code) for code in rng.sample(range(10000, 100000), CHOICES)]
    inserts = [(rng.random(), f" The secret code of {n} is {code}.") for n, code in zip(names, codes, strict=True)]
    label = rng.randrange(CHOICES)
    question = f"\n\nQuestion: What is the secret code of {names[label]}?\nAnswer:"
    pieces = hide(rng, Hidden("passkey", inserts, [(question, codes[label])]), words, count_words)
    context = "".join(text for text, _ in pieces) + question
    return {"context": context, "choices": codes, "label": label}


def variables(words: int, seed: int, chain: int = 4) -> Document:
    """RULER's variable tracking: names that were given one value, each by the one before it, at places in order."""
    rng = rng_for("harness/variables", seed)
    names = ["".join(rng.choices("ABCDEFGHJKLMNPQRSTUVWXYZ", k=5)) for _ in range(2 * chain)]
    values = [str(x) for x in rng.sample(range(10000, 100000), 2)]
    inserts: list[tuple[float, str]] = []
    for own, value in zip((names[:chain], names[chain:]), values, strict=True):
        sources = [value, *(f"VAR {name}" for name in own[:-1])]
        depths = sorted(rng.random() for _ in own)
        inserts += [(d, f" VAR {n} = {s}.") for d, n, s in zip(depths, own, sources, strict=True)]
    question = (
        f"\n\nQuestion: Find all variables that are assigned the value {values[0]} in the text above.\n"
        f"Answer: The {chain} variables that are assigned the value {values[0]} are:"
    )
    pieces = hide(rng, Hidden("variables", inserts, [(question, " ".join(names[:chain]))]), words, count_words)
    return {"context": "".join(text for text, _ in pieces) + question, "answers": names[:chain]}


def common_words(words: int, seed: int, common: int = 5) -> Document:
    """RULER's common words: a numbered list in which `common` words stand six times as often as the others."""
    rng = rng_for("harness/common", seed)
    vocabulary = rng.sample(sorted({*PLAIN, *THINGS}), 4 * common)
    often, seldom = vocabulary[:common], vocabulary[common:]
    times = max(words // 2 // (6 * len(often) + len(seldom)), 1)  # a word and its number
    listed = often * (6 * times) + seldom * times
    rng.shuffle(listed)
    text = " ".join(f"{index}. {word}" for index, word in enumerate(listed, 1))
    question = (
        f"\n\nQuestion: What are the {common} most common words in the list above?\n"
        f"Answer: The {common} most common words are:"
    )
    return {"context": "Below is a numbered list of words.\n\n" + text + question, "answers": often}


# ------------------------------------------------------------------------------------------------------- arithmetic

EXAMPLES = 4


def _problem(rng: random.Random) -> tuple[str, str, int]:
    """A question in words, its steps, and the answer."""
    name, thing = invented_name(rng), rng.choice(THINGS)
    boxes, each, given = rng.randint(2, 9), rng.randint(3, 12), rng.randint(1, 5)
    had, cost = boxes * each, rng.randint(2, 9)
    left = had - given
    question = (
        f"{name} has {boxes} boxes with {each} {thing}s in each. {name} gives {given} away and sells the others for "
        f"{cost} coins each. How many coins does {name} get?"
    )
    steps = (
        f"There are {boxes} * {each} = {had} {thing}s. After giving {given} away, {had} - {given} = {left} are left. "
        f"They sell for {left} * {cost} = {left * cost} coins.\n#### {left * cost}"
    )
    return question, steps, left * cost


def arithmetic(words: int, seed: int) -> Document:
    """A problem of three steps, as those of GSM8K, behind as many solved ones as `words` allow (`EXAMPLES` or more)."""
    rng = rng_for("harness/arithmetic", seed)
    question, _, answer = _problem(rng)
    asked, solved = f"Question: {question}\nAnswer:", ""
    for index in range(max(EXAMPLES, words)):
        other, steps, _ = _problem(rng)
        block = f"Question: {other}\nAnswer: {steps}\n\n"
        if index >= EXAMPLES and count_words(solved + block + asked) > words:
            break
        solved += block
    return {"context": solved + asked, "answers": [f"#### {answer}"]}


def stories(words: int, seed: int) -> Document:
    """A held-out story as "text"."""
    return {"text": heldout_text(words, count_words, seed)}


def documents(make: Callable[[int, int], Document], words: int, count: int, seed: int = 0) -> list[Document]:
    """`count` documents of about `words` words.  Raises ValueError on fewer than 1 document or 50 words."""
    if words < 50 or count < 1:
        raise ValueError(f"expected 50 words or more and 1 document or more, got {words} and {count}")
    return [make(words, seed + index) for index in range(count)]


def found(answers: list[str], text: str) -> float:
    """The share of `answers` that stand in `text`, as RULER scores; a number only where no digit follows."""
    return sum(_stands(answer, text) for answer in answers) / len(answers)


def _stands(answer: str, text: str) -> bool:
    at = text.find(answer)
    return at >= 0 and not text[at + len(answer) :][:1].isdigit()
