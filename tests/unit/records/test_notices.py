"""Warnings told once: which reasons are the same one."""

import logging
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles.records.notices import Notices


def told(caplog: pytest.LogCaptureFixture, reasons: Sequence[str]) -> int:
    """How many of them reach people."""
    notices = Notices()
    caplog.clear()
    with caplog.at_level(logging.INFO):
        for step, reason in enumerate(reasons):
            notices.warn(f"no mismatch probe in step {step}", reason)
    assert len(caplog.records) == len(reasons)
    return sum(record.levelno == logging.WARNING for record in caplog.records)


@pytest.mark.parametrize(
    "reasons",
    [
        ["no answer in 3 s", "no answer in 41.5 s"],
        ["http://a.org:3000/generate: refused", "https://b-1.local/generate: refused"],
        ["engine 'blue': it died", "engine 'green': it died", 'engine "red": it died'],
        ["engine blue: it died", "engine green: it died"],
        ["cannot read /tmp/a/x.bin: gone", "cannot read ../b/y.json: gone"],
        ["cannot read 'runs/a b': gone", "cannot read 'runs/c b': gone"],
        ["[Errno 2] No such file: 'a.bin'", "[Errno 2] No such file: 'b.bin'"],
        ["[Errno 2] Cannot rename: 'a' -> 'b'", "[Errno 2] Cannot rename: 'c' -> 'd'"],
        ["node-a:3000 is silent", "node-b.local:17 is silent"],
        ["request '3f9a': no answer", "request 'c0de': no answer"],
        ["<Socket at 0x7f00ab12>: closed", "<Socket at 0xaf00cd>: closed"],
        ["session 0a1b2c3d4e: full", "session ffff0000aa: full"],
    ],
)
def test_notices_tell_a_reason_once_wherever_it_happens(
    caplog: pytest.LogCaptureFixture, reasons: list[str]
) -> None:
    assert told(caplog, reasons) == 1


@pytest.mark.parametrize(
    "reasons",
    [
        ["http://a.org/generate: refused", "http://a.org/generate: no answer in 3 s"],
        ["KeyError: 'logprobs'", "KeyError: 'meta_info'", "ValueError: 'logprobs'"],
        ["engine sglang: HTTP 503: no", "engine sglang: HTTP 404: no"],
        ["[Errno 111] Connect call failed", "[Errno 113] Connect call failed"],
        ["engine 'blue': it died", "engine 'blue': it hangs"],
        ["worker died: code 3", "worker hung: code 3"],
        ["the engine gave no tokens", "the engine gave no log-probs"],
        ["torch.OutOfMemoryError: all full", "torch.AcceleratorError: all full"],
    ],
)
def test_notices_tell_reasons_apart(caplog: pytest.LogCaptureFixture, reasons: list[str]) -> None:
    assert told(caplog, reasons) == len(reasons)


@given(
    places=st.lists(
        st.from_regex(r"https?://[a-z0-9.-]{1,9}(:\d{1,5})?/[a-z0-9_]{0,9}", fullmatch=True)
    ),
    said=st.lists(st.sampled_from(["it is gone", "no answer", "refused"])),
)
def test_notices_are_as_many_as_there_are_reasons(places: list[str], said: list[str]) -> None:
    counted: list[logging.LogRecord] = []
    log = logging.getLogger("miles.records.notices")
    handler = logging.Handler(logging.WARNING)
    handler.emit = counted.append  # type: ignore[method-assign]
    log.addHandler(handler)
    try:
        notices = Notices()
        for place in places:
            for words in said:
                notices.warn("evaluation of version 3, heldout", f"engine x: {place}: {words}")
    finally:
        log.removeHandler(handler)
    assert len(counted) == (len(set(said)) if places else 0)
