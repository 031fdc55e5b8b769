"""What the router's tests share: requests, a router over simulated engines, and waiting."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from miles.router import Router
from miles.testing import CachingEngine
from miles.types import Request, Sampling

QUICK: dict[str, Any] = {
    "check_every_s": 0.01,
    "check_timeout_s": 0.1,
    "readmission_timeout_s": 0.3,
    "control_timeout_s": 1.0,
}


@pytest.fixture
def ask() -> Callable[..., Request]:
    """`ask(key, size=10)` makes a request; its tokens are those of a prefix of one long prompt."""

    def make(key: str, size: int = 10, *, new: int = 4, turn: int = 0) -> Request:
        tokens = np.arange(size, dtype=np.int32)  # (tokens,) int32
        sampling = Sampling(max_new_tokens=new)
        return Request(id=f"{key}/{turn}", key=key, tokens=tokens, sampling=sampling, seed=turn)

    return make


@pytest.fixture
def fleet() -> Callable[..., tuple[Router, dict[str, CachingEngine]]]:
    """`fleet("ab", page=4, router_option=...)` makes one engine a letter and a router over them."""

    def make(names: str, config: Any = None, **how: Any) -> tuple[Router, dict[str, CachingEngine]]:
        engines = {name: CachingEngine(config) for name in names}
        return Router(engines, **(QUICK | how)), engines

    return make


@pytest.fixture
def until() -> Callable[..., Any]:
    """`await until(lambda: condition)`, for at most five seconds."""

    async def wait(condition: Callable[[], Any]) -> None:
        async with asyncio.timeout(5):
            while not condition():
                await asyncio.sleep(0.002)

    return wait
