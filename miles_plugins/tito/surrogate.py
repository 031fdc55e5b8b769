"""Tokenizers that stand in where a family's own is not at hand: another one, or bytes, with the
family's special tokens added.

What is found with one is true of the markup, not of the real token boundaries; results say so by
the file `surrogate.json` beside the tokenizer.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from miles import Context
from miles_plugins.tito.bytes import Bytes

__all__ = ["MARK", "byte_surrogate", "surrogate"]

MARK = "surrogate.json"
"""Names what stands in for what; its presence marks every result."""


def byte_surrogate(directory: Path, tokens: Sequence[str], template: str = "") -> None:
    """A tokenizer of bytes with these special tokens, and a chat template if one is given."""
    Bytes(Bytes.Config(), Context(directory=directory)).save(directory)
    _extend(directory, directory, tokens, template, "bytes")
    (directory / "generation_config.json").unlink()


def surrogate(source: Path, directory: Path, tokens: Sequence[str], template: str = "") -> None:
    """The tokenizer of `source` with these special tokens added where it lacks them."""
    _extend(source, directory, tokens, template, source.name)


def _extend(
    source: Path, directory: Path, tokens: Sequence[str], template: str, stands_in: str
) -> None:
    from tokenizers import AddedToken, Tokenizer

    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
    missing = [token for token in tokens if tokenizer.token_to_id(token) is None]
    # markup that families write as text (`<think>`, `<tool_call>`) must be recognised in it
    inside = [token for token in missing if _inside(token)]
    marks = [token for token in missing if not _inside(token)]
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in marks])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in inside])
    (directory / "tokenizer.json").write_text(tokenizer.to_str(pretty=True))
    config = json.loads((source / "tokenizer_config.json").read_text(encoding="utf-8"))
    config.pop("chat_template", None)
    config.pop("eos_token", None)
    if template:
        config["chat_template"] = template
    (directory / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    said = {"tokenizer": stands_in, "added": missing}
    (directory / MARK).write_text(json.dumps(said, ensure_ascii=False), encoding="utf-8")


def _inside(token: str) -> bool:
    """Whether a token is markup inside a turn, not what separates turns."""
    return token.startswith("<") and token.endswith(">") and "|" not in token and "｜" not in token
