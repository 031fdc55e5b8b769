"""A bigram policy in numpy, sampled by `FakeEngine` and trained by `FakeTrainer`: a whole run
without torch.

The next token depends on the last one alone, so the model is one (vocab, vocab) table of logits.
Both fakes keep their protocols, with delays, failures and replies by script; neither executes a
`Term`'s own function.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any, ClassVar

import numpy as np

from miles.batch import Batch, Tokens, Update
from miles.errors import EngineError, TrainerError, WeightSyncError
from miles.protocols import Context
from miles.seeds import derive_seed
from miles.types import Array, Completion, Finish, Request, Sampling, Span

__all__ = ["FakeEngine", "FakeTrainer"]

WEIGHT = "bigram.weight"
Script = Callable[[Request], "str | Sequence[int]"]
"""What to answer, as text (UTF-8 bytes are the ids) or token ids; may raise."""


def _initial(vocab_size: int, seed: int) -> Array:
    rng = np.random.default_rng(derive_seed("bigram", seed))
    return rng.normal(size=(vocab_size, vocab_size)).astype(np.float32)  # (vocab, vocab) float32


def _log_softmax(logits: Array, axis: int = -1) -> Array:
    shifted = logits.astype(np.float64) - logits.max(axis=axis, keepdims=True)
    normed: Array = shifted - np.log(np.exp(shifted).sum(axis=axis, keepdims=True))
    return normed


def _cut(logprobs_V: Array, sampling: Sampling) -> Array | None:
    """The distribution cut by top-k and then top-p, renormalised; None when nothing is cut."""
    if not sampling.top_k and sampling.top_p >= 1:
        return None
    order = np.argsort(-logprobs_V, kind="stable")
    keep = order[: sampling.top_k or None]
    before = np.cumsum(np.exp(logprobs_V[keep])) - np.exp(logprobs_V[keep])
    total = np.exp(logprobs_V[keep]).sum()
    keep = keep[before < sampling.top_p * total]
    cut = np.full_like(logprobs_V, -np.inf)
    cut[keep] = logprobs_V[keep]
    return _log_softmax(cut)


@dataclass(slots=True)
class _Active:
    """What has been sampled for one request."""

    key: str
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    truncated: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    aborted: bool = False


def _spans(versions: Sequence[int]) -> tuple[Span, ...]:
    edges = [i for i in range(len(versions)) if i == 0 or versions[i] != versions[i - 1]]
    stops = [*edges[1:], len(versions)] if edges else []
    return tuple(
        Span(start=start, stop=stop, version=versions[start])
        for start, stop in zip(edges, stops, strict=True)
    )


def _scripted(script: Script, request: Request) -> Iterable[int]:
    said = script(request)
    yield from said.encode() if isinstance(said, str) else said
    yield from request.sampling.stop_ids[:1]


class FakeEngine:
    """Samples a bigram policy, or says what a script says, at a chosen pace and with chosen
    failures."""

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Config:
        """Size, pace and failures."""

        vocab_size: int = 258
        """Ids are below this; 258 fits `FakeTito`."""
        max_len: int = 256
        """Longest prompt and completion together."""
        texts: tuple[str, ...] = ()
        """Replies in the order of requests, over and over, each followed by a stop id; empty
        samples."""
        delay_s: float = 0.0
        """Seconds a token takes."""
        fail_every: int = 0
        """Every n-th request raises `EngineError`; 0 never."""
        loaded: bool = True
        """Serve the initial weights as version 0 at once, without a publish."""

    samples: ClassVar[bool] = True

    def __init__(
        self,
        config: Config | None = None,
        context: Context | None = None,
        *,
        script: Script | None = None,
    ) -> None:
        self.config = config or self.Config()
        self.requests: list[Request] = []
        """Every request seen, in order."""
        self._script = script or (self._recite if self.config.texts else None)
        self._weight_VV = _initial(self.config.vocab_size, context.seed if context else 0)
        self._version = 0 if self.config.loaded else -1
        self._active: list[_Active] = []
        self._open = True
        self._changed = asyncio.Condition()
        self._sampled = self._prompted = 0
        self._busy_s = 0.0

    def _recite(self, request: Request) -> str:
        return self.config.texts[(len(self.requests) - 1) % len(self.config.texts)]

    @classmethod
    def example_weights(cls, seed: int) -> dict[str, Array]:
        """Weights that `load` takes, for the engine suite."""
        return {WEIGHT: _initial(cls.Config().vocab_size, seed)}

    async def generate(self, request: Request) -> Completion:
        """Sample one completion. Raises `EngineError` by script, before a load, or when the prompt
        does not fit."""
        self.requests.append(request)
        every, count = self.config.fail_every, len(self.requests)
        if every and count % every == 0:
            raise EngineError(f"request {request.id!r}: fails on purpose, the {count}th request")
        if self._version < 0:
            raise EngineError(f"request {request.id!r}: no weights were loaded")
        room = self.config.max_len - len(request.tokens)
        if not len(request.tokens) or room <= 0:
            raise EngineError(
                f"request {request.id!r}: a prompt of {len(request.tokens)} tokens does not fit a "
                f"context of {self.config.max_len}"
            )
        active = _Active(key=request.key)
        self._active.append(active)
        started = monotonic()
        try:
            finish = await self._decode(request, active, min(room, request.sampling.max_new_tokens))
        finally:
            self._active.remove(active)
            self._busy_s += monotonic() - started
        self._sampled += len(active.tokens)
        self._prompted += len(request.tokens)
        cut = len(active.truncated) > 0
        return Completion(
            tokens=np.array(active.tokens, np.int32),
            logprobs=np.array(active.logprobs, np.float32),
            truncated_logprobs=np.array(active.truncated, np.float32) if cut else None,
            spans=_spans(active.versions),
            finish=finish,
        )

    async def _decode(self, request: Request, active: _Active, room: int) -> Finish:
        script = list(_scripted(self._script, request)) if self._script else None
        rng = np.random.default_rng(request.seed % 2**63)
        last = int(request.tokens[-1])
        for index in range(room if script is None else min(room, len(script))):
            await asyncio.sleep(self.config.delay_s)
            async with self._changed:
                await self._changed.wait_for(lambda: self._open or active.aborted)
            if active.aborted:
                return "abort"
            given = None if script is None else script[index]
            last = self._draw(last, request.sampling, rng, active, given)
            if last in request.sampling.stop_ids:
                return "stop"
        return "length"

    def _draw(
        self,
        last: int,
        sampling: Sampling,
        rng: np.random.Generator,
        active: _Active,
        given: int | None,
    ) -> int:
        greedy = sampling.temperature == 0
        logits_V = self._weight_VV[last] / (1.0 if greedy else sampling.temperature)
        logprobs_V = _log_softmax(logits_V)
        cut_V = None if greedy else _cut(logprobs_V, sampling)
        drawn_V = logprobs_V if cut_V is None else cut_V
        uniform = rng.random()
        if given is not None:
            token = given
        elif greedy:
            token = int(np.argmax(drawn_V))
        else:
            ladder_V = np.cumsum(np.exp(drawn_V))
            token = int(np.searchsorted(ladder_V, uniform * ladder_V[-1], side="right"))
        active.tokens.append(token)
        active.logprobs.append(float(logprobs_V[token]))
        active.versions.append(self._version)
        if cut_V is not None:
            active.truncated.append(float(cut_V[token]))
        return token

    async def score(self, tokens: Array) -> Array:
        """(tokens,) float32 own log-probs at temperature 1, 0 for the first."""
        return _score(self._weight_VV, tokens)

    async def abort(self, keys: Sequence[str] | None = None) -> int:
        """End requests with these routing keys at their next token; how many there were."""
        chosen = [a for a in self._active if keys is None or a.key in keys]
        for active in chosen:
            active.aborted = True
        async with self._changed:
            self._changed.notify_all()
        return len(chosen)

    async def pause(self) -> None:
        """Hold every request before its next token."""
        self._open = False

    async def resume(self) -> None:
        """Go on."""
        self._open = True
        async with self._changed:
            self._changed.notify_all()

    async def load(self, version: int, weights: Iterable[tuple[str, Any]]) -> None:
        """Take the one table of logits; tokens sampled from here on carry `version`."""
        given = dict(weights)
        if set(given) != {WEIGHT}:
            names = ", ".join(sorted(given)[:4])
            raise WeightSyncError(f"fake engine: expected {WEIGHT!r} alone, got {names or 'none'}")
        table = np.array(given[WEIGHT], np.float32)
        if table.shape != self._weight_VV.shape:
            raise WeightSyncError(
                f"fake engine: {WEIGHT} is {table.shape}, not {self._weight_VV.shape}"
            )
        self._weight_VV, self._version = table, version

    async def version(self) -> int:
        """The version being served; -1 before the first load."""
        return self._version

    async def health(self) -> Mapping[str, float]:
        """Counts since start; nothing is ever cached."""
        return {
            "active": float(len(self._active)),
            "waiting": 0.0,
            "tokens": float(self._sampled),
            "busy_s": self._busy_s,
            "prompt_tokens": float(self._prompted),
            "cached_tokens": 0.0,
        }

    async def sleep(self) -> None:
        """Nothing to free."""

    async def wake(self) -> None:
        """Nothing to take back."""


def _score(weight_VV: Array, tokens: Array) -> Array:
    """(tokens,) float32 log-prob of each token given the one before it, 0 for the first."""
    rows_TV = _log_softmax(weight_VV[tokens[:-1]])
    scores = np.zeros(len(tokens), np.float32)  # (tokens,) float32
    scores[1:] = rows_TV[np.arange(len(tokens) - 1), tokens[1:]]
    return scores


class FakeTrainer:
    """Gradient ascent on the log-probs of a bigram policy.

    Whatever a term's function is, its value is taken as minus the token's log-prob times the term's
    `advantage` input (1 without one); so rewards still teach, and no torch is needed.
    """

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Config:
        """Size, pace and failures."""

        vocab_size: int = 258
        """Rows of the table; that of the engine."""
        lr: float = 10.0
        """Step size of plain gradient descent."""
        fail_at: tuple[int, ...] = ()
        """Versions from which a step raises `TrainerError`."""

    def __init__(self, config: Config | None = None, context: Context | None = None) -> None:
        self.config = config or self.Config()
        self.version = 0
        self.batches: list[Batch] = []
        """Every batch stepped on, in order."""
        self._weight_VV = _initial(self.config.vocab_size, context.seed if context else 0)
        self._reference_VV = self._weight_VV

    def step(self, batch: Batch) -> Update:
        """One step. Raises `TrainerError`, weights untouched, when the gradient is not finite or by
        script."""
        if self.version in self.config.fail_at:
            raise TrainerError(f"fake trainer: fails on purpose at version {self.version}")
        weights_T = np.zeros(len(batch.tokens.tokens), np.float64)  # (T,) float64
        losses: dict[str, float] = {}
        logprobs_T = self.logprobs(batch.tokens, "current")
        for term in batch.terms:
            pull_T = term.weights * term.inputs.get("advantage", np.float32(1))
            weights_T += pull_T
            losses[f"loss/{term.name}"] = float(-(pull_T * logprobs_T).sum())
        gradient_VV = self._gradient(batch.tokens, weights_T)
        norm = float(np.sqrt((gradient_VV**2).sum()))
        if not np.isfinite(norm) or not np.isfinite(list(losses.values())).all():
            raise TrainerError(f"fake trainer: loss {losses} or gradient norm {norm} is not finite")
        self._weight_VV = (self._weight_VV + self.config.lr * gradient_VV).astype(np.float32)
        self.batches.append(batch)
        self.version += 1
        trained = float(np.count_nonzero(weights_T))
        return Update(
            version=self.version,
            metrics={**losses, "grad_norm": norm, "lr": self.config.lr, "tokens/trained": trained},
        )

    def _gradient(self, tokens: Tokens, weights_T: Array) -> Array:
        """(vocab, vocab) float64: d/dlogits of the weighted sum of log-probs, sample by sample."""
        gradient_VV = np.zeros(self._weight_VV.shape)
        for start, stop in _bounds(tokens):
            before, after = tokens.tokens[start : stop - 1], tokens.tokens[start + 1 : stop]
            rows_TV = -np.exp(_log_softmax(self._weight_VV[before]))
            rows_TV[np.arange(len(after)), after] += 1
            np.add.at(gradient_VV, before, rows_TV * weights_T[start + 1 : stop, None])
        return gradient_VV

    def logprobs(self, tokens: Tokens, source: str) -> Array:
        """(T,) float32 log-prob of every token, 0 for first ones; `source` is `current` or
        `reference`."""
        tables = {"current": self._weight_VV, "reference": self._reference_VV}
        if tokens.experts is not None:
            raise TrainerError(
                "fake trainer: samples with experts, which it does not replay; use "
                "session.experts=false"
            )
        if source not in tables:
            raise TrainerError(
                f"fake trainer: no log-probs of {source!r}; valid: current, reference"
            )
        return np.concatenate(
            [_score(tables[source], tokens.tokens[a:b]) for a, b in _bounds(tokens)]
        )

    def export(self) -> Iterator[tuple[str, Any]]:
        """The one table, float32."""
        yield WEIGHT, self._weight_VV.copy()

    def save(self, directory: Path, *, weights_only: bool = False) -> None:
        """The tables and the version, which is all there is."""
        directory.mkdir(parents=True, exist_ok=True)
        np.savez(
            directory / "fake_trainer.npz",
            weight=self._weight_VV,
            reference=self._reference_VV,
            version=np.int64(self.version),
        )

    def load(self, directory: Path, *, weights_only: bool = False) -> None:
        """What `save` wrote; there is no optimizer, so `weights_only` leaves out the reference
        alone."""
        with np.load(directory / "fake_trainer.npz") as saved:
            self._weight_VV, self.version = saved["weight"], int(saved["version"])
            self._reference_VV = saved["weight"] if weights_only else saved["reference"]

    def sleep(self) -> None:
        """Nothing to free."""

    def wake(self) -> None:
        """Nothing to take back."""


def _bounds(tokens: Tokens) -> list[tuple[int, int]]:
    stops = np.cumsum(tokens.lengths)
    return [(int(b - n), int(b)) for b, n in zip(stops, tokens.lengths, strict=True)]
