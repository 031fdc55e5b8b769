"""The Lantern module in `transformers`' terms: a config class, a decoder, a causal language model.

Importing it registers the family with `AutoConfig` and `AutoModelForCausalLM`. It knows nothing of
miles' trainer: packing reaches the attention function through keyword arguments that are passed on.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers import initialization as init
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from miles import ConfigError
from miles_plugin_example_family.model import MODEL_TYPE, WHERE

__all__ = ["LanternConfig", "LanternForCausalLM", "LanternModel", "build"]


class LanternConfig(PreTrainedConfig):
    """`config.json` of the family, under its own field names."""

    model_type = MODEL_TYPE
    attribute_map = {  # noqa: RUF012 - transformers reads it from the class
        "hidden_size": "width",
        "num_hidden_layers": "depth",
        "num_attention_heads": "lookers",
        "num_key_value_heads": "shared",
        "head_dim": "looker_width",
        "vocab_size": "vocabulary",
        "max_position_embeddings": "horizon",
    }

    width: int = 64
    depth: int = 2
    lookers: int = 4
    shared: int = 2
    looker_width: int = 16
    inner_width: int = 160
    vocabulary: int = 272
    horizon: int = 256
    turn: float = 10000.0
    epsilon: float = 1e-6
    spread: float = 0.02
    tie_word_embeddings: bool = False


class Norm(nn.Module):
    """gain · x / sqrt(mean(x²) + epsilon) over the last axis, computed in float32."""

    def __init__(self, width: int, epsilon: float) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(width))
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        wide = x if x.dtype == torch.float64 else x.float()
        scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.epsilon)
        return self.gain * scaled.to(x.dtype)


def angles(config: LanternConfig, positions_BT: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines (B, 1, T, D/2), float32: position × turn^(-2i/D)."""
    half = config.looker_width // 2
    steps = torch.arange(half, dtype=torch.float32, device=positions_BT.device) / half
    angle_BTd = positions_BT[..., None].float() * config.turn**-steps
    return angle_BTd.cos()[:, None], angle_BTd.sin()[:, None]


def rotated(x_BHTD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the pairs (i, i + D/2) of every head by their position's angles."""
    cos, sin = cos.to(x_BHTD.dtype), sin.to(x_BHTD.dtype)
    left, right = x_BHTD.chunk(2, dim=-1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)


def plain_attention(
    module: nn.Module,
    query_BHTD: Tensor,
    key_BKTD: Tensor,
    value_BKTD: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    **ignored: Any,
) -> tuple[Tensor, None]:
    """Causal attention over whole rows, for use without miles; returns (B, T, H, D)."""
    repeats = query_BHTD.shape[1] // key_BKTD.shape[1]
    key, value = (x.repeat_interleave(repeats, dim=1) for x in (key_BKTD, value_BKTD))
    scores_BHTT = query_BHTD @ key.transpose(2, 3) * scaling
    size = scores_BHTT.shape[-1]
    later = torch.ones(size, size, dtype=torch.bool, device=key.device).triu(1)
    weights_BHTT = scores_BHTT.masked_fill(later, float("-inf")).softmax(-1)
    return (weights_BHTT @ value).transpose(1, 2), None


class Look(nn.Module):
    """Norm, grouped-query attention, output projection."""

    def __init__(self, config: LanternConfig, layer: int) -> None:
        super().__init__()
        self.config = config
        # read by the attention functions of transformers
        self.layer_idx = layer
        self.is_causal = True
        self.num_key_value_groups = config.lookers // config.shared
        wide, narrow = config.lookers * config.looker_width, config.shared * config.looker_width
        self.norm = Norm(config.width, config.epsilon)
        self.query = nn.Linear(config.width, wide)
        self.key = nn.Linear(config.width, narrow)
        self.value = nn.Linear(config.width, narrow)
        self.mix = nn.Linear(wide, config.width, bias=False)

    def forward(self, x_BTW: Tensor, cos: Tensor, sin: Tensor, **more: Any) -> Tensor:
        rows, size, _ = x_BTW.shape
        seen = self.norm(x_BTW)
        query, key, value = (
            make(seen).view(rows, size, -1, self.config.looker_width).transpose(1, 2)
            for make in (self.query, self.key, self.value)
        )
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, plain_attention
        )
        # `more` carries what the attention function needs, such as how samples are packed
        out_BTHD, _ = attend(
            self,
            rotated(query, cos, sin),
            rotated(key, cos, sin),
            value,
            None,
            scaling=self.config.looker_width**-0.5,
            **more,
        )
        return self.mix(out_BTHD.reshape(rows, size, -1))


class Think(nn.Module):
    """Norm and gated MLP."""

    def __init__(self, config: LanternConfig) -> None:
        super().__init__()
        self.norm = Norm(config.width, config.epsilon)
        self.gate = nn.Linear(config.width, config.inner_width, bias=False)
        self.rise = nn.Linear(config.width, config.inner_width, bias=False)
        self.fall = nn.Linear(config.inner_width, config.width, bias=False)

    def forward(self, x_BTW: Tensor) -> Tensor:
        seen = self.norm(x_BTW)
        return self.fall(nn.functional.silu(self.gate(seen)) * self.rise(seen))


class LanternBlock(GradientCheckpointingLayer):
    """One layer: look, then think, each added to the residual stream."""

    def __init__(self, config: LanternConfig, layer: int) -> None:
        super().__init__()
        self.look = Look(config, layer)
        self.think = Think(config)

    def forward(self, x_BTW: Tensor, cos: Tensor, sin: Tensor, **more: Any) -> Tensor:
        x_BTW = x_BTW + self.look(x_BTW, cos, sin, **more)
        return x_BTW + self.think(x_BTW)


class LanternPreTrained(PreTrainedModel):
    """What `transformers` and miles' trainer ask of a family."""

    config_class = LanternConfig
    base_model_prefix = "lantern"
    supports_gradient_checkpointing = True
    # units of sharding and recomputation
    _no_split_modules = ["LanternBlock"]  # noqa: RUF012 - transformers reads it from the class
    # attention goes through ALL_ATTENTION_FUNCTIONS, so any registered function may be set
    _supports_attention_backend = True
    _supports_sdpa = True

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            init.normal_(module.weight, mean=0.0, std=self.config.spread)
        if isinstance(module, nn.Linear) and module.bias is not None:
            init.zeros_(module.bias)
        if isinstance(module, Norm):
            init.ones_(module.gain)


class LanternModel(LanternPreTrained):
    """Tokens to the last hidden states."""

    def __init__(self, config: LanternConfig) -> None:
        super().__init__(config)
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        self.blocks = nn.ModuleList(LanternBlock(config, i) for i in range(config.depth))
        self.norm = Norm(config.width, config.epsilon)
        self.gradient_checkpointing = False
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.tokens

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.tokens = value

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        **more: Any,
    ) -> BaseModelOutputWithPast:
        """`more` is passed on to the attention function; there is no cache and no padding mask."""
        if position_ids is None:
            size = input_ids.shape[1]
            position_ids = torch.arange(size, device=input_ids.device).expand_as(input_ids)
        for name in ("use_cache", "attention_mask"):
            more.pop(name, None)
        x_BTW = self.tokens(input_ids)
        cos, sin = angles(self.config, position_ids)
        for block in self.blocks:
            x_BTW = block(x_BTW, cos, sin, **more)
        return BaseModelOutputWithPast(last_hidden_state=self.norm(x_BTW))


class LanternForCausalLM(LanternPreTrained):
    """`LanternModel` and an output head of its own."""

    def __init__(self, config: LanternConfig) -> None:
        super().__init__(config)
        self.lantern = LanternModel(config)
        self.speak = nn.Linear(config.width, config.vocabulary, bias=False)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.lantern.tokens

    def get_output_embeddings(self) -> nn.Module:
        return self.speak

    def set_output_embeddings(self, value: nn.Module) -> None:
        self.speak = value

    def forward(self, input_ids: Tensor, **more: Any) -> CausalLMOutputWithPast:
        """Logits (B, T, V)."""
        hidden_BTW = self.lantern(input_ids, **more).last_hidden_state
        return CausalLMOutputWithPast(logits=self.speak(hidden_BTW))


AutoConfig.register(MODEL_TYPE, LanternConfig, exist_ok=True)
AutoModelForCausalLM.register(LanternConfig, LanternForCausalLM, exist_ok=True)


def build(hf_config: Mapping[str, Any], directory: Path | None) -> LanternForCausalLM:
    """A float32 module: random by torch's current generator, or with the directory's tensors.

    Raises `ConfigError` naming tensors that are missing, extra or of another shape.
    """
    config = LanternConfig.from_dict({**hf_config, "dtype": "float32"})
    if directory is None:
        return LanternForCausalLM(config)
    made, loaded = LanternForCausalLM.from_pretrained(
        directory, config=config, dtype=torch.float32, output_loading_info=True
    )
    wrong = {what: sorted(map(str, names)) for what, names in loaded.items() if names}
    if wrong:
        raise ConfigError(f"{WHERE}: weights in {directory} do not fit: {wrong}")
    return made
