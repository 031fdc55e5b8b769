"""What every selector must do: hand out tasks, judge groups, and continue exactly from its own
state.

Which order or which groups are best is not asked here.
"""

from __future__ import annotations

import json
from typing import Any

from miles.testing.contract.case import Case, equal_json, expect
from miles.testing.samples import make_group
from miles.types import Drop, Group, Task, Trajectory

LONG = 40
"""Tasks drawn: more than the environment's, so that an epoch ends inside."""
CUTS = (0, 1, 7, 16, 23)
"""After how many tasks the state is taken."""


def check_next(case: Case) -> None:
    """It hands out the environment's training tasks, or None; after None there is nothing more."""
    selector = _build(case)
    known = {t.id: t for t in case.companion("environment").tasks("train")}
    ended = False
    for number in range(LONG):
        task = selector.next()
        if task is None:
            expect(number, "there is not even a first task")
            ended = True
            continue
        expect(not ended, f"task {number} is {task.id!r}, after the tasks had ended")
        expect(isinstance(task, Task), f"next() gave a {type(task).__name__}, not a Task")
        expect(known.get(task.id) == task, f"{task.id!r} is no training task of the environment")


def check_seeded(case: Case) -> None:
    """The same seed gives the same tasks in the same order."""
    first, second = _draw(_build(case), LONG), _draw(_build(case), LONG)
    expect(first == second, f"two runs with one seed differ: {first[:6]} and {second[:6]}")


def check_state_continues(case: Case) -> None:
    """From a state, saved as JSON at any moment, it goes on exactly as it would have."""
    for cut in CUTS:
        one = _build(case)
        _draw(one, cut)
        text = json.dumps(equal_json(one.state_dict(), "state_dict()"))
        rest = _draw(one, LONG - cut)
        other = _build(case)
        _draw(other, 5)
        other.load_state_dict(json.loads(text))
        again = _draw(other, LONG - cut)
        expect(again == rest, f"after {cut} tasks: {rest[:6]} without, {again[:6]} with a restart")
        expect(one.state_dict() == other.state_dict(), f"after {cut} tasks and on: states differ")


def check_state_apart(case: Case) -> None:
    """A state that was taken does not change when the selector goes on."""
    selector = _build(case)
    _draw(selector, 3)
    state = selector.state_dict()
    before = json.dumps(state)
    _draw(selector, 5)
    expect(json.dumps(state) == before, "state_dict() gave a live object: it changed afterwards")


def check_admit(case: Case) -> None:
    """`admit` gives None, or a `Drop` whose reason is one word with underscores; and the same one
    twice."""
    selector = _build(case)
    for group in _groups():
        verdict = selector.admit(group)
        if verdict is not None:
            expect(
                isinstance(verdict, Drop), f"admit() gave a {type(verdict).__name__}, not a Drop"
            )
            good = verdict.reason.isidentifier() and verdict.reason == verdict.reason.lower()
            expect(good, f"reason {verdict.reason!r} is not one word with underscores")
        expect(selector.admit(group) == verdict, f"admit() of group {group.id} changed its mind")
        selector.observe(group)


def _build(case: Case) -> Any:
    return case.build()


def _draw(selector: Any, count: int) -> list[str | None]:
    """Ids of the next tasks; every other one comes back as a group that is observed."""
    ids: list[str | None] = []
    for number in range(count):
        task = selector.next()
        ids.append(None if task is None else task.id)
        if task is not None and number % 2:
            selector.observe(make_group(number, rewards=(1.0, number % 3 / 2), task=task))
    return ids


def _groups() -> list[Group]:
    task = Task(id="t", prompt="2+2=")
    failed = Trajectory(id="g9/0", samples=(), failure=Drop(reason="timeout"))
    return [
        make_group(0, rewards=(1.0, 0.0, 0.5)),
        make_group(1, rewards=(1.0, 1.0)),
        make_group(2, rewards=(0.0, 0.0)),
        make_group(3, rewards=(1.0,)),
        make_group(4, rewards=(1.0, 0.0), lengths=(1, 400)),
        make_group(5, rewards=(-1e30, 1e30)),
        Group(id=9, task=task, trajectories=(failed,)),
    ]
