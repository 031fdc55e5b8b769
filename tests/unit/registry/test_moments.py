"""Every hook, implemented by a plugin and called the way miles calls it."""

from __future__ import annotations

import argparse
import inspect
import sys

import pytest

from miles import (
    KINDS,
    Batch,
    ConfigError,
    Context,
    Drop,
    Group,
    PluginError,
    Receipt,
    Score,
    Spec,
    Task,
    Update,
    flatten,
    hookspecs,
)
from miles.config import compose
from miles.plugins import SPECIFIED, Registry
from miles.registry.moments import Moments
from miles.testing import make_sample

TASK = Task(id="t", prompt="p")
GROUP = Group(id=3, task=TASK, trajectories=())


@pytest.fixture
def watch(tmp_path):
    """`watch("miles_x(a, b): return 1")` gives a registry and the list of seen arguments."""

    def load(*hooks: str):
        lines = ["import miles", "seen = []"]
        for hook in hooks:
            head, _, body = hook.partition(":")
            lines += [
                "@miles.hookimpl",
                f"def {head}:",
                f"    seen.append(dict(locals()));{body or ' pass'}",
            ]
        file = tmp_path / "watcher.py"
        file.write_text("\n".join(lines))
        registry = Registry.load(files=[file])
        registry.verify()
        return registry, sys.modules["miles_local_watcher"].seen

    return load


def test_moments_has_a_typed_call_for_every_hook():
    # read by the registry
    answered = {"miles_config_paths", "miles_rewards", "miles_filters", "miles_tools"}
    answered.add("miles_agents")
    for name in SPECIFIED:
        if name in answered or name.startswith("miles_make_"):
            continue
        declared = inspect.signature(getattr(hookspecs, name)).parameters
        typed = inspect.signature(getattr(Moments, name.removeprefix("miles_"))).parameters
        assert list(typed)[1:] == list(declared), name


def test_hook_that_nobody_watches_costs_nothing_and_answers_nothing():
    registry = Registry.load(block=["builtin"])
    batch = object()
    assert registry.hook.prepared(groups=(), batch=batch) is batch
    assert registry.hook.check(config={}) == []
    registry.hook.run_finished(directory="d", outcome="finished")


def test_hook_config_paths(watch, tmp_path):
    (tmp_path / "yaml" / "environment").mkdir(parents=True)
    (tmp_path / "yaml" / "environment" / "hard.yaml").write_text("name: arithmetic\ndigits: 3\n")
    registry, _ = watch(f"miles_config_paths(): return {str(tmp_path / 'yaml')!r}")
    plan = compose(
        ["experiment=grpo", "tito=bytes", "environment=hard"], registry=registry
    ).verify()
    assert plan.stages[0].specs["environment"].config["digits"] == 3


def test_hook_commands(watch):
    registry, _ = watch(
        "miles_commands(subparsers): subparsers.add_parser('greet').set_defaults(func=len)"
    )
    parser = argparse.ArgumentParser()
    registry.hook.commands(parser.add_subparsers())
    assert parser.parse_args(["greet"]).func is len


def test_hook_rewards(watch):
    registry, _ = watch("miles_rewards(): return {'short': lambda text, task: -len(text)}")
    assert registry.rewards()["short"]("abc", TASK) == -3


def test_hook_filters(watch):
    registry, _ = watch("miles_filters(): return {'odd': lambda group: miles.Drop(reason='odd')}")
    assert registry.filters()["odd"](GROUP) == Drop(reason="odd")


def test_hook_tools(watch):
    registry, _ = watch("miles_tools(): return {'double': lambda word: word * 2}")
    assert registry.tools()["double"]("ab") == "abab"


def test_hook_agents(watch):
    registry, _ = watch("miles_agents(): return {'lazy': lambda task, **address: 0.0}")
    assert registry.agents()["lazy"](TASK, base_url="") == 0.0


def test_hook_check(watch):
    registry, seen = watch(
        "miles_check(config): return ['too many steps'] if config['steps'] > 9 else []"
    )
    assert registry.hook.check(config={"steps": 10}) == ["too many steps"]
    assert registry.hook.check(config={"steps": 9}) == []
    assert seen[0]["config"] == {"steps": 10}


def test_hook_check_may_answer_one_sentence(watch):
    registry, _ = watch("miles_check(config): return 'wrong'")
    assert registry.hook.check(config={}) == ["wrong"]


def test_hook_run_started(watch):
    registry, seen = watch("miles_run_started(directory, config)")
    registry.hook.run_started(directory="d", config={"a": 1})
    assert seen == [{"directory": "d", "config": {"a": 1}}]


def test_hook_stage_started(watch):
    registry, seen = watch("miles_stage_started(stage, version)")
    registry.hook.stage_started(stage="sft", version=7)
    assert seen == [{"stage": "sft", "version": 7}]


def test_hook_group_started(watch):
    registry, seen = watch("miles_group_started(task, group)")
    registry.hook.group_started(group=3, task=TASK)
    assert seen == [{"group": 3, "task": TASK}]


def test_hook_group_finished(watch):
    registry, seen = watch("miles_group_finished(group, drop)")
    registry.hook.group_finished(group=GROUP, drop=Drop(reason="stale"))
    assert seen[0]["group"] is GROUP
    assert seen[0]["drop"].reason == "stale"


def test_hook_prepared(watch):
    batch = Batch(tokens=flatten([make_sample()]), terms=())
    registry, seen = watch("miles_prepared(groups, batch): return None")
    assert registry.hook.prepared(groups=(GROUP,), batch=batch) is batch
    assert seen[0]["groups"] == (GROUP,)
    registry, _ = watch(
        "miles_prepared(batch): "
        "return miles.Batch(tokens=batch.tokens, terms=(), metrics={'x': 1.0})"
    )
    assert registry.hook.prepared(groups=(GROUP,), batch=batch).metrics == {"x": 1.0}


def test_hook_step_finished(watch):
    registry, seen = watch("miles_step_finished(step, metrics, groups, update)")
    update = Update(version=2)
    registry.hook.step_finished(step=2, groups=(GROUP,), update=update, metrics={"lr": 0.1})
    assert seen == [{"step": 2, "groups": (GROUP,), "update": update, "metrics": {"lr": 0.1}}]


def test_hook_weights_published(watch):
    registry, seen = watch("miles_weights_published(receipt)")
    receipt = Receipt(version=2, digest="d", bytes=8, seconds=0.1)
    registry.hook.weights_published(receipt=receipt)
    assert seen == [{"receipt": receipt}]


def test_hook_evaluated(watch):
    registry, seen = watch("miles_evaluated(step, result)")
    result = Score(set="heldout", score=0.5, version=2, samples=4)
    registry.hook.evaluated(step=2, result=result)
    assert seen == [{"step": 2, "result": result}]


def test_hook_checkpoint_saved(watch):
    registry, seen = watch("miles_checkpoint_saved(step, directory)")
    registry.hook.checkpoint_saved(step=2, directory="d")
    assert seen == [{"step": 2, "directory": "d"}]


def test_hook_run_finished(watch):
    registry, seen = watch("miles_run_finished(directory, outcome)")
    registry.hook.run_finished(directory="d", outcome="failed")
    assert seen == [{"directory": "d", "outcome": "failed"}]


@pytest.mark.parametrize("kind", KINDS)
def test_hook_make(watch, kind):
    registry, seen = watch(
        f"miles_make_{kind}(name, config, context): return (name, config, context)"
    )
    assert registry.hook.make(kind, "n", "c", "x") == ("n", "c", "x")
    assert seen == [{"name": "n", "config": "c", "context": "x"}]


def test_hook_make_falls_back_to_the_entry_point(watch, tmp_path):
    registry, seen = watch("miles_make_precision(name)")
    built = registry.build(Spec(kind="precision", name="fp32"), Context(directory=tmp_path))
    assert type(built).__name__ == "Fp32"
    assert seen == [{"name": "fp32"}]


def test_hook_make_passes_errors_of_a_component_through(tmp_path):
    spec = Spec(kind="environment", name="arithmetic", config={"digits": 0})
    with pytest.raises(ConfigError) as caught:
        Registry.load().build(spec, Context(directory=tmp_path))
    assert not getattr(caught.value, "__notes__", [])


def test_hook_wrapper_that_raises_is_named(tmp_path):
    file = tmp_path / "wrapper.py"
    file.write_text(
        "import miles\n@miles.hookimpl(wrapper=True)\ndef miles_make_precision(name):\n"
        "    yield\n    raise LookupError('lost')\n"
    )
    registry = Registry.load(files=[file])
    with pytest.raises(
        PluginError, match=r"plugin 'wrapper .* raised in miles_make_precision: LookupError"
    ):
        registry.build(Spec(kind="precision", name="fp32"), Context(directory=tmp_path))
