"""Families that are registered for what their checkpoints say: tokens, templates, names of weights.

The embedded engine runs none of them; another engine does. Plain data; modules are made in `build`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from miles import ConfigError, Context, Decoder
from miles_plugins.model.config_file import read_config
from miles_plugins.model.templates import GENERIC, Signs, handler_for

__all__ = [
    "Checkpoint",
    "DeepSeek",
    "Glm",
    "HuggingFace",
    "Inkling",
    "Kimi",
    "MiniMax",
    "Nemotron",
    "Qwen3Moe",
    "Qwen3VL",
    "Qwen35",
]


class Checkpoint:
    """A Hugging Face directory of one family, for engines other than the embedded one."""

    tito: ClassVar[str]
    name: ClassVar[str]
    """Registered name, for messages."""
    families: ClassVar[tuple[str, ...]]
    """`model_type` in `config.json`."""
    signs: ClassVar[tuple[Signs, ...]]
    """How its templates are told apart; the first is taken without a template."""
    fallback: ClassVar[bool] = False
    """Takes what no other registration knows."""

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Config:
        """A checkpoint."""

        path: str = ""
        """Hugging Face directory on this machine: config.json, tokenizer and safetensors. Nothing
        is downloaded."""

    @classmethod
    def example_config(cls, directory: Path) -> Mapping[str, Any]:
        """For the contract suite: a directory with nothing but a `config.json`."""
        kind = (cls.families or ("llama",))[0]
        (directory / "config.json").write_text(json.dumps({"model_type": kind}), encoding="utf-8")
        return {"path": str(directory)}

    def __init__(self, config: Config, context: Context) -> None:
        self.config = config
        self._hf: dict[str, Any] | None = None

    @classmethod
    def choose_tito(cls, config: Mapping[str, Any]) -> str:
        """The handler that the checkpoint's chat template shows."""
        return handler_for(cls.signs, str(config.get("path") or ""))

    @classmethod
    def matches(cls, config: Mapping[str, Any]) -> bool:
        """Whether a `config.json` has one of this family's types."""
        return config.get("model_type") in cls.families

    @property
    def random(self) -> bool:
        """Never: weights are loaded."""
        return False

    def directory(self) -> Path | None:
        """The checkpoint. Raises `ConfigError` when there is none."""
        if not self.config.path:
            raise ConfigError(f"model {self.name}: path is empty; give model.path=DIRECTORY")
        directory = Path(self.config.path).expanduser()
        if not directory.is_dir():
            raise ConfigError(f"model {self.name}: path {str(directory)!r} is not a directory")
        return directory

    def hf_config(self) -> dict[str, Any]:
        """The checkpoint's `config.json`. Raises `ConfigError` for a missing or broken file, or
        another family."""
        if self._hf is None:
            directory = self.directory()
            path = Path(str(directory)) / "config.json"
            found = read_config(path, f"model {self.name}")
            if not self.matches(found):
                other = found.get("model_type")
                known = ", ".join(self.families) or "a type that transformers knows"
                raise ConfigError(
                    f"model {self.name}: {path} has model_type {other!r}, not {known}"
                )
            self._hf = found
        return dict(self._hf)

    def decoder(self) -> Decoder:
        """Always raises `ConfigError`: the embedded engine does not run these families."""
        kind = self.hf_config().get("model_type")
        raise ConfigError(
            f"model {self.name}: the embedded engine cannot run model_type {kind!r}; use another "
            "engine"
        )

    def engine_name(self, name: str) -> str | None:
        """The name itself: engines for these families use the checkpoint's own."""
        return name

    def build(self) -> str:
        """The function that makes the module in trainer workers."""
        return "miles_plugins.model.build:causal_lm"


class Qwen3Moe(Checkpoint):
    """Qwen3 with experts. Coder and Instruct-2507 templates go through `generic`."""

    name = "qwen3_moe"
    tito = "qwen3"
    families = ("qwen3_moe",)
    signs = (
        Signs(
            tito="qwen3",
            has=("loop.last", "reasoning_content", "if loop.index0 > ns.last_query_index %}"),
            lacks=("<function=",),
        ),
    )


class Qwen35(Checkpoint):
    """Qwen3.5, 3.6 and 3.8, dense and with experts."""

    name = "qwen3_5"
    tito = "qwen3_5"
    families = ("qwen3_5", "qwen3_5_moe", "qwen3_5_text", "qwen3_5_moe_text")
    signs = tuple(
        Signs(tito="qwen3_5", has=("<function=", "reasoning_content", sign))
        for sign in (
            "if loop.index0 > ns.last_query_index %}",
            "preserve_thinking is true) or",
            "preserve_thinking is true or",
        )
    )


class Qwen3VL(Checkpoint):
    """Qwen3-VL, dense and with experts."""

    name = "qwen3_vl"
    tito = "qwen3_vl"
    families = ("qwen3_vl", "qwen3_vl_moe")
    signs = (Signs(tito="qwen3_vl", has=("<|vision_start|>",)),)


class Glm(Checkpoint):
    """GLM-4.5, 4.6, 4.7 and 5.x. Which markup a checkpoint has, its template tells."""

    name = "glm"
    tito = "glm4"
    families = ("glm4_moe", "glm4_moe_lite", "glm_moe_dsa")
    signs = (
        Signs(tito="glm4", has=("<arg_key>", "/nothink")),
        Signs(tito="glm5", has=("<arg_key>", "[gMASK]"), lacks=("/nothink",)),
    )

    @classmethod
    def choose_tito(cls, config: Mapping[str, Any]) -> str:
        """By the template; without one by the type."""
        path = str(config.get("path") or "")
        newer = _type_in(path) in ("glm4_moe_lite", "glm_moe_dsa")
        return handler_for(cls.signs[::-1] if newer else cls.signs, path)


class Nemotron(Checkpoint):
    """Nemotron 3 and 3.5, hybrids with experts."""

    name = "nemotron"
    tito = "nemotron3"
    families = ("nemotron_h",)
    signs = (Signs(tito="nemotron3", has=("<function=", "truncate_history_thinking")),)


_KIMI = ("<|im_middle|>", "<|tool_calls_section_begin|>", "tool_declare")


class Kimi(Checkpoint):
    """Kimi K2, K2 Thinking, K2.5 and K2.6. Which markup a checkpoint has, its template tells."""

    name = "kimi"
    tito = "kimi_k2"
    families = ("kimi_k2", "kimi_k25")
    signs = (
        Signs(
            tito="kimi_k2",
            has=("You are Kimi, an AI assistant created by Moonshot AI.",),
            lacks=("reasoning_content", "<think>"),
        ),
        Signs(tito="kimi_k2_5", has=("<|im_middle|>", "<think>", "thinking", "media")),
        Signs(tito="kimi_k2_thinking", has=(*_KIMI, "<think>{{", "reasoning_content")),
        Signs(tito="kimi_k2_early", has=_KIMI, lacks=("<think>",)),
    )

    @classmethod
    def choose_tito(cls, config: Mapping[str, Any]) -> str:
        """By the template; without one by the type."""
        path = str(config.get("path") or "")
        newer = [s for s in cls.signs if s.tito == "kimi_k2_5" and _type_in(path) == "kimi_k25"]
        return handler_for((*newer, *cls.signs), path)


class MiniMax(Checkpoint):
    """MiniMax M2, M2.1, M2.5."""

    name = "minimax"
    tito = "minimax_m2"
    families = ("minimax_m2",)
    signs = (Signs(tito="minimax_m2", has=("]~b]", "model_identity")),)


class DeepSeek(Checkpoint):
    """DeepSeek V3, R1, V3.1, V3.2 and V4."""

    name = "deepseek"
    tito = "deepseek_v3"
    families = ("deepseek_v3", "deepseek_v32", "deepseek_v4")
    signs = (Signs(tito="deepseek_v3", has=("<｜Assistant｜>",)),)

    @classmethod
    def choose_tito(cls, config: Mapping[str, Any]) -> str:
        """V4's checkpoints have a program in the place of a template, and a type of their own."""
        if _type_in(str(config.get("path") or "")) == "deepseek_v4":
            return "deepseek_v4"
        return super().choose_tito(config)


class Inkling(Checkpoint):
    """Inkling and Inkling-Small."""

    name = "inkling"
    tito = "inkling"
    families = ("inkling", "inkling_text", "inkling_mm_model")
    signs = (Signs(tito="inkling", has=("<|message_model|>",)),)


class HuggingFace(Checkpoint):
    """Any other checkpoint whose type `transformers` knows; its template goes through `generic`."""

    name = "huggingface"
    tito = GENERIC
    families = ()
    signs = (Signs(tito=GENERIC),)
    fallback = True

    @classmethod
    def matches(cls, config: Mapping[str, Any]) -> bool:
        """Whether `transformers` knows the type."""
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

        return config.get("model_type") in CONFIG_MAPPING_NAMES


def _type_in(path: str) -> str:
    """`model_type` of the `config.json` in a directory; empty when it cannot be told."""
    file = Path(path).expanduser() / "config.json"
    if not path or not file.is_file():
        return ""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except ValueError:
        return ""  # told when the configuration is read
    return str(found.get("model_type") or "") if isinstance(found, dict) else ""
