"""A timeline as SVG: the trainer, every engine, publishes and evaluations, over virtual time.

It draws what `miles.simulate.watching` kept and computes nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from xml.sax.saxutils import escape

from miles.simulate.result import Result

__all__ = ["draw", "write"]

_WIDTH, _LEFT, _ROW, _GAP, _TOP = 1200, 110, 22, 8, 46
_BINS = 600
_MOST_ENGINES = 16
_COLOURS = {
    "busy": "#2563a6", "publish": "#d9822b", "eval_wait": "#7b4ea3", "evaluation": "#7b4ea3",
    "wait": "#e4e7eb",
}  # fmt: skip
_WORDS = (("busy", "training"), ("wait", "waiting for groups"), ("publish", "publishing"),
          ("eval_wait", "evaluating"))  # fmt: skip


def write(result: Result, path: Path) -> None:
    """Write the picture."""
    path.write_text(draw(result), encoding="utf-8")


def draw(result: Result) -> str:
    """The SVG, from the beginning to the end of what was kept."""
    timeline = result.timeline
    end = (
        timeline.steps[-1]
        if timeline.steps
        else max((b for _, _, b in timeline.trainer), default=1)
    )
    names = list(timeline.engines)[:_MOST_ENGINES]
    height = _TOP + (_ROW + _GAP) * (1 + len(names)) + 30
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" '
        f'width="{_WIDTH}" height="{height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{height}" fill="#ffffff"/>',
        *_legend(len(result.timeline.engines), len(names)),
        *_trainer(timeline.trainer, end),
    ]
    most = max((n for name in names for _, n in timeline.engines[name]), default=1) or 1
    for row, name in enumerate(names, start=1):
        parts += _engine(name, timeline.engines[name], end, row, most)
    parts += _marks(timeline.steps, end, height)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _x(when: float, end: float) -> float:
    return _LEFT + when / end * (_WIDTH - _LEFT - 12)


def _rect(begin: float, stop: float, end: float, row: int, colour: str, said: str) -> str:
    left, top = _x(begin, end), _TOP + row * (_ROW + _GAP)
    width = max(0.5, _x(stop, end) - left)
    return (
        f'<rect x="{left:.1f}" y="{top}" width="{width:.1f}" height="{_ROW}" fill="{colour}">'
        f"<title>{escape(said)}</title></rect>"
    )


def _label(row: int, words: str) -> str:
    top = _TOP + row * (_ROW + _GAP) + 15
    return f'<text x="{_LEFT - 8}" y="{top}" text-anchor="end">{escape(words)}</text>'


def _legend(engines: int, drawn: int) -> Iterator[str]:
    at = _LEFT
    for cause, words in _WORDS:
        yield f'<rect x="{at}" y="10" width="12" height="12" fill="{_COLOURS[cause]}"/>'
        yield f'<text x="{at + 17}" y="20">{words}</text>'
        at += 40 + 7 * len(words)
    more = f"; {drawn} of {engines} engines" if drawn < engines else ""
    yield f'<text x="{at}" y="20">engines: the darker, the more requests at once{more}</text>'


def _trainer(segments: Sequence[tuple[str, float, float]], end: float) -> Iterator[str]:
    yield _label(0, "trainer")
    for cause, begin, stop in segments:
        if stop <= end:
            said = f"{cause}: {begin:.1f} to {stop:.1f} s"
            yield _rect(begin, stop, end, 0, _COLOURS.get(cause, "#9aa5b1"), said)


def _engine(
    name: str, series: Sequence[tuple[float, int]], end: float, row: int, most: int
) -> Iterator[str]:
    yield _label(row, name)
    yield _rect(0, end, end, row, "#f2f4f7", f"{name}: idle")
    for begin, stop, mean in _binned(series, end):
        if mean > 0:
            shade = round(225 - 190 * min(1.0, mean / most))
            said = f"{name}: {mean:.1f} requests at {begin:.1f} s"
            yield _rect(begin, stop, end, row, f"rgb({shade - 30},{shade},{shade - 40})", said)


def _binned(
    series: Sequence[tuple[float, int]], end: float
) -> Iterator[tuple[float, float, float]]:
    """(begin, end, mean requests) of bins of equal width."""
    width = end / _BINS
    sums = [0.0] * _BINS
    for index, (begin, count) in enumerate(series):
        stop = min(end, series[index + 1][0] if index + 1 < len(series) else end)
        first, at = int(begin / width), begin
        for place in range(first, _BINS):
            until = min(stop, (place + 1) * width)
            sums[place] += max(0.0, until - at) * count
            at = until
            if at >= stop:
                break
    for place, total in enumerate(sums):
        yield place * width, (place + 1) * width, total / width


def _marks(steps: Sequence[float], end: float, height: int) -> Iterator[str]:
    bottom = height - 24
    for number, when in enumerate(steps, start=1):
        x = _x(when, end)
        yield (
            f'<line x1="{x:.1f}" y1="{_TOP - 8}" x2="{x:.1f}" y2="{bottom}" stroke="#c0392b" '
            f'stroke-width="0.7"><title>step {number} ended at {when:.1f} s</title></line>'
        )
    yield f'<text x="{_LEFT}" y="{height - 8}">0 s</text>'
    yield f'<text x="{_WIDTH - 12}" y="{height - 8}" text-anchor="end">{end:,.0f} s</text>'
