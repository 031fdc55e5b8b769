"""Which versions are scored, where, and what becomes of the results: nothing of it stops
training."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from miles import EngineError, PluginError, Sampling, Score, Skipped, Task, checkpoint
from miles.buffer import Buffer
from miles.errors import BufferStarved, WorkerError
from miles.evaluation.evaluations import Evaluations, Snapshots, Watched, score_directory
from miles.records.measure import Measure
from miles.records.notices import Notices
from miles.testing import make_group


class Fleet:
    """Engines that are loaded from directories, without engines."""

    def __init__(self) -> None:
        self.loaded: list[int] = []
        self.serves: int | None = None  # instead of what was loaded
        self.closed = 0

    async def load(self, directory: Path, version: int, *, sealed: bool = True) -> None:
        checkpoint.verify(directory)
        self.loaded.append(version)

    async def attempt(self, task: Task, *, samples: int, **how: Any) -> Any:
        version = self.loaded[-1] if self.serves is None else self.serves
        return make_group(0, rewards=(1.0,) * samples, versions=(version,), task=task)

    async def close(self) -> None:
        self.closed += 1


class Evaluator:
    """Plays one task; waits, or fails, as it is told."""

    def __init__(self, **keys: Any) -> None:
        self.timeout_s = 5.0
        self.gate = asyncio.Event()
        self.gate.set()
        self.error: Exception | None = None
        self.version_offset = 0
        self.seen: list[Path | None] = []
        self.__dict__.update(keys)

    async def evaluate(self, version: int, attempt: Any) -> Any:
        self.seen.append(attempt.directory)
        await self.gate.wait()
        if self.error is not None:
            raise self.error
        if getattr(self, "place", "rollout") != "directory":
            sampling = Sampling(max_new_tokens=1, temperature=0.0)
            await attempt(Task(id="t", prompt="x"), samples=2, sampling=sampling, seed=1, of="s")
        claimed = version + self.version_offset
        return [Score(set="s", version=claimed, score=0.5, samples=2, metrics={"low": 0.1})]


class Ground:
    """A stage as evaluations see it."""

    def __init__(self, evaluator: Evaluator, tmp_path: Path) -> None:
        self.evaluator = evaluator
        self.buffer = Buffer(groups_per_step=1, samples_per_group=1, starved_after_s=0.05)
        self.trainer = SimpleNamespace(version=0)
        self.eval_fleet: Any = Fleet()
        self.measure = Measure()
        self.timing = self.measure.timing
        self.rows: list[dict[str, Any]] = []
        self.shared = SimpleNamespace(
            tracking=SimpleNamespace(moment=lambda name, data: self.rows.append(data)),
            notices=Notices(),
        )
        self.hook = SimpleNamespace(evaluated=lambda **data: None)
        self.served = (0,)
        self.full = False
        self.folder = tmp_path / "snapshots"
        self.evaluations = Evaluations(self, Snapshots(self.folder))  # type: ignore[arg-type]

    async def score(self, version: int) -> Any:
        async def play(task: Task, **how: Any) -> Any:
            return make_group(0, rewards=(1.0, 0.0), versions=self.served, task=task)

        watched = Watched(play, version, own=())
        return watched.judged(await self.evaluator.evaluate(version, watched))

    async def snapshot(self, folder: Path) -> Path:
        if self.full:
            raise OSError(28, "No space left on device")

        async def fill(directory: Path) -> dict[str, Any]:
            (directory / "model").mkdir()
            (directory / "model" / "weights").write_text(str(self.trainer.version))
            return {"version": self.trainer.version}

        return await checkpoint.write(folder, self.trainer.version, fill)

    async def step(self, version: int, *, wait: bool = False, last: bool = False) -> None:
        """The trainer has made `version`, which is due."""
        self.trainer.version = version
        await self.evaluations.begin(version, wait=wait, last=last)

    @property
    def said(self) -> list[tuple[int, Any]]:
        """(step, score or reason) in the order in which they came."""
        return [(row["step"], row.get("score", row.get("skipped"))) for row in self.rows]


def run(main: Callable[[], Awaitable[None]]) -> None:
    async def within() -> None:
        async with asyncio.timeout(10):
            await main()

    asyncio.run(within())


# ---------------------------------------------------------------- on the engines that train


def test_a_shared_evaluation_holds_new_groups_until_its_score_is_in(tmp_path: Path) -> None:
    async def main() -> None:
        ground = Ground(evaluator := Evaluator(), tmp_path)
        evaluator.gate.clear()
        await ground.step(0)
        assert not ground.buffer.room()
        ground.trainer.version = 1  # the trainer goes on
        await asyncio.sleep(0.02)
        assert not ground.rows
        evaluator.gate.set()
        await ground.evaluations.settle()
        assert ground.said == [(0, 0.5)] and ground.rows[0]["lag_steps"] == 1
        await asyncio.sleep(0)
        assert ground.buffer.room()

    run(main)


def test_a_publish_waits_for_a_shared_evaluation_no_longer_than_its_limit(tmp_path: Path) -> None:
    async def main() -> None:
        ground = Ground(evaluator := Evaluator(timeout_s=0.1), tmp_path)
        evaluator.gate.clear()
        await ground.step(0)
        clock = asyncio.get_running_loop().time
        began = clock()
        with ground.timing("publish"):
            await ground.evaluations.settle()
        assert 0.1 <= clock() - began < 1.0
        reason = "timeout: not done after 0.1 s, and weights wait to be sent"
        assert ground.said == [(0, reason)]
        await asyncio.sleep(0)
        assert ground.buffer.room()
        seconds = ground.measure._seconds
        assert seconds["eval_wait"] >= 0.1 and seconds["publish"] < 0.05

    run(main)


def test_a_shared_evaluation_that_does_not_stop_holds_nobody_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its task swallows being cancelled: groups begin again, one result is told, and what it does
    in the end is heard of by nobody."""
    monkeypatch.setattr("miles.evaluation.evaluations._GRACE_S", 0.05)

    async def main() -> None:
        ground = Ground(Evaluator(timeout_s=0.05), tmp_path)
        go_on = asyncio.Event()

        async def deaf(version: int) -> Any:
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(60)
            await go_on.wait()
            return [Score(set="s", version=version, score=1.0, samples=1)]

        ground.score = deaf  # type: ignore[method-assign]
        await ground.step(0)
        task = ground.evaluations._sharing
        assert task is not None and not ground.buffer.room()
        await ground.evaluations.settle()
        assert ground.buffer.room() and len(ground.rows) == 1 and "skipped" in ground.rows[0]
        go_on.set()
        await asyncio.wait({task})
        await asyncio.sleep(0)
        assert ground.buffer.room() and ground.buffer._held == 0 and len(ground.rows) == 1

    run(main)


def test_a_trainer_does_not_starve_while_groups_are_held(tmp_path: Path) -> None:
    async def main() -> None:
        ground = Ground(evaluator := Evaluator(), tmp_path)
        evaluator.gate.clear()
        await ground.step(0)
        taking = asyncio.create_task(ground.buffer.take(1))
        await asyncio.sleep(0.15)  # three times what starves it
        assert not taking.done()
        evaluator.gate.set()
        await ground.evaluations.settle()
        with pytest.raises(BufferStarved):
            await taking
        assert 0.1 < ground.buffer.held_s() < 5

    run(main)


@pytest.mark.parametrize(
    ("served", "reason"),
    [
        ((3,), "samples of version 3, on average 3, are not of version 2"),
        ((1, 2), "2 of 2 samples were served by mixed versions: 1, 2"),
        ((2,), 0.5),
    ],
)
def test_a_score_is_recorded_only_for_the_version_that_earned_it(
    tmp_path: Path, served: tuple[int, ...], reason: Any
) -> None:
    async def main() -> None:
        ground = Ground(Evaluator(), tmp_path)
        ground.served = served
        await ground.step(2, wait=True)
        assert ground.said == [(2, reason)]

    run(main)


def test_a_score_that_claims_another_version_is_not_recorded(tmp_path: Path) -> None:
    async def main() -> None:
        ground = Ground(Evaluator(version_offset=1), tmp_path)
        await ground.step(0, wait=True)
        assert ground.said == [(0, "the score is of version 1, not 0")]

    run(main)


@pytest.mark.parametrize("place", ["rollout", "apart", "directory"])
@pytest.mark.parametrize(
    "error", [EngineError("gone"), WorkerError("dead"), ZeroDivisionError("a bug"), TimeoutError()]
)
def test_no_failure_of_an_evaluation_gets_out(
    tmp_path: Path, place: str, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        ground = Ground(Evaluator(place=place, error=error), tmp_path)
        await ground.step(0, wait=True, last=True)
        ((step, reason),) = ground.said
        assert step == 0 and isinstance(reason, str)
        words = "timeout" if isinstance(error, TimeoutError) else type(error).__name__
        assert words.lower() in reason.lower()
        assert any(reason in r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING)

    run(main)


def test_the_reason_of_skipped_evaluations_is_told_to_people_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)

    async def main() -> None:
        ground = Ground(evaluator := Evaluator(place="apart", snapshots=1), tmp_path)
        evaluator.gate.clear()
        for version in range(4):
            await ground.step(version)
        assert [step for step, _ in ground.said] == [1, 2, 3]  # all are recorded
        evaluator.gate.set()
        await ground.evaluations.close()

    run(main)
    told = [r for r in caplog.records if "overflow: snapshots is 1" in r.getMessage()]
    assert [r.levelno for r in told] == [logging.WARNING, logging.INFO, logging.INFO]


# ---------------------------------------------------------------- from snapshots


def test_late_scores_land_at_their_own_step(tmp_path: Path) -> None:
    async def main() -> None:
        ground = Ground(evaluator := Evaluator(place="apart", snapshots=2), tmp_path)
        evaluator.gate.clear()
        await ground.step(2)
        await ground.step(4)
        ground.trainer.version = 7
        assert ground.buffer.room()  # nothing is held
        evaluator.gate.set()
        await ground.evaluations.begin(8, wait=False, last=True)
        rows = [(r["step"], r.get("version"), r["lag_steps"]) for r in ground.rows]
        assert rows[:2] == [(2, 2, 5), (4, 4, 3)]
        assert ground.eval_fleet.loaded[:2] == [2, 4]
        assert not list(ground.folder.iterdir())  # deleted when done

    run(main)


def test_a_version_too_many_is_skipped_except_the_last(tmp_path: Path) -> None:
    async def main() -> None:
        ground = Ground(evaluator := Evaluator(place="apart", snapshots=2), tmp_path)
        evaluator.gate.clear()
        for version in (1, 2, 3):
            await ground.step(version)
        reason = "overflow: snapshots is 2, and versions 1, 2 are not scored yet"
        assert ground.said == [(3, reason)]
        assert len(checkpoint.find(ground.folder)) == 2
        asyncio.get_running_loop().call_later(0.05, evaluator.gate.set)
        await ground.step(4, last=True)
        assert ground.said[1:] == [(1, 0.5), (2, 0.5), (4, 0.5)]

    run(main)


def test_a_version_too_many_waits_when_it_should(tmp_path: Path) -> None:
    async def main() -> None:
        ground = Ground(
            evaluator := Evaluator(place="apart", snapshots=1, overflow="wait"), tmp_path
        )
        evaluator.gate.clear()
        await ground.step(1)
        asyncio.get_running_loop().call_later(0.05, evaluator.gate.set)
        await ground.step(2, last=True)
        assert ground.said == [(1, 0.5), (2, 0.5)]
        assert ground.measure._seconds["eval_wait"] >= 0.05

    run(main)


def test_a_snapshot_that_cannot_be_written_skips_its_version(tmp_path: Path) -> None:
    async def main() -> None:
        ground = Ground(Evaluator(place="apart"), tmp_path)
        ground.full = True
        await ground.step(1, last=True)
        ((step, reason),) = ground.said
        assert step == 1 and "No space left on device" in reason

    run(main)


def test_a_damaged_snapshot_is_never_scored(tmp_path: Path) -> None:
    async def main() -> None:
        ground = Ground(evaluator := Evaluator(place="apart", snapshots=2), tmp_path)
        evaluator.gate.clear()
        await ground.step(1)
        await ground.step(2)
        (ground.folder / "step_000002" / "model" / "weights").write_text("3")
        evaluator.gate.set()
        await ground.step(2, last=True)
        assert ground.said[0] == (1, 0.5)
        assert "model/weights is damaged" in ground.said[1][1]
        assert ground.eval_fleet.loaded == [1]

    run(main)


def test_an_evaluator_of_directories_is_handed_a_whole_checkpoint(tmp_path: Path) -> None:
    async def main() -> None:
        ground = Ground(evaluator := Evaluator(place="directory"), tmp_path)
        await ground.step(3, last=True)
        assert evaluator.seen == [ground.folder / "step_000003"]
        assert ground.said == [(3, 0.5)] and not ground.eval_fleet.loaded

    run(main)


def test_an_interrupted_run_leaves_snapshots_that_the_next_takes_up(tmp_path: Path) -> None:
    async def main() -> None:
        ground = Ground(evaluator := Evaluator(place="apart", snapshots=3), tmp_path)
        evaluator.gate.clear()
        for version in (2, 4, 6):
            await ground.step(version)
        await asyncio.sleep(0.02)
        await ground.evaluations.close()
        assert not ground.rows and len(checkpoint.find(ground.folder)) == 3
        (ground.folder / ".step_000008.partial").mkdir()

        after = Ground(Evaluator(place="apart", snapshots=3), tmp_path)
        after.trainer.version = 5  # resumed from a checkpoint before 6
        await after.evaluations.begin(5, wait=False, last=True)
        assert after.said == [(2, 0.5), (4, 0.5), (5, 0.5)]
        assert not list(after.folder.iterdir())

    run(main)


def test_an_interrupted_shared_evaluation_is_done_again(tmp_path: Path) -> None:
    async def main() -> None:
        ground = Ground(evaluator := Evaluator(), tmp_path)
        evaluator.gate.clear()
        await ground.step(2)
        assert ground.evaluations.stop() == {2}
        await asyncio.sleep(0.01)
        assert not ground.rows and ground.buffer.room()
        assert ground.evaluations.stop() == set()

    run(main)


def test_an_interrupt_while_the_trainer_waits_is_no_timeout(tmp_path: Path) -> None:
    async def main() -> None:
        ground = Ground(evaluator := Evaluator(), tmp_path)
        evaluator.gate.clear()
        asyncio.get_running_loop().call_later(0.05, ground.evaluations.stop)
        await ground.step(2, wait=True)
        assert not ground.rows

    run(main)


def test_an_interrupted_evaluation_of_a_snapshot_is_done_again(tmp_path: Path) -> None:
    async def main() -> None:
        ground = Ground(evaluator := Evaluator(place="apart"), tmp_path)
        evaluator.gate.clear()
        await ground.step(2)
        assert ground.evaluations.stop() == {2}

    run(main)


def test_a_hook_that_fails_over_a_snapshots_score_is_heard_of(tmp_path: Path) -> None:
    async def main() -> None:
        ground = Ground(Evaluator(place="apart"), tmp_path)

        def evaluated(**data: Any) -> None:
            raise PluginError("plugin 'x' raised in miles_evaluated")

        ground.hook.evaluated = evaluated
        await ground.step(1)
        await asyncio.sleep(0.1)
        with pytest.raises(PluginError, match="miles_evaluated"):
            await ground.step(2)
        with pytest.raises(PluginError, match="miles_evaluated"):
            await ground.step(3, last=True)

    run(main)


def test_a_fleet_that_serves_something_else_gives_no_score(tmp_path: Path) -> None:
    async def main() -> None:
        ground = Ground(Evaluator(place="apart"), tmp_path)
        ground.eval_fleet.serves = 0
        await ground.step(1, last=True)
        assert ground.said == [(1, "samples of version 0, on average 0, are not of version 1")]

    run(main)


def test_without_engines_there_is_a_reason(tmp_path: Path) -> None:
    scoring = score_directory(Evaluator(place="apart"), 1, tmp_path, fleet=None)
    reason = "no stage of this run samples tokens"
    assert asyncio.run(scoring) == [Skipped(set="all", reason=reason)]
