"""Registration of the Lantern family: its configuration, its shape, and what its tensors are
called.

Plain data that every process reads; the torch module is `modeling`, imported by trainer workers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from miles import ConfigError, Context, Decoder

WHERE = "model example_family"
MODEL_TYPE = "lantern"

_OUTSIDE = {
    "lantern.tokens.weight": "model.embed_tokens.weight",
    "lantern.norm.gain": "model.norm.weight",
    "speak.weight": "lm_head.weight",
}
_INSIDE = {
    "look.norm.gain": "input_layernorm.weight",
    "look.query.weight": "self_attn.q_proj.weight",
    "look.query.bias": "self_attn.q_proj.bias",
    "look.key.weight": "self_attn.k_proj.weight",
    "look.key.bias": "self_attn.k_proj.bias",
    "look.value.weight": "self_attn.v_proj.weight",
    "look.value.bias": "self_attn.v_proj.bias",
    "look.mix.weight": "self_attn.o_proj.weight",
    "think.norm.gain": "post_attention_layernorm.weight",
    "think.gate.weight": "mlp.gate_proj.weight",
    "think.rise.weight": "mlp.up_proj.weight",
    "think.fall.weight": "mlp.down_proj.weight",
}
_FIELDS = (
    "width",
    "depth",
    "lookers",
    "shared",
    "looker_width",
    "inner_width",
    "vocabulary",
    "horizon",
    "turn",
    "epsilon",
)
"""Of `config.json`, all of them numbers."""


class ExampleFamily:
    """Lantern: a pre-norm rotary decoder with biased queries, keys and values and a head of its
    own."""

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Config:
        """A checkpoint to load, or the shape of a random model."""

        init: Literal["load", "random"] = "random"
        """Load the weights from `path`, or make them from the seed."""
        path: str = ""
        """Directory with config.json and model.safetensors."""
        width: int = 64
        """Random model: width of the residual stream."""
        depth: int = 2
        """Random model: blocks."""
        lookers: int = 4
        """Random model: query heads."""
        shared: int = 2
        """Random model: key and value heads."""
        looker_width: int = 16
        """Random model: width of a head."""
        inner_width: int = 160
        """Random model: width of the gated MLP."""
        vocabulary: int = 272
        """Random model: rows of the embedding; the tito handler needs 266."""
        horizon: int = 256
        """Random model: longest context."""
        spread: float = 0.02
        """Random model: standard deviation of the initial weights."""

    tito: ClassVar[str] = "example_family"

    def __init__(self, config: Config, context: Context) -> None:
        self.config = config
        if config.lookers % max(1, config.shared) or config.looker_width % 2:
            raise ConfigError(
                f"{WHERE}: lookers ({config.lookers}) must be a multiple of shared "
                f"({config.shared}), and looker_width ({config.looker_width}) even"
            )

    @classmethod
    def matches(cls, config: Mapping[str, Any]) -> bool:
        """Whether a `config.json` has this family's `model_type`."""
        return config.get("model_type") == MODEL_TYPE

    @property
    def random(self) -> bool:
        """Weights are made from the seed."""
        return self.config.init == "random"

    def directory(self) -> Path | None:
        """The checkpoint, None for a random model. Raises `ConfigError` when it is not there."""
        if self.random:
            return None
        directory = Path(self.config.path).expanduser()
        if not self.config.path or not (directory / "config.json").is_file():
            raise ConfigError(f"{WHERE}: path {self.config.path!r} holds no config.json")
        return directory

    def hf_config(self) -> dict[str, Any]:
        """The checkpoint's `config.json`, or the one made for a random model."""
        directory = self.directory()
        if directory is None:
            return self._made()
        try:
            found = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        except ValueError as error:
            raise ConfigError(f"{WHERE}: {directory}/config.json is not JSON: {error}") from error
        missing = [name for name in _FIELDS if name not in found]
        if not self.matches(found) or missing:
            raise ConfigError(
                f"{WHERE}: {directory}/config.json has model_type {found.get('model_type')!r}, not "
                f"{MODEL_TYPE!r}, or lacks {', '.join(missing) or 'nothing'}"
            )
        return dict(found)

    def _made(self) -> dict[str, Any]:
        config = self.config
        return {
            "architectures": ["LanternForCausalLM"],
            "model_type": MODEL_TYPE,
            "width": config.width,
            "depth": config.depth,
            "lookers": config.lookers,
            "shared": config.shared,
            "looker_width": config.looker_width,
            "inner_width": config.inner_width,
            "vocabulary": config.vocabulary,
            "horizon": config.horizon,
            "turn": 10000.0,
            "epsilon": 1e-6,
            "spread": config.spread,
            "tie_word_embeddings": False,
            "dtype": "float32",
        }

    def decoder(self) -> Decoder:
        """Shape for the embedded engine, from this family's own field names."""
        hf = self.hf_config()
        return Decoder(
            vocab_size=hf["vocabulary"],
            hidden_size=hf["width"],
            layers=hf["depth"],
            heads=hf["lookers"],
            kv_heads=hf["shared"],
            head_dim=hf["looker_width"],
            intermediate_size=hf["inner_width"],
            rope_theta=hf["turn"],
            norm_eps=hf["epsilon"],
            attention_bias=True,
            max_len=hf["horizon"],
        )

    def engine_name(self, name: str) -> str | None:
        """The embedded engine's name of one of this family's tensors; other names stay as they are,
        so that the engine can refuse them."""
        if name in _OUTSIDE:
            return _OUTSIDE[name]
        block = re.fullmatch(r"lantern\.blocks\.(\d+)\.(.+)", name)
        if block is None or block[2] not in _INSIDE:
            return name
        return f"model.layers.{block[1]}.{_INSIDE[block[2]]}"

    def build(self) -> str:
        """The function that makes the module in trainer workers."""
        return "miles_plugin_example_family.modeling:build"
