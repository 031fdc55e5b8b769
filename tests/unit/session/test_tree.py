"""Session: where requests attach, what is refused and how, what becomes of it all."""

import logging
import tracemalloc
from dataclasses import replace
from time import perf_counter

import numpy as np
import pytest

from miles import (
    EngineError,
    EpisodeError,
    GenerationAborted,
    HistoryMismatch,
    PromptTooLong,
    SessionClosed,
    SessionConflict,
    SessionFull,
    Span,
    TokenMismatch,
    UnsupportedRequest,
)
from miles.session import Session
from miles.testing import FakeTito
from tests.unit.session.talk import (
    TITO,
    TOOLS,
    assistant,
    call,
    completion,
    rules,
    say,
    session,
    user,
)

BRANCHING = {"extension": "branching"}


# ---------------------------------------------------------------- the session owns tokens


def test_first_prompt_is_rendered_and_later_ones_extend_what_was_sampled():
    talk = session()
    odd = [255, 254, 65, 257]  # no UTF-8: no tokenizer would give these back
    first, turn = say(talk, [user("a")], odd)
    assert first.tokens.tolist() == TITO.render([user("a")]).tolist()
    history = [user("a"), turn.message]
    second, _ = say(talk, [*history, user("b")], "ok")
    assert second.tokens.tolist()[: len(first.tokens) + 4] == [*first.tokens, *odd]
    assert second.parent == 0
    assert second.new == (user("b"),)
    (sample,) = talk.samples()
    assert sample.tokens.tolist() == [*second.tokens, *b"ok", 257]
    assert int(sample.trainable.sum()) == len(odd) + 3
    assert (talk.turns, talk.tokens) == (2, len(sample.tokens))


def test_prompts_of_a_linear_path_are_views_and_nobody_can_write_into_them():
    talk = session()
    say(talk, [user("a" * 500)], "x", append=True)
    second, _ = say(talk, [user("b")], "y", append=True)
    third = talk.prompt([user("c")], append=True)
    assert np.shares_memory(second.tokens, third.tokens)
    with pytest.raises(ValueError, match="read-only"):
        third.tokens[0] = 1


def test_turn_says_what_an_answer_needs():
    talk = session()
    spans = (Span(start=0, stop=1, version=4), Span(start=1, stop=3, version=5))
    _, turn = say(talk, [user("a")], "hi", spans=spans, cached_tokens=2)
    assert (turn.index, turn.text, turn.finish, turn.tokens) == (0, "hi", "stop", 3)
    assert turn.message == assistant("hi")
    assert turn.prompt_tokens == len(TITO.render([user("a")]))
    assert (turn.cached_tokens, turn.versions) == (2, (4, 5))
    assert turn.completion.logprobs.tolist() == [-0.125, -0.25, -0.375]


def test_stored_spelling_stays_authoritative_when_a_history_matches():
    talk = session(compare="json_arguments")
    say(talk, [user("a")], '\n!call add {"x":1,"y":2}', tools=TOOLS)
    replayed = assistant(None, tool_calls=[call("add", '{"y": 2, "x": 1}', "call_0")])
    answer = {"role": "tool", "content": "3", "tool_call_id": "call_0"}
    say(talk, [user("a"), replayed, answer], "3", tools=list(TOOLS))
    stored = talk.messages[1]["tool_calls"][0]["function"]["arguments"]
    assert stored == '{"x":1,"y":2}'
    assert b'{"x":1,"y":2}' in bytes(i for i in talk.samples()[0].tokens.tolist() if i < 256)


def test_injected_assistant_messages_are_history_and_never_trainable():
    talk = session()
    injected = [user("a"), assistant("I was never sampled"), user("b")]
    first, turn = say(talk, injected, "yes")
    (sample,) = talk.samples()
    assert np.flatnonzero(sample.sampled).tolist() == list(
        range(len(first.tokens), len(first.tokens) + 4)
    )
    say(talk, [*injected, turn.message, user("c"), assistant("nor I"), user("d")], "so")
    (sample,) = talk.samples()
    assert int(sample.trainable.sum()) == 4 + 3
    assert talk.turns == 2


@pytest.mark.parametrize("extension", ["linear", "branching"])
def test_request_that_ends_with_an_assistant_message_is_refused(extension):
    talk = session(extension=extension)
    with pytest.raises(UnsupportedRequest, match=r"messages\[1\]: the request ends with an assis"):
        talk.prompt([user("a"), assistant("b")])
    with pytest.raises(UnsupportedRequest, match="messages: there are none"):
        talk.prompt([])


# ---------------------------------------------------------------- linear


def test_linear_retry_takes_the_place_of_the_last_turn():
    talk = session()
    _, one = say(talk, [user("a")], "first")
    _, _ = say(talk, [user("a"), one.message, user("b")], "bad")
    retry, better = say(talk, [user("a"), one.message, user("b")], "good")
    assert retry.replaces == 1
    assert talk.turns == 2
    assert talk.counters.rollbacks == 1
    (sample,) = talk.samples()
    assert TITO.decode(sample.tokens).endswith("good<end>")
    assert "bad" not in TITO.decode(sample.tokens)
    say(talk, [user("a"), one.message, user("b"), better.message, user("c")], "on")
    assert TITO.decode(talk.samples()[0].tokens).endswith(
        "good<end><turn>user\nc<end><turn>assistant\non<end>"
    )


def test_linear_retry_rolls_back_to_empty():
    talk = session()
    say(talk, [user("a")], "first")
    prompt, _ = say(talk, [user("something else")], "second")
    assert prompt.parent == -1
    assert (talk.turns, talk.counters.rollbacks) == (1, 1)
    assert talk.samples()[0].tokens.tolist() == [*prompt.tokens, *b"second", 257]


def test_linear_retry_that_comes_to_nothing_leaves_the_turn():
    talk = session()
    say(talk, [user("a")], "first")
    before = talk.samples()
    talk.abandon(talk.prompt([user("b")]))
    assert talk.turns == 1
    assert talk.counters.rollbacks == 0
    assert talk.samples()[0].tokens.tolist() == before[0].tokens.tolist()


def test_linear_refuses_anything_deeper_and_says_which_message_differs_and_how():
    talk = session()
    _, one = say(talk, [user("a")], "first")
    _, two = say(talk, [user("a"), one.message, user("b")], "second")
    with pytest.raises(HistoryMismatch) as caught:
        talk.prompt([user("a"), assistant("forged"), user("b"), two.message, user("c")])
    assert str(caught.value).startswith(
        "messages[1]: content is 'forged', recorded was 'first'; a request must continue the 4 "
        "recorded messages, or repeat the last turn (from message 2 on)"
    )
    assert caught.value.status == 400
    with pytest.raises(HistoryMismatch, match=r"messages\[1\]: missing, recorded was one of role"):
        talk.prompt([user("a")])
    assert talk.turns == 2


def test_linear_refuses_the_last_reply_in_other_words_instead_of_losing_it():
    talk = session()
    say(talk, [user("a")], "hello")
    with pytest.raises(HistoryMismatch, match=r"messages\[1\]: content is 'hello ', recorded was"):
        talk.prompt([user("a"), assistant("hello "), user("b")])
    assert (talk.turns, talk.counters.rollbacks) == (1, 0)
    retry, _ = say(talk, [user("a")], "again")
    assert retry.replaces == 0


def test_linear_refuses_other_tools_in_a_later_turn():
    talk = session()
    _, one = say(talk, [user("a")], "first", tools=TOOLS)
    _, two = say(talk, [user("a"), one.message, user("b")], "second", tools=TOOLS)
    with pytest.raises(HistoryMismatch, match="tools: none offered, add when the conversation"):
        talk.prompt([user("a"), one.message, user("b"), two.message, user("c")])


def test_linear_refuses_the_later_of_two_requests_at_once():
    talk = session()
    first = talk.prompt([user("a")])
    with pytest.raises(SessionConflict, match="another request is being answered") as caught:
        talk.prompt([user("a")])
    assert caught.value.status == 409
    assert talk.counters.conflicts == 1
    talk.commit(first, completion("x"))
    assert talk.turns == 1


def test_linear_extends_a_turn_that_ended_by_length():
    talk = session()
    _, cut = say(talk, [user("a")], "cut sho", finish="length")
    prompt, _ = say(talk, [user("a"), cut.message, user("b")], "ok")
    assert "cut sho<end><turn>user\nb<end>" in TITO.decode(prompt.tokens)


# ---------------------------------------------------------------- branching


def test_branching_attaches_to_the_deepest_prefix_and_deletes_nothing():
    talk = session(**BRANCHING)
    _, one = say(talk, [user("a")], "first")
    history = [user("a"), one.message]
    deep, two = say(talk, [*history, user("b")], "second")
    side, _ = say(talk, [*history, user("c")], "other")
    assert (deep.parent, side.parent) == (0, 0)
    again, _ = say(talk, [*history, user("b"), two.message, user("d")], "third")
    assert again.parent == 1
    assert (talk.turns, talk.counters.branches) == (4, 1)
    texts = [TITO.decode(s.tokens).rpartition("\n")[2] for s in talk.samples()]
    assert texts == ["other<end>", "third<end>"]


def test_shared_tokens_are_trainable_in_exactly_one_sample():
    talk = session(**BRANCHING)
    _, one = say(talk, [user("a")], "shared")
    for text in "xyz":
        say(talk, [user("a"), one.message, user(text)], text)
    samples = talk.samples()
    assert [int(s.sampled.sum()) for s in samples] == [9, 9, 9]
    assert [int(s.trainable.sum()) for s in samples] == [9, 2, 2]


def test_branching_keeps_both_of_two_racing_requests():
    talk = session(**BRANCHING)
    one, two = talk.prompt([user("a")]), talk.prompt([user("a")])
    assert one.index != two.index
    talk.commit(two, completion("second"))
    talk.commit(one, completion("first"))
    texts = [TITO.decode(s.tokens).rpartition("\n")[2] for s in talk.samples()]
    assert texts == ["first<end>", "second<end>"]


def test_prompt_keeps_its_tokens_while_another_branch_is_stored():
    talk = session(**BRANCHING)
    _, one = say(talk, [user("a")], "first")
    slow = talk.prompt([user("a"), one.message, user("slow")])
    before = slow.tokens.tolist()
    say(talk, [user("a"), one.message, user("quick and rather long")], "done")
    assert slow.tokens.tolist() == before
    talk.commit(slow, completion("late"))
    assert [s.tokens.tolist()[: len(before)] == before for s in talk.samples()] == [True, False]


def test_branching_refuses_to_extend_a_turn_that_ended_by_length():
    talk = session(**BRANCHING)
    _, cut = say(talk, [user("a")], "cut", finish="length")
    with pytest.raises(SessionConflict, match="turn 0 was cut by the length limit") as caught:
        talk.prompt([user("a"), cut.message, user("b")])
    assert caught.value.status == 409
    say(talk, [user("a")], "whole")
    assert len(talk.samples()) == 2


def test_branching_holds_max_turns_at_most():
    talk = session(max_turns=2, **BRANCHING)
    say(talk, [user("a")], "one")
    waiting = talk.prompt([user("b")])
    with pytest.raises(SessionFull, match=r"it holds 1 turns; session\.max_turns is 2") as caught:
        talk.prompt([user("c")])
    assert caught.value.status == 429
    talk.abandon(waiting)
    say(talk, [user("c")], "two")


def test_linear_retry_is_possible_in_a_full_session():
    talk = session(max_turns=1)
    say(talk, [user("a")], "one")
    say(talk, [user("a")], "two")
    with pytest.raises(SessionFull):
        talk.prompt([user("b")], append=True)


def test_branching_takes_other_tools_for_another_conversation():
    talk = session(**BRANCHING)
    _, one = say(talk, [user("a")], "first", tools=TOOLS)
    prompt, _ = say(talk, [user("a"), one.message, user("b")], "second")
    assert prompt.parent == -1
    assert "<turn>tools" not in TITO.decode(prompt.tokens)


@pytest.mark.parametrize(
    ("keep", "texts"),
    [
        ("all", ["first", "retry", "once more", "deep and long"]),
        ("drop_retries", ["once more", "deep and long"]),
        ("longest", ["deep and long"]),
    ],
)
def test_keep_chooses_leaves(keep, texts):
    talk = session(keep=keep, **BRANCHING)
    say(talk, [user("a")], "first")
    _, kept = say(talk, [user("a")], "continued")
    say(talk, [user("a")], "retry")
    history = [user("a"), kept.message, user("b")]
    say(talk, [*history[:2], user("c")], "tried")
    say(talk, [*history[:2], user("c")], "once more")
    say(talk, history, "deep and long")
    found = [
        TITO.decode(s.tokens).rpartition("\n")[2].removesuffix("<end>") for s in talk.samples()
    ]
    assert found == (texts if keep != "all" else ["first", "retry", "tried", *texts[2:]])


# ---------------------------------------------------------------- mismatches


def forged(prompt):
    tokens = prompt.tokens.copy()
    tokens[3] = ord("X")
    return replace(prompt, tokens=tokens)


def test_commit_that_does_not_extend_the_stored_tokens_fails_the_trajectory():
    talk = session()
    say(talk, [user("abc")], "first", append=True)
    prompt = talk.prompt([user("b")], append=True)
    with pytest.raises(TokenMismatch) as caught:
        talk.commit(forged(prompt), completion("x"))
    talk.abandon(prompt)
    said = str(caught.value)
    assert "session s: turn 1" in said
    assert "token 3 differs" in said
    assert "stored '<turn>user\\nabc<end>" in said
    assert "given '<turn>usXr\\nabc<end>" in said
    assert caught.value.status == 500
    assert talk.counters.token_mismatches == 1
    with pytest.raises(TokenMismatch, match="token 3 differs"):
        talk.trajectory(reward=1.0)
    with pytest.raises(TokenMismatch, match="token 3 differs"):
        talk.prompt([user("b")], append=True)


def test_commit_of_an_equal_prompt_that_was_away_is_taken():
    talk = session()
    prompt = talk.prompt([user("abc")])
    talk.commit(replace(prompt, tokens=prompt.tokens.copy()), completion("x"))
    assert talk.turns == 1


def test_masked_mismatch_leaves_its_tokens_out_and_the_trajectory_goes_on():
    talk = session(on_mismatch="mask")
    say(talk, [user("abc")], "first", append=True)
    prompt = talk.prompt([user("b")], append=True)
    with pytest.raises(TokenMismatch):
        talk.commit(forged(prompt), completion("x"))
    talk.abandon(prompt)
    assert talk.counters.token_mismatches == 1
    assert "token mismatch" in talk.warnings[0]
    say(talk, [user("b")], "second", append=True)
    (sample,) = talk.trajectory(reward=1.0).samples
    assert int(sample.trainable.sum()) == 6 + 7


class Rewriting(FakeTito):
    """A template that is not append-only, and says so when asked to extend."""

    def extend(self, stored, history, messages, *, tools=()):
        raise TokenMismatch("the template is not append-only: token 2 differs")


def test_handler_that_cannot_extend_is_a_mismatch_of_the_session():
    talk = session(tito=Rewriting())
    say(talk, [user("a")], "x", append=True)
    with pytest.raises(TokenMismatch, match="not append-only"):
        talk.prompt([user("b")], append=True)
    assert talk.counters.token_mismatches == 1
    with pytest.raises(TokenMismatch):
        talk.samples()


# ---------------------------------------------------------------- templates that drop reasoning


class Forgetful(FakeTito):
    """Shows reasoning in what is said, drops it from every turn before the last user message."""

    def _turn(self, message):
        if text := message.get("reasoning_content"):
            message = {**message, "content": f"[{text}]{message['content']}"}
        return super()._turn(message)

    def render(self, messages, *, tools=()):
        last = max((i for i, m in enumerate(messages) if m["role"] == "user"), default=-1)
        shown = [
            {k: v for k, v in m.items() if k != "reasoning_content"} if i < last else m
            for i, m in enumerate(messages)
        ]
        return super().render(shown, tools=tools)

    def parse(self, tokens, *, tools=()):
        message = super().parse(tokens, tools=tools)
        thought, found, rest = message["content"].partition("]")
        return {**message, "content": rest, "reasoning_content": thought[1:]} if found else message


class Knowing(Forgetful):
    """Says itself when it rewrites."""

    def rewrites(self, history, messages, *, tools=()):
        return any(m.get("reasoning_content") for m in history) and messages[-1]["role"] == "user"


@pytest.mark.parametrize("tito", [Forgetful(), Knowing()])
def test_keep_counts_that_the_template_would_drop_reasoning(tito):
    talk = session(tito=tito)
    say(talk, [user("a")], "[hm]yes", append=True)
    prompt, _ = say(talk, [user("b")], "no", append=True)
    assert "[hm]yes" in TITO.decode(prompt.tokens)
    assert talk.counters.kept_history == 1
    say(talk, [{"role": "tool", "content": "1"}], "so", append=True)
    assert talk.counters.kept_history == (2 if type(tito) is Forgetful else 1)
    assert len(talk.samples()) == 1


@pytest.mark.parametrize("tito", [Forgetful(), Knowing()])
@pytest.mark.parametrize("extension", ["linear", "branching"])
def test_rebase_opens_a_branch_when_the_template_would_rewrite_history(tito, extension):
    talk = session(tito=tito, history="rebase", extension=extension)
    _, one = say(talk, [user("a")], "[hm]yes")
    history = [user("a"), one.message, user("b")]
    prompt, two = say(talk, history, "no")
    assert prompt.fresh
    assert prompt.tokens.tolist() == tito.render(history).tolist()
    assert (talk.counters.rebased, talk.counters.branches) == (1, 0)
    first, second = talk.samples()
    assert TITO.decode(first.tokens).endswith("[hm]yes<end>")
    assert "hm" not in TITO.decode(second.tokens)
    assert [int(s.trainable.sum()) for s in (first, second)] == [8, 3]
    after, _ = say(talk, [*history, two.message, user("c")], "well")
    assert after.parent == prompt.index
    assert not after.fresh, "what the template dropped is dropped already"
    assert len(talk.samples()) == 2
    say(talk, [*talk.messages, user("d")], "[ah]e")
    again, _ = say(talk, [*talk.messages, user("f")], "g")
    assert again.fresh, "and it drops what was thought since"
    assert len(talk.samples()) == 3


def test_rebase_follows_a_handler_that_cannot_extend():
    talk = session(tito=Rewriting(), history="rebase")
    say(talk, [user("a")], "x", append=True)
    prompt, _ = say(talk, [user("b")], "y", append=True)
    assert prompt.fresh
    assert talk.counters.token_mismatches == 0
    assert len(talk.samples()) == 2


def test_linear_retry_of_a_rebased_turn_gives_the_branch_before_back():
    talk = session(tito=Forgetful(), history="rebase")
    _, one = say(talk, [user("a")], "[hm]yes")
    say(talk, [user("a"), one.message, user("b")], "no")
    say(talk, [user("a"), one.message, user("b")], "better")
    assert talk.counters.rollbacks == 1
    texts = [TITO.decode(s.tokens).rpartition("\n")[2] for s in talk.samples()]
    assert texts == ["[hm]yes<end>", "better<end>"]


# ---------------------------------------------------------------- role_text


def test_role_text_says_when_it_took_one_history_for_another(caplog):
    talk = session(compare="role_text")
    say(talk, [user("a")], "\n!call add {}", tools=TOOLS)
    forged_call = assistant("", tool_calls=[call("add", "{}", "call_9")])
    answer = {"role": "tool", "content": "3", "tool_call_id": "call_9"}
    with caplog.at_level(logging.WARNING):
        talk.prompt([user("a"), forged_call, answer], tools=TOOLS)
    assert talk.counters.unmatched_tool_ids == 1
    assert "these tool-call ids do not correspond: call_9" in caplog.text
    assert "call_9" in talk.warnings[0]


def test_role_text_is_quiet_when_ids_correspond(caplog):
    talk = session(compare="role_text")
    _, turn = say(talk, [user("a")], "\n!call add {}", tools=TOOLS)
    answer = {"role": "tool", "content": "3", "tool_call_id": turn.message["tool_calls"][0]["id"]}
    talk.prompt([user("a"), assistant(""), answer], tools=TOOLS)
    assert talk.counters.unmatched_tool_ids == 0
    assert not caplog.text


# ---------------------------------------------------------------- limits and faults


def test_prompt_that_leaves_no_room_marks_the_session_truncated():
    talk = session(max_tokens=40)
    say(talk, [user("a")], "first", append=True)
    with pytest.raises(PromptTooLong, match="leaves no room in a context of 40"):
        talk.prompt([user("b" * 40)], append=True)
    assert talk.truncated
    assert talk.counters.truncated == 1
    assert talk.samples()[0].finish == "length"
    assert talk.trajectory(reward=0.0).text == "first"


def test_the_shorter_of_two_limits_counts():
    assert session(max_tokens=40).max_tokens == 40
    assert session(max_tokens=None).max_tokens == 0
    assert Session("s", TITO, rules=rules(max_tokens=30), max_tokens=40).max_tokens == 30
    assert Session("s", TITO, rules=rules(max_tokens=30)).max_tokens == 30


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ({"logprobs": np.zeros(1, np.float32)}, "1 per-token values for 3 sampled tokens"),
        ({"experts": np.zeros((4, 1, 1), np.uint8)}, "4 per-token values for 3 sampled tokens"),
        ({"spans": ()}, "spans cover 0 of 3 sampled tokens"),
        ({"spans": (Span(start=1, stop=3, version=5),)}, r"span \[1, 3\) does not follow token 0"),
        ({"spans": (Span(start=0, stop=3, version=4),)}, "under version 4 after version 5"),
        ({"tokens": np.zeros(3, np.int64)}, "int64 tokens, not int32"),
    ],
)
def test_completion_that_contradicts_itself_is_the_engines_fault(fault, words):
    talk = session()
    say(talk, [user("a")], "x", version=5, append=True)
    prompt = talk.prompt([user("b")], append=True)
    with pytest.raises(EngineError, match=f"session s: turn 1: the engine gave .*{words}"):
        talk.commit(prompt, completion("hi", version=5, **fault))
    talk.abandon(prompt)
    say(talk, [user("b")], "hi", version=5, append=True)
    assert talk.turns == 2


def test_aborted_completion_is_not_stored():
    talk = session()
    prompt = talk.prompt([user("a")])
    with pytest.raises(GenerationAborted, match="session s: turn 0 was aborted"):
        talk.commit(prompt, completion("x", finish="abort"))
    talk.abandon(prompt)
    with pytest.raises(EpisodeError, match="nothing was sampled"):
        talk.samples()


def test_session_whose_first_prompt_has_no_room_says_so_instead_of_that_nothing_was_sampled():
    talk = session(max_tokens=2)
    with pytest.raises(PromptTooLong):
        talk.prompt([user("a")])
    with pytest.raises(PromptTooLong, match="session s: nothing was sampled"):
        talk.trajectory(reward=0.0)


def test_prompt_is_committed_once():
    talk = session()
    prompt, _ = say(talk, [user("a")], "x")
    with pytest.raises(SessionConflict, match="prompt 0 is not being answered; commit it once"):
        talk.commit(prompt, completion("x"))
    talk.abandon(prompt)
    assert talk.turns == 1


def test_closed_session_takes_nothing_and_keeps_what_it_has():
    talk = session()
    say(talk, [user("a")], "x", append=True)
    waiting = talk.prompt([user("b")], append=True)
    talk.close("it was closed")
    with pytest.raises(SessionClosed, match="session s: it was closed") as caught:
        talk.prompt([user("b")], append=True)
    assert caught.value.status == 404
    with pytest.raises(SessionClosed):
        talk.commit(waiting, completion("y"))
    assert len(talk.trajectory(reward=0.0).samples) == 1


def test_images_are_refused_by_a_handler_for_text_and_carried_by_another():
    pixel = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAEC"}}
    message = user([{"type": "text", "text": "see"}, pixel])
    with pytest.raises(UnsupportedRequest, match="1 images, but the tito handler FakeTito is for"):
        session().prompt([message])

    class Seeing(FakeTito):
        multimodal = True

    talk = session(tito=Seeing())
    _, one = say(talk, [message], "x")
    second = user([{"type": "image", "image": b"raw"}])
    prompt, _ = say(talk, [message, one.message, second], "y")
    assert prompt.images == (b"\x00\x01\x02", b"raw")
    assert talk.samples()[0].images == (b"\x00\x01\x02", b"raw")
    far = user([{"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}])
    with pytest.raises(UnsupportedRequest, match="nothing is fetched"):
        session(tito=Seeing()).prompt([far])
    broken = user([{"type": "image_url", "image_url": {"url": "data:image/png;base64,A"}}])
    with pytest.raises(UnsupportedRequest, match="not valid base64"):
        session(tito=Seeing()).prompt([broken])


def test_router_replay_rows_follow_their_tokens_into_every_branch():
    talk = session(**BRANCHING)
    rows = np.arange(1, 25, dtype=np.uint8).reshape(3, 4, 2)
    first, one = say(talk, [user("a")], "hi", experts=rows)
    for text in "xy":
        say(talk, [user("a"), one.message, user(text)], "ok", experts=rows + 30)
    for sample in talk.samples():
        start = len(first.tokens)
        np.testing.assert_array_equal(sample.experts[start : start + 3], rows)
        np.testing.assert_array_equal(sample.experts[-3:], rows + 30)
        assert not sample.experts[~sample.sampled].any()


# ---------------------------------------------------------------- size and speed


def long_session(turns, tokens, said=40):
    """A session of that many turns and tokens in all, most of them in prompts."""
    talk = session()
    each = tokens // turns - said - 25
    for turn in range(turns):
        text = f"{turn:06d}" + "p" * each
        prompt = talk.prompt([user(text)], append=True)
        talk.commit(prompt, completion([*b"s" * said, 257]))
    return talk


def test_session_takes_16_bytes_a_token_and_2_kB_a_turn_at_most():
    long_session(2, 2000)  # what is made once is made before
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        talk = long_session(100, 100_000)
        taken = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert talk.tokens > 98_000
    assert talk.turns == 100
    assert taken <= 16 * talk.tokens + 2000 * talk.turns
    assert talk.nbytes <= taken


def test_short_turns_of_sampled_tokens_alone_stay_within_the_bound():
    long_session(2, 2000)
    cut = {"truncated_logprobs": np.full(400, -0.5, np.float32)}
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        talk = session()
        for _ in range(200):
            prompt = talk.prompt([user("")], append=True)
            one = {k: v.copy() for k, v in cut.items()}
            talk.commit(prompt, completion([*b"s" * 399, 257], **one))
        taken = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert taken <= 16 * talk.tokens + 2000 * talk.turns


def test_committing_costs_the_turns_own_tokens_whatever_came_before():
    def costs():
        talk, times = session(), []
        for turn in range(101):
            prompt = talk.prompt([user(f"{turn}" + "p" * 950)], append=True)
            made = completion([*b"s" * 40, 257])
            begun = perf_counter()
            talk.commit(prompt, made)
            times.append(perf_counter() - begun)
        assert talk.tokens >= 100_000
        return times

    runs = np.array([costs() for _ in range(9)]).min(axis=0)  # (turns,): what others do is left out
    tenth, hundredth = np.median(runs[6:15]), np.median(runs[92:101])
    assert hundredth <= 1.5 * tenth, f"{tenth * 1e6:.1f} µs, then {hundredth * 1e6:.1f} µs"
