"""The table of metric names."""

from pathlib import Path

import pytest

from miles.metrics import METRICS, faults, find, page

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("step", "step"),
        ("groups/dropped/zero_variance", "groups/dropped/<reason>"),
        ("loss/policy", "loss/<term>"),
        ("off_policy/lag_3/k3", "off_policy/lag_<k>/k3"),
        ("eval/heldout/score", "eval/<set>/score"),
        ("eval/heldout/stderr", "eval/<set>/<name>"),
        ("env/tests/passed", "env/<name>"),
    ],
)
def test_find_names_the_row(name: str, row: str) -> None:
    metric = find(name)
    assert metric is not None
    assert metric.name == row


@pytest.mark.parametrize(
    "name", ["steps", "off_policy/lag_x/k3", "groups/dropped/", "xstep", "time/step"]
)
def test_find_refuses_unknown_names(name: str) -> None:
    assert find(name) is None


def test_faults_name_the_close_match_and_the_wrong_type() -> None:
    found = faults({"step": 1, "stage": 3, "reward/maen": 0.5, "lr": "fast", "grad_norm": [1.0]})
    assert [text.split(";")[0] for text in found] == [
        "metric 'stage' is 3, not text",
        "unknown metric 'reward/maen'",
        "metric 'lr' is 'fast', not a number",
        "metric 'grad_norm' is a list, not a plain number",
    ]
    assert "did you mean 'reward/mean'?" in found[1]


def test_faults_are_none_for_a_full_step() -> None:
    metrics = {
        m.name.replace("<k>", "1").replace("<", "").replace(">", ""): "x" if m.text else 1.0
        for m in METRICS
    }
    assert faults(metrics) == ()


def test_metrics_have_one_row_a_name() -> None:
    names = [m.name for m in METRICS]
    assert len(names) == len(set(names))
    assert all(m.meaning.endswith(".") and m.unit for m in METRICS)


def test_page_is_what_docs_hold() -> None:
    assert (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8") == page(), (
        "run: python -m miles.metrics > docs/metrics.md"
    )
