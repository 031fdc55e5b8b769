"""An estimate of a model's weights against what models have, and what this machine is said to
have."""

from __future__ import annotations

from pathlib import Path

import pytest

from miles import Gpu, gpus_here, gpus_shown, memory_here, parameter_count, weight_bytes

LLAMA = {
    "hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64,
    "num_key_value_heads": 8, "intermediate_size": 28672, "vocab_size": 128256,
}  # fmt: skip
QWEN = {
    "hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16, "head_dim": 128,
    "num_key_value_heads": 8, "intermediate_size": 3072, "vocab_size": 151936,
    "tie_word_embeddings": True,
}  # fmt: skip
QWEN_MOE = {
    "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32, "head_dim": 128,
    "num_key_value_heads": 4, "intermediate_size": 6144, "moe_intermediate_size": 768,
    "num_experts": 128, "vocab_size": 151936,
}  # fmt: skip
DEEPSEEK = {
    "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 128,
    "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "v_head_dim": 128, "intermediate_size": 18432, "moe_intermediate_size": 2048,
    "n_routed_experts": 256, "n_shared_experts": 1, "first_k_dense_replace": 3,
    "vocab_size": 129280, "quantization_config": {"quant_method": "fp8"},
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "parameters"),
    [(LLAMA, 70.6e9), (QWEN, 0.596e9), (QWEN_MOE, 30.5e9), (DEEPSEEK, 671e9)],
    ids=["llama-3-70b", "qwen3-0.6b", "qwen3-30b-a3b", "deepseek-v3"],
)
def test_machine_estimate_is_near_what_models_have(config: dict[str, object], parameters: float):
    assert parameter_count(config) == pytest.approx(parameters, rel=0.02)


def test_machine_estimate_reads_the_text_model_of_several():
    assert parameter_count({"text_config": QWEN}) == parameter_count(QWEN)
    assert parameter_count({**QWEN, "text_config": None}) == parameter_count(QWEN)
    # a head of its own only where that is said, within the text's part or beside it
    own = {**QWEN, "tie_word_embeddings": False}
    assert parameter_count(own) > parameter_count(QWEN)
    unsaid = {name: value for name, value in QWEN.items() if name != "tie_word_embeddings"}
    assert parameter_count(unsaid) == parameter_count(QWEN)
    beside = {"text_config": unsaid, "tie_word_embeddings": False}
    assert parameter_count(beside) == parameter_count(own)


def test_machine_weights_take_the_bytes_of_their_type_or_of_what_they_are_quantized_to():
    assert weight_bytes(QWEN, "float32") == 4 * parameter_count(QWEN)
    assert weight_bytes(QWEN, "bfloat16") == 2 * parameter_count(QWEN)
    assert weight_bytes(DEEPSEEK, "bfloat16") == parameter_count(DEEPSEEK)


def test_machine_has_the_gpus_that_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    program = tmp_path / "nvidia-smi"
    said = "echo 'NVIDIA H200, 143771, GPU-5dc2'\n" * 2
    program.write_text(f"#!/bin/sh\n{said}")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    card = Gpu(name="NVIDIA H200", total=143771 << 20, uuid="5dc2")
    assert gpus_here() == [card, card] and gpus_shown() is None
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert gpus_here() == [card] and gpus_shown() == 1
    for none in ("", "-1", "-1,0"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", none)
        assert gpus_here() == [] and gpus_shown() == 0
    program.unlink()
    assert gpus_here() == []
    assert memory_here() > 1 << 28


def test_machine_counts_gpus_whose_size_nobody_says(tmp_path, monkeypatch):
    """The sizes are of those that are shown, in their order; unified memory has none."""
    program = tmp_path / "nvidia-smi"
    program.write_text(
        "#!/bin/sh\necho 'A, 80, GPU-1a'\necho 'GB10, [N/A], GPU-2b'\necho 'C, 40, GPU-2c'\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,1,7")
    assert [(gpu.name, gpu.total >> 20) for gpu in gpus_here()] == [("C", 40), ("GB10", 0)]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-3156bd77")
    assert [gpu.name for gpu in gpus_here()] == ["A"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-2c,GPU-1a")
    assert [gpu.uuid for gpu in gpus_here()] == ["2c", "1a"]
    program.unlink()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    for number in range(3):
        (tmp_path / "driver" / str(number)).mkdir(parents=True)
    monkeypatch.setattr("miles.machine._DRIVER", tmp_path / "driver")
    assert gpus_here() == [Gpu(name="NVIDIA GPU", total=0)] * 3
