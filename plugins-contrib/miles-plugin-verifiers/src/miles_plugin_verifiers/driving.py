"""One rollout of a verifiers environment against a served session, and what came of it.

Tokens and versions are the session's; this module moves no text between the two sides itself.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from miles import EpisodeError, Sampling, ServedSession

_WHERE = "environment verifiers"


@asynccontextmanager
async def client_of(session: ServedSession, *, timeout_s: float) -> AsyncIterator[Any]:
    """The library's chat completions client, pointed at a session; it never asks twice, since a
    retried turn would be another sample."""
    from openai import AsyncOpenAI
    from verifiers.clients import OpenAIChatCompletionsClient

    plain = AsyncOpenAI(
        base_url=f"{session.base_url}/v1",
        api_key=session.api_key,
        max_retries=0,
        timeout=timeout_s,
    )
    client = OpenAIChatCompletionsClient(plain)
    try:
        yield client
    finally:
        await client.close()


def arguments(sampling: Sampling) -> dict[str, Any]:
    """The run's sampling in the library's words."""
    found: dict[str, Any] = {
        "max_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
    }
    if sampling.top_k:
        found["extra_body"] = {"top_k": sampling.top_k}
    return found


async def drive(
    made: Any, row: Mapping[str, Any], session: ServedSession, sampling: Sampling, timeout_s: float
) -> Any:
    """Let the environment play one row to its end; its `State`, not yet scored.

    Raises `EpisodeError` when the environment's code or the way to the model failed. A reply
    without any text is the policy's doing, not a failure: the rubric says what it is worth.
    """
    from verifiers.errors import EmptyModelResponseError

    async with client_of(session, timeout_s=timeout_s) as client:
        try:
            state = await made.rollout(dict(row), client, session.model, arguments(sampling))
        except Exception as error:  # foreign code, whose fault is this attempt's
            raise _failed(made, row, error) from error
    error = state.get("error")
    if error is not None and not isinstance(error, EmptyModelResponseError):
        raise _failed(made, row, error) from error
    return state


async def score(made: Any, states: list[Any], *, together: bool) -> None:
    """Have the environment's own rubric fill in `reward` and `metrics`; `together` compares the
    states with each other."""
    try:
        if together:
            await made.rubric.score_group(states)
        else:
            for state in states:
                await made.rubric.score_rollout(state)
        for state in states:
            await made.rubric.cleanup(state)
    except Exception as error:  # foreign code, whose fault is this attempt's
        raise EpisodeError(
            f"{_WHERE}: the rubric of {made.env_id!r} failed: {type(error).__name__}: {error}"
        ) from error


def worth(state: Any) -> tuple[float, dict[str, float]]:
    """The reward of a scored state, and what else its rubric measured."""
    metrics = {
        name.lstrip("_"): float(value)
        for name, value in (state.get("metrics") or {}).items()
        if isinstance(value, int | float)
    }
    metrics["truncated"] = float(bool(state.get("is_truncated")))
    metrics["no_reply"] = float(state.get("error") is not None)
    reward = state.get("reward")
    if reward is None:
        raise EpisodeError(f"{_WHERE}: the rubric gave no reward for row {state['example_id']}")
    return float(reward), metrics


def _failed(made: Any, row: Mapping[str, Any], error: BaseException) -> EpisodeError:
    chain, seen = [], error
    while seen is not None and len(chain) < 4:
        chain.append(f"{type(seen).__name__}: {seen}".strip(": "))
        seen = seen.__cause__ or seen.__context__  # type: ignore[assignment]
    return EpisodeError(
        f"{_WHERE}: {made.env_id!r} failed on row {row.get('example_id')}: {' <- '.join(chain)}"
    )
