"""What is refused when the parts of a stage come together; how workers find each other again."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from miles import ConfigError, Context, Spec, WorkerError
from miles.assemble import (
    _agree,
    _connect_again,
    _end_others,
    _place_engine,
    _transport,
    _worker,
    rollout_roles,
)
from miles.config import compose
from miles.testing import FakeHandle
from miles.workers.waiting import told_while


def handle(name: str, *fingerprints: str) -> FakeHandle:
    ranks = [{"precision": SimpleNamespace(fingerprint=lambda f=f: f)} for f in fingerprints]
    return FakeHandle(name, *ranks)


def test_assemble_accepts_one_precision_everywhere() -> None:
    sides = [handle("trainer", "fp32", "fp32"), handle("engine", "fp32")]
    assert asyncio.run(_agree("fp32", sides, 5.0)) is None


def test_assemble_refuses_a_rank_of_another_precision() -> None:
    sides = [handle("trainer", "fp32", "fp8")]
    with pytest.raises(ConfigError, match="precision: trainer has fingerprint 'fp8', the driver"):
        asyncio.run(_agree("fp32", sides, 5.0))


def test_assemble_sends_weights_as_the_engine_that_evaluates_takes_them() -> None:
    """A supervised stage with another transport than the next one's failed in its evaluation."""
    kinds = {
        "torch": SimpleNamespace(samples=True),
        "demonstration": SimpleNamespace(samples=False),
    }
    registry = SimpleNamespace(component=lambda kind, name: kinds[name])

    def stage(engine: str, transport: str) -> Any:
        return SimpleNamespace(
            specs={"engine": SimpleNamespace(name=engine), "transport": transport}
        )

    sft, grpo = stage("demonstration", "memory"), stage("torch", "disk")
    assert _transport([sft, grpo], registry) == _transport([grpo, sft], registry) == "disk"
    assert _transport([sft], registry) == "memory"


class Runtime:
    """Notes who was started and ended."""

    def __init__(self) -> None:
        self.running: list[str] = []

    async def start(self, role: str, parts: Any, context: Any, *, world: int = 1) -> FakeHandle:
        self.running.append(f"{role} x{world}")
        return FakeHandle(role, *({} for _ in range(world)))

    async def end(self, handle: FakeHandle) -> None:
        self.running.remove(f"{handle.name} x{handle.world}")


def test_assemble_ends_a_worker_of_another_number_of_ranks(tmp_path: Path) -> None:
    """It kept its devices to the end of the run."""
    shared: Any = SimpleNamespace(runtime=Runtime(), handles={}, registry=None)

    async def main() -> None:
        context = Context(directory=tmp_path)
        for world in (1, 2, 1):
            await _worker(shared, "trainer", (), context, world)
            assert shared.runtime.running == [f"trainer x{world}"]

    asyncio.run(main())


def test_assemble_starts_a_worker_anew_that_had_other_variables(tmp_path: Path) -> None:
    """Libraries had read the ones of the stage before: NCCL was told nothing of a change."""
    registry = SimpleNamespace(variables=lambda spec: dict(spec.config))
    runtime: Any = Runtime()
    rebuilt: list[str] = []

    async def rebuild(handle: FakeHandle, parts: Any, context: Any) -> None:
        rebuilt.append(parts[0].name)

    runtime.rebuild = rebuild
    shared: Any = SimpleNamespace(runtime=runtime, handles={}, registry=registry)

    async def main() -> None:
        context = Context(directory=tmp_path)
        first = None
        for name, variables in (("a", {"X": "0"}), ("b", {"X": "0"}), ("c", {"X": "1"}), ("d", {})):
            part = Spec(kind="transport", name=name, config=variables)
            handle = await _worker(shared, "trainer", (part,), context, 1)
            assert (handle is first) == (name == "b")
            first = handle
        assert rebuilt == ["b"] and runtime.running == ["trainer x1"]

    asyncio.run(main())


@pytest.mark.parametrize("counts", [(1, 2), (2, 1), (3, 2), (2, 0), (0, 2)])
def test_assemble_ends_rollout_workers_that_a_stage_does_not_have(
    tmp_path: Path, counts: tuple[int, int]
) -> None:
    shared: Any = SimpleNamespace(runtime=Runtime(), handles={}, registry=None, ended=0)

    async def main() -> None:
        for count in counts:
            await _end_others(shared, rollout_roles(count))
            for role in rollout_roles(count):
                await _worker(shared, role, (), Context(directory=tmp_path), 1)
        assert shared.runtime.running == [f"{role} x1" for role in rollout_roles(counts[-1])]

    asyncio.run(main())


@pytest.mark.parametrize(("failures", "lives"), [(2, True), (99, True), (2, False)])
def test_assemble_connects_a_new_rollout_worker_once_engines_that_died_with_it_are_back(
    monkeypatch: pytest.MonkeyPatch, failures: int, lives: bool
) -> None:
    """A machine that took both with it ended the run, whatever max_restarts was."""
    monkeypatch.setattr("miles.assemble._RETRY_S", 0.001)
    monkeypatch.setattr("miles.assemble._ENGINES_BACK_S", 0.05)
    tried: list[int] = []

    async def ping() -> None:
        if not lives:
            raise WorkerError("rollout: it exited with code 1")

    async def connect() -> Any:
        tried.append(1)
        if len(tried) <= failures:
            raise WorkerError("engine: the worker at h:1 cannot be reached")

    worker = FakeHandle("rollout", {"rollouts": SimpleNamespace(ping=ping)})
    connecting = _connect_again(connect, worker, ping_s=1.0)
    if failures == 2 and lives:
        asyncio.run(connecting)
        assert len(tried) == 3
        return
    with pytest.raises(WorkerError, match="cannot be reached" if lives else "exited with code 1"):
        asyncio.run(connecting)
    assert len(tried) == 1 or lives


@pytest.mark.parametrize(
    ("values", "what"),
    [
        (("engine=sglang",), "its server starts (logs/sglang-0.log)"),
        (
            ("engine=sglang", "engine.workers=3"),
            "its servers start (logs/sglang-0.log to sglang-2.l",
        ),
        (
            ("engine=sglang", "engine.url=http://h:1", "engine.start_timeout_s=60"),
            "http://h:1 to answer, at most 60 s (start_timeout_s)",
        ),
        (("engine=torch",), "its first answer"),
    ],
)
def test_run_that_waits_for_a_server_to_start_says_so_instead_of_being_mute(
    values: tuple[str, ...], what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[Any] = []

    class Slow:
        async def build(self, *_: Any, **__: Any) -> None:
            return None

        async def health(self) -> dict[str, float]:
            await asyncio.sleep(0.15)
            return {"max_len": 64.0}

    monkeypatch.setattr("miles.assemble.told_while", partial(told_while, first_s=0.05))
    plan = compose(["experiment=grpo", *values])
    stage: Any = SimpleNamespace(
        shared=SimpleNamespace(
            registry=plan.registry,
            engines=Slow(),
            tracking=SimpleNamespace(moment=lambda name, data: said.append((name, data["text"]))),
        ),
        evaluator=None,
        samples=True,
    )
    longest = asyncio.run(_place_engine(stage, plan.stages, Context(directory=tmp_path)))
    assert longest == 64
    assert said[0][0] == "waited" and said[0][1].startswith(f"waiting for engine: {what}")
