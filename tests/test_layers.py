"""Who may import whom: the architecture's table as data, held against the syntax tree of every
module.

Imports inside functions count as well; only whether torch is loaded at import time looks at where
they stand.
"""

from __future__ import annotations

import ast
import sys
from dataclasses import dataclass
from functools import cache
from importlib.metadata import distribution
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
HEAVY = {"torch", "transformers", "ray", "sglang", "vllm"}
"""What the driver, the command line and a listing must not pay for."""


@dataclass(frozen=True)
class Row:
    """Modules of `miles/` (a package stands for all in it), and what they may import."""

    modules: str
    layers: str
    third: str = ""


TABLE = {
    "data": Row(
        "types batch errors plain seeds settings identity machine folders threads stacks",
        "data",
        "numpy",
    ),
    "contract": Row("protocols hookspecs episode metrics", "data contract", "pluggy"),
    "wire": Row("wire", "data contract wire", "numpy msgspec"),
    "plugins": Row(
        "registry plugins composing config checking check",
        "data contract plugins testing",
        "pluggy stevedore hydra omegaconf yaml msgspec rich tokenizers",
    ),
    "loop": Row(
        "buffer placement checkpoint loop records report",
        "data contract loop",
        "numpy msgspec omegaconf matplotlib",
    ),
    "session": Row(
        "session router",
        "data contract session",
        "numpy msgspec aiohttp starlette uvicorn safetensors",
    ),
    "torch": Row("learn quant", "data contract torch", "numpy torch transformers safetensors"),
    "testing": Row(
        "testing",
        "data contract wire plugins loop session torch testing",
        "numpy torch transformers pytest aiohttp hypothesis jinja2",
    ),
    "assembly": Row(
        "workers evaluation stage shared session_servers assemble run simulate worker cli __main__",
        "data contract wire plugins loop session testing children assembly facade",
        "numpy msgspec rich yaml omegaconf aiohttp",
    ),
    "children": Row("serving", "data", "uvicorn"),
    "facade": Row("__init__", "data contract wire children"),
}
"""Bottom to top. A module that is in no row, and an import that its row does not allow, fail."""

LIGHT = set(TABLE) - {"torch", "testing"}
"""Layers that may not import anything heavy, not even inside a function."""

PLUGINS_MAY = ("miles.learn", "miles.quant", "miles.testing")
"""What plugins may import beside the facade."""


@dataclass(frozen=True)
class Import:
    """One imported module or name."""

    name: str
    line: int
    eager: bool


def modules(*tops: str) -> dict[str, Path]:
    """Dotted name to file, for every module below the given folders."""
    found = {}
    for top in tops:
        for path in sorted((ROOT / top).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


OURS = modules("miles", "miles_plugins")


@cache
def imports(path: Path) -> tuple[Import, ...]:
    """What a file imports, with `from miles import x` as `miles.x`."""
    found: list[Import] = []

    def visit(node: ast.AST, eager: bool) -> None:
        if isinstance(node, ast.Import):
            found.extend(Import(alias.name, node.lineno, eager) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno} imports relatively"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found.extend(Import(name, node.lineno, eager) for name in names)
        typing_only = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        inside = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.iter_child_nodes(node):
            visit(child, eager and not inside and not typing_only)

    visit(ast.parse(path.read_text()), True)
    return tuple(found)


def module_of(name: str) -> str:
    """The module of ours that an imported name is or lies in."""
    while name not in OURS and "." in name:
        name = name.rpartition(".")[0]
    return name


def layer_of(module: str) -> str:
    """The row of a module of `miles`."""
    part = module.split(".")[1] if "." in module else "__init__"
    return next((layer for layer, row in TABLE.items() if part in row.modules.split()), "")


def third_party(name: str) -> str:
    """The distribution's package that a name comes from; empty for the standard library and
    ours."""
    top = name.partition(".")[0]
    return "" if top in sys.stdlib_module_names or top in ("miles", "miles_plugins") else top


def faults_of_core(module: str, path: Path) -> list[str]:
    """What a module of `miles` imports and may not."""
    layer = layer_of(module)
    if not layer:
        return [f"{module} is in no row of TABLE in {Path(__file__).name}"]
    row, faults = TABLE[layer], []
    for found in imports(path):
        if found.name.startswith("miles_plugins"):
            faults.append(f"{path}:{found.line} imports {found.name}: the core names no plugin")
        elif third := third_party(found.name):
            if third not in row.third.split():
                faults.append(f"{path}:{found.line} imports {third}; {layer} may not")
        elif found.name.startswith("miles."):
            other = layer_of(module_of(found.name))
            if other not in row.layers.split():
                what = f"{found.name} ({other})"
                faults.append(f"{path}:{found.line} imports {what}; {layer} may not")
    return faults


def faults_of_plugin(path: Path, own: str) -> list[str]:
    """What a plugin's file imports and may not; `own` is the package that it may import freely."""
    faults = []
    for found in imports(path):
        name = found.name
        if name.partition(".")[0] == "miles":
            facade = module_of(name) == "miles"
            if not facade and not name.startswith(PLUGINS_MAY):
                faults.append(f"{path}:{found.line} imports {name}; import it from `miles`")
        elif name.startswith("miles_plugins") and not f"{name}.".startswith(f"{own}."):
            faults.append(f"{path}:{found.line} imports {name}, of another kind or distribution")
    return faults


# a test a rule, not one a module: every module's fault is told all the same


def test_core_modules_import_what_their_rows_allow() -> None:
    core = modules("miles")
    assert "miles.loop" in core
    faults = [fault for module, path in core.items() for fault in faults_of_core(module, path)]
    assert not faults, "\n".join(faults)


def test_built_ins_import_the_facade_and_their_own_kind() -> None:
    built_in = modules("miles_plugins")
    assert "miles_plugins.hooks" in built_in
    faults = []
    for module, path in built_in.items():
        # the hook module is of no kind: it offers what several of them have
        kind = ".".join(module.split(".")[:2])
        own = "miles_plugins" if module == "miles_plugins.hooks" else kind
        faults += faults_of_plugin(path, own)
    assert not faults, "\n".join(faults)


def test_contrib_imports_the_facade() -> None:
    contrib = sorted((ROOT / "plugins-contrib").glob("*/src/**/*.py"))
    assert contrib
    faults = [fault for path in contrib for fault in faults_of_plugin(path, "nothing")]
    assert not faults, "\n".join(faults)


@cache
def loaded_by(module: str) -> frozenset[str]:
    """Third parties that importing a module of ours loads, through every module on the way."""
    seen: set[str] = set()
    third: set[str] = set()
    todo = [module]
    while todo:
        name = todo.pop()
        if name in seen or name not in OURS:
            continue
        seen.add(name)
        todo.append(name.rpartition(".")[0])  # its package's __init__ runs first
        for found in imports(OURS[name]):
            if found.eager:
                todo.append(module_of(found.name))
                third.add(third_party(found.name))
    return frozenset(third - {""})


def entry_point_modules() -> list[str]:
    """Modules that our own entry points and scripts name."""
    ours = distribution("miles").entry_points
    return sorted({entry.module for entry in ours})


@pytest.mark.parametrize("module", entry_point_modules())
def test_entry_point_module_loads_nothing_heavy(module: str) -> None:
    assert module in OURS, f"an entry point names {module}, which is not there"
    heavy = loaded_by(module) & HEAVY
    assert not heavy, f"importing {module} loads {', '.join(sorted(heavy))}"


def test_driver_modules_never_import_anything_heavy() -> None:
    light = [module for module in modules("miles") if layer_of(module) in LIGHT]
    assert "miles.loop" in light
    faults = [
        f"{module} imports {found.name} at line {found.line}"
        for module in light
        for found in imports(OURS[module])
        if third_party(found.name) in HEAVY
    ]
    faults += [
        f"{module} loads {sorted(h)}" for module in light if (h := loaded_by(module) & HEAVY)
    ]
    assert not faults, "\n".join(faults)


def test_core_names_no_built_in() -> None:
    """No string in the core is a name that an entry point registers; `conf/` chooses names."""
    names = {e.name for e in distribution("miles").entry_points if e.group.startswith("miles.")}
    found = []
    for module, path in modules("miles").items():
        if layer_of(module) in ("torch", "testing"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            text = node.value if isinstance(node, ast.Constant) else None
            if isinstance(text, str) and text in names and text not in WORDS:
                found.append(f"{path}:{node.lineno} says {text!r}")
    assert not found, "\n".join(found)


WORDS = {"local", "torch", "none", "process", "tools", "bytes", "terminal", "fleet"}
"""Built-in names that are also plain words of the core: a local plugin file, the package torch,
the tools of a request, several engines."""


# ---------------------------------------------------------------- the checks can fail


def test_layers_notice_a_forbidden_import(tmp_path: Path) -> None:
    bad = tmp_path / "bad.py"
    bad.write_text(
        "import miles_plugins.engine.torch\n"
        "from miles import run\n"
        "def f():\n    import torch\n    from miles.loop import train\n"
    )
    faults = "\n".join(faults_of_core("miles.buffer", bad))
    for said in ("the core names no plugin", "imports torch; loop may not", "miles.run (assembly)"):
        assert said in faults
    assert len(faults_of_core("miles.buffer", bad)) == 3
    assert "in no row of TABLE" in faults_of_core("miles.helpers", bad)[0]


def test_layers_notice_a_plugin_reaching_into_the_core(tmp_path: Path) -> None:
    bad = tmp_path / "bad.py"
    bad.write_text(
        "from miles import Context, loop\n"
        "from miles.learn import losses\n"
        "import miles_plugins.engine.torch\n"
        "from miles_plugins.tito.bytes import Bytes\n"
        "import miles.plugins\n"
    )
    faults = "\n".join(faults_of_plugin(bad, "miles_plugins.engine"))
    assert "miles.loop; import it from `miles`" in faults
    assert "miles_plugins.tito.bytes.Bytes, of another kind" in faults
    assert "imports miles.plugins" in faults
    assert len(faults.splitlines()) == 3
