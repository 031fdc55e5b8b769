"""What the code looks like: sizes, names, docstrings, and constructs that product code does
without."""

from __future__ import annotations

import ast
import itertools
import re
import subprocess
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

LIMIT = 400
LIMITS = {"miles/cli.py": 300, "miles/config.py": 300}
"""Lines of a module, and of those that must stay smaller."""

SCREEN = 60
"""Lines of a function, its docstring left out."""

WORDS = ("util", "utils", "helper", "helpers", "manager", "common", "misc", "mock", "hub", "base")
"""Names that say nothing; no module, folder, function or class is called so."""

BROAD = {"miles/cli.py"}
"""Where everything may be caught: the one place that turns errors into exit codes."""


def files() -> list[str]:
    """Every tracked or new file of the repository."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if listed.returncode:  # an unpacked source distribution
        return [str(p.relative_to(ROOT)) for p in ROOT.rglob("*.py")]
    return [name for name in listed.stdout.splitlines() if (ROOT / name).is_file()]


ALL = files()
PRODUCT = [n for n in ALL if re.match(r"(miles|miles_plugins|plugins-contrib/.*/src)/.*\.py$", n)]


@cache
def source(name: str) -> str:
    return (ROOT / name).read_text()


@cache
def parsed(text: str) -> ast.Module:
    """Its syntax tree, which every check of a module only reads."""
    return ast.parse(text)


# a test a rule, not one a module: each case costs milliseconds, there are hundreds of modules, and
# every module's fault is told all the same


def test_modules_are_found() -> None:
    assert {"miles/cli.py", "miles_plugins/hooks.py"} < set(PRODUCT)
    assert any(name.startswith("plugins-contrib/") for name in PRODUCT)


def test_modules_fit_their_limit() -> None:
    sizes = [(name, len(source(name).splitlines()), LIMITS.get(name, LIMIT)) for name in PRODUCT]
    long = [
        f"{n} has {lines} lines; {limit} are allowed" for n, lines, limit in sizes if lines > limit
    ]
    assert not long, "\n".join(long)


def test_modules_begin_with_a_sentence() -> None:
    faults = [fault for name in PRODUCT for fault in faults_of_beginning(name, source(name))]
    assert not faults, "\n".join(faults)


def faults_of_beginning(name: str, text: str) -> Iterator[str]:
    if not text.strip():
        return  # an empty __init__.py
    words = " ".join((ast.get_docstring(parsed(text)) or "").split())
    if not re.match(r".{15,}?\.( |$)", words):
        yield f"{name} begins with {words[:60]!r}, no sentence"


def test_functions_fit_a_screen() -> None:
    long = [
        f"{name}: {function.name} has {size} lines; {SCREEN} are allowed"
        for name in PRODUCT
        for function, size in function_sizes(source(name))
        if size > SCREEN
    ]
    assert not long, "\n".join(long)


def function_sizes(text: str) -> Iterator[tuple[ast.AST, int]]:
    for node in ast.walk(parsed(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body = node.body[1:] if ast.get_docstring(node) and len(node.body) > 1 else node.body
            yield node, (node.end_lineno or 0) - body[0].lineno + 1


def test_modules_have_no_faults_of_style() -> None:
    faults = [fault for name in PRODUCT for fault in faults_of_style(name, source(name))]
    assert not faults, "\n".join(faults)


def faults_of_style(name: str, text: str) -> Iterator[str]:
    """Asserts, broad excepts without a reason, empty names, marks of unfinished work, pickle, and
    processes that would import what lies in the folder they are started in."""
    lines = text.splitlines()
    for node in ast.walk(parsed(text)):
        where = f"{name}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.Assert):
            yield f"{where} asserts: product code raises an error that says what and where"
        if isinstance(node, ast.ExceptHandler) and name not in BROAD and is_broad(node):
            said = lines[node.lineno - 1].partition("#")[2].replace("noqa: BLE001", "")
            if not isinstance(node.body[-1], ast.Raise) and len(said.split()) < 3:
                yield f"{where} catches everything, keeps it, and does not say beside it why"
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            parts = re.findall(r"[A-Z]?[a-z]+", node.name)
            for word in {part.lower() for part in parts} & set(WORDS):
                yield f"{where} is called {node.name}: {word!r} says nothing"
        if isinstance(node, ast.List | ast.Call) and starts_a_module(node):
            yield f"{where} starts a module without -P: it would import from the folder it is in"
        if isinstance(node, ast.Import) and any(a.name in ("pickle", "dill") for a in node.names):
            yield f"{where} imports pickle: what crosses a process is plain"
    for number, line in enumerate(lines, start=1):
        if re.search(r"\b(TODO|FIXME|XXX|HACK)\b", line):
            yield f"{name}:{number} is unfinished: {line.strip()}"


def starts_a_module(node: ast.List | ast.Call) -> bool:
    """Whether this Python is given `-m` at once."""
    words = node.elts if isinstance(node, ast.List) else node.args
    said = [ast.unparse(word) for word in words]
    return any(pair == ("sys.executable", "'-m'") for pair in itertools.pairwise(said))


def is_broad(handler: ast.ExceptHandler) -> bool:
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(k is None or getattr(k, "id", "") in ("Exception", "BaseException") for k in kinds)


def test_no_file_or_folder_has_an_empty_name() -> None:
    bad = [n for n in ALL if any(part.split(".")[0] in WORDS for part in Path(n).parts)]
    assert not bad, f"names that say nothing: {', '.join(bad)}"


def test_conf_holds_no_python() -> None:
    found = [n for n in ALL if n.startswith("conf/") and not n.endswith((".yaml", ".md"))]
    assert not found, f"conf/ holds more than YAML: {', '.join(found)}"


def test_no_large_file_is_tracked() -> None:
    large = [n for n in ALL if (ROOT / n).stat().st_size > 500_000]
    assert not large, f"over 500 kB: {', '.join(large)}"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("assert x", "asserts"),
        ("try:\n    f()\nexcept Exception:\n    pass", "catches everything"),
        ("try:\n    f()\nexcept:\n    pass", "catches everything"),
        ("try:\n    f()\nexcept (ValueError, BaseException):  # noqa: BLE001\n    pass", "catches"),
        ("class PluginManager:\n    pass", "'manager' says nothing"),
        ("def io_utils():\n    pass", "'utils' says nothing"),
        ("import pickle", "pickle"),
        ("run([sys.executable, '-m', 'miles.worker'])", "without -P"),
        ("run(sys.executable, '-m', 'miles.worker')", "without -P"),
        ("x = 1  # TODO", "unfinished"),
    ],
)
def test_style_notices(text: str, said: str) -> None:
    assert said in "\n".join(faults_of_style("miles/x.py", text))


def test_shape_notices_a_beginning_and_a_function_that_are_not_as_they_should() -> None:
    assert list(faults_of_beginning("miles/x.py", '"""What it is."""')) == [
        "miles/x.py begins with 'What it is.', no sentence"
    ]
    assert not list(faults_of_beginning("miles/x.py", ""))
    text = "def f():\n" + "    x = 1\n" * (SCREEN + 1)
    assert [size for _, size in function_sizes(text)] == [SCREEN + 1]


def test_style_accepts_a_reason() -> None:
    text = "try:\n    f()\nexcept Exception:  # noqa: BLE001 - a worker's boundary\n    pass"
    assert not list(faults_of_style("miles/x.py", text))


@pytest.mark.parametrize(
    "name", [n for n in ALL if re.match(r"plugins-contrib/[^/]+/pyproject.toml$", n)]
)
def test_contrib_tests_run_by_their_own_settings(name: str) -> None:
    """Without settings of its own, pytest takes those of the repository, whose plugins an
    environment made for the distribution alone does not have."""
    settings = tomllib.loads(source(name))["tool"]["pytest"]["ini_options"]
    assert settings["testpaths"] == ["tests"]
    assert not re.search(r"--timeout|-n\b|--dist", settings["addopts"])
