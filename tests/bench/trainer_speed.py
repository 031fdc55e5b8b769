"""Tokens/s, MFU and memory of the fsdp trainer, and what eviction and streaming cost, on one GPU.

    python tests/bench/trainer_speed.py --size 1b                  # everything, on one H200
    python tests/bench/trainer_speed.py --size 1b --only speed --attention cudnn --json out.json
    torchrun --nproc-per-node 2 tests/bench/trainer_speed.py --size 1b --only speed
    python tests/bench/trainer_speed.py                            # a tiny model, on a CPU too

A random Qwen3-type model; a batch of `--tokens` tokens in samples that are packed end to end. Each
measurement is one JSON line on stdout, and one sentence before it; `--json` collects them.
The clock is the wall's; a step is loss, backward pass and AdamW. MFU counts matrix products and
causal attention, never recomputation (`miles_plugins.trainer.fsdp.speed`).
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from miles import Batch, Settings, Term, Tokens
from miles.testing import context
from miles_plugins.model.qwen3 import Qwen3
from miles_plugins.precision.bf16 import Bf16
from miles_plugins.precision.fp16 import Fp16
from miles_plugins.trainer.fsdp import Fsdp

SIZES: dict[str, dict[str, int]] = {
    "tiny": {
        "hidden_size": 64, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 16,
        "intermediate_size": 160, "vocab_size": 264,
    },
    "1b": {  # 1.02 B parameters, of which 311 M are the tied embedding
        "hidden_size": 2048, "layers": 14, "heads": 16, "kv_heads": 8, "head_dim": 128,
        "intermediate_size": 6144, "vocab_size": 151936,
    },
}  # fmt: skip
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA starts
PEAK = 989.0
"""Dense bfloat16 TFLOP/s of one H200."""

FINER = ("logits", "residual")
"""Keys of a recipe: where it may round finer."""


class Bench:
    """Makes trainers and batches, and writes down what was measured."""

    def __init__(self, args: argparse.Namespace, directory: str) -> None:
        self.args, self.directory = args, directory
        self.found: list[dict[str, Any]] = []
        self.cuda = torch.cuda.is_available()
        finer = {part: getattr(args, part) for part in FINER if getattr(args, part)}
        self.recipe = {"bf16": Bf16, "fp16": Fp16}[args.precision]
        self.rounding = self.recipe.Config(**finer)
        self.rank, self.world = (int(os.environ.get(k, d)) for k, d in RANK)

    def trainer(self, longest: int, **fields: Any) -> Fsdp:
        """A trainer whose first weights are the same every time."""
        settings = Settings()
        around = context(self.directory, settings=settings)
        model = Qwen3.Config(**SIZES[self.args.size], max_len=max(512, longest), init_std=0.02)
        master = f"127.0.0.1:{os.environ.get('MASTER_PORT', '29500')}" if self.world > 1 else ""
        if master and "TORCHELASTIC_RUN_ID" in os.environ:
            master = "env://"
        config = {
            "lr": 1e-4,
            "weight_decay": 0.1,
            "device": "cuda" if self.cuda else "cpu",
            "micro_batch_tokens": self.args.micro_batch_tokens,
            "attention": self.args.attention,
            "compile": self.args.compile,
            "activation_checkpointing": self.args.recompute,
            "peak_tflops": PEAK,
            "workers": self.world,
        }
        return Fsdp(
            Fsdp.Config(**{**config, **fields}),
            context(
                self.directory,
                settings=settings,
                rank=self.rank,
                world=self.world,
                master=master,
                model=Qwen3(model, around),
                precision=self.recipe(self.rounding, around),
            ),
        )

    def batch(self, length: int) -> Batch:
        """Samples of `length` tokens, about as many as fill `--tokens` a rank, all but their first
        tokens trained on."""
        count = max(1, self.args.tokens * self.world // length)
        draw = np.random.default_rng(0)
        total = count * length
        vocab = SIZES[self.args.size]["vocab_size"]
        sampled = np.arange(total) % length > 0
        tokens = Tokens(
            tokens=draw.integers(0, vocab, total).astype(np.int32),
            lengths=np.full(count, length, np.int32),
            sampled=sampled,
            trainable=sampled,
            versions=np.where(sampled, 0, -1).astype(np.int32),
            logprobs=None,
        )
        weights = (sampled / sampled.sum()).astype(np.float32)
        nll = Term(name="nll", function="miles.learn.losses:nll", weights=weights)
        return Batch(tokens=tokens, terms=(nll,))

    def tell(self, name: str, **values: Any) -> None:
        """Print and keep one measurement."""
        self.found.append({"what": name, **values})
        if self.rank == 0:
            print(f"{name}: " + ", ".join(f"{k} {_plain(v)}" for k, v in values.items()))
            print(json.dumps(self.found[-1]), flush=True)

    def now(self) -> float:
        """The clock, after everything that was started has ended."""
        if self.cuda:
            torch.cuda.synchronize()
        return time.perf_counter()

    def memory(self) -> int:
        """Bytes in use on the device; on a CPU unknown, 0."""
        return torch.cuda.memory_allocated() if self.cuda else 0


RANK = (("RANK", "0"), ("WORLD_SIZE", "1"))


def _plain(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def speed(bench: Bench) -> None:
    """Tokens/s and MFU of packed samples of each length."""
    for length in bench.args.lengths:
        trainer = bench.trainer(length)
        batch = bench.batch(length)
        steps: list[Any] = []
        if bench.cuda:
            torch.cuda.reset_peak_memory_stats()
        for number in range(bench.args.warmup + bench.args.steps):
            metrics = trainer.step(batch).metrics
            if number >= bench.args.warmup:
                steps.append(metrics)
        middle = {
            name: statistics.median(m[f"trainer/{name}"] for m in steps)
            for name in ("tokens_per_s", "tflops", "mfu")
        }
        bench.tell(
            f"train, packed {length}",
            samples=len(batch.tokens.lengths),
            **middle,
            attention=trainer._worker.way,
            compile=bench.args.compile,
            world=bench.world,
            peak_gb=torch.cuda.max_memory_allocated() / 1e9 if bench.cuda else 0.0,
        )
        del trainer
        _clear(bench)


def logprob_pass(bench: Bench) -> None:
    """Memory and speed of a pass for log-probs alone, against what whole logits would take."""
    length = bench.args.lengths[0]
    trainer, batch = bench.trainer(length), bench.batch(length)
    trainer.logprobs(batch.tokens, "current")
    if bench.cuda:
        torch.cuda.reset_peak_memory_stats()
    before, began = bench.memory(), bench.now()
    trainer.logprobs(batch.tokens, "current")
    seconds = bench.now() - began
    peak = torch.cuda.max_memory_allocated() - before if bench.cuda else 0
    count = len(batch.tokens.tokens)
    row = min(count, max(length, bench.args.micro_batch_tokens))
    bench.tell(
        "log-prob pass",
        tokens_per_s=count / seconds,
        peak_bytes_above_weights=peak,
        whole_float32_logits_bytes=row * SIZES[bench.args.size]["vocab_size"] * 4,
    )
    del trainer
    _clear(bench)


def digest(trainer: Fsdp) -> dict[str, int]:
    """A checksum of every weight, copy of the model's and moment, which a changed bit changes: the
    sum of its words, each times an odd number of its place, modulo 2^64."""
    worker = trainer._worker
    parts = {**worker.masters.named, **worker.masters.moments()}
    parts |= {f"copy/{n}": p for n, p in worker.policy.named_parameters()}
    found = {}
    for name, part in parts.items():
        part = part.detach()
        part = part.to_local() if hasattr(part, "to_local") else part
        words = part.contiguous().view(-1).view({2: torch.int16, 4: torch.int32}[part.itemsize])
        total = 0
        for start in range(0, len(words), CHUNK):
            piece = words[start : start + CHUNK].to(worker.ranks.device).long()
            place = torch.arange(start, start + len(piece), device=piece.device)
            total += int((piece * (2 * place + 1)).sum())
        found[name] = total % 2**64
    return found


CHUNK = 1 << 25
"""Words of a checksum at a time."""


def eviction(bench: Bench) -> None:
    """Bytes that a sleep frees, seconds each way, and whether every bit comes back."""
    length = bench.args.lengths[0]
    for kept in ("resident", "host"):
        trainer = bench.trainer(length, optimizer_state=kept, sleep_to="host")
        batch = bench.batch(length)
        trainer.step(batch)
        before = digest(trainer)
        for turn in ("first", "second"):  # the first one also locks the host memory
            held, began = bench.memory(), bench.now()
            trainer.sleep()
            slept, left = bench.now() - began, bench.memory()
            moved = trainer._worker.meter.left.bytes
            began = bench.now()
            trainer.wake()
            woke = bench.now() - began
            bench.tell(
                f"eviction, state {kept}, {turn}",
                bytes_moved=moved,
                device_bytes_before=held,
                device_bytes_asleep=left,
                sleep_s=slept,
                wake_s=woke,
                same_bits=digest(trainer) == before,
            )
        trainer.step(batch)  # and it goes on
        del trainer
        _clear(bench)


def streaming(bench: Bench) -> None:
    """Device bytes and step time with optimizer state elsewhere, and whether the bits are those of
    the resident optimizer. Kernels that add up in any order are off, or two resident runs would
    differ: the second one shows that they do not."""
    torch.use_deterministic_algorithms(True)
    length, expected = bench.args.lengths[0], None
    for kept in ("resident", "resident", "host", "disk"):
        before = bench.memory()
        trainer = bench.trainer(length, optimizer_state=kept)
        batch, seconds, streamed = bench.batch(length), [], []
        for _ in range(3):
            began = bench.now()
            metrics = trainer.step(batch).metrics
            seconds.append(bench.now() - began)
            streamed.append(metrics.get("trainer/streaming_s", 0.0))
        found = digest(trainer)
        expected = expected or found
        bench.tell(
            f"streaming, state {kept}",
            device_bytes=bench.memory() - before,
            step_s=min(seconds),
            streaming_s=min(streamed),
            bytes_streamed=int(metrics.get("trainer/streamed_bytes", 0)),
            same_bits=found == expected,
        )
        del trainer
        _clear(bench)
    torch.use_deterministic_algorithms(False)


def _clear(bench: Bench) -> None:
    gc.collect()
    if bench.cuda:
        torch.cuda.empty_cache()
        torch._dynamo.reset()


PARTS = {"speed": speed, "logprobs": logprob_pass, "eviction": eviction, "streaming": streaming}


def main() -> None:
    """Measure what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--only", choices=PARTS, nargs="*", default=list(PARTS))
    parser.add_argument("--lengths", type=int, nargs="*", default=None)
    parser.add_argument("--tokens", type=int, default=None, help="of a batch, a rank")
    parser.add_argument("--micro-batch-tokens", type=int, default=None)
    parser.add_argument("--attention", default="auto")
    parser.add_argument("--compile", choices=("none", "layers"), default=None)
    parser.add_argument("--recompute", action="store_true", help="checkpoint activations")
    parser.add_argument("--precision", choices=("bf16", "fp16"), default="bf16")
    for part in FINER:
        kinds = ("bfloat16", "float16", "float32")
        parser.add_argument(f"--{part}", choices=kinds, help="rounded to, else the recipe's")
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()
    large = args.size != "tiny"
    args.lengths = args.lengths or ([4096, 32768] if large else [16, 64])
    args.tokens = args.tokens or (65536 if large else 256)
    args.micro_batch_tokens = args.micro_batch_tokens or (16384 if large else 128)
    args.compile = args.compile or ("layers" if large else "none")
    with tempfile.TemporaryDirectory() as directory:
        bench = Bench(args, directory)
        device = torch.cuda.get_device_name() if bench.cuda else "cpu"
        bench.tell("machine", device=device, torch=torch.__version__, size=args.size)
        for name in args.only:
            PARTS[name](bench)
    if args.json and bench.rank == 0:
        args.json.write_text(json.dumps(bench.found, indent=2) + "\n", encoding="utf-8")
    wrong = [m["what"] for m in bench.found if m.get("same_bits") is False]
    if wrong:
        sys.exit(f"other bits: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
