"""Built-in reward functions by name: `reward(text, task) -> float`, plain and synchronous.

They only compare; time limits are `miles_plugins.environment.grading`'s, and files nobody's.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

from miles import Task

_NUMBER = re.compile(
    r"(?<![\w.])[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+)?(?:[eE][-+]?\d{1,3})?(?:/\d+)?"
)
_RELATIVE, _ABSOLUTE = Fraction(1, 10**9), Fraction(1, 10**12)
_LONGEST = 100_000  # characters looked at, from the end: the answer comes last


def exact(text: str, task: Task) -> float:
    """1 when the text, stripped, is the answer."""
    return float(text.strip() == str(task.answer).strip())


def numeric(text: str, task: Task) -> float:
    """1 when the last number in the text equals the answer: `1,200`, `1.2e3`, `-3` and `3/4` are
    numbers."""
    found, wanted = last_number(text), last_number(str(task.answer))
    if found is None or wanted is None:
        return 0.0
    return float(
        abs(found - wanted) <= max(abs(wanted) * _RELATIVE, _ABSOLUTE)
    )  # exact: a float may overflow


def math_answer(text: str, task: Task) -> float:
    """1 when `math-verify` finds the answer in the text equal to the task's, as mathematics.

    Slow now and then without bound, hence run with a deadline; its own alarms need the main thread
    and are off.
    """
    from math_verify import parse, verify

    gold = parse(_as_math(str(task.answer)), parsing_timeout=None)
    return float(
        bool(gold) and bool(verify(gold, parse(text, parsing_timeout=None), timeout_seconds=None))
    )


def regex(text: str, task: Task, pattern: str = "") -> float:
    """1 when the pattern is found in the text and, if it has a group, the last match's first group
    is the answer. Without a pattern, 1 when the answer, as a pattern, is found. Slow for some
    patterns, hence run with a deadline."""
    compiled = re.compile(pattern or str(task.answer))
    matches = list(compiled.finditer(text))
    if not matches:
        return 0.0
    if not pattern or not compiled.groups:
        return 1.0
    return float((matches[-1].group(1) or "").strip() == str(task.answer).strip())


REWARDS: Mapping[str, Callable[[str, Task], Any]] = {
    "exact": exact,
    "numeric": numeric,
    "math": math_answer,
    "regex": regex,
}
"""Every built-in reward by name."""

SLOW = frozenset({"math", "regex"})
"""Those whose time depends on the text without a bound."""


def last_number(text: str) -> Fraction | None:
    """The last number in a text, exactly; None when there is none (or a fraction over 0)."""
    found = [m for m in _NUMBER.findall(text[-_LONGEST:]) if any(c.isdigit() for c in m)]
    if not found:
        return None
    top, _, bottom = found[-1].replace(",", "").partition("/")
    try:
        return Fraction(top) / Fraction(bottom or 1)
    except (ValueError, ZeroDivisionError):
        return None


def _as_math(answer: str) -> str:
    """An answer column may hold bare LaTeX, which is only read inside dollars."""
    return answer if "$" in answer or "\\boxed" in answer else f"${answer}$"
