"""Keys of `simulate`: what stands in the place of engines, trainer, transport and environment.

Every number of a model is here, in seconds, tokens, bytes and GPUs. Only `miles simulate` reads
them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from miles.errors import ConfigError
from miles.registry import schema
from miles.simulate.distributions import Distribution

__all__ = [
    "EngineKeys",
    "EnvironmentKeys",
    "EvaluationKeys",
    "FaultKeys",
    "Keys",
    "PublishKeys",
    "TrainerKeys",
    "read",
    "refuse_run",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineKeys:
    """One engine computes a prompt, then a token of every running request each forward:
    `forward_s + weights_s * touched + sequence_s * requests + context_s * tokens of context`, where
    `touched = 1 - (1 - activated) ** requests`."""

    gpus: int = 1
    """GPUs that sample, all engines together."""
    gpus_per_engine: int = 1
    """GPUs of one engine; `gpus` divided by it is the number of engines."""
    forward_s: float = 0.01
    """Seconds a decoding forward takes whatever is in it."""
    weights_s: float = 0.0
    """Seconds to read all weights that a large batch touches."""
    activated: float = 1.0
    """Share of those weights that one request touches; 1 for a dense model."""
    sequence_s: float = 0.0001
    """Seconds that each request adds to a forward."""
    context_s: float = 0.0
    """Seconds that each token of context in the batch adds to a forward."""
    tokens_per_forward: float = 1.0
    """Tokens of a request that a forward yields on average; above 1 with speculative decoding."""
    prefill_tokens_per_s: float = 20_000.0
    """Prompt tokens computed a second, those in the prefix cache left out."""
    decode_during_prefill: float = 0.0
    """Share of its speed at which decoding goes on while a prompt is computed: 0 is prefill first,
    1 is prefill elsewhere."""
    request_s: float = 0.0
    """Seconds from a caller to the engine and back, whatever is asked."""
    max_requests: int = 256
    """Requests that run at once; others wait."""
    kv_tokens: int = 1_000_000
    """Tokens of keys and values that fit, of running requests and of the prefix cache."""
    page_tokens: int = 64
    """Tokens of a page of the prefix cache; only whole pages are found again. 0 is no cache."""
    affinity: bool = True
    """Each trajectory stays with its engine; false sends every turn to the least busy one."""
    trainer_share: float = 1.0
    """Share of its speed that an engine keeps while the trainer computes: below 1 where they share
    processors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerKeys:
    """A step takes `step_s + samples * sample_s + tokens / (gpus * tokens_per_gpu_s)`."""

    gpus: int = 1
    """GPUs that train."""
    least_gpus: int = 1
    """Fewest that hold weights, gradients and optimizer: a sweep tries no fewer."""
    step_s: float = 0.1
    """Seconds of a step whatever is in it: optimizer, communication that does not overlap."""
    sample_s: float = 0.0
    """Seconds that each sample adds."""
    tokens_per_gpu_s: float = 10_000.0
    """Tokens, prompts and results of tools included, that one GPU trains on a second: all passes of
    a step together."""
    prepare_s: float = 0.0
    """Seconds between taking groups and training on them."""
    probe_s: float = 0.0
    """Seconds to have an engine score a probe, in steps that have too few tokens of the newest
    weights to compare log-probs."""
    finish_s: float = 0.0
    """Seconds of bookkeeping after a step, during which the trainer is idle."""
    engine_share: float = 1.0
    """Share of its speed that the trainer keeps while any engine computes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishKeys:
    """A publish takes `fixed_s + bytes / bytes_per_s`, and `busy_s` more while engines compute."""

    fixed_s: float = 0.1
    """Seconds whatever is moved."""
    busy_s: float = 0.0
    """Seconds more when an engine is computing as it begins: it goes on until it can be told to
    stop."""
    bytes: float = 0.0
    """Bytes of the weights."""
    bytes_per_s: float = 1e9
    """Of all links together."""
    stopped: float = 1.0
    """Share of that time, its end, for which engines do not compute."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentKeys:
    """What an attempt does: it opens, takes turns, each of tokens and a delay, and is judged."""

    prompt_tokens: Distribution = field(default_factory=lambda: Distribution(mean=512))
    """First prompt, the same for all attempts of a group."""
    turns: Distribution = field(default_factory=lambda: Distribution(mean=1, low=1))
    """Assistant turns."""
    turn_tokens: Distribution = field(
        default_factory=lambda: Distribution(kind="lognormal", mean=256, spread=1.0, low=1)
    )
    """Tokens sampled in a turn."""
    observation_tokens: Distribution = field(default_factory=Distribution)
    """Tokens that the environment adds between turns."""
    start_s: Distribution = field(default_factory=Distribution)
    """Seconds before the first turn: a sandbox is started."""
    delay_s: Distribution = field(default_factory=Distribution)
    """Seconds between turns: a command runs."""
    reward_s: Distribution = field(default_factory=Distribution)
    """Seconds after the last turn: tests run."""
    max_tokens: int = 0
    """An attempt ends when prompt and completion would be longer; 0 is no limit."""
    likeness: float = 0.0
    """How alike the attempts of a group are in their number of turns, 0 to 1: the share of groups
    whose attempts all take equally many."""
    success: Distribution = field(
        default_factory=lambda: Distribution(kind="uniform", mean=0.5, spread=0.5, high=1)
    )
    """Probability that an attempt at a task succeeds, drawn once a task: rewards are 0 or 1."""
    tasks: int = 1024
    """Tasks there are to choose from."""
    heldout: int = 64
    """Tasks for evaluations."""
    trajectories: str = ""
    """JSON Lines of recorded attempts to draw from instead: each `{"turns": [[added, sampled,
    delay_s], ...]}` with the tokens added before the turn and sampled in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationKeys:
    """What evaluations apart from training take; on engines, attempts are as the environment's."""

    snapshot_s: float = 0.0
    """Seconds to write a snapshot, for which training waits."""
    load_s: float = 0.0
    """Seconds until engines that only evaluate serve a snapshot, verified."""
    command_s: Distribution = field(default_factory=lambda: Distribution(mean=60.0))
    """Seconds that a command (evaluator `external`) takes to score a checkpoint directory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultKeys:
    """What goes wrong, at random times."""

    engine_every_s: float = 0.0
    """Mean seconds between the deaths of one engine; 0 is never."""
    engine_down_s: float = 60.0
    """Seconds until one that died serves again, with the published weights and an empty cache."""
    rollout_every_s: float = 0.0
    """Mean seconds between the deaths of one rollout worker, with its sessions; 0 is never. The
    groups that it was playing are played again, and `max_restarts` is counted."""
    rollout_down_s: float = 20.0
    """Seconds until one that died plays again."""
    attempt: float = 0.0
    """Probability that an attempt fails at a turn, which ends its group."""
    hang: float = 0.0
    """Probability that an attempt hangs at a turn until its deadline."""
    slow_step: float = 0.0
    """Probability that a step or publish takes ten times as long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Keys:
    """Everything below `simulate`."""

    only: bool = False
    """There is nothing here yet to run: `miles run` refuses, and says so."""
    engine: EngineKeys = field(default_factory=EngineKeys)
    """How engines are modelled."""
    trainer: TrainerKeys = field(default_factory=TrainerKeys)
    """How the trainer is modelled."""
    publish: PublishKeys = field(default_factory=PublishKeys)
    """How the transport is modelled."""
    environment: EnvironmentKeys = field(default_factory=EnvironmentKeys)
    """How attempts are modelled."""
    evaluation: EvaluationKeys = field(default_factory=EvaluationKeys)
    """How evaluations apart from training are modelled."""
    faults: FaultKeys = field(default_factory=FaultKeys)
    """What goes wrong."""

    def __post_init__(self) -> None:
        for problem in _problems(self):
            raise ValueError(problem)


def _problems(keys: Keys) -> list[str]:
    engine, trainer = keys.engine, keys.trainer
    found = []
    if engine.gpus_per_engine < 1 or engine.gpus < 1 or engine.gpus % engine.gpus_per_engine:
        found.append(
            f"engine.gpus ({engine.gpus}) must be a positive multiple of engine.gpus_per_engine "
            f"({engine.gpus_per_engine})"
        )
    if trainer.gpus < trainer.least_gpus or trainer.least_gpus < 1:
        found.append(
            f"trainer.gpus ({trainer.gpus}) is below trainer.least_gpus ({trainer.least_gpus})"
        )
    positive = {
        "engine.tokens_per_forward": engine.tokens_per_forward,
        "engine.prefill_tokens_per_s": engine.prefill_tokens_per_s,
        "engine.max_requests": engine.max_requests,
        "engine.kv_tokens": engine.kv_tokens,
        "engine.trainer_share": engine.trainer_share,
        "engine.forward_s + weights_s + sequence_s": engine.forward_s
        + engine.weights_s
        + engine.sequence_s,
        "trainer.tokens_per_gpu_s": trainer.tokens_per_gpu_s,
        "trainer.engine_share": trainer.engine_share,
        "publish.bytes_per_s": keys.publish.bytes_per_s,
        "environment.tasks": keys.environment.tasks,
    }
    found += [
        f"{name} is {value}; it must be above 0"
        for name, value in positive.items()
        if not value > 0
    ]
    shares = {
        "engine.activated": engine.activated,
        "engine.decode_during_prefill": engine.decode_during_prefill,
        "engine.trainer_share": engine.trainer_share,
        "trainer.engine_share": trainer.engine_share,
        "publish.stopped": keys.publish.stopped,
        "environment.likeness": keys.environment.likeness,
        "faults.attempt": keys.faults.attempt,
        "faults.hang": keys.faults.hang,
        "faults.slow_step": keys.faults.slow_step,
    }
    found += [
        f"{name} is {value}; it must be between 0 and 1"
        for name, value in shares.items()
        if not 0 <= value <= 1
    ]
    return found


def read(values: Mapping[str, Any]) -> Keys:
    """The keys of a stage's `simulate`. Raises `ConfigError` with every fault."""
    made: Keys = schema.build(Keys, values, owner="simulate")
    return made


def refuse_run(name: str, values: Mapping[str, Any]) -> None:
    """Raise `ConfigError` when a stage can only be simulated."""
    if values.get("only"):
        raise ConfigError(
            f"stage {name}: simulate.only is true: this experiment describes machines and "
            "components that are not here; try `miles simulate` with the same words"
        )
