"""The fsdp trainer on disk: exact continuation, what transformers reads, and what is refused."""

from __future__ import annotations

import json
import resource
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from miles import CheckpointError
from miles_plugins.trainer.fsdp import state, worker
from miles_plugins.trainer.fsdp.policy import build


def weights(trainer):
    return {name: tensor.clone() for name, tensor in trainer.export()}


def assert_same(one, two):
    assert list(one) == list(two)
    for name in one:
        assert torch.equal(one[name], two[name]), name


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_resume_is_exact_to_the_bit(make_trainer, make_batch, tokens, tmp_path, precision):
    fields = {"precision": precision, "warmup_steps": 2, "schedule": "cosine", "steps": 6}
    fields |= {"weight_decay": 0.1, "micro_batch_tokens": 24}
    whole, part = make_trainer(**fields), make_trainer(**fields)
    whole.logprobs(tokens, "reference")
    part.logprobs(tokens, "reference")
    expected = [whole.step(make_batch()).metrics for _ in range(6)]
    found = [part.step(make_batch()).metrics for _ in range(3)]
    part.save(tmp_path / "c")
    resumed = make_trainer(seed=9, **fields)
    resumed.load(tmp_path / "c")
    assert resumed.version == 3
    found += [resumed.step(make_batch()).metrics for _ in range(3)]
    assert found == expected
    assert_same(weights(whole), weights(resumed))
    for one, two in zip(
        whole._worker.masters.named.values(), resumed._worker.masters.named.values(), strict=True
    ):
        assert torch.equal(one, two)
    a, b = (t.logprobs(tokens, "reference") for t in (whole, resumed))
    assert (a == b).all()


def test_experts_are_saved_as_checkpoints_have_them_and_resume_to_the_bit(
    make_trainer, make_batch, experts, tmp_path
):
    trainer = make_trainer(model=experts)
    trainer.step(make_batch())
    trainer.save(tmp_path / "c")
    saved = load_file(tmp_path / "c" / "model" / "model.safetensors")
    theirs = load_file(tmp_path / "experts" / "model.safetensors")
    assert {n: t.shape for n, t in saved.items()} == {n: t.shape for n, t in theirs.items()}
    assert any(".experts.2.up_proj." in name for name in saved)
    exported = weights(trainer)
    assert_same(saved, {name: exported[name] for name in saved})
    resumed = make_trainer(seed=9, model=experts)
    resumed.load(tmp_path / "c")
    assert_same(trainer._worker.masters.named, resumed._worker.masters.named)
    for _ in range(2):
        assert resumed.step(make_batch()).metrics == trainer.step(make_batch()).metrics
    assert_same(weights(trainer), weights(resumed))


@pytest.mark.parametrize("place", ["resident", "host", "disk"])
def test_a_model_with_a_weight_that_never_had_a_gradient_resumes(
    make_trainer, make_batch, tmp_path, monkeypatch, place
):
    def build_with_one_unused(*args, **kwargs):
        policy = build(*args, **kwargs)
        policy.model.unused = torch.nn.Parameter(torch.ones(3))
        return policy

    monkeypatch.setattr(worker, "build", build_with_one_unused)
    fields = {"optimizer_state": place, "weight_decay": 0.1}
    trainer = make_trainer(**fields)
    trainer.step(make_batch())
    assert not any("unused" in key for key in trainer._worker.masters.moments())
    trainer.save(tmp_path / "c")
    resumed = make_trainer(seed=9, **fields)
    resumed.step(make_batch())
    resumed.load(tmp_path / "c")
    for _ in range(2):
        assert resumed.step(make_batch()).metrics == trainer.step(make_batch()).metrics
    assert_same(trainer._worker.masters.named, resumed._worker.masters.named)
    assert_same(trainer._worker.masters.moments(), resumed._worker.masters.moments())


def test_saving_weights_only_writes_the_same_model_and_nothing_else(
    make_trainer, make_batch, tmp_path
):
    trainer = make_trainer()
    trainer.step(make_batch())
    trainer.save(tmp_path / "whole")
    trainer.save(tmp_path / "weights", weights_only=True)
    assert [p.name for p in (tmp_path / "weights").iterdir()] == ["model"]
    for file in (tmp_path / "whole" / "model").iterdir():
        assert (tmp_path / "weights" / "model" / file.name).read_bytes() == file.read_bytes()


def test_weights_only_takes_model_and_version_and_begins_a_stage(
    make_trainer, make_batch, tokens, tmp_path
):
    trainer = make_trainer(warmup_steps=2)
    trainer.logprobs(tokens, "reference")
    for _ in range(3):
        trainer.step(make_batch())
    trainer.save(tmp_path)
    fresh = make_trainer(seed=5, warmup_steps=2)
    fresh.step(make_batch())
    fresh.load(tmp_path, weights_only=True)
    assert fresh.version == 3
    assert_same(weights(trainer), weights(fresh))
    assert (fresh.logprobs(tokens, "reference") == trainer.logprobs(tokens, "current")).all()
    update = fresh.step(make_batch())
    assert update.version == 4
    assert update.metrics["lr"] == 0.0005
    assert not fresh._worker.masters.moments()["model.norm.weight:step"] > 1


def test_saved_model_loads_with_transformers(make_trainer, make_batch, tmp_path):
    trainer = make_trainer()
    trainer.step(make_batch())
    trainer.save(tmp_path)
    assert json.loads((tmp_path / "model/config.json").read_text())["dtype"] == "float32"
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    held = model.state_dict()
    for name, tensor in trainer.export():
        assert torch.equal(held[name], tensor), name


def test_large_models_are_written_in_several_files(make_trainer, tmp_path, monkeypatch):
    monkeypatch.setattr(state, "SHARD_BYTES", 20_000)
    trainer = make_trainer()
    trainer.save(tmp_path)
    assert len(list((tmp_path / "model").glob("model-*-of-*.safetensors"))) > 2
    assert not (tmp_path / "model/model.safetensors").exists()
    other = make_trainer(seed=1)
    other.load(tmp_path)
    assert_same(weights(trainer), weights(other))
    held = AutoModelForCausalLM.from_pretrained(tmp_path / "model").state_dict()
    assert torch.equal(held["model.norm.weight"], weights(trainer)["model.norm.weight"])


def change(path, edit):
    held = load_file(path)
    edit(held)
    save_file(held, path, metadata={"format": "pt"})


def test_load_names_tensors_that_do_not_fit_and_changes_nothing(make_trainer, make_batch, tmp_path):
    trainer = make_trainer()
    trainer.step(make_batch())
    trainer.save(tmp_path / "good")
    file = "model/model.safetensors"
    norm, embedding = "model.norm.weight", "model.embed_tokens.weight"
    for edit, match in (
        (lambda held: held.pop(norm), "model.norm.weight is missing"),
        (lambda held: held.update(extra=torch.zeros(1)), "extra is extra"),
        (
            lambda held: held.update({embedding: held[embedding][:, :8].contiguous()}),
            r"embed_tokens.weight has shape \(264, 8\), not \(264, 32\)",
        ),
    ):
        shutil.rmtree(tmp_path / "bad", ignore_errors=True)
        shutil.copytree(tmp_path / "good", tmp_path / "bad")
        change(tmp_path / "bad" / file, edit)
        other = make_trainer(seed=1)
        before = weights(other)
        with pytest.raises(CheckpointError, match=match):
            other.load(tmp_path / "bad")
        assert_same(before, weights(other))
        assert other.version == 0


def test_load_names_files_that_are_damaged_or_missing(make_trainer, tmp_path):
    trainer = make_trainer()
    trainer.save(tmp_path)
    (tmp_path / "model/model.safetensors").write_bytes(b"half a file")
    with pytest.raises(CheckpointError, match=r"cannot read .*model/model.safetensors"):
        trainer.load(tmp_path)
    (tmp_path / "trainer/rank_0.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"cannot read .*trainer/rank_0.safetensors"):
        trainer.load(tmp_path)
    (tmp_path / "trainer/state.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"cannot read .*trainer/state.json"):
        trainer.load(tmp_path)


def test_load_refuses_another_format_or_number_of_ranks(make_trainer, tmp_path):
    trainer = make_trainer()
    trainer.save(tmp_path)
    path = tmp_path / "trainer/state.json"
    counters = json.loads(path.read_text())
    path.write_text(json.dumps({**counters, "world": 2}))
    with pytest.raises(CheckpointError, match="is of 2 ranks and cannot be read by 1"):
        trainer.load(tmp_path)
    trainer.load(tmp_path, weights_only=True)
    path.write_text(json.dumps({**counters, "format": 7}))
    with pytest.raises(CheckpointError, match="has format 7, not 1"):
        trainer.load(tmp_path)


def test_moments_that_do_not_fit_are_named(make_trainer, make_batch, tmp_path):
    trainer = make_trainer()
    trainer.step(make_batch())
    trainer.save(tmp_path)
    change(
        tmp_path / "trainer/rank_0.safetensors",
        lambda held: held.pop("optimizer/model.norm.weight:exp_avg"),
    )
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight:exp_avg is missing"):
        make_trainer().load(tmp_path)


def test_nothing_saved_can_run_code(make_trainer, make_batch, tmp_path):
    trainer = make_trainer()
    trainer.step(make_batch())
    trainer.save(tmp_path)
    kinds = {p.suffix for p in tmp_path.rglob("*") if p.is_file()}
    assert kinds == {".safetensors", ".json"}


def test_a_full_disk_is_a_checkpoint_error_with_the_files_name(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    try:
        with pytest.raises(CheckpointError, match=f"cannot write {tmp_path}/trainer/rank_0"):
            state.write_tensors(
                tmp_path / "trainer" / "rank_0.safetensors", {"a": torch.zeros(100_000)}
            )
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_directory_that_cannot_be_written_is_named(make_trainer, tmp_path):
    (tmp_path / "model").write_text("a file where a directory has to be")
    with pytest.raises(CheckpointError, match=r"cannot write .*model"):
        make_trainer().save(tmp_path)
