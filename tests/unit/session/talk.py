"""What session tests share: completions by hand, and a session that plays them."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np

from miles import Completion, Message, SessionKeys, Span
from miles.session import Session
from miles.testing import FakeTito

TITO = FakeTito()
END = 257
TOOLS = ({"type": "function", "function": {"name": "add", "parameters": {}}},)


def rules(**keys):
    return SessionKeys(**keys)


def session(id="s", tito=TITO, max_tokens=None, **keys):
    return Session(id, tito, rules=rules(**keys), max_tokens=max_tokens)


def completion(said, *, version=0, finish="stop", **more):
    """Text (closed unless it was cut) or ids; the log-prob at i is -(i + 1) / 8."""
    if isinstance(said, str):
        said = [*said.encode(), *([END] if finish == "stop" else [])]
    ids = np.array(said, np.int32)
    spans = (Span(start=0, stop=len(ids), version=version),) if len(ids) else ()
    options = {
        "tokens": ids,
        "logprobs": -(np.arange(len(ids), dtype=np.float32) + 1) / 8,
        "spans": spans,
        "finish": finish,
    }
    return Completion(**{**options, **more})


def user(text):
    return {"role": "user", "content": text}


def assistant(text, **more):
    return {"role": "assistant", "content": text, **more}


def call(name, arguments, id):
    arguments = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def say(talk: Session, messages: Sequence[Message], said, *, tools=(), append=False, **how):
    """One turn; the prompt and the turn."""
    prompt = talk.prompt(messages, tools=tools, append=append)
    return prompt, talk.commit(prompt, completion(said, **how))


def same_samples(one, two) -> bool:
    """Whether two tuples of samples are equal in every array and field."""
    return len(one) == len(two) and all(map(same_sample, one, two))


def same_sample(one, two) -> bool:
    arrays = ("tokens", "sampled", "trainable", "logprobs", "truncated_logprobs", "experts")
    for name in arrays:
        a, b = getattr(one, name), getattr(two, name)
        if (a is None) != (b is None):
            return False
        if a is not None and (a.dtype != b.dtype or not np.array_equal(a, b)):
            return False
    return (one.spans, one.finish, one.images) == (two.spans, two.finish, two.images)
