"""The server's OpenAPI document: what may be sent, and every answer that may come.

Written for people and for fuzzers; the routes themselves are in `app`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from miles.session.server.samples import SAFETENSORS

__all__ = ["document"]

_TEXT = {"type": "string"}
_COUNT = {"type": "integer", "minimum": 1}
_BOOL = {"type": "boolean"}
_ANY: dict[str, Any] = {}


def _object(
    required: Sequence[str] = (), *, closed: bool = False, **properties: Any
) -> dict[str, Any]:
    """An object; what is not required may also be null, which means the same as leaving it out."""
    for name in properties.keys() - set(required):
        if properties[name]:
            properties[name] = {"anyOf": [properties[name], {"type": "null"}]}
    made: dict[str, Any] = {"type": "object", "properties": properties}
    if required:
        made["required"] = list(required)
    if closed:
        made["additionalProperties"] = False
    return made


def _list(items: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "array", "items": items, **more}


def _only(*values: Any) -> dict[str, Any]:
    return {"enum": list(values)}


def _ref(name: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{name}"}


_NAME = {"type": "string", "minLength": 1}
_SCHEMA = {"type": "object"}
_DRAW: dict[str, Any] = {
    "max_tokens": _COUNT,
    "temperature": {"type": "number", "minimum": 0, "maximum": 2},
    "top_p": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
    "top_k": {"type": "integer", "minimum": -1},
    "model": _ANY,
    "stream": _BOOL,
}


def _chat() -> dict[str, Any]:
    part = _object(["type", "text"], type=_only("text"), text=_TEXT)
    content = {"anyOf": [_TEXT, _list(part)]}
    call = _object(
        ["id", "type", "function"],
        id=_NAME,
        type=_only("function"),
        function=_object(["name", "arguments"], name=_NAME, arguments=_TEXT),
    )
    message = {
        "anyOf": [
            _object(
                ["role", "content"], role=_only("system", "developer", "user"), content=content
            ),
            _object(
                ["role"],
                role=_only("assistant"),
                content=content,
                reasoning_content=_TEXT,
                tool_calls=_list(call),
            ),
            _object(
                ["role", "content", "tool_call_id"],
                role=_only("tool"),
                content=content,
                tool_call_id=_NAME,
            ),
        ]
    }
    function = _object(["name"], name=_NAME, description=_TEXT, parameters=_SCHEMA)
    offered = _object(["type", "function"], type=_only("function"), function=function)
    return _object(
        ["messages"],
        closed=True,
        messages=_list(message, minItems=1),
        tools=_list(offered),
        tool_choice=_only("auto"),
        n=_only(1),
        user=_ANY,
        seed=_ANY,
        input_ids=_ANY,
        stream_options=_object(closed=True, include_usage=_BOOL, include_obfuscation=_ANY),
        max_completion_tokens=_COUNT,
        **_DRAW,
    )


def _responses() -> dict[str, Any]:
    item = {
        "anyOf": [
            _object(
                ["role", "content"],
                type=_only("message"),
                role=_only("system", "developer", "user", "assistant"),
                content=_TEXT,
            ),
            _object(
                ["type", "call_id", "name", "arguments"],
                type=_only("function_call"),
                call_id=_NAME,
                name=_NAME,
                arguments=_TEXT,
            ),
            _object(
                ["type", "call_id", "output"],
                type=_only("function_call_output"),
                call_id=_NAME,
                output=_TEXT,
            ),
        ]
    }
    offered = _object(
        ["type", "name"],
        type=_only("function"),
        name=_NAME,
        description=_TEXT,
        parameters=_SCHEMA,
        strict=_only(False),
    )
    draw = {name: rule for name, rule in _DRAW.items() if name not in ("max_tokens", "top_k")}
    return _object(
        ["input"],
        closed=True,
        input={"anyOf": [_TEXT, _list(item, minItems=1)]},
        instructions=_TEXT,
        tools=_list(offered),
        store=_ANY,
        max_output_tokens=_COUNT,
        **draw,
    )


def _messages() -> dict[str, Any]:
    text = _object(["type", "text"], type=_only("text"), text=_TEXT)
    use = _object(
        ["type", "id", "name", "input"],
        type=_only("tool_use"),
        id=_NAME,
        name=_NAME,
        input=_object(),
    )
    result = _object(
        ["type", "tool_use_id"], type=_only("tool_result"), tool_use_id=_NAME, content=_TEXT
    )
    message = {
        "anyOf": [
            _object(
                ["role", "content"],
                role=_only("user"),
                content={"anyOf": [_TEXT, _list(text), _list(result)]},
            ),
            _object(
                ["role", "content"],
                role=_only("assistant"),
                content={"anyOf": [_TEXT, _list({"anyOf": [text, use]})]},
            ),
        ]
    }
    offered = _object(["name"], name=_NAME, description=_TEXT, input_schema=_SCHEMA)
    return _object(
        ["messages", "max_tokens"],
        closed=True,
        messages=_list(message, minItems=1),
        system=_TEXT,
        tools=_list(offered),
        **_DRAW,
    )


_REQUESTS = {"chat/completions": _chat, "responses": _responses, "messages": _messages}


def _answers(*, good: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    """Responses of a route: the good ones, and the errors that every route may give."""
    made: dict[str, Any] = {}
    for status, content in good.items():
        made[str(status)] = {"description": "done", "content": dict(content)}
    for status, why in {
        400: "a parameter or a message that cannot be honoured, by name",
        401: "not the token of this session, or there is none with this id",
        404: "the session was closed, or expired",
        409: "another request is being answered, or the last turn cannot be extended",
        413: "the body is too large",
        429: "a limit is reached",
        500: "tokens do not extend the stored ones (code token_mismatch)",
        502: "the engine failed; the request may be sent again",
    }.items():
        content = {"application/json": {"schema": _ref("Error")}}
        made[str(status)] = {"description": why, "content": content}
    return made


def _json(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


def document(apis: Sequence[str]) -> dict[str, Any]:
    """OpenAPI 3.1 of a server that answers these paths below `/sessions/{id}/v1`."""
    session = {"name": "id", "in": "path", "required": True, "schema": _NAME}
    any_object = _object()
    below: dict[str, Any] = {
        "/sessions": {
            "get": {"responses": _answers(good={200: _json(any_object)})},
            "post": {
                "requestBody": {
                    "content": _json(
                        _object(
                            closed=True,
                            id={"type": "string", "pattern": "^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$"},
                        )
                    )
                },
                "responses": _answers(good={201: _json(_ref("Opened"))}),
            },
        },
        "/sessions/{id}": {
            "parameters": [session],
            "get": {"responses": _answers(good={200: _json(_ref("State"))})},
            "delete": {"responses": _answers(good={200: _json(_ref("State"))})},
        },
        "/sessions/{id}/samples": {
            "parameters": [session],
            "post": {
                "requestBody": {"content": _json(_object(closed=True, reward={"type": "number"}))},
                "responses": _answers(
                    good={200: {**_json(_ref("Samples")), SAFETENSORS: {"schema": {}}}}
                ),
            },
        },
        "/sessions/{id}/v1/models": {
            "parameters": [session],
            "get": {"responses": _answers(good={200: _json(any_object)})},
        },
    }
    for name in apis:
        good = {**_json(any_object), "text/event-stream": {"schema": {}}}
        below[f"/sessions/{{id}}/v1/{name}"] = {
            "parameters": [session],
            "post": {
                "requestBody": {"required": True, "content": _json(_REQUESTS[name]())},
                "responses": _answers(good={200: good}),
            },
        }
    return {
        "openapi": "3.1.0",
        "info": {"title": "miles session server", "version": "1"},
        "paths": below,
        "security": [{"bearer": []}],
        "components": {
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
            "schemas": _schemas(),
        },
    }


def _schemas() -> dict[str, Any]:
    numbers = _list({"type": "number"})
    sample = _object(
        ["tokens", "trainable", "logprobs", "versions", "reward"],
        tokens=_list({"type": "integer"}),
        trainable=_list(_BOOL),
        logprobs={"anyOf": [numbers, {"type": "null"}]},
        versions=_list({"type": "integer"}),
        reward={"type": "number"},
    )
    return {
        "Error": _object(["error"], error=_object(["message"])),
        "Opened": _object(
            ["session_id", "token", "model"], session_id=_TEXT, token=_TEXT, model=_TEXT
        ),
        "State": _object(["session_id", "turns", "tokens"]),
        "Samples": _object(["samples"], samples=_list(sample)),
    }
