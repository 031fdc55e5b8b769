"""What every test shares: one thread, no network, and the slow tests only when they are asked
for."""

from __future__ import annotations

import os

# before torch or a tokenizer is imported, here or in a worker that a test starts
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import asyncio
import gc
import logging
import re
import resource
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import hypothesis
import pytest

hypothesis.settings.register_profile("busy", deadline=None, print_blob=True)
hypothesis.settings.load_profile("busy")

ASKED_FOR = ("slow", "bench", "sglang")
SLOW_CONTRACTS = ("[transport-rdma-", "[environment-terminal-")
"""Contract suites of seconds a test: a marker makes those, and none can be put on one of them."""


class _Lost(logging.Handler):
    """Keeps what asyncio says of tasks and futures whose exception nobody has seen, those left out
    that belong to a package, as what a client that a test never closed does when it is
    collected."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        said = record.getMessage()
        where = re.search(r"defined at (\S+)", said)
        if "was never retrieved" in said and not (where and "site-packages" in where[1]):
            self.said.append(logging.Formatter().format(record))


_lost = _Lost()
logging.getLogger(asyncio.__name__).addHandler(_lost)


@pytest.fixture(autouse=True)
def _nothing_is_lost() -> Iterator[None]:
    """A task that fails unheard is a fault of what started it, and prints where people read."""
    yield
    said, _lost.said = _lost.said, []
    assert not said, "\n".join(said)


@pytest.fixture
def no_descriptors() -> Callable[[], AbstractContextManager[None]]:
    """`with no_descriptors():` nothing more can be opened in this process, nor a child started, as
    when it has too many files open."""

    @contextmanager
    def without() -> Iterator[None]:
        before = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, before[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)

    return without


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """What is imported and collected stays: the collector, which would walk all of it for half a
    second at a time, looks only at what tests make."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)  # before pytest looks at `-m`
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out tests of these marks unless `-m` chooses, or they are named one by one."""
    for item in items:
        if "keeps_its_contract" in item.name and any(part in item.name for part in SLOW_CONTRACTS):
            item.add_marker("slow")
    if config.getoption("markexpr") or any("::" in argument for argument in config.args):
        return
    left_out = [item for item in items if any(item.get_closest_marker(m) for m in ASKED_FOR)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in set(left_out)]


@pytest.fixture(scope="session")
def sglang_python() -> str:
    """The interpreter of an environment with SGLang."""
    found = os.environ.get("MILES_TEST_SGLANG", "")
    if not found:
        pytest.skip(
            "MILES_TEST_SGLANG names no interpreter with SGLang; tests/sglang_cpu/install.sh makes "
            "an environment"
        )
    return found
