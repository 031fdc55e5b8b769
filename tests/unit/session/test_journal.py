"""The journal: whatever byte a file ends at, the session is the one of the last whole frame."""

import logging
import os
import signal
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles import JournalError, MilesError, SessionKeys, TokenMismatch
from miles.session import Session
from miles.session.journal import Journal
from miles.session.turns import Counters
from tests.unit.session.talk import TITO, TOOLS, completion, same_samples, session, user


def build(**keys):
    rules = SessionKeys(**{"max_tokens": 120, **keys})

    def make(id, data):
        return Session(id, TITO, rules=rules, data=data)

    return make


def state(talk):
    """Everything that can be seen of a session."""
    try:
        samples, failure = talk.samples(), ""
    except (MilesError, TokenMismatch) as error:
        samples, failure = (), str(error)
    return {
        "id": talk.id,
        "data": dict(talk.data),
        "counters": talk.counters.plain(),
        "messages": list(talk.messages),
        "turns": talk.turns,
        "tokens": talk.tokens,
        "truncated": talk.truncated,
        "failure": failure,
        "samples": samples,
    }


def same(one, two):
    return same_samples(one.pop("samples"), two.pop("samples")) and one == two


def recorded(folder, **keys):
    journal = Journal(folder)
    talk = build(**keys)("s/1", {"token": "abc", "n": 2**70})
    journal.opened(talk)
    talk.recorder = journal
    return journal, talk, folder / "s%2F1.journal"


op = st.tuples(
    st.sampled_from(["next", "next", "next", "again", "branch", "long", "forged", "abandon"]),
    st.sampled_from(["", "a", "\ud800 lone", "é🦊"]),
    st.booleans(),
)


def play(talk, operations):
    """Random turns of a session, after each of which `yield`."""
    experts = np.arange(12, dtype=np.uint16).reshape(3, 2, 2)
    for what, word, rich in operations:
        word = word.encode("utf-8", "replace").decode()
        given = list(talk.messages)
        if what in ("again", "branch") and len(given) >= 2:
            given = given[:-2] if what == "again" else given[:0]
        given.append(user("x" * 150 if what == "long" else word))
        try:
            prompt = talk.prompt(given, tools=TOOLS)
        except MilesError:
            yield
            continue
        if what == "abandon":
            talk.abandon(prompt)
        elif what == "forged":
            wrong = replace(prompt, tokens=prompt.tokens + 1)
            with pytest.raises(TokenMismatch):
                talk.commit(wrong, completion("x"))
            talk.abandon(prompt)
        else:
            more = {"experts": experts, "truncated_logprobs": np.zeros(3, np.float32)}
            one = completion([7, 255, 257], finish="stop" if word else "length", cached_tokens=1)
            talk.commit(prompt, replace(one, **more) if rich else one)
        yield


@settings(max_examples=40, deadline=None)
@given(
    st.lists(op, max_size=6),
    st.sampled_from(["linear", "branching"]),
    st.sampled_from(["fail", "mask"]),
    st.data(),
)
def test_replay_after_a_cut_at_any_byte_gives_the_session_of_the_last_whole_frame(
    tmp_path_factory, operations, extension, on_mismatch, data
):
    keys = {"extension": extension, "on_mismatch": on_mismatch}
    folder = tmp_path_factory.mktemp("journal")
    journal, talk, path = recorded(folder, **keys)
    sizes, states = [path.stat().st_size], [state(talk)]
    for _ in play(talk, operations):
        if path.stat().st_size > sizes[-1]:  # refusals alone are not written
            sizes.append(path.stat().st_size)
            states.append(state(talk))
    whole = path.read_bytes()
    cut = data.draw(st.integers(sizes[0], len(whole)), label="cut")
    path.write_bytes(whole[:cut])
    (back,) = journal.replay(build(**keys))
    last = max(i for i, size in enumerate(sizes) if size <= cut)
    assert same(state(back), dict(states[last]))
    assert path.stat().st_size == sizes[last]
    back.recorder = journal
    list(play(back, [("next", "on", False)]))
    (again,) = journal.replay(build(**keys))
    left, right = state(again), state(back)
    for one in (left, right):
        one["counters"]["conflicts"] = 0  # of a refused request, nothing is written
    assert same(left, right)
    journal.close()


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_any_damaged_byte_ends_the_file_there(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("journal")
    journal, talk, path = recorded(folder)
    ends = [path.stat().st_size]
    for _ in play(talk, [("next", "a", True)] * 3):
        ends.append(path.stat().st_size)
    whole = bytearray(path.read_bytes())
    at = data.draw(st.integers(ends[0], len(whole) - 1), label="damaged byte")
    whole[at] ^= 1 << data.draw(st.integers(0, 7), label="bit")
    path.write_bytes(whole)
    (back,) = journal.replay(build())
    assert back.turns == sum(end <= at for end in ends) - 1
    journal.close()


def test_torn_end_is_said_and_a_file_without_a_beginning_is_set_aside(tmp_path, caplog):
    journal, talk, path = recorded(tmp_path)
    list(play(talk, [("next", "a", False)]))
    path.write_bytes(path.read_bytes()[:-3])
    (tmp_path / "other.journal").write_bytes(b"nonsense")
    with caplog.at_level(logging.WARNING):
        (back,) = journal.replay(build())
    assert back.turns == 0
    assert "bytes are no whole frame; the session continues from what is before them" in caplog.text
    assert "s%2F1.journal" in caplog.text
    assert (tmp_path / "other.damaged").read_bytes() == b"nonsense"
    assert journal.replay(build())[0].id == "s/1"


def test_counts_that_this_version_does_not_know_are_left_out(tmp_path):
    class Newer(Counters):
        def plain(self):
            return {**super().plain(), "novel": 1}

    journal, talk, _ = recorded(tmp_path)
    for words in ("one", "two"):
        talk.counters = Newer(turns=talk.counters.turns)
        talk.commit(talk.prompt([user(words)], append=True), completion("yes"))
    journal.close()
    again = Journal(tmp_path)
    (found,) = again.replay(build())
    assert (found.turns, found.counters.turns) == (2, 2)
    again.close()


def test_directory_belongs_to_one_process(tmp_path):
    journal = Journal(tmp_path)
    with pytest.raises(JournalError, match="another process writes here; give each its own"):
        Journal(tmp_path)
    journal.close()
    journal.close()
    Journal(tmp_path).close()


def test_directory_that_cannot_be_made_says_so(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(JournalError, match="cannot be used"):
        Journal(tmp_path / "file" / "below")


def test_turn_that_cannot_be_written_is_not_stored(tmp_path, monkeypatch):
    _, talk, path = recorded(tmp_path)
    prompt = talk.prompt([user("a")])
    before = path.read_bytes()
    write = os.write
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda file, data: write(file, data[:10]))
        with pytest.raises(
            JournalError, match=r"session s/1: 10 of \d+ bytes were written"
        ) as caught:
            talk.commit(prompt, completion("x"))
    assert caught.value.status == 500
    assert talk.turns == 0
    assert path.read_bytes() == before, "later frames would be lost behind a torn one"
    talk.commit(prompt, completion("x"))
    assert talk.turns == 1


def test_images_and_odd_values_in_messages_come_back(tmp_path):
    journal, talk, _ = recorded(tmp_path)
    odd = {"role": "user", "content": "a", "extra": {"n": 2**80, "s": "\ud800", "b": b"\x00\xff"}}
    talk.commit(talk.prompt([odd]), completion("x"))
    (back,) = journal.replay(build())
    assert back.messages[0] == odd


WRITER = """
import sys
from pathlib import Path
sys.path.insert(0, {root!r})
from tests.unit.session.test_journal import recorded, completion, user
journal, talk, _ = recorded(Path(sys.argv[1]), max_tokens=0)
for turn in range(100000):
    talk.commit(talk.prompt([user(str(turn))], append=True), completion("x"))
    print(turn, flush=True)
"""


def test_every_turn_that_was_answered_is_there_after_the_process_was_killed(tmp_path, request):
    code = WRITER.format(root=str(request.config.rootpath))
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as writer:
        for line in writer.stdout:
            if int(line) >= 40:
                break
        writer.send_signal(signal.SIGKILL)
        answered = list(writer.stdout)
    last = int(answered[-1]) if answered and answered[-1].endswith("\n") else 40
    journal = Journal(tmp_path)
    (back,) = journal.replay(build(max_tokens=0))
    assert back.turns >= last + 1
    assert back.messages[2 * last]["content"] == str(last)


def test_session_without_a_recorder_writes_nothing(tmp_path):
    talk = session()
    talk.commit(talk.prompt([user("a")]), completion("x"))
    assert not list(tmp_path.iterdir())
