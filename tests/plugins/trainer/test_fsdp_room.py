"""What `miles check` says before a trainer is built: GPUs that are missing, and a model that does
not fit."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from miles import Gpu, Spec
from miles_plugins.trainer.fsdp import Fsdp, room

SEVEN = {
    "hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32, "head_dim": 128,
    "num_key_value_heads": 8, "intermediate_size": 12288, "vocab_size": 151936,
    "tie_word_embeddings": False,
}  # fmt: skip
"""Qwen3-8B: 8.2 billion parameters, 122 GiB with gradients and moments."""


@pytest.fixture
def said(monkeypatch):
    """Faults of a trainer with these keys, on a machine with so many GPUs of 80 GiB."""

    def look(*, gpus=0, runtime="local", gib=80, **config):
        found = [Gpu(name="H100", total=gib << 30)] * gpus
        monkeypatch.setattr(room, "gpus_here", lambda: found)
        monkeypatch.setattr(room, "memory_here", lambda: 100 << 30)
        planned = SimpleNamespace(
            built={
                "model": SimpleNamespace(hf_config=lambda: SEVEN),
                "precision": SimpleNamespace(compute="bfloat16"),
            },
            specs={"runtime": Spec(kind="runtime", name=runtime, config={})},
        )
        return Fsdp.check(Fsdp.Config(**config), planned)

    return look


def test_room_names_gpus_that_are_not_there(said):
    (fault,) = said(device="cuda")
    assert "device is cuda, and there is no GPU here (no nvidia-smi or driver shows one)" in fault
    for device in ("cuda", "auto"):
        (fault,) = said(gpus=2, workers=4, device=device)
        assert "workers (4) is more than the 2 GPUs here" in fault
        assert "use trainer.workers=2 or device=cpu" in fault
    assert said(device="cuda", runtime="ray") == []


def test_room_names_a_model_that_does_not_fit_its_gpus(said):
    (fault,) = said(gpus=1)
    assert "weights, gradients and moments in float32 take about 122.0 GiB" in fault
    assert "a rank's GPU has 80.0 GiB; take more trainer.workers, or trainer.optimizer_s" in fault
    assert said(gpus=2, workers=2) == said(gpus=1, gib=0) == []  # nobody says how large
    assert len(said(gpus=2, workers=2, replicas=2)) == 1
    assert said(gpus=1, optimizer_state="host") == said(gpus=1, offload_parameters=True) == []


def test_room_names_a_model_that_does_not_fit_the_memory(said):
    (fault,) = said()
    assert "take about 122.0 GiB, and this machine's memory is 100.0 GiB" in fault
    assert len(said(gpus=8, device="cpu")) == 1
    assert said(optimizer_state="disk") == []
