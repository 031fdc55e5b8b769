"""The loop's own keys: everything in `conf/config.yaml` that does not belong to a component.

Only data and the rules between the keys; composing and reading files is `miles.config`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

__all__ = ["RunKeys", "SessionKeys", "Settings"]

_CLOSING_S = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunKeys:
    """Where a run lives."""

    dir: str = "runs"
    """Folder that holds run directories."""
    name: str = ""
    """Name of this run's directory; empty makes one from the experiment that is asked for, or
    else the environment, and date and time."""

    @property
    def name_fault(self) -> str:
        """Why `name` is not the name of one folder in `dir`; empty when it is, or there is none."""
        if self.name in (".", "..") or not {"/", "\0"}.isdisjoint(self.name):
            return (
                f"run.name: {self.name!r} is not the name of one folder; take one without '/', "
                "such as run.name=mine, and say by run.dir where that folder is to be"
            )
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionKeys:
    """How conversations are recorded."""

    through: Literal["process", "server"] = "process"
    """How an environment's own conversations ask for their turns: by calls in the rollout worker,
    or by HTTP requests to its session server, as an outside agent does. The tokens are the same;
    demonstrations are replayed in the process either way."""
    extension: Literal["linear", "branching"] = "linear"
    """Whether a request must extend the history, or may branch off an earlier turn."""
    compare: Literal["strict", "json_arguments", "role_text"] = "strict"
    """When a replayed message counts as the recorded one: the fields a chat template reads; the
    same with tool arguments compared as JSON; or role and visible text only."""
    on_mismatch: Literal["fail", "mask"] = "fail"
    """What tokens that do not extend the stored ones do to their trajectory: fail it, or mask
    them."""
    history: Literal["keep", "rebase"] = "keep"
    """Templates that drop old reasoning: keep the stored tokens, or branch with what the template
    would now write."""
    keep: Literal["all", "drop_retries", "longest"] = "all"
    """Which leaves of a branched session become samples."""
    client_sampling: Literal["refuse", "ignore", "honour"] = "refuse"
    """What becomes of an agent's own temperature, top_p or top_k where it is not the run's: a 400
    that says so, nothing, or it is sampled by (which training then has to correct for)."""
    experts: bool = False
    """Ask engines for the experts that they chose and keep them with every sample; an engine that
    cannot tell refuses. Training on such samples takes a trainer that replays them, which `fsdp`
    does not do yet."""
    idle_s: float = 3600.0
    """Seconds without a request after which a session expires."""
    max_sessions: int = 4096
    """Sessions open at once."""
    max_tokens: int = 0
    """Longest prompt with its completion (`max_seq_len`); 0 is the model's context."""
    max_turns: int = 1024
    """Turns one session may hold, branches included."""
    upstream_timeout_s: float = 600.0
    """Seconds one generation of an agent outside the loop may take; an episode has the deadline of
    its group."""
    host: str = "127.0.0.1"
    """Address the session server listens on."""
    port: int = 0
    """Its port; 0 takes a free one."""
    journal: bool = True
    """Keep an append-only journal, from which a restarted `miles sessions serve` continues; in a
    run, sessions end with their rollout worker."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Keys of the loop. One instance a stage."""

    run: RunKeys = field(default_factory=RunKeys)
    """Where the run lives."""
    experiment: str = ""
    """Name of the chosen experiment, for the record."""
    seed: int = 0
    """Every random choice of the run derives from it."""
    steps: int = 100
    """Trainer steps of the stage; 0 only evaluates."""
    groups_per_step: int = 8
    """Groups the trainer takes a step."""
    samples_per_group: int = 8
    """Attempts at each task."""
    max_lag: int = 0
    """Oldest a trained token may be, in trainer steps; 0 is synchronous."""
    concurrency: int = 256
    """Trajectories in flight at most."""
    oversample: int = 0
    """Groups started beyond what a step needs; what the trainer has not taken when it grows older
    than max_lag is dropped as `stale`."""
    granularity: Literal["auto", "group", "sample"] = "auto"
    """What frees a place: the whole group or each trajectory; auto is group when max_lag is 0."""
    capacity_factor: float = 2.0
    """Finished groups the buffer may hold, in steps."""
    take_order: Literal["fifo", "freshest", "started"] = "fifo"
    """Which finished groups the trainer takes first."""
    unused: Literal["drop", "retry"] = "drop"
    """What becomes of a task whose group grew too old: nothing, or it is attempted again."""
    max_retries: int = 3
    """How often one task is attempted again."""
    cancel_doomed: bool = False
    """Cancel groups in flight that began under weights older than max_lag allows; groups beyond
    what a synchronous step needed are always cancelled."""
    pause: Literal["retract", "in_place", "abort"] = "retract"
    """What a publish does to requests that are being answered: they go on with their keys and
    values computed again under the new weights, go on with those they have, or end."""
    partial: bool = False
    """Requests that a publish ended go on from the tokens that they had."""
    last_batch: Literal["keep", "drop"] = "keep"
    """Whether a last short batch is trained on when tasks run out."""
    publish_every: int = 1
    """Trainer steps between publishes."""
    placement: Literal["split", "colocated"] = "split"
    """Trainer and engines on their own devices, or taking turns on the same ones."""
    checkpoint_every: int = 0
    """Trainer steps between checkpoints; 0 only at the end of a stage."""
    keep_checkpoints: int = 3
    """Older checkpoints beyond this many are removed; 0 keeps all."""
    eval_every: int = 0
    """Trainer steps between evaluations; 0 only at the beginning and end of a stage."""
    starved_after_s: float = 120.0
    """Seconds the trainer waits for groups before the run stops and says what it saw."""
    silent_after_s: float = 60.0
    """Seconds without a sign of life after which a worker counts as hung: engines and rollout
    workers are then started again, and a trainer ends the run."""
    step_timeout_s: float = 1800.0
    """Seconds that a trainer step may take, or one of its passes for log-probs; what it does for a
    publish counts for publish_timeout_s."""
    publish_timeout_s: float = 600.0
    """Seconds until all engines serve the weights of a publish, whoever of trainer and engines is
    waited for."""
    worker_timeout_s: float = 1800.0
    """Seconds one other call to a worker may take, such as a save."""
    interrupt_grace_s: float = 120.0
    """Seconds that a run which is told to stop (Ctrl-C, SIGTERM) has for the step that is being
    taken and a checkpoint; then it ends with the checkpoints that it has."""
    rollout_workers: int = 1
    """Processes that play episodes and hold conversations; 0 does it in the driver, which spares
    CPU where episodes are short, and can end no episode that blocks."""
    max_restarts: int = 3
    """Workers that died or hung and are started again, before the run gives up."""
    episode_timeout_s: float = 300.0
    """Seconds that the attempts of one group, which start together, may take."""
    max_turns: int = 16
    """Assistant turns one episode may take."""
    temperature: float = 1.0
    """Sampling temperature in training rollouts."""
    top_p: float = 1.0
    """Nucleus in training rollouts."""
    top_k: int = 0
    """Top-k in training rollouts; 0 keeps all."""
    max_new_tokens: int = 64
    """Tokens one assistant turn may take."""
    session: SessionKeys = field(default_factory=SessionKeys)
    """How conversations are recorded, and the session server."""
    resume: str = ""
    """Run directory or checkpoint to continue from."""
    stages: Mapping[str, Any] = field(default_factory=dict)
    """Stages in order: name to overrides. Empty means one stage named after the algorithm."""
    simulate: Mapping[str, Any] = field(default_factory=dict)
    """What `miles simulate` puts in the place of engines, trainer, transport and environment; see
    `miles simulate --keys`. A run does not read it."""
    plugins: tuple[str, ...] = ()
    """Local plugin files."""

    @property
    def group_deadline_s(self) -> float:
        """Seconds after which a group that is not back is given up: its own limit, and a moment for
        agents to be stopped and boxes to be closed."""
        return self.episode_timeout_s + _CLOSING_S
