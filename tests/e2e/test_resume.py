"""A run that is stopped and resumed is, bit for bit, the run that was never stopped."""

from __future__ import annotations

import json
import shutil

import pytest

EXACT = (
    "loss/",
    "reward/",
    "mismatch/",
    "tokens/",
    "length/mean",
    "groups/trained",
    "grad_norm",
    "lr",
)


def _learned(run, steps):
    """What a step's line says about learning, without clocks."""
    return {
        step: {k: v for k, v in run.steps[step].items() if k.startswith(EXACT)} for step in steps
    }


def _weights(run):
    last = run.checkpoints[-1]
    files = [*sorted((last / "model").glob("*.safetensors")), *sorted((last / "trainer").iterdir())]
    assert files
    return {str(f.relative_to(last)): f.read_bytes() for f in files if f.is_file()}


def _crashed_copy(run, folder, step):
    """The directory as a machine that lost power after `step` leaves it: a half-written next
    checkpoint too."""
    copy = folder / "crashed"
    shutil.copytree(run.directory, copy)
    for path in (copy / "checkpoints").glob("step_*"):
        if int(path.name[5:]) > step:
            shutil.rmtree(path)
    half = copy / "checkpoints" / f".step_{step + 1:06d}.partial" / "model"
    half.mkdir(parents=True)
    (half / "model.safetensors").write_bytes(b"half")
    return type(run)(copy, run.ended)


@pytest.mark.slow
@pytest.mark.parametrize("step", [2, 4], ids=["in-sft", "in-grpo"])
def test_resume_after_a_crash_gives_the_same_losses_and_weights(tiny, command, tmp_path, step):
    copy = _crashed_copy(tiny, tmp_path, step)
    before = copy.steps
    ended = command("run", f"resume={copy.directory}", "tracker=[jsonl]")
    assert ended.code == 0, ended.text
    again = range(step + 1, 7)
    for n, row in copy.steps.items():
        assert (row == before[n]) == (n not in again), f"step {n} was taken again, or was not"
    assert _learned(copy, again) == _learned(tiny, again)
    assert _weights(copy) == _weights(tiny)


@pytest.mark.slow
def test_resume_marks_what_the_lost_weights_were_trained_on(tiny, command, tmp_path):
    from miles.records.ledger import fates

    copy = _crashed_copy(tiny, tmp_path, 5)
    ended = command("run", f"resume={copy.directory}", "tracker=[jsonl]")
    assert ended.code == 0, ended.text
    lines = [json.loads(x) for x in (copy.directory / "ledger.jsonl").read_text().splitlines()]
    assert any("rolled_back" in line for line in lines)
    once = fates(copy.directory / "ledger.jsonl")
    assert once == fates(tiny.directory / "ledger.jsonl")
    assert all(len(fate) == 1 for fate in once.values())


@pytest.mark.slow
def test_driver_killed_after_a_checkpoint_loses_no_row_of_its_step(
    tiny, tiny_overrides, new_run, command, write
):
    """Weights and ledger had the step; metrics.jsonl never did."""
    plugin = write(
        "kill.py",
        "import os, pathlib, signal\n"
        "import miles\n\n"
        "KILLED = pathlib.Path(__file__).with_name('killed')\n\n"
        "@miles.hookimpl\n"
        "def miles_checkpoint_saved(step, directory):\n"
        "    if step == 5 and not KILLED.exists():\n"
        "        KILLED.touch()\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n",
    )
    words = (*tiny_overrides, "checkpoint_every=1", f"plugins=[{plugin}]")
    killed = new_run(*words, code=-9)
    assert killed.checkpoints[-1].name == "step_000005" and 5 not in killed.steps
    ended = command("run", f"resume={killed.directory}")
    assert ended.code == 0, ended.text
    assert [row["step"] for row in killed.rows if "time/step_s" in row] == [1, 2, 3, 4, 5, 6]
    assert _learned(killed, range(1, 7)) == _learned(tiny, range(1, 7))
    assert set(killed.steps[5]) == set(tiny.steps[5])


def _interrupting(write, step):
    """A plugin file that sends the first Ctrl-C after this step, once."""
    write("flag", "")
    return write(
        "interrupt.py",
        "import os, pathlib, signal\n"
        "import miles\n\n"
        "FLAG = pathlib.Path(__file__).with_name('flag')\n\n"
        "@miles.hookimpl\n"
        "def miles_step_finished(step, groups, update, metrics):\n"
        f"    if step == {step} and FLAG.exists():\n"
        "        FLAG.unlink()\n"
        "        os.kill(os.getpid(), signal.SIGINT)\n",
    )


@pytest.mark.slow
def test_interrupt_writes_a_checkpoint_exits_130_and_resumes_exactly(
    tiny, tiny_overrides, new_run, command, write
):
    """Ctrl-C lands after step 4; the tokens of the next steps must not notice."""
    plugin = _interrupting(write, 4)
    stopped = new_run(*tiny_overrides, f"plugins=[{plugin}]", code=130)
    assert stopped.checkpoints[-1].name == "step_000004"
    assert "Traceback" not in stopped.ended.text
    ended = command("run", f"resume={stopped.directory}")
    assert ended.code == 0, ended.text
    assert _learned(stopped, range(1, 7)) == _learned(tiny, range(1, 7))
    assert _weights(stopped) == _weights(tiny)


@pytest.mark.slow
def test_interrupt_during_the_last_evaluation_is_scored_by_the_resumed_run(
    tiny, tiny_overrides, new_run, command, write
):
    """All steps were taken, so the resumed run said that it had finished, without the score."""
    plugin = _interrupting(write, 6)
    stopped = new_run(*tiny_overrides, f"plugins=[{plugin}]", code=130)
    assert stopped.checkpoints[-1].name == "step_000006"

    def scored():
        return [row["step"] for row in stopped.rows if "eval/heldout/score" in row]

    assert max(scored()) < 6
    ended = command("run", f"resume={stopped.directory}")
    assert ended.code == 0, ended.text
    assert 6 in scored() and _weights(stopped) == _weights(tiny)
    again = command("run", f"resume={stopped.directory}")
    assert again.code == 0, again.text
    assert scored().count(6) == 1


@pytest.mark.slow
def test_resume_with_more_steps_continues_a_finished_run(tiny, command, tmp_path):
    copy = _crashed_copy(tiny, tmp_path, 6)
    ended = command("run", f"resume={copy.directory}", "stages.grpo.steps=4", "tracker=[jsonl]")
    assert ended.code == 0, ended.text
    assert max(copy.steps) == 7
    assert copy.checkpoints[-1].name == "step_000007"


def test_resume_with_another_configuration_shows_the_difference(tiny, miles):
    ended = miles("run", f"resume={tiny.directory}", "stages.grpo.trainer.lr=0.5")
    assert ended.code == 2
    assert "trainer.lr" in ended.err
    assert "0.5" in ended.err
    assert "Traceback" not in ended.err


def test_resume_refuses_a_damaged_checkpoint_and_names_the_newest_good_one(tiny, miles, tmp_path):
    copy = _crashed_copy(tiny, tmp_path, 6)
    weights = copy.checkpoints[-1] / "model" / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    ended = miles("run", f"resume={copy.directory}")
    assert ended.code == 1
    assert "model/model.safetensors is damaged" in ended.err
    assert str(copy.checkpoints[-2]) in ended.err


def test_resume_refuses_a_half_written_checkpoint(tiny, miles, tmp_path):
    copy = _crashed_copy(tiny, tmp_path, 6)
    (copy.checkpoints[-1] / "manifest.json").unlink()
    ended = miles("run", f"resume={copy.checkpoints[-1]}")
    assert ended.code == 1
    assert "manifest.json is missing" in ended.err
    assert str(copy.checkpoints[-2]) in ended.err


def test_resume_from_nowhere_says_so(miles):
    ended = miles("run", "resume=/no/such/run")
    assert ended.code == 2
    assert "/no/such/run" in ended.err
    assert "no such directory" in ended.err


def test_two_runs_in_one_directory_are_refused(tiny, miles):
    where = (f"run.dir={tiny.directory.parent}", f"run.name={tiny.directory.name}")
    before = sorted(p.name for p in tiny.directory.iterdir())
    ended = miles("run", *where)
    assert ended.code == 2
    assert str(tiny.directory) in ended.err
    assert "resume=" in ended.err
    assert sorted(p.name for p in tiny.directory.iterdir()) == before


def test_directory_of_a_running_run_is_refused(tiny, miles):
    import fcntl
    import os

    with (tiny.directory / "lock").open("a+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        ended = miles("run", f"resume={tiny.directory}")
    assert ended.code == 2
    assert "in use by another run" in ended.err
    assert str(os.getpid()) in ended.err or "process" in ended.err
