"""What `miles check` refuses: the loop's keys, components, combinations, all at once."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from miles import ConfigError, SessionKeys, Settings
from miles.check import Planned, check, setting_faults
from miles.config import compose
from miles.plugins import Registry
from miles_plugins.transport.calling import folder_faults

KEYS = ("experiment=grpo", "tito=bytes")
ENGINE_IN_ROLLOUTS = '''
from dataclasses import dataclass


class Apart:
    """Samples in rollout workers."""

    samples = True
    process = "rollout"

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Config:
        """Nothing."""

    def __init__(self, config, context):
        pass


miles_components = {"engine": {"apart": Apart}}
'''


def found(*overrides: str, **more) -> str:
    """Faults of a one-stage run, joined."""
    return "\n".join(check(compose([*KEYS, *overrides], **more)).faults)


def local(tmp_path: Path, component: str) -> tuple[str, str]:
    """Overrides that choose a component from a local file."""
    file = tmp_path / "mine.py"
    file.write_text(component + "\nmiles_components = {'environment': {'mine': Words}}\n")
    return f"plugins=[{file}]", "environment=mine"


def test_default_run_and_every_setting_of_it_are_good():
    report = check(compose([]))
    assert report.faults == ()
    assert report.warnings == ()


@pytest.mark.parametrize(
    ("chosen", "instead"),
    [
        ("tracker=[console]", "(console) writes metrics.jsonl"),
        ("tracker=[console]", "use tracker=[console,jsonl]"),
        ("tracker=null", "(there is none) writes metrics.jsonl"),
        ("tracker=null", "use tracker=[jsonl]"),
        ("tracker.jsonl.file=m.jsonl", "jsonl does, unless another file is named"),
    ],
)
def test_check_warns_of_a_run_whose_report_will_be_empty(chosen: str, instead: str) -> None:
    report = check(compose([chosen]))
    assert report.faults == ()
    (warning,) = report.warnings
    assert instead in warning
    assert "without which `miles report` and the report at the run's end are empty" in warning


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"steps": -1}, "steps: -1 is less than 0"),
        ({"groups_per_step": 0}, "groups_per_step: 0 is less than 1"),
        ({"samples_per_group": 0}, "samples_per_group: 0 is less than 1"),
        ({"concurrency": 4}, "concurrency (4) is less than samples_per_group (8)"),
        ({"capacity_factor": 0.5}, "capacity_factor: 0.5 is less than 1"),
        ({"publish_every": 2}, "publish_every (2) is more than max_lag + 1 (1)"),
        ({"publish_every": 4, "max_lag": 2}, "publish_every (4) is more than max_lag + 1 (3)"),
        ({"max_lag": 1, "placement": "colocated"}, "max_lag (1) and placement=colocated"),
        ({"unused": "retry", "max_retries": 0}, "unused=retry needs a limit: max_retries is 0"),
        ({"pause": "abort", "max_lag": 1}, "pause=abort ends conversations in the middle"),
        ({"partial": True}, "partial=true gives groups tokens of older weights, and max_lag=0"),
        ({"temperature": 0.0}, "temperature: 0.0 is not above 0; 0 is greedy"),
        ({"top_p": 0.0}, "top_p: 0.0 is not above 0"),
        ({"top_p": 1.5}, "top_p: 1.5 is above 1"),
        ({"temperature": float("nan")}, "temperature: nan is not above 0"),
        ({"starved_after_s": 0.0}, "starved_after_s: 0.0 is not above 0"),
        ({"silent_after_s": 0.0}, "silent_after_s: 0.0 is not above 0"),
        ({"interrupt_grace_s": -1.0}, "interrupt_grace_s: -1.0 is not above 0"),
        ({"max_new_tokens": 0}, "max_new_tokens: 0 is less than 1"),
        ({"rollout_workers": -1}, "rollout_workers: -1 is less than 0"),
        ({"max_restarts": -1}, "max_restarts: -1 is less than 0"),
        ({"session": SessionKeys(max_turns=0)}, "session.max_turns: 0 is less than 1"),
        ({"session": SessionKeys(max_sessions=0)}, "session.max_sessions: 0 is less than 1"),
        ({"session": SessionKeys(idle_s=0.0)}, "session.idle_s: 0.0 is not above 0"),
        ({"session": SessionKeys(port=70000)}, "session.port: 70000 is above 65535"),
        (
            {"session": SessionKeys(port=8000), "rollout_workers": 2},
            "session.port (8000) and rollout_workers (2)",
        ),
    ],
)
def test_setting_that_cannot_work_is_refused(values, message):
    faults = list(setting_faults(replace(Settings(), **values)))
    assert len(faults) == 1
    assert message in faults[0]


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"publish_every": 3, "max_lag": 2},
        {"max_lag": 4},
        {"placement": "colocated"},
        {"pause": "abort", "partial": True, "max_lag": 1},
        {"steps": 0},
    ],
)
def test_setting_that_can_work_is_not(values):
    assert list(setting_faults(replace(Settings(), **values))) == []


def test_engine_without_workers_is_refused():
    assert "engine.workers: 0 is less than 1" in found("engine.workers=0")


def test_every_problem_is_told_in_one_go(tmp_path):
    text = found(
        "stpes=3",
        "engine.rows=many",
        "publish_every=9",
        "model.init=load",
        "model.path=/absent/model",
        "resume=/absent/run",
        f"plugins=[{tmp_path}/no.py]",
    )
    for part in (
        "no key 'stpes'",
        "rows: expected int",
        "publish_every (9)",
        "/absent/model",
        "resume: /absent/run does not exist",
        f"local plugin {tmp_path}/no.py: there is no such file",
    ):
        assert part in text


def test_fault_of_both_stages_is_told_once():
    report = check(compose(["top_p=2"]))
    assert report.faults == ("top_p: 2.0 is above 1",)


def test_fault_of_one_stage_names_it():
    report = check(compose(["stages.grpo.top_p=2"]))
    assert report.faults == ("stage grpo: top_p: 2.0 is above 1",)


def test_data_file_that_is_missing_is_told():
    assert "/absent.jsonl" in found("environment=dataset", "environment.path=/absent.jsonl")


def test_prompt_longer_than_the_context_is_told():
    text = found("max_new_tokens=251")
    assert "environment 'arithmetic': the prompt of task" in text
    assert "with max_new_tokens (251) do not fit the model's context of 256" in text


def test_environment_whose_tools_do_not_fit_is_told_instead_of_failing_every_attempt():
    report = check(compose(["environment=harness"]))
    (fault,) = report.faults
    assert "stage grpo: environment 'harness': the prompt of task" in fault
    assert ", its 1 tool included, has 96 tokens, which with max_new_tokens (8) do not fit" in fault
    assert fault.endswith("engine.max_len of 64; it takes 104 at least")
    (warning,) = report.warnings
    assert "`experiment=calculator_agent environment=harness` sets what they need" in warning
    assert check(compose(["experiment=calculator_agent", "environment=harness"])).faults == ()


def test_prompt_that_is_text_is_not_said_to_have_tools(tmp_path, component):
    """Its tokens were counted without them."""
    body = component.replace("    def tasks", "    schemas = ({},)\n\n    def tasks", 1)
    assert "schemas" in body
    text = found(*local(tmp_path, body), "engine.max_len=8")
    assert re.search(r"the prompt of task '\S+' has \d+ tokens", text), text


def test_tools_of_an_environment_that_are_no_list_are_a_fault_and_no_traceback(tmp_path, component):
    body = component.replace("    def tasks", "    def schemas(self): ...\n\n    def tasks", 1)
    text = found(*local(tmp_path, body))
    assert "environment 'mine': schemas is a method; it has to be a list of tools" in text, text


def test_demonstrations_need_solutions(tmp_path, component):
    overrides = local(tmp_path, component.replace(", solution=self.config.word", ""))
    text = found(*overrides, "engine=demonstration", "algorithm=sft")
    assert "environment 'mine': task '1' has no solution, which engine 'demonstration'" in text


def test_environment_without_tasks_is_told(tmp_path, component):
    overrides = local(tmp_path, component.replace("return [Task", "return [] and [Task"))
    assert "environment 'mine': there are no training tasks" in found(*overrides)


@pytest.mark.parametrize("raising", ["tasks", "check"])
def test_bug_in_a_component_hides_no_other_fault_and_names_its_line(tmp_path, component, raising):
    """`miles check` ended in a traceback."""
    source = component.replace("return [Task", "return {}['gone'] and [Task")
    if raising == "check":
        source = (
            component
            + """
    @classmethod
    def check(cls, config, planned):
        return {}["gone"]
"""
        )
    text = found(*local(tmp_path, source), "top_p=2")
    assert "KeyError: 'gone'" in text and "top_p: 2.0 is above 1" in text
    assert f"in {raising}" in text


def test_environment_that_lies_about_its_protocol_is_told(tmp_path, component):
    overrides = local(tmp_path, component.replace("def tasks(", "async def tasks("))
    assert "tasks must not be a coroutine" in found(*overrides)


def test_environment_that_cannot_be_built_hides_no_other_fault(tmp_path, component):
    overrides = local(tmp_path, component.replace("self.config = config", "raise OSError('down')"))
    text = found(*overrides, "evaluator.samples=-1", "top_p=2")
    assert "cannot be built: OSError: down" in text
    assert "top_p: 2.0 is above 1" in text
    assert "selector" not in text


def test_handler_with_more_ids_than_the_embedding_is_told():
    text = found("model.vocab_size=100")
    assert "tito 'bytes' has ids up to" in text
    assert "embedding of model 'qwen3' has 100 rows" in text


def test_handler_that_does_not_match_the_checkpoint_is_told(tmp_path):
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    tokenizer = Tokenizer(WordLevel({"?": 0, "Two": 1}, unk_token="?"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    config = {"model_type": "qwen3", "vocab_size": 300, "max_position_embeddings": 4096}
    (tmp_path / "config.json").write_text(json.dumps(config))
    text = found("model.init=load", f"model.path={tmp_path}")
    assert f"tito 'bytes' does not match the checkpoint {tmp_path}" in text
    assert "by its tokenizer.json; model 'qwen3' names 'qwen3'" in text


def test_stages_share_model_runtime_and_trackers():
    plan = compose(["stages.grpo.model=llama", "stages.grpo.tracker=jsonl"])
    text = "\n".join(check(plan).faults)
    assert "stage grpo: model differs from that of stage sft" in text
    assert "stage grpo: tracker differs from that of stage sft" in text


def test_evaluator_without_a_sampling_engine_is_a_warning():
    report = check(compose([*KEYS, "engine=demonstration", "algorithm=sft"]))
    assert report.faults == ()
    assert "no stage has an engine that samples" in report.warnings[0]


def test_engine_chosen_for_all_stages_warns_that_sft_imitates_itself():
    """`miles run engine=torch` took the demonstrations from the warm-up, and nothing said so."""
    (warning,) = check(compose(["engine=torch"])).warnings
    assert "stage sft: algorithm 'sft': engine 'torch' samples" in warning
    assert check(compose(["stages.grpo.engine=torch"])).warnings == ()
    assert check(compose(["engine=torch", "stages.sft.engine=demonstration"])).warnings == ()
    said = check(compose(["engine=torch", "stages.sft.steps=0"])).warnings
    assert not [warning for warning in said if "'sft': engine" in warning]


def test_engine_of_no_such_name_is_one_fault_without_an_attribute_error():
    """`miles check engine=vllm` warned of a NoneType without a name, in lines of sft.py."""
    report = check(compose(["engine=vllm"]))
    assert report.warnings == () and len(report.faults) == 1
    assert "there is no engine 'vllm'" in report.faults[0]


def test_component_may_check_its_own_stage(tmp_path, component):
    own = """
    @classmethod
    def check(cls, config, planned):
        tito, model = planned.specs["tito"].name, planned.built["model"]
        return [f"{config.word} {planned.settings.seed} {tito} {model.random} {planned.stage}"]
"""
    overrides = local(tmp_path, component + own)
    assert "environment 'mine': yes 7 bytes True grpo" in found(*overrides, "seed=7")


def test_component_with_a_wrong_value_is_told_once_and_not_checked_further(tmp_path, component):
    own = """
    @classmethod
    def check(cls, config, planned):
        return ["asked in vain"]
"""
    overrides = local(tmp_path, component + own)
    text = found(*overrides, "environment.times=often", "model.init=load", "model.layers=two")
    assert text.count("times: expected int") == 1
    assert text.count("layers: expected int") == 1
    assert "in vain" not in text


def test_plugins_may_check_a_stage(tmp_path):
    file = tmp_path / "rule.py"
    file.write_text(
        "import miles\n@miles.hookimpl\ndef miles_check(config):\n"
        '    return [f\'no {config["engine"]["name"]} on Sundays\']\n'
    )
    assert "no torch on Sundays" in found(f"plugins=[{file}]")


def test_broken_hook_plugin_is_told(install):
    install("fragile", {"miles": {"fragile": "fragile_hooks"}}, {"fragile_hooks.py": "1 / 0"})
    assert "hook 'fragile' (fragile_hooks of fragile 1.0) cannot be imported" in found()


def test_rewards_in_conflict_are_told(tmp_path):
    files = []
    for name in ("one", "two"):
        file = tmp_path / f"{name}.py"
        file.write_text("import miles\n@miles.hookimpl\ndef miles_rewards(): return {'r': len}\n")
        files.append(str(file))
    assert "reward 'r' is claimed by" in found(f"plugins=[{','.join(files)}]")


def test_check_imports_no_torch_and_leaves_nothing_behind(tmp_path, monkeypatch):
    import subprocess
    import sys

    monkeypatch.chdir(tmp_path)
    code = (
        "import sys; from miles.check import check; from miles.config import compose; "
        "assert not check(compose([])).faults; "
        "print([m for m in ('torch', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    assert list(tmp_path.iterdir()) == []


def test_registry_of_the_plan_is_the_one_checked(install, component):
    points = {"miles.environment": {"words": "words_mod:Words"}}
    install("words", points, {"words_mod.py": component})
    assert found("environment=words") == ""
    text = found("environment=words", registry=Registry.load(block=["words"]))
    assert "words 1.0 offers it, but MILES_PLUGINS or MILES_BLOCK leaves it out" in text


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("trainer.lr=-1", "trainer 'fsdp': lr is -1.0; at least 0"),
        ("engine=demonstration", "algorithm 'grpo': compares what the policy sampled, but the en"),
        ("samples_per_group=1", r"samples_per_group (1) must be at least 2"),
        ("engine.max_len=8", "do not fit engine.max_len of 8"),
        ("engine=sglang", "has no SGLang installed; it lives in an environment of its own"),
    ],
)
def test_check_finds_what_a_run_would_stumble_over(override, words):
    faults = "\n".join(check(compose(["experiment=grpo", override])).faults)
    assert words in faults


@pytest.mark.parametrize("below", ["", "/deeper/still"])
@pytest.mark.parametrize(
    ("key", "of"),
    [
        ("run.dir", ()),
        ("transport.directory", ("transport=disk",)),
        ("transport.directory", ("transport=disk_delta",)),
        ("transport.local", ("transport=disk_delta",)),
        ("trainer.optimizer_dir", ("trainer.optimizer_state=disk",)),
    ],
)
def test_folder_that_cannot_be_written_is_told_before_a_run_instead_of_a_traceback(
    key: str, of: tuple[str, ...], below: str, tmp_path: Path
) -> None:
    name = key.partition(".")[2] if key != "run.dir" else key
    (tmp_path / "file").touch()
    for place, why in ((tmp_path / "file", "is not a folder"), (Path("/proc"), "be written")):
        lines = [line for line in found(*of, f"{key}={place}{below}").splitlines() if why in line]
        assert len(lines) == 1 and f"{name}: {place}{below}: " in lines[0]
    assert found(*of, f"{key}={tmp_path}/new/one") == ""
    assert [path.name for path in tmp_path.iterdir()] == ["file"], "nothing was made"


def test_folder_that_another_machine_may_see_is_not_judged_by_this_one(tmp_path: Path) -> None:
    elsewhere = SimpleNamespace(specs={"runtime": SimpleNamespace(name="ray")})
    config = SimpleNamespace(directory=str(tmp_path / "file" / "below"))
    (tmp_path / "file").touch()
    assert folder_faults(config, elsewhere, "directory") == []
    assert len(folder_faults(config, SimpleNamespace(specs={}), "directory")) == 1


def test_check_refuses_an_engine_that_no_transport_reaches(tmp_path):
    (tmp_path / "apart.py").write_text(ENGINE_IN_ROLLOUTS)
    words = [f"plugins=[{tmp_path}/apart.py]", "experiment=grpo", "engine=apart"]
    faults = "\n".join(check(compose(words)).faults)
    assert "'apart' samples in rollout workers, where no transport brings weights" in faults
    faults = "\n".join(check(compose([*words, "evaluator=fleet"])).faults)
    assert "evaluator 'fleet' loads engines of its own from snapshots, and engine 'apart'" in faults


def test_check_refuses_experts_that_the_trainer_would_not_replay(tmp_path):
    said = "session.experts=true and trainer 'fsdp': it does not replay the experts"
    assert said in found("session.experts=true")
    assert said not in found("session.experts=true", "steps=0")
    (tmp_path / "mine.py").write_text(
        "from miles_plugins.trainer.fsdp import Fsdp\n"
        "class Replays(Fsdp):\n    replays_experts = True\n"
        "miles_components = {'trainer': {'replays': Replays}}\n"
    )
    mine = (f"plugins=[{tmp_path}/mine.py]", "trainer=replays")
    assert "session.experts" not in found("session.experts=true", *mine)


def test_check_refuses_to_train_on_tasks_with_images(tmp_path, component):
    picture = "[{'type': 'text', 'text': 'What?'}, {'type': 'image', 'image': b'png'}]"
    messages = f"({{'role': 'user', 'content': {picture}}},)"
    shown = component.replace('prompt="say "', f"prompt={messages}")
    said = "environment 'mine': task '1' has images, which no trainer takes yet"
    assert said in found(*local(tmp_path, shown))


def test_check_refuses_conversations_that_cannot_go_through_the_session_server():
    raw = found("session.through=server")
    assert "session.through=server: environment 'arithmetic' gives task" in raw
    assert "as raw text, and the chat completions API takes messages" in raw
    agent = ["experiment=calculator_agent"]
    assert check(compose(agent)).faults == ()
    branching = check(compose([*agent, "session.extension=branching"])).faults
    assert [fault.partition(":")[0] for fault in branching] == ["stage grpo"]
    assert "use session.extension=linear" in branching[0]
    own = [*agent, "environment=harness", "session.extension=branching"]
    assert check(compose(own)).faults == ()
    with pytest.raises(ConfigError, match=r"session\.through.*'process', 'server'|process, server"):
        compose(["session.through=serve"]).verify()


@pytest.mark.parametrize(
    ("overrides", "warned"),
    [
        ([], False),  # a stage of demonstrations is first
        (["experiment=grpo", "tito=bytes"], True),
        (["experiment=grpo", "tito=bytes", "steps=0"], False),
        (["stages.sft.steps=0"], True),
        (["~stages.sft"], True),
        (["experiment=grpo", "tito=bytes", "algorithm=sft", "engine=demonstration"], False),
        (["experiment=grpo", "tito=bytes", "resume=."], False),
        (["experiment=case_glm5_2_744b"], False),  # for the simulator
    ],
)
def test_check_warns_of_grpo_over_weights_that_nothing_was_learned_by(
    overrides: list[str], warned: bool
) -> None:
    report = check(compose(overrides))
    assert report.faults == ()
    about = [w for w in report.warnings if "algorithm 'grpo': the model's weights are random" in w]
    assert len(about) == warned
    if warned:
        assert "begin with a stage of engine=demonstration and algorithm=sft" in about[0]
        assert "or load weights (model.init=load model.path=DIRECTORY)" in about[0]


def test_check_is_silent_about_grpo_over_loaded_weights() -> None:
    model = SimpleNamespace(random=False)
    planned = Planned(stage="", settings=Settings(), specs={}, built={"model": model}, fresh=True)
    grpo = Registry.load().component("algorithm", "grpo")
    assert grpo.warnings(grpo.Config(), planned) == ()
    model.random = True
    assert grpo.warnings(grpo.Config(), planned)
