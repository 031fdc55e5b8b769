"""Terminal tasks: the shipped ones are sound, tests cannot be cheated, Harbor's layout is read."""

import asyncio
import shutil
import time
from pathlib import Path

import pytest

from miles import ConfigError, Context, EpisodeError, SandboxError
from miles.check import check
from miles.config import compose
from miles.plugins import Registry
from miles.testing import FakeSandbox, play_episode, tool_call
from miles_plugins.environment.terminal import Terminal
from miles_plugins.environment.terminal.layout import read_folder

HERE = Path(".")
SHIPPED = Terminal(Terminal.Config(), Context(directory=HERE)).folders


def make(sandbox=None, **config):
    return Terminal(Terminal.Config(**config), Context(directory=HERE, sandbox=sandbox))


def task_of(environment, name):
    return next(t for s in ("train", "heldout") for t in environment.tasks(s) if t.id == name)


def play(environment, name, *commands, **how):
    replies = [*(tool_call("shell", command=c) for c in commands), "done"]
    return asyncio.run(play_episode(environment, task_of(environment, name), replies, **how))


def results(played):
    return [m["content"] for m in played.messages if m["role"] == "tool"]


def solution(folder):
    script = (folder.path / "solution" / "solve.sh").read_text()
    return f"bash -s <<'END_OF_SOLUTION'\n{script}END_OF_SOLUTION\n"


# ---------------------------------------------------------------- the tasks that ship


def test_twenty_tasks_ship_in_two_splits_and_say_what_to_do():
    environment = make()
    assert len(SHIPPED) == 20
    ids = {s: {t.id for t in environment.tasks(s)} for s in ("train", "heldout")}
    assert ids["heldout"] and not ids["train"] & ids["heldout"]
    for folder in SHIPPED.values():
        assert len(folder.instruction) > 80
        assert folder.files
        assert folder.agent_s == 120 and folder.verifier_s == 30 and folder.command_s == 20


@pytest.mark.parametrize("name", ["count-words", "fix-cache"])
def test_reference_solution_passes_and_doing_nothing_fails(name):
    environment = make(FakeSandbox())
    solved = play(environment, name, solution(SHIPPED[name]))
    assert (solved.reward, solved.metrics["tools/errors"]) == (1.0, 0), results(solved)
    assert play(environment, name).reward == 0.0


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(SHIPPED))
def test_every_reference_solution_passes_and_doing_nothing_fails(name):
    test_reference_solution_passes_and_doing_nothing_fails(name)


# ---------------------------------------------------------------- the attempt


def test_prompt_is_the_instruction_and_the_tool_is_a_shell_in_the_work_directory():
    played = play(make(FakeSandbox()), "count-words", "ls; echo x > new", "cat new; exit 4")
    assert played.messages[0]["role"] == "system"
    assert "counts.txt" in played.messages[1]["content"]
    assert [t["function"]["name"] for t in played.tools] == ["shell"]
    assert results(played) == ["poem.txt", "error: exit code 4\nx"]
    assert (played.metrics["tools/calls"], played.metrics["tools/errors"]) == (2, 1)


@pytest.mark.slow
def test_attempt_ends_with_its_turns_and_its_time(tmp_path):
    environment = make(FakeSandbox(), turns=2)
    played = play(environment, "count-words", "echo 1", "echo 2", "echo 3")
    assert (played.turns, results(played)) == (2, ["1"])
    folder = copy(tmp_path, "count-words", agent="4")
    environment = make(FakeSandbox(), tasks=str(folder.parent))
    began = time.monotonic()
    played = play(environment, "count-words", "sleep 30", "echo late")
    assert results(played)[0].startswith("error: ")  # what it wrote before comes first
    assert "it took longer than " in results(played)[0]
    assert (played.turns, len(results(played))) == (2, 1)
    assert time.monotonic() - began < 25


def test_all_boxes_are_closed_and_tests_run_in_a_fresh_one():
    sandbox = FakeSandbox()
    play(make(sandbox), "count-words", "echo x")
    assert len(sandbox.opened) == 2 and all(box.closed for box in sandbox.opened)
    sandbox = FakeSandbox()
    play(make(sandbox, grading="same"), "count-words", solution(SHIPPED["count-words"]))
    assert len(sandbox.opened) == 1 and sandbox.opened[0].closed


def test_box_is_closed_when_opening_fails_halfway():
    class Full(FakeSandbox):
        async def open(self, task):
            box = await super().open(task)

            async def write(path, data):
                raise SandboxError("no space")

            box.write = write
            return box

    sandbox = Full()
    with pytest.raises(SandboxError, match="no space"):
        play(make(sandbox), "count-words", "ls")
    assert sandbox.opened[0].closed


@pytest.mark.parametrize("part", ["files", "tests"])
def test_task_files_that_cannot_be_read_end_the_attempt_alone(tmp_path, monkeypatch, part):
    copy(tmp_path, "count-words")
    sandbox = FakeSandbox()
    environment = make(sandbox, tasks=str(tmp_path / "copied"))
    read = Path.read_bytes

    def without_descriptors(path):
        if path.is_relative_to(tmp_path / "copied" / "count-words" / part):
            raise OSError(24, "Too many open files", str(path))
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", without_descriptors)
    with pytest.raises(EpisodeError, match=f"terminal: cannot read .*/{part}/.*Too many open"):
        play(environment, "count-words", "ls")
    assert all(box.closed for box in sandbox.opened)


def test_missing_sandbox_is_said_before_a_run_and_during_one():
    plan = compose(["experiment=grpo", "environment=terminal"], registry=Registry.load())
    assert "commands run in a sandbox and none is chosen" in "\n".join(check(plan).faults)
    with pytest.raises(SandboxError, match="choose one, as in sandbox="):
        play(make(), "count-words", "ls")


# ---------------------------------------------------------------- cheating


OVERWRITE = "mkdir -p ../tests && echo 'exit 0' > ../tests/check.py"
KEEP_AT_IT = "(while sleep 0.05; do echo 'exit()' > ../tests/check.py; done) 2>/dev/null &"


@pytest.mark.parametrize(
    "command",
    [
        OVERWRITE,
        KEEP_AT_IT,
        "echo 1 > ../logs/verifier/reward.txt",
        "printf 'import os\\nos._exit(0)\\n' | tee checking.py re.py sitecustomize.py; "
        "printf '#!/bin/sh\\nexit 0\\n' > python3; chmod +x python3",
        "ln -s /etc/passwd counts.txt",
        "rm -rf ./* && mkdir counts.txt",
    ],
)
def test_agent_that_tampers_earns_nothing(command):
    assert play(make(FakeSandbox()), "count-words", command).reward == 0.0


@pytest.mark.parametrize("command", [OVERWRITE, KEEP_AT_IT])
def test_agent_that_tampers_in_its_own_box_earns_nothing(command):
    environment = make(FakeSandbox(), grading="same")
    assert play(environment, "count-words", command).reward == 0.0


def test_code_under_test_cannot_end_the_tests_as_passed():
    bad = "printf 'import os, sys\\nos._exit(0)\\n' > average.py"
    assert play(make(FakeSandbox()), "fix-average", bad).reward == 0.0


def test_work_directory_beyond_its_limit_is_worth_nothing_and_said():
    environment = make(FakeSandbox(), max_state_mb=1)
    command = solution(SHIPPED["count-words"]) + "head -c 3000000 /dev/urandom > big"
    played = play(environment, "count-words", command)
    assert (played.reward, played.metrics["tests/unusable"]) == (0.0, 1)


def test_tests_that_hang_are_stopped(tmp_path):
    folder = copy(tmp_path, "fix-average", verifier="1")
    environment = make(FakeSandbox(), tasks=str(folder.parent))
    command = "printf 'import time\\ntime.sleep(60)\\n' > average.py"
    began = time.monotonic()
    played = play(environment, "fix-average", command)
    assert (played.reward, played.metrics["tests/timed_out"]) == (0.0, 1)
    assert time.monotonic() - began < 20


def copy(tmp_path, name, agent="60", verifier="30"):
    folder = tmp_path / "copied" / name
    shutil.copytree(SHIPPED[name].path, folder)
    (folder / "task.toml").write_text(
        f"[agent]\ntimeout_sec = {agent}\n[verifier]\ntimeout_sec = {verifier}\n"
    )
    return folder


# ---------------------------------------------------------------- Harbor


def harbor(tmp_path, name="greet", dockerfile="FROM python:3.13-slim\nWORKDIR /app\n", **files):
    root = tmp_path / "dataset"
    folder = root / name
    written = {
        "task.toml": 'version = "1.0"\n[agent]\ntimeout_sec = 30.0\n[verifier]\ntimeout_sec = 20\n'
        '[verifier.env]\nMODE = "strict"\n[environment]\ncpus = 2\nmemory_mb = 512\n',
        "instruction.md": "<!-- a canary string -->\nWrite hello to /app/out.txt. See /data/x.\n",
        "environment/Dockerfile": dockerfile,
        "tests/test.sh": '#!/bin/bash\n[ "$MODE" = strict ] || exit 1\n'
        "grep -qx hello /app/out.txt && grep -q here /app/notes/a.txt &&\n"
        "  cmp -s /tests/wanted /app/out.txt && echo 0.75 > /logs/verifier/reward.txt\n",
        "tests/wanted": "hello\n",
        **files,
    }
    for path, text in written.items():
        file = folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return root


COPIES = """\
# syntax=docker/dockerfile:1
FROM python:3.13-slim AS main
LABEL a="b"
WORKDIR /app
ENV WORD=hello OTHER="two words"
COPY notes/ ./notes/
COPY script.sh extra.txt \\
     ./
COPY x.txt /data/x
CMD ["bash"]
"""
FILES = {
    "environment/notes/a.txt": "here\n",
    "environment/script.sh": "echo $WORD > /app/out.txt\n",
    "environment/extra.txt": "",
    "environment/x.txt": "from /app\n",
}


def test_harbor_task_runs_below_the_box_and_is_worth_what_its_tests_write(tmp_path):
    environment = make(FakeSandbox(), tasks=str(harbor(tmp_path, dockerfile=COPIES, **FILES)))
    (task,) = [*environment.tasks("train"), *environment.tasks("heldout")]
    assert task.data == {"image": "python:3.13-slim", "cpus": 2.0, "memory_mb": 512.0}
    played = play(environment, "greet", "ls; pwd; bash script.sh")
    base = played.messages[1]["content"].split(" to ")[1].split("/app/out.txt")[0]
    assert Path(base).is_absolute() and base != "/"
    said = played.messages[1]["content"]
    assert said == f"Write hello to {base}/app/out.txt. See {base}/data/x."
    assert results(played) == [f"extra.txt\nnotes\nscript.sh\n{base}/app"]
    assert (played.reward, played.metrics["tests/unusable"]) == (0.75, 0)


def test_harbor_tests_that_write_no_reward_are_worth_nothing_and_said(tmp_path):
    environment = make(FakeSandbox(), tasks=str(harbor(tmp_path, dockerfile=COPIES, **FILES)))
    played = play(environment, "greet", "ls")
    assert (played.reward, played.metrics["tests/unusable"]) == (0.0, 1)


@pytest.mark.parametrize(
    ("said", "reward", "unusable"),
    [
        ("echo '{\"reward\": 0.5}' > /logs/verifier/reward.json", 0.5, 0),
        ('echo \'{"a": 1, "b": 0}\' > /logs/verifier/reward.json', 0.5, 0),
        ("echo 1 > /logs/verifier/reward.txt; exit 1", 1.0, 0),
        ("echo nan > /logs/verifier/reward.txt", 0.0, 1),
        ("echo good > /logs/verifier/reward.txt", 0.0, 1),
        ("echo '[]' > /logs/verifier/reward.json", 0.0, 1),
    ],
)
def test_harbor_reward_files(tmp_path, said, reward, unusable):
    root = harbor(tmp_path, **{"tests/test.sh": said + "\n"})
    played = play(make(FakeSandbox(), tasks=str(root)), "greet")
    assert (played.reward, played.metrics["tests/unusable"]) == (reward, unusable)


@pytest.mark.parametrize(
    ("dockerfile", "why"),
    [
        ("FROM x\nRUN apt-get update\n", "its Dockerfile has RUN apt-get update"),
        ("FROM x\nCOPY --from=build /a /b\n", "its Dockerfile has COPY --from=build /a /b"),
        ("FROM x\nCOPY missing.txt /app/\n", "its Dockerfile has COPY missing.txt /app/"),
    ],
)
def test_harbor_task_that_needs_a_prepared_image_is_refused_or_left_out(
    tmp_path, caplog, dockerfile, why
):
    root = harbor(tmp_path, dockerfile=dockerfile)
    with pytest.raises(ConfigError, match=f"needs a prepared image: {why} .1 of 1 tasks do"):
        make(tasks=str(root))
    harbor(tmp_path, name="plain")
    with pytest.raises(ConfigError, match="or unprepared=skip"):
        make(tasks=str(root))
    environment = make(tasks=str(root), unprepared="skip")
    assert list(environment.folders) == ["plain"]
    assert "left out 1 of 2 tasks, which need a prepared image: greet" in caplog.text
    image = make(tasks=str(root), root="image")
    assert sorted(image.folders) == ["greet", "plain"] and not image.fresh


def test_docker_image_of_the_settings_goes_before_the_first_of_the_dockerfile(tmp_path):
    settings = '[environment]\ndocker_image = "registry/task:1"\n'
    root = harbor(tmp_path, **{"task.toml": settings})
    folder = read_folder(root / "greet", root, "here")
    assert folder.needs.image == "registry/task:1"
    assert folder.workdir == "/app"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"task.toml": "= 1"}, "task 'greet': task.toml: "),
        ({"task.toml": "[agent]\ntimeout_sec = -1"}, "agent.timeout_sec is -1; seconds above 0"),
        ({"environment/Dockerfile": "FRM x"}, "environment/Dockerfile: unknown instruction 'FRM'"),
    ],
)
def test_folder_that_is_wrong_is_named(tmp_path, change, words):
    root = harbor(tmp_path, **change)
    with pytest.raises(ConfigError, match=words):
        make(tasks=str(root))


@pytest.mark.parametrize("missing", ["instruction.md", "tests/test.sh"])
def test_folder_without_a_file_is_named(tmp_path, missing):
    root = harbor(tmp_path)
    (root / "greet" / missing).unlink()
    with pytest.raises(ConfigError, match=f"task 'greet': there is n.*{missing}"):
        make(tasks=str(root))


def test_folders_that_are_not_there_are_said(tmp_path):
    with pytest.raises(ConfigError, match=r"no task\.toml below"):
        make(tasks=str(tmp_path))
    with pytest.raises(ConfigError, match="there is no folder"):
        make(tasks=str(tmp_path / "no"))
