"""What a component of each kind must be able to do, and the one table of kinds.

Every component is built as `Class(config, context)`: `config` is an instance of its own nested, frozen
`Config`; `context` is what it may know of the run. Protocols only: no behaviour lives here.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

from miles.settings import Settings
from miles.types import (
    Array,
    Batch,
    Completion,
    Drop,
    Group,
    Message,
    Receipt,
    Request,
    Sampling,
    Score,
    Skipped,
    Task,
    Tokens,
    Trajectory,
    Update,
)

__all__ = [
    "KINDS",
    "Algorithm",
    "Attempt",
    "Box",
    "Budget",
    "Context",
    "Conversation",
    "Decoder",
    "Engine",
    "Environment",
    "Episode",
    "Evaluator",
    "ExecResult",
    "Handle",
    "Kind",
    "Model",
    "Precision",
    "Receiver",
    "Reply",
    "Runtime",
    "Sandbox",
    "Selector",
    "Sender",
    "Spec",
    "Split",
    "Step",
    "Tito",
    "Tools",
    "Tracker",
    "Trainer",
    "Transport",
]

Split = Literal["train", "heldout"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """A component by name: everything another process needs to build it."""

    kind: str
    """One of `KINDS`."""
    name: str
    """Registered name."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Plain values for its `Config`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """What a component may know of the run. Fields are filled in dependency order; later ones are None."""

    directory: Path
    """The run's directory; a component may write below it."""
    seed: int = 0
    """The run's seed."""
    settings: Settings = field(default_factory=Settings)
    """The loop's keys of this stage."""
    rank: int = 0
    """This worker's rank among its kind."""
    world: int = 1
    """Workers of its kind."""
    master: str = ""
    """`host:port` of rank 0's rendezvous when world > 1."""
    provenance: Mapping[str, str] = field(default_factory=dict)
    """Plugins with versions and hashes, for workers to compare with theirs."""
    rewards: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    """Reward functions that plugins registered with `miles_rewards`, by name."""
    filters: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    """Admission filters that plugins registered with `miles_filters`, by name."""
    model: Any = None
    """The `Model`."""
    precision: Any = None
    """The `Precision`."""
    tito: Any = None
    """The `Tito` handler."""
    environment: Any = None
    """The `Environment`."""


# ---------------------------------------------------------------- rollout: what is attempted


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """An episode's answer to a reply."""

    messages: tuple[Message, ...] = ()
    """What to append before the next turn."""
    done: bool = True
    """No more turns."""


@runtime_checkable
class Episode(Protocol):
    """One attempt, single-use. The loop calls reset once, step after every reply, reward once."""

    async def reset(self) -> str | Sequence[Message]:
        """The prompt: text to continue, or chat messages."""

    async def step(self, reply: Reply) -> Step:
        """React to one assistant turn."""

    async def reward(self) -> float | tuple[float, Mapping[str, float]]:
        """What the attempt was worth, with metrics if any. Must be finite; a float32 range number."""


class Conversation(Protocol):
    """A token-exact session: what was sampled is never re-tokenized. Given to environments, never built by them."""

    async def turn(self, messages: str | Sequence[Message]) -> Reply:
        """Append messages (or, first, raw text) and sample one assistant turn."""

    def trajectory(self, *, reward: float, metrics: Mapping[str, float] | None = None) -> Trajectory:
        """Everything so far, as the trajectory to train on."""


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
    play: Callable[[int], Awaitable[Trajectory]] | None = None
    """In `rollout`: play attempt number i the default way, failures already turned into values."""


@runtime_checkable
class Environment(Protocol):
    """What a task is, how an episode unfolds, what it is worth.

    Besides `tasks`, exactly one depth: `episode(task, seed) -> Episode`; or
    `async play(task, seed, tools) -> Trajectory`; or `async rollout(task, tools) -> Group`.
    """

    def tasks(self, split: Split) -> Sequence[Task]:
        """Tasks of a split; may be lazy, must be indexable and the same every time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecResult:
    """What a command in a sandbox did."""

    stdout: str
    """Captured, capped."""
    stderr: str
    """Captured, capped."""
    exit_code: int
    """Non-zero is a result, not an error."""
    timed_out: bool = False
    """The whole process tree was killed."""


class Box(Protocol):
    """One open sandbox."""

    async def exec(
        self,
        command: str | Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        timeout: float | None = None,
        stdin: str | None = None,
    ) -> ExecResult:
        """Run argv, or a shell line. Raises `SandboxError` when the box itself fails."""

    async def read(self, path: str) -> bytes:
        """A file's content."""

    async def write(self, path: str, data: bytes) -> None:
        """Create or replace a file."""

    async def close(self) -> None:
        """Stop everything inside and leave nothing behind; safe to call twice."""


@runtime_checkable
class Sandbox(Protocol):
    """Where an agent's commands run."""

    async def open(self, task: Task) -> Box:
        """A fresh box for one attempt at a task."""


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


@runtime_checkable
class Tito(Protocol):
    """How one model family's messages become tokens, and back. Append-only by contract:
    for every conversation, stored tokens + `extend` is what the next prompt is."""

    stop_ids: tuple[int, ...]
    """Ids that end an assistant turn."""
    vocab_size: int
    """Ids are below this."""

    def encode(self, text: str) -> Array:
        """(tokens,) int32 of raw text, no template, no added special tokens."""

    def decode(self, tokens: Array) -> str:
        """Text of ids, special tokens included, invalid bytes replaced."""

    def render(self, messages: Sequence[Message]) -> Array:
        """(tokens,) int32 of a first prompt, opening the assistant's turn."""

    def extend(self, stored: Array, history: Sequence[Message], messages: Sequence[Message]) -> Array:
        """(new tokens,) int32 to append after `stored` (which ends with a sampled assistant turn that `history`
        ends with) so that `messages` follow and the assistant's turn is open. Never touches `stored`."""

    def parse(self, tokens: Array) -> Message:
        """A completion's ids as an assistant message."""

    def demonstrate(self, text: str) -> Array:
        """(tokens,) int32 that a model would have sampled to say `text`, stop id included."""

    def save(self, directory: Path) -> None:
        """Write tokenizer files that `transformers` loads, for checkpoints."""


# ---------------------------------------------------------------- the model on both sides


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoder:
    """Shape of a pre-norm rotary decoder with gated MLP, as the embedded engine runs it."""

    vocab_size: int
    """Rows of the embedding."""
    hidden_size: int
    """Width of the residual stream."""
    layers: int
    """Blocks."""
    heads: int
    """Query heads."""
    kv_heads: int
    """Key and value heads."""
    head_dim: int
    """Width of a head."""
    intermediate_size: int
    """Width of the MLP."""
    rope_theta: float
    """Rotary base."""
    norm_eps: float
    """RMSNorm epsilon."""
    qk_norm: bool = False
    """RMSNorm on queries and keys per head (Qwen3)."""
    attention_bias: bool = False
    """Biases on q, k, v projections."""
    tied: bool = False
    """Output head is the embedding."""
    max_len: int = 2048
    """Longest context."""


@runtime_checkable
class Model(Protocol):
    """One registration for a model family, configured for one checkpoint. Plain data: every process reads it."""

    tito: ClassVar[str]
    """Name of the family's tito handler, used when `tito=auto`."""

    @classmethod
    def matches(cls, config: Mapping[str, Any]) -> bool:
        """Whether a Hugging Face `config.json` belongs to this family."""

    @property
    def random(self) -> bool:
        """Weights are made from the seed, not loaded."""

    def hf_config(self) -> dict[str, Any]:
        """The checkpoint's `config.json`, or the one made for a random model. Raises `ConfigError`."""

    def directory(self) -> Path | None:
        """The local checkpoint, None for a random model."""

    def decoder(self) -> Decoder:
        """Shape for the embedded engine. Raises `ConfigError` when it cannot run the family."""

    def engine_name(self, name: str) -> str | None:
        """The embedded engine's canonical name of a Hugging Face tensor (those of Qwen3/Llama, such as
        `model.layers.0.self_attn.q_proj.weight`); None if the engine does not need it."""

    def build(self) -> str:
        """`module:function` called in trainer workers as `function(hf_config, directory or None) -> nn.Module`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """How far trainer and engine log-probs may differ before it is a fault."""

    max: float
    """Per token, absolute, in nats."""
    mean: float
    """Mean over a step, absolute, in nats."""


@runtime_checkable
class Precision(Protocol):
    """One quantization contract for both sides, in four stages. Plain data: every process reads it."""

    master: str
    """Type of the trainer's stored parameters: `float32`."""
    compute: str
    """Type of the trainer's forward: `float32`, `bfloat16`."""
    engine: str
    """Type the engine computes in."""
    export: str
    """Type in which weights are published and converted."""
    budget: Budget
    """Mismatch this recipe is allowed."""

    def fingerprint(self) -> str:
        """Equal exactly where the four stages are equal."""


# ---------------------------------------------------------------- train, sample, publish


@runtime_checkable
class Trainer(Protocol):
    """Who updates the weights. Lives in worker processes (one a rank); the driver holds an async mirror.

    Blocking methods; the worker runs them one at a time.
    """

    version: int
    """Trainer steps completed since the run began."""

    def step(self, batch: Batch) -> Update:
        """One optimizer step over the whole batch. Raises `TrainerError` and leaves the weights alone when the
        loss or gradient is not finite or a mismatch budget of `fail` is exceeded."""

    def logprobs(self, tokens: Tokens, source: str) -> Array:
        """(T,) float32 log-prob of every token given those before it in its sample, 0 for first tokens.
        `source` is `current` or `reference`."""

    def export(self) -> Iterator[tuple[str, Any]]:
        """(Hugging Face name, tensor in the precision's export type), whole tensors, in a fixed order."""

    def save(self, directory: Path) -> None:
        """Write `model/` (safetensors and config that `transformers` loads) and `trainer/` (all other state)."""

    def load(self, directory: Path, *, weights_only: bool = False) -> None:
        """Continue from what `save` wrote; `weights_only` takes the model and version, not the optimizer."""

    def sleep(self) -> None:
        """Free device memory."""

    def wake(self) -> None:
        """Take it back."""


@runtime_checkable
class Engine(Protocol):
    """Who samples tokens. Async; lives in a worker process, or in the driver when `process` is "driver"."""

    samples: ClassVar[bool]
    """False for an engine that replays demonstrations and needs no weights."""

    async def generate(self, request: Request) -> Completion:
        """Sample one completion. Raises `EngineError` when it cannot (a prompt that does not fit)."""

    async def score(self, tokens: Array) -> Array:
        """(tokens,) float32: own log-prob of each token given those before it, 0 for the first."""

    async def abort(self, keys: Sequence[str] | None = None) -> int:
        """End requests of these routing keys (None: all) with finish `abort`; how many there were."""

    async def pause(self) -> None:
        """Stop decoding; requests wait."""

    async def resume(self) -> None:
        """Go on."""

    async def load(self, version: int, weights: Iterable[tuple[str, Any]]) -> None:
        """Take (Hugging Face name, tensor) weights as `version`; missing or unknown names raise `WeightSyncError`."""

    async def version(self) -> int:
        """The version being served; -1 before the first load."""

    async def health(self) -> Mapping[str, float]:
        """Plain numbers: `active`, `waiting`, `tokens`, `busy_s`, `prompt_tokens`, `cached_tokens` since start."""

    async def sleep(self) -> None:
        """Free device memory."""

    async def wake(self) -> None:
        """Take it back."""


class Handle(Protocol):
    """The driver's end of the worker processes of one component."""

    name: str
    """Process name, as in `logs/<name>.log`."""
    world: int
    """How many ranks."""

    async def call(
        self, target: str, *args: Any, rank: int = 0, timeout: float | None = None, **kwargs: Any
    ) -> Any:
        """Call `part.method` in one rank; plain values, arrays and this module's dataclasses only.
        Errors raised there are raised here; a dead or silent worker is a `WorkerError`."""

    async def call_all(
        self, target: str, *args: Any, timeout: float | None = None, **kwargs: Any
    ) -> list[Any]:
        """The same in every rank at once."""


class Sender(Protocol):
    """Half of a transport that lives in trainer workers; public methods are called as `sender.<method>`."""


class Receiver(Protocol):
    """Half of a transport that lives in engine workers; public methods are called as `receiver.<method>`."""


@runtime_checkable
class Transport(Protocol):
    """How weights move. Built in the driver and in every worker, each using its own half."""

    def sender(self, trainer: Trainer) -> Sender:
        """The half for a trainer worker."""

    def receiver(self, engine: Engine) -> Receiver:
        """The half for an engine worker."""

    async def publish(self, version: int, *, trainer: Handle, engines: Sequence[Handle]) -> Receipt:
        """Move the trainer's weights to every engine; names and sizes pass here, never tensors.
        Raises `WeightSyncError` when a digest differs; engines are then left stopped or on the old version."""


@runtime_checkable
class Algorithm(Protocol):
    """What to learn from groups."""

    def needs(self) -> tuple[str, ...]:
        """Log-prob passes wanted before `prepare`: of `current`, `reference`."""

    def terms(self) -> Mapping[str, str]:
        """Loss term names to `module:function`."""

    def prepare(self, groups: Sequence[Group], passes: Mapping[str, Array]) -> Batch:
        """Advantages and terms. `passes` holds a (T,) float32 array for each of `needs()`, over
        `flatten([s for g in groups for s in g.samples])`. Pure; runs in a worker thread."""


class Attempt(Protocol):
    """Plays a task the way training does, for evaluators."""

    async def __call__(self, task: Task, *, samples: int, sampling: Sampling, seed: int) -> Group: ...


@runtime_checkable
class Evaluator(Protocol):
    """How a policy version is scored."""

    async def evaluate(self, version: int, attempt: Attempt) -> Sequence[Score | Skipped]:
        """Score one version on every set. Any failure is a `Skipped`; never raises `RolloutError`."""


@runtime_checkable
class Runtime(Protocol):
    """Where processes live."""

    async def start(self, name: str, parts: Sequence[Spec], context: Context, *, world: int = 1) -> Handle:
        """Start `world` workers that build `parts` in order; returns when all have answered."""

    async def rebuild(self, handle: Handle, parts: Sequence[Spec], context: Context) -> None:
        """Build other parts in running workers, for the next stage."""

    async def stop(self) -> None:
        """End every process started here, with its children; safe to call twice."""


@runtime_checkable
class Tracker(Protocol):
    """Where metrics go. Called from one thread of its own, never from the loop."""

    def moment(self, name: str, data: Mapping[str, Any]) -> None:
        """One moment: `run_started`, `stage_started`, `step_finished` (data is the flat metrics), `evaluated`,
        `weights_published`, `checkpoint_saved`, `warned`, `run_finished`. Plain values only."""

    def close(self) -> None:
        """Flush; safe to call twice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One row of the table of kinds."""

    name: str
    """The word used in namespaces, Hydra groups, hooks and on the command line."""
    protocol: type
    """What a component must do."""
    decides: str
    """One clause for people."""
    many: bool = False
    """Several may be chosen at once: `tracker=[console,jsonl]`."""
    optional: bool = False
    """May be left out: `sandbox=null`."""
    async_methods: tuple[str, ...] = ()
    """Methods that must be coroutines."""


def _kind(name: str, protocol: type, decides: str, **more: Any) -> tuple[str, Kind]:
    return name, Kind(name=name, protocol=protocol, decides=decides, **more)


KINDS: Mapping[str, Kind] = dict(
    (
        _kind("environment", Environment, "what a task is, how an episode unfolds, what it is worth"),
        _kind("sandbox", Sandbox, "where an agent's commands run", optional=True, async_methods=("open",)),
        _kind("selector", Selector, "which task next, which groups are worth training on"),
        _kind("tito", Tito, "how one model family's messages become tokens, and back"),
        _kind("model", Model, "one registration for a model family"),
        _kind("precision", Precision, "one quantization contract for both sides"),
        _kind("trainer", Trainer, "who updates the weights"),
        _kind(
            "engine",
            Engine,
            "who samples tokens",
            async_methods=("generate", "score", "abort", "pause", "resume", "load", "version", "health", "sleep", "wake"),
        ),
        _kind("transport", Transport, "how weights move", async_methods=("publish",)),
        _kind("algorithm", Algorithm, "what to learn from groups"),
        _kind("evaluator", Evaluator, "how a policy version is scored", optional=True, async_methods=("evaluate",)),
        _kind("runtime", Runtime, "where processes live", async_methods=("start", "rebuild", "stop")),
        _kind("tracker", Tracker, "where metrics go", many=True, optional=True),
    )
)
"""Every kind. A new kind is a design change; a new name within one is a plugin."""
