"""What one single-turn trajectory costs in the process that holds the conversation: prompt, turn,
sample, with an engine that answers at once.

    python tests/bench/conversation_cost.py [--rounds N]

Prints the best of several rounds, in microseconds a trajectory, for a demonstration of raw text
(supervised fine-tuning) and for a sampled answer to chat messages (single-turn RL); then, of a
session of 100 turns and 100,000 tokens, what its 10th and its 100th turn cost (medians of the nine
turns up to there, the best of the rounds), and its bytes by tracemalloc.

Limits: the 100th commit at most 1.5 times the 10th; at most 16 bytes a token and 2 kB a turn.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
import tracemalloc
from pathlib import Path

import numpy as np

from miles import Completion, Context, Sampling, Span
from miles.session import Session, SessionConversation
from miles.testing import FakeTito
from miles_plugins.tito.bytes import Bytes

TITO = Bytes(Bytes.Config(), Context(directory=Path()))
SAMPLING = Sampling(max_new_tokens=64, stop_ids=TITO.stop_ids)
EACH = 100


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


def long_session() -> tuple[Session, np.ndarray]:
    """A session of 100 turns and 100,000 tokens, and (turns, 2) seconds that its prompts and its
    commits took."""
    talk, times = Session("long", FakeTito()), []
    for turn in range(100):
        messages = [{"role": "user", "content": f"{turn:04d}" + "p" * 935}]
        ids = np.full(40, 115, np.int32)
        said = Completion(
            tokens=ids,
            logprobs=np.full(40, -0.5, np.float32),
            spans=(Span(start=0, stop=40, version=0),),
            finish="stop",
        )
        begun = time.perf_counter()
        prompt = talk.prompt(messages, append=True)
        prompted = time.perf_counter()
        talk.commit(prompt, said)
        times.append((prompted - begun, time.perf_counter() - prompted))
    return talk, np.array(times)


def report_long(rounds: int) -> bool:
    """Print what a long session costs; whether that is within the limits."""
    best = np.min([long_session()[1] for _ in range(rounds)], axis=0)  # (turns, 2)
    for column, name in enumerate(("prompt", "commit")):
        tenth, last = np.median(best[2:11, column]), np.median(best[91:, column])
        ratio = last / tenth
        print(f"{name}: {tenth * 1e6:.1f} µs at turn 10, {last * 1e6:.1f} at 100 ({ratio:.2f}x)")
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    talk, _ = long_session()
    taken = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    print(f"memory: {taken:,} bytes for {talk.tokens:,} tokens in {talk.turns} turns")
    return bool(ratio <= 1.5 and taken <= 16 * talk.tokens + 2000 * talk.turns)


def main() -> int:
    """Measure, print, judge."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=200)
    rounds = parser.parse_args().rounds
    chat = ({"role": "user", "content": "12+7="},)
    for name, samples, prompt in (("demonstration", False, "12+7="), ("chat", True, chat)):
        engine = Instant(samples=samples)
        best = min(asyncio.run(play(SessionConversation, engine, prompt)) for _ in range(rounds))
        print(f"{name}: {best * 1e6:.1f} µs a trajectory")
    return 0 if report_long(rounds) else 1


if __name__ == "__main__":
    sys.exit(main())
