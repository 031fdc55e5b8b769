"""Workers of this machine whose start fails or is given up leave nothing behind."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from miles import Context, PluginError, Spec
from miles_plugins.runtime.local import Local

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("how", ["fails", "is cancelled"])
def test_local_worker_whose_start_ends_early_is_ended(tmp_path: Path, how: str) -> None:
    """It would keep its GPU until the run ends."""

    async def main() -> None:
        context = Context(directory=tmp_path)
        local = Local(Local.Config(), context)
        parts = (Spec(kind="environment", name="there-is-none", config={}),)
        starting = asyncio.create_task(local.start("engine", parts, context, world=2))
        if how == "fails":
            with pytest.raises(PluginError, match="there-is-none"):
                await starting
        else:
            await asyncio.sleep(0.2)
            processes = [process._process for process in local._processes]
            assert len(processes) == 2 and all(p.poll() is None for p in processes)
            starting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await starting
            assert all(p.poll() is not None for p in processes)
        assert local._processes == []

    asyncio.run(main())
