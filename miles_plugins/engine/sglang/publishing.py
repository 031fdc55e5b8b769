"""How a server takes new weights: the bracket around an update, and the proof that it took them.

What is asked before and after an update, in which order; the requests themselves are the engine's.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from miles import EngineError, MilesError, WeightsDiffer, WeightSyncError
from miles_plugins.engine.sglang import facts as says
from miles_plugins.engine.sglang import sources, wording
from miles_plugins.engine.sglang.http import Http
from miles_plugins.engine.sglang.server import write_json

__all__ = ["LOST", "Bracket", "Publishing", "Unknown", "bracket", "update_all"]

Bracket = Literal["in_place", "retract", "abort", "cut"]
_log = logging.getLogger(__name__)
_SOON_S = 60.0  # for what takes moments, also while many requests end; a server may hang in it
_CHUNK = 1 << 22  # bytes read at a time


class Unknown(WeightSyncError):
    """An update failed after it may have begun: what the server now has is not known."""


LOST = (Unknown, WeightsDiffer)
"""After which a server is of no use any more."""


def bracket(pause: str, facts: says.Facts, *, tells_spans: bool | None) -> tuple[Bracket, str]:
    """What is done to running requests so that every token's version is known, and why that is
    another than what was asked for.

    `cut` ends them on the server and asks for the rest after the update: exact with every version.
    A server that tells its spans may keep them (`retract`), and their caches too (`in_place`) when
    its forwards do not overlap: an overlapping one has a token of the old weights that it counts
    only after the pause.
    """
    if pause == "abort":
        return "abort", ""
    if tells_spans is None:
        return "cut", ""  # it has not said anything yet
    if not tells_spans:
        why = f"SGLang {facts.version} does not tell where in a completion the weights changed"
        return "cut", "" if pause == "retract" else why
    if pause == "in_place" and facts.overlapped:
        return "cut", "the server overlaps its schedule (it needs --disable-overlap-schedule)"
    return ("in_place" if pause == "in_place" else "retract"), ""


class Publishing:
    """Updates of one server. Checksums that were seen go to `record`, a folder of the run."""

    def __init__(self, http: Http, *, limit: float, record: Path, prove: bool) -> None:
        self._http = http
        self._limit = limit
        self._soon = min(limit, _SOON_S)
        self._record = record
        self._prove = prove
        self._proven = False

    async def pause(self, mode: str) -> None:
        """`in_place` and `retract` keep requests; `abort` returns when all have ended."""
        await self._http.ask("POST", "/pause_generation", {"mode": mode}, limit=self._soon)
        _log.info("engine sglang: paused (%s)", mode)

    async def resume(self) -> None:
        """Go on."""
        await self._http.ask("POST", "/continue_generation", {}, limit=self._soon)

    async def checksums(self) -> dict[str, str]:
        """Tensor to checksum, under SGLang's own names. Raises `EngineError`."""
        body = {"action": "checksum"}
        reply = await self._http.ask("POST", "/weights_checker", body, limit=self._limit)
        return says.checksums(reply)

    def prove_next(self) -> None:
        """Prove the next update as the first was."""
        self._proven = False

    async def update(self, version: int, directory: Path, *, flush: bool) -> None:
        """Have the server read `directory` as `version`, and prove it the first time and after
        `prove_next`. Raises `WeightSyncError` when it refuses before anything changed, `Unknown`
        afterwards, `WeightsDiffer` when the proof fails, `OSError` and `ValueError` for files that
        cannot be read to compare with."""
        refuse(directory)
        await self._read(version, directory, flush=flush)
        if self._prove and not self._proven:
            await self._try(version, directory, flush=flush)
            self._proven = True

    async def _read(self, version: int, directory: Path, *, flush: bool) -> None:
        body = {
            "model_path": str(directory),
            "load_format": "auto",
            "weight_version": str(version),
            "flush_cache": flush,
        }
        try:
            reply = await self._http.ask(
                "POST", "/update_weights_from_disk", body, limit=self._limit
            )
        except EngineError as error:
            raise Unknown(f"engine sglang: loading version {version}: {error}") from error
        if wrong := says.verdict(reply):
            raise Unknown(f"engine sglang: loading version {version} from {directory}: {wrong}")
        _log.info("engine sglang: version %d: read", version)

    async def _try(self, version: int, directory: Path, *, flush: bool) -> None:
        """Scramble all tensors and read again: those whose checksums then differ did not come from
        the directory. The same bytes must also have given the same checksums to other servers.
        Raises as `update`."""
        try:
            first = await self.checksums()
        except wording.Refused as error:
            _log.warning("engine sglang: an update cannot be proved in this server: %s", error)
            return
        _log.info("engine sglang: version %d: checksums taken", version)
        body = {"action": "reset_tensors"}
        try:
            await self._http.ask("POST", "/weights_checker", body, limit=self._limit)
        except MilesError as error:  # some may be scrambled all the same, so they are read again
            _log.warning("engine sglang: weights cannot be scrambled: %s", error)
        else:
            _log.info("engine sglang: version %d: scrambled", version)
        await self._read(version, directory, flush=flush)
        second = await self.checksums()
        _log.info("engine sglang: version %d: checksums taken again", version)
        try:
            _differ(version, first, second, "do not come from the files")
        except WeightsDiffer as error:
            if "lm_head.weight" in str(error) and _tied(directory):
                error.add_note(
                    "the server has an output head of its own, and these weights tie it to the "
                    f"embedding; {sources.INSTEAD}"
                )
            raise
        digest = await asyncio.to_thread(content, directory)  # every byte: not in the event loop
        seen = self._record / f"{digest}.json"
        if seen.exists():
            theirs = _recorded(seen)
            _differ(version, theirs, second, "differ from what another server made of these files")
            return
        try:
            self._record.mkdir(parents=True, exist_ok=True)
            write_json(seen, second)
        except OSError as error:
            _log.warning("engine sglang: other servers cannot be compared with this one: %s", error)


async def update_all(
    servers: Sequence[Publishing],
    version: int,
    directory: Path,
    *,
    how: str,
    resume: Callable[[], Awaitable[None]],
) -> None:
    """Pause servers, have each read `directory` as `version`, and `resume` them. Raises
    `WeightSyncError` when nothing changed, and then they go on; `Unknown` or `WeightsDiffer`
    afterwards."""
    for one in servers:
        await one.pause("abort" if how == "cut" else how)
    try:
        for one in servers:
            await one.update(version, directory, flush=how != "in_place")
    except LOST:
        raise
    except WeightSyncError:
        await resume()
        raise
    except (OSError, ValueError) as error:  # the server took the weights, and others may use it
        await resume()
        what = f"{type(error).__name__}: {error}"
        raise Unknown(f"engine sglang: version {version} was not proved: {what}") from error
    await resume()


def _recorded(path: Path) -> dict[str, str]:
    """Checksums that another server gave. Raises `ValueError` when the file is damaged."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}); delete it") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} is damaged (it holds no object); delete it")
    return found


def _differ(version: int, one: dict[str, str], two: dict[str, str], what: str) -> None:
    wrong = sorted(name for name in one.keys() | two.keys() if one.get(name) != two.get(name))
    if wrong:
        more = f" and {len(wrong) - 8} more" if len(wrong) > 8 else ""
        raise WeightsDiffer(
            f"engine sglang: version {version}: {len(wrong)} of {len(two)} tensors {what}: "
            f"{', '.join(wrong[:8])}{more}"
        )


def _tied(directory: Path) -> bool:
    try:
        found = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(found, dict) and sources.tied(found)


def refuse(directory: Path) -> None:
    """Raises `WeightSyncError` for what is no checkpoint; nothing has changed then."""
    if not (directory / "config.json").is_file():
        raise WeightSyncError(f"engine sglang: {directory} has no config.json")
    if not any(directory.glob("*.safetensors")):
        raise WeightSyncError(f"engine sglang: {directory} holds no safetensors files")


def content(directory: Path, hashed: Callable[[], Any] = hashlib.blake2b) -> str:
    """A digest of the weights in a directory."""
    whole = hashed()
    for file in sorted(directory.glob("*.safetensors")):
        whole.update(file.name.encode())
        with file.open("rb") as data:
            while chunk := data.read(_CHUNK):
                whole.update(chunk)
    return str(whole.hexdigest())[:32]
