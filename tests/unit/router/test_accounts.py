"""What the router counts, and the metrics that follow."""

from miles.metrics import faults
from miles.router import summarize


def test_summarize_adds_routers_and_takes_differences() -> None:
    first = {"requests": 10, "prompt_tokens": 100, "cached_tokens": 90, "active/a": 2, "keys": 3}
    second = {"requests": 5, "prompt_tokens": 300, "cached_tokens": 90, "active/a": 1, "keys": 4}
    before = {"requests": 4, "prompt_tokens": 100, "cached_tokens": 30, "active/a": 7, "keys": 9}
    metrics = summarize([first, second], [before])
    assert metrics["router/requests"] == 11
    assert metrics["router/prefix_hit_rate"] == (180 - 30) / (400 - 100)
    assert metrics["router/active/a"] == 3 and metrics["router/keys"] == 7
    assert metrics["router/rebinds"] == 0


def test_summarize_has_no_hit_rate_without_prompts() -> None:
    same = {"requests": 3, "prompt_tokens": 10, "cached_tokens": 5}
    assert "router/prefix_hit_rate" not in summarize([same], [same])
    assert "router/prefix_hit_rate" not in summarize([])


def test_summarize_gives_documented_names_only() -> None:
    metrics = summarize([{"prompt_tokens": 2, "cached_tokens": 1, "active/engine 0": 1, "keys": 1}])
    assert faults(metrics) == ()
