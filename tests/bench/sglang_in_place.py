"""New weights while an SGLang server answers, and seeds that decide: the engine component itself,
with servers of its own.

    python tests/bench/sglang_in_place.py --python SGLANG
    python tests/bench/sglang_in_place.py --python SGLANG --device cpu
    python tests/bench/sglang_in_place.py --python SGLANG --only deterministic

In place: 64 requests are being answered when new weights are published, twice, under
`pause=in_place`. The weights are two random models of Qwen3's type that differ by nats, so the
log-prob that the server gives a token tells whose it is: `transformers` computes in float32 what
every token has under the versions that the completion names (with the caches that the server kept,
where it kept them), under the other model, and with every change of version one token earlier and
later. Limits: no request is lost; versions cover each completion and grow; no token, and no change
of version, fits another version better where the two can be told apart; at least half of the
changes can be; differences of log-probs of 0.05 nats on average (in float32 2e-3 at most); no token
of an old version comes after its publish, and requests begun then have the new version alone.

Deterministic: the same requests alone, alone again, and twice among 48 others in other orders, give
bit-equal tokens, and other seeds other ones. SGLang has this on GPUs alone; on a CPU the embedded
engine behind the same routes (`miles serve`) stands in, which tests this script and not SGLang.

Progress goes to stderr, one JSON object to stdout; exit 0 exactly when all limits are met.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import sglang_server
import torch
from token_versions import PROMPT, Flight, Models, judged

from miles import Completion, Context, MilesError, Request, Sampling, Settings
from miles_plugins.engine.sglang import Sglang
from miles_plugins.precision.bf16 import Bf16
from miles_plugins.precision.fp32 import Fp32

PUBLISHES = 2
LATE = 8
"""Requests begun after the last publish."""


class Bench:
    """Two models, and engines that serve them."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self.args, self.folder = args, folder
        recipe = {"fp32": Fp32, "bf16": Bf16}[args.precision]
        self.precision = recipe(recipe.Config(), Context(directory=folder))
        self._began = time.monotonic()
        self.models = Models(folder, device=args.device, precision=args.precision)
        self.say("two models were made")

    def say(self, text: str) -> None:
        """What happens now."""
        print(f"{time.monotonic() - self._began:6.1f} s  {text}", file=sys.stderr, flush=True)

    def engine(self, name: str, **keys: Any) -> Sglang:
        """An engine whose server is being started."""
        every = 16 if self.args.device == "cuda" else 1  # as fast as this process can read
        flags = {"max_running": 96, "stream_interval": every, "max_len": 1024}
        config = Sglang.Config(**{**sglang_server.keys(self.args), **flags, **keys})
        return Sglang(config, self.context(name))

    def context(self, name: str) -> Context:
        """What an engine is told."""
        settings = Settings(pause="in_place", max_lag=1)
        directory = self.folder / name
        directory.mkdir()
        return Context(
            directory=directory,
            model=self.models.registered,
            precision=self.precision,
            settings=settings,
        )

    def request(self, index: int, new: int) -> Request:
        """Number `index`; its prompt and seed follow from that."""
        draw = np.random.default_rng(index)
        tokens = draw.integers(3, self.models.vocab, PROMPT).astype(np.int32)  # (tokens,) int32
        sampling = Sampling(max_new_tokens=new)
        name = f"r{index}"
        return Request(id=name, key=name, tokens=tokens, sampling=sampling, seed=1000 + index)


async def in_place(bench: Bench, engine: Sglang) -> dict[str, Any]:
    """Publish under way; what was seen, and what is wrong with it."""
    args, new, models = bench.args, bench.args.tokens, bench.models
    await engine.load_directory(0, models.folders[0])
    bench.say("the server is well, and serves version 0")
    await asyncio.gather(*(engine.generate(bench.request(9000 + i, 8)) for i in range(8)))
    flights = [Flight(bench.request(i, new)) for i in range(args.requests)]
    tasks = [asyncio.create_task(flight.fly(engine)) for flight in flights]
    seconds = []
    try:
        for version in range(1, PUBLISHES + 1):
            wanted = new * version // (PUBLISHES + 2)
            await _until(lambda least=wanted: all(f.count >= least for f in flights), tasks)
            bench.say(f"all {len(flights)} have {wanted} of {new} tokens; version {version} comes")
            began = time.monotonic()
            await engine.load_directory(version, models.folders[models.of(version)])
            seconds.append(time.monotonic() - began)
            for flight in flights:
                flight.at[version] = flight.count
        late = [Flight(bench.request(5000 + i, 32)) for i in range(LATE)]
        await asyncio.gather(*(flight.fly(engine) for flight in late))
        ended = await asyncio.gather(*tasks, return_exceptions=True)
    finally:
        for task in tasks:
            task.cancel()
    for error in {repr(e) for e in ended if isinstance(e, BaseException)}:
        bench.say(f"lost: {error}")
    bench.say("all were answered; transformers computes what they should have")
    result = judged(models, flights, late, size=new, last=PUBLISHES)
    return {"requests": len(flights), "tokens_each": new, "publish_s": seconds, **result}


async def _until(reached: Callable[[], bool], tasks: Sequence[asyncio.Task[None]]) -> None:
    while not reached():
        if any(task.done() for task in tasks):
            return  # too late, which `straddled` will show, or an error, which `lost` will
        await asyncio.sleep(0.002)


# ---------------------------------------------------------------- seeds


async def deterministic(bench: Bench, engine: Sglang) -> dict[str, Any]:
    """The same seeds alone and under load."""
    asked = [bench.request(i, 64) for i in range(16)]
    crowd = [bench.request(7000 + i, 64) for i in range(48)]
    alone = [await engine.generate(one) for one in asked]
    bench.say("16 requests were answered alone")
    again = [await engine.generate(one) for one in asked]
    bench.say("and again; now among 48 others")
    turns = {"alone again": again}
    for turn in range(2):
        order = np.random.default_rng(turn).permutation(len(asked) + len(crowd))
        mixed = [(asked + crowd)[i] for i in order]
        made = dict(
            zip(order.tolist(), await asyncio.gather(*map(engine.generate, mixed)), strict=True)
        )
        turns[f"under load {turn + 1}"] = [made[i] for i in range(len(asked))]
    others = [await engine.generate(replace(one, seed=one.seed + 1)) for one in asked[:4]]
    unlike = {name: _unlike(alone, made) for name, made in turns.items()}
    bits = {name: _unlike_bits(alone, made) for name, made in turns.items()}
    moved = _unlike(alone[:4], others)
    return {
        "requests": len(asked),
        "tokens": sum(len(one.tokens) for one in alone),
        "unlike": unlike,
        "other_logprob_bits": bits,
        "other_seeds_unlike": moved,
        "within": not any(unlike.values()) and moved == 4,
    }


def _unlike(ones: Sequence[Completion], others: Sequence[Completion]) -> int:
    """How many have other tokens."""
    return sum(a.tokens.tolist() != b.tokens.tolist() for a, b in zip(ones, others, strict=True))


def _unlike_bits(ones: Sequence[Completion], others: Sequence[Completion]) -> int:
    """How many have log-probs of other bits."""
    pairs = ((a.logprobs, b.logprobs) for a, b in zip(ones, others, strict=True))
    return sum(a is None or b is None or a.tobytes() != b.tobytes() for a, b in pairs)


@asynccontextmanager
async def embedded(bench: Bench) -> AsyncIterator[Sglang]:
    """The embedded engine behind the same routes."""
    bench.say("SGLang has no deterministic inference on a CPU: `miles serve` stands in for it")
    command = [sys.executable, "-m", "miles", "serve", "port=0", "model=qwen3", "tito=bytes"]
    command += [
        f"model.path='{bench.models.folders[0]}'",
        f"run.dir='{bench.folder}'",
        "precision=fp32",
    ]
    command += ["engine.rows=64", "engine.max_len=128"]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    try:
        said = ""
        while not (found := re.search(r"is served at (\S+)", said)):
            line = await process.stdout.readline() if process.stdout else b""
            if not line:
                raise RuntimeError(f"`miles serve` ended; it said {said!r}")
            said += line.decode()
        key = str(bench.folder / "serve" / "token")
        config = Sglang.Config(url=found[1], api_key_file=key)
        engine = Sglang(config, bench.context("attached"))
        try:
            yield engine
        finally:
            await engine.close()
    finally:
        process.terminate()
        await process.wait()


async def play(bench: Bench) -> dict[str, Any]:
    """What was asked for; servers start side by side. A fault is part of the result."""
    args, engines = bench.args, {}
    result: dict[str, Any] = {}
    try:
        async with asyncio.timeout(args.limit_s):
            if "in_place" in args.only:
                engines["in_place"] = bench.engine("in_place")
            if "deterministic" in args.only and args.device == "cuda":
                engines["deterministic"] = bench.engine("deterministic", deterministic=True)
            bench.say(f"servers that start: {', '.join(engines) or 'none'}")
            if "in_place" in engines:
                result["in_place"] = await in_place(bench, engines["in_place"])
            if "deterministic" in engines:
                engine = engines["deterministic"]
                await engine.load_directory(0, bench.models.folders[0])
                result["deterministic"] = await deterministic(bench, engine)
            elif "deterministic" in args.only:
                async with embedded(bench) as engine:
                    found = await deterministic(bench, engine)
                result["deterministic_of_the_embedded_engine"] = found
    except (TimeoutError, MilesError) as error:
        result["error"] = f"{type(error).__name__}: {error}"
    finally:
        for name, engine in engines.items():
            server = json.loads((bench.folder / name / "engines" / "sglang-0.json").read_text())
            result.setdefault("sglang", server["sglang"])
            await engine.close()
            if not result.get(name, {}).get("within"):
                log = bench.folder / name / "logs" / "sglang-0.log"
                print(sglang_server.tail(log, 30), file=sys.stderr, flush=True)
    return result


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, judge."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    sglang_server.arguments(parser)
    parts = ("in_place", "deterministic")
    parser.add_argument("--only", choices=parts, nargs="*", default=list(parts))
    parser.add_argument("--precision", choices=("bf16", "fp32"), help="bf16 on a GPU, else fp32")
    parser.add_argument("--requests", type=int, default=64, help="in flight")
    parser.add_argument("--tokens", type=int, help="of each; 960 on a GPU, else 96")
    parser.add_argument("--limit-s", type=float, default=300.0, help="seconds for everything")
    parser.add_argument("--json", type=Path, help="write the result here as well")
    args = parser.parse_args(argv)
    args.precision = args.precision or ("bf16" if args.device == "cuda" else "fp32")
    args.tokens = args.tokens or (960 if args.device == "cuda" else 96)
    torch.set_num_threads(1)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="miles-bench-", ignore_cleanup_errors=True) as folder:
        result = asyncio.run(play(Bench(args, Path(folder))))
    result |= {"device": args.device, "precision": args.precision}
    result["wall_s"] = time.monotonic() - began
    results = [part for part in result.values() if isinstance(part, dict)]
    good = bool(results) and all(part["within"] for part in results)
    result["within"] = good and "error" not in result
    text = json.dumps(result, indent=1)
    print(text, flush=True)
    if args.json:
        args.json.write_text(text + "\n", encoding="utf-8")
    return 0 if result["within"] else 1


if __name__ == "__main__":
    sys.exit(main())
