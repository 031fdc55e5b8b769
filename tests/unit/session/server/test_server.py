"""The server's own promises: who may, what is refused and how, what becomes of failures."""

from __future__ import annotations

import base64
import json
import socket
import threading
import time
from itertools import product

import httpx
import numpy as np
import pytest
from safetensors.numpy import load

from miles import GenerationAborted, Sampling, SessionKeys, TokenMismatch
from miles_plugins.tito.bytes import Bytes

ADMIN = {"Authorization": "Bearer admin-secret"}
ASKS = {
    "chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "responses": {"input": "hi"},
    "messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 100},
}


def _post(server, base, key, path, body, **more):
    url = f"{base.removeprefix(server.address)}/{path}"
    headers = {"Authorization": f"Bearer {key}", **more.pop("headers", {})}
    return server.http.post(url, json=body, headers=headers, **more)


def _ask(server, base, key, api="chat/completions", **changes):
    return _post(server, base, key, f"v1/{api}", {**ASKS[api], **changes})


def _message(reply) -> str:
    return reply.json()["error"]["message"]


# ---------------------------------------------------------------- who may


@pytest.mark.parametrize("how", ["Authorization", "x-api-key"])
def test_a_token_opens_its_own_session_and_no_other(talk, how):
    (one, key), (two, other) = talk.open(), talk.open()
    value = f"Bearer {key}" if how == "Authorization" else key
    for path in ("", "/v1/models"):
        assert httpx.get(one + path, headers={how: value}).status_code == 200
        assert httpx.get(two + path, headers={how: value}).status_code == 401
    assert httpx.get(one).status_code == 401
    assert httpx.get(one, headers={how: value + "x"}).status_code == 401
    assert key != other


def test_nobody_learns_which_sessions_there_are(talk):
    (base, key), _ = talk.open("there"), talk.open("past")
    _, own = talk.open("over")
    for id in ("past", "over"):
        assert talk.http.delete(f"/sessions/{id}", headers=ADMIN).status_code == 200
    assert httpx.get(base, headers={"Authorization": f"Bearer {key}"}).status_code == 200
    for token in ("", "Bearer wrong", f"Bearer {own}"):
        headers = {"Authorization": token} if token else {}
        told = [
            talk.http.request(method, f"/sessions/{id}{path}", headers=headers, json={})
            for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/v1/messages"))
            for id in ("there", "past", "never")
        ]
        assert {reply.status_code for reply in told} == {401}
        bodies = {reply.content for reply in told[:3]}
        assert len(bodies) == 1, bodies
    assert talk.http.get("/sessions/over", headers={"x-api-key": own}).status_code == 404
    for id in ("past", "never"):
        assert talk.http.get(f"/sessions/{id}", headers=ADMIN).status_code == 404


def test_only_the_admin_token_opens_and_lists_sessions(talk):
    _, key = talk.open("mine")
    for headers in ({}, {"Authorization": f"Bearer {key}"}):
        assert talk.http.post("/sessions", headers=headers).status_code == 401
        assert talk.http.get("/sessions", headers=headers).status_code == 401
    listed = talk.http.get("/sessions", headers=ADMIN).json()
    assert "mine" in [s["session_id"] for s in listed["sessions"]]
    assert listed["metrics"]["session/open"] == len(talk.sessions)
    assert talk.http.get("/sessions/mine", headers=ADMIN).status_code == 200


def test_a_session_opened_again_has_another_token(talk):
    base, key = talk.open("same")
    headers = {"Authorization": f"Bearer {key}"}
    assert httpx.delete(base, headers=headers).json()["session_id"] == "same"
    assert httpx.get(base, headers=headers).status_code == 404
    assert "never opened, closed, or expired" in _message(httpx.get(base, headers=headers))
    _, fresh = talk.open("same")
    assert httpx.get(base, headers=headers).status_code == 401
    assert httpx.get(base, headers={"Authorization": f"Bearer {fresh}"}).status_code == 200


def test_a_token_is_not_kept_in_the_journal(serving, script, tmp_path):
    with serving(script("Yes."), directory=tmp_path) as server:
        base, key = server.open()
        assert _ask(server, base, key).status_code == 200
        written = b"".join(p.read_bytes() for p in tmp_path.rglob("*") if p.is_file())
        assert b"token_sha256" in written
        assert key.encode() not in written


def test_an_id_is_refused_when_it_is_taken_or_no_name(talk):
    talk.open("a.b-c_1")
    taken = talk.http.post("/sessions", json={"id": "a.b-c_1"}, headers=ADMIN)
    assert taken.status_code == 409
    for id in ("", "a/b", "-x", "x" * 200, 5):
        reply = talk.http.post("/sessions", json={"id": id}, headers=ADMIN)
        assert reply.status_code == 400
        assert "letters, digits" in _message(reply)


# ---------------------------------------------------------------- what is not here


@pytest.mark.parametrize(
    "path", ["/v1/completions", "/v1/embeddings", "/v1/messages/count_tokens", "/generate", "/x"]
)
def test_any_other_path_is_a_404_that_says_so(talk, path):
    base, key = talk.open()
    reply = httpx.post(base + path, json={}, headers={"Authorization": f"Bearer {key}"})
    assert reply.status_code == 404
    assert "nothing passes through unrecorded" in _message(reply)
    assert "/v1/chat/completions" in _message(reply)


def test_a_wrong_method_is_a_405(talk):
    base, key = talk.open()
    reply = httpx.get(f"{base}/v1/responses", headers={"Authorization": f"Bearer {key}"})
    assert reply.status_code == 405
    assert reply.json()["error"]["code"] == "wrong_method"


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[1]", b"\xff\xfe", b"[" * 100_000, b'"\\ud800"', b"null", b'{"a": NaN}']
)
@pytest.mark.parametrize("api", ASKS)
def test_a_body_that_is_no_object_is_a_400(talk, api, body):
    base, key = talk.open()
    reply = httpx.post(f"{base}/v1/{api}", content=body, headers={"x-api-key": key})
    assert reply.status_code == 400
    assert "the body is" in _message(reply)
    assert talk.session(base).turns == 0


def test_a_body_without_end_is_a_413(talk):
    base, key = talk.open()

    def body():
        for _ in range(65):
            yield b" " * 1024 * 1024

    reply = httpx.post(
        f"{base}/v1/messages", content=body(), headers={"x-api-key": key}, timeout=60
    )
    assert reply.status_code == 413


# ---------------------------------------------------------------- parameters


@pytest.mark.parametrize(
    ("api", "changes", "said"),
    [
        ("chat/completions", {"n": 2}, "n=2 cannot be honoured"),
        (
            "chat/completions",
            {"stop": ["a"]},
            "stop=['a'] cannot be honoured, only [], \"\"; a turn",
        ),
        ("chat/completions", {"n": True}, "n=True"),
        ("chat/completions", {"logit_bias": {"5": 1}}, "logit_bias"),
        ("chat/completions", {"response_format": {"type": "json_object"}}, "response_format"),
        ("chat/completions", {"tool_choice": "required"}, "tool_choice"),
        ("chat/completions", {"parallel_tool_calls": False}, "parallel_tool_calls"),
        ("chat/completions", {"stop": ["x"]}, "stop"),
        ("chat/completions", {"frequency_penalty": 0.5}, "frequency_penalty"),
        ("chat/completions", {"logprobs": True}, "/samples"),
        ("chat/completions", {"reasoning_effort": "high"}, "reasoning_effort"),
        ("chat/completions", {"temperatur": 1}, "did you mean 'temperature'?"),
        ("chat/completions", {"temperature": 0.5}, "temperature=0.5 cannot be honoured"),
        ("chat/completions", {"temperature": "1"}, "temperature is '1'"),
        ("chat/completions", {"top_p": 0}, "top_p is 0"),
        ("chat/completions", {"max_tokens": 0}, "max_tokens is 0"),
        ("chat/completions", {"messages": []}, "messages is empty"),
        ("chat/completions", {"messages": [{"role": "x", "content": ""}]}, "messages[0].role"),
        ("chat/completions", {"messages": [{"role": "user"}]}, "messages[0].content"),
        ("chat/completions", {"messages": [{"role": "tool", "content": ""}]}, "tool_call_id"),
        ("chat/completions", {"tools": [{"type": "custom"}]}, "tools[0] has type 'custom'"),
        (
            "chat/completions",
            {"tools": [{"type": "function", "function": {"name": "f", "strict": True}}]},
            "tools[0].function.strict cannot be honoured",
        ),
        ("responses", {"previous_response_id": "resp_1"}, "send the whole history"),
        ("responses", {"background": True}, "background"),
        ("responses", {"text": {"format": {"type": "json_schema"}}}, "text="),
        ("responses", {"tools": [{"type": "web_search"}]}, "tools[0] has type 'web_search'"),
        ("responses", {"include": ["logprobs"]}, "include may hold"),
        ("responses", {"input": [{"type": "computer_call"}]}, "input[0] has type"),
        ("messages", {"stop_sequences": ["x"]}, "stop_sequences"),
        ("messages", {"thinking": {"type": "disabled"}}, "thinking"),
        ("messages", {"tool_choice": {"type": "any"}}, "tool_choice"),
        ("messages", {"max_tokens": None}, "max_tokens is missing"),
        ("messages", {"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0] has type"),
        ("messages", {"messages": [{"role": "system", "content": "x"}]}, "valid: user, assistant"),
    ],
)
def test_what_cannot_be_honoured_is_a_400_that_names_it(talk, api, changes, said):
    base, key = talk.open()
    reply = _ask(talk, base, key, api, **changes)
    assert reply.status_code == 400, reply.text
    assert said in _message(reply)
    assert reply.headers["x-should-retry"] == "false"
    assert talk.session(base).turns == 0


@pytest.mark.parametrize(
    ("api", "changes"),
    [
        (
            "chat/completions",
            {"user": "u", "metadata": {}, "store": True, "seed": 5, "input_ids": [1, 2], "n": 1,
             "tool_choice": "auto", "logit_bias": None, "frequency_penalty": 0, "temperature": 1,
             "response_format": {"type": "text"}, "stop": None},
        ),
        ("responses", {"store": True, "truncation": "disabled", "service_tier": "auto"}),
        ("messages", {"metadata": {"user_id": "u"}, "tool_choice": {"type": "auto"}}),
    ],
)  # fmt: skip
def test_what_changes_no_token_is_accepted(talk, api, changes):
    base, key = talk.open()
    assert _ask(talk, base, key, api, **changes).status_code == 200
    ids = talk.session(base).samples()[0].tokens.tolist()
    assert ids[:2] != [1, 2], "client input_ids are ignored"


@pytest.mark.parametrize(
    ("policy", "temperature"), [("refuse", None), ("ignore", 1.0), ("honour", 0.5)]
)
def test_a_clients_temperature_follows_the_policy(serving, script, policy, temperature):
    with serving(script("Yes."), client_sampling=policy) as server:
        base, key = server.open()
        reply = _ask(server, base, key, temperature=0.5)
        if temperature is None:
            assert reply.status_code == 400
            return
        assert reply.status_code == 200
        assert server.engine.requests[0].sampling.temperature == temperature


def test_max_tokens_is_honoured_up_to_the_runs_own(serving, script):
    with serving(script("Yes, indeed."), sampling=Sampling(max_new_tokens=8)) as server:
        for asked, given in ((3, 3), (100, 8)):
            base, key = server.open()
            reply = _ask(server, base, key, max_tokens=asked)
            assert reply.json()["choices"][0]["finish_reason"] == "length"
            assert reply.json()["usage"]["completion_tokens"] == given
        base, key = server.open()
        made = _ask(server, base, key, "messages", max_tokens=3).json()
        assert made["stop_reason"] == "max_tokens"
        made = _ask(server, *server.open(), "responses", max_output_tokens=3).json()
        assert (made["status"], made["incomplete_details"]["reason"]) == (
            "incomplete",
            "max_output_tokens",
        )


# ---------------------------------------------------------------- failures


def test_an_engines_failure_is_a_502_that_may_be_tried_again(serving, script, engine_error):
    engine = script("Yes.")
    with serving(engine) as server:
        for api, stream in product(ASKS, (False, True)):
            base, key = server.open()
            for error in (engine_error("engine fake: out of memory"), GenerationAborted("aborted")):
                engine.fail = error
                reply = _ask(server, base, key, api, stream=stream)
                assert reply.status_code == 502
                assert reply.headers["x-should-retry"] == "true"
                assert str(error) in _message(reply)
            engine.fail = None
            assert _ask(server, base, key, api, stream=stream).status_code == 200
            assert server.session(base).turns == 1
            assert server.session(base).counters.rollbacks == 0


def test_a_silent_engine_is_a_502_after_the_limit(serving, script):
    engine = script("Yes.")
    engine.hold = threading.Event()
    with serving(engine, rules=SessionKeys(upstream_timeout_s=0.2)) as server:
        base, key = server.open()
        reply = _ask(server, base, key)
        assert reply.status_code == 502
        assert "session.upstream_timeout_s" in _message(reply)
        assert engine.aborted == [[base.rpartition("/")[2]]]


def test_a_failure_in_the_middle_of_a_stream_is_an_event(serving, script, engine_error):
    engine = script("Yes, it is so.")
    whole = engine.stream

    async def broken(request):
        count = 0
        async for part in whole(request):
            count += 1
            if count == 5:
                raise engine_error("engine fake: gone")
            yield part

    engine.stream = broken
    with serving(engine) as server:
        for api in ASKS:
            base, key = server.open()
            reply = _ask(server, base, key, api, stream=True)
            assert reply.status_code == 200
            last = reply.text.strip().rpartition("data: ")[2]
            assert "engine fake: gone" in last
            assert "[DONE]" not in reply.text
            assert server.session(base).turns == 0


def test_a_token_mismatch_is_a_500_that_is_told_and_counted(serving, script):
    class Rewriting(Bytes):
        def extend(self, stored, history, messages, *, tools=()):
            raise TokenMismatch("token 7 differs: stored 'a', given 'b'")

    tito = Rewriting.__new__(Rewriting)
    with serving(script("Yes."), tito=tito) as server:
        base, key = server.open()
        assert _ask(server, base, key).status_code == 200
        again = [*ASKS["chat/completions"]["messages"], {"role": "assistant", "content": "Yes."}]
        again.append({"role": "user", "content": "?"})
        reply = _ask(server, base, key, messages=again)
        assert reply.status_code == 500
        assert reply.json()["error"]["code"] == "token_mismatch"
        assert "token 7 differs" in _message(reply)
        assert reply.headers["x-should-retry"] == "false"
        state = httpx.get(base, headers={"x-api-key": key}).json()
        assert state["counters"]["token_mismatches"] == 1
        assert "token 7 differs" in state["failure"]
        assert _post(server, base, key, "samples", {}).status_code == 500


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_without_room_ends_the_episode_as_truncated(serving, script, stream):
    with serving(script("Yes."), max_tokens=60) as server:
        ends = {"chat/completions": "length", "responses": "incomplete"}
        ends["messages"] = "model_context_window_exceeded"
        for api, end in ends.items():
            base, key = server.open()
            long = "x" * 80
            changes = {"input": long} if api == "responses" else {}
            if not changes:
                changes = {"messages": [{"role": "user", "content": long}]}
            reply = _ask(server, base, key, api, stream=stream, **changes)
            assert reply.status_code == 200
            assert end in reply.text
            assert reply.headers["x-miles-truncated"] == "true"
            assert server.session(base).truncated
            assert server.session(base).turns == 0


def test_a_deeper_change_of_history_is_a_400_that_says_what_differs(talk):
    base, key = talk.open()
    text = talk.engine.said[0]
    messages = [{"role": "user", "content": "hi"}]
    for _ in range(3):
        assert _ask(talk, base, key, messages=messages).status_code == 200
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "more"}]
    messages[1] = {"role": "assistant", "content": "Never said."}
    reply = _ask(talk, base, key, messages=messages)
    assert reply.status_code == 400
    assert reply.json()["error"]["code"] == "history_mismatch"
    assert "messages[1]" in _message(reply)


@pytest.mark.parametrize("extension", ["linear", "branching"])
def test_two_requests_at_once_are_kept_or_refused_never_lost(serving, script, extension):
    engine = script("Yes.")
    engine.hold = threading.Event()
    with serving(engine, rules=SessionKeys(extension=extension)) as server:
        base, key = server.open()
        replies = []
        threads = [
            threading.Thread(target=lambda: replies.append(_ask(server, base, key)))
            for _ in range(2)
        ]
        for thread in threads:
            thread.start()
        wanted = 2 if extension == "branching" else 1
        _until(lambda: len(engine.requests) == wanted and len(replies) == 2 - wanted)
        engine.hold.set()
        for thread in threads:
            thread.join(10)
        codes = sorted(reply.status_code for reply in replies)
        assert codes == ([200, 200] if extension == "branching" else [200, 409])
        for reply in replies:
            if reply.status_code == 409:
                assert reply.headers["x-should-retry"] == "false"
        assert server.session(base).turns == wanted


def _until(true, seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


def test_a_client_that_goes_away_ends_its_generation(serving, script):
    engine = script("Yes, it is so, and it goes on.")
    with serving(engine) as server:
        for api, stream in product(ASKS, (False, True)):
            engine.hold, engine.aborted, engine.requests = threading.Event(), [], []
            base, key = server.open()
            session = server.session(base)
            _ask_and_leave(server, base, key, api, stream=stream)
            _until(lambda: engine.aborted)
            assert engine.aborted == [[session.id]]
            _until(lambda session=session: not session.pending)
            assert session.turns == 0
            engine.hold.set()
            assert _ask(server, base, key, api).status_code == 200


def _ask_and_leave(server, base, key, api, *, stream):
    """Ask over a bare connection, and close it once the engine is at work."""
    with socket.create_connection(server.address.removeprefix("http://").split(":")) as raw:
        body = json.dumps({**ASKS[api], "stream": stream}).encode()
        path = base.removeprefix(server.address)
        head = f"POST {path}/v1/{api} HTTP/1.1\r\nhost: x\r\nx-api-key: {key}\r\n"
        raw.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        if stream:
            assert b"200" in raw.recv(200)
        _until(lambda: server.engine.requests)


# ---------------------------------------------------------------- samples and images


def test_samples_are_what_was_recorded_in_both_forms(talk):
    base, key = talk.open()
    assert _post(talk, base, key, "samples", {}).json() == {"samples": []}
    assert _ask(talk, base, key).status_code == 200
    (wanted,) = talk.session(base).samples()
    (plain,) = _post(talk, base, key, "samples", {"reward": 0.5}).json()["samples"]
    assert plain["tokens"] == wanted.tokens.tolist()
    assert plain["trainable"] == wanted.trainable.tolist()
    np.testing.assert_allclose(plain["logprobs"], wanted.logprobs)
    assert {v for v, s in zip(plain["versions"], plain["sampled"], strict=True) if s} == {3}
    assert {v for v, s in zip(plain["versions"], plain["sampled"], strict=True) if not s} == {-1}
    assert plain["reward"] == 0.5
    accept = {"accept": "application/vnd.safetensors"}
    reply = _post(talk, base, key, "samples", {"reward": 0.5}, headers=accept)
    assert reply.headers["content-type"] == accept["accept"]
    tensors = load(reply.content)
    assert tensors["samples.0.tokens"].dtype == np.int32
    assert tensors["samples.0.tokens"].tolist() == plain["tokens"]
    assert tensors["samples.0.logprobs"].tobytes() == wanted.logprobs.tobytes()
    assert tensors["samples.0.versions"].tolist() == plain["versions"]
    assert tensors["samples.0.reward"].tolist() == [0.5]


IMAGE = base64.b64encode(b"\x89PNG not really").decode()
URL = f"data:image/png;base64,{IMAGE}"
PICTURES = {
    "chat/completions": {
        "messages": [
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "what?"},
                    {"type": "image_url", "image_url": {"url": URL}},
                ],
            }
        ]
    },
    "responses": {
        "input": [
            {
                "role": "user",
                "content": [
                    {"type": "input_text", "text": "what?"},
                    {"type": "input_image", "image_url": URL},
                ],
            }
        ]
    },
    "messages": {
        "messages": [
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "what?"},
                    {
                        "type": "image",
                        "source": {"type": "base64", "media_type": "image/png", "data": IMAGE},
                    },
                ],
            }
        ]
    },
}


class Seeing(Bytes):
    """Bytes in which an image is one id that text cannot hold."""

    multimodal = True

    def render(self, messages, *, tools=()):
        plain = []
        for message in messages:
            content = message["content"]
            if isinstance(content, list):
                parts = [p.get("text", "<image>") for p in content]
                message = {**message, "content": "".join(parts)}
            plain.append(message)
        return super().render(plain, tools=tools)


def test_images_are_carried_to_the_engine_and_the_sample(serving, script):
    tito = Seeing.__new__(Seeing)
    with serving(script("A cat."), tito=tito) as server:
        for api in ASKS:
            base, key = server.open()
            reply = _ask(server, base, key, api, **PICTURES[api])
            assert reply.status_code == 200, reply.text
            assert server.engine.requests[-1].images == (b"\x89PNG not really",)
            assert server.session(base).samples()[0].images == (b"\x89PNG not really",)


@pytest.mark.parametrize("api", ASKS)
def test_images_are_refused_by_a_handler_of_text(talk, api):
    base, key = talk.open()
    reply = _ask(talk, base, key, api, **PICTURES[api])
    assert reply.status_code == 400
    assert "takes text only" in _message(reply)


def test_images_are_never_fetched(serving, script):
    with serving(script("A cat."), tito=Seeing.__new__(Seeing)) as server:
        base, key = server.open()
        for url in ("http://example.com/a.png", "data:image/png,x", "data:x;base64,A"):
            part = {"type": "image_url", "image_url": {"url": url}}
            reply = _ask(server, base, key, messages=[{"role": "user", "content": [part]}])
            assert reply.status_code == 400
        assert not server.engine.requests


# ---------------------------------------------------------------- restarts and expiry


def test_sessions_go_on_after_a_restart(serving, script, tmp_path):
    messages = [{"role": "user", "content": "hi"}]
    with serving(script("Yes."), directory=tmp_path) as server:
        base, key = server.open("kept")
        assert _ask(server, base, key, messages=messages).status_code == 200
    messages += [{"role": "assistant", "content": "Yes."}, {"role": "user", "content": "more"}]
    with serving(script("No."), directory=tmp_path) as server:
        base = f"{server.address}/sessions/kept"
        reply = _ask(server, base, key, messages=messages)
        assert reply.status_code == 200
        assert server.session(base).turns == 2
        assert server.session(base).counters.rollbacks == 0


def test_tool_calls_of_another_branch_keep_their_spelling(serving, script):
    call = {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {
                "id": "x",
                "type": "function",
                "function": {"name": "f", "arguments": '{"a": 1,"b":2}'},
            }
        ],
    }
    rules = SessionKeys(extension="branching")
    tools = [{"name": "f", "input_schema": {"type": "object"}}]
    with serving(script(call, "Other.", "Done."), rules=rules) as server:
        base, key = server.open()
        asked = ASKS["messages"]["messages"]
        made = _ask(server, base, key, "messages", tools=tools).json()
        _ask(
            server, base, key, "messages", tools=tools, messages=[{"role": "user", "content": "!"}]
        )
        use = made["content"][0]
        result = {"type": "tool_result", "tool_use_id": use["id"], "content": "3"}
        history = [*asked, {"role": "assistant", "content": made["content"]}]
        history.append({"role": "user", "content": [result]})
        reply = _ask(server, base, key, "messages", tools=tools, messages=history)
        assert reply.status_code == 200
        assert server.session(base).turns == 3
        assert len(server.session(base).samples()) == 2
