"""SGLang servers as engines: started and owned, or somebody else's that are given by address.

This module holds the component and the life of one server; requests are `asking`, weights
`publishing`, what a server is started with `command`. Nothing of SGLang is imported.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any, Literal

from miles import Array, Completion, ConfigError, Context, EngineError, Request, WeightSyncError
from miles_plugins.engine.sglang import checks, command, wording
from miles_plugins.engine.sglang.asking import Asking
from miles_plugins.engine.sglang.channel import Channel, opened
from miles_plugins.engine.sglang.http import Http
from miles_plugins.engine.sglang.pairs import Pair
from miles_plugins.engine.sglang.publishing import LOST, Publishing, Unknown, bracket, update_all
from miles_plugins.engine.sglang.server import Server, Slot
from miles_plugins.engine.sglang.starting import key_of, start
from miles_plugins.engine.sglang.watching import Watch

__all__ = ["Sglang"]

_log = logging.getLogger(__name__)
_MEMORY = ("kv_cache", "weights")


class Sglang:
    """SGLang servers, started and owned (`python` is an interpreter that has SGLang), or running
    ones given by `url`.

    Log-probs are the server's: under the whole distribution at the sampling temperature. What top-p
    or top-k cut away is not told, so `truncated_logprobs` are None. Which token is of which version
    is exact across updates: by the server's own spans where it tells them, else requests are cut
    for the update and go on after it. Seeds decide only with `deterministic`. Experts are those of
    the forward that sampled a token. The version of a server that was never given weights is 0.
    """

    samples = True
    process = "worker"
    attached = True

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Config:
        """Which servers, what they are started with, and how long things may take."""

        workers: int = 1
        """Servers, each with all the weights; a conversation stays with one of them."""
        url: str = ""
        """Addresses of running servers instead, such as `http://127.0.0.1:30000`, as many as
        workers, separated by commas; empty starts our own."""
        prefill_url: str = ""
        """Servers that compute prompts for those of `url`, which then only decode; in pairs."""
        api_key_file: str = ""
        """File that holds the `--api-key` of servers given by `url`; empty sends none. Our own
        servers get a key that nobody else knows."""
        python: str = ""
        """Interpreter of an environment with SGLang; empty is the one that runs miles."""
        port: int = 0
        """Port of the first server of our own, the others count up; 0 takes free ones."""
        device: Literal["cuda", "cpu"] = "cuda"
        """Where our own servers compute."""
        first_gpu: int = 0
        """First GPU that our own servers use; the others count up."""
        tp: int = 1
        """GPUs that share the tensors of one server."""
        dp: int = 1
        """Data-parallel ranks of one server; a conversation stays with one of them."""
        dp_attention: bool = False
        """Data parallelism of attention alone, within the `tp` GPUs."""
        memory_fraction: float = 0.0
        """Share of a GPU's memory for weights and cache; 0 is SGLang's choice."""
        max_running: int = 0
        """Requests that decode together; 0 is SGLang's choice."""
        max_len: int = 0
        """Longest prompt and completion together; 0 is the model's own."""
        deterministic: bool = False
        """Seeds decide what is sampled, whatever else runs; slower."""
        skip_tokenizer: bool = True
        """Only token ids pass; images need a tokenizer and a processor, and false."""
        speculative: Mapping[str, Any] = field(default_factory=dict)
        """Speculative decoding: SGLang's flags without `speculative_`, such as `algorithm` and
        `num_steps`; drafts inside the checkpoint only."""
        flags: Mapping[str, Any] = field(default_factory=dict)
        """More flags of `sglang.launch_server`, such as `attention_backend: triton`."""
        environment: Mapping[str, str] = field(default_factory=dict)
        """Environment variables of the server; recorded with its command."""
        start_timeout_s: float = 900.0
        """Seconds until a server of our own must be well, or one of others that is away back."""
        timeout_s: float = 600.0
        """Seconds one completion may take."""
        update_timeout_s: float = 600.0
        """Seconds new weights may take in a server."""
        silent_s: float = 15.0
        """Seconds without a sign of life after which a server counts as hung, but in an update."""
        connect_s: float = 10.0
        """Seconds a connection may take, and every question that samples nothing."""
        connections: int = 1024
        """Requests at once; more wait here."""
        stream_interval: int = 4
        """Tokens between two parts of a stream; those of servers given by `url` repeat the parts
        before, unless they have `--incremental-streaming-output`, as our own do."""
        together: int = 32
        """Most requests that share a question to a server when they are asked at once; 1: none."""
        prove: bool = True
        """Prove a server's first update, and those whose contents the transport compares: scramble
        its weights, read them again, and compare checksums, also with those of other servers that
        read the same bytes."""

    awaits = classmethod(checks.awaits)
    check = classmethod(checks.check)
    claims = classmethod(checks.claims)
    warnings = classmethod(checks.warnings)

    @classmethod
    def example_config(cls, directory: Path) -> Mapping[str, Any]:
        """For the contract suite: a server that is not there."""
        return {"url": "http://127.0.0.1:9"}

    def __init__(self, config: Config, context: Context) -> None:
        faults = [*command.flag_faults(config), *checks.url_faults(config)]
        if faults:
            raise ConfigError("\n".join(f"engine sglang: {fault}" for fault in faults))
        self.config = config
        self._context = context
        self._folder = Path(context.directory) / "engines"
        urls, prefills = checks.listed(config.url), checks.listed(config.prefill_url)
        self._slot = Slot(self._folder, len(urls) or None) if len(urls) != 1 else None
        self._number = number = 0 if self._slot is None else self._slot.number
        self._server: Server | None = None
        key = key_of(config)
        if not urls:
            self._server = start(config, context, self._folder, number)
            key = self._server.key
        limits: dict[str, Any] = {"connect_s": config.connect_s, "connections": config.connections}
        self._http = Http(
            urls[number] if urls else self._server.url if self._server else "",
            key=key,
            lost=self._server.lost if self._server else str,
            **limits,
        )
        self._pair = Pair(Http(prefills[number], key=key, **limits)) if prefills else None
        self._asking = Asking(
            self._http,
            timeout_s=config.timeout_s,
            stream_interval=config.stream_interval,
            together=config.together,
            topk=checks.topk(context.model),
            pair=self._pair,
            temperature=context.settings.temperature,
        )
        servers = [self._http, *([self._pair.http] if self._pair else [])]
        self._publishing = [
            Publishing(
                one,
                limit=config.update_timeout_s,
                record=self._folder / "checksums",
                prove=config.prove and self._pair is None,
            )
            for one in servers
        ]
        self._watch = Watch(
            self._http,
            server=self._server,
            pair=self._pair,
            start_timeout_s=config.start_timeout_s,
            silent_s=config.silent_s,
            failing=self._asking.failing,
        )
        self._turn = asyncio.Lock()
        self._paused = self._asleep = self._told = False

    # ------------------------------------------------------------ requests

    async def generate(self, request: Request) -> Completion:
        """Sample one completion. Raises `EngineError` when the server refuses, fails, says what
        cannot be, or is silent for `timeout_s`."""
        await self._usable()
        return await self._asking.generate(request)

    async def stream(self, request: Request) -> AsyncGenerator[Array | Completion, None]:
        """As `generate`: (new tokens,) int32 as they come, last the completion. Leaving early
        aborts the request."""
        await self._usable()
        async with aclosing(self._asking.stream(request)) as items:
            async for item in items:
                yield item

    async def score(self, tokens: Array) -> Array:
        """(tokens,) float32: log-prob of each token given those before it, 0 for the first. Raises
        `EngineError`, also where the run samples at another temperature than 1."""
        await self._usable()
        return await self._asking.score(tokens)

    async def abort(self, keys: Sequence[str] | None = None) -> int:
        """End requests of these routing keys (None: all of this client) with what they have; how
        many there were."""
        return await self._asking.abort(keys)

    async def _usable(self) -> None:
        self._watch.usable()
        facts = self._watch.facts or await self._watch.ready()
        self._asking.joins = facts.joins
        if self._asking.newest < 0:
            if self._server is not None:
                raise EngineError("engine sglang: it has no weights yet")
            await self.version()

    # ------------------------------------------------------------ the server

    @property
    def dp_ranks(self) -> int:
        """Data-parallel ranks that a routing key can be bound to; 1 before the server is well."""
        return 1 if self._watch.facts is None else self._watch.facts.dp_ranks

    async def version(self) -> int:
        """What is served; -1 before a server of our own has weights. Of somebody else's the
        `weight_version`, 0 where that is no number. Raises `EngineError` when the server is dead,
        hangs, or may have half of an update."""
        await self._watch.alive()
        if self._server is None and not self._watch.busy:
            try:
                info = await self._http.ask("GET", "/model_info")
            except wording.NotFound:  # its name before 0.5.16
                info = await self._http.ask("GET", "/get_model_info")
            found = wording.version(info)
            self._asking.newest = max(self._asking.newest, found)
            return found
        return self._asking.newest

    async def health(self) -> Mapping[str, float]:
        """`active` requests of this client now, `waiting` in the server, `kv_used` of its cache;
        since it was made: `tokens` sampled, `busy_s`, `prompt_tokens`, `cached_tokens` of them, and
        of speculative decoding `verified` forwards, `drafted` tokens, `accepted` of them.
        `max_len` and `dp_ranks` are the server's. Raises `EngineError` when it is not well."""
        facts = await self._watch.ready()
        await self._watch.alive()
        max_len = facts.max_len or checks.context_length(self._context.model)
        longest = {} if max_len is None else {"max_len": float(max_len)}
        asking = self._asking
        return {
            **{"waiting": 0.0, **self._watch.load},
            "active": float(len(asking.running)),
            **asking.counts,
            **longest,
            "dp_ranks": float(facts.dp_ranks),
        }

    # ------------------------------------------------------------ weights and life cycle

    async def load(self, version: int, weights: Iterable[tuple[str, Any]]) -> None:
        """Serve (Hugging Face name, tensor) weights as `version`, through files in the run's
        directory. Raises as `load_directory`."""
        from miles_plugins.engine.sglang.writing import written

        own = self._folder / f"weights-{self._number}"
        async with written(self._context.model, weights, own) as folder:
            await self.load_directory(version, folder)

    async def load_directory(self, version: int, directory: Path) -> None:
        """Have the server read a Hugging Face directory as `version`; running requests end, go on
        with their caches or without, as `pause` says. Raises `WeightSyncError`: before anything
        changed the old weights are served, afterwards the engine is of no use any more."""
        async with self._bracketed(version) as how:
            servers = self._publishing
            await update_all(servers, version, directory, how=how, resume=self._resume)
            self._asking.newest = version

    def prove_next(self) -> None:
        """Prove the next update as the first was, unless `prove` is false."""
        for one in self._publishing:
            one.prove_next()

    @asynccontextmanager
    async def updating(self, version: int) -> AsyncGenerator[Channel, None]:
        """For transports that write over SGLang's own routes: paused inside, it then serves
        `version`; after an error the old weights, if none was written yet and the server still
        answers, or nothing any more."""
        if self._pair is not None:
            raise WeightSyncError(
                "engine sglang: servers that only prefill or decode take weights by transport=disk"
            )
        await self._watch.ready()
        channel = await opened(self._http, version, limit=self.config.update_timeout_s)
        async with self._bracketed(version) as how:
            channel.flush = how != "in_place"
            try:
                await self._publishing[0].pause("abort" if how == "cut" else how)
                await channel.begin()
                yield channel
                await channel.end()
            except (WeightSyncError, EngineError) as error:
                if channel.touched:
                    raise Unknown(f"engine sglang: version {version}: {error}") from error
                await channel.end()
                await self._resume()
                raise WeightSyncError(f"engine sglang: version {version}: {error}") from error
            self._asking.newest = version
            await self._resume()

    @asynccontextmanager
    async def _bracketed(self, version: int) -> AsyncGenerator[str, None]:
        """Around an update: what becomes of running requests, and of the engine when it fails."""
        facts = await self._watch.ready()
        async with self._turn:
            asking = self._asking
            if asking.newest < 0 and not asking.running:
                how, why = "abort", ""
            else:
                pause = self._context.settings.pause
                how, why = bracket(pause, facts, tells_spans=asking.tells_spans)
            if why and not self._told:
                _log.warning("engine sglang: requests are cut for new weights: %s", why)
                self._told = True
            asking.exact = True
            asking.salted = how == "in_place"
            asking.close(cut=how == "cut")
            self._watch.busy = True
            try:
                if how in ("cut", "abort"):
                    await asking.ended()
                yield how
            except LOST as error:
                self._watch.broken = str(error)
                raise
            except EngineError as error:
                self._watch.broken = str(error)
                raise WeightSyncError(f"engine sglang: version {version}: {error}") from error
            except asyncio.CancelledError:
                self._watch.broken = f"loading version {version} was given up half way"
                raise
            finally:
                self._watch.busy = False
                self._watch.alive_at = monotonic()
                asking.open(self._watch.broken)

    async def _resume(self) -> None:
        if not self._paused:
            for one in self._publishing:
                await one.resume()

    async def checksums(self) -> Mapping[str, str]:
        """Checksum of every tensor, under SGLang's own names. Raises `EngineError`."""
        return await self._publishing[0].checksums()

    async def pause(self, mode: Literal["in_place", "retract", "abort"] = "in_place") -> None:
        """Stop decoding; requests wait, with their caches or without, or end."""
        self._paused = True
        for one in self._publishing:
            await one.pause(mode)

    async def resume(self) -> None:
        """Go on."""
        self._paused = False
        await self._resume()

    async def flush(self) -> None:
        """Forget cached prompts. Raises `EngineError` while requests are running."""
        await self._http.ask("POST", "/flush_cache", {})

    async def sleep(self, tags: Sequence[str] = _MEMORY) -> None:
        """Free device memory, of `kv_cache`, `weights` or both; what was freed has no contents
        until it is loaded. Raises `EngineError` when the server cannot."""
        facts = await self._watch.ready()
        if not facts.memory_saver:
            if self.config.device == "cpu" and self._server is not None:
                return  # there is no device to free
            raise EngineError(
                f"engine sglang: {self._http.url} needs --enable-memory-saver to sleep"
            )
        await self._watch.idle()
        body, limit = {"tags": list(tags)}, self.config.update_timeout_s
        await self._http.ask("POST", "/release_memory_occupation", body, limit=limit)
        self._asleep = self._watch.busy = True

    async def wake(self, tags: Sequence[str] = _MEMORY) -> None:
        """Take it back."""
        if not self._asleep:
            return
        body, limit = {"tags": list(tags)}, self.config.update_timeout_s
        await self._http.ask("POST", "/resume_memory_occupation", body, limit=limit)
        self._asleep = self._watch.busy = False

    async def close(self) -> None:
        """Hang up; a server of our own is ended."""
        await self._http.close()
        if self._pair is not None:
            await self._pair.http.close()
        if self._server is not None:
            self._server.close()
            await asyncio.to_thread(self._server.wait, 10.0)
        if self._slot is not None:
            self._slot.release()
