"""Every moment a plugin may watch or answer, in the order of a run's life.

Implement one with `@miles.hookimpl` in the module that an entry point of group `miles` names.
Importing such a module must be cheap: no torch, ray or sglang. The `miles_make_<kind>` factories at
the end are generated from the table of kinds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pluggy

from miles.batch import Batch, Receipt, Score, Skipped, Update
from miles.protocols import KINDS
from miles.types import Drop, Group, Task

hookspec = pluggy.HookspecMarker("miles")
hookimpl = pluggy.HookimplMarker("miles")

# ---------------------------------------------------------------- before a run: what there is


@hookspec
def miles_config_paths() -> str:  # type: ignore[empty-body]
    """A folder of Hydra YAML, `<kind>/<name>.yaml`, as a path or `pkg://package.folder`. All
    answers are used."""


@hookspec
def miles_commands(subparsers: Any) -> None:
    """Add commands to the command line (an `argparse` subparsers object). All are called.

    The function that a command sets as `func` gets the arguments, among them `registry`, and
    `plan()`, which composes the words in `overrides` as a run would; it returns the exit code."""


@hookspec
def miles_rewards() -> Mapping[str, Callable[..., float]]:  # type: ignore[empty-body]
    """Reward functions by name: `reward(text, task) -> float`. All answers are merged; a name twice
    is a conflict."""


@hookspec
def miles_filters() -> Mapping[str, Callable[[Group], Drop | None]]:  # type: ignore[empty-body]
    """Admission filters by name, for `selector.admit`. All answers are merged; a name twice is a
    conflict."""


@hookspec
def miles_tools() -> Mapping[str, Callable[..., Any]]:  # type: ignore[empty-body]
    """Functions that a model may call, by name, for `environment.tools`: annotated parameters, a
    docstring, plain or async. All answers are merged; a name twice is a conflict."""


@hookspec
def miles_agents() -> Mapping[str, Callable[..., Any]]:  # type: ignore[empty-body]
    """Black-box agents by name, for `environment=harness`: `async agent(task, *, base_url, api_key,
    model)`, which returns a reward, or a text to grade. All answers are merged; a name twice is a
    conflict."""


@hookspec
def miles_check(config: Mapping[str, Any]) -> Sequence[str]:  # type: ignore[empty-body]
    """Faults of a resolved stage, as sentences, found without a GPU or an engine. All answers are
    shown."""


# ---------------------------------------------------------------- a run begins


@hookspec
def miles_run_started(directory: str, config: Mapping[str, Any]) -> None:
    """The run directory exists and nothing has started yet."""


@hookspec
def miles_stage_started(stage: str, version: int) -> None:
    """Components of a stage are built; `version` is the weights' version."""


# ---------------------------------------------------------------- rollout


@hookspec
def miles_group_started(group: int, task: Task) -> None:
    """A task was leased and its attempts begin."""


@hookspec
def miles_group_finished(group: Group, drop: Drop | None) -> None:
    """All attempts are back; `drop` says why the group will not be trained on, None admits it."""


# ---------------------------------------------------------------- train


@hookspec(firstresult=True)
def miles_prepared(groups: Sequence[Group], batch: Batch) -> Batch | None:
    """A batch is about to be trained on; returning another replaces it. Stops at the first
    answer."""


@hookspec
def miles_step_finished(
    step: int, groups: Sequence[Group], update: Update, metrics: Mapping[str, float]
) -> None:
    """A trainer step is done, published and accounted for; `metrics` is the step's flat
    dictionary."""


# ---------------------------------------------------------------- publish, evaluate, keep


@hookspec
def miles_weights_published(receipt: Receipt) -> None:
    """Engines serve a new version."""


@hookspec
def miles_evaluated(step: int, result: Score | Skipped) -> None:
    """One evaluation set has a score or a reason for having none."""


@hookspec
def miles_checkpoint_saved(step: int, directory: str) -> None:
    """A checkpoint is complete under its final name."""


# ---------------------------------------------------------------- a run ends


@hookspec
def miles_run_finished(directory: str, outcome: str) -> None:
    """`outcome` is `finished`, `interrupted` or `failed`; every process has been stopped."""


# ---------------------------------------------------------------- factories, one a kind


def _factory(kind: str) -> Callable[..., Any]:
    def factory(name: str, config: Any, context: Any) -> Any:
        raise AssertionError("a specification is never called")  # pragma: no cover

    factory.__name__ = f"miles_make_{kind}"
    factory.__doc__ = (
        f"Build the {kind} called `name` from its validated `config`. Stops at the first answer; "
        f"the default, tried last, resolves the name through the entry points of `miles.{kind}`. "
        "Wrap it to trace, record or inject faults."
    )
    return hookspec(firstresult=True)(factory)


for _name in KINDS:
    globals()[f"miles_make_{_name}"] = _factory(_name)
