"""Words of a command line with which benches start SGLang servers, on a GPU or without one.

Starts nothing itself: `arguments` adds the words, `keys` gives the engine's keys in a run.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

__all__ = ["arguments", "keys", "override", "tail"]

ON_CUDA = {
    "attention_backend": "triton",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "max_total_tokens": 262144,
}
"""Needs no FlashAttention, flashinfer kernels or grammar compiler."""
ON_CPU = {"max_total_tokens": 16384}
START_S = 240
"""Seconds until a server must be well."""


def arguments(parser: argparse.ArgumentParser) -> None:
    """Where SGLang is, and what servers are started with."""
    parser.add_argument(
        "--python",
        default=os.environ.get("MILES_TEST_SGLANG", ""),
        help="interpreter that finds SGLang, or a script that sets variables and becomes one; "
        "else MILES_TEST_SGLANG",
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--flag",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="one more flag of the server, such as enable_fp32_lm_head=true; VALUE null takes one "
        "away",
    )


def keys(args: argparse.Namespace) -> dict[str, Any]:
    """The engine's keys for these words. Raises `SystemExit` for words that cannot be read."""
    flags: dict[str, Any] = dict(ON_CUDA if args.device == "cuda" else ON_CPU)
    for text in args.flag:
        name, found, value = text.partition("=")
        if not found or not name:
            raise SystemExit(f"--flag {text}: NAME=VALUE is wanted")
        flags[name] = _plain(value)
    flags = {name: value for name, value in flags.items() if value is not None}
    made: dict[str, Any] = {
        "python": args.python,
        "device": args.device,
        "memory_fraction": 0.3 if args.device == "cuda" else 0.1,
        "flags": flags,
        "start_timeout_s": START_S,
    }
    if args.device == "cpu":
        made["environment"] = {"OMP_NUM_THREADS": "1"}
    return made


def _plain(text: str) -> Any:
    """What a word means as a flag's value."""
    known: dict[str, Any] = {"true": True, "false": False, "null": None}
    if text in known:
        return known[text]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def override(head: str, values: dict[str, Any]) -> list[str]:
    """These keys as overrides of a run, such as `engine.python=...`."""
    return [f"{head}.{name}={_written(value)}" for name, value in values.items()]


def _written(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k}: {_written(v)}" for k, v in value.items()) + "}"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return "'" + value.replace("'", "\\'") + "'"
    return str(value)


def tail(path: Any, lines: int = 12) -> str:
    """The last lines of a log, for people who have no more of it than what is printed."""
    try:
        text = path.read_text(errors="replace").splitlines()
    except OSError:
        return f"--- there is no {path.name}"
    return "\n".join([f"--- the last lines of {path.name}:", *text[-lines:]])
