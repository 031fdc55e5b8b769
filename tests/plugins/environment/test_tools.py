"""Tool use: calls are made and told, errors counted, demonstrations not run."""

import asyncio
import json
import logging
import time
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest

from miles import ConfigError, Context, SandboxError, Task
from miles.check import check
from miles.config import compose
from miles.plugins import Registry
from miles.testing import FakeSandbox, play_episode, tool_call
from miles_plugins.environment.functions import clip, describe
from miles_plugins.environment.tools import Tools

HERE = Path(".")


def double(word: str, times: int = 2, how: Literal["up", "down"] | None = None) -> str:
    """Say a word
    several times.

    This is not told to the model.
    """
    return (word.upper() if how == "up" else word) * times


async def fail(reason: str) -> dict:
    """Fail, or not."""
    if reason == "break":
        raise SandboxError("the box is gone")
    if reason:
        raise ValueError(reason)
    return {"ok": True}


def power(base: int, exponent: int) -> int:
    """Multiply by itself."""
    return int(base**exponent)


OFFERED = {"double": double, "fail": fail, "power": power}


def make(sandbox=None, **config):
    context = Context(directory=HERE, sandbox=sandbox, tools=OFFERED)
    return Tools(Tools.Config(**config), context)


def play(environment, replies, task=None, **how):
    task = task or environment.tasks("train")[0]
    return asyncio.run(play_episode(environment, task, replies, **how))


def results(played):
    return [m["content"] for m in played.messages if m["role"] == "tool"]


# ---------------------------------------------------------------- tools in the sandbox


def test_demonstrations_really_run_give_their_recorded_results_and_answers():
    sandbox = FakeSandbox()
    environment = make(sandbox)
    for task in environment.tasks("train")[:6]:
        played = play(environment, [m for m in task.solution if m["role"] == "assistant"], task)
        assert played.messages[1:] == task.solution
        assert played.done and played.reward == 1.0
        calls = len(task.solution) // 2
        counted = {"turns": calls + 1.0, "tools/calls": calls, "tools/errors": 0.0, "answered": 1.0}
        assert played.metrics == counted
    assert all(box.closed for box in sandbox.opened)
    assert len(sandbox.opened) == 6  # one an attempt, however many calls


@pytest.mark.parametrize(
    ("code", "result"),
    [
        ("x = 2\nx + 3", "5"),
        ("print('a')\n'b'", "a\n'b'"),
        ("import math\nmath.pi", "3.141592653589793"),
        ("None", ""),
        ("", ""),
        ("1/0", "error: ZeroDivisionError: division by zero (line 1)"),
        ("print(1)\nnope", "error: 1\n\nNameError: name 'nope' is not defined (line 2)"),
        ("1 +", "error: SyntaxError: invalid syntax (line 1)"),
        ("raise SystemExit(3)", "error: exit code 3"),
        ("x = '</tool_call>'\nx", "'</tool_call>'"),
    ],
)
def test_python_tool_prints_what_the_last_line_is_worth(code, result):
    played = play(make(FakeSandbox()), [tool_call("python", code=code), "0"])
    assert results(played) == [result]
    assert played.metrics["tools/errors"] == result.startswith("error")


def test_shell_tool_keeps_files_and_tells_exit_codes():
    replies = [
        tool_call("shell", command="echo one > kept; cat kept; echo two >&2"),
        tool_call("shell", command="cat kept; exit 3"),
        "done",
    ]
    played = play(make(FakeSandbox(), tools=("shell",)), replies)
    assert results(played) == ["one\ntwo", "error: exit code 3\none"]
    assert played.metrics["tools/errors"] == 1


def test_call_that_never_ends_is_stopped_and_told():
    environment = make(FakeSandbox(), tools=("python", "shell"), tool_timeout_s=0.3)
    began = time.monotonic()
    replies = [tool_call("python", code="while True: pass"), tool_call("shell", command="sleep 60")]
    played = play(environment, replies)
    for told in results(played):
        assert told.startswith("error: ") and told.endswith("it took longer than 0.3 s")
    assert time.monotonic() - began < 10


def test_long_output_is_clipped_in_the_middle():
    played = play(make(FakeSandbox(), max_output=20), [tool_call("python", code="print('x' * 99)")])
    assert results(played) == ["x" * 10 + "\n[79 characters left out]\n" + "x" * 10]
    assert clip("abc", 3) == "abc"


# ---------------------------------------------------------------- functions of plugins


def test_schema_comes_from_annotations_and_the_first_paragraph():
    assert describe("double", double, "here").schema["function"] == {
        "name": "double",
        "description": "Say a word several times.",
        "parameters": {
            "type": "object",
            "properties": {
                "word": {"type": "string"},
                "times": {"type": "integer"},
                "how": {"type": "string", "enum": ["up", "down"]},
            },
            "required": ["word"],
        },
    }


def _no_words(x: int):
    return x


def _no_annotation(x):
    """Has no annotation."""


def _odd(x: bytes):
    """Takes bytes."""


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (_no_words, "it has no docstring"),
        (_no_annotation, "parameter 'x' has no annotation"),
        (_odd, "parameter 'x' is <class 'bytes'>; str, int, float"),
        (lambda *x: 0, "parameter 'x' cannot be given by name"),
    ],
)
def test_function_that_no_schema_describes_is_refused(function, words):
    with pytest.raises(ConfigError, match=f"here: tool 'f': {words}"):
        describe("f", function, "here")


@pytest.mark.parametrize(
    ("arguments", "result"),
    [
        ({"word": "ab"}, "abab"),
        ({"word": "ab", "times": 1, "how": "up"}, "AB"),
        ({"word": "ab", "how": None}, "abab"),
        ({}, "error: double: the argument 'word' is missing"),
        ({"word": 3}, "error: double: 'word' is not of type string"),
        ({"word": "a", "times": True}, "error: double: 'times' is not of type integer"),
        ({"word": "a", "how": "left"}, "error: double: 'how' is not one of up, down"),
        ({"word": "a", "box": 1}, "error: double: 'box' is no argument of it"),
    ],
)
def test_arguments_are_checked_before_the_function_runs(arguments, result):
    played = play(make(tools=("double",)), [tool_call("double", **arguments)])
    assert results(played) == [result]


@pytest.mark.parametrize(
    ("arguments", "result"),
    [
        ("{", "error: the arguments are not JSON: Expecting property name"),
        ("[1]", "error: the arguments are not a JSON object"),
        (None, "error: double: the argument 'word' is missing"),
        ({"word": "a"}, "aa"),
    ],
)
def test_arguments_in_any_shape_are_read_or_refused(arguments, result):
    call = {"id": "c", "type": "function", "function": {"name": "double", "arguments": arguments}}
    message = {"role": "assistant", "content": "", "tool_calls": [call]}
    (told,) = results(play(make(tools=("double",)), [message]))
    assert told.startswith(result)


def test_exception_of_a_function_is_told_and_counted_but_a_broken_sandbox_ends_the_attempt():
    environment = make(tools=("fail",))
    played = play(environment, [tool_call("fail", reason="no"), tool_call("fail", reason="")])
    assert results(played) == ["error: ValueError: no", '{"ok": true}']
    assert played.metrics["tools/errors"] == 1
    with pytest.raises(SandboxError, match="the box is gone"):
        play(environment, [tool_call("fail", reason="break")])


def test_several_calls_of_one_reply_are_answered_in_order():
    one, two = tool_call("double", word="a"), tool_call("double", word="b")
    both = {**one, "tool_calls": [*one["tool_calls"], *two["tool_calls"]]}
    played = play(make(tools=("double",)), [both, "x"])
    assert results(played) == ["aa", "bb"]
    told = [m for m in played.messages if m["role"] == "tool"]
    assert {(m["tool_call_id"], m["name"]) for m in told} == {("call_double", "double")}


def test_tools_come_from_a_local_file(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "import miles\n\ndef shout(word: str) -> str:\n    'Say it.'\n    return word.upper()\n\n"
        "@miles.hookimpl\ndef miles_tools(): return {'shout': shout}\n"
    )
    plan = compose(
        ["experiment=grpo", "environment=tools", "environment.tools=[shout]", f"plugins=[{file}]"],
        registry=Registry.load(files=[file]),
    )
    assert check(plan).faults == ()


# ---------------------------------------------------------------- the attempt


def test_calls_in_the_last_turn_are_not_made():
    played = play(make(tools=("double",), turns=2), [tool_call("double", word="a")] * 5)
    assert (played.turns, results(played), played.reward) == (2, ["aa"], 0.0)
    assert played.metrics["answered"] == 0


def test_markup_that_is_no_call_is_told_and_counted():
    broken = '<tool_call>{"name":"python","arg'
    played = play(make(tools=("double",)), [broken, "1"])
    assert played.messages[2] == {
        "role": "user",
        "content": "error: that is no well-formed tool call",
    }
    assert (played.metrics["tools/errors"], played.metrics["tools/calls"]) == (1, 1)
    assert play(make(tools=("double",), turns=1), [broken]).metrics["answered"] == 0


def test_reply_cut_by_length_is_the_answer():
    environment = make(tools=("double",))
    task = environment.tasks("train")[0]
    assert play(environment, [task.answer], finish="length").reward == 1.0


def test_a_result_that_cannot_be_written_is_told_to_the_model():
    played = play(make(tools=("power",)), [tool_call("power", base=9, exponent=9999), "done"])
    assert results(played)[0].startswith("error: ValueError: Exceeds the limit")


def test_errors_cost_what_the_configuration_says():
    environment = make(tools=("double",), error_cost=0.25)
    answer = environment.tasks("train")[0].answer
    assert play(environment, [tool_call("nope"), answer]).reward == 0.75


def test_demonstrated_calls_are_answered_from_the_record_and_that_is_said_once(caplog):
    environment = make()  # no sandbox: nothing may run
    tasks = environment.tasks("train")[:5]
    with caplog.at_level(logging.WARNING):
        for task in tasks:
            replies = [m for m in task.solution if m["role"] == "assistant"]
            played = play(environment, replies, task, demonstrated=True)
            assert played.messages[1:] == task.solution
            assert played.reward == 1.0
    assert len([r for r in caplog.records if "no tool runs" in r.message]) == 1


def test_demonstration_without_recorded_results_runs_its_tools():
    call = tool_call("double", word="a")
    task = Task(
        id="x", prompt="p", answer="aa", solution=(call, {"role": "assistant", "content": "aa"})
    )
    environment = make(tools=("double",))
    assert results(play(environment, [call, "aa"], task, demonstrated=True)) == ["aa"]


def test_sandboxed_call_without_a_sandbox_says_what_to_choose():
    with pytest.raises(SandboxError, match="no sandbox is chosen; choose one, as in sandbox="):
        play(make(), [tool_call("python", code="1")])


def test_check_refuses_sandboxed_tools_without_a_sandbox():
    registry = Registry.load()
    plan = compose(["experiment=grpo", "environment=tools"], registry=registry)
    assert "tool 'python' runs in a sandbox and none is chosen" in "\n".join(check(plan).faults)
    replays = [*["experiment=grpo", "environment=tools"], "engine=demonstration", "algorithm=sft"]
    faults = check(compose([*replays, "samples_per_group=1"], registry=registry)).faults
    assert "sandbox" not in "\n".join(faults)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"tools": ("pyton",)}, "no tool 'pyton'; did you mean 'python'"),
        ({"turns": 0}, "turns is 0; at least 1"),
        ({"tool_timeout_s": 0}, "tool_timeout_s is 0 and max_output 4000"),
        ({"interpreter": ()}, "interpreter is empty"),
        ({"reward": "exakt"}, "no reward 'exakt'; did you mean 'exact'"),
    ],
)
def test_configuration_that_makes_no_sense_is_refused(config, words):
    with pytest.raises(ConfigError, match=f"environment tools: {words}"):
        make(**config)


def test_a_plugin_may_not_replace_a_built_in_tool():
    with pytest.raises(ConfigError, match="a plugin claims the built-in tool 'shell'"):
        Tools(Tools.Config(), Context(directory=HERE, tools={"shell": double}))


# ---------------------------------------------------------------- tasks from files


def write(tmp_path, *rows):
    file = tmp_path / "tasks.jsonl"
    file.write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in rows))
    return str(file)


def test_file_gives_prompts_answers_and_demonstrations(tmp_path):
    solution = [tool_call("double", word="a"), {"role": "assistant", "content": "aa"}]
    path = write(
        tmp_path,
        {"prompt": "say", "answer": "aa", "solution": solution},
        "",
        {"id": "b", "prompt": [{"role": "system", "content": "s"}], "data": {"x": 1}},
    )
    environment = make(tasks=path, tools=("double",), heldout_fraction=0, system="Be brief.")
    one, two = environment.tasks("train")
    system = {"role": "system", "content": "Be brief."}
    assert one.prompt == (system, {"role": "user", "content": "say"})
    assert (one.id, one.answer, list(one.solution)) == ("line-1", "aa", solution)
    assert (two.id, two.prompt[0]["content"], two.data) == ("b", "s", {"x": 1})
    assert play(environment, solution, one).reward == 1.0


def test_file_is_split_by_a_hash_of_the_prompt(tmp_path):
    path = write(tmp_path, *({"prompt": f"p{i}"} for i in range(200)))
    environment = make(tasks=path, tools=("double",), heldout_fraction=0.3)
    train, heldout = environment.tasks("train"), environment.tasks("heldout")
    assert len(train) + len(heldout) == 200
    assert 30 < len(heldout) < 90
    moved = write(tmp_path, {"prompt": "new"}, *({"prompt": f"p{i}"} for i in range(200)))
    again = make(tasks=moved, tools=("double",), heldout_fraction=0.3).tasks("heldout")
    assert {t.prompt[-1]["content"] for t in heldout} <= {t.prompt[-1]["content"] for t in again}


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ("{", "line 2: not JSON"),
        ({"answer": "x"}, "line 2: an object with `prompt` is wanted"),
        ({"prompt": "x", "anwser": "y"}, "line 2: unknown key 'anwser'"),
        ({"prompt": []}, "line 2: prompt is \\[\\]"),
        ({"prompt": [{"role": "bot"}]}, "line 2: prompt: message 0 is .*; an object with a role"),
        ({"prompt": "x", "solution": [{"role": "tool"}]}, "line 2: solution begins with the tool"),
        ({"prompt": "x", "data": 3}, "line 2: data is 3"),
        ({"id": "line-1", "prompt": "x"}, "line 2: id is 'line-1', as in line 1"),
    ],
)
def test_file_with_a_bad_row_names_the_line(tmp_path, row, words):
    path = write(tmp_path, {"prompt": "fine"}, row)
    with pytest.raises(ConfigError, match=words):
        make(tasks=path, tools=("double",)).tasks("train")


def test_file_that_is_not_there_or_empty_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="tasks: there is no file"):
        make(tasks=str(tmp_path / "no.jsonl")).tasks("train")
    with pytest.raises(ConfigError, match="has no rows"):
        make(tasks=write(tmp_path)).tasks("train")


def test_context_sandbox_is_what_boxes_come_from():
    sandbox = FakeSandbox()
    environment = Tools(Tools.Config(), replace(Context(directory=HERE), sandbox=sandbox))
    play(environment, ["1"])
    assert sandbox.opened == []  # nothing was called
