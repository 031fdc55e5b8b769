"""`miles simulate`: words to simulations, results to text and pictures.

Models are `miles.simulate.keys`; nothing here decides how long anything takes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miles.errors import ConfigError, choices

if TYPE_CHECKING:
    from miles.simulate.result import Result
    from miles.simulate.sweep import Case, Outcome

__all__ = ["chosen", "faults", "player", "simulate", "words"]

_EPILOG = """\
examples:
  miles simulate experiment=case_glm5_2_744b                      one schedule, in virtual time
  miles simulate experiment=case_glm5_2_744b max_lag=0 --timeline sync.svg
  miles simulate experiment=case_glm5_2_744b --hours 24           a day of it
  miles simulate experiment=case_glm5_2_744b --sweep              split, concurrency, lag, places
  miles simulate experiment=case_glm5_2_744b --sweep split=16,32,48 max_lag=1,2
  miles simulate experiment=case_glm5_2_744b --sensitivity 2      which assumption matters
  miles simulate --fit runs/one runs/two --write fitted.yaml      models of runs that were recorded
  miles simulate --keys                                           every key of `simulate`
"""


def words(parser: Any) -> None:
    """The command's options."""
    import argparse

    parser.epilog, parser.formatter_class = _EPILOG, argparse.RawDescriptionHelpFormatter
    parser.add_argument("overrides", nargs="*", metavar="OVERRIDE", help="KEY=VALUE, as in a run")
    parser.add_argument("--config-dir", action="append", default=[], metavar="DIR")
    parser.add_argument("--stage", help="which stage, of several; the last unless given")
    parser.add_argument("--hours", type=float, help="go on for so long instead of for `steps`")
    parser.add_argument("--timeline", type=Path, metavar="FILE", help="draw an SVG of some steps")
    parser.add_argument("--timeline-steps", type=int, default=12, metavar="N", help="how many")
    parser.add_argument(
        "--sweep", nargs="*", metavar="AXIS=A,B", help="try values of split, concurrency, max_lag, "
        "granularity, one axis after the other; all four with values of their own unless given",
    )  # fmt: skip
    parser.add_argument(
        "--sensitivity", nargs="?", type=float, const=2.0, metavar="FACTOR",
        help="divide and multiply every number of the models by it, one after the other",
    )  # fmt: skip
    parser.add_argument(
        "--fit", nargs="+", metavar="RUN_DIR", help="fit the models to recorded runs"
    )
    parser.add_argument(
        "--predict", nargs="+", metavar="RUN_DIR", help="hold the fit against these"
    )
    parser.add_argument("--write", type=Path, metavar="FILE", help="what was fitted, as YAML")
    parser.add_argument("--keys", action="store_true", help="print every key of `simulate`")


def simulate(args: Any) -> int:
    """Run the command; 0, or 1 when every simulation of a sweep failed. Raises `MilesError`."""
    if args.keys:
        print(*_key_lines(), sep="\n")
        return 0
    if args.fit:
        from miles.simulate.fit import fit_command

        args.fit, args.predict = _runs(args, args.fit), _runs(args, args.predict or [])
        return fit_command(args)
    args.overrides, axes = _axes(args)
    plan = args.plan().verify()
    from miles.simulate.keys import read
    from miles.simulate.sweep import Case

    stage = chosen(plan.stages, args.stage)
    base = Case(settings=stage.settings, keys=read(stage.settings.simulate))
    if not stage.settings.simulate:
        print("miles: note: no `simulate` keys are given, so every model is at its defaults; "
              "`miles simulate --keys` shows them")  # fmt: skip
    play = player(stage, plan.registry, hours=args.hours, timeline_steps=args.timeline_steps)
    if axes is not None:
        return _sweep(base, axes, play)
    if args.sensitivity is not None:
        return _sensitivity(base, args.sensitivity, play)
    return _one(base, play, args.timeline)


def faults(plan: Any) -> list[str]:
    """What is wrong with the `simulate` keys of a plan, as sentences."""
    from miles.simulate.keys import read

    found: list[str] = []
    for stage in plan.stages:
        try:
            read(stage.settings.simulate)
        except ConfigError as error:
            found += error.detail.splitlines()
    return list(dict.fromkeys(found))


def player(
    stage: Any, registry: Any, *, hours: float | None = None, timeline_steps: int = 12
) -> Callable[[Case], Result]:
    """A function that simulates a case with the selector and evaluator of a stage."""
    from dataclasses import replace
    from types import SimpleNamespace

    from miles.simulate.clock import run
    from miles.simulate.simulation import build

    def play(case: Case) -> Result:
        settings = case.settings
        if hours is not None:
            settings = replace(settings, steps=1_000_000_000)
        changed: Any = SimpleNamespace(name=stage.name, specs=stage.specs, settings=settings)
        made = build(changed, registry, case.keys, timeline_steps=timeline_steps)
        stop = None if hours is None else hours * 3600
        return run(made.main(stop_after_s=stop), limit_s=_LONGEST_S)

    return play


_LONGEST_S = 10 * 365 * 86_400.0  # virtual: more is a simulation that gets nowhere


def _runs(args: Any, words: Sequence[str]) -> list[Path]:
    """Run directories among the words after `--fit`; overrides among them join the others."""
    overrides = [w for w in words if "=" in w and not Path(w).expanduser().is_dir()]
    args.overrides = [*args.overrides, *overrides]
    return [Path(w).expanduser() for w in words if w not in overrides]


def _axes(args: Any) -> tuple[list[str], dict[str, list[str]] | None]:
    """Overrides and axes: after `--sweep` come axes, and whatever is none is an override."""
    if args.sweep is None:
        return args.overrides, None
    from miles.simulate.sweep import AXES

    axes: dict[str, list[str]] = {}
    overrides = list(args.overrides)
    for word in args.sweep:
        name, _, values = word.partition("=")
        if name in AXES and values:
            axes[name] = values.split(",")
        elif "=" in word:
            overrides.append(word)
        else:
            raise ConfigError(f"--sweep: {word!r} is not AXIS=VALUE,...; {choices(word, AXES)}")
    return overrides, axes


def chosen(stages: Sequence[Any], name: str | None) -> Any:
    """The stage of that name, or the last. Raises `ConfigError`."""
    if name is None:
        return stages[-1]
    found = next((stage for stage in stages if stage.name == name), None)
    if found is None:
        names = [stage.name for stage in stages]
        raise ConfigError(f"--stage: there is no stage {name!r}; {choices(name, names)}")
    return found


def _one(base: Case, play: Callable[[Case], Result], timeline: Path | None) -> int:
    from miles.simulate.result import lines

    began = time.process_time()
    result = play(base)
    seconds = time.process_time() - began
    print(*lines(result), sep="\n")
    print(f"simulated        {result.turns:,} turns in {seconds:.1f} CPU seconds")
    if timeline is not None:
        from miles.simulate.picture import write

        try:
            write(result, timeline)
        except OSError as error:
            raise ConfigError(f"--timeline: {timeline}: {error.strerror}") from error
        print(f"timeline         {timeline}")
    return 0


_HEAD = ("", "mean", "median", "p90", "trainer", "engines", "staleness", "cache", "trained/s")


def _row(outcome: Outcome) -> Sequence[str]:
    result = outcome.result
    if result is None:
        return (outcome.words, f"failed: {outcome.failure.splitlines()[0]}")
    lags = [lag for step in result.steady for lag in step.lags]
    return (
        outcome.words,
        f"{result.mean_s:.1f} s",
        f"{result.median_s:.1f} s",
        f"{result.p90_s:.1f} s",
        f"{result.shares('trainer').get('busy', 0):.0%} busy",
        f"{result.shares('engine').get('busy', 0):.0%} busy",
        f"{sum(lags) / max(1, len(lags)):.2f}",
        f"{result.hit_rate:.1%}",
        f"{result.trained_per_s:,.0f}",
    )


def _sweep(base: Case, axes: Mapping[str, Sequence[str]], play: Callable[[Case], Result]) -> int:
    from miles.simulate.sweep import AXES, axis_values, best, sweep, why

    wanted = axes or {name: axis_values(name, base) for name in AXES}
    outcomes = []
    print(_format(_HEAD))
    for outcome in sweep(base, wanted, play):
        outcomes.append(outcome)
        print(_format(_row(outcome)), flush=True)
    winner = best(outcomes)
    if winner is None:
        print("every simulation failed")
        return 1
    print(f"best             {winner.words}: {why(winner, outcomes[0])}")
    return 0


def _format(cells: Sequence[str]) -> str:
    if len(cells) == 2:
        return f"{cells[0]:<36} {cells[1]}"
    return f"{cells[0]:<36}" + "".join(f"{cell:>12}" for cell in cells[1:])


def _sensitivity(base: Case, factor: float, play: Callable[[Case], Result]) -> int:
    from miles.simulate.sweep import sensitivity

    if not factor > 1:
        raise ConfigError(f"--sensitivity: {factor:g} is not above 1")
    before = play(base).mean_s
    print(
        f"mean step {before:.1f} s; with one number at a time divided and multiplied by {factor:g}:"
    )
    sizes = []
    for name, value, found in sensitivity(base, factor, play):
        steps = {k: r.mean_s / before - 1 for k, r in found.items() if not isinstance(r, str)}
        said = {k: f"{steps[k]:+.1%}" if k in steps else str(r) for k, r in found.items()}
        sizes.append((max(map(abs, steps.values()), default=0.0), name))
        print(f"{name:<44}{value:>14g}   / {said['/']:>8}   * {said['*']:>8}", flush=True)
    most = ", ".join(f"{name} ({size:.0%})" for size, name in sorted(sizes, reverse=True)[:6])
    print(f"what matters most: {most}")
    return 0


def _key_lines() -> list[str]:
    from miles.registry import schema
    from miles.simulate.keys import Keys

    found: list[str] = []

    def add(config: type, path: str) -> None:
        for field in schema.fields(config):
            name = f"{path}.{field.name}"
            if schema.frozen_dataclass(field.type):
                found.append(f"{name}: {field.doc}")
                add(field.type, name)
            else:
                found.append(f"{name} ({field.type_text}, {field.default!r}): {field.doc}")

    add(Keys, "simulate")
    return found
