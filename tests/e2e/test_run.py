"""What a run of both stages leaves behind, and that all of it can be used."""

from __future__ import annotations

import hashlib
import json
import math
import os
from pathlib import Path

import pytest

from miles.metrics import faults


def test_run_takes_every_step_of_both_stages(tiny):
    stages = [row["stage"] for row in tiny.steps.values()]
    assert list(tiny.steps) == [1, 2, 3, 4, 5, 6]
    assert stages == ["sft"] * 3 + ["grpo"] * 3


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["memory", "disk_delta"])
def test_run_in_float16_goes_on_through_steps_that_change_nothing(
    new_run, tiny_overrides, transport
):
    """A scale far too large at first: versions count on, engines are sent the same weights again,
    and groups are accounted for as trained."""
    ran = new_run(
        *tiny_overrides,
        "precision=fp16",
        "precision.loss_scale=4194304",
        "stages.grpo.algorithm.entropy=1.0",  # gradients without rewards
        f"transport={transport}",
        name=f"fp16-{transport}",
    )
    rl = [row for row in ran.steps.values() if row["stage"] == "grpo"]
    skipped = [row["trainer/skipped_steps"] for row in ran.steps.values()]
    assert skipped[0] == skipped[3] == 1.0  # each stage settles its own scale
    assert [row["version"] for row in ran.steps.values()] == [1, 2, 3, 4, 5, 6]
    assert all(row["mismatch/logprob_abs_mean"] < 0.01 for row in rl)
    assert all(row["groups/trained"] == 4 for row in rl)
    assert [fault for row in ran.rows for fault in faults(row)] == []
    told = (ran.directory / "metrics.jsonl").read_text().splitlines()
    assert sum("changed no weight" in line for line in told) == sum(skipped)


def test_run_names_only_documented_metrics(tiny):
    assert [fault for row in tiny.rows for fault in faults(row)] == []


def test_run_measures_mismatch_at_every_rl_step(tiny):
    for row in tiny.steps.values():
        if row["stage"] == "grpo":
            assert row["mismatch/tokens"] > 0
            assert row["mismatch/logprob_abs_max"] < 1e-4
            assert abs(row["mismatch/k3"]) < 1e-4


def test_run_accounts_for_every_group(tiny):
    for row in tiny.steps.values():
        dropped = sum(v for name, v in row.items() if name.startswith("groups/dropped/"))
        assert row["groups/trained"] == (8 if row["stage"] == "sft" else 4)
        assert row["staleness/max"] == 0
        assert row["groups/started"] >= row["groups/trained"] - dropped
    fates: dict[int, str] = {}
    for line in (tiny.directory / "ledger.jsonl").read_text().splitlines():
        entry = json.loads(line)
        for fate in entry.keys() - {"step", "started"}:
            for group in entry[fate]:
                assert group not in fates, f"group {group} ended as {fates[group]} and {fate}"
                fates[group] = fate
    assert sum(fate == "trained" for fate in fates.values()) == 3 * 8 + 3 * 4


def test_run_evaluates_before_between_and_after(tiny):
    scores = [
        (row["step"], value)
        for row in tiny.rows
        for name, value in row.items()
        if name.startswith("eval/") and name.endswith("/score")
    ]
    assert [step for step, _ in scores] == [0, 3, 6]
    assert all(0 <= score <= 1 for _, score in scores)


def test_run_learns_something_in_the_first_stage(tiny):
    losses = [row["loss/nll"] for row in tiny.steps.values() if row["stage"] == "sft"]
    assert all(math.isfinite(loss) for loss in losses)
    assert losses[-1] < losses[0]


def test_run_directory_holds_what_the_design_says(tiny):
    names = {path.name for path in tiny.directory.iterdir()}
    assert {"config.yaml", "plugins.json", "metrics.jsonl", "ledger.jsonl", "checkpoints"} <= names
    assert {"logs", "report.html"} <= names
    logs = {path.name for path in (tiny.directory / "logs").iterdir()}
    assert any(name.startswith("trainer") for name in logs)
    assert any(name.startswith("engine") for name in logs)


def test_run_writes_a_report_that_needs_no_network(tiny):
    page = (tiny.directory / "report.html").read_text()
    for word in ("reward", "mismatch", "<svg"):
        assert word in page
    assert "http://" not in page.replace("http://www.w3.org", "")
    assert "https://" not in page


def test_run_prints_plain_lines_when_output_is_not_a_terminal(tiny):
    assert "\x1b[" not in tiny.ended.out
    assert "reward" in tiny.ended.out


def test_run_checkpoints_every_step_and_lists_a_digest_of_every_file(tiny):
    assert [path.name for path in tiny.checkpoints] == [f"step_{n:06d}" for n in range(1, 7)]
    last = tiny.checkpoints[-1]
    manifest = json.loads((last / "manifest.json").read_text())
    files = {str(p.relative_to(last)) for p in last.rglob("*") if p.is_file()}
    assert files == manifest.keys() | {"manifest.json"}
    for name, digest in manifest.items():
        assert hashlib.sha256((last / name).read_bytes()).hexdigest() == digest
    assert {"state.json", "selector.json", "plugins.json", "model/config.json"} <= manifest.keys()


def test_run_checkpoint_loads_with_transformers_as_it_is(tiny):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = tiny.checkpoints[-1] / "model"
    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    chat = [{"role": "user", "content": "12+34="}]
    ids = tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    made = model.generate(**ids, max_new_tokens=4, do_sample=False)
    assert made.shape[1] <= ids["input_ids"].shape[1] + 4


def test_run_checkpoint_tokenizer_agrees_with_the_tito_handler(tiny):
    from transformers import AutoTokenizer

    from miles_plugins.tito.bytes import Bytes

    handler = _build(Bytes)
    tokenizer = AutoTokenizer.from_pretrained(tiny.checkpoints[-1] / "model")
    chat = [{"role": "user", "content": "12+34="}]
    theirs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    assert list(theirs) == handler.render(chat).tolist()


def _build(component):
    from pathlib import Path

    from miles import Context

    return component(component.Config(), Context(directory=Path()))


def test_run_tensorboard_reads_the_same_numbers_back(tiny):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    files = sorted(tiny.directory.rglob("events.out.tfevents*"))
    assert files
    found = accumulator.EventAccumulator(str(files[0].parent))
    found.Reload()
    values = {event.step: event.value for event in found.Scalars("loss/nll")}
    for step, row in tiny.steps.items():
        if row["stage"] == "sft":
            assert values[step] == pytest.approx(row["loss/nll"], rel=1e-6)


def test_run_wandb_offline_leaves_a_run_to_sync(tiny):
    pytest.importorskip("wandb")
    assert list(tiny.directory.rglob("run-*.wandb"))


def test_run_logs_its_driver_to_a_file(tiny):
    text = (tiny.directory / "logs" / "driver.log").read_text()
    assert "Traceback" not in text


def test_finished_run_leaves_no_process_behind(tiny):
    """Every worker's command line names its run, or its log would; none may be left of this one."""
    left = [
        entry.name
        for entry in Path("/proc").iterdir()
        if entry.name.isdigit()
        and "miles.worker" in _command_line(entry)
        and _cwd_or_log(entry, tiny.directory)
    ]
    assert left == []


def _command_line(entry):
    try:
        return (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


def _cwd_or_log(entry, directory):
    try:
        opened = [os.readlink(link) for link in (entry / "fd").iterdir()]
    except OSError:
        return False
    return any(path.startswith(str(directory)) for path in opened)
