"""What a server says of itself: version, ranks, limits, and what of the API it has.

Pure functions of the JSON of `/server_info` and of one reply; opens no connection.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from miles import EngineError
from miles_plugins.engine.sglang.wording import typed

__all__ = [
    "TESTED",
    "UNKNOWN",
    "Facts",
    "checksums",
    "doubt",
    "doubts",
    "facts",
    "load_of",
    "verdict",
]

TESTED = ("0.5.16", "0.5.23")
"""Oldest and newest SGLang that this client is tested with."""

UNKNOWN = "unknown"
"""What stands for the version of a server that does not say it."""

_OURS = "miles "
"""How `miles serve`, which comes with this client, begins its version."""

_DTYPES = {name: name for name in ("float32", "bfloat16", "float16")} | {
    "half": "float16",
    "float": "float32",
}
"""What servers call their types; another, such as `auto`, says none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """A running server."""

    version: str
    """SGLang's."""
    max_len: int | None
    """Longest prompt with one token after it, where it says so."""
    dp_ranks: int
    """Ranks that a routing key can be bound to: those of data parallelism, and of DP attention."""
    overlapped: bool
    """The next forward starts before the tokens of the last are counted."""
    experts: bool
    """It returns routed experts."""
    memory_saver: bool
    """It can give memory back."""
    deterministic: bool
    """A seed decides what is sampled."""
    speculative: str
    """Speculative algorithm; empty without one."""
    disaggregation: str
    """`prefill` or `decode` where it does only one of them; empty otherwise."""
    dtype: str = ""
    """Type it computes in; empty where it does not say one."""
    whole_logits: bool | None = None
    """Logits leave its output head in float32; None where it does not say."""

    @property
    def joins(self) -> bool:
        """It takes several requests in one question, as SGLang does."""
        return self.version != UNKNOWN and not self.version.startswith(_OURS)


@typed
def facts(info: Mapping[str, Any]) -> Facts:
    """Of `/server_info`. Raises `EngineError` when that has no version."""
    if not isinstance(info, Mapping) or not info.get("version"):
        raise EngineError(f"engine sglang: /server_info has no version: {str(info)[:200]}")
    longest = info.get("max_req_input_len")
    mode = str(info.get("disaggregation_mode") or "null")
    return Facts(
        version=str(info["version"]),
        max_len=int(longest) + 1 if isinstance(longest, int) else None,
        dp_ranks=max(1, int(info.get("dp_size") or 1)),
        overlapped=not info.get("disable_overlap_schedule", False),
        experts=bool(info.get("enable_return_routed_experts")),
        memory_saver=bool(info.get("enable_memory_saver")),
        deterministic=bool(info.get("enable_deterministic_inference")),
        speculative=str(info.get("speculative_algorithm") or ""),
        disaggregation="" if mode == "null" else mode,
        dtype=_DTYPES.get(str(info.get("dtype")), ""),
        whole_logits=None if (wide := info.get("enable_fp32_lm_head")) is None else bool(wide),
    )


def _ordered(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])


def doubt(version: str) -> str:
    """Why this version may not do; empty within the tested range."""
    oldest, newest = TESTED
    if version.startswith(_OURS):
        return ""
    if _ordered(oldest) <= _ordered(version) <= _ordered(newest):
        return ""
    return f"SGLang {version} was not tested with miles; tested: {oldest} to {newest}"


def doubts(versions: Mapping[str, str]) -> list[str]:
    """Faults of several servers (name or URL to version) in one run."""
    if len(set(versions.values())) < 2:
        return []
    each = ", ".join(f"{where} has {version}" for where, version in sorted(versions.items()))
    return [f"engines of different SGLang versions would sample differently: {each}"]


@typed
def checksums(reply: Any) -> dict[str, str]:
    """Of `/weights_checker`: tensor, with its rank where there are several, to checksum. Raises
    `EngineError`."""
    ranks = reply.get("ranks") if isinstance(reply, Mapping) else None
    if not isinstance(ranks, Sequence) or not ranks:
        raise EngineError(f"engine sglang: /weights_checker has no ranks: {str(reply)[:200]}")
    found = {}
    for index, rank in enumerate(ranks):
        head = f"rank{index}/" if len(ranks) > 1 else ""
        given = rank.get("checksums") if isinstance(rank, Mapping) else None
        if not isinstance(given, Mapping):
            said = str(rank)[:200]
            raise EngineError(f"engine sglang: /weights_checker has no checksums: {said}")
        found.update({head + name: str(value) for name, value in given.items()})
    return found


@typed
def load_of(reply: Any) -> dict[str, float]:
    """Of `/v1/loads`, over all ranks: `waiting` requests, `kv_used`, the fuller rank's share of
    cache tokens in use."""
    loads = reply.get("loads") if isinstance(reply, Mapping) else None
    if not isinstance(loads, Sequence):
        return {}
    return {
        "waiting": float(sum(one.get("num_waiting_reqs") or 0 for one in loads)),
        "kv_used": max((float(one.get("token_usage") or 0.0) for one in loads), default=0.0),
    }


def verdict(reply: Any) -> str:
    """What a weight update says against itself; empty when it succeeded."""
    if isinstance(reply, Mapping) and reply.get("success") is True:
        return ""
    said = reply.get("message") if isinstance(reply, Mapping) else reply
    return " ".join(str(said).split())[:400] or "no answer"
