"""What is said to an SGLang server and what its replies mean: pure functions of plain JSON.

Follows the native API (`/generate`) as of 0.5.16 to 0.5.23; opens no connection.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from miles import Array, Completion, EngineError, Request, Span

__all__ = [
    "NotFound",
    "completion",
    "decoded",
    "event",
    "failure",
    "generate_body",
    "sampled",
    "score_body",
    "scored",
    "version",
]

_SEEDS = 2**31  # what the server's sampling seed may be


class NotFound(EngineError):
    """The server has no such path."""


def generate_body(request: Request, rid: str, *, every: int = 0) -> dict[str, Any]:
    """A completion; with `every`, streamed in parts of that many tokens. Raises `EngineError` for
    what this client does not carry."""
    if request.want_experts:
        raise EngineError(
            f"engine sglang: request {request.id!r} wants routed experts, which this client does "
            "not carry"
        )
    if not len(request.tokens):
        raise EngineError(f"engine sglang: request {request.id!r}: there are no tokens")
    how = request.sampling
    params: dict[str, Any] = {
        "max_new_tokens": how.max_new_tokens,
        "temperature": how.temperature,
        "top_p": how.top_p,
        "top_k": how.top_k or -1,
        "stop_token_ids": list(how.stop_ids),
        "skip_special_tokens": False,
        "no_stop_trim": True,
        "sampling_seed": request.seed % _SEEDS,
    }
    if every:
        params["stream_interval"] = every
    body = {
        "input_ids": request.tokens.tolist(),
        "sampling_params": params,
        "return_logprob": True,
        "stream": bool(every),
        "rid": rid,
    }
    if request.images:
        body["image_data"] = [base64.b64encode(image).decode() for image in request.images]
    if request.dp_rank is not None:
        body["routed_dp_rank"] = request.dp_rank
    return body


def score_body(tokens: Array) -> dict[str, Any]:
    """Log-probs of given tokens; the one token that is sampled beside is not looked at."""
    return {
        "input_ids": tokens.tolist(),
        "sampling_params": {"max_new_tokens": 1, "temperature": 1.0},
        "return_logprob": True,
        "logprob_start_len": 0,
        "stream": False,
    }


def decoded(raw: bytes) -> Any:
    """JSON, or None where the server says plain words."""
    try:
        return msgspec.json.decode(raw)
    except msgspec.DecodeError:
        return None


def event(line: bytes) -> dict[str, Any] | None:
    """What one line of a stream says; None for lines between events and for the end. Raises
    `EngineError` for an error in the middle of a stream."""
    data = line.strip().removeprefix(b"data:").strip()
    if not line.startswith(b"data:") or data == b"[DONE]":
        return None
    said = decoded(data)
    if not isinstance(said, dict):
        raise EngineError(f"engine sglang: the stream says {data[:80]!r}, which is no object")
    if "error" in said:
        raise EngineError(f"engine sglang: in the middle of a stream: {said['error']}")
    return said


def failure(where: str, status: int, text: str) -> EngineError:
    """An answer that is an error."""
    kind = NotFound if status == 404 else EngineError
    return kind(f"{where}: HTTP {status}: {' '.join(text.split())[:400]}")


def version(info: Mapping[str, Any]) -> int:
    """`weight_version`, which servers that were never updated call `default`."""
    found = str(info.get("weight_version", ""))
    return int(found) if found.isdecimal() else 0


def _triples(reply: Any, name: str) -> list[Any]:
    found = reply.get("meta_info", {}).get(name) if isinstance(reply, dict) else None
    if not isinstance(found, list):
        raise EngineError(f"engine sglang: the reply has no {name}: {str(reply)[:200]}")
    return found


def sampled(reply: Mapping[str, Any]) -> tuple[Array, Array]:
    """(tokens,) int32 and (tokens,) float32 log-probs of a reply, which stand side by side in it.
    Raises `EngineError`."""
    triples = _triples(reply, "output_token_logprobs")
    tokens = np.array([triple[1] for triple in triples], np.int32)  # (tokens,) int32
    logprobs = np.array([triple[0] for triple in triples], np.float32)  # (tokens,) float32
    return tokens, logprobs


_FINISHES = {"stop": "stop", "length": "length", "abort": "abort"}


def completion(request: Request, reply: Mapping[str, Any], version: int) -> Completion:
    """A finished reply, all of its tokens under one version. Raises `EngineError` when it
    contradicts itself."""
    tokens, logprobs = sampled(reply)
    info = reply["meta_info"]
    where = f"engine sglang: request {request.id!r}"
    ids = reply.get("output_ids")
    if ids is not None and list(ids) != tokens.tolist():
        raise EngineError(f"{where}: output_ids {ids[-8:]} are not the tokens of the log-probs")
    reason = info.get("finish_reason") or {}
    finish = _FINISHES.get(str(reason.get("type")))
    if finish is None:
        raise EngineError(f"{where}: finish_reason {reason!r}; valid: {', '.join(_FINISHES)}")
    if not np.isfinite(logprobs).all():
        raise EngineError(f"{where}: log-prob {int(np.argmin(np.isfinite(logprobs)))} is no number")
    size = len(tokens)
    return Completion(
        tokens=tokens,
        logprobs=logprobs,
        spans=(Span(start=0, stop=size, version=version),) if size else (),
        finish=finish,  # type: ignore[arg-type]
        cached_tokens=int(info.get("cached_tokens") or 0),
    )


def scored(reply: Any, tokens: Array) -> Array:
    """(tokens,) float32; the first has no log-prob and gets 0. Raises `EngineError`."""
    triples = _triples(reply, "input_token_logprobs")
    if [triple[1] for triple in triples] != tokens.tolist():
        raise EngineError("engine sglang: the tokens that were scored are not those that were sent")
    return np.array([triple[0] or 0.0 for triple in triples], np.float32)  # (tokens,) float32
