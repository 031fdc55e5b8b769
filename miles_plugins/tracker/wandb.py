"""The `wandb` tracker: metrics to Weights & Biases, or to its offline files.

It sends numbers and the configuration; no code, no console output, no weights, no samples.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from miles import ConfigError, Context, RunError
from miles_plugins.tracker.extra import require
from miles_plugins.tracker.wandb_key import has_key


class Wandb:
    """Logs every number of every step and evaluation under its metric name.

    Offline runs are sent later with `wandb sync <run directory>/wandb/offline-run-*`. A resumed run
    continues the same W&B run, and logs the step that it goes on from again. The API key is read
    from the environment variable that the configuration names, handed to the library, and never
    written. Needs the `wandb` extra.
    """

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Config:
        project: str = "miles"
        """W&B project."""
        entity: str | None = None
        """Team or user; None is the key's default."""
        group: str | None = None
        """Group of runs it belongs to."""
        tags: tuple[str, ...] = ()
        """Labels."""
        mode: Literal["online", "offline", "disabled"] = "online"
        """Offline writes files only; disabled does nothing."""
        api_key_env: str = "WANDB_API_KEY"
        """Environment variable that holds the API key; unset uses what `wandb login` stored."""
        machine_stats: bool = False
        """Also log CPU, memory and GPU use, which costs a thread of its own."""

    @classmethod
    def example_config(cls, directory: Path) -> Mapping[str, Any]:
        """For the contract suite: it neither asks for a key nor sends anything."""
        return {"mode": "offline"}

    @classmethod
    def check(cls, config: Config, planned: Any) -> Sequence[str]:
        """Whether an online run would find its key: in a run there is nobody to ask for one."""
        if config.mode != "online" or has_key(config.api_key_env):
            return []
        return [
            f"mode=online, and there is no API key: neither in {config.api_key_env} nor where "
            "`wandb login` keeps it; run `wandb login` first, or use tracker.wandb.mode=offline "
            "and send the run later with `wandb sync`"
        ]

    def __init__(self, config: Config, context: Context) -> None:
        require("wandb", distribution="wandb")
        if not config.project:
            raise ConfigError("tracker wandb: project: is empty")
        self._config = config
        self._directory = context.directory
        self._run: Any = None

    def moment(self, name: str, data: Mapping[str, Any]) -> None:
        """Log what a moment carries. Raises `RunError` when W&B refuses the run."""
        if name == "run_started":
            self._start(data)
        elif self._run is None:
            return
        elif name in ("step_finished", "step_restored"):
            self._run.log(dict(data))
        elif name == "evaluated":
            values = {
                f"eval/{data['set']}/{k}": v for k, v in data.items() if k not in ("step", "set")
            }
            self._run.log({"step": data["step"], **values})
        elif name == "run_finished":
            self._run.summary["outcome"] = data["outcome"]
            self._finish(0 if data["outcome"] == "finished" else 1)

    def close(self) -> None:
        """Flush and end the W&B run; safe to call twice."""
        self._finish(1)

    def _start(self, data: Mapping[str, Any]) -> None:
        import wandb

        config = self._config
        settings = wandb.Settings(
            console="off",
            silent=True,
            disable_git=True,
            disable_code=True,
            x_disable_stats=not config.machine_stats,
        )
        if config.mode == "online" and (key := os.environ.get(config.api_key_env)):
            settings.api_key = key
        try:
            self._run = wandb.init(
                dir=str(self._directory),
                id=self._id(),
                resume="allow",
                name=data.get("name") or None,
                project=config.project,
                entity=config.entity,
                group=config.group,
                tags=config.tags,
                config=dict(data.get("config", {})),
                mode=config.mode,
                settings=settings,
            )
        except wandb.Error as error:
            raise RunError(
                f"tracker wandb: cannot start a run in {config.project!r}: {error}"
            ) from None
        # A resumed run logs some steps again, which W&B's own counter would refuse.
        self._run.define_metric("*", step_metric="step")

    def _finish(self, exit_code: int) -> None:
        if self._run is not None:
            run, self._run = self._run, None
            run.finish(exit_code=exit_code)

    def _id(self) -> str:
        """The W&B run's id, kept in the run directory so that a resume finds it."""
        path = self._directory / "wandb-id"
        if not path.exists():
            path.write_text(secrets.token_hex(8) + "\n", encoding="utf-8")
        return path.read_text(encoding="utf-8").strip()
