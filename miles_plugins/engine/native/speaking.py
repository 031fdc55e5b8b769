"""SGLang's native bodies as requests, and completions as its replies: pure functions of plain JSON.

The serving half of what `miles_plugins.engine.sglang.wording` is the asking half of.
"""

from __future__ import annotations

import base64
import secrets
from collections.abc import Mapping
from typing import Any

import numpy as np

from miles import Array, Completion, EngineError, Request, Sampling, choices

__all__ = ["NOTHING", "prompt_start", "reply", "request_of", "triples"]

_BODY = [
    "input_ids",
    "sampling_params",
    "stream",
    "rid",
    "return_logprob",
    "logprob_start_len",
    "return_routed_experts",
    "routed_experts_start_len",
    "image_data",
    "return_text_in_logprobs",
    "top_logprobs_num",
    "extra_key",
    "log_metrics",
    "priority",
    "routed_dp_rank",
    "bootstrap_host",
    "bootstrap_port",
    "bootstrap_room",
]
_SAMPLING = [
    "max_new_tokens",
    "temperature",
    "top_p",
    "top_k",
    "stop_token_ids",
    "sampling_seed",
    "stream_interval",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "no_stop_trim",
    "ignore_eos",
    "n",
    "min_p",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
]
_NEUTRAL = {
    "n": (1, None),
    "min_p": (0, 0.0, None),
    "repetition_penalty": (1, 1.0, None),
    "frequency_penalty": (0, 0.0, None),
    "presence_penalty": (0, 0.0, None),
}
"""What this engine has only one way of."""


def request_of(body: Any) -> Request:
    """Raises `EngineError` naming what cannot be served."""
    if not isinstance(body, Mapping):
        _refuse("the body is no object")
    if unknown := sorted(set(body) - set(_BODY)):
        _refuse(f"{unknown[0]} is not known here; {choices(unknown[0], _BODY)}")
    if body.get("image_data"):
        _refuse("images are not served")
    if top := body.get("top_logprobs_num"):
        _refuse(f"top_logprobs_num is {top!r}; only 0 is served")
    params = body.get("sampling_params") or {}
    if not isinstance(params, Mapping):
        _refuse("sampling_params is no object")
    every = params.get("stream_interval")
    if every is not None and type(every) is not int:
        _refuse(f"sampling_params.stream_interval is {every!r}, no whole number")
    if unknown := sorted(set(params) - set(_SAMPLING)):
        what = choices(unknown[0], _SAMPLING)
        _refuse(f"sampling_params.{unknown[0]} is not known here; {what}")
    for name, values in _NEUTRAL.items():
        if name in params and params[name] not in values:
            _refuse(f"sampling_params.{name} is {params[name]!r}; only {values[0]} is served")
    rid = str(body.get("rid") or secrets.token_hex(8))
    try:
        sampling = Sampling(
            max_new_tokens=int(_given(params.get("max_new_tokens"), 128)),
            temperature=float(params.get("temperature", 1.0)),
            top_p=float(params.get("top_p", 1.0)),
            top_k=max(0, int(params.get("top_k") or 0)),
            stop_ids=tuple(int(token) for token in params.get("stop_token_ids") or ()),
        )
        seed = int(params.get("sampling_seed", secrets.randbits(31)))
    except (TypeError, ValueError) as error:
        _refuse(f"sampling_params: {error}")
    return Request(
        id=rid,
        key=rid,  # the protocol has no other
        tokens=_ids(body.get("input_ids")),
        sampling=sampling,
        seed=seed,
        want_experts=bool(body.get("return_routed_experts")),
    )


def _given(value: Any, default: Any) -> Any:
    return default if value is None else value


def _refuse(why: str) -> None:
    raise EngineError(f"generate: {why}")


def _ids(given: Any) -> Array:
    """(tokens,) int32."""
    good = isinstance(given, list) and given and all(type(token) is int for token in given)
    if not good or max(given) >= 2**31 or min(given) < 0:
        _refuse("input_ids must be a list of token ids; text has no tokenizer here")
    return np.array(given, np.int32)


NOTHING = Completion(
    tokens=np.zeros(0, np.int32),  # (0,) int32
    logprobs=np.zeros(0, np.float32),  # (0,) float32
    spans=(),
    finish="length",
)
"""What `max_new_tokens: 0` samples, beside the log-probs of a prompt."""


def prompt_start(body: Mapping[str, Any], tokens: Array) -> int | None:
    """The first token of the prompt whose log-prob is asked for, after the last where none is;
    None without `return_logprob`. Raises `EngineError`."""
    if not body.get("return_logprob"):
        return None
    start = _given(body.get("logprob_start_len"), -1)
    if type(start) is not int or not -1 <= start <= len(tokens):
        _refuse(f"logprob_start_len is {start!r}; it must be from -1 (none) to {len(tokens)}")
    return len(tokens) if start == -1 else start


def triples(tokens: Array, values: Array | None) -> list[list[Any]]:
    """(log-prob, token, None) each; no log-prob where there are no `values`."""
    ids = tokens.tolist()
    found = [None] * len(ids) if values is None else values.tolist()
    return [[p, t, None] for p, t in zip(found, ids, strict=True)]


def reply(
    request: Request,
    made: Completion,
    *,
    version: int,
    finished: bool,
    prompt: list[list[Any]] | None = None,
) -> dict[str, Any]:
    """A completion, or with `finished` false what there is of it; `prompt` are the triples of that,
    where log-probs are asked for."""
    ids = made.tokens.tolist()
    reason: dict[str, Any] | None = {"type": made.finish} if finished else None
    if reason is not None and made.finish == "length":
        reason["length"] = len(ids)
    meta: dict[str, Any] = {
        "id": request.id,
        "finish_reason": reason,
        "prompt_tokens": len(request.tokens),
        "completion_tokens": len(ids),
        "cached_tokens": made.cached_tokens,
        "weight_version": str(made.spans[-1].version if made.spans else version),
    }
    if prompt is not None:
        meta["input_token_logprobs"] = prompt
    meta["output_token_logprobs"] = triples(made.tokens, made.logprobs)
    if made.spans:
        meta["weight_versions"] = [
            {"version": str(span.version), "start": span.start, "end": span.stop}
            for span in made.spans
        ]
    if made.experts is not None:
        meta["routed_experts"] = base64.b64encode(made.experts.astype("<i4").tobytes()).decode()
    return {"output_ids": ids, "meta_info": meta}
