"""The three comparisons, what they say of a difference, and tool-call ids."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles.session.matching import call_id, differences, unmatched_tool_ids, with_call_ids
from tests.unit.session.talk import assistant, call, user

STRICT, JSON, TEXT = map(differences, ("strict", "json_arguments", "role_text"))


@pytest.mark.parametrize("rule", [STRICT, JSON, TEXT])
@pytest.mark.parametrize(
    ("one", "two"),
    [
        (assistant(None), assistant("")),
        (assistant([]), assistant("")),
        (assistant("a", tool_calls=None), assistant("a", tool_calls=[])),
        (assistant("a", reasoning_content=""), assistant("a")),
        (assistant("a"), assistant([{"type": "text", "text": "a"}])),
        (assistant("ab"), assistant([{"type": "text", "text": "a"}, {"text": "b"}])),
        (assistant("a", refusal=None), assistant("a", annotations=[])),
        (
            assistant("", tool_calls=[{**call("f", "{}", "1"), "index": 0}]),
            assistant("", tool_calls=[call("f", "{}", "1")]),
        ),
    ],
)
def test_every_comparison_takes_these_for_equal(rule, one, two):
    assert rule(one, two) == ""
    assert rule(two, one) == ""


@pytest.mark.parametrize(
    ("one", "two", "words"),
    [
        (user("a"), assistant("a"), "role is 'assistant', recorded was 'user'"),
        (user("a"), user("b"), "content is 'b', recorded was 'a'"),
        (
            assistant("a", reasoning_content="x"),
            assistant("a"),
            "reasoning is '', recorded was 'x'",
        ),
        (
            assistant("", tool_calls=[call("f", "{}", "1")]),
            assistant(""),
            "there are 0 tool calls, 1 were recorded",
        ),
        (
            assistant("", tool_calls=[call("f", "{}", "1")]),
            assistant("", tool_calls=[call("g", "{}", "1")]),
            "tool call 0's name is 'g', recorded was 'f'",
        ),
        (
            assistant("", tool_calls=[call("f", "{}", "1")]),
            assistant("", tool_calls=[call("f", "{}", "2")]),
            "tool call 0's id is '2', recorded was '1'",
        ),
        (
            {"role": "tool", "content": "3", "tool_call_id": "1"},
            {"role": "tool", "content": "3", "tool_call_id": "2"},
            "tool_call_id is '2', recorded was '1'",
        ),
        (
            user("x" * 100 + "a" + "y" * 100),
            user("x" * 100 + "b" + "y" * 100),
            "content differs at character 100: 'xxxxxxxxxxxxb",
        ),
        (
            user([{"type": "image", "image": b"1"}]),
            user("a"),
            "content is 'a', recorded was [{'type': 'image'",
        ),
    ],
)
def test_strict_says_what_differs(one, two, words):
    assert words in STRICT(one, two)


def test_reasoning_is_the_same_under_any_of_its_names():
    one = assistant("a", reasoning_content="x")
    assert STRICT(one, assistant("a", reasoning="x")) == ""
    assert STRICT(one, assistant("a", thinking="x")) == ""


@pytest.mark.parametrize(
    ("one", "two", "same"),
    [
        ('{"a": 1, "b": 2}', '{"b":2,"a":1}', True),
        ('{"a": 1}', '{"a": 1.0}', True),
        ('{"a": 1}', '{"a": true}', False),
        ('{"a": 0}', '{"a": false}', False),
        ('{"a": 1, "a": 1}', '{"a": 1}', False),
        ('{"a": NaN}', '{"a": NaN }', False),
        ('{"a": 1e999}', '{"a": 2e999}', False),
        ('{"a": "\\u00e9"}', '{"a": "é"}', True),
        ('{"a": [1, {"b": null}]}', '{"a":[1,{"b":null}]}', True),
        ('{"a": [1, 2]}', '{"a": [2, 1]}', False),
        ("[1]", "[1 ]", False),
        ("not json", "not json", True),
        ("not json", "not  json", False),
        ('{"a":' * 5000, '{"a": ' * 5000, False),
        ('{"a": 1}', {"a": 1}, True),
    ],
)
def test_json_arguments_compares_objects(one, two, same):
    a = assistant("", tool_calls=[call("f", one, "1")])
    b = assistant("", tool_calls=[call("f", "", "1")])
    b["tool_calls"][0]["function"]["arguments"] = two
    assert (JSON(a, b) == "") is same
    assert (JSON(b, a) == "") is same
    assert (STRICT(a, b) == "") is (one == two)


values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)


@given(st.dictionaries(st.text(max_size=3), values))
def test_json_arguments_survive_being_written_again(value):
    spellings = (json.dumps(value), json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False))
    one, two = (assistant("", tool_calls=[call("f", text, "1")]) for text in spellings)
    assert JSON(one, two) == ""


def test_role_text_looks_at_nothing_else():
    one = assistant("a", reasoning_content="x", tool_calls=[call("f", "{}", "1")])
    assert TEXT(one, assistant("a")) == ""
    assert TEXT(one, assistant("b")) == "text is 'b', recorded was 'a'"
    assert TEXT(one, user("a")) == "role is 'user', recorded was 'assistant'"


def test_unmatched_tool_ids_names_calls_and_answers_that_nobody_recorded():
    stored = [
        user("a"),
        assistant("", tool_calls=[call("f", "{}", "one")]),
        {"role": "tool", "content": "1", "tool_call_id": "one"},
        assistant("", tool_calls=[call("f", "{}", "two")]),
    ]
    given = [
        user("a"),
        assistant("", tool_calls=[call("g", "{}", "other")]),
        {"role": "tool", "content": "1", "tool_call_id": "other"},
        assistant("", tool_calls=[call("f", "{}", "two")]),
        {"role": "tool", "content": "2", "tool_call_id": "two"},
        {"role": "tool", "content": "2", "tool_call_id": "three"},
    ]
    assert unmatched_tool_ids(stored, given) == ["other", "three"]
    assert unmatched_tool_ids(stored, [*stored, given[4]]) == []


def test_calls_without_ids_get_one_for_their_turn_and_place():
    bare = assistant("", tool_calls=[{"function": {"name": "f"}}, call("g", "{}", "own")])
    named = with_call_ids(bare, 3)
    assert [c["id"] for c in named["tool_calls"]] == [call_id(3, 0), "own"]
    assert "id" not in bare["tool_calls"][0]
    assert with_call_ids(assistant("a"), 3) == assistant("a")
