"""CPU seconds of one GRPO step: miles against TRL's `GRPOTrainer`, on the same tiny Qwen3.

    python tests/bench/grpo_vs_trl.py [--venv DIR] [--steps 25] [--rounds 3] [--json FILE]

Both sides train the same model directory (random weights, about 100 k parameters, fp32) on the
same prompts: 8 prompts × 8 samples × 16 new tokens a step, one optimizer step over all 64
completions, AdamW at the same constant rate without weight decay, clipping at norm 1, no
reference model and no KL, temperature 1, no activation checkpointing, one torch thread. No
end-of-turn id exists for either, so that every completion has exactly 16 tokens. The reward is
the same Python function.

The figure is user plus system CPU seconds of every process of a side from the end of one step to
the end of the next: sampling, reward, log-probs, loss, backward, optimizer, moving weights and
each side's own bookkeeping (for miles: driver, trainer and engine processes, with metrics and
ledger written every step and weights published every step; with `--rollout-workers 1` a rollout
worker as well, as in default runs, which frees the driver for more CPU in all; for TRL: one
process, with its logging and saving off). Starting up, the first `--warmup` steps and writing
checkpoints are outside. The sides alternate, and each is the median over its steps.

TRL lives in a virtual environment of its own, made at the first run in `--venv` (or
`$MILES_BENCH_VENV`, or a cache folder). This is a measurement: it needs a package index the first
time and takes about a minute a round.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import clock

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
LIMIT = 0.7
PINS = ("trl==1.16.0", "transformers==5.24.0", "torch==2.13.0")
WORK = {"prompts": 8, "samples": 8, "new_tokens": 16, "lr": 1e-3, "seed": 0}


def prepare_venv(directory: Path) -> Path:
    """TRL's Python, made if it is not there; the constraints keep CUDA builds of torch away."""
    python = directory / "bin" / "python"
    stamp = directory / "pins.txt"
    if stamp.exists() and stamp.read_text().split() == list(PINS):
        return python
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(directory)], check=True)
    command = [str(python), "-m", "pip", "install", "--quiet", *PINS]
    constraints = ROOT / "constraints-cpu.txt"
    if constraints.exists():
        command += ["--constraint", str(constraints)]
    subprocess.run(command, check=True)
    stamp.write_text("\n".join(PINS))
    return python


def write_model(directory: Path) -> None:
    """A random Qwen3 with byte-level tokens as a Hugging Face directory; its end token is an id it
    cannot sample."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in printable]
    vocab = {chr(byte): byte for byte in printable}
    vocab |= {
        chr(256 + i): byte for i, byte in enumerate(rest)
    }  # the usual stand-ins of byte-level BPE
    core = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core)
    tokenizer.add_tokens([f"<|extra_{i}|>" for i in range(256, 264)], special_tokens=True)
    tokenizer.add_special_tokens({"pad_token": "<|extra_256|>", "eos_token": "<|never|>"})
    if tokenizer.eos_token_id != 264:
        raise RuntimeError(f"the end token is {tokenizer.eos_token_id}, which the model can sample")
    tokenizer.save_pretrained(directory)

    torch.manual_seed(WORK["seed"])
    config = Qwen3Config(
        vocab_size=264,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=192,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    Qwen3ForCausalLM(config).save_pretrained(directory)


def prompts(count: int) -> list[str]:
    """Additions as plain text, all equally long so that nobody pays for padding."""
    draw = random.Random(WORK["seed"])
    return [f"Add {draw.randint(10, 99)} and {draw.randint(10, 99)}: " for _ in range(count)]


def environment() -> dict[str, str]:
    """One thread everywhere, and nothing looked up on a hub."""
    single = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    return {**os.environ, **single, "HF_HUB_OFFLINE": "1"}


def run_trl(
    python: Path, scratch: Path, model: Path, texts: Sequence[str], steps: int
) -> list[float]:
    """CPU seconds of each of TRL's steps but the first."""
    spec = scratch / "trl.json"
    out = scratch / "trl_out.json"
    trl = {**WORK, "model": str(model), "texts": texts, "steps": steps, "out": str(out)}
    spec.write_text(json.dumps({**trl, "scratch": str(scratch / "trl_output")}))
    run_quietly([str(python), str(HERE / "trl_half.py"), str(spec)], scratch / "trl.log")
    result = json.loads(out.read_text())
    if set(result["lengths"]) != {WORK["new_tokens"]}:
        raise RuntimeError(f"TRL's completions have lengths {sorted(set(result['lengths']))}")
    marks = result["marks"]
    return [after - before for before, after in pairwise(marks)]


def miles_overrides(
    scratch: Path, model: Path, data: Path, *, steps: int, name: str, rollout_workers: int
) -> list[str]:
    """The same work in miles' words."""
    return [
        f"rollout_workers={rollout_workers}",
        "experiment=grpo",
        f"plugins=[{HERE / 'endless.py'},{HERE / 'clock.py'}]",
        f"run.dir={scratch}",
        f"run.name={name}",
        f"seed={WORK['seed']}",
        f"steps={steps}",
        f"groups_per_step={WORK['prompts']}",
        f"samples_per_group={WORK['samples']}",
        f"max_new_tokens={WORK['new_tokens']}",
        "environment=dataset",
        f"environment.path={data}",
        "environment.answer=",
        "environment.chat=false",
        "environment.reward=evenness",
        "selector.admit=[]",
        "tito=endless",
        "model.init=load",
        f"model.path={model}",
        "precision=fp32",
        "algorithm=grpo",
        "trainer=fsdp",
        f"trainer.lr={WORK['lr']}",
        "trainer.schedule=constant",
        "trainer.weight_decay=0",
        "engine=torch",
        "evaluator=null",
        "tracker=[jsonl]",
    ]


def run_miles(
    scratch: Path,
    model: Path,
    texts: Sequence[str],
    *,
    steps: int,
    name: str,
    rollout_workers: int,
) -> list[dict[str, float]]:
    """CPU seconds of each of miles' steps but the first."""
    data = scratch / "prompts.jsonl"
    data.write_text("".join(json.dumps({"prompt": t, "answer": ""}) + "\n" for t in texts))
    overrides = miles_overrides(
        scratch, model, data, steps=steps, name=name, rollout_workers=rollout_workers
    )
    run_quietly([sys.executable, "-m", "miles.cli", "run", *overrides], scratch / f"{name}.log")
    found = clock.costs(clock.read(scratch / name))
    expected = WORK["prompts"] * WORK["samples"] * WORK["new_tokens"]
    if any(step["sampled"] != expected for step in found):
        raise RuntimeError(f"miles sampled {sorted({s['sampled'] for s in found})}, not {expected}")
    return found


def run_quietly(command: Sequence[str], log: Path) -> None:
    """Run to the end, its output in a file; on failure the end of it is the message."""
    with log.open("w") as out:
        code = subprocess.run(command, stdout=out, stderr=out, env=environment(), check=False)
    if code.returncode:
        tail = "\n".join(log.read_text().splitlines()[-30:])
        raise RuntimeError(f"{command[0]} ended with {code.returncode}:\n{tail}")


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, judge."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "miles-bench" / "trl"
    parser.add_argument("--venv", type=Path, default=os.environ.get("MILES_BENCH_VENV", cache))
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=3)
    words = "miles' rollout workers; 0, the default here, plays in the driver"
    parser.add_argument("--rollout-workers", type=int, default=0, help=words)
    parser.add_argument("--json", type=Path, help="write the result here as well")
    parser.add_argument("--only", choices=("trl", "miles"), help="measure one side, judge nothing")
    args = parser.parse_args(argv)

    python = None if args.only == "miles" else prepare_venv(Path(args.venv).resolve())
    trl: list[float] = []
    miles: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory(prefix="miles-bench-") as folder:
        scratch = Path(folder)
        model = scratch / "model"
        write_model(model)
        texts = prompts(args.steps * WORK["prompts"])
        for turn in range(args.rounds):
            if python is not None:
                trl += run_trl(python, scratch, model, texts, args.steps)[args.warmup :]
            if args.only != "trl":
                found = run_miles(
                    scratch,
                    model,
                    texts,
                    steps=args.steps,
                    name=f"run_{turn}",
                    rollout_workers=args.rollout_workers,
                )
                miles += found[args.warmup :]
    result = summary(trl, miles)
    print(json.dumps(result, indent=2))
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")
    return 0 if args.only or result["ratio"] <= LIMIT else 1


def summary(trl: Sequence[float], miles: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Medians and their ratio, after printing them as a table."""
    result: dict[str, Any] = {"limit": LIMIT, "pins": list(PINS), "machine": platform.platform()}
    print(f"{'side':<8} {'CPU s a step, median':>22} {'quartiles':>20} {'steps':>6}")
    for side, costs in (("TRL", trl), ("miles", [step["total"] for step in miles])):
        if len(costs) < 2:
            continue
        low, middle, high = statistics.quantiles(costs, n=4)
        print(f"{side:<8} {middle:>22.4f} {f'{low:.4f} to {high:.4f}':>20} {len(costs):>6}")
        result[side] = {"median_s": middle, "quartiles_s": [low, high], "steps": len(costs)}
    if miles:
        names = [name for name in miles[0] if name == "driver" or name.endswith(" worker")]
        parts = {name: statistics.median(step[name] for step in miles) for name in names}
        print("miles: " + ", ".join(f"{name} {spent:.4f}" for name, spent in parts.items()))
        result["miles"]["parts_s"] = parts
    if "TRL" in result and "miles" in result:
        result["ratio"] = result["miles"]["median_s"] / result["TRL"]["median_s"]
        print(f"miles / TRL: {result['ratio']:.3f} (at most {LIMIT})")
    return result


if __name__ == "__main__":
    sys.exit(main())
