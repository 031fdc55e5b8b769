"""What a run says and puts in order before its first stage."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from miles.ledger import Ledger
from miles.run import _Run


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
