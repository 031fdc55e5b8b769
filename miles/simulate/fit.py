"""`miles simulate --fit`: models of runs that were recorded, and how far off they are.

What a run's metrics say directly is taken from them; how fast engines are is searched, by
simulating the same settings until waits and steps take as long. Only what is said to be fitted
changes; the rest is as it was given.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from random import Random
from statistics import mean, median
from typing import Any

from miles.errors import ConfigError, RunError
from miles.simulate.distributions import Distribution, draw
from miles.simulate.keys import Keys
from miles.simulate.recorded import WARM, Recorded, load, together
from miles.simulate.result import Result, Step
from miles.simulate.sweep import Case

__all__ = ["Fitted", "direct", "fit", "fit_command", "minimize"]

_SEEDS = 3  # simulations of a setting whose steps are put together
_EVALUATIONS = 60  # of the search, after a grid


def direct(runs: Sequence[Recorded], keys: Keys) -> Keys:
    """The keys with what metrics say directly: lengths, turns, trainer, publish, bookkeeping."""
    samples = [
        (s["groups/trained"] * r.settings.samples_per_group, s) for r in runs for s in r.steps
    ]
    count = sum(n for n, _ in samples)
    turns = max(1.0, sum(n * s.get("session/turns", 1.0) for n, s in samples) / count)
    trained = sum(s["tokens/sampled"] for _, s in samples) / count
    around = sum(n * s["length/mean"] for n, s in samples) / count - trained
    # of all that came back: what is trained on is rather the short ones
    returned = mean(s[-1].get("length/returned", trained) for r in runs for s in r.runs)
    own = keys.environment
    many = turns >= 1.05
    prompt = own.prompt_tokens.mean if many else max(1.0, around)
    later = max(0.0, around - prompt) / (turns - 1) if many else 0.0
    environment = replace(
        own,
        turns=replace(own.turns, mean=turns),
        turn_tokens=of_mean(own.turn_tokens, max(1.0, returned / turns)),
        prompt_tokens=replace(own.prompt_tokens, mean=prompt),
        observation_tokens=replace(own.observation_tokens, mean=later),
    )
    alone, beside = _apart(runs, "time/publish_s")
    publish = replace(keys.publish, fixed_s=alone, busy_s=max(0.0, beside - alone), bytes=0.0)
    engine = keys.engine if many else replace(keys.engine, request_s=_latency(runs, keys))
    return replace(
        keys, environment=environment, publish=publish, engine=engine, trainer=_trainer(runs, keys)
    )


def _latency(runs: Sequence[Recorded], keys: Keys) -> float:
    """Seconds around a request for which it is not in the engine: in a synchronous step of single
    turns, engines that have nothing to do wait for the trainer, or for that."""
    left = [
        s["engine/idle_s"] - s["time/train_s"] - s["time/publish_s"] - s["time/overhead_s"]
        for r in runs
        if r.synchronous
        for s in r.steps
        if "engine/idle_s" in s
    ]
    return max(0.0, median(left)) if left else keys.engine.request_s


def of_mean(what: Distribution, wanted: float) -> Distribution:
    """The distribution whose draws, kept between `low` and `high`, have this mean."""

    def found(mean: float) -> float:
        rng, one = Random(0), draw(replace(what, mean=mean))
        return sum(one(rng) for _ in range(4000)) / 4000

    low, high = wanted / 4, wanted * 4
    for _ in range(20):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if found(middle) < wanted else (low, middle)
    return replace(what, mean=math.sqrt(low * high))


def _apart(runs: Sequence[Recorded], name: str) -> tuple[float, float]:
    """Medians of a metric where engines stand still for the trainer, and where they do not; the
    same twice where there are only runs of one kind."""
    kinds = [[r for r in runs if r.synchronous], [r for r in runs if not r.synchronous]]
    alone, beside = (median(r.get(name) for r in some or runs) for some in kinds)
    return alone, beside


def _trainer(runs: Sequence[Recorded], keys: Keys) -> Any:
    """Seconds of a step, and seconds of a token, by a line; how much engines hold it up, from the
    difference between synchronous and asynchronous runs; what a probe takes, from the difference
    between steps with and without."""
    points = [
        (s["length/mean"] * s["groups/trained"] * r.settings.samples_per_group, s["time/train_s"])
        for r in [r for r in runs if r.synchronous] or runs
        for s in r.steps
    ]
    fixed, each = line(points)
    alone, beside = _apart(runs, "time/train_s")
    overheads: tuple[list[float], list[float]] = ([], [])
    for run in runs:
        for step in run.steps:
            overheads[run.probed(step)].append(step["time/overhead_s"])
    plain, probed = (median(values) if values else 0.0 for values in overheads)
    return replace(
        keys.trainer,
        gpus=1,
        least_gpus=1,
        step_s=fixed,
        sample_s=0.0,
        tokens_per_gpu_s=1 / max(each, 1e-12),
        prepare_s=0.0,
        probe_s=max(0.0, probed - plain),
        finish_s=plain,
        engine_share=min(1.0, max(0.05, alone / beside)),
    )


def line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """(offset, slope), neither below 0, of the line by medians of Theil and Sen, which a few
    points far off do not move."""
    some = points[:: max(1, len(points) // 150)]
    slopes = [
        (q[1] - p[1]) / (q[0] - p[0]) for i, p in enumerate(some) for q in some[:i] if q[0] != p[0]
    ]
    x, y = median(p[0] for p in some), median(p[1] for p in some)
    slope = min(max(0.0, median(slopes)), y / x if x else 0.0) if slopes else 0.0
    return max(0.0, median(p[1] - slope * p[0] for p in some)), slope


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """Models of some runs."""

    keys: Keys
    """The models."""
    evaluations: int
    """Sets of values that were tried."""


Play = Callable[[Case], Result]


def fit(runs: Sequence[Recorded], keys: Keys, play: Play) -> Fitted:
    """Fit the models: what metrics say directly, then how long a forward takes, whatever is in it
    and for each request.

    Where trainer and engines share processors they are taken to hold each other up alike: what
    engines do to the trainer is measured, the other way round is not, and could not be told from
    how long a forward of many requests takes.
    """
    base = direct(runs, keys)
    guess = _forward(runs, base)

    def made(point: Sequence[float]) -> Keys:
        forward, each = math.exp(point[0]), math.exp(point[0]) * math.exp(point[1])
        engine = replace(
            base.engine, forward_s=forward, weights_s=0.0, context_s=0.0, sequence_s=each / 10,
            trainer_share=base.trainer.engine_share,
        )  # fmt: skip
        return replace(base, engine=engine)

    def cost(point: Sequence[float]) -> float:
        total = 0.0
        for run in runs:
            steps = simulated(run, made(point), play)
            if not steps:
                return 1e9
            whole = middle([s["time/step_s"] for s in run.steps])
            waited = middle([s["time/wait_s"] for s in run.steps])
            total += math.log(middle([s.seconds for s in steps]) / whole) ** 2
            total += ((middle([s.wait_s for s in steps]) - waited) / whole) ** 2
        return total

    # the cost has several valleys: the best of a coarse grid comes first
    axes = (0.4, 0.55, 0.75, 1.0, 1.4), (0.001, 0.1, 0.3)
    grid = [[math.log(guess * by), math.log(share)] for by, share in itertools.product(*axes)]
    costs = [cost(point) for point in grid]
    best, tried = minimize(cost, grid[costs.index(min(costs))], evaluations=_EVALUATIONS)
    return Fitted(keys=made(best), evaluations=tried + len(grid))


def middle(values: Sequence[float]) -> float:
    """Mean of the middle half: as little moved by a few as a median, and without its jumps."""
    ordered = sorted(values)
    cut = len(ordered) // 4
    return mean(ordered[cut : len(ordered) - cut])


def _forward(runs: Sequence[Recorded], keys: Keys) -> float:
    """A first guess: as if the requests of a step were decoded one after the other in a batch of
    all."""
    run = runs[0]
    rate = max(1.0, run.get("engine/tokens_per_s"))
    return min(run.settings.concurrency, 64) / rate / 2


def simulated(run: Recorded, keys: Keys, play: Play) -> list[Step]:
    """Steps of the same settings, and as many, under these models, from several seeds; none when
    they cannot be simulated."""
    steps: list[Step] = []
    for seed in range(_SEEDS):
        settings = replace(
            run.settings, steps=WARM + max(map(len, run.runs)), eval_every=0, starved_after_s=1e9,
            seed=seed,
        )  # fmt: skip
        try:
            steps += play(Case(settings=settings, keys=keys)).steps[WARM:]
        except RunError:
            return []
    return steps


def minimize(
    cost: Callable[[Sequence[float]], float], start: Sequence[float], *, evaluations: int
) -> tuple[list[float], int]:
    """The best point that Nelder and Mead's simplex finds, and how many it tried."""
    points = [(cost(start), list(start))]
    for axis in range(len(start)):
        moved = [v + (0.3 if i == axis else 0.0) for i, v in enumerate(start)]
        points.append((cost(moved), moved))
    tried = len(points)
    while tried < evaluations and _width(points) > 0.01:
        points.sort(key=lambda p: p[0])
        worst, middle = points[-1], _centre([p for _, p in points[:-1]])

        def along(by: float, middle: Any = middle, worst: Any = worst) -> tuple[float, list[float]]:
            at = [m + by * (w - m) for m, w in zip(middle, worst[1], strict=True)]
            return cost(at), at

        tried += 1
        reflected = along(-1.0)
        if reflected[0] < points[0][0]:
            tried += 1
            points[-1] = min(along(-2.0), reflected)
        elif reflected[0] < points[-2][0]:
            points[-1] = reflected
        else:
            tried += 1
            inside = along(0.5)
            if inside[0] < worst[0]:
                points[-1] = inside
            else:
                best = points[0][1]
                halves = [
                    [(a + b) / 2 for a, b in zip(best, p, strict=True)] for _, p in points[1:]
                ]
                points[1:] = [(cost(p), p) for p in halves]
                tried += len(halves)
    return min(points)[1], tried


def _width(points: Sequence[tuple[float, Sequence[float]]]) -> float:
    best = points[0][1]
    return max(abs(a - b) for _, p in points for a, b in zip(best, p, strict=True))


def _centre(points: Sequence[Sequence[float]]) -> list[float]:
    return [sum(values) / len(points) for values in zip(*points, strict=True)]


def fit_command(args: Any) -> int:
    """Fit, tell the error of every run that was fitted and of every run to predict, and write the
    keys. Raises `ConfigError`."""
    from miles.simulate.command import chosen, player
    from miles.simulate.keys import read as read_keys

    plan = args.plan().verify()
    stage = chosen(plan.stages, args.stage)
    play = player(replace_evaluator(stage), plan.registry)
    runs = together(load(path) for path in args.fit)
    others = together(load(path) for path in args.predict)
    found = fit(runs, read_keys(stage.settings.simulate), play)
    print(f"fitted to {len(runs)} settings in {found.evaluations} evaluations")
    for name, value in changed(found.keys):
        print(f"  {name:<44}{value:.6g}")
    print(f"{'':<34}{'measured':>12}{'simulated':>12}{'error':>9}   (median step)")
    worst = 0.0
    for run in (*runs, *others):
        steps = simulated(run, found.keys, play)
        if not steps:
            raise ConfigError(f"--fit: the settings of {run.name} cannot be simulated")
        step, measured = median(s.seconds for s in steps), run.get("time/step_s")
        error = step / measured - 1
        kind = "fitted" if run in runs else "predicted"
        worst = max(worst, abs(error)) if run in others else worst
        first, *more = run.name.split(" ")
        name = f"{first} and {len(more)} more" if more else first
        print(f"{name:<26}{kind:<10}{measured:>8.3f} s{step:>10.3f} s{error:>+9.1%}")
    if others:
        print(f"largest error of a prediction: {worst:.1%}")
    if args.write:
        _write(args.write, found.keys)
        print(f"written: {args.write}")
    return 0


def replace_evaluator(stage: Any) -> Any:
    """The stage without an evaluator: runs are compared by their ordinary steps."""
    from types import SimpleNamespace

    return SimpleNamespace(
        name=stage.name, settings=stage.settings, specs={**stage.specs, "evaluator": None}
    )


def changed(keys: Keys) -> list[tuple[str, float]]:
    """What was fitted, by dotted key."""
    engine, trainer, own = keys.engine, keys.trainer, keys.environment
    return [
        ("engine.forward_s", engine.forward_s),
        ("engine.sequence_s", engine.sequence_s),
        ("engine.trainer_share", engine.trainer_share),
        ("engine.request_s", engine.request_s),
        ("trainer.step_s", trainer.step_s),
        ("trainer.tokens_per_gpu_s", trainer.tokens_per_gpu_s),
        ("trainer.probe_s", trainer.probe_s),
        ("trainer.finish_s", trainer.finish_s),
        ("trainer.engine_share", trainer.engine_share),
        ("publish.fixed_s", keys.publish.fixed_s),
        ("publish.busy_s", keys.publish.busy_s),
        ("environment.turns.mean", own.turns.mean),
        ("environment.turn_tokens.mean", own.turn_tokens.mean),
        ("environment.prompt_tokens.mean", own.prompt_tokens.mean),
        ("environment.observation_tokens.mean", own.observation_tokens.mean),
    ]


def _write(path: Path, keys: Keys) -> None:
    import yaml

    text = yaml.safe_dump({"simulate": asdict(keys)}, sort_keys=False)
    try:
        path.write_text(f"# Written by `miles simulate --fit`.\n{text}", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--write: {path}: {error.strerror}") from error
