"""What is said to an SGLang server and what its replies mean: pure functions of plain JSON.

Follows the native API (`/generate`) as of 0.5.16 to 0.5.23; opens no connection. What a server says
of itself is read in `facts`.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import wraps
from typing import Any, TypeVar

import msgspec
import numpy as np

from miles import Array, Completion, EngineError, Request, Span

__all__ = [
    "Answered",
    "Failed",
    "NotFound",
    "Refused",
    "completion",
    "decoded",
    "event",
    "failure",
    "generate_body",
    "joined",
    "rest",
    "sampled",
    "score_body",
    "scored",
    "speculation",
    "triples",
    "typed",
    "unbegun",
    "version",
]

_F = TypeVar("_F", bound=Callable[..., Any])

_SEEDS = 2**31  # what the server's sampling seed may be


class Unreachable(EngineError):
    """Nobody listens at the address, or it hung up."""


class Answered(EngineError):
    """The server, or what stands before it, answered a question with an error."""


class Failed(Answered):
    """The server could not do what it was asked (HTTP 500 and above)."""


class Refused(Answered):
    """The server understood a question and does not do that."""


class NotFound(Refused):
    """The server has no such path."""


def typed(read: _F) -> _F:
    """A function that reads replies, raising `EngineError` for one of another shape than
    SGLang's."""

    @wraps(read)
    def reading(*given: Any, **more: Any) -> Any:
        try:
            return read(*given, **more)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            what = f"{type(error).__name__}: {error}"
            raise EngineError(
                f"engine sglang: a reply is not shaped as SGLang's: {what}"
            ) from error

    return reading  # type: ignore[return-value]


def generate_body(request: Request, rid: str, *, every: int = 0, salt: str = "") -> dict[str, Any]:
    """A completion; with `every`, streamed in parts of that many tokens. Prompts share keys and
    values only under the same `salt`. Raises `EngineError` for a request without tokens."""
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
    if request.want_experts:
        body["return_routed_experts"] = True
        # a token's routing is that of the forward which sampled it: of the position before
        body["routed_experts_start_len"] = len(request.tokens) - 1
    if salt:
        body["extra_key"] = salt
    return body


def score_body(tokens: Array, *, salt: str = "") -> dict[str, Any]:
    """Log-probs of given tokens; the one token that is sampled beside is not looked at."""
    return {
        **({"extra_key": salt} if salt else {}),
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
    `EngineError` for what is none, `Refused` for an error in the middle of a stream."""
    data = line.strip().removeprefix(b"data:").strip()
    if not line.startswith(b"data:") or data == b"[DONE]":
        return None
    said = decoded(data)
    if not isinstance(said, dict):
        raise EngineError(f"engine sglang: the stream says {data[:80]!r}, which is no object")
    if "error" in said:
        raise Refused(f"engine sglang: in the middle of a stream: {said['error']}")
    return said


def failure(where: str, status: int, text: str) -> EngineError:
    """An answer that is an error."""
    few = {400: Refused, 404: NotFound}
    kind = few.get(status, Failed if status >= 500 else Answered)
    return kind(f"{where}: HTTP {status}: {' '.join(text.split())[:400]}")


def unbegun(rid: str) -> dict[str, Any]:
    """The reply to a request that was ended before a server had it, as one that ends while it waits
    there."""
    end = {"type": "abort", "message": "ended before it was asked"}
    info = {"id": rid, "finish_reason": end, "completion_tokens": 0, "output_token_logprobs": []}
    return {"output_ids": [], "meta_info": info}


@typed
def version(info: Mapping[str, Any]) -> int:
    """`weight_version`, which servers that were never updated call `default`."""
    return _number(info.get("weight_version"))


def _number(found: Any) -> int:
    return int(str(found)) if str(found).isdecimal() else 0


_DRAFTS = {
    "verified": ("spec_verify_ct",),
    "drafted": ("spec_num_proposed_drafts", "spec_draft_token_num"),
    "accepted": ("spec_num_correct_drafts", "spec_accept_token_num"),
}
"""Counts of speculative decoding, and what servers call them."""


@typed
def speculation(info: Mapping[str, Any]) -> dict[str, float]:
    """Of one completion: forwards that `verified` drafts, tokens `drafted`, and of those
    `accepted`."""
    found = {name: [info[k] for k in keys if info.get(k)] for name, keys in _DRAFTS.items()}
    return {name: float(values[0]) for name, values in found.items() if values}


def triples(reply: Any, name: str) -> list[Any]:
    """(log-prob, token, text) of a reply under that name. Raises `EngineError`."""
    found = reply.get("meta_info", {}).get(name) if isinstance(reply, dict) else None
    if not isinstance(found, list):
        raise EngineError(f"engine sglang: the reply has no {name}: {str(reply)[:200]}")
    return found


@typed
def sampled(reply: Mapping[str, Any]) -> tuple[Array, Array]:
    """(tokens,) int32 and (tokens,) float32 log-probs of a reply, which stand side by side in it.
    Raises `EngineError`."""
    found = triples(reply, "output_token_logprobs")
    tokens = np.array([triple[1] for triple in found], np.int32)  # (tokens,) int32
    logprobs = np.array([triple[0] for triple in found], np.float32)  # (tokens,) float32
    return tokens, logprobs


_FINISHES = {"stop": "stop", "length": "length", "abort": "abort"}


@typed
def completion(
    request: Request, reply: Mapping[str, Any], *, version: int, topk: int = 0
) -> Completion:
    """A finished reply. Its spans are those that the server tells; one that tells none sampled all
    of it under `version`. `topk` is how many experts a token has. Raises `EngineError` when it
    contradicts itself."""
    where = f"engine sglang: request {request.id!r}"
    tokens, logprobs = sampled(reply)
    info = reply["meta_info"]
    _agree(where, reply, tokens)
    reason = info.get("finish_reason") or {}
    finish = _FINISHES.get(str(reason.get("type")))
    if finish is None:
        raise EngineError(f"{where}: finish_reason {reason!r}; valid: {', '.join(_FINISHES)}")
    if finish == "abort" and (status := reason.get("status_code")):
        raise EngineError(f"{where}: HTTP {status}: {reason.get('message')}")
    if not np.isfinite(logprobs).all():
        raise EngineError(f"{where}: log-prob {int(np.argmin(np.isfinite(logprobs)))} is no number")
    experts = None
    if request.want_experts and len(tokens):
        experts = _experts(where, info.get("routed_experts"), len(tokens), topk)
    return Completion(
        tokens=tokens,
        logprobs=logprobs,
        spans=_spans(where, info.get("weight_versions"), len(tokens), version),
        finish=finish,  # type: ignore[arg-type]
        cached_tokens=int(info.get("cached_tokens") or 0),
        experts=experts,
    )


def _agree(where: str, reply: Mapping[str, Any], tokens: Array) -> None:
    """Refuse a reply whose ids, log-probs and own count are not of the same tokens."""
    ids, count = reply.get("output_ids"), reply["meta_info"].get("completion_tokens")
    ended = (reply["meta_info"].get("finish_reason") or {}).get("type")
    if ended == "abort" and list(ids or ()) == tokens[-1:].tolist():
        ids = None  # of a stream that ends while it waits, 0.5.16 gives the last one alone
    if ids is not None and len(ids) != len(tokens):
        raise EngineError(f"{where}: {len(tokens)} log-probs for {len(ids)} tokens")
    if ids is not None and list(ids) != tokens.tolist():
        raise EngineError(f"{where}: output_ids {ids[-8:]} are not the tokens of the log-probs")
    if count is not None and count != len(tokens):
        raise EngineError(f"{where}: {len(tokens)} log-probs, but completion_tokens is {count}")


def _spans(where: str, told: Any, size: int, version: int) -> tuple[Span, ...]:
    if not size:
        return ()
    if not told:
        return (Span(start=0, stop=size, version=version),)
    spans: list[Span] = []
    for one in told:
        at = spans[-1].stop if spans else 0
        start, end, number = one.get("start"), one.get("end", 0), _number(one.get("version"))
        if start != at or end <= at or (spans and number < spans[-1].version):
            raise EngineError(f"{where}: weight_versions {told!r} do not tile {size} tokens")
        spans.append(Span(start=at, stop=int(end), version=number))
    if spans[-1].stop != size:
        raise EngineError(f"{where}: weight_versions {told!r} do not tile {size} tokens")
    return tuple(spans)


def _experts(where: str, told: Any, size: int, topk: int) -> Array:
    """(tokens, layers, topk) unsigned ints, as narrow as they are small."""
    if not isinstance(told, str):
        raise EngineError(
            f"{where}: experts were asked for, and the reply has none; the server needs "
            "--enable-return-routed-experts"
        )
    flat = np.frombuffer(base64.b64decode(told), "<i4")  # (tokens * layers * topk,) int32
    if topk < 1 or not len(flat) or len(flat) % (size * topk):
        raise EngineError(
            f"{where}: {len(flat)} routed experts are no whole number of layers for {size} tokens "
            f"of {topk} experts"
        )
    kind = np.uint8 if int(flat.max()) < 256 else np.uint16
    if int(flat.min()) < 0:
        raise EngineError(f"{where}: a routed expert is {int(flat.min())}")
    return flat.astype(kind).reshape(size, -1, topk)


def rest(request: Request, done: Completion | None) -> Request:
    """What is left of a request that was cut after `done`: those tokens belong to its prompt
    now."""
    if done is None or not len(done.tokens):
        return request
    left = request.sampling.max_new_tokens - len(done.tokens)
    return replace(
        request,
        tokens=np.concatenate([request.tokens, done.tokens]),
        sampling=replace(request.sampling, max_new_tokens=left),
    )


def joined(done: Completion | None, more: Completion) -> Completion:
    """One completion of two parts, the second sampled after the first's tokens."""
    if done is None or not len(done.tokens):
        return more
    shift = len(done.tokens)
    spans = list(done.spans)
    for span in more.spans:
        start, stop = span.start + shift, span.stop + shift
        if spans[-1].version == span.version and spans[-1].stop == start:
            start = spans.pop().start
        spans.append(Span(start=start, stop=stop, version=span.version))
    experts = None
    if done.experts is not None and more.experts is not None:
        wide = np.promote_types(done.experts.dtype, more.experts.dtype)
        experts = np.concatenate([done.experts, more.experts]).astype(wide)
    return replace(
        more,
        tokens=np.concatenate([done.tokens, more.tokens]),
        logprobs=np.concatenate([_of(done), _of(more)]),
        spans=tuple(spans),
        cached_tokens=done.cached_tokens,
        experts=experts if len(more.tokens) else done.experts,
    )


def _of(completion: Completion) -> Array:
    empty = np.zeros(0, np.float32)  # (0,) float32
    return empty if completion.logprobs is None else completion.logprobs


@typed
def scored(reply: Any, tokens: Array) -> Array:
    """(tokens,) float32; the first has no log-prob and gets 0. Raises `EngineError`."""
    found = triples(reply, "input_token_logprobs")
    if [triple[1] for triple in found] != tokens.tolist():
        raise EngineError("engine sglang: the tokens that were scored are not those that were sent")
    return np.array([triple[0] or 0.0 for triple in found], np.float32)  # (tokens,) float32
