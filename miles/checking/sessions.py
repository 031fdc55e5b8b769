"""What `miles check` says of conversations whose turns go through the session server.

It looks at a stage that is planned; what the API carries is `miles.session.over_http`'s business.
"""

from __future__ import annotations

from typing import Any

from miles.protocols import Spec

__all__ = ["through_faults"]

_PROMPTS = 32  # looked at


def through_faults(planned: Any) -> list[str]:
    """Why an environment that the loop drives cannot hold its conversations under
    `session.through=server`. One that drives itself may use them as it likes."""
    rules = planned.settings.session
    environment, spec = planned.built.get("environment"), planned.specs["environment"]
    if rules.through != "server" or not planned.samples or not isinstance(spec, Spec):
        return []
    if environment is None or hasattr(environment, "play") or hasattr(environment, "rollout"):
        return []
    faults = []
    if rules.extension == "branching":
        faults.append(
            "session.through=server and session.extension=branching: each turn of an episode "
            "follows the one before, also one that was cut by length, which a branching session "
            "refuses; use session.extension=linear"
        )
    tasks = environment.tasks("train")
    some = (tasks[i] for i in range(min(len(tasks), _PROMPTS)))
    if (raw := next((task.id for task in some if isinstance(task.prompt, str)), None)) is not None:
        faults.append(
            f"session.through=server: environment {spec.name!r} gives task {raw!r} as raw text, "
            "and the chat completions API takes messages; use session.through=process"
        )
    return faults
