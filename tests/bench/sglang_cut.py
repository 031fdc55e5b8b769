"""What new weights cost an SGLang server that answers: parts of an update with N requests in
flight, and the client's CPU a request. No SGLang and no GPU are needed.

    python tests/bench/sglang_cut.py [--in-flight 0 64 256] [--together 32] [--version 0.5.16]

The server is the test suite's stand-in (`tests/plugins/engine/native_server.py`) in a process of
its own. It decodes a token every `--tick-ms`, takes weights in `--update-ms`, and answers nothing
else for `--question-ms` a question and `--request-ms` a request in it, about what SGLang's one HTTP
thread spends. 0.5.16 tells no spans, so requests are cut for an update; 0.5.23 does. Whatever ends
is asked for anew, as in a run that samples ahead.

Seconds, medians and worst of `--rounds` updates: `publish` of all; `until_paused` of it, with the
end of what runs; `pause`, `update` and `resume` as they were asked, `other` the rest; from its end
until `half_back` and `all_back` of those that were cut have reached the server. `client_ms` is CPU
a request between updates, `a_question` requests in one. It judges nothing; progress goes to stderr,
one JSON object to stdout.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from miles import Context, Request, Sampling, Settings
from miles_plugins.engine.sglang import Sglang

STAND_IN = Path(__file__).resolve().parents[1] / "plugins" / "engine" / "native_server.py"
PATHS = {
    "/pause_generation": "pause",
    "/update_weights_from_disk": "update",
    "/continue_generation": "resume",
}


def _stand_in() -> Any:
    spec: Any = importlib.util.spec_from_file_location("native_server", STAND_IN)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


async def serve(args: argparse.Namespace) -> None:
    """The stand-in until standard input ends; first its address is written, last what it saw."""
    native = _stand_in()
    native.TICK_S = args.tick_ms / 1e3

    arrived: list[float] = []

    class Paced(native.NativeServer):
        async def _generate(self, request: Any) -> Any:
            ids = request[native.BODY]["rid"]
            count = len(ids) if isinstance(ids, list) else 1
            # nothing else is answered meanwhile: SGLang's HTTP is one thread
            time.sleep((args.question_ms + args.request_ms * count) / 1e3)  # noqa: ASYNC251
            arrived.extend([time.monotonic()] * count)
            return await super()._generate(request)

        async def _update(self, request: Any) -> Any:
            await asyncio.sleep(args.update_ms / 1e3)
            return await super()._update(request)

    tells = args.version != "0.5.16"
    server = Paced(version=args.version, disable_overlap_schedule=tells)
    server.tells_spans, server.incremental = tells, True
    async with server.up() as url:
        print(url, flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    print(json.dumps({"arrived": arrived, "questions": server.questions}), flush=True)


class Load:
    """N requests that are always in flight, and the times of what was asked beside them."""

    def __init__(self, engine: Sglang, count: int, tokens: int) -> None:
        self.engine, self.count, self.tokens = engine, count, tokens
        self.done = 0
        self.spent: dict[str, float] = {}
        ask = engine._http.ask

        async def timed(method: str, path: str, *args: Any, **how: Any) -> Any:
            began = time.monotonic()
            try:
                return await ask(method, path, *args, **how)
            finally:
                name = PATHS.get(path)
                if name:
                    self.spent[name] = self.spent.get(name, 0.0) + time.monotonic() - began

        engine._http.ask = timed

    async def slot(self, index: int) -> None:
        """One after the other."""
        turn = 0
        while True:
            turn += 1
            new = 1 + index % self.tokens if turn == 1 else self.tokens  # not all in step
            await self.one(f"r{index}.{turn}", new)
            self.done += 1

    async def one(self, name: str, new: int) -> None:
        """One request of so many new tokens."""
        prompt = np.arange(5, 35, dtype=np.int32)
        sampling = Sampling(max_new_tokens=new, temperature=0.6)
        asked = Request(id=name, key=name, tokens=prompt, sampling=sampling, seed=0)
        await self.engine.generate(asked)


async def publishes(load: Load, rounds: int, folder: Path) -> list[dict[str, float]]:
    """Updates under that load."""
    found = []
    asking, engine = load.engine._asking, load.engine
    for number in range(rounds):
        await asyncio.sleep(0.5 + 0.037 * number)
        load.spent.clear()
        running = len(asking.running)
        version = asking.newest + 1
        began = time.monotonic()
        async with engine.updating(version) as channel:
            paused = time.monotonic()
            body = {"model_path": str(folder), "weight_version": str(version), "flush_cache": True}
            await channel.post("/update_weights_from_disk", body)
        whole = time.monotonic() - began
        other = whole - sum(load.spent.values())
        found.append(
            {"running": running, "at": began, "publish": whole, "until_paused": paused - began,
             **load.spent, "other": other}
        )  # fmt: skip
    await asyncio.sleep(0.5)
    return found


@contextmanager
def stand_in(args: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any]]]:
    """The address of one, and afterwards what it saw."""
    command = [sys.executable, __file__, "--serve", "--tick-ms", str(args.tick_ms)]
    command += ["--update-ms", str(args.update_ms), "--version", args.version]
    command += ["--question-ms", str(args.question_ms), "--request-ms", str(args.request_ms)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin and process.stdout
    told: dict[str, Any] = {}
    try:
        yield process.stdout.readline().strip(), told
    finally:
        process.stdin.close()
        told |= json.loads(process.stdout.readline())
        process.wait()


async def play(args: argparse.Namespace, count: int, url: str, folder: Path) -> dict[str, Any]:
    """`count` in flight: at first alone, then with updates."""
    key = folder / "key"
    key.write_text(_stand_in().KEY)
    model = SimpleNamespace(hf_config=dict, directory=lambda: None)
    context = Context(directory=folder, model=model, settings=Settings(pause="retract"))
    config = Sglang.Config(url=url, api_key_file=str(key), prove=False, together=args.together)
    engine = Sglang(config, context)
    load = Load(engine, count, args.tokens)
    try:
        await load.one("first", 1)
        tasks = [asyncio.create_task(load.slot(i)) for i in range(count)]
        await asyncio.sleep(1.0)
        done, spent, began = load.done, time.process_time(), time.monotonic()
        await asyncio.sleep(args.steady_s)
        done, spent = load.done - done, time.process_time() - spent
        rate = done / (time.monotonic() - began)
        found = await publishes(load, args.rounds, folder)
        for task in tasks:
            task.cancel()
        for error in await asyncio.gather(*tasks, return_exceptions=True):
            if not isinstance(error, asyncio.CancelledError):
                raise RuntimeError(f"a request was lost: {error!r}")
    finally:
        await engine.close()
    steady = {"client_ms": round(1e3 * spent / done, 3), "requests_s": round(rate)} if done else {}
    return {"updates": found, **steady}


def measure(args: argparse.Namespace, count: int, folder: Path) -> dict[str, Any]:
    """Updates with `count` in flight."""
    with stand_in(args) as (url, told):
        result = asyncio.run(play(args, count, url, folder))
    found = result.pop("updates")
    for one in found:
        resumed = one["at"] + one["publish"]
        paused = one["at"] + one["until_paused"]
        back = sorted(at - resumed for at in told["arrived"] if at > paused)[: one["running"]]
        if back:
            one["half_back"], one["all_back"] = back[len(back) // 2], back[-1]
    for name in found[-1].keys() - {"at", "running"}:
        values = [one.get(name, 0.0) for one in found]
        result[name] = [round(statistics.median(values), 4), round(max(values), 4)]
    result["a_question"] = round(statistics.fmean(told["questions"]), 1)
    return dict(sorted(result.items()))


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--in-flight", type=int, nargs="*", default=[0, 64, 256])
    parser.add_argument("--tick-ms", type=float, default=8.0)
    parser.add_argument("--question-ms", type=float, default=0.5)
    parser.add_argument("--request-ms", type=float, default=0.15)
    parser.add_argument("--update-ms", type=float, default=30.0)
    parser.add_argument("--tokens", type=int, default=12)
    parser.add_argument("--together", type=int, default=32, help="as of the engine")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steady-s", type=float, default=3.0)
    parser.add_argument("--version", default="0.5.16")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.serve:
        asyncio.run(serve(args))
        return 0
    result = {}
    for count in args.in_flight:
        with tempfile.TemporaryDirectory(prefix="miles-bench-") as folder:
            result[count] = measure(args, count, Path(folder))
        print(count, result[count], file=sys.stderr, flush=True)
    print(json.dumps(result, indent=1), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
