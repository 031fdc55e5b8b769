"""Sessions: limits, lifetime, and what is there after a restart."""

import logging

import pytest

from miles import JournalError, RolloutError, SessionClosed, SessionConflict, SessionFull
from miles.session import Sessions
from tests.unit.session.talk import TITO, completion, rules, user


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def store(directory=None, clock=None, **keys):
    more = {} if clock is None else {"clock": clock}
    return Sessions(TITO, rules=rules(**keys), directory=directory, max_tokens=500, **more)


def play(talk, text="a"):
    return talk.commit(talk.prompt([user(text)], append=True), completion("x"))


def test_store_opens_finds_and_closes():
    sessions = store()
    talk = sessions.open(id="one", data={"who": "me"})
    assert sessions.get("one") is talk
    assert talk.data == {"who": "me"}
    assert talk.max_tokens == 500
    assert sessions.open().id != sessions.open().id
    assert len(sessions) == 3
    assert "one" in sessions
    play(talk)
    assert sessions.close("one") is talk
    assert len(talk.trajectory(reward=1.0).samples) == 1, "who holds it may ask"
    with pytest.raises(SessionClosed, match="session 'one': there is none") as caught:
        sessions.get("one")
    assert caught.value.status == 404
    with pytest.raises(SessionClosed):
        sessions.close("one")


def test_store_refuses_an_id_twice():
    sessions = store()
    sessions.open(id="one")
    with pytest.raises(SessionConflict, match="session one: it is open already") as caught:
        sessions.open(id="one")
    assert caught.value.status == 409


def test_store_holds_max_sessions_and_expires_idle_ones_first():
    clock = Clock()
    sessions = store(clock=clock, max_sessions=2, idle_s=10.0)
    sessions.open(id="one")
    sessions.open(id="two")
    with pytest.raises(SessionFull, match=r"2 are open; session\.max_sessions is 2") as caught:
        sessions.open(id="three")
    assert caught.value.status == 429
    clock.now = 9.0
    sessions.get("two")
    clock.now = 11.0
    sessions.open(id="three")
    assert {s.id for s in sessions} == {"two", "three"}


def test_expired_session_is_logged_and_its_trajectory_is_a_rollout_error(caplog):
    clock = Clock()
    sessions = store(clock=clock, idle_s=10.0)
    talk = sessions.open(id="one")
    play(talk)
    clock.now = 10.0
    with caplog.at_level(logging.WARNING):
        assert sessions.expire() == ["one"]
    assert "session one: expired: 1 turns are lost" in caplog.text
    with pytest.raises(RolloutError, match="expired after 10 s without a request") as caught:
        talk.trajectory(reward=1.0)
    assert caught.value.reason == "session_closed"
    with pytest.raises(SessionClosed):
        talk.prompt([user("b")], append=True)
    assert sessions.expire() == []
    assert sessions.metrics()["session/expired"] == 1.0


def test_session_that_is_being_answered_does_not_expire():
    clock = Clock()
    sessions = store(clock=clock, idle_s=10.0)
    talk = sessions.open(id="one")
    prompt = talk.prompt([user("a")])
    clock.now = 50.0
    assert sessions.expire() == []
    talk.commit(prompt, completion("x"))
    clock.now = 59.0
    assert sessions.expire() == []
    clock.now = 60.0
    assert sessions.expire() == ["one"]


def test_metrics_count_sessions_that_are_gone_too():
    sessions = store()
    play(sessions.open(id="one"))
    sessions.close("one")
    two = sessions.open(id="two")
    play(two)
    play(two)
    found = sessions.metrics()
    assert found["session/turns"] == 3.0
    assert found["session/token_mismatches"] == 0.0
    assert found["session/open"] == 1.0
    assert found["session/bytes"] == float(two.nbytes) > 0


def test_sessions_go_on_after_a_restart_and_closed_ones_do_not(tmp_path):
    first = store(tmp_path)
    one = first.open(id="one", data={"token": "t"})
    play(one)
    play(first.open(id="gone"))
    first.close("gone")
    with pytest.raises(JournalError, match="another process"):
        store(tmp_path)
    first.stop()
    second = store(tmp_path)
    assert [s.id for s in second] == ["one"]
    back = second.get("one")
    assert back.data == {"token": "t"}
    assert back.messages == one.messages
    play(back, "b")
    second.stop()
    third = store(tmp_path)
    assert third.get("one").turns == 2
    third.stop()


def test_expired_session_leaves_no_file(tmp_path):
    clock = Clock()
    sessions = store(tmp_path, clock=clock, idle_s=1.0)
    play(sessions.open(id="one"))
    clock.now = 2.0
    sessions.expire()
    assert not list(tmp_path.glob("*.journal"))
    sessions.stop()


def test_no_journal_writes_nothing(tmp_path):
    sessions = store(tmp_path / "none", journal=False)
    play(sessions.open())
    assert not (tmp_path / "none").exists()
    sessions.stop()


def test_store_keeps_data_of_the_last_sessions_that_ended_only():
    sessions = Sessions(TITO)
    for number in range(1030):
        sessions.open(id=f"s{number}", data={"n": number})
        assert sessions.gone(f"s{number}") == {}
        sessions.close(f"s{number}")
    assert sessions.gone("s1029") == {"n": 1029}
    assert sessions.gone("s6") == {"n": 6} and sessions.gone("s5") == {}
