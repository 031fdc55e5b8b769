"""What `miles check` says of a stage's tasks and tokens: whether there are any, whether they fit,
and whether the handler's ids are the checkpoint's.

It reads the first tasks only, and plays none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from miles.protocols import Spec

__all__ = ["task_faults", "vocabulary_faults"]

_PROMPTS = 32
"""Prompts rendered to see whether they fit."""


def task_faults(planned: Any) -> list[str]:
    """Whether there are tasks, whether they fit the context, and have what is demonstrated."""
    environment, tito = planned.built.get("environment"), planned.built.get("tito")
    spec = planned.specs["environment"]
    if environment is None or tito is None or not isinstance(spec, Spec):
        return []
    name = f"environment {spec.name!r}"
    tasks = environment.tasks("train")
    if planned.settings.steps and not len(tasks):
        return [f"{name}: there are no training tasks"]
    faults = []
    first = [tasks[i] for i in range(min(len(tasks), _PROMPTS))]
    engine = planned.specs["engine"]
    if not planned.samples and isinstance(engine, Spec):
        bare = next((t.id for t in first if t.solution is None), None)
        if bare is not None:
            faults.append(
                f"{name}: task {bare!r} has no solution, which engine {engine.name!r} would replay"
            )
    return faults + _lengths(planned, name, first)


def _lengths(planned: Any, name: str, tasks: Sequence[Any]) -> list[str]:
    model, tito = planned.built.get("model"), planned.built["tito"]
    limit = model.hf_config().get("max_position_embeddings") if model is not None else None
    engine = planned.specs["engine"]
    own = engine.config.get("max_len") if isinstance(engine, Spec) else None
    where = "the model's context"
    if own and (limit is None or own < limit):
        limit, where = own, "engine.max_len"
    if limit is None:
        return []
    longest, task = 0, None
    told = getattr(planned.built["environment"], "schemas", ())
    if isinstance(told, str) or not isinstance(told, Sequence):
        kind = type(told).__name__
        return [f"{name}: schemas is a {kind}; it has to be a list of tools, or a property of one"]
    for one in tasks:
        raw = one.prompt
        size = len(tito.encode(raw) if isinstance(raw, str) else tito.render(raw, tools=told))
        if size > longest:
            longest, task = size, one
    room = planned.settings.max_new_tokens
    if task is None or longest + room <= limit:
        return []
    counted = told and not isinstance(task.prompt, str)  # text is no conversation, and has none
    tools = f", its {len(told)} tool{'s'[: len(told) != 1]} included," if counted else ""
    return [
        f"{name}: the prompt of task {task.id!r}{tools} has {longest} tokens, which with "
        f"max_new_tokens ({room}) do not fit {where} of {limit}; it takes {longest + room} at least"
    ]


def vocabulary_faults(planned: Any) -> list[str]:
    """Whether the handler's ids and text are the checkpoint's."""
    model, tito = planned.built.get("model"), planned.built.get("tito")
    chosen, spec = planned.specs["tito"], planned.specs["model"]
    if model is None or tito is None or not isinstance(chosen, Spec) or not isinstance(spec, Spec):
        return []
    rows = model.hf_config().get("vocab_size")
    if rows is not None and tito.vocab_size > rows:
        return [
            f"tito {chosen.name!r} has ids up to {tito.vocab_size - 1}, but the embedding of model "
            f"{spec.name!r} has {rows} rows"
        ]
    directory = model.directory()
    file = directory / "tokenizer.json" if directory is not None else None
    if file is None or not file.is_file():
        return []
    from tokenizers import Tokenizer  # comes with transformers; needs no torch

    text = "Two and two: 2+2=4.\n\tÜber 100 %?"
    theirs = Tokenizer.from_file(str(file)).encode(text, add_special_tokens=False).ids
    ours = [int(i) for i in tito.encode(text)]
    if ours != theirs:
        at = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), 0)
        return [
            f"tito {chosen.name!r} does not match the checkpoint {directory}: of {text!r}, token "
            f"{at} is {ours[at : at + 1]} here and {theirs[at : at + 1]} by its tokenizer.json; "
            f"model {spec.name!r} names {_named(model, spec)!r}, which tito=auto would take"
        ]
    return []


def _named(model: Any, spec: Spec) -> str:
    """The handler that a model wants as it is configured."""
    choose = getattr(model, "choose_tito", None)
    return str(choose(spec.config) if choose else model.tito)
