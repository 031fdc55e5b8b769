"""CPU seconds in which the embedded engine samples one RL step of the default run, and a small
group batch.

    python tests/bench/engine_speed.py [--repeats 15] [--json FILE] [--profile]

Batches of a random model of the default size (hidden 64, 2 layers, 264 tokens), one thread, fresh
weights loaded before each so that nothing is cached:

- `default run`: 32 prompts of about 16 tokens, 8 samples each, 8 new tokens, 256 rows;
  at most 100 ms;
- `small groups`: 8 prompts of about 16 tokens, 8 samples each, 16 new tokens, 64 rows;
  at most 40 ms.

The figure is the best CPU time of the whole process, asyncio included: the least disturbed one on a
busy machine. `publish` is the wall-clock in which the memory transport moves that model from a
trainer to an engine, all three in this process; at most 10 ms.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import json
import pstats
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from miles import Context, Request, Sampling
from miles.testing import FakeHandle
from miles_plugins.engine.torch import Torch
from miles_plugins.model.build import causal_lm
from miles_plugins.model.qwen3 import Qwen3
from miles_plugins.precision.fp32 import Fp32
from miles_plugins.transport.memory import Memory

BATCHES = (("default run", 32, 8, 8, 256, 0.100), ("small groups", 8, 8, 16, 64, 0.040))
PUBLISH_LIMIT_S = 0.010


class Source:
    """What the transport needs of a trainer."""

    def __init__(self, weights: Sequence[tuple[str, Any]]) -> None:
        self.weights = weights

    def export(self) -> Any:
        """The weights, as a stream."""
        return iter(self.weights)


def requests(prompts: int, samples: int, new: int) -> list[Request]:
    """`prompts` of 13 to 19 tokens, each asked for `samples` times with its own seed."""
    rng = np.random.default_rng(0)
    made = []
    for prompt in range(prompts):
        tokens = rng.integers(0, 256, int(rng.integers(13, 20))).astype(np.int32)
        for sample in range(samples):
            name = f"{prompt}.{sample}"
            sampling = Sampling(max_new_tokens=new)
            seed = prompt * samples + sample
            made.append(Request(id=name, key=name, tokens=tokens, sampling=sampling, seed=seed))
    return made


async def sample(engine: Torch, weights: Any, asked: Sequence[Request], repeats: int) -> float:
    """Best CPU seconds of a batch."""
    best = float("inf")
    for repeat in range(repeats):
        await engine.load(repeat, weights)
        begin = time.process_time()
        done = await asyncio.gather(*(engine.generate(r) for r in asked))
        best = min(best, time.process_time() - begin)
        sampled = sum(len(c.tokens) for c in done)
        expected = sum(r.sampling.max_new_tokens for r in asked)
        if sampled != expected:
            raise RuntimeError(f"{sampled} tokens were sampled, {expected} were asked for")
    return best


async def publish(transport: Memory, weights: Any, engine: Torch, repeats: int) -> float:
    """Best wall-clock seconds of a publish."""
    trainer = FakeHandle("trainer", {"sender": transport.sender(Source(weights))})
    engines = [FakeHandle("engine", {"receiver": transport.receiver(engine)})]
    receipts = [
        await transport.publish(1000 + i, trainer=trainer, engines=engines) for i in range(repeats)
    ]
    return min(receipt.seconds for receipt in receipts)


async def measure(repeats: int) -> dict[str, dict[str, float]]:
    """Every figure with its limit, in seconds."""
    torch.set_num_threads(1)
    result: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        context = Context(directory=Path(folder), precision=Fp32(Fp32.Config(), None))
        model = Qwen3(Qwen3.Config(), context)
        torch.manual_seed(0)
        module = causal_lm(model.hf_config(), None)
        weights = [(name, tensor.detach()) for name, tensor in module.named_parameters()]
        around = Context(directory=Path(folder), model=model, precision=context.precision)
        for name, prompts, samples, new, rows, limit in BATCHES:
            engine = Torch(Torch.Config(rows=rows, max_len=64), around)
            seconds = await sample(engine, weights, requests(prompts, samples, new), repeats)
            result[name] = {"seconds": seconds, "limit": limit}
        transport = Memory(Memory.Config(), around)
        seconds = await publish(transport, weights, engine, repeats)
        result["publish"] = {"seconds": seconds, "limit": PUBLISH_LIMIT_S}
    return result


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, judge."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", type=Path, help="write the result here as well")
    parser.add_argument("--profile", action="store_true", help="print where the time goes")
    args = parser.parse_args(argv)
    profile = cProfile.Profile()
    if args.profile:
        profile.enable()
    result = asyncio.run(measure(args.repeats))
    profile.disable()
    print(f"{'batch':<14} {'ms':>7} {'limit':>7}")
    for name, found in result.items():
        print(f"{name:<14} {found['seconds'] * 1e3:>7.1f} {found['limit'] * 1e3:>7.0f}")
    if args.profile:
        pstats.Stats(profile).sort_stats("tottime").print_stats(25)
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return int(any(found["seconds"] > found["limit"] for found in result.values()))


if __name__ == "__main__":
    raise SystemExit(main())
