"""A checkpoint's tokenizer files: ids, the chat template, and the ids that end a turn.

It renders nothing. Reading them imports `transformers` but never torch.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from miles import ConfigError, Context

__all__ = ["FILES", "Vocabulary", "copy", "directory_of"]

FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
)
"""What `transformers` may find of a tokenizer in a directory."""

_NAMED = ("bos_token", "eos_token", "pad_token", "unk_token")


class Vocabulary:
    """Text to ids and back, as the library `renderers` and our handlers ask for it.

    With `plain` set, tokens that the tokenizer marks as special are never made from a text, however
    it spells them.
    """

    def __init__(self, directory: Path, who: str) -> None:
        loaded = _load(directory, who)
        self.directory = directory
        self.tokenizer = loaded.backend_tokenizer
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        self.name_or_path = str(directory)
        self.eos_token_id: int | None = loaded.eos_token_id
        self.unk_token_id: int | None = loaded.unk_token_id
        self.named = {name: getattr(loaded, name) for name in _NAMED if getattr(loaded, name)}
        self.template = _own_template(loaded)
        self.size = max(self.tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        self.declared_stops = _declared_stops(directory, who)
        if self.eos_token_id is not None:
            self.declared_stops.add(self.eos_token_id)
        self.pieces: dict[str, list[int]] = {}

    @property
    def plain(self) -> bool:
        """Special tokens spelled out in a text stay text."""
        return bool(self.tokenizer.encode_special_tokens)

    @plain.setter
    def plain(self, value: bool) -> None:
        self.tokenizer.encode_special_tokens = value

    def encode(self, text: str, *_: Any, **__: Any) -> list[int]:
        """Ids of a text; pieces of it that `pieces` names become the ids given there, and lone
        surrogates `?`."""
        for mark, ids in self.pieces.items():
            if mark in text:
                before, _, after = text.partition(mark)
                return [*self.encode(before), *ids, *self.encode(after)]
        try:
            return list(self.tokenizer.encode(text, add_special_tokens=False).ids)
        except TypeError:
            plain = text.encode("utf-8", "replace").decode()
            return list(self.tokenizer.encode(plain, add_special_tokens=False).ids)

    def decode(self, ids: Any, *_: Any, **__: Any) -> str:
        """Text of ids, special tokens by name."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=False))

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        """Id of a token, or ids of several; the unknown token's where there is none."""
        if isinstance(tokens, str):
            found = self.tokenizer.token_to_id(tokens)
            return self.unk_token_id if found is None else int(found)
        return [self.convert_tokens_to_ids(token) for token in tokens]


def directory_of(path: str, context: Context, who: str) -> Path:
    """Where the tokenizer is: `path`, or the model's directory. Raises `ConfigError`."""
    found = (
        Path(path).expanduser()
        if path
        else context.model.directory()
        if context.model is not None
        else None
    )
    if found is None:
        raise ConfigError(
            f"tito {who}: no tokenizer: the model is random and has no directory; "
            "set tito.path=DIRECTORY, or use tito=bytes with a byte-level model"
        )
    if not found.is_dir():
        raise ConfigError(f"tito.path: {found} is not a directory")
    return found


def copy(source: Path, directory: Path) -> None:
    """Copy a tokenizer's files."""
    directory.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, directory / name)


def _load(directory: Path, who: str) -> Any:
    """The tokenizer with its configuration, as `transformers` reads it."""
    from transformers import PreTrainedTokenizerFast

    if (directory / "tokenizer.json").is_file():
        # not AutoTokenizer, which imports torch: seconds and memory that the driver does without
        return PreTrainedTokenizerFast.from_pretrained(str(directory), local_files_only=True)
    files = [name for name in FILES if (directory / name).is_file()]
    error = ConfigError(
        f"tito {who}: no tokenizer.json in {directory} (tokenizer files there: "
        f"{', '.join(files) or 'none'})"
    )
    error.add_note(
        "make one with transformers: "
        "AutoTokenizer.from_pretrained(SOURCE).save_pretrained(DIRECTORY)"
    )
    raise error


def _own_template(loaded: Any) -> str:
    found = loaded.chat_template
    if isinstance(found, Mapping):  # several by name
        found = found.get("default")
    return str(found or "")


def _declared_stops(directory: Path, who: str) -> set[int]:
    """End-of-turn ids that the checkpoint's own files name."""
    found: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        path = directory / name
        if not path.is_file():
            continue
        try:
            value = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
        except (json.JSONDecodeError, AttributeError) as error:
            raise ConfigError(f"tito {who}: {path} is not a JSON object: {error}") from error
        found.update([value] if isinstance(value, int) else value or [])
    return found
