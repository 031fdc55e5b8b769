"""What one single-turn trajectory costs in the process that holds the conversation: prompt, turn,
sample, with an engine that answers at once.

    python tests/bench/conversation_cost.py [--rounds N]

Prints the best of several rounds, in microseconds a trajectory, for a demonstration of raw text
(supervised fine-tuning) and for a sampled answer to chat messages (single-turn RL).
"""

from __future__ import annotations

import argparse
import asyncio
import time
from pathlib import Path

import numpy as np

from miles import Completion, Context, Sampling, Span
from miles.session import SessionConversation
from miles_plugins.tito.bytes import Bytes

TITO = Bytes(Bytes.Config(), Context(directory=Path()))
SAMPLING = Sampling(max_new_tokens=64, stop_ids=TITO.stop_ids)
EACH = 2000


class Instant:
    """Says the same at once."""

    def __init__(self, *, samples: bool) -> None:
        self.samples = samples
        ids = np.array([*b"nineteen", 258], np.int32)
        logprobs = np.full(len(ids), -0.5, np.float32) if samples else None
        spans = (Span(start=0, stop=len(ids), version=3),)
        self.said = Completion(tokens=ids, logprobs=logprobs, spans=spans, finish="stop")

    async def generate(self, request):  # type: ignore[no-untyped-def]
        return self.said


async def play(cls: type, engine: Instant, prompt: object) -> float:
    """Seconds a trajectory, over `EACH` of them."""
    begun = time.perf_counter()
    for index in range(EACH):
        talk = cls(
            key=f"g{index}.0", tito=TITO, engine=engine, sampling=SAMPLING, seed=index,
            solution=None if engine.samples else "nineteen", max_len=2048,
        )  # fmt: skip
        await talk.turn(prompt)
        talk.trajectory(reward=1.0)
    return (time.perf_counter() - begun) / EACH


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    chat = ({"role": "user", "content": "12+7="},)
    for name, samples, prompt in (("demonstration", False, "12+7="), ("chat", True, chat)):
        engine = Instant(samples=samples)
        best = min(asyncio.run(play(SessionConversation, engine, prompt)) for _ in range(rounds))
        print(f"{name}: {best * 1e6:.1f} µs a trajectory")


if __name__ == "__main__":
    main()
