"""Bad input gets a clear error before any process is started: `miles check` and `miles run`
agree."""

from __future__ import annotations

import json
from pathlib import Path

import pytest


def refused(miles, *overrides):
    """What `check` (exit 1) and `run` (exit 2) both say; neither leaves anything behind."""
    checked = miles("check", *overrides)
    ran = miles("run", *overrides)
    assert checked.code == 1, checked.text
    assert ran.code == 2, ran.text
    assert "Traceback" not in checked.text + ran.text
    assert not list(Path.cwd().glob("runs/*"))
    faults = [x for x in checked.out.splitlines() if not x.startswith("warning: ")]
    assert faults[0] in ran.err
    return checked.text


@pytest.mark.parametrize(
    ("override", "words"),
    [
        pytest.param("groups_per_stp=3", ["groups_per_stp", "groups_per_step"], id="root-key"),
        pytest.param("trainer.lrr=1", ["lrr", "trainer", "fsdp", "'lr'"], id="component-key"),
        pytest.param("trainer=fspd", ["fspd", "'fsdp'"], id="component"),
        pytest.param("enginee=torch", ["enginee", "engine"], id="kind"),
        pytest.param("tracker=[consol]", ["consol", "'console'"], id="one-of-many"),
        pytest.param("selector.admit=[zero_varience]", ["zero_varience"], id="filter"),
        pytest.param("experiment=smollm2_arithmetik", ["smollm2_arithmetic"], id="experiment"),
    ],
)
def test_misspelt_names_are_refused_with_the_close_match(miles, override, words):
    text = refused(miles, override)
    for word in words:
        assert word in text


@pytest.mark.parametrize(
    ("override", "words"),
    [
        pytest.param("steps=many", ["steps", "many", "int"], id="int"),
        pytest.param("steps=2.5", ["steps", "2.5", "int"], id="not-whole"),
        pytest.param("trainer.lr=fast", ["trainer", "lr", "fast", "float"], id="float"),
        pytest.param(
            "placement=beside", ["placement", "beside", "split", "colocated"], id="choice"
        ),
        pytest.param("groups_per_step=[1]", ["groups_per_step", "int"], id="list-for-int"),
        pytest.param("trainer={lr: 1}x", ["trainer"], id="not-an-override"),
    ],
)
def test_wrong_types_are_refused_with_key_value_and_type(miles, override, words):
    text = refused(miles, override)
    for word in words:
        assert word in text


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["max_lag=1", "placement=colocated"], ["max_lag", "colocated"]),
        (["publish_every=3"], ["publish_every", "max_lag"]),
        (["concurrency=4", "samples_per_group=8"], ["concurrency", "samples_per_group"]),
        (["groups_per_step=0"], ["groups_per_step", "0"]),
    ],
    ids=["async-colocated", "rare-publish", "narrow", "nothing-to-do"],
)
def test_illegal_combinations_are_refused_with_both_keys(miles, overrides, words):
    text = refused(miles, *overrides)
    for word in words:
        assert word in text


def test_check_reports_every_problem_in_one_go(miles):
    ended = miles(
        "check", "trainer.lrr=1", "steps=many", "engine=torhc", "max_lag=1", "placement=colocated"
    )
    assert ended.code == 1
    for word in ("lrr", "many", "torhc"):
        assert word in ended.text


def test_check_of_the_default_run_is_clean(miles):
    ended = miles("check")
    assert ended.code == 0, ended.text


def test_unknown_command_is_wrong_usage(miles):
    ended = miles("rum")
    assert ended.code == 2
    assert "run" in ended.err


def test_a_missing_required_value_is_named(miles):
    text = refused(miles, "experiment=grpo", "environment=dataset")
    assert "environment" in text
    assert "dataset" in text
    assert "path" in text
    assert "required" in text


DATASET = ("environment=dataset", "tito=bytes")


def _lines(*rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


GOOD = {"prompt": "1+1=", "answer": "2"}


def test_a_missing_data_file_is_named(miles, tmp_path):
    text = refused(miles, *DATASET, f"environment.path={tmp_path / 'nowhere.jsonl'}")
    assert str(tmp_path / "nowhere.jsonl") in text


def test_an_empty_data_file_is_named(miles, write):
    text = refused(miles, *DATASET, f"environment.path={write('empty.jsonl', '')}")
    assert "empty.jsonl" in text
    assert "no " in text or "empty" in text.replace("empty.jsonl", "")


def test_a_bad_line_is_named_with_file_and_number(miles, write):
    path = write("bad.jsonl", _lines(GOOD, GOOD) + '{"prompt": "3+\n' + _lines(GOOD))
    text = refused(miles, *DATASET, f"environment.path={path}")
    assert "bad.jsonl" in text
    assert "line 3" in text or "bad.jsonl:3" in text


def test_a_column_that_is_not_there_is_named_with_those_that_are(miles, write):
    path = write("data.jsonl", _lines({"question": "1+1=", "answer": "2"}))
    text = refused(miles, *DATASET, f"environment.path={path}")
    assert "'prompt'" in text
    assert "question" in text


def test_an_unknown_reward_is_named_with_the_choices(miles, write):
    path = write("data.jsonl", _lines(GOOD))
    text = refused(miles, *DATASET, f"environment.path={path}", "environment.reward=numerc")
    assert "numerc" in text
    assert "'numeric'" in text


def test_a_model_directory_that_is_not_there_is_named(miles, tmp_path):
    text = refused(miles, "model.init=load", f"model.path={tmp_path / 'nowhere'}")
    assert str(tmp_path / "nowhere") in text


def test_a_model_directory_without_config_is_named(miles, tmp_path):
    (tmp_path / "model").mkdir()
    text = refused(miles, "model.init=load", f"model.path={tmp_path / 'model'}")
    assert "config.json" in text


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A model directory as a checkpoint of the default run holds one, without a run: a trainer and
    a tokenizer save it."""
    from miles.testing import context
    from miles_plugins.model.qwen3 import Qwen3
    from miles_plugins.precision.fp32 import Fp32
    from miles_plugins.tito.bytes import Bytes
    from miles_plugins.trainer.fsdp import Fsdp

    around = context(folder := tmp_path_factory.mktemp("saved"))
    made = {"model": Qwen3(Qwen3.Config(), around), "precision": Fp32(Fp32.Config(), around)}
    trainer = Fsdp(Fsdp.Config(device="cpu"), context(folder, **made))
    trainer.save(folder, weights_only=True)
    Bytes(Bytes.Config(), around).save(folder / "model")
    return folder / "model"


def _model_copy(saved, folder, change):
    """That directory with `change(tensors)` applied to its tensors."""
    import shutil

    from safetensors.numpy import load_file, save_file

    copy = folder / "model"
    shutil.copytree(saved, copy)
    file = copy / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})
    return copy


def test_a_model_directory_as_it_was_saved_is_not_refused(miles, saved, tmp_path):
    copy = _model_copy(saved, tmp_path, lambda t: None)
    ended = miles("check", "model.init=load", f"model.path={copy}")
    assert ended.code == 0, ended.text


def test_a_model_directory_with_a_missing_tensor_is_refused(miles, saved, tmp_path):
    copy = _model_copy(saved, tmp_path, lambda t: t.pop("model.layers.1.mlp.up_proj.weight"))
    text = refused(miles, "model.init=load", f"model.path={copy}")
    assert "missing" in text
    assert "model.layers.1.mlp.up_proj.weight" in text


def test_a_model_directory_with_an_extra_tensor_is_refused(miles, saved, tmp_path):
    import numpy as np

    extra = np.zeros(3, np.float32)
    copy = _model_copy(saved, tmp_path, lambda t: t.update({"model.layers.9.extra.weight": extra}))
    text = refused(miles, "model.init=load", f"model.path={copy}")
    assert "model.layers.9.extra.weight" in text


def test_a_model_directory_with_a_tensor_of_another_shape_is_refused(miles, saved, tmp_path):
    name = "model.layers.0.mlp.down_proj.weight"
    copy = _model_copy(saved, tmp_path, lambda t: t.update({name: t[name][:3].copy()}))
    text = refused(miles, "model.init=load", f"model.path={copy}")
    assert name in text
    assert "shape" in text or "(3, " in text


def test_a_tokenizer_without_a_chat_template_is_refused(miles, saved, tmp_path):
    copy = _model_copy(saved, tmp_path, lambda t: None)
    (copy / "chat_template.jinja").unlink(missing_ok=True)
    config = copy / "tokenizer_config.json"
    settings = json.loads(config.read_text())
    settings.pop("chat_template", None)
    config.write_text(json.dumps(settings))
    text = refused(miles, "model.init=load", f"model.path={copy}", "tito=generic")
    assert "chat template" in text
    assert str(copy) in text


def test_a_plugin_file_that_is_not_there_is_named(miles, tmp_path):
    text = refused(miles, f"plugins=[{tmp_path / 'nowhere.py'}]")
    assert "nowhere.py" in text


def test_a_local_plugin_that_raises_is_refused_with_its_error(miles, write):
    path = write("broken.py", "raise RuntimeError('the cat sat on it')\n")
    text = refused(miles, f"plugins=[{path}]")
    assert "broken.py" in text
    assert "the cat sat on it" in text
    checked = miles("plugins", "check", path)
    assert checked.code == 1
    assert "the cat sat on it" in checked.text


LIAR = '''
from dataclasses import dataclass


class Liar:
    """Says it is a selector."""

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Config:
        pass

    def __init__(self, config, context):
        pass

    def next(self):
        return None


miles_components = {"selector": {"liar": Liar}}
'''


def test_a_plugin_that_lies_about_its_protocol_is_refused(miles, write):
    path = write("liar.py", LIAR)
    text = refused(miles, f"plugins=[{path}]", "selector=liar")
    assert "liar" in text
    assert "selector" in text
    assert "admit" in text
    checked = miles("plugins", "check", path, "--contract")
    assert checked.code == 1
    assert "admit" in checked.text


def test_a_plugin_that_claims_a_name_twice_is_refused_with_both_named(miles, write):
    path = write("twice.py", LIAR.replace('"liar": Liar', '"shuffle": Liar'))
    text = refused(miles, f"plugins=[{path}]")
    assert "shuffle" in text
    assert "twice.py" in text
    assert "claim" in text


def _distribution(folder, name, entry_points, module):
    """What pip leaves of an installed distribution, without pip."""
    info = folder / f"{name.replace('-', '_')}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(entry_points)
    (folder / f"{name.replace('-', '_')}.py").write_text(module)


def test_an_installed_plugin_that_raises_on_import_never_breaks_listing(
    miles, tmp_path, monkeypatch
):
    """As a component it breaks only runs that choose it; as a hook module, `run` and `check`."""
    component = "[miles.trainer]\nviolet = broken_trainer:Violet\n"
    _distribution(tmp_path, "broken-trainer", component, "raise OSError('no such GPU')\n")
    monkeypatch.syspath_prepend(tmp_path)
    listed = miles("plugins", "list")
    assert listed.code == 0
    assert "violet" in listed.out
    assert miles("check").code == 0
    text = refused(miles, "trainer=violet")
    assert "violet" in text
    assert "broken-trainer 1.0" in text
    assert "no such GPU" in text

    _distribution(tmp_path, "broken-hook", "[miles]\nhooked = broken_hook\n", "import nowhere\n")
    monkeypatch.syspath_prepend(tmp_path)
    listed = miles("plugins", "list")
    assert listed.code == 0
    assert "fsdp" in listed.out
    text = refused(miles)
    assert "hooked" in text
    assert "nowhere" in text


def test_two_distributions_with_one_name_are_both_named(miles, tmp_path, monkeypatch):
    for name in ("first-plugin", "second-plugin"):
        entry = f"[miles.trainer]\nviolet = {name.replace('-', '_')}:Violet\n"
        _distribution(tmp_path, name, entry, "class Violet: pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert miles("plugins", "list").code == 0
    text = refused(miles, "trainer=violet")
    for word in ("violet", "first-plugin 1.0", "second-plugin 1.0"):
        assert word in text
    assert miles("plugins", "check").code == 1
