"""Hooks of this plugin: where its YAML is, and an observer that writes down which words stayed
hard.

Imported at every start of miles, so it imports nothing heavy. It watches and never changes a run.
"""

from __future__ import annotations

import json
import logging
from collections import defaultdict
from pathlib import Path

from miles import Drop, Group, hookimpl

log = logging.getLogger("miles_plugin_example")

KEPT = 20
"""Words in the list."""

_rewards: defaultdict[str, list[float]] = defaultdict(list)


@hookimpl
def miles_config_paths() -> str:
    """The folder of `environment/*.yaml` and `experiment/*.yaml`."""
    return str(Path(__file__).parent / "conf")


@hookimpl
def miles_run_started() -> None:
    """Forget the run before; a hook takes only those arguments that it needs."""
    _rewards.clear()


@hookimpl
def miles_group_finished(group: Group, drop: Drop | None) -> None:
    """Remember what every attempt at our own words was worth, trained on or not."""
    if group.task.id.startswith("sort:"):
        worth = [t.reward for t in group.trajectories if t.failure is None]
        _rewards[group.task.id.removeprefix("sort:")] += worth


@hookimpl
def miles_run_finished(directory: str) -> None:
    """Write the hardest words to `hardest_words.json` in the run's directory."""
    mean = {word: sum(worth) / len(worth) for word, worth in _rewards.items() if worth}
    if not mean:
        return
    hardest = dict(sorted(mean.items(), key=lambda item: (item[1], item[0]))[:KEPT])
    path = Path(directory) / "hardest_words.json"
    path.write_text(json.dumps(hardest, indent=1) + "\n")
    log.info("the hardest words are in %s", path)
