"""What dense rotary decoders share: one configuration, made at random or read from a checkpoint.

Plain data: no tensor is read here and torch is never imported; modules are made in `build`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from miles import ConfigError, Context, Decoder
from miles_plugins.model import headers
from miles_plugins.model.config_file import read_config
from miles_plugins.model.templates import Signs, template_of

__all__ = ["Dense"]

_BYTES = Signs(tito="bytes", has=("macro listed(tools)", "'Tools:'", "<|im_start|>"))
"""The template that handler writes beside a random model."""
_SHAPE = (
    "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size",
)  # fmt: skip


class Dense:
    """A dense decoder: pre-norm, rotary positions, grouped queries, gated MLP."""

    tito: ClassVar[str] = "generic"
    family: ClassVar[str]
    """`model_type` in `config.json`."""
    architecture: ClassVar[str]
    """Class of `transformers`."""
    qk_norm: ClassVar[bool]
    """Queries and keys are normalised per head."""

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Config:
        """A checkpoint to load, or the shape of a random model."""

        init: Literal["load", "random"] = "random"
        """Load the weights from `path`, or make them from the seed."""
        path: str = ""
        """Hugging Face directory on this machine: config.json and safetensors. Nothing is
        downloaded."""
        hidden_size: int = 64
        """Random model: width of the residual stream."""
        layers: int = 2
        """Random model: blocks."""
        heads: int = 4
        """Random model: query heads."""
        kv_heads: int = 2
        """Random model: key and value heads."""
        head_dim: int = 16
        """Random model: width of a head."""
        intermediate_size: int = 160
        """Random model: width of the MLP."""
        vocab_size: int = 264
        """Random model: rows of the embedding; at least the tokenizer's."""
        max_len: int = 256
        """Random model: longest context."""
        tied: bool = True
        """Random model: the output head is the embedding."""
        rope_theta: float = 10000.0
        """Random model: base of the rotary positions."""
        norm_eps: float = 1e-6
        """Random model: epsilon of RMSNorm."""
        init_std: float | None = None
        """Random model: standard deviation of the initial weights; null takes 1/sqrt(hidden_size),
        since the 0.02 of large models is so small for a narrow one that it hardly begins to
        learn."""

    def __init__(self, config: Config, context: Context) -> None:
        if config.init == "random" and config.path:
            raise ConfigError(
                f"model {self.family}: path is {config.path!r}, and init is random, which reads "
                "nothing of it; give model.init=load, or leave the path out"
            )
        self.config = config
        self._hf: dict[str, Any] | None = None

    @classmethod
    def choose_tito(cls, config: Mapping[str, Any]) -> str:
        """A random model has no tokenizer, so it speaks bytes; so does a checkpoint of one that was
        trained, which its chat template tells."""
        if config.get("init") == "random":
            return _BYTES.tito
        path = str(config.get("path") or "")
        own = template_of(Path(path).expanduser()) if path else ""
        return _BYTES.tito if _BYTES.fit(own) else cls.tito

    @classmethod
    def check(cls, config: Config, planned: Any) -> list[str]:
        """Tensors of the checkpoint that are missing, extra or of another shape, by its headers."""
        model = planned.built.get("model")
        if model is None or model.random:
            return []
        held = headers.shapes(headers.weight_files(model.directory()))
        try:
            wanted = dict(headers.dense_shapes(model.decoder()))
        except ConfigError:
            return []  # a shape that only another engine knows; the trainer accounts for it
        found = headers.faults(held, wanted)
        more = f" and {len(found) - 8} more" if len(found) > 8 else ""
        where = f"weights in {model.directory()} do not fit"
        return [f"{where}: {'; '.join(found[:8])}{more}"] if found else []

    @classmethod
    def matches(cls, config: Mapping[str, Any]) -> bool:
        """Whether a `config.json` has this family's `model_type`."""
        return config.get("model_type") == cls.family

    @property
    def random(self) -> bool:
        """Weights are made from the seed."""
        return self.config.init == "random"

    def directory(self) -> Path | None:
        """The checkpoint; None for a random model. Raises `ConfigError` when there is none."""
        if self.random:
            return None
        if not self.config.path:
            raise ConfigError(
                f"model {self.family}: init is load, but path is empty; give model.path=DIRECTORY "
                "or model.init=random"
            )
        directory = Path(self.config.path).expanduser()
        if not directory.is_dir():
            raise ConfigError(f"model {self.family}: path {str(directory)!r} is not a directory")
        return directory

    def hf_config(self) -> dict[str, Any]:
        """The checkpoint's `config.json`, or the one made for a random model.

        Raises `ConfigError` for a missing or broken file, another family, or an impossible shape.
        """
        if self._hf is None:
            directory = self.directory()
            self._hf = self._made() if directory is None else self._read(directory)
        return dict(self._hf)

    def _read(self, directory: Path) -> dict[str, Any]:
        path = directory / "config.json"
        found = read_config(path, f"model {self.family}", _SHAPE)
        if not self.matches(found):
            other = found.get("model_type")
            raise ConfigError(
                f"model {self.family}: {path} has model_type {other!r}, not {self.family!r}"
            )
        return found

    def _made(self) -> dict[str, Any]:
        config = self.config
        for name in ("hidden_size", "layers", "heads", "kv_heads", "head_dim", "intermediate_size"):
            self._at_least(name, 1)
        self._at_least("vocab_size", 2)
        self._at_least("max_len", 2)
        if config.heads % config.kv_heads:
            raise ConfigError(
                f"model {self.family}: heads ({config.heads}) must be a multiple of kv_heads "
                f"({config.kv_heads})"
            )
        if config.head_dim % 2:
            raise ConfigError(
                f"model {self.family}: head_dim ({config.head_dim}) must be even, to rotate pairs"
            )
        return {
            "architectures": [self.architecture],
            "model_type": self.family,
            "hidden_size": config.hidden_size,
            "num_hidden_layers": config.layers,
            "num_attention_heads": config.heads,
            "num_key_value_heads": config.kv_heads,
            "head_dim": config.head_dim,
            "intermediate_size": config.intermediate_size,
            "vocab_size": config.vocab_size,
            "max_position_embeddings": config.max_len,
            "tie_word_embeddings": config.tied,
            "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
            "rms_norm_eps": config.norm_eps,
            "initializer_range": config.init_std or config.hidden_size**-0.5,
            "hidden_act": "silu",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "use_cache": True,
            "dtype": "float32",
            "bos_token_id": None,
            "eos_token_id": None,
            "pad_token_id": None,
        }

    def _at_least(self, name: str, least: int) -> None:
        value = getattr(self.config, name)
        if value < least:
            raise ConfigError(
                f"model {self.family}: {name} is {value}; it must be at least {least}"
            )

    def decoder(self) -> Decoder:
        """Shape for the embedded engine. Raises `ConfigError` naming what it cannot run."""
        hf = {name: value for name, value in self.hf_config().items() if value is not None}
        rope = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
        kind = rope.get("rope_type", rope.get("type", "default"))
        refusals = [
            (kind != "default", f"rope_type {kind!r}"),
            (hf.get("hidden_act", "silu") != "silu", f"hidden_act {hf.get('hidden_act')!r}"),
            (bool(hf.get("mlp_bias")), "mlp_bias"),
            (bool(hf.get("use_sliding_window")), "use_sliding_window"),
            (rope.get("partial_rotary_factor", 1.0) != 1.0, "partial_rotary_factor"),
            (hf.get("quantization_config") is not None, "quantization_config"),
        ]
        wrong = [what for refused, what in refusals if refused]
        if wrong:
            raise ConfigError(
                f"model {self.family}: the embedded engine cannot run {', '.join(wrong)}; "
                "use another engine"
            )
        try:
            heads, hidden = hf["num_attention_heads"], hf["hidden_size"]
            return Decoder(
                vocab_size=hf["vocab_size"],
                hidden_size=hidden,
                layers=hf["num_hidden_layers"],
                heads=heads,
                kv_heads=hf.get("num_key_value_heads") or heads,
                head_dim=hf.get("head_dim") or hidden // heads,
                intermediate_size=hf["intermediate_size"],
                rope_theta=float(rope.get("rope_theta", hf.get("rope_theta", 10000.0))),
                norm_eps=hf.get("rms_norm_eps", 1e-6),
                qk_norm=self.qk_norm,
                attention_bias=bool(hf.get("attention_bias")),
                tied=bool(hf.get("tie_word_embeddings")),
                max_len=hf.get("max_position_embeddings", 2048),
            )
        except KeyError as error:
            raise ConfigError(f"model {self.family}: config.json has no {error.args[0]}") from error

    def engine_name(self, name: str) -> str | None:
        """These families' own names are the canonical ones; a tied head and position buffers are
        not needed."""
        if name == "lm_head.weight" and self.hf_config().get("tie_word_embeddings"):
            return None
        return None if name.endswith("rotary_emb.inv_freq") else name

    def build(self) -> str:
        """The function that makes the module in trainer workers."""
        return "miles_plugins.model.build:causal_lm"
