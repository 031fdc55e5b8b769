"""Hydra's part of a configuration: words of the command line, files, and defaults lists."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles.composing.compose import Files, assignment, expand, own_folder, parse, quoted
from miles.errors import ConfigError, PluginConflict, PluginNotFound
from miles.plugins import Registry

# ---------------------------------------------------------------- the command line's words


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("steps=3", ("steps",), 3),
        ("trainer.lr=1e-6", ("trainer", "lr"), 1e-6),
        ("tracker=[console,jsonl]", ("tracker",), ["console", "jsonl"]),
        ("stages.sft={steps: 3, trainer: {lr: 1e-3}}", ("stages", "sft"),
         {"steps": 3, "trainer": {"lr": 1e-3}}),
        ("resume=null", ("resume",), None),
        ("run.name='a b'", ("run", "name"), "a b"),
        ("environment/data=x", ("environment", "data"), "x"),
        ("flag=true", ("flag",), True),
    ],
)  # fmt: skip
def test_parse_gives_a_split_key_and_a_plain_value(text: str, key: tuple, value: object) -> None:
    found = parse(text)
    assert (found.key, found.value, found.text) == (key, value, text)
    assert not found.delete and not found.add


def test_parse_knows_deleting_and_adding() -> None:
    assert parse("~stages.sft").delete and parse("~stages.sft").value is None
    assert parse("+trainer.lr=1").add and parse("++trainer.lr=1").add


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("steps", "override 'steps' cannot be read: .*; an override is KEY=VALUE"),
        ("steps=[1", r"override 'steps=\[1' cannot be read: "),
        ("steps=1,2", "override 'steps=1,2' holds several values; sweep over them with -m"),
        ("engine@main=torch", "packages \\(@main\\) have no meaning here"),
    ],
)
def test_parse_says_why_an_override_cannot_be_read(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse(text)


PATH_CHARACTERS = st.text(
    st.sampled_from("\\'\"/,a=") | st.characters(codec="utf-8", exclude_categories=("Cc", "Cs")),
    min_size=1,
)


@given(st.lists(PATH_CHARACTERS))
def test_assignment_holds_any_paths(paths: list[str]) -> None:
    if any("${" in p for p in paths):
        return  # an interpolation
    assert parse(assignment("plugins", paths)).value == paths
    for path in paths:
        assert parse(assignment("model.path", path)).value == path


def test_expand_refuses_what_parse_does() -> None:
    with pytest.raises(ConfigError, match="an override is KEY=VALUE"):
        expand(["steps=1,2", "trainer"])


@given(PATH_CHARACTERS, st.sampled_from(["resume", "model.path", "run.dir", "stages.a.model.path"]))
def test_quoted_path_arrives_as_it_was(path, key):
    if path == "null" or path[0] in "'\"[" or path.strip() != path or "${" in path:
        return  # YAML's null, what is quoted already, a list, blanks that a shell would trim
    assert parse(quoted(f"{key}={path}")).value == path


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("resume=/a b/c=d,e(f)", "/a b/c=d,e(f)"),
        ("run.name=a,b", "a,b"),
        ("plugins=[./a b.py,./c(d).py]", ["./a b.py", "./c(d).py"]),
        ("plugins=./a,b.py", "./a,b.py"),
        ("plugins=['./a,b.py']", ["./a,b.py"]),
        ("model.path=null", None),
        ("resume='/a b'", "/a b"),
        ("resume=/it's", "/it's"),
        ("resume=/end\\", "/end\\"),
        ("resume=/a\\'b\\c\\\\", "/a\\'b\\c\\\\"),
    ],
)
def test_quoted_understands_lists_quotes_and_null(text, value):
    assert parse(quoted(text)).value == value


def test_quoted_leaves_other_keys_alone():
    assert quoted("engine.rows=1,2") == "engine.rows=1,2"
    assert quoted("~resume") == "~resume"


def test_expand_is_the_product_of_all_axes():
    assert expand(["a=1,2", "b=x", "c=range(0,2)", "d=choice(p,q)"]) == [
        [f"a={a}", "b=x", f"c={c}", f"d={d}"] for a in (1, 2) for c in (0, 1) for d in ("p", "q")
    ]
    assert expand(["tracker=[a,b]"]) == [["tracker=[a,b]"]]


# ---------------------------------------------------------------- the files


def put(folder: Path, path: str, text: str) -> None:
    """Write `path`.yaml."""
    file = folder / f"{path}.yaml"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


@pytest.fixture
def files(tmp_path: Path) -> Callable[..., Files]:
    """`files({"engine/fast": text})` reaches miles' own files and these."""

    def make(texts: dict[str, str], *more: Path) -> Files:
        for path, text in texts.items():
            put(tmp_path, path, text)
        return Files(Registry.load(allow=["miles"]), [tmp_path, *more])

    return make


def test_own_folder_holds_the_main_file() -> None:
    assert (own_folder() / "config.yaml").is_file()


def test_files_options_are_files_and_registered_names(files: Callable[..., Files]) -> None:
    found = files({"engine/fast": "name: torch", "engine/deep/er": "name: torch"})
    assert {"fast", "deep/er", "torch", "demonstration"} <= set(found.options("engine"))
    assert found.options("engine") == sorted(found.options("engine"))
    assert "arithmetic" in found.options("experiment") and found.options("nothing") == []


def test_files_node_of_a_name_without_a_file_is_bare(files: Callable[..., Files]) -> None:
    node = files({}).node("engine", "torch")
    assert (node.name, dict(node.values), node.label) == ("torch", {}, "")


def test_files_node_of_a_file_names_a_component_and_presets_it(
    files: Callable[..., Files], tmp_path: Path
) -> None:
    found = files(
        {
            "engine/fast": "name: torch\nrows: 8\nchunk: 2",
            "engine/faster": "defaults: [fast, _self_]\nrows: 16",
        }
    )
    assert found.node("engine", "fast").values == {"rows": 8, "chunk": 2}
    node = found.node("engine", "faster")
    assert (node.name, node.values) == ("torch", {"rows": 16, "chunk": 2})
    assert node.label == f"{tmp_path}/engine/faster.yaml"


def test_files_node_that_is_not_there_gives_the_choices(files: Callable[..., Files]) -> None:
    with pytest.raises(PluginNotFound, match="did you mean 'torch'"):
        files({}).node("engine", "torhc")


def test_files_in_two_folders_conflict_only_when_one_is_chosen(
    files: Callable[..., Files], tmp_path_factory: pytest.TempPathFactory
) -> None:
    other = tmp_path_factory.mktemp("other")
    put(other, "engine/fast", "name: torch")
    found = files({"engine/fast": "name: torch", "engine/own": "name: torch"}, other)
    assert found.node("engine", "own").name == "torch"
    with pytest.raises(PluginConflict, match=r"engine/fast.yaml is offered by .* and by .*other"):
        found.node("engine", "fast")


def test_files_refuse_a_body_that_is_no_mapping(files: Callable[..., Files]) -> None:
    with pytest.raises(ConfigError, match=r"engine/odd.yaml: expected keys and values"):
        files({"engine/odd": "- 1"}).node("engine", "odd")


def test_files_name_the_folder_that_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config folder .*/gone of --config-dir does not exist"):
        Files(Registry.load(allow=["miles"]), [tmp_path / "gone"])


def test_layers_are_the_main_file_then_the_experiment(
    files: Callable[..., Files], tmp_path: Path
) -> None:
    found = files(
        {
            "experiment/low": "steps: 3\nengine: demonstration",
            "experiment/high": "defaults: [low, _self_]\nsteps: 4",
        }
    )
    chosen, layers = found.layers("high")
    assert chosen["engine"] == ["torch"]  # the body of an experiment is a layer, merged later
    assert [layer.label for layer in layers] == [
        "conf/config.yaml",
        f"{tmp_path}/experiment/low.yaml",
        f"{tmp_path}/experiment/high.yaml",
    ]
    assert layers[1].values == {"steps": 3, "engine": "demonstration"}
    assert "experiment" in layers[0].chooses and "engine" in layers[0].chooses


def test_layers_of_several_experiments_are_in_their_order(files: Callable[..., Files]) -> None:
    found = files({"experiment/a": "steps: 1", "experiment/b": "steps: 2"})
    assert [dict(x.values) for x in found.layers(["b", "a"])[1][1:]] == [{"steps": 2}, {"steps": 1}]
    assert len(found.layers(None)[1]) == 1  # none at all


def test_layers_choose_by_hydras_own_override(files: Callable[..., Files]) -> None:
    text = "# @package _global_\ndefaults:\n  - override /engine: demonstration\nsteps: 2\n"
    chosen, layers = files({"experiment/x": text}).layers("x")
    assert chosen["engine"] == ["demonstration"] and "engine" in layers[1].chooses


def test_layers_say_how_an_experiment_may_choose(files: Callable[..., Files]) -> None:
    text = "defaults:\n  - override /engine: demonstration\n"
    with pytest.raises(ConfigError) as caught:
        files({"experiment/x": text}).layers("x")
    assert "begins with `# @package _global_`" in caught.value.detail


def test_layers_of_an_experiment_that_is_not_there(files: Callable[..., Files]) -> None:
    with pytest.raises(ConfigError, match="no experiment 'arithmetik'; did you mean 'arithmetic'"):
        files({}).layers("arithmetik")


def test_default_experiment_is_the_main_files(files: Callable[..., Files]) -> None:
    assert files({}).default_experiment() == "arithmetic"
