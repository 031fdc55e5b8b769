"""The console tracker: plain lines, a live panel, and what both cost."""

import os
import pty
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles import ConfigError, Context
from miles_plugins.tracker.console import Console
from miles_plugins.tracker.console.lines import count, duration, number, sparkline, summary
from miles_plugins.tracker.console.progress import Course, Progress

STEP = {
    "stage": "grpo",
    "version": 1,
    "reward/mean": 0.5,
    "loss/policy": -0.01,
    "grad_norm": 0.3,
    "mismatch/logprob_abs_max": 3e-6,
    "mismatch/logprob_abs_mean": 1e-7,
    "mismatch/k3": 1e-12,
    "time/step_s": 0.4,
    "time/wait_s": 0.1,
    "time/train_s": 0.2,
    "time/publish_s": 0.06,
    "time/overhead_s": 0.04,
    "engine/tokens_per_s": 5210.0,
    "groups/buffered": 3,
    "groups/in_flight": 8,
    "groups/dropped/zero_variance": 2,
}


def make(**config: object) -> Console:
    return Console(Console.Config(**config), Context(directory=Path("run")))  # type: ignore[arg-type]


def drive(tracker: Console, steps: int = 4) -> None:
    tracker.moment(
        "run_started",
        {"directory": "runs/x", "name": "x", "stages": ["sft", "grpo"], "steps": {"grpo": steps}},
    )
    tracker.moment("stage_started", {"stage": "grpo", "version": 10, "steps": steps})
    tracker.moment("evaluated", {"step": 10, "set": "heldout", "skipped": "no tasks"})
    for i in range(1, steps + 1):
        tracker.moment("step_finished", {"step": 10 + i, "stage_step": i, **STEP})
        tracker.moment("warned", {"text": f"mismatch {i} over its budget"})
    scored = {"score": 0.75, "version": 14, "samples": 128, "stderr": 0.038}
    tracker.moment("evaluated", {"step": 10 + steps, "set": "heldout", **scored})
    tracker.moment("checkpoint_saved", {"step": 14, "directory": "x"})
    tracker.moment("unheard_of", {})
    finished = {"outcome": "finished", "directory": "runs/x", "seconds": 65.0}
    tracker.moment("run_finished", finished)
    tracker.close()
    tracker.close()


def test_console_prints_plain_lines_where_there_is_no_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    drive(make())
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "stage grpo (2 of 2): 4 steps from version 10"
    assert out[1] == "[00:00] heldout at step 10: skipped, no tasks"
    assert out[2] == "warning: mismatch 1 over its budget"
    assert out[3].startswith("[00:00] grpo 4/4  reward 0.500  policy -0.010  mismatch max 3.0e-06")
    assert out[4] == "[00:00] heldout at step 14: 0.750 ± 0.038 (128 samples)"
    assert out[5] == "run finished after 01:05 at step 14"
    assert out[6] == "  heldout: 0.750; skipped 1 of 2, the last: no tasks"
    assert "  dropped groups in grpo: zero_variance 8" in out
    assert "  4 warnings, the last: mismatch 4 over its budget" in out
    assert out[-1] == "  runs/x"


def test_console_prints_steps_at_most_every_so_often(capsys: pytest.CaptureFixture[str]) -> None:
    drive(make(every_s=60.0), steps=500)
    assert len([x for x in capsys.readouterr().out.splitlines() if "grpo" in x]) == 4


def test_console_says_how_many_warnings_it_hid(capsys: pytest.CaptureFixture[str]) -> None:
    tracker = make(every_s=0.05)
    for _ in range(3):
        tracker.moment("warned", {"text": "lag 1"})
    time.sleep(0.06)
    tracker.moment("warned", {"text": "lag 7"})
    out = capsys.readouterr().out.splitlines()
    assert out == ["warning: lag 1", "warning: lag 7 (2 like it not shown)"]


def test_console_says_what_a_start_waits_for_and_counts_no_warning(
    capsys: pytest.CaptureFixture[str],
) -> None:
    tracker = make()
    for seconds in (5, 10):
        tracker.moment("waited", {"text": f"waiting for engine: its server starts ({seconds} s)"})
    tracker.moment("run_finished", {"outcome": "finished", "directory": "x", "seconds": 65.0})
    out = capsys.readouterr().out
    assert out.count("waiting for engine: its server starts") == 2
    assert "warning" not in out


def test_console_draws_a_panel_on_a_terminal() -> None:
    main, side = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "100", "LINES": "40"}
    code = f"import runpy; it = runpy.run_path({__file__!r}); it['drive'](it['make']())"
    child = subprocess.Popen([sys.executable, "-c", code], stdout=side, env=environment)
    os.close(side)
    seen = b""
    while True:
        try:
            data = os.read(main, 65536)
        except OSError:  # Linux reports the other side's end this way
            break
        if not data:
            break
        seen += data
    assert child.wait(60) == 0
    raw = seen.decode()
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", raw)
    for words in ("miles", "reward", "held out", "mismatch", "zero_variance", "wait 25%", "saved"):
        assert words in text
    assert "run finished after 01:05" in text
    assert raw.count("\x1b[?25l") == raw.count("\x1b[?25h") == 1  # the cursor is given back


def test_console_refuses_useless_intervals() -> None:
    with pytest.raises(ConfigError, match=r"tracker console: refresh_s: 0.0 is not above 0"):
        make(refresh_s=0.0)


def test_console_takes_a_step_in_under_100_microseconds(
    capsys: pytest.CaptureFixture[str],
) -> None:
    tracker = make(every_s=1e6)
    tracker.moment("stage_started", {"stage": "grpo", "version": 0, "steps": 10**6})
    began = time.process_time()
    for i in range(1, 2001):
        tracker.moment("step_finished", {"step": i, "stage_step": i, **STEP})
    assert (time.process_time() - began) / 2000 < 1e-4


def test_progress_estimates_the_time_left_from_recent_steps() -> None:
    progress = Progress()
    progress.take("stage_started", {"stage": "s", "version": 0, "steps": 100})
    assert progress.left_s is None
    for i in range(1, 4):
        time.sleep(0.02)
        progress.take("step_finished", {"step": i, "stage_step": i})
    assert progress.left_s == pytest.approx(97 * 0.02, rel=0.5)


def test_skipped_evaluations_say_each_reason_once_and_are_counted_at_the_end(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Every skip was a line, and the summary a row of reasons."""
    tracker = make(live="never")
    tracker.moment("run_started", {"directory": "runs/x", "name": "x", "stages": [], "steps": {}})
    for step in range(1, 5):
        reason = f"overflow: version {step - 1} is not scored yet" if step < 4 else "no tasks"
        tracker.moment("evaluated", {"step": step, "set": "all", "skipped": reason})
    tracker.moment("run_finished", {"outcome": "finished", "directory": "runs/x", "seconds": 3.0})
    out = capsys.readouterr().out.splitlines()
    assert [line for line in out if "at step" in line] == [
        "[00:00] all at step 1: skipped, overflow: version 0 is not scored yet",
        "[00:00] all at step 4: skipped, no tasks",
    ]
    assert "  all: skipped 4 of 4, the last: no tasks" in out


def test_summary_of_a_resume_with_nothing_left_to_do_says_where_the_run_is(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It said step 0."""
    tracker = make(live="never")
    tracker.moment("run_started", {"directory": "runs/x", "name": "x", "stages": [], "resumed": 6})
    tracker.moment("run_finished", {"outcome": "finished", "directory": "runs/x", "seconds": 1.0})
    assert capsys.readouterr().out.splitlines()[0] == "run finished after 00:01 at step 6"


def test_summary_of_an_evaluation_by_hand_names_no_step(capsys: pytest.CaptureFixture[str]) -> None:
    """`miles eval` of step 100 ended with "at step 0"."""
    tracker = make(live="never")
    tracker.moment("run_started", {"directory": "runs/x", "name": "x", "stages": [], "steps": {}})
    tracker.moment("evaluated", {"step": 100, "set": "heldout", "score": 0.5, "samples": 2})
    tracker.moment("run_finished", {"outcome": "finished", "directory": "runs/x", "seconds": 3.0})
    out = capsys.readouterr().out.splitlines()
    assert out[1:] == ["run finished after 00:03", "  heldout: 0.500", "  runs/x"]


def test_summary_tells_the_reward_of_a_short_stage_without_lag() -> None:
    progress = Progress()
    progress.take("run_started", {"directory": "/runs/x", "stages": ["grpo"]})
    progress.take("stage_started", {"stage": "grpo", "version": 0, "steps": 24})
    for step in range(24):
        progress.take("step_finished", {"step": step + 1, "reward/mean": 0.9 if step > 11 else 0.5})
    assert "reward in grpo: 0.500 → 0.900" in summary(progress)
    progress.take("stage_started", {"stage": "more", "version": 24, "steps": 1})
    assert progress.reward_ends is None and "reward in more" not in summary(progress)
    progress.take("step_finished", {"step": 25, "reward/mean": 0.25})
    assert "reward in more: 0.250 → 0.250" in summary(progress)


def test_progress_of_a_resumed_stage_begins_inside() -> None:
    progress = Progress()
    resumed = {"stage": "s", "version": 1230, "first": 1200, "steps": 100}
    progress.take("stage_started", resumed)
    assert (progress.stage_step, progress.stage_steps) == (30, 100)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=2000), st.integers(1, 80))
def test_course_keeps_its_memory_and_its_range(values: list[float], width: int) -> None:
    course = Course()
    for value in values:
        course.add(value)
    cut = course.cut(width)
    assert 1 <= len(course.points) < 256
    assert len(cut) == min(width, len(course.points))
    assert min(values) - 1e-12 <= min(cut) <= max(cut) <= max(values) + 1e-12


def test_course_of_a_straight_line_is_straight() -> None:
    course = Course()
    for i in range(4096):
        course.add(i)
    steps = {b - a for a, b in zip(course.points, course.points[1:], strict=False)}
    assert len(steps) == 1


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (duration(None), "--:--"),
        (duration(59.6), "01:00"),
        (duration(3723), "1:02:03"),
        (count(950), "950"),
        (count(12345), "12.3k"),
        (count(4.5e6), "4.5M"),
        (number(None), "-"),
        (number(0.0), "0.000"),
        (number(1.234e-6), "1.2e-06"),
        (sparkline([]), ""),
        (sparkline([1, 1]), "▁▁"),
        (sparkline([0, 0.5, 1]), "▁▅█"),
    ],
)
def test_words_for_numbers(made: str, words: str) -> None:
    assert made == words
