"""Every error miles raises on purpose, in one tree.

The first line of a message says what and where; hints are attached with `add_note`. All errors
survive pickling, because they cross process boundaries. This module holds no behaviour beyond
wording.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = [
    "BadReward",
    "BufferStarved",
    "CheckpointError",
    "ConfigError",
    "ContractError",
    "EngineError",
    "EpisodeError",
    "EpisodeTimeout",
    "GenerationAborted",
    "HistoryMismatch",
    "JournalError",
    "MilesError",
    "PluginConflict",
    "PluginError",
    "PluginLoadError",
    "PluginNotFound",
    "PluginVersionError",
    "PromptTooLong",
    "RolloutError",
    "RoutingError",
    "RunError",
    "SampleError",
    "SandboxError",
    "SessionClosed",
    "SessionConflict",
    "SessionError",
    "SessionFull",
    "TokenMismatch",
    "TrainerError",
    "UnsupportedRequest",
    "WeightSyncError",
    "WeightsDiffer",
    "WorkerError",
    "choices",
]


def choices(wrong: str, valid: Iterable[str]) -> str:
    """Words for "what instead": the close match, if there is one, and every valid choice,
    sorted."""
    names = sorted(valid)
    close = difflib.get_close_matches(wrong, names, n=1, cutoff=0.6)
    guess = f"did you mean {close[0]!r}? " if close else ""
    return f"{guess}valid: {', '.join(names) or '(none)'}"


class MilesError(Exception):
    """The root: `except MilesError` catches everything miles means to say."""

    @property
    def detail(self) -> str:
        """The message with its notes, as one string for logs and reports."""
        return "\n".join([str(self), *getattr(self, "__notes__", ())])


class ConfigError(MilesError):
    """The configuration cannot be used: kind, component, key, file and the valid choices are in the
    text."""


class PluginError(MilesError):
    """A plugin could not be used."""


class PluginNotFound(PluginError):
    """No installed plugin offers that name."""


class PluginConflict(PluginError):
    """Two distributions claim one name; both are named."""


class PluginLoadError(PluginError):
    """Importing a plugin raised; the original error is the cause."""


class ContractError(PluginError):
    """A component does not do what its kind's protocol says."""


class PluginVersionError(PluginError):
    """A plugin differs from the one a checkpoint or another process uses."""


class SampleError(MilesError):
    """A sample breaks one of its own invariants."""


class TokenMismatch(SampleError):
    """Tokens do not extend what was stored: the first index that differs, both sides decoded."""

    status = 500


class RolloutError(MilesError):
    """Something went wrong inside one episode; the loop turns it into a value with `reason`."""

    reason = "rollout_error"


class EpisodeError(RolloutError):
    """The environment's own code failed, or gave an unusable value."""

    reason = "episode_error"


class SandboxError(RolloutError):
    """A sandbox could not be opened or used; `retryable` when the same request may succeed later
    (busy, unreachable), not when it never will (refused, gone)."""

    reason = "sandbox_error"

    def __init__(self, *args: object, retryable: bool = False) -> None:
        super().__init__(*args)
        self.retryable = retryable


class EngineError(RolloutError):
    """An engine failed to answer a request."""

    reason = "engine_error"


class BadReward(EpisodeError):
    """A reward was not one finite number."""

    reason = "bad_reward"


class EpisodeTimeout(RolloutError):
    """An episode ran past its deadline."""

    reason = "timeout"


class PromptTooLong(RolloutError):
    """A prompt leaves no room for a token in the model's context."""

    reason = "prompt_too_long"


class GenerationAborted(RolloutError):
    """The engine ended a completion before its end, because somebody asked it to."""

    reason = "aborted"


class RoutingError(RolloutError):
    """A request has no routing key, or no engine can take it; the trajectory is named."""

    reason = "routing_error"


class SessionError(RolloutError):
    """A request that a session refuses; `status` is the HTTP status that says so."""

    reason = "session_error"
    status = 400


class HistoryMismatch(SessionError):
    """A request does not continue the recorded history: which message differs, and how."""

    reason = "history_mismatch"


class UnsupportedRequest(SessionError):
    """A request asks for what cannot be honoured; the parameter is named."""

    reason = "unsupported_request"


class SessionConflict(SessionError):
    """Another request is being answered, or the turn to extend ended by length."""

    reason = "session_conflict"
    status = 409


class SessionClosed(SessionError):
    """No such session: never opened, closed, or expired after its idle limit."""

    reason = "session_closed"
    status = 404


class SessionFull(SessionError):
    """A limit is reached: sessions, tokens, or turns."""

    reason = "session_full"
    status = 429


class JournalError(SessionError):
    """A session's journal could not be written or read; the turn is not stored."""

    reason = "journal_error"
    status = 500


class RunError(MilesError):
    """The run as a whole cannot go on."""


class WorkerError(RunError):
    """A worker process died, hung, or raised; its name and the remote traceback are in the text."""


class WeightSyncError(RunError):
    """Weights on an engine are not the trainer's."""


class WeightsDiffer(WeightSyncError):
    """An engine took an update, and comparing contents shows other tensors than those sent, so that
    it must not serve; which ones is in the text, and nothing that changes from one attempt to the
    next. Public, since what is not crosses a process as a `WorkerError`, which reads as a death."""


class CheckpointError(RunError):
    """A checkpoint is damaged, incomplete, or belongs to another configuration."""


class TrainerError(RunError):
    """The trainer refused or failed a step."""


class BufferStarved(RunError):
    """The trainer waited too long for groups; what was seen is in the text."""
