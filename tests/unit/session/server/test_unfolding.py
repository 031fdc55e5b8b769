"""Whatever the chunks, what a stream gives out is the beginning of the finished message, and in the
end all of it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles import Context, SampleError
from miles.session.server.unfolding import Text, Unfolding
from miles.testing import FakeTito
from miles_plugins.tito.bytes import Bytes

BYTES = Bytes(Bytes.Config(), Context(directory=Path()))
PIECES = st.sampled_from(
    [
        "<think>", "</think>", "<tool_call>", "</tool_call>", "<", ">", "<tool", "_call>", "a < b",
        "hello", " ", "\n\n", "ż🐢", "{", "[1]", "</", "think", "<|im_end|>", "<div>", "x" * 120,
        '<tool_call>{"name":"f","arguments":{"a":1}}</tool_call>', "�",
    ]
)  # fmt: skip


def _chunks(ids: np.ndarray, cuts: list[int]) -> list[np.ndarray]:
    return [part for part in np.split(ids, sorted({c % (len(ids) + 1) for c in cuts})) if len(part)]


def _unfolded(tito, ids, cuts, tools=()):
    unfolding = Unfolding(tito, tools=tools, stop_ids=())
    out = {"reasoning": "", "content": ""}
    kinds = []
    for chunk in _chunks(ids, cuts):
        for delta in unfolding.feed(chunk):
            assert delta.text
            out[delta.kind] += delta.text
            kinds.append(delta.kind)
    early = dict(out)
    for delta in unfolding.finish(tito.parse(ids, tools=tools)):
        out[delta.kind] += delta.text
        kinds.append(delta.kind)
    assert kinds == sorted(kinds, reverse=True), "reasoning comes before content"
    return early, out


def _handlers(thinking):
    return {
        "bytes": BYTES,
        "fake": FakeTito(),
        "thinking": thinking(),
        "thinking already": thinking(opened=True),
    }


@pytest.mark.parametrize("name", ["bytes", "fake", "thinking", "thinking already"])
def test_unfolding_gives_the_finished_message_whatever_the_chunks(thinking, name):
    tito = _handlers(thinking)[name]

    @settings(max_examples=150, deadline=None)
    @given(st.lists(PIECES, max_size=9), st.lists(st.integers(0, 400), max_size=40), st.booleans())
    def check(pieces, cuts, closed):
        ids = tito.encode("".join(pieces))
        if closed:
            ids = np.concatenate([ids, np.array(tito.stop_ids[:1], np.int32)])
        if not len(ids):
            return
        message = tito.parse(ids)
        for chosen in (cuts, list(range(len(ids))), []):
            _, out = _unfolded(tito, ids, chosen)
            assert out["content"] == (message.get("content") or "")
            assert out["reasoning"] == (message.get("reasoning_content") or "")

    check()


@pytest.mark.parametrize("text", ["</</think></think>", "a</think>a</think>", "a<div></think>a"])
def test_unfolding_knows_reasoning_that_its_answer_resembles(thinking, text):
    tito = thinking(opened=True)
    message = tito.parse(tito.encode(text))
    _, out = _unfolded(tito, tito.encode(text), [])
    assert out["reasoning"] == message["reasoning_content"]


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=40), st.lists(st.integers(0, 40), max_size=12))
def test_unfolding_keeps_bytes_that_are_no_text(data, cuts):
    ids = np.frombuffer(data, np.uint8).astype(np.int32)
    _, out = _unfolded(BYTES, ids, cuts)
    assert out["content"] == BYTES.decode(ids)


@settings(max_examples=150, deadline=None)
@given(st.text(max_size=30), st.lists(st.integers(0, 120), max_size=30))
def test_text_never_splits_a_character(text, cuts):
    ids = BYTES.encode(text)
    made, whole = Text(BYTES.decode), ""
    for chunk in _chunks(ids, cuts):
        part = made.add(chunk.tolist())
        assert "�" in text or "�" not in part
        whole += part
    assert whole + made.add([], flush=True) == BYTES.decode(ids)


def test_unfolding_streams_plain_text_as_it_comes():
    early, out = _unfolded(BYTES, BYTES.encode("a < b, and so on to the end."), list(range(40)))
    assert early["content"] == out["content"]


def test_unfolding_holds_markup_back():
    text = 'See: <tool_call>{"name":"f","arguments":{}}</tool_call>'
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    ids = np.array([*BYTES.encode(text), *BYTES.stop_ids], np.int32)
    early, out = _unfolded(BYTES, ids, list(range(80)), tools)
    assert early["content"] == "See:"
    assert out["content"] == "See: "


def test_unfolding_streams_reasoning_as_it_comes(thinking):
    tito = thinking()
    early, _ = _unfolded(tito, tito.encode("<think>one two three"), list(range(40)))
    assert early == {"reasoning": "one two three", "content": ""}


def test_unfolding_waits_where_only_the_end_tells_reasoning(thinking):
    tito = thinking(opened=True)
    early, _ = _unfolded(tito, tito.encode("one two three"), list(range(40)))
    assert early == {"reasoning": "", "content": ""}
    early, _ = _unfolded(tito, tito.encode("one</think>\n\ntwo three"), list(range(40)))
    assert early == {"reasoning": "one", "content": "two three"}


def test_unfolding_says_when_a_handler_takes_back_what_it_said():
    class Fickle(Bytes):
        def parse(self, tokens, *, tools=()):
            message = super().parse(tokens)
            return message if len(tokens) < 12 else {**message, "content": "No!"}

    tito = Fickle(Bytes.Config(), Context(directory=Path()))
    unfolding = Unfolding(tito, tools=(), stop_ids=())
    ids = tito.encode("Yes, surely so.")
    for token in ids:
        unfolding.feed(ids[:0] if token is None else np.array([token], np.int32))
    with pytest.raises(SampleError, match=r"content was given out as 'Yes, surely so\.'"):
        unfolding.finish(tito.parse(ids))


def _families() -> list[str]:
    from importlib.metadata import distribution

    return sorted(
        entry.name
        for entry in distribution("miles").entry_points
        if entry.group == "miles.tito" and entry.name not in ("bytes",)
    )


@pytest.mark.parametrize("name", _families())
def test_unfolding_agrees_with_every_registered_handler(name, tmp_path):
    """Each family's own words for reasoning, text and two calls, one token at a time and in
    chunks."""
    from miles.plugins import Registry
    from miles.protocols import Spec

    registry = Registry.load()
    component = registry.component("tito", name)
    config = component.example_config(tmp_path)
    context = Context(directory=tmp_path)
    tito = registry.build(Spec(kind="tito", name=name, config=config), context)
    call = {"name": "f", "arguments": json.dumps({"a": 1, "b": "x < y"})}
    schema = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    messages = [
        {"role": "assistant", "content": "Well, a < b and <b>so</b> on."},
        {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm, let me think."},
        {
            "role": "assistant",
            "content": "See:",
            "tool_calls": [
                {"id": f"call_{i}", "type": "function", "function": call} for i in range(2)
            ],
        },
    ]
    for message in messages:
        ids = tito.demonstrate(message)
        parsed = tito.parse(ids, tools=tools)
        for cuts in (list(range(len(ids))), [5, 11, 30], []):
            _, out = _unfolded(tito, ids, cuts, tools)
            assert out["content"] == (parsed.get("content") or "")
            assert out["reasoning"] == (parsed.get("reasoning_content") or "")
