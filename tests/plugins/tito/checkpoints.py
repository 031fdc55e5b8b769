"""Directories that look like checkpoints: published templates with a tokenizer that stands in."""

import json
import tarfile
from pathlib import Path

import pytest

from miles import Context
from miles_plugins.tito.deepseek import DeepSeekV3
from miles_plugins.tito.families import (
    DeepSeekV4,
    Glm4,
    Glm5,
    Inkling,
    KimiK2,
    KimiK25,
    MiniMaxM2,
    Nemotron3,
    Qwen3,
    Qwen3VL,
    Qwen35,
)
from miles_plugins.tito.kimi import KimiK2Early, KimiK2Thinking
from miles_plugins.tito.surrogate import byte_surrogate, surrogate

DATA = Path(__file__).parents[3] / ".." / "shared" / "data"
TEMPLATES = DATA / "chat_templates"
CONTEXT = Context(directory=Path("."))

PUBLISHED = {
    "qwen3/Qwen-Qwen3-0.6B": (Qwen3, "qwen3"),
    "qwen3/trl_qwen3": (Qwen3, "qwen3"),
    "qwen3.5/Qwen3.5-4B": (Qwen35, "qwen3.5"),
    "qwen3.5/trl_qwen3_5_nothink": (Qwen35, "qwen3.5"),
    "qwen3.5/trl_qwen3_6": (Qwen35, "qwen3.5"),  # they differ in arguments that are off
    "qwen3.5/trl_qwen3_8": (Qwen35, "qwen3.8"),
    "glm/GLM-4.6": (Glm4, "glm-4.5"),
    "glm/trl_glm4moe": (Glm4, "glm-4.5"),
    "glm/GLM-4.7-Flash": (Glm5, "glm-5"),
    "nemotron/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": (Nemotron3, "nemotron-3"),
    "nemotron/trl_nemotron_3_super": (Nemotron3, "nemotron-3"),
    "nemotron/trl_nemotron_3_ultra": (Nemotron3, "nemotron-3-ultra"),
    "nemotron/trl_nemotron_3_5_lightning": (Nemotron3, "nemotron-3-ultra"),
    "kimi/Kimi-K2-Instruct": (KimiK2, "kimi-k2"),
    "kimi/Kimi-K2-Thinking": (KimiK2Thinking, ""),
    "kimi/moonshotai-Kimi-K2": (KimiK2Early, ""),
    "minimax/MiniMax-M2": (MiniMaxM2, "minimax-m2"),
    "deepseek/trl_deepseekv3": (DeepSeekV3, ""),
    "deepseek/llama-cpp-deepseek-r1": (DeepSeekV3, ""),
    "deepseek/deepseek-ai-DeepSeek-V3.1": (DeepSeekV3, ""),
    "deepseek/deepseek-ai-DeepSeek-V3.2": (DeepSeekV3, ""),
    "deepseek/deepseek-ai-DeepSeek-V4": (DeepSeekV4, "deepseek-v4"),
    "deepseek/deepseek-ai-DeepSeek-V4-Flash-0731": (DeepSeekV4, "deepseek-v4"),
    "inkling/inkling": (Inkling, "inkling"),
}
"""Templates of the data folder to the handler, and the variant that it takes."""

WITHOUT = (Qwen3VL, KimiK25)
"""Families whose template is in no file here: the library alone vouches for them."""


def template(name):
    """A published template's text; the test is skipped without the data."""
    path = TEMPLATES / f"{name}.jinja"
    if not path.is_file():
        pytest.skip("no shared data beside the project")
    return path.read_text()


def tokens_of(family):
    if family is KimiK2Thinking:
        return (*family.tokens, "<think>", "</think>")
    inside = ("calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep")
    outputs = ("outputs▁begin", "outputs▁end", "output▁begin", "output▁end")
    more = [f"<｜tool▁{part}｜>" for part in (*inside, *outputs)]
    own = (*more, "<think>", "</think>", "｜DSML｜") if family is DeepSeekV3 else ()
    return (*family.tokens, *own)


def bytes_checkpoint(directory, family, name="", **config):
    """A tokenizer of bytes with the family's tokens, a template, and a `config.json`."""
    byte_surrogate(directory, tokens_of(family), template(name) if name else "")
    return _finished(directory, family, config)


def tokenizers(tmp_path_factory):
    """The unpacked tokenizers of the data folder."""
    archive = DATA / "tokenizers.tar.xz"
    if not archive.is_file():
        pytest.skip("no shared data beside the project")
    directory = tmp_path_factory.mktemp("tokenizers")
    with tarfile.open(archive) as tar:
        tar.extractall(directory, filter="data")
    return directory


def real_checkpoint(directory, source, family, name, **config):
    """A real vocabulary with the tokens that it lacks added, and a template."""
    surrogate(source, directory, tokens_of(family), template(name) if name else "")
    return _finished(directory, family, config)


def _finished(directory, family, config):
    path = directory / "tokenizer_config.json"
    said = json.loads(path.read_text())
    bos = family.tokens[0] if "DeepSeek" in family.__name__ else None
    end = "<｜end▁of▁sentence｜>" if family is DeepSeekV3 else None
    said |= {key: value for key, value in (("bos_token", bos), ("eos_token", end)) if value}
    path.write_text(json.dumps(said))
    if config:
        (directory / "config.json").write_text(json.dumps(config))
    return directory


def handler(family, directory, **config):
    return family(family.Config(path=str(directory), **config), CONTEXT)
