"""The `miles` command: words to calls, errors to exit codes.

Decides nothing about a run. The only module that reads environment variables, `MILES_PLUGINS` and
`MILES_BLOCK`, and the only one with a broad `except`.
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from miles.errors import ConfigError, MilesError, PluginError
from miles.plugins import Registry
from miles.protocols import KINDS
from miles.simulate import command as simulating
from miles.stacks import answer_with_stacks
from miles.threads import take_turns

if TYPE_CHECKING:
    from miles.config import Plan

__all__ = ["FAILED", "INTERRUPTED", "USAGE", "main"]

FAILED, USAGE, INTERRUPTED = 1, 2, 130

_EXAMPLES = """\
examples:
  miles run                                        learn two-digit addition, on two cores
  miles run experiment=grpo environment=mine       reinforcement learning on your environment
  miles run trainer.lr=1e-4 stages.grpo.steps=50   set any value, everywhere or in one stage
  miles run -m seed=1,2,3                          sweep: one run after the other
  miles run resume=runs/arithmetic-20260101        go on where a run stopped
  miles check engine.rows=8                        every problem at once, nothing started
  miles show                                       every value and where it came from
  miles sessions serve engine.url=http://127.0.0.1:30000 model.path=DIR port=8100
  miles plugins list --kind environment            what there is to choose from
  miles plugins show trainer fsdp                  one component and its keys

An override is KEY=VALUE in Hydra's grammar; KIND=NAME chooses a component.
exit codes: 0 good, 1 a run or check failed, 2 wrong usage or configuration, 130 interrupted
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; its exit code."""
    answer_with_stacks()
    take_turns()
    try:
        registry, (parser, subparsers) = Registry.load(**selection(os.environ)), _parser()
        try:
            registry.hook.commands(subparsers)
        except MilesError as error:
            _say(error)  # one plugin's commands are missing; all others still work
        args, rest = parser.parse_known_args(argv)
        if unknown := [x for x in rest if x[0] == "-" or "=" not in x or "overrides" not in args]:
            parser.error(f"unrecognized arguments: {' '.join(unknown)}")
        args.overrides = [*getattr(args, "overrides", ()), *rest]  # those behind options too
        if args.func is None:
            parser.print_help()
            return 0
        args.registry = registry
        args.plan = partial(_plan, args)
        return int(args.func(args) or 0)
    except SystemExit as error:  # argparse has said what is wrong
        return error.code if isinstance(error.code, int) else USAGE
    except MilesError as error:
        _say(error)
        wrong = isinstance(error, ConfigError | PluginError) and type(error) is not PluginError
        return USAGE if wrong else FAILED  # that one is a bug of a plugin's
    except KeyboardInterrupt:
        print("miles: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - stands in for the closed pipe until exit
        return 0
    except Exception:  # noqa: BLE001 - the one boundary: a bug, ours or a plugin's, as it is
        traceback.print_exc()
        return FAILED


def selection(environment: Mapping[str, str]) -> dict[str, Any]:
    """Arguments for `Registry.load` from comma-separated `MILES_PLUGINS` and `MILES_BLOCK`."""

    def names(variable: str) -> list[str]:
        return [n.strip() for n in environment.get(variable, "").split(",") if n.strip()]

    allowed = names("MILES_PLUGINS")
    return {"allow": allowed or None, "block": names("MILES_BLOCK")}


def _say(error: MilesError) -> None:
    first, *rest = error.detail.splitlines()
    print("\n  ".join([f"miles: {first}", *rest]), file=sys.stderr)


def _parser() -> tuple[argparse.ArgumentParser, Any]:
    from miles import __version__

    parser = argparse.ArgumentParser(
        prog="miles",
        description="Post-training of language models: a small verified loop, and plugins.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(func=None)
    parser.add_argument("--version", action="version", version=f"miles {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for name, function, words in (
        ("run", _run, "train, as the overrides say"),
        ("check", _check, "report every problem of a run, and start nothing"),
        ("show", _show, "print the resolved configuration with the origin of every value"),
    ):
        command = _add(commands, name, function, words)
        command.add_argument("overrides", nargs="*", metavar="OVERRIDE", help="KEY=VALUE")
        command.add_argument(
            "--config-dir",
            action="append",
            default=[],
            metavar="DIR",
            help="a folder with more YAML: KIND/NAME.yaml, experiment/NAME.yaml",
        )
        if name == "run":
            command.add_argument(
                "-m", "--multirun", action="store_true", help="one run for every combination"
            )
        if name == "show":
            command.add_argument("--stage", help="only this stage")
    sessions = _add(commands, "sessions", None, "conversations for agents outside of a run")
    words = sessions.add_subparsers(title="commands", metavar="COMMAND")
    serving = _add(words, "serve", _serve, "serve sessions over an engine that already runs")
    serving.add_argument(
        "overrides",
        nargs="*",
        metavar="OVERRIDE",
        help="engine.url=URL model.path=DIR port=N workers=N, and KEY=VALUE as in a run",
    )
    simulating.words(_add(commands, "simulate", simulating.simulate, "a schedule in virtual time"))
    scoring = _add(commands, "eval", _eval, "score a checkpoint with the evaluators of its run")
    where = "a checkpoint, a run directory (its newest), or a Hugging Face directory"
    scoring.add_argument("checkpoint", metavar="CHECKPOINT", help=where)
    scoring.add_argument("overrides", nargs="*", metavar="OVERRIDE", help="KEY=VALUE")
    scoring.add_argument("--config-dir", action="append", default=[], metavar="DIR")
    scoring.add_argument("--json", action="store_true", help="print the results for programs")
    scoring.add_argument("--scores", metavar="FILE", help="write them to a file as well")
    report = _add(commands, "report", _report, "write report.html of a run directory")
    report.add_argument("run", metavar="RUN_DIR")
    _plugin_words(_add(commands, "plugins", None, "what is installed, and your own"))
    return parser, commands


def _add(commands: Any, name: str, function: Callable[..., int] | None, words: str) -> Any:
    command = commands.add_parser(name, help=words, description=words[0].upper() + words[1:] + ".")
    command.set_defaults(func=function or (lambda args: command.print_help() or USAGE))
    return command


def _plugin_words(plugins: Any) -> None:
    words = plugins.add_subparsers(title="commands", metavar="COMMAND")
    listing = _add(words, "list", _list, "every component and hook module, without importing any")
    listing.add_argument("--kind", choices=[*KINDS, "hook"], metavar="KIND", help=", ".join(KINDS))
    listing.add_argument("--json", action="store_true", help="for programs")
    showing = _add(words, "show", _show_plugin, "one component: its keys, defaults and files")
    showing.add_argument("kind", choices=[*KINDS, "hook"], metavar="KIND", help="a kind, or hook")
    showing.add_argument("name", metavar="NAME", help="a name, or a local file: ./mine.py")
    checking = _add(words, "check", _check_plugins, "import plugins, and say what is wrong")
    checking.add_argument(
        "name", nargs="?", metavar="NAME", help="a distribution, a name, or a local file; or all"
    )
    checking.add_argument(
        "--contract", action="store_true", help="run the contract suite of each component's kind"
    )
    making = _add(words, "new", _new, "write a plugin that is ready to publish")
    making.add_argument("name", metavar="NAME", help="letters, digits and hyphens")
    making.add_argument("--into", default=".", metavar="DIR", help="where its folder is made")


# ---------------------------------------------------------------- calls


def _plan(args: argparse.Namespace) -> Plan:
    from miles.composing.compose import quoted
    from miles.config import compose

    overrides = [quoted(text) for text in args.overrides]
    folders = getattr(args, "config_dir", [])
    if any(text.startswith("resume=") for text in overrides):
        from miles.run import expand_resume

        overrides, folders = expand_resume(overrides, folders)
    return compose(overrides, registry=args.registry, folders=folders)


def _run(args: argparse.Namespace) -> int:
    if args.multirun:
        from miles.composing.sweep import sweep

        return sweep(args.overrides, registry=args.registry, folders=args.config_dir)
    from miles.check import check

    plan = _plan(args)
    report = check(plan)
    for warning in report.warnings:
        print(f"miles: warning: {warning}", file=sys.stderr)
    if report.faults:
        raise ConfigError("\n".join(report.faults))
    from miles.run import execute
    from miles.simulate.keys import refuse_run

    for stage in plan.stages:
        refuse_run(stage.name, stage.settings.simulate)
    return execute(plan, plan.registry)


def _check(args: argparse.Namespace) -> int:
    from miles.check import check

    plan = _plan(args)
    report = check(plan)
    for warning in report.warnings:
        print(f"warning: {warning}")
    faults = [*report.faults, *simulating.faults(plan)]
    for fault in faults:
        print("\n  ".join(fault.splitlines()))
    if faults:
        print(f"{len(faults)} fault{'s'[: len(faults) > 1]}")
        return FAILED
    print(f"good: {', '.join(f'{s.name} ({s.settings.steps} steps)' for s in plan.stages)}")
    return 0


def _show(args: argparse.Namespace) -> int:
    from miles.registry.catalog import resolved_lines

    plan = _plan(args)
    for stage in plan.stages:
        if args.stage in (None, stage.name):
            print(*resolved_lines(stage), sep="\n")
    if args.stage is not None and args.stage not in [s.name for s in plan.stages]:
        from miles.errors import choices

        names = [stage.name for stage in plan.stages]
        raise ConfigError(f"there is no stage {args.stage!r}; {choices(args.stage, names)}")
    plan.verify()
    return 0


def _report(args: argparse.Namespace) -> int:
    from miles.report import write

    print(write(args.run))
    return 0


def _eval(args: argparse.Namespace) -> int:
    from miles.evaluation.command import eval_command

    return eval_command(args)


def _serve(args: argparse.Namespace) -> int:
    from miles.session_servers.command import serve_command

    return serve_command(args.overrides, registry=args.registry)


def _list(args: argparse.Namespace) -> int:
    from miles.registry.catalog import print_list

    print_list(args.registry, kind=args.kind, as_json=args.json)
    return 0


def _show_plugin(args: argparse.Namespace) -> int:
    from miles.registry.catalog import print_component, print_hook

    (print_hook if args.kind == "hook" else print_component)(args.registry, args.kind, args.name)
    return 0


def _check_plugins(args: argparse.Namespace) -> int:
    from miles.registry.catalog import check_plugins

    return check_plugins(args.registry, args.name, contract=args.contract)


def _new(args: argparse.Namespace) -> int:
    from miles.registry.scaffold import write

    print(write(args.name, args.into, taken=args.registry.names("environment")))
    return 0


if __name__ == "__main__":
    sys.exit(main())
