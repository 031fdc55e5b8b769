"""README.md and its neighbours tell the truth: commands, links, and the plugin in ten lines."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from miles.cli import main

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
DOCS = sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))
CONTRIB = sorted(str(p.relative_to(ROOT)) for p in ROOT.glob("plugins-contrib/*/README.md"))
PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "PLUGINS.md", *DOCS)

BLOCKS = re.findall(r"```bash\n(.*?)```", README, re.DOTALL)
COMMANDS = [
    shlex.split(line, comments=True)[1:]
    for block in BLOCKS
    for line in block.splitlines()
    if line.startswith("miles ")
]
TRAINING = [words for words in COMMANDS if words[0] == "run"]


def told(page: str) -> list[list[str]]:
    """Runs that a page shows, of components that come with miles, as lists of overrides."""
    text = (ROOT / page).read_text(encoding="utf-8").replace("\\\n", " ")
    blocks = re.findall(r"```(\w*)\n(.*?)```", text, re.DOTALL)
    fenced = "\n".join(block for language, block in blocks if language in ("", "bash"))
    inline = "\n".join(re.findall(r"`(miles run [^`]+)`", text))
    lines = re.findall(r"\bmiles (?:run|check) (.+)$", f"{fenced}\n{inline}", re.MULTILINE)
    words = [[w for w in shlex.split(x, comments=True) if w != "..."] for x in lines]
    return [some for some in words if not any(w.startswith(("plugins=", "resume=")) for w in some)]


def asked() -> list[Requirement]:
    """Every dependency, those of extras included."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lists = [project["dependencies"], *project["optional-dependencies"].values()]
    found = [Requirement(text) for some in lists for text in some]
    return [r for r in found if r.name != "miles"]


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The page's plugin, in an otherwise empty working directory."""
    (source,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    (tmp_path / "reverse.py").write_text(source, encoding="utf-8")
    (tmp_path / "train.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n', encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_readme_sets_up_with_two_commands_that_ci_uses() -> None:
    install = "python3 -m venv .venv && .venv/bin/pip install -c constraints-cpu.txt -e"
    assert BLOCKS[0].strip() == f"{install} . && .venv/bin/miles run"
    assert BLOCKS[1].strip() == f'{install} ".[test]" && .venv/bin/pytest'
    lines = (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    assert 'pip install -q -c constraints-cpu.txt -e ".[test]"' in lines
    assert "pytest" in lines
    assert "pytest -m slow" in lines


@pytest.mark.slow
def test_readme_plugin_takes_about_ten_lines_and_keeps_its_contract(
    plugin: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = (plugin / "reverse.py").read_text(encoding="utf-8").splitlines()
    assert len([line for line in lines if line.strip()]) <= 15
    (check,) = [words for words in COMMANDS if words[:2] == ["plugins", "check"]]
    assert main(check) == 0, capsys.readouterr().out


@pytest.mark.parametrize("words", TRAINING, ids=" ".join)
def test_readme_run_command_composes(
    words: list[str], plugin: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = [w for w in words[1:] if w != "-m" and not w.startswith("resume=")]
    overrides = [w.replace("seed=1,2,3", "seed=1") for w in overrides]
    assert main(["show", *overrides]) == 0, capsys.readouterr().err


@pytest.mark.parametrize(
    ("page", "words"), [(page, words) for page in DOCS for words in told(page)], ids=str
)
def test_command_of_a_page_composes(
    page: str, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["show", *words]) == 0, f"{page}: {capsys.readouterr().err}"


def test_readme_names_every_page_of_the_docs() -> None:
    assert [page for page in DOCS if f"]({page})" not in README] == []


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_readme_command_is_one_that_miles_has(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    parts = words[:2] if words[0] == "plugins" else words[:1]
    assert main([*parts, "--help"]) == 0
    assert "usage: miles" in capsys.readouterr().out


def test_readme_broken_check_says_what_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    (words,) = [w for w in COMMANDS if w[0] == "check"]
    assert main(words) == 1
    assert "expected float, got str 'oops'" in capsys.readouterr().out


@pytest.mark.slow
def test_readme_plugin_learns_by_the_command_given(plugin: Path) -> None:
    (words,) = [w for w in TRAINING if "environment=reverse" in w]
    done = subprocess.run(
        [sys.executable, "-m", "miles.cli", *words, "run.name=it"],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = (plugin / "runs" / "it" / "metrics.jsonl").read_text().splitlines()
    scores = [x["eval/heldout/score"] for x in map(json.loads, lines) if "eval/heldout/score" in x]
    assert scores[-1] > scores[0] + 0.5


@pytest.mark.parametrize("page", PAGES)
def test_page_links_to_files_that_exist(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    links = [x for x in re.findall(r"\]\(([^)#]+)[^)]*\)", text) if "://" not in x]
    folder = (ROOT / page).parent
    assert [link for link in links if not (folder / link).exists()] == []


@pytest.mark.parametrize("page", [*PAGES, *CONTRIB])
def test_page_installs_from_the_clone(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")  # an index may have another project `miles`
    assert re.findall(r"^.*\bpip install (?:\S* )*['\"]?miles\b.*$", text, re.MULTILINE) == []


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md"])
def test_page_shows_the_loop_and_the_rules_in_short(page: str) -> None:
    assert len((ROOT / page).read_text(encoding="utf-8").splitlines()) < 180


def test_contributing_has_a_reason_for_every_dependency() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    table = text[text.index("## Dependencies") :]
    assert [r.name for r in asked() if r.name not in table] == []


def test_constraints_allow_what_the_project_asks_for() -> None:
    text = (ROOT / "constraints-cpu.txt").read_text(encoding="utf-8")
    pins = dict(x.split("==") for x in text.splitlines() if x and not x.startswith("#"))
    for requirement in asked():
        assert requirement.name in pins, f"{requirement.name} has no pin"
        assert requirement.specifier.contains(pins[requirement.name]), requirement


def test_license_is_the_apache_license() -> None:
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert "Apache License" in text
    assert "END OF TERMS AND CONDITIONS" in text
