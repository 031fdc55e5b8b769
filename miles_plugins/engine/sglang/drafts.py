"""Whether a checkpoint has layers that draft tokens for itself (multi-token prediction).

It reads `config.json` and names of weights; which drafts a server makes of them is SGLang's affair.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

__all__ = ["fault"]

_WITHIN = ("EAGLE", "NEXTN")  # without a path of their own, which is refused elsewhere
_SIGN = re.compile("nextn|mtp")  # num_nextn_predict_layers, mtp_num_hidden_layers, mtp.fc.weight
_LAYER = re.compile(r"\blayers\.(\d+)\.")


def fault(speculative: Mapping[str, Any], model: Any) -> str:
    """Why an algorithm whose drafts are inside the checkpoint cannot serve this one: its config
    declares no draft layers, and its weights have none either. Empty when it can."""
    algorithm = str(speculative.get("algorithm") or "").upper()
    if algorithm not in _WITHIN or speculative.get("draft_model_path") or model is None:
        return ""
    config, folder = model.hf_config(), model.directory()
    if _declares(config) or (folder is not None and _has(Path(folder), config)):
        return ""
    where = "the model" if folder is None else str(Path(folder) / "config.json")
    return (
        f"speculative.algorithm is {algorithm}, and {where} declares no draft layers "
        "(num_nextn_predict_layers, or another key with nextn or mtp, above 0), nor do its weights "
        "have any; take a checkpoint that has them, or algorithm=NGRAM, which drafts from the "
        "text, or leave engine.speculative out"
    )


def _declares(config: Mapping[str, Any]) -> bool:
    places = (config, config.get("text_config"), config.get("mtp_config"))
    return any(
        type(value) is int and value > 0
        for place in places
        if isinstance(place, Mapping)
        for name, value in place.items()
        if _SIGN.search(name)
    )


def _has(folder: Path, config: Mapping[str, Any]) -> bool:
    """Draft layers by name, or by a number past that of the last layer."""
    text = config.get("text_config") or config
    layers = int(text.get("num_hidden_layers") or 1 << 30)
    for name in map(str, _names(folder)):  # of a damaged file they may be anything
        at = _LAYER.search(name)
        if _SIGN.search(name) or (at is not None and int(at[1]) >= layers):
            return True
    return False


def _names(folder: Path) -> Iterator[str]:
    """Of the weights, as far as files can be read."""
    try:
        if (index := folder / "model.safetensors.index.json").is_file():
            yield from json.loads(index.read_bytes())["weight_map"]
            return
        for path in folder.glob("*.safetensors"):
            with path.open("rb") as file:  # eight bytes say how long the JSON of names is
                length = int.from_bytes(file.read(8), "little")
                # of another kind of file, such as a pointer of Git LFS, they say anything
                yield from json.loads(file.read(min(length, path.stat().st_size)))
    except (OSError, ValueError, KeyError, TypeError):
        return  # what is wrong with it is the model's to say
