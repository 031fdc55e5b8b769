"""What comes over the channel of a box, whoever wrote it, and what is kept of an output."""

from __future__ import annotations

import asyncio
import itertools
import os
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles import SandboxError
from miles_plugins.sandbox.channel import Channel
from miles_plugins.sandbox.inside.commands import Stream
from miles_plugins.sandbox.inside.supervisor import REPLY

LIMIT = 10_000


class Transport:
    """Says whether the channel hung up."""

    def __init__(self) -> None:
        self.aborted = False

    def abort(self) -> None:
        self.aborted = True


def hear(pieces: list[bytes], numbers: range):
    """Answers, or errors, of those who wait for `numbers`, and whether the channel hung up."""

    async def run():
        channel, transport = Channel(SandboxError, LIMIT), Transport()
        channel.connection_made(transport)
        waiting = [channel.expect(number) for number in numbers]
        for piece in pieces:
            channel.data_received(piece)
        ended = [w.exception() or w.result() if w.done() else None for w in waiting]
        for each in waiting:
            each.cancel()
        return ended, transport.aborted

    return asyncio.run(run())


def cut(data: bytes, places: list[int]) -> list[bytes]:
    ends = sorted({min(place, len(data)) for place in places} | {0, len(data)})
    return [data[a:b] for a, b in itertools.pairwise(ends)]


@settings(max_examples=60, deadline=None)
@given(
    bodies=st.lists(st.binary(max_size=200), min_size=1, max_size=6),
    places=st.lists(st.integers(0, 1000)),
)
def test_channel_hears_frames_wherever_they_are_cut(bodies, places) -> None:
    frames = [
        REPLY.pack(REPLY.size - 4 + len(body), i, 1, i, -i, i, 2 * i, len(body) // 2) + body
        for i, body in enumerate(bodies)
    ]
    heard, aborted = hear(cut(b"".join(frames), places), range(len(bodies)))
    assert not aborted
    assert [(r.body, r.code, r.flags, r.err_total, r.split) for r in heard] == [
        (body, -i, i, 2 * i, len(body) // 2) for i, body in enumerate(bodies)
    ]


@settings(max_examples=100, deadline=None)
@given(data=st.binary(max_size=400), places=st.lists(st.integers(0, 400), max_size=5))
def test_channel_makes_of_any_bytes_an_answer_an_error_or_nothing(data, places) -> None:
    heard, aborted = hear(cut(data, places), range(3))
    assert any(isinstance(each, SandboxError) for each in heard) <= aborted
    assert not aborted or not any(each is None for each in heard)  # nobody waits for ever


@pytest.mark.parametrize("size", [0, REPLY.size - 5, LIMIT + 1, 2**32 - 1])
def test_channel_refuses_a_length_before_it_waits_for_as_much(size: int) -> None:
    heard, aborted = hear([struct.pack("!I", size)], range(1))
    assert aborted and f"announced {size} bytes" in str(heard[0])


@settings(max_examples=100, deadline=None)
@given(pieces=st.lists(st.binary(min_size=1, max_size=300), max_size=20), half=st.integers(1, 60))
def test_stream_keeps_beginning_and_end_of_anything(pieces, half: int) -> None:
    reading, writing = os.pipe()
    stream, said = Stream(reading, 2 * half), b"".join(pieces)
    try:
        for piece in pieces:
            os.write(writing, piece)
            assert stream.take()
        os.close(writing)
        assert not stream.take()
    finally:
        os.close(reading)
    kept = stream.end()
    assert stream.total == len(said)
    assert kept == (said if len(said) <= 2 * half else said[:half] + said[-half:])
