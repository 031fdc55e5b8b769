"""`-m` runs one fresh process a job, each in its own directory."""

from __future__ import annotations

import pytest


@pytest.mark.slow
def test_sweep_runs_every_combination_in_its_own_directory(command, tiny_overrides, tmp_path):
    ended = command(
        "run", "-m", "seed=1,2", f"run.dir={tmp_path}", *tiny_overrides, "stages.grpo.steps=1"
    )
    assert ended.code == 0, ended.text
    runs = sorted(path for path in tmp_path.iterdir() if (path / "metrics.jsonl").exists())
    assert len(runs) == 2
    seeds = {(run / "config.yaml").read_text().count("seed: 1") > 0 for run in runs}
    assert seeds == {True, False}


def test_sweep_with_a_bad_job_runs_none(command, tmp_path):
    ended = command("run", "-m", "steps=1,many", f"run.dir={tmp_path}")
    assert ended.code == 2
    assert "many" in ended.text
    assert not list(tmp_path.iterdir())
