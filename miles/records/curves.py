"""Small charts as inline SVG: lines, stacked areas and bars, one panel a stage.

Pure text from numbers: no file, no plotting library, no knowledge of what the numbers mean.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import pairwise

__all__ = ["Panel", "Series", "bars", "chart", "short", "ticks"]

WIDTH, HEIGHT = 560, 250
LEFT, RIGHT, TOP, BOTTOM = 54, 12, 26, 28
GAP = 18  # between panels
POINTS = 240  # of a series in one panel, before neighbours are averaged

Point = tuple[float, float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One curve."""

    name: str
    """In the legend."""
    points: Sequence[Point]
    """(x, y) with x rising; None leaves a gap."""
    spread: Sequence[float | None] = ()
    """Half-length of an error bar at each point; empty for none."""
    dots: bool = False
    """Mark every point, with its error bar; for series of few."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """A stretch of the x axis with its own scale: a stage of any length stays readable."""

    name: str
    """Above the panel."""
    series: Sequence[Series] = field(default_factory=tuple)
    """Curves; the same name has the same colour in every panel."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scale:
    """Values to pixels."""

    low: float
    high: float
    start: float
    stop: float
    log: bool = False

    def __call__(self, value: float) -> float:
        low, high = self.low, self.high
        if self.log:
            value, low, high = math.log10(max(value, low)), math.log10(low), math.log10(high)
        share = (value - low) / (high - low) if high > low else 0.5
        return self.start + share * (self.stop - self.start)


def short(value: float | None) -> str:
    """A number in few characters: `0.987`, `12.3k`, `3.1e-06`; a dash for none."""
    if value is None:
        return "–"
    size = abs(value)
    if size >= 1e15 or 0 < size < 1e-3:
        return f"{value:.1e}"
    for scale, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if size >= scale:
            return f"{value / scale:.3g}{letter}"
    return f"{value:.3g}"


def ticks(low: float, high: float, count: int = 4) -> list[float]:
    """About `count` round numbers in [low, high]: multiples of 1, 2 or 5 times a power of ten."""
    if not high > low:
        return [low]
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= raw * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [round(i * step, 12) if step > 1e-9 else i * step for i in range(first, last + 1)]


def chart(
    title: str,
    panels: Sequence[Panel],
    *,
    unit: str,
    log: bool = False,
    stacked: bool = False,
    floor: float | None = None,
    ceiling: float | None = None,
) -> str:
    """A figure with one panel for each stage that has any value; an explanation when none has.

    `floor` and `ceiling` are values the y axis must at least reach. On a log scale, values that are
    not above 0 are drawn at the bottom; a stack's few highest may be cut off at the top.
    """
    panels = [p for p in map(_thinned, panels) if p.series]
    if not panels:
        return _figure(title, unit, (), '<p class="none">not measured</p>')
    names = list(dict.fromkeys(s.name for p in panels for s in p.series))
    drawn = [_stack(p) if stacked else p for p in panels]
    floor = 0.0 if stacked else floor
    limits = _limits(drawn, log=log, stacked=stacked, floor=floor, ceiling=ceiling)
    if limits is None:
        return _figure(title, unit, names, '<p class="none">exactly 0 at every step</p>')
    y = _Scale(low=limits[0], high=limits[1], start=HEIGHT - BOTTOM, stop=TOP, log=log)
    width = (WIDTH - LEFT - RIGHT - GAP * (len(panels) - 1)) / len(panels)
    parts, hover = [_y_axis(y)], []
    for i, (panel, shown) in enumerate(zip(panels, drawn, strict=True)):
        start = LEFT + i * (width + GAP)
        xs = [x for s in panel.series for x, _ in s.points]
        x = _Scale(low=min(xs), high=max(xs), start=start, stop=start + width)
        parts.append(_x_axis(x, panel.name))
        below: Sequence[Point] = ()
        for series in shown.series:
            colour = names.index(series.name) % 6
            parts.append(
                _area(series, below, x, y, colour) if stacked else _line(series, x, y, colour)
            )
            below = series.points
        hover.append(_hover(panel, shown, x, y, names))
    data = escape(json.dumps(hover, separators=(",", ":")), quote=True)
    svg = (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}" '
        f'data-hover="{data}">'
    )
    return _figure(title, unit, names, svg + "".join(parts) + '<line class="at"/></svg>')


def bars(title: str, rows: Sequence[tuple[str, Sequence[tuple[str, float]]]], *, unit: str) -> str:
    """Horizontal stacked bars: (label, ((part, value), ...)) a row, all to one scale."""
    rows = [(label, [(n, v) for n, v in parts if v > 0]) for label, parts in rows]
    most = max((sum(v for _, v in parts) for _, parts in rows), default=0.0)
    if most <= 0:
        return _figure(title, unit, (), '<p class="none">nothing</p>')
    names = list(dict.fromkeys(n for _, parts in rows for n, _ in parts))
    lines = []
    for label, parts in rows:
        total = sum(v for _, v in parts)
        cells = "".join(
            f'<i class="b{names.index(n) % 6}" style="width:{100 * v / most:.2f}%" '
            f'title="{escape(n)}: {short(v)} {escape(unit)}, {v / total:.0%}"></i>'
            for n, v in parts
        )
        lines.append(f"<dt>{escape(label)}</dt><dd>{cells}<span>{short(total)}</span></dd>")
    return _figure(title, unit, names, f'<dl class="bars">{"".join(lines)}</dl>')


def _figure(title: str, unit: str, names: Iterable[str], body: str) -> str:
    legend = "".join(
        f'<span><i class="b{i % 6}"></i>{escape(name)}</span>' for i, name in enumerate(names)
    )
    head = f"<b>{escape(title)}</b> <small>{escape(unit)}</small>"
    return f"<figure><figcaption><div>{head}</div><div>{legend}</div></figcaption>{body}</figure>"


def _ys(series: Series) -> list[float]:
    return [y for _, y in series.points if y is not None]


def _drawable(y: float | None) -> float | None:
    """Without what no axis can hold: not finite or astronomical is a gap, next to nothing is 0."""
    if y is None or not abs(y) < 1e100:
        return None
    return float(y) if abs(y) > 1e-100 else 0.0


def _thinned(panel: Panel) -> Panel:
    series = [_thin(s) for s in panel.series]
    return Panel(name=panel.name, series=[s for s in series if _ys(s)])


def _thin(series: Series) -> Series:
    """At most `POINTS` points: means of equal stretches, gaps where a stretch has no value."""
    points: list[Point] = [(x, _drawable(y)) for x, y in series.points]
    spread = [_drawable(half) for half in series.spread]
    size = len(points)
    if size <= POINTS:
        return Series(name=series.name, points=points, spread=spread, dots=series.dots)
    edges = [round(i * size / POINTS) for i in range(POINTS + 1)]
    cuts = [slice(a, b) for a, b in pairwise(edges)]
    return Series(
        name=series.name,
        points=[(points[c][-1][0], _mean(y for _, y in points[c])) for c in cuts],
        spread=[_mean(spread[c]) for c in cuts] if spread else (),
        dots=series.dots,
    )


def _mean(values: Iterable[float | None]) -> float | None:
    found = [v for v in values if v is not None]
    return sum(found) / len(found) if found else None


def _stack(panel: Panel) -> Panel:
    """Each series on top of those before it; a missing value counts as 0."""
    total: dict[float, float] = {x: 0.0 for s in panel.series for x, _ in s.points}
    stacked = []
    for series in panel.series:
        own = dict(series.points)
        total = {x: t + (own.get(x) or 0.0) for x, t in sorted(total.items())}
        stacked.append(Series(name=series.name, points=list(total.items())))
    return Panel(name=panel.name, series=stacked)


def _limits(
    panels: Sequence[Panel],
    *,
    log: bool,
    stacked: bool,
    floor: float | None,
    ceiling: float | None,
) -> tuple[float, float] | None:
    every = [y for p in panels for s in p.series for y in _ys(s)]
    if log:
        above = [y for y in every if y > 0]
        if not above:
            return None
        low = 10.0 ** math.floor(math.log10(min(above)))
        return low, max(10.0 ** math.ceil(math.log10(max(above))), low * 10)
    low = min([*every, *(() if floor is None else (floor,))])
    high = max([*every, *(() if ceiling is None else (ceiling,))])
    if high <= low and floor is not None and low >= floor:
        return floor, low + (abs(low) or 1.0) * 0.1
    if high <= low:
        return low - (abs(low) or 1.0) * 0.1, high + (abs(high) or 1.0) * 0.1
    if stacked:  # a first step that waited for processes to start must not flatten all others
        high = min(high, 2 * sorted(every)[int(0.95 * (len(every) - 1))] or high)
    pad = 0.04 * (high - low)
    return (low if low == floor else low - pad), (high if high == ceiling else high + pad)


def _y_axis(y: _Scale) -> str:
    if y.log:
        first, last = round(math.log10(y.low)), round(math.log10(y.high))
        marks = [10.0**e for e in range(first, last + 1, max(1, math.ceil((last - first) / 5)))]
    else:
        marks = ticks(y.low, y.high)
    return "".join(
        f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(m):.1f}" y2="{y(m):.1f}"/>'
        f'<text x="{LEFT - 6}" y="{y(m) + 4:.1f}" text-anchor="end">'
        f"{f'1e{round(math.log10(m))}' if y.log else short(m)}</text>"
        for m in marks
    )


def _x_axis(x: _Scale, name: str) -> str:
    wide = x.stop - x.start
    marks = [m for m in ticks(x.low, x.high, max(1, int(wide / 60))) if m == round(m)]
    labels = "".join(
        f'<text x="{x(m):.1f}" y="{HEIGHT - 9}" text-anchor="middle">{m:.0f}</text>' for m in marks
    )
    base = f'<path class="axis" d="M{x.start:.1f},{HEIGHT - BOTTOM}H{x.stop:.1f}"/>'
    middle = (x.start + x.stop) / 2
    above = f'class="stage" x="{middle:.1f}" y="15" text-anchor="middle"'
    return f"{base}{labels}<text {above}>{escape(name)}</text>"


def _line(series: Series, x: _Scale, y: _Scale, colour: int) -> str:
    parts = []
    for run in _runs(series.points):
        path = "L".join(f"{x(a):.1f},{y(b):.1f}" for a, b in run)
        parts.append(f'<path class="l{colour}" d="M{path}"/>')
        if len(run) == 1 or series.dots:
            parts += [
                f'<circle class="b{colour}" cx="{x(a):.1f}" cy="{y(b):.1f}" r="3"/>' for a, b in run
            ]
    if series.dots:
        for (a, b), half in zip(series.points, series.spread, strict=False):
            if b is not None and half:
                top, foot = y(b + half), y(b - half)
                parts.append(f'<path class="l{colour}" d="M{x(a):.1f},{top:.1f}V{foot:.1f}"/>')
    return "".join(parts)


def _area(series: Series, below: Sequence[Point], x: _Scale, y: _Scale, colour: int) -> str:
    under = below or [(a, 0.0) for a, _ in series.points]
    corners = [*series.points, *reversed(under)]
    edge = "L".join(f"{x(a):.1f},{y(min(b or 0.0, y.high)):.1f}" for a, b in corners)
    return f'<path class="s{colour}" d="M{edge}Z"/>'


def _runs(points: Sequence[Point]) -> list[list[tuple[float, float]]]:
    """Stretches without a gap."""
    runs: list[list[tuple[float, float]]] = [[]]
    for x, y in points:
        if y is None:
            runs.append([])
        else:
            runs[-1].append((x, y))
    return [r for r in runs if r]


def _hover(
    panel: Panel, shown: Panel, x: _Scale, y: _Scale, names: Sequence[str]
) -> dict[str, object]:
    """What the page's script needs to show values under the pointer: pixels and words."""
    rows: dict[float, list[tuple[int, str]]] = {}
    for series in panel.series:
        for at, value in series.points:
            if value is not None:
                rows.setdefault(at, []).append((names.index(series.name), short(value)))
    return {
        "from": round(x.start, 1),
        "to": round(x.stop, 1),
        "at": [[round(x(at), 1), int(at), found] for at, found in sorted(rows.items())],
    }
