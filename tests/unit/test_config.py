"""What overrides mean: choices, stages, precedence, origins, and what every fault says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from miles import Settings
from miles.composing.compose import own_folder, quoted
from miles.config import compose
from miles.errors import ConfigError
from miles.registry import schema

KEYS = ("experiment=grpo", "tito=bytes")


def stage(*overrides: str, **more):
    """The only stage of a plan without faults."""
    plan = compose([*KEYS, *overrides], **more).verify()
    assert len(plan.stages) == 1
    return plan.stages[0]


def faults(*overrides: str, **more) -> str:
    return "\n".join(compose(overrides, **more).faults)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of YAML: `experiment/` is there."""
    (tmp_path / "experiment").mkdir()
    return tmp_path


def write(folder: Path, path: str, text: str) -> None:
    file = folder / f"{path}.yaml"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


@pytest.fixture
def words(install, component):
    install(
        "words", {"miles.environment": {"words": "words_mod:Words"}}, {"words_mod.py": component}
    )


# ---------------------------------------------------------------- the default


def test_config_yaml_holds_every_setting_with_its_default():
    held = OmegaConf.to_container(OmegaConf.load(own_folder() / "config.yaml"))
    held.pop("defaults")
    expected = schema.defaults(Settings)
    expected.pop("experiment")  # a group, chosen in the defaults list
    assert held == expected


def test_compose_without_overrides_has_two_stages_and_no_fault():
    plan = compose([])
    assert plan.faults == ()
    assert [s.name for s in plan.stages] == ["sft", "grpo"]
    assert plan.stages[0].specs["engine"].name == "demonstration"
    assert plan.stages[1].specs["engine"].name == "torch"


@pytest.mark.parametrize("name", [p.stem for p in (own_folder() / "experiment").glob("*.yaml")])
def test_every_experiment_composes(name):
    overrides = ["environment.path=x"] if "dataset" in name else []
    found = list(compose([f"experiment={name}", *overrides]).faults)
    assert found == []


def test_spec_config_is_whole_and_plain():
    spec = stage("engine.max_len=99").specs["engine"]
    assert spec.config["max_len"] == 99
    assert set(spec.config) > {"rows", "device"}
    assert json.loads(json.dumps(spec.config)) == dict(spec.config)


def test_plan_is_immutable():
    one = stage()
    with pytest.raises(TypeError, match="immutable"):
        one.resolved["steps"] = 3
    with pytest.raises(TypeError, match="immutable"):
        one.resolved["engine"]["max_len"] = 3
    with pytest.raises(TypeError, match="immutable"):
        one.specs["engine"].config.update(max_len=3)
    with pytest.raises(AttributeError):
        one.settings.steps = 3


def test_resolved_survives_json_and_yaml():
    resolved = stage().resolved
    assert OmegaConf.to_container(OmegaConf.create(schema.plain(resolved))) == json.loads(
        json.dumps(resolved)
    )


# ---------------------------------------------------------------- values


def test_value_overrides_need_no_plus_but_may_have_one():
    assert stage("steps=7").settings.steps == 7
    assert stage("+steps=7").settings.steps == 7
    assert stage("++engine.max_len=7").specs["engine"].config["max_len"] == 7


def test_last_override_wins():
    assert stage("steps=1", "steps=2").settings.steps == 2


def test_tilde_goes_back_to_the_default():
    assert stage("engine.max_len=7", "~engine.max_len").specs["engine"].config["max_len"] == 0
    assert stage("~sandbox").specs["sandbox"] is None


def test_interpolation_reads_other_keys_and_keeps_its_origin():
    one = stage("seed=5", "run.name=run-${seed}", "selector.epochs=${seed}")
    assert one.settings.run.name == "run-5"
    assert one.specs["selector"].config["epochs"] == 5
    assert one.origins["run.name"] == "command line"


def test_interpolation_works_in_a_path_that_was_quoted(monkeypatch):
    monkeypatch.setenv("MINE", "/a b")
    one = stage(quoted("run.dir=${oc.env:MINE}/runs, all"))
    assert one.settings.run.dir == "/a b/runs, all"


def test_interpolation_that_leads_nowhere_is_told():
    assert "run.name: '${sed}' cannot be resolved" in faults(*KEYS, "run.name=${sed}")


def test_whole_number_is_text_where_text_is_wanted():
    assert stage("run.name=20260101").settings.run.name == "20260101"


@pytest.mark.parametrize("name", ["../../esc", "/tmp/esc", "a/b", "..", "."])
def test_run_name_that_leaves_the_folder_of_runs_is_refused(name):
    said = faults(*KEYS, f"run.name={name}")
    assert said == (
        f"run.name: {name!r} is not the name of one folder; take one without '/', such as "
        "run.name=mine, and say by run.dir where that folder is to be"
    )
    assert stage("run.name=..a b.1").settings.run.name == "..a b.1"


def test_mapping_override_sets_key_by_key():
    spec = stage("engine={max_len: 5, rows: 8}").specs["engine"]
    assert (spec.config["max_len"], spec.config["rows"]) == (5, 8)


def test_origin_is_default_file_or_command_line(folder):
    write(folder, "experiment/mine", "tito: bytes\nsteps: 3\ntrainer: {lr: 0.1}\n")
    one = compose(["experiment=mine", "seed=1"], folders=[folder]).verify().stages[0]
    assert one.origins["seed"] == "command line"
    assert one.origins["steps"] == f"{folder}/experiment/mine.yaml"
    assert one.origins["trainer.lr"] == f"{folder}/experiment/mine.yaml"
    assert one.origins["trainer.name"] == "conf/config.yaml"
    assert one.origins["engine.rows"] == "default"
    assert one.origins["experiment"] == "command line"


# ---------------------------------------------------------------- choices


def test_entry_point_without_yaml_composes(words):
    spec = stage("environment=words", "environment.word=nay").specs["environment"]
    assert (spec.name, spec.config["word"], spec.config["times"]) == ("words", "nay", 1)


def test_mapping_chooses_and_sets(words):
    spec = stage("environment={name: words, word: nay}").specs["environment"]
    assert (spec.name, spec.config["word"]) == ("words", "nay")


def test_file_presets_a_component_under_another_name(words, folder):
    write(folder, "environment/shy_words", "name: words\nword: nay\n")
    one = stage("environment=shy_words", folders=[folder])
    assert one.specs["environment"].name == "words"
    assert one.specs["environment"].config["word"] == "nay"
    assert one.origins["environment.word"] == f"{folder}/environment/shy_words.yaml"


def test_file_may_build_on_another(words, folder):
    write(folder, "environment/first", "name: words\nword: nay\ntimes: 2\n")
    write(folder, "environment/second", "defaults: [first, _self_]\ntimes: 3\n")
    config = stage("environment=second", folders=[folder]).specs["environment"].config
    assert (config["word"], config["times"]) == ("nay", 3)


def test_plugin_yaml_arrives_through_its_hook(install, component):
    site = install(
        "words",
        {"miles.environment": {"words": "words_mod:Words"}, "miles": {"words": "words_hooks"}},
        {
            "words_mod.py": component,
            "words_hooks.py": "from pathlib import Path\nfrom miles import hookimpl\n@hookimpl\n"
            "def miles_config_paths(): return str(Path(__file__).parent / 'yaml')\n",
            "yaml/environment/words.yaml": "name: words\ntimes: 4\n",
            "yaml/experiment/talk.yaml": "environment: words\ntito: bytes\n",
        },
    )
    one = compose(["experiment=talk"]).verify().stages[0]
    assert one.specs["environment"].config["times"] == 4
    assert one.origins["environment.times"] == f"{site}/yaml/environment/words.yaml"


def test_plugin_yaml_may_lie_in_a_package(install, component):
    install(
        "words",
        {"miles.environment": {"words": "words_pkg:Words"}, "miles": {"words": "words_hooks"}},
        {
            "words_pkg/__init__.py": component,
            "words_pkg/yaml/__init__.py": "",
            "words_pkg/yaml/environment/words.yaml": "name: words\ntimes: 4\n",
            "words_hooks.py": "from miles import hookimpl\n@hookimpl\n"
            "def miles_config_paths(): return 'pkg://words_pkg.yaml'\n",
        },
    )
    assert stage("environment=words").specs["environment"].config["times"] == 4


def test_choosing_another_component_leaves_the_files_values_behind(words, folder):
    write(folder, "experiment/mine", "tito: bytes\nenvironment: {digits: 3}\n")
    assert compose(["experiment=mine", "environment=words"], folders=[folder]).faults == ()
    kept = compose(["experiment=mine", "environment=arithmetic"], folders=[folder]).verify()
    assert kept.stages[0].specs["environment"].config["digits"] == 3


def test_order_of_choice_and_value_does_not_matter(words):
    spec = stage("environment.word=nay", "environment=words").specs["environment"]
    assert spec.config["word"] == "nay"


def test_tito_auto_is_the_models_handler():
    one = compose(["experiment=grpo"]).verify().stages[0]
    assert one.specs["tito"].name == "bytes"
    assert one.origins["tito.name"] == "model 'qwen3'"
    one = compose(["experiment=grpo", "model.init=load", "model.path=x"]).verify().stages[0]
    assert one.specs["tito"].name == "qwen3"


def test_tito_auto_of_a_model_without_a_choice_is_its_class_attribute(tmp_path):
    (tmp_path / "own.py").write_text(
        "from miles_plugins.model.qwen3 import Qwen3\n"
        "class Own(Qwen3):\n    tito = 'generic'\n    choose_tito = None\n"
        "miles_components = {'model': {'own': Own}}\n"
    )
    overrides = ["experiment=grpo", f"plugins=[{tmp_path}/own.py]", "model=own"]
    assert compose(overrides).verify().stages[0].specs["tito"].name == "generic"


def test_hydra_override_works_in_an_experiment(words, folder):
    write(
        folder,
        "experiment/hydra",
        "# @package _global_\ndefaults:\n  - override /environment: words\n"
        "  - override /tito: bytes\n  - override /tracker: [jsonl]\nsteps: 2\n",
    )
    one = compose(["experiment=hydra"], folders=[folder]).verify().stages[0]
    assert one.specs["environment"].name == "words"
    assert one.origins["environment.name"] == f"{folder}/experiment/hydra.yaml"
    assert [s.name for s in one.specs["tracker"]] == ["jsonl"]


def test_experiment_may_build_on_another_in_a_topic(folder):
    write(folder, "experiment/topic/first", "tito: bytes\nsteps: 2\nseed: 4\n")
    write(folder, "experiment/topic/second", "defaults: [topic/first, _self_]\nsteps: 3\n")
    one = compose(["experiment=topic/second"], folders=[folder]).verify().stages[0]
    assert (one.settings.steps, one.settings.seed) == (3, 4)
    assert one.settings.experiment == "topic/second"


def test_experiment_null_is_none():
    one = compose(["experiment=null", "tito=bytes"]).verify().stages[0]
    assert one.name == "grpo"
    assert one.settings.experiment == ""


@pytest.mark.parametrize(
    ("overrides", "name"),
    [
        ([], "arithmetic"),
        (["environment=tools"], "tools"),
        (["experiment=null", "tito=bytes", "environment=tools"], "tools"),
        (["experiment=null", "tito=bytes"], "arithmetic"),
        (["experiment=sessions"], "sessions"),
        (["experiment=grpo", "environment=tools"], "grpo"),
        (["stages.grpo.environment=tools"], "tools"),
    ],
)
def test_run_is_named_after_what_it_trains_on(overrides: list[str], name: str) -> None:
    """Every run of an environment of one's own was called `arithmetic-...`."""
    assert compose(overrides).stages[-1].subject == name


# ---------------------------------------------------------------- trackers, several at once


def test_trackers_are_a_list_with_fields_by_name():
    one = stage("tracker=[wandb,jsonl]", "tracker.wandb.mode=offline")
    assert [s.name for s in one.specs["tracker"]] == ["wandb", "jsonl"]
    assert one.specs["tracker"][0].config["mode"] == "offline"
    assert one.resolved["tracker"]["wandb"]["mode"] == "offline"


def test_tracker_may_be_one_word_or_none():
    assert [s.name for s in stage("tracker=jsonl").specs["tracker"]] == ["jsonl"]
    assert stage("tracker=null").specs["tracker"] == ()
    assert stage("tracker=[]").specs["tracker"] == ()


def test_tracker_that_is_not_chosen_takes_no_value():
    assert "tracker 'wandb' is not chosen (chosen: jsonl)" in faults(
        *KEYS, "tracker=jsonl", "tracker.wandb.mode=offline"
    )


def test_tracker_mapping_in_a_file_adds_to_the_choice(folder):
    write(folder, "experiment/mine", "tito: bytes\ntracker: {wandb: {mode: offline}}\n")
    one = compose(["experiment=mine"], folders=[folder]).verify().stages[0]
    assert [s.name for s in one.specs["tracker"]] == ["console", "jsonl", "wandb"]


# ---------------------------------------------------------------- stages


STAGES = """
tito: bytes
steps: 5
stages:
  warm: {engine: demonstration, algorithm: sft, steps: 10, trainer: {lr: 0.5}}
  hot: {steps: 20}
  cool: {}
"""


@pytest.fixture
def staged(folder):
    write(folder, "experiment/staged", STAGES)

    def stages(*overrides: str):
        plan = compose(["experiment=staged", *overrides], folders=[folder]).verify()
        return {s.name: s for s in plan.stages}

    return stages


def test_stages_are_in_order_and_inherit(staged):
    found = staged()
    assert list(found) == ["warm", "hot", "cool"]
    assert [s.settings.steps for s in found.values()] == [10, 20, 5]
    assert found["warm"].specs["trainer"].config["lr"] == 0.5
    assert found["hot"].specs["algorithm"].name == "grpo"
    assert "stages" not in found["warm"].resolved


def test_command_line_beats_stages_and_a_stage_on_it_beats_that(staged):
    found = staged("steps=1", "stages.hot.steps=2", "stages.hot.engine.max_len=9")
    assert [s.settings.steps for s in found.values()] == [1, 2, 1]
    assert found["hot"].specs["engine"].config["max_len"] == 9
    assert found["cool"].specs["engine"].config["max_len"] == 0


def test_component_key_applies_to_the_stages_that_have_it(staged):
    found = staged("engine.max_len=9")
    assert "max_len" not in found["warm"].specs["engine"].config
    assert found["hot"].specs["engine"].config["max_len"] == 9


def test_component_key_that_no_stage_has_is_told(folder):
    write(folder, "experiment/staged", STAGES)
    text = faults("experiment=staged", "engine.max_length=9", folders=[folder])
    assert "engine.max_length=9: engine 'demonstration' has no key 'max_length'" in text
    assert "engine 'torch' has no key 'max_length'; did you mean 'max_len'?" in text


def test_stage_can_be_left_out_and_added(staged):
    assert list(staged("stages.warm=null")) == ["hot", "cool"]
    assert list(staged("~stages.hot")) == ["warm", "cool"]
    assert staged("+stages.last.steps=3")["last"].settings.steps == 3
    assert list(staged("stages=null")) == ["grpo"]
    assert list(staged("stages={only: {steps: 2}}")) == ["only"]


def test_stage_that_is_not_there_names_the_close_match(folder):
    write(folder, "experiment/staged", STAGES)
    text = faults("experiment=staged", "stages.wram.steps=2", folders=[folder])
    assert "there is no stage 'wram'; did you mean 'warm'? valid: cool, hot, warm" in text


def test_fault_of_every_stage_is_told_once(folder):
    write(folder, "experiment/staged", STAGES)
    plan = compose(["experiment=staged", "groups_per_step=many"], folders=[folder])
    assert plan.faults == ("groups_per_step: expected int, got str 'many' (command line)",)


def test_fault_of_one_stage_names_it(folder):
    write(folder, "experiment/staged", STAGES)
    plan = compose(["experiment=staged", "stages.hot.steps=many"], folders=[folder])
    assert plan.faults == ("stage hot: steps: expected int, got str 'many' (command line)",)


# ---------------------------------------------------------------- faults


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("stpes=3", "there is no key 'stpes'; did you mean 'steps'?"),
        ("enviroment=words", "there is no key 'enviroment'; did you mean 'environment'?"),
        ("engine=trch", r"there is no engine 'trch'; did you mean 'torch'?"),
        ("experiment=grp", "there is no experiment 'grp'; did you mean 'grpo'?"),
        ("engine.row=3", "engine 'torch' has no key 'row'; did you mean 'rows'?"),
        ("engine.rows=many", "engine 'torch': rows: expected int, got str 'many' (command line)"),
        ("engine.rows=1.5", "engine 'torch': rows: expected int, got float 1.5 (command line)"),
        ("engine.rows=true", "engine 'torch': rows: expected int, got bool True (command line)"),
        ("engine.rows=null", "engine 'torch': rows: expected int, got null (command line)"),
        ("engine.rows.x=3", "engine 'torch': rows: expected int, got a mapping"),
        ("placement=splitt", "placement: str 'splitt' is not a choice; did you mean 'split'?"),
        ("engine.demonstration.x=1", "to choose it: engine=demonstration"),
        ("sandbox.image=x", "no sandbox is chosen; choose one with sandbox=NAME"),
        (
            "engine=null",
            "engine: none is chosen; choose one with engine=NAME; valid: demonstration",
        ),
        ("engine=[torch,demonstration]", "engine: one name is wanted, got torch, demonstration"),
        ("engine=3", "engine: expected a name, got 3"),
        (
            "environment=dataset",
            "environment 'dataset': path: a value is required (str): A `.jsonl`",
        ),
        ("run.nme=x", "run.nme: there is no such key; did you mean 'name'?"),
        ("steps", "override 'steps' cannot be read"),
        ("steps=1,2", "override 'steps=1,2' holds several values; sweep over them with -m"),
        ("engine@x=torch", "packages (@x) have no meaning here"),
    ],
)
def test_fault_says_what_where_and_what_instead(override, message):
    assert message in faults("experiment=grpo", "tito=bytes", override)


def test_every_fault_is_told_at_once():
    text = faults(*KEYS, "stpes=3", "engine.rows=x", "model=qwen", "steps", "tracker=[jsnl]")
    for part in ("'stpes'", "rows: expected int", "model 'qwen'", "override 'steps'", "'jsnl'"):
        assert part in text


def test_verify_raises_all_faults():
    with pytest.raises(ConfigError, match=r"(?s)stpes.*steps"):
        compose(["stpes=3"]).verify()


def test_fault_in_a_file_names_the_file(folder):
    write(folder, "experiment/mine", "tito: bytes\nstpes: 3\nengine: {row: 3, rows: x}\n")
    text = faults("experiment=mine", folders=[folder])
    file = f"({folder}/experiment/mine.yaml)"
    assert "valid: algorithm" in text and "'stpes'" in text and text.count(file) == 3
    assert "engine 'torch': row: there is no such key; did you mean 'rows'? " in text


def test_choice_in_a_file_that_the_command_line_replaces_is_no_fault(folder):
    write(folder, "experiment/mine", "tito: bytes\nengine: absent\n")
    assert "there is no engine 'absent'" in faults("experiment=mine", folders=[folder])
    assert faults("experiment=mine", "engine=torch", folders=[folder]) == ""


@pytest.mark.parametrize("text", ["a: [", "- 1\n- 2\n", "a: ${"])
def test_broken_yaml_names_the_file(folder, text):
    write(folder, "experiment/mine", text)
    assert "experiment/mine" in faults("experiment=mine", folders=[folder])


def test_folder_that_is_missing_is_told(tmp_path):
    assert f"config folder {tmp_path}/no of --config-dir does not exist" in faults(
        folders=[tmp_path / "no"]
    )


def test_same_file_in_two_folders_is_a_conflict(folder, tmp_path_factory):
    other = tmp_path_factory.mktemp("other")
    for place in (folder, other):
        write(place, "environment/twice", "name: arithmetic\n")
    assert "environment/twice.yaml is offered by" in faults(
        *KEYS, "environment=twice", folders=[folder, other]
    )


def test_component_that_cannot_be_imported_is_a_fault(install):
    install(
        "gpu", {"miles.engine": {"gpu": "gpu_mod:Gpu"}}, {"gpu_mod.py": "raise OSError('no GPU')"}
    )
    assert "engine 'gpu' (gpu_mod:Gpu of gpu 1.0) cannot be imported: OSError: no GPU" in faults(
        *KEYS, "engine=gpu"
    )


# ---------------------------------------------------------------- local files


LOCAL = "\nmiles_components = {'environment': {'mine': Words}}\n"


def test_local_plugin_from_the_command_line(tmp_path, component):
    file = tmp_path / "a b,(c)=d.py"
    file.write_text(component + LOCAL)
    plan = compose([*KEYS, quoted(f"plugins=[{file}]".replace(",", "")), "environment=mine"])
    assert "there is no such file" in "\n".join(e.detail for e in plan.registry.broken.values())
    plan = compose([*KEYS, quoted(f"plugins={file}"), "environment=mine"]).verify()
    assert plan.stages[0].settings.plugins == (str(file),)
    assert plan.stages[0].specs["environment"].name == "mine"


def test_local_plugin_from_an_experiment(folder, component):
    (folder / "mine.py").write_text(component + LOCAL)
    write(
        folder, "experiment/mine", f"tito: bytes\nenvironment: mine\nplugins: [{folder}/mine.py]\n"
    )
    plan = compose(["experiment=mine"], folders=[folder]).verify()
    assert plan.stages[0].specs["environment"].name == "mine"


def test_recorded_overrides_hold_plugins_as_absolute_paths(tmp_path, component, monkeypatch):
    (tmp_path / "mine.py").write_text(component + LOCAL)
    monkeypatch.chdir(tmp_path)
    plan = compose([*KEYS, "plugins=[./mine.py]", "environment=mine"]).verify()
    monkeypatch.chdir("/")
    assert compose(plan.overrides).verify().stages == plan.stages


def test_recorded_folders_are_absolute(folder, monkeypatch):
    write(folder, "experiment/mine", "steps: 7")
    monkeypatch.chdir(folder.parent)
    plan = compose([*KEYS[1:], "experiment=mine"], folders=[folder.name])
    monkeypatch.chdir("/")
    assert plan.folders == (str(folder),)
    assert compose(plan.overrides, folders=plan.folders).stages == plan.stages
