"""The official `openai` and `anthropic` clients, as they are, against the server."""

from __future__ import annotations

import asyncio
import json

import anthropic
import openai
import pytest

ADD = {
    "name": "add",
    "description": "Adds two numbers.",
    "parameters": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
    },
}
CALL = {
    "role": "assistant",
    "content": "Let me see. ",
    "tool_calls": [
        {"id": "x", "type": "function", "function": {"name": "add", "arguments": '{"a": 1,"b":2}'}}
    ],
}
TEXT = "Hello there, żółw 🐢!"


def _openai(base: str, key: str, kind=openai.OpenAI):
    return kind(base_url=f"{base}/v1", api_key=key, max_retries=0, timeout=20)


def _anthropic(base: str, key: str, kind=anthropic.Anthropic):
    return kind(base_url=base, api_key=key, max_retries=0, timeout=20)


def _recorded(server, base: str):
    """What was sampled in a session, decoded, and its one sample."""
    (sample,) = server.session(base).samples()
    return server.engine.tito.decode(sample.tokens), sample


# ---------------------------------------------------------------- chat completions


def test_chat_answers_and_records_a_conversation(talk):
    base, key = talk.open()
    client = _openai(base, key)
    messages = [{"role": "user", "content": "hi"}]
    first = client.chat.completions.create(model="any", messages=messages)
    assert first.choices[0].message.content == TEXT
    assert first.choices[0].finish_reason == "stop"
    assert first.model == "policy"
    assert first.usage.completion_tokens == len(TEXT.encode()) + 1
    assert first.usage.prompt_tokens_details.cached_tokens == 4
    messages += [first.choices[0].message, {"role": "user", "content": "more"}]
    client.chat.completions.create(model="any", messages=messages)
    text, sample = _recorded(talk, base)
    assert text.count(TEXT) == 2
    assert sample.trainable.sum() == 2 * (len(TEXT.encode()) + 1)
    assert talk.session(base).turns == 2


def test_chat_streams_the_same_text(talk):
    base, key = talk.open()
    stream = _openai(base, key).chat.completions.create(
        model="any",
        messages=[{"role": "user", "content": "hi"}],
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    parts = [c.choices[0].delta.content for c in chunks if c.choices and c.choices[0].delta.content]
    assert "".join(parts) == TEXT
    assert len(parts) > 5
    assert chunks[-1].usage.completion_tokens == len(TEXT.encode()) + 1
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert talk.session(base).messages[-1]["content"] == TEXT


def test_chat_stream_without_asking_has_no_usage(talk):
    base, key = talk.open()
    stream = _openai(base, key).chat.completions.create(
        model="any", messages=[{"role": "user", "content": "hi"}], stream=True
    )
    assert all(chunk.usage is None for chunk in stream)


@pytest.mark.parametrize("stream", [False, True])
def test_chat_calls_tools(serving, script, stream):
    with serving(script(CALL, "It is 3.")) as server:
        base, key = server.open()
        client = _openai(base, key)
        tools = [{"type": "function", "function": ADD}]
        messages = [{"role": "user", "content": "1+2?"}]
        if stream:
            with client.chat.completions.stream(
                model="m", messages=messages, tools=tools
            ) as events:
                choice = events.get_final_completion().choices[0]
        else:
            choice = client.chat.completions.create(
                model="m", messages=messages, tools=tools
            ).choices[0]
        assert choice.finish_reason == "tool_calls"
        (call,) = choice.message.tool_calls
        assert call.function.name == "add"
        assert call.function.arguments == '{"a": 1,"b":2}'
        assert choice.message.content == "Let me see. "
        said = choice.message.model_dump(exclude_none=True)
        said = {k: v for k, v in said.items() if k in ("role", "content", "tool_calls")}
        for each in said["tool_calls"]:
            each.pop("index", None)
            each["function"].pop("parsed_arguments", None)
        messages += [said, {"role": "tool", "tool_call_id": call.id, "content": "3"}]
        last = client.chat.completions.create(model="m", messages=messages, tools=tools)
        assert last.choices[0].message.content == "It is 3."
        assert server.session(base).turns == 2
        assert server.session(base).counters.rollbacks == 0


def test_chat_works_asynchronously(talk):
    base, key = talk.open()

    async def play():
        async with _openai(base, key, openai.AsyncOpenAI) as client:
            messages = [{"role": "user", "content": "hi"}]
            whole = await client.chat.completions.create(model="m", messages=messages)
            messages += [
                {"role": "assistant", "content": whole.choices[0].message.content},
                {"role": "user", "content": "again"},
            ]
            stream = await client.chat.completions.create(model="m", messages=messages, stream=True)
            parts = [c.choices[0].delta.content or "" async for c in stream if c.choices]
            return whole.choices[0].message.content, "".join(parts)

    assert asyncio.run(play()) == (TEXT, TEXT)


def test_chat_lists_the_model(talk):
    base, key = talk.open()
    assert [m.id for m in _openai(base, key).models.list()] == ["policy"]
    assert [m.id for m in _anthropic(base, key).models.list()] == ["policy"]


@pytest.mark.parametrize("opened", [False, True])
def test_chat_tells_reasoning_apart(serving, script, thinking, opened):
    tito = thinking(opened=opened)
    head = "" if opened else "<think>"
    with serving(script(f"{head}hm, let me think</think>\n\nYes, so it is.", tito=tito)) as server:
        base, key = server.open()
        client = _openai(base, key)
        messages = [{"role": "user", "content": "hi"}]
        stream = client.chat.completions.create(model="m", messages=messages, stream=True)
        deltas = [c.choices[0].delta for c in stream if c.choices]
        reasoning = "".join(getattr(d, "reasoning_content", None) or "" for d in deltas)
        content = "".join(d.content or "" for d in deltas)
        assert (reasoning, content) == ("hm, let me think", "Yes, so it is.")
        messages += [
            {"role": "assistant", "content": content, "reasoning_content": reasoning},
            {"role": "user", "content": "go on"},
        ]
        whole = client.chat.completions.create(model="m", messages=messages).choices[0].message
        assert whole.content == content
        assert whole.reasoning_content == reasoning
        assert server.session(base).turns == 2


# ---------------------------------------------------------------- responses


def test_responses_answers_streams_and_goes_on(talk):
    base, key = talk.open()
    client = _openai(base, key)
    first = client.responses.create(model="m", input="hi", instructions="Be kind.", store=False)
    assert first.output_text == TEXT
    assert first.status == "completed"
    assert first.usage.output_tokens == len(TEXT.encode()) + 1
    history = [{"role": "user", "content": "hi"}, *first.output, {"role": "user", "content": "?"}]
    kinds, text = [], ""
    with client.responses.stream(model="m", input=history, instructions="Be kind.") as stream:
        for event in stream:
            kinds.append(event.type)
            text += event.delta if event.type == "response.output_text.delta" else ""
        final = stream.get_final_response()
    assert text == final.output_text == TEXT
    assert kinds[0] == "response.created"
    assert kinds[-1] == "response.completed"
    assert kinds.count("response.output_text.delta") > 5
    assert talk.session(base).turns == 2
    assert talk.session(base).messages[0]["role"] == "system"


@pytest.mark.parametrize("stream", [False, True])
def test_responses_calls_tools(serving, script, stream):
    with serving(script(CALL, "It is 3.")) as server:
        base, key = server.open()
        client = _openai(base, key)
        asked = {"model": "m", "tools": [{"type": "function", "strict": False, **ADD}]}
        history = [{"role": "user", "content": "1+2?"}]
        if stream:
            with client.responses.stream(input=history, **asked) as events:
                made = events.get_final_response()
        else:
            made = client.responses.create(input=history, **asked)
        call = next(item for item in made.output if item.type == "function_call")
        assert json.loads(call.arguments) == {"a": 1, "b": 2}
        keep = ("type", "role", "content", "call_id", "name", "arguments", "id", "status")
        said = [
            {k: v for k, v in item.model_dump(exclude_none=True).items() if k in keep}
            for item in made.output
        ]
        history += [
            *said,
            {"type": "function_call_output", "call_id": call.call_id, "output": "3"},
        ]
        last = client.responses.create(input=history, **asked)
        assert last.output_text == "It is 3."
        assert server.session(base).turns == 2
        assert server.session(base).counters.rollbacks == 0


@pytest.mark.parametrize("sealed", [False, True])
def test_responses_carries_reasoning(serving, script, thinking, sealed):
    with serving(script("<think>hm</think>Yes.", tito=thinking())) as server:
        base, key = server.open()
        client = _openai(base, key)
        include = ["reasoning.encrypted_content"] if sealed else []
        with client.responses.stream(model="m", input="hi", include=include) as stream:
            made = stream.get_final_response()
        assert [item.type for item in made.output] == ["reasoning", "message"]
        assert made.output[0].content[0].text == "hm"
        said = [item.model_dump(exclude_none=True) for item in made.output]
        if sealed:  # agents that keep nothing else of it
            said[0] = {k: said[0][k] for k in ("type", "id", "summary", "encrypted_content")}
        history = [{"role": "user", "content": "hi"}, *said, {"role": "user", "content": "?"}]
        client.responses.create(model="m", input=history)
        assert server.session(base).turns == 2


def test_responses_works_asynchronously(talk):
    base, key = talk.open()

    async def play():
        async with _openai(base, key, openai.AsyncOpenAI) as client:
            whole = await client.responses.create(model="m", input="hi")
            async with client.responses.stream(
                model="m",
                input=[
                    {"role": "user", "content": "hi"},
                    *whole.output,
                    {"role": "user", "content": "?"},
                ],
            ) as stream:
                return whole.output_text, (await stream.get_final_response()).output_text

    assert asyncio.run(play()) == (TEXT, TEXT)


# ---------------------------------------------------------------- messages


def test_messages_answers_streams_and_goes_on(talk):
    base, key = talk.open()
    client = _anthropic(base, key)
    history = [{"role": "user", "content": "hi"}]
    asked = {"model": "m", "max_tokens": 300, "system": "Be kind."}
    first = client.messages.create(messages=history, **asked)
    assert [block.text for block in first.content] == [TEXT]
    assert first.stop_reason == "end_turn"
    assert first.usage.output_tokens == len(TEXT.encode()) + 1
    history += [
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": [{"type": "text", "text": "more"}]},
    ]
    with client.messages.stream(messages=history, **asked) as stream:
        parts = list(stream.text_stream)
        final = stream.get_final_message()
    assert "".join(parts) == TEXT == final.content[0].text
    assert len(parts) > 5
    assert final.usage.output_tokens == len(TEXT.encode()) + 1
    assert talk.session(base).turns == 2


@pytest.mark.parametrize("stream", [False, True])
def test_messages_calls_tools_and_keeps_their_spelling(serving, script, stream):
    with serving(script(CALL, "It is 3.")) as server:
        base, key = server.open()
        client = _anthropic(base, key)
        tool = {"name": "add", "description": ADD["description"], "input_schema": ADD["parameters"]}
        asked = {"model": "m", "max_tokens": 300, "tools": [tool]}
        history = [{"role": "user", "content": "1+2?"}]
        if stream:
            with client.messages.stream(messages=history, **asked) as events:
                made = events.get_final_message()
        else:
            made = client.messages.create(messages=history, **asked)
        assert made.stop_reason == "tool_use"
        assert [block.type for block in made.content] == ["text", "tool_use"]
        assert made.content[1].input == {"a": 1, "b": 2}
        result = {"type": "tool_result", "tool_use_id": made.content[1].id, "content": "3"}
        history += [
            {"role": "assistant", "content": made.content},
            {"role": "user", "content": [result]},
        ]
        last = client.messages.create(messages=history, **asked)
        assert last.content[0].text == "It is 3."
        session = server.session(base)
        assert session.turns == 2
        assert session.counters.rollbacks == 0
        assert session.messages[1]["tool_calls"][0]["function"]["arguments"] == '{"a": 1,"b":2}'


@pytest.mark.parametrize("stream", [False, True])
def test_messages_carries_thinking(serving, script, thinking, stream):
    with serving(script("<think>hm, so</think>Yes.", tito=thinking())) as server:
        base, key = server.open()
        client = _anthropic(base, key)
        asked = {"model": "m", "max_tokens": 300}
        history = [{"role": "user", "content": "hi"}]
        if stream:
            with client.messages.stream(messages=history, **asked) as events:
                made = events.get_final_message()
        else:
            made = client.messages.create(messages=history, **asked)
        assert [block.type for block in made.content] == ["thinking", "text"]
        assert made.content[0].thinking == "hm, so"
        history += [
            {"role": "assistant", "content": made.content},
            {"role": "user", "content": "go on"},
        ]
        client.messages.create(messages=history, **asked)
        assert server.session(base).turns == 2


def test_messages_works_asynchronously(talk):
    base, key = talk.open()

    async def play():
        async with _anthropic(base, key, anthropic.AsyncAnthropic) as client:
            asked = {"model": "m", "max_tokens": 300}
            history = [{"role": "user", "content": "hi"}]
            whole = await client.messages.create(messages=history, **asked)
            history += [
                {"role": "assistant", "content": whole.content},
                {"role": "user", "content": "?"},
            ]
            async with client.messages.stream(messages=history, **asked) as stream:
                return whole.content[0].text, await stream.get_final_text()

    assert asyncio.run(play()) == (TEXT, TEXT)


# ---------------------------------------------------------------- all alike


def test_the_three_apis_record_the_same_tokens(serving, script):
    prompts = []
    with serving(script("Yes.")) as server:
        for ask in (_ask_chat, _ask_responses, _ask_messages):
            base, key = server.open()
            ask(base, key)
            prompts.append(server.session(base).samples()[0].tokens.tolist())
    assert prompts[0] == prompts[1] == prompts[2]


def _ask_chat(base, key):
    _openai(base, key).chat.completions.create(
        model="m",
        messages=[{"role": "system", "content": "S"}, {"role": "user", "content": "hi"}],
        tools=[{"type": "function", "function": ADD}],
    )


def _ask_responses(base, key):
    tools = [{"type": "function", "strict": None, **ADD}]
    _openai(base, key).responses.create(model="m", instructions="S", input="hi", tools=tools)


def _ask_messages(base, key):
    _anthropic(base, key).messages.create(
        model="m",
        max_tokens=300,
        system="S",
        messages=[{"role": "user", "content": "hi"}],
        tools=[
            {"name": "add", "description": ADD["description"], "input_schema": ADD["parameters"]}
        ],
    )
