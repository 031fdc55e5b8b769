"""Generic: any tokenizer with a template; append-only or an error that shows where it is not."""

import json
import pickle
import tarfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles import ConfigError, Context, EpisodeError, TokenMismatch
from miles_plugins.tito.bytes import Bytes
from miles_plugins.tito.generic import Generic

DATA = Path(__file__).parents[3] / ".." / "shared" / "data"
CONTEXT = Context(directory=Path("."))
roles = st.sampled_from(["system", "user", "tool"])
talks = st.lists(
    st.builds(lambda r, c: {"role": r, "content": c}, roles, st.text(max_size=8)), max_size=3
)


def make(**config):
    return Generic(Generic.Config(**config), CONTEXT)


WITH_CALLS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def user(text):
    return {"role": "user", "content": text}


def template_file(tmp_path, text):
    path = tmp_path / "template.jinja"
    path.write_text(text)
    return str(path)


@pytest.fixture(scope="module")
def byte_directory(tmp_path_factory):
    directory = tmp_path_factory.mktemp("bytes")
    Bytes(Bytes.Config(), CONTEXT).save(directory)
    return directory


@pytest.fixture(scope="module")
def byte_level(byte_directory):
    return make(path=str(byte_directory))


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory):
    archive = DATA / "tokenizers.tar.xz"
    if not archive.is_file():
        pytest.skip("no shared data beside the project")
    directory = tmp_path_factory.mktemp("tokenizers")
    with tarfile.open(archive) as tar:
        tar.extractall(directory, filter="data")
    return directory / "qwen3"


@pytest.fixture(scope="module")
def qwen3_handler(qwen3):
    made = {}

    def handler(template):
        if template not in made:
            made[template] = make(path=str(qwen3), template=str(DATA / "chat_templates" / template))
        return made[template]

    return handler


@pytest.fixture(scope="module")
def with_calls(qwen3, tmp_path_factory):
    """That tokenizer, which takes a second to read, under a template with words for calls."""
    return make(path=str(qwen3), template=template_file(tmp_path_factory.mktemp("t"), WITH_CALLS))


@pytest.fixture(scope="module")
def recorded():
    path = DATA / "trajectories" / "competitive_coding_challenges.jsonl"
    if not path.is_file():
        pytest.skip("no shared data beside the project")
    found = []
    for line in path.read_text().splitlines():
        row = json.loads(line)
        (turn,) = [m for m in row["response"]["output"] if "prompt_token_ids" in m]
        prompt, said = (
            np.array(turn[k], np.int32) for k in ("prompt_token_ids", "generation_token_ids")
        )
        found.append((row["responses_create_params"]["input"], prompt, said))
    return found


# ---------------------------------------------------------------- a tokenizer made here


def test_special_tokens_and_sizes_come_from_the_files(byte_level):
    assert byte_level.stop_ids == (258,)
    assert byte_level.vocab_size == 259


@settings(max_examples=40)
@given(talk=talks, turns=st.lists(st.tuples(st.text(max_size=8), talks), min_size=1, max_size=3))
def test_stored_plus_extension_is_the_rendering_of_the_whole_conversation(byte_level, talk, turns):
    stored, history = byte_level.render(talk), list(talk)
    for said, added in turns:
        completion = byte_level.demonstrate(said)
        stored = np.concatenate([stored, completion])
        history.append(byte_level.parse(completion))
        assert history[-1] == {"role": "assistant", "content": said}
        more = byte_level.extend(stored, history, added)
        stored, history = np.concatenate([stored, more]), history + added
        np.testing.assert_array_equal(stored, byte_level.render(history))


@settings(max_examples=40)
@given(ids=st.lists(st.integers(0, 257), max_size=8))
def test_invalid_bytes_that_were_sampled_do_not_break_the_next_turn(byte_level, ids):
    """Decoding replaces them, so the text differs from what any tokenizer would give back; the ids
    stay."""
    history = [user("x")]
    completion = np.array([*ids, 258], np.int32)
    stored = np.concatenate([byte_level.render(history), completion])
    more = byte_level.extend(stored, [*history, byte_level.parse(completion)], [user("y")])
    assert byte_level.decode(more) == "\n<|im_start|>user\ny<|im_end|>\n<|im_start|>assistant\n"


def test_extend_closes_a_turn_that_was_cut_short(byte_level):
    history = [user("x")]
    stored = np.concatenate([byte_level.render(history), byte_level.encode("no end")])
    more = byte_level.extend(
        stored, [*history, {"role": "assistant", "content": "no end"}], [user("y")]
    )
    assert byte_level.decode(more).startswith("<|im_end|>\n<|im_start|>user\ny")


def test_another_stop_token_than_the_templates_own_is_kept(byte_directory):
    handler = make(path=str(byte_directory), stop=("<|endoftext|>",))
    assert handler.stop_ids == (256, 258)
    history = [user("x")]
    completion = np.array([97, 256], np.int32)
    stored = np.concatenate([handler.render(history), completion])
    more = handler.extend(stored, [*history, handler.parse(completion)], [user("y")])
    assert handler.decode(more).startswith("\n<|im_start|>user\ny")


def test_template_that_trims_what_was_sampled_still_extends_by_what_it_adds(
    byte_directory, tmp_path
):
    text = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{{ m.content | trim }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    handler = make(path=str(byte_directory), template=template_file(tmp_path, text))
    completion = handler.demonstrate("  spaced  ")
    stored = np.concatenate([handler.render([user("x")]), completion])
    more = handler.extend(stored, [user("x"), handler.parse(completion)], [user("y")])
    assert handler.decode(more) == "\n<|im_start|>user\ny<|im_end|>\n<|im_start|>assistant\n"


def test_template_that_shows_history_after_what_is_new_is_a_mismatch_with_both_sides(
    byte_directory, tmp_path
):
    text = (
        "{{ messages | length }}{% for m in messages | reverse %}"
        "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    handler = make(path=str(byte_directory), template=template_file(tmp_path, text))
    completion = handler.demonstrate("a")
    stored = np.concatenate([handler.render([user("x")]), completion])
    with pytest.raises(
        TokenMismatch, match=r"token 0 of the stored \d+ differs: stored '1<\|im_s.*template '3<"
    ) as caught:
        handler.extend(stored, [user("x"), handler.parse(completion)], [user("y")])
    assert "tito.template=FILE" in caught.value.detail
    assert pickle.loads(pickle.dumps(caught.value)).detail == caught.value.detail


def test_template_that_rewrites_history_is_extended_by_what_it_adds_and_says_so(
    byte_directory, tmp_path
):
    text = (
        "{{ messages | length }}{% for m in messages %}"
        "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    handler = make(path=str(byte_directory), template=template_file(tmp_path, text))
    completion = handler.demonstrate("a")
    history, added = [user("x"), handler.parse(completion)], [user("y")]
    stored = np.concatenate([handler.render(history[:1]), completion])
    for cut in (stored, stored[:-1]):
        more = handler.decode(handler.extend(cut, history, added))
        wanted = "\n<|im_start|>user\ny<|im_end|>\n<|im_start|>assistant\n"
        assert more == (wanted if cut is stored else "<|im_end|>" + wanted)
    assert handler.rewrites(history, added)


def test_template_variables_come_from_the_configuration(byte_directory, tmp_path):
    text = "{{ mood }}{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"
    handler = make(
        path=str(byte_directory),
        template=template_file(tmp_path, text),
        arguments={"mood": "calm "},
    )
    assert handler.decode(handler.render([user("x")])) == "calm x<|im_end|>"


def test_template_that_refuses_messages_is_an_episode_error(byte_directory, tmp_path):
    text = (
        "{% for m in messages %}"
        "{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
        "{{ m.content }}<|im_end|>{% endfor %}"
    )
    handler = make(path=str(byte_directory), template=template_file(tmp_path, text))
    with pytest.raises(EpisodeError, match="the chat template refuses 1 messages: no tools here"):
        handler.render([{"role": "tool", "content": "x"}])


def test_template_cannot_reach_into_python(byte_directory, tmp_path):
    text = "{{ ''.__class__.__mro__ }}{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"
    with pytest.raises(ConfigError, match="the chat template refuses"):
        make(path=str(byte_directory), template=template_file(tmp_path, text))


def test_saved_files_load_again_with_the_chosen_template(byte_directory, tmp_path):
    text = "{% for m in messages %}[{{ m.role }}]{{ m.content }}<|im_end|>{% endfor %}"
    handler = make(path=str(byte_directory), template=template_file(tmp_path, text))
    handler.save(tmp_path / "out")
    again = make(path=str(tmp_path / "out"))
    np.testing.assert_array_equal(again.render([user("x")]), handler.render([user("x")]))
    assert again.decode(again.render([user("x")])) == "[user]x<|im_end|>"


def test_stop_ids_are_read_from_the_generation_configuration(byte_level, tmp_path):
    byte_level.save(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [256, 258]}))
    assert make(path=str(tmp_path)).stop_ids == (256, 258)


# ---------------------------------------------------------------- what cannot be used


def test_random_model_without_a_path_has_no_tokenizer():
    with pytest.raises(
        ConfigError, match=r"the model is random and has no directory; set tito\.path"
    ):
        make()


def test_directory_without_a_tokenizer_says_what_is_there(tmp_path):
    with pytest.raises(ConfigError, match=r"tito\.path: .*missing is not a directory"):
        make(path=str(tmp_path / "missing"))
    (tmp_path / "vocab.json").write_text("{}")
    with pytest.raises(
        ConfigError, match=r"no tokenizer\.json in .* \(tokenizer files there: vocab\.json\)"
    ) as caught:
        make(path=str(tmp_path))
    assert "save_pretrained" in caught.value.detail


def test_tokenizer_without_a_chat_template_says_how_to_give_one(byte_level, tmp_path):
    byte_level.save(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    config = json.loads(path.read_text())
    del config["chat_template"]
    path.write_text(json.dumps(config))
    with pytest.raises(
        ConfigError, match=r"has no chat template; give one with tito\.template=FILE"
    ):
        make(path=str(tmp_path))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"template": "nowhere.jinja"}, r"tito\.template: no file nowhere\.jinja"),
        ({"stop": ("<eos>",)}, r"tito\.stop: '<eos>' is not a token of the tokenizer"),
    ],
)
def test_configuration_that_names_nothing_is_refused(byte_directory, config, words):
    with pytest.raises(ConfigError, match=words):
        make(path=str(byte_directory), **config)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "{% for m in messages %}{{ m.content }}\n{% endfor %}",
            r"closes an assistant's turn with '\\n'",
        ),
        ("{% for m in messages %}", "the chat template refuses 2 messages"),
    ],
)
def test_template_without_an_end_of_turn_is_refused(byte_directory, tmp_path, text, words):
    with pytest.raises(ConfigError, match=words):
        make(path=str(byte_directory), template=template_file(tmp_path, text))


# ---------------------------------------------------------------- real ones


@pytest.mark.parametrize(
    "template", ["qwen3/Qwen-Qwen3-0.6B.jinja", "qwen3/trl_qwen3_training.jinja"]
)
def test_recorded_prompts_render_to_the_recorded_ids(qwen3_handler, recorded, template):
    handler = qwen3_handler(template)
    for text, prompt, _ in recorded:
        np.testing.assert_array_equal(handler.render([user(text)]), prompt)


def test_recorded_turn_with_reasoning_continues_under_a_template_that_keeps_it(
    qwen3_handler, recorded
):
    handler = qwen3_handler("qwen3/trl_qwen3_training.jinja")
    for text, prompt, said in recorded:
        stored = np.concatenate([prompt, said])
        more = handler.extend(stored, [user(text), handler.parse(said)], [user("and faster?")])
        wanted = "\n<|im_start|>user\nand faster?<|im_end|>\n<|im_start|>assistant\n"
        closed = int(said[-1]) in handler.stop_ids
        assert handler.decode(more) == (wanted if closed else "<|im_end|>" + wanted)


def test_recorded_turn_keeps_its_reasoning_under_a_template_that_drops_it(qwen3_handler, recorded):
    handler = qwen3_handler("qwen3/Qwen-Qwen3-0.6B.jinja")
    text, prompt, said = next(r for r in recorded if 151668 in r[2])  # one that finished thinking
    stored = np.concatenate([prompt, said])
    history = [user(text), handler.parse(said)]
    more = handler.extend(stored, history, [user("and faster?")])
    wanted = "\n<|im_start|>user\nand faster?<|im_end|>\n<|im_start|>assistant\n"
    assert handler.decode(more) == wanted
    assert handler.rewrites(history, [user("and faster?")])
    # the same template keeps reasoning while only tools have answered since
    answer = [{"role": "tool", "content": "ok"}]
    assert not handler.rewrites(history, answer)
    assert "<tool_response>\nok\n</tool_response>" in handler.decode(
        handler.extend(stored, history, answer)
    )


def test_answers_without_reasoning_continue_under_a_template_as_published(qwen3_handler):
    handler = qwen3_handler("qwen3/Qwen-Qwen3-0.6B.jinja")
    history = [user("hi")]
    stored = handler.render(history)
    for number in range(3):
        completion = handler.demonstrate(f"answer {number}")
        stored = np.concatenate([stored, completion])
        history.append(handler.parse(completion))
        added = [user(f"question {number}")]
        stored = np.concatenate([stored, handler.extend(stored, history, added)])
        history += added
    np.testing.assert_array_equal(stored, handler.render(history))


def test_ids_equal_those_of_auto_tokenizer(qwen3, qwen3_handler, recorded):
    from transformers import AutoTokenizer

    handler = qwen3_handler("qwen3/Qwen-Qwen3-0.6B.jinja")
    tokenizer = AutoTokenizer.from_pretrained(qwen3)
    for text, _, said in recorded:
        np.testing.assert_array_equal(handler.encode(text), tokenizer(text)["input_ids"])
        assert handler.decode(said) == tokenizer.decode(said)


DEEP = '{"name": "f", "arguments": {"x": ' + "[" * 3000
LONG = '{"name": "f", "arguments": {"x": ' + "9" * 5000 + "}}"


@pytest.mark.parametrize("inside", [DEEP, LONG], ids=["deep", "long"])
def test_generic_leaves_a_call_that_no_parser_reads_in_the_content(with_calls, inside):
    text = f"<tool_call>{inside}</tool_call>"
    message = with_calls.parse(with_calls.encode(text))
    assert message["content"] == text and "tool_calls" not in message


def test_generic_gives_calls_that_can_be_sent_whatever_characters_are_escaped_in_them(
    with_calls,
):
    call = r'{"name": "f\ud800", "arguments": {"x": "\udfff"}}'
    message = with_calls.parse(with_calls.encode(f"<tool_call>{call}</tool_call>"))
    function = message["tool_calls"][0]["function"]
    assert json.dumps(function, ensure_ascii=False).encode()
    assert function["name"] == "f?" and json.loads(function["arguments"]) == {"x": "\udfff"}


def test_generic_encodes_lone_surrogates_as_question_marks(byte_level):
    assert byte_level.decode(byte_level.encode("a\ud800b")) == "a?b"


def test_generic_refuses_what_is_nested_too_deep_to_be_written(with_calls):
    deep = []
    for _ in range(200_000):
        deep = [deep]
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": {"x": deep}}}
    said = {"role": "assistant", "content": "", "tool_calls": [call]}
    with pytest.raises(EpisodeError, match=r"refuses 3 messages: .*recursion"):
        with_calls.render([user("q"), said, user("r")])
