"""The live panel, drawn with rich.

It reads a `Progress` and never changes it; a thread of rich's draws at a fixed, slow rate.
"""

from __future__ import annotations

import threading

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel as Box
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from miles_plugins.tracker.console.lines import (
    count,
    drops,
    duration,
    losses,
    number,
    sparkline,
)
from miles_plugins.tracker.console.progress import Progress

_COURSE = 40  # characters of a sparkline
_COLOURS = {"wait": "yellow", "train": "green", "publish": "cyan", "overhead": "magenta"}


class Panel:
    """Keeps the panel at the bottom of the terminal; printed lines scroll above it."""

    def __init__(self, progress: Progress, lock: threading.Lock, *, refresh_s: float) -> None:
        self._progress = progress
        self._lock = lock
        self._console = Console()
        self._live = Live(
            console=self._console, refresh_per_second=1 / refresh_s, get_renderable=self.draw
        )

    @property
    def can_draw(self) -> bool:
        """Whether standard output is a terminal with a movable cursor."""
        return self._console.is_terminal and not self._console.is_dumb_terminal

    def start(self) -> None:
        """Begin drawing."""
        self._live.start(refresh=True)

    def stop(self) -> None:
        """Draw a last time and leave the panel where it is."""
        self._live.stop()

    def print(self, text: str) -> None:
        """A line above the panel."""
        self._console.print(text, markup=False, highlight=False)

    def draw(self) -> Box:
        """The panel as it should look now."""
        with self._lock:
            return self._draw(self._progress)

    def _draw(self, progress: Progress) -> Box:
        rows = Table.grid(padding=(0, 2), expand=True)
        rows.add_column(style="bold", no_wrap=True, width=10)
        rows.add_column(ratio=1)
        for label, value in self._rows(progress):
            rows.add_row(label, value)
        title = f"[bold]miles[/] {progress.name}" if progress.name else "[bold]miles[/]"
        return Box(
            Group(self._bar(progress), rows),
            title=title,
            title_align="left",
            subtitle=progress.directory,
            subtitle_align="right",
            border_style="dim",
        )

    def _bar(self, progress: Progress) -> Table:
        bar = Table.grid(padding=(0, 2), expand=True)
        bar.add_column(width=10, no_wrap=True)
        bar.add_column(ratio=1)
        bar.add_column(no_wrap=True)
        bar.add_column(no_wrap=True)
        done = f"{progress.stage_step}/{progress.stage_steps}"
        time = f"{duration(progress.elapsed_s)} · left {duration(progress.left_s)}"
        bar.add_row(
            Text(progress.stage or "starting", style="bold cyan"),
            ProgressBar(total=max(1, progress.stage_steps), completed=progress.stage_step),
            done,
            time,
        )
        return bar

    def _rows(self, progress: Progress) -> list[tuple[str, Text]]:
        metrics = progress.metrics
        rows = []
        if progress.reward_ends is not None:
            course = progress.reward.cut(_COURSE)
            text = Text(f"{progress.recent['reward']:.3f}  ")
            text.append(sparkline(course), style="green")
            text.append(f"  from {progress.reward_ends[0]:.3f}", style="dim")
            rows.append(("reward", text))
        if progress.evaluations:
            rows.append(("held out", _evaluations(progress)))
        terms = "  ".join(f"{name} {number(value)}" for name, value in losses(metrics).items())
        if terms:
            rows.append(("loss", Text(f"{terms}  grad {number(metrics.get('grad_norm'))}")))
        if "mismatch/logprob_abs_max" in metrics:
            text = f"max {number(metrics['mismatch/logprob_abs_max'])}"
            text += f"  mean {number(metrics.get('mismatch/logprob_abs_mean'))}"
            text += f"  k3 {number(metrics.get('mismatch/k3'))}  nats"
            rows.append(("mismatch", Text(text)))
        elif metrics.get("mismatch/unmeasured"):
            rows.append(("mismatch", Text("unmeasured", style="yellow")))
        if progress.tokens_per_s is not None and (pace := progress.recent.get("pace")) is not None:
            text = f"{count(progress.tokens_per_s)} tokens/s  {1 / max(pace, 1e-9):.3g} steps/s"
            if "length/mean" in metrics:
                text += f"  length {metrics['length/mean']:.1f}"
            rows.append(("speed", Text(text)))
        if progress.shares:
            rows.append(("time", _shares(progress.shares)))
        if "groups/buffered" in metrics:
            text = f"{metrics['groups/buffered']:.0f} waiting"
            text += f"  {metrics.get('groups/in_flight', 0):.0f} in flight"
            text += f"  staleness {number(metrics.get('staleness/mean'))}"
            rows.append(("groups", Text(text)))
        if progress.drops:
            rows.append(("dropped", Text(drops(progress))))
        if progress.warnings:
            text = f"{progress.warnings}, the last: {progress.last_warning}"
            rows.append(("warnings", Text(text, style="yellow", overflow="ellipsis", no_wrap=True)))
        if progress.checkpoint is not None:
            rows.append(("saved", Text(f"step {progress.checkpoint}")))
        return rows


def _evaluations(progress: Progress) -> Text:
    text = Text()
    for name, results in progress.evaluations.items():
        step, last = results[-1]
        scores = [r for _, r in results if not isinstance(r, str)]
        text.append(f"{name} ")
        if isinstance(last, str):
            text.append(f"skipped at step {step}: {last}  ", style="yellow")
        else:
            text.append(f"{last:.3f}", style="bold")
            text.append(f" at step {step}")
            text.append(f", best {max(scores):.3f}  " if len(scores) > 1 else "  ", style="dim")
    return text


def _shares(shares: dict[str, float]) -> Text:
    text = Text()
    for name, share in shares.items():
        text.append("█" * round(share * 20), style=_COLOURS.get(name, "white"))
    for name, share in shares.items():
        text.append(f"  {name} ", style=_COLOURS.get(name, "white"))
        text.append(f"{share:.0%}")
    return text
