"""Seconds of a publish, from the call to the first token of the new version, part by part.

    python tests/bench/publish_time.py transport=ipc placement=colocated --size 1b --device cuda
    python tests/bench/publish_time.py transport=nccl --size 8b --device cuda --engine-gpu 1
    python tests/bench/publish_time.py transport=nccl --engine sglang --size 1b --device cuda
    python tests/bench/publish_time.py transport=nccl transport.backend=gloo --size tiny

A trainer worker and an engine worker are started as a run starts them, over a random model of
Qwen3's type; words with `=` are overrides of a run. Reported: `pause` (the engine stops, where a
server is told to), `meet` (a process group, at the first publish alone), `transfer` (gathering,
flattening and moving, until the last bucket was taken), `switch` (the engine takes the weights,
and compares them where that is due), `prove` and `go_on` (a server), `first_token`. In the same run
two ceilings are measured: `gather`, the export alone, and `raw`, the same number of bytes in bare
broadcasts (nccl) or copies (ipc). The bound is that transfer takes at most the larger of 0.5 s and
three times their sum.

With `transport=nccl` and `--engine-gpu 0` both sides stand on one GPU: NCCL takes them for two
machines and moves bytes by sockets. That shows that the parts meet and agree; its seconds say
nothing of NCCL between GPUs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import sglang_server

from miles import Request, Sampling
from miles.assemble import make_context
from miles.config import compose
from miles.plugins import Registry

SIZES = {
    "tiny": {},
    "1b": {"hidden_size": 2048, "layers": 16, "heads": 16, "kv_heads": 8, "head_dim": 128,
           "intermediate_size": 6144, "vocab_size": 151936, "max_len": 4096},
    "8b": {"hidden_size": 4096, "layers": 36, "heads": 32, "kv_heads": 8, "head_dim": 128,
           "intermediate_size": 12288, "vocab_size": 151936, "max_len": 4096, "tied": False},
}  # fmt: skip
PARTS = {
    "receiver.begin": "pause", "sender.open": "meet", "sender.join": "meet",
    "receiver.join": "meet", "sender.fill": "transfer", "receiver.take": "transfer",
    "sender.begun": "transfer",
    "sender.write": "transfer", "receiver.look": "transfer", "receiver.stage": "transfer",
    "receiver.load": "switch", "receiver.finish": "switch", "sender.snapshot": "prove",
    "receiver.prove": "prove", "receiver.go_on": "go_on", "sender.finish": "free",
}  # fmt: skip
"""What each call of a publish belongs to."""


class Timed:
    """A handle whose calls are timed; what overlaps counts once."""

    def __init__(self, handle: Any, spans: dict[str, list[tuple[float, float]]]) -> None:
        self._handle, self._spans = handle, spans
        self.name, self.world = handle.name, handle.world
        self.open: list[str] = []
        """What has not ended."""

    @contextmanager
    def _timing(self, target: str):
        began = time.perf_counter()
        self.open.append(target)
        try:
            yield
            self.open.remove(target)
        finally:
            self._spans[PARTS.get(target, target)].append((began, time.perf_counter()))

    async def call(self, target: str, *args: Any, **how: Any) -> Any:
        with self._timing(target):
            return await self._handle.call(target, *args, **how)

    async def call_all(self, target: str, *args: Any, **how: Any) -> list[Any]:
        with self._timing(target):
            return await self._handle.call_all(target, *args, **how)


def covered(spans: list[tuple[float, float]]) -> float:
    """Seconds that intervals cover together."""
    total, end = 0.0, float("-inf")
    for start, stop in sorted(spans):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total


def raw(kind: str, size: int, bucket: int, device: str, other: int) -> float:
    """Seconds to broadcast to another process, or to copy, `size` bytes in buckets."""
    import torch
    import torch.multiprocessing as processes

    if kind != "nccl":
        place = torch.device("cuda", 0) if device == "cuda" else torch.device("cpu")
        source = torch.ones(min(size, bucket), dtype=torch.uint8, device=place)
        sink = torch.empty_like(source)
        seconds = []
        for _ in range(4):
            began = time.perf_counter()
            for _ in range(-(-size // bucket)):
                sink.copy_(source)
            if device == "cuda":
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - began)
        return min(seconds)
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "seconds"
        processes.start_processes(
            _broadcast, (size, bucket, device, other, folder), nprocs=2, start_method="spawn"
        )
        return float(found.read_text())


def _broadcast(rank: int, size: int, bucket: int, device: str, other: int, folder: str) -> None:
    import torch
    import torch.distributed as dist

    place = torch.device("cpu")
    if device == "cuda":
        if not other:
            os.environ["NCCL_HOSTID"] = f"rank-{rank}"
        place = torch.device("cuda", other if rank else 0)
        torch.cuda.set_device(place)
    backend = "nccl" if device == "cuda" else "gloo"
    meeting = f"file://{folder}/meeting"
    limit = timedelta(seconds=300)
    dist.init_process_group(backend, init_method=meeting, rank=rank, world_size=2, timeout=limit)
    flat = torch.ones(min(size, bucket), dtype=torch.uint8, device=place)
    seconds = []
    for _ in range(4):
        dist.barrier()
        began = time.perf_counter()
        for _ in range(-(-size // bucket)):
            dist.broadcast(flat, 0)
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    if rank == 0:
        (Path(folder) / "seconds").write_text(str(min(seconds)))
    dist.destroy_process_group()


async def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Publish `rounds` times; medians over all but the first."""
    registry = Registry.load()
    plan = compose(overrides(args, folder), registry=registry)
    if plan.faults:
        raise SystemExit("\n".join(plan.faults))
    stage = plan.stages[-1]
    specs = stage.specs
    context = make_context(stage, registry, folder)
    runtime = registry.build(specs["runtime"], context)
    transport = registry.build(specs["transport"], context)
    spans: dict[str, list[tuple[float, float]]] = defaultdict(list)
    began = time.monotonic()

    def say(what: str) -> None:
        print(f"{time.monotonic() - began:6.1f} s  {what}", file=sys.stderr, flush=True)

    try:
        both = [specs["model"], specs["precision"]]
        parts = [*both, specs["trainer"], specs["transport"]]
        world = int(specs["trainer"].config.get("workers", 1))
        trainer = Timed(await runtime.start("trainer", parts, context, world=world), spans)
        with children(engine_variables(args, specs["transport"].name)):
            parts = [*both, specs["engine"], specs["transport"]]
            say("the trainer stands")
            engine = Timed(await runtime.start("engine", parts, context), spans)
        say("the engine's worker stands")
        rounds = []
        for version in range(args.rounds):
            try:
                async with asyncio.timeout(args.limit_s):
                    each = await publish(transport, trainer, engine, version, spans, context)
            except TimeoutError:
                raise SystemExit(
                    f"version {version} was not served within {args.limit_s:g} s; open are "
                    f"{trainer.open} and {engine.open}; a server said last:\n"
                    f"{sglang_server.tail(folder / 'logs' / 'sglang-0.log', 20)}"
                ) from None
            rounds.append(each)
            say(f"version {version}: {rounds[-1]}")
        gather = min([max(await trainer.call_all("sender.gather")) for _ in range(3)])
    finally:
        await runtime.stop()
    config = specs["transport"].config
    size = rounds[0].pop("bytes")
    for each in rounds[1:]:
        each.pop("bytes")
    bucket = int(config.get("bucket_bytes") or 256 * 2**20)
    bare = raw(specs["transport"].name, size, bucket, args.device, args.engine_gpu)
    later = {name: statistics.median(r.get(name, 0.0) for r in rounds[1:]) for name in rounds[0]}
    bound = max(0.5, 3 * (gather + bare))
    return {
        "transport": specs["transport"].name, "engine": specs["engine"].name, "size": args.size,
        "GB": size / 1e9, "gather_s": gather, "raw_s": bare, "bound_s": bound,
        "within": later["transfer"] <= bound, "first": rounds[0], "median": later,
        "one_gpu": specs["transport"].name == "nccl" and not args.engine_gpu,
    }  # fmt: skip


async def publish(
    transport: Any, trainer: Any, engine: Any, version: int, spans: Any, context: Any
) -> dict[str, float]:
    """One publish and the first token after it, which must be of the new version."""
    spans.clear()
    began = time.perf_counter()
    receipt = await transport.publish(version, trainer=trainer, engines=[engine])
    done = time.perf_counter()
    parts = {name: covered(each) for name, each in spans.items()}
    tokens = np.arange(8, dtype=np.int32)  # (tokens,) int32
    sampling = Sampling(max_new_tokens=1)
    request = Request(id=str(version), key="bench", tokens=tokens, sampling=sampling, seed=0)
    completion = await engine.call("engine.generate", request)
    end = time.perf_counter()
    if [span.version for span in completion.spans] != [version]:
        raise SystemExit(f"a token of {completion.spans} was served after version {version}")
    known = {"publish": done - began, "first_token": end - done, "all": end - began}
    return {**parts, **known, "bytes": receipt.bytes}


def overrides(args: argparse.Namespace, folder: Path) -> list[str]:
    """Of a run, for the model, the trainer and the engine that were asked for."""
    words = [f"model.{name}={value}" for name, value in SIZES[args.size].items()]
    cuda = args.device == "cuda"
    words += ["precision=bf16", f"trainer.device={args.device}", f"run.dir={folder}"]
    if args.engine == "torch":
        words += [f"engine.device={args.device}"]
        words += ["engine.rows=8", "engine.max_len=64"] if cuda else []
    else:
        words += [f"engine={args.engine}", f"engine.device={args.device}"]
    return [*words, *args.overrides]


def engine_variables(args: argparse.Namespace, transport: str) -> dict[str, str]:
    """Shows an engine worker its GPU alone; on the trainer's own, NCCL has to take the two for
    different machines, since it refuses ranks that share a GPU."""
    if args.device != "cuda":
        return {}
    if args.engine_gpu:
        return {"CUDA_VISIBLE_DEVICES": str(args.engine_gpu)}
    return {"NCCL_HOSTID": "engine"} if transport == "nccl" else {}


@contextmanager
def children(variables: dict[str, str]):
    """Processes that are started inside have these variables."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value


def main() -> None:
    """Parse the command line and print one JSON object."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("overrides", nargs="*", help="of a run, such as transport=nccl")
    parser.add_argument("--size", choices=sorted(SIZES), default="tiny")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--engine", default="torch")
    parser.add_argument("--engine-gpu", type=int, default=0, help="GPU of the engine worker")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--limit-s", type=float, default=300.0, help="seconds for one publish")
    args = parser.parse_intermixed_args()
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(asyncio.run(measure(args, Path(folder))), indent=1))


if __name__ == "__main__":
    main()
