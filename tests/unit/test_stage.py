"""What a stage decides by itself: when weights are sent, what counts as a step's time."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from miles import (
    Batch,
    EngineError,
    Group,
    Receipt,
    RunError,
    Sample,
    Settings,
    Span,
    Task,
    Trajectory,
    Update,
    checkpoint,
    flatten,
)
from miles.buffer import Buffer, Lease
from miles.placement import Split
from miles.stage import Shared, Stage
from miles.workers.pool import Pool


class Weights:
    def __init__(self, stage: Stage) -> None:
        self.stage = stage

    async def publish(self) -> Receipt:
        version = self.stage.trainer.version
        return Receipt(version=version, digest="d", bytes=1, seconds=0.0)

    async def recover(self) -> bool:
        return False


class Engines:
    def __init__(self) -> None:
        self.tokens = 0.0

    async def health(self) -> dict[str, float]:
        return {"tokens": self.tokens, "busy_s": 0.0}


class Evaluator:
    async def evaluate(self, version: int, attempt: Any) -> Sequence[Any]:
        await asyncio.sleep(0.02)
        return []


def made(tmp_path: Path, *, name: str = "grpo", version: int = 0, **keys: Any) -> Stage:
    tracking = SimpleNamespace(moment=lambda name, data: None)
    shared: Any = Shared(
        directory=tmp_path, registry=SimpleNamespace(hook=None), runtime=None, ledger=None,  # type: ignore[arg-type]
        tracking=tracking, config={}, version=version,  # type: ignore[arg-type]
    )  # fmt: skip
    stage = Stage(name=name, settings=Settings(**keys), shared=shared, first=0)
    stage.trainer = SimpleNamespace(version=version, handle=None)  # type: ignore[assignment]
    stage.evaluator, stage.weights = Evaluator(), Weights(stage)  # type: ignore[assignment]
    stage.engines, stage.samples, stage.tito = Engines(), True, None  # type: ignore[assignment]
    stage.pool = Pool(
        [],
        restart=None,  # type: ignore[arg-type]
        settings=Settings(),
    )
    stage.buffer = Buffer(groups_per_step=1, samples_per_group=1)
    return stage


def one_group() -> Group:
    """Of one attempt with three tokens, all of them sampled."""
    ones = np.ones(3, bool)
    sample = Sample(
        tokens=np.zeros(3, np.int32), sampled=ones, trainable=ones,
        logprobs=np.zeros(3, np.float32), spans=(Span(start=0, stop=3, version=0),),
    )  # fmt: skip
    made_of = Trajectory(id="g0", samples=(sample,))
    return Group(id=0, task=Task(id="t", prompt="x"), trajectories=(made_of,))


def test_stage_publishes_its_first_and_last_weights_whatever_publish_every(tmp_path: Path) -> None:
    """A resume between two publishes has engines without any weights."""
    stage = made(tmp_path, version=3, steps=7, publish_every=2, max_lag=1)

    async def main() -> list[int]:
        sent = []
        for version in range(3, 8):
            stage.trainer.version = version
            if await stage.send_weights() is not None:
                sent.append(version)
        return sent

    assert asyncio.run(main()) == [3, 4, 6, 7]


def test_stage_gives_up_an_algorithm_that_does_not_come_back(tmp_path: Path) -> None:
    """It waited for ever."""

    class Stuck:
        def needs(self) -> tuple[str, ...]:
            return ()

        def prepare(self, groups: Any, passes: Any) -> Any:
            time.sleep(5)

    stage = made(tmp_path, worker_timeout_s=0.05)
    stage.samples = False
    stage.algorithm = Stuck()
    said = r"stage grpo: Stuck\.prepare of 2 groups was not done after 0\.05 s \(worker_timeout_s\)"
    with pytest.raises(RunError, match=said):
        asyncio.run(stage.prepare([None, None]))  # type: ignore[list-item]


@pytest.mark.parametrize("placement", ["split", "colocated"])
def test_stage_probes_engines_beside_the_passes_unless_they_sleep_then(
    tmp_path: Path, placement: str
) -> None:
    """The trainer waited for the probe's answer after its own passes, at every step."""
    told: list[str] = []
    scored = asyncio.Event()

    async def score(tokens: Any) -> Any:
        told.append("asked")
        await asyncio.sleep(0.02)
        told.append("answered")
        scored.set()
        return np.zeros(len(tokens), np.float32)

    async def logprobs(tokens: Any, source: str) -> Any:
        told.append("pass")
        await asyncio.sleep(0)
        if placement == "split":
            await asyncio.wait_for(scored.wait(), 5)
        return np.zeros(len(tokens.tokens), np.float32)

    class Learns:
        def needs(self) -> tuple[str, ...]:
            return ("current",)

        def prepare(self, groups: Any, passes: Any) -> Any:
            return Batch(tokens=flatten([s for g in groups for s in g.samples]), terms=())

    stage = made(tmp_path, max_lag=0, placement=placement)
    stage.trainer.logprobs, stage.engines.score = logprobs, score  # type: ignore[union-attr]
    stage.algorithm, stage.placement = Learns(), Split()
    stage.hook = SimpleNamespace(prepared=lambda groups, batch: batch)
    batch = asyncio.run(stage.prepare([one_group()]))
    assert batch.probe is not None and len(batch.probe.tokens) == 3
    wanted = {"split": ["asked", "pass", "answered"], "colocated": ["asked", "answered", "pass"]}
    assert sorted(told[:2]) == sorted(wanted[placement][:2]) and told[2] == wanted[placement][2]


def test_stage_without_a_mismatch_probe_says_why_once_instead_of_at_every_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def score(tokens: Any) -> Any:
        raise EngineError("engine sglang: temperature is 0.6")

    caplog.set_level(logging.INFO)
    stage = made(tmp_path)
    stage.engines.score = score  # type: ignore[union-attr]
    for version in range(3):
        stage.trainer.version = stage.buffer.trainer_version = version
        stage.buffer.published(version)
        assert asyncio.run(stage._probe([one_group()])) is None
    said = [r for r in caplog.records if "no mismatch probe in step" in r.getMessage()]
    assert [r.levelno for r in said] == [logging.WARNING, logging.INFO, logging.INFO]
    assert said[2].getMessage().endswith("in step 3: engine sglang: temperature is 0.6")


def test_stage_recovers_an_engine_whose_own_server_is_not_well(tmp_path: Path) -> None:
    """Its worker answers, with an `EngineError`; asked for its counters, that ended the run."""
    stage = made(tmp_path)
    recovered: list[bool] = []

    async def health() -> dict[str, float]:
        if not recovered:
            raise EngineError("engine sglang: its server is dead")
        return {"tokens": 7.0}

    async def recover() -> bool:
        recovered.append(True)
        return True

    stage.engines.health, stage.weights.recover = health, recover  # type: ignore[method-assign, union-attr]
    asyncio.run(stage._ask_engines(stage.weights.recover))
    assert recovered == [True] and stage.measure._health == {"tokens": 7.0}


def test_stage_evaluation_is_timed_and_no_step_pays_for_what_went_before(tmp_path: Path) -> None:
    stage = made(tmp_path, steps=2)
    seconds = stage.measure._seconds
    stage.engines.tokens = 50.0  # type: ignore[union-attr]
    asyncio.run(stage.evaluate(0))
    assert seconds["eval_wait"] >= 0.02
    before = time.perf_counter()
    assert next(iter(stage.steps())) == 1
    assert not seconds and stage.measure._step_began >= before
    assert stage.measure._engine(1.0)["engine/tokens_per_s"] == 0.0


def test_stage_attempts_unused_tasks_again_before_new_ones(tmp_path: Path) -> None:
    stage = made(tmp_path)
    new, old = Task(id="new", prompt="x"), Task(id="old", prompt="x")
    stage.selector = SimpleNamespace(
        next=lambda: new, state_dict=dict, load_state_dict=lambda state: None
    )
    stage.buffer.unused = [old]
    (tmp_path / "selector.json").write_text("{}")
    state = {"leases": [], "retried": {}, "unused": msgspec.to_builtins(stage.buffer.unused)}
    stage.restore(tmp_path, state)
    leases = [stage.lease(), stage.lease()]
    assert [(x.id, x.task.id) for x in leases if x] == [(0, "old"), (1, "new")]


def test_stage_whose_tasks_run_out_is_still_evaluated_at_its_end(tmp_path: Path) -> None:
    stage = made(tmp_path, version=3, steps=10, publish_every=2, max_lag=1)
    stage.hook = SimpleNamespace(weights_published=lambda receipt: None)
    stage.placement = Split()
    stage.published, stage.buffer.published_version = True, 2
    scored: list[int] = []

    async def evaluate(version: int, attempt: Any) -> Sequence[Any]:
        scored.append(version)
        return []

    stage.evaluator.evaluate = evaluate
    asyncio.run(stage.end_early())
    assert scored == [3] and stage.buffer.published_version == 3


def test_stage_checkpoint_counts_no_group_that_a_resumed_run_plays_again(tmp_path: Path) -> None:
    """What was buffered was counted in `length/returned` before the checkpoint and after it."""
    stage = made(tmp_path)
    stage.selector = SimpleNamespace(observe=lambda group: None, admit=lambda group: None)
    written: list[Any] = []
    stage.shared.ledger = SimpleNamespace(offset=0, write=lambda **line: written.append(line))  # type: ignore[assignment]
    stage.buffer.start(Lease(id=0, task=(group := one_group()).task))
    stage.buffer.finish(group, stage.judge(group))
    stage._write_ledger(0)
    assert stage.standing()["lengths"] == {"trained": [0, 0], "returned": [0, 0]}
    taken = asyncio.run(stage.buffer.take(1))
    stage.buffer.stepped(1, taken)
    stage._write_ledger(1)
    assert stage.standing()["lengths"] == {"trained": [3, 1], "returned": [3, 1]}
    assert [line["step"] for line in written] == [1]


def test_stage_saves_good_weights_whose_accounts_do_not_add_up(tmp_path: Path) -> None:
    """The run ends by that, and its last checkpoint was lost as well."""
    stage = made(tmp_path)
    group = one_group()
    batch = Batch(tokens=flatten(list(group.samples)), terms=())

    async def save(directory: Path) -> None:
        (directory / "weights").write_text("good")

    stage.trainer.save = save  # type: ignore[method-assign, assignment]
    stage._describe = lambda directory: None  # type: ignore[method-assign]
    stage.selector = SimpleNamespace(state_dict=dict)
    stage.shared.ledger = SimpleNamespace(offset=0)  # type: ignore[assignment]
    stage.hook = SimpleNamespace(checkpoint_saved=lambda step, directory: None)
    asyncio.run(stage.checkpoint(1, [group], batch, Update(version=1)))
    stage.buffer.accounts.trained += 1
    with pytest.raises(RunError, match="do not add up"):
        stage.finish_step(1, [group], batch, Update(version=1))
    path = asyncio.run(stage.save())
    assert checkpoint.read_state(path)["row"] is None
    assert (path / "weights").read_text() == "good"


def test_stage_goes_on_with_tasks_that_hold_images(tmp_path: Path) -> None:
    """Their bytes came back as text, and no engine took them."""
    picture = [{"type": "text", "text": "What?"}, {"type": "image", "image": b"\x89PNG\0\xff"}]
    data = {"n": [1, {"raw": b""}], "text": "\ud800"}
    message = {"role": "user", "content": picture}
    task = Task(id="t", prompt=(message,), answer=b"cat", solution=(message,), data=data)
    plain = Task(id="u", prompt="x", answer=3, solution="y")
    stage, other = made(tmp_path), made(tmp_path)
    stage.shared.ledger = SimpleNamespace(offset=7)  # type: ignore[assignment]
    stage.leases = [Lease(id=5, task=task), Lease(id=6, task=plain)]
    stage.buffer.unused = [plain, task]
    other.stand(json.loads(json.dumps(stage.standing())))
    assert other.leases == stage.leases
    assert other.buffer.unused == stage.buffer.unused
