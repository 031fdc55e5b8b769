"""A stage while it is put together: merging, choosing, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles.composing.compose import Files
from miles.composing.draft import COMMAND_LINE, DEFAULT, Draft, Tree
from miles.plugins import Registry

# ---------------------------------------------------------------- merging


LEAVES = st.one_of(
    st.integers(), st.text(max_size=3), st.none(), st.lists(st.integers(), max_size=2)
)
NESTED = st.recursive(
    LEAVES, lambda inner: st.dictionaries(st.sampled_from("abc"), inner, min_size=1, max_size=3)
)
BODIES = st.dictionaries(st.sampled_from("abc"), NESTED, max_size=3)


def merged(low, high):
    """The independent definition: mappings merge, everything else is replaced."""
    if not isinstance(low, dict) or not isinstance(high, dict):
        return high
    return {**low, **{k: merged(low[k], v) if k in low else v for k, v in high.items()}}


@given(st.lists(BODIES, max_size=4))
def test_tree_merges_like_nested_mappings(bodies):
    tree, expected = Tree(), {}
    for index, body in enumerate(bodies):
        tree.put((), body, f"file {index}")
        expected = merged(expected, body)
    assert tree.nested() == expected


@given(BODIES, BODIES)
def test_tree_remembers_the_last_file_of_every_leaf(low, high):
    tree = Tree()
    tree.put((), low, "low")
    before = dict(tree.leaves)
    tree.put((), high, "high")
    for path, (value, origin) in tree.leaves.items():
        assert origin == "high" or before[path] == (value, "low")


def test_tree_replaces_a_value_by_a_mapping_and_back() -> None:
    tree = Tree()
    tree.put(("a",), 1, "one")
    tree.put(("a", "b", "c"), 2, "two")
    assert tree.nested() == {"a": {"b": {"c": 2}}}
    tree.put(("a",), 3, "three")
    assert tree.nested() == {"a": 3}


def test_tree_takes_an_empty_mapping_as_a_value() -> None:
    tree = Tree()
    tree.put((), {"a": {"b": 1}}, "one")
    tree.put(("a",), {}, "two")
    assert tree.nested() == {"a": {}}
    tree.put((), {}, "nothing at all")
    assert tree.nested() == {"a": {}}


def test_tree_origin_is_that_of_the_value_or_below_or_above() -> None:
    tree = Tree()
    tree.put(("a", "b"), 1, "file")
    assert tree.origin(("a", "b")) == tree.origin(("a",)) == tree.origin(("a", "b", "c")) == "file"
    assert tree.origin(("z",)) == "file"  # of the whole
    assert Tree().origin(("a",)) == ""


def test_tree_parts_and_nulls() -> None:
    tree = Tree()
    tree.put((), {"a": {"b": 1, "c": None}, "d": 2}, "file")
    assert tree.heads() == ["a", "d"] and tree.below("a").nested() == {"b": 1, "c": None}
    assert tree.is_null(("a", "c")) and not tree.is_null(("a", "b")) and not tree.is_null(("x",))
    tree.drop(("a",))
    assert tree.nested() == {"d": 2}


# ---------------------------------------------------------------- a draft


FILES = {
    "engine/fast": "name: torch\nrows: 8",
    "engine/half": "name: torch\nrows: 9",
    "tracker/quiet": "name: jsonl",
}


@pytest.fixture
def draft(tmp_path: Path) -> Draft:
    """Empty, over miles' own components and a few files."""
    for path, text in FILES.items():
        file = tmp_path / f"{path}.yaml"
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
    registry = Registry.load(allow=["miles"])
    return Draft(Files(registry, [tmp_path]), registry)


Assign = Callable[..., None]


def one(draft: Draft, kind: str) -> tuple[str, dict[str, object]]:
    """Registered name and values of the only part of a kind."""
    (part,) = draft.parts[kind]
    return part.name, part.values.nested()


def test_draft_choosing_again_starts_from_the_files_of_the_new_choice(draft: Draft) -> None:
    draft.assign(("engine",), "fast", "file")
    draft.assign(("engine", "chunk"), 4, "file")
    assert one(draft, "engine") == ("torch", {"rows": 8, "chunk": 4})
    draft.assign(("engine",), "half", COMMAND_LINE)
    assert one(draft, "engine") == ("torch", {"rows": 9})
    draft.assign(("engine", "rows"), 7, COMMAND_LINE)
    draft.assign(("engine",), "half", COMMAND_LINE)  # the same choice keeps what was set
    assert one(draft, "engine") == ("torch", {"rows": 7})
    draft.assign(("engine", "rows"), None, COMMAND_LINE, delete=True)
    assert one(draft, "engine") == ("torch", {})
    draft.assign(("engine",), None, COMMAND_LINE)
    assert draft.parts["engine"] == [] and draft.faults == []


def test_draft_merge_chooses_before_it_sets(draft: Draft) -> None:
    tree = Tree()
    tree.put((), {"engine": {"rows": 5, "name": "fast"}, "steps": 2}, "file")
    draft.merge(tree)
    assert one(draft, "engine") == ("torch", {"rows": 5})
    assert draft.settings.nested() == {"steps": 2}


def test_draft_takes_many_where_the_kind_does(draft: Draft) -> None:
    draft.assign(("tracker",), ["console", "quiet", "console"], "file")
    assert [(p.choice, p.name) for p in draft.parts["tracker"]] == [
        ("console", "console"),
        ("quiet", "jsonl"),
    ]
    draft.assign(("tracker", "tensorboard", "every"), 1, "file")  # a field chooses as well
    assert [p.choice for p in draft.parts["tracker"]][-1] == "tensorboard"
    draft.assign(("engine",), ["fast", "half"], "file")
    draft.assign(("engine",), 3, "file")
    assert draft.faults == [
        "engine: one name is wanted, got fast, half (file)",
        "engine: expected a name, got 3 (file)",
    ]


def test_draft_copy_is_independent(draft: Draft) -> None:
    draft.assign(("engine",), "fast", "file")
    draft.assign(("steps",), 1, "file")
    twin = draft.copy()
    twin.assign(("engine", "rows"), 1, "twin")
    twin.assign(("steps",), 2, "twin")
    twin.assign(("nonsense",), 2, "twin")
    assert one(draft, "engine") == ("torch", {"rows": 8})
    assert draft.settings.nested() == {"steps": 1} and draft.faults == []


def test_draft_keeps_stages_of_files_in_order_and_the_last_list(draft: Draft) -> None:
    draft.assign(("stages", "a"), {"steps": 1}, "file")
    draft.assign(("stages", "b"), None, "file")
    assert draft.stages.nested() == {"a": {"steps": 1}, "b": {}}
    draft.assign(("stages",), {"c": {"steps": 2}}, "other file")
    assert draft.stages.nested() == {"c": {"steps": 2}}


@pytest.mark.parametrize(
    ("path", "accepted", "refusal"),
    [
        (("steps",), True, ""),
        (("stepz",), False, "there is no key 'stepz'; did you mean 'steps'?"),
        (("engine",), True, ""),
        (("engine", "rows"), True, ""),
        (("engine", "rowz"), False, "engine 'torch' has no key 'rowz'; did you mean 'rows'?"),
        (("engine", "half"), False, "; to choose it: engine=half"),
        (("sandbox", "x"), False, "no sandbox is chosen; choose one with sandbox=NAME"),
        (("tracker", "console"), True, ""),
        (("tracker", "jsonl", "x"), False, "tracker 'jsonl' is not chosen (chosen: console)"),
    ],
)
def test_draft_says_why_an_override_means_nothing(
    draft: Draft, path: tuple[str, ...], accepted: bool, refusal: str
) -> None:
    draft.assign(("engine",), "fast", "file")
    draft.assign(("tracker",), "console", "file")
    assert draft.accepts(path) is accepted
    if not accepted:
        assert refusal in draft.refusal(path)


def test_draft_holds_a_choice_that_cannot_be_had_as_a_fault(draft: Draft) -> None:
    draft.assign(("engine",), "trch", "the file")
    assert draft.component(draft.parts["engine"][0]) is None
    _, faults = draft.resolved()
    (fault,) = faults
    assert "did you mean 'torch'" in fault and fault.endswith("(the file)")


def test_draft_settles_auto_by_the_model(draft: Draft) -> None:
    draft.assign(("tito",), "auto", "file")
    assert draft.component(draft.parts["tito"][0]) is None  # no model yet
    draft.assign(("model",), "qwen3", "file")
    draft.assign(("tito",), "auto", "file")
    component = draft.component(draft.parts["tito"][0])
    part = draft.parts["tito"][0]
    assert component is not None and part.name != "auto" and part.origin == "model 'qwen3'"


def test_draft_resolved_has_defaults_origins_and_interpolations(draft: Draft) -> None:
    draft.assign(("engine",), "fast", "the file")
    draft.assign(("seed",), 4, COMMAND_LINE)
    draft.assign(("steps",), "${seed}", COMMAND_LINE)
    draft.assign(("groups_per_step",), "${nothing.here}", COMMAND_LINE)
    tree, faults = draft.resolved()
    assert tree.leaves["steps",] == (4, COMMAND_LINE)
    assert tree.leaves["max_lag",] == (0, DEFAULT)
    assert tree.leaves["engine", "name"] == ("torch", "the file")
    assert tree.leaves["engine", "rows"][0] == 8
    assert tree.origin(("engine", "rows")).endswith("engine/fast.yaml")
    (fault,) = faults
    assert fault.startswith("groups_per_step: '${nothing.here}' cannot be resolved: ")
