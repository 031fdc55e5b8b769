"""One Harbor trial against a served session: its configuration, its run, its result.

Which task and which session is `environment`'s business. Harbor is imported when a trial runs.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from miles import EpisodeError, Sandbox, ServedSession, Task

_WHERE = "environment harbor"
SHELL, SANDBOX = "shell", "sandbox"
_LATE = "AgentTimeoutError"


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What a trial is made of."""

    key: str
    """The trajectory's id."""
    task: Task
    """For the sandbox."""
    folder: Path
    """The Harbor task."""
    trials: Path
    """Where Harbor writes."""
    agent: str
    """`shell`, or a name of Harbor's."""
    agent_options: Mapping[str, Any]
    """The agent's own keys."""
    provider: str
    """Put before the model's name for agents that want one."""
    where: str
    """`sandbox`, or an environment of Harbor's."""
    where_options: Mapping[str, Any]
    """That environment's own keys."""
    rooted: bool
    """Boxes have a root of their own."""
    keep: bool
    """Leave what Harbor wrote."""


def configuration(order: Order, session: ServedSession) -> dict[str, Any]:
    """What `TrialConfig` takes. The session's key travels in the agent's environment, or for our
    own agent not at all."""
    agent: dict[str, Any] = {"kwargs": dict(order.agent_options)}
    if order.agent == SHELL:
        from miles_plugin_harbor.agent import PATH

        agent |= {"import_path": PATH, "kwargs": {**agent["kwargs"], "session": order.key}}
    else:
        url = f"{session.base_url}/v1"
        agent |= {
            "name": order.agent,
            "model_name": f"{order.provider}/{session.model}" if order.provider else session.model,
            "env": {
                "OPENAI_API_KEY": session.api_key,
                "OPENAI_BASE_URL": url,
                "OPENAI_API_BASE": url,
                "ANTHROPIC_API_KEY": session.api_key,
                "ANTHROPIC_BASE_URL": session.base_url,
            },
        }
    place: dict[str, Any] = {"type": order.where, "kwargs": dict(order.where_options)}
    if order.where == SANDBOX:
        from miles_plugin_harbor.boxes import PATH as BOXES

        place = {"import_path": BOXES, "kwargs": {**order.where_options, "box": order.key}}
    return {
        "task": {"path": str(order.folder)},
        "trials_dir": str(order.trials),
        "trial_name": order.key.replace("/", "_"),
        "agent": agent,
        "environment": place,
    }


async def run(order: Order, session: ServedSession, sandbox: Sandbox | None) -> Any:
    """Run the trial to its `TrialResult`. Raises `EpisodeError` when it cannot be made at all."""
    await asyncio.to_thread(_import)
    from harbor.models.trial.config import TrialConfig
    from harbor.trial.trial import Trial

    from miles_plugin_harbor.agent import SESSIONS
    from miles_plugin_harbor.boxes import WAITING, Waiting

    SESSIONS[order.key] = session
    if sandbox is not None:
        WAITING[order.key] = Waiting(sandbox=sandbox, task=order.task, rooted=order.rooted)
    try:
        try:
            config = TrialConfig.model_validate(configuration(order, session))
            trial = await Trial.create(config)
        except (ImportError, LookupError, OSError, TypeError, ValueError) as error:
            raise EpisodeError(
                f"{_WHERE}: no trial of {order.folder.name} with agent {order.agent} in "
                f"{order.where}: {type(error).__name__}: {error}"
            ) from error
        return await trial.run()
    finally:
        SESSIONS.pop(order.key, None)
        WAITING.pop(order.key, None)
        if not order.keep:
            shutil.rmtree(order.trials / order.key.replace("/", "_"), ignore_errors=True)


def _import() -> None:
    """Harbor takes seconds to import, which no event loop should wait for."""
    for name in ("harbor.trial.trial", "miles_plugin_harbor.agent", "miles_plugin_harbor.boxes"):
        import_module(name)


def worth(result: Any, name: str) -> tuple[float, dict[str, float]]:
    """The reward of that name (or the only one), the others as metrics. Raises `EpisodeError` when
    the trial failed: an agent that ran out of its time is graded, one that broke is not, since its
    work says nothing about the model."""
    failure = result.exception_info
    late = failure is not None and failure.exception_type == _LATE
    rewards = dict(result.verifier_result.rewards or {}) if result.verifier_result else {}
    if not result.reward_valid or (failure is not None and not late):
        why = "its tests gave no reward"
        if failure is not None:
            why = f"{failure.exception_type}: {failure.exception_message}"
        raise EpisodeError(f"{_WHERE}: the trial of {result.task_name} has no valid reward: {why}")
    if name not in rewards and len(rewards) != 1:
        raise EpisodeError(
            f"{_WHERE}: the tests of {result.task_name} give no reward {name!r} "
            f"(environment.reward); they give {', '.join(sorted(rewards))}"
        )
    reward = float(rewards.pop(name) if name in rewards else rewards.popitem()[1])
    metrics = {key: float(value) for key, value in rewards.items()}
    return reward, metrics | {"agent_late": float(late)}
