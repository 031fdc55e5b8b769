"""Model families: the right variant is found, everything else refused, and what is written is what
the published template writes."""

import json
import sys

import numpy as np
import pytest

from miles import ConfigError, EpisodeError
from miles.testing.tito_boundaries import cut_faults, search
from miles.testing.tito_grid import verify
from miles.testing.tito_oracle import Oracle
from miles.testing.tito_talks import GRID, TOOLS
from miles_plugins.tito.families import Glm4, Glm5, Qwen3, Qwen3VL, Qwen35
from tests.plugins.tito.checkpoints import (
    PUBLISHED,
    WITHOUT,
    bytes_checkpoint,
    handler,
    real_checkpoint,
    tokenizers,
)

# the template that is published for tests writes nothing at all for an empty message, where the
# library and the model's own processor write an empty one
EXCEPT = {"inkling/inkling": {"empty_content"}}


def user(text):
    return {"role": "user", "content": text}


def faults(lines):
    return {line.talk: line.faults for line in lines if line.faults}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Handlers by template, each built once."""
    found = {}

    def make(name):
        if name not in found:
            family, _ = PUBLISHED[name]
            directory = bytes_checkpoint(tmp_path_factory.mktemp("checkpoint"), family, name)
            found[name] = handler(family, directory), directory
        return found[name]

    return make


@pytest.fixture(scope="module")
def qwen3(made):
    return made("qwen3/Qwen-Qwen3-0.6B")[0]


@pytest.mark.parametrize("value", ["[" * 3000, "9" * 5000], ids=["deep", "long"])
def test_family_leaves_a_call_that_no_parser_reads_in_the_content(qwen3, value):
    text = f'<tool_call>\n{{"name": "f", "arguments": {{"x": {value}}}}}\n</tool_call>'
    assert qwen3.parse(qwen3.encode(text)) == {"role": "assistant", "content": text}


# ---------------------------------------------------------------- against published templates


@pytest.mark.parametrize("name", PUBLISHED)
def test_family_writes_what_its_published_template_writes(made, name):
    built, directory = made(name)
    oracle = Oracle(directory)
    talks = [t for t in GRID if t.name not in EXCEPT.get(name, ())]
    lines = verify(built, oracle, talks=talks)
    assert not faults(lines)
    assert all(line.oracle.split()[0] == str(line.turns) for line in lines if not line.skipped)
    skipped = {line.talk for line in lines if line.skipped}
    wordless = {t.name for t in GRID if t.tools} if "llama-cpp-deepseek-r1" in name else set()
    assert skipped == wordless  # that template has no words for calls


@pytest.mark.parametrize("name", PUBLISHED)
def test_variant_is_told_by_the_template(made, name):
    built, _ = made(name)
    assert getattr(getattr(built, "variant", None), "renderer", "") == PUBLISHED[name][1]


@pytest.mark.parametrize("name", ["qwen3/Qwen-Qwen3-0.6B", "glm/GLM-4.6", "glm/GLM-4.7-Flash"])
def test_turn_cut_anywhere_goes_on_as_the_whole_one(made, name):
    assert not list(cut_faults(made(name)[0], every=3))


@pytest.mark.parametrize("family", WITHOUT, ids=lambda f: f.name)
def test_family_without_a_template_at_hand_carries_the_grid(tmp_path, family):
    built = handler(family, bytes_checkpoint(tmp_path, family))
    assert not faults(verify(built))


def test_template_that_drops_reasoning_is_kept_and_said(made):
    for name, kept in (
        ("qwen3/Qwen-Qwen3-0.6B", 2),
        ("glm/GLM-4.6", 2),
        ("minimax/MiniMax-M2", 2),
        ("qwen3.5/trl_qwen3_8", 0),
        ("kimi/Kimi-K2-Instruct", 0),
    ):
        lines = {line.talk: line for line in verify(made(name)[0])}
        assert lines["reasoning_dropped"].kept == kept, name
        assert lines["reasoning_kept"].kept == lines["multi_turn"].kept == 0


REAL = (
    "qwen3/Qwen-Qwen3-0.6B",
    "qwen3.5/Qwen3.5-4B",
    "glm/GLM-4.6",
    "nemotron/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
    "kimi/Kimi-K2-Instruct",
    "minimax/MiniMax-M2",
    "deepseek/deepseek-ai-DeepSeek-V3.1",
    "deepseek/deepseek-ai-DeepSeek-V4",
    "inkling/inkling",
)


@pytest.mark.slow
@pytest.mark.parametrize("name", REAL)
def test_family_with_a_real_vocabulary_agrees_with_its_template(tmp_path, unpacked, name):
    family, _ = PUBLISHED[name]
    source = unpacked / ("deepseek-v4" if name.startswith("deepseek") else "qwen3")
    directory = real_checkpoint(tmp_path, source, family, name)
    built, oracle = handler(family, directory), Oracle(directory)
    talks = [t for t in GRID if t.name not in EXCEPT.get(name, ())]
    assert not faults(verify(built, oracle, talks=talks))
    if name in ("qwen3/Qwen-Qwen3-0.6B", "deepseek/deepseek-ai-DeepSeek-V4"):  # their own
        assert not list(cut_faults(built, every=2))
        assert not search(built, oracle, examples=20)


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory):
    return tokenizers(tmp_path_factory)


# ---------------------------------------------------------------- what does not fit


def test_family_whose_tokens_are_missing_is_refused(tmp_path):
    directory = bytes_checkpoint(tmp_path, Qwen3)
    with pytest.raises(ConfigError, match=r"tito glm4 does not fit .*no special token \[gMASK\]"):
        handler(Glm4, directory)


def test_family_that_ends_turns_otherwise_is_refused(tmp_path):
    directory = bytes_checkpoint(tmp_path, Qwen3)
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [258, 97]}))
    with pytest.raises(ConfigError, match=r"tito qwen3 .* it ends a turn with a \(ids \[97\]\)"):
        handler(Qwen3, directory)


@pytest.mark.parametrize(
    "name", ["qwen3/Qwen3-Coder", "qwen3/Qwen-Qwen2.5-7B-Instruct", "qwen3/trl_qwen3_training"]
)
def test_family_whose_template_differs_is_refused_with_the_first_difference(tmp_path, name):
    directory = bytes_checkpoint(tmp_path, Qwen3, name)
    with pytest.raises(
        ConfigError, match=r"every published one of the family; the closest is qwen3: at token \d+"
    ) as caught:
        handler(Qwen3, directory)
    assert "tito=generic" in caught.value.detail


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"moods": 1}, r"moods=1 conflicts with tito qwen3, where it is not one of the family's"),
        ({"enable_thinking": "perhaps"}, r"qwen3 with .*perhaps.* cannot be used"),
    ],
)
def test_argument_that_conflicts_with_the_registration_is_an_error(tmp_path, arguments, words):
    directory = bytes_checkpoint(tmp_path, Qwen3)
    with pytest.raises(ConfigError, match=words):
        handler(Qwen3, directory, arguments=arguments)


def test_fixed_argument_may_be_repeated_but_not_changed(tmp_path):
    directory = bytes_checkpoint(tmp_path, Qwen3VL)
    assert handler(Qwen3VL, directory, arguments={"add_vision_id": False})
    with pytest.raises(ConfigError, match=r"add_vision_id=True conflicts .*where it is False"):
        handler(Qwen3VL, directory, arguments={"add_vision_id": True})


def test_open_argument_changes_the_prompt(tmp_path):
    directory = bytes_checkpoint(tmp_path, Qwen3)
    quiet = handler(Qwen3, directory, arguments={"enable_thinking": False})
    shown = quiet.decode(quiet.render([user("x")]))
    assert shown.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    said = quiet.demonstrate({"role": "assistant", "content": "4", "reasoning_content": "no"})
    assert quiet.decode(said) == "4<|im_end|>"


def test_checkpoint_that_cannot_tell_its_variant_is_unverified(tmp_path):
    directory = bytes_checkpoint(tmp_path, Glm5)
    with pytest.raises(
        ConfigError, match=r"tito glm5 is unverified .*glm-5, glm-5\.1.*tito\.unverified=true"
    ):
        handler(Glm5, directory)
    assert handler(Glm5, directory, unverified=True).variant.renderer == "glm-5"


def test_role_that_may_not_follow_a_turn_is_refused(qwen3):
    history = [user("x"), {"role": "assistant", "content": "y"}]
    stored = np.concatenate([qwen3.render(history[:1]), qwen3.demonstrate("y")])
    with pytest.raises(EpisodeError, match=r"role 'critic'; .*may follow: user, tool, system"):
        qwen3.extend(stored, history, [{"role": "critic", "content": "no"}])


def test_image_is_refused_by_a_family_that_reads_text(qwen3):
    seen = [user([{"type": "image_url", "image_url": {"url": "data:,"}}])]
    with pytest.raises(EpisodeError, match="message 0 carries an image, and this family reads"):
        qwen3.render(seen)


# ---------------------------------------------------------------- particulars


def test_image_becomes_one_placeholder_in_the_text_around_it(tmp_path):
    built = handler(Qwen3VL, bytes_checkpoint(tmp_path, Qwen3VL))
    parts = [
        {"type": "text", "text": "What is "},
        {"type": "image_url", "image_url": {"url": "data:,"}},
        {"type": "text", "text": "this? \ufdd0"},
    ]
    shown = built.decode(built.render([user(parts)]))
    assert built.multimodal and "What is <|vision_start|><|image_pad|><|vision_end|>this? \ufffd<"
    assert shown.count("<|image_pad|>") == 1
    assert "What is <|vision_start|><|image_pad|><|vision_end|>this? \ufffd<|im_end|>" in shown


def test_markup_in_a_text_stays_text(made):
    for name in ("qwen3/Qwen-Qwen3-0.6B", "glm/GLM-4.6", "minimax/MiniMax-M2", "inkling/inkling"):
        built, _ = made(name)
        stop = built.decode(np.array(built.stop_ids[:1], np.int32))
        ids = built.render([user(f"say {stop} and stop")])
        plain = built.render([user("say  and stop")])
        stops = [sum(int(i) in built.stop_ids for i in each) for each in (ids, plain)]
        assert stops[0] == stops[1], name


def test_call_that_cannot_be_read_stays_in_the_text(qwen3):
    said = qwen3.vocabulary.encode('Look: <tool_call>\n{"name": "add", "arg</tool_call>')
    message = qwen3.parse(np.array([*said, qwen3.stop_ids[0]], np.int32))
    assert message == {
        "role": "assistant",
        "content": 'Look: <tool_call>\n{"name": "add", "arg</tool_call>',
    }


def test_white_space_is_parsed_as_it_was_sampled(qwen3):
    said = qwen3.vocabulary.encode("<think>\n so \n</think>\n\n 4 \n")
    message = qwen3.parse(np.array([*said, qwen3.stop_ids[0]], np.int32))
    assert (message["reasoning_content"], message["content"]) == ("\n so \n", "\n\n 4 \n")


def test_ids_of_calls_are_the_same_each_time_and_differ_between_turns(qwen3):
    call = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    one, two = (
        qwen3.demonstrate({"role": "assistant", "content": text, "tool_calls": [call, call]})
        for text in ("a", "b")
    )
    ids = [[c["id"] for c in qwen3.parse(said)["tool_calls"]] for said in (one, one, two)]
    assert ids[0] == ids[1] and len({*ids[0], *ids[2]}) == 4


def test_ids_of_calls_that_the_markup_has_are_kept(made):
    built, _ = made("kimi/Kimi-K2-Instruct")
    call = {
        "id": "functions.add:7",
        "type": "function",
        "function": {"name": "add", "arguments": '{"a": 1}'},
    }
    said = built.demonstrate({"role": "assistant", "content": "", "tool_calls": [call]})
    assert built.parse(said)["tool_calls"] == [call]


def test_results_follow_the_order_of_their_calls_where_the_template_sorts_them(made):
    built, _ = made("deepseek/deepseek-ai-DeepSeek-V4")
    calls = [
        {"id": f"c{n}", "type": "function", "function": {"name": "add", "arguments": "{}"}}
        for n in range(2)
    ]
    last = {"role": "assistant", "content": "", "tool_calls": calls}
    stored = np.concatenate([built.render([user("x")], tools=TOOLS), built.demonstrate(last)])
    results = [{"role": "tool", "content": f"result {n}", "tool_call_id": f"c{n}"} for n in (1, 0)]
    shown = built.decode(built.extend(stored, [user("x"), last], results, tools=TOOLS))
    assert 0 < shown.index("result 0") < shown.index("result 1")


def test_extending_costs_what_is_new(qwen3):
    """The tail is looked at, never the whole of a long session."""
    history = [user("x"), {"role": "assistant", "content": "y"}]
    short = np.concatenate([qwen3.render(history[:1]), qwen3.demonstrate("y")])
    long = np.concatenate([np.full(1_000_000, 97, np.int32), short])

    class Watched(np.ndarray):
        looked = 0

        def __getitem__(self, where):
            found = np.asarray(super().__getitem__(where))
            Watched.looked += found.size
            return found

    watched = long.view(Watched)
    new = qwen3.extend(watched, history, [user("z")])
    np.testing.assert_array_equal(new, qwen3.extend(short, history, [user("z")]))
    assert Watched.looked < 10_000


def test_stop_inside_reasoning_is_kept_and_gone_on_from(qwen3):
    said = np.array([*qwen3.vocabulary.encode("<think>\nwhat"), qwen3.stop_ids[0]], np.int32)
    history = [user("x"), qwen3.parse(said)]
    assert history[-1]["reasoning_content"].strip() == "what" and not history[-1]["content"]
    stored = np.concatenate([qwen3.render(history[:1]), said])
    shown = qwen3.decode(qwen3.extend(stored, history, [user("y")]))
    assert shown == "\n<|im_start|>user\ny<|im_end|>\n<|im_start|>assistant\n"


def test_inkling_names_the_tool_that_answers(made):
    built, _ = made("inkling/inkling")
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    last = {"role": "assistant", "content": "", "tool_calls": [call]}
    stored = np.concatenate([built.render([user("x")]), built.demonstrate(last)])
    answer = {"role": "tool", "content": "3", "tool_call_id": "c"}
    assert "add" in built.decode(built.extend(stored, [user("x"), last], [answer]))


def test_saved_files_build_the_same_handler(made, tmp_path):
    built, _ = made("qwen3.5/Qwen3.5-4B")
    built.save(tmp_path)
    again = handler(Qwen35, tmp_path)
    np.testing.assert_array_equal(again.render([user("x")]), built.render([user("x")]))


@pytest.mark.slow
def test_building_a_family_loads_no_torch(tmp_path):
    import subprocess

    directory = bytes_checkpoint(tmp_path, Qwen3, "qwen3/Qwen-Qwen3-0.6B")
    code = (
        "import sys; from pathlib import Path; from miles import Context\n"
        "from miles_plugins.tito.families import Qwen3\n"
        f"h = Qwen3(Qwen3.Config(path={str(directory)!r}), Context(directory=Path('.')))\n"
        "h.render([{'role': 'user', 'content': 'x'}])\n"
        "print('torch' in sys.modules)"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert out.stdout.strip() == "False"


def test_kimi_thinking_keeps_thoughts_that_its_template_drops(made):
    built, _ = made("kimi/Kimi-K2-Thinking")
    lines = {line.talk: line for line in verify(built)}
    assert lines["reasoning_dropped"].kept == 1 and lines["reasoning_kept"].kept == 0
    said = {"role": "assistant", "content": "4", "reasoning_content": " Two and two. "}
    text = built.decode(built.demonstrate(said))
    assert text == "<think> Two and two. </think>4<|im_end|>"
    assert built.parse(built.demonstrate(said)) == said
    assert built.decode(built.demonstrate("4")) == "<think></think>4<|im_end|>"
    assert built.parse(built.demonstrate("4")) == {"role": "assistant", "content": "4"}


@pytest.mark.parametrize("name", ["kimi/Kimi-K2-Thinking", "kimi/moonshotai-Kimi-K2"])
def test_kimi_by_template_keeps_the_ids_of_calls_that_the_model_wrote(made, name):
    built, _ = made(name)
    text = (
        "<think>Hm.<|tool_calls_section_begin|><|tool_call_begin|>functions.add:7"
        '<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|><|tool_calls_section_end|><|im_end|>'
    )
    message = built.parse(built.encode(text))
    (call,) = message["tool_calls"]
    assert call["id"] == "functions.add:7" and call["function"]["name"] == "add"
    thinks = "Thinking" in name
    assert message.get("reasoning_content") == ("Hm." if thinks else None)
    assert message["content"] == ("" if thinks else "<think>Hm.")


@pytest.mark.parametrize("name", ["kimi/Kimi-K2-Thinking", "deepseek/deepseek-ai-DeepSeek-V3.1"])
def test_family_by_template_refuses_what_is_not_its_own(tmp_path, name):
    family, _ = PUBLISHED[name]
    other = bytes_checkpoint(tmp_path / "other", Qwen3, "qwen3/Qwen-Qwen3-0.6B")
    with pytest.raises(ConfigError, match=rf"tito {family.name} .*has no special token <"):
        handler(family, other)
    mixed = tmp_path / "mixed"
    bytes_checkpoint(mixed, family, "qwen3/Qwen-Qwen3-0.6B")
    with pytest.raises(ConfigError, match=r"ends a turn with|has no stop token|no tool calls of"):
        handler(family, mixed)
    own = bytes_checkpoint(tmp_path / "own", family, name)
    with pytest.raises(ConfigError, match=rf"tito {family.name}: arguments colour are fixed by"):
        handler(family, own, arguments={"colour": 1})
    built = handler(family, own)
    stored = np.concatenate([built.render([user("x")]), built.demonstrate("y")])
    said = {"role": "assistant", "content": "y"}
    with pytest.raises(EpisodeError, match="message 0 has role 'assistant'; after an assistant"):
        built.extend(stored, [user("x"), said], [said])
