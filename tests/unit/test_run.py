"""What a run says and puts in order before its first stage, and what it saves when one fails."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from miles import BufferStarved, Drop, Group, RunError, Task, Trajectory
from miles.buffer import Buffer, Lease
from miles.placement import Colocated
from miles.records.ledger import Ledger
from miles.run import _done, _explained, _Run
from miles.settings import Settings


def test_run_resumed_with_other_plugins_shows_the_difference(tmp_path: Path) -> None:
    said: list[tuple[str, Any]] = []
    now = {"distributions": {"miles-plugin-x": "2.0"}, "files": {}}
    registry: Any = SimpleNamespace(
        provenance=lambda: now, hook=SimpleNamespace(run_started=lambda directory, config: None)
    )
    chosen = tmp_path / "checkpoints" / "step_000003"
    chosen.mkdir(parents=True)
    before = {"distributions": {"miles-plugin-x": "1.0"}, "files": {}}
    (chosen / "plugins.json").write_text(json.dumps(before))
    (tmp_path / "checkpoints" / "step_000009").mkdir()
    shared: Any = SimpleNamespace(
        ledger=Ledger(tmp_path / "ledger.jsonl"),
        tracking=SimpleNamespace(moment=lambda name, data: said.append((name, data))),
        version=3,
    )
    run = _Run(SimpleNamespace(stages=()), registry, tmp_path, {})
    run._announce(shared, chosen, {"ledger_offset": 0, "version": 3})
    assert [name for name, _ in said] == ["run_started", "warned"]
    assert said[1][1]["text"] == "resume: plugin miles-plugin-x: 1.0 before, 2.0 now"
    left = [path.name for path in sorted((tmp_path / "checkpoints").iterdir())]
    assert left == ["step_000003", "step_000009.rolled_back"]


def test_run_that_fails_with_groups_in_flight_is_saved_on_a_shared_device(tmp_path: Path) -> None:
    """The trainer waited for groups that nobody played any more, and nothing was saved."""
    buffer, saved = Buffer(groups_per_step=2, samples_per_group=1), []

    async def done(*_: Any) -> bool:
        return True

    part = SimpleNamespace(sleep=done, wake=done, free=done, certain=True, version=1)
    placement = Colocated(buffer=buffer, trainer=part, engine=part, drain_timeout_s=0.05)

    async def finish() -> None:
        async with placement.training():
            saved.append([lease.id for lease in buffer.leases()])

    stage: Any = SimpleNamespace(
        first=0, trainer=part, buffer=buffer, settings=Settings(), finish=finish
    )
    for group in (4, 5):
        buffer.start(Lease(id=group, task=Task(id=str(group), prompt="x")))
    asyncio.run(_Run(None, None, tmp_path, {})._rescue(stage))
    assert saved == [[4, 5]], "they are played again by a resumed run"


@pytest.mark.parametrize(
    ("version", "evaluated", "evaluator", "later", "done"),
    [
        (10, 10, True, 0, True),
        (10, -1, True, 0, False),  # interrupted while its last version was scored
        (10, -1, False, 0, True),
        (10, -1, True, 1, True),  # the next stage begins with that score
        (9, 9, True, 1, False),
    ],
)
def test_run_resumed_at_the_end_of_its_last_stage_still_wants_the_score(
    version: int, evaluated: int, evaluator: bool, later: int, done: bool
) -> None:
    settings = SimpleNamespace(steps=6)
    stage = SimpleNamespace(settings=settings, specs={"evaluator": object() if evaluator else None})
    state = {"version": version, "stage_first": 4, "evaluated": evaluated}
    assert _done(state, [stage] * (1 + later)) == done


@pytest.mark.parametrize(
    ("names", "overrides", "key"),
    [
        (("rl",), [], "steps"),
        (("rl",), ["stages.sft.steps=3", "stages.rl.steps=6"], "stages.rl.steps"),  # over `steps`
        (("sft", "rl"), [], "stages.rl.steps"),
    ],
)
def test_run_resumed_after_its_last_step_says_how_it_goes_on(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    names: Sequence[str],
    overrides: list[str],
    key: str,
) -> None:
    """It ended at once, as "finished", as if the resume had done something."""
    settings = Settings(steps=6, resume="runs/r")
    stages = [SimpleNamespace(name=n, settings=settings, specs={"evaluator": None}) for n in names]
    state = {"version": 10, "stage_first": 4, "evaluated": -1, "stage": names[-1]}
    run = _Run(SimpleNamespace(stages=stages, overrides=overrides), None, tmp_path, {})
    outcome = asyncio.run(run._stages(SimpleNamespace(version=10), None, state))  # type: ignore[arg-type]
    assert outcome == "finished"
    assert caplog.messages == [
        "resume=runs/r: this run is finished, at step 6 of 6 of stage rl; "
        f"a larger {key} goes on from there"
    ]


def test_run_resumed_sets_checkpoints_aside_before_the_ledger_denies_them(tmp_path: Path) -> None:
    """Killed in between, a second resume went on from one whose groups the ledger had lost."""
    run = _Run(SimpleNamespace(stages=()), None, tmp_path, {})
    (tmp_path / "checkpoints" / "step_000020").mkdir(parents=True)

    class Ledger:
        def roll_back(self, offset: int) -> None:
            raise RunError("killed here")

    with pytest.raises(RunError, match="killed here"):
        run._announce(SimpleNamespace(ledger=Ledger()), None, {"ledger_offset": 5, "version": 10})  # type: ignore[arg-type]
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step_000020.rolled_back"]


def test_run_that_starves_says_what_the_last_failed_group_said() -> None:
    drop = Drop(reason="episode_error", detail="AttributeError: 'dict' object has no attribute")
    failed = Trajectory(id="g7", samples=(), failure=drop)
    group = Group(id=7, task=Task(id="12+34", prompt=""), trajectories=(failed,))
    starved = _explained(BufferStarved("the trainer starved"), group)
    assert starved.__notes__ == [
        f"the last that failed, task '12+34': episode_error: {drop.detail}"
    ]
    assert not hasattr(_explained(RunError("another"), group), "__notes__")
    assert not hasattr(_explained(BufferStarved("slow"), None), "__notes__")


@pytest.mark.parametrize("kept", [(), ("step_000002", "step_000004")])
def test_lost_step_does_not_read_as_if_there_were_no_checkpoint(
    kept: tuple[str, ...], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in kept:
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    stage: Any = SimpleNamespace(first=0, trainer=SimpleNamespace(version=5, certain=False))
    asyncio.run(_Run(None, None, tmp_path, {})._rescue(stage))
    newest = f"the newest checkpoint is {tmp_path}/checkpoints/step_000004 (resume={tmp_path})"
    lost = "nothing newer is saved: a trainer step was lost, so its weights are unknown"
    assert caplog.messages == [f"{lost}; {newest if kept else 'there is no checkpoint'}"]
