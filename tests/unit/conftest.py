"""Distributions made for one test: metadata and modules on the path, as pip would leave them."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

COMPONENT = '''
from dataclasses import dataclass

from miles import SingleTurn, Task


class Words:
    """Says a word."""

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Config:
        word: str = "yes"
        """What to say."""
        times: int = 1
        """How often."""

    def __init__(self, config, context):
        self.config = config

    def tasks(self, split):
        return [Task(id="1", prompt="say ", answer=self.config.word, solution=self.config.word)]

    def episode(self, task, seed):
        return SingleTurn(task.prompt, lambda text: float(text == task.answer))
'''
"""A small environment; tests change it by replacing text."""


@pytest.fixture
def install(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Path]]:
    """`install("dist-name", {"miles.environment": {"words": "mod:Words"}}, {"mod.py": text})` puts
    a distribution in front of the path and returns its folder."""
    modules: set[str] = set()

    def put(
        name: str,
        entry_points: Mapping[str, Mapping[str, str]],
        files: Mapping[str, str] | None = None,
        *,
        version: str = "1.0",
    ) -> Path:
        folder = tmp_path_factory.mktemp("site")
        info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        lines = []
        for group, points in entry_points.items():
            lines += [f"[{group}]", *(f"{n} = {target}" for n, target in points.items())]
        (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
        for path, text in (files or {}).items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text)
            modules.add(path.split("/")[0].removesuffix(".py"))
        monkeypatch.syspath_prepend(folder)
        monkeypatch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
        return folder

    yield put
    for module in [m for m in sys.modules if m.split(".")[0] in modules]:
        del sys.modules[module]


@pytest.fixture
def component() -> str:
    """Source of a small environment, class `Words`."""
    return COMPONENT
