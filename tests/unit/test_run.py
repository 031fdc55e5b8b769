"""What a run says and puts in order before its first stage, and what it saves when one fails."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from miles import Task
from miles.buffer import Buffer, Lease
from miles.ledger import Ledger
from miles.placement import Colocated
from miles.run import _Run
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
