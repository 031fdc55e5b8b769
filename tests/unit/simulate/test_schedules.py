"""The real loop, buffer and router under random schedules, delays and failures: what must always
hold, and that any seed which breaks it says so and does it again.

`SEED=n pytest tests/unit/simulate/test_schedules.py -k one_seed` plays one schedule alone.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections import Counter
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import parts
import pytest

from miles.check import setting_faults
from miles.errors import WorkerError
from miles.records.ledger import Ledger, fates
from miles.settings import Settings
from miles.simulate import clock
from miles.simulate.around import Outside
from miles.simulate.distributions import Distribution
from miles.simulate.keys import Keys
from miles.simulate.simulation import Simulation

LIMIT_S = 3e6


def schedule(seed: int) -> tuple[Settings, Keys]:
    """Settings that `miles check` allows, and models of anything between calm and chaos."""
    rng = Random(seed)
    while True:
        lag = rng.choice((0, 0, 1, 1, 2, 3, 5))
        per_group = rng.choice((1, 2, 4))
        per_step = rng.randint(1, 5)
        pause = rng.choice(("in_place", "retract", "abort"))
        settings = parts.settings(
            seed=seed,
            steps=rng.randint(2, 8),
            groups_per_step=per_step,
            samples_per_group=per_group,
            max_lag=lag,
            concurrency=per_group * rng.randint(1, 12) + rng.randint(0, per_group - 1),
            oversample=rng.choice((0, 0, 1, 3)),
            granularity=rng.choice(("auto", "group", "sample")),
            capacity_factor=rng.choice((1.0, 1.5, 2.0, 4.0)),
            take_order=rng.choice(("fifo", "freshest", "started")),
            unused=rng.choice(("drop", "retry")),
            cancel_doomed=rng.random() < 0.5,
            publish_every=rng.randint(1, lag + 1),
            placement="split" if lag or rng.random() < 0.7 else "colocated",
            pause=pause,
            partial=bool(lag) and (pause == "abort" or rng.random() < 0.5),
            last_batch=rng.choice(("keep", "drop")),
            episode_timeout_s=rng.choice((600.0, 3600.0)),
            checkpoint_every=rng.choice((0, 1, 2)),
        )
        if not list(setting_faults(settings)):
            break
    wild = rng.random() < 0.6
    keys = parts.keys(
        engine={
            "gpus": rng.randint(1, 4),
            "max_requests": rng.choice((2, 8, 64)),
            "kv_tokens": rng.choice((20_000, 200_000)),
            "page_tokens": rng.choice((0, 16, 64)),
            "affinity": rng.random() < 0.8,
            "decode_during_prefill": rng.choice((0.0, 0.5, 1.0)),
        },
        trainer={
            "step_s": rng.choice((0.0, 1.0, 30.0, 300.0)),
            "prepare_s": rng.choice((0.0, 2.0)),
        },
        faults={
            "engine_every_s": rng.choice((0.0, 300.0, 2000.0)) if wild else 0.0,
            "engine_down_s": rng.choice((5.0, 60.0)),
            "attempt": rng.choice((0.0, 0.002, 0.02)) if wild else 0.0,
            "hang": rng.choice((0.0, 0.01)) if wild else 0.0,
            "slow_step": rng.choice((0.0, 0.2)) if wild else 0.0,
        },
        turns=Distribution(kind="geometric", mean=rng.choice((1.5, 4.0, 10.0)), low=1, high=60),
        turn_tokens=parts.lognormal(rng.choice((20, 200)), low=1, high=2000),
        delay_s=parts.lognormal(rng.choice((0.1, 5.0)), 1.5),
        tasks=rng.choice((3, 1000)),
    )
    return settings, replace(
        keys, publish=replace(keys.publish, fixed_s=rng.choice((0.0, 1.0, 20.0)))
    )


def watched(simulation: Simulation, seed: int) -> Simulation:
    """With every invariant checked after every step."""
    trained: Counter[int] = Counter()

    def check(stage: Simulation) -> None:
        buffer, settings = stage.buffer, stage.settings
        accounts = buffer.accounts
        said = f"seed {seed}, step {stage.shared.version}"
        assert accounts.balanced, f"{said}: {accounts}"
        assert all(0 <= lag <= settings.max_lag for lag in buffer.lags), f"{said}: {buffer.lags}"
        assert len(buffer.lags) == settings.groups_per_step, said
        running = buffer._running_total
        assert 0 <= running <= settings.concurrency, f"{said}: {running} in flight"
        assert accounts.buffered <= buffer.capacity + accounts.started, said
        trained.update(g for g, fate in _ended(stage) if fate == "trained")
        assert all(count == 1 for count in trained.values()), f"{said}: {trained}"

    simulation.watchers.append(check)
    return simulation


def _ended(stage: Simulation) -> list[tuple[int, str]]:
    ledger = stage.shared.ledger
    return ledger.lines[-1]["ended"] if hasattr(ledger, "lines") and ledger.lines else []


def play(seed: int) -> Simulation:
    """One schedule to its end, everything checked."""
    settings, keys = schedule(seed)
    made = watched(_built(settings, keys), seed)
    result = clock.run(made.main(), limit_s=LIMIT_S)
    assert len(result.steps) == settings.steps, f"seed {seed}: {len(result.steps)} steps"
    accounts = made.buffer.accounts
    assert accounts.balanced, f"seed {seed}: {accounts}"
    assert not accounts.in_flight + accounts.buffered + accounts.training, (
        f"seed {seed}: {accounts}"
    )
    ended = Counter(g for line in made.shared.ledger.lines for g, _ in line["ended"])
    ended.update(g for g, _ in made.buffer.ended)
    assert set(ended) == set(range(made.shared.next_group)), f"seed {seed}: groups without a fate"
    assert set(ended.values()) <= {1}, f"seed {seed}: a group with two fates"
    for side in ("trainer", "engine"):
        assert abs(sum(result.shares(side).values()) - 1) < 1e-6, f"seed {seed}: {side} time"
    return made


def _built(settings: Settings, keys: Keys, **more: Any) -> Simulation:
    named = {f: getattr(settings, f) for f in Settings.__dataclass_fields__}
    return parts.simulation(keys, **more, **named)


def test_schedule_a_group_that_is_doomed_before_it_began_comes_back() -> None:
    """It was cancelled before its task ran, and stayed in flight for ever."""
    play(1177)


@pytest.mark.parametrize("block", range(4))
def test_schedule_keeps_accounts_lag_and_places_whatever_happens(block: int) -> None:
    for seed in range(block * 25, block * 25 + 25):
        play(seed)


@pytest.mark.slow
def test_schedules_by_the_thousand() -> None:
    for seed in range(1000, 2000):
        play(seed)


def test_schedule_of_one_seed_is_reproduced() -> None:
    seed = int(os.environ.get("SEED", "17"))
    one, two = play(seed), play(seed)
    assert one.stepped == two.stepped
    assert one.shared.ledger.lines == two.shared.ledger.lines
    assert one.idle.seconds == two.idle.seconds
    assert one.timeline == two.timeline


# ---------------------------------------------------------------- places


def test_in_flight_stays_within_one_group_of_the_limit_with_lengths_spread_tenfold() -> None:
    """With places counted by sample; by group, long attempts leave most places empty."""
    lowest, mean = {}, {}
    for granularity in ("sample", "group"):
        keys = parts.keys(
            engine={"gpus": 8},
            trainer={"step_s": 0.1},
            turns=Distribution(mean=1, low=1),
            turn_tokens=Distribution(kind="uniform", mean=550, spread=450),  # 100 to 1,000
            delay_s=Distribution(),
        )
        made = parts.simulation(
            keys, steps=30, max_lag=50, groups_per_step=4, samples_per_group=8, concurrency=64,
            granularity=granularity, capacity_factor=50.0,
        )  # fmt: skip
        seen: list[int] = []

        async def look(stage: Simulation = made, seen: list[int] = seen) -> None:
            while True:
                await asyncio.sleep(0.05)
                if stage.stepped and len(stage.stepped) < 25:
                    counts = stage.router.counts()  # attempts of one turn are requests
                    seen.append(int(sum(n for k, n in counts.items() if k.startswith("active/"))))

        async def main(stage: Simulation = made, look: Any = look) -> None:
            task = asyncio.create_task(look())
            await stage.main()
            task.cancel()

        clock.run(main(), limit_s=LIMIT_S)
        lowest[granularity], mean[granularity] = min(seen), sum(seen) / len(seen)
    assert lowest["sample"] > 64 - 8
    assert mean["sample"] > 60 > 45 > mean["group"]


# ---------------------------------------------------------------- killed anywhere


def kill_anywhere(seed: int, path: Path) -> Counter[str]:
    """Kill driver and trainer of one schedule at random moments, and its engines and rollout
    workers again and again; resume it from its newest checkpoint until it ends. How often each was
    killed. Along the lineage of the weights that survive, every group has exactly one fate, and
    every step its groups."""
    settings, keys = schedule(seed)
    settings = replace(
        settings, checkpoint_every=1 + seed % 3, placement="split", max_restarts=10_000
    )
    rng = Random(f"kill {seed}")
    calm = _built(settings, keys)
    whole = clock.run(calm.main(), limit_s=LIMIT_S).seconds
    often = {"engine_every_s": whole * rng.choice((0.5, 2)), "rollout_every_s": whole / 2}
    keys = replace(keys, faults=replace(keys.faults, **often, rollout_down_s=rng.choice((1, 60))))
    kills: Counter[str] = Counter()
    saved = ""
    while True:
        first = None
        if not saved:  # nothing to resume: another run is begun
            path.write_bytes(b"")
        ledger = Ledger(path)
        outside = Outside(ledger=ledger)
        if saved:
            state = _state(saved)
            ledger.roll_back(state["ledger_offset"])
            outside = Outside(
                ledger=ledger, version=state["version"], next_group=state["next_group"]
            )
            first = state["stage_first"]
        made = _built(settings, keys, outside=outside, first=first)
        target = rng.choice(("driver", "trainer")) if kills["driver"] + kills["trainer"] < 4 else ""
        moment = rng.uniform(0, whole)

        async def main(
            made: Simulation = made,
            saved: str = saved,
            kill: float | None = moment if target == "trainer" else None,
        ) -> None:
            if saved:
                made.stand_again(saved)
            else:
                made.assemble()
            if kill is not None:
                trainer: Any = made.trainer
                asyncio.get_running_loop().call_later(kill, trainer.die, "killed")
            await made.main()
            made._write_ledger(made.shared.version)

        ended = ""
        try:
            clock.run(main(), limit_s=moment if target == "driver" else LIMIT_S)
        except* clock.OutOfTime:
            ended = "driver"
        except* WorkerError as group:
            ended = "trainer" if "trainer: killed" in str(group.exceptions) else str(group)
        kills.update(made.deaths)
        ledger.close()
        if not ended:
            break
        assert ended == target, f"seed {seed}: it should have gone on, or ended: {ended}"
        kills[ended] += 1
        saved = made.saved or saved
        _drop(made)
    found = fates(path)
    twice = {group: fate for group, fate in found.items() if len(fate) != 1}
    assert not twice, f"seed {seed}: groups with several fates: {twice}"
    missing = set(range(made.shared.next_group)) - set(found)
    assert not missing, f"seed {seed}: groups lost: {sorted(missing)}"
    trained = sum(fate == ["trained"] for fate in found.values())
    wanted = settings.steps * settings.groups_per_step
    assert trained == wanted, f"seed {seed}: {trained} groups trained, not {wanted}"
    return kills


def _state(saved: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(saved)
    return found


def _drop(made: Simulation) -> None:
    """A killed process writes nothing more."""
    made.shared.ledger = None


def _killed(seeds: range, folder: Path) -> Counter[str]:
    kills: Counter[str] = Counter()
    for seed in seeds:
        kills.update(kill_anywhere(seed, folder / f"{seed}.jsonl"))
    return kills


def test_killed_anywhere_nothing_is_lost_or_trained_twice(tmp_path: Path) -> None:
    kills = _killed(range(8), tmp_path)
    for target in ("driver", "trainer", "engine", "rollout"):
        assert kills[target] >= 8, kills


@pytest.mark.slow
def test_killed_anywhere_hundreds_of_times(tmp_path: Path) -> None:
    kills = _killed(range(100, 180), tmp_path)
    for target, least in {"driver": 100, "trainer": 100, "engine": 300, "rollout": 300}.items():
        assert kills[target] >= least, kills


def test_kill_anywhere_notices_a_group_that_is_lost(tmp_path: Path, monkeypatch: Any) -> None:
    """The check can fail: a resume that forgets its leases loses groups."""
    monkeypatch.setattr(Simulation, "stand", lambda self, state: None)

    def all_of_them() -> None:
        for seed in range(25):
            kill_anywhere(seed, tmp_path / f"{seed}.jsonl")

    with pytest.raises(AssertionError, match=r"seed \d+: groups lost"):
        all_of_them()


def test_colocated_trainer_outwaits_a_group_that_hangs() -> None:
    """Found by this seed: the drain gave up at the same moment as the group's own deadline."""
    play(1063)
