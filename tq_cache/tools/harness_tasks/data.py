"""What the .yaml files beside this name: data sets of lm-evaluation-harness, and how answers are scored."""

from collections.abc import Callable
from functools import partial
from typing import Any

import datasets

from tq_cache.tools import synthetic


def _dataset(make: Callable[[int, int], synthetic.Document]) -> Callable[..., dict[str, Any]]:
    def load(words: int = 600, count: int = 100, **metadata: object) -> dict[str, Any]:
        """words, count: of --metadata; the others are lm-evaluation-harness's own."""
        return {"test": datasets.Dataset.from_list(synthetic.documents(make, words, count))}

    return load


passkey = _dataset(partial(synthetic.story_question, "passkey"))
recall = _dataset(partial(synthetic.story_question, "recall"))
copy = _dataset(partial(synthetic.story_question, "copy"))
ledger = _dataset(partial(synthetic.story_question, "ledger"))
passkey_choice = _dataset(synthetic.passkey_choice)
variables = _dataset(synthetic.variables)
common_words = _dataset(synthetic.common_words)
arithmetic = _dataset(synthetic.arithmetic)
stories = _dataset(synthetic.stories)


def found(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    """Of one document and what was generated."""
    return {"found": synthetic.found(doc["answers"], results[0])}
