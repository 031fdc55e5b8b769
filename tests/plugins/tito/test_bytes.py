"""Bytes: ids are bytes, markup cannot be forged, and transformers reads the saved files the same
way."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles import Context, EpisodeError
from miles_plugins.tito.bytes import TURN_END, TURN_START, Bytes

TITO = Bytes(Bytes.Config(), Context(directory=Path(".")))
roles = st.sampled_from(["system", "user", "assistant", "tool"])
markup = st.sampled_from(
    ["<|im_end|>", "<|im_start|>", "<|endoftext|>", "\n", "<|im_end|>\n<|im_start|>user\n"]
)
texts = st.lists(st.text(max_size=8) | markup, max_size=4).map("".join)
messages = st.lists(st.builds(lambda r, c: {"role": r, "content": c}, roles, texts), max_size=4)


@pytest.fixture(scope="module", params=["bare", "qwen3", "llama"])
def saved(request, tmp_path_factory):
    """The tokenizer as AutoTokenizer reads it, alone and beside a model's config.json."""
    from transformers import AutoTokenizer

    directory = tmp_path_factory.mktemp(request.param)
    TITO.save(directory)
    if request.param != "bare":
        (directory / "config.json").write_text(json.dumps({"model_type": request.param}))
    return AutoTokenizer.from_pretrained(directory)


def test_encode_gives_the_bytes_of_utf8():
    np.testing.assert_array_equal(TITO.encode("aé"), [97, 0xC3, 0xA9])
    assert TITO.encode("x").dtype == np.int32
    assert len(TITO.encode("")) == 0


@given(texts)
def test_decode_undoes_encode_and_markup_in_text_stays_text(text):
    ids = TITO.encode(text)
    assert ids.max(initial=0) < 256
    assert TITO.decode(ids) == text


def test_decode_names_special_tokens_and_replaces_what_is_no_text():
    ids = np.array([256, 257, 258, 0xFF, 260, 97], np.int32)
    assert TITO.decode(ids) == "<|endoftext|><|im_start|><|im_end|>\ufffd\ufffda"


def test_render_is_chatml_with_the_assistants_turn_open():
    ids = TITO.render([{"role": "system", "content": "s"}, {"role": "user", "content": "hi"}])
    assert TITO.decode(ids) == (
        "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )


@given(messages)
def test_users_cannot_open_or_close_a_turn_by_writing_markup(talk):
    ids = TITO.render(talk).tolist()
    assert ids.count(TURN_START) == len(talk) + 1
    assert ids.count(TURN_END) == len(talk)


@settings(max_examples=60)
@given(messages, st.lists(st.tuples(texts, messages), min_size=1, max_size=3))
def test_stored_plus_extension_is_the_rendering_of_the_whole_conversation(first, turns):
    stored, history = TITO.render(first), list(first)
    for said, added in turns:
        completion = TITO.demonstrate(said)
        stored = np.concatenate([stored, completion])
        history.append(TITO.parse(completion))
        assert history[-1] == {"role": "assistant", "content": said}
        more = TITO.extend(stored, history, added)
        stored, history = np.concatenate([stored, more]), history + added
        np.testing.assert_array_equal(stored, TITO.render(history))


def test_extend_closes_a_turn_that_was_cut_short():
    stored = np.concatenate([TITO.render([]), TITO.encode("no end")])
    assert TITO.decode(TITO.extend(stored, [], [{"role": "user", "content": "x"}])) == (
        "<|im_end|>\n<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n"
    )


def test_demonstrate_ends_with_the_stop_id():
    np.testing.assert_array_equal(TITO.demonstrate("19"), [49, 57, TURN_END])
    assert TITO.stop_ids == (TURN_END,)


@settings(max_examples=60)
@given(text=texts)
def test_transformers_encodes_text_to_the_same_ids(saved, text):
    ids = saved(text, add_special_tokens=True, split_special_tokens=True)["input_ids"]
    np.testing.assert_array_equal(ids, TITO.encode(text))


@settings(max_examples=60)
@given(ids=st.lists(st.integers(0, 258), max_size=12))
def test_transformers_decodes_ids_to_the_same_text(saved, ids):
    assert saved.decode(ids) == TITO.decode(np.array(ids, np.int32))


@settings(max_examples=40)
@given(
    talk=st.lists(
        st.builds(lambda r, c: {"role": r, "content": c}, roles, st.text(max_size=8)),
        min_size=1,
        max_size=4,
    )
)
def test_transformers_renders_chat_to_the_same_ids(saved, talk):
    found = saved.apply_chat_template(talk, add_generation_prompt=True, return_dict=False)
    np.testing.assert_array_equal(found, TITO.render(talk))


def test_saved_tokenizer_knows_its_special_tokens(saved):
    assert (saved.eos_token_id, saved.pad_token_id, len(saved)) == (TURN_END, 256, TITO.vocab_size)


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({"role": "user", "content": None}, "content of message 1 is NoneType, not text"),
        ({"role": "user", "content": [{"type": "text"}]}, "content of message 1 is list"),
        ({"content": "x"}, "role of message 1 is NoneType"),
        ({"role": "assistant", "content": "", "tool_calls": [{}]}, "message 1 calls tools"),
    ],
)
def test_message_beyond_this_markup_is_refused(message, words):
    with pytest.raises(EpisodeError, match=words):
        TITO.render([{"role": "user", "content": "x"}, message])


def test_saved_files_say_where_generation_ends(tmp_path):
    TITO.save(tmp_path)
    found = json.loads((tmp_path / "generation_config.json").read_text())
    assert (found["eos_token_id"], found["pad_token_id"]) == (TURN_END, 256)
