"""Kill processes of real runs with SIGKILL at random moments, and hold the accounts against it.

    python tests/bench/real_kills.py --kills 20 --seed 0 [--max-lag 0] [--steps 40] [--dir DIR]
    python tests/bench/real_kills.py --kills 4 --each --steps 12

Attempts are played by an agent over the session server's HTTP (`served_turns.py`); the model is
tiny. Every kill hits the driver, the trainer, the engine worker or the rollout worker (which holds
the session server) of a run, while it starts or somewhere in the steps that are left to it. A run
that ends is resumed, one that is killed before its first checkpoint begun again; a run that
reached its last step is audited, and another takes its place until all kills are done.

Exits 0 exactly when, along the lineage of the surviving weights of every run: every group that
was started has one fate; every step has its groups, the same by the ledger as by a plugin that
watched, and one row in metrics.jsonl; a killed engine or rollout worker never ended a run that had
taken a step; no process outlived its driver; and with `max_lag=0` the last weights are, bit for
bit, those of a run that nobody disturbed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from miles.checkpoint import find
from miles.records.ledger import fates

TARGETS = ("driver", "trainer", "engine", "rollout")
PLUGIN = Path(__file__).with_name("served_turns.py")
GROUPS = 2
EARLY = 0.25
"""Share of a run's starts during which it is killed."""
LIMIT_S = 240.0
"""Seconds for anything that has to happen."""


@dataclass
class Seen:
    """What happened, and what was wrong with it."""

    kills: Counter[str] = field(default_factory=Counter)
    startup: int = 0
    """Kills before the run's first step since its start."""
    resumes: int = 0
    again: int = 0
    """Runs that had no checkpoint yet, and were begun again."""
    runs: int = 0
    groups: Counter[str] = field(default_factory=Counter)
    """By fate, along the surviving lineages."""
    rolled_back: int = 0
    same: int = 0
    """Runs whose last weights are those of the undisturbed run."""
    faults: list[str] = field(default_factory=list)


class Life:
    """One run, from its beginning to its last step, however often it is killed on the way."""

    def __init__(self, folder: Path, name: str, args: argparse.Namespace) -> None:
        self.directory = folder / name
        self.steps = args.steps
        self.words = [
            "experiment=grpo", f"plugins=['{PLUGIN}']", "environment=served_turns", "tito=bytes",
            f"steps={args.steps}", f"groups_per_step={GROUPS}", "samples_per_group=2",
            "max_new_tokens=8", f"max_lag={args.max_lag}", "selector.admit=[none]",
            "evaluator=null", "engine.max_len=128", "engine.rows=8", "trainer.lr=1e-2",
            f"checkpoint_every={args.every}", "max_restarts=1000", "tracker=[jsonl]",
            "runtime.start_timeout_s=900",  # a busy machine is no fault
            f"run.dir='{folder}'", f"run.name={name}",
        ]  # fmt: skip
        self.process: subprocess.Popen[str] | None = None
        self.workers: dict[str, int] = {}
        self.stepped = 0
        """Lines of `taken` there were when the process was started."""
        self.resumed: set[int] = set()
        """Steps of the checkpoints that it was resumed from: what a step tells plugins comes after
        its checkpoint, so that these may not have been told."""

    def start(self, seen: Seen) -> None:
        """Begin, or go on from the newest checkpoint."""
        words = self.words
        if found := find(self.directory / "checkpoints"):
            words = [f"resume='{self.directory}'"]
            self.resumed.add(int(found[-1].name.partition("_")[2]))
            seen.resumes += 1
        elif self.directory.exists():
            shutil.rmtree(self.directory)
            self.resumed.clear()
            seen.again += 1
        command = [sys.executable, "-m", "miles", "run", *words]
        self.stepped = len(self.taken())
        self.workers = {}
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "NO_COLOR": "1"},
        )

    def taken(self) -> list[tuple[int, list[int]]]:
        """(step, groups) as the plugin saw them, in order, steps taken again included."""
        path = self.directory / "trained.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        rows = [json.loads(line) for line in lines if line.endswith("}")]
        return [(row["step"], row["groups"]) for row in rows]

    def pid(self, target: str) -> int | None:
        """Of a process of this run; None while it is not there."""
        if self.process is None:
            return None
        if target == "driver":
            return self.process.pid
        self.workers |= children(self.process.pid)
        return children(self.process.pid).get(target)

    def wait(self, seconds: float) -> int | None:
        """The exit code, or None when it still runs after so long."""
        if self.process is None:
            return None
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def end(self) -> str:
        """What it said; no process of it is left."""
        if self.process is None:
            return ""
        self.workers |= children(self.process.pid)
        self.process.kill()
        text = self.process.communicate()[0]
        self.process = None
        return text

    def digest(self) -> str:
        """Of the last checkpoint's weights and optimizer."""
        last = find(self.directory / "checkpoints")[-1]
        found = hashlib.sha256()
        for path in sorted(p for part in ("model", "trainer") for p in (last / part).rglob("*")):
            if path.is_file():
                found.update(str(path.relative_to(last)).encode() + path.read_bytes())
        return found.hexdigest()


def children(driver: int) -> dict[str, int]:
    """Pid of every worker of this driver, by name."""
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            words = (entry / "cmdline").read_bytes().split(b"\0")
        except (OSError, IndexError):
            continue
        if parent == driver and b"--name" in words:
            found[words[words.index(b"--name") + 1].decode()] = int(entry.name)
    return found


def await_moment(life: Life, rng: random.Random, starts: float, *, early: bool) -> int | None:
    """Wait while the run starts, or until it has taken some of the steps that are left and a little
    more; the exit code, if it ends before."""
    if early:
        return life.wait(rng.uniform(0, starts))
    first = len(life.taken())
    if first == life.stepped:
        left = life.steps - max(life.resumed, default=0)
    else:
        left = life.steps - life.taken()[-1][0]
    wanted = first + rng.randint(1, max(1, left - 1))
    while len(life.taken()) < wanted:
        if (code := life.wait(0.02)) is not None:
            return code
    return life.wait(rng.uniform(0, 0.5))


def kill(life: Life, target: str, rng: random.Random, starts: float, seen: Seen) -> None:
    """Kill `target` at a random moment; see what comes of it."""
    early = life.process is None and rng.random() < EARLY
    if life.process is None:
        life.start(seen)
    if (code := await_moment(life, rng, starts, early=early)) is not None:
        if code:
            said = life.end()
            seen.faults.append(f"{life.directory.name}: ended though nobody killed it:\n{said}")
        return  # it reached its last step
    until = time.monotonic() + LIMIT_S
    while (pid := life.pid(target)) is None:
        if life.wait(0.05) is not None:
            return
        if time.monotonic() > until:
            raise RuntimeError(f"{target} was not there after {LIMIT_S:g} s")
    young = len(life.taken()) == life.stepped
    life.pid("trainer")  # note every worker there is
    os.kill(pid, signal.SIGKILL)
    seen.kills[target] += 1
    seen.startup += young
    if target in ("driver", "trainer"):
        expect_end(life, target, seen)
        return
    # it may end only while it starts; otherwise the worker comes back under another pid
    until = time.monotonic() + LIMIT_S
    while life.pid(target) in (None, pid):
        if (code := life.wait(0.1)) is not None:
            said = life.end()
            if code == 0:  # its last step was taken before anybody missed the worker
                life.start(seen)
                life.wait(LIMIT_S)
            elif not young:
                seen.faults.append(f"{life.directory.name}: a killed {target} ended it:\n{said}")
            return
        if time.monotonic() > until:
            seen.faults.append(f"{life.directory.name}: {target} was not started again")
            life.end()
            return


def expect_end(life: Life, target: str, seen: Seen) -> None:
    """The run ends, says why in words, and leaves no process."""
    code = life.wait(LIMIT_S)
    said = life.end()
    if code is None:
        seen.faults.append(f"{life.directory.name}: still running after its {target} was killed")
    if target == "trainer" and code != 0 and ("miles: trainer" not in said or "Traceback" in said):
        seen.faults.append(f"{life.directory.name}: a killed trainer was told as:\n{said}")
    until = time.monotonic() + 10
    while left := [n for n, pid in life.workers.items() if Path(f"/proc/{pid}/exe").exists()]:
        if time.monotonic() > until:
            seen.faults.append(f"{life.directory.name}: {', '.join(left)} outlived the {target}")
            return
        time.sleep(0.1)


def finish(life: Life, seen: Seen) -> None:
    """Resume, undisturbed, until its last step."""
    for _ in range(2):
        if life.process is None:
            life.start(seen)
        code = life.wait(LIMIT_S)
        said = life.end()
        if code == 0:
            return
    raise RuntimeError(f"{life.directory.name} ended with {code} though nobody killed it:\n{said}")


def audit(life: Life, seen: Seen, wanted: str) -> None:
    """The ledger, what the plugin saw, and the weights."""
    name, path = life.directory.name, life.directory / "ledger.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    found, started = fates(path), [x["started"] for x in lines if "started" in x][-1]
    if twice := {g: fate for g, fate in found.items() if len(fate) > 1}:
        seen.faults.append(f"{name}: groups with several fates: {twice}")
    if lost := sorted(set(range(started)) - set(found)):
        seen.faults.append(f"{name}: groups lost: {lost}")
    watched: dict[int, list[int]] = dict(life.taken())  # the last time that each step was taken
    untold = set(range(1, life.steps + 1)) - set(watched)
    if not untold <= life.resumed or max(watched) > life.steps:
        seen.faults.append(f"{name}: steps not taken: {sorted(untold - life.resumed)}")
    if odd := [step for step, groups in watched.items() if len(groups) != GROUPS]:
        seen.faults.append(f"{name}: steps of another size: {odd}")
    trained = {g for g, fate in found.items() if fate == ["trained"]}
    told = [g for groups in watched.values() for g in groups]
    if not set(told) <= trained or len(told) + GROUPS * len(untold) != len(trained):
        seen.faults.append(f"{name}: the ledger and the plugin tell of other trained groups")
    if len(trained) != GROUPS * life.steps:
        seen.faults.append(f"{name}: {len(trained)} groups trained in {life.steps} steps")
    told_rows = (life.directory / "metrics.jsonl").read_text().splitlines()
    rows = [x["step"] for x in map(json.loads, told_rows) if x["moment"] == "step_finished"]
    if rows != list(range(1, life.steps + 1)):
        seen.faults.append(f"{name}: metrics.jsonl has the rows of steps {rows}")
    seen.groups.update(fate[0] for fate in found.values())
    seen.rolled_back += sum("rolled_back" in line for line in lines)
    seen.runs += 1
    if wanted:
        seen.same += life.digest() == wanted
        if life.digest() != wanted:
            seen.faults.append(f"{name}: its last weights are not those of an undisturbed run")


def main(argv: Sequence[str] | None = None) -> int:
    """Kill, audit, tell."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-lag", type=int, default=0)
    parser.add_argument("--steps", type=int, default=40, help="of every run")
    parser.add_argument("--every", type=int, default=3, help="steps between checkpoints")
    parser.add_argument("--each", action="store_true", help="the four in turn, not at random")
    parser.add_argument("--dir", type=Path, help="run in this empty folder and keep it")
    args = parser.parse_args(argv)
    seen, rng, began = Seen(), random.Random(args.seed), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="miles-kills-") as folder:
        where = (args.dir or Path(folder)).resolve()
        where.mkdir(parents=True, exist_ok=True)
        calm = Life(where, "undisturbed", args)
        calm.start(Seen())
        while not calm.taken() and calm.wait(0.05) is None:
            pass
        starts = time.monotonic() - began
        finish(calm, Seen())
        audit(calm, seen, "")
        wanted = "" if args.max_lag else calm.digest()
        life = Life(where, "run-0", args)
        try:
            while (done := seen.kills.total()) < args.kills and not seen.faults:
                target = TARGETS[done % 4] if args.each else rng.choice(TARGETS)
                kill(life, target, rng, starts, seen)
                what = target if seen.kills.total() > done else f"{life.directory.name} ended"
                print(f"{time.monotonic() - began:6.0f} s  {what}", file=sys.stderr, flush=True)
                if life.wait(0) == 0:
                    finish(life, seen)
                    audit(life, seen, wanted)
                    life = Life(where, f"run-{seen.runs}", args)
            if life.directory.exists() and not seen.faults:
                finish(life, seen)
                audit(life, seen, wanted)
        finally:
            life.end()
    tell(seen, args, time.monotonic() - began)
    return 1 if seen.faults else 0


def tell(seen: Seen, args: argparse.Namespace, seconds: float) -> None:
    """One line a figure."""
    kills = ", ".join(f"{target} {seen.kills[target]}" for target in TARGETS)
    print(f"max_lag {args.max_lag}, seed {args.seed}: {seconds:.0f} s")
    print(f"killed: {seen.kills.total()} ({kills}), {seen.startup} before a first step")
    print(f"runs: {seen.runs}, resumed {seen.resumes} times, {seen.again} begun again")
    fates_told = ", ".join(f"{fate} {n}" for fate, n in sorted(seen.groups.items()))
    print(f"groups: {seen.groups.total()} ({fates_told}); rolled back {seen.rolled_back} times")
    if not args.max_lag:
        print(f"last weights as undisturbed, bit for bit: {seen.same} of {seen.runs - 1}")
    for fault in seen.faults:
        print(f"FAULT {fault}")


if __name__ == "__main__":
    sys.exit(main())
