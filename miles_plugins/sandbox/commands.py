"""`miles sandboxes list` and `clean`: boxes that exist, and removing those that nobody holds.

Knows no sandbox: it asks whatever is registered, through `Inventory`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from miles import (
    BoxInfo,
    ConfigError,
    Context,
    Inventory,
    MilesError,
    SandboxError,
    Spec,
    process_alive,
)

__all__ = ["add", "clean", "list_"]

_LIMIT_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A box, and the sandbox that can remove it."""

    sandbox: str
    inventory: Inventory
    info: BoxInfo

    @property
    def alive(self) -> bool | None:
        """Whether the process that opened it runs; None when that cannot be known from here."""
        return process_alive(self.info.owner)


def add(subparsers: Any) -> None:
    """The words of both commands."""
    words = "boxes that exist, and removing those that were left behind"
    command = subparsers.add_parser("sandboxes", help=words, description=words.capitalize() + ".")
    actions = command.add_subparsers(title="actions", metavar="ACTION")
    shows = "every box that miles opened and that still exists"
    removes = "remove boxes whose process is gone, or those that you name"
    for name, function, text in (("list", list_, shows), ("clean", clean, removes)):
        action = actions.add_parser(name, help=text, description=text.capitalize() + ".")
        action.set_defaults(func=function)
        action.add_argument(
            "overrides",
            nargs="*",
            metavar="OVERRIDE",
            help="sandbox=NAME and its keys; without, every sandbox that can be asked",
        )
        action.add_argument("--run", default="", metavar="NAME", help="only of this run")
        if name == "list":
            action.add_argument("--json", action="store_true", help="for programs")
            continue
        action.add_argument("--id", action="append", default=[], help="this box, whoever holds it")
        action.add_argument(
            "--older-than", type=float, metavar="HOURS", help="also boxes of other machines, so old"
        )
        action.add_argument("--all", action="store_true", help="also boxes that are in use")
        action.add_argument("--dry-run", action="store_true", help="only say what would be removed")


def list_(args: Any) -> int:
    """One line a box."""
    found = asyncio.run(_found(args))
    if args.json:
        boxes = [{"sandbox": f.sandbox, "alive": f.alive, **asdict(f.info)} for f in found]
        print(json.dumps(boxes, indent=1))
        return 0
    rows = [("SANDBOX", "ID", "STATE", "AGE", "RUN", "TASK", "OPENED BY")]
    for each in found:
        info = each.info
        owner = info.owner or "unknown"
        owner += {True: "", False: " (gone)", None: " (elsewhere)"}[each.alive]
        row = each.sandbox, info.id, info.state, _age(info), info.run, info.task, owner
        rows.append(tuple(word or "-" for word in row))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows if found else []:
        print(
            "  ".join(word.ljust(width) for word, width in zip(row, widths, strict=True)).rstrip()
        )
    left = sum(each.alive is False for each in found)
    print(_boxes(len(found)) + (f", {left} left behind: miles sandboxes clean" if left else ""))
    return 0


def clean(args: Any) -> int:
    """Remove, and say what was kept and why; 1 when something could not be removed."""
    found = asyncio.run(_found(args))
    if missing := set(args.id) - {each.info.id for each in found}:
        known = ", ".join(sorted(each.info.id for each in found)) or "(none)"
        raise ConfigError(f"no box is called {', '.join(sorted(missing))}; there are: {known}")
    kept: dict[str, int] = {}
    chosen = []
    for each in found:
        why = _kept(each, args)
        if why:
            kept[why] = kept.get(why, 0) + 1
        else:
            chosen.append(each)
    failed = 0
    if args.dry_run:
        for each in chosen:
            print(f"would remove {each.sandbox} {each.info.id}")
    else:
        failed = asyncio.run(_remove(chosen))
    done = "would be removed" if args.dry_run else "removed"
    print(f"{_boxes(len(chosen) - failed)} {done}")
    for why, number in kept.items():
        print(f"{number} {why}")
    return 1 if failed else 0


def _kept(each: Found, args: Any) -> str:
    """Why a box stays; empty when it goes."""
    if args.id:
        return "" if each.info.id in args.id else "kept: not named"
    if args.all or each.alive is False:
        return ""
    if each.alive:
        return "kept: in use (--all removes them too)"
    hours = (time.time() - each.info.created) / 3600
    if args.older_than is not None and each.info.created and hours > args.older_than:
        return ""
    return "kept: opened by another machine (--older-than HOURS or --all removes them)"


async def _found(args: Any) -> list[Found]:
    found = []
    for name, inventory in _inventories(args):
        try:
            async with asyncio.timeout(_LIMIT_S):
                boxes = await inventory.list()
        except TimeoutError:
            raise SandboxError(f"sandbox {name!r} did not answer within {_LIMIT_S:g} s") from None
        except MilesError as error:
            if args.overrides:
                raise
            print(f"sandbox {name} was not asked: {error}", file=sys.stderr)
            continue
        found += [Found(sandbox=name, inventory=inventory, info=info) for info in boxes]
    return [f for f in found if not args.run or f.info.run == args.run]


def _inventories(args: Any) -> Iterator[tuple[str, Inventory]]:
    """Sandboxes that can list their boxes: the chosen one, else all that can be built as they
    are."""
    if args.overrides:
        plan = args.plan()
        plan.verify()
        specs = [spec for stage in plan.stages if (spec := stage.specs["sandbox"]) is not None]
        if not specs:
            raise ConfigError("no sandbox is chosen; choose one with sandbox=NAME")
        registry = plan.registry
    else:
        registry = args.registry
        specs = [Spec(kind="sandbox", name=name) for name in registry.names("sandbox")]
    for spec in {spec.name: spec for spec in specs}.values():
        try:
            with tempfile.TemporaryDirectory() as folder, _quiet():
                sandbox = registry.build(spec, Context(directory=Path(folder)))
        except MilesError as error:
            if args.overrides:
                raise
            print(f"sandbox {spec.name} was not asked: {error}", file=sys.stderr)
            continue
        if isinstance(sandbox, Inventory):
            yield spec.name, sandbox
        elif args.overrides:
            raise ConfigError(f"sandbox {spec.name!r} cannot list its boxes")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """No warnings about what a sandbox would do with commands: none will run."""
    log = logging.getLogger("miles.sandbox")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)


async def _remove(chosen: Sequence[Found]) -> int:
    failed = 0
    for each in chosen:
        try:
            async with asyncio.timeout(_LIMIT_S):
                await each.inventory.remove(each.info.id)
        except (SandboxError, TimeoutError) as error:
            failed += 1
            why = str(error) or f"no answer within {_LIMIT_S:g} s"
            print(f"{each.sandbox} {each.info.id} was not removed: {why}", file=sys.stderr)
        else:
            print(f"removed {each.sandbox} {each.info.id}")
    return failed


def _boxes(number: int) -> str:
    return f"{number} box{'es'[: 2 * (number != 1)]}"


def _age(info: BoxInfo) -> str:
    if not info.created:
        return ""
    seconds = max(0, round(time.time() - info.created))
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds // size} {unit}"
    return f"{seconds} s"
