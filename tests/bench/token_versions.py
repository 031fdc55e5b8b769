"""Two random models and whose a token is: what `transformers` gives a completion under the versions
that it names, and whether another version would fit better.

Talks to no server. Even versions are of one model and odd ones of the other; they differ by nats,
so that a log-prob tells under which of them its token was sampled.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from miles import Array, Completion, Context, Request, Span
from miles_plugins.model.build import causal_lm
from miles_plugins.model.qwen3 import Qwen3

__all__ = ["PROMPT", "Flight", "Models", "judged"]

MEAN, MOST = 0.05, 2e-3
"""Nats: the mean difference, of which bfloat16's rounding takes 0.01 to 0.03, and in float32 the
largest."""
APART = 0.3
"""Nats by which two versions must differ at a token to be told apart."""
PROMPT = 16
SHAPES: Mapping[str, dict[str, Any]] = {
    "cuda": {
        "hidden_size": 256, "layers": 4, "heads": 8, "kv_heads": 2, "head_dim": 64,
        "intermediate_size": 512, "vocab_size": 1024, "max_len": 4096, "tied": False,
    },
    "cpu": {"max_len": 1024},
}  # fmt: skip
STDS = {"cuda": (0.06, 0.06), "cpu": (0.35, 0.2)}
"""Of embeddings and of other matrices: a distribution far from uniform, and little rounding."""


class Models:
    """Two models of Qwen3's type as float32 modules and as checkpoints; in `bf16` both hold values
    that bfloat16 has."""

    def __init__(self, folder: Path, *, device: str, precision: str) -> None:
        self.device, self.precision, self.folder = device, precision, folder
        self.registered = Qwen3(Qwen3.Config(**SHAPES[device]), Context(directory=folder))
        self.vocab = int(self.registered.hf_config()["vocab_size"])
        self.modules = [self._made(seed) for seed in range(2)]
        self.folders = [self._written(number) for number in range(2)]

    def of(self, version: int) -> int:
        """Which model a version is."""
        return version % 2

    def _made(self, seed: int) -> Any:
        torch.manual_seed(seed)
        module = causal_lm(self.registered.hf_config(), None)
        wide, narrow = STDS[self.device]
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                if parameter.ndim > 1:
                    parameter.normal_(std=wide if "embed" in name else narrow)
                else:
                    parameter.uniform_(0.5, 1.5)
                if self.precision == "bf16":
                    parameter.copy_(parameter.bfloat16().float())
        return module.eval().to(self.device)

    def _written(self, number: int) -> Path:
        from safetensors.torch import save_file

        where = self.folder / f"model-{number}"
        where.mkdir()
        (where / "config.json").write_text(json.dumps(self.registered.hf_config()))
        kind = torch.bfloat16 if self.precision == "bf16" else torch.float32
        named = self.modules[number].named_parameters()
        held = {name: p.detach().cpu().to(kind).contiguous().clone() for name, p in named}
        save_file(held, str(where / "model.safetensors"))
        return where

    @torch.no_grad()
    def plain(self, whole: Array, number: int) -> Array:
        """(tokens,) float64: log-probs under one model, 0 first."""
        ids = torch.from_numpy(whole.astype(np.int64))[None].to(self.device)
        logits = self.modules[number](ids).logits[0, :-1]
        return np.concatenate([[0.0], _picked(logits, ids[0, 1:])])

    @torch.no_grad()
    def chained(self, whole: Array, spans: Sequence[Span]) -> Array:
        """(tokens,) float64: each span under its own model, with the keys and values that the
        models of the spans before it made; 0 first. A token that was sampled is first computed when
        the next one is asked for, so a span begins with the last token of the one before."""
        ids = torch.from_numpy(whole.astype(np.int64))[None].to(self.device)
        found, at, cache = [np.zeros(1)], 0, None
        for span in spans:
            end = PROMPT + span.stop - 1
            module = self.modules[self.of(span.version)]
            said = module(ids[:, at:end], past_key_values=cache, use_cache=True)
            found.append(_picked(said.logits[0], ids[0, at + 1 : end + 1]))
            at, cache = end, said.past_key_values
        return np.concatenate(found)

    def expected(self, whole: Array, spans: Sequence[Span], *, kept: bool) -> Array:
        """(sampled,) float64 under the versions of these spans; `kept`: caches stay."""
        if kept:
            return self.chained(whole, spans)[PROMPT:]
        each = [self.plain(whole, number)[PROMPT:] for number in range(2)]
        return np.concatenate([each[self.of(s.version)][s.start : s.stop] for s in spans])


def _picked(logits: torch.Tensor, targets: torch.Tensor) -> Array:
    logprobs = logits.double().log_softmax(-1)
    return logprobs.gather(1, targets[:, None])[:, 0].cpu().numpy()


class Flight:
    """One request while it is answered."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.count = 0
        """Tokens that have come."""
        self.at: dict[int, int] = {}
        """Version to how many had come when its publish returned."""
        self.made: Completion | None = None

    async def fly(self, engine: Any) -> None:
        """To its end."""
        async for part in engine.stream(self.request):
            if isinstance(part, Completion):
                self.made = part
            else:
                self.count += len(part)


def judged(
    models: Models, flights: Sequence[Flight], late: Sequence[Flight], *, size: int, last: int
) -> dict[str, Any]:
    """Every completion against its log-probs, with `within`: whether nothing is wrong. `flights`
    are of `size` tokens and were under way when versions up to `last` came; `late` began after."""
    whole = [f for f in flights if f.made is not None and len(f.made.tokens) == size]
    found: dict[str, Any] = {"lost": len(flights) - len(whole)}
    if not whole:
        return {**found, "within": False}
    means = {kept: _gaps(models, whole, kept=kept).mean() for kept in (True, False)}
    kept = means[True] < means[False]
    gaps = _gaps(models, [*whole, *late], kept=kept)
    changes = [change for flight in whole for change in _changes(models, flight, kept=kept)]
    wrong = sum(bad for _, bad in changes)
    decisive = sum(apart for apart, _ in changes)
    straddled = sum(len(f.made.spans) > 1 for f in whole if f.made)
    found |= {
        "straddled": straddled,
        "caches": "kept" if kept else "computed again",
        "mean_if_kept": float(means[True]),
        "mean_if_computed_again": float(means[False]),
        "logprob_abs_mean": float(gaps.mean()),
        "logprob_abs_max": float(gaps.max()),
        "tokens": len(gaps),
        "misplaced_tokens": sum(_misplaced(models, f, kept=kept) for f in [*whole, *late]),
        "changes": len(changes),
        "changes_told_apart": decisive,
        "changes_misplaced": wrong,
        "odd_spans": sum(_odd(f, size=size, last=last) for f in whole),
        "old_tokens_after_publish": sum(map(_late_tokens, whole)),
        "late_of_other_versions": sum(
            f.made is None or {s.version for s in f.made.spans} != {last} for f in late
        ),
    }
    good = gaps.mean() <= MEAN and (models.precision != "fp32" or gaps.max() <= MOST)
    zero = ("lost", "misplaced_tokens", "changes_misplaced", "odd_spans",
            "old_tokens_after_publish", "late_of_other_versions")  # fmt: skip
    crossed = straddled == len(flights) and 2 * decisive >= len(changes)
    return {**found, "within": bool(good and crossed and not any(found[name] for name in zero))}


def _all(flight: Flight) -> tuple[Array, Array, tuple[Span, ...]]:
    """(tokens,) of prompt and completion; (sampled,) log-probs of the server; spans."""
    made = flight.made
    if made is None or made.logprobs is None:
        raise RuntimeError(f"{flight.request.id} has no log-probs")
    return np.concatenate([flight.request.tokens, made.tokens]), made.logprobs, made.spans


def _gaps(models: Models, flights: Sequence[Flight], *, kept: bool) -> Array:
    """(all sampled,) float64: how far the server's log-probs are from the expected ones."""
    gaps = []
    for flight in flights:
        whole, said, spans = _all(flight)
        gaps.append(np.abs(said - models.expected(whole, spans, kept=kept)))
    return np.concatenate(gaps)


def _misplaced(models: Models, flight: Flight, *, kept: bool) -> int:
    """Tokens that fit the other model better, where the two can be told apart."""
    whole, said, spans = _all(flight)
    here = models.expected(whole, spans, kept=kept)
    swapped = [replace(span, version=span.version + 1) for span in spans]
    there = models.expected(whole, swapped, kept=False)
    apart = np.abs(here - there) > APART  # (sampled,) bool
    return int((apart & (np.abs(said - there) < np.abs(said - here))).sum())


def _changes(models: Models, flight: Flight, *, kept: bool) -> list[tuple[bool, bool]]:
    """Of each change of version, whether both tokens beside it tell the versions apart, and
    whether one of them fits better on its other side."""
    whole, said, spans = _all(flight)
    here = models.expected(whole, spans, kept=kept)
    found = []
    for index in range(1, len(spans)):
        sides = []
        for shift, token in ((-1, spans[index].start - 1), (1, spans[index].start)):
            moved = list(spans)
            at = spans[index].start + shift
            moved[index - 1] = replace(spans[index - 1], stop=at)
            moved[index] = replace(spans[index], start=at)
            if any(span.start >= span.stop for span in moved):
                sides.append((False, False))
                continue
            there = models.expected(whole, moved, kept=kept)
            apart = abs(here[token] - there[token]) > APART
            worse = abs(said[token] - there[token]) < abs(said[token] - here[token])
            sides.append((bool(apart), bool(apart and worse)))
        found.append((all(s[0] for s in sides), any(s[1] for s in sides)))
    return found


def _odd(flight: Flight, *, size: int, last: int) -> bool:
    """Whether spans leave a gap, go back, or name versions that never were."""
    spans = _all(flight)[2]
    edges = [span.start for span in spans] + [size]
    tiled = edges[0] == 0 and all(s.stop == e for s, e in zip(spans, edges[1:], strict=True))
    versions = [span.version for span in spans]
    known = set(versions) <= set(range(last + 1))
    return not tiled or not known or versions != sorted(set(versions))


def _late_tokens(flight: Flight) -> int:
    """Tokens of older versions that had not come when a publish returned."""
    spans = _all(flight)[2]
    found = 0
    for version, count in flight.at.items():
        old = max((span.stop for span in spans if span.version < version), default=0)
        found = max(found, old - count)
    return found
