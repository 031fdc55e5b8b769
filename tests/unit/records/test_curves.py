"""Charts: scales, thinning, and SVG that parses."""

import json
import math
import re
from itertools import pairwise
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles.records.curves import Panel, Series, bars, chart, short, ticks


def figure(text: str) -> ElementTree.Element:
    return ElementTree.fromstring(text)


def path_points(text: str, colour: int = 0) -> list[tuple[float, float]]:
    (path,) = re.findall(rf'<path class="l{colour}" d="M([^"]*)"', text)
    return [tuple(map(float, pair.split(","))) for pair in path.split("L")]  # type: ignore[misc]


def line(*ys: float | None, name: str = "a", stage: str = "s") -> Panel:
    return Panel(name=stage, series=[Series(name=name, points=list(enumerate(ys, 1)))])


@given(st.floats(-1e6, 1e6), st.floats(1e-6, 1e6))
def test_ticks_are_round_inside_and_evenly_spaced(low: float, width: float) -> None:
    high = low + width
    if not high > low:
        return
    marks = ticks(low, high)
    assert 1 <= len(marks) <= 9
    slack = 1e-6 * max(abs(low), abs(high), width)
    assert all(low - slack <= m <= high + slack for m in marks)
    steps = [b - a for a, b in pairwise(marks)]
    assert all(math.isclose(s, steps[0], rel_tol=1e-3) for s in steps)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (None, "–"),
        (0.0, "0"),
        (0.98765, "0.988"),
        (12345, "12.3k"),
        (-2.5e6, "-2.5M"),
        (3.14e-6, "3.1e-06"),
    ],
)
def test_short_keeps_three_digits(value: float | None, words: str) -> None:
    assert short(value) == words


def test_chart_draws_a_rising_line_rising() -> None:
    points = path_points(chart("t", [line(0.0, 1.0, 2.0)], unit="u"))
    xs, ys = zip(*points, strict=True)
    assert list(xs) == sorted(xs)
    assert list(ys) == sorted(ys, reverse=True)  # SVG counts downwards
    assert ys[0] - ys[1] == pytest.approx(ys[1] - ys[2], abs=0.2)


def test_chart_log_scale_gives_every_decade_the_same_height() -> None:
    points = path_points(chart("t", [line(1e-6, 1e-4, 1e-2)], unit="u", log=True))
    ys = [y for _, y in points]
    assert ys[0] - ys[1] == pytest.approx(ys[1] - ys[2], abs=0.2)


def test_chart_log_scale_draws_zero_at_the_bottom_and_says_when_all_is_zero() -> None:
    points = path_points(chart("t", [line(0.0, 1e-4, 1e-2)], unit="u", log=True))
    assert points[0][1] == max(y for _, y in points)
    assert "exactly 0 at every step" in chart("t", [line(0.0, 0.0)], unit="u", log=True)


def test_chart_leaves_gaps_where_values_are_missing() -> None:
    text = chart("t", [line(1.0, 2.0, None, float("nan"), 2.0, 1.0)], unit="u")
    assert len(re.findall(r'<path class="l0"', text)) == 2


def test_chart_gives_every_stage_the_same_room() -> None:
    long = line(*[0.5] * 1200, stage="sft")
    points = list(enumerate([0.5] * 150, 1201))
    brief = Panel(name="grpo", series=[Series(name="a", points=points)])
    wide = [
        p[-1][0] - p[0][0]
        for d in re.findall(r'<path class="l0" d="M([^"]*)"', chart("t", [long, brief], unit=""))
        if (p := [tuple(map(float, pair.split(","))) for pair in d.split("L")])
    ]
    assert wide[0] == pytest.approx(wide[1], rel=0.02)


def test_chart_leaves_out_stages_without_values_and_says_when_none_is_left() -> None:
    text = chart("t", [line(None, stage="sft"), line(1.0, stage="grpo")], unit="u")
    assert ">grpo<" in text
    assert ">sft<" not in text
    assert "not measured" in chart("t", [line(None)], unit="u")


def test_chart_stacks_add_up() -> None:
    points = [(1, 1.0), (2, 3.0)]
    series = [Series(name=n, points=points) for n in ("a", "b")]
    text = chart("t", [Panel(name="s", series=series)], unit="u", stacked=True)
    tops = []
    for colour in (0, 1):
        (path,) = re.findall(rf'<path class="s{colour}" d="M([^Z]*)Z"', text)
        corners = [tuple(map(float, pair.split(","))) for pair in path.split("L")]
        tops.append([y for _, y in corners[:2]])
    base = 250 - 28
    for one, both in zip(*tops, strict=True):
        assert base - both == pytest.approx(2 * (base - one), abs=0.2)


def test_chart_hover_holds_the_values_shown() -> None:
    root = figure(chart("t", [line(1.0, 2.0)], unit="u"))
    (panel,) = json.loads(root.find(".//svg").attrib["data-hover"])  # type: ignore[union-attr]
    assert [(at[1], at[2]) for at in panel["at"]] == [(1, [[0, "1"]]), (2, [[0, "2"]])]


def test_chart_and_bars_escape_names() -> None:
    bad = "<script>&\"'"
    text = chart(bad, [line(1.0, name=bad, stage=bad)], unit=bad)
    text += bars(bad, [(bad, [(bad, 1.0)])], unit=bad)
    assert "<script>" not in text
    figure(f"<div>{text}</div>")


def test_bars_share_one_scale() -> None:
    text = bars("t", [("a", [("x", 1.0), ("y", 0.0)]), ("b", [("x", 3.0), ("y", 1.0)])], unit="s")
    assert re.findall(r"width:([\d.]+)%", text) == ["25.00", "75.00", "25.00"]
    assert "nothing" in bars("t", [("a", [("x", 0.0)])], unit="s")


values = st.one_of(st.none(), st.floats(allow_nan=True, allow_infinity=True, width=64))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(values, max_size=400), min_size=1, max_size=3), st.booleans(), st.booleans()
)
def test_chart_of_anything_is_well_formed(
    stages: list[list[float | None]], log: bool, stacked: bool
) -> None:
    panels = [line(*ys, stage=str(i)) for i, ys in enumerate(stages)]
    text = chart("t", panels, unit="u", log=log, stacked=stacked and not log)
    figure(text)
    assert "nan" not in text
    assert "inf" not in text
    assert text.count("L") < 3 * 2 * 250
