"""Random conversations against a naive model that keeps every turn's whole prompt as a list."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from miles import SessionError
from tests.unit.session.talk import TITO, completion, session, user

WORDS = st.sampled_from(["", "a", "b", "ab"])
SAID = st.lists(st.sampled_from([65, 66, 200, 255]), max_size=3)


@dataclass
class Turn:
    """One turn of the naive model: everything, copied."""

    index: int
    parent: Turn | None
    messages: list  # all, up to and including the reply
    prompt: list[int]
    said: list[int]
    version: int
    finish: str
    children: list[Turn] = field(default_factory=list)

    def ids(self):
        return [*self.prompt, *self.said]


class Naive:
    """The branching rule over copies."""

    def __init__(self):
        self.turns: list[Turn] = []

    def parent(self, messages):
        fits = [
            t
            for t in self.turns
            if len(t.messages) <= len(messages) and t.messages == messages[: len(t.messages)]
        ]
        return max(fits, key=lambda t: (len(t.messages), t.index), default=None)

    def prompt(self, parent, messages):
        if parent is None:
            return TITO.render(messages).tolist()
        stored = np.array(parent.ids(), np.int32)
        new = TITO.extend(stored, parent.messages, messages[len(parent.messages) :])
        return [*parent.ids(), *new.tolist()]

    def leaves(self):
        return [t for t in self.turns if not t.children]


steps = st.lists(
    st.tuples(
        st.integers(0, 30),  # which turn is continued (or tried again)
        WORDS,
        SAID,
        st.booleans(),  # cut by the length limit
        st.sampled_from(["answer", "answer", "answer", "abandon", "later"]),
        st.booleans(),  # tried again instead of continued
    ),
    max_size=12,
)


@settings(max_examples=80, deadline=None)
@example(
    [
        (0, "a", [66], False, "answer", False),
        (0, "b", [], True, "answer", False),  # both of these two say [65]
        (1, "b", [65], True, "answer", True),
    ],
    "all",
)
@given(steps, st.sampled_from(["all", "drop_retries", "longest"]))
def test_branching_session_equals_the_naive_model(asked, keep):
    talk, naive, waiting = session(extension="branching", keep=keep), Naive(), []

    def answer(prompt, parent, messages, said, cut):
        finish = "length" if cut else "stop"
        ids = [*said, 257] if not cut else said or [65]
        # of the ids alone: turns of equal ids are told apart by nothing below
        version = 0 if parent is None else parent.version + len(ids) % 2
        turn = talk.commit(prompt, completion(ids, version=version, finish=finish))
        assert turn.index == prompt.index
        made = Turn(
            prompt.index, parent, [*messages, turn.message], prompt.tokens.tolist(), ids,
            version, finish,
        )  # fmt: skip
        naive.turns.append(made)
        if parent is not None:
            parent.children.append(made)

    for which, word, said, cut, fate, again in asked:
        chosen = naive.turns[which % len(naive.turns)] if naive.turns else None
        before = [] if chosen is None else chosen.messages[: -2 if again else None]
        messages = [*before, user(word)]
        parent = naive.parent(messages)
        if parent is not None and parent.finish == "length":
            try:
                talk.prompt(messages)
            except SessionError as error:
                assert error.status == 409  # noqa: PT017 - the message is tested elsewhere
                continue
            raise AssertionError("a turn cut by length was extended")
        prompt = talk.prompt(messages)
        assert prompt.tokens.tolist() == naive.prompt(parent, messages)
        assert prompt.tokens.tolist()[len(prompt.tokens) - len(prompt.added) :] == (
            prompt.added.tolist()
        )
        if fate == "abandon":
            talk.abandon(prompt)
        elif fate == "later":
            waiting.append((prompt, parent, messages, said, cut, prompt.tokens.tolist()))
        else:
            answer(prompt, parent, messages, said, cut)
    for prompt, parent, messages, said, cut, seen in waiting:
        assert prompt.tokens.tolist() == seen, "a prompt changed while it was being answered"
        answer(prompt, parent, messages, said, cut)

    if naive.turns:
        check_samples(talk, naive, keep)


def check_samples(talk, naive, keep):
    samples = talk.samples()
    leaves = sorted(naive.leaves(), key=lambda t: t.index)
    by_ids = {tuple(t.ids()) for t in leaves}
    assert {tuple(s.tokens.tolist()) for s in samples} <= by_ids
    if keep == "all":
        assert [s.tokens.tolist() for s in samples] == [t.ids() for t in leaves]
    if keep == "longest":
        assert len(samples) == 1
        assert len(samples[0].tokens) == max(map(len, by_ids))
    if keep == "drop_retries":
        assert [s.tokens.tolist() for s in samples] == [t.ids() for t in leaves if kept(t, naive)]
    for sample in samples:
        path = path_of(next(t for t in leaves if t.ids() == sample.tokens.tolist()))
        sampled = np.zeros(len(sample.tokens), bool)
        for turn in path:
            start = len(turn.prompt)
            sampled[start : start + len(turn.said)] = True
            at = np.arange(len(turn.said), dtype=np.float32)
            logprobs = sample.logprobs[start : start + len(turn.said)]
            np.testing.assert_array_equal(logprobs, -(at + 1) / 8)
        np.testing.assert_array_equal(sample.sampled, sampled)
        assert [s.version for s in sample.spans] == [t.version for t in path if t.said]
    trained = sum(int(s.trainable.sum()) for s in samples)
    on_paths = {
        t.index: len(t.said)
        for s in samples
        for t in path_of(next(t for t in leaves if t.ids() == s.tokens.tolist()))
    }
    if len({tuple(s.tokens.tolist()) for s in samples}) == len(samples):
        assert trained == sum(on_paths.values()), "shared tokens are trained exactly once"


def path_of(turn):
    found = []
    while turn is not None:
        found.append(turn)
        turn = turn.parent
    return found[::-1]


def kept(leaf, naive):
    siblings = [t for t in naive.turns if t.parent is leaf.parent and t is not leaf]
    asked = leaf.messages[:-1]
    return not any(
        t.messages[:-1] == asked and (t.children or t.index > leaf.index) for t in siblings
    )


linear_steps = st.lists(
    st.tuples(
        st.sampled_from(["next", "next", "next", "again", "edit", "deep", "abandon"]), WORDS, SAID
    ),
    max_size=10,
)


@settings(max_examples=80, deadline=None)
@given(linear_steps)
def test_linear_session_equals_a_list_of_turns(asked):
    """`turns` holds (messages asked with, whole prompt, ids said), the stored ones alone."""
    talk, turns, replies = session(), [], []
    for what, word, said in asked:
        history = [m for asked_with, reply in replies for m in (*asked_with, reply)]
        stored = [*turns[-1][0], *turns[-1][1]] if turns else []
        new = [user(word)]
        if what == "deep" and len(turns) >= 2:
            wrong = [user("never said"), *history[1:], *new]
            try:
                talk.prompt(wrong)
            except SessionError as error:
                assert "messages[0]: content is 'never said'" in str(error)  # noqa: PT017
                continue
            raise AssertionError("a deep change was accepted")
        if what in ("again", "edit") and turns:
            turns.pop()
            old, _ = replies.pop()
            new = list(old) if what == "again" else new
            history = [m for asked_with, reply in replies for m in (*asked_with, reply)]
            stored = [*turns[-1][0], *turns[-1][1]] if turns else []
        messages = [*history, *new]
        if turns:
            added = TITO.extend(np.array(stored, np.int32), history, new).tolist()
        else:
            added = TITO.render(new).tolist()
        prompt = talk.prompt(messages)
        assert prompt.tokens.tolist() == [*stored, *added]
        if what == "abandon":
            talk.abandon(prompt)
            continue
        ids = [*said, 257]
        turn = talk.commit(prompt, completion(ids))
        turns.append(([*stored, *added], ids))
        replies.append((new, turn.message))
    if turns:
        (sample,) = talk.samples()
        assert sample.tokens.tolist() == [*turns[-1][0], *turns[-1][1]]
        assert int(sample.trainable.sum()) == sum(len(ids) for _, ids in turns)
