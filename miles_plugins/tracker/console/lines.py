"""Words and numbers for the console: one line a thing, the same on a terminal and in a log file.

Formatting only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from miles_plugins.tracker.console.progress import Progress

_BLOCKS = "▁▂▃▄▅▆▇█"


def duration(seconds: float | None) -> str:
    """`1:02:03`, `02:03`, or `--:--` when unknown."""
    if seconds is None:
        return "--:--"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes:02d}:{rest:02d}"


def count(value: float) -> str:
    """A number of things in at most five characters: `950`, `12.3k`, `4.5M`."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{letter}"
    return f"{value:.0f}"


def number(value: Any) -> str:
    """Three digits that matter; `-` when there is none."""
    if value is None:
        return "-"
    if value != 0 and not 1e-3 <= abs(value) < 1e4:
        return f"{value:.1e}"
    return f"{value:.3f}"


def sparkline(values: Sequence[float], low: float | None = None, high: float | None = None) -> str:
    """The course of a series in block characters, from its lowest to its highest value."""
    if not values:
        return ""
    low = min(values) if low is None else low
    high = max(values) if high is None else high
    scale = (len(_BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BLOCKS[round((min(max(v, low), high) - low) * scale)] for v in values)


def losses(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Loss terms by name."""
    return {k.removeprefix("loss/"): v for k, v in metrics.items() if k.startswith("loss/")}


def start_line(progress: Progress) -> str:
    """A stage begins."""
    place = ""
    if len(progress.stages) > 1 and progress.stage in progress.stages:
        place = f" ({progress.stages.index(progress.stage) + 1} of {len(progress.stages)})"
    return (
        f"stage {progress.stage}{place}: {progress.stage_steps} steps from version {progress.step}"
    )


def step_line(progress: Progress) -> str:
    """Where a stage is and how it goes."""
    metrics = progress.metrics
    parts = [f"{progress.stage} {progress.stage_step}/{progress.stage_steps}"]
    if metrics.get("reward/mean") is not None:
        parts.append(f"reward {progress.recent.get('reward', metrics['reward/mean']):.3f}")
    parts += [f"{name} {number(value)}" for name, value in losses(metrics).items()]
    if metrics.get("mismatch/logprob_abs_max") is not None:
        parts.append(f"mismatch max {number(metrics['mismatch/logprob_abs_max'])}")
    if progress.tokens_per_s is not None:
        parts.append(f"{count(progress.tokens_per_s)} tokens/s")
    if (pace := progress.recent.get("pace")) is not None:
        parts.append(f"{pace * 1e3:.0f} ms/step")
    parts.append(f"left {duration(progress.left_s)}")
    return f"[{duration(progress.elapsed_s)}] " + "  ".join(parts)


def evaluation(progress: Progress, data: Mapping[str, Any]) -> str:
    """One evaluation set has a score, or a reason for having none."""
    head = f"[{duration(progress.elapsed_s)}] {data['set']} at step {data['step']}:"
    if "skipped" in data:
        return f"{head} skipped, {data['skipped']}"
    spread = f" ± {data['stderr']:.3f}" if data.get("stderr") is not None else ""
    return f"{head} {data['score']:.3f}{spread} ({data['samples']} samples)"


def summary(progress: Progress) -> str:
    """The run is over."""
    where = f" at step {progress.step}" if progress.stage or progress.step else ""
    lines = [f"run {progress.outcome} after {duration(progress.elapsed_s)}{where}"]
    for name, results in progress.evaluations.items():
        lines.append(f"  {name}: {_course([result for _, result in results])}")
    if progress.reward_ends is not None:
        first, last = progress.reward_ends
        lines.append(f"  reward in {progress.stage}: {first:.3f} → {last:.3f}")
    if progress.drops:
        lines.append(f"  dropped groups in {progress.stage}: {drops(progress)}")
    if progress.warnings:
        lines.append(f"  {progress.warnings} warnings, the last: {progress.last_warning}")
    lines.append(f"  {progress.directory}")
    return "\n".join(lines)


def drops(progress: Progress) -> str:
    """Dropped groups by reason, most first."""
    return ", ".join(f"{reason} {n}" for reason, n in progress.drops.most_common())


def _course(results: Sequence[float | str]) -> str:
    """Scores of a set, and how many of its evaluations were skipped."""
    scores = [f"{result:.3f}" for result in results if not isinstance(result, str)]
    skips = [result for result in results if isinstance(result, str)]
    said = [" → ".join(scores if len(scores) <= 6 else [*scores[:3], "…", *scores[-2:]])]
    if skips:
        said.append(f"skipped {len(skips)} of {len(results)}, the last: {skips[-1]}")
    return "; ".join(filter(None, said))
