"""Protocols of what both sides share: model families, token handlers, precision recipes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol, runtime_checkable

from miles.types import Array, Message

__all__ = ["Budget", "Decoder", "LossScaling", "Model", "Precision", "Tito", "Tool"]

Tool = Mapping[str, Any]
"""A function schema as chat templates take it: `{"type": "function", "function": {...}}`."""


@runtime_checkable
class Tito(Protocol):
    """How one model family's messages become tokens, and back. Append-only by contract:
    for every conversation, stored tokens + `extend` is what the next prompt is.

    Optional: `rewrites(history, messages, *, tools=()) -> bool`, whether the template, now that
    `messages` follow, would take back something of `history` that it showed when its last turn was
    sampled (old reasoning, as a rule), which `extend` keeps; `multimodal`, true when images in
    messages are carried, one placeholder each.
    """

    stop_ids: tuple[int, ...]
    """Ids that end an assistant turn."""
    vocab_size: int
    """Ids are below this."""

    def encode(self, text: str) -> Array:
        """(tokens,) int32 of raw text, no template, no added special tokens."""

    def decode(self, tokens: Array) -> str:
        """Text of ids, special tokens included, invalid bytes replaced."""

    def render(self, messages: Sequence[Message], *, tools: Sequence[Tool] = ()) -> Array:
        """(tokens,) int32 of a first prompt, opening the assistant's turn. `tools` are the function
        schemas offered to the model; a handler whose markup has none raises `EpisodeError`."""

    def extend(
        self,
        stored: Array,
        history: Sequence[Message],
        messages: Sequence[Message],
        *,
        tools: Sequence[Tool] = (),
    ) -> Array:
        """(new tokens,) int32 to append after `stored` (which ends with a sampled assistant turn
        that `history` ends with) so that `messages` follow and the assistant's turn is open. Never
        touches `stored`."""

    def parse(self, tokens: Array, *, tools: Sequence[Tool] = ()) -> Message:
        """A completion's ids as an assistant message: `content`, and where the markup has them
        `reasoning_content` and `tool_calls` (OpenAI's shape, `arguments` a JSON string)."""

    def demonstrate(self, said: str | Message) -> Array:
        """(tokens,) int32 that a model would have sampled to say a text, or an assistant message
        with its tool calls, stop id included."""

    def save(self, directory: Path) -> None:
        """Write tokenizer files that `transformers` loads, for checkpoints."""


# ---------------------------------------------------------------- the model on both sides


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoder:
    """Shape of a pre-norm rotary decoder with gated MLP, as the embedded engine runs it."""

    vocab_size: int
    """Rows of the embedding."""
    hidden_size: int
    """Width of the residual stream."""
    layers: int
    """Blocks."""
    heads: int
    """Query heads."""
    kv_heads: int
    """Key and value heads."""
    head_dim: int
    """Width of a head."""
    intermediate_size: int
    """Width of the MLP."""
    rope_theta: float
    """Rotary base."""
    norm_eps: float
    """RMSNorm epsilon."""
    qk_norm: bool = False
    """RMSNorm on queries and keys per head (Qwen3)."""
    attention_bias: bool = False
    """Biases on q, k, v projections."""
    tied: bool = False
    """Output head is the embedding."""
    max_len: int = 2048
    """Longest context."""


@runtime_checkable
class Model(Protocol):
    """One registration for a model family, configured for one checkpoint. Plain data: every process
    reads it."""

    tito: ClassVar[str]
    """Name of the family's tito handler, used when `tito=auto`."""

    @classmethod
    def matches(cls, config: Mapping[str, Any]) -> bool:
        """Whether a Hugging Face `config.json` belongs to this family."""

    @property
    def random(self) -> bool:
        """Weights are made from the seed, not loaded."""

    def hf_config(self) -> dict[str, Any]:
        """The checkpoint's `config.json`, or the one made for a random model. Raises
        `ConfigError`."""

    def directory(self) -> Path | None:
        """The local checkpoint, None for a random model."""

    def decoder(self) -> Decoder:
        """Shape for the embedded engine. Raises `ConfigError` when it cannot run the family."""

    def engine_name(self, name: str) -> str | None:
        """The embedded engine's canonical name of a Hugging Face tensor (those of Qwen3/Llama, such
        as `model.layers.0.self_attn.q_proj.weight`); None if the engine does not need it."""

    def build(self) -> str:
        """`module:function` called in trainer workers as `function(hf_config, directory or None) ->
        nn.Module`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """How far trainer and engine log-probs may differ before it is a fault."""

    max: float
    """Per token, absolute, in nats."""
    mean: float
    """Mean over a step, absolute, in nats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossScaling:
    """How a loss is scaled before its backward pass, so that small gradients are not lost in a type
    of few exponents; the rule of Micikevicius et al. 2018 (arXiv:1710.03740), section 3.2."""

    initial: float
    """The first scale; a power of two, as all of these factors are."""
    growth: float
    """Factor after `interval` good steps in a row."""
    backoff: float
    """Factor after a step whose gradients overflowed."""
    interval: int
    """Good steps in a row before the scale grows."""


@runtime_checkable
class Precision(Protocol):
    """One quantization contract for both sides, in four stages. Plain data: every process reads
    it."""

    master: str
    """Type of the trainer's stored parameters: `float32`."""
    compute: str
    """Type of the trainer's forward: `float32`, `bfloat16`, `float16`."""
    engine: str
    """Type the engine computes in."""
    export: str
    """Type in which weights are published and converted."""
    residual: str
    """Type in which the trainer's forward adds up what its layers say: `compute` or `float32`."""
    logits: str
    """Type in which logits leave the output head, in trainer and engine: `float32`, or that each
    computes in."""
    budget: Budget
    """Mismatch this recipe is allowed."""
    scaling: LossScaling | None
    """How the trainer scales its loss; None where `compute` has exponents enough."""

    def fingerprint(self) -> str:
        """Equal exactly where all of these types are equal."""
