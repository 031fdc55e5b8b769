"""Trainer and engines on the same GPUs: `miles check` says which, and adds up what they need."""

from __future__ import annotations

import json

import pytest

from miles.check import check
from miles.config import compose

EIGHT = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 4096,
    "num_hidden_layers": 36, "num_attention_heads": 32, "head_dim": 128,
    "num_key_value_heads": 8, "intermediate_size": 12288, "vocab_size": 151936,
    "max_position_embeddings": 40960, "tie_word_embeddings": False,
}  # fmt: skip
"""Qwen3-8B: 15.3 GiB in bfloat16, 122.0 GiB with gradients and moments."""
TORCH = ("engine=torch", "engine.device=cuda")
SGLANG = ("engine=sglang", "engine.device=cuda", "engine.python=/no/such/python")
SPLIT = "placement=split, but "


@pytest.fixture
def said(monkeypatch, tmp_path):
    """(faults, warnings) about GPUs of a run with an 8B model and these keys, on a machine with so
    many GPUs of `gib` (one of another size as `gib_2=24`)."""

    def look(*keys: str, gpus: int, gib: float = 141, **odd: float) -> tuple[list[str], list[str]]:
        (programs := tmp_path / "bin").mkdir(exist_ok=True)
        sizes = [odd.get(f"gib_{i}", gib) for i in range(gpus)]
        lines = [f"echo 'NVIDIA H200, {int(size * 1024)}, GPU-0'\n" for size in sizes]
        (smi := programs / "nvidia-smi").write_text("#!/bin/sh\n" + "".join(lines))
        smi.chmod(0o755)
        monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        (model := tmp_path / "model").mkdir(exist_ok=True)
        (model / "config.json").write_text(json.dumps(EIGHT))
        common = ("experiment=grpo", "tito=bytes", "precision=bf16", f"model.path={model}")
        report = check(compose([*common, "model=qwen3", "model.init=load", *keys]))
        return tuple([x for x in found if "GPU" in x] for found in (report.faults, report.warnings))  # type: ignore[return-value]

    return look


def test_split_on_too_few_gpus_is_announced(said):
    """The trainer and the engine shared one GPU, and nobody said so."""
    (warning,) = said(*TORCH, "trainer.optimizer_state=host", gpus=1)[1]
    assert warning.startswith(f"{SPLIT}trainer ranks and engines are both on GPU 0, ")
    assert "use placement=colocated, or runtime=ray, which gives every worker" in warning
    (warning,) = said(*SGLANG, "trainer.workers=2", "engine.tp=2", gpus=2)[1]
    assert "trainer ranks and servers are both on GPU 0, 1, and hold each other up" in warning
    assert "use placement=colocated, or 4 GPUs (there are 2)" in warning
    (warning,) = said(*SGLANG, "trainer.workers=2", "max_lag=2", gpus=2)[1]
    assert "both on GPU 0, " in warning
    assert "placement=colocated and max_lag=0 (it is 2), or 3 GPUs (there are 2)" in warning


def test_split_with_gpus_to_spare_names_the_key(said):
    (warning,) = said(*SGLANG, "trainer.workers=2", "engine.tp=2", gpus=4)[1]
    assert "or engine.first_gpu=2 (there are 4)" in warning
    away = (*SGLANG, "trainer.workers=2", "engine.tp=2", "engine.first_gpu=2")
    assert said(*away, gpus=4) == ([], [])


@pytest.mark.parametrize(
    ("keys", "gpus"),
    [
        (("engine.device=cpu",), 2),
        ((*TORCH, "trainer.device=cpu"), 1),
        ((*SGLANG, "placement=colocated"), 1),
        ((*SGLANG, "engine.device=cpu"), 1),
        (TORCH, 0),
    ],
)
def test_gpus_that_are_not_shared_by_mistake_are_no_matter(said, keys, gpus):
    assert not [w for w in said(*keys, gpus=gpus)[1] if SPLIT in w]


def test_both_on_one_gpu_are_judged_together(said):
    """Each fitted alone, so that a run began which could not go on."""
    (fault,) = said(*TORCH, gpus=1, gib=130)[0]
    assert fault == (
        "GPU 0 has 130.0 GiB for trainer ranks (weights, gradients and moments in float32: about "
        "122.0 GiB) and engines (weights in bfloat16: about 15.3 GiB) at once; use "
        "placement=colocated, or runtime=ray, which gives every worker GPUs of its own"
    )
    assert said(*TORCH, gpus=1, gib=140)[0] == []
    (fault,) = said(*TORCH, gpus=1, gib=100)[0]  # and who does not fit alone is told once
    assert "a rank's GPU has 100.0 GiB; take more trainer.workers" in fault


def test_each_side_is_judged_by_the_gpus_it_is_placed_on(said):
    """The smallest GPU of the machine was taken for all of them."""
    apart = (*SGLANG, "engine.first_gpu=1")
    assert said(*apart, gpus=3, gib_2=10) == ([], [])
    (fault,) = said(*apart, gpus=3, gib_1=10)[0]
    assert "about 15.3 GiB in bfloat16, and 1 GPU offer 9.0 GiB" in fault
    (fault,) = said(*apart, gpus=3, gib_0=100)[0]
    assert "take about 122.0 GiB, and a rank's GPU has 100.0 GiB" in fault
    assert said(*TORCH, "trainer.optimizer_state=host", gpus=2, gib_1=10)[0] == []


def test_shared_gpus_are_judged_by_their_own_size(said):
    both = (*SGLANG, "trainer.workers=2", "engine.first_gpu=1")
    assert said(*both, gpus=2, gib_0=70)[0] == []
    (fault,) = said(*both, gpus=2, gib_1=70)[0]
    assert fault.startswith("GPU 1 has 70.0 GiB for trainer ranks (weights, gradients and moments")
    (fault,) = said(*SGLANG, "trainer.workers=2", "engine.workers=2", gpus=2, gib_1=70)[0]
    assert fault.startswith("GPU 1 has 70.0 GiB for trainer ranks")


def test_engines_that_only_evaluate_count_beside_the_others(said):
    """They compute on the same GPU, never sleep, and nobody counted them."""
    fleet = (*TORCH, "evaluator=fleet", "eval_every=1")
    (fault,) = said(*fleet, gpus=1, gib=140)[0]
    assert "and evaluation engines (weights in bfloat16: about 15.3 GiB) at once" in fault
    (fault,) = said(*fleet, "placement=colocated", gpus=1, gib=130)[0]
    assert "evaluation engines release nothing while the others work" in fault
    assert said(*fleet, gpus=1, gib=160)[0] == []
    (fault,) = said(*fleet, "trainer.optimizer_state=host", gpus=1, gib=20)[0]
    assert "weights of 2 engine(s) take about 30.5 GiB in bfloat16" in fault


def test_colocated_takes_turns_with_memory_where_both_release_it(said):
    turns = (*SGLANG, "placement=colocated")
    faults, (warning,) = said(*turns, gpus=1, gib=130)
    assert faults == []
    assert "GPU 0 has 130.0 GiB for trainer ranks (weights, gradients and moments" in warning
    assert "which take turns, but both are awake while weights are published" in warning
    (fault,) = said(*turns, "trainer.sleep_to=none", gpus=1, gib=130)[0]
    assert "servers (weights in bfloat16: about 15.3 GiB), and trainer ranks release" in fault
    assert said(*turns, "trainer.workers=2", "engine.tp=2", gpus=2, gib=80) == ([], [])


def test_ray_gives_each_its_own_gpus_or_refuses(said):
    pytest.importorskip("ray")
    faults, warnings = said(*TORCH, "runtime=ray", "runtime.gpus=2", gpus=2)
    assert faults == warnings == []
    (fault,) = said(*TORCH, "runtime=ray", "runtime.gpus=1", gpus=1)[0]
    assert "the layout needs 2 GPUs (1 trainer x 1, 1 engine x 1)" in fault
    (warning,) = said(*TORCH, "runtime=ray", "runtime.gpus=2", gpus=1)[1]
    assert "runtime.gpus is 2, and this machine has 1 GPU(s): a worker that is given" in warning


def test_ray_is_estimated_by_the_gpus_of_this_machine(said):
    pytest.importorskip("ray")
    (fault,) = said(*TORCH, "runtime=ray", "runtime.gpus=2", gpus=2, gib=80)[0]
    assert "take about 122.0 GiB, and a rank's GPU has 80.0 GiB" in fault
    shares = (*SGLANG, "runtime=ray", "placement=colocated", "trainer.sleep_to=none")
    (fault,) = said(*shares, "runtime.gpus=1", gpus=1, gib=130)[0]
    assert "trainer ranks release nothing" in fault


def test_engine_that_cannot_say_what_it_claims_is_one_fault_of_many(said, tmp_path):
    """Its error ended `miles check`, and nothing else was told."""
    (file := tmp_path / "mine.py").write_text(
        "from miles import ConfigError\n"
        "from miles_plugins.engine.torch import Torch\n\n\n"
        "class Mine(Torch):\n"
        "    @classmethod\n"
        "    def claims(cls, config, planned):\n"
        "        raise ConfigError('nobody knows which GPU')\n\n\n"
        "miles_components = {'engine': {'mine': Mine}}\n"
    )
    faults, _ = said(f"plugins=[{file}]", "engine=mine", "trainer.workers=2", gpus=1)
    assert "nobody knows which GPU" in faults
    assert any("more than the 1 GPUs here" in fault for fault in faults)


def test_ray_without_a_gpu_to_go_by_says_that_nothing_was_estimated():
    from miles_plugins.runtime.ray import Ray

    said = Ray.warnings(Ray.Config(address="10.0.0.1:6379"), None)
    assert said == [
        "no estimate of GPU memory: the cluster 10.0.0.1:6379 has the GPUs, and this machine none "
        "to go by"
    ]
    assert Ray.warnings(Ray.Config(), None) == []
