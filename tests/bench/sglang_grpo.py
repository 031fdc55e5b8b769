"""GRPO with SGLang as the engine and the fsdp trainer in 16 bits, held against what it promises.

    python tests/bench/sglang_grpo.py --model DIR --python SGLANG                # one GPU, in turns
    python tests/bench/sglang_grpo.py --model DIR --python SGLANG --layout disaggregated --max-lag 2
    python tests/bench/sglang_grpo.py --agentic --python SGLANG
    python tests/bench/sglang_grpo.py --model DIR --python SGLANG --device cpu --steps 3 --rise none

DIR holds a checkpoint, such as SmolLM2-135M-Instruct, for `smollm2_arithmetic`;
`--agentic` is `calculator_agent` from nothing, every sampled turn a request to the session server.
Words with `=` are overrides of the run. Layouts: `colocated` takes turns on GPU 0, weights by
`ipc`; `disaggregated` has the trainer on GPU 0 and the server on GPU 1, weights by `nccl`; with
`--ranks N` each side has N GPUs, the same ones or others; `shared` lets both work at once on GPU 0,
weights by `disk`: asynchrony where there is one GPU. On a CPU weights move by `disk`.

Limits: the run ends well within `--limit-s`; no token mismatch; for a checkpoint also: the mean
difference between the log-probs of trainer and engine is at most 0.02 nats at every step (with
`--max-lag` at every step that has tokens of the trainer's own version), and the reward rises by
`--rise`, as the mean of the last ten steps over that of the first three. Every step is one line on
stderr; the result is one JSON object on stdout.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import sglang_server

from miles.records.record import Record, read

MISMATCH = 0.02
FIRST, LAST = 3, 10
"""Steps whose rewards are compared; of a short run a tenth and a third."""
WARMING = 2
"""First steps that are left out of speeds: kernels compile, groups form."""
PARTS = ("step", "wait", "train", "publish", "eval_wait", "overhead")
TRANSPORTS = {("cuda", "colocated"): "ipc", ("cuda", "disaggregated"): "nccl"}
STAGE = "grpo"
QUIET_S = 15.0


def words(args: argparse.Namespace, folder: Path) -> list[str]:
    """Overrides of the run."""
    cuda = args.device == "cuda"
    engine = sglang_server.keys(args)
    if cuda:
        engine["first_gpu"] = args.ranks if args.layout == "disaggregated" else 0
        engine["max_running"] = 256
    else:
        engine["max_running"] = 32
    transport = TRANSPORTS.get((args.device, args.layout), "disk")
    made = [
        f"run.dir={folder}", "run.name=run", "tracker=[jsonl]", f"precision={args.precision}",
        f"trainer.device={args.device}", f"transport={transport}",
        f"placement={'colocated' if args.layout == 'colocated' else 'split'}",
    ]  # fmt: skip
    if args.agentic:  # the stage before is demonstrated, and has no server
        head = f"stages.{STAGE}."
        made = ["experiment=calculator_agent", *made]
        made += ["model.head_dim=64"] if cuda else []  # the kernels' smallest
    else:
        head = ""
        made = ["experiment=smollm2_arithmetic", *made, *_checkpoint(args.model)]
        made += [f"groups_per_step={32 if cuda else 4}", f"samples_per_group={8 if cuda else 4}"]
        if cuda:
            made += ["trainer.lr=1e-5", "trainer.micro_batch_tokens=16384"]
            made += ["trainer.activation_checkpointing=false", "evaluator.tasks=128"]
    if args.ranks > 1:
        made += [f"trainer.workers={args.ranks}"]
        engine["workers"] = args.ranks
    made += [f"{head}engine=sglang", *sglang_server.override(f"{head}engine", engine)]
    made += [f"{head}max_lag={args.max_lag}", f"{head}steps={args.steps}"]
    return [*made, *args.overrides]


def _checkpoint(model: Path) -> list[str]:
    """What a run is told of a checkpoint. Raises `SystemExit` when there is none."""
    try:
        family = json.loads((model / "config.json").read_text())["model_type"]
    except (OSError, ValueError, KeyError) as error:
        raise SystemExit(f"--model {model}: no checkpoint: {error}") from error
    return [f"model={family}", "model.init=load", f"model.path='{model.resolve()}'"]


class Watch:
    """Says on stderr what a run does, as its `metrics.jsonl` grows."""

    def __init__(self, directory: Path, began: float) -> None:
        self._directory, self._began = directory, began
        self._read, self._said, self._after = 0, began, ""

    def look(self) -> None:
        """Say what is new; after a while of silence, what the server said last."""
        now = time.monotonic()
        path = self._directory / "metrics.jsonl"
        text = path.read_text() if path.exists() else ""
        whole = text[self._read : text.rfind("\n") + 1]
        self._read += len(whole)
        for line in whole.splitlines():
            self._line(json.loads(line), now)
        if now - self._said >= QUIET_S:
            log = sglang_server.tail(self._directory / "logs" / "sglang-0.log", 1).splitlines()[-1]
            self._say(f"still {self._after or 'starting'}; sglang-0.log: {log[:160]}", now)

    def _line(self, row: Mapping[str, Any], now: float) -> None:
        moment, stage = row.get("moment"), row.get("stage", "")
        if moment == "step_finished":
            if stage != STAGE and int(row["stage_step"]) % 50:
                return
            parts = [f"{stage} step {row['stage_step']}"]
            named = {
                "reward": "reward/mean", "log-prob difference": "mismatch/logprob_abs_mean",
                "tokens": "tokens/sampled", "s": "time/step_s", "train": "time/train_s",
                "publish": "time/publish_s",
            }  # fmt: skip
            parts += [f"{name} {row[key]:.4g}" for name, key in named.items() if key in row]
            self._after = "at it"
            self._say(", ".join(parts), now)
        elif moment in ("evaluated", "warned", "stage_started", "run_finished"):
            told = {k: v for k, v in row.items() if "score" in k or k in ("text", "outcome", "why")}
            self._say(f"{moment} {stage} {told}", now)

    def _say(self, text: str, now: float) -> None:
        self._said = now
        print(f"{now - self._began:6.1f} s  {text}", file=sys.stderr, flush=True)


def run(args: argparse.Namespace, folder: Path) -> tuple[int | None, float]:
    """Its exit status, None when it was told to stop after `--limit-s`, and its seconds."""
    command = [sys.executable, "-m", "miles", "run", *words(args, folder)]
    print(" ".join(command), file=sys.stderr, flush=True)
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    began = time.monotonic()
    process = subprocess.Popen(command, cwd=folder, stdout=sys.stderr, env=environment)
    watch = Watch(folder / "run", began)
    late = False
    try:
        while process.poll() is None:
            time.sleep(0.5)
            watch.look()
            if not late and time.monotonic() - began > args.limit_s:
                late = True
                print(f"{args.limit_s:g} s are over", file=sys.stderr, flush=True)
                process.send_signal(signal.SIGINT)
            if late and time.monotonic() - began > args.limit_s + 20:
                break
    finally:
        process.kill()  # its workers and servers end with it
        status = process.wait()
    watch.look()
    return None if late else status, time.monotonic() - began


def judge(record: Record, args: argparse.Namespace) -> dict[str, Any]:
    """The figures that a run's record gives."""
    rl = record.of(STAGE)
    rewards = [row["reward/mean"] for row in rl]
    first = rewards[: max(1, min(FIRST, len(rl) // 10))]
    last = rewards[-max(1, min(LAST, len(rl) // 3)) :]
    gaps = [
        row["mismatch/logprob_abs_mean"]
        for row in rl
        if row.get("mismatch/tokens", 0) > 0 and "mismatch/logprob_abs_mean" in row
    ]
    steady = rl[min(WARMING, len(rl) - 1) :]
    seconds = sum(row["time/step_s"] for row in steady)
    return {
        "steps": len(rl),
        "steps_measured": len(gaps),
        "reward_first": statistics.fmean(first),
        "reward_last": statistics.fmean(last),
        "rise": statistics.fmean(last) - statistics.fmean(first),
        "rewards": [round(reward, 4) for reward in rewards],
        "scores": [
            value
            for row in record.evaluations
            for name, value in row.items()
            if name.startswith("eval/") and name.endswith("/score")
        ],
        "logprob_abs_mean_worst_step": max(gaps, default=None),
        "logprob_abs_mean": statistics.fmean(gaps) if gaps else None,
        "logprob_abs_max": max(row.get("mismatch/logprob_abs_max", 0) for row in rl),
        "token_mismatches": sum(row.get("session/token_mismatches", 0) for row in record.steps),
        "turns": statistics.fmean(row.get("session/turns", 0) for row in rl[-5:]),
        "staleness_mean": statistics.fmean(row.get("staleness/mean", 0) for row in rl),
        "tokens_sampled": sum(row.get("tokens/sampled", 0) for row in rl),
        "tokens_per_s": sum(row.get("tokens/sampled", 0) for row in steady) / seconds,
        "samples_per_s": sum(row.get("samples/trained", 0) for row in steady) / seconds,
        "median": {
            name: statistics.median(row[f"time/{name}_s"] for row in steady)
            for name in PARTS
            if f"time/{name}_s" in steady[-1]
        },
        "engine_tokens_per_s": statistics.median(r.get("engine/tokens_per_s", 0) for r in steady),
        "layout": args.layout,
        "ranks": args.ranks,
        "max_lag": args.max_lag,
    }


def checks(result: Mapping[str, Any], args: argparse.Namespace) -> dict[str, bool]:
    """Each limit in words, and whether it was met."""
    made = {
        f"it ended with {result['status']} after {result['wall_s']:.0f} s, 0 and at most "
        f"{args.limit_s:g} s are wanted": result["status"] == 0,
        f"{result['steps']} of {args.steps} steps": result["steps"] == args.steps,
        f"{result['token_mismatches']:.0f} token mismatches": not result["token_mismatches"],
    }
    if args.agentic:
        return made
    worst, measured = result["logprob_abs_mean_worst_step"], result["steps_measured"]
    wanted = args.steps if not args.max_lag else 0
    made[f"the log-probs of {measured} steps compared, {wanted} are wanted"] = measured >= wanted
    if worst is not None:
        made[f"mean log-prob difference of the worst step {worst:.4f}, at most {MISMATCH}"] = (
            worst <= MISMATCH
        )
    if args.rise is not None:
        made[f"the reward rose by {result['rise']:.3f}, at least {args.rise}"] = (
            result["rise"] >= args.rise
        )
    return made


def _rise(text: str) -> float | None:
    return None if text == "none" else float(text)


def parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("overrides", nargs="*", help="of the run, such as temperature=1")
    sglang_server.arguments(parser)
    parser.add_argument("--model", type=Path, help="directory of the checkpoint")
    parser.add_argument("--agentic", action="store_true", help="calculator_agent, from nothing")
    parser.add_argument("--steps", type=int, default=30, help="of reinforcement learning")
    parser.add_argument(
        "--layout", choices=("colocated", "disaggregated", "shared"), default="colocated"
    )
    parser.add_argument(
        "--ranks", type=int, default=1, help="of the trainer, and as many servers, on a GPU each"
    )
    parser.add_argument("--max-lag", type=int, default=0)
    parser.add_argument("--precision", choices=("bf16", "fp16"), default="bf16")
    parser.add_argument("--rise", type=_rise, default=0.05, help="of the reward; none has no limit")
    parser.add_argument("--limit-s", type=float, default=420.0, help="seconds for everything")
    parser.add_argument("--dir", type=Path, help="run in this empty folder and keep it")
    parser.add_argument("--json", type=Path, help="write the result here as well")
    args = parser.parse_intermixed_args(argv)
    if args.model is None and not args.agentic:
        parser.error("--model DIR is wanted, or --agentic")
    if args.max_lag and args.layout == "colocated":
        parser.error("--max-lag: a colocated server sleeps while the trainer works; take "
                     "--layout disaggregated")  # fmt: skip
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print, judge."""
    args = parsed(argv)
    with tempfile.TemporaryDirectory(prefix="miles-bench-", ignore_cleanup_errors=True) as own:
        folder = (args.dir or Path(own)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        status, wall = run(args, folder)
        directory = folder / "run"
        if status != 0:
            for name in ("sglang-0", "engine", "trainer", "rollout"):
                print(sglang_server.tail(directory / "logs" / f"{name}.log"), file=sys.stderr)
        result: dict[str, Any] = {"status": status, "wall_s": wall}
        if not (directory / "metrics.jsonl").exists() or not read(directory).of(STAGE):
            print(json.dumps({**result, "steps": 0, "within": False}), flush=True)
            return 1
        result |= judge(read(directory), args)
        server = directory / "engines" / "sglang-0.json"
        result["sglang"] = json.loads(server.read_text())["sglang"] if server.exists() else None
    found = checks(result, args)
    for line, good in found.items():
        print(f"{'good' if good else 'BAD '}  {line}", file=sys.stderr)
    result["within"] = all(found.values())
    text = json.dumps(result, indent=1)
    print(text, flush=True)
    if args.json:
        args.json.write_text(text + "\n", encoding="utf-8")
    return 0 if result["within"] else 1


if __name__ == "__main__":
    sys.exit(main())
