"""A small environment of the verifiers library, the default: say three words in reverse order.

It is written as its authors write theirs: a dataset, a parser, a rubric.
"""

from __future__ import annotations

import random
from typing import Any

WORDS = ["ash", "bay", "cod", "dew", "elm", "fig", "gnu", "hay", "ivy", "jay", "kea", "lap"]


def load_environment(train: int = 200, heldout: int = 20, words: int = 3) -> Any:
    """A `SingleTurnEnv`; the reward is the share of words in their place."""
    import verifiers as vf
    from datasets import Dataset

    draw = random.Random(0)
    seen: dict[str, str] = {}
    while len(seen) < train + heldout:
        picked = draw.sample(WORDS, words)
        seen[" ".join(picked)] = " ".join(reversed(picked))
    rows = [{"question": question, "answer": answer} for question, answer in seen.items()]

    def in_place(completion: Any, answer: str) -> float:
        said = str(completion[-1].content if completion else "").split()
        right = answer.split()
        return sum(a == b for a, b in zip(said, right, strict=False)) / max(len(said), len(right))

    return vf.SingleTurnEnv(
        dataset=Dataset.from_list(rows[:train]),
        eval_dataset=Dataset.from_list(rows[train:]),
        system_prompt="Say the words in reverse order, and nothing else.",
        rubric=vf.Rubric(funcs=[in_place]),
    )
