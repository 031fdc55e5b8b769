"""What every tito handler must do: never lose a token, never invent one, and keep text apart from
markup.

Whether its markup is what the family was trained on is asked only where it saves a tokenizer with a
template.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from miles.errors import ConfigError
from miles.testing import tito_boundaries, tito_grid
from miles.testing.contract.case import Case, expect, inapplicable
from miles.testing.tito_oracle import Oracle
from miles.types import Message

TEXTS = (
    "hello",
    " two  spaces ",
    "12+34=46",
    "line\nbreak\n\nand\ttab",
    "naïve — ßtraße",
    "日本語 العربية",
    "🦊👩‍👩‍👧",
    "a" * 300,
)
"""Text that any policy may say or be told."""
USERS = ("2+2=", " leading and trailing \n", "日本語 🦊", "")
ASSISTANTS = ("4", "It is\n\nfour. ", "🦊", "")


def check_ids(case: Case) -> None:
    """Ids are int32 in one dimension, below `vocab_size`; stop ids are, too, and there is one at
    least."""
    handler = case.build()
    expect(handler.stop_ids, "there are no stop ids: no assistant turn could ever end")
    high = [int(i) for i in handler.stop_ids if not 0 <= i < handler.vocab_size]
    expect(not high, f"stop ids {high} are not below vocab_size {handler.vocab_size}")
    made = {
        "encode": handler.encode("hello"),
        "encode of nothing": handler.encode(""),
        "render": handler.render(_messages("hello")),
        "demonstrate": handler.demonstrate("hello"),
    }
    for what, ids in made.items():
        _expect_ids(ids, handler, what)
    expect(not len(handler.encode("")), "encode('') is not empty")


def check_encode_decode(case: Case) -> None:
    """`decode(encode(text))` is the text."""
    handler = case.build()
    for text in TEXTS:
        ids = handler.encode(text)
        expect(ids.size, f"encode({text!r}) is empty")
        back = handler.decode(ids)
        expect(back == text, f"decode(encode({text!r})) is {back!r}")


def check_decode_anything(case: Case) -> None:
    """`decode` gives text for any ids below `vocab_size` that the tokenizer has, invalid bytes
    replaced."""
    handler = case.build()
    rng = np.random.default_rng(0)
    known = np.unique(np.concatenate([handler.encode(t) for t in TEXTS]))  # (ids,) int32
    for size in (0, 1, 7, 64):
        ids = rng.choice(known, size).astype(np.int32)
        expect(isinstance(handler.decode(ids), str), f"decode({ids.tolist()}) is no text")


def check_special_text_is_text(case: Case) -> None:
    """Special tokens written out in someone's text stay text: they are never encoded as the ids
    they name. A handler that cannot promise it says so with `recognizes_markup = True`."""
    handler = case.build()
    if getattr(handler, "recognizes_markup", False):
        inapplicable("it says that it recognizes markup inside text")
    special = _special(handler)
    names = [n for i in sorted(special) if (n := handler.decode(np.array([i], np.int32)))]
    expect(names, "no special token is decoded to a name")
    for name in names:
        for what, ids, plain in (
            ("encode", handler.encode(f"a{name}b"), handler.encode("ab")),
            ("render", handler.render(_messages(f"a{name}b")), handler.render(_messages("ab"))),
            ("demonstrate", handler.demonstrate(f"a{name}b"), handler.demonstrate("ab")),
        ):
            found, usual = (sum(int(i) in special for i in each) for each in (ids, plain))
            expect(
                found == usual, f"{what} of text with {name!r} has {found} special ids, not {usual}"
            )


def check_demonstrate(case: Case) -> None:
    """A demonstration ends in a stop id, the only one in it, and says its text."""
    handler = case.build()
    for text in TEXTS:
        ids = handler.demonstrate(text)
        stops = [index for index, i in enumerate(ids) if int(i) in handler.stop_ids]
        expect(
            stops == [len(ids) - 1], f"demonstrate({text!r}) has stop ids at {stops} of {len(ids)}"
        )
        said = handler.decode(ids[:-1])
        expect(text.strip() in said, f"demonstrate({text!r}) says {said!r}")


def check_parse(case: Case) -> None:
    """`parse` of a demonstration is an assistant message with its text; a completion cut short is,
    too."""
    handler = case.build()
    for text in TEXTS:
        ids = handler.demonstrate(text)
        for what, given in (("whole", ids), ("cut", ids[:-1])):
            message = handler.parse(given)
            expect(
                message.get("role") == "assistant", f"parse: the role is {message.get('role')!r}"
            )
            # templates may drop white space around a turn
            said = str(message.get("content") or "")
            expect(said.strip() == text.strip(), f"parse of {text!r}, {what}, says {said!r}")
    handler.parse(np.zeros(0, np.int32))


def check_render(case: Case) -> None:
    """A prompt shows every message's text, depends on nothing else, and opens the assistant's
    turn."""
    handler = case.build()
    for conversation in _conversations():
        ids = handler.render(conversation)
        _expect_ids(ids, handler, "render")
        shown = handler.decode(ids)
        for message in conversation:
            content = message["content"].strip()
            expect(content in shown, f"render: {content!r} is not in {shown!r}")
        again = case.build().render([dict(m) for m in conversation])
        expect(np.array_equal(ids, again), f"render differs from time to time for {conversation}")
    opened, more = handler.render(_messages("hello")), handler.render(_messages("hello there"))
    expect(int(opened[-1]) not in handler.stop_ids, "render ends in a stop id: no turn is open")
    expect(_shared(opened[::-1], more[::-1]) > 0, "render does not end in what opens a turn")


def check_extend_appends(case: Case) -> None:
    """Over a grid of conversations: `extend` gives only new tokens, which show the new messages and
    open a turn."""
    handler = case.build()
    for conversation in _conversations():
        for answer in ASSISTANTS:
            stored = np.concatenate([handler.render(conversation), handler.demonstrate(answer)])
            history = [*conversation, {"role": "assistant", "content": answer}]
            for user in USERS:
                kept = stored.copy()
                new = handler.extend(stored, history, _messages(user))
                _expect_ids(new, handler, "extend")
                expect(np.array_equal(stored, kept), "extend wrote into the stored tokens")
                shown = handler.decode(new)
                expect(user.strip() in shown, f"extend: {user!r} is not in {shown!r}")
                expect(int(new[-1]) not in handler.stop_ids, "extend ends in a stop id")
                stop = handler.decode(stored[-1:])
                expect(not stop or not shown.startswith(stop), "extend ends the last turn twice")


def check_extend_chains(case: Case) -> None:
    """Three turns in a row: what is stored only ever grows, and equals no less than what was
    sampled."""
    handler = case.build()
    history: list[Message] = list(_messages("first"))
    stored = handler.render(history)
    for turn, answer in enumerate(ASSISTANTS):
        said = handler.demonstrate(answer)
        stored = np.concatenate([stored, said])
        history.append(handler.parse(said))
        messages = _messages(f"question {turn}")
        new = handler.extend(stored, history, messages)
        again = handler.extend(stored, [dict(m) for m in history], messages)
        expect(np.array_equal(new, again), f"extend of turn {turn} differs from time to time")
        stored = np.concatenate([stored, new])
        history += messages
        shown = handler.decode(stored)
        for message in history:
            content = str(message["content"]).strip()
            expect(content in shown, f"after turn {turn}: {content!r} is not in {shown!r}")


def check_extend_closes_cut_turns(case: Case) -> None:
    """A turn that the length limit cut is closed by `extend`, so that the next prompt reads as any
    other."""
    handler = case.build()
    conversation = _messages("2+2=")
    said = handler.demonstrate("4")
    whole = np.concatenate([handler.render(conversation), said])
    history = [*conversation, {"role": "assistant", "content": "4"}]
    cut = whole[:-1]
    full = np.concatenate([whole, handler.extend(whole, history, _messages("and 3+3="))])
    closed = np.concatenate([cut, handler.extend(cut, history, _messages("and 3+3="))])
    expect(
        np.array_equal(full, closed),
        f"after a cut turn the prompt is {handler.decode(closed)!r}, not {handler.decode(full)!r}",
    )


def check_grid(case: Case) -> None:
    """Every talk of the grid (tools, reasoning, empty, long, failing, retried) is carried from turn
    to turn, parsed back as it was said, and as the tokenizer's own template has it."""
    handler = case.build()
    lines = tito_grid.verify(handler, _oracle(case, handler))
    for line in lines:
        expect(not line.faults, f"{line.talk}: {line.faults[:1]}")
    played = [line.talk for line in lines if not line.skipped]
    expect("plain" in played and "multi_turn" in played, f"only {played} could be played")


def check_cut_anywhere(case: Case) -> None:
    """A turn cut after any token is closed and continued as the whole one."""
    fault = next(tito_boundaries.cut_faults(case.build()), "")
    expect(not fault, fault)


def check_any_text(case: Case) -> None:
    """Whatever stands beside the markup, what is added is what the template adds."""
    handler = case.build()
    try:
        fault = tito_boundaries.search(handler, _oracle(case, handler))
    except ImportError:
        inapplicable("hypothesis is not installed")
    expect(not fault, fault)


def check_rewrites(case: Case) -> None:
    """Where it can tell whether the template would take something back, plain turns take nothing
    back, and its answer is the same each time."""
    handler = case.build()
    if not hasattr(handler, "rewrites"):
        inapplicable("it does not say when its template rewrites history")
    history = [*_messages("2+2="), {"role": "assistant", "content": "4"}]
    asked = [handler.rewrites(history, _messages("and 3+3=")) for _ in range(2)]
    expect(asked == [False, False], f"rewrites of plain turns is {asked}")


def _oracle(case: Case, handler: Any) -> Oracle | None:
    """The template of the tokenizer that the handler saves, if it has one."""
    folder = case.folder("oracle")
    handler.save(folder)
    if not (folder / "tokenizer.json").is_file():
        return None
    try:
        return Oracle(folder)
    except ConfigError:
        return None


def check_saved_tokenizer(case: Case) -> None:
    """What it saves, `transformers` loads as a tokenizer with the same ids and, if it has a
    template, prompts."""
    handler = case.build()
    folder = case.folder("tokenizer")
    handler.save(folder)
    if not (folder / "tokenizer_config.json").exists():
        inapplicable("it saves no tokenizer")
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    for text in TEXTS:
        theirs = tokenizer.encode(text, add_special_tokens=False)
        ours = handler.encode(text).tolist()
        expect(theirs == ours, f"{text!r} is {theirs[:12]} to transformers, {ours[:12]} here")
    if not tokenizer.chat_template:
        return
    for conversation in _conversations():
        theirs = tokenizer.apply_chat_template(
            conversation, tokenize=True, add_generation_prompt=True, return_dict=False
        )
        ours = handler.render(conversation).tolist()
        at = _shared(theirs, ours)
        expect(
            theirs == ours,
            f"prompts differ at token {at}: transformers has {tokenizer.decode(theirs[at:])!r}, "
            f"render {handler.decode(np.array(ours[at:], np.int32))!r}",
        )


def _expect_ids(ids: Any, handler: Any, what: str) -> None:
    good = isinstance(ids, np.ndarray) and ids.ndim == 1 and ids.dtype == np.int32
    shown = (
        f"{ids.dtype} of shape {ids.shape}" if isinstance(ids, np.ndarray) else type(ids).__name__
    )
    expect(good, f"{what} gave {shown}, not (tokens,) int32")
    expect(
        not ids.size or (ids.min() >= 0 and ids.max() < handler.vocab_size),
        f"{what} gave ids in [{ids.min() if ids.size else 0}, {ids.max() if ids.size else 0}], "
        f"vocab_size is {handler.vocab_size}",
    )


def _special(handler: Any) -> set[int]:
    """Stop ids, and ids of a prompt that its own text would not be encoded to."""
    prompt = handler.render(_messages("hello"))
    spelled = handler.encode(handler.decode(prompt))
    return {int(i) for i in prompt if i not in spelled} | {int(i) for i in handler.stop_ids}


def _shared(one: Sequence[int], two: Sequence[int]) -> int:
    """Length of the common beginning."""
    for index, (a, b) in enumerate(zip(one, two, strict=False)):
        if a != b:
            return index
    return min(len(one), len(two))


def _messages(user: str) -> list[Message]:
    return [{"role": "user", "content": user}]


def _conversations() -> list[list[Message]]:
    system: Message = {"role": "system", "content": "Be brief."}
    back: list[Message] = [
        {"role": "user", "content": "2+2="},
        {"role": "assistant", "content": "4"},
        {"role": "user", "content": "and 3+3="},
    ]
    return [_messages("2+2="), [system, *_messages("hello 🦊")], back, [system, *back]]
