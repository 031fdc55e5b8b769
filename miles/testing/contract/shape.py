"""What holds for a component of every kind: its `Config`, its docstring, its methods, and a light
import.

What the component does is the business of its kind's own suite.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import subprocess
import sys
from functools import cache
from typing import Any

from miles.errors import ConfigError
from miles.protocols import Spec
from miles.registry import schema
from miles.registry.conformance import component_faults
from miles.testing.contract.case import Case, expect, raises

HEAVY = ("torch", "transformers", "ray", "sglang", "vllm", "tensorflow", "jax")

_IMPORT = """
import importlib, importlib.util, sys
name, path = sys.argv[1], sys.argv[2]
if path:
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
else:
    importlib.import_module(name)
print(",".join(m for m in sys.argv[3].split(",") if m in sys.modules))
"""


def check_builds(case: Case) -> None:
    """It is built from a valid config and its context."""
    case.build()


def check_docstring(case: Case) -> None:
    """Its class says in its docstring what it is; `miles plugins show` prints that."""
    own = case.component.__dict__.get("__doc__") or ""
    expect(len(own.split()) >= 3, f"{case.component.__qualname__} has no docstring of its own")


def check_config_frozen(case: Case) -> None:
    """Its `Config` is a frozen, slotted, keyword-only dataclass, and so are those nested in it."""
    config = getattr(case.component, "Config", None)
    expect(
        inspect.isclass(config) and dataclasses.is_dataclass(config),
        f"{case.component.__qualname__} has no nested dataclass `Config`",
    )
    for cls in _nested(config):
        expect(schema.frozen_dataclass(cls), f"{cls.__qualname__} is not frozen")
        expect("__slots__" in cls.__dict__, f"{cls.__qualname__} has no slots")
        positional = [f.name for f in dataclasses.fields(cls) if f.init and not f.kw_only]
        expect(not positional, f"{cls.__qualname__}: {', '.join(positional)} not keyword-only")


def check_config_documented(case: Case) -> None:
    """A sentence stands under every field of its `Config`; that is the field's documentation."""
    for cls in _nested(_config(case)):
        missing = [f.name for f in schema.fields(cls) if not f.doc]
        expect(not missing, f"{cls.__qualname__}: no sentence under {', '.join(missing)}")


def check_config_defaults_convert(case: Case) -> None:
    """Its `Config`'s defaults, written out as plain values, convert to the very same config."""
    config = _config(case)
    without = schema.build(config, case.config, owner=case.title)
    written = {**schema.defaults(config), **case.config}
    made = schema.build(config, written, owner=case.title)
    expect(made == without, f"written-out defaults give {made}, leaving them out gives {without}")


def check_config_refuses_unknown_keys(case: Case) -> None:
    """A key that its `Config` does not have is a `ConfigError`."""
    config = {**case.config, "no_such_key": 1}
    with raises(ConfigError, "an unknown key"):
        case.registry.build(Spec(kind=case.kind, name=case.name, config=config), case.around())


def check_methods(case: Case) -> None:
    """It has what its protocol says, coroutines exactly where the protocol has them."""
    faults = component_faults(case.kind, case.build())
    expect(not faults, "; ".join(faults))


def check_import_is_light(case: Case) -> None:
    """The module that its entry point names imports without torch, so that listing stays quick."""
    module = case.component.__module__
    try:
        found = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        found = None
    if hasattr(sys.modules.get(module), "__miles_source__"):
        found = None  # a local file: this process has it under a name that no other can import
    ran = _installed(module, found.origin) if found else _imported(module, _source(case.component))
    expect(ran.returncode == 0, f"importing {module} alone failed: {ran.stderr.strip()[-400:]}")
    expect(
        not ran.stdout.strip(),
        f"importing {module} imports {ran.stdout.strip()}; move that into a neighbouring module",
    )


def _imported(module: str, path: str) -> subprocess.CompletedProcess[str]:
    """A process of its own that imports a module, from a file unless `path` is empty, and prints
    what of `HEAVY` that brought."""
    return subprocess.run(
        [sys.executable, "-c", _IMPORT, module, path, ",".join(HEAVY)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@cache  # many components, as those of `tito`, share a module
def _installed(module: str, origin: str | None) -> subprocess.CompletedProcess[str]:
    """The same of a module on the path, once for each file that it is found in."""
    return _imported(module, "")


def _source(component: type) -> str:
    """The file a class was read from, also when its module is no longer registered."""
    functions = [f for f in vars(component).values() if inspect.isfunction(f)]
    if functions:
        return functions[0].__code__.co_filename
    return getattr(sys.modules.get(component.__module__), "__file__", None) or ""


def _config(case: Case) -> Any:
    return case.component.Config  # type: ignore[attr-defined]


def _nested(config: Any) -> list[type]:
    """A config class and the dataclasses that its fields hold by default."""
    found = [config]
    for field in dataclasses.fields(config):
        factory = field.default_factory
        if inspect.isclass(factory) and dataclasses.is_dataclass(factory):
            found += _nested(factory)
    return found
