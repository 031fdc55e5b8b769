"""Time and memory of one trainer step: the default run's on a CPU, or any shape on a GPU.

    python tests/bench/train_step.py                        # 64 demonstrations, and 32 x 8 attempts
    python tests/bench/train_step.py --device cuda --precision bf16 --hidden 1024 --layers 28 \\
        --heads 16 --kv-heads 8 --head-dim 128 --intermediate 3072 --vocab 151936 \\
        --groups 16 --samples 8 --prompt 512 --new 512 --recompute

The CPU figure is CPU time of the process, which a busy machine disturbs less than the clock; the
GPU figure is wall-clock. Beside it stands a plain forward and backward pass of the same model in
transformers over padded rows, without log-probs, loss or optimizer.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from miles import Batch, Group, Sample, Settings, Span, Task, Trajectory
from miles.testing import context
from miles_plugins.algorithm.grpo import Grpo
from miles_plugins.algorithm.sft import Sft
from miles_plugins.model.qwen3 import Qwen3
from miles_plugins.precision.bf16 import Bf16
from miles_plugins.precision.fp16 import Fp16
from miles_plugins.precision.fp32 import Fp32
from miles_plugins.trainer.fsdp import Fsdp


def make_groups(args: argparse.Namespace, groups: int, samples: int, *, demo: bool) -> list[Group]:
    """Groups whose attempts share a prompt; lengths vary by a tenth around the given ones."""
    draw = np.random.default_rng(0)

    def length(mean: int) -> int:
        return max(1, mean + int(draw.integers(-mean // 10, mean // 10 + 1)))

    made = []
    for number in range(groups):
        prompt = draw.integers(0, args.vocab, length(args.prompt)).astype(np.int32)
        attempts = []
        for index in range(samples):
            own = draw.integers(0, args.vocab, length(args.new)).astype(np.int32)
            sampled = np.arange(len(prompt) + len(own)) >= len(prompt)
            logprobs = np.where(sampled, -np.log(args.vocab), 0).astype(np.float32)
            sample = Sample(
                tokens=np.concatenate([prompt, own]),
                sampled=sampled,
                trainable=sampled,
                logprobs=None if demo else logprobs,
                spans=(Span(start=len(prompt), stop=len(sampled), version=0),),
            )
            attempts.append(
                Trajectory(id=f"{number}/{index}", samples=(sample,), reward=float(index % 2))
            )
        task = Task(id=str(number), prompt="")
        made.append(Group(id=number, task=task, trajectories=tuple(attempts)))
    return made


def timed(work: Callable[[], object], args: argparse.Namespace) -> tuple[float, float]:
    """Quartile and median of milliseconds a call."""
    cuda = args.device == "cuda"
    clock = time.perf_counter if cuda else time.process_time
    found = []
    for _ in range(args.rounds + 3):
        if cuda:
            torch.cuda.synchronize()
        began = clock()
        work()
        if cuda:
            torch.cuda.synchronize()
        found.append((clock() - began) * 1e3)
    found = sorted(found[3:])
    return found[len(found) // 4], statistics.median(found)


def plain(trainer: Fsdp, batch: Batch, args: argparse.Namespace) -> Callable[[], object]:
    """A forward and backward pass of transformers' own model over padded rows."""
    config = Qwen3Config.from_dict(trainer._worker.context.model.hf_config())
    model = AutoModelForCausalLM.from_config(config).to(args.device)
    if args.precision != "fp32":
        model = model.to({"bf16": torch.bfloat16, "fp16": torch.float16}[args.precision])
    shape = len(batch.tokens.lengths), int(batch.tokens.lengths.max())
    tokens = torch.randint(0, args.vocab, shape, device=args.device)

    def work() -> None:
        model.base_model(input_ids=tokens).last_hidden_state.sum().backward()
        model.zero_grad()

    return work


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    sizes = {
        "hidden": 64, "layers": 2, "heads": 4, "kv-heads": 2, "head-dim": 16, "intermediate": 160,
        "vocab": 264, "groups": 32, "samples": 8, "prompt": 15, "new": 10, "rounds": 30,
        "micro-batch-tokens": 16384,
    }  # fmt: skip
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--precision", choices=("fp32", "bf16", "fp16"), default="fp32")
    parser.add_argument("--recompute", action="store_true")
    args = parser.parse_args()
    recipe = {"fp32": Fp32, "bf16": Bf16, "fp16": Fp16}[args.precision]
    with tempfile.TemporaryDirectory() as directory:
        around = context(directory, settings=Settings(max_new_tokens=args.new))
        shape = Qwen3.Config(
            hidden_size=args.hidden, layers=args.layers, heads=args.heads, kv_heads=args.kv_heads,
            head_dim=args.head_dim, intermediate_size=args.intermediate, vocab_size=args.vocab,
            max_len=2 * (args.prompt + args.new) + 64,
        )  # fmt: skip
        made = context(
            directory,
            settings=around.settings,
            model=Qwen3(shape, around),
            precision=recipe(recipe.Config(), around),
        )
        trainer = Fsdp(
            Fsdp.Config(
                lr=1e-4,
                device=args.device,
                micro_batch_tokens=args.micro_batch_tokens,
                activation_checkpointing=args.recompute,
            ),
            made,
        )
        rl = Grpo(Grpo.Config(), around).prepare(
            make_groups(args, args.groups, args.samples, demo=False), {}
        )
        sft = Sft(Sft.Config(), around).prepare(
            make_groups(args, 2 * args.groups, 1, demo=True), {}
        )
        for name, batch in (("sft", sft), ("grpo", rl)):
            if args.device == "cuda":
                torch.cuda.reset_peak_memory_stats()
            low, middle = timed(lambda batch=batch: trainer.step(batch), args)
            count = len(batch.tokens.tokens)
            line = f"{name}: {len(batch.tokens.lengths)} samples, {count} tokens: "
            line += f"quartile {low:.1f} ms, median {middle:.1f} ms"
            line += f", {count / middle * 1e3:.0f} tokens/s"
            if args.device == "cuda":
                line += f", peak {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB"
            else:
                low, middle = timed(plain(trainer, batch, args), args)
                line += f"; plain passes: quartile {low:.1f} ms, median {middle:.1f} ms"
            print(line)


if __name__ == "__main__":
    main()
