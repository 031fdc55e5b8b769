"""The one table of metric names: what a step may report, in which unit, and what it means.

It computes and logs nothing. `python -m miles.metrics > docs/metrics.md` writes the page.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from miles.errors import choices

__all__ = ["METRICS", "Metric", "faults", "find", "page"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One row of the table."""

    name: str
    """Full name; a part in angle brackets stands for any word."""
    unit: str
    """Unit of the value, or what it counts."""
    meaning: str
    """One sentence."""

    @property
    def text(self) -> bool:
        """Whether the value is a string rather than a number."""
        return self.unit == "text"

    def matches(self, name: str) -> bool:
        """Whether a concrete name belongs to this row."""
        return re.fullmatch(self._pattern, name) is not None

    @property
    def _pattern(self) -> str:
        parts = re.split(r"(<\w+>)", self.name)
        return "".join(
            "\\d+" if p == "<k>" else ".+" if p[:1] == "<" else re.escape(p) for p in parts
        )


def _rows(*rows: tuple[str, str, str]) -> tuple[Metric, ...]:
    return tuple(Metric(name=name, unit=unit, meaning=meaning) for name, unit, meaning in rows)


METRICS: tuple[Metric, ...] = _rows(
    (
        "step",
        "trainer steps",
        "Trainer steps completed since the run began, across stages and resumes.",
    ),
    ("stage", "text", "Name of the stage."),
    ("stage_step", "trainer steps", "Trainer steps completed since the stage began."),
    ("version", "weight version", "Weight version that the engines serve after the step."),
    ("reward/mean", "reward", "Mean reward over the trained trajectories."),
    ("reward/std", "reward", "Standard deviation of reward over the trained trajectories."),
    (
        "env/<name>",
        "environment's own",
        "A number the environment reports, averaged over the trained trajectories.",
    ),
    ("groups/started", "groups", "Groups started since the last step."),
    ("groups/trained", "groups", "Groups in the step's batch."),
    ("groups/in_flight", "groups", "Groups being rolled out when the step ended."),
    ("groups/buffered", "groups", "Finished groups waiting in the buffer when the step ended."),
    ("groups/dropped/<reason>", "groups", "Groups dropped for that reason since the last step."),
    (
        "groups/retried",
        "groups",
        "Tasks of groups that grew too old and are attempted again, since the last step.",
    ),
    ("samples/started", "trajectories", "Attempts started since the last step."),
    ("samples/trained", "trajectories", "Attempts of the step's groups."),
    (
        "samples/in_flight",
        "trajectories",
        "Attempts of groups being rolled out when the step ended, those that are back included.",
    ),
    (
        "samples/running",
        "trajectories",
        "Attempts that held a place of `concurrency` when the step ended.",
    ),
    ("samples/buffered", "trajectories", "Attempts of finished groups waiting in the buffer."),
    ("samples/retried", "trajectories", "Attempts of groups whose task is attempted again."),
    (
        "samples/dropped/<reason>",
        "trajectories",
        "Attempts of groups dropped for that reason since the last step.",
    ),
    (
        "samples/truncated",
        "share",
        "Trained trajectories ended by a length limit, 0 to 1; near 1 the limit is too low.",
    ),
    (
        "buffer/age_mean_s",
        "seconds",
        "Time since the groups that wait for the trainer came back, mean; growing means that "
        "rollouts outrun the trainer.",
    ),
    ("buffer/age_max_s", "seconds", "The longest such time."),
    (
        "staleness/mean",
        "trainer steps",
        "Trainer version minus that of a group's oldest trainable token, mean.",
    ),
    (
        "staleness/max",
        "trainer steps",
        "The largest staleness of a trained group; never above `max_lag`.",
    ),
    (
        "staleness/lag_<k>",
        "groups",
        "Trained groups whose oldest trainable token was k versions old: the histogram.",
    ),
    (
        "staleness/waiting_mean",
        "trainer steps",
        "Staleness of the groups that wait for the trainer, mean; at `max_lag` they are soon lost.",
    ),
    ("staleness/waiting_max", "trainer steps", "The largest staleness of a waiting group."),
    (
        "staleness/waiting_lag_<k>",
        "groups",
        "Groups that wait for the trainer and are k versions old: the histogram.",
    ),
    ("tokens/trained", "tokens", "Tokens that carried loss in the step."),
    ("tokens/lag_<k>", "tokens", "Trained tokens that were k versions old in the step."),
    ("tokens/sampled", "tokens", "Tokens that an engine sampled in the step's groups."),
    (
        "trainer/tokens_per_s",
        "tokens/s",
        "Tokens of the batch over the trainer's step, all ranks; on a GPU, or with a peak given.",
    ),
    (
        "trainer/tflops",
        "TFLOP/s",
        "Model FLOPs of forward and backward passes over the step, a rank.",
    ),
    ("trainer/mfu", "share", "`trainer/tflops` over the device's peak, `trainer.peak_tflops`."),
    ("trainer/loss_scale", "ratio", "What the step's loss was multiplied by, in float16."),
    ("trainer/skipped_steps", "trainer steps", "1 if a gradient overflowed and nothing changed."),
    ("trainer/memory_bytes", "bytes", "Most device memory in use so far, on rank 0."),
    ("trainer/streamed_bytes", "bytes", "Optimizer state that came to the device and went back."),
    ("trainer/streaming_s", "seconds", "The optimizer's step with streamed state."),
    ("trainer/evicted_bytes", "bytes", "Device memory that the last sleep gave back, a rank."),
    ("trainer/sleep_s", "seconds", "The last sleep, copies included."),
    ("trainer/wake_s", "seconds", "The return from it."),
    ("length/mean", "tokens", "Mean tokens of a trained sample, prompt included."),
    (
        "length/trained",
        "tokens",
        "Mean sampled tokens of a trajectory, over all that was trained in this stage.",
    ),
    (
        "length/returned",
        "tokens",
        "Mean sampled tokens of a trajectory, over all that came back in this stage.",
    ),
    (
        "length/bias",
        "share",
        "`length/trained` over `length/returned`, less 1: below 0 short rollouts are preferred; "
        "`take_order=started` takes that away.",
    ),
    (
        "mismatch/logprob_abs_mean",
        "nats",
        "Mean |trainer − rollout log-prob|, tokens of the trainer's version only.",
    ),
    ("mismatch/logprob_abs_max", "nats", "The largest such difference of one token."),
    (
        "mismatch/k3",
        "nats",
        "k3 estimate of KL(rollout ‖ trainer) over the same tokens: mean of r − 1 − log r.",
    ),
    ("mismatch/tokens", "tokens", "How many tokens the mismatch was measured on."),
    (
        "mismatch/masked",
        "tokens",
        "Tokens whose loss was masked because they were over the budget.",
    ),
    (
        "mismatch/probed",
        "flag",
        "1 when it was measured on sequences that an engine scored for it, not on the step's own.",
    ),
    (
        "mismatch/unmeasured",
        "flag",
        "1 when too few tokens of the trainer's version were there to measure.",
    ),
    (
        "off_policy/lag_<k>/logprob_abs_mean",
        "nats",
        "Mean |difference| over tokens k versions old: numerics and policy together.",
    ),
    ("off_policy/lag_<k>/logprob_abs_max", "nats", "The largest such difference of one token."),
    ("off_policy/lag_<k>/k3", "nats", "k3 estimate over the same tokens."),
    ("off_policy/lag_<k>/tokens", "tokens", "How many trained tokens are k versions old."),
    (
        "off_policy/ess",
        "share",
        "Effective sample size of the importance weights, 0 to 1; near 0 few tokens decide.",
    ),
    (
        "off_policy/weight_mean",
        "ratio",
        "Mean importance weight of trained tokens, after bounding.",
    ),
    ("off_policy/bounded", "share", "Importance ratios outside their bounds."),
    ("off_policy/vetoed", "share", "Samples that count nothing because of one token's ratio."),
    (
        "advantage/<name>",
        "reward",
        "A statistic of the step's advantages, as the algorithm reports.",
    ),
    ("entropy", "nats", "Mean entropy of the policy over loss tokens, when a term asks for it."),
    (
        "loss/<term>",
        "loss",
        "Value of one named loss term, summed over the step with its per-token weights.",
    ),
    ("grad_norm", "loss per weight", "Global gradient norm before clipping."),
    ("lr", "learning rate", "Learning rate the step used."),
    ("time/step_s", "seconds", "Wall-clock of the whole step."),
    (
        "time/wait_s",
        "seconds",
        "Time the trainer waited for groups, less what it waited for an evaluation.",
    ),
    (
        "time/train_s",
        "seconds",
        "Time in the trainer: log-prob passes, forward, backward, optimizer.",
    ),
    ("time/publish_s", "seconds", "Time to move the weights to every engine."),
    (
        "time/eval_wait_s",
        "seconds",
        "Time the trainer waited because of an evaluation: for its score, for room for a snapshot "
        "or its writing, or for groups while new ones were held.",
    ),
    (
        "time/overhead_s",
        "seconds",
        "The rest of the step: preparing, bookkeeping, checkpoints.",
    ),
    (
        "engine/idle_s",
        "seconds",
        "Time the engines had nothing to decode during the step, averaged over engines.",
    ),
    (
        "engine/tokens_per_s",
        "tokens per second",
        "Tokens sampled by all engines per second of wall-clock.",
    ),
    (
        "engine/accept_rate",
        "share",
        "Drafted tokens that were accepted, of engines that decode speculatively.",
    ),
    ("router/prefix_hit_rate", "share", "Prompt tokens served from a prefix cache, 0 to 1."),
    ("router/active/<engine>", "requests", "Requests in flight on that engine now."),
    ("router/keys", "keys", "Routing keys bound to an engine now."),
    ("router/requests", "requests", "Requests accepted: they had a routing key."),
    ("router/completed", "requests", "Requests that an engine answered."),
    ("router/failed", "requests", "Requests that ended in an error, after every attempt."),
    ("router/cancelled", "requests", "Requests given up by whoever asked."),
    ("router/refused", "requests", "Requests not accepted: they had no routing key."),
    ("router/retries", "attempts", "Further attempts, on another engine than the one that failed."),
    ("router/rebinds", "keys", "Keys that moved to another engine as theirs was drained."),
    (
        "router/rebind_prefill_tokens",
        "tokens",
        "Prompt tokens computed anew as their key had moved.",
    ),
    ("router/drained", "engines", "Engines taken out: dead, unwell, or at an older version."),
    (
        "router/readmitted",
        "engines",
        "Engines taken back: well, and at exactly the published version.",
    ),
    ("router/keys_released", "keys", "Keys given back as their trajectory ended."),
    (
        "router/keys_expired",
        "keys",
        "Keys never given back and forgotten, as the table was full.",
    ),
    ("session/turns", "turns", "Mean assistant turns of a trained trajectory."),
    (
        "session/token_mismatches",
        "turns",
        "Turns that failed because tokens did not extend the stored ones; anything above 0 is a "
        "fault.",
    ),
    (
        "session/unmatched_tool_ids",
        "ids",
        "Tool-call ids that did not correspond where `role_text` took two histories for one.",
    ),
    ("session/rollbacks", "turns", "Turns replaced by a retry (`linear`)."),
    ("session/branches", "turns", "Turns that began a branch beside another (`branching`)."),
    ("session/kept_history", "turns", "Turns before which history was kept as it was sampled."),
    ("session/rebased", "turns", "Turns before which it was rewritten as the template would."),
    ("session/truncated", "requests", "Requests refused because their prompt left no room."),
    (
        "session/conflicts",
        "requests",
        "Requests refused as another was being answered, or the turn had ended by length.",
    ),
    (
        "eval/lag_steps",
        "trainer steps",
        "How far the trainer had gone on when a score came in; the largest since the last step.",
    ),
    ("eval/<set>/score", "reward", "Mean reward on an evaluation set."),
    ("eval/<set>/version", "weight version", "Version that sampled every token of the evaluation."),
    ("eval/<set>/samples", "trajectories", "Attempts that were scored."),
    ("eval/<set>/skipped", "text", "Why the evaluation gave no score."),
    ("eval/<set>/low", "reward", "Lower end of the 95 % interval of the score."),
    ("eval/<set>/high", "reward", "Upper end of it."),
    (
        "eval/<set>/pass_<k>",
        "share",
        "pass@k, by the unbiased estimator of Chen et al. 2021, mean over tasks.",
    ),
    ("eval/<set>/pass_<k>_low", "share", "Lower end of its 95 % interval."),
    ("eval/<set>/pass_<k>_high", "share", "Upper end of it."),
    (
        "eval/<set>/lag_steps",
        "trainer steps",
        "How far the trainer had gone on when this score, of an earlier step, came in.",
    ),
    (
        "eval/<set>/<name>",
        "evaluator's own",
        "Any other number the evaluator reports, such as `stderr` or `failures`.",
    ),
)
"""Every metric. Rows are tried in order, so a wildcard comes after the names it would swallow."""


def find(name: str) -> Metric | None:
    """The row a concrete name belongs to, or None."""
    return next((metric for metric in METRICS if metric.matches(name)), None)


def faults(metrics: Mapping[str, Any]) -> tuple[str, ...]:
    """What is wrong with a step's flat dictionary, as sentences: unknown names, wrong types."""
    found = []
    for name, value in metrics.items():
        metric = find(name)
        if metric is None:
            found.append(f"unknown metric {name!r}; {choices(name, (m.name for m in METRICS))}")
        elif metric.text != isinstance(value, str):
            found.append(
                f"metric {name!r} is {value!r}, not {'text' if metric.text else 'a number'}"
            )
        elif not isinstance(value, (int, float, str)) or isinstance(value, bool):
            found.append(f"metric {name!r} is a {type(value).__name__}, not a plain number")
    return tuple(found)


def page(metrics: Iterable[Metric] = METRICS) -> str:
    """The table as the Markdown page `docs/metrics.md`."""
    lines = [
        "# Metrics",
        "",
        "<!-- generated by `python -m miles.metrics > docs/metrics.md`; do not edit -->",
        "",
        "One flat dictionary a step. Trackers receive it as it is; `metrics.jsonl` holds a",
        "line for every moment, told apart by `moment`: `step_finished` and `evaluated` with",
        "the names below, and between them `run_started`, `stage_started`,",
        "`checkpoint_saved`, `waited`, `warned` and `run_finished`; `at` is when, in seconds since",
        "1970.",
        "`evaluator` tells evaluations of one configuration from those of another.",
        "A part in angle brackets stands for any word.",
        "",
        "`ledger.jsonl` holds a line a step: `step`, how many groups were ever `started`, and the",
        "ids of the groups that ended since the line before, by what became of them (`trained`, or",
        "the reason of a drop). `rolled_back` names bytes of it that belong to weights which a",
        "resumed run gave up.",
        "",
        "| name | unit | meaning |",
        "|---|---|---|",
        *(f"| `{m.name}` | {m.unit} | {m.meaning} |" for m in metrics),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(page(), end="")
