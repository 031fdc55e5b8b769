"""Protocols of what is attempted: environments, episodes, sandboxes, selectors."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

from miles.protocols.model import Tito, Tool
from miles.protocols.train import Engine
from miles.types import Drop, Group, Message, Sampling, Task, Trajectory

Split = Literal["train", "heldout"]

__all__ = [
    "Box",
    "BoxInfo",
    "Conversation",
    "Environment",
    "Episode",
    "ExecResult",
    "Inventory",
    "Reply",
    "Sandbox",
    "Selector",
    "ServedSession",
    "Split",
    "Step",
    "Tools",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """One assistant turn."""

    text: str
    """Decoded, without the stop token."""
    message: Message
    """As the tito handler parsed it."""
    finish: str
    """stop, length or abort."""
    tokens: int
    """How many were sampled."""
    demonstrated: bool = False
    """Replayed from the task's solution instead of sampled: recorded tool results may then stand
    for running the tools again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """An episode's answer to a reply."""

    messages: tuple[Message, ...] = ()
    """What to append before the next turn."""
    done: bool = True
    """No more turns."""


@runtime_checkable
class Episode(Protocol):
    """One attempt, single-use. The loop calls reset once, step after every reply, reward once.

    Optional: `tools`, the function schemas offered to the model in every turn (read after `reset`);
    `async close()`, called at the end however the attempt ended.
    """

    async def reset(self) -> str | Sequence[Message]:
        """The prompt: text to continue, or chat messages."""

    async def step(self, reply: Reply) -> Step:
        """React to one assistant turn."""

    async def reward(self) -> float | tuple[float, Mapping[str, float]]:
        """What the attempt was worth, with metrics if any. Must be finite; a float32 range
        number."""


class Conversation(Protocol):
    """A token-exact session: what was sampled is never re-tokenized. Given to environments, never
    built by them."""

    async def turn(self, messages: str | Sequence[Message], *, tools: Sequence[Tool] = ()) -> Reply:
        """Append messages (or, first, raw text) and sample one assistant turn, offering `tools`."""

    def trajectory(
        self, *, reward: float, metrics: Mapping[str, float] | None = None
    ) -> Trajectory:
        """Everything so far, as the trajectory to train on."""


class ServedSession(Protocol):
    """A token-exact session that an agent outside the loop reaches over HTTP."""

    base_url: str
    """`http://127.0.0.1:PORT/sessions/ID`: Anthropic clients take it as it is, OpenAI clients with
    `/v1` behind it."""
    api_key: str
    """Bearer token of this session; it opens no other."""
    model: str
    """Model name to send."""

    def trajectory(
        self, *, reward: float, metrics: Mapping[str, float] | None = None
    ) -> Trajectory:
        """Everything recorded so far, as the trajectory to train on. Raises `EpisodeError` when
        nothing was sampled, `TokenMismatch` when a turn did not extend what was stored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tools:
    """What an environment that drives itself is given."""

    id: str
    """Id of the trajectory (in `play`) or the group (in `rollout`); use it as the routing key."""
    group: int
    """Id of the group."""
    samples: int
    """Trajectories the group should have."""
    seed: int
    """Derived from the run's seed, the group and the index."""
    sampling: Sampling
    """How tokens are drawn."""
    engine: Engine
    """For `generate`; tokens and versions come from its completions."""
    tito: Tito
    """Messages to tokens and back."""
    sandbox: Sandbox | None
    """Where commands run, when one was chosen."""
    conversation: Callable[[str], Conversation]
    """A fresh conversation under the given routing key."""
    serve: Callable[[str], AbstractAsyncContextManager[ServedSession]] | None = None
    """A session under the given routing key, in which there is no "/", open to an agent's HTTP
    requests inside the block; what is still being generated is aborted when it ends."""
    play: Callable[[int], Awaitable[Trajectory]] | None = None
    """In `rollout`, of an environment that also has `play` or `episode`: play attempt number i that
    way, failures already turned into values."""


@runtime_checkable
class Environment(Protocol):
    """What a task is, how an episode unfolds, what it is worth.

    Besides `tasks`, at least one depth: `episode(task, seed) -> Episode`; `async play(task, seed,
    tools) -> Trajectory`; `async rollout(task, tools) -> Group`. The deepest drives; it may use the
    one before through its tools.

    Optional: `schemas`, the function schemas that each of its conversations offers to the model;
    `miles check` counts them into the prompts.
    """

    def tasks(self, split: Split) -> Sequence[Task]:
        """Tasks of a split; may be lazy, must be indexable and the same every time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecResult:
    """What a command in a sandbox did."""

    stdout: str
    """Captured, capped; where something was left out, a line begins with `[output cut`."""
    stderr: str
    """As stdout."""
    exit_code: int
    """Non-zero is a result, not an error; 128 + N for a command that signal N ended."""
    timed_out: bool = False
    """The whole process tree was killed for its time."""


class Box(Protocol):
    """One open sandbox.

    Optional: `async halt()`, which kills everything that runs in it and keeps its files, so that
    what an agent left in the background cannot meddle with its grading.
    """

    async def exec(
        self,
        command: str | Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        timeout: float | None = None,
        stdin: str | None = None,
    ) -> ExecResult:
        """Run argv, or a line in `sh`; commands may run side by side.

        `cwd` starts at the box's working directory, `env` adds to its environment, which has
        nothing of this process's. A timeout, and cancelling, kill the command with everything it
        started; the box lives on. Raises `SandboxError` when the box itself fails.
        """

    async def read(self, path: str) -> bytes:
        """A file's content; relative paths start at the working directory. Raises `SandboxError`,
        also when there is no such file."""

    async def write(self, path: str, data: bytes) -> None:
        """Create or replace a file, and make the folders above it. Raises `SandboxError`."""

    async def close(self) -> None:
        """Stop everything inside and leave nothing behind; safe to call twice."""


@runtime_checkable
class Sandbox(Protocol):
    """Where an agent's commands run.

    Optional: `Inventory`, when boxes can outlive the process that opened them; `async close()`,
    called once when the run ends, for what is kept between boxes (prepared boxes, connections).
    """

    async def open(self, task: Task) -> Box:
        """A fresh box for one attempt at a task. Raises `SandboxError` when there is none to be
        had."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BoxInfo:
    """A box that exists somewhere, as `miles sandboxes list` shows it."""

    id: str
    """What `remove` takes."""
    owner: str = ""
    """`miles.process_identity()` of the process that opened it, kept as a label with the box;
    empty when unknown. From it, whether a box is leaked is decided."""
    run: str = ""
    """Name of the run's directory."""
    task: str = ""
    """Id of the task it was opened for; empty for a box prepared in advance."""
    created: float = 0.0
    """Seconds since the epoch; 0 when unknown."""
    state: str = "running"
    """The provider's word for what it is doing."""


@runtime_checkable
class Inventory(Protocol):
    """Optional part of a sandbox: which of its boxes exist, whoever opened them, and removing one.

    Only boxes that miles opened are listed (by their labels), those of this process included. Both
    raise `SandboxError` when the provider cannot be asked.
    """

    async def list(self) -> Sequence[BoxInfo]:
        """Every box of ours that still exists, in any order."""

    async def remove(self, id: str) -> None:
        """Stop a box and everything in it; one that is already gone is no error."""


@runtime_checkable
class Selector(Protocol):
    """Which task next, and which groups are worth training on."""

    def next(self) -> Task | None:
        """The next task, or None when there are no more."""

    def admit(self, group: Group) -> Drop | None:
        """Why not to train on a finished group; None admits it."""

    def observe(self, group: Group) -> None:
        """See every finished group, admitted or not."""

    def state_dict(self) -> dict[str, Any]:
        """JSON values from which `load_state_dict` continues exactly."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state."""
