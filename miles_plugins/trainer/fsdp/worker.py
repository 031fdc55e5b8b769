"""One rank of the `fsdp` trainer: executes named loss terms over its share of a batch.

Algorithm-blind: which terms, with which weights, is in the batch. Files are in `state`, shards in
`ranks`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from miles import Array, Batch, Context, Term, Tokens, TrainerError, Update, choices
from miles.learn import mismatch
from miles.learn.attention import choose_attention
from miles.learn.convert import Conversion
from miles_plugins.trainer.fsdp import state
from miles_plugins.trainer.fsdp.evict import Eviction
from miles_plugins.trainer.fsdp.finite import norm_or_skip, refuse_losses
from miles_plugins.trainer.fsdp.memory import keep_freed_memory
from miles_plugins.trainer.fsdp.meter import Meter
from miles_plugins.trainer.fsdp.optimizer import Away, Masters, learning_rate
from miles_plugins.trainer.fsdp.pieces import Piece, pieces
from miles_plugins.trainer.fsdp.policy import build, resolve
from miles_plugins.trainer.fsdp.ranks import join, shard
from miles_plugins.trainer.fsdp.scaling import Scale
from miles_plugins.trainer.fsdp.speed import Cost

if TYPE_CHECKING:
    from miles_plugins.trainer.fsdp import Fsdp

__all__ = ["Worker"]

_log = logging.getLogger(__name__)

MIB = 2**18
"""float32 elements of one."""
SOURCES = ("current", "reference")


class Worker:
    """Model, masters and counters of one rank."""

    def __init__(self, config: Fsdp.Config, context: Context) -> None:
        if config.threads:
            torch.set_num_threads(config.threads)
        self.config, self.context = config, context
        self.ranks = join(
            context,
            config.device,
            replicas=config.replicas,
            offload=config.offload_parameters,
            sharing=config.context_parallel,
        )
        self._gpu = self.ranks.device.type == "cuda"
        if not self._gpu:
            keep_freed_memory()
        compute = getattr(torch, context.precision.compute)
        self.policy = build(
            context.model.build(),
            context.model.hf_config(),
            context.model.directory(),
            seed=context.seed,
            recompute=config.activation_checkpointing,
            quick=not self._gpu and config.compile == "none",
            wide=context.precision.logits == "float32",
            fine=compute if context.precision.residual != context.precision.compute else None,
        )
        if not (offload := config.offload_parameters):
            self.policy.to(self.ranks.device)
        self.cost = Cost(self.policy.model, context.model)
        self.way = choose_attention(
            config.attention,
            device=self.ranks.device,
            dtype=compute,
            head_dim=self.cost.head_dim,
        )
        if config.compile == "layers":
            self.policy.compile_parts()
        shard(self.policy, self.policy.blocks(), self.ranks, compute, offload=offload)
        self.masters = Masters(
            self.policy.model,
            compute=compute,
            betas=config.betas,
            eps=config.eps,
            weight_decay=config.weight_decay,
            away=self._away(),
        )
        self.scale = Scale(context.precision.scaling, self.ranks.world)
        self.meter = Meter(self.cost, self.ranks, compute, config.peak_tflops)
        self.eviction = Eviction()
        self.conversion = Conversion(self.policy.model)
        torch.manual_seed(context.seed)
        budget = context.precision.budget
        self.limits = mismatch.Limits(
            max=budget.max if config.mismatch_max is None else config.mismatch_max,
            mean=budget.mean if config.mismatch_mean is None else config.mismatch_mean,
            action=config.on_mismatch,
        )
        # Greedy sampling has no distribution of its own; its log-probs are those of temperature 1.
        self.temperature = context.settings.temperature or 1.0
        self.version = 0
        self.stage_step = 0
        self.reference: dict[str, Tensor] | None = None

    def _away(self) -> Away | None:
        """Where optimizer state is kept, unless it stays on the device."""
        config = self.config
        if config.optimizer_state == "resident":
            return None
        directory = None
        if config.optimizer_state == "disk":
            directory = Path(config.optimizer_dir or self.context.directory / "optimizer")
        return Away(self.ranks.device, config.optimizer_bucket_mb * MIB, directory)

    # ------------------------------------------------------------ one step

    def step(self, batch: Batch) -> Update:
        """See `Fsdp.step`."""
        self._refuse_asleep("step")
        _refuse_experts(batch.tokens)
        self.meter.begin()
        self.masters.drop_gradients()  # a step that failed may have left some
        tokens = batch.tokens
        loss_T = np.zeros(len(tokens.tokens), np.bool_)
        for term in batch.terms:
            loss_T |= term.weights != 0
        loss_T[np.cumsum(tokens.lengths) - tokens.lengths] = False  # nothing predicts a first token
        rows_T = loss_T if tokens.logprobs is None else loss_T | self._sampled(tokens)
        current_T = torch.zeros(len(rows_T), device=self.ranks.device)
        # one sum a term, then: entropy, tokens it was measured on, masked tokens
        sums = torch.zeros(len(batch.terms) + 3, dtype=torch.float64, device=self.ranks.device)
        try:
            probed = None if batch.probe is None else self.logprobs(batch.probe, "current")
            self._accumulate(batch, rows_T, loss_T, current_T, sums)
            *values, entropy, measured, masked = self.ranks.add(sums).tolist()
            losses = dict(zip((term.name for term in batch.terms), values, strict=True))
            refuse_losses(losses, self.version, self.context.precision.compute)
            current = self.ranks.add(current_T).cpu().numpy()
            metrics = mismatch.measure(tokens, current, rows_T, self.version)
            if batch.probe is not None:
                metrics = mismatch.with_probe(metrics, batch.probe, probed, self.version)
            warnings = mismatch.enforce(metrics, self.limits)
            norm, of_scale, skipped = norm_or_skip(self.masters, self.scale, losses, self.version)
        except TrainerError:
            self.masters.drop_gradients()
            raise
        lr = self._learning_rate()
        if norm is None:
            self.masters.drop_gradients()
        else:
            self.masters.update(lr, norm=norm, clip=self.config.grad_clip)
        self.version += 1
        self.stage_step += 1
        metrics.update({f"loss/{name}": value for name, value in losses.items()})
        metrics.update(of_scale, lr=lr)
        metrics["tokens/trained"] = float(np.count_nonzero(loss_T)) - masked
        if measured:
            metrics["entropy"] = entropy / measured
        if self.limits.action == "mask" and "mismatch/tokens" in metrics:
            metrics["mismatch/masked"] = masked
        metrics.update(self.meter.end(None if norm is None else self.masters.streamed))
        return Update(version=self.version, metrics=metrics, warnings=(*warnings, *skipped))

    def _accumulate(
        self, batch: Batch, rows_T: Array, loss_T: Array, current_T: Tensor, sums: Tensor
    ) -> None:
        """Forward and backward over this rank's pieces: fills gradients, `current_T` and `sums`."""
        functions = [resolve(t.function, f"loss term {t.name!r}") for t in batch.terms]
        entropy = any(getattr(function, "needs_entropy", False) for function in functions)
        comparable_T = mismatch.comparable(batch.tokens, self.version)
        for piece in self._pieces(batch.tokens):
            rows = np.flatnonzero(rows_T[piece.index]) if not piece.idle else np.zeros(0, np.int64)
            rows = piece.own(rows)
            if not len(rows) and self.ranks.world == 1:
                continue
            flat = piece.index[rows]  # (rows,) int64: places in the batch
            logprobs, entropies = self._forward(batch.tokens, piece, rows, entropy)
            seen = logprobs.detach().float()
            current_T[torch.from_numpy(flat).to(current_T.device)] = seen
            counted = loss_T[flat]
            if self.limits.action == "mask" and comparable_T[flat].any():
                gap = np.abs(seen.cpu().numpy() - batch.tokens.logprobs[flat])
                over = comparable_T[flat] & ~(gap <= self.limits.max)
                sums[-1] += int(np.count_nonzero(over & counted))
                counted = counted & ~over
            if entropies is not None:
                sums[-3] += (entropies.detach() * self._tensor(counted)).sum()
                sums[-2] += int(np.count_nonzero(counted))
            loss = logprobs.sum() * 0.0 if self.ranks.world > 1 else None
            for place, (term, function) in enumerate(zip(batch.terms, functions, strict=True)):
                part = self._term(term, function, logprobs, entropies, flat, counted)
                if part is not None:
                    sums[place] += part.detach()
                    loss = part if loss is None else loss + part
            self.meter.add(piece, len(rows))
            if loss is not None:
                factor = self.scale.on_loss
                (loss if factor == 1.0 else loss * factor).backward()

    def _term(
        self,
        term: Term,
        function: Callable[..., Tensor],
        logprobs: Tensor,
        entropies: Tensor | None,
        flat: Array,
        counted: Array,
    ) -> Tensor | None:
        """Sum of weight × value over the rows where the term counts; None when it counts nowhere
        here."""
        weights = term.weights[flat]
        use = counted & (weights != 0)
        if not use.any():
            return None
        if not use.all():
            # Values where a term does not apply may be anything, so they are never computed.
            flat, weights = flat[use], weights[use]
            chosen = self._tensor(np.flatnonzero(use))
            logprobs = logprobs.index_select(0, chosen)
            entropies = None if entropies is None else entropies.index_select(0, chosen)
        inputs = {name: self._tensor(values[flat]) for name, values in term.inputs.items()}
        values = function(logprobs, entropies, inputs, term.options)
        if values.shape != logprobs.shape:
            raise TrainerError(
                f"loss term {term.name!r}: {term.function} gave shape {tuple(values.shape)} for "
                f"{len(logprobs)} tokens"
            )
        return torch.dot(self._tensor(weights).to(values.dtype), values)

    def _learning_rate(self) -> float:
        config = self.config
        return learning_rate(
            self.stage_step,
            peak=config.lr,
            warmup=config.warmup_steps,
            schedule=config.schedule,
            steps=self.context.settings.steps,
            min_ratio=config.min_lr_ratio,
        )

    # ------------------------------------------------------------ forward

    def _pieces(self, tokens: Tokens) -> Iterator[Piece]:
        """This rank's micro-batches."""
        return pieces(
            tokens,
            self.ranks,
            budget=self.config.micro_batch_tokens,
            share_prompts=self.config.share_prompts,
            way=self.way,
            cost=self.cost if self.config.balance == "flops" else None,
        )

    def _forward(
        self, tokens: Tokens, piece: Piece, rows: Array, entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        ids = tokens.tokens[piece.index].astype(np.int64)
        return self.policy(
            self._tensor(ids[piece.ids])[None],
            piece.packing,
            self._tensor(piece.at(rows)),
            self._tensor(ids[rows]),
            self.temperature,
            entropy,
        )

    def _tensor(self, array: Array) -> Tensor:
        return torch.from_numpy(array).to(self.ranks.device)

    @staticmethod
    def _sampled(tokens: Tokens) -> Array:
        """(T,) bool: sampled tokens that something predicts."""
        sampled = tokens.sampled.copy()
        sampled[np.cumsum(tokens.lengths) - tokens.lengths] = False
        return sampled

    @torch.no_grad()
    def logprobs(self, tokens: Tokens, source: str) -> Array:
        """See `Fsdp.logprobs`."""
        self._refuse_asleep("logprobs")
        _refuse_experts(tokens)
        if source not in SOURCES:
            raise TrainerError(f"log-probs of {source!r}: {choices(source, SOURCES)}")
        if source == "current":
            return self._logprobs(tokens)
        reference = self._reference()
        self.masters.swap(reference)
        try:
            return self._logprobs(tokens)
        finally:
            self.masters.swap(reference)

    def _logprobs(self, tokens: Tokens) -> Array:
        found_T = torch.zeros(len(tokens.tokens), device=self.ranks.device)
        rows_T = np.ones(len(tokens.tokens), np.bool_)
        rows_T[np.cumsum(tokens.lengths) - tokens.lengths] = False
        for piece in self._pieces(tokens):
            rows = piece.own(np.flatnonzero(rows_T[piece.index]))
            logprobs, _ = self._forward(tokens, piece, rows, False)
            if not piece.idle:
                found_T[self._tensor(piece.index[rows])] = logprobs.float()
        if isinstance(self.policy, FSDPModule):
            self.policy.reshard()  # no backward pass follows that would do it
        return self.ranks.add(found_T).cpu().numpy()

    def _reference(self) -> dict[str, Tensor]:
        """The weights the stage began with; copied when first asked for, which has to be before its
        first step."""
        if not self.config.reference:
            raise TrainerError(
                "trainer fsdp: reference log-probs were asked for, but trainer.reference is false"
            )
        if self.reference is None:
            if self.stage_step:
                raise TrainerError(
                    f"trainer fsdp: reference log-probs were first asked for after "
                    f"{self.stage_step} steps of the stage; the weights it began with are gone"
                )
            self.reference = self.masters.snapshot()
        return self.reference

    # ------------------------------------------------------------ weights in and out

    @torch.no_grad()
    def export(self) -> Iterator[tuple[str, Tensor]]:
        """See `Fsdp.export`."""
        self._refuse_asleep("export")
        dtype = getattr(torch, self.context.precision.export)
        weights = self.masters.exported(dtype, self.ranks.device)
        yield from self.conversion.stream(weights, dtype=dtype)

    def save(self, directory: Path, *, weights_only: bool = False) -> None:
        """See `Fsdp.save`."""
        self._refuse_asleep("save")
        state.save(self, directory, weights_only=weights_only)

    def load(self, directory: Path, *, weights_only: bool) -> None:
        """See `Fsdp.load`."""
        self._refuse_asleep("load")
        state.load(self, directory, weights_only=weights_only)

    def sleep(self) -> None:
        """See `Fsdp.sleep`."""
        self.masters.drop_gradients()
        to = self.config.sleep_to
        if self.eviction.asleep or to == "none" or (to == "auto" and not self._gpu):
            return
        if isinstance(self.policy, FSDPModule):
            self.policy.reshard()
        held = (*self.policy.buffers(), *self.masters.tensors(), *(self.reference or {}).values())
        self.meter.left = self.eviction.leave(held, self.ranks.device)
        _log.info(
            "asleep: %.2f GB left %s in %.2f s",
            self.meter.left.bytes / 1e9,
            self.ranks.device,
            self.meter.left.seconds,
        )

    def wake(self) -> None:
        """See `Fsdp.wake`."""
        if self.eviction.asleep:
            self.meter.returned = self.eviction.come_back(self.ranks.device)

    def _refuse_asleep(self, what: str) -> None:
        if self.eviction.asleep:
            raise TrainerError(f"trainer fsdp: {what} was asked of a trainer asleep; wake it first")


def _refuse_experts(tokens: Tokens) -> None:
    if tokens.experts is not None:
        raise TrainerError(
            f"trainer fsdp: {len(tokens.lengths)} samples carry the experts that an engine chose, "
            "and replaying them is not there yet; use session.experts=false"
        )
