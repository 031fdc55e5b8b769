"""The report page, from finished, running and damaged runs."""

import fcntl
import json
import random
import re
import time
from html.parser import HTMLParser
from pathlib import Path

import pytest

from miles.errors import ConfigError
from miles.report import write

VOID = {"meta", "br"}


class Balanced(HTMLParser):
    """Every element that opens closes, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.seen.add(tag)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: object) -> None:
        self.seen.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def make_run(directory: Path, *, sft: int = 60, grpo: int = 30, finished: bool = True) -> Path:
    noise = random.Random(0)
    planned = {"sft": sft, "grpo": grpo}
    lines = [{"moment": "run_started", "at": 0.0, "steps": planned}]
    for step in range(1, sft + grpo + 1):
        stage = "sft" if step <= sft else "grpo"
        line = {"moment": "step_finished", "at": step / 10, "step": step, "stage": stage}
        line |= {"time/step_s": 0.1, "time/wait_s": 0.03, "time/train_s": 0.05, "grad_norm": 1.0}
        line |= {"tokens/trained": 100, "groups/in_flight": 3, "groups/buffered": 1}
        if stage == "sft":
            line |= {"loss/nll": 1 / step}
        else:
            line |= {"loss/policy": noise.gauss(0, 1), "reward/mean": step / 100}
            line |= {"mismatch/logprob_abs_max": 1e-5, "groups/dropped/zero_variance": step % 3}
            line |= {"env/digits": 0.5, "engine/tokens_per_s": 4000.0}
            line |= {"session/turns": 3 - 1 / step, "session/token_mismatches": 0}
            line |= {"env/tools/errors": 0.25, "router/prefix_hit_rate": 0.9375}
            line |= {"length/trained": 9.0, "length/returned": 10.0, "length/bias": -0.1}
            line |= {"samples/truncated": 0.25, "buffer/age_mean_s": 1.0, "buffer/age_max_s": 2.0}
            line |= {"staleness/mean": 0.5, "staleness/max": 1, "staleness/waiting_max": 1}
            line |= {"staleness/lag_0": 4, "staleness/lag_1": 4}
            line |= {"tokens/lag_0": 60, "tokens/lag_1": 40}
        lines.append(line)
    for step, score in ((0, 0.0), (sft, 0.4)):
        named = {"eval/heldout/score": score, "eval/heldout/stderr": 0.02}
        named |= {"eval/heldout/samples": 128, "eval/heldout/failures": 0.0}
        named |= {"eval/heldout/low": 0.31, "eval/heldout/high": 0.49, "eval/heldout/pass_4": 0.7}
        named |= {"eval/heldout/pass_4_low": 0.6, "eval/heldout/lag_steps": 3}
        lines.append({"moment": "evaluated", "step": step, "set": "heldout", **named})
    last = sft + grpo
    skipped = {"set": "heldout", "eval/heldout/skipped": "too <late>"}
    lines.append({"moment": "evaluated", "step": last, **skipped})
    lines += [{"moment": "warned", "text": f"mismatch {i} over budget"} for i in (1, 2)]
    if finished:
        lines.append({"moment": "run_finished", "at": last / 10, "outcome": "finished"})
    (directory / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    task = {"id": "t", "prompt": [{"role": "user", "content": "1+1="}], "answer": "2"}
    sample = {"step": 25, "stage": "sft", "task": task, "text": "<b>2</b>", "reward": 1.0}
    (directory / "samples.jsonl").write_text(json.dumps(sample) + "\n")
    (directory / "config.yaml").write_text("stages:\n  sft: <x>\n")
    (directory / "plugins.json").write_text('{"distributions": {"miles": "9.8.7"}, "files": {}}')
    return directory


def page(directory: Path) -> str:
    text = write(directory).read_text(encoding="utf-8")
    parser = Balanced()
    parser.feed(text)
    assert parser.open == []
    return text


def test_report_shows_all_turns_of_a_sample(tmp_path: Path) -> None:
    directory = make_run(tmp_path)
    sample = {"step": 25, "task": {"prompt": "1+1="}, "text": "2", "reward": 1.0}
    sample["conversation"] = "<|user|>1+1=<|assistant|>python(1+1)<|tool|>2<|assistant|>2"
    (directory / "samples.jsonl").write_text(json.dumps(sample) + "\n")
    assert "&lt;|assistant|&gt;python(1+1)&lt;|tool|&gt;2" in page(directory)


def test_report_shows_everything_that_is_known(tmp_path: Path) -> None:
    text = page(make_run(tmp_path))
    assert "sft 60/60 → grpo 30/30" in text
    for words in (
        "Reward",
        "Evaluation",
        "Mismatch of trainer and rollout",
        "Where a step&#x27;s time goes",
        "Loss terms, sft",
        "Loss terms, grpo",
        "Length",
        "Staleness",
        "Dropped groups",
        "zero_variance",
        "env/digits",
        "<small>turns</small>",
        "<small>token mismatches</small><b>0</b>",
        "<small>tool errors</small><b>0.25</b>",
        "<small>prefix-cache hits</small><b>93.8 %</b>",
        "Prefix-cache hit rate",
        "Trained tokens",
        "env/tools/errors",
        "0.4 ± 0.02 [0.31, 0.49]",
        "pass_4 0.7, failures 0, lag_steps 3",
        "<small>length bias, grpo</small><b>-10.0 %</b>",
        "Length of what was trained, and of all that came back",
        "Trained tokens by age",
        "1 steps old",
        "Trained groups by staleness",
        "Age of groups that wait",
        "Truncated",
        "skipped: too &lt;late&gt;",
        "mismatch 2 over budget",
        "2×",
        "9.8.7",
        "sft: &lt;x&gt;",
        "user: 1+1=",
        "&lt;b&gt;2&lt;/b&gt;",
    ):
        assert words in text, words


def test_report_needs_no_network(tmp_path: Path) -> None:
    text = page(make_run(tmp_path))
    assert not re.findall(r"(?:src|href)=|url\(|https?://|@import", text)


def test_report_of_a_run_in_progress(tmp_path: Path) -> None:
    directory = make_run(tmp_path, finished=False)
    with (directory / "metrics.jsonl").open("a") as file:
        file.write('{"moment": "step_fin')
    assert '<em class="unfinished">unfinished</em>' in page(directory)  # nobody holds it
    with (directory / "lock").open("a+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        assert '<em class="running">running</em>' in page(directory)


def test_report_of_a_run_that_nobody_recorded_does_not_say_that_it_runs(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("seed: 0\n")
    assert '<em class="unrecorded">unrecorded</em>' in page(tmp_path)


def test_report_of_a_run_that_nobody_recorded_says_why_it_is_empty(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "config.yaml").write_text("seed: 0\n")
    why = "there is no metrics.jsonl: no tracker of this run wrote it, or it was lost"
    assert f"<tr><td>unrecorded</td><td>{why}" in page(tmp_path)
    assert f"{tmp_path / 'report.html'} is empty: {why}" in caplog.text
    caplog.clear()
    page(make_run(tmp_path))
    assert not caplog.text


def test_report_of_a_run_that_took_no_step(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("seed: 0\n")
    text = page(tmp_path)
    assert "no step yet" in text
    assert "not measured" in text


def test_report_of_values_that_are_no_numbers(tmp_path: Path) -> None:
    line = {"moment": "step_finished", "step": 1, "stage": "s", "reward/mean": None, "lr": "x"}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    assert "not measured" in page(tmp_path)


def test_report_is_written_again_in_place(tmp_path: Path) -> None:
    make_run(tmp_path)
    assert write(tmp_path) == write(tmp_path) == tmp_path / "report.html"
    assert not list(tmp_path.glob(".report*"))


def test_report_refuses_a_directory_without_a_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no run here"):
        write(tmp_path / "nowhere")


@pytest.mark.slow
def test_report_of_a_long_run_is_small_and_quick(tmp_path: Path) -> None:
    make_run(tmp_path, sft=20_000, grpo=10_000)
    began = time.process_time()
    size = write(tmp_path).stat().st_size
    assert size < 600_000
    assert time.process_time() - began < 5
