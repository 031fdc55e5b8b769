"""The fsdp trainer on one rank: its step against plain code, micro-batches, precision, mismatch,
reference."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from miles import ConfigError, PluginLoadError, Term, TrainerError, flatten
from miles.testing import make_sample
from miles_plugins.precision.bf16 import Bf16
from miles_plugins.trainer.fsdp.optimizer import learning_rate


def weights(trainer):
    return {name: tensor.clone() for name, tensor in trainer.export()}


def assert_same(one, two, **close):
    assert list(one) == list(two)
    for name in one:
        if close:
            torch.testing.assert_close(one[name], two[name], msg=name, **close)
        else:
            assert torch.equal(one[name], two[name]), name


def hugging_face(trainer):
    """The same model as plain transformers code in float64, one sequence at a time."""
    config = Qwen3Config.from_dict(trainer._worker.context.model.hf_config())
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").double()
    model.load_state_dict({k: v.double() for k, v in weights(trainer).items()}, strict=False)
    model.tie_weights()
    return model


def plain_logprobs(model, tokens, temperature=1.0):
    """(T,) float64 with gradient."""
    rows = np.split(tokens.tokens.astype(np.int64), np.cumsum(tokens.lengths)[:-1])
    parts = []
    for row in map(torch.from_numpy, rows):
        full = (model(input_ids=row[None]).logits[0] / temperature).log_softmax(-1)
        parts += [torch.zeros(1).double(), full[:-1].gather(1, row[1:, None])[:, 0]]
    return torch.cat(parts)


def test_step_equals_plain_adamw_over_one_sequence_at_a_time(make_trainer, make_batch):
    fields = {"lr": 0.01, "weight_decay": 0.1, "grad_clip": 0.5, "betas": (0.8, 0.9)}
    trainer = make_trainer(temperature=0.7, **fields)
    model = hugging_face(trainer)
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
        lr=0.01,
        betas=(0.8, 0.9),
    )
    batch = make_batch()
    for _ in range(3):
        loss = -(
            plain_logprobs(model, batch.tokens, 0.7)
            @ torch.from_numpy(batch.terms[0].weights).double()
        )
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        metrics = trainer.step(batch).metrics
        assert metrics["loss/nll"] == pytest.approx(loss.item(), rel=1e-5)
        assert metrics["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
    expected = model.state_dict()
    for name, tensor in trainer.export():
        torch.testing.assert_close(tensor.double(), expected[name], rtol=1e-3, atol=2e-5, msg=name)


def test_logprobs_equal_plain_ones_in_sample_order(make_trainer, tokens):
    trainer = make_trainer(temperature=1.3, micro_batch_tokens=16)
    expected = plain_logprobs(hugging_face(trainer), tokens, 1.3).detach().numpy()
    found = trainer.logprobs(tokens, "current")
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, atol=2e-5)


@pytest.mark.parametrize("budget", [1, 12, 20])
def test_micro_batches_change_nothing_but_rounding(make_trainer, make_batch, budget):
    one, cut = make_trainer(), make_trainer(micro_batch_tokens=budget)
    batch = make_batch()
    for _ in range(2):
        a, b = one.step(batch).metrics, cut.step(batch).metrics
        assert a["loss/nll"] == pytest.approx(b["loss/nll"], rel=1e-6)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-5)
    assert_same(weights(one), weights(cut), rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("budget", [30, 1000])
def test_sharing_prompts_changes_nothing_but_rounding(make_trainer, make_batch, budget):
    made = [make_sample(5, 2 + i % 3, seed=i % 4) for i in range(12)]
    prompts = [made[i % 4].tokens[:5] for i in range(12)]
    samples = [
        replace(s, tokens=np.concatenate([p, s.tokens[5:]]))
        for s, p in zip(made, prompts, strict=True)
    ]
    tokens = flatten(samples)
    trainers = [
        make_trainer(share_prompts=share, micro_batch_tokens=budget) for share in (True, False)
    ]
    packed = [sum(len(p.source) for p in t._worker._pieces(tokens)) for t in trainers]
    # nothing comes after a sample's last token, which is therefore never computed
    assert packed[0] < packed[1] == len(tokens.tokens) - len(tokens.lengths)
    one, two = (t.logprobs(tokens, "current") for t in trainers)
    np.testing.assert_allclose(one, two, atol=1e-5)
    a, b = (t.step(make_batch(tokens=tokens)).metrics for t in trainers)
    assert a["loss/nll"] == pytest.approx(b["loss/nll"], rel=1e-6)
    assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-5)
    assert a["tokens/trained"] == b["tokens/trained"]


@pytest.mark.parametrize("share", [True, False])
def test_shortest_samples_have_plain_logprobs(make_trainer, share):
    """A lone token, a prompt with nothing after it, and longer samples that begin with it."""
    prompt = np.arange(5, dtype=np.int32) + 40
    rows = [prompt[:1], prompt, np.append(prompt, 7), np.append(prompt, [8, 9, 10, 11]), prompt[:1]]
    lengths = np.array([len(row) for row in rows])
    flat = flatten([make_sample(1, int(lengths.sum()) - 1, seed=0)])
    places = np.concatenate([np.arange(n) for n in lengths])
    tokens = replace(
        flat,
        tokens=np.concatenate(rows).astype(np.int32),
        lengths=lengths.astype(flat.lengths.dtype),
        sampled=places >= len(prompt),
        trainable=places >= len(prompt),
    )
    trainer = make_trainer(share_prompts=share)
    expected = plain_logprobs(hugging_face(trainer), tokens).detach().numpy()
    np.testing.assert_allclose(trainer.logprobs(tokens, "current"), expected, atol=2e-5)


def test_activation_checkpointing_changes_nothing(make_trainer, make_batch):
    one, two = make_trainer(), make_trainer(activation_checkpointing=True)
    recomputed = []
    block = two._worker.policy.blocks()[0]
    block.mlp.register_forward_pre_hook(lambda *_: recomputed.append(1))
    for trainer in (one, two):
        trainer.step(make_batch())
    assert len(recomputed) == 2
    assert_same(weights(one), weights(two))


def test_one_seed_gives_one_model_and_another_another(make_trainer):
    assert_same(weights(make_trainer(seed=3)), weights(make_trainer(seed=3)))
    embedding = "model.embed_tokens.weight"
    other = weights(make_trainer(seed=4))[embedding]
    assert not torch.equal(weights(make_trainer(seed=3))[embedding], other)


def test_export_has_a_tied_head_once_and_an_untied_one_too(make_trainer):
    assert "lm_head.weight" not in weights(make_trainer())
    names = list(weights(make_trainer(model={"hidden_size": 32, "tied": False})))
    assert names[-1] == "lm_head.weight"
    assert names[0] == "model.embed_tokens.weight"


def test_terms_of_any_plugin_add_up_with_their_weights(make_trainer, make_batch, tokens):
    """Two terms, one with inputs that are not a number where it does not apply."""
    half = np.where(np.arange(len(tokens.tokens)) % 2, tokens.trainable, 0).astype(np.float32)
    inputs = {"reference_logprobs": np.where(half, -2.0, np.nan).astype(np.float32)}
    kl = Term(name="kl", function="miles.learn.losses:kl_k2", weights=half, inputs=inputs)
    nll = Term(
        name="nll", function="miles.learn.losses:nll", weights=tokens.trainable * np.float32(0.5)
    )
    spread = Term(name="entropy", function="miles.learn.losses:entropy_bonus", weights=half)
    trainer = make_trainer()
    logprobs = trainer.logprobs(tokens, "current").astype(np.float64)
    metrics = trainer.step(make_batch(kl, nll, spread)).metrics
    picked = logprobs[half > 0]
    assert metrics["loss/kl"] == pytest.approx((0.5 * (picked + 2) ** 2).sum(), rel=1e-5)
    assert metrics["loss/nll"] == pytest.approx(-0.5 * logprobs[tokens.trainable].sum(), rel=1e-5)
    # a fresh model is all but uniform over 264 tokens
    assert metrics["entropy"] == pytest.approx(np.log(264), abs=0.05)
    assert metrics["loss/entropy"] == pytest.approx(-np.log(264) * len(picked), rel=0.01)
    assert metrics["tokens/trained"] == tokens.trainable.sum()


def test_bf16_keeps_float32_masters(make_trainer, make_batch):
    """Updates far below a bfloat16's last digit still add up."""
    trainer = make_trainer(precision="bf16", lr=1e-6, eps=1e-12)
    worker = trainer._worker
    before = {name: m.detach().clone() for name, m in worker.masters.named.items()}
    batch = make_batch(tokens=replace(make_batch().tokens, logprobs=None))
    for _ in range(20):
        trainer.step(batch)
    name = "model.layers.0.mlp.up_proj.weight"
    master = worker.masters.named[name]
    assert master.dtype == torch.float32
    moved = (master - before[name]).abs().max().item()
    assert 5e-6 < moved < 2.1e-5
    model = dict(worker.policy.model.named_parameters())
    assert model[name].dtype == torch.bfloat16
    assert torch.equal(model[name], master.bfloat16())
    assert all(tensor.dtype == torch.bfloat16 for _, tensor in trainer.export())


def test_bf16_accumulates_micro_batches_in_float32(make_trainer, make_batch):
    batch = make_batch(tokens=replace(make_batch().tokens, logprobs=None))
    exact = make_trainer().step(batch).metrics["grad_norm"]
    for budget in (1, 1000):
        trainer = make_trainer(precision="bf16", micro_batch_tokens=budget)
        assert trainer.step(batch).metrics["grad_norm"] == pytest.approx(exact, rel=0.03)


def test_bf16_with_activation_checkpointing_trains(make_trainer, make_batch):
    batch = make_batch(tokens=replace(make_batch().tokens, logprobs=None))
    one, two = (make_trainer(precision="bf16", activation_checkpointing=a) for a in (False, True))
    for trainer in (one, two):
        trainer.step(batch)
    assert_same(weights(one), weights(two))


def test_finer_roundings_bring_bf16_nearer_to_float32(make_trainer, make_batch):
    """Of one set of weights: first the logits, then the sums of layers too; and it trains."""
    model = {"hidden_size": 32, "intermediate_size": 48, "layers": 8, "init_std": 0.5}
    tokens = flatten([make_sample(2, 200, seed=i) for i in range(6)])
    plain = make_trainer(precision="bf16", model=model)
    rounded = dict(plain.export())
    exact = make_trainer(model=model)
    for name, parameter in exact._worker.policy.model.named_parameters():
        parameter.data.copy_(rounded[name])
    wanted = exact.logprobs(tokens, "current")
    gaps = []
    for rounding in ({}, {"logits": "float32"}, {"logits": "float32", "residual": "float32"}):
        trainer = make_trainer(
            precision=Bf16.Config(**rounding), model=model, activation_checkpointing=True
        )
        gaps.append(np.abs(trainer.logprobs(tokens, "current") - wanted).mean())
        trainer.step(make_batch(tokens=replace(tokens, logprobs=None)))
        assert trainer._worker.policy.wide == ("logits" in rounding)
    assert gaps[1] < gaps[0]
    assert gaps[2] < 0.9 * gaps[1]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_term_that_is_not_finite_is_named_and_leaves_the_weights(
    make_trainer, make_batch, tokens, bad
):
    trainer = make_trainer()
    before = weights(trainer)
    inputs = {"reference_logprobs": np.full(len(tokens.tokens), bad, np.float32)}
    nll = make_batch().terms[0]
    kl = Term(name="kl", function="miles.learn.losses:kl_k2", weights=nll.weights, inputs=inputs)
    with pytest.raises(
        TrainerError, match=r"loss term 'kl' is (nan|inf) in the step from version 0"
    ):
        trainer.step(make_batch(nll, kl))
    assert_same(before, weights(trainer))
    assert trainer.version == 0


def test_a_gradient_that_is_not_finite_is_refused(make_trainer, make_batch):
    trainer = make_trainer()
    before = weights(trainer)
    handle = trainer._worker.masters.trained["model.norm.weight"].register_hook(
        lambda g: g * np.inf
    )
    with pytest.raises(
        TrainerError, match=r"the gradient is (inf|nan) .*model.norm.weight.*; loss terms: nll"
    ):
        trainer.step(make_batch())
    handle.remove()
    assert_same(before, weights(trainer))
    assert trainer.step(make_batch()).version == 1


def test_terms_that_cannot_run_are_refused_in_words(make_trainer, make_batch, tokens):
    weight = tokens.trainable.astype(np.float32)
    for function, error, match in (
        (
            "miles.learn.losses:nowhere",
            PluginLoadError,
            "loss term 'x'.*miles.learn.losses:nowhere",
        ),
        ("no.such.module:f", PluginLoadError, "cannot import 'no.such.module:f'"),
        ("torch:mean", TypeError, "mean"),
    ):
        trainer = make_trainer()
        with pytest.raises(error, match=match):
            trainer.step(
                make_batch(*make_batch().terms, Term(name="x", function=function, weights=weight))
            )
        expected = make_trainer().step(make_batch()).metrics
        assert trainer.step(make_batch()).metrics == expected


# ---------------------------------------------------------------- mismatch


def shifted(trainer, tokens, shift, *, version=0):
    """The trainer's own log-probs, `shift` lower on the third sampled token, as the rollout's."""
    own = trainer.logprobs(tokens, "current")
    moved = np.where(tokens.sampled, own, 0).astype(np.float32)
    moved[np.flatnonzero(tokens.sampled)[2]] -= shift
    versions = np.where(tokens.sampled, version, -1).astype(np.int32)
    return replace(tokens, logprobs=moved, versions=versions)


def test_mismatch_is_nothing_for_its_own_logprobs(make_trainer, make_batch, tokens):
    trainer = make_trainer(micro_batch_tokens=20)
    update = trainer.step(make_batch(tokens=shifted(trainer, tokens, 0)))
    assert update.warnings == ()
    assert update.metrics["mismatch/logprob_abs_max"] < 1e-5
    assert update.metrics["mismatch/tokens"] == tokens.sampled.sum()
    assert "mismatch/unmeasured" not in update.metrics


def test_mismatch_over_the_budget_warns(make_trainer, make_batch, tokens):
    trainer = make_trainer()
    update = trainer.step(make_batch(tokens=shifted(trainer, tokens, 0.5)))
    assert any("largest log-prob difference" in text for text in update.warnings)
    assert update.metrics["mismatch/logprob_abs_max"] == pytest.approx(0.5, abs=1e-4)
    assert update.version == 1


def test_mismatch_fail_refuses_the_step_and_leaves_the_weights(make_trainer, make_batch, tokens):
    trainer = make_trainer(on_mismatch="fail", mismatch_max=0.4)
    before = weights(trainer)
    with pytest.raises(
        TrainerError, match=r"largest log-prob difference .* is 0.5 nats, budget 0.4"
    ):
        trainer.step(make_batch(tokens=shifted(trainer, tokens, 0.5)))
    assert_same(before, weights(trainer))
    assert trainer.version == 0
    generous = make_trainer(on_mismatch="fail", mismatch_max=0.6, mismatch_mean=0.6)
    assert generous.step(make_batch(tokens=shifted(generous, tokens, 0.5))).version == 1


def test_mismatch_mask_trains_as_if_the_token_had_no_weight(make_trainer, make_batch, tokens):
    masking, expected = make_trainer(on_mismatch="mask"), make_trainer()
    batch = make_batch(tokens=shifted(masking, tokens, 0.5))
    update = masking.step(batch)
    assert update.metrics["mismatch/masked"] == 1
    assert update.metrics["tokens/trained"] == tokens.trainable.sum() - 1
    without = batch.terms[0].weights.copy()
    without[np.flatnonzero(tokens.sampled)[2]] = 0
    expected.step(make_batch(replace(batch.terms[0], weights=without), tokens=batch.tokens))
    assert_same(weights(masking), weights(expected), rtol=1e-5, atol=1e-7)


def test_old_tokens_are_off_policy_and_never_masked(make_trainer, make_batch, tokens):
    trainer = make_trainer(on_mismatch="mask")
    trainer.step(make_batch())
    metrics = trainer.step(make_batch(tokens=shifted(trainer, tokens, 0.5))).metrics
    assert metrics["mismatch/unmeasured"] == 1.0
    assert metrics["off_policy/lag_1/logprob_abs_max"] == pytest.approx(0.5, abs=1e-4)
    assert metrics["tokens/trained"] == tokens.trainable.sum()


# ---------------------------------------------------------------- reference, schedule, refusals


def test_reference_stays_where_the_stage_began(make_trainer, make_batch, tokens):
    trainer = make_trainer()
    first = trainer.logprobs(tokens, "reference")
    assert (first == trainer.logprobs(tokens, "current")).all()
    trainer.step(make_batch())
    moved = weights(trainer)
    assert (trainer.logprobs(tokens, "reference") == first).all()
    assert not (trainer.logprobs(tokens, "current") == first).all()
    assert_same(moved, weights(trainer))


def test_reference_is_refused_when_it_is_off_or_gone(make_trainer, make_batch, tokens):
    with pytest.raises(TrainerError, match=r"trainer\.reference is false"):
        make_trainer(reference=False).logprobs(tokens, "reference")
    late = make_trainer()
    late.step(make_batch())
    with pytest.raises(TrainerError, match="first asked for after 1 steps of the stage"):
        late.logprobs(tokens, "reference")
    with pytest.raises(TrainerError, match="'referenc': did you mean 'reference'"):
        late.logprobs(tokens, "referenc")


def test_learning_rate_warms_up_and_follows_its_schedule(make_trainer, make_batch):
    shape = {"peak": 2.0, "warmup": 4, "steps": 13, "min_ratio": 0.1}
    constant = [learning_rate(s, schedule="constant", **shape) for s in range(13)]
    assert constant == [0.5, 1.0, 1.5, *[2.0] * 10]
    cosine = [learning_rate(s, schedule="cosine", **shape) for s in range(14)]
    assert cosine[:5] == [0.5, 1.0, 1.5, 2.0, 2.0]
    assert cosine[8] == pytest.approx(1.1)
    assert cosine[12] == cosine[13] == pytest.approx(0.2)
    trainer = make_trainer(warmup_steps=2, schedule="cosine", steps=4)
    rates = [trainer.step(make_batch()).metrics["lr"] for _ in range(4)]
    assert rates == pytest.approx([0.0005, 0.001, 0.001, 0.0])


def test_greedy_sampling_is_trained_at_temperature_one(make_trainer, tokens):
    greedy, usual = make_trainer(temperature=0.0), make_trainer(temperature=1.0)
    assert (greedy.logprobs(tokens, "current") == usual.logprobs(tokens, "current")).all()


def test_config_refuses_impossible_numbers_all_at_once(make_trainer):
    with pytest.raises(
        ConfigError, match=r"lr is -1.*; micro_batch_tokens is 0; at least 1; workers is 0"
    ):
        make_trainer(lr=-1.0, micro_batch_tokens=0, workers=0)
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="device is cuda, but torch sees no GPU"):
            make_trainer(device="cuda")


def test_the_module_of_the_entry_point_imports_no_torch():
    code = (
        "import sys, miles_plugins.trainer.fsdp\n"
        "print({'torch', 'transformers'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_experts_of_samples_are_refused_and_not_ignored(make_trainer, make_batch, tokens):
    trainer = make_trainer()
    routed = replace(tokens, experts=np.zeros((len(tokens.tokens), 2, 1), np.uint8))
    before = weights(trainer)
    said = "6 samples carry the experts that an engine chose, and replaying them is not there yet"
    with pytest.raises(TrainerError, match=said):
        trainer.step(make_batch(tokens=routed))
    with pytest.raises(TrainerError, match=said):
        trainer.logprobs(routed, "current")
    assert_same(before, weights(trainer))
    assert trainer.version == 0
