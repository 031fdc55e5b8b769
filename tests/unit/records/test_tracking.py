"""Trackers are told everything in order and can neither stop nor slow the loop."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import Any

from miles import RunError
from miles.records.tracking import Tracking


class Recorder:
    def __init__(self) -> None:
        self.seen: list[tuple[str, Mapping[str, Any]]] = []
        self.closed = False

    def moment(self, name: str, data: Mapping[str, Any]) -> None:
        self.seen.append((name, data))

    def close(self) -> None:
        self.closed = True


class Broken(Recorder):
    def moment(self, name: str, data: Mapping[str, Any]) -> None:
        super().moment(name, data)
        raise OSError("the disk is full")


class Stuck(Recorder):
    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Event()

    def moment(self, name: str, data: Mapping[str, Any]) -> None:
        self.go.wait(10)
        super().moment(name, data)


def test_tracking_tells_all_in_order_then_closes() -> None:
    a, b = Recorder(), Recorder()
    tracking = Tracking({"a": a, "b": b})
    for n in range(100):
        tracking.moment("step_finished", {"step": n})
    assert tracking.close() == ()
    assert [d["step"] for _, d in a.seen] == list(range(100)) == [d["step"] for _, d in b.seen]
    assert a.closed
    assert tracking.close() == ()


def test_tracking_drops_a_broken_tracker_and_keeps_the_others() -> None:
    good, bad = Recorder(), Broken()
    tracking = Tracking({"bad": bad, "good": good})
    for n in range(3):
        tracking.moment("step_finished", {"step": n})
    tracking.close()
    assert len(good.seen) == 3
    assert len(bad.seen) == 1


def test_tracking_prints_no_traceback_of_what_a_tracker_said_itself(caplog) -> None:
    """`tracker=wandb` without a key printed ten lines of Python around the one that says so."""

    class Refused(Recorder):
        def moment(self, name: str, data: Mapping[str, Any]) -> None:
            raise RunError("tracker refused: there is no key")

    tracking = Tracking({"refused": Refused(), "bad": Broken()})
    tracking.moment("run_started", {})
    tracking.close()
    refused, bad = caplog.records
    assert refused.getMessage() == (
        "tracker refused failed at run_started and is told nothing more: "
        "tracker refused: there is no key"
    )
    assert not refused.exc_info and bad.exc_info


def test_tracking_never_waits_and_says_what_it_left_out() -> None:
    stuck = Stuck()
    tracking = Tracking({"stuck": stuck}, limit=4)
    began = time.monotonic()
    for n in range(50):
        tracking.moment("step_finished", {"step": n})
    assert time.monotonic() - began < 1.0
    stuck.go.set()
    deadline = time.monotonic() + 5
    while len(stuck.seen) < 4 and time.monotonic() < deadline:
        time.sleep(0.01)
    tracking.moment("step_finished", {"step": 50})
    tracking.close()
    warned = [d["text"] for name, d in stuck.seen if name == "warned"]
    told = sum(name == "step_finished" for name, _ in stuck.seen)
    assert warned == [f"trackers fell behind: {51 - told} moments left out"]
