"""A tiny model with large weights, so that its distribution is far from uniform, and an engine that
serves it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from miles import Context, EngineError, Request, Sampling, Settings
from miles_plugins.engine.torch import Torch
from miles_plugins.model.llama import Llama
from miles_plugins.model.qwen3 import Qwen3
from miles_plugins.precision.bf16 import Bf16
from miles_plugins.precision.fp16 import Fp16
from miles_plugins.precision.fp32 import Fp32

SHAPES: dict[str, tuple[type, dict[str, Any]]] = {
    "qwen3": (Qwen3, {}),
    "qwen3-untied": (Qwen3, {"tied": False, "layers": 1, "head_dim": 24}),
    "llama": (Llama, {"kv_heads": 4, "rope_theta": 500.0}),
    "llama-one-key-head": (Llama, {"kv_heads": 1, "heads": 3, "hidden_size": 48, "tied": False}),
}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Tiny:
    """One model: its registration, its `transformers` module, and engines that serve it."""

    def __init__(self, directory: Path, shape: str = "qwen3", precision: str = "fp32") -> None:
        from miles_plugins.model.build import causal_lm

        kind, changes = SHAPES[shape]
        recipe = {"fp32": Fp32, "bf16": Bf16, "fp16": Fp16}[precision]
        self.context = Context(directory=directory, precision=recipe(recipe.Config(), None))
        self.model = kind(kind.Config(**changes), self.context)
        self.module = self.made(causal_lm, seed=0)
        self.other = self.made(causal_lm, seed=1)

    def made(self, build: Callable[..., Any], *, seed: int) -> Any:
        """A module whose log-probs spread over several nats."""
        torch.manual_seed(seed)
        module = build(self.model.hf_config(), None)
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                if parameter.ndim > 1:
                    parameter.normal_(std=0.35 if "embed" in name else 0.2)
                else:
                    parameter.uniform_(0.5, 1.5)
        return module.eval()

    def weights(self, module: Any = None) -> list[tuple[str, Any]]:
        """(Hugging Face name, tensor) of every parameter."""
        return [(n, p.detach()) for n, p in (module or self.module).named_parameters()]

    def engine(self, *, settings: Settings | None = None, **config: Any) -> Torch:
        """A fresh engine, nothing loaded."""
        from dataclasses import replace

        around = replace(self.context, model=self.model, settings=settings or Settings())
        return Torch(Torch.Config(**{"rows": 16, "max_len": 96, **config}), around)

    def logprobs(self, tokens: np.ndarray, temperature: float = 1.0) -> np.ndarray:
        """(tokens,) what `transformers` says, in float32 up to the logits and float64 after; 0
        first."""
        with torch.no_grad():
            logits = self.module(torch.from_numpy(tokens.astype(np.int64))[None]).logits[0]
        full = (logits.double() / temperature).log_softmax(-1)
        picked = full[:-1].gather(1, torch.from_numpy(tokens[1:].astype(np.int64))[:, None])
        return np.concatenate([[0.0], picked[:, 0].numpy()])


@pytest.fixture
def tiny(tmp_path: Path) -> Tiny:
    """The default shape."""
    return Tiny(tmp_path)


@pytest.fixture
def make_tiny(tmp_path: Path) -> Callable[..., Tiny]:
    """Other shapes and precisions by name."""
    return lambda *args: Tiny(tmp_path, *args)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A directory that looks like a checkpoint."""
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


def make_request(index: int, *, size: int = 8, new: int = 12, **changes: Any) -> Request:
    """A request whose prompt and seed follow from `index`; sampling fields and `seed` may be
    changed."""
    rng = np.random.default_rng(index)
    seed = changes.pop("seed", 1000 + index)
    tokens = changes.pop("tokens", rng.integers(0, 256, size).astype(np.int32))
    sampling = Sampling(max_new_tokens=new, **changes)
    return Request(id=f"r{index}", key=f"k{index}", tokens=tokens, sampling=sampling, seed=seed)


@pytest.fixture
def request_for() -> Callable[..., Request]:
    """`make_request`."""
    return make_request


@pytest.fixture
def assert_equal() -> Callable[..., None]:
    """Two completions are bit-equal in all that was sampled."""

    def check(one: Any, two: Any) -> None:
        assert one.tokens.tolist() == two.tokens.tolist()
        assert one.logprobs.tobytes() == two.logprobs.tobytes()
        assert one.finish == two.finish
        both = SimpleNamespace(one=one.truncated_logprobs, two=two.truncated_logprobs)
        assert (both.one is None) == (both.two is None)
        if both.one is not None:
            assert both.one.tobytes() == both.two.tobytes()

    return check


@pytest.fixture
def ask_natively(tiny: Tiny, tmp_path: Path) -> Callable[[Any], Any]:
    """Asks a server that has weights what SGLang's own routes offer beside what the client asks:
    log-probs of prompts with samples, and updates that name no version."""
    tokens = np.arange(5, 15, dtype=np.int32)

    async def prompt(http: Any, start: int | None, new: int, *, stream: bool) -> None:
        body = {
            "input_ids": tokens.tolist(),
            "sampling_params": {"max_new_tokens": new, "temperature": 1.0},
            "return_logprob": True,
            "stream": stream,
            **({} if start is None else {"logprob_start_len": start}),
        }
        if stream:
            said = [part async for part in http.parts("/generate", body, limit=60)][-1]
        else:
            said = await http.ask("POST", "/generate", body, limit=60)
            assert len(said["output_ids"]) == len(said["meta_info"]["output_token_logprobs"]) == new
        first = len(tokens) if start in (None, -1) else start
        given = said["meta_info"]["input_token_logprobs"]
        assert [triple[1] for triple in given] == tokens[first:].tolist()
        assert [triple[0] for triple in given[:1]] == [None] * len(given[:1])
        wanted = tiny.logprobs(tokens)[first + 1 :]
        np.testing.assert_allclose([triple[0] for triple in given[1:]], wanted, atol=2e-3)
        assert said["meta_info"]["completion_tokens"] == new
        assert said["meta_info"]["finish_reason"] == {"type": "length", "length": new}

    async def ask(http: Any) -> None:
        for start in (None, -1, 0, 3, 9, 10):
            for new in (0, 4):
                await prompt(http, start, new, stream=False)
        for new in (0, 4):
            await prompt(http, 0, new, stream=True)
        with pytest.raises(EngineError, match=r"HTTP 400: .*logprob_start_len"):
            await prompt(http, 11, 4, stream=False)
        before = (await http.ask("GET", "/model_info"))["weight_version"]
        tiny.module.save_pretrained(tmp_path / "unnamed")
        body = {"model_path": str(tmp_path / "unnamed")}
        said = await http.ask("POST", "/update_weights_from_disk", body, limit=60)
        assert said["success"], said
        assert (await http.ask("GET", "/model_info"))["weight_version"] == before

    return ask
