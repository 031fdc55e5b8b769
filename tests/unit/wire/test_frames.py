"""What crosses a process comes back the same, and nothing else crosses."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from miles import (
    Batch,
    CheckpointError,
    Completion,
    ConfigError,
    EngineError,
    Request,
    Sampling,
    Settings,
    Span,
    Spec,
    Term,
    Tokens,
    WorkerError,
)
from miles.wire.frames import Connection, decode, encode, error_from_wire, error_to_wire


@settings(max_examples=60, deadline=None)
@given(
    array=hnp.arrays(
        st.sampled_from([np.int32, np.float32, np.bool_, np.uint8, np.int64, np.float64]),
        hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=5),
    )
)
def test_wire_arrays_come_back_bit_equal(array: np.ndarray) -> None:
    back = decode(encode(["x", array]))[1]
    assert back.dtype == array.dtype and back.shape == array.shape
    assert back.tobytes() == array.tobytes() and back.flags.writeable


def test_wire_dataclasses_come_back_as_themselves() -> None:
    tokens = Tokens(
        tokens=np.arange(4, dtype=np.int32),
        lengths=np.array([4], np.int32),
        sampled=np.ones(4, bool),
        trainable=np.ones(4, bool),
        versions=np.zeros(4, np.int32),
    )
    term = Term(name="nll", function="m:f", weights=np.ones(4, np.float32), options={"a": 0.5})
    values: list[Any] = [
        Request(
            id="r", key="k", tokens=np.arange(3, dtype=np.int32), seed=2**62,
            sampling=Sampling(stop_ids=(1, 2)),
        ),
        Completion(
            tokens=np.arange(2, dtype=np.int32), logprobs=None, finish="stop",
            spans=(Span(start=0, stop=2, version=3),),
        ),
        Batch(tokens=tokens, terms=(term,)),
        Spec(kind="engine", name="torch", config={"rows": 4, "x": {"y": [1, "z", None]}}),
        Settings(steps=3, stages={"a": {"steps": 1}}),
    ]  # fmt: skip
    for value, back in zip(values, decode(encode(values)), strict=True):
        assert type(back) is type(value)
        assert repr(back) == repr(value)


def test_wire_refuses_what_it_does_not_know() -> None:
    class Thing:
        pass

    with pytest.raises(TypeError, match="a Thing cannot cross a process"):
        encode([Thing()])
    with pytest.raises(TypeError, match="an array of complex128 cannot cross"):
        encode(np.zeros(1, complex))
    with pytest.raises(ValueError, match="unknown extension"):
        decode(b"\xd4\x63\x00")


@settings(max_examples=200, deadline=None)
@given(data=st.binary(max_size=64))
def test_wire_malformed_bytes_raise_value_error_only(data: bytes) -> None:
    try:
        decode(data)
    except ValueError:
        return
    assert encode(decode(data)) is not None


def test_wire_errors_keep_their_class_and_notes() -> None:
    error = ConfigError("engine.rows: 3")
    error.add_note("valid: 4 and more")
    back = error_from_wire(error_to_wire(error), "engine")
    assert type(back) is ConfigError and back.detail == "engine.rows: 3\nvalid: 4 and more"
    assert type(error_from_wire(error_to_wire(EngineError("x")), "engine")) is EngineError
    foreign = error_from_wire(error_to_wire(KeyError("q")), "trainer")
    assert type(foreign) is WorkerError and "trainer: KeyError: 'q'" in str(foreign)
    assert "Traceback" in foreign.detail or "KeyError" in foreign.detail


def test_wire_error_of_a_plugins_own_kind_arrives_as_the_kind_of_miles_that_it_is() -> None:
    """As a `WorkerError` an update that a server refused passed for the death of its worker."""

    class Refused(EngineError):
        pass

    class Again(Refused):
        pass

    error = Again("HTTP 400")
    error.add_note("a hint")
    back = error_from_wire(error_to_wire(error), "engine")
    assert (type(back), str(back), back.__notes__) == (EngineError, "HTTP 400", ["a hint"])


def test_wire_error_of_a_library_with_the_name_of_one_of_miles_does_not_pass_for_it() -> None:
    """torch's `CheckpointError` of a trainer's step arrived as miles' own, without a traceback."""
    foreign = type("CheckpointError", (RuntimeError,), {"__module__": "torch.utils.checkpoint"})
    back = error_from_wire(error_to_wire(foreign("other values")), "trainer")
    assert type(back) is WorkerError
    assert str(back) == "trainer: torch.utils.checkpoint.CheckpointError: other values"
    assert type(error_from_wire(error_to_wire(CheckpointError("full")), "")) is CheckpointError


def test_connection_frames_survive_any_chunking() -> None:
    async def main() -> list[Any]:
        seen: list[Any] = []
        lost = asyncio.Event()
        ours, theirs = socket.socketpair()
        for end in (ours, theirs):
            end.setblocking(False)
        loop = asyncio.get_running_loop()
        sender = Connection(seen.append, lambda: None)
        receiver = Connection(seen.append, lost.set)
        await loop.create_connection(lambda: sender, sock=ours)
        await loop.create_connection(lambda: receiver, sock=theirs)
        for n in range(50):
            sender.send([n, np.full(n * 1000, n, np.int32)])
        sender.close()
        await asyncio.wait_for(lost.wait(), 10)
        return seen

    seen = asyncio.run(main())
    assert [n for n, _ in seen] == list(range(50))
    assert all(len(a) == n * 1000 for n, a in seen)


def test_wire_error_of_a_group_is_the_first_in_it_with_the_traceback_of_all() -> None:
    inner = ExceptionGroup("two", [ConfigError("no such key"), KeyError("b")])
    back = error_from_wire(error_to_wire(ExceptionGroup("one", [inner])), "rollout")
    assert type(back) is ConfigError and str(back) == "no such key"
    foreign = error_from_wire(error_to_wire(ExceptionGroup("one", [KeyError("b")])), "rollout")
    assert str(foreign) == "rollout: KeyError: 'b'"
    assert any("Traceback" in note or "ExceptionGroup" in note for note in foreign.__notes__)
