"""The model as the trainer calls it: packed tokens in, log-probs of chosen tokens out.

Built from a registration's `build` function; it updates nothing.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from miles import ConfigError, PluginLoadError, derive_seed
from miles.learn.attention import ATTENTION, register_attention
from miles.learn.layers import quicken
from miles.learn.logprobs import token_logprobs
from miles.learn.packing import Layout
from miles.learn.residual import widen

__all__ = ["Policy", "build", "resolve"]

COMPILER = "inductor"
"""torch.compile's back end."""


class Policy(nn.Module):
    """A causal language model with its output head folded into the log-prob computation."""

    def __init__(self, model: nn.Module, *, wide: bool = False) -> None:
        """With `wide` logits are float32 whatever the model computes in."""
        super().__init__()
        self.model = model
        self.fused = False  # compiled arithmetic on logits
        self.wide = wide
        head = model.get_output_embeddings()
        config = model.config
        for what, there in (
            ("a bias on its output head", getattr(head, "bias", None) is not None),
            ("soft-capped logits", getattr(config, "final_logit_softcapping", None) is not None),
            ("scaled logits", getattr(config, "logit_scale", None) is not None),
        ):
            if there:
                raise ConfigError(
                    f"trainer fsdp: {type(model).__name__} has {what}, which log-probs leave out"
                )

    def forward(
        self,
        tokens_1T: Tensor,
        packing: Layout,
        rows_R: Tensor,
        targets_R: Tensor,
        temperature: float,
        entropy: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """Log-probs (R,) of `targets_R` after the packed tokens at `rows_R`, and entropies (R,)
        when asked."""
        hidden_1TH = self.model.base_model(
            input_ids=tokens_1T,
            position_ids=packing.positions,
            packing=packing,
            use_cache=False,
        ).last_hidden_state
        return token_logprobs(
            hidden_1TH[0].index_select(0, rows_R),
            self.model.get_output_embeddings().weight,
            targets_R,
            temperature=temperature,
            entropy=entropy,
            fused=self.fused,
            wide=self.wide,
        )

    def compile_parts(self) -> None:
        """Compile each block, in place, and the arithmetic on tiles of logits. Attention stays
        outside: its layout differs from row to row."""
        register_attention(opaque=True)
        # Layers share one code object; each kind of layer and of shape takes an entry of its own.
        torch._dynamo.config.recompile_limit = 64
        for block in self.blocks():
            block.compile(backend=COMPILER)
        self.fused = True

    def blocks(self) -> list[nn.Module]:
        """The decoder layers: units of sharding and of recomputation."""
        names = set(self.model._no_split_modules or ())
        return [m for m in self.model.modules() if type(m).__name__ in names]


def build(
    function: str,
    hf_config: dict[str, Any],
    directory: Path | None,
    *,
    seed: int,
    recompute: bool,
    quick: bool = True,
    wide: bool = False,
    fine: torch.dtype | None = None,
) -> Policy:
    """Make the model in float32 on the CPU, drawn from `seed` alone when there is no directory.

    With `quick` its small layers get the forms of `miles.learn.layers`, made for a CPU and no
    compiler. `wide` is `Policy`'s; with `fine`, the type it computes in, its residual stream is
    float32.
    """
    register_attention()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(seed, "model"))
        model = resolve(function, "model")(hf_config, directory)
    model.set_attn_implementation(ATTENTION)
    for parameter in model.parameters():
        parameter.data = parameter.data.float()
        parameter.requires_grad_(True)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0  # rollout has none, and log-probs must agree with it
    model.train()
    if recompute:
        # The first is the newer name; transformers 5 has had both.
        enable = getattr(
            model, "activation_checkpointing_enable", model.gradient_checkpointing_enable
        )
        enable({"use_reentrant": False, "preserve_rng_state": False})
    if quick:
        quicken(model)
    if fine is not None:
        widen(model, fine)
    return Policy(model, wide=wide)


def resolve(path: str, what: str) -> Callable[..., Any]:
    """The function that `module:function` names. Raises `PluginLoadError`."""
    module, _, name = path.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise PluginLoadError(f"{what}: cannot import {path!r}: {error}") from error
    if not callable(found):
        raise PluginLoadError(f"{what}: {path!r} is not a function")
    return found
