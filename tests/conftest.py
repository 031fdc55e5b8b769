"""What every test shares: one thread, no network, and the slow tests only when they are asked
for."""

from __future__ import annotations

import os

# before torch or a tokenizer is imported, here or in a worker that a test starts
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import hypothesis
import pytest

hypothesis.settings.register_profile("busy", deadline=None, print_blob=True)
hypothesis.settings.load_profile("busy")

ASKED_FOR = ("slow", "bench", "sglang")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out tests of these marks unless `-m` chooses, or they are named one by one."""
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
