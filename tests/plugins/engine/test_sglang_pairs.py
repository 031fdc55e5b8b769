"""Prefill and decode on two SGLang servers: neither dies unnoticed."""

from __future__ import annotations

import asyncio
import importlib.util
import time
from contextlib import AsyncExitStack
from pathlib import Path

import numpy as np
import pytest

from miles import Context, EngineError, Request, Sampling
from miles_plugins.engine.sglang import Sglang

_SPEC = importlib.util.spec_from_file_location(
    "native_server", Path(__file__).with_name("native_server.py")
)
native = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(native)


def _request(new):
    tokens = np.arange(40, 50, dtype=np.int32)
    sampling = Sampling(max_new_tokens=new)
    return Request(id="g0.0/0", key="g0.0", tokens=tokens, sampling=sampling, seed=5)


def _pair(tmp_path, function, **config):
    """Run a coroutine function of (client, what ends the prefill server, its URL)."""

    async def main():
        (tmp_path / "key").write_text(native.KEY)
        decode = native.NativeServer(disaggregation_mode="decode")
        async with decode.up() as second, AsyncExitStack() as held:
            prefill = native.NativeServer(disaggregation_mode="prefill")
            first = await held.enter_async_context(prefill.up())
            made = Sglang.Config(
                url=second, prefill_url=first, api_key_file=str(tmp_path / "key"), **config
            )
            client = Sglang(made, Context(directory=tmp_path))
            try:
                async with asyncio.timeout(20):
                    await function(client, prefill, held.aclose, first)
                    while decode.jobs:  # nothing is left decoding
                        await asyncio.sleep(0.001)
            finally:
                await client.close()

    asyncio.run(main())


@pytest.mark.parametrize("streamed", [False, True])
def test_prefill_server_that_dies_ends_its_requests_at_once(tmp_path, streamed):
    async def check(client, prefill, end, url):
        async def ask():
            if not streamed:
                return await client.generate(_request(100_000))
            return [part async for part in client.stream(_request(100_000))]

        asked = asyncio.create_task(ask())
        while not any(len(job.tokens) > 5 for job in prefill.jobs.values()):
            await asyncio.sleep(0.001)
        await end()
        began = time.monotonic()
        with pytest.raises(EngineError, match=f"POST {url}/generate"):
            await asked
        assert time.monotonic() - began < 1.0

    _pair(tmp_path, check)


def test_prefill_server_that_dies_makes_the_engine_unwell(tmp_path):
    async def check(client, prefill, end, url):
        await client.health()
        await end()
        client._watch.alive_at = float("-inf")
        began = time.monotonic()
        with pytest.raises(EngineError, match=f"GET {url}/"):
            await client.version()
        assert time.monotonic() - began < 1.0

    _pair(tmp_path, check, silent_s=0.5)


def test_prefill_server_that_hangs_makes_the_engine_unwell(tmp_path):
    async def check(client, prefill, end, url):
        await client.health()
        prefill.silent = {"/server_info"}
        client._watch.alive_at = float("-inf")
        with pytest.raises(EngineError, match=rf"GET {url}/server_info: no answer in 0\.2 s"):
            await client.version()

    _pair(tmp_path, check, silent_s=0.2)


def test_streams_of_a_pair_are_whole(tmp_path):
    async def check(client, prefill, end, url):
        parts = [part async for part in client.stream(_request(40))]
        assert len(parts) > 2
        assert np.concatenate(parts[:-1]).tolist() == parts[-1].tokens.tolist()
        assert parts[-1].tokens.tolist() == (await client.generate(_request(40))).tokens.tolist()

    _pair(tmp_path, check)
