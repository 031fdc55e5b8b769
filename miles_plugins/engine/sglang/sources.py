"""What the SGLang that will run does with a model, read from its source before it is started.

It finds and reads files, and imports nothing of them; what is not found says nothing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from miles import ConfigError
from miles_plugins.engine.sglang.server import location

__all__ = ["INSTEAD", "own_head", "tied"]

INSTEAD = (
    "give a checkpoint whose config.json says tie_word_embeddings: false and whose weights have "
    "lm_head.weight, at first a copy of the embedding"
)

_MAKES_A_HEAD = "self.lm_head = ParallelLMHead("
_TIES = re.compile("tie_word|tie_weights|tied lm_head")


def tied(config: Mapping[str, Any]) -> bool:
    """Whether a `config.json` says that output head and embedding are one tensor."""
    text = config.get("text_config") or {}
    return bool(text.get("tie_word_embeddings", config.get("tie_word_embeddings")))


def own_head(python: str, environment: Mapping[str, str], config: Mapping[str, Any]) -> str:
    """Why a tied checkpoint's output head would not be what it should be in that SGLang: its class
    makes a head of its own and nothing in its module ties it, as Qwen3MoeForCausalLM in 0.5.16 to
    0.5.23. Empty for any other, or where its source is not to be seen from here."""
    names = config.get("architectures") or ()
    if not tied(config) or not names:
        return ""
    try:
        folder = Path(location(python, environment)) / "srt" / "models"
    except ConfigError:
        return ""  # said elsewhere
    for file in sorted(folder.glob("*.py")):
        text = file.read_text(encoding="utf-8", errors="replace")
        found = re.search(rf"^class {re.escape(str(names[0]))}\(.*?(?=^\S|\Z)", text, re.M | re.S)
        if found and _MAKES_A_HEAD in found[0] and not _TIES.search(text):
            return (
                f"{names[0]} of SGLang ({file}) has an output head of its own, and the checkpoint "
                f"ties it to the embedding, so that no weights come for it; {INSTEAD}"
            )
    return ""
