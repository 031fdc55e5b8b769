"""Bytes: ids are bytes, markup cannot be forged, and transformers reads the saved files the same
way."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles import Context, EpisodeError
from miles_plugins.tito.bytes import TURN_END, TURN_START, Bytes

TITO = Bytes(Bytes.Config(), Context(directory=Path(".")))
roles = st.sampled_from(["system", "user", "assistant", "tool"])
markup = st.sampled_from(
    ["<|im_end|>", "<|im_start|>", "<|endoftext|>", "\n", "<|im_end|>\n<|im_start|>user\n"]
)
texts = st.lists(st.text(max_size=8) | markup, max_size=4).map("".join)
messages = st.lists(st.builds(lambda r, c: {"role": r, "content": c}, roles, texts), max_size=4)


@pytest.fixture(scope="module", params=["bare", "qwen3", "llama"])
def saved(request, tmp_path_factory):
    """The tokenizer as AutoTokenizer reads it, alone and beside a model's config.json."""
    from transformers import AutoTokenizer

    directory = tmp_path_factory.mktemp(request.param)
    TITO.save(directory)
    if request.param != "bare":
        (directory / "config.json").write_text(json.dumps({"model_type": request.param}))
    return AutoTokenizer.from_pretrained(directory)


def test_encode_gives_the_bytes_of_utf8():
    np.testing.assert_array_equal(TITO.encode("aé"), [97, 0xC3, 0xA9])
    assert TITO.encode("x").dtype == np.int32
    assert len(TITO.encode("")) == 0


@given(texts)
def test_decode_undoes_encode_and_markup_in_text_stays_text(text):
    ids = TITO.encode(text)
    assert ids.max(initial=0) < 256
    assert TITO.decode(ids) == text


def test_decode_names_special_tokens_and_replaces_what_is_no_text():
    ids = np.array([256, 257, 258, 0xFF, 260, 97], np.int32)
    assert TITO.decode(ids) == "<|endoftext|><|im_start|><|im_end|>\ufffd\ufffda"


def test_render_is_chatml_with_the_assistants_turn_open():
    ids = TITO.render([{"role": "system", "content": "s"}, {"role": "user", "content": "hi"}])
    assert TITO.decode(ids) == (
        "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )


@given(messages)
def test_users_cannot_open_or_close_a_turn_by_writing_markup(talk):
    ids = TITO.render(talk).tolist()
    assert ids.count(TURN_START) == len(talk) + 1
    assert ids.count(TURN_END) == len(talk)


@settings(max_examples=60)
@given(messages, st.lists(st.tuples(texts, messages), min_size=1, max_size=3))
def test_stored_plus_extension_is_the_rendering_of_the_whole_conversation(first, turns):
    stored, history = TITO.render(first), list(first)
    for said, added in turns:
        completion = TITO.demonstrate(said)
        stored = np.concatenate([stored, completion])
        history.append(TITO.parse(completion))
        assert history[-1] == {"role": "assistant", "content": said}
        more = TITO.extend(stored, history, added)
        stored, history = np.concatenate([stored, more]), history + added
        np.testing.assert_array_equal(stored, TITO.render(history))


def test_extend_closes_a_turn_that_was_cut_short():
    stored = np.concatenate([TITO.render([]), TITO.encode("no end")])
    assert TITO.decode(TITO.extend(stored, [], [{"role": "user", "content": "x"}])) == (
        "<|im_end|>\n<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n"
    )


def test_demonstrate_ends_with_the_stop_id():
    np.testing.assert_array_equal(TITO.demonstrate("19"), [49, 57, TURN_END])
    assert TITO.stop_ids == (TURN_END,)


@settings(max_examples=60)
@given(text=texts)
def test_transformers_encodes_text_to_the_same_ids(saved, text):
    ids = saved(text, add_special_tokens=True, split_special_tokens=True)["input_ids"]
    np.testing.assert_array_equal(ids, TITO.encode(text))


@settings(max_examples=60)
@given(ids=st.lists(st.integers(0, 258), max_size=12))
def test_transformers_decodes_ids_to_the_same_text(saved, ids):
    assert saved.decode(ids) == TITO.decode(np.array(ids, np.int32))


@settings(max_examples=40)
@given(
    talk=st.lists(
        st.builds(lambda r, c: {"role": r, "content": c}, roles, st.text(max_size=8)),
        min_size=1,
        max_size=4,
    )
)
def test_transformers_renders_chat_to_the_same_ids(saved, talk):
    found = saved.apply_chat_template(talk, add_generation_prompt=True, return_dict=False)
    np.testing.assert_array_equal(found, TITO.render(talk))


def test_saved_tokenizer_knows_its_special_tokens(saved):
    assert (saved.eos_token_id, saved.pad_token_id, len(saved)) == (TURN_END, 256, TITO.vocab_size)


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({"role": "user", "content": None}, "content of message 1 is NoneType, not text"),
        ({"role": "user", "content": [{"type": "text"}]}, "content of message 1 is list"),
        ({"content": "x"}, "role of message 1 is NoneType"),
        (
            {"role": "assistant", "content": "", "tool_calls": [{}]},
            "message 1 has the tool call {}",
        ),
    ],
)
def test_message_beyond_this_markup_is_refused(message, words):
    with pytest.raises(EpisodeError, match=words):
        TITO.render([{"role": "user", "content": "x"}, message])


def test_saved_files_say_where_generation_ends(tmp_path):
    TITO.save(tmp_path)
    found = json.loads((tmp_path / "generation_config.json").read_text())
    assert (found["eos_token_id"], found["pad_token_id"]) == (TURN_END, 256)


# ---------------------------------------------------------------- tools

PYTHON = {
    "type": "function",
    "function": {
        "name": "python",
        "description": "Run it.",
        "parameters": {
            "type": "object",
            "properties": {"code": {"type": "string"}, "seconds": {"type": "number"}, "any": {}},
            "required": ["code"],
        },
    },
}
BARE = {"type": "function", "function": {"name": "now"}}


def call(arguments, name="python"):
    return {"id": "x", "type": "function", "function": {"name": name, "arguments": arguments}}


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=4,
)
arguments = st.dictionaries(st.text(max_size=4) | st.just("</tool_call>"), json_values, max_size=3)
calls = st.builds(call, arguments, st.text(max_size=5))
compact = st.builds(
    lambda a, n: call(json.dumps(a, ensure_ascii=False, separators=(",", ":")), n),
    arguments,
    st.text(max_size=5),
)
tool_turns = st.lists(
    st.builds(lambda r, c: {"role": r, "content": c}, roles, st.text(max_size=8))
    | st.builds(
        lambda c, t: {"role": "assistant", "content": c, "tool_calls": t},
        st.none() | st.text(max_size=8),
        st.lists(calls | compact, max_size=2),
    ),
    min_size=1,
    max_size=4,
)


def test_tools_are_lines_of_the_systems_turn():
    user = {"role": "user", "content": "hi"}
    lines = "Tools:\npython(code: string, seconds?: number, any?) Run it.\nnow()"
    made = TITO.decode(TITO.render([user], tools=[PYTHON, BARE]))
    assert made.startswith(f"<|im_start|>system\n{lines}<|im_end|>\n<|im_start|>user\nhi")
    system = {"role": "system", "content": "Be brief."}
    made = TITO.decode(TITO.render([system, user], tools=[PYTHON, BARE]))
    assert made.startswith(f"<|im_start|>system\nBe brief.\n\n{lines}<|im_end|>\n<|im_start|>user")


def test_calls_and_results_are_written_in_their_turns():
    said = {"role": "assistant", "content": None, "tool_calls": [call('{"code":"1+1"}')]}
    talk = [{"role": "user", "content": "1+1="}, said, {"role": "tool", "content": "2"}]
    assert TITO.decode(TITO.render(talk)).endswith(
        '<|im_start|>assistant\n<tool_call>{"name":"python","arguments":{"code":"1+1"}}</tool_call>'
        "<|im_end|>\n<|im_start|>tool\n2<|im_end|>\n<|im_start|>assistant\n"
    )


@given(texts, st.lists(compact, min_size=1, max_size=3))
def test_parse_gives_back_content_and_calls_as_they_were_said(content, made):
    said = {"role": "assistant", "content": content, "tool_calls": made}
    found = TITO.parse(TITO.demonstrate(said))
    assert found["content"] == content
    assert [c["function"] for c in found["tool_calls"]] == [c["function"] for c in made]
    assert len({c["id"] for c in found["tool_calls"]}) == len(made)


@settings(max_examples=60, deadline=None)
@given(talk=tool_turns, tools=st.lists(st.sampled_from([PYTHON, BARE]), max_size=2))
def test_transformers_renders_tools_to_the_same_ids(saved, talk, tools):
    found = saved.apply_chat_template(
        talk, tools=tools or None, add_generation_prompt=True, return_dict=False
    )
    np.testing.assert_array_equal(found, TITO.render(talk, tools=tools))


@settings(max_examples=60)
@given(
    tool_turns, st.lists(st.tuples(texts, st.lists(compact, max_size=2), tool_turns), max_size=3)
)
def test_stored_plus_extension_is_the_whole_rendering_with_tools(first, turns):
    stored, history = TITO.render(first, tools=[PYTHON]), list(first)
    for content, made, added in turns:
        said = TITO.demonstrate({"role": "assistant", "content": content, "tool_calls": made})
        stored, history = np.concatenate([stored, said]), [*history, TITO.parse(said)]
        more = TITO.extend(stored, history, added, tools=[PYTHON])
        stored, history = np.concatenate([stored, more]), [*history, *added]
        np.testing.assert_array_equal(stored, TITO.render(history, tools=[PYTHON]))


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call></tool_call>",
        '<tool_call>{"name":"python"}</tool_call>',
        '<tool_call>{"name":"python","arguments":"1+1"}</tool_call>',
        '<tool_call>{"name":"python","arguments":{"code":NaN}}</tool_call>',
        '<tool_call>{"name":"python","arguments":{"a":1,"a":2}}</tool_call>',
        '<tool_call>{"name":1,"arguments":{}}</tool_call>',
        '<tool_call>{"name":"python","arguments":{}}',
        '<tool_call>{"name":"python","arguments":{}}</tool_call>!',
        '<tool_call>{"name":"python","arguments":{}}</tool_call><tool_call>',
        "</tool_call>",
        "<tool_call>" + "[" * 100_000 + "</tool_call>",
    ],
)
def test_what_is_no_call_stays_text(text):
    assert TITO.parse(TITO.demonstrate(text)) == {"role": "assistant", "content": text}


def test_a_call_that_the_length_limit_cut_stays_text():
    said = TITO.demonstrate({"role": "assistant", "content": "", "tool_calls": [call("{}")]})[:-1]
    assert "tool_calls" not in TITO.parse(said)


def test_arguments_in_another_spelling_become_the_usual_one():
    text = '<tool_call>{"arguments": {"code": "1"}, "name": "python"}</tool_call>'
    (found,) = TITO.parse(TITO.demonstrate(text))["tool_calls"]
    assert found["function"] == {"name": "python", "arguments": '{"code":"1"}'}


def test_a_tool_without_a_name_is_refused():
    with pytest.raises(EpisodeError, match="is no tool"):
        TITO.render([], tools=[{"name": "python"}])
