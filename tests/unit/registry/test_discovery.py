"""Where names come from: metadata on the path, and local files."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from importlib.metadata import PathDistribution
from pathlib import Path

import pytest

from miles.errors import ContractError, PluginLoadError, PluginNotFound
from miles.registry import discovery
from miles.registry.discovery import Entry


def entry(**values: object) -> Entry:
    given = {"kind": "engine", "name": "e", "target": "m:C", "distribution": "my-dist"} | values
    return Entry(**given)  # type: ignore[arg-type]


@pytest.fixture
def local(tmp_path: Path) -> Iterator[Callable[[str], Entry]]:
    """`local(text)` writes a plugin file and gives its entry; its module is forgotten at the
    end."""
    path = tmp_path / "my plugin.py"

    def write(text: str) -> Entry:
        path.write_text(text)
        return discovery.local_entry(path)

    yield write
    sys.modules.pop(discovery.local_name(path), None)


def test_entry_reads_as_a_person_would_say_it() -> None:
    assert str(entry(version="1.2")) == "engine 'e' (m:C of my-dist 1.2)"
    assert entry().source == "my-dist"


@pytest.mark.parametrize("name", ["e", "my-dist", "My_Dist", "my.dist", "MY--DIST"])
def test_matches_an_entrys_name_or_its_distribution_however_it_is_written(name: str) -> None:
    assert discovery.matches(entry(), ["other", name])


@pytest.mark.parametrize("name", ["E", "my", "dist", "m:C", ""])
def test_matches_nothing_else(name: str) -> None:
    assert not discovery.matches(entry(), [name])
    assert not discovery.matches(entry(), [])


def test_conflict_names_every_claim_and_how_to_settle_it() -> None:
    error = discovery.conflict([entry(version="1"), entry(distribution="other", target="o:D")])
    assert str(error) == "engine 'e' is claimed by my-dist 1 (m:C) and by other (o:D)"
    assert error.__notes__ == ["uninstall one, or leave one out: MILES_BLOCK=other"]


def test_installed_takes_our_groups_and_kinds_only(install: Callable[..., Path]) -> None:
    groups = {
        "miles.engine": {"e": "m:C"},
        "miles.nothing": {"n": "m:C"},
        "miles": {"hooks": "m"},
        "other": {"o": "m:C"},
    }
    install("my-dist", groups)
    found = [e for e in discovery.installed(None, ()) if e.distribution == "my-dist"]
    assert [(e.kind, e.name, e.target, e.version, e.blocked) for e in found] == [
        ("engine", "e", "m:C", "1.0", False),
        ("hook", "hooks", "m", "1.0", False),
    ]


def test_installed_takes_the_first_of_a_distribution_on_the_path(
    install: Callable[..., Path],
) -> None:
    install("my-dist", {"miles.engine": {"old": "m:C"}}, version="1.0")
    install("My_Dist", {"miles.engine": {"new": "m:C"}}, version="2.0")  # in front of it
    found = {(e.name, e.version) for e in discovery.installed(None, ()) if e.target == "m:C"}
    assert found == {("new", "2.0")}


def test_installed_marks_what_is_left_out(install: Callable[..., Path]) -> None:
    install("my-dist", {"miles.engine": {"e": "m:C", "f": "m:D"}})

    def blocked(allow: list[str] | None, block: list[str]) -> set[str]:
        entries = discovery.installed(allow, block)
        return {e.name for e in entries if e.blocked and e.distribution == "my-dist"}

    assert blocked(None, []) == set()
    assert blocked(None, ["f"]) == {"f"}
    assert blocked(None, ["my_dist"]) == {"e", "f"}
    assert blocked(["e"], []) == {"f"}
    assert blocked(["my-dist"], ["e"]) == {"e"}
    ours = [e for e in discovery.installed(["e"], ()) if e.distribution == "miles"]
    assert ours and not any(e.blocked for e in ours)  # an allow list never names miles itself


def test_load_component_keeps_the_original_error_as_its_cause(
    install: Callable[..., Path],
) -> None:
    install("my-dist", {"miles.engine": {"e": "bad_m:C"}}, {"bad_m.py": "import not_there_at_all"})
    found = entry(target="bad_m:C", version="1.0")
    with pytest.raises(PluginLoadError, match=r"engine 'e' \(bad_m:C of my-dist 1.0\) cannot be imp"
                       ) as caught:  # fmt: skip
        discovery.load_component(found)
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)


def test_load_component_imports_exactly_the_claim_that_was_chosen(
    install: Callable[..., Path],
) -> None:
    install("one", {"miles.engine": {"e": "m_one:C"}}, {"m_one.py": "class C: who = 1"})
    install("two", {"miles.engine": {"e": "m_two:C"}}, {"m_two.py": "class C: who = 2"})
    assert discovery.load_component(entry(target="m_one:C")).who == 1
    assert discovery.load_component(entry(target="m_two:C")).who == 2


def test_load_hooks_that_exit_are_a_load_error(install: Callable[..., Path]) -> None:
    install("my-dist", {"miles": {"h": "exits_m"}}, {"exits_m.py": "raise SystemExit(3)"})
    with pytest.raises(PluginLoadError, match="SystemExit: 3"):
        discovery.load_hooks(entry(kind="hook", target="exits_m"))


def test_local_entry_has_a_name_for_python_and_its_content_as_version(
    local: Callable[[str], Entry], tmp_path: Path
) -> None:
    first, second = local("x = 1"), local("x = 2")
    assert first.target == "miles_local_my_plugin" and first.name == "my plugin" and first.local
    assert len(first.version) == 12 and first.version != second.version
    assert discovery.digest(tmp_path / "my plugin.py").startswith(second.version)
    assert discovery.local_entry(tmp_path / "none.py").version == ""


def test_load_file_runs_again_only_when_the_content_changed(
    local: Callable[[str], Entry],
) -> None:
    first = discovery.load_file(local("x = []"))
    assert discovery.load_file(local("x = []")) is first
    again = discovery.load_file(local("x = [1]"))
    assert again is not first and again.x == [1]


def test_load_file_that_raises_leaves_no_half_module(local: Callable[[str], Entry]) -> None:
    found = local("x = 1\nraise OSError('no GPU')")
    with pytest.raises(PluginLoadError, match="OSError: no GPU"):
        discovery.load_file(found)
    assert found.target not in sys.modules
    assert discovery.load_file(local("x = 1")).x == 1


def test_load_file_says_that_there_is_none(tmp_path: Path) -> None:
    with pytest.raises(PluginNotFound, match=r"local plugin .*none\.py: there is no such file"):
        discovery.load_file(discovery.local_entry(tmp_path / "none.py"))


def test_load_file_wants_python(tmp_path: Path) -> None:
    (tmp_path / "plugin.txt").write_text("x = 1")
    with pytest.raises(PluginLoadError, match=r"its name does not end in \.py"):
        discovery.load_file(discovery.local_entry(tmp_path / "plugin.txt"))


def test_local_components_are_entries_of_their_file(
    local: Callable[[str], Entry], component: str
) -> None:
    found = local(component + "\nmiles_components = {'environment': {'words': Words}}")
    module = discovery.load_file(found)
    ((offered, cls),) = discovery.local_components(module, found).items()
    assert (offered.kind, offered.name) == ("environment", "words")
    assert offered.target == "miles_local_my_plugin:Words" and offered.version == found.version
    assert cls is module.Words


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ("['words']", "miles_components is not {kind: {name: class}}"),
        ("{'environment': Words}", "miles_components is not {kind: {name: class}}"),
        ("{'enviroment': {}}", "has no kind 'enviroment'; did you mean 'environment'?"),
        ("{'environment': {'w': 3}}", "environment 'w': the entry point names 3, which is not a c"),
    ],
)
def test_local_components_of_another_shape_are_refused(
    local: Callable[[str], Entry], component: str, table: str, said: str
) -> None:
    found = local(f"{component}\nmiles_components = {table}")
    with pytest.raises(ContractError) as caught:
        discovery.local_components(discovery.load_file(found), found)
    assert said in str(caught.value)


def test_listing_does_not_parse_metadata_again_for_every_name(install, monkeypatch) -> None:
    """Nine tenths of a listing went into parsing one distribution's metadata twice a name."""
    names = {f"n{i}": "many_mod:Many" for i in range(20)}
    install("many", {"miles.environment": names})
    read, whole = [], PathDistribution.read_text

    def counted(self: PathDistribution, name: str) -> str | None:
        read.append((self, name))
        return whole(self, name)

    monkeypatch.setattr(PathDistribution, "read_text", counted)
    found = [e for e in discovery.installed(None, ()) if e.distribution == "many"]
    assert sorted(e.name for e in found) == sorted(names)
    mine = [name for one, name in read if one._path.name.startswith("many-")]
    assert mine.count("METADATA") == 1
