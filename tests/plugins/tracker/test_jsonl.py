"""The jsonl tracker: one line a moment, and nothing twice after a resume."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles import ConfigError, Context, RunError
from miles.records.record import read
from miles_plugins.tracker.jsonl import Jsonl


def make(directory: Path) -> Jsonl:
    return Jsonl(Jsonl.Config(), Context(directory=directory))


def lines(directory: Path) -> list[dict]:
    return [json.loads(x) for x in (directory / "metrics.jsonl").read_text().splitlines()]


def run(tracker: Jsonl, first: int, last: int, *, resumed: bool = False) -> None:
    started = {"directory": "x", "name": "n", "config": {"a": 1}}
    tracker.moment("run_started", {**started, "resumed": first if resumed else None})
    tracker.moment("stage_started", {"stage": "grpo", "version": first, "steps": 9})
    for step in range(first + 1, last + 1):
        tracker.moment("step_finished", {"step": step, "stage": "grpo", "reward/mean": step / 9})
        tracker.moment("evaluated", {"step": step, "set": "heldout", "score": 0.5, "version": step})


def test_jsonl_writes_a_line_a_moment(tmp_path: Path) -> None:
    tracker = make(tmp_path)
    run(tracker, 0, 1)
    tracker.moment("weights_published", {"version": 1, "digest": "d", "bytes": 1, "seconds": 0.1})
    tracker.moment("warned", {"text": "budget"})
    tracker.close()
    tracker.close()
    found = lines(tmp_path)
    assert [x["moment"] for x in found] == [
        "run_started",
        "stage_started",
        "step_finished",
        "evaluated",
        "warned",
    ]
    assert "config" not in found[0]
    assert "step" not in found[0]
    assert found[2]["reward/mean"] == pytest.approx(1 / 9)
    assert found[3]["eval/heldout/score"] == 0.5
    assert found[3]["set"] == "heldout"
    assert found[4]["step"] == 1


def test_jsonl_can_be_read_while_the_run_goes_on(tmp_path: Path) -> None:
    tracker = make(tmp_path)
    tracker.moment("step_finished", {"step": 1})
    assert lines(tmp_path)[0]["step"] == 1
    tracker.close()


def test_jsonl_writes_numbers_that_are_not_finite_as_null(tmp_path: Path) -> None:
    tracker = make(tmp_path)
    values = {"a": math.nan, "b": np.float32("inf"), "c": np.float64(2), "d": np.int64(3)}
    tracker.moment("step_finished", {"step": 1, **values})
    tracker.close()
    found = lines(tmp_path)[0]
    assert [found[k] for k in "abcd"] == [None, None, 2.0, 3]


@pytest.mark.parametrize(
    "torn", ["", '{"moment": "step_fin', '{"moment":"step_finished","step":5}']
)
def test_jsonl_resumed_run_has_every_step_once(tmp_path: Path, torn: str) -> None:
    tracker = make(tmp_path)
    run(tracker, 0, 6)
    tracker.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(torn)
    tracker = make(tmp_path)
    run(tracker, 4, 8, resumed=True)
    tracker.close()
    for moment in ("step_finished", "evaluated"):
        steps = [x["step"] for x in lines(tmp_path) if x["moment"] == moment]
        assert steps == [1, 2, 3, 4, 5, 6, 7, 8]


def test_jsonl_resumed_run_writes_an_evaluation_that_was_recorded_already_once(
    tmp_path: Path,
) -> None:
    """Its checkpoint is older than its score, so that it is scored again."""
    tracker = make(tmp_path)
    run(tracker, 0, 4)
    tracker.moment("evaluated", {"step": 4, "set": "other", "skipped": "timeout"})
    tracker.close()
    tracker = make(tmp_path)
    tracker.moment("run_started", {"resumed": 4})
    for name, result in (("heldout", {"score": 0.5}), ("other", {"score": 0.75})):
        tracker.moment("evaluated", {"step": 4, "set": name, **result})
    tracker.moment("evaluated", {"step": 4, "set": "other", "skipped": "timeout"})
    tracker.moment("step_finished", {"step": 5})
    tracker.close()
    rows = [x for x in lines(tmp_path) if x["moment"] == "evaluated" and x["step"] == 4]
    assert [(x["set"], x.get("eval/other/score")) for x in rows] == [
        ("heldout", None), ("other", None), ("other", 0.75),
    ]  # fmt: skip


def score_once(directory: Path, resumed: int | None, evaluator: dict, score: float) -> None:
    tracker = make(directory)
    config = {"stages": {"grpo": {"evaluator": evaluator}}}
    tracker.moment("run_started", {"config": config, "resumed": resumed})
    tracker.moment("stage_started", {"stage": "grpo", "version": 0, "steps": 9})
    tracker.moment("evaluated", {"step": 4, "set": "heldout", "score": score})
    tracker.close()


@pytest.mark.parametrize(
    ("changed", "scores"),
    [
        ({"name": "sets", "sets": {"heldout": {"tasks": 2}}}, [0.5]),
        ({"name": "sets", "sets": {"heldout": {"tasks": 4}}}, [0.5, 0.75]),
        ({"name": "fleet", "sets": {"heldout": {"tasks": 2}}}, [0.5, 0.75]),
    ],
)
def test_jsonl_resumed_run_with_another_evaluator_has_its_score_too(
    tmp_path: Path, changed: dict, scores: list[float]
) -> None:
    """The row of before the resume hid the score that another evaluator gave the same version."""
    evaluator = {"sets": {"heldout": {"tasks": 2}}, "name": "sets"}
    for resumed, chosen, score in ((None, evaluator, 0.5), (4, changed, 0.75)):
        score_once(tmp_path, resumed, chosen, score)
    rows = [x for x in lines(tmp_path) if x["moment"] == "evaluated"]
    assert [x["eval/heldout/score"] for x in rows] == scores
    assert [e["eval/heldout/score"] for e in read(tmp_path).evaluations] == scores[-1:]


def test_jsonl_run_that_goes_back_to_an_evaluator_has_its_score_last(
    tmp_path: Path,
) -> None:
    """Its row was there already, so that the report went on with the other's score."""
    for resumed, name, score in ((None, "sets", 0.5), (4, "fleet", 0.75), (4, "sets", 0.5)):
        score_once(tmp_path, resumed, {"name": name}, score)
    assert [e["eval/heldout/score"] for e in read(tmp_path).evaluations] == [0.5]


def test_jsonl_next_stage_forgets_nothing(tmp_path: Path) -> None:
    tracker = make(tmp_path)
    run(tracker, 0, 3)
    before = lines(tmp_path)
    tracker.moment("stage_started", {"stage": "second", "version": 3, "steps": 1})
    tracker.close()
    assert lines(tmp_path)[:-1] == before


@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 6), st.sampled_from(["checkpoint", "row"]), st.booleans()),
        min_size=1,
        max_size=5,
    )
)
def test_jsonl_has_one_row_of_every_step_wherever_the_driver_was_killed(
    tmp_path_factory: pytest.TempPathFactory, lives: list[tuple[int, str, bool]]
) -> None:
    """One that was killed after a step's checkpoint and before its row left the row out. Each life
    takes so many steps, each with a checkpoint and then its row, and is killed after the last
    checkpoint, or after the row; its next may be killed before it has restored anything."""
    directory, reached = tmp_path_factory.mktemp("run"), 0
    for number, (steps, killed_after, at_once) in enumerate(lives):
        for early in [True, False] if at_once else [False]:
            tracker = make(directory)
            tracker.moment("run_started", {"resumed": reached if number else None})
            if early:
                tracker.close()
                continue
            if reached:
                tracker.moment("step_restored", {"step": reached, "a": 1})
            for step in range(reached + 1, reached + steps + 1):
                if step < reached + steps or killed_after == "row":
                    tracker.moment("step_finished", {"step": step, "a": 2})
            tracker.close()
            reached += steps
    tracker = make(directory)
    tracker.moment("run_started", {"resumed": reached})
    tracker.moment("step_restored", {"step": reached, "a": 1})
    tracker.close()
    rows = [x["step"] for x in lines(directory) if x["moment"] == "step_finished"]
    assert rows == list(range(1, reached + 1))


@settings(max_examples=25, deadline=None)
@given(stops=st.lists(st.integers(0, 12), min_size=1, max_size=4), cut=st.integers(0, 60))
def test_jsonl_survives_any_number_of_crashes(
    tmp_path_factory: pytest.TempPathFactory, stops: list[int], cut: int
) -> None:
    directory = tmp_path_factory.mktemp("run")
    path = directory / "metrics.jsonl"
    reached = 0
    for stop in stops:
        reached = min(stop, reached)  # resumes at a checkpoint at or before where it got to
        tracker = make(directory)
        run(tracker, reached, reached + 5, resumed=path.exists())
        tracker.close()
        path.write_bytes(path.read_bytes()[: -cut or None])
        whole = [json.loads(x) for x in path.read_bytes().splitlines() if x.endswith(b"}")]
        reached = max([x["step"] for x in whole if x["moment"] == "step_finished"], default=0)
    tracker = make(directory)
    run(tracker, reached, reached + 2, resumed=True)
    tracker.close()
    steps = [x["step"] for x in lines(directory) if x["moment"] == "step_finished"]
    assert steps == list(range(1, reached + 3))


def test_jsonl_that_cannot_be_written_says_where(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(RunError, match=r"tracker jsonl: cannot write .*metrics.jsonl: Is a dir"):
        make(tmp_path).moment("step_finished", {"step": 1})


@pytest.mark.parametrize("file", ["", "../x", "a/b"])
def test_jsonl_refuses_a_file_elsewhere(tmp_path: Path, file: str) -> None:
    with pytest.raises(ConfigError, match="is not a file name in the run directory"):
        Jsonl(Jsonl.Config(file=file), Context(directory=tmp_path))


def test_jsonl_late_scores_do_not_date_what_comes_after(tmp_path: Path) -> None:
    tracker = make(tmp_path)
    tracker.moment("step_finished", {"step": 7, "stage": "grpo"})
    tracker.moment("evaluated", {"step": 4, "set": "heldout", "score": 0.5, "lag_steps": 3})
    tracker.moment("warned", {"text": "budget"})
    tracker.close()
    assert [x["step"] for x in lines(tmp_path)] == [7, 4, 7]
    assert lines(tmp_path)[1]["eval/heldout/lag_steps"] == 3
