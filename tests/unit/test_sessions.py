"""What `miles sessions serve` chooses of a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from miles.plugins import Registry
from miles.sessions import planned

ENGINE = "engine.url=http://127.0.0.1:30000"


@pytest.mark.parametrize(("family", "more"), [("qwen3", ()), ("llama", ("model=llama",))])
def test_sessions_over_a_checkpoint_speak_its_tokens(
    tmp_path: Path, family: str, more: tuple[str, ...]
) -> None:
    """Its family was found, but a random model was planned, which speaks bytes to any engine."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
    (tmp_path / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    plan = planned([ENGINE, f"model.path={tmp_path}", *more], registry=Registry.load())
    (stage,) = plan.stages
    assert stage.resolved["model"]["init"] == "load"
    assert stage.specs["model"].name == family and stage.specs["tito"].name != "bytes"
