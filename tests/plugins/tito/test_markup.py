"""Reading reasoning and calls out of text, for templates without a handler of their own."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles import EpisodeError
from miles.testing.tito_grid import verify
from miles.testing.tito_oracle import Oracle
from miles.testing.tito_talks import TOOLS
from miles_plugins.tito.families import Qwen35
from miles_plugins.tito.generic import Generic
from miles_plugins.tito.markup import markup_of
from tests.plugins.tito.checkpoints import bytes_checkpoint, handler

JSON = markup_of("</think> <tool_call>")
XML = markup_of("<tool_call> <function= ")
PAIRS = markup_of("<tool_call> <arg_key>")
DEEPSEEK = markup_of("<｜tool▁calls▁begin｜> <｜tool▁sep｜>")
DSML = markup_of("｜DSML｜")
KIMI = markup_of("</think> <|tool_calls_section_begin|> <|tool_call_argument_begin|>")
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


def read(markup, text, *, opened=False, tools=()):
    found = markup.read(text, opened=opened, tools=tools)
    return found.reasoning, found.content, [call[1:] for call in found.calls]


@pytest.mark.parametrize(
    ("text", "opened", "wanted"),
    [
        ("plain", False, (None, "plain")),
        ("<think>a</think>b", False, ("a", "b")),
        ("a</think>b", True, ("a", "b")),
        ("a</think>b", False, (None, "a</think>b")),
        ("</think>b", True, (None, "b")),
        ("</think>b", False, (None, "b")),
        ("cut in a tho", True, ("cut in a tho", "")),
        ("<think>\n\n</think>\n\nb", False, ("\n\n", "\n\nb")),
        ("b <think>later</think>", False, (None, "b <think>later</think>")),
    ],
)
def test_reasoning_is_what_stands_before_its_close(text, opened, wanted):
    assert read(JSON, text, opened=opened)[:2] == wanted


def test_template_without_reasoning_leaves_its_marks_in_the_text():
    assert read(XML, "<think>a</think>b")[:2] == (None, "<think>a</think>b")


@pytest.mark.parametrize(
    ("markup", "text", "calls"),
    [
        (JSON, CALL, [("add", {"a": 1})]),
        (JSON, f"{CALL}\n{CALL}", [("add", {"a": 1})] * 2),
        (JSON, '<tool_call>{"name": "f", "parameters": {}}</tool_call>', [("f", {})]),
        (
            XML,
            "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>",
            [("add", {"a": 1})],
        ),
        (
            PAIRS,
            "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>",
            [("add", {"a": 1})],
        ),
        (
            DEEPSEEK,
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>"
            '{"a": 1}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
            [("add", {"a": 1})],
        ),
        (
            DEEPSEEK,
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n"
            '```json\n{"a": 1}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
            [("add", {"a": 1})],
        ),
        (
            DSML,
            '<｜DSML｜function_calls>\n<｜DSML｜invoke name="add">\n'
            '<｜DSML｜parameter name="a" string="false">1</｜DSML｜parameter>\n'
            "</｜DSML｜invoke>\n</｜DSML｜function_calls>",
            [("add", {"a": 1})],
        ),
        (
            KIMI,
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0"
            '<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|><|tool_calls_section_end|>',
            [("add", {"a": 1})],
        ),
    ],
)
def test_calls_are_read_in_each_markup(markup, text, calls):
    assert read(markup, text) == (None, "", calls)
    assert read(markup, "Look: " + text)[1].strip() == "Look:"


def test_call_ends_a_thought_where_models_do_so():
    call = (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.a.b:3<|tool_call_argument_begin|>"
        "{}<|tool_call_end|><|tool_calls_section_end|>"
    )
    found = KIMI.read("<think>I look." + call, opened=False)
    assert (found.reasoning, found.content) == ("I look.", "")
    assert found.calls == (("functions.a.b:3", "a.b", {}),)
    drafted = KIMI.read(f"<think>I might {call}</think>No.", opened=False)
    assert (drafted.reasoning, drafted.content, drafted.calls) == (f"I might {call}", "No.", ())
    broken = call.replace("{}", '{"a"')
    assert KIMI.read(broken, opened=False).content == broken


def test_types_of_arguments_follow_the_schema():
    text = (
        "<tool_call>\n<function=look_up>\n<parameter=place>\n12\n</parameter>\n</function>\n"
        "</tool_call>"
    )
    assert read(XML, text, tools=TOOLS)[2] == [("look_up", {"place": "12"})]
    assert read(XML, text)[2] == [("look_up", {"place": 12})]


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>{"name": "add", "argum</tool_call>',
        '<tool_call>{"arguments": {}}</tool_call>',
        '<tool_call>["add"]</tool_call>',
        '<tool_call>{"name": "add", "arguments": "a"}</tool_call>',
        '<tool_call>{"name": "add", "arguments": {}}',
    ],
)
def test_call_that_cannot_be_read_stays_in_the_text(text):
    assert read(JSON, f"Look: {text}") == (None, f"Look: {text}", [])
    mixed = f"{CALL}\n{text}"
    assert read(JSON, mixed)[2] == [("add", {"a": 1})] and text in read(JSON, mixed)[1]


@given(st.text(st.sampled_from('<think>/tool_call{}" a\n'), max_size=60))
def test_nothing_that_was_said_is_lost(text):
    found = JSON.read(text, opened=False)
    if not found.calls:
        kept = (found.reasoning or "") + found.content
        rest = text.replace("<think>", "").replace("</think>", "")
        assert set(rest.split()) <= set(kept.replace("<think>", "").replace("</think>", "").split())


# ---------------------------------------------------------------- through the generic handler


GENERIC = (
    "qwen3/Qwen-Qwen3-0.6B",
    "qwen3/trl_qwen3_training",
    "qwen3/trl_qwen3_instruct_2507",
    "qwen3/Qwen3-Coder",
    "qwen3/Qwen-QwQ-32B",
    "qwen3/Qwen-Qwen2.5-7B-Instruct",
    "qwen3.5/trl_qwen3_5_think_training",
    "qwen3.5/trl_qwen3_5_nothink",
    "nemotron/trl_nemotron_3_nano_training",
)


@pytest.mark.parametrize("name", GENERIC)
def test_generic_carries_the_grid_with_a_template_as_published(tmp_path, name):
    directory = bytes_checkpoint(tmp_path, Qwen35, name)
    built = handler(Generic, directory, stop=("<|im_end|>",))
    lines = verify(built, Oracle(directory))
    assert not {line.talk: line.faults for line in lines if line.faults}
    assert not [line.talk for line in lines if line.skipped]


def test_generic_offers_tools_and_demonstrates_calls(tmp_path):
    directory = bytes_checkpoint(tmp_path, Qwen35, "qwen3/Qwen-Qwen3-0.6B")
    built = handler(Generic, directory)
    prompt = built.render([{"role": "user", "content": "x"}], tools=TOOLS)
    assert json.dumps(TOOLS[0]) in built.decode(prompt)
    call = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    said = built.demonstrate({"role": "assistant", "content": "ok", "tool_calls": [call]})
    assert built.decode(said).endswith(f"ok\n{CALL}<|im_end|>")
    (heard,) = built.parse(said)["tool_calls"]
    assert heard["function"] == call["function"] and heard["id"].startswith("call_")


def test_generic_refuses_an_image(tmp_path):
    built = handler(Generic, bytes_checkpoint(tmp_path, Qwen35, "qwen3/Qwen-Qwen3-0.6B"))
    with pytest.raises(EpisodeError, match="message 0 carries an image, and this family reads"):
        built.render([{"role": "user", "content": [{"type": "image"}]}])


def test_generic_reads_parts_of_text_as_one_text(tmp_path):
    built = handler(Generic, bytes_checkpoint(tmp_path, Qwen35, "qwen3/Qwen-Qwen3-0.6B"))
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    one, two = (built.render([{"role": "user", "content": c}]) for c in (parts, "ab"))
    np.testing.assert_array_equal(one, two)
