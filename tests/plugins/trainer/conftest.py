"""A tiny trainer, and batches for it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from miles import Batch, Settings, Term, flatten
from miles.testing import context, make_sample
from miles_plugins.model.qwen3 import Qwen3
from miles_plugins.model.registered import Checkpoint, Qwen3Moe
from miles_plugins.precision.bf16 import Bf16
from miles_plugins.precision.fp16 import Fp16
from miles_plugins.precision.fp32 import Fp32
from miles_plugins.trainer.fsdp import Fsdp

SIZES = ((3, 6), (1, 4), (5, 2), (2, 9), (4, 1), (3, 3))


@pytest.fixture
def make_trainer(tmp_path: Path) -> Callable[..., Fsdp]:
    """Build an `Fsdp` over a random Qwen3; keywords are its Config's, plus seed, steps,
    temperature, precision, a name or a recipe's Config, and model, its keys or a registration."""

    def make(*, seed=0, steps=10, temperature=1.0, precision="fp32", model=None, **fields):
        settings = Settings(steps=steps, temperature=temperature)
        around = context(tmp_path, settings=settings)
        kinds = {"fp32": Fp32, "bf16": Bf16, "fp16": Fp16}
        kinds |= {kind.Config: kind for kind in kinds.values()}
        named = isinstance(precision, str)
        recipe = kinds[precision if named else type(precision)]
        rounding = recipe.Config() if named else precision
        small = {"hidden_size": 32, "intermediate_size": 48, "init_std": 0.02}
        made = model
        if not isinstance(model, Checkpoint):
            made = Qwen3(Qwen3.Config(**(model or small)), around)
        return Fsdp(
            Fsdp.Config(**{"lr": 1e-3, "device": "cpu", **fields}),
            context(
                tmp_path,
                settings=settings,
                seed=seed,
                model=made,
                precision=recipe(rounding, around),
            ),
        )

    return make


@pytest.fixture
def experts(tmp_path):
    """A registered checkpoint of Qwen3 with three experts a layer."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, intermediate_size=48, moe_intermediate_size=24, num_experts=3,
        num_experts_per_tok=2, vocab_size=264, tie_word_embeddings=False,
        max_position_embeddings=256,
    )  # fmt: skip
    torch.manual_seed(0)
    Qwen3MoeForCausalLM(config).save_pretrained(tmp_path / "experts")
    return Qwen3Moe(Qwen3Moe.Config(path=str(tmp_path / "experts")), context(tmp_path))


@pytest.fixture
def tokens():
    """A handful of samples, sampled at version 0 with noise for log-probs."""
    return flatten([make_sample(p, c, seed=i) for i, (p, c) in enumerate(SIZES)])


@pytest.fixture
def make_batch(tokens) -> Callable[..., Batch]:
    """A batch with a mean negative log-likelihood, unless terms are given."""

    def make(*terms: Term, tokens=tokens):
        mean = (tokens.trainable / tokens.trainable.sum()).astype(np.float32)
        nll = Term(name="nll", function="miles.learn.losses:nll", weights=mean)
        return Batch(tokens=tokens, terms=terms or (nll,))

    return make
