"""Both doors: what is found, what is imported when, and what every fault says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from miles import (
    KINDS,
    ConfigError,
    Context,
    ContractError,
    MilesError,
    PluginConflict,
    PluginError,
    PluginLoadError,
    PluginNotFound,
    Spec,
)
from miles.plugins import SPECIFIED, Registry, compare_provenance


def build(
    registry: Registry, folder: Path, kind: str = "environment", name: str = "words", **config
):
    return registry.build(Spec(kind=kind, name=name, config=config), Context(directory=folder))


@pytest.fixture
def words(install, component):
    install(
        "words-plugin",
        {"miles.environment": {"words": "words_mod:Words"}},
        {"words_mod.py": component},
    )


# ---------------------------------------------------------------- components


def test_listing_imports_no_component(install):
    install(
        "loud",
        {"miles.engine": {"loud": "loud_mod:Loud"}},
        {"loud_mod.py": "raise SystemExit('imported')"},
    )
    registry = Registry.load()
    assert "loud" in registry.names("engine")
    assert "loud_mod" not in sys.modules


def test_load_imports_nothing_heavy():
    code = (
        "import sys; from miles.plugins import Registry; Registry.load(); "
        "print([m for m in ('torch', 'transformers', 'hydra', 'stevedore') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_build_makes_the_component_from_plain_values(words, tmp_path):
    built = build(Registry.load(), tmp_path, word="no")
    assert built.config.word == "no"
    assert built.config.times == 1


def test_component_unknown_names_the_close_match_and_the_choices(words):
    with pytest.raises(
        PluginNotFound, match=r"no environment 'wrods'; did you mean 'words'\? valid: .*words"
    ):
        Registry.load().component("environment", "wrods")


def test_component_of_unknown_kind_names_the_kinds():
    with pytest.raises(PluginNotFound, match="no kind 'engin'; did you mean 'engine'"):
        Registry.load().component("engin", "torch")


def test_component_that_raises_on_import_is_named_with_its_distribution_and_cause(install):
    install(
        "gpu-only",
        {"miles.engine": {"gpu": "gpu_mod:Gpu"}},
        {"gpu_mod.py": "raise OSError('no libcuda')"},
    )
    registry = Registry.load()
    with pytest.raises(
        PluginLoadError, match=r"engine 'gpu' \(gpu_mod:Gpu of gpu-only 1\.0\).*OSError: no libcuda"
    ) as caught:
        registry.component("engine", "gpu")
    assert isinstance(caught.value.__cause__, OSError)


def test_plugin_that_exits_on_import_is_a_load_error(install, tmp_path):
    text = "raise SystemExit('needs a licence')"
    points = {"miles.engine": {"quits": "quits_mod:Quits"}, "miles": {"quits": "quits_mod"}}
    install("quits", points, {"quits_mod.py": text})
    (tmp_path / "local_quits.py").write_text(text)
    registry = Registry.load(files=[tmp_path / "local_quits.py"])
    assert len(registry.broken) == 2
    with pytest.raises(PluginLoadError, match=r"engine 'quits' .*SystemExit: needs a licence"):
        registry.component("engine", "quits")


def test_component_whose_attribute_is_missing_is_a_load_error(install):
    install("typo", {"miles.engine": {"typo": "typo_mod:Absent"}}, {"typo_mod.py": ""})
    with pytest.raises(PluginLoadError, match="has no attribute 'Absent'"):
        Registry.load().component("engine", "typo")


def test_names_claimed_by_two_distributions_conflict_only_when_used(install, component, words):
    install(
        "other-words",
        {"miles.environment": {"words": "other_mod:Words"}},
        {"other_mod.py": component},
    )
    registry = Registry.load()
    assert "words" in registry.names("environment")
    assert registry.component("environment", "arithmetic")
    with pytest.raises(
        PluginConflict, match=r"'words' is claimed by other-words 1\.0 .* and by words-plugin 1\.0"
    ) as caught:
        registry.component("environment", "words")
    assert "MILES_BLOCK=words-plugin" in caught.value.detail
    assert [str(e) for e in registry.conflicts()] == [str(caught.value)]


def test_conflict_is_found_when_claims_are_not_adjacent(install, component):
    points = {"aaa": "m1:Words", "words": "m1:Words", "zzz": "m1:Words"}
    install("first", {"miles.environment": points}, {"m1.py": component})
    install("second", {"miles.environment": points}, {"m2.py": component})
    assert len(Registry.load().conflicts()) == 3


def test_same_distribution_twice_on_the_path_is_no_conflict(install, component):
    for version in ("1.0", "2.0"):
        install(
            "words-plugin",
            {"miles.environment": {"words": "words_mod:Words"}},
            {"words_mod.py": component},
            version=version,
        )
    assert Registry.load().entry("environment", "words").version == "2.0"


def test_distribution_installed_again_is_seen_at_once(install, component):
    install("words-plugin", {"miles.environment": {"words": "m:Words"}}, {"m.py": component})
    assert "more" not in Registry.load().names("environment")
    install(
        "words-plugin",
        {"miles.environment": {"words": "m:Words", "more": "m:Words"}},
        {"m.py": component},
    )
    assert Registry.load().component("environment", "more").__name__ == "Words"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("class Words", "Words = 3\nclass Other", "which is not a class"),
        ("class Config", "class Settings", "no nested Config dataclass"),
        ("frozen=True, ", "", "Config is not a frozen dataclass"),
        ("word: str", "name: str", "a field 'name', the word that names the component"),
        ("self, config, context", "self, config", r"cannot be built as Class\(config, context\)"),
        ("times: int", "times: 'Absent'", "an annotation cannot be resolved: .*Absent"),
    ],
)
def test_component_class_of_another_shape_is_refused(install, component, old, new, message):
    text = component.replace(old, new).replace("@dataclass(slots=True", "@dataclass(slots=True")
    install("odd", {"miles.environment": {"odd": "odd_mod:Words"}}, {"odd_mod.py": text})
    with pytest.raises(ContractError, match=message):
        Registry.load().component("environment", "odd")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("def tasks(self, split)", "def problems(self, split)", r"has no method tasks\(split\)"),
        ("def tasks(self, split)", "async def tasks(self, split)", "tasks must not be a coroutine"),
        (
            "def tasks(self, split)",
            "def tasks(self)",
            r"tasks\(\) cannot be called as tasks\(split\)",
        ),
        (
            "def episode",
            "def nothing",
            "at least one of episode, play, rollout; it has none of them",
        ),
        (
            "def episode(self, task, seed)",
            "def play(self, task, seed, tools)",
            "play must be a coroutine",
        ),
        (
            "def tasks",
            "def rollout(self, task, tools): ...\n\n    def tasks",
            "rollout must be a coroutine",
        ),
    ],
)
def test_build_refuses_a_component_that_lies_about_its_protocol(
    install, component, tmp_path, old, new, message
):
    install(
        "liar",
        {"miles.environment": {"words": "liar_mod:Words"}},
        {"liar_mod.py": component.replace(old, new)},
    )
    with pytest.raises(ContractError, match=message) as caught:
        build(Registry.load(), tmp_path)
    assert "liar 1.0" in str(caught.value)


@pytest.mark.parametrize("raised", ["ZeroDivisionError", "SystemExit"])
def test_build_names_a_constructor_that_raises(install, component, tmp_path, raised):
    broken = component.replace("self.config = config", f"raise {raised}('oops')")
    install("bad", {"miles.environment": {"words": "bad_mod:Words"}}, {"bad_mod.py": broken})
    with pytest.raises(
        PluginError, match=rf"words.*bad 1\.0.*cannot be built: {raised}: oops"
    ) as caught:
        build(Registry.load(), tmp_path)
    (note,) = caught.value.__notes__  # the command prints no traceback
    assert "bad_mod.py" in note and f"raise {raised}('oops')" in note and "plugins.py" not in note


def test_build_tells_every_fault_of_a_configuration(words, tmp_path):
    with pytest.raises(ConfigError) as caught:
        build(Registry.load(), tmp_path, wrod="no", times="often")
    assert "environment 'words': wrod: there is no such key; did you mean 'word'?" in str(
        caught.value
    )
    assert "environment 'words': times: expected int, got str 'often'" in str(caught.value)


def test_every_builtin_conforms_as_a_class():
    from miles.registry.conformance import component_faults

    registry = Registry.load(allow=["miles"])
    for kind in KINDS:
        for name in registry.names(kind):
            assert component_faults(kind, registry.component(kind, name)) == [], (kind, name)


# ---------------------------------------------------------------- allow and block lists


def test_block_leaves_out_a_distribution_or_a_name(words):
    assert "words" not in Registry.load(block=["Words_Plugin"]).names("environment")
    assert "words" not in Registry.load(block=["words"]).names("environment")
    with pytest.raises(PluginNotFound) as caught:
        Registry.load(block=["words"]).component("environment", "words")
    assert (
        "words-plugin 1.0 offers it, but MILES_PLUGINS or MILES_BLOCK leaves it out"
        in caught.value.detail
    )


def test_block_settles_a_conflict(install, component, words):
    install(
        "other-words",
        {"miles.environment": {"words": "other_mod:Words"}},
        {"other_mod.py": component},
    )
    registry = Registry.load(block=["other-words"])
    assert registry.component("environment", "words").__module__ == "words_mod"


def test_allow_keeps_miles_and_what_it_names(install, component, words):
    install(
        "other", {"miles.environment": {"other": "other_mod:Words"}}, {"other_mod.py": component}
    )
    registry = Registry.load(allow=["words-plugin"])
    assert {"words", "arithmetic"} <= set(registry.names("environment"))
    assert "other" not in registry.names("environment")


def test_allow_refuses_a_name_that_nothing_has(words):
    with pytest.raises(
        PluginNotFound, match="allows 'words-plugn', which nothing has; did you mean 'words-plugin'"
    ):
        Registry.load(allow=["words-plugn"])


def test_selection_gives_the_same_registry_elsewhere(words, tmp_path, component):
    file = tmp_path / "mine.py"
    file.write_text(component + "\nmiles_components = {'environment': {'mine': Words}}\n")
    registry = Registry.load(files=[file], block=["words"])
    again = Registry.load(**registry.selection)
    assert again.entries == registry.entries
    assert again.provenance() == registry.provenance()


# ---------------------------------------------------------------- hooks


def hooks(install, text: str, name: str = "watcher") -> Registry:
    module = f"{name}_hooks"
    install(
        name, {"miles": {name: module}}, {f"{module}.py": "from miles import hookimpl\n" + text}
    )
    return Registry.load()


def test_hook_module_that_raises_is_kept_as_broken_and_the_others_work(install):
    hooks(
        install, "seen = []\n@hookimpl\ndef miles_run_finished(directory): seen.append(directory)"
    )
    registry = hooks(install, "raise ImportError('no such library')", name="fragile")
    registry.hook.run_finished(directory="d", outcome="finished")
    assert sys.modules["watcher_hooks"].seen == ["d"]
    assert [e.name for e in registry.broken] == ["fragile"]
    with pytest.raises(
        PluginError, match=r"hook 'fragile' .*fragile 1\.0.*ImportError: no such library"
    ):
        registry.verify()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "@hookimpl\ndef miles_step_finishd(step): ...",
            "no hook miles_step_finishd; did you mean 'miles_step_finished'",
        ),
        (
            "def miles_step_finished(step): ...",
            "miles_step_finished is not marked with @miles.hookimpl",
        ),
        (
            "@hookimpl\ndef miles_step_finished(stepp): ...",
            r"(?s)miles_step_finished.*miles_step_finished\(stepp\).*'stepp'",
        ),
        (
            "@hookimpl(trylast=True)\ndef miles_check(conf): ...",
            "(?s)miles_check.*conf",
        ),
    ],
)
def test_hook_that_does_not_fit_is_named_with_plugin_hook_and_signature(install, text, message):
    registry = hooks(install, text)
    with pytest.raises(PluginError, match=message) as caught:
        registry.verify()
    assert "watcher (watcher 1.0)" in str(caught.value)
    assert registry.hooks().get("watcher (watcher 1.0)") is None


def test_hook_entry_that_is_no_module_is_refused(install):
    install(
        "thing", {"miles": {"thing": "thing_mod:plugin"}}, {"thing_mod.py": "plugin = object()"}
    )
    with pytest.raises(ContractError, match="thing_mod:plugin is not a module"):
        raise next(iter(Registry.load().broken.values()))


def test_two_hook_modules_of_one_name_conflict(install):
    hooks(install, "")
    install("watcher-two", {"miles": {"watcher": "second_hooks"}}, {"second_hooks.py": ""})
    broken = Registry.load().broken
    assert len(broken) == 2
    assert all(isinstance(e, PluginConflict) and "watcher-two" in str(e) for e in broken.values())


def test_moment_that_raises_names_its_plugin_and_keeps_the_cause(install):
    registry = hooks(
        install, "@hookimpl\ndef miles_run_finished(directory): raise KeyError('gone')"
    )
    with pytest.raises(
        PluginError,
        match=r"plugin 'watcher \(watcher 1\.0\)' raised in miles_run_finished: KeyError: 'gone'",
    ) as caught:
        registry.hook.run_finished(directory="d", outcome="finished")
    assert isinstance(caught.value.__cause__, KeyError)


def test_moment_that_raises_says_the_line_that_did(install):
    """A plugin's author was told `KeyError: 'gone'`, and in no log where."""
    registry = hooks(
        install,
        "def look(): raise KeyError('gone')\n@hookimpl\ndef miles_run_finished(): look()",
    )
    with pytest.raises(PluginError) as caught:
        registry.hook.run_finished(directory="d", outcome="finished")
    (note,) = caught.value.__notes__
    assert "in miles_run_finished\n" in note and "in look\n" in note
    assert "watcher_hooks.py" in note and "pluggy" not in note


def test_moment_that_raises_an_error_of_ours_keeps_it_with_a_note(install):
    registry = hooks(
        install,
        "from miles import RunError\n"
        "@hookimpl\ndef miles_run_finished(directory): raise RunError('full')",
    )
    with pytest.raises(MilesError, match="full") as caught:
        registry.hook.run_finished(directory="d", outcome="finished")
    assert "raised by plugin 'watcher (watcher 1.0)' in miles_run_finished" in caught.value.detail


def test_factory_can_be_wrapped(install, words, tmp_path):
    registry = hooks(
        install,
        "@hookimpl(wrapper=True)\n"
        "def miles_make_environment(name, config):\n"
        "    built = yield\n"
        "    built.wrapped = (name, config.word)\n"
        "    return built\n",
    )
    assert build(registry, tmp_path, word="no").wrapped == ("words", "no")


def test_factory_can_be_answered_instead(install, words, tmp_path):
    registry = hooks(
        install,
        "from miles.testing import FakeEnvironment\n"
        "@hookimpl\ndef miles_make_environment(name, context): return FakeEnvironment()\n",
    )
    assert type(build(registry, tmp_path)).__name__ == "FakeEnvironment"


def test_factory_whose_answer_breaks_the_protocol_is_refused(install, words, tmp_path):
    registry = hooks(install, "@hookimpl\ndef miles_make_environment(name): return object()")
    with pytest.raises(ContractError, match=r"built as object, .*has no method tasks\(split\)"):
        build(registry, tmp_path)


def test_every_kind_has_a_factory_hook():
    assert {f"miles_make_{kind}" for kind in KINDS} <= set(SPECIFIED)


@pytest.mark.parametrize(
    ("hook", "read"),
    [(f"miles_{name}", name) for name in ("rewards", "filters", "tools", "agents")],
)
def test_names_from_hooks_are_merged_and_conflicts_name_both(install, hook, read):
    registry = hooks(install, f"@hookimpl\ndef {hook}(): return {{'mine': len}}")
    assert getattr(registry, read)()["mine"] is len
    registry = hooks(install, f"@hookimpl\ndef {hook}(): return {{'mine': max}}", name="rival")
    with pytest.raises(
        PluginConflict, match=r"'mine' is claimed by .*(rival|watcher).* and by .*(watcher|rival)"
    ):
        getattr(registry, read)()


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ("[len]", "returned list, not names"),
        ("{'mine': 3}", "reward 'mine' is int, not a function"),
    ],
)
def test_rewards_of_another_shape_are_refused(install, answer, message):
    registry = hooks(install, f"@hookimpl\ndef miles_rewards(): return {answer}")
    with pytest.raises(ContractError, match=message):
        registry.rewards()


# ---------------------------------------------------------------- local files


def test_local_file_offers_components_and_hooks(tmp_path, component):
    file = tmp_path / "my words.py"
    file.write_text(
        component + "\nimport miles\nmiles_components = {'environment': {'mine': Words}}\n"
        "@miles.hookimpl\ndef miles_rewards(): return {'mine': len}\n"
    )
    registry = Registry.load(files=[file])
    assert build(registry, tmp_path, name="mine").config.word == "yes"
    assert registry.rewards()["mine"] is len
    assert sys.modules["miles_local_my_words"].Words is registry.component("environment", "mine")
    assert registry.provenance()["files"][str(file)]


def test_local_file_is_run_once_for_the_same_content(tmp_path):
    file = tmp_path / "counted.py"
    file.write_text("import miles\nmade = object()\n")
    Registry.load(files=[file])
    first = sys.modules["miles_local_counted"].made
    Registry.load(files=[file])
    assert sys.modules["miles_local_counted"].made is first
    file.write_text("made = 'again'\n")
    Registry.load(files=[file])
    assert sys.modules["miles_local_counted"].made == "again"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "there is no such file"),
        ("1 / 0", "cannot be imported: ZeroDivisionError"),
        ("miles_components = [3]", r"is not \{kind: \{name: class\}\}"),
        (
            "miles_components = {'enviroment': {}}",
            "no kind 'enviroment'; did you mean 'environment'",
        ),
        ("miles_components = {'environment': {'x': 3}}", "environment 'x': .*not a class"),
    ],
)
def test_local_file_that_cannot_be_used_is_broken_with_the_reason(tmp_path, text, message):
    file = tmp_path / "broken_file.py"
    if text is not None:
        file.write_text(text)
    registry = Registry.load(files=[file])
    with pytest.raises(PluginError, match=message) as caught:
        registry.verify()
    assert (
        str(file) in str(caught.value)
        or "miles_local" in str(caught.value)
        or "'x'" in str(caught.value)
    )


def test_local_files_of_one_module_name_conflict(tmp_path):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "same.py").write_text("")
    registry = Registry.load(files=[tmp_path / "a" / "same.py", tmp_path / "b" / "same.py"])
    assert len(registry.broken) == 2
    with pytest.raises(PluginError, match="would both be miles_local_same"):
        registry.verify()


def test_local_component_conflicts_with_an_installed_one(tmp_path, component, words):
    file = tmp_path / "mine.py"
    file.write_text(component + "\nmiles_components = {'environment': {'words': Words}}\n")
    with pytest.raises(PluginConflict, match=r"mine\.py.* and by .*words-plugin"):
        Registry.load(files=[file]).component("environment", "words")


# ---------------------------------------------------------------- provenance


def test_provenance_names_versions_and_hashes(words):
    found = Registry.load().provenance()
    assert found["distributions"]["words-plugin"] == "1.0"
    assert "miles" in found["distributions"]


def test_compare_provenance_says_what_differs():
    before = {"distributions": {"a": "1", "b": "1"}, "files": {"/x.py": "f" * 64}}
    now = {"distributions": {"a": "2", "c": "1"}, "files": {"/x.py": "0" * 64}}
    assert compare_provenance(before, now) == (
        "plugin a: 1 before, 2 now",
        "plugin b: 1 before, absent now",
        "plugin c: absent before, 1 now",
        "local plugin /x.py: ffffffffffffffff before, 0000000000000000 now",
    )
    assert compare_provenance(now, now) == ()
