"""What every transport must do: bring all weights to every engine bit for bit, or say that it did
not.

Bandwidth and placement are its own tests' business; the suite holds both halves in this process.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from miles.batch import Receipt
from miles.errors import MilesError, WeightSyncError
from miles.testing.contract.case import Case, expect, raises
from miles.testing.handle import FakeHandle

SHARED_MEMORY = Path("/dev/shm")
_OTHERS_S = 2.0  # for what other programs put there to go again


class _Source:
    """A trainer that exports tensors of every awkward kind; a new version has new bits."""

    def __init__(self, version: int = 1) -> None:
        self.version = version

    def export(self) -> Iterator[tuple[str, Any]]:
        import torch

        generator = torch.Generator().manual_seed(self.version)
        wide = torch.randn(700, 1024, generator=generator)
        yield "wide.weight", wide
        yield "half.weight", wide[:3].to(torch.bfloat16)
        yield "turned.weight", wide[:6, :4].t()
        yield "one", wide[0, 0]
        yield "none.weight", wide[:0]
        yield "bytes", (wide[:5, :7] * 50).to(torch.int8)
        yield "odd.weight", wide[0, :3]
        yield "not.finite", torch.tensor([float("nan"), float("inf"), -0.0])


class _Sink:
    """An engine that keeps copies of what it is given, or refuses it."""

    samples = True

    def __init__(self) -> None:
        self.serving = -1
        self.weights: dict[str, Any] = {}
        self.refuses = False
        self.paused = 0

    async def load(self, version: int, weights: Iterable[tuple[str, Any]]) -> None:
        from miles.testing.contract import reference

        taken = reference.as_tensors(weights)
        if self.refuses:
            raise WeightSyncError("engine: these weights are refused on purpose")
        self.serving, self.weights = version, taken

    async def version(self) -> int:
        return self.serving

    async def pause(self) -> None:
        self.paused += 1

    async def resume(self) -> None:
        self.paused -= 1


class _Sides:
    """A transport in the driver, one trainer worker and engine workers, each with a transport of
    its own."""

    def __init__(self, case: Case, engines: int = 1) -> None:
        self.source = _Source()
        self.sinks = [_Sink() for _ in range(engines)]
        self.driver = case.build()
        self.trainer = FakeHandle(
            "trainer", {"trainer": self.source, "sender": case.build().sender(self.source)}
        )
        self.engines = [
            FakeHandle(f"engine-{i}", {"engine": sink, "receiver": case.build().receiver(sink)})
            for i, sink in enumerate(self.sinks)
        ]

    async def publish(self, version: int) -> Any:
        self.source.version = version
        return await self.driver.publish(version, trainer=self.trainer, engines=self.engines)

    def wanted(self) -> Mapping[str, Any]:
        from miles.testing.contract import reference

        return reference.as_tensors(self.source.export())


async def check_publish(case: Case) -> None:
    """Every tensor arrives at every engine with its name, type, shape and bits, in the trainer's
    order."""
    from miles.testing.contract import reference

    sides = _Sides(case, engines=2)
    for version in (1, 2, 5):
        receipt = await sides.publish(version)
        for index, sink in enumerate(sides.sinks):
            expect(sink.serving == version, f"engine {index} serves {sink.serving}, not {version}")
            reference.expect_same(sides.wanted(), sink.weights, f"weights on engine {index}")
            expect(sink.paused == 0, f"engine {index} was left paused")
        _expect_receipt(receipt, version, sides.wanted())


async def check_digest(case: Case) -> None:
    """A digest is the same for the same weights and differs where one bit does."""
    first, second = _Sides(case), _Sides(case)
    one, two = await first.publish(1), await second.publish(1)
    expect(one.digest == two.digest, "the same weights have different digests")
    three = await first.publish(2)
    expect(one.digest != three.digest, "different weights have the same digest")


async def check_refused(case: Case) -> None:
    """When an engine refuses, `publish` raises `WeightSyncError`; the old version stays, and a
    retry works."""
    from miles.testing.contract import reference

    sides = _Sides(case)
    await sides.publish(1)
    old = sides.wanted()
    sides.sinks[0].refuses = True
    with raises(WeightSyncError, "publishing to an engine that refuses"):
        await sides.publish(2)
    sink = sides.sinks[0]
    expect(sink.serving == 1, f"the engine serves {sink.serving} after a failed publish, not 1")
    reference.expect_same(old, sink.weights, "weights after a failed publish")
    sink.refuses = False
    await sides.publish(2)
    expect(sink.serving == 2, "a publish after a failed one did not arrive")


async def check_dead_worker(case: Case) -> None:
    """When a worker is gone, `publish` raises one of miles' errors and does not hang."""
    for role in ("trainer", "engine"):
        sides = _Sides(case)
        await sides.publish(1)
        handle = sides.trainer if role == "trainer" else sides.engines[0]
        handle.dead = True
        with raises(MilesError, f"publishing with a dead {role}"):
            await sides.publish(2)


async def check_leaves_nothing(case: Case) -> None:
    """After publishing, whether it worked or not, nothing is left in shared memory."""
    before = _shared()
    sides = _Sides(case, engines=2)
    for version, refuses in ((1, False), (2, True), (3, False)):
        sides.sinks[1].refuses = refuses
        try:
            await sides.publish(version)
        except WeightSyncError:
            expect(refuses, "a publish failed that nobody refused")
    del sides
    until = time.monotonic() + _OTHERS_S
    while (left := sorted(_shared() - before)) and time.monotonic() < until:
        await asyncio.sleep(0.05)  # other programs come and go there as well
    expect(not left, f"left in {SHARED_MEMORY}: {', '.join(left[:4])}")


async def check_carries_real_weights(case: Case) -> None:
    """After a publish from the default trainer to the default engine, the engine scores as the
    trainer does."""
    import numpy as np

    from miles.batch import flatten
    from miles.testing.samples import make_sample

    trainer, engine = case.companion("trainer"), case.companion("engine")
    driver, there, here = case.build(), case.build(), case.build()
    handles = (
        FakeHandle("trainer", {"trainer": trainer, "sender": there.sender(trainer)}),
        FakeHandle("engine", {"engine": engine, "receiver": here.receiver(engine)}),
    )
    await driver.publish(trainer.version, trainer=handles[0], engines=[handles[1]])
    sample = make_sample(6, 10, vocab_size=min(case.companion("model").decoder().vocab_size, 256))
    scored = await engine.score(sample.tokens)
    wanted = trainer.logprobs(flatten([sample]), "current")
    worst = float(np.abs(scored - wanted).max())
    limit = case.companion("precision").budget.max
    expect(worst <= limit, f"engine and trainer differ by {worst:.3g} nats; {limit:g} is allowed")


def _expect_receipt(receipt: Any, version: int, weights: Mapping[str, Any]) -> None:
    expect(isinstance(receipt, Receipt), f"publish gave a {type(receipt).__name__}, not a Receipt")
    expect(receipt.version == version, f"the receipt says version {receipt.version}, not {version}")
    hexadecimal = receipt.digest and set(receipt.digest) <= set("0123456789abcdef")
    expect(hexadecimal, f"the receipt's digest is {receipt.digest!r}")
    size = sum(t.numel() * t.element_size() for t in weights.values())
    expect(receipt.bytes >= size, f"the receipt counts {receipt.bytes} bytes of {size}")
    expect(receipt.seconds > 0, f"the receipt says it took {receipt.seconds} s")


def _shared() -> set[str]:
    """Segments; named semaphores are no transport's."""
    found = SHARED_MEMORY.iterdir() if SHARED_MEMORY.is_dir() else ()
    return {p.name for p in found if not p.name.startswith("sem.")}
