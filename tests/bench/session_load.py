"""What the session server adds to a turn, under load: latency, throughput, memory, lost turns.

    python tests/bench/session_load.py                    1,000 sessions x 20 turns at 200 a second
    python tests/bench/session_load.py --rate 0           as fast as one server answers
    python tests/bench/session_load.py --fuzz 300         schemathesis, seconds

Exits 0 when the limits hold. The engine is instant, so that what a client waits for is what the
server adds. The server is one process, journal on; the client is another, on the same machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

CONTEXT = 8192
"""Tokens that a session has in the end."""
SAID = 64
"""Tokens an answer has."""
LIMIT_MS = 5.0
"""Added p50 allowed at the default rate."""
ADMIN = "bench"


class Instant:
    """Says one text at once."""

    samples = True

    def __init__(self) -> None:
        from miles import Completion, Span

        tokens = np.array([*(b"so it is, " * 7)[: SAID - 1], 258], np.int32)
        self._made = Completion(
            tokens=tokens,
            logprobs=np.full(SAID, -0.5, np.float32),
            spans=(Span(start=0, stop=SAID, version=1),),
            finish="stop",
        )

    async def generate(self, request):
        return self._made

    async def abort(self, keys=None):
        return 0


async def serve_until_told(folder: str) -> None:
    """The server process: prints its address, ends when its standard input does."""
    from miles import Context, Sampling, SessionKeys
    from miles.session import Sessions
    from miles.session.server import make_app, serve
    from miles_plugins.tito.bytes import Bytes

    tito = Bytes(Bytes.Config(), Context(directory=Path(folder)))
    sessions = Sessions(tito, rules=SessionKeys(max_sessions=100_000), directory=Path(folder))
    app = make_app(
        sessions,
        engine=Instant(),
        tito=tito,
        sampling=Sampling(max_new_tokens=SAID),
        seed_of=lambda id: 0,
        model="policy",
        admin_token=ADMIN,
    )
    async with serve(app) as address:
        print(address, flush=True)
        await asyncio.to_thread(sys.stdin.read)
    sessions.stop()


class Server:
    """One server process."""

    def __init__(self, folder: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--serve", folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        self.address = self.process.stdout.readline().strip()

    def resident(self) -> int:
        """Bytes of memory that it holds."""
        pages = Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")

    def processor(self) -> float:
        """Seconds of processor time it has taken."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def end(self) -> None:
        self.process.stdin.close()
        if self.process.wait(30):
            raise SystemExit(f"the server ended with {self.process.returncode}")


async def load(server: Server, sessions: int, turns: int, rate: float) -> dict[str, float]:
    """Every session asks its turns one after another, all sessions at once."""
    import aiohttp

    admin = {"Authorization": f"Bearer {ADMIN}"}
    added = (CONTEXT - turns * (SAID + 40)) // turns
    waited: list[float] = []
    errors: list[str] = []
    connector = aiohttp.TCPConnector(limit=256)
    async with aiohttp.ClientSession(server.address, connector=connector) as http:
        opened = []
        for _ in range(sessions):
            async with http.post("/sessions", headers=admin) as reply:
                opened.append(await reply.json())
        before = server.resident()
        began, busy = time.perf_counter(), server.processor()

        async def talk(number: int, id: str, token: str) -> None:
            headers = {"Authorization": f"Bearer {token}"}
            messages = []
            for turn in range(turns):
                messages.append({"role": "user", "content": f"{turn} " + "x" * added})
                body = json.dumps({"messages": messages}).encode()
                if rate:
                    due = began + (turn * sessions + number) / rate
                    await asyncio.sleep(max(0.0, due - time.perf_counter()))
                start = time.perf_counter()
                async with http.post(
                    f"/sessions/{id}/v1/chat/completions", data=body, headers=headers
                ) as reply:
                    raw = await reply.read()
                waited.append(time.perf_counter() - start)
                if reply.status != 200:
                    errors.append(raw.decode()[:300])
                    return
                said = json.loads(raw)["choices"][0]["message"]["content"]
                messages.append({"role": "assistant", "content": said})

        await asyncio.gather(*(talk(i, o["session_id"], o["token"]) for i, o in enumerate(opened)))
        took = time.perf_counter() - began
        busy = server.processor() - busy
        grown = server.resident() - before
        async with http.get("/sessions", headers=admin) as reply:
            states = (await reply.json())["sessions"]
    tokens = sum(s["tokens"] for s in states)
    kept = sum(s["turns"] for s in states)
    return {
        "requests/s": len(waited) / took,
        "added p50 ms": 1e3 * float(np.percentile(waited, 50)),
        "added p99 ms": 1e3 * float(np.percentile(waited, 99)),
        "server ms of processor a turn": 1e3 * busy / len(waited),
        "errors": len(errors),
        "turns lost": sessions * turns - kept,
        "token mismatches": sum(s["counters"]["token_mismatches"] for s in states),
        "tokens a session": tokens / sessions,
        "array bytes a session": sum(s["bytes"] for s in states) / sessions,
        "resident bytes a session": grown / sessions,
        "bound: 16 a token + 2 kB a turn": (16 * tokens + 2048 * kept) / sessions,
    }


SECRET = "never-to-be-seen-in-another-session"


def fuzz(server: Server, seconds: float, seed: int = 1) -> list[str]:
    """Requests that nobody thought of, for so long; what went wrong.

    Rounds of schemathesis over the server's own document, with sessions that exist, and between
    them random bytes. No 500, no answer outside the document, nothing of another session.
    """
    import httpx

    until, faults = time.monotonic() + seconds, []
    admin = {"Authorization": f"Bearer {ADMIN}"}
    with httpx.Client(base_url=server.address, timeout=20) as http:
        kept = http.post("/sessions", headers=admin).json()["session_id"]
        asked = http.post(f"/sessions/{kept}/v1/responses", json={"input": SECRET}, headers=admin)
        faults += [] if asked.status_code == 200 else [asked.text]
        while not faults and time.monotonic() < until:
            faults += _documented(server, http, seed, min(60.0, until - time.monotonic()))
            faults += _bytes(http, kept, seed)
            print(f"seed {seed}: {max(0.0, until - time.monotonic()):.0f} s left", flush=True)
            seed += 1
        state = http.get(f"/sessions/{kept}", headers=admin).json()
    if state.get("turns") != 1:
        faults.append(f"the session from before is now {state}")
    return faults


def _documented(server: Server, http, seed: int, seconds: float) -> list[str]:
    admin = {"Authorization": f"Bearer {ADMIN}"}
    document = http.get("/openapi.json").json()
    ids = [http.post("/sessions", headers=admin).json()["session_id"] for _ in range(40)]
    for path in document["paths"].values():
        for parameter in path.get("parameters", ()):
            parameter["schema"] = {"type": "string", "enum": ids}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "openapi.json"
        file.write_text(json.dumps(document))
        words = [
            "run",
            str(file),
            f"--url={server.address}",
            f"--header=Authorization: Bearer {ADMIN}",
            f"--seed={seed}",
            f"--max-time={max(5, round(seconds))}",
            "--phases=examples,coverage,fuzzing",
            "--exclude-method=DELETE",  # random bytes try that, where it ends nothing but itself
            "--checks=not_a_server_error,status_code_conformance,content_type_conformance,"
            "response_schema_conformance,unsupported_method,ignored_auth",
            "--request-timeout=20",
            "--no-color",
        ]
        program = Path(sys.executable).parent / "schemathesis"
        done = subprocess.run([program, *words], capture_output=True, text=True, check=False)
    print(
        "\n".join(line for line in done.stdout.splitlines() if "Test cases" in line or "✅" in line)
    )
    return [done.stdout[-8000:] + done.stderr[-2000:]] if done.returncode else []


def _bytes(http, kept: str, seed: int) -> list[str]:
    """Random bodies and paths, with the token of one session."""
    draw = np.random.default_rng(seed)
    admin = {"Authorization": f"Bearer {ADMIN}"}
    mine = http.post("/sessions", headers=admin).json()
    own = {"Authorization": f"Bearer {mine['token']}"}
    good = json.dumps({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}).encode()
    paths = ["v1/chat/completions", "v1/responses", "v1/messages", "samples", "v1/models", ""]
    faults = []
    for index in range(300):
        body = bytearray(good) if index % 2 else bytearray(draw.bytes(int(draw.integers(0, 300))))
        for _ in range(int(draw.integers(0, 4))):
            if body:
                body[int(draw.integers(len(body)))] = int(draw.integers(256))
        id = mine["session_id"] if index % 3 else kept
        path = f"/sessions/{id}/{paths[int(draw.integers(len(paths)))]}".rstrip("/")
        method = ["POST", "GET", "PUT", "DELETE"][int(draw.choice(4, p=[0.85, 0.1, 0.04, 0.01]))]
        reply = http.request(method, path, content=bytes(body), headers=own)
        if reply.status_code >= 500 or SECRET in reply.text:
            faults.append(f"{method} {path} {bytes(body)!r}: {reply.status_code} {reply.text}")
        if id == kept and reply.status_code == 200:
            faults.append(f"{method} {path}: the token of another session was enough")
    return faults


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--sessions", type=int, default=1000)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument(
        "--rate", type=float, default=200.0, help="requests a second; 0: all it can"
    )
    parser.add_argument("--fuzz", type=float, help="seconds of schemathesis instead of load")
    args = parser.parse_args()
    if args.serve:
        asyncio.run(serve_until_told(args.serve))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        server = Server(folder)
        try:
            if args.fuzz:
                faults = fuzz(server, args.fuzz)
                print("\n".join(faults) or "no faults")
                return int(bool(faults))
            found = asyncio.run(load(server, args.sessions, args.turns, args.rate))
        finally:
            server.end()
    for name, value in found.items():
        print(f"{name:34} {value:12,.2f}")
    bad = found["errors"] or found["turns lost"] or found["token mismatches"]
    slow = args.rate and found["added p50 ms"] > LIMIT_MS
    large = found["resident bytes a session"] > found["bound: 16 a token + 2 kB a turn"]
    return int(bool(bad or slow or large))


if __name__ == "__main__":
    sys.exit(main())
