"""What `miles sessions serve` chooses of a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from miles import ConfigError
from miles.plugins import Registry
from miles.session_servers.command import planned, refuse_another_number

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


def test_sessions_without_a_checkpoint_are_refused() -> None:
    """They spoke bytes to whatever engine it was."""
    with pytest.raises(ConfigError, match=r"model\.path: the directory of the checkpoint"):
        planned([ENGINE], registry=Registry.load())
    (stage,) = planned([ENGINE, "tito=bytes"], registry=Registry.load()).stages
    assert stage.specs["tito"].name == "bytes"


@pytest.mark.parametrize(
    ("held", "workers", "said"),
    [
        (["server-0", "server-1"], 1, "holds sessions of 2 servers, not 1; go on with workers=2"),
        (["server-0", "server-1"], 3, "holds sessions of 2 servers, not 3"),
        (["sessions/a.journal"], 2, "holds sessions of 1 server, not 2; go on with workers=1"),
        (["server-0", "server-1", "sessions/lock"], 2, ""),
        (["sessions/lock"], 2, ""),
        (["sessions/a.journal"], 1, ""),
    ],
)
def test_sessions_stay_with_their_number_of_servers(
    tmp_path: Path, held: list[str], workers: int, said: str
) -> None:
    """A start with another number answered 401 for all of them."""
    for name in held:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).mkdir() if "." not in name else (tmp_path / name).touch()
    if not said:
        return refuse_another_number(tmp_path, workers)
    with pytest.raises(ConfigError, match=said):
        refuse_another_number(tmp_path, workers)
