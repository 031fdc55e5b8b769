"""Python functions as tools of a model: their schemas, and one call of one of them.

It neither decides when a call is made nor what an attempt is worth, and knows no markup.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import types
import typing
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Union

from miles import Box, ConfigError, Message, MilesError, Tool, choices, in_thread

__all__ = [
    "GRACE_S", "Called", "Function", "ToolError", "built_in", "call", "clip", "describe", "select",
    "shell_text", "told",
]  # fmt: skip

_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array"}
_BOX = "box"

GRACE_S = 10.0
"""Seconds beyond its time limit that a call in a box may take to say that it ran into it."""


class ToolError(Exception):
    """What a tool tells the model when a call went wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Function:
    """One tool."""

    name: str
    """What the model calls it."""
    run: Callable[..., Any]
    """Plain or async; called with the arguments by name, and `box` when it takes one."""
    schema: Tool
    """What the model is told."""
    needs_box: bool
    """It runs in the sandbox."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Called:
    """What came of one call."""

    text: str
    """For the model."""
    failed: bool
    """The text tells of an error."""


# ---------------------------------------------------------------- from signatures to schemas


def describe(name: str, function: Callable[..., Any], where: str) -> Function:
    """A function as a tool: parameters from annotations, what it does from the docstring's first
    paragraph. A parameter called `box` is the attempt's sandbox and not told to the model. Raises
    `ConfigError` for what no schema can say."""
    what = f"{where}: tool {name!r}"
    try:
        hints = typing.get_type_hints(function)
    except NameError as error:
        raise ConfigError(f"{what}: an annotation cannot be resolved: {error}") from error
    properties, required = {}, []
    parameters = inspect.signature(function).parameters
    for key, parameter in parameters.items():
        if key == _BOX:
            continue
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ConfigError(f"{what}: parameter {key!r} cannot be given by name")
        if key not in hints:
            raise ConfigError(f"{what}: parameter {key!r} has no annotation")
        properties[key] = _schema(hints[key], f"{what}: parameter {key!r}")
        if parameter.default is parameter.empty:
            required.append(key)
    said = " ".join((inspect.getdoc(function) or "").partition("\n\n")[0].split())
    if not said:
        raise ConfigError(f"{what}: it has no docstring, from which the model learns what it does")
    schema = {"type": "object", "properties": properties, "required": required}
    told = {"name": name, "description": said, "parameters": schema}
    return Function(
        name=name,
        run=function,
        schema={"type": "function", "function": told},
        needs_box=_BOX in parameters,
    )


def _schema(hint: Any, what: str) -> dict[str, Any]:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint in _TYPES:
        return {"type": _TYPES[hint]}
    if origin is Literal and all(isinstance(a, str) for a in args):
        return {"type": "string", "enum": list(args)}
    if origin in (list, tuple, Sequence, typing.get_origin(Sequence[int])) and args:
        return {"type": "array", "items": _schema(args[0], what)}
    if hint is dict or origin in (dict, typing.get_origin(Mapping[str, int])):
        return {"type": "object"}
    if origin in (Union, types.UnionType):
        some = [a for a in args if a is not type(None)]
        if len(some) == 1:
            return _schema(some[0], what)
    raise ConfigError(
        f"{what} is {hint!r}; str, int, float, bool, a list, a dict, a Literal of strings, or one "
        "of these or None is wanted"
    )


def select(names: Sequence[str], offered: Mapping[str, Any], where: str) -> dict[str, Function]:
    """The chosen tools by name. Raises `ConfigError` for one that nobody offers."""
    known = {**built_in(), **offered}
    taken = sorted(set(built_in()) & set(offered))
    if taken:
        raise ConfigError(f"{where}: a plugin claims the built-in tool {taken[0]!r}; rename it")
    for name in names:
        if name not in known:
            raise ConfigError(f"{where}: no tool {name!r}; {choices(name, known)}")
    return {name: describe(name, known[name], where) for name in dict.fromkeys(names)}


# ---------------------------------------------------------------- one call


async def call(
    asked: Mapping[str, Any],
    functions: Mapping[str, Function],
    *,
    box: Callable[[], Awaitable[Box]],
    timeout_s: float,
    max_output: int,
) -> Called:
    """Do what one entry of `tool_calls` asks. Whatever is wrong with it, or goes wrong in the
    function, is told to the model; errors of miles (a sandbox that broke) are raised."""
    try:
        function, arguments = _understand(asked, functions)
        if function.needs_box:
            arguments = {**arguments, _BOX: await box()}
        # what runs in the box has its own limit there, which leaves the box usable
        limit_s = timeout_s + (GRACE_S if function.needs_box else 0.0)
        if inspect.iscoroutinefunction(function.run):
            async with asyncio.timeout(limit_s):
                result = await function.run(**arguments)
        else:
            run = partial(function.run, **arguments)
            result = await in_thread(run, name=f"tool {function.name}", timeout_s=limit_s)
        text = result if isinstance(result, str) else json.dumps(result, default=str)
    except TimeoutError:
        return Called(text=f"error: it took longer than {timeout_s:g} s", failed=True)
    except ToolError as error:
        return Called(text=clip(f"error: {error}", max_output), failed=True)
    except MilesError:
        raise
    except Exception as error:  # noqa: BLE001 - a tool's failure is the model's to deal with
        text = f"error: {type(error).__name__}: {error}"
        return Called(text=clip(text, max_output), failed=True)
    return Called(text=clip(text, max_output), failed=False)


def _understand(
    asked: Mapping[str, Any], functions: Mapping[str, Function]
) -> tuple[Function, dict[str, Any]]:
    wanted = asked.get("function") or {}
    name, arguments = wanted.get("name"), wanted.get("arguments")
    function = functions.get(str(name))
    if function is None:
        raise ToolError(f"there is no tool {name!r}; {choices(str(name), functions)}")
    if not isinstance(arguments, Mapping):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, TypeError, RecursionError) as error:
            raise ToolError(f"the arguments are not JSON: {error}") from error
    if not isinstance(arguments, Mapping):
        raise ToolError("the arguments are not a JSON object")
    schema = function.schema["function"]["parameters"]
    for key in schema["required"]:
        if key not in arguments:
            raise ToolError(f"{name}: the argument {key!r} is missing")
    for key, value in arguments.items():
        if key not in schema["properties"]:
            raise ToolError(f"{name}: {key!r} is no argument of it")
        _expect(value, schema["properties"][key], f"{name}: {key!r}", key in schema["required"])
    return function, dict(arguments)


_IS = {
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "array": list,
    "object": Mapping,
}


def _expect(value: Any, schema: Mapping[str, Any], what: str, required: object) -> None:
    if value is None and not required:
        return
    kind = schema["type"]
    wrong = not isinstance(value, _IS[kind])
    if wrong or (isinstance(value, bool) and kind in ("integer", "number")):
        raise ToolError(f"{what} is not of type {kind}")
    if "enum" in schema and value not in schema["enum"]:
        raise ToolError(f"{what} is not one of {', '.join(schema['enum'])}")


def told(asked: Mapping[str, Any], done: Called) -> Message:
    """The message that answers one entry of `tool_calls`."""
    message = {"role": "tool", "content": done.text}
    if asked.get("id") is not None:
        message["tool_call_id"] = asked["id"]
    if name := (asked.get("function") or {}).get("name"):
        message["name"] = name
    return message


def clip(text: str, limit: int) -> str:
    """At most `limit` characters from both ends of a text, with a word on what was left out."""
    if len(text) <= limit:
        return text
    head = limit // 2
    tail = limit - head
    return f"{text[:head]}\n[{len(text) - limit} characters left out]\n{text[len(text) - tail :]}"


# ---------------------------------------------------------------- what comes with miles

# Prints what the last line is worth, as an interactive interpreter does; imports nothing that the
# code does not.
_EVALUATE = """
import sys
source = sys.stdin.read()
scope = {"__name__": "__main__"}
try:
    tree = compile(source, "<code>", "exec", 1024)
    last = tree.body.pop() if tree.body and type(tree.body[-1]).__name__ == "Expr" else None
    exec(compile(tree, "<code>", "exec"), scope)
    if last is not None:
        sys.displayhook(eval(compile(type(EXPRESSION)(last.value), "<code>", "eval"), scope))
except Exception as error:
    lines, at = [], error.__traceback__
    while at is not None:
        if at.tb_frame.f_code.co_filename == "<code>":
            lines.append(at.tb_lineno)
        at = at.tb_next
    lines += [error.lineno] if isinstance(error, SyntaxError) else []
    where = f" (line {lines[-1]})" if lines else ""
    said = error.msg if isinstance(error, SyntaxError) else error
    print(f"{type(error).__name__}: {said}{where}", file=sys.stderr)
    sys.exit(1)
""".replace("type(EXPRESSION)", "type(compile('1', '', 'eval', 1024))")


def built_in(
    interpreter: Sequence[str] = ("python3",), timeout_s: float = 10.0
) -> dict[str, Callable[..., Any]]:
    """The tools that come with miles; `timeout_s` is what a command in the box may take."""

    async def python(code: str, *, box: Box) -> str:
        """Run Python, as at its prompt."""
        done = await box.exec([*interpreter, "-c", _EVALUATE], stdin=code, timeout=timeout_s)
        if done.timed_out:
            raise ToolError(f"it took longer than {timeout_s:g} s")
        if done.exit_code:
            what = done.stderr.strip() or f"exit code {done.exit_code}"
            raise ToolError(f"{done.stdout}\n{what}" if done.stdout else what)
        return (done.stdout + done.stderr).strip("\n")

    async def shell(command: str, *, box: Box) -> str:
        """Run a shell command. Both streams and a non-zero exit code come back; files stay."""
        return await shell_text(box, command, timeout_s)

    return {"python": python, "shell": shell}


async def shell_text(
    box: Box,
    command: str,
    timeout_s: float,
    *,
    cwd: str | None = None,
    env: Mapping[str, str] | None = None,
) -> str:
    """What a command in the box says, one stream after the other. Raises `ToolError` for a
    non-zero exit code and for the time limit, with what it said until then."""
    done = await box.exec(command, timeout=timeout_s, cwd=cwd, env=env)
    text = done.stdout + done.stderr
    if done.timed_out:
        raise ToolError(f"{text}\nit took longer than {timeout_s:g} s".strip("\n"))
    if done.exit_code:
        raise ToolError(f"exit code {done.exit_code}\n{text}".strip("\n"))
    return text.strip("\n")
