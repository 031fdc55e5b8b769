"""Things that go wrong only once a run is under way: it stops with the cause, and nothing is
lost."""

from __future__ import annotations

import json
import os
import shutil
import subprocess

import pytest

RL = ("stages.sft.steps=1", "stages.grpo.steps=3", "evaluator=null", "tracker=[jsonl]")
SMALL = ("groups_per_step=2", "samples_per_group=2")

REWARD = """
import miles


def wrong(text, task):
    return {value}


@miles.hookimpl
def miles_rewards():
    return {{"wrong": wrong}}
"""


@pytest.fixture
def data(write):
    """Two good tasks."""
    rows = [{"prompt": f"{n}+1=", "answer": str(n + 1), "solution": str(n + 1)} for n in range(2)]
    return write("data.jsonl", "".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def rl(miles, tmp_path):
    """Run GRPO alone, three small steps, in this process."""

    def start(*overrides):
        where = (f"run.dir={tmp_path}", "run.name=run", "experiment=grpo")
        return miles(
            "run", *where, "steps=3", *SMALL, "evaluator=null", "tracker=[jsonl]", *overrides
        )

    return start


@pytest.mark.parametrize(
    ("value", "words"),
    [
        pytest.param("float('nan')", ["NaN"], id="nan", marks=pytest.mark.slow),
        pytest.param("None", ["None"], id="none", marks=pytest.mark.slow),
        pytest.param("[1.0, 0.0]", ["2 values"], id="length", marks=pytest.mark.slow),
        pytest.param("1e39", ["float32"], id="range", marks=pytest.mark.slow),
        pytest.param("text.no_such", ["no_such"], id="raises", marks=pytest.mark.slow),
    ],
)
def test_rewards_that_are_no_numbers_stop_the_run_with_the_environment_named(
    rl, data, write, tmp_path, value, words
):
    plugin = write("reward.py", REWARD.format(value=value))
    ended = rl(
        f"plugins=[{plugin}]",
        "environment=dataset",
        f"environment.path={data}",
        "environment.reward=wrong",
    )
    assert ended.code == 1, ended.text
    assert "dataset" in ended.err
    for word in words:
        assert word in ended.err
    assert "Traceback" not in ended.err or value == "text.no_such"
    metrics = tmp_path / "run" / "metrics.jsonl"
    assert not metrics.exists() or "reward/mean" not in metrics.read_text()


@pytest.mark.slow
def test_groups_that_are_all_dropped_starve_the_run_with_what_was_seen(rl, data, write, tmp_path):
    plugin = write("reward.py", REWARD.format(value="1.0"))
    ended = rl(
        f"plugins=[{plugin}]",
        "environment=dataset",
        f"environment.path={data}",
        "environment.reward=wrong",
        "selector.admit=[zero_variance]",
        "starved_after_s=2",
    )
    assert ended.code == 1, ended.text
    assert "the trainer starved: 0 of 2 groups in " in ended.err
    assert "zero_variance" in ended.err
    assert "dropped" in ended.err
    lines = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    told = [x["text"] for x in lines if x["moment"] == "warned" and "trainer waits" in x["text"]]
    assert 1 <= len(told) <= 9  # it was not silent meanwhile, nor did it say so all the time
    assert "0 of 2 groups" in told[0] and "dropped: " in told[-1]
    page = (tmp_path / "run" / "report.html").read_text()
    assert "the trainer starved: 0 of 2 groups in " in page
    assert "100% of the dropped groups had equal rewards" in page


@pytest.mark.slow
def test_a_prompt_longer_than_the_context_is_refused_by_name(rl, write):
    long = "1+" * 2000
    rows = [{"prompt": long, "answer": "1"}]
    path = write("long.jsonl", json.dumps(rows[0]) + "\n")
    ended = rl(
        "environment=dataset",
        f"environment.path={path}",
        "environment.reward=exact",
    )
    assert ended.code == 2, ended.text
    assert "the prompt of task 'row-1' has 40" in ended.err
    assert "do not fit" in ended.err


@pytest.mark.slow
def test_a_full_disk_stops_the_run_naming_the_file_and_keeps_the_last_checkpoint(
    tiny_overrides, command, tmp_path
):
    """On a file system of two megabytes: some checkpoints fit, the next does not."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=5m", "tmpfs", str(disk)]
    if shutil.which("mount") is None or os.geteuid() != 0 or subprocess.run(mount).returncode:
        pytest.skip("no file system can be mounted here")
    try:
        ended = command(
            "run",
            f"run.dir={disk}",
            "run.name=run",
            *tiny_overrides,
            "stages.sft.steps=9",
            "checkpoint_every=1",
            "keep_checkpoints=0",
        )
        assert ended.code == 1, ended.text
        assert "No space left on device" in ended.err
        assert str(disk) in ended.err
        assert "Traceback" not in ended.err
        left = sorted((disk / "run" / "checkpoints").iterdir())
        assert left
        assert not [path for path in left if path.name.endswith(".partial")]
        from miles import checkpoint

        for path in left:
            checkpoint.verify(path)
    finally:
        subprocess.run(["umount", str(disk)], check=True)
